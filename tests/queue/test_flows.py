"""Trees of jobs: stored all or not at all, each parent run once after its children, and whatever a failure means.

What is stored is compared with Node's in `tests/interop`, where random flows run against a model too.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import pytest

from bullpen.errors import (
    InvalidOption,
    JobNotFound,
    JobStateConflict,
    OutcomeUnknown,
    PermanentError,
    WaitForChildren,
)
from bullpen.queue import Added, Durability, Flow, FlowNode, Job, JobState, NewJob, Queue
from bullpen.sync import Queue as SyncQueue
from bullpen.testing import FaultProxy, RedisServer
from bullpen.wire.scripts import SCRIPTS
from tests.queue import _process_handlers
from tests.queue._kit import Gate, Kit, echo, soon
from tests.queue.test_locks_and_stalls import check_stalled

pytestmark = pytest.mark.requirement("W-84")

LONG = os.environ.get("BULLPEN_TEST_LONG") == "1"


@pytest.fixture
def proxy(redis_server: RedisServer, kit: Kit) -> Iterator[FaultProxy]:
    for script in SCRIPTS.values():
        kit.command("SCRIPT", "LOAD", script.body)
    with FaultProxy(redis_server) as opened:
        yield opened


def leaf(name: str, data: Any = None, **options: Any) -> Flow:
    return Flow(name, data, **{"on_failure": "fail_parent", "job_id": name, **options})


async def work_all(job: Job) -> Any:
    """Fails what is called bad; a parent returns what its children did."""
    if job.name.startswith("bad"):
        raise PermanentError("no")
    values = await job.children_values()
    return sorted(values.values(), key=str) if values else job.data


class TestAdding:
    async def test_a_parent_runs_after_its_children_and_sees_what_they_returned(self, kit: Kit) -> None:
        queue = kit.queue()

        tree = await queue.add_flow(
            Flow("sum", children=[leaf("one", 1), leaf("two", 2), leaf("deep", children=[leaf("three", 3)])])
        )
        assert [job.name for job in tree.jobs()] == ["sum", "one", "two", "deep", "three"]
        assert await tree.job.state() is JobState.WAITING_CHILDREN
        told = await kit.drain(work_all, 5)

        assert told.ids("completed")[-1] == tree.job.id
        assert (await queue.get_job(tree.job.id)).return_value == [1, 2, [3]]  # type: ignore[union-attr]  # it is kept
        assert tree.children[0].job.parent == {"id": tree.job.id, "queueKey": kit.base[:-1], "fpof": True}

    async def test_children_in_other_queues_and_prefixes(self, kit: Kit) -> None:
        """A queue object gives its name, prefix and defaults; a name alone stays under the parent's prefix."""
        there = kit.queue(f"{kit.name}-there", prefix="bull:other", attempts=7)
        tree = await kit.queue().add_flow(
            Flow(
                "top",
                children=[
                    leaf("a", queue=f"{kit.name}-kids"),
                    leaf("b", queue=there),
                    leaf("c", prefix="bull:third", children=[leaf("d")]),
                ],
            )
        )

        keys = [str(job.key) for job in tree.jobs()]
        assert keys[1:] == [
            f"bull:{kit.name}-kids:a",
            f"bull:other:{kit.name}-there:b",
            f"bull:third:{kit.name}:c",
            f"bull:third:{kit.name}:d",
        ]
        assert tree.children[1].job.opts.attempts == 7
        assert all(kit.redis.exists(key) for key in keys)
        assert await there.state_of("b") is JobState.WAITING
        for other in (f"bull:third:{kit.name}:", f"bull:other:{kit.name}-there:"):
            kit.redis.delete(*kit.redis.keys(f"{other}*"))

    async def test_several_flows_are_one_step(self, kit: Kit) -> None:
        queue = kit.queue()
        kit.reset_statistics()

        trees = await queue.add_flows([Flow("a", children=[leaf("x")]), Flow("b", children=[leaf("y"), leaf("z")])])

        assert [[job.name for job in tree.jobs()] for tree in trees] == [["a", "x"], ["b", "y", "z"]]
        assert kit.script_calls() <= 2  # the second is the text of the script, where the server did not know it
        assert await queue.add_flows([]) == []

    async def test_a_flow_that_is_added_again_stores_nothing(self, kit: Kit) -> None:
        """Whoever does not know whether it was added may add it again."""
        queue = kit.queue()
        flow = Flow("top", job_id="order-1", children=[leaf("x")])
        await queue.add_flow(flow)
        await kit.drain(work_all, 2)

        again = await queue.add_flow(flow)

        assert (again.job.added, again.children) == (Added.DUPLICATE, ())
        assert again.job.blocked_by is not None
        assert again.job.blocked_by.state is JobState.COMPLETED
        assert (await queue.counts()).pending == 0

    @pytest.mark.parametrize("flow", [Flow("top", job_id="new", children=[leaf("x")]), Flow("top", job_id="old")])
    async def test_a_flow_whose_reply_is_lost_is_stored_once(self, kit: Kit, proxy: FaultProxy, flow: Flow) -> None:
        queue = kit.queue(connection=proxy.url)
        await queue.add("first", job_id="old")
        lost = proxy.lose_reply(SCRIPTS["add_flow"].sha1, times=2)

        tree = await soon(queue.add_flow(flow))

        assert lost.count == 2
        assert tree.job.added is (Added.DUPLICATE if tree.job.id == "old" else Added.CREATED)
        assert len([event for event in kit.events() if event["event"] == "added"]) == 1 + 2 * (tree.job.id == "new")

    async def test_an_outcome_that_stays_unknown_says_so(self, kit: Kit, proxy: FaultProxy) -> None:
        queue = kit.queue(connection=proxy.url)
        await queue.add("first")
        proxy.lose_reply(SCRIPTS["add_flow"].sha1, times=1_000)

        with pytest.raises(OutcomeUnknown):
            await soon(queue.add_flow(Flow("top", children=[leaf("x")]), add_deadline=300))
        # The next one has a number of its own, so that no late copy of the first can answer it.
        tree = await soon(kit.queue().add_flow(Flow("top", children=[leaf("y")])))
        assert tree.job.added is Added.CREATED

    async def test_a_flow_has_a_durability(self, kit: Kit) -> None:
        with pytest.raises(InvalidOption, match="connected replica"):
            await kit.queue().add_flow(Flow("top", children=[leaf("x")]), durability=Durability.replicated(1))
        assert not kit.has("waiting-children")

    async def test_paused_limited_delayed_and_prioritized_children_go_where_they_belong(self, kit: Kit) -> None:
        queue = kit.queue()
        await queue.pause()

        await queue.add_flow(
            Flow(
                "top",
                children=[
                    leaf("a"),
                    leaf("b", lifo=True),
                    leaf("c", priority=3),
                    leaf("d", delay=60_000),
                    leaf("e", urgency=5),
                ],
            )
        )

        assert kit.ids("wait") == ["b", "a"]
        assert list(kit.zset("prioritized")) == ["c", "e"]
        assert list(kit.zset("delayed")) == ["d"]
        assert "0" not in kit.marker()
        await queue.resume()

    @pytest.mark.parametrize(
        ("flow", "message"),
        [
            (
                Flow("top", children=[Flow("x")]),
                "on_failure: expected what a failure does to the parent: 'fail_parent'",
            ),
            (Flow("top", children=[leaf("x", on_failure="retry")]), "on_failure: expected one of 'fail_parent'"),
            (Flow("top", on_failure="ignore"), "on_failure: expected a parent"),
            (Flow("top", children=[leaf("x"), leaf("y", job_id="x")]), "job_id: expected an id that no other job"),
            (Flow("top", children=[leaf("x", deduplication="d")]), "deduplication: expected none in a flow"),
            (Flow("top", children=[leaf("x", replace_finished=True)]), "replace_finished: expected none in a flow"),
            (Flow("top", children=[leaf("x", queue="a:b")]), "queue: expected a name without ':'"),
            (Flow("top", children=[leaf("x", nonsense=1)]), "nonsense: expected the name of a job option"),
        ],
    )
    async def test_a_wrong_flow_is_refused_before_anything_is_sent(self, kit: Kit, flow: Flow, message: str) -> None:
        with pytest.raises(InvalidOption, match=message):
            await kit.queue().add_flow(flow)
        assert not kit.redis.keys(f"{kit.base}*")

    async def test_a_flow_too_large_for_one_call_is_refused(self, kit: Kit) -> None:
        many = [Flow("x", on_failure="remove") for _ in range(20_000)]

        with pytest.raises(InvalidOption, match="flow: expected at most 20000 jobs"):
            await kit.queue().add_flow(Flow("top", children=many))


