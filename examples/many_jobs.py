"""Thousands of jobs: added in bulk, run fifty at a time, watched through the event stream."""

import asyncio
import sys
from collections import Counter

from bullpen import Job, Queue, QueueEvents, Worker

COUNT = int(sys.argv[1]) if len(sys.argv) > 1 else 5_000


async def square(job: Job) -> int:
    return int(job.data["n"]) ** 2


async def watch(events: QueueEvents) -> Counter[str]:
    """Count events until all jobs are completed. Enter the events before adding, and none is missed."""
    seen: Counter[str] = Counter()
    async for event in events:
        seen[event.event] += 1
        if event.event == "completed" and seen["completed"] % 1_000 == 0:
            print(f"{seen['completed']:,} completed")
        if seen["completed"] == COUNT:
            break
    return seen


async def main() -> None:
    async with Queue("squares", remove_on_complete=True) as queue, QueueEvents("squares") as events:
        watching = asyncio.ensure_future(watch(events))
        await queue.add_many([("square", {"n": n}) for n in range(COUNT)])
        async with Worker("squares", square, concurrency=50):
            seen = await watching
        print(f"{seen['added']:,} added, {seen['completed']:,} completed, {(await queue.counts()).pending} left")


if __name__ == "__main__":
    asyncio.run(main())
