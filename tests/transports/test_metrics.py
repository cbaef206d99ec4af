"""What dashboards read: the exact names, counted from what really happened, on every transport alike."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from bullpen.app import Bullpen
from bullpen.errors import PermanentError, PublishFailed
from bullpen.plugins.messaging import MessagingClient
from bullpen.plugins.metrics import MessagingMetrics
from bullpen.plugins.transports.bullmq import BullMQClient
from bullpen.plugins.transports.kafka import KafkaClient
from bullpen.plugins.transports.memory import MemoryClient, MemoryTransport
from bullpen.plugins.transports.rabbitmq import DelayLadder, RabbitMQClient, Topology
from bullpen.ports.bindings import AnyEvent, AnyTransport
from bullpen.ports.metrics import Metric, Sample
from bullpen.ports.transport import Delivery
from bullpen.settings import Settings
from bullpen.testing import FaultProxy, RedisServer
from bullpen.testing.contracts.transport import quick_policy
from tests.transports._listening import PATIENCE_S, listening
from tests.transports.scenario import Event, Order, Shop

Watched = list[MessagingClient[Any]]


@pytest.fixture
def watched() -> Watched:
    """Clients that are asked for gauges."""
    return []


@pytest.fixture
def metrics(watched: Watched) -> Iterator[MessagingMetrics]:
    made = MessagingMetrics(lambda: watched)
    yield made
    made.close()
    made.close()


async def collect(metrics: MessagingMetrics) -> dict[str, Metric]:
    return {metric.name: metric for metric in await metrics.collect()}


def values(metric: Metric, *labels: str) -> dict[tuple[str, ...], float]:
    """Value of each sample (how many, for a histogram) by the values of some labels."""
    return {
        tuple(sample.labels[name] for name in labels): sample.count if metric.kind == "histogram" else sample.value
        for sample in metric.samples
    }


def make_client(transport: str, request: pytest.FixtureRequest) -> MessagingClient[Any]:
    policy = quick_policy(attempts=2, pause_ms=20)
    match transport:
        case "bullmq":
            return BullMQClient(request.getfixturevalue("redis_url"), policy=policy)
        case "rabbitmq":
            topology = Topology(delays=DelayLadder(unit_ms=20, levels=9))
            return RabbitMQClient(request.getfixturevalue("rabbit").url, policy=policy, topology=topology)
        case "kafka":
            return KafkaClient(request.getfixturevalue("kafka").address, workflow=uuid.uuid4().hex[:8], policy=policy)
    return MemoryClient(policy=policy)


@pytest.mark.requirement("S-9", "S-32", "S-33", "S-34", "S-35", "S-36", "W-68", "X-25")
@pytest.mark.parametrize("transport", ["memory", "bullmq", "rabbitmq", "kafka"])
async def test_every_number_is_counted_on_every_transport(
    transport: str, metrics: MessagingMetrics, watched: Watched, request: pytest.FixtureRequest
) -> None:
    """One message is done at once, one at its second try, one never."""
    client, queue = make_client(transport, request), f"q-{uuid.uuid4().hex[:8]}"
    watched.append(client)

    async def handle(delivery: Delivery) -> None:
        if delivery.payload == "flaky" and delivery.attempt == 1:
            raise ConnectionError("away")
        if delivery.payload == "bad":
            raise PermanentError("no such order")

    with listening() as heard:
        await client.consume(queue, handle)
        for kind in ("good", "flaky", "bad"):
            await client.produce(queue, "paid", {"urn": f"urn:{kind}", "payload": kind})
        await heard.wait("delivery.settled", 4)
    at = (transport, queue)
    async with asyncio.timeout(PATIENCE_S):
        while True:  # brokers count what is acknowledged a moment later
            found = await collect(metrics)
            if values(found["queue_depth_messages"], "transport", "queue")[at] == 0:
                break
            await asyncio.sleep(0.02)
    await client.close()

    by_queue = {name: metric for name, metric in found.items() if "channel" not in name and "status" not in name}
    mine = {name: values(metric, "transport", "queue") for name, metric in by_queue.items()}
    assert mine["queue_message_publish_duration_seconds"][at] == 3
    assert mine["queue_message_consume_duration_seconds"][at] == 4
    assert mine["queue_wait_time_seconds"][at] >= 3
    assert mine["queue_message_ack_total"][at] == 2
    assert mine["queue_message_nack_total"][at] == 2
    assert mine["queue_message_redelivery_total"][at] == 1
    assert mine["queue_dead_letters_messages"][at] == 1
    assert mine["queue_worker_utilisation_ratio"][at] == 0
    if transport != "kafka":  # nobody can tell there
        assert mine["queue_consumers_active"][at] == 1
    failed = values(found["queue_message_failed_total"], "queue", "outcome")
    assert (failed[queue, "retry"], failed[queue, "failed"]) == (1, 1)
    (tries,) = [sample for sample in found["queue_message_attempts"].samples if sample.labels["queue"] == queue]
    assert dict(tries.buckets)[1.0] == 2
    assert dict(tries.buckets)[2.0] == 3
    assert values(found["queue_connection_status"], "transport")[(transport,)] == 1
    after = await collect(metrics)
    assert values(after["queue_connection_status"], "transport")[(transport,)] == 0


@pytest.mark.usefixtures("rabbit")  # so that it runs where the broker is
@pytest.mark.requirement("S-37")
async def test_channels_are_counted_where_there_are_channels(
    metrics: MessagingMetrics, request: pytest.FixtureRequest
) -> None:
    client, queue = make_client("rabbitmq", request), f"q-{uuid.uuid4().hex[:8]}"

    with listening() as heard:
        await client.consume(queue, lambda _: None)
        await client.produce(queue, "paid", {"urn": "urn:1"})
        await heard.wait("delivery.settled")
        await client.close()
        await heard.wait("transport.channel_closed", 2)
    found = await collect(metrics)

    for name in ("queue_channel_opens_total", "queue_channel_closes_total"):
        counted = values(found[name], "transport", "purpose")
        assert (counted["rabbitmq", "publisher"], counted["rabbitmq", "consumer"]) == (1, 1)


@pytest.mark.requirement("S-36", "W-55", "W-68")
async def test_a_server_that_goes_away_shows_and_its_gauges_stay(
    metrics: MessagingMetrics, watched: Watched, redis_server: RedisServer, queue_name: str
) -> None:
    """And whoever collects gets an answer, not an error."""
    with FaultProxy(redis_server) as proxy:
        client = BullMQClient(proxy.url, policy=quick_policy(), health_timeout=500)
        watched.append(client)
        await client.consume(queue_name, lambda _: None)
        assert values((await collect(metrics))["queue_connection_status"], "transport") == {("bullmq",): 1}

        with proxy.outage():
            gone = await collect(metrics)
        async with asyncio.timeout(PATIENCE_S):
            while True:  # nobody tells when a server is back
                if values((await collect(metrics))["queue_connection_status"], "transport") == {("bullmq",): 1}:
                    break
                await asyncio.sleep(0.05)
        await client.close()

    assert values(gone["queue_connection_status"], "transport") == {("bullmq",): 0}
    assert values(gone["queue_depth_messages"], "queue") == {(queue_name,): 0}


@pytest.fixture
async def client() -> AsyncIterator[MemoryClient]:
    made = MemoryClient(policy=quick_policy(), publish_deadline=50)
    yield made
    await made.close()


async def test_what_is_refused_or_lost_is_counted(metrics: MessagingMetrics, client: MemoryClient) -> None:
    """The broker goes away under a handler, and stays away."""
    assert isinstance(client.transport, MemoryTransport)
    broker = client.transport.broker

    async def handle(_: Delivery) -> None:
        broker.stop()

    with listening() as heard:
        await client.consume("orders", handle)
        await client.produce("orders", "paid", {"urn": "urn:1"})
        await heard.wait("delivery.lost")
    with pytest.raises(PublishFailed):
        await client.produce("orders", "paid", {"urn": "urn:2"})
    found = await collect(metrics)

    assert values(found["queue_message_lost_total"], "queue") == {("orders",): 1}
    assert values(found["queue_message_publish_failed_total"], "queue") == {("orders",): 1}


async def test_after_close_nothing_is_counted(client: MemoryClient) -> None:
    metrics = MessagingMetrics()
    metrics.close()

    await client.produce("orders", "paid", {"urn": "urn:1"})

    found = await collect(metrics)
    assert found["queue_message_publish_duration_seconds"].samples == []
    assert all(isinstance(sample, Sample) for metric in found.values() for sample in metric.samples)


@pytest.mark.requirement("S-34", "W-68")
async def test_an_app_counts_all_its_clients_in_one_place(queue_name: str) -> None:
    """Whatever its workflows and messages travel on, each name is there once."""
    app = Bullpen(settings=Settings.load(environ={"BULLPEN_TRANSPORT": "memory"}))
    shop = Shop(pause_ms=1)
    shop.orders["urn:order:1"] = Order("urn:order:1")
    events = [AnyEvent(source=queue_name, event=Event.PAY, job_name="pay")]
    workflow = app.workflow(shop.definition(), events=AnyTransport(events=events))
    with listening() as heard:
        await workflow.start()
        await workflow.send(Event.PAY, "urn:order:1", {"amount": 5})
        await heard.wait("delivery.settled")

    found = await app.metrics()
    await workflow.close()
    await app.aclose()

    names = [metric.name for metric in found]
    assert len(names) == len(set(names))
    by_name = {metric.name: metric for metric in found}
    assert values(by_name["queue_message_ack_total"], "transport", "queue") == {("memory", queue_name): 1}
    assert values(by_name["queue_depth_messages"], "transport", "queue") == {("memory", queue_name): 0}
