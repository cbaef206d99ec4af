"""The store dies in the middle of an event, or its answer is lost: the event is applied once all the same."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bullpen.errors import ConnectionLost, DelayJob
from bullpen.redis import Connection
from bullpen.testing import FaultProxy, RedisServer
from bullpen.testing.postgres import PostgresServer
from bullpen.workflow.bindings import _Gathering
from bullpen.workflow.definition import Transition
from tests.conftest import StartServer
from tests.databases import MakeLedger
from tests.workflow.kit import Event, Status, call, delivery
from tests.workflow.stored import add, engine_on, make_tables, redis_orders, sql_orders


@pytest.mark.requirement("X-52", "X-53", "W-55")
async def test_a_commit_whose_answer_was_lost_counts_once(start_server: StartServer) -> None:
    """Nobody knows whether it was stored. The event comes again, costs no attempt, and finds itself applied."""
    server: RedisServer = start_server()
    with FaultProxy(server) as proxy:
        connection = Connection(proxy.url, command_timeout_ms=1_000)
        stored = redis_orders(connection)
        await stored.create("urn:1")
        engine = engine_on(stored)
        await engine.emit(Event.PAY, "urn:1", 1, call())  # the server knows the script from now on
        fault = proxy.lose_reply()

        with pytest.raises(DelayJob, match="no attempt counted"):
            await engine.emit(Event.PAY, "urn:1", 5, delivery(3, key="k"))
        assert fault.count == 1
        await engine.emit(Event.PAY, "urn:1", 5, delivery(3, key="k", may_be_repeated=True))

        assert await stored.look() == ("new", 6)
        await connection.aclose()


@pytest.mark.requirement("X-53", "W-55")
async def test_a_commit_that_never_arrived_is_made_by_the_next_delivery(start_server: StartServer) -> None:
    server: RedisServer = start_server()
    with FaultProxy(server) as proxy:
        connection = Connection(proxy.url, command_timeout_ms=1_000)
        stored = redis_orders(connection)
        await stored.create("urn:1")
        engine = engine_on(stored)
        await engine.emit(Event.PAY, "urn:1", 1, call())
        proxy.lose_request()

        with pytest.raises(DelayJob):
            await engine.emit(Event.PAY, "urn:1", 5, delivery(key="k"))
        with proxy.outage(), pytest.raises(ConnectionLost):
            await engine.emit(Event.PAY, "urn:1", 7, call())
        await engine.emit(Event.PAY, "urn:1", 5, delivery(key="k"))

        assert await stored.look() == ("new", 6)
        await connection.aclose()


@pytest.mark.requirement("X-52", "X-53")
async def test_a_database_that_dies_before_the_commit_stores_nothing(
    postgres_server: PostgresServer, postgres_url: str, make_ledger: MakeLedger
) -> None:
    ledger = make_ledger(postgres_url)
    await make_tables(ledger)
    stored = sql_orders(ledger)
    await stored.create("urn:1")
    database = ledger.database.url.database
    deaths = 0

    async def killing(entity: Any, payload: Any) -> Any:
        nonlocal deaths
        if deaths == 0:
            deaths += 1
            await asyncio.to_thread(
                postgres_server.execute,
                f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{database}'",
            )
        return await add(entity, payload)

    engine = engine_on(
        stored, transitions=[Transition(event=Event.PAY, from_=Status.NEW, to=Status.NEW, actions=[killing])]
    )
    with pytest.raises(DelayJob, match="no attempt counted"):
        await engine.emit(Event.PAY, "urn:1", 5, delivery(3, key="k"))
    assert await stored.look() == ("new", 0)

    await engine.emit(Event.PAY, "urn:1", 5, delivery(3, key="k"))

    assert await stored.look() == ("new", 5)


@pytest.mark.requirement("W-81")
async def test_who_is_cancelled_in_a_batch_takes_nobody_along() -> None:
    """The leader of a batch loses its delivery; the others are handed on by the next one."""

    entered, leave = asyncio.Event(), asyncio.Event()
    handed: list[list[Any]] = []

    async def apply(event: str, urn: str, items: Any) -> list[None]:
        handed.append([payload for payload, _ in items])
        entered.set()
        if len(handed) == 1:
            await leave.wait()
        return [None] * len(items)

    gathering: _Gathering[str] = _Gathering(apply, 10)
    leader = asyncio.create_task(gathering.add("pay", "urn:1", 1, call()))
    await entered.wait()
    others = [asyncio.create_task(gathering.add("pay", "urn:1", number, call())) for number in (2, 3, 4)]
    await asyncio.sleep(0)
    others[1].cancel()
    leader.cancel()
    await asyncio.wait([leader, *others])

    assert leader.cancelled() and others[1].cancelled()
    assert (others[0].result(), others[2].result()) == (None, None)
    assert handed == [[1], [2, 4]]
    assert gathering._lines == {} and gathering._turns == {}
