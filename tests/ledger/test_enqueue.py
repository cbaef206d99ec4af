"""A message exists if and only if the caller's transaction committed, whatever kind of connection holds it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiosqlite
import asyncpg
import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.pool import NullPool

from bullpen.errors import InvalidOption, LedgerNotReady, NotInTransaction
from bullpen.ledger import Enqueuer, Ledger, OutboxItem
from tests.databases import MakeLedger, item


class BusinessSaysNo(Exception):
    """Rolls a transaction back."""


def _sqlalchemy_url(url: str, *, asynchronous: bool) -> str:
    if url.startswith("sqlite"):
        return url.replace("sqlite:", "sqlite+aiosqlite:") if asynchronous else url
    return url.replace("postgresql:", "postgresql+psycopg:")


def _path(url: str) -> str:
    return url.removeprefix("sqlite:///")


# Each opens a connection of its kind, begins a transaction, and ends it as the block ends.


@contextlib.asynccontextmanager
async def async_session(url: str) -> AsyncIterator[Any]:
    engine = create_async_engine(_sqlalchemy_url(url, asynchronous=True), poolclass=NullPool)
    async with AsyncSession(engine) as session, session.begin():
        yield session


@contextlib.asynccontextmanager
async def async_connection(url: str) -> AsyncIterator[Any]:
    engine = create_async_engine(_sqlalchemy_url(url, asynchronous=True), poolclass=NullPool)
    async with engine.begin() as connection:
        yield connection


@contextlib.asynccontextmanager
async def async_driver(url: str) -> AsyncIterator[Any]:
    if url.startswith("sqlite"):
        async with aiosqlite.connect(_path(url)) as connection:
            yield connection
            await connection.commit()
    else:
        async with await psycopg.AsyncConnection.connect(url) as connection:
            yield connection


@contextlib.asynccontextmanager
async def asyncpg_connection(url: str) -> AsyncIterator[Any]:
    opened = await asyncpg.connect(url)
    # What applications do to get objects instead of text; a batch of ours must not be encoded twice by it.
    await opened.set_type_codec("jsonb", encoder=json.dumps, decoder=json.loads, schema="pg_catalog")
    try:
        async with opened.transaction():
            yield opened
    finally:
        await opened.close()


@contextlib.asynccontextmanager
async def asyncpg_pool(url: str) -> AsyncIterator[Any]:
    async with asyncpg.create_pool(url, min_size=1) as pool, pool.acquire() as opened, opened.transaction():
        yield opened


@contextlib.asynccontextmanager
async def asyncpg_session(url: str) -> AsyncIterator[Any]:
    address = url.replace("postgresql:", "postgresql+asyncpg:")
    engine = create_async_engine(address, poolclass=NullPool)
    async with AsyncSession(engine) as session, session.begin():
        yield session


@contextlib.contextmanager
def session(url: str) -> Iterator[Any]:
    engine = sa.create_engine(_sqlalchemy_url(url, asynchronous=False), poolclass=NullPool)
    with Session(engine) as opened, opened.begin():
        yield opened


@contextlib.contextmanager
def session_registry(url: str) -> Iterator[Any]:
    engine = sa.create_engine(_sqlalchemy_url(url, asynchronous=False), poolclass=NullPool)
    registry = scoped_session(sessionmaker(engine))
    try:
        with registry.begin():
            yield registry
    finally:
        registry.remove()


@contextlib.contextmanager
def connection(url: str) -> Iterator[Any]:
    engine = sa.create_engine(_sqlalchemy_url(url, asynchronous=False), poolclass=NullPool)
    with engine.begin() as opened:
        yield opened


@contextlib.contextmanager
def driver(url: str) -> Iterator[Any]:
    if url.startswith("sqlite"):
        with contextlib.closing(sqlite3.connect(_path(url))) as opened, opened:
            yield opened
    else:
        with psycopg.connect(url) as opened_psycopg:
            yield opened_psycopg


@contextlib.contextmanager
def django_atomic(url: str) -> Iterator[Any]:
    from django.db import transaction

    with django_connection(url) as opened, transaction.Atomic(opened.alias, savepoint=True, durable=False):
        yield opened


@contextlib.contextmanager
def django_connection(url: str) -> Iterator[Any]:
    import django
    from django.conf import settings
    from django.db import connections

    if not settings.configured:
        settings.configure(USE_TZ=True, DATABASES={})
        django.setup()
    given: dict[str, Any]
    if url.startswith("sqlite"):
        given = {"ENGINE": "django.db.backends.sqlite3", "NAME": _path(url)}
    else:
        info = psycopg.conninfo.conninfo_to_dict(url)
        given = {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": info["dbname"],
            "USER": info["user"],
            "HOST": info["host"],
        }
    connections.settings = connections.configure_settings({"default": given})
    opened = connections.create_connection("default")
    connections["default"] = opened
    try:
        yield opened
    finally:
        opened.close()
        del connections["default"]


ASYNCPG: list[Any] = [asyncpg_connection, asyncpg_pool, asyncpg_session]
ASYNC: list[Any] = [async_session, async_connection, async_driver, *ASYNCPG]
SYNC: list[Any] = [session, session_registry, connection, driver, django_atomic]


async def run(kind: Any, url: str, *items: OutboxItem, fail: bool = False, again: bool = False) -> list[Any]:
    """Store items through a kind of connection, in one transaction that fails or not."""
    enqueuer = Enqueuer()

    async def asynchronously() -> list[Any]:
        async with kind(url) as opened:
            result = await enqueuer.enqueue_many(opened, items)
            if again:
                result = await enqueuer.enqueue_many(opened, items)
            if fail:
                raise BusinessSaysNo
            return list(result)

    def blocking() -> list[Any]:
        with kind(url) as opened:
            result = enqueuer.enqueue_many_sync(opened, items)
            if again:
                result = enqueuer.enqueue_many_sync(opened, items)
            if fail:
                raise BusinessSaysNo
            return list(result)

    with contextlib.suppress(BusinessSaysNo):
        return await asynchronously() if kind in ASYNC else await asyncio.to_thread(blocking)
    return []


@pytest.mark.requirement("O-23", "O-20")
@pytest.mark.parametrize(
    ("kind", "ledger_url"),
    [
        (kind, database)
        for database in ("postgresql", "sqlite")
        for kind in (*ASYNC, *SYNC)
        if database == "postgresql" or kind not in ASYNCPG
    ],
    indirect=["ledger_url"],
    ids=lambda value: getattr(value, "__name__", value),
)
class TestEveryKindOfConnection:
    async def test_a_commit_stores_and_a_rollback_leaves_nothing(
        self, kind: Any, ledger_url: str, ledger: Ledger
    ) -> None:
        await run(kind, ledger_url, item(1), fail=True)
        stored = await run(kind, ledger_url, item(2, payload={"text": "100 % ü :rows ?"}), item(3))

        rows = await ledger.outbox.find()
        assert [row.source_event_id for row in rows] == ["event-2", "event-3"]
        assert [entry.id for entry in stored] == [row.id for row in rows]
        assert rows[0].payload == {"text": "100 % ü :rows ?"}

    async def test_a_duplicate_is_told_and_does_not_break_the_transaction(
        self, kind: Any, ledger_url: str, ledger: Ledger
    ) -> None:
        """An error inside a PostgreSQL transaction would take the business data down with it."""
        first = await run(kind, ledger_url, item(1))

        again = await run(kind, ledger_url, item(1), item(2), again=True)

        assert again[0].id == first[0].id
        assert [entry.created for entry in again] == [False, False]
        assert len(await ledger.outbox.find()) == 2

    async def test_an_event_of_another_tenant_is_refused(self, kind: Any, ledger_url: str, ledger: Ledger) -> None:
        """Both count their orders from 1. The second was taken for a repetition, and never sent."""
        await run(kind, ledger_url, item(1, tenant_id="alice"), item(2))

        with pytest.raises(InvalidOption, match=r"no other tenant .*put the tenant into source_stream_id"):
            await run(kind, ledger_url, item(1, tenant_id="bob"))
        known = await run(kind, ledger_url, item(1), item(1, tenant_id="alice"), item(2, tenant_id="bob"))

        assert [entry.created for entry in known] == [False] * 3


@pytest.mark.parametrize(
    ("kind", "database"),
    [
        (kind, database)
        for database in ("postgresql", "sqlite")
        for kind in (*ASYNC, *SYNC)
        if database == "postgresql" or kind not in ASYNCPG
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
async def test_missing_tables_say_what_to_do_through_every_kind_of_connection(
    kind: Any, database: str, request: pytest.FixtureRequest
) -> None:
    """The first thing that goes wrong for everybody; `no such table` tells nobody where the tables come from."""
    url = request.getfixturevalue("empty_postgres_url") if database == "postgresql" else None
    url = url or f"sqlite:///{request.getfixturevalue('sqlite_path')}"

    with pytest.raises(LedgerNotReady, match="run `bullpen migrate --database URL`") as caught:
        await run(kind, url, item())

    assert caught.value.__cause__ is not None
    assert "integration_outbox" in str(caught.value)


def autocommit_connection(url: str) -> AbstractAsyncContextManager[Any]:
    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[Any]:
        engine = create_async_engine(_sqlalchemy_url(url, asynchronous=True), poolclass=NullPool)
        async with engine.connect() as plain:
            yield await plain.execution_options(isolation_level="AUTOCOMMIT")

    return opened()


async def test_sqlalchemy_in_autocommit_is_refused(ledger_url: str, ledger: Ledger) -> None:
    """The row would be there even if the business data never came."""
    async with autocommit_connection(ledger_url) as opened:
        with pytest.raises(NotInTransaction, match="begin a transaction"):
            await Enqueuer().enqueue(opened, item())

    assert await ledger.outbox.find() == []


async def test_drivers_in_autocommit_are_refused(postgres_url: str, sqlite_url: str) -> None:
    def refuse(opened: Any) -> None:
        with pytest.raises(NotInTransaction):
            Enqueuer().enqueue_sync(opened, item())

    def blocking() -> None:
        with psycopg.connect(postgres_url, autocommit=True) as opened:
            refuse(opened)
            with opened.transaction():
                Enqueuer().enqueue_sync(opened, item())  # a transaction inside autocommit is one
        with contextlib.closing(sqlite3.connect(_path(sqlite_url), isolation_level=None)) as opened_sqlite:
            refuse(opened_sqlite)
            opened_sqlite.execute("BEGIN")
            Enqueuer().enqueue_sync(opened_sqlite, item())
            opened_sqlite.rollback()
        for url in (postgres_url, sqlite_url):
            with django_connection(url) as opened_django:
                refuse(opened_django)

    await asyncio.to_thread(blocking)
    async with aiosqlite.connect(_path(sqlite_url), isolation_level=None) as opened:
        with pytest.raises(NotInTransaction):
            await Enqueuer().enqueue(opened, item())
    async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as opened_async:
        with pytest.raises(NotInTransaction):
            await Enqueuer().enqueue(opened_async, item())
    opened_asyncpg = await asyncpg.connect(postgres_url)
    with pytest.raises(NotInTransaction):
        await Enqueuer().enqueue(opened_asyncpg, item())
    with pytest.raises(InvalidOption, match="without `_sync`"):
        Enqueuer().enqueue_sync(opened_asyncpg, item())
    await opened_asyncpg.close()


async def test_blocking_and_asynchronous_connections_are_not_mixed_up(sqlite_url: str) -> None:
    blocking = sqlite3.connect(_path(sqlite_url))
    with contextlib.closing(blocking), pytest.raises(InvalidOption, match="use the `_sync` method"):
        await Enqueuer().enqueue(blocking, item())
    async with aiosqlite.connect(_path(sqlite_url)) as asynchronous:
        with pytest.raises(InvalidOption, match="without `_sync`"):
            Enqueuer().enqueue_sync(asynchronous, item())


class OfAnotherVendor:
    """Looks like Django's connection to a database that is not supported."""

    vendor = "oracle"
    in_atomic_block = True

    def get_autocommit(self) -> bool:
        return False


