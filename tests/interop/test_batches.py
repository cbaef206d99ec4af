"""A worker that takes batches beside workers of other clients: each job runs once, wherever it comes from."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import redis

from bullpen.queue import NewJob, Queue
from bullpen.worker import BatchOptions, JobBatch, Worker

from ._sides import PeerSide
from ._wait import events_of, until

JOBS = 300


@pytest.fixture(params=["node", "pypi"])
def peer(request: pytest.FixtureRequest, node: PeerSide, pypi: PeerSide) -> PeerSide:
    return {"node": node, "pypi": pypi}[request.param]


@pytest_asyncio.fixture(loop_scope="session")
async def queue(interop_url: str, client: redis.Redis) -> AsyncIterator[Queue]:
    async with Queue("q", connection=interop_url) as opened:
        yield opened


async def test_jobs_of_two_producers_run_once_in_batches_or_alone(
    peer: PeerSide, queue: Queue, client: redis.Redis, interop_url: str
) -> None:
    """The peer's jobs have no field of ours, and a batch may hold both kinds."""
    client.hset("bull:q:meta", "opts.maxLenEvents", 100_000)
    batches: list[Counter[str]] = []
    both = asyncio.Event()

    async def handle(batch: JobBatch) -> list[str | ValueError]:
        batches.append(Counter(job.name for job in batch))
        if not both.is_set():  # until the other worker has had its share, too
            await until(lambda: len(events_of(client, "q")) > 0 and peer_has_run(client), "the peer works too")
            both.set()
        return [
            ValueError("not this one") if job.data["n"] % 50 == 0 else f"{job.name} {job.data['n']}" for job in batch
        ]

    await peer.add_bulk("q", [{"name": "theirs", "data": {"n": n}, "opts": {"attempts": 1}} for n in range(JOBS // 2)])
    jobs = [NewJob("ours", {"n": n}, {"attempts": 1}) for n in range(JOBS // 2, JOBS)]
    await queue.add_many(jobs)
    await peer.start_worker("w", "q", {}, concurrency=2)
    async with Worker("q", handle, connection=interop_url, batch=BatchOptions(size=20), name="batches"):
        await until(
            lambda: client.zcard("bull:q:completed") + client.zcard("bull:q:failed") == JOBS, "all ended", timeout=60
        )

    ended = Counter(event["jobId"] for event in events_of(client, "q") if event["event"] in ("completed", "failed"))
    assert len(ended) == JOBS
    assert set(ended.values()) == {1}
    assert max(sum(batch.values()) for batch in batches) > 1
    mine = [job for job_id in ended if (job := await queue.get_job(job_id)) is not None and job.worker_id == "batches"]
    assert 0 < len(mine) < JOBS
    for job in mine:
        n = job.data["n"]
        expected = ("not this one", None) if n % 50 == 0 else (None, f"{job.name} {n}")
        assert (job.failed_reason, job.return_value) == expected


def peer_has_run(client: redis.Redis) -> bool:
    return bool(client.zcard("bull:q:completed"))
