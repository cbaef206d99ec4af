"""The basics with the last BullMQ 5, which many deployments still run beside newer ones."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import redis

from bullpen.queue import NewJob
from bullpen.testing import RedisServer

from ._node import NodePeer, NodeTools
from ._sides import OurSide, PeerSide
from ._wait import until_event


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def node5_peer(interop_server: RedisServer, node_tools: NodeTools) -> AsyncIterator[NodePeer]:
    async with NodePeer(interop_server.url, node_tools, package="bullmq-5") as peer:
        yield peer


@pytest_asyncio.fixture(loop_scope="session")
async def node5(node5_peer: NodePeer, client: redis.Redis) -> AsyncIterator[PeerSide]:
    side = PeerSide("node 5", node5_peer)
    yield side
    await side.reset()


@pytest.mark.requirement("Q-22", "Q-24", "Q-25")
async def test_we_work_on_jobs_of_bullmq_5(node5: PeerSide, ours: OurSide, client: redis.Redis) -> None:
    ids = [
        await node5.add("q", "plain", {"n": 1}),
        await node5.add("q", "later", {"n": 2}, delay=20),
        await node5.add("q", "first", {"n": 3}, priority=1, attempts=2, backoff={"type": "fixed", "delay": 5}),
        *await node5.add_bulk("q", [{"name": "bulk", "data": {"n": n}, "opts": {}} for n in range(10)]),
    ]

    await ours.start_worker("w", "q", {"byName": {"first": {"kind": "fail_times", "times": 1}}}, concurrency=3)
    await until_event(client, "q", "completed", count=len(ids))

    read = [await node5.peer.call("getJob", queue="q", jobId=job_id) for job_id in ids]
    assert {job["state"] for job in read} == {"completed"}
    assert [job["attemptsMade"] for job in read] == [1, 1, 2] + [1] * 10


@pytest.mark.requirement("Q-22", "Q-24", "Q-25")
async def test_bullmq_5_works_on_our_jobs(node5: PeerSide, ours: OurSide, client: redis.Redis) -> None:
    queue = ours.queue("q")
    await node5.peer.call("startQueueEvents", queue="q")
    jobs = await queue.add_many(
        [
            NewJob("plain", {"n": 1}),
            NewJob("later", {"n": 2}, {"delay": 20}),
            NewJob("retried", {"n": 3}, {"priority": 1, "backoff": 5}),
        ]
    )

    await node5.start_worker("w", "q", {"byName": {"retried": {"kind": "fail_times", "times": 2, "value": "third"}}})
    results = await asyncio.gather(*(job.result(timeout=10_000) for job in jobs))

    assert results == [{"echo": {"n": 1}}, {"echo": {"n": 2}}, "third"]
    assert not node5.peer.errors()


@pytest.mark.requirement("Q-39")
async def test_a_queue_that_bullmq_5_paused_is_resumed_by_us(
    node5: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    """It parks the waiting jobs in a list of their own."""
    await node5.add("q", "before", {})
    await node5.pause("q")
    await node5.add("q", "while paused", {})
    counts = await ours.queue("q").counts()
    await ours.start_worker("w", "q", {})

    await ours.queue("q").resume()
    await until_event(client, "q", "completed", count=2, timeout=2)

    assert counts.waiting == 2
