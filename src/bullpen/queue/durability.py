"""How safe an added job is when `add` returns.

`memory`: the server answered. `fsync`: it is on the server's disk. `replicated(n)`: n replicas have it too. Settling
a job is always `memory`, because a lost settle is only a repeated run. In: a level and a call that was answered.
Out: the level reached, or DurabilityUnknown. The confirmation belongs to a write of ours on the same connection, so
it is asked behind one: the numbered record of the call, which also proves that the server still has it.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any, Literal

from bullpen._kernel.duration import check_int
from bullpen.errors import ConnectionLost, InvalidOption, ServerRefused
from bullpen.queue._caller import Caller, MakeArguments
from bullpen.queue._discovery import Unavailable
from bullpen.queue._redis import Door
from bullpen.queue.checks import parse_info
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
        """What a caller wrote: a Durability, "memory" or "fsync"."""
        if isinstance(value, Durability) and value.kind != "memory":
            return value
        if value in ("memory", MEMORY):  # one object for all of them, so that the path of every add need not compare
            return MEMORY
        if value == "fsync":
            return FSYNC
        raise InvalidOption("durability", '"memory", "fsync" or Durability.replicated(n)', value)

    def __str__(self) -> str:
        return f"replicated({self.replicas})" if self.kind == "replicated" else self.kind


MEMORY = Durability("memory")
FSYNC = Durability("fsync")


class NotDurableInTime(Exception):
    """The job is stored, but the level asked for was not confirmed before the deadline."""


class DurableCalls:
    """Numbered calls that return once their level is reached. Uses a door of its own: waiting for a disk blocks a
    connection."""

    def __init__(self, door: Door, caller: Caller) -> None:
        self._door = door
        self._caller = caller
        self._always_synced: bool | None = None

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
        promise, and
        NotDurableInTime (with the reply as argument)."""
        give_up_at = time.monotonic() + deadline_s
        call_key = queue.call(self._caller.id)
        if level.kind == "fsync":
            await self._check_fsync()
        reply = await self._caller.call(keys, make_args, queue=queue.name, deadline_s=deadline_s)
        while (left_s := give_up_at - time.monotonic()) > 0:
            try:
                if await self._confirm(level, call_key, call_ttl_ms, left_s):
                    return reply
                # The server lost the call after it had answered (killed before its disk had it): send the same call
                # again.
                reply = await self._caller.repeat(keys, make_args, queue=queue.name, deadline_s=left_s)
            except (ConnectionLost, Unavailable):
                if self._door.closed:
                    raise
                await asyncio.sleep(self._door.reconnect_wait_s())
        raise NotDurableInTime(reply)

    def close(self) -> None:
        self._door.close()

    async def _confirm(self, level: Durability, call_key: str, call_ttl_ms: int, left_s: float) -> bool:
        """False: the server no longer knows the call. True: the level is reached. Waits in between."""
        if level.kind == "fsync" and self._always_synced:
            return True
        wait_ms = max(1, int(min(left_s, 5.0) * 1000))
        wait = ("WAITAOF", 1, 0, wait_ms) if level.kind == "fsync" else ("WAIT", level.replicas, wait_ms)
        within_s = wait_ms / 1000 + self._door.connection.command_timeout_s
        known, acknowledged = await self._door.call_many([("PEXPIRE", call_key, call_ttl_ms), wait], within_s=within_s)
        for answer in (known, acknowledged):
            if isinstance(answer, Exception):
                raise answer
        if known != 1:
            return False
        reached = acknowledged[0] >= 1 if level.kind == "fsync" else acknowledged >= level.replicas
        if not reached:
            raise Unavailable("the disk or a replica has not confirmed yet")
        return True

    async def _check_fsync(self) -> None:
        """Refuse at first use where the promise cannot be kept."""
        if self._always_synced is not None:
            return
        info = parse_info(await self._door.call("INFO", "persistence"))
        if info.get("aof_enabled") != "1":
            raise InvalidOption("durability", "a server with `appendonly yes` for level fsync", "fsync")
        try:
            policy = await self._door.call("CONFIG", "GET", "appendfsync")
        except ServerRefused:
            policy = [b"appendfsync", b"unknown"]  # managed servers forbid CONFIG; WAITAOF then has the last word
        self._always_synced = policy[1] == b"always"
        if not self._always_synced:
            try:
                await self._door.call("WAITAOF", 0, 0, 1)
            except ServerRefused as error:
                self._always_synced = None
                raise InvalidOption(
                    "durability", "a server with `appendfsync always`, or Redis 7.2 and newer, for level fsync", "fsync"
                ) from error
