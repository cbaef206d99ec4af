"""A scheduler or a sender in a process of its own, which may be told to die at an exact moment.

Started by the fault tests with one JSON argument. It kills itself with SIGKILL when a telemetry event has come so
often: events are told inline, so the process ends between two statements, not somewhere near them.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from typing import Any

from bullpen._kernel import telemetry
from bullpen.ledger import Ledger
from bullpen.ports.channel import Accepted, ChannelHealth, Message, SendResult
from tests.messages.kit import make
from tests.messages.rabbit import rabbit_client


class FileChannel:
    """The provider: one line per call in a file that no kill can tear."""

    def __init__(self, path: str, delay_s: float, offset_ms: int) -> None:
        self._delay_s, self._offset_ms = delay_s, offset_ms
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    async def send(self, message: Message) -> SendResult:
        await asyncio.sleep(self._delay_s)
        at_ms = round(time.time() * 1000) + self._offset_ms
        line = json.dumps([message.idempotency_key, message.user_id, at_ms, os.getpid()]) + "\n"
        os.write(self._descriptor, line.encode())
        return Accepted("written")

    async def check(self) -> ChannelHealth:
        return ChannelHealth(True)

    async def aclose(self) -> None:
        os.close(self._descriptor)


def die_at(event: str, count: int) -> None:
    seen = 0

    def listen(name: str, fields: dict[str, Any]) -> None:
        nonlocal seen
        if name == event and fields.get("count", 1):
            seen += 1
            if seen == count:
                os.kill(os.getpid(), signal.SIGKILL)

    telemetry.subscribe(listen)


async def main(order: dict[str, Any]) -> None:
    ledger = Ledger(order["database"], timeout_ms=5_000, clock_offset_ms=order["offset_ms"])
    client = rabbit_client(order["rabbit"], order["names"], concurrency=5)
    messages = make(
        ledger,
        client,
        FileChannel(order["target"], order["delay_s"], order["offset_ms"]),
        queue=order["names"]["queue_name"],
        timeout=500,
        scheduler_schedule="* * * * * *",
        scheduler_lease_ms=order["lease_ms"],
        scheduler_batch=order["batch"],
        scheduler_look_ahead_ms=order["look_ahead_ms"],
        sender_lease_ms=order["lease_ms"],
    )
    if order.get("die_at"):
        die_at(order["die_at"], order.get("die_after", 1))
    service: Any = messages.scheduler() if order["role"] == "scheduler" else messages.sender()
    running = asyncio.create_task(service.run())
    print("ready", flush=True)
    await running


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
