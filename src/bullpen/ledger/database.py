"""Reach the database that holds the ledger: one engine, short transactions, errors of ours.

In: a URL (`postgresql://…` or `sqlite:///path`). Out: transactions, in which PostgreSQL knows the tenant. A database
that is away raises DatabaseUnavailable, tables that are missing LedgerNotReady.
Elsewhere: tables (`tables`), their making (`migrate`), who may see what (`security`), statements (`_sql`).
"""

from __future__ import annotations

import asyncio
import re
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from bullpen._kernel.addresses import show_address
from bullpen._kernel.duration import check_int
from bullpen._kernel.ownership import check_directory, prepare_directory, prepare_file
from bullpen.errors import (
    DatabaseUnavailable,
    InvalidOption,
    LedgerError,
    LedgerNotReady,
    MissingExtra,
    UnsafeDatabaseRole,
    require,
)
from bullpen.ledger.driver import Driver, Row, prepared
from bullpen.ledger.parts import command_that_makes
from bullpen.ledger.sqlite_thread import SqliteThread
from bullpen.ledger.tables import SCHEMA, SQLITE_NOW

T = TypeVar("T")
DialectName = Literal["postgresql", "sqlite"]

_FORMS: Final = "postgresql://user@host/database or sqlite:///path/to/file"
_OLDEST_SQLITE: Final = (3, 35)  # RETURNING
_BUSY_TIMEOUT_MS: Final = 5_000
_CONNECT_TIMEOUT_S: Final = 5
_NO_BEGIN: Final = "bullpen_no_begin"
_DRIVERS: Final = {
    "postgresql": ("postgresql+psycopg", "psycopg", "postgres"),
    "sqlite": ("sqlite+aiosqlite", "aiosqlite", "sqlite"),
}

_is_identifier = re.compile(r"[a-z_][a-z0-9_]{0,62}").fullmatch


def check_identifier(option: str, name: str) -> str:
    """Names of schemas and roles become part of statements, so only plain ones are taken."""
    plain = isinstance(name, str) and _is_identifier(name) is not None
    require(option, plain, "lower-case letters, digits and underscores, not beginning with a digit", name)
    return name


