"""Batches of records as any producer may have written them: what the driver cannot decode is a dead letter, alone."""

from __future__ import annotations

import asyncio
import gzip
import struct
import uuid
from typing import Any

import pytest
from aiokafka import AIOKafkaClient, TopicPartition
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.record.memory_records import MemoryRecords
from aiokafka.record.util import calc_crc32c, encode_varint
from confluent_kafka import Producer
from hypothesis import given
from hypothesis import strategies as st

from bullpen.plugins._kafka_batches import UNREADABLE_HEADER, readable_fetch
from bullpen.plugins.messaging import MessagingClient
from bullpen.plugins.transports.kafka import KafkaTransport
from bullpen.ports.transport import Delivery
from bullpen.testing.contracts.transport import quick_policy
from bullpen.testing.kafka import MockKafka

QUIET_S = 30.0
BASE = 100


def varint(value: int) -> bytes:
    raw = bytearray()
    encode_varint(value, raw.append)
    return bytes(raw)


def field(raw: bytes | None) -> bytes:
    return varint(-1) if raw is None else varint(len(raw)) + raw


def a_record(
    delta: int,
    key: bytes | None = b"k",
    *,
    headers: tuple[tuple[bytes, bytes | None], ...] = (),
    count: int | None = None,
    size: int | None = None,
) -> bytes:
    names = b"".join(field(name) + field(value) for name, value in headers)
    many = varint(len(headers) if count is None else count)
    body = b"\x00" + varint(5) + varint(delta) + field(key) + field(b'"v"') + many + names
    return varint(len(body) if size is None else size) + body


def a_batch(
    *records: bytes, base: int = BASE, codec: int = 0, count: int | None = None, body: bytes | None = None, crc: int = 0
) -> bytes:
    many = len(records) if count is None else count
    content = b"".join(records) if body is None else body
    covered = struct.pack(">hiqqqhii", codec, max(0, len(records) - 1), 1_000, 1_010, -1, -1, -1, many) + content
    checked = struct.pack(">ibI", 0, 2, calc_crc32c(covered) ^ crc) + covered
    return struct.pack(">qi", base, len(checked)) + checked


BAD_NAME = ((b"ok", b"1"), (b"\xff\xfe", b"2"))
ONE_BAD = {
    "a header's name that is no text": a_batch(a_record(0), a_record(1, headers=BAD_NAME), a_record(2)),
    "the same, compressed": a_batch(
        *[b""] * 3,
        codec=1,
        body=gzip.compress(a_record(0) + a_record(1, headers=BAD_NAME) + a_record(2)),
    ),
    "a record with headers that it lacks": a_batch(a_record(0), a_record(1, count=3), a_record(2)),
    "a negative number of headers": a_batch(a_record(0), a_record(1, count=-3), a_record(2)),
    "a record of another batch": a_batch(a_record(0), a_record(900, headers=BAD_NAME), a_record(2)),
}
"""The record in the middle is bad, its neighbours are not."""
ALL_BAD = {
    "what is no gzip": a_batch(a_record(0), a_record(1), a_record(2), codec=1, body=b"garbage" * 9),
    "what is no snappy": a_batch(a_record(0), a_record(1), a_record(2), codec=2, body=b"garbage" * 9),
    "what is no lz4": a_batch(a_record(0), a_record(1), a_record(2), codec=3, body=b"garbage" * 9),
    "what is no zstd": a_batch(a_record(0), a_record(1), a_record(2), codec=4, body=b"garbage" * 9),
    "a mark of a transaction that is no gzip": a_batch(
        a_record(0), a_record(1), a_record(2), codec=0x21, body=b"bad" * 9
    ),
    "a codec that nobody knows": a_batch(a_record(0), a_record(1), a_record(2), codec=7),
    "a wrong checksum": a_batch(a_record(0), a_record(1), a_record(2), crc=1),
    "a record without an end": a_batch(a_record(0, size=10**9), a_record(1), a_record(2)),
}
"""Nothing can be told apart in it."""
MORE_THAN_SAID = a_batch(a_record(0), a_record(1), a_record(2), count=90)


def read(fetched: bytes) -> list[tuple[int, bytes | None, dict[str, bytes | None]]]:
    """What the driver makes of a fetch."""
    found: list[Any] = []
    batches = MemoryRecords(fetched)
    while batches.has_next():
        batch = batches.next_batch()
        assert batch.validate_crc()
        found += [(one.offset, one.key, dict(one.headers)) for one in batch]
    return found


@pytest.mark.parametrize("bad", ONE_BAD.values(), ids=ONE_BAD)
def test_one_bad_record_does_not_spoil_its_batch(bad: bytes) -> None:
    before, after = a_batch(a_record(0), base=99), a_batch(a_record(0), base=103)

    found = read(readable_fetch(before + bad + after + b"cut"))

    assert [offset for offset, _, _ in found] == [99, 100, 101, 102, 103]
    assert [offset for offset, _, headers in found if UNREADABLE_HEADER in headers] == [101]
    assert [key for offset, key, _ in found if offset != 101] == [b"k"] * 4


