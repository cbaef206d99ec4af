"""The numbers of queues and workers: counted from what happened, and readable by Prometheus."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bullpen import Bullpen, Job
from bullpen._kernel import telemetry
from bullpen._kernel.histogram import Histogram
from bullpen.errors import DelayJob, JobCancelled, JobFailed
from bullpen.ops.exposition import render
from bullpen.ops.metrics import MOST_NAMES
from bullpen.plugins.channels.queue import QueueChannel
from bullpen.ports.metrics import Metric, Sample
from bullpen.settings import Settings
from bullpen.testing import FaultProxy, RedisServer
from bullpen.wire.records import JobRecord
from tests.databases import item


@asynccontextmanager
async def running(app: Bullpen) -> AsyncIterator[None]:
    run = asyncio.create_task(app.run(signals=False))
    try:
        yield
    finally:
        await app.stop()
        await run


async def numbers(app: Bullpen) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """The page as a Prometheus server would read it."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(render(await app.metrics()))
        for sample in family.samples
    }


def at(name: str, /, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())


async def test_two_runs_of_a_job_that_overlap_in_the_telling_are_both_timed(redis_url: str) -> None:
    """Another connection may bring the next run of a job before the outcome of the last is confirmed."""
    app = Bullpen(redis_url)
    app.observe()
    job = await app.queue("mails").add("unsure")
    runs = [Job(job.actions, JobRecord.parse(job.id, {**job.record.fields(), b"ats": b"%d" % ats})) for ats in (1, 2)]

    for event, run in (("active", 0), ("active", 1), ("retrying", 0), ("completed", 1)):
        telemetry.emit(f"job.{event}", queue="mails", details=(runs[run],))
    seen = await numbers(app)
    await app.stop()

    assert seen[at("bullpen_job_duration_seconds_count", queue="mails")] == 2


async def test_a_cancelled_job_is_no_failure_of_an_alarm(redis_url: str) -> None:
    """Whoever cancels a hundred jobs must not be woken because a hundred failed."""
    app = Bullpen(redis_url)
    app.observe()
    queue, held, told = app.queue("mails"), asyncio.Event(), asyncio.Event()

    @app.handler("mails")
    async def handle(job: Job) -> None:
        held.set()
        await asyncio.Event().wait()

    async with running(app):
        job = await queue.add("long")
        await held.wait()
        before = await numbers(app)
        stop_telling = telemetry.subscribe(lambda event, _: told.set() if event == "job.failed" else None)
        await queue.cancel(job.id, "no need")
        with pytest.raises(JobCancelled):
            await job.result(timeout=20_000)
        async with asyncio.timeout(20):  # the result may be known before the worker has heard that it is stored
            await told.wait()
        seen = await numbers(app)
    stop_telling()

    assert before[at("bullpen_jobs_cancelled_total", queue="mails")] == 0
    assert seen[at("bullpen_jobs_cancelled_total", queue="mails")] == 1
    assert seen[at("bullpen_jobs_failed_total", queue="mails")] == 0
    assert seen[at("bullpen_named_jobs_total", queue="mails", name="long", outcome="cancelled")] == 1


@pytest.mark.requirement("W-68", "W-82", "X-25", "X-42")
async def test_what_workers_do_and_what_queues_hold(redis_url: str) -> None:
    app = Bullpen(redis_url)
    app.observe()
    app.observe()
    queue = app.queue("mails", attempts=2, backoff=1)
    hold, held = asyncio.Event(), asyncio.Event()

    @app.handler("mails", concurrency=4, dead_letters=True)
    async def handle(job: Job) -> None:
        match job.name:
            case "bad":
                raise ValueError("no such address")
            case "unsure" if job.attempts_made == 0:
                raise OSError("away")
            case "later" if job.attempts_started == 1:
                raise DelayJob(1)
            case "long":
                held.set()
                await hold.wait()

    async with running(app):
        for name in ("good", "unsure", "later"):
            await (await queue.add(name)).result(timeout=20_000)
        bad = await queue.add("bad")
        with pytest.raises(Exception, match="no such address"):
            await bad.result(timeout=20_000)
        await queue.add("long")
        await held.wait()
        await queue.add("future", delay=600_000)
        seen = await numbers(app)
        hold.set()

    assert seen[at("bullpen_jobs_completed_total", queue="mails")] == 3
    assert seen[at("bullpen_jobs_failed_total", queue="mails")] == 1
    assert seen[at("bullpen_jobs_retried_total", queue="mails")] == 2
    assert seen[at("bullpen_jobs_returned_total", queue="mails")] == 1
    assert seen[at("bullpen_job_duration_seconds_count", queue="mails")] == 7
    assert seen[at("bullpen_job_wait_seconds_count", queue="mails")] >= 5
    assert seen[at("bullpen_job_retries_count", queue="mails")] == 4
    assert seen[at("bullpen_job_retries_bucket", queue="mails", le="0")] == 2
    assert seen[at("bullpen_worker_running_jobs", queue="mails")] == 1
    assert seen[at("bullpen_worker_utilisation", queue="mails")] == 0.25
    assert seen[at("bullpen_worker_concurrency", queue="mails")] == 4
    assert seen[at("bullpen_worker_alive", queue="mails")] == 1
    assert seen[at("bullpen_queue_jobs", queue="mails", state="active")] == 1
    assert seen[at("bullpen_queue_jobs", queue="mails", state="delayed")] == 1
    assert seen[at("bullpen_queue_jobs", queue="mails", state="completed")] == 3
    assert seen[at("bullpen_queue_dead_letters", queue="mails")] == 1
    assert seen[at("bullpen_redis_up", queue="mails")] == 1
    assert seen[at("bullpen_late_wakeups_total", where="worker")] == telemetry.late_wakeups().get("worker", 0)
    assert at("bullpen_late_wakeups_total", where="dispatcher") in seen  # from the first scrape on


