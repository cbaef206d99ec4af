"""The processor and its failure handler, attempt by attempt: a job that is in no queue, and a ledger in a file.

What a real queue adds (retries, dead letters, crashes) is in `test_lifecycle` and `test_chaos`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import sqlite3
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import pytest

from bullpen._kernel.outcome import Cause, Failed, Raised, judge
from bullpen._kernel.policy import WORKFLOW_RUN
from bullpen.errors import DelayJob, InvalidOption, PermanentError
from bullpen.ledger import Ledger, RunRow, RunStatus, TenantRuns, TransactionManager
from bullpen.queue import Job, Queue
from bullpen.redis import Connection
from bullpen.runs import Run, RunPayload, RunProcessor, RunService
from bullpen.runs import processor as processor_module
from bullpen.runs.processor import Begin, SkipRun, Take, UnknownRun, decide, failure_message, is_old_news, placeholder
from tests.databases import MakeLedger
from tests.runs.kit import ALICE, BOB, Records, fake_job, payload

T = TypeVar("T")


class Spy(TransactionManager):
    """A transaction manager that remembers whom it worked for, and can be told to be out of order."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger.database, ledger.enqueuer)
        self.tenants: list[str] = []
        self.error: Exception | None = None

    async def run(self, tenant_id: str, fn: Callable[[TenantRuns], Awaitable[T]]) -> T:
        self.tenants.append(tenant_id)
        if self.error is not None:
            raise self.error
        return await super().run(tenant_id, fn)