@pytest.mark.parametrize("bad", [*ALL_BAD.values(), MORE_THAN_SAID], ids=[*ALL_BAD, "more than it says"])
def test_a_batch_that_cannot_be_read_is_one_bad_record_at_its_end(bad: bytes) -> None:
    """Its neighbours are read, and the next fetch begins behind it."""
    before, after = a_batch(a_record(0), base=99), a_batch(a_record(0), base=103)

    found = read(readable_fetch(before + bad + after))

    offsets = [offset for offset, _, _ in found]
    assert (offsets[0], *offsets[-2:]) == (99, 102, 103)
    if bad is not MORE_THAN_SAID:
        assert [offset for offset, _, headers in found if UNREADABLE_HEADER in headers] == [102]


def test_what_can_be_read_is_not_touched() -> None:
    fetched = a_batch(a_record(0), a_record(1, None), base=7) + a_batch(a_record(0, headers=((b"a", None),)), base=9)

    assert readable_fetch(fetched) is fetched
    assert readable_fetch(fetched + b"cut off") == fetched + b"cut off"
    assert readable_fetch(b"") == b""


@given(st.data())
def test_any_bytes_in_a_batch_leave_its_neighbours_alone(data: st.DataObject) -> None:
    good = a_batch(a_record(0), a_record(1, headers=((b"name", b"value"),)), a_record(2))
    raw = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(16, len(raw) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        raw[17:21] = struct.pack(">I", calc_crc32c(bytes(raw[21:])))
    before, after = a_batch(a_record(0), base=99), a_batch(a_record(0), base=10**6)

    found = read(readable_fetch(before + bytes(raw) + after))

    assert found[0] == (99, b"k", {})
    assert found[-1] == (10**6, b"k", {})


# ---- consuming ---------------------------------------------------------------------------------------------------


async def produce(kafka: MockKafka, topic: str, partition: int, batch: bytes) -> None:
    """Bytes as they are: no driver checks them."""
    client = AIOKafkaClient(bootstrap_servers=kafka.address)
    await client.bootstrap()
    try:
        await client.set_topics([topic])
        leader = client.cluster.leader_for_partition(TopicPartition(topic, partition))
        request = ProduceRequest(
            transactional_id=None, required_acks=-1, timeout=5_000, topics=[(topic, [(partition, batch)])]
        )
        response = await client.send(leader, request)
        assert response.topics[0][1][0][1] == 0
    finally:
        await client.close()


async def test_records_that_the_driver_cannot_decode_are_dead_letters_also_after_a_restart(kafka: MockKafka) -> None:
    """Such a record stopped its partition for good, and every other partition of the process with it."""
    topic = f"t-{uuid.uuid4().hex[:8]}"
    for each in (topic, f"{topic}-dlq"):
        kafka.create_topic(each, partitions=1)
    handled: asyncio.Queue[str] = asyncio.Queue()

    async def handle(delivery: Delivery) -> None:
        await handled.put(delivery.urn)

    bad = [*ONE_BAD.values(), *ALL_BAD.values()]
    for number in range(2):
        for batch in bad:
            await produce(kafka, topic, 0, batch)
        await produce(kafka, topic, 0, a_batch(a_record(0, f"last-{number}".encode())))
        transport = KafkaTransport(kafka.address, group=topic)
        async with MessagingClient(transport, policy=quick_policy(attempts=2)) as client:
            await client.consume(topic, handle)
            urns: list[str] = []
            async with asyncio.timeout(QUIET_S):
                while not urns or urns[-1] != f"last-{number}":
                    urns.append(await handled.get())
            letters = await transport.dead_letters(topic).list(count=100)
        assert urns == ["k"] * 2 * len(ONE_BAD) + [f"last-{number}"]
        assert len(letters) == (number + 1) * len(bad)
        assert all("cannot be decoded" in letter.entry["errorMessage"] for letter in letters)


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
async def test_compressed_records_of_other_clients_are_read(kafka: MockKafka, codec: str) -> None:
    """The driver brings gzip only: without the library of the others their partition waited for ever."""
    topic = f"t-{uuid.uuid4().hex[:8]}"
    kafka.create_topic(topic, partitions=1)
    producer = Producer({"bootstrap.servers": kafka.address, "compression.type": codec, "linger.ms": 50})
    for number in range(3):
        producer.produce(topic, key=b"urn", value=f'{{"number": {number}, "text": "{"x" * 500}"}}'.encode())
    assert producer.flush(QUIET_S) == 0
    handled: asyncio.Queue[int] = asyncio.Queue()

    async def handle(delivery: Delivery) -> None:
        await handled.put(delivery.payload["number"])

    async with MessagingClient(KafkaTransport(kafka.address, group=topic), policy=quick_policy(attempts=1)) as client:
        await client.consume(topic, handle)
        found = [await asyncio.wait_for(handled.get(), QUIET_S) for _ in range(3)]

    assert found == [0, 1, 2]
