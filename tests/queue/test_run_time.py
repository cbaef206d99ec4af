"""What can be changed and heard of while a worker runs."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from bullpen.errors import InvalidOption
from bullpen.queue import Job
from bullpen.worker.handlers import InProcesses
from tests.queue import _process_handlers as handlers
from tests.queue._kit import Failing, Gate, Kit, Told, echo, nothing, soon


class TestConcurrency:
    async def test_more_jobs_run_at_once_when_it_is_raised(self, kit: Kit) -> None:
        """Also beyond the number from which two exchanges are in flight."""
        gate = Gate()
        await kit.queue().add_many([("a", None)] * 60)
        told = await kit.work(gate, concurrency=2)
        await gate.reached(2)

        told.worker.concurrency = 50
        await gate.reached(50)

        assert (told.worker.concurrency, told.worker.running) == (50, 50)
        gate.open()
        await told.finished(60)

    async def test_fewer_run_when_it_is_lowered_and_none_is_stopped(self, kit: Kit) -> None:
        """What runs goes on; the next is taken when the running ones are fewer."""
        gate = Gate()
        await kit.queue().add_many([("a", None)] * 12)
        told = await kit.work(gate, concurrency=4)
        await gate.reached(4)

        told.worker.concurrency = 1
        gate.open()
        await told.finished(12)

        assert [name for name, _ in told.all[:8]] == ["active"] * 4 + ["completed"] * 4
        assert [name for name, _ in told.all[8:]] == ["active", "completed"] * 8

    async def test_plain_functions_get_threads_as_they_are_needed(self, kit: Kit) -> None:
        """The pool is not made for the number that the worker began with."""
        barrier = threading.Barrier(3, timeout=60)
        await kit.queue().add_many([("a", None)] * 3)

        def handle(job: Job) -> None:
            barrier.wait()

        told = await kit.work(handle, concurrency=1)
        told.worker.concurrency = 3

        await told.finished(3)
        assert len(told.of("completed")) == 3

    @pytest.mark.measures_children
    async def test_children_that_are_too_many_end(self, kit: Kit) -> None:
        """Each holds the memory of a process."""
        queue = kit.queue()
        told = await kit.work(handlers.where, processes=True, concurrency=2)
        await queue.add_many([("a", None)] * 2)
        await told.finished(2)

        told.worker.concurrency = 1
        await queue.add_many([("a", None)] * 4)
        await told.finished(6)

        runner = told.worker._runner
        assert isinstance(runner, InProcesses)
        pool = runner.pool
        assert len(pool._idle) + len(pool._busy) == 1

    @pytest.mark.parametrize("value", [0, -1, True, "5", 1.5])
    async def test_nonsense_is_refused(self, kit: Kit, value: Any) -> None:
        worker = kit.worker(nothing, concurrency=3)

        with pytest.raises(InvalidOption, match="concurrency"):
            worker.concurrency = value

        assert worker.concurrency == 3


class TestCallbacks:
    async def test_one_that_was_taken_off_is_called_no_more(self, kit: Kit) -> None:
        heard: list[str] = []
        told = await kit.work(echo)
        callback = told.worker.on("completed", lambda job, value: heard.append(job.id))
        first = await kit.queue().add("a")
        await told.finished(1)

        assert told.worker.off("completed", callback)
        assert not told.worker.off("completed", callback)
        await kit.queue().add("b")
        await told.finished(2)

        assert heard == [first.id]

    async def test_once_is_once(self, kit: Kit) -> None:
        heard: list[str] = []
        told = await kit.work(echo)
        told.worker.once("completed", lambda job, value: heard.append(job.id))
        never = told.worker.once("completed", lambda job, value: heard.append("never"))
        told.worker.off("completed", never)

        jobs = await kit.queue().add_many([("a", None)] * 3)
        await told.finished(3)

        assert heard == [jobs[0].id]

    async def test_an_unknown_event_is_refused_with_those_that_are(self, kit: Kit) -> None:
        worker = kit.worker(nothing)
        for method in (worker.on, worker.once, worker.off):
            with pytest.raises(InvalidOption, match="drained"):
                method("finished", print)  # type: ignore[arg-type]  # the point of the test


class TestEvents:
    async def test_a_life_is_told_from_ready_to_closed(self, kit: Kit) -> None:
        """The names of Node's worker events, in the order of its life."""
        worker = kit.worker(echo)
        heard: list[str] = []
        for event in ("ready", "paused", "resumed", "drained", "closing", "closed"):
            worker.on(event, lambda event=event: heard.append(event))
        told = Told(worker)
        await worker.start()
        await kit.queue().add("a")
        await told.finished(1)
        await kit.until(lambda: "drained" in heard, "drained")

        assert not worker.is_paused
        worker.pause()
        worker.pause()
        assert worker.is_paused
        worker.resume()
        worker.resume()
        assert not worker.is_paused
        await worker.close()

        assert heard == ["ready", "drained", "paused", "resumed", "closing", "closed"]

    async def test_drained_comes_after_the_last_job_and_once(self, kit: Kit) -> None:
        """Not while jobs run or wait, and not again before there was another job."""
        queue = kit.queue()
        await queue.add_many([("a", None)] * 30)
        told = await kit.work(echo, concurrency=5)
        drained: list[int] = []
        told.worker.on("drained", lambda: drained.append(len(told.of("completed"))))

        await told.finished(30)
        await kit.until(lambda: drained, "drained")
        await queue.add("b")
        await told.finished(31)
        await kit.until(lambda: len(drained) == 2, "drained again")

        assert drained == [30, 31]

    async def test_progress_is_told_with_its_value(self, kit: Kit) -> None:
        heard: list[tuple[str, Any]] = []

        async def handle(job: Job) -> None:
            await job.progress(10)
            await job.progress({"half": True})

        job = await kit.queue().add("a")
        worker = kit.worker(handle)
        worker.on("progress", lambda job, value: heard.append((job.id, value)))
        told = Told(worker)
        await worker.start()
        await told.finished(1)

        assert heard == [(job.id, 10), (job.id, {"half": True})]

    @pytest.mark.measures_children
    async def test_progress_of_a_child_is_told_too(self, kit: Kit) -> None:
        heard: list[Any] = []
        await kit.queue().add("a")
        worker = kit.worker(handlers.reporting, processes=True)
        worker.on("progress", lambda job, value: heard.append(value))
        told = Told(worker)
        await worker.start()
        await told.finished(1)

        assert heard == [{"message": "half way"}]

    async def test_renewed_locks_are_told_with_their_jobs(self, kit: Kit) -> None:
        gate = Gate()
        job = await kit.queue().add("a")
        worker = kit.worker(gate, lock=400)
        renewed: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        worker.once("locks_renewed", renewed.set_result)
        await worker.start()

        assert await soon(renewed) == [job.id]
        gate.open()


