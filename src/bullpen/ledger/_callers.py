"""Run a statement inside a caller's own transaction, whatever kind of connection holds it.

In: an open AsyncSession, Session, AsyncConnection or Connection of SQLAlchemy; a connection of psycopg (also async),
asyncpg, sqlite3 or aiosqlite; a Django connection. Out: a way to run a statement with the one parameter `rows` there.
Nothing here begins, commits or rolls back. A connection that commits every statement by itself is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session, scoped_session

from bullpen.errors import InvalidOption, LedgerNotReady, NotInTransaction
from bullpen.ledger.database import DialectName, lacks_tables
from bullpen.ledger.parts import command_that_makes

Rows = Sequence[Sequence[Any]]

_KINDS: Final = (
    "a Session, AsyncSession, Connection or AsyncConnection of SQLAlchemy, a connection of psycopg, psycopg2, asyncpg, "
    "sqlite3 or aiosqlite, or django.db.connection"
)


@dataclass(frozen=True, slots=True)
class CallerConnection:
    """How to run a statement with the one parameter `rows` inside a caller's transaction."""

    dialect: DialectName
    execute: Callable[[str, str], Any]
    """Statement and parameter to rows, or to an awaitable of rows, as the driver does it."""
    is_async: bool

    def run(self, statement: str, rows: str) -> Any:
        """Statement and parameter to rows, or to an awaitable of rows. Raises LedgerNotReady where the tables are
        missing."""
        if self.is_async:
            return self._run_async(statement, rows)
        with _explaining():
            return self.execute(statement, rows)

    async def _run_async(self, statement: str, rows: str) -> Rows:
        with _explaining():
            found: Rows = await self.execute(statement, rows)
            return found


@contextmanager
def _explaining() -> Iterator[None]:
    """Say what to do about missing tables, whose connection it may be: no driver knows of `bullpen migrate`."""
    try:
        yield
    except Exception as error:
        # SQLAlchemy keeps the driver's error beside its own, Django raises its own from it.
        driver = getattr(error, "orig", None) or (error if error.__cause__ is None else error.__cause__)
        if not lacks_tables(driver):
            raise
        text = str(driver).strip().partition("\n")[0]
        raise LedgerNotReady(
            f"the database of this connection has no ledger tables, or older ones: {text}; run "
            f"`{command_that_makes(text)} --database URL` for the database that holds your own data"
        ) from error


def async_caller(connection: Any) -> CallerConnection:
    caller = _find_caller(connection)
    if not caller.is_async:
        raise InvalidOption(
            "connection", "an asynchronous connection; with this one use the `_sync` method", connection
        )
    return caller


def sync_caller(connection: Any) -> CallerConnection:
    caller = _find_caller(connection)
    if caller.is_async:
        raise InvalidOption(
            "connection", "a blocking connection; with this one await the method without `_sync`", connection
        )
    return caller


def _find_caller(connection: Any) -> CallerConnection:
    if isinstance(connection, scoped_session):
        connection = connection()
    if isinstance(connection, AsyncSession | AsyncConnection):
        return _sqlalchemy_async(connection)
    if isinstance(connection, Session | sa.Connection):
        return _sqlalchemy_sync(connection)
    # By the name of its module, so that no driver is imported to find out that it is not used.
    modules = {kind.__module__.partition(".")[0] for kind in type(connection).__mro__}
    if hasattr(connection, "vendor") and hasattr(connection, "in_atomic_block"):
        return _django(connection)
    if "psycopg" in modules:
        return _psycopg(connection)
    if "psycopg2" in modules:
        return _blocking_dbapi(connection, "postgresql", "%s", connection.autocommit)
    if "asyncpg" in modules:
        return _asyncpg(connection)
    if "sqlite3" in modules:
        return _blocking_dbapi(connection, "sqlite", "?", _sqlite_commits_alone(connection))
    if "aiosqlite" in modules:
        return _aiosqlite(connection)
    raise InvalidOption("connection", _KINDS, connection)


def _dialect(name: str) -> DialectName:
    if name == "postgresql":
        return "postgresql"
    if name == "sqlite":
        return "sqlite"
    raise InvalidOption("connection", "PostgreSQL or SQLite", name)


def _refuse_autocommit(commits_alone: bool) -> None:
    if commits_alone:
        raise NotInTransaction(
            "this connection commits every statement by itself, so the message could be stored without your data; "
            "begin a transaction first"
        )


