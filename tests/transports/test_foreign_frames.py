"""AMQP frames as any client may have written them: what the driver cannot decode is a dead letter, and nothing else."""

from __future__ import annotations

import asyncio
import struct
import uuid
from typing import Any

import aio_pika
import pytest
from aio_pika.message import IncomingMessage
from aiormq.abc import ChannelFrame, DeliveredMessage
from hypothesis import example, given
from hypothesis import strategies as st
from pamqp import frame as amqp
from pamqp.body import ContentBody
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from bullpen._kernel.outcome import Cause, Failed
from bullpen.plugins.messaging import MessagingClient
from bullpen.plugins.transports._dead_letters import dead_letter_of
from bullpen.plugins.transports.rabbitmq import DelayLadder, RabbitMQTransport, Topology
from bullpen.plugins.transports.rabbitmq._frames import UNREADABLE_HEADER, readable_frame
from bullpen.plugins.transports.rabbitmq._messages import copy_of, dead_letter_of_message, delivery_of, message_of
from bullpen.ports.transport import Delivery, Event, Published
from bullpen.testing.contracts.transport import quick_policy
from bullpen.testing.rabbitmq import RabbitServer

QUIET_S = 30.0


class Raw(Basic.Properties):
    """Properties as bytes: flags, then values."""

    def __init__(self, raw: bytes) -> None:
        super().__init__()
        self.__dict__["raw"] = raw

    def marshal(self) -> bytes:
        return bytes(self.__dict__["raw"])


def short(raw: bytes) -> bytes:
    return bytes([len(raw)]) + raw


def long(raw: bytes) -> bytes:
    return struct.pack(">I", len(raw)) + raw


def flagged(bit: int, raw: bytes) -> bytes:
    return struct.pack(">H", 1 << bit) + raw


def nested(levels: int, kind: bytes) -> bytes:
    inner = b""
    for _ in range(levels):
        inner = (short(b"k") if kind == b"F" else b"") + kind + long(inner)
    return long(inner if kind == b"F" else short(b"k") + inner)


ODD = {
    "an id that is no text": flagged(7, short(b"id\xff")),
    "a type that is no text": flagged(5, short(b"\xff")),
    "a header's name that is no text": flagged(13, long(short(b"\xff") + b"V")),
    "a time without end": flagged(6, b"\xff" * 8),
    "a time in the far future": flagged(6, struct.pack(">Q", 2**55)),
    "a header's time": flagged(13, long(short(b"t") + b"T" + struct.pack(">Q", 2**62))),
    "tables in tables": flagged(13, nested(1_500, b"F")),
    "lists in lists": flagged(13, nested(1_500, b"A")),
}
"""The broker takes each of them."""
REFUSED = {
    "a delivery mode of its own": flagged(12, b"\x07"),
    "an end that is no number": flagged(8, short(b"soon")),
    "a flag too many": struct.pack(">H", 1) + b"\x00\x00",
    "a value of no type": flagged(13, long(short(b"k") + b"?")),
    "a table that is too short": flagged(13, long(short(b"k") + b"S" + struct.pack(">I", 99))),
    "less than it says": struct.pack(">H", 0xFFFC),
    "nothing at all": b"",
}
"""RabbitMQ refuses these from whoever publishes them; other brokers may not."""

raw_values = st.one_of(
    st.binary(max_size=12).map(lambda raw: b"S" + long(raw)),
    st.binary(max_size=12).map(lambda raw: b"x" + long(raw)),
    st.binary(min_size=8, max_size=8).flatmap(lambda raw: st.sampled_from([bytes([one]) + raw for one in b"lLdT"])),
    st.binary(min_size=5, max_size=5).map(lambda raw: b"D" + raw),
    st.binary(min_size=4, max_size=4).flatmap(lambda raw: st.sampled_from([bytes([one]) + raw for one in b"Iif"])),
    st.binary(min_size=1, max_size=1).flatmap(lambda raw: st.sampled_from([bytes([one]) + raw for one in b"tbB"])),
    st.just(b"V"),
    st.integers(1, 60).map(lambda levels: b"F" + nested(levels, b"F")),
)
raw_tables = st.lists(st.tuples(st.binary(max_size=5), raw_values), max_size=4).map(
    lambda entries: long(b"".join(short(name) + value for name, value in entries))
)
raw_properties = st.one_of(
    st.sampled_from([*ODD.values(), *REFUSED.values()]),
    st.binary(max_size=60),
    raw_tables.map(lambda table: flagged(13, table)),
    st.tuples(st.integers(2, 15), st.binary(max_size=30)).map(lambda pair: flagged(*pair)),
    st.tuples(raw_tables, st.binary(max_size=9)).map(
        lambda pair: struct.pack(">H", 1 << 13 | 1 << 7) + pair[0] + short(pair[1])
    ),
)


def content_frame(raw: bytes) -> bytes:
    return amqp.marshal(ContentHeader(body_size=11, properties=Raw(raw)), 3)


def received(frame: bytes) -> IncomingMessage:
    """What the driver makes of a content header."""
    _, _, header = amqp.unmarshal(frame)
    assert isinstance(header, ContentHeader)
    assert header.body_size == 11
    deliver = Basic.Deliver("tag", 1, False, "", "r")
    channel: Any = None
    return IncomingMessage(DeliveredMessage(delivery=deliver, header=header, body=b'{"urn":"u"}', channel=channel))


