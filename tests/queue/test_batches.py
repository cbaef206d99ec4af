"""A handler that takes several jobs at once: each job has its own outcome."""

from __future__ import annotations

import asyncio
import json
import threading
from datetime import timedelta
from typing import Any

import pytest

from bullpen.errors import DelayJob, InvalidOption, PermanentError
from bullpen.queue import Job
from bullpen.worker import BatchOptions, JobBatch, Worker
from tests.queue._kit import PATIENCE_S, Kit, nothing


class Batches:
    """A handler that keeps what it got, and waits for leave where it is told to."""

    def __init__(self, answer: Any = None, *, is_open: bool = True) -> None:
        self.got: list[JobBatch] = []
        self.ended: list[str] = []
        self._answer = answer
        self._entered, self._open = asyncio.Event(), asyncio.Event()
        if is_open:
            self._open.set()

    async def __call__(self, batch: JobBatch) -> Any:
        self.got.append(batch)
        self._entered.set()
        try:
            await self._open.wait()
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise
        return self._answer(batch) if callable(self._answer) else self._answer

    @property
    def sizes(self) -> list[int]:
        return [len(batch) for batch in self.got]

    def open(self) -> None:
        self._open.set()

    async def reached(self, count: int = 1) -> JobBatch:
        while len(self.got) < count:
            self._entered.clear()
            await self._entered.wait()
        return self.got[count - 1]


class TestGrouping:
    async def test_what_waits_is_handled_together_up_to_the_size(self, kit: Kit) -> None:
        handler = Batches()
        jobs = await kit.queue().add_many([("a", n) for n in range(25)])

        told = await kit.work(handler, batch=BatchOptions(size=10))
        await told.finished(25)

        assert handler.sizes == [10, 10, 5]
        assert [job.id for batch in handler.got for job in batch] == [job.id for job in jobs]

    async def test_one_job_does_not_wait_for_others(self, kit: Kit) -> None:
        """No timer fills a batch: what comes while one runs goes into the next."""
        handler = Batches(is_open=False)
        queue = kit.queue()
        told = await kit.work(handler, batch=BatchOptions(size=10))

        await queue.add("a", 0)
        await handler.reached(1)
        await queue.add_many([("a", n) for n in range(1, 5)])
        handler.open()
        await told.finished(5)

        assert handler.sizes[0] == 1
        assert sum(handler.sizes) == 5

    async def test_a_minimum_is_waited_for(self, kit: Kit) -> None:
        handler = Batches()
        queue = kit.queue()
        told = await kit.work(handler, batch=BatchOptions(size=5, minimum=3, wait_at_most=timedelta(hours=1)))

        for n in range(3):
            await queue.add("a", n)
        await told.finished(3)

        assert handler.sizes == [3]

    async def test_a_minimum_is_not_waited_for_longer_than_asked(self, kit: Kit) -> None:
        handler = Batches()
        await kit.queue().add_many([("a", n) for n in range(2)])

        told = await kit.work(handler, batch=BatchOptions(size=5, minimum=3, wait_at_most=20))
        await told.finished(2)

        assert sum(handler.sizes) == 2

    async def test_concurrency_is_the_number_of_batches(self, kit: Kit) -> None:
        handler = Batches(is_open=False)
        await kit.queue().add_many([("a", n) for n in range(30)])

        told = await kit.work(handler, concurrency=2, batch=BatchOptions(size=10))
        await handler.reached(2)

        assert (told.worker.concurrency, told.worker.running, handler.sizes) == (2, 20, [10, 10])
        told.worker.concurrency = 3
        await handler.reached(3)
        handler.open()
        await told.finished(30)

    async def test_a_larger_concurrency_starts_what_waits_here_already(self, kit: Kit) -> None:
        """It was taken under a larger concurrency and waited for others: no answer that brings some will start it."""
        handler = Batches(is_open=False)
        told = await kit.work(handler, concurrency=2, batch=BatchOptions(size=2, minimum=2, wait_at_most=50))
        await kit.queue().add_many([("a", n) for n in range(3)])
        await handler.reached(1)
        await told.wait("active", 3)
        told.worker.concurrency = 1
        batches = told.worker._runner.batches
        assert batches is not None
        await kit.until(lambda: batches._is_due, "it has waited long enough")
        assert handler.sizes == [2]

        told.worker.concurrency = 2
        async with asyncio.timeout(PATIENCE_S):
            await handler.reached(2)

        assert handler.sizes == [2, 1]
        handler.open()
        await told.finished(3)

    async def test_what_comes_while_a_batch_runs_is_left_to_idle_workers(self, kit: Kit) -> None:
        """Taken by the worker whose batch runs, they would wait for its end beside a worker that has nothing to do."""
        busy, idle = Batches(is_open=False), Batches()
        queue = kit.queue()
        full = await kit.work(busy, batch=BatchOptions(size=10))
        await queue.add("slow")
        await busy.reached(1)
        told = await kit.work(idle, batch=BatchOptions(size=10))

        for n in range(20):
            await queue.add("a", n)
        await told.finished(20)

        assert (busy.sizes, full.worker.running, full.worker.is_ready) == ([1], 1, True)
        busy.open()
        await full.finished(1)
        await told.worker.close()
        job = await queue.add("b")
        await full.finished(2)
        assert full.ids("completed")[1] == job.id

    async def test_a_batch_holds_its_places_until_its_handler_returns(self, kit: Kit) -> None:
        """Also when all of its jobs were decided before: nothing else would start."""
        may_end = asyncio.Event()

        async def handler(batch: JobBatch) -> None:
            for job in batch:
                batch.complete(job)
            await may_end.wait()

        queue = kit.queue()
        told = await kit.work(handler, batch=BatchOptions(size=5))
        await queue.add("a")
        await told.finished(1)
        await queue.add("b")
        await queue.counts()
        assert kit.ids("active") == []

        may_end.set()
        await told.finished(2)


