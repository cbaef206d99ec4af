"""How late jobs begin that wait for a time of their own: delayed jobs, retries, runs of a scheduler.

    python -m benchmarks.lateness [--jobs 200] [--ticks 100] [--producers bullpen node] [--loops asyncio uvloop]

Each job waits alone on an idle queue of a private server, beside one worker with the defaults: what is measured are
its wake-ups. Lateness is `processedOn` minus the due time, both by the server's clock: a delayed job's due time is its
`timestamp` plus its delay, a retry's is the id of the event that told of it plus its backoff, a scheduler's is in the
id of the iteration. Ticks of a scheduler that were left out are counted too. `node`: npm bullmq adds the jobs and makes
the scheduler, bullpen's worker runs them. Exits with 1 when one is later than `--most-ms`.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.util
import json
import logging
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, Final

from bullpen._kernel import telemetry
from bullpen._kernel.backoff import Backoff
from bullpen.queue import Job, Queue
from bullpen.testing import RedisServer
from bullpen.worker import Worker
from tests.interop._node import NodePeer, find_node, install_packages

_DELAY_MS: Final = 40
_EVERY_MS: Final = 60
_ONE_JOB_S: Final = 30.0
_COLUMNS: Final = ("median", "p99", "max", "early")

Add = Callable[[dict[str, Any]], Awaitable[str]]


class _Runs:
    """What the worker has run, and a way to wait for it. Jobs named `retry` fail the first time."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self._changed = asyncio.Event()

    async def __call__(self, job: Job) -> None:
        if job.name == "retry" and job.attempts_made == 0:
            raise RuntimeError("fails the first time")
        self.ids.append(job.id)
        self._changed.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(_ONE_JOB_S + count * _EVERY_MS / 100):
            while len(self.ids) < count:
                self._changed.clear()
                await self._changed.wait()


class _Measurement:
    def __init__(self, client: Any, queue: str, runs: _Runs) -> None:
        self._client, self._base, self._runs = client, f"bull:{queue}:", runs

    def _number(self, job_id: str, field: str) -> int:
        return int(self._client.hget(self._base + job_id, field))

    async def delayed(self, add: Add, count: int) -> list[int]:
        ids = []
        for _ in range(count):
            ids.append(await add({"delay": _DELAY_MS}))
            await self._runs.until(len(ids))
        return [self._number(one, "processedOn") - self._number(one, "timestamp") - _DELAY_MS for one in ids]

    async def retries(self, add: Add, count: int) -> list[int]:
        ids = []
        for _ in range(count):
            ids.append(await add({"attempts": 2}))
            await self._runs.until(len(ids))
        due = {}
        for entry, fields in self._client.xrange(self._base + "events"):
            if fields[b"event"] == b"retry":
                due[fields[b"jobId"].decode()] = int(entry.split(b"-")[0]) + _DELAY_MS
        return [self._number(one, "processedOn") - due[one] for one in ids]

    async def ticks(self, count: int) -> tuple[list[int], int]:
        """Lateness of each, and how many were left out."""
        await self._runs.until(count)
        ids = self._runs.ids[:count]
        slots = [int(one.rpartition(":")[2]) for one in ids]
        late = [self._number(one, "processedOn") - slot for one, slot in zip(ids, slots, strict=True)][1:]
        return late, (slots[-1] - slots[0]) // _EVERY_MS - (count - 1)


async def _measure(server: RedisServer, producer: str, jobs: int, ticks: int) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    async with AsyncExitStack() as stack:
        peer: NodePeer | None = None
        if producer == "node":
            tools = find_node()
            install_packages(tools)
            peer = await stack.enter_async_context(NodePeer(server.url, tools))
        for what, count in (("delayed", jobs), ("retries", jobs), ("ticks", ticks)):
            server.flush()
            before = sum(telemetry.late_wakeups().values())
            name = "retry" if what == "retries" else "job"
            async with Queue("q", connection=server.url) as queue:
                add = _adder(queue, peer, name)
                runs = _Runs()
                async with Worker("q", runs, connection=server.url) as worker:
                    await worker.start()
                    measurement = _Measurement(server.client(), "q", runs)
                    left_out = 0
                    if what == "delayed":
                        late = await measurement.delayed(add, count)
                    elif what == "retries":
                        late = await measurement.retries(add, count)
                    else:
                        await _schedule(server, peer)
                        late, left_out = await measurement.ticks(count + 1)
            found[what] = {
                **_summary(late),
                "left out": left_out,
                "late wake-ups": sum(telemetry.late_wakeups().values()) - before,
            }
    return found


