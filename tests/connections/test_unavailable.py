"""A server that says "not now": what was refused is repeated, at the server that is in charge, and the log is calm."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
from collections.abc import Iterator

import pytest

from bullpen.errors import BullpenError, ConnectionLost, ServerRefused
from bullpen.queue import Queue
from bullpen.queue.sync import Queue as SyncQueue
from bullpen.redis import Connection
from bullpen.redis.client import Door
from bullpen.testing import FaultProxy
from bullpen.worker import Worker
from tests.conftest import StartServer
from tests.connections._scripted import scripted
from tests.queue._kit import Gate, nothing, soon


async def test_a_primary_that_became_a_replica_is_waited_for(
    start_server: StartServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Behind a name that moves with the primary. The log tells begin and end, not every attempt."""
    server, other = start_server(), start_server()
    gate = Gate("done")
    async with Queue("mail", connection=server.url) as queue, Worker("mail", gate, connection=server.url):
        await queue.add("welcome")
        await gate.reached()
        caplog.clear()
        server.command("REPLICAOF", "127.0.0.1", other.port)
        adding = asyncio.ensure_future(queue.add("welcome"))
        gate.open()
        async with asyncio.timeout(10):
            while "READONLY" not in caplog.text:  # noqa: ASYNC110 - the log is what is under test
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)  # several attempts fall into this time
        told = [record.getMessage() for record in caplog.records if record.name == "bullpen.redis"]
        server.command("REPLICAOF", "NO", "ONE")
        await soon(adding)

        assert len([message for message in told if "READONLY" in message]) == 1
        assert not any("works again after" in message for message in told)


@pytest.mark.parametrize(
    "reply", ["LOADING loading", "BUSY script", "MASTERDOWN link", "TRYAGAIN keys", "MISCONF disk"]
)
async def test_not_now_is_asked_again_with_growing_pauses(reply: str) -> None:
    """Without the pauses a server that loads its data would get 50 payloads a second from each producer."""
    refusals = 0

    def answer(command: list[bytes]) -> bytes | None:
        nonlocal refusals
        if command[0] in (b"EVALSHA", b"DEL") and refusals < 5:
            refusals += 1
            return f"-{reply}\r\n".encode()
        return b"$4\r\n1 1 \r\n" if command[0] == b"EVALSHA" else None

    async with scripted(answer) as server:
        async with Queue("mail", connection=server.url) as queue:
            began = asyncio.get_running_loop().time()
            job = await soon(queue.add("welcome"))
            took_s = asyncio.get_running_loop().time() - began

        assert job.id == "1"
        # The payload went out twice; in between the server was only asked whether it takes writes.
        assert server.names().count("EVALSHA") == 2
        assert took_s > 0.02 + 0.04 + 0.08


async def test_a_call_that_cannot_have_run_says_so() -> None:
    """`nothing was written` and `outcome unknown` lead to different actions of the caller."""

    def answer(command: list[bytes]) -> bytes | None:
        return b"-LOADING data\r\n" if command[0] in (b"EVALSHA", b"DEL") else None

    async with scripted(answer) as server, Queue("mail", connection=server.url, add_deadline=200) as queue:
        with pytest.raises(ConnectionLost, match="the server cannot serve commands now: LOADING data"):
            await soon(queue.add("welcome"))


async def test_answers_that_are_under_way_still_arrive(start_server: StartServer) -> None:
    """One refused command must not tear down the others on its wire: their outcome would be unknown."""
    server = start_server()
    connection = Connection(server.url)
    door = Door(connection)
    await door.call("RPUSH", "list", "a")
    waiting = asyncio.ensure_future(door.call("BLPOP", "other", 5, within_s=10))
    await asyncio.sleep(0)
    server.command("CONFIG", "SET", "min-replicas-to-write", 1)

    # A blocked client holds the replies behind it, so the refused one has a wire of its own.
    refused = Door(connection)
    with pytest.raises(ConnectionLost, match="NOREPLICAS"):
        await refused.call("RPUSH", "list", "b")
    assert refused.endpoint is None
    server.command("CONFIG", "SET", "min-replicas-to-write", 0)
    assert await refused.call("RPUSH", "list", "c") == 2
    server.command("RPUSH", "other", "x")

    assert await soon(waiting) == [b"other", b"x"]
    door.close()
    refused.close()
    server.flush()


