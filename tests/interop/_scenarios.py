"""Queues brought into every state and option, by whichever implementation a run names.

Each scenario adds and works with `run.producer` and `run.worker`, and calls `run.snap` where the state of Redis
matters. `record_golden` runs them with Node on both sides and stores the snapshots; the tests run them with us on one
side or both and compare. What only Node can do yet (schedulers, administration) goes through
`run.node`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import redis

from ._dump import PREFIX, TRANSIENT, Dump, dump
from ._sides import Behaviour, PeerSide, Side
from ._wait import until_event

QUEUE = "golden"
KIDS = "golden-kids"
FAR_MS = 3_600_000
"""A delay that no test waits for."""
FAR_FUTURE_MS = 4_000_000_000_000
"""An instant that no test sees."""


@dataclass
class Run:
    """One execution of a scenario: who adds, who works, and what was seen."""

    producer: Side
    worker: Side
    node: PeerSide
    client: redis.Redis
    """Undecoded, blocking: scenarios read and prepare state between the steps."""
    snapshots: dict[str, Dump] = field(default_factory=dict)
    worked: bool = False

    async def add(self, name: str = "job", data: Any = None, **opts: Any) -> str:
        return await self.producer.add(QUEUE, name, {"n": 1} if data is None else data, **opts)

    async def upsert_scheduler(self, scheduler_id: str, repeat: dict[str, Any], template: dict[str, Any]) -> None:
        await self.producer.upsert_scheduler(QUEUE, scheduler_id, repeat, template)

    async def work(self, behaviour: Behaviour, *, queue: str = QUEUE, worker: str = "w1", **opts: Any) -> None:
        self.worked = True
        await self.worker.start_worker(worker, queue, behaviour, **opts)

    async def stop(self, worker: str = "w1") -> None:
        await self.worker.close_worker(worker)

    async def until(self, event: str, job_id: str | None = None, *, queue: str = QUEUE, count: int = 1) -> None:
        """Wait until the stream holds `count` such events."""
        await until_event(self.client, queue, event, job_id, count=count)

    def snap(self, name: str) -> None:
        queues = [queue for queue in (QUEUE, KIDS) if self.client.keys(f"{PREFIX}:{queue}:*")]
        self.snapshots[name] = dump(self.client, queues, without=TRANSIENT if self.worked else ())

    def key(self, suffix: str, queue: str = QUEUE) -> str:
        return f"{PREFIX}:{queue}:{suffix}"


Steps = Callable[[Run], Awaitable[None]]


@dataclass(frozen=True)
class Scenario:
    """A named way through the states."""

    name: str
    steps: Steps
    requirements: Sequence[str]
    produced_by_node: bool = False
    """The jobs use what our producer does not offer: they are Node's in every run."""
    worked_by_node: bool = False
    """The worker uses what ours does not offer."""
    has_worker: bool = True


SCENARIOS: dict[str, Scenario] = {}


def scenario(*requirements: str, **traits: bool) -> Callable[[Steps], Steps]:
    def register(steps: Steps) -> Steps:
        SCENARIOS[steps.__name__] = Scenario(steps.__name__, steps, requirements, **traits)
        return steps

    return register


# --- adding -------------------------------------------------------------------------------------------------------


@scenario("Q-22", "Q-28", "Q-29", "Q-31", has_worker=False)
async def add_standard(run: Run) -> None:
    await run.add("first", {"to": "ada@example.com", "tags": ["a", "é", "日本"], "deep": {"x": [1, 2.5, None, True]}})
    await run.add("second", {})
    run.snap("added")


@scenario("Q-4", has_worker=False)
async def add_data_forms(run: Run) -> None:
    for data in ([1, [2]], "text", 7, 2.5, True, False, {"empty": {}, "list": [], "quote": '"\\/\n\u2028😀'}):
        await run.add("form", data)
    run.snap("added")


@scenario("Q-31", has_worker=False)
async def add_lifo(run: Run) -> None:
    await run.add("a")
    await run.add("b")
    await run.add("c", lifo=True)
    run.snap("added")


@scenario("Q-33", "W-80", has_worker=False)
async def add_delayed(run: Run) -> None:
    await run.add("late", delay=2 * FAR_MS)
    await run.add("soon", delay=FAR_MS)
    run.snap("added")


@scenario("Q-32", "Q-41", "X-10", has_worker=False)
async def add_prioritized(run: Run) -> None:
    for priority in (5, 1, 5, 2_097_151):
        await run.add("vip", priority=priority)
    run.snap("added")


@scenario("Q-33", "Q-41", has_worker=False)
async def add_delayed_prioritized(run: Run) -> None:
    await run.add("later", delay=FAR_MS, priority=7)
    run.snap("added")


@scenario("Q-2", "X-18", has_worker=False)
async def add_custom_id(run: Run) -> None:
    await run.add("one", jobId="invoice-7")
    await run.add("two")
    run.snap("added")


@scenario("Q-2", has_worker=False)
async def add_duplicate(run: Run) -> None:
    await run.add("one", {"v": 1}, jobId="invoice-7")
    await run.add("two", {"v": 2}, jobId="invoice-7", delay=FAR_MS)
    run.snap("added")