class TestTakenIds:
    async def test_a_stored_leaf_becomes_a_child_with_what_became_of_it(self, kit: Kit) -> None:
        """Completed, failed under each policy, or waiting: no parent waits for what has ended."""
        queue = kit.queue()
        for name in ("done", "bad-ignored", "bad-removed", "bad-waits"):
            await queue.add(name, job_id=name, attempts=1)
        told = await kit.drain(work_all, 4)
        assert len(told.of("failed")) == 3
        await queue.add("waits", job_id="waits")

        tree = await queue.add_flow(
            Flow(
                "top",
                children=[
                    leaf("done"),
                    leaf("bad-ignored", on_failure="ignore"),
                    leaf("bad-removed", on_failure="remove"),
                    leaf("waits"),
                ],
            )
        )

        assert (await tree.job.children_counts()).pending == 1
        assert await tree.job.ignored_children() == {f"{kit.base}bad-ignored": "no"}
        assert await tree.job.children_values() == {f"{kit.base}done": {}}
        told = await kit.drain(work_all, 2)
        assert told.ids("completed") == ["waits", tree.job.id]

    async def test_a_failed_leaf_fails_a_parent_that_wants_it(self, kit: Kit) -> None:
        queue = kit.queue()
        await queue.add("bad", job_id="bad", attempts=1)
        await kit.drain(work_all, 1)

        tree = await queue.add_flow(Flow("top", children=[leaf("bad"), leaf("other", delay=600_000)]))
        await kit.drain(work_all, 1)

        assert await tree.job.state() is JobState.FAILED
        assert await tree.job.failed_children() == {f"{kit.base}bad": "no"}

    async def test_a_child_of_another_is_refused_and_nothing_is_stored(self, kit: Kit) -> None:
        queue = kit.queue()
        await queue.add_flow(Flow("first", job_id="first", children=[leaf("x")]))

        for taken in (leaf("x"), leaf("first", children=[leaf("z")])):
            with pytest.raises(JobStateConflict, match="cannot become this child"):
                await queue.add_flow(Flow("top", job_id="top", children=[leaf("y"), taken]))

        assert not kit.has("top") and not kit.has("y")

    async def test_a_child_whose_parent_is_gone_is_free(self, kit: Kit) -> None:
        queue = kit.queue()
        first = await queue.add_flow(Flow("first", children=[leaf("x")]))
        await queue.remove(first.job, children=False)

        tree = await queue.add_flow(Flow("top", children=[leaf("x")]))

        assert await queue.children_counts(tree.job) == await tree.job.children_counts()
        assert (await tree.job.children_counts()).pending == 1


