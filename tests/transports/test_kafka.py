"""What only the Kafka transport has: offsets, partitions, groups that change while work is under way."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import time
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiokafka.errors
import pytest

from bullpen._kernel.outcome import Cause, Completed, Failed, Retry, WaitingChildren
from bullpen.errors import ConnectionLost, DeliveryLost, InvalidOption, ServerRefused
from bullpen.plugins._kafka import Brokers, KafkaDoor, Partition, PartitionLost, translate
from bullpen.plugins.transports.kafka import KafkaClient, KafkaTransport
from bullpen.ports.bindings import Kafka, KafkaEvent
from bullpen.ports.transport import Delivery
from bullpen.testing import Child
from bullpen.testing.contracts.transport import an_event, die_holding_one, nothing_comes, quick_policy, take
from bullpen.testing.kafka import OFFSET_COMMIT, PRODUCE, MockKafka
from tests.transports._listening import PATIENCE_S, lines, listening
from tests.transports._tap import tap

DONE = Completed(b"null")


MakeTransport = Callable[..., KafkaTransport]
ROOT = Path(__file__).resolve().parents[2]


def transport_of(address: str, group: str, session_timeout: int = 2_000) -> KafkaTransport:
    """For processes of ours."""
    return KafkaTransport(address, group=group, session_timeout=session_timeout)


@pytest.fixture
def topic(kafka: MockKafka) -> str:
    """Two partitions."""
    name = f"t-{uuid.uuid4().hex[:8]}"
    for each in (name, f"{name}-dlq", f"{name}-retry-1", f"{name}-retry-2"):
        kafka.create_topic(each, partitions=2)
    return name


@pytest.fixture
async def make_transport(kafka: MockKafka) -> AsyncIterator[MakeTransport]:
    made: list[KafkaTransport] = []
    group = f"g-{uuid.uuid4().hex[:8]}"

    def make(**options: Any) -> KafkaTransport:
        transport = KafkaTransport(kafka.address, **{"group": group, "retry_topics": 2, **options})
        made.append(transport)
        return transport

    yield make
    for transport in made:
        await transport.aclose()


@pytest.fixture
async def door(kafka: MockKafka) -> AsyncIterator[KafkaDoor]:
    made = KafkaDoor(Brokers.parse(kafka.address))
    yield made
    await made.aclose()


async def urns_by_partition(transport: KafkaTransport, topic: str) -> dict[int, str]:
    """One urn for each of two partitions, found by asking where Kafka puts it."""
    found: dict[int, str] = {}
    number = 0
    while len(found) < 2:
        number += 1
        published = await transport.publish(an_event(topic, urn=f"urn:probe:{number}"))
        found.setdefault(int(published.position.partition("[")[2].partition("]")[0]), f"urn:probe:{number}")
    return found


# ---- records -----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("W-18")
async def test_the_key_is_the_urn_and_the_value_is_the_payload(
    make_transport: MakeTransport, door: KafkaDoor, topic: str
) -> None:
    transport = make_transport()
    event = an_event(topic, headers={"correlationId": "c"})

    published = await transport.publish(event)

    (record,) = [record async for record in door.read_all(topic)]
    assert record.key == event.urn.encode()
    assert json.loads(record.value or b"") == event.payload
    headers = dict(record.headers)
    assert headers["correlationId"] == b"c"
    assert headers["x-bullpen-id"] == event.id.encode()
    assert published.position == f"{topic}[{record.partition.number}]@{record.offset}"


@pytest.mark.requirement("W-7", "W-18")
async def test_records_of_other_producers_are_read(make_transport: MakeTransport, door: KafkaDoor, topic: str) -> None:
    """A key and a JSON value are enough; id and name are made up."""
    transport = make_transport()
    partition, offset = await door.send(topic, key=b"urn:order:7", value=b'{"amount": 5}')

    delivery = await take(await transport.deliveries(topic, prefetch=1))

    assert (delivery.urn, delivery.payload, delivery.name) == ("urn:order:7", {"amount": 5}, "")
    assert delivery.id == f"{topic}-{partition}-{offset}"
    assert delivery.problem is None
    await transport.settle(delivery, DONE)


async def test_a_record_without_key_names_no_entity(make_transport: MakeTransport, door: KafkaDoor, topic: str) -> None:
    transport = make_transport()
    await door.send(topic, key=None, value=b"{}")

    delivery = await take(await transport.deliveries(topic, prefetch=1))

    assert delivery.problem == "key: expected the urn of the entity"
    await transport.settle(delivery, DONE)


@pytest.mark.requirement("W-69")
async def test_a_value_may_be_sent_under_a_key(kafka: MockKafka, door: KafkaDoor, topic: str) -> None:
    client = KafkaClient(kafka.address, workflow="orders")

    await client.produce_keyed(topic, "urn:order:1", {"amount": 5})

    (record,) = [record async for record in door.read_all(topic)]
    assert (record.key, json.loads(record.value or b"")) == (b"urn:order:1", {"amount": 5})
    await client.close()


@pytest.mark.requirement("W-18", "W-50")
async def test_a_binding_describes_its_client(kafka: MockKafka) -> None:
    binding = Kafka(events=[KafkaEvent(topic="orders", event="paid")], brokers=kafka.address, client_id="shop")

    client = KafkaClient.from_binding(binding, workflow="order")

    assert isinstance(client.transport, KafkaTransport)
    assert client.transport.group == "orderconsumer"
    assert await client.is_healthy()
    await client.close()
    with pytest.raises(InvalidOption, match="workflow"):
        KafkaClient(kafka.address, workflow="")
    with pytest.raises(InvalidOption, match="session_timeout"):
        KafkaClient(kafka.address, workflow="order", session_timeout=1)


@pytest.mark.requirement("W-18")
@pytest.mark.parametrize("way", ["client", "binding", "transport"])
async def test_brokers_are_told_who_asks(kafka: MockKafka, way: str) -> None:
    """The client id stands in every request: quotas and logs of a cluster go by it."""
    first = kafka.address.split(",")[0]
    async with tap(int(first.rpartition(":")[2])) as wire:
        brokers, name = f"127.0.0.1:{wire.port}", f"shop-{uuid.uuid4().hex[:8]}"
        wire.hold_at(name.encode())
        transport: Any = None
        match way:
            case "client":
                transport = KafkaClient(brokers, workflow="order", client_id=name).transport
            case "binding":
                binding = Kafka(events=[KafkaEvent(topic="o", event="paid")], brokers=brokers, client_id=name)
                transport = KafkaClient.from_binding(binding, workflow="order").transport
            case "transport":
                transport = KafkaTransport(brokers, group="g", client_id=name)
        asked = asyncio.create_task(transport.check())

        await asyncio.wait_for(wire.struck.wait(), PATIENCE_S)

        wire.close()
        assert not (await asked).ok
        await transport.aclose()


@pytest.mark.requirement("X-55")
async def test_a_client_parks_when_it_is_asked_to(kafka: MockKafka) -> None:
    """By its own option or by its binding; what is parked can be overtaken, so order is no longer promised."""
    binding = Kafka(events=[KafkaEvent(topic="o", event="paid")], brokers=kafka.address, retry="park")
    clients = [
        KafkaClient(kafka.address, workflow="order"),
        KafkaClient(kafka.address, workflow="order", retry="park"),
        KafkaClient.from_binding(binding, workflow="order"),
    ]

    assert [client.features.ordered for client in clients] == [True, False, False]
    for client in clients:
        await client.close()


# ---- offsets -----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("X-55")
async def test_nothing_is_committed_beyond_a_record_that_failed(
    make_transport: MakeTransport, door: KafkaDoor, topic: str
) -> None:
    """And how often it failed stands beside the offset, for whoever has the partition next."""
    transport = make_transport()
    for number in range(3):
        await transport.publish(an_event(topic, number, urn="urn:same"))
    deliveries = await transport.deliveries(topic, prefetch=4)
    await transport.settle(await take(deliveries), DONE)
    second = await take(deliveries)

    await transport.settle(second, Retry("no", "", 60_000))
    committed = await door.committed(transport.group, [Partition(topic, number) for number in (0, 1)])

    ((offset, metadata),) = committed.values()
    assert offset == 1
    assert metadata.startswith("bullpen:failures=1,rest=60000,until=")
    await nothing_comes(deliveries, for_s=0.3)


@pytest.mark.requirement("X-39", "X-55")
async def test_the_next_member_waits_for_what_is_left_of_a_rest(make_transport: MakeTransport, topic: str) -> None:
    """A deployment in the middle of an outage must not use up the attempts."""
    first, second = (make_transport(session_timeout=2_000) for _ in range(2))
    await first.publish(an_event(topic))
    failed_at = time.monotonic()
    await first.settle(await take(await first.deliveries(topic, prefetch=1)), Retry("no", "", 3_000))
    await first.aclose()

    again = await take(await second.deliveries(topic, prefetch=1))

    assert again.attempt == 2
    assert time.monotonic() - failed_at >= 3.0
    await second.settle(again, DONE)


async def test_a_full_prefetch_waits_for_a_settled_delivery_and_for_nothing_else(
    make_transport: MakeTransport, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With work ready in another partition it must not ask again and again."""
    transport = make_transport()
    for urn in (await urns_by_partition(transport, topic)).values():
        await transport.publish(an_event(topic, urn=urn))
    deliveries = await transport.deliveries(topic, prefetch=1)
    held = await take(deliveries)
    looks = 0
    look = deliveries._membership.lines_of

    def counted(topics: set[str]) -> Any:
        nonlocal looks
        looks += 1
        return look(topics)

    monkeypatch.setattr(deliveries._membership, "lines_of", counted)
    waiting = asyncio.create_task(take(deliveries))
    await asyncio.sleep(0.3)
    assert looks < 20
    await transport.settle(held, DONE)

    await transport.settle(await waiting, DONE)


