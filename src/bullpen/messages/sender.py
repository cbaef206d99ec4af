"""Send one message: read the row, take it, send, write down what came of it.

In: an order from the broker. Out: the row SENT, FAILED, or back in line; the delivery acknowledged, repeated later, or
dead. The steps and what dying between them means:

    look ──▶ decide ──▶ take (SENDING, if nothing changed) ──▶ send with the key ──▶ settle ──▶ acknowledge

Before take: nothing has happened. Between take and settle: nobody knows whether it was sent; after the lease of SENDING
the next delivery acts by the channel's `after_crash`. After settle: the next delivery finds the outcome and is done.
Two deliveries of one message may arrive at once: take is one conditional UPDATE, so one of them sends. A delivery that
is lost after take does not stop it: only the end of the process does.
Elsewhere: retries and dead letters (the messaging client's policy), what an order is (`orders`), channels (`routes`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, assert_never

from bullpen._kernel import json, telemetry
from bullpen._kernel.batches import Batches
from bullpen._kernel.duration import check_int
from bullpen._kernel.logs import get_logger
from bullpen.errors import DatabaseUnavailable, DelayJob, InvalidOption, MessageNotSent, MissingValue, PermanentError
from bullpen.ledger.message_records import MessageOutcome, MessageRow, MessageStatus
from bullpen.ledger.messages import SqlMessages
from bullpen.messages.occasions import OccasionKind, Occasions
from bullpen.messages.orders import Order, read_order
from bullpen.messages.routes import ChannelRoute
from bullpen.messages.templates import choose
from bullpen.ports.answers import CHANNEL_ERROR, answer_of, raised
from bullpen.ports.channel import Accepted, LooksUp, Message, NotTried, Refused, SendResult, Unavailable, Unknown
from bullpen.ports.transport import Delivery

__all__ = ["End", "Send", "Sender", "SenderOptions", "Skip", "Wait", "decide", "message_of"]

logger = get_logger("bullpen.messages")

TIMEOUT: Final = "TIMEOUT"
AMBIGUOUS: Final = "AMBIGUOUS"
_ENDED: Final = frozenset({MessageStatus.CANCELLED, MessageStatus.SKIPPED, MessageStatus.EXPIRED, MessageStatus.PARKED})
_LOOKS: Final = 5
_HOLD_MS: Final = 2_000
"""A delivery waits so long for its slot of a rate limit; for a longer wait it goes back to the broker."""
_LAST_MOMENT_S: Final = 2.0
_MOST_DEFERRALS: Final = 10
"""A provider that asks for patience is believed so often per attempt; then it counts as a failure."""
_MOST_WAIT_MS: Final = 3_600_000
_ENOUGH_LEASE: Final = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderOptions:
    """How a sender works."""

    attempts: int = 6
    """Deliveries of one order, the first included; the policy of the messaging client must say the same."""
    lease_ms: int = 60_000
    """How long a message is SENDING before others may look into it. Longer than any send takes."""
    lost_after_ms: int = 90_000_000
    """A retry that has not come back from the broker so long is published again."""

    def __post_init__(self) -> None:
        check_int("attempts", self.attempts, minimum=1)
        check_int("lease_ms", self.lease_ms, minimum=1)
        check_int("lost_after_ms", self.lost_after_ms, minimum=1)


# Deciding -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Take it and send it."""

    kind: OccasionKind
    route: ChannelRoute
    may_have_left: bool = False
    """An earlier attempt ended without an outcome."""


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
    if is_taken_over and route.after_crash == "park":
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
    return Send(kind, route, is_taken_over)


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


# Doing --------------------------------------------------------------------------------------------------------------


