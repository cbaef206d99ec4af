"""How fast the outbox is beside a loop of twelve lines: rows stored, claimed and delivered per second, one ordered key,
the time from a commit to the target, what a long history costs, bytes per delivered row.

    python -m benchmarks.outbox [--rows 50000] [--history 1000000] [--processes 1 2] [--rounds 1] [--only PART ...]
        [--memory] [--peer PYTHON]

A PostgreSQL of its own on disk with its default settings and `fsync` on (`--memory`: off, and in memory), and a SQLite
file. A target does nothing. The loop claims 100 rows by SKIP LOCKED and marks 100: once on a bare table with the same
content and one index, once on the outbox's own table with its indexes and triggers. It has no order, no attempts, no
tenants, no leases that end, and calls no target. *Direct* and *queued* with one process are one process that does
everything (for queued: dispatcher and workers). `--peer` is a Python that has faststream-outbox and asyncpg; it stores
and handles the same rows. Figures of a machine that does other things meanwhile are worth little, ratios of one run
more: the load is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import pstats
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from bullpen.ledger import Lane, Ledger, OutboxItem
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


def items(count: int, first: int = 0, *, prefix: str = "e", ordering_key: str | None = None) -> list[OutboxItem]:
    return [
        OutboxItem(
            integration_type="nowhere:x",
            event_type="order.paid.v1",
            payload={"orderId": number, "text": "x" * 100},
            source_stream_id="order",
            source_event_id=f"{prefix}{number}",
            tenant_id=f"tenant-{number % 20}",
            ordering_key=ordering_key,
        )
        for number in range(first, first + count)
    ]


async def rate(count: int, work: Callable[[], Awaitable[Any]]) -> float:
    began = time.perf_counter()
    await work()
    return count / (time.perf_counter() - began)


async def fill(ledger: Ledger, count: int, *, ordering_key: str | None = None) -> None:
    for first in range(0, count, 1_000):
        await ledger.outbox.enqueue_many(items(min(1_000, count - first), first, ordering_key=ordering_key))


async def empty(ledger: Ledger) -> None:
    async with ledger.database.transaction() as connection:
        if ledger.database.is_postgres:
            await connection.exec_driver_sql("TRUNCATE core_outbox.integration_outbox CASCADE")
        else:
            await connection.exec_driver_sql("DELETE FROM integration_outbox")


async def vacuum(ledger: Ledger, table: str = "core_outbox.integration_outbox") -> None:
    if ledger.database.is_postgres:
        async with ledger.database.engine.connect() as connection:
            free = await connection.execution_options(isolation_level="AUTOCOMMIT")
            await free.exec_driver_sql(f"VACUUM ANALYZE {table}")


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

LOOP = """
import sys, psycopg
table, order = sys.argv[2:]
with psycopg.connect(sys.argv[1], autocommit=True) as db:
    print("ready", flush=True)
    sys.stdin.readline()
    while True:
        rows = db.execute(
            f"UPDATE {table} SET status = 'CLAIMED', locked_until = now() + interval '60 s' WHERE id IN (SELECT id FROM"
            f" {table} WHERE status = 'PENDING' ORDER BY {order} LIMIT 100 FOR UPDATE SKIP LOCKED)"
            " RETURNING id, payload::text, headers::text"
        ).fetchall()
        ids = [row[0] for row in rows]
        db.execute(f"UPDATE {table} SET status = 'SENT', sent_at = now() WHERE id = ANY(%s)", (ids,))
        if not rows:
            break
print("done", flush=True)
sys.stdin.readline()
"""

_BARE_TABLE = """
DROP TABLE IF EXISTS bare;
CREATE TABLE bare (id bigserial PRIMARY KEY, source text, tenant_id text, payload jsonb, headers jsonb,
    status text NOT NULL DEFAULT 'PENDING', created_at timestamptz DEFAULT now(), locked_until timestamptz,
    sent_at timestamptz);
