"""Events that a projector could not turn into messages, kept where somebody sees them.

In: an event and why it failed. Out: the same event, until it is retried with better code or skipped. Who decided is
written to the audit table. Elsewhere: when an event is parked, and who tries it again (`bullpen.outbox.projector`).
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from bullpen.ledger import tables
from bullpen.ledger._sql import Sql
from bullpen.ledger.database import Database
from bullpen.ledger.records import encode_rows, one_line
from bullpen.ports.source import SourceEvent

_table = tables.parked_events


@dataclass(frozen=True, slots=True)
class ParkedEvent:
    """One event that waits for somebody."""

    id: int
    projector: str
    route: str | None
    """The one route on which it failed; None: the event as a whole, with whatever routes it has."""
    event: SourceEvent
    error: str
    tries: int
    """How often it was tried in all."""
    retry_wanted: bool
    """Somebody asked for another try; the projector that runs next makes it."""
    parked_at: datetime


class ParkedEvents:
    """The parked events of one ledger."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def park(
        self,
        connection: AsyncConnection,
        projector: str,
        event: SourceEvent,
        error: str,
        *,
        tries: int,
        route: str | None = None,
    ) -> None:
        """Keep an event inside a transaction of ours. One that is there already keeps its id."""
        values = {
            "projector": projector,
            "route": route or "",
            "position": event.position,
            "stream_id": _storable(event.stream),
            "event_id": _storable(event.id),
            "event_type": _storable(event.type),
            "version": event.version,
            "data": base64.b64encode(event.data_bytes).decode(),
            "metadata": base64.b64encode(event.metadata_bytes).decode(),
            "recorded_at": event.recorded_at,
            "error": one_line(error),
            "tries": tries,
        }
        insert = _insert(self._database)(_table).values(**values)
        again = {
            "error": insert.excluded.error,
            "tries": _table.c.tries + insert.excluded.tries,
            "retry_wanted": sa.false(),
        }
        fence = [_table.c.projector, _table.c.route, _table.c.position]
        statement = insert.on_conflict_do_update(index_elements=fence, set_=again)
        await self._run(connection, statement)

    async def find(
        self,
        *,
        projector: str | None = None,
        ids: Collection[int] | None = None,
        retry_wanted: bool | None = None,
        limit: int = 100,
    ) -> list[ParkedEvent]:
        """Oldest first."""
        query = sa.select(_table).order_by(_table.c.id).limit(limit)
        if projector is not None:
            query = query.where(_table.c.projector == projector)
        if ids is not None:
            query = query.where(_table.c.id.in_(ids))
        if retry_wanted is not None:
            query = query.where(_table.c.retry_wanted.is_(retry_wanted))
        async with self._database.transaction_without_tenant() as connection:
            return [_parked(row) for row in (await self._run(connection, query)).all()]

    async def count(self, projector: str | None = None) -> int:
        """How many wait."""
        query = sa.select(sa.func.count()).select_from(_table)
        if projector is not None:
            query = query.where(_table.c.projector == projector)
        async with self._database.transaction_without_tenant() as connection:
            found: int = (await self._run(connection, query)).scalar_one()
        return found

    async def retry(self, ids: Collection[int], *, by: str) -> list[int]:
        """Ask for another try; audited. Returns the ids that were there."""
        statement = _table.update().where(_table.c.id.in_(ids)).values(retry_wanted=sa.true()).returning(_table.c.id)
        return await self._decide(statement, "projector.retry", by)

    async def skip(self, ids: Collection[int], *, by: str) -> list[int]:
        """Pass over them for good; audited. Returns the ids that were there."""
        statement = _table.delete().where(_table.c.id.in_(ids)).returning(_table.c.id)
        return await self._decide(statement, "projector.skip", by)

    async def remove(self, connection: AsyncConnection, parked_id: int) -> bool:
        """It was stored after all: forget it in the same transaction. False: somebody else was faster."""
        statement = _table.delete().where(_table.c.id == parked_id).returning(_table.c.id)
        return (await self._run(connection, statement)).first() is not None

    async def _decide(self, statement: Any, action: str, by: str) -> list[int]:
        async with self._database.transaction_without_tenant() as connection:
            done = sorted((await self._run(connection, statement)).scalars())
            await self._audit(connection, action, by, done)
        return done

    async def _audit(self, connection: AsyncConnection, action: str, by: str, ids: Sequence[int]) -> None:
        if ids:
            entries = [
                {"actor": by, "action": action, "subject": f"parked-event/{each}", "tenant_id": None, "detail": None}
                for each in ids
            ]
            sql = Sql(self._database.dialect, self._database.schema)
            await connection.execute(sa.text(sql.audit_entries), {"rows": encode_rows(entries)})

    async def _run(self, connection: AsyncConnection, statement: Any) -> Any:
        return await connection.execute(
            statement, execution_options={"schema_translate_map": self._database.translate_map}
        )


def _insert(database: Database) -> Any:
    from sqlalchemy.dialects import postgresql, sqlite

    return postgresql.insert if database.is_postgres else sqlite.insert


def _storable(text: str) -> str:
    """PostgreSQL's text has no NUL, and UTF-8 no lone surrogates."""
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode()


def _parked(row: Any) -> ParkedEvent:
    event = SourceEvent(
        id=row.event_id,
        stream=row.stream_id,
        type=row.event_type,
        version=row.version,
        position=row.position,
        recorded_at=row.recorded_at,
        data_bytes=base64.b64decode(row.data),
        metadata_bytes=base64.b64decode(row.metadata),
    )
    return ParkedEvent(
        row.id, row.projector, row.route or None, event, row.error, row.tries, bool(row.retry_wanted), row.parked_at
    )
