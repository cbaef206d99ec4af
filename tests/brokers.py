"""Brokers that several suites share, started once per session when the first test asks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bullpen.testing.kafka import MockKafka, need_kafka
from bullpen.testing.rabbitmq import RabbitServer, need_rabbitmq


@pytest.fixture(scope="session")
def rabbit() -> Iterator[RabbitServer]:
    """One RabbitMQ node."""
    need_rabbitmq()
    with RabbitServer.start() as server:
        yield server


@pytest.fixture(scope="session")
def rabbit_cluster() -> Iterator[RabbitServer]:
    """Three RabbitMQ nodes on loopback."""
    need_rabbitmq()
    with RabbitServer.start(3) as server:
        yield server


@pytest.fixture(scope="session")
def kafka() -> Iterator[MockKafka]:
    """Three Kafka brokers, played by librdkafka."""
    need_kafka()
    with MockKafka.start() as cluster:
        yield cluster
