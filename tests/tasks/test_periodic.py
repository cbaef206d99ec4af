"""Tasks that run by themselves: declared in code, stored at the start, changed and removed with it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import pytest

from bullpen import Bullpen, InvalidOption, Job
from bullpen.testing import FaultProxy, RedisServer

HOUR = 3_600_000


@asynccontextmanager
async def running(app: Bullpen, **options: Any) -> AsyncIterator[None]:
    run = asyncio.create_task(app.run(signals=False, **options))
    try:
        yield
    finally:
        await app.stop()
        await run


@pytest.fixture
def make(redis_url: str) -> Callable[..., Bullpen]:
    """An app with one periodic task `report` of the queue `reports`, as of this version of the code."""

    def make_app(**options: Any) -> Bullpen:
        app = Bullpen(redis_url)

        @app.task("reports", **options)  # type: ignore[untyped-decorator]  # what the options are is not known
        async def report(day: int = 1) -> int:
            return day

        return app

    return make_app


@pytest.mark.requirement("X-28")
async def test_a_task_with_every_runs_by_itself(redis_url: str) -> None:
    app, ran = Bullpen(redis_url), asyncio.Semaphore(0)

    @app.task("beats", every="50ms")
    async def beat(job: Job, strength: int = 3) -> int:
        assert job.record.scheduler_id == "beat"
        ran.release()
        return strength

    async with running(app):
        for _ in range(3):
            await asyncio.wait_for(ran.acquire(), 20)


async def test_all_parts_of_a_rule_can_be_declared(make: Callable[..., Bullpen]) -> None:
    app = make(
        cron="0 9 * * 1-5",
        tz="Europe/Berlin",
        limit=5,
        overlap="skip",
        catch_up=2,
        jitter="10s",
        end=datetime(2100, 1, 1, tzinfo=UTC),
        attempts=7,
    )
    async with app:
        changed = await app.reconcile_schedules()
        stored = await app.queue("reports").get_scheduler("report")

    assert changed["reports"].changed == ("report",)
    assert stored is not None and stored.is_declared
    assert (stored.pattern, stored.zone, stored.limit, stored.overlap) == ("0 9 * * 1-5", "Europe/Berlin", 5, "skip")
    assert (stored.catch_up, stored.jitter_ms, stored.opts.attempts, stored.name) == (2, 10_000, 7, "report")


async def test_what_did_not_change_is_not_touched(make: Callable[..., Bullpen], redis_server: RedisServer) -> None:
    """Fifty processes start at once: the job to come must not be taken out and put back fifty times."""
    async with make(cron="@yearly") as app:
        await app.reconcile_schedules()
        before = await app.queue("reports").get_scheduler("report")
    client = redis_server.client()
    events = client.xlen("bull:reports:events")

    async def start() -> tuple[str, ...]:
        async with make(cron="@yearly") as again:
            return (await again.reconcile_schedules())["reports"].changed

    assert await asyncio.gather(*(start() for _ in range(10))) == [()] * 10

    assert client.xlen("bull:reports:events") == events
    async with make(cron="@yearly") as app:
        assert await app.queue("reports").get_scheduler("report") == before


@pytest.mark.parametrize("change", [{"cron": "@daily"}, {"cron": "@yearly", "attempts": 9}, {"every": "1h"}], ids=str)
async def test_what_changed_is_updated(make: Callable[..., Bullpen], change: dict[str, Any]) -> None:
    async with make(cron="@yearly") as app:
        await app.reconcile_schedules()

    async with make(**change) as app:
        found = await app.reconcile_schedules()
        stored = await app.queue("reports").get_scheduler("report")

    assert found["reports"].changed == ("report",)
    assert stored is not None
    assert (stored.pattern or stored.every_ms) == change.get("cron", HOUR)
    assert stored.opts.attempts == change.get("attempts", 3)


async def test_what_another_client_overwrote_is_declared_again(
    make: Callable[..., Bullpen], redis_server: RedisServer
) -> None:
    """Node's upsert rewrites the record and knows nothing of our policies."""
    async with make(cron="@yearly", overlap="skip") as app:
        await app.reconcile_schedules()
        redis_server.client().hdel("bull:reports:repeat:report", "bpdef", "bpoverlap")

        found = await app.reconcile_schedules()

        stored = await app.queue("reports").get_scheduler("report")
    assert found["reports"].changed == ("report",)
    assert stored is not None and stored.overlap == "skip"


async def test_a_pause_outlives_a_deployment(make: Callable[..., Bullpen]) -> None:
    async with make(cron="@yearly") as app:
        await app.reconcile_schedules()
        await app.queue("reports").pause_scheduler("report")

    async with make(cron="@daily") as app:
        await app.reconcile_schedules()
        stored = await app.queue("reports").get_scheduler("report")

    assert stored is not None and stored.is_paused and stored.pattern == "@daily"


