"""What the ledger keeps of an endpoint: records, limits of what they hold, and which events one wants. No I/O.

Elsewhere: storing them (`endpoints`), what the texts `secrets` and `headers` hold (`bullpen.outbox.endpoints`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Final

from bullpen._kernel.duration import check_int, check_texts
from bullpen.errors import require
from bullpen.ledger.records import MAX_LENGTHS, check_text
from bullpen.ledger.tables import ENDPOINT

__all__ = [
    "DISABLED_EVENT",
    "ENDPOINT_TYPES",
    "EndpointAttempt",
    "EndpointRate",
    "EndpointRow",
    "EndpointState",
    "check_events",
    "check_rate",
    "endpoint_id_of",
    "endpoint_type",
    "type_label",
    "wants",
]

DISABLED_EVENT: Final = "outbox.endpoint.disabled.v1"
"""Event type of the message that tells of an endpoint which was switched off."""

ENDPOINT_TYPES: Final = f"{ENDPOINT}:*"

_MOST_PATTERNS: Final = 100


class EndpointState(StrEnum):
    """Whether an endpoint gets messages."""

    ENABLED = "enabled"
    PAUSED = "paused"
    """Messages are stored for it, and wait."""
    DISABLED = "disabled"
    """None are stored for it; those that were stored wait."""


@dataclass(frozen=True, slots=True)
class EndpointRate:
    """Deliveries that may be started per time, over all processes."""

    max: int
    per_ms: int = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointRow:
    """One endpoint as it is stored."""

    id: str
    tenant_id: str
    url: str = field(repr=False)
    description: str
    events: tuple[str, ...]
    secrets: str = field(repr=False)
    headers: str | None = field(repr=False)
    rate: EndpointRate | None
    state: EndpointState
    reason: str | None
    state_by: str | None
    state_at: datetime
    failing_since: datetime | None
    """Since when no delivery was taken; None: none has failed since the last one that was."""
    failures: int
    """Deliveries that failed since then."""
    error_code: str | None
    """Of the last one that failed since then."""
    version: int
    created_at: datetime
    updated_at: datetime
    read_at: datetime
    """By the database's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointAttempt:
    """One delivery, or one that failed."""

    number: int
    """Grows over all attempts of the ledger: what `before` of the next page is."""
    outbox_id: str
    event_type: str
    source_event_id: str
    outcome: str
    error_code: str | None
    error: str | None
    started_at: datetime | None
    finished_at: datetime
    receipt: str | None


def endpoint_type(endpoint_id: str) -> str:
    """The integration type of an endpoint's messages."""
    return f"{ENDPOINT}:{endpoint_id}"


def endpoint_id_of(integration_type: str) -> str | None:
    """The endpoint of an integration type; None for another destination."""
    channel, _, target = integration_type.partition(":")
    return target or None if channel == ENDPOINT else None


def type_label(integration_type: str) -> str:
    """What metrics and alerts call a type: all endpoints are one, or each customer would be a series of its own."""
    return ENDPOINT_TYPES if endpoint_id_of(integration_type) is not None else integration_type


def check_events(events: Sequence[str]) -> tuple[str, ...]:
    """Patterns of event types: a type, the beginning of types (`order.*`), or `*` for all."""
    given = check_texts("events", events)
    require("events", 0 < len(given) <= _MOST_PATTERNS, f"1 to {_MOST_PATTERNS} patterns", len(given))
    for pattern in given:
        check_text("events", pattern, MAX_LENGTHS["event_type"])
        fits = "*" not in pattern[:-1] and (pattern[-1] != "*" or pattern == "*" or pattern.endswith(".*"))
        require("events", fits, "event types, beginnings such as 'order.*', or '*'", pattern)
    return tuple(dict.fromkeys(given))


def check_rate(rate: EndpointRate | None) -> EndpointRate | None:
    """A rate that can be kept; None: no limit."""
    require("rate", rate is None or isinstance(rate, EndpointRate), "an EndpointRate or None", rate)
    if rate is not None:
        check_int("rate.max", rate.max, minimum=1, maximum=1_000_000)
        check_int("rate.per_ms", rate.per_ms, minimum=1, maximum=86_400_000)
    return rate


def wants(patterns: Sequence[str], event_type: str) -> bool:
    """Whether one of the patterns names the event type."""
    return any(
        pattern in ("*", event_type) or (pattern.endswith(".*") and event_type.startswith(pattern[:-1]))
        for pattern in patterns
    )
