"""Statements that the driver sends itself leave connection and pool as the engine wants them."""

from __future__ import annotations

import asyncio

import pytest

from bullpen.errors import DatabaseUnavailable, LedgerError, LedgerNotReady
from bullpen.ledger import Ledger
from bullpen.ledger.driver import numbered
from bullpen.testing.postgres import PostgresServer
from tests.databases import MakeLedger, item


def test_names_become_numbers_and_casts_stay() -> None:
    """`::text` is no parameter, and a name that comes twice is one value."""
    text, names = numbered("SELECT :a::text, CAST(:b AS jsonb), :a + 1, x[1:2] WHERE t = 'a:b'")

    assert text == "SELECT $1::text, CAST($2 AS jsonb), $1 + 1, x[1:2] WHERE t = 'a:b'"
    assert names == ("a", "b")


async def test_rows_are_the_same_as_from_the_engine(ledger: Ledger) -> None:
    statement, values = "SELECT CAST(:a AS text) AS a, :b + 1 AS b, NULL AS c", {"a": "x:y", "b": 1}

    assert await ledger.database.fetch(statement, values, reads=True) == [("x:y", 2, None)]
    assert await ledger.database.fetch_of("t", statement, values) == [("x:y", 2, None)]
    assert await ledger.database.fetch(f"DELETE FROM {ledger.database.table('integration_outbox')}", {}) == []


async def test_a_connection_goes_back_as_it_was(postgres_url: str, make_ledger: MakeLedger) -> None:
    """In autocommit mode a transaction of the engine would be none."""
    ledger = make_ledger(postgres_url, pool_size=1)
    own_pid = "SELECT pg_backend_pid()"
    ((pid,),) = await ledger.database.fetch(own_pid, {})

    with pytest.raises(LedgerError, match="refused a statement: division"):
        await ledger.database.fetch("SELECT 1 / CAST(:zero AS int)", {"zero": 0})
    with pytest.raises(LedgerError, match="refused a statement: division"):
        await ledger.database.fetch_of("alice", "SELECT 1 / CAST(:zero AS int)", {"zero": 0})
    with pytest.raises(LedgerNotReady):
        await ledger.database.fetch("SELECT 1 FROM nowhere", {})
    async with ledger.database.transaction() as connection:
        await ledger.enqueuer.enqueue(connection, item())
        assert (await connection.exec_driver_sql(own_pid)).scalar() == pid
        await connection.rollback()

    assert await ledger.outbox.find() == []
    assert await ledger.database.fetch(own_pid, {}) == [(pid,)]


async def test_a_tenant_is_known_for_one_transaction_only(postgres_url: str, make_ledger: MakeLedger) -> None:
    ledger = make_ledger(postgres_url, pool_size=1)
    whose = "SELECT coalesce(current_setting('app.current_tenant', true), '')"

    assert await ledger.database.fetch_of("alice", whose, {}) == [("alice",)]
    assert await ledger.database.fetch(whose, {}) == [("",)]


async def test_an_answer_that_nobody_waits_for_reaches_nobody_else(postgres_url: str, make_ledger: MakeLedger) -> None:
    """A caller that is cancelled, or whose time is up, leaves a connection in the middle of a statement."""
    ledger = make_ledger(postgres_url, pool_size=1, timeout_ms=300)

    with pytest.raises(DatabaseUnavailable, match="time ran out"):
        await ledger.database.fetch("SELECT 'late', pg_sleep(60)", {})
    waiting = asyncio.create_task(ledger.database.fetch("SELECT 'late', pg_sleep(60)", {}))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting

    assert await ledger.database.fetch("SELECT 'mine'", {}) == [("mine",)]
    async with ledger.database.transaction() as connection:
        assert (await connection.exec_driver_sql("SELECT 'too'")).scalar() == "too"


async def test_a_statement_is_planned_once_and_its_connection_used_again(
    postgres_url: str, make_ledger: MakeLedger
) -> None:
    """All connections by turns would plan it as often as there are connections: it takes longer than the work."""
    ledger = make_ledger(postgres_url, pool_size=5)

    await asyncio.gather(*(ledger.outbox.due_types() for _ in range(5)))
    pids = {(await ledger.database.fetch("SELECT pg_backend_pid()", {}))[0][0] for _ in range(5)}

    assert len(pids) == 1
    ((prepared,),) = await ledger.database.fetch("SELECT count(*) FROM pg_prepared_statements", {})
    assert prepared >= 2


async def test_nothing_stays_prepared_behind_a_pooler(postgres_url: str, make_ledger: MakeLedger) -> None:
    ledger = make_ledger(postgres_url, pool_size=1, prepared_statements=False)

    for _ in range(8):
        await ledger.outbox.due_types()

    assert await ledger.database.fetch("SELECT count(*) FROM pg_prepared_statements", {}) == [(0,)]


async def test_after_a_restart_the_first_use_tells_and_the_next_works(make_ledger: MakeLedger) -> None:
    """All pooled connections were cut with the one that noticed."""
    with PostgresServer.start(durable=True) as server:
        ledger = make_ledger(server.url(), pool_size=3)
        await ledger.migrate()
        await asyncio.gather(*(ledger.database.fetch("SELECT pg_sleep(0.05)", {}) for _ in range(3)))
        server.kill()
        server.restart()

        with pytest.raises(DatabaseUnavailable):
            await ledger.outbox.due_types()
        assert await ledger.outbox.due_types() == []
        await ledger.aclose()
