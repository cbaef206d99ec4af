"""Our search for orphans beside another implementation that moves jobs all the time: none of them is ever lost.

The line is longer than what one script call looks through, so the search takes many calls and jobs move between them.
"""

import asyncio
import contextlib
import random

import pytest
import redis

from bullpen.errors import JobStateConflict
from bullpen.queue import Queue

from ._sides import OurSide, PeerSide

Q = "q"
JOBS = 10_500
MOVED = 100
_SEED = """
for number = 1, tonumber(ARGV[2]) do
  redis.call("HSET", ARGV[1] .. number, "name", "job", "data", "{}", "opts", '{"attempts":3}', "timestamp", number,
    "delay", 0, "priority", 0)
  redis.call("LPUSH", ARGV[1] .. "wait", number)
end
redis.call("SET", ARGV[1] .. "id", ARGV[2])
redis.call("HSET", ARGV[1] .. "meta", "opts.maxLenEvents", 10000)
"""


async def change_priorities(other: PeerSide) -> None:
    """Out of the line and back to one of its ends: changes that leave little or nothing in the job."""
    chance = random.Random(7)
    while True:
        job_id = str(chance.randrange(JOBS // 2, JOBS))
        for opts in ({"priority": 0, "lifo": True}, {"priority": 3}, {"priority": 0}):
            await other.peer.call("changePriority", queue=Q, jobId=job_id, opts=opts)


async def pause_and_resume(other: PeerSide) -> None:
    while True:
        await other.pause(Q)
        await other.resume(Q)


@pytest.mark.requirement("X-128", "W-64")
async def test_jobs_that_another_client_moves_are_never_taken_for_orphans(
    other: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    client.eval(_SEED, 0, f"bull:{Q}:", JOBS)
    client.hset(f"bull:{Q}:orphan", "name", "x")
    queue = ours.queue(Q)
    await other.open_queue(Q)
    await other.start_worker("w", Q, {"kind": "fail_times", "times": 1}, concurrency=10)
    removed = searches = 0

    async with asyncio.TaskGroup() as tasks:
        moving = [tasks.create_task(change_priorities(other)), tasks.create_task(pause_and_resume(other))]
        while searches < 3 or not client.hexists(f"bull:{Q}:{MOVED}", "ats"):  # so many ran, failed and wait again
            removed += await _search(queue)
            searches += 1
        for task in moving:
            task.cancel()
    await other.resume(Q)
    await other.close_worker("w")
    removed += await queue.remove_orphans(restorable=True)

    assert removed == 1
    assert len([job async for job in queue.iter_jobs()]) == JOBS  # each in exactly one state; pypi leaves some active
    assert client.eval(_MISSING, 0, f"bull:{Q}:", JOBS) == 0
    client.flushall()


_MISSING = """
local missing = 0
for number = 1, tonumber(ARGV[2]) do
  if redis.call("EXISTS", ARGV[1] .. number) == 0 then missing = missing + 1 end
end
return missing
"""


async def _search(queue: Queue) -> int:
    with contextlib.suppress(JobStateConflict):  # it may say that it cannot tell
        return await queue.remove_orphans(restorable=True)
    return 0
