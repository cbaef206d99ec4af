"""Messages and jobs that leave if and only if a transaction commits. Needs the extra `postgres` or `sqlite`."""

from bullpen.delivery.gates import Breaker
from bullpen.ledger import (
    EndpointAttempt,
    EndpointRate,
    EndpointState,
    Enqueued,
    Ledger,
    OutboxFields,
    OutboxItem,
    OutboxRepository,
    OutboxRow,
    OutboxStatus,
)
from bullpen.outbox.backfill import Backfilled
from bullpen.outbox.dead_letters import OutboxDeadLetters
from bullpen.outbox.delivery import DEFAULT_BACKOFF
from bullpen.outbox.dispatcher import Dispatcher, DispatcherOptions
from bullpen.outbox.endpoints import Endpoint, EndpointOptions, Endpoints, NewSecret
from bullpen.outbox.enqueue import PublishFields
from bullpen.outbox.mapping import EventRoute, EventRoutes, IntegrationMessage, items_of
from bullpen.outbox.metrics import OutboxMetrics
from bullpen.outbox.outbox import Outbox, OutboxReceipt
from bullpen.outbox.projection import Projected, ProjectorOptions
from bullpen.outbox.projector import Projector, ProjectorStatus
from bullpen.outbox.projector_metrics import ProjectorMetrics
from bullpen.outbox.routing import Route, RouteArguments, Router, queue_name, read_queue_name
from bullpen.outbox.workers import DeliveryWorkers

__all__ = [
    "DEFAULT_BACKOFF",
    "Backfilled",
    "Breaker",
    "DeliveryWorkers",
    "Dispatcher",
    "DispatcherOptions",
    "Endpoint",
    "EndpointAttempt",
    "EndpointOptions",
    "EndpointRate",
    "EndpointState",
    "Endpoints",
    "Enqueued",
    "EventRoute",
    "EventRoutes",
    "IntegrationMessage",
    "Ledger",
    "NewSecret",
    "Outbox",
    "OutboxDeadLetters",
    "OutboxFields",
    "OutboxItem",
    "OutboxMetrics",
    "OutboxReceipt",
    "OutboxRepository",
    "OutboxRow",
    "OutboxStatus",
    "Projected",
    "Projector",
    "ProjectorMetrics",
    "ProjectorOptions",
    "ProjectorStatus",
    "PublishFields",
    "Route",
    "RouteArguments",
    "Router",
    "items_of",
    "queue_name",
    "read_queue_name",
]
