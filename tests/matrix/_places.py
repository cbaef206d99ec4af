"""Where the scenarios run: one server of each version, a primary with sentinels, a cluster.

A place hides what differs: the URL, the prefix that a cluster needs, and which server holds the keys now.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from typing import Any

import redis

from bullpen.queue import Queue, QueueEvents
from bullpen.queue.batch import BatchHandler
from bullpen.queue.job import Handler
from bullpen.testing import ClusterServers, RedisServer, SentinelServers, check_queue, need
from bullpen.wire.keys import slot
from bullpen.worker import Worker
from tests.queue._kit import Kit


def kinds() -> list[str]:
    """All places of this machine. There is no wheel of Redis 6.2 for every platform: it is then not collected."""
    has_wheel = sys.platform == "linux" and platform.machine() == "x86_64" and sys.version_info < (3, 13)
    return [*(["redis-6.2"] if has_wheel else []), "redis-7", "valkey", "sentinel", "cluster"]


class Place:
    """One kind of set-up, started once for all scenarios."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.is_cluster = kind == "cluster"
        self.prefix = "{bull}" if self.is_cluster else "bull"
        need("valkey" if kind in ("sentinel", "cluster") else kind)
        self.servers: RedisServer | SentinelServers | ClusterServers
        match kind:
            case "sentinel":
                # None of the scenarios kills the primary: one that is starved for a moment is not replaced.
                self.servers = SentinelServers.start(down_after_ms=30_000)
            case "cluster":
                self.servers = ClusterServers.start()
            case _:
                self.servers = RedisServer.start(kind)

    @property
    def url(self) -> str:
        return self.servers.url

    @property
    def nodes(self) -> list[RedisServer]:
        """All servers that take writes."""
        match self.servers:
            case RedisServer():
                return [self.servers]
            case SentinelServers():
                return [self.servers.primary]
            case ClusterServers():
                return self.servers.nodes[:3]

    def client(self) -> redis.Redis:
        """A client to the server that holds the keys of the prefix."""
        if isinstance(self.servers, ClusterServers):
            return self.servers.node_of(slot("{bull}")).client()
        return self.nodes[0].client()

    def flush(self) -> None:
        for node in self.nodes:
            node.flush()

    def stored(self) -> Iterator[tuple[RedisServer, str]]:
        """Every key, with the server that holds it."""
        for node in self.nodes:
            found: Any = node.client().scan_iter(count=1000)
            for raw in found:
                yield node, raw.decode()

    def close(self) -> None:
        self.servers.close()


class PlaceKit(Kit):
    """The kit of the queue suite, with the prefix of the place."""

    def __init__(self, place: Place, name: str) -> None:
        super().__init__(place.url, name, place.client())
        self.place = place
        self.prefix = place.prefix
        self.base = f"{place.prefix}:{name}:"

    def queue(self, name: str | None = None, **options: Any) -> Queue:
        return super().queue(name, **{"prefix": self.prefix, **options})

    def worker(self, handler: Handler | BatchHandler, *, queue: str | None = None, **options: Any) -> Worker:
        return super().worker(handler, queue=queue, **{"prefix": self.prefix, **options})

    async def reader(self, **options: Any) -> QueueEvents:
        return await super().reader(**{"prefix": self.prefix, **options})

    def fields(self, job_id: str, queue: str | None = None) -> dict[str, str]:
        flat = self.command("HGETALL", f"{self.prefix}:{queue or self.name}:{job_id}")
        return {name.decode(): value.decode("utf-8", "replace") for name, value in flat.items()}

    def faults(self) -> list[str]:
        """What is wrong with what was left behind: broken structures, keys of nobody, keys in a wrong slot."""
        names = (self.name, f"{self.name}-dlq")
        found = [str(fault) for name in names for fault in check_queue(self.redis, self.prefix, name)]
        bases = tuple(f"{self.prefix}:{name}:" for name in names)
        found += [
            f"{key} belongs to no queue of this test" for _, key in self.place.stored() if not key.startswith(bases)
        ]
        if self.place.is_cluster:
            home = slot(self.base)
            found += [f"{key} lies in slot {slot(key)}" for _, key in self.place.stored() if slot(key) != home]
        return found
