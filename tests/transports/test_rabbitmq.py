"""What only the RabbitMQ transport has: topology, confirms, the ladder, limits that lose nothing, reconnection."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aio_pika
import pytest

from bullpen._kernel.outcome import Cause, Completed, Delayed, Failed, Retry
from bullpen._kernel.policy import DeadLetterPolicy, RetryPolicy
from bullpen.errors import ConnectionLost, InvalidOption, NotTakenNow, PermanentError, PublishFailed, ServerRefused
from bullpen.plugins import _consumer, _reports
from bullpen.plugins.messaging import MessagingClient
from bullpen.plugins.transports.rabbitmq import DelayLadder, QueueSpec, RabbitMQClient, RabbitMQTransport, Topology
from bullpen.plugins.transports.rabbitmq._link import translated
from bullpen.ports.bindings import RabbitMQ, RabbitMQEvent
from bullpen.ports.transport import Delivery
from bullpen.testing import Child
from bullpen.testing.contracts.transport import an_event, quick_policy, take
from bullpen.testing.rabbitmq import RabbitServer
from tests.transports._listening import PATIENCE_S, lines, listening
from tests.transports._tap import BASIC_ACK, tap

DONE = Completed(b"null")
QUICK = DelayLadder(unit_ms=20, levels=9)


ROOT = Path(__file__).resolve().parents[2]
MakeTransport = Callable[..., RabbitMQTransport]


def transport_of(url: str) -> RabbitMQTransport:
    """For processes of ours."""
    return RabbitMQTransport(url, topology=Topology(delays=QUICK))


def unique(prefix: str = "q") -> str:
    return f"{prefix}-{uuid.uuid4().hex[:8]}"


def messages(**changes: Any) -> Topology:
    """The preset of scheduled messages under names of its own."""
    base = unique("birthday")
    return Topology.scheduled_messages(
        **{
            "exchange_name": f"{base}.messages",
            "dlx_name": f"{base}.messages.dlx",
            "queue_name": f"{base}.messages.queue",
            "dlq_name": f"{base}.messages.dlq",
            "delays": QUICK,
            **changes,
        }
    )


@pytest.fixture
async def make_transport(rabbit: RabbitServer) -> AsyncIterator[MakeTransport]:
    made: list[RabbitMQTransport] = []

    def make(**options: Any) -> RabbitMQTransport:
        options.setdefault("topology", Topology(delays=QUICK))
        transport = RabbitMQTransport(rabbit.url, **options)
        made.append(transport)
        return transport

    yield make
    for transport in made:
        await transport.aclose()


async def fill(transport: RabbitMQTransport, queue: str) -> None:
    """Publish until it is refused. The broker says so a moment after the limit was reached, and nobody knows when."""
    with contextlib.suppress(NotTakenNow):
        for number in itertools.count():
            await transport.publish(an_event(queue, number))


async def queue_exists(connection: aio_pika.abc.AbstractConnection, queue: str) -> bool:
    try:
        await (await connection.channel()).declare_queue(queue, passive=True)
    except aio_pika.exceptions.ChannelNotFoundEntity:
        return False
    return True


# ---- publishing --------------------------------------------------------------------------------------------------


@pytest.mark.requirement("S-4", "S-6", "S-7", "S-12")
async def test_a_message_is_persistent_json_on_the_topic_exchange(
    make_transport: MakeTransport, rabbit: RabbitServer
) -> None:
    """And declaring everything a second time is harmless."""
    topology = messages()
    queue = topology.queues[0].name
    for _ in range(2):
        transport = make_transport(topology=topology)
        await transport.publish(an_event(queue, name="anniversary", headers={"tenantId": "t"}))

    async with await aio_pika.connect(rabbit.url) as connection:
        channel = await connection.channel()
        message = await (await channel.get_queue(queue)).get()

    assert message is not None
    assert (message.exchange, message.routing_key) == (topology.exchange, "anniversary")
    assert message.delivery_mode == aio_pika.DeliveryMode.PERSISTENT
    assert message.content_type == "application/json"
    assert message.body.startswith(b'{"urn":"urn:order:1","payload":')
    assert (message.headers["x-retry-count"], message.headers["tenantId"]) == (0, "t")


@pytest.mark.requirement("S-7", "X-64")
async def test_a_message_that_no_queue_takes_is_a_failed_publish(
    make_transport: MakeTransport, rabbit: RabbitServer
) -> None:
    """The broker confirms it all the same: only its return tells."""
    topology = messages()
    queue = topology.queues[0].name
    transport = make_transport(topology=topology)
    await transport.publish(an_event(queue))
    async with await aio_pika.connect(rabbit.url) as connection:
        await (await connection.channel()).queue_delete(queue)

    same_id = an_event(queue)
    results = await asyncio.gather(*(transport.publish(same_id) for _ in range(3)), return_exceptions=True)

    assert [type(result) for result in results] == [ServerRefused] * 3
    assert "no queue is bound for the message" in str(results[0])
    await transport.publish(same_id)  # the next one makes the queue again


@pytest.mark.requirement("S-47", "X-67")
async def test_a_full_queue_refuses_and_drops_nothing(make_transport: MakeTransport) -> None:
    """What was confirmed is there; what was refused stays with whoever sent it."""
    topology = messages(max_length=5)
    queue = topology.queues[0].name
    transport = make_transport(topology=topology)

    confirmed, refused, numbers = set(), 0, itertools.count()
    while refused < 10:  # the broker says so a moment after the limit was reached, and nobody knows when
        try:
            confirmed.add((await transport.publish(an_event(queue, next(numbers)))).id)
        except NotTakenNow:
            refused += 1
    deliveries = await transport.deliveries(queue, prefetch=50)
    received = set()
    for _ in range(len(confirmed)):
        delivery = await take(deliveries)
        received.add(delivery.id)
        await transport.settle(delivery, DONE)

    assert received == confirmed


@pytest.mark.requirement("S-8", "X-67")
async def test_a_publish_waits_for_room_until_its_deadline(rabbit: RabbitServer) -> None:
    """A refusal is no loss: the message is with whoever sends it, and is sent again by itself."""
    topology = messages(max_length=5)
    queue = topology.queues[0].name
    transport = RabbitMQTransport(rabbit.url, topology=topology)
    patient = MessagingClient(transport, policy=quick_policy())
    hasty = MessagingClient(transport, policy=quick_policy(), publish_deadline=1_000)
    await fill(transport, queue)
    with pytest.raises(PublishFailed, match="queue is full"):
        await hasty.produce(queue, "birthday", {"urn": "urn:user:1"})

    waiting = asyncio.create_task(patient.produce(queue, "birthday", {"urn": "urn:user:2"}))
    handled = asyncio.Queue[str]()
    await patient.consume(queue, lambda delivery: handled.put_nowait(delivery.urn))

    await asyncio.wait_for(waiting, PATIENCE_S)
    while await asyncio.wait_for(handled.get(), PATIENCE_S) != "urn:user:2":
        pass
    await patient.close()


@pytest.mark.requirement("S-8")
async def test_a_batch_is_confirmed_as_a_whole(rabbit: RabbitServer) -> None:
    client = RabbitMQClient(rabbit.url, topology=Topology(delays=QUICK))
    queue = unique()
    results = await client.produce_many(queue, [("pay", {"urn": f"urn:{number}"}) for number in range(500)])

    assert not [result for result in results if isinstance(result, PublishFailed)]
    assert (await client.transport.depth(queue)).messages == 500
    await client.close()


# ---- retries -----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("S-20", "S-24", "S-25", "X-2", "X-61")
async def test_a_transient_error_is_six_deliveries_with_doubling_pauses(rabbit: RabbitServer) -> None:
    """The schedule 2, 4, 8, 16, 32 s, a hundred times faster; then a dead letter."""
    topology = messages()
    queue = topology.queues[0].name
    client = RabbitMQClient.for_scheduled_messages(rabbit.url, topology=topology, retry_delay_ms=20)
    at: list[float] = []
    attempts: list[int] = []

    async def fail(delivery: Delivery) -> None:
        at.append(time.monotonic())
        attempts.append(delivery.attempt)
        raise ConnectionError("provider away")

    with listening() as heard:
        consumer = await client.consume(queue, fail)
        await client.produce(queue, "birthday", {"urn": "urn:user:1"})
        await heard.wait("dead_letter.written")

    assert consumer.concurrency == 5
    assert attempts == [1, 2, 3, 4, 5, 6]
    pauses = [round((later - earlier) * 1000) for earlier, later in itertools.pairwise(at)]
    assert all(pause >= expected - 2 for pause, expected in zip(pauses, (20, 40, 80, 160, 320), strict=True)), pauses
    (letter,) = await client.transport.dead_letters(queue).list()
    assert (letter.cause, letter.attempts_made) == ("exhausted", 6)
    await client.close()


@pytest.mark.requirement("S-20", "S-44", "X-70")
async def test_deliveries_are_handled_at_the_same_time_up_to_the_prefetch(rabbit: RabbitServer) -> None:
    """Five at once make 600 a minute of half a second each; one after the other they would make 120."""
    topology = messages()
    queue = topology.queues[0].name
    client = RabbitMQClient.for_scheduled_messages(rabbit.url, topology=topology)
    all_in, most = asyncio.Barrier(5), 0

    async def handle(delivery: Delivery) -> None:
        nonlocal most
        most = max(most, consumer.running)
        await all_in.wait()  # opens when five are here

    with listening() as heard:
        consumer = await client.consume(queue, handle)
        await client.produce_many(queue, [("birthday", {"urn": f"urn:user:{number}"}) for number in range(20)])
        await heard.wait("delivery.settled", 20)

    assert most == 5
    await client.close()


@pytest.mark.requirement("S-41", "S-42", "X-1", "X-2")
def test_the_preset_follows_its_settings() -> None:
    usual = RabbitMQClient.for_scheduled_messages("amqp://localhost").policy
    linear = RabbitMQClient.for_scheduled_messages(
        "amqp://localhost", max_retries=3, retry_delay_ms=500, retry_backoff="linear"
    ).policy

    assert usual.attempts == 6
    assert usual.backoff is not None
    assert linear.backoff is not None
    pauses = [usual.backoff.delay_for(n, lambda: 0.5) for n in range(1, 6)]
    assert pauses == [2_000, 4_000, 8_000, 16_000, 32_000]
    assert [linear.backoff.delay_for(n, lambda: 0.5) for n in range(1, 4)] == [500, 1_000, 1_500]
    assert usual.dead_letters.queue_for("any") == "birthday.messages.dlq"
    with pytest.raises(InvalidOption, match="'exponential' or 'linear'"):
        RabbitMQClient.for_scheduled_messages("amqp://localhost", retry_backoff="random")  # type: ignore[arg-type]


@pytest.mark.requirement("S-23", "S-26")
async def test_a_permanent_error_is_one_delivery(rabbit: RabbitServer) -> None:
    topology = messages()
    queue = topology.queues[0].name
    client = RabbitMQClient.for_scheduled_messages(rabbit.url, topology=topology)
    runs = 0

    async def refuse(delivery: Delivery) -> None:
        nonlocal runs
        runs += 1
        raise PermanentError("no such user")

    with listening() as heard:
        await client.consume(queue, refuse)
        await client.produce(queue, "birthday", {"urn": "urn:user:1"})
        await heard.wait("dead_letter.written")
        settled = await heard.wait("delivery.settled")

    assert runs == 1
    assert (settled["outcome"], settled["is_acked"]) == ("failed", False)
    await client.close()


@pytest.mark.requirement("X-62", "X-63")
async def test_a_longer_pause_does_not_block_a_shorter_one(make_transport: MakeTransport) -> None:
    """In one queue with mixed pauses the second would wait for the first."""
    transport, queue = make_transport(), unique()
    for number in (1, 2):
        await transport.publish(an_event(queue, number))
    deliveries = await transport.deliveries(queue, prefetch=2)
    held = {delivery.payload["number"]: delivery for delivery in [await take(deliveries), await take(deliveries)]}

    started = time.monotonic()
    await transport.settle(held[1], Retry("no", "", 1_500))
    await transport.settle(held[2], Retry("no", "", 40))
    first, second = await take(deliveries), await take(deliveries)

    assert (first.payload["number"], second.payload["number"]) == (2, 1)
    assert time.monotonic() - started >= 1.5
    for delivery in (first, second):
        await transport.settle(delivery, DONE)


async def test_a_pause_longer_than_the_ladder_goes_round_again(make_transport: MakeTransport) -> None:
    transport, queue = make_transport(topology=Topology(delays=DelayLadder(unit_ms=50, levels=2))), unique()
    started = time.monotonic()

    await transport.publish(an_event(queue), delay_ms=400)  # the ladder holds 150 ms at most
    deliveries = await transport.deliveries(queue, prefetch=1)
    delivery = await take(deliveries)
    assert time.monotonic() - started >= 0.4
    again_from = time.monotonic()
    await transport.settle(delivery, Delayed(400))
    again = await take(deliveries)

    assert time.monotonic() - again_from >= 0.4
    assert (delivery.attempt, again.attempt) == (1, 1)
    await transport.settle(again, DONE)


class Minute:
    """A delivery that wants to be retried through a ladder of its own, whose one queue keeps messages for a minute."""

    def __init__(self, url: str, *, publish_timeout: int = 2_000) -> None:
        self.ladder, self.queue = DelayLadder(unit_ms=60_000, levels=1, prefix=unique("ladder")), unique()
        topology = Topology(delays=self.ladder)
        self.transport = RabbitMQTransport(url, topology=topology, publish_timeout=publish_timeout)
        self.sender = RabbitMQTransport(url, topology=topology)
        self.event = an_event(self.queue)

    async def fails_to_retry(self, error: type[Exception], spoil: Callable[[], Awaitable[object]]) -> None:
        """The copy has no place: the message comes again with its old number, and its slot is free."""
        await self.sender.publish(self.event)
        deliveries = await self.transport.deliveries(self.queue, prefetch=1)
        delivery = await take(deliveries)
        await spoil()

        with pytest.raises(error):
            await self.transport.settle(delivery, Retry("no", "", 60_000))

        self.again = await take(deliveries)
        assert (self.again.id, self.again.attempt) == (self.event.id, 1)
        await self.transport.settle(self.again, DONE)
        await self.transport.aclose()
        await self.sender.aclose()


@pytest.mark.requirement("X-61")
async def test_the_original_is_kept_when_the_ladder_is_full(rabbit: RabbitServer) -> None:
    minute = Minute(rabbit.url)

    async def fill_up() -> None:
        name = minute.ladder.prefix
        limit = ("set_policy", "--apply-to", "queues", name, f"^{name}", '{"max-length": 1}')
        await asyncio.to_thread(rabbit.control, *limit)
        with contextlib.suppress(NotTakenNow):
            for number in range(100):
                await minute.sender.publish(an_event(minute.queue, number), delay_ms=60_000)

    await minute.fails_to_retry(NotTakenNow, fill_up)


@pytest.mark.requirement("X-61")
async def test_the_original_is_kept_when_the_ladder_leads_nowhere(rabbit: RabbitServer) -> None:
    minute = Minute(rabbit.url)

    async def unbind() -> None:
        async with await aio_pika.connect(rabbit.url) as connection:
            channel = await connection.channel()
            queue = await channel.get_queue(minute.ladder.entrance, ensure=False)
            await queue.unbind(minute.ladder.entrance, "1.#")

    await minute.fails_to_retry(ServerRefused, unbind)


@pytest.mark.requirement("X-61")
async def test_the_original_is_kept_when_the_connection_breaks_under_the_copy(rabbit: RabbitServer) -> None:
    async with tap(rabbit.port()) as wire:
        minute = Minute(f"amqp://guest:guest@127.0.0.1:{wire.port}/", publish_timeout=300)

        async def cut() -> None:
            wire.cut_at(minute.ladder.entrance.encode())
            asyncio.get_running_loop().create_task(heal())

        async def heal() -> None:
            await wire.struck.wait()
            await asyncio.sleep(1)  # longer than the copy is tried
            wire.heal()

        await minute.fails_to_retry(ConnectionLost, cut)


@pytest.mark.requirement("S-3", "S-4")
async def test_what_somebody_deleted_is_made_again(make_transport: MakeTransport, rabbit: RabbitServer) -> None:
    """The ladder's first exchange: without it no retry has a place to rest."""
    ladder = DelayLadder(unit_ms=20, levels=2, prefix=unique("ladder"))
    transport, queue = make_transport(topology=Topology(delays=ladder)), unique()
    await transport.publish(an_event(queue))
    deliveries = await transport.deliveries(queue, prefetch=1)
    delivery = await take(deliveries)
    async with await aio_pika.connect(rabbit.url) as connection:
        await (await connection.channel()).exchange_delete(ladder.entrance)

    await transport.settle(delivery, Retry("no", "", 20))

    again = await take(deliveries)
    assert again.attempt == 2
    await transport.settle(again, DONE)


