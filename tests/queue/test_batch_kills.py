"""A worker is killed at every step of a batch: every job runs to its end, and none that was settled runs again."""

from __future__ import annotations

import json

import pytest

from bullpen.testing import Child
from bullpen.worker import BatchOptions, JobBatch
from tests.queue._kit import Kit

SIZE = 6

# Dies by SIGKILL while jobs wait for their batch, in the handler, between two decisions, or before or behind the answer
# to the exchange that settles the first of them.
VICTIM = """
import asyncio, os, signal, sys
from bullpen.worker import BatchOptions, Worker
from bullpen.worker.exchange import Exchange

url, name, step = sys.argv[1:]

def die():
    os.kill(os.getpid(), signal.SIGKILL)

send, take_in = Exchange.send, Exchange.take_in

def dying_send(self, settlements, *rest):
    if step == "before settling" and settlements:
        die()
    return send(self, settlements, *rest)

def dying_take_in(self, flight, answer):
    reply = take_in(self, flight, answer)
    if step == "after settling" and reply.codes:
        die()
    return reply

Exchange.send, Exchange.take_in = dying_send, dying_take_in

async def handle(batch):
    if step == "in the handler":
        die()
    batch.complete(batch[0], "first")
    if step == "between decisions":
        die()
    await asyncio.sleep(0.2 if step.endswith("settling") else 0)
    return [job.data for job in batch]

async def main():
    waits = step == "waiting"
    options = BatchOptions(size=6, minimum=6 if waits else 1, wait_at_most=60_000 if waits else 1_000)
    async with Worker(name, handle, connection=url, batch=options, lock=500, stalled_interval=100) as worker:
        if waits:
            worker.on("active", lambda job: asyncio.get_running_loop().call_later(0.05, die))
        await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    "step", ["waiting", "in the handler", "between decisions", "before settling", "after settling"]
)
async def test_a_worker_that_dies_with_a_batch_loses_no_job(kit: Kit, step: str) -> None:
    count = SIZE - 1 if step == "waiting" else SIZE
    jobs = await kit.queue().add_many([("row", n) for n in range(count)])
    with Child.code(VICTIM, kit.url, kit.name, step) as victim:
        assert await victim.ended() == -9
    settled = [job.id for job in jobs if "finishedOn" in kit.fields(job.id)]
    ran: list[str] = []

    async def handle(batch: JobBatch) -> list[int]:
        ran.extend(job.id for job in batch)
        return [job.data for job in batch]

    told = await kit.work(handle, batch=BatchOptions(size=SIZE), stalled_interval=200, lock=1_000)
    await told.finished(count - len(settled))

    assert sorted([*ran, *settled]) == sorted(job.id for job in jobs)
    assert set(kit.zset("completed")) == {job.id for job in jobs}
    assert [json.loads(kit.fields(job.id)["returnvalue"]) for job in jobs if job.id in ran] == [
        job.data for job in jobs if job.id in ran
    ]
    assert {kit.fields(job.id).get("atm") for job in jobs} == {"1"}
    assert (len(settled) > 0) == (step == "after settling")
