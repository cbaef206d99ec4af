"""A worker of ours in a process of its own, for tests that kill it.

    python -m tests.interop._our_worker <url> <queue> <json>

The JSON holds `concurrency`, `lock`, `stalled_interval` and `sleep` (ms that each job takes).
"""

import asyncio
import json
import sys

from bullpen.queue import Job
from bullpen.worker import Worker


async def main(url: str, queue: str, given: str) -> None:
    options = json.loads(given)
    pause_s = options.pop("sleep") / 1000

    async def handle(job: Job) -> str:
        await asyncio.sleep(pause_s)
        return "bullpen"

    worker = Worker(queue, handle, connection=url, name="ours", **options)
    worker.on("completed", lambda job, _value: print(f"completed {job.id}", flush=True))
    await worker.start()
    print("ready", flush=True)
    await worker.run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
