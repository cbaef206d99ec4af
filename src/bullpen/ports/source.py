"""Where domain events come from: the ledger's own table of events, KurrentDB or EventStoreDB.

In: a position. Out: batches of events behind it, in order, for ever. A source translates and nothing more: it keeps no
checkpoint, retries nothing and drops nothing; content that no reader takes comes out as it is stored, and reading it
raises `UnreadableEvent`. Elsewhere: what events become (`bullpen.outbox`), the plug-ins (`bullpen.plugins.sources`),
the suite that all of them pass (`bullpen.testing.contracts.source`).
"""

from __future__ import annotations

import re
import uuid
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Final, Protocol

from bullpen._kernel import json
from bullpen.errors import (
    InvalidOption,
    UnreadableEvent,
    require,
)

__all__ = [
    "BEGINNING",
    "NO_STREAM",
    "EventBatch",
    "EventFilter",
    "EventMetadata",
    "EventSource",
    "NewEvent",
    "SourceEvent",
    "SourceHealth",
]

BEGINNING: Final = -1
"""The position before the first event."""

NO_STREAM: Final = -1
"""Expected version of a stream that must not exist yet; the first event of a stream has version 0."""

_LONGEST: Final = {"correlation_id": 120, "source": 120, "tenant_id": 60, "user_id": 60}
_WIRE: Final = {
    "correlation_id": "correlationId",
    "source": "source",
    "occurred_at": "occurredAt",
    "tenant_id": "tenantId",
    "user_id": "userId",
}


# What an event carries ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EventMetadata:
    """What every event carries beside its data. On the wire: correlationId, source, occurredAt, tenantId, userId,
    headers."""

    correlation_id: str
    """Ties together everything that one request or process caused. Reaches the target system."""
    source: str
    """The service that wrote the event."""
    occurred_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    """When it happened, aware."""
    tenant_id: str | None = None
    user_id: str | None = None
    headers: Mapping[str, Any] = field(default_factory=dict)
    """Travels with the message: `traceparent`, `idempotencyKey`, and whatever else the target shall get."""

    def __post_init__(self) -> None:
        for name, limit in _LONGEST.items():
            value = getattr(self, name)
            if value is None and name in ("tenant_id", "user_id"):
                continue
            fits = isinstance(value, str) and 0 < len(value) <= limit
            require(_WIRE[name], fits, f"text of 1 to {limit} characters", value)
        aware = isinstance(self.occurred_at, datetime) and self.occurred_at.tzinfo is not None
        require("occurredAt", aware, "an aware datetime", self.occurred_at)
        require("headers", isinstance(self.headers, Mapping), "a mapping", self.headers)

    def to_wire(self) -> dict[str, Any]:
        """The stored form; absent values are left out."""
        fields: dict[str, Any] = {
            "correlationId": self.correlation_id,
            "tenantId": self.tenant_id,
            "userId": self.user_id,
            "source": self.source,
            "occurredAt": _iso(self.occurred_at),
            "headers": dict(self.headers) or None,
        }
        return {name: value for name, value in fields.items() if value is not None}

    @classmethod
    def from_wire(cls, stored: Any) -> EventMetadata:
        """Read the stored form. Raises UnreadableEvent that names what is missing or wrong."""
        if not isinstance(stored, Mapping):
            raise UnreadableEvent("the event's metadata is not a JSON object; it needs correlationId and source")
        missing = [name for name in ("correlationId", "source", "occurredAt") if not stored.get(name)]
        if missing:
            raise UnreadableEvent(f"the event's metadata lacks {', '.join(missing)}")
        values: dict[str, Any] = {name: stored.get(wire) for name, wire in _WIRE.items() if name != "occurred_at"}
        try:
            occurred_at = _from_iso(stored["occurredAt"])
            return cls(**values, occurred_at=occurred_at, headers=stored.get("headers") or {})
        except InvalidOption as error:
            raise UnreadableEvent(f"the event's metadata cannot be used: {error}") from error


def _iso(instant: datetime) -> str:
    return instant.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _from_iso(text: Any) -> datetime:
    try:
        instant = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        raise InvalidOption("occurredAt", "an ISO 8601 instant", text) from None
    return instant if instant.tzinfo is not None else instant.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEvent:
    """An event to be appended. Its id makes appending it again harmless."""

    type: str
    """Kind and version of the event: `payment.completed.v1`."""
    data: Any
    metadata: EventMetadata
    id: str = field(default_factory=lambda: str(uuid.uuid4()))


