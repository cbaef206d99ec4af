"""Another implementation and we on one queue at the same time."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from bullpen.queue import NewJob, Queue
from bullpen.testing import Child, assert_sound
from tests.forks import WarmChild

from ._node import NodePeer, NodeTools
from ._pypi import PyBullmqPeer
from ._sides import OurSide, PeerSide
from ._wait import events_of, until, until_answer, until_event

JOBS = 1000
# Short enough for a test to see a recovery, long enough for a busy machine to renew in time.
LOCK_MS = 2000
STALLED_MS = 500


def completions(client: redis.Redis, queue: str = "q") -> Counter[str]:
    return Counter(event["jobId"] for event in events_of(client, queue) if event["event"] == "completed")


def workers_of(client: redis.Redis, ids: Iterator[str] | list[str], queue: str = "q") -> Counter[str]:
    """Who processed how many. PyPI bullmq does not write its worker's name to the job."""
    pipeline = client.pipeline()
    for job_id in ids:
        pipeline.hget(f"bull:{queue}:{job_id}", "pb")
    return Counter("theirs" if name is None else name.decode() for name in pipeline.execute())


async def add_from_both(other: PeerSide, queue: Queue, count: int) -> None:
    """Half of the jobs from each side, in small calls that overlap."""
    calls: list[Any] = []
    for first in range(0, count, 100):
        numbers = range(first, first + 50)
        calls.append(other.add_bulk(queue.name, [{"name": "theirs", "data": {"n": n}, "opts": {}} for n in numbers]))
        calls.append(queue.add_many([NewJob("ours", {"n": n + 50}) for n in numbers]))
    await asyncio.gather(*calls)


