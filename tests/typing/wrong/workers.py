"""Wrong programs: each marked line is an error for every checker."""

from __future__ import annotations

from datetime import timedelta

from bullpen import (
    Bullpen,
    ChildLimits,
    DeadLetterPolicy,
    DelayJob,
    Job,
    Queue,
    RateLimit,
    RateLimited,
    RetryPolicy,
    Worker,
    WorkerArguments,
)

app = Bullpen()


async def handle(job: Job) -> None: ...


async def two_arguments(job: Job, more: int) -> None: ...


Worker("a", handle, concurency=5)  # error
Worker("a", handle, concurrency="many")  # error
Worker("a", handle, lock="30 s")  # error
Worker("a", handle, lock=None)  # error
Worker("a", handle, limit=10)  # error
Worker("a", handle, attempts=5)  # error
Worker("a", handle, permanent_errors=ValueError)  # error
Worker("a", handle, policy={"attempts": 5})  # error
Worker("a", handle, dead_letters="queue")  # error
Worker("a", handle, processes=4)  # error
Worker("a", two_arguments)  # error
Worker("a", None)  # error
Worker("a")  # error
app.worker("a", handle, concurency=5)  # error
app.worker("a", handle, connection="redis://localhost")  # error
app.worker("a", handle, timeout=1.5)  # error
app.task_queue("a", concurency=5)  # error
app.queue("a", attemps=5)  # error
app.queue("a", connection="redis://localhost")  # error
OPTIONS: WorkerArguments = {"lokc": 5}  # error
RateLimit("10", 1_000)  # error
RetryPolicy(attemps=3)  # error
ChildLimits(memory="1 GB")  # error
DeadLetterPolicy(canceled=True)  # error
Worker("a", handle, backoff=1_000)  # error
Worker("a", handle, backoff={"own": 1_000})  # error
Worker("a", handle, max_started_attempts="3")  # error
Worker("a", handle, skip_stalled_checks=True)  # error
Worker("a", handle, skip_lock_renewal=1)  # error


@app.handler("b", concurency=5)  # error
async def misspelt(job: Job) -> None: ...


@app.handler("b", lock=True, timeout="5")  # error
async def wrong_type(job: Job) -> None: ...


async def signals(job: Job) -> None:
    if job.is_last_attempt:
        raise DelayJob("soon")  # error
    if job.name == "a":
        raise RateLimited(reason=5)  # error
    await job.progress(None)  # error
    await job.log(5)  # error
    print(timedelta(seconds=job.attempts))  # error


async def closed(worker: Worker) -> None:
    await worker.close(timout=5)  # error
    worker.on("complete", print)  # error
    await worker.run(signal=True)  # error
    worker.concurrency = "many"  # error
    worker.off("complete", print)  # error
    await worker.cancel_job(7)  # error
    await worker.cancel_all_jobs(why="late")  # error


async def cancelled(queue: Queue, job: Job) -> str:
    await queue.cancel(job, resaon="late")  # error
    await job.cancel(5)  # error
    return job.cancel_reason  # error
