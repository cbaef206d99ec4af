"""Health answers with reasons, never raises, and tells what a restart would mend from what it would not."""

from __future__ import annotations

import asyncio
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bullpen import Bullpen, Job
from bullpen.errors import InvalidOption
from bullpen.http.ops import OpsApp
from bullpen.http.serve import HttpService, parse_address
from bullpen.ops.health import Health
from bullpen.ports.bindings import BullMQ, BullMQEvent
from bullpen.settings import Settings
from bullpen.testing import FaultProxy, RedisServer, free_port
from tests.messages.kit import Provider
from tests.transports._listening import listening
from tests.workflow.kit import Event, Shelf, define


@pytest.mark.requirement("W-77")
async def test_a_failing_check_is_a_reason() -> None:
    health = Health(timeout_s=0.5)
    never = asyncio.Event()

    async def good() -> None: ...
    async def bad() -> str:
        return "the disk is full"

    async def broken() -> None:
        raise OSError("no route")

    async def slow() -> None:
        await never.wait()

    health.add("good", good, vital=True)
    assert (await health.report()).to_json() == {"live": True, "ready": True, "checks": {"good": "ok"}}
    for name, check in (("bad", bad), ("broken", broken), ("slow", slow)):
        health.add(name, check)
    report = await health.report()
    assert (report.live, report.ready) == (True, False)
    assert report.checks == {
        "good": None,
        "bad": "the disk is full",
        "broken": "OSError: no route",
        "slow": "no answer within 0.5 s",
    }
    health.add("vital", bad, vital=True)
    assert not (await health.report()).live


