"""Any key of a queue may have been overwritten by anybody: no job may lose its place for that."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from bullpen._kernel.outcome import Cause, Completed, Delayed, Failed, Outcome, Retry, Waiting
from bullpen.errors import BullpenError, ServerRefused
from bullpen.queue import Deduplication, Flow, Job, JobState, NewJob, Queue
from bullpen.queue.arguments import NewJobArguments
from bullpen.sync import Queue as SyncQueue
from bullpen.worker.exchange import JobSettlement
from tests.bench._exchange import exchange_of
from tests.queue._kit import Failing, Kit, nothing

SETS = ("completed", "failed", "delayed", "prioritized", "waiting-children")
LINES = ("wait", "active", "paused")
OTHERS = ("meta", "id", "events", "marker", "pc", "stalled", "repeat", "limiter")
SUFFIXES = ("parent:dependencies", "parent:processed", "parent:failed", "parent:unsuccessful")
KEYS = (*SETS, *LINES, *OTHERS, *SUFFIXES, *(f"letters {each}" for each in (*SETS, *LINES, "events", "meta")))

Call = Callable[[Queue], Awaitable[Any]]
CALLS: dict[str, Call] = {
    "redrive": lambda queue: queue.dead_letters.redrive("dl-a-failed-1"),
    "redrive what is gone": lambda queue: queue.dead_letters.redrive("dl-gone-1"),
    "redrive a job of priority": lambda queue: queue.dead_letters.redrive("dl-ranked-1"),
    "redrive of the failed set": lambda queue: queue.failed_set.redrive("dl-a-failed-1"),
    "retry": lambda queue: queue.retry("a-failed"),
    "retry_all": lambda queue: queue.retry_all(),
    "promote": lambda queue: queue.promote("a-delayed"),
    "promote_all": lambda queue: queue.promote_all(),
    "remove the last child": lambda queue: queue.remove("child"),
    "change_priority": lambda queue: queue.change_priority("waits", priority=5),
    "change_delay": lambda queue: queue.change_delay("a-delayed", 9_000_000),
    "drain": lambda queue: queue.drain(),
    "clean": lambda queue: queue.clean(state=JobState.FAILED),
    "pause": lambda queue: queue.pause(),
    "resume": lambda queue: queue.resume(),
}


def fill(kit: Kit) -> str:
    """One job in each state, three dead letters, and a parent that waits for one child. Returns the letters' base."""
    for state in ("completed", "failed", "delayed", "prioritized"):
        kit.seed(f"a-{state}", to=state, score=4096 * (kit.server_ms() + 9_000_000) if state == "delayed" else 4096)
    kit.seed("ranked", to="failed", score=4096, priority=3)
    kit.seed("waits", to="wait")
    kit.seed("runs", to="active")
    kit.seed("parent", to="waiting-children", score=1)
    kit.seed(
        "child",
        to="wait",
        parentKey=f"{kit.base}parent",
        parent=json.dumps({"id": "parent", "queueKey": kit.base[:-1]}),
    )
    kit.redis.sadd(f"{kit.base}parent:dependencies", f"{kit.base}child")
    letters = f"{kit.base[:-1]}-dlq:"
    for job_id in ("a-failed", "gone", "ranked"):
        entry = f"dl-{job_id}-1"
        told: dict[str, Any] = {
            "originalJobId": job_id,
            "originalJobName": "n",
            "originalQueue": kit.name,
            "originalData": {},
        }
        kit.redis.hset(letters + entry, mapping={"name": "n", "data": json.dumps(told), "opts": "{}", "timestamp": "1"})
        kit.redis.lpush(letters + "wait", entry)
        if job_id != "gone":
            kit.redis.hset(kit.base + job_id, mapping={"bpdl": entry, "ats": "1"})
    return letters


def placed(kit: Kit) -> set[str]:
    """Every id that a structure lists."""
    found: set[str] = set()
    for state in (*SETS, *LINES):
        kind = kit.redis.type(kit.base + state)
        if kind == b"zset":
            found |= set(kit.zset(state))
        elif kind == b"list":
            found |= set(kit.ids(state))
    return found


def jobs(kit: Kit) -> set[str]:
    states = ("a-completed", "a-failed", "a-delayed", "a-prioritized")
    names = (*states, "ranked", "waits", "runs", "parent", "child", "gone")
    return {name for name in names if kit.redis.type(kit.base + name) == b"hash"}


