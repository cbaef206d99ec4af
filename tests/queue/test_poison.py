"""Jobs that kill their process: found out alone, and nobody else suffers."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from bullpen.queue import Job
from bullpen.testing import Child
from tests.forks import WarmChild
from tests.queue._kit import Gate, Kit, nothing

WORKER_SCRIPT = """
import asyncio, os, sys
from bullpen.worker import Worker

async def handle(job):
    print("began", job.name)
    await asyncio.sleep(job.data.get("s", 0.02))
    if job.name == "poison":
        os._exit(1)

async def main():
    url, queue, concurrency = sys.argv[1:]
    await Worker(
        queue, handle, connection=url, concurrency=int(concurrency), lock=400, stalled_interval=500, dead_letters=True
    ).run()

asyncio.run(main())
"""


def _start_worker(kit: Kit, *, concurrency: int = 10) -> Child:
    return WarmChild.code(WORKER_SCRIPT, kit.url, kit.name, str(concurrency))


def _ended(kit: Kit) -> int:
    return int(kit.command("ZCARD", f"{kit.base}completed")) + int(kit.command("ZCARD", f"{kit.base}failed"))


async def _replace_the_dead(kit: Kit, jobs: int) -> int:
    """Start a worker for each that dies by itself, until so many jobs have ended. Returns how many died."""
    deaths = 0
    worker = _start_worker(kit)
    try:
        async with asyncio.timeout(60):
            while _ended(kit) < jobs:
                if not worker.is_running:
                    deaths += 1
                    worker.close()
                    worker = _start_worker(kit)
                await asyncio.sleep(0.05)
        worker.terminate()
        await worker.ended()
    finally:
        worker.close()
    return deaths


@pytest.mark.requirement("X-13", "Q-27", "Q-67")
async def test_a_poison_job_costs_four_deaths_and_no_innocent(kit: Kit) -> None:
    """Neighbours die with it and stall as often as it does: only deaths while alone prove who the killer is."""
    queue = kit.queue()
    await queue.add_many([("poison" if index == 25 else "plain", {"n": index}) for index in range(60)])

    deaths = await _replace_the_dead(kit, 60)

    counts = await queue.counts()
    (letter,) = await queue.dead_letters.list()
    assert (counts.completed, counts.failed, deaths) == (59, 1, 4)
    assert (letter.job_name, letter.cause) == ("poison", "poison")
    assert letter.error_message == "killed its worker 2 times while it ran alone (stalled 4 times)"


@pytest.mark.requirement("X-13")
async def test_a_job_whose_lonely_worker_was_killed_from_outside_gets_another_run(kit: Kit) -> None:
    """One death while alone may be the machine's; the second run shows that the job does no harm."""
    kit.seed("good", stc=2, ats=2, data='{"s":30}', opts='{"attempts":10}')
    with _start_worker(kit) as worker:
        await worker.seen("^began")
        worker.kill()
        await worker.ended()

    told = await kit.drain(nothing, 1, stalled_interval=100)

    assert told.ids("completed") == ["good"]


@pytest.mark.requirement("X-13")
async def test_a_poison_job_is_not_acquitted_by_a_death_while_it_waits(kit: Kit) -> None:
    """Between its two lonely runs its worker is killed while it waits for a neighbour: that proves nothing at all."""
    queue = kit.queue()
    kit.seed("poison", name="poison", stc=2, ats=2)
    with _start_worker(kit) as worker:
        await worker.ended()
    neighbour = await queue.add("neighbour", {"s": 30})
    with _start_worker(kit) as worker:
        await worker.seen("^began neighbour")
        await kit.until(lambda: kit.fields("poison")["ats"] == "4", "the poison job is taken too")
        worker.kill()
        await worker.ended()
    await neighbour.update_data({"s": 0})

    assert await _replace_the_dead(kit, 2) == 1  # the second lonely run
    (letter,) = await queue.dead_letters.list()
    assert letter.error_message == "killed its worker 2 times while it ran alone (stalled 5 times)"


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


DIED_ONCE_ALONE: dict[str, Any] = {"stc": 3, "ats": 3, "bpsolo": 3, "bpstc": 2, "bpatm": 0}


@pytest.mark.requirement("X-13", "X-105")
async def test_a_job_that_died_while_alone_is_failed_without_a_run(kit: Kit) -> None:
    """The dead letter tells the cause, whatever attempts are left."""
    kit.seed("killer", **DIED_ONCE_ALONE, bpdeaths=1, opts='{"attempts":9}')

    told = await kit.drain(nothing, 1, dead_letters=True)

    (letter,) = await kit.queue().dead_letters.list()
    assert told.ids("failed") == ["killer"]
    assert (letter.job_id, letter.cause) == ("killer", "poison")
    assert told.of("active") != []
    assert told.of("suspect") == []  # it does not run


