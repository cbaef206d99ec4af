"""Send adds to the server: many callers share a call, and no call stores anything twice.

Adds of one loop tick share one script call; what comes while it is in flight shares the next (group commit). A call
whose reply was lost is repeated with its number. Two callers take turns, so that Python packs the next batch of a bulk
add while the server stores the last one; both use one connection, which keeps their order.
In: checked jobs with a future each. Out: every future gets its job, or the error.
Elsewhere: checking options (`queue`), the script (`bullpen.wire.lua.add`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from bullpen.errors import DurabilityUnknown, QueueFull
from bullpen.queue._actions import QueueActions
from bullpen.queue._caller import Caller
from bullpen.queue._packing import (
    CALL_TTL_MS,
    MOST_BYTES_PER_CALL,
    MOST_JOBS_PER_CALL,
    JobArguments,
    add_arguments,
    add_keys,
    read_duplicates,
)
from bullpen.queue._redis import Door
from bullpen.queue.durability import MEMORY, Durability, DurableCalls, NotDurableInTime
from bullpen.queue.job import Added, BlockedBy, Job, JobState
from bullpen.wire.keys import QueueKeys
from bullpen.wire.options import JobOptions
from bullpen.wire.records import JobRecord
from bullpen.wire.scripts import SCRIPTS


class PackedJob(JobArguments):
    """A checked job and the future of whoever waits for it."""

    __slots__ = ("durability", "future")

    def __init__(
        self,
        name: str,
        data: bytes,
        options: JobOptions,
        *,
        durability: Durability,
        replaces: bool,
        future: asyncio.Future[Job],
    ) -> None:
        super().__init__(name, data, options, replaces=replaces)
        self.durability, self.future = durability, future


class Adder:
    """The adds of one queue object in one event loop."""

    def __init__(
        self,
        door: Door,
        keys: QueueKeys,
        actions: QueueActions,
        *,
        deadline_s: float,
        max_buffered: int,
        clock_offset_ms: int,
        before_first: Callable[[], Any],
    ) -> None:
        self._door = door
        self._keys = keys
        self._actions = actions
        self._deadline_s = deadline_s
        self._max_buffered = max_buffered
        self._clock_offset_ms = clock_offset_ms
        self._before_first = before_first
        self._callers = (Caller(door, SCRIPTS["add"]), Caller(door, SCRIPTS["add"]))
        self._durable: DurableCalls | None = None
        self._waiting: list[PackedJob] = []
        self._flushing: asyncio.Task[None] | None = None

    def submit(self, jobs: Sequence[PackedJob], *, is_bulk: bool = False) -> None:
        """Send these with the next call. Their futures tell what became of them."""
        # A bulk add is as large as its caller made it; the bound is for many callers that do not see each other.
        if not is_bulk and len(self._waiting) >= self._max_buffered:
            raise QueueFull(
                f"queue {self._keys.name!r}: {self._max_buffered} adds wait for the server already; "
                "await some of them first",
                queue=self._keys.name,
            )
        self._waiting.extend(jobs)
        if self._flushing is None:
            # Not sent at once: adds of the same loop tick come along.
            self._flushing = asyncio.get_running_loop().create_task(self._flush())

    async def aclose(self) -> None:
        """Send what still waits, then let go."""
        if self._flushing is not None:
            await self._flushing
        if self._durable is not None:
            self._durable.close()

    async def _flush(self) -> None:
        earlier: asyncio.Task[None] | None = None
        turn = 0
        try:
            await self._before_first()
            while self._waiting:
                batch = self._next_batch()
                turn = 1 - turn
                if not self._waiting or batch[0].durability != MEMORY:
                    if earlier is not None:
                        await earlier
                        earlier = None
                    await self._send(batch, self._callers[turn])
                    continue
                sending = asyncio.get_running_loop().create_task(self._send(batch, self._callers[turn]))
                if earlier is not None:
                    await earlier
                earlier = sending
            if earlier is not None:
                await earlier
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to the callers that wait
            _fail(self._waiting, error)
            self._waiting = []
        finally:
            self._flushing = None

    def _next_batch(self) -> list[PackedJob]:
        """At most 200 jobs and 1 MiB of one durability, at least one."""
        waiting, size, count = self._waiting, 0, 0
        level = waiting[0].durability
        for packed in waiting[:MOST_JOBS_PER_CALL]:
            size += packed.size
            if count and (
                size > MOST_BYTES_PER_CALL
                # Nearly always the very same, and comparing fields takes longer than the rest.
                or (packed.durability is not level and packed.durability != level)
            ):
                break
            count += 1
        self._waiting = waiting[count:]
        return waiting[:count]

    async def _send(self, batch: list[PackedJob], caller: Caller) -> None:
        """One call; never raises."""
        try:
            level = batch[0].durability
            sent_at, heard = time.monotonic(), self._actions.heard
            reply, is_late = await self._call(batch, caller, level)
            now_ms, first_number, taken = reply
            self._door.connection.clock.observe(now_ms - self._clock_offset_ms, sent_at, time.monotonic())
            duplicates = read_duplicates(taken)
            confirmed = None if level == MEMORY else str(level)
            for index, packed in enumerate(batch):
                if packed.future.done():
                    continue
                if index in duplicates:
                    job = self._duplicate(packed, *duplicates[index])
                else:
                    job = Job(self._actions, packed.created(first_number + index, now_ms))
                    if heard is not None:
                        job.heard = heard
                if is_late:
                    packed.future.set_exception(DurabilityUnknown(self._keys.name, job, str(level)))
                    continue
                if confirmed is not None:
                    job.durability = confirmed
                packed.future.set_result(job)
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to the callers that wait
            _fail(batch, error)

    async def _call(self, batch: list[PackedJob], caller: Caller, level: Durability) -> tuple[Any, bool]:
        """The reply, and whether its durability was not confirmed in time."""
        keys = self._keys

        def make_args(number: int) -> list[Any]:
            return add_arguments(keys, batch, number, self._clock_offset_ms)

        names = add_keys(keys, caller.id)
        if level == MEMORY:
            return await caller.call(names, make_args, queue=keys.name, deadline_s=self._deadline_s), False
        if self._durable is None:
            door = Door(self._door.connection, key=keys.base)
            self._durable = DurableCalls(door, Caller(door, SCRIPTS["add"]))
        try:
            reply = await self._durable.call(
                level, names, CALL_TTL_MS, make_args, queue=keys, deadline_s=self._deadline_s
            )
        except NotDurableInTime as error:
            return error.args[0], True
        return reply, False

    def _duplicate(self, packed: PackedJob, state: bytes, flat: list[bytes]) -> Job:
        job_id = packed.options.job_id or ""
        job = Job(self._actions, JobRecord.parse(job_id, flat))
        job.added = Added.DUPLICATE
        job.blocked_by = BlockedBy(job_id, JobState(state.decode()))
        return job


def _fail(batch: list[PackedJob], error: Exception) -> None:
    for packed in batch:
        if not packed.future.done():
            packed.future.set_exception(error)
            packed.future.exception()  # a caller that was cancelled does not ask; that is no bug
