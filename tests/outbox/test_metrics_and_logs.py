"""Numbers and lines about the outbox, under the names that dashboards and searches know."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from bullpen.ledger import Ledger
from bullpen.ops.logs import JobFilter
from bullpen.ops.tracing import install_tracing
from bullpen.outbox import OutboxMetrics, Route
from bullpen.ports.channel import Message, Refused, SendResult, Unavailable
from bullpen.ports.metrics import Metric
from bullpen.redis import Connection
from tests.databases import item
from tests.outbox.conftest import MakeOutbox
from tests.outbox.kit import SpyChannel, until_settled

REQUIRED = {"correlationId", "tenantId", "userId", "source", "operation", "phase"}


async def deliver(ledger: Ledger, make_outbox: MakeOutbox, *answers: Any) -> None:
    spy = SpyChannel(*answers)
    people = {"tenant_id": "acme", "user_id": "u-1", "correlation_id": "c-1"}
    secret = {"email": "ada@example.com"}
    await ledger.outbox.enqueue_many(
        [item(number, payload={"orderId": number, **secret}, **people) for number in range(len(answers) or 1)]
    )
    outbox = make_outbox({"webhook:*": Route(channel=spy, strategy="direct")}, unknown_types="leave")
    async with outbox.dispatcher() as dispatcher:
        await dispatcher.tick()
        await dispatcher.idle()


@pytest.mark.requirement("O-69", "X-25")
async def test_the_metrics_have_their_names_and_kinds(ledger: Ledger, make_outbox: MakeOutbox) -> None:
    metrics = OutboxMetrics(ledger.outbox)
    try:
        await deliver(ledger, make_outbox, *_answers())
        found = {metric.name: metric for metric in await metrics.collect()}
    finally:
        metrics.close()
        metrics.close()

    assert {name: metric.kind for name, metric in found.items()} == {
        "outbox_pending_total": "gauge",
        "outbox_claimed_total": "gauge",
        "outbox_sent_total": "counter",
        "outbox_failed_total": "counter",
        "outbox_dead_total": "counter",
        "outbox_unparked_total": "counter",
        "outbox_claim_duration_ms": "histogram",
        "outbox_delivery_duration_ms": "histogram",
    }
    values = {name: _value(found[name]) for name in found if found[name].kind != "histogram"}
    assert values == {
        "outbox_pending_total": 2,  # one that failed, and the announcement of the dead one
        "outbox_claimed_total": 0,
        "outbox_sent_total": 1,
        "outbox_failed_total": 1,
        "outbox_dead_total": 1,
        "outbox_unparked_total": 0,
    }
    (claims,) = found["outbox_claim_duration_ms"].samples
    (deliveries,) = found["outbox_delivery_duration_ms"].samples
    assert (claims.count, deliveries.count) == (1, 3)
    assert claims.buckets[-1] == (float("inf"), 1)
    assert deliveries.labels == {"integration_type": "webhook:partnerX"}


def _answers() -> list[Any]:
    from bullpen.ports.channel import Accepted

    return [Accepted(), Unavailable("503", "HTTP_503"), Refused("400", "HTTP_400")]


def _value(metric: Metric) -> float:
    return sum(sample.value for sample in metric.samples)


async def test_without_a_store_only_what_this_process_did_is_told() -> None:
    metrics = OutboxMetrics()
    found = {metric.name: metric for metric in await metrics.collect()}
    metrics.close()

    assert _value(found["outbox_pending_total"]) == 0
    assert found["outbox_sent_total"].samples == []


@pytest.mark.requirement("O-65", "O-67", "O-70", "X-24")
async def test_direct_deliveries_are_logged_with_ids_and_without_people(
    ledger: Ledger, make_outbox: MakeOutbox, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "bullpen.outbox"):
        await deliver(ledger, make_outbox, *_answers())

    lines = [record for record in caplog.records if hasattr(record, "operation")]
    sends = [vars(record) for record in lines if vars(record)["operation"] == "OUTBOX_DIRECT_SEND"]
    assert {(line["phase"], line["outcome"]) for line in sends} == {
        ("SUCCESS", "SENT"),
        ("ERROR", "FAILED"),
        ("ERROR", "DEAD"),
    }
    assert all(set(line) >= REQUIRED for line in sends)
    assert {line["correlationId"] for line in sends} == {"c-1"}
    assert "OUTBOX_CLAIM" in {vars(record)["operation"] for record in lines}
    assert "ada@example.com" not in caplog.text
    assert {record.levelname for record in lines if vars(record).get("outcome") == "DEAD"} == {"ERROR"}


@pytest.mark.requirement("O-65", "O-67", "O-68")
async def test_queued_deliveries_are_logged_by_dispatcher_and_worker(
    ledger: Ledger, make_outbox: MakeOutbox, connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    await ledger.outbox.enqueue(item(tenant_id="acme", user_id="u-1", correlation_id="c-1"))
    outbox = make_outbox({"webhook:partnerX": SpyChannel()}, connection=connection)
    workers, dispatcher = outbox.workers(), outbox.dispatcher()

    with caplog.at_level(logging.DEBUG, "bullpen.outbox"):
        await workers.start()
        await dispatcher.start()
        await until_settled(ledger, 1)
        await dispatcher.close()
        await workers.close()

    by_operation = {
        vars(record)["operation"]: vars(record) for record in caplog.records if hasattr(record, "operation")
    }
    assert set(by_operation) >= {"OUTBOX_CLAIM", "OUTBOX_ENQUEUE_JOB", "OUTBOX_DELIVER"}
    assert by_operation["OUTBOX_DELIVER"]["outcome"] == "SENT"
    for operation in ("OUTBOX_ENQUEUE_JOB", "OUTBOX_DELIVER"):
        assert set(by_operation[operation]) >= REQUIRED


class Chatty(SpyChannel):
    """A channel that logs, as a program's own may."""

    async def send(self, message: Message) -> SendResult:
        logging.getLogger("shop").warning("calling the partner")
        return await super().send(message)


