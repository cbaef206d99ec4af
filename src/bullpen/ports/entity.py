"""Where the entities of a workflow are kept: the user's own access, or a store that commits whole changes.

In: urns, and what one event did to an entity. Out: entities, and changes that are stored or not at all. Two sizes:
`Entities` is what everybody can write in ten lines; `EntityStore` also knows versions and applied events, so that no
update is lost and no event counts twice. Elsewhere: ready stores (`bullpen.ledger.entities`,
`bullpen.workflow.stores`), deciding what an event does (`bullpen.workflow.machine`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Generic, Literal, Protocol, TypeVar, runtime_checkable

from bullpen.errors import require, word

__all__ = [
    "AllowedStates",
    "Applied",
    "Change",
    "Entities",
    "EntityBrowser",
    "EntityHead",
    "EntityStore",
    "HistoryEntry",
    "KnowsStates",
    "Loaded",
    "Move",
    "UrnLocks",
]

T = TypeVar("T")
S = TypeVar("S")
T_co = TypeVar("T_co", covariant=True)


class Entities(Protocol[T, S]):
    """Access to entities, as anybody may write it.

    Nothing is asked of it about crashes and concurrency: the engine holds a lock per urn around each event, and an
    event that is delivered again after a crash is recognised by the state that it leads to. A store that can do better
    is an `EntityStore`.
    """

    def new(self) -> T:
        """A blank entity, as it is before its first event."""
        ...

    async def load(self, urn: str) -> T | None: ...

    async def update(self, entity: T, status: S) -> T:
        """Give the entity a status and store both. Raise EntityChanged when another process changed it."""
        ...

    def status(self, entity: T) -> S: ...

    def urn(self, entity: T) -> str: ...


@dataclass(frozen=True, slots=True)
class Move:
    """One performed transition, in words."""

    event: str
    source: str
    target: str
    kind: Literal["event", "automatic", "failed"] = "event"
    """automatic: the engine took the step without an event; failed: an action failed and the entity was parked."""


@dataclass(frozen=True, slots=True)
class Applied:
    """The outcome of an event that was handled before."""

    outcome: Literal["applied", "failed"]
    reason: str = ""


@dataclass(frozen=True)
class Loaded(Generic[T_co]):
    """An entity as it was read."""

    entity: T_co
    version: int
    applied: Mapping[str, Applied] = field(default_factory=dict)
    """Of the keys that were asked for, those that were handled before."""


@dataclass(frozen=True, kw_only=True)
class Change(Generic[T]):
    """Everything that one event, or one batch of them, does to an entity."""

    workflow: str
    urn: str
    entity: T
    """In its new state."""
    version: int
    """The one it was read with; 0: the entity is new, and this change makes it."""
    moves: Sequence[Move]
    keys: Sequence[str]
    """Identities of the events; each counts once."""
    reason: str = ""
    """Why it was parked, for a failed move."""
    messages: Sequence[Any] = ()
    """Outbox items that leave if and only if the change is stored."""
    job_id: str | None = None
    attempt: int | None = None
    tenant_id: str | None = None
    user_id: str | None = None
    correlation_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryEntry:
    """One row of an entity's past."""

    urn: str
    version: int
    """Of the entity after it."""
    event: str
    source: str
    target: str
    kind: str
    at: datetime
    key: str = ""
    """Identity of the event that caused it."""
    job_id: str | None = None
    attempt: int | None = None
    tenant_id: str | None = None
    user_id: str | None = None
    correlation_id: str | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class EntityHead:
    """One entity of a list."""

    urn: str
    status: str
    version: int


@runtime_checkable
class EntityBrowser(Protocol):
    """A store that can also list its entities. Optional."""

    async def count_by_status(self, *, most: int = 100_000, tenant_id: str | None = None) -> dict[str, int]:
        """How many entities have each status; at most `most` entities are counted."""
        ...

    async def browse(
        self,
        *,
        status: str | None = None,
        prefix: str = "",
        after: str | None = None,
        limit: int = 50,
        tenant_id: str | None = None,
    ) -> list[EntityHead]:
        """Entities in the order of their urns: in a status, with urns that begin so, behind `after`."""
        ...


class EntityStore(Protocol[T, S]):
    """Keeps entities with their versions, their past and the events that were applied to them.

    `commit` stores all of a change or nothing, and refuses a change whose version is not the present one. An event
    whose key was committed is found by `read` ever after (stores may forget keys that are very old, and say when).
    """

    can_send: bool
    """Whether a change may carry outbox messages."""

    def new(self) -> T: ...

    def status(self, entity: T) -> S: ...

    def urn(self, entity: T) -> str: ...

    async def read(
        self, workflow: str, urn: str, keys: Sequence[str] = (), *, tenant_id: str | None = None
    ) -> Loaded[T] | None:
        """The entity, its version, and which of `keys` were applied, of one instant. None: no such entity."""
        ...

    async def advance(self, entity: T, status: S) -> T:
        """The entity in its next state. Nothing is stored until `commit`."""
        ...

    async def commit(self, change: Change[T]) -> T:
        """Store the change. Raises EntityChanged when the version is not the present one any more."""
        ...

    async def history(
        self, workflow: str, urn: str, *, limit: int = 100, tenant_id: str | None = None
    ) -> list[HistoryEntry]:
        """The newest entries of an entity's past, oldest first."""
        ...


class UrnLocks(Protocol):
    """Keeps two events of one entity apart."""

    def hold(self, urn: str) -> AbstractAsyncContextManager[None]:
        """Wait until no other caller holds this urn. Raises EntityBusy when that takes too long."""
        ...


@runtime_checkable
class KnowsStates(Protocol):
    """A store that programs create entities with, and that refuses those in a state that no workflow has."""

    def allow(self, states: Sequence[Any]) -> None:
        """These are states, besides those of other workflows that use the store."""
        ...


class AllowedStates:
    """The states of all workflows that use a store; before the first one registers, every status is allowed."""

    def __init__(self) -> None:
        self._words: set[str] = set()

    def allow(self, states: Sequence[Any]) -> None:
        self._words.update(map(word, states))

    def check(self, status: Any) -> None:
        """Raises InvalidOption for a status that no workflow of the store has."""
        known = not self._words or word(status) in self._words
        require("entity.status", known, f"a state of the workflow: {', '.join(sorted(self._words))}", status)
