"""Reaching the database: addresses, faults, and what becomes of them."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa

from bullpen.errors import DatabaseUnavailable, InvalidOption, LedgerError, NotConfigured
from bullpen.ledger import Ledger
from bullpen.ledger.database import Database, prepare_sqlite
from bullpen.testing.postgres import PostgresServer
from tests.contracts.outbox_repository import execute
from tests.databases import MakeLedger, item


@pytest.mark.parametrize(
    "url", ["mysql://host/db", "nonsense", "sqlite://", "sqlite:///:memory:", "redis://localhost", ""]
)
def test_an_address_that_cannot_hold_a_ledger_is_refused(url: str) -> None:
    with pytest.raises(InvalidOption, match="url"):
        Ledger(url)


def test_a_refused_address_does_not_show_its_password() -> None:
    with pytest.raises(InvalidOption) as refused:
        Ledger("mysql://ada:s3cret@host/db")

    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize("url", ["postgres://ada:s3cret@host/db", "postgresql+psycopg://ada:s3cret@host/db"])
async def test_all_spellings_of_postgres_mean_the_one_driver(url: str) -> None:
    async with Ledger(url) as ledger:
        assert ledger.database.url.drivername == "postgresql+psycopg"
        assert "s3cret" not in ledger.database.address


@pytest.mark.parametrize(
    ("option", "value"), [("pool_size", 0), ("timeout_ms", 0), ("duty", "boss"), ("schema", "A-b")]
)
def test_options_are_checked_at_the_door(option: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match=option):
        Ledger(f"sqlite:///{tmp_path}/x.db", **{option: value})  # type: ignore[arg-type]  # wrong on purpose


async def test_a_server_that_is_away_is_unavailable(tmp_path: Path, make_ledger: MakeLedger) -> None:
    ledger = make_ledger(f"postgresql://nobody@/none?host={tmp_path}")

    with pytest.raises(DatabaseUnavailable):
        await ledger.outbox.enqueue(item())


async def test_a_restart_of_the_server_is_survived(make_ledger: MakeLedger) -> None:
    """Pooled connections are dead afterwards; the first use tells so, the next works."""
    with PostgresServer.start(durable=True) as server:
        ledger = make_ledger(server.url())
        await ledger.migrate()
        await ledger.outbox.enqueue(item(1))

        server.kill()
        with pytest.raises(DatabaseUnavailable):
            await ledger.outbox.enqueue(item(2))
        server.restart()

        async with asyncio.timeout(10):
            while True:
                try:
                    stored = await ledger.outbox.enqueue(item(3))
                    break
                except DatabaseUnavailable:
                    continue
        assert stored.created
        await ledger.aclose()


async def test_a_database_that_does_not_answer_in_time_is_unavailable(
    postgres_url: str, make_ledger: MakeLedger
) -> None:
    holder, waiter = make_ledger(postgres_url), make_ledger(postgres_url, timeout_ms=200)

    async with holder.database.transaction() as connection:
        await connection.exec_driver_sql("LOCK TABLE core_outbox.integration_outbox IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(DatabaseUnavailable, match="time ran out"):
            await waiter.outbox.find()


async def test_a_locked_sqlite_file_is_unavailable(sqlite_url: str, make_ledger: MakeLedger) -> None:
    holder, waiter = make_ledger(sqlite_url), make_ledger(sqlite_url, timeout_ms=200)

    async with holder.database.transaction():
        with pytest.raises(DatabaseUnavailable):
            await waiter.outbox.enqueue(item())


async def test_an_exhausted_pool_says_so(postgres_url: str, make_ledger: MakeLedger) -> None:
    impatient, ledger = make_ledger(postgres_url, pool_size=1, timeout_ms=200), make_ledger(postgres_url, pool_size=1)

    async with impatient.database.engine.connect():
        with pytest.raises(DatabaseUnavailable):
            await impatient.outbox.find()
    with pytest.raises(NotConfigured, match="pool_size 1 is too small"):
        await ledger.check(connections=3)


async def test_a_mistake_in_a_statement_is_no_fault_of_the_connection(ledger: Ledger) -> None:
    with pytest.raises(LedgerError, match="refused a statement") as refused:
        await execute(
            ledger,
            "UPDATE {outbox} SET status = 'NONSENSE', max_attempts = 0 WHERE 1 = 'x'::text::int / 0"
            if ledger.database.is_postgres
            else "INSERT INTO {outbox} (status) VALUES ('NONSENSE')",
        )

    assert not isinstance(refused.value, DatabaseUnavailable)


async def test_an_error_rolls_everything_back(ledger: Ledger) -> None:
    async def order_and_fail() -> None:
        async with ledger.database.transaction() as connection:
            await ledger.enqueuer.enqueue(connection, item())
            raise RuntimeError("business says no")

    with pytest.raises(RuntimeError, match="business"):
        await order_and_fail()

    assert await ledger.outbox.find() == []


async def test_sqlite_is_durable_and_does_not_wait_for_readers(sqlite_url: str, make_ledger: MakeLedger) -> None:
    ledger = make_ledger(sqlite_url)

    async with ledger.database.engine.connect() as connection:
        pragmas = {
            name: (await connection.exec_driver_sql(f"PRAGMA {name}")).scalar()
            for name in ("journal_mode", "synchronous", "busy_timeout", "foreign_keys")
        }

    assert pragmas == {"journal_mode": "wal", "synchronous": 2, "busy_timeout": 5_000, "foreign_keys": 1}


@pytest.mark.many
def test_a_new_sqlite_file_may_be_opened_by_many_at_once(tmp_path: Path) -> None:
    """As the processes of one program do at its first start. One in twenty such starts failed."""
    together = threading.Barrier(6)

    def use(engine: sa.Engine) -> None:
        together.wait(10)
        with engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE IF NOT EXISTS once (id)")
        engine.dispose()

    with ThreadPoolExecutor(6) as pool:
        for number in range(60):
            engines = [sa.create_engine(f"sqlite:///{tmp_path}/{number}.sqlite3") for _ in range(6)]
            for engine in engines:
                prepare_sqlite(engine)
            list(pool.map(use, engines))  # raises what one of them raised


async def test_statements_can_be_left_unprepared_behind_a_pooler(postgres_url: str, make_ledger: MakeLedger) -> None:
    ledger = make_ledger(postgres_url, prepared_statements=False, pool_size=1)

    for _ in range(8):
        await ledger.outbox.find()

    async with ledger.database.transaction() as connection:
        prepared = (await connection.exec_driver_sql("SELECT count(*) FROM pg_prepared_statements")).scalar()
    assert prepared == 0


async def test_readers_of_sqlite_do_not_wait_for_who_writes(sqlite_url: str, make_ledger: MakeLedger) -> None:
    """A dispatcher looks many times a second, and business transactions are not always short.

    This one ends only after the reads: one that waited for it would wait in vain.
    """
    writer, reader = make_ledger(sqlite_url), make_ledger(sqlite_url)
    await writer.outbox.enqueue(item())

    async with writer.database.transaction():
        assert await reader.outbox.due_types() == ["webhook:partnerX"]
        assert await reader.outbox.due_tenants("webhook:partnerX") == [""]
        assert sum((await reader.outbox.counts()).values()) == 1
        assert await reader.outbox.expired() == []
        assert await reader.destinations.troubled() == {}


async def test_a_statement_alone_is_a_transaction_without_ceremony(postgres_url: str, make_ledger: MakeLedger) -> None:
    """Three round trips became one, and the connection goes back to the pool as it was."""
    ledger = make_ledger(postgres_url, pool_size=1)
    own_state = "SELECT xact_start = query_start FROM pg_stat_activity WHERE pid = pg_backend_pid()"

    async with ledger.database.statement() as connection:
        assert (await connection.exec_driver_sql(own_state)).scalar() is True
    async with ledger.database.transaction() as connection:
        await connection.exec_driver_sql("SELECT pg_sleep(0.01)")
        assert (await connection.exec_driver_sql(own_state)).scalar() is False


@pytest.mark.requirement("X-76")
async def test_locks_of_a_machine_that_vanished_are_released(postgres_url: str, make_ledger: MakeLedger) -> None:
    """Its connection stays open and its transaction idle: PostgreSQL ends it by the ledger's own time limit."""
    gone, here = make_ledger(postgres_url, timeout_ms=500), make_ledger(postgres_url, timeout_ms=20_000)
    await here.outbox.enqueue(item())
    async with gone.database.engine.connect() as connection:
        await connection.exec_driver_sql("UPDATE core_outbox.integration_outbox SET last_error = 'half written'")

        # Waits for the lock, so it returns as soon as that is gone.
        async with here.database.transaction() as waiting:
            await waiting.exec_driver_sql("SELECT id FROM core_outbox.integration_outbox FOR UPDATE")
        await connection.invalidate()

    (claimed,) = await here.outbox.claim_due_batch("w", 1)
    assert claimed.last_error is None


