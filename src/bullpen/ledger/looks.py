"""What people look up in the ledger beside single rows: everything about one correlation id, and how deliveries went.

In: a correlation id; how many attempts. Out: records, read in a fixed number of statements and bounded in number.
Elsewhere: rows by filter (`outbox`), how it is shown (`bullpen.dashboard`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from bullpen._kernel.duration import check_int
from bullpen.ledger import tables
from bullpen.ledger.database import Database
from bullpen.ledger.parts import Part

__all__ = ["Chain", "ChainAttempt", "ChainEvent", "ChainMove", "ChainRow", "Looks", "RecentAttempt"]


@dataclass(frozen=True, slots=True)
class ChainRow:
    """A row of the outbox, as far as a chain tells of it."""

    id: str
    source_stream_id: str
    source_event_id: str
    integration_type: str
    event_type: str
    tenant_id: str | None
    created_at: datetime
    due_at: datetime
    status: str
    attempts: int
    max_attempts: int


@dataclass(frozen=True, slots=True)
class ChainAttempt:
    """One attempt to deliver such a row."""

    outbox_id: str
    number: int
    worker: str | None
    outcome: str
    error_code: str | None
    error: str | None
    started_at: datetime | None
    finished_at: datetime
    receipt: str | None


@dataclass(frozen=True, slots=True)
class ChainMove:
    """One transition of an entity of a workflow."""

    workflow: str
    urn: str
    version: int
    event: str
    source: str
    target: str
    kind: str
    job_id: str | None
    attempt: int | None
    user_id: str | None
    tenant_id: str
    reason: str | None
    at: datetime


@dataclass(frozen=True, slots=True)
class ChainEvent:
    """An event of the ledger's own event store that led to a row."""

    stream_id: str
    version: int
    event_id: str
    event_type: str
    tenant_id: str | None
    recorded_at: datetime


@dataclass(frozen=True, slots=True)
class Chain:
    """All that carries one correlation id, each kind in its order."""

    events: tuple[ChainEvent, ...]
    rows: tuple[ChainRow, ...]
    attempts: tuple[ChainAttempt, ...]
    moves: tuple[ChainMove, ...]
    is_cut: bool
    """There is more than was asked for."""


@dataclass(frozen=True, slots=True)
class RecentAttempt:
    """How one delivery went."""

    integration_type: str
    outcome: str
    started_at: datetime | None
    finished_at: datetime
    error_code: str | None


class Looks:
    """Lookups in one ledger."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def chain(
        self, correlation_id: str, *, parts: frozenset[Part], tenant_id: str | None = None, limit: int = 200
    ) -> Chain:
        """Everything of one correlation id, of a tenant or of all. `parts` are those whose tables are there."""
        check_int("limit", limit, minimum=1)
        outbox, moves = tables.outbox, tables.workflow_history
        async with self._database.transaction(tenant=tenant_id) as connection:
            query = _select(outbox, ChainRow).where(outbox.c.correlation_id == correlation_id).order_by(outbox.c.seq)
            if tenant_id is not None:
                query = query.where(outbox.c.tenant_id == tenant_id)
            rows = await self._read(connection, query.limit(limit + 1), ChainRow)
            tried: list[Any] = []
            events: list[Any] = []
            passed: list[Any] = []
            if rows:
                attempts = tables.attempts
                ids = attempts.c.outbox_id.in_([row.id for row in rows])
                newest = _select(attempts, ChainAttempt).where(ids).order_by(attempts.c.id.desc()).limit(limit + 1)
                tried = (await self._read(connection, newest, ChainAttempt))[::-1]
            if rows and "projector" in parts:
                known = tables.events
                ids = known.c.event_id.in_([row.source_event_id for row in rows])
                found = _select(known, ChainEvent).where(ids).order_by(known.c.id).limit(limit + 1)
                events = await self._read(connection, found, ChainEvent)
            if "workflows" in parts:
                past = _select(moves, ChainMove).where(moves.c.correlation_id == correlation_id)
                if tenant_id is not None:
                    past = past.where(moves.c.tenant_id == tenant_id)
                passed = await self._read(connection, past.order_by(moves.c.id).limit(limit + 1), ChainMove)
        is_cut = any(len(each) > limit for each in (rows, tried, events, passed))
        return Chain(tuple(events[:limit]), tuple(rows[:limit]), tuple(tried[:limit]), tuple(passed[:limit]), is_cut)

    async def recent_attempts(self, *, limit: int = 2_000) -> list[RecentAttempt]:
        """The newest attempts of all destinations, the newest first: their number says nothing about the ledger's."""
        check_int("limit", limit, minimum=1)
        tried, outbox = tables.attempts, tables.outbox
        newest = sa.select(tried).order_by(tried.c.id.desc()).limit(limit).subquery()
        query = (
            sa.select(
                outbox.c.integration_type,
                newest.c.outcome,
                newest.c.started_at,
                newest.c.finished_at,
                newest.c.error_code,
            )
            .join(outbox, outbox.c.id == newest.c.outbox_id)
            .order_by(newest.c.id.desc())
        )
        async with self._database.statement(reads=True) as connection:
            return await self._read(connection, query, RecentAttempt)

    async def count_rows(
        self,
        *,
        status: str,
        integration_type: str | None = None,
        error_code: str | None = None,
        tenant_id: str | None = None,
        since: datetime | None = None,
        before: datetime | None = None,
        most: int = 100_000,
    ) -> int:
        """How many rows of the outbox fit; `most` and one more when there are more."""
        check_int("most", most, minimum=1)
        columns = tables.outbox.c
        query = sa.select(columns.id).where(columns.status == status)
        for wanted in (
            None if integration_type is None else columns.integration_type == integration_type,
            None if error_code is None else columns.error_code == error_code,
            None if tenant_id is None else columns.tenant_id == tenant_id,
            None if since is None else columns.created_at >= since,
            None if before is None else columns.created_at < before,
        ):
            if wanted is not None:
                query = query.where(wanted)
        counted = sa.select(sa.func.count()).select_from(query.limit(most + 1).subquery())
        options = {"schema_translate_map": self._database.translate_map}
        async with self._database.transaction(tenant=tenant_id) as connection:
            return int((await connection.execute(counted, execution_options=options)).scalar_one())

    async def _read(self, connection: AsyncConnection, query: sa.Select[Any], record: Any) -> list[Any]:
        options = {"schema_translate_map": self._database.translate_map}
        rows: Sequence[Any] = (await connection.execute(query, execution_options=options)).all()
        return [record(*row) for row in rows]


def _select(table: sa.Table, record: Any) -> sa.Select[Any]:
    return sa.select(*(table.c[name] for name in record.__slots__))
