"""Brokers that several suites share, started once per session when the first test asks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bullpen.testing.kafka import MockKafka, need_kafka
from bullpen.testing.rabbitmq import RabbitServer, need_rabbitmq
from tests.kafka_server import KafkaServer, guarded, need_real_kafka, self_signed


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


@pytest.fixture(scope="session")
def kafka_certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the listener of `real_kafka` that speaks TLS; it is its own authority."""
    return self_signed(tmp_path_factory.mktemp("kafka"))


@pytest.fixture(scope="session")
def real_kafka(kafka_certificate: Path) -> Iterator[KafkaServer]:
    """One broker of Apache Kafka itself. Its guarded listener lets in who knows Ann's password, over TLS."""
    need_real_kafka()
    with KafkaServer.start(settings=guarded(kafka_certificate, {"ann": "open sesame"})) as server:
        yield server


@pytest.fixture(scope="session")
def real_kafka_cluster() -> Iterator[KafkaServer]:
    """Three brokers of Apache Kafka; an acknowledged record is on two of them at least."""
    need_real_kafka()
    with KafkaServer.start(3) as server:
        yield server
