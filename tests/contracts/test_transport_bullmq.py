"""The BullMQ transport passes the suite of all transports, on a real server."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from bullpen._kernel.policy import DeadLetterPolicy
from bullpen.plugins.transports.bullmq import BullMQTransport
from bullpen.queue import Queue
from bullpen.testing import RedisServer, need
from bullpen.testing.contracts.transport import TransportContract, die_holding_one
from bullpen.worker.options import WorkerArguments


def quick_transport(url: str, dead_letters: DeadLetterPolicy | None = None) -> BullMQTransport:
    """Notices within a second or two that a process died, instead of half a minute."""
    quick: WorkerArguments = {"lock": 1_500, "stalled_interval": 250, "drain_delay": 500}
    return BullMQTransport(url, dead_letters=dead_letters, worker_options=quick, add_deadline=400)


class BullMQHarness:
    shortest_pause_ms = 1

    def __init__(self, server: RedisServer) -> None:
        self.server = server

    def make(self, *, dead_letters: DeadLetterPolicy | None = None) -> BullMQTransport:
        return quick_transport(self.server.url, dead_letters)

    async def source(self) -> str:
        return f"q-{uuid.uuid4().hex[:8]}"

    async def die_holding_one(self, source: str, *, failures: int = 0) -> tuple[str, int]:
        arguments: dict[str, Any] = {"url": self.server.url}
        return await die_holding_one(f"{__name__}:quick_transport", arguments, source, failures=failures)

    async def put_garbage(self, source: str) -> None:
        async with Queue(source, connection=self.server.url) as queue:
            await queue.add("foreign", ["no", "urn"])

    @asynccontextmanager
    async def outage(self) -> AsyncIterator[None]:
        self.server.stop()
        yield
        self.server.restart()


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """A server of its own, which may be stopped, and which keeps what it confirmed."""
    need("valkey")
    with RedisServer.start("valkey", persistent=True) as server:
        yield server


class TestBullMQ(TransportContract):
    @pytest.fixture
    async def harness(self, server: RedisServer) -> BullMQHarness:
        return BullMQHarness(server)
