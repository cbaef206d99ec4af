"""Event streams, read by both: Node's listeners must survive all we write, and we read all that Node writes."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import redis

from bullpen.errors import DelayJob, PermanentError, RateLimited, ReturnToWait
from bullpen.queue import Job, Queue, QueueEvents, RateLimit
from bullpen.worker import Worker

from ._peer import Message
from ._sides import OurSide, PeerSide
from ._wait import events_of, until, until_event


@pytest_asyncio.fixture(loop_scope="session")
async def queue(interop_url: str, client: redis.Redis) -> AsyncIterator[Queue]:
    async with Queue("q", connection=interop_url) as opened:
        yield opened


def heard(other: PeerSide) -> list[tuple[str, Any]]:
    """What Node's QueueEvents told, in order."""
    return [(event["type"], event["args"]) for event in other.peer.events if event["event"] == "queueEvents"]


async def they_heard_all(other: PeerSide, client: redis.Redis) -> None:
    """Wait until the listener has told as many events as the stream holds."""
    await until(lambda: len(heard(other)) >= len(events_of(client, "q")), "the listener caught up")


@pytest.mark.requirement("Q-53", "Q-54", "Q-58", "X-12")
async def test_a_foreign_listener_hears_the_whole_life_of_our_jobs_without_an_error(
    other: PeerSide, queue: Queue, interop_url: str, client: redis.Redis
) -> None:
    """Progress, logs, every way out of a handler, a retry, a duplicate, a pause: all written by us."""
    await other.peer.call("startQueueEvents", queue="q")
    calls: list[str] = []

    async def handle(job: Job) -> Any:
        is_first = job.name not in calls
        calls.append(job.name)
        await job.progress(50)
        await job.log("line")
        match job.name:
            case "retry" if is_first:
                raise RuntimeError('é "quoted"')
            case "fail":
                raise PermanentError("over")
            case "later" if is_first:
                raise DelayJob(10)
            case "front" if is_first:
                raise ReturnToWait
            case "limited" if is_first:
                raise RateLimited(20)
        return {"name": job.name}

    names = ["plain", "retry", "fail", "later", "front", "limited"]
    async with Worker("q", handle, connection=interop_url, limit=RateLimit(1000, 1000)):
        for name in names:
            await queue.add(name, {}, job_id=f"job-{name}", attempts=2, backoff={"type": "fixed", "delay": 5})
        await queue.add("plain", {}, job_id="job-plain")
        await until_event(client, "q", "completed", count=5)
        await until_event(client, "q", "failed")
        await queue.pause()
        await queue.resume()
        await queue.add("last", {}, delay=10, priority=2)
        await until_event(client, "q", "completed", count=6)
    await they_heard_all(other, client)

    assert not other.peer.errors()
    types = [event_type for event_type, _ in heard(other)]
    assert types == [event["event"] for event in events_of(client, "q")]
    assert {"retry", "progress", "delayed", "duplicated", "paused", "resumed", "drained"} < set(types)
    failed = [args for event_type, args in heard(other) if event_type == "failed"]
    assert [(args["jobId"], args["failedReason"], args["prev"]) for args in failed] == [("job-fail", "over", "active")]


@pytest.mark.parametrize(
    "value",
    [
        None,
        0,
        -1.5,
        True,
        "",
        'q"\\/\n\u2028\x00😀',
        [],
        {},
        [None, {"a": [1, "é"]}],
        {"": 0},
        9007199254740991,
        "null",
        "x" * 100_000,
    ],
    ids=lambda value: repr(value)[:30],
)
@pytest.mark.requirement("Q-12", "Q-54")
async def test_any_value_that_we_return_reaches_a_foreign_listener_unchanged(
    value: Any, other: PeerSide, queue: Queue, interop_url: str
) -> None:
    """One event that is not JSON would stop Node's listener for good."""
    await other.peer.call("startQueueEvents", queue="q")

    async def handle(job: Job) -> Any:
        await job.progress({"value": value})
        return value

    async with Worker("q", handle, connection=interop_url):
        await queue.add("job", {})
        done = await other.peer.wait_event(_heard("completed"))
        progress = await other.peer.wait_event(_heard("progress"))

    assert done["args"]["returnvalue"] == value
    assert progress["args"]["data"] == {"value": value}
    assert not other.peer.errors()


