"""How far a reader of a stream has come, stored in the transaction that stores what it read."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from bullpen.errors import require
from bullpen.ledger import tables
from bullpen.ledger._callers import async_caller
from bullpen.ledger._sql import Sql
from bullpen.ledger.database import Database
from bullpen.ledger.records import encode_rows


class Checkpoints:
    """Positions by the name of their reader. A position is text: each source has its own kind."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def read(self, name: str) -> str | None:
        """The position that was written last, None at the beginning."""
        table = tables.checkpoints
        query = sa.select(table.c.position).where(table.c.name == name)
        async with self._database.transaction_without_tenant() as connection:
            options = {"schema_translate_map": self._database.translate_map}
            found: str | None = (await connection.execute(query, execution_options=options)).scalar_one_or_none()
        return found

    async def write(self, connection: Any, name: str, position: str) -> None:
        """Remember a position inside the caller's transaction: rows and position are stored together or not at all."""
        require("name", isinstance(name, str) and 0 < len(name) <= 200, "1 to 200 characters", name)
        require("position", isinstance(position, str) and 0 < len(position) <= 200, "1 to 200 characters", position)
        caller = async_caller(connection)
        statement = Sql(caller.dialect, self._database.schema).checkpoint
        await caller.run(statement, encode_rows([{"name": name, "position": position}]))

    async def advance(self, connection: AsyncConnection, name: str, expected: str | None, position: str) -> bool:
        """Move on from `expected` (None: nothing was written yet) inside a transaction of ours.

        False: another reader of this name has moved it meanwhile, and nothing is written. Until the transaction ends
        the other one waits here, so of two readers with the same batch one stores it.
        """
        statement = Sql(self._database.dialect, self._database.schema).advance_checkpoint(first=expected is None)
        values = {"name": name, "position": position} | ({} if expected is None else {"expected": expected})
        return (await connection.execute(sa.text(statement), values)).first() is not None

    async def list(self, prefix: str) -> dict[str, str]:
        """All positions whose name begins with `prefix`."""
        table = tables.checkpoints
        query = sa.select(table.c.name, table.c.position).where(table.c.name.startswith(prefix, autoescape=True))
        async with self._database.transaction_without_tenant() as connection:
            options = {"schema_translate_map": self._database.translate_map}
            found = (await connection.execute(query.order_by(table.c.name), execution_options=options)).all()
        return {row.name: row.position for row in found}
