"""The memory transport passes the suite of all transports."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from bullpen._kernel.outcome import Retry
from bullpen._kernel.policy import DeadLetterPolicy
from bullpen.plugins.transports.memory import MemoryBroker, MemoryTransport
from bullpen.ports.transport import Event
from bullpen.testing.contracts.transport import TransportContract, TransportHarness, take


class MemoryHarness:
    """A broker that lives as long as one test."""

    shortest_pause_ms = 1

    def __init__(self) -> None:
        self.broker = MemoryBroker()

    def make(self, *, dead_letters: DeadLetterPolicy | None = None) -> MemoryTransport:
        return MemoryTransport(self.broker, dead_letters=dead_letters)

    async def source(self) -> str:
        return f"q-{uuid.uuid4().hex[:8]}"

    async def die_holding_one(self, source: str, *, failures: int = 0) -> tuple[str, int]:
        """Nothing of this broker outlives its process, so a consumer dies that only drops what it holds."""
        doomed = self.make()
        deliveries = await doomed.deliveries(source, prefetch=1)
        for _ in range(failures):
            await doomed.settle(await take(deliveries), Retry("no", "", 0))
        held = await take(deliveries)
        doomed.give_back()
        await deliveries.stop()
        return held.id, held.attempt

    async def put_garbage(self, source: str) -> None:
        self.broker.add(Event(source=source, urn="", id="garbage"), 0.0)

    @asynccontextmanager
    async def outage(self) -> AsyncIterator[None]:
        self.broker.stop()
        yield
        self.broker.start()


class TestMemory(TransportContract):
    @pytest.fixture
    async def harness(self) -> TransportHarness:
        return MemoryHarness()
