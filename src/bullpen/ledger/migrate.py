"""Make the ledger's tables, and bring old ones up to date.

In: a database, perhaps role names. Out: the tables of this version, with policies and grants where roles are named; or
the same as SQL text for somebody else to run. Safe to run again, and in many processes at once: one works, others wait.
Elsewhere: what the tables are (`tables`), each step (`migrations/versions`), the policies (`security`),
whether this is needed (`version`).
"""

from __future__ import annotations

import io
import re
from typing import Any

import sqlalchemy as sa
from alembic import command
from alembic.config import Config

from bullpen.errors import LedgerNotReady
from bullpen.ledger import security
from bullpen.ledger.database import Database, DialectName, check_identifier
from bullpen.ledger.security import VERSION_TABLE, Roles
from bullpen.ledger.tables import SCHEMA
from bullpen.ledger.version import head

_HEAD = "head"
# Any number that no other program is likely to have chosen: it keeps two migrations apart.
_LOCK = 0x62756C6C70656E


async def migrate(database: Database, *, roles: Roles | None = None, create_roles: bool = False) -> None:
    """Bring the tables to this program's version; with roles also create policies and grants."""
    _refuse_roles_on_sqlite(database.dialect, roles)
    async with database.migration() as connection:
        await connection.run_sync(_upgrade, database.schema)
        if roles is not None:
            for statement in security.statements(database.schema, roles, create_roles=create_roles):
                await connection.exec_driver_sql(statement)


def render_sql(
    dialect: DialectName = "postgresql",
    *,
    schema: str = SCHEMA,
    roles: Roles | None = None,
    create_roles: bool = False,
) -> str:
    """What `migrate` would run on an empty database, as text."""
    _refuse_roles_on_sqlite(dialect, roles)
    check_identifier("schema", schema)
    buffer = io.StringIO()
    config = _config(schema, output_buffer=buffer)
    config.attributes["dialect"] = dialect
    command.upgrade(config, _HEAD, sql=True)
    if roles is not None:
        buffer.writelines(f"{line};\n\n" for line in security.statements(schema, roles, create_roles=create_roles))
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
            "roles and row-level security need PostgreSQL; on SQLite tenants are told apart by our queries only"
        )


def _upgrade(connection: sa.Connection, schema: str) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
    config = _config(schema)
    config.attributes["connection"] = connection
    command.upgrade(config, _HEAD)


def _config(schema: str, **options: Any) -> Config:
    config = Config(**options)
    config.set_main_option("script_location", "bullpen.ledger:migrations")
    config.set_main_option("path_separator", "os")
    config.attributes["schema"] = schema
    return config
