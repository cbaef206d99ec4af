"""The wiring of safe runs: two queues, a service, a processor, and what a process runs of them.

In: a ledger, a connection, a handler. Out: `service` for whoever submits runs, `worker` for processes that run them,
`maintenance` for the one that looks after them. The outbox puts jobs into the queue, so some process must dispatch it.
Elsewhere: each of these parts, and choosing the ledger (`bullpen.app`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Final

from bullpen._kernel.breaker import CircuitBreaker
from bullpen._kernel.duration import check_int
from bullpen._kernel.ids import random_id
from bullpen._kernel.policy import INGESTION, WORKFLOW_RUN
from bullpen.errors import NotConfigured, UnsafeDatabaseRole
from bullpen.ledger import Ledger
from bullpen.queue import Connection, Queue, RateLimit, Worker
from bullpen.runs.maintenance import RunMaintenance
from bullpen.runs.neighbours import Neighbours
from bullpen.runs.processor import RunHandler, RunProcessor, placeholder
from bullpen.runs.providers import Provider, ProviderLimits
from bullpen.runs.service import DEAD_LETTER_QUEUE, RunService, run_queue

__all__ = [
    "INGESTION_QUEUE",
    "RunOptions",
    "RunWorker",
    "Runs",
    "connections_for",
    "ingestion_job_id",
    "ingestion_queue",
    "ingestion_worker_options",
]

INGESTION_QUEUE: Final = "ingestion"
_RUNS_PER_CONNECTION: Final = 10
_MINUTE_MS: Final = 60_000


def connections_for(concurrency: int) -> int:
    """Database connections that so many runs at the same time need.

    Transactions take milliseconds and no connection is held while a handler works, so ten runs share one; with fewer,
    heartbeats and steps of busy runs would wait for each other.
    """
    return max(2, -(-concurrency // _RUNS_PER_CONNECTION))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How runs are run."""

    concurrency: int = 100
    """Runs handled at the same time by one worker (WORKER_CONCURRENCY)."""
    lock: int | timedelta = WORKFLOW_RUN.lock_ms or 300_000
    """How long a run stays with a worker that died. Renewed while a handler works, so a short one is safe."""
    stalled_interval: int | timedelta = 10_000
    """How often to look for runs of dead workers: after a crash another worker has the run within `lock` plus
    twice this."""
    rate_limit_rpm: int | None = None
    """Runs started per minute, over all workers; None: as many as come."""
    providers: Mapping[str, Provider] = field(default_factory=dict)
    """What runs may call (`run.provider(name)`), each with its limits."""
    breaker: CircuitBreaker | None = field(default=None, compare=False)
    """When handlers only fail, stop taking runs for a while; None: never."""
    heartbeat_ms: int = 15_000
    """How often a running run shows that it lives, and notices that it was cancelled."""
    patience_ms: int = 60_000
    """How long finished work waits for a database that is away before the run goes back to the queue."""
    idle_ms: int = 60_000
    """How long nobody has touched a run before maintenance looks at it. More than a heartbeat."""
    sweep_every_ms: int = 30_000
    """How often maintenance looks."""

    def __post_init__(self) -> None:
        for name in ("concurrency", "heartbeat_ms", "patience_ms", "sweep_every_ms"):
            check_int(name, getattr(self, name), minimum=1)
        check_int("idle_ms", self.idle_ms, minimum=0)
        if self.rate_limit_rpm is not None:
            check_int("rate_limit_rpm", self.rate_limit_rpm, minimum=1)


