"""Right programs: queues, and adding to them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TypedDict, assert_type

from bullpen import (
    AddArguments,
    Added,
    Backoff,
    Cancelled,
    Codec,
    Connection,
    Durability,
    FileStore,
    Job,
    JobCancelled,
    JobCounts,
    JobDefaults,
    JobMeta,
    JobState,
    KeepJobs,
    LaneInfo,
    LaneSettings,
    NewJob,
    NewJobArguments,
    ObjectStore,
    PayloadReport,
    Queue,
    QueueEvents,
    RateLimit,
    S3Store,
    SweepReport,
)


class Mail(TypedDict):
    to: str
    lines: list[str]


def a_queue() -> Queue:
    return Queue("mails")


def a_queue_with_defaults() -> Queue:
    return Queue("mails", attempts=5, backoff=Backoff.exponential(1_000), remove_on_complete=1_000, lifo=True)


def a_queue_somewhere() -> Queue:
    return Queue("mails", connection="redis://localhost:6379", prefix="{shop}", add_deadline=timedelta(seconds=2))


def a_queue_on_a_shared_connection(connection: Connection) -> Queue:
    return Queue("mails", connection=connection, max_buffered=100, durability=Durability.replicated(1))


def defaults_of_ones_own(connection: Connection) -> Queue:
    defaults: JobDefaults = {"attempts": 3, "remove_on_fail": KeepJobs(count=10, age_s=60)}
    return Queue("mails", connection=connection, **defaults)


async def an_add(queue: Queue) -> str:
    job = await queue.add("welcome", {"to": "ada"})
    assert_type(job.id, str)
    assert_type(job.added, Added)
    return job.id


async def an_add_without_data(queue: Queue) -> Job:
    return await queue.add("tick")


async def a_late_add(queue: Queue) -> None:
    await queue.add("welcome", {}, delay=timedelta(minutes=5))
    await queue.add("welcome", {}, delay=5_000, priority=3)
    await queue.add("welcome", {}, at=datetime.now(UTC), urgency=10)


async def an_add_with_its_own_id(queue: Queue) -> None:
    await queue.add("welcome", {}, job_id="ada", replace_finished=True)


async def an_add_that_is_on_disk(queue: Queue) -> None:
    await queue.add("welcome", {}, durability="fsync", add_deadline=1_000)


async def an_add_with_a_backoff(queue: Queue) -> None:
    await queue.add("welcome", {}, attempts=3, backoff=500)
    await queue.add("welcome", {}, attempts=3, backoff=timedelta(seconds=1))
    await queue.add("welcome", {}, attempts=3, backoff={"type": "exponential", "delay": 500})


async def an_add_with_ids(queue: Queue) -> None:
    await queue.add("welcome", {}, meta=JobMeta(tenant_id="acme", headers={"a": 1}), keep_logs=5, stack_trace_limit=0)


async def not_given_is_none(queue: Queue, delay: int | None, job_id: str | None) -> None:
    await queue.add("welcome", {}, delay=delay, job_id=job_id, attempts=None)


async def options_of_ones_own(queue: Queue, urgent: bool) -> None:
    options: AddArguments = {"attempts": 3, "durability": "memory"}
    if urgent:
        options["priority"] = 1
    await queue.add("welcome", {}, **options)


async def many_adds(queue: Queue) -> list[str]:
    jobs = await queue.add_many([("welcome", {"to": "ada"}), NewJob("welcome", {"to": "bob"}, {"delay": 500})])
    return [job.id for job in jobs]


async def many_adds_with_options(queue: Queue) -> None:
    options: NewJobArguments = {"attempts": 3, "job_id": "ada", "replace_finished": True}
    await queue.add_many([NewJob("welcome", {}, options)], durability="fsync", add_deadline=500)


async def a_result(queue: Queue) -> object:
    job = await queue.add("welcome", {})
    return await job.result(timeout=timedelta(seconds=10))


async def counts(queue: Queue) -> int:
    found = await queue.counts()
    assert_type(found, JobCounts)
    return found.waiting + found.pending


async def a_job_that_may_be_gone(queue: Queue) -> JobState:
    job = await queue.get_job("1")
    return JobState.UNKNOWN if job is None else await job.state()


async def typed_data(job: Job[Mail]) -> str:
    assert_type(job.data["lines"], list[str])
    return job.data["to"]


async def any_data(job: Job) -> str:
    return str(job.data["whatever"])


async def wider_data(job: Job[Mail]) -> str:
    return await reads_any(job)


async def reads_any(job: Job[object]) -> str:
    return str(job.data)


async def events(queue: str) -> None:
    async with QueueEvents(queue, after="0-0") as stream:
        async for event in stream:
            assert_type(event.job_id, str | None)


async def what_became_of_a_job(job: Job) -> None:
    await job.progress(50)
    await job.progress({"step": "two"})
    assert_type(await job.log("half of it"), int)
    assert_type(await job.logs(), list[str])


async def sealed(store: ObjectStore) -> None:
    codec = Codec({"k1": b"\0" * 32, "k2": "base64"}, current="k1", store=store, above=0, also_from=["bull:a"])
    other = Codec(store=S3Store("bucket", endpoint="https://s3.example.com", timeout=timedelta(seconds=5)))
    queue = Queue("a", codec=codec)
    assert_type(await queue.payload_report(), PayloadReport)
    assert_type(await queue.sweep_payloads(older_than=timedelta(days=1), dry_run=True), SweepReport)
    job = await queue.get_job("1", open=False)
    if job is not None:
        assert_type((await queue.open(job)).is_sealed, bool)
    print(other, FileStore("payloads"))


async def lanes(queue: Queue) -> list[LaneInfo]:
    job = await queue.add("welcome", lane="acme")
    assert_type(job.lane, str | None)
    settings = await queue.lanes.set("acme", weight=2.5, concurrency=3, rate=(5, timedelta(minutes=1)), size=100)
    assert_type(settings, LaneSettings)
    await queue.lanes.set(None, weight=1, concurrency=False, rate=RateLimit(5, 1_000), size=False)
    await queue.lanes.pause("acme")
    await queue.lanes.resume("acme")
    assert_type(settings.rate, RateLimit | None)
    return await queue.lanes.list()


async def a_cancelled_job(queue: Queue, job: Job) -> str | None:
    assert_type(await queue.cancel(job, "not needed"), Cancelled)
    assert_type(await job.cancel(), Cancelled)
    try:
        await job.result()
    except JobCancelled as error:
        return error.reason
    return job.cancel_reason if job.cancelled else None
