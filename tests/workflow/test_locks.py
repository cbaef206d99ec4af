"""Locks per urn: one holder at a time, given back, and given up by the dead."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator

import pytest

from bullpen.ports.entity import EntityBusy
from bullpen.queue import Connection
from bullpen.testing import RedisServer
from bullpen.workflow.locks import LocalLocks, RedisLocks


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