@pytest.mark.requirement("Q-24", "Q-26")
async def test_wait_until_finished_in_node_resolves_for_jobs_that_we_worked_on(node: PeerSide, ours: OurSide) -> None:
    await node.peer.call("startQueueEvents", queue="q")
    good = await node.add("q", "good", {"n": 1})
    bad = await node.add("q", "bad", {}, attempts=1)
    waits = [
        asyncio.ensure_future(node.peer.call("waitUntilFinished", queue="q", jobId=job_id, ttl=10_000))
        for job_id in (good, bad)
    ]

    await ours.start_worker(
        "w", "q", {"byName": {"good": {"kind": "echo"}, "bad": {"kind": "always_fail", "message": "é!"}}}
    )
    results = await asyncio.gather(*waits, return_exceptions=True)

    assert results[0] == {"echo": {"n": 1}}
    assert isinstance(results[1], Exception) and "é!" in str(results[1])


@pytest.mark.requirement("Q-53", "Q-58")
async def test_we_read_the_whole_life_of_foreign_jobs(other: PeerSide, interop_url: str, client: redis.Redis) -> None:
    async with QueueEvents("q", connection=interop_url) as events:
        await other.add("q", "job", {}, jobId="own", attempts=2, backoff={"type": "fixed", "delay": 5})
        await other.add("q", "job", {}, jobId="own")
        await other.start_worker(
            "w", "q", {"progress": [10, {"step": "é"}], "kind": "fail_times", "times": 1, "value": [1]}
        )
        seen = []
        async with asyncio.timeout(10):
            async for event in events:
                seen.append(event)
                if event.event == "drained":
                    break

    assert [event.event for event in seen] == [event["event"] for event in events_of(client, "q")]
    assert [event.event for event in seen] == [
        *("added", "waiting", "duplicated", "active", "progress", "progress", "delayed", "waiting", "active"),
        *("progress", "progress", "completed", "drained"),
    ]
    assert {event.job_id for event in seen[:-1]} == {"own"}
    seconds, _micros = client.time()
    assert all(-1000 < seconds * 1000 - event.timestamp < 60_000 for event in seen)


@pytest.mark.requirement("Q-56", "X-35")
async def test_one_bound_of_the_stream_holds_for_all_writers(
    other: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    """We set it, Node obeys; trimming is approximate by up to a node of a hundred entries."""
    await other.open_queue("q")
    await ours.queue("q").set_events_max_len(200)

    await other.add_bulk("q", [{"name": "job", "data": {}} for _ in range(500)])
    after_node = client.xlen("bull:q:events")
    await ours.start_worker("w", "q", {}, concurrency=50)
    await until(lambda: client.zcard("bull:q:completed") == 500, "all completed")

    assert 200 <= after_node <= 310
    assert 200 <= client.xlen("bull:q:events") <= 510  # one exchange trims once, before it writes its own


@pytest.mark.requirement("Q-53")
async def test_events_added_right_after_ready_are_never_missed(
    other: PeerSide, interop_url: str, client: redis.Redis
) -> None:
    """Node's own listener loses some here; ours fixes its position before it says ready."""
    for number in range(1, 51):
        async with QueueEvents("q", connection=interop_url) as events:
            await other.add("q", "job", {}, jobId=f"job-{number}")
            async with asyncio.timeout(5):
                assert (await anext(events)).job_id == f"job-{number}"


def _heard(event_type: str) -> Any:
    def matches(event: Message) -> bool:
        return bool(event["event"] == "queueEvents" and event["type"] == event_type)

    return matches