@pytest.mark.requirement("O-65")
async def test_what_a_channel_logs_says_which_row_it_sends(
    ledger: Ledger, make_outbox: MakeOutbox, connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    await ledger.outbox.enqueue(item(tenant_id="acme", user_id="u-1", correlation_id="c-1"))
    outbox = make_outbox({"webhook:partnerX": Chatty()}, connection=connection)
    workers, dispatcher = outbox.workers(), outbox.dispatcher()
    only_fields = JobFilter()
    caplog.handler.addFilter(only_fields)
    try:
        await workers.start()
        await dispatcher.start()
        await until_settled(ledger, 1)
        await dispatcher.close()
        await workers.close()
    finally:
        caplog.handler.removeFilter(only_fields)

    (line,) = [vars(record) for record in caplog.records if record.name == "shop"]
    assert (line["tenantId"], line["userId"], line["correlationId"]) == ("acme", "u-1", "c-1")
    assert (line["integrationType"], line["attempt"]) == ("webhook:partnerX", 1)
    assert {"outboxId", "jobId", "queue"} <= set(line)


async def test_a_delivery_is_a_span_with_the_attributes_of_the_conventions(
    ledger: Ledger, make_outbox: MakeOutbox
) -> None:
    """Also one that fails, with its reason and without secrets."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    remove = install_tracing(provider)
    try:
        await deliver(ledger, make_outbox, Refused("bad token=abcdef", "HTTP_403"))
    finally:
        remove()

    (span,) = [span for span in exporter.get_finished_spans() if span.name == "deliver webhook:partnerX"]
    assert span.attributes is not None
    assert {name: value for name, value in span.attributes.items() if name.startswith(("messaging", "error"))} == {
        "messaging.system": "bullpen_outbox",
        "messaging.operation.name": "deliver",
        "messaging.operation.type": "send",
        "messaging.destination.name": "webhook:partnerX",
        "messaging.message.id": span.attributes["outbox.id"],
        "messaging.message.conversation_id": "c-1",
        "error.type": "HTTP_403",
    }
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "Refused: bad token=***")