async def test_a_long_partition_is_read_in_pieces_and_in_order(make_transport: MakeTransport, kafka: MockKafka) -> None:
    """More than may wait here: reading stops while nobody takes, and goes on."""
    topic, count = f"t-{uuid.uuid4().hex[:8]}", 250
    kafka.create_topic(topic, partitions=1)
    transport = make_transport()
    await asyncio.gather(*(transport.publish(an_event(topic, payload=number)) for number in range(count)))
    deliveries = await transport.deliveries(topic, prefetch=1)
    first = await take(deliveries)
    (line,) = deliveries._membership.lines_of({topic})
    async with asyncio.timeout(PATIENCE_S):
        while not line.is_paused:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.02)
    assert len(line.buffer) < count

    seen = [first.payload]
    await transport.settle(first, DONE)
    while len(seen) < count:
        delivery = await take(deliveries)
        seen.append(delivery.payload)
        await transport.settle(delivery, DONE)

    records = [json.loads(record.value or b"") async for record in transport.door.read_all(topic)]
    assert seen == records


@pytest.mark.requirement("X-55")
async def test_only_the_partition_of_a_failed_record_waits(make_transport: MakeTransport, topic: str) -> None:
    transport = make_transport()
    urns = await urns_by_partition(transport, topic)
    deliveries = await transport.deliveries(topic, prefetch=4)
    stuck: set[int] = set()
    seen: list[str] = []
    for number in range(3):
        for urn in urns.values():
            await transport.publish(an_event(topic, number, urn=urn, payload="later"))

    while len(seen) < 3:
        delivery = await take(deliveries)
        if delivery.payload != "later":
            await transport.settle(delivery, DONE)
        elif delivery.urn == urns[0]:
            stuck.add(delivery.attempt)
            await transport.settle(delivery, Retry("no", "", 60_000))
        else:
            seen.append(delivery.urn)
            await transport.settle(delivery, DONE)

    assert seen == [urns[1]] * 3
    assert stuck == {1}


