"""Submitting runs: stored once, with the intent to run them, or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from bullpen._kernel import telemetry
from bullpen.errors import (
    InvalidOption,
    PayloadTooLarge,
    PermanentError,
    ResultTimeout,
    RowNotFound,
    RowStateConflict,
    RunFailed,
)
from bullpen.ledger import Ledger, RunRow, RunStatus, TenantRuns
from bullpen.queue import JobState
from bullpen.runs import DEAD_LETTER_QUEUE, QUEUE, Run, RunPayload, run_id_for, service
from bullpen.runs.payload import read_payload
from tests.databases import MakeLedger
from tests.runs.conftest import MakeStage
from tests.runs.kit import ALICE, BOB, Stage, payload


@pytest.mark.requirement("R-20", "R-45", "R-27", "X-107")
async def test_the_id_of_the_run_is_the_id_of_its_job(stage: Stage) -> None:
    run_id = str(uuid.uuid4())

    answer = await stage.service.enqueue_run(run_id, {"tenantId": ALICE, "versionId": "v7", "definition": {"a": 1}})
    await stage.dispatch()

    assert answer == {"jobId": run_id}
    assert answer.created
    job = await stage.runs.queue.get_job(run_id)
    assert job is not None and job.id == run_id
    assert job.data == {
        "runId": run_id,
        "tenantId": ALICE,
        "versionId": "v7",
        "definition": {"a": 1},
        "contextInputs": {},
    }


@pytest.mark.requirement("R-2", "R-4", "R-45")
async def test_a_job_carries_the_options_of_its_queue(stage: Stage) -> None:
    wanted = payload()
    await stage.service.submit(wanted)
    await stage.dispatch()

    job = await stage.runs.queue.get_job(wanted.run_id)

    assert job is not None
    assert (stage.runs.queue.name, stage.runs.dead_letter_queue.name) == (QUEUE, DEAD_LETTER_QUEUE)
    assert (QUEUE, DEAD_LETTER_QUEUE) == ("workflow-execution", "workflow-execution-dlq")
    options = json.loads(job.record.raw_opts)
    assert options["attempts"] == 3
    assert options["backoff"] == {"type": "exponential", "delay": 5000}
    assert (options["removeOnComplete"], options["removeOnFail"]) == (100, False) or options["removeOnComplete"] == {
        "count": 100
    }


@pytest.mark.requirement("R-4", "R-5")
async def test_the_queue_of_dead_letters_keeps_everything(lite: Stage) -> None:
    job = await lite.runs.dead_letter_queue.add("by-hand", {})

    options = json.loads(job.record.raw_opts)
    assert (options.get("removeOnComplete", False), options.get("removeOnFail", False)) == (False, False)
    assert await job.state() is JobState.WAITING


@pytest.mark.requirement("R-21", "R-20", "X-107", "X-16")
async def test_a_double_click_makes_one_run_and_one_job(stage: Stage) -> None:
    wanted = payload()

    answers = await asyncio.gather(*(stage.service.enqueue_run(wanted.run_id, wanted) for _ in range(8)))
    await stage.dispatch()

    assert sorted(answer.created for answer in answers) == [False] * 7 + [True]
    assert {answer["jobId"] for answer in answers} == {wanted.run_id}
    assert (await stage.runs.queue.counts()).pending == 1
    assert len(await stage.ledger.outbox.find()) == 1


@pytest.mark.requirement("X-107")
async def test_a_run_whose_job_is_long_gone_is_still_a_duplicate(stage: Stage) -> None:
    """BullMQ forgets an id with its job; the row does not."""
    wanted = payload()
    await stage.service.submit(wanted)
    async with stage.working():
        await stage.until(wanted.run_id, RunStatus.COMPLETED)
    await stage.until_job(wanted.run_id, JobState.COMPLETED)
    await stage.runs.queue.remove(wanted.run_id)

    again = await stage.service.enqueue_run(wanted.run_id, wanted)
    await stage.dispatch()

    assert not again.created
    assert (await stage.runs.queue.counts()).pending == 0


async def test_a_known_run_with_another_payload_is_refused(stage: Stage) -> None:
    wanted = payload()
    await stage.service.submit(wanted)

    with pytest.raises(RowStateConflict, match="another payload"):
        await stage.service.submit(payload(run_id=wanted.run_id, definition={"other": True}))


@pytest.mark.requirement("X-109", "R-25")
async def test_run_and_intent_are_stored_together_or_not_at_all(stage: Stage) -> None:
    wanted, other = payload(), payload()

    async def business(runs: TenantRuns) -> None:
        await stage.service.submit_in(runs, wanted, cost=0)
        raise ValueError("the order was refused")

    with pytest.raises(ValueError, match="the order was refused"):
        await stage.ledger.transactions.run(ALICE, business)
    with pytest.raises(RowNotFound):
        await stage.service.get(ALICE, wanted.run_id)
    assert await stage.ledger.outbox.find() == []

    async def good_business(runs: TenantRuns) -> int:
        await stage.service.submit_in(runs, other, actor="ada", payload_in_job=False)
        return int((await runs.connection.execute(sa.text("SELECT 41 + 1"))).scalar_one())

    assert await stage.ledger.transactions.run(ALICE, good_business) == 42
    assert (await stage.service.get(ALICE, other.run_id)).status is RunStatus.QUEUED
    assert len(await stage.ledger.outbox.find()) == 1


@pytest.mark.requirement("X-115")
async def test_a_run_is_not_submitted_in_a_transaction_of_another_tenant(lite: Stage) -> None:
    async def cross(runs: TenantRuns) -> None:
        await lite.service.submit_in(runs, payload(BOB))

    with pytest.raises(InvalidOption, match="the tenant of the transaction"):
        await lite.ledger.transactions.run(ALICE, cross)


async def test_an_id_of_another_tenant_is_not_available(lite: Stage) -> None:
    wanted = payload(ALICE)
    await lite.service.submit(wanted)

    with pytest.raises(InvalidOption, match="not in use"):
        await lite.service.submit(payload(BOB, run_id=wanted.run_id))


@pytest.mark.requirement("R-35")
@pytest.mark.parametrize(
    "run_id",
    [
        "00000000-0000-0000-0000-000000000000",
        "ffffffff-ffff-ffff-ffff-ffffffffffff",
        "4fd7f5b4-9b4e-0c39-0f3c-3d2b1c0a9e77",  # a version and a variant that no library knows
        "4FD7F5B4-9B4E-4C39-8F3C-3D2B1C0A9E77",
    ],
)
async def test_any_uuid_is_an_id(stage: Stage, run_id: str) -> None:
    answer = await stage.service.enqueue_run(run_id, {"tenantId": ALICE, "versionId": "v", "definition": None})

    assert answer == {"jobId": run_id.lower()}
    assert (await stage.service.get(ALICE, run_id)).id == run_id.lower()


@pytest.mark.requirement("R-35")
@pytest.mark.parametrize("run_id", ["", "5", "x" * 36, "4fd7f5b49b4e4c398f3c3d2b1c0a9e77", "../../etc/passwd", None])
async def test_what_is_no_uuid_is_refused(lite: Stage, run_id: Any) -> None:
    with pytest.raises(InvalidOption):
        await lite.service.enqueue_run(run_id, {"tenantId": ALICE, "versionId": "v", "definition": {}})
    with pytest.raises(InvalidOption, match="a UUID"):
        await lite.service.get(ALICE, run_id)


@pytest.mark.requirement("R-32")
def test_the_fields_of_a_payload() -> None:
    data = {
        "runId": "4fd7f5b4-9b4e-4c39-8f3c-3d2b1c0a9e77",
        "tenantId": ALICE,
        "versionId": "v1",
        "definition": {"steps": []},
        "contextInputs": {"name": "Ada"},
        "subjectFile": {"id": "f1"},
        "subjectFiles": [{"id": "f2"}],
        "knowledgeContext": "text",
    }

    read = read_payload({**data, "newField": 1})

    assert read.to_data() == data
    assert (read.subject_file, read.subject_files, read.knowledge_context) == ({"id": "f1"}, [{"id": "f2"}], "text")
    least = RunPayload(run_id=data["runId"], tenant_id=ALICE, version_id="v1", definition={})  # type: ignore[arg-type]
    assert sorted(least.to_data()) == ["contextInputs", "definition", "runId", "tenantId", "versionId"]


@pytest.mark.requirement("R-32")
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"versionId": None}, "versionId"),
        ({"versionId": ""}, "versionId"),
        ({"contextInputs": []}, "contextInputs"),
        ({"subjectFiles": {}}, "subjectFiles"),
        ({"knowledgeContext": 5}, "knowledgeContext"),
        ({"tenantId": ""}, "tenant_id"),
    ],
)
def test_a_wrong_field_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidOption, match=named):
        read_payload({**payload().to_data(), **changes})
    with pytest.raises(InvalidOption, match="an object"):
        read_payload("text")


@pytest.mark.requirement("X-22")
async def test_a_payload_may_stay_in_the_ledger(stage: Stage) -> None:
    wanted = payload(definition={"text": "x" * 100_000})
    seen: list[Any] = []

    async def execute(run: Any) -> None:
        seen.append(run.payload.definition)

    await stage.service.submit(wanted, payload_in_job=False)
    async with stage.working(execute):
        await stage.until(wanted.run_id, RunStatus.COMPLETED)

    job = await stage.runs.queue.get_job(wanted.run_id)
    assert job is not None
    assert job.data == {
        "runId": wanted.run_id,
        "tenantId": ALICE,
        "versionId": "v1",
        "payloadRef": f"bullpen_runs/{wanted.run_id}",
    }
    assert seen == [{"text": "x" * 100_000}]


@pytest.mark.requirement("X-22")
async def test_a_payload_above_the_limit_is_refused_before_anything_is_stored(lite: Stage) -> None:
    wanted = payload(definition="x" * (10 * 1024 * 1024))

    with pytest.raises(PayloadTooLarge):
        await lite.service.submit(wanted)

    with pytest.raises(RowNotFound):
        await lite.service.get(ALICE, wanted.run_id)


@pytest.mark.requirement("X-22", "R-11")
async def test_the_largest_job_that_is_taken_can_be_dead_lettered(lite: Stage) -> None:
    limit = 10 * 1024 * 1024
    job = await lite.runs.queue.add("workflow-run", "x" * (limit - 200), attempts=1)

    async with lite.working(dispatch=False):
        await lite.until_job(job.id, JobState.FAILED)

    (letter,) = await lite.runs.queue.dead_letters.list()
    assert len(letter.data) == limit - 200


def test_the_id_under_a_key_is_the_tenants_own() -> None:
    first = run_id_for(ALICE, "order-1")

    assert first == run_id_for(ALICE, "order-1")
    assert len({first, run_id_for(BOB, "order-1"), run_id_for(ALICE, "order-2"), run_id_for("ali", "ce:order-1")}) == 4
    with pytest.raises(InvalidOption, match="1 to 200"):
        run_id_for(ALICE, "")


async def test_runs_are_listed_newest_first_in_pages(stage: Stage) -> None:
    wanted = [payload() for _ in range(5)]
    for each in wanted:
        await stage.service.submit(each)
        await asyncio.sleep(0.002)
    await stage.service.submit(payload(BOB))

    first = await stage.service.find(ALICE, limit=2)
    second = await stage.service.find(ALICE, limit=10, before=(first[-1].created_at, first[-1].id))

    assert [row.id for row in first + second] == [each.run_id for each in reversed(wanted)]
    assert await stage.service.find(ALICE, status=RunStatus.FAILED) == []
    assert len(await stage.service.find(ALICE, status=RunStatus.QUEUED)) == 5
    with pytest.raises(InvalidOption, match="limit"):
        await stage.service.find(ALICE, limit=0)


@pytest.mark.requirement("R-29", "R-30")
async def test_the_database_itself_keeps_the_rules(ledger: Ledger, stage: Stage) -> None:
    wanted = payload()
    await stage.service.submit(wanted)
    table = ledger.database.table("bullpen_runs")
    assert [status.value for status in RunStatus] == ["QUEUED", "RUNNING", "COMPLETED", "FAILED", "CANCELLED"]

    async def execute(statement: str) -> None:
        async with ledger.database.transaction() as connection:
            await connection.execute(sa.text(statement))

    for statement in (
        f"UPDATE {table} SET status = 'PAUSED'",
        f"UPDATE {table} SET tenant_id = 'bob'",
        f"UPDATE {table} SET cost = 7",
    ):
        with pytest.raises(Exception, match=r"never change|ck_runs_status|CHECK"):
            await execute(statement)
    await execute(f"UPDATE {table} SET status = 'CANCELLED'")
    with pytest.raises(Exception, match="stays so"):
        await execute(f"UPDATE {table} SET status = 'QUEUED'")


async def test_a_result_is_waited_for_and_not_asked_for(lite: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two looks at the ledger: one before the wait, one when the queue has told."""
    monkeypatch.setattr(service, "_FALLBACK_S", 3_600.0)  # or a slow machine looks once more
    wanted, gate, began, looked = payload(), asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def handle(run: Run) -> dict[str, int]:
        began.set()
        await gate.wait()
        return {"answer": 42}

    looks = 0
    get = lite.service.get

    async def counted(tenant_id: str, run_id: str) -> RunRow:
        nonlocal looks
        looks += 1
        try:
            return await get(tenant_id, run_id)
        finally:
            looked.set()

    lite.service.get = counted  # type: ignore[method-assign]  # counted, and otherwise as it is
    await lite.service.submit(wanted)
    waiting = asyncio.create_task(lite.service.result(ALICE, wanted.run_id, timeout=30_000))
    await asyncio.wait_for(looked.wait(), 20)
    async with lite.working(handle):
        await asyncio.wait_for(began.wait(), 20)
        with pytest.raises(ResultTimeout, match="it is RUNNING"):
            await lite.service.result(ALICE, wanted.run_id, timeout=50)
        looks = 0
        gate.set()
        assert await waiting == {"answer": 42}
        assert looks == 1
    assert await lite.service.result(ALICE, wanted.run_id) == {"answer": 42}  # it has ended already