def homeless(kit: Kit, letters: str, before: set[str]) -> set[str]:
    """Jobs that lost their place, and what was neither sent back nor is still a letter."""
    lost = (before & jobs(kit)) - placed(kit)
    if "gone" not in placed(kit) and not kit.redis.exists(letters + "dl-gone-1"):
        lost.add("gone")
    return lost


def clear(kit: Kit) -> None:
    if keys := kit.redis.keys(f"{kit.base[:-1]}*"):
        kit.redis.delete(*keys)


@pytest.mark.parametrize("call", CALLS)
async def test_no_job_leaves_every_list_for_a_key_of_another_type(kit: Kit, call: str) -> None:
    queue, lost = kit.queue(), {}
    fill(kit)
    await CALLS[call](queue)  # it works when nothing is wrong
    for key in KEYS:
        clear(kit)
        letters = fill(kit)
        wrong = letters + key.removeprefix("letters ") if key.startswith("letters ") else kit.base + key
        kit.redis.delete(wrong)
        kit.redis.setbit(wrong, 7, 1) if key in ("meta", "letters meta") else kit.redis.hset(wrong, "a", "hash")
        before = jobs(kit) & placed(kit)
        with contextlib.suppress(BullpenError):
            await CALLS[call](queue)
        if found := homeless(kit, letters, before):
            lost[key] = found
    clear(kit)
    assert lost == {}


# Parents ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key", ["wait", "prioritized", "delayed", "paused", "meta", "events", "waiting-children", "pc"]
)
@pytest.mark.parametrize("policy", ["completed", "fpof", "cpof", "idof", "rdof"])
async def test_a_broken_queue_of_the_parent_costs_neither_parent_nor_child(kit: Kit, key: str, policy: str) -> None:
    """The child ends in its own queue, its neighbour too; the parent keeps a place where it had one."""
    base = f"{kit.base[:-1]}-parents:"
    kit.redis.hset(
        f"{base}parent", mapping={"name": "p", "data": "{}", "opts": "{}", "timestamp": "1", "priority": "0"}
    )
    kit.redis.zadd(f"{base}waiting-children", {"parent": 1})
    kit.redis.sadd(f"{base}parent:dependencies", f"{kit.base}child")
    told = json.dumps({"id": "parent", "queueKey": base[:-1], **({} if policy == "completed" else {policy: True})})
    kit.seed("neighbour")
    kit.seed("child", parentKey=f"{base}parent", parent=told)
    kit.redis.delete(base + key)
    kit.redis.setbit(base + key, 7, 1) if key == "meta" else kit.redis.hset(base + key, "a", "hash")
    failing = Failing(ValueError("no"), ValueError("no"))

    await kit.drain(nothing if policy == "completed" else failing, 2)

    assert placed(kit) >= {"child", "neighbour"}
    if key != "waiting-children":
        lists = [f"{base}{each}" for each in (*SETS, *LINES)]
        found: list[Any] = [kit.redis.zscore(each, "parent") for each in lists if kit.redis.type(each) == b"zset"]
        found += [kit.redis.lpos(each, "parent") for each in lists if kit.redis.type(each) == b"list"]
        assert any(place is not None for place in found)
    kit.redis.delete(*kit.redis.keys(f"{base}*"))


# New jobs, lanes, schedulers ------------------------------------------------------------------------------------------

LANE_KEYS = ("bp:held:x", "bp:running:x", "bp:size:x", "bp:rate:x", "bp:lanes:1", "bp:lanes:held")
NEWER_KEYS = (*SETS, *LINES, *OTHERS, *SUFFIXES, *LANE_KEYS, "de:own", "dn:own", "top:dependencies", "repeat:s")
TEXTS = ("meta", "dn:own", "repeat:s")
"""Hashes: a text in their place is the other type."""


async def parent_of(queue: Queue) -> Job:
    found = await queue.get_job("parent")
    assert found is not None
    return found


async def add_many(queue: Queue) -> None:
    kinds: list[NewJobArguments] = [{}, {"priority": 3}, {"delay": 90_000}, {"lane": "x"}, {"lifo": True}]
    for number, kind in enumerate(kinds):
        kind["job_id"] = f"m{number}x"
    await queue.add_many([NewJob("n", {}, kind) for kind in kinds])