@pytest.mark.requirement("X-5", "X-40")
async def test_a_redrive_that_is_cut_short_loses_nothing_and_may_be_repeated(
    make_transport: MakeTransport, rabbit: RabbitServer
) -> None:
    """Sent, and then the process dies before the entry is removed: twice with one identity, never none."""
    transport, queue = make_transport(), unique()
    event = an_event(queue)
    await transport.publish(event)
    deliveries = await transport.deliveries(queue, prefetch=1)
    await transport.settle(await take(deliveries), Failed("no", "", Cause.PERMANENT))
    store = transport.dead_letters(queue)
    (letter,) = await store.list()

    async with tap(rabbit.port()) as wire:
        wire.hold_at(BASIC_ACK)  # removing the entry is the first thing that it acknowledges
        arguments = json.dumps({"url": f"amqp://guest:guest@127.0.0.1:{wire.port}/"})
        with Child.module(
            "tests.transports.redriver", f"{__name__}:transport_of", arguments, queue, cwd=ROOT
        ) as doomed:
            await asyncio.wait_for(wire.struck.wait(), PATIENCE_S)
            doomed.kill()
            assert "redriven" not in doomed.output
    async with asyncio.timeout(PATIENCE_S):
        while await store.depth() != 1:  # noqa: ASYNC110 - the broker tells nobody that it took it back
            await asyncio.sleep(0.02)
    assert await store.get(letter.id) == letter
    assert await store.redrive(letter.id) == event.id

    for _ in range(2):
        came = await take(deliveries)
        assert (came.id, came.attempt) == (event.id, 1)
        await transport.settle(came, DONE)
    assert await store.depth() == 0


