"""The server is killed, restarted, frozen or full: nothing acknowledged is lost, and work goes on at once."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from bullpen.errors import OutOfMemory, PermanentError
from bullpen.queue import Job
from bullpen.redis import Connection
from bullpen.testing import RedisServer, check_queue
from tests.chaos.arena import Arena, note, scaled, until, within

BACK_WITHIN_S = 1.5
"""From the server's first answer to the first handler that begins."""


@contextlib.contextmanager
def _recording_recovery(arena: Arena, figures: list[float]) -> Iterator[None]:
    """Measure from the end of the block, when the server answers again, to the first handler that begins."""
    yield
    returned_at = time.monotonic()
    deadline = returned_at + 10
    while (passed := arena.runs.first_begin_after(returned_at)) is None:
        assert time.monotonic() < deadline, f"no handler began within 10 s of the server's return\n{arena.describe()}"
        time.sleep(0.002)
    figures.append(passed)


@pytest.mark.requirement("W-6", "W-55", "Q-65", "Q-67", "X-118")
async def test_a_killed_server_loses_nothing_acknowledged_and_work_resumes_at_once(durable_arena: Arena) -> None:
    """kill -9 of the server under load, several times, with producer and workers in processes and here."""
    arena = durable_arena
    deaths, concurrency = scaled(3, 30), 10
    figures: list[float] = []
    options: dict[str, Any] = {"concurrency": concurrency, "lock": 30_000}
    async with arena.queue() as queue:
        with arena.following():
            workers = await arena.start_workers(1, **options)
            async with arena.feeding(queue, 20, every_s=0.02, ms=20), arena.worker(**options):
                for death in range(deaths):
                    away_s = (0.0, 0.3, 1.2)[death % 3]  # at once, and after the pauses between attempts have grown
                    more = len(arena.runs.spans()) + 50
                    await until(partial(arena.runs.has_spans, more), "jobs run")

                    def die_and_return(away_s: float = away_s) -> None:
                        arena.server.kill()
                        time.sleep(away_s)
                        with _recording_recovery(arena, figures):
                            arena.server.restart()

                    await asyncio.to_thread(die_and_return)
                # The feeder may be in the middle of an add that is being repeated; it ends with the block.
            await arena.all_ended()
        for worker in workers:
            worker.terminate()
            assert await worker.ended() == 0

    # Both workers outlive the server's absence and hold their locks: whatever was in flight is settled by its own run.
    arena.audit(max_extra_runs=0)

    jobs = len(arena.ledger.accepted_ids)
    note(f"server killed {deaths} times under {jobs} jobs: 0 lost, {arena.extra_runs} extra runs")
    note(f"first execution after the server's return: {', '.join(f'{figure:.3f}' for figure in figures)} s")
    assert max(figures) < BACK_WITHIN_S


@pytest.mark.requirement("W-6", "W-55", "X-118")
async def test_a_frozen_server_is_waited_for_and_work_resumes_at_once(arena: Arena) -> None:
    """SIGSTOP swallows everything: deadlines of ours end the waiting, late copies of our calls do no harm."""
    frozen_s = 2.5  # longer than a command may take here, so calls are given up and repeated
    figures: list[float] = []
    connection = Connection(arena.server.url, command_timeout_ms=1_000, connect_timeout_ms=1_000)
    async with arena.queue(url=connection) as queue:
        with arena.following():
            async with arena.worker(url=connection, concurrency=10, lock=30_000):
                async with arena.feeding(queue, 20, every_s=0.02, ms=10):
                    await until(lambda: len(arena.runs.spans()) > 50, "jobs run")

                    def freeze() -> None:
                        arena.server.pause()
                        time.sleep(frozen_s)
                        with _recording_recovery(arena, figures):
                            arena.server.resume()

                    await asyncio.to_thread(freeze)
                await arena.all_ended()

    await connection.aclose()
    arena.audit(max_runs=1, max_extra_runs=0)

    note(f"server frozen for {frozen_s} s: first execution {figures[0]:.3f} s after it went on, no extra run")
    assert figures[0] < BACK_WITHIN_S