async def add_together(queue: Queue) -> None:
    """In one call, as strangers in one process do. Each is told of its own job."""
    keeps = Deduplication("own", keep_last_if_active=True)
    parent = await parent_of(queue)
    answers = await asyncio.gather(
        queue.add("n", job_id="c1x"),
        queue.add("n", job_id="c2x", deduplication=keeps),
        queue.add("n", job_id="c3x", priority=2),
        queue.add("n", job_id="c4x", delay=90_000),
        queue.add("n", job_id="c5x", lane="x"),
        queue.add("n", job_id="a-completed", parent=parent, on_failure="wait"),
        queue.add("n", job_id="c6x", parent=parent, on_failure="wait"),
        return_exceptions=True,
    )
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer


async def add_flow(queue: Queue) -> None:
    kinds: list[dict[str, Any]] = [{}, {"priority": 3}, {"delay": 90_000}, {"lane": "x"}]
    children = [Flow("n", job_id=f"f{at}x", on_failure="wait", **kind) for at, kind in enumerate(kinds)]
    stored = Flow("n", job_id="a-completed", on_failure="fail_parent")
    await queue.add_flow(Flow("top", job_id="top", children=[*children, stored]))


async def pause_and_resume(queue: Queue) -> None:
    await queue.pause_scheduler("s")
    await queue.resume_scheduler("s")


NEWER_CALLS: dict[str, Call] = {
    "add": lambda queue: queue.add("n", job_id="newx"),
    "add_many": add_many,
    "adds of many callers": add_together,
    "add_flow": add_flow,
    "a new scheduler": lambda queue: queue.upsert_scheduler("s2", every=60_000),
    "a new scheduler of a lane": lambda queue: queue.upsert_scheduler("s3", every=60_000, lane="x"),
    "a changed scheduler": lambda queue: queue.upsert_scheduler("s", every=30_000),
    "a scheduler that rests": pause_and_resume,
    "remove_scheduler": lambda queue: queue.remove_scheduler("s"),
    "cancel": lambda queue: queue.cancel("a-delayed"),
    "cancel a child": lambda queue: queue.cancel("child"),
    "a limit of a lane": lambda queue: queue.lanes.set("x", concurrency=1),
    "restore_orphans": lambda queue: queue.restore_orphans(),
}


def fill_more(kit: Kit) -> None:
    fill(kit)
    kit.redis.hset(kit.base + "a-delayed", "deid", "own")
    kit.redis.set(kit.base + "de:own", "a-delayed")
    kit.redis.hset(kit.base + "dn:own", mapping={"name": "next", "data": "{}", "opts": "{}"})
    due = kit.server_ms() + 3_600_000
    kit.seed("held", to="delayed", score=4096 * due, priority=1, bplane="x")
    kit.seed("orphan", to=None, priority=1, bplane="x")


def all_jobs(kit: Kit) -> set[str]:
    found = (
        key.decode().removeprefix(kit.base) for key in kit.redis.scan_iter(f"{kit.base}*", count=1_000, _type="hash")
    )
    return {rest for rest in found if not rest.startswith("dn:") and is_job(kit, rest)}


def is_job(kit: Kit, rest: str) -> bool:
    name, of_scheduler = kit.redis.hmget(kit.base + rest, ["name", "ic"])
    return name is not None and of_scheduler is None


def spoil(kit: Kit, key: str) -> None:
    kit.redis.delete(kit.base + key)
    kit.redis.set(kit.base + key, "x") if key in TEXTS else kit.redis.hset(kit.base + key, "a", "hash")


@pytest.mark.parametrize("call", NEWER_CALLS)
async def test_what_cannot_be_placed_is_not_stored(kit: Kit, call: str) -> None:
    """Else the caller's next try would be told that the job is there already, and nobody would ever run it."""
    queue, homeless = kit.queue(), {}
    for key in NEWER_KEYS:
        clear(kit)
        fill_more(kit)
        await queue.upsert_scheduler("s", every=60_000)
        spoil(kit, key)
        before = all_jobs(kit) - placed(kit)
        with contextlib.suppress(BullpenError):
            await NEWER_CALLS[call](queue)
        if found := all_jobs(kit) - placed(kit) - before:
            homeless[key] = found
    clear(kit)
    assert homeless == {}


