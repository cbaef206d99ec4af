"""What the mock cluster cannot show: topics that come late, brokers that die, records too large, who may come in.

On Apache Kafka itself. One broker in the usual run; three, which must agree, in the long one.
"""

from __future__ import annotations

import asyncio
import ssl
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bullpen._kernel.outcome import Completed
from bullpen.errors import ServerRefused
from bullpen.plugins._kafka import Brokers
from bullpen.plugins.transports.kafka import KafkaClient, KafkaTransport
from bullpen.ports.transport import Delivery
from bullpen.testing.contracts.transport import an_event, take
from tests.kafka_server import KafkaServer

DONE = Completed(b"null")
SESSION_MS = 2_000
PATIENCE_S = 60.0


def a_topic() -> str:
    return f"t-{uuid.uuid4().hex[:8]}"


@pytest.fixture
async def transport(real_kafka: KafkaServer) -> AsyncIterator[KafkaTransport]:
    made = KafkaTransport(real_kafka.address, group=f"g-{uuid.uuid4().hex[:8]}", session_timeout=SESSION_MS)
    yield made
    await made.aclose()


async def test_a_topic_that_is_made_after_its_consumer_is_read(
    transport: KafkaTransport, real_kafka: KafkaServer
) -> None:
    """The driver looks for new topics every five minutes; a service that starts before its producer need not wait."""
    topic = a_topic()
    deliveries = await transport.deliveries(topic, prefetch=1)
    other = await transport.deliveries(a_topic(), prefetch=1)  # never made: it must not disturb the first
    await asyncio.to_thread(real_kafka.create_topic, topic, partitions=2)

    await transport.publish(an_event(topic))

    delivery = await take(deliveries, within_s=PATIENCE_S)
    await transport.settle(delivery, DONE)
    await other.stop()


async def test_an_event_that_the_topic_has_no_room_for_is_refused(
    transport: KafkaTransport, real_kafka: KafkaServer
) -> None:
    """By the broker, not by the mock; the next one goes on."""
    topic = a_topic()
    await asyncio.to_thread(real_kafka.create_topic, topic, partitions=1, settings={"max.message.bytes": "20000"})

    with pytest.raises(ServerRefused, match=r"raise the topic's max\.message\.bytes or send smaller"):
        await transport.publish(an_event(topic, payload={"text": "x" * 40_000}))
    await transport.publish(an_event(topic, 2))

    delivery = await take(await transport.deliveries(topic, prefetch=1), within_s=PATIENCE_S)
    assert delivery.payload == an_event(topic, 2).payload
    await transport.settle(delivery, DONE)


# ---- who may come in ---------------------------------------------------------------------------------------------


async def test_a_broker_with_tls_and_passwords_lets_in_who_knows_one(
    real_kafka: KafkaServer, kafka_certificate: Path
) -> None:
    """A wrong password is refused with that reason; nobody waits for it."""
    tls = ssl.create_default_context(cafile=str(kafka_certificate))
    topic = a_topic()

    def transport(password: str) -> KafkaTransport:
        brokers = Brokers.parse(real_kafka.guarded_address, tls=tls, username="ann", password=password)
        return KafkaTransport(brokers, group=topic)

    right, wrong = transport("open sesame"), transport("a guess")
    await right.publish(an_event(topic))
    delivery = await take(await right.deliveries(topic, prefetch=1), within_s=PATIENCE_S)
    await right.settle(delivery, DONE)
    with pytest.raises(ServerRefused, match="Kafka refused it"):
        await wrong.publish(an_event(topic))
    health = await wrong.check()

    assert (await right.check()).ok
    assert not health.ok
    assert "a guess" not in str(health)
    await right.aclose()
    await wrong.aclose()


# ---- three brokers -----------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", ["killed", "restarted in turn", "frozen"])
async def test_brokers_that_fail_under_load_lose_and_disorder_nothing(
    real_kafka_cluster: KafkaServer, fault: str
) -> None:
    """Acknowledged is what two of three have; each entity's events stay in order."""
    cluster, topic = real_kafka_cluster, a_topic()
    await asyncio.to_thread(cluster.create_topic, topic, partitions=3)
    client = KafkaClient(cluster.address, workflow=topic, session_timeout=10_000, publish_deadline=60_000)
    accepted: set[int] = set()
    handled: list[tuple[str, int]] = []
    more, is_over = asyncio.Event(), False

    async def handle(delivery: Delivery) -> None:
        assert delivery.payload is not None
        handled.append((delivery.urn, delivery.payload["number"]))
        more.set()

    async def produce() -> None:
        number = 0
        while not is_over:
            await client.produce(topic, "paid", {"urn": f"urn:order:{number % 30}", "payload": {"number": number}})
            accepted.add(number)
            number += 1

    async def handled_more(count: int = 200) -> None:
        wanted = len(handled) + count
        while len(handled) < wanted:
            more.clear()
            async with asyncio.timeout(120):
                await more.wait()

    await client.consume(topic, handle)
    load = asyncio.create_task(produce())
    await handled_more()
    leader = cluster.leader_of(topic)
    match fault:
        case "killed":
            cluster.kill(leader)
            await handled_more()
            await asyncio.to_thread(cluster.restart, leader)
        case "restarted in turn":
            for node in range(3):
                await asyncio.to_thread(cluster.stop, node)
                await handled_more()
                await asyncio.to_thread(cluster.restart, node)
        case _:
            cluster.pause(leader)
            await handled_more()
            cluster.resume(leader)
    await handled_more()
    is_over = True
    await load
    while not accepted <= {number for _, number in handled}:
        await handled_more(1)
    await client.close()

    firsts: dict[str, list[int]] = {}
    for urn, number in handled:
        seen = firsts.setdefault(urn, [])
        if number not in seen:
            seen.append(number)
    again = sum(count - 1 for count in Counter(number for _, number in handled).values())
    print(f"{fault}: {len(accepted)} accepted, {len(handled)} runs, {again} again")
    assert all(numbers == sorted(numbers) for numbers in firsts.values())
