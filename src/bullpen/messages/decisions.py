"""What an order means for its row, and what an answer means for row and delivery. Pure.

In: rows, orders and outcomes as they are. Out: what is to be done. Elsewhere: doing it (`sender`), the rule for what
nobody knows (`bullpen.delivery.judge`), retries and dead letters (the messaging client's policy).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, assert_never

from bullpen._kernel import json
from bullpen.delivery.judge import UNKNOWN_OUTCOME, FirstStep, first_step
from bullpen.errors import DelayJob, MessageNotSent, PermanentError
from bullpen.ledger import Died, Released, Retried, RowOutcome, Sent
from bullpen.ledger.message_records import MessageOutcome, MessageRow, MessageStatus
from bullpen.messages.occasions import OccasionKind, Occasions
from bullpen.messages.orders import Order
from bullpen.messages.routes import ChannelRoute
from bullpen.messages.templates import choose
from bullpen.ports.channel import Message

__all__ = ["MOST_WAIT_MS", "Decision", "End", "Send", "Skip", "Verdict", "Wait", "decide", "message_of", "verdict"]

AMBIGUOUS: Final = "AMBIGUOUS"
MOST_WAIT_MS: Final = 3_600_000
_MOST_DEFERRALS: Final = 10
"""A provider that asks for patience is believed so often per attempt; then it counts as a failure."""
_ENDED: Final = frozenset({MessageStatus.CANCELLED, MessageStatus.SKIPPED, MessageStatus.EXPIRED, MessageStatus.PARKED})


@dataclass(frozen=True, slots=True)
class Send:
    """Take it and send it."""

    kind: OccasionKind
    route: ChannelRoute
    look_up: bool = False
    """Ask the provider first: an earlier attempt ended without an outcome."""


@dataclass(frozen=True, slots=True)
class Skip:
    """Nothing is to be done: it was sent, or another order will come."""

    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Not now."""

    ms: int
    reason: str


@dataclass(frozen=True, slots=True)
class End:
    """It is not sent, and gets this status."""

    status: MessageStatus
    code: str
    reason: str


Decision = Send | Skip | Wait | End


def decide(
    order: Order, row: MessageRow, occasions: Occasions, routes: Mapping[str, ChannelRoute], *, now: datetime
) -> Decision:
    """What an order means for the row as it is now. Pure."""
    if row.status is MessageStatus.SENT:
        return Skip("it was sent")
    if row.status in _ENDED:
        return Skip(f"it is {row.status}")
    if row.status is MessageStatus.CREATED or row.due_at != order.due_at:
        return Skip("it was planned again, and has or gets another order")
    if row.due_at > now:
        return Wait(_ms(row.due_at - now), "it is not due yet")
    is_taken_over = row.status is MessageStatus.SENDING
    if is_taken_over and row.locked_until is not None and row.locked_until > now:
        return Wait(_ms(row.locked_until - now), "another sender has it")
    if row.occasion not in occasions:
        return End(MessageStatus.FAILED, "UNKNOWN_OCCASION", f"no occasion {row.occasion!r} is registered here")
    route = routes.get(row.channel)
    if route is None:
        return End(MessageStatus.FAILED, "UNKNOWN_CHANNEL", f"no channel {row.channel!r} is registered here")
    step = first_step(route.rule, in_doubt=is_taken_over)
    if step is FirstStep.PARK:
        reason = f"{row.locked_by} died while sending, or lost the database: it is unknown whether it was sent"
        return End(MessageStatus.PARKED, AMBIGUOUS, reason)
    if row.recipient is None:
        return End(MessageStatus.CANCELLED, "RECIPIENT_GONE", "the recipient was removed")
    if row.late_policy == "expire" and not is_taken_over and row.late_at is not None and row.late_at <= now:
        return End(MessageStatus.EXPIRED, "LATE", "it was not sent in time")
    kind = occasions.get(row.occasion)
    quiet_ms = kind.quiet_ms(row.zone, now)
    if quiet_ms:
        return Wait(quiet_ms, "the recipient is in quiet hours")
    return Send(kind, route, step is FirstStep.LOOK_UP)


