"""Runs in SQL: one row per run, its steps, and what it cost. The row is the truth; a job only says which row.

Every write names the status it expects and, inside an attempt, the fence it began with: a run that was cancelled
meanwhile stays cancelled, and an owner that lost its job writes nothing. Every statement names the tenant too, although
row-level security would filter: defence in depth, and the only one that SQLite has. What a change costs or gives back
is part of it, so nobody can do one without the other. The changes here are those of SQLite; PostgreSQL has functions.
In: a connection with an open transaction. Out: records. Elsewhere: opening that transaction (`transactions`), deciding
what to write (`bullpen.runs`), the changes on PostgreSQL (`_run_functions`).
"""

from __future__ import annotations

import re
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, fields
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from bullpen._kernel import json
from bullpen.errors import InsufficientCredits, InvalidOption, RowNotFound
from bullpen.ledger import tables
from bullpen.ledger._sql import Sql
from bullpen.ledger.database import Database
from bullpen.ledger.enqueue import Enqueuer
from bullpen.ledger.records import Enqueued, OutboxItem, encode_rows

__all__ = [
    "AllRuns",
    "NewRun",
    "RunRow",
    "RunStatus",
    "StepRow",
    "TenantRuns",
    "check_run_id",
    "read_ledger_id",
    "to_row",
    "used_before",
]

_runs, _steps = tables.runs, tables.run_steps
_accounts, _entries = tables.credit_accounts, tables.credit_entries

# Any UUID, of whatever version: a version-strict check would refuse ids that other systems make.
_is_run_id = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", re.IGNORECASE).fullmatch


class RunStatus(StrEnum):
    """Where a run is. FAILED is final until somebody redrives it; COMPLETED and CANCELLED are final for ever."""

    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def is_terminal(self) -> bool:
        return self in (RunStatus.COMPLETED, RunStatus.FAILED, RunStatus.CANCELLED)


def check_run_id(run_id: object) -> str:
    """The id in lower case if it is a UUID. Raises InvalidOption."""
    if not isinstance(run_id, str) or _is_run_id(run_id) is None:
        raise InvalidOption("run_id", "a UUID such as 4fd7f5b4-9b4e-4c39-8f3c-3d2b1c0a9e77", run_id)
    return run_id.lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRun:
    """What is stored of a run when it is submitted; it never changes."""

    id: str
    version_id: str
    payload_json: str
    payload_in_job: bool = True
    is_test_run: bool = False
    cost: int = 0
    handler: str | None = None
    """None: the one without a name."""
    queue: str | None = None
    job_options_json: str | None = None


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run as it was read."""

    id: str
    tenant_id: str
    version_id: str
    payload_in_job: bool
    is_test_run: bool
    cost: int
    created_at: datetime
    status: RunStatus
    attempts: int
    redrives: int
    fence: int
    job_timestamp: int
    job_fence: int
    needs_job: bool
    started_at: datetime | None
    heartbeat_at: datetime | None
    completed_at: datetime | None
    duration_ms: int | None
    progress: Any
    result: Any
    error_message: str | None
    retry_history: list[dict[str, Any]]
    updated_at: datetime
    handler: str | None
    """Which handler runs it; None: the one without a name."""
    queue: str | None
    """Where its job is; None: the queue of the handler without a name."""
    job_options: dict[str, Any] | None
    """Options of its job, as `options_to_json` made them; None: those of the handler without a name."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """A step that is done."""

    name: str
    fence: int
    finished_at: datetime
    price: int
    """What of the run's cost is spent with it, whatever becomes of the run."""


JSON_COLUMNS: Final = frozenset({"progress", "result", "retry_history", "job_options"})


def _as_json(text: str) -> Any:
    """Text of ours for a JSON column: the driver must not encode it once more."""
    return sa.cast(sa.literal(text, sa.Text), tables.Json)


def _as_text(column: Any) -> Any:
    """A JSON column as text, for our own reader."""
    return sa.cast(column, sa.Text).label(column.name)