async def test_one_that_is_no_longer_declared_is_reported_and_removed_on_request(
    make: Callable[..., Bullpen], caplog: pytest.LogCaptureFixture
) -> None:
    async with make(cron="@yearly") as app:
        await app.reconcile_schedules()
        await app.queue("reports").upsert_scheduler("of-somebody-else", cron="@yearly")
    caplog.clear()

    with caplog.at_level(logging.INFO, "bullpen.app"):
        async with make() as app:
            found = await app.reconcile_schedules()
            assert await app.queue("reports").count_schedulers() == 2
    assert found["reports"].stale == ("report",)
    assert "no task declares schedule 'report' any more" in caplog.text
    assert "bullpen schedules remove reports report" in caplog.text

    async with make() as app:
        await app.reconcile_schedules(prune=True)
        left = await app.queue("reports").schedulers()
        again = await app.reconcile_schedules()
    assert [one.id for one in left] == ["of-somebody-else"]
    assert again["reports"].stale == ()


async def test_run_prunes_when_it_is_told_to(make: Callable[..., Bullpen], redis_server: RedisServer) -> None:
    async with make(cron="@yearly") as app:
        await app.reconcile_schedules()
    client = redis_server.client()

    async with running(make(), prune_schedules=True):
        async with asyncio.timeout(20):
            while client.exists("bull:reports:repeat"):  # noqa: ASYNC110 - the server tells nobody
                await asyncio.sleep(0.01)


async def test_a_server_that_is_away_at_the_start_gets_the_schedules_later(
    redis_server: RedisServer, redis_url: str
) -> None:
    with FaultProxy(redis_server) as proxy:
        proxy.refuse()
        app, ran = Bullpen(proxy.url), asyncio.Event()

        @app.task("beats", every="1h")
        async def beat() -> None:
            ran.set()

        async with running(app):
            await asyncio.sleep(0.2)
            proxy.accept()
            await asyncio.wait_for(ran.wait(), 30)


async def test_defaults_of_the_queue_hold_and_may_be_said_later(redis_url: str) -> None:
    app = Bullpen(redis_url)

    @app.task("first", every="1h")
    async def one() -> None: ...

    @app.task("second", every="1h")
    async def two() -> None: ...

    app.queue("first", attempts=5)
    async with app:
        await app.reconcile_schedules()
        stored = await app.queue("first").get_scheduler("one")
        app.queue("second", attempts=6)

    assert stored is not None and stored.opts.attempts == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": "often"}, "every"),
        ({"cron": "x"}, "pattern"),
        ({"every": 1, "cron": "@daily"}, "either"),
        ({"tz": "UTC"}, "together with"),
        ({"every": 1, "delay": 5}, "delay: expected an option of a single job"),
    ],
)
def test_a_wrong_declaration_is_told_where_the_task_stands(
    make: Callable[..., Bullpen], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidOption, match=message):
        make(**options)


def test_a_parameter_without_a_default_is_refused(redis_url: str) -> None:
    app = Bullpen(redis_url)

    async def greet(to: str, greeting: str = "Hello") -> None: ...

    with pytest.raises(InvalidOption, match=r"parameters with defaults.*'to'"):
        app.task("emails", every="1h")(greet)


def test_a_schedule_is_no_option_of_one_add(make: Callable[..., Bullpen]) -> None:
    app = make()

    @app.task("reports", name="other")
    async def other() -> None: ...

    with pytest.raises(InvalidOption, match="every"):
        other.options(every="5m")  # type: ignore[call-arg]  # the point


@pytest.mark.parametrize("unique", ["pending", 60_000])
def test_unique_is_refused_with_a_schedule(make: Callable[..., Bullpen], unique: Any) -> None:
    """It had no effect on scheduled runs, without a word."""
    with pytest.raises(InvalidOption, match=r"unique: expected none with a schedule: `overlap` says it"):
        make(every="1s", unique=unique)


@pytest.mark.parametrize("unique", [True, "always"])
def test_unique_says_what_it_may_be(make: Callable[..., Bullpen], unique: Any) -> None:
    with pytest.raises(InvalidOption, match=r"unique: expected 'pending' \(until it has ended\), or how long"):
        make(unique=unique)


def test_part_of_a_schedule_without_a_rule_is_named(make: Callable[..., Bullpen]) -> None:
    with pytest.raises(InvalidOption, match="overlap: expected together with `every` or `cron`, got 'skip'"):
        make(overlap="skip")


def test_a_misspelt_option_of_a_task_queue_is_refused_where_it_stands(make: Callable[..., Bullpen]) -> None:
    with pytest.raises(InvalidOption, match=r"concurency: expected an argument of Worker.*mean 'concurrency'"):
        make().task_queue("others", concurency=4)  # type: ignore[call-arg]  # the mistake under test