class Sender:
    """Handles orders, many at the same time: reads and writes of all of them share transactions."""

    def __init__(
        self,
        store: SqlMessages,
        occasions: Occasions,
        routes: Mapping[str, ChannelRoute],
        *,
        worker: str,
        options: SenderOptions | None = None,
    ) -> None:
        self._store, self._occasions, self._routes = store, occasions, routes
        self._worker = worker
        self.options = options or SenderOptions()
        self._sending: set[asyncio.Task[bool]] = set()
        self.on_answer: Callable[[float, bool], None] | None = None
        """Called for each send with how late it was and whether the provider pushed back; for whoever sets the pace."""
        self._looks: Batches[str, MessageRow | None] = Batches(self._look_batch)
        self._takes: Batches[MessageRow, bool] = Batches(self._take_batch)
        self._settles: Batches[tuple[str, int, MessageOutcome], bool] = Batches(self._settle_batch)
        self._slots: Batches[None, tuple[bool, int]] = Batches(self._slot_batch)

    async def handle(self, delivery: Delivery) -> None:
        """The handler of one delivery. Returns: acknowledge. DelayJob: later, no attempt counted. Others: as judged."""
        order = read_order(delivery.payload)
        for _ in range(_LOOKS):
            row = await self._looks.submit(order.message_id)
            if row is None:
                raise PermanentError(f"message {order.message_id} does not exist")
            decision = decide(order, row, self._occasions, self._routes, now=row.read_at)
            match decision:
                case Skip(reason):
                    logger.info("message %s is skipped: %s", row.id, reason, extra=_log_fields(row))
                    telemetry.emit("messages.skipped", **_ids(row), reason=reason)
                    return
                case Wait(ms, reason):
                    telemetry.emit("messages.postponed", **_ids(row), reason=reason, ms=ms)
                    raise DelayJob(min(ms, _MOST_WAIT_MS), reason)
                case End(status, code, reason):
                    if await self._store.settle_untaken(row, status, code=code, reason=reason):
                        self._ended(row, status, code, reason)
                        return
                case Send():
                    await self._wait_for_slot(row, decision.route)
                    if await self._take_and_send(row, decision, is_last=delivery.attempt >= self.options.attempts):
                        return
                case _:
                    assert_never(decision)
        raise DelayJob(1_000, "the row keeps changing")

    async def _take_and_send(self, row: MessageRow, send: Send, *, is_last: bool) -> bool:
        """False: another one has it. Goes on to its end even if the delivery is lost meanwhile.

        A broker that breaks off and delivers again says nothing about the provider, which is being called: who stopped
        here would leave a row of which nobody knows whether it was sent. The row is ours by its lease, not by the
        delivery, and the next delivery finds what came of it.
        """

        async def run() -> bool:
            if not await self._takes.submit(row):
                return False
            await self._send(row, send, is_last=is_last)
            return True

        sending = asyncio.create_task(run(), name=f"bullpen message {row.id}")
        self._sending.add(sending)
        sending.add_done_callback(self._ended_alone)
        return await asyncio.shield(sending)

    def _ended_alone(self, sending: asyncio.Task[bool]) -> None:
        self._sending.discard(sending)
        if not sending.cancelled():
            sending.exception()  # the handler has it; where that is gone, the row tells

    async def idle(self) -> None:
        """Wait until everything is written. A send whose delivery is gone has a moment; then it counts as a crash."""
        if self._sending:
            _, late = await asyncio.wait(self._sending, timeout=_LAST_MOMENT_S)
            for sending in late:
                sending.cancel()
        for batches in (self._looks, self._takes, self._settles):
            await batches.idle()

    def _ended(self, row: MessageRow, status: MessageStatus, code: str, reason: str) -> None:
        logger.log(_level(status), "message %s is %s (%s): %s", row.id, status, code, reason)
        telemetry.emit("messages.ended", **_ids(row), status=str(status), code=code)
        if status is MessageStatus.FAILED:
            raise PermanentError(f"message {row.id} failed ({code}): {reason}")

    # ---- sending ------------------------------------------------------------------------------------------------

    async def _send(self, row: MessageRow, send: Send, *, is_last: bool) -> None:
        route, fence, began = send.route, row.fence + 1, time.monotonic()
        telemetry.emit("messages.taken", **_ids(row), fence=fence)
        try:
            message = message_of(row, send.kind, route.timeout_ms)
        except (MissingValue, InvalidOption) as error:
            result = answer_of(Refused(str(error), "TEMPLATE"))
        else:
            result = await self._call(message, route, look_first=send.may_have_left and route.after_crash == "look_up")
        telemetry.emit("messages.answered", **_ids(row), result=type(result).__name__)
        outcome, error_to_raise = self._judge(row, route, result, is_last=is_last)
        if outcome is None:
            # Nobody knows, and the provider can be asked: the row stays SENDING, and after its lease it is.
            telemetry.emit("messages.unknown", **_ids(row), reason="to be looked up")
            raise DelayJob(self.options.lease_ms, "it is unknown whether it was sent; the provider will be asked")
        until = began + self.options.lease_ms / 1000 * _ENOUGH_LEASE
        is_ours = await self._settle(row.id, fence, outcome, until)
        status = str(outcome.status) if is_ours else "LOST"
        took_s = time.monotonic() - began
        late_s = max(0.0, (row.read_at - row.due_at).total_seconds() + took_s)
        if self.on_answer is not None:
            self.on_answer(late_s, isinstance(result, Unavailable | Unknown | NotTried))
        telemetry.emit(
            "messages.settled", **_ids(row), status=status, code=outcome.code, duration_s=took_s, late_s=late_s
        )
        if not is_ours:
            logger.warning("message %s: another sender took over before the outcome was written", row.id)
            return
        if outcome.status is not MessageStatus.SENT:
            logger.log(_level(outcome.status), "message %s is %s (%s): %s", row.id, status, outcome.code, outcome.error)
        if error_to_raise is not None:
            raise error_to_raise

    async def _call(self, message: Message, route: ChannelRoute, *, look_first: bool) -> SendResult:
        """The only place that calls a provider."""
        try:
            async with asyncio.timeout(route.limit_ms / 1000):
                if look_first and isinstance(route.channel, LooksUp):
                    found = await route.channel.look_up(message)
                    if found is not None:
                        return _found(answer_of(found))
                return answer_of(await route.channel.send(message))
        except TimeoutError:
            return Unknown(f"no answer within {route.limit_ms} ms", TIMEOUT)
        except Exception as error:  # noqa: BLE001 - a channel should answer; whatever it raises, the message is owed
            return raised(error)

    def _judge(
        self, row: MessageRow, route: ChannelRoute, result: SendResult, *, is_last: bool
    ) -> tuple[MessageOutcome | None, Exception | None]:
        """What the answer means for the row and for the delivery. None: nobody knows, and it will be looked up."""
        again = self.options.lost_after_ms
        has_patience = row.attempts < _MOST_DEFERRALS * self.options.attempts
        if isinstance(result, Unknown):
            if route.after_crash == "park" or (route.after_crash == "look_up" and not has_patience):
                return MessageOutcome(status=MessageStatus.PARKED, error=result.reason, code=AMBIGUOUS), None
            if route.after_crash == "look_up":
                return None, None
            result = Unavailable(result.reason, result.code)  # sent again, as this channel's rule says
        match result:
            case Accepted(detail):
                response = {"detail": detail, "channel": row.channel, "attempt": row.attempts + 1}
                return MessageOutcome(status=MessageStatus.SENT, response_json=json.encode(response).decode()), None
            case Refused(reason, code):
                failed = MessageOutcome(status=MessageStatus.FAILED, error=reason, code=code)
                return failed, PermanentError(f"message {row.id} was refused ({code}): {reason}")
            case NotTried(reason, after_ms):
                waiting = MessageOutcome(
                    status=MessageStatus.QUEUED, error=reason, code="NOT_TRIED", again_in_ms=after_ms + again
                )
                return waiting, DelayJob(min(max(1, after_ms), _MOST_WAIT_MS), reason)
            case Unavailable(reason, code, after_ms):
                waits = after_ms is not None and has_patience
                if is_last and not waits:
                    failed = MessageOutcome(status=MessageStatus.FAILED, error=reason, code=code)
                    return failed, MessageNotSent(row.id, code, reason)
                waiting = MessageOutcome(status=MessageStatus.QUEUED, error=reason, code=code, again_in_ms=again)
                if waits:
                    assert after_ms is not None
                    return waiting, DelayJob(min(max(1, after_ms), _MOST_WAIT_MS), reason)
                return waiting, MessageNotSent(row.id, code, reason)
        assert_never(result)

    # ---- rate limits --------------------------------------------------------------------------------------------

    async def _wait_for_slot(self, row: MessageRow, route: ChannelRoute) -> None:
        """Wait for a send that the provider's limit allows. A delivery is held for moments only."""
        if route.rate_limit is None:
            return
        is_granted, ms = await self._slots.submit(None, row.channel)
        if not is_granted and ms == 0:  # the first ever on this channel, or one of them
            is_granted, ms = await self._slots.submit(None, row.channel)
        if not is_granted:
            telemetry.emit("messages.limited", **_ids(row), ms=ms)
            raise DelayJob(max(1, ms), f"the rate limit of {row.channel} is used up")
        await asyncio.sleep(ms / 1000)

    async def _slot_batch(self, channel: Hashable, batch: Sequence[None]) -> Sequence[tuple[bool, int]]:
        limit = self._routes[str(channel)].rate_limit
        assert limit is not None
        interval_ms = limit.duration_ms / limit.max
        wanted = min(len(batch), max(1, int(_HOLD_MS / interval_ms)))
        granted, first_ms = await self._store.reserve(str(channel), wanted, interval_ms=interval_ms, most_ms=_HOLD_MS)
        slots = [(True, round(first_ms + number * interval_ms)) for number in range(granted)]
        later_ms = first_ms if not granted else round(first_ms + granted * interval_ms)
        return slots + [(False, later_ms)] * (len(batch) - granted)

    # ---- shared transactions ------------------------------------------------------------------------------------

    async def _look_batch(self, _: Hashable, ids: Sequence[str]) -> Sequence[MessageRow | None]:
        found = await self._store.look(set(ids))
        return [found.get(one) for one in ids]

    async def _take_batch(self, _: Hashable, rows: Sequence[MessageRow]) -> Sequence[bool]:
        # Two deliveries of one message in one batch: the statement would tell both that they got it.
        first = {row.id: number for number, row in reversed(list(enumerate(rows)))}
        chosen = [row for number, row in enumerate(rows) if first[row.id] == number]
        lease_ms = self.options.lease_ms
        ours = await self._store.take(chosen, worker=self._worker, lease_ms=lease_ms, again_ms=2 * lease_ms)
        return [row.id in ours and first[row.id] == number for number, row in enumerate(rows)]

    async def _settle_batch(self, _: Hashable, outcomes: Sequence[tuple[str, int, MessageOutcome]]) -> Sequence[bool]:
        ours = await self._store.settle(outcomes)
        return [row_id in ours for row_id, _, _ in outcomes]

    async def _settle(self, row_id: str, fence: int, outcome: MessageOutcome, until: float) -> bool:
        """Write the outcome; a database that is away is asked again until the lease is nearly over."""
        pause_s = 0.05
        while True:
            try:
                return await self._settles.submit((row_id, fence, outcome))
            except DatabaseUnavailable:
                if time.monotonic() + pause_s > until:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 2.0)


def _found(answer: SendResult) -> SendResult:
    """What looking a message up means for sending it: it is there, or nobody knows."""
    match answer:
        case Accepted():
            return answer
        case NotTried(reason):
            return Unknown(reason, CHANNEL_ERROR)
        case _:
            return Unknown(answer.reason, answer.code)


def _log_fields(row: MessageRow) -> dict[str, Any]:
    found = {"messageId": row.id, "tenantId": row.tenant_id or None, "source": row.occasion}
    return {name: value for name, value in found.items() if value is not None}


def _ids(row: MessageRow) -> dict[str, Any]:
    return {"message_id": row.id, "occasion": row.occasion, "channel": row.channel, "tenant_id": row.tenant_id or None}


def _ms(duration: timedelta) -> int:
    """Rounded up: a millisecond late is on time, a millisecond early is not."""
    return -(-duration // timedelta(milliseconds=1))


def _level(status: MessageStatus) -> int:
    """A message that failed is an error in the client's line about its order, with the traceback: one error each."""
    return logging.ERROR if status is MessageStatus.PARKED else logging.WARNING