CREATE INDEX ON bare (id) WHERE status = 'PENDING'
"""


async def serve(order: dict[str, Any]) -> None:
    """Dispatcher, workers or both, in a process of their own."""
    ledger = Ledger(order["database"])
    connection = Connection(order["redis"]) if order["redis"] else None
    channel = Nowhere(order.get("stamps"))
    route = Route(channel=channel, strategy=order["strategy"], concurrency=order["concurrency"])
    outbox = Outbox(
        ledger, {"nowhere:x": route}, connection=connection, options=DispatcherOptions(claim_batch_size=200)
    )
    services: list[Any] = [outbox.dispatcher()]
    if order["strategy"] == "queued":
        services.append(outbox.workers())
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    profile = cProfile.Profile() if order.get("profile") else None
    for service in services:
        await service.start()
    if profile is not None:
        profile.enable()
    await asyncio.to_thread(sys.stdin.readline)
    if profile is not None:
        profile.disable()
        pstats.Stats(profile).dump_stats(order["profile"])
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(f"cpu {used.ru_utime + used.ru_stime:.3f}", flush=True)
    os._exit(0)


_TICK = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """Of a process, of those it started, and of those of them that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / _TICK + sum(cpu_seconds(int(child)) for child in children)


class Cpu:
    """Microseconds of a processor per row, of all that work on it: other programs on the machine change this less than
    they change rates. What processes needed to start is not counted."""

    def __init__(self, servers: list[int], clients: list[int]) -> None:
        self._pids = (servers, clients)
        self._before = self._used()
        self.per_row, self.of_clients = 0.0, 0.0

    def _used(self) -> list[float]:
        return [sum(map(cpu_seconds, pids)) for pids in self._pids]

    def note(self, rows: int) -> None:
        servers, clients = (now - before for now, before in zip(self._used(), self._before, strict=True))
        self.per_row, self.of_clients = (servers + clients) / rows * 1e6, clients / rows * 1e6


async def measure_loop(
    ledger: Ledger, url: str, rows: int, count: int, servers: list[int], *, bare: bool
) -> tuple[float, Cpu]:
    table, order = ("bare", "id") if bare else ("core_outbox.integration_outbox", "due_at, seq")
    if bare:
        async with ledger.database.engine.begin() as connection:
            for statement in _BARE_TABLE.split(";"):
                await connection.exec_driver_sql(statement)
            await connection.exec_driver_sql(
                "INSERT INTO bare (source, tenant_id, payload, headers) "
                "SELECT 'order/e' || n, 'tenant-' || mod(n, 20), "
                "jsonb_build_object('orderId', n, 'text', repeat('x', 100)), "
                f"jsonb_build_object('idempotencyKey', 'e' || n) FROM generate_series(1, {rows}) n"
            )
    else:
        await empty(ledger)
        await fill(ledger, rows)
    await vacuum(ledger, table)
    children = [Child.code(LOOP, url, table, order) for _ in range(count)]
    try:
        for child in children:
            await asyncio.to_thread(child.wait_for, "ready")
        cpu = Cpu(servers, [child.pid for child in children])
        began = time.perf_counter()
        for child in children:
            child.send_line("go")
        for child in children:
            await asyncio.to_thread(child.wait_for, "done", 600)
        took = time.perf_counter() - began
        cpu.note(rows)
        return rows / took, cpu
    finally:
        for child in children:
            child.close()


async def measure_delivering(
    ledger: Ledger,
    url: str,
    redis: RedisServer,
    rows: int,
    strategy: str,
    count: int,
    *,
    ordering_key: str | None = None,
    profile: str | None = None,
    limit_s: float = 600,
    servers: list[int] | None = None,
) -> tuple[float, Cpu]:
    await empty(ledger)
    redis.flush()
    await fill(ledger, rows, ordering_key=ordering_key)
    await vacuum(ledger)
    order = {
        "database": url,
        "redis": redis.url if strategy == "queued" else None,
        "strategy": strategy,
        "concurrency": 200,
        "profile": profile,
    }
    children: list[Child] = []
    try:
        children += [Child.module("benchmarks.outbox", "--serve", json.dumps(order), cwd=ROOT) for _ in range(count)]
        for child in children:
            await asyncio.to_thread(child.wait_for, "ready")
        cpu = Cpu(servers or [], [child.pid for child in children])
        began = time.perf_counter()
        for child in children:
            child.send_line("go")
        left = rows
        while left and time.perf_counter() - began < limit_s:
            await asyncio.sleep(0.1)
            left = sum((await ledger.outbox.counts()).values())
        took = time.perf_counter() - began
        cpu.note(rows)
        for child in children:
            child.send_line("stop")
        for child in children:
            await asyncio.to_thread(child.wait_for, "cpu")
        if not left:
            await check_sent(ledger, rows)
    finally:
        for child in children:
            child.close()
    return (rows - left) / took, cpu


