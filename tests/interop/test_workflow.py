"""A Node service drives a workflow in Python, and a workflow in Python drives a Node worker."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import redis

from bullpen._kernel.backoff import Backoff
from bullpen.app import Bullpen
from bullpen.ports.bindings import BullMQ, BullMQEvent, DefaultJobOptions
from bullpen.settings import Settings
from tests.workflow.kit import Event, Order, OrderTransition, Shelf, Status, define, failing, transitions

from ._sides import PeerSide
from ._wait import until_event


@pytest_asyncio.fixture(loop_scope="session")
async def app(interop_url: str, client: redis.Redis) -> AsyncIterator[Bullpen]:
    made = Bullpen(settings=Settings.load(environ={}, redis_url=interop_url))
    yield made
    await made.aclose()


def on_queue(*events: Event, **options: Any) -> BullMQ[Event]:
    quick = DefaultJobOptions(attempts=3, backoff=Backoff.fixed(10))
    mapped = [BullMQEvent(queue="orders", event=event, job_name=event.value) for event in events]
    return BullMQ(events=mapped, default_job_options=quick, **options)


@pytest.mark.requirement("W-16", "W-28", "W-47", "W-49")
async def test_a_node_producer_drives_a_workflow(node: PeerSide, app: Bullpen, client: redis.Redis) -> None:
    shelf = Shelf()
    shelf.put()
    seen: list[Any] = []

    async def look(entity: Order, payload: Any) -> Order:
        seen.append(payload)
        return entity

    paying = OrderTransition(event=Event.PAY, from_=Status.NEW, to=Status.PAID, actions=[look])
    workflow = app.workflow(
        define(shelf, transitions=[paying, *transitions()[1:]]), bullmq=on_queue(Event.PAY, Event.PACK, Event.SHIP)
    )
    await workflow.start()

    for name, payload in (("pay", {"amount": 5, "é": "日本"}), ("pack", None), ("ship", None)):
        job_id = await node.add("orders", name, {"urn": "urn:1", "payload": payload})
        await until_event(client, "orders", "completed", job_id=job_id)

    assert shelf.updates == [Status.PAID, Status.PACKED, Status.SHIPPED]
    assert seen == [{"amount": 5, "é": "日本"}]


@pytest.mark.requirement("W-41", "W-42", "W-43", "X-38", "X-43", "X-46")
async def test_node_reads_why_an_event_of_its_own_was_dead_lettered(
    node: PeerSide, app: Bullpen, client: redis.Redis
) -> None:
    shelf = Shelf()
    shelf.put()
    broken = OrderTransition(event=Event.PAY, from_=Status.NEW, to=Status.PAID, actions=[failing(OSError("bank away"))])
    workflow = app.workflow(define(shelf, transitions=[broken]), bullmq=on_queue(Event.PAY))
    await workflow.start()

    job_id = await node.add("orders", "pay", {"urn": "urn:1"}, attempts=3, backoff={"type": "fixed", "delay": 5})
    await until_event(client, "orders", "failed", job_id=job_id)
    lost = await node.add("orders", "refund", {"urn": "urn:1"}, attempts=3)
    await until_event(client, "orders", "failed", job_id=lost)

    assert shelf.orders["urn:1"].status == Status.FAILED
    waiting: Any = client.lrange("bull:orders-dlq:wait", 0, -1)
    entries = [await node.peer.call("getJob", queue="orders-dlq", jobId=entry.decode()) for entry in waiting]
    told = {entry["data"]["originalJobId"]: entry for entry in entries}
    assert told[job_id]["name"] == "pay-failed"
    assert (told[job_id]["data"]["attemptsMade"], told[job_id]["data"]["error"]["message"]) == (3, "bank away")
    assert told[lost]["data"]["attemptsMade"] == 1
    assert "no event is mapped to 'refund'" in told[lost]["data"]["error"]["message"]


@pytest.mark.requirement("W-28", "W-79", "W-80")
async def test_a_sent_event_drives_a_node_worker(node: PeerSide, app: Bullpen, client: redis.Redis) -> None:
    """Plain, delayed and prioritised: Node sees ordinary jobs with urn and payload."""
    workflow = app.workflow(define(Shelf()), bullmq=on_queue(Event.PAY, Event.PACK, Event.SHIP))

    low = await workflow.send(Event.PACK, "urn:1", {"n": 2}, priority=10)
    high = await workflow.send(Event.PAY, "urn:1", {"n": 1}, priority=1, idempotency_key="k", correlation_id="c-1")
    late = await workflow.send(Event.SHIP, "urn:1", delay=50)
    await node.start_worker("w", "orders", {"kind": "echo"})
    for job in (low, high, late):
        await until_event(client, "orders", "completed", job_id=job.id)

    read = {job.id: await node.peer.call("getJob", queue="orders", jobId=job.id) for job in (low, high, late)}
    assert read[high.id]["returnvalue"] == {"echo": {"urn": "urn:1", "payload": {"n": 1}}}
    assert read[high.id]["processedOn"] <= read[low.id]["processedOn"]
    assert (read[late.id]["name"], read[late.id]["data"]) == ("ship", {"urn": "urn:1"})
    assert read[late.id]["delay"] in (0, 50)
    assert high.id == "pay~urn%3A1~k"
