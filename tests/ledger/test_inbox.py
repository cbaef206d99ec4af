"""A message is applied once, however often it arrives."""

from __future__ import annotations

import asyncio

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from bullpen.errors import InvalidOption
from bullpen.ledger import Ledger
from tests.contracts.outbox_repository import execute
from tests.databases import MakeLedger


@pytest.fixture
async def account(ledger: Ledger) -> None:
    """Business data beside the ledger."""
    await execute(ledger, "CREATE TABLE account (balance INTEGER NOT NULL)")
    await execute(ledger, "INSERT INTO account VALUES (0)")


async def apply(ledger: Ledger, key: str, *, scope: str = "default", fail: bool = False) -> bool:
    async with ledger.database.transaction() as connection, ledger.once(connection, key, scope=scope) as is_new:
        if is_new:
            await connection.execute(sa.text("UPDATE account SET balance = balance + 10"))
        if fail:
            raise RuntimeError("handler failed")
    return is_new


async def balance(ledger: Ledger) -> int:
    ((amount,),) = await execute(ledger, "SELECT balance FROM account")
    return int(amount)


@pytest.mark.usefixtures("account")
@pytest.mark.requirement("X-16", "X-17")
async def test_a_message_that_arrives_twice_is_applied_once(ledger: Ledger) -> None:
    assert [await apply(ledger, "m-1"), await apply(ledger, "m-1"), await apply(ledger, "m-2")] == [True, False, True]
    assert await balance(ledger) == 20


@pytest.mark.usefixtures("account")
async def test_two_consumers_may_each_apply_it(ledger: Ledger) -> None:
    assert await apply(ledger, "m-1", scope="billing")
    assert await apply(ledger, "m-1", scope="mail")


@pytest.mark.usefixtures("account")
async def test_a_transaction_that_rolls_back_leaves_no_trace(ledger: Ledger) -> None:
    with pytest.raises(RuntimeError, match="handler failed"):
        await apply(ledger, "m-1", fail=True)

    assert await apply(ledger, "m-1")
    assert await balance(ledger) == 10


@pytest.mark.usefixtures("account")
async def test_a_failure_that_the_caller_swallows_does_not_count_as_applied(ledger: Ledger) -> None:
    """Otherwise a caller that logs and commits would lose the message for good."""
    async with ledger.database.transaction() as connection:
        try:
            async with ledger.once(connection, "m-1"):
                raise RuntimeError("handler failed")
        except RuntimeError:
            pass

    assert await apply(ledger, "m-1")


@pytest.mark.usefixtures("account")
async def test_consumers_at_the_same_time_wait_for_each_other(ledger: Ledger) -> None:
    results = await asyncio.gather(*(apply(ledger, "m-1") for _ in range(4)))

    assert sorted(results) == [False, False, False, True]
    assert await balance(ledger) == 10


async def test_it_works_in_a_session(ledger: Ledger) -> None:
    engine = create_async_engine(ledger.database.url)
    try:
        for expected in (True, False):
            async with AsyncSession(engine) as session, session.begin(), ledger.once(session, "m-1") as is_new:
                assert is_new is expected
    finally:
        await engine.dispose()


async def test_it_works_in_a_blocking_connection(postgres_url: str, make_ledger: MakeLedger) -> None:
    import psycopg

    ledger, seen = make_ledger(postgres_url), []

    def consume() -> None:
        with psycopg.connect(postgres_url) as connection, ledger.once_sync(connection, "m-1") as is_new:
            seen.append(is_new)

    def fail() -> None:
        with psycopg.connect(postgres_url) as connection:
            try:
                with ledger.once_sync(connection, "m-2"):
                    raise RuntimeError("handler failed")
            except RuntimeError:
                pass

    for step in (consume, consume, fail):
        await asyncio.to_thread(step)

    assert seen == [True, False]
    assert [tuple(row) for row in await execute(ledger, "SELECT scope, key FROM {inbox}")] == [("default", "m-1")]


@pytest.mark.parametrize(("key", "scope"), [("", "default"), ("x" * 301, "default"), ("k", ""), ("k", "x" * 121)])
async def test_keys_that_do_not_fit_are_refused(ledger: Ledger, key: str, scope: str) -> None:
    with pytest.raises(InvalidOption, match="characters"):
        async with ledger.database.transaction() as connection, ledger.once(connection, key, scope=scope):
            pass
