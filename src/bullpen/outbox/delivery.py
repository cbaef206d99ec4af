"""Deliver one claimed row, and write down what became of it.

In: a row whose claim we hold. Out: it is SENT, FAILED with a new due time, DEAD, or given back untried. The send and
the writing are separate: a database that fails after a good send is asked again, and the send is not repeated for it.
Elsewhere: which rows (`dispatcher`, `workers`), the channel itself (`bullpen.plugins.channels`), the guarded UPDATE
(`bullpen.ledger`).
"""

from __future__ import annotations

import asyncio
import logging
import random as _random
import time
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any, Final, NamedTuple, assert_never

from bullpen._kernel import json, telemetry, tracing
from bullpen._kernel.backoff import Backoff, from_wire
from bullpen._kernel.batches import Batches
from bullpen._kernel.logs import get_logger, handling
from bullpen._kernel.policy import OUTBOX_DELIVERY
from bullpen._kernel.scrub import scrub
from bullpen._kernel.within import within
from bullpen.errors import DatabaseUnavailable, LedgerError, NotJson
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
from bullpen.outbox.gates import Gates
from bullpen.outbox.routing import Route
from bullpen.ports.answers import answer_of, raised
from bullpen.ports.channel import (
    Accepted,
    Channel,
    LooksUp,
    Message,
    NotTried,
    Refused,
    SendResult,
    Unavailable,
    Unknown,
    WhenUnknown,
    when_unknown,
)

_log = get_logger("bullpen.outbox")

MAX_AFTER_MS: Final = 24 * 3_600_000
"""However long a target asks us to wait, a day is enough."""

LEASE_EXPIRED: Final = "LEASE_EXPIRED"
UNKNOWN_OUTCOME: Final = "UNKNOWN_OUTCOME"
"""Of a row that a person must decide about: the target may have it, and may not get it twice."""
TIMEOUT: Final = "TIMEOUT"
UNKNOWN_TYPE: Final = "UNKNOWN_INTEGRATION_TYPE"
UNREADABLE: Final = "UNREADABLE"
"""Of a row that came past our own door, written by hand or by another program, and is no message."""

_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 2.0
_ENOUGH_LEASE: Final = 0.8
"""Share of the lease after which a settlement is given up: the reaper has the row then."""

_SENT: Final = Sent()

assert OUTBOX_DELIVERY.policy.backoff is not None
DEFAULT_BACKOFF: Final[Backoff] = OUTBOX_DELIVERY.policy.backoff


# Deciding -----------------------------------------------------------------------------------------------------------


