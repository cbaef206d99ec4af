"""SQLite, asked in one go: a whole transaction is one call into a thread that has a connection of its own.

The asynchronous driver hands each step (begin, execute, fetch, commit, reset) to its thread and waits for it: some
seventeen times for one event of a workflow, and each time costs more than SQLite's own work. In: a function of an open
connection. Out: what it returns, committed; or what it raises, rolled back. What a caller waits for no more is rolled
back too, unless it is being committed in that very moment. Elsewhere: engines, errors (`database`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import sqlalchemy as sa

__all__ = ["SqliteThread"]

T = TypeVar("T")


class _GivenUp(Exception):
    """Nobody waits for it any more."""


class SqliteThread:
    """One thread and one connection, made when they are first needed. Calls come one after the other."""

    def __init__(self, engine: sa.Engine, name: str) -> None:
        """`engine` must be one that nobody else uses; its pool has one connection."""
        self._engine, self._name = engine, name
        self._executor: ThreadPoolExecutor | None = None

    async def run(self, work: Callable[[sa.Connection], T]) -> T:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix=self._name)
        given_up = threading.Event()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, self._run, work, given_up)
        except asyncio.CancelledError:
            given_up.set()
            raise

    def _run(self, work: Callable[[sa.Connection], T], given_up: threading.Event) -> T:
        with self._engine.begin() as connection:
            result = work(connection)
            if given_up.is_set():
                raise _GivenUp
            return result

    async def aclose(self) -> None:
        """Wait for what is under way, and close the connection in the thread that used it. Safe to call twice."""
        executor, self._executor = self._executor, None
        if executor is not None:
            await asyncio.get_running_loop().run_in_executor(executor, self._engine.dispose)
            executor.shutdown(wait=False)