class TestParents:
    async def test_jobs_are_added_below_a_job(self, kit: Kit) -> None:
        """One by one, in bulk, blocking, and whole flows."""
        queue, blocking = kit.queue(), SyncQueue(f"{kit.name}-kids", connection=kit.url)
        top = (await queue.add_flow(Flow("top", children=[leaf("first")]))).job

        await queue.add("a", 1, parent=top, on_failure="fail_parent")
        await queue.add_many([NewJob("b", 2, {"parent": top.key, "on_failure": "ignore"}), ("plain", 3)])
        blocking.add("c", 4, parent=top, on_failure="wait")
        await queue.add_flow(Flow("d", 5, parent=top, on_failure="remove", children=[leaf("e")]))
        blocking.close()

        assert (await top.children_counts()).pending == 5
        kids = await kit.work(work_all, queue=f"{kit.name}-kids")
        await kit.drain(work_all, 7)
        await kids.finished(1)
        assert await top.state() is JobState.COMPLETED
        assert sorted((await top.children_values()).values(), key=str) == [1, 2, 4, [{}], {}]

    async def test_a_parent_that_does_not_exist_is_an_error(self, kit: Kit) -> None:
        """Of that job alone: others of the call are stored."""
        queue, blocking = kit.queue(), SyncQueue(kit.name, connection=kit.url)
        nobody = queue.key_of("nobody")

        answers = await asyncio.gather(
            queue.add("a"), queue.add("b", parent=nobody, on_failure="wait"), queue.add("c"), return_exceptions=True
        )
        assert [type(answer) for answer in answers] == [Job, JobNotFound, Job]
        with pytest.raises(JobNotFound, match="nobody"):
            blocking.add("b", parent=nobody, on_failure="wait")
        with pytest.raises(JobNotFound, match="nobody"):
            await queue.add_flow(Flow("d", parent=nobody, on_failure="wait", children=[leaf("e")]))

        blocking.close()
        assert (await queue.counts()).waiting == 2
        assert not kit.has("e")

    async def test_another_ones_child_is_an_error(self, kit: Kit) -> None:
        queue = kit.queue()
        one = (await queue.add_flow(Flow("one", children=[leaf("x")]))).job
        two = (await queue.add_flow(Flow("two", children=[leaf("y")]))).job

        again = await queue.add("x", job_id="x", parent=one, on_failure="fail_parent")
        assert again.added is Added.DUPLICATE
        with pytest.raises(JobStateConflict):
            await queue.add("x", job_id="x", parent=two, on_failure="fail_parent")

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"parent": "bull:q:1"}, "parent: expected a Job, or a JobKey"),
            ({"on_failure": "wait"}, "on_failure: expected a parent"),
        ],
    )
    async def test_wrong_options_are_refused(self, kit: Kit, options: dict[str, Any], message: str) -> None:
        with pytest.raises(InvalidOption, match=message):
            await kit.queue().add("a", **options)

    async def test_a_parent_needs_a_policy_and_no_deduplication(self, kit: Kit) -> None:
        queue = kit.queue()
        top = await queue.add("top")
        with pytest.raises(InvalidOption, match="on_failure: expected what a failure does"):
            await queue.add("a", parent=top)
        with pytest.raises(InvalidOption, match="deduplication: expected none"):
            await queue.add("a", parent=top, on_failure="wait", deduplication="d")
        with pytest.raises(InvalidOption, match="parent: expected an option of one job"):
            Queue("other", connection=kit.url, parent=top)  # type: ignore[call-arg]  # that is the test

    async def test_a_handler_adds_children_and_waits_for_them(self, kit: Kit) -> None:
        """It begins again when they are done, and does not add them twice."""
        queue = kit.queue()

        async def handle(job: Job) -> Any:
            if job.name == "kid":
                return job.data
            for number in range(3):
                await queue.add(
                    "kid", number, job_id=f"{job.id}-{number}", parent=job, on_failure="fail_parent", delay=5
                )
            if (await job.children_counts()).pending:
                raise WaitForChildren
            return sum((await job.children_values()).values())

        await queue.add("top", job_id="top")
        await kit.drain(handle, 4)

        job = await queue.get_job("top")
        assert job is not None
        assert (job.return_value, job.attempts_made) == (3, 1)
        assert job.attempts_started == 2

    @pytest.mark.parametrize("dies", ["after the first child", "before it waits"])
    async def test_children_of_a_handler_survive_its_crash(self, kit: Kit, dies: str) -> None:
        """The worker dies while its handler adds children: the next run adds what is missing and waits."""
        queue, gate, runs = kit.queue(), Gate(), list[str]()

        async def handle(job: Job) -> Any:
            if job.name == "kid":
                return job.data
            runs.append(job.id)
            for number in range(3):
                await queue.add("kid", number, job_id=f"kid-{number}", parent=job, on_failure="fail_parent")
                if len(runs) == 1 and dies == "after the first child":
                    await gate(job)
            if len(runs) == 1:
                await gate(job)
            if (await job.children_counts()).pending:
                raise WaitForChildren
            return sum((await job.children_values()).values())

        await queue.add("top", job_id="top")
        first = await kit.work(handle)
        await gate.reached(1)
        kit.redis.set(kit.base + "top:lock", "of nobody")  # it lost its lock, and all it says from now on is dropped
        gate.open()
        await first.worker.close(0)
        kit.redis.delete(kit.base + "top:lock")
        check_stalled(kit)
        check_stalled(kit)

        await kit.work(handle)
        job = await queue.get_job("top")
        assert job is not None
        assert await job.result(timeout=20_000) == 3
        assert len(await job.children_values()) == 3

    async def test_handlers_in_child_processes_read_their_children(self, kit: Kit) -> None:
        queue = kit.queue()
        tree = await queue.add_flow(
            Flow(
                "top",
                children=[leaf("a", 1, queue=f"{kit.name}-k"), leaf("bad", queue=f"{kit.name}-k", on_failure="ignore")],
            )
        )
        await kit.drain(work_all, 2, queue=f"{kit.name}-k")

        for handler in (_process_handlers.family, _process_handlers.family_async):
            await kit.drain(handler, 1, processes=True)
            job = await queue.get_job(tree.job.id)
            assert job is not None
            assert job.return_value == {
                "values": {f"bull:{kit.name}-k:a": 1},
                "ignored": {f"bull:{kit.name}-k:bad": "no"},
                "failed": {},
                "counts": [1, 0, 1, 0],
                "key": str(job.key),
            }
            await queue.retry(job.id, state=JobState.COMPLETED)
        await queue.remove(tree.job)


