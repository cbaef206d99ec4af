"""Where jobs are and how many: one answer per job, of one instant."""

from __future__ import annotations

import pytest

from bullpen._kernel.backoff import Backoff
from bullpen.errors import PermanentError
from bullpen.queue import Job, JobCounts, JobState
from tests.queue._kit import Failing, Gate, Kit


class TestState:
    @pytest.mark.requirement("Q-22", "Q-24", "Q-25", "Q-26", "Q-65")
    async def test_each_structure_is_one_state(self, kit: Kit) -> None:
        """The names are the wire's; `wait` and the legacy `paused` list are both "waiting"."""
        queue = kit.queue()
        lists, sets = ("wait", "paused", "active"), ("waiting-children", "completed", "failed")
        for state in lists:
            kit.seed(f"in-{state}", to=state)
        for state, score in [("prioritized", 2.0**32), ("delayed", 2.0**52), *((state, 1.0) for state in sets)]:
            kit.seed(f"in-{state}", to=state, score=score)
        kit.redis.set(f"{kit.base}in-active:lock", "token", px=60_000)

        states = (*lists, "prioritized", "delayed", *sets, "nowhere")
        found = {state: await queue.state_of(f"in-{state}") for state in states}

        assert found == {
            "wait": JobState.WAITING,
            "paused": JobState.WAITING,
            "active": JobState.ACTIVE,
            "prioritized": JobState.PRIORITIZED,
            "delayed": JobState.DELAYED,
            "waiting-children": JobState.WAITING_CHILDREN,
            "completed": JobState.COMPLETED,
            "failed": JobState.FAILED,
            "nowhere": JobState.UNKNOWN,
        }

    async def test_a_job_knows_its_own_state(self, kit: Kit) -> None:
        """Over its life, read when asked."""
        queue = kit.queue()
        job = await queue.add("a", attempts=2, backoff=Backoff.fixed(60_000))
        gate = Gate()
        seen = [await job.state()]

        async def fail_later(job: Job) -> None:
            await gate(job)
            raise RuntimeError("boom")

        told = await kit.work(fail_later)
        await gate.reached()
        seen.append(await job.state())
        gate.open()
        await told.wait("retrying")
        seen.append(await job.state())

        assert seen == [JobState.WAITING, JobState.ACTIVE, JobState.DELAYED]

    async def test_a_job_is_read_with_all_its_fields(self, kit: Kit) -> None:
        """What `get_job` shows is what is stored; there is no job for an unknown id."""
        queue = kit.queue()
        added = await queue.add("a", {"n": 1}, attempts=1)
        await kit.drain(Failing(PermanentError("no")), 1, name="w1")

        job = await queue.get_job(added.id)

        assert job is not None
        assert (job.id, job.name, job.data, job.queue_name) == (added.id, "a", {"n": 1}, kit.name)
        assert (job.attempts_made, job.attempts_started, job.worker_id) == (1, 1, "w1")
        assert (job.failed_reason, len(job.stacktrace), job.return_value) == ("no", 1, None)
        assert job.timestamp <= job.processed_on <= job.finished_on
        assert repr(job) == f"Job(queue='{kit.name}', id='{job.id}', name='a')"
        assert await queue.get_job("nowhere") is None

    @pytest.mark.requirement("Q-68", "Q-13", "X-11")
    async def test_the_json_of_a_job_leaves_unset_fields_out(self, kit: Kit) -> None:
        """Names as on the wire, nothing that is not there yet, and never a token."""
        queue = kit.queue()
        job = await queue.add("a", {"n": 1})

        waiting = job.to_json()
        await kit.drain(Failing(value=5), 1, name="w1")
        done = await queue.get_job(job.id)

        assert done is not None
        assert set(waiting) == {"id", "name", "data", "opts", "progress", "delay", "timestamp", "attemptsMade"}
        assert set(done.to_json()) == {*waiting, "processedOn", "finishedOn", "workerId", "returnvalue"}
        assert done.to_json()["attemptsMade"] == 1


class TestCounts:
    async def test_counts_are_the_lengths_of_the_structures(self, kit: Kit) -> None:
        """`waiting` counts the legacy list too, `pending` what still has to run."""
        queue = kit.queue()
        gate = Gate()
        await queue.add_many([("a", None), ("b", None)])
        await queue.add("later", delay=60_000)
        await queue.add("ranked", priority=3)
        kit.seed("legacy", to="paused")
        kit.seed("parent", to="waiting-children", score=1)
        kit.seed("done", to="completed", score=1)
        for n in range(2):
            kit.seed(f"bad-{n}", to="failed", score=1)
        await kit.work(gate)
        await gate.reached()

        counts = await queue.counts()

        assert counts == JobCounts(
            waiting=2, active=1, prioritized=1, delayed=1, waiting_children=1, completed=1, failed=2
        )
        assert counts.pending == 5

    async def test_an_unknown_queue_has_nothing(self, kit: Kit) -> None:
        """Asking writes nothing: a health check must not create queues."""
        queue = kit.queue("never-used")

        assert await queue.counts() == JobCounts(0, 0, 0, 0, 0, 0, 0)
        assert not await queue.is_paused()
        assert await queue.get_job("1") is None
        assert kit.redis.dbsize() == 0
