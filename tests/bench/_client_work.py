"""Count the bytecode instructions that our code executes per job. A program: its argument is the server's address.

Only frames of the package itself count, so that a newer asyncio changes nothing. Batches are fixed: ten slots and one
exchange in flight, whose ten jobs end in one turn of the loop. A process of its own, because tracing every instruction
and measuring coverage exclude each other.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Any, Self

import redis

import bullpen
from bullpen.queue import Job, NewJob, Queue
from bullpen.queue.arguments import NewJobArguments
from bullpen.redis import spin as _watch
from bullpen.worker import Worker
from bullpen.worker.tally import Tally

JOBS = 400
SLOTS = 10
DATA = {"p": "x" * 92}
PACKAGE = bullpen.__path__[0]


class Instructions:
    """Counts while it is entered, in this thread."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Self:
        self.count = 0
        sys.settrace(self._enter_frame)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter_frame(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._count

    def _count(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode":
            self.count += 1
        return self._count


async def main(url: str) -> dict[str, float]:
    _watch.IN_A_ROW_S = -1.0  # type: ignore[misc]  # how often a loop looks for an answer depends on time
    counted = Instructions()
    # First: once large blocks were used and given back, the C library keeps what it would else ask the system for.
    asked, faults = await _ask(url, counted)
    async with Queue("work", connection=url) as queue:
        for _ in range(2):  # the first time opens the connection, and Python 3.12 begins to count only with the second
            with counted:
                await queue.add_many([("bench", DATA)] * JOBS)
        bulk = counted.count / JOBS
        with counted:
            await asyncio.gather(*(queue.add("bench", DATA) for _ in range(JOBS)))
        in_flight = counted.count / JOBS
        own = [NewJob("bench", DATA, _options(n, "bulk")) for n in range(JOBS)]
        with counted:
            await queue.add_many(own)
        bulk_own = counted.count / JOBS
        with counted:
            await asyncio.gather(*(queue.add("bench", DATA, **_options(n, "flight")) for n in range(JOBS)))
        in_flight_own = counted.count / JOBS
        await queue.obliterate(force=True)
        await queue.add_many([("bench", DATA)] * (4 * JOBS))
        for _ in range(20):  # until it is known to be alone
            await queue.add("bench", DATA)

        async def add() -> None:
            await queue.add("bench", DATA)

        one_by_one = await _least(add, JOBS, counted)
        drained = await _drain(url, "work", 4 * JOBS, counted)
        recorded = []
        for budget in (0, 4 * JOBS):
            await queue.add_many([("bench", DATA)] * (4 * JOBS))
            recorded.append(await _drain(url, "work", 4 * JOBS, counted, tally=Tally(budget)))
    async with Queue("failing", connection=url, attempts=1) as queue:
        await queue.add_many([("bench", DATA)] * JOBS)
        failed = await _drain(url, "failing", JOBS, counted, fails=True)
    return {
        "bulk": bulk,
        "in_flight": in_flight,
        "bulk_own": bulk_own,
        "in_flight_own": in_flight_own,
        "one_by_one": one_by_one,
        "drain": drained,
        "drain_recorded": recorded[0],
        "drain_looked_at": recorded[1],
        "failure": failed,
        "ask": asked,
        "page_faults": faults,
    }


def _options(number: int, kind: str) -> NewJobArguments:
    """What differs from job to job, and what returns."""
    return {"attempts": 5, "delay": 600_000 + number, "priority": number % 10 + 1, "job_id": f"{kind}-{number}"}


async def _ask(url: str, counted: Instructions) -> tuple[float, float]:
    """Instructions and page faults per job whose result is waited for, of the client and of an idle worker."""

    async def handle(job: Job) -> None:
        pass

    server: Any = redis.Redis.from_url(url, protocol=2)
    async with Queue("asked", connection=url) as queue, Worker("asked", handle, connection=url):

        async def ask() -> None:
            await (await queue.add("bench", DATA)).result()
            while True:  # until the worker is idle again, however long that takes
                await asyncio.sleep(0.002)
                if any(one["cmd"] == "bzpopmin" and "b" in one["flags"] for one in server.client_list()):
                    return

        for _ in range(20):
            await ask()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(JOBS // 4):
            await ask()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
        least = await _least(ask, JOBS // 4, counted)
    server.close()
    return least, faults / (JOBS // 4)


async def _least(action: Callable[[], Awaitable[None]], times: int, counted: Instructions) -> int:
    """What it needs when nothing comes between: on a busy machine replies come in pieces, and timers run meanwhile."""
    counts = []
    for _ in range(times):
        with counted:
            await action()
        counts.append(counted.count)
    return min(counts)


async def _drain(
    url: str, queue: str, jobs: int, counted: Instructions, *, fails: bool = False, tally: Tally | None = None
) -> float:
    left, done = jobs, asyncio.Event()
    warm_at = jobs - 10 * SLOTS

    async def handle(job: Job) -> None:
        nonlocal left
        left -= 1
        if left == warm_at:
            counted.__enter__()
        if left == 0:
            counted.__exit__()
            done.set()
        if fails:
            raise RuntimeError("as told")

    worker = Worker(queue, handle, connection=url, concurrency=SLOTS)
    worker.tally = tally
    await worker.start()
    await done.wait()
    await worker.close()
    return counted.count / warm_at


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1]))))
