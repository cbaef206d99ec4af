"""Messages as anybody may have written them: one that cannot be read is a dead letter, and the next one is handled."""

from __future__ import annotations

import asyncio
import json
import uuid
from types import SimpleNamespace
from typing import Any

import aio_pika
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bullpen._kernel.outcome import Cause, Failed
from bullpen.plugins._kafka import Brokers, KafkaDoor, KafkaRecord, Partition
from bullpen.plugins.messaging import MessagingClient
from bullpen.plugins.transports._dead_letters import dead_letter_of, event_of
from bullpen.plugins.transports.kafka import KafkaTransport
from bullpen.plugins.transports.kafka._records import delivery_of as kafka_delivery
from bullpen.plugins.transports.kafka._records import parked_for_s
from bullpen.plugins.transports.rabbitmq import DelayLadder, RabbitMQTransport, Topology
from bullpen.plugins.transports.rabbitmq._messages import dead_letter_of_message, delay_left_ms
from bullpen.plugins.transports.rabbitmq._messages import delivery_of as rabbit_delivery
from bullpen.ports.dead_letters import DeadLetter
from bullpen.ports.transport import Delivery
from bullpen.testing.contracts.transport import an_event, quick_policy
from bullpen.testing.kafka import MockKafka
from bullpen.testing.rabbitmq import RabbitServer

DEEP = "[" * 5_000
LONG = "9" * 4_000
QUIET_S = 30.0
COUNTERS = ("x-bullpen-tries", "x-retry-count", "x-bullpen-delay-left", "x-bullpen-ready-at", "x-bullpen-pause")
RESTS = f'{{"attempts": 2, "backoff": {{"type": "fixed", "delay": {LONG}}}}}'
"""The longest pause there is: its partition rests for a day."""
ODD_TEXTS = (
    DEEP,
    LONG,
    "9" * 5_000,
    "-" + LONG,
    "nan",
    "1e999",
    f'{{"attempts": {LONG}}}',
    f'{{"attempts": 2, "backoff": {DEEP}}}',
    RESTS,
    '{"attempts": 2, "backoff": {"type": [], "delay": NaN}}',
    '{"attempts": "\ud800"}',
)
odd_bytes = st.sampled_from([text.encode("utf-8", "surrogatepass") for text in ODD_TEXTS]) | st.binary(max_size=40)
odd_bodies = odd_bytes | st.sampled_from(
    [
        b'{"urn": "u", "payload": ' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"urn": "u", "payload": ' + LONG.encode() + b"}",
        b'{"urn": "u", "payload": NaN}',
        b'{"urn": "u", "payload": "\\ud800"}',
        b'{"urn": "\\ud800", "payload": 1}',
        b'{"urn": "u", "payload": {"tenantId": "\\ud800", "\\ud800": 1}}',
        b'{"urn": "u\xff"}',
    ]
)
odd_values: st.SearchStrategy[Any] = (
    odd_bytes
    | st.sampled_from(ODD_TEXTS)
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | st.none()
    | st.booleans()
    | st.binary(max_size=8).map(bytearray)
    | st.just([{"time": "never"}])
)


def bad_letter_is_stored(delivery: Delivery) -> None:
    """Whatever it was, its dead letter can be written, and read again, and sent again or refused as ours."""
    assert delivery.attempt >= 1
    assert len(str(delivery.attempt)) < 20
    failed = Failed("odd", "odd", Cause.BAD_DATA)
    stored = json.loads(json.dumps(dead_letter_of(delivery, failed).entry, ensure_ascii=False).encode())
    event_of(DeadLetter.from_entry("l", stored, source="q"), by="me")


# ---- reading: no broker ------------------------------------------------------------------------------------------


@given(
    key=st.none() | st.binary(max_size=8),
    value=st.none() | odd_bodies,
    headers=st.dictionaries(st.sampled_from([*COUNTERS, "x-bullpen-id", "x"]), odd_bytes, max_size=3),
    topic=st.sampled_from(["q", "q-retry-1"]),
)
def test_any_kafka_record_is_a_delivery_that_can_be_buried(
    key: bytes | None, value: bytes | None, headers: dict[str, bytes], topic: str
) -> None:
    record = KafkaRecord(Partition(topic, 0), 7, key, value, tuple(headers.items()), 0)

    assert parked_for_s(record, "q") >= 0
    bad_letter_is_stored(kafka_delivery(record, "q", None, None))


