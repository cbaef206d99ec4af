"""The tables come into being the same way everywhere, once, and are what the code says they are."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from bullpen.errors import InvalidOption, LedgerNotReady
from bullpen.ledger import Ledger, Roles, migrate, tables, version
from bullpen.ledger.security import VERSION_TABLE
from tests.contracts.outbox_repository import execute
from tests.databases import ROLES, MakeLedger, item


@pytest.fixture(params=["postgresql", "sqlite"])
def empty_url(request: pytest.FixtureRequest, sqlite_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{sqlite_path}"
    url: str = request.getfixturevalue("empty_postgres_url")
    return url


def differences(connection: sa.Connection, schema: str | None) -> list[Any]:
    """What a further migration would have to do to make the database equal to `tables`."""
    wanted = sa.MetaData(schema=schema)
    own: Any = schema  # None is an answer here, which the types do not say
    blank: Any = schema or sa.schema.BLANK_SCHEMA
    for table in tables.metadata.sorted_tables:
        table.to_metadata(wanted, schema=own, referred_schema_fn=lambda *_: blank)
    options = {
        "include_schemas": True,
        "version_table": VERSION_TABLE,
        "version_table_schema": schema,
        "compare_type": True,
        "include_name": lambda name, kind, parents: kind != "schema" or name == schema,
        # SQLite's own helper for `seq` is no part of the definition that both databases share, and of its indexes on
        # expressions SQLAlchemy reads nothing; the next test looks at them.
        "include_object": lambda thing, name, kind, reflected, other: (
            schema is not None or name not in ("ux_outbox_seq", "ix_outbox_tenant_due")
        ),
    }
    return list(compare_metadata(MigrationContext.configure(connection, opts=options), wanted))


@pytest.mark.filterwarnings("ignore:Skipped unsupported reflection of expression-based index")
@pytest.mark.filterwarnings("ignore:autogenerate skipping metadata-specified expression-based index")
async def test_the_sum_of_the_migrations_is_the_definition_of_the_tables(ledger: Ledger) -> None:
    """Otherwise a statement that works on a fresh database fails on one that was upgraded, or the other way round."""
    schema = ledger.database.schema if ledger.database.is_postgres else None

    async with ledger.database.engine.connect() as connection:
        found = await connection.run_sync(differences, schema)

    assert found == []


async def test_partial_indexes_have_the_condition_of_the_definition(ledger: Ledger) -> None:
    """Comparing migrations does not look at conditions, and without them a claim would walk over history."""
    if ledger.database.is_postgres:
        query = "SELECT indexname, indexdef FROM pg_indexes WHERE tablename = 'integration_outbox'"
    else:
        query = "SELECT name, sql FROM sqlite_master WHERE tbl_name = 'integration_outbox' AND type = 'index'"
    stored = {name: (text or "").partition(" WHERE ")[2] for name, text in await execute(ledger, query)}

    for index in tables.outbox.indexes:
        wanted = index.dialect_options["postgresql"]["where"]
        for word in ("PENDING", "FAILED", "CLAIMED", "SENT", "parked", "ordering_key"):
            assert (word in stored[str(index.name)]) == (wanted is not None and word in str(wanted)), index.name


@pytest.mark.requirement("O-9", "O-22")
async def test_migrating_again_changes_nothing(empty_url: str, make_ledger: MakeLedger) -> None:
    ledger = make_ledger(empty_url)
    await ledger.migrate()
    stored = await ledger.outbox.enqueue(item())

    await ledger.migrate()

    assert await ledger.outbox.get(str(stored.id)) is not None
    await ledger.check()


@pytest.mark.requirement("O-22")
async def test_processes_that_migrate_at_once_do_not_disturb_each_other(
    empty_url: str, make_ledger: MakeLedger
) -> None:
    ledgers = [make_ledger(empty_url) for _ in range(4)]

    await asyncio.gather(*(ledger.migrate() for ledger in ledgers))

    await ledgers[0].check()


@pytest.mark.requirement("O-22")
async def test_a_migration_may_take_longer_than_other_transactions(
    empty_postgres_url: str, make_ledger: MakeLedger
) -> None:
    """It waits for another one here; an index over a large table takes its time in the same way."""
    holder = make_ledger(empty_postgres_url)
    # As behind a pooler: else PostgreSQL itself would end what stands still for twice that time.
    ledger = make_ledger(empty_postgres_url, timeout_ms=200, prepared_statements=False)
    async with holder.database.transaction() as connection:
        await connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({migrate._LOCK})")
        migrating = asyncio.create_task(ledger.migrate())
        ended, _ = await asyncio.wait([migrating], timeout=0.6)
        assert not ended

    await migrating
    await holder.check()


@pytest.mark.requirement("O-22")
async def test_the_printed_statements_do_the_same_and_may_be_run_twice(
    empty_postgres_url: str, make_ledger: MakeLedger
) -> None:
    text = migrate.render_sql("postgresql", roles=ROLES)

    with psycopg.connect(empty_postgres_url, autocommit=True) as connection:
        connection.execute(text.encode())
        connection.execute(text.encode())

    ledger = make_ledger(empty_postgres_url)
    await version.check_version(ledger.database)
    await ledger.migrate()  # and goes on from there


async def test_printed_statements_for_sqlite_run_too(sqlite_path: Path, make_ledger: MakeLedger) -> None:
    connection = sqlite3.connect(sqlite_path)
    connection.executescript(migrate.render_sql("sqlite"))
    connection.close()

    ledger = make_ledger(f"sqlite:///{sqlite_path}")
    await ledger.check()
    assert (await ledger.outbox.enqueue(item())).created


def test_the_versions_are_those_of_the_steps() -> None:
    """Read from the names of files, so that a process that never migrates need not load what does."""
    config = Config()
    config.set_main_option("script_location", "bullpen.ledger:migrations")
    steps = [step.revision for step in ScriptDirectory.from_config(config).walk_revisions()]

    assert list(version.known()) == sorted(steps)
    assert version.head() == ScriptDirectory.from_config(config).get_current_head()


async def test_another_schema_is_possible(empty_postgres_url: str, make_ledger: MakeLedger) -> None:
    ledger = make_ledger(empty_postgres_url, schema="billing")
    await ledger.migrate()

    await ledger.outbox.enqueue(item())

    async with ledger.database.transaction() as connection:
        assert (await connection.exec_driver_sql("SELECT count(*) FROM billing.integration_outbox")).scalar_one() == 1
        assert (
            await connection.exec_driver_sql("SELECT to_regclass('core_outbox.integration_outbox')")
        ).scalar() is None
    assert len(await ledger.outbox.find()) == 1


async def test_missing_tables_say_what_to_do(empty_url: str, make_ledger: MakeLedger) -> None:
    ledger = make_ledger(empty_url)

    with pytest.raises(LedgerNotReady, match="bullpen migrate"):
        await ledger.check()
    with pytest.raises(LedgerNotReady, match="bullpen migrate"):
        await ledger.outbox.enqueue(item())


async def test_tables_of_an_older_version_are_refused_and_newer_ones_are_not(ledger: Ledger) -> None:
    """Migrations only add during a rolling upgrade: old processes go on beside the new ones."""
    stored = ledger.database.table(VERSION_TABLE)

    await execute(ledger, f"UPDATE {stored} SET version_num = '9999'")

    await ledger.check()
    await execute(ledger, f"UPDATE {stored} SET version_num = '0001'")
    with pytest.raises(LedgerNotReady, match=f"is at version 0001, this program needs {version.head()}"):
        await ledger.check()
    await execute(ledger, f"DELETE FROM {stored}")
    with pytest.raises(LedgerNotReady, match="no ledger tables"):
        await ledger.check()


async def test_roles_need_postgres(sqlite_url: str, make_ledger: MakeLedger) -> None:
    with pytest.raises(InvalidOption, match="row-level security"):
        make_ledger(sqlite_url, roles=ROLES)
    with pytest.raises(LedgerNotReady, match="need PostgreSQL"):
        migrate.render_sql("sqlite", roles=ROLES)


@pytest.mark.parametrize("name", ["", "Bad", "a-b", "x; DROP TABLE y", "1a", 'a"b'])
def test_names_that_would_have_to_be_quoted_are_refused(name: str) -> None:
    """They become part of statements."""
    with pytest.raises(InvalidOption, match="lower-case letters"):
        migrate.render_sql(schema=name)
    with pytest.raises(InvalidOption, match="lower-case letters"):
        Roles(tenant=name, worker="w", service="s")


def test_each_duty_needs_a_role_of_its_own() -> None:
    with pytest.raises(InvalidOption, match="three different roles"):
        Roles(tenant="same", worker="other", service="same")
