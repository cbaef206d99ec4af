"""The RabbitMQ transport passes the suite of all transports, on a real broker."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aio_pika
import pytest

from bullpen._kernel.policy import DeadLetterPolicy
from bullpen.plugins.transports.rabbitmq import DelayLadder, RabbitMQTransport, Topology
from bullpen.testing.contracts.dead_letters import DeadLetterContract, TransportLetters
from bullpen.testing.contracts.transport import TransportContract, die_holding_one
from bullpen.testing.rabbitmq import RabbitServer

QUICK = Topology(delays=DelayLadder(unit_ms=20, levels=9))


def quick_transport(url: str, dead_letters: DeadLetterPolicy | None = None) -> RabbitMQTransport:
    """Pauses in steps of 20 ms instead of seconds."""
    return RabbitMQTransport(url, topology=QUICK, dead_letters=dead_letters)


class RabbitHarness:
    shortest_pause_ms = 20

    def __init__(self, server: RabbitServer) -> None:
        self.server = server
        self._sources: list[str] = []

    def make(self, *, dead_letters: DeadLetterPolicy | None = None) -> RabbitMQTransport:
        return quick_transport(self.server.url, dead_letters)

    async def source(self) -> str:
        self._sources.append(f"q-{uuid.uuid4().hex[:8]}")
        return self._sources[-1]

    async def die_holding_one(self, source: str, *, failures: int = 0) -> tuple[str, int]:
        arguments = {"url": self.server.url}
        return await die_holding_one(f"{__name__}:quick_transport", arguments, source, failures=failures)

    async def put_garbage(self, source: str) -> None:
        transport = self.make()
        await transport.declare(transport.spec(source))
        await transport.aclose()
        async with await aio_pika.connect(self.server.url) as connection:
            channel = await connection.channel()
            await channel.default_exchange.publish(aio_pika.Message(b"\xffno json", message_id="garbage"), source)

    @asynccontextmanager
    async def outage(self) -> AsyncIterator[None]:
        await asyncio.to_thread(self.server.stop)
        yield
        await asyncio.to_thread(self.server.restart)

    async def remove_queues(self) -> None:
        """A broker that restarts elects a leader for every quorum queue it has."""
        async with await aio_pika.connect(self.server.url) as connection:
            channel = await connection.channel()
            for source in self._sources:
                await channel.queue_delete(source)
                await channel.queue_delete(f"{source}-dlq")


class TestRabbitMQ(TransportContract):
    @pytest.fixture
    async def harness(self, rabbit: RabbitServer) -> AsyncIterator[RabbitHarness]:
        harness = RabbitHarness(rabbit)
        yield harness
        await harness.remove_queues()


class TestRabbitMQDeadLetters(DeadLetterContract):
    @pytest.fixture
    async def letters(self, rabbit: RabbitServer) -> AsyncIterator[TransportLetters]:
        harness = RabbitHarness(rabbit)
        transport, source = harness.make(dead_letters=DeadLetterPolicy(store="queue")), await harness.source()
        yield TransportLetters(transport, source, await transport.deliveries(source, prefetch=1))
        await transport.aclose()
        await harness.remove_queues()
