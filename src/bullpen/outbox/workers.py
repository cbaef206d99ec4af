"""Deliver what the dispatcher queued: one worker per queue of the outbox.

A job says which row, and what it holds: that never changes. The row in the database is the truth about attempts and
whether it is to be delivered at all, so a batch of jobs asks for no more than that; the content is read again only for
a job that does not name the same event. The handler never raises a failed delivery to the queue: retries live in the
row. What it raises is that a row is unknown (no retry helps) or that the database does not answer (the job waits,
nothing is counted).

In: routes with a channel. Out: rows settled. Elsewhere: adding the jobs (`dispatcher`), one delivery (`delivery`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Hashable, Sequence
from datetime import timedelta
from functools import partial
from typing import Final, cast

from bullpen._kernel import telemetry
from bullpen._kernel.batches import Batches
from bullpen._kernel.duration import check_int
from bullpen._kernel.ending import end
from bullpen._kernel.ids import worker_name
from bullpen._kernel.lifecycle import Lifecycle
from bullpen._kernel.logs import get_logger
from bullpen._kernel.ticker import Ticker
from bullpen.delivery.gates import Gates
from bullpen.errors import DatabaseUnavailable, DelayJob, PermanentError, ServerRefused
from bullpen.ledger import OutboxRepository, OutboxRow
from bullpen.outbox._logs import log
from bullpen.outbox.delivery import Content, OutboxDeliveries
from bullpen.outbox.queues import OutboxQueues
from bullpen.outbox.routing import Route, Router, queue_name, read_queue_name
from bullpen.queue import Job
from bullpen.queue.browse import find_queues
from bullpen.wire.keys import DEFAULT_PREFIX
from bullpen.worker import Worker
from bullpen.worker.options import WorkerArguments

_log = get_logger("bullpen.outbox")

_SOURCE: Final = "outbox-worker"
DISCOVER_MS: Final = 5_000
_MOST_FOLLOWING: Final = 100
"""Rows of one ordering key that one job delivers, so that its handler ends now and then."""
_DATABASE_RETRY_MS: Final = 2_000


class DeliveryWorkers:
    """Runs until closed.

    Queues of routes that were registered by their whole name are served from the start; queues of patterns and of
    single tenants when a dispatcher announces them. Every `discover_ms` this looks for queues that nobody has
    announced, which is counted as a late wake-up. `by_tenant=True` is for a ledger with the tenant role: each
    transaction then names the tenant that the job names, and a row of another tenant is as good as unknown.
    """

    def __init__(
        self,
        store: OutboxRepository,
        router: Router,
        queues: OutboxQueues,
        *,
        gates: Gates | None = None,
        lease_ms: int = 60_000,
        by_tenant: bool = False,
        discover_ms: int = DISCOVER_MS,
        name: str | None = None,
        worker_options: WorkerArguments | None = None,
    ) -> None:
        self._store, self._router, self._queues = store, router, queues
        self._lease_ms = check_int("lease_ms", lease_ms, minimum=1)
        self._by_tenant = by_tenant
        self.name = name or worker_name()
        self._worker_options: WorkerArguments = worker_options or {}
        self._deliveries = OutboxDeliveries(store, worker_id=self.name, source=_SOURCE, lease_ms=lease_ms, gates=gates)
        self._begins: Batches[str, OutboxRow | None] = Batches(self._begin_batch)
        self._workers: dict[str, Worker] = {}
        self._announced: set[str] = set()
        self._suspects: set[str] = set()
        self._must_look = False
        self._is_closing = False
        self._is_settled = False
        """Whatever is new from now on is announced."""
        self._listening: asyncio.Task[None] | None = None
        self._discovery = Ticker("outbox queues", self._discover, every=discover_ms)
        self._life = Lifecycle("outbox workers", self._start_all, self._stop_all)
        self._ended = asyncio.Event()
        self._close_timeout: int | timedelta | None = None

    async def run(self, *, signals: bool | None = None) -> None:
        """Work until closed."""
        await self._life.start()
        await self._ended.wait()

    async def start(self) -> None:
        await self._life.start()

    async def close(self, timeout: int | timedelta | None = None) -> None:
        """Take no more, let running deliveries end, give unfinished jobs back. Safe to call twice."""
        self._is_closing = True
        self._close_timeout = timeout
        if timeout == 0:
            await asyncio.gather(*(worker.close(0) for worker in self._workers.values()))
        await self._life.stop()
        self._ended.set()

    @property
    def queues(self) -> list[str]:
        """Queues that are served now."""
        return sorted(self._workers)

    async def _start_all(self) -> None:
        for integration_type in self._router.exact_types():
            route = self._router.resolve(integration_type)
            if route is not None and not route.split_tenants:
                await self._serve(queue_name(integration_type), route)
        self._listening = asyncio.create_task(self._listen(), name="bullpen outbox queues")
        await self._discovery.start()

    async def _stop_all(self) -> None:
        if self._listening is not None:
            await end(self._listening)
        await self._discovery.stop()
        await asyncio.gather(*(worker.close(self._close_timeout) for worker in self._workers.values()))
        await self._deliveries.idle()
        self._ended.set()

    async def _listen(self) -> None:
        try:
            async with contextlib.aclosing(self._queues.announcements()) as announcements:
                async for names in announcements:
                    self._announced |= names
                    self._must_look = self._must_look or not names
                    self._is_settled = True
                    self._discovery.wake()
        except ServerRefused as error:
            self._is_settled = True
            _log.warning("announcements of new outbox queues cannot be read: %s; they are found by polling", error)

    async def _discover(self) -> None:
        is_fallback, names = self._discovery.is_fallback, set(self._announced)
        # What stood there before anybody could hear of it is nobody's lost announcement.
        is_suspicious = is_fallback and self._is_settled and not self._must_look
        if is_fallback:
            self._judge_suspects()
        if is_fallback or self._must_look:
            self._must_look = False
            names.update(await find_queues(self._queues.connection, self._queues.prefix or DEFAULT_PREFIX))
        for name in sorted(names):
            read = read_queue_name(name)
            route = None if read is None else self._router.resolve(read[0])
            if route is not None and await self._serve(name, route) and is_suspicious:
                self._suspects.add(name)

    def _judge_suspects(self) -> None:
        """Queues that the last look found: unless they were announced since, nobody would have told us."""
        for name in self._suspects - self._announced:
            telemetry.late_wakeup("deliveries", queue=name)
        self._suspects.clear()

    async def _serve(self, name: str, route: Route) -> bool:
        """True: it was not served before."""
        if name in self._workers or route.channel is None or route.is_direct:
            return False
        arguments: WorkerArguments = {
            "concurrency": route.concurrency,
            "limit": route.rate_limit,
            "name": self.name,
            **self._worker_options,
        }
        queues, handler = self._queues, partial(self._handle, route, name)
        worker = Worker(name, handler, connection=queues.connection, prefix=queues.prefix, **arguments)
        # Known only once it works: one that could not begin is tried again when its queue is found the next time.
        await worker.start()
        self._workers[name] = worker
        return True

    async def _handle(self, route: Route, queue: str, job: Job) -> dict[str, str]:
        row_id, tenant_id = _read(job)
        scope = tenant_id if self._by_tenant else None
        until = time.monotonic() + self._lease_ms / 1000
        content = _content(job)
        try:
            row = await self._begins.submit(row_id, (scope, content is not None))
            if row is None:
                return {"outcome": await self._explain(row_id, scope)}
            if content is not None and not _names(job, row):
                content, row = None, await self._with_content(row, scope)
        except DatabaseUnavailable as error:
            raise DelayJob(_DATABASE_RETRY_MS, "the database does not answer") from error
        telemetry.emit("outbox.begun", outbox_id=row.id, integration_type=row.integration_type)
        # The rest of an ordering key comes along, unless each job counts for a limit per time.
        goes_on = partial(self._goes_on, queue) if route.rate_limit is None else None
        settled = await self._deliveries.deliver(
            row, route, until=until, tenant_id=scope, content=content, goes_on=goes_on
        )
        return {"outcome": "UNKNOWN" if settled is None else str(settled.status or "LATE")}

    async def _goes_on(self, queue: str, sent: int) -> bool:
        """Only while no job waits: lines of one tenant would keep all places from the jobs of the others."""
        return sent <= _MOST_FOLLOWING and not self._is_closing and await self._queues.room(queue, 1) > 0

    async def _begin_batch(self, key: Hashable, ids: Sequence[str]) -> Sequence[OutboxRow | None]:
        tenant_id, has_content = cast("tuple[str | None, bool]", key)
        begun = await self._store.begin(
            set(ids), worker_id=self.name, lease_ms=self._lease_ms, tenant_id=tenant_id, content=not has_content
        )
        # Taken out: should one row have come twice, only one of the two may deliver it.
        return [begun.pop(row_id, None) for row_id in ids]

    async def _with_content(self, row: OutboxRow, tenant_id: str | None) -> OutboxRow:
        stored = await self._store.get(row.id, tenant_id=tenant_id)
        assert stored is not None  # begun a moment ago, and nobody removes a claimed row
        return row._replace(payload_json=stored.payload_json, headers_json=stored.headers_json)

    async def _explain(self, row_id: str, tenant_id: str | None) -> str:
        """Why a row is not to be delivered now. Raises PermanentError for one that does not exist."""
        status = (await self._store.statuses([row_id], tenant_id=tenant_id)).get(row_id)
        if status is None:
            log("OUTBOX_DELIVER", "ERROR", source=_SOURCE, level=logging.ERROR, outboxId=row_id, error="UNKNOWN_ROW")
            raise PermanentError(
                f"outbox row {row_id} does not exist, or its tenant differs from the tenant of the job"
            )
        return f"SKIPPED_{status.value}"


def _read(job: Job) -> tuple[str, str | None]:
    data = job.data
    row_id = data.get("outboxId") if isinstance(data, dict) else None
    if not isinstance(row_id, str):
        raise PermanentError("the job names no outbox row; its data needs `outboxId`")
    tenant = data.get("tenantId")
    return row_id, tenant if isinstance(tenant, str) else None


def _content(job: Job) -> Content | None:
    """What the job says that the row holds; None: nothing that could be sent."""
    data = job.data
    if not isinstance(data, dict) or "payload" not in data or not isinstance(data.get("headers"), dict):
        return None
    return Content(data["payload"], data["headers"])


def _names(job: Job, row: OutboxRow) -> bool:
    """Whether the job was made of this row, as far as can be seen."""
    data = job.data
    return (data.get("sourceEventId"), data.get("eventType")) == (row.source_event_id, row.event_type)
