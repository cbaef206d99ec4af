"""Many messages in one write: each has a confirm of its own, and whatever happens to one does not happen to others."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import aio_pika
import pytest

from bullpen.errors import ConnectionLost, NotJson, NotTakenNow, PayloadTooLarge, ServerRefused
from bullpen.plugins.messaging import MessagingClient
from bullpen.plugins.transports.rabbitmq import RabbitMQTransport, Topology, _batch
from bullpen.ports.messaging import Outgoing
from bullpen.ports.transport import Event, Published, PublishesMany
from bullpen.testing.contracts.transport import quick_policy
from bullpen.testing.rabbitmq import RabbitServer
from tests.transports._listening import PATIENCE_S, listening
from tests.transports.test_rabbitmq import QUICK, messages, unique


@pytest.fixture
async def transport(rabbit: RabbitServer) -> AsyncIterator[RabbitMQTransport]:
    opened = RabbitMQTransport(rabbit.url, topology=Topology(delays=QUICK))
    yield opened
    await opened.aclose()


def events(queue: str, count: int, **changes: Any) -> list[tuple[Event, int]]:
    return [
        (Event(source=queue, urn=f"urn:{number}", name="pay", id=f"{queue}-{number}", **changes), 0)
        for number in range(count)
    ]


async def received(transport: RabbitMQTransport, queue: str, count: int) -> list[str]:
    """The urns of so many deliveries, in order; they stay unsettled."""
    deliveries = await transport.deliveries(queue, prefetch=count)
    async with asyncio.timeout(PATIENCE_S):
        return [(await anext(deliveries)).urn for _ in range(count)]


@pytest.mark.requirement("S-6", "S-7", "S-8", "S-43")
async def test_a_batch_arrives_whole(transport: RabbitMQTransport, rabbit: RabbitServer) -> None:
    """More than fits into one write; the messages are what a single publish sends."""
    queue, count = unique(), 2 * _batch.MOST + 7
    assert isinstance(transport, PublishesMany)

    results = await transport.publish_many(events(queue, count, payload={"a": 1}, headers={"tenant": "t1"}))

    assert results == [Published(f"{queue}-{number}", queue) for number in range(count)]
    assert (await transport.depth(queue)).messages == count
    connection = await aio_pika.connect(rabbit.url)
    async with connection, connection.channel() as channel:
        found = await channel.get_queue(queue, ensure=False)
        await found.purge()
        await transport.publish_many(events(queue, 2, payload={"a": 1}, headers={"tenant": "t1"}))
        batched = await found.get(no_ack=True)
        assert batched.delivery_mode == aio_pika.DeliveryMode.PERSISTENT
        await found.purge()
        await transport.publish(events(queue, 1, payload={"a": 1}, headers={"tenant": "t1"})[0][0])
        alone = await found.get(no_ack=True)
    assert batched.body == alone.body
    for name in ("content_type", "type", "delivery_mode", "priority", "routing_key", "exchange"):
        assert getattr(batched, name) == getattr(alone, name), name
    assert batched.headers.keys() == alone.headers.keys()


@pytest.mark.requirement("X-64")
async def test_one_that_no_queue_takes_fails_alone(transport: RabbitMQTransport, rabbit: RabbitServer) -> None:
    """A queue was deleted behind our back. The others of the batch are there, and the queue is made again."""
    here, gone = unique("here"), unique("gone")
    await transport.publish_many(events(here, 2) + events(gone, 2))
    connection = await aio_pika.connect(rabbit.url)
    async with connection, connection.channel() as channel:
        await channel.queue_delete(gone)
    mixed = [one for pair in zip(events(here, 20), events(gone, 20), strict=True) for one in pair]

    results = await transport.publish_many(mixed)
    again = await transport.publish_many(events(gone, 2))

    assert Counter(type(result) for result in results) == {Published: 20, ServerRefused: 20}
    assert all(isinstance(result, Published) for result in results[::2])
    assert all(isinstance(result, Published) for result in again)
    assert (await transport.depth(here)).messages == 22


@pytest.mark.requirement("X-67")
async def test_a_full_queue_refuses_each_that_it_does_not_take(rabbit: RabbitServer) -> None:
    """What was confirmed is there, what was refused is not: the sum is exact."""
    topology = messages(max_length=10)
    queue = topology.queues[0].name
    transport = RabbitMQTransport(rabbit.url, topology=topology)
    taken, refused, first = 0, 0, 0
    while not refused:  # the broker says so a moment after the limit was reached, and nobody knows when
        numbered = [
            (Event(source=queue, urn=f"urn:{number}", name="birthday", id=f"m{number}"), 0)
            for number in range(first, first + 20)
        ]
        results = await transport.publish_many(numbered)
        assert {type(result) for result in results} <= {Published, NotTakenNow}
        taken += sum(isinstance(result, Published) for result in results)
        refused += sum(isinstance(result, NotTakenNow) for result in results)
        first += 20

    assert taken >= 10
    assert (await transport.depth(queue)).messages == taken
    await transport.aclose()


@pytest.mark.requirement("S-5", "S-8")
async def test_what_cannot_be_in_a_batch_goes_alone(transport: RabbitMQTransport) -> None:
    """Ids that are equal or missing, and bodies that cannot be written: the rest does not notice."""
    queue = unique()
    same = Event(source=queue, urn="urn:same", name="pay", id="same")
    nameless = Event(source=queue, urn="urn:nameless", name="pay")
    bad = Event(source=queue, urn="urn:bad", name="pay", id="bad", payload=object())
    huge = Event(source=queue, urn="urn:huge", name="pay", id="huge", payload="x" * 300_000)
    too_much = Event(source=queue, urn="urn:too-much", name="pay", id="too-much", payload="x" * 50_000_000)

    results = await transport.publish_many([(one, 0) for one in (same, bad, same, nameless, huge, too_much)])

    assert [type(result) for result in results] == [
        Published,
        NotJson,
        Published,
        Published,
        Published,
        PayloadTooLarge,
    ]
    assert sorted(await received(transport, queue, 4)) == ["urn:huge", "urn:nameless", "urn:same", "urn:same"]


@pytest.mark.requirement("X-58", "X-62")
async def test_each_message_of_a_batch_has_its_own_delay(transport: RabbitMQTransport) -> None:
    queue = unique()
    given = [(event, delay) for (event, _), delay in zip(events(queue, 3), (640, 0, 160), strict=True)]

    await transport.publish_many(given)

    assert await received(transport, queue, 3) == ["urn:1", "urn:2", "urn:0"]


@pytest.mark.requirement("S-8", "S-50")
async def test_a_broker_that_does_not_confirm_leaves_nothing_uncertain_behind(rabbit: RabbitServer) -> None:
    """Each message of the batch may have arrived: all are told, the connection is left, the next batch has another."""
    transport, queue = RabbitMQTransport(rabbit.url, topology=Topology(delays=QUICK), publish_timeout=1_000), unique()
    await transport.publish_many(events(queue, 2))

    with listening() as heard:
        with rabbit.paused():
            results = await transport.publish_many(events(queue, 5))
        async with asyncio.timeout(PATIENCE_S):
            while not all(  # noqa: ASYNC110 - nobody tells when a broker goes on
                isinstance(one, Published) for one in await transport.publish_many(events(queue, 3))
            ):
                await asyncio.sleep(0.05)

    assert [type(result) for result in results] == [ConnectionLost] * 5
    assert len(heard.of("transport.disconnected")) == 1
    await transport.aclose()


@pytest.mark.requirement("S-8")
async def test_a_driver_that_is_built_otherwise_publishes_one_by_one(
    transport: RabbitMQTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_batch, "_NEEDED", ("a part that this driver does not have",))
    queue = unique()

    results = await transport.publish_many(events(queue, 5))

    assert len(results) == 5
    assert (await transport.depth(queue)).messages == 5


@pytest.mark.requirement("S-8", "S-9")
async def test_a_client_tries_again_what_a_batch_left_over(rabbit: RabbitServer) -> None:
    """A broker that answers nobody for a while: each message is taken once it goes on, and told once."""
    transport = RabbitMQTransport(rabbit.url, topology=Topology(delays=QUICK), publish_timeout=1_000)
    client, queue = MessagingClient(transport, policy=quick_policy()), unique()
    orders = [
        Outgoing(name="pay", data={"urn": f"urn:{number}"}, idempotency_key=f"k{number}", delay=20 * number)
        for number in range(10)
    ]
    await client.produce_many(queue, [("pay", {"urn": "urn:first"})] * 2)
    with listening() as heard:
        with rabbit.paused():
            sending = asyncio.create_task(client.produce_many(queue, orders))
            await heard.wait("transport.disconnected")
        results = await sending

    assert [result.id for result in results if isinstance(result, Published)] == [
        f"pay~urn%3A{number}~k{number}" for number in range(10)
    ]
    told = Counter(fields["id"] for fields in heard.of("transport.published"))
    assert told == Counter(result.id for result in results if isinstance(result, Published))
    await client.close()
