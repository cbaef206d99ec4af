"""The middleware that we bring: times, what errors mean, tenants, sessions of SQLAlchemy."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from bullpen import Bullpen, Depends, InvalidOption, Job, JobFailed, JobMeta
from bullpen.middleware import classify_errors, current_tenant, sql_sessions, tenants, timing

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


async def test_timing_reports_each_job_and_warns_of_slow_ones(app: Bullpen, caplog: pytest.LogCaptureFixture) -> None:
    times: dict[str, float] = {}
    app.middleware(timing(slow=timedelta(milliseconds=50), report=lambda job, s: times.update({job.name: s})))

    @app.handler("work")
    async def handle(job: Job) -> None:
        if job.name == "slow":
            await asyncio.sleep(0.06)
        if job.name == "fails":
            raise ValueError

    async with running(app):
        queue = app.queue("work")
        await (await queue.add("slow")).result(timeout=PATIENCE)
        with pytest.raises(JobFailed):
            await (await queue.add("fails", attempts=1)).result(timeout=PATIENCE)

    assert set(times) == {"slow", "fails"}
    assert times["slow"] >= 0.06
    assert "(slow) of queue 'work' took" in caplog.text


class ProviderError(Exception):
    def __init__(self, retry_after_ms: int | None) -> None:
        super().__init__(f"busy for {retry_after_ms}")
        self.retry_after_ms = retry_after_ms


class Refused(ProviderError):
    pass


async def test_errors_mean_for_all_handlers_what_is_said_once(app: Bullpen) -> None:
    runs: list[str] = []
    app.middleware(
        classify_errors(
            permanent=(LookupError, Refused),
            retry_after={ProviderError: lambda error: error.retry_after_ms, TimeoutError: 10},
        )
    )

    @app.handler("work")
    def handle(job: Job) -> str:
        runs.append(job.name)
        errors: dict[str, Exception] = {
            "key": KeyError("no such order"),
            "refused": Refused(10),
            "busy": ProviderError(10),
            "late": TimeoutError(),
            "other": ProviderError(None),
        }
        if runs.count(job.name) > 1 and job.name != "other":
            return "second run"
        raise errors[job.name]

    async def outcome(name: str, attempts: int) -> Any:
        job = await app.queue("work").add(name, attempts=attempts, backoff=1)
        try:
            return await job.result(timeout=PATIENCE)
        except JobFailed as error:
            return str(error)

    async with running(app):
        assert "no such order" in await outcome("key", 5)
        assert "busy for 10" in await outcome("refused", 5)
        assert await outcome("busy", 1) == "second run"
        assert await outcome("late", 1) == "second run"
        assert "busy for None" in await outcome("other", 2)

    assert sorted(runs) == sorted(["key", "refused", *["busy", "late", "other"] * 2])


async def test_the_tenant_of_a_job_is_known_wherever_its_handler_calls(app: Bullpen) -> None:
    app.middleware(tenants(), queues=["by_meta"])
    app.middleware(tenants(lambda job: job.data["customer"], required=True), queues=["by_data"])

    def deep_inside() -> str | None:
        return current_tenant()

    @app.handler("by_meta")
    def in_thread(job: Job) -> str | None:
        return deep_inside()

    @app.handler("by_data")
    async def on_loop(job: Job) -> str | None:
        return deep_inside()

    async with running(app):
        meta = await app.queue("by_meta").add("job", meta=JobMeta(tenant_id="acme"))
        none = await app.queue("by_meta").add("job")
        data = await app.queue("by_data").add("job", {"customer": "umbrella"})
        lacks = await app.queue("by_data").add("job", {"customer": ""}, attempts=9)
        assert await meta.result(timeout=PATIENCE) == "acme"
        assert await none.result(timeout=PATIENCE) is None
        assert await data.result(timeout=PATIENCE) == "umbrella"
        with pytest.raises(JobFailed, match="names no tenant"):
            await lacks.result(timeout=PATIENCE)

    assert current_tenant() is None


async def test_a_session_commits_when_the_handler_returns_and_rolls_back_when_it_raises(
    app: Bullpen, tmp_path: Path
) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/orders")
    app.provide(AsyncSession, sql_sessions(async_sessionmaker(engine)), scope="job")
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE orders (number INTEGER)"))

    @app.task("work", attempts=1)
    async def order(number: int, session: AsyncSession = Depends()) -> None:
        await session.execute(text("INSERT INTO orders VALUES (:number)"), {"number": number})
        if number > 1:
            raise ValueError("too many")

    async with running(app):
        await (await order.add(1)).result(timeout=PATIENCE)
        with pytest.raises(JobFailed, match="too many"):
            await (await order.add(2)).result(timeout=PATIENCE)

    async with engine.begin() as connection:
        assert (await connection.execute(text("SELECT number FROM orders"))).scalars().all() == [1]
    await engine.dispose()


async def test_a_plain_session_belongs_to_the_thread_of_its_task(app: Bullpen, tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path}/orders")
    opened: list[int] = []

    class Watched(Session):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            opened.append(threading.get_ident())

    app.provide(Session, sql_sessions(sessionmaker(engine, class_=Watched)), scope="job")
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE orders (number INTEGER)"))

    @app.task("work")
    def order(number: int, session: Session = Depends()) -> int:
        session.execute(text("INSERT INTO orders VALUES (:number)"), {"number": number})
        return threading.get_ident()

    async with running(app):
        thread = await (await order.add(1)).result(timeout=PATIENCE)

    assert opened == [thread]
    with engine.begin() as connection:
        assert connection.execute(text("SELECT number FROM orders")).scalars().all() == [1]
    engine.dispose()


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (lambda: timing(slow=0), "slow"),
        (lambda: timing(report=5), "report"),  # type: ignore[arg-type]  # that it is refused is the point
        (lambda: classify_errors(permanent=(5,)), "permanent"),  # type: ignore[arg-type]  # as above
        (lambda: classify_errors(retry_after={KeyError: -1}), r"retry_after\[KeyError\]"),
        (lambda: classify_errors(permanent=(KeyError,), retry_after={KeyError: 1}), "permanent too"),
        (lambda: tenants("tenant"), "tenant_of"),  # type: ignore[arg-type]  # as above
        (lambda: sql_sessions("sessions"), "sessionmaker"),  # type: ignore[call-overload]  # as above
    ],
)
def test_wrong_options_are_refused(wrong: Callable[[], object], match: str) -> None:
    with pytest.raises(InvalidOption, match=match):
        wrong()
