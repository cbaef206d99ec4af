"""Send one message: read the row, take it, send, write down what came of it.

In: an order from the broker. Out: the row SENT, FAILED, or back in line; the delivery acknowledged, repeated later, or
dead. The steps and what dying between them means:

    look ──▶ decide ──▶ take (SENDING, if nothing changed) ──▶ send with the key ──▶ settle ──▶ acknowledge

Before take: nothing has happened. Between take and settle: nobody knows whether it was sent; after the lease of SENDING
the next delivery acts by the channel's `after_crash`. After settle: the next delivery finds the outcome and is done.
Two deliveries of one message may arrive at once: take is one conditional UPDATE, so one of them sends. A delivery that
is lost after take does not stop it: only the end of the process does.
Elsewhere: what an order and an answer mean (`decisions`), calling and settling (`bullpen.delivery`), retries and dead
letters (the messaging client's policy), what an order is (`orders`), channels (`routes`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, assert_never

from bullpen._kernel import telemetry
from bullpen._kernel.batches import Batches
from bullpen._kernel.duration import check_int
from bullpen._kernel.logs import get_logger
from bullpen.delivery.attempt import attempt
from bullpen.delivery.judge import judge
from bullpen.delivery.settle import Settling
from bullpen.errors import DelayJob, InvalidOption, MissingValue, PermanentError
from bullpen.ledger.message_records import MessageOutcome, MessageRow, MessageSettlement, MessageStatus
from bullpen.ledger.messages import SqlMessages
from bullpen.messages.decisions import MOST_WAIT_MS, End, Send, Skip, Wait, decide, message_of, verdict
from bullpen.messages.occasions import Occasions
from bullpen.messages.orders import read_order
from bullpen.messages.routes import ChannelRoute
from bullpen.messages.slots import Slots
from bullpen.ports.answers import answer_of
from bullpen.ports.channel import NotTried, Refused, Unavailable, Unknown
from bullpen.ports.transport import Delivery

__all__ = ["Sender", "SenderOptions"]

logger = get_logger("bullpen.messages")

_LOOKS: Final = 5
_LAST_MOMENT_S: Final = 2.0


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
        self._settling = Settling(store, events=("messages.settling", "messages.written"))
        self._slots = Slots(store, routes)

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
                    raise DelayJob(min(ms, MOST_WAIT_MS), reason)
                case End(status, code, reason):
                    if await self._store.settle_untaken(row, status, code=code, reason=reason):
                        self._ended(row, status, code, reason)
                        return
                case Send():
                    await self._wait_for_slot(row)
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
        for batches in (self._looks, self._takes, self._settling):
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
            result = await attempt(message, route.channel, limit_ms=route.limit_ms, look_up=send.look_up)
        telemetry.emit("messages.answered", **_ids(row), result=type(result).__name__)
        decided = verdict(
            row,
            judge(result, route.rule, delay_ms=lambda after_ms: 0 if after_ms is None else max(1, after_ms)),
            attempts=self.options.attempts,
            is_last=is_last,
            again_ms=self.options.lost_after_ms,
        )
        outcome = decided.outcome
        if outcome is None:
            # Nobody knows, and the provider can be asked: the row stays SENDING, and after its lease it is.
            telemetry.emit("messages.unknown", **_ids(row), reason="to be looked up")
            raise DelayJob(self.options.lease_ms, "it is unknown whether it was sent; the provider will be asked")
        is_ours = await self._settle(row, outcome, began + self.options.lease_ms / 1000)
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
        if decided.error is not None:
            raise decided.error

    async def _wait_for_slot(self, row: MessageRow) -> None:
        try:
            await self._slots.wait(row.channel)
        except DelayJob as later:
            telemetry.emit("messages.limited", **_ids(row), ms=later.delay)
            raise

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

    async def _settle(self, row: MessageRow, outcome: MessageOutcome, until: float) -> bool:
        """Write the outcome. False: another sender had taken it over."""
        return await self._settling.submit(MessageSettlement(row.id, row.fence + 1, outcome), until=until)


def _log_fields(row: MessageRow) -> dict[str, Any]:
    found = {"messageId": row.id, "tenantId": row.tenant_id or None, "source": row.occasion}
    return {name: value for name, value in found.items() if value is not None}


def _ids(row: MessageRow) -> dict[str, Any]:
    return {"message_id": row.id, "occasion": row.occasion, "channel": row.channel, "tenant_id": row.tenant_id or None}


def _level(status: MessageStatus) -> int:
    """A message that failed is an error in the client's line about its order, with the traceback: one error each."""
    return logging.ERROR if status is MessageStatus.PARKED else logging.WARNING