# ---- what the broker does by itself ------------------------------------------------------------------------------


@pytest.mark.requirement("S-48", "X-67", "X-69")
async def test_a_message_that_waits_too_long_is_a_dead_letter(make_transport: MakeTransport) -> None:
    """Under the routing key of dead letters: its own key would lead nowhere."""
    topology = messages(ttl_ms=50)
    queue = topology.queues[0].name
    transport = make_transport(topology=topology)
    event = an_event(queue, name="birthday")
    await transport.publish(event)
    store = transport.dead_letters(queue)

    async with asyncio.timeout(PATIENCE_S):
        while not await store.depth():  # noqa: ASYNC110 - the broker tells nobody
            await asyncio.sleep(0.02)
    (letter,) = await store.list()

    assert (letter.message_id, letter.cause) == (event.id, "expired")
    assert letter.data == {"urn": event.urn, "payload": event.payload}
    assert letter.failed_at
    assert await store.discard(letter.id)


@pytest.mark.requirement("X-68")
async def test_a_message_that_outlives_its_consumers_is_a_dead_letter(make_transport: MakeTransport) -> None:
    """One that kills whoever takes it must not go round for ever."""
    queue = unique()
    spec = QueueSpec(name=queue, routing_keys=(queue,), dead_letter_queue=f"{queue}-dlq", delivery_limit=2)
    topology = Topology(queues=(spec,), delays=QUICK)
    await make_transport(topology=topology).publish(an_event(queue))

    for _ in range(3):
        doomed = make_transport(topology=topology)
        await take(await doomed.deliveries(queue, prefetch=1))
        await doomed.aclose()
    store = make_transport(topology=topology).dead_letters(queue)
    async with asyncio.timeout(PATIENCE_S):
        while not await store.depth():  # noqa: ASYNC110 - the broker tells nobody
            await asyncio.sleep(0.02)

    (letter,) = await store.list()
    assert letter.cause == "delivery_limit"


