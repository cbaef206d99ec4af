"""The outbox in PostgreSQL and in SQLite: one class, and the one statement in which they differ.

In: a `Database`. Out: the promises of `OutboxRepository`. Elsewhere: the text of the statements (`_sql`), writing what
became of claimed rows (`outbox_settling`), storing inside a caller's own transaction (`enqueue`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from bullpen._kernel import json
from bullpen._kernel.duration import check_int, check_texts
from bullpen.errors import LedgerError
from bullpen.ledger import tables
from bullpen.ledger._sql import COLUMNS, Sql
from bullpen.ledger.database import Database
from bullpen.ledger.driver import prepared
from bullpen.ledger.endpoint_records import endpoint_id_of
from bullpen.ledger.enqueue import Enqueuer
from bullpen.ledger.outbox_rows import audit_entry, copy_of, edited, ids_of, to_row
from bullpen.ledger.outbox_settling import OutboxSettling
from bullpen.ledger.records import (
    Attempt,
    Claimed,
    Enqueued,
    Lane,
    OutboxItem,
    OutboxRow,
    OutboxStatus,
    SettledRow,
    Settlement,
    encode_rows,
    one_line,
)
from bullpen.ledger.repository import OutboxRepository
from bullpen.ledger.tables import to_datetime
from bullpen.ledger.tenant_limits import Allowance

_CLAIM_TRIES: Final = 3
_LONGEST_ERROR: Final = 600
"""Of an error that is compared: more than tells two causes apart."""


class SqlOutbox(OutboxRepository):
    """The outbox of one ledger. `dead_letter_type` is where the death of a row is announced; None: nowhere."""

    def __init__(self, database: Database, *, enqueuer: Enqueuer, dead_letter_type: str | None = None) -> None:
        self._database = database
        self._enqueuer = enqueuer
        self._statements: tuple[int, Sql] | None = None
        self._settling = OutboxSettling(database, enqueuer, lambda: self.sql, dead_letter_type)

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
                    return sorted(map(to_row, await self._database.fetch(*statements[0])), key=_by_due)
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
        parameters = {"rows": ids_of(ids), "worker_id": worker_id, "lease_ms": lease_ms}
        found = await self._database.fetch_of(tenant_id, self.sql.begin(content=content), parameters)
        return {row.id: row for row in map(to_row, found)}

    async def statuses(self, ids: Collection[str], *, tenant_id: str | None = None) -> dict[str, OutboxStatus]:
        wanted = {"rows": ids_of(ids)}
        async with self._database.transaction(tenant=tenant_id) as connection:
            found = await connection.execute(prepared(self.sql.statuses), wanted)
            return {row.id: OutboxStatus(row.status) for row in found}

    async def extend(self, rows: Collection[OutboxRow], lease_ms: int) -> None:
        batch = encode_rows({"id": row.id, "fence": row.fence} for row in rows)
        await self._database.fetch(self.sql.extend, {"rows": batch, "lease_ms": lease_ms})

    # ---- settling -----------------------------------------------------------------------------------------------

    async def expired(self, limit: int = 100) -> list[OutboxRow]:
        return list(map(to_row, await self._database.fetch(self.sql.expired, {"limit": limit}, reads=True)))

    async def settle(self, settlements: Sequence[Settlement], *, tenant_id: str | None = None) -> list[SettledRow]:
        return await self._settling.settle(settlements, tenant_id)

    async def followers(self, row: OutboxRow, most: int) -> list[OutboxRow]:
        return await self._settling.followers(row, most)

    async def unpark(self) -> int:
        return await self._settling.unpark()

    # ---- looking and looking after ------------------------------------------------------------------------------

    async def get(self, row_id: str, *, tenant_id: str | None = None) -> OutboxRow | None:
        statement = (
            f"SELECT {COLUMNS} FROM {self.sql.outbox} WHERE id IN (SELECT s_id FROM {self.sql._batch({'id': 'uuid'})})"
        )
        async with self._database.transaction(tenant=tenant_id) as connection:
            rows = await self._rows(connection, statement, {"rows": ids_of([row_id])})
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
            return [to_row(row) for row in await self._select(connection, query)]

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
                values = {
                    "rows": ids_of([str(stored.id)]),
                    "error": one_line(error),
                    "code": code,
                    "attempts": attempts,
                }
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
        wanted = {"rows": ids_of([row_id])}
        async with self._database.transaction(tenant=tenant_id) as connection:
            found = await self._rows(connection, self.sql.dead, wanted)
            await connection.execute(prepared(self.sql.fence_dead), wanted)
            # Whoever deletes it replaces it: of two at the same moment the second finds nothing to delete.
            if not found or not (await connection.execute(prepared(self.sql.delete_dead), wanted)).all():
                return None
            (row,) = found
            (new_id,) = await self._enqueuer.insert_records(connection, [edited(row, raw.decode())])
            detail = {"integrationType": row.integration_type, "errorCode": row.error_code, "newId": new_id, **note}
            await self._audit(connection, [audit_entry(by, "outbox.edit", row.id, row.tenant_id, detail)])
        return new_id

    async def confirm(self, ids: Collection[str], *, by: str, tenant_id: str | None = None) -> list[str]:
        ids = check_texts("ids", ids)
        return await self._act_on_dead("outbox.confirm", [self.sql.confirm], ids, by, tenant_id)

    async def replay(
        self, ids: Collection[str], *, by: str, label: str, new_key: bool = False, tenant_id: str | None = None
    ) -> list[str]:
        wanted = {"rows": ids_of(ids)}
        async with self._database.transaction(tenant=tenant_id) as connection:
            originals = await self._rows(connection, self.sql.ended, wanted)
            copies = [copy_of(row, label, new_key=new_key) for row in originals]
            added = await self._enqueuer.insert_records(connection, copies) if copies else []
            await self._audit(
                connection,
                [audit_entry(by, "outbox.replay", row.id, row.tenant_id, {"label": label}) for row in originals],
            )
        return added

    async def _act_on_dead(
        self, action: str, statements: Sequence[str], ids: Collection[str], by: str, tenant_id: str | None
    ) -> list[str]:
        if not ids:
            return []
        wanted = {"rows": ids_of(ids)}
        async with self._database.transaction(tenant=tenant_id) as connection:
            for statement in statements:
                result = await connection.execute(prepared(statement), wanted)
            done = result.all()
            if done and action == "outbox.redrive":
                await self._settling.notify(connection)
            await self._audit(
                connection,
                [
                    audit_entry(
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
        return [to_row(row) for row in (await connection.execute(prepared(statement), dict(parameters))).all()]

    async def _select(self, connection: AsyncConnection, query: sa.Select[Any]) -> list[tuple[Any, ...]]:
        options = {"schema_translate_map": self._database.translate_map}
        return [tuple(row) for row in (await connection.execute(query, execution_options=options)).all()]


def _by_due(row: OutboxRow) -> tuple[datetime, int]:
    return row.due_at, row.seq


def _is_in_flight(error: LedgerError) -> bool:
    """Whether two rows of one ordering key would have been in flight."""
    return "ux_outbox_in_flight" in str(error) or "integration_outbox.ordering_key" in str(error)


def _claim_parameters(worker_id: str, lease_ms: int, *, starting: bool) -> dict[str, Any]:
    return {
        "worker_id": one_line(worker_id, 120),
        "lease_ms": check_int("lease_ms", lease_ms, minimum=1),
        "starting": int(starting),
    }


def _must(instant: datetime | None) -> datetime:
    assert instant is not None
    return instant


def _common_tenant(items: Sequence[OutboxItem]) -> str | None:
    tenants = {item.tenant_id for item in items}
    return tenants.pop() if len(tenants) == 1 else None