async def test_a_wire_that_was_left_is_closed_when_its_last_answer_came(start_server: StartServer) -> None:
    server = start_server()
    door = Door(Connection(server.url))
    server.command("CONFIG", "SET", "min-replicas-to-write", 1)
    slow = asyncio.ensure_future(door.call("EVAL", "local n = 0 while n < 3e7 do n = n + 1 end return 'slow'", 0))
    refused = asyncio.ensure_future(door.call("SET", "key", "value"))
    also = asyncio.ensure_future(door.call("ECHO", "also"))

    with pytest.raises(ConnectionLost, match="NOREPLICAS"):
        await refused

    assert await soon(slow) == b"slow"
    assert await soon(also) == b"also"
    server.command("CONFIG", "SET", "min-replicas-to-write", 0)
    assert await door.call("PING") == b"PONG"
    door.close()


async def test_a_node_of_a_cluster_given_as_a_plain_server_is_told_how(start_server: StartServer) -> None:
    """The most likely mistake with a managed cluster."""

    def answer(command: list[bytes]) -> bytes | None:
        return b"-MOVED 866 10.0.0.7:6379\r\n" if command[0] == b"EVALSHA" else None

    async with scripted(answer) as server, Queue("mail", connection=server.url) as queue:
        with pytest.raises(ServerRefused, match=r"part of a cluster, give its address as redis\+cluster://"):
            await soon(queue.add("welcome"))


async def test_a_worker_starts_before_its_server(start_server: StartServer, caplog: pytest.LogCaptureFixture) -> None:
    """Containers start in any order."""
    server = start_server()
    server.stop()
    with caplog.at_level(logging.WARNING, "bullpen.redis"):
        async with Worker("mail", nothing, connection=server.url), Queue("mail", connection=server.url) as queue:
            server.restart()
            assert await (await queue.add("welcome")).result(timeout=10_000) is None

    assert any("reconnecting until it works" in message for message in caplog.messages)


async def test_an_outage_is_as_long_as_it_was_seen(
    start_server: StartServer, queue_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Who asks again long after the server came back learns nothing of the time between."""
    server = start_server("valkey")
    async with Queue(queue_name, connection=server.url, add_deadline=200) as queue:
        await queue.add("before")
        server.kill()
        with pytest.raises(BullpenError):
            await queue.add("meanwhile")
        await asyncio.to_thread(server.restart)
        await asyncio.sleep(1.5)
        await queue.add("afterwards")

    (told,) = [record.getMessage() for record in caplog.records if "works again after" in record.getMessage()]
    assert told.startswith(f"connection to 127.0.0.1:{server.port} works again after at least 0.")


@pytest.mark.parametrize("how", ["reset", "outage"])
async def test_a_lost_connection_is_two_lines_however_many_there_are(
    start_server: StartServer, queue_name: str, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """A worker and a queue have several to one server, and some notice it only when they are used."""
    server = start_server()
    with FaultProxy(server) as proxy:
        async with (
            Queue(queue_name, connection=proxy.url) as queue,
            Worker(queue_name, nothing, connection=proxy.url, drain_delay=1_000),
            Worker(queue_name, nothing, connection=proxy.url, drain_delay=1_000, lock=2_000),
        ):
            await (await queue.add("before")).result(timeout=10_000)
            caplog.clear()
            if how == "reset":
                proxy.reset()
            else:
                with proxy.outage():
                    await asyncio.sleep(1.5)
            await asyncio.sleep(0.5)
            await (await queue.add("afterwards")).result(timeout=10_000)
            await asyncio.sleep(1.0)  # blocked reads and renewals have come round

        told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        where = f"connection to 127.0.0.1:{proxy.port}"
        assert len([one for one in told if one.startswith(f"{where} lost")]) == 1, told
        assert len([one for one in told if one.startswith(f"{where} works again")]) == 1, told
        assert len(told) == 2, told


@pytest.mark.parametrize("kind", ["async", "blocking"])
async def test_a_greeting_that_is_not_answered_stops_adds_for_a_moment_only(
    start_server: StartServer, queue_name: str, kind: str
) -> None:
    server, met, ended = start_server(), 0, 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal met, ended
        met += 1
        try:
            await forward(reader, writer, is_first=met == 1)
        finally:
            writer.close()
            ended += 1

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_first: bool) -> None:
        if is_first:
            await reader.read()  # hears all and says nothing
            return
        there = await asyncio.open_connection("127.0.0.1", server.port)

        async def carry(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            while data := await source.read(65_536):
                target.write(data)
            target.close()

        await asyncio.gather(carry(reader, there[1]), carry(there[0], writer))

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listener:
        url = f"redis://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        connection = Connection(url, connect_timeout_ms=20_000)
        began = asyncio.get_running_loop().time()
        if kind == "async":
            async with Queue(queue_name, connection=connection) as queue:
                await soon(queue.add("welcome"))
        else:
            with SyncQueue(queue_name, connection=connection) as blocking:
                await asyncio.to_thread(blocking.add, "welcome")
        took_s = asyncio.get_running_loop().time() - began
        await connection.aclose()
        async with asyncio.timeout(5):
            while ended < met:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)

    assert met > 1 and took_s < 10  # and not twenty


async def test_an_outage_of_a_frozen_server_is_as_long_as_it_was_silent(
    start_server: StartServer, queue_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is noticed only when a command's time is up, and the first attempt after that may be the one that succeeds."""
    server = start_server("valkey")
    connection = Connection(server.url, command_timeout_ms=700, connect_timeout_ms=2_000)
    async with Queue(queue_name, connection=connection) as queue:
        await queue.add("before")
        server.pause()
        adding = asyncio.ensure_future(queue.add("meanwhile"))
        await asyncio.sleep(2.2)
        server.resume()
        await soon(adding)
    await connection.aclose()

    (told,) = [record.getMessage() for record in caplog.records if "works again after" in record.getMessage()]
    away = re.fullmatch(r"connection to \S+ works again after ([\d.]+) s", told)
    assert away is not None, told
    assert 1.9 <= float(away[1]) <= 3.5, told


@pytest.fixture
def deaf() -> Iterator[str]:
    """The address of a port whose queue of connections is full: the kernel answers nobody any more."""
    with contextlib.ExitStack() as opened:
        listening = opened.enter_context(socket.socket())
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        for _ in range(4):
            waiting = opened.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listening.getsockname())
        yield f"redis://127.0.0.1:{listening.getsockname()[1]}"