@scenario("Q-22", "Q-31", "Q-32", "Q-33", has_worker=False)
async def add_bulk(run: Run) -> None:
    await run.producer.add_bulk(
        QUEUE,
        [
            {"name": "a", "data": {"n": 1}},
            {"name": "b", "data": {"n": 2}, "opts": {"priority": 3}},
            {"name": "c", "data": {"n": 3}, "opts": {"delay": FAR_MS}},
            {"name": "d", "data": {"n": 4}, "opts": {"jobId": "own"}},
            {"name": "e", "data": {"n": 5}, "opts": {"jobId": "own"}},
            {"name": "f", "data": {"n": 6}, "opts": {"lifo": True}},
            {"name": "g", "data": {"n": 7}, "opts": {"priority": 3}},
        ],
    )
    run.snap("added")


@scenario("Q-30", has_worker=False)
async def add_options(run: Run) -> None:
    await run.add(
        "send-email", {"to": "user@example.com"}, priority=5, attempts=3, backoff={"type": "exponential", "delay": 1000}
    )
    await run.add(
        "process-payment",
        {"amount": 10},
        jobId="payment-789",
        priority=10,
        attempts=5,
        backoff={"type": "exponential", "delay": 2000},
    )
    await run.add("fixed", attempts=2, backoff={"type": "fixed", "delay": 50})
    await run.add("jitter", attempts=2, backoff={"type": "exponential", "delay": 50, "jitter": 0.5})
    await run.add("keep", removeOnComplete=100, removeOnFail=5000, keepLogs=5, stackTraceLimit=3)
    await run.add("keep-rules", removeOnComplete={"count": 5, "age": 60}, removeOnFail={"age": 3600, "count": 10})
    await run.add("drop", removeOnComplete=True, removeOnFail=False)
    run.snap("added")


@scenario("Q-39", has_worker=False)
async def paused_and_resumed(run: Run) -> None:
    await run.add("before")
    await run.producer.pause(QUEUE)
    run.snap("paused")
    await run.add("while paused")
    await run.add("while paused", priority=2)
    await run.add("while paused", delay=FAR_MS)
    run.snap("added")
    await run.producer.resume(QUEUE)
    run.snap("resumed")


@scenario("Q-39", has_worker=False)
async def resumed_without_ready_work(run: Run) -> None:
    await run.producer.pause(QUEUE)
    await run.add("later", delay=FAR_MS)
    await run.producer.resume(QUEUE)
    run.snap("resumed")


# --- working ------------------------------------------------------------------------------------------------------


@scenario("Q-23", "Q-24", "Q-34", "Q-35", "Q-36", "Q-53", "Q-58", "X-11")
async def active_then_completed(run: Run) -> None:
    job_id = await run.add("job", {"n": 1})
    await run.work(
        {"progress": [25, {"pct": 50}], "logs": ["l1", "l2"], "hold": True, "kind": "return", "value": {"ok": True}}
    )
    await run.worker.wait_held("w1", job_id)
    run.snap("active")
    await run.worker.release("w1")
    await run.until("completed")
    run.snap("completed")


@scenario("Q-12", "Q-24")
async def return_values(run: Run) -> None:
    values: dict[str, Any] = {"none": None, "number": 3, "text": 'té"xt', "list": [], "object": {}, "false": False}
    await run.work({"byName": {name: {"kind": "return", "value": value} for name, value in values.items()}})
    for number, name in enumerate(values, start=1):
        await run.add(name)
        await run.until("drained", count=number)
    run.snap("completed")


@scenario("Q-58")
async def drained_after_the_last(run: Run) -> None:
    for _ in range(3):
        await run.add()
    await run.work({"kind": "return", "value": 1})
    await run.until("drained")
    run.snap("drained")


@scenario("Q-31", "Q-32", "Q-41", "X-9", "X-10")
async def order_of_taking(run: Run) -> None:
    for number, priority in enumerate((5, 0, 10, 5, 1, 0)):
        await run.add(f"p{priority}", {"n": number}, **({"priority": priority} if priority else {}))
    await run.add("front", lifo=True)
    await run.work({"kind": "return", "value": None})
    await run.until("completed", count=7)
    run.snap("completed")


@scenario("Q-47")
async def removed_when_completed(run: Run) -> None:
    await run.add(removeOnComplete=True)
    await run.work({"logs": ["line"], "kind": "return", "value": 1})
    await run.until("completed")
    run.snap("completed")


@scenario("Q-47")
async def removed_when_failed(run: Run) -> None:
    await run.add(removeOnFail=True, attempts=1)
    await run.work({"kind": "always_fail"})
    await run.until("failed")
    run.snap("failed")


@scenario("Q-48")
async def newest_completed_are_kept(run: Run) -> None:
    for number in range(4):
        await run.add("job", {"n": number}, removeOnComplete=2)
    await run.work({"kind": "return", "value": 1})
    await run.until("completed", count=4)
    run.snap("completed")


@scenario("Q-48")
async def newest_failed_is_kept(run: Run) -> None:
    for number in range(3):
        await run.add("job", {"n": number}, removeOnFail=1, attempts=1)
    await run.work({"kind": "always_fail"})
    await run.until("failed", count=3)
    run.snap("failed")


