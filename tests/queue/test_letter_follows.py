"""A dead letter ends when another client puts its job back in line."""

from __future__ import annotations

import pytest

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


@pytest.mark.parametrize("outcome", ["waits", "completed", "completed after a reset", "failed again", "removed"])
async def test_the_letter_of_a_job_that_another_client_ran_ends_by_the_sweep(kit: Kit, outcome: str) -> None:
    """We never see the job again. A letter without its job stays: it may be all that is left of it."""
    queue = kit.queue()
    job, other = await queue.add("job", attempts=1, job_id="order:7:1"), await queue.add("job", attempts=1)
    await kit.drain(fail, 2, dead_letters=True)
    await queue.pause()
    retried_by_node(kit, job.id)
    if outcome == "completed after a reset":
        kit.redis.hset(kit.base + job.id, mapping={"ats": 1, "atm": 1})
    elif outcome == "failed again":
        kit.redis.hset(kit.base + job.id, mapping={"ats": 2, "atm": 2, "failedReason": "no", "finishedOn": 1})
    if outcome != "waits":
        kit.redis.lrem(kit.base + "wait", 0, job.id)
    if outcome == "removed":
        kit.redis.delete(kit.base + job.id)
    elif outcome == "failed again":
        kit.redis.zadd(kit.base + "failed", {job.id: kit.server_ms()})
    elif outcome != "waits":
        kit.redis.zadd(kit.base + "completed", {job.id: kit.server_ms()})
    kit.redis.hdel(kit.base + "meta", "bpsweep")  # a minute later
    before_ms = kit.server_ms()

    told = await kit.work(nothing, dead_letters=True)
    swept = lambda: int(kit.redis.hget(kit.base + "meta", "bpswept") or 0) >= before_ms  # noqa: E731
    await kit.until(swept, "the sweep has ended")
    await told.worker.close()

    left = [letter.job_id for letter in await queue.dead_letters.list()]
    stays = outcome in ("failed again", "removed")
    assert sorted(left) == sorted([job.id, other.id] if stays else [other.id])