COLUMNS: Final = tuple(
    _as_text(_runs.c[field.name]) if field.name in JSON_COLUMNS else _runs.c[field.name] for field in fields(RunRow)
)
ACTOR: Final = "bullpen.runs"
"""Who acts when nobody is named."""
_IS_OPEN: Final = "status IN ('QUEUED', 'RUNNING')"  # as text: PostgreSQL proves a partial index by literals only
_TERMINAL: Final = tuple(status.value for status in RunStatus if status.is_terminal)


def used_before(run_id: str) -> InvalidOption:
    """A run of this id was paid and deleted: it would begin again for what that one paid."""
    return InvalidOption("run_id", "an id that was never used", run_id)


class TenantRuns:
    """The runs and credits of one tenant, inside one transaction. Made by `TransactionManager.run`."""

    def __init__(self, connection: AsyncConnection, database: Database, enqueuer: Enqueuer, tenant_id: str) -> None:
        self._connection, self._database, self._enqueuer = connection, database, enqueuer
        self.tenant_id = tenant_id

    # ---- storing and reading --------------------------------------------------------------------------------------

    async def add(self, run: NewRun, *, actor: str | None = None) -> RunRow | None:
        """Store a run as QUEUED and reserve what it costs; audited with an actor. None when the id is known, to this
        tenant or to another. Raises InsufficientCredits."""
        values = {
            "id": run.id,
            "tenant_id": self.tenant_id,
            "version_id": run.version_id,
            "payload": _as_json(run.payload_json),
            "payload_in_job": run.payload_in_job,
            "is_test_run": run.is_test_run,
            "cost": run.cost,
            "handler": run.handler,
            "queue": run.queue,
            "job_options": sa.null() if run.job_options_json is None else _as_json(run.job_options_json),
        }
        # No target named: the only constraint that can be hit is the key.
        insert = self._insert(_runs).values(**values).on_conflict_do_nothing().returning(*COLUMNS)
        found = (await self._execute(insert)).first()
        if found is None:
            return None
        row = to_row(found)
        await self._reserve(row)
        if actor is not None:
            await self.audit(actor, "run.submit", run.id)
        return row

    async def enqueue(self, item: OutboxItem) -> Enqueued:
        """Store a message or a job in this transaction."""
        return await self._enqueuer.enqueue(self._connection, item)

    async def get(self, run_id: str, *, lock: bool = False) -> RunRow | None:
        """One run of this tenant; with `lock` nobody else changes it until this transaction ends."""
        query = sa.select(*COLUMNS).where(self._is(run_id))
        row = (await self._execute(query.with_for_update() if lock else query)).first()
        return None if row is None else to_row(row)

    async def payload(self, run_id: str) -> Any:
        """What the run was submitted with."""
        text = (await self._execute(sa.select(_as_text(_runs.c.payload)).where(self._is(run_id)))).scalar_one_or_none()
        if text is None:
            raise RowNotFound(_runs.name, run_id)
        return json.decode(text)

    async def find(
        self,
        *,
        status: RunStatus | None = None,
        handler: str | None = None,
        before: tuple[datetime, str] | None = None,
        limit: int = 50,
    ) -> list[RunRow]:
        """Newest first; `before` is creation time and id of the last run of the page before."""
        query = sa.select(*COLUMNS).where(_runs.c.tenant_id == self.tenant_id)
        if status is not None:
            query = query.where(_runs.c.status == status.value)
        if handler is not None:
            query = query.where(_runs.c.handler == handler)
        if before is not None:
            query = query.where(_is_older(before))
        found = await self._execute(query.order_by(_runs.c.created_at.desc(), _runs.c.id.desc()).limit(limit))
        return [to_row(row) for row in found]

    # ---- the life of a run ----------------------------------------------------------------------------------------

    async def start(self, run_id: str, *, job_timestamp: int, job_fence: int) -> RunRow | None:
        """RUNNING, with a fence of its own. None unless it was QUEUED or RUNNING, and not begun by a later take."""
        is_newer = sa.or_(_runs.c.job_timestamp != job_timestamp, _runs.c.job_fence < job_fence)
        return await self._change(
            run_id,
            sa.and_(_runs.c.status.not_in(_TERMINAL), is_newer),
            status=RunStatus.RUNNING.value,
            fence=_runs.c.fence + 1,
            job_timestamp=job_timestamp,
            job_fence=job_fence,
            needs_job=False,
            started_at=self._now,
            heartbeat_at=self._now,
            completed_at=None,
            duration_ms=None,
        )

    async def complete(self, run_id: str, fence: int, result_json: str) -> RunRow | None:
        """COMPLETED, if this attempt still owns the run: what was reserved is spent."""
        row = await self._change(
            run_id,
            self._is_owned(fence),
            status=RunStatus.COMPLETED.value,
            result=_as_json(result_json),
            error_message=None,
            completed_at=self._now,
            duration_ms=self._duration,
        )
        if row is not None and row.cost:
            await self._book("settle", 0, run_id=row.id, round=row.redrives)
        return row

    async def note_failure(
        self, run_id: str, fence: int, *, history_json: str, attempts: int, will_retry: bool
    ) -> RunRow | None:
        """Write down a failed attempt; back to QUEUED if there will be another. Only for the owner."""
        return await self._change(
            run_id,
            self._is_owned(fence),
            status=(RunStatus.QUEUED if will_retry else RunStatus.RUNNING).value,
            attempts=attempts,
            retry_history=_as_json(history_json),
        )

    async def release(self, run_id: str, fence: int) -> RunRow | None:
        """Back to QUEUED without an attempt counted. Only for the owner."""
        return await self._change(run_id, self._is_owned(fence), status=RunStatus.QUEUED.value)

    async def fail(self, run_id: str, *, error_message: str, job_timestamp: int, job_fence: int) -> RunRow | None:
        """FAILED by this take of its job, unless it has ended already or a later take has it; what no step has spent
        goes back."""
        is_old_news = sa.and_(
            _runs.c.job_timestamp == job_timestamp,
            sa.or_(_runs.c.job_fence > job_fence, sa.and_(_runs.c.job_fence == job_fence, _runs.c.needs_job)),
        )
        row = await self._change(
            run_id,
            sa.and_(_runs.c.status.not_in(_TERMINAL), sa.not_(is_old_news)),
            status=RunStatus.FAILED.value,
            error_message=error_message,
            job_timestamp=job_timestamp,
            job_fence=job_fence,
            needs_job=False,
            completed_at=self._now,
            duration_ms=self._duration,
        )
        if row is not None:
            await self._give_back(row)
        return row

    async def cancel(self, run_id: str, *, actor: str = ACTOR) -> RunRow | None:
        """CANCELLED, unless it has ended already; what no step has spent goes back. Audited."""
        row = await self._change(
            run_id,
            _runs.c.status.not_in(_TERMINAL),
            status=RunStatus.CANCELLED.value,
            needs_job=False,
            completed_at=self._now,
            duration_ms=self._duration,
        )
        if row is not None:
            await self._give_back(row)
            await self.audit(actor, "run.cancel", run_id)
        return row

    async def requeue(self, run_id: str, *, actor: str = ACTOR) -> RunRow | None:
        """A FAILED run is QUEUED once more, in need of a job; what it has not spent is reserved again. Its steps stay
        done. Audited. Raises InsufficientCredits."""
        row = await self._change(
            run_id,
            _runs.c.status == RunStatus.FAILED.value,
            status=RunStatus.QUEUED.value,
            redrives=_runs.c.redrives + 1,
            attempts=0,
            needs_job=True,
            error_message=None,
            started_at=None,
            completed_at=None,
            duration_ms=None,
        )
        if row is not None:
            await self._reserve(row)
            await self.audit(actor, "run.redrive", run_id, round=row.redrives)
        return row

    async def expect_new_job(self, run_id: str, fence: int, *, is_lost: bool = False) -> RunRow | None:
        """QUEUED, and about to get a new job: what is known of the one before counts no more. None when the run has
        ended, or somebody has begun it since its fence was read. `is_lost`: it may be RUNNING, and its job is gone;
        on PostgreSQL with roles this needs the service role."""
        is_open = _runs.c.status.not_in(_TERMINAL) if is_lost else _runs.c.status == RunStatus.QUEUED.value
        return await self._change(
            run_id,
            sa.and_(is_open, _runs.c.fence == fence),
            status=RunStatus.QUEUED.value,
            job_timestamp=0,
            job_fence=0,
            needs_job=True,
        )

    async def beat(self, run_id: str, fence: int, *, progress_json: str | None = None) -> bool:
        """Sign of life, perhaps with progress. False when this attempt no longer owns the run."""
        values: dict[str, Any] = {"heartbeat_at": self._now}
        if progress_json is not None:
            values["progress"] = _as_json(progress_json)
        return await self._change(run_id, self._is_owned(fence), **values) is not None

    # ---- steps ----------------------------------------------------------------------------------------------------

    async def steps(self, run_id: str) -> list[StepRow]:
        """What is done, in the order in which it was."""
        query = (
            sa.select(_steps.c.name, _steps.c.fence, _steps.c.finished_at, _steps.c.price)
            .where(_steps.c.run_id == run_id, _steps.c.tenant_id == self.tenant_id)
            .order_by(_steps.c.finished_at, _steps.c.name)
        )
        return [StepRow(row.name, row.fence, row.finished_at, row.price) for row in await self._execute(query)]

    async def step_result(self, run_id: str, name: str) -> tuple[bool, Any]:
        """(is it done?, its result)."""
        query = sa.select(_as_text(_steps.c.result)).where(
            _steps.c.run_id == run_id, _steps.c.name == name, _steps.c.tenant_id == self.tenant_id
        )
        text = (await self._execute(query)).scalar_one_or_none()
        return (False, None) if text is None else (True, json.decode(text))

    async def save_step(self, run_id: str, name: str, fence: int, result_json: str, *, price: int = 0) -> bool:
        """Keep the result of a step, and that `price` of the run's cost is spent with it. False when this attempt no
        longer owns the run: then nothing is kept."""
        run = await self.get(run_id, lock=True)
        if run is None or run.status is not RunStatus.RUNNING or run.fence != fence:
            return False
        values = {"run_id": run_id, "name": name, "tenant_id": self.tenant_id, "fence": fence, "price": price}
        insert = self._insert(_steps).values(**values, result=_as_json(result_json), finished_at=self._now)
        await self._execute(insert.on_conflict_do_nothing())
        return True

    # ---- credits --------------------------------------------------------------------------------------------------

    async def balance(self) -> int:
        """What the tenant may still spend."""
        query = sa.select(_accounts.c.balance).where(_accounts.c.tenant_id == self.tenant_id)
        return int((await self._execute(query)).scalar_one_or_none() or 0)

    async def grant(self, amount: int, *, reference: str, actor: str = ACTOR) -> bool:
        """Add to the account, once per reference; audited. False when this grant was made before."""
        insert = self._insert(_accounts).values(tenant_id=self.tenant_id, balance=0)
        await self._execute(insert.on_conflict_do_nothing())
        if not await self._book("grant", amount, reference=reference):
            return False
        await self._move(amount)
        await self.audit(actor, "credits.grant", reference, amount=amount)
        return True

    async def _reserve(self, run: RunRow) -> None:
        """Take what the run costs, less what it has spent in earlier rounds, before it begins."""
        if run.cost == 0:
            return
        amount = 0 if run.is_test_run else run.cost - await self._taken(run)
        if amount and not await self._move(-amount):
            raise InsufficientCredits(self.tenant_id, needed=amount, balance=await self.balance())
        if not await self._book("reserve", -amount, run_id=run.id, round=run.redrives):
            raise used_before(run.id)

    async def _give_back(self, run: RunRow) -> None:
        """The run came to nothing: what was reserved goes back, less the prices of its steps. Once per round."""
        if run.cost == 0:
            return
        rest = 0
        if not run.is_test_run:
            query = sa.select(sa.func.coalesce(sa.func.sum(_steps.c.price), 0)).where(
                _steps.c.run_id == run.id, _steps.c.tenant_id == self.tenant_id
            )
            spent = min(run.cost, int((await self._execute(query)).scalar_one()))
            rest = max(0, await self._taken(run) - spent)
        if await self._book("refund", rest, run_id=run.id, round=run.redrives) and rest:
            await self._move(rest)

    async def _taken(self, run: RunRow) -> int:
        """What the run has taken from its tenant so far, all rounds together."""
        query = sa.select(sa.func.coalesce(sa.func.sum(_entries.c.amount), 0)).where(
            _entries.c.run_id == run.id, _entries.c.tenant_id == self.tenant_id
        )
        return -int((await self._execute(query)).scalar_one())

    async def _book(self, kind: str, amount: int, **values: Any) -> bool:
        insert = self._insert(_entries).values(
            tenant_id=self.tenant_id, kind=kind, amount=amount, at=self._now, **values
        )
        return (await self._execute(insert.on_conflict_do_nothing().returning(_entries.c.id))).first() is not None

    async def _move(self, amount: int) -> bool:
        update = (
            sa.update(_accounts)
            .where(_accounts.c.tenant_id == self.tenant_id, _accounts.c.balance + amount >= 0)
            .values(balance=_accounts.c.balance + amount, updated_at=self._now)
            .returning(_accounts.c.balance)
        )
        return (await self._execute(update)).first() is not None

    # ---- audit ----------------------------------------------------------------------------------------------------

    async def audit(self, actor: str, action: str, subject: str, **detail: Any) -> None:
        """Write down who did what; nobody may change it afterwards."""
        entry = {
            "actor": actor[:120],
            "action": action,
            "subject": subject,
            "tenant_id": self.tenant_id,
            "detail": json.encode(detail).decode() if detail else None,
        }
        statement = Sql(self._database.dialect, self._database.schema, self._database.clock_offset_ms).audit_entries
        await self._connection.execute(sa.text(statement), {"rows": encode_rows([entry])})

    async def ledger_id(self) -> str:
        """Which ledger this is: the same in every process that uses it, and another for every other one."""
        return self._database.ledger_id or await read_ledger_id(self._connection, self._database)

    async def instant(self) -> str:
        """The database's now, as text."""
        value = (await self._connection.execute(sa.text(f"SELECT {self._database.now}"))).scalar_one()
        instant = tables.to_datetime(value)
        assert instant is not None
        return instant.isoformat(timespec="milliseconds").replace("+00:00", "Z")

    @property
    def connection(self) -> AsyncConnection:
        """For statements of your own in the same transaction."""
        return self._connection

    # ---- inside ---------------------------------------------------------------------------------------------------

    @property
    def _now(self) -> Any:
        return sa.text(self._database.now)

    @property
    def _duration(self) -> Any:
        now, postgres = self._database.now, self._database.is_postgres
        passed = f"EXTRACT(EPOCH FROM ({now} - started_at)) * 1000" if postgres else f"{now} - started_at"
        # A clock that was set back must not make it negative.
        bounded = f"{'greatest' if postgres else 'max'}({passed}, 0)"
        return sa.text(f"CASE WHEN started_at IS NULL THEN NULL ELSE CAST({bounded} AS bigint) END")

    def _is(self, run_id: str) -> sa.ColumnElement[bool]:
        return sa.and_(_runs.c.id == run_id, _runs.c.tenant_id == self.tenant_id)

    def _is_owned(self, fence: int) -> sa.ColumnElement[bool]:
        return sa.and_(_runs.c.status == RunStatus.RUNNING.value, _runs.c.fence == fence)

    async def _change(self, run_id: str, condition: sa.ColumnElement[bool], **values: Any) -> RunRow | None:
        update = sa.update(_runs).where(self._is(run_id), condition).values(**values).returning(*COLUMNS)
        row = (await self._execute(update)).first()
        return None if row is None else to_row(row)

    def _insert(self, table: sa.Table) -> Any:
        # The two dialects write ON CONFLICT the same way, but as classes of their own.
        return postgresql.insert(table) if self._database.is_postgres else sqlite.insert(table)

    async def _execute(self, statement: Any) -> sa.CursorResult[Any]:
        options = {"schema_translate_map": self._database.translate_map}
        result: sa.CursorResult[Any] = await self._connection.execute(statement, execution_options=options)
        return result