@pytest.mark.requirement("X-68")
def test_a_delivery_limit_below_the_attempts_is_refused() -> None:
    spec = QueueSpec(name="q", routing_keys=("q",), delivery_limit=6)

    with pytest.raises(InvalidOption, match="more than the policy's 6 attempts"):
        RabbitMQClient("amqp://localhost", policy=RetryPolicy(attempts=6), topology=Topology(queues=(spec,)))


async def test_a_queue_that_is_something_else_is_refused_at_once(make_transport: MakeTransport) -> None:
    """Waiting would not cure it, so it is raised when somebody begins to consume."""
    queue = unique()
    one = QueueSpec(name=queue, routing_keys=(queue,), dead_letter_queue=f"{queue}-dlq")
    other = QueueSpec(name=queue, routing_keys=(queue,), dead_letter_queue=f"{queue}-dlq", ttl_ms=5)
    await make_transport(topology=Topology(queues=(one,), delays=QUICK)).publish(an_event(queue))

    with pytest.raises(ServerRefused, match="has this name with other arguments"):
        await make_transport(topology=Topology(queues=(other,), delays=QUICK)).deliveries(queue, prefetch=1)


async def test_a_deleted_queue_is_made_again_and_consumed(make_transport: MakeTransport, rabbit: RabbitServer) -> None:
    """The broker cancels the consumer; nobody else would ever tell us."""
    transport, queue = make_transport(), unique()
    deliveries = await transport.deliveries(queue, prefetch=1)
    await transport.publish(an_event(queue))
    await transport.settle(await take(deliveries), DONE)

    async with await aio_pika.connect(rabbit.url) as connection:
        channel = await connection.channel()
        await channel.queue_delete(queue)
        async with asyncio.timeout(PATIENCE_S):
            while not await queue_exists(connection, queue):  # noqa: ASYNC110 - whoever consumes it makes it
                await asyncio.sleep(0.02)
    await transport.publish(an_event(queue, 2))

    delivery = await take(deliveries)
    assert delivery.payload["number"] == 2
    await transport.settle(delivery, DONE)