@scenario("Q-48")
async def old_completed_are_removed(run: Run) -> None:
    await run.work({"kind": "return", "value": 1})
    for number in (1, 2, 3):
        await run.add("old", {"n": number})
        await run.until("drained", count=number)
    for job_id in ("1", "2"):
        run.client.zincrby(run.key("completed"), -120_000, job_id)
    await run.add("new", removeOnComplete={"age": 60})
    await run.until("drained", count=4)
    run.snap("completed")


@scenario("W-64")
async def worker_wide_retention(run: Run) -> None:
    for number in range(3):
        await run.add("job", {"n": number})
    await run.work({"kind": "return", "value": 1}, removeOnComplete={"count": 1})
    await run.until("completed", count=3)
    run.snap("completed")


@scenario("Q-63")
async def logs_are_trimmed(run: Run) -> None:
    await run.add(keepLogs=2)
    await run.work({"logs": ["1", "2", "3"], "kind": "return", "value": 1})
    await run.until("completed")
    run.snap("completed")


@scenario("W-64")
async def metrics_are_counted(run: Run) -> None:
    await run.work(
        {"byName": {"good": {"kind": "return", "value": 1}, "bad": {"kind": "always_fail"}}},
        metrics={"maxDataPoints": 10},
    )
    for number, name in enumerate(("good", "bad", "good"), start=1):
        await run.add(name, attempts=1)
        await run.until("drained", count=number)
    run.snap("finished")


# --- failing and retrying -----------------------------------------------------------------------------------------


@scenario("Q-12", "Q-26", "X-105")
async def failed_at_the_only_attempt(run: Run) -> None:
    await run.add(attempts=1)
    await run.work({"kind": "always_fail", "message": 'no "such" user: é'})
    await run.until("failed")
    run.snap("failed")


@scenario("Q-25", "Q-16", "X-99", produced_by_node=True)
async def retried_at_once(run: Run) -> None:
    await run.add(attempts=2)
    await run.work({"kind": "fail_times", "times": 1, "value": "in the end"})
    await run.until("completed")
    run.snap("completed")


@scenario("Q-25", "Q-31", produced_by_node=True)
async def retried_at_once_places(run: Run) -> None:
    """A retry goes to the back of the line; with lifo to the front; with a priority behind its equals."""
    for name, opts in (("a", {}), ("b", {"lifo": True}), ("c", {"priority": 2}), ("d", {"priority": 2})):
        await run.add(name, attempts=2, **opts)
    await run.work({"kind": "fail_times", "times": 1, "value": 1})
    await run.until("completed", count=4)
    run.snap("completed")


@scenario("Q-25", "Q-26")
async def retried_with_fixed_backoff(run: Run) -> None:
    job_id = await run.add(attempts=2, backoff={"type": "fixed", "delay": FAR_MS})
    await run.work({"kind": "always_fail"})
    await run.until("delayed")
    run.snap("delayed")
    await run.node.peer.call("promote", queue=QUEUE, jobId=job_id)
    await run.until("failed")
    run.snap("failed")


@scenario("Q-25", "X-43")
async def retried_with_exponential_backoff(run: Run) -> None:
    job_id = await run.add(attempts=3, backoff={"type": "exponential", "delay": 60_000})
    await run.work({"kind": "fail_times", "times": 2, "value": "third time"})
    for failures in (1, 2):
        await run.until("delayed", count=failures)
        run.snap(f"delayed after failure {failures}")
        await run.node.peer.call("promote", queue=QUEUE, jobId=job_id)
    await run.until("completed")
    run.snap("completed")


@scenario("Q-25")
async def retried_when_due(run: Run) -> None:
    await run.add(attempts=2, backoff={"type": "fixed", "delay": 20})
    await run.work({"kind": "fail_times", "times": 1, "value": 1})
    await run.until("completed")
    run.snap("completed")


@scenario("Q-26", "X-105")
async def unrecoverable(run: Run) -> None:
    await run.add(attempts=3, backoff={"type": "fixed", "delay": 10})
    await run.work({"kind": "unrecoverable", "message": "never again"})
    await run.until("failed")
    run.snap("failed")


@scenario("Q-12")
async def stack_traces_are_limited(run: Run) -> None:
    await run.add(attempts=3, backoff={"type": "fixed", "delay": 1}, stackTraceLimit=2)
    await run.work({"kind": "always_fail"})
    await run.until("failed")
    run.snap("failed")


@scenario("Q-26")
async def retried_by_hand(run: Run) -> None:
    job_id = await run.add(attempts=1)
    await run.work({"kind": "always_fail"})
    await run.until("failed")
    await run.stop()
    await run.node.peer.call("retryJob", queue=QUEUE, jobId=job_id, state="failed")
    run.snap("waiting")
    await run.work({"kind": "return", "value": 1}, worker="w2")
    await run.until("completed")
    run.snap("completed")


# --- delays, limits, other ways out of active ---------------------------------------------------------------------


@scenario("Q-33")
async def promoted_when_due(run: Run) -> None:
    await run.add(delay=30)
    await run.work({"kind": "return", "value": 1})
    await run.until("completed")
    run.snap("completed")


@scenario("Q-33", "Q-41")
async def promoted_to_its_priority_when_due(run: Run) -> None:
    await run.add(delay=30, priority=4)
    await run.work({"kind": "return", "value": 1})
    await run.until("completed")
    run.snap("completed")


