"""Clocks that are wrong, or moved: time is the server's, so nothing runs early and nothing runs twice."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bullpen.queue import Job
from tests.chaos.arena import Arena, note, scaled, until, within

HOUR_MS = 3_600_000
DELAY_MS = 700


@pytest.mark.requirement("Q-42", "Q-8")
@pytest.mark.parametrize("offset_s", [3_600.0, -3_600.0], ids=["an hour fast", "an hour slow"])
async def test_a_worker_whose_clock_is_wrong_runs_delayed_jobs_when_they_are_due(arena: Arena, offset_s: float) -> None:
    """Machines drift, and someone sets a clock by hand: nobody gets the reminder an hour early."""
    added: dict[str, float] = {}
    async with arena.queue() as queue:
        with arena.following():
            workers = await arena.start_workers(1, offset_s=offset_s, concurrency=10, lock=5_000)
            plain: dict[str, Any] = {}
            kinds = ((False, plain), (False, {"priority": 3}), (True, plain))
            for is_instant, options in kinds * scaled(1, 100):
                before = time.monotonic()  # the server's now of the add, and of `at`, is not before this
                due: dict[str, Any] = {"at": _server_in(arena, DELAY_MS)} if is_instant else {"delay": DELAY_MS}
                job = await queue.add("work", {}, **due, **options)
                arena.ledger.accepted(job.id)
                added[job.id] = before
            await arena.all_ended()
    for worker in workers:
        worker.terminate()
        await worker.ended()

    arena.audit(max_extra_runs=0)

    lateness = [span.begin - added[span.job_id] - DELAY_MS / 1000 for span in arena.runs.spans()]
    note(
        f"worker clock off by {offset_s:.0f} s: {len(lateness)} delayed jobs, {1000 * min(lateness):.1f} to "
        f"{1000 * max(lateness):.1f} ms late"
    )
    assert min(lateness) > -0.002  # milliseconds are cut
    assert max(lateness) < 2


def _server_in(arena: Arena, ms: int) -> datetime:
    seconds, micros = arena.server.command("TIME")
    return datetime.fromtimestamp(int(seconds), UTC) + timedelta(microseconds=int(micros), milliseconds=ms)


@pytest.mark.requirement("Q-8", "Q-42", "X-123")
async def test_a_producer_whose_clock_is_wrong_stores_the_servers_time(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The creation time is part of the idempotency key and of every due time."""
    async with arena.queue() as queue:
        true_time = time.time
        with monkeypatch.context() as wrong:
            wrong.setattr(time, "time", lambda: true_time() + 7_200)
            job = await queue.add("work", {}, delay=60_000)
        score = float(arena.server.command("ZSCORE", arena.base + "delayed", job.id))

    seconds, _ = arena.server.command("TIME")
    assert abs(job.timestamp / 1000 - int(seconds)) < 10
    assert abs(score / 4096 / 1000 - 60 - int(seconds)) < 10


@pytest.mark.requirement("Q-42")
async def test_the_virtual_clock_decides_what_is_due(arena: Arena) -> None:
    """Tests move the time that scripts see instead of sleeping: not a minute early, and at once when it has come."""
    begun = asyncio.Event()

    async def handle(job: Job) -> None:
        arena.ledger.ran(job.id, fence=job.fence)
        begun.set()

    async with arena.queue() as queue:
        job = await queue.add("work", {}, delay=HOUR_MS)
        arena.ledger.accepted(job.id)
        for offset_ms in (-HOUR_MS, 0, HOUR_MS - 60_000):
            async with arena.worker(handle, clock_offset_ms=offset_ms) as worker:
                await until(lambda: worker.is_ready, "it has looked")
                assert not begun.is_set()
                assert arena.count("delayed") == 1
        with arena.following():
            async with arena.worker(handle, clock_offset_ms=HOUR_MS):
                await within(20, "the job is due", begun.wait())
                await arena.all_ended()

    arena.audit(max_extra_runs=0)


@pytest.mark.requirement("Q-42")
@pytest.mark.parametrize("offset_ms", [HOUR_MS, -HOUR_MS])
async def test_a_worker_in_another_time_neither_spins_nor_oversleeps(arena: Arena, offset_ms: int) -> None:
    """Its timers count in the same time as its scripts: a job due in a moment runs then, without polling before."""
    begun: list[float] = []
    done = asyncio.Event()

    async def handle(job: Job) -> None:
        arena.ledger.ran(job.id, fence=job.fence)
        begun.append(time.monotonic())
        done.set()

    worker = arena.worker(handle, clock_offset_ms=offset_ms, drain_delay=60_000)
    async with arena.queue(clock_offset_ms=offset_ms) as queue, worker:
        with arena.following():
            added_at = time.monotonic()  # before: the delay counts from the server's now, not from the reply
            job = await queue.add("work", {}, delay=DELAY_MS)
            arena.ledger.accepted(job.id)
            calls_before = _script_calls(arena)
            await within(20, "the job begins", done.wait())  # a read that nobody ends would take a minute
            calls = _script_calls(arena) - calls_before
            await arena.all_ended()

    arena.audit(max_extra_runs=0)

    assert begun[0] - added_at > DELAY_MS / 1000 - 0.01
    assert calls < 50, f"{calls} calls while nothing was due"


def _script_calls(arena: Arena) -> int:
    stats: Any = arena.server.command("INFO", "commandstats")
    return sum(int(stats[name]["calls"]) for name in ("cmdstat_evalsha", "cmdstat_eval") if name in stats)


@pytest.mark.requirement("X-123", "Q-66")
async def test_keys_stay_and_fences_grow_over_every_kind_of_rerun(arena: Arena) -> None:
    """Retries, crashes, give-backs: the key names the job, so repetitions are seen; the fence tells the later run."""
    jobs, kills = scaled(30, 300), scaled(2, 15)
    options: dict[str, Any] = {"concurrency": 10, "lock": 500, "stalled_interval": 100}
    async with arena.queue(attempts=3, backoff=10) as queue:
        with arena.following():
            await arena.add(queue, jobs, ms=150, fail=1)
            for _ in range(kills):
                (victim,) = await arena.start_workers(1, **options)
                await victim.seen("^began")
                victim.kill()
            (leaving,) = await arena.start_workers(1, close_timeout=0, **options)
            await leaving.seen("^began")
            leaving.terminate()
            await leaving.ended()
            async with arena.worker(**options):
                await arena.all_ended()

    arena.audit(max_extra_runs=jobs + (kills + 1) * 10)

    runs: dict[str, list[tuple[float, int, str]]] = defaultdict(list)
    for span in arena.runs.spans():
        runs[span.job_id].append((span.begin, span.fence, span.key))
    for job_id, found in runs.items():
        fences = [fence for _, fence, _ in sorted(found)]
        assert fences == sorted(set(fences)), f"fences of job {job_id!r} do not grow: {fences}"
        assert len({key for _, _, key in found}) == 1
    keys = {found[0][2] for found in runs.values()}
    assert len(keys) == len(runs) == jobs
    assert max(len(found) for found in runs.values()) >= 3  # a retry, and a crash or a give-back
