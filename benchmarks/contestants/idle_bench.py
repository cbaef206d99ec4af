"""Workers of bullpen that have nothing to do.   python idle_bench.py <url> <queues> <seconds>

Says when they are idle, then the CPU seconds of that many seconds of idling."""

import asyncio
import sys
import time

from bullpen.redis import Connection
from bullpen.worker import Worker

SETTLING_S = 6.0


async def main(url: str, queues: int, seconds: float) -> None:
    connection = Connection(url)
    workers = [Worker(f"idle-{number}", lambda job: None, connection=connection) for number in range(queues)]
    for worker in workers:
        await worker.start()
    await asyncio.sleep(SETTLING_S)
    print("ready", flush=True)
    began = time.process_time()
    await asyncio.sleep(seconds)
    print(time.process_time() - began, flush=True)
    await asyncio.Event().wait()


asyncio.run(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
