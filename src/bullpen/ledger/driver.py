"""Statements that run for every batch of rows, sent by PostgreSQL's driver itself.

The engine makes a statement, a result and its columns anew at each call: three times what the driver takes for the same
round trip. In: a text with `:names`, their values, and a connection of the engine's pool. Out: rows as tuples, or the
driver's errors. Elsewhere: which statements (`_sql`, `_message_sql`), time limits and errors of ours (`database`).
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, LiteralString, cast

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.util import greenlet_spawn

if TYPE_CHECKING:  # an extra
    from psycopg import AsyncConnection

__all__ = ["Driver", "Row", "prepared"]

Row = tuple[Any, ...]

_NAME: Final = re.compile(r"(?<![:\w]):([a-z_]+)")
_SET_TENANT: Final = "SELECT set_config('app.current_tenant', :tenant, true)"


@lru_cache(maxsize=1_000)
def prepared(statement: str) -> sa.TextClause:
    """A text to execute by the engine. Made once: reading it for its parameters costs as much as sending it."""
    return sa.text(statement)


@lru_cache(maxsize=1_000)
def numbered(statement: str) -> tuple[LiteralString, tuple[str, ...]]:
    """A text with `$1` where it has `:name`, and the names in their order."""
    names: list[str] = []

    def number(found: re.Match[str]) -> str:
        if found[1] not in names:
            names.append(found[1])
        return f"${names.index(found[1]) + 1}"

    text: Any = _NAME.sub(number, statement)  # texts are ours; what callers give travels as values
    return text, tuple(names)


class Driver:
    """The driver of one engine. `prepares`: a statement may stay prepared on its connection."""

    def __init__(self, engine: AsyncEngine, *, prepares: bool) -> None:
        import psycopg

        self._engine = engine
        self._prepare = True if prepares else None
        self._idle = psycopg.pq.TransactionStatus.IDLE
        self.error = psycopg.Error
        self.cut = (psycopg.OperationalError, psycopg.InterfaceError)
        """Errors of a database that is away, or that could not do it just now."""

    async def fetch(self, statement: str, parameters: Mapping[str, Any], tenant: str | None = None) -> list[Row]:
        """One statement, a transaction by itself; with a tenant, in a transaction that knows whose it is. Either way
        one round trip."""
        from psycopg import AsyncRawCursor

        async with self._connection() as connection:
            cursor = AsyncRawCursor(connection)
            if tenant is None:
                await cursor.execute(*_filled(statement, parameters), prepare=self._prepare)
            else:
                async with connection.pipeline(), connection.transaction():
                    await AsyncRawCursor(connection).execute(*_filled(_SET_TENANT, {"tenant": tenant}))
                    await cursor.execute(*_filled(statement, parameters), prepare=self._prepare)
            return await cursor.fetchall() if cursor.description else []

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[AsyncConnection[Row]]:
        pooled = await self._engine.raw_connection()
        connection = cast("AsyncConnection[Row]", pooled.driver_connection)
        is_clean = False
        try:
            await connection.set_autocommit(True)
            try:
                yield connection
            finally:
                if connection.pgconn.transaction_status == self._idle:
                    await connection.set_autocommit(False)  # as the engine left it
                    is_clean = True
        except self.cut:
            if connection.closed:
                await self._engine.dispose()  # the others were cut with it, most likely
            raise
        finally:
            if not is_clean:  # in the middle of something: nobody else shall have it
                await greenlet_spawn(pooled.invalidate)
            await greenlet_spawn(pooled.close)


def _filled(statement: str, parameters: Mapping[str, Any]) -> tuple[LiteralString, Sequence[Any]]:
    text, names = numbered(statement)
    return text, [parameters[name] for name in names]