@pytest.mark.requirement("X-13")
@pytest.mark.parametrize(
    ("limit", "before", "end"), [(1, 0, "failed"), (2, 0, "completed"), (3, 1, "completed"), (3, 2, "failed")]
)
async def test_the_number_of_lonely_deaths_can_be_set(kit: Kit, limit: int, before: int, end: str) -> None:
    """Where machines die every day, two deaths prove little."""
    kit.seed("killer", **DIED_ONCE_ALONE, bpdeaths=before)

    told = await kit.drain(nothing, 1, max_lonely_deaths=limit)

    assert told.ids(end) == ["killer"]


@pytest.mark.requirement("X-13")
async def test_lonely_deaths_can_be_ignored(kit: Kit) -> None:
    """Then a job runs alone as often as it must."""
    kit.seed("killer", **DIED_ONCE_ALONE, bpdeaths=40)

    told = await kit.drain(nothing, 1, max_lonely_deaths=None)

    assert told.ids("completed") == ["killer"]


@pytest.mark.requirement("X-13")
async def test_an_attempt_that_ends_while_alone_clears_the_job(kit: Kit) -> None:
    """It ran without killing anybody, so the death before was not its doing."""
    kit.seed("suspect", **DIED_ONCE_ALONE, opts='{"attempts":3}')
    stored: list[str] = []

    async def fail_once(job: Job) -> None:
        stored.append(kit.fields("suspect")["bpdeaths"])
        if len(stored) == 1:
            raise ValueError("flaky")

    await kit.drain(fail_once, 1)

    assert stored == ["1", "0"]


@pytest.mark.requirement("X-13")
async def test_a_run_alone_that_is_given_back_clears_nobody(kit: Kit) -> None:
    """An orderly stop in the middle of the run shows nothing; else every deploy would cost two processes more."""
    kit.seed("suspect", **DIED_ONCE_ALONE)
    gate = Gate()
    told = await kit.work(gate)
    await gate.reached(1)
    await told.worker.close(0)

    await kit.drain(nothing, 1)

    assert kit.fields("suspect")["bpdeaths"] == "1"


@pytest.mark.requirement("X-13")
async def test_a_condemned_job_that_another_client_puts_back_begins_anew(kit: Kit) -> None:
    """Its retry knows nothing of our fields; somebody has mended the job, and it gets its runs."""
    kit.seed("mended", **DIED_ONCE_ALONE, bpdeaths=1)
    assert (await kit.drain(nothing, 1)).ids("failed") == ["mended"]
    key = f"{kit.base}mended"
    kit.command("ZREM", f"{kit.base}failed", "mended")
    kit.command("HDEL", key, "finishedOn", "processedOn", "failedReason", "returnvalue")
    kit.command("LPUSH", f"{kit.base}wait", "mended")

    assert (await kit.drain(nothing, 1)).ids("completed") == ["mended"]


class _Fleet:
    """Three workers; whoever dies is replaced, and who died by itself is counted."""

    def __init__(self, kit: Kit) -> None:
        self._kit = kit
        self.own_deaths = 0
        self.workers = [_start_worker(kit, concurrency=4) for _ in range(3)]

    async def kill(self, at: int) -> None:
        victim = self.workers[at]
        self.own_deaths += not victim.is_running
        victim.kill()
        await victim.ended()
        self._replace(at)

    def replace_the_dead(self) -> None:
        for at, worker in enumerate(self.workers):
            if not worker.is_running:
                self.own_deaths += 1
                self._replace(at)

    def _replace(self, at: int) -> None:
        self.workers[at].close()
        self.workers[at] = _start_worker(self._kit, concurrency=4)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


@pytest.mark.requirement("X-13")
@pytest.mark.parametrize(
    ("seed", "kills", "jobs", "pause_s", "poison"),
    [
        (0, 3, 400, 0.4, 0),
        *(pytest.param(seed, 40, 7_500, 1.2, seed % 4, marks=pytest.mark.long) for seed in range(10)),
    ],
)
async def test_kills_from_outside_fail_nobody_but_poison(
    kit: Kit, seed: int, kills: int, jobs: int, pause_s: float, poison: int
) -> None:
    """Three workers, and again and again one of them is killed, whatever it does just then. Jobs that kill their worker
    are among the others: each costs at most four processes, and nobody fails but they."""
    random = Random(seed)
    work = [("poison" if number < poison else "plain", {"s": random.uniform(0.02, 0.1)}) for number in range(jobs)]
    random.shuffle(work)
    await kit.queue(attempts=1).add_many(work)
    fleet = _Fleet(kit)
    try:
        await fleet.workers[0].seen("^began")
        for _ in range(kills):
            await asyncio.sleep(random.uniform(0.2, 1) * pause_s)
            assert _ended(kit) < jobs, "the kills came too late"
            fleet.replace_the_dead()
            await fleet.kill(random.randrange(3))
        async with asyncio.timeout(180):
            while _ended(kit) < jobs:
                fleet.replace_the_dead()
                await asyncio.sleep(0.05)
    finally:
        fleet.close()

    failed = [kit.fields(raw.decode())["name"] for raw in kit.command("ZRANGE", f"{kit.base}failed", 0, -1)]
    assert failed == ["poison"] * poison
    assert fleet.own_deaths <= 4 * poison
