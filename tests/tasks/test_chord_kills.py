"""A worker is killed at every step between the last member of a chord and the end of its callback.

Whoever dies, the callback runs to its end with the results of all members, and nothing that was settled runs again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from bullpen import Bullpen, JobFailed, JobState, chord, group
from bullpen.testing import Child
from tests.tasks.chord_process import CALLBACKS, MEMBERS, tasks_of

pytestmark = pytest.mark.requirement("W-84")

ROOT = Path(__file__).parents[2]
COUNT, LAST = 3, f"~{3 - 1}"
CHORD, CALLBACK = "sum-callback", "-callback"
SQUARES = [number * number for number in range(COUNT)]
PATIENCE_MS = 120_000


@asynccontextmanager
async def running(app: Bullpen) -> AsyncIterator[None]:
    run = asyncio.create_task(app.run(signals=False))
    try:
        yield
    finally:
        await app.stop()
        await run


async def killed(url: str, step: str, at: str) -> None:
    with Child.module("tests.tasks.chord_process", url, step, at, cwd=ROOT) as victim:
        assert await victim.ended(PATIENCE_MS / 1_000) == -9


def stored(url: str, queue: str, job: str) -> dict[bytes, bytes]:
    with redis.Redis.from_url(url) as client:
        fields: Any = client.hgetall(f"bull:{queue}:{job}")
    return dict(fields)


def ended(url: str) -> list[str]:
    """The jobs of the chord that have ended."""
    jobs = [(MEMBERS, f"{CHORD}~{number}") for number in range(COUNT)] + [(CALLBACKS, CHORD)]
    return [job for queue, job in jobs if b"finishedOn" in stored(url, queue, job)]


STEPS = [
    ("while it runs", LAST),
    ("before its end is sent", LAST),
    ("after its end is stored", LAST),
    ("before its results are read", CALLBACK),
    ("after its results are read", CALLBACK),
    ("while it runs", CALLBACK),
    ("before its end is sent", CALLBACK),
    ("after its end is stored", CALLBACK),
]


@pytest.mark.parametrize(("step", "at"), STEPS)
async def test_the_callback_runs_to_its_end_whoever_dies(redis_url: str, step: str, at: str) -> None:
    """One job is the victim's last; those that it had settled do not run again, the others do."""
    ran: list[Any] = []
    app, square, collect = tasks_of(redis_url, told=lambda what, value: ran.append(value))
    callback = collect.options(job_id=CHORD).after()
    job = await chord(group(square.call(number) for number in range(COUNT)), callback).add()
    assert job.id == CHORD

    await killed(redis_url, step, at)
    before = ended(redis_url)
    async with running(app):
        assert await job.result(PATIENCE_MS) == SQUARES
        assert not [one async for one in app.queue(CALLBACKS).blocked_parents()]

    # At the last member all the others have ended; at the callback, all of them.
    members_left = [COUNT - 1] if at == LAST and step != "after its end is stored" else []
    is_done = (step, at) == ("after its end is stored", CALLBACK)
    assert len(before) == COUNT - len(members_left) + is_done
    assert ran == [*members_left, *([] if is_done else [SQUARES])]
    assert json.loads(stored(redis_url, CALLBACKS, CHORD)[b"returnvalue"]) == SQUARES
    assert stored(redis_url, CALLBACKS, CHORD)[b"atm"] == b"1"


@pytest.mark.parametrize("on_failure", ["wait", "fail_parent"])
@pytest.mark.parametrize("step", ["while it runs", "before its end is sent", "after its end is stored"])
async def test_a_member_that_was_redriven_is_counted_once_whoever_dies(
    redis_url: str, step: str, on_failure: Any
) -> None:
    """Its worker is killed in its second life. The callback, waiting or failed until then, gets all results."""
    failing, square, collect = tasks_of(redis_url, failing=1)
    members = group(square.call(number) for number in range(COUNT))
    job = await chord(members, collect.options(job_id=CHORD).after(), on_failure=on_failure).add()
    async with running(failing):
        member = await failing.queue(MEMBERS).get_job(f"{CHORD}~1")
        last = await failing.queue(MEMBERS).get_job(f"{CHORD}{LAST}")
        assert member is not None
        assert last is not None
        with pytest.raises(JobFailed):
            await member.result(PATIENCE_MS)
        await last.result(PATIENCE_MS)
        if on_failure == "fail_parent":
            with pytest.raises(JobFailed, match="child"):
                await job.result(PATIENCE_MS)

    ran: list[Any] = []
    app, _, _ = tasks_of(redis_url, told=lambda what, value: ran.append(value))
    assert (await app.queue(MEMBERS).dead_letters.redrive_all()).done == 1
    await killed(redis_url, step, "~1")
    is_done = step == "after its end is stored"
    async with running(app):
        again = await app.queue(MEMBERS).get_job(f"{CHORD}~1")
        callback = await app.queue(CALLBACKS).get_job(CHORD)
        assert again is not None
        assert callback is not None
        assert await again.result(PATIENCE_MS) == 1
        if on_failure == "fail_parent":
            assert await app.queue(CALLBACKS).state_of(CHORD) is JobState.FAILED
            await app.queue(CALLBACKS).retry(CHORD)
        assert await callback.result(PATIENCE_MS) == SQUARES
        counts = await app.queue(CALLBACKS).children_counts(CHORD)
    assert ran == [*([] if is_done else [1]), SQUARES]
    assert (counts.processed, counts.pending, counts.failed) == (COUNT, 0, 0)
