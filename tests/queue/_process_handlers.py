"""Handlers that child processes import by name."""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
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
from bullpen.queue.batch import JobBatch
from bullpen.worker.children.child import run_plainly


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


def using(job: Job) -> Any:
    """Use memory, processor time or files, as much as the job says."""
    memory = bytearray(job.data.get("megabytes", 0) * 1024 * 1024)
    end = time.process_time() + job.data.get("seconds", 0)
    while time.process_time() < end:
        pass
    files = [open(os.devnull) for _ in range(job.data.get("files", 0))]  # noqa: SIM115 - all at the same time
    for file in files:
        file.close()
    return len(memory) // (1024 * 1024)


async def using_on_a_loop(job: Job) -> Any:
    return using(job)


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


def _links() -> dict[int, str]:
    """What this process talks to its worker with, by the numbers of its files."""
    return {int(number): os.readlink(f"/proc/self/fd/{number}") for number in sys.argv[1:3]}


def starting_programs(job: Job) -> dict[str, list[str]]:
    """Which of its own links what it starts can use."""
    links = set(_links().values())
    started = subprocess.run(
        "ls -l /proc/self/fd", shell=True, close_fds=False, capture_output=True, text=True, check=True
    )
    reading, writing = os.pipe()
    if os.fork() == 0:
        seen = [os.readlink(f"/proc/self/fd/{number}") for number in sys.argv[1:3]]
        os.write(writing, "\n".join(seen).encode())
        os._exit(0)
    os.wait()
    forked = os.read(reading, 10_000).decode().split("\n")
    return {"started": [link for link in links if link in started.stdout], "forked": sorted(links & set(forked))}


def leaving_a_heir(job: Job) -> None:
    """Dies, and somebody lives on who has all its files: a fork that Python knows nothing of."""
    libc = ctypes.CDLL(None)
    if libc.fork() == 0:
        libc.sleep(60)
        libc._exit(0)
    os._exit(3)


def misbehaving(job: Job) -> Any:
    """Speaks to the worker as no handler of ours would."""
    actions: Any = job.actions
    link: Any = actions._parent._link
    match job.data["how"]:
        case "action":
            return run_plainly(actions._ask("evaluate", "script", [], []))
        case "attribute":
            return run_plainly(actions._ask("__class__"))
        case "other job":
            return run_plainly(actions._ask("add_log", job.data["other"], "not mine", 10))
        case "arguments":
            return run_plainly(actions._ask("add_log", "line", "many"))
        case "garbage":
            link.socket.sendall(b"\xff" * 100)
        case "no message":
            link.socket.sendall(b"\x00\x00\x00\x01\x07")
        case "unknown kind":
            link.send({"kind": "shutdown"})
        case "wrong types":
            link.send({"kind": "raised", "reason": 1, "stack": None, "classes": "x", "signal": 7})
        case "no json":
            link.send({"kind": "returned", "value": b"{"})
        case _:
            return os.getpid()
    time.sleep(60)
    return None


def at_work(job: Job) -> dict[str, Any]:
    """What a plain function may ask of its own job while it runs."""
    blocking = job.sync
    blocking.log("one")
    return {
        "id": blocking.id,
        "data": blocking.data,
        "logs": blocking.logs(),
        "state": blocking.state(),
        "freed": blocking.remove_deduplication(),
        "left": blocking.leave_parent(),
        "removed": blocking.remove_unprocessed_children(),
    }


def family(job: Job) -> dict[str, Any]:
    counts = job.sync.children_counts()
    return {
        "values": job.sync.children_values(),
        "ignored": job.sync.ignored_children(),
        "failed": job.sync.failed_children(),
        "counts": [counts.processed, counts.pending, counts.ignored, counts.failed],
        "key": str(job.key),
    }


async def family_async(job: Job) -> dict[str, Any]:
    counts = await job.children_counts()
    return {
        "values": await job.children_values(),
        "ignored": await job.ignored_children(),
        "failed": await job.failed_children(),
        "counts": [counts.processed, counts.pending, counts.ignored, counts.failed],
        "key": str(job.key),
    }


