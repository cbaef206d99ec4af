"""Take jobs without a handler: the caller runs each job and reports its outcome.

In: calls of `take`, or a loop over the taker, and one outcome for each job. Out: jobs whose locks are held and renewed
until then; a job whose outcome was stored, when `settle` returns. Everything that a worker does beside its handler is
done here too: locks, stalls, suspects, schedulers, sealed payloads, dead letters.
Elsewhere: that (`engine`), running a handler (`worker`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Final, Self, Unpack

from bullpen._kernel import json
from bullpen._kernel.duration import to_ms
from bullpen._kernel.outcome import (
    Completed,
    Delayed,
    Ended,
    Failed,
    Outcome,
    Raised,
    Retry,
    Waiting,
    WaitingChildren,
)
from bullpen.errors import InvalidOption, JobLockLost, QueueClosed, QueueError, require
from bullpen.queue.job import Job
from bullpen.redis.client import Connection
from bullpen.worker.around import Around
from bullpen.worker.auto import read_concurrency
from bullpen.worker.batches import BatchRuns
from bullpen.worker.consumer import JobConsumer
from bullpen.worker.handlers import OnEnd, Run
from bullpen.worker.keepalive import renew_arguments
from bullpen.worker.options import WorkerArguments

__all__ = ["Taker"]

_OF_HANDLERS: Final = ("batch", "processes", "timeout", "timeouts")
"""Options of `Worker` that say how a handler is run."""


class _Held:
    """A job that was taken and has no outcome yet, or one that is not stored yet."""

    __slots__ = ("outcome", "owner", "written")

    def __init__(self) -> None:
        self.owner: asyncio.Task[Any] | None = None
        """Who took it with `take`."""
        loop = asyncio.get_running_loop()
        self.outcome: asyncio.Future[Outcome] = loop.create_future()
        self.written: asyncio.Future[None] = loop.create_future()

    def lose(self, error: BaseException) -> None:
        if not self.written.done():
            self.written.set_exception(error)
            self.written.exception()  # nobody may be waiting, and that is no bug


class _HandOut:
    """How the jobs of a taker are run: by the caller."""

    survives_jobs = False
    around: Around | None = None
    batches: BatchRuns | None = None

    def __init__(
        self,
        run: Run,
        on_end: OnEnd,
    ) -> None:
        self.run = run
        self.on_end: OnEnd | None = on_end

    async def start(self, slots: int) -> None:
        pass

    def resize(self, slots: int) -> None:
        pass

    async def aclose(self) -> None:
        pass


class Taker(JobConsumer):
    """Takes jobs of one queue for callers that run them.

        async with Taker("emails") as taker:
            async for job in taker:
                await taker.complete(job, await send(job.data))

    Jobs are taken when they are asked for; with `ahead=True` up to `concurrency` of them wait here already. Locks are
    renewed until a job is settled. What is not settled goes back with `close`, and no attempt is counted.
    """

    def __init__(
        self,
        queue: str,
        *,
        connection: str | Connection | None = None,
        prefix: str | None = None,
        ahead: bool = False,
        on_lost: Callable[[Job], None] | None = None,
        **options: Unpack[WorkerArguments],
    ) -> None:
        """`options` are those of `Worker`, but for what says how a handler is run; `concurrency` is the most jobs that
        are held at the same time, and `close_timeout` how long `close` waits for what is held (0: it is given back at
        once). `on_lost` is called with a job that stops being ours before it was settled: its lock expired, somebody
        cancelled it, or the taker was closed."""
        require("ahead", isinstance(ahead, bool), "True or False", ahead)
        require("on_lost", on_lost is None or callable(on_lost), "a function that takes a Job", on_lost)
        given: Mapping[str, Any] = options
        for name in _OF_HANDLERS:
            if name in given:
                raise InvalidOption(name, "an option that needs no handler", given[name])
        # How much a taker holds is for whoever settles it to know.
        slots = options.get("concurrency", 1)
        require("concurrency", isinstance(read_concurrency(slots), int), "a number", slots)
        options.setdefault("close_timeout", 0)
        super().__init__(queue, connection, prefix, options)
        self._runner = _HandOut(self._run, self._on_end)
        self._ahead, self._on_lost = ahead, on_lost
        self._held: dict[Job, _Held] = {}
        self._ready: deque[Job] = deque()
        self._waiting: deque[asyncio.Future[Job | None]] = deque()

    # ---- taking -----------------------------------------------------------------------------------------------

    async def take(self, timeout: int | timedelta | None = None) -> Job | None:
        """The next job, when there is one; None after `timeout` without one.

        Raises QueueClosed when the taker closes or is closed: a loop that took None for "not yet" would never end.
        Raises QueueError where it could wait for ever: without `timeout`, from a task that took by `take` all of the
        `concurrency` jobs that are held. Where other tasks settle what this one takes, use `async for job in taker`.
        """
        within_s = None if timeout is None else to_ms("timeout", timeout) / 1000
        self._started()
        task = asyncio.current_task()
        if within_s is None and not self._is_closing:
            self._check_free(task)
        job = await self._next(within_s)
        if job is None and self._is_closing:
            raise QueueClosed(
                f"the taker of queue {self.queue_name!r} is closed; make a new Taker", queue=self.queue_name
            )
        if job is not None and (held := self._held.get(job)) is not None:
            held.owner = task
        return job

    def _check_free(self, task: asyncio.Task[Any] | None) -> None:
        """Raise unless another task may give this one a slot by settling what it took itself."""
        taken = [held for held in self._held.values() if not held.outcome.done()]
        if len(taken) >= self._concurrency and all(held.owner is task for held in taken):
            raise QueueError(
                f"queue {self.queue_name!r}: this task holds {len(taken)} jobs and concurrency={self._concurrency} "
                "allows no more; settle one before the next take(), raise concurrency, or use `async for job in "
                "taker` where other tasks settle them",
                queue=self.queue_name,
            )

    async def _next(self, within_s: float | None = None) -> Job | None:
        if self._ready:
            return self._ready.popleft()
        if self._is_closing:
            return None
        waiter: asyncio.Future[Job | None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        self._ask()
        try:
            # A job that comes in the very moment in which nobody waits any more must not be lost: so the future is
            # asked, and not what the waiting returns.
            await asyncio.wait([waiter], timeout=within_s)
        except asyncio.CancelledError:
            if waiter.done() and (job := waiter.result()) is not None:
                self._offer(job)
            raise
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
                self._ask()
        return waiter.result() if waiter.done() else None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Job:
        job = await self._next()
        if job is None:
            raise StopAsyncIteration
        return job

    @property
    def held(self) -> int:
        """Jobs that were taken and are not settled."""
        return len(self._held)

    @property
    def is_ready(self) -> bool:
        """As a worker's. One that nobody asks for a job is ready, too, while its server is not known to be away."""
        if self._ahead or self._waiting:
            return super().is_ready
        return self.is_alive and not self._is_closing and not self._started().door.is_lost

    # ---- settling ---------------------------------------------------------------------------------------------

    async def settle(self, job: Job, outcome: Outcome) -> None:
        """Store the outcome of a job; returns when the server has it. Raises JobLockLost when the job is not ours any
        more, or the server does not answer within the lock's duration: then another worker may run it again."""
        require("outcome", isinstance(outcome, Outcome), "an outcome", outcome)
        held = self._held.get(job)
        if held is None or held.outcome.done():
            raise self._why_not_held(job)
        held.outcome.set_result(outcome)
        try:
            async with asyncio.timeout(self.options.lock_ms / 1000):
                await held.written
        except TimeoutError:
            raise self._lost(job, "the server did not confirm it in time") from None

    async def complete(self, job: Job, value: Any = None) -> None:
        """It is done; `value` is its result. Raises NotJson or PayloadTooLarge, and changes nothing, when that cannot
        be stored."""
        sealer = self._started().actions.sealer
        value_json = json.encode(value if sealer is None else sealer.seal_result(value), what="return value")
        json.check_result_size(len(value_json))
        await self.settle(job, Completed(value_json))

    async def fail(self, job: Job, error: BaseException | str) -> Retry | Failed:
        """It has failed: what that means is decided as for a handler that raised `error`, by the job's attempts and
        backoff and by the policy. Returns what was decided."""
        require("error", isinstance(error, BaseException | str), "an error or a text", error)
        raised = RuntimeError(error) if isinstance(error, str) else error
        outcome = self._started().runs.judge(job, Raised(raised))
        if not isinstance(outcome, Retry | Failed):
            raise InvalidOption(
                "error", "an error that a handler may raise to fail; for other outcomes see `move_to_…`", error
            )
        await self.settle(job, outcome)
        return outcome

    async def move_to_delayed(self, job: Job, delay: int | timedelta) -> None:
        """It runs again after `delay`. No attempt is counted."""
        await self.settle(job, Delayed(to_ms("delay", delay)))

    async def move_to_wait(self, job: Job) -> None:
        """Back to the front of the line. No attempt is counted."""
        await self.settle(job, Waiting())

    async def move_to_waiting_children(self, job: Job) -> None:
        """It waits until its children have ended, and runs again then. No attempt is counted."""
        await self.settle(job, WaitingChildren())

    async def extend_lock(self, job: Job, duration: int | timedelta | None = None) -> None:
        """Hold the job for `duration` (default: `lock`) from now on, for takers with `skip_lock_renewal`; others renew
        locks by themselves. Raises JobLockLost when it is not ours any more."""
        lock_ms = self.options.lock_ms if duration is None else to_ms("duration", duration, minimum=1)
        engine = self._started()
        args = renew_arguments(self._keys, lock_ms, [job])
        lost, _, gone, _ = await engine.actions.evaluate("renew", [self._keys.stalled], args)
        if lost:
            raise JobLockLost(self.queue_name, job.id, 0, "its lock expired", is_gone=bool(gone))

    def _why_not_held(self, job: Job) -> JobLockLost:
        why = "it was settled already"
        if not job.token:
            why = "it was not taken by a taker"
        elif job.cancelled and job.cancel_reason is None and self._is_closing:
            why = "it went back when its taker closed, and runs again"
        elif job.cancelled:
            return self._lost(job, "it was taken back")
        return JobLockLost(self.queue_name, job.id, 0, why, is_over=True)

    def _lost(self, job: Job, why: str) -> JobLockLost:
        return JobLockLost(self.queue_name, job.id, 0, why, cancelled=job.cancel_reason)

    # ---- handing out ------------------------------------------------------------------------------------------

    async def _run(self, job: Job, timeout_s: float | None) -> Ended:
        """Hand the job out, and wait for its outcome."""
        held = self._held[job] = _Held()
        self._offer(job)
        try:
            return await held.outcome
        except asyncio.CancelledError:
            # The lock is lost, somebody cancelled it, or we close: somebody else may have it from now on.
            self._lose(job, self._lost(job, "it was taken back"))
            raise
        finally:
            self._ask()

    def _on_end(self, job: Job, error: JobLockLost | None) -> None:
        """The server has the outcome, or refused it."""
        if error is not None:
            self._lose(job, error)
        elif (held := self._held.pop(job, None)) is not None and not held.written.done():
            held.written.set_result(None)

    def _offer(self, job: Job) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(job)
                return
        if self._ahead and not self._is_closing:
            self._ready.append(job)
        else:
            self._hand_back(job)  # whoever asked for it has gone

    def _hand_back(self, job: Job) -> None:
        if (held := self._held.get(job)) is not None and not held.outcome.done():
            held.outcome.set_result(Waiting())

    def _lose(self, job: Job, error: JobLockLost) -> None:
        held = self._held.pop(job, None)
        if job in self._ready:
            self._ready.remove(job)
        if held is None:
            return
        job.cancelled = True
        held.lose(error)
        if self._on_lost is not None:
            self._on_lost(job)

    @property
    def _slots(self) -> int:
        """Without `ahead` as many are free as calls of `take` wait."""
        if self._ahead:
            return self._concurrency
        held = sum(not held.outcome.done() for held in self._held.values())
        return min(self._concurrency, held + len(self._waiting))

    def _ask(self) -> None:
        if not self._ahead and self._engine is not None and not self._is_closing:
            self._engine.driver.resize(self._slots)

    async def _end(self) -> None:
        self.hand_out_no_more()
        await super()._end()

    def hand_out_no_more(self) -> None:
        """What was taken and nobody received goes back; what was received stays until it is settled. Loops over the
        taker end, and `take` raises QueueClosed."""
        self._is_closing = True
        while self._ready:
            self._hand_back(self._ready.pop())  # each goes before those that went back already
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