async def test_a_parked_record_is_overtaken(make_transport: MakeTransport, topic: str) -> None:
    """That is what parking is for; with order it is refused."""
    transport = make_transport(retry="park")
    for number in range(2):
        await transport.publish(an_event(topic, payload=number, urn="urn:same"))
    deliveries = await transport.deliveries(topic, prefetch=4)

    first = await take(deliveries)
    await transport.settle(first, Retry("no", "", 500))
    second = await take(deliveries)
    await transport.settle(second, DONE)
    again = await take(deliveries)

    assert [(one.payload, one.attempt) for one in (first, second, again)] == [(0, 1), (1, 1), (0, 2)]
    assert again.source == topic
    await transport.settle(again, DONE)
    with pytest.raises(InvalidOption, match="ordered"):
        await transport.deliveries("other", prefetch=1, ordered=True)


async def test_a_commit_that_fails_makes_no_difference_to_what_comes_next(
    make_transport: MakeTransport, kafka: MockKafka, topic: str
) -> None:
    """A broker that is busy for a moment is asked again; the record is settled once."""
    transport = make_transport()
    await transport.publish(an_event(topic))
    deliveries = await transport.deliveries(topic, prefetch=1)
    delivery = await take(deliveries)
    kafka.fail_next(OFFSET_COMMIT, 14, 14)  # the coordinator is still loading its group

    await transport.settle(delivery, Failed("no", "", Cause.PERMANENT))

    assert await transport.dead_letters(topic).depth() == 1
    await nothing_comes(deliveries, for_s=0.3)