@given(body=odd_bodies, headers=st.dictionaries(st.sampled_from([*COUNTERS, "x", "x-death"]), odd_values, max_size=3))
def test_any_rabbitmq_message_is_a_delivery_that_can_be_buried(body: bytes, headers: dict[str, Any]) -> None:
    message: Any = SimpleNamespace(
        body=body, headers=headers, message_id="m", type=None, routing_key="r", delivery_tag=1, redelivered=False
    )

    assert 0 <= delay_left_ms(message) < 2**53
    bad_letter_is_stored(rabbit_delivery(message, "q", None))
    dead_letter_of_message(message, "q")


@given(
    st.dictionaries(
        st.sampled_from(["originalTries", "originalHeaders", "originalData", "error", "attemptsMade", "tenantId"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
            lambda inner: st.dictionaries(st.sampled_from(["attempts", "backoff", "urn", "message"]), inner),
            max_leaves=4,
        ),
    )
)
def test_any_stored_letter_is_an_event(entry: dict[str, Any]) -> None:
    event = event_of(DeadLetter.from_entry("l", entry, source="q"), by="me")

    assert all(isinstance(value, str) for value in event.headers.values())


# ---- consuming: real brokers -------------------------------------------------------------------------------------


@pytest.mark.requirement("X-64")
async def test_one_message_never_ends_a_rabbitmq_consumer(rabbit: RabbitServer) -> None:
    queue = f"q-{uuid.uuid4().hex[:8]}"
    client = MessagingClient(
        RabbitMQTransport(rabbit.url, topology=Topology(delays=DelayLadder(unit_ms=20, levels=9))),
        policy=quick_policy(attempts=2),
    )
    handled: asyncio.Queue[str] = asyncio.Queue()

    async def handle(delivery: Delivery) -> None:
        if delivery.id != "good":
            raise ValueError("odd")
        await handled.put(delivery.id)

    good = an_event(queue)
    await client.transport.publish(good)
    bodies = [b"\xff", DEEP.encode(), *(b'{"urn": "u", "payload": %s}' % body for body in (b"NaN", b'"\\ud800"', b"1"))]
    odd: list[Any] = [text.encode("utf-8", "replace").decode() for text in ODD_TEXTS]
    odd.remove(RESTS)
    async with client, await aio_pika.connect(rabbit.url) as connection:
        channel = await connection.channel()
        count = 0
        for name in COUNTERS[:4]:
            for value in (*odd, bytearray(b"\xff\xfe"), 2**62, -5):
                message = aio_pika.Message(bodies[count % 5], headers={name: value}, message_id=f"bad-{count}")
                if name == "x-bullpen-delay-left" and value in (2**62, LONG, "9" * 5_000):
                    continue  # a delay of many years is a delay
                await channel.default_exchange.publish(message, routing_key=queue)
                count += 1
        last = aio_pika.Message(b'{"urn": "u"}', message_id="good")
        await channel.default_exchange.publish(last, routing_key=queue)
        await client.consume(queue, handle)
        assert await asyncio.wait_for(handled.get(), QUIET_S) == "good"
        letters = client.transport.dead_letters(queue)
        async with asyncio.timeout(QUIET_S):
            while await letters.depth() < count + 1:  # noqa: ASYNC110 - the broker tells nobody
                await asyncio.sleep(0.05)
        expected = {good.id, *(f"bad-{number}" for number in range(count))}
        assert {one.message_id for one in await letters.list(count=500)} == expected
        assert await client.is_healthy()


async def test_one_record_never_ends_a_kafka_consumer(kafka: MockKafka) -> None:
    topic = f"t-{uuid.uuid4().hex[:8]}"
    for each in (topic, f"{topic}-dlq"):
        kafka.create_topic(each, partitions=1)
    door = KafkaDoor(Brokers.parse(kafka.address))
    client = MessagingClient(KafkaTransport(kafka.address, group=topic), policy=quick_policy(attempts=2))
    handled: asyncio.Queue[str] = asyncio.Queue()

    async def handle(delivery: Delivery) -> None:
        if delivery.urn != "good":
            raise ValueError("odd")
        await handled.put(delivery.urn)

    bodies = [b"\xff", DEEP.encode(), b"NaN", b'"\\ud800"', LONG.encode()]
    odd = [text.encode("utf-8", "replace").decode() for text in ODD_TEXTS]
    odd.remove(RESTS)
    for number, value in enumerate(odd):
        for name in ("x-bullpen-tries", "x-retry-count"):
            await door.send(topic, key=b"\xff", value=bodies[number % 5], headers={name: value})
    await door.send(topic, key=b"good", value=b"1")
    async with client:
        await client.consume(topic, handle)
        assert await asyncio.wait_for(handled.get(), QUIET_S) == "good"
        assert len(await client.transport.dead_letters(topic).list(count=100)) == 2 * len(odd)
    await door.aclose()