class TestFailures:
    @pytest.mark.parametrize("place", ["same", "other"])
    @pytest.mark.parametrize("kept", [True, False])
    @pytest.mark.parametrize("end", ["fail", "complete", "remove"])
    @pytest.mark.parametrize("policy", ["fail_parent", "continue_parent", "ignore", "remove", "wait"])
    async def test_no_parent_is_stuck_but_by_choice(
        self, kit: Kit, policy: str, end: str, kept: bool, place: str
    ) -> None:
        """Each policy for each end of a child, kept or removed when it finishes, in either queue."""
        queue, kids = kit.queue(), kit.name if place == "same" else f"{kit.name}-kids"
        child = leaf("bad" if end == "fail" else "good", job_id="x", queue=kids, on_failure=policy, attempts=1)
        child.options |= {} if kept else {"remove_on_fail": True, "remove_on_complete": True}
        tree = await queue.add_flow(Flow("top", children=[child]))

        if end == "remove":
            await kit.queue(kids).remove("x")
        told = await kit.work(work_all)
        if place == "other":
            await kit.work(work_all, queue=kids)

        if end == "fail" and policy == "wait" and kept:
            await kit.queue(kids).get_job("x")
            with pytest.raises(Exception, match="failed"):
                await (await kit.queue(kids).get_job("x")).result(timeout=20_000)  # type: ignore[union-attr]
            blocked = [one async for one in queue.blocked_parents()]
            assert [(one.job.id, one.failed) for one in blocked] == [(tree.job.id, (f"bull:{kids}:x",))]
        elif end == "fail" and policy == "fail_parent":
            await told.wait("failed", 2 if place == "same" else 1)
            assert await tree.job.state() is JobState.FAILED
        else:
            await told.wait("completed", 2 if place == "same" and end == "complete" else 1)
            assert await tree.job.state() is JobState.COMPLETED

    async def test_a_failed_child_that_is_retried_lets_its_parent_go_on(self, kit: Kit) -> None:
        queue = kit.queue()
        tree = await queue.add_flow(Flow("top", children=[leaf("bad", on_failure="wait", attempts=1)]))
        await kit.drain(work_all, 1)
        assert [one.failed for one in [one async for one in queue.blocked_parents()]] == [(f"{kit.base}bad",)]

        await queue.retry("bad")
        await kit.drain(echo, 2)

        assert await tree.job.state() is JobState.COMPLETED
        assert not [one async for one in queue.blocked_parents()]

    async def test_a_child_that_vanished_is_found(self, kit: Kit) -> None:
        queue = kit.queue()
        tree = await queue.add_flow(Flow("top", children=[leaf("x")]))
        kit.redis.delete(kit.base + "x", kit.base + "wait")

        blocked = [one async for one in queue.blocked_parents()]

        assert [(one.job.id, one.failed, one.missing) for one in blocked] == [(tree.job.id, (), (f"{kit.base}x",))]

    async def test_a_child_leaves_its_parent(self, kit: Kit) -> None:
        queue = kit.queue()
        tree = await queue.add_flow(Flow("top", children=[leaf("x", delay=600_000)]))
        child = tree.children[0].job

        assert await child.leave_parent() is True
        assert await child.leave_parent() is False

        assert await tree.job.state() is JobState.WAITING
        assert "parentKey" not in kit.fields("x")
        with pytest.raises(JobNotFound):
            await (await queue.add("gone", remove_on_complete=True)).actions.leave_parent("nobody")
        await queue.drain(delayed=True)