async def test_a_topic_is_consumed_once_per_transport(make_transport: MakeTransport, topic: str) -> None:
    transport = make_transport()
    deliveries = await transport.deliveries(topic, prefetch=1)

    with pytest.raises(InvalidOption, match="does not consume yet"):
        await transport.deliveries(topic, prefetch=1)

    await deliveries.stop()
    await transport.deliveries(topic, prefetch=1)
    await transport.aclose()
    with pytest.raises(ConnectionLost):
        await transport.deliveries(topic, prefetch=1)


async def test_several_topics_share_one_membership(make_transport: MakeTransport, kafka: MockKafka, topic: str) -> None:
    other = f"{topic}-other"
    kafka.create_topic(other, partitions=1)
    transport = make_transport()
    first, second = await transport.deliveries(topic, prefetch=1), await transport.deliveries(other, prefetch=1)

    await transport.publish(an_event(topic, 1))
    await transport.publish(an_event(other, 2))
    one, two = await take(first), await take(second)

    assert (one.source, two.source) == (topic, other)
    for delivery in (one, two):
        await transport.settle(delivery, DONE)


# ---- groups ------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("X-55")
async def test_a_dead_member_is_noticed_after_the_session_timeout(
    make_transport: MakeTransport, kafka: MockKafka, topic: str
) -> None:
    """Not before: somebody who is only slow must not lose partitions. Not after that of anybody else: 10 s."""
    session_ms = 2_000
    survivor = make_transport(session_timeout=session_ms)
    await survivor.publish(an_event(topic))
    arguments = {"address": kafka.address, "group": survivor.group, "session_timeout": session_ms}
    held, _ = await die_holding_one(f"{__name__}:transport_of", arguments, topic)
    died = time.monotonic()

    again = await take(await survivor.deliveries(topic, prefetch=1))

    waited_s = time.monotonic() - died
    assert again.id == held
    assert 0.6 * session_ms / 1000 < waited_s < 9, "the last heartbeat was up to a quarter earlier"
    await survivor.settle(again, DONE)


@pytest.mark.requirement("X-55")
async def test_the_last_retry_topic_takes_all_further_failures(
    make_transport: MakeTransport, door: KafkaDoor, topic: str
) -> None:
    transport = make_transport(retry="park", retry_topics=2)
    await transport.publish(an_event(topic))
    deliveries = await transport.deliveries(topic, prefetch=1)

    for _ in range(4):
        await transport.settle(await take(deliveries), Retry("no", "", 1))
    last = await take(deliveries)
    await transport.settle(last, DONE)

    assert last.attempt == 5
    parked = [len([1 async for _ in door.read_all(f"{topic}-retry-{number}")]) for number in (1, 2, 3)]
    assert parked == [1, 3, 0]


