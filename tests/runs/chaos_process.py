"""A worker of runs, or who looks after them, in a process of its own, which may be told to die at an exact moment.

Started by the fault tests with one JSON argument. It kills itself with SIGKILL when a telemetry event has come so
often: events are told inline, so the process ends between two statements. Its log goes to stdout as JSON lines.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import sys
from typing import Any

from bullpen._kernel import telemetry
from bullpen.errors import PermanentError
from bullpen.ledger import Ledger, Roles
from bullpen.ops import logs
from bullpen.outbox import DispatcherOptions, Outbox, Route
from bullpen.plugins.channels.queue import QueueChannel
from bullpen.redis import Connection
from bullpen.runs import Run, RunOptions, Runs


class Bank:
    """A provider that takes idempotency keys, in a file that no kill can tear: a call is a line, a key one charge."""

    def __init__(self, path: str, delay_s: float) -> None:
        self._delay_s = delay_s
        self._file = sqlite3.connect(path, isolation_level=None, timeout=30)
        self._file.execute("PRAGMA synchronous=OFF")

    async def charge(self, key: str, tenant_id: str) -> dict[str, str]:
        await asyncio.sleep(self._delay_s)
        self._file.execute("BEGIN IMMEDIATE")
        self._file.execute("INSERT INTO calls VALUES (?, ?)", (key, tenant_id))
        self._file.execute("INSERT OR IGNORE INTO charges VALUES (?, ?)", (key, tenant_id))
        self._file.execute("COMMIT")
        return {"receipt": key}


def die_at(event: str, count: int) -> None:
    seen = 0

    def listen(name: str, fields: dict[str, Any]) -> None:
        nonlocal seen
        if name == event:
            seen += 1
            if seen == count:
                os.kill(os.getpid(), signal.SIGKILL)

    telemetry.subscribe(listen)


async def main(order: dict[str, Any]) -> None:
    logs.configure(sys.stdout, level=20, as_json=True)
    roles = Roles(**order["roles"])
    duty = "worker" if order["role"] == "worker" else "service"
    ledger = Ledger(order[f"{duty}_url"], roles=roles, duty=duty, timeout_ms=5_000)  # type: ignore[arg-type]  # one of two
    connection = Connection(order["redis"], command_timeout_ms=1_000)
    options = RunOptions(
        concurrency=order["concurrency"],
        lock=order["lock_ms"],
        stalled_interval=300,
        heartbeat_ms=300,
        patience_ms=20_000,
        idle_ms=1_500,
        sweep_every_ms=500,
    )
    runs = Runs(ledger, connection, options=options)
    bank = Bank(order["bank"], order["delay_s"])

    @runs.handler
    async def execute(run: Run) -> str:
        for step in ("reserve", "model", "capture"):
            if step == "model" and run.payload.definition.get("fails"):
                raise PermanentError("the model refused")
            await run.step(step, lambda key: bank.charge(key, run.tenant_id))
            await run.progress({"done": step})
        return "done"

    if order.get("die_at"):
        die_at(order["die_at"], order.get("die_after", 1))
    if order["role"] == "worker":
        worker = runs.worker()
        await worker.start()
        print("ready", flush=True)
        await worker.run(signals=True)
        await ledger.aclose()
        await connection.aclose()
        return
    outbox = Outbox(
        ledger,
        {"bullmq:*": Route(channel=QueueChannel(connection), strategy="direct", timeout_ms=1_500)},
        connection=connection,
        options=DispatcherOptions(lease_ms=2_000, tick_interval_ms=100),
    )
    await outbox.dispatcher().start()
    asyncio.create_task(runs.maintenance().run())  # noqa: RUF006 - lives as long as the process
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
