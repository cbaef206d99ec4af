"""The wiring of safe runs: queues, a service, a processor per handler, and what a process runs of them.

In: a ledger, a connection, handlers. Out: `service` to submit runs, `worker` for processes that run them,
`maintenance` for the process that maintains them. The outbox puts jobs into the queue, so some process must dispatch
it. Elsewhere: each of these parts, what a handler may say (`handlers`), and choosing the ledger (`bullpen.app`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final, Unpack, overload

from bullpen._kernel.duration import to_ms
from bullpen._kernel.ending import to_its_end
from bullpen._kernel.ids import random_id
from bullpen._kernel.policy import INGESTION
from bullpen._kernel.service import BaseService
from bullpen.errors import NotConfigured, UnsafeDatabaseRole
from bullpen.ledger import Ledger
from bullpen.queue import Queue, RateLimit
from bullpen.redis import Connection
from bullpen.runs.handlers import HandlerOptions, Routes, RunArguments, RunOptions, RunRoute
from bullpen.runs.maintenance import RunMaintenance
from bullpen.runs.neighbours import Neighbours
from bullpen.runs.processor import RunHandler, RunProcessor, placeholder
from bullpen.runs.providers import ProviderLimits
from bullpen.runs.service import DEAD_LETTER_QUEUE, RunService, run_queue
from bullpen.worker import Worker
from bullpen.worker.auto import most_of
from bullpen.worker.options import WorkerArguments

__all__ = [
    "INGESTION_QUEUE",
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
_NAMED_CONCURRENCY: Final = 20
"""Of a handler with a name: five of them and the one without fit the pool of connections that nobody has configured."""


def connections_for(concurrency: int) -> int:
    """Database connections that so many runs at the same time need.

    Transactions take milliseconds and no connection is held while a handler works, so ten runs share one; with fewer,
    heartbeats and steps of busy runs would wait for each other.
    """
    return max(2, -(-concurrency // _RUNS_PER_CONNECTION))


class Runs:
    """Everything about runs that one process has.

    runs = Runs(ledger, connection)

    @runs.handler
    async def execute(run: Run) -> dict[str, str]:
        receipt = await run.step("charge", lambda key: payments.charge(idempotency_key=key))
        return {"receipt": receipt}

    @runs.handler("report", price=5, timeout=60_000, retry=RetryPolicy(attempts=5))
    async def report(run: Run) -> str: ...

    await runs.service.enqueue_run(run_id, payload)
    await runs.service.submit(payload, handler="report")
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
        ledger.use("runs")
        self._connection, self._prefix = connection, prefix
        self._handlers: dict[str | None, RunHandler] = {} if handler is None else {None: handler}
        self.on_handler: Callable[[str | None], None] | None = None
        """Called with the name when a handler was registered; the app then runs a worker."""
        self.queue: Queue = run_queue(connection, prefix=prefix)
        """`workflow-execution`, the queue of the handler without a name."""
        self.routes = Routes(self.queue, options)
        self.dead_letter_queue = Queue(
            DEAD_LETTER_QUEUE,
            connection=connection,
            prefix=prefix,
            attempts=1,
            remove_on_complete=False,
            remove_on_fail=False,
        )
        """`workflow-execution-dlq`. It has no worker; its entries stay."""
        self.service = RunService(ledger.transactions, self.queue, self.routes)

    @property
    def options(self) -> RunOptions:
        """Of the handler without a name; named ones begin with them."""
        return self.routes.get(None).options

    def configure(self, **options: Unpack[RunArguments]) -> None:
        """Change options; before handlers are registered."""
        changes: Mapping[str, Any] = options
        self.routes.set(None, None, replace(self.options, **changes))

    @overload
    def handler(self, handler: RunHandler, /) -> RunHandler: ...
    @overload
    def handler(
        self, name: str | None = None, /, **options: Unpack[HandlerOptions]
    ) -> Callable[[RunHandler], RunHandler]: ...
    def handler(self, handler: RunHandler | str | None = None, /, **options: Unpack[HandlerOptions]) -> Any:
        """Let this function do the work of runs; for decorating it.

        With a name it does the work of the runs that were submitted for that name (`submit(…, handler="report")`), in a
        queue of its own, `workflow-execution.report` unless `queue` says otherwise. `options` are those of
        `RunOptions`; what is not named is as the app's (`configure`), but for
        `concurrency`, 20, and `breaker`: a breaker counts the failures of one handler.
        """
        if callable(handler):
            return self._register(None, handler)
        name = handler
        self.declare(name, **options)

        def register(function: RunHandler) -> RunHandler:
            return self._register(name, function)

        return register

    def declare(self, name: str | None, **options: Unpack[HandlerOptions]) -> None:
        """Make a handler known that runs in another process, so that runs can be submitted for it here."""
        given: dict[str, Any] = {**options}
        queue = given.pop("queue", None)
        base = self.options if name is None else replace(self.options, breaker=None, concurrency=_NAMED_CONCURRENCY)
        self.routes.set(name, queue, replace(base, **given))

    def _register(self, name: str | None, function: RunHandler) -> RunHandler:
        self._processor(self.routes.get(name), function)  # refuses what it cannot call, here and not at the first run
        self._handlers[name] = function
        if self.on_handler is not None:
            self.on_handler(name)
        return function

    @property
    def processor(self) -> RunProcessor:
        """What the worker of the handler without a name calls for each job."""
        return self.processor_of(None)

    def processor_of(self, name: str | None) -> RunProcessor:
        """What the worker of a handler calls for each job."""
        route = self.routes.get(name)
        if name is not None and name not in self._handlers:
            raise NotConfigured(f"handler {name!r} of runs is only declared here; it runs in another process")
        return self._processor(route, self._handlers.get(name, placeholder))

    def _processor(self, route: RunRoute, function: RunHandler) -> RunProcessor:
        options = route.options
        return RunProcessor(
            self.ledger.transactions,
            function,
            name=route.name,
            queue=route.queue,
            policy=options.policy,
            providers=ProviderLimits(route.queue, options.providers),
            breaker=options.breaker,
            heartbeat_ms=options.heartbeat_ms,
            patience_ms=options.patience_ms,
            timeout_ms=None if options.timeout is None else to_ms("timeout", options.timeout),
            max_result_bytes=options.max_result_bytes,
        )

    def worker(self, handler: str | None = None, **further: Unpack[WorkerArguments]) -> RunWorker:
        """Something to run that takes the runs of a handler. `further` are other options of `Worker`."""
        route, processor = self.routes.get(handler), self.processor_of(handler)
        options, rpm = route.options, route.options.rate_limit_rpm
        arguments: WorkerArguments = {
            "policy": options.policy,
            "concurrency": options.own_concurrency,
            "lock": options.lock,
            "stalled_interval": options.stalled_interval,
            "limit": None if rpm is None else RateLimit(rpm, _MINUTE_MS),
            **further,
        }
        worker = Worker(
            route.queue.name, processor.process, connection=self._connection, prefix=self._prefix, **arguments
        )
        worker.on("failed", processor.on_failed)
        beside = partial(self._concurrency_beside, handler)
        return RunWorker(self.ledger, worker, Neighbours(self.ledger.transactions, route.queue), beside)

    def _concurrency_beside(self, name: str | None) -> int:
        """Runs at the same time of the other handlers of this process: they share the pool of connections."""
        return sum(most_of(self.routes.get(each).options.own_concurrency) for each in self._handlers if each != name)

    def maintenance(self) -> RunMaintenance:
        """A service that finds runs without a job and unrecorded failures. It must see all tenants."""
        if self.ledger.database.tenant_required:
            raise UnsafeDatabaseRole(
                "maintenance of runs covers all tenants: run it in a process with the service role"
            )
        return RunMaintenance(
            self.ledger,
            self.service,
            self.queue,
            idle_ms=self.options.idle_ms,
            every_ms=self.options.sweep_every_ms,
        )

    async def aclose(self) -> None:
        """Close the queues. Ledger and connection are closed by the caller that made them."""
        await self.routes.aclose()
        await self.dead_letter_queue.close()


