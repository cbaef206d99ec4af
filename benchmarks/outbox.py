"""How fast the outbox is: rows stored, claimed and delivered per second on PostgreSQL, the time from a commit to the
target, and what a long history costs.

    python -m benchmarks.outbox [--rows 10000] [--history 1000000] [--dispatchers 1 2 4] [--messages 300]
        [--peer PYTHON]

A PostgreSQL of its own with `fsync` off, in memory where there is room: the numbers compare ways of doing it, not
disks. A target does nothing. `--peer` is a Python that has faststream-outbox and asyncpg; it stores and handles the
same rows. Figures of a machine that does other things meanwhile are worth little: the load is printed with them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from bullpen.ledger import Lane, Ledger, OutboxItem, OutboxStatus
from bullpen.outbox import DispatcherOptions, Outbox, Route
from bullpen.ports.channel import Accepted, ChannelHealth, Message, SendResult
from bullpen.redis import Connection
from bullpen.testing import Child, RedisServer
from bullpen.testing.postgres import PostgresServer

ROOT = Path(__file__).resolve().parents[1]


class Nowhere:
    """A target that takes everything at once. With `stamps` it writes down when, by the clock of this machine."""

    def __init__(self, stamps: str | None = None) -> None:
        self._stamps = None if stamps is None else os.open(stamps, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    async def send(self, message: Message) -> SendResult:
        if self._stamps is not None:
            os.write(self._stamps, f"{message.id} {time.monotonic()}\n".encode())
        return Accepted()

    async def check(self) -> ChannelHealth:
        return ChannelHealth(True)

    async def aclose(self) -> None: ...


def items(count: int, first: int = 0, *, prefix: str = "e") -> list[OutboxItem]:
    return [
        OutboxItem(
            integration_type="nowhere:x",
            event_type="order.paid.v1",
            payload={"orderId": number, "text": "x" * 100},
            source_stream_id="order",
            source_event_id=f"{prefix}{number}",
            tenant_id=f"tenant-{number % 20}",
        )
        for number in range(first, first + count)
    ]


async def rate(count: int, work: Callable[[], Awaitable[Any]]) -> float:
    began = time.perf_counter()
    await work()
    return count / (time.perf_counter() - began)


async def fill(ledger: Ledger, count: int) -> None:
    for first in range(0, count, 1_000):
        await ledger.outbox.enqueue_many(items(min(1_000, count - first), first))


async def empty(ledger: Ledger) -> None:
    async with ledger.database.transaction() as connection:
        await connection.exec_driver_sql("TRUNCATE core_outbox.integration_outbox CASCADE")


async def vacuum(ledger: Ledger) -> None:
    async with ledger.database.engine.connect() as connection:
        free = await connection.execution_options(isolation_level="AUTOCOMMIT")
        await free.exec_driver_sql("VACUUM ANALYZE core_outbox.integration_outbox")


# Storing ------------------------------------------------------------------------------------------------------------


async def measure_storing(ledger: Ledger, rows: int) -> dict[str, float]:
    async def one_by_one() -> None:
        for item in items(rows // 10, prefix="a"):
            async with ledger.database.transaction() as connection:
                await ledger.enqueuer.enqueue(connection, item)

    async def eight_at_once() -> None:
        todo = iter(items(rows // 4, prefix="b"))

        async def caller() -> None:
            for item in todo:
                async with ledger.database.transaction() as connection:
                    await ledger.enqueuer.enqueue(connection, item)

        await asyncio.gather(*(caller() for _ in range(8)))

    async def bulk() -> None:
        for first in range(0, rows, 1_000):
            await ledger.outbox.enqueue_many(items(1_000, first, prefix="c"))

    return {
        "one per transaction": await rate(rows // 10, one_by_one),
        "one per transaction, 8 callers": await rate(rows // 4, eight_at_once),
        "1000 per transaction": await rate(rows // 1_000 * 1_000, bulk),
    }


# Claiming -----------------------------------------------------------------------------------------------------------


async def measure_claiming(ledger: Ledger, rows: int) -> float:
    await empty(ledger)
    await fill(ledger, rows)
    await vacuum(ledger)

    async def drain() -> None:
        while (await ledger.outbox.claim([Lane("nowhere:x", 100)], worker_id="b", lease_ms=600_000)).rows:
            pass

    return await rate(rows, drain)


async def claim_times(ledger: Ledger, times: int = 40) -> list[float]:
    took = []
    for _ in range(times):
        began = time.perf_counter()
        claimed = await ledger.outbox.claim([Lane("nowhere:x", 100)], worker_id="b", lease_ms=600_000)
        took.append((time.perf_counter() - began) * 1000)
        assert len(claimed.rows) == 100
    return took


async def measure_history(ledger: Ledger, history: int) -> dict[str, float]:
    """The time of a claim of 100 rows without and with a long history."""
    await empty(ledger)
    await fill(ledger, 5_000)
    await vacuum(ledger)
    await claim_times(ledger, 5)
    without = statistics.median(await claim_times(ledger))
    await empty(ledger)
    step = 100_000
    for first in range(0, history, step):
        async with ledger.database.engine.begin() as connection:
            await connection.exec_driver_sql(
                "INSERT INTO core_outbox.integration_outbox (source_stream_id, source_event_id, route_key, "
                "integration_type, event_type, payload, status, sent_at) "
                "SELECT 'history', 'h' || n, 'r', 'nowhere:x', 'e', '{}', 'SENT', now() "
                f"FROM generate_series({first + 1}, {min(first + step, history)}) n"
            )
    await fill(ledger, 5_000)
    await vacuum(ledger)
    await claim_times(ledger, 5)
    with_history = statistics.median(await claim_times(ledger))
    return {"empty table, ms": without, f"{history} SENT rows, ms": with_history, "ratio": with_history / without}


# Delivering ---------------------------------------------------------------------------------------------------------


async def serve(order: dict[str, Any]) -> None:
    """A dispatcher or worker, in a process of its own."""
    ledger = Ledger(order["database"])
    connection = Connection(order["redis"]) if order["redis"] else None
    channel = Nowhere(order.get("stamps"))
    route = Route(channel=channel, strategy=order["strategy"], concurrency=100, max_queued=1_000_000)
    options = DispatcherOptions(claim_batch_size=200)
    outbox = Outbox(ledger, {"nowhere:x": route}, connection=connection, options=options)
    service: Any = outbox.dispatcher() if order["role"] == "dispatcher" else outbox.workers()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await service.start()
    await asyncio.Event().wait()


async def measure_delivering(
    ledger: Ledger, url: str, redis: RedisServer, rows: int, strategy: str, count: int
) -> float:
    await empty(ledger)
    redis.flush()
    await fill(ledger, rows)
    await vacuum(ledger)
    roles = ["dispatcher"] * count + (["worker"] * count if strategy == "queued" else [])
    children = []
    try:
        for role in roles:
            order = {
                "database": url,
                "redis": redis.url if strategy == "queued" else None,
                "strategy": strategy,
                "role": role,
            }
            children.append(Child.module("benchmarks.outbox", "--serve", json.dumps(order), cwd=ROOT))
        for child in children:
            await asyncio.to_thread(child.wait_for, "ready")
        began = time.perf_counter()
        for child in children:
            child.send_line("go")
        while sum((await ledger.outbox.counts()).values()):  # noqa: ASYNC110 - the database tells nobody
            await asyncio.sleep(0.02)
        took = time.perf_counter() - began
        sent = await ledger.outbox.find(status=OutboxStatus.SENT, limit=rows + 1)
        assert len(sent) == rows
    finally:
        for child in children:
            child.close()
    return rows / took


# From the commit to the target --------------------------------------------------------------------------------------


async def measure_latency(ledger: Ledger, url: str, redis: RedisServer, strategy: str, count: int) -> dict[str, float]:
    """Milliseconds from a commit to its target, one message at a time with pauses. The clock is the machine's."""
    await empty(ledger)
    redis.flush()
    with tempfile.TemporaryDirectory(prefix="bullpen-") as directory:
        stamps = Path(directory) / "stamps"
        order = {"database": url, "redis": redis.url, "strategy": strategy, "stamps": str(stamps)}
        roles = ["dispatcher"] + (["worker"] if strategy == "queued" else [])
        children = [
            Child.module("benchmarks.outbox", "--serve", json.dumps({**order, "role": role}), cwd=ROOT)
            for role in roles
        ]
        committed: dict[str, float] = {}
        try:
            for child in children:
                await asyncio.to_thread(child.wait_for, "ready")
                child.send_line("go")
            for number, item in enumerate(items(count + 20)):
                async with ledger.database.transaction() as connection:
                    stored = await ledger.enqueuer.enqueue(connection, item)
                if number >= 20:  # the first ones find connections that are not open yet
                    committed[str(stored.id)] = time.monotonic()
                await asyncio.sleep(random.uniform(0.02, 0.06))
            while sum((await ledger.outbox.counts()).values()):  # noqa: ASYNC110 - the database tells nobody
                await asyncio.sleep(0.02)
        finally:
            for child in children:
                child.close()
        arrived = dict(line.split() for line in stamps.read_text().splitlines())
    took = sorted((float(arrived[row_id]) - at) * 1000 for row_id, at in committed.items())
    return {"median": statistics.median(took), "95 of 100 within": took[len(took) * 95 // 100], "slowest": took[-1]}


# The peer -----------------------------------------------------------------------------------------------------------

PEER = """
import asyncio, json, sys, time
from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from faststream_outbox import OutboxBroker, make_outbox_table

async def main(url, rows):
    metadata = MetaData()
    table = make_outbox_table(metadata, table_name="peer_outbox")
    engine = create_async_engine(url, pool_size=20)
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    broker = OutboxBroker(engine, outbox_table=table)
    done, seen = asyncio.Event(), 0

    @broker.subscriber("orders", max_workers=20, fetch_batch_size=100)
    async def handle(body: dict) -> None:
        nonlocal seen
        seen += 1
        if seen == rows:
            done.set()

    await broker.connect()
    began = time.perf_counter()
    for number in range(rows // 10):
        async with AsyncSession(engine) as session, session.begin():
            await broker.publish({"orderId": number, "text": "x" * 100}, queue="orders", session=session)
    stored = rows // 10 / (time.perf_counter() - began)
    async with AsyncSession(engine) as session, session.begin():
        for number in range(rows - rows // 10):
            await broker.publish({"orderId": number, "text": "x" * 100}, queue="orders", session=session)
    began = time.perf_counter()
    await broker.start()
    await asyncio.wait_for(done.wait(), 600)
    handled = rows / (time.perf_counter() - began)
    await broker.stop()
    await engine.dispose()
    print(json.dumps({"one per transaction": stored, "handled, 1 process": handled}))

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


def measure_peer(python: str, server: PostgresServer, rows: int) -> dict[str, float]:
    database = server.create_database()
    url = server.url(database).replace("postgresql:", "postgresql+asyncpg:")
    told = subprocess.run([python, "-c", PEER, url, str(rows)], capture_output=True, text=True, check=False)
    if told.returncode != 0:
        raise RuntimeError(told.stderr[-3000:])
    found: dict[str, float] = json.loads(told.stdout.strip().splitlines()[-1])
    return found


# All of it ----------------------------------------------------------------------------------------------------------


def show(title: str, figures: dict[str, float], unit: str = "rows/s") -> None:
    print(f"\n{title}")
    for name, value in figures.items():
        text = f"{value:>12,.2f}" if unit != "rows/s" else f"{value:>12,.0f} {unit}"
        print(f"  {name:<36}{text}", flush=True)


async def measure(arguments: argparse.Namespace) -> None:
    print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
    with (
        PostgresServer.start(args=("max_connections=200", "shared_buffers=512MB")) as server,
        RedisServer.start() as redis,
    ):
        url = server.url()
        async with Ledger(url, pool_size=10) as ledger:
            await ledger.migrate()
            show("stored", await measure_storing(ledger, arguments.rows))
            show("claimed", {"100 per claim": await measure_claiming(ledger, arguments.rows)})
            for strategy in ("direct", "queued"):
                figures = {}
                for count in arguments.dispatchers:
                    name = f"{count} dispatchers" + (f" and {count} workers" if strategy == "queued" else "")
                    figures[name] = await measure_delivering(ledger, url, redis, arguments.rows, strategy, count)
                show(f"delivered, {strategy}", figures)
                took = await measure_latency(ledger, url, redis, strategy, arguments.messages)
                show(f"from commit to target, {strategy}, ms", took, unit="ms")
            if arguments.history:
                show("a claim of 100 rows", await measure_history(ledger, arguments.history), unit="ms")
        if arguments.peer:
            show("faststream-outbox", measure_peer(arguments.peer, server, arguments.rows))
    print(f"\nload after: {os.getloadavg()[0]:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--history", type=int, default=1_000_000)
    parser.add_argument("--messages", type=int, default=300, help="for the time from commit to target")
    parser.add_argument("--dispatchers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--peer", help="a Python that has faststream-outbox and asyncpg")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    asyncio.run(serve(json.loads(arguments.serve)) if arguments.serve else measure(arguments))


if __name__ == "__main__":
    main()
