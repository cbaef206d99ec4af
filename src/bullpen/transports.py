"""Messaging clients for BullMQ, RabbitMQ, Kafka and memory, and what a transport of one's own needs.

    from bullpen.transports import RabbitMQClient

Each client is loaded when it is first named, and with it its driver (the extras `rabbitmq` and `kafka`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bullpen._kernel.lazy import lazy

if TYPE_CHECKING:
    from bullpen.plugins.messaging import ClientArguments, MessagingClient
    from bullpen.plugins.metrics import MessagingMetrics
    from bullpen.plugins.transports import available, load
    from bullpen.plugins.transports.bullmq import BullMQClient, BullMQTransport
    from bullpen.plugins.transports.kafka import KafkaClient, KafkaTransport
    from bullpen.plugins.transports.memory import MemoryBroker, MemoryClient, MemoryTransport
    from bullpen.plugins.transports.rabbitmq import DelayLadder, QueueSpec, RabbitMQClient, RabbitMQTransport, Topology
    from bullpen.ports.messaging import (
        Consumer,
        EventData,
        Handler,
        Messaging,
        Outgoing,
        ProduceArguments,
        ProduceManyArguments,
    )
    from bullpen.ports.transport import (
        KEY_HEADER,
        Deliveries,
        Delivery,
        Depth,
        Event,
        Features,
        Published,
        PublishesMany,
        Receipt,
        Settled,
        Transport,
        TransportHealth,
        Tries,
    )

__all__ = [
    "KEY_HEADER",
    "BullMQClient",
    "BullMQTransport",
    "ClientArguments",
    "Consumer",
    "DelayLadder",
    "Deliveries",
    "Delivery",
    "Depth",
    "Event",
    "EventData",
    "Features",
    "Handler",
    "KafkaClient",
    "KafkaTransport",
    "MemoryBroker",
    "MemoryClient",
    "MemoryTransport",
    "Messaging",
    "MessagingClient",
    "MessagingMetrics",
    "Outgoing",
    "ProduceArguments",
    "ProduceManyArguments",
    "Published",
    "PublishesMany",
    "QueueSpec",
    "RabbitMQClient",
    "RabbitMQTransport",
    "Receipt",
    "Settled",
    "Topology",
    "Transport",
    "TransportHealth",
    "Tries",
    "available",
    "load",
]

_HOMES: Final = {
    "bullpen.plugins.messaging": ("ClientArguments", "MessagingClient"),
    "bullpen.plugins.metrics": ("MessagingMetrics",),
    "bullpen.plugins.transports": ("available", "load"),
    "bullpen.plugins.transports.bullmq": ("BullMQClient", "BullMQTransport"),
    "bullpen.plugins.transports.kafka": ("KafkaClient", "KafkaTransport"),
    "bullpen.plugins.transports.memory": ("MemoryBroker", "MemoryClient", "MemoryTransport"),
    "bullpen.plugins.transports.rabbitmq": (
        *("DelayLadder", "QueueSpec", "RabbitMQClient", "RabbitMQTransport", "Topology"),
    ),
    "bullpen.ports.messaging": (
        *("Consumer", "EventData", "Handler", "Messaging", "Outgoing", "ProduceArguments", "ProduceManyArguments"),
    ),
    "bullpen.ports.transport": (
        *("Deliveries", "Delivery", "Depth", "Event", "Features", "KEY_HEADER", "Published", "PublishesMany"),
        *("Receipt", "Settled", "Transport", "TransportHealth", "Tries"),
    ),
}

# Hidden from type checkers, which would otherwise believe that every name exists.
if not TYPE_CHECKING:
    __getattr__ = lazy(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
