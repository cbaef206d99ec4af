"""Health answers with reasons, never raises, and tells what a restart would mend from what it would not."""

from __future__ import annotations

import asyncio
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from bullpen import Bullpen, Job
from bullpen.errors import InvalidOption
from bullpen.http.ops import OpsApp
from bullpen.http.serve import HttpService, parse_address
from bullpen.ops.health import Health
from bullpen.testing import FaultProxy, RedisServer


@pytest.mark.requirement("W-77")
async def test_a_failing_check_is_a_reason() -> None:
    health = Health(timeout_s=0.05)
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
        "slow": "no answer within 0.05 s",
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
                {"redis": "ok", "workers": "ok"},
            )
            assert (await ask("/livez"))[0] == 200
            status, kind, body = await ask("/metrics")
            assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
            assert 'bullpen_jobs_completed_total{queue="mails"} 1' in body
            assert (await ask("/"))[0] == 404
            assert (await ask("/livez", "POST"))[0] == 405
            with proxy.outage():
                status, _, body = await ask("/readyz")
                assert status == 503
                assert "does not answer" in json.loads(body)["checks"]["redis"]
                assert (await ask("/livez"))[0] == 200
        finally:
            await app.stop()
            await run
        with pytest.raises(OSError, match="refused"):
            await asyncio.to_thread(get, service.port, "/livez")


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
    with taken_port() as port, pytest.raises(InvalidOption, match="an address that is free"):
        HttpService(lambda: None, "127.0.0.1", port)
