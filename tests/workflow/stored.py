"""Orders as rows and as dictionaries, behind the ready stores: one face for the tests of both."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from bullpen.ledger import Ledger
from bullpen.ledger.entities import SqlEntities
from bullpen.ports.entity import EntityStore
from bullpen.redis import Connection
from bullpen.workflow.actions import Hooks
from bullpen.workflow.definition import Definition, States, Transition
from bullpen.workflow.engine import Engine
from bullpen.workflow.stores import RedisEntities
from tests.workflow.kit import Event, Status, states


class Base(DeclarativeBase):
    pass


class OrderRow(Base):
    __tablename__ = "orders"

    urn: Mapped[str] = mapped_column(primary_key=True)
    status: Mapped[str]
    amount: Mapped[int] = mapped_column(default=0)
    version: Mapped[int] = mapped_column(default=1)


@dataclass
class Stored:
    """A store of orders, and how to make and look at one."""

    store: EntityStore[Any, Status]
    create: Callable[..., Awaitable[Any]]
    load: Callable[[str], Awaitable[Any]]
    ledger: Ledger | None = None

    async def look(self, urn: str = "urn:1") -> tuple[str, int]:
        """Status and amount."""
        found = await self.load(urn)
        return self.store.status(found).value, get(found, "amount")


def get(entity: Any, name: str) -> Any:
    return entity[name] if isinstance(entity, dict) else getattr(entity, name)


def put(entity: Any, name: str, value: Any) -> Any:
    if isinstance(entity, dict):
        return {**entity, name: value}
    setattr(entity, name, value)
    return entity


async def make_tables(ledger: Ledger) -> None:
    async with ledger.database.engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)


def sql_orders(ledger: Ledger, status_type: Any = Status) -> Stored:
    store = SqlEntities[OrderRow, Status](OrderRow, ledger, status_type=status_type)

    async def create(urn: str, **fields: Any) -> OrderRow:
        return await store.create(OrderRow(**{"urn": urn, "status": "new", **fields}))

    return Stored(store, create, store.load, ledger)


def redis_orders(connection: Connection, status_type: Any = Status, **options: Any) -> Stored:
    store = RedisEntities(connection, "orders", status_type=status_type, blank={"status": "new"}, **options)

    async def create(urn: str, **fields: Any) -> dict[str, Any]:
        return await store.create({"urn": urn, "status": Status.NEW, "amount": 0, **fields})

    return Stored(store, create, store.load)


async def add(entity: Any, payload: Any) -> Any:
    return put(entity, "amount", get(entity, "amount") + payload)


def engine_on(stored: Stored, **changes: Any) -> Engine[Any, Any, Event, Status]:
    """New → new adds the payload on every `pay`; then pack, ship."""
    given: dict[str, Any] = {
        "name": "order",
        "states": states(idles=[Status.NEW, Status.PACKED]),
        "transitions": [
            Transition(event=Event.PAY, from_=Status.NEW, to=Status.NEW, actions=[add]),
            Transition(event=Event.PACK, from_=Status.NEW, to=Status.PACKED),
            Transition(event=Event.SHIP, from_=Status.PACKED, to=Status.SHIPPED),
            Transition(event=Event.REOPEN, from_=Status.FAILED, to=Status.NEW),
        ],
        "entity": stored.store,
        **changes,
    }
    definition: Definition[Any, Any, Event, Status] = Definition(**given)
    assert isinstance(definition.states, States)
    return Engine("order", definition, stored.store, Hooks(definition.actions))