async def test_one_add_that_cannot_be_stored_harms_no_other_of_its_call(kit: Kit) -> None:
    queue, blocking = kit.queue(), SyncQueue(kit.name, connection=kit.url)
    await queue.add("parent", job_id="parent", delay=90_000)
    parent = await parent_of(queue)
    spoil(kit, "parent:dependencies")
    spoil(kit, "prioritized")
    kit.redis.set(kit.base + "text", "no job")

    answers = await asyncio.gather(
        queue.add("a", job_id="ax"),
        queue.add("b", job_id="bx", parent=parent, on_failure="wait"),
        queue.add("c", job_id="cx", priority=2),
        queue.add("d", job_id="text"),
        queue.add("e", job_id="ex"),
        return_exceptions=True,
    )

    assert [type(each) for each in answers] == [Job, ServerRefused, ServerRefused, Job, Job]
    refused = str(answers[2])
    assert "'cx'" in refused
    assert "was not stored" in refused
    assert f"{kit.base}prioritized" in refused
    with pytest.raises(ServerRefused, match="was not stored"):
        blocking.add("f", job_id="fx", lane="x")
    blocking.close()
    assert kit.ids("wait") == ["ax", "ex"]
    assert not any(kit.has(each) for each in ("bx", "cx", "fx"))
    clear(kit)


async def test_an_event_stream_of_another_type_holds_up_no_add(kit: Kit) -> None:
    queue = kit.queue()
    spoil(kit, "events")

    job = await queue.add("a")
    await queue.add_flow(Flow("top", children=[Flow("leaf", on_failure="wait")]))

    assert job.id in kit.ids("wait")
    clear(kit)


OUTCOMES: list[Outcome] = [
    Completed(b"1"),
    Failed("no", "stack", Cause.EXHAUSTED),
    Retry("no", "stack", 50),
    Waiting(),
    Delayed(50),
]


@pytest.mark.parametrize("key", ["prioritized", "delayed", "wait", "active", "meta", "pc", *LANE_KEYS])
async def test_limited_lanes_lose_no_job_that_was_taken_off_the_line(kit: Kit, key: str) -> None:
    """A lane holds some; others stand in line. The key is spoiled before the first take, or after it."""
    for outcome in OUTCOMES:
        for spoiled_at in (0, 1):
            clear(kit)
            limits: dict[Any, Any] = {"bplanes": "limited", "bplane:x": "- 1 5 1000 - 100", "bplane:y": "- 1 - - - -"}
            kit.redis.hset(kit.base + "meta", mapping={"opts.maxLenEvents": "10000", **limits})
            now = kit.server_ms()
            for number in range(6):
                lane = "xy"[number % 2]
                kit.seed(f"line-{number}", to="wait", bplane=lane)
                kit.seed(f"ranked-{number}", to="prioritized", score=2.0**32 + number, priority=1, bplane=lane)
                kit.seed(f"held-{number}", to="delayed", score=4096 * (now + 3_600_000), priority=1, bplane=lane)
                kit.redis.zadd(f"{kit.base}bp:held:{lane}", {f"held-{number}": now * 1_000 + number})
            kit.seed("last", to="wait")
            todo: list[JobSettlement] = []
            async with exchange_of(kit.queue(), kit.url) as exchange:
                for step in range(3):
                    if step == spoiled_at:
                        spoil(kit, key)
                        homeless = all_jobs(kit) - placed(kit)
                    with contextlib.suppress(ServerRefused):
                        reply = await exchange.run(todo, 3)
                        todo = [JobSettlement(job, outcome) for job in reply.taken]
            assert all_jobs(kit) - placed(kit) == homeless, (outcome, spoiled_at)
    clear(kit)


@pytest.mark.parametrize("key", ["prioritized", "delayed"])
async def test_an_outcome_is_told_although_the_next_job_cannot_be_taken(kit: Kit, key: str) -> None:
    """It was stored, and the worker said that it was dropped."""
    kit.seed("done")
    async with exchange_of(kit.queue(), kit.url) as exchange:
        (job,) = (await exchange.run([], 1)).taken
        spoil(kit, key)
        kit.seed("next")

        reply = await exchange.run([JobSettlement(job, Completed(b"1"))], 2)

        assert reply.codes == [0]
        assert reply.has_more
        with pytest.raises(ServerRefused, match=key):
            await exchange.run([], 2)
    assert list(kit.zset("completed")) == ["done"]
    assert kit.ids("wait") == ["next"]
    clear(kit)