async def test_a_run_that_failed_or_was_cancelled_has_no_result(lite: Stage) -> None:
    failing, cancelled = payload(), payload()

    async def handle(run: Run) -> None:
        raise PermanentError("card is stolen")

    await lite.service.submit(cancelled)
    waiting = asyncio.create_task(lite.service.result(ALICE, cancelled.run_id, timeout=30_000))
    await lite.dispatch()
    await lite.service.cancel(ALICE, cancelled.run_id, actor="ada")
    with pytest.raises(RunFailed, match="is CANCELLED"):
        await waiting
    async with lite.working(handle):
        await lite.service.submit(failing)
        with pytest.raises(RunFailed, match=r"is FAILED: .*card is stolen") as found:
            await lite.service.result(ALICE, failing.run_id, timeout=30_000)
    assert (found.value.run_id, found.value.status) == (failing.run_id, RunStatus.FAILED)
    with pytest.raises(RowNotFound):
        await lite.service.result(BOB, failing.run_id)


@pytest.mark.parametrize("cancelled", ["queued", "running", "unsent"])
async def test_whoever_waits_for_a_run_is_woken_when_it_is_cancelled(
    sqlite_url: str, make_ledger: MakeLedger, make_stage: MakeStage, cancelled: str
) -> None:
    """A job that is removed leaves an event, one that runs or is not there yet would not; nobody waits for the fallback
    to find out, which would be counted."""
    lite = make_stage(make_ledger(sqlite_url), heartbeat_ms=60_000)
    wanted, began, gate = payload(), asyncio.Event(), asyncio.Event()

    async def handle(run: Run) -> None:
        began.set()
        await gate.wait()

    await lite.service.submit(wanted)
    if cancelled != "unsent":
        await lite.dispatch()
    async with contextlib.AsyncExitStack() as stack:
        if cancelled == "running":
            await stack.enter_async_context(lite.working(handle))
            await asyncio.wait_for(began.wait(), 20)
        with watched(lite) as looked:
            waiting = asyncio.create_task(lite.service.result(ALICE, wanted.run_id))
            await looked(2)  # its queue is known, and it waits
            await lite.service.cancel(ALICE, wanted.run_id, actor="ada")
            with pytest.raises(RunFailed, match="is CANCELLED"):
                await asyncio.wait_for(waiting, service._FALLBACK_S / 2)
        gate.set()


