"""Where a delivery leaves: a webhook, a queue, a topic, an email provider.

In: one message. Out: one of five answers. A channel translates and nothing more: it keeps no state about messages,
retries nothing, and decides nothing about what an answer means for the message (`bullpen.outbox.delivery`). It maps
whatever its client raises to an answer. Elsewhere: the plug-ins (`bullpen.plugins.channels`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

__all__ = [
    "Accepted",
    "Channel",
    "ChannelHealth",
    "ChecksAddresses",
    "LooksUp",
    "Message",
    "NotTried",
    "Refused",
    "SendResult",
    "Unavailable",
    "Unknown",
    "WhenUnknown",
    "when_unknown",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What leaves, with everything a target needs to know it again."""

    id: str
    """Of the stored message; the same for every attempt."""
    integration_type: str
    """Channel and target: `webhook:partnerX`."""
    event_type: str
    payload: Any
    headers: Mapping[str, Any] = field(default_factory=dict)
    idempotency_key: str
    """Send it along: the same for every attempt and after a redrive, and for no other message."""
    source_stream_id: str
    source_event_id: str
    tenant_id: str | None = None
    user_id: str | None = None
    correlation_id: str | None = None
    attempt: int = 1
    """This try, counted from 1."""
    created_ms: int = 0
    """When the message was stored, Unix ms of the database's clock."""
    waited_ms: int = 0
    """How long ago that was, by the same clock."""
    timeout_ms: int | None = None
    """How long this delivery may take, where its route says so."""

    def limit_ms(self, usual_ms: int) -> int:
        """How long a channel may wait for its target: as the route says, else as is usual for the channel."""
        return self.timeout_ms or usual_ms

    def log_fields(self) -> dict[str, Any]:
        """What log records show of it."""
        return {
            "outboxId": self.id,
            "integrationType": self.integration_type,
            "eventType": self.event_type,
            "tenantId": self.tenant_id,
            "userId": self.user_id,
            "correlationId": self.correlation_id,
            "attempt": self.attempt,
        }

    @property
    def target(self) -> str:
        """The integration type without the channel: `partnerX`."""
        return self.integration_type.partition(":")[2]


@dataclass(frozen=True, slots=True)
class Accepted:
    """The target has it. `detail` is the receipt that is kept, such as an id of the provider."""

    detail: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """The target will never take it: trying again is pointless."""

    reason: str
    code: str


@dataclass(frozen=True, slots=True)
class Unavailable:
    """It did not work this time. Counts as an attempt.

    `after_ms`: the target asked not to be called earlier.
    """

    reason: str
    code: str
    after_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Unknown:
    """It left and no answer came: the target may have it. What follows is the channel's rule, `WhenUnknown`."""

    reason: str
    code: str


@dataclass(frozen=True, slots=True)
class NotTried:
    """Our own side was not able to try, or trying again does no harm. No attempt is counted."""

    reason: str
    after_ms: int = 1_000
    for_all: bool = False
    """It is so for every message of this destination: none is claimed for it until then."""


SendResult = Accepted | Refused | Unavailable | Unknown | NotTried


class WhenUnknown(StrEnum):
    """What to do when it is unknown whether the target has the message, after a crash or a lost answer."""

    RESEND = "resend"
    """Send it again: the target knows the idempotency key, or a second copy does no harm."""
    LOOK_UP = "look_up"
    """Ask the target first (`LooksUp`), and send only what it does not have."""
    PARK = "park"
    """Leave it to a person: a second copy costs more than a late one."""


@dataclass(frozen=True, slots=True)
class ChannelHealth:
    """Whether the channel could send."""

    ok: bool
    reason: str = ""


class Channel(Protocol):
    """Takes messages to one kind of target, at least once each.

    `send` may be called for many messages at the same time and may be cancelled. It answers and does not raise; what it
    raises all the same counts as `Unknown`. A message that is sent again has the same idempotency key.

    A channel may have an attribute `when_unknown` (`WhenUnknown`); without it, what is unknown is sent again.
    """

    async def send(self, message: Message) -> SendResult: ...

    async def check(self) -> ChannelHealth:
        """Whether sending is possible at all. Sends nothing."""
        ...

    async def aclose(self) -> None:
        """Let go of connections. Safe to call twice."""
        ...


@runtime_checkable
class ChecksAddresses(Protocol):
    """A channel that knows an address it can never reach when it sees one."""

    def why_not(self, address: str) -> str | None:
        """None: it may be reached. Else what is expected. Sends nothing."""
        ...


@runtime_checkable
class LooksUp(Protocol):
    """A channel whose target can be asked for a message."""

    async def look_up(self, message: Message) -> Accepted | Unavailable | None:
        """Accepted: the target has it. None: it does not. Unavailable: unknown at this time."""
        ...


def when_unknown(channel: Channel) -> WhenUnknown:
    """The rule of a channel."""
    rule = WhenUnknown(getattr(channel, "when_unknown", WhenUnknown.RESEND))
    if rule is WhenUnknown.LOOK_UP and not isinstance(channel, LooksUp):
        return WhenUnknown.PARK
    return rule
