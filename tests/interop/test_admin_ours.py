"""Our administration, compared with Node's: the same operation on the same queue leaves the same in Redis.

Each case prepares a queue with Node twice, lets Node do the operation once and us once, and compares everything that
is then stored: states, scores, hashes, events, markers. Where we do better on purpose, the case says in which lines.
"""

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import redis

from bullpen.queue import Job, JobState, NewJob, Queue
from bullpen.worker import Worker

from ._dump import diff, dump
from ._sides import OurSide, PeerSide
from ._wait import events_of, until, until_answer, until_event

FAR_MS = 3_600_000
Q = "q"

Prepare = Callable[[PeerSide, redis.Redis], Awaitable[None]]
NodeOp = Callable[[PeerSide], Awaitable[Any]]
OurOp = Callable[[Queue], Awaitable[Any]]


@dataclass(frozen=True)
class Case:
    """One operation in both languages. `better`: patterns of the lines in which ours may differ, and must."""

    prepare: Prepare
    by_node: NodeOp
    by_us: OurOp
    better: Sequence[str] = ()
    queues: Sequence[str] = (Q,)


def node_op(op: str, **fields: Any) -> NodeOp:
    async def call(other: PeerSide) -> Any:
        return await other.peer.call(op, queue=Q, **fields)

    return call


def cleaning(state: JobState) -> OurOp:
    return lambda queue: queue.clean(state=state)


# ---- preparations -------------------------------------------------------------------------------------------------


async def some_of_everything(other: PeerSide, client: redis.Redis) -> None:
    """Ids 1 to 8: two waiting, two with priority 5, one with 9, two delayed, one delayed with a priority."""
    for opts in ({}, {}, {"priority": 5}, {"priority": 5}, {"priority": 9}):
        await other.add(Q, "job", {"n": 1}, **opts)
    for opts in ({"delay": FAR_MS}, {"delay": 2 * FAR_MS}, {"delay": 3 * FAR_MS, "priority": 2}):
        await other.add(Q, "job", {"n": 1}, **opts)


def finished(behaviour: dict[str, Any], *options: dict[str, Any]) -> Prepare:
    async def prepare(other: PeerSide, client: redis.Redis) -> None:
        for opts in options:
            await other.add(Q, "job", {"n": 1}, attempts=1, **opts)
        await other.start_worker("w", Q, behaviour)
        await until_event(client, Q, "drained")
        await other.close_worker("w")
        client.delete(f"bull:{Q}:marker", f"bull:{Q}:pc", f"bull:{Q}:stalled-check", f"bull:{Q}:stalled")
        client.xtrim(f"bull:{Q}:events", maxlen=0, approximate=False)
        state = "failed" if client.exists(f"bull:{Q}:failed") else "completed"
        for number in range(1, len(options) + 1):  # two that finish in one millisecond have no order
            instant = 1_700_000_000_000 + number
            client.hset(f"bull:{Q}:{number}", "finishedOn", instant)
            client.zadd(f"bull:{Q}:{state}", {str(number): instant})

    return prepare


FAILED = finished({"kind": "always_fail"}, {}, {"priority": 4}, {"lifo": True}, {})
COMPLETED = finished({"kind": "return", "value": 1}, {}, {"priority": 4}, {"lifo": True}, {})


async def a_flow(other: PeerSide, client: redis.Redis) -> None:
    """P in q waits for A and B in kids; B is delayed."""
    for queue in (Q, "kids"):
        await other.open_queue(queue)
    kids = [{"name": "kid", "queueName": "kids", "opts": {"jobId": "A"}}]
    kids += [{"name": "kid", "queueName": "kids", "opts": {"jobId": "B", "delay": FAR_MS}}]
    await other.peer.call("addFlow", flow={"name": "p", "queueName": Q, "opts": {"jobId": "P"}, "children": kids})


async def a_flow_in_one_queue(other: PeerSide, client: redis.Redis) -> None:
    await other.open_queue(Q)
    kids = [{"name": "kid", "queueName": Q, "opts": {"jobId": job_id}} for job_id in "AB"]
    await other.peer.call("addFlow", flow={"name": "p", "queueName": Q, "opts": {"jobId": "P"}, "children": kids})


