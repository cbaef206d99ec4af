"""What may be defined, and what is refused while it is."""

from __future__ import annotations

from typing import Any

import pytest

from bullpen.errors import InvalidOption
from bullpen.ports.bindings import AnyEvent, AnyTransport
from bullpen.workflow.definition import InlineEntities, States, Transition
from tests.workflow.kit import Event, Order, OrderTransition, Shelf, Status, define, states

NOT_FUNCTIONS: Any = dict.fromkeys(["new", "load", "update", "status", "urn"], 1)
PAY: dict[str, Any] = {"event": Event.PAY, "from_": Status.NEW, "to": Status.PAID}


async def an_action(entity: Order, payload: Any) -> Order:
    return entity


async def an_async_condition(entity: Order, payload: Any) -> bool:
    return False


@pytest.mark.requirement("W-8", "W-9")
def test_a_definition_has_all_parts_and_most_are_optional() -> None:
    plain = define(name=None)

    assert (plain.name, plain.actions, plain.conditions, plain.fallback) == (None, (), (), None)
    assert (plain.kafka, plain.bullmq, plain.rabbitmq, plain.events) == (None, None, None, None)
    assert plain.on_action_error is None
    assert plain.all_events() == (Event.PAY, Event.PACK, Event.SHIP)
    assert plain.all_states() == (Status.NEW, Status.PAID, Status.PACKED, Status.SHIPPED, Status.FAILED)


@pytest.mark.requirement("W-9")
def test_a_transition_takes_one_or_many_events_and_states() -> None:
    one: OrderTransition = OrderTransition(event=Event.PAY, from_=Status.NEW, to=Status.PAID)
    several: OrderTransition = OrderTransition(
        event=[Event.PAY, Event.PACK], from_=(Status.NEW, Status.PAID), to=Status.PACKED
    )

    assert (one.events, one.sources) == ((Event.PAY,), (Status.NEW,))
    assert (several.events, several.sources) == ((Event.PAY, Event.PACK), (Status.NEW, Status.PAID))
    assert str(several) == "new or paid --pay or pack--> packed"


@pytest.mark.requirement("W-10")
async def test_inline_access_takes_plain_and_async_functions() -> None:
    shelf = Shelf()
    order = shelf.put()

    async def load(urn: str) -> Order | None:
        return shelf.orders.get(urn)

    async def update(entity: Order, status: Status) -> Order:
        return shelf.update(entity, status)

    plain = shelf.access()
    asynchronous = InlineEntities(
        new=lambda: Order("blank"), load=load, update=update, status=lambda o: o.status, urn=lambda o: o.urn
    )

    for access in (plain, asynchronous):
        assert await access.load("urn:1") == order
        assert await access.load("nobody") is None
        assert (await access.update(order, Status.PAID)).status == Status.PAID
        assert (access.status(order), access.urn(order)) == (Status.NEW, "urn:1")
        shelf.put()
    assert asynchronous.new().urn == "blank"


class NoUpdate:
    def new(self) -> None: ...
    def load(self) -> None: ...
    def status(self) -> None: ...
    def urn(self) -> None: ...


@pytest.mark.requirement("W-25", "W-60")
@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: define(name=""), "name: expected non-empty text"),
        (lambda: define(states=None), "states: expected a States object"),
        (lambda: define(transitions=[]), "transitions: expected at least one"),
        (lambda: define(transitions="pay"), "transitions: expected a list"),
        (lambda: define(transitions=["pay"]), "transitions: expected Transition objects"),
        (lambda: define(conditions=[an_async_condition]), "conditions: expected plain functions"),
        (lambda: define(fallback=lambda *_: None), "fallback: expected an `async def`"),
        (lambda: define(max_steps=0), "max_steps"),
        (lambda: define(on_action_error="ignore"), "on_action_error: expected 'retry', 'raise', 'fail' or None"),
        (lambda: define(entity=NoUpdate()), "it lacks update"),
        (lambda: define(payloads={"refund": int}), "payloads: expected events of the transitions"),
        (
            lambda: define(events=AnyTransport(events=[AnyEvent(source="q", event="refund")])),
            "events: expected events of the transitions",
        ),
        (lambda: states(finals=[Status.NEW]), "states.idles: expected states that are not final"),
        (lambda: States(finals="done", failed="failed"), "states.finals: expected a list"),
        (lambda: Transition(event=[], from_=1, to=2), "transition.event: expected at least one"),
        (lambda: Transition(event=1, from_=[], to=2), "transition.from_: expected at least one"),
        (lambda: OrderTransition(**{**PAY, "actions": [len]}), "`async def`"),
        (lambda: define(transitions=[OrderTransition(**{**PAY, "actions": an_action})]), "actions: expected a list"),
        (
            lambda: define(transitions=[OrderTransition(**{**PAY, "conditions": [an_async_condition]})]),
            "transition.conditions: expected plain functions",
        ),
        (
            lambda: InlineEntities(**NOT_FUNCTIONS),
            "entity.new",
        ),
    ],
)
def test_a_mistake_is_refused_while_the_definition_is_made(make: Any, complaint: str) -> None:
    """Never at the first event. An `async def` condition, for one, would always hold."""
    with pytest.raises(InvalidOption, match=complaint):
        make()