async def test_the_age_of_the_next_job_is_the_servers(redis_url: str, redis_server: RedisServer) -> None:
    app = Bullpen(redis_url)
    app.observe()
    queue = app.queue("mails")
    assert (await numbers(app))[at("bullpen_queue_oldest_waiting_seconds", queue="mails")] == 0
    await queue.add("new", priority=5)
    job = await queue.add("old")
    client: Any = redis_server.client()
    client.hset(f"bull:mails:{job.id}", "timestamp", job.timestamp - 3_600_000)

    age = (await numbers(app))[at("bullpen_queue_oldest_waiting_seconds", queue="mails")]

    assert 3_600 <= age < 3_700
    assert await queue.oldest_age_ms() is not None
    await app.aclose()


@pytest.mark.requirement("W-68")
async def test_a_server_that_is_away_is_a_number_and_hides_nothing_else(
    redis_url: str, redis_server: RedisServer
) -> None:
    with FaultProxy(redis_server) as proxy:
        app = Bullpen(proxy.url)
        app.observe()
        queue = app.queue("mails", add_deadline=200)
        await queue.add("mail")
        assert (await numbers(app))[at("bullpen_redis_up", queue="mails")] == 1
        with proxy.outage():
            from bullpen.ops.metrics import QueueMetrics

            down = await QueueMetrics(lambda: [queue], timeout_s=0.3).collect()
            assert [
                sample.value for metric in down if metric.name == "bullpen_redis_up" for sample in metric.samples
            ] == [0]
        await app.aclose()


def test_text_is_escaped_and_families_stand_together() -> None:
    histogram = Histogram((1.0, 2.5))
    for value in (0.5, 2.0, 9.0):
        histogram.observe(value)
    page = render(
        [
            Metric("a_total", "counter", "first\nline \\ backslash", [Sample({"name": 'quote " back \\ line\n'}, 2)]),
            Metric(
                "b", "histogram", "b", [Sample({"queue": "q"}, histogram.sum, histogram.cumulative(), histogram.count)]
            ),
            Metric("a_total", "counter", "first", [Sample({}, math.inf)]),
            Metric("c", "gauge", "c", [Sample({}, 0.25), Sample({"x": "1"}, math.nan), Sample({"x": "2"}, -math.inf)]),
        ]
    )

    families = {family.name: family for family in text_string_to_metric_families(page)}

    assert page.count("# TYPE a_total counter") == 1
    assert [sample.labels for sample in families["a"].samples] == [{"name": 'quote " back \\ line\n'}, {}]
    assert [(sample.name, sample.labels.get("le"), sample.value) for sample in families["b"].samples] == [
        ("b_bucket", "1", 1),
        ("b_bucket", "2.5", 2),
        ("b_bucket", "+Inf", 3),
        ("b_sum", None, 11.5),
        ("b_count", None, 3),
    ]
    assert families["c"].samples[0].value == 0.25
    assert math.isnan(families["c"].samples[1].value)


@pytest.mark.requirement("W-68", "O-69")
async def test_counters_begin_at_zero(redis_url: str, sqlite_url: str) -> None:
    """`increase(outbox_dead_total[15m]) > 0` never sees a series that begins with 1."""
    app = Bullpen(redis_url, settings=Settings.load(redis_url=redis_url, ledger_url=sqlite_url))
    app.observe()

    @app.handler("mails")
    async def handle(job: Job) -> None: ...

    app.worker("idle", handle)
    app.use_outbox().route("bullmq:reports", QueueChannel(app.connection, prefix=app.prefix))
    async with running(app):
        await app.queue("idle").add("later", delay=600_000)
        await (await app.queue("mails").add("mail")).result(timeout=20_000)
        found = await numbers(app)
    assert found[at("bullpen_jobs_failed_total", queue="mails")] == 0
    for name in ("bullpen_job_duration_seconds", "bullpen_job_wait_seconds", "bullpen_job_retries"):
        assert found[at(f"{name}_count", queue="idle")] == 0
    for name in ("outbox_sent_total", "outbox_failed_total", "outbox_dead_total"):
        assert found[at(name, integration_type="bullmq:reports")] == 0