class Database:
    """The engine of one ledger. Belongs to the event loop that used it first; close it there."""

    def __init__(
        self,
        url: str,
        *,
        schema: str = SCHEMA,
        pool_size: int = 20,
        timeout_ms: int = 30_000,
        prepared_statements: bool = True,
        make_directory: bool = False,
        clock_offset_ms: int = 0,
    ) -> None:
        """`make_directory`: a SQLite file may be in a directory that does not exist yet."""
        parsed, self.dialect = _parse(url)
        self.schema = check_identifier("schema", schema)
        """Where the tables are on PostgreSQL; SQLite has no schemas."""
        self.pool_size = check_int("pool_size", pool_size, minimum=1)
        self._timeout_s = check_int("timeout_ms", timeout_ms, minimum=1) / 1000
        self.clock_offset_ms = clock_offset_ms
        """Moves the database's clock as the ledger sees it. For tests."""
        self.ledger_id: str | None = None
        """Which ledger this is, once somebody has read it."""
        self.tenant_required = False
        """True for connections that row-level security filters: each transaction then needs a tenant."""
        self.url = parsed
        self.engine = self._make_engine(prepared_statements=prepared_statements)
        # The same connections. SQLite is in autocommit mode anyway until somebody says BEGIN.
        options = {"isolation_level": "AUTOCOMMIT"} if self.is_postgres else {_NO_BEGIN: True}
        self._autocommit = self.engine.execution_options(**options)
        self._driver = Driver(self.engine, prepares=prepared_statements) if self.is_postgres else None
        self._raised: tuple[type[Exception], ...] = (sa.exc.SQLAlchemyError,)
        if self._driver is not None:
            self._raised += (self._driver.error,)
        self._writing: SqliteThread | None = None
        self._reading: SqliteThread | None = None
        if not self.is_postgres:
            place = Path(str(parsed.database))
            _prepare_place(self.engine.sync_engine, place, make_directory=make_directory)
            # Reads have one of their own: they wait for no writer.
            self._writing, self._reading = (self._make_thread(place, make_directory, reads) for reads in (False, True))

    @property
    def is_postgres(self) -> bool:
        return self.dialect == "postgresql"

    @property
    def address(self) -> str:
        """Where it is, without the password."""
        return show_address(self.url.render_as_string(hide_password=True))

    @property
    def now(self) -> str:
        """SQL for the database's now, moved by the offset."""
        return now_sql(self.dialect, self.clock_offset_ms)

    def table(self, name: str) -> str:
        """The qualified name of a table in SQL text."""
        return qualified(self.dialect, self.schema, name)

    @property
    def translate_map(self) -> dict[str | None, str | None]:
        """For statements built from `tables`: which schema to use."""
        return {SCHEMA: self.schema if self.is_postgres else None}

    @asynccontextmanager
    async def transaction(self, *, tenant: str | None = None) -> AsyncIterator[AsyncConnection]:
        """One short transaction, committed at the end of the block. `tenant` is whose rows it may see on PostgreSQL.

        Raises DatabaseUnavailable when the database does not answer, busy, or silent for longer than `timeout_ms`.
        """
        if self.tenant_required and not tenant:
            raise UnsafeDatabaseRole("this connection sees one tenant's rows at a time: a transaction needs a tenant")
        async with self.transaction_without_tenant() as connection:
            if tenant and self.is_postgres:
                await connection.execute(_SET_TENANT, {"tenant": tenant})
            yield connection

    @asynccontextmanager
    async def transaction_without_tenant(self) -> AsyncIterator[AsyncConnection]:
        """For what belongs to no tenant. Errors as in `transaction`."""
        async with self._begun(self.engine, self._timeout_s) as connection:
            yield connection

    @asynccontextmanager
    async def statement(self, *, reads: bool = False) -> AsyncIterator[AsyncConnection]:
        """For one statement that belongs to no tenant, a transaction by itself. Errors as in `transaction`.

        On PostgreSQL that is one round trip and not three. `reads`: it changes nothing, and on SQLite, which has one
        writer at a time, it then waits for nobody and holds up nobody.
        """
        is_alone = self.is_postgres or reads
        async with self._begun(self._autocommit if is_alone else self.engine, self._timeout_s) as connection:
            yield connection

    async def fetch(self, statement: str, parameters: Mapping[str, Any], *, reads: bool = False) -> list[Row]:
        """The rows of one statement as in `statement`, for those that run all the time: on PostgreSQL the driver does
        it without the engine, which takes three times as long."""
        if self._driver is not None:
            async with self._errors(self._timeout_s):
                return await self._driver.fetch(statement, parameters)
        return await self.in_one_go(lambda connection: _fetch_now(connection, statement, parameters), reads=reads)

    async def in_one_go(self, work: Callable[[sa.Connection], T], *, reads: bool = False) -> T:
        """SQLite: a transaction of several statements, as one call into a thread. `reads`: one statement that changes
        nothing, and waits for no writer. Errors as in `transaction`."""
        thread = self._reading if reads else self._writing
        assert thread is not None
        async with self._errors(self._timeout_s):
            return await thread.run(work)

    async def fetch_of(
        self, tenant: str | None, statement: str, parameters: Mapping[str, Any], *, reads: bool = False
    ) -> list[Row]:
        """As `fetch`, of what belongs to tenants. A connection that sees one tenant's rows at a time needs its name."""
        if not tenant and not self.tenant_required:
            return await self.fetch(statement, parameters, reads=reads)
        if tenant and self._driver is not None:
            async with self._errors(self._timeout_s):
                return await self._driver.fetch(statement, parameters, tenant)
        async with self.transaction(tenant=tenant) as connection:
            return await _fetch(connection, statement, parameters)

    @asynccontextmanager
    async def migration(self) -> AsyncIterator[AsyncConnection]:
        """A transaction that may take its time: an index over a large table is not made within `timeout_ms`."""
        async with self._begun(self.engine, None) as connection:
            yield connection

    @asynccontextmanager
    async def _begun(self, engine: AsyncEngine, limit_s: float | None) -> AsyncIterator[AsyncConnection]:
        async with self._errors(limit_s), engine.begin() as connection:
            yield connection

    @asynccontextmanager
    async def _errors(self, limit_s: float | None) -> AsyncIterator[None]:
        """A limit in time, and errors of ours for those of engine and driver."""
        try:
            async with asyncio.timeout(limit_s):
                yield
        except self._raised as error:
            raise self.translate(error) from error
        except (TimeoutError, OSError) as error:
            if isinstance(error, DatabaseUnavailable):
                raise
            raise DatabaseUnavailable(f"{self.address} did not answer: {str(error) or 'time ran out'}") from error

    def translate(self, error: Exception) -> Exception:
        """The error of ours for one of the engine's or the driver's; what stays as it is would be a bug of ours."""
        if isinstance(error, sa.exc.TimeoutError):
            return DatabaseUnavailable(f"{self.address}: no connection became free; raise pool_size ({self.pool_size})")
        is_cut = isinstance(error, sa.exc.OperationalError | sa.exc.InterfaceError)
        if isinstance(error, sa.exc.DBAPIError):
            is_cut, original = is_cut or error.connection_invalidated, error.orig
        elif isinstance(error, sa.exc.SQLAlchemyError):
            return error
        else:
            is_cut, original = self._driver is not None and isinstance(error, self._driver.cut), error
        text, state = str(original).strip().partition("\n")[0], getattr(original, "sqlstate", None)
        if lacks_tables(original):
            command = command_that_makes(text)
            return LedgerNotReady(f"{self.address}: {text}; run `{command}`", command=command)
        if state == "42501":
            return UnsafeDatabaseRole(f"{self.address}: {text}; the role lacks a right, or the row is another tenant's")
        if is_cut:
            return DatabaseUnavailable(f"{self.address}: {text or type(original).__name__}")
        return LedgerError(f"{self.address} refused a statement: {text}")

    async def aclose(self) -> None:
        """Close all connections. Safe to call twice."""
        for thread in (self._writing, self._reading):
            if thread is not None:
                await thread.aclose()
        await self.engine.dispose()

    def _make_thread(self, place: Path, make_directory: bool, reads: bool) -> SqliteThread:
        engine = sa.create_engine(
            self.url.set(drivername="sqlite"),
            poolclass=sa.StaticPool,
            connect_args={"check_same_thread": False},
            hide_parameters=True,
        )
        prepare_sqlite(engine, busy_timeout_ms=min(_BUSY_TIMEOUT_MS, int(self._timeout_s * 1000)))
        _prepare_place(engine, place, make_directory=make_directory)
        return SqliteThread(engine.execution_options(**{_NO_BEGIN: True}) if reads else engine, "bullpen sqlite")

    def _make_engine(self, *, prepared_statements: bool) -> AsyncEngine:
        if self.is_postgres:
            arguments: dict[str, Any] = {"connect_timeout": _CONNECT_TIMEOUT_S}
            if not prepared_statements:
                # Behind a pooler that gives out connections per transaction, a prepared statement is not there later.
                arguments["prepare_threshold"] = None
            engine = create_async_engine(
                self.url,
                pool_size=self.pool_size,
                max_overflow=0,
                pool_timeout=self._timeout_s,
                pool_use_lifo=True,  # few connections, whose statements are planned already, instead of all by turns
                connect_args=arguments,
                hide_parameters=True,  # payloads and secrets: an error of a statement goes to logs, and so would they
            )
            sa.event.listen(engine.sync_engine, "connect", _read_every_instant)
            if prepared_statements:  # the same pooler would leave the setting behind for somebody else
                release_abandoned(engine.sync_engine, after_ms=int(self._timeout_s * 2_000))
            return engine
        engine = create_async_engine(self.url, pool_size=min(self.pool_size, 5), max_overflow=0, hide_parameters=True)
        prepare_sqlite(engine.sync_engine, busy_timeout_ms=min(_BUSY_TIMEOUT_MS, int(self._timeout_s * 1000)))
        return engine