class Runs:
    """Everything about runs that one process has.

    runs = Runs(ledger, connection)

    @runs.handler
    async def execute(run: Run) -> dict[str, str]:
        receipt = await run.step("charge", lambda key: payments.charge(idempotency_key=key))
        return {"receipt": receipt}

    await runs.service.enqueue_run(run_id, payload)
    """

    def __init__(
        self,
        ledger: Ledger,
        connection: Connection,
        *,
        prefix: str | None = None,
        handler: RunHandler | None = None,
        options: RunOptions | None = None,
    ) -> None:
        self.ledger = ledger
        self._connection, self._prefix = connection, prefix
        self._handler: RunHandler = handler or placeholder
        self.options = options or RunOptions()
        self.on_handler: Callable[[], None] | None = None
        """Called when a handler was registered; the app then runs a worker."""
        self.queue: Queue = run_queue(connection, prefix=prefix)
        """`workflow-execution`."""
        self.dead_letter_queue = Queue(
            DEAD_LETTER_QUEUE,
            connection=connection,
            prefix=prefix,
            attempts=1,
            remove_on_complete=False,
            remove_on_fail=False,
        )
        """`workflow-execution-dlq`. Nobody processes it; its entries stay."""
        self.service = RunService(ledger.transactions, self.queue)

    def configure(self, **options: Any) -> None:
        """Change options; before the handler is registered."""
        self.options = replace(self.options, **options)

    def handler(self, handler: RunHandler) -> RunHandler:
        """Let this function do the work of runs; for decorating it."""
        self._handler = handler
        self.processor  # noqa: B018 - refuses a function that it cannot call, here and not at the first run
        if self.on_handler is not None:
            self.on_handler()
        return handler

    @property
    def processor(self) -> RunProcessor:
        """What the worker calls for each job."""
        return RunProcessor(
            self.ledger.transactions,
            self._handler,
            queue=self.queue,
            providers=ProviderLimits(self.queue, self.options.providers),
            breaker=self.options.breaker,
            heartbeat_ms=self.options.heartbeat_ms,
            patience_ms=self.options.patience_ms,
        )

    def worker(self, **further: Any) -> RunWorker:
        """Something to run that takes runs. `further` are other options of `Worker`."""
        processor, options = self.processor, self.options
        rpm = options.rate_limit_rpm
        worker = Worker(
            self.queue.name,
            processor.process,
            connection=self._connection,
            prefix=self._prefix,
            policy=WORKFLOW_RUN.policy,
            concurrency=options.concurrency,
            lock=options.lock,
            stalled_interval=options.stalled_interval,
            limit=None if rpm is None else RateLimit(rpm, _MINUTE_MS),
            **further,
        )
        worker.on("failed", processor.on_failed)
        return RunWorker(self.ledger, worker, Neighbours(self.ledger.transactions, self.queue))

    def maintenance(self) -> RunMaintenance:
        """Something to run that finds runs without a job and failures that nobody noticed. Needs to see all tenants."""
        if self.ledger.database.tenant_required:
            raise UnsafeDatabaseRole(
                "maintenance of runs looks at all tenants: run it in a process with the service role"
            )
        return RunMaintenance(
            self.ledger,
            self.service,
            self.queue,
            idle_ms=self.options.idle_ms,
            every_ms=self.options.sweep_every_ms,
        )

    async def aclose(self) -> None:
        """Close the queues. Ledger and connection belong to whoever made them."""
        await self.queue.close()
        await self.dead_letter_queue.close()


class RunWorker:
    """A worker that refuses to start where runs would not be safe."""

    def __init__(self, ledger: Ledger, worker: Worker, neighbours: Neighbours) -> None:
        self._ledger, self.worker, self._neighbours = ledger, worker, neighbours
        self._is_closed = False

    async def check(self) -> None:
        """Raise what keeps this process from running runs: tables, role, row-level security, size of the pool."""
        if self._ledger.roles is not None and self._ledger.duty != "worker":
            raise UnsafeDatabaseRole(
                "workers of runs see one tenant at a time and move its runs along: give them the worker role "
                "(BULLPEN_DATABASE_DUTY=worker)"
            )
        if not self._ledger.database.is_postgres:
            await self._ledger.check()
            return
        concurrency = self.worker.options.concurrency
        needed, pool = connections_for(concurrency), self._ledger.database.pool_size
        if needed > pool:
            raise NotConfigured(
                f"{concurrency} runs at the same time need {needed} database connections, and the pool has {pool}: "
                "raise BULLPEN_DATABASE_POOL_SIZE or lower WORKER_CONCURRENCY"
            )
        await self._ledger.check(connections=needed)

    async def start(self) -> None:
        """Check, begin to take runs, and tell of another ledger on the same queue."""
        await self.check()
        if not self._is_closed:
            await self.worker.start()
            await self._neighbours.look()

    async def run(self, *, signals: bool | None = None) -> None:
        """Take runs until closed. On SIGTERM running ones may finish, within the lock's duration."""
        await self.start()
        if not self._is_closed:
            await self.worker.run(signals=signals)

    async def close(self, timeout: int | timedelta | None = None) -> None:
        """Stop taking, let running runs finish, give back the rest. Safe to call twice."""
        self._is_closed = True
        await self.worker.close(timeout)


# Ingestion ----------------------------------------------------------------------------------------------------------


def ingestion_queue(connection: Connection, *, prefix: str | None = None) -> Queue:
    """The queue of fire-and-forget work beside runs: no run row, no dead letters, the last 500 failures kept.

    Add with `ingestion_job_id()` as `job_id`.
    """
    keep_failed = INGESTION.keep_failed
    return Queue(
        INGESTION_QUEUE,
        connection=connection,
        prefix=prefix,
        attempts=INGESTION.policy.attempts,
        remove_on_fail=False if keep_failed is None else keep_failed,
    )


def ingestion_job_id() -> str:
    """`idx-<uuid4>`."""
    return random_id(INGESTION.id_prefix)


def ingestion_worker_options() -> dict[str, Any]:
    """Options of `Worker` for that queue: lock 30 s, one at a time."""
    return {"policy": INGESTION.policy, "lock": INGESTION.lock_ms, "concurrency": INGESTION.concurrency}
