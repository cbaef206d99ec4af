"""Lanes under load and under kills: shares hold, limits hold, nothing is lost and nothing stays held."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from typing import Any

import redis

from bullpen._kernel.outcome import Completed
from bullpen.queue import NewJob
from bullpen.worker.exchange import JobSettlement
from tests.bench._exchange import exchange_of
from tests.chaos.arena import Arena, note, scaled
from tests.chaos.test_worker_death import LOCK_MS, STALLED_INTERVAL_MS, freeze_with_work


async def test_ten_jobs_behind_a_very_large_lane_run_within_a_few_exchanges(arena: Arena) -> None:
    size = scaled(3_000, 100_000)
    async with arena.queue() as queue, exchange_of(queue, arena.server.url) as exchange:
        await queue.add_many([NewJob("work", {}, {"lane": "large"}) for _ in range(size)])
        small = {job.id for job in await queue.add_many([NewJob("work", {}, {"lane": "small"}) for _ in range(10)])}

        exchanges = 0
        while small:
            exchanges += 1
            taken = (await exchange.run([], 10)).taken
            await exchange.run([JobSettlement(job, Completed(b"null")) for job in taken], 0)
            small -= {job.id for job in taken}

        assert exchanges <= 3
        await queue.drain()


async def test_weights_hold_over_a_long_backlog(arena: Arena) -> None:
    size = scaled(1_500, 30_000)
    async with arena.queue() as queue, exchange_of(queue, arena.server.url) as exchange:
        await queue.lanes.set("gold", weight=3)
        for lane in ("plain", "gold"):
            await queue.add_many([NewJob("work", {}, {"lane": lane}) for _ in range(size)])
        shares: Counter[str | None] = Counter()
        for _ in range(size // 100):
            taken = (await exchange.run([], 100)).taken
            await exchange.run([JobSettlement(job, Completed(b"null")) for job in taken], 0)
            shares += Counter(job.lane for job in taken)

        assert 2.7 <= shares["gold"] / shares["plain"] <= 3.3
        await queue.drain()


async def test_limits_hold_while_workers_are_killed_and_nothing_stays_held(arena: Arena) -> None:
    kills, jobs_per_lane = scaled(3, 30), scaled(40, 400)
    limits = {"one": 1, "two": 2}
    options: dict[str, Any] = {"concurrency": 10, "lock": LOCK_MS, "stalled_interval": STALLED_INTERVAL_MS}
    most: Counter[str] = Counter()

    async def watch(client: redis.Redis) -> None:
        while True:
            running = Counter(_lanes_of_active(client, arena.base))
            for lane, count in running.items():
                most[lane] = max(most[lane], count)
            await asyncio.sleep(0.002)

    with contextlib.closing(arena.client()) as client:
        async with arena.queue() as queue:
            for lane, limit in limits.items():
                await queue.lanes.set(lane, concurrency=limit)
            watching = asyncio.create_task(watch(client))
            with arena.following():
                workers = await arena.start_workers(2, **options)
                for lane in (*limits, "free"):
                    new = [NewJob("work", {"ms": 40}, {"lane": lane}) for _ in range(jobs_per_lane)]
                    for job in await queue.add_many(new):
                        arena.ledger.accepted(job.id)
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
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

        arena.audit(max_extra_runs=kills * 10)
        assert arena.count("completed") == 3 * jobs_per_lane
        assert {lane: most[lane] for lane in limits} == limits
        left = [key for key in client.scan_iter(arena.base + "bp:*") if b":held" in key or b":running" in key]
        assert left == [], "a key of a lane stayed behind"
    note(f"{kills} kills: at most {dict(most)} at once")


def _lanes_of_active(client: redis.Redis, base: str) -> list[str]:
    """At one moment: a script sees no job on its way."""
    script = """
      local lanes = {}
      for _, id in ipairs(redis.call("LRANGE", KEYS[1] .. "active", 0, -1)) do
        lanes[#lanes + 1] = redis.call("HGET", KEYS[1] .. id, "bplane") or ""
      end
      return lanes
    """
    found: Any = client.eval(script, 1, base)
    return [lane.decode() for lane in found]
