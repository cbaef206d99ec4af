"""State machines driven by events, whatever brings the events.

Everything that a program needs to define a workflow is here. `SqlEntities` needs the extra `postgres` or `sqlite`, and
is loaded when it is first named.
"""

from typing import TYPE_CHECKING

from bullpen._kernel.lazy import lazy
from bullpen._kernel.rates import RateLimit
from bullpen.errors import (
    EmitsToItself,
    EndlessSteps,
    EntityBusy,
    EntityChanged,
    EntityFailed,
    EntityNotFound,
    NoTransition,
    UnknownEvent,
)
from bullpen.ports.bindings import (
    AnyEvent,
    AnyTransport,
    BullMQ,
    BullMQEvent,
    DeadLetterQueue,
    DefaultJobOptions,
    Kafka,
    KafkaEvent,
    RabbitMQ,
    RabbitMQEvent,
    RedisAddress,
)
from bullpen.ports.entity import Entities, EntityStore
from bullpen.ports.transport import Receipt
from bullpen.workflow.actions import on_event, on_status_changed
from bullpen.workflow.batch import Batch
from bullpen.workflow.context import step
from bullpen.workflow.definition import Definition, InlineEntities, States, Transition
from bullpen.workflow.locks import RedisLocks
from bullpen.workflow.service import Workflow
from bullpen.workflow.stores import RedisEntities

if TYPE_CHECKING:
    from bullpen.ledger.entities import SqlEntities

__all__ = [
    "AnyEvent",
    "AnyTransport",
    "Batch",
    "BullMQ",
    "BullMQEvent",
    "DeadLetterQueue",
    "DefaultJobOptions",
    "Definition",
    "EmitsToItself",
    "EndlessSteps",
    "Entities",
    "EntityBusy",
    "EntityChanged",
    "EntityFailed",
    "EntityNotFound",
    "EntityStore",
    "InlineEntities",
    "Kafka",
    "KafkaEvent",
    "NoTransition",
    "RabbitMQ",
    "RabbitMQEvent",
    "RateLimit",
    "Receipt",
    "RedisAddress",
    "RedisEntities",
    "RedisLocks",
    "SqlEntities",
    "States",
    "Transition",
    "UnknownEvent",
    "Workflow",
    "on_event",
    "on_status_changed",
    "step",
]

# Hidden from type checkers, which would otherwise believe that every name exists.
if not TYPE_CHECKING:
    __getattr__ = lazy(__name__, {"bullpen.ledger.entities": ("SqlEntities",)})
