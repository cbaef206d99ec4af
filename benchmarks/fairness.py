"""How fair lanes are and what they cost, what large flows cost beside npm `bullmq`, and what a scheduler's tick costs
beside many others.

    python -m benchmarks.fairness [--jobs N] [--flow N] [--schedulers N]

In: a private server. Out: one line per figure. Costs are ratios of runs that take turns, so that other load on the
machine meets both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from bullpen import Flow, Job, NewJob, Queue, Worker
from bullpen.testing import RedisServer

NODE_DIR = Path(__file__).resolve().parents[1] / "tests" / "interop" / "node"
_NODE_FLOW = """
import { FlowProducer, Worker } from 'bullmq';
const [host, port, count, round] = process.argv.slice(1);
const connection = { host, port: Number(port), maxRetriesPerRequest: null };
const flows = new FlowProducer({ connection });
await flows.waitUntilReady();
const opts = { ignoreDependencyOnFailure: true };
const child = (_, n) => ({ name: 'c', queueName: `nc${round}`, data: { n }, opts });
const children = Array.from({ length: Number(count) }, child);
let started = process.hrtime.bigint();
await flows.add({ name: 'p', queueName: `np${round}`, data: {}, children });
const added = Number(process.hrtime.bigint() - started) / 1e9;
started = process.hrtime.bigint();
const ended = new Promise((resolve) => {
  const parents = new Worker(`np${round}`, async () => 1, { connection });
  parents.on('completed', () => resolve(parents));
});
const work = new Worker(`nc${round}`, async () => 1, { connection, concurrency: 100 });
const parents = await ended;
const worked = Number(process.hrtime.bigint() - started) / 1e9;
console.log(JSON.stringify([added, worked]));
await Promise.all([work.close(), parents.close(), flows.close()]);
process.exit(0);
"""


async def nothing(job: Job) -> None:
    """Takes no time."""


async def work_all(
    url: str, queue: str, count: int, *, handler: Any = nothing, **options: Any
) -> tuple[float, list[Job]]:
    """Seconds until so many jobs were completed, and the jobs in the order in which they began."""
    begun: list[Job] = []
    ended = asyncio.Event()
    done = 0

    def on_completed(job: Job, value: Any) -> None:
        nonlocal done
        done += 1
        if done == count:
            ended.set()

    async with Queue(queue, connection=url):
        worker = Worker(queue, handler, connection=url, **{"concurrency": 100, **options})
        worker.on("active", begun.append)
        worker.on("completed", on_completed)
        started = time.perf_counter()
        async with worker:
            await ended.wait()
            return time.perf_counter() - started, begun


async def small_beside_large(url: str, large: int) -> str:
    """A lane of many jobs, and one of ten that came later: how many others ran before the last of the ten?"""
    async with Queue("small", connection=url, remove_on_complete=True) as queue:
        await queue.add_many(NewJob("big", None, {"lane": "large"}) for _ in range(large))
        await queue.add_many(NewJob("few", None, {"lane": "small"}) for _ in range(10))
    begun: list[str] = []
    ended = asyncio.Event()

    async def handle(job: Job) -> None:
        begun.append(job.name)
        if begun.count("few") == 10:
            ended.set()

    async with Worker("small", handle, connection=url, concurrency=10) as worker:
        await ended.wait()
        await worker.close(0)
    last = max(place for place, name in enumerate(begun) if name == "few")
    return f"10 jobs behind {large}: the last began as number {last + 1} (exchanges of 10)"


async def weights(url: str, count: int) -> str:
    """Two lanes with weights 3 and 1: how many of each in any part of the run while both have jobs?"""
    async with Queue("weights", connection=url, remove_on_complete=True) as queue:
        await queue.lanes.set("gold", weight=3)
        await queue.add_many(NewJob("a", None, {"lane": lane}) for _ in range(count) for lane in ("gold", "plain"))
    _, begun = await work_all(url, "weights", 2 * count, concurrency=10)
    both = [job.lane for job in begun[: count * 4 // 3]]
    shares = [both[first : first + 100].count("gold") for first in range(0, len(both) - 99, 100)]
    return (
        f"weights 3:1: {both.count('gold') / both.count('plain'):.2f} : 1; per hundred {min(shares)} to {max(shares)}"
    )


async def throughput(url: str, count: int, rounds: int) -> str:
    """Jobs per second with lanes, as a share of without. Both with a priority class: lanes live in it."""
    ratios: list[tuple[float, float]] = []
    for number in range(rounds):
        seconds: dict[str, tuple[float, float]] = {}
        for kind in ("plain", "lanes") if number % 2 else ("lanes", "plain"):
            name = f"{kind}{number}"
            async with Queue(name, connection=url, remove_on_complete=True) as queue:
                started = time.perf_counter()
                lane = kind == "lanes"
                await queue.add_many(
                    NewJob("a", None, {"lane": f"lane{n % 50}"} if lane else {"priority": 1}) for n in range(count)
                )
                added = time.perf_counter() - started
            worked, _ = await work_all(url, name, count)
            seconds[kind] = (added, worked)
        ratios.append((seconds["plain"][0] / seconds["lanes"][0], seconds["plain"][1] / seconds["lanes"][1]))
    adding, working = (statistics.median(each) for each in zip(*ratios, strict=True))
    return f"throughput with 50 lanes: adding {adding:.2f}, working {working:.2f} of without"


async def large_flow(url: str, count: int, rounds: int) -> str:
    """A parent with many children: adding it in one step, and working it off, beside npm `bullmq`."""
    host, _, port = url.removeprefix("redis://").partition(":")
    ratios: list[tuple[float, float]] = []
    for number in range(rounds):
        node = await asyncio.to_thread(
            subprocess.run,
            ["node", "--input-type=module", "-e", _NODE_FLOW, host, port.rstrip("/"), str(count), str(number)],
            cwd=NODE_DIR,
            capture_output=True,
            text=True,
            check=True,
        )
        theirs = json.loads(node.stdout)
        async with Queue(f"op{number}", connection=url) as parents:
            flow = Flow(
                "p", children=[Flow("c", {"n": n}, queue=f"oc{number}", on_failure="ignore") for n in range(count)]
            )
            started = time.perf_counter()
            await parents.add_flow(flow)
            added = time.perf_counter() - started
            ended = asyncio.Event()
            started = time.perf_counter()
            async with (
                Worker(f"oc{number}", nothing, connection=url, concurrency=100),
                Worker(f"op{number}", nothing, connection=url) as above,
            ):
                above.on("completed", lambda *_: ended.set())  # noqa: B023 - called within this round
                await ended.wait()
                worked = time.perf_counter() - started
        ratios.append((theirs[0] / added, theirs[1] / worked))
    adding, working = (statistics.median(each) for each in zip(*ratios, strict=True))
    return f"a flow of {count} children: adding {adding:.2f}, working {working:.2f} times npm bullmq"


async def scheduler_ticks(url: str, most: int, ticks: int) -> str:
    """Server time of one exchange that advances a scheduler, with few and with many schedulers beside it."""
    costs: dict[int, float] = {}
    for others in (100, most):
        name = f"sched{others}"
        async with Queue(name, connection=url, remove_on_complete=True) as queue:
            for first in range(0, others, 200):
                await asyncio.gather(
                    *(
                        queue.upsert_scheduler(f"s{n}", every="1d", offset="1h")
                        for n in range(first, min(others, first + 200))
                    )
                )
            await queue.upsert_scheduler("ticker", every=1)
            costs[others] = (await work_all(url, name, ticks, concurrency=1))[0] / ticks
    few, many = costs.values()
    beside = f"{few * 1000:.2f} ms beside 100 schedulers, {many * 1000:.2f} ms beside {most}"
    return f"a scheduler's tick: {beside}, ratio {many / few:.2f}"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--large", type=int, default=100_000)
    parser.add_argument("--flow", type=int, default=10_000)
    parser.add_argument("--schedulers", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("small", "weights", "throughput", "flow", "schedulers"))
    given = parser.parse_args()
    with RedisServer.start("valkey", unix=False) as server:
        figures: dict[str, Callable[[], Awaitable[str]]] = {
            "small": lambda: small_beside_large(server.url, given.large),
            "weights": lambda: weights(server.url, given.jobs // 5),
            "throughput": lambda: throughput(server.url, given.jobs, given.rounds),
            "flow": lambda: large_flow(server.url, given.flow, given.rounds),
            "schedulers": lambda: scheduler_ticks(server.url, given.schedulers, 300),
        }
        for name, figure in figures.items():
            if given.only in (None, name):
                print(await figure(), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
