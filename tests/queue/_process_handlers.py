"""Handlers that child processes import by name."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from bullpen.errors import DelayJob, PermanentError
from bullpen.queue import Job


class Overdrawn(Exception):
    """An error of the program's own."""


def where(job: Job) -> dict[str, Any]:
    return {"pid": os.getpid(), "data": job.data, "key": job.idempotency_key, "fence": job.fence}


async def where_async(job: Job) -> int:
    await job.progress(40)
    return os.getpid()


def reporting(job: Job) -> str:
    job.sync.progress({"message": "half way"})
    job.sync.log("first")
    job.sync.log("second")
    job.sync.update_data({"changed": True})
    return "done"


def failing(job: Job) -> None:
    match job.data["how"]:
        case "plain":
            raise ValueError("no such account")
        case "own":
            raise Overdrawn("balance is 3")
        case "permanent":
            raise PermanentError("never again")
        case "delay":
            if job.attempts_started == 1:
                raise DelayJob(1)
        case "unstorable":
            return object()  # type: ignore[return-value]  # that is the point
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "exit":
            os._exit(7)
    return None


def endless(job: Job) -> None:
    """Holds the GIL as far as Python lets it; only a kill ends it."""
    print(f"running {os.getpid()}", flush=True)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        pass
