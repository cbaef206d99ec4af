"""A ledger with some of its parts: their tables alone, the rest later, and texts that say what is missing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from bullpen import Bullpen
from bullpen.cli.commands import run
from bullpen.errors import InvalidOption, LedgerNotReady
from bullpen.ledger import Ledger, migrate, tables, version
from bullpen.ledger.messages import SqlMessages
from bullpen.ledger.parts import PARTS, command_that_makes, steps_for, table_part
from bullpen.ops.alert_options import SymptomLimits
from bullpen.ops.doctor import Level, examine
from bullpen.ops.exporter import LedgerSource
from bullpen.ops.symptoms import ledger_symptoms
from bullpen.redis import Connection
from bullpen.runs import Runs
from bullpen.settings import Settings
from bullpen.testing.postgres import PostgresServer
from tests.databases import ROLES, MakeLedger, item
from tests.flows._cli import cli
from tests.runs.kit import payload


@pytest.fixture(params=["postgresql", "sqlite"])
def empty_url(request: pytest.FixtureRequest, sqlite_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{sqlite_path}"
    url: str = request.getfixturevalue("empty_postgres_url")
    return url


async def names_in(ledger: Ledger) -> set[str]:
    schema = ledger.database.schema if ledger.database.is_postgres else None
    async with ledger.database.engine.connect() as connection:
        found = await connection.run_sync(lambda c: sa.inspect(c).get_table_names(schema=schema))
    return {name for name in found if not name.startswith("sqlite_")}


async def shape(ledger: Ledger) -> Any:
    """Everything that a migration makes: tables, columns, indexes, triggers, functions."""
    if not ledger.database.is_postgres:
        query = "SELECT type, name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_%' ORDER BY 1, 2"
    else:
        query = (
            "SELECT 'column', table_name || '.' || column_name, data_type FROM information_schema.columns "
            "WHERE table_schema = 'core_outbox' "
            "UNION ALL SELECT 'index', indexname, indexdef FROM pg_indexes WHERE schemaname = 'core_outbox' "
            "UNION ALL SELECT 'trigger', tgname || ' ' || CAST(CAST(tgrelid AS regclass) AS text), "
            "pg_get_triggerdef(oid) FROM pg_trigger WHERE NOT tgisinternal "
            "UNION ALL SELECT 'function', CAST(CAST(oid AS regprocedure) AS text), prosrc FROM pg_proc "
            "WHERE pronamespace = CAST('core_outbox' AS regnamespace) ORDER BY 1, 2"
        )
    async with ledger.database.engine.connect() as connection:
        return [tuple(row) for row in await connection.execute(sa.text(query))]


@pytest.mark.parametrize("chosen", [["outbox"], ["runs"], ["messages", "alerts"], ["workflows", "projector"]])
async def test_only_the_tables_of_the_named_parts_are_made(
    empty_url: str, make_ledger: MakeLedger, chosen: list[str]
) -> None:
    ledger = make_ledger(empty_url)

    await ledger.migrate(parts=chosen)

    wanted = {"outbox", *chosen}
    known = {table.name for table in tables.metadata.sorted_tables}
    assert await names_in(ledger) & known == {name for name in known if table_part(name) in wanted}
    assert await ledger.parts() == wanted
    await ledger.check()
    await ledger.outbox.enqueue(item())


async def test_parts_that_are_added_one_by_one_make_the_whole(empty_url: str, make_ledger: MakeLedger) -> None:
    ledger = make_ledger(empty_url)

    for part in ("outbox", "alerts", "runs", "projector", "workflows", "messages"):
        await ledger.migrate(parts=[part])
    by_parts = await shape(ledger)
    await ledger.migrate()

    assert await ledger.parts() == set(PARTS)
    assert await shape(ledger) == by_parts
    other = make_ledger(f"{empty_url}.other" if empty_url.startswith("sqlite") else empty_url, schema="core_outbox")
    if not ledger.database.is_postgres:  # a second file: the same as made at once, but for the order of statements
        await other.migrate()
        assert sorted(map(str, await shape(other))) == sorted(map(str, by_parts))


async def test_adding_a_part_keeps_what_is_stored(empty_url: str, make_ledger: MakeLedger) -> None:
    ledger = make_ledger(empty_url)
    await ledger.migrate(parts=["outbox"])
    await ledger.outbox.enqueue(item())
    identity = await ledger.transactions.ledger_id()

    await ledger.migrate(parts=["runs"])

    ledger.database.ledger_id = None
    assert await ledger.transactions.ledger_id() == identity
    assert sum((await ledger.outbox.counts()).values()) == 1
    assert await ledger.parts() == {"outbox", "runs"}


async def test_an_old_ledger_of_some_parts_is_brought_up_to_date_and_stays_so(
    empty_url: str, make_ledger: MakeLedger
) -> None:
    """An upgrade with a part's name touches the others that are there, and makes none that is not."""
    ledger = make_ledger(empty_url)
    await ledger.migrate(parts=["outbox", "workflows"])
    async with ledger.database.engine.begin() as connection:  # as 0007 left it
        turns = ledger.database.table("bullpen_turns")
        await connection.execute(sa.text(f"DROP TABLE {turns}"))
        await connection.execute(
            sa.text(f"UPDATE {ledger.database.table('bullpen_ledger_version')} SET version_num = '0007'")
        )
        if not ledger.database.is_postgres:
            await connection.execute(sa.text("ALTER TABLE bullpen_audit DROP COLUMN login"))

    with pytest.raises(LedgerNotReady, match=r"0007.*`bullpen migrate --for outbox,workflows`"):
        await ledger.check()
    await ledger.migrate(parts=["outbox"])

    await ledger.check()
    assert "bullpen_turns" in await names_in(ledger)
    assert await ledger.parts() == {"outbox", "workflows"}


