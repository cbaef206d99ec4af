"""Firewalls that forget an idle connection without a word."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from bullpen import sync
from bullpen.errors import InvalidOption
from bullpen.queue import Queue
from bullpen.redis import Connection
from bullpen.testing import RedisServer
from bullpen.worker import Worker
from tests.conftest import StartServer
from tests.queue._kit import Gate

FORGETS_AFTER_S = 1.0
SILENT_S = 4.0
"""On a connection that was forgotten an add waits for five seconds, and ends without an answer."""


class Firewall:
    """Forwards bytes; on a connection that was idle for a second it drops them from then on, and closes nothing."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self.forgotten = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        self._writers += (writer, far_writer)
        used = [time.monotonic()]
        both = [self._forward(reader, far_writer, used), self._forward(far_reader, writer, used)]
        self._tasks |= {asyncio.create_task(one) for one in both}

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, used: list[float]) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                if time.monotonic() - used[0] > FORGETS_AFTER_S:
                    used[0] = -1e9  # for good
                    self.forgotten += 1
                    continue
                used[0] = time.monotonic()
                writer.write(data)
            writer.close()

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in self._writers), return_exceptions=True)


@asynccontextmanager
async def firewall(server: RedisServer) -> AsyncIterator[tuple[Firewall, int]]:
    wall = Firewall(server)
    listener = await asyncio.start_server(wall.serve, "127.0.0.1", 0)
    try:
        yield wall, listener.sockets[0].getsockname()[1]
    finally:
        listener.close()
        await wall.aclose()


@contextlib.contextmanager
def firewall_in_a_thread(server: RedisServer) -> Iterator[int]:
    ports: list[int] = []
    is_up, loop = threading.Event(), asyncio.new_event_loop()
    done = asyncio.Event()

    async def run() -> None:
        async with firewall(server) as (_, port):
            ports.append(port)
            is_up.set()
            await done.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    try:
        assert is_up.wait(10)
        yield ports[0]
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(10)
        loop.close()


@pytest.mark.requirement("Q-67")
async def test_the_first_job_after_a_pause_is_on_time(start_server: StartServer) -> None:
    """Behind a firewall that forgets after a second; the pause has to be longer than that, hence the time it takes."""
    gate = Gate()
    gate.open()
    async with firewall(start_server()) as (wall, port):
        connection = Connection(host="127.0.0.1", port=port, idle_ping_ms=300)
        options: dict[str, Any] = {"connection": connection, "drain_delay": 300, "stalled_interval": 300, "lock": 1_200}
        async with Queue("mail", connection=connection) as queue, Worker("mail", gate, **options):
            await queue.add("welcome")
            await gate.reached(1)
            await asyncio.sleep(2 * FORGETS_AFTER_S)
            began = time.monotonic()
            await queue.add("welcome")
            await gate.reached(2)
            took_s = time.monotonic() - began
        await connection.aclose()

    assert (took_s < SILENT_S, wall.forgotten) == (True, 0)


@pytest.mark.requirement("Q-67")
def test_a_blocking_queue_does_not_trust_a_connection_after_a_pause(start_server: StartServer) -> None:
    with firewall_in_a_thread(start_server()) as port:
        connection = Connection(host="127.0.0.1", port=port, idle_ping_ms=300)
        with sync.Queue("mail", connection=connection) as queue:
            queue.add("welcome")
            time.sleep(1.2 * FORGETS_AFTER_S)
            began = time.monotonic()
            queue.add("welcome")
            took_s = time.monotonic() - began
            assert queue.counts().waiting == 2

    assert took_s < SILENT_S


def test_an_interval_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidOption, match="idle_ping_ms"):
        Connection("redis://localhost", idle_ping_ms=0)


async def test_the_system_watches_over_connections_too(start_server: StartServer) -> None:
    """For what no ping of ours covers: a machine that vanished while nobody asks anything."""
    connection = Connection(start_server().url, idle_ping_ms=20_000)
    wire = await connection.open()
    opened = wire._transport.get_extra_info("socket")  # type: ignore[union-attr]  # it is open

    assert opened.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 20
    wire.close()
    await connection.aclose()