@pytest.mark.requirement("Q-23", "Q-24", "Q-36", "W-65")
async def test_a_thousand_jobs_of_two_producers_and_two_workers_run_once_each(
    other: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    client.hset("bull:q:meta", "opts.maxLenEvents", 100_000)
    await ours.start_worker("ours", "q", {}, concurrency=10)
    await other.start_worker("theirs", "q", {}, concurrency=10)

    await add_from_both(other, ours.queue("q"), JOBS)
    await until(lambda: client.zcard("bull:q:completed") == JOBS, "all completed", timeout=30)

    done = completions(client)
    assert set(done.values()) == {1}
    assert len(done) == JOBS
    shares = workers_of(client, list(done))
    assert shares["ours"] + shares["theirs"] == JOBS
    assert min(shares["ours"], shares["theirs"]) > JOBS // 100, shares
    assert not other.peer.errors()
    await ours.reset()
    await other.reset()
    assert_sound(client, "bull", "q")


@contextmanager
def our_worker(url: str, **options: int) -> Iterator[Child]:
    with WarmChild.module("tests.interop._our_worker", url, "q", json.dumps(options)) as child:
        yield child


@pytest.mark.requirement("Q-23", "Q-37", "X-13", "Q-67")
@pytest.mark.parametrize("victim", ["node", "pypi", "ours"])
async def test_kill_minus_nine_of_one_worker_leaves_its_jobs_to_the_other(
    victim: str, node: PeerSide, node_tools: NodeTools, pypi_python: Path, interop_url: str, client: redis.Redis
) -> None:
    """Nothing is lost, nothing stays active, and only jobs that the dead worker held run a second time."""
    client.hset("bull:q:meta", "opts.maxLenEvents", 100_000)
    options = {"concurrency": 10, "lock": LOCK_MS, "stalled_interval": STALLED_MS, "sleep": 5}
    made = PyBullmqPeer(interop_url, pypi_python) if victim == "pypi" else NodePeer(interop_url, node_tools)
    async with made as their_peer, Queue("q", connection=interop_url) as queue:
        theirs = PeerSide("theirs", their_peer)
        with our_worker(interop_url, **options) as child:
            await child.seen("ready")
            await theirs.start_worker(
                *("theirs", "q", {"sleep": 5}),
                concurrency=10,
                lockDuration=LOCK_MS,
                stalledInterval=STALLED_MS,
                maxStalledCount=3,
            )
            await add_from_both(node, queue, JOBS)
            await until(lambda: client.zcard("bull:q:completed") > JOBS // 4, "a quarter completed", timeout=30)

            held: Any = client.lrange("bull:q:active", 0, -1)
            if victim == "ours":
                child.kill()
            else:
                await their_peer.kill()
            await until(lambda: client.zcard("bull:q:completed") == JOBS, "all completed", timeout=30)

            assert set(completions(client).values()) == {1}
            started = Counter(event["jobId"] for event in events_of(client, "q") if event["event"] == "active")
            again = {job_id for job_id, count in started.items() if count > 1}
            # The victim held at most its ten slots; each came back by a stall, not by a failure.
            assert 1 <= len(again) <= 10, again
            assert len(held) >= 1
            stalled = {event["jobId"] for event in events_of(client, "q") if event["event"] == "stalled"}
            assert again == stalled
            assert client.zcard("bull:q:failed") == 0
    assert client.exists("bull:q:active") == 0
    assert not list(client.scan_iter("bull:q:*:lock"))


@pytest.mark.requirement("W-57", "Q-23")
async def test_a_worker_that_closes_while_jobs_arrive_leaves_none_behind(
    other: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    """The take in flight at `close` may bring a job, and the blocked read a wake-up.

    The job is run or given back, never left locked; the wake-up is passed on, or an idle Node worker sleeps for seconds
    beside the job.
    """
    for number in range(120):
        await ours.start_worker("w", "q", {"kind": "return", "value": 1})
        adding = asyncio.ensure_future((other, ours)[number % 2].add("q", "job", {}))
        await asyncio.sleep(number % 30 / 10_000)  # not a wait for anything: the moments to be tried
        await ours.close_worker("w")
        await adding

        assert client.llen("bull:q:active") == 0
        assert client.zscore("bull:q:marker", "0") == 0 or not client.llen("bull:q:wait")
        client.delete("bull:q:wait", "bull:q:marker")
    client.flushall()


async def test_node_sees_our_worker_and_we_leave_the_list_when_we_go(node: PeerSide, ours: OurSide) -> None:
    await node.open_queue("q")
    await ours.start_worker("our-name", "q", {})
    await node.start_worker("node-name", "q", {})

    async def names() -> set[str]:
        workers = await node.peer.call("getWorkers", queue="q")
        return {worker["rawname"].rpartition(":w:")[2] for worker in workers}

    async def are(expected: set[str]) -> bool:
        return await names() == expected

    await until_answer(lambda: are({"our-name", "node-name"}), "both are listed")
    await ours.close_worker("our-name")
    await until_answer(lambda: are({"node-name"}), "only Node's is listed")


@pytest.mark.requirement("W-67", "Q-38")
async def test_one_rate_limit_holds_for_both_workers_together(
    other: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    limiter = {"max": 10, "duration": 60_000}
    await ours.start_worker("ours", "q", {}, concurrency=5, limiter=limiter)
    await other.start_worker("theirs", "q", {}, concurrency=5, limiter=limiter)

    await add_from_both(other, ours.queue("q"), 100)
    await until_event(client, "q", "completed", count=10)
    await ours.reset()
    await other.reset()

    assert client.zcard("bull:q:completed") == 10
    assert client.get("bull:q:limiter") == b"10"


@pytest.mark.requirement("W-67")
async def test_global_concurrency_holds_for_both_workers_together(
    other: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    """The event stream is the witness: replayed, it never shows more than three jobs active."""
    await other.peer.call("setGlobalConcurrency", queue="q", args=[3])
    await ours.start_worker("ours", "q", {"sleep": 2}, concurrency=10)
    await other.start_worker("theirs", "q", {"sleep": 2}, concurrency=10)

    await add_from_both(other, ours.queue("q"), 200)
    await until(lambda: client.zcard("bull:q:completed") == 200, "all completed", timeout=30)

    active = most = 0
    for event in events_of(client, "q"):
        active += {"active": 1, "completed": -1}.get(event["event"], 0)
        most = max(most, active)
    assert most == 3