class AllRuns:
    """Runs of all tenants, for those who look after them: on PostgreSQL with row-level security the service role."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def idle(self, *, longer_than_ms: int, limit: int, after: str | None = None) -> list[RunRow]:
        """Runs that have not ended and that nobody has touched for so long, by id from `after` on."""
        now = self._database.now
        limit_at = (
            f"{now} - {longer_than_ms:d} * interval '1 millisecond'"
            if self._database.is_postgres
            else f"{now} - {longer_than_ms:d}"
        )
        query = sa.select(*COLUMNS).where(sa.text(_IS_OPEN), _runs.c.updated_at < sa.text(limit_at))
        if after is not None:
            query = query.where(_runs.c.id > after)
        return await self._rows(query.order_by(_runs.c.id).limit(limit))

    async def find(
        self,
        *,
        status: RunStatus | None = None,
        handler: str | None = None,
        tenant_id: str | None = None,
        after_id: str | None = None,
        limit: int = 50,
    ) -> list[RunRow]:
        """Newest first; `after_id` continues behind a run."""
        query = sa.select(*COLUMNS)
        if after_id is not None:
            last = await self.get(after_id)
            if last is None:
                return []
            query = query.where(_is_older((last.created_at, last.id)))
        if handler is not None:
            query = query.where(_runs.c.handler == handler)
        if status is not None:
            query = query.where(_runs.c.status == status.value)
        if tenant_id is not None:
            query = query.where(_runs.c.tenant_id == tenant_id)
        return await self._rows(query.order_by(_runs.c.created_at.desc(), _runs.c.id.desc()).limit(limit))

    async def get(self, run_id: str) -> RunRow | None:
        found = await self._rows(sa.select(*COLUMNS).where(_runs.c.id == run_id))
        return found[0] if found else None

    async def counts(self) -> dict[RunStatus, int]:
        """How many runs have each status."""
        query = sa.select(_runs.c.status, sa.func.count()).group_by(_runs.c.status)
        async with self._alone() as connection:
            options = {"schema_translate_map": self._database.translate_map}
            found = (await connection.execute(query, execution_options=options)).all()
        return {RunStatus(status): count for status, count in found}

    async def _rows(self, query: sa.Select[Any]) -> list[RunRow]:
        async with self._alone() as connection:
            options = {"schema_translate_map": self._database.translate_map}
            return [to_row(row) for row in await connection.execute(query, execution_options=options)]

    def _alone(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """For one statement that reads: on SQLite it holds up no writer, however large the table is."""
        if self._database.tenant_required:
            return self._database.transaction()  # row-level security would filter: refuses, and says why
        return self._database.statement(reads=True)


async def read_ledger_id(connection: AsyncConnection, database: Database) -> str:
    """The identity that the migration gave this ledger; the database remembers that it was read."""
    options = {"schema_translate_map": database.translate_map}
    found = await connection.execute(sa.select(tables.identity.c.id), execution_options=options)
    database.ledger_id = identity = str(found.scalar_one())
    return identity


def _is_older(place: tuple[datetime, str]) -> sa.ColumnElement[bool]:
    created_at, run_id = place
    return sa.or_(_runs.c.created_at < created_at, sa.and_(_runs.c.created_at == created_at, _runs.c.id < run_id))


def to_row(row: Any) -> RunRow:
    values = dict(row._mapping)
    for name in JSON_COLUMNS:
        values[name] = None if values[name] is None else json.decode(values[name])
    return RunRow(**{**values, "status": RunStatus(values["status"]), "retry_history": values["retry_history"] or []})
