"""A blocking connection leaves a primary that its sentinels replace, whether they tell or have to be asked."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from bullpen.errors import ConnectionLost
from bullpen.redis import Connection
from bullpen.redis.blocking import BlockingWire, open_wire
from bullpen.redis.discovery import ServerUnavailable
from bullpen.redis.sentinels import ASK_SENTINELS_EVERY_S
from tests.connections._scripted import ScriptedServer, array, bulk, scripted

NEWS = array(bulk("message"), bulk("+try-failover"), bulk("master orders 127.0.0.1 6379"))
OTHERS_NEWS = array(bulk("message"), bulk("+try-failover"), bulk("master payments 127.0.0.1 6380"))


@dataclass
class World:
    """One sentinel and two servers, of which it names one."""

    sentinel: ScriptedServer = field(default_factory=ScriptedServer)
    servers: list[ScriptedServer] = field(default_factory=list)
    primary: int = 0
    flags: str = "master"
    may_subscribe: bool = True
    while_writing: Callable[[], None] | None = None
    is_mute: bool = False
    wires: list[BlockingWire] = field(default_factory=list)

    def answer(self, command: list[bytes]) -> bytes | None:
        if self.is_mute:
            return b"-LOADING\r\n"
        port = str(self.servers[self.primary].port)
        match [word.upper() for word in command[:2]]:
            case [b"SUBSCRIBE", _]:
                done = array(bulk("subscribe"), bulk(command[1].decode()), b":1\r\n")
                return done if self.may_subscribe else b"-NOPERM no\r\n"
            case [b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME"]:
                return array(bulk("127.0.0.1"), bulk(port))
            case [b"SENTINEL", b"MASTER"]:
                fields = ("ip", "127.0.0.1", "port", port, "flags", self.flags, "config-epoch", "1")
                return array(*map(bulk, fields))
        return None

    def write(self, command: list[bytes]) -> bytes | None:
        if command[0] == b"SET" and self.while_writing is not None:
            self.while_writing()
        return None

    def connection(self, *more_sentinels: str) -> Connection:
        hosts = ",".join([f"127.0.0.1:{self.sentinel.port}", *more_sentinels])
        return Connection(f"redis+sentinel://{hosts}/orders", connect_timeout_ms=400)

    async def open(self, *more_sentinels: str) -> BlockingWire:
        return await self.open_by(self.connection(*more_sentinels))

    async def open_by(self, connection: Connection) -> BlockingWire:
        self.wires.append(await asyncio.to_thread(open_wire, connection, "bull:mail:"))
        return self.wires[-1]

    def questions(self) -> int:
        return self.sentinel.names().count("SENTINEL") // 2


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    async with scripted(made.write) as one, scripted(made.write) as two, scripted(made.answer) as sentinel:
        made.servers, made.sentinel = [one, two], sentinel
        yield made
        for wire in made.wires:
            wire.close()


async def call(wire: BlockingWire, *command: str) -> Any:
    return await asyncio.to_thread(wire.call, *command)


async def test_the_word_of_a_sentinel_is_heard_before_the_next_call(world: World) -> None:
    """Nothing may be sent to a server that throws it away."""
    wire = await world.open()
    await call(wire, "SET", "a", "1")
    world.primary = 1
    world.sentinel.push(NEWS)

    with pytest.raises(ServerUnavailable, match=f"the sentinels chose 127.0.0.1:{world.servers[1].port}"):
        await call(wire, "SET", "a", "2")
    assert world.servers[0].names().count("SET") == 1


async def test_what_was_answered_while_a_failover_began_is_not_believed(world: World) -> None:
    """It may be thrown away; whoever numbered the call repeats it at the new primary."""
    wire = await world.open()
    told = asyncio.Event()

    def begin() -> None:
        world.primary = 1
        world.sentinel.push(NEWS)
        told.set()

    world.while_writing = begin

    with pytest.raises(ConnectionLost, match="while it answered") as raised:
        await call(wire, "SET", "a", "1")
    assert told.is_set()
    assert not isinstance(raised.value, ServerUnavailable)  # which would say that nothing was written


async def test_a_failover_under_way_is_waited_for(world: World) -> None:
    wire = await world.open()
    world.flags = "master,failover_in_progress"
    world.sentinel.push(NEWS)

    with pytest.raises(ServerUnavailable, match="a failover is under way"):
        await call(wire, "SET", "a", "1")


async def test_news_of_other_services_cost_nothing(world: World) -> None:
    wire = await world.open()
    asked = world.questions()
    world.sentinel.push(OTHERS_NEWS)

    await call(wire, "SET", "a", "1")

    assert world.questions() == asked


async def test_an_aborted_failover_is_no_reason_to_leave(world: World) -> None:
    wire = await world.open()
    world.sentinel.push(NEWS)

    await call(wire, "SET", "a", "1")

    assert world.servers[0].names().count("SET") == 1


async def test_sentinels_that_may_not_tell_are_asked(world: World) -> None:
    world.may_subscribe = False
    wire = await world.open()
    await call(wire, "SET", "a", "1")
    world.primary = 1
    await asyncio.sleep(ASK_SENTINELS_EVERY_S)

    with pytest.raises(ServerUnavailable):
        await call(wire, "SET", "a", "2")


async def test_without_any_sentinel_the_open_connection_is_used(world: World) -> None:
    """Nobody knows better. Sentinels may be away for a while; the data is not there."""
    wire = await world.open()
    world.is_mute = True
    await asyncio.sleep(ASK_SENTINELS_EVERY_S)

    await call(wire, "SET", "a", "1")

    assert world.servers[0].names().count("SET") == 1


async def test_a_sentinel_that_is_off_is_not_waited_for_again_and_again(world: World) -> None:
    """A program that adds all the time would stand still for a part of each half second."""
    mute = socket.create_server(("127.0.0.1", 0))  # it lets us in and says nothing
    with contextlib.closing(mute):
        wire = await world.open(f"127.0.0.1:{mute.getsockname()[1]}")
        asked, took_s = world.questions(), list[float]()
        while world.questions() < asked + 2:
            before, sent = world.questions(), time.monotonic()
            await call(wire, "SET", "a", "1")
            if world.questions() > before:
                took_s.append(time.monotonic() - sent)

    assert min(took_s) < 0.25  # each question would wait for 0.3 s


async def test_the_last_wire_closes_the_subscriptions(world: World) -> None:
    connection = world.connection()
    first, second = [await world.open_by(connection) for _ in range(2)]
    assert len(world.sentinel.subscribers) == 1  # they listen together

    first.close()
    await call(second, "SET", "a", "1")
    second.close()

    async with asyncio.timeout(5):
        while not world.sentinel.subscribers[0].transport.is_closing():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)


async def test_a_forked_process_listens_by_itself(world: World) -> None:
    """What the parent's sockets bring belongs to the parent."""
    connection = world.connection()
    wire = await world.open_by(connection)

    def in_child() -> int:
        pid = os.fork()
        if pid == 0:
            status = 1
            with contextlib.suppress(BaseException):
                open_wire(connection, "bull:mail:").call("SET", "b", "1")
                status = 0
            os._exit(status)
        return os.waitpid(pid, 0)[1]

    assert await asyncio.to_thread(in_child) == 0
    assert len(world.sentinel.subscribers) == 2
    world.primary = 1
    world.sentinel.push(NEWS)
    with pytest.raises(ServerUnavailable):
        await call(wire, "SET", "a", "1")
