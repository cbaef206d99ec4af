"""Exchanges without a worker around them: batches of exactly the size that a test asks for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bullpen.queue import Queue
from bullpen.queue.actions import AsyncActions
from bullpen.redis import Connection
from bullpen.redis.client import Door
from bullpen.worker.exchange import Exchange


@asynccontextmanager
async def exchange_of(queue: Queue, url: str, *, clock_offset_ms: int = 0) -> AsyncIterator[Exchange]:
    """The numbered calls of one worker that has no pump."""
    connection = Connection(url)
    door = Door(connection, key=queue.keys.base)
    try:
        yield Exchange(
            door,
            queue.keys,
            AsyncActions(door, queue.keys, deadline_s=60.0),
            worker_name="bench",
            lock_ms=600_000,
            limit=None,
            keep_completed=None,
            keep_failed=None,
            dead_letters=None,
            clock_offset_ms=clock_offset_ms,
        )
    finally:
        door.close()
        await connection.aclose()
