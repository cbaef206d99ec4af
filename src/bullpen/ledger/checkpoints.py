"""How far a reader of a stream has come, stored in the transaction that stores what it read."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from bullpen.errors import require
from bullpen.ledger import tables
from bullpen.ledger._callers import async_caller
from bullpen.ledger._sql import Sql
from bullpen.ledger.database import Database
from bullpen.ledger.outbox import encode_rows


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
