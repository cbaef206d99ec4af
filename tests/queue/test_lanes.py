"""Lanes: whoever has much waiting does not keep the others waiting."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from bullpen._kernel.outcome import Completed, Retry
from bullpen.errors import InvalidOption
from bullpen.queue import Job, NewJob, Queue
from bullpen.queue.arguments import NewJobArguments
from bullpen.worker.exchange import Exchange, JobSettlement
from tests.bench._exchange import exchange_of
from tests.queue._kit import Kit

DONE = Completed(b"null")
MANY = 3_000


async def take(exchange: Exchange, count: int) -> list[Job]:
    """Take so many and complete them."""
    taken = (await exchange.run([], count)).taken
    await exchange.run([JobSettlement(job, DONE) for job in taken], 0)
    return taken


async def fill(queue: Queue, lane: str, count: int, *, priority: int | None = None, delay: int = 0) -> list[Job]:
    options: NewJobArguments = {"lane": lane, "priority": priority, "delay": delay}
    return await queue.add_many([NewJob("work", {}, options) for _ in range(count)])


async def empty(exchange: Exchange) -> list[Job]:
    jobs: list[Job] = []
    while taken := await take(exchange, 100):
        jobs += taken
    return jobs


async def test_a_small_lane_does_not_wait_for_a_large_one_that_came_first(kit: Kit) -> None:
    queue = kit.queue()
    await fill(queue, "large", MANY)
    async with exchange_of(queue, kit.url) as exchange:
        await take(exchange, 100)
        small = await fill(queue, "small", 10)

        taken = [job for _ in range(3) for job in await take(exchange, 10)]

        assert {job.id for job in small} <= {job.id for job in taken}
        assert len(await empty(exchange)) == MANY - 100 + 10 - 30


async def test_weights_are_shares(kit: Kit) -> None:
    queue = kit.queue()
    await queue.lanes.set("gold", weight=3)
    await fill(queue, "gold", 900)
    await fill(queue, "plain", 900)
    async with exchange_of(queue, kit.url) as exchange:
        shares = Counter([job.lane for _ in range(8) for job in await take(exchange, 50)])

        assert shares["gold"] == pytest.approx(300, rel=0.02)
        assert shares["plain"] == pytest.approx(100, rel=0.02)
        await empty(exchange)


async def test_the_weight_of_all_holds_for_those_that_have_none(kit: Kit) -> None:
    queue = kit.queue()
    await queue.lanes.set(None, weight=2)
    await queue.lanes.set("slow", weight=1)
    await fill(queue, "slow", 200)
    await fill(queue, "usual", 200)
    async with exchange_of(queue, kit.url) as exchange:
        shares = Counter(job.lane for job in await take(exchange, 90))

        assert shares["usual"] == pytest.approx(60, abs=2)
        await empty(exchange)


async def test_a_lane_keeps_the_order_of_its_jobs(kit: Kit) -> None:
    queue = kit.queue()
    await queue.lanes.set("a", weight=7)
    jobs = await fill(queue, "a", 120)
    async with exchange_of(queue, kit.url) as exchange:
        taken = await empty(exchange)

    assert [job.id for job in taken] == [job.id for job in jobs]


async def test_lanes_added_one_by_one_take_turns_too(kit: Kit) -> None:
    queue = kit.queue()
    for _ in range(30):
        await queue.add("work", lane="a")
    for _ in range(5):
        await queue.add("work", lane="b")
    async with exchange_of(queue, kit.url) as exchange:
        taken = await take(exchange, 12)

        assert Counter(job.lane for job in taken)["b"] == 5
        await empty(exchange)


async def test_lanes_share_each_class_of_priority(kit: Kit) -> None:
    queue = kit.queue()
    await fill(queue, "a", 50, priority=5)
    await fill(queue, "a", 50, priority=2)
    await fill(queue, "b", 10, priority=5)
    async with exchange_of(queue, kit.url) as exchange:
        first, then = await take(exchange, 50), await take(exchange, 22)

        assert {job.priority for job in first} == {2}
        assert Counter(job.lane for job in then)["b"] == 10
        await empty(exchange)


async def test_due_jobs_take_the_turns_of_their_lanes(kit: Kit) -> None:
    queue = kit.queue()
    await fill(queue, "large", 200, delay=1_000_000)
    await fill(queue, "small", 5, delay=1_000_000)
    await queue.promote_all()
    async with exchange_of(queue, kit.url) as exchange:
        taken = await take(exchange, 12)

        assert Counter(job.lane for job in taken)["small"] == 5
        await empty(exchange)


async def test_a_retry_takes_a_turn_of_its_lane(kit: Kit) -> None:
    queue = kit.queue()
    await fill(queue, "large", 100)
    await fill(queue, "small", 1)
    async with exchange_of(queue, kit.url) as exchange:
        failed = [job for job in (await exchange.run([], 100)).taken if job.lane == "large"]
        await exchange.run([JobSettlement(job, Retry("boom", "boom", 0)) for job in failed], 0)
        await fill(queue, "late", 5)

        taken = await take(exchange, 15)

        assert Counter(job.lane for job in taken)["late"] == 5
        await empty(exchange)


async def test_what_is_given_back_leaves_no_gap_for_newcomers(kit: Kit) -> None:
    """It stands before the head. Whoever took the head for the present turn would let new lanes overtake all others."""
    queue = kit.queue()
    await fill(queue, "old", 300)
    async with exchange_of(queue, kit.url) as exchange:
        await take(exchange, 100)
        held = (await exchange.run([], 1)).taken
        kit.redis.zadd(kit.base + "prioritized", {held[0].id: 1 << 32})  # as other clients give back
        kit.redis.lrem(kit.base + "active", 1, held[0].id)
        kit.redis.delete(f"{kit.base}{held[0].id}:lock")
        await fill(queue, "new", 100)

        taken = await take(exchange, 41)

        assert Counter(job.lane for job in taken)["old"] == pytest.approx(21, abs=2)
        await empty(exchange)


async def test_a_queue_that_was_empty_begins_anew(kit: Kit) -> None:
    """Nobody pays for turns that he had while nobody else wanted them."""
    queue = kit.queue()
    async with exchange_of(queue, kit.url) as exchange:
        await fill(queue, "a", 100)
        await empty(exchange)
        await fill(queue, "b", 50)
        await fill(queue, "a", 50)

        taken = await take(exchange, 40)

        assert Counter(job.lane for job in taken)["a"] == 20
        await empty(exchange)


async def test_jobs_without_a_lane_come_behind_the_present_round(kit: Kit) -> None:
    queue = kit.queue()
    await fill(queue, "a", 200)
    async with exchange_of(queue, kit.url) as exchange:
        await take(exchange, 100)
        await queue.add_many([NewJob("work", {}, {"priority": 1}) for _ in range(50)])

        taken = await take(exchange, 40)

        assert Counter(job.lane for job in taken)["a"] == pytest.approx(20, abs=2)
        await empty(exchange)


async def test_turns_are_forgotten_and_bounded(kit: Kit) -> None:
    queue = kit.queue()
    async with exchange_of(queue, kit.url) as exchange:
        for number in range(50):
            await queue.add("work", lane=f"customer-{number}")
            await take(exchange, 1)
        await queue.add("work", lane="last")

        assert kit.redis.zcard(kit.base + "bp:lanes:1") <= 3
        assert 0 < kit.redis.ttl(kit.base + "bp:lanes:1") <= 86_400
        await empty(exchange)


async def test_the_stored_job_names_its_lane(kit: Kit) -> None:
    queue = kit.queue()
    job = await queue.add("work", lane="tenant 1")
    found = await queue.get_job(job.id)

    assert job.lane == "tenant 1"
    assert found is not None
    assert (found.lane, found.priority) == ("tenant 1", 1)
    assert kit.redis.hget(kit.base + job.id, "bplane") == b"tenant 1"
    assert found.record.to_json()["opts"]["lane"] == "tenant 1"


async def test_a_schedulers_jobs_are_in_its_lane(kit: Kit) -> None:
    queue = kit.queue()

    await queue.upsert_scheduler("s", every=3_600_000, name="tick", lane="a")

    (job_id,) = kit.zset("prioritized")
    assert kit.fields(job_id)["bplane"] == "a"


@pytest.mark.parametrize("lane", ["", " a", "a\nb", "x" * 256, 5])
async def test_a_name_that_no_lane_can_have_is_refused(kit: Kit, lane: Any) -> None:
    with pytest.raises(InvalidOption, match="lane"):
        await kit.queue().add("work", lane=lane)


@pytest.mark.parametrize("weight", [0, -1, 1_001, "3", True])
async def test_a_weight_out_of_bounds_is_refused(kit: Kit, weight: Any) -> None:
    with pytest.raises(InvalidOption, match="weight"):
        await kit.queue().lanes.set("a", weight=weight)


async def test_setting_nothing_is_refused(kit: Kit) -> None:
    with pytest.raises(InvalidOption, match=r"lanes.set: expected weight, concurrency, rate or size"):
        await kit.queue().lanes.set("a")
