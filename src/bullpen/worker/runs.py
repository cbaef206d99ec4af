"""The jobs that run here, each from its start to its outcome.

In: taken jobs, and how a job is run (a handler, or somebody who takes it by hand). Out: one outcome each, or none for a
run that lost its lock. What must not run does not: a failure that somebody else decided, data that cannot be read, more
starts than are allowed. Elsewhere: running user code (`handlers`), storing outcomes (`driver`), what the server makes
of them (`settling`), suspects and schedulers (`suspects`, `scheduler`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from enum import Enum
from typing import Final

from bullpen._kernel import json, tracing
from bullpen._kernel.outcome import (
    RETURNED_NOTHING,
    Cause,
    Completed,
    Delayed,
    Ended,
    Failed,
    Outcome,
    Raised,
    Retry,
    Waiting,
    describe,
    failure_in,
    judge,
)
from bullpen._kernel.policy import RetryPolicy
from bullpen.errors import ConnectionLost, CorruptJob, JobLockLost, NotJson
from bullpen.queue.job import Job
from bullpen.wire.cancels import cancel_text, reason_in
from bullpen.worker.exchange import JobSettlement, new_settlement
from bullpen.worker.handlers import Run
from bullpen.worker.options import WorkerOptions
from bullpen.worker.reports import Reports
from bullpen.worker.scheduler import Back, Schedulers, Skipped
from bullpen.worker.sealed import Unopened
from bullpen.worker.suspects import Suspects, SuspectVerdict, is_suspect

_NULL: Final = Completed(b"null")


class GivenUp(Enum):
    """Why a run ended without a result."""

    LOCK_LOST = "lock lost"
    CANCELLED = "cancelled"
    CLOSING = "closing"


class JobRuns:
    """Of one worker."""

    on_settled: Callable[[], None]
    """Called with an outcome while it is awaited."""
    wake: Callable[[], None]
    """Called when a run has ended that has none."""
    call: Callable[[], None]
    """Called when there may be jobs to take."""

    def __init__(
        self,
        queue: str,
        worker: str,
        options: WorkerOptions,
        policy: RetryPolicy,
        reports: Reports,
        execute: Run,
        suspects: Suspects,
        schedulers: Schedulers,
        *,
        opens_sealed: bool,
        survives_jobs: bool,
    ) -> None:
        """`opens_sealed`: there is a codec. `survives_jobs`: a job that dies takes nobody with it."""
        self._queue, self._worker = queue, worker
        self._options, self._policy, self._reports, self._execute = options, policy, reports, execute
        self._timeouts_s = options.timeouts_s
        self._timeout_s, self._limits_starts = options.timeout_s, options.max_started_attempts is not None
        self.suspects, self._schedulers = suspects, schedulers
        self._opens_sealed, self._survives_jobs = opens_sealed, survives_jobs
        self._unopened = Unopened(reports.tell_error)
        self._loop = asyncio.get_running_loop()
        self.running: dict[Job, asyncio.Task[None]] = {}
        self.locked: dict[str, Job] = {}
        """By id, every job whose lock we hold; the keepalive thread copies it."""
        self.settled: list[JobSettlement] = []
        """Outcomes that wait to be sent."""
        self.is_awaited = False
        """Nothing is under way that sees new outcomes by itself."""
        self._given_up: dict[Job, GivenUp] = {}
        self._gone: set[Job] = set()
        """Given up because the server has no such job any more."""

    # ---- starting ---------------------------------------------------------------------------------------------

    def start(self, jobs: list[Job]) -> None:
        locked, running, create_task = self.locked, self.running, self._loop.create_task
        for job in jobs:
            if job.id in locked:
                self._lose_earlier_run(job)
            locked[job.id] = job
            running[job] = create_task(self._run(job))
        if self._reports.are_wanted("active"):  # asked once per batch; no task has had its first step yet
            for job in jobs:
                if job in running:
                    self._reports.tell_active(job)

    def give_back(self, jobs: list[Job]) -> None:
        """They have not begun, so they simply go back: each before those that did already, so the last one first."""
        for job in reversed(jobs):
            if job.id in self.locked:
                self._lose_earlier_run(job)
            self.locked[job.id] = job
            self.settle(job, Waiting())

    def _lose_earlier_run(self, job: Job) -> None:
        """An earlier run of the same job lost its lock here and does not know yet."""
        self.lose([(job.id, self.locked[job.id].token)])

    # ---- ending early -----------------------------------------------------------------------------------------

    def lose(self, lost: Collection[tuple[str, str]], gone: frozenset[str] = frozenset()) -> None:
        """The locks of these runs (job id, token) are gone; of `gone` the jobs are, too."""
        for job, task in list(self.running.items()):
            if (job.id, job.token) in lost:
                job.cancelled = True
                if job.id in gone:
                    self._gone.add(job)
                self._give_up(job, task, GivenUp.LOCK_LOST)

    def cancel(self, job_id: str, token: str, reason: str) -> bool:
        """Somebody wants this run to end. False: it has ended by itself, or ends already."""
        job = self.locked.get(job_id)
        task = None if job is None or job.token != token else self.running.get(job)
        if job is None or task is None or job in self._given_up:
            return False
        job.note_cancelled(reason)
        self._give_up(job, task, GivenUp.CANCELLED)
        return True

    def cancel_for_closing(self) -> list[asyncio.Task[None]]:
        """End all runs; their jobs go back: each before those that did already, so the last one first."""
        tasks = list(reversed(self.running.items()))
        for job, task in tasks:
            self._give_up(job, task, self._given_up.get(job, GivenUp.CLOSING))
        return [task for _, task in tasks]

    def _give_up(self, job: Job, task: asyncio.Task[None], why: GivenUp) -> None:
        self._given_up[job] = why
        task.cancel()
        task.add_done_callback(lambda _: self._finish_unbegun(job))

    def _finish_unbegun(self, job: Job) -> None:
        """A task that is cancelled before its first step never runs, and so does not finish its job."""
        if job in self.running:
            self._finish(job, self._given_up_outcome(job), time.monotonic())

    def _given_up_outcome(self, job: Job) -> Outcome | None:
        match self._given_up.pop(job):
            case GivenUp.CLOSING:
                return Waiting()
            case GivenUp.CANCELLED:
                text = cancel_text(job.cancel_reason or "")
                return Failed(text, text, Cause.CANCELLED)
            case GivenUp.LOCK_LOST:
                return None

    # ---- one job ----------------------------------------------------------------------------------------------

    async def _run(self, job: Job) -> None:
        started = time.monotonic()
        outcome: Outcome | None
        try:
            # Nearly all: straight to the handler.
            if job.is_ordinary and not self._limits_starts and job.record.decode_data():
                timeout_s = self._timeouts_s.get(job.name, self._timeout_s) if self._timeouts_s else self._timeout_s
                result = await (self._execute(job, timeout_s) if tracing.tracer is None else self._traced(job))
                nothing_special = result is RETURNED_NOTHING and not self._given_up
                outcome = _NULL if nothing_special else self._outcome(job, result)
            else:
                outcome = self._refusal(job) or await self._run_with_care(job)
        except asyncio.CancelledError as error:
            outcome = self._given_up_outcome(job) if job in self._given_up else self.judge(job, Raised(error))
        except BaseException as error:  # noqa: BLE001 - a bug of ours must not leave the slot taken for ever
            outcome = Failed(*describe(error), Cause.PERMANENT, error)
            self._reports.tell_error(error)
        self._finish(job, outcome, started)

    def _finish(self, job: Job, outcome: Outcome | None, started: float) -> None:
        del self.running[job]
        if self.suspects.waiting:
            self.suspects.note_running(len(self.running))
        elif self.suspects.have_ended:
            self.suspects.have_ended = False
            self.call()  # nothing was taken while they waited and ran
        if outcome is not None:
            self.settled.append(new_settlement((job, outcome)))
            if self.is_awaited:
                self.on_settled()
            return
        self.forget_lock(job)
        held_ms = int((time.monotonic() - started) * 1000)
        is_gone = job in self._gone
        self._gone.discard(job)
        self._reports.tell_lock_lost(job, JobLockLost(self._queue, job.id, held_ms, is_gone=is_gone))
        self.wake()

    def settle(self, job: Job, outcome: Outcome) -> None:
        """For a job that does not run: not begun, or run before."""
        self.settled.append(new_settlement((job, outcome)))
        self.wake()

    def forget_lock(self, job: Job) -> None:
        if self.locked.get(job.id) is job:  # a later run of the same job may have its own by now
            del self.locked[job.id]

    async def _run_with_care(self, job: Job) -> Outcome | None:
        """One that stalled before, or that a scheduler made. None: the lock is lost, and nothing may be written."""
        if is_suspect(job) and not self._survives_jobs:
            return await self._run_alone(job)
        return await self._run_in_schedule(job)

    async def _run_in_schedule(self, job: Job) -> Outcome | None:
        if job.record.scheduler_id is not None and (given_back := await self._advance_scheduler(job)) is not None:
            return given_back
        timeout_s = self._timeouts_s.get(job.name, self._timeout_s)
        run = self._execute(job, timeout_s) if tracing.tracer is None else self._traced(job)
        return self._outcome(job, await run)

    async def _run_alone(self, job: Job) -> Outcome | None:
        """Run a suspect when nothing else runs. None: the lock is lost, and nothing may be written."""
        with self.suspects.watched():
            verdict, deaths = await self.suspects.judge(job)
            if verdict is SuspectVerdict.LOST:
                return None
            if verdict is SuspectVerdict.CONDEMNED:
                times = "time" if deaths == 1 else "times"
                reason = f"killed its worker {deaths} {times} while it ran alone (stalled {job.stalled_count} times)"
                return Failed(reason, reason, Cause.POISON)
            self._reports.tell_suspect(job)
            async with self.suspects.alone(job, lambda: len(self.running)) as is_ours:
                return await self._run_in_schedule(job) if is_ours else None

    async def _traced(self, job: Job) -> Ended:
        """The run as a span of the trace that the job came with, named as Node's library names it."""
        with tracing.processing(
            *("bullmq", self._queue, job.id),
            tracing.from_text(job.opts.tm),
            messaging__client__id=self._worker,
            bullmq__queue__name=self._queue,
            bullmq__job__id=job.id,
            bullmq__job__name=job.name,
            bullmq__job__attempts__made=job.attempts_made,
            bullmq__worker__name=self._worker,
        ) as span:
            job.traced_in = tracing.trace_id(tracing.carrier())
            result = await self._execute(job, self._timeouts_s.get(job.name, self._timeout_s))
            if (failure := failure_in(result)) is not None:
                span.fail(failure)
            return result

    async def _advance_scheduler(self, job: Job) -> Waiting | Delayed | Completed | None:
        """Store the scheduler's next job before this one runs. If that cannot be done the job does not run here, or its
        schedule would end: somebody shall take it again."""
        try:
            answer = await self._schedulers.advance(job)
        except ConnectionLost as error:
            self._reports.tell_error(error)
            return Waiting()
        match answer:
            case Back(delay_ms):
                return Delayed(delay_ms)
            case Skipped(why):
                return Completed(json.encode({"skipped": why}))
        return None

    # ---- judging ----------------------------------------------------------------------------------------------

    def _outcome(self, job: Job, result: Ended) -> Outcome | None:
        if job in self._given_up:  # cancelled, but the handler caught it and came back
            return self._given_up_outcome(job)
        return self.judge(job, result)

    def judge(self, job: Job, result: Ended) -> Outcome:
        """The outcome of one attempt, by the job's own options and the worker's policy."""
        opts = job.opts
        outcome = judge(
            result,
            attempts_made_before=job.attempts_made,
            attempts=opts.attempts,
            backoff=opts.backoff,
            policy=self._policy,
            subject=job,
        )
        most = self._options.max_started_attempts
        if isinstance(outcome, Retry) and most is not None and job.attempts_started >= most:
            error = result.error if isinstance(result, Raised) else None
            return Failed(outcome.reason, outcome.stack, Cause.EXHAUSTED, error, outcome.is_logged)
        return outcome

    def _refusal(self, job: Job) -> Failed | Delayed | None:
        """A job that must not be run: it fails, or comes back when somebody can open it."""
        deferred = job.record.deferred_failure
        if deferred is not None:
            is_cancelled = reason_in(deferred) is not None
            return Failed(deferred, deferred, Cause.CANCELLED if is_cancelled else Cause.DEFERRED)
        ttl_ms = job.opts.ttl_ms
        if ttl_ms and job.attempts_started <= 1 and (waited_ms := job.processed_on - job.record.due_ms) > ttl_ms:
            reason = f"expired: waited {waited_ms} ms, ttl is {ttl_ms} ms"
            return Failed(reason, reason, Cause.EXPIRED)
        most = self._options.max_started_attempts
        if most is not None and job.attempts_started > most:
            reason = f"was started {job.attempts_started} times, this worker allows {most}"
            return Failed(reason, reason, Cause.EXHAUSTED)
        stalls = job.stalled_count if self._options.count_stalls_as_attempts else 0
        if stalls and job.attempts_made + stalls >= job.opts.attempts:
            reason = f"stalled {stalls} times and failed {job.attempts_made} times of {job.opts.attempts} attempts"
            return Failed(reason, reason, Cause.EXHAUSTED)
        try:
            _ = job.data
        except NotJson as error:
            # Not the error's own text, which shows the data: payloads are never logged.
            reason = f"data cannot be read: {error.option}: expected {error.expected}"
            corrupt = CorruptJob(reason, queue=self._queue, job_id=job.id)
            return Failed(*describe(corrupt), Cause.BAD_DATA, corrupt)
        return self._unopened.refuse(job) if not self._opens_sealed and job.record.is_sealed else None
