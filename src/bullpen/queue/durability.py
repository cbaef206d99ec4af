"""How safe an added job is when `add` returns.

`memory`: the server answered. `fsync`: it is on the server's disk. `replicated(n)`: n replicas have it too. Settling
a job is always `memory`, because a lost settle is only a repeated run. In: a level and a call that was answered.
Out: the level reached, or DurabilityUnknown. The confirmation belongs to a write of ours on the same connection, so
it is asked behind one: the numbered record of the call, whose number also proves that the server still has it.

WAITAOF is believed only where it was seen to wait: some servers answer it before the disk has anything (Valkey up to
9.1, Redis from 7.4 until redis/redis#13793).
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass
from typing import Any, Final, Literal

from bullpen._kernel.duration import check_int
from bullpen._kernel.patience import Patience
from bullpen.errors import ConnectionLost, InvalidOption, ServerRefused, TooFewReplicas
from bullpen.redis.calls import Caller, MakeArguments
from bullpen.redis.checks import parse_info
from bullpen.redis.client import Connection, Door
from bullpen.redis.discovery import ServerUnavailable
from bullpen.redis.socket import Wire
from bullpen.wire.keys import QueueKeys


@dataclass(frozen=True, slots=True)
class Durability:
    """A promise about an added job. Use `Durability.memory`, `.fsync` or `.replicated(n)`, or their names as text."""

    kind: Literal["memory", "fsync", "replicated"]
    replicas: int = 0

    @classmethod
    def replicated(cls, replicas: int) -> Durability:
        return cls("replicated", check_int("durability.replicas", replicas, minimum=1))

    @classmethod
    def read(cls, value: Durability | str) -> Durability:
        """What a caller wrote: a Durability, or one as text, such as "fsync" or "replicated(2)"."""
        if isinstance(value, Durability) and value.kind != "memory":
            return value
        if value in ("memory", MEMORY):  # one object for all of them, so that the path of every add need not compare
            return MEMORY
        if value == "fsync":
            return FSYNC
        if isinstance(value, str) and (replicas := re.fullmatch(r"replicated\((\d{1,4})\)", value)):
            return cls.replicated(int(replicas[1]))
        raise InvalidOption("durability", '"memory", "fsync" or Durability.replicated(n)', value)

    def __str__(self) -> str:
        return f"replicated({self.replicas})" if self.kind == "replicated" else self.kind


MEMORY = Durability("memory")
FSYNC = Durability("fsync")


TRUE_WAIT_S: Final = 0.5
"""`everysec`: a sync begins a second after the last one began, so what is written right after one waits nearly that
long. A server that does not wait answers at its next tick, within a tenth of a second."""
WAITS_TO_SEE: Final = 3
"""How often WAITAOF is tried. The first one only waits for a sync; it must be seen to wait twice, since a machine that
stands still for a moment shall not pass for a disk."""
SYNC_QUESTIONS: Final = (("INFO", "server"), ("INFO", "persistence"), ("CONFIG", "GET", "appendfsync"))
REPLICA_QUESTIONS: Final = (("INFO", "replication"),)


def is_unproven(connection: Connection, level: Durability) -> bool:
    """Whether no server of this connection was asked yet if it has the replicas of this level."""
    return level.replicas > connection.replicas_promised


def check_replicas(connection: Connection, level: Durability, replies: list[Any]) -> None:
    """Judge the answers to REPLICA_QUESTIONS before the first add of a level.

    Only then: replicas that go away later come back, and after a failover none may be connected for a moment. A server
    that took over from another, one that is not a primary, and one that does not report it are not judged.
    """
    info = {} if isinstance(replies[0], Exception) else parse_info(replies[0])
    told = info.get("connected_slaves", "")
    is_first = connection.is_cluster or len(connection.let_us_in) <= 1
    if is_first and info.get("role") == "master" and told.isdigit() and int(told) < level.replicas:
        expected = f"a server with at least {level.replicas} connected replica{'s' if level.replicas > 1 else ''}"
        raise TooFewReplicas("durability", f"{expected} for this level (it has {told})", str(level))
    connection.replicas_promised = max(connection.replicas_promised, level.replicas)


def read_sync_policy(replies: list[Any]) -> tuple[dict[str, str], str]:
    """What a server is and when it syncs (`always`, `everysec`, `unknown`), from its answers to SYNC_QUESTIONS.

    Raises InvalidOption where `fsync` cannot be true.
    """
    server, persistence, policy = replies
    info = parse_info(b"".join(_answers([server, b"\r\n", persistence])))
    if info.get("aof_enabled") != "1":
        raise InvalidOption("durability", "a server with `appendonly yes` for level fsync", "fsync")
    # Managed servers forbid CONFIG.
    told = "unknown" if isinstance(policy, Exception) or not policy else policy[1].decode()
    if told == "no":
        raise InvalidOption("durability", "a server that syncs: its `appendfsync` is `no`", "fsync")
    return info, told


def answers_early(info: dict[str, str], policy: str) -> InvalidOption:
    expected = (
        f"a server with `appendfsync always` for level fsync: this {_product(info)} (`appendfsync {policy}`) "
        "answers WAITAOF before the disk can have stored the job"
    )
    return InvalidOption("durability", expected, "fsync")


def cannot_wait(info: dict[str, str]) -> InvalidOption:
    expected = f"a server with `appendfsync always` for level fsync: this {_product(info)} has no WAITAOF"
    return InvalidOption("durability", expected, "fsync")


def _product(info: dict[str, str]) -> str:
    name = "Valkey" if "valkey_version" in info else "Redis"
    return f"{name} {info.get('valkey_version') or info.get('redis_version', '')}"


def confirm_commands(
    level: Durability, call_key: str, call_ttl_ms: int, wait_ms: int, *, always_synced: bool
) -> list[tuple[str | int, ...]]:
    """Ask whether the server still knows the call, and wait for the level behind a write."""
    commands: list[tuple[str | int, ...]] = [("GETRANGE", call_key, 0, 20), ("PEXPIRE", call_key, call_ttl_ms)]
    if level.kind == "replicated":
        commands.append(("WAIT", level.replicas, wait_ms))
    elif not always_synced:
        commands.append(("WAITAOF", 1, 0, wait_ms))
    return commands


def is_confirmed(replies: list[Any], level: Durability, call_number: int) -> bool:
    """Whether the server knows the call and its level is reached. Raises ServerUnavailable when that takes longer."""
    record, known, *acknowledged = _answers(replies)
    # The key alone proves nothing: a server that lost this call still has the one before.
    number = re.match(rb"\d+", record)
    if known != 1 or number is None or int(number[0]) != call_number:
        return False
    if acknowledged and count_acknowledged(acknowledged[0]) < (level.replicas or 1):
        raise ServerUnavailable("the disk or a replica has not confirmed yet")
    return True


class NotDurableInTime(Exception):
    """The job is stored, but the level asked for was not confirmed before the deadline."""


class DurableCalls:
    """Numbered calls that return once their level is reached. Uses a door of its own: waiting for a disk blocks a
    connection."""

    def __init__(self, door: Door, caller: Caller) -> None:
        self._door = door
        self._caller = caller
        self._checked: Wire | None = None
        """The wire whose server is known to keep `fsync`."""
        self._always_synced = False
        """Its server syncs before it answers."""

    @property
    def caller_id(self) -> str:
        return self._caller.id

    async def call(
        self,
        level: Durability,
        keys: list[str],
        call_ttl_ms: int,
        make_args: MakeArguments,
        *,
        queue: QueueKeys,
        deadline_s: float,
    ) -> Any:
        """The reply of the call. Raises what `Caller.call` raises, InvalidOption when the server cannot keep the
        promise, and NotDurableInTime (with the reply as argument)."""
        give_up_at = time.monotonic() + deadline_s
        if level.kind == "fsync" or is_unproven(self._door.connection, level):
            await self._check_before(level, queue, give_up_at)
        checked, left_s = self._checked, max(0.0, give_up_at - time.monotonic())
        reply = await self._caller.call(keys, make_args, queue=queue.name, deadline_s=left_s)
        if level.kind == "fsync" and self._always_synced and self._door.open_wire is checked:
            return reply  # it was on the disk before it was answered
        while (left_s := give_up_at - time.monotonic()) > 0:
            try:
                if level.kind == "fsync":
                    await self._check_fsync(queue, left_s)
                if await self._confirm(level, queue, call_ttl_ms, left_s):
                    return reply
                # The server lost the call after it had answered (killed before its disk had it, or another one is in
                # charge): send the same call again.
                reply = await self._caller.repeat(keys, make_args, queue=queue.name, deadline_s=left_s)
            except (ConnectionLost, ServerUnavailable):
                if self._door.closed:
                    raise
                await asyncio.sleep(self._door.reconnect_wait_s())
            except InvalidOption as error:
                raise NotDurableInTime(reply) from error  # another server took over, which cannot keep it
        raise NotDurableInTime(reply)

    def close(self) -> None:
        self._door.close()

    async def _confirm(self, level: Durability, queue: QueueKeys, call_ttl_ms: int, left_s: float) -> bool:
        """False: the server does not know the call. True: the level is reached. Waits in between."""
        wait_ms = max(1, int(min(left_s, 5.0) * 1000))
        call_key = queue.call(self._caller.id)
        commands = confirm_commands(level, call_key, call_ttl_ms, wait_ms, always_synced=self._always_synced)
        within_s = wait_ms / 1000 + self._door.connection.command_timeout_s
        return is_confirmed(await self._door.call_many(commands, within_s=within_s), level, self._caller.number)

    # ---- whether a level can be true ---------------------------------------------------------------------------

    async def _check_before(self, level: Durability, queue: QueueKeys, give_up_at: float) -> None:
        """Refuse before anything is written when the level cannot be reached; wait for an unreachable server."""
        patience = Patience(until=give_up_at)
        while True:
            try:
                if level.kind == "fsync":
                    await self._check_fsync(queue, give_up_at - time.monotonic())
                else:
                    check_replicas(self._door.connection, level, await self._door.call_many(REPLICA_QUESTIONS))
                return
            except (ConnectionLost, ServerUnavailable) as error:
                if self._door.closed or not await patience.pause(self._door.reconnect_wait_s()):
                    raise ConnectionLost(f"queue {queue.name!r}: nothing was written; {error}") from error

    async def _check_fsync(self, queue: QueueKeys, left_s: float) -> None:
        """Check the server of the present socket, once per socket."""
        wire = await self._door.wire()
        if wire is self._checked:
            return
        info, told = read_sync_policy(await self._door.call_many(SYNC_QUESTIONS))
        if told != "always":
            await self._see_it_wait(queue, info, told, left_s)
        self._always_synced = told == "always"
        if self._door.open_wire is wire:
            self._checked = wire

    async def _see_it_wait(self, queue: QueueKeys, info: dict[str, str], policy: str, left_s: float) -> None:
        """WAITAOF has to prove itself: what is written right after a sync cannot be on the disk at once."""
        connection, run_id = self._door.connection, info.get("run_id", "")
        if run_id in connection.true_waits:
            return
        give_up_at = time.monotonic() + left_s
        try:
            for attempt in range(WAITS_TO_SEE):
                waited_s = await self._write_and_wait(queue, give_up_at - time.monotonic())
                if attempt and waited_s < TRUE_WAIT_S:
                    raise answers_early(info, policy)
        except ServerRefused as error:
            raise cannot_wait(info) from error
        connection.true_waits.add(run_id)

    async def _write_and_wait(self, queue: QueueKeys, left_s: float) -> float:
        """How long the server waits for its disk, without the way there and back."""
        wait_ms = max(1, int(min(left_s, 5.0) * 1000))
        within_s = wait_ms / 1000 + self._door.connection.command_timeout_s
        began = time.monotonic()
        await self._door.call("SET", queue.synced(self._caller.id), "", "PX", 10_000)
        written = time.monotonic()
        if count_acknowledged(await self._door.call("WAITAOF", 1, 0, wait_ms, within_s=within_s)) < 1:
            raise ServerUnavailable("the disk has not confirmed yet")
        return time.monotonic() - written - (written - began)


def _answers(replies: list[Any]) -> list[Any]:
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies


def count_acknowledged(acknowledged: int | list[int]) -> int:
    """How many disks or replicas: WAIT answers with a number, WAITAOF with two, of which the first is the server's own
    disk."""
    return acknowledged[0] if isinstance(acknowledged, list) else acknowledged