@scenario("Q-33")
async def moved_to_delayed_by_the_handler(run: Run) -> None:
    job_id = await run.add(attempts=2)
    await run.work({"kind": "delay_once", "ms": FAR_MS, "value": "later"})
    await run.until("delayed")
    run.snap("delayed")
    await run.node.peer.call("promote", queue=QUEUE, jobId=job_id)
    await run.until("completed")
    run.snap("completed")


@scenario("Q-38", "W-85")
async def returned_by_a_rate_limit(run: Run) -> None:
    await run.add("limited")
    await run.add("behind")
    await run.work(
        {"byName": {"limited": {"kind": "rate_limit_once", "ms": FAR_MS}}}, limiter={"max": 100, "duration": FAR_MS}
    )
    await run.until("waiting", "1", count=2)
    run.snap("waiting")


@scenario("Q-38", "W-85")
async def limited_by_the_worker(run: Run) -> None:
    for _ in range(3):
        await run.add()
    await run.work({"kind": "return", "value": 1}, limiter={"max": 2, "duration": FAR_MS})
    await run.until("completed", count=2)
    run.snap("limited")


@scenario("Q-38", "W-67")
async def limited_for_the_whole_queue(run: Run) -> None:
    await run.node.peer.call("setGlobalRateLimit", queue=QUEUE, args=[1, FAR_MS])
    for _ in range(2):
        await run.add()
    await run.work({"kind": "return", "value": 1})
    await run.until("completed")
    run.snap("limited")


@scenario("Q-25")
async def returned_to_wait_by_the_handler(run: Run) -> None:
    await run.add("first")
    await run.add("second")
    await run.work({"byName": {"first": {"kind": "wait_once", "value": 1}, "second": {"kind": "return", "value": 2}}})
    await run.until("completed", count=2)
    run.snap("completed")


@scenario("Q-39")
async def paused_while_active(run: Run) -> None:
    job_id = await run.add("running")
    await run.work({"hold": True, "kind": "return", "value": 1})
    await run.worker.wait_held("w1", job_id)
    await run.producer.pause(QUEUE)
    await run.add("stays")
    await run.worker.release("w1")
    await run.until("completed")
    run.snap("paused")
    await run.producer.resume(QUEUE)
    await run.until("completed", count=2)
    run.snap("completed")


# --- stalls -------------------------------------------------------------------------------------------------------


async def _lose_a_job(run: Run, **opts: Any) -> str:
    """Leave a job in `active` as a worker that lost its machine would: no lock, and marked by one stalled check."""
    job_id = await run.add("lost", **opts)
    run.worked = True
    await run.node.start_worker("dead", QUEUE, {"hold": True})
    await run.node.wait_held("dead", job_id)
    run.client.delete(run.key(f"{job_id}:lock"), run.key("stalled-check"))
    run.client.sadd(run.key("stalled"), job_id)
    await run.node.pause(QUEUE)
    return job_id


@scenario("Q-37", "X-13")
async def stalled_once(run: Run) -> None:
    await _lose_a_job(run, priority=3)
    await run.work({"kind": "return", "value": 1}, stalledInterval=1000, drainDelay=1)
    await run.until("stalled")
    run.snap("recovered")
    await run.node.resume(QUEUE)
    await run.until("completed")
    run.snap("completed")


@scenario("Q-37", "X-13", "X-105")
async def stalled_beyond_the_limit(run: Run) -> None:
    """Node's check condemns the job; whoever takes it must fail it without running it."""
    await _lose_a_job(run, attempts=5)
    await run.node.start_worker("checker", QUEUE, {}, maxStalledCount=0, drainDelay=1)
    await run.until("stalled")
    await run.node.close_worker("checker")
    run.snap("condemned")
    await run.work({"kind": "return", "value": "must not run"})
    await run.node.resume(QUEUE)
    await run.until("failed")
    run.snap("failed")


# --- flows --------------------------------------------------------------------------------------------------------

_POLICIES = {
    "none": None,
    "fpof": "failParentOnFailure",
    "idof": "ignoreDependencyOnFailure",
    "rdof": "removeDependencyOnFailure",
    "cpof": "continueParentOnFailure",
}


def _flow(children: Sequence[dict[str, Any]], **parent_opts: Any) -> dict[str, Any]:
    return {
        "name": "parent",
        "queueName": QUEUE,
        "data": {"o": 1},
        "opts": {"jobId": "P-1", "attempts": 1, **parent_opts},
        "children": [
            {"name": "kid", "queueName": KIDS, "data": {"i": number}, **child}
            for number, child in enumerate(children, start=1)
        ],
    }


async def _add_flow(run: Run, children: Sequence[dict[str, Any]], **parent_opts: Any) -> None:
    await _add(run, _flow(children, **parent_opts))


async def _add(run: Run, flow: dict[str, Any]) -> None:
    await run.node.open_queue(QUEUE)
    await run.node.open_queue(KIDS)
    await run.producer.add_flow(flow)


def _kid(job_id: str, *, policy: str = "none", name: str = "kid", **opts: Any) -> dict[str, Any]:
    flag = _POLICIES[policy]
    return {"name": name, "opts": {"jobId": job_id, "attempts": 1, **({flag: True} if flag else {}), **opts}}


