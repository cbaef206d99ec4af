"""Run jobs that stalled repeatedly alone, and condemn only those that die while alone.

A job that kills its process takes all its neighbours down with it, again and again. From the second stall on a job
is a suspect: the worker takes nothing more, lets its other jobs end, notes that the suspect runs alone, and runs it.
One death while alone may have come from outside (a deploy that kills, a machine that fails); after as many as
`max_lonely_deaths` the job fails with that cause at its next take. Elsewhere: counting stalls (`check_stalled.lua`),
counting deaths (`judge_suspect.lua`), taking (`worker`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from enum import StrEnum
from typing import Any, Final

from bullpen.queue.actions import QueueActions
from bullpen.queue.job import Job
from bullpen.wire.keys import QueueKeys

STALLS_THAT_MAKE_A_SUSPECT: Final = 2


class SuspectVerdict(StrEnum):
    """What `judge_suspect.lua` says."""

    SUSPECT = "suspect"
    CONDEMNED = "condemned"
    LOST = "lost"


def is_suspect(job: Job) -> bool:
    return job.record.stalled_count >= STALLS_THAT_MAKE_A_SUSPECT


class Suspects:
    """The suspects of one worker, run one at a time once everything else has ended."""

    def __init__(self, actions: QueueActions, keys: QueueKeys, max_deaths: int | None) -> None:
        self._actions = actions
        self._keys = keys
        self._max_deaths = max_deaths
        self._turn = asyncio.Lock()
        self._is_alone = False
        self._others_ended = asyncio.Event()
        self.waiting = 0
        """Suspects that wait or run; while there is one, nothing else is taken."""
        self.have_ended = False
        """One of them has ended since the worker last asked."""

    def note_running(self, running: int) -> None:
        """Called whenever a run ends: with only suspects left, the next of them may begin."""
        if self.waiting and running <= self.waiting:
            self._others_ended.set()

    @property
    def is_alone(self) -> bool:
        """A suspect runs: whatever an exchange in flight still brings must not run beside it."""
        return self._is_alone

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around everything that is done with a suspect: nothing else is taken meanwhile."""
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1
            self.have_ended = True

    async def judge(self, job: Job) -> tuple[SuspectVerdict, int]:
        """What is known of a job that was just taken, and how many of its runs alone ended with their worker."""
        verdict, deaths = await self._evaluate("judge_suspect", job, self._max_deaths or 0)
        return SuspectVerdict(verdict.decode()), deaths

    @asynccontextmanager
    async def alone(self, job: Job, running: Callable[[], int]) -> AsyncIterator[bool]:
        """Wait until `job` is the only one that runs, and note it. False: its lock is lost, and it must not run."""
        self.note_running(running())
        async with self._turn:
            while running() > self.waiting:  # somebody who is no suspect still runs
                self._others_ended.clear()
                await self._others_ended.wait()
            self._is_alone = True
            try:
                yield bool(await self._evaluate("begin_solo", job))
            finally:
                self._is_alone = False

    async def _evaluate(self, script: str, job: Job, *more: int) -> Any:
        keys = [self._keys.job(job.id), self._keys.lock(job.id)]
        counts = [job.attempts_started, job.stalled_count, job.attempts_made]
        return await self._actions.evaluate(script, keys, [job.token, *counts, *more])
