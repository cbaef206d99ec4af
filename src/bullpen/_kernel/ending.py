"""End tasks and wait for them, even those that miss that they are to end.

`asyncio.wait_for` of Python 3.11 loses a cancellation that comes in the same moment as what it waited for, and drivers
use it: whoever cancels a task once and then waits for it may wait for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

T = TypeVar("T")

_AGAIN_AFTER_S: Final = 5.0
"""Long enough for what a task does to clean up; a second cancellation would cut that short."""


async def end(*tasks: asyncio.Task[Any], again_after_s: float = _AGAIN_AFTER_S) -> None:
    """Cancel tasks and return when all have ended, however that may be. What they raised is theirs to be asked for."""
    while unfinished := [task for task in tasks if not task.done()]:
        for task in unfinished:
            task.cancel()
        await asyncio.wait(unfinished, timeout=again_after_s)


async def to_its_end(query: Coroutine[Any, Any, T]) -> T:
    """Let a query end before a cancellation goes on: a connection that is torn in the middle of one is lost."""
    task = asyncio.ensure_future(query)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):  # anyio cancels again and again until it is obeyed
                await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # nobody else asks for it
        raise