_KIDS_PLAY: Behaviour = {
    "byName": {"kid": {"kind": "return", "value": {"v": 10}}, "bad": {"kind": "always_fail", "message": "kid failed"}}
}


@scenario("W-84")
async def flow_with_all_policies_added(run: Run) -> None:
    await _add_flow(run, [_kid(f"C-{policy}", policy=policy) for policy in _POLICIES], priority=3)
    run.snap("added")
    await run.work(_KIDS_PLAY, queue=KIDS)
    await run.until("waiting", "P-1")
    run.snap("released")
    await run.work({"kind": "children"}, worker="p1")
    await run.until("completed", "P-1")
    run.snap("completed")


def _child_failure_scenario(policy: str) -> None:
    async def steps(run: Run) -> None:
        await _add_flow(run, [_kid("C-bad", policy=policy, name="bad"), _kid("C-good", policy=policy)])
        run.snap("added")
        await run.work(_KIDS_PLAY, queue=KIDS)
        await run.until("failed", "C-bad", queue=KIDS)
        await run.until("completed", "C-good", queue=KIDS)
        run.snap("children finished")
        await run.work({"kind": "children"}, worker="p1")
        if policy == "none":
            return
        await run.until("failed" if policy == "fpof" else "completed", "P-1")
        run.snap("parent finished")

    steps.__name__ = f"flow_child_fails_{policy}"
    scenario("W-84")(steps)


for _policy in _POLICIES:
    _child_failure_scenario(_policy)


@scenario("W-84")
async def flow_parent_goes_on_with_children_pending(run: Run) -> None:
    """After continueParentOnFailure the parent runs while a child is pending, waits again, and ends with that child."""
    await _add_flow(run, [_kid("C-bad", policy="cpof", name="bad"), _kid("C-late", delay=FAR_MS)])
    await run.work(_KIDS_PLAY, queue=KIDS)
    await run.until("waiting", "P-1")
    run.snap("released")
    await run.work({"kind": "wait_children"}, worker="p1")
    await run.until("waiting-children", "P-1", count=2)
    run.snap("waiting again")
    await run.node.peer.call("promote", queue=KIDS, jobId="C-late")
    await run.until("completed", "P-1")
    run.snap("completed")


@scenario("W-84")
async def flow_parent_fails_with_children_pending(run: Run) -> None:
    await _add_flow(run, [_kid("C-bad", policy="fpof", name="bad"), _kid("C-late", delay=FAR_MS)])
    await run.work(_KIDS_PLAY, queue=KIDS)
    await run.until("waiting", "P-1")
    run.snap("released")
    await run.work({"kind": "children"}, worker="p1")
    await run.until("failed", "P-1")
    run.snap("failed")


@scenario("W-84")
async def flow_delayed_parent(run: Run) -> None:
    await _add_flow(run, [_kid("C-1")], delay=FAR_MS)
    await run.work(_KIDS_PLAY, queue=KIDS)
    await run.until("delayed", "P-1")
    run.snap("delayed")


@scenario("W-84")
async def flow_children_removed_when_finished(run: Run) -> None:
    """Removal counts a child out, even a failed one without a policy."""
    await _add_flow(run, [_kid("C-1", removeOnComplete=True), _kid("C-2", name="bad", removeOnFail=True)])
    await run.work(_KIDS_PLAY, queue=KIDS)
    await run.until("waiting", "P-1")
    run.snap("released")


@scenario("W-84")
async def flow_failure_climbs_two_levels(run: Run) -> None:
    flow = _flow([])
    rule = {"attempts": 1, "failParentOnFailure": True}
    kid = {"name": "bad", "queueName": KIDS, "opts": {"jobId": "C-1", **rule}}
    flow["children"] = [{"name": "middle", "queueName": QUEUE, "opts": {"jobId": "M-1", **rule}, "children": [kid]}]
    await _add(run, flow)
    run.snap("added")
    await run.work(_KIDS_PLAY, queue=KIDS)
    await run.until("failed", "C-1", queue=KIDS)
    await run.work({"kind": "children"}, worker="p1")
    await run.until("failed", "P-1")
    run.snap("failed")


@scenario("W-84")
async def flow_failed_child_retried_by_hand(run: Run) -> None:
    await _add_flow(run, [_kid("C-1", name="bad")])
    await run.work(_KIDS_PLAY, queue=KIDS)
    await run.until("failed", "C-1", queue=KIDS)
    await run.stop()
    await run.node.peer.call("retryJob", queue=KIDS, jobId="C-1", state="failed")
    await run.work({"kind": "return", "value": 11}, queue=KIDS, worker="w2")
    await run.until("waiting", "P-1")
    run.snap("released")


@scenario("W-84")
async def flow_child_added_while_its_parent_runs(run: Run) -> None:
    """The parent's handler adds nothing itself here: who adds is the producer of the run."""
    await run.add("parent", jobId="P-1", attempts=1)
    await run.work({"hold": True, "kind": "wait_children"}, worker="p1")
    await run.worker.wait_held("p1", "P-1")
    await run.producer.add(
        KIDS,
        "kid",
        {"i": 1},
        jobId="C-1",
        attempts=1,
        parent={"id": "P-1", "queue": f"{PREFIX}:{QUEUE}"},
        ignoreDependencyOnFailure=True,
    )
    run.snap("added")
    await run.worker.release("p1")
    await run.until("waiting-children", "P-1")
    run.snap("waits")
    await run.work(_KIDS_PLAY, queue=KIDS)
    await run.until("completed", "P-1")
    run.snap("completed")


