"""Jobs that we add, taken by the workers of other implementations."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import redis

from bullpen import Backoff
from bullpen.errors import InvalidOption, JobFailed
from bullpen.queue import Added, NewJob, Queue

from ._peer import Message, PeerError
from ._sides import OurSide, PeerSide
from ._wait import until_event


@pytest.fixture(params=["node", "pypi"])
def worker(request: pytest.FixtureRequest, node: PeerSide, pypi: PeerSide) -> PeerSide:
    return {"node": node, "pypi": pypi}[request.param]


@pytest_asyncio.fixture(loop_scope="session")
async def queue(interop_url: str, client: redis.Redis) -> AsyncIterator[Queue]:
    async with Queue("q", connection=interop_url) as opened:
        yield opened


async def ids_in_order(side: PeerSide, count: int) -> list[str]:
    """Ids in the order in which the side's worker took them."""
    await side.peer.wait_event(lambda event: event.get("type") == "completed", count=count)
    return [event["jobId"] for event in side.peer.events if event.get("type") == "active"]


@pytest.mark.requirement("Q-4", "Q-12", "Q-22", "Q-24", "Q-33", "X-11")
async def test_every_kind_of_our_job_runs_once_and_we_read_the_result(worker: PeerSide, queue: Queue) -> None:
    jobs = [
        await queue.add("standard", {"é": ["日本", 1.5, None, True, {}]}),
        await queue.add("lifo", [1], lifo=True),
        await queue.add("delayed", "text", delay=20),
        await queue.add("prioritized", 7, priority=3),
        await queue.add("own", None, job_id="own-1"),
        *await queue.add_many([NewJob("bulk", {"n": number}) for number in range(20)]),
    ]

    await worker.start_worker("w", "q", {}, concurrency=4)
    results = await asyncio.gather(*(job.result(timeout=10_000) for job in jobs))

    assert results == [{"echo": {} if job.data is None else job.data} for job in jobs]
    counts = await queue.counts()
    assert (counts.completed, counts.pending, counts.active) == (len(jobs), 0, 0)


@pytest.mark.requirement("Q-12", "Q-26")
async def test_we_read_why_a_foreign_worker_failed_our_job(worker: PeerSide, queue: Queue) -> None:
    job = await queue.add("job", {}, attempts=1)

    await worker.start_worker("w", "q", {"kind": "always_fail", "message": 'é "quoted"'})

    with pytest.raises(JobFailed) as failed:
        await job.result(timeout=10_000)
    assert failed.value.reason == 'é "quoted"'
    stored = await queue.get_job(job.id)
    assert stored is not None and stored.attempts_made == 1 and len(stored.stacktrace) == 1


@pytest.mark.requirement("Q-25", "X-3")
async def test_our_default_attempts_hold_for_foreign_workers(
    worker: PeerSide, queue: Queue, client: redis.Redis
) -> None:
    """We write attempts 3 with a backoff, because a foreign worker reads an absent number as one."""
    job = await queue.add("job", {}, backoff={"type": "fixed", "delay": 5})

    await worker.start_worker("w", "q", {"kind": "fail_times", "times": 2, "value": "third"})

    assert await job.result(timeout=10_000) == "third"
    stored = await queue.get_job(job.id)
    assert stored is not None and stored.attempts_made == 3


@pytest.mark.requirement("X-14")
async def test_the_cap_of_an_hour_is_our_workers_and_not_nodes(
    node: PeerSide, ours: OurSide, queue: Queue, client: redis.Redis
) -> None:
    """The cap is not on the wire, so each worker applies its own rule to the same job."""
    delays = {}
    for side in (node, ours):
        job = await queue.add("job", {}, attempts=3, backoff={"type": "exponential", "delay": 2_400_000})
        await side.start_worker("w", "q", {"kind": "always_fail"})
        for failures in (1, 2):
            await until_event(client, "q", "delayed", job.id, count=failures)
            stored = await queue.get_job(job.id)
            assert stored is not None
            delays[side.name, failures] = stored.delay
            if failures == 1:
                await node.peer.call("promote", queue="q", jobId=job.id)
        await side.close_worker("w")

    assert delays == {
        ("node", 1): 2_400_000,
        ("node", 2): 4_800_000,
        ("bullpen", 1): 2_400_000,
        ("bullpen", 2): 3_600_000,
    }


@pytest.mark.requirement("Q-30", "Q-28", "Q-29")
async def test_node_reads_the_options_that_we_wrote(node: PeerSide, queue: Queue) -> None:
    email = await queue.add(
        "send-email", {"to": "a@example.com"}, priority=5, attempts=3, backoff={"type": "exponential", "delay": 1000}
    )
    payment = await queue.add(
        "process-payment",
        {"amount": 10},
        job_id="payment-789",
        priority=10,
        attempts=5,
        backoff={"type": "exponential", "delay": 2000},
        remove_on_complete=100,
        remove_on_fail=False,
        keep_logs=7,
        stack_trace_limit=2,
    )

    read = [await node.peer.call("getJob", queue="q", jobId=job.id) for job in (email, payment)]

    assert [(job["name"], job["state"], job["priority"]) for job in read] == [
        ("send-email", "prioritized", 5),
        ("process-payment", "prioritized", 10),
    ]
    assert read[0]["opts"] == {
        "attempts": 3,
        "backoff": {"type": "exponential", "delay": 1000},
        "priority": 5,
    }
    assert read[1]["opts"] == {
        "attempts": 5,
        "backoff": {"type": "exponential", "delay": 2000},
        "jobId": "payment-789",
        "keepLogs": 7,
        "priority": 10,
        "removeOnComplete": 100,
        "removeOnFail": False,
        "stackTraceLimit": 2,
    }


