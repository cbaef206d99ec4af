"""Jobs that other implementations add, taken by our worker."""

import asyncio
from typing import Any

import pytest
import redis

from bullpen import Backoff, RetryPolicy
from bullpen.queue import Job
from bullpen.worker import Worker

from ._sides import OurSide, PeerSide
from ._wait import until_event


@pytest.fixture(params=["node", "pypi"])
def producer(request: pytest.FixtureRequest, node: PeerSide, pypi: PeerSide) -> PeerSide:
    return {"node": node, "pypi": pypi}[request.param]


@pytest.mark.requirement("Q-4", "Q-12", "Q-22", "Q-24", "Q-31", "Q-32", "Q-33", "X-11")
async def test_every_kind_of_job_runs_once_and_its_producer_reads_the_result(
    producer: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    """Standard, front of the line, delayed, prioritized, own id, many at once."""
    ids = [
        await producer.add("q", "standard", {"k": "standard", "é": ["日本", 1.5, None, True]}),
        await producer.add("q", "lifo", {"k": "lifo"}, lifo=True),
        await producer.add("q", "delayed", {"k": "delayed"}, delay=20),
        await producer.add("q", "prioritized", {"k": "prioritized"}, priority=3),
        await producer.add("q", "own", {"k": "own"}, jobId="own-1"),
        *await producer.add_bulk("q", [{"name": "bulk", "data": {"k": number}, "opts": {}} for number in range(20)]),
    ]

    await ours.start_worker("w", "q", {}, concurrency=4)
    await until_event(client, "q", "completed", count=len(ids))

    read = [await producer.peer.call("getJob", queue="q", jobId=job_id) for job_id in ids]
    assert [job["state"] for job in read] == ["completed"] * len(ids)
    assert [job["returnvalue"] for job in read] == [{"echo": job["data"]} for job in read]
    assert {(job["attemptsMade"], job["attemptsStarted"]) for job in read} == {(1, 1)}
    assert all(job["processedOn"] <= job["finishedOn"] for job in read)


@pytest.mark.requirement("X-3", "Q-26")
async def test_a_foreign_job_without_attempts_has_one(producer: PeerSide, ours: OurSide, client: redis.Redis) -> None:
    job_id = await producer.add("q", "job", {})

    await ours.start_worker("w", "q", {"kind": "always_fail", "message": "no"})
    await until_event(client, "q", "failed")

    job = await producer.peer.call("getJob", queue="q", jobId=job_id)
    assert (job["state"], job["attemptsMade"], job["failedReason"]) == ("failed", 1, "no")


@pytest.mark.requirement("X-43", "Q-25", "Q-26")
async def test_the_handler_sees_earlier_attempts_and_exactly_the_last_failure_is_final(
    producer: PeerSide, ours: OurSide, interop_url: str, client: redis.Redis
) -> None:
    seen: list[tuple[int, bool]] = []

    async def handle(job: Job) -> None:
        seen.append((job.attempts_made, job.is_last_attempt))
        raise RuntimeError("again")

    await producer.add("q", "job", {}, attempts=3, backoff={"type": "fixed", "delay": 5})
    async with Worker("q", handle, connection=interop_url):
        await until_event(client, "q", "failed")

    assert seen == [(0, False), (1, False), (2, True)]
    await until_event(client, "q", "retries-exhausted")


@pytest.mark.requirement("Q-12", "Q-16", "X-99")
async def test_another_client_reads_our_failure_and_then_our_success(
    other: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    job_id = await other.add("q", "job", {}, attempts=2, backoff={"type": "fixed", "delay": 3_600_000})
    await ours.start_worker(
        "w", "q", {"kind": "fail_times", "times": 1, "value": "fine", "message": 'é "quoted"\n2nd line'}
    )
    await until_event(client, "q", "delayed")

    retrying = await other.peer.call("getJob", queue="q", jobId=job_id)
    await other.peer.call("promote", queue="q", jobId=job_id)
    await until_event(client, "q", "completed")
    completed = await other.peer.call("getJob", queue="q", jobId=job_id)

    assert retrying["failedReason"] == 'é "quoted"\n2nd line'
    [stack] = retrying["stacktrace"]
    assert "RuntimeError" in stack
    assert completed["returnvalue"] == "fine"
    assert not completed.get("failedReason")


@pytest.mark.requirement("X-101")
@pytest.mark.parametrize(
    "opts",
    [
        {"priority": -5},
        {"delay": -5},
        {"attempts": 0},
        {"attempts": -3},
        {"removeOnComplete": -1},
        {"removeOnComplete": {"age": 0.5, "count": 1000}},
        {"attempts": 2, "backoff": 0},
        {"attempts": 2, "backoff": {"type": "fixed", "delay": 0}},
        {"attempts": 2, "backoff": {"type": "nobody-knows", "delay": 5}},
        {"attempts": 2, "backoff": {"type": "exponential", "delay": 1, "jitter": 1}},
        {"keepLogs": 0, "stackTraceLimit": 0},
        {"sizeLimit": 100_000, "timestamp": 1},
    ],
    ids=str,
)
async def test_what_others_accept_and_we_would_refuse_does_not_harm_our_worker(
    opts: dict[str, Any], other: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    """The odd job ends, and the ordinary one behind it runs."""
    await other.add("q", "odd", {}, **opts)
    await other.add("q", "ordinary", {}, jobId="ordinary")

    await ours.start_worker(
        "w", "q", {"byName": {"odd": {"kind": "always_fail", "logs": ["l"]}, "ordinary": {"kind": "echo"}}}
    )
    await until_event(client, "q", "completed", "ordinary")
    await until_event(client, "q", "failed", "1")


@pytest.mark.requirement("Q-4", "X-33")
@pytest.mark.parametrize(
    "data", [None, [], 0, "", False, {"": {"a b": [[]]}}, {"n": 9007199254740991}, "\u2028\x00😀"], ids=repr
)
async def test_any_json_arrives_as_it_was_sent(
    data: Any, other: PeerSide, interop_url: str, client: redis.Redis
) -> None:
    seen: list[Any] = []

    async def handle(job: Job) -> Any:
        seen.append(job.data)
        return job.data

    await other.peer.call("add", queue="q", name="job", data=data)
    async with Worker("q", handle, connection=interop_url):
        await until_event(client, "q", "completed")

    job = await other.peer.call("getJob", queue="q", jobId="1")
    assert seen == [data]
    assert job["returnvalue"] == data


@pytest.mark.requirement("X-45", "Q-2")
async def test_an_id_of_three_segments_is_a_job_like_any_other(
    other: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    """Node allows exactly two colons in an id of one's own."""
    await other.add("q", "job", {}, jobId="urn:order:7", attempts=2, backoff={"type": "fixed", "delay": 1})

    await ours.start_worker("w", "q", {"kind": "fail_times", "times": 1, "logs": ["line"]})
    await until_event(client, "q", "completed", "urn:order:7")

    logs = await other.peer.call("getJobLogs", queue="q", args=["urn:order:7"])
    assert logs["logs"] == ["line", "line"]


async def test_a_large_payload_of_another_client_is_taken_and_answered(
    other: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    data = {"rows": [{"n": number, "text": "x" * 1000} for number in range(2000)]}
    await other.add("q", "large", data)

    await ours.start_worker("w", "q", {})
    await until_event(client, "q", "completed")

    job = await other.peer.call("getJob", queue="q", jobId="1")
    assert job["returnvalue"] == {"echo": data}


@pytest.mark.leaves_queue_broken
async def test_an_id_without_a_job_is_dropped_and_the_rest_runs(
    other: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    """Eviction or a manual DEL leaves ghosts; Node would run one with no name and no data."""
    await other.add("q", "ghost", {})
    await other.add("q", "real", {})
    client.delete("bull:q:1")

    await ours.start_worker("w", "q", {})
    await until_event(client, "q", "completed", "2")

    assert client.exists("bull:q:1", "bull:q:1:lock", "bull:q:active") == 0


async def test_data_that_is_no_json_fails_for_good_and_harms_nobody(
    other: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    await other.add("q", "broken", {}, attempts=5)
    await other.add("q", "fine", {})
    client.hset("bull:q:1", "data", "{not json")

    await ours.start_worker("w", "q", {})
    await until_event(client, "q", "completed", "2")
    await until_event(client, "q", "failed", "1")

    reason: Any = client.hget("bull:q:1", "failedReason")
    assert b"JSON" in reason


@pytest.mark.requirement("Q-33")
async def test_an_idle_worker_starts_each_kind_of_job_at_once(
    other: PeerSide, interop_url: str, client: redis.Redis
) -> None:
    """A missed wake-up would cost a minute, and nobody waits that long here."""
    started = asyncio.Queue[str]()
    kinds: list[dict[str, Any]] = [{}, {"priority": 2}, {"delay": 100}, {"lifo": True}]

    async def handle(job: Job) -> None:
        started.put_nowait(job.name)

    async with Worker("q", handle, connection=interop_url, drain_delay=60_000):
        for number, opts in enumerate(kinds, start=1):
            await other.add("q", f"job {number}", {}, **opts)
            async with asyncio.timeout(20):
                assert await started.get() == f"job {number}"
            await until_event(client, "q", "drained", count=number)
        await other.peer.call(
            "addFlow", flow={"name": "p", "queueName": "q", "children": [{"name": "c", "queueName": "q"}]}
        )
        async with asyncio.timeout(20):
            assert [await started.get(), await started.get()] == ["c", "p"]


async def test_a_backoff_type_of_their_own_is_computed_by_our_strategy_or_by_our_default(
    producer: PeerSide, interop_url: str, client: redis.Redis
) -> None:
    """They take any type when a job is added. Ours once failed such a job for good at its first error."""
    told: list[Any] = []

    def strategy(failures: int, error: BaseException, job: Job) -> int:
        told.append((failures, str(error), job.id))
        return 1

    async def handle(job: Job) -> str:
        if job.attempts_made < 2:
            raise RuntimeError("again")
        return "done"

    known = await producer.add("q", "job", {}, attempts=3, backoff={"type": "own"})
    other = await producer.add("q", "job", {}, attempts=3, backoff={"type": "fibonacci", "delay": 5})
    policy = RetryPolicy(backoff=Backoff.fixed(2))
    async with Worker("q", handle, connection=interop_url, backoff={"own": strategy}, policy=policy):
        await until_event(client, "q", "completed", count=2)

    assert told == [(1, "again", known), (2, "again", known)]
    read = [await producer.peer.call("getJob", queue="q", jobId=job_id) for job_id in (known, other)]
    assert [(job["state"], job["attemptsMade"]) for job in read] == [("completed", 3)] * 2
