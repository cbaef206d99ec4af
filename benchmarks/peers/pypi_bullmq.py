"""PyPI `bullmq`, one workload per run, in its own virtual environment:

python pypi_bullmq.py <redis url> <workload> <n> <concurrency> <payload bytes> [pool]

With `pool` its queues and workers get a redis-py client with a connection pool instead of the single connection that
bullmq makes by itself.
"""

import asyncio
import sys
import time
from typing import Any
from urllib.parse import urlsplit

import redis.asyncio

# Installed only in the environment this file runs in: its pins clash with ours.
from bullmq import Queue, QueueEvents, Worker  # type: ignore[import-not-found]
from report import Stopwatch, spread  # type: ignore[import-not-found]  # beside this file, which is run as a script

URL, WORKLOAD, *_ = sys.argv[1:]
N, CONCURRENCY, PAYLOAD_BYTES = (int(text) for text in sys.argv[3:6])
WITH_POOL = sys.argv[6:] == ["pool"]
DATA = {"p": "x" * max(0, PAYLOAD_BYTES - len('{"p":""}'))}
BULK = 500
IN_FLIGHT = 100


def connection() -> Any:
    parts = urlsplit(URL)
    # Blocking reads last longer than redis-py's default socket timeout of 5 s.
    options = {"host": parts.hostname or "127.0.0.1", "port": parts.port or 6379, "socket_timeout": None}
    return redis.asyncio.Redis(decode_responses=True, **options) if WITH_POOL else options  # type: ignore[arg-type]  # mixed values


async def add_bulk(queue: Any, count: int) -> None:
    for done in range(0, count, BULK):
        await queue.addBulk([{"name": "bench", "data": DATA} for _ in range(min(BULK, count - done))])


async def add_one_by_one(queue: Any, count: int) -> list[float]:
    latencies = []
    for _ in range(count):
        started = time.perf_counter()
        await queue.add("bench", DATA)
        latencies.append((time.perf_counter() - started) * 1000)
    return latencies


async def add_in_flight(queue: Any, count: int) -> None:
    left = iter(range(count))

    async def lane() -> None:
        for _ in left:
            await queue.add("bench", DATA)

    await asyncio.gather(*(lane() for _ in range(IN_FLIGHT)))


async def drain(name: str, count: int) -> Any:
    done = asyncio.Event()
    left = count

    async def handle(job: Any, token: str) -> None:
        return None

    def completed(*_: Any) -> None:
        nonlocal left
        left -= 1
        if not left:
            done.set()

    worker = Worker(name, handle, {"connection": connection(), "concurrency": CONCURRENCY, "autorun": False})
    worker.on("completed", completed)
    running = asyncio.ensure_future(worker.run())
    await done.wait()
    return worker, running


async def latency(name: str, queue: Any, count: int) -> tuple[Any, list[float], list[float]]:
    to_handler, to_result = [], []
    handler_started = 0.0
    finished = asyncio.Event()

    async def handle(job: Any, token: str) -> None:
        nonlocal handler_started
        handler_started = time.perf_counter()

    worker = Worker(name, handle, {"connection": connection(), "concurrency": CONCURRENCY, "autorun": False})
    running = asyncio.ensure_future(worker.run())
    events = QueueEvents(name, {"connection": connection(), "lastEventId": "0-0"})
    events.on("completed", lambda *_: finished.set())
    for _ in range(count):
        finished.clear()
        started = time.perf_counter()
        await queue.add("bench", DATA)
        await finished.wait()
        to_result.append((time.perf_counter() - started) * 1000)
        to_handler.append((handler_started - started) * 1000)
    await events.close()
    return (worker, running), to_handler, to_result


async def run(name: str, count: int, *, measured: bool) -> None:
    queue = Queue(name, {"connection": connection()})
    if WORKLOAD == "drain":
        await add_bulk(queue, count)
    watch = Stopwatch(await queue.client.info("cpu"))

    details: dict[str, Any] = {}
    started_worker = None
    match WORKLOAD:
        case "add_one_by_one":
            details["add_ms"] = spread(await add_one_by_one(queue, count))
        case "add_in_flight":
            await add_in_flight(queue, count)
        case "bulk_add":
            await add_bulk(queue, count)
        case "drain":
            started_worker = await drain(name, count)
        case "latency":
            started_worker, to_handler, to_result = await latency(name, queue, count)
            details |= {"to_handler_ms": spread(to_handler), "to_result_ms": spread(to_result)}
        case unknown:
            raise SystemExit(f"unknown workload {unknown}")

    watch.stop()
    if measured:
        counts = await queue.getJobCounts("waiting", "completed")
        info = await queue.client.info("cpu")
        watch.report(jobs=sum(counts.values()), expected=count, server_info=info, **details)
    if started_worker is not None:
        worker, running = started_worker
        await worker.close()
        await running
    await queue.close()


async def main() -> None:
    await run("bench-warmup", min(1000, -(-N // 10)), measured=False)
    await run("bench", N, measured=True)


if __name__ == "__main__":
    asyncio.run(main())
