"""One trace from whoever adds a job to whoever is called in the end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from bullpen import Job, JobFailed, Queue, Worker
from bullpen._kernel import tracing
from bullpen.ops.tracing import install
from bullpen.plugins.transports.memory import MemoryClient
from bullpen.ports.transport import Delivery

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def provider() -> TracerProvider:
    return TracerProvider()


@pytest.fixture
def spans(provider: TracerProvider) -> Iterator[InMemorySpanExporter]:
    """What was traced while the test ran."""
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    remove = install(provider)
    yield exporter
    remove()
    assert tracing.tracer is None


def trace_of(span: ReadableSpan) -> str:
    assert span.context is not None
    return format(span.context.trace_id, "032x")


async def test_a_job_carries_its_trace_in_the_field_that_node_uses(
    provider: TracerProvider, spans: InMemorySpanExporter, redis_url: str
) -> None:
    seen: list[str] = []

    async def handle(job: Job) -> None:
        seen.append(format(trace.get_current_span().get_span_context().trace_id, "032x"))
        if job.name == "bad":
            raise ValueError("password=hunter2hunter2")

    async with (
        Queue("mails", connection=redis_url, attempts=1) as queue,
        Worker("mails", handle, connection=redis_url, name="w1"),
    ):
        with provider.get_tracer("shop").start_as_current_span("request") as request:
            job = await queue.add("mail")
            (other,) = await queue.add_many([("mail", None)])
            bad = await queue.add("bad")
        own = await queue.add("mail", tm=json.dumps({"traceparent": PARENT}))
        for one in (job, other, own):
            await one.result(timeout=20_000)
        with pytest.raises(JobFailed):
            await bad.result(timeout=20_000)

    expected = format(request.get_span_context().trace_id, "032x")
    assert json.loads(job.opts.tm or "")["traceparent"].split("-")[1] == expected
    found = {
        span.attributes["bullmq.job.id"]: span
        for span in spans.get_finished_spans()
        if span.attributes and "bullmq.job.id" in span.attributes
    }
    span = found[job.id]
    assert (span.name, span.kind, trace_of(span)) == ("process mails", SpanKind.CONSUMER, expected)
    assert span.attributes is not None
    assert dict(span.attributes) == {
        "bullmq.queue.name": "mails",
        "bullmq.job.id": job.id,
        "bullmq.job.name": "mail",
        "bullmq.job.attempts.made": 0,
        "bullmq.worker.name": "w1",
    }
    assert trace_of(found[other.id]) == expected
    assert trace_of(found[own.id]) == PARENT.split("-")[1]
    assert found[bad.id].status.status_code is StatusCode.ERROR
    assert "hunter2" not in (found[bad.id].status.description or "")
    assert sorted(seen) == sorted([expected, expected, expected, PARENT.split("-")[1]])


async def test_what_anybody_wrote_as_trace_harms_no_job(spans: InMemorySpanExporter, redis_url: str) -> None:
    async def handle(job: Job) -> str:
        return "done"

    async with Queue("mails", connection=redis_url) as queue, Worker("mails", handle, connection=redis_url):
        for text in ("nonsense", "[1]", '{"traceparent": 5}', '{"traceparent": "00-zz"}'):
            job = await queue.add("mail", tm=text)
            assert await job.result(timeout=20_000) == "done"


async def test_a_message_carries_its_trace_in_headers(provider: TracerProvider, spans: InMemorySpanExporter) -> None:
    client = MemoryClient()
    seen: list[Any] = []

    async def handle(delivery: Delivery) -> None:
        seen.append(trace.get_current_span().get_span_context().trace_id)

    await client.consume("orders", handle)
    with provider.get_tracer("shop").start_as_current_span("request") as request:
        await client.produce("orders", "pay", {"urn": "urn:1", "payload": {}})
    await client.close()

    assert seen == [request.get_span_context().trace_id]
    assert "process orders" in {span.name for span in spans.get_finished_spans()}


async def test_without_a_tracer_nothing_travels(redis_url: str) -> None:
    assert tracing.carrier() == {}
    with tracing.span("nothing", "client") as span:
        span.fail("whatever")
    async with Queue("mails", connection=redis_url) as queue:
        assert (await queue.add("mail")).opts.tm is None