async def test_a_reason_is_never_empty(deaf: str, queue_name: str, caplog: pytest.LogCaptureFixture) -> None:
    """A timeout has no text of its own: "cannot connect to 10.0.0.7: " says nothing."""
    connection = Connection(deaf, connect_timeout_ms=200)
    with SyncQueue(queue_name, connection=connection, add_deadline=500) as blocking:
        async with Queue(queue_name, connection=connection, add_deadline=500) as queue:
            errors = await soon(
                asyncio.gather(queue.add("mail"), asyncio.to_thread(blocking.add, "mail"), return_exceptions=True)
            )
    await connection.aclose()

    for text in (*map(str, errors), *caplog.messages):
        assert not text.rstrip().endswith(":"), text
        assert ": )" not in text, text
    assert any("cannot connect to" in text for text in (*map(str, errors), *caplog.messages))


@pytest.mark.requirement("W-6")
async def test_a_connection_that_flaps_is_summed_up_and_a_lasting_outage_is_told(
    start_server: StartServer, queue_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A broken network device cuts dozens of times a second: each time two lines would bury all others."""
    server = start_server("valkey")
    loop = asyncio.get_running_loop()

    def told() -> list[str]:
        return [record.getMessage() for record in caplog.records if "connection to" in record.getMessage()]

    async def until_told(text: str) -> None:
        async with asyncio.timeout(10):
            while text not in told()[-1]:  # noqa: ASYNC110 - the log is what is under test
                await asyncio.sleep(0.01)

    with FaultProxy(server) as proxy:
        async with Worker(queue_name, nothing, connection=proxy.url):
            async with asyncio.timeout(20):
                began = loop.time()
                while not any("times" in line for line in told()):
                    proxy.cut()
                    await asyncio.sleep(0.03)
                lasted_s = loop.time() - began
            assert proxy.counters.connections > 20
            assert len(told()) <= 3 * 2 + 1
            assert lasted_s < 10
            assert re.search(r"connection to 127.0.0.1:\d+ is unstable: lost \d+ more times in \d+ s", told()[-1])

            with proxy.outage():
                await until_told("lost (")
            await until_told("works again after")
