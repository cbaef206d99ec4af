"""Limits: calls per minute of a provider, breakers that stop taking instead of burning attempts, sizes that fit."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from bullpen import AutoConcurrency
from bullpen._kernel.breaker import CircuitBreaker
from bullpen._kernel.policy import INGESTION
from bullpen.errors import InvalidOption, NotConfigured
from bullpen.ledger import RunStatus
from bullpen.queue import Job, JobState
from bullpen.redis import Connection
from bullpen.runs import Provider, Run, RunOptions, ingestion_job_id, ingestion_queue, ingestion_worker_options
from bullpen.runs.runs import connections_for
from bullpen.worker import Worker
from tests.databases import MakeLedger
from tests.runs.conftest import MakeStage
from tests.runs.kit import Stage, payload
from tests.runs.test_lifecycle import submit_impatient


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


# ---- the breaker ----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("R-51")
def test_a_breaker_opens_after_failures_in_a_row_and_a_probe_closes_it() -> None:
    clock = Clock()
    breaker = CircuitBreaker(3, 1_000, clock=clock)

    assert [breaker.failed(), breaker.failed(), breaker.succeeded()] == [False, False, False]
    assert [breaker.failed(), breaker.failed(), breaker.failed()] == [False, False, True]
    assert breaker.is_open and breaker.ask() == 1_000
    assert not breaker.failed()  # one that was under way when it opened changes nothing
    clock.now = 0.4
    assert breaker.ask() == 600
    clock.now = 1.0
    assert (breaker.ask(), breaker.ask()) == (0, 1_000)  # the probe, and whoever comes while it is under way
    assert breaker.failed()  # the probe
    assert breaker.ask() == 1_000
    clock.now = 2.0
    assert breaker.ask() == 0
    breaker.abandoned()
    assert breaker.ask() == 0  # another one may be the probe
    assert breaker.succeeded()
    assert not breaker.is_open and breaker.ask() == 0


@pytest.mark.parametrize(("failures", "pause"), [(0, 1), (1, 0), (True, 5)])
def test_a_breaker_is_checked(failures: Any, pause: Any) -> None:
    with pytest.raises(InvalidOption):
        CircuitBreaker(failures, pause)


@pytest.mark.requirement("R-51")
async def test_while_the_engine_is_down_nothing_is_taken_and_no_attempt_is_burnt(
    sqlite_url: str, make_ledger: MakeLedger, make_stage: MakeStage
) -> None:
    stage = make_stage(make_ledger(sqlite_url), concurrency=1, breaker=CircuitBreaker(2, 400))
    is_down, times = True, list[float]()

    async def execute(run: Run) -> None:
        times.append(time.monotonic())
        if is_down:
            raise ConnectionError("connection refused")

    first = await submit_impatient(stage)
    async with stage.working(execute, dispatch=False):
        async with asyncio.timeout(20):
            while not await stage.runs.queue.rate_limit_ttl():  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.01)
        others = [await submit_impatient(stage) for _ in range(5)]
        is_down = False
        for run_id in (first, *others):
            row = await stage.until(run_id, RunStatus.COMPLETED)
            assert row.attempts == (2 if run_id == first else 0)

    # The two failures, then nothing for the pause: attempts of others were not spent to find out what is known.
    assert times[2] - times[1] >= 0.35


# ---- providers ------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("R-50")
async def test_a_provider_is_called_so_often_per_minute_and_not_more(lite: Stage) -> None:
    queue = lite.runs.queue
    await queue.add("so that there is a queue")
    turns = [await queue.take_turn("openai", most=3, duration=300) for _ in range(5)]
    others = await queue.take_turn("other:one", most=3)

    assert turns[:3] == [0, 0, 0] and all(0 < wait <= 300 for wait in turns[3:])
    assert others == 0
    await asyncio.sleep(turns[4] / 1000 + 0.02)
    assert await queue.take_turn("openai", most=3, duration=300) == 0
    for bad in ({"provider": ""}, {"most": 0}, {"duration": 0}):
        with pytest.raises(InvalidOption):
            await queue.take_turn(**{"provider": "x", "most": 1, **bad})  # type: ignore[arg-type]


@pytest.mark.requirement("R-50")
async def test_a_counter_without_end_is_begun_anew(lite: Stage, redis_server: Any) -> None:
    key = lite.runs.queue.keys.turns("openai")
    await lite.runs.queue.add("so that there is a queue")
    await lite.runs.queue.take_turn("openai", most=1)
    redis_server.command("SET", key, "9")

    assert await lite.runs.queue.take_turn("openai", most=1) == 0


@pytest.mark.requirement("R-50")
async def test_a_run_that_finds_its_provider_busy_waits_without_losing_an_attempt(
    sqlite_url: str, make_ledger: MakeLedger, make_stage: MakeStage
) -> None:
    stage = make_stage(make_ledger(sqlite_url), providers={"openai": Provider(rate_limit_rpm=1)})
    calls: list[str] = []

    async def execute(run: Run) -> None:
        async with run.provider("openai"):
            calls.append(run.id)

    first, second = payload(), payload()
    async with stage.working(execute):
        await stage.service.submit(first)
        await stage.until(first.run_id, RunStatus.COMPLETED)
        await stage.service.submit(second)
        job = await stage.until_job(second.run_id, JobState.DELAYED)
        row = await stage.until(second.run_id, RunStatus.QUEUED)

    assert calls == [first.run_id]
    assert (row.attempts, row.retry_history, job.attempts_made) == (0, [], 0)
    assert 0 < job.delay <= 60_000


@pytest.mark.requirement("R-51")
async def test_a_provider_that_is_down_is_left_alone(lite: Stage) -> None:
    from bullpen.errors import DelayJob, RateLimited
    from bullpen.runs.providers import ProviderLimits

    breaker = CircuitBreaker(1, 5_000)
    limits = ProviderLimits(lite.runs.queue, {"bank": Provider(breaker=breaker), "free": Provider()})

    with pytest.raises(RateLimited):
        async with limits.call("bank"):
            raise RateLimited(10)  # says what shall happen to the job, and nothing about the bank
    assert not breaker.is_open
    task = asyncio.create_task(_hang(limits))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not breaker.is_open
    with pytest.raises(ConnectionError):
        async with limits.call("bank"):
            raise ConnectionError("refused")
    with pytest.raises(DelayJob, match="provider 'bank' is down"):
        async with limits.call("bank"):
            raise AssertionError("must not be called")
    async with limits.call("free"):
        pass
    breaker.succeeded()
    async with limits.call("bank"):
        pass
    with pytest.raises(InvalidOption, match="one of bank, free"):
        async with limits.call("nobody"):
            pass


async def _hang(limits: Any) -> None:
    async with limits.call("bank"):
        await asyncio.Event().wait()


@pytest.mark.requirement("R-50")
async def test_runs_started_per_minute_can_be_limited(
    sqlite_url: str, make_ledger: MakeLedger, make_stage: MakeStage
) -> None:
    stage = make_stage(make_ledger(sqlite_url), rate_limit_rpm=2)
    wanted = [payload() for _ in range(3)]
    for each in wanted:
        await stage.service.submit(each)
    await stage.dispatch()

    async with stage.working(dispatch=False):
        async with asyncio.timeout(20):
            while (await stage.runs.queue.counts()).completed < 2:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.01)
        assert await stage.runs.queue.rate_limit_ttl(2) > 0

    assert (await stage.runs.queue.counts()).pending == 1


@pytest.mark.parametrize(
    "options",
    [
        {"concurrency": 0},
        {"concurrency": "5"},
        {"heartbeat_ms": 0},
        {"patience_ms": 0},
        {"idle_ms": -1},
        {"sweep_every_ms": 0},
        {"rate_limit_rpm": 0},
    ],
)
def test_options_are_checked_at_the_door(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption):
        RunOptions(**options)
    with pytest.raises(InvalidOption):
        Provider(rate_limit_rpm=0)


# ---- sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("X-112")
async def test_a_pool_that_is_too_small_for_the_concurrency_stops_the_start(
    postgres_url: str, make_ledger: MakeLedger, make_stage: MakeStage
) -> None:
    ledger = make_ledger(postgres_url, pool_size=4)

    with pytest.raises(NotConfigured, match=r"100 runs .* need 10 database connections, and the pool has 4"):
        await make_stage(ledger, concurrency=100).runs.worker().start()

    stage = make_stage(ledger, concurrency=40)
    await stage.runs.dead_letter_queue.add("so that there are queues")
    await stage.runs.queue.add("so that there are queues")
    worker = stage.runs.worker()
    await worker.start()
    await worker.close()
    assert [connections_for(number) for number in (1, 20, 21, 100)] == [2, 2, 3, 10]


async def test_the_most_that_a_worker_may_find_itself_counts_for_the_pool(
    postgres_url: str, make_ledger: MakeLedger, make_stage: MakeStage
) -> None:
    """It begins with ten, and must not starve the pool an hour later."""
    stage = make_stage(make_ledger(postgres_url, pool_size=4), concurrency="auto")

    with pytest.raises(NotConfigured, match=r"100 runs .* need 10 database connections, and the pool has 4"):
        await stage.runs.worker().start()

    stage.runs.configure(concurrency=AutoConcurrency(most=40))
    worker = stage.runs.worker()
    await worker.check()
    assert worker.worker.adapts_concurrency


@pytest.mark.requirement("R-3", "X-118")
def test_the_lock_of_runs_is_five_minutes_unless_told_otherwise(lite: Stage) -> None:
    lite.runs.routes.set(None, None, RunOptions())
    assert lite.runs.worker().worker.options.lock_ms == 300_000
    assert lite.runs.worker().worker.options.stalled_interval_ms == 10_000
    assert lite.runs.worker().worker.options.concurrency == 100

    lite.runs.configure(lock=20_000, concurrency=7)

    assert lite.runs.worker().worker.options.lock_ms == 20_000
    assert lite.runs.worker().worker.options.concurrency == 7


@pytest.mark.requirement("X-117")
async def test_a_lock_is_no_option_of_the_queue(lite: Stage) -> None:
    from bullpen.queue import Queue

    with pytest.raises(InvalidOption, match="lock"):
        Queue("workflow-execution", connection=lite.connection, lock=300_000)  # type: ignore[call-arg]  # that is the point
    with pytest.raises(InvalidOption, match="lock"):
        await lite.runs.queue.add("workflow-run", {}, lock_duration=300_000)  # type: ignore[call-arg]  # that is the point


# ---- ingestion ------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("R-49")
async def test_ingestion_is_fire_and_forget(connection: Connection) -> None:
    queue = ingestion_queue(connection)
    job_id = ingestion_job_id()

    async def refuse(job: Job) -> None:
        raise ValueError("unreadable file")

    job = await queue.add("index", {"file": 1}, job_id=job_id)
    worker = Worker(queue.name, refuse, connection=connection, **ingestion_worker_options())
    async with worker:
        async with asyncio.timeout(20):
            while await job.state() is not JobState.FAILED:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.01)

    assert (queue.name, job_id[:4], len(job_id)) == ("ingestion", "idx-", 40)
    assert job.opts.attempts == 1
    assert await queue.dead_letters.depth() == 0
    assert (worker.options.lock_ms, worker.options.concurrency, INGESTION.keep_failed) == (30_000, 1, 500)
    assert b'"removeOnFail":500' in job.record.raw_opts.replace(b" ", b"") or b'"count":500' in job.record.raw_opts
    await queue.close()


# ---- tenants --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fair", [True, False])
async def test_a_small_tenant_does_not_wait_for_a_large_one(lite: Stage, make_stage: MakeStage, fair: bool) -> None:
    """Unless the app says otherwise."""
    stage = make_stage(lite.ledger, lane_per_tenant=fair, concurrency=1)
    for _ in range(30):
        await stage.service.submit(payload("large"))
    await stage.dispatch()
    small = payload("small")
    await stage.service.submit(small)
    await stage.dispatch()
    order: list[str] = []

    async def execute(run: Run) -> None:
        order.append(run.tenant_id)

    async with stage.working(execute, dispatch=False):
        await stage.until(small.run_id, RunStatus.COMPLETED, tenant_id="small")

    assert (order.index("small") <= 3) is fair