_SET_TENANT: Final = sa.text("SELECT set_config('app.current_tenant', :tenant, true)")


async def _fetch(connection: AsyncConnection, statement: str, parameters: Mapping[str, Any]) -> list[Row]:
    found = await connection.execute(prepared(statement), dict(parameters))
    return [tuple(row) for row in found] if found.returns_rows else []


def _fetch_now(connection: sa.Connection, statement: str, parameters: Mapping[str, Any]) -> list[Row]:
    found = connection.execute(prepared(statement), dict(parameters))
    return [tuple(row) for row in found] if found.returns_rows else []


def lacks_tables(error: BaseException | None) -> bool:
    """Whether a driver says that a table, a schema, a column or a function is not there."""
    state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    text = str(error)
    return state in ("42P01", "3F000", "42703", "42883") or "no such table" in text or "no such column" in text


def now_sql(dialect: str, offset_ms: int = 0) -> str:
    """The database's now, moved by `offset_ms`."""
    if dialect == "sqlite":
        return f"({SQLITE_NOW} + {offset_ms:d})" if offset_ms else SQLITE_NOW
    # The transaction's start, not the wall clock: one transaction has one now, and ours are short.
    return f"(now() + {offset_ms:d} * interval '1 millisecond')" if offset_ms else "now()"


