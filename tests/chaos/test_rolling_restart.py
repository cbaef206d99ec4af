"""Deployments: workers are asked to leave under load, and nobody notices."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from bullpen.queue import Job
from tests.chaos.arena import Arena, note, scaled, until, within

# Long enough that nothing may return by itself: what comes back was given back.
LOCK_MS = 30_000


@pytest.mark.requirement("X-29", "X-121", "R-37", "W-57", "W-65")
async def test_a_rolling_restart_under_load_repeats_nothing(arena: Arena) -> None:
    """A release must not cost a single double run: what was begun ends, what was not begun goes to others at once."""
    rounds, concurrency = scaled(3, 40), 20
    options: dict[str, Any] = {"concurrency": concurrency, "lock": LOCK_MS, "stalled_interval": 100}
    async with arena.queue() as queue:
        with arena.following():
            workers = await arena.start_workers(2, **options)
            async with arena.feeding(queue, 10, every_s=0.04, ms=20):
                for round_ in range(rounds):
                    replacement = arena.start_worker(**options)
                    await replacement.seen("^ready")
                    leaving, workers[round_ % 2] = workers[round_ % 2], replacement
                    leaving.terminate()
                    assert await leaving.ended() == 0
                    assert "closed" in leaving.output
            await arena.all_ended()
        for worker in workers:
            worker.terminate()
            assert await worker.ended() == 0

    arena.audit(max_runs=1, max_extra_runs=0)

    jobs = len(arena.ledger.accepted_ids)
    assert arena.count("completed") == jobs
    note(f"{rounds} workers replaced under {jobs} jobs: {arena.extra_runs} repeated runs")


@pytest.mark.requirement("X-29", "X-121", "W-57")
async def test_many_short_lived_workers_leave_no_job_behind(arena: Arena) -> None:
    """Closing at any moment, also while jobs are on their way to us: none may wait for a lock that nobody holds."""
    rounds = scaled(14, 1_000)
    async with arena.queue() as queue:
        with arena.following():
            async with arena.feeding(queue, 10, every_s=0.005):
                for round_ in range(rounds):
                    async with arena.worker(concurrency=10, lock=LOCK_MS) as worker:
                        await asyncio.sleep(0.001 * (round_ % 7))  # a different moment of the exchange each time
                    assert worker.running == 0
            async with arena.worker(concurrency=50, lock=LOCK_MS):
                await arena.all_ended()

    arena.audit(max_runs=1, max_extra_runs=0)


@pytest.mark.requirement("X-29", "R-37")
async def test_a_second_signal_gives_running_jobs_back_at_once(arena: Arena) -> None:
    """Whoever hurries must not wait for long jobs, and the next worker must not wait for their locks."""
    async with arena.queue() as queue:
        (leaving,) = await arena.start_workers(1, concurrency=3, lock=LOCK_MS)
        ids = await arena.add(queue, 3, ms=600_000)
        for _ in ids:
            await leaving.seen("^began")
        leaving.terminate()
        await until(lambda: "still run" in leaving.errors, "the first signal is taken note of")
        hurried_at = time.monotonic()

        leaving.terminate()

        assert await leaving.ended(20) == 0  # the jobs would run for ten minutes
        left_after_s = time.monotonic() - hurried_at
        assert [arena.field(job_id, "atm") for job_id in ids] == [None] * 3  # no attempt was counted
        again: list[int] = []
        all_again = asyncio.Event()

        async def second_run(job: Job) -> None:
            arena.ledger.ran(job.id, fence=job.fence)
            again.append(job.stalled_count)
            if len(again) == 3:
                all_again.set()

        async with arena.worker(second_run, concurrency=3, lock=LOCK_MS):
            # Within less than a lock lasts: nobody waits for those of the worker that left.
            await within(LOCK_MS / 2_000, "the jobs given back run again at once", all_again.wait())

    arena.audit(max_extra_runs=3)

    assert again == [0, 0, 0]  # given back, not stalled
    note(f"second SIGTERM: gone after {left_after_s:.2f} s, three running jobs given back")


@pytest.mark.requirement("X-29", "X-121")
async def test_close_with_a_bound_gives_back_what_does_not_finish(arena: Arena) -> None:
    """The bound is ours to name; a job that ignores its cancellation is not given back while it still runs."""
    begun, stubborn_over = asyncio.Event(), asyncio.Event()

    async def handle(job: Job) -> str:
        arena.ledger.ran(job.id, fence=job.fence)
        if job.data["kind"] == "polite":
            await asyncio.sleep(600)
        begun.set()
        while not stubborn_over.is_set():
            try:
                await stubborn_over.wait()
            except asyncio.CancelledError:
                pass  # it does not care
        return "late"

    async with arena.queue() as queue:
        polite = await arena.add(queue, 1, kind="polite")
        stubborn = await arena.add(queue, 1, kind="stubborn")
        with arena.following():
            async with arena.worker(handle, concurrency=2, lock=1_000, stalled_interval=100) as worker:
                await within(5, "both run", begun.wait())
                await within(20, "the worker closes although a job does not end", worker.close(200))
            assert await asyncio.to_thread(lambda: arena.count("wait")) == 1
            assert arena.server.command("LRANGE", arena.base + "wait", 0, -1) == [polite[0].encode()]
            assert arena.server.command("LRANGE", arena.base + "active", 0, -1) == [stubborn[0].encode()]
            stubborn_over.set()

            async def finish(job: Job) -> str:
                arena.ledger.ran(job.id, fence=job.fence)
                return "second run"

            async with arena.worker(finish, concurrency=2, lock=1_000, stalled_interval=100):
                await arena.all_ended()

    arena.audit(max_extra_runs=2, max_runs=2, may_overlap=True)

    assert arena.field(polite[0], "stc") is None
    assert arena.field(stubborn[0], "stc") == b"1"
