"""What only the BullMQ transport has: jobs that can be tracked and that Node can read, one queue object per queue."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from bullpen._kernel.backoff import Backoff
from bullpen._kernel.policy import DeadLetterPolicy, RetryPolicy
from bullpen.errors import ConnectionLost, InvalidOption, PublishFailed
from bullpen.plugins.messaging import MessagingClient
from bullpen.plugins.transports import available, load
from bullpen.plugins.transports.bullmq import BullMQClient, BullMQTransport
from bullpen.ports.bindings import BullMQ, BullMQEvent, DeadLetterQueue, DefaultJobOptions, RedisAddress
from bullpen.ports.transport import Delivery, Event
from bullpen.queue import JobState, Queue
from bullpen.redis import Connection
from bullpen.testing import FaultProxy, RedisServer
from bullpen.testing.contracts.transport import quick_policy
from tests.transports._listening import PATIENCE_S, listening

MakeClient = Callable[..., BullMQClient]


@pytest.fixture
async def make_client(redis_url: str) -> AsyncIterator[MakeClient]:
    made: list[BullMQClient] = []

    def make(**options: Any) -> BullMQClient:
        options.setdefault("policy", quick_policy(3, 20))
        client = BullMQClient(redis_url, **options)
        made.append(client)
        return client

    yield make
    for client in made:
        await client.close(0)


async def no_op(delivery: Delivery) -> None:
    """A handler that succeeds."""


@pytest.mark.requirement("W-27", "W-28", "W-31", "W-58")
async def test_produce_returns_a_job_that_can_be_tracked(
    make_client: MakeClient, redis_server: RedisServer, queue_name: str
) -> None:
    client = make_client()

    async def handle(delivery: Delivery) -> dict[str, int]:
        return {"amount": delivery.payload["amount"]}

    await client.consume(queue_name, handle)
    job = await client.produce(queue_name, "pay", {"urn": "urn:order:1", "payload": {"amount": 5}})

    assert await job.result(timeout=20_000) == {"amount": 5}
    stored: Any = redis_server.client().hgetall(f"bull:{queue_name}:{job.id}")
    assert json.loads(stored[b"data"]) == {"urn": "urn:order:1", "payload": {"amount": 5}}
    assert stored[b"name"] == b"pay"
    assert job.id.startswith("pay~urn%3Aorder%3A1~")


@pytest.mark.requirement("W-21", "W-22", "W-23", "W-32")
async def test_client_defaults_apply_and_one_job_may_differ(make_client: MakeClient, queue_name: str) -> None:
    client = make_client(policy=BullMQ[str]().policy())

    usual = await client.produce(queue_name, "pay", {"urn": "urn:1"})
    other = await client.produce(
        queue_name, "pay", {"urn": "urn:1"}, attempts=7, backoff=Backoff.fixed(50), priority=4, remove_on_complete=True
    )

    wire = json.loads(usual.record.raw_opts)
    assert (wire["attempts"], wire["backoff"]) == (3, {"type": "exponential", "delay": 30_000})
    assert (wire["removeOnComplete"], wire["removeOnFail"]) == (1_000, 5_000)
    wire = json.loads(other.record.raw_opts)
    assert (wire["attempts"], wire["backoff"], wire["priority"]) == (7, {"type": "fixed", "delay": 50}, 4)
    assert (wire["removeOnComplete"], wire["removeOnFail"]) == (True, 5_000)


@pytest.mark.many
@pytest.mark.requirement("W-29", "W-30", "W-58")
async def test_ten_thousand_jobs_need_one_queue_object(
    make_client: MakeClient, redis_server: RedisServer, queue_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, made, make = make_client(), [], Queue.__init__

    def counted(queue: Queue, name: str, *args: Any, **options: Any) -> None:
        made.append(name)
        make(queue, name, *args, **options)

    monkeypatch.setattr(Queue, "__init__", counted)

    await client.produce_many(queue_name, [("pay", {"urn": f"urn:{number}"}) for number in range(10_000)])

    assert made == [queue_name]
    assert client.queue(queue_name) is client.queue(queue_name)
    assert redis_server.client().llen(f"bull:{queue_name}:wait") == 10_000


@pytest.mark.requirement("W-30")
async def test_all_queues_share_one_connection(
    make_client: MakeClient, redis_server: RedisServer, queue_name: str
) -> None:
    client = make_client()
    await client.produce(queue_name, "pay", {"urn": "urn:1"})
    before = len(redis_server.client().client_list())

    for number in range(20):
        await client.produce(f"{queue_name}-{number}", "pay", {"urn": "urn:1"})

    assert len(redis_server.client().client_list()) == before


@pytest.mark.requirement("W-4", "W-41", "W-42", "W-43", "W-44", "W-58")
async def test_a_dead_letter_is_a_job_of_the_dead_letter_queue(
    make_client: MakeClient, redis_server: RedisServer, queue_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = make_client()

    async def fail(delivery: Delivery) -> None:
        raise OSError("partner away")

    with listening() as heard:
        await client.consume(queue_name, fail)
        job = await client.produce(queue_name, "pay", {"urn": "urn:1", "payload": 5})
        await heard.wait("dead_letter.written")

    redis: Any = redis_server.client()
    (entry_id,) = redis.lrange(f"bull:{queue_name}-dlq:wait", 0, -1)
    entry = redis.hgetall(f"bull:{queue_name}-dlq:{entry_id.decode()}")
    data = json.loads(entry[b"data"])
    assert entry[b"name"] == b"pay-failed"
    assert (data["originalJobId"], data["originalJobName"]) == (job.id, "pay")
    assert data["originalData"] == {"urn": "urn:1", "payload": 5}
    assert data["error"]["message"] == "partner away"
    assert "OSError" in data["error"]["stack"]
    assert data["attemptsMade"] == 3
    assert data["failedAt"].endswith("Z")
    opts = json.loads(entry[b"opts"])
    assert (opts["removeOnComplete"], opts["removeOnFail"]) == (False, False)
    assert await client.queue(queue_name).state_of(job.id) is JobState.FAILED
    assert len([record for record in caplog.records if "sent to DLQ" in record.getMessage()]) == 1


@pytest.mark.requirement("W-16", "W-67")
async def test_a_trace_context_travels_where_bullmq_keeps_it(make_client: MakeClient, queue_name: str) -> None:
    """So that the spans of a Node service and ours are one trace."""
    client = make_client()

    job = await client.produce(queue_name, "pay", {"urn": "urn:1"}, headers={"traceparent": "00-ab-cd-01"})

    assert json.loads(json.loads(job.record.raw_opts)["tm"]) == {"traceparent": "00-ab-cd-01"}


async def test_a_foreign_trace_context_harms_nobody(make_client: MakeClient, queue_name: str) -> None:
    client = make_client()
    seen: list[Any] = []

    async def handle(delivery: Delivery) -> None:
        seen.append(dict(delivery.headers))

    await client.queue(queue_name).add("pay", {"urn": "urn:1"}, tm="not json")
    with listening() as heard:
        await client.consume(queue_name, handle)
        await heard.wait("delivery.settled")

    assert seen == [{}]


@pytest.mark.requirement("W-65")
async def test_instances_share_a_queue_and_each_job_goes_to_one(make_client: MakeClient, queue_name: str) -> None:
    clients = [make_client(concurrency=5) for _ in range(3)]
    runs: list[str] = []

    async def handle(delivery: Delivery) -> None:
        runs.append(delivery.urn)
        await asyncio.sleep(0)

    with listening() as heard:
        for client in clients:
            await client.consume(queue_name, handle)
        await clients[0].produce_many(queue_name, [("pay", {"urn": f"urn:{number}"}) for number in range(60)])
        await heard.wait("delivery.settled", 60)

    assert sorted(runs) == sorted(f"urn:{number}" for number in range(60))


@pytest.mark.requirement("X-54")
async def test_order_holds_over_processes_and_concurrency(make_client: MakeClient, queue_name: str) -> None:
    """Two clients that ask for order get one job of the queue at a time between them."""
    clients = [make_client(policy=quick_policy(5, 30)) for _ in range(2)]
    runs: list[tuple[int, int]] = []

    async def handle(delivery: Delivery) -> None:
        runs.append((delivery.payload, delivery.attempt))
        if delivery.payload % 3 == 0 and delivery.attempt < 3:
            raise OSError("not yet")

    with listening() as heard:
        for client in clients:
            await client.consume(queue_name, handle, concurrency=5, ordered=True)
        for number in range(6):
            await clients[0].produce(queue_name, "pay", {"urn": "urn:same", "payload": number})
        while sum(fields["is_acked"] for fields in heard.of("delivery.settled")) < 6:
            await heard.wait("delivery.settled", len(heard.of("delivery.settled")) + 1)

    assert runs == [(0, 1), (0, 2), (0, 3), (1, 1), (2, 1), (3, 1), (3, 2), (3, 3), (4, 1), (5, 1)]


@pytest.mark.leaves_queue_broken
async def test_a_handler_whose_lock_is_lost_is_stopped(
    make_client: MakeClient, redis_server: RedisServer, queue_name: str
) -> None:
    client = make_client(worker_options={"lock": 400, "stalled_interval": 60_000})
    entered, stopped = asyncio.Event(), asyncio.Event()

    async def handle(delivery: Delivery) -> None:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    with listening() as heard:
        await client.consume(queue_name, handle)
        job = await client.produce(queue_name, "pay", {"urn": "urn:1"})
        await asyncio.wait_for(entered.wait(), PATIENCE_S)
        redis_server.client().set(f"bull:{queue_name}:{job.id}:lock", "somebody else")
        await asyncio.wait_for(stopped.wait(), PATIENCE_S)
        await heard.wait("delivery.lost")


async def test_a_full_broker_is_a_failed_send(start_server: Any, queue_name: str) -> None:
    server = start_server(args=("--maxmemory", "1mb"))
    client = BullMQClient(server.url)

    with pytest.raises(PublishFailed, match=f"Failed to add job to queue {queue_name}: .*out of memory"):
        await client.produce(queue_name, "pay", {"urn": "urn:1"})

    await client.close()


async def test_a_prefix_keeps_queues_apart(make_client: MakeClient, redis_server: RedisServer, queue_name: str) -> None:
    """Both for who produces and for who consumes: neither sees the queue of the same name under another prefix."""
    usual, shop = make_client(), make_client(prefix="shop")
    came: asyncio.Queue[str] = asyncio.Queue()

    async def handle(delivery: Delivery) -> None:
        came.put_nowait(delivery.urn)

    await usual.produce(queue_name, "pay", {"urn": "urn:usual"})
    await shop.consume(queue_name, handle)
    job = await shop.produce(queue_name, "pay", {"urn": "urn:shop"})

    assert await asyncio.wait_for(came.get(), PATIENCE_S) == "urn:shop"
    await job.result(timeout=20_000)
    assert came.empty()
    assert redis_server.client().exists(f"shop:{queue_name}:{job.id}") == 1
    assert redis_server.client().llen(f"bull:{queue_name}:wait") == 1


async def test_an_add_is_given_up_at_its_deadline(redis_url: str, queue_name: str) -> None:
    """The transport's own, without the client above it, which would give up as well."""
    with FaultProxy(redis_url) as proxy:
        transport = BullMQTransport(proxy.url, add_deadline=300)
        with proxy.outage():
            began = time.monotonic()
            with pytest.raises(ConnectionLost):
                await transport.publish(Event(source=queue_name, name="pay", urn="urn:1", payload=None, id="pay-1"))
            assert time.monotonic() - began < 10
        await transport.aclose()


