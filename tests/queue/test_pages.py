"""Pages of jobs, and the stream, hold what they promise."""

from __future__ import annotations

from bullpen.queue import JobState, NewJob
from tests.queue._kit import Kit


async def test_a_page_is_filled_up_where_jobs_are_gone(kit: Kit) -> None:
    queue = kit.queue()
    jobs = await queue.add_many([NewJob("job") for _ in range(10)])
    for job in jobs[:4]:
        kit.redis.delete(kit.base + job.id)

    page = await queue.jobs(JobState.WAITING, count=5)

    assert [job.id for job in page] == [job.id for job in jobs[4:9]]
    for job in jobs[:4]:
        kit.redis.lrem(kit.base + "wait", 0, job.id)


async def test_the_bound_of_the_stream_holds_after_a_bulk_add(kit: Kit) -> None:
    queue = kit.queue(events_max_len=100)
    await queue.add("first")

    await queue.add_many([NewJob("job") for _ in range(2_000)])

    length = kit.redis.xlen(kit.base + "events")
    assert isinstance(length, int) and length <= 300  # the server trims whole nodes of a hundred
