"""A worker of PyPI bullmq that keeps the same books as ours (`arena.Books`). Started by `schedules`, in an environment
that has that package and not ours."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from typing import Any

# Installed only in the environment this file runs in.
from bullmq import Worker  # type: ignore[import-not-found]


async def main(order: dict[str, Any]) -> None:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    runs, book = os.open(order["runs"], flags, 0o600), os.open(order["book"], flags, 0o600)

    def write(kind: str, job: Any) -> None:
        entry = [kind, job.id, job.attemptsStarted, os.getpid(), time.monotonic(), ""]
        os.write(runs, json.dumps(entry).encode() + b"\n")

    async def handle(job: Any, token: str) -> dict[str, Any]:
        os.write(book, json.dumps({"ran": job.id, "fence": None, "pid": os.getpid()}).encode() + b"\n")
        write("begin", job)
        if job.data.get("ms"):
            await asyncio.sleep(job.data["ms"] / 1000)
        write("end", job)
        return {}

    options = {
        "connection": order["url"],
        "concurrency": order["concurrency"],
        "lockDuration": order["lock"],
        "stalledInterval": order["stalledInterval"],
    }
    worker = Worker(order["queue"], handle, options)
    worker.on("error", lambda error, *_: print(error, file=sys.stderr))
    leaving = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, leaving.set)
    print("ready", flush=True)
    await leaving.wait()
    await worker.close()


asyncio.run(main(json.loads(sys.argv[1])))
