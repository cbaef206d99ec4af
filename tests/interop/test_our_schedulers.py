"""Schedulers that we make, beside other clients: worked, changed, read and removed by either side."""

import asyncio
from typing import Any

import pytest
import redis

from ._sides import OurSide, PeerSide, Side
from ._wait import until, until_event

HOUR = 3_600_000


def _to_come(client: redis.Redis) -> list[str]:
    """Ids of scheduled jobs that have not begun."""
    delayed: Any = client.zrange("bull:q:delayed", 0, -1)
    ready: Any = client.lrange("bull:q:wait", 0, -1)
    ranked: Any = client.zrange("bull:q:prioritized", 0, -1)
    return [raw.decode() for raw in (*delayed, *ready, *ranked)]


def _completed(client: redis.Redis) -> list[str]:
    entries: Any = client.xrange("bull:q:events")
    return [fields[b"jobId"].decode() for _, fields in entries if fields[b"event"] == b"completed"]


@pytest.mark.requirement("X-28")
@pytest.mark.parametrize("maker", ["ours", "other"])
async def test_either_makes_both_advance_and_either_removes(
    maker: str, other: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    made_by: Side = ours if maker == "ours" else other
    removed_by: Side = other if maker == "ours" else ours
    await made_by.upsert_scheduler("q", "s", {"every": 50}, {"name": "t", "data": {"n": 1}})
    await ours.start_worker("w", "q", {})
    await until_event(client, "q", "completed", count=3)
    await ours.close_worker("w")
    await other.start_worker("theirs", "q", {})
    await until_event(client, "q", "completed", count=6)
    await ours.start_worker("w", "q", {})
    await until_event(client, "q", "completed", count=12)

    await removed_by.remove_scheduler("q", "s")
    await until(lambda: not _to_come(client) and not client.llen("bull:q:active"), "the last job")

    done = _completed(client)
    assert len(done) == len(set(done)), "no slot ran twice"
    assert not client.exists("bull:q:repeat") and not client.exists("bull:q:repeat:s")


@pytest.mark.requirement("X-28")
async def test_concurrent_upserts_of_all_leave_one_job_to_come(
    node: PeerSide, pypi: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    """While workers of all three serve the queue."""
    sides: list[Side] = [ours, node, ours, pypi]
    for number, side in enumerate(sides):
        await side.start_worker(f"w{number}", "q", {})

    async def change(number: int) -> None:
        rule: dict[str, Any] = {"every": 25} if number % 4 else {"every": 40}
        await sides[number % len(sides)].upsert_scheduler("q", "s", rule, {"name": f"n{number}"})

    await asyncio.gather(*(change(number) for number in range(100)))
    await until_event(client, "q", "completed", count=10)
    for number, side in enumerate(sides):
        await side.close_worker(f"w{number}")

    assert len(_to_come(client)) == 1
    done = _completed(client)
    assert len(done) == len(set(done))
    assert client.zcard("bull:q:repeat") == 1


async def test_node_sees_an_ordinary_scheduler_and_keeps_our_policies(
    node: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    queue = ours.queue("q")
    made = await queue.upsert_scheduler(
        "s", "t", {"n": 1}, every=HOUR, overlap="skip", catch_up=3, jitter=5, limit=9, attempts=2
    )

    seen = await node.peer.call("getJobScheduler", queue="q", args=["s"])

    assert {name: seen[name] for name in ("key", "name", "next", "every", "limit", "iterationCount")} == {
        "key": "s",
        "name": "t",
        "next": made.next_ms,
        "every": HOUR,
        "limit": 9,
        "iterationCount": 1,
    }
    assert seen["template"]["data"] == {"n": 1} and seen["template"]["opts"]["attempts"] == 2
    await node.start_worker("theirs", "q", {})
    await until_event(client, "q", "completed")
    advanced = await queue.get_scheduler("s")
    assert advanced is not None and advanced.next_ms == made.next_ms + HOUR
    assert (advanced.overlap, advanced.catch_up, advanced.jitter_ms, advanced.iterations) == ("skip", 3, 5, 2)
    assert client.hget(f"bull:q:{advanced.job_id}", "data") == b'{"n":1}'


@pytest.mark.parametrize("rule", [{"every": 60}, {"cron": "* * * * * *"}], ids=["every", "cron"])
async def test_a_paused_scheduler_runs_with_nobody_and_goes_on_with_all(
    rule: Any, other: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    queue = ours.queue("q")
    await queue.upsert_scheduler("s", "t", **rule)
    await other.start_worker("theirs", "q", {})
    await until_event(client, "q", "completed", count=2)

    await queue.pause_scheduler("s")
    await until(lambda: not client.llen("bull:q:active"), "the running job")
    before = len(_completed(client))
    (listed,) = await other.peer.call("getJobSchedulers", queue="q")
    # A second job of the same worker shows that it is awake, and that time has passed.
    await queue.add("plain", delay=200)
    await until_event(client, "q", "completed", count=before + 1)

    assert listed["key"] == "s"
    assert _to_come(client) == [] and len(_completed(client)) == before + 1
    await queue.resume_scheduler("s")
    await until_event(client, "q", "completed", count=before + 3)


async def test_an_upsert_of_another_client_ends_the_pause(node: PeerSide, ours: OurSide, client: redis.Redis) -> None:
    """It knows of no pause, and means its scheduler to run."""
    queue = ours.queue("q")
    await queue.upsert_scheduler("s", "t", every=HOUR, offset=1)
    await queue.pause_scheduler("s")

    await node.upsert_scheduler("q", "s", {"every": HOUR}, {"name": "t"})

    found = await queue.get_scheduler("s")
    assert found is not None and not found.is_paused
    assert _to_come(client) == [found.job_id]
    assert abs(found.next_ms - (client.time()[0] * 1000)) <= 2 * HOUR


async def test_a_scheduler_of_another_client_can_be_changed_paused_and_run(
    other: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    queue = ours.queue("q")
    await other.upsert_scheduler("q", "s", {"pattern": "0 0 1 1 *", "tz": "UTC", "limit": 3}, {"name": "t"})
    (first,) = _to_come(client)

    await queue.pause_scheduler("s")
    assert _to_come(client) == []
    await queue.resume_scheduler("s")
    assert _to_come(client) == [first]
    assert await queue.run_scheduler("s", early=True) == first
    await other.start_worker("theirs", "q", {})
    await until_event(client, "q", "completed", first)
    changed = await queue.upsert_scheduler("s", "t", cron="0 0 2 1 *")

    assert _to_come(client) == [changed.job_id]
