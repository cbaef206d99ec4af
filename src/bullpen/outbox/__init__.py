"""Messages and jobs that leave if and only if a transaction commits. Needs the extra `postgres` or `sqlite`."""

from bullpen.outbox.dead_letters import OutboxDeadLetters
from bullpen.outbox.dispatcher import Dispatcher, DispatcherOptions
from bullpen.outbox.metrics import OutboxMetrics
from bullpen.outbox.outbox import Outbox
from bullpen.outbox.routing import Route, Router, queue_name, read_queue_name
from bullpen.outbox.workers import DeliveryWorkers

__all__ = [
    "DeliveryWorkers",
    "Dispatcher",
    "DispatcherOptions",
    "Outbox",
    "OutboxDeadLetters",
    "OutboxMetrics",
    "Route",
    "Router",
    "queue_name",
    "read_queue_name",
]