async def test_roles_are_given_rights_on_what_is_there(
    postgres_server: PostgresServer, empty_postgres_url: str, make_ledger: MakeLedger
) -> None:
    ledger = make_ledger(empty_postgres_url, roles=ROLES)
    await ledger.migrate(parts=["outbox"])
    name = sa.make_url(empty_postgres_url).database
    assert name is not None
    as_tenant = make_ledger(postgres_server.url(name, role=ROLES.tenant), roles=ROLES, duty="tenant")
    as_service = make_ledger(postgres_server.url(name, role=ROLES.service), roles=ROLES, duty="service")

    await as_tenant.check()
    await as_service.outbox.enqueue(item())
    assert await ledger_symptoms(as_service, SymptomLimits()) == []

    await ledger.migrate(parts=["runs"])
    as_tenant.use("runs")
    await as_tenant.check()
    connection = Connection("redis://127.0.0.1:1")  # never reached
    await Runs(as_tenant, connection).service.submit(payload())


async def test_a_process_says_which_parts_it_lacks_before_it_starts(
    empty_url: str, make_ledger: MakeLedger, tmp_path: Path, redis_url: str
) -> None:
    settings = Settings.load(environ={}, start=tmp_path, ledger_url=empty_url, redis_url=redis_url)
    async with Bullpen(settings=settings) as app:
        app.use_runs().declare("report")
        with pytest.raises(LedgerNotReady, match=r"no ledger tables yet; run `bullpen migrate --for outbox,runs`"):
            await app.prepare()
        await app.ledger.migrate(parts=["outbox"])
        with pytest.raises(LedgerNotReady, match=r"no tables for runs; run `bullpen migrate --for runs`"):
            await app.prepare()
        await app.ledger.migrate(parts=["runs"])
        await app.prepare()
        _ = app.use_messages()
        with pytest.raises(LedgerNotReady, match=r"no tables for messages; run `bullpen migrate --for messages`"):
            await app.prepare()


async def test_a_query_for_a_part_that_is_missing_says_what_to_do(empty_url: str, make_ledger: MakeLedger) -> None:
    ledger = make_ledger(empty_url)
    await ledger.migrate(parts=["outbox"])

    with pytest.raises(LedgerNotReady, match="bullpen migrate --for runs"):
        await ledger.runs.counts()
    with pytest.raises(LedgerNotReady, match="bullpen migrate --for runs"):
        await Runs(ledger, Connection("redis://127.0.0.1:1")).service.submit(payload())
    with pytest.raises(LedgerNotReady, match="bullpen migrate --for messages"):
        await SqlMessages(ledger.database).counts()
    with pytest.raises(LedgerNotReady, match="bullpen migrate --for alerts") as told:
        await ledger.incidents.open()
    assert told.value.command == "bullpen migrate --for alerts"


