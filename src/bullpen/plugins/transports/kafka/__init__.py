"""Kafka: records keyed by urn, offsets as acknowledgement, failures counted in commits, dead letters in a topic."""

from bullpen.plugins.transports.kafka.client import KafkaClient
from bullpen.plugins.transports.kafka.transport import KafkaTransport

__all__ = ["KafkaClient", "KafkaTransport"]
