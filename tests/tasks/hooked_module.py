"""An app whose child processes run its hooks and its middleware; what happens is written to the file that is named."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar

from bullpen import Bullpen, Job
from bullpen.redis import Connection

app = Bullpen(Connection("redis://127.0.0.1:1"))  # never used: the child only runs functions
seen: ContextVar[list[str] | None] = ContextVar("seen", default=None)


def note(text: str) -> None:
    if "HOOKED_NOTES" in os.environ:
        with open(os.environ["HOOKED_NOTES"], "a", encoding="utf-8") as notes:
            notes.write(f"{os.getpid()} {text}\n")


@app.lifespan
async def whole_life(made: Bullpen) -> AsyncIterator[None]:
    assert made is app
    note("start")
    yield
    note("end")


@app.on_startup
def fail_if_asked() -> None:
    if os.environ.get("HOOKED_FAILS"):
        raise RuntimeError("no pool")


@app.middleware
async def on_loop(job: Job) -> AsyncIterator[None]:
    seen.set(["on loop"])
    try:
        yield
    except ZeroDivisionError as error:
        raise ValueError("translated") from error


@app.middleware
def where_it_runs(job: Job) -> Iterator[None]:
    (seen.get() or []).append("in place")
    yield


@app.handler("plain", processes=True)
def plain(job: Job) -> list[str] | None:
    if job.name == "fails":
        raise ZeroDivisionError
    return [*(seen.get() or []), str(os.getpid())]


@app.handler("loop", processes=True)
async def on_a_loop(job: Job) -> list[str] | None:
    if job.name == "fails":
        raise ZeroDivisionError
    return [*(seen.get() or []), str(os.getpid())]
