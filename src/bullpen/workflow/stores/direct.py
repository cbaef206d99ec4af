"""The user's own access to entities, seen as a store: each step is stored by `update` as it is made.

In: anything with new, load, update, status and urn. Out: the port, without what such access cannot give: versions, past
and applied events. The engine makes up for it with a lock per urn, and by recognising an event that comes again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar, cast

from bullpen.ports.entity import Change, Entities, EntityStore, HistoryEntry, Loaded

__all__ = ["DirectStore", "as_store"]

T = TypeVar("T")
S = TypeVar("S")


class DirectStore(Generic[T, S]):
    """An `EntityStore` over `Entities`."""

    can_send = False

    def __init__(self, entities: Entities[T, S]) -> None:
        self.entities = entities

    def new(self) -> T:
        return self.entities.new()

    def status(self, entity: T) -> S:
        return self.entities.status(entity)

    def urn(self, entity: T) -> str:
        return self.entities.urn(entity)

    async def read(
        self, workflow: str, urn: str, keys: Sequence[str] = (), *, tenant_id: str | None = None
    ) -> Loaded[T] | None:
        entity = await self.entities.load(urn)
        return None if entity is None else Loaded(entity, 0)

    async def advance(self, entity: T, status: S) -> T:
        return await self.entities.update(entity, status)

    async def commit(self, change: Change[T]) -> T:
        return change.entity

    async def history(
        self, workflow: str, urn: str, *, limit: int = 100, tenant_id: str | None = None
    ) -> list[HistoryEntry]:
        return []


def as_store(access: Entities[T, S] | EntityStore[T, S]) -> EntityStore[T, S]:
    """The store behind a definition's `entity`."""
    if hasattr(access, "commit"):
        return cast("EntityStore[T, S]", access)
    return DirectStore(access)
