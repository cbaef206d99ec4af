"""State machines driven by events, whatever brings the events.

Everything that a program needs to define a workflow is here. Entities in SQL: `bullpen.ledger.entities`.
"""

from bullpen._kernel.rates import RateLimit
from bullpen.ports.bindings import (
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
    SourceEvent,
)
from bullpen.ports.entity import Entities, EntityBusy, EntityChanged, EntityNotFound, EntityStore
from bullpen.ports.transport import Receipt
from bullpen.workflow.actions import on_event, on_status_changed
from bullpen.workflow.batch import Batch
from bullpen.workflow.context import step
from bullpen.workflow.definition import Definition, InlineEntities, States, Transition
from bullpen.workflow.engine import EntityFailed, UnknownEvent
from bullpen.workflow.locks import EmitsToItself, RedisLocks
from bullpen.workflow.machine import EndlessSteps, NoTransition
from bullpen.workflow.service import Workflow
from bullpen.workflow.stores import RedisEntities

__all__ = [
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
    "SourceEvent",
    "States",
    "Transition",
    "UnknownEvent",
    "Workflow",
    "on_event",
    "on_status_changed",
    "step",
]
