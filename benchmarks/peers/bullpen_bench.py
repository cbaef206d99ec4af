"""bullpen, one workload per run:

python bullpen_bench.py <redis url> <workload> <n> <concurrency> <payload bytes> [uvloop]
"""

import asyncio
import sys
import time
from typing import Any

import redis
from report import Stopwatch, spread  # type: ignore[import-not-found]  # beside this file, which is run as a script

from bullpen.queue import Job, Queue, Worker

URL, WORKLOAD, *_ = sys.argv[1:]
N, CONCURRENCY, PAYLOAD_BYTES = (int(text) for text in sys.argv[3:6])
WITH_UVLOOP = sys.argv[6:] == ["uvloop"]
DATA = {"p": "x" * max(0, PAYLOAD_BYTES - len('{"p":""}'))}
BULK = 500
IN_FLIGHT = 100


async def add_bulk(queue: Queue, count: int) -> None:
    for done in range(0, count, BULK):
        await queue.add_many([("bench", DATA)] * min(BULK, count - done))


async def add_one_by_one(queue: Queue, count: int) -> list[float]:
    latencies = []
    for _ in range(count):
        started = time.perf_counter()
        await queue.add("bench", DATA)
        latencies.append((time.perf_counter() - started) * 1000)
    return latencies


async def add_in_flight(queue: Queue, count: int) -> None:
    left = iter(range(count))

    async def lane() -> None:
        for _ in left:
            await queue.add("bench", DATA)

    await asyncio.gather(*(lane() for _ in range(IN_FLIGHT)))


async def drain(name: str, count: int) -> Worker:
    done = asyncio.Event()
    left = count

    async def handle(job: Job) -> None:
        return None

    def completed(*_: Any) -> None:
        nonlocal left
        left -= 1
        if not left:
            done.set()

    worker = Worker(name, handle, connection=URL, concurrency=CONCURRENCY)
    worker.on("completed", completed)
    await worker.start()
    await done.wait()
    return worker


async def latency(name: str, queue: Queue, count: int) -> tuple[Worker, list[float], list[float]]:
    to_handler, to_result = [], []
    handler_started = 0.0

    async def handle(job: Job) -> None:
        nonlocal handler_started
        handler_started = time.perf_counter()

    worker = Worker(name, handle, connection=URL, concurrency=CONCURRENCY)
    await worker.start()
    for _ in range(count):
        started = time.perf_counter()
        job = await queue.add("bench", DATA)
        await job.result()
        to_result.append((time.perf_counter() - started) * 1000)
        to_handler.append((handler_started - started) * 1000)
    return worker, to_handler, to_result


async def run(name: str, count: int, *, measured: bool) -> None:
    observer = redis.Redis.from_url(URL)
    queue = Queue(name, connection=URL)
    if WORKLOAD == "drain":
        await add_bulk(queue, count)
    watch = Stopwatch(_info(observer))

    details: dict[str, Any] = {}
    worker: Worker | None = None
    match WORKLOAD:
        case "add_one_by_one":
            details["add_ms"] = spread(await add_one_by_one(queue, count))
        case "add_in_flight":
            await add_in_flight(queue, count)
        case "bulk_add":
            await add_bulk(queue, count)
        case "drain":
            worker = await drain(name, count)
        case "latency":
            worker, to_handler, to_result = await latency(name, queue, count)
            details |= {"to_handler_ms": spread(to_handler), "to_result_ms": spread(to_result)}
        case unknown:
            raise SystemExit(f"unknown workload {unknown}")

    watch.stop()
    if measured:
        counts = await queue.counts()
        there = counts.waiting + counts.completed
        watch.report(jobs=there, expected=count, server_info=_info(observer), **details)
    if worker is not None:
        await worker.close()
    await queue.close()
    observer.close()


def _info(client: redis.Redis) -> dict[str, Any]:
    answer: Any = client.info("cpu")
    return dict(answer)


async def main() -> None:
    await run("bench-warmup", min(1000, -(-N // 10)), measured=False)
    await run("bench", N, measured=True)


if __name__ == "__main__":
    if WITH_UVLOOP:
        import uvloop

        uvloop.run(main())
    else:
        asyncio.run(main())
