"""The Kafka transport passes the suite of all transports, on librdkafka's mock brokers or a real cluster."""

from __future__ import annotations

import os
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

SESSION_MS = 2_000
"""The mock waits for nearly as long as this before it lets somebody new into a group that has changed."""


def transport_of(address: str, group: str, retry: Literal["pause", "park"] = "pause") -> KafkaTransport:
    return KafkaTransport(address, group=group, retry=retry, retry_topics=2, session_timeout=SESSION_MS)


class KafkaHarness:
    """A group and topics of its own for each test."""

    shortest_pause_ms = 1
    retry: Literal["pause", "park"] = "pause"
    session_ms = SESSION_MS

    def __init__(self, cluster: MockKafka) -> None:
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


REAL_CLUSTER = os.environ.get("BULLPEN_TEST_KAFKA")


class RealHarness(KafkaHarness):
    """Topics are made by the cluster on first use; it must allow that."""

    session_ms = 10_000

    def __init__(self, address: str) -> None:
        self.address = address
        self.group = f"g-{uuid.uuid4().hex[:8]}"

    async def source(self) -> str:
        return f"t-{uuid.uuid4().hex[:8]}"


if REAL_CLUSTER is not None:  # not collected without it: a skip would be a failure in CI

    @pytest.mark.timeout(300)
    class TestRealKafka(TransportContract):
        @pytest.fixture
        async def harness(self) -> TransportHarness:
            assert REAL_CLUSTER is not None
            return RealHarness(REAL_CLUSTER)

        async def test_after_an_outage_work_goes_on_by_itself(self) -> None:  # type: ignore[override]
            """Somebody's cluster is not ours to stop."""