@pytest.mark.requirement("O-69")
async def test_a_type_that_a_pattern_routes_counts_from_zero_as_soon_as_it_has_a_row(
    redis_url: str, sqlite_url: str
) -> None:
    async with Bullpen(redis_url, settings=Settings.load(redis_url=redis_url, ledger_url=sqlite_url)) as app:
        app.use_outbox().route("bullmq:*", QueueChannel(app.connection, prefix=app.prefix))
        await app.ledger.outbox.enqueue(item(integration_type="bullmq:reports"))
        found = await numbers(app)

    assert found[at("outbox_pending_total")] == 1
    for name in ("outbox_sent_total", "outbox_failed_total", "outbox_dead_total"):
        assert found[at(name, integration_type="bullmq:reports")] == 0


async def test_jobs_are_counted_by_name_and_the_number_of_names_is_bounded(redis_url: str) -> None:
    """Some put an id into the name: that must not make a series for each job."""
    app = Bullpen(redis_url)
    app.observe()

    @app.task("mails", attempts=2, backoff=1)
    async def welcome(times: int) -> None:
        if times > 1:
            raise ValueError("no")

    @app.handler("orders", concurrency=20)
    async def handle(job: Job) -> None: ...

    async with running(app):
        early = await numbers(app)
        jobs = await app.queue("orders").add_many([(f"order-{number}", {}) for number in range(MOST_NAMES + 7)])
        await asyncio.gather(*(job.result(timeout=20_000) for job in jobs))
        await (await welcome.add(times=1)).result(timeout=20_000)
        with pytest.raises(JobFailed):
            await (await welcome.add(times=2)).result(timeout=20_000)
        # An outcome is told by an event, and counted by the worker when its own answer has come: either may be first.
        mail, total = {"queue": "mails", "name": "welcome"}, "bullpen_named_jobs_total"
        late = early
        async with asyncio.timeout(20):
            while sum(value for (name, _), value in late.items() if name == total) < len(jobs) + 3:
                late = await numbers(app)

    assert {each: early[at(total, **mail, outcome=each)] for each in ("completed", "failed", "retried")} == {
        "completed": 0,
        "failed": 0,
        "retried": 0,
    }
    assert {each: late[at(total, **mail, outcome=each)] for each in ("completed", "failed", "retried")} == {
        "completed": 1,
        "failed": 1,
        "retried": 1,
    }
    assert late[at("bullpen_named_jobs_seconds_total", **mail)] > 0
    names = {dict(labels)["name"] for name, labels in late if name == total and ("queue", "orders") in labels}
    assert len(names) == MOST_NAMES + 1
    assert late[at(total, queue="orders", name="other", outcome="completed")] == 7


async def test_a_part_that_cannot_count_does_not_take_the_others_with_it(
    redis_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The page is needed most when a database is away."""

    class Away:
        async def collect(self) -> list[Metric]:
            raise ConnectionError("cannot reach postgresql://app:hunter2@db/shop")

    url = f"sqlite:///{tmp_path / 'missing' / 'ledger.sqlite3'}"
    async with Bullpen(redis_url, settings=Settings.load(redis_url=redis_url, ledger_url=url)) as app:
        app.observe()
        app.queue("mails")
        _ = app.use_outbox()
        app.add_metrics(Away())
        found = await numbers(app)

    assert found[at("bullpen_redis_up", queue="mails")] == 1
    assert at("outbox_pending_total") not in found
    assert at("outbox_claim_duration_ms_count") in found, "what the process counted itself is there"
    assert "metrics of Away are missing" in caplog.text
    assert "hunter2" not in caplog.text


@pytest.mark.parametrize("by", ["delay", "at"])
async def test_waiting_begins_when_a_job_is_due(redis_url: str, by: str) -> None:
    """Two hours of a delay that somebody asked for are no reason for an alarm, neither in the histogram nor in the age
    of the next job."""
    app = Bullpen(redis_url)
    ended = asyncio.Event()

    @app.handler("mails")
    async def send(job: Job) -> None:
        ended.set()

    app.observe()
    queue = app.queue("mails")
    later: dict[str, Any] = {"delay": 1_500} if by == "delay" else {"at": datetime.now(UTC) + timedelta(seconds=1.5)}
    await queue.add("later", **later)
    await queue.pause()
    async with running(app):
        async with asyncio.timeout(20):
            while not (await queue.counts()).waiting:  # noqa: ASYNC110 - promoted by the worker, which tells nobody
                await asyncio.sleep(0.01)
        age_ms = await queue.oldest_age_ms()
        await queue.resume()
        await asyncio.wait_for(ended.wait(), 20)
        seen = await numbers(app)

    assert age_ms is not None
    assert age_ms < 1_000
    assert seen[at("bullpen_job_wait_seconds_count", queue="mails")] == 1
    assert seen[at("bullpen_job_wait_seconds_sum", queue="mails")] < 1.0