@pytest.mark.requirement("W-6")
async def test_worker_and_queue_may_start_before_the_server(arena: Arena) -> None:
    """In a cluster everything starts at the same time, in any order."""
    arena.server.kill()
    async with arena.queue() as queue, arena.worker(concurrency=5):
        adding = asyncio.create_task(arena.add(queue, 5))
        await asyncio.sleep(0.3)  # some vain attempts
        assert not adding.done()

        await asyncio.to_thread(arena.server.restart)

        with arena.following():
            await within(5, "the adds are answered", adding)
            await arena.all_ended(10)

    arena.audit(max_extra_runs=0)


@pytest.mark.requirement("W-57", "X-29", "X-121")
async def test_closing_without_the_server_is_bounded_and_loses_nothing(durable_arena: Arena) -> None:
    """Whoever stops a deployment during an outage must not wait for its end; the locks bring the jobs back later."""
    arena = durable_arena
    connection = Connection(arena.server.url, command_timeout_ms=1_000)
    async with arena.queue() as queue:
        worker = arena.worker(url=connection, concurrency=5, lock=1_500, stalled_interval=100, close_timeout=100)
        await worker.start()
        await arena.add(queue, 5, ms=600_000)
        await until(lambda: worker.running == 5, "all run")
        arena.server.kill()
        closing_at = time.monotonic()

        await within(20, "the worker closes", worker.close())  # the server comes back only afterwards

        closed_after_s = time.monotonic() - closing_at
        await asyncio.to_thread(arena.server.restart)

        async def second_run(job: Job) -> None:
            arena.ledger.ran(job.id, fence=job.fence)

        with arena.following():
            async with arena.worker(second_run, concurrency=5, lock=1_500, stalled_interval=100):
                await arena.all_ended()
    await connection.aclose()

    arena.audit(max_extra_runs=5)

    note(f"closed {closed_after_s:.2f} s after the order, with the server away and five jobs running")


# ---- memory ---------------------------------------------------------------------------------------------------------


