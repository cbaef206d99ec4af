"""Workers that are killed, frozen or hang: their jobs go to others, and what they say afterwards counts for nothing."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import Any

import pytest

from bullpen.queue import Job
from bullpen.testing import Child
from tests.chaos.arena import Arena, note, scaled, until, within

LOCK_MS = 1_000
STALLED_INTERVAL_MS = 200


async def freeze_with_work(arena: Arena, victim: Child) -> None:
    """Frozen first: what it has in its hands then cannot end before the kill, however long that takes."""
    while True:
        await until(partial(arena.runs.has_work, victim.pid), "the victim has work in its hands")
        victim.pause()
        if arena.runs.has_work(victim.pid):
            return
        victim.resume()


@pytest.mark.requirement("Q-23", "Q-27", "Q-65", "Q-66", "Q-67", "X-13", "W-65")
async def test_killed_workers_lose_nothing_and_repeat_only_what_they_were_doing(arena: Arena) -> None:
    """kill -9 is the most ordinary accident: each job at least once, and again only what was in flight."""
    kills, concurrency = scaled(3, 40), 10
    options: dict[str, Any] = {"concurrency": concurrency, "lock": LOCK_MS, "stalled_interval": STALLED_INTERVAL_MS}
    async with arena.queue() as queue:
        with arena.following():
            workers = await arena.start_workers(3, **options)
            async with arena.feeding(queue, 25, every_s=0.3, ms=300):
                for _ in range(kills):
                    victim = random.choice(workers)
                    replacement = arena.start_worker(**options)
                    await replacement.seen("^ready")
                    await freeze_with_work(arena, victim)
                    victim.kill()
                    workers[workers.index(victim)] = replacement
            await arena.all_ended()
        for worker in workers:
            worker.terminate()
            assert await worker.ended() == 0

    arena.audit(max_extra_runs=kills * concurrency)

    jobs = len(arena.ledger.accepted_ids)
    assert arena.count("completed") == jobs
    assert arena.extra_runs > 0  # or nobody was hurt, and the test showed nothing
    note(f"{kills} workers killed under {jobs} jobs: {arena.extra_runs} extra runs, allowed {kills * concurrency}")


@pytest.mark.requirement("Q-66", "Q-67")
@pytest.mark.parametrize("late", ["handler is cancelled", "outcome is sent late"])
async def test_a_worker_frozen_beyond_its_lock_cannot_finish_a_job_of_another_worker(arena: Arena, late: str) -> None:
    """A machine that sleeps and wakes must not overwrite what others did: one completion, that of the second run."""
    # Blocking the loop lets the frozen handler return before anybody can tell it that its lock is gone.
    work = {"ms": 60_000} if late == "handler is cancelled" else {"block_ms": 300}
    options: dict[str, Any] = {"lock": LOCK_MS, "stalled_interval": STALLED_INTERVAL_MS}
    taken_over, go_on = asyncio.Event(), asyncio.Event()

    async def second_run(job: Job) -> dict[str, int]:
        arena.ledger.ran(job.id, fence=job.fence)
        taken_over.set()
        await go_on.wait()
        return {"fence": job.fence}

    async with arena.queue() as queue:
        (frozen,) = await arena.start_workers(1, **options)
        (job_id,) = await arena.add(queue, 1, **work)
        await frozen.seen(f"^began {job_id} 1")
        frozen.pause()
        with arena.following():
            async with arena.worker(second_run, **options):
                await within(10, "the other worker has the job", taken_over.wait())
                frozen.resume()
                await frozen.seen(f"^lock_lost {job_id}")
                assert arena.count("completed") == 0  # the late word counted for nothing
                go_on.set()
                await arena.all_ended()
    frozen.terminate()
    assert await frozen.ended() == 0

    arena.audit(max_extra_runs=1, may_overlap=True)

    assert arena.field(job_id, "returnvalue") == b'{"fence":2}'
    assert [run.fence for run in arena.ledger.runs] == [1, 2]


@pytest.mark.requirement("X-103", "Q-23")
async def test_a_handler_that_blocks_the_loop_keeps_its_lock_and_is_reported(arena: Arena) -> None:
    """Blocking code in `async def` is the commonest mistake; it must cost time, not a second run of the same job."""
    lock_ms, jobs = 500, scaled(2, 8)
    async with arena.queue() as queue:
        with arena.following():
            (blocked,) = await arena.start_workers(1, lock=lock_ms, stalled_interval=50, concurrency=jobs)
            await arena.add(queue, jobs, block_ms=3 * lock_ms)
            await blocked.seen("^began")
            async with arena.worker(lock=lock_ms, stalled_interval=50):  # would take whatever looks stalled
                lag = await blocked.seen(r"^lag \d+")
                await arena.all_ended()
    blocked.terminate()
    await blocked.ended()

    arena.audit(max_extra_runs=0)

    assert arena.count("completed") == jobs
    assert arena.heard("stalled") == []
    assert "blocks the event loop" in blocked.errors
    note(
        f"loop blocked by {jobs} jobs for {3 * lock_ms} ms each, lock {lock_ms} ms: reported as {lag!r}, no second run"
    )


@pytest.mark.requirement("X-103", "Q-67")
async def test_a_loop_that_hangs_for_too_long_loses_its_jobs_and_shows_where(arena: Arena) -> None:
    """Renewing the locks of a hung process for ever would hide it for ever."""
    lock_ms = 500
    async with arena.queue() as queue:
        (hung,) = await arena.start_workers(1, lock=lock_ms, stalled_interval=100, max_block=1_200)
        (job_id,) = await arena.add(queue, 1, block_ms=3_000)
        await hung.seen(f"^began {job_id} 1")

        async def second_run(job: Job) -> str:
            arena.ledger.ran(job.id, fence=job.fence)
            return "second"

        with arena.following():
            async with arena.worker(second_run, lock=lock_ms, stalled_interval=100):
                await hung.seen(r"^hung \d+")
                await arena.all_ended()
                await hung.seen(f"^lock_lost {job_id}")  # its late outcome was dropped
    hung.terminate()
    await hung.ended()

    arena.audit(max_extra_runs=1, may_overlap=True)

    assert arena.field(job_id, "returnvalue") == b'"second"'
    assert "most recent call first" in hung.errors
    assert "in handle" in hung.errors