@pytest.mark.requirement("X-9", "X-10", "Q-32", "Q-41")
async def test_foreign_workers_take_in_the_order_that_we_asked_for(worker: PeerSide, queue: Queue) -> None:
    """First the front, then no priority, then by priority; urgency is the same scale the other way round."""
    wanted: dict[str, dict[str, Any]] = {
        "urgency-1": {"urgency": 1},
        "priority-5": {"priority": 5},
        "plain-a": {},
        "priority-1": {"priority": 1},
        "priority-5b": {"priority": 5},
        "urgency-900": {"urgency": 900},
        "plain-b": {},
        "front": {"lifo": True},
    }
    for name, opts in wanted.items():
        await queue.add("job", {}, job_id=name, **opts)

    await worker.start_worker("w", "q", {})

    assert await ids_in_order(worker, len(wanted)) == [
        *("front", "plain-a", "plain-b", "priority-1", "priority-5", "priority-5b", "urgency-900", "urgency-1"),
    ]


@pytest.mark.requirement("Q-2")
async def test_an_id_of_node_and_of_ours_are_the_same_id(node: PeerSide, queue: Queue) -> None:
    await node.add("q", "theirs", {"v": 1}, jobId="invoice-7")

    job = await queue.add("ours", {"v": 2}, job_id="invoice-7")
    again = await node.add("q", "theirs again", {"v": 3}, jobId="invoice-7")

    assert (job.added, job.name, job.data) == (Added.DUPLICATE, "theirs", {"v": 1})
    assert again == "invoice-7"
    assert (await queue.counts()).waiting == 1


@pytest.mark.requirement("X-45", "X-84")
@pytest.mark.parametrize(
    "job_id", ["1", "007", "-3", "0", "0:1", "0:1:2", "a:b", "a:b:c:d", ":", "1.5", "1e3", " 5", "", "a b"]
)
async def test_whatever_id_node_refuses_we_refuse(job_id: str, node: PeerSide, queue: Queue) -> None:
    """The other way round we may be stricter: Node lets reserved names through and breaks the queue."""
    try:
        await node.add("other", "job", {}, jobId=job_id)
        node_accepts = True
    except PeerError:
        node_accepts = False

    try:
        await queue.add("job", {}, job_id=job_id)
        we_accept = True
    except InvalidOption:
        we_accept = False

    assert node_accepts or not we_accept


@pytest.mark.requirement("X-84", "X-97", "O-42")
async def test_a_colon_in_a_queue_name_is_refused_by_both(node: PeerSide, interop_url: str) -> None:
    with pytest.raises(PeerError, match="cannot contain"):
        await node.add("outbox:kafka", "job", {})
    with pytest.raises(InvalidOption):
        Queue("outbox:kafka", connection=interop_url)


async def test_two_idle_node_workers_both_wake_for_two_jobs_of_one_call(
    node: PeerSide, queue: Queue, client: redis.Redis
) -> None:
    """The marker wakes one; its take must wake the next, or the second job waits a minute."""
    for name in ("w1", "w2"):
        await node.start_worker(name, "q", {"hold": True})
    await queue.add("first", {})
    await node.peer.wait_event(_is("held"))
    await node.release("w1")
    await node.release("w2")
    await until_event(client, "q", "drained")
    await node.reset()
    for name in ("w3", "w4"):
        await node.start_worker(name, "q", {"hold": True}, drainDelay=60)

    await queue.add_many([NewJob("a"), NewJob("b")])

    await node.peer.wait_event(_is("held"), count=2)


@pytest.mark.parametrize("opts", [{}, {"priority": 3}, {"delay": 60}, {"lifo": True}], ids=str)
async def test_an_idle_foreign_worker_starts_our_job_at_once(
    opts: dict[str, Any], worker: PeerSide, queue: Queue, client: redis.Redis
) -> None:
    """Without a wake-up it would wait for a minute."""
    await worker.start_worker("w", "q", {}, drainDelay=60)
    await queue.add("warm up", {})
    await until_event(client, "q", "drained")

    job = await queue.add("job", {}, **opts)

    await job.result(timeout=20_000)


def _is(event_type: str) -> Any:
    def matches(event: Message) -> bool:
        return bool(event.get("type") == event_type)

    return matches


async def test_their_backoff_strategy_computes_the_pause_of_our_job(worker: PeerSide, queue: Queue) -> None:
    """Who writes `Backoff.custom` says that the workers have a strategy; here those of others have."""
    job = await queue.add("job", {}, attempts=3, backoff=Backoff.custom("own", delay=3_600_000))

    await worker.start_worker("w", "q", {"kind": "fail_times", "times": 2, "value": "fine"}, backoffMs=1)

    assert await job.result(timeout=10_000) == "fine"
    assert (await queue.get_job(job.id) or job).attempts_made == 3