def _fill(server: RedisServer) -> None:
    """No memory left: nothing that needs more is accepted from now on."""
    used = int(server.command("INFO", "memory")["used_memory"])
    server.command("CONFIG", "SET", "maxmemory", max(1, used // 2))


@pytest.mark.requirement("X-126", "Q-65", "Q-67")
async def test_a_full_server_takes_no_jobs_and_loses_no_outcome(arena: Arena) -> None:
    """Adding fails with nothing written; finishing, renewing, recovering and taking go on, or it would stay full."""
    gate = asyncio.Event()
    begun: list[str] = []
    short: dict[str, Any] = {"lock": 1_000, "stalled_interval": 200}

    async def handle(job: Job) -> dict[str, Any]:
        arena.ledger.ran(job.id, fence=job.fence)
        begun.append(job.id)
        if job.data.get("wait"):
            await gate.wait()
        if job.data.get("fail") and job.attempts_made == 0:
            raise RuntimeError("once")
        if job.data.get("hopeless"):
            raise PermanentError("for good")
        return {"big": "x" * 1_000}

    async with arena.queue(attempts=2, backoff=1) as queue:
        with arena.following():
            # One whose worker died, to be recovered while memory is full.
            (orphan,) = await arena.add(queue, 1)
            _abandon(arena, orphan)
            running = await arena.add(queue, 3, wait=True)
            async with arena.worker(handle, concurrency=10, dead_letters=True, **short) as worker:
                await until(lambda: len(begun) >= 3, "three jobs run")
                waiting = await arena.add(queue, 20, wait=True)
                failing = await arena.add(queue, 3, wait=True, fail=True)
                (hopeless,) = await arena.add(queue, 1, wait=True, hopeless=True)
                _fill(arena.server)
                assert arena.field(orphan, "stc") is None  # still to be recovered
                last_number = arena.server.command("GET", arena.base + "id")

                for _ in range(3):
                    with pytest.raises(OutOfMemory, match="stored nothing"):
                        await queue.add("work", {"too": "much"})
                with pytest.raises(OutOfMemory):
                    await queue.add_many([("work", {})] * 500)
                assert arena.server.command("GET", arena.base + "id") == last_number
                assert arena.count("wait") == 20 + 3 + 1 - (10 - 3)
                await asyncio.sleep(1.5)  # longer than the lock: only renewal keeps the running jobs ours
                gate.set()
                await arena.all_ended()
                with pytest.raises(OutOfMemory):
                    await queue.add("work", {"still": "full"})
                arena.server.command("CONFIG", "SET", "maxmemory", 0)
                (last,) = await arena.add(queue, 1)
                await arena.all_ended()
            assert worker.running == 0

    arena.audit(max_extra_runs=3)  # the three that failed once

    assert arena.heard("lock_lost") == arena.heard("error") == []
    assert arena.field(orphan, "stc") == b"1"
    assert {job_id.decode() for job_id in arena.server.command("ZRANGE", arena.base + "failed", 0, -1)} == {hopeless}
    assert arena.server.command("LLEN", f"bull:{arena.name}-dlq:wait") == 1
    assert arena.count("completed") == len([*running, *waiting, *failing, orphan, last])


def _abandon(arena: Arena, job_id: str) -> None:
    """Make a waiting job look as if its worker took it and died; its lock runs out in a second."""
    transaction = arena.server.client().pipeline(transaction=True)
    transaction.lrem(arena.base + "wait", 1, job_id)
    transaction.lpush(arena.base + "active", job_id)
    transaction.hset(arena.base + job_id, "ats", "1")
    transaction.set(f"{arena.base}{job_id}:lock", "dead", px=1_000)
    transaction.xadd(arena.base + "events", {"event": "active", "jobId": job_id, "prev": "waiting"})
    transaction.execute()


# ---- a crash between any two bytes ----------------------------------------------------------------------------------


@pytest.mark.requirement("X-50", "X-106", "Q-65")
async def test_a_crash_at_any_moment_leaves_whole_steps_only(durable_arena: Arena) -> None:
    """Cut the server's own journal at many places and start from there: whatever a crash may leave is sound, and a job
    is failed if and only if its dead letter is there."""
    arena = durable_arena
    jobs, cuts = 6, scaled(25, 400)

    async def fail(job: Job) -> None:
        arena.ledger.ran(job.id, fence=job.fence)
        raise ValueError("no")

    async with arena.queue(attempts=2, backoff=1) as queue:
        with arena.following():
            await arena.add(queue, jobs, payload="x" * 200)
            async with arena.worker(fail, concurrency=3, dead_letters=True):
                await arena.all_ended()
    arena.server.kill()
    # From 7.0 on the journal is a folder of parts, before it is one file.
    parts = [*arena.server.directory.glob("appendonlydir/*.incr.aof"), *arena.server.directory.glob("appendonly.aof")]
    (journal,) = parts
    whole = journal.read_bytes()

    letters_seen = []
    for cut in range(1, cuts + 1):
        journal.write_bytes(whole[: len(whole) * cut // cuts])
        arena.server.restart()
        letters_seen.append(_check_after_crash(arena))
        arena.server.kill()

    assert letters_seen[-1] == jobs
    assert len(set(letters_seen)) > 2  # the cuts went through the failures
    note(
        f"journal of {len(whole)} bytes cut at {cuts} places: sound each time; dead letters {sorted(set(letters_seen))}"
    )


def _check_after_crash(arena: Arena) -> int:
    client = arena.server.client()
    for name in (arena.name, f"{arena.name}-dlq"):
        assert check_queue(client, "bull", name, in_flight=True) == []
    failed = set(arena.server.command("ZRANGE", arena.base + "failed", 0, -1))
    letters = set(arena.server.command("LRANGE", f"bull:{arena.name}-dlq:wait", 0, -1))
    expected = {client.hget(arena.base + job_id.decode(), "bpdl") for job_id in failed}
    assert letters == expected
    return len(letters)
