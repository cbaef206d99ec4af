"""The outbox as a program holds it: store a message in a transaction, have it delivered afterwards.

In: a ledger, routes, a Redis connection for the queued strategy and for jobs. Out: `enqueue` for the business
transaction, `dispatcher` and `workers` for the processes that deliver. Elsewhere: each of these parts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final, Unpack

from bullpen.delivery.gates import Gates
from bullpen.errors import NotConfigured, require
from bullpen.ledger import Enqueued, Enqueuer, Ledger, OutboxFields, OutboxItem, OutboxStatus
from bullpen.outbox.dead_letters import OutboxDeadLetters
from bullpen.outbox.dispatcher import Dispatcher, DispatcherOptions
from bullpen.outbox.enqueue import (
    JOB_CHANNEL,
    PublishedEvent,
    PublishFields,
    make_item,
    make_job_item,
    make_test_message,
)
from bullpen.outbox.metrics import OutboxMetrics
from bullpen.outbox.queues import OutboxQueues
from bullpen.outbox.replay import ReplayArguments, replay
from bullpen.outbox.routing import Route, RouteArguments, Router, queue_name
from bullpen.outbox.workers import DISCOVER_MS, DeliveryWorkers
from bullpen.ports.answers import answer_of
from bullpen.ports.channel import Channel, SendResult, Unknown
from bullpen.queue import Durability, Queue
from bullpen.queue.arguments import AddInTransactionArguments, RowArguments
from bullpen.redis import Connection
from bullpen.worker.options import WorkerArguments

JOBS: Final = f"{JOB_CHANNEL}:*"


@dataclass(frozen=True, slots=True)
class OutboxReceipt:
    """What became of one message."""

    id: str
    status: OutboxStatus
    attempts: int
    """Failed ones."""
    sent_at: datetime | None
    receipt: str | None
    """What the target answered: an id of the provider, a partition and offset."""
    error_code: str | None
    last_error: str | None


class Outbox:
    """Messages that leave if and only if the transaction commits.

        outbox = Outbox(ledger, {"webhook:partnerX": Webhook("https://…", secret="whsec_…")}, connection=connection)

        async with session.begin():
            session.add(order)
            await outbox.enqueue(session, integration_type="webhook:partnerX", event_type="order.paid.v1", payload=…)
            await outbox.add_in_transaction(session, "emails", "receipt", {"order": order.id}, attempts=5)

    Storing needs neither ledger nor routes nor Redis, only the caller's connection: `Outbox()` is enough there. A
    channel without a `Route` around it is queued where there is a connection, else direct; jobs (`bullmq:*`) are always
    direct.
    """

    def __init__(
        self,
        ledger: Ledger | None = None,
        routes: Mapping[str, Channel | Route] | None = None,
        *,
        connection: Connection | None = None,
        prefix: str | None = None,
        enqueuer: Enqueuer | None = None,
        options: DispatcherOptions | None = None,
    ) -> None:
        self._ledger = ledger
        self._enqueuer = enqueuer or (ledger.enqueuer if ledger is not None else Enqueuer())
        self._queues = None if connection is None else OutboxQueues(connection, prefix=prefix)
        self._metrics: OutboxMetrics | None = None
        self._gates = None if ledger is None else Gates(ledger.destinations)
        self.options = options or DispatcherOptions()
        self.router = Router({name: self._as_route(name, given) for name, given in (routes or {}).items()})

    def _as_route(self, name: str, given: Channel | Route) -> Route:
        route = given if isinstance(given, Route) else Route(channel=given)
        if route.strategy is not None:
            return route
        is_job = name.partition(":")[0] == JOB_CHANNEL
        if route.channel is None or not (is_job or self._queues is None):
            return replace(route, strategy="queued")
        return replace(route, strategy="direct", split_tenants=False, rate_limit=None)

    # ---- storing ------------------------------------------------------------------------------------------------

    async def enqueue(
        self,
        connection: Any,
        *,
        integration_type: str,
        event_type: str,
        payload: Any = None,
        **fields: Unpack[OutboxFields],
    ) -> Enqueued:
        """Store a message in the caller's open transaction; see `OutboxItem` for further fields.

        `connection` is an AsyncSession or AsyncConnection of SQLAlchemy, or a connection of psycopg, asyncpg or
        aiosqlite. With `source_stream_id` and `source_event_id` a repeated call is a duplicate: `created` is False,
        nothing is stored.
        """
        item = make_item(integration_type=integration_type, event_type=event_type, payload=payload, **fields)
        return await self._enqueuer.enqueue(connection, item)

    async def enqueue_many(self, connection: Any, items: Iterable[OutboxItem]) -> list[Enqueued]:
        """Store many messages with one statement."""
        return await self._enqueuer.enqueue_many(connection, items)

    def enqueue_sync(
        self,
        connection: Any,
        *,
        integration_type: str,
        event_type: str,
        payload: Any = None,
        **fields: Unpack[OutboxFields],
    ) -> Enqueued:
        """As `enqueue`, for a Session, a Connection, a blocking driver's connection, or Django's."""
        item = make_item(integration_type=integration_type, event_type=event_type, payload=payload, **fields)
        return self._enqueuer.enqueue_sync(connection, item)

    def enqueue_many_sync(self, connection: Any, items: Iterable[OutboxItem]) -> list[Enqueued]:
        """As `enqueue_many`, for blocking connections."""
        return self._enqueuer.enqueue_many_sync(connection, items)

    async def publish(
        self, connection: Any, *, tenant_id: str, event_type: str, payload: Any = None, **fields: Unpack[PublishFields]
    ) -> list[Enqueued]:
        """Store a message for each endpoint of the tenant that wants this event, in the caller's open transaction.

        With `event_id` a repeated call stores nothing again: a message has the key `<event id>/<route key>`, for each
        endpoint another one. Endpoints are made and changed by `Endpoints`.
        """
        event = PublishedEvent(tenant_id, event_type, payload, fields, is_strict=self._enqueuer.is_strict)
        wanting = await self._enqueuer.endpoints_of(connection, tenant_id, event_type)
        return await self._enqueuer.enqueue_many(connection, map(event.item_for, wanting))

    def publish_sync(
        self, connection: Any, *, tenant_id: str, event_type: str, payload: Any = None, **fields: Unpack[PublishFields]
    ) -> list[Enqueued]:
        """As `publish`, for blocking connections."""
        event = PublishedEvent(tenant_id, event_type, payload, fields, is_strict=self._enqueuer.is_strict)
        wanting = self._enqueuer.endpoints_of_sync(connection, tenant_id, event_type)
        return self._enqueuer.enqueue_many_sync(connection, map(event.item_for, wanting))

    async def add_in_transaction(
        self,
        connection: Any,
        queue: str | Queue,
        name: str,
        data: Any = None,
        **options: Unpack[AddInTransactionArguments],
    ) -> Enqueued:
        """Add a job to a queue if and only if the caller's transaction commits.

        Takes the options of `Queue.add`, `durability` and `replace_finished` among them, and `tenant_id`, `user_id`,
        `correlation_id`, `ordering_key`, `source_stream_id`, `source_event_id`. Everything is checked now. The job's id
        is `job_id`, else the id that is returned.
        """
        return await self._enqueuer.enqueue(connection, _job_item(queue, name, data, options))

    def add_in_transaction_sync(
        self,
        connection: Any,
        queue: str | Queue,
        name: str,
        data: Any = None,
        **options: Unpack[AddInTransactionArguments],
    ) -> Enqueued:
        """As `add_in_transaction`, for blocking connections."""
        return self._enqueuer.enqueue_sync(connection, _job_item(queue, name, data, options))

    # ---- delivering ---------------------------------------------------------------------------------------------

    @property
    def has_queues(self) -> bool:
        """Whether it has a Redis connection, which the queued strategy needs."""
        return self._queues is not None

    def route(self, pattern: str, channel: Channel | Route, **options: Unpack[RouteArguments]) -> None:
        """Say how an integration type, or all of a channel (`webhook:*`), leaves. Before anything runs.

        `options` are those of `Route`, such as `concurrency=5`.
        """
        if isinstance(channel, Route):
            require("options", not options, "no other arguments with a Route", options)
            given = channel
        else:
            given = Route(channel=channel, **options)
        self.router.add(pattern, self._as_route(pattern, given))

    @property
    def metrics(self) -> OutboxMetrics:
        """What this process counts; it begins with the first look."""
        if self._metrics is None:
            self._metrics = OutboxMetrics(self.ledger.outbox, types=self.router.exact_types)
        return self._metrics

    @property
    def ledger(self) -> Ledger:
        """Where the rows are. Raises NotConfigured for an outbox that only stores."""
        if self._ledger is None:
            raise NotConfigured("this outbox has no ledger: it can only store messages")
        return self._ledger

    @property
    def dead_letters(self) -> OutboxDeadLetters:
        """Rows that failed finally."""
        return OutboxDeadLetters(self.ledger.outbox)

    def dispatcher(self, *, name: str | None = None) -> Dispatcher:
        """Something to run that claims rows and sees that they leave. Any number may run."""
        self._require_tags()
        return Dispatcher(
            self.ledger.outbox,
            self.router,
            queues=self._queues,
            gates=self._gates,
            limits=self.ledger.tenant_limits,
            options=self.options,
            commits=self.ledger.commits,
            is_notified=self.ledger.enqueuer.notify and self.ledger.database.is_postgres,
            name=name,
        )

    def workers(
        self,
        *,
        name: str | None = None,
        lease_ms: int | None = None,
        by_tenant: bool | None = None,
        discover_ms: int = DISCOVER_MS,
        worker_options: WorkerArguments | None = None,
    ) -> DeliveryWorkers:
        """Something to run that delivers what dispatchers queued; see `DeliveryWorkers`. Lease and role are those of
        the outbox and its ledger unless given."""
        if self._queues is None:
            raise NotConfigured("delivery workers need a Redis connection: Outbox(…, connection=…)")
        self._require_tags()
        return DeliveryWorkers(
            self.ledger.outbox,
            self.router,
            self._queues,
            gates=self._gates,
            lease_ms=self.options.lease_ms if lease_ms is None else lease_ms,
            by_tenant=self.ledger.database.tenant_required if by_tenant is None else by_tenant,
            discover_ms=discover_ms,
            name=name,
            worker_options=worker_options,
        )

    def _require_tags(self) -> None:
        """On a cluster a queue without a tag takes nothing: rows would wait for ever, and deaths be told nobody."""
        if self._queues is None:
            return
        for pattern, route in self.router.items():
            if route.channel is not None and not route.is_direct:
                name = queue_name(pattern.replace(":*", ":any"))
                self._queues.require_tag(name, 'or strategy="direct" for each route, since the outbox names its queues')
        dead_type = None if self._ledger is None else self._ledger.dead_letter_type
        channel, _, name = (dead_type or "").partition(":")
        if dead_type is not None and channel == JOB_CHANNEL and self.router.resolve(dead_type) is not None:
            self._queues.require_tag(name, "or braces in the queue name for announcements of dead rows: {outbox}.dead")

    async def send_test(
        self, integration_type: str, payload: Any = None, *, tenant_id: str | None = None
    ) -> SendResult:
        """Send one message to a destination now, past the database: nothing is stored, counted or tried again.

        It says so itself: its event type is `bullpen.test.v1`, and no other message has its key. A destination that is
        switched off gets it, too: that is when one wants to know.
        """
        route = self.router.resolve(integration_type)
        if route is None or route.channel is None:
            raise NotConfigured(f"no channel serves {integration_type!r} here; register one with route()")
        message = make_test_message(integration_type, payload, tenant_id)
        limit_ms = route.limit_ms(self.options.lease_ms)
        try:
            async with asyncio.timeout(limit_ms / 1000):
                return answer_of(await route.channel.send(message))
        except TimeoutError:
            return Unknown(f"no answer within {limit_ms} ms", "TIMEOUT")

    async def replay(self, integration_type: str, *, by: str, label: str, **options: Unpack[ReplayArguments]) -> int:
        """Send again what was sent to a destination in a period; see `bullpen.outbox.replay`. Returns how many."""
        return await replay(self.ledger.outbox, integration_type=integration_type, by=by, label=label, **options)

    async def receipt(self, row_id: str, *, tenant_id: str | None = None) -> OutboxReceipt | None:
        """What became of a message so far; None when it is not known (any more)."""
        row = await self.ledger.outbox.get(row_id, tenant_id=tenant_id)
        if row is None:
            return None
        attempts = await self.ledger.outbox.attempts_of(row_id, tenant_id=tenant_id)
        told = next((attempt.receipt for attempt in reversed(attempts) if attempt.receipt), None)
        return OutboxReceipt(row.id, row.status, row.attempts, row.sent_at, told, row.error_code, row.last_error)

    async def check(self) -> None:
        """Refuse to start on a ledger that is not ready or not safe; see `Ledger.check`."""
        await self.ledger.check(connections=2)

    async def aclose(self) -> None:
        """Close channels and queues. The ledger and the connection belong to whoever made them."""
        channels = {id(route.channel): route.channel for _, route in self.router.items() if route.channel is not None}
        for channel in channels.values():
            await channel.aclose()
        if self._queues is not None:
            await self._queues.aclose()
        if self._metrics is not None:
            self._metrics.close()


_ROW_FIELDS: Final = frozenset(RowArguments.__annotations__)


def _job_item(queue: str | Queue, name: str, data: Any, given: Mapping[str, Any]) -> OutboxItem:
    options = {key: value for key, value in given.items() if key not in _ROW_FIELDS}
    if options.get("durability") is not None:
        options["durability"] = str(Durability.read(options["durability"]))
    fields = {key: value for key, value in given.items() if key in _ROW_FIELDS}
    return make_job_item(queue.name if isinstance(queue, Queue) else queue, name, data, options=options, **fields)
