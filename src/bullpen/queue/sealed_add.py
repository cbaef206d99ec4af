"""Adds of a queue with a codec: every payload is sealed on its way to the server.

In: packed jobs. Out: the stored jobs, which show their plain data. An object is stored before the job that names it, so
a crash in between leaves an object without a job, never a job without its payload; `payloads` removes such objects. One
whose job was certainly not stored is removed at once. Elsewhere: sealing (`codec`), sending (`add`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Final, TypeVar

from bullpen._kernel import json
from bullpen.errors import ConnectionLost, JobNotFound, JobStateConflict, LaneFull, OutOfMemory, QueueFull
from bullpen.queue.add import Adder
from bullpen.queue.codec import Sealer
from bullpen.queue.durability import Durability
from bullpen.queue.job import Added, Job
from bullpen.queue.packing import PackedJob

T = TypeVar("T")

_AT_ONCE: Final = 8
"""Objects stored at the same time for one `add_many`."""
NOTHING_WRITTEN: Final = (ConnectionLost, QueueFull, LaneFull, OutOfMemory, JobNotFound, JobStateConflict)
"""The last two: a parent that is not there, or an id that cannot become its child."""


class SealedAdder:
    """What an `Adder` does, with a codec before it."""

    def __init__(self, adder: Adder, sealer: Sealer) -> None:
        self._adder, self._sealer = adder, sealer

    async def add(self, packed: PackedJob, durability: Durability) -> Job:
        (sealed,) = await seal_all(self._sealer, (packed,))
        job = await self._sent([sealed], self._adder.add(sealed, durability))
        await self._show([packed], [sealed], [job])
        return job

    async def add_many(
        self, packed: list[PackedJob], durability: Durability, deadline_s: float | None = None
    ) -> list[Job]:
        sealed = await seal_all(self._sealer, packed)
        jobs = await self._sent(sealed, self._adder.add_many(sealed, durability, deadline_s))
        await self._show(packed, sealed, jobs)
        return jobs

    async def _sent(self, sealed: Sequence[PackedJob], sending: Awaitable[T]) -> T:
        try:
            return await sending
        except NOTHING_WRITTEN:
            if len(sealed) == 1:  # of many, earlier ones may be stored
                await self._sealer.forget(sealed[0].data)
            raise

    async def _show(self, packed: Sequence[PackedJob], sealed: Sequence[PackedJob], jobs: Sequence[Job]) -> None:
        """Let each job show what its caller gave; the job that was there before keeps its own payload."""
        for plain, stored, job in zip(packed, sealed, jobs, strict=True):
            if job.added is Added.CREATED:
                job.record = job.record.opened(plain.data, None) if stored.data is not plain.data else job.record
            elif job.added is Added.DUPLICATE:  # a deduplicated one may be kept for later; else a sweep finds it
                await self._sealer.forget(stored.data)


async def seal_all(sealer: Sealer, packed: Sequence[PackedJob]) -> list[PackedJob]:
    """These jobs of one queue with their data sealed."""
    return await seal_each([sealer] * len(packed), packed)


async def seal_each(sealers: Sequence[Sealer | None], packed: Sequence[PackedJob]) -> list[PackedJob]:
    """These jobs, each sealed for its own queue. When one cannot be, what was stored for the others is removed."""
    room = asyncio.Semaphore(_AT_ONCE)

    async def seal(sealer: Sealer | None, job: PackedJob) -> PackedJob:
        if sealer is None:
            return job
        async with room:
            sealed = job._replace(data=await sealer.seal(job.data))
        json.check_payload_size(len(sealed.data), len(sealed.options_json))
        return sealed

    if len(packed) == 1:
        return [await seal(sealers[0], packed[0])]
    results = await asyncio.gather(*map(seal, sealers, packed), return_exceptions=True)
    for problem in results:
        if isinstance(problem, BaseException):
            for sealer, result in zip(sealers, results, strict=True):
                if not isinstance(result, BaseException):
                    await forget_each([sealer], [result])
            raise problem
    return [result for result in results if not isinstance(result, BaseException)]


async def forget_each(sealers: Sequence[Sealer | None], packed: Sequence[PackedJob]) -> None:
    """Remove the objects of payloads that no job got."""
    for sealer, job in zip(sealers, packed, strict=True):
        if sealer is not None:
            await sealer.forget(job.data)
