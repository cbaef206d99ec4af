"""One member of a consumer group, as a process: notes what it handles, closes gracefully on SIGTERM.

Arguments: brokers, group, topic, file to note in, what a failed record does ("pause" or "park"), session timeout in ms.
A line of the file: urn, idempotency key, attempt, number, "failed" or "done". Records that ask for it fail once.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import Any, Literal, cast

from bullpen.plugins.messaging import MessagingClient
from bullpen.plugins.transports.kafka import KafkaTransport
from bullpen.ports.transport import Delivery
from bullpen.testing.contracts.transport import quick_policy


async def main(
    brokers: str, group: str, topic: str, log: Path, retry: Literal["pause", "park"], session_timeout_ms: int
) -> None:
    transport = KafkaTransport(brokers, group=group, session_timeout=session_timeout_ms, retry=retry)
    client = MessagingClient(transport, policy=quick_policy(), concurrency=6)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)

    async def handle(delivery: Delivery) -> None:
        payload: dict[str, Any] = delivery.payload or {}
        await asyncio.sleep(0.01)
        fails = bool(payload.get("fails")) and delivery.attempt == 1
        note = (delivery.urn, delivery.idempotency_key, delivery.attempt, payload.get("number", 0))
        with log.open("a") as applied:
            applied.write(f"{' '.join(map(str, note))} {'failed' if fails else 'done'}\n")
        print("handled", flush=True)
        if fails:
            raise ConnectionError("provider away")

    await client.consume(topic, handle)
    print("ready", flush=True)
    await stop.wait()
    await client.close()


if __name__ == "__main__":
    _, brokers, group, topic, log, retry, session_timeout_ms = sys.argv
    asyncio.run(
        main(brokers, group, topic, Path(log), cast("Literal['pause', 'park']", retry), int(session_timeout_ms))
    )
