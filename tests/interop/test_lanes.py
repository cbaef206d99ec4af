"""Lanes beside other clients: they see an ordinary queue, and their own jobs are not kept waiting."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import redis

from bullpen.queue import Job, NewJob, Queue
from bullpen.worker import Worker

from ._sides import PeerSide


@pytest.fixture(params=["node", "pypi"])
def peer(request: pytest.FixtureRequest, node: PeerSide, pypi: PeerSide) -> PeerSide:
    return {"node": node, "pypi": pypi}[request.param]


@pytest_asyncio.fixture(loop_scope="session")
async def queue(interop_url: str, client: redis.Redis) -> AsyncIterator[Queue]:
    async with Queue("q", connection=interop_url) as opened:
        yield opened


async def test_another_worker_empties_a_queue_with_lanes_in_the_order_of_its_turns(
    peer: PeerSide, queue: Queue
) -> None:
    await queue.lanes.set("gold", weight=2)
    lanes: dict[str, str] = {}
    for lane, count in (("large", 40), ("gold", 20), ("small", 3)):
        for job in await queue.add_many([NewJob("work", {}, {"lane": lane}) for _ in range(count)]):
            lanes[job.id] = lane

    await peer.start_worker("w", "q", {}, concurrency=1)
    await peer.peer.wait_event(lambda event: event.get("type") == "completed", count=63)

    order = [lanes[event["jobId"]] for event in peer.peer.events if event.get("type") == "active"]
    assert Counter(order[:14])["small"] == 3
    assert Counter(order[:30])["gold"] == pytest.approx(2 * (Counter(order[:30])["large"]), abs=3)
    counts = await queue.counts()
    assert (counts.completed, counts.pending) == (63, 0)


async def test_jobs_that_another_client_adds_are_not_kept_waiting(
    peer: PeerSide, queue: Queue, interop_url: str
) -> None:
    await queue.add_many([NewJob("ours", {}, {"lane": "large"}) for _ in range(60)])
    await peer.add("q", "plain")
    await peer.add("q", "theirs", priority=1)
    order: list[str] = []

    async def handle(job: Job) -> None:
        order.append(job.name)

    async with Worker("q", handle, connection=interop_url):
        await queue.add("last", lane="other")
        jobs = await queue.counts()
        assert jobs.pending + jobs.active + jobs.completed == 63
        async with asyncio.timeout(20):
            while len(order) < 63:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    assert order.index("plain") <= 2
    assert order.index("theirs") <= 5


async def test_what_a_lane_holds_back_is_an_ordinary_delayed_job_to_another_worker(
    peer: PeerSide, queue: Queue, client: redis.Redis, interop_url: str
) -> None:
    """If all of us die it becomes due by itself; another client may promote it at any time."""
    await queue.lanes.pause("a")
    jobs = await queue.add_many([NewJob("work", {}, {"lane": "a"}) for _ in range(3)])
    async with Worker("q", _never, connection=interop_url) as ours:
        async with asyncio.timeout(20):
            while client.zcard("bull:q:delayed") < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await ours.close()

    for job in jobs:
        client.zadd("bull:q:delayed", {job.id: 1})
    client.zadd("bull:q:marker", {"1": 1})
    await peer.start_worker("w", "q", {}, concurrency=2)
    await peer.peer.wait_event(lambda event: event.get("type") == "completed", count=3)

    assert (await queue.counts()).completed == 3


async def _never(job: Job) -> None:
    raise AssertionError("a paused lane")
