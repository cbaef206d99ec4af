"""A dead letter ends when another client puts its job back in line."""

from __future__ import annotations

from bullpen.queue import Job
from tests.queue._kit import Kit


async def fail(_: Job) -> None:
    raise ValueError("boom")


async def nothing(_: Job) -> None:
    """Succeeds."""


def retried_by_node(kit: Kit, job_id: str) -> None:
    """What Node's `job.retry()` does, also behind a dashboard: it knows nothing of letters."""
    assert kit.redis.zrem(kit.base + "failed", job_id)
    kit.redis.hdel(kit.base + job_id, "finishedOn", "processedOn", "failedReason")
    kit.redis.lpush(kit.base + "wait", job_id)
    kit.redis.zadd(kit.base + "marker", {"0": 0})


async def test_the_letter_ends_when_we_take_the_job_again(kit: Kit) -> None:
    queue = kit.queue()
    job = await queue.add("job", attempts=1)
    await kit.drain(fail, 1, dead_letters=True)
    assert await queue.dead_letters.depth() == 1

    retried_by_node(kit, job.id)
    await kit.drain(nothing, 1, dead_letters=True)

    assert await queue.dead_letters.depth() == 0


async def test_a_job_that_fails_again_and_again_has_one_letter(kit: Kit) -> None:
    queue = kit.queue()
    job = await queue.add("job", attempts=1)
    await kit.drain(fail, 1, dead_letters=True)

    for _ in range(2):
        retried_by_node(kit, job.id)
        await kit.drain(fail, 1, dead_letters=True)

    assert await queue.dead_letters.depth() == 1
