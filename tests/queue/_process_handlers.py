"""Handlers that child processes import by name."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from bullpen.errors import BullpenError, DelayJob, PermanentError
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


CONTEXT: contextvars.ContextVar[str] = contextvars.ContextVar("CONTEXT", default="")


def environment(job: Job) -> dict[str, Any]:
    """Where a plain function runs, and what an earlier job left in its context."""
    left, _ = CONTEXT.get(), CONTEXT.set("left behind")
    return {"is_main": threading.current_thread() is threading.main_thread(), "left": left}


def reporting_from_threads(job: Job) -> int:
    threads = [threading.Thread(target=job.sync.log, args=(f"line {number}",)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(threads)


_strays: list[str] = []


def leaving_a_thread(job: Job) -> list[str]:
    """The first job leaves a thread behind that goes on using it; the second tells what became of that."""
    if job.data["is_first"]:
        ended, earlier = threading.Event(), job

        def go_on() -> None:
            ended.wait(10)
            try:
                earlier.sync.log("too late")
            except BullpenError as error:
                _strays.append(str(error))

        thread = threading.Thread(target=go_on)
        thread.start()
        _left.append((ended, thread))
        return []
    for ended, thread in _left:
        ended.set()
        thread.join(10)
    return _strays


_left: list[tuple[threading.Event, threading.Thread]] = []


def echoing(job: Job) -> Any:
    return job.data


def interrupted(job: Job) -> str:
    """Ctrl-C, or the end of a service, reaches the children too."""
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(os.getpid(), number)
    # What the handler starts must still be stoppable.
    asked = subprocess.run([sys.executable, "-c", ASK_FOR_SIGNALS], capture_output=True, text=True, check=True)
    return asked.stdout.strip()


ASK_FOR_SIGNALS = (
    "import signal; print(signal.SIG_IGN in (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)))"
)


def stopping_a_fork(job: Job) -> int | None:
    """As a pool of `multiprocessing` ends its processes."""
    fork = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    fork.start()
    fork.terminate()
    fork.join(10)
    code = fork.exitcode
    fork.kill()
    return code


async def interrupted_async(job: Job) -> str:
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(os.getpid(), number)
    await asyncio.sleep(0.01)
    return "went on"


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


def logging_plain(job: Job) -> None:
    logging.getLogger("shop").warning("charging")


async def logging_async(job: Job) -> None:
    logging.getLogger("shop").warning("charging")
