"""One worker process of the demo: `python -m bullpen.cli.demo.worker QUEUE NAME`, with the server in the environment.

It prints a line when it takes jobs, and ends gracefully when its stdin does: then the demo is over, or was killed.
"""

from __future__ import annotations

import asyncio
import os
import sys

from bullpen.app import connect
from bullpen.cli.demo.scenario import CONCURRENCY, LOCK_MS, STALLED_INTERVAL_MS, handle
from bullpen.worker import Worker


async def main(queue: str, name: str) -> None:
    worker = Worker(
        queue,
        handle,
        connection=connect(os.environ["BULLPEN_REDIS_URL"]),
        prefix=os.environ["BULLPEN_PREFIX"],
        name=name,
        dead_letters=True,
        concurrency=CONCURRENCY,
        lock=LOCK_MS,
        stalled_interval=STALLED_INTERVAL_MS,
    )
    loop = asyncio.get_running_loop()
    closing: list[asyncio.Task[None]] = []

    def on_end() -> None:
        loop.remove_reader(sys.stdin)
        closing.append(loop.create_task(worker.close()))

    loop.add_reader(sys.stdin, on_end)
    await worker.start()
    print("ready", flush=True)
    await worker.run(signals=False)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3]))