@pytest.mark.parametrize(
    "nonsense", [None, "postgresql://…", object(), OfAnotherVendor()], ids=["none", "text", "object", "other vendor"]
)
def test_what_is_no_connection_is_refused(nonsense: object) -> None:
    with pytest.raises(InvalidOption, match="connection"):
        Enqueuer().enqueue_sync(nonsense, item())


async def test_no_items_need_no_connection_to_do_anything(sqlite_url: str) -> None:
    assert await run(async_driver, sqlite_url) == []
    assert await run(driver, sqlite_url) == []


@pytest.mark.requirement("X-73")
async def test_a_strict_outbox_stores_an_event_once_whatever_its_route(
    ledger_url: str, make_ledger: MakeLedger
) -> None:
    ledger = make_ledger(ledger_url, strict_sources=True)

    first = await ledger.outbox.enqueue(item(integration_type="kafka:payments"))
    second = await ledger.outbox.enqueue(item(integration_type="webhook:partnerX"))

    assert (first.created, second.created) == (True, False)


async def test_the_default_of_attempts_is_the_enqueuers(ledger_url: str, make_ledger: MakeLedger) -> None:
    ledger = make_ledger(ledger_url, max_attempts=4)

    await ledger.outbox.enqueue_many([item(1), item(2, max_attempts=7)])

    assert [row.max_attempts for row in await ledger.outbox.find()] == [4, 7]


async def test_a_thousand_rows_are_one_statement(postgres_url: str, make_ledger: MakeLedger) -> None:
    ledger = make_ledger(postgres_url)
    statements: list[str] = []
    sa.event.listen(
        ledger.database.engine.sync_engine,
        "before_cursor_execute",
        lambda connection, cursor, statement, *rest: statements.append(statement),
    )

    stored = await ledger.outbox.enqueue_many(item(number) for number in range(1_000))

    assert all(entry.created for entry in stored)
    assert len(statements) == 1
