"""Events that come before their entity exists, and events whose state has passed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from bullpen._kernel.backoff import Backoff
from bullpen.app import Bullpen
from bullpen.errors import EntityNotFound, InvalidOption, NoTransition
from bullpen.ports.bindings import AnyEvent, AnyTransport, DefaultJobOptions
from bullpen.settings import Settings
from bullpen.workflow import Definition, Transition, Workflow, step
from tests.databases import MakeLedger
from tests.transports._listening import listening
from tests.workflow.kit import Event, Order, Shelf, Status, define, states
from tests.workflow.stored import OrderRow, Stored, add, make_tables, redis_orders, sql_orders
from tests.workflow.test_stores import opened

AnyWorkflow = Workflow[Any, Any, Event, Status]


@pytest.fixture(params=["sqlite", "redis"])
async def stored(request: pytest.FixtureRequest, make_ledger: MakeLedger) -> AsyncIterator[Stored]:
    if request.param == "redis":
        async with opened(request.getfixturevalue("redis_url")) as connection:
            yield redis_orders(connection)
            request.getfixturevalue("redis_server").flush()
        return
    ledger = make_ledger(request.getfixturevalue("sqlite_url"))
    await make_tables(ledger)
    yield sql_orders(ledger)


@pytest.fixture
async def app() -> AsyncIterator[Bullpen]:
    async with Bullpen(settings=Settings.load(environ={"BULLPEN_TRANSPORT": "memory"})) as opened_app:
        yield opened_app


def definition(stored: Stored, **changes: Any) -> Definition[Any, Any, Event, Status]:
    given: dict[str, Any] = {
        "name": "order",
        "states": states(idles=[Status.NEW, Status.PAID, Status.PACKED]),
        "transitions": [
            Transition(event=Event.PAY, from_=Status.NEW, to=Status.PAID, actions=[add]),
            Transition(
                event=Event.PACK, from_=Status.PAID, to=Status.PACKED, ignore_in=[Status.PACKED, Status.SHIPPED]
            ),
            Transition(event=Event.SHIP, from_=Status.PACKED, to=Status.SHIPPED),
        ],
        "entity": stored.store,
        **changes,
    }
    return Definition(**given)


def blank(stored: Stored) -> Any:
    """A new order, as its store keeps it."""

    def create(urn: str, payload: Any) -> Any:
        if stored.ledger is None:
            return {"urn": urn, "status": Status.NEW, "amount": 100}
        return OrderRow(urn=urn, status="new", amount=100)

    return create


def events(*kinds: Event) -> AnyTransport[Event]:
    return AnyTransport(
        events=[AnyEvent(source="orders", event=kind, job_name=kind.value) for kind in kinds],
        default_job_options=DefaultJobOptions(attempts=50, backoff=Backoff.fixed(20)),
    )


# ---- too early -----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("W-10")
async def test_an_event_before_its_entity_exists_is_tried_again(app: Bullpen, stored: Stored) -> None:
    """As one that is too early for the state: whoever makes the entity may be a moment behind."""
    workflow: AnyWorkflow = app.workflow(definition(stored), events=events(Event.PAY))
    with listening() as heard:
        await workflow.start()
        await workflow.send(Event.PAY, "urn:1", 5)
        await heard.wait("delivery.settled", 2)  # at least one try in vain
        await stored.create("urn:1")
        await heard.wait("workflow.moved")
        outcomes = [each["outcome"] for each in heard.of("delivery.settled")]
    await workflow.close()

    assert set(outcomes[:2]) == {"retry"}
    assert await stored.look() == ("paid", 5)


async def test_a_direct_call_is_told_that_there_is_no_entity(app: Bullpen, stored: Stored) -> None:
    workflow: AnyWorkflow = app.workflow(definition(stored))

    with pytest.raises(EntityNotFound, match="has no entity 'urn:9'"):
        await workflow.emit(Event.PAY, "urn:9", 5)


@pytest.mark.requirement("W-10")
async def test_the_first_event_may_make_its_entity(app: Bullpen, stored: Stored) -> None:
    workflow: AnyWorkflow = app.workflow(definition(stored, create=blank(stored)))

    first = await workflow.emit(Event.PAY, "urn:1", 5, idempotency_key="k")
    again = await workflow.emit(Event.PAY, "urn:1", 5, idempotency_key="k")
    packed = await workflow.emit(Event.PACK, "urn:1")

    assert [stored.store.status(each) for each in (first, again, packed)] == [Status.PAID, Status.PAID, Status.PACKED]
    assert await stored.look() == ("packed", 105)
    moves = [(each.event, each.source, each.target) for each in await workflow.history("urn:1")]
    assert moves == [("pay", "new", "paid"), ("pack", "paid", "packed")]


async def test_two_first_events_make_one_entity(app: Bullpen, stored: Stored) -> None:
    """Two processes, as it were: each finds nothing, and only one of them makes it."""
    both_in = asyncio.Barrier(2)
    tries = 0

    async def meet(entity: Any, payload: Any) -> Any:
        nonlocal tries
        tries += 1
        if tries <= 2:
            await both_in.wait()
        return await add(entity, payload)

    loop = [Transition(event=Event.PAY, from_=Status.NEW, to=Status.NEW, actions=[meet])]
    other = Bullpen(settings=Settings.load(environ={"BULLPEN_TRANSPORT": "memory"}))
    workflows: list[AnyWorkflow] = [
        each.workflow(definition(stored, create=blank(stored), transitions=loop), locks=False) for each in (app, other)
    ]

    async with asyncio.timeout(10):
        await asyncio.gather(*(workflow.emit(Event.PAY, "urn:1", 1) for workflow in workflows))

    assert await stored.look() == ("new", 102)
    assert tries == 3
    await other.aclose()


async def test_an_event_that_leads_nowhere_or_fails_makes_no_entity(app: Bullpen, stored: Stored) -> None:
    async def fails(entity: Any, payload: Any) -> Any:
        raise ConnectionError("away")

    workflow: AnyWorkflow = app.workflow(
        definition(
            stored,
            create=blank(stored),
            on_action_error="retry",
            transitions=[
                Transition(event=Event.PAY, from_=Status.NEW, to=Status.PAID, actions=[fails]),
                Transition(event=Event.SHIP, from_=Status.PAID, to=Status.SHIPPED),
            ],
        )
    )

    with pytest.raises(NoTransition):
        await workflow.emit(Event.SHIP, "urn:1")
    with pytest.raises(ConnectionError):
        await workflow.emit(Event.PAY, "urn:1")

    assert await workflow.load("urn:1") is None


async def test_an_entity_whose_first_action_fails_for_good_is_parked(app: Bullpen, stored: Stored) -> None:
    async def fails(entity: Any, payload: Any) -> Any:
        raise ConnectionError("away")

    workflow: AnyWorkflow = app.workflow(
        definition(
            stored,
            create=blank(stored),
            on_action_error="fail",
            transitions=[Transition(event=Event.PAY, from_=Status.NEW, to=Status.PAID, actions=[fails])],
        )
    )

    await workflow.emit(Event.PAY, "urn:1")

    assert (await stored.look())[0] == "failed"


async def test_an_entity_of_another_name_is_refused(app: Bullpen, stored: Stored) -> None:
    make = blank(stored)
    workflow: AnyWorkflow = app.workflow(definition(stored, create=lambda urn, payload: make("urn:2", payload)))

    with pytest.raises(InvalidOption, match="create: expected an entity with the urn 'urn:1'"):
        await workflow.emit(Event.PAY, "urn:1", 5)

    assert await workflow.load("urn:2") is None


async def test_access_of_your_own_makes_the_entity_when_it_stores_it(app: Bullpen) -> None:
    shelf = Shelf()

    async def create(urn: str, payload: Any) -> Any:
        return Order(urn)

    workflow: AnyWorkflow = app.workflow(define(shelf, create=create))

    await workflow.emit(Event.PAY, "urn:1")

    assert shelf.orders["urn:1"].status is Status.PAID


# ---- too late ------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("W-10")
async def test_an_event_whose_state_has_passed_is_ignored_by_rule(
    app: Bullpen, stored: Stored, caplog: pytest.LogCaptureFixture
) -> None:
    """A reminder that was sent with a delay, for somebody who has paid meanwhile: done, and no dead letter."""
    workflow: AnyWorkflow = app.workflow(definition(stored), events=events(Event.PACK, Event.SHIP))
    await stored.create("urn:1", status="packed")
    with listening() as heard, caplog.at_level(logging.INFO, "bullpen.workflow"):
        await workflow.start()
        await workflow.send(Event.PACK, "urn:1")
        await heard.wait("delivery.settled")
        await workflow.send(Event.SHIP, "urn:1")
        await heard.wait("delivery.settled", 2)
        outcomes = [each["outcome"] for each in heard.of("delivery.settled")]
        ignored = [(each["event"], each["state"]) for each in heard.of("workflow.ignored")]
    await workflow.close()

    assert outcomes == ["completed", "completed"]
    assert ignored == [("pack", "packed")]
    assert "Event pack is ignored in state packed" in caplog.text
    assert (await stored.look())[0] == "shipped"
    assert [each.event for each in await workflow.history("urn:1")] == ["ship"]


async def test_in_other_states_the_event_leads_nowhere_as_before(app: Bullpen, stored: Stored) -> None:
    workflow: AnyWorkflow = app.workflow(definition(stored))
    await stored.create("urn:1")

    with pytest.raises(NoTransition):
        await workflow.emit(Event.PACK, "urn:1")


async def test_a_follow_up_may_be_ignored_too(app: Bullpen, stored: Stored) -> None:
    async def follows(entity: Any, payload: Any) -> Any:
        step().follow_up(Event.PACK)
        return entity

    workflow: AnyWorkflow = app.workflow(
        definition(
            stored,
            transitions=[
                Transition(event=Event.SHIP, from_=Status.NEW, to=Status.SHIPPED, actions=[follows]),
                Transition(event=Event.PACK, from_=Status.PAID, to=Status.PACKED, ignore_in=[Status.SHIPPED]),
            ],
        )
    )
    await stored.create("urn:1")

    await workflow.emit(Event.SHIP, "urn:1")

    assert (await stored.look())[0] == "shipped"


def test_a_simulation_tells_of_it(app: Bullpen) -> None:
    late = Transition[Any, Any, Event, Status](
        event=Event.PAY, from_=Status.NEW, to=Status.PAID, ignore_in=[Status.PAID]
    )
    workflow: AnyWorkflow = app.workflow(define(transitions=[late]))

    simulated = workflow.simulate([Event.PAY, Event.PAY])

    assert simulated.refused == ("Event pay is ignored in state paid",)
    assert simulated.end == "paid"


@pytest.mark.parametrize("wrong", ["paid", Status.PAID, [Status.NEW]])
def test_states_to_ignore_an_event_in_are_a_list_and_not_its_own(wrong: Any) -> None:
    with pytest.raises(InvalidOption, match="ignore_in"):
        Transition[Any, Any, Event, Status](event=Event.PAY, from_=Status.NEW, to=Status.PAID, ignore_in=wrong)


def test_what_makes_entities_is_a_function() -> None:
    with pytest.raises(InvalidOption, match="create: expected a function of urn and payload"):
        define(create={"urn": "urn:1"})
