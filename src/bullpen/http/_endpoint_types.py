"""What travels over HTTP about endpoints. Names are camelCase on the wire; the OpenAPI description is made from
these."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from bullpen.http._api import ApiRecord
from bullpen.outbox import Endpoint, EndpointAttempt, EndpointRate, EndpointState
from bullpen.ports.channel import Accepted, SendResult

Address = Annotated[str, msgspec.Meta(min_length=1, max_length=2_000)]
Description = Annotated[str, msgspec.Meta(max_length=200)]
Patterns = Annotated[list[str], msgspec.Meta(min_length=1, max_length=100)]
Reason = Annotated[str, msgspec.Meta(max_length=500)]


class RateView(ApiRecord, forbid_unknown_fields=True):
    """Deliveries that may be started per time."""

    max: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
    per_ms: Annotated[int, msgspec.Meta(ge=1, le=86_400_000)] = 1_000

    def read(self) -> EndpointRate:
        return EndpointRate(self.max, self.per_ms)


class NewEndpoint(ApiRecord, forbid_unknown_fields=True):
    """Where to send events."""

    url: Address
    events: Patterns = msgspec.field(default_factory=lambda: ["*"])
    """Event types, beginnings such as `order.*`, or `*`."""
    description: Description = ""
    headers: dict[str, str] = msgspec.field(default_factory=dict)
    rate: RateView | None = None
    secret: str | None = None
    """`whsec_…`; null: one is made."""


class EndpointChange(ApiRecord, forbid_unknown_fields=True):
    """What to change; what is left out stays."""

    url: Address | UnsetType = UNSET
    events: Patterns | UnsetType = UNSET
    description: Description | UnsetType = UNSET
    headers: dict[str, str] | UnsetType = UNSET
    rate: RateView | UnsetType | None = UNSET

    def read(self) -> dict[str, Any]:
        found = {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not UNSET}
        if found.get("rate") is not None:
            found["rate"] = found["rate"].read()
        return found


class Rotation(ApiRecord, forbid_unknown_fields=True):
    """How to rotate a secret."""

    secret: str | None = None
    overlap_ms: Annotated[int, msgspec.Meta(ge=0, le=31 * 86_400_000)] | None = None
    """How long the old secret signs as well; null: as configured."""


class StateChange(ApiRecord, forbid_unknown_fields=True):
    """Why."""

    reason: Reason = ""


class TestMessage(ApiRecord, forbid_unknown_fields=True):
    """What to send."""

    payload: Any = None


class ReplayOrder(ApiRecord, forbid_unknown_fields=True):
    """What to send again."""

    label: Annotated[str, msgspec.Meta(min_length=1, max_length=40)]
    failed: bool = False
    """True: what failed finally; false: what was sent."""
    since: Annotated[datetime, msgspec.Meta(tz=True)] | None = None
    before: Annotated[datetime, msgspec.Meta(tz=True)] | None = None
    new_key: bool = False


class EndpointView(ApiRecord):
    """An endpoint, without its secrets and without the values of its headers."""

    id: str
    url: str
    description: str
    events: list[str]
    header_names: list[str]
    rate: RateView | None
    state: EndpointState
    reason: str | None
    state_at: datetime
    failing_since: datetime | None
    failures: int
    error_code: str | None
    old_secret_until: datetime | None
    created_at: datetime
    updated_at: datetime

    @classmethod
    def of(cls, endpoint: Endpoint) -> EndpointView:
        rate = endpoint.rate
        return cls(
            id=endpoint.id,
            url=endpoint.url,
            description=endpoint.description,
            events=list(endpoint.events),
            header_names=list(endpoint.header_names),
            rate=None if rate is None else RateView(max=rate.max, per_ms=rate.per_ms),
            state=endpoint.state,
            reason=endpoint.reason,
            state_at=endpoint.state_at,
            failing_since=endpoint.failing_since,
            failures=endpoint.failures,
            error_code=endpoint.error_code,
            old_secret_until=endpoint.old_secret_until,
            created_at=endpoint.created_at,
            updated_at=endpoint.updated_at,
        )


class SecretView(ApiRecord):
    """An endpoint with a secret that is shown now and never again; null: an earlier call was shown it."""

    endpoint: EndpointView
    secret: str | None


class EndpointPage(ApiRecord):
    """Endpoints, the oldest first."""

    endpoints: list[EndpointView]
    next: str | None


class EndpointAttemptView(ApiRecord):
    """One delivery, or one that failed."""

    message_id: str
    event_type: str
    event_id: str
    outcome: str
    error_code: str | None
    error: str | None
    finished_at: datetime
    receipt: str | None

    @classmethod
    def of(cls, attempt: EndpointAttempt) -> EndpointAttemptView:
        return cls(
            message_id=attempt.outbox_id,
            event_type=attempt.event_type,
            event_id=attempt.source_event_id,
            outcome=attempt.outcome,
            error_code=attempt.error_code,
            error=attempt.error,
            finished_at=attempt.finished_at,
            receipt=attempt.receipt,
        )


class EndpointAttemptPage(ApiRecord):
    """Attempts, the last one first."""

    attempts: list[EndpointAttemptView]
    next: str | None


class TestAnswer(ApiRecord):
    """What the endpoint said to a test message."""

    accepted: bool
    result: str
    detail: str
    error_code: str | None

    @classmethod
    def of(cls, result: SendResult) -> TestAnswer:
        is_good = isinstance(result, Accepted)
        detail = result.detail if isinstance(result, Accepted) else result.reason
        return cls(
            accepted=is_good, result=type(result).__name__, detail=detail, error_code=getattr(result, "code", None)
        )


class Replayed(ApiRecord):
    """How many copies were stored."""

    count: int
