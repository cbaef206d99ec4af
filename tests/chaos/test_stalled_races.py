"""Stalled checks: whoever is alive is never taken for dead, whoever is dead is always found."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from bullpen.queue import Job
from bullpen.testing import Child
from tests.chaos.arena import PATIENCE_S, Arena, note, scaled, until, within

# A process of its own, or the interpreter's lock would leave it too few turns. The gate of the check lets one pass per
# interval; with an interval of 1 ms it is open nearly always.
CHECKER = """
import select, sys, time
import redis
from bullpen.wire.keys import QueueKeys
from bullpen.wire.scripts import SCRIPTS

keys, script = QueueKeys("bull", sys.argv[2]), SCRIPTS["check_stalled"]
check = redis.Redis(port=int(sys.argv[1])).register_script(script.body)
names = [getattr(keys, name) for name in script.keys]
checks = recovered = 0
print("ready")
while not select.select([sys.stdin], [], [], 0.002)[0]:
    checks += 1
    recovered += len(check(keys=names, args=[keys.base, 0, 1, "", 10_000])[1])
print(f"{checks} checks, {recovered} recovered")
"""


@pytest.mark.requirement("Q-23", "Q-37", "Q-67")
async def test_stalled_checks_without_pause_find_nothing_among_live_workers(arena: Arena) -> None:
    """Lock and place in `active` come in one step; else a check between them would steal a job just taken."""
    jobs = scaled(600, 60_000)
    with Child.code(CHECKER, str(arena.server.port), arena.name) as checker, arena.following():
        checker.wait_for("ready")
        async with (
            arena.queue() as queue,
            arena.worker(concurrency=50, lock=10_000, stalled_interval=1),
            arena.worker(concurrency=50, lock=10_000, stalled_interval=1),
        ):
            for _ in range(jobs // 100):
                await arena.add(queue, 100)
            await arena.all_ended()
        checker.close_stdin()
        checks = checker.wait_for(r"\d+ checks, \d+ recovered")

    arena.audit(max_runs=1, max_extra_runs=0)

    assert arena.heard("stalled") == arena.heard("lock_lost") == []
    stalls = sum(arena.field(job_id, "stc") is not None for job_id in arena.ledger.accepted_ids)
    assert stalls == 0
    assert checks.endswith(" 0 recovered")
    note(f"{checks} of {jobs} jobs")


@pytest.mark.requirement("Q-67", "X-118")
async def test_every_job_of_a_dead_worker_is_found_however_many(arena: Arena) -> None:
    """More than one call of the check can return: it goes on until none is left."""
    count, lock_ms = scaled(1_200, 20_000), scaled(1_000, 20_000)  # it must hold them all before the first lock ends

    async def second_run(job: Job) -> None:
        arena.ledger.ran(job.id, fence=job.fence)

    async with arena.queue() as queue:
        for _ in range(count // 100):
            await arena.add(queue, 100, ms=600_000)
        (doomed,) = await arena.start_workers(1, concurrency=count, lock=lock_ms, stalled_interval=100)
        await until(lambda: arena.count("active") == count, "one worker has them all")
        doomed.kill()
        with arena.following():
            async with arena.worker(second_run, concurrency=100, lock=10_000, stalled_interval=100):
                await arena.all_ended()

    # How many had begun is the killed worker's secret; none may run a third time.
    arena.audit(max_runs=2, max_extra_runs=count)
    assert arena.count("completed") == count


@pytest.mark.requirement("X-13", "Q-27")
async def test_a_stall_is_no_attempt_unless_asked_for(arena: Arena) -> None:
    """A crash of the machine is not the job's failure; who wants to count it may."""
    options: dict[str, Any] = {"lock": 500, "stalled_interval": 100}
    seen: list[tuple[str, int, int]] = []

    async def handle(job: Job) -> None:
        arena.ledger.ran(job.id, fence=job.fence)
        seen.append((job.id, job.attempts_made, job.stalled_count))

    async with arena.queue(attempts=1) as queue:
        (doomed,) = await arena.start_workers(1, concurrency=2, lock=500, stalled_interval=100)
        first, second = await arena.add(queue, 2, ms=60_000)
        for _ in range(2):
            await doomed.seen("^began")
        doomed.kill()
        with arena.following():
            async with arena.worker(handle, **options):
                await arena.all_ended()
        assert sorted(seen) == [(first, 0, 1), (second, 0, 1)]
        arena.audit(max_extra_runs=2)

        (counted,) = await arena.add(queue, 1, ms=60_000)
        (doomed,) = await arena.start_workers(1, lock=500, stalled_interval=100)
        await doomed.seen("^began")
        doomed.kill()
        with arena.following():
            async with arena.worker(handle, count_stalls_as_attempts=True, **options):
                await arena.all_ended()

    ((_, failed, reason),) = arena.heard("failed")
    assert (failed, reason[:15]) == (counted, "stalled 1 times")
    arena.audit(max_extra_runs=2)


@pytest.mark.requirement("X-13")
async def test_a_job_that_kills_its_worker_is_condemned_alone_and_takes_no_innocent_with_it(arena: Arena) -> None:
    """A poison job takes at most four processes down; the jobs that ran beside it are not suspected for ever."""
    poisons, beside = scaled(1, 8), scaled(8, 4_000)
    options: dict[str, Any] = {"concurrency": 5, "lock": 500, "stalled_interval": 100, "dead_letters": True}
    async with arena.queue(attempts=1) as queue:
        with arena.following():
            condemned: list[str] = []
            innocent: list[str] = []
            for _ in range(poisons):
                condemned += await arena.add(queue, 1, poison=True)
                innocent += await arena.add(queue, beside // poisons, ms=scaled(50, 5))
            deaths = await _replace_the_dead(arena, poisons, options)
            async with arena.worker(concurrency=5, lock=10_000):
                await arena.all_ended()

    # What ran beside a poison job when it killed its process, and what stalled with it a second time, runs again.
    arena.audit(max_extra_runs=deaths * 5, max_runs=5 if poisons == 1 else None, may_overlap=True)

    failed = {raw.decode() for raw in arena.server.command("ZRANGE", arena.base + "failed", 0, -1)}
    runs = Counter(run.job_id for run in arena.ledger.runs)
    assert failed == set(condemned)
    assert max(runs[job_id] for job_id in condemned) <= 4
    assert arena.count("completed") == len(innocent)
    assert arena.server.command("LLEN", f"bull:{arena.name}-dlq:wait") == poisons
    most = max(runs[job_id] for job_id in condemned)
    note(
        f"{poisons} poison jobs among {len(innocent)}: {deaths} deaths, at most {most} by one, 0 innocents failed: "
        f"{arena.field(condemned[0], 'failedReason')!r}"
    )


async def _replace_the_dead(arena: Arena, poisons: int, options: dict[str, Any]) -> int:
    """Start a worker for each that dies, until all poison jobs are condemned. Returns how many died."""
    deaths = 0
    while arena.count("failed") < poisons:
        worker = arena.start_worker(**options)
        await worker.seen("^ready")
        ended = asyncio.create_task(worker.ended(PATIENCE_S))
        failed = asyncio.create_task(until(lambda: arena.count("failed") >= poisons, "all poison jobs are condemned"))
        done, _ = await asyncio.wait([ended, failed], return_when=asyncio.FIRST_COMPLETED)
        if ended in done:
            deaths += 1
            failed.cancel()
            assert deaths <= 4 * poisons, "more than four deaths for a poison job"
        else:
            ended.cancel()
            worker.terminate()
            await within(10, "the last worker leaves", worker.ended())
    return deaths
