"""Deliver one claimed row, and write down what became of it.

In: a row whose claim we hold. Out: it is SENT, FAILED with a new due time, DEAD, or given back untried. The send and
the writing are separate: a database that fails after a good send is asked again, and the send is not repeated for it.
Elsewhere: which rows (`dispatcher`, `workers`), one call and its meaning (`bullpen.delivery`), the guarded UPDATE
(`bullpen.ledger`).
"""

from __future__ import annotations

import logging
import random as _random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple

from bullpen._kernel import json, telemetry, tracing
from bullpen._kernel.backoff import Backoff, from_wire
from bullpen._kernel.logs import handling
from bullpen._kernel.policy import OUTBOX_DELIVERY
from bullpen._kernel.scrub import scrub
from bullpen.delivery.attempt import attempt
from bullpen.delivery.gates import Gates, Pass
from bullpen.delivery.judge import LEASE_EXPIRED, UNKNOWN_OUTCOME, FirstStep, first_step, judge
from bullpen.delivery.settle import Settling
from bullpen.errors import LedgerError, NotJson
from bullpen.ledger import (
    Died,
    OutboxRepository,
    OutboxRow,
    OutboxStatus,
    Released,
    Retried,
    RowOutcome,
    Sent,
    SettledRow,
    Settlement,
)
from bullpen.outbox._logs import Operation, log
from bullpen.outbox.routing import Route
from bullpen.ports.channel import (
    Accepted,
    Channel,
    Message,
    NotTried,
    SendResult,
    WhenUnknown,
    when_unknown,
)

MAX_AFTER_MS: Final = 24 * 3_600_000
"""However long a target asks us to wait, a day is enough."""

UNKNOWN_TYPE: Final = "UNKNOWN_INTEGRATION_TYPE"
UNREADABLE: Final = "UNREADABLE"
"""Of a row that came past our own door, written by hand or by another program, and is no message."""

assert OUTBOX_DELIVERY.policy.backoff is not None
DEFAULT_BACKOFF: Final[Backoff] = OUTBOX_DELIVERY.policy.backoff


# Deciding -----------------------------------------------------------------------------------------------------------


def judge_row(
    row: OutboxRow,
    result: SendResult,
    *,
    rule: WhenUnknown = WhenUnknown.RESEND,
    random: Callable[[], float] = _random.random,
) -> RowOutcome:
    """What an answer means for the row: retries are the row's own, by its backoff. Pure."""

    def delay_ms(after_ms: int | None) -> int:
        own = backoff_of(row).delay_for(row.attempts + 1, random)
        return own if after_ms is None else max(own, min(after_ms, MAX_AFTER_MS))

    return judge(result, rule, delay_ms=delay_ms)


def is_in_doubt(row: OutboxRow) -> bool:
    """Whether nobody knows what became of the last attempt. A redrive, which sets the count to 0, ends the doubt."""
    return row.attempts > 0 and row.error_code in (LEASE_EXPIRED, UNKNOWN_OUTCOME)


def judge_lost(row: OutboxRow) -> RowOutcome:
    """What becomes of a row whose claim ran out. It counts as an attempt only if its delivery had begun. Pure.

    It is due at once: the target has not failed, and the lease was pause enough for a row that kills its process.
    """
    if row.started_at is None:
        return Released()
    reason = f"the lease of {row.locked_by} ran out during delivery; it may have been delivered"
    return Retried(reason, LEASE_EXPIRED, 0)


def backoff_of(row: OutboxRow) -> Backoff:
    """The row's own pauses, else 60 s doubling up to 15 min plus 0 to 10 s. Never raises: the reaper asks, too."""
    try:
        own = None if row.backoff_json is None else from_wire(json.decode(row.backoff_json))
    except NotJson:
        own = None
    return own if isinstance(own, Backoff) else DEFAULT_BACKOFF


class Content(NamedTuple):
    """What a row holds, of whoever had it before."""

    payload: Any
    headers: dict[str, Any]


def message_of(row: OutboxRow, timeout_ms: int | None = None, content: Content | None = None) -> Message:
    """What a channel gets to see of a row. `timeout_ms` is what its route says."""
    payload, headers = (row.payload, row.headers) if content is None else content
    return Message(
        id=row.id,
        integration_type=row.integration_type,
        event_type=row.event_type,
        payload=payload,
        headers=headers,
        idempotency_key=row.key_in(headers),
        source_stream_id=row.source_stream_id,
        source_event_id=row.source_event_id,
        tenant_id=row.tenant_id,
        user_id=row.user_id,
        correlation_id=row.correlation_id,
        attempt=row.attempts + 1,
        created_ms=int(row.created_at.timestamp() * 1000),
        # Both by the database's clock: the claim has just dated the row.
        waited_ms=max(0, int((row.updated_at - row.created_at).total_seconds() * 1000)),
        timeout_ms=timeout_ms,
    )


