"""Counters of job hashes as anybody may have written them: finite, bounded, and what is neither counts as used up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bullpen.errors import PermanentError
from bullpen.queue import Job
from bullpen.queue.dead_letters.sweep import Sweeper
from tests.queue._kit import Kit, nothing
from tests.queue.test_locks_and_stalls import check_stalled

ODD = ["nan", "-nan", "inf", "-inf", "1e400", "1e308", "9" * 400, "9007199254740993", "many"]


@pytest.mark.requirement("X-101")
@pytest.mark.parametrize("made", [*ODD, "-1e15", "-5", "1", "2.5"])
@pytest.mark.parametrize("field", ["atm", "attemptsMade"])
async def test_an_odd_count_of_attempts_is_not_retried_for_ever(kit: Kit, field: str, made: str) -> None:
    """`attemptsMade` is the name that old releases used: nothing counts it any more."""
    count: dict[str, Any] = {field: made}
    kit.seed("odd", opts='{"attempts":3}', **count)
    runs = 0

    async def handle(job: Job) -> None:
        nonlocal runs
        runs += 1
        raise ValueError("no") if runs < 10 else AssertionError("for ever")

    told = await kit.work(handle, dead_letters=True)
    await kit.until(lambda: kit.has("failed"), "the job has failed")
    await told.worker.close()

    assert runs == (1 if made in [*ODD, "2.5"] else 2 if (field, made) == ("atm", "1") else 3)
    stored = kit.fields("odd")["atm"]
    assert stored.isdecimal()
    assert int(stored) < 2**53
    (letter,) = await kit.queue().dead_letters.list()
    assert letter.job_id == "odd"


@pytest.mark.parametrize("stalls", [*ODD, str(2**63 - 1)])
async def test_an_odd_count_of_stalls_harms_only_its_job(kit: Kit, stalls: str) -> None:
    kit.seed("odd", to="active", stc=stalls)
    kit.seed("good", to="active")

    recovered = check_stalled(kit)[1] + check_stalled(kit)[1]

    assert sorted(recovered) == ["good", "odd"]
    assert sorted(kit.ids("wait")) == ["good", "odd"]
    assert kit.fields("odd")["stc"].isdecimal()


@pytest.mark.parametrize("starts", ODD)
async def test_an_odd_count_of_starts_is_counted_anew(kit: Kit, starts: str) -> None:
    kit.seed("odd", ats=starts)

    await kit.drain(nothing, 1)

    assert kit.fields("odd")["ats"] == "1"


def flow(kit: Kit, **fields: Any) -> None:
    """A parent as somebody wrote it, and its only child."""
    kit.seed("parent", to="waiting-children", score=1, **fields)
    kit.seed("child", parentKey=f"{kit.base}parent", parent=f'{{"id":"parent","queue":"{kit.base[:-1]}"}}')
    kit.redis.sadd(f"{kit.base}parent:dependencies", f"{kit.base}child")


@pytest.mark.requirement("X-101")
@pytest.mark.parametrize("delay", ODD)
async def test_a_parent_with_an_odd_delay_runs_when_its_children_have(kit: Kit, delay: str) -> None:
    """Added to the time, it would be due never, or at a time that no command takes."""
    flow(kit, delay=delay)

    told = await kit.drain(nothing, 2)

    assert told.ids("completed") == ["child", "parent"]


@pytest.mark.requirement("X-101")
@pytest.mark.parametrize("field", ["delay", "timestamp"])
@pytest.mark.parametrize("value", ODD)
async def test_an_orphan_with_odd_times_is_put_back_in_line(kit: Kit, field: str, value: str) -> None:
    fields: dict[str, Any] = {"delay": "1", field: value}
    kit.seed("orphan", to=None, **fields)

    assert await kit.queue().restore_orphans() == 1

    assert kit.ids("wait") == ["orphan"]


@pytest.mark.requirement("X-101")
@pytest.mark.parametrize("counter", ODD)
async def test_an_odd_counter_of_priorities_keeps_nobody_out(kit: Kit, counter: str) -> None:
    """Neither jobs with a priority, nor those of lanes, nor the others of the same call."""
    kit.redis.set(f"{kit.base}pc", counter)
    queue = kit.queue()

    await asyncio.gather(queue.add("a", priority=3), queue.add("b", lane="l"), queue.add("c"))

    assert len((await kit.drain(nothing, 3)).ids("completed")) == 3


@pytest.mark.requirement("X-101")
@pytest.mark.parametrize("tag", ["inf", "-inf", "1e308", "-5"])
async def test_odd_turns_of_lanes_break_no_counter(kit: Kit, tag: str) -> None:
    """`pc` follows the turns: as text that is no number it would stop every client that adds with a priority."""
    queue = kit.queue()
    await queue.add("first", lane="l")
    kit.command("ZADD", f"{kit.base}bp:lanes:1", tag, "", tag, "l")

    await queue.add("second", lane="l")

    assert (kit.redis.get(f"{kit.base}pc") or b"0").isdigit()
    assert len((await kit.drain(nothing, 2)).ids("completed")) == 2


@pytest.mark.requirement("X-101")
@pytest.mark.parametrize("score", ["inf", "-inf", "1e308", "-1e308"])
async def test_a_score_of_no_class_does_not_stop_the_count(kit: Kit, score: str) -> None:
    """It has no next class: whoever jumps from one to the next would stand there for ever."""
    await kit.queue().add("good", priority=2)
    kit.seed("odd", to="prioritized", score=float(score), priority="2")

    async with asyncio.timeout(5):
        assert await kit.queue().counts_per_priority() == {2: 1}
    kit.command("ZREM", f"{kit.base}prioritized", "odd")
    kit.redis.delete(f"{kit.base}odd")


@pytest.mark.requirement("X-101")
@pytest.mark.parametrize("count", ODD)
async def test_a_scheduler_with_an_odd_count_goes_on(kit: Kit, count: str) -> None:
    """The slot was moved before the count failed, so that no job came any more: a chain that was cut."""
    queue = kit.queue()
    await queue.upsert_scheduler("beat", every=100)
    kit.redis.hset(f"{kit.base}repeat:beat", "ic", count)

    told = await kit.work(nothing)
    await told.finished(3)
    await told.worker.close()
    await queue.pause_scheduler("beat")
    kit.redis.hset(f"{kit.base}repeat:beat", "ic", count)
    await queue.resume_scheduler("beat")

    slot = kit.zset("repeat")["beat"]
    assert kit.has(f"repeat:beat:{slot:.0f}")
    await queue.remove_scheduler("beat")


@pytest.mark.requirement("X-101")
async def test_a_scheduler_with_a_jitter_of_many_digits_goes_on(kit: Kit) -> None:
    queue = kit.queue()
    await queue.upsert_scheduler("beat", every=3_600_000, jitter=1_000)
    kit.redis.hset(f"{kit.base}repeat:beat", "bpjitter", "9" * 400)

    await queue.pause_scheduler("beat")
    await queue.resume_scheduler("beat")

    assert len(kit.zset("delayed")) == 1
    await queue.remove_scheduler("beat")


@pytest.mark.requirement("X-101")
@pytest.mark.parametrize("counter", ODD)
async def test_a_follow_up_needs_no_counter_of_ids(kit: Kit, counter: str) -> None:
    """Its owner has left `active` when it is made: an error there would repeat the settle of the batch for ever."""
    kit.seed("owner", deid="d")
    kit.redis.set(f"{kit.base}de:d", "owner")
    kit.redis.hset(f"{kit.base}dn:d", mapping={"name": "next", "data": "{}", "opts": "{}"})
    kit.redis.set(f"{kit.base}id", counter)

    told = await kit.drain(nothing, 2)

    assert [details[0].name for details in told.of("completed")] == ["foreign", "next"]
    kit.redis.delete(f"{kit.base}id")


@pytest.mark.requirement("X-101")
@pytest.mark.parametrize("field", ["bpswept", "bpsweep"])
@pytest.mark.parametrize("instant", [*ODD, "4102444800000"])
async def test_failures_get_their_letters_whatever_is_noted_of_the_last_sweep(
    kit: Kit, field: str, instant: str
) -> None:
    """A time to come hid all of them until then; nobody sweeps in the past of a queue, so history begins now."""
    kit.seed("before", to="failed", score=kit.server_ms() - 30_000, failedReason="x", ats="1")
    kit.redis.hset(f"{kit.base}meta", mapping={"bpswept": kit.server_ms(), field: instant})
    worker = kit.worker(nothing, dead_letters=True)
    sweeper = Sweeper(kit.queue()._ready(), kit.queue().keys, worker._dead_letters, clock_offset_ms=0)  # type: ignore[arg-type]

    assert await sweeper.sweep() == 1

    noted = int(kit.fields("meta")["bpswept"])
    assert abs(kit.server_ms() - noted) < 60_000


@pytest.mark.requirement("X-101")
@pytest.mark.parametrize("place", [*ODD, "-1"])
async def test_letters_follow_their_jobs_whatever_is_noted_of_the_place(kit: Kit, place: str) -> None:
    async def refuse(job: Job) -> None:
        raise PermanentError("no")

    queue = kit.queue()
    job = await queue.add("a")
    await kit.drain(refuse, 1, dead_letters=True)
    kit.command("ZREM", f"{kit.base}failed", job.id)  # as another client does that retries it and completes it
    kit.command("ZADD", f"{kit.base}completed", 1, job.id)
    kit.redis.hset(f"{kit.base}meta", "bpletters", place)

    keys, letters = queue.keys, f"{kit.base[:-1]}-dlq:"
    reply = await queue._ready().evaluate(
        "sweep_dead_letters", [keys.meta, keys.failed, letters + "wait"], [keys.base, letters, 100]
    )

    assert reply == [1, 0]
