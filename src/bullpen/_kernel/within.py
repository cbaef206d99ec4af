"""Wait for a coroutine, but not for ever; and without a timer for one that never has to wait.

A timer costs more than a call that answers from memory, and most calls of a batch do. In: a coroutine and a limit. Out:
what it returns, or TimeoutError, as `asyncio.timeout` around it would have it: in the caller's own task.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, TypeVar

__all__ = ["within"]

Result = TypeVar("Result")


async def within(awaitable: Awaitable[Result], limit_s: float) -> Result:
    """Its result. After `limit_s` it is cancelled and TimeoutError raised."""
    if not isinstance(awaitable, Coroutine):
        async with asyncio.timeout(limit_s):
            return await awaitable
    coroutine: Coroutine[Any, Any, Result] = awaitable
    try:
        first = coroutine.send(None)
    except StopIteration as stop:
        result: Result = stop.value
        return result
    async with asyncio.timeout(limit_s):
        return await _rest(coroutine, first)


@types.coroutine
def _rest(coroutine: Coroutine[Any, Any, Result], awaited: Any) -> Generator[Any, Any, Result]:
    """Go on with a coroutine that waits for `awaited` already."""
    step: Callable[[Any], Any]
    while True:
        try:
            sent = yield awaited
        except BaseException as error:  # noqa: BLE001 - the coroutine's business, cancelling above all
            step, argument = coroutine.throw, error
        else:
            step, argument = coroutine.send, sent
        try:
            awaited = step(argument)
        except StopIteration as stop:
            result: Result = stop.value
            return result
