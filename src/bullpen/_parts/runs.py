"""The runs of an application, and what of them this process does.

In: settings, ledger, connection. Out: `Runs` that the container knows, and one service for `run`: a worker if there is
a handler, and maintenance. With row-level security a process does one of the two, by the role it has: workers see one
tenant at a time, maintenance sees all. Elsewhere: the parts themselves (`bullpen.runs`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Final

from bullpen._kernel.container import Container
from bullpen.ledger import Ledger
from bullpen.queue import Connection, Worker
from bullpen.runs import RunMaintenance, RunOptions, RunProcessor, Runs, RunService, RunWorker
from bullpen.settings import Settings

__all__ = ["RunsService", "make_runs"]


def make_runs(settings: Settings, ledger: Ledger, connection: Connection, prefix: str, container: Container) -> Runs:
    """The configured runs. Service, processor and both queues are found in the container, by type or by name."""
    runs = Runs(ledger, connection, prefix=prefix, options=RunOptions(concurrency=settings.runs.concurrency))
    container.provide(RunService, runs.service)
    container.provide(RunProcessor, lambda: runs.processor)
    for queue in (runs.queue, runs.dead_letter_queue):
        container.name(queue.name, queue)
    return runs


class RunsService:
    """Runs and looks after runs until closed. The worker is made when a handler is registered."""

    uses_redis: Final = True

    def __init__(self, runs: Runs, prepare: Callable[[], Awaitable[None]], workers: dict[str, Worker]) -> None:
        self._runs, self._prepare, self._workers = runs, prepare, workers
        self._worker: RunWorker | None = None
        self._maintenance: RunMaintenance | None = None
        self._is_closed = False
        self._closed = asyncio.Event()
        runs.on_handler = self._make_worker

    def _make_worker(self) -> None:
        self._worker = self._runs.worker()
        self._workers[self._runs.queue.name] = self._worker.worker

    async def run(self, *, signals: bool | None = None) -> None:
        await self._prepare()
        ledger = self._runs.ledger
        if self._is_closed:
            return
        try:
            async with asyncio.TaskGroup() as group:
                if not ledger.database.tenant_required:
                    self._maintenance = self._runs.maintenance()
                    group.create_task(self._maintenance.run())
                if self._worker is not None:
                    group.create_task(self._worker.run(signals=False))
                await self._closed.wait()  # whatever parts this process has, it serves until it is closed
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def close(self, timeout: int | timedelta | None = None) -> None:
        self._is_closed = True
        parts = [part for part in (self._worker, self._maintenance) if part is not None]
        await asyncio.gather(*(part.close(timeout) for part in parts))
        self._closed.set()