def get(port: int, path: str, method: str = "GET") -> tuple[int, str, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.headers["content-type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["content-type"], error.read().decode()


@contextmanager
def taken_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


@pytest.mark.requirement("W-77", "W-82", "X-49")
async def test_health_and_metrics_are_served_beside_the_workers(redis_url: str, redis_server: RedisServer) -> None:
    with FaultProxy(redis_server) as proxy:
        app = Bullpen(proxy.url)

        @app.handler("mails")
        async def handle(job: Job) -> None: ...

        app.observe()
        service = HttpService(OpsApp(app.health.report, app.metrics), "127.0.0.1", 0)
        app.add(service)
        run = asyncio.create_task(app.run(signals=False))
        try:
            job = await app.queue("mails").add("mail")
            await job.result(timeout=20_000)

            def ask(path: str, method: str = "GET") -> Any:
                return asyncio.to_thread(get, service.port, path, method)

            status, kind, body = await ask("/readyz")
            assert (status, kind, json.loads(body)["checks"]) == (
                200,
                "application/json",
                {"redis": "ok", "workers": "ok", "consumption": "ok"},
            )
            assert (await ask("/livez"))[0] == 200
            status, kind, body = await ask("/metrics")
            assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
            assert 'bullpen_jobs_completed_total{queue="mails"} 1' in body
            assert (await ask("/"))[0] == 404
            assert (await ask("/livez", "POST"))[0] == 405
            with proxy.outage():
                await asyncio.sleep(1.1)  # an answer is used for a second
                status, _, body = await ask("/readyz")
                assert status == 503
                assert "does not answer" in json.loads(body)["checks"]["redis"]
                status, _, body = await ask("/livez")
                assert (status, json.loads(body)) == (200, {"live": True, "checks": {"workers": "ok"}})
        finally:
            await app.stop()
            await run
        with pytest.raises(OSError, match="refused"):
            await asyncio.to_thread(get, service.port, "/livez")


async def test_serving_http_does_not_delay_the_end(redis_url: str) -> None:
    """Whoever runs the services closes them from the task of the one that ended first, which may be this one."""
    app = Bullpen(redis_url)

    @app.handler("mails")
    async def handle(job: Job) -> None: ...

    service = HttpService(OpsApp(app.health.report, app.metrics), "127.0.0.1", 0)
    app.add(service)
    run = asyncio.create_task(app.run(signals=False))
    await (await app.queue("mails").add("mail")).result(timeout=20_000)
    assert (await asyncio.to_thread(get, service.port, "/livez"))[0] == 200

    async with asyncio.timeout(4):  # it took 5 s
        await app.stop()
        await run


async def test_a_process_that_waits_for_its_running_jobs_still_answers(redis_url: str) -> None:
    """Whoever probes it would take it for dead, and kill what is still running."""
    app = Bullpen(redis_url)
    begun, go_on = asyncio.Event(), asyncio.Event()

    @app.handler("mails")
    async def handle(job: Job) -> None:
        begun.set()
        await go_on.wait()

    service = HttpService(OpsApp(app.health.report, app.metrics), "127.0.0.1", 0)
    app.add(service)
    run = asyncio.create_task(app.run(signals=False))
    await app.queue("mails").add("mail")
    await asyncio.wait_for(begun.wait(), 20)
    stopping = asyncio.create_task(app.stop())
    answers = [(await asyncio.to_thread(get, service.port, "/livez"))[0] for _ in range(3)]
    go_on.set()
    await stopping
    await run

    assert answers == [200, 200, 200]


async def test_below_another_application_the_paths_are_the_same() -> None:
    health = Health()

    async def no_metrics() -> list[Any]:
        return []

    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "lifespan.startup"} if not sent else {"type": "lifespan.shutdown"}

    application = OpsApp(health.report, no_metrics)
    scope = {"type": "http", "method": "GET", "path": "/ops/livez", "root_path": "/ops"}
    await application(scope, receive, send)
    assert sent[0]["status"] == 200
    sent.clear()
    await application({"type": "lifespan"}, receive, send)
    assert [message["type"] for message in sent] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    with pytest.raises(ValueError, match="only http"):
        await application({"type": "websocket"}, receive, send)


def test_an_address_is_checked_before_anything_starts() -> None:
    assert parse_address("0.0.0.0:80") == ("0.0.0.0", 80)
    assert parse_address("[::1]:80") == ("::1", 80)
    assert parse_address(":9464") == ("127.0.0.1", 9464)
    for wrong in ("9464", "host:", "host:abc", "host:70000"):
        with pytest.raises(InvalidOption, match="HOST:PORT"):
            parse_address(wrong)
    with taken_port() as port, pytest.raises(InvalidOption, match=r"an address that is free .*--http HOST:PORT"):
        HttpService(lambda: None, "127.0.0.1", port)


@pytest.mark.requirement("W-77")
async def test_a_process_is_not_ill_for_want_of_parts_that_run_elsewhere(redis_url: str, sqlite_url: str) -> None:
    """A pod that only delivers the outbox would be restarted for ever because its workers show no life."""
    app = Bullpen(redis_url, settings=Settings.load(redis_url=redis_url, ledger_url=sqlite_url))

    @app.handler("mails")
    async def handle(job: Job) -> None: ...

    _ = app.use_outbox()
    app.observe()
    running = asyncio.create_task(app.run(signals=False, only=["outbox"]))
    async with asyncio.timeout(15):
        while not app.is_running:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
    report = await app.health.report()
    alive = next(metric for metric in await app.metrics() if metric.name == "bullpen_worker_alive")
    await app.stop()
    await running

    assert (report.live, report.ready) == (True, True), report.checks
    assert alive.samples == []


@pytest.mark.requirement("W-77")
async def test_a_ledger_that_is_missing_or_old_is_a_reason(redis_url: str, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'empty.sqlite3'}"
    async with Bullpen(redis_url, settings=Settings.load(redis_url=redis_url, ledger_url=url)) as app:
        assert "ledger" not in (await app.health.report()).checks, "an app that uses none is not asked"
        _ = app.ledger
        report = await app.health.report()
        assert (report.live, report.ready) == (True, False)
        assert "bullpen migrate" in str(report.checks["ledger"])
        await app.ledger.migrate()
        assert (await app.health.report()).ready


@pytest.mark.requirement("S-17")
async def test_a_missed_run_of_the_scheduler_makes_its_process_unready(redis_url: str, sqlite_url: str) -> None:
    app = Bullpen(redis_url, settings=Settings.load(redis_url=redis_url, ledger_url=sqlite_url))
    app.use_messages().channel("email", Provider(), after_crash="same_key")
    assert "scheduler" not in (await app.health.report()).checks, "not asked where it does not run"
    running = asyncio.create_task(app.run(signals=False, only=["messages"]))
    async with asyncio.timeout(20):
        while (await app.health.report()).checks.get("scheduler", "not yet") is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    app.ledger.database.clock_offset_ms = 600_000  # ten minutes without a run
    report = await app.health.report()
    await app.stop()
    await running

    assert (report.live, report.ready) == (True, False)
    assert "a run was missed" in str(report.checks["scheduler"])


async def test_reasons_hold_no_credentials() -> None:
    """The page has no password of its own."""
    health = Health()

    async def broken() -> None:
        raise OSError("cannot reach postgresql://app:hunter2@db/shop")

    async def bad() -> str:
        return "token=abcdef0123456789 was refused"

    health.add("broken", broken)
    health.add("bad", bad)
    text = json.dumps((await health.report()).to_json())
    assert "hunter2" not in text
    assert "abcdef" not in text


async def test_a_program_that_only_stores_does_not_need_redis(sqlite_url: str) -> None:
    nowhere = f"redis://127.0.0.1:{free_port()}"
    async with Bullpen(nowhere, settings=Settings.load(redis_url=nowhere, ledger_url=sqlite_url)) as app:
        await app.ledger.migrate()
        assert (await app.health.report()).to_json() == {"live": True, "ready": True, "checks": {"ledger": "ok"}}
        _ = app.queue("mails")
        assert (await app.health.report()).checks["redis"], "it may add jobs now"


async def test_a_process_that_shuts_down_says_so(redis_url: str) -> None:
    """It must get no traffic, and whoever reads the page must not look for a worker that hangs."""
    app = Bullpen(redis_url)
    begun, may_end = asyncio.Event(), asyncio.Event()

    @app.handler("mails")
    async def handle(job: Job) -> None:
        begun.set()
        await may_end.wait()

    run = asyncio.create_task(app.run(signals=False))
    await app.queue("mails").add("mail")
    await asyncio.wait_for(begun.wait(), 20)
    stopping = asyncio.create_task(app.stop())
    async with asyncio.timeout(20):
        while (report := await app.health.report()).ready:  # noqa: ASYNC110 - nobody tells when the stop has begun
            await asyncio.sleep(0.01)
    may_end.set()
    await stopping
    await run

    assert report.live
    assert report.checks["consumption"] == (
        "this process is shutting down: the workers of mails take no more jobs, 1 job still runs"
    )


async def test_a_process_with_only_a_workflow_counts_and_checks_its_workers(redis_url: str, queue_name: str) -> None:
    """They take jobs like any other: an alarm about workers that take nothing must not leave them out."""
    app = Bullpen(redis_url)
    bullmq = BullMQ(events=[BullMQEvent(queue=queue_name, event=Event.PAY)])
    shelf = Shelf()
    shelf.put()
    workflow = app.workflow(define(shelf, bullmq=bullmq))
    app.observe()
    with listening() as heard:
        run = asyncio.create_task(app.run(signals=False))
        await workflow.send(Event.PAY, "urn:1")
        await heard.wait("delivery.settled")
        try:
            report = await app.health.report()
            found = {metric.name: metric.samples for metric in await app.metrics()}
        finally:
            await app.stop()
            await run

    assert {name: report.checks[name] for name in ("redis", "workers", "consumption")} == {
        "redis": None,
        "workers": None,
        "consumption": None,
    }
    for name in ("bullpen_worker_ready", "bullpen_queue_oldest_waiting_seconds"):
        assert [sample.labels["queue"] for sample in found[name]] == [queue_name], name
