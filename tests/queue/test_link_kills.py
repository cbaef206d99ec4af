"""A worker is killed at every step of a flow and of a deduplicated job: no parent is stuck, and no id stays taken."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from bullpen.queue import Added, Deduplication, Flow, Job
from bullpen.testing import Child
from tests.queue._kit import PATIENCE_S, Kit

# Dies by SIGKILL in the handler of the job that it is told, or before or behind the answer to the call that settles it.
VICTIM = """
import asyncio, os, signal, sys
from bullpen.worker import Worker
from bullpen.worker.exchange import Exchange

url, name, step, at = sys.argv[1:]
last = []

def die():
    os.kill(os.getpid(), signal.SIGKILL)

send, take_in = Exchange.send, Exchange.take_in

def dying_send(self, settlements, *rest):
    if step == "before settling" and any(settlement.job.name == at for settlement in settlements):
        die()
    return send(self, settlements, *rest)

def dying_take_in(self, flight, answer):
    reply = take_in(self, flight, answer)
    if step == "after settling" and reply.codes and last[-1:] == [at]:
        die()
    return reply

Exchange.send, Exchange.take_in = dying_send, dying_take_in

async def handle(job):
    last.append(job.name)
    if step == "in the handler" and job.name == at:
        die()
    return job.name

async def main():
    async with Worker(name, handle, connection=url, lock=500, stalled_interval=100):
        await asyncio.sleep(60)

asyncio.run(main())
"""


async def finish(kit: Kit, count: int) -> list[str]:
    """A worker that lives does the rest; returns the names of the jobs that it ran."""
    ran: list[str] = []

    async def handle(job: Job) -> str:
        ran.append(job.name)
        return job.name

    told = await kit.work(handle, stalled_interval=200, lock=1_000)
    await told.finished(count)
    return ran


@pytest.mark.parametrize(
    ("step", "at"),
    [
        ("in the handler", "first"),
        ("before settling", "last"),
        ("after settling", "last"),
        ("after settling", "parent"),
        pytest.param("in the handler", "last", marks=pytest.mark.long),
        pytest.param("in the handler", "parent", marks=pytest.mark.long),
        pytest.param("before settling", "first", marks=pytest.mark.long),
        pytest.param("before settling", "parent", marks=pytest.mark.long),
        pytest.param("after settling", "first", marks=pytest.mark.long),
    ],
)
async def test_a_parent_runs_once_after_all_its_children_whoever_dies(kit: Kit, step: str, at: str) -> None:
    """While a child runs, before and after its end is stored, and the same of the parent itself."""
    queue = kit.queue()
    children = [Flow(name, on_failure="fail_parent") for name in ("first", "middle", "last")]
    flow = await queue.add_flow(Flow("parent", children=children))

    with Child.code(VICTIM, kit.url, kit.name, step, at) as victim:
        assert await asyncio.wait_for(victim.ended(), PATIENCE_S) == -9
    jobs = [flow.job, *(child.job for child in flow.children)]
    done = [job for job in jobs if "finishedOn" in kit.fields(job.id)]
    ran = await finish(kit, len(jobs) - len(done)) if len(done) < len(jobs) else []

    assert set(kit.zset("completed")) == {job.id for job in jobs}
    assert sorted([*ran, *(job.name for job in done)]) == ["first", "last", "middle", "parent"]
    values = await queue.children(flow.job.id)
    assert sorted(values.processed.values()) == ["first", "last", "middle"]
    assert not values.pending
    assert {kit.fields(job.id).get("atm") for job in jobs} == {"1"}


SIMPLE, KEEP_LAST = Deduplication("one"), Deduplication("one", keep_last_if_active=True)
THROTTLE = Deduplication("one", ttl=60_000)


@pytest.mark.parametrize(
    ("step", "rule"),
    [
        ("in the handler", SIMPLE),
        ("before settling", KEEP_LAST),
        ("after settling", SIMPLE),
        ("after settling", THROTTLE),
        pytest.param("in the handler", KEEP_LAST, marks=pytest.mark.long),
        pytest.param("in the handler", THROTTLE, marks=pytest.mark.long),
        pytest.param("before settling", SIMPLE, marks=pytest.mark.long),
        pytest.param("before settling", THROTTLE, marks=pytest.mark.long),
        pytest.param("after settling", KEEP_LAST, marks=pytest.mark.long),
    ],
)
async def test_an_id_is_free_when_its_job_has_ended_and_not_before(kit: Kit, step: str, rule: Any) -> None:
    """A worker that dies must neither free the id of a job that will run again, nor keep that of one that is done."""
    queue = kit.queue()
    first = await queue.add("first", deduplication=rule)

    with Child.code(VICTIM, kit.url, kit.name, step, "first") as victim:
        assert await asyncio.wait_for(victim.ended(), PATIENCE_S) == -9
    has_ended = step == "after settling"
    second = await queue.add("second", {"n": 2}, deduplication=rule)

    is_throttled = rule.ttl is not None
    is_free = has_ended and not is_throttled
    assert (second.added is Added.CREATED) == is_free
    follows = rule.keep_last_if_active and not has_ended
    ran = await finish(kit, (not has_ended) + is_free + follows)
    assert ran == [*([] if has_ended else ["first"]), *(["second"] if is_free or follows else [])]
    held = kit.redis.get(f"{kit.base}de:one")
    assert held == (first.id.encode() if is_throttled else None)
    assert len(kit.zset("completed")) == 1 + is_free + follows
    if follows:
        [later] = set(kit.zset("completed")) - {first.id}
        assert json.loads(kit.fields(later)["data"]) == {"n": 2}