@pytest.mark.parametrize("prepared", [True, False])
async def test_a_pooler_is_left_without_settings_of_ours(
    postgres_url: str, make_ledger: MakeLedger, prepared: bool
) -> None:
    ledger = make_ledger(postgres_url, prepared_statements=prepared, timeout_ms=5_000)

    for _ in range(2):  # a rollback in between does not take it back
        async with ledger.database.transaction() as connection:
            limit = (await connection.exec_driver_sql("SHOW idle_in_transaction_session_timeout")).scalar()

    assert limit == ("10s" if prepared else "0")


# SQLite in one go ---------------------------------------------------------------------------------------------------


async def checkpoints(database: Database) -> list[str]:
    statement = "SELECT name FROM bullpen_checkpoints ORDER BY name"
    return [row[0] for row in await database.fetch(statement, {}, reads=True)]


def insert(connection: sa.Connection, name: str) -> None:
    statement = "INSERT INTO bullpen_checkpoints (name, position) VALUES (:name, '1')"
    connection.execute(sa.text(statement), {"name": name})


async def test_a_transaction_in_one_go_is_all_or_nothing(sqlite_url: str, make_ledger: MakeLedger) -> None:
    database = make_ledger(sqlite_url).database

    def two(connection: sa.Connection) -> None:
        insert(connection, "a")
        insert(connection, "a")

    def one(connection: sa.Connection) -> str:
        insert(connection, "b")
        return "done"

    with pytest.raises(LedgerError, match="UNIQUE"):
        await database.in_one_go(two)
    assert await database.in_one_go(one) == "done"

    assert await checkpoints(database) == ["b"]


