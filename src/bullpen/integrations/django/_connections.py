"""Django's connections around each job, as around each request.

Between requests Django closes connections that are too old or broken; a worker has no requests. Without this, one
connection that the database has dropped fails every job of its thread until the process is started again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

from asgiref.sync import sync_to_async
from django.db import close_old_connections, connections, reset_queries

__all__ = ["check_connections", "check_connections_of_async_code"]


def check_connections(_job: Any) -> Iterator[None]:
    """For plain handlers: in the thread of the job, whose connections these are."""
    if _on_a_loop():  # an `async def` handler: Django's connections are in another thread
        yield
        return
    _begin()
    try:
        yield
    finally:
        close_old_connections()


async def check_connections_of_async_code(_job: Any) -> AsyncIterator[None]:
    """For `async def` handlers: in the thread where Django runs the queries of a loop."""
    await sync_to_async(_begin)()
    try:
        yield
    finally:
        await sync_to_async(close_old_connections)()


def _begin() -> None:
    reset_queries()
    close_old_connections()
    for connection in connections.all(initialized_only=True):
        # Also without CONN_HEALTH_CHECKS: a round trip costs less than an attempt of a job.
        if connection.connection is not None and not connection.in_atomic_block and not connection.is_usable():
            connection.close()


def _on_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
