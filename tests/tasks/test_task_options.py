"""Options of a task that its worker obeys: its time, its rate, and who is told of its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import date, timedelta
from typing import Any

import pytest

from bullpen import Bullpen, InvalidOption, Job, JobFailed, JobState, RateLimit

PATIENCE = 60_000


@pytest.fixture
async def app(redis_url: str) -> AsyncIterator[Bullpen]:
    async with Bullpen(redis_url) as made:
        yield made


@asynccontextmanager
async def running(app: Bullpen) -> AsyncIterator[None]:
    run = asyncio.create_task(app.run(signals=False))
    try:
        yield
    finally:
        await app.stop()
        await run


async def test_the_time_of_one_task_is_not_that_of_its_neighbours(app: Bullpen) -> None:
    app.task_queue("work", timeouts={"by_queue": 50})

    @app.task("work", attempts=1)
    async def patient() -> str:
        await asyncio.sleep(0.2)
        return "done"

    @app.task("work", attempts=1, timeout=timedelta(milliseconds=50))
    async def hurried() -> None:
        await asyncio.Event().wait()

    @app.task("work", attempts=1)
    async def by_queue() -> None:
        await asyncio.Event().wait()

    async with running(app):
        for task in (hurried, by_queue):
            with pytest.raises(JobFailed, match="timed out after 50 ms"):
                await (await task.add()).result(timeout=PATIENCE)
        assert await (await patient.add()).result(timeout=PATIENCE) == "done"


async def test_a_rate_limit_holds_for_its_task_and_counts_no_attempt(app: Bullpen) -> None:
    started: list[str] = []

    @app.task("work", attempts=1, rate_limit=RateLimit(2, 3_600_000))
    async def limited() -> None:
        started.append("limited")

    @app.task("work")
    async def free() -> None:
        started.append("free")

    returned = asyncio.Event()
    app.workers[0].on("returned", lambda job: returned.set())
    async with running(app):
        for job in await limited.add_many([{}, {}]):
            await job.result(timeout=PATIENCE)
        third = await limited.add()
        async with asyncio.timeout(60):
            await returned.wait()
        for job in await free.add_many([{}, {}, {}]):
            await job.result(timeout=PATIENCE)
        stored = await app.queue("work").get_job(third.id)
        state = await third.state()

    assert started == ["limited", "limited", "free", "free", "free"]
    assert state is JobState.DELAYED
    assert stored is not None
    assert stored.attempts_made == 0


async def test_the_end_of_a_task_is_told_with_its_typed_result(app: Bullpen) -> None:
    told: list[tuple[str, str, Any]] = []
    heard = asyncio.Event()

    async def on_success(job: Job, result: Any) -> None:
        told.append(("success", job.name, result))

    def on_failure(job: Job, reason: str) -> None:
        told.append(("failure", job.name, reason))
        heard.set()

    @app.task("work", attempts=1, on_success=on_success, on_failure=on_failure)
    async def tomorrow(day: date) -> date:
        if day.year > 2100:
            raise ValueError("too far")
        return day + timedelta(days=1)

    @app.task("work", attempts=1)
    async def other(fails: bool) -> None:
        if fails:
            raise ValueError

    async with running(app):
        await (await other.add(fails=False)).result(timeout=PATIENCE)
        with pytest.raises(JobFailed):
            await (await other.add(fails=True)).result(timeout=PATIENCE)
        await (await tomorrow.add(date(2030, 1, 1))).result(timeout=PATIENCE)
        await tomorrow.add(date(2200, 1, 1))
        async with asyncio.timeout(60):
            await heard.wait()

    assert told == [("success", "tomorrow", date(2030, 1, 2)), ("failure", "tomorrow", "too far")]


async def test_what_a_callback_raises_harms_no_job(app: Bullpen, caplog: pytest.LogCaptureFixture) -> None:
    def on_success(job: Job, result: Any) -> None:
        raise RuntimeError("broken callback")

    @app.task("work", on_success=on_success)
    async def fine() -> str:
        return "done"

    async with running(app):
        assert await (await fine.add()).result(timeout=PATIENCE) == "done"

    assert "broken callback" in caplog.text


@pytest.mark.parametrize("is_plain", [True, False])
@pytest.mark.parametrize("error", [asyncio.CancelledError, SystemExit], ids=lambda kind: kind.__name__)
async def test_a_callback_that_cancels_or_exits_does_not_end_the_worker(
    app: Bullpen, caplog: pytest.LogCaptureFixture, error: type[BaseException], is_plain: bool
) -> None:
    def plain(job: Job, result: Any) -> None:
        raise error("broken callback")

    async def on_loop(job: Job, result: Any) -> None:
        raise error("broken callback")

    @app.task("work", on_success=plain if is_plain else on_loop)
    async def fine(number: int) -> int:
        return number

    async with running(app):
        for number in range(3):
            assert await (await fine.add(number)).result(timeout=PATIENCE) == number

    if is_plain or error is SystemExit:
        assert "broken callback" in caplog.text


@pytest.mark.parametrize(
    ("option", "value"), [("timeout", 0), ("rate_limit", 5), ("on_success", "name"), ("on_failure", "name")]
)
def test_wrong_options_are_refused_where_the_task_stands(option: str, value: Any) -> None:
    with pytest.raises(InvalidOption, match=option):
        Bullpen().task("work", **{option: value})(lambda: None)
