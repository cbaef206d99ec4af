"""Which version the ledger's tables have, and which one this program needs.

In: a database. Out: nothing, or LedgerNotReady. Every process asks this when it starts, most never migrate: so nothing
here loads the library that does, which with what it needs itself is 15 MB. Elsewhere: changing them (`migrate`).
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

import sqlalchemy as sa

from bullpen.errors import LedgerNotReady
from bullpen.ledger.database import Database
from bullpen.ledger.security import VERSION_TABLE

__all__ = ["check_version", "head", "known"]


async def check_version(database: Database) -> None:
    """Raise LedgerNotReady unless the tables are at least those of this program.

    A newer version passes: migrations only add during a rolling upgrade, and old processes go on working.
    """
    async with database.transaction_without_tenant() as connection:
        has_tables = await connection.run_sync(_has_version, database.schema if database.is_postgres else None)
        current = None
        if has_tables:
            statement = sa.text(f"SELECT max(version_num) FROM {database.table(VERSION_TABLE)}")
            current = (await connection.execute(statement)).scalar_one()
    if current is None:
        raise LedgerNotReady(f"{database.address} has no ledger tables yet; run `bullpen migrate`")
    if current in known() and current != head():
        raise LedgerNotReady(
            f"{database.address} is at version {current}, this program needs {head()}; run `bullpen migrate`"
        )


@cache
def known() -> tuple[str, ...]:
    """All versions that this program knows, in order: each step's file begins with its number."""
    steps = files("bullpen.ledger").joinpath("migrations", "versions").iterdir()
    return tuple(sorted(step.name[:4] for step in steps if step.name[:4].isdecimal()))


def head() -> str:
    """The version that this program brings."""
    return known()[-1]


def _has_version(connection: sa.Connection, schema: str | None) -> bool:
    return sa.inspect(connection).has_table(VERSION_TABLE, schema=schema)
