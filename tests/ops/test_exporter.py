"""The exporter tells of everything that a server and a ledger hold, also when no worker lives, and when one is away."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from prometheus_client.parser import text_string_to_metric_families

from bullpen import Connection, Job, NewJob, Queue, Worker
from bullpen.errors import JobFailed
from bullpen.ledger import Ledger, tables
from bullpen.ops.exporter import Exporter, LedgerSource, ServerSource, Source
from bullpen.ops.exposition import render
from bullpen.testing import FaultProxy, RedisServer, free_port
from tests.databases import item
from tests.environments import clean_environ

Numbers = dict[tuple[str, frozenset[tuple[str, str]]], float]


def at(name: str, /, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())


def parsed(page: str) -> Numbers:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


@asynccontextmanager
async def exporting(url: str, ledger: Ledger | None = None, timeout_s: float = 5.0) -> AsyncIterator[Exporter]:
    connection = Connection(url)
    sources: list[Source] = [ServerSource(connection, "bull"), *([] if ledger is None else [LedgerSource(ledger)])]
    exporter = Exporter(sources, timeout_s=timeout_s)
    try:
        yield exporter
    finally:
        await exporter.aclose()
        await connection.aclose()


async def numbers(exporter: Exporter) -> Numbers:
    return parsed(render(await exporter.collect()))


async def fail(job: Job) -> None:
    raise ValueError("no")


@pytest.mark.requirement("W-68")
async def test_queues_are_told_of_without_any_worker(redis_url: str) -> None:
    async with Queue("mails", connection=redis_url) as queue, Queue("bills", connection=redis_url) as bills:
        dead = await bills.add("bill", attempts=1)
        async with Worker("bills", fail, connection=redis_url, dead_letters=True):
            with pytest.raises(JobFailed):
                await dead.result(10_000)
        await queue.add_many([("a", {})] * 3)
        await queue.add("b", priority=2)
        await queue.add("c", delay=60_000)
        await bills.pause()

        async with exporting(redis_url) as exporter:
            seen = await numbers(exporter)

    assert seen[at("bullpen_source_up", source="redis")] == 1
    states = {"waiting": 3, "prioritized": 1, "delayed": 1, "active": 0, "waiting_children": 0, "completed": 0}
    for state, count in {**states, "failed": 0}.items():
        assert seen[at("bullpen_queue_jobs", queue="mails", state=state)] == count
    assert 0 < seen[at("bullpen_queue_oldest_waiting_seconds", queue="mails")] < 60
    assert seen[at("bullpen_queue_workers", queue="mails")] == 0
    assert seen[at("bullpen_queue_paused", queue="mails")] == 0
    assert seen[at("bullpen_queue_paused", queue="bills")] == 1
    assert seen[at("bullpen_queue_dead_letters", queue="bills")] == 1
    assert seen[at("bullpen_queue_oldest_waiting_seconds", queue="bills")] == 0
    assert seen[at("bullpen_queue_unreadable", queue="bills")] == 0
    assert not [labels for _, labels in seen if ("queue", "bills-dlq") in labels]


async def test_jobs_that_are_cancelled_before_they_begin_are_counted(redis_url: str) -> None:
    """No worker hears of them: the queue itself counts, whoever cancels and in whatever process."""
    async with Queue("mails", connection=redis_url) as queue:
        waiting, later = await queue.add("a"), await queue.add("b", delay=60_000)
        async with exporting(redis_url) as exporter:
            before = await numbers(exporter)
            await waiting.cancel("enough")
            await later.cancel()
            await later.cancel()
            seen = await numbers(exporter)
        done = at("bullpen_queue_jobs_cancelled_total", queue="mails")
        assert (before[done], seen[done]) == (0, 2)
        assert seen[at("bullpen_queue_jobs", queue="mails", state="failed")] == 2


async def test_lanes_that_hold_jobs_back_are_told_of(redis_url: str) -> None:
    """Else they are among the delayed ones, and nobody knows why they do not run."""
    started = asyncio.Event()

    async def handle(job: Job) -> None:
        started.set()
        await asyncio.Event().wait()

    async with Queue("reports", connection=redis_url) as queue, exporting(redis_url) as exporter:
        await queue.lanes.set(None, concurrency=1)
        for lane in ("acme", "globex"):
            await queue.add_many([NewJob("report", None, {"lane": lane}) for _ in range(4)])
        before = await numbers(exporter)
        async with Worker("reports", handle, connection=redis_url, concurrency=10, close_timeout=0):
            await started.wait()
            seen = await numbers(exporter)

    holding, held = at("bullpen_queue_lanes_holding", queue="reports"), at("bullpen_queue_jobs_held", queue="reports")
    assert (before[holding], before[held]) == (0, 0)
    assert (seen[holding], seen[held]) == (2, 6)
    assert seen[at("bullpen_queue_jobs", queue="reports", state="delayed")] == 6


async def test_keys_of_lanes_that_hold_something_else_hide_no_queue(redis_server: RedisServer, redis_url: str) -> None:
    client: Any = redis_server.client()
    async with Queue("reports", connection=redis_url) as queue, exporting(redis_url) as exporter:
        await queue.add("a")
        client.set("bull:reports:bp:lanes:held", "no set")
        try:
            seen = await numbers(exporter)
        finally:
            client.delete("bull:reports:bp:lanes:held")

    assert seen[at("bullpen_queue_unreadable", queue="reports")] == 0
    assert seen[at("bullpen_queue_lanes_holding", queue="reports")] == 0


async def test_dead_letters_whose_queue_is_gone_are_letters_and_no_queue_without_a_worker(redis_url: str) -> None:
    async with Queue("bills-dlq", connection=redis_url) as letters:
        await letters.add("letter")
        async with exporting(redis_url) as exporter:
            seen = await numbers(exporter)

    assert seen[at("bullpen_queue_dead_letters", queue="bills")] == 1
    assert {name for name, labels in seen if dict(labels).get("queue", "").startswith("bills")} == {
        "bullpen_queue_dead_letters",
        "bullpen_queue_unreadable",
    }


async def test_a_queue_that_cannot_be_read_hides_no_other(redis_url: str, redis_server: RedisServer) -> None:
    client: Any = redis_server.client()
    async with Queue("mails", connection=redis_url) as queue, Queue("broken", connection=redis_url) as broken:
        await queue.add("a")
        await broken.add("a")
        client.set("bull:broken:completed", "no sorted set")
        async with exporting(redis_url) as exporter:
            seen = await numbers(exporter)
        client.delete("bull:broken:completed")

    assert seen[at("bullpen_queue_unreadable", queue="broken")] == 1
    assert at("bullpen_queue_jobs", queue="broken", state="waiting") not in seen
    assert seen[at("bullpen_queue_jobs", queue="mails", state="waiting")] == 1


async def test_a_source_that_is_away_is_a_number_and_hides_no_other(
    redis_url: str, redis_server: RedisServer, ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    with FaultProxy(redis_server) as proxy:
        async with Queue("mails", connection=redis_url) as queue, exporting(proxy.url, ledger, 20.0) as exporter:
            await queue.add("a")
            with proxy.outage():
                before_the_first_look = await numbers(exporter)
            back = await numbers(exporter)
            with proxy.outage():
                away = [await numbers(exporter) for _ in range(2)]
            again = await numbers(exporter)

    for seen in (before_the_first_look, *away):
        assert seen[at("bullpen_source_up", source="redis")] == 0
        assert seen[at("bullpen_source_up", source="ledger")] == 1
        assert at("bullpen_outbox_dead_rows") in seen
        assert at("bullpen_queue_jobs", queue="mails", state="waiting") not in seen
    for seen in (back, again):
        assert seen[at("bullpen_source_up", source="redis")] == 1
        assert seen[at("bullpen_queue_jobs", queue="mails", state="waiting")] == 1
    told = [record.getMessage() for record in caplog.records if record.name == "bullpen.exporter"]
    assert len([line for line in told if line.startswith("redis cannot be read")]) == 2, "once for each outage"


async def test_a_ledger_without_tables_is_away(redis_url: str, tmp_path: Path) -> None:
    async with (
        Ledger(f"sqlite:///{tmp_path / 'empty.sqlite3'}") as ledger,
        exporting(redis_url, ledger) as exporter,
    ):
        first = await numbers(exporter)
        await ledger.migrate()
        second = await numbers(exporter)

    assert first[at("bullpen_source_up", source="ledger")] == 0
    assert first[at("bullpen_source_up", source="redis")] == 1
    assert second[at("bullpen_source_up", source="ledger")] == 1


@pytest.mark.requirement("O-69", "W-68")
async def test_outbox_messages_and_runs_are_told_of(redis_url: str, ledger: Ledger) -> None:
    """From the first scrape on: an alarm on a series that begins with its first failure would never see that one."""
    async with exporting(redis_url, ledger) as exporter:
        empty = await numbers(exporter)
    # A new one: counts of whole tables are kept for a while.
    async with exporting(redis_url, ledger) as exporter:
        await ledger.outbox.bury(item("dead"), "no route", code="PERMANENT", attempts=3)
        await ledger.outbox.enqueue_many([item(name, integration_type=f"sms:{name}") for name in ("lost", "late")])
        await ledger.outbox.claim_due_batch("dies", 1, lease_ms=1_000)
        ledger.database.clock_offset_ms = 3_600_000
        await _insert_due_message(ledger)
        await _insert_run(ledger)
        seen = await numbers(exporter)

    assert empty[at("bullpen_outbox_dead_rows")] == 0
    assert empty[at("bullpen_outbox_expired_claims")] == 0
    assert empty[at("bullpen_messages_unqueued_seconds")] == 0
    assert empty[at("bullpen_messages_unsent_seconds")] == 0
    assert empty[at("bullpen_runs_stuck")] == 0
    assert {at("bullpen_runs", status=status) for status in ("queued", "running", "failed")} <= set(empty)
    assert seen[at("bullpen_outbox_dead_rows")] == 1
    assert seen[at("bullpen_outbox_rows", integration_type="webhook:partnerX", status="dead")] == 1
    assert seen[at("bullpen_outbox_rows", integration_type="webhook:partnerX", status="pending")] == 0
    assert seen[at("bullpen_outbox_oldest_due_seconds", integration_type="webhook:partnerX")] == 0
    assert 3_600 <= seen[at("bullpen_outbox_oldest_due_seconds", integration_type="sms:late")] < 3_700
    assert seen[at("bullpen_outbox_oldest_due_seconds", integration_type="sms:lost")] == 0
    assert seen[at("bullpen_outbox_expired_claims")] == 1
    assert 3_500 <= seen[at("bullpen_messages_unqueued_seconds")] < 3_700
    assert seen[at("bullpen_messages", occasion="birthday", status="created")] == 1
    assert seen[at("bullpen_runs", status="running")] == 1
    assert seen[at("bullpen_runs_stuck")] == 1


async def _insert_due_message(ledger: Ledger) -> None:
    due = datetime.now(UTC)
    text = (
        f"INSERT INTO {ledger.database.table(tables.messages.name)} "
        "(id, recipient_id, occasion, period, channel, zone, local_at, due_at) VALUES "
        f"('{uuid.uuid4()}', 'ada', 'birthday', '2030', 'email', 'UTC', '2030-01-01T09:00', :due)"
    )
    values = {"due": due if ledger.database.is_postgres else int(due.timestamp() * 1000)}
    async with ledger.database.transaction() as connection:
        await connection.execute(sa.text(text), values)


async def _insert_run(ledger: Ledger) -> None:
    text = (
        f"INSERT INTO {ledger.database.table(tables.runs.name)} (id, tenant_id, version_id, payload, status) VALUES "
        f"('{uuid.uuid4()}', 'acme', 'v1', '[]', 'RUNNING')"
    )
    async with ledger.database.transaction() as connection:
        await connection.execute(sa.text(text))


# The command --------------------------------------------------------------------------------------------------------


@contextmanager
def command(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    address = f"127.0.0.1:{free_port()}"
    process = subprocess.Popen(
        [sys.executable, "-m", "bullpen.cli", "exporter", "--http", address, *arguments],
        env=clean_environ(),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "serving http" in line:
                break
        yield process, f"http://{address}"
    finally:
        process.kill()
        process.communicate()


def page(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as answer:
        text: str = answer.read().decode()
        return text


async def test_the_command_serves_until_it_is_told_to_stop(redis_url: str, sqlite_url: str) -> None:
    async with Queue("mails", connection=redis_url) as queue, Queue("x", connection=redis_url, prefix="shop") as other:
        await queue.add("a")
        await other.add("a")
        with command("--redis", redis_url, "--prefix", "shop", "--database", sqlite_url) as (process, url):
            seen = parsed(await asyncio.to_thread(page, f"{url}/metrics"))
            health = await asyncio.to_thread(page, f"{url}/readyz")
            process.send_signal(signal.SIGTERM)
            said = (await asyncio.to_thread(process.communicate, timeout=20))[1]

    assert seen[at("bullpen_queue_jobs", queue="x", state="waiting")] == 1
    assert at("bullpen_queue_jobs", queue="mails", state="waiting") not in seen
    assert seen[at("bullpen_outbox_dead_rows")] == 0
    assert '"ready": true' in health
    assert (process.returncode, "Traceback" in said) == (0, False)


def test_the_command_starts_and_is_ready_while_the_server_is_away() -> None:
    """It is there to tell of that."""
    with command("--redis", "redis://127.0.0.1:1") as (_, url):
        seen, ready = parsed(page(f"{url}/metrics")), page(f"{url}/readyz")

    assert seen[at("bullpen_source_up", source="redis")] == 0
    assert '"ready": true' in ready
