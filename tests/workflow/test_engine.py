"""What an event does to an entity, on access that anybody may write."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from bullpen.errors import (
    ConnectionLost,
    DelayJob,
    EndlessSteps,
    EntityNotFound,
    InvalidOption,
    NotConfigured,
    NoTransition,
    PermanentError,
    UnknownEvent,
)
from bullpen.workflow.actions import Hooks, on_event, on_status_changed
from bullpen.workflow.batch import Batch
from bullpen.workflow.context import step
from bullpen.workflow.engine import Engine
from bullpen.workflow.metrics import WorkflowMetrics
from bullpen.workflow.stores.direct import as_store
from tests.transports._listening import lines, listening
from tests.workflow.kit import (
    Event,
    Order,
    OrderTransition,
    Shelf,
    Status,
    call,
    define,
    delivery,
    engine_of,
    failing,
    noting,
    states,
    transitions,
)


def pay(**changes: Any) -> OrderTransition:
    return OrderTransition(**{"event": Event.PAY, "from_": Status.NEW, "to": Status.PAID, **changes})


# ---- one event -----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("W-9", "W-10", "W-11")
async def test_an_event_loads_runs_actions_in_order_and_stores_the_status() -> None:
    shelf = Shelf()
    shelf.put()
    engine = engine_of(define(shelf, transitions=[pay(actions=[noting("first"), noting("second")])]))

    order = await engine.emit(Event.PAY, "urn:1", {"amount": 5}, call())

    assert order == shelf.orders["urn:1"]
    assert (order.status, order.notes) == (Status.PAID, ("first", "second"))
    assert shelf.updates == [Status.PAID]


@pytest.mark.requirement("W-9")
async def test_conditions_choose_the_first_transition_for_which_all_hold() -> None:
    shelf = Shelf()
    shelf.put(amount=50)
    chosen = [
        pay(to=Status.SHIPPED, conditions=[lambda order, payload: True, lambda order, payload: order.amount > 100]),
        pay(to=Status.PACKED, conditions=[lambda order, payload: payload == "express"]),
        pay(),
    ]
    engine = engine_of(define(shelf, transitions=chosen))

    assert (await engine.emit(Event.PAY, "urn:1", "express", call())).status == Status.PACKED
    shelf.put(amount=50)
    assert (await engine.emit(Event.PAY, "urn:1", None, call())).status == Status.PAID


@pytest.mark.requirement("W-8")
async def test_conditions_of_the_definition_hold_for_every_transition() -> None:
    shelf = Shelf()
    shelf.put(amount=0)
    engine = engine_of(define(shelf, conditions=[lambda order, payload: order.amount > 0]))

    assert (await engine.emit(Event.PAY, "urn:1", None, call())).status == Status.NEW
    shelf.put(amount=1)
    assert (await engine.emit(Event.PAY, "urn:1", None, call())).status == Status.PAID


async def test_an_event_that_no_condition_lets_through_leaves_a_trace(caplog: pytest.LogCaptureFixture) -> None:
    """It is acknowledged and changes nothing: whoever looks for it must find a reason."""
    caplog.set_level(logging.INFO)
    shelf, metrics = Shelf(), WorkflowMetrics()
    shelf.put()
    engine = engine_of(define(shelf, transitions=[pay(conditions=[lambda order, payload: False])]))

    await engine.emit(Event.PAY, "urn:1", None, call(headers={"tenantId": "acme"}))
    counted = {metric.name: metric for metric in await metrics.collect()}["bullpen_workflow_refused_total"]
    metrics.close()

    (line,) = [record for record in caplog.records if "changes nothing" in record.getMessage()]
    assert line.getMessage() == "Event pay changes nothing: no condition holds in state new"
    assert (vars(line)["urn"], vars(line)["tenantId"]) == ("urn:1", "acme")
    assert [(sample.labels["event"], sample.value) for sample in counted.samples] == [("pay", 1)]


@pytest.mark.requirement("W-13")
async def test_without_a_condition_that_holds_the_fallback_is_asked_else_nothing_changes() -> None:
    shelf = Shelf()
    before = shelf.put()
    never = [pay(conditions=[lambda order, payload: False])]
    seen: list[Any] = []

    async def fallback(entity: Order, event: Event, payload: Any) -> Order:
        seen.append((entity, event, payload))
        return entity.noted("fallback")

    unchanged = await engine_of(define(shelf, transitions=never)).emit(Event.PAY, "urn:1", 5, call())
    fallen = await engine_of(define(shelf, transitions=never, fallback=fallback)).emit(Event.PAY, "urn:1", 5, call())

    assert unchanged == before
    assert (fallen.notes, seen) == (("fallback",), [(before, Event.PAY, 5)])
    assert shelf.updates == []


@pytest.mark.requirement("W-13")
async def test_an_event_that_leads_nowhere_is_an_error_that_names_both() -> None:
    shelf = Shelf()
    shelf.put()

    with pytest.raises(NoTransition) as error:
        await engine_of(define(shelf)).emit(Event.SHIP, "urn:1", None, call())

    assert str(error.value) == "Unable to find transition for event: ship and status: new"


async def test_an_entity_that_does_not_exist_is_no_permanent_error() -> None:
    """It may be made a moment later: the event is tried again, as one that is too early for the state."""
    with pytest.raises(EntityNotFound, match="no entity 'urn:9'") as error:
        await engine_of(define()).emit(Event.PAY, "urn:9", None, call())

    assert not isinstance(error.value, PermanentError)


# ---- automatic steps -------------------------------------------------------------------------------------------------


@pytest.mark.requirement("W-12")
async def test_the_engine_goes_on_until_a_state_to_rest_at() -> None:
    shelf = Shelf()
    shelf.put()
    through = define(shelf, states=states(idles=[Status.NEW]))

    order = await engine_of(through).emit(Event.PAY, "urn:1", None, call())

    assert order.status == Status.SHIPPED
    assert shelf.updates == [Status.PAID, Status.PACKED, Status.SHIPPED]


@pytest.mark.requirement("W-12")
async def test_it_stops_at_idle_and_where_no_condition_holds_and_never_goes_to_failed_by_itself() -> None:
    shelf = Shelf()
    shelf.put()
    exits = [
        *transitions()[:1],
        OrderTransition(event=Event.REOPEN, from_=Status.PAID, to=Status.FAILED),
        OrderTransition(
            event=Event.PACK, from_=Status.PAID, to=Status.PACKED, conditions=[lambda order, payload: payload == "go"]
        ),
    ]
    engine = engine_of(define(shelf, states=states(idles=[Status.NEW, Status.PACKED]), transitions=exits))

    assert (await engine.emit(Event.PAY, "urn:1", "stay", call())).status == Status.PAID
    shelf.put()
    assert (await engine.emit(Event.PAY, "urn:1", "go", call())).status == Status.PACKED


@pytest.mark.requirement("W-12")
async def test_a_circle_of_automatic_steps_is_ended() -> None:
    shelf = Shelf()
    shelf.put()
    circle = [
        pay(),
        OrderTransition(event=Event.PACK, from_=Status.PAID, to=Status.PACKED),
        OrderTransition(event=Event.SHIP, from_=Status.PACKED, to=Status.PAID),
    ]
    engine = engine_of(define(shelf, states=states(idles=[Status.NEW]), transitions=circle, max_steps=5))

    with pytest.raises(EndlessSteps, match="more than 5 automatic steps"):
        await engine.emit(Event.PAY, "urn:1", None, call())

    assert len(shelf.updates) == 6


# ---- class actions ---------------------------------------------------------------------------------------------------


class Notes:
    """Actions as methods."""

    @on_event(Event.PAY, order=2)
    async def second(self, entity: Order, payload: Any) -> Order:
        return entity.noted("second")

    @on_event([Event.PAY, Event.PACK], order=1)
    async def first(self, entity: Order, payload: Any) -> Order:
        return entity.noted(f"first {step().event}")

    @on_status_changed(from_=Status.NEW, to=Status.PAID)
    async def changed(self, entity: Order, payload: Any) -> Order:
        assert entity.status == Status.PAID
        return entity.noted("changed")

    @property
    def explosive(self) -> str:
        raise AssertionError("nobody may ask for this")


class Careless:
    def __init__(self, error: Exception) -> None:
        self.error = error

    @on_status_changed(from_=Status.NEW, to=Status.PAID, fail_on_error=False)
    async def allowed(self, entity: Order, payload: Any) -> Order:
        raise self.error


class Strict:
    @on_status_changed(from_=[Status.NEW], to=[Status.PAID, Status.PACKED])
    async def not_allowed(self, entity: Order, payload: Any) -> Order:
        raise RuntimeError("no mail today")


@pytest.mark.requirement("W-14")
async def test_methods_run_by_event_in_their_order_and_by_change() -> None:
    shelf = Shelf()
    shelf.put()
    engine = engine_of(define(shelf, transitions=[pay(actions=[noting("inline")]), *transitions()[1:]]), [Notes()])

    paid = await engine.emit(Event.PAY, "urn:1", None, call())
    packed = await engine.emit(Event.PACK, "urn:1", None, call())

    assert paid.notes == ("inline", "first pay", "second", "changed")
    assert packed.notes[-1] == "first pack"


@pytest.mark.requirement("W-14")
async def test_a_failing_status_method_fails_the_step_unless_told_otherwise(caplog: pytest.LogCaptureFixture) -> None:
    shelf = Shelf()
    shelf.put()

    fine = await engine_of(define(shelf), [Careless(RuntimeError("mail away"))]).emit(Event.PAY, "urn:1", None, call())
    shelf.put()
    with pytest.raises(RuntimeError, match="no mail today"):
        await engine_of(define(shelf), [Strict()]).emit(Event.PAY, "urn:1", None, call())

    assert (fine.status, shelf.orders["urn:1"].status) == (Status.PAID, Status.FAILED)
    assert lines(caplog.records, "Careless.allowed failed, which is allowed: mail away")


def test_marks_are_checked() -> None:
    with pytest.raises(InvalidOption, match="`async def`"):
        on_event(Event.PAY)(lambda self, entity, payload: entity)
    with pytest.raises(InvalidOption, match="order"):
        on_event(Event.PAY, order="first")  # type: ignore[arg-type]  # the mistake under test
    with pytest.raises(InvalidOption, match="fail_on_error"):
        on_status_changed(from_=1, to=2, fail_on_error=1)  # type: ignore[arg-type]  # the mistake under test
    with pytest.raises(InvalidOption, match="marked by on_event"):
        Hooks([object()])


# ---- actions that fail -------------------------------------------------------------------------------------------


@pytest.mark.requirement("W-15", "X-38")
async def test_fail_parks_the_entity_and_returns_it(caplog: pytest.LogCaptureFixture) -> None:
    shelf = Shelf()
    shelf.put()
    parking = define(shelf, transitions=[pay(actions=[failing(RuntimeError("card"))])], on_action_error="fail")

    order = await engine_of(parking).emit(Event.PAY, "urn:1", None, delivery())

    assert order.status == Status.FAILED
    assert lines(caplog.records, "Action failed: card")[0]["jobId"] == "7"


@pytest.mark.requirement("X-38")
async def test_retry_leaves_the_entity_untouched_until_the_last_attempt() -> None:
    shelf = Shelf()
    before = shelf.put()
    engine = engine_of(define(shelf, transitions=[pay(actions=[noting("half"), failing(RuntimeError("card"))])]))

    for attempt in (1, 2):
        with pytest.raises(RuntimeError, match="card"):
            await engine.emit(Event.PAY, "urn:1", None, delivery(attempt))
        assert shelf.orders["urn:1"] == before
    with pytest.raises(RuntimeError, match="card"):
        await engine.emit(Event.PAY, "urn:1", None, delivery(3))

    assert shelf.orders["urn:1"] == replace(before, status=Status.FAILED)


@pytest.mark.requirement("W-15", "X-38")
async def test_a_direct_emit_parks_and_raises_unless_the_definition_says_otherwise() -> None:
    """Whoever calls learns that it failed; the state tells everybody else."""
    shelf = Shelf()
    shelf.put()
    broken = [pay(actions=[failing(RuntimeError("card"))])]

    with pytest.raises(RuntimeError, match="card"):
        await engine_of(define(shelf, transitions=broken)).emit(Event.PAY, "urn:1", 0, call())
    assert shelf.orders["urn:1"].status == "failed"
    shelf.put()
    silent = engine_of(define(shelf, transitions=broken, on_action_error="fail"))
    assert (await silent.emit(Event.PAY, "urn:1", 0, call())).status == "failed"
    before = shelf.put()
    with pytest.raises(RuntimeError, match="card"):
        await engine_of(define(shelf, transitions=broken, on_action_error="retry")).emit(Event.PAY, "urn:1", 0, call())
    assert shelf.orders["urn:1"] == before


async def test_raise_parks_an_event_of_a_transport_at_once_and_for_good() -> None:
    shelf = Shelf()
    shelf.put()
    broken = [pay(actions=[failing(RuntimeError("card"))])]

    with pytest.raises(PermanentError, match="card"):
        await engine_of(define(shelf, transitions=broken, on_action_error="raise")).emit(
            Event.PAY, "urn:1", 0, delivery(1)
        )
    assert shelf.orders["urn:1"].status == "failed"


async def test_an_event_that_the_workflow_does_not_have_is_said_to_be_unknown() -> None:
    """Not that it leads nowhere from this state: it does so from none, and no retry helps."""
    shelf = Shelf()
    shelf.put()

    with pytest.raises(UnknownEvent, match=r"event: expected an event of workflow '.*': pay, .* 'pya'") as found:
        await engine_of(define(shelf)).emit("pya", "urn:1", None, delivery(1))  # type: ignore[arg-type]  # a misspelt one
    assert isinstance(found.value, PermanentError)


async def test_an_action_may_ask_for_a_later_try_without_having_failed() -> None:
    shelf = Shelf()
    before = shelf.put()
    engine = engine_of(define(shelf, transitions=[pay(actions=[failing(DelayJob(500))])], on_action_error="fail"))

    with pytest.raises(DelayJob):
        await engine.emit(Event.PAY, "urn:1", None, delivery(3))

    assert shelf.orders["urn:1"] == before


async def test_an_action_that_forgets_to_return_the_entity_has_failed() -> None:
    shelf = Shelf()
    shelf.put()

    async def forgets(entity: Order, payload: Any) -> Order:
        return None  # type: ignore[return-value]  # the mistake under test

    with pytest.raises(PermanentError, match=r"forgets returned None instead of the entity"):
        await engine_of(define(shelf, transitions=[pay(actions=[forgets])])).emit(Event.PAY, "urn:1", 0, delivery())


# ---- events that come again, or at once ------------------------------------------------------------------------------


@pytest.mark.requirement("X-53")
async def test_an_event_that_comes_again_after_a_crash_is_recognised(caplog: pytest.LogCaptureFixture) -> None:
    """The entity was stored, the job was not completed: without this it would die although it had succeeded."""
    caplog.set_level(logging.INFO)
    shelf = Shelf()
    shelf.put(status=Status.PAID)
    engine = engine_of(define(shelf))

    again = await engine.emit(Event.PAY, "urn:1", None, delivery(may_be_repeated=True))

    assert (again.status, shelf.updates) == (Status.PAID, [])
    assert lines(caplog.records, "Event was applied before")
    with pytest.raises(NoTransition):
        await engine.emit(Event.PAY, "urn:1", None, delivery())
    with pytest.raises(NoTransition):
        await engine.emit(Event.SHIP, "urn:1", None, delivery(may_be_repeated=True))


@pytest.mark.requirement("X-53", "W-12")
async def test_after_a_crash_between_two_steps_the_rest_is_done() -> None:
    shelf = Shelf()
    shelf.put(status=Status.PACKED)
    engine = engine_of(define(shelf, states=states(idles=[Status.NEW])))

    order = await engine.emit(Event.PAY, "urn:1", None, delivery(may_be_repeated=True))

    assert (order.status, shelf.updates) == (Status.SHIPPED, [Status.SHIPPED])


@pytest.mark.requirement("X-52")
async def test_two_events_of_one_entity_never_overlap_and_two_entities_do() -> None:
    """Without the lock both would read amount 0, and one of the two additions would be lost."""
    shelf = Shelf()
    running: list[str] = []
    overlaps: set[tuple[str, ...]] = set()

    async def add(entity: Order, payload: int) -> Order:
        running.append(entity.urn)
        overlaps.add(tuple(running))
        await asyncio.sleep(0)
        running.remove(entity.urn)
        return replace(entity, amount=entity.amount + payload)

    loop = [OrderTransition(event=Event.PAY, from_=Status.NEW, to=Status.NEW, actions=[add])]
    engine = engine_of(define(shelf, transitions=loop))
    for urn in ("urn:1", "urn:2"):
        shelf.put(urn)

    await asyncio.gather(*(engine.emit(Event.PAY, urn, 1, call()) for _ in range(20) for urn in ("urn:1", "urn:2")))

    assert [order.amount for order in shelf.orders.values()] == [20, 20]
    assert ("urn:1", "urn:1") not in overlaps and ("urn:2", "urn:2") not in overlaps
    assert any(len(set(each)) == 2 for each in overlaps)


class Away:
    """Locks on a server that does not answer."""

    @contextlib.asynccontextmanager
    async def hold(self, urn: str) -> AsyncIterator[None]:
        raise ConnectionLost("no route to host")
        yield


@pytest.mark.requirement("X-52", "W-55")
async def test_a_lock_or_store_that_is_away_costs_no_attempt() -> None:
    """An outage of a minute would otherwise dead-letter everything that arrives in it."""
    definition = define()
    access: Any = definition.entity
    engine = Engine("order", definition, as_store(access), Hooks([]), locks=Away())

    with pytest.raises(DelayJob, match="no attempt counted: no route to host"):
        await engine.emit(Event.PAY, "urn:1", None, delivery(3))
    with pytest.raises(ConnectionLost):
        await engine.emit(Event.PAY, "urn:1", None, call())


# ---- what surrounds a step -----------------------------------------------------------------------------------------


@dataclass
class Payment:
    amount: int


@pytest.mark.requirement("W-5", "W-73")
async def test_payloads_become_objects_of_their_type_or_fail_for_good() -> None:
    shelf = Shelf()
    shelf.put()
    seen: list[Payment] = []

    async def see(entity: Order, payload: Payment) -> Order:
        seen.append(payload)
        return entity

    engine = engine_of(define(shelf, transitions=[pay(actions=[see])], payloads={Event.PAY: Payment}))

    with pytest.raises(PermanentError, match=r"payload of pay: Expected `int`, got `str` - at `\$.amount`"):
        await engine.emit(Event.PAY, "urn:1", {"amount": "five"}, delivery())
    await engine.emit(Event.PAY, "urn:1", {"amount": 5}, call())
    shelf.put()
    await engine.emit(Event.PAY, "urn:1", Payment(6), call())

    assert seen == [Payment(5), Payment(6)]


async def test_an_action_knows_its_step() -> None:
    shelf = Shelf()
    shelf.put()
    seen: list[Any] = []

    async def look(entity: Order, payload: Any) -> Order:
        now = step()
        seen.append((now.workflow, now.urn, now.event, now.source, now.target, now.key, now.attempt, now.tenant_id))
        return entity

    steps = [pay(actions=[look]), OrderTransition(event="pack", from_="paid", to="packed", actions=[look])]  # type: ignore[arg-type]  # words do too
    engine = engine_of(define(shelf, transitions=steps, states=states(idles=[Status.NEW])))

    await engine.emit(Event.PAY, "urn:1", None, delivery(2, key="k", headers={"tenantId": "t-1"}))

    assert seen == [
        ("order", "urn:1", "pay", "new", "paid", "order/urn%3A1/k/0/look", 2, "t-1"),
        ("order", "urn:1", "pack", "paid", "packed", "order/urn%3A1/k/1/look", 2, "t-1"),
    ]
    with pytest.raises(NotConfigured, match="for actions of a workflow"):
        step()


async def test_messages_need_entities_in_sql() -> None:
    shelf = Shelf()
    shelf.put()

    async def send(entity: Order, payload: Any) -> Order:
        step().enqueue(integration_type="webhook:x", event_type="paid")
        return entity

    with pytest.raises(InvalidOption, match="entities in a SQL ledger"):
        await engine_of(define(shelf, transitions=[pay(actions=[send])])).emit(Event.PAY, "urn:1", 0, delivery())


@pytest.mark.requirement("X-24")
async def test_a_move_is_logged_and_told_with_all_ids(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    shelf = Shelf()
    shelf.put()
    headers = {"tenantId": "t-1", "userId": "u-1", "correlationId": "c-1", "traceparent": "00-a-b-01"}

    with listening() as heard:
        await engine_of(define(shelf)).emit(Event.PAY, "urn:1", None, delivery(2, queue="orders", headers=headers))

    (line,) = lines(caplog.records, "Entity moved from new to paid by pay (event)")
    wanted = {"jobId": "7", "queue": "orders", "urn": "urn:1", "tenantId": "t-1", "userId": "u-1"}
    assert {name: line[name] for name in wanted} == wanted
    assert (line["correlationId"], line["attemptsMade"]) == ("c-1", 1)
    (told,) = heard.of("workflow.moved")
    assert (told["source"], told["target"], told["correlation_id"], told["traceparent"]) == (
        "new",
        "paid",
        "c-1",
        "00-a-b-01",
    )


def test_a_batch_is_a_sequence_of_payloads() -> None:
    batch = Batch([1, 2, 3])

    assert (batch[0], list(batch[1:]), len(batch), list(batch)) == (1, [2, 3], 3, [1, 2, 3])
    assert repr(batch) == "Batch([1, 2, 3])"
    with pytest.raises(InvalidOption, match="0 to 2"):
        batch.fail(3, ValueError("no"))
