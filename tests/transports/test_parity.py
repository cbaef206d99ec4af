"""Moving a workflow to another transport changes its configuration and nothing else: the same story ends the same."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from bullpen._kernel.backoff import Backoff
from bullpen.plugins.messaging import MessagingClient
from bullpen.plugins.transports.bullmq import BullMQClient
from bullpen.plugins.transports.kafka import KafkaClient
from bullpen.plugins.transports.memory import MemoryClient
from bullpen.plugins.transports.rabbitmq import DelayLadder, RabbitMQClient, Topology
from bullpen.ports.bindings import (
    Binding,
    BullMQ,
    BullMQEvent,
    DefaultJobOptions,
    Kafka,
    KafkaEvent,
    RabbitMQ,
    RabbitMQEvent,
)
from tests.transports._listening import listening
from tests.transports.scenario import EXPECTED, Order, play

OPTIONS = DefaultJobOptions(attempts=3, backoff=Backoff.exponential(40))
TRANSPORTS = ["memory", "bullmq", "rabbitmq", "kafka", "kafka-parking"]


def configure(
    transport: str, source: str, request: pytest.FixtureRequest
) -> tuple[MessagingClient[Any], Binding[Order]]:
    """All that differs: where events come from, and the client that brings them."""
    match transport:
        case "rabbitmq":
            binding: Binding[Order] = RabbitMQ(
                events=[
                    RabbitMQEvent(queue=source, event=Order.PAID, job_name="pay"),
                    RabbitMQEvent(queue=source, event=Order.SHIPPED, job_name="ship"),
                ],
                urls=request.getfixturevalue("rabbit").url,
                default_job_options=OPTIONS,
                concurrency=4,
            )
            topology = Topology(delays=DelayLadder(unit_ms=20, levels=9))
            assert isinstance(binding, RabbitMQ)
            return RabbitMQClient.from_binding(binding, topology=topology), binding
        case "kafka" | "kafka-parking":
            binding = Kafka(
                events=[
                    KafkaEvent(topic=source, event=Order.PAID, job_name="pay"),
                    KafkaEvent(topic=source, event=Order.SHIPPED, job_name="ship"),
                ],
                brokers=request.getfixturevalue("kafka").address,
                default_job_options=OPTIONS,
                concurrency=4,
                retry="park" if transport == "kafka-parking" else "pause",
            )
            assert isinstance(binding, Kafka)
            return KafkaClient.from_binding(binding, workflow=source), binding
    binding = BullMQ(
        events=[
            BullMQEvent(queue=source, event=Order.PAID, job_name="pay"),
            BullMQEvent(queue=source, event=Order.SHIPPED, job_name="ship"),
        ],
        connection=request.getfixturevalue("redis_url") if transport == "bullmq" else None,
        default_job_options=OPTIONS,
        concurrency=4,
    )
    assert isinstance(binding, BullMQ)
    if transport == "memory":
        return MemoryClient.from_binding(binding), binding
    return BullMQClient.from_binding(binding), binding


@pytest.mark.timeout(120)
@pytest.mark.requirement("W-1", "W-2", "W-3", "W-38", "W-39", "W-49", "W-54", "X-39")
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_the_same_story_ends_the_same_everywhere(transport: str, request: pytest.FixtureRequest) -> None:
    source = f"orders-{uuid.uuid4().hex[:6]}"
    client, binding = configure(transport, source, request)

    with listening() as heard:
        table = await play(client, binding, source, heard, pause_ms=40)

    assert table == EXPECTED
    assert await client.is_healthy()
    await client.close()