class TestMaxStartedAttempts:
    async def test_a_failure_of_the_last_start_is_final(self, kit: Kit) -> None:
        """Whatever the job says of its attempts."""
        handler = Failing(*[OSError(f"{number}") for number in range(9)])
        job = await kit.queue().add("a", attempts=9, backoff=1)

        await kit.drain(handler, 1, max_started_attempts=2)

        stored = kit.fields(job.id)
        assert (handler.runs, stored["atm"], stored["ats"], stored["failedReason"]) == (2, "2", "2", "1")

    async def test_a_job_that_was_started_too_often_is_not_run(self, kit: Kit) -> None:
        """Starts without an attempt count: a job that is given back again and again must end."""
        handler = Failing()
        kit.seed("7", ats=3, opts='{"attempts":5}')

        told = await kit.drain(handler, 1, max_started_attempts=3)

        assert (handler.runs, told.of("failed")[0][1]) == (0, "was started 4 times, this worker allows 3")

    async def test_without_it_only_attempts_count(self, kit: Kit) -> None:
        kit.seed("7", ats=99)

        told = await kit.drain(nothing, 1)

        assert told.ids("completed") == ["7"]


class TestSkipping:
    async def test_locks_run_out_when_nobody_renews_them(self, kit: Kit) -> None:
        """For programs whose jobs must not hold a slot for longer than the lock."""
        gate = Gate()
        job = await kit.queue().add("a")
        told = await kit.work(gate, lock=300, skip_lock_renewal=True)
        await gate.reached()

        await kit.until(lambda: kit.lock(job.id) is None, "the lock runs out")

        gate.open()
        await told.finished(1)  # nobody took it meanwhile: its outcome counts

    async def test_stalled_jobs_are_left_to_others(self, kit: Kit) -> None:
        """Its own jobs are renewed all the same."""
        gate = Gate()
        kit.seed("lost", to="active")
        kit.command("SADD", kit.base + "stalled", "lost")
        job = await kit.queue().add("a")
        told = await kit.work(gate, lock=400, stalled_interval=50, skip_stalled_check=True)
        renewals = 0
        done = asyncio.Event()

        def renewed(job_ids: list[str]) -> None:
            nonlocal renewals
            renewals += 1
            if renewals == 3:
                done.set()

        told.worker.on("locks_renewed", renewed)
        await soon(done.wait())

        assert sorted(kit.ids("active")) == sorted(["lost", job.id])
        assert told.of("stalled") == []
        kit.command("LREM", kit.base + "active", 0, "lost")
        kit.command("DEL", kit.base + "lost")
        gate.open()
        await told.finished(1)
