"""Which version and which parts the ledger's tables have, and which this program needs.

In: a database. Out: nothing, or LedgerNotReady. Every process asks this when it starts, most never migrate: so nothing
here loads the library that does, which with what it needs itself is 15 MB. Elsewhere: changing them (`migrate`).
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from importlib.resources import files

import sqlalchemy as sa

from bullpen.errors import LedgerNotReady
from bullpen.ledger.database import Database
from bullpen.ledger.parts import PARTS, Part, check_parts, command_for, parts_of
from bullpen.ledger.security import VERSION_TABLE

__all__ = ["check_version", "head", "installed", "known", "read_version"]


async def check_version(database: Database, needed: Collection[Part] = ()) -> None:
    """Raise LedgerNotReady unless the tables, those of these parts among them, are at least those of this program.

    A newer version passes: migrations only add during a rolling upgrade, and old processes go on working.
    """
    current, there = await _read(database)
    if current is None:
        command = command_for(check_parts(needed)) if needed else command_for()
        rest = ", or `bullpen migrate` for all tables" if needed else ""
        raise LedgerNotReady(f"{database.address} has no ledger tables yet; run `{command}`{rest}", command=command)
    if current in known() and current != head():
        command = command_for(there, everything=len(there) == len(PARTS))
        raise LedgerNotReady(
            f"{database.address} is at version {current}, this program needs {head()}; run `{command}`",
            command=command,
        )
    missing = [part for part in PARTS if part in needed and part not in there]
    if missing:
        names, command = " and ".join(missing), command_for(missing)
        raise LedgerNotReady(f"{database.address} has no tables for {names}; run `{command}`", command=command)


async def installed(database: Database) -> frozenset[Part]:
    """The parts whose tables are there."""
    return (await _read(database))[1]


async def _read(database: Database) -> tuple[str | None, frozenset[Part]]:
    async with database.transaction_without_tenant() as connection:
        return await connection.run_sync(read_version, database.schema if database.is_postgres else None)


def read_version(connection: sa.Connection, schema: str | None) -> tuple[str | None, frozenset[Part]]:
    """The version, None before the first migration, and the parts that are there."""
    names = set(sa.inspect(connection).get_table_names(schema=schema))
    if VERSION_TABLE not in names:
        return None, frozenset()
    table = f"{schema}.{VERSION_TABLE}" if schema else VERSION_TABLE
    current: str | None = connection.execute(sa.text(f"SELECT max(version_num) FROM {table}")).scalar_one()
    return current, frozenset() if current is None else parts_of(names)


@cache
def known() -> tuple[str, ...]:
    """All versions that this program knows, in order: each step's file begins with its number."""
    steps = files("bullpen.ledger").joinpath("migrations", "versions").iterdir()
    return tuple(sorted(step.name[:4] for step in steps if step.name[:4].isdecimal()))


def head() -> str:
    """The version that this program brings."""
    return known()[-1]
