"""Runs as a part of an application: resolvable, wired, and run by `app.run`."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bullpen import Bullpen
from bullpen.errors import InvalidOption, NotConfigured, UnsafeDatabaseRole
from bullpen.ledger import RunStatus
from bullpen.queue import Queue
from bullpen.runs import Run, RunProcessor, RunService
from bullpen.settings import Settings
from bullpen.testing.postgres import PostgresServer
from tests.databases import ROLES
from tests.runs.kit import ALICE, Stage, payload


def settings(redis_url: str, database: str, tmp_path: Path, **options: Any) -> Settings:
    return Settings.load(environ={}, start=tmp_path, redis_url=redis_url, ledger_url=database, **options)


@pytest.mark.requirement("R-26", "R-27", "R-28")
async def test_processor_service_and_both_queues_are_found_in_the_container(
    redis_url: str, ledger_url: str, tmp_path: Path
) -> None:
    async with Bullpen(settings=settings(redis_url, ledger_url, tmp_path)) as app:
        runs = app.use_runs()

        assert app.get(RunService) is runs.service
        assert isinstance(app.get(RunProcessor), RunProcessor)
        queue, letters = app.get("workflow-execution"), app.get("workflow-execution-dlq")
        assert isinstance(queue, Queue) and isinstance(letters, Queue)
        assert app.use_runs() is runs

        # Real ones: what is submitted through the found service is found in the found queue.
        await app.prepare()
        wanted = payload()
        await app.get(RunService).enqueue_run(wanted.run_id, wanted)
        async with app.use_outbox().dispatcher() as dispatcher:
            await dispatcher.tick()
            await dispatcher.idle()
        assert (await queue.counts()).prioritized == 1
        assert (await letters.counts()).waiting == 0


@pytest.mark.requirement("R-26", "R-10")
async def test_an_app_runs_its_runs(redis_url: str, ledger_url: str, tmp_path: Path) -> None:
    app = Bullpen(settings=settings(redis_url, ledger_url, tmp_path, runs_concurrency=7))

    @app.use_runs().handler
    async def execute(run: Run) -> str:
        return f"hello {run.tenant_id}"

    assert [(worker.queue_name, worker.options.concurrency) for worker in app.workers] == [("workflow-execution", 7)]
    wanted = payload()
    await app.prepare()
    await app.use_runs().service.submit(wanted)
    running = asyncio.create_task(app.run(signals=False))
    async with asyncio.timeout(30):
        while (row := await app.use_runs().service.get(ALICE, wanted.run_id)).status is not RunStatus.COMPLETED:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    await app.stop()
    await running

    assert row.result == "hello alice"


async def test_an_app_without_a_handler_looks_after_runs_only(redis_url: str, sqlite_url: str, tmp_path: Path) -> None:
    app = Bullpen(settings=settings(redis_url, sqlite_url, tmp_path))
    app.use_runs().configure(idle_ms=0, sweep_every_ms=20)
    wanted = payload()
    await app.use_runs().service.submit(wanted)

    running = asyncio.create_task(app.run(signals=False))
    async with asyncio.timeout(30):
        while (await app.use_runs().queue.counts()).prioritized == 0:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.02)
    await app.stop()
    await running

    assert app.workers == ()


@pytest.mark.requirement("X-113", "X-23")
async def test_an_app_whose_worker_would_see_all_tenants_handles_no_runs_and_looks_after_them(
    redis_url: str,
    postgres_server: PostgresServer,
    guarded_database: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The same program in both processes: each does what its role may, and says what the other one is for."""
    caplog.set_level("INFO", "bullpen.runs")
    given = {f"ledger_{duty}_role": role for duty, role in asdict(ROLES).items()}
    url = postgres_server.url(guarded_database, role=ROLES.service)
    app = Bullpen(settings=settings(redis_url, url, tmp_path, **given, ledger_duty="service"))

    @app.use_runs().handler
    async def execute(run: Run) -> None: ...

    running = asyncio.create_task(app.run(signals=False))
    async with asyncio.timeout(30):
        while "BULLPEN_DATABASE_DUTY=worker handle them" not in caplog.text and not running.done():  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.02)
    await app.stop()
    await running

    assert app.workers == ()
    with pytest.raises(UnsafeDatabaseRole, match="worker role"):
        await app.runs.worker().start()


@pytest.mark.requirement("X-112")
async def test_an_app_whose_pool_is_too_small_does_not_start(redis_url: str, postgres_url: str, tmp_path: Path) -> None:
    app = Bullpen(settings=settings(redis_url, postgres_url, tmp_path, ledger_pool_size=5))

    @app.use_runs().handler
    async def execute(run: Run) -> None: ...

    with pytest.raises(NotConfigured, match=r"100 runs .* need 10"):
        await app.run(signals=False)


@pytest.mark.requirement("R-10", "X-116")
@pytest.mark.parametrize("value", ["abc", "0", "-5", "1.5", "5x"])
def test_a_concurrency_that_is_no_number_stops_the_start(tmp_path: Path, value: str) -> None:
    assert Settings.load(environ={"WORKER_CONCURRENCY": "50"}, start=tmp_path).runs.concurrency == 50
    assert Settings.load(environ={}, start=tmp_path).runs.concurrency == 100
    with pytest.raises(InvalidOption, match="WORKER_CONCURRENCY"):
        Settings.load(environ={"WORKER_CONCURRENCY": value}, start=tmp_path)


async def test_a_wrong_handler_is_refused_where_it_is_registered(lite: Stage) -> None:
    with pytest.raises(InvalidOption, match="async def"):
        lite.runs.handler(lambda run: None)  # type: ignore[arg-type,return-value]  # that is the point