async def test_a_delivery_whose_partition_moved_cannot_be_settled(make_transport: MakeTransport, topic: str) -> None:
    transport = make_transport()
    await transport.publish(an_event(topic))
    delivery = await take(await transport.deliveries(topic, prefetch=1))

    await transport.aclose()

    assert delivery.is_lost
    with pytest.raises(DeliveryLost, match="another member"):
        await transport.settle(delivery, DONE)


# ---- addresses and errors ----------------------------------------------------------------------------------------


def test_brokers_say_how_they_let_us_in() -> None:
    plain = Brokers.parse("a:9092, b:9092", client_id="shop").as_options()
    tls = ssl.create_default_context()
    safe = Brokers.parse("a:9093", tls=tls, username="ada", password="secret", sasl_mechanism="SCRAM-SHA-256")

    assert plain["bootstrap_servers"] == ["a:9092", "b:9092"]
    assert (plain["security_protocol"], plain["client_id"]) == ("PLAINTEXT", "shop")
    options = safe.as_options()
    assert (options["security_protocol"], options["ssl_context"]) == ("SASL_SSL", tls)
    assert (options["sasl_plain_username"], options["sasl_plain_password"]) == ("ada", "secret")
    assert options["sasl_mechanism"] == "SCRAM-SHA-256"
    assert "secret" not in repr(safe)
    for wrong in ("", "a:1,,b:2"):
        with pytest.raises(InvalidOption, match="brokers"):
            Brokers.parse(wrong)


@pytest.mark.parametrize(
    ("error", "ours"),
    [
        (aiokafka.errors.CommitFailedError(), PartitionLost),
        (aiokafka.errors.IllegalStateError(), PartitionLost),
        (aiokafka.errors.TopicAuthorizationFailedError(), ServerRefused),
        (aiokafka.errors.MessageSizeTooLargeError(), ServerRefused),
        (aiokafka.errors.KafkaConnectionError(), ConnectionLost),
        (TimeoutError(), ConnectionLost),
        (ConnectionLost("known"), ConnectionLost),
    ],
)
def test_the_drivers_errors_become_ours(error: Exception, ours: type[Exception]) -> None:
    assert isinstance(translate(error), ours)


@pytest.mark.parametrize("options", [{"group": ""}, {"retry": "later"}, {"retry_topics": 0}, {"session_timeout": 1}])
async def test_wrong_options_are_refused_when_the_transport_is_made(
    make_transport: MakeTransport, options: dict[str, Any]
) -> None:
    with pytest.raises(InvalidOption, match=next(iter(options))):
        make_transport(**options)


async def test_delays_are_refused(make_transport: MakeTransport, topic: str) -> None:
    with pytest.raises(InvalidOption, match="delay"):
        await make_transport().publish(an_event(topic), delay_ms=5)


async def test_waiting_for_other_jobs_is_refused_and_the_record_stays(
    make_transport: MakeTransport, topic: str
) -> None:
    transport = make_transport()
    await transport.publish(an_event(topic))
    deliveries = await transport.deliveries(topic, prefetch=1)

    with pytest.raises(InvalidOption, match="cannot wait for other jobs"):
        await transport.settle(await take(deliveries), WaitingChildren())

    again = await take(deliveries)
    assert again.attempt == 1
    await transport.settle(again, DONE)


# ---- dead letters and faults -------------------------------------------------------------------------------------


