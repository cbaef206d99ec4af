"""Endpoints of tenants: where their events are sent, as rows that are changed while everything runs.

In: what somebody decided about an endpoint, and how deliveries to it went. Out: its row; whether a delivery may begin
now; and one message when it is switched off. Every change is written together with its audit entry. All comparisons use
the database's clock. Elsewhere: checks of what users give, sealing of secrets (`bullpen.outbox.endpoints`), sending
(`bullpen.outbox.endpoint_channel`), storing a message for each endpoint (`enqueue`).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from bullpen._kernel import json
from bullpen._kernel.duration import is_text
from bullpen.errors import InvalidOption, RowNotFound, RowStateConflict, require
from bullpen.ledger import tables
from bullpen.ledger._sql import Sql
from bullpen.ledger.database import Database
from bullpen.ledger.driver import prepared
from bullpen.ledger.endpoint_records import (
    DISABLED_EVENT,
    EndpointAttempt,
    EndpointRate,
    EndpointRow,
    EndpointState,
    endpoint_type,
)
from bullpen.ledger.enqueue import Enqueuer
from bullpen.ledger.records import RESERVED_STREAM, encode_rows, one_line
from bullpen.ledger.tables import to_datetime

_table: Final = tables.endpoints
_NOTHING_FAILED: Final[Mapping[str, Any]] = {"failing_since": None, "failures": 0, "error_code": None}
BY_ITSELF: Final = "bullpen"
"""Who switched an endpoint off, when nobody did."""


class EndpointStore:
    """The endpoints of one ledger. `notice_type` is where it is said that one was switched off; None: nowhere."""

    def __init__(self, database: Database, enqueuer: Enqueuer, *, notice_type: str | None) -> None:
        self._database, self._enqueuer, self._notice_type = database, enqueuer, notice_type

    # ---- what users decide --------------------------------------------------------------------------------------

    async def add(self, values: Mapping[str, Any], *, by: str, most: int) -> tuple[EndpointRow, bool]:
        """Store a new one; False: its id is there already. Raises InvalidOption where the tenant has `most` already."""
        tenant_id = values["tenant_id"]
        async with self._database.transaction(tenant=tenant_id) as connection:
            known = await self._get(connection, tenant_id, values["id"])
            if known is not None:
                return known, False
            # Of several at the same moment with one id, one stores it; the others wait here, and get what it stored.
            insert: Any = (postgresql if self._database.is_postgres else sqlite).insert(_table)
            insert = insert.values(**values).on_conflict_do_nothing().returning(_table.c.id)
            is_new = (await self._run(connection, insert)).first() is not None
            if is_new:
                # Two at the same moment may make it one more: a bound against a flood, not a price list.
                query = sa.select(sa.func.count()).select_from(_table).where(_table.c.tenant_id == tenant_id)
                if ((await self._run(connection, query)).scalar() or 0) > most:
                    raise InvalidOption("tenant_id", f"a tenant with fewer than {most} endpoints", tenant_id)
                await self._audit(connection, by, "endpoint.create", values["id"], tenant_id, {})
            return await self._must_get(connection, tenant_id, values["id"]), is_new

    async def change(
        self,
        tenant_id: str,
        endpoint_id: str,
        values: Mapping[str, Any],
        *,
        action: str,
        by: str,
        detail: Mapping[str, Any],
        version: int | None = None,
    ) -> EndpointRow:
        """Change what was configured. `version`: only if nobody has changed it since that one was read. Another address
        begins without failures.

        Raises RowNotFound, RowStateConflict."""
        async with self._database.transaction(tenant=tenant_id) as connection:
            await self._audit(connection, by, action, endpoint_id, tenant_id, detail)
            if "url" in values:
                stays = _table.c.url == values["url"]
                forgot = {name: sa.case((stays, _table.c[name]), else_=none) for name, none in _NOTHING_FAILED.items()}
                values = {**values, **forgot}
            update = self._update(endpoint_id, values).where(_table.c.tenant_id == tenant_id)
            if version is not None:
                update = update.where(_table.c.version == version)
            changed = (await self._run(connection, update)).rowcount > 0
            row = await self._must_get(connection, tenant_id, endpoint_id)
            if not changed:
                raise RowStateConflict(_table.name, endpoint_id, f"at version {row.version}", f"at {version}")
            return row

    async def set_state(
        self, tenant_id: str, endpoint_id: str, state: EndpointState, *, by: str, reason: str
    ) -> EndpointRow:
        """Switch one on or off, by hand. Switching it on forgets what failed. Raises RowNotFound."""
        values: dict[str, Any] = {
            "state": state.value,
            "reason": one_line(reason) or None,
            "state_by": _actor(by),
            "state_at": self._now,
        }
        if state is EndpointState.ENABLED:
            values |= _NOTHING_FAILED
        row = await self.change(
            tenant_id, endpoint_id, values, action=f"endpoint.{state}", by=by, detail={"reason": one_line(reason)}
        )
        if state is EndpointState.ENABLED and self._database.is_postgres and self._enqueuer.notify:
            async with self._database.transaction(tenant=tenant_id) as connection:
                await connection.execute(prepared(self._sql.notify))  # what waited may go now
        return row

    async def remove(self, tenant_id: str, endpoint_id: str, *, by: str) -> None:
        """Forget one. What still waits for it dies as a message without a target. Raises RowNotFound."""
        async with self._database.transaction(tenant=tenant_id) as connection:
            await self._audit(connection, by, "endpoint.remove", endpoint_id, tenant_id, {})
            gone = _table.delete().where(_table.c.id == endpoint_id, _table.c.tenant_id == tenant_id)
            if not (await self._run(connection, gone)).rowcount:
                raise RowNotFound(_table.name, endpoint_id)

    # ---- reading ------------------------------------------------------------------------------------------------

    async def get(self, endpoint_id: str, *, tenant_id: str | None = None) -> EndpointRow | None:
        """One, of this tenant if one is named."""
        async with self._database.transaction(tenant=tenant_id) as connection:
            return await self._get(connection, tenant_id, endpoint_id)

    async def find(
        self,
        *,
        tenant_id: str | None = None,
        state: EndpointState | None = None,
        after: tuple[datetime, str] | None = None,
        limit: int = 100,
    ) -> list[EndpointRow]:
        """In the order in which they were made. `after` is when the last one of the page before was made, and its id: a
        place that stays when that one is removed."""
        query = self._select.order_by(_table.c.created_at, _table.c.id).limit(limit)
        if tenant_id is not None:
            query = query.where(_table.c.tenant_id == tenant_id)
        if state is not None:
            query = query.where(_table.c.state == state.value)
        if after is not None:
            place = sa.tuple_(sa.literal(after[0], tables.Instant()), sa.literal(after[1], _table.c.id.type))
            query = query.where(sa.tuple_(_table.c.created_at, _table.c.id) > place)
        async with self._database.transaction(tenant=tenant_id) as connection:
            return [_to_row(row) for row in (await self._run(connection, query)).all()]

    async def counts(self) -> dict[EndpointState, int]:
        """How many of all tenants are in each state."""
        query = sa.select(_table.c.state, sa.func.count()).group_by(_table.c.state)
        async with self._database.statement(reads=True) as connection:
            found = {EndpointState(state): count for state, count in (await self._run(connection, query)).all()}
        return {state: found.get(state, 0) for state in EndpointState}

    async def switched_off(self, *, within_ms: int) -> list[EndpointRow]:
        """Those that nobody switched off but bullpen itself, lately; the last one first."""
        query = (
            self._select.where(sa.text("state <> 'enabled'"), _table.c.state == EndpointState.DISABLED.value)
            .where(_table.c.state_by == BY_ITSELF)
            .where(_table.c.state_at > sa.literal_column(self._sql._earlier(str(int(within_ms)))))
            .order_by(_table.c.state_at.desc())
            .limit(100)
        )
        async with self._database.statement(reads=True) as connection:
            return [_to_row(row) for row in (await self._run(connection, query)).all()]

    async def attempts(
        self, endpoint_id: str, *, tenant_id: str | None = None, before: int | None = None, limit: int = 50
    ) -> list[EndpointAttempt]:
        """What was tried, the last one first, as long as its messages are kept."""
        tried, row = tables.attempts.c, tables.outbox.c
        query = (
            sa.select(
                *(tried.id, tried.outbox_id, row.event_type, row.source_event_id, tried.outcome, tried.error_code),
                *(tried.error, tried.started_at, tried.finished_at, tried.receipt),
            )
            .join_from(tables.attempts, tables.outbox, tried.outbox_id == row.id)
            .where(sa.text(tables.IS_ENDPOINT), row.integration_type == endpoint_type(endpoint_id))
            .order_by(tried.id.desc())
            .limit(limit)
        )
        if tenant_id is not None:
            query = query.where(row.tenant_id == tenant_id)
        if before is not None:
            query = query.where(tried.id < before)
        async with self._database.transaction(tenant=tenant_id) as connection:
            found = (await self._run(connection, query)).all()
        return [
            EndpointAttempt(
                number=each[0],
                outbox_id=str(each[1]),
                event_type=each[2],
                source_event_id=each[3],
                outcome=each[4],
                error_code=each[5],
                error=each[6],
                started_at=each[7],
                finished_at=each[8],
                receipt=each[9],
            )
            for each in found
        ]

    # ---- how deliveries go --------------------------------------------------------------------------------------

    async def note_success(self, row: EndpointRow) -> None:
        """It took a delivery: what failed before counts no more. At the address of `row`, if that is still its own."""
        async with self._database.transaction(tenant=row.tenant_id) as connection:
            await self._run(connection, self._at_address(row).values(**_NOTHING_FAILED))

    async def note_failure(
        self, row: EndpointRow, code: str, *, gone: bool, after_ms: int | None, least: int
    ) -> EndpointRow | None:
        """It did not take a delivery. The endpoint, if that switched it off: it is `gone`, or it has taken nothing for
        `after_ms` (None: that is no reason) and failed `least` times since. What another address than that of `row`
        answered, before it moved, says nothing about it.

        The state, the audit entry and the message that tells of it are one transaction."""
        since = sa.func.coalesce(_table.c.failing_since, self._now)
        async with self._database.transaction(tenant=row.tenant_id) as connection:
            counted = self._at_address(row).values(
                failing_since=since, failures=_table.c.failures + 1, error_code=one_line(code, 60)
            )
            if not (await self._run(connection, counted)).rowcount:
                return None
            condition: Any = sa.true()
            if not gone:
                if after_ms is None:
                    return None
                earlier: Any = sa.literal_column(self._sql._earlier(str(int(after_ms))))
                condition = sa.and_(_table.c.failing_since <= earlier, _table.c.failures >= least)
            days = "" if after_ms is None else f"no delivery was taken for {after_ms / 86_400_000:g} days"
            reason = f"it answered that it is gone ({code})" if gone else f"{days}, the last one: {code}"
            values = {
                "state": EndpointState.DISABLED.value,
                "reason": reason,
                "state_by": BY_ITSELF,
                "state_at": self._now,
            }
            # Of several deliveries that fail at once one switches it off, and tells of it.
            is_on = _table.c.state != EndpointState.DISABLED.value
            if not (await self._run(connection, self._update(row.id, values).where(condition, is_on))).rowcount:
                return None
            off = await self._must_get(connection, row.tenant_id, row.id)
            detail = {"reason": reason, "errorCode": code}
            await self._audit(connection, BY_ITSELF, "endpoint.disabled", row.id, row.tenant_id, detail)
            if self._notice_type is not None:
                await self._enqueuer.insert_records(connection, [_notice(off, self._notice_type)])
        return off

    async def take_slot(self, endpoint_id: str, *, tenant_id: str) -> int | None:
        """Begin a delivery to one with a rate. None: it may; else after how many milliseconds to ask again."""
        sql, values = self._sql, {"id": endpoint_id}
        async with self._database.transaction(tenant=tenant_id) as connection:
            if (await connection.execute(prepared(sql.take_endpoint_slot), values)).rowcount:
                return None
            left = (await connection.execute(prepared(sql.endpoint_slot_left), values)).scalar()
        return 1 if left is None else max(1, int(left) + 1)

    # ---- inside -------------------------------------------------------------------------------------------------

    @property
    def _sql(self) -> Sql:
        return Sql(self._database.dialect, self._database.schema, self._database.clock_offset_ms)

    @property
    def _now(self) -> sa.ColumnElement[datetime]:
        return sa.literal_column(self._database.now, type_=tables.Instant())

    @property
    def _select(self) -> sa.Select[Any]:
        return sa.select(*_table.columns, self._now.label("read_at"))

    def _update(self, endpoint_id: str, values: Mapping[str, Any]) -> sa.Update:
        changed = {**values, "version": _table.c.version + 1, "updated_at": self._now}
        return _table.update().where(_table.c.id == endpoint_id).values(**changed)

    def _at_address(self, row: EndpointRow) -> sa.Update:
        return _table.update().where(_table.c.id == row.id, _table.c.url == row.url)

    async def _get(self, connection: AsyncConnection, tenant_id: str | None, endpoint_id: str) -> EndpointRow | None:
        query = self._select.where(_table.c.id == endpoint_id)
        if tenant_id is not None:
            query = query.where(_table.c.tenant_id == tenant_id)
        row = (await self._run(connection, query)).first()
        return None if row is None else _to_row(row)

    async def _must_get(self, connection: AsyncConnection, tenant_id: str, endpoint_id: str) -> EndpointRow:
        row = await self._get(connection, tenant_id, endpoint_id)
        if row is None:
            raise RowNotFound(_table.name, endpoint_id)
        return row

    async def _audit(
        self,
        connection: AsyncConnection,
        by: str,
        action: str,
        endpoint_id: str,
        tenant_id: str,
        detail: Mapping[str, Any],
    ) -> None:
        entry = {
            "actor": _actor(by),
            "action": action,
            "subject": endpoint_type(endpoint_id),
            "tenant_id": tenant_id,
            "detail": msgspec.json.encode(detail).decode(),
        }
        await connection.execute(prepared(self._sql.audit_entries), {"rows": encode_rows([entry])})

    async def _run(self, connection: AsyncConnection, statement: Any) -> Any:
        return await connection.execute(
            statement, execution_options={"schema_translate_map": self._database.translate_map}
        )


def _to_row(row: Any) -> EndpointRow:
    found = dict(row._mapping)
    rate_max, rate_ms = found.pop("rate_max"), found.pop("rate_ms")
    for name in ("spent", "spent_since"):
        del found[name]
    found["rate"] = None if rate_max is None else EndpointRate(rate_max, rate_ms)
    found["events"] = tuple(json.decode(found["events"]))
    found["state"] = EndpointState(found["state"])
    found["read_at"] = to_datetime(found["read_at"])
    return EndpointRow(**found)


def _actor(by: str) -> str:
    require("by", is_text(by), "who does it, a text", by)
    return one_line(by, 120)


def _notice(row: EndpointRow, integration_type: str) -> dict[str, Any]:
    """That it was switched off, for whoever listens: ids and the reason. The address may hold a password of the
    tenant's, so it is not told."""
    event_id = f"{row.id}/{row.version}"
    payload = {
        "endpointId": row.id,
        "description": row.description,
        "reason": row.reason,
        "errorCode": row.error_code,
        "failures": row.failures,
        "failingSince": None if row.failing_since is None else row.failing_since.isoformat(),
    }
    return {
        "source_stream_id": RESERVED_STREAM,
        "source_event_id": event_id,
        "route_key": integration_type,
        "integration_type": integration_type,
        "event_type": DISABLED_EVENT,
        "payload": msgspec.json.encode(payload).decode(),
        "headers": msgspec.json.encode({"idempotencyKey": event_id}).decode(),
        "tenant_id": row.tenant_id,
        "user_id": None,
        "correlation_id": None,
        "ordering_key": None,
        "backoff": None,
        "due_ms": None,
        "delay_ms": 0,
        "max_attempts": 10,
    }