def _sqlalchemy_async(connection: AsyncSession | AsyncConnection) -> CallerConnection:
    bind = connection.get_bind() if isinstance(connection, AsyncSession) else connection.sync_connection
    assert bind is not None

    async def run(statement: str, rows: str) -> Rows:
        _refuse_autocommit(await _is_autocommit_async(connection))
        return (await connection.execute(sa.text(statement), {"rows": rows})).all()

    return CallerConnection(_dialect(bind.dialect.name), run, is_async=True)


async def _is_autocommit_async(connection: AsyncSession | AsyncConnection) -> bool:
    plain = await connection.connection() if isinstance(connection, AsyncSession) else connection
    assert plain.sync_connection is not None
    return _is_autocommit(plain.sync_connection)


def _sqlalchemy_sync(connection: Session | sa.Connection) -> CallerConnection:
    bind = connection.get_bind() if isinstance(connection, Session) else connection

    def run(statement: str, rows: str) -> Rows:
        plain = connection.connection() if isinstance(connection, Session) else connection
        _refuse_autocommit(_is_autocommit(plain))
        return connection.execute(sa.text(statement), {"rows": rows}).all()

    return CallerConnection(_dialect(bind.dialect.name), run, is_async=False)


def _is_autocommit(connection: sa.Connection) -> bool:
    level = connection.get_execution_options().get("isolation_level")
    if level is not None:
        return str(level).upper() == "AUTOCOMMIT"
    return getattr(connection.connection.dbapi_connection, "autocommit", False) is True


def _psycopg(connection: Any) -> CallerConnection:
    from psycopg import AsyncConnection as AsyncPsycopg
    from psycopg.pq import TransactionStatus

    def refuse() -> None:
        idle = connection.info.transaction_status == TransactionStatus.IDLE
        _refuse_autocommit(connection.autocommit and idle)

    if not isinstance(connection, AsyncPsycopg):
        idle = connection.autocommit and connection.info.transaction_status == TransactionStatus.IDLE
        return _blocking_dbapi(connection, "postgresql", "%s", idle)

    async def run(statement: str, rows: str) -> Rows:
        refuse()
        cursor = await connection.execute(_with_placeholder(statement, "%s"), (rows,))
        return await cursor.fetchall()

    return CallerConnection("postgresql", run, is_async=True)


def _asyncpg(connection: Any) -> CallerConnection:
    async def run(statement: str, rows: str) -> Rows:
        _refuse_autocommit(not connection.is_in_transaction())
        found: Rows = await connection.fetch(_with_placeholder(statement, "$1::text"), rows)
        return found

    # As text: an application may have given jsonb a codec of its own, which would encode the batch a second time.
    return CallerConnection("postgresql", run, is_async=True)


def _aiosqlite(connection: Any) -> CallerConnection:
    async def run(statement: str, rows: str) -> Rows:
        _refuse_autocommit(_sqlite_commits_alone(connection))
        return list(await connection.execute_fetchall(_with_placeholder(statement, "?"), (rows,)))

    return CallerConnection("sqlite", run, is_async=True)


def _sqlite_commits_alone(connection: Any) -> bool:
    if connection.in_transaction:
        return False
    autocommit = getattr(connection, "autocommit", None)  # from Python 3.12 on; -1 means "as before"
    return connection.isolation_level is None if autocommit in (None, -1) else bool(autocommit)


def _django(connection: Any) -> CallerConnection:
    if hasattr(connection, "ensure_connection"):
        connection.ensure_connection()
    commits_alone = connection.get_autocommit() and not connection.in_atomic_block
    # Django's own cursors take %s for every database.
    return _blocking_dbapi(connection, connection.vendor, "%s", commits_alone)


def _blocking_dbapi(connection: Any, vendor: str, placeholder: str, commits_alone: bool) -> CallerConnection:
    def run(statement: str, rows: str) -> Rows:
        _refuse_autocommit(commits_alone)
        cursor = connection.cursor()
        try:
            cursor.execute(_with_placeholder(statement, placeholder), (rows,))
            return list(cursor.fetchall())
        finally:
            cursor.close()

    return CallerConnection(_dialect(vendor), run, is_async=False)


def _with_placeholder(statement: str, placeholder: str) -> str:
    assert "%" not in statement
    return statement.replace(":rows", placeholder)