def _adder(queue: Queue, peer: NodePeer | None, name: str) -> Add:
    async def ours(options: dict[str, Any]) -> str:
        if name == "retry":
            options = {**options, "backoff": Backoff.fixed(_DELAY_MS)}
        return (await queue.add(name, None, **options)).id

    async def theirs(options: dict[str, Any]) -> str:
        assert peer is not None
        if name == "retry":
            options = {**options, "backoff": {"type": "fixed", "delay": _DELAY_MS}}
        return str(await peer.call("add", queue="q", name=name, data={}, opts=options))

    return ours if peer is None else theirs


async def _schedule(server: RedisServer, peer: NodePeer | None) -> None:
    if peer is not None:
        await peer.call(
            "upsertJobScheduler", queue="q", schedulerId="s", repeat={"every": _EVERY_MS}, template={"name": "job"}
        )
        return
    # The records of a scheduler, as a client writes them.
    client: Any = server.client()
    seconds, micros = client.time()
    slot = seconds * 1000 + micros // 1000 + _EVERY_MS
    slot -= slot % _EVERY_MS
    job_id, base = f"repeat:s:{slot}", "bull:q:"
    opts = {"repeat": {"count": 1, "every": _EVERY_MS}, "jobId": job_id, "repeatJobKey": "s", "delay": 0}
    job = {"name": "job", "data": "{}", "opts": json.dumps(opts), "rjk": "s", "delay": 0, "priority": 0}
    pipeline = client.pipeline()
    pipeline.zadd(base + "repeat", {"s": slot})
    pipeline.hset(base + "repeat:s", mapping={"name": "job", "ic": 1, "every": _EVERY_MS, "data": "{}"})
    pipeline.hset(base + job_id, mapping={**job, "timestamp": slot})
    pipeline.hset(base + "meta", mapping={"opts.maxLenEvents": 10_000, "version": "bullpen:benchmark"})
    pipeline.zadd(base + "delayed", {job_id: slot * 4096})
    pipeline.zadd(base + "marker", {"1": slot})
    pipeline.execute()


def _summary(late: list[int]) -> dict[str, int]:
    ranked = sorted(late)
    return {
        "median": ranked[len(ranked) // 2],
        "p99": ranked[min(len(ranked) - 1, int(len(ranked) * 0.99))],
        "max": ranked[-1],
        "early": sum(one < 0 for one in ranked),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lateness", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    loops = ["asyncio", *(["uvloop"] if importlib.util.find_spec("uvloop") is not None else [])]
    parser.add_argument("--jobs", type=int, default=200, help="delayed jobs, and retries")
    parser.add_argument("--ticks", type=int, default=100, help="runs of the scheduler")
    parser.add_argument("--producers", nargs="+", default=["bullpen", "node"], choices=["bullpen", "node"])
    parser.add_argument("--loops", nargs="+", default=loops, choices=["asyncio", "uvloop"])
    parser.add_argument("--most-ms", type=int, default=50, help="later than this is a failure")
    chosen = parser.parse_args()

    worst = 0
    logging.getLogger("bullpen").setLevel(logging.ERROR)  # the private server is not asked to be durable
    columns = "".join(f"{title:>8}" for title in _COLUMNS)
    print(f"{'producer':10}{'loop':10}{'what':10}{columns}{'left out':>10}{'late wake-ups':>15}")
    with RedisServer.start("valkey") as server:
        for producer in chosen.producers:
            for loop in chosen.loops:
                factory = asyncio.new_event_loop if loop == "asyncio" else importlib.import_module(loop).new_event_loop
                with asyncio.Runner(loop_factory=factory) as runner:
                    found = runner.run(_measure(server, producer, chosen.jobs, chosen.ticks))
                for what, numbers in found.items():
                    worst = max(worst, numbers["max"])
                    cells = (f"{numbers[key]:>8}" for key in _COLUMNS)
                    print(
                        f"{producer:10}{loop:10}{what:10}{''.join(cells)}{numbers['left out']:>10}"
                        f"{numbers['late wake-ups']:>15}",
                        flush=True,
                    )
    print(f"ms, by the server's clock; the latest {worst} ms after its time")
    return 1 if worst > chosen.most_ms else 0


if __name__ == "__main__":
    sys.exit(main())
