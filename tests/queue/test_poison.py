"""Jobs that kill their process: found out alone, and nobody else suffers."""

from __future__ import annotations

import asyncio

import pytest

from bullpen.testing import Child
from tests.queue._kit import Gate, Kit, nothing

WORKER_SCRIPT = """
import asyncio, os, sys
from bullpen.queue import Worker

async def handle(job):
    await asyncio.sleep(0.02)
    if job.name == "poison":
        os._exit(1)

async def main():
    await Worker(
        sys.argv[2], handle, connection=sys.argv[1], concurrency=10, lock=400, stalled_interval=150, dead_letters=True
    ).run()

asyncio.run(main())
"""


@pytest.mark.requirement("X-13", "Q-27", "Q-67")
async def test_a_poison_job_costs_three_deaths_and_no_innocent(kit: Kit) -> None:
    """Neighbours die with it and stall as often as it does: only a death while alone proves who the killer is."""
    queue = kit.queue()
    await queue.add_many([("poison" if index == 25 else "plain", {"n": index}) for index in range(60)])
    deaths = 0
    worker = Child.code(WORKER_SCRIPT, kit.url, kit.name)
    try:
        async with asyncio.timeout(60):
            while (counts := await queue.counts()).completed + counts.failed < 60:
                if not worker.is_running:
                    deaths += 1
                    worker.close()
                    worker = Child.code(WORKER_SCRIPT, kit.url, kit.name)
                await asyncio.sleep(0.05)
        worker.terminate()
        await worker.ended()
    finally:
        worker.close()

    (letter,) = await queue.dead_letters.list()
    assert (counts.completed, counts.failed, deaths) == (59, 1, 3)
    assert (letter.job_name, letter.cause) == ("poison", "poison")
    assert "while it ran alone" in letter.error_message


@pytest.mark.requirement("X-13")
async def test_a_suspect_waits_until_the_others_have_ended(kit: Kit) -> None:
    """If it shared the process with another job, its death would prove nothing."""
    gate = Gate()
    queue = kit.queue()
    told = await kit.work(gate, concurrency=5)
    await queue.add("long")
    await gate.reached(1)
    kit.seed("suspect", stc=2)
    await told.wait("active", 2)
    late = await queue.add("late")

    assert [job.name for job in gate.entered] == ["long"]
    assert kit.ids("wait") == [late.id]  # nothing more is taken while a suspect waits

    gate.open()
    await told.finished(3)

    assert [job.id for job in gate.entered] == ["1", "suspect", late.id]
    assert kit.fields("suspect")["bpsolo"] == "1"


@pytest.mark.requirement("X-13")
async def test_a_suspect_that_fails_as_others_do_is_not_condemned(kit: Kit) -> None:
    """An exception while alone is a failed attempt; only a stall while alone is a death."""
    kit.seed("suspect", stc=2, opts='{"attempts":2,"backoff":{"type":"fixed","delay":1}}')
    runs = 0

    async def once(job: object) -> None:
        nonlocal runs
        runs += 1
        if runs == 1:
            raise ValueError("flaky")

    told = await kit.drain(once, 1)

    assert told.ids("completed") == ["suspect"]


@pytest.mark.requirement("X-13", "X-105")
async def test_a_job_that_died_while_alone_is_failed_without_a_run(kit: Kit) -> None:
    """The dead letter tells the cause, whatever attempts are left."""
    kit.seed("killer", stc=3, ats=4, bpsolo=4, bpstc=2, opts='{"attempts":9}')

    told = await kit.drain(nothing, 1, dead_letters=True)

    (letter,) = await kit.queue().dead_letters.list()
    assert told.ids("failed") == ["killer"]
    assert (letter.job_id, letter.cause) == ("killer", "poison")
