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
from collections.abc import Callable, Coroutine, Iterator, Sequence, Sized
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, overload

from bullpen._kernel.duration import check_int, to_ms
from bullpen._kernel.outcome import RETURNED_NOTHING, Raised, Result, Returned
from bullpen.errors import InvalidOption, require
from bullpen.queue.job import Job

__all__ = ["BatchHandler", "BatchOptions", "BatchRuns", "JobBatch"]

MOST_JOBS: Final = 1_000
_WAIT_MS: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """How many jobs a handler gets at once. The worker's `concurrency` is then how many batches run at once."""

    size: int
    """At most so many."""
    minimum: int = 1
    """Wait for so many, but not longer than `wait_at_most`. With 1 nothing waits."""
    wait_at_most: int | timedelta = _WAIT_MS
    """Ms, or a timedelta: how long the first job waits for others, with its lock held. A second unless given."""

    def __post_init__(self) -> None:
        check_int("batch.size", self.size, minimum=1, maximum=MOST_JOBS)
        check_int("batch.minimum", self.minimum, minimum=1)
        require("batch.minimum", self.minimum <= self.size, f"at most size ({self.size})", self.minimum)
        to_ms("batch.wait_at_most", self.wait_at_most, minimum=1)

    @property
    def wait_s(self) -> float:
        return to_ms("batch.wait_at_most", self.wait_at_most) / 1000


class JobBatch(Sequence[Job]):
    """The jobs that a handler gets, in the order in which they were taken.

    When the handler returns nothing, each job completes without a value; when it returns a list, each with its own, and
    an exception in its place fails that job alone. What the handler raises fails every job that was not decided before
    with `complete` or `fail`. A job may be cancelled, or lose its lock, while the others go on: `job.cancelled` tells.
    """

    def __init__(self, jobs: Sequence[Job], decide: Callable[[Job, Result], bool]) -> None:
        self._jobs, self._decide = tuple(jobs), decide
        self.cancelled = False
        """True once the whole batch is pointless: its time is up, or none of its jobs is wanted any more."""

    @overload
    def __getitem__(self, index: int) -> Job: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Job, ...]: ...
    def __getitem__(self, index: int | slice) -> Job | tuple[Job, ...]:
        return self._jobs[index]

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs)

    def __repr__(self) -> str:
        return f"JobBatch({', '.join(repr(job.id) for job in self._jobs)})"

    def complete(self, job: Job, value: Any = None) -> None:
        """Complete one job now, while the others go on."""
        self._settle(job, RETURNED_NOTHING if value is None else Returned(value))

    def fail(self, job: Job, error: BaseException) -> None:
        """Fail one job now, as if its own handler had raised `error`; a `DelayJob` delays it, and so on."""
        require("error", isinstance(error, BaseException), "an exception", error)
        self._settle(job, Raised(error))

    def _settle(self, job: Job, result: Result) -> None:
        require("job", job in self._jobs, "a job of this batch", job)
        require("job", self._decide(job, result), "a job that was not settled before", job)

    def log_fields(self) -> dict[str, Any]:
        """What log records show of it: the queue, and the ids of its jobs."""
        return {"queue": self._jobs[0].queue_name, "jobId": ",".join(job.id for job in self._jobs)}


BatchHandler = Callable[[JobBatch], Any]
"""What a worker with `batch=` calls: `async def`, or a plain function, which runs in a thread."""


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
        """False when the job has an outcome already. One that nobody waits for any more may get what it likes."""
        share = self.members[job].share
        if not share.done():
            share.set_result(result)
            return True
        return self.members[job].is_gone

    def share_out(self, result: Result) -> None:
        """What the call came to, for each job that was not decided before."""
        jobs = list(self.batch)
        if isinstance(result, Raised) or result.value is None:
            for job in jobs:
                self.decide(job, result)
            return
        values = result.value
        if not isinstance(values, list | tuple) or len(values) != len(jobs):
            got = f"{len(values)} values" if isinstance(values, list | tuple) else f"{type(values).__name__}"
            error = InvalidOption("batch handler", f"a list of {len(jobs)} values, one per job, or None", got)
            self.share_out(Raised(error))
            return
        for job, value in zip(jobs, values, strict=True):
            self.decide(job, Raised(value) if isinstance(value, BaseException) else Returned(value))


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
        """The result of one job. Cancelled when the job is not wanted any more; its batch goes on with the others."""
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
        await asyncio.sleep(0)  # when all are told to end at once, all say so before one looks
        run = member.run
        if run.task is None or run.task.done() or not all(each.is_gone for each in run.members.values()):
            return
        run.batch.cancelled = True
        run.task.cancel()
        # Given back now, a second worker would run the job while this handler still cleans up.
        await asyncio.wait([run.task])
