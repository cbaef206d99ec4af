"""Wait for what other processes do to a queue, without holding up the loop that our own worker runs on."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import redis

from ._dump import PREFIX

T = TypeVar("T")

TIMEOUT_S = 10.0
# A blocking read would stop the loop, and a second async client would be one more thing that can fail.
_LOOK_EVERY_S = 0.005


def events_of(client: redis.Redis, queue: str) -> list[dict[str, str]]:
    """The stream of a queue as it is now, oldest first."""
    entries: Any = client.xrange(f"{PREFIX}:{queue}:events")
    return [{name.decode(): value.decode() for name, value in fields.items()} for _id, fields in entries]


async def until(look: Callable[[], T], what: str, *, timeout: float = TIMEOUT_S) -> T:
    """Return the first true answer of `look`."""
    deadline = time.monotonic() + timeout
    while not (answer := look()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {timeout} s")
        await asyncio.sleep(_LOOK_EVERY_S)
    return answer


async def until_answer(ask: Callable[[], Awaitable[T]], what: str, *, timeout: float = TIMEOUT_S) -> T:
    """Return the first true answer of something that must be awaited."""
    deadline = time.monotonic() + timeout
    while not (answer := await ask()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {timeout} s")
        await asyncio.sleep(_LOOK_EVERY_S)
    return answer


async def until_event(
    client: redis.Redis,
    queue: str,
    event: str,
    job_id: str | None = None,
    *,
    count: int = 1,
    timeout: float = TIMEOUT_S,
) -> None:
    """Wait until the stream of the queue holds `count` such events, past ones included."""
    seen: list[str] = []

    def is_there() -> bool:
        seen[:] = [one["event"] for one in events_of(client, queue) if job_id is None or one.get("jobId") == job_id]
        return seen.count(event) >= count

    try:
        await until(is_there, f"event {event} of job {job_id} in {queue}", timeout=timeout)
    except AssertionError as error:
        raise AssertionError(f"{error}; seen: {seen}") from None
