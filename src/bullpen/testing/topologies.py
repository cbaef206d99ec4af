"""Start several private servers that belong together: a primary with replicas and sentinels, or a cluster.

In: which server binary. Out: real processes on loopback that fail over as in production, only faster (half a second
until a primary is taken for dead). Elsewhere: one server alone (`servers`).
"""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Self

from bullpen.testing.servers import RedisServer

__all__ = ["ClusterServers", "SentinelServers"]

_READY_DEADLINE_S = 30.0
_FAST_REPLICATION = ("--repl-diskless-sync-delay", "0")
_SLOTS = 16384


class _SentinelProcess(RedisServer):
    """Sentinels want a configuration file that they may rewrite; the rest is told to them by commands."""

    def _command_line(self) -> list[str]:
        configuration = self.directory / "sentinel.conf"
        if not configuration.exists():
            configuration.write_text(
                f"port {self.port}\nbind 127.0.0.1\ndir {self.directory}\nlogfile {self.directory / 'server.log'}\n"
            )
        return [str(self._binary), str(configuration), "--sentinel"]


class SentinelServers:
    """One primary, two replicas, three sentinels with a quorum of two."""

    service = "orders"

    def __init__(self, kind: str, *, down_after_ms: int, args: tuple[str, ...]) -> None:
        self.sentinels: list[RedisServer] = []
        self.nodes: list[RedisServer] = []
        """The data servers; the first one is the primary in the beginning."""
        try:
            first = RedisServer.start(kind, args=(*_FAST_REPLICATION, *args))
            self.nodes.append(first)
            for _ in range(2):
                follow = ("--replicaof", "127.0.0.1", str(first.port))
                self.nodes.append(RedisServer.start(kind, args=(*_FAST_REPLICATION, *args, *follow)))
            for _ in range(3):
                sentinel = _SentinelProcess.start(kind, unix=False)
                self.sentinels.append(sentinel)
                sentinel.command("SENTINEL", "MONITOR", self.service, "127.0.0.1", first.port, 2)
                for option, value in (("down-after-milliseconds", down_after_ms), ("failover-timeout", 3_000)):
                    sentinel.command("SENTINEL", "SET", self.service, option, value)
            _wait(self._is_settled, "sentinels that know each other and two replicas")
        except BaseException:
            self.close()
            raise

    @classmethod
    def start(cls, kind: str = "valkey", *, down_after_ms: int = 500, args: tuple[str, ...] = ()) -> Self:
        """Start all six and return when the sentinels know each other and the replicas. `args` are for the data
        servers."""
        return cls(kind, down_after_ms=down_after_ms, args=args)

    @property
    def url(self) -> str:
        """`redis+sentinel://…/<service>`."""
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{hosts}/{self.service}"

    @property
    def primary(self) -> RedisServer:
        """The server that the sentinels call primary now."""
        for sentinel in self.sentinels:
            with contextlib.suppress(Exception):  # a sentinel that was killed; the next one knows
                _, port = sentinel.command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.service)
                return next(node for node in self.nodes if node.port == int(port))
        raise RuntimeError("no sentinel answers")

    def kill_primary(self) -> RedisServer:
        """End the primary with SIGKILL and return it; the sentinels will choose another one."""
        primary = self.primary
        primary.kill()
        return primary

    def wait_for_failover(self, old: RedisServer) -> RedisServer:
        """Wait until another server than `old` is primary and takes writes, and return it."""

        def is_over() -> bool:
            return self.primary is not old and self.primary.command("ROLE")[0] == b"master"

        _wait(is_over, "a new primary")
        return self.primary

    def close(self) -> None:
        """Stop everything."""
        for server in (*self.sentinels, *self.nodes):
            server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _is_settled(self) -> bool:
        for sentinel in self.sentinels:
            flat = sentinel.command("SENTINEL", "MASTER", self.service)
            told = flat if isinstance(flat, dict) else dict(zip(flat[::2], flat[1::2], strict=True))
            if (told[b"num-other-sentinels"], told[b"num-slaves"]) != (b"2", b"2"):
                return False
        return all(node.command("INFO", "replication").get("master_link_status") == "up" for node in self.nodes[1:])


