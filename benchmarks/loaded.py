"""Four latencies on a queue with 1 000 active and 10 000 waiting jobs: read a job, take a lock, emit an event, look for
stalled jobs. Limits without a load mean nothing, so both are published. On loopback, one caller, round trip included.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from benchmarks.arena import quantile
from bullpen._kernel.outcome import Waiting
from bullpen.queue import Job, Queue
from bullpen.queue.actions import AsyncActions
from bullpen.redis import Connection
from bullpen.redis.client import Door
from bullpen.worker.exchange import Exchange, JobSettlement

T = TypeVar("T")

ACTIVE = 1_000
WAITING = 10_000
LIMITS_MS = {"read_job": 10.0, "take_lock": 5.0, "emit_event": 5.0, "stalled_check": 100.0}
TITLES = {
    "read_job": "read a job",
    "take_lock": "take a job and its lock",
    "emit_event": "emit an event (progress)",
    "stalled_check": "one look for stalled jobs",
}
_LONG_LOCK_MS = 600_000


@dataclass(frozen=True)
class Latency:
    """Milliseconds. `best` is what the work itself takes: a busy machine does not change it."""

    best: float
    p50: float
    p99: float


def measure(url: str, *, samples: int, active: int = ACTIVE, waiting: int = WAITING) -> dict[str, Latency]:
    """The four, by the names of `LIMITS_MS`. The server should be empty."""
    return asyncio.run(_measure(url, samples, active, waiting))


async def _measure(url: str, samples: int, active: int, waiting: int) -> dict[str, Latency]:
    connection = Connection(url)
    async with Queue("loaded", connection=connection) as queue:
        await queue.add_many([("bench", {"p": "x" * 92})] * (active + waiting))
        door = Door(connection)
        actions = AsyncActions(door, queue.keys, deadline_s=60.0)
        exchange = Exchange(
            door,
            queue.keys,
            actions,
            worker_name="loaded",
            lock_ms=_LONG_LOCK_MS,
            limit=None,
            keep_completed=None,
            keep_failed=None,
            dead_letters=None,
            clock_offset_ms=0,
        )
        held: list[Job] = []
        while len(held) < active:
            held += (await exchange.run([], min(100, active - len(held)))).taken

        async def take() -> list[Job]:
            return (await exchange.run([], 1)).taken

        async def give_back(taken: list[Job]) -> None:
            await exchange.run([JobSettlement(job, Waiting()) for job in taken], 0)

        async def check_stalled() -> None:
            keys = queue.keys
            names = [keys.meta, keys.wait, keys.active, keys.stalled, keys.stalled_check, keys.events]
            continuing = ""
            while (await actions.evaluate("check_stalled", names, [keys.base, 0, 60_000, continuing, 30_000]))[0]:
                continuing = "1"

        async def open_gate(_: None) -> None:
            await actions.command("DEL", queue.keys.stalled_check)

        found = {
            "read_job": await _time(lambda: queue.get_job(str(random.randint(active + 1, active + waiting))), samples),
            "take_lock": await _time(take, samples, give_back),
            "emit_event": await _time(lambda: held[0].progress(50), samples),
            "stalled_check": await _time(check_stalled, samples, open_gate),
        }
        door.close()
        await connection.aclose()
        return found


async def _time(
    act: Callable[[], Awaitable[T]], samples: int, undo: Callable[[T], Awaitable[None]] | None = None
) -> Latency:
    taken_ms = []
    for _ in range(samples):
        started = time.perf_counter()
        result = await act()
        taken_ms.append((time.perf_counter() - started) * 1000)
        if undo is not None:
            await undo(result)
    return Latency(min(taken_ms), quantile(taken_ms, 0.5), quantile(taken_ms, 0.99))
