"""What the tables of scheduled messages hold, as plain records. No database here.

Elsewhere: the statements (`_message_sql`), the store (`messages`), what the values mean (`bullpen.messages`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Literal, NamedTuple

from bullpen._kernel import json

LatePolicy = Literal["send", "skip", "expire"]


class MessageStatus(StrEnum):
    """Where a message is.

    CREATED → QUEUED → SENDING → SENT or FAILED. PARKED waits for a person, because nobody knows whether it was sent.
    SKIPPED and EXPIRED were too late by their policy, CANCELLED lost their recipient or their occasion.
    """

    CREATED = "CREATED"
    QUEUED = "QUEUED"
    SENDING = "SENDING"
    SENT = "SENT"
    FAILED = "FAILED"
    PARKED = "PARKED"
    SKIPPED = "SKIPPED"
    EXPIRED = "EXPIRED"
    CANCELLED = "CANCELLED"


@dataclass(frozen=True, slots=True)
class MessageHour:
    """How many messages leave in one hour of the clocks of a zone."""

    local_hour: str
    """`2026-03-14T09`."""
    zone: str
    count: int
    first_due: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipientRow:
    """One recipient."""

    tenant_id: str = ""
    id: str
    name: str = ""
    zone: str
    channel: str
    address: str
    locale: str = ""
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class OccasionRow:
    """One occasion of a recipient, with where the recipient is and what was planned last."""

    tenant_id: str = ""
    recipient_id: str
    occasion: str
    label: str = ""
    on_date: str
    send_at: str | None = None
    """Wall-clock time of its own; None: that of the kind of occasion."""
    next_due: datetime | None = None
    next_period: str = ""
    zone: str = ""
    channel: str = ""

    @property
    def key(self) -> tuple[str, str, str, str]:
        return (self.tenant_id, self.recipient_id, self.occasion, self.label)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A message to be created, or one whose instant moves."""

    id: str
    tenant_id: str
    recipient_id: str
    occasion: str
    label: str
    period: str
    number: int | None
    channel: str
    zone: str
    local_at: str
    """Clocks of the zone when it is due: `2026-03-14T09:00`."""
    due_at: datetime
    late_policy: LatePolicy
    late_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToPublish:
    """A message that the scheduler has claimed."""

    id: str
    tenant_id: str
    occasion: str
    due_at: datetime
    delay_ms: int
    """From the database's now until it is due; 0 when it is."""
    publication: int
    """How often it was published, this time included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageRow:
    """One message as it is stored, with its recipient where that still exists."""

    id: str
    tenant_id: str
    recipient_id: str
    occasion: str
    label: str
    period: str
    number: int | None
    channel: str
    zone: str
    local_at: str
    due_at: datetime
    late_policy: LatePolicy
    late_at: datetime | None
    status: MessageStatus
    attempts: int
    fence: int
    publication: int
    published_at: datetime | None
    publish_again_at: datetime | None
    locked_by: str | None
    locked_until: datetime | None
    sent_at: datetime | None
    response_json: str | None
    last_error: str | None
    error_code: str | None
    created_at: datetime
    updated_at: datetime
    recipient: RecipientRow | None = None
    read_at: datetime
    """The database's now when it was read."""

    @property
    def response(self) -> Any:
        """What the provider answered."""
        return None if self.response_json is None else json.decode(self.response_json.encode())

    @property
    def idempotency_key(self) -> str:
        """The same for every attempt, for every publication and after a redrive; for no other message."""
        return self.id


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageOutcome:
    """What one attempt became."""

    status: MessageStatus
    response_json: str | None = None
    error: str | None = None
    code: str | None = None
    again_in_ms: int | None = None
    """With QUEUED: when the scheduler publishes it again, should the broker have lost it."""


class MessageSettlement(NamedTuple):
    """A message that was taken and what became of it. It is written only if the claim still holds."""

    id: str
    fence: int
    outcome: MessageOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageCount:
    """How many messages of an occasion have a status, and the oldest instant among them."""

    occasion: str
    status: MessageStatus
    count: int
    oldest_due: datetime
