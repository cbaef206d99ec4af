"""Run jobs that stalled repeatedly alone, and condemn only those that die while alone.

A job that kills its process takes all its neighbours down with it, again and again. From the second stall on a job
is a suspect: the worker takes nothing more, lets its other jobs end, notes that the suspect runs alone, and runs it.
If the process dies now, the job is the killer beyond doubt and fails with that cause at its next take: at most three
deaths, and no innocent is failed. Elsewhere: counting stalls (`check_stalled.lua`), taking (`worker`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from enum import StrEnum
from typing import Final

from bullpen.queue._actions import QueueActions
from bullpen.queue.job import Job
from bullpen.wire.keys import QueueKeys

STALLS_THAT_MAKE_A_SUSPECT: Final = 2


class Verdict(StrEnum):
    """What `begin_solo.lua` says."""

    ALONE = "alone"
    CONDEMNED = "condemned"
    LOST = "lost"


def is_suspect(job: Job) -> bool:
    return job.record.stalled_count >= STALLS_THAT_MAKE_A_SUSPECT


class Suspects:
    """The suspects of one worker, run one at a time once everything else has ended."""

    def __init__(self, actions: QueueActions, keys: QueueKeys) -> None:
        self._actions = actions
        self._keys = keys
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

    @asynccontextmanager
    async def alone(self, job: Job, running: Callable[[], int]) -> AsyncIterator[Verdict]:
        """Wait until `job` is the only one that runs, and say what is known of it."""
        self.waiting += 1
        self.note_running(running())
        try:
            async with self._turn:
                while running() > self.waiting:  # somebody who is no suspect still runs
                    self._others_ended.clear()
                    await self._others_ended.wait()
                self._is_alone = True
                keys = self._keys
                answer = await self._actions.evaluate(
                    "begin_solo",
                    [keys.job(job.id), keys.lock(job.id)],
                    [job.token, job.attempts_started, job.stalled_count],
                )
                yield Verdict(answer.decode())
        finally:
            self._is_alone = False
            self.waiting -= 1
            self.have_ended = True
