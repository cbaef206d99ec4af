"""Jobs that lost their place in line are put back, and are deleted only when that is asked for."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.flows._cli import cli
from tests.queue._kit import Kit


async def nothing(_: object) -> None:
    """The handler of these tests."""


async def lose(kit: Kit) -> dict[str, str]:
    """Jobs of several kinds, none of them listed any more."""
    queue = kit.queue()
    jobs = {
        "plain": await queue.add("plain"),
        "urgent": await queue.add("urgent", priority=3),
        "later": await queue.add("later", delay=3_600_000),
    }
    done = await queue.add("done")
    for name in ("wait", "prioritized", "delayed", "marker"):
        kit.redis.delete(kit.base + name)
    kit.redis.hset(kit.base + done.id, mapping={"finishedOn": "1", "returnvalue": "null"})
    return {name: job.id for name, job in jobs.items()} | {"done": done.id}


async def test_what_has_not_finished_goes_back_where_it_belongs(kit: Kit) -> None:
    ids = await lose(kit)
    queue = kit.queue()

    assert await queue.restore_orphans() == 3

    states = {name: (await queue.state_of(job_id)).value for name, job_id in ids.items() if name != "done"}
    assert states == {"plain": "waiting", "urgent": "prioritized", "later": "delayed"}
    assert kit.redis.exists(kit.base + ids["done"])
    assert await queue.restore_orphans() == 0
    told = await kit.drain(nothing, 2)
    assert sorted(told.ids("completed")) == sorted([ids["plain"], ids["urgent"]])
    await queue.remove_orphans()


async def test_what_could_be_restored_is_deleted_only_on_request(kit: Kit) -> None:
    ids = await lose(kit)
    queue = kit.queue()

    assert await queue.remove_orphans() == 1
    assert not kit.redis.exists(kit.base + ids["done"])
    assert all(kit.redis.exists(kit.base + ids[name]) for name in ("plain", "urgent", "later"))

    assert await queue.remove_orphans(restorable=True) == 3


async def test_a_job_in_a_paused_queue_is_restored_into_the_line_that_waits(kit: Kit) -> None:
    ids = await lose(kit)
    queue = kit.queue()
    await queue.pause()

    assert await queue.restore_orphans() == 3
    assert (await queue.counts()).waiting == 1

    await queue.resume()
    await kit.drain(nothing, 2)
    assert kit.redis.exists(kit.base + ids["done"])
    await queue.remove_orphans()


async def test_jobs_are_restored_in_the_order_in_which_they_were_added(kit: Kit) -> None:
    """A scan meets keys in any order; a payment must not overtake the one before it."""
    queue = kit.queue()
    jobs = await queue.add_many([("mail", number) for number in range(40)])
    later = [await queue.add("mail", job_id=job_id) for job_id in ("b", "a")]
    kit.command("HSET", kit.base + "b", "timestamp", 9_000_000_000_000)
    kit.command("HSET", kit.base + "a", "timestamp", 9_000_000_000_001)
    kit.command("DEL", kit.base + "wait")

    assert await queue.restore_orphans() == 42

    assert kit.ids("wait") == [*(job.id for job in jobs), *(job.id for job in later)]
    await kit.drain(nothing, 42)


async def test_a_job_that_could_be_restored_is_a_problem_for_the_doctor(kit: Kit, tmp_path: Path) -> None:
    """It never runs, and nobody else says so: whoever checks the exit code must see it."""
    await kit.queue().add("mail")
    kit.command("DEL", kit.base + "wait")

    told = await asyncio.to_thread(cli, "doctor", cwd=tmp_path, env={"BULLPEN_REDIS_URL": kit.url})

    assert told.code == 1, told.out
    assert "1 job is stored and in no state (1)" in told.out
    assert f"bullpen queues restore {kit.name}" in told.out

    await kit.queue().restore_orphans()
    await kit.drain(nothing, 1)