class ClusterServers:
    """A cluster of three primaries that share the slots evenly, each with `replicas` replicas."""

    def __init__(self, kind: str, *, replicas: int, args: tuple[str, ...]) -> None:
        self.nodes: list[RedisServer] = []
        """Primaries first."""
        quick = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000", "--cluster-replica-validity-factor", "0")
        try:
            for _ in range(3 * (1 + replicas)):
                self.nodes.append(_start_node(kind, (*quick, *_FAST_REPLICATION, *args)))
            self._join(replicas)
        except BaseException:
            self.close()
            raise

    @classmethod
    def start(cls, kind: str = "valkey", *, replicas: int = 0, args: tuple[str, ...] = ()) -> Self:
        """Start the nodes, join them, and return when all slots are served."""
        return cls(kind, replicas=replicas, args=args)

    @property
    def url(self) -> str:
        """`redis+cluster://…` with the first two nodes as seeds."""
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes[:2])

    def node_of(self, slot: int) -> RedisServer:
        """The primary that serves a slot now."""
        for node in self.nodes:
            if not node.is_running:
                continue
            for first, last, owner, *_ in node.command("CLUSTER", "SLOTS"):
                if first <= slot <= last:
                    return next(known for known in self.nodes if known.port == owner[1])
        raise RuntimeError(f"nobody serves slot {slot}")

    def other_primary(self, node: RedisServer) -> RedisServer:
        """Some primary that is not `node`."""
        return next(other for other in self.nodes[:3] if other is not node)

    def node_id(self, node: RedisServer) -> str:
        raw: bytes = node.command("CLUSTER", "MYID")
        return raw.decode()

    def begin_move(self, slot: int, to: RedisServer) -> None:
        """Mark a slot as being on its way. Keys follow with `move_keys`."""
        source = self.node_of(slot)
        to.command("CLUSTER", "SETSLOT", slot, "IMPORTING", self.node_id(source))
        source.command("CLUSTER", "SETSLOT", slot, "MIGRATING", self.node_id(to))

    def move_keys(self, slot: int, to: RedisServer, *, only: Callable[[bytes], bool] = lambda key: True) -> int:
        """Move the keys of a slot that is on its way, or some of them; returns how many."""
        source = self.node_of(slot)
        keys = [key for key in source.command("CLUSTER", "GETKEYSINSLOT", slot, 100_000) if only(key)]
        if keys:
            source.command("MIGRATE", "127.0.0.1", to.port, "", 0, 5_000, "KEYS", *keys)
        return len(keys)

    def finish_move(self, slot: int, to: RedisServer) -> None:
        """Tell all primaries where the slot is now."""
        for node in (to, *(other for other in self.nodes[:3] if other is not to)):
            node.command("CLUSTER", "SETSLOT", slot, "NODE", self.node_id(to))

    def move_slot(self, slot: int, to: RedisServer) -> None:
        """Move a slot with all its keys, as `redis-cli --cluster reshard` does."""
        self.begin_move(slot, to)
        while self.move_keys(slot, to):
            pass
        self.finish_move(slot, to)

    def close(self) -> None:
        """Stop everything."""
        for node in self.nodes:
            node.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _join(self, replicas: int) -> None:
        for epoch, node in enumerate(self.nodes, start=1):
            node.command("CLUSTER", "SET-CONFIG-EPOCH", epoch)
        primaries = self.nodes[:3]
        for index, node in enumerate(primaries):
            first, last = _SLOTS * index // 3, _SLOTS * (index + 1) // 3
            node.command("CLUSTER", "ADDSLOTS", *range(first, last))
        for node in self.nodes[1:]:
            node.command("CLUSTER", "MEET", "127.0.0.1", self.nodes[0].port)
        _wait(lambda: all(self._knows_all(node) for node in self.nodes), "nodes that know each other")
        for index, node in enumerate(self.nodes[3:]):
            primary = self.node_id(primaries[index // replicas])
            _wait(partial(_succeeds, node, "CLUSTER", "REPLICATE", primary), "a replica")
        _wait(lambda: all(self._is_settled(node) for node in self.nodes), "a cluster that serves all slots")

    def _knows_all(self, node: RedisServer) -> bool:
        told: bytes = node.command("CLUSTER", "NODES")
        return len(told.splitlines()) == len(self.nodes) and b"handshake" not in told

    def _is_settled(self, node: RedisServer) -> bool:
        replication = node.command("INFO", "replication")
        is_linked = replication["role"] == "master" or replication["master_link_status"] == "up"
        served = sum(last - first + 1 for first, last, *_ in node.command("CLUSTER", "SLOTS"))
        return is_linked and served == _SLOTS and b"cluster_state:ok" in node.command("CLUSTER", "INFO")


def _start_node(kind: str, args: tuple[str, ...]) -> RedisServer:
    for attempt in range(20):
        port = _free_pair_of_ports()
        try:
            return RedisServer.start(kind, port=port, args=args)
        except RuntimeError:
            if attempt == 19:
                raise
    raise AssertionError("unreachable: the last attempt returns or raises")


def _free_pair_of_ports() -> int:
    """A port for clients whose partner for the cluster's own bus, 10000 above, is free too.

    Below the range from which the system gives ports to outgoing connections, so that none of those is in the way.
    """
    while True:
        port = random.randrange(10_500, 21_500)
        try:
            with socket.socket() as one, socket.socket() as two:
                one.bind(("127.0.0.1", port))
                two.bind(("127.0.0.1", port + 10_000))
        except OSError:
            continue
        return port


def _succeeds(node: RedisServer, *command: str) -> bool:
    import redis

    try:
        node.command(*command)
    except redis.ResponseError:
        return False
    return True


def _wait(is_true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _READY_DEADLINE_S
    while not is_true():
        if time.monotonic() > deadline:
            raise RuntimeError(f"no {what} within {_READY_DEADLINE_S:.0f} s")
        time.sleep(0.02)