@pytest.mark.requirement("W-56", "X-49")
async def test_a_consumer_that_the_broker_no_longer_lets_receive_is_not_healthy(
    make_transport: MakeTransport, rabbit: RabbitServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker answers every question, and nothing comes: a process that only pings it would call itself ready."""
    monkeypatch.setattr(_consumer, "_DEAF_S", 0.3)
    client, queue = MessagingClient(make_transport(), policy=quick_policy()), unique()
    came = asyncio.Event()

    async def handle(delivery: Delivery) -> None:
        came.set()

    await client.consume(queue, handle)
    await client.produce(queue, "paid", {"urn": "urn:a"})
    await asyncio.wait_for(came.wait(), PATIENCE_S)
    before = await client.is_healthy()
    async with await aio_pika.connect(rabbit.url) as connection, asyncio.timeout(PATIENCE_S):
        while True:  # whoever is first: ours makes it again as it should be
            channel = await connection.channel()
            await channel.queue_delete(queue)
            with contextlib.suppress(aio_pika.exceptions.ChannelPreconditionFailed):
                await channel.declare_queue(queue, durable=False)
                break
        while await client.is_healthy():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.02)
        answers = await client.transport.check()
        await (await connection.channel()).queue_delete(queue)
        while not await client.is_healthy():  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.02)
    await client.close()

    assert before
    assert answers.ok, "the broker itself is there"


async def test_a_dead_letter_that_the_broker_refuses_is_left_to_the_broker(
    make_transport: MakeTransport, rabbit: RabbitServer
) -> None:
    """Nobody is stopped, and the message is not lost: the broker dead-letters it without our context."""
    topology = messages()
    queue, dlq = topology.queues[0].name, topology.queues[0].dead_letter_queue
    assert dlq is not None
    transport = make_transport(topology=topology)
    deliveries = await transport.deliveries(queue, prefetch=1)
    await transport.publish(an_event(queue))
    delivery = await take(deliveries)
    async with await aio_pika.connect(rabbit.url) as connection:
        channel = await connection.channel()
        await (await channel.get_queue(dlq)).unbind(topology.dead_letter_exchange, "dlq")
        settled = await transport.settle(delivery, Failed("no", "", Cause.PERMANENT))
        await (await channel.get_queue(dlq)).bind(topology.dead_letter_exchange, "dlq")

    assert settled.dead_letter is None
    assert settled.dead_letter_problem is not None
    assert "no queue is bound for the message" in settled.dead_letter_problem


# ---- connections -------------------------------------------------------------------------------------------------


@pytest.mark.requirement("S-2", "S-37", "X-71")
async def test_one_connection_with_separate_channels_or_two(
    make_transport: MakeTransport, rabbit: RabbitServer
) -> None:
    """Two keep acknowledgements apart from the flow control that publishers are under."""

    async def connections() -> int:
        told = await asyncio.to_thread(rabbit.control, "list_connections", "client_properties")
        return told.count("bullpen")

    queue, before = unique(), await connections()
    with listening() as heard:
        transport = make_transport()
        await transport.publish(an_event(queue))
        await transport.settle(await take(await transport.deliveries(queue, prefetch=1)), DONE)
        one = await connections()
        purposes = [fields["purpose"] for fields in heard.of("transport.channel_opened")]
        await transport.aclose()
        await heard.wait("transport.channel_closed", 2)
    client = RabbitMQClient(rabbit.url, topology=Topology(delays=QUICK), separate_connections=True)
    two = client.transport
    await two.publish(an_event(queue))
    await two.settle(await take(await two.deliveries(queue, prefetch=1)), DONE)

    assert one - before == 1
    assert {"publisher", "consumer"} <= set(purposes)
    assert await connections() - before == 2
    assert (await two.check()).ok
    await client.close()


@pytest.mark.requirement("S-17", "X-49")
async def test_a_question_that_is_cancelled_half_way_does_not_break_the_connection(rabbit: RabbitServer) -> None:
    """A busy process asks for health and depth with a time limit. Cancelled between the opening of a channel and its
    answer, the driver's next frame ended the connection, and with it every delivery of the process."""
    client, queue = RabbitMQClient(rabbit.url, topology=Topology(delays=QUICK)), unique()
    transport = client.transport
    await transport.publish(an_event(queue))
    questions: list[tuple[Callable[[], Coroutine[Any, Any, Any]], int]] = [
        (transport.check, 1),
        (partial(transport.depth, queue), 1),
        (transport.dead_letters(queue).depth, 1),
        (transport.dead_letters(queue).list, 5),
        (lambda: transport.publish(an_event(unique())), 10),  # declares first
    ]
    with listening() as heard:
        held = await take(await transport.deliveries(queue, prefetch=1))
        for question, stride in questions:
            for steps in range(0, 60, stride):
                asking = asyncio.create_task(question())
                for _ in range(steps):
                    await asyncio.sleep(0)
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
        assert (await transport.check()).ok
        await transport.settle(held, DONE)
        opened = [fields["purpose"] for fields in heard.of("transport.channel_opened")]

        assert heard.of("transport.disconnected") == []
    await client.close()
    assert opened.count("look") == 1


@pytest.mark.requirement("S-37")
async def test_acknowledgements_on_a_broken_connection_do_not_hold_up_the_close(rabbit: RabbitServer) -> None:
    """The driver puts them into a bounded queue, which nobody empties once the connection is gone."""
    count, queue = 300, unique()
    gate, inside = asyncio.Event(), asyncio.Semaphore(0)

    async def handle(delivery: Delivery) -> None:
        inside.release()
        await gate.wait()

    async with tap(rabbit.port()) as wire:
        url = f"amqp://guest:guest@127.0.0.1:{wire.port}/"
        client = RabbitMQClient(url, topology=Topology(delays=QUICK), concurrency=count)
        await client.consume(queue, handle)
        await client.produce_many(queue, [("pay", {"urn": f"urn:{number}"}) for number in range(count)])
        for _ in range(count):
            await inside.acquire()
        with listening() as heard:
            gate.set()
            wire.cut()
            await heard.wait("transport.disconnected")
            began = time.monotonic()
            await client.close()

    assert time.monotonic() - began < 10  # a handler may take 30 s, and none was running


@pytest.mark.requirement("S-2")
async def test_the_heartbeat_is_a_minute_unless_the_address_says_otherwise(
    make_transport: MakeTransport, rabbit: RabbitServer
) -> None:
    usual = make_transport()
    hurried = RabbitMQTransport(f"{rabbit.url}?heartbeat=7", topology=Topology(delays=QUICK))
    for transport in (usual, hurried):
        await transport.publish(an_event(unique()))

    told = await asyncio.to_thread(rabbit.control, "list_connections", "timeout")
    await hurried.aclose()

    assert {"60", "7"} <= set(told.split())


@pytest.mark.requirement("S-3", "S-36", "W-55")
async def test_a_connection_that_comes_back_finds_its_consumers_again(
    rabbit: RabbitServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The fault is told once when it begins and once when it ends; connection status follows. That it is the same when
    the broker itself was away, the suite of all transports shows."""
    caplog.set_level(logging.INFO)
    async with tap(rabbit.port()) as wire:
        url = f"amqp://guest:guest@127.0.0.1:{wire.port}/"
        client = RabbitMQClient(url, topology=Topology(delays=QUICK), policy=quick_policy())
        queue, seen = unique(), asyncio.Queue[str]()

        async def handle(delivery: Delivery) -> None:
            seen.put_nowait(delivery.urn)

        with listening() as heard:
            await client.consume(queue, handle)
            await client.produce(queue, "pay", {"urn": "urn:before"})
            assert await asyncio.wait_for(seen.get(), PATIENCE_S) == "urn:before"
            wire.cut()
            await heard.wait("transport.disconnected")
            wire.heal()
            await heard.wait("transport.connected", 2)
            await client.produce(queue, "pay", {"urn": "urn:after"})
            async with asyncio.timeout(PATIENCE_S):
                while await seen.get() != "urn:after":
                    pass  # its acknowledgement was cut off: the first one comes again

        await client.close()
    assert len(lines(caplog.records, "RabbitMQ connection is back")) == 1
    lost = [record for record in caplog.records if record.getMessage().startswith("RabbitMQ connection lost")]
    assert len(lost) == 1


@pytest.mark.many
async def test_a_broker_that_is_away_is_one_line_a_minute(
    rabbit: RabbitServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds of waiting publishes asked for a connection, each on its own, and the driver told of every attempt."""
    caplog.set_level(logging.INFO)
    async with tap(rabbit.port()) as wire:
        url = f"amqp://guest:guest@127.0.0.1:{wire.port}/"
        client = RabbitMQClient(url, topology=Topology(delays=QUICK), policy=quick_policy())
        queue = unique()
        with listening() as heard:
            await client.produce(queue, "pay", {"urn": "urn:before"})
            caplog.clear()
            wire.cut()
            batch = asyncio.create_task(client.produce_many(queue, [("pay", {"urn": f"urn:{n}"}) for n in range(200)]))
            await heard.wait("transport.disconnected")
            dialled = wire.accepted
            await asyncio.sleep(1)
            attempts = wire.accepted - dialled
            said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
            monkeypatch.setattr(_reports, "REMIND_AFTER_S", 0.1)
            await _until(
                lambda: any("RabbitMQ has been unreachable for" in record.getMessage() for record in caplog.records)
            )
            wire.heal()
            await heard.wait("transport.connected", 2)
            results = await batch
        await client.close()

    assert [text.partition(":")[0] for text in said] == ["RabbitMQ connection lost, reconnecting until it works"]
    assert attempts <= 8  # the pauses grow from 50 ms to a second
    assert [result for result in results if isinstance(result, Exception)] == []


async def test_a_clean_close_warns_of_nothing(rabbit: RabbitServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    client, handled = RabbitMQClient(rabbit.url, topology=Topology(delays=QUICK)), asyncio.Event()

    async def handle(delivery: Delivery) -> None:
        handled.set()

    queue = unique()
    await client.consume(queue, handle)
    await client.produce(queue, "pay", {"urn": "urn:1"})
    await asyncio.wait_for(handled.wait(), PATIENCE_S)
    await client.close()

    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110 - log lines tell nobody
            await asyncio.sleep(0.01)


@asynccontextmanager
async def shortage(rabbit: RabbitServer) -> AsyncIterator[None]:
    """The broker believes that it is short of memory: it reads nothing from connections that publish."""
    limit = ("set_vm_memory_high_watermark", "absolute")
    await asyncio.to_thread(rabbit.control, *limit, "1MB")
    try:
        yield
    finally:
        await asyncio.to_thread(rabbit.control, *limit, "1GB")


@pytest.mark.requirement("S-3", "S-52", "X-68")
async def test_a_broker_short_of_memory_is_waited_for(rabbit: RabbitServer) -> None:
    """Its connection is kept: who breaks it gets every delivery again, as often as their limit allows."""
    transport = RabbitMQTransport(rabbit.url, topology=Topology(delays=QUICK), publish_timeout=300)
    client = MessagingClient(transport, policy=quick_policy(), concurrency=5, publish_deadline=2_000)
    queue, urns = unique(), [f"urn:{number}" for number in range(20)]
    runs: list[str] = []

    async def handle(delivery: Delivery) -> None:
        runs.append(delivery.urn)

    async with RabbitMQClient(rabbit.url, topology=Topology(delays=QUICK)) as sender:
        for urn in urns:
            await sender.produce(queue, "pay", {"urn": urn})
    with listening() as heard:
        async with shortage(rabbit):
            with pytest.raises(PublishFailed, match="short of memory"):
                await client.produce(queue, "pay", {"urn": "urn:late"})
            await client.consume(queue, handle)
            assert not await client.is_healthy()
        async with asyncio.timeout(PATIENCE_S):
            while not {*urns} <= {*runs}:  # noqa: ASYNC110 - the late one may have arrived as well
                await asyncio.sleep(0.02)
        assert [runs.count(urn) for urn in urns] == [1] * len(urns)
        assert not heard.of("transport.disconnected")
    assert await client.is_healthy()
    await client.close()


@pytest.mark.requirement("S-3")
async def test_a_cancellation_that_nobody_asked_for_is_a_lost_connection() -> None:
    """The driver cancels who waits when it gives a connection up; a consumer must not end of it. Ours is obeyed."""

    async def wait_for(answer: asyncio.Future[None]) -> None:
        with translated():
            await answer

    answers: list[asyncio.Future[None]] = [asyncio.get_running_loop().create_future() for _ in range(2)]
    theirs, ours = (asyncio.create_task(wait_for(answer)) for answer in answers)
    await asyncio.sleep(0)
    answers[0].cancel()
    ours.cancel()
    await asyncio.wait([theirs, ours])

    assert isinstance(theirs.exception(), ConnectionLost)
    assert ours.cancelled()


async def test_a_frozen_broker_is_noticed(rabbit: RabbitServer) -> None:
    """An open connection proves nothing: health says no in time, and a publish is given up at its deadline."""
    transport, queue = RabbitMQTransport(rabbit.url, topology=Topology(delays=QUICK)), unique()
    await transport.publish(an_event(queue))
    client = MessagingClient(transport, policy=quick_policy(), health_timeout=500, publish_deadline=500)

    with rabbit.paused():
        assert not await client.is_healthy()
        with pytest.raises(PublishFailed, match="no answer within"):
            await client.produce(queue, "pay", {"urn": "urn:2"})

    async with asyncio.timeout(PATIENCE_S):
        while not await client.is_healthy():  # noqa: ASYNC110 - nobody tells when a broker goes on
            await asyncio.sleep(0.05)
    await client.close()


async def test_a_publish_without_a_confirm_is_given_up_with_its_connection(rabbit: RabbitServer) -> None:
    """The connection is open and nobody answers: the next publish opens another one."""
    transport = RabbitMQTransport(rabbit.url, topology=Topology(delays=QUICK), publish_timeout=300)
    queue = unique()
    for _ in range(2):  # the first may be slow: everything is declared
        with contextlib.suppress(ConnectionLost):
            await transport.publish(an_event(queue))
    with listening() as heard:
        with rabbit.paused(), pytest.raises(ConnectionLost, match="in time"):
            await transport.publish(an_event(queue))
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    await transport.publish(an_event(queue))
                    break
                except ConnectionLost:
                    await asyncio.sleep(0.05)

    assert heard.of("transport.disconnected")
    assert heard.of("transport.connected")
    await transport.aclose()


async def test_a_wrong_password_is_told_and_not_waited_for(rabbit: RabbitServer) -> None:
    transport = RabbitMQTransport(rabbit.url.replace("guest:guest", "guest:wrong"))

    with pytest.raises(ServerRefused, match="refused the login"):
        await transport.deliveries(unique(), prefetch=1)
    assert not (await transport.check()).ok
    await transport.aclose()


@pytest.mark.requirement("S-38", "W-50")
async def test_a_binding_describes_its_client(rabbit: RabbitServer) -> None:
    queue = unique()
    binding = RabbitMQ(events=[RabbitMQEvent(queue=queue, event="paid")], urls=["amqp://127.0.0.1:1", rabbit.url])

    client = RabbitMQClient.from_binding(binding, health_timeout=30_000)

    assert await client.is_healthy()  # the second address answers
    assert client.policy == binding.policy()
    await client.close()


@pytest.mark.parametrize("urls", ["", [], "redis://x", ["amqp://a", 5]])
def test_addresses_are_checked_when_the_client_is_made(urls: Any) -> None:
    with pytest.raises(InvalidOption, match="amqp://"):
        RabbitMQTransport(urls)


async def test_without_a_dead_letter_queue_there_is_nothing_to_list(make_transport: MakeTransport) -> None:
    transport = make_transport(dead_letters=DeadLetterPolicy(store="none"))

    with pytest.raises(InvalidOption, match="dead_letters"):
        transport.dead_letters(unique())
