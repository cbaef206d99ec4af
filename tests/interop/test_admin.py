"""Looking after a shared queue: pause, counts, logs, retention, cleaning and dead letters, from either side."""

import asyncio
from typing import Any

import pytest
import redis

from bullpen.queue import Cancelled, Job, NewJob, Queue, RateLimit, leftovers
from bullpen.wire.keys import LANE_KEYS
from bullpen.worker import Worker

from ._sides import OurSide, PeerSide
from ._wait import events_of, until, until_event

FAR_MS = 3_600_000


@pytest.mark.requirement("Q-39")
async def test_a_pause_by_another_client_stops_us_and_its_resume_wakes_us(
    other: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    await ours.start_worker("w", "q", {}, concurrency=5)
    await other.add("q", "before", {})
    await until_event(client, "q", "drained")

    await other.pause("q")
    await other.add("q", "plain", {})
    await ours.add("q", "prioritized", {}, priority=2)
    await ours.add("q", "delayed", {}, delay=1)
    # Due jobs are promoted while paused: the sign that our worker looked and took nothing.
    await until_event(client, "q", "waiting", "4")
    paused = await other.peer.call("getJobCounts", queue="q")
    await other.resume("q")
    async with asyncio.timeout(1):
        await until_event(client, "q", "completed", count=4)

    assert (paused["waiting"], paused["prioritized"], paused["active"], paused["completed"]) == (2, 1, 0, 1)


@pytest.mark.requirement("Q-39")
async def test_a_pause_by_us_stops_another_client_and_our_resume_wakes_it(
    other: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    queue = ours.queue("q")
    await other.start_worker("w", "q", {})
    await queue.add("before", {})
    await until_event(client, "q", "drained")

    await queue.pause()
    await queue.add("plain", {})
    is_paused = await other.peer.call("isPaused", queue="q")
    waiting = (await queue.counts()).waiting
    await queue.resume()
    async with asyncio.timeout(1):
        await until_event(client, "q", "completed", count=2)

    assert is_paused and waiting == 1


@pytest.mark.requirement("Q-39")
async def test_jobs_that_an_old_client_left_in_the_paused_list_are_merged_by_our_resume(
    other: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    """Node 5.x parks the jobs of a paused queue in a list of its own."""
    for number in range(4):
        await other.add("q", "job", {"n": number})
    client.hset("bull:q:meta", "paused", 1)
    for _ in range(2):
        client.rpoplpush("bull:q:wait", "bull:q:paused")

    await ours.queue("q").resume()
    await ours.start_worker("w", "q", {})
    await until_event(client, "q", "completed", count=4)

    assert client.exists("bull:q:paused") == 0
    assert sorted(event["jobId"] for event in events_of(client, "q") if event["event"] == "completed") == list("1234")


@pytest.mark.requirement("Q-63", "Q-53", "X-34")
async def test_progress_and_logs_are_read_by_the_other_side(
    other: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    ours_worked = await other.add("q", "job", {})
    await ours.start_worker("w", "q", {"progress": [40, {"message": "é"}], "logs": ["one", "zwei ü", "\x00 3"]})
    await until_event(client, "q", "completed")
    await ours.close_worker("w")
    node_worked = await ours.queue("q").add("job", {}, keep_logs=2)
    await other.start_worker("w", "q", {"progress": ["text", True, 7.5], "logs": ["a", "b", "c"]})
    await until_event(client, "q", "completed", count=2)

    logs = await other.peer.call("getJobLogs", queue="q", args=[ours_worked])
    theirs = await other.peer.call("getJob", queue="q", jobId=ours_worked)
    stored = await ours.queue("q").get_job(node_worked.id)
    assert logs == {"logs": ["one", "zwei ü", "\x00 3"], "count": 3}
    assert theirs["progress"] == {"message": "é"}
    assert stored is not None and stored.reported_progress == 7.5
    assert await stored.logs() == ["b", "c"]


@pytest.mark.requirement("Q-63")
async def test_a_job_without_a_rule_keeps_a_thousand_log_lines(
    other: PeerSide, interop_url: str, client: redis.Redis
) -> None:
    """Node itself would keep them all."""

    async def handle(job: Job) -> None:
        for number in range(1005):
            await job.log(str(number))

    await other.add("q", "chatty", {})
    async with Worker("q", handle, connection=interop_url):
        await until_event(client, "q", "completed")

    logs = await other.peer.call("getJobLogs", queue="q", args=["1"])
    assert (logs["count"], logs["logs"][0], logs["logs"][-1]) == (1000, "5", "1004")


@pytest.mark.requirement("Q-47", "Q-48", "W-64")
async def test_one_retention_rule_whoever_finishes_the_jobs(
    other: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    await ours.start_worker("ours", "q", {"sleep": 1}, concurrency=3)
    await other.start_worker("node", "q", {"sleep": 1}, concurrency=3)

    await asyncio.gather(*(ours.add("q", "job", {}, removeOnComplete=7) for _ in range(60)))
    await asyncio.gather(*(other.add("q", "job", {}, removeOnComplete=7) for _ in range(60)))
    await until_event(client, "q", "completed", count=120)

    kept: Any = client.zrange("bull:q:completed", 0, -1)
    hashes = [key for key in client.scan_iter("bull:q:*", _type="hash") if key != b"bull:q:meta"]
    assert len(kept) == 7
    assert sorted(hashes) == sorted(b"bull:q:" + job_id for job_id in kept)


@pytest.mark.requirement("X-128")
async def test_nodes_orphan_cleaner_finds_nothing_in_a_queue_of_ours(
    node: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    """It deletes every key with two colons less that it cannot place, and every job that only we would know."""
    queue = ours.queue("q")
    await queue.add_many([NewJob("good"), NewJob("bad"), NewJob("held")])
    await ours.start_worker(
        "w", "q", {"byName": {"good": {"logs": ["l"]}, "bad": {"kind": "unrecoverable"}, "held": {"hold": True}}}
    )
    await ours.wait_held("w", "3")
    await queue.add_many(
        [NewJob("waiting"), NewJob("prioritized", {}, {"priority": 3}), NewJob("delayed", {}, {"delay": FAR_MS})]
    )
    before = set(client.scan_iter("bull:q:*"))

    removed = await node.peer.call("removeOrphanedJobs", queue="q")

    assert removed == 0
    assert set(client.scan_iter("bull:q:*")) >= before  # our worker may have written more by now
    assert any(key.startswith(b"bull:q:bp:") for key in before)


@pytest.mark.requirement("Q-26")
async def test_another_client_retries_a_job_that_we_failed_and_we_run_it(
    other: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    job = await ours.queue("q").add("job", {}, attempts=1)
    await ours.start_worker("w", "q", {"kind": "unrecoverable"})
    await until_event(client, "q", "failed")
    await ours.close_worker("w")

    await other.peer.call("retryJob", queue="q", jobId=job.id, state="failed")
    await ours.start_worker("w", "q", {"kind": "return", "value": "second life"})

    assert await job.result(timeout=5000) == "second life"


async def test_another_client_promotes_removes_and_reorders_our_jobs(
    other: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    queue = ours.queue("q")
    delayed = await queue.add("delayed", {}, delay=FAR_MS, priority=4)
    gone = await queue.add("gone", {})
    reordered = await queue.add("reordered", {}, priority=9)
    changed = await queue.add("changed", {"v": 1}, priority=6)

    await other.peer.call("promote", queue="q", jobId=delayed.id)
    await other.peer.call("remove", queue="q", jobId=gone.id)
    await other.peer.call("changePriority", queue="q", jobId=reordered.id, opts={"priority": 1})
    await other.peer.call("updateData", queue="q", jobId=changed.id, data={"v": 2})
    await ours.start_worker("w", "q", {})
    await until_event(client, "q", "completed", count=3)

    order = [event["jobId"] for event in events_of(client, "q") if event["event"] == "completed"]
    assert order == [reordered.id, delayed.id, changed.id]
    assert await changed.result(timeout=1000) == {"echo": {"v": 2}}


async def test_drain_and_obliterate_by_another_client_leave_nothing_but_our_expiring_keys(
    other: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    """None lives for more than a minute, with a job that was asked to end while it ran."""
    queue = ours.queue("q")
    client.hset("bull:q:x", mapping={"name": "runs", "data": "{}", "opts": "{}", "timestamp": "1"})
    client.lpush("bull:q:active", "x")
    assert await queue.cancel("x") is Cancelled.REQUESTED
    assert client.lrem("bull:q:active", 1, "x") and client.delete("bull:q:x")
    for opts in ({}, {"priority": 2}, {"delay": FAR_MS}, {"job_id": "own"}):
        await queue.add("job", {}, **opts)
    await ours.start_worker("w", "q", {})
    await until_event(client, "q", "completed", count=3)
    await ours.close_worker("w")

    await other.peer.call("drain", queue="q", args=[True])
    drained = await queue.counts()
    await other.peer.call("obliterate", queue="q")

    assert drained.pending == 0
    left = list(client.scan_iter("bull:q:*"))
    assert all(key.startswith(b"bull:q:bp:") and 0 < client.pttl(key) <= 60_000 for key in left)
    job = await queue.add("a new beginning", {})
    assert job.id == "1"


@pytest.mark.parametrize("is_new", [False, True], ids=["gone", "begun anew"])
async def test_what_lanes_kept_is_deleted_after_another_client_obliterated_the_queue(
    other: PeerSide, ours: OurSide, client: redis.Redis, is_new: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether or not that client uses the queue again: then it has a `meta`, but none that speaks of lanes. Keys of
    lanes live for up to a week; a worker of ours finds and deletes them. What people did stays."""
    monkeypatch.setattr(leftovers, "_FIRST_AFTER_S", 0.02)
    monkeypatch.setattr(leftovers, "_EVERY_S", 0.05)
    queue = ours.queue("q")
    await queue.lanes.set("acme", concurrency=1, size=10, rate=RateLimit(max=1, duration_ms=600_000))
    for _ in range(3):
        await queue.add("job", {}, lane="acme")
    await ours.start_worker("w", "q", {})
    await until_event(client, "q", "completed")
    await until(lambda: client.exists("bull:q:bp:held:acme"), "the limit holds jobs back")
    client.xadd("bull:q:bp:audit:log", {"actor": "ada"})
    client.expire("bull:q:bp:audit:log", 3_600)
    kept = {key for key in client.scan_iter("bull:q:bp:*") if client.pttl(key) > 60_000}
    assert {key.split(b":")[3] for key in kept} >= {b"held", b"lanes", b"size", b"rate"}
    await asyncio.sleep(0.2)  # the worker has seen that there are lanes

    await other.peer.call("obliterate", queue="q")
    if is_new:
        await other.add("q", "new", {}, delay=FAR_MS)

    def lanes() -> list[bytes]:
        return [key for key in client.scan_iter("bull:q:bp:*") if key[len("bull:q:") :].startswith(LANE_KEYS)]

    await until(lambda: not lanes(), "nothing of lanes is left")
    assert client.exists("bull:q:bp:audit:log")
    await queue.add("a new beginning", {})


@pytest.mark.requirement("W-41", "W-42", "W-43", "W-44", "X-5", "X-6", "X-42", "X-125")
async def test_another_client_reads_our_dead_letters_as_ordinary_jobs(
    other: PeerSide, interop_url: str, client: redis.Redis
) -> None:
    async def handle(job: Job) -> None:
        raise RuntimeError("no such user")

    async with (
        Queue("q", connection=interop_url) as queue,
        Worker("q", handle, connection=interop_url, dead_letters=True),
    ):
        job = await queue.add("charge", {"runId": "r-1", "tenantId": "t-1", "amount": 5}, attempts=2, backoff=1)
        await until_event(client, "q", "failed")

    assert await other.peer.call("getJobCounts", queue="q-dlq", args=["waiting"]) == {"waiting": 1}
    [entry] = await other.peer.call("getJobs", queue="q-dlq", types=["waiting"])
    data = entry["data"]
    assert entry["name"] == "charge-failed"
    assert (entry["opts"]["removeOnComplete"], entry["opts"]["removeOnFail"]) == (False, False)
    assert data["originalJobId"] == job.id
    assert data["originalJobName"] == "charge"
    assert data["originalData"] == {"runId": "r-1", "tenantId": "t-1", "amount": 5}
    assert (data["runId"], data["tenantId"], data["attemptsMade"]) == ("r-1", "t-1", 2)
    assert data["error"]["message"] == "no such user"
    assert data["originalQueue"] == "q"


@pytest.mark.requirement("X-42")
async def test_a_foreign_worker_on_the_dead_letter_queue_gets_the_entries(
    other: PeerSide, interop_url: str, client: redis.Redis
) -> None:
    """An alerting service in Node is an ordinary worker of an ordinary queue, and is woken at once."""
    await other.start_worker("alerts", "q-dlq", {})

    async def handle(job: Job) -> None:
        raise RuntimeError("boom")

    async with (
        Queue("q", connection=interop_url) as queue,
        Worker("q", handle, connection=interop_url, dead_letters=True),
    ):
        await queue.add("charge", {"n": 1}, attempts=1)
        done = await other.peer.wait_event(lambda event: event.get("type") == "completed", timeout=2)

    assert done["value"]["echo"]["originalData"] == {"n": 1}


@pytest.mark.requirement("X-105", "X-5")
async def test_a_job_condemned_by_a_foreign_stalled_check_becomes_a_dead_letter(
    other: PeerSide, interop_url: str, client: redis.Redis
) -> None:
    """It fails with attempts left and without retries-exhausted, which the usual test of attempts would miss."""
    await other.add("q", "job", {}, attempts=5)
    client.hset("bull:q:1", "defa", "job stalled more than allowable limit")

    async def handle(job: Job) -> None:
        raise AssertionError("must not run")

    async with Worker("q", handle, connection=interop_url, dead_letters=True):
        await until_event(client, "q", "failed")

    [entry] = await other.peer.call("getJobs", queue="q-dlq", types=["waiting"])
    assert entry["data"]["error"]["message"] == "job stalled more than allowable limit"
    assert "retries-exhausted" not in [event["event"] for event in events_of(client, "q")]


@pytest.mark.requirement("Q-10", "X-11")
async def test_a_foreign_cleaning_judges_our_jobs_by_their_real_times(
    other: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    """A zero written for "not finished yet" would make a cleaning with an hour of grace delete fresh jobs."""
    await ours.queue("q").add("done", {})
    await ours.start_worker("w", "q", {})
    await until_event(client, "q", "completed")
    await ours.close_worker("w")
    await ours.queue("q").add("fresh", {})

    for state in ("completed", "wait", "active", "delayed", "failed"):
        assert await other.peer.call("clean", queue="q", args=[FAR_MS, 100, state]) == []

    assert await other.peer.call("clean", queue="q", args=[0, 100, "completed"]) == ["1"]
    assert (await ours.queue("q").counts()).waiting == 1
