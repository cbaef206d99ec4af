"""Pausing a queue for everybody, and a worker for itself."""

from __future__ import annotations

import pytest

from bullpen.queue import JobState
from tests.queue._kit import Gate, Kit, engine_of, ids_of, nothing


class TestQueue:
    @pytest.mark.requirement("Q-39")
    async def test_a_paused_queue_gives_no_jobs_and_keeps_running_ones(self, kit: Kit) -> None:
        """The flag in meta is what every client looks at; jobs stay in `wait`."""
        queue = kit.queue()
        gate = Gate("done")
        running = await queue.add("running")
        told = await kit.work(gate, concurrency=2)
        await gate.reached()

        await queue.pause()
        later = await queue.add("later")
        gate.open()
        await told.finished()

        assert await queue.is_paused()
        assert kit.redis.hget(kit.base + "meta", "paused") == b"1"
        assert told.ids("completed") == [running.id]
        assert kit.ids("wait") == [later.id]
        assert await queue.state_of(later.id) is JobState.WAITING
        assert kit.marker() == {}
        assert {"event": "paused"} in kit.events()

    @pytest.mark.requirement("Q-39")
    async def test_resume_wakes_an_idle_worker(self, kit: Kit) -> None:
        """At once, by the marker, not at the end of its sleep."""
        queue = kit.queue()
        await queue.pause()
        told = await kit.work(nothing, drain_delay=60_000)
        job = await queue.add("a")

        await queue.resume()
        await told.finished()

        assert told.ids("completed") == [job.id]
        assert not await queue.is_paused()
        assert {"event": "resumed"} in kit.events()

    async def test_resume_wakes_for_prioritised_jobs_too(self, kit: Kit) -> None:
        """Ready work is ready work, whichever structure holds it."""
        queue = kit.queue()
        await queue.pause()
        told = await kit.work(nothing, drain_delay=60_000)
        await queue.add("a", priority=5)

        await queue.resume()

        await told.finished()

    async def test_resume_of_an_empty_queue_tells_the_next_due_time(self, kit: Kit) -> None:
        """A worker that sleeps must know when the next delayed job is due."""
        queue = kit.queue()
        await queue.pause()
        job = await queue.add("later", delay=60_000)
        kit.redis.delete(kit.base + "marker")

        await queue.resume()

        assert kit.marker() == {"1": kit.zset("delayed")[job.id] / 4096}

    async def test_due_jobs_are_promoted_while_paused(self, kit: Kit) -> None:
        """Order must not depend on who was awake; nothing is run, though."""
        queue = kit.queue(clock_offset_ms=-60_000)
        await queue.pause()
        due = await queue.add("due", delay=1)
        told = await kit.work(nothing)

        await kit.until(lambda: kit.ids("wait") == [due.id], "the due job is promoted")

        assert kit.zset("delayed") == {}
        assert told.all == []
        assert kit.marker().get("0") is None

    async def test_a_delayed_job_that_comes_due_while_paused_runs_after_resume(self, kit: Kit) -> None:
        """The worker's own timer promotes it; the marker of resume starts it."""
        queue = kit.queue()
        await queue.pause()
        told = await kit.work(nothing, drain_delay=60_000)
        job = await queue.add("soon", delay=30)
        await kit.until(lambda: kit.ids("wait") == [job.id], "the due job is promoted")

        await queue.resume()
        await told.finished()

        assert told.ids("completed") == [job.id]

    async def test_pausing_twice_and_resuming_what_runs_is_harmless(self, kit: Kit) -> None:
        """Operators press buttons twice."""
        queue = kit.queue()
        await queue.resume()
        await queue.pause()
        await queue.pause()
        await queue.resume()
        await queue.resume()
        job = await queue.add("a")

        told = await kit.drain(nothing, 1)

        assert told.ids("completed") == [job.id]

    async def test_the_list_of_older_clients_is_merged_on_resume(self, kit: Kit) -> None:
        """Clients before version 6 moved the jobs of a paused queue aside; they were there first."""
        queue = kit.queue()
        await queue.pause()
        for n in range(3):
            kit.seed(f"old-{n}", to="paused")
        new = await queue.add("new")

        await queue.resume()
        told = await kit.drain(nothing, 4)

        assert told.ids("active") == ["old-0", "old-1", "old-2", new.id]
        assert not kit.has("paused")

    @pytest.mark.many
    async def test_a_long_legacy_list_keeps_its_order(self, kit: Kit) -> None:
        """More than one call is needed; the order over the seams must hold, and nobody may start in between."""
        pipeline = kit.redis.pipeline(transaction=False)
        for n in range(7_200):
            pipeline.hset(f"{kit.base}old-{n}", mapping={"name": "old", "data": "{}", "opts": "{}", "priority": 0})
        pipeline.lpush(kit.base + "paused", *(f"old-{n}" for n in range(7_200)))
        pipeline.execute()
        queue = kit.queue()
        await queue.pause()

        await queue.resume()

        assert kit.ids("wait") == [f"old-{n}" for n in range(7_200)]
        assert [event["event"] for event in kit.events()] == ["paused", "resumed"]
        assert kit.marker() == {"0": 0}


class TestWorker:
    async def test_a_paused_worker_takes_nothing_and_others_go_on(self, kit: Kit) -> None:
        """A local matter: the queue's own flag is not touched."""
        queue = kit.queue()
        told = await kit.work(nothing)
        await kit.until(lambda: engine_of(told).driver.last_exchange, "the worker is idle")
        told.worker.pause()
        other = await kit.work(nothing)

        jobs = await queue.add_many(("n", n) for n in range(10))
        await other.finished(10)

        assert told.of("active") == []
        assert other.ids("completed") == ids_of(jobs)
        assert not await queue.is_paused()

    async def test_a_paused_worker_passes_the_wake_up_on(self, kit: Kit) -> None:
        """It may hold the blocked read when a job is added; the marker it took must reach a worker that can run it."""
        queue = kit.queue()
        told = await kit.work(nothing, drain_delay=60_000)
        await queue.add("first")
        await told.finished()
        told.worker.pause()
        other = await kit.work(nothing, drain_delay=60_000)

        for n in range(1, 11):
            await queue.add("next")
            await other.finished(n)

        assert len(told.of("active")) == 1

    async def test_resume_takes_up_what_came_meanwhile(self, kit: Kit) -> None:
        """At once, with no marker needed."""
        told = await kit.work(nothing, drain_delay=60_000)
        await kit.until(lambda: engine_of(told).driver.last_exchange, "the worker is idle")
        told.worker.pause()
        job = await kit.queue().add("a")
        await kit.until(lambda: kit.ids("wait") == [job.id], "the job waits")

        told.worker.resume()
        await told.finished()

        assert told.ids("completed") == [job.id]

    async def test_running_jobs_go_on_and_are_settled(self, kit: Kit) -> None:
        """Pausing must not hold back a result."""
        gate = Gate("done")
        await kit.queue().add("a")
        told = await kit.work(gate)
        await gate.reached()

        told.worker.pause()
        gate.open()
        await told.finished()

        assert told.of("completed")[0][1] == "done"

    async def test_pause_before_the_start_holds(self, kit: Kit) -> None:
        """A worker may be brought up idle and released later."""
        job = await kit.queue().add("a")
        worker = kit.worker(nothing)
        worker.pause()
        done = []
        worker.on("completed", lambda job, _: done.append(job.id))
        await worker.start()
        assert kit.ids("wait") == [job.id]

        worker.resume()
        await kit.until(lambda: done, "it runs")

        assert done == [job.id]
