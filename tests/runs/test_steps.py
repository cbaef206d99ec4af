"""Steps are paid once: whatever attempt, whatever crash, as long as the provider takes the key."""

from __future__ import annotations

import asyncio
import functools
import threading
from typing import Any

import pytest
import sqlalchemy as sa

from bullpen.errors import PermanentError
from bullpen.ledger import RunStatus
from bullpen.queue import JobState
from bullpen.runs import Run, RunInterrupted
from bullpen.runs.processor import RunProcessor
from tests.runs.kit import ALICE, BOB, Bank, Stage, fake_job, payload
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


@pytest.mark.requirement("X-120")
async def test_a_plain_function_is_a_step_and_runs_in_a_thread(lite: Stage) -> None:
    """It was called, its answer could not be awaited, and every attempt called the provider again."""
    bank, threads = Bank(), list[int]()

    def charge(key: str) -> dict[str, Any]:
        threads.append(threading.get_ident())
        bank.note(key)
        return {"receipt": key}

    def asks_later(key: str) -> Any:
        return bank.charge(key)

    async def execute(run: Run) -> list[Any]:
        return [
            await run.step("plain", charge),
            await run.step("partial", functools.partial(charge)),
            await run.step("lambda", lambda key: bank.charge(key)),
            await run.step("value", lambda key: len(key) > 0),
            await run.step("later", asks_later),
        ]

    wanted = payload()
    await lite.service.submit(wanted)
    async with lite.working(execute):
        await lite.until(wanted.run_id, RunStatus.COMPLETED)

    assert bank.calls == {f"{wanted.run_id}/{name}": 1 for name in ("plain", "partial", "lambda", "later")}
    assert threading.get_ident() not in threads
    steps = [step.name for step in await lite.service.steps(ALICE, wanted.run_id)]
    assert steps == ["plain", "partial", "lambda", "value", "later"]


@pytest.mark.requirement("X-120")
async def test_plain_steps_of_many_runs_run_at_the_same_time(lite: Stage) -> None:
    """More than the threads that Python keeps for everybody on a small machine."""
    count = 12
    together = threading.Barrier(count, timeout=10)

    async def execute(run: Run) -> None:
        def meet(key: str) -> None:
            together.wait()

        await asyncio.gather(*(run.step(f"step {number}", meet) for number in range(count)))

    wanted = payload()
    await lite.service.submit(wanted)
    async with lite.working(execute):
        await lite.until(wanted.run_id, RunStatus.COMPLETED)


def too_large(bank: Bank, key: str) -> str:
    bank.note(key)
    return "x" * 1_100_000


def no_json(bank: Bank, key: str) -> object:
    bank.note(key)
    return {"at": object()}


async def no_json_later(bank: Bank, key: str) -> object:
    await bank.charge(key)
    return b"bytes"


@pytest.mark.requirement("X-120")
@pytest.mark.parametrize(
    ("work", "words", "calls"),
    [
        (too_large, "result of step 'pay' has 1100002 bytes, more than 1048576", 1),
        (no_json, "result of step 'pay' cannot be stored", 1),
        (no_json_later, "result of step 'pay' cannot be stored", 1),
        (lambda bank: None, "step 'pay': a function of one argument, the key", 0),
        ("charge", "step 'pay': a function of one argument, the key", 0),
    ],
    ids=["too large", "no JSON", "no JSON, async", "no argument", "no function"],
)
async def test_a_step_that_can_never_end_well_fails_at_once_and_for_good(
    stage: Stage, work: Any, words: str, calls: int
) -> None:
    bank = Bank()

    async def execute(run: Run) -> None:
        await run.step("pay", functools.partial(work, bank) if callable(work) else work)

    run_id = await submit_impatient(stage)
    async with stage.working(execute, dispatch=False):
        await stage.until(run_id, RunStatus.FAILED)

    row = await stage.service.get(ALICE, run_id)
    assert row is not None
    assert words in str(row.error_message)
    assert row.attempts == 1
    assert sum(bank.calls.values()) == calls


@pytest.mark.requirement("X-120")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("charge", "a name of its own for each step"),
        *((name, "1 to 120 characters, without NUL") for name in ("", "x" * 121, "a\0b", "a\ud800")),
    ],
)
async def test_a_bad_name_fails_the_run_before_the_provider_is_called(stage: Stage, name: str, words: str) -> None:
    bank = Bank()

    async def execute(run: Run) -> None:
        await run.step("charge", bank.charge)
        await run.step(name, bank.charge)

    run_id = await submit_impatient(stage)
    async with stage.working(execute, dispatch=False):
        await stage.until(run_id, RunStatus.FAILED)

    row = await stage.service.get(ALICE, run_id)
    assert row is not None
    assert words in str(row.error_message)
    assert row.attempts == 1
    assert bank.calls == {f"{run_id}/charge": 1}


async def test_a_coroutine_instead_of_its_function_is_refused_and_closed(lite: Stage) -> None:
    """It would run without a key, and not be known to a later attempt."""
    bank, told = Bank(), list[str]()

    async def execute(run: Run) -> None:
        try:
            await run.step("charge", bank.charge("no key"))  # type: ignore[call-overload]  # what people write
        except PermanentError as error:
            told.append(str(error))

    wanted = payload()
    await lite.service.submit(wanted)
    async with lite.working(execute):
        await lite.until(wanted.run_id, RunStatus.COMPLETED)

    assert told == ["step 'charge': a function of one argument, the key, is expected, not a coroutine that was called"]
    assert bank.calls == {}


