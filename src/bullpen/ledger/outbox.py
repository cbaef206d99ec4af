"""The outbox in PostgreSQL and in SQLite: one class, and the one statement in which they differ.

In: a `Database`. Out: the promises of `OutboxRepository`. Elsewhere: the text of the statements (`_sql`), storing
inside a caller's own transaction (`enqueue`).
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Final, assert_never

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from bullpen._kernel import json
from bullpen._kernel.duration import check_int, check_texts
from bullpen.errors import DatabaseUnavailable, LedgerError
from bullpen.ledger import tables
from bullpen.ledger._sql import COLUMNS, Sql
from bullpen.ledger.database import Database
from bullpen.ledger.driver import prepared
from bullpen.ledger.endpoint_records import endpoint_id_of
from bullpen.ledger.enqueue import Enqueuer
from bullpen.ledger.records import (
    MAX_LENGTHS,
    MAX_RECEIPT,
    RESERVED_STREAM,
    Attempt,
    Claimed,
    Died,
    Enqueued,
    Lane,
    OutboxItem,
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
from bullpen.ledger.repository import OutboxRepository
from bullpen.ledger.tables import to_datetime, to_epoch_ms
from bullpen.ledger.tenant_limits import Allowance

DEAD_EVENT: Final = "outbox.dead.v1"
_CLAIM_TRIES: Final = 3
_LONGEST_ERROR: Final = 600
"""Of an error that is compared: more than tells two causes apart."""
_INSTANTS: Final = tuple(
    index for index, column in enumerate(tables.outbox.columns) if isinstance(column.type, tables.Instant)
)
_STATUSES: Final = {status.value: status for status in OutboxStatus}
_STATUS: Final = list(tables.outbox.columns.keys()).index("status")


_is_id = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}").fullmatch


class SqlOutbox(OutboxRepository):
    """The outbox of one ledger. `dead_letter_type` is where the death of a row is announced; None: nowhere."""

    def __init__(self, database: Database, *, enqueuer: Enqueuer, dead_letter_type: str | None = None) -> None:
        self._database = database
        self._enqueuer = enqueuer
        self._dead_letter_type = dead_letter_type
        self._statements: tuple[int, Sql] | None = None

    @property
    def sql(self) -> Sql:
        offset = self._database.clock_offset_ms
        if self._statements is None or self._statements[0] != offset:
            self._statements = (offset, Sql(self._database.dialect, self._database.schema, offset))
        return self._statements[1]

    # ---- storing ------------------------------------------------------------------------------------------------

    async def enqueue_many(self, items: Iterable[OutboxItem]) -> list[Enqueued]:
        given = list(items)
        async with self._database.transaction(tenant=_common_tenant(given)) as connection:
            return await self._enqueuer.enqueue_many(connection, given)

    # ---- claiming -----------------------------------------------------------------------------------------------

    async def claim_due_batch(
        self, worker_id: str, limit: int = 100, *, lease_ms: int = 60_000, starting: bool = False
    ) -> list[OutboxRow]:
        check_int("limit", limit, minimum=1)
        parameters = {**_claim_parameters(worker_id, lease_ms, starting=starting), "quota": limit}
        rows = await self._try_claim([(self.sql.claim_oldest, parameters)])
        return [row for row in rows if not row.parked]

    async def due_types(self) -> list[str]:
        return [row[0] for row in await self._database.fetch(self.sql.due_types, {}, reads=True)]

    async def next_due_ms(self) -> int | None:
        ((left_ms,),) = await self._database.fetch(self.sql.next_due_ms, {}, reads=True)
        return None if left_ms is None else max(0, math.ceil(left_ms))

    async def due_tenants(self, integration_type: str, *, after: str = "", most: int = 100) -> list[str]:
        parameters = {"integration_type": integration_type, "after": after, "most": most}
        return [row[0] for row in await self._database.fetch(self.sql.due_tenants, parameters, reads=True)]

    async def claim(self, lanes: Sequence[Lane], *, worker_id: str, lease_ms: int, starting: bool = False) -> Claimed:
        wanted = [lane for lane in lanes if lane.quota > 0]
        if not wanted:
            return Claimed((), frozenset())
        common = _claim_parameters(worker_id, lease_ms, starting=starting)
        if any(lane.limit is not None and lane.limit.is_bounded for lane in wanted):
            rows, held = await self._try_claim_within_limits(wanted, common)
        else:
            rows, held = await self._try_claim(self._claim_statements(wanted, common)), frozenset()
        by_tenant = wanted[0].tenant_id is not None
        taken = Counter((row.integration_type, (row.tenant_id or "") if by_tenant else None) for row in rows)
        full = {
            (lane.integration_type, lane.tenant_id)
            for lane in wanted
            if taken[lane.integration_type, lane.tenant_id] >= lane.quota
        }
        return Claimed(tuple(row for row in rows if not row.parked), frozenset(full), held)

    def _claim_statements(
        self, lanes: Sequence[Lane], common: Mapping[str, Any]
    ) -> list[tuple[str, Mapping[str, Any]]]:
        by_tenant = lanes[0].tenant_id is not None
        if self._database.is_postgres:
            shares = [{"type": lane.integration_type, "tenant": lane.tenant_id, "quota": lane.quota} for lane in lanes]
            statement = self.sql.claim_lanes(by_tenant=by_tenant, most=sum(lane.quota for lane in lanes))
            return [(statement, {**common, "rows": encode_rows(shares)})]
        text = self.sql.claim_lane(by_tenant=by_tenant)
        names = ("type", "tenant") if by_tenant else ("type",)
        return [
            (
                text,
                {
                    **common,
                    "quota": lane.quota,
                    **dict(zip(names, (lane.integration_type, lane.tenant_id), strict=False)),
                },
            )
            for lane in lanes
        ]

    async def _try_claim(self, statements: Sequence[tuple[str, Mapping[str, Any]]]) -> list[OutboxRow]:
        """Claim; when two dispatchers took rows of one ordering key in the same moment, the index lets one pass and
        the other tries again with a fresh look."""
        for _ in range(_CLAIM_TRIES):
            try:
                if len(statements) == 1:  # on PostgreSQL always
                    return sorted(map(_to_row, await self._database.fetch(*statements[0])), key=_by_due)
                async with self._database.statement() as connection:  # on SQLite they share a transaction
                    return await self._claim(connection, statements)
            except LedgerError as error:
                if not _is_in_flight(error):
                    raise
        return []

    async def _claim(
        self, connection: AsyncConnection, statements: Sequence[tuple[str, Mapping[str, Any]]]
    ) -> list[OutboxRow]:
        rows = [
            row for statement, parameters in statements for row in await self._rows(connection, statement, parameters)
        ]
        return sorted(rows, key=_by_due)

    async def _try_claim_within_limits(
        self, lanes: Sequence[Lane], common: Mapping[str, Any]
    ) -> tuple[list[OutboxRow], frozenset[str]]:
        """As `_try_claim`, in a transaction that counts what limited tenants have under way and have started."""
        for _ in range(_CLAIM_TRIES):
            try:
                async with self._database.transaction_without_tenant() as connection:
                    return await self._claim_within_limits(connection, lanes, common)
            except LedgerError as error:
                if not _is_in_flight(error):
                    raise
        return [], frozenset()

    async def _claim_within_limits(
        self, connection: AsyncConnection, lanes: Sequence[Lane], common: Mapping[str, Any]
    ) -> tuple[list[OutboxRow], frozenset[str]]:
        bounded = {
            (lane.integration_type, lane.tenant_id): lane.limit
            for lane in lanes
            if lane.limit is not None and lane.limit.is_bounded
        }
        allowance = await Allowance.lock(connection, self.sql, list(bounded.values()))
        open_lanes, held = [], set()
        for lane in lanes:
            limit = bounded.get((lane.integration_type, lane.tenant_id))
            quota = lane.quota if limit is None else allowance.take(limit, lane.quota)
            if quota < lane.quota:
                held.add(lane.integration_type)
            if quota > 0:
                open_lanes.append(replace(lane, quota=quota))
        if not open_lanes:
            return [], frozenset(held)
        rows = await self._claim(connection, self._claim_statements(open_lanes, common))
        for row in rows:
            limit = bounded.get((row.integration_type, row.tenant_id or ""))
            if limit is not None and not row.parked:
                allowance.took(limit, 1)
        await allowance.write()
        return rows, frozenset(held)

    async def begin(
        self,
        ids: Collection[str],
        *,
        worker_id: str,
        lease_ms: int,
        tenant_id: str | None = None,
        content: bool = True,
    ) -> dict[str, OutboxRow]:
        parameters = {"rows": _ids(ids), "worker_id": worker_id, "lease_ms": lease_ms}
        found = await self._database.fetch_of(tenant_id, self.sql.begin(content=content), parameters)
        return {row.id: row for row in map(_to_row, found)}

    async def statuses(self, ids: Collection[str], *, tenant_id: str | None = None) -> dict[str, OutboxStatus]:
        wanted = {"rows": _ids(ids)}
        async with self._database.transaction(tenant=tenant_id) as connection:
            found = await connection.execute(prepared(self.sql.statuses), wanted)
            return {row.id: OutboxStatus(row.status) for row in found}

    async def extend(self, rows: Collection[OutboxRow], lease_ms: int) -> None:
        batch = encode_rows({"id": row.id, "fence": row.fence} for row in rows)
        await self._database.fetch(self.sql.extend, {"rows": batch, "lease_ms": lease_ms})

    # ---- settling -----------------------------------------------------------------------------------------------

    async def settle(self, settlements: Sequence[Settlement], *, tenant_id: str | None = None) -> list[SettledRow]:
        given = {settlement.row.id: settlement for settlement in settlements}
        if not given:
            return []
        settle = self._settle_at_once if self._database.is_postgres else self._settle_in_steps
        changed = await settle(given, tenant_id)
        return [
            changed.get(settlement.row.id) or SettledRow(settlement.row.id, None, settlement.row.attempts)
            for settlement in settlements
        ]

    async def _settle_at_once(self, given: Mapping[str, Settlement], tenant_id: str | None) -> dict[str, SettledRow]:
        """PostgreSQL: one statement, and one round trip where nothing else has to share its transaction."""
        takes_next = any(each.next_lease_ms for each in given.values())
        ordered = [each for each in given.values() if each.row.ordering_key is not None]
        statement = self.sql.settle(notify=self._enqueuer.notify, take_next=takes_next)
        is_alone = not self._may_announce(given.values()) and all(each.next_lease_ms for each in ordered)
        parameters = {"rows": encode_rows(_outcome_record(settlement) for settlement in given.values())}
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

    async def _settle_in_steps(self, given: Mapping[str, Settlement], tenant_id: str | None) -> dict[str, SettledRow]:
        async with self._database.transaction(tenant=tenant_id) as connection:
            batch = encode_rows(_outcome_record(settlement) for settlement in given.values())
            found = (await connection.execute(prepared(self.sql.settle()), {"rows": batch})).all()
            changed = {row.id: SettledRow(row.id, _STATUSES[row.status], row.attempts) for row in found}
            tried = [
                _attempt_record(given[row.id], row.status)
                for row in found
                if not isinstance(given[row.id].outcome, Released)
            ]
            if tried:
                await connection.execute(prepared(self.sql.log_attempts), {"rows": encode_rows(tried)})
            ordered = [given[row.id] for row in found if row.ordering_key is not None]
            wanted = [each for each in ordered if each.next_lease_ms]
            if wanted:
                records = [{"id": each.row.id, "worker": each.worker, "next_ms": each.next_lease_ms} for each in wanted]
                rows = await self._rows(connection, self.sql.take_next, {"rows": encode_rows(records)})
                taken = {(row.integration_type, row.ordering_key): row for row in rows}
                for each in wanted:
                    follower = taken.get((each.row.integration_type, each.row.ordering_key))
                    if follower is not None:
                        changed[each.row.id] = changed[each.row.id]._replace(next=follower)
            await self._unpark_after(connection, ordered, changed)
            await self._announce(connection, given, changed)
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
                await self._notify(connection)

    async def _notify(self, connection: AsyncConnection) -> None:
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
        if self._dead_letter_type is None:
            return
        dead = [given[row_id] for row_id, settled in changed.items() if settled.status is OutboxStatus.DEAD]
        records = [
            _announcement(settlement, self._dead_letter_type)
            for settlement in dead
            if not settlement.row.is_announcement
        ]
        if records:
            await self._enqueuer.insert_records(connection, records)

    async def expired(self, limit: int = 100) -> list[OutboxRow]:
        return list(map(_to_row, await self._database.fetch(self.sql.expired, {"limit": limit}, reads=True)))

    async def unpark(self) -> int:
        async with self._database.transaction_without_tenant() as connection:
            return int((await connection.execute(prepared(self.sql.unpark_orphans))).rowcount)

    # ---- looking and looking after ------------------------------------------------------------------------------

    async def get(self, row_id: str, *, tenant_id: str | None = None) -> OutboxRow | None:
        statement = (
            f"SELECT {COLUMNS} FROM {self.sql.outbox} WHERE id IN (SELECT s_id FROM {self.sql._batch({'id': 'uuid'})})"
        )
        async with self._database.transaction(tenant=tenant_id) as connection:
            rows = await self._rows(connection, statement, {"rows": _ids([row_id])})
        return rows[0] if rows else None

    async def attempts_of(self, row_id: str, *, tenant_id: str | None = None) -> list[Attempt]:
        table = tables.attempts
        names = ("number", "fence", "worker", "outcome", "error_code", "error", "started_at", "finished_at", "receipt")
        query = sa.select(*(table.c[name] for name in names)).where(table.c.outbox_id == row_id).order_by(table.c.id)
        async with self._database.transaction(tenant=tenant_id) as connection:
            return [Attempt(*row) for row in await self._select(connection, query)]

    async def find(
        self,
        *,
        status: OutboxStatus | None = None,
        integration_type: str | None = None,
        tenant_id: str | None = None,
        error_code: str | None = None,
        event_type: str | None = None,
        ordering_key: str | None = None,
        correlation_id: str | None = None,
        source_event_id: str | None = None,
        since: datetime | None = None,
        before: datetime | None = None,
        after_id: str | None = None,
        newest_first: bool = False,
        start: int = 0,
        limit: int = 100,
        after_seq: int | None = None,
    ) -> list[OutboxRow]:
        table = tables.outbox
        order = table.c.seq.desc() if newest_first else table.c.seq
        query = sa.select(*(table.c[column.name] for column in table.columns)).order_by(order)
        query = query.offset(start).limit(limit)
        equal = {
            "status": status,
            "integration_type": integration_type,
            "error_code": error_code,
            "tenant_id": tenant_id,
            "event_type": event_type,
            "ordering_key": ordering_key,
            "correlation_id": correlation_id,
            "source_event_id": source_event_id,
        }
        for name, value in equal.items():
            if value is not None:
                query = query.where(table.c[name] == str(value))
        if endpoint_id_of(integration_type or "") is not None:
            query = query.where(sa.text(tables.IS_ENDPOINT))  # has an index of its own
        if since is not None:
            query = query.where(table.c.created_at >= since)
        if before is not None:
            query = query.where(table.c.created_at < before)
        behind: Any = after_seq
        if after_id is not None:
            behind = sa.select(table.c.seq).where(table.c.id == after_id).scalar_subquery()
        if behind is not None:
            query = query.where(table.c.seq < behind if newest_first else table.c.seq > behind)
        async with self._database.transaction(tenant=tenant_id) as connection:
            return [_to_row(row) for row in await self._select(connection, query)]

    async def dead_causes(
        self, *, tenant_id: str | None = None, limit: int = 200_000
    ) -> list[tuple[str, str, str | None, str | None, str | None, int, datetime, datetime]]:
        columns = tables.outbox.c
        # Written out: PostgreSQL does not take two parameters for one expression.
        error: sa.ColumnElement[Any] = sa.func.substr(columns.last_error, 1, sa.literal_column(str(_LONGEST_ERROR)))
        kind = (columns.integration_type, columns.event_type, columns.error_code, error, columns.tenant_id)
        ends = (sa.func.count().label("n"), sa.func.min(columns.dead_at), sa.func.max(columns.dead_at))
        query = sa.select(*kind, *ends).where(columns.status == "DEAD").group_by(*kind)
        if tenant_id is not None:
            query = query.where(columns.tenant_id == tenant_id)
        async with self._database.transaction(tenant=tenant_id) as connection:
            rows = await self._select(connection, query.order_by(sa.desc("n")).limit(limit))
        return [(*row[:6], _must(to_datetime(row[6])), _must(to_datetime(row[7]))) for row in rows]

    async def counts(self) -> Mapping[OutboxStatus, int]:
        column = tables.outbox.c.status
        query = sa.select(column, sa.func.count()).where(sa.text("status <> 'SENT'")).group_by(column)
        async with self._database.statement(reads=True) as connection:
            found = {OutboxStatus(status): count for status, count in await self._select(connection, query)}
        return {status: found.get(status, 0) for status in OutboxStatus if status is not OutboxStatus.SENT}

    async def stats(self) -> list[tuple[str, OutboxStatus, int, datetime]]:
        columns = tables.outbox.c
        query = (
            sa.select(columns.integration_type, columns.status, sa.func.count(), sa.func.min(columns.due_at))
            .where(sa.text("status <> 'SENT'"))
            .group_by(columns.integration_type, columns.status)
            .order_by(columns.integration_type, columns.status)
        )
        async with self._database.statement(reads=True) as connection:
            rows = await self._select(connection, query)
        return [(name, OutboxStatus(status), count, _must(to_datetime(due))) for name, status, count, due in rows]

    async def bury(self, item: OutboxItem, error: str, *, code: str, attempts: int) -> Enqueued:
        async with self._database.transaction(tenant=item.tenant_id) as connection:
            stored = await self._enqueuer.enqueue(connection, item)
            if stored.created:
                values = {"rows": _ids([str(stored.id)]), "error": one_line(error), "code": code, "attempts": attempts}
                await connection.execute(prepared(self.sql.bury), values)
        return stored

    async def redrive(self, ids: Collection[str], *, by: str, tenant_id: str | None = None) -> list[str]:
        ids = check_texts("ids", ids)
        return await self._act_on_dead("outbox.redrive", [self.sql.redrive], ids, by, tenant_id)

    async def discard(self, ids: Collection[str], *, by: str, tenant_id: str | None = None) -> list[str]:
        ids = check_texts("ids", ids)
        return await self._act_on_dead(
            "outbox.discard", [self.sql.fence_dead, self.sql.delete_dead], ids, by, tenant_id
        )

    async def replace_dead(
        self, row_id: str, payload: Any, *, by: str, note: Mapping[str, Any], tenant_id: str | None = None
    ) -> str | None:
        raw = json.encode(payload)
        json.check_payload_size(len(raw))
        wanted = {"rows": _ids([row_id])}
        async with self._database.transaction(tenant=tenant_id) as connection:
            found = await self._rows(connection, self.sql.dead, wanted)
            await connection.execute(prepared(self.sql.fence_dead), wanted)
            # Whoever deletes it replaces it: of two at the same moment the second finds nothing to delete.
            if not found or not (await connection.execute(prepared(self.sql.delete_dead), wanted)).all():
                return None
            (row,) = found
            (new_id,) = await self._enqueuer.insert_records(connection, [_edited(row, raw.decode())])
            detail = {"integrationType": row.integration_type, "errorCode": row.error_code, "newId": new_id, **note}
            await self._audit(connection, [_audit_entry(by, "outbox.edit", row.id, row.tenant_id, detail)])
        return new_id

    async def confirm(self, ids: Collection[str], *, by: str, tenant_id: str | None = None) -> list[str]:
        ids = check_texts("ids", ids)
        return await self._act_on_dead("outbox.confirm", [self.sql.confirm], ids, by, tenant_id)

    async def replay(
        self, ids: Collection[str], *, by: str, label: str, new_key: bool = False, tenant_id: str | None = None
    ) -> list[str]:
        wanted = {"rows": _ids(ids)}
        async with self._database.transaction(tenant=tenant_id) as connection:
            originals = await self._rows(connection, self.sql.ended, wanted)
            copies = [_copy(row, label, new_key=new_key) for row in originals]
            added = await self._enqueuer.insert_records(connection, copies) if copies else []
            await self._audit(
                connection,
                [_audit_entry(by, "outbox.replay", row.id, row.tenant_id, {"label": label}) for row in originals],
            )
        return added

    async def _act_on_dead(
        self, action: str, statements: Sequence[str], ids: Collection[str], by: str, tenant_id: str | None
    ) -> list[str]:
        if not ids:
            return []
        wanted = {"rows": _ids(ids)}
        async with self._database.transaction(tenant=tenant_id) as connection:
            for statement in statements:
                result = await connection.execute(prepared(statement), wanted)
            done = result.all()
            if done and action == "outbox.redrive":
                await self._notify(connection)
            await self._audit(
                connection,
                [
                    _audit_entry(
                        by,
                        action,
                        row.id,
                        row.tenant_id,
                        {"integrationType": row.integration_type, "errorCode": row.error_code},
                    )
                    for row in done
                ],
            )
        return [row.id for row in done]

    async def retire(self, *, keep_ms: int, grace_ms: int, limit: int = 1_000) -> tuple[int, int]:
        parameters = {"keep_ms": keep_ms, "limit": limit}
        async with self._database.transaction_without_tenant() as connection:
            fenced = (await connection.execute(prepared(self.sql.fence_sent), parameters)).rowcount
        async with self._database.transaction_without_tenant() as connection:
            deleted = await connection.execute(prepared(self.sql.delete_fenced), {**parameters, "grace_ms": grace_ms})
            return int(fenced), int(deleted.rowcount)

    # ---- inside -------------------------------------------------------------------------------------------------

    async def _audit(self, connection: AsyncConnection, entries: Sequence[Mapping[str, Any]]) -> None:
        if entries:
            await connection.execute(prepared(self.sql.audit_entries), {"rows": encode_rows(entries)})

    async def _rows(
        self, connection: AsyncConnection, statement: str, parameters: Mapping[str, Any]
    ) -> list[OutboxRow]:
        return [_to_row(row) for row in (await connection.execute(prepared(statement), dict(parameters))).all()]

    async def _select(self, connection: AsyncConnection, query: sa.Select[Any]) -> list[tuple[Any, ...]]:
        options = {"schema_translate_map": self._database.translate_map}
        return [tuple(row) for row in (await connection.execute(query, execution_options=options)).all()]


def _by_due(row: OutboxRow) -> tuple[datetime, int]:
    return row.due_at, row.seq


def _is_in_flight(error: LedgerError) -> bool:
    """Whether two rows of one ordering key would have been in flight."""
    return "ux_outbox_in_flight" in str(error) or "integration_outbox.ordering_key" in str(error)


def _to_row(values: Sequence[Any]) -> OutboxRow:
    converted = list(values)
    for index in _INSTANTS:
        if (value := converted[index]) is not None:
            converted[index] = to_datetime(value)
    converted[_STATUS] = _STATUSES[converted[_STATUS]]
    return OutboxRow._make(converted)


def _changed(found: Iterable[Sequence[Any]]) -> dict[str, SettledRow]:
    """What a settlement of PostgreSQL answers: id, status, attempts, a notification, and a row that was taken along."""
    return {
        row[0]: SettledRow(
            row[0], _STATUSES[row[1]], row[2], _to_row(row[4:]) if len(row) > 4 and row[4] is not None else None
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


def _claim_parameters(worker_id: str, lease_ms: int, *, starting: bool) -> dict[str, Any]:
    return {
        "worker_id": one_line(worker_id, 120),
        "lease_ms": check_int("lease_ms", lease_ms, minimum=1),
        "starting": int(starting),
    }


def _ids(ids: Iterable[str]) -> str:
    # What is no id matches no row; PostgreSQL would refuse the whole statement.
    return encode_rows({"id": row_id} for row_id in check_texts("ids", ids) if _is_id(row_id))


def _must(instant: datetime | None) -> datetime:
    assert instant is not None
    return instant


def _common_tenant(items: Sequence[OutboxItem]) -> str | None:
    tenants = {item.tenant_id for item in items}
    return tenants.pop() if len(tenants) == 1 else None


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


def _audit_entry(
    by: str, action: str, subject: str, tenant_id: str | None, detail: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "actor": one_line(by, 120),
        "action": action,
        "subject": subject,
        "tenant_id": tenant_id,
        "detail": msgspec.json.encode(detail).decode(),
    }


def _edited(row: OutboxRow, payload_json: str) -> dict[str, Any]:
    """What takes the place of a dead row: the same but for its payload, under a route of its own."""
    headers = {**row.headers, "idempotencyKey": row.idempotency_key, "editOf": row.id}
    return {
        **_copy(row, f"edit-{row.id[:8]}", new_key=False),
        "payload": payload_json,
        "headers": msgspec.json.encode(headers).decode(),
    }


def _copy(row: OutboxRow, label: str, *, new_key: bool) -> dict[str, Any]:
    """A row that was sent, to be sent again: the same event and content under a route of its own."""
    route = f"{row.route_key}~{label}"
    if len(route) > MAX_LENGTHS["route_key"]:
        # Two long routes must not become one: what is cut away stays in the digest.
        route = f"{row.route_key[:60]}~{hashlib.sha256(route.encode()).hexdigest()[:40]}"
    key = f"{row.idempotency_key}/{label}" if new_key else row.idempotency_key
    return {
        "source_stream_id": row.source_stream_id,
        "source_event_id": row.source_event_id,
        "route_key": route,
        "integration_type": row.integration_type,
        "event_type": row.event_type,
        "payload": row.payload_json,
        "headers": msgspec.json.encode({**row.headers, "idempotencyKey": key, "replayOf": row.id}).decode(),
        "tenant_id": row.tenant_id,
        "user_id": row.user_id,
        "correlation_id": row.correlation_id,
        "ordering_key": row.ordering_key,
        "backoff": row.backoff_json,
        "due_ms": None,
        "delay_ms": 0,
        "max_attempts": row.max_attempts,
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
