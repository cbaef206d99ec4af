"""Everything at once: workers, server and network fail under one steady load, again and again."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import Any

import pytest
import redis

from bullpen.queue import Queue
from bullpen.testing import Child, FaultProxy
from tests.chaos.arena import LONG, PATIENCE_S, Arena, note, scaled, until

LOCK_MS = 2_000
STALLED_INTERVAL_MS = 300
CONCURRENCY = 20
WORKERS = 3
CHUNK = 250


@pytest.mark.requirement("W-6", "W-65", "Q-23", "Q-65", "Q-66", "Q-67", "X-13", "X-31", "X-124")
async def test_workers_server_and_network_fail_together_and_every_job_ends_once(durable_arena: Arena) -> None:
    """Each accepted job ends completed; what ran twice was in flight at a fault."""
    arena = durable_arena
    jobs, kills, deaths, cuts = scaled(1_500, 100_000), scaled(3, 40), scaled(1, 4), scaled(3, 16)
    faults = ["kill"] * kills + ["death"] * deaths + ["cut"] * cuts
    random.Random(7).shuffle(faults)
    options: dict[str, Any] = {"concurrency": CONCURRENCY, "lock": LOCK_MS, "stalled_interval": STALLED_INTERVAL_MS}
    with FaultProxy(arena.server) as proxy:
        async with arena.queue(url=proxy.url) as queue:
            with arena.following():
                workers = await arena.start_workers(WORKERS, url=proxy.url, **options)
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(_feed(arena, queue, jobs))
                    for number, fault in enumerate(faults):
                        due = jobs * (number + 1) // (len(faults) + 2)
                        await until(partial(_has_completed, arena, due), f"{due} jobs are completed")
                        await _strike(fault, arena, proxy, workers, options)
                await arena.all_ended()
            for worker in workers:
                worker.terminate()
                assert await worker.ended() == 0

    in_flight = kills * CONCURRENCY + (deaths + cuts) * CONCURRENCY * WORKERS
    arena.audit(max_extra_runs=in_flight)

    assert len(arena.ledger.accepted_ids) == jobs
    assert (arena.count("completed"), arena.count("failed")) == (jobs, 0)
    assert arena.extra_runs > 0 or not LONG  # a few kills may hit idle moments, forty do not
    note(
        f"{jobs} jobs, {kills} workers killed, {deaths} server deaths, {cuts} network faults: 0 lost, 0 stuck, "
        f"0 failed, {arena.extra_runs} extra runs (in flight at most {in_flight})"
    )


async def _feed(arena: Arena, queue: Queue, jobs: int) -> None:
    """A few thousand ahead of the workers, so that every fault meets a full line."""
    added = 0
    while added < jobs:
        added += len(await arena.add(queue, min(CHUNK, jobs - added), ms=10))
        await until(partial(_has_completed, arena, added - 20 * CHUNK), "the workers follow")


def _has_completed(arena: Arena, count: int) -> bool:
    try:
        return arena.count("completed") >= count
    except redis.ConnectionError:  # the server is dead just now
        return False


async def _strike(fault: str, arena: Arena, proxy: FaultProxy, workers: list[Child], options: dict[str, Any]) -> None:
    match fault:
        case "kill":
            victim = random.choice(workers)
            victim.kill()
            replacement = arena.start_worker(url=proxy.url, **options)
            await replacement.seen("^ready", PATIENCE_S)
            workers[workers.index(victim)] = replacement
        case "death":
            await asyncio.to_thread(arena.server.kill)
            await asyncio.to_thread(arena.server.restart)
        case "cut":
            match random.choice(("reset", "cut", "lost reply", "lost request", "stall", "outage")):
                case "reset":
                    proxy.reset()
                case "cut":
                    proxy.cut()
                case "lost reply":
                    proxy.lose_reply(times=3)
                case "lost request":
                    proxy.lose_request(times=3)
                case "stall":
                    with proxy.stalled():
                        await asyncio.sleep(0.3)  # the length of the fault
                case "outage":
                    with proxy.outage():
                        await asyncio.sleep(0.3)  # as above
