"""Three nodes, one killed at a time under load: nothing confirmed is lost, and everybody finds the next node."""

from __future__ import annotations

import asyncio
import time
import uuid

import pytest

from bullpen.plugins.transports.rabbitmq import DelayLadder, RabbitMQClient, Topology
from bullpen.ports.messaging import PublishFailed
from bullpen.ports.transport import Delivery
from bullpen.testing.contracts.transport import quick_policy
from bullpen.testing.rabbitmq import RabbitServer
from tests.transports._listening import PATIENCE_S

RESUME_WITHIN_S = 10.0
"""Twice what a quiet machine needs."""


class Load:
    """A publisher that never stops, and a consumer; who noticed what, and when."""

    def __init__(self, server: RabbitServer) -> None:
        topology = Topology(delays=DelayLadder(unit_ms=50, levels=3))
        self.publisher = RabbitMQClient(server.urls, topology=topology, policy=quick_policy(), publish_deadline=20_000)
        # Begins with another node than the publisher, so that every kill hits somebody.
        others = [*server.urls[1:], server.urls[0]]
        self.consumer = RabbitMQClient(others, topology=topology, policy=quick_policy(), concurrency=20)
        self.queue = f"q-{uuid.uuid4().hex[:8]}"
        self.confirmed: dict[str, float] = {}
        self.handled: dict[str, int] = {}
        self.last_handled = 0.0
        self.changed = asyncio.Event()
        self._stop = False

    async def publish(self) -> None:
        number = 0
        while not self._stop:
            number += 1
            try:
                receipt = await self.publisher.produce(self.queue, "pay", {"urn": f"urn:{number}"})
            except PublishFailed:
                continue  # not confirmed: the caller's to send again, and nobody promised anything
            self.confirmed[receipt.id] = time.monotonic()
            self.changed.set()
            await asyncio.sleep(0.01)

    async def handle(self, delivery: Delivery) -> None:
        self.handled[delivery.id] = self.handled.get(delivery.id, 0) + 1
        self.last_handled = time.monotonic()
        self.changed.set()

    def stop(self) -> None:
        self._stop = True

    async def until(self, holds: object, within_s: float) -> None:
        async with asyncio.timeout(within_s):
            while not holds():  # type: ignore[operator]  # a function
                self.changed.clear()
                await self.changed.wait()


@pytest.mark.timeout(240)
@pytest.mark.requirement("S-11", "S-14", "S-50", "S-52")
async def test_no_confirmed_message_is_lost_when_nodes_die(rabbit_cluster: RabbitServer) -> None:
    load = Load(rabbit_cluster)
    await load.consumer.consume(load.queue, load.handle)
    resumed: list[tuple[float, float]] = []
    async with asyncio.TaskGroup() as group:
        group.create_task(load.publish())
        await load.until(lambda: len(load.handled) > 20, PATIENCE_S)
        for node in (0, 1, 2):
            rabbit_cluster.kill(node)
            killed = time.monotonic()
            await load.until(lambda at=killed: max(load.confirmed.values()) > at + 0.2, RESUME_WITHIN_S)
            published_again = max(load.confirmed.values()) - killed
            await load.until(lambda at=killed: load.last_handled > at + 0.2, RESUME_WITHIN_S)
            resumed.append((published_again, load.last_handled - killed))
            await asyncio.to_thread(rabbit_cluster.restart, node)
        load.stop()
        load.changed.set()
    await load.until(lambda: load.confirmed.keys() <= load.handled.keys(), PATIENCE_S)

    assert len(load.confirmed) > 50
    print("resumed after", [f"{publish:.1f} s / {consume:.1f} s" for publish, consume in resumed])
    await load.publisher.close()
    await load.consumer.close()