@scenario("W-84")
async def flow_completed_job_becomes_a_child(run: Run) -> None:
    """A parent whose only child is done already is released at once."""
    await run.node.open_queue(KIDS)
    await run.producer.add(KIDS, "kid", {"i": 1}, jobId="C-1", attempts=1)
    await run.work(_KIDS_PLAY, queue=KIDS)
    await run.until("completed", "C-1", queue=KIDS)
    await run.stop()
    await _add_flow(run, [_kid("C-1", policy="fpof"), _kid("C-2", policy="idof")])
    run.snap("added")
    await run.work(_KIDS_PLAY, queue=KIDS, worker="w2")
    await run.until("waiting", "P-1")
    run.snap("released")


@scenario("W-84")
async def flow_waiting_job_becomes_a_child(run: Run) -> None:
    await run.node.open_queue(KIDS)
    await run.producer.add(KIDS, "kid", {"i": 7}, jobId="C-1", attempts=1)
    await _add_flow(run, [_kid("C-1", policy="fpof")])
    run.snap("added")
    await run.work(_KIDS_PLAY, queue=KIDS)
    await run.until("waiting", "P-1")
    run.snap("released")


@scenario("W-84")
async def flow_of_many_kinds(run: Run) -> None:
    """Delays, priorities and LIFO of children, a grandchild, and a child of the parent's own queue."""
    flow = _flow([_kid("C-1", policy="fpof", priority=4), _kid("C-2", policy="rdof", delay=FAR_MS)], delay=5)
    deep = {"name": "deep", "queueName": KIDS, "data": {}}
    rules = {"jobId": "D-1", "attempts": 1, "lifo": True, "failParentOnFailure": True}
    middle = {"name": "middle", "queueName": QUEUE, "data": [1], "opts": {"jobId": "M-1", "attempts": 1, "priority": 9}}
    flow["children"].append(middle | {"children": [deep | {"opts": rules}]})
    flow["children"].append(_kid("C-3", policy="cpof") | {"queueName": QUEUE, "data": 3})
    await _add(run, flow)
    run.snap("added")
    await run.work({**_KIDS_PLAY, "kind": "return", "value": 1}, queue=KIDS)
    await run.until("completed", "C-1", queue=KIDS)
    run.snap("middle released")


# --- schedulers ---------------------------------------------------------------------------------------------------


@scenario("X-28")
async def scheduler_every(run: Run) -> None:
    await run.upsert_scheduler(
        "hb",
        repeat={"every": FAR_MS},
        template={"name": "beat", "data": {"x": 1}, "opts": {"attempts": 2, "removeOnComplete": 10}},
    )
    run.snap("added")
    await run.work({"hold": True, "kind": "return", "value": 1})
    await run.until("added", count=2)
    await run.until("active")
    run.snap("taken")
    await run.worker.release("w1")
    await run.until("completed")
    run.snap("completed")


@scenario("X-28")
async def scheduler_pattern(run: Run) -> None:
    await run.upsert_scheduler(
        "nightly",
        repeat={"pattern": "0 0 3 * * *", "tz": "Europe/Paris", "limit": 5},
        template={"name": "report", "data": {"x": 1}, "opts": {"priority": 2}},
    )
    run.snap("added")
    first: Any = run.client.zrange(run.key("delayed"), 0, 0)
    await run.node.peer.call("promote", queue=QUEUE, jobId=first[0].decode())
    await run.work({"hold": True, "kind": "return", "value": 1})
    await run.until("added", count=2)
    await run.until("active")
    run.snap("taken")
    await run.worker.release("w1")
    await run.until("completed")
    run.snap("completed")


@scenario("X-28")
async def scheduler_at_its_limit(run: Run) -> None:
    await run.upsert_scheduler(
        "once",
        repeat={"every": FAR_MS, "limit": 1},
        template={"name": "beat"},
    )
    await run.work({"kind": "return", "value": 1})
    await run.until("completed")
    run.snap("completed")


@scenario("X-28")
async def scheduler_removed_before_its_job_is_taken(run: Run) -> None:
    await run.upsert_scheduler("gone", repeat={"every": FAR_MS}, template={"name": "beat"})
    await run.producer.remove_scheduler(QUEUE, "gone")
    await run.work({"kind": "return", "value": 1})
    await run.until("completed")
    run.snap("completed")


@scenario("X-28", produced_by_node=True)
async def scheduler_job_retried(run: Run) -> None:
    """A retry takes the same iteration again and must not advance the scheduler twice."""
    await run.node.upsert_scheduler(
        QUEUE,
        "hb",
        repeat={"every": FAR_MS},
        template={"name": "beat", "opts": {"attempts": 2}},
    )
    await run.work({"kind": "fail_times", "times": 1, "value": 1})
    await run.until("completed")
    run.snap("completed")


# --- deduplication ------------------------------------------------------------------------------------------------