async def check_sent(ledger: Ledger, rows: int) -> None:
    async with ledger.database.statement(reads=True) as connection:
        table = ledger.database.table("integration_outbox")
        found = await connection.exec_driver_sql(f"SELECT count(*) FROM {table} WHERE status = 'SENT' AND attempts = 0")
        assert found.scalar() == rows


async def bytes_per_row(ledger: Ledger, rows: int) -> dict[str, float]:
    """Of what has just been delivered, without vacuum: tables and indexes as deliveries left them."""
    async with ledger.database.engine.connect() as connection:
        found = (
            await connection.exec_driver_sql(
                "SELECT pg_table_size('core_outbox.integration_outbox'), (SELECT sum(pg_relation_size(i.indexrelid)) "
                "FROM pg_index i WHERE i.indrelid = 'core_outbox.integration_outbox'::regclass), "
                "pg_total_relation_size('core_outbox.integration_outbox_attempts'), (SELECT sum(pg_relation_size("
                "i.indexrelid)) FROM pg_index i WHERE i.indrelid = 'core_outbox.integration_outbox'::regclass "
                "AND pg_get_expr(i.indpred, i.indrelid) LIKE '%%PENDING%%'), "
                "(SELECT n_tup_hot_upd::float / greatest(n_tup_upd, 1) FROM pg_stat_user_tables "
                "WHERE relname = 'integration_outbox')"
            )
        ).one()
    names = ("table", "its indexes", "attempts with indexes", "indexes of claims")
    figures = {f"{name}, bytes per row": float(size or 0) / rows for name, size in zip(names, found, strict=False)}
    return {**figures, "updates that are HOT": float(found[-1] or 0)}


# From the commit to the target --------------------------------------------------------------------------------------