@dataclass(frozen=True)
class SourceEvent:
    """One stored event."""

    id: str
    stream: str
    type: str
    version: int
    """Its place in its stream, from 0."""
    position: int
    """Its place among all events; a checkpoint behind it has this number."""
    recorded_at: datetime
    data_bytes: bytes = field(repr=False)
    metadata_bytes: bytes = field(repr=False)
    problem: str | None = None
    """Why the event could not be decoded; what is here of it is what could be read."""

    @cached_property
    def data(self) -> Any:
        """The content. Raises UnreadableEvent when it is not JSON."""
        return _decode(self.data_bytes, "data")

    @cached_property
    def metadata(self) -> EventMetadata:
        """Raises UnreadableEvent when it lacks what every event must carry."""
        return EventMetadata.from_wire(self.raw_metadata)

    @cached_property
    def raw_metadata(self) -> Any:
        """The metadata as it is stored, whatever it holds. Raises UnreadableEvent when it is not JSON."""
        return _decode(self.metadata_bytes, "metadata") if self.metadata_bytes else {}


def _decode(content: bytes, what: str) -> Any:
    try:
        return json.decode(content)
    except ValueError as error:
        raise UnreadableEvent(f"the event's {what} is not JSON: {error}") from error


# Reading ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EventFilter:
    """Which events a source gives: those whose type begins with one of the prefixes, or matches the whole pattern.

    Neither means all. Types that begin with `$` belong to the event store and never come out.
    """

    prefixes: tuple[str, ...] = ()
    regex: str | None = None

    def __post_init__(self) -> None:
        require("prefixes", not (self.prefixes and self.regex), "prefixes or a regex, not both", self.prefixes)
        given = isinstance(self.prefixes, tuple)
        fits = given and all(isinstance(each, str) and each and not each.startswith("$") for each in self.prefixes)
        require("prefixes", fits, "prefixes of event types, such as 'payment.'", self.prefixes)
        if self.regex is not None:
            try:
                re.compile(self.regex)
            except (re.error, TypeError):
                raise InvalidOption("regex", "a regular expression", self.regex) from None

    def wants(self, event_type: str) -> bool:
        if event_type.startswith("$"):
            return False
        if self.regex is not None:
            return re.fullmatch(self.regex, event_type) is not None
        return not self.prefixes or event_type.startswith(self.prefixes)


@dataclass(frozen=True, slots=True)
class EventBatch:
    """What came at once. It may be without events: then only the position has moved past events that were not asked
    for."""

    events: tuple[SourceEvent, ...]
    position: int | None
    """Checkpoint behind this batch. None: the source keeps its own, and `confirm` moves it."""
    caught_up: bool = False
    """Nothing more was there when this was read."""
    receipt: object = field(default=None, compare=False, repr=False)
    """For the source that made it."""


@dataclass(frozen=True, slots=True)
class SourceHealth:
    """Whether the event store answers."""

    ok: bool
    reason: str = ""


class EventSource(Protocol):
    """Gives every event behind a position, in the order of positions, at least once.

    An event is never passed over because it was committed later than one with a higher position. An outage ends the
    subscription with SourceUnavailable; the reader subscribes again from its own checkpoint.
    """

    @property
    def name(self) -> str:
        """Where events come from, for people; without secrets."""
        ...

    def subscribe(self, after: int) -> AsyncGenerator[EventBatch, None]:
        """Batches behind a position, for ever; close it to stop. An empty one at the same place is a sign of life."""
        ...

    def read(self, after: int, *, until: int) -> AsyncGenerator[EventBatch, None]:
        """Batches behind a position up to another one, inclusive; then it ends."""
        ...

    async def confirm(self, batch: EventBatch) -> None:
        """What the batch brought is stored for certain. Means something only where the source keeps the checkpoint."""
        ...

    async def head(self) -> int:
        """The position of the newest event, BEGINNING when there is none."""
        ...

    async def check(self) -> SourceHealth: ...

    async def aclose(self) -> None:
        """Let go of connections. Safe to call twice."""
        ...