class TestReading:
    async def tree(self, kit: Kit) -> FlowNode:
        return await kit.queue().add_flow(
            Flow("top", children=[leaf(f"c{number}", number, children=[leaf(f"d{number}")]) for number in range(30)])
        )

    async def test_a_flow_is_read_as_it_is_now(self, kit: Kit) -> None:
        queue, tree = kit.queue(), await self.tree(kit)

        whole = await queue.get_flow(tree.job, max_children=100)
        part = await queue.get_flow(tree.job.id, depth=2, max_children=7)

        assert whole is not None and part is not None
        assert sorted(job.id for job in whole.jobs()) == sorted(job.id for job in tree.jobs())
        assert len(part.children) == 7
        assert not any(child.children for child in part.children)
        assert await queue.get_flow("nobody") is None

    async def test_children_come_in_pages(self, kit: Kit) -> None:
        queue = kit.queue()
        await queue.add_flow(Flow("top", job_id="top", children=[leaf(f"c{n}", {"n": n}) for n in range(700)]))
        await kit.drain(work_all, 701, concurrency=50)

        found, cursor, pages = dict[str, Any](), None, 0
        while pages == 0 or cursor:
            page = await queue.children_page("top", "processed", cursor=cursor, count=100)
            found |= page.children
            cursor, pages = page.cursor, pages + 1

        assert pages > 1
        assert found == {f"{kit.base}c{n}": {"n": n} for n in range(700)}
        assert (await queue.children_page("top", "pending")).children == {}
        with pytest.raises(JobNotFound):
            await queue.children_page("nobody", "failed")
        with pytest.raises(InvalidOption, match="kind: expected 'processed'"):
            await queue.children_page("top", "all")  # type: ignore[arg-type]  # that is the test

    async def test_a_flow_is_removed_with_its_children(self, kit: Kit) -> None:
        queue, tree = kit.queue(), await self.tree(kit)

        assert await queue.remove(tree.job) is True

        assert not any(kit.has(job.id) for job in tree.jobs())
        assert (await queue.counts()).pending == 0


async def test_a_flow_of_many_children_is_one_atomic_step(kit: Kit) -> None:
    """Its server time, counted in commands: as for plain adds, and two more per child, for its parent."""
    count = 10_000 if LONG else 1_000
    queue = kit.queue()
    await queue.add_flow(Flow("warm", children=[leaf("up")]))
    kit.reset_statistics()

    tree = await queue.add_flow(Flow("top", children=[leaf(f"c{number}", number) for number in range(count)]))

    stats: Any = kit.redis.info("commandstats")
    calls = sum(figures["calls"] for name, figures in stats.items() if name not in ("cmdstat_info", "cmdstat_evalsha"))
    assert calls <= 6 * count + 100
    assert (await tree.job.children_counts()).pending == count
    await kit.drain(work_all, count + 3, concurrency=200)
    assert await tree.job.state() is JobState.COMPLETED
