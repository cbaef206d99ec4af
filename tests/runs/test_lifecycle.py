"""A run from its submission to its end, on real queues and both databases."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from bullpen._kernel.backoff import Backoff
from bullpen.errors import InsufficientCredits, InvalidOption, PermanentError, RowNotFound, RowStateConflict
from bullpen.ledger import RunStatus
from bullpen.ports.dead_letters import DeadLetterFilter
from bullpen.queue import JobState
from bullpen.runs import Run, Runs
from tests.runs.kit import ALICE, BOB, Bank, Records, Stage, payload


async def submit_impatient(stage: Stage, **options: Any) -> str:
    """A run whose retries do not wait for seconds: everything else of its job is as it is always."""
    wanted = payload()
    await stage.service.submit(wanted, **options)
    await stage.runs.queue.add(
        "workflow-run", wanted.to_data(), job_id=wanted.run_id, attempts=3, backoff=Backoff.fixed(1)
    )
    return wanted.run_id


@pytest.mark.requirement("R-1", "R-6", "R-7")
async def test_a_submitted_run_is_run_once_and_completes(stage: Stage) -> None:
    wanted = payload(context_inputs={"city": "Vienna"})
    seen: list[Any] = []

    async def execute(run: Run) -> dict[str, str]:
        row = await stage.service.get(ALICE, run.id)
        seen.append((row.status, row.started_at is not None, run.payload.context_inputs, run.attempt))
        return {"answer": "42"}

    submitted = await stage.service.submit(wanted)
    async with stage.working(execute):
        row = await stage.until(wanted.run_id, RunStatus.COMPLETED)
        job = await stage.until_job(wanted.run_id, JobState.COMPLETED)

    assert submitted.created and submitted.run.status is RunStatus.QUEUED
    assert seen == [(RunStatus.RUNNING, True, {"city": "Vienna"}, 1)]
    assert row.result == {"answer": "42"}
    assert row.started_at is not None and row.completed_at is not None
    assert row.duration_ms is not None and row.duration_ms >= 0
    assert row.error_message is None
    assert job.return_value == {"runId": wanted.run_id, "outcome": "COMPLETED"}


@pytest.mark.requirement("R-11", "R-12", "R-13", "R-15", "R-16", "R-31", "X-105")
async def test_a_run_that_fails_three_times_is_failed_and_dead_lettered(stage: Stage, records: Records) -> None:
    async def refuse(run: Run) -> None:
        raise ValueError(f"attempt {run.attempt} refused")

    run_id = await submit_impatient(stage)
    async with stage.working(refuse, dispatch=False):
        row = await stage.until(run_id, RunStatus.FAILED)

    (letter,) = await stage.runs.queue.dead_letters.list()
    entry = letter.entry
    assert (entry["originalJobId"], entry["runId"], entry["tenantId"]) == (run_id, run_id, ALICE)
    assert (entry["attemptsMade"], entry["errorMessage"]) == (3, "attempt 3 refused")
    assert entry["failedAt"].endswith("Z")
    assert entry["originalData"]["definition"] == {"steps": ["a", "b"]}
    assert row.error_message == "Workflow execution failed after 3 attempts: attempt 3 refused"
    assert [each["error"] for each in row.retry_history] == [f"attempt {number} refused" for number in (1, 2, 3)]
    assert len([text for text in records.texts(logging.WARNING) if "will be tried again" in text]) == 2
    assert len([text for text in records.texts(logging.ERROR) if "failed finally" in text]) == 1


@pytest.mark.requirement("X-105", "R-11")
async def test_an_error_that_no_retry_mends_ends_the_run_at_once(lite: Stage) -> None:
    async def refuse(run: Run) -> None:
        raise PermanentError("no such model")

    run_id = await submit_impatient(lite)
    async with lite.working(refuse, dispatch=False):
        row = await lite.until(run_id, RunStatus.FAILED)

    assert row.error_message == "Workflow execution failed after 1 attempts: no such model"
    assert (await lite.runs.queue.dead_letters.list())[0].attempts_made == 1


@pytest.mark.requirement("X-8")
async def test_the_stack_stays_with_the_dead_letter(lite: Stage) -> None:
    async def refuse(run: Run) -> None:
        raise PermanentError("password=hunter2 was refused" + "!" * 3_000)

    run_id = await submit_impatient(lite)
    async with lite.working(refuse, dispatch=False):
        row = await lite.until(run_id, RunStatus.FAILED)

    (letter,) = await lite.runs.queue.dead_letters.list()
    assert letter.error_stack is not None and "Traceback" in letter.error_stack and len(letter.error_stack) <= 5_000
    assert len(letter.error_message) <= 5_000
    assert row.error_message is not None and len(row.error_message) < 600
    assert "hunter2" not in row.error_message and "Traceback" not in json.dumps([row.error_message, row.retry_history])


@pytest.mark.requirement("X-115", "X-37", "R-9", "R-18")
async def test_a_forged_job_is_dead_lettered_as_a_security_event(stage: Stage, records: Records) -> None:
    wanted = payload()
    await stage.service.submit(wanted)
    forged = {**wanted.to_data(), "tenantId": BOB}

    job = await stage.runs.queue.add("workflow-run", forged, job_id=wanted.run_id)
    async with stage.working(dispatch=False):
        await stage.until_job(job.id, JobState.FAILED)

    found = [letter async for letter in stage.runs.queue.dead_letters.find(DeadLetterFilter(cause="security"))]
    assert [(letter.job_id, letter.attempts_made) for letter in found] == [(wanted.run_id, 1)]
    assert (await stage.service.get(ALICE, wanted.run_id)).status is RunStatus.QUEUED
    assert any(getattr(record, "operation", "") == "RUN_SECURITY" for record in records.all)


@pytest.mark.requirement("R-5")
async def test_nobody_processes_dead_letters(lite: Stage) -> None:
    async def refuse(run: Run) -> None:
        raise PermanentError("no")

    run_id = await submit_impatient(lite)
    async with lite.working(refuse, dispatch=False):
        await lite.until(run_id, RunStatus.FAILED)

    assert (await lite.runs.dead_letter_queue.counts()).waiting == 1
    assert await lite.service.dead_letter_depth() == 1


# ---- cancelling ------------------------------------------------------------------------------------------------------


async def test_a_run_that_waits_is_cancelled_with_its_job(stage: Stage) -> None:
    wanted = payload()
    await stage.service.submit(wanted)
    await stage.dispatch()

    row = await stage.service.cancel(ALICE, wanted.run_id, actor="ada")
    again = await stage.service.cancel(ALICE, wanted.run_id, actor="ada")

    assert row.status is again.status is RunStatus.CANCELLED
    assert await stage.runs.queue.get_job(wanted.run_id) is None


async def test_a_cancelled_run_whose_job_comes_later_is_skipped(lite: Stage) -> None:
    wanted = payload()
    await lite.service.submit(wanted)
    await lite.service.cancel(ALICE, wanted.run_id, actor="ada")
    calls: list[Run] = []

    async def execute(run: Run) -> None:
        calls.append(run)

    async with lite.working(execute):
        job = await lite.until_job(wanted.run_id, JobState.COMPLETED)

    assert job.return_value == {"runId": wanted.run_id, "outcome": "SKIPPED_CANCELLED"}
    assert calls == []


@pytest.mark.requirement("X-111")
async def test_a_run_that_works_is_stopped(lite: Stage) -> None:
    wanted = payload()
    began = asyncio.Event()

    async def execute(run: Run) -> None:
        began.set()
        await asyncio.Event().wait()

    await lite.service.submit(wanted)
    async with lite.working(execute):
        await began.wait()
        await lite.service.cancel(ALICE, wanted.run_id, actor="ada")
        job = await lite.until_job(wanted.run_id, JobState.COMPLETED)

    assert job.return_value["outcome"] == "INTERRUPTED_CANCELLED"
    assert (await lite.service.get(ALICE, wanted.run_id)).status is RunStatus.CANCELLED


async def test_what_has_ended_cannot_be_cancelled_and_what_has_not_failed_cannot_be_retried(lite: Stage) -> None:
    wanted = payload()
    await lite.service.submit(wanted)
    with pytest.raises(RowStateConflict, match="QUEUED, not FAILED"):
        await lite.service.retry(ALICE, wanted.run_id, actor="ada")
    async with lite.working():
        await lite.until(wanted.run_id, RunStatus.COMPLETED)

    with pytest.raises(RowStateConflict, match="COMPLETED"):
        await lite.service.cancel(ALICE, wanted.run_id, actor="ada")
    for change in (lite.service.cancel, lite.service.retry):
        with pytest.raises(RowNotFound):
            await change(BOB, wanted.run_id, actor="bob")
        with pytest.raises(RowNotFound):
            await change(ALICE, payload().run_id, actor="ada")


# ---- sending back ----------------------------------------------------------------------------------------------------


class Flaky:
    """Fails for good until it is mended; its first step is paid for once."""

    def __init__(self) -> None:
        self.bank, self.is_mended = Bank(), False

    async def __call__(self, run: Run) -> Any:
        receipt = await run.step("charge", self.bank.charge)
        if not self.is_mended:
            raise PermanentError("the printer is out of paper")
        return receipt


@pytest.mark.requirement("X-108", "X-40", "X-120")
async def test_a_failed_run_goes_back_with_its_identity_and_without_paying_again(stage: Stage) -> None:
    flaky = Flaky()

    async def execute(run: Run) -> Any:
        return await flaky(run)

    run_id = await submit_impatient(stage)
    async with stage.working(execute, dispatch=False):
        await stage.until(run_id, RunStatus.FAILED)
        failed = await stage.until_job(run_id, JobState.FAILED)
        flaky.is_mended = True

        row = await stage.service.retry(ALICE, run_id, actor="ada")
        done = await stage.until(run_id, RunStatus.COMPLETED)
        job = await stage.until_job(run_id, JobState.COMPLETED)

    assert (row.status, row.redrives, row.error_message) == (RunStatus.QUEUED, 1, None)
    assert done.result == {"receipt": f"{run_id}/charge"}
    assert flaky.bank.calls == {f"{run_id}/charge": 1}
    assert job.idempotency_key == failed.idempotency_key
    assert await stage.service.dead_letter_depth() == 0


@pytest.mark.requirement("X-108", "X-40")
async def test_a_dead_letter_that_is_redriven_at_the_queue_brings_its_run_back(stage: Stage) -> None:
    """Operators have one console for dead letters; a run must not stay FAILED because they used it."""
    flaky = Flaky()

    async def execute(run: Run) -> Any:
        return await flaky(run)

    run_id = await submit_impatient(stage)
    async with stage.working(execute, dispatch=False):
        await stage.until(run_id, RunStatus.FAILED)
        flaky.is_mended = True

        await stage.runs.queue.dead_letters.redrive(f"dl-{run_id}-1", by="ada")
        row = await stage.until(run_id, RunStatus.COMPLETED)

    assert row.redrives == 1
    assert flaky.bank.calls == {f"{run_id}/charge": 1}


@pytest.mark.requirement("X-108")
async def test_a_failed_run_whose_job_is_gone_gets_a_new_one(lite: Stage) -> None:
    flaky = Flaky()

    async def execute(run: Run) -> Any:
        return await flaky(run)

    run_id = await submit_impatient(lite)
    async with lite.working(execute, dispatch=False):
        await lite.until(run_id, RunStatus.FAILED)
        await lite.until_job(run_id, JobState.FAILED)
        await lite.runs.queue.remove(run_id)
        flaky.is_mended = True

        await lite.service.retry(ALICE, run_id, actor="ada")
        await lite.until(run_id, RunStatus.COMPLETED)


@pytest.mark.requirement("X-40", "X-41")
async def test_dead_letters_are_shown_to_their_tenant_without_secrets_and_looking_is_written_down(lite: Stage) -> None:
    async def refuse(run: Run) -> None:
        raise PermanentError("no")

    mine = payload(context_inputs={"apiKey": "sk-12345678901", "city": "Vienna", "url": "https://a:b@example.com/"})
    other = payload(BOB)
    for each in (mine, other):
        await lite.service.submit(each)
    async with lite.working(refuse):
        await lite.until(mine.run_id, RunStatus.FAILED)
        await lite.until(other.run_id, RunStatus.FAILED, tenant_id=BOB)

    (letter,) = await lite.service.dead_letters(ALICE, actor="ada")

    assert letter.job_id == mine.run_id
    assert letter.data["contextInputs"] == {"apiKey": "***", "city": "Vienna", "url": "https://***@example.com/"}
    assert (letter.error_stack, letter.entry) == (None, {})
    assert ("ada", "run.dead_letters.read") in await audited(lite)


async def audited(stage: Stage) -> list[tuple[str, str]]:
    import sqlalchemy as sa

    table = stage.ledger.database.table("bullpen_audit")
    async with stage.ledger.database.transaction() as connection:
        found = await connection.execute(sa.text(f"SELECT actor, action FROM {table} ORDER BY id"))
        return [(row.actor, row.action) for row in found]


@pytest.mark.requirement("X-41")
async def test_every_change_by_a_person_is_written_down(lite: Stage) -> None:
    flaky = Flaky()

    async def execute(run: Run) -> Any:
        return await flaky(run)

    run_id = await submit_impatient(lite, actor="ada")
    async with lite.working(execute, dispatch=False):
        await lite.until(run_id, RunStatus.FAILED)
    await lite.service.retry(ALICE, run_id, actor="grace")
    await lite.service.cancel(ALICE, run_id, actor="eve")
    await lite.service.grant(ALICE, 5, reference="invoice-1", actor="bank")

    assert await audited(lite) == [
        ("ada", "run.submit"),
        ("grace", "run.redrive"),
        ("eve", "run.cancel"),
        ("bank", "credits.grant"),
    ]


# ---- credits ---------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("R-52")
async def test_a_run_is_paid_before_it_begins_and_refunded_when_it_fails(stage: Stage) -> None:
    flaky = Flaky()

    async def execute(run: Run) -> Any:
        return await flaky(run)

    await stage.service.grant(ALICE, 100, reference="invoice-1", actor="bank")
    assert not await stage.service.grant(ALICE, 100, reference="invoice-1", actor="bank")  # the same grant again
    run_id = await submit_impatient(stage, cost=30)
    after_submit = await stage.service.balance(ALICE)
    async with stage.working(execute, dispatch=False):
        await stage.until(run_id, RunStatus.FAILED)
        after_failure = await stage.service.balance(ALICE)
        flaky.is_mended = True
        await stage.service.retry(ALICE, run_id, actor="ada")
        await stage.until(run_id, RunStatus.COMPLETED)

    assert (after_submit, after_failure, await stage.service.balance(ALICE)) == (70, 100, 70)
    assert await entries(stage) == [
        ("grant", 100, 0),
        ("reserve", -30, 0),
        ("refund", 30, 0),
        ("reserve", -30, 1),
        ("settle", 0, 1),
    ]


@pytest.mark.requirement("R-52")
async def test_the_id_of_a_paid_run_is_not_used_again(stage: Stage) -> None:
    """Somebody deleted the run, and its key comes again: it would run for what the first one paid."""
    import sqlalchemy as sa

    await stage.service.grant(ALICE, 100, reference="invoice-1", actor="bank")
    run_id = await submit_impatient(stage, cost=30)
    async with stage.ledger.database.transaction() as connection:
        await connection.execute(sa.text(f"DELETE FROM {stage.ledger.database.table('bullpen_runs')}"))

    with pytest.raises(InvalidOption, match="never used"):
        await stage.service.submit(payload(run_id=run_id), cost=30)

    assert await stage.service.balance(ALICE) == 70
    with pytest.raises(RowNotFound):
        await stage.service.get(ALICE, run_id)


async def entries(stage: Stage) -> list[tuple[str, int, int]]:
    import sqlalchemy as sa

    table = stage.ledger.database.table("bullpen_credit_entries")
    async with stage.ledger.database.transaction() as connection:
        found = await connection.execute(sa.text(f"SELECT kind, amount, round FROM {table} ORDER BY id"))
        return [(row.kind, row.amount, row.round) for row in found]


@pytest.mark.requirement("R-52")
async def test_what_a_tenant_does_not_have_it_cannot_spend(stage: Stage) -> None:
    await stage.service.grant(ALICE, 10, reference="invoice-1", actor="bank")

    async def submit() -> bool:
        try:
            await stage.service.submit(payload(), cost=4)
        except InsufficientCredits:
            return False
        return True

    # All at once: no two of them may see the same credits.
    stored = await asyncio.gather(*(submit() for _ in range(6)))

    assert sorted(stored) == [False] * 4 + [True] * 2
    assert await stage.service.balance(ALICE) == 2
    assert len(await stage.service.find(ALICE)) == len(await stage.ledger.outbox.find()) == 2
    with pytest.raises(InsufficientCredits, match="0 credits and the run costs 1"):
        await stage.service.submit(payload(BOB), cost=1)


@pytest.mark.requirement("R-52")
async def test_a_cancelled_run_is_refunded_once(stage: Stage) -> None:
    await stage.service.grant(ALICE, 10, reference="invoice-1", actor="bank")
    wanted = payload()
    await stage.service.submit(wanted, cost=4)

    for _ in range(2):
        await stage.service.cancel(ALICE, wanted.run_id, actor="ada")

    assert await stage.service.balance(ALICE) == 10
    assert [kind for kind, _, _ in await entries(stage)] == ["grant", "reserve", "refund"]


@pytest.mark.requirement("R-52")
async def test_cancelling_refunds_what_no_stored_step_has_spent(stage: Stage) -> None:
    bank, paid = Bank(), asyncio.Event()

    async def execute(run: Run) -> None:
        await run.step("model", lambda key: bank.charge(key, 10), price=10)
        await run.step("free", lambda key: bank.charge(key, 0))
        paid.set()
        await asyncio.Event().wait()

    await stage.service.grant(ALICE, 100, reference="invoice-1", actor="bank")
    wanted = payload()
    await stage.service.submit(wanted, cost=30)
    async with stage.working(execute):
        await paid.wait()
        await stage.service.cancel(ALICE, wanted.run_id, actor="ada")
        await stage.until_job(wanted.run_id, JobState.COMPLETED)
        await stage.service.cancel(ALICE, wanted.run_id, actor="ada")  # takes the job away that has ended

    assert await stage.service.balance(ALICE) == 90
    assert await entries(stage) == [("grant", 100, 0), ("reserve", -30, 0), ("refund", 20, 0)]
    assert [(step.name, step.price) for step in await stage.service.steps(ALICE, wanted.run_id)] == [
        ("model", 10),
        ("free", 0),
    ]


@pytest.mark.requirement("R-52")
async def test_a_run_that_is_sent_back_pays_a_step_once(stage: Stage) -> None:
    bank, flaky = Bank(), Flaky()

    async def execute(run: Run) -> Any:
        await run.step("model", lambda key: bank.charge(key, 10), price=10)
        return await flaky(run)

    await stage.service.grant(ALICE, 100, reference="invoice-1", actor="bank")
    run_id = await submit_impatient(stage, cost=30)
    async with stage.working(execute, dispatch=False):
        await stage.until(run_id, RunStatus.FAILED)
        after_failure = await stage.service.balance(ALICE)
        await stage.service.retry(ALICE, run_id, actor="ada")
        await stage.until(run_id, RunStatus.FAILED)
        flaky.is_mended = True
        await stage.service.retry(ALICE, run_id, actor="ada")
        await stage.until(run_id, RunStatus.COMPLETED)

    assert (after_failure, await stage.service.balance(ALICE), bank.calls.total()) == (90, 70, 1)
    assert await entries(stage) == [
        ("grant", 100, 0),
        ("reserve", -30, 0),
        ("refund", 20, 0),
        ("reserve", -20, 1),
        ("refund", 20, 1),
        ("reserve", -20, 2),
        ("settle", 0, 2),
    ]


@pytest.mark.parametrize("price", [-1, 1.5, True, "5", 31, 21])
async def test_a_price_that_the_run_does_not_cover_is_refused_before_the_call(lite: Stage, price: Any) -> None:
    bank = Bank()

    async def execute(run: Run) -> None:
        await run.step("first", lambda key: bank.charge(key, 10), price=10)
        await run.step("second", lambda key: bank.charge(key, 10), price=price)

    await lite.service.grant(ALICE, 100, reference="invoice-1", actor="bank")
    wanted = payload()
    await lite.service.submit(wanted, cost=30)
    async with lite.working(execute):
        row = await lite.until(wanted.run_id, RunStatus.FAILED)

    assert "step 'second'" in str(row.error_message) and "price" in str(row.error_message)
    assert bank.calls.total() == 1
    assert await lite.service.balance(ALICE) == 90


@pytest.mark.requirement("R-53")
async def test_steps_of_a_test_run_spend_nothing(stage: Stage) -> None:
    async def execute(run: Run) -> None:
        await run.step("model", lambda key: {"key": key}, price=10)
        raise PermanentError("no")

    wanted = payload()
    await stage.service.submit(wanted, cost=5, is_test_run=True)  # with an empty account
    async with stage.working(execute):
        row = await stage.until(wanted.run_id, RunStatus.FAILED)

    assert "no" in str(row.error_message)
    assert await entries(stage) == [("reserve", 0, 0), ("refund", 0, 0)]


@pytest.mark.requirement("R-53", "R-52")
async def test_a_test_run_costs_nothing_and_knows_it(stage: Stage) -> None:
    seen: list[bool] = []

    async def execute(run: Run) -> None:
        seen.append(run.is_test_run)

    wanted, real = payload(), payload()
    await stage.service.submit(wanted, cost=30, is_test_run=True)  # with an empty account
    await stage.service.submit(real)
    async with stage.working(execute):
        row = await stage.until(wanted.run_id, RunStatus.COMPLETED)
        await stage.until(real.run_id, RunStatus.COMPLETED)

    assert row.is_test_run and sorted(seen) == [False, True]
    assert await entries(stage) == [("reserve", 0, 0), ("settle", 0, 0)]


@pytest.mark.requirement("R-52")
async def test_a_run_that_cannot_be_paid_again_stays_failed(lite: Stage) -> None:
    async def refuse(run: Run) -> None:
        raise PermanentError("no")

    await lite.service.grant(ALICE, 4, reference="invoice-1", actor="bank")
    run_id = await submit_impatient(lite, cost=4)
    async with lite.working(refuse, dispatch=False):
        await lite.until(run_id, RunStatus.FAILED)
        await lite.service.submit(payload(), cost=4)  # what was refunded is spent

        with pytest.raises(InsufficientCredits):
            await lite.service.retry(ALICE, run_id, actor="ada")
        await lite.runs.queue.dead_letters.redrive(f"dl-{run_id}-1", by="ada")
        await lite.until_job(run_id, JobState.FAILED)

    assert (await lite.service.get(ALICE, run_id)).status is RunStatus.FAILED
    assert await lite.service.dead_letter_depth() == 1


# ---- wiring ----------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("R-28", "R-26")
async def test_wiring_processor_and_service_are_parts_of_one_module(stage: Stage) -> None:
    runs = stage.runs

    assert isinstance(runs, Runs)
    assert runs.processor is not None and runs.service is not None
    assert await runs.queue.counts() == await runs.dead_letter_queue.counts()