@scenario("W-83")
async def dedup_simple(run: Run) -> None:
    await run.add("one", {"v": 1}, deduplication={"id": "d"})
    await run.add("two", {"v": 2}, deduplication={"id": "d"})
    run.snap("deduplicated")
    await run.work({"kind": "return", "value": 1})
    await run.until("completed")
    run.snap("completed")
    await run.add("three", {"v": 3}, deduplication={"id": "d"})
    await run.until("completed", count=2)
    run.snap("free again")


@scenario("W-83")
async def dedup_simple_failed(run: Run) -> None:
    await run.add("one", {"v": 1}, deduplication={"id": "d"}, attempts=1)
    await run.work({"kind": "always_fail"})
    await run.until("failed")
    run.snap("failed")


@scenario("W-83")
async def dedup_throttle(run: Run) -> None:
    await run.add("one", {"v": 1}, deduplication={"id": "d", "ttl": FAR_MS})
    await run.work({"kind": "return", "value": 1})
    await run.until("completed")
    await run.add("two", {"v": 2}, deduplication={"id": "d", "ttl": FAR_MS})
    run.snap("key outlives the job")


@scenario("W-83")
async def dedup_debounce(run: Run) -> None:
    rule = {"id": "d", "ttl": FAR_MS, "extend": True, "replace": True}
    await run.add("one", {"v": 1}, deduplication=rule, delay=FAR_MS)
    await run.add("two", {"v": 2}, deduplication=rule, delay=FAR_MS)
    run.snap("replaced")
    await run.node.peer.call("promote", queue=QUEUE, jobId="2")
    await run.work({"kind": "return", "value": 1})
    await run.until("completed")
    run.snap("completed")


@scenario("W-83")
async def dedup_keep_last_if_active(run: Run) -> None:
    rule = {"id": "d", "keepLastIfActive": True}
    await run.add("one", {"v": 1}, deduplication=rule)
    await run.work({"hold": True, "kind": "return", "value": 1})
    await run.worker.wait_held("w1", "1")
    await run.add("two", {"v": 2}, deduplication=rule)
    await run.add("three", {"v": 3}, deduplication=rule, jobId="last", priority=2)
    run.snap("active")
    await run.worker.release("w1")
    await run.until("completed", "last")
    run.snap("completed")


@scenario("W-83")
async def dedup_keep_last_delayed(run: Run) -> None:
    rule = {"id": "d", "keepLastIfActive": True}
    await run.add("one", {"v": 1}, deduplication=rule, attempts=1)
    await run.work({"hold": True, "kind": "always_fail"})
    await run.worker.wait_held("w1", "1")
    await run.add("two", {"v": 2}, deduplication=rule, delay=FAR_MS)
    await run.worker.release("w1")
    await run.until("failed")
    run.snap("failed")


