"""How fast scheduled messages are: saved, planned, published with confirms, and sent to a local HTTP server.

    python -m benchmarks.messages [--rows 10000] [--transports bullmq rabbitmq] [--concurrency 50] [--json FILE]

A PostgreSQL of its own with `fsync` off, in memory where there is room; a private Valkey or RabbitMQ node; an HTTP
server in a process of its own. `--rows 1000000` is the long form. Goals: twenty times hundreds of confirmed messages a
second, and twenty times 200 sent a minute. Beside them: half-second messages at prefetch 5 (floor 200 a minute, goal
550), the wait of a message in an idle queue (p99 under 100 ms), and the memory of one sender. Planning and publishing
also tell how the last tenth compares with the first, and how much memory grew meanwhile. On a machine that does other
things only the processor time of this process is worth much: both are printed, with the load.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import logging
import os
import pstats
import resource
import statistics
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self

from bullpen._kernel import telemetry
from bullpen._kernel.backoff import Backoff
from bullpen._kernel.policy import DeadLetterPolicy, RetryPolicy
from bullpen.ledger import Ledger
from bullpen.messages import Messages, MessageStatus, Recipient, SchedulerOptions
from bullpen.plugins.channels.webhook import Webhook
from bullpen.plugins.transports.bullmq import BullMQClient
from bullpen.plugins.transports.rabbitmq import RabbitMQClient, Topology
from bullpen.ports.channel import Accepted, ChannelHealth, Message, SendResult
from bullpen.ports.transport import Delivery
from bullpen.redis import Connection
from bullpen.testing import Child, RedisServer
from bullpen.testing.postgres import PostgresServer
from bullpen.testing.rabbitmq import RabbitServer

ROOT = Path(__file__).resolve().parents[1]
POLICY = RetryPolicy(
    attempts=6,
    backoff=Backoff.exponential(2_000, maximum=32_000),
    retry_owner="broker",
    dead_letters=DeadLetterPolicy(store="queue"),
)
_MOST_SAVED = 100_000
DUE = datetime(2028, 3, 14, 9, tzinfo=UTC)
ZONES = ("UTC", "Africa/Abidjan", "Atlantic/Reykjavik", "Africa/Accra")  # all due in the same minute
SERVER = """
import asyncio
async def answer(reader, writer):
    try:
        while True:
            head = await reader.readuntil(b"\\r\\n\\r\\n")
            length = int(head.lower().split(b"content-length:")[1].split(b"\\r\\n")[0])
            await reader.readexactly(length)
            writer.write(b"HTTP/1.1 200 OK\\r\\ncontent-length: 2\\r\\n\\r\\nok")
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()
async def main():
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print("port", server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
asyncio.run(main())
"""


class Nowhere:
    """A provider that takes everything at once."""

    async def send(self, message: Message) -> SendResult:
        return Accepted()

    async def check(self) -> ChannelHealth:
        return ChannelHealth(True)

    async def aclose(self) -> None: ...


class Slow:
    """A provider that takes half a second."""

    async def send(self, message: Message) -> SendResult:
        await asyncio.sleep(0.5)
        return Accepted()

    async def check(self) -> ChannelHealth:
        return ChannelHealth(True)

    async def aclose(self) -> None: ...


def set_clock(ledger: Ledger, instant: datetime) -> None:
    ledger.database.clock_offset_ms = round((instant - datetime.now(UTC)).total_seconds() * 1000)


def people(first: int, count: int, channel: str) -> list[Recipient]:
    return [
        Recipient(
            id=f"p{number}",
            name=f"Person {number}",
            zone=ZONES[number % len(ZONES)],
            channel=channel,
            address=f"p{number}@example.com",
            occasions={"birthday": "1990-03-14"},
        )
        for number in range(first, first + count)
    ]


async def rate(
    count: int, work: Callable[[], Awaitable[Any]], found: dict[str, float] | None = None, name: str = ""
) -> float:
    """How many per second by the clock; into `found` also the processor time of this process for each."""
    began, cpu = time.perf_counter(), time.process_time()
    await work()
    per_second = count / (time.perf_counter() - began)
    if found is not None:
        found[f"{name} per second"] = per_second
        found[f"{name}, processor ms each"] = (time.process_time() - cpu) * 1000 / count
    return per_second


class Course:
    """How something went on: when how many were done, and the memory then."""

    def __init__(self, event: str, field: str) -> None:
        self._event, self._field = event, field
        self._points: list[tuple[float, int, float]] = []

    def __enter__(self) -> Self:
        self._points = [(time.perf_counter(), 0, rss_mb())]
        self._forget = telemetry.subscribe(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._forget()

    def _note(self, event: str, fields: dict[str, Any]) -> None:
        if event == self._event:
            before = self._points[-1][1]
            done = before + fields[self._field]
            self._points.append((time.perf_counter(), done, rss_mb()))
            show(f"{event} {done}")
            if done // _MOST_SAVED > before // _MOST_SAVED:  # a long run that is cut short leaves what it had found
                elapsed_s = time.perf_counter() - self._points[0][0]
                logging.getLogger("benchmarks").warning(
                    "%s: %d after %.0f s, %.0f MB", event, done, elapsed_s, rss_mb()
                )

    def tell(self, found: dict[str, float], name: str) -> None:
        if len(self._points) < 21:
            return  # too few batches to compare
        tenth = len(self._points) // 10
        first, last = self._points[: tenth + 1], self._points[-tenth - 1 :]
        for part, points in (("first tenth", first), ("last tenth", last)):
            found[f"{name} per second, {part}"] = (points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0])
        found[f"{name}, memory from first to last tenth, MB"] = last[-1][2] - first[-1][2]


def rss_mb() -> float:
    with open("/proc/self/statm") as status:
        return int(status.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@asynccontextmanager
async def client_of(transport: str, address: str, concurrency: int) -> AsyncIterator[tuple[Any, str]]:
    if transport == "rabbitmq":
        base = f"bench-{uuid.uuid4().hex[:6]}"
        topology = Topology.scheduled_messages(
            exchange_name=base,
            dlx_name=f"{base}.dlx",
            queue_name=f"{base}.queue",
            dlq_name=f"{base}.dlq",
            max_length=2_000_000,
        )
        yield (
            RabbitMQClient.for_scheduled_messages(address, topology=topology, concurrency=concurrency),
            f"{base}.queue",
        )
        return
    connection = Connection(address)
    try:
        yield BullMQClient(connection, policy=POLICY, concurrency=concurrency), "birthday.messages.queue"
    finally:
        await connection.aclose()


async def save(messages: Messages, rows: int, channel: str) -> None:
    for first in range(0, rows, 5_000):
        await messages.recipients.save_many(people(first, min(5_000, rows - first), channel))
        show(f"saved {min(first + 5_000, rows)} of {rows}")


async def copy_people(ledger: Ledger, times: int) -> None:
    """So many of each, made by the database: saving a million one by one is not what is measured."""
    database = ledger.database
    for table, key in (("bullpen_recipients", "id"), ("bullpen_occasions", "recipient_id")):
        async with database.engine.begin() as connection:
            name = database.table(table)
            rows = await connection.exec_driver_sql(f"SELECT * FROM {name} LIMIT 0")
            columns = list(rows.keys())
            copied = ", ".join(f"{key} || '-' || copy" if column == key else column for column in columns)
            target = f"{name} ({', '.join(columns)})"
            await connection.exec_driver_sql(
                f"INSERT INTO {target} SELECT {copied} FROM {name}, generate_series(2, {times}) copy"
            )
    async with database.engine.connect() as plain:
        free = await plain.execution_options(isolation_level="AUTOCOMMIT")
        await free.exec_driver_sql("ANALYZE")


async def count_sent(ledger: Ledger, wanted: int) -> None:
    """Wait until so many rows are settled, by what senders of this process tell."""
    done, finished = 0, asyncio.Event()

    def listen(event: str, fields: dict[str, Any]) -> None:
        nonlocal done
        if event == "messages.settled" and fields["status"] == MessageStatus.SENT:
            done += 1
            if done >= wanted:
                finished.set()

    forget = telemetry.subscribe(listen)
    try:
        await finished.wait()
    finally:
        forget()


async def measure(
    transport: str, address: str, database: str, rows: int, concurrency: int, profile: Path | None
) -> dict[str, float]:
    found: dict[str, float] = {}
    async with Ledger(database) as ledger, client_of(transport, address, concurrency) as (client, queue):
        messages = Messages(
            ledger, client, queue=queue, concurrency=concurrency, scheduler=SchedulerOptions(batch=2_000)
        )
        server = Child.code(SERVER)
        port = int(server.wait_for("port").split()[-1])
        hook = Webhook(f"http://127.0.0.1:{port}/", body="payload", allow_http=True, allowed_networks=["127.0.0.0/8"])
        messages.channel("hook", hook, after_crash="same_key")
        messages.channel("nowhere", Nowhere(), after_crash="same_key")
        set_clock(ledger, DUE - timedelta(days=1))
        saved = min(rows, _MOST_SAVED)
        await rate(saved, lambda: save(messages, saved, "hook"), found, "recipients saved")
        await copy_people(ledger, rows // saved)
        with Course("messages.planned", "created") as course:
            await rate(rows, messages.planner().run_until_done, found, "messages planned")
        course.tell(found, "messages planned")
        set_clock(ledger, DUE)
        enqueuer = messages.enqueuer()
        await client.is_healthy()  # connected, and the topology declared
        with Course("messages.published", "count") as course:
            await rate(rows, enqueuer.run_once, found, "messages published and confirmed")
        course.tell(found, "messages published")
        sent = min(rows, 5_000)
        waiting = asyncio.create_task(count_sent(ledger, sent))
        sender = messages.sender()
        await asyncio.sleep(0)

        async def send() -> None:
            await sender.start()
            await waiting

        await rate(sent, send, found, "messages sent over HTTP")
        await sender.close()
        await measure_sending(ledger, messages, rows, found, profile)
        await messages.aclose()
        server.close()
    return found


async def measure_sending(
    ledger: Ledger, messages: Messages, rows: int, found: dict[str, float], profile: Path | None
) -> None:
    """To a provider that does nothing: what sending costs by itself."""
    sent = min(rows, 5_000)
    set_clock(ledger, DUE - timedelta(days=1))
    await messages.recipients.save_many(people(rows, sent, "nowhere"))
    await messages.planner().run_until_done()
    set_clock(ledger, DUE)
    await messages.enqueuer().run_once()
    waiting = asyncio.create_task(count_sent(ledger, sent))
    sender = messages.sender()
    await asyncio.sleep(0)
    profiler = cProfile.Profile()

    async def send() -> None:
        await sender.start()
        if profile is not None:
            profiler.enable()
        await waiting

    await rate(sent, send, found, "messages sent nowhere")
    if profile is not None:
        profiler.disable()
        pstats.Stats(profiler).dump_stats(profile)
    await sender.close()


async def measure_prefetch(transport: str, address: str, database: str) -> dict[str, float]:
    """Half-second messages at prefetch 5, and the wait on an idle queue."""
    waits: list[int] = []
    async with Ledger(database) as ledger, client_of(transport, address, 5) as (client, queue):
        messages = Messages(ledger, client, queue=f"{queue}" if transport == "rabbitmq" else "slow", concurrency=5)
        messages.channel("slow", Slow(), after_crash="same_key")
        set_clock(ledger, DUE + timedelta(days=350))
        await messages.recipients.save_many(people(10_000_000, 50, "slow"))
        set_clock(ledger, DUE + timedelta(days=364))
        await messages.planner().run_until_done()
        set_clock(ledger, DUE + timedelta(days=365))
        await messages.enqueuer().run_once()
        waiting = asyncio.create_task(count_sent(ledger, 50))
        sender = messages.sender()
        await asyncio.sleep(0)

        async def send() -> None:
            await sender.start()
            await waiting

        per_minute = 60 * await rate(50, send)
        await sender.close()

        consumed = asyncio.Event()

        async def note(delivery: Delivery) -> None:
            # On a broker that was too slow to confirm, orders above were published twice, and the second copies may
            # still be here: they have waited for the senders, not for us.
            if delivery.urn.startswith("urn:idle:"):
                waits.append(delivery.waited_ms or 0)
                consumed.set()

        idle = await client.consume(queue if transport == "rabbitmq" else "idle", note)
        for number in range(100):
            consumed.clear()
            await client.produce(
                queue if transport == "rabbitmq" else "idle", "birthday", {"urn": f"urn:idle:{number}", "payload": {}}
            )
            await consumed.wait()
        await idle.close()
        await messages.aclose()
    p99 = statistics.quantiles(waits, n=100)[98] if len(waits) > 1 else float("nan")
    return {"half-second messages per minute at prefetch 5": per_minute, "wait on an idle queue, p99 ms": p99}


SENDER = """
import asyncio, sys
from bullpen.ledger import Ledger
from bullpen.messages import Messages
from bullpen.ports.channel import Message
async def main():
    transport, address, database, queue = sys.argv[1:]
    if transport == "rabbitmq":
        from bullpen.plugins.transports.rabbitmq import RabbitMQClient, Topology
        names = {"exchange_name": queue, "dlx_name": queue + ".dlx", "queue_name": queue, "dlq_name": queue + ".dlq"}
        client = RabbitMQClient.for_scheduled_messages(address, topology=Topology.scheduled_messages(**names))
    else:
        from bullpen.plugins.transports.bullmq import BullMQClient
        client = BullMQClient(address, concurrency=5)
    ledger = Ledger(database)
    await ledger.check()
    messages = Messages(ledger, client, queue=queue, concurrency=5)
    @messages.channel("slow", after_crash="same_key")
    async def send(message: Message) -> None: ...
    sender = messages.sender()
    await sender.start()
    await messages.health()
    await client.is_healthy()
    with open("/proc/self/status") as status:
        told = dict(line.split(":") for line in status)
    print("loaded", *sorted({name.partition(".")[0] for name in sys.modules}), flush=True)
    print("rss", int(told["VmRSS"].split()[0]) / 1024, int(told["RssAnon"].split()[0]) / 1024, flush=True)
    await messages.aclose()
    await ledger.aclose()
asyncio.run(main())
"""


def memory_mb(transport: str, address: str, database: str) -> tuple[float, float]:
    """Resident memory of a sender with its connections, and the part of it that no other process can share."""
    child = Child.code(SENDER, transport, address, database, f"memory-{uuid.uuid4().hex[:6]}", cwd=ROOT)
    try:
        resident, own = map(float, child.wait_for("rss", timeout=120).split()[-2:])
        return resident, own
    finally:
        child.close()


def show(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


async def run(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    results: dict[str, dict[str, float]] = {}
    with PostgresServer.start(args=("max_connections=100",)) as postgres:
        for transport in options.transports:
            name = postgres.create_database()
            database = postgres.url(name)
            async with Ledger(database) as ledger:
                await ledger.migrate()
            server: Any = RabbitServer.start() if transport == "rabbitmq" else RedisServer.start()
            try:
                found = await measure(
                    transport, server.url, database, options.rows, options.concurrency, options.profile
                )
                if not options.only_bulk:
                    database = postgres.url(postgres.create_database())
                    async with Ledger(database) as ledger:
                        await ledger.migrate()
                    found |= await measure_prefetch(transport, server.url, database)
                    resident, own = await asyncio.to_thread(memory_mb, transport, server.url, database)
                    found["memory of one sender, MB"] = resident
                    found["of which its own, MB"] = own
            finally:
                server.close()
            results[transport] = found
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--transports", nargs="+", default=["bullmq", "rabbitmq"], choices=["bullmq", "rabbitmq"])
    parser.add_argument("--concurrency", type=int, default=50, help="deliveries a sender handles at a time")
    parser.add_argument("--profile", type=Path, help="where the profile of a sender goes")
    parser.add_argument("--only-bulk", action="store_true", help="leave out prefetch, wait and memory")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    load = os.getloadavg()[0]
    results = asyncio.run(run(options))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"\n{options.rows} messages, load {load:.1f} at the beginning, {peak:.0f} MB at most in the measuring process\n"
    )
    for transport, figures in results.items():
        print(transport)
        for name, value in figures.items():
            print(f"  {name:<50} {value:>12,.2f}")
    if options.json:
        options.json.write_text(json.dumps({"rows": options.rows, "load": load, "results": results}, indent=2))


if __name__ == "__main__":
    main()