class TestOutcomes:
    async def test_each_job_gets_its_own_value(self, kit: Kit) -> None:
        handler = Batches(lambda batch: [job.data * 10 for job in batch])
        jobs = await kit.queue().add_many([("a", n) for n in range(4)])

        told = await kit.work(handler, batch=BatchOptions(size=4))
        await told.finished(4)

        assert [kit.fields(job.id)["returnvalue"] for job in jobs] == ["0", "10", "20", "30"]

    async def test_an_error_in_the_list_fails_that_job_alone(self, kit: Kit) -> None:
        handler = Batches(lambda batch: [ValueError(f"no {job.data}") if job.data == 2 else job.data for job in batch])
        jobs = await kit.queue().add_many([("a", n) for n in range(4)])

        told = await kit.work(handler, batch=BatchOptions(size=4))
        await told.wait("completed", 3)
        await told.wait("retrying")

        assert set(kit.zset("completed")) == {jobs[0].id, jobs[1].id, jobs[3].id}
        assert (kit.fields(jobs[2].id)["failedReason"], kit.fields(jobs[2].id)["atm"]) == ("no 2", "1")

    async def test_what_the_handler_raises_fails_every_job_that_is_not_decided(self, kit: Kit) -> None:
        def answer(batch: JobBatch) -> None:
            batch.complete(batch[0], "done")
            batch.fail(batch[1], DelayJob(3_600_000))
            raise PermanentError("the rest is lost")

        jobs = await kit.queue().add_many([("a", n) for n in range(4)])

        told = await kit.work(Batches(answer), batch=BatchOptions(size=4))
        await told.wait("failed", 2)
        await told.wait("returned")
        await told.wait("completed")

        assert kit.fields(jobs[0].id)["returnvalue"] == '"done"'
        assert set(kit.zset("delayed")) == {jobs[1].id}
        assert set(kit.zset("failed")) == {jobs[2].id, jobs[3].id}

    async def test_a_job_that_is_decided_early_is_settled_at_once(self, kit: Kit) -> None:
        handler = Batches(is_open=False)
        jobs = await kit.queue().add_many([("a", n) for n in range(2)])
        told = await kit.work(handler, batch=BatchOptions(size=2))
        batch = await handler.reached()

        batch.complete(batch[1], 7)
        await told.wait("completed")

        assert (set(kit.zset("completed")), told.worker.running) == ({jobs[1].id}, 1)
        handler.open()
        await told.finished(2)

    async def test_a_list_of_another_length_is_the_handlers_mistake(self, kit: Kit) -> None:
        """Which value belongs to which job, nobody knows: none is stored."""
        jobs = await kit.queue(attempts=1).add_many([("a", n) for n in range(2)])

        told = await kit.work(Batches([1]), batch=BatchOptions(size=2))
        await told.wait("failed", 2)

        assert "expected a list of 2 values, one per job, or None" in kit.fields(jobs[0].id)["failedReason"]

    async def test_a_plain_function_runs_in_a_thread_and_decides_there(self, kit: Kit) -> None:
        threads: list[int] = []

        def handle(batch: JobBatch) -> list[str]:
            threads.append(threading.get_ident())
            batch.fail(batch[0], PermanentError("not this one"))
            batch[1].sync.log("seen")
            return ["x", "y"]

        jobs = await kit.queue().add_many([("a", n) for n in range(2)])
        told = await kit.work(handle, batch=BatchOptions(size=2))
        await told.wait("failed")
        await told.wait("completed")

        assert threads[0] != threading.get_ident()
        assert (set(kit.zset("failed")), set(kit.zset("completed"))) == ({jobs[0].id}, {jobs[1].id})

    async def test_deciding_twice_or_a_stranger_is_refused(self, kit: Kit) -> None:
        refused: list[str] = []

        def answer(batch: JobBatch) -> None:
            batch.complete(batch[0])
            wrong: Any = "no"
            try:
                batch.complete(batch[0])
            except InvalidOption as error:
                refused.append(error.option)
            try:
                batch.fail(batch[1], wrong)
            except InvalidOption as error:
                refused.append(error.option)

        await kit.queue().add_many([("a", n) for n in range(2)])
        told = await kit.work(Batches(answer), batch=BatchOptions(size=2))
        await told.finished(2)

        assert refused == ["job", "error"]


