"""A process that makes or advances a scheduler is killed at every step: one job to come stays, the chain goes on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bullpen.queue import Job
from bullpen.testing import Child
from bullpen.wire.scripts import SCRIPTS
from tests.queue._kit import Kit

HOUR = 3_600_000

# Dies by SIGKILL before a call of its choice is sent, or when its answer has come, or in the handler.
VICTIM = """
import asyncio, json, os, signal, sys
from bullpen.queue import Queue
from bullpen.queue.actions import AsyncActions
from bullpen.worker import Worker

url, name, role, step, rule = sys.argv[1:]
when, _, call = step.partition(" ")

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def dying(method):
    async def act(self, first, *rest, **named):
        mine = (first if isinstance(first, str) else "read") == call
        if mine and when == "before":
            die()
        answer = await method(self, first, *rest, **named)
        if mine and when == "after":
            die()
        return answer
    return act

AsyncActions.evaluate = dying(AsyncActions.evaluate)
AsyncActions.evaluate_noting_repeats = dying(AsyncActions.evaluate_noting_repeats)
AsyncActions.commands = dying(AsyncActions.commands)

async def handle(job):
    if when == "in":
        die()

async def main():
    if role == "worker":
        async with Worker(name, handle, connection=url, lock=500, stalled_interval=100):
            await asyncio.sleep(60)
    queue = Queue(name, connection=url)
    await getattr(queue, role)("s", **json.loads(rule))
    await asyncio.sleep(60)

asyncio.run(main())
"""


def to_come(kit: Kit) -> list[str]:
    waiting = [*kit.zset("delayed"), *kit.zset("prioritized"), *kit.ids("wait")]
    return [job_id for job_id in waiting if job_id.startswith("repeat:s:")]


async def let_die(kit: Kit, role: str, step: str, **rule: Any) -> None:
    with Child.code(VICTIM, kit.url, kit.name, role, step, json.dumps(rule)) as victim:
        assert await victim.ended() == -9


@pytest.fixture(autouse=True)
def scripts(kit: Kit) -> None:
    for script in SCRIPTS.values():
        kit.command("SCRIPT", "LOAD", script.body)


@pytest.mark.requirement("X-28")
@pytest.mark.parametrize("overlap", ["queue", "skip", "one"])
@pytest.mark.parametrize(
    "step", ["before read", "after read", "before advance_scheduler", "after advance_scheduler", "in handler"]
)
async def test_a_worker_that_dies_while_it_advances_cuts_no_chain_and_makes_no_second_job(
    kit: Kit, step: str, overlap: Any
) -> None:
    queue = kit.queue()
    made = await queue.upsert_scheduler("s", every=HOUR, overlap=overlap)
    await let_die(kit, "worker", step)
    ran: list[str] = []

    async def note(job: Job) -> None:
        ran.append(job.id)

    told = await kit.work(note, stalled_interval=200, lock=1_000)
    await told.wait("completed")

    following = f"repeat:s:{made.next_ms + HOUR}"
    assert ran == [made.job_id]
    assert to_come(kit) == [following]
    assert kit.fields("repeat:s")["ic"] == "2"
    await queue.run_scheduler("s", early=True)
    await told.wait("completed", 2)
    assert ran == [made.job_id, following]
    assert to_come(kit) == [f"repeat:s:{made.next_ms + 2 * HOUR}"]


@pytest.mark.parametrize("step", ["before upsert_scheduler", "after upsert_scheduler"])
@pytest.mark.parametrize("exists", [False, True], ids=["new", "changed"])
async def test_a_program_that_dies_while_it_makes_a_scheduler_may_repeat_it(kit: Kit, step: str, exists: bool) -> None:
    queue = kit.queue()
    if exists:
        await queue.upsert_scheduler("s", "old", cron="@yearly")
    await let_die(kit, "upsert_scheduler", step, every=HOUR, offset=1)
    assert len(to_come(kit)) == (1 if exists or step.startswith("after") else 0)

    made = await queue.upsert_scheduler("s", "new", every=HOUR, offset=1)

    assert to_come(kit) == [made.job_id]
    assert kit.fields(made.job_id)["name"] == "new"


@pytest.mark.parametrize("role", ["pause_scheduler", "resume_scheduler", "remove_scheduler"])
@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_command_that_dies_leaves_a_scheduler_that_can_go_on(kit: Kit, role: str, when: str) -> None:
    queue = kit.queue()
    await queue.upsert_scheduler("s", every=HOUR, offset=1)
    if role == "resume_scheduler":
        await queue.pause_scheduler("s")

    await let_die(kit, role, f"{when} {role}")
    await queue.upsert_scheduler("s", every=HOUR, offset=1)
    await queue.resume_scheduler("s")

    found = await queue.get_scheduler("s")
    assert found is not None and not found.is_paused
    assert to_come(kit) == [found.job_id]