def qualified(dialect: str, schema: str, table: str) -> str:
    """The name of a table in SQL text."""
    return f"{schema}.{table}" if dialect == "postgresql" else table


def _read_every_instant(connection: Any, _record: object) -> None:
    from bullpen.ledger._instants import read_every_instant  # needs the driver, which is an extra

    read_every_instant(connection.driver_connection)


def release_abandoned(engine: sa.Engine, *, after_ms: int) -> None:
    """Let PostgreSQL end a transaction of ours in which nothing happens any more.

    A process that is killed closes its connections; a machine that loses power or its network does not, and PostgreSQL
    would keep the locks of its open transaction for hours: no reaper could give those rows back.
    """

    def on_connect(connection: Any, _record: object) -> None:
        # Without a transaction: the first rollback would take the setting back.
        connection.autocommit = True
        cursor = connection.cursor()
        cursor.execute(f"SET idle_in_transaction_session_timeout = {after_ms:d}")
        cursor.execute("SET TimeZone = 'UTC'")  # instants come as we keep them, and need not be moved one by one
        cursor.close()
        connection.autocommit = False

    sa.event.listen(engine, "connect", on_connect)


def prepare_sqlite(engine: sa.Engine, *, busy_timeout_ms: int = _BUSY_TIMEOUT_MS) -> None:
    """Make SQLite durable and its transactions honest, on every connection of this engine.

    BEGIN IMMEDIATE: a transaction that reads and then writes would otherwise fail when another wrote in between.
    `synchronous=FULL`: in WAL mode NORMAL may lose the last commits with the machine.
    """

    def on_connect(connection: Any, _record: object) -> None:
        connection.isolation_level = None  # we say BEGIN ourselves; the module's own habit is to guess
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout={busy_timeout_ms}")
        _use_wal(cursor, time.monotonic() + busy_timeout_ms / 1000)
        for pragma in ("synchronous=FULL", "foreign_keys=ON"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    def on_begin(connection: sa.Connection) -> None:
        if not connection.get_execution_options().get(_NO_BEGIN):
            connection.exec_driver_sql("BEGIN IMMEDIATE")

    sa.event.listen(engine, "connect", on_connect)
    sa.event.listen(engine, "begin", on_begin)


def _use_wal(cursor: Any, give_up_at: float) -> None:
    """Switch the file to WAL, if nobody has yet. Where several do so at once, SQLite refuses all but one without
    waiting, whatever its timeout says."""
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > give_up_at:
                raise
            time.sleep(0.005)


def _prepare_place(engine: sa.Engine, file: Path, *, make_directory: bool) -> None:
    """Refuse a place of somebody else, and make the file private before SQLite makes it for all to read."""

    def before_connect(*_: Any) -> None:
        if str(file).startswith("file:"):
            return  # a URI of SQLite's own, with options that only it can read
        try:
            if make_directory:
                prepare_directory(file.parent)
            elif not file.parent.exists():
                return  # SQLite says so
            check_directory(file.parent)
            prepare_file(file)
        except OSError as error:
            raise LedgerError(f"the ledger cannot be kept in {file}: {error}; choose another place") from error

    sa.event.listen(engine, "do_connect", before_connect)


def _parse(url: str) -> tuple[sa.URL, DialectName]:
    try:
        parsed = sa.make_url(url)
    except sa.exc.ArgumentError:
        raise InvalidOption("url", _FORMS, show_address(url)) from None
    dialect = {"postgres": "postgresql"}.get(name := parsed.get_backend_name(), name)
    if dialect == "postgresql":
        _need_driver("postgresql")
        return parsed.set(drivername=_DRIVERS["postgresql"][0]), "postgresql"
    if dialect == "sqlite":
        if not parsed.database or parsed.database == ":memory:":
            raise InvalidOption("url", "a file: connections do not share a database in memory", show_address(url))
        if sqlite3.sqlite_version_info < _OLDEST_SQLITE:
            raise LedgerError(f"SQLite {sqlite3.sqlite_version} is too old; the ledger needs 3.35 or newer")
        _need_driver("sqlite")
        return parsed.set(drivername=_DRIVERS["sqlite"][0]), "sqlite"
    raise InvalidOption("url", _FORMS, show_address(url))


def _need_driver(dialect: DialectName) -> None:
    import importlib.util

    _, module, extra = _DRIVERS[dialect]
    if importlib.util.find_spec(module) is None:
        raise MissingExtra(extra, f"a ledger in {dialect}")
