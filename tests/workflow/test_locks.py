"""Locks per urn: one holder at a time, given back, and given up by the dead."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator
from typing import Any

import pytest

from bullpen.errors import DelayJob, EntityBusy
from bullpen.redis import Connection
from bullpen.testing import RedisServer
from bullpen.workflow.definition import Transition
from bullpen.workflow.locks import LocalLocks, RedisLocks
from tests.workflow.kit import Event, Order, Shelf, Status, call, define, delivery, engine_of


@pytest.fixture
async def connection(redis_url: str) -> AsyncIterator[Connection]:
    opened = Connection(redis_url)
    yield opened
    await opened.aclose()


async def test_a_local_lock_forgets_who_is_done() -> None:
    locks = LocalLocks()
    order: list[str] = []

    async def hold(name: str) -> None:
        async with locks.hold("urn:1"):
            order.append(f"{name} in")
            await asyncio.sleep(0)
            order.append(f"{name} out")

    await asyncio.gather(hold("a"), hold("b"))
    with pytest.raises(ZeroDivisionError):
        async with locks.hold("urn:2"):
            _ = 1 / 0

    assert order == ["a in", "a out", "b in", "b out"]
    assert locks._held == {}


async def test_a_local_lock_is_waited_for_only_so_long() -> None:
    """An action that hangs must not hold up all events of its entity, and with them every slot of their consumer."""
    locks = LocalLocks(wait=50)

    async def wait() -> None:
        with pytest.raises(EntityBusy, match="'urn:1' is busy: its lock was not free within 50 ms"):
            async with locks.hold("urn:1"):
                raise AssertionError("two are in")

    async with locks.hold("urn:1"), locks.hold("urn:2"):
        await asyncio.gather(*(asyncio.create_task(wait(), context=contextvars.Context()) for _ in range(3)))
    async with locks.hold("urn:1"):
        pass

    assert locks._held == {}


@pytest.mark.every_loop
@pytest.mark.requirement("X-52")
async def test_holders_in_different_places_take_turns(connection: Connection, redis_server: RedisServer) -> None:
    places = [RedisLocks(connection) for _ in range(3)]
    inside = most = 0

    async def hold(locks: RedisLocks) -> None:
        nonlocal inside, most
        async with locks.hold("urn:1"):
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0.001)
            inside -= 1

    await asyncio.gather(*(hold(locks) for locks in places * 4))

    assert most == 1
    assert redis_server.client().keys("*") == []


@pytest.mark.every_loop
async def test_a_holder_keeps_its_lock_for_as_long_as_it_needs(connection: Connection) -> None:
    slow = RedisLocks(connection, lease=150)
    hasty = RedisLocks(connection, wait=500)

    async def somebody_else() -> None:
        with pytest.raises(EntityBusy, match="'urn:1' is busy: its lock was not free within 500 ms"):
            async with hasty.hold("urn:1"):
                raise AssertionError("two are in")

    async with slow.hold("urn:1"):
        await asyncio.create_task(somebody_else(), context=contextvars.Context())
    async with hasty.hold("urn:1"):
        pass


@pytest.mark.requirement("X-52")
async def test_the_lock_of_a_dead_holder_ends_and_is_not_given_back_twice(
    connection: Connection, redis_server: RedisServer
) -> None:
    """The dead one's token must not open the lock of the next."""
    client = redis_server.client()
    client.set("bullpen:lock:urn:1", "of somebody who died", px=200)

    async with RedisLocks(connection).hold("urn:1"):
        client.set("bullpen:lock:urn:1", "of somebody else", px=60_000)

    assert client.get("bullpen:lock:urn:1") == b"of somebody else"
    client.delete("bullpen:lock:urn:1")


@pytest.mark.requirement("X-52")
async def test_an_event_behind_one_that_hangs_in_the_same_process_goes_back(connection: Connection) -> None:
    """As it would from another process: no attempt is counted, and its slot is free for other entities."""
    shelf, is_in, may_end = Shelf(), asyncio.Event(), asyncio.Event()
    shelf.put()

    async def hang(order: Order, payload: Any) -> Order:
        is_in.set()
        await may_end.wait()
        return order

    paying = Transition(event=Event.PAY, from_=Status.NEW, to=Status.PAID, actions=[hang])
    engine = engine_of(define(shelf, transitions=[paying]), locks=RedisLocks(connection, wait=100))
    hanging = asyncio.create_task(engine.emit(Event.PAY, "urn:1", 5, call()))
    await is_in.wait()

    with pytest.raises(DelayJob, match=r"no attempt counted: .*was not free within 100 ms"):
        await engine.emit(Event.PAY, "urn:1", 5, delivery())
    with pytest.raises(EntityBusy, match="was not free within 100 ms"):
        await engine.emit(Event.PAY, "urn:1", 5, call())

    may_end.set()
    await hanging


async def test_whoever_leaves_while_the_lock_is_given_to_him_holds_up_nobody(
    connection: Connection, redis_server: RedisServer
) -> None:
    """A worker that closes beside a slow server would keep the entity for a whole lease, and nobody is in."""
    locks = RedisLocks(connection, lease=60_000)

    async def hold(name: str) -> None:
        async with locks.hold(name):
            pass

    await hold("urn:0")  # connected
    with redis_server.paused():
        leaving = asyncio.create_task(hold("urn:1"))
        await asyncio.sleep(0.1)  # the question is on its way, and cannot be answered
        leaving.cancel()
        await asyncio.wait([leaving])

    async with asyncio.timeout(10):
        await hold("urn:1")
