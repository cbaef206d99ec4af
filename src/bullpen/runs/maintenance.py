"""Find runs that would never end: their job is lost, or failed without being recorded.

In: unfinished runs without progress for a while. Out: a job for those that have none (the process died
between commit and add, Redis lost it, a redrive stopped half way), FAILED for those whose job has failed (the worker
died after the move, or was not ours). Any number may run at the same time: every change is conditional.
Elsewhere: giving a job (`service`), writing FAILED (`processor`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from bullpen._kernel import telemetry
from bullpen._kernel.duration import check_int
from bullpen._kernel.service import BaseService
from bullpen._kernel.ticker import Ticker
from bullpen.ledger import Ledger, RunRow, RunStatus
from bullpen.queue import Job, Queue
from bullpen.queue.states import JobState
from bullpen.runs._logs import log
from bullpen.runs.neighbours import Neighbours
from bullpen.runs.processor import Take, fail_run, failure_message, is_old_news
from bullpen.runs.service import RunService

__all__ = ["RunMaintenance", "Swept"]

_PER_PAGE: Final = 200


@dataclass(slots=True)
class Swept:
    """What one round found."""

    examined: int = 0
    failed: int = 0
    """Runs whose job had failed without them."""
    given_jobs: int = 0
    """Runs whose job was missing."""


class RunMaintenance(BaseService):
    """Something to run beside dispatchers: it needs to see all tenants.

    `idle_ms` is how long a run must have been untouched before it is looked at; longer than a heartbeat. `every_ms` is
    how often to look.
    """

    def __init__(
        self,
        ledger: Ledger,
        service: RunService,
        queue: Queue,
        *,
        idle_ms: int = 60_000,
        every_ms: int = 30_000,
    ) -> None:
        super().__init__("maintenance of runs")
        self._ledger, self._service = ledger, service
        self._idle_ms = check_int("idle_ms", idle_ms, minimum=0)
        self._ticker = Ticker("runs maintenance", self._tick, every=check_int("every_ms", every_ms, minimum=1))
        self._neighbours = Neighbours(ledger.transactions, queue)

    async def _begin(self) -> None:
        await self._ticker.start()

    async def _end(self) -> None:
        await self._ticker.stop()

    async def sweep(self, *, idle_ms: int | None = None) -> Swept:
        """One round over all runs that are idle now."""
        idle = self._idle_ms if idle_ms is None else check_int("idle_ms", idle_ms, minimum=0)
        swept, after = Swept(), None
        while page := await self._ledger.runs.idle(longer_than_ms=idle, limit=_PER_PAGE, after=after):
            for row in page:
                await self._inspect(row, swept)
            after = page[-1].id
        await self._neighbours.look(unless_new=True)
        telemetry.emit("runs.swept", examined=swept.examined, failed=swept.failed, given_jobs=swept.given_jobs)
        return swept

    async def _tick(self) -> None:
        await self.sweep()

    async def _inspect(self, row: RunRow, swept: Swept) -> None:
        swept.examined += 1
        job = await self._service.routes.queue(row.queue).get_job(row.id)
        state = JobState.UNKNOWN if job is None else await job.state()
        if job is not None and state is JobState.FAILED and not is_old_news(row, Take.of(job)):
            await self._fail_run(row, job)
            swept.failed += 1
            return
        if row.status is RunStatus.RUNNING and state not in (JobState.UNKNOWN, JobState.COMPLETED, JobState.FAILED):
            return  # the queue has it: a worker that died loses its lock, and another takes the job
        if await self._service.give_job(row):
            swept.given_jobs += 1
            log(logging.WARNING, f"Run {row.id} was {row.status.value} without a job and got one", job_id=row.id,
                run_id=row.id, tenant_id=row.tenant_id)  # fmt: skip

    async def _fail_run(self, row: RunRow, job: Job) -> None:
        reason = job.failed_reason or "unknown error"
        message = failure_message(job.attempts_made, reason)
        await self._ledger.transactions.run(row.tenant_id, lambda runs: fail_run(runs, row.id, Take.of(job), message))
        log(logging.ERROR, f"Run {row.id} had failed without being recorded and is FAILED now", job_id=row.id,
            run_id=row.id, tenant_id=row.tenant_id, error=message, attemptsMade=job.attempts_made)  # fmt: skip
