"""What the page about backups promises of a restored server."""

from __future__ import annotations

import asyncio
import shutil

from bullpen import Job, Queue, Worker
from bullpen.testing import RedisServer, assert_sound
from tests.conftest import StartServer

PATIENCE = 60_000


async def run_all(url: str, wanted: int) -> list[tuple[str, str]]:
    """Run jobs until so many have ended; their names and keys."""
    done: list[tuple[str, str]] = []
    ended = asyncio.Event()

    async def handle(job: Job) -> None:
        done.append((job.name, job.idempotency_key))

    def count(*_: object) -> None:
        if len(done) >= wanted:
            ended.set()

    worker = Worker("orders", handle, connection=url, stalled_interval=100, lock=500)
    worker.on("completed", count)
    async with worker, asyncio.timeout(60):
        await ended.wait()
    return sorted(done)


def restored(saved: RedisServer, empty: RedisServer) -> str:
    """The second server with the snapshot of the first."""
    empty.stop()
    shutil.copy(saved.directory / "dump.rdb", empty.directory / "dump.rdb")
    empty.restart()
    return empty.url


async def test_jobs_that_ran_after_the_snapshot_run_again_with_the_same_key(start_server: StartServer) -> None:
    first, second = start_server(), start_server()
    async with Queue("orders", connection=first.url) as queue:
        for number in range(20):
            await queue.add(f"order {number}")
        await queue.add("later", delay=1_000)
        first.command("SAVE")
        await queue.add("after the snapshot")

    before = await run_all(first.url, 22)
    after = await run_all(restored(first, second), 21)

    assert [each for each in before if each[0] != "after the snapshot"] == after
    assert_sound(second.client(), "bull", "orders")


async def test_a_job_that_ran_while_the_snapshot_was_taken_is_run_again(start_server: StartServer) -> None:
    first, second = start_server(), start_server()
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def handle(job: Job) -> None:
        begun.set()
        await may_end.wait()

    async with Queue("orders", connection=first.url) as queue, Worker("orders", handle, connection=first.url):
        job = await queue.add("order")
        async with asyncio.timeout(60):
            await begun.wait()
        first.command("SAVE")
        may_end.set()
        await job.result(timeout=PATIENCE)

    again = await run_all(restored(first, second), 1)

    assert [name for name, _ in again] == ["order"]