# Doing --------------------------------------------------------------------------------------------------------------


class OutboxDeliveries:
    """Sends rows and settles them, many at the same time. `worker_id` is what rows and attempts show."""

    def __init__(
        self,
        store: OutboxRepository,
        *,
        worker_id: str,
        source: str,
        lease_ms: int,
        gates: Gates | None = None,
        random: Callable[[], float] = _random.random,
    ) -> None:
        self._store, self._source, self._random = store, source, random
        self._lease_ms, self._gates = lease_ms, gates
        self.worker_id = worker_id
        self._settling = Settling(store, events=("outbox.settling", "outbox.settled"), random=random)

    async def deliver(
        self,
        row: OutboxRow,
        route: Route,
        *,
        until: float,
        operation: Operation = "OUTBOX_DELIVER",
        tenant_id: str | None = None,
        content: Content | None = None,
        goes_on: Callable[[int], Awaitable[bool]] | None = None,
    ) -> SettledRow | None:
        """Send one row and settle it. `until` is monotonic: the end of the lease, counted from before it was asked for.
        `content` is what the row holds, where it was begun without. `goes_on` is asked, with how many rows were sent,
        whether the next one under the same ordering key shall be delivered as well, if it is due.

        None: it could not be settled within its lease, or not even be begun, and the reaper will have it."""
        first: SettledRow | None = None
        following: OutboxRow | None = row
        sent = 0
        while following is not None:
            row = following
            began = time.monotonic()
            outcome = await self.attempt(row, route, until=until, operation=operation, content=content)
            if outcome is None:
                break
            sent_at, sent = time.monotonic(), sent + 1
            takes_next = goes_on is not None and row.ordering_key is not None and await goes_on(sent)
            settled = await self.settle(row, outcome, until=until, tenant_id=tenant_id, takes_next=takes_next)
            if settled is None:
                break
            self._report(row, outcome, settled, (sent_at - began) * 1000, operation)
            first, following = first or settled, settled.next
            until, content = sent_at + self._lease_ms / 1000, None
        return first

    async def attempt(
        self,
        row: OutboxRow,
        route: Route,
        *,
        until: float,
        operation: Operation = "OUTBOX_DELIVER",
        content: Content | None = None,
    ) -> RowOutcome | None:
        """Send one row. None: not even begun, its lease was over."""
        if time.monotonic() >= until:
            # This process stood still for longer than the lease: somebody else has delivered it, or will.
            log(operation, "ERROR", row, source=self._source, level=logging.WARNING, error=LEASE_EXPIRED)
            telemetry.emit("outbox.overslept", **_ids(row))
            return None
        return await self._decide(row, route, content)

    def settle_soon(
        self,
        row: OutboxRow,
        outcome: RowOutcome,
        *,
        until: float,
        took_ms: float,
        operation: Operation,
        takes_next: bool,
        then: Callable[[SettledRow | None], None],
        run: Sequence[tuple[OutboxRow, RowOutcome]] = (),
    ) -> None:
        """As `settle`, without waiting for it: `then` gets what `settle` returns. `run` are rows that left behind this
        one, under its claim; `took_ms` is for each of them."""

        def receive(result: SettledRow | LedgerError | None, error: BaseException | None) -> None:
            settled = self._settled(row, result if error is None else error)
            if settled is not None:
                self._report(row, outcome, settled, took_ms, operation)
                for (each, became), done in zip(run, settled.run, strict=True):
                    self._report(each, became, done, took_ms, operation)
            then(settled)

        settlement = self._settlement(row, outcome, takes_next=takes_next)
        self._settling.put(settlement._replace(run=tuple(run)) if run else settlement, receive, until=until)

    async def _decide(self, row: OutboxRow, route: Route, content: Content | None) -> RowOutcome:
        """Try to deliver, unless the destination is closed or a person must decide first."""
        assert route.channel is not None
        rule = when_unknown(route.channel)
        step = first_step(rule, in_doubt=is_in_doubt(row))
        if step is FirstStep.PARK:
            return Died(row.last_error or "it is unknown whether it was delivered", UNKNOWN_OUTCOME, counted=False)
        try:
            message = message_of(row, route.timeout_ms, content)
        except (NotJson, TypeError, ValueError) as error:
            return Died(f"the row cannot be read: {scrub(str(error))}", UNREADABLE, counted=False)
        gates, look_up = self._gates, step is FirstStep.LOOK_UP
        if gates is None or gates.open_at_once(row.integration_type):
            result = await self._try(row, message, route, look_up=look_up)
            if gates is not None and isinstance(result, Accepted):
                gates.taken(row.integration_type)
            elif gates is not None:
                await gates.leave(Pass(row.integration_type, is_probe=False), result, route.breaker)
        else:
            entry = await gates.enter(row.integration_type)
            if isinstance(entry, NotTried):
                return judge_row(row, entry)
            answer: SendResult | None = None
            try:
                result = answer = await self._try(row, message, route, look_up=look_up)
            finally:
                await gates.leave(entry, answer, route.breaker)
        return judge_row(row, result, rule=rule, random=self._random)

    async def _try(self, row: OutboxRow, message: Message, route: Route, *, look_up: bool) -> SendResult:
        assert route.channel is not None
        is_told, began = telemetry.is_enabled(), time.monotonic()
        if is_told:
            telemetry.emit("outbox.sending", **_ids(row))
        limit_ms = route.limit_ms(self._lease_ms)
        with handling(message):
            if tracing.tracer is None:  # a span that nobody wants costs as much as a quick delivery
                result = await attempt(message, route.channel, limit_ms=limit_ms, look_up=look_up)
            else:
                result = await self._try_traced(row, message, route.channel, limit_ms, look_up=look_up)
        if is_told:
            took_ms = (time.monotonic() - began) * 1000
            telemetry.emit("outbox.send_returned", **_ids(row), result=type(result).__name__, took_ms=took_ms)
        return result

    async def _try_traced(
        self, row: OutboxRow, message: Message, channel: Channel, limit_ms: int, *, look_up: bool
    ) -> SendResult:
        with tracing.span(
            f"deliver {row.integration_type}",
            "client",
            _carried(message),
            messaging__system="bullpen_outbox",
            messaging__operation__name="deliver",
            messaging__operation__type="send",
            messaging__destination__name=row.integration_type,
            messaging__message__id=row.id,
            messaging__message__conversation_id=row.correlation_id,
            outbox__id=row.id,
            outbox__type=row.event_type,
            outbox__attempt=message.attempt,
        ) as span:
            result = await attempt(message, channel, limit_ms=limit_ms, look_up=look_up)
            if not isinstance(result, Accepted):
                span.note("error.type", type(result).__name__ if isinstance(result, NotTried) else result.code)
                span.fail(f"{type(result).__name__}: {result.reason}")
        return result

    async def settle(
        self,
        row: OutboxRow,
        outcome: RowOutcome,
        *,
        until: float,
        tenant_id: str | None = None,
        takes_next: bool = False,
    ) -> SettledRow | None:
        """Write an outcome, with all that are ready at the same time. `until` is monotonic: the end of the lease."""
        try:
            settlement = self._settlement(row, outcome, takes_next=takes_next)
            result: object = await self._settling.submit(settlement, until=until, tenant_id=tenant_id)
        except LedgerError as error:
            result = error
        return self._settled(row, result)

    def _settlement(self, row: OutboxRow, outcome: RowOutcome, *, takes_next: bool) -> Settlement:
        takes_next = takes_next and row.ordering_key is not None
        return Settlement(row, outcome, self.worker_id, self._lease_ms if takes_next else 0)

    def _settled(self, row: OutboxRow, result: object) -> SettledRow | None:
        if isinstance(result, SettledRow):
            return result
        log(
            "OUTBOX_DELIVER", "ERROR", row, source=self._source, level=logging.ERROR, error=type(result).__name__,
            outcome="UNKNOWN",
        )  # fmt: skip
        telemetry.emit("outbox.unsettled", **_ids(row), error=result)
        return None

    async def idle(self) -> None:
        """Wait until everything is settled."""
        await self._settling.idle()

    async def settle_each(self, settlements: Sequence[Settlement]) -> Sequence[SettledRow]:
        """Write outcomes at once, or one by one when the database refuses that. Raises DatabaseUnavailable."""
        return await self._settling.each(settlements)

    def _report(
        self, row: OutboxRow, outcome: RowOutcome, settled: SettledRow, took_ms: float, operation: Operation
    ) -> None:
        code = outcome.code if isinstance(outcome, Retried | Died) else None
        status = settled.status or "LATE"
        telemetry.emit(
            "outbox.delivered", **_ids(row), status=str(status), code=code, attempts=settled.attempts, took_ms=took_ms
        )
        good = isinstance(outcome, Sent)
        log(
            operation,
            "SUCCESS" if good else "ERROR",
            row,
            source=self._source,
            level=logging.ERROR if settled.status is OutboxStatus.DEAD else logging.INFO if good else logging.WARNING,
            outcome=str(status),
            error=code,
            durationMs=round(took_ms),
        )


def _carried(message: Message) -> dict[str, str]:
    """The trace that the message came with."""
    return {name: value for name, value in message.headers.items() if isinstance(value, str)}


def _ids(row: OutboxRow) -> dict[str, str | None]:
    return {"outbox_id": row.id, "integration_type": row.integration_type, "tenant_id": row.tenant_id}