@pytest.mark.requirement("X-5", "X-40")
async def test_a_redrive_that_is_cut_short_loses_nothing_and_may_be_repeated(
    make_transport: MakeTransport, kafka: MockKafka, topic: str
) -> None:
    """Sent, and then the process dies before the tombstone: twice with one identity, never none."""
    transport = make_transport()
    event = an_event(topic)
    await transport.publish(event)
    deliveries = await transport.deliveries(topic, prefetch=1)
    await transport.settle(await take(deliveries), Failed("no", "", Cause.PERMANENT))
    store = transport.dead_letters(topic)
    (letter,) = await store.list()

    kafka.fail_next(PRODUCE, 0, *[7] * 1_000)  # one record is taken, and then the brokers say: not in time, again
    arguments = json.dumps({"address": kafka.address, "group": transport.group})
    with Child.module("tests.transports.redriver", f"{__name__}:transport_of", arguments, topic, cwd=ROOT) as doomed:
        first = await take(deliveries)
        doomed.kill()
        assert "redriven" not in doomed.output
    kafka.forgive(PRODUCE)
    assert await store.get(letter.id) == letter
    await transport.settle(first, DONE)
    assert await store.redrive(letter.id) == event.id

    second = await take(deliveries)
    await transport.settle(second, DONE)
    assert [(came.id, came.attempt) for came in (first, second)] == [(event.id, 1)] * 2
    assert await store.depth() == 0


@pytest.mark.requirement("W-45")
async def test_a_dead_letter_that_is_refused_stops_nobody(
    make_transport: MakeTransport, kafka: MockKafka, topic: str
) -> None:
    """The record itself stays in its topic, and the next one is delivered."""
    transport = make_transport()
    for number in range(2):
        await transport.publish(an_event(topic, number, urn="urn:same"))
    deliveries = await transport.deliveries(topic, prefetch=1)
    first = await take(deliveries)
    kafka.fail_next(PRODUCE, 29)  # not allowed to write there

    settled = await transport.settle(first, Failed("no", "", Cause.PERMANENT))

    assert settled.dead_letter is None
    assert settled.dead_letter_problem is not None
    assert "refused" in settled.dead_letter_problem
    second = await take(deliveries)
    assert second.payload["number"] == 1
    await transport.settle(second, DONE)


async def test_what_a_topic_of_dead_letters_holds_besides_letters_harms_nobody(
    make_transport: MakeTransport, door: KafkaDoor, topic: str
) -> None:
    transport = make_transport()
    store = transport.dead_letters(topic)
    await door.send(f"{topic}-dlq", key=b"odd", value=b"\xff")

    (letter,) = await store.list()

    assert (letter.id, letter.source, letter.message_id) == ("odd", topic, "")
    assert await store.discard("odd")
    assert await store.list() == []


async def test_letters_of_a_topic_that_does_not_exist_are_none(make_transport: MakeTransport) -> None:
    assert await make_transport().dead_letters("never-used").list() == []


@pytest.mark.requirement("W-55", "S-36")
async def test_an_outage_is_told_once_and_so_is_its_end(
    kafka: MockKafka, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also to a consumer that has nothing to do; afterwards it goes on."""
    caplog.set_level(logging.INFO)
    client = KafkaClient(kafka.address, workflow=uuid.uuid4().hex[:8], policy=quick_policy(), session_timeout=2_000)
    seen = asyncio.Queue[str]()

    async def handle(delivery: Delivery) -> None:
        seen.put_nowait(delivery.urn)

    with listening() as heard:
        await client.consume(topic, handle)
        await client.produce(topic, "pay", {"urn": "urn:1"})
        assert await asyncio.wait_for(seen.get(), PATIENCE_S) == "urn:1"
        with kafka.down():
            await heard.wait("transport.disconnected")
            assert not await client.is_healthy()
        await heard.wait("transport.connected", 2)
        await client.produce(topic, "pay", {"urn": "urn:2"})
        assert await asyncio.wait_for(seen.get(), PATIENCE_S) == "urn:2"

    assert len(lines(caplog.records, "Kafka connection is back")) == 1
    lost = [record for record in caplog.records if record.getMessage().startswith("Kafka connection lost")]
    assert len(lost) == 1
    driver = [(record.name, record.msg) for record in caplog.records if _is_warning_of(record, "aiokafka")]
    assert len(driver) == len(set(driver))  # it tried 200 times a second, with a line for each
    await client.close()


def _is_warning_of(record: logging.LogRecord, driver: str) -> bool:
    return record.name.split(".")[0] == driver and record.levelno >= logging.WARNING