@pytest.mark.requirement("W-56", "X-49")
async def test_the_health_check_writes_no_key(
    make_client: MakeClient, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    client = make_client()

    assert await client.is_healthy()
    assert redis_server.client().dbsize() == 0

    away = BullMQClient(Connection(host="127.0.0.1", port=1), health_timeout=500)
    assert not await away.is_healthy()
    assert [record for record in caplog.records if record.getMessage().startswith("BullMQ health check failed: ")]
    await away.close()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"policy": RetryPolicy(backoff=Backoff.linear(5))}, "backoff"),
        ({"job_options": {"remove_on_fial": 5}}, "remove_on_fail"),
        ({"publish_deadline": 0}, "deadline"),
    ],
)
def test_wrong_options_are_refused_when_the_client_is_made(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidOption, match=complaint):
        BullMQClient("redis://localhost:1", **options)


async def test_dead_letters_with_a_foreign_name_are_refused(make_client: MakeClient, queue_name: str) -> None:
    client = make_client(policy=RetryPolicy(dead_letters=DeadLetterPolicy(store="queue", name="graveyard")))

    with pytest.raises(InvalidOption, match="a name that begins with"):
        await client.consume(queue_name, no_op)


@pytest.mark.requirement("W-20", "W-50")
async def test_a_binding_describes_its_client(redis_server: RedisServer, redis_url: str, queue_name: str) -> None:
    """Host, port, password and database part by part, or a URL, or what the app uses."""
    host, _, port = redis_url.removeprefix("redis://").split("/")[0].rpartition(":")
    address = RedisAddress(host=host, port=int(port), db=0)
    events = [BullMQEvent(queue=queue_name, event="paid")]
    options = DefaultJobOptions(attempts=5, backoff=Backoff.fixed(100), remove_on_complete=False)
    binding = BullMQ(
        events=events,
        connection=address,
        default_job_options=options,
        dead_letter_queue=DeadLetterQueue(suffix="-dead"),
    )

    for client in (
        BullMQClient.from_binding(binding),
        BullMQClient.from_binding(BullMQ(events=events, connection=redis_url)),
        BullMQClient.from_binding(BullMQ(events=events), connection=redis_url),
    ):
        assert await client.is_healthy()
        await client.close()

    described = BullMQClient.from_binding(binding)
    job = await described.produce(queue_name, "pay", {"urn": "urn:1"})
    wire = json.loads(job.record.raw_opts)
    assert (wire["attempts"], wire["backoff"]["delay"], wire["removeOnComplete"]) == (5, 100, False)
    assert described.transport.dead_letters(queue_name).name == f"{queue_name}-dead"
    await described.close()


