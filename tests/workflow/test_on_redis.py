"""Workflows on real queues: retries, dead letters, delays, priorities, batches, outages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import pytest

from bullpen._kernel.backoff import Backoff
from bullpen.app import Bullpen
from bullpen.errors import DelayJob, InvalidOption, NotConfigured, UnknownEvent
from bullpen.plugins.transports.bullmq import BullMQClient
from bullpen.ports.bindings import BullMQ, BullMQEvent, DefaultJobOptions
from bullpen.queue import Job
from bullpen.settings import Settings
from bullpen.testing import RedisServer
from bullpen.workflow import AnyEvent, AnyTransport, RateLimit, Receipt, RedisAddress
from bullpen.workflow.batch import Batch
from bullpen.workflow.context import step
from bullpen.workflow.service import Workflow
from tests.conftest import StartServer
from tests.transports._listening import Heard, lines, listening
from tests.workflow.kit import Event, Order, OrderTransition, Shelf, Status, define, failing, transitions

AnyWorkflow = Workflow[Order, Any, Event, Status]
Make = Callable[..., AnyWorkflow]
QUICK = DefaultJobOptions(attempts=3, backoff=Backoff.fixed(20))


@pytest.fixture
async def app(redis_url: str) -> AsyncIterator[Bullpen]:
    made = Bullpen(settings=Settings.load(environ={}, redis_url=redis_url))
    yield made
    await made.aclose()


@pytest.fixture
def make(app: Bullpen, queue_name: str) -> Make:
    """A workflow on one queue, whose jobs are named after their events."""

    def making(definition: Any, **options: Any) -> AnyWorkflow:
        given = {
            "events": [
                BullMQEvent(queue=queue_name, event=event, job_name=event.value) for event in definition.all_events()
            ],
            "default_job_options": QUICK,
            **options,
        }
        return app.workflow(definition, bullmq=BullMQ(**given))

    return making


def pay(**changes: Any) -> OrderTransition:
    return OrderTransition(**{"event": Event.PAY, "from_": Status.NEW, "to": Status.PAID, **changes})


async def settled(heard: Heard, count: int, *outcomes: str) -> list[dict[str, Any]]:
    """Wait until so many deliveries have come to their end."""
    wanted = outcomes or ("completed", "failed")

    def ended() -> list[dict[str, Any]]:
        return [fields for fields in heard.of("delivery.settled") if fields["outcome"] in wanted]

    async with asyncio.timeout(60):
        while len(ended()) < count:
            await heard.wait("delivery.settled", len(heard.of("delivery.settled")) + 1, within_s=60)
    return ended()


def client_of(workflow: AnyWorkflow) -> BullMQClient:
    assert isinstance(workflow.client, BullMQClient)
    return workflow.client


@pytest.mark.requirement("W-4", "W-16", "W-47", "W-48", "W-59", "X-46")
async def test_jobs_of_one_queue_cause_events_by_their_names(
    make: Make, queue_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    shelf = Shelf()
    shelf.put()
    workflow = make(define(shelf))

    with listening() as heard:
        await workflow.start()
        for event in (Event.PAY, Event.PACK, Event.SHIP):
            await workflow.send(event, "urn:1", {"n": 1})
        await settled(heard, 3)

    assert shelf.updates == [Status.PAID, Status.PACKED, Status.SHIPPED]
    assert len(lines(caplog.records, f"Initialized BullMQ worker for queue: {queue_name}")) == 1
    assert len(lines(caplog.records, "BullMQ job received")) == 3
    assert len(lines(caplog.records, "BullMQ job processed successfully")) == 3
    assert await workflow.is_healthy()


@pytest.mark.requirement("W-3", "W-15", "W-54", "W-59", "X-38", "X-43")
async def test_exactly_the_last_attempt_parks_the_entity_and_dead_letters_the_job(make: Make, queue_name: str) -> None:
    """Attempts counted by hand come out one short, and nothing ever dies; the queue's own decision is asked."""
    shelf = Shelf()
    before = shelf.put()
    seen: list[tuple[int, Order]] = []

    async def broken(entity: Order, payload: Any) -> Order:
        seen.append((step().attempt, shelf.orders["urn:1"]))
        raise ConnectionError("bank away")

    workflow = make(define(shelf, transitions=[pay(actions=[broken])]))

    with listening() as heard:
        await workflow.start()
        job = await workflow.send(Event.PAY, "urn:1")
        (end,) = await settled(heard, 1)

    assert seen == [(1, before), (2, before), (3, before)]
    assert (end["outcome"], end["attempt"]) == ("failed", 3)
    assert shelf.orders["urn:1"].status == Status.FAILED
    (letter,) = await client_of(workflow).transport.dead_letters(queue_name).list()
    assert (letter.message_id, letter.attempts_made, letter.error_message) == (job.id, 3, "bank away")


