"""Give a handler several jobs at once.

In: jobs that the worker has taken, one by one. Out: a Result for each, as if it had run alone: attempts, backoff,
locks, cancelling and dead letters are those of single jobs. No timer fills a batch: jobs that came with one take are
together, and what comes while all batches run stays in the queue. Only `minimum` makes jobs wait for others.
Elsewhere: taking and settling (`worker`), running user code (`bullpen._kernel.execute`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine, Sized
from typing import Any

from bullpen._kernel.outcome import Raised, Result
from bullpen.queue.batch import BatchOptions, JobBatch, shares
from bullpen.queue.job import Job

__all__ = ["BatchRuns"]


class _Member:
    """A job that waits for its batch, or for the end of it."""

    __slots__ = ("is_gone", "job", "run", "share")

    def __init__(self, job: Job, share: asyncio.Future[Result]) -> None:
        self.job, self.share = job, share
        self.run: _Run | None = None
        self.is_gone = False


class _Run:
    """One call of the handler."""

    __slots__ = ("_loop", "_thread", "batch", "members", "task")

    def __init__(self, members: list[_Member]) -> None:
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self.members = {member.job: member for member in members}
        self.batch = JobBatch([member.job for member in members], self._decide_anywhere)
        self.task: asyncio.Task[None] | None = None

    def _decide_anywhere(self, job: Job, result: Result) -> bool:
        """A plain handler says so in its thread."""
        if threading.get_ident() == self._thread:
            return self.decide(job, result)
        answer: concurrent.futures.Future[bool] = concurrent.futures.Future()
        self._loop.call_soon_threadsafe(lambda: answer.set_result(self.decide(job, result)))
        return answer.result()

    def decide(self, job: Job, result: Result) -> bool:
        """False when the job has an outcome already, or when no caller waits for it any more."""
        share = self.members[job].share
        if not share.done():
            share.set_result(result)
            return True
        return self.members[job].is_gone

    def share_out(self, result: Result) -> None:
        """What the call came to, for each job that was not decided before."""
        for job, share in zip(self.batch, shares(result, len(self.batch)), strict=True):
            self.decide(job, share)


class _Places:
    """How many places of the worker are taken."""

    __slots__ = ("_batches", "_running")

    def __init__(self, batches: BatchRuns, running: Sized) -> None:
        self._batches, self._running = batches, running

    def __len__(self) -> int:
        return self._batches.count_places(len(self._running))


def _nothing() -> None:
    pass


class BatchRuns:
    """Runs the jobs of one worker in batches."""

    def __init__(
        self,
        call: Callable[[JobBatch, float | None], Coroutine[Any, Any, Result]],
        options: BatchOptions,
        most: Callable[[], int],
    ) -> None:
        """`most`: how many batches may run at once, now."""
        self._call, self._options, self._most = call, options, most
        self._waiting: list[_Member] = []
        self._running: set[_Run] = set()
        self._deadline: asyncio.TimerHandle | None = None
        self._is_due = False
        """The first that waits has waited long enough for others."""
        self._is_planned = False
        self._timeout_s: float | None = None
        """Of the job that came last."""
        self._in_batches = 0
        """Jobs whose batch was started and that have not ended."""
        self._on_room: Callable[[], None] = _nothing

    async def run(self, job: Job, timeout_s: float | None) -> Result:
        """The result of one job. Cancelled when the job is not needed any more; its batch continues with the others."""
        loop = asyncio.get_running_loop()
        member = _Member(job, loop.create_future())
        self._waiting.append(member)
        self._timeout_s = timeout_s
        if not self._is_planned:
            # The tasks of all jobs of one take are ready already: they are in line before this call.
            self._is_planned = True
            loop.call_soon(self._arrange, timeout_s)
        try:
            return await member.share
        except asyncio.CancelledError:
            await self._leave(member)
            raise
        finally:
            self._in_batches -= member.run is not None

    def places(self, running: Sized, on_room: Callable[[], None]) -> Sized:
        """Its length: how many jobs fewer may be taken. A batch takes all places that it could fill: a job that came
        while it runs would wait here for its end, and elsewhere a worker may be idle. `running`: all jobs that were
        taken; `on_room` is called at the end of a batch."""
        self._on_room = on_room
        return _Places(self, running)

    def count_places(self, running: int) -> int:
        """Of so many jobs."""
        size = self._options.size
        waiting = running - self._in_batches
        if waiting >= self._options.minimum or self._is_due:  # they are the next batches
            waiting += -waiting % size
        return len(self._running) * size + waiting

    def resized(self) -> None:
        """More batches may run at once: what waits here already need not wait for the end of one."""
        if self._waiting and not self._is_planned:
            self._arrange(self._timeout_s)

    def _arrange(self, timeout_s: float | None) -> None:
        """Start what can be started."""
        self._is_planned = False
        options = self._options
        while self._waiting and len(self._running) < self._most():
            if len(self._waiting) < options.minimum and not self._is_due:
                if self._deadline is None:
                    loop = asyncio.get_running_loop()
                    self._deadline = loop.call_later(options.wait_s, self._on_deadline, timeout_s)
                return
            if self._deadline is not None:
                self._deadline.cancel()
            self._deadline, self._is_due = None, False
            members, self._waiting = self._waiting[: options.size], self._waiting[options.size :]
            self._start(members, timeout_s)

    def _on_deadline(self, timeout_s: float | None) -> None:
        self._deadline, self._is_due = None, bool(self._waiting)
        self._arrange(timeout_s)

    def _start(self, members: list[_Member], timeout_s: float | None) -> None:
        run = _Run(members)
        for member in members:
            member.run = run
        self._in_batches += len(members)
        self._running.add(run)
        run.task = asyncio.get_running_loop().create_task(self._handle(run, timeout_s), name="bullpen batch")

    async def _handle(self, run: _Run, timeout_s: float | None) -> None:
        try:
            run.share_out(await self._call(run.batch, timeout_s))
        except asyncio.CancelledError as error:  # all of its jobs are gone, or the handler raised it
            run.share_out(Raised(error))
        finally:
            self._running.discard(run)
            self._arrange(timeout_s)
            self._on_room()

    async def _leave(self, member: _Member) -> None:
        member.is_gone = True
        if member.run is None:
            self._waiting.remove(member)
            self._is_due = self._is_due and bool(self._waiting)
            return
        run = member.run
        run.batch.tell_left(member.job)
        await asyncio.sleep(0)  # when all are told to end at once, all say so before one looks
        if run.task is None or run.task.done() or not all(each.is_gone for each in run.members.values()):
            return
        run.batch.cancelled = True
        run.task.cancel()
        # Given back now, a second worker would run the job while this handler still cleans up.
        await asyncio.wait([run.task])
