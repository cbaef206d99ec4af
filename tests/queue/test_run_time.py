"""What can be changed and heard of while a worker runs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from bullpen import Bullpen
from bullpen._kernel import telemetry
from bullpen.errors import InvalidOption
from bullpen.queue import Job
from bullpen.worker import AutoConcurrency, BatchOptions, JobBatch, Taker
from bullpen.worker.handlers import InProcesses
from tests.queue import _process_handlers as handlers
from tests.queue._kit import PATIENCE_S, Failing, Gate, Kit, Told, echo, nothing, soon


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


class Changes:
    """The numbers that a worker went to by itself, with the reasons."""

    def __init__(self) -> None:
        self.all: list[tuple[str, int]] = []
        self._changed = asyncio.Event()
        self.stop = telemetry.subscribe(self._on_event)

    def _on_event(self, event: str, fields: dict[str, Any]) -> None:
        if event == "worker.concurrency":
            self.all.append((fields["reason"], fields["concurrency"]))
            self._changed.set()

    async def wait(self, reason: str, size: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while (reason, size) not in self.all:
                self._changed.clear()
                await self._changed.wait()


@pytest.fixture
def changes() -> Iterator[Changes]:
    changes = Changes()
    yield changes
    changes.stop()


LENIENT: Any = {"lag": 60_000, "memory": 1.0}
"""What a busy machine does not reach."""


class TestAutoConcurrency:
    async def test_jobs_that_only_wait_get_more_slots(self, kit: Kit, changes: Changes) -> None:
        gate = Gate()
        await kit.queue().add_many([("a", None)] * 70)
        told = await kit.work(gate, concurrency=AutoConcurrency(most=70, **LENIENT))

        await gate.reached(70)

        assert changes.all == [("demand", 20), ("demand", 40), ("demand", 70)]
        assert (told.worker.concurrency, told.worker.adapts_concurrency) == (70, True)
        gate.open()
        await told.finished(70)

    @pytest.mark.parametrize(("reason", "bound"), [("lag", {"lag": 1}), ("memory", {"memory": 0.001})])
    async def test_a_late_loop_or_full_memory_means_fewer(
        self, kit: Kit, changes: Changes, reason: str, bound: dict[str, Any]
    ) -> None:
        """Down to the least, and the jobs go on."""
        is_enough = asyncio.Event()

        async def handle(job: Job) -> None:
            while not is_enough.is_set():
                time.sleep(0.01)  # noqa: ASYNC251 - what makes the loop late
                await asyncio.sleep(0)

        await kit.queue().add_many([("a", None)] * 12)
        told = await kit.work(handle, concurrency=AutoConcurrency(least=7, **{**LENIENT, **bound}))

        await changes.wait(reason, 7)
        is_enough.set()

        await told.finished(12)
        assert told.worker.concurrency == 7

    async def test_a_number_ends_it_and_auto_begins_it_again(self, kit: Kit, changes: Changes) -> None:
        gate = Gate()
        await kit.queue().add_many([("a", None)] * 30)
        told = await kit.work(gate, concurrency=AutoConcurrency(**LENIENT))
        told.worker.concurrency = 3
        assert not told.worker.adapts_concurrency

        told.worker.concurrency = AutoConcurrency(least=12, most=30, **LENIENT)
        assert (told.worker.concurrency, told.worker.adapts_concurrency) == (12, True)
        await gate.reached(30)

        assert changes.all == [("demand", 24), ("demand", 30)]
        gate.open()
        await told.finished(30)

    async def test_full_batches_ask_for_more_of_them(self, kit: Kit, changes: Changes) -> None:
        """The number counts batches, and so does what is in use."""
        gate = Gate()

        async def handle(batch: JobBatch) -> None:
            await gate(batch[0])

        await kit.queue().add_many([("a", None)] * 8)
        bounds = AutoConcurrency(least=1, most=2, **LENIENT)
        told = await kit.work(handle, concurrency=1, batch=BatchOptions(size=4))
        await gate.reached(1)

        told.worker.concurrency = bounds
        await gate.reached(2)

        assert told.worker.concurrency == 2
        gate.open()
        await told.finished(8)

    async def test_an_app_says_it_for_all_its_workers(self, kit: Kit, changes: Changes) -> None:
        """As `bullpen run --concurrency auto` does."""
        gate = Gate()
        app = Bullpen(kit.url)
        worker = app.worker(kit.name, gate, concurrency=1)
        await kit.queue().add_many([("a", None)] * 20)
        running = asyncio.create_task(app.run(signals=False, concurrency=AutoConcurrency(**LENIENT)))

        await gate.reached(20)

        assert (changes.all, worker.utilisation) == ([("demand", 20)], 1.0)
        gate.open()
        await app.stop()
        await running

    def test_whoever_takes_by_hand_says_a_number(self) -> None:
        """How many jobs it holds is its own business."""
        with pytest.raises(InvalidOption, match="concurrency"):
            Taker("q", connection="redis://localhost:1", concurrency="auto")


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

    async def test_a_paused_worker_says_when_its_jobs_have_ended(self, kit: Kit) -> None:
        """And takes no other in the meantime; before the first job there is nothing to wait for."""
        may_end, ended = asyncio.Event(), list[str]()

        async def handle(job: Job) -> None:
            await may_end.wait()
            ended.append(job.name)

        worker = kit.worker(handle, concurrency=2)
        await worker.wait_for_running()
        told = Told(worker)
        await worker.start()
        await worker.wait_for_running()
        await kit.queue().add_many([("a", 1), ("b", 2), ("c", 3)])
        await told.wait("active", 2)

        worker.pause()
        waiting = asyncio.create_task(worker.wait_for_running())
        await asyncio.sleep(0)
        assert not waiting.done()
        may_end.set()
        async with asyncio.timeout(PATIENCE_S):
            await waiting

        assert (ended, worker.running) == (["a", "b"], 0)
        worker.resume()
        await told.finished(3)

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