@pytest.mark.requirement("W-54", "W-59")
async def test_an_event_that_comes_too_early_is_tried_again_until_its_turn(make: Make) -> None:
    shelf = Shelf()
    shelf.put()
    workflow = make(define(shelf), default_job_options=DefaultJobOptions(attempts=100, backoff=Backoff.fixed(20)))

    with listening() as heard:
        await workflow.start()
        await workflow.send(Event.PACK, "urn:1")
        await heard.wait("delivery.settled")
        await workflow.send(Event.PAY, "urn:1")
        await settled(heard, 2, "completed")

    assert shelf.orders["urn:1"].status == Status.PACKED


@pytest.mark.requirement("X-38")
async def test_with_fail_the_job_completes_and_the_entity_is_parked(make: Make, queue_name: str) -> None:
    shelf = Shelf()
    shelf.put()
    workflow = make(define(shelf, transitions=[pay(actions=[failing(OSError("no"))])], on_action_error="fail"))

    with listening() as heard:
        await workflow.start()
        await workflow.send(Event.PAY, "urn:1")
        (end,) = await settled(heard, 1)

    assert (end["outcome"], shelf.orders["urn:1"].status) == ("completed", Status.FAILED)
    assert await client_of(workflow).transport.dead_letters(queue_name).depth() == 0


async def test_an_action_may_ask_for_a_pause(make: Make) -> None:
    shelf = Shelf()
    shelf.put()
    tries = 0

    async def patient(entity: Order, payload: Any) -> Order:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise DelayJob(10)
        return entity.noted(f"attempt {step().attempt}")

    workflow = make(define(shelf, transitions=[pay(actions=[patient])]))
    with listening() as heard:
        await workflow.start()
        await workflow.send(Event.PAY, "urn:1")
        await settled(heard, 1)

    assert shelf.orders["urn:1"].notes == ("attempt 1",)


@pytest.mark.requirement("W-31", "X-44")
async def test_many_sends_within_a_millisecond_are_many_jobs_and_a_key_makes_them_one(make: Make) -> None:
    workflow = make(define())

    random = {receipt.id for receipt in await asyncio.gather(*(workflow.send(Event.PAY, "urn:1") for _ in range(200)))}
    keyed = {(await workflow.send(Event.PAY, "urn:1", idempotency_key="invoice-7")).id for _ in range(3)}

    assert (len(random), len(keyed)) == (200, 1)


@pytest.mark.requirement("W-80")
async def test_an_event_may_be_sent_for_later(make: Make) -> None:
    shelf = Shelf()
    shelf.put()
    workflow = make(define(shelf))

    with listening() as heard:
        await workflow.start()
        later = await workflow.send(Event.PAY, "urn:1", delay=400)
        assert isinstance(later, Job)
        assert await later.state() == "delayed"
        assert shelf.updates == []
        await settled(heard, 1)

    assert shelf.updates == [Status.PAID]


@pytest.mark.requirement("W-79", "W-67")
async def test_urgent_events_come_first(make: Make) -> None:
    shelf = Shelf()
    order: list[str] = []

    async def note(entity: Order, payload: str) -> Order:
        order.append(payload)
        return entity

    workflow = make(define(shelf, transitions=[pay(to=Status.NEW, actions=[note])]))
    shelf.put()
    for name, priority in (("low", 10), ("high", 1), ("middle", 5)):
        await workflow.send(Event.PAY, "urn:1", name, priority=priority)

    with listening() as heard:
        await workflow.start()
        await settled(heard, 3)

    assert order == ["high", "middle", "low"]


@pytest.mark.requirement("W-81")
async def test_events_that_wait_together_are_handled_in_one_transition(make: Make, queue_name: str) -> None:
    shelf = Shelf()
    shelf.put("urn:1")
    shelf.put("urn:2")
    batches: list[list[Any]] = []

    async def collect(entity: Order, payload: Batch[int]) -> Order:
        batches.append(list(payload))
        for at, amount in enumerate(payload):
            if amount < 0:
                payload.fail(at, ValueError("no payment"))
        await asyncio.sleep(0.05)  # long enough for others to gather
        return entity

    workflow = make(define(shelf, transitions=[pay(to=Status.NEW, actions=[collect])]), batch_size=8)
    for amount in (1, 2, 3, -4, 5, 6, 7, 8, 9, 10):
        await workflow.send(Event.PAY, "urn:1", amount)
    await workflow.send(Event.PAY, "urn:2", 100)

    with listening() as heard:
        await workflow.start()
        ends = await settled(heard, 11)

    assert max(map(len, batches)) > 1
    assert all(len(batch) <= 8 and (batch == [100] or 100 not in batch) for batch in batches)
    assert sorted(end["outcome"] for end in ends) == [*["completed"] * 10, "failed"]
    (letter,) = await client_of(workflow).transport.dead_letters(queue_name).list()
    assert (letter.data["payload"], letter.attempts_made, letter.error_message) == (-4, 3, "no payment")