@pytest.mark.many
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


async def _lock_of(stage: Stage, run_id: str) -> tuple[str, Any]:
    key = stage.runs.queue.keys.lock(run_id)
    return key, stage.connection.shared_door(key)


@pytest.mark.requirement("X-120")
async def test_a_worker_that_slept_past_its_lock_makes_no_paid_call(stage: Stage) -> None:
    """It was frozen, and another one has its job. It must learn that before it calls, not when it stores."""
    bank, ended = Bank(), asyncio.get_running_loop().create_future()

    async def execute(run: Run) -> None:
        key, door = await _lock_of(stage, run.id)
        await door.call("SET", key, "another worker", "PX", 60_000)
        try:
            await run.step("charge", bank.charge)
        except BaseException as error:
            ended.set_result(type(error))
            raise

    run_id = await submit_impatient(stage)
    async with stage.working(execute, dispatch=False):
        # Cancelled, where the thread that renews locks was faster.
        assert await asyncio.wait_for(ended, 20) in (RunInterrupted, asyncio.CancelledError)
        key, door = await _lock_of(stage, run_id)
        await door.call("DEL", key)

    assert bank.calls == {}


async def test_a_lock_that_ran_out_is_had_again_before_a_paid_call(stage: Stage) -> None:
    """Nobody took the job meanwhile: the run goes on, once the lock is ours again."""
    holders = list[Any]()

    async def execute(run: Run) -> None:
        key, door = await _lock_of(stage, run.id)
        await door.call("DEL", key)

        async def charge(_: str) -> None:
            holders.append(await door.call("GET", key) == run.job.token.encode())

        await run.step("charge", charge)

    run_id = await submit_impatient(stage)
    async with stage.working(execute, dispatch=False):
        await stage.until(run_id, RunStatus.COMPLETED)

    assert holders == [True]


@pytest.mark.parametrize("odd", ["a\0b", "broken \ud800 text", "unwilling"])
async def test_an_error_with_an_odd_text_is_told_in_the_history(stage: Stage, odd: str) -> None:
    """The failed attempt could not be stored, and the run ended with a text about that in place of its error."""

    class OddError(Exception):
        def __str__(self) -> str:
            return odd if odd != "unwilling" else str(1 / 0)

    async def execute(run: Run) -> None:
        raise OddError

    run_id = await submit_impatient(stage)
    async with stage.working(execute, dispatch=False):
        row = await stage.until(run_id, RunStatus.FAILED)

    told = {"a\0b": "a b", "broken \ud800 text": "broken \\ud800 text", "unwilling": "OddError"}[odd]
    assert (row.attempts, [entry["error"] for entry in row.retry_history]) == (3, [told] * 3)
    assert str(row.error_message).endswith(told)


@pytest.mark.parametrize("value", [{1}, "a\0b", {"text": "x" * 1_100_000}, 101], ids=lambda value: repr(value)[:9])
async def test_progress_that_cannot_be_stored_fails_for_good(stage: Stage, value: Any) -> None:
    """Each further attempt would do its work and end there again."""
    attempts = 0

    async def execute(run: Run) -> None:
        nonlocal attempts
        attempts += 1
        await run.progress(value)

    run_id = await submit_impatient(stage)
    async with stage.working(execute, dispatch=False):
        row = await stage.until(run_id, RunStatus.FAILED)

    assert (attempts, row.attempts) == (1, 1)
    assert "progress" in str(row.error_message)


async def test_a_paid_result_may_spell_the_escape_of_a_character_that_no_database_holds(stage: Stage) -> None:
    """A text about JSON is no NUL: the step was paid, and the run failed for good."""

    async def execute(run: Run) -> Any:
        return await run.step("write", lambda key: written())

    async def written() -> str:
        return "write \\u0000 for NUL"

    run_id = await submit_impatient(stage)
    async with stage.working(execute, dispatch=False):
        row = await stage.until(run_id, RunStatus.COMPLETED)

    assert row.result == "write \\u0000 for NUL"


async def test_a_run_of_one_step_costs_few_statements(stage: Stage) -> None:
    """On PostgreSQL: its tenant, itself and its intent; a lock, a start and the payload; one for the step, one for the
    end. Each of the last two is a transaction by itself."""
    if not stage.ledger.database.is_postgres:
        return  # SQLite has no functions, and no round trips

    async def execute(run: Run) -> str:
        return await run.step("once", lambda key: key)

    statements: list[str] = []
    given = payload()
    await stage.service.submit(payload(), actor="ada")  # connections, the identity of the ledger
    sa.event.listen(
        stage.ledger.database.engine.sync_engine,
        "before_cursor_execute",
        lambda *call: statements.append(str(call[2])),
    )
    await stage.service.submit(given, actor="ada")
    outcome = await RunProcessor(stage.ledger.transactions, execute).process(fake_job(given))

    assert outcome["outcome"] == "COMPLETED"
    assert len(statements) <= 8, statements
