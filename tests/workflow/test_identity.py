"""One event, one effect: an event is known by workflow, urn and key, whoever carries it and wherever it is stored."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest

from bullpen.app import Bullpen
from bullpen.ports.bindings import AnyEvent, AnyTransport, DefaultJobOptions
from bullpen.settings import Settings
from bullpen.testing import RedisServer
from bullpen.workflow import Definition, Transition, on_event, on_status_changed, step
from bullpen.workflow.service import Workflow
from tests.databases import MakeLedger
from tests.transports._listening import Heard, listening
from tests.transports.test_parity import configuration
from tests.workflow.kit import Event, Status, delivery, failing, states
from tests.workflow.stored import Stored, add, engine_on, make_tables, redis_orders, sql_orders
from tests.workflow.test_stores import opened

AnyWorkflow = Workflow[Any, Any, Event, Status]


@pytest.fixture(params=["sqlite", "redis", pytest.param("postgresql", marks=pytest.mark.long)])
async def stored(request: pytest.FixtureRequest, make_ledger: MakeLedger) -> AsyncIterator[Stored]:
    if request.param == "redis":
        async with opened(request.getfixturevalue("redis_url")) as connection:
            yield redis_orders(connection)
            server: RedisServer = request.getfixturevalue("redis_server")
            server.flush()
        return
    url = {"sqlite": "sqlite_url", "postgresql": "postgres_url"}[request.param]
    ledger = make_ledger(request.getfixturevalue(url))
    await make_tables(ledger)
    yield sql_orders(ledger)


def definition(stored: Stored, *actions: Any, **changes: Any) -> Definition[Any, Any, Event, Status]:
    given: dict[str, Any] = {
        "name": "order",
        "states": states(idles=[Status.NEW, Status.PACKED]),
        "transitions": [
            Transition(event=Event.PAY, from_=Status.NEW, to=Status.NEW, actions=[add, *actions]),
            Transition(event=Event.PACK, from_=Status.NEW, to=Status.PACKED, actions=[*actions]),
        ],
        "entity": stored.store,
        **changes,
    }
    return Definition(**given)


async def done(heard: Heard, count: int) -> None:
    await heard.wait("delivery.settled", count)
    assert [each["outcome"] for each in heard.of("delivery.settled")] == ["completed"] * count


@pytest.mark.requirement("W-11", "W-31", "X-53")
@pytest.mark.parametrize("transport", ["memory", "bullmq", "rabbitmq", "kafka"])
async def test_an_event_counts_once_however_often_and_by_whatever_way_it_comes(
    transport: str, stored: Stored, request: pytest.FixtureRequest
) -> None:
    """Its first job is gone when it is sent again: the store remembers the event, not the job."""
    environ, options = configuration(transport, request)
    app = Bullpen(settings=Settings.load(environ={**environ, "BULLPEN_TRANSPORT": transport}))
    source, keys = f"orders-{uuid.uuid4().hex[:6]}", []

    async def charge(entity: Any, payload: Any) -> Any:
        keys.append(step().key)
        return entity

    workflow: AnyWorkflow = app.workflow(
        definition(stored, charge),
        events=AnyTransport(
            events=[AnyEvent(source=source, event=event, job_name=event.value) for event in (Event.PAY, Event.PACK)],
            default_job_options=DefaultJobOptions(remove_on_complete=0),
        ),
        client_options=options,
    )
    await stored.create("urn:1")
    await stored.create("urn:2")
    with listening() as heard:
        await workflow.start()
        for count in (1, 2, 3):
            await workflow.send(Event.PAY, "urn:1", 5, idempotency_key="invoice-7")
            await done(heard, count)
        assert workflow.client is not None
        data: Any = {"urn": "urn:1", "payload": 5}
        await workflow.client.produce(source, "pay", data, idempotency_key="invoice-7")
        await done(heard, 4)
        await workflow.emit(Event.PAY, "urn:1", 5, idempotency_key="invoice-7")
        assert await stored.look() == ("new", 5)

        await workflow.emit(Event.PAY, "urn:2", 3, idempotency_key="invoice-8")
        await workflow.send(Event.PAY, "urn:2", 3, idempotency_key="invoice-8")
        await done(heard, 5)
        assert await stored.look("urn:2") == ("new", 3)

        await workflow.send(Event.PAY, "urn:2", 4, idempotency_key="invoice-7")  # another entity: another event
        await done(heard, 6)
        await workflow.send(Event.PAY, "urn:2", 1)  # without a key each is an event of its own
        await workflow.send(Event.PAY, "urn:2", 1)
        await done(heard, 8)
    assert await stored.look("urn:2") == ("new", 9)
    assert len(keys) == len(set(keys)) == 5
    await workflow.close()
    await app.aclose()


async def test_what_an_action_sends_is_an_event_of_its_own(stored: Stored) -> None:
    app = Bullpen(settings=Settings.load(environ={"BULLPEN_TRANSPORT": "memory"}))

    async def go_on(entity: Any, payload: Any) -> Any:
        await workflow.send(Event.PACK, "urn:1")
        return entity

    workflow: AnyWorkflow = app.workflow(
        definition(
            stored,
            transitions=[
                Transition(event=Event.PAY, from_=Status.NEW, to=Status.NEW, actions=[go_on]),
                Transition(event=Event.PACK, from_=Status.NEW, to=Status.PACKED),
            ],
        ),
        events=AnyTransport(
            events=[AnyEvent(source="orders", event=event, job_name=event.value) for event in (Event.PAY, Event.PACK)]
        ),
    )
    await stored.create("urn:1")
    with listening() as heard:
        await workflow.start()
        await workflow.send(Event.PAY, "urn:1", idempotency_key="invoice-7")
        await done(heard, 2)
    assert await stored.look() == ("packed", 0)
    await app.aclose()


async def test_two_workflows_over_the_same_entities_do_not_hide_each_others_events(stored: Stored) -> None:
    app = Bullpen(settings=Settings.load(environ={}))
    await stored.create("urn:1")

    for name in ("order", "billing"):
        workflow: AnyWorkflow = app.workflow(definition(stored), name=name)
        for _ in range(2):
            await workflow.emit(Event.PAY, "urn:1", 5, idempotency_key="k")

    assert await stored.look() == ("new", 10)
    await app.aclose()


@pytest.mark.many
async def test_an_entity_remembers_an_event_after_more_others_than_a_queue_keeps_jobs(stored: Stored) -> None:
    app = Bullpen(settings=Settings.load(environ={}))
    workflow: AnyWorkflow = app.workflow(definition(stored))
    await stored.create("urn:1")

    await workflow.emit(Event.PAY, "urn:1", 5, idempotency_key="invoice-7")
    for _ in range(1_100 if stored.ledger is None else 20):
        await workflow.emit(Event.PAY, "urn:1", 0)
    await workflow.emit(Event.PAY, "urn:1", 5, idempotency_key="invoice-7")

    assert (await stored.look())[1] == 5
    await app.aclose()


class Seen:
    """Keys of all that ran, in order."""

    def __init__(self) -> None:
        self.keys: list[str] = []

    def action(self) -> Any:
        async def effect(entity: Any, payload: Any) -> Any:
            self.keys.append(step().key)
            return entity

        return effect

    @on_event(Event.PACK)
    async def hook(self, entity: Any, payload: Any) -> Any:
        return await self.action()(entity, payload)

    @on_status_changed(from_=Status.NEW, to=Status.PACKED)
    async def moved(self, entity: Any, payload: Any) -> Any:
        return await self.action()(entity, payload)


async def test_every_action_has_a_key_of_its_own_that_stays(stored: Stored) -> None:
    """Two workflows, two entities, one key of the caller; three actions, two of one name, and two hooks."""
    app, seen, fail = Bullpen(settings=Settings.load(environ={})), Seen(), True

    async def fragile(entity: Any, payload: Any) -> Any:
        if fail:
            raise ConnectionError("away")
        return await seen.action()(entity, payload)

    every: set[str] = set()
    made = definition(stored, seen.action(), seen.action(), fragile, actions=[seen], on_action_error="retry")
    for name in ("order", "billing"):
        workflow: AnyWorkflow = app.workflow(made, name=name)
        for urn in (f"urn:{name}:1", f"urn:{name}:ü/" + "2" * 180):
            await stored.create(urn)
            fail, seen.keys = True, []
            with pytest.raises(ConnectionError):
                await workflow.emit(Event.PACK, urn, idempotency_key="k")
            first, fail = list(seen.keys), False
            await workflow.emit(Event.PACK, urn, idempotency_key="k")
            assert seen.keys[2:4] == first and len(set(first)) == 2
            assert len(set(seen.keys)) == 5
            assert all(key.isascii() and len(key) <= 200 for key in seen.keys)
            every.update(seen.keys)
    assert len(every) == 20
    assert {"order/urn%3Aorder%3A1/k/0/effect", "order/urn%3Aorder%3A1/k/0/effect 2"} < every
    await app.aclose()


async def test_a_larger_batch_has_another_key_than_the_smaller_one_that_began_alike(stored: Stored) -> None:
    """With one key for both, a target would take the second for a repetition and swallow what is new in it."""
    seen = Seen()
    crashing = [seen.action(), failing(OSError("crash"))]
    packing = Transition[Any, Any, Any, Any](event=Event.PACK, from_=Status.NEW, to=Status.NEW, actions=crashing)
    engine = engine_on(stored, transitions=[packing])
    await stored.create("urn:1")
    a, b = delivery(key="a"), delivery(key="b")

    for items in ([a], [a, b]):
        await engine.emit_batch(Event.PACK, "urn:1", [(1, each) for each in items])

    # The small batch; the large one, and then each of it alone.
    assert [seen.keys[0] == key for key in seen.keys] == [True, False, True, False]
