"""Steps are paid once: whatever attempt, whatever crash, as long as the provider takes the key."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bullpen.errors import InvalidOption, PermanentError
from bullpen.ledger import RunStatus
from bullpen.queue import JobState
from bullpen.runs import Run, RunInterrupted
from tests.runs.kit import ALICE, BOB, Bank, Stage, payload
from tests.runs.test_lifecycle import submit_impatient


@pytest.mark.requirement("X-120")
async def test_a_retry_does_not_repeat_steps_that_are_done(stage: Stage) -> None:
    bank, results = Bank(), list[Any]()

    async def execute(run: Run) -> str:
        results.append(await run.step("charge", bank.charge))
        if run.attempt < 3:
            raise ValueError("the model is busy")
        await run.step("ship", bank.charge)
        return "done"

    run_id = await submit_impatient(stage)
    async with stage.working(execute, dispatch=False):
        await stage.until(run_id, RunStatus.COMPLETED)

    assert bank.calls == {f"{run_id}/charge": 1, f"{run_id}/ship": 1}
    assert results == [{"receipt": f"{run_id}/charge"}] * 3
    assert [step.name for step in await stage.service.steps(ALICE, run_id)] == ["charge", "ship"]
    assert await stage.service.steps(BOB, run_id) == []


@pytest.mark.requirement("X-120", "X-16")
async def test_a_crash_between_effect_and_result_repeats_the_step_with_the_same_key(stage: Stage) -> None:
    """Nobody can do better than that; the provider knows the key and charges once."""
    bank, crashed = Bank(), False

    async def execute(run: Run) -> None:
        nonlocal crashed

        async def charge(key: str) -> dict[str, Any]:
            nonlocal crashed
            receipt = await bank.charge(key)
            if not crashed:
                crashed = True
                raise ConnectionError("the answer was lost")
            return receipt

        await run.step("charge", charge)

    run_id = await submit_impatient(stage)
    async with stage.working(execute, dispatch=False):
        await stage.until(run_id, RunStatus.COMPLETED)

    assert bank.calls == {f"{run_id}/charge": 2}
    assert bank.charged == {f"{run_id}/charge": 1}


@pytest.mark.requirement("X-110", "X-120")
async def test_an_owner_that_lost_the_run_stores_no_result(sqlite_url: str, make_ledger: Any, make_stage: Any) -> None:
    # Not the heartbeat, which would notice first: the step itself must.
    lite: Stage = make_stage(make_ledger(sqlite_url), heartbeat_ms=60_000)
    bank, interrupted = Bank(), list[BaseException]()

    async def execute(run: Run) -> None:
        if run.fence > 1:
            return

        async def charge(key: str) -> dict[str, Any]:
            await lite.ledger.transactions.run(
                ALICE, lambda runs: runs.start(run.id, job_timestamp=run.job.timestamp, job_fence=9)
            )
            return await bank.charge(key)

        try:
            await run.step("charge", charge)
        except RunInterrupted as error:
            interrupted.append(error)
            raise

    wanted = payload()
    await lite.service.submit(wanted)
    async with lite.working(execute):
        job = await lite.until_job(wanted.run_id, JobState.COMPLETED)

    assert len(interrupted) == 1
    assert job.return_value["outcome"] == "INTERRUPTED_RUNNING"
    assert await lite.service.steps(ALICE, wanted.run_id) == []


async def test_steps_of_a_cancelled_run_are_not_begun(lite: Stage) -> None:
    seen: list[type[BaseException]] = []

    async def execute(run: Run) -> None:
        await lite.service.cancel(ALICE, run.id, actor="ada")
        try:
            await run.progress(10)
        except RunInterrupted as error:
            seen.append(type(error))
            raise

    wanted = payload()
    await lite.service.submit(wanted)
    async with lite.working(execute):
        await lite.until_job(wanted.run_id, JobState.COMPLETED)

    assert seen == [RunInterrupted]


async def test_a_step_has_one_name_and_a_result_that_can_be_stored(lite: Stage) -> None:
    problems: list[Exception] = []

    async def huge(key: str) -> str:
        return "x" * 1_100_000

    async def nothing(key: str) -> None:
        return None

    async def execute(run: Run) -> None:
        await run.step("a", nothing)
        for name, work in (("a", nothing), ("", nothing), ("x" * 121, nothing), ("huge", huge)):
            try:
                await run.step(name, work)
            except Exception as error:
                problems.append(error)

    wanted = payload()
    await lite.service.submit(wanted)
    async with lite.working(execute):
        await lite.until(wanted.run_id, RunStatus.COMPLETED)

    assert [type(problem) for problem in problems] == [InvalidOption, InvalidOption, InvalidOption, PermanentError]
    assert "a name of its own" in str(problems[0])
    assert [step.name for step in await lite.service.steps(ALICE, wanted.run_id)] == ["a"]


async def test_progress_is_seen_from_outside(stage: Stage) -> None:
    reported, go_on = asyncio.Event(), asyncio.Event()

    async def execute(run: Run) -> None:
        await run.progress({"done": 3, "of": 7, "message": "reading"})
        reported.set()
        await go_on.wait()

    wanted = payload()
    await stage.service.submit(wanted)
    async with stage.working(execute):
        await reported.wait()
        row = await stage.service.get(ALICE, wanted.run_id)
        go_on.set()
        await stage.until(wanted.run_id, RunStatus.COMPLETED)

    assert row.progress == {"done": 3, "of": 7, "message": "reading"}


@pytest.mark.requirement("X-112")
async def test_no_connection_is_held_while_handlers_work(postgres_url: str, make_ledger: Any, make_stage: Any) -> None:
    """Twenty slow calls at the same time on a pool of two: each transaction ends before the work begins."""
    ledger = make_ledger(postgres_url, pool_size=2, timeout_ms=10_000)
    stage: Stage = make_stage(ledger, concurrency=20, heartbeat_ms=10_000)
    working, go_on = 0, asyncio.Event()
    all_work = asyncio.Event()

    async def execute(run: Run) -> None:
        nonlocal working
        working += 1
        if working == 20:
            all_work.set()
        await go_on.wait()

    wanted = [payload() for _ in range(20)]
    for each in wanted:
        await stage.service.submit(each)
    async with stage.working(execute):
        async with asyncio.timeout(20):
            await all_work.wait()
            # Dispatcher and others look now and then, at times together; what handlers held would stay.
            while ledger.database.engine.pool.checkedout() > 0:  # noqa: ASYNC110 - a pool tells nobody
                await asyncio.sleep(0.002)
        go_on.set()
        for each in wanted:
            await stage.until(each.run_id, RunStatus.COMPLETED)
