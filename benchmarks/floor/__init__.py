"""The floor: server time of one job's life with the fewest commands the protocol allows, and ours beside it.

Server CPU per job of add, take and settle in batches of 50, no client time counted. The minimal scripts here write what
other BullMQ clients need to see and check nothing; what ours cost above that is what safety and features cost.
"""

import asyncio
import time
from pathlib import Path
from typing import Any

from bullpen.queue import Job, Queue
from bullpen.testing import RedisServer
from bullpen.worker import Worker

BATCH = 50
_DATA = {"p": "x" * 92}
_NAME = "bench"
_HERE = Path(__file__).parent


class ServerTime:
    """Server CPU between two looks, in microseconds per job."""

    def __init__(self, server: RedisServer, jobs: int) -> None:
        self._client, self._jobs = server.client(), jobs
        self._before = self._used_s()

    def _used_s(self) -> float:
        info: Any = self._client.info("cpu")
        return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])

    def lap(self) -> float:
        now = self._used_s()
        spent, self._before = now - self._before, now
        return spent / self._jobs * 1e6


def minimal(server: RedisServer, jobs: int) -> dict[str, float]:
    """Add, take and settle all jobs with the minimal scripts."""
    server.flush()
    client = server.client()
    base = "bull:floor:"
    add, take, settle = (
        client.register_script((_HERE / f"{name}.lua").read_text()) for name in ("add", "take", "settle")
    )
    now = int(time.time() * 1000)
    data, opts = '{"p":"' + "x" * 92 + '"}', '{"attempts":3,"backoff":{"type":"exponential","delay":1000}}'

    def keys(*names: str) -> list[str]:
        return [base + name for name in names]

    batches = range(0, jobs, BATCH)
    watch = ServerTime(server, jobs)
    for _ in batches:
        add(keys("meta", "id", "wait", "marker", "events"), [base, now, BATCH, _NAME, data, opts])
    add_us = watch.lap()
    taken: list[list[bytes]] = []
    for number in batches:
        reply = take(
            keys("meta", "wait", "active", "delayed", "marker", "events"),
            [base, now, BATCH, f"token:{number}", 30_000, "worker"],
        )
        taken.append([fields[-1] for fields in reply])
        if len(taken) == 2:  # as many active at a time as a worker with 100 slots has
            settle(keys("meta", "active", "completed", "stalled", "events"), [base, now, "null", *taken.pop(0)])
    for ids in taken:
        settle(keys("meta", "active", "completed", "stalled", "events"), [base, now, "null", *ids])
    work_us = watch.lap()
    assert client.zcard(f"{base}completed") == jobs
    return {"add": add_us, "take_and_settle": work_us, "life": add_us + work_us}


def ours(server: RedisServer, jobs: int) -> dict[str, float]:
    """The same through our queue and worker, whose exchanges settle 50 and take 50."""
    server.flush()
    return asyncio.run(_ours(server, jobs))


async def _ours(server: RedisServer, jobs: int) -> dict[str, float]:
    left, done = jobs, asyncio.Event()

    async def handle(job: Job) -> None:
        return None

    def completed(*_: Any) -> None:
        nonlocal left
        left -= 1
        if not left:
            done.set()

    async with Queue("floor", connection=server.url) as queue:
        await queue.counts()
        watch = ServerTime(server, jobs)
        for _ in range(0, jobs, BATCH):
            await queue.add_many([(_NAME, _DATA)] * BATCH)
        add_us = watch.lap()
        worker = Worker("floor", handle, connection=server.url, concurrency=2 * BATCH)  # two exchanges in flight
        worker.on("completed", completed)
        server.client().config_resetstat()
        async with worker:
            await done.wait()
            work_us = watch.lap()
        stats: Any = server.client().info("commandstats")
        return {
            "add": add_us,
            "take_and_settle": work_us,
            "life": add_us + work_us,
            "jobs_per_call": jobs / stats["cmdstat_evalsha"]["calls"],
        }
