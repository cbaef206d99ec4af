"""Cancelled by us, made, worked or put back by other implementations; and what Node's `cancelJob` is for us."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import redis

from bullpen.errors import JobCancelled, JobFailed
from bullpen.queue import Cancelled, Job, Queue
from bullpen.worker import Worker

from ._peer import PeerError
from ._sides import PeerSide
from ._wait import until, until_event

FOREVER = 3_600_000


@pytest_asyncio.fixture(loop_scope="session")
async def queue(interop_url: str, client: redis.Redis) -> AsyncIterator[Queue]:
    async with Queue("q", connection=interop_url) as opened:
        yield opened


async def is_held(node: PeerSide, count: int = 1) -> None:
    await node.peer.wait_event(lambda event: event.get("type") == "held", count=count)


@pytest.mark.parametrize("options", [{}, {"delay": FOREVER}, {"priority": 3}])
async def test_a_job_of_nodes_is_cancelled_before_it_runs_and_node_sees_why(
    node: PeerSide, queue: Queue, options: dict[str, Any]
) -> None:
    job_id = await node.add("q", "job", {}, **options)
    await node.peer.call("startQueueEvents", queue="q")
    waiting = asyncio.ensure_future(node.peer.call("waitUntilFinished", queue="q", jobId=job_id, ttl=10_000))

    assert await queue.cancel(job_id, "not needed") is Cancelled.DONE

    with pytest.raises(PeerError, match="cancelled: not needed"):
        await waiting
    read = await node.peer.call("getJob", queue="q", jobId=job_id)
    assert (read["state"], read["failedReason"], read["attemptsMade"]) == ("failed", "cancelled: not needed", 0)
    assert node.peer.errors() == []


async def test_a_job_of_others_is_cancelled_and_they_see_why(other: PeerSide, queue: Queue) -> None:
    job_id = await other.add("q", "job", {}, attempts=5)

    assert await queue.cancel(job_id, "not needed") is Cancelled.DONE

    read = await other.peer.call("getJob", queue="q", jobId=job_id)
    assert (read["state"], read["failedReason"], read["attemptsMade"]) == ("failed", "cancelled: not needed", 0)
    assert other.peer.errors() == []


async def test_a_job_of_nodes_that_runs_here_is_cancelled_and_node_sees_why(
    node: PeerSide, queue: Queue, interop_url: str
) -> None:
    started = asyncio.Event()

    async def handle(job: Job) -> None:
        started.set()
        await asyncio.Event().wait()

    job_id = await node.add("q", "job", {}, attempts=5)
    await node.peer.call("startQueueEvents", queue="q")
    async with Worker("q", handle, connection=interop_url):
        await started.wait()
        assert await queue.cancel(job_id, "enough") is Cancelled.REQUESTED
        with pytest.raises(PeerError, match="cancelled: enough"):
            await node.peer.call("waitUntilFinished", queue="q", jobId=job_id, ttl=10_000)

    read = await node.peer.call("getJob", queue="q", jobId=job_id)
    assert (read["state"], read["failedReason"]) == ("failed", "cancelled: enough")


async def test_a_job_that_runs_in_a_worker_of_others_is_not_tried_again(other: PeerSide, queue: Queue) -> None:
    """They cannot be told. Its handler ends as it will; when that was an error, the next take fails the job."""
    job = await queue.add("job", {}, attempts=5, backoff={"type": "fixed", "delay": 1})
    await other.start_worker("w", "q", {"hold": True, "kind": "always_fail"})
    await is_held(other)
    result = asyncio.ensure_future(job.result(timeout=10_000))
    await asyncio.sleep(0)

    assert await queue.cancel(job, "enough") is Cancelled.REQUESTED
    await other.peer.call("release", worker="w")

    with pytest.raises(JobCancelled, match="enough") as caught:
        await result
    assert caught.value.reason == "enough"
    with pytest.raises(JobCancelled, match="enough"):
        await job.result()
    stored = await queue.get_job(job.id)
    assert stored is not None and (stored.cancel_reason, stored.attempts_started) == ("enough", 2)


async def test_a_worker_of_others_may_end_it_before(other: PeerSide, queue: Queue) -> None:
    """It completes, or fails in its last attempt: that is the result, and nobody calls it cancelled."""
    good, bad = await queue.add("good", {}), await queue.add("bad", {}, attempts=1)
    steps = {"good": {"hold": True}, "bad": {"hold": True, "kind": "always_fail", "message": "own"}}
    await other.start_worker("w", "q", {"byName": steps}, concurrency=2)
    await is_held(other, 2)

    for job in (good, bad):
        assert await queue.cancel(job, "late") is Cancelled.REQUESTED
    await other.peer.call("release", worker="w")

    assert await good.result(timeout=10_000) == {"echo": {}}
    for _ in range(2):  # told by the event, and by what is stored
        with pytest.raises(JobFailed, match="own") as caught:
            await bad.result(timeout=10_000)
        assert not isinstance(caught.value, JobCancelled)
    read = [await queue.get_job(job.id) for job in (good, bad)]
    assert [job and job.cancel_reason for job in read] == [None, None]


async def test_one_that_node_puts_back_runs_as_if_nothing_had_been(
    node: PeerSide, queue: Queue, interop_url: str, client: redis.Redis
) -> None:
    """Node leaves our field in the job. Neither the renewal of its lock nor a later failure may believe it."""
    good, bad = await queue.add("good", {}), await queue.add("bad", {}, attempts=1)
    for job in (good, bad):
        await queue.cancel(job, "by mistake")
        await node.peer.call("retryJob", queue="q", jobId=job.id, state="failed")
    renewed = asyncio.Event()

    async def handle(job: Job) -> str:
        assert not job.cancelled and job.cancel_reason is None
        if job.name == "bad":
            raise OSError("own")
        await renewed.wait()
        return "done"

    worker = Worker("q", handle, connection=interop_url, lock=1_000, concurrency=2, dead_letters=True)
    worker.on("locks_renewed", lambda ids: renewed.set() if good.id in ids else None)
    async with worker:
        assert await good.result(timeout=10_000) == "done"
        await until(lambda: client.zscore("bull:q:failed", bad.id) is not None, "the other has failed")

    with pytest.raises(JobFailed, match="own") as caught:
        await bad.result()
    assert not isinstance(caught.value, JobCancelled)
    assert [letter.job_id for letter in await queue.dead_letters.list()] == [bad.id]


async def test_a_flow_of_nodes_sees_a_failed_child(node: PeerSide, queue: Queue, client: redis.Redis) -> None:
    child = {"name": "child", "queueName": "q", "data": {}, "opts": {"failParentOnFailure": True}}
    made = await node.peer.call("addFlow", flow={"name": "parent", "queueName": "q", "children": [child]})

    await queue.cancel(made["children"][0]["id"], "enough")
    await node.start_worker("w", "q", {})
    await until_event(client, "q", "failed", count=2)

    read = await node.peer.call("getJob", queue="q", jobId=made["id"])
    assert read["state"] == "failed" and made["children"][0]["id"] in read["failedReason"]


async def test_nodes_cancel_job_ends_what_runs_there(node: PeerSide, queue: Queue) -> None:
    """It stays within that worker: its handler decides, and we read why it failed. Nothing on the wire says that it was
    cancelled, whatever words its handler chose."""
    job = await queue.add("job", {})
    await node.start_worker("w", "q", {"kind": "until_aborted"})
    await is_held(node)
    result = asyncio.ensure_future(job.result(timeout=10_000))
    await asyncio.sleep(0)

    assert await node.peer.call("cancelJob", worker="w", jobId=job.id, reason="from Node") is True

    for wait in (result, job.result()):
        with pytest.raises(JobFailed) as caught:
            await wait
        assert caught.value.reason == "cancelled: from Node"
        assert not isinstance(caught.value, JobCancelled)
