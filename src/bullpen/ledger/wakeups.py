"""Learn of commits that brought new outbox rows, without asking all the time.

PostgreSQL tells by NOTIFY, on a connection of its own outside the pool (a pooler that gives out connections per
transaction loses it; then only the interval of the dispatcher helps). SQLite tells nobody, but its `data_version`
changes with every commit and costs microseconds to read.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Final

import sqlalchemy as sa

from bullpen._kernel.logs import get_logger
from bullpen.errors import MissingExtra
from bullpen.ledger._sql import LINE, Sql
from bullpen.ledger.database import Database

__all__ = ["LINE", "commits"]

_log = get_logger("bullpen.ledger")

_RECONNECT_S: Final = 1.0
_SQLITE_POLL_S: Final = 0.05


async def commits(database: Database, channel: str | None = None) -> AsyncGenerator[str, None]:
    """Yields when rows may have come. Never ends by itself; a database that is away is waited for.

    What it yields is empty, or `LINE`; both after each connect.

    `channel` is what PostgreSQL listens to, that of the outbox unless given; SQLite tells of every commit.

    Yields once after each connect: what was committed before nobody told us.
    """
    channel = channel or Sql("postgresql", database.schema).channel
    lost = False
    while True:
        try:
            # Closed here and not when it is collected: it holds a connection.
            async with contextlib.aclosing(
                _postgres(database, channel) if database.is_postgres else _sqlite(database)
            ) as told:
                async for what in told:
                    if lost:
                        lost = False
                        _log.warning("%s sends notifications of new rows again", database.address)
                    yield what
        except (OSError, sa.exc.SQLAlchemyError, _driver_errors()) as error:
            if not lost:
                lost = True
                _log.warning(
                    "%s no longer sends notifications of new rows (%s); polling until it does", database.address, error
                )
        await asyncio.sleep(_RECONNECT_S)


async def _postgres(database: Database, channel: str) -> AsyncGenerator[str, None]:
    import psycopg

    url = database.url.set(drivername="postgresql").render_as_string(hide_password=False)
    connection = await psycopg.AsyncConnection.connect(url, autocommit=True, connect_timeout=5)
    async with connection:
        await connection.execute(f"LISTEN {channel}".encode())
        yield ""
        yield LINE
        async with contextlib.aclosing(connection.notifies()) as notifications:
            async for notification in notifications:
                yield notification.payload


async def _sqlite(database: Database) -> AsyncGenerator[str, None]:
    # Kept for as long as we listen, since SQLite counts the commits of others. Reading the number needs no transaction.
    async with database.engine.connect() as pooled:
        connection = await pooled.get_raw_connection()
        driver = connection.driver_connection
        assert driver is not None
        seen = None
        while True:
            ((version,),) = await driver.execute_fetchall("PRAGMA data_version")
            if version != seen:
                seen = version
                yield ""
            await asyncio.sleep(_SQLITE_POLL_S)


def _driver_errors() -> type[Exception]:
    try:
        import psycopg
    except ModuleNotFoundError:
        return MissingExtra  # a ledger in SQLite needs no psycopg
    return psycopg.Error