class TestEnds:
    async def test_one_cancelled_job_leaves_the_others_alone(self, kit: Kit) -> None:
        handler = Batches(is_open=False)
        jobs = await kit.queue().add_many([("a", n) for n in range(3)])
        told = await kit.work(handler, batch=BatchOptions(size=3))
        batch = await handler.reached()

        await told.worker.cancel_job(jobs[1].id, "not wanted")
        await told.wait("failed")

        assert ([job.cancelled for job in batch], batch.cancelled) == ([False, True, False], False)
        handler.open()
        await told.wait("completed", 2)
        assert set(kit.zset("completed")) == {jobs[0].id, jobs[2].id}
        assert handler.ended == []

    async def test_the_handler_is_cancelled_when_all_are(self, kit: Kit) -> None:
        handler = Batches(is_open=False)
        jobs = await kit.queue().add_many([("a", n) for n in range(3)])
        told = await kit.work(handler, batch=BatchOptions(size=3))
        batch = await handler.reached()

        await told.worker.cancel_all_jobs("stop")
        await told.wait("failed", 3)

        assert (batch.cancelled, handler.ended) == (True, ["cancelled"])
        assert set(kit.zset("failed")) == {job.id for job in jobs}

    async def test_closing_gives_all_back_after_the_handler_has_ended(self, kit: Kit) -> None:
        handler = Batches(is_open=False)
        jobs = await kit.queue().add_many([("a", n) for n in range(3)])
        told = await kit.work(handler, batch=BatchOptions(size=3))
        await handler.reached()

        await told.worker.close(0)

        assert handler.ended == ["cancelled"]
        assert set(kit.ids("wait")) == {job.id for job in jobs}
        assert {kit.fields(job.id).get("atm", "0") for job in jobs} == {"0"}

    async def test_a_batch_has_one_time_limit(self, kit: Kit) -> None:
        handler = Batches(is_open=False)
        jobs = await kit.queue(attempts=1).add_many([("a", n) for n in range(2)])

        told = await kit.work(handler, batch=BatchOptions(size=2), timeout=30)
        await told.wait("failed", 2)

        assert {kit.fields(job.id)["failedReason"] for job in jobs} == {"timed out after 30 ms"}
        assert handler.got[0].cancelled

    async def test_a_job_that_loses_its_lock_is_dropped_alone(self, kit: Kit) -> None:
        handler = Batches(is_open=False)
        jobs = await kit.queue().add_many([("a", n) for n in range(2)])
        told = await kit.work(handler, batch=BatchOptions(size=2), lock=300)
        await handler.reached()

        kit.redis.set(f"{kit.base}{jobs[0].id}:lock", "another")
        await told.wait("lock_lost")
        handler.open()
        await told.wait("completed")

        assert told.ids("completed") == [jobs[1].id]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch": 5}, "batch: expected a BatchOptions"),
        ({"batch": BatchOptions(size=5), "timeouts": {"a": 5}}, "timeouts: expected none with batch"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidOption, match=said):
        Worker("emails", nothing, connection="redis://localhost:1", **options)


