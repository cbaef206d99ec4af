"""Write what became of claimed rows, with their attempts, and what comes next under their ordering keys.

In: settlements. Out: what each did, decided by guarded statements: on PostgreSQL one, and one round trip; on SQLite
some steps of a transaction. Elsewhere: the statements (`_sql`), asking a database that is away again
(`bullpen.delivery`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, Final, assert_never

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from bullpen.errors import DatabaseUnavailable
from bullpen.ledger._sql import Sql
from bullpen.ledger.database import Database
from bullpen.ledger.driver import prepared
from bullpen.ledger.enqueue import Enqueuer
from bullpen.ledger.outbox_rows import STATUSES, to_row
from bullpen.ledger.records import (
    MAX_LENGTHS,
    MAX_RECEIPT,
    RESERVED_STREAM,
    Died,
    OutboxRow,
    OutboxStatus,
    Released,
    Retried,
    Sent,
    SettledRow,
    Settlement,
    encode_rows,
    one_line,
)
from bullpen.ledger.tables import to_epoch_ms

__all__ = ["DEAD_EVENT", "OutboxSettling"]

DEAD_EVENT: Final = "outbox.dead.v1"


class OutboxSettling:
    """Settlements of one outbox. `dead_letter_type` is where the death of a row is announced; None: nowhere."""

    def __init__(
        self, database: Database, enqueuer: Enqueuer, sql: Callable[[], Sql], dead_letter_type: str | None
    ) -> None:
        self._database, self._enqueuer, self._dead_letter_type = database, enqueuer, dead_letter_type
        self._sql_now = sql

    @property
    def sql(self) -> Sql:
        return self._sql_now()

    async def settle(self, settlements: Sequence[Settlement], tenant_id: str | None) -> list[SettledRow]:
        given = {each.row.id: each for settlement in settlements for each in _in_line(settlement)}
        if not given:
            return []
        if self._database.is_postgres:
            changed = await self._settle_at_once(settlements, given, tenant_id)
        else:
            changed = await self._database.in_one_go(partial(self._settle_in_steps, given))
        return [_settled(settlement, changed) for settlement in settlements]

    async def followers(self, row: OutboxRow, most: int) -> list[OutboxRow]:
        if not self._database.is_postgres or row.ordering_key is None:
            return []  # SQLite writes in several steps, and its commits cost nothing but the disk
        wanted = {"type": row.integration_type, "key": row.ordering_key, "seq": row.seq, "most": most}
        found = map(to_row, await self._database.fetch(self.sql.followers, wanted, reads=True))
        now = row.locked_at or row.updated_at
        fresh = takewhile(
            lambda each: each.status is OutboxStatus.PENDING and not each.attempts and each.due_at <= now, found
        )
        return [each._replace(started_at=row.started_at, updated_at=row.updated_at) for each in fresh]

    async def _settle_at_once(
        self, settlements: Sequence[Settlement], given: Mapping[str, Settlement], tenant_id: str | None
    ) -> dict[str, SettledRow]:
        """PostgreSQL: one statement, and one round trip where nothing else has to share its transaction."""
        takes_next = any(each.next_lease_ms for each in settlements)
        # Of a line the last row says whether it goes on.
        ordered = [_in_line(each)[-1] for each in settlements if each.row.ordering_key is not None]
        has_runs = any(each.run for each in settlements)
        statement = self.sql.settle(
            notify=self._enqueuer.notify, take_next=takes_next, runs=len(given) if has_runs else 0
        )
        is_alone = not self._may_announce(given.values()) and all(each.next_lease_ms for each in ordered)
        parameters = {"rows": encode_rows(record for each in settlements for record in _records(each))}
        if not is_alone:
            async with self._database.transaction(tenant=tenant_id) as connection:
                changed = _changed((await connection.execute(prepared(statement), parameters)).all())
                await self._unpark_after(connection, ordered, changed)
                await self._announce(connection, given, changed)
            return changed
        changed = _changed(await self._database.fetch_of(tenant_id, statement, parameters))
        if ordered:
            # After the commit: a claim that saw the row before this one in flight has parked its row by now, or waits
            # for us. Should this fail, or should we die before it, the reaper finds what is parked for nothing.
            with contextlib.suppress(DatabaseUnavailable):
                await self._unpark(ordered, changed, tenant_id)
        return changed

    def _settle_in_steps(self, given: Mapping[str, Settlement], connection: sa.Connection) -> dict[str, SettledRow]:
        """SQLite, where claims are asked in one go too: they stand in one line with these. On connections of their own
        the two would wait for each other by trying again and again, and what was sent stayed unsettled meanwhile."""
        batch = encode_rows(_outcome_record(settlement) for settlement in given.values())
        found = connection.execute(prepared(self.sql.settle()), {"rows": batch}).all()
        changed = {row.id: SettledRow(row.id, STATUSES[row.status], row.attempts) for row in found}
        tried = [
            _attempt_record(given[row.id], row.status)
            for row in found
            if not isinstance(given[row.id].outcome, Released)
        ]
        if tried:
            connection.execute(prepared(self.sql.log_attempts), {"rows": encode_rows(tried)})
        ordered = [given[row.id] for row in found if row.ordering_key is not None]
        wanted = [each for each in ordered if each.next_lease_ms]
        if wanted:
            records = [{"id": each.row.id, "worker": each.worker, "next_ms": each.next_lease_ms} for each in wanted]
            rows = connection.execute(prepared(self.sql.take_next), {"rows": encode_rows(records)})
            taken = {(row.integration_type, row.ordering_key): row for row in map(to_row, rows)}
            for each in wanted:
                follower = taken.get((each.row.integration_type, each.row.ordering_key))
                if follower is not None:
                    changed[each.row.id] = changed[each.row.id]._replace(next=follower)
        if lines := _ended_lines(ordered, changed):
            connection.execute(prepared(self.sql.unpark_next(most=len(lines))), {"rows": encode_rows(lines)})
        if records := self._announcements(given, changed):
            self._enqueuer.insert_records_sync(connection, records)
        return changed

    async def _unpark(
        self, ordered: Sequence[Settlement], changed: Mapping[str, SettledRow], tenant_id: str | None
    ) -> None:
        if _ended_lines(ordered, changed):
            async with self._database.transaction(tenant=tenant_id) as connection:
                await self._unpark_after(connection, ordered, changed)

    async def _unpark_after(
        self, connection: AsyncConnection, ordered: Sequence[Settlement], changed: Mapping[str, SettledRow]
    ) -> None:
        """Let the next of each line go, where it was not taken along: whoever claims must hear of it."""
        if lines := _ended_lines(ordered, changed):
            statement = self.sql.unpark_next(most=len(lines))
            result = await connection.execute(prepared(statement), {"rows": encode_rows(lines)})
            if result.rowcount:
                await self.notify(connection)

    async def notify(self, connection: AsyncConnection) -> None:
        if self._database.is_postgres and self._enqueuer.notify:
            await connection.execute(prepared(self.sql.notify))

    def _may_announce(self, settlements: Iterable[Settlement]) -> bool:
        """Whether a row may be DEAD after this, and somebody wants to know."""
        return self._dead_letter_type is not None and any(
            isinstance(each.outcome, Died | Retried) for each in settlements
        )

    async def _announce(
        self, connection: AsyncConnection, given: Mapping[str, Settlement], changed: Mapping[str, SettledRow]
    ) -> None:
        """Tell of new dead rows through the outbox itself, in the transaction that made them so."""
        if records := self._announcements(given, changed):
            await self._enqueuer.insert_records(connection, records)

    def _announcements(
        self, given: Mapping[str, Settlement], changed: Mapping[str, SettledRow]
    ) -> list[dict[str, Any]]:
        if self._dead_letter_type is None:
            return []
        dead = [given[row_id] for row_id, settled in changed.items() if settled.status is OutboxStatus.DEAD]
        return [
            _announcement(settlement, self._dead_letter_type)
            for settlement in dead
            if not settlement.row.is_announcement
        ]

    async def unpark(self) -> int:
        async with self._database.transaction_without_tenant() as connection:
            return int((await connection.execute(prepared(self.sql.unpark_orphans))).rowcount)


def _in_line(settlement: Settlement) -> list[Settlement]:
    """A row and those that left behind it, one by one; the last one says whether the next is taken."""
    if not settlement.run:
        return [settlement]
    rows = ((settlement.row, settlement.outcome), *settlement.run)
    alone = [Settlement(row, outcome, settlement.worker) for row, outcome in rows]
    return [*alone[:-1], alone[-1]._replace(next_lease_ms=settlement.next_lease_ms)]


def _records(settlement: Settlement) -> list[dict[str, Any]]:
    records = [_outcome_record(each) for each in _in_line(settlement)]
    for record in records[1:]:
        record.update(head=settlement.row.id, head_fence=settlement.row.fence)
    if len(records) > 1:
        records[-1]["run"] = len(records)
    return records


def _settled(settlement: Settlement, changed: Mapping[str, SettledRow]) -> SettledRow:
    rows = [
        changed.get(each.row.id) or SettledRow(each.row.id, None, each.row.attempts) for each in _in_line(settlement)
    ]
    return rows[0] if len(rows) == 1 else rows[0]._replace(next=rows[-1].next, run=tuple(rows[1:]))


def _changed(found: Iterable[Sequence[Any]]) -> dict[str, SettledRow]:
    """What a settlement of PostgreSQL answers: id, status, attempts, a notification, and a row that was taken along."""
    return {
        row[0]: SettledRow(
            row[0], STATUSES[row[1]], row[2], to_row(row[4:]) if len(row) > 4 and row[4] is not None else None
        )
        for row in found
    }


def _ended_lines(ordered: Sequence[Settlement], changed: Mapping[str, SettledRow]) -> list[dict[str, Any]]:
    """Ordering keys whose row has ended, and whose next one was not taken along."""
    return [
        {"type": each.row.integration_type, "key": each.row.ordering_key}
        for each in ordered
        if (settled := changed.get(each.row.id)) is not None
        and settled.status in (OutboxStatus.SENT, OutboxStatus.DEAD)
        and settled.next is None
    ]


def _outcome_record(settlement: Settlement) -> dict[str, Any]:
    """What PostgreSQL needs to write it and its attempt; what is absent is NULL there."""
    row, outcome = settlement.row, settlement.outcome
    record: dict[str, Any] = {"id": row.id, "fence": row.fence, "worker": settlement.worker[:120]}
    if row.started_at is not None:
        record["started_ms"] = to_epoch_ms(row.started_at)
    if settlement.next_lease_ms:
        record["next_ms"] = settlement.next_lease_ms
    match outcome:
        case Sent(receipt):
            record["kind"] = "SENT"
            if receipt and (kept := one_line(receipt, MAX_RECEIPT)):
                record["receipt"] = kept
        case Retried(error, code, delay_ms):
            record.update(kind="FAILED", counted=1, error=one_line(error), code=code, delay_ms=delay_ms)
        case Died(error, code, counted):
            record.update(kind="DEAD", counted=int(counted), error=one_line(error), code=code)
        case Released(delay_ms, error):
            record.update(kind="RELEASED", error=error and one_line(error), delay_ms=delay_ms)
        case _:
            assert_never(outcome)
    return record


def _attempt_record(settlement: Settlement, status: str) -> dict[str, Any]:
    row, outcome = settlement.row, settlement.outcome
    failed = outcome if isinstance(outcome, Retried | Died) else None
    return {
        "outbox_id": row.id,
        "number": row.attempts + 1,
        "fence": row.fence,
        "worker": settlement.worker[:120],
        "outcome": status,
        "error_code": failed and failed.code,
        "error": failed and one_line(failed.error),
        "tenant_id": row.tenant_id,
        "receipt": (one_line(outcome.receipt, MAX_RECEIPT) or None) if isinstance(outcome, Sent) else None,
        "started_ms": None if row.started_at is None else to_epoch_ms(row.started_at),
    }


def _announcement(settlement: Settlement, integration_type: str) -> dict[str, Any]:
    """Ids and the reason, never the payload: whoever may see that reads the row."""
    row, outcome = settlement.row, settlement.outcome
    assert isinstance(outcome, Retried | Died)
    event_id = f"{row.id}/{row.fence}"  # a row that dies again after a redrive is told again
    payload = {
        "outboxId": row.id,
        "integrationType": row.integration_type,
        "eventType": row.event_type,
        "sourceStreamId": row.source_stream_id,
        "sourceEventId": row.source_event_id,
        "attempts": row.attempts + int(not isinstance(outcome, Died) or outcome.counted),
        "errorCode": outcome.code,
        "lastError": one_line(outcome.error),
    }
    return {
        "source_stream_id": RESERVED_STREAM,
        "source_event_id": event_id[: MAX_LENGTHS["source_event_id"]],
        "route_key": integration_type,
        "integration_type": integration_type,
        "event_type": DEAD_EVENT,
        "payload": msgspec.json.encode(payload).decode(),
        "headers": msgspec.json.encode({"idempotencyKey": event_id}).decode(),
        "tenant_id": row.tenant_id,
        "user_id": row.user_id,
        "correlation_id": row.correlation_id,
        "ordering_key": None,
        "backoff": None,
        "due_ms": None,
        "delay_ms": 0,
        "max_attempts": 10,
    }
