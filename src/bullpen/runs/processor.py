"""Process the job of a run, and see to it when it has failed for good.

    begin (one transaction) ─▶ handler ─▶ end (one transaction)

The job only says which run; the row decides. Beginning takes a fence on the row, and whoever does not hold the newest
one writes nothing. Transactions are short and surround the work; none is open while the handler runs. A failure that
will be retried puts the run back to QUEUED, so a run that is found RUNNING was left by an owner that died.
When a job fails finally, the queue has its dead letter first (the script that moves the job writes it), and the failure
handler here updates the run second. Either may be repeated without a second effect.
Elsewhere: storing runs and their jobs (`service`), what both miss (`maintenance`), steps (`steps`).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from bullpen._kernel import json, telemetry
from bullpen._kernel.breaker import CircuitBreaker
from bullpen._kernel.duration import check_int
from bullpen._kernel.outcome import Untrusted, describe
from bullpen._kernel.policy import WORKFLOW_RUN, RetryPolicy
from bullpen._kernel.scrub import summary
from bullpen.errors import (
    BullpenError,
    DatabaseUnavailable,
    DelayJob,
    InsufficientCredits,
    InvalidOption,
    JobSignal,
    LedgerError,
    NotJson,
    PermanentError,
    RateLimited,
)
from bullpen.ledger import RunRow, RunStatus, TenantRuns, TransactionManager, check_run_id, check_tenant
from bullpen.queue import Job, Queue
from bullpen.runs._logs import log
from bullpen.runs.handlers import MAX_RESULT_BYTES, QUEUE
from bullpen.runs.payload import LEDGER_HEADER, read_payload
from bullpen.runs.providers import ProviderLimits
from bullpen.runs.steps import Run, RunInterrupted, encode_result

__all__ = [
    "Begin",
    "ForeignRun",
    "OtherHandler",
    "RunHandler",
    "RunProcessor",
    "SkipRun",
    "Take",
    "UnknownRun",
    "decide",
    "fail_run",
    "failure_message",
    "is_old_news",
    "placeholder",
]

RunHandler = Callable[[Run], Awaitable[Any]]

_DATABASE_RETRY_MS: Final = 2_000
_FAILED_BEFORE: Final = f"SKIPPED_{RunStatus.FAILED.value}"
_MOST_HISTORY: Final = 100
_RELEASE_S: Final = 0.4
"""How long a cancelled attempt may take to give its run back: less than the grace that a closing worker gives."""


_FOREIGN_PAUSE_MS: Final = 250
_LONGEST_FOREIGN_PAUSE_MS: Final = 30_000


class ForeignRun(DelayJob):
    """The job names another ledger: an application of its own uses the same queue. It goes back, for a worker of that
    application; the more often it comes to the wrong ones, the longer it waits."""

    def __init__(self, job: Job, ledger_id: str) -> None:
        super().__init__(_pause_ms(job), f"run {job.id} is of ledger {ledger_id}")
        self.ledger_id = ledger_id


class OtherHandler(DelayJob):
    """The run is for a handler that another process has on the same queue. It goes back, as a foreign one does."""

    def __init__(self, job: Job, handler: str | None) -> None:
        super().__init__(_pause_ms(job), f"run {job.id} is for handler {handler!r}")
        self.handler = handler


def _pause_ms(job: Job) -> int:
    return min(_FOREIGN_PAUSE_MS << min(max(job.fence - 1, 0), 10), _LONGEST_FOREIGN_PAUSE_MS)


class UnknownRun(Untrusted):
    """The job names a run that is not there under the tenant it names, or is not its own. It is dead-lettered at once:
    a retry would change nothing, and it may be forged."""


def failure_message(attempts: int, error: str) -> str:
    """What people read in the history of a run."""
    return f"Workflow execution failed after {attempts} attempts: {summary(error)}"


async def placeholder(run: Run) -> None:
    """The handler of a service that was given none: says so and does nothing."""
    log(logging.INFO, f"Run {run.id} has no handler; nothing was done", job_id=run.job.id, run_id=run.id,
        tenant_id=run.tenant_id)  # fmt: skip


# Deciding -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Take:
    """Which take of which job asks: a job that was taken again has a larger fence."""

    timestamp: int
    fence: int
    redriven_from: int | None = None
    """The take whose failure an operator sent back, if one did."""

    @classmethod
    def of(cls, job: Job) -> Take:
        return cls(job.timestamp, job.fence, _redriven_from(job))


@dataclass(frozen=True, slots=True)
class SkipRun:
    """Do nothing; the job completes."""

    message: str
    outcome: str


@dataclass(frozen=True, slots=True)
class Begin:
    """Go to work."""

    is_recovery: bool = False
    is_redrive: bool = False


def decide(row: RunRow, take: Take) -> SkipRun | Begin:
    """What a take of the job may do with the run as it is. Pure."""
    is_known_job = row.job_timestamp == take.timestamp
    if row.status is RunStatus.FAILED and is_known_job and _is_redrive_of(row, take):
        return Begin(is_redrive=True)
    if row.status.is_terminal:
        return SkipRun(f"Run {row.id} is already {row.status.value}, its job is skipped", f"SKIPPED_{row.status.value}")
    if is_known_job and take.fence <= row.job_fence:
        # A worker that slept between taking the job and asking: a later take has the run.
        return SkipRun(
            f"Run {row.id} was started by a later attempt of its job; this attempt is skipped", "SKIPPED_LATE"
        )
    return Begin(is_recovery=row.status is RunStatus.RUNNING)


def _is_redrive_of(row: RunRow, take: Take) -> bool:
    """True when the failure that ended the run was sent back at the dead-letter queue, past the service."""
    return take.redriven_from is not None and row.job_fence <= take.redriven_from < take.fence


def _redriven_from(job: Job) -> int | None:
    try:
        notes = json.decode(job.record.field(b"bpredriven") or b"[]")
        return int(str(notes[-1]["entry"]).rpartition("-")[2])
    except (BullpenError, ValueError, TypeError, LookupError):
        return None  # never redriven, or a note that nobody of ours wrote


# Doing --------------------------------------------------------------------------------------------------------------


class RunProcessor:
    """The handler of the queue of runs, and what follows when it fails.

    It holds a `TransactionManager` and no database: every access names its tenant. `heartbeat_ms` is how often a
    running attempt shows that it lives and looks whether the run was cancelled; `patience_ms` how long finished work
    waits for a database that is away; `timeout_ms` how long an attempt may take. `name` is the handler's: runs of
    another one are left alone.
    """

    def __init__(
        self,
        transactions: TransactionManager,
        handler: RunHandler = placeholder,
        *,
        name: str | None = None,
        queue: Queue | None = None,
        policy: RetryPolicy = WORKFLOW_RUN.policy,
        providers: ProviderLimits | None = None,
        breaker: CircuitBreaker | None = None,
        heartbeat_ms: int = 15_000,
        patience_ms: int = 60_000,
        timeout_ms: int | None = None,
        max_result_bytes: int = MAX_RESULT_BYTES,
    ) -> None:
        if not inspect.iscoroutinefunction(handler):
            raise InvalidOption("handler", "an `async def` function that takes a Run", handler)
        self._transactions, self._handler, self._name = transactions, handler, name
        self._queue, self._policy = queue, policy.over(WORKFLOW_RUN.policy)
        self._providers, self._breaker = providers, breaker
        self._foreign = set[str]()
        self._others = set[str | None]()
        self._heartbeat_s = check_int("heartbeat_ms", heartbeat_ms, minimum=1) / 1000
        self._patience_s = check_int("patience_ms", patience_ms, minimum=1) / 1000
        self._timeout_s = None if timeout_ms is None else check_int("timeout_ms", timeout_ms, minimum=1) / 1000
        self._max_result_bytes = max_result_bytes

    async def process(self, job: Job) -> dict[str, str]:
        """Run one job. Returns the outcome of the run; raises what the handler raised, for the queue to judge."""
        self._wait_for_breaker()
        run_id, tenant_id = self._identify(job)
        begun = await self._begin(job, Take.of(job), run_id, tenant_id)
        if isinstance(begun, SkipRun) and begun.outcome == _FAILED_BEFORE and self._queue is not None:
            # Perhaps an operator sent it back at the dead-letter queue. Workers do not read that note with each job.
            stored = await self._queue.get_job(job.id)
            if stored is not None and (sent_back := Take.of(stored)).redriven_from is not None:
                begun = await self._begin(job, sent_back, run_id, tenant_id)
        if isinstance(begun, SkipRun):
            self._log(logging.WARNING, begun.message, job, tenant_id=tenant_id)
            self._abandon_probe()
            return {"runId": run_id, "outcome": begun.outcome}
        telemetry.emit("runs.begun", run_id=run_id, tenant_id=tenant_id, fence=begun.fence)
        try:
            result = await self._work(begun)
            outcome = await self._complete(begun, result)
        except asyncio.CancelledError:
            self._abandon_probe()
            await self._give_back(begun, job)
            raise
        except RunInterrupted as interruption:
            self._abandon_probe()
            return await self._explain(begun, job, interruption)
        except Exception as error:
            if isinstance(error, JobSignal) and not isinstance(error, PermanentError):
                self._abandon_probe()  # DelayJob and the like: the handler did not fail, it wants to be called again
                await self._give_back(begun, job)
                raise
            await self._note_failure(begun, job, error)
            if isinstance(error, PermanentError):
                self._abandon_probe()  # the fault of the run, not of the engine
            else:
                await self._report_failure()
            raise
        self._report_success()
        return outcome

    async def on_failed(self, job: Job, reason: str, *, attempts: int | None = None) -> None:
        """The failure handler: called when the job has entered `failed` and its dead letter is safe. Never raises.

        Sets the run to FAILED with a readable message and refunds it; a second call changes nothing.
        """
        made = job.attempts_made if attempts is None else attempts
        try:
            run_id, tenant_id = self._identify(job)
        except (PermanentError, UnknownRun):
            self._log_failure(job, reason, made, note="it names no run of its own; only its dead letter records it")
            return
        self._log_failure(job, reason, made)

        async def fail(runs: TenantRuns) -> bool:
            if await _foreign_ledger(runs, job) is not None:
                return True  # its own application finds its dead letter, and the run without a job
            row = await runs.get(run_id)
            if row is None or not self._is_here(row):
                return row is not None  # the job of the run is another one
            return await fail_run(runs, run_id, Take.of(job), failure_message(made, reason))

        try:
            known = await self._transactions.run(tenant_id, fail)
        except (LedgerError, OSError) as error:
            # The job's data is safe in its dead letter; the reconciler updates the run when the database is back.
            self._log(logging.ERROR, f"Run {run_id} could not be set to FAILED", job, tenant_id=tenant_id,
                      error=summary(str(error)))  # fmt: skip
            return
        if not known:
            self._log(logging.ERROR, f"Run {run_id} does not exist; its dead letter is kept", job, tenant_id=tenant_id)
        telemetry.emit("runs.failed", run_id=run_id, tenant_id=tenant_id)

    # ---- the parts of an attempt --------------------------------------------------------------------------------

    def _identify(self, job: Job) -> tuple[str, str]:
        """Run and tenant that the job names. Not trusted: they are only used to ask for the row."""
        data = _data_of(job)
        try:
            run_id, tenant_id = check_run_id(data.get("runId")), check_tenant(data.get("tenantId"))
        except InvalidOption as error:
            raise PermanentError(f"the job names no run: {error}") from None
        if job.id != run_id:
            self._report_security(job, run_id, tenant_id)
            raise UnknownRun(f"job {job.id} claims run {run_id}, which is not its own")
        return run_id, tenant_id

    def _is_here(self, row: RunRow) -> bool:
        """Whether the job of the run is in this processor's queue: one that lies elsewhere is none of its jobs."""
        return self._queue is None or (row.queue or QUEUE) == self._queue.name

    async def _begin(self, job: Job, take: Take, run_id: str, tenant_id: str) -> Run | SkipRun:
        async def begin(runs: TenantRuns) -> Run | SkipRun | None:
            if (ledger_id := await _foreign_ledger(runs, job)) is not None:
                raise ForeignRun(job, ledger_id)
            row = await runs.get(run_id, lock=True)
            if row is None:
                await runs.audit(
                    "bullpen.runs", "run.security", run_id, jobId=job.id, reason="no such run of the tenant"
                )
                return None
            if not self._is_here(row):
                await runs.audit(
                    "bullpen.runs", "run.security", run_id, jobId=job.id, reason=f"its queue is {row.queue or QUEUE}"
                )
                return None
            if row.handler != self._name:
                raise OtherHandler(job, row.handler)
            decision = decide(row, take)
            if isinstance(decision, SkipRun):
                return decision
            if decision.is_redrive:
                row = await runs.requeue(run_id, actor="dead-letter queue") or row
            if decision.is_recovery:
                message = f"Recovering stale run {run_id} — previous attempt did not complete"
                self._log(logging.WARNING, message, job, tenant_id=tenant_id)
            started = await runs.start(run_id, job_timestamp=take.timestamp, job_fence=take.fence)
            assert started is not None  # locked above
            done = {step.name: step.price for step in await runs.steps(run_id)} if started.fence > 1 else {}
            return Run(
                self._transactions,
                started,
                read_payload(await runs.payload(run_id)),
                job,
                done_steps=done,
                queue=self._queue,
                providers=self._providers,
                patience_s=self._patience_s,
            )

        try:
            begun = await self._transactions.run_locking(tenant_id, begin)
        except DatabaseUnavailable as error:
            self._abandon_probe()
            raise DelayJob(_DATABASE_RETRY_MS, "the database does not answer") from error
        except InsufficientCredits as error:
            raise PermanentError(str(error)) from error
        except ForeignRun as error:
            self._abandon_probe()
            self._report_foreign(job, error, tenant_id=tenant_id)
            raise
        except OtherHandler as error:
            self._abandon_probe()
            level = logging.DEBUG if error.handler in self._others else logging.WARNING
            self._others.add(error.handler)
            self._log(level, f"Run {job.id} is for handler {error.handler!r}, not for {self._name!r}: it is returned",
                      job, tenant_id=tenant_id, operation="RUN_OTHER_HANDLER")  # fmt: skip
            raise
        if begun is None:
            self._report_security(job, run_id, tenant_id)
            raise UnknownRun(f"Run {run_id} not found for tenant {tenant_id}")
        return begun

    async def _work(self, run: Run) -> Any:
        """The handler, with a heartbeat beside it. A run that was cancelled or taken over, or takes too long, is
        stopped."""
        task = asyncio.ensure_future(self._handler(run))
        clock = asyncio.get_running_loop().time
        ends_at = math.inf if self._timeout_s is None else clock() + self._timeout_s
        try:
            while not (await asyncio.wait({task}, timeout=min(self._heartbeat_s, ends_at - clock())))[0]:
                if clock() >= ends_at:
                    raise TimeoutError(f"the handler took longer than {self._timeout_s:g} s")
                if not await self._is_ours(run):
                    raise RunInterrupted(f"run {run.id} was cancelled or taken over")
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        return task.result()

    async def _is_ours(self, run: Run) -> bool:
        try:
            return await self._transactions.run_alone(run.tenant_id, lambda runs: runs.beat(run.id, run.fence))
        except DatabaseUnavailable:
            return True  # nobody can tell; the fence keeps us from writing what is not ours

    async def _complete(self, run: Run, result: Any) -> dict[str, str]:
        result_json = encode_result(result, "result of the run", self._max_result_bytes)
        telemetry.emit("runs.completing", run_id=run.id)

        if await run.change(lambda runs: runs.complete(run.id, run.fence, result_json)) is None:
            raise RunInterrupted(f"run {run.id} was cancelled or taken over before it could complete")
        telemetry.emit("runs.completed", run_id=run.id, tenant_id=run.tenant_id)
        self._log(logging.INFO, f"Run {run.id} completed", run.job, tenant_id=run.tenant_id)
        return {"runId": run.id, "outcome": RunStatus.COMPLETED.value}

    async def _note_failure(self, run: Run, job: Job, error: Exception) -> None:
        """Write the failed attempt into the run's history, and give the run back if there will be another attempt."""
        is_final = job.is_last_attempt or self._policy.is_final(error)
        reason = summary(describe(error)[0])

        async def note(runs: TenantRuns) -> None:
            row = await runs.get(run.id, lock=True)
            if row is None:
                return
            entry = {"attempt": job.attempts_made + 1, "at": await runs.instant(), "error": reason}
            history = [*row.retry_history, entry][-_MOST_HISTORY:]
            await runs.note_failure(
                run.id,
                run.fence,
                history_json=json.encode(history).decode(),
                attempts=job.attempts_made + 1,
                will_retry=not is_final,
            )

        if not is_final:
            self._log(logging.WARNING, f"Run {run.id} failed and will be tried again", job, tenant_id=run.tenant_id,
                      error=reason, attemptsMade=job.attempts_made + 1)  # fmt: skip
        try:
            await self._transactions.run(run.tenant_id, note)
        except (LedgerError, OSError) as lost:
            # The handler's error matters more. The run stays RUNNING, and the next attempt takes it over.
            self._log(logging.ERROR, f"A failed attempt of run {run.id} could not be stored", job,
                      tenant_id=run.tenant_id, error=summary(str(lost)))  # fmt: skip

    async def _give_back(self, run: Run, job: Job) -> None:
        """QUEUED again, with no attempt counted. If that fails the next attempt finds it RUNNING and takes it over."""
        giving = asyncio.ensure_future(
            self._transactions.run_alone(run.tenant_id, lambda runs: runs.release(run.id, run.fence))
        )
        with contextlib.suppress(LedgerError, OSError, TimeoutError):
            async with asyncio.timeout(_RELEASE_S):
                await asyncio.shield(giving)
                return
        giving.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._log(logging.WARNING, f"Run {run.id} could not be given back; another worker takes it over later", job,
                  tenant_id=run.tenant_id)  # fmt: skip

    async def _explain(self, run: Run, job: Job, interruption: RunInterrupted) -> dict[str, str]:
        row = await run.persist(lambda runs: runs.get(run.id))
        status = "GONE" if row is None else row.status.value
        self._log(logging.WARNING, f"Run {run.id} ended as {status} meanwhile: {interruption}", job,
                  tenant_id=run.tenant_id)  # fmt: skip
        return {"runId": run.id, "outcome": f"INTERRUPTED_{status}"}

    # ---- the breaker --------------------------------------------------------------------------------------------

    def _wait_for_breaker(self) -> None:
        if self._breaker is not None and (wait_ms := self._breaker.ask()):
            raise RateLimited(wait_ms, "the execution engine is down; no run is taken until it may work again")

    def _abandon_probe(self) -> None:
        if self._breaker is not None:
            self._breaker.abandoned()

    def _report_success(self) -> None:
        if self._breaker is not None and self._breaker.succeeded():
            log(logging.WARNING, "The execution engine works again")

    async def _report_failure(self) -> None:
        if self._breaker is None or not self._breaker.failed():
            return
        pause_ms = self._breaker.pause_ms
        log(logging.ERROR, f"The execution engine fails; no run is taken for {pause_ms} ms")  # fmt: skip
        if self._queue is not None:
            with contextlib.suppress(BullpenError):  # our own worker knows anyway; others learn it the hard way
                await self._queue.rate_limit(pause_ms)

    # ---- telling ------------------------------------------------------------------------------------------------

    def _report_security(self, job: Job, run_id: str, tenant_id: str) -> None:
        telemetry.emit("runs.security", job_id=job.id, run_id=run_id, tenant_id=tenant_id)
        message = f"Job {job.id} claims run {run_id} of tenant {tenant_id}, which is not stored"
        log(logging.ERROR, message, job_id=job.id, run_id=run_id, tenant_id=tenant_id, operation="RUN_SECURITY")

    def _report_foreign(self, job: Job, error: ForeignRun, *, tenant_id: str) -> None:
        """Each time for machines, once per ledger for people: the job will come again and again."""
        telemetry.emit("runs.foreign", job_id=job.id, tenant_id=tenant_id, ledger_id=error.ledger_id)
        level = logging.DEBUG if error.ledger_id in self._foreign else logging.WARNING
        self._foreign.add(error.ledger_id)
        self._log(level, f"Run {job.id} is of ledger {error.ledger_id}, which is not ours: it is returned for a worker "
                  "of its own application", job, tenant_id=tenant_id, operation="RUN_FOREIGN")  # fmt: skip

    def _log_failure(self, job: Job, reason: str, attempts: int, note: str = "") -> None:
        data = _data_of(job)
        message = f"Run {data.get('runId')} failed finally" + (f": {note}" if note else "")
        log(logging.ERROR, message, job_id=job.id, run_id=_text(data.get("runId")),
            tenant_id=_text(data.get("tenantId")), error=summary(reason), attemptsMade=attempts)  # fmt: skip

    def _log(self, level: int, message: str, job: Job, *, tenant_id: str, **fields: Any) -> None:
        log(level, message, job_id=job.id, run_id=job.id, tenant_id=tenant_id, **fields)


# What others need too -----------------------------------------------------------------------------------------------


def is_old_news(row: RunRow, take: Take) -> bool:
    """True for the failure of a take that the run has left behind: a later one began, or an operator sent it back."""
    if row.job_timestamp != take.timestamp:
        return False
    return take.fence < row.job_fence or (take.fence == row.job_fence and row.needs_job)


async def fail_run(runs: TenantRuns, run_id: str, take: Take, message: str) -> bool:
    """FAILED and refunded, unless it has ended or the failure is out of date. False when there is no such run."""
    failed = await runs.fail(run_id, error_message=message, job_timestamp=take.timestamp, job_fence=take.fence)
    return failed is not None or await runs.get(run_id) is not None


async def _foreign_ledger(runs: TenantRuns, job: Job) -> str | None:
    """The ledger that the job names, if it is not this one. A job that names none is ours to judge."""
    named = job.meta.headers.get(LEDGER_HEADER)
    return named if isinstance(named, str) and named != await runs.ledger_id() else None


def _data_of(job: Job) -> dict[str, Any]:
    try:
        data = job.data
    except NotJson:
        return {}
    return data if isinstance(data, dict) else {}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
