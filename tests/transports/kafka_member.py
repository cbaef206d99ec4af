"""One member of a consumer group, as a process. Arguments: brokers, group, topic, file to note handled urns in."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

from bullpen.plugins.messaging import MessagingClient
from bullpen.plugins.transports.kafka import KafkaTransport
from bullpen.ports.transport import Delivery
from bullpen.testing.contracts.transport import quick_policy

IDLE_AFTER_S = 3.0


async def main(brokers: str, group: str, topic: str, log: Path) -> None:
    transport = KafkaTransport(brokers, group=group, session_timeout=3_000)
    client = MessagingClient(transport, policy=quick_policy(), concurrency=4)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    last = asyncio.get_running_loop().time()
    count = 0

    async def handle(delivery: Delivery) -> None:
        nonlocal last, count
        await asyncio.sleep(0.01)
        with log.open("a") as applied:
            applied.write(f"{delivery.urn} {delivery.idempotency_key}\n")
        last = asyncio.get_running_loop().time()
        count += 1
        if count % 5 == 0:
            print("handled", count, flush=True)

    await client.consume(topic, handle)
    print("ready", flush=True)
    told = False
    while not stop.is_set():
        if not told and asyncio.get_running_loop().time() - last > IDLE_AFTER_S and count:
            told = True
            print("idle", flush=True)
        try:
            async with asyncio.timeout(0.2):
                await stop.wait()
        except TimeoutError:
            pass
    await client.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4])))