@given(raw_properties)
@example(b"")
def test_whatever_the_properties_are_the_driver_reads_them(raw: bytes) -> None:
    """And whatever it reads can fail, be sent once more, be buried and be listed."""
    message = received(readable_frame(content_frame(raw)))

    delivery = delivery_of(message, "q", None)
    letter = dead_letter_of(delivery, Failed("odd", "odd", Cause.BAD_DATA))
    assert letter.entry["originalQueue"] == "q"
    dead_letter_of_message(message, "q")
    copy = copy_of(message, failures=1, ready_in_ms=0, delay_left_ms=0)
    again = received(readable_frame(amqp.marshal(ContentHeader(body_size=11, properties=copy.properties), 3)))
    assert (UNREADABLE_HEADER in again.headers) is (UNREADABLE_HEADER in message.headers)


@pytest.mark.parametrize("raw", [*ODD.values(), *REFUSED.values()], ids=[*ODD, *REFUSED])
def test_what_cannot_be_decoded_is_the_messages_problem(raw: bytes) -> None:
    message = received(readable_frame(content_frame(raw)))

    assert "cannot be decoded" in str(delivery_of(message, "q", None).problem)


@given(
    st.text(max_size=20),
    st.dictionaries(st.text(max_size=10), st.text(max_size=10) | st.integers(-(2**63), 2**63 - 1), max_size=4),
)
def test_what_can_be_read_is_not_touched(name: str, headers: dict[str, Any]) -> None:
    event = Event(source="q", urn="u", name=name, id="é", headers=headers)
    frame = amqp.marshal(ContentHeader(body_size=11, properties=message_of(event).properties), 3)

    assert readable_frame(frame) is frame


@given(exchange=st.binary(max_size=255), key=st.binary(max_size=255), tag=st.integers(0, 2**64 - 1))
def test_a_routing_key_of_any_bytes_can_be_read(exchange: bytes, key: bytes, tag: int) -> None:
    payload = struct.pack(">HH", 60, 60) + short(b"ctag") + struct.pack(">Q?", tag, True) + short(exchange) + short(key)
    frame = struct.pack(">BHI", 1, 3, len(payload)) + payload + b"\xce"

    made = readable_frame(frame)

    _, channel, deliver = amqp.unmarshal(made)
    assert isinstance(deliver, Basic.Deliver)
    assert (channel, deliver.consumer_tag, deliver.redelivered) == (3, "ctag", True)
    try:
        assert (deliver.exchange, deliver.routing_key) == (exchange.decode(), key.decode())
        assert made is frame
    except UnicodeDecodeError:
        assert "?" in f"{deliver.exchange}{deliver.routing_key}"


def client_of(rabbit: RabbitServer) -> MessagingClient[Published]:
    topology = Topology(delays=DelayLadder(unit_ms=20, levels=9))
    return MessagingClient(RabbitMQTransport(rabbit.url, topology=topology), policy=quick_policy(attempts=2))


async def test_properties_that_no_driver_decodes_are_dead_letters_also_after_a_restart(rabbit: RabbitServer) -> None:
    """Such a message ended the connection, and again after each reconnect, until the broker dropped all around it."""
    queue = f"q-{uuid.uuid4().hex[:8]}"
    handled: asyncio.Queue[tuple[str, bool]] = asyncio.Queue()

    async def handle(delivery: Delivery) -> None:
        await handled.put((delivery.id, delivery.is_redelivered))

    for restarted in (False, True):
        async with client_of(rabbit) as client, await aio_pika.connect(rabbit.url) as connection:
            await client.transport.depth(queue)  # declares it
            channel = await connection.channel()
            underlay = await channel.get_underlay_channel()
            for raw in ODD.values():
                await underlay.basic_publish(b'{"urn":"u"}', routing_key=queue, properties=Raw(raw))
            fanout = await channel.declare_exchange(f"{queue}-fanout", aio_pika.ExchangeType.FANOUT)
            await (await channel.get_queue(queue, ensure=False)).bind(fanout)
            await publish_with_key(rabbit, f"{queue}-fanout", b"\xff")
            await channel.default_exchange.publish(aio_pika.Message(b'{"urn": "u"}', message_id="good"), queue)
            await client.consume(queue, handle)
            seen = [await asyncio.wait_for(handled.get(), QUIET_S) for _ in range(2)]
            letters = client.transport.dead_letters(queue)
            expected = len(ODD) * (1 + restarted)
            async with asyncio.timeout(QUIET_S):
                while await letters.depth() < expected:  # noqa: ASYNC110 - the broker tells nobody
                    await asyncio.sleep(0.05)
            reasons = [letter.entry["errorMessage"] for letter in await letters.list(count=100)]
            assert all("cannot be decoded" in reason for reason in reasons)
            assert not any(redelivered for _, redelivered in seen)  # nobody lost a connection
            assert "good" in [one for one, _ in seen]
            assert await client.is_healthy()


async def publish_with_key(rabbit: RabbitServer, exchange: str, key: bytes) -> None:
    """A client of our own: the driver writes no routing key that is not text."""
    async with await aio_pika.connect(rabbit.url) as connection:
        channel: Any = await (await connection.channel()).get_underlay_channel()
        publish = struct.pack(">HHH", 60, 40, 0) + short(exchange.encode()) + short(key) + b"\x00"
        header = ContentHeader(body_size=11, properties=Basic.Properties())
        written = b"".join(
            (
                struct.pack(">BHI", 1, channel.number, len(publish)) + publish + b"\xce",
                amqp.marshal(header, channel.number),
                amqp.marshal(ContentBody(b'{"urn":"u"}'), channel.number),
            )
        )
        confirmed = channel.create_future()
        channel.delivery_tag += 1
        channel.confirmations[channel.delivery_tag] = confirmed
        await channel.write_queue.put(ChannelFrame(payload=written, should_close=False))
        await asyncio.wait_for(confirmed, QUIET_S)
