"""What the outbox holds and what becomes of it, as plain records. No database here.

`OutboxItem` goes in, checked at the door; `OutboxRow` comes out; an outcome says what one attempt became. Elsewhere:
the contract of a store (`repository`), the statements (`outbox`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Final, NamedTuple, TypedDict

import msgspec

from bullpen._kernel import json, tracing
from bullpen._kernel.backoff import Backoff, from_option
from bullpen._kernel.duration import check_int, to_ms
from bullpen._kernel.outcome import cut, storable
from bullpen.errors import InvalidOption, require

MAX_LENGTHS: Final = {
    "source_stream_id": 200,
    "source_event_id": 100,
    "route_key": 120,
    "integration_type": 120,
    "event_type": 120,
    "tenant_id": 60,
    "user_id": 60,
    "correlation_id": 120,
    "ordering_key": 200,
}
"""Characters a column holds. Longer names are refused, never cut: cutting would break the fence."""

MAX_ERROR: Final = 5_000
"""Characters kept of the last error."""

MAX_RECEIPT: Final = 500
"""Characters kept of what a target answered."""

RESERVED_STREAM: Final = "outbox.dead"
"""Stream of our own announcements that a row is DEAD. An announcement that dies is not announced."""

ALL_TYPES: Final = "*"
"""Instead of an integration type: all of them."""

MAX_WEIGHT: Final = 1_000
_MOST_ROWS: Final = 1_000_000

_unwanted = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]").search
_REQUIRED: Final = frozenset({"source_stream_id", "source_event_id", "integration_type", "event_type"})
_LAST_YEAR: Final = 9_000
_LONGEST_DELAY_MS: Final = 100 * 366 * 86_400_000
_HEADROOM: Final = 4_096  # ids and names that travel beside payload and headers in the same job


class OutboxStatus(StrEnum):
    """Where a row is. FAILED means that it will be tried again; DEAD is the end until somebody redrives it."""

    PENDING = "PENDING"
    CLAIMED = "CLAIMED"
    SENT = "SENT"
    FAILED = "FAILED"
    DEAD = "DEAD"


class OutboxFields(TypedDict, total=False):
    """What `Outbox.enqueue` takes besides type, event and payload: the other fields of `OutboxItem`."""

    source_stream_id: str | None
    source_event_id: str | None
    route_key: str | None
    headers: Mapping[str, Any] | None
    tenant_id: str | None
    user_id: str | None
    correlation_id: str | None
    ordering_key: str | None
    due_at: datetime | None
    delay: int | timedelta
    max_attempts: int | None
    backoff: Backoff | int | timedelta | None
    idempotency_key: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxItem:
    """One message to be stored with the business data. Checked when made; nothing is written yet.

    Raises InvalidOption for a name that is too long or a value that cannot travel, PayloadTooLarge above 10 MiB.
    """

    integration_type: str
    """Channel and target, such as `webhook:partnerX`."""
    event_type: str
    payload: Any = None
    """Any JSON value; None becomes `{}`. Identifiers and what the target needs, no blobs."""
    source_stream_id: str
    source_event_id: str
    """Stream and event that this message comes from; with the route they make a repeated enqueue a duplicate."""
    route_key: str | None = None
    """Tells two messages about one event apart. None: the integration type."""
    headers: Mapping[str, Any] | None = None
    """Travels with the message. `idempotencyKey` is added unless it is there."""
    tenant_id: str | None = None
    user_id: str | None = None
    correlation_id: str | None = None
    ordering_key: str | None = None
    """Messages of one integration type and one key leave one after the other, in the order of their insertion."""
    due_at: datetime | None = None
    """Not before this instant (aware). None: at once, or after `delay`."""
    delay: int | timedelta = 0
    """Not before so long after the insert, by the database's clock."""
    max_attempts: int | None = None
    """None: what the outbox is configured to."""
    backoff: Backoff | int | timedelta | None = None
    """Pauses between attempts of this message. None: 60 s doubling up to 15 min, plus 0 to 10 s."""
    idempotency_key: str | None = None
    """What the target uses to recognise a repetition. None: source event id and route, `order-7/webhook:crm`."""

    _record: dict[str, Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, limit in MAX_LENGTHS.items():
            check_text(name, getattr(self, name), limit, required=name in _REQUIRED)
        # None is "no tenant"; an empty name would be a tenant that nobody can tell from none.
        has_name = self.tenant_id is None or bool(self.tenant_id.strip())
        require("tenant_id", has_name, "text that is not blank, or None", self.tenant_id)
        channel, colon, target = self.integration_type.partition(":")
        is_complete = bool(channel.strip()) and bool(target.strip() or not colon)
        require(
            "integration_type", is_complete, "a channel and a target such as 'webhook:partnerX'", self.integration_type
        )
        require(
            "source_stream_id",
            self.source_stream_id != RESERVED_STREAM,
            "another stream: the outbox uses this one for its own announcements",
            self.source_stream_id,
        )
        object.__setattr__(self, "_record", self._make_record())

    @property
    def payload_bytes(self) -> int:
        """Size of the payload as it is stored."""
        return len(self._record["payload"].encode())

    def to_record(self, *, default_attempts: int, strict: bool) -> dict[str, Any]:
        """The fields of the insert. `strict`: no route key at all."""
        record = dict(self._record)
        explicit = self.route_key
        record["route_key"] = "" if strict else (self.integration_type if explicit is None else explicit)
        if record["max_attempts"] is None:
            record["max_attempts"] = default_attempts
        headers = {**tracing.carrier(), **(self.headers or {})}
        own = _own_key(self.source_event_id, record["route_key"])
        headers.setdefault("idempotencyKey", self.idempotency_key or own)
        record["headers"] = _json_text(headers, "headers")
        return record

    def _make_record(self) -> dict[str, Any]:
        payload = _json_text({} if self.payload is None else self.payload, "payload")
        headers = self.headers
        require("headers", headers is None or isinstance(headers, Mapping), "a mapping or None", headers)
        encoded_headers = "" if headers is None else _json_text(dict(headers), "headers")
        json.check_payload_size(len(payload.encode()), len(encoded_headers.encode()) + _HEADROOM)
        if self.due_at is not None:
            aware = isinstance(self.due_at, datetime) and self.due_at.tzinfo is not None
            require("due_at", aware, "an aware datetime", self.due_at)
            require("delay", self.delay == 0, "none beside due_at", self.delay)
            require("due_at", self.due_at.year <= _LAST_YEAR, f"an instant up to the year {_LAST_YEAR}", self.due_at)
        delay_ms = to_ms("delay", self.delay)
        require("delay", delay_ms <= _LONGEST_DELAY_MS, "at most 100 years", self.delay)
        if self.max_attempts is not None:
            check_int("max_attempts", self.max_attempts, minimum=1, maximum=1_000_000)
        if self.idempotency_key is not None:
            check_text("idempotency_key", self.idempotency_key, 250, required=True)
        backoff = None if self.backoff is None else from_option(self.backoff)
        return {
            "source_stream_id": self.source_stream_id,
            "source_event_id": self.source_event_id,
            "integration_type": self.integration_type,
            "event_type": self.event_type,
            "payload": payload,
            "tenant_id": self.tenant_id,
            "user_id": self.user_id,
            "correlation_id": self.correlation_id,
            "ordering_key": self.ordering_key,
            "due_ms": None if self.due_at is None else int(self.due_at.timestamp() * 1000),
            "delay_ms": delay_ms,
            "max_attempts": self.max_attempts,
            "backoff": None if backoff is None else _json_text(backoff.to_wire(), "backoff"),
        }


@dataclass(frozen=True, slots=True)
class Enqueued:
    """What became of one item. `created` is False when the same source event was stored before for this route."""

    id: str | None
    """None only for a duplicate whose row is no longer there (retention), or cannot be seen by one without a tenant."""
    created: bool


class OutboxRow(NamedTuple):
    """One row as it was read."""

    id: str
    seq: int
    source_stream_id: str
    source_event_id: str
    route_key: str
    integration_type: str
    event_type: str
    payload_json: str
    headers_json: str | None
    tenant_id: str | None
    user_id: str | None
    correlation_id: str | None
    ordering_key: str | None
    backoff_json: str | None
    created_at: datetime
    due_at: datetime
    attempts: int
    max_attempts: int
    status: OutboxStatus
    parked: bool
    fence: int
    locked_at: datetime | None
    locked_by: str | None
    locked_until: datetime | None
    started_at: datetime | None
    sent_at: datetime | None
    dead_at: datetime | None
    last_error: str | None
    error_code: str | None
    updated_at: datetime

    @property
    def payload(self) -> Any:
        return json.decode(self.payload_json)

    @property
    def headers(self) -> dict[str, Any]:
        return {} if self.headers_json is None else dict(json.decode(self.headers_json))

    @property
    def idempotency_key(self) -> str:
        """The same for every attempt and after a redrive, and for no other message."""
        return self.key_in(self.headers)

    def key_in(self, headers: Mapping[str, Any]) -> str:
        """The same, of headers that were read already."""
        # A row of another program may have no such header; its key is made as `OutboxItem` makes it.
        return str(headers.get("idempotencyKey") or _own_key(self.source_event_id, self.route_key))

    @property
    def is_announcement(self) -> bool:
        """True for a row that tells of another one's death."""
        return self.source_stream_id == RESERVED_STREAM


@dataclass(frozen=True, slots=True)
class Attempt:
    """One delivery, as it was written down."""

    number: int
    fence: int
    worker: str | None
    outcome: str
    error_code: str | None
    error: str | None
    started_at: datetime | None
    finished_at: datetime
    receipt: str | None = None
    """What the target answered to a delivery it took."""


# What one claim became ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sent:
    """Delivered. `receipt` is what the target answered, such as an id of the provider."""

    receipt: str = ""


@dataclass(frozen=True, slots=True)
class Retried:
    """Failed, to be tried again after `delay_ms`, unless that was the last attempt. Counts."""

    error: str
    code: str
    delay_ms: int


@dataclass(frozen=True, slots=True)
class Died:
    """Failed finally. `counted` is False when no delivery was tried."""

    error: str
    code: str
    counted: bool = True


@dataclass(frozen=True, slots=True)
class Released:
    """Given back untried: nothing counts."""

    delay_ms: int = 0
    error: str | None = None


RowOutcome = Sent | Retried | Died | Released


class Settlement(NamedTuple):
    """A claimed row and what became of it. It is written only if the claim still holds (same fence, still CLAIMED)."""

    row: OutboxRow
    outcome: RowOutcome
    worker: str
    next_lease_ms: int = 0
    """Take the next row of the same ordering key for so long, if this one has ended and that is due. 0: leave it."""
    run: tuple[tuple[OutboxRow, RowOutcome], ...] = ()
    """Rows of the same ordering key that left behind this one, under its claim (`OutboxRepository.followers`); all but
    the last were sent. They are written if this one is. `next_lease_ms` is then about what follows them."""


class SettledRow(NamedTuple):
    """What a settlement did. `status` None: the claim no longer held, and nothing was written."""

    id: str
    status: OutboxStatus | None
    attempts: int
    next: OutboxRow | None = None
    """The next row of its ordering key: claimed for whoever settled, and begun."""
    run: tuple[SettledRow, ...] = ()
    """Of the rows that left behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimit:
    """What was decided about one tenant."""

    tenant_id: str
    integration_type: str = ALL_TYPES
    """Which rows of the tenant it is about; `*`: all together for which nothing else is said."""
    weight: int = 1
    """Its share of a claim beside the shares of others."""
    concurrency: int | None = None
    """Rows under way at the same time, over all dispatchers and workers. None: no limit."""
    rate_max: int | None = None
    """Rows started within `rate_ms`. None: no limit."""
    rate_ms: int = 1_000

    def __post_init__(self) -> None:
        check_text("tenant_id", self.tenant_id, MAX_LENGTHS["tenant_id"])
        check_text("integration_type", self.integration_type, MAX_LENGTHS["integration_type"])
        check_int("weight", self.weight, minimum=1, maximum=MAX_WEIGHT)
        for name in ("concurrency", "rate_max"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), minimum=0, maximum=_MOST_ROWS)
        check_int("rate_ms", self.rate_ms, minimum=1, maximum=86_400_000)

    @property
    def is_bounded(self) -> bool:
        """Whether a claim has to ask how many rows it may take."""
        return self.concurrency is not None or self.rate_max is not None


@dataclass(frozen=True, slots=True)
class Lane:
    """A share of the next claim."""

    integration_type: str
    quota: int
    tenant_id: str | None = None
    """One tenant's rows only ("" are those without a tenant); None: all."""
    limit: TenantLimit | None = None
    """What the tenant may have of them."""


@dataclass(frozen=True, slots=True)
class Claimed:
    """Rows that are ours now, oldest first, and whether some lane may hold more that is due."""

    rows: tuple[OutboxRow, ...]
    full_lanes: frozenset[tuple[str, str | None]]
    held_types: frozenset[str] = frozenset()
    """Types of which a tenant's limit keeps rows back."""


def _own_key(source_event_id: str, route_key: str) -> str:
    # One key for two messages would let a target take the first and swallow the second, and whether the event has
    # another message nobody knows: it may be stored by the next call.
    return f"{source_event_id}/{route_key}" if route_key else source_event_id


def encode_rows(rows: Iterable[Mapping[str, Any]]) -> str:
    """A batch as the parameter `:rows`."""
    return msgspec.json.encode([{f"s_{name}": value for name, value in row.items()} for row in rows]).decode()


def one_line(text: str, limit: int = MAX_ERROR) -> str:
    """An error as a row may keep it: one line, bounded, storable."""
    return cut(" ".join(storable(text).split()), limit)


def check_text(name: str, value: Any, limit: int, *, required: bool = True) -> None:
    """Refuse what a column cannot hold as it is."""
    if value is None and not required:
        return
    if not isinstance(value, str) or (required and not value):
        raise InvalidOption(name, "non-empty text" if required else "text or None", value)
    if len(value) > limit:
        raise InvalidOption(
            name, f"at most {limit} characters (it is never shortened: that would break duplicate detection)", value
        )
    if _unwanted(value):
        raise InvalidOption(name, "text without control characters or lone surrogates", value)


def _json_text(value: Any, what: str) -> str:
    encoded = json.encode(value, what=what)
    # jsonb has no way to hold it, and a row that SQLite takes and PostgreSQL refuses is a trap.
    if json.holds_nul(encoded):
        raise InvalidOption(what, "text without the character U+0000, which PostgreSQL's jsonb cannot hold", value)
    return encoded.decode()
