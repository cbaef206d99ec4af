"""The thread that renews locks must outlive everything: hung loops, dead servers, errors that nobody foresaw."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest

from bullpen._kernel import telemetry
from bullpen.queue import Job, Queue
from bullpen.redis import Connection
from bullpen.testing import FaultProxy, RedisServer
from bullpen.worker import Worker
from tests.conftest import StartServer
from tests.queue._kit import Gate, Kit


@pytest.fixture
def proxy(redis_server: RedisServer) -> Iterator[FaultProxy]:
    with FaultProxy(redis_server) as opened:
        yield opened


def _renewals(server: RedisServer) -> int:
    return int(server.command("INFO", "commandstats").get("cmdstat_pexpire", {}).get("calls", 0))


async def _renewed(server: RedisServer, times: int, *, within_s: float = 5.0) -> None:
    """Wait for so many further renewals: the server counts them."""
    goal, deadline = _renewals(server) + times, time.monotonic() + within_s
    while _renewals(server) < goal:
        assert time.monotonic() < deadline, f"no {times} renewals within {within_s} s"
        await asyncio.sleep(0.02)


@pytest.mark.requirement("X-103")
async def test_a_loop_that_hung_once_has_its_locks_renewed_again(kit: Kit, redis_server: RedisServer) -> None:
    """Giving up a hung loop must end when it answers again, however short the patience was."""
    hung: list[str] = []
    unsubscribe = telemetry.subscribe(lambda event, fields: hung.append(event))

    async def handle(job: Job) -> None:
        if job.data["hang"]:
            while "worker.hung" not in hung:
                time.sleep(0.01)  # noqa: ASYNC251 - the mistake that is under test
        else:
            await _renewed(redis_server, 3)

    await kit.queue().add_many([("first", {"hang": True}), ("second", {"hang": False})])

    told = await kit.drain(handle, 2, lock=1_000, max_block=200, stalled_interval=100)

    unsubscribe()
    assert told.ids("completed") == ["1", "2"]
    assert told.of("lock_lost") == []


@pytest.mark.requirement("X-103", "W-6")
async def test_an_unforeseen_error_does_not_end_the_renewing(
    kit: Kit, proxy: FaultProxy, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread serves all workers of a server: if it died, all would lose their jobs, and nobody would know."""
    calls: list[float] = []

    def revive() -> None:
        calls.append(time.monotonic())
        if len(calls) <= 3:
            raise RuntimeError("the embedded server cannot be started")

    gate = Gate()
    await kit.queue().add("mail")
    connection = Connection(proxy.url, revive=revive)
    told = await kit.work(gate, connection=connection, lock=2_000)
    await gate.reached()
    with proxy.outage():
        await kit.until(lambda: calls, "reconnecting was tried")
    await _renewed(redis_server, 2)

    gate.open()
    await told.finished()

    assert told.of("lock_lost") == []
    await told.worker.close()
    await connection.aclose()
    assert any(
        "cannot be renewed" in record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
    )


@pytest.mark.requirement("Q-23", "W-6")
async def test_a_silent_server_costs_the_workers_of_another_server_nothing(kit: Kit, start_server: StartServer) -> None:
    """One process may work for several servers; one of them hanging must not let the locks of the others run out."""
    silent = start_server()
    gate, other_gate = Gate(), Gate()
    await kit.queue().add("mail")
    told = await kit.work(gate, lock=1_000, stalled_interval=100)
    for number in range(3):
        other = kit.queue(f"other-{number}", connection=silent.url)
        await other.add("mail")
        await other.close()
        await kit.work(other_gate, queue=f"other-{number}", connection=silent.url, lock=1_000, close_timeout=0)
    await gate.reached()
    await other_gate.reached(3)

    with silent.paused():
        await asyncio.sleep(2.5)  # more than two locks, in which nothing of the silent server is answered
        gate.open()
        await told.finished()

    other_gate.open()
    assert told.of("lock_lost") == told.of("stalled") == []
    assert kit.fields("1")["ats"] == "1"
    await kit.close()


class _LoopThatIsForgotten(asyncio.SelectorEventLoop):
    """Knows its connections: a program that ends leaves them to the system, but these tests go on."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[Any] = []

    def _make_socket_transport(self, *args: Any, **kwargs: Any) -> Any:
        self._made.append(super()._make_socket_transport(*args, **kwargs))  # type: ignore[misc]  # asyncio's own
        return self._made[-1]

    def close_what_was_left_open(self) -> None:
        for transport in self._made:
            if transport._sock is not None:
                transport._sock.close()
                transport._sock = None


@pytest.mark.requirement("Q-23")
@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "stopped"])
def test_a_loop_that_has_ended_is_not_blocked_by_a_handler(
    redis_server: RedisServer, queue_name: str, caplog: pytest.LogCaptureFixture, is_closed: bool
) -> None:
    """A program that ends its loop and forgets its worker. Its locks end when nobody can run its jobs any more."""
    loop = _LoopThatIsForgotten()
    gate = Gate()
    worker = Worker(queue_name, gate, connection=redis_server.url, lock=1_000, stalled_interval=100)

    async def begin() -> None:
        async with Queue(queue_name, connection=redis_server.url) as queue:
            await queue.add("mail")
        await worker.start()
        await gate.reached()

    async def end() -> None:
        gate.open()
        await worker.close()

    loop.run_until_complete(begin())
    if is_closed:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0.1))
        loop.close()
    time.sleep(2.0)  # the thread would have told after one second
    locked = redis_server.command("EXISTS", f"bull:{queue_name}:1:lock")
    if not is_closed:
        loop.run_until_complete(end())
        loop.close()

    assert not [text for text in caplog.messages if "blocks the event loop" in text]
    assert locked == (0 if is_closed else 1)
    loop.close_what_was_left_open()
