"""Right programs: workers, handlers, and what handlers raise."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any, TypedDict, assert_type

from bullpen import (
    Backoff,
    Bullpen,
    Cancelled,
    ChildLimits,
    DeadLetterPolicy,
    DelayJob,
    Job,
    KeepJobs,
    PermanentError,
    Queue,
    RateLimit,
    RateLimited,
    RetryPolicy,
    ReturnToWait,
    WaitForChildren,
    Worker,
    WorkerArguments,
)

app = Bullpen()


class Order(TypedDict):
    id: int


async def handle(job: Job) -> None: ...


async def handle_order(job: Job[Order]) -> int:
    return job.data["id"]


def handle_in_a_thread(job: Job) -> str:
    job.sync.log("begun")
    return job.name


def a_worker() -> Worker:
    return Worker("mails", handle)


def a_busy_worker() -> Worker:
    return Worker("mails", handle, concurrency=20, lock=timedelta(seconds=30), limit=RateLimit(10, 1_000))


def a_worker_with_a_policy() -> Worker:
    policy = RetryPolicy(attempts=5, backoff=Backoff.fixed(500), dead_letters=DeadLetterPolicy(store="queue"))
    return Worker("mails", handle, policy=policy, permanent_errors=(ValueError,), name="worker-1")


def a_worker_in_processes() -> Worker:
    return Worker("mails", handle_in_a_thread, processes=ChildLimits(), timeout=60_000, close_timeout=None)


def a_worker_that_keeps_few() -> Worker:
    return Worker("mails", handle, remove_on_complete=KeepJobs(count=10), remove_on_fail=False, dead_letters=True)


def a_worker_of_typed_jobs() -> Worker:
    return Worker("orders", handle_order)


def options_of_ones_own() -> Worker:
    options: WorkerArguments = {"concurrency": 5, "dead_letters": True, "max_lonely_deaths": None}
    return Worker("mails", handle, connection="redis://localhost:6379", **options)


def a_worker_with_strategies() -> Worker:
    return Worker("mails", handle, backoff={"slow": Backoff.fixed(60_000), "own": a_pause}, max_started_attempts=10)


def a_pause(failures: int, error: BaseException, job: Job) -> int | timedelta:
    return failures * 1_000


def a_worker_that_leaves_stalls_to_others() -> Worker:
    return Worker("mails", handle, skip_stalled_check=True, skip_lock_renewal=True)


def a_worker_with_letters_of_cancelled_jobs() -> Worker:
    return Worker("mails", handle, dead_letters=DeadLetterPolicy(store="queue", cancelled=True))


async def changed_while_it_runs(worker: Worker) -> None:
    worker.concurrency = 50
    assert_type(worker.is_paused, bool)
    worker.once("drained", print)
    worker.off("drained", print)


async def cancelled_by_the_worker(worker: Worker, job: Job) -> int:
    assert_type(await worker.cancel_job(job, "enough"), Cancelled)
    await worker.cancel_job("7")
    return await worker.cancel_all_jobs("closing time")


def on_completed(job: Job, value: object) -> None: ...


async def until_closed() -> None:
    async with Worker("mails", handle) as worker:
        worker.on("completed", on_completed)
        await worker.run()


async def stopped_soon() -> None:
    worker = Worker("mails", handle, stalled_interval=500, drain_delay=timedelta(seconds=1))
    await worker.start()
    worker.pause()
    worker.resume()
    await worker.close(timeout=5_000)


@app.handler("mails")
async def send(job: Job) -> None: ...


@app.handler("orders", concurrency=20, lock=timedelta(minutes=1), metrics_minutes=60)
async def charge(job: Job[Order]) -> dict[str, int]:
    return {"order": job.data["id"]}


@app.handler("reports", processes=True, timeout=timedelta(minutes=5))
def report(job: Job) -> str:
    return job.id


def a_worker_of_the_app() -> Worker:
    return app.worker("pictures", handle_in_a_thread, concurrency=2, scheduler_zone="Europe/Berlin")


async def gives_up(job: Job) -> None:
    raise PermanentError("there is no such address")


async def comes_again(job: Job) -> None:
    if job.is_last_attempt:
        raise DelayJob(timedelta(minutes=5), "the provider sleeps")
    raise ReturnToWait


async def takes_a_break(job: Job) -> None:
    raise RateLimited(1_000)


async def waits_for_children(job: Job) -> None:
    raise WaitForChildren


async def a_handler_with_an_answer(job: Job[dict[str, Any]]) -> list[str]:
    await asyncio.sleep(0)
    return sorted(job.data)


def the_queue_of_the_app() -> Queue:
    return app.queue("mails", attempts=3, events_max_len=1_000, durability="memory")
