"""Runs that nobody would end are found: their job is lost, or failed unnoticed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bullpen.errors import ConnectionLost, DatabaseUnavailable, PermanentError, UnsafeDatabaseRole
from bullpen.ledger import Ledger, RunStatus
from bullpen.queue import JobState
from bullpen.redis import Connection
from bullpen.runs import Run, RunOptions, Runs
from bullpen.worker import Worker
from tests.runs.conftest import MakeStage
from tests.runs.kit import ALICE, QUICK, Bank, Stage, payload
from tests.runs.test_lifecycle import Flaky, submit_impatient


@pytest.mark.requirement("X-109")
async def test_a_queued_run_without_a_job_gets_one(stage: Stage) -> None:
    """Redis lost it, or an operator removed it: the outbox thinks it was delivered."""
    wanted = payload(context_inputs={"a": 1})
    await stage.service.submit(wanted)
    await stage.dispatch()
    await stage.runs.queue.remove(wanted.run_id)

    swept = await stage.runs.maintenance().sweep()
    again = await stage.runs.maintenance().sweep()

    assert (swept.examined, swept.given_jobs, again.given_jobs) == (1, 1, 0)
    job = await stage.runs.queue.get_job(wanted.run_id)
    assert job is not None and job.data == wanted.to_data()
    async with stage.working(dispatch=False):
        await stage.until(wanted.run_id, RunStatus.COMPLETED)


async def test_a_run_whose_job_waits_is_left_alone(lite: Stage) -> None:
    wanted = payload()
    await lite.service.submit(wanted)
    await lite.dispatch()

    swept = await lite.runs.maintenance().sweep()

    assert (swept.examined, swept.given_jobs, swept.failed) == (1, 0, 0)


async def test_only_runs_that_were_idle_for_long_enough_are_looked_at(stage: Stage) -> None:
    await stage.service.submit(payload())

    assert (await stage.runs.maintenance().sweep(idle_ms=60_000)).examined == 0


@pytest.mark.requirement("X-106", "X-105")
async def test_a_failure_that_only_the_queue_knows_fails_the_run(stage: Stage) -> None:
    """The worker died after the move to failed, or it was no worker of ours: nobody called the failure handler."""
    await stage.service.grant(ALICE, 10, reference="g", actor="bank")
    wanted = payload()
    await stage.service.submit(wanted, cost=10)
    await stage.dispatch()

    async def somebody_elses(job: Any) -> None:
        raise PermanentError("stalled more than allowable limit\n  at worker.js:1")

    async with Worker(stage.runs.queue.name, somebody_elses, connection=stage.connection):
        await stage.until_job(wanted.run_id, JobState.FAILED)
    swept = await stage.runs.maintenance().sweep()
    again = await stage.runs.maintenance().sweep()

    row = await stage.service.get(ALICE, wanted.run_id)
    assert (swept.failed, again.examined) == (1, 0)
    assert row.status is RunStatus.FAILED
    assert row.error_message == "Workflow execution failed after 1 attempts: stalled more than allowable limit"
    assert await stage.service.balance(ALICE) == 10


@pytest.mark.requirement("X-106", "X-119", "R-17")
async def test_a_run_whose_update_failed_is_updated_later_and_dead_lettered_once(stage: Stage) -> None:
    async def refuse(run: Run) -> None:
        raise PermanentError("no")

    run_id = await submit_impatient(stage)
    stage.runs.handler(refuse)
    worker, real, is_away = stage.runs.worker(), stage.ledger.transactions.run, asyncio.Event()

    async def unreliable(tenant_id: str, fn: Any) -> Any:
        if is_away.is_set():
            raise DatabaseUnavailable("gone")
        return await real(tenant_id, fn)

    # The database goes away between the move to failed and the failure handler, which is a task of its own.
    worker.worker.on("failed", lambda job, reason: is_away.set())
    stage.ledger.transactions.run = unreliable  # type: ignore[method-assign]  # the edge to the database
    await worker.start()
    await stage.until_job(run_id, JobState.FAILED)
    await worker.close()
    stage.ledger.transactions.run = real  # type: ignore[method-assign]
    left = await stage.service.get(ALICE, run_id)
    letters = await stage.runs.queue.dead_letters.list()

    swept = await stage.runs.maintenance().sweep()

    assert left.status is RunStatus.RUNNING
    assert swept.failed == 1
    assert (await stage.service.get(ALICE, run_id)).status is RunStatus.FAILED
    assert await stage.runs.queue.dead_letters.list() == letters
    assert len(letters) == 1


@pytest.mark.requirement("X-108", "X-40")
async def test_a_redrive_that_stopped_half_way_is_finished(stage: Stage) -> None:
    flaky = Flaky()

    async def execute(run: Run) -> Any:
        return await flaky(run)

    run_id = await submit_impatient(stage)
    async with stage.working(execute, dispatch=False):
        await stage.until(run_id, RunStatus.FAILED)
        await stage.until_job(run_id, JobState.FAILED)
    # The process dies right after its transaction.
    await stage.ledger.transactions.run(ALICE, lambda runs: runs.requeue(run_id, actor="ada"))
    flaky.is_mended = True

    swept = await stage.runs.maintenance().sweep()

    assert (swept.given_jobs, swept.failed) == (1, 0)
    async with stage.working(dispatch=False):
        await stage.until(run_id, RunStatus.COMPLETED)
    assert flaky.bank.calls == {f"{run_id}/charge": 1}
    assert await stage.service.dead_letter_depth() == 0


async def test_a_running_run_whose_job_is_gone_is_run_again(stage: Stage) -> None:
    bank = Bank()
    wanted = payload()
    await stage.service.submit(wanted)
    # Its worker died with the whole Redis.
    await stage.ledger.transactions.run(
        ALICE, lambda runs: runs.start(wanted.run_id, job_timestamp=1_900_000_000_000, job_fence=5)
    )

    async def execute(run: Run) -> None:
        await run.step("charge", bank.charge)

    swept = await stage.runs.maintenance().sweep()

    assert swept.given_jobs == 1
    async with stage.working(execute, dispatch=False):
        await stage.until(wanted.run_id, RunStatus.COMPLETED)
    assert len(bank.calls) == 1


async def test_a_retry_while_redis_is_away_is_finished_by_maintenance(
    ledger: Ledger, stage: Stage, connection: Connection
) -> None:
    async def refuse(run: Run) -> None:
        raise PermanentError("no")

    run_id = await submit_impatient(stage)
    async with stage.working(refuse, dispatch=False):
        await stage.until(run_id, RunStatus.FAILED)
        await stage.until_job(run_id, JobState.FAILED)
    nowhere = Connection("redis://127.0.0.1:1", command_timeout_ms=50)
    other = Runs(ledger, nowhere, options=RunOptions(**QUICK))  # type: ignore[arg-type]  # as in the kit
    other.queue._deadline_s = 0.05

    row = await other.service.retry(ALICE, run_id, actor="ada")
    with pytest.raises(ConnectionLost):
        await other.queue.counts()

    assert row.status is RunStatus.QUEUED
    assert (await stage.runs.maintenance().sweep()).given_jobs == 1
    await other.aclose()
    await nowhere.aclose()


async def test_maintenance_looks_again_and_again_until_it_is_closed(lite: Stage) -> None:
    wanted = payload()
    await lite.service.submit(wanted)
    maintenance = lite.runs.maintenance()
    running = asyncio.create_task(maintenance.run())

    async with lite.working(dispatch=False):
        await lite.until(wanted.run_id, RunStatus.COMPLETED)
    await maintenance.close(1_000)
    await maintenance.close()
    await running


@pytest.mark.requirement("X-23")
async def test_maintenance_needs_the_service_role_and_workers_the_worker_role(
    tenant_ledger: Ledger, service_ledger: Ledger, make_stage: MakeStage
) -> None:
    with pytest.raises(UnsafeDatabaseRole, match="service role"):
        make_stage(tenant_ledger).runs.maintenance()
    for wrong in (service_ledger, tenant_ledger):
        with pytest.raises(UnsafeDatabaseRole, match="worker role"):
            await make_stage(wrong).runs.worker().start()
    with pytest.raises(UnsafeDatabaseRole, match="needs a tenant"):
        await tenant_ledger.runs.find()