async def measure_latency(
    ledger: Ledger, url: str, redis: RedisServer, strategy: str, count: int, per_second: int = 200
) -> dict[str, float]:
    """Milliseconds from a commit to its target at a steady rate. The clock is the machine's."""
    await empty(ledger)
    redis.flush()
    with tempfile.TemporaryDirectory(prefix="bullpen-") as directory:
        stamps = Path(directory) / "stamps"
        order = {
            "database": url,
            "redis": redis.url if strategy == "queued" else None,
            "strategy": strategy,
            "stamps": str(stamps),
            "concurrency": 20,
        }
        child = Child.module("benchmarks.outbox", "--serve", json.dumps(order), cwd=ROOT)
        committed: dict[str, float] = {}
        try:
            await asyncio.to_thread(child.wait_for, "ready")
            child.send_line("go")
            warm_up, wanted = 100, items(count + 100)
            begin = time.monotonic()

            async def store(number: int, item: OutboxItem) -> None:
                async with ledger.database.transaction() as connection:
                    stored = await ledger.enqueuer.enqueue(connection, item)
                if number >= warm_up:  # the first ones find connections that are not open yet
                    committed[str(stored.id)] = time.monotonic()

            async with asyncio.TaskGroup() as tasks:
                for number, item in enumerate(wanted):
                    await asyncio.sleep(max(0.0, begin + number / per_second - time.monotonic()))
                    tasks.create_task(store(number, item))
            while sum((await ledger.outbox.counts()).values()):  # noqa: ASYNC110 - the database tells nobody
                await asyncio.sleep(0.02)
        finally:
            child.close()
        arrived = dict(line.split() for line in stamps.read_text().splitlines())
    took = sorted(max(0.0, float(arrived[row_id]) - at) * 1000 for row_id, at in committed.items())
    return {"p50": statistics.median(took), "p99": took[len(took) * 99 // 100], "slowest": took[-1]}


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


PARTS = ("storing", "claiming", "delivering", "ordered", "latency", "history", "sqlite", "peer")


async def measure(arguments: argparse.Namespace) -> None:
    print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
    wanted = set(arguments.only or PARTS)
    with (
        PostgresServer.start(
            durable=not arguments.memory, args=("max_connections=200",), place=None if arguments.memory else "/var/tmp"
        ) as server,
        RedisServer.start() as redis,
    ):
        url = server.url()
        async with Ledger(url, pool_size=10) as ledger:
            await ledger.migrate()
            if "storing" in wanted:
                show("stored", await measure_storing(ledger, min(arguments.rows, 10_000)))
            if "claiming" in wanted:
                show("claimed", {"100 per claim": await measure_claiming(ledger, min(arguments.rows, 10_000))})
            if "delivering" in wanted:
                await compare(ledger, url, redis, arguments, [server.pid, redis.pid])
            if "ordered" in wanted:
                for strategy in arguments.strategies:
                    found, cpu = await measure_delivering(
                        ledger, url, redis, 2_000, strategy, 1, ordering_key="k", limit_s=20, servers=[server.pid]
                    )
                    show(f"one ordered key, {strategy}", {"1 process": found})
                    spent = {"with the database": cpu.per_row, "client alone": cpu.of_clients}
                    show("processor time per row, us", spent, unit="us")
            if "latency" in wanted:
                for strategy in arguments.strategies:
                    took = await measure_latency(ledger, url, redis, strategy, arguments.messages)
                    show(f"from commit to target at 200 rows/s, {strategy}, ms", took, unit="ms")
            if "history" in wanted:
                show("a claim of 100 rows", await measure_history(ledger, arguments.history), unit="ms")
        if "sqlite" in wanted:
            await compare_sqlite(redis, arguments)
        if arguments.peer and "peer" in wanted:
            show("faststream-outbox", measure_peer(arguments.peer, server, arguments.rows))
    print(f"\nload after: {os.getloadavg()[0]:.1f}")


async def compare(
    ledger: Ledger, url: str, redis: RedisServer, arguments: argparse.Namespace, servers: list[int]
) -> None:
    """Loops, direct and queued by turns, and their ratios: of rates, and of processor time over all processes."""
    for count in arguments.processes:
        names = ("loop, bare table", "loop, our table", *arguments.strategies)
        rates: dict[str, list[float]] = {name: [] for name in names}
        costs: dict[str, list[float]] = {name: [] for name in names}
        ours: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(arguments.rounds):
            for name in names:
                if name.startswith("loop"):
                    found = await measure_loop(ledger, url, arguments.rows, count, servers, bare=name == names[0])
                else:
                    profile = f"{arguments.profile}.{name}" if arguments.profile and count == 1 else None
                    found = await measure_delivering(
                        ledger, url, redis, arguments.rows, name, count, profile=profile, servers=servers
                    )
                rates[name].append(found[0])
                costs[name].append(found[1].per_row)
                ours[name].append(found[1].of_clients)
                if count == 1 and name == "direct":
                    sizes = await bytes_per_row(ledger, arguments.rows)
        figures = {name: statistics.median(values) for name, values in rates.items()}
        cost = {name: statistics.median(values) for name, values in costs.items()}
        show(f"delivered, {count} process{'es' if count > 1 else ''}, load {os.getloadavg()[0]:.1f}", figures)
        show("processor time of all processes per row, us", cost, unit="us")
        show("of which clients", {name: statistics.median(values) for name, values in ours.items()}, unit="us")
        for loop in names[:2]:
            show(f"rate, of the {loop}", {name: figures[name] / figures[loop] for name in names[2:]}, unit="x")
            show(f"rows per processor time, of the {loop}", {n: cost[loop] / cost[n] for n in names[2:]}, unit="x")
        if count == 1 and "direct" in arguments.strategies:
            show("after direct delivery", sizes, unit="bytes")


async def compare_sqlite(redis: RedisServer, arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="bullpen-") as directory:
        url = f"sqlite:///{directory}/ledger.db"
        async with Ledger(url) as ledger:
            await ledger.migrate()
            rows = min(arguments.rows, 10_000)
            found = {
                strategy: await measure_delivering(ledger, url, redis, rows, strategy, 1)
                for strategy in arguments.strategies
            }
            show(f"delivered on SQLite, {rows} rows", {name: figure for name, (figure, _) in found.items()})
            show("processor time per row, us", {name: cpu.per_row for name, (_, cpu) in found.items()}, unit="us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--history", type=int, default=1_000_000)
    parser.add_argument("--messages", type=int, default=2_000, help="for the time from commit to target")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--strategies", nargs="+", default=["direct", "queued"], choices=["direct", "queued"])
    parser.add_argument("--only", nargs="+", choices=PARTS)
    parser.add_argument("--memory", action="store_true", help="without fsync")
    parser.add_argument("--profile", help="where profiles of one process go: PROFILE.direct, PROFILE.queued")
    parser.add_argument("--peer", help="a Python that has faststream-outbox and asyncpg")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    asyncio.run(serve(json.loads(arguments.serve)) if arguments.serve else measure(arguments))


if __name__ == "__main__":
    main()
