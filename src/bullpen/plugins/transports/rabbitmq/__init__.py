"""RabbitMQ: quorum queues, confirmed publishes, a ladder of delay queues, fail-over between nodes."""

from bullpen.plugins.transports.rabbitmq.client import RabbitMQClient
from bullpen.plugins.transports.rabbitmq.topology import DelayLadder, QueueSpec, Topology
from bullpen.plugins.transports.rabbitmq.transport import RabbitMQTransport

__all__ = ["DelayLadder", "QueueSpec", "RabbitMQClient", "RabbitMQTransport", "Topology"]
