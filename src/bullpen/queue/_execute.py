"""Run one handler for one job and say what happened. The only place that calls user code with a job.

In: a handler (`async def` on the loop, plain `def` in a thread) and a job. Out: Returned or Raised, or None when the
run was given up (lock lost, worker closing) and nothing may be written about it. Elsewhere: what the result means
(`bullpen._kernel.outcome`), starting and cancelling runs (`worker`).
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from functools import partial
from typing import Any

from bullpen._kernel.logs import set_handled
from bullpen._kernel.outcome import RETURNED_NOTHING, Raised, Result, Returned
from bullpen.errors import PermanentError
from bullpen.queue.job import Job

AsyncHandler = Callable[[Job], Awaitable[Any]]
Handler = Callable[[Job], Any]


class GivenUp(Enum):
    """Why a run ended without a result."""

    LOCK_LOST = "lock lost"
    CLOSING = "closing"


class JobTimeout(Exception):
    """The handler took longer than the worker's timeout."""


def is_async(handler: Handler) -> bool:
    """True for `async def` functions and objects whose `__call__` is one."""
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "__call__", None))  # noqa: B004 - the method itself is asked


async def run_async(handler: AsyncHandler, job: Job, timeout_s: float | None) -> Result:
    """On the loop; cancelled when its time is up."""
    set_handled(job)
    try:
        if timeout_s is None:
            value = await handler(job)
        else:
            try:
                async with asyncio.timeout(timeout_s) as limit:
                    value = await handler(job)
            except TimeoutError:
                if not limit.expired():
                    raise
                job.cancelled = True
                raise JobTimeout(f"timed out after {timeout_s * 1000:.0f} ms") from None
        return RETURNED_NOTHING if value is None else Returned(value)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - user code: whatever it raises is the result
        return Raised(error)


async def run_thread(threads: ThreadPoolExecutor, handler: Handler, job: Job, timeout_s: float | None) -> Result:
    """In a thread, which nobody can kill: when time is up `job.cancelled` is set and the slot stays taken until it
    returns."""
    loop = asyncio.get_running_loop()
    job.bind(lambda coroutine: asyncio.run_coroutine_threadsafe(coroutine, loop).result())
    context = contextvars.copy_context()
    call = loop.run_in_executor(threads, partial(context.run, run_plain, handler, job))
    if timeout_s is not None:
        timer = loop.call_later(timeout_s, setattr, job, "cancelled", True)
        call.add_done_callback(lambda _: timer.cancel())
    started = loop.time()
    try:
        # Shielded: cancelling the future would only make us forget a thread that goes on.
        result = await asyncio.shield(call)
    except asyncio.CancelledError:
        job.cancelled = True
        await asyncio.wait([call])
        raise
    if timeout_s is not None and loop.time() - started > timeout_s:
        return Raised(JobTimeout(f"timed out after {timeout_s * 1000:.0f} ms (the thread ended later)"))
    return result


def run_plain(handler: Handler, job: Job) -> Result:
    """A plain function, in this thread and in a context of its own."""
    set_handled(job)
    try:
        value = handler(job)
        if inspect.isawaitable(value):
            if inspect.iscoroutine(value):
                value.close()  # it never ran; the error below says so, a warning at some later time would not
            raise PermanentError("the handler returned an awaitable; declare it with `async def`")
        return RETURNED_NOTHING if value is None else Returned(value)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - user code: whatever it raises is the result
        return Raised(error)