@pytest.mark.parametrize(
    "wrong", [{"size": 0}, {"size": 1001}, {"size": 2, "minimum": 3}, {"size": 2, "wait_at_most": 0}, {"size": True}]
)
def test_wrong_sizes_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption):
        BatchOptions(**wrong)


class TestTimes:
    async def test_a_job_that_waited_longer_than_its_ttl_is_not_run(self, kit: Kit) -> None:
        ran: list[str] = []

        async def handle(job: Job) -> None:
            ran.append(job.name)

        queue = kit.queue()
        late = await queue.add("late", ttl=1_000, timestamp=kit.server_ms() - 5_000)
        await queue.add("early", ttl=timedelta(hours=1))

        told = await kit.work(handle, dead_letters=True)
        (job, reason) = await told.wait("failed")
        await told.wait("completed")

        assert (job.id, ran) == (late.id, ["early"])
        assert reason.startswith("expired: waited ")
        assert kit.fields(late.id)["failedReason"] == reason
        assert [event["event"] for event in kit.events(job_id=late.id)][-1] == "failed"
        assert (await queue.dead_letters.list())[0].cause == "expired"

    async def test_the_ttl_begins_when_the_job_could_run(self, kit: Kit) -> None:
        """Not when it was added: a delay is no waiting. And a job that began once is not late any more."""
        queue = kit.queue()
        opts = json.dumps({"bpttl": 60_000, "delay": 3_600_000})
        kit.seed("foreign-1", name="delayed", opts=opts, timestamp=kit.server_ms() - 3_601_000)
        again = await queue.add("again", ttl=60_000, backoff=1)
        failures: list[int] = []

        async def handle(job: Job) -> None:
            if job.id == again.id and not job.attempts_made:
                failures.append(1)
                raise ValueError("once")

        told = await kit.work(handle)
        await told.finished(2)

        assert len(told.of("completed")) == 2

    async def test_each_job_name_may_have_its_own_time_limit(self, kit: Kit) -> None:
        async def handle(job: Job) -> None:
            if job.name == "short":
                await asyncio.Event().wait()

        queue = kit.queue(attempts=1)
        short = await queue.add("short")
        await queue.add("other")

        told = await kit.work(handle, concurrency=2, timeout=timedelta(hours=1), timeouts={"short": 30})
        await told.wait("failed")
        await told.wait("completed")

        assert kit.fields(short.id)["failedReason"] == "timed out after 30 ms"
