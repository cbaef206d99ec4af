"""One trace from whoever adds a job to whoever is called in the end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from bullpen import BullpenError, Deduplication, DelayJob, InvalidOption, Job, JobFailed, NewJob, Queue, Worker, sync
from bullpen._kernel import tracing
from bullpen.ops.tracing import install_tracing
from bullpen.plugins.messaging import MessagingClient
from bullpen.plugins.transports.memory import MemoryClient, MemoryTransport
from bullpen.ports.transport import Delivery, Event, Published

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def provider() -> TracerProvider:
    return TracerProvider()


@pytest.fixture
def spans(provider: TracerProvider) -> Iterator[InMemorySpanExporter]:
    """What was traced while the test ran."""
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    remove = install_tracing(provider)
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
    added = [span for span in spans.get_finished_spans() if span.kind is SpanKind.PRODUCER]
    span = found[job.id]
    assert (span.name, span.kind, trace_of(span)) == ("process mails", SpanKind.CONSUMER, expected)
    assert span.attributes is not None
    assert dict(span.attributes) == {
        "bullmq.queue.name": "mails",
        "bullmq.job.id": job.id,
        "bullmq.job.name": "mail",
        "bullmq.job.attempts.made": 0,
        "bullmq.worker.name": "w1",
        "messaging.system": "bullmq",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "mails",
        "messaging.message.id": job.id,
        "messaging.client.id": "w1",
    }
    assert [(one.name, trace_of(one)) for one in added] == [
        ("add mails", expected),
        ("addBulk mails", expected),
        ("add mails", expected),
    ]
    first, bulk, _ = added
    assert span.parent is not None
    assert first.context is not None
    assert span.parent.span_id == first.context.span_id
    assert dict(first.attributes or {}) == {
        "messaging.system": "bullmq",
        "messaging.operation.name": "add",
        "messaging.operation.type": "send",
        "messaging.destination.name": "mails",
        "messaging.message.id": job.id,
        "bullmq.queue.name": "mails",
        "bullmq.job.name": "mail",
    }
    assert (bulk.attributes or {})["messaging.batch.message_count"] == 1
    assert trace_of(found[other.id]) == expected
    assert trace_of(found[own.id]) == PARENT.split("-")[1]
    assert found[bad.id].status.status_code is StatusCode.ERROR
    assert "hunter2" not in (found[bad.id].status.description or "")
    (event,) = found[bad.id].events
    assert event.name == "exception"
    assert event.attributes is not None
    assert (event.attributes["exception.type"], event.attributes["exception.message"]) == ("ValueError", "password=***")
    assert "in handle" in str(event.attributes["exception.stacktrace"])
    assert "hunter2" not in str(event.attributes["exception.stacktrace"])
    assert (found[bad.id].attributes or {})["error.type"] == "ValueError"
    assert sorted(seen) == sorted([expected, expected, expected, PARENT.split("-")[1]])


async def test_a_handler_that_asks_to_be_called_again_has_not_failed(
    spans: InMemorySpanExporter, redis_url: str
) -> None:
    async def handle(job: Job) -> None:
        if job.attempts_started == 1:
            raise DelayJob(1)

    async with Queue("mails", connection=redis_url) as queue, Worker("mails", handle, connection=redis_url):
        await (await queue.add("mail")).result(timeout=20_000)

    runs = [span for span in spans.get_finished_spans() if span.kind is SpanKind.CONSUMER]
    assert [(run.status.status_code, list(run.events)) for run in runs] == [(StatusCode.UNSET, [])] * 2


async def fails(job: Job) -> None:
    raise ValueError("no")


def fails_in_a_thread(job: Job) -> None:
    raise ValueError("no")


@pytest.mark.parametrize("handler", [fails, fails_in_a_thread])
async def test_lines_about_a_failure_name_the_trace_of_the_run(
    spans: InMemorySpanExporter, redis_url: str, caplog: pytest.LogCaptureFixture, handler: Callable[[Job], Any]
) -> None:
    """Also when the producer sent none: the span of the run is there, and somebody wants to find it."""
    async with (
        Queue("mails", connection=redis_url) as queue,
        Worker("mails", handler, connection=redis_url, dead_letters=True),
    ):
        job = await queue.add("mail", attempts=2, tm="none")
        with pytest.raises(JobFailed):
            await job.result(timeout=20_000)

    runs = [trace_of(span) for span in spans.get_finished_spans() if span.kind is SpanKind.CONSUMER]
    about = [vars(record) for record in caplog.records if record.name == "bullpen.worker"]
    failed, letter, finally_failed = about
    assert letter["message"].startswith("Job sent to DLQ")
    assert [line["traceId"] for line in (failed, letter, finally_failed)] == [runs[0], runs[1], runs[1]]
    assert [line["attempt"] for line in (failed, letter, finally_failed)] == [1, 2, 2]


async def test_adding_that_fails_is_an_exception_of_its_span(spans: InMemorySpanExporter, redis_url: str) -> None:
    async with Queue("mails", connection=redis_url) as queue:
        with pytest.raises(InvalidOption):
            await queue.add("mail", attempts=-1)

    (span,) = spans.get_finished_spans()
    assert (span.name, span.status.status_code) == ("add mails", StatusCode.ERROR)
    assert [event.name for event in span.events] == ["exception"]


def test_a_blocking_queue_has_the_same_spans(
    provider: TracerProvider, spans: InMemorySpanExporter, redis_url: str, queue_name: str
) -> None:
    with sync.Queue(queue_name, connection=redis_url) as queue:
        job = queue.add("mail")
        queue.add_many([("mail", None)] * 2)

    one, many = spans.get_finished_spans()
    assert (one.name, many.name) == (f"add {queue_name}", f"addBulk {queue_name}")
    assert (one.attributes or {})["messaging.message.id"] == job.id
    assert (many.attributes or {})["messaging.batch.message_count"] == 2
    assert json.loads(job.opts.tm or "")["traceparent"].split("-")[1] == trace_of(one)


async def test_changes_of_a_queue_have_spans_under_the_names_of_node(
    spans: InMemorySpanExporter, redis_url: str, queue_name: str
) -> None:
    async with Queue(queue_name, connection=redis_url) as queue:
        job = await queue.add("mail", deduplication=Deduplication("a"))
        await queue.pause()
        await queue.resume()
        await queue.rate_limit(1)
        await queue.update_progress(job, 5)
        await queue.remove_deduplication("a")
        await queue.promote_all()
        await queue.remove(job)
        await queue.drain()
        await queue.clean()
        await queue.retry_all()
        await queue.trim_events(0)
        await queue.obliterate()

    internal, producer = SpanKind.INTERNAL, SpanKind.PRODUCER
    _, *changes = spans.get_finished_spans()
    assert [(span.name, span.kind) for span in changes] == [
        (f"{operation} {queue_name}", producer if operation == "retryJobs" else internal)
        for operation in (
            *("pause", "resume", "rateLimit", "updateJobProgress", "removeDeduplicationKey", "promoteJobs"),
            *("remove", "drain", "clean", "retryJobs", "trimEvents", "obliterate"),
        )
    ]
    assert dict(changes[0].attributes or {}) == {
        "bullmq.queue.name": queue_name,
        "bullmq.queue.operation": "pause",
    }


def test_a_change_that_is_refused_is_an_exception_of_its_span(
    spans: InMemorySpanExporter, redis_url: str, queue_name: str
) -> None:
    """Of a blocking queue, too."""
    with sync.Queue(queue_name, connection=redis_url) as queue, pytest.raises(InvalidOption):
        queue.clean(state="none")  # type: ignore[arg-type]  # that is the test

    (span,) = spans.get_finished_spans()
    assert (span.name, span.status.status_code) == (f"clean {queue_name}", StatusCode.ERROR)


async def test_a_job_can_be_added_without_the_trace(
    provider: TracerProvider, spans: InMemorySpanExporter, redis_url: str, queue_name: str
) -> None:
    async def handle(job: Job) -> None: ...

    with provider.get_tracer("shop").start_as_current_span("request") as request:
        async with Queue(queue_name, connection=redis_url) as queue:
            job = await queue.add("mail", tm=None)
            (other,) = await queue.add_many([NewJob("mail", options={"tm": None})])
            blocking = sync.Queue(queue_name, connection=redis_url)
            third = blocking.add("mail", tm=None)
            blocking.close()
    async with Worker(queue_name, handle, connection=redis_url), Queue(queue_name, connection=redis_url) as queue:
        for one in (job, other, third):
            stored = await queue.get_job(one.id)
            assert stored is not None
            assert stored.opts.tm is None
            await stored.result(timeout=20_000)

    runs = [span for span in spans.get_finished_spans() if span.kind is SpanKind.CONSUMER]
    assert len(runs) == 3
    assert format(request.get_span_context().trace_id, "032x") not in map(trace_of, runs)


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
    found = {span.name: span for span in spans.get_finished_spans()}
    sent, processed = found["send orders"], found["process orders"]
    assert (sent.kind, processed.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert processed.parent is not None
    assert sent.context is not None
    assert processed.parent.span_id == sent.context.span_id
    for span, operation in ((sent, "send"), (processed, "process")):
        assert span.attributes is not None
        assert span.attributes["messaging.system"] == "memory"
        assert span.attributes["messaging.destination.name"] == "orders"
        assert span.attributes["messaging.operation.type"] == operation
        assert span.attributes["bullpen.event.name"] == "pay"


class ManyAtOnce(MemoryTransport):
    """Takes batches, as RabbitMQ does."""

    async def publish_many(self, events: Sequence[tuple[Event, int]]) -> list[Published | BullpenError]:
        return [await self.publish(event, delay_ms=delay_ms) for event, delay_ms in events]


async def test_a_batch_of_messages_is_one_span_that_all_of_them_carry(
    provider: TracerProvider, spans: InMemorySpanExporter
) -> None:
    client = MessagingClient(ManyAtOnce())
    seen: list[str] = []

    async def handle(delivery: Delivery) -> None:
        seen.append(delivery.headers["traceparent"])

    await client.consume("orders", handle)
    await client.produce_many("orders", [("pay", {"urn": f"urn:{number}"}) for number in range(3)])
    await client.close()

    (sent,) = [span for span in spans.get_finished_spans() if span.kind is SpanKind.PRODUCER]
    assert (sent.attributes or {})["messaging.batch.message_count"] == 3
    assert {text.split("-")[1] for text in seen} == {trace_of(sent)}


async def test_without_a_tracer_nothing_travels(redis_url: str) -> None:
    assert tracing.carrier() == {}
    with tracing.span("nothing", "client") as span:
        span.fail("whatever")
    async with Queue("mails", connection=redis_url) as queue:
        assert (await queue.add("mail")).opts.tm is None