@scenario("W-83", has_worker=False)
async def dedup_extend(run: Run) -> None:
    rule = {"id": "d", "ttl": FAR_MS, "extend": True}
    await run.add("one", {"v": 1}, deduplication=rule)
    run.client.pexpire(run.key("de:d"), FAR_MS // 2)
    await run.add("two", {"v": 2}, deduplication=rule, jobId="own")
    run.snap("deduplicated")
    assert run.client.pttl(run.key("de:d")) > FAR_MS // 2


@scenario("W-83", has_worker=False)
async def dedup_replace_alone(run: Run) -> None:
    rule = {"id": "d", "replace": True}
    await run.add("one", {"v": 1}, deduplication=rule, delay=FAR_MS)
    await run.add("two", {"v": 2}, deduplication=rule, jobId="own")
    run.snap("replaced")
    await run.add("three", {"v": 3}, deduplication=rule)
    run.snap("not replaced")


@scenario("W-83", has_worker=False)
async def dedup_replace_keeps_ttl(run: Run) -> None:
    rule = {"id": "d", "ttl": FAR_MS, "replace": True}
    await run.add("one", {"v": 1}, deduplication=rule, delay=FAR_MS)
    run.client.pexpire(run.key("de:d"), FAR_MS // 2)
    await run.add("two", {"v": 2}, deduplication=rule, delay=FAR_MS)
    run.snap("replaced")
    assert run.client.pttl(run.key("de:d")) <= FAR_MS // 2


@scenario("W-83", has_worker=False)
async def dedup_reschedule(run: Run) -> None:
    rule = {"id": "d", "reschedule": True}
    await run.add("one", {"v": 1}, deduplication=rule, delay=FAR_MS)
    await asyncio.sleep(0.01)  # the new due time is another one than creation and delay give
    await run.add("two", {"v": 2}, deduplication=rule, delay=2 * FAR_MS)
    run.snap("put off")
    await run.add("three", {"v": 3}, deduplication=rule)
    run.snap("without a delay")


@scenario("W-83", has_worker=False)
async def dedup_reschedule_and_extend(run: Run) -> None:
    rule = {"id": "d", "ttl": FAR_MS, "extend": True, "reschedule": True}
    await run.add("one", {"v": 1}, deduplication=rule, delay=FAR_MS)
    await asyncio.sleep(0.01)  # the new due time is another one than creation and delay give
    await run.add("two", {"v": 2}, deduplication=rule, delay=2 * FAR_MS)
    run.snap("put off")


@scenario("W-83", has_worker=False)
async def dedup_owner_is_gone(run: Run) -> None:
    await run.add("one", {"v": 1}, deduplication={"id": "d"}, delay=FAR_MS)
    run.client.delete(run.key("1"))
    run.client.zrem(run.key("delayed"), "1")
    await run.add("two", {"v": 2}, deduplication={"id": "d"})
    run.snap("free again")


@scenario("W-83", has_worker=False)
async def dedup_custom_id_comes_first(run: Run) -> None:
    await run.add("one", {"v": 1}, deduplication={"id": "d"}, jobId="own")
    await run.add("two", {"v": 2}, deduplication={"id": "other"}, jobId="own")
    run.snap("duplicate")


# --- telemetry and whole-queue settings ---------------------------------------------------------------------------


@scenario(has_worker=False)
async def add_telemetry_metadata(run: Run) -> None:
    await run.add("traced", telemetry={"metadata": '{"traceparent":"00-1-2-01"}'})
    run.snap("added")


@scenario("W-67")
async def global_concurrency(run: Run) -> None:
    await run.node.peer.call("setGlobalConcurrency", queue=QUEUE, args=[1])
    for _ in range(2):
        await run.add()
    await run.work({"hold": True, "kind": "return", "value": 1}, concurrency=5)
    await run.worker.wait_held("w1", "1")
    run.snap("one active")
    await run.worker.release("w1")
    await run.until("completed", count=2)
    run.snap("completed")


@scenario("X-28", has_worker=False)
async def scheduler_rules(run: Run) -> None:
    """Every part of a rule, where the record and the options of the job keep it."""
    far_ms = FAR_FUTURE_MS
    await run.upsert_scheduler("start", {"every": FAR_MS, "startDate": far_ms, "endDate": 2 * far_ms}, {"name": "a"})
    await run.upsert_scheduler("offset", {"every": FAR_MS, "offset": 60_000, "limit": 3}, {"name": "b", "data": [1]})
    await run.upsert_scheduler(
        "cron", {"pattern": "0 9 * * 1-5", "tz": "Asia/Tokyo", "startDate": far_ms}, {"name": "c"}
    )
    await run.upsert_scheduler("end", {"pattern": "@yearly", "tz": "UTC", "endDate": far_ms}, {"name": "d", "data": {}})
    await run.upsert_scheduler("now", {"pattern": "@daily", "tz": "UTC", "immediately": True}, {"opts": {"lifo": True}})
    await run.upsert_scheduler("odd", {"every": FAR_MS}, {"name": 'q"\\/é', "opts": {"priority": 3}})
    run.snap("added")


@scenario("X-28", has_worker=False)
async def scheduler_upserted_again(run: Run) -> None:
    """The job to come is replaced wherever it waits; the same interval keeps its time."""
    for delayed in ({"every": FAR_MS, "startDate": FAR_FUTURE_MS}, {"every": FAR_MS}):
        await run.upsert_scheduler("same", delayed, {"name": "a", "data": {"n": 1}})
        run.snap(f"same, {len(delayed)} words")
    await run.upsert_scheduler("changed", {"every": FAR_MS, "startDate": FAR_FUTURE_MS}, {"name": "a"})
    await run.upsert_scheduler("changed", {"every": 2 * FAR_MS, "startDate": 2 * FAR_FUTURE_MS}, {"name": "b"})
    run.snap("another interval")
    await run.upsert_scheduler("cron", {"pattern": "@yearly", "tz": "UTC"}, {"name": "c", "opts": {"priority": 2}})
    await run.upsert_scheduler("cron", {"pattern": "0 0 1 7 *", "tz": "UTC", "startDate": FAR_FUTURE_MS}, {"name": "d"})
    run.snap("another pattern")


@scenario("X-28", has_worker=False)
async def scheduler_upserted_again_in_line(run: Run) -> None:
    for name in ("first", "second"):
        await run.upsert_scheduler("ready", {"every": FAR_MS}, {"name": name})
    run.snap("replaced")


@scenario("X-28", has_worker=False)
async def scheduler_upserted_again_with_a_priority(run: Run) -> None:
    for name in ("first", "second"):
        await run.upsert_scheduler("ranked", {"every": FAR_MS}, {"name": name, "opts": {"priority": 4}})
    run.snap("replaced")


@scenario("X-28", has_worker=False)
async def scheduler_removed(run: Run) -> None:
    await run.upsert_scheduler("late", {"pattern": "@yearly", "tz": "UTC"}, {"name": "a"})
    await run.upsert_scheduler("ready", {"every": FAR_MS}, {"name": "a"})
    for scheduler_id in ("late", "ready", "nobody"):
        await run.producer.remove_scheduler(QUEUE, scheduler_id)
    run.snap("removed")


@scenario("X-28")
async def scheduler_upserted_while_its_job_runs(run: Run) -> None:
    await run.upsert_scheduler("hb", {"every": FAR_MS}, {"name": "beat"})
    await run.work({"hold": True, "kind": "return", "value": 1})
    await run.until("added", count=2)
    await run.until("active")
    await run.upsert_scheduler("hb", {"every": FAR_MS}, {"name": "other", "data": {"n": 2}})
    run.snap("upserted")
    await run.worker.release("w1")
    await run.until("completed")
    run.snap("completed")
