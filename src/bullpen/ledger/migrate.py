"""Make the ledger's tables, and bring old ones up to date.

In: a database, perhaps role names. Out: the tables of this version, with policies and grants where roles are named; or
the same as SQL text for somebody else to run. Safe to run again, and in many processes at once: one works, others wait.
Elsewhere: what the tables are (`tables`), each step (`migrations/versions`), which step belongs to what (`parts`), the
policies (`security`), whether this is needed (`version`).
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa
from alembic import command
from alembic.config import Config

from bullpen.errors import LedgerNotReady
from bullpen.ledger import security
from bullpen.ledger.database import Database, DialectName, check_identifier, qualified
from bullpen.ledger.parts import PARTS, Part, check_parts, steps_for
from bullpen.ledger.security import VERSION_TABLE, Roles
from bullpen.ledger.tables import SCHEMA
from bullpen.ledger.version import head, known, read_version

_HEAD = "head"
# Any number that no other program is likely to have chosen: it keeps two migrations apart.
_LOCK = 0x62756C6C70656E


async def migrate(
    database: Database,
    *,
    roles: Roles | None = None,
    create_roles: bool = False,
    parts: Iterable[str] | None = None,
) -> None:
    """Bring the tables to this program's version; with roles also create policies and grants.

    `parts` are those whose tables are made if they are missing (None: all). Parts that are there stay, and are brought
    to this version too.
    """
    wanted = check_parts(PARTS if parts is None else parts)
    _refuse_roles_on_sqlite(database.dialect, roles)
    async with database.migration() as connection:
        there = await connection.run_sync(_upgrade, database.schema, wanted)
        if roles is not None:
            for statement in security.statements(database.schema, roles, create_roles=create_roles, parts=there):
                await connection.exec_driver_sql(statement)


def render_sql(
    dialect: DialectName = "postgresql",
    *,
    schema: str = SCHEMA,
    roles: Roles | None = None,
    create_roles: bool = False,
    parts: Iterable[str] | None = None,
) -> str:
    """What `migrate` would run on an empty database, as text."""
    _refuse_roles_on_sqlite(dialect, roles)
    check_identifier("schema", schema)
    wanted = check_parts(PARTS if parts is None else parts)
    buffer = io.StringIO()
    config = _config(schema, steps_for(wanted, (), None), output_buffer=buffer)
    config.attributes["dialect"] = dialect
    command.upgrade(config, _HEAD, sql=True)
    if roles is not None:
        rules = security.statements(schema, roles, create_roles=create_roles, parts=wanted)
        buffer.writelines(f"{line};\n\n" for line in rules)
    text = re.sub(
        rf"CREATE TABLE (?=(?:{schema}\.)?{VERSION_TABLE}\b)", "CREATE TABLE IF NOT EXISTS ", buffer.getvalue()
    )
    # Alembic notes every step as if for the first time. One note at the end may be written again and again; versions
    # are numbers of four digits, and a newer one stays.
    version = f"{schema}.{VERSION_TABLE}" if dialect == "postgresql" else VERSION_TABLE
    text = re.sub(rf"^(?:INSERT INTO|UPDATE) {re.escape(version)} [^;]*;\n+", "", text, flags=re.MULTILINE)
    note = (
        f"DELETE FROM {version} WHERE version_num < '{head()}';\n\n"
        f"INSERT INTO {version} (version_num) SELECT '{head()}' WHERE NOT EXISTS (SELECT 1 FROM {version});\n\n"
    )
    before, commit, after = text.rpartition("COMMIT;")
    return before + note + commit + after if commit else text + note


def _refuse_roles_on_sqlite(dialect: str, roles: Roles | None) -> None:
    if roles is not None and dialect != "postgresql":
        raise LedgerNotReady(
            "roles and row-level security need PostgreSQL; on SQLite only the queries of bullpen separate tenants"
        )


def _upgrade(connection: sa.Connection, schema: str, wanted: frozenset[Part]) -> frozenset[Part]:
    """The parts that are there afterwards."""
    is_postgres = connection.dialect.name == "postgresql"
    if is_postgres:
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
    current, installed = read_version(connection, schema if is_postgres else None)
    parts = wanted | installed
    config = _config(schema, steps_for(parts, installed, current))
    config.attributes["connection"] = connection
    if current in known() and not wanted <= installed:
        # From the beginning once more: steps have nothing to do for parts that are there.
        connection.exec_driver_sql(f"DELETE FROM {qualified(connection.dialect.name, schema, VERSION_TABLE)}")
    command.upgrade(config, _HEAD)
    return parts


def _config(schema: str, steps: dict[str, frozenset[Part]], **options: Any) -> Config:
    config = Config(**options)
    config.set_main_option("script_location", "bullpen.ledger:migrations")
    config.set_main_option("path_separator", "os")
    config.attributes["schema"] = schema
    config.attributes["steps"] = steps
    return config