@pytest.mark.requirement("X-24")
async def test_ids_travel_with_the_event_and_into_those_it_sends(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    shelf = Shelf()
    shelf.put()

    async def go_on(entity: Order, payload: Any) -> Order:
        await workflow.send(Event.PACK, entity.urn)
        return entity

    workflow = make(
        define(shelf, transitions=[pay(actions=[go_on]), *transitions()[1:]]),
        default_job_options=DefaultJobOptions(attempts=50, backoff=Backoff.fixed(20)),
    )
    with listening() as heard:
        await workflow.start()
        await workflow.send(
            Event.PAY, "urn:1", tenant_id="t-1", user_id="u-1", correlation_id="c-1", headers={"traceparent": "00-a-b"}
        )
        await settled(heard, 2, "completed")

    moved = heard.of("workflow.moved")
    assert [(each["event"], each["tenant_id"], each["correlation_id"], each["traceparent"]) for each in moved] == [
        ("pay", "t-1", "c-1", "00-a-b"),
        ("pack", "t-1", "c-1", "00-a-b"),
    ]
    received = lines(caplog.records, "BullMQ job received")
    assert all((line["tenantId"], line["userId"], line["correlationId"]) == ("t-1", "u-1", "c-1") for line in received)


@pytest.mark.requirement("W-6", "W-55")
async def test_an_outage_of_the_server_makes_it_ill_and_ends_by_itself(
    start_server: StartServer, queue_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    server: RedisServer = start_server(persistent=True, args=("--appendfsync", "always"))
    app, shelf = Bullpen(settings=Settings.load(environ={}, redis_url=server.url)), Shelf()
    shelf.put()
    workflow = app.workflow(
        define(shelf), bullmq=BullMQ(events=[BullMQEvent(queue=queue_name, event=Event.PAY)]), client_options={
            "worker_options": {"lock": 1_000, "stalled_interval": 300}, "health_timeout": 500
        }
    )  # fmt: skip
    await workflow.start()
    assert await workflow.is_healthy()

    server.kill()
    assert not await workflow.is_healthy()
    assert "BullMQ health check failed" in caplog.text
    server.restart()

    with listening() as heard:
        await workflow.send(Event.PAY, "urn:1")
        await settled(heard, 1)
    assert shelf.orders["urn:1"].status == Status.PAID
    assert await workflow.is_healthy()
    await app.aclose()


async def test_limits_and_options_of_workers_are_options_of_the_binding(app: Bullpen, redis_url: str) -> None:
    """Also through `RedisAddress`, whose first parts are host and port."""
    address, shelf = urlsplit(redis_url), Shelf()
    limited = BullMQ[Event](
        events=[BullMQEvent(queue="limited", event=Event.PAY), BullMQEvent(queue="free", event=Event.SHIP)],
        connection=RedisAddress(str(address.hostname), address.port or 6379),
        concurrency=10,
        rate_limit={"limited": RateLimit(2, 60_000)},
        worker_options={"lock": 5_000, "stalled_interval": 1_000},
    )
    for number in range(5):
        shelf.put(f"urn:{number}")
    workflow = app.workflow(define(shelf), bullmq=limited)
    receipts: list[Receipt] = [await workflow.send(Event.PAY, f"urn:{number}") for number in range(5)]
    with listening() as heard:
        await workflow.start()
        await settled(heard, 2)
    assert await client_of(workflow).queue("limited").rate_limit_ttl(2) > 0
    assert sorted([await receipt.state() for receipt in receipts]) == ["completed"] * 2 + ["waiting"] * 3
    for wrong, message in (
        ({"worker_options": {"limit": RateLimit(1, 1)}}, "`rate_limit` of the binding sets it"),
        ({"worker_options": {"concurrency": 1}}, "`concurrency` of the binding sets it"),
        ({"rate_limit": {"other": RateLimit(1, 1)}}, "sources of the events"),
        ({"connection": 7}, "a URL, a RedisAddress or None"),
    ):
        with pytest.raises(InvalidOption, match=message):
            replace(limited, **wrong)
    with pytest.raises(InvalidOption, match="options of Worker"):
        app.workflow(define(shelf), name="other", bullmq=replace(limited, worker_options={"lokc": 1}))


async def test_a_receipt_of_a_broker_that_tracks_nothing_says_so() -> None:
    app, shelf = Bullpen(settings=Settings.load(environ={"BULLPEN_TRANSPORT": "memory"})), Shelf()
    shelf.put()
    events = [AnyEvent(source="orders", event=Event.PAY)]
    workflow = app.workflow(define(shelf), events=AnyTransport(events=events))
    receipt = await workflow.send(Event.PAY, "urn:1")

    with pytest.raises(NotConfigured, match="only BullMQ tracks single messages"):
        await receipt.state()
    with pytest.raises(NotConfigured, match="only BullMQ tracks single messages"):
        await receipt.result()
    with pytest.raises(UnknownEvent, match="'pya'"):
        await workflow.send("pya", "urn:1")  # type: ignore[arg-type]  # a misspelt one
    await app.aclose()
