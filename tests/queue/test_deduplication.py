"""Adds that mean the same job: who owns a deduplication id, until when, and what the others are told.

What is stored is compared with Node's in `tests/interop`; here is what the options do.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bullpen.errors import InvalidOption, PermanentError
from bullpen.queue import Added, Deduplication, Job, JobState, NewJob
from bullpen.sync import Queue as SyncQueue
from bullpen.wire.deferred import options_from_json, options_to_json
from bullpen.wire.options import DEFAULT_OPTIONS, make_options
from tests.queue._kit import Gate, Kit, nothing

HOUR = timedelta(hours=1)
HOUR_MS = 3_600_000

pytestmark = pytest.mark.requirement("W-83")


async def test_an_id_makes_one_job_until_it_has_ended(kit: Kit) -> None:
    """The returned job is the one that was there first, and it says where that is."""
    queue = kit.queue()

    first = await queue.add("sync", 1, deduplication="shop-1")
    second = await queue.add("sync", 2, deduplication="shop-1")
    other = await queue.add("sync", 3, deduplication="shop-2")

    assert (first.added, second.added, other.added) == (Added.CREATED, Added.DEDUPLICATED, Added.CREATED)
    assert (second.id, second.data, second.deduplication_id) == (first.id, 1, "shop-1")
    assert second.blocked_by is not None
    assert (second.blocked_by.job_id, second.blocked_by.state) == (first.id, JobState.WAITING)
    assert await queue.deduplication_owner("shop-1") == first.id

    await kit.drain(nothing, 2)

    assert await queue.deduplication_owner("shop-1") is None
    assert (await queue.add("sync", deduplication="shop-1")).added is Added.CREATED


async def test_adds_of_one_call_are_judged_in_their_order(kit: Kit) -> None:
    """Coalesced or in bulk: the first one wins, plain jobs between them keep their places."""
    queue = kit.queue()

    jobs = await queue.add_many(
        [
            ("plain", 1),
            NewJob("once", 2, {"deduplication": "d"}),
            ("plain", 3),
            NewJob("once", 4, {"deduplication": "d"}),
            NewJob("first", 5, {"deduplication": "e", "lifo": True}),
            ("plain", 6),
        ]
    )
    together = await asyncio.gather(*(queue.add("once", deduplication="f") for _ in range(5)))

    assert [job.added is Added.CREATED for job in jobs] == [True, True, True, False, True, True]
    assert jobs[3].id == jobs[1].id
    assert kit.ids("wait")[:5] == [jobs[index].id for index in (4, 0, 1, 2, 5)]
    assert [job.added for job in together].count(Added.CREATED) == 1
    assert len({job.id for job in together}) == 1


async def test_an_id_with_a_ttl_is_owned_for_so_long_whatever_becomes_of_the_job(kit: Kit) -> None:
    queue = kit.queue()
    job = await queue.add("report", deduplication=Deduplication("daily", ttl=HOUR), remove_on_complete=True)
    assert HOUR_MS - 60_000 < kit.redis.pttl(kit.base + "de:daily") <= HOUR_MS

    await kit.drain(nothing, 1)
    later = await queue.add("report", deduplication=Deduplication("daily", ttl=HOUR))

    assert later.added is Added.DEDUPLICATED
    assert later.blocked_by is not None
    assert (later.blocked_by.job_id, later.blocked_by.state) == (job.id, JobState.UNKNOWN)  # it is gone, its id is not


async def test_extend_starts_the_ttl_again(kit: Kit) -> None:
    queue, key = kit.queue(), kit.base + "de:d"
    for extend in (False, True):
        rule = Deduplication("d", ttl=HOUR, extend=extend)
        await queue.add("a", deduplication=rule)
        kit.redis.pexpire(key, 1_000_000)

        assert (await queue.add("a", deduplication=rule)).added is Added.DEDUPLICATED

        assert (kit.redis.pttl(key) > 1_000_000) is extend


async def test_replace_lets_the_last_of_a_burst_run(kit: Kit) -> None:
    """Debounce: each add takes the place of the one before, while that is delayed."""
    queue = kit.queue()
    rule = Deduplication("doc-1", ttl=HOUR, extend=True, replace=True)

    jobs = [await queue.add("index", number, deduplication=rule, delay=HOUR) for number in range(3)]

    assert [job.added for job in jobs] == [Added.CREATED] * 3
    assert list(kit.zset("delayed")) == [jobs[2].id]
    assert not kit.has(jobs[0].id)
    assert kit.marker()["1"] == kit.zset("delayed")[jobs[2].id] // 4096


async def test_replace_leaves_a_job_that_is_not_delayed(kit: Kit) -> None:
    queue = kit.queue()
    rule = Deduplication("d", replace=True)
    first = await queue.add("a", 1, deduplication=rule)

    second = await queue.add("a", 2, deduplication=rule)

    assert (second.added, second.id) == (Added.DEDUPLICATED, first.id)


async def test_reschedule_puts_the_delayed_job_off(kit: Kit) -> None:
    """The first add's data, the last add's time."""
    queue = kit.queue()
    rule = Deduplication("d", reschedule=True)
    first = await queue.add("remind", 1, deduplication=rule, delay=HOUR)
    due = kit.zset("delayed")[first.id]

    second = await queue.add("remind", 2, deduplication=rule, delay=2 * HOUR)

    assert (second.added, second.id, second.data) == (Added.DEDUPLICATED, first.id, 1)
    assert kit.zset("delayed")[first.id] - due >= HOUR_MS * 4096
    assert kit.marker()["1"] == kit.zset("delayed")[first.id] // 4096


async def test_keep_last_runs_once_more_with_the_last_data(kit: Kit) -> None:
    """What is asked for while the job runs is not lost, and not done twice."""
    queue, gate, seen = kit.queue(), Gate(), list[Any]()
    rule = Deduplication("d", keep_last_if_active=True)

    async def handle(job: Job) -> None:
        seen.append(job.data)
        await gate(job)

    await queue.add("sync", 1, deduplication=rule)
    told = await kit.work(handle)
    await gate.reached(1)
    later = [await queue.add("sync", number, deduplication=rule) for number in (2, 3, 4)]
    gate.open()
    await told.finished(2)

    assert seen == [1, 4]
    assert {(job.added, job.blocked_by.state) for job in later if job.blocked_by} == {
        (Added.DEDUPLICATED, JobState.ACTIVE)
    }
    assert await queue.deduplication_owner("d") is None


async def test_a_kept_request_with_an_instant_waits_for_it(kit: Kit) -> None:
    queue, gate = kit.queue(), Gate()
    rule = Deduplication("d", keep_last_if_active=True)
    await queue.add("sync", deduplication=rule)
    told = await kit.work(gate)
    await gate.reached(1)

    await queue.add("sync", deduplication=rule, at=datetime.now(UTC) + HOUR)
    gate.open()
    await told.finished(1)

    assert len(kit.zset("delayed")) == 1


async def test_an_owner_that_vanished_blocks_nobody(kit: Kit) -> None:
    """Its hash was evicted or deleted by hand: an id without a TTL would be taken for ever."""
    queue = kit.queue()
    first = await queue.add("a", deduplication="d")
    kit.redis.delete(kit.base + first.id, kit.base + "wait")

    second = await queue.add("a", deduplication="d")

    assert second.added is Added.CREATED
    assert await queue.deduplication_owner("d") == second.id


async def test_a_key_of_another_type_is_nobodys_claim(kit: Kit) -> None:
    kit.redis.rpush(kit.base + "de:d", "x")

    assert (await kit.queue().add("a", deduplication="d")).added is Added.CREATED


async def test_an_owner_that_is_removed_frees_its_id(kit: Kit) -> None:
    queue = kit.queue()
    job = await queue.add("a", deduplication="d")

    await queue.remove(job)

    assert await queue.deduplication_owner("d") is None


async def test_an_id_is_freed_by_hand(kit: Kit) -> None:
    """By the queue always, by a job only while it is the owner."""
    queue = kit.queue()
    first = await queue.add("a", deduplication="d")
    assert await queue.remove_deduplication("d") is True
    assert await queue.remove_deduplication("d") is False

    second = await queue.add("a", deduplication="d")
    assert second.added is Added.CREATED
    assert await first.remove_deduplication() is False
    assert await second.remove_deduplication() is True
    assert await (await queue.add("plain")).remove_deduplication() is False


async def test_a_handler_frees_its_id(kit: Kit) -> None:
    """From the moment on when it has read what it works on, new requests shall run again."""
    queue, freed = kit.queue(), list[bool]()

    async def handle(job: Job) -> None:
        freed.append(await job.remove_deduplication())

    await queue.add("a", deduplication="d")
    await kit.drain(handle, 1)

    assert freed == [True]


async def test_a_failed_owner_keeps_its_id_while_it_is_retried(kit: Kit) -> None:
    queue = kit.queue()

    async def fail(job: Job) -> None:
        raise PermanentError("no") if job.attempts_made else RuntimeError("again")

    await queue.add("a", deduplication="d", attempts=3, backoff=HOUR)
    told = await kit.work(fail)
    await told.wait("retrying")
    assert (await queue.add("a", deduplication="d")).added is Added.DEDUPLICATED

    await queue.promote_all()
    await told.wait("failed")
    assert await queue.deduplication_owner("d") is None


def test_a_blocking_queue_is_told_the_same(kit: Kit) -> None:
    queue = SyncQueue(kit.name, connection=kit.url)

    first = queue.add("a", 1, deduplication="d")
    second = queue.add("a", 2, deduplication=Deduplication("d"))
    both = queue.add_many([NewJob("a", 3, {"deduplication": "d"}), ("b", 4)])

    assert (second.added, second.id, second.data) == (Added.DEDUPLICATED, first.id, 1)
    assert second.blocked_by is not None
    assert second.blocked_by.state is JobState.WAITING
    assert [job.added for job in both] == [Added.DEDUPLICATED, Added.CREATED]
    queue.close()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Deduplication(""), "deduplication.id: expected text of 1 to 500"),
        (lambda: Deduplication("\ud800"), "deduplication.id: expected text"),
        (lambda: Deduplication("d", ttl=0), "deduplication.ttl: expected whole milliseconds"),
        (lambda: Deduplication("d", extend=True), "deduplication.extend: expected a ttl to extend"),
        (lambda: Deduplication("d", replace=True, reschedule=True), "deduplication.reschedule: expected not together"),
        (lambda: Deduplication("d", ttl=5, keep_last_if_active=True), "deduplication.ttl: expected no ttl together"),
        (lambda: Deduplication("d", replace=1), "deduplication.replace: expected True or False"),  # type: ignore[arg-type]  # that is the test
        (lambda: make_options(DEFAULT_OPTIONS, deduplication=5), "deduplication: expected an id"),
    ],
)
def test_a_rule_that_says_nothing_is_refused(make: Any, message: str) -> None:
    """What Node would take and pass over in silence is a mistake that somebody would search for."""
    with pytest.raises(InvalidOption, match=message):
        make()


def test_a_rule_survives_being_stored_elsewhere_first() -> None:
    """The outbox keeps options as JSON until the transaction has committed."""
    for rule in (
        Deduplication("d", ttl=HOUR, extend=True, replace=True),
        Deduplication("d", keep_last_if_active=True, reschedule=True),
        "d",
    ):
        stored = options_to_json({"deduplication": rule})
        again = options_from_json(stored)

        assert (
            make_options(DEFAULT_OPTIONS, **again).wire_json
            == make_options(DEFAULT_OPTIONS, deduplication=rule).wire_json
        )