@pytest.mark.cuts_wakeups
async def test_an_end_that_no_event_told_is_counted(lite: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger is asked now and then, whatever becomes of the events; what only that finds is a late wake-up."""
    monkeypatch.setattr(service, "_FALLBACK_S", 0.2)
    wanted, before = payload(), telemetry.late_wakeups().get("runs", 0)
    await lite.service.submit(wanted)
    with watched(lite) as looked:
        waiting = asyncio.create_task(lite.service.result(ALICE, wanted.run_id, timeout=30_000))
        await looked(2)

        await lite.ledger.transactions.run(ALICE, lambda runs: runs.cancel(wanted.run_id, actor="ada"))

        with pytest.raises(RunFailed, match="is CANCELLED"):
            await waiting
    assert telemetry.late_wakeups()["runs"] == before + 1
    assert (await lite.runs.queue.meta())["bplaterun"].startswith("1 ")


@contextlib.contextmanager
def watched(stage: Stage) -> Iterator[Callable[[int], Awaitable[None]]]:
    """Wait until the service has looked at a run so often."""
    looks, changed, get = 0, asyncio.Condition(), stage.service.get

    async def counted(tenant_id: str, run_id: str) -> RunRow:
        nonlocal looks
        try:
            return await get(tenant_id, run_id)
        finally:
            async with changed:
                looks += 1
                changed.notify_all()

    async def looked(often: int) -> None:
        async with asyncio.timeout(20), changed:
            await changed.wait_for(lambda: looks >= often)

    stage.service.get = counted  # type: ignore[method-assign]  # counted, and otherwise as it is
    yield looked
    stage.service.get = get  # type: ignore[method-assign]