class RunWorker(BaseService):
    """A worker that refuses to start where runs would not be safe."""

    def __init__(
        self, ledger: Ledger, worker: Worker, neighbours: Neighbours, beside: Callable[[], int] = lambda: 0
    ) -> None:
        super().__init__(f"worker of runs of {worker.queue_name!r}")
        self._ledger, self.worker, self._neighbours, self._beside = ledger, worker, neighbours, beside

    async def check(self) -> None:
        """Raise what keeps this process from running runs: tables, role, row-level security, size of the pool."""
        if self._ledger.roles is not None and self._ledger.duty != "worker":
            raise UnsafeDatabaseRole(
                "workers of runs see one tenant at a time and change its runs: give them the worker role "
                "(BULLPEN_DATABASE_DUTY=worker)"
            )
        if not self._ledger.database.is_postgres:
            await self._ledger.check()
            return
        concurrency = self.worker.options.most_concurrency + self._beside()
        needed, pool = connections_for(concurrency), self._ledger.database.pool_size
        if needed > pool:
            raise NotConfigured(
                f"{concurrency} runs at the same time need {needed} database connections, and the pool has {pool}: "
                "raise BULLPEN_DATABASE_POOL_SIZE or lower WORKER_CONCURRENCY"
            )
        await self._ledger.check(connections=needed)

    async def _begin(self) -> None:
        """Check, begin to take runs, and report another ledger on the same queue."""
        await to_its_end(self.check())
        await self.worker.start()
        await to_its_end(self._neighbours.look())

    async def _on_run(self, signals: bool | None) -> None:
        """On SIGTERM running ones may finish, within the lock's duration."""
        self._spawn(self.worker.run(signals=signals), is_all=True)

    async def _hurry(self) -> None:
        await self.worker.close(self._close_timeout)

    async def _end(self) -> None:
        await self.worker.close(self._close_timeout)


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


def ingestion_worker_options() -> WorkerArguments:
    """Options of `Worker` for that queue: lock 30 s, one at a time."""
    return {
        "policy": INGESTION.policy,
        "lock": INGESTION.lock_ms or 30_000,
        "concurrency": INGESTION.concurrency or 1,
    }
