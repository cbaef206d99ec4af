"""An order and its workflow, for tests: entities in a dictionary, actions that remember their calls."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from bullpen.ports.entity import UrnLocks
from bullpen.workflow.actions import Hooks
from bullpen.workflow.context import Trigger
from bullpen.workflow.definition import Definition, InlineEntities, States, Transition
from bullpen.workflow.engine import Engine
from bullpen.workflow.stores.direct import as_store


class Status(StrEnum):
    NEW = "new"
    PAID = "paid"
    PACKED = "packed"
    SHIPPED = "shipped"
    FAILED = "failed"


class Event(StrEnum):
    PAY = "pay"
    PACK = "pack"
    SHIP = "ship"
    REOPEN = "reopen"


@dataclass(frozen=True)
class Order:
    urn: str
    status: Status = Status.NEW
    amount: int = 0
    notes: tuple[str, ...] = ()

    def noted(self, note: str) -> Order:
        return replace(self, notes=(*self.notes, note))


OrderDefinition = Definition[Order, Any, Event, Status]
OrderTransition = Transition[Order, Any, Event, Status]


@dataclass
class Shelf:
    """Entities in a dictionary; remembers what was stored, in order."""

    orders: dict[str, Order] = field(default_factory=dict)
    updates: list[Status] = field(default_factory=list)

    def put(self, urn: str = "urn:1", **fields: Any) -> Order:
        self.orders[urn] = Order(urn, **fields)
        return self.orders[urn]

    def update(self, entity: Order, status: Status) -> Order:
        self.updates.append(status)
        self.orders[entity.urn] = replace(entity, status=status)
        return self.orders[entity.urn]

    def access(self) -> InlineEntities[Order, Status]:
        return InlineEntities(
            new=lambda: Order("urn:new"),
            load=self.orders.get,
            update=self.update,
            status=lambda order: order.status,
            urn=lambda order: order.urn,
        )


def noting(note: str) -> Callable[[Order, Any], Any]:
    async def action(entity: Order, payload: Any) -> Order:
        return entity.noted(note)

    return action


def failing(error: Exception) -> Callable[[Order, Any], Any]:
    async def action(entity: Order, payload: Any) -> Order:
        raise error

    return action


def states(**changes: Any) -> States[Status]:
    given: dict[str, Any] = {
        "idles": [Status.NEW, Status.PAID, Status.PACKED],
        "finals": [Status.SHIPPED],
        "failed": Status.FAILED,
        "initial": Status.NEW,
        **changes,
    }
    return States(**given)


def transitions() -> list[OrderTransition]:
    return [
        OrderTransition(event=Event.PAY, from_=Status.NEW, to=Status.PAID),
        OrderTransition(event=Event.PACK, from_=Status.PAID, to=Status.PACKED),
        OrderTransition(event=Event.SHIP, from_=Status.PACKED, to=Status.SHIPPED),
    ]


def define(shelf: Shelf | None = None, **changes: Any) -> OrderDefinition:
    given: dict[str, Any] = {
        "name": "order",
        "states": states(),
        "transitions": transitions(),
        "entity": (shelf or Shelf()).access(),
        **changes,
    }
    return OrderDefinition(**given)


def engine_of(
    definition: OrderDefinition, actions: Sequence[object] = (), locks: UrnLocks | None = None
) -> Engine[Order, Any, Event, Status]:
    access: Any = definition.entity
    return Engine("order", definition, as_store(access), Hooks([*definition.actions, *actions]), locks=locks)


def call(**fields: Any) -> Trigger:
    """An event that somebody emits directly."""
    return Trigger(**{"key": uuid.uuid4().hex, **fields})


def delivery(attempt: int = 1, *, of: int = 3, key: str = "", **fields: Any) -> Trigger:
    """An event that a transport delivers, with so many attempts in all."""
    return Trigger(
        key=key or uuid.uuid4().hex, attempt=attempt, job_id="7", is_final=lambda error: attempt >= of, **fields
    )
