"""Compare the transports on this machine: `python -m benchmarks.transports [--write]`. Prints a table in Markdown.

Each runs the same loads on a private broker: confirmed messages one after the other, batches, handling, the time from
`produce` to the handler on an idle queue, and half-second messages at prefetch 5. RabbitMQ runs on one node and on
three. Kafka is librdkafka's mock, which keeps everything in memory: its numbers are those of the client, not of a
cluster. `--write` puts the table into the guide.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bullpen.plugins.messaging import MessagingClient
from bullpen.plugins.transports.bullmq import BullMQClient
from bullpen.plugins.transports.kafka import KafkaClient
from bullpen.plugins.transports.memory import MemoryClient
from bullpen.plugins.transports.rabbitmq import RabbitMQClient
from bullpen.ports.transport import Delivery
from bullpen.testing import RedisServer
from bullpen.testing.kafka import MockKafka
from bullpen.testing.rabbitmq import RabbitServer

GUIDE = Path(__file__).parents[1] / "docs" / "guides" / "transports.md"
MESSAGES = 2_000
PAYLOAD = {"text": "x" * 80}


@dataclass(frozen=True)
class Measured:
    """Messages per second, milliseconds, messages per minute."""

    one_by_one: float
    batched: float
    handled: float
    p50_ms: float
    p99_ms: float
    slow_per_minute: float

    def row(self, name: str) -> str:
        rates = " | ".join(f"{rate:,.0f}/s".replace(",", " ") for rate in (self.one_by_one, self.batched, self.handled))
        return f"| {name} | {rates} | {self.p50_ms:.1f} ms | {self.p99_ms:.1f} ms | {self.slow_per_minute:.0f}/min |"


HEADER = """\
| transport | one by one | batched | handled | latency p50 | p99 | prefetch 5, 500 ms |
|---|---|---|---|---|---|---|"""


async def measure(make: Callable[[], MessagingClient[Any]], *, messages: int = MESSAGES) -> Measured:
    """All loads on one transport, one after the other."""
    client = make()
    arrived, latencies = Arrivals(), list[float]()

    async def handle(delivery: Delivery) -> None:
        if "at" in delivery.payload:
            latencies.append((time.perf_counter() - delivery.payload["at"]) * 1000)
        arrived.add()

    few = messages // 10
    await client.produce("bench", "e", {"urn": "urn:warm", "payload": PAYLOAD})
    started = time.perf_counter()
    for number in range(few):
        await client.produce("bench", "e", {"urn": f"urn:{number}", "payload": PAYLOAD})
    one_by_one = few / (time.perf_counter() - started)
    started = time.perf_counter()
    await client.produce_many("bench", [("e", {"urn": f"urn:{n}", "payload": PAYLOAD}) for n in range(messages)])
    batched = messages / (time.perf_counter() - started)

    consumer = await client.consume("bench", handle, concurrency=100)
    await arrived.reach(messages + few + 1)
    handled = arrived.per_second

    for _ in range(few):
        expected = arrived.count + 1  # before it is sent: it may arrive before its sender has heard of the confirm
        payload = {"at": time.perf_counter()}
        await client.produce("bench", "e", {"urn": "urn:latency", "payload": payload})
        await arrived.reach(expected)
    latencies.sort()
    await consumer.close()
    slow = await slow_per_minute(client, messages=max(5, messages // 40))
    await client.close()
    p99 = latencies[int(len(latencies) * 0.99)]
    return Measured(one_by_one, batched, handled, statistics.median(latencies), p99, slow)


async def slow_per_minute(client: MessagingClient[Any], *, messages: int) -> float:
    """Half a second each, five at the same time."""
    arrived = Arrivals()

    async def handle(delivery: Delivery) -> None:
        arrived.begin()
        await asyncio.sleep(0.5)
        arrived.add()

    await client.produce_many("slow", [("e", {"urn": f"urn:{number}"}) for number in range(messages)])
    await client.consume("slow", handle, concurrency=5)
    await arrived.reach(messages)
    return arrived.per_second * 60


class Arrivals:
    """Counts, and lets somebody wait for a number. Measured from the first one on: joining a group takes its time."""

    def __init__(self) -> None:
        self.count, self._wanted, self._reached = 0, 0, asyncio.Event()
        self._first_at = self._last_at = 0.0

    @property
    def per_second(self) -> float:
        return self.count / (self._last_at - self._first_at)

    def begin(self) -> None:
        self._first_at = self._first_at or time.perf_counter()

    def add(self) -> None:
        self.begin()
        self.count += 1
        self._last_at = time.perf_counter()
        if self.count >= self._wanted:
            self._reached.set()

    async def reach(self, count: int) -> None:
        self._wanted = count
        self._reached.clear()
        if self.count < count:
            await asyncio.wait_for(self._reached.wait(), 300)


@contextmanager
def contestants() -> Iterator[dict[str, Callable[[], MessagingClient[Any]]]]:
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer.start("valkey", persistent=True))
        rabbit = stack.enter_context(RabbitServer.start())
        cluster = stack.enter_context(RabbitServer.start(3))
        kafka = stack.enter_context(MockKafka.start())
        for topic in ("bench", "slow"):
            kafka.create_topic(topic, partitions=16)
        yield {
            "memory": MemoryClient,
            "BullMQ": lambda: BullMQClient(redis.url),
            "RabbitMQ, 1 node": lambda: RabbitMQClient(rabbit.url),
            "RabbitMQ, 3 nodes": lambda: RabbitMQClient(cluster.urls),
            "Kafka (mock)": lambda: KafkaClient(kafka.address, workflow="bench"),
        }


def write(rows: list[str]) -> None:
    """Put the table between its marks in the guide."""
    head, begin, rest = GUIDE.read_text().partition("--write -->\n")
    _, end, tail = rest.partition("<!-- end -->")
    load = f"a load of {os.getloadavg()[0]:.0f} from this and other work"
    machine = f"Measured on {os.cpu_count()} cores, Python {platform.python_version()}, with {load}:"
    table = "\n".join([HEADER, *rows])
    GUIDE.write_text(f"{head}{begin}{machine}\n\n{table}\n{end}{tail}")


def main() -> None:
    logging.disable(logging.CRITICAL)
    print(HEADER)
    rows: list[str] = []
    with contestants() as made:
        for name, make in made.items():
            rows.append(asyncio.run(measure(make)).row(name))
            print(rows[-1], flush=True)
    if "--write" in sys.argv[1:]:
        write(rows)


if __name__ == "__main__":
    main()
