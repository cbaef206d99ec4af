"""A server that nobody reaches for longer than a lock lasts: nothing whose worker is alive runs twice."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from bullpen.queue import Job, Queue
from bullpen.testing import FaultProxy, RedisServer, assert_sound
from bullpen.worker import Worker
from tests.chaos.arena import note, until
from tests.conftest import StartServer
from tests.faults import FaultyMachine

LOCK_MS = 1_000
JOBS = 40

Outage = Callable[[RedisServer, FaultyMachine], contextlib.AbstractAsyncContextManager[None]]


@contextlib.asynccontextmanager
async def frozen(server: RedisServer, machine: FaultyMachine) -> AsyncIterator[None]:
    with server.paused():
        yield


@contextlib.asynccontextmanager
async def clock_an_hour_ahead(server: RedisServer, machine: FaultyMachine) -> AsyncIterator[None]:
    """No outage at all: every lock and every gate ends in one moment."""
    machine.clock_jumps()
    yield


@contextlib.asynccontextmanager
async def full_disk(server: RedisServer, machine: FaultyMachine) -> AsyncIterator[None]:
    with machine.disk_full():
        yield


@contextlib.asynccontextmanager
async def no_room_for_clients(server: RedisServer, machine: FaultyMachine) -> AsyncIterator[None]:
    """All connections are cut, and none is let in but ours."""
    client = server.client()
    client.config_set("maxclients", 1)
    client.client_kill_filter(_type="normal", skipme=True)
    client.client_kill_filter(_type="pubsub", skipme=True)
    yield
    client.config_set("maxclients", 1_000)


@pytest.mark.requirement("Q-66")
@pytest.mark.parametrize(
    "outage",
    [
        frozen,
        pytest.param(clock_an_hour_ahead, marks=pytest.mark.long),
        pytest.param(full_disk, marks=pytest.mark.long),
        pytest.param(no_room_for_clients, marks=pytest.mark.long),
    ],
)
async def test_an_outage_longer_than_the_lock_repeats_nothing(outage: Outage, queue_name: str, tmp_path: Path) -> None:
    """Half of the jobs end while nobody can say so, half go on. A second worker with nothing to do looks for stalled
    ones before the first can renew its locks."""
    machine = FaultyMachine(tmp_path)
    runs: Counter[str] = Counter()
    ends = {"in the outage": asyncio.Event(), "after it": asyncio.Event()}
    lost: list[str] = []

    async def handle(job: Job) -> None:
        runs[job.id] += 1
        await ends[job.name].wait()

    with RedisServer.start(machine.binary, persistent=True) as server:
        options: dict[str, Any] = {"lock": LOCK_MS, "stalled_interval": LOCK_MS // 2, "concurrency": JOBS}
        async with (
            Queue(queue_name, connection=server.url) as queue,
            Worker(queue_name, handle, connection=server.url, **options) as idle,
            Worker(queue_name, handle, connection=server.url, **options) as busy,
        ):
            idle.pause()
            for worker in (idle, busy):
                worker.on("lock_lost", lambda job, error: lost.append(job.id))
            jobs = await queue.add_many([(name, None) for name in ends for _ in range(JOBS // 2)])
            await until(lambda: len(runs) == JOBS, "all jobs run")
            marked = f"bull:{queue_name}:stalled"
            await until(lambda: server.command("SCARD", marked) > 0, "a check has marked them")
            async with outage(server, machine):
                ends["in the outage"].set()
                await asyncio.sleep(2 * LOCK_MS / 1000)
            idle.resume()
            await asyncio.sleep(2 * LOCK_MS / 1000)  # time for several checks
            ends["after it"].set()
            states = await asyncio.gather(*(job.result(timeout=20_000) for job in jobs))

        assert len(states) == JOBS
        assert {job_id: times for job_id, times in runs.items() if times > 1} == {}
        assert lost == []
        assert [server.command("HGET", f"bull:{queue_name}:{job.id}", "stc") for job in jobs] == [None] * JOBS
        assert_sound(server.client(), "bull", queue_name)
    note(f"{outage.__name__} for twice the lock: 0 of {JOBS} jobs ran twice")


@pytest.mark.requirement("Q-66")
async def test_an_outage_about_as_long_as_the_lock_repeats_nothing(queue_name: str, start_server: StartServer) -> None:
    """The check for stalled jobs is hardly late then, but the locks have run out. The worker that holds them finds the
    server a moment later than the one that checks."""
    runs: Counter[str] = Counter()
    end = asyncio.Event()

    async def handle(job: Job) -> None:
        runs[job.id] += 1
        await end.wait()

    server = start_server()
    options: dict[str, Any] = {"lock": LOCK_MS, "stalled_interval": LOCK_MS, "concurrency": JOBS}
    with FaultProxy(server) as proxy:
        async with (
            Queue(queue_name, connection=server.url) as queue,
            Worker(queue_name, handle, connection=proxy.url, **options),
        ):
            jobs = await queue.add_many([("mail", None)] * JOBS)
            await until(lambda: len(runs) == JOBS, "all jobs run")
            async with Worker(queue_name, handle, connection=server.url, **options) as idle:
                idle.pause()
                stalled = f"bull:{queue_name}:stalled"
                await until(lambda: server.command("SCARD", stalled) > 0, "a check has marked them")
                with proxy.stalled():
                    with server.paused():
                        await asyncio.sleep(1.2 * LOCK_MS / 1000)
                    await asyncio.sleep(0.3 * LOCK_MS / 1000)  # time for a check
                end.set()
                await asyncio.gather(*(job.result(timeout=20_000) for job in jobs))

    assert {job_id: times for job_id, times in runs.items() if times > 1} == {}
    assert [server.command("HGET", f"bull:{queue_name}:{job.id}", "stc") for job in jobs] == [None] * JOBS