class Bench:
    """One processor on a ledger in a file."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.transactions = ledger, Spy(ledger)
        queue = Queue("workflow-execution", connection=Connection("redis://127.0.0.1:1"))  # never reached
        self.service = RunService(ledger.transactions, queue)
        self.calls: list[Run] = []
        self.result: Any = {"ok": True}
        self.before_end: Callable[[Run], Awaitable[None]] | None = None
        self.processor = RunProcessor(self.transactions, self._handle, heartbeat_ms=20, patience_ms=200)

    async def _handle(self, run: Run) -> Any:
        self.calls.append(run)
        if self.before_end is not None:
            await self.before_end(run)
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result

    async def submitted(self, **options: Any) -> RunPayload:
        wanted = payload()
        await self.service.submit(wanted, **options)
        return wanted

    async def row(self, run_id: str) -> RunRow:
        return await self.service.get(ALICE, run_id)

    async def fail(self, wanted: RunPayload, job: Job, error: Exception) -> None:
        """One attempt that fails, and the failure handler as the worker would call it."""
        self.result = error
        with pytest.raises(type(error)):
            await self.processor.process(job)
        if job.is_last_attempt or isinstance(error, PermanentError):
            ended = fake_job(wanted, attempts_made=job.attempts_made + 1, fence=job.fence)  # as it is stored by then
            await self.processor.on_failed(ended, str(error))


@pytest.fixture
def bench(sqlite_url: str, make_ledger: MakeLedger) -> Bench:
    return Bench(make_ledger(sqlite_url))


# ---- an attempt ------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("R-6", "R-7", "R-43")
async def test_a_queued_run_runs_and_completes(bench: Bench) -> None:
    wanted = await bench.submitted()
    during: list[RunRow] = []

    async def look(run: Run) -> None:
        during.append(await bench.row(run.id))

    bench.before_end = look
    outcome = await bench.processor.process(fake_job(wanted))

    row = await bench.row(wanted.run_id)
    assert outcome == {"runId": wanted.run_id, "outcome": "COMPLETED"}
    assert during[0].status is RunStatus.RUNNING and during[0].started_at is not None
    assert (row.status, row.result) == (RunStatus.COMPLETED, {"ok": True})
    assert row.completed_at is not None and row.duration_ms is not None and row.duration_ms >= 0


@pytest.mark.requirement("R-22", "R-24", "R-43")
@pytest.mark.parametrize("status", ["COMPLETED", "FAILED", "CANCELLED"])
async def test_a_run_that_has_ended_is_skipped_with_a_warning(bench: Bench, records: Records, status: str) -> None:
    wanted = await bench.submitted()
    job = fake_job(wanted)
    match status:
        case "COMPLETED":
            await bench.processor.process(job)
        case "FAILED":
            await bench.fail(wanted, fake_job(wanted, attempts_made=2), ValueError("no"))
        case "CANCELLED":
            await bench.transactions.run(ALICE, lambda runs: runs.cancel(wanted.run_id))
    before, calls = await bench.row(wanted.run_id), len(bench.calls)
    bench.result = "again"

    outcome = await bench.processor.process(fake_job(wanted, fence=9))

    assert outcome["outcome"] == f"SKIPPED_{status}"
    assert len(bench.calls) == calls
    assert await bench.row(wanted.run_id) == before
    assert f"Run {wanted.run_id} is already {status}, its job is skipped" in records.texts(logging.WARNING)


@pytest.mark.requirement("R-23", "X-110", "R-43")
async def test_a_run_that_was_left_running_is_taken_over(bench: Bench, records: Records) -> None:
    wanted = await bench.submitted()
    await bench.transactions.run(ALICE, lambda runs: runs.start(wanted.run_id, job_timestamp=1, job_fence=1))
    left = await bench.row(wanted.run_id)
    await asyncio.sleep(0.005)

    await bench.processor.process(fake_job(wanted, fence=2))

    row = await bench.row(wanted.run_id)
    assert row.status is RunStatus.COMPLETED
    assert left.started_at is not None and row.started_at is not None and row.started_at > left.started_at
    assert row.fence == left.fence + 1
    warning = f"Recovering stale run {wanted.run_id} — previous attempt did not complete"
    assert warning in records.texts(logging.WARNING)


@pytest.mark.requirement("R-9", "X-37", "R-43", "X-115")
async def test_an_unknown_run_raises_and_no_retry_is_left(bench: Bench) -> None:
    wanted = payload()

    with pytest.raises(UnknownRun, match=f"Run {wanted.run_id} not found for tenant {ALICE}") as raised:
        await bench.processor.process(fake_job(wanted))

    outcome = judge(Raised(raised.value), attempts_made_before=0, attempts=3, backoff=None)
    assert isinstance(outcome, Failed) and outcome.cause is Cause.SECURITY


@pytest.mark.requirement("X-115", "R-33")
async def test_a_run_of_another_tenant_is_as_good_as_unknown_and_written_down(bench: Bench, records: Records) -> None:
    wanted = await bench.submitted()
    forged = {**wanted.to_data(), "tenantId": BOB}

    with pytest.raises(UnknownRun):
        await bench.processor.process(fake_job(forged))

    assert (await bench.row(wanted.run_id)).status is RunStatus.QUEUED
    assert bench.calls == []
    (event,) = [record for record in records.all if getattr(record, "operation", "") == "RUN_SECURITY"]
    assert (event.runId, event.tenantId) == (wanted.run_id, BOB)  # type: ignore[attr-defined]  # fields of ours
    path = Path(str(bench.ledger.database.url.database))
    stored = sqlite3.connect(path)
    try:
        assert stored.execute("SELECT action, subject, tenant_id FROM bullpen_audit").fetchall() == [
            ("run.security", wanted.run_id, BOB)
        ]
    finally:
        stored.close()


@pytest.mark.requirement("X-115")
async def test_a_job_that_claims_the_run_of_another_job_is_refused(bench: Bench) -> None:
    """With the right tenant even: somebody who can add jobs must not be able to run, or to fail, a run twice."""
    wanted = await bench.submitted()
    job = fake_job(wanted, job_id="forged-1", attempts_made=2)

    with pytest.raises(UnknownRun, match="not its own"):
        await bench.processor.process(job)
    await bench.processor.on_failed(job, "forged")

    assert (await bench.row(wanted.run_id)).status is RunStatus.QUEUED


@pytest.mark.requirement("R-35", "X-114")
@pytest.mark.parametrize(
    "data",
    [
        {},
        [],
        {"runId": "no-uuid", "tenantId": ALICE},
        {"runId": "4fd7f5b4-9b4e-4c39-8f3c-3d2b1c0a9e77"},
        {"runId": "4fd7f5b4-9b4e-4c39-8f3c-3d2b1c0a9e77", "tenantId": ""},
        {"runId": "4fd7f5b4-9b4e-4c39-8f3c-3d2b1c0a9e77", "tenantId": " alice"},
        {"runId": "4fd7f5b4-9b4e-4c39-8f3c-3d2b1c0a9e77", "tenantId": 5},
        {"runId": "4fd7f5b4-9b4e-4c39-8f3c-3d2b1c0a9e77", "tenantId": "a\x00b"},
    ],
)
async def test_a_job_that_names_no_run_fails_for_good_and_asks_nobody(bench: Bench, data: Any) -> None:
    with pytest.raises(PermanentError, match="names no run"):
        await bench.processor.process(fake_job(data))

    await bench.processor.on_failed(fake_job(data), "names no run")
    assert bench.transactions.tenants == []


@pytest.mark.requirement("R-33", "R-43", "X-112")
async def test_every_access_goes_through_the_transaction_manager_with_the_tenant(bench: Bench) -> None:
    wanted = await bench.submitted()

    await bench.processor.process(fake_job(wanted))
    await bench.processor.on_failed(fake_job(wanted), "late news")

    assert set(bench.transactions.tenants) == {ALICE}
    assert len(bench.transactions.tenants) == 3  # begin, complete, and what came too late: none of them is nested


@pytest.mark.requirement("R-33", "R-19", "R-28")
def test_no_database_is_within_reach_of_the_processor() -> None:
    """Only `TransactionManager.run` gives rows; and the failure handler is a method here, no component of its own."""
    imported = {name for name, value in vars(processor_module).items() if inspect.isclass(value)}

    held = {type(value).__name__ for value in vars(RunProcessor(object(), placeholder)).values()}  # type: ignore[arg-type]
    assert imported.isdisjoint({"Ledger", "Database", "AllRuns"})
    assert held.isdisjoint({"Ledger", "Database", "TenantRuns"})
    assert inspect.iscoroutinefunction(RunProcessor.on_failed)


@pytest.mark.requirement("X-110", "R-25")
async def test_a_take_that_was_overtaken_does_nothing(bench: Bench, records: Records) -> None:
    """A worker slept between taking the job and asking for the run; its lock expired and another took the job."""
    wanted = await bench.submitted()

    async def sleeper_wakes(run: Run) -> None:
        bench.before_end = None
        outcome = await bench.processor.process(fake_job(wanted, fence=1))
        assert outcome["outcome"] == "SKIPPED_LATE"

    bench.before_end = sleeper_wakes
    await bench.processor.process(fake_job(wanted, fence=2))

    assert len(bench.calls) == 1
    assert (await bench.row(wanted.run_id)).status is RunStatus.COMPLETED


@pytest.mark.requirement("X-110", "X-16")
async def test_a_stale_owner_cannot_complete(bench: Bench, records: Records) -> None:
    wanted = await bench.submitted()

    async def is_taken_over(run: Run) -> None:
        await bench.transactions.run(ALICE, lambda runs: runs.start(run.id, job_timestamp=1, job_fence=7))

    bench.before_end = is_taken_over
    outcome = await bench.processor.process(fake_job(wanted))

    row = await bench.row(wanted.run_id)
    assert outcome["outcome"] == "INTERRUPTED_RUNNING"
    assert (row.status, row.fence, row.result) == (RunStatus.RUNNING, 2, None)


@pytest.mark.requirement("X-110")
async def test_a_stale_owner_cannot_fail_the_run_either(bench: Bench) -> None:
    wanted = await bench.submitted()

    async def is_taken_over(run: Run) -> None:
        await bench.transactions.run(
            ALICE, lambda runs: runs.start(run.id, job_timestamp=run.job.timestamp, job_fence=7)
        )

    # Not the heartbeat, which would notice first: the end itself must.
    bench.processor = RunProcessor(bench.transactions, bench._handle, heartbeat_ms=60_000)
    bench.before_end, job = is_taken_over, fake_job(wanted, attempts_made=2)
    await bench.fail(wanted, job, ValueError("mine"))

    row = await bench.row(wanted.run_id)
    assert (row.status, row.retry_history, row.error_message) == (RunStatus.RUNNING, [], None)


@pytest.mark.requirement("X-111")
@pytest.mark.parametrize("ends", ["completes", "fails", "fails finally"])
async def test_a_run_that_was_cancelled_meanwhile_stays_cancelled(bench: Bench, ends: str) -> None:
    wanted = await bench.submitted()
    bench.processor = RunProcessor(bench.transactions, bench._handle, heartbeat_ms=60_000)

    async def is_cancelled(run: Run) -> None:
        await bench.transactions.run(ALICE, lambda runs: runs.cancel(run.id))

    bench.before_end = is_cancelled
    if ends == "completes":
        outcome = await bench.processor.process(fake_job(wanted))
        assert outcome["outcome"] == "INTERRUPTED_CANCELLED"
    else:
        await bench.fail(wanted, fake_job(wanted, attempts_made=2 if ends == "fails finally" else 0), ValueError("no"))

    row = await bench.row(wanted.run_id)
    assert (row.status, row.error_message) == (RunStatus.CANCELLED, None)


@pytest.mark.requirement("X-111")
async def test_a_running_run_that_is_cancelled_is_stopped_by_its_heartbeat(bench: Bench) -> None:
    wanted = await bench.submitted()
    stopped = asyncio.Event()

    async def works_for_ever(run: Run) -> None:
        await bench.transactions.run(ALICE, lambda runs: runs.cancel(run.id))
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    bench.before_end = works_for_ever
    outcome = await bench.processor.process(fake_job(wanted))

    assert stopped.is_set()
    assert outcome["outcome"] == "INTERRUPTED_CANCELLED"


async def test_a_heartbeat_shows_that_a_run_lives(bench: Bench) -> None:
    wanted = await bench.submitted()
    beats: list[datetime | None] = []

    async def works_a_while(run: Run) -> None:
        async with asyncio.timeout(10):
            while len(set(beats)) < 3:
                beats.append((await bench.row(run.id)).heartbeat_at)
                await asyncio.sleep(0.01)

    bench.before_end = works_a_while
    await bench.processor.process(fake_job(wanted))

    assert sorted(beats, key=str) == beats


@pytest.mark.requirement("X-110")
async def test_a_handler_that_asks_for_later_costs_no_attempt(bench: Bench) -> None:
    wanted = await bench.submitted()
    bench.result = DelayJob(1_000)

    with pytest.raises(DelayJob):
        await bench.processor.process(fake_job(wanted))

    row = await bench.row(wanted.run_id)
    assert (row.status, row.attempts, row.retry_history) == (RunStatus.QUEUED, 0, [])


@pytest.mark.requirement("R-37")
async def test_a_run_whose_worker_closes_is_given_back(bench: Bench) -> None:
    wanted = await bench.submitted()
    began = asyncio.Event()

    async def works_for_ever(run: Run) -> None:
        began.set()
        await asyncio.Event().wait()

    bench.before_end = works_for_ever
    task = asyncio.create_task(bench.processor.process(fake_job(wanted)))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert (await bench.row(wanted.run_id)).status is RunStatus.QUEUED


async def test_a_database_that_is_away_costs_no_attempt(bench: Bench) -> None:
    from bullpen.errors import DatabaseUnavailable

    wanted = await bench.submitted()
    bench.transactions.error = DatabaseUnavailable("gone")

    with pytest.raises(DelayJob, match="the database does not answer"):
        await bench.processor.process(fake_job(wanted))

    bench.transactions.error = None
    assert (await bench.row(wanted.run_id)).attempts == 0


async def test_work_that_is_done_waits_for_the_database(bench: Bench) -> None:
    """Else a restart of the database between the work and its ending would pay for the work twice."""
    from bullpen.errors import DatabaseUnavailable

    wanted = await bench.submitted()

    async def database_restarts(run: Run) -> None:
        bench.transactions.error = DatabaseUnavailable("restarting")
        asyncio.get_running_loop().call_later(0.05, setattr, bench.transactions, "error", None)

    bench.before_end = database_restarts
    outcome = await bench.processor.process(fake_job(wanted))

    assert outcome["outcome"] == "COMPLETED"


async def test_work_that_is_done_comes_back_later_when_the_database_stays_away(bench: Bench) -> None:
    from bullpen.errors import DatabaseUnavailable

    wanted = await bench.submitted()

    async def database_goes(run: Run) -> None:
        bench.transactions.error = DatabaseUnavailable("gone")

    bench.before_end = database_goes
    with pytest.raises(DelayJob, match="the database does not answer"):
        await bench.processor.process(fake_job(wanted))


@pytest.mark.requirement("R-8")
async def test_without_a_handler_a_run_does_nothing_but_log(bench: Bench, records: Records) -> None:
    wanted = await bench.submitted()

    await RunProcessor(bench.transactions).process(fake_job(wanted))

    row = await bench.row(wanted.run_id)
    assert (row.status, row.result) == (RunStatus.COMPLETED, None)
    assert f"Run {wanted.run_id} has no handler; nothing was done" in records.texts(logging.INFO)


def test_a_handler_must_be_async(bench: Bench) -> None:
    with pytest.raises(InvalidOption, match="async def"):
        RunProcessor(bench.transactions, lambda run: None)  # type: ignore[arg-type,return-value]  # that is the point


@pytest.mark.parametrize("value", [float("nan"), "x" * 1_100_000, {"zero": "\0"}])
async def test_a_result_that_cannot_be_stored_fails_for_good(bench: Bench, value: Any) -> None:
    wanted = await bench.submitted()
    bench.result = value

    with pytest.raises(PermanentError, match="result of the run"):
        await bench.processor.process(fake_job(wanted))


# ---- failing ---------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("R-16", "R-31", "R-44", "X-110")
async def test_an_attempt_that_will_be_repeated_is_only_warned_about(bench: Bench, records: Records) -> None:
    wanted = await bench.submitted()

    await bench.fail(wanted, fake_job(wanted), ValueError("the model is busy"))
    await bench.fail(wanted, fake_job(wanted, attempts_made=1, fence=2), ValueError("still busy"))

    row = await bench.row(wanted.run_id)
    assert (row.status, row.attempts, row.error_message) == (RunStatus.QUEUED, 2, None)
    assert [(entry["attempt"], entry["error"]) for entry in row.retry_history] == [
        (1, "the model is busy"),
        (2, "still busy"),
    ]
    assert all(datetime.fromisoformat(entry["at"]).tzinfo is not None for entry in row.retry_history)
    assert records.texts(logging.ERROR) == []
    assert len(records.texts(logging.WARNING)) == 2


@pytest.mark.requirement("R-12", "R-13", "R-44", "R-31")
async def test_when_the_last_attempt_has_failed_the_run_is_failed_with_a_readable_message(bench: Bench) -> None:
    wanted = await bench.submitted()
    for number in range(3):
        await bench.fail(wanted, fake_job(wanted, attempts_made=number, fence=number + 1), ValueError(f"no {number}"))

    row = await bench.row(wanted.run_id)
    assert row.status is RunStatus.FAILED
    assert row.error_message == "Workflow execution failed after 3 attempts: no 2"
    assert [entry["attempt"] for entry in row.retry_history] == [1, 2, 3]
    assert row.completed_at is not None


@pytest.mark.requirement("X-105", "R-44")
async def test_a_failure_is_final_because_the_job_failed_and_not_by_its_count(bench: Bench) -> None:
    wanted = await bench.submitted()

    await bench.fail(wanted, fake_job(wanted), PermanentError("card refused"))

    row = await bench.row(wanted.run_id)
    assert (row.status, row.error_message) == (
        RunStatus.FAILED,
        "Workflow execution failed after 1 attempts: card refused",
    )


@pytest.mark.requirement("X-105")
async def test_a_job_that_failed_without_its_handler_fails_its_run_too(bench: Bench) -> None:
    """A stall limit, a failed child: no attempt ever began."""
    wanted = await bench.submitted()

    await bench.processor.on_failed(fake_job(wanted), "job stalled more than allowable limit")

    assert (await bench.row(wanted.run_id)).status is RunStatus.FAILED


@pytest.mark.requirement("R-14", "R-36", "R-44")
async def test_one_structured_error_is_logged(bench: Bench, records: Records) -> None:
    wanted = await bench.submitted()

    await bench.fail(wanted, fake_job(wanted, attempts_made=2), ValueError("no luck"))

    (record,) = [record for record in records.all if record.levelno == logging.ERROR]
    fields = {name: getattr(record, name) for name in ("jobId", "runId", "tenantId", "error", "attemptsMade")}
    assert fields == {
        "jobId": wanted.run_id,
        "runId": wanted.run_id,
        "tenantId": ALICE,
        "error": "no luck",
        "attemptsMade": 3,
    }
    assert record.getMessage() == f"Run {wanted.run_id} failed finally"


@pytest.mark.requirement("R-36")
async def test_every_line_of_the_processor_names_job_run_and_tenant(bench: Bench, records: Records) -> None:
    wanted = await bench.submitted()
    for number in range(3):
        await bench.fail(wanted, fake_job(wanted, attempts_made=number, fence=number + 1), ValueError("no"))
    await bench.processor.process(fake_job(wanted, fence=4))

    for record in records.all:
        assert (record.jobId, record.runId, record.tenantId) == (wanted.run_id, wanted.run_id, ALICE)  # type: ignore[attr-defined]


@pytest.mark.requirement("R-17", "R-44")
async def test_a_run_that_cannot_be_updated_does_not_make_the_failure_handler_raise(
    bench: Bench, records: Records
) -> None:
    from bullpen.errors import DatabaseUnavailable

    wanted = await bench.submitted()
    bench.transactions.error = DatabaseUnavailable("postgresql://x did not answer")

    await bench.processor.on_failed(fake_job(wanted), "no")

    assert f"Run {wanted.run_id} could not be set to FAILED" in records.texts(logging.ERROR)


@pytest.mark.requirement("R-18", "R-44")
async def test_a_missing_run_is_told_and_nothing_raised(bench: Bench, records: Records) -> None:
    unknown = payload()

    await bench.processor.on_failed(fake_job(unknown), "no")

    assert f"Run {unknown.run_id} does not exist; its dead letter is kept" in records.texts(logging.ERROR)


@pytest.mark.requirement("X-119")
async def test_the_failure_handler_may_be_repeated(bench: Bench) -> None:
    wanted = await bench.submitted(cost=5, is_test_run=True)
    job = fake_job(wanted, attempts_made=2)
    await bench.fail(wanted, job, ValueError("first"))
    before = await bench.row(wanted.run_id)

    await bench.processor.on_failed(job, "second")

    assert await bench.row(wanted.run_id) == before


@pytest.mark.requirement("X-108", "X-119")
async def test_old_news_do_not_fail_a_run_that_was_sent_back(bench: Bench) -> None:
    """The worker told of the failure after an operator had already redriven the run."""
    wanted = await bench.submitted()
    job = fake_job(wanted, attempts_made=2, fence=3)
    await bench.fail(wanted, job, ValueError("no"))
    await bench.transactions.run(ALICE, lambda runs: runs.requeue(wanted.run_id))

    await bench.processor.on_failed(job, "no")
    assert (await bench.row(wanted.run_id)).status is RunStatus.QUEUED

    await bench.processor.on_failed(fake_job(wanted, attempts_made=0, fence=4), "died before it began")
    assert (await bench.row(wanted.run_id)).status is RunStatus.FAILED


async def test_an_attempt_that_cannot_be_written_down_keeps_its_own_error(bench: Bench, records: Records) -> None:
    from bullpen.errors import LedgerError

    wanted = await bench.submitted()

    async def ledger_breaks(run: Run) -> None:
        bench.transactions.error = LedgerError("disk full")

    bench.before_end, bench.result = ledger_breaks, ValueError("mine")
    with pytest.raises(ValueError, match="mine"):
        await bench.processor.process(fake_job(wanted))

    assert f"A failed attempt of run {wanted.run_id} could not be stored" in records.texts(logging.ERROR)


@pytest.mark.requirement("R-13", "X-8")
@pytest.mark.parametrize(
    ("error", "shown"),
    [
        ("plain", "plain"),
        ("first line\nsecond line", "first line"),
        ('Traceback (most recent call last):\n  File "x.py", line 1\nValueError: no stock', "ValueError: no stock"),
        ("GET https://ada:secret@api.example.com/x failed", "GET https://***@api.example.com/x failed"),
        ("401 for Bearer abcdefghijkl", "401 for Bearer ***"),
        ("api_key=sk-123456789 refused", "api_key=*** refused"),
        ("key sk-abcdefghij refused", "key sk-*** refused"),
        ("mail to ada@example.com bounced", "mail to ***@*** bounced"),
        ("", "unknown error"),
        ("x" * 900, "x" * 499 + "…"),
    ],
)
def test_people_read_one_line_without_stacks_and_secrets(error: str, shown: str) -> None:
    assert failure_message(3, error) == f"Workflow execution failed after 3 attempts: {shown}"


# ---- deciding --------------------------------------------------------------------------------------------------------

_WHEN = datetime(2026, 1, 1, tzinfo=UTC)
ROW = RunRow(
    id="4fd7f5b4-9b4e-4c39-8f3c-3d2b1c0a9e77", tenant_id=ALICE, version_id="v1", payload_in_job=True, is_test_run=False,
    cost=0, created_at=_WHEN, status=RunStatus.QUEUED, attempts=0, redrives=0, fence=0, job_timestamp=0, job_fence=0,
    needs_job=False, started_at=None, heartbeat_at=None, completed_at=None, duration_ms=None, progress=None,
    result=None, error_message=None, retry_history=[], updated_at=_WHEN, handler=None,
    queue=None, job_options=None,
)  # fmt: skip

ENDED = {"status": RunStatus.FAILED, "job_timestamp": 5, "job_fence": 3}


@pytest.mark.requirement("R-22", "R-23", "R-24", "X-110", "X-108")
@pytest.mark.parametrize(
    ("changes", "take", "expected"),
    [
        ({}, Take(5, 1), Begin()),
        ({"job_timestamp": 5, "job_fence": 1}, Take(5, 2), Begin()),
        ({"job_timestamp": 5, "job_fence": 2}, Take(5, 2), "SKIPPED_LATE"),
        ({"job_timestamp": 5, "job_fence": 2}, Take(5, 1), "SKIPPED_LATE"),
        ({"job_timestamp": 5, "job_fence": 9}, Take(6, 1), Begin()),  # another job: the first one was lost
        ({"status": RunStatus.RUNNING, "job_timestamp": 5, "job_fence": 1}, Take(5, 2), Begin(is_recovery=True)),
        ({"status": RunStatus.COMPLETED}, Take(5, 1), "SKIPPED_COMPLETED"),
        ({"status": RunStatus.CANCELLED}, Take(5, 1, redriven_from=0), "SKIPPED_CANCELLED"),
        (ENDED, Take(5, 4), "SKIPPED_FAILED"),
        (ENDED, Take(5, 4, redriven_from=3), Begin(is_redrive=True)),
        (
            {"status": RunStatus.FAILED, "job_timestamp": 5, "job_fence": 6},
            Take(5, 7, redriven_from=3),
            "SKIPPED_FAILED",
        ),
        (
            {"status": RunStatus.FAILED, "job_timestamp": 5, "job_fence": 3},
            Take(6, 4, redriven_from=3),
            "SKIPPED_FAILED",
        ),
    ],
)
def test_what_a_take_may_do(changes: dict[str, Any], take: Take, expected: Begin | str) -> None:
    decision = decide(replace(ROW, **changes), take)

    assert (decision.outcome if isinstance(decision, SkipRun) else decision) == expected


@pytest.mark.parametrize(
    ("changes", "take", "is_old"),
    [
        ({}, Take(5, 1), False),
        ({"job_timestamp": 5, "job_fence": 1}, Take(5, 1), False),
        ({"job_timestamp": 5, "job_fence": 2}, Take(5, 1), True),
        ({"job_timestamp": 5, "job_fence": 1, "needs_job": True}, Take(5, 1), True),
        ({"job_timestamp": 5, "job_fence": 1, "needs_job": True}, Take(5, 2), False),
        ({"job_timestamp": 0, "job_fence": 0, "needs_job": True}, Take(5, 1), False),
    ],
)
def test_which_failures_are_old_news(changes: dict[str, Any], take: Take, is_old: bool) -> None:
    assert is_old_news(replace(ROW, **changes), take) is is_old


@pytest.mark.parametrize(
    ("note", "expected"),
    [
        ('[{"at":1,"by":"ada","entry":"dl-x-3"}]', 3),
        ('[{"entry":"dl-x-3"},{"entry":"dl-x-7"}]', 7),
        ("[]", None),
        ("nonsense", None),
        ('{"a":1}', None),
        ('[{"entry":"dl-x-y"}]', None),
    ],
)
def test_notes_of_a_redrive_are_read_with_care(note: str, expected: int | None) -> None:
    assert Take.of(fake_job(payload(), bpredriven=note)).redriven_from == expected


@pytest.mark.requirement("R-2", "R-3")
def test_the_preset_of_runs() -> None:
    policy = WORKFLOW_RUN.policy
    assert (policy.attempts, WORKFLOW_RUN.lock_ms, WORKFLOW_RUN.keep_completed, WORKFLOW_RUN.keep_failed) == (
        3,
        300_000,
        100,
        None,
    )
    assert json.loads(json.dumps(policy.backoff.to_wire() if policy.backoff else None)) == {
        "type": "exponential",
        "delay": 5000,
    }