def message_of(row: MessageRow, kind: OccasionKind, timeout_ms: int | None = None) -> Message:
    """What the channel gets. Raises MissingValue or InvalidOption when the text cannot be made."""
    recipient = row.recipient
    assert recipient is not None
    values: dict[str, Any] = {
        **recipient.attributes,
        "name": recipient.name,
        "occasion": row.occasion,
        "label": row.label,
        "number": row.number,
        "date": row.local_at[:10],
    }
    parts = choose(kind.texts, recipient.locale).render(values)
    return Message(
        id=row.id,
        integration_type=f"{row.channel}:{recipient.address}",
        event_type=row.occasion,
        payload={"to": recipient.address, "name": recipient.name, **parts},
        idempotency_key=row.idempotency_key,
        source_stream_id=f"recipient-{recipient.id}",
        source_event_id=f"{row.occasion}-{row.period}",
        tenant_id=row.tenant_id or None,
        user_id=recipient.id,
        attempt=row.attempts + 1,
        created_ms=round(row.created_at.timestamp() * 1000),
        waited_ms=max(0, _ms(row.read_at - row.due_at)),
        timeout_ms=timeout_ms,
    )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an attempt becomes."""

    outcome: MessageOutcome | None
    """For the row. None: nobody knows; it stays SENDING, and after its lease the provider is asked."""
    error: Exception | None = None
    """For the delivery; None: acknowledge it."""


def verdict(row: MessageRow, outcome: RowOutcome, *, attempts: int, is_last: bool, again_ms: int) -> Verdict:
    """What an outcome means for the row and for the delivery, which the broker repeats. `attempts` are those of one
    order, `again_ms` is when an order that the broker lost is published again."""
    has_patience = row.attempts < _MOST_DEFERRALS * attempts
    match outcome:
        case Sent(receipt):
            response = {"detail": receipt, "channel": row.channel, "attempt": row.attempts + 1}
            return Verdict(MessageOutcome(status=MessageStatus.SENT, response_json=json.encode(response).decode()))
        case Died(reason, code) if code == UNKNOWN_OUTCOME:
            return _parked(reason)
        case Died(reason, code):
            error = PermanentError(f"message {row.id} was refused ({code}): {reason}")
            return Verdict(MessageOutcome(status=MessageStatus.FAILED, error=reason, code=code), error)
        case Released(delay_ms, reason):
            again = MessageOutcome(
                status=MessageStatus.QUEUED, error=reason, code="NOT_TRIED", again_in_ms=delay_ms + again_ms
            )
            return Verdict(again, _later(delay_ms, reason or ""))
        case Retried(reason, code, _) if code == UNKNOWN_OUTCOME:
            if not has_patience:
                return _parked(reason)
            return Verdict(None)
        case Retried(reason, code, delay_ms):
            waits = delay_ms > 0 and has_patience
            if is_last and not waits:
                failed = MessageOutcome(status=MessageStatus.FAILED, error=reason, code=code)
                return Verdict(failed, MessageNotSent(row.id, code, reason))
            waiting = MessageOutcome(status=MessageStatus.QUEUED, error=reason, code=code, again_in_ms=again_ms)
            return Verdict(waiting, _later(delay_ms, reason) if waits else MessageNotSent(row.id, code, reason))
    assert_never(outcome)


def _parked(reason: str) -> Verdict:
    return Verdict(MessageOutcome(status=MessageStatus.PARKED, error=reason, code=AMBIGUOUS))


def _later(ms: int, reason: str) -> DelayJob:
    return DelayJob(min(max(1, ms), MOST_WAIT_MS), reason)


def _ms(duration: timedelta) -> int:
    """Rounded up: a millisecond late is on time, a millisecond early is not."""
    return -(-duration // timedelta(milliseconds=1))