async def test_what_nobody_waits_for_is_rolled_back(sqlite_url: str, make_ledger: MakeLedger) -> None:
    """Who was told that the database is away must not find it written afterwards; and the next one goes on."""
    database = make_ledger(sqlite_url).database
    begun, go_on = threading.Event(), threading.Event()

    def slow(connection: sa.Connection) -> None:
        insert(connection, "a")
        begun.set()
        assert go_on.wait(30)
        insert(connection, "b")

    task = asyncio.create_task(database.in_one_go(slow))
    await asyncio.to_thread(begun.wait, 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await checkpoints(database) == [], "reads wait for no writer, and see what is committed"
    go_on.set()
    await database.in_one_go(lambda connection: insert(connection, "c"))

    assert await checkpoints(database) == ["c"]


async def test_a_writer_that_holds_the_file_too_long_is_a_database_that_is_away(
    sqlite_url: str, make_ledger: MakeLedger
) -> None:
    database = make_ledger(sqlite_url, timeout_ms=100).database
    other = make_ledger(sqlite_url).database

    async with other.transaction():
        with pytest.raises(DatabaseUnavailable):
            await database.fetch("INSERT INTO bullpen_checkpoints (name, position) VALUES ('a', '1')", {})

    assert await checkpoints(database) == []


async def test_it_may_be_closed_twice_and_used_again(sqlite_url: str, make_ledger: MakeLedger) -> None:
    database = make_ledger(sqlite_url).database
    await database.in_one_go(lambda connection: insert(connection, "a"))

    await database.aclose()
    await database.aclose()

    assert await checkpoints(database) == ["a"]
