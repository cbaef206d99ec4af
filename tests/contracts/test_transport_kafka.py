"""The Kafka transport passes the suite of all transports, on librdkafka's mock brokers and on Apache Kafka itself."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

import pytest

from bullpen._kernel.policy import DeadLetterPolicy
from bullpen.plugins._kafka import Brokers, KafkaDoor
from bullpen.plugins.transports.kafka import KafkaTransport
from bullpen.testing.contracts.dead_letters import DeadLetterContract, TransportLetters
from bullpen.testing.contracts.transport import TransportContract, TransportHarness, die_holding_one
from bullpen.testing.kafka import MockKafka
from tests.kafka_server import KafkaServer

SESSION_MS = 2_000
"""The mock waits for nearly as long as this before it lets somebody new into a group that has changed."""


def transport_of(address: str, group: str, retry: Literal["pause", "park"] = "pause") -> KafkaTransport:
    return KafkaTransport(address, group=group, retry=retry, retry_topics=2, session_timeout=SESSION_MS)


class KafkaHarness:
    """A group and topics of its own for each test."""

    shortest_pause_ms = 1
    retry: Literal["pause", "park"] = "pause"
    session_ms = SESSION_MS

    def __init__(self, cluster: MockKafka | KafkaServer) -> None:
        self.cluster, self.address = cluster, cluster.address
        self.group = f"g-{uuid.uuid4().hex[:8]}"

    def make(self, *, dead_letters: DeadLetterPolicy | None = None) -> KafkaTransport:
        return KafkaTransport(
            self.address,
            group=self.group,
            dead_letters=dead_letters,
            retry=self.retry,
            retry_topics=2,
            session_timeout=self.session_ms,
        )

    async def source(self) -> str:
        name = f"t-{uuid.uuid4().hex[:8]}"
        for topic in (name, f"{name}-dlq", f"{name}-retry-1", f"{name}-retry-2"):
            self.cluster.create_topic(topic, partitions=2)
        return name

    async def die_holding_one(self, source: str, *, failures: int = 0) -> tuple[str, int]:
        arguments = {"address": self.address, "group": self.group, "retry": self.retry}
        return await die_holding_one(f"{__name__}:transport_of", arguments, source, failures=failures)

    async def put_garbage(self, source: str) -> None:
        door = KafkaDoor(Brokers.parse(self.address))
        await door.send(source, key=b"urn:order:1", value=b"\xffno json")
        await door.aclose()

    @asynccontextmanager
    async def outage(self) -> AsyncIterator[None]:
        with self.cluster.down():
            yield


class ParkingHarness(KafkaHarness):
    retry = "park"


class TestKafka(TransportContract):
    """The partition of a failed record waits for it."""

    @pytest.fixture
    async def harness(self, kafka: MockKafka) -> TransportHarness:
        return KafkaHarness(kafka)


class TestKafkaParking(TransportContract):
    """A failed record waits on a topic of its own."""

    @pytest.fixture
    async def harness(self, kafka: MockKafka) -> TransportHarness:
        return ParkingHarness(kafka)


class TestKafkaDeadLetters(DeadLetterContract):
    @pytest.fixture
    async def letters(self, kafka: MockKafka) -> AsyncIterator[TransportLetters]:
        harness = KafkaHarness(kafka)
        transport, source = harness.make(dead_letters=DeadLetterPolicy(store="queue")), await harness.source()
        yield TransportLetters(transport, source, await transport.deliveries(source, prefetch=1))
        await transport.aclose()


class TestRealKafka(TransportContract):
    """The same on Apache Kafka itself, one broker."""

    @pytest.fixture
    async def harness(self, real_kafka: KafkaServer) -> TransportHarness:
        return KafkaHarness(real_kafka)


@pytest.mark.long
class TestRealKafkaParking(TransportContract):
    @pytest.fixture
    async def harness(self, real_kafka: KafkaServer) -> TransportHarness:
        return ParkingHarness(real_kafka)


@pytest.mark.long
class TestRealKafkaCluster(TransportContract):
    """Three brokers, of which two must have a record before it counts."""

    @pytest.fixture
    async def harness(self, real_kafka_cluster: KafkaServer) -> TransportHarness:
        return KafkaHarness(real_kafka_cluster)


class TestRealKafkaDeadLetters(DeadLetterContract):
    @pytest.fixture
    async def letters(self, real_kafka: KafkaServer) -> AsyncIterator[TransportLetters]:
        harness = KafkaHarness(real_kafka)
        transport, source = harness.make(dead_letters=DeadLetterPolicy(store="queue")), await harness.source()
        yield TransportLetters(transport, source, await transport.deliveries(source, prefetch=1))
        await transport.aclose()
