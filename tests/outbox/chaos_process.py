"""A projector, a dispatcher or a delivery worker in a process of its own, which may be told to die at an exact moment.

Started by the fault tests (`forked`). It kills itself with SIGKILL when a telemetry event has come so
often: events are told inline, so the process ends between two statements, not somewhere near them.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from typing import Any

from bullpen._kernel import telemetry
from bullpen.ledger import Ledger
from bullpen.outbox import (
    DispatcherOptions,
    EventRoutes,
    IntegrationMessage,
    Outbox,
    Projector,
    ProjectorOptions,
    Route,
)
from bullpen.plugins.sources.sql import SqlEvents
from bullpen.ports.channel import Accepted, ChannelHealth, Message, SendResult, WhenUnknown
from bullpen.ports.source import EventSource, SourceEvent
from bullpen.redis import Connection
from bullpen.worker.options import WorkerArguments


class FileChannel:
    """The target: one line per delivery in a file that no kill can tear."""

    def __init__(self, path: str, delay_s: float, when_unknown: str = "resend") -> None:
        self._path, self._delay_s = path, delay_s
        self.when_unknown = WhenUnknown(when_unknown)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    async def send(self, message: Message) -> SendResult:
        await asyncio.sleep(self._delay_s)
        line = json.dumps([message.id, message.idempotency_key, os.getpid()]) + "\n"
        os.write(self._descriptor, line.encode())
        if message.event_type == "poison.v1":
            os.kill(os.getpid(), signal.SIGKILL)
        return Accepted()

    async def look_up(self, message: Message) -> Accepted | None:
        return Accepted("found") if self._has(message.id) else None

    def _has(self, row_id: str) -> bool:
        with open(self._path) as lines:
            return f'"{row_id}"' in lines.read()

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


def projector(ledger: Ledger, events: str | None) -> Projector:
    """Every event goes to two targets; a poisoned one fails on its way to the first."""
    routes = EventRoutes()

    @routes.on("payment.*", to="file:a", since="beginning")
    def first(event: SourceEvent) -> IntegrationMessage:
        if event.data.get("poison"):
            raise ValueError("poison")
        return IntegrationMessage(payload={"number": event.data["number"]}, backoff=200)

    @routes.on("payment.*", to="file:b", since="beginning")
    def second(event: SourceEvent) -> IntegrationMessage:
        return IntegrationMessage(payload={"number": event.data["number"]}, backoff=200)

    options = ProjectorOptions(max_tries=2, retry_pause_ms=10, standby_ms=200)
    source: EventSource = SqlEvents(ledger, batch_size=20, poll_ms=100)
    if events is not None:
        from bullpen.plugins.sources.kurrent import KurrentSource

        source = KurrentSource(events, batch_size=20, timeout_ms=3_000, prefixes=["payment."])
    return Projector(ledger, source, routes, options=options)


async def main(order: dict[str, Any], *, on_ready: Callable[[], None]) -> None:
    ledger = Ledger(order["database"], timeout_ms=5_000)
    connection = Connection(order["redis"], command_timeout_ms=1_000) if order.get("redis") else None
    channel = FileChannel(order["target"], order["delay_s"], order.get("when_unknown", "resend"))
    route = Route(channel=channel, strategy=order["strategy"], concurrency=20, timeout_ms=1_000)
    options = DispatcherOptions(lease_ms=order["lease_ms"], tick_interval_ms=100, claim_batch_size=50)
    outbox = Outbox(ledger, {"file:*": route}, connection=connection, options=options)
    if order.get("die_at"):
        die_at(order["die_at"], order.get("die_after", 1))
    if order["role"] == "dispatcher":
        service: Any = outbox.dispatcher()
    elif order["role"] == "projector":
        service = projector(ledger, order["events"])
    else:
        short: WorkerArguments = {"lock": 1_000, "stalled_interval": 500}
        service = outbox.workers(discover_ms=200, worker_options=short)
    await service.start()
    on_ready()
    await asyncio.Event().wait()
