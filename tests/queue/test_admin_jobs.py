"""What one may do to one job: change its delay or priority, promote, retry, remove."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from bullpen.errors import InvalidOption, JobNotFound, JobStateConflict, QueueClosed
from bullpen.queue import Job, JobState, Queue
from bullpen.testing import FaultProxy, RedisServer
from bullpen.wire.scripts import SCRIPTS
from tests.queue._kit import Failing, Gate, Kit, echo, ids_of, nothing, soon

FAR_MS = 3_600_000


def due_ms(kit: Kit, job_id: str) -> int:
    return int(kit.zset("delayed")[job_id]) // 4096


class TestChangeDelay:
    @pytest.mark.requirement("Q-33", "Q-42")
    async def test_the_new_delay_counts_from_now(self, kit: Kit) -> None:
        queue = kit.queue()
        job = await queue.add("job", delay=FAR_MS)

        before = kit.server_ms()
        await queue.change_delay(job, timedelta(minutes=5))
        after = kit.server_ms()

        assert before + 300_000 <= due_ms(kit, job.id) <= after + 300_000
        assert kit.fields(job.id)["delay"] == "300000"
        assert kit.marker() == {"1": due_ms(kit, job.id)}
        assert kit.events()[-1] == {"event": "delayed", "jobId": job.id, "delay": str(due_ms(kit, job.id))}

    @pytest.mark.requirement("Q-33")
    async def test_an_idle_worker_starts_the_job_at_its_new_time(self, kit: Kit) -> None:
        queue = kit.queue()
        job = await queue.add("job", delay=FAR_MS)
        told = await kit.work(nothing)
        await kit.until(lambda: not kit.marker(), "the worker knows the old time")

        await queue.change_delay(job.id, 50)

        await told.wait("completed", within_s=3)

    async def test_only_a_delayed_job_can_be_changed(self, kit: Kit) -> None:
        queue = kit.queue()
        job = await queue.add("job")

        with pytest.raises(JobStateConflict, match=rf"job '1' of queue '{kit.name}' is not delayed"):
            await queue.change_delay(job, 5)
        with pytest.raises(JobNotFound):
            await queue.change_delay("nobody", 5)
        with pytest.raises(InvalidOption, match="delay: expected"):
            await queue.change_delay(job, -1)
        with pytest.raises(InvalidOption, match="job: expected a Job or the id of one, got 7"):
            await queue.change_delay(7, 5)  # type: ignore[arg-type]  # the mistake under test


class TestChangePriority:
    @pytest.mark.requirement("Q-40", "Q-41", "X-9")
    async def test_jobs_run_in_their_new_order(self, kit: Kit) -> None:
        queue = kit.queue()
        ranks: list[dict[str, Any]] = [{}, {"priority": 5}, {"priority": 5}, {"urgency": 1}]
        for options in ranks:
            await queue.add("job", **options)

        await queue.change_priority("1", 6)
        await queue.change_priority("3", 5, lifo=True)
        await queue.change_priority("4", urgency=2_097_151)
        told = await kit.drain(nothing, 4)

        assert told.ids("completed") == ["4", "3", "2", "1"]

    @pytest.mark.requirement("Q-40")
    async def test_a_worker_that_sleeps_is_woken(self, kit: Kit) -> None:
        """Other clients set no marker here, and the job waits for seconds beside idle workers."""
        queue = kit.queue()
        job = await queue.add("job", priority=5)
        kit.redis.delete(f"{kit.base}marker")

        await queue.change_priority(job, 2, lifo=True)

        assert kit.marker() == {"0": 0}

    @pytest.mark.requirement("Q-39")
    async def test_nobody_is_woken_while_the_queue_is_paused(self, kit: Kit) -> None:
        queue = kit.queue()
        job = await queue.add("job", priority=5)
        await queue.pause()

        await queue.change_priority(job, 2)

        assert kit.marker() == {}

    async def test_a_job_in_the_list_of_an_old_paused_queue_is_moved_as_well(self, kit: Kit) -> None:
        kit.seed("old", to="paused")

        await kit.queue().change_priority("old", 4)

        assert list(kit.zset("prioritized")) == ["old"] and not kit.has("paused")

    async def test_exactly_one_measure_is_given_and_it_is_in_range(self, kit: Kit) -> None:
        queue = kit.queue()
        await queue.add("job")

        for priority, urgency in ((None, None), (1, 1)):
            with pytest.raises(InvalidOption, match="priority: expected either priority or urgency"):
                await queue.change_priority("1", priority, urgency=urgency)
        with pytest.raises(InvalidOption, match="priority: expected"):
            await queue.change_priority("1", 2_097_152)
        with pytest.raises(JobNotFound):
            await queue.change_priority("nobody", 1)


class TestPromote:
    @pytest.mark.requirement("Q-33", "Q-41")
    async def test_a_promoted_job_runs_now_in_its_class(self, kit: Kit) -> None:
        queue = kit.queue()
        plain, urgent = await queue.add("job", delay=FAR_MS), await queue.add("job", delay=FAR_MS, priority=3)
        told = await kit.work(echo)

        await queue.promote(urgent)
        await queue.promote(plain.id)

        await told.finished(2)
        assert kit.fields(plain.id)["delay"] == "0"
        assert {"event": "waiting", "jobId": urgent.id, "prev": "delayed"} in kit.events(job_id=urgent.id)

    async def test_only_a_delayed_job_can_be_promoted(self, kit: Kit) -> None:
        queue = kit.queue()
        await queue.add("job")

        with pytest.raises(JobStateConflict, match="is not delayed"):
            await queue.promote("1")
        with pytest.raises(JobNotFound):
            await queue.promote("nobody")

    @pytest.mark.requirement("Q-65")
    async def test_an_id_without_a_job_is_dropped(self, kit: Kit) -> None:
        kit.redis.zadd(f"{kit.base}delayed", {"ghost": 1})

        with pytest.raises(JobNotFound):
            await kit.queue().promote("ghost")

        assert not kit.has("delayed")


class TestRetry:
    @pytest.mark.requirement("Q-26", "X-108")
    async def test_a_failed_job_runs_again_under_the_same_identity(self, kit: Kit) -> None:
        queue = kit.queue(attempts=1)
        job = await queue.add("job", {"n": 1})
        await kit.drain(Failing(RuntimeError("boom")), 1)

        await queue.retry(job)
        waiting = kit.fields(job.id)
        runs: list[tuple[str, int, int]] = []

        async def remember(again: Job) -> None:
            runs.append((again.idempotency_key, again.fence, again.attempts_made))

        await kit.drain(remember, 1)

        assert not {"finishedOn", "processedOn", "failedReason"} & waiting.keys()
        assert runs == [(job.idempotency_key, 2, 1)]

    @pytest.mark.requirement("Q-25")
    async def test_attempts_start_again_only_when_asked(self, kit: Kit) -> None:
        queue = kit.queue(attempts=2, backoff=1)
        await queue.add("job")
        await kit.drain(Failing(RuntimeError("1"), RuntimeError("2")), 1)

        await queue.retry("1")
        kept = kit.fields("1")["atm"]
        await kit.drain(Failing(RuntimeError("3")), 1)
        await queue.retry("1", reset_attempts=True)
        told = await kit.drain(Failing(RuntimeError("4"), value="fine"), 1)

        assert kept == "2"
        assert told.ids("completed") == ["1"]
        assert kit.fields("1")["ats"] == "5"

    @pytest.mark.requirement("Q-24")
    async def test_a_completed_job_is_run_again_when_asked(self, kit: Kit) -> None:
        queue = kit.queue()
        job = await queue.add("job")
        await kit.drain(nothing, 1)

        with pytest.raises(JobStateConflict, match="is not failed"):
            await queue.retry(job)
        await queue.retry(job, state=JobState.COMPLETED)

        assert "returnvalue" not in kit.fields(job.id)
        assert kit.events()[-1] == {"event": "waiting", "jobId": job.id, "prev": "completed"}

    @pytest.mark.requirement("W-84")
    async def test_the_parent_waits_again_for_a_child_it_had_counted(self, kit: Kit) -> None:
        kit.seed("P", to="waiting-children", score=1)
        for number, part in enumerate(("processed", "failed", "unsuccessful")):
            child = f"C{number}"
            kit.seed(child, to="failed", score=1, parentKey=f"{kit.base}P")
            if part == "unsuccessful":
                kit.redis.zadd(f"{kit.base}P:{part}", {f"{kit.base}{child}": 1})
            else:
                kit.redis.hset(f"{kit.base}P:{part}", f"{kit.base}{child}", "1")

            await kit.queue().retry(child)

        pending: Any = kit.redis.smembers(f"{kit.base}P:dependencies")
        assert sorted(pending) == [f"{kit.base}C{number}".encode() for number in range(3)]
        assert not any(kit.has(f"P:{part}") for part in ("processed", "failed", "unsuccessful"))

    @pytest.mark.requirement("X-5", "X-40")
    async def test_its_dead_letter_goes_with_it(self, kit: Kit) -> None:
        """It would otherwise ask again for a job that may be done by then."""
        queue = kit.queue(attempts=1)
        await queue.add("job")
        await kit.drain(Failing(RuntimeError("boom")), 1, dead_letters=True)

        await queue.retry("1")

        assert await queue.dead_letters.depth() == 0
        assert "bpdl" not in kit.fields("1")
        assert kit.events(queue=f"{kit.name}-dlq")[-1]["event"] == "removed"

    async def test_only_finished_states_can_be_named(self, kit: Kit) -> None:
        with pytest.raises(InvalidOption, match=r"state: expected JobState\.FAILED or JobState\.COMPLETED"):
            await kit.queue().retry("1", state=JobState.DELAYED)
        with pytest.raises(JobNotFound):
            await kit.queue().retry("nobody")


class TestRemove:
    @pytest.mark.requirement("Q-64", "Q-65")
    @pytest.mark.parametrize("options", [{}, {"priority": 2}, {"delay": FAR_MS}], ids=str)
    async def test_everything_of_the_job_goes(self, kit: Kit, options: dict[str, Any]) -> None:
        queue = kit.queue()
        job = await queue.add("job", **options)
        await job.log("a line")

        assert await queue.remove(job) is True
        assert await queue.remove(job.id) is False

        assert not list(kit.redis.scan_iter(f"{kit.base}{job.id}*"))
        assert (await queue.counts()).pending == 0
        assert kit.events()[-1]["event"] == "removed"

    @pytest.mark.requirement("Q-36")
    async def test_a_running_job_is_not_removed(self, kit: Kit) -> None:
        queue, gate = kit.queue(), Gate()
        await queue.add("job")
        told = await kit.work(gate)
        await gate.reached()

        with pytest.raises(JobStateConflict, match=r"job '1' .* is running, or one of the jobs it waits for is"):
            await queue.remove("1")

        gate.open()
        await told.wait("completed")
        assert await queue.remove("1") is True

    async def test_the_next_job_of_a_scheduler_is_not_removed(self, kit: Kit) -> None:
        self.schedule(kit)

        with pytest.raises(JobStateConflict, match="is the next job of a job scheduler"):
            await kit.queue().remove("repeat:s:1000")

        assert await kit.queue().remove("repeat:s:500") is True

    @staticmethod
    def schedule(kit: Kit) -> None:
        kit.redis.zadd(f"{kit.base}repeat", {"s": 1000})
        kit.redis.hset(f"{kit.base}repeat:s", mapping={"name": "beat", "ic": 1, "every": 500})
        kit.seed("repeat:s:1000", rjk="s")
        kit.seed("repeat:s:500", rjk="s", to="completed", score=1)

    @pytest.mark.requirement("W-84")
    async def test_a_flow_goes_as_a_whole_or_not_at_all(self, kit: Kit) -> None:
        tree = Tree(kit)
        tree.add("P", "waiting-children", children=("A", "B", "C"))
        tree.add("A", "waiting-children", children=("A1", "A2"))
        for leaf in ("A1", "A2", "B"):
            tree.add(leaf, "wait")
        tree.add("C", "completed", counted="processed")
        kit.redis.set(f"{kit.base}A2:lock", "somebody", px=60_000)
        queue = kit.queue()

        with pytest.raises(JobStateConflict):
            await queue.remove("P")
        untouched = len(await queue.jobs(count=100))
        kit.redis.delete(f"{kit.base}A2:lock")
        assert await queue.remove("P") is True

        assert untouched == 6
        assert await queue.jobs(count=100) == []
        assert {event["jobId"] for event in kit.events() if event["event"] == "removed"} == set(tree.parents)

    @pytest.mark.requirement("W-84")
    async def test_without_children_they_stay(self, kit: Kit) -> None:
        tree = Tree(kit)
        tree.add("P", "waiting-children", children=("A",))
        tree.add("A", "wait")

        await kit.queue().remove("P", children=False)

        assert ids_of(await kit.queue().jobs()) == ["A"]

    @pytest.mark.requirement("W-84")
    async def test_the_last_pending_child_that_is_removed_releases_its_parent(self, kit: Kit) -> None:
        """With its priority: other clients put it before everything else."""
        tree = Tree(kit)
        tree.add("P", "waiting-children", children=("A",), priority=4)
        tree.add("A", "failed")

        await kit.queue().remove("A")

        assert list(kit.zset("prioritized")) == ["P"]
        assert kit.events()[-2] == {"event": "waiting", "jobId": "P", "prev": "waiting-children"}

    @pytest.mark.many
    @pytest.mark.requirement("W-84", "Q-65")
    async def test_a_large_flow_is_removed_from_the_top_in_steps(self, kit: Kit) -> None:
        tree = Tree(kit)
        leaves = [f"L{number}" for number in range(1_200)]
        tree.add("P", "waiting-children", children=("A", "B"))
        tree.add("A", "waiting-children", children=leaves)
        tree.add("B", "completed", counted="processed")
        for leaf in leaves:
            tree.add(leaf, "prioritized")

        assert await kit.queue().remove("P") is True

        assert (await kit.queue().counts()).pending == 0
        assert [event["event"] for event in kit.events() if event.get("prev") == "waiting-children"] == ["removed"] * 2

    @pytest.mark.many
    @pytest.mark.requirement("W-84")
    async def test_a_large_flow_of_which_a_job_runs_says_how_far_it_came(self, kit: Kit) -> None:
        tree = Tree(kit)
        leaves = [f"L{number}" for number in range(1_200)]
        tree.add("P", "waiting-children", children=leaves)
        for leaf in leaves[1:]:
            tree.add(leaf, "prioritized")
        tree.add(leaves[0], "active")
        kit.redis.set(f"{kit.base}L0:lock", "somebody", px=60_000)

        with pytest.raises(JobStateConflict, match=r"'P' .* was removed, but not its child 'bull:.*:L0'"):
            await kit.queue().remove("P")

        assert await kit.queue().state_of("P") is JobState.UNKNOWN

    async def test_an_id_without_a_job_is_taken_out_of_its_list(self, kit: Kit) -> None:
        kit.redis.lpush(f"{kit.base}wait", "ghost")

        assert await kit.queue().remove("ghost") is False

        assert not kit.has("wait")


class TestRemoveUnprocessedChildren:
    @pytest.mark.requirement("W-84")
    async def test_what_runs_failed_or_is_done_stays_and_the_rest_goes_with_all_below_it(self, kit: Kit) -> None:
        tree = Tree(kit)
        tree.add("P", "waiting-children", children=("runs", "bad", "waits", "busy", "done"))
        tree.add("runs", "active")
        tree.add("bad", "failed")
        tree.add("waits", "waiting-children", children=("below",))
        tree.add("below", "delayed")
        tree.add("busy", "waiting-children", children=("runs-too",))
        tree.add("runs-too", "active")
        tree.add("done", "completed", counted="processed")
        for job_id in ("runs", "runs-too"):
            kit.redis.set(f"{kit.base}{job_id}:lock", "somebody", px=60_000)
        queue = kit.queue()

        assert await queue.remove_unprocessed_children("P") == 1

        left = {job.id for job in await queue.jobs(count=100)}
        assert left == {"P", "runs", "bad", "busy", "runs-too", "done"}
        assert (await queue.children_counts("P")).pending == 3
        assert await queue.remove_unprocessed_children("P") == 0

    @pytest.mark.requirement("W-84")
    async def test_the_parent_is_released_when_it_waited_for_nothing_else(self, kit: Kit) -> None:
        tree = Tree(kit)
        tree.add("P", "waiting-children", children=("A", "B"))
        tree.add("A", "wait")
        tree.add("B", "delayed")

        assert await kit.queue().remove_unprocessed_children("P") == 2

        assert kit.ids("wait") == ["P"]

    @pytest.mark.many
    @pytest.mark.requirement("W-84")
    async def test_a_large_family_goes_in_steps(self, kit: Kit) -> None:
        tree = Tree(kit)
        leaves = [f"L{number}" for number in range(1_200)]
        tree.add("P", "waiting-children", children=("A",))
        tree.add("A", "waiting-children", children=leaves)
        for leaf in leaves:
            tree.add(leaf, "prioritized")

        assert await kit.queue().remove_unprocessed_children("P") == 1

        assert ids_of(await kit.queue().jobs(count=10)) == ["P"]

    @pytest.mark.requirement("W-84")
    async def test_a_handler_can_end_with_children_pending(self, kit: Kit) -> None:
        """After a child failed with continueParentOnFailure the parent runs, and may not complete while others pend."""
        tree = Tree(kit)
        tree.add("P", "wait", children=("A",))
        tree.add("A", "delayed")

        async def handle(job: Job) -> int:
            return await job.remove_unprocessed_children()

        told = await kit.drain(handle, 1)

        assert told.ids("completed") == ["P"]
        assert (await kit.queue().counts()).delayed == 0


class TestIdsWithColons:
    """An id may have three parts, as those of schedulers have: the last colon does not tell where it begins."""

    IDS = ("repeat:daily:1", "shop:order:2", "c3")

    def family(self, kit: Kit, parent: str, *, size: int = 0) -> None:
        kit.redis.hset(f"{kit.base}meta", "opts.maxLenEvents", 10_000)  # as every producer writes it
        leaves = [f"x:y:{number}" for number in range(size)]
        tree = Tree(kit)
        tree.add(parent, "waiting-children", children=(*self.IDS, *leaves))
        for child in (*self.IDS, *leaves):
            tree.add(child, "wait" if child != "c3" else "delayed")

    async def test_pending_children_are_removed_and_the_parent_runs(self, kit: Kit) -> None:
        self.family(kit, "bill:2030:1")

        assert await kit.queue().remove_unprocessed_children("bill:2030:1") == 3

        assert kit.ids("wait") == ["bill:2030:1"]
        assert not kit.redis.exists(f"{kit.base}delayed", f"{kit.base}waiting-children")
        assert not kit.redis.keys(f"{kit.base}*repeat:daily*")

    @pytest.mark.parametrize("size", [0, 1_200])
    async def test_a_job_is_removed_with_all_below_it(self, kit: Kit, size: int) -> None:
        self.family(kit, "P", size=size)

        assert await kit.queue().remove("P")

        assert not kit.redis.exists(*(kit.base + state for state in ("wait", "delayed", "waiting-children")))
        assert [key for key in kit.redis.keys("*") if b":shop:order" in key or b":x:y" in key] == []

    async def test_a_parent_runs_when_its_children_are_done(self, kit: Kit) -> None:
        self.family(kit, "bill:2030:1")
        kit.redis.zrem(f"{kit.base}delayed", "c3")
        kit.redis.rpush(f"{kit.base}wait", "c3")

        async def handle(job: Job) -> str:
            return job.id

        await kit.drain(handle, 4)

        assert {job.id for job in await kit.queue().jobs(JobState.COMPLETED)} == {*self.IDS, "bill:2030:1"}

    async def test_a_prefix_with_colons_is_no_id(self, kit: Kit) -> None:
        queue = kit.queue(prefix="bull:eu:shop")
        parent = await queue.add("parent", delay=3_600_000)
        child = await queue.add("child")
        base = f"bull:eu:shop:{queue.name}:"
        kit.redis.sadd(f"{base}{parent.id}:dependencies", f"{base}{child.id}")
        kit.redis.hset(f"{base}{child.id}", "parentKey", f"{base}{parent.id}")

        assert await queue.remove_unprocessed_children(parent.id) == 1

        assert (await queue.counts()).waiting == 0


class Tree:
    """A flow as it is stored, built by hand."""

    def __init__(self, kit: Kit) -> None:
        self._kit = kit
        self.parents: dict[str, str | None] = {}

    def add(self, job_id: str, state: str, *, children: Any = (), counted: str = "dependencies", **fields: Any) -> None:
        """Parents first. `counted`: the part of the parent that lists the job."""
        kit, parent = self._kit, self.parents.setdefault(job_id, None)
        if parent is not None:
            fields["parentKey"] = kit.base + parent
            if counted != "dependencies":
                kit.redis.srem(f"{kit.base}{parent}:dependencies", kit.base + job_id)
                kit.redis.hset(f"{kit.base}{parent}:{counted}", kit.base + job_id, "1")
        kit.seed(job_id, to=state, score=None if state in ("wait", "active") else 1, **fields)
        if children:
            kit.redis.sadd(f"{kit.base}{job_id}:dependencies", *(kit.base + child for child in children))
            self.parents.update(dict.fromkeys(children, job_id))


@pytest.mark.requirement("Q-65", "X-28")
@pytest.mark.parametrize(
    ("prepare", "operation", "script"),
    [
        ({"delay": FAR_MS}, lambda queue: queue.promote("1"), "promote"),
        ({"delay": FAR_MS}, lambda queue: queue.change_delay("1", 5_000), "change_delay"),
        ({}, lambda queue: queue.change_priority("1", 5), "change_priority"),
        ({}, lambda queue: queue.remove("1"), "remove"),
        ("failed", lambda queue: queue.retry("1"), "retry"),
    ],
)
async def test_an_operation_whose_reply_was_lost_is_done_once_and_reported_as_done(
    kit: Kit,
    redis_server: RedisServer,
    prepare: Any,
    operation: Callable[[Queue], Awaitable[Any]],
    script: str,
) -> None:
    """The repeated call finds the job where the first one put it; that is success, not a conflict."""
    plain = kit.queue(attempts=1)
    await plain.add("job", **(prepare if isinstance(prepare, dict) else {}))
    if prepare == "failed":
        await kit.drain(Failing(RuntimeError("boom")), 1)
    kit.command("SCRIPT", "LOAD", SCRIPTS[script].body)
    with FaultProxy(redis_server) as proxy:
        queue = kit.queue(connection=proxy.url)
        lost = proxy.lose_reply(SCRIPTS[script].sha1)

        answer = await soon(operation(queue))

        assert lost.count == 1
        assert answer in (None, True)
        await queue.close()


async def test_a_closed_queue_refuses(kit: Kit) -> None:
    queue = kit.queue()
    await queue.close()

    for operation in (queue.promote_all(), queue.drain(), queue.jobs(), queue.rate_limit_ttl()):
        with pytest.raises(QueueClosed):
            await operation
