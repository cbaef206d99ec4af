"""Workflows whose events are Kafka records."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from bullpen._kernel.backoff import Backoff
from bullpen.app import Bullpen
from bullpen.plugins.transports.kafka import KafkaClient
from bullpen.ports.bindings import DefaultJobOptions, Kafka, KafkaEvent
from bullpen.settings import Settings
from tests.kafka_server import KafkaServer
from tests.transports._listening import listening
from tests.workflow.kit import Event, Order, OrderTransition, Shelf, Status, define, transitions


@pytest.mark.requirement("W-7", "W-17", "W-18", "W-49", "X-55")
async def test_a_definition_with_kafka_alone_works_and_awaits_its_events(real_kafka: KafkaServer) -> None:
    """The key is the urn, the value the payload. A failing event is retried in its place and then dead-lettered; what
    stands behind it in its partition is not passed over."""
    topic, shelf = f"orders-{uuid.uuid4().hex[:6]}", Shelf()
    shelf.put("urn:good")
    shelf.put("urn:bad")
    tries: list[str] = []

    async def charge(entity: Order, payload: Any) -> Order:
        tries.append(entity.urn)
        if entity.urn == "urn:bad":
            raise ConnectionError("bank away")
        return entity.noted(str(payload["amount"]))

    definition = define(
        shelf,
        transitions=[
            OrderTransition(event=Event.PAY, from_=Status.NEW, to=Status.PAID, actions=[charge]),
            *transitions()[1:],
        ],
        kafka=Kafka(
            brokers=real_kafka.address,
            events=[KafkaEvent(topic=topic, event=Event.PAY)],
            default_job_options=DefaultJobOptions(attempts=3, backoff=Backoff.fixed(20)),
        ),
    )
    app = Bullpen(settings=Settings.load(environ={}))
    workflow = app.register("order", definition, kafka={"enabled": True})
    assert isinstance(workflow.client, KafkaClient)

    with listening() as heard:
        await workflow.start()
        await workflow.client.produce_keyed(topic, "urn:bad", {"amount": 1})
        await workflow.client.produce_keyed(topic, "urn:good", {"amount": 5})
        await workflow.client.produce_keyed(topic, "urn:bad", {"amount": 2})
        await heard.wait("dead_letter.written", 2, within_s=60)
        while not [each for each in heard.of("delivery.settled") if each["outcome"] == "completed"]:
            await heard.wait("delivery.settled", len(heard.of("delivery.settled")) + 1, within_s=60)

    assert shelf.orders["urn:good"].status == Status.PAID and shelf.orders["urn:good"].notes == ("5",)
    assert shelf.orders["urn:bad"].status == Status.FAILED
    # Three tries of the first; the second finds the entity parked, and leads nowhere.
    assert (tries.count("urn:bad"), tries.count("urn:good")) == (3, 1)
    letters = await workflow.client.transport.dead_letters(topic).list()
    assert [(letter.data["payload"]["amount"], letter.attempts_made) for letter in letters] == [(1, 3), (2, 3)]
    assert "bank away" in letters[0].error_message and "status: failed" in letters[1].error_message
    assert await workflow.is_healthy()
    await app.aclose()