@pytest.mark.requirement("W-57")
async def test_after_close_nothing_is_reachable(make_client: MakeClient, queue_name: str) -> None:
    client = make_client()
    await client.close()

    with pytest.raises(ConnectionLost):
        client.queue(queue_name)


# ---- finding transports ------------------------------------------------------------------------------------------


@pytest.mark.requirement("W-52")
def test_only_the_transport_that_is_asked_for_is_imported() -> None:
    """A program on BullMQ must run where no Kafka or RabbitMQ driver is installed."""
    code = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("aiokafka", "aio_pika", "aiormq"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
from bullpen.plugins.transports import load
load("memory"), load("bullmq")
for name in ("kafka", "rabbitmq"):
    try:
        load(name)
    except ImportError as error:
        print(error)
"""

    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    kafka, rabbitmq = answer.stdout.splitlines()
    assert 'pip install "bullpen-mq[kafka]"' in kafka
    assert 'pip install "bullpen-mq[rabbitmq]"' in rabbitmq


def test_transports_are_found_by_name() -> None:
    assert available() == ["bullmq", "kafka", "memory", "rabbitmq"]
    assert load("bullmq") is BullMQClient
    assert issubclass(load("memory"), MessagingClient)
    with pytest.raises(InvalidOption, match="one of bullmq, kafka, memory, rabbitmq"):
        load("pigeon")
