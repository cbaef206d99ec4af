"""What Sentry is told of jobs: one event per final failure, a transaction per job, check-ins of schedules."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import sentry_sdk
from sentry_sdk.envelope import Envelope
from sentry_sdk.integrations.logging import LoggingIntegration
from sentry_sdk.scope import global_event_processors
from sentry_sdk.transport import Transport

from bullpen import Bullpen, DelayJob, InvalidOption, Job, JobFailed, JobMeta
from bullpen.integrations.sentry import install_sentry, trace_headers

PATIENCE = 60_000


class Recording(Transport):
    """Keeps what would be sent; nothing leaves this process."""

    def __init__(self, options: dict[str, Any] | None = None) -> None:
        super().__init__(options)
        self.items: list[tuple[str, dict[str, Any]]] = []

    def capture_envelope(self, envelope: Envelope) -> None:
        for item in envelope.items:
            if item.payload.json is not None:
                self.items.append((str(item.type), dict(item.payload.json)))

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [payload for each, payload in self.items if each == kind]


@pytest.fixture
def sentry() -> Iterator[Recording]:
    transport, before = Recording(), global_event_processors[:]
    sentry_sdk.init(
        dsn="https://public@sentry.invalid/1",
        transport=transport,
        traces_sample_rate=1.0,
        default_integrations=False,
        integrations=[LoggingIntegration()],
    )
    yield transport
    sentry_sdk.get_client().close()
    sentry_sdk.init(default_integrations=False)  # without an address: nothing is recorded from now on
    global_event_processors[:] = before


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


async def test_each_final_failure_is_one_event_that_says_whose_it_is(app: Bullpen, sentry: Recording) -> None:
    install_sentry(app)

    @app.handler("orders")
    async def handle(job: Job) -> None:
        logging.getLogger("shop").warning("step one of %s", job.id)
        raise ValueError(f"card refused, password={'2retnuh'[::-1]}")

    async with running(app):
        jobs = [
            await app.queue("orders").add("charge", attempts=2, backoff=1, meta=JobMeta(tenant_id="acme"))
            for _ in range(2)
        ]
        for job in jobs:
            with pytest.raises(JobFailed):
                await job.result(timeout=PATIENCE)

    events = sentry.of("event")
    assert len(events) == 2
    for event in events:
        (error,) = event["exception"]["values"]
        assert error["type"] == "ValueError"
        assert "hunter2" not in str(event)
        assert event["tags"] == {
            "queue": "orders",
            "job.name": "charge",
            "job.id": event["extra"]["jobId"],
            "job.cause": "exhausted",
            "tenant": "acme",
        }
        assert event["contexts"]["job"]["attempt"] == 2
        assert event["fingerprint"] == ["orders/charge", "{{ default }}"]
        (crumb,) = [one for one in event["breadcrumbs"]["values"] if one["category"] == "shop"]
        assert crumb["message"] == f"step one of {event['extra']['jobId']}"
        assert event["transaction"] == "orders/charge"
    traces = {payload["contexts"]["trace"]["trace_id"] for payload in sentry.of("transaction")}
    assert {event["contexts"]["trace"]["trace_id"] for event in events} <= traces


async def test_a_failure_without_an_exception_of_the_handler_is_there_too(app: Bullpen, sentry: Recording) -> None:
    install_sentry(app)

    @app.handler("orders", timeout=50)
    async def handle(job: Job) -> None:
        await asyncio.Event().wait()

    async with running(app):
        job = await app.queue("orders").add("charge", attempts=1)
        with pytest.raises(JobFailed):
            await job.result(timeout=PATIENCE)

    (event,) = sentry.of("event")
    assert event["exception"]["values"][-1]["type"] == "HandlerTimeout"
    assert event["tags"]["queue"] == "orders"


async def test_each_job_is_a_transaction_that_continues_the_trace_of_whoever_added_it(
    app: Bullpen, sentry: Recording
) -> None:
    install_sentry(app)

    @app.handler("orders")
    async def handle(job: Job) -> None:
        if job.name == "later" and job.attempts_started == 1:
            raise DelayJob(1)

    async with running(app):
        with sentry_sdk.start_transaction(name="request", op="http.server") as request:
            added = await app.queue("orders").add("charge", meta=JobMeta(headers=trace_headers()))
        later = await app.queue("orders").add("later")
        await added.result(timeout=PATIENCE)
        await later.result(timeout=PATIENCE)

    found = {payload["transaction"]: payload for payload in sentry.of("transaction")}
    charge = found["orders/charge"]["contexts"]["trace"]
    assert charge["trace_id"] == request.trace_id
    assert charge["op"] == "queue.process"
    assert charge["data"]["messaging.destination.name"] == "orders"
    assert charge["data"]["messaging.message.id"] == added.id
    assert charge["data"]["messaging.message.receive.latency"] >= 0
    assert found["orders/later"]["contexts"]["trace"].get("status") != "internal_error"
    assert sentry.of("event") == []


async def test_a_schedule_is_a_monitor_if_it_is_wanted(app: Bullpen, sentry: Recording) -> None:
    install_sentry(app, monitors=True)
    ran = asyncio.Event()

    @app.task("reports", every="10m")
    async def nightly() -> None:
        ran.set()

    async with running(app):
        async with asyncio.timeout(60):
            await ran.wait()

    first, last = sentry.of("check_in")[:2]
    assert (first["monitor_slug"], first["status"], last["status"]) == ("nightly", "in_progress", "ok")
    assert first["check_in_id"] == last["check_in_id"]


def test_a_wrong_option_is_refused(app: Bullpen) -> None:
    with pytest.raises(InvalidOption, match="monitors"):
        install_sentry(app, monitors="yes")  # type: ignore[arg-type]  # that it is refused is the point