async def deduplicated(other: PeerSide, client: redis.Redis) -> None:
    await other.add(Q, "job", {}, deduplication={"id": "d"})
    await other.add(Q, "job", {}, deduplication={"id": "e"}, delay=FAR_MS)


async def scheduled(other: PeerSide, client: redis.Redis) -> None:
    await other.add(Q, "job", {})
    await other.peer.call(
        "upsertJobScheduler", queue=Q, schedulerId="s", repeat={"every": FAR_MS}, template={"name": "beat"}
    )
    await other.add(Q, "job", {})


# Node's bulk operations put every job into `wait`, whatever its priority.
KEEPS_PRIORITY = (
    "^q:pc: not expected",
    r'^q:prioritized: not expected.*\[\["2", {"counter": 1, "priority": 4}',
    "^q:wait",
)
# Node releases a parent whose last child it has just removed, then removes it from `wait`: workers wake for nothing.
NO_RELEASE = (
    '- .*"waiting", "jobId": "P"',
    '- .*"prev": "wait"',
    '\\+ .*"removed", "jobId": "P", "prev": "waiting-children"',
)

CASES: dict[str, Case] = {
    "change delay": Case(
        some_of_everything,
        node_op("changeDelay", jobId="7", delay=FAR_MS // 2),
        lambda queue: queue.change_delay("7", FAR_MS // 2),
    ),
    "change priority of a waiting job": Case(
        some_of_everything,
        node_op("changePriority", jobId="1", opts={"priority": 7}),
        lambda queue: queue.change_priority("1", 7),
    ),
    "change priority within its set": Case(
        some_of_everything,
        node_op("changePriority", jobId="3", opts={"priority": 9}),
        lambda queue: queue.change_priority("3", 9),
    ),
    "change priority, lifo": Case(
        some_of_everything,
        node_op("changePriority", jobId="5", opts={"priority": 5, "lifo": True}),
        lambda queue: queue.change_priority("5", 5, lifo=True),
    ),
    "take the priority away": Case(
        some_of_everything,
        node_op("changePriority", jobId="3", opts={"priority": 0}),
        lambda queue: queue.change_priority("3", 0),
    ),
    "take the priority away, lifo": Case(
        some_of_everything,
        node_op("changePriority", jobId="3", opts={"priority": 0, "lifo": True}),
        lambda queue: queue.change_priority("3", 0, lifo=True),
    ),
    "change priority of a delayed job": Case(
        some_of_everything,
        node_op("changePriority", jobId="6", opts={"priority": 3}),
        lambda queue: queue.change_priority("6", 3),
    ),
    "promote": Case(some_of_everything, node_op("promote", jobId="7"), lambda queue: queue.promote("7")),
    "promote with a priority": Case(
        some_of_everything, node_op("promote", jobId="8"), lambda queue: queue.promote("8")
    ),
    "promote all": Case(
        some_of_everything,
        node_op("promoteJobs"),
        lambda queue: queue.promote_all(),
        better=(r"^q:[678]/value/delay: expected \d+, is 0", r"^q:pc", r'^q:prioritized.* is \[\["8"', "^q:wait"),
    ),
    "retry a failed job": Case(FAILED, node_op("retryJob", jobId="1", state="failed"), lambda queue: queue.retry("1")),
    "retry a failed job with a priority": Case(
        FAILED, node_op("retryJob", jobId="2", state="failed"), lambda queue: queue.retry("2")
    ),
    "retry a failed lifo job": Case(
        FAILED, node_op("retryJob", jobId="3", state="failed"), lambda queue: queue.retry("3")
    ),
    "retry with attempts reset": Case(
        FAILED,
        node_op("retryJob", jobId="1", state="failed", opts={"resetAttemptsMade": True}),
        lambda queue: queue.retry("1", reset_attempts=True),
    ),
    "retry a completed job": Case(
        COMPLETED,
        node_op("retryJob", jobId="1", state="completed"),
        lambda queue: queue.retry("1", state=JobState.COMPLETED),
    ),
    "retry all failed": Case(
        FAILED,
        node_op("retryJobs", args=[{}]),
        lambda queue: queue.retry_all(),
        better=KEEPS_PRIORITY,
    ),
    "retry all completed": Case(
        COMPLETED,
        node_op("retryJobs", args=[{"state": "completed"}]),
        lambda queue: queue.retry_all(JobState.COMPLETED),
        better=KEEPS_PRIORITY,
    ),
    "remove a waiting job": Case(some_of_everything, node_op("remove", jobId="1"), lambda queue: queue.remove("1")),
    "remove a prioritized job": Case(some_of_everything, node_op("remove", jobId="3"), lambda queue: queue.remove("3")),
    "remove a delayed job": Case(some_of_everything, node_op("remove", jobId="6"), lambda queue: queue.remove("6")),
    "remove a failed job": Case(FAILED, node_op("remove", jobId="1"), lambda queue: queue.remove("1")),
    "remove what is not there": Case(FAILED, node_op("remove", jobId="77"), lambda queue: queue.remove("77")),
    "remove the owner of a deduplication id": Case(
        deduplicated, node_op("remove", jobId="1"), lambda queue: queue.remove("1")
    ),
    "remove a parent": Case(
        a_flow,
        node_op("remove", jobId="P"),
        lambda queue: queue.remove("P"),
        better=(*NO_RELEASE, "^q:marker: missing"),
        queues=(Q, "kids"),
    ),
    "remove a parent without its children": Case(
        a_flow,
        node_op("remove", jobId="P", opts={"removeChildren": False}),
        lambda queue: queue.remove("P", children=False),
        queues=(Q, "kids"),
    ),
    "remove a parent in one queue": Case(
        a_flow_in_one_queue, node_op("remove", jobId="P"), lambda queue: queue.remove("P"), better=NO_RELEASE
    ),
    "remove a child": Case(a_flow_in_one_queue, node_op("remove", jobId="A"), lambda queue: queue.remove("A")),
    "drain": Case(some_of_everything, node_op("drain"), lambda queue: queue.drain()),
    "drain with delayed": Case(
        some_of_everything, node_op("drain", args=[True]), lambda queue: queue.drain(delayed=True)
    ),
    "drain deduplicated": Case(deduplicated, node_op("drain", args=[True]), lambda queue: queue.drain(delayed=True)),
    "drain a flow": Case(
        a_flow_in_one_queue,
        node_op("drain"),
        lambda queue: queue.drain(),
        better=('\\+ {"event": "removed", "jobId": "P", "prev": "waiting-children"}',),
    ),
    "drain around a scheduler": Case(
        scheduled,
        node_op("drain"),
        lambda queue: queue.drain(),
        better=(r'q:wait/value: expected \["1"\], is \["repeat:s:<slot 1>"\]',),
    ),
    "clean failed": Case(
        FAILED, node_op("clean", args=[0, 2, "failed"]), lambda queue: queue.clean(state=JobState.FAILED, limit=2)
    ),
    "clean completed": Case(COMPLETED, node_op("clean", args=[0, 0, "completed"]), lambda queue: queue.clean()),
    "clean nothing": Case(
        COMPLETED, node_op("clean", args=[FAR_MS, 0, "completed"]), lambda queue: queue.clean(FAR_MS)
    ),
    **{
        f"clean {state.value}": Case(
            some_of_everything,
            node_op("clean", args=[0, 0, wire]),
            cleaning(state),
        )
        for state, wire in (
            (JobState.WAITING, "wait"),
            (JobState.DELAYED, "delayed"),
            (JobState.PRIORITIZED, "prioritized"),
            (JobState.ACTIVE, "active"),
        )
    },
    "obliterate": Case(some_of_everything, node_op("obliterate"), lambda queue: queue.obliterate()),
    "trim events": Case(some_of_everything, node_op("trimEvents", args=[0]), lambda queue: queue.trim_events(0)),
    "global concurrency": Case(
        some_of_everything,
        node_op("setGlobalConcurrency", args=[3]),
        lambda queue: queue.set_global_concurrency(3),
    ),
    "global rate limit": Case(
        some_of_everything,
        node_op("setGlobalRateLimit", args=[3, 1000]),
        lambda queue: queue.set_global_rate_limit(3, 1000),
    ),
    "remove unprocessed children": Case(
        a_flow,
        node_op("removeUnprocessedChildren", jobId="P"),
        lambda queue: queue.remove_unprocessed_children("P"),
        queues=(Q, "kids"),
    ),
    "manual rate limit": Case(
        some_of_everything, node_op("rateLimit", args=[FAR_MS]), lambda queue: queue.rate_limit(FAR_MS)
    ),
}


@pytest.mark.requirement("Q-22", "Q-24", "Q-26", "Q-33", "Q-64", "Q-65", "W-67")
@pytest.mark.parametrize(
    ("other", "case"),
    [
        pytest.param(side, case, id=f"{side}-{name}")
        for side, cannot in (("node", set()), ("pypi", {"change delay", "remove unprocessed children"}))
        for name, case in CASES.items()
        if name not in cannot
    ],
    indirect=["other"],
)
async def test_our_operation_leaves_what_theirs_would(
    case: Case, other: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    await case.prepare(other, client)
    await case.by_node(other)
    wanted = dump(client, case.queues)
    await other.reset()
    client.flushall()
    await case.prepare(other, client)

    await case.by_us(ours.queue(Q))

    found = diff(wanted, dump(client, case.queues))
    unexplained = [line for line in found if not any(re.search(pattern, line) for pattern in case.better)]
    unused = [pattern for pattern in case.better if not any(re.search(pattern, line) for line in found)]
    assert not unexplained, "\n".join(["differs from theirs:", *unexplained])
    assert not unused, f"no longer better: {unused}"


# ---- after our operations, seen by Node; after Node's, seen by us --------------------------------------------------


@pytest.mark.requirement("Q-22", "Q-24", "Q-26", "Q-32", "Q-33", "Q-58")
async def test_others_agree_on_states_counts_and_events_after_our_operations(
    other: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    """With a listener of theirs open all the time: one event it cannot read would end it for good."""
    queue = ours.queue(Q)
    await other.open_queue(Q)
    await other.peer.call("startQueueEvents", queue=Q)
    await some_of_everything(other, client)

    await queue.change_delay("6", FAR_MS)
    await queue.change_priority("1", 3)
    await queue.promote("7")
    await queue.remove("2")
    await queue.promote_all()
    await queue.clean(state=JobState.PRIORITIZED, limit=1)
    counts = await queue.counts()
    theirs = await other.peer.call("getJobCounts", queue=Q)
    per_priority = await other.peer.call("getCountsPerPriority", queue=Q, args=[[0, 2, 3, 5, 9]])

    assert (theirs["waiting"], theirs["prioritized"], theirs["delayed"]) == (counts.waiting, counts.prioritized, 0)
    assert {int(name): count for name, count in per_priority.items()} == await queue.counts_per_priority(
        [0, 2, 3, 5, 9]
    )
    for job_id in ("1", "6", "7"):
        assert await other.peer.call("getState", queue=Q, jobId=job_id) == await queue.state_of(job_id)
    wanted = {"delayed", "waiting", "removed", "cleaned"}
    await other.peer.wait_event(lambda event: event.get("type") == "cleaned")
    assert wanted <= {event.get("type") for event in other.peer.events if event["event"] == "queueEvents"}
    assert not [event for event in other.peer.events if event["event"] == "error"]


@pytest.mark.requirement("Q-22", "Q-24", "Q-26", "Q-32", "Q-33")
async def test_we_agree_after_their_operations(other: PeerSide, ours: OurSide, client: redis.Redis) -> None:
    queue = ours.queue(Q)
    await some_of_everything(other, client)

    await other.peer.call("changePriority", queue=Q, jobId="1", opts={"priority": 3})
    await other.peer.call("promote", queue=Q, jobId="8")
    await other.peer.call("remove", queue=Q, jobId="2")
    await other.peer.call("retryJobs", queue=Q, args=[{}])
    theirs = await other.peer.call("getJobCounts", queue=Q)
    counts = await queue.counts()

    assert (counts.waiting, counts.prioritized, counts.delayed) == (
        theirs["waiting"],
        theirs["prioritized"],
        theirs["delayed"],
    )
    ids = [job.id for job in await queue.jobs((JobState.WAITING, JobState.PRIORITIZED, JobState.DELAYED), count=50)]
    seen = await other.peer.call("getJobs", queue=Q, types=["waiting", "prioritized", "delayed"])
    assert ids == ["8", "1", "3", "4", "5", "6", "7"]
    assert {job["id"] for job in seen} == set(ids)
    assert await queue.counts_per_priority() == {2: 1, 3: 1, 5: 2, 9: 1}


@pytest.mark.requirement("Q-31", "Q-67")
@pytest.mark.parametrize(
    ("prepare", "operation"),
    [
        (some_of_everything, lambda queue: queue.promote("6")),
        (some_of_everything, lambda queue: queue.promote_all()),
        (some_of_everything, lambda queue: queue.change_priority("5", 1, lifo=True)),
        (FAILED, lambda queue: queue.retry("1")),
        (FAILED, lambda queue: queue.retry_all()),
    ],
    ids=["promote", "promote all", "change priority", "retry", "retry all"],
)
async def test_an_idle_foreign_worker_is_woken_by_our_operation(
    prepare: Prepare, operation: OurOp, other: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    """It sleeps ten seconds unless it is told."""
    queue = ours.queue(Q)
    await prepare(other, client)
    await queue.pause()
    await other.start_worker("idle", Q, {"kind": "return", "value": 1}, drainDelay=10)
    await until(lambda: b"cmd=bzpopmin" in client.execute_command("CLIENT", "LIST"), "it waits")  # type: ignore[no-untyped-call]
    client.hdel(f"bull:{Q}:meta", "paused")  # without the marker that a resume would set

    await operation(queue)

    await until_event(client, Q, "completed", timeout=2)


@pytest.mark.requirement("X-51", "X-5", "X-105")
async def test_a_job_that_a_foreign_worker_failed_gets_its_dead_letter_from_ours(
    other: PeerSide, ours: OurSide, interop_url: str, client: redis.Redis
) -> None:
    job_id = await other.add(Q, "charge", {"runId": "r-1"}, attempts=1)
    await other.start_worker("w", Q, {"kind": "always_fail", "message": "no such user"})
    await until_event(client, Q, "failed")
    await other.close_worker("w")

    async with Worker(Q, _never, connection=interop_url, dead_letters=True):
        await until_event(client, f"{Q}-dlq", "added")

    [letter] = await ours.queue(Q).dead_letters.list()
    assert (letter.job_id, letter.error_message, letter.attempts_made) == (job_id, "no such user", 1)
    assert letter.entry["runId"] == "r-1" and letter.cause is None
    # They retry it, and it fails again: another failure, another letter, and the first has followed its job.
    await other.peer.call("retryJob", queue=Q, jobId=job_id, state="failed")
    await other.start_worker("w", Q, {"kind": "always_fail", "message": "still none"})
    await until_event(client, Q, "failed", count=2)
    await other.close_worker("w")
    await ours.queue(Q).dead_letters.sweep()
    assert [one.id for one in await ours.queue(Q).dead_letters.list()] == [f"dl-{job_id}-2"]


async def _never(job: Job) -> None:
    raise AssertionError("nothing is left to run")


@pytest.mark.requirement("X-128")
async def test_nodes_orphan_cleaner_leaves_what_is_ours(
    node: PeerSide, ours: OurSide, interop_url: str, client: redis.Redis
) -> None:
    queue = ours.queue(Q)
    await some_of_everything(node, client)
    await queue.add("failing", {}, attempts=1)
    async with Worker(Q, _never, connection=interop_url, dead_letters=True, metrics_minutes=5, concurrency=10):
        await until_event(client, Q, "failed", count=6)
    await queue.dead_letters.sweep()
    before = sorted(client.scan_iter("bull:q*"))

    await node.peer.call("removeOrphanedJobs", queue=Q)
    await node.peer.call("removeOrphanedJobs", queue=f"{Q}-dlq")

    # It deletes a key of its own, taking `metrics:failed` for a part of a job called `metrics`.
    kept = set(before) - {b"bull:q:metrics:failed"}
    assert kept <= set(client.scan_iter("bull:q*"))
    assert await queue.remove_orphans(restorable=True) == 0


@pytest.mark.requirement("X-128")
async def test_our_orphan_cleaner_leaves_what_is_nodes(node: PeerSide, ours: OurSide, client: redis.Redis) -> None:
    await some_of_everything(node, client)
    await deduplicated(node, client)
    await scheduled(node, client)
    await a_flow(node, client)
    await node.start_worker("w", Q, {"logs": ["line"]}, metrics={"maxDataPoints": 5})
    await until_event(client, Q, "completed", count=5)
    await node.close_worker("w")
    before = sorted(client.scan_iter("bull:*"))

    assert await ours.queue(Q).remove_orphans(restorable=True) == 0

    assert sorted(client.scan_iter("bull:*")) == before


@pytest.mark.requirement("W-84")
async def test_children_and_schedulers_are_read_as_node_reads_them(
    node: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    await a_flow(node, client)
    await node.peer.call("promote", queue="kids", jobId="B")
    await node.start_worker("w", "kids", {"byName": {"kid": {"kind": "return", "value": {"v": 1}}}})
    await until_event(client, Q, "waiting", "P")
    await scheduled(node, client)
    queue = ours.queue(Q)

    children = await queue.children("P")
    [scheduler] = await queue.schedulers()

    theirs = await node.peer.call("getDependencies", queue=Q, jobId="P")
    [their_scheduler] = await node.peer.call("getJobSchedulers", queue=Q)
    assert children.processed == theirs["processed"] == {"bull:kids:A": {"v": 1}, "bull:kids:B": {"v": 1}}
    assert list(children.pending) == theirs["unprocessed"] == []
    assert (scheduler.id, scheduler.next_ms, scheduler.every_ms) == (
        their_scheduler["key"],
        their_scheduler["next"],
        int(their_scheduler["every"]),
    )


@pytest.mark.requirement("Q-11")
async def test_each_side_sees_the_workers_of_the_other(node: PeerSide, ours: OurSide, client: redis.Redis) -> None:
    queue = ours.queue(Q)
    await queue.add("later", delay=FAR_MS)
    await ours.start_worker("python-one", Q, {})
    await node.start_worker("node-one", Q, {})

    async def names() -> list[str]:
        return [worker.name for worker in await queue.workers() or ()]

    await until_answer(lambda: _equals(names, ["node-one", "python-one"]), "both are listed")
    theirs = await node.peer.call("getWorkers", queue=Q)
    assert sorted(worker["rawname"].partition(":w:")[2] for worker in theirs) == ["node-one", "python-one"]


async def _equals(read: Callable[[], Awaitable[Any]], wanted: Any) -> bool:
    return bool(await read() == wanted)


@pytest.mark.requirement("W-64")
async def test_metrics_of_both_sides_add_up_and_are_read_alike(
    node: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    queue = ours.queue(Q)
    await queue.add_many([NewJob("job")] * 3)
    await ours.start_worker("w", Q, {}, metrics={"maxDataPoints": 10})
    await until_event(client, Q, "completed", count=3)
    await ours.close_worker("w")
    # The minute is over: the next job closes it.
    client.hincrby(f"bull:{Q}:metrics:completed", "prevTS", -120_000)
    await queue.add_many([NewJob("job")] * 2)
    await node.start_worker("w", Q, {}, metrics={"maxDataPoints": 10})
    await until_event(client, Q, "completed", count=5)
    await node.close_worker("w")

    metrics = await queue.metrics()
    theirs = await node.peer.call("getMetrics", queue=Q, args=["completed", 0, -1])

    assert metrics.count == theirs["meta"]["count"] == 5
    assert list(metrics.points) == [int(point) for point in theirs["data"]] == [0, 3]


@pytest.mark.requirement("Q-38", "W-67", "W-85")
async def test_limits_set_by_one_side_bind_the_workers_of_the_other(
    other: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    queue = ours.queue(Q)
    await queue.set_global_concurrency(1)
    await queue.set_global_rate_limit(3, FAR_MS)
    assert await other.peer.call("getGlobalConcurrency", queue=Q) == 1
    await queue.add_many([NewJob("job")] * 6)

    await other.start_worker("n", Q, {"hold": True}, concurrency=5)
    await ours.start_worker("o", Q, {"hold": True}, concurrency=5)
    await until_event(client, Q, "active")
    assert client.llen(f"bull:{Q}:active") == 1
    await other.peer.call("removeGlobalConcurrency", queue=Q)
    await other.release("n")
    await ours.release("o")
    await until_event(client, Q, "completed", count=3)

    assert await queue.global_concurrency() is None
    assert 0 < await queue.rate_limit_ttl() <= FAR_MS
    assert [event["event"] for event in events_of(client, Q)].count("active") == 3
