"""Lanes, flows, schedules and cancelling beside clients that are older than BullMQ 6 and know none of it.

They pause, resume and work the queue: every job of ours ends once, whichever client had it.
"""

from __future__ import annotations

import pytest
import redis

from bullpen.queue import Deduplication, Flow, Job, JobState, NewJob, Queue
from bullpen.worker import Worker

from ._sides import PeerSide
from ._wait import until_answer

pytestmark = pytest.mark.requirement("W-84")

LANES = ("a", "b", "c")


async def add_all_kinds(queue: Queue) -> set[str]:
    """Returns the ids of what must end."""
    shared = await queue.add_many([NewJob("n", {}, {"lane": lane}) for lane in LANES for _ in range(4)])
    children = [
        Flow("leaf", on_failure="wait", lane="a"),
        Flow("leaf", on_failure="wait"),
        Flow("leaf", on_failure="ignore", delay=100, lane="b"),
    ]
    tree = await queue.add_flow(Flow("top", children=children))
    once = await queue.add("once", deduplication=Deduplication("once", keep_last_if_active=True))
    await queue.upsert_scheduler("tick", every=600_000, lane="c")
    unwanted = await queue.add("unwanted", lane="a")
    await queue.cancel(unwanted.id)
    return {job.id for job in (*shared, *tree.jobs(), once)}


async def all_completed(queue: Queue, ids: set[str]) -> None:
    async def have_completed() -> bool:
        return ids <= {job.id for job in await queue.jobs(JobState.COMPLETED, count=100)}

    await until_answer(have_completed, "every job has completed", timeout=60)
    assert (await queue.counts()).failed == 1  # the one that was cancelled


@pytest.mark.parametrize("resumer", ["theirs", "ours"])
async def test_what_is_added_while_they_pause_is_there_after_the_resume(
    older: PeerSide, client: redis.Redis, interop_url: str, resumer: str
) -> None:
    async with Queue("q", connection=interop_url) as queue:
        await older.open_queue("q")
        await older.add("q", "theirs")
        await older.pause("q")

        ids = await add_all_kinds(queue)
        await (older.resume("q") if resumer == "theirs" else queue.resume())

        async def work(job: Job) -> None:
            """Nothing to do."""

        async with Worker("q", work, connection=interop_url, concurrency=4):
            await all_completed(queue, ids)
        assert client.llen("bull:q:paused") == 0
        assert await queue.find_orphans() == []


async def test_their_worker_ends_what_ours_would(older: PeerSide, client: redis.Redis, interop_url: str) -> None:
    """Limits of lanes are for our workers; what one of ours held back becomes due for theirs."""
    async with Queue("q", connection=interop_url) as queue:
        await older.open_queue("q")
        await queue.lanes.set("b", weight=2)
        ids = await add_all_kinds(queue)

        await older.start_worker("w", "q", {}, concurrency=4)

        await all_completed(queue, ids)
        await older.close_worker("w")
        assert await queue.find_orphans() == []
