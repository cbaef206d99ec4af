"""Why a job does not run: every cause is created, and named."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator

import pytest

from bullpen import Bullpen, Job, Queue, RateLimit, Worker
from bullpen.ops.explain import IdleCause, JobExplanation, JobFacts, explain, why
from bullpen.queue import JobState
from bullpen.testing import RedisServer
from bullpen.wire.records import JobRecord
from tests.dashboard._kit import settings


@pytest.fixture
async def queue(redis_url: str, queue_name: str) -> AsyncIterator[Queue]:
    async with Queue(queue_name, connection=redis_url) as made:
        yield made


async def connect_worker(queue: Queue) -> object:
    """What the server sees of a worker that waits."""
    named = f"bull:{base64.b64encode(queue.name.encode()).decode()}"
    return await queue.connection.open(client_name=named)


@pytest.mark.requirement("D-43")
async def test_a_job_that_is_not_here(queue: Queue) -> None:
    await queue.add("job", {})

    found = await why(queue, "nobody")

    assert found.cause is IdleCause.NOT_HERE
    assert "nobody" in found.text


@pytest.mark.requirement("D-43")
async def test_no_worker(queue: Queue) -> None:
    job = await queue.add("job", {})

    found = await why(queue, job.id)

    assert found.cause is IdleCause.NO_WORKER
    assert found.command == "bullpen run MODULE:APP"


@pytest.mark.requirement("D-43")
async def test_a_paused_queue(queue: Queue) -> None:
    job = await queue.add("job", {})
    await queue.pause()

    found = await why(queue, job.id)

    assert (found.cause, found.action) == (IdleCause.PAUSED, "queue.resume")
    assert found.command == f"bullpen queues resume {queue.name}"


@pytest.mark.requirement("D-43")
async def test_a_delayed_job_says_when_it_is_due(queue: Queue) -> None:
    job = await queue.add("job", {}, delay=90_000)

    found = await why(queue, job.id)

    assert (found.cause, found.action) == (IdleCause.DELAYED, "job.promote")
    assert "due in 1m" in found.text


@pytest.mark.requirement("D-43")
async def test_a_held_queue(queue: Queue) -> None:
    job = await queue.add("job", {})
    await queue.rate_limit(60_000)

    assert (await why(queue, job.id)).cause is IdleCause.RATE
    await queue.lift_rate_limit()
    assert (await why(queue, job.id)).cause is IdleCause.NO_WORKER


@pytest.mark.requirement("D-43")
async def test_running_done_failed_and_the_limit_of_the_queue(queue: Queue, redis_url: str) -> None:
    running, end = asyncio.Event(), asyncio.Event()

    async def handle(job: Job) -> None:
        if job.name == "bad":
            raise ValueError("no")
        running.set()
        await end.wait()

    await queue.set_global_concurrency(1)
    first = await queue.add("good", {})
    second = await queue.add("bad", {}, attempts=1)
    async with Worker(queue.name, handle, connection=redis_url) as worker:
        task = asyncio.create_task(worker.run(signals=False))
        await running.wait()

        assert (await why(queue, first.id)).cause is IdleCause.RUNNING
        assert (await why(queue, second.id)).cause is IdleCause.CONCURRENCY

        end.set()
        await first.result(10_000)
        while (await queue.counts()).failed == 0:  # noqa: ASYNC110 - the server does not tell us
            await asyncio.sleep(0.01)
        assert (await why(queue, first.id)).cause is IdleCause.FINISHED
        failed = await why(queue, second.id)
        assert (failed.cause, failed.action) == (IdleCause.FAILED, "job.retry")
        await worker.close()
        await task


@pytest.mark.requirement("D-43")
async def test_a_job_in_line_says_how_many_are_before_it(queue: Queue) -> None:
    for _ in range(3):
        last = await queue.add("job", {})
    wire = await connect_worker(queue)

    found = await why(queue, last.id, done_per_s=2.0)

    assert found.cause is IdleCause.IN_LINE
    assert "behind 2 jobs" in found.text
    assert "starts in about 1.0 s" in found.text
    wire.close()  # type: ignore[attr-defined]


@pytest.mark.requirement("D-43")
async def test_a_task_that_may_not_start_yet_says_its_rate_limit(redis_url: str, queue_name: str) -> None:
    app = Bullpen(settings=settings(redis_url))

    @app.task(queue_name, rate_limit=RateLimit(1, 60_000))
    async def send(number: int) -> None:
        pass

    async with app, app.queue(queue_name) as queue:
        first, second = await send.add(1), await send.add(2)
        serving = asyncio.create_task(app.run(signals=False))
        async with asyncio.timeout(60):
            while {await queue.state_of(first.id), await queue.state_of(second.id)} != {  # noqa: ASYNC110 - nobody tells
                JobState.COMPLETED,
                JobState.DELAYED,
            }:
                await asyncio.sleep(0.01)
        delayed = second if await queue.state_of(first.id) is JobState.COMPLETED else first

        found = await why(queue, delayed.id)

        assert (found.cause, found.action) == (IdleCause.RATE, "")
        assert "1 job has started in this window" in found.text
        serving.cancel()
        await asyncio.wait([serving])


@pytest.mark.leaves_queue_broken
@pytest.mark.requirement("D-43")
async def test_a_job_whose_worker_died(queue: Queue, redis_server: RedisServer) -> None:
    job = await queue.add("job", {})
    server = redis_server.client()
    server.lmove(queue.keys.wait, queue.keys.active)

    found = await why(queue, job.id)

    assert found.cause is IdleCause.HOLDER_LOST
    assert "No worker is connected" in found.text


def of(state: JobState, **facts: object) -> JobExplanation:
    record = JobRecord.parse(
        "1", {"name": "n", "timestamp": "1", "atm": "1", "failedReason": "no", "opts": '{"attempts":3}'}
    )
    return explain(JobFacts(queue="q", job_id="1", now_ms=10_000, state=state, record=record, **facts))  # type: ignore[arg-type]


@pytest.mark.requirement("D-43")
def test_causes_that_need_no_server() -> None:
    assert of(JobState.WAITING_CHILDREN, pending_children=2).cause is IdleCause.CHILDREN
    assert of(JobState.WAITING, rate_limit=5, started_in_window=5, window_ms=900).cause is IdleCause.RATE
    assert of(JobState.WAITING, workers=2, idlest_worker_s=45).cause is IdleCause.SILENT_WORKERS
    assert of(JobState.DELAYED, due_ms=5_000, workers=0).cause is IdleCause.NO_WORKER
    assert of(JobState.DELAYED, due_ms=5_000, workers=1).cause is IdleCause.DELAYED
    assert "retried after attempt 1 of 3" in of(JobState.DELAYED, due_ms=20_000).text
    assert "more than" in of(JobState.WAITING, position=None).text
    assert of(JobState.WAITING, position=0).text == "It is the next to run."
    busy = of(JobState.WAITING, position=84, active=5, workers=2)
    assert "5 jobs run now, on 2 workers" in busy.text
    assert busy.command == "bullpen jobs list q --state active"
    assert "1 job runs now, on 1 worker" in of(JobState.WAITING, position=None, active=1, workers=1).text
    assert of(JobState.DELAYED, due_ms=70_000, task_starts=1, task_window_ms=5_000).cause is IdleCause.DELAYED
    assert of(JobState.DELAYED, due_ms=70_000, task_starts=1, task_window_ms=60_020).cause is IdleCause.RATE
