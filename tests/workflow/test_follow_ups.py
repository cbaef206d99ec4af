"""An action and its own entity: emitting to it is refused at once, following up is stored with the transition."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from bullpen.app import Bullpen
from bullpen.errors import EmitsToItself, EndlessSteps, InvalidOption, NoTransition
from bullpen.ports.bindings import AnyEvent, AnyTransport
from bullpen.settings import Settings
from bullpen.workflow import Definition, InlineEntities, RedisLocks, Transition, step
from bullpen.workflow.service import Workflow
from tests.databases import MakeLedger
from tests.transports._listening import listening
from tests.workflow.kit import Event, Shelf, Status, define, states
from tests.workflow.stored import Stored, add, make_tables, redis_orders, sql_orders
from tests.workflow.test_stores import opened

AnyWorkflow = Workflow[Any, Any, Event, Status]
PATIENCE_S = 10


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


def definition(stored: Stored, *actions: Any, **changes: Any) -> Definition[Any, Any, Event, Status]:
    """Pay, then pack with an action that adds the payload, then ship."""
    given: dict[str, Any] = {
        "name": "order",
        "states": states(idles=[Status.NEW, Status.PAID, Status.PACKED]),
        "transitions": [
            Transition(event=Event.PAY, from_=Status.NEW, to=Status.PAID, actions=[*actions]),
            Transition(event=Event.PACK, from_=Status.PAID, to=Status.PACKED, actions=[add]),
            Transition(event=Event.SHIP, from_=Status.PACKED, to=Status.SHIPPED, actions=[add]),
        ],
        "entity": stored.store,
        **changes,
    }
    return Definition(**given)


# ---- emitting ------------------------------------------------------------------------------------------------------


@pytest.mark.every_loop
@pytest.mark.requirement("X-52")
@pytest.mark.parametrize("how", ["directly", "in a task", "through another entity"])
async def test_an_action_that_emits_to_its_own_entity_is_told_so_at_once(
    app: Bullpen, stored: Stored, how: str
) -> None:
    """It waited for its own entity for ever, and the consumer with it."""
    told: list[str] = []

    async def emits(entity: Any, payload: Any) -> Any:
        try:
            if how == "in a task":
                await asyncio.gather(workflow.emit(Event.PACK, "urn:1", 1))
            elif how == "through another entity" and payload != "second":
                await workflow.emit(Event.PAY, "urn:2", "second")
            else:
                await workflow.emit(Event.PACK, "urn:1", 1)
        except EmitsToItself as error:
            told.append(str(error))
        return entity

    workflow: AnyWorkflow = app.workflow(definition(stored, emits))
    await stored.create("urn:1")
    await stored.create("urn:2")

    async with asyncio.timeout(PATIENCE_S):
        await workflow.emit(Event.PAY, "urn:1")

    (words,) = told
    assert words.startswith("an action of entity 'urn:1' emits to the same entity")
    assert "use step().follow_up(event, payload)" in words
    assert await stored.look() == ("paid", 0)


@pytest.mark.requirement("X-52", "W-44")
async def test_an_event_of_a_transport_whose_action_emits_to_itself_fails_for_good(
    app: Bullpen, stored: Stored
) -> None:
    """No second attempt could do better, and the consumer goes on with the next event."""

    async def emits(entity: Any, payload: Any) -> Any:
        if payload == "bad":
            await workflow.emit(Event.PACK, "urn:1", 1)
        return entity

    workflow: AnyWorkflow = app.workflow(
        definition(stored, emits),
        events=AnyTransport(events=[AnyEvent(source="orders", event=Event.PAY, job_name="pay")]),
    )
    await stored.create("urn:1")
    await stored.create("urn:2")
    with listening() as heard:
        await workflow.start()
        await workflow.send(Event.PAY, "urn:1", "bad")
        await workflow.send(Event.PAY, "urn:2", "good")
        await heard.wait("delivery.settled", 2)
        outcomes = sorted(each["outcome"] for each in heard.of("delivery.settled"))
    await workflow.close()

    assert outcomes == ["completed", "failed"]
    assert (await stored.look("urn:1"))[0] == "failed"
    assert (await stored.look("urn:2"))[0] == "paid"


async def test_a_lock_of_all_processes_is_not_waited_for_by_its_holder(redis_url: str, app: Bullpen) -> None:
    """Two workflows may have entities with the same urn, and one lock for both."""
    shelf, told = Shelf(), []
    shelf.put("urn:1")
    async with opened(redis_url) as connection:

        async def emits(entity: Any, payload: Any) -> Any:
            with pytest.raises(EmitsToItself) as refused:
                await second.emit(Event.PAY, "urn:1")
            told.append(refused.value.urn)
            return entity

        first: AnyWorkflow = app.workflow(
            define(shelf, transitions=[Transition(event=Event.PAY, from_=Status.NEW, to=Status.PAID, actions=[emits])]),
            locks=RedisLocks(connection),
        )
        second: AnyWorkflow = app.workflow(define(shelf, name="second"), locks=RedisLocks(connection))
        async with asyncio.timeout(PATIENCE_S):
            await first.emit(Event.PAY, "urn:1")

    assert told == ["urn:1"]


async def test_a_task_that_outlives_its_action_may_emit(app: Bullpen, stored: Stored) -> None:
    tasks: list[asyncio.Task[Any]] = []
    ended = asyncio.Event()

    async def later() -> None:
        await ended.wait()
        await workflow.emit(Event.PACK, "urn:1", 4)

    async def starts(entity: Any, payload: Any) -> Any:
        tasks.append(asyncio.create_task(later()))
        return entity

    workflow: AnyWorkflow = app.workflow(definition(stored, starts))
    await stored.create("urn:1")

    await workflow.emit(Event.PAY, "urn:1")
    ended.set()
    await tasks[0]

    assert await stored.look() == ("packed", 4)


# ---- following up --------------------------------------------------------------------------------------------------


@pytest.mark.every_loop
@pytest.mark.requirement("X-52", "X-53")
async def test_what_follows_up_is_applied_after_its_transition_and_stored_with_it(app: Bullpen, stored: Stored) -> None:
    seen: list[tuple[str, str]] = []

    async def follows(entity: Any, payload: Any) -> Any:
        step().follow_up(Event.PACK, 3)
        step().follow_up(Event.SHIP, 4)
        seen.append((step().event, stored.store.status(entity).value))
        return entity

    workflow: AnyWorkflow = app.workflow(definition(stored, follows))
    await stored.create("urn:1")

    shipped = await workflow.emit(Event.PAY, "urn:1", idempotency_key="k")
    again = await workflow.emit(Event.PAY, "urn:1", idempotency_key="k")

    assert stored.store.status(shipped) == stored.store.status(again) == Status.SHIPPED
    assert await stored.look() == ("shipped", 7)
    assert seen == [("pay", "new")]
    moves = [(each.event, each.source, each.target, each.key) for each in await workflow.history("urn:1")]
    assert moves == [
        ("pay", "new", "paid", "k"),
        ("pack", "paid", "packed", "k"),
        ("ship", "packed", "shipped", "k"),
    ]


@pytest.mark.requirement("X-52", "X-53")
async def test_a_follow_up_that_fails_takes_its_transition_back_and_comes_again_with_it(
    app: Bullpen, stored: Stored
) -> None:
    """One event is one change: a crash in the middle leaves neither half."""
    keys: list[str] = []
    tries = 0

    async def follows(entity: Any, payload: Any) -> Any:
        keys.append(step().key)
        step().follow_up(Event.PACK, 3)
        return entity

    async def flaky(entity: Any, payload: Any) -> Any:
        nonlocal tries
        tries += 1
        keys.append(step().key)
        if tries == 1:
            raise ConnectionError("away")
        return await add(entity, payload)

    workflow: AnyWorkflow = app.workflow(
        definition(
            stored,
            on_action_error="retry",
            transitions=[
                Transition(event=Event.PAY, from_=Status.NEW, to=Status.PAID, actions=[follows]),
                Transition(event=Event.PACK, from_=Status.PAID, to=Status.PACKED, actions=[flaky]),
            ],
        )
    )
    await stored.create("urn:1")

    with pytest.raises(ConnectionError):
        await workflow.emit(Event.PAY, "urn:1", idempotency_key="k")
    assert await stored.look() == ("new", 0)
    await workflow.emit(Event.PAY, "urn:1", idempotency_key="k")

    assert await stored.look() == ("packed", 3)
    assert keys[:2] == keys[2:]
    assert len(set(keys)) == 2


async def test_a_follow_up_that_leads_nowhere_changes_nothing(app: Bullpen, stored: Stored) -> None:
    async def follows(entity: Any, payload: Any) -> Any:
        step().follow_up(Event.SHIP)
        return entity

    workflow: AnyWorkflow = app.workflow(definition(stored, follows))
    await stored.create("urn:1")

    with pytest.raises(NoTransition, match="event: ship and status: paid"):
        await workflow.emit(Event.PAY, "urn:1")

    assert await stored.look() == ("new", 0)


async def test_a_follow_up_whose_conditions_do_not_hold_is_told_and_passed_over(app: Bullpen, stored: Stored) -> None:
    asked: list[str] = []

    async def follows(entity: Any, payload: Any) -> Any:
        step().follow_up(Event.PACK, 3)
        return entity

    async def fallback(entity: Any, event: Event, payload: Any) -> Any:
        asked.append(event.value)
        return None

    workflow: AnyWorkflow = app.workflow(
        definition(
            stored,
            fallback=fallback,
            transitions=[
                Transition(event=Event.PAY, from_=Status.NEW, to=Status.PAID, actions=[follows]),
                Transition(
                    event=Event.PACK, from_=Status.PAID, to=Status.PACKED, conditions=[lambda order, payload: False]
                ),
            ],
        )
    )
    await stored.create("urn:1")

    await workflow.emit(Event.PAY, "urn:1")

    assert await stored.look() == ("paid", 0)
    assert asked == ["pack"]


async def test_follow_ups_without_end_are_ended(app: Bullpen, stored: Stored) -> None:
    async def again(entity: Any, payload: Any) -> Any:
        step().follow_up(Event.PAY)
        return entity

    workflow: AnyWorkflow = app.workflow(
        definition(
            stored,
            max_steps=5,
            transitions=[Transition(event=Event.PAY, from_=Status.NEW, to=Status.NEW, actions=[again])],
        )
    )
    await stored.create("urn:1")

    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(EndlessSteps, match="more than 5"):
            await workflow.emit(Event.PAY, "urn:1")


async def test_the_payload_of_a_follow_up_is_checked_as_any_other(app: Bullpen, stored: Stored) -> None:
    async def follows(entity: Any, payload: Any) -> Any:
        step().follow_up(Event.PACK, "three")
        return entity

    workflow: AnyWorkflow = app.workflow(definition(stored, follows, payloads={Event.PACK: int}))
    await stored.create("urn:1")

    with pytest.raises(Exception, match="payload of pack: Expected `int`"):
        await workflow.emit(Event.PAY, "urn:1")


async def test_access_that_stores_each_step_by_itself_cannot_follow_up(app: Bullpen) -> None:
    """After a crash between the two nobody would know of the second."""
    shelf, told = Shelf(), []
    shelf.put("urn:1")

    async def follows(entity: Any, payload: Any) -> Any:
        with pytest.raises(InvalidOption) as refused:
            step().follow_up(Event.PACK)
        told.append(str(refused.value))
        return entity

    access = shelf.access()
    assert isinstance(access, InlineEntities)
    workflow: AnyWorkflow = app.workflow(
        define(shelf, transitions=[Transition(event=Event.PAY, from_=Status.NEW, to=Status.PAID, actions=[follows])])
    )
    await workflow.emit(Event.PAY, "urn:1")

    assert "entities in a store with change history" in told[0]
