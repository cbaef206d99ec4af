"""Messages and jobs that leave if and only if a transaction commits. Needs the extra `postgres` or `sqlite`."""

from bullpen.outbox.backfill import Backfilled
from bullpen.outbox.dead_letters import OutboxDeadLetters
from bullpen.outbox.dispatcher import Dispatcher, DispatcherOptions
from bullpen.outbox.gates import Breaker
from bullpen.outbox.mapping import EventRoute, EventRoutes, IntegrationMessage
from bullpen.outbox.metrics import OutboxMetrics
from bullpen.outbox.outbox import Outbox, Receipt
from bullpen.outbox.projection import Projected, ProjectorOptions
from bullpen.outbox.projector import Projector, ProjectorStatus
from bullpen.outbox.projector_metrics import ProjectorMetrics
from bullpen.outbox.routing import Route, Router, queue_name, read_queue_name
from bullpen.outbox.workers import DeliveryWorkers

__all__ = [
    "Backfilled",
    "Breaker",
    "DeliveryWorkers",
    "Dispatcher",
    "DispatcherOptions",
    "EventRoute",
    "EventRoutes",
    "IntegrationMessage",
    "Outbox",
    "OutboxDeadLetters",
    "OutboxMetrics",
    "Projected",
    "Projector",
    "ProjectorMetrics",
    "ProjectorOptions",
    "ProjectorStatus",
    "Receipt",
    "Route",
    "Router",
    "queue_name",
    "read_queue_name",
]
