"""Any key of a queue may have been overwritten by anybody: no job may lose its place for that."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from bullpen.errors import BullpenError
from bullpen.queue import JobState, Queue
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
    kit.redis.delete(*kit.redis.keys(f"{kit.base[:-1]}*"))


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
