"""Which source causes which event, and what a workflow's consumers say and do."""

from __future__ import annotations

import asyncio
import logging
from enum import StrEnum
from typing import Any

import pytest

from bullpen._kernel.backoff import Backoff
from bullpen.errors import InvalidOption, PermanentError
from bullpen.plugins.transports.memory import MemoryClient
from bullpen.ports.bindings import (
    Binding,
    BullMQ,
    BullMQEvent,
    DeadLetterQueue,
    DefaultJobOptions,
    Kafka,
    KafkaEvent,
    RabbitMQ,
    RabbitMQEvent,
    RedisAddress,
    choose_binding,
)
from bullpen.testing.contracts.transport import quick_policy
from bullpen.workflow.bindings import EventConsumers
from tests.transports._listening import lines, listening


class Order(StrEnum):
    PAID = "paid"
    SHIPPED = "shipped"


PAID = BullMQEvent(queue="orders", event=Order.PAID)


class Emitted:
    """Stands for a workflow: remembers what was emitted, fails when told."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[tuple[Order, str, Any]] = []
        self.error = error

    async def __call__(self, event: Order, urn: str, payload: Any) -> None:
        self.calls.append((event, urn, payload))
        if self.error is not None:
            raise self.error


# ---- what may be configured --------------------------------------------------------------------------------------


@pytest.mark.requirement("W-21", "W-22", "W-23", "W-24", "X-36")
def test_defaults_are_those_of_workflow_events() -> None:
    binding = BullMQ(events=[PAID])

    options, policy = binding.default_job_options, binding.policy()

    assert (options.attempts, options.backoff) == (3, Backoff.exponential(30_000))
    assert (options.remove_on_complete, options.remove_on_fail) == (1_000, 5_000)
    assert (policy.attempts, policy.backoff) == (3, Backoff.exponential(30_000))
    assert policy.dead_letters.queue_for("orders") == "orders-dlq"
    off = BullMQ(events=[PAID], dead_letter_queue=DeadLetterQueue(enabled=False))
    assert off.policy().dead_letters.queue_for("orders") is None


@pytest.mark.requirement("W-40")
def test_with_defaults_the_pauses_are_30_and_60_seconds() -> None:
    backoff = BullMQ(events=[PAID]).policy().backoff

    assert backoff is not None
    assert [backoff.delay_for(failures, lambda: 0.5) for failures in (1, 2)] == [30_000, 60_000]


@pytest.mark.requirement("W-22")
def test_a_backoff_may_be_given_as_on_the_wire() -> None:
    options = DefaultJobOptions(backoff={"type": "fixed", "delay": 500})  # type: ignore[arg-type]  # the wire's form

    assert options.backoff == Backoff.fixed(500)


@pytest.mark.requirement("W-16", "W-17", "W-19", "X-46")
def test_a_route_chooses_by_job_name_then_by_source() -> None:
    """Several event types may share a queue; without a filter every job of the queue is the one event."""
    binding = BullMQ(events=[PAID, BullMQEvent(queue="orders", event=Order.SHIPPED, job_name="ship")])
    filtered = Kafka(events=[KafkaEvent(topic="orders", event=Order.SHIPPED, job_name="ship")])

    (route,) = binding.routes().values()

    assert (route.event_for("ship"), route.event_for("whatever")) == (Order.SHIPPED, Order.PAID)
    with pytest.raises(PermanentError, match="no event is mapped to 'pay' of 'orders'"):
        filtered.routes()["orders"].event_for("pay")


@pytest.mark.requirement("W-25", "W-60", "X-46")
@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: BullMQ(events=[PAID, PAID]), "one mapping without job_name for 'orders'"),
        (
            lambda: BullMQ(events=[BullMQEvent(queue="q", event=1, job_name="a")] * 2),
            "one mapping for 'a' of 'q'",
        ),
        (lambda: BullMQEvent(queue="a:b", event=Order.PAID), "without ':'"),
        (lambda: BullMQEvent(queue="q", event=Order.PAID, job_name=""), "job_name"),
        (lambda: KafkaEvent(topic="", event=Order.PAID), "topic"),
        (lambda: RabbitMQEvent(queue="", event=Order.PAID), "queue"),
        (lambda: BullMQ(events=[KafkaEvent(topic="t", event=Order.PAID)]), "events: expected a BullMQEvent"),
        (lambda: BullMQ(events=[PAID], concurrency=0), "concurrency"),
        (lambda: BullMQ(events=[PAID], concurrency={"mails": 2}), r"concurrency: expected sources of .*orders"),
        (lambda: BullMQ(events=[PAID], connection=5), "connection"),  # type: ignore[arg-type]  # the mistake under test
        (
            lambda: BullMQ(events=[PAID], default_job_options=DefaultJobOptions(backoff=Backoff.linear(5))),
            "'exponential' or 'fixed'",
        ),
        (lambda: DefaultJobOptions(attempts=0), "attempts"),
        (lambda: DefaultJobOptions(remove_on_fail=-1), "remove_on_fail"),
        (lambda: DeadLetterQueue(suffix=""), "suffix"),
        (lambda: DeadLetterQueue(enabled="yes"), "enabled"),  # type: ignore[arg-type]  # the mistake under test
        (lambda: RedisAddress(port=0), "port"),
        (lambda: RabbitMQ(urls="http://rabbit"), "amqp://"),
        (lambda: RabbitMQ(urls=[]), "amqp://"),
        (lambda: RabbitMQ(ordered=True), "ordered"),
        (lambda: Kafka(brokers="a,,b"), "brokers"),
        (lambda: Kafka(retry="skip"), "retry"),  # type: ignore[arg-type]  # the mistake under test
    ],
)
def test_a_wrong_configuration_is_refused_when_it_is_made(make: Any, complaint: str) -> None:
    """Never at the first job."""
    with pytest.raises(InvalidOption, match=complaint):
        make()


@pytest.mark.requirement("W-26", "W-51", "W-60", "X-15")
def test_one_workflow_has_one_transport() -> None:
    bullmq, kafka = BullMQ(events=[PAID]), Kafka[Order]()

    with pytest.raises(InvalidOption) as refused:
        choose_binding(kafka=kafka, bullmq=bullmq)

    assert str(refused.value) == "Cannot enable both Kafka and BullMQ simultaneously"
    assert choose_binding(bullmq=bullmq) is bullmq
    assert choose_binding(kafka=kafka) is kafka
    assert choose_binding() is None


@pytest.mark.requirement("W-18")
def test_brokers_are_a_comma_separated_list() -> None:
    assert Kafka[Order]().broker_list() == ["localhost:9092"]
    assert Kafka[Order](brokers="a:9092, b:9093").broker_list() == ["a:9092", "b:9093"]


# ---- consuming ---------------------------------------------------------------------------------------------------


@pytest.mark.requirement("W-46")
async def test_without_events_there_is_nothing_to_consume(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    none: Binding[Order] | None = None

    for binding in (none, BullMQ[Order]()):
        consumers = EventConsumers(binding, None, Emitted())
        await consumers.start()
        assert consumers.is_healthy

    assert len(lines(caplog.records, "No BullMQ events defined.")) == 2


@pytest.mark.requirement("W-46", "X-56")
async def test_events_without_a_client_are_a_warning_and_ill(caplog: pytest.LogCaptureFixture) -> None:
    """A workflow that silently consumes nothing looks like one that has nothing to do."""
    consumers = EventConsumers(BullMQ(events=[PAID]), None, Emitted())

    await consumers.start()

    (line,) = lines(caplog.records, "BullMQ client not available, skipping worker initialization.")
    assert line["levelname"] == "WARNING"
    assert not consumers.is_healthy


@pytest.mark.requirement("W-46", "W-47", "W-48", "W-59", "X-46")
async def test_each_delivery_is_emitted_as_its_event(caplog: pytest.LogCaptureFixture) -> None:
    """One consumer per queue, dispatched by name: competing consumers would cause random events."""
    caplog.set_level(logging.DEBUG)
    binding = BullMQ(
        events=[PAID, BullMQEvent(queue="orders", event=Order.SHIPPED, job_name="ship")], concurrency={"orders": 3}
    )
    client, emitted = MemoryClient(policy=quick_policy()), Emitted()
    consumers = EventConsumers(binding, client, emitted)

    with listening() as heard:
        await consumers.start()
        await client.produce("orders", "ship", {"urn": "urn:1", "payload": {"by": "post"}})
        await client.produce("orders", "pay", {"urn": "urn:2"})
        await heard.wait("delivery.settled", 2)

    assert sorted(emitted.calls) == [(Order.PAID, "urn:2", None), (Order.SHIPPED, "urn:1", {"by": "post"})]
    assert len(lines(caplog.records, "Initialized BullMQ worker for queue: orders")) == 1
    received = lines(caplog.records, "BullMQ job received")
    assert {line["urn"] for line in received} == {"urn:1", "urn:2"}
    assert all(line["queue"] == "orders" and line["jobId"] for line in received)
    assert len(lines(caplog.records, "BullMQ job processed successfully")) == 2
    assert heard.of("delivery.received")[0]["concurrency"] == 3
    assert consumers.is_healthy
    await consumers.close()
    await client.close()


async def test_one_line_tells_each_thing_that_happens_at_its_level(caplog: pytest.LogCaptureFixture) -> None:
    """A success is two lines of its client; a failure a warning for each attempt that is repeated, and one error."""
    caplog.set_level(logging.INFO)
    client, emitted = MemoryClient(policy=quick_policy(2, 1)), Emitted()
    consumers = EventConsumers(BullMQ(events=[PAID]), client, emitted)

    with listening() as heard:
        await consumers.start()
        caplog.clear()
        await client.produce("orders", "pay", {"urn": "urn:1"})
        await heard.wait("delivery.settled")
        success = [record.getMessage() for record in caplog.records]
        emitted.error = RuntimeError("entity locked")
        caplog.clear()
        await client.produce("orders", "pay", {"urn": "urn:2"})
        await heard.wait("dead_letter.written")
        await client.close()

    assert success == ["Job added to queue", "Processing job", "Job processed successfully"]
    told = [(record.levelname, record.getMessage()) for record in caplog.records if record.levelno > logging.INFO]
    assert told == [
        ("WARNING", "Job processing failed: entity locked"),
        ("ERROR", "Job processing failed: entity locked"),
        ("WARNING", "Job exceeded retry limit"),
        ("WARNING", "Job sent to DLQ"),
    ]


@pytest.mark.requirement("W-47", "W-54", "W-59")
async def test_what_a_transition_raises_reaches_the_retry(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    client, emitted = MemoryClient(policy=quick_policy(2, 1)), Emitted(RuntimeError("entity locked"))
    consumers = EventConsumers(BullMQ(events=[PAID]), client, emitted)

    with listening() as heard:
        await consumers.start()
        await client.produce("orders", "pay", {"urn": "urn:1"})
        await heard.wait("dead_letter.written")

    assert len(emitted.calls) == 2
    assert len(lines(caplog.records, "BullMQ job processing failed: entity locked")) == 2
    assert await client.transport.dead_letters("orders").depth() == 1
    await client.close()


@pytest.mark.requirement("X-46")
async def test_a_job_that_no_mapping_wants_fails_for_good() -> None:
    client, emitted = MemoryClient(policy=quick_policy(3, 1)), Emitted()
    binding = BullMQ(events=[BullMQEvent(queue="orders", event=Order.SHIPPED, job_name="ship")])

    with listening() as heard:
        await EventConsumers(binding, client, emitted).start()
        await client.produce("orders", "pay", {"urn": "urn:1"})
        await heard.wait("dead_letter.written")

    (letter,) = await client.transport.dead_letters("orders").list()
    assert (letter.cause, letter.attempts_made) == ("permanent", 1)
    assert emitted.calls == []
    await client.close()


async def test_a_workflow_closes_its_consumers_and_not_the_client() -> None:
    client = MemoryClient(policy=quick_policy())
    consumers = EventConsumers(BullMQ(events=[PAID]), client, Emitted())
    await consumers.start()

    await asyncio.wait_for(consumers.close(), 5)

    assert not consumers.is_healthy
    assert await client.is_healthy()
    await client.close()