def judge(
    row: OutboxRow,
    result: SendResult,
    *,
    rule: WhenUnknown = WhenUnknown.RESEND,
    random: Callable[[], float] = _random.random,
) -> RowOutcome:
    """What an answer means for the row. `rule` is for answers that never came. Pure."""
    match result:
        case Accepted(detail):
            return Sent(scrub(detail)) if detail else _SENT
        case Refused(reason, code):
            return Died(scrub(reason), code)
        case NotTried(reason, after_ms):
            return Released(after_ms, scrub(reason))
        case Unavailable(reason, code, after_ms):
            delay_ms = backoff_of(row).delay_for(row.attempts + 1, random)
            if after_ms is not None:
                delay_ms = max(delay_ms, min(after_ms, MAX_AFTER_MS))
            return Retried(scrub(reason), code, delay_ms)
        case Unknown(reason, code):
            if rule is WhenUnknown.PARK:
                return Died(f"{scrub(reason)}; it may have been delivered", UNKNOWN_OUTCOME)
            known_by = code if rule is WhenUnknown.RESEND else UNKNOWN_OUTCOME
            return Retried(scrub(reason), known_by, backoff_of(row).delay_for(row.attempts + 1, random))
    assert_never(result)


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
        self._settlements: Batches[tuple[Settlement, float], SettledRow | LedgerError] = Batches(self._settle_batch)

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
    ) -> None:
        """As `settle`, without waiting for it: `then` gets what `settle` returns."""

        def receive(result: SettledRow | LedgerError | None, error: BaseException | None) -> None:
            settled = self._settled(row, result if error is None else error)
            if settled is not None:
                self._report(row, outcome, settled, took_ms, operation)
            then(settled)

        self._settlements.put((self._settlement(row, outcome, takes_next=takes_next), until), receive)

    async def _decide(self, row: OutboxRow, route: Route, content: Content | None) -> RowOutcome:
        """Try to deliver, unless the destination is closed or a person must decide first."""
        assert route.channel is not None
        rule = when_unknown(route.channel)
        in_doubt = is_in_doubt(row)
        if in_doubt and rule is WhenUnknown.PARK:
            return Died(row.last_error or "it is unknown whether it was delivered", UNKNOWN_OUTCOME, counted=False)
        try:
            message = message_of(row, route.timeout_ms, content)
        except (NotJson, TypeError, ValueError) as error:
            return Died(f"the row cannot be read: {scrub(str(error))}", UNREADABLE, counted=False)
        entry = None if self._gates is None else await self._gates.enter(row.integration_type)
        if isinstance(entry, NotTried):
            return judge(row, entry)
        result: SendResult | None = None
        try:
            result = await self._try(row, message, route, ask_first=in_doubt and rule is WhenUnknown.LOOK_UP)
        finally:
            if self._gates is not None and entry is not None:
                await self._gates.leave(entry, result, route.breaker)
        return judge(row, result, rule=rule, random=self._random)

    async def _try(self, row: OutboxRow, message: Message, route: Route, *, ask_first: bool) -> SendResult:
        began = time.monotonic()
        telemetry.emit(
            "outbox.sending", outbox_id=row.id, integration_type=row.integration_type, tenant_id=row.tenant_id
        )
        with handling(message):
            if tracing.tracer is None:  # a span that nobody wants costs as much as a quick delivery
                result = await self._call(message, route, ask_first=ask_first)
            else:
                result = await self._call_traced(row, message, route, ask_first=ask_first)
        took_ms = (time.monotonic() - began) * 1000
        telemetry.emit(
            "outbox.send_returned",
            outbox_id=row.id,
            integration_type=row.integration_type,
            tenant_id=row.tenant_id,
            result=type(result).__name__,
            took_ms=took_ms,
        )
        return result

    async def _call(self, message: Message, route: Route, *, ask_first: bool) -> SendResult:
        assert route.channel is not None
        limit_ms = route.limit_ms(self._lease_ms)
        found = await self._look_up(message, route.channel, limit_ms) if ask_first else None
        return await self._send(message, route.channel, limit_ms) if found is None else found

    async def _call_traced(self, row: OutboxRow, message: Message, route: Route, *, ask_first: bool) -> SendResult:
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
            result = await self._call(message, route, ask_first=ask_first)
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
            result: object = await self._settlements.submit(
                (self._settlement(row, outcome, takes_next=takes_next), until), tenant_id
            )
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
        await self._settlements.idle()

    async def _send(self, message: Message, channel: Channel, timeout_ms: int) -> SendResult:
        try:
            return answer_of(await within(channel.send(message), timeout_ms / 1000))
        except TimeoutError:
            return Unknown(f"no answer within {timeout_ms} ms", TIMEOUT)
        except Exception as error:  # noqa: BLE001 - a channel that raises has a bug; its message is still owed
            # Without its text and trace, which may show what is being sent.
            _log.error("channel of %r raised %s", message.integration_type, type(error).__name__)
            return raised(error)

    async def _look_up(self, message: Message, channel: Channel, timeout_ms: int) -> Accepted | Unavailable | None:
        """Whether the target has it. Not being able to tell keeps the doubt: it is asked again next time."""
        assert isinstance(channel, LooksUp)
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                found = await channel.look_up(message)
        except Exception as error:  # noqa: BLE001 - as above
            _log.error("looking up a message of %r raised %s", message.integration_type, type(error).__name__)
            return Unavailable(raised(error).reason, UNKNOWN_OUTCOME)
        if found is None:
            return None
        match answer_of(found):
            case Accepted() as there:
                return there
            case Unavailable(reason, _, after_ms):
                return Unavailable(reason, UNKNOWN_OUTCOME, after_ms)
            case other:
                return Unavailable(other.reason, UNKNOWN_OUTCOME)

    async def _settle_batch(
        self, tenant_id: Hashable, batch: Sequence[tuple[Settlement, float]]
    ) -> Sequence[SettledRow | LedgerError]:
        """One transaction; a database that is away is asked again, for each row until its own lease is nearly over.

        A row that was slow has little left, and must not make those beside it be delivered twice.
        """
        now, pause = time.monotonic(), _FIRST_PAUSE_S
        waiting = {n: (settlement, now + (until - now) * _ENOUGH_LEASE) for n, (settlement, until) in enumerate(batch)}
        results: dict[int, SettledRow | LedgerError] = {}
        telemetry.emit("outbox.settling", count=len(batch))
        while waiting:
            settlements = [settlement for settlement, _ in waiting.values()]
            try:
                settled = await self.settle_each(settlements, None if tenant_id is None else str(tenant_id))
            except DatabaseUnavailable as error:
                next_try = time.monotonic() + pause
                given_up = [n for n, (_, give_up) in waiting.items() if next_try > give_up]
                results |= dict.fromkeys(given_up, error)
                waiting = {n: entry for n, entry in waiting.items() if n not in results}
                if waiting:
                    await asyncio.sleep(pause * (0.5 + self._random() / 2))
                    pause = min(pause * 2, _LONGEST_PAUSE_S)
            else:
                telemetry.emit("outbox.settled", count=len(settled))
                results |= dict(zip(waiting, settled, strict=True))
                break
        return [results[n] for n in range(len(batch))]

    async def settle_each(
        self, settlements: Sequence[Settlement], tenant_id: str | None = None
    ) -> Sequence[SettledRow]:
        """Write outcomes in one transaction, or one by one when the database refuses that. One per outcome, in order.

        Raises DatabaseUnavailable."""
        try:
            return await self._store.settle(settlements, tenant_id=tenant_id)
        except DatabaseUnavailable:
            raise
        except LedgerError:
            # One that the database refuses must not keep the others from being written.
            if len(settlements) == 1:
                raise
        results: list[SettledRow] = []
        for settlement in settlements:
            try:
                results += await self._store.settle([settlement], tenant_id=tenant_id)
            except DatabaseUnavailable:
                raise
            except LedgerError as error:
                _log.error("row %s cannot be settled: %s", settlement.row.id, error)
                results.append(SettledRow(settlement.row.id, None, settlement.row.attempts))
        return results

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
