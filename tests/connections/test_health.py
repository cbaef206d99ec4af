"""A health check asks and changes nothing."""

from __future__ import annotations

import asyncio
import logging

import pytest

from bullpen.queue import Queue
from bullpen.redis import Connection
from tests.conftest import StartServer
from tests.connections._scripted import scripted
from tests.queue._kit import soon


@pytest.mark.requirement("W-56", "X-49")
async def test_a_server_that_answers_is_healthy_and_gets_no_key(start_server: StartServer) -> None:
    """The usual sample adds a queue called `health-check` and leaves its keys behind."""
    server = start_server()
    queue = Queue("mail", connection=server.url)

    assert await queue.is_healthy()
    await queue.close()

    assert server.command("DBSIZE") == 0


@pytest.mark.requirement("X-49")
async def test_an_open_connection_is_used(start_server: StartServer) -> None:
    """A check every second must not cost the server a connection every second."""
    server = start_server()
    async with Queue("mail", connection=server.url) as queue:
        await queue.add("welcome")
        before = server.command("INFO", "stats")["total_connections_received"]

        assert [await queue.is_healthy() for _ in range(5)] == [True] * 5

        assert server.command("INFO", "stats")["total_connections_received"] == before


@pytest.mark.requirement("W-56")
async def test_a_server_that_is_away_is_told_and_not_raised(caplog: pytest.LogCaptureFixture) -> None:
    connection = Connection("redis://127.0.0.1:1")

    with caplog.at_level(logging.ERROR, "bullpen.redis"):
        healthy = await connection.is_healthy()
    await connection.aclose()

    assert healthy is False
    (message,) = caplog.messages
    assert message.startswith("BullMQ health check failed: cannot connect to 127.0.0.1:1")


@pytest.mark.requirement("W-56", "X-49")
async def test_a_server_that_hangs_costs_only_the_time_given(
    start_server: StartServer, caplog: pytest.LogCaptureFixture
) -> None:
    """An orchestrator kills what does not answer its probe; so the probe answers first. And when the server goes on,
    the connection is still good: a slow answer to a probe is no reason to cut work that waits on the same wire."""
    server = start_server()
    async with Queue("mail", connection=server.url) as queue:
        await queue.add("welcome")
        with server.paused(), caplog.at_level(logging.ERROR, "bullpen.redis"):
            healthy = await soon(queue.is_healthy(timeout_ms=100))
        connected = server.command("INFO", "stats")["total_connections_received"]

        assert healthy is False
        assert caplog.messages[-1] == (
            f"BullMQ health check failed: 127.0.0.1:{server.port} did not answer within 100 ms"
        )
        assert await soon(queue.is_healthy())
        assert server.command("INFO", "stats")["total_connections_received"] == connected


@pytest.mark.requirement("W-56")
async def test_a_server_that_refuses_is_not_healthy(caplog: pytest.LogCaptureFixture) -> None:
    """Wrong password, or a server that loads its data: the reason is in the log."""

    def answer(command: list[bytes]) -> bytes | None:
        return b"-LOADING Redis is loading the dataset in memory\r\n" if command[0] == b"PING" else None

    async with scripted(answer) as server:
        connection = Connection(server.url)
        with caplog.at_level(logging.ERROR, "bullpen.redis"):
            assert await connection.is_healthy() is False
        await connection.aclose()

    assert "LOADING" in caplog.text


async def test_a_closed_queue_is_not_healthy(start_server: StartServer) -> None:
    """And opens nothing that nobody would close."""
    server = start_server()
    queue = Queue("mail", connection=server.url)
    await queue.close()

    assert not await queue.is_healthy()


async def test_cancelling_a_check_cancels_it(start_server: StartServer) -> None:
    """`never raises` is about the server; a program that ends must end."""
    server = start_server()
    async with Queue("mail", connection=server.url) as queue:
        await queue.add("welcome")
        with server.paused():
            check = asyncio.ensure_future(queue.is_healthy(timeout_ms=60_000))
            await asyncio.sleep(0)
            check.cancel()
            with pytest.raises(asyncio.CancelledError):
                await check


async def test_probes_of_a_server_that_stays_away_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """A readiness probe asks every few seconds: the log says it when it begins, not each time."""
    connection = Connection("redis://127.0.0.1:1")
    for _ in range(5):
        assert not await connection.is_healthy()
    await connection.aclose()

    assert [record.getMessage().partition(":")[0] for record in caplog.records if "health" in record.getMessage()] == [
        "BullMQ health check failed"
    ]
