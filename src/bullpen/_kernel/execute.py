"""Run one function of the user's and say what happened. The only place that calls a handler.

In: a handler (`async def` on the loop, plain `def` in a thread) and what it handles, a job or a delivery. Out: Returned
or Raised. Cancelled from outside (lock lost, closing), it raises CancelledError and nothing may be written.
Elsewhere: what the result means (`outcome`), starting and cancelling runs (`bullpen.worker`, `bullpen.plugins`).
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from bullpen._kernel import logs
from bullpen._kernel.logs import set_handled
from bullpen._kernel.outcome import RETURNED_NOTHING, Raised, Result, Returned
from bullpen.errors import HandlerTimeout, PermanentError


class Cancellable(logs.Subject, Protocol):
    """What a handler gets: it can see there that its run is pointless."""

    cancelled: bool


Subject = TypeVar("Subject", bound=Cancellable)
Given = TypeVar("Given")
T = TypeVar("T")


_time_is_up: Final[ContextVar[tuple[float, float] | None]] = ContextVar("bullpen_time_is_up", default=None)
"""When the time of what runs here is up, and how much it was."""


def check_time() -> None:
    """Raise if the time of what runs here is up: a thread is not cancelled, and its run failed all the same."""
    limit = _time_is_up.get()
    if limit is not None and time.monotonic() >= limit[0]:
        raise HandlerTimeout(limit[1], " (the thread ended late)")


def is_async(handler: Callable[..., Any]) -> bool:
    """True for `async def` functions and objects whose `__call__` is one."""
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "__call__", None))  # noqa: B004 - the method itself is asked


async def run_async(handler: Callable[[Subject], Awaitable[Any]], subject: Subject, timeout_s: float | None) -> Result:
    """On the loop; cancelled when its time is up."""
    set_handled(subject)
    try:
        if timeout_s is None:
            value = await handler(subject)
        else:
            before = _time_is_up.set((time.monotonic() + timeout_s, timeout_s))
            try:
                async with asyncio.timeout(timeout_s) as limit:
                    value = await handler(subject)
            except TimeoutError:
                if not limit.expired():
                    raise
                subject.cancelled = True
                raise HandlerTimeout(timeout_s) from None
            finally:
                _time_is_up.reset(before)
        return RETURNED_NOTHING if value is None else Returned(value)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - user code: whatever it raises is the result
        return Raised(error)


async def run_thread(
    threads: ThreadPoolExecutor, handler: Callable[[Subject], Any], subject: Subject, timeout_s: float | None
) -> Result:
    """In a thread, which nobody can kill: when time is up `cancelled` is set, and this returns when the thread does, or
    two runs would overlap."""
    loop = asyncio.get_running_loop()
    context = contextvars.copy_context()
    call = loop.run_in_executor(threads, partial(context.run, run_plain, handler, subject))
    if timeout_s is not None:
        timer = loop.call_later(timeout_s, setattr, subject, "cancelled", True)
        call.add_done_callback(lambda _: timer.cancel())
    started = loop.time()
    try:
        # Shielded: cancelling the future would only make us forget a thread that goes on.
        result = await asyncio.shield(call)
    except asyncio.CancelledError:
        subject.cancelled = True
        await asyncio.wait([call])
        raise
    if timeout_s is not None and loop.time() - started > timeout_s:
        return Raised(HandlerTimeout(timeout_s, " (the thread ended late)"))
    return result


async def call_in_thread(function: Callable[[Given], T], given: Given, *, name: str, may_be_left: bool = False) -> T:
    """Call a plain function in a thread of its own: those that Python keeps for everybody are six on a small machine.

    Nobody can kill it, so whoever is cancelled waits for it: otherwise the next attempt would run beside it. With
    `may_be_left` it goes on alone, and its answer is unknown.
    """
    threads = ThreadPoolExecutor(1, thread_name_prefix=name)
    context = contextvars.copy_context()
    call = asyncio.get_running_loop().run_in_executor(threads, context.run, function, given)
    threads.shutdown(wait=False)
    try:
        return await (call if may_be_left else asyncio.shield(call))
    except asyncio.CancelledError:
        if not may_be_left:
            await asyncio.wait([call])
        raise


def run_plain(handler: Callable[[Subject], Any], subject: Subject) -> Result:
    """A plain function, in this thread and in a context of its own."""
    set_handled(subject)
    try:
        value = handler(subject)
        if inspect.isawaitable(value):
            if inspect.iscoroutine(value):
                value.close()  # it never ran; the error below says so, a warning at some later time would not
            raise PermanentError("the handler returned an awaitable; declare it with `async def`")
        return RETURNED_NOTHING if value is None else Returned(value)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - user code: whatever it raises is the result
        return Raised(error)