def _write(path: str, text: str) -> None:
    """As a whole: who sees the file may read it."""
    with open(path + ".new", "w") as file:
        file.write(text)
    os.replace(path + ".new", path)


def cleaning_up(job: Job) -> int:
    """Runs until it is cancelled, and then leaves a note of what it got; without a file it tells its process."""
    if job.data["file"] is None:
        return os.getpid()
    _write(job.data["file"] + ".started", str(os.getpid()))
    try:
        while True:
            time.sleep(0.01)
    except BaseException as error:
        job.sync.log("cleaning up")
        _write(job.data["file"], f"{type(error).__name__} {job.cancelled} {job.cancel_reason}")
        raise


async def cleaning_up_async(job: Job) -> None:
    _write(job.data["file"] + ".started", str(os.getpid()))
    try:
        await asyncio.Event().wait()
    except BaseException as error:
        await job.log("cleaning up")
        _write(job.data["file"], f"{type(error).__name__} {job.cancelled} {job.cancel_reason}")
        raise


def chatty(job: Job) -> None:
    """Asks its worker for something nearly all the time."""
    _write(job.data["file"] + ".started", str(os.getpid()))
    try:
        while True:
            job.sync.progress(1)
    finally:
        _write(job.data["file"], "cleaned")


async def chatty_async(job: Job) -> None:
    _write(job.data["file"] + ".started", str(os.getpid()))
    try:
        while True:
            await job.progress(1)
    finally:
        _write(job.data["file"], "cleaned")


def deaf(job: Job) -> None:
    """Takes no notice of being cancelled."""
    _write(job.data["file"], str(os.getpid()))
    while True:
        try:
            time.sleep(3600)
        except BaseException:
            continue


# Batches ------------------------------------------------------------------------------------------------------------


def together(batch: JobBatch) -> list[Any]:
    """Each job by itself: a value, an error, one that JSON cannot carry, and what it asked its worker for."""
    batch[1].sync.log("seen")
    batch[2].sync.update_data({"changed": 2})
    return [os.getpid(), ValueError("no such row"), object(), batch[3].data]


async def together_async(batch: JobBatch) -> list[Any]:
    await batch[1].log("seen")
    await batch[2].update_data({"changed": 2})
    return [os.getpid(), ValueError("no such row"), object(), batch[3].data]


def deciding(batch: JobBatch) -> None:
    """Ends two jobs, shows that it cannot do so twice, and then dies or raises."""
    batch.complete(batch[0], "done")
    batch.fail(batch[1], DelayJob(3_600_000))
    try:
        batch.complete(batch[0])
    except BullpenError as error:
        batch[2].sync.log(type(error).__name__)
    if batch[0].data["dies"]:
        os.kill(os.getpid(), signal.SIGKILL)
    raise PermanentError("the rest is lost")


async def deciding_async(batch: JobBatch) -> None:
    await asyncio.to_thread(batch.complete, batch[0], "done")
    batch.fail(batch[1], DelayJob(3_600_000))
    try:
        batch.complete(batch[0])
    except BullpenError as error:
        await batch[2].log(type(error).__name__)
    if batch[0].data["dies"]:
        os.kill(os.getpid(), signal.SIGKILL)
    raise PermanentError("the rest is lost")


def nothing_together(batch: JobBatch) -> None:
    """All complete."""


def too_few(batch: JobBatch) -> list[int]:
    return [1]


def watching_one(batch: JobBatch) -> list[str]:
    """Goes on with the others when one is not wanted any more."""
    while not batch[1].cancelled:
        batch[0].sync.progress(1)
    return [f"{job.cancelled} {job.cancel_reason}" for job in batch]


async def watching_one_async(batch: JobBatch) -> list[str]:
    await batch[0].progress(1)
    while not batch[1].cancelled:
        await batch[0].progress(1)
    return [f"{job.cancelled} {job.cancel_reason}" for job in batch]


def cleaning_up_together(batch: JobBatch) -> int:
    _write(batch[0].data["file"] + ".started", str(os.getpid()))
    try:
        while True:
            time.sleep(0.01)
    except BaseException as error:
        _write(batch[0].data["file"], f"{type(error).__name__} {batch.cancelled} {batch[1].cancel_reason}")
        raise
