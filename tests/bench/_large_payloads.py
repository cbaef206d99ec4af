"""Add and take jobs of nine megabytes, and print the process's memory in kB before, and when it has come down again.

A program: its argument is the server's address. What a C library keeps after that is a matter of chance, up to sixty
megabytes; so that much is made here: blocks that are freed below one that is not.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from bullpen.queue import Job, Queue
from bullpen.worker import Worker

JOBS = 4
BLOCK = 100_000
ROOM_KB = 24_000
PATIENCE_S = 20


def resident_kb() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


async def main(url: str) -> None:
    left, done = JOBS + 1, asyncio.Event()

    async def handle(job: Job) -> None:
        nonlocal left
        assert job.data is not None
        left -= 1
        if not left:
            done.set()

    queue = Queue("large", connection=url, remove_on_complete=True)
    async with queue, Worker("large", handle, connection=url, concurrency=10):
        await queue.add("small", {})
        before = resident_kb()
        blocks = [b"x" * BLOCK for _ in range(600)]
        above = b"x" * BLOCK
        del blocks
        for _ in range(JOBS):
            await queue.add("large", {"p": "x" * (9 << 20)})
        await done.wait()
        after = resident_kb()
        for _ in range(PATIENCE_S * 10):
            after = resident_kb()
            if after < before + ROOM_KB:
                break
            await asyncio.sleep(0.1)
        assert above
    print(before, after)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
