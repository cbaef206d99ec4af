"""The runs of an application, and what of them this process does.

In: settings, ledger, connection. Out: `Runs` that the container knows, and one service for `run`: a worker for each
handler, and maintenance. With row-level security a process does one of the two, by the role it has: workers see one
tenant at a time, maintenance sees all. Elsewhere: the parts themselves (`bullpen.runs`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from bullpen._kernel.container import Container
from bullpen._kernel.logs import get_logger
from bullpen._kernel.service import BaseService
from bullpen.ledger import Ledger
from bullpen.redis import Connection
from bullpen.runs import RunOptions, RunProcessor, Runs, RunService, RunWorker
from bullpen.settings import Settings
from bullpen.worker import Worker

__all__ = ["RunsService", "make_runs"]

logger = get_logger("bullpen.runs")

_DUTIES: Final = {
    "service": "runs are dispatched and maintained here; processes with BULLPEN_DATABASE_DUTY=worker handle them",
    "worker": "runs are handled here; a process with BULLPEN_DATABASE_DUTY=service dispatches and maintains them",
    "tenant": "runs are submitted here; processes with the duties service and worker dispatch and handle them",
}


def make_runs(settings: Settings, ledger: Ledger, connection: Connection, prefix: str, container: Container) -> Runs:
    """The configured runs. Service, processor and both queues are found in the container, by type or by name."""
    runs = Runs(ledger, connection, prefix=prefix, options=RunOptions(concurrency=settings.runs.concurrency))
    container.provide(RunService, runs.service)
    container.provide(RunProcessor, lambda: runs.processor)
    for queue in (runs.queue, runs.dead_letter_queue):
        container.name(queue.name, queue)
    return runs


class RunsService(BaseService):
    """Runs and looks after runs until closed. A worker is made when a handler is registered."""

    uses_redis: Final = True

    def __init__(self, runs: Runs, prepare: Callable[[], Awaitable[None]], workers: dict[str, Worker]) -> None:
        super().__init__("runs")
        self._runs, self._prepare, self._workers = runs, prepare, workers
        self._run_workers: dict[str | None, RunWorker] = {}
        runs.on_handler = self._make_worker

    def _make_worker(self, name: str | None) -> None:
        ledger = self._runs.ledger
        if ledger.roles is not None and ledger.duty != "worker":
            return  # as with deliveries: a process does what its role may
        is_new = name not in self._run_workers
        made = self._run_workers[name] = self._runs.worker(name)
        self._workers[made.worker.queue_name] = made.worker
        if is_new and self.is_running:  # a handler that is registered later is run at once
            self._spawn(self._host(made))

    async def _begin(self) -> None:
        await self._prepare()
        ledger = self._runs.ledger
        if ledger.roles is not None:
            logger.info(_DUTIES[ledger.duty])
        if not ledger.database.tenant_required:
            await self._host(self._runs.maintenance())
        while waiting := [worker for worker in self._run_workers.values() if worker not in self._services]:
            await self._host(waiting[0])  # and those of handlers that are registered meanwhile
