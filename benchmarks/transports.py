"""Compare the transports on this machine: `python -m benchmarks.transports`. Prints a table in Markdown.

Each runs the same loads on a private broker: confirmed messages one after the other, batches, handling, and the time
from `produce` to the handler on an idle queue. RabbitMQ runs on one node and on three. Kafka is librdkafka's mock,
which keeps everything in memory: its numbers are those of the client, not of a cluster.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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

MESSAGES = 2_000
PAYLOAD = {"text": "x" * 80}


async def measure(make: Callable[[], MessagingClient[Any]]) -> tuple[float, float, float, float, float]:
    """One by one, batched, handled (all per second); latency p50 and p99 in ms."""
    client, handled, arrived = make(), 0, asyncio.Event()
    wanted, latencies = 0, list[float]()

    async def handle(delivery: Delivery) -> None:
        nonlocal handled
        handled += 1
        if "at" in delivery.payload:
            latencies.append((time.perf_counter() - delivery.payload["at"]) * 1000)
        if handled >= wanted:
            arrived.set()

    await client.produce("bench", "e", {"urn": "urn:warm", "payload": PAYLOAD})
    started = time.perf_counter()
    for number in range(200):
        await client.produce("bench", "e", {"urn": f"urn:{number}", "payload": PAYLOAD})
    one_by_one = 200 / (time.perf_counter() - started)
    started = time.perf_counter()
    await client.produce_many("bench", [("e", {"urn": f"urn:{n}", "payload": PAYLOAD}) for n in range(MESSAGES)])
    batched = MESSAGES / (time.perf_counter() - started)

    wanted = MESSAGES + 201
    await client.consume("bench", handle, concurrency=100)
    while not handled:  # noqa: ASYNC110 - measured from the first one on
        await asyncio.sleep(0.001)
    started, begun = time.perf_counter(), handled
    await asyncio.wait_for(arrived.wait(), 120)
    consumed = (wanted - begun) / (time.perf_counter() - started)

    for _ in range(200):
        wanted = handled + 1
        arrived.clear()
        payload = {"at": time.perf_counter()}
        await client.produce("bench", "e", {"urn": "urn:latency", "payload": payload})
        await asyncio.wait_for(arrived.wait(), 30)
    await client.close()
    latencies.sort()
    return one_by_one, batched, consumed, statistics.median(latencies), latencies[int(len(latencies) * 0.99)]


@contextmanager
def contestants() -> Iterator[dict[str, Callable[[], MessagingClient[Any]]]]:
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer.start("valkey", persistent=True))
        rabbit = stack.enter_context(RabbitServer.start())
        cluster = stack.enter_context(RabbitServer.start(3))
        kafka = stack.enter_context(MockKafka.start())
        kafka.create_topic("bench", partitions=16)
        yield {
            "memory": MemoryClient,
            "BullMQ": lambda: BullMQClient(redis.url),
            "RabbitMQ, 1 node": lambda: RabbitMQClient(rabbit.url),
            "RabbitMQ, 3 nodes": lambda: RabbitMQClient(cluster.urls),
            "Kafka (mock)": lambda: KafkaClient(kafka.address, workflow="bench"),
        }


def main() -> None:
    logging.disable(logging.CRITICAL)
    print("| transport | one by one | batched | handled | latency p50 | p99 |\n|---|---|---|---|---|---|")
    with contestants() as made:
        for name, make in made.items():
            one, batched, handled, median, worst = asyncio.run(measure(make))
            print(f"| {name} | {one:.0f}/s | {batched:.0f}/s | {handled:.0f}/s | {median:.1f} ms | {worst:.1f} ms |")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