async def test_whoever_watches_shows_what_is_there(empty_url: str, make_ledger: MakeLedger, redis_url: str) -> None:
    ledger = make_ledger(empty_url)
    connection = Connection(redis_url)
    [advice] = [each for each in await examine(None, "bull", ledger) if each.check == "schema"]
    assert (advice.level, advice.fix) == (Level.BROKEN, "bullpen migrate")
    await ledger.migrate(parts=["outbox", "messages"])

    source = LedgerSource(ledger)
    names = {metric.name for metric in await source.read()}
    found = await examine(connection, "bull", ledger)
    await connection.aclose()
    await ledger.migrate(parts=["runs"])
    later = {metric.name for metric in await source.read()}

    assert "bullpen_messages" in names and "bullpen_outbox_dead_rows" in names
    assert "bullpen_runs" not in names
    assert "bullpen_runs" in later  # an exporter runs on while parts are added
    [advice] = [each for each in found if each.check == "schema"]
    assert (advice.level, advice.message) == (
        Level.GOOD,
        "its tables are those of this program: messages, outbox",
    )
    assert not [each for each in found if each.level is Level.BROKEN]


@pytest.mark.parametrize("part", PARTS)
def test_dead_letters_are_counted_whatever_parts_are_there(
    part: str, sqlite_path: Path, redis_url: str, tmp_path: Path
) -> None:
    given = {"BULLPEN_DATABASE_URL": f"sqlite:///{sqlite_path}", "BULLPEN_REDIS_URL": redis_url}
    assert cli("migrate", "--for", part, cwd=tmp_path, env=given).code == 0

    answer = cli("dead-letters", "stats", cwd=tmp_path, env=given)

    assert (answer.code, answer.err.strip()) == (0, "no dead letters anywhere")


def test_the_printed_statements_are_those_of_the_parts(
    postgres_server: PostgresServer, empty_postgres_url: str, make_ledger: MakeLedger
) -> None:
    text = migrate.render_sql(roles=ROLES, parts=["runs"])
    name = sa.make_url(empty_postgres_url).database
    assert name is not None

    for _ in range(2):  # may be run again
        postgres_server.execute(text, database=name)

    async def parts() -> frozenset[str]:
        async with Ledger(postgres_server.url(name)) as ledger:
            return await ledger.parts()

    assert "bullpen_messages" not in text
    assert asyncio.run(parts()) == {"outbox", "runs"}


def test_every_step_and_table_belongs_to_a_part() -> None:
    assert steps_for(PARTS, (), None).keys() == set(version.known())
    assert all(parts for parts in steps_for(PARTS, (), None).values())
    assert {table_part(table.name) for table in tables.metadata.sorted_tables} == set(PARTS)


def test_a_part_that_nobody_knows_is_refused(sqlite_path: Path) -> None:
    with pytest.raises(InvalidOption, match="some of outbox, runs"):
        migrate.render_sql(parts=["run"])
    assert command_that_makes('relation "core_outbox.bullpen_runs" does not exist') == "bullpen migrate --for runs"
    assert command_that_makes("no such table: integration_outbox") == "bullpen migrate"


class TestCommand:
    @pytest.fixture(autouse=True)
    def _quiet(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NO_COLOR", "1")

    def test_parts_are_named_with_commas(self, sqlite_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        url = f"sqlite:///{sqlite_path}"

        assert run(["migrate", "--database", url, "--for", "outbox, workflows"]) == 0
        assert capsys.readouterr().out.rstrip().endswith("is up to date: outbox, workflows")
        assert run(["migrate", "--database", url, "--for", "runs"]) == 0
        assert capsys.readouterr().out.rstrip().endswith("is up to date: outbox, runs, workflows")
        assert run(["migrate", "--database", url]) == 0
        assert capsys.readouterr().out.rstrip().endswith(f"is up to date: {', '.join(PARTS)}")

    def test_wrong_parts_are_told(self, sqlite_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        url = f"sqlite:///{sqlite_path}"

        assert run(["migrate", "--database", url, "--for", "run"]) != 0
        assert "outbox, runs, messages" in capsys.readouterr().err.replace("\n", " ")
        assert run(["migrate", "--database", url, "--for", " , "]) == 2
        assert not sqlite_path.exists()

    def test_the_statements_are_printed_for_parts(self, capsys: pytest.CaptureFixture[str], sqlite_path: Path) -> None:
        assert run(["migrate", "--database", f"sqlite:///{sqlite_path}", "--for", "outbox", "--print-sql"]) == 0
        text = capsys.readouterr().out
        assert "integration_outbox" in text and "bullpen_runs" not in text
