"""Taking and settling: each taken job leaves `active` for exactly one next state, with all that belongs to it."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import Any

import pytest
import redis

from bullpen._kernel.backoff import Backoff
from bullpen._kernel.outcome import Completed, Waiting
from bullpen._kernel.policy import RetryPolicy
from bullpen.errors import DelayJob, PermanentError, RateLimited, ReturnToWait, ServerRefused, WaitForChildren
from bullpen.queue import Job, JobState, RateLimit
from bullpen.queue.actions import AsyncActions
from bullpen.redis import Connection
from bullpen.redis.client import Door
from bullpen.wire.keys import QueueKeys
from bullpen.worker.exchange import Exchange, JobSettlement
from tests.queue._kit import Failing, Gate, Kit, echo, engine_of, nothing
from tests.queue.test_locks_and_stalls import check_stalled

TOKEN = r"[0-9a-f-]{36}:\d+"


@pytest.fixture
async def exchange(kit: Kit) -> AsyncIterator[Callable[..., Exchange]]:
    """The worker's one call, without a worker around it."""
    doors: list[Door] = []

    def make(**options: Any) -> Exchange:
        door = Door(Connection(kit.url))
        doors.append(door)
        keys = QueueKeys("bull", kit.name)
        usual: dict[str, Any] = {
            "worker_name": "w",
            "lock_ms": 30_000,
            "limit": None,
            "keep_completed": None,
            "keep_failed": None,
            "dead_letters": None,
            "clock_offset_ms": 0,
        }
        return Exchange(door, keys, AsyncActions(door, keys, deadline_s=5), **(usual | options))

    yield make

    for door in doors:
        door.close()


class TestTaking:
    @pytest.mark.requirement("Q-23", "Q-34", "Q-36", "Q-11", "X-11")
    async def test_a_taken_job_is_active_and_locked(self, kit: Kit) -> None:
        """Move and lock are one script: an active job without a lock would be given to a second worker."""
        gate = Gate()
        job = await kit.queue().add("a")
        before = kit.server_ms()

        await kit.work(gate, name="w1")
        running = await gate.reached()

        assert kit.ids("active") == [job.id]
        assert kit.ids("wait") == []
        assert kit.lock(job.id) == running.token
        stored = kit.fields(job.id)
        assert (stored["ats"], stored["pb"]) == ("1", "w1")
        assert before <= int(stored["processedOn"]) <= kit.server_ms()
        assert "atm" not in stored
        active = {"event": "active", "jobId": job.id, "prev": "waiting", "attemptsMade": "0", "workerId": "w1"}
        assert kit.events()[-1] == active
        assert (running.attempts_started, running.fence, running.worker_id) == (1, 1, "w1")

    @pytest.mark.requirement("W-63")
    async def test_as_many_run_at_once_as_concurrency_allows(self, kit: Kit) -> None:
        """Not one more, and not one less while work is there."""
        gate = Gate()
        await kit.queue().add_many(("n", n) for n in range(10))

        told = await kit.work(gate, concurrency=4)
        await gate.reached(4)

        assert told.worker.running == 4
        assert len(kit.ids("active")) == 4
        assert len(kit.ids("wait")) == 6
        gate.open()
        await told.finished(10)
        assert told.ids("completed") == [str(n) for n in range(1, 11)]

    async def test_a_wide_worker_fills_all_its_slots(self, kit: Kit) -> None:
        """One call takes at most a hundred; the slots beyond that must not stay empty."""
        gate = Gate()
        await kit.queue().add_many(("n", n) for n in range(260))

        told = await kit.work(gate, concurrency=250)
        await gate.reached(250)

        assert told.worker.running == 250
        assert len(kit.ids("wait")) == 10
        gate.open()
        await told.finished(260)

    async def test_wait_is_served_before_prioritized(self, kit: Kit) -> None:
        """As every BullMQ client does; also when one call takes from both."""
        queue = kit.queue()
        await queue.add("ranked", priority=1)
        await queue.add_many([("plain-1", None), ("plain-2", None)])

        told = await kit.work(nothing, concurrency=3)
        await told.finished(3)

        assert [job.name for (job,) in told.of("active")] == ["plain-1", "plain-2", "ranked"]
        await kit.until(lambda: not kit.has("pc"), "the look that finds nothing more ends the counting")

    async def test_a_due_job_queues_behind_those_that_wait(self, kit: Kit) -> None:
        """Promotion is to the back of the line, in due order; `lifo` is of no account there."""
        queue = kit.queue(clock_offset_ms=-60_000)
        await queue.add("due-2", delay=2_000, lifo=True)
        await queue.add("due-1", delay=1_000)
        await queue.add("first")

        told = await kit.drain(nothing, 3, concurrency=3)

        assert [job.name for (job,) in told.of("active")] == ["first", "due-1", "due-2"]
        assert [job.delay for (job,) in told.of("active")] == [0, 0, 0]
        promoted = told.of("active")[1][0].id
        assert kit.event_names(promoted)[:3] == ["added", "delayed", "waiting"]
        assert {"event": "waiting", "jobId": promoted, "prev": "delayed"} in kit.events()

    @pytest.mark.many
    async def test_more_due_jobs_than_one_call_promotes_are_all_promoted(self, kit: Kit) -> None:
        """A thousand per call bounds the script; the rest must not wait for the next wake-up."""
        queue = kit.queue(clock_offset_ms=-60_000, delay=1)
        await queue.add_many(("n", n) for n in range(1_100))

        # Below 20 slots there is one exchange at a time, so that jobs begin in the order in which they were promoted.
        told = await kit.drain(nothing, 1_100, concurrency=19, drain_delay=60_000)

        assert told.ids("active") == [str(n) for n in range(1, 1_101)]

    async def test_ids_without_a_job_are_dropped(self, kit: Kit) -> None:
        """After an eviction or a manual DEL, Node runs such an id as a nameless job; here it goes away."""
        for state in ("wait", "prioritized", "delayed"):
            kit.seed(f"ghost-{state}", only={}, to=state, score=None if state == "wait" else 1)
        kit.seed("stub", only={"progress": "5"})
        job = await kit.queue().add("real")

        told = await kit.drain(nothing, 1, concurrency=10)

        assert told.ids("completed") == [job.id]
        assert [kit.ids("wait"), kit.ids("active"), kit.zset("prioritized"), kit.zset("delayed")] == [[], [], {}, {}]
        kit.redis.delete(kit.base + "stub")

    async def test_a_key_of_another_type_in_place_of_a_job_is_dropped(self, kit: Kit) -> None:
        """Whatever stands under an id, the jobs behind it are still served."""
        kit.redis.set(kit.base + "odd", "no hash")
        kit.redis.lpush(kit.base + "wait", "odd")
        job = await kit.queue().add("real")

        told = await kit.drain(nothing, 1, concurrency=2)

        assert told.ids("completed") == [job.id]
        kit.redis.delete(kit.base + "odd")

    @pytest.mark.parametrize("odd", ["a missing job", "a key of another type"])
    async def test_a_look_for_one_drops_what_is_no_job(self, kit: Kit, exchange: Any, odd: str) -> None:
        """Its id must not stay in `active` either, where the stalled check would find it again and again."""
        if odd == "a key of another type":
            kit.redis.set(kit.base + "odd", "no hash")
        kit.redis.lpush(kit.base + "wait", "odd")
        job = await kit.queue().add("real")
        look = exchange()

        reply = await look.run([], 1)

        assert reply.taken == []
        assert (kit.ids("active"), kit.ids("wait")) == ([], [job.id])
        kit.redis.delete(kit.base + "odd")
        [taken] = (await look.run([], 1)).taken
        assert (taken.id, kit.ids("active"), kit.lock(job.id)) == (job.id, [job.id], taken.token)
        await look.run([JobSettlement(taken, Completed(b"1"))], 0)

    @pytest.mark.requirement("X-126")
    @pytest.mark.parametrize("take", [1, 5])
    async def test_jobs_are_taken_and_settled_although_memory_is_full(self, kit: Kit, exchange: Any, take: int) -> None:
        """A full queue empties itself again only if its workers go on."""
        await kit.queue().add_many([("n", 1), ("n", 2)])
        calls = exchange()
        kit.command("CONFIG", "SET", "maxmemory", 1)
        try:
            jobs = (await calls.run([], take)).taken
            done = await calls.run([JobSettlement(job, Completed(b"1")) for job in jobs], 0)
        finally:
            kit.command("CONFIG", "SET", "maxmemory", 0)

        assert len(jobs) == min(take, 2)
        assert done.codes == [0] * len(jobs)
        assert kit.ids("active") == []
        await kit.drain(nothing, 2 - len(jobs))

    @pytest.mark.parametrize(("key", "take"), [("prioritized", 5), ("delayed", 5), ("delayed", 1)])
    async def test_a_place_of_another_type_costs_no_waiting_job(
        self, kit: Kit, exchange: Any, key: str, take: int
    ) -> None:
        """What was popped before the server refused the next command goes back; else it would be in no list."""
        await kit.queue().add_many([("n", 1), ("n", 2)])
        kit.redis.set(kit.base + key, "no sorted set")

        with pytest.raises(ServerRefused, match=f"WRONGTYPE.*{kit.base}{key}"):
            await exchange().run([], take)

        assert (kit.ids("wait"), kit.ids("active")) == (["1", "2"], [])
        kit.redis.delete(kit.base + key)
        await kit.drain(nothing, 2)

    @pytest.mark.parametrize("concurrency", [1, 5])
    async def test_an_active_list_of_another_type_costs_no_waiting_job(self, kit: Kit, concurrency: int) -> None:
        """The jobs stand in their places as before, with nothing written about them, and run once the key is gone."""
        queue = kit.queue()
        await queue.add_many([("n", 1), ("n", 2)])
        await queue.add("n", 3, priority=7)
        scores = kit.zset("prioritized")
        kit.redis.zadd(kit.base + "active", {"x": 1})

        told = await kit.work(nothing, concurrency=concurrency)
        (error, *_) = await told.wait("error")

        assert f"{kit.base}active" in str(error)
        assert (kit.ids("wait"), kit.zset("prioritized")) == (["1", "2"], scores)
        assert "ats" not in kit.fields("1")
        assert kit.lock("1") is None
        assert "active" not in kit.event_names("1")
        kit.redis.delete(kit.base + "active")
        await told.finished(3)

    @pytest.mark.parametrize("key", ["wait", "prioritized"])
    async def test_a_place_of_another_type_costs_no_delayed_job(self, kit: Kit, key: str) -> None:
        """What is due stays in `delayed` until it can be placed."""
        kit.seed("plain", to="delayed", score=4096)
        kit.seed("first", to="delayed", score=8192, priority=3)
        kit.seed("second", to="delayed", score=8193, priority=3)
        kit.redis.set(kit.base + key, "no such thing")

        told = await kit.work(nothing)
        (error, *_) = await told.wait("error")
        assert "WRONGTYPE" in str(error)
        with pytest.raises(ServerRefused, match=f"WRONGTYPE.*{kit.base}{key}"):
            await kit.queue().promote_all()

        assert kit.zset("delayed") == {"plain": 4096, "first": 8192, "second": 8193}
        kit.redis.delete(kit.base + key)
        await told.finished(3)
        assert told.ids("completed") == ["plain", "first", "second"]

    @pytest.mark.parametrize("call", ["promote", "retry", "retry_all"])
    async def test_a_place_of_another_type_costs_no_job_that_is_moved_by_hand(self, kit: Kit, call: str) -> None:
        state = "delayed" if call == "promote" else "failed"
        kit.seed("a", to=state, score=4096)
        kit.redis.set(kit.base + "wait", "no list")
        queue = kit.queue()

        with pytest.raises(ServerRefused, match=f"WRONGTYPE.*{kit.base}wait"):
            await (queue.retry_all() if call == "retry_all" else getattr(queue, call)("a"))

        assert kit.zset(state) == {"a": 4096}
        kit.redis.delete(kit.base + "wait")

    async def test_a_place_of_another_type_costs_no_stalled_job(self, kit: Kit) -> None:
        kit.seed("a", to="active")
        kit.redis.set(kit.base + "wait", "no list")
        kit.redis.sadd(kit.base + "stalled", "a")

        with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
            check_stalled(kit)

        assert kit.ids("active") == ["a"]
        kit.redis.delete(kit.base + "wait")
        check_stalled(kit)
        check_stalled(kit)
        await kit.drain(nothing, 1)

    async def test_a_counter_of_priorities_that_is_none_costs_no_delayed_job(self, kit: Kit) -> None:
        kit.seed("first", to="delayed", score=4096, priority=3)
        kit.seed("second", to="delayed", score=8192, priority=3)
        kit.redis.set(kit.base + "pc", "many")

        told = await kit.drain(nothing, 2)

        assert told.ids("completed") == ["first", "second"]

    async def test_the_byte_budget_puts_the_rest_back_in_order(self, kit: Kit, exchange: Any) -> None:
        """Eight MiB per call: a reply of hundreds of megabytes would block the server and the worker."""
        queue = kit.queue()
        big = "x" * (3 * 1024 * 1024)
        await queue.add_many((f"big-{n}", big) for n in range(4))
        await queue.add("after")
        take = exchange()

        reply = await take.run([], 5)

        assert [job.name for job in reply.taken] == ["big-0", "big-1"]
        assert reply.has_more
        assert kit.ids("wait") == ["3", "4", "5"]
        assert kit.ids("active") == ["1", "2"]
        assert kit.marker() == {"0": 0}
        await take.run([JobSettlement(job, Completed(b"1")) for job in reply.taken], 0)

    async def test_the_byte_budget_keeps_the_order_of_priorities(self, kit: Kit, exchange: Any) -> None:
        """What goes back keeps its score, and what is added later must not overtake it."""
        queue = kit.queue(priority=7)
        big = "x" * (5 * 1024 * 1024)
        await queue.add_many((f"big-{n}", big) for n in range(3))
        scores = kit.zset("prioritized")
        take = exchange()

        reply = await take.run([], 10)
        late = await queue.add("late")

        assert [job.name for job in reply.taken] == ["big-0"]
        assert list(kit.zset("prioritized")) == ["2", "3", late.id]
        assert {job_id: score for job_id, score in kit.zset("prioritized").items() if job_id != late.id} == {
            "2": scores["2"],
            "3": scores["3"],
        }
        await take.run([JobSettlement(job, Completed(b"1")) for job in reply.taken], 0)

    async def test_one_job_larger_than_the_budget_is_still_taken(self, kit: Kit) -> None:
        """At least one, or a large job would block its queue for ever."""
        job = await kit.queue().add("huge", "x" * (9 * 1024 * 1024))

        told = await kit.drain(nothing, 1, concurrency=5)

        assert told.ids("completed") == [job.id]

    async def test_a_worker_with_a_moved_clock_sees_delayed_jobs_as_due(self, kit: Kit) -> None:
        """`clock_offset_ms` is how tests look at tomorrow without waiting for it."""
        job = await kit.queue().add("tomorrow", delay=timedelta(days=1))

        told = await kit.drain(nothing, 1, clock_offset_ms=90_000_000)

        assert told.ids("completed") == [job.id]
        assert int(kit.fields(job.id)["finishedOn"]) > kit.server_ms() + 80_000_000


class TestCompletion:
    @pytest.mark.requirement("Q-12", "Q-16", "Q-24", "Q-35", "Q-36")
    async def test_a_completed_job_has_its_value_and_no_lock(self, kit: Kit) -> None:
        """Exactly one state, and nothing left that could stall."""
        queue = kit.queue()
        job = await queue.add("a", {"n": 1})

        told = await kit.drain(echo, 1)

        stored = kit.fields(job.id)
        assert (stored["returnvalue"], stored["atm"], stored["ats"]) == ('{"n":1}', "1", "1")
        assert kit.zset("completed") == {job.id: float(stored["finishedOn"])}
        assert "failedReason" not in stored
        assert (kit.ids("active"), kit.lock(job.id)) == ([], None)
        assert told.of("completed")[0][1] == {"n": 1}
        assert kit.events(job_id=job.id)[-1] == {
            "event": "completed",
            "jobId": job.id,
            "returnvalue": '{"n":1}',
            "prev": "active",
            "attemptsMade": "1",
        }
        read = await queue.get_job(job.id)
        assert read is not None
        assert (read.return_value, read.failed_reason, read.finished_on) == ({"n": 1}, None, int(stored["finishedOn"]))

    async def test_no_value_is_null(self, kit: Kit) -> None:
        """An absent value would end Node's event listeners; `null` is JSON."""
        job = await kit.queue().add("a")

        await kit.drain(nothing, 1)

        assert kit.fields(job.id)["returnvalue"] == "null"

    @pytest.mark.requirement("X-127")
    async def test_an_oversized_value_fails_the_job_with_its_size(self, kit: Kit) -> None:
        """It would be stored twice; the work is done, so running it again would end the same way."""
        queue = kit.queue()
        job = await queue.add("a", attempts=5)

        async def large(job: Job) -> str:
            return "x" * (11 * 1024 * 1024)

        told = await kit.drain(large, 1)

        assert told.of("failed")[0][1] == "Job return value size 11.0 MB exceeds limit of 10.0 MB"
        assert await queue.state_of(job.id) is JobState.FAILED
        assert kit.fields(job.id)["atm"] == "1"

    @pytest.mark.parametrize("value", [math.nan, b"bytes", {1, 2}, object()], ids=["nan", "bytes", "set", "object"])
    async def test_a_value_that_is_no_json_fails_the_job_with_its_path(self, kit: Kit, value: Any) -> None:
        """Whoever reads the reason must see which part of the answer it was."""
        job = await kit.queue().add("a", attempts=5)

        async def answer(job: Job) -> Any:
            return {"answer": value}

        told = await kit.drain(answer, 1)

        assert told.of("failed")[0][1].startswith("return value.answer: expected ")
        assert kit.fields(job.id)["atm"] == "1"

    @pytest.mark.requirement("X-99", "Q-16")
    async def test_a_success_after_a_failure_forgets_the_reason(self, kit: Kit) -> None:
        """Node leaves the old reason beside the value, and dashboards show a completed job as failed."""
        job = await kit.queue().add("a", backoff=Backoff.fixed(1))

        await kit.drain(Failing(RuntimeError("first"), value=1), 1)

        stored = kit.fields(job.id)
        assert (stored["returnvalue"], stored["atm"], "failedReason" in stored) == ("1", "2", False)
        assert len(json.loads(stored["stacktrace"])) == 1

    async def test_the_queue_is_drained_once_its_last_job_is_done(self, kit: Kit) -> None:
        """Node's listeners wait for `drained`; it has no fields and comes after the completion."""
        await kit.queue().add_many([("a", None), ("b", None)])

        await kit.drain(nothing, 2)

        assert [event for event in kit.events() if event["event"] == "drained"] == [{"event": "drained"}]
        assert kit.events()[-1] == {"event": "drained"}


class TestRetries:
    @pytest.mark.requirement("Q-25", "Q-50", "Q-9", "X-43", "X-14")
    async def test_a_failure_waits_in_delayed_for_its_backoff(self, kit: Kit) -> None:
        """The wait is stored, not slept: the worker may die meanwhile."""
        queue = kit.queue()
        job = await queue.add("a", attempts=3, backoff=Backoff.fixed(60_000))
        told = await kit.work(Failing(RuntimeError("boom")))
        before = kit.server_ms()

        failed, reason, delay_ms = await told.wait("retrying")

        due = kit.zset("delayed")[job.id] / 4096
        assert (failed.id, reason, delay_ms) == (job.id, "boom", 60_000)
        assert before + 60_000 <= due <= kit.server_ms() + 60_000
        stored = kit.fields(job.id)
        assert (stored["atm"], stored["delay"], stored["failedReason"]) == ("1", "60000", "boom")
        assert "RuntimeError: boom" in json.loads(stored["stacktrace"])[0]
        assert (kit.ids("active"), kit.lock(job.id), kit.zset("failed")) == ([], None, {})
        assert kit.events(job_id=job.id)[-2:] == [
            {"event": "delayed", "jobId": job.id, "delay": str(int(due))},
            {"event": "retry", "jobId": job.id, "delay": "60000", "attemptsMade": "1"},
        ]
        read = await queue.get_job(job.id)
        assert read is not None and read.failed_reason == "boom"

    @pytest.mark.requirement("Q-51", "X-1")
    async def test_an_exponential_backoff_doubles(self, kit: Kit) -> None:
        """base × 2^(n−1), n failures so far."""
        await kit.queue().add("a", attempts=5, backoff=Backoff.exponential(5))

        told = await kit.drain(Failing(*(RuntimeError("boom") for _ in range(5))), 1)

        assert [delay_ms for _, _, delay_ms in told.of("retrying")] == [5, 10, 20, 40]
        assert len(told.of("failed")) == 1

    @pytest.mark.requirement("Q-51", "X-14", "X-98")
    async def test_a_backoff_is_capped_at_one_hour(self, kit: Kit) -> None:
        """A job of many attempts must not disappear for months."""
        kit.seed("old", opts=json.dumps({"attempts": 50, "backoff": {"type": "exponential", "delay": 1000}}), atm=20)
        told = await kit.work(Failing(RuntimeError("boom")))

        _, _, delay_ms = await told.wait("retrying")

        assert delay_ms == 3_600_000

    @pytest.mark.requirement("X-43")
    async def test_attempts_made_counts_the_earlier_ones(self, kit: Kit) -> None:
        """0, 1, 2 for three attempts; `is_last_attempt` spares handlers the off-by-one."""
        seen = []

        async def record(job: Job) -> None:
            seen.append((job.attempts_made, job.attempts_started, job.is_last_attempt))
            raise RuntimeError("boom")

        await kit.queue().add("a", attempts=3, backoff=Backoff.fixed(1))
        await kit.drain(record, 1)

        assert seen == [(0, 1, False), (1, 2, False), (2, 3, True)]

    async def test_without_backoff_a_retry_is_immediate_and_at_the_back(self, kit: Kit) -> None:
        """Foreign jobs may have attempts and no backoff; Node retries them at once, behind those that wait."""
        kit.seed("again", opts='{"attempts": 2}')
        kit.seed("next")
        told = await kit.drain(Failing(RuntimeError("boom")), 2)

        assert told.ids("active") == ["again", "next", "again"]
        assert {"event": "waiting", "jobId": "again", "prev": "active"} in kit.events()
        assert {"event": "retry", "jobId": "again", "delay": "0", "attemptsMade": "1"} in kit.events()
        assert kit.fields("again")["delay"] == "0"

    async def test_an_immediate_retry_of_a_lifo_job_is_at_the_front(self, kit: Kit) -> None:
        """`lifo` holds for retries too, as in Node."""
        kit.seed("again", opts='{"attempts": 2, "lifo": true}')
        kit.seed("next")

        told = await kit.drain(Failing(RuntimeError("boom")), 2)

        assert told.ids("active") == ["again", "again", "next"]

    async def test_a_retry_of_a_prioritised_job_keeps_its_class(self, kit: Kit) -> None:
        """The hash's priority decides, and the job queues behind its equals."""
        kit.seed("again", opts='{"attempts": 2}', priority=3, to="prioritized", score=3 * 2**32 + 1)
        kit.seed("equal", priority=3, to="prioritized", score=3 * 2**32 + 2)
        kit.seed("lower", priority=4, to="prioritized", score=4 * 2**32 + 3)
        kit.redis.set(kit.base + "pc", 3)

        told = await kit.drain(Failing(RuntimeError("boom")), 3)

        assert told.ids("active") == ["again", "equal", "again", "lower"]

    @pytest.mark.requirement("Q-26", "Q-12", "Q-35", "Q-36", "Q-9")
    async def test_the_last_attempt_fails_the_job(self, kit: Kit) -> None:
        """In `failed`, with reason and stacks, and told as exhausted."""
        queue = kit.queue()
        job = await queue.add("a", attempts=2, backoff=Backoff.fixed(1))

        told = await kit.drain(Failing(ValueError("one"), ValueError("two")), 1)

        stored = kit.fields(job.id)
        assert (stored["failedReason"], stored["atm"], stored["ats"]) == ("two", "2", "2")
        assert kit.zset("failed") == {job.id: float(stored["finishedOn"])}
        assert "returnvalue" not in stored
        assert (kit.ids("active"), kit.lock(job.id), kit.zset("delayed")) == ([], None, {})
        assert [entry.splitlines()[-1] for entry in json.loads(stored["stacktrace"])] == [
            "ValueError: one",
            "ValueError: two",
        ]
        assert told.of("failed") == [(told.of("active")[-1][0], "two")]
        failed, exhausted = kit.events(job_id=job.id)[-2:]
        assert failed.pop("stacktrace").endswith("ValueError: two")
        assert [failed, exhausted] == [
            {"event": "failed", "jobId": job.id, "failedReason": "two", "prev": "active", "attemptsMade": "2"},
            {"event": "retries-exhausted", "jobId": job.id, "attemptsMade": "2"},
        ]
        assert await queue.state_of(job.id) is JobState.FAILED

    async def test_a_reason_is_raw_text_and_never_empty(self, kit: Kit) -> None:
        """Not JSON, as Node reads it; an error without a message is known by its class."""
        jobs = await kit.queue().add_many([("quoted", None), ("empty", None)])
        errors = Failing(PermanentError('say "ça"\nand more'), PermanentError())

        await kit.drain(errors, 2)

        assert kit.fields(jobs[0].id)["failedReason"] == 'say "ça"\nand more'
        assert kit.fields(jobs[1].id)["failedReason"] == "PermanentError"

    @pytest.mark.requirement("X-8")
    async def test_long_errors_are_cut(self, kit: Kit) -> None:
        """Text of user code is never stored without bound."""
        job = await kit.queue().add("a", attempts=1)

        await kit.drain(Failing(RuntimeError("x" * 50_000)), 1)

        stored = kit.fields(job.id)
        assert len(stored["failedReason"]) == 5_000
        assert len(json.loads(stored["stacktrace"])[0]) == 5_000

    @pytest.mark.parametrize(
        ("limit", "kept"), [(2, ["three", "four"]), (0, []), (10, ["one", "two", "three", "four"])]
    )
    async def test_the_stack_trace_limit_keeps_the_latest(self, kit: Kit, limit: int, kept: list[str]) -> None:
        """One entry per failed attempt; each take returns them, so they must be bounded."""
        job = await kit.queue().add("a", attempts=4, backoff=Backoff.fixed(1), stack_trace_limit=limit)

        await kit.drain(Failing(*(RuntimeError(text) for text in ("one", "two", "three", "four"))), 1)

        stacks = json.loads(kit.fields(job.id)["stacktrace"] or "[]")
        assert [stack.splitlines()[-1].partition(": ")[2] for stack in stacks] == kept

    async def test_a_broken_stack_list_is_started_anew(self, kit: Kit) -> None:
        """A foreign writer's text must not keep a job from failing."""
        kit.seed("odd", opts='{"attempts": 1, "stackTraceLimit": 3}', stacktrace="no json")

        await kit.drain(Failing(RuntimeError("boom")), 1)

        assert len(json.loads(kit.fields("odd")["stacktrace"])) == 1


class Bespoke(Exception):
    pass


class UnrecoverableError(Exception):
    """As the official Python client calls it."""


class TestPermanent:
    @pytest.mark.parametrize(
        ("error", "options"),
        [
            (PermanentError("no"), {}),
            (UnrecoverableError("no"), {}),
            (Bespoke("no"), {"permanent_errors": (Bespoke,)}),
            (Bespoke("no"), {"policy": RetryPolicy(permanent_errors=(Bespoke,))}),
            (Bespoke("no"), {"policy": RetryPolicy(is_permanent=lambda error: str(error) == "no")}),
        ],
        ids=["signal", "by name", "option", "policy", "test"],
    )
    async def test_a_permanent_error_uses_up_no_further_attempts(
        self, kit: Kit, error: Exception, options: dict[str, Any]
    ) -> None:
        """Trying again what cannot work costs money and hides the cause."""
        job = await kit.queue().add("a", attempts=5)

        told = await kit.drain(Failing(error), 1, **options)

        stored = kit.fields(job.id)
        assert (stored["failedReason"], stored["atm"]) == ("no", "1")
        assert told.of("retrying") == []
        assert "retries-exhausted" not in kit.event_names(job.id)

    async def test_another_error_is_retried_beside_permanent_ones(self, kit: Kit) -> None:
        """The list is a list, not a switch."""
        await kit.queue().add("a", attempts=2, backoff=Backoff.fixed(1))

        told = await kit.drain(Failing(RuntimeError("again")), 1, permanent_errors=(Bespoke,))

        assert len(told.of("retrying")) == len(told.of("completed")) == 1

    async def test_system_exit_in_a_handler_is_a_failure_and_the_worker_lives(self, kit: Kit) -> None:
        """A library that calls sys.exit() must not end the whole process and stall its other jobs."""
        await kit.queue(attempts=1).add_many([("exit", None), ("next", None)])

        told = await kit.drain(Failing(SystemExit(3)), 2)

        assert [job.name for job, _ in told.of("failed")] == ["exit"]
        assert [job.name for job, _ in told.of("completed")] == ["next"]

    async def test_a_handler_that_cancels_itself_has_failed(self, kit: Kit) -> None:
        """CancelledError that nobody of ours sent is an error like others, not a lost job."""
        job = await kit.queue().add("a", attempts=1)

        await kit.drain(Failing(asyncio.CancelledError("by myself")), 1)

        assert kit.fields(job.id)["failedReason"] == "by myself"


class TestSignals:
    async def test_delay_job_counts_no_attempt(self, kit: Kit) -> None:
        """ "Not yet" is no failure: the job waits as long as its handler says and keeps its attempts."""
        job = await kit.queue().add("a", attempts=1)
        told = await kit.work(Failing(DelayJob(timedelta(minutes=1))))
        before = kit.server_ms()

        await told.wait("returned")

        due = kit.zset("delayed")[job.id] / 4096
        assert before + 60_000 <= due <= kit.server_ms() + 60_000
        stored = kit.fields(job.id)
        assert (stored["delay"], "atm" in stored, "failedReason" in stored) == ("60000", False, False)
        assert kit.event_names(job.id)[-1] == "delayed"
        assert (kit.ids("active"), kit.lock(job.id)) == ([], None)

    async def test_a_delayed_job_comes_back_to_its_handler(self, kit: Kit) -> None:
        """With its attempts untouched and its fence grown."""
        seen = []

        async def twice(job: Job) -> None:
            seen.append((job.attempts_made, job.fence))
            if len(seen) == 1:
                raise DelayJob(1)

        await kit.queue().add("a")
        await kit.drain(twice, 1)

        assert seen == [(0, 1), (0, 2)]

    async def test_a_wrong_delay_is_a_failure_of_the_handler(self, kit: Kit) -> None:
        """DelayJob(-5) must not harm the worker; the reason tells the mistake."""
        await kit.queue().add("a", attempts=1)

        told = await kit.drain(Failing(DelayJob(-5)), 1)

        assert told.of("failed")[0][1].startswith("DelayJob.delay: expected whole milliseconds")

    async def test_return_to_wait_goes_to_the_front_and_counts_nothing(self, kit: Kit) -> None:
        """The job had its turn already."""
        jobs = await kit.queue(attempts=1).add_many([("a", None), ("b", None)])

        told = await kit.drain(Failing(ReturnToWait()), 2)

        assert told.ids("active") == [jobs[0].id, jobs[0].id, jobs[1].id]
        assert kit.fields(jobs[0].id)["atm"] == "1"
        assert {"event": "waiting", "jobId": jobs[0].id, "prev": "active"} in kit.events()

    async def test_return_to_wait_of_a_prioritised_job_keeps_its_turn(self, kit: Kit) -> None:
        """Front of its class, not of the queue."""
        queue = kit.queue(attempts=1)
        first = await queue.add("first", priority=5)
        equal = await queue.add("equal", priority=5)
        higher = await queue.add("higher", priority=2)
        told = await kit.work(Failing(ReturnToWait()), concurrency=1)
        await told.finished(3)

        assert told.ids("active") == [higher.id, higher.id, first.id, equal.id]

    async def test_rate_limited_holds_back_every_worker(self, kit: Kit) -> None:
        """The service that said "too many" must not be asked by the neighbour instead."""
        queue = kit.queue(attempts=1)
        job = await queue.add("a")
        told = await kit.work(Failing(RateLimited(60_000)))
        await told.wait("returned")

        other = await kit.work(nothing)
        await queue.add("b")
        await kit.until(lambda: engine_of(other).driver.state.limited_until, "the second worker was told of the limit")

        assert kit.ids("wait") == [job.id, "2"]
        assert other.all == []
        assert 0 < kit.redis.pttl(kit.base + "limiter") <= 60_000
        assert "atm" not in kit.fields(job.id)

    async def test_after_the_pause_the_job_runs(self, kit: Kit) -> None:
        """Nobody needs to wake the queue by hand."""
        job = await kit.queue().add("a")

        told = await kit.drain(Failing(RateLimited(timedelta(milliseconds=30)), value=1), 1, drain_delay=60_000)

        assert told.ids("completed") == [job.id]
        assert kit.fields(job.id)["atm"] == "1"

    async def test_wait_for_children_parks_a_parent(self, kit: Kit) -> None:
        """It leaves `active`, so it holds no slot and no lock while its children run."""
        kit.seed("parent")
        kit.redis.sadd(f"{kit.base}parent:dependencies", "bull:kids:1")
        told = await kit.work(Failing(WaitForChildren()))

        await told.wait("returned")

        assert list(kit.zset("waiting-children")) == ["parent"]
        assert (kit.ids("active"), kit.lock("parent")) == ([], None)
        assert kit.events(job_id="parent")[-1] == {"event": "waiting-children", "jobId": "parent", "prev": "active"}
        assert "atm" not in kit.fields("parent")

    async def test_wait_for_children_without_any_runs_again(self, kit: Kit) -> None:
        """The last child may finish between the handler's look and its signal; the parent must not park for ever."""
        job = await kit.queue().add("parent")

        told = await kit.drain(Failing(WaitForChildren(), value="done"), 1)

        assert told.ids("active") == [job.id, job.id]
        assert kit.zset("waiting-children") == {}

    async def test_completing_with_pending_children_is_refused(self, kit: Kit) -> None:
        """The handler forgot to wait; its job must not count as done while children run."""
        kit.seed("parent", opts='{"attempts": 1}')
        kit.redis.sadd(f"{kit.base}parent:dependencies", "bull:kids:1")

        told = await kit.drain(nothing, 1)

        assert told.of("failed")[0][1] == "has pending children; raise WaitForChildren to wait for them"
        assert kit.ids("active") == []


class TestTimeouts:
    async def test_a_slow_coroutine_is_cancelled_and_has_failed(self, kit: Kit) -> None:
        """A hanging call must not hold a slot for ever; the reason tells the bound."""
        gate = Gate()
        job = await kit.queue().add("slow", attempts=1)

        told = await kit.drain(gate, 1, timeout=timedelta(milliseconds=30))

        assert told.of("failed")[0][1] == "timed out after 30 ms"
        assert [run.id for run in gate.cancelled] == [job.id]
        assert gate.entered[0].cancelled

    async def test_a_timeout_is_retried_like_any_failure(self, kit: Kit) -> None:
        """It counts as an attempt and obeys the backoff."""
        gate = Gate()
        await kit.queue().add("slow", attempts=3, backoff=Backoff.fixed(60_000))
        told = await kit.work(gate, timeout=20)

        job, reason, delay_ms = await told.wait("retrying")

        assert (reason, delay_ms) == ("timed out after 20 ms", 60_000)
        assert kit.fields(job.id)["atm"] == "1"

    async def test_the_handlers_own_timeout_error_is_its_own(self, kit: Kit) -> None:
        """A TimeoutError of an HTTP client is not ours to rename."""
        await kit.queue().add("a", attempts=1)

        told = await kit.drain(Failing(TimeoutError("upstream")), 1, timeout=5_000)

        assert told.of("failed")[0][1] == "upstream"

    async def test_a_slow_thread_keeps_its_slot_until_it_returns(self, kit: Kit) -> None:
        """Threads cannot be killed: `job.cancelled` asks it to stop, and only then the slot is free."""
        released = threading.Event()
        flagged = threading.Event()
        jobs = await kit.queue(attempts=1).add_many([("slow", None), ("next", None)])

        def slow(job: Job) -> str:
            if job.name == "next":
                return "ok"
            while not job.cancelled:
                released.wait(0.002)
            flagged.set()
            released.wait(10)
            return "too late"

        told = await kit.work(slow, timeout=30)
        await asyncio.to_thread(flagged.wait, 10)

        assert told.worker.running == 1
        assert kit.ids("wait") == [jobs[1].id]
        released.set()
        await told.finished(2)
        assert told.of("failed")[0][1] == "timed out after 30 ms (the thread ended late)"
        assert told.ids("completed") == [jobs[1].id]


class TestThreads:
    async def test_a_plain_function_runs_in_a_thread_with_the_jobs_actions(self, kit: Kit) -> None:
        """Blocking code belongs in a thread; progress and logs reach it through `job.sync`."""
        loop_thread = threading.get_ident()

        def blocking(job: Job) -> bool:
            job.sync.progress(40)
            job.sync.log("half way")
            job.sync.update_data({"changed": True})
            return threading.get_ident() != loop_thread

        job = await kit.queue().add("a")
        told = await kit.drain(blocking, 1)

        assert told.of("completed")[0][1] is True
        assert (kit.fields(job.id)["progress"], kit.fields(job.id)["data"]) == ("40", '{"changed":true}')
        assert kit.redis.lrange(f"{kit.base}{job.id}:logs", 0, -1) == [b"half way"]

    async def test_threads_run_side_by_side_up_to_concurrency(self, kit: Kit) -> None:
        """All slots are threads of their own."""
        together = threading.Barrier(3, timeout=10)
        await kit.queue().add_many(("n", n) for n in range(3))

        def meet(job: Job) -> None:
            together.wait()

        told = await kit.drain(meet, 3, concurrency=3)

        assert len(told.of("completed")) == 3

    async def test_a_function_that_returns_a_coroutine_is_told_so(self, kit: Kit) -> None:
        """A lambda around an async function would otherwise complete jobs that never ran."""
        await kit.queue().add("a", attempts=1)

        told = await kit.drain(lambda job: asyncio.sleep(0), 1)

        assert told.of("failed")[0][1] == "the handler returned an awaitable; declare it with `async def`"

    async def test_context_variables_reach_the_thread(self, kit: Kit) -> None:
        """Tracing and request ids live in them."""
        import contextvars

        variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="lost")
        variable.set("kept")
        await kit.queue().add("a")

        told = await kit.drain(lambda job: variable.get(), 1)

        assert told.of("completed")[0][1] == "kept"

    async def test_job_sync_outside_of_a_thread_is_refused(self, kit: Kit) -> None:
        """On the loop it would wait for itself for ever."""
        job = await kit.queue().add("a")

        with pytest.raises(Exception, match=r"job.sync is for `def` handlers of a Worker"):
            _ = job.sync


class TestForeignJobs:
    async def test_a_deferred_failure_is_honoured_without_running(self, kit: Kit) -> None:
        """Whoever set `defa` (a stall limit, a failed child) has decided; attempts do not matter any more."""
        kit.seed("condemned", opts='{"attempts": 5}', defa="child bull:kids:1 failed", atm=1)
        handler = Failing()

        told = await kit.drain(handler, 1)

        assert handler.runs == 0
        assert told.of("failed")[0][1] == "child bull:kids:1 failed"
        stored = kit.fields("condemned")
        assert (stored["failedReason"], stored["atm"], "defa" in stored) == ("child bull:kids:1 failed", "2", False)

    async def test_unreadable_data_fails_the_job_and_the_worker_lives(self, kit: Kit) -> None:
        """Nothing in a queue is trusted because it is there."""
        kit.seed("broken", data="{not json", opts='{"attempts": 5}')
        kit.seed("bytes", data=b"\xff\xfe", opts='{"attempts": 5}')
        good = await kit.queue().add("good")
        handler = Failing()

        told = await kit.drain(handler, 3, dead_letters=True)

        assert told.ids("completed") == [good.id]
        assert handler.runs == 1
        assert kit.fields("broken")["failedReason"].startswith("data cannot be read: data: expected JSON")
        assert kit.fields("broken")["atm"] == "1"
        letters = [letter async for letter in kit.queue().dead_letters]
        assert [(letter.job_id, letter.cause) for letter in letters] == [("broken", "bad_data"), ("bytes", "bad_data")]
        assert letters[0].data == "{not json"

    @pytest.mark.requirement("X-101", "X-3")
    @pytest.mark.parametrize(
        ("opts", "runs"),
        [
            ("{}", 1),
            ('{"attempts": 0}', 1),
            ('{"attempts": -4}', 1),
            ('{"attempts": "two"}', 1),
            ('{"attempts": 2}', 2),
            ("[]", 1),
            ("no json", 1),
            ("null", 1),
            ('{"attempts": 3, "backoff": 0}', 3),
            ('{"attempts": 3, "backoff": {"type": "fixed", "delay": 0}}', 3),
            ('{"attempts": 2, "backoff": {"type": "custom"}}', 2),
        ],
    )
    async def test_odd_options_of_others_are_survived(self, kit: Kit, opts: str, runs: int) -> None:
        """Node writes attempts 0 for "not given" and accepts nonsense; each job ends, none ends the worker."""
        kit.seed("odd", opts=opts)
        handler = Failing(*(RuntimeError("boom") for _ in range(9)))

        told = await kit.drain(handler, 1)

        assert handler.runs == runs
        assert told.ids("failed") == ["odd"]

    async def test_a_job_with_nothing_but_a_name_runs(self, kit: Kit) -> None:
        """Missing opts, data, timestamp: read as empty."""
        kit.seed("bare", only={"name": "bare"})

        told = await kit.drain(echo, 1)

        assert told.of("completed")[0][1] == {}

    async def test_a_delayed_job_without_a_priority_field_is_promoted(self, kit: Kit) -> None:
        """Only an id without a job may be dropped; a job with a name is somebody's work."""
        kit.seed("old", only={"name": "old", "data": "1"}, to="delayed", score=4096)

        told = await kit.drain(echo, 1)

        assert told.ids("completed") == ["old"]

    @pytest.mark.parametrize("priority", ["-5", "3.7", "high", "nan", "inf", ""])
    async def test_odd_priorities_of_others_are_survived(self, kit: Kit, priority: str) -> None:
        """Delayed, retried and returned jobs are placed by this field; one bad value must not tear a script in half."""
        kit.seed("odd", opts='{"attempts": 2}', priority=priority, to="delayed", score=4096)
        kit.seed("good", opts='{"attempts": 2}', to="delayed", score=4097)

        told = await kit.drain(Failing(RuntimeError("boom"), ReturnToWait()), 2)

        assert set(told.ids("completed")) == {"odd", "good"}
        assert told.of("error") == []

    async def test_an_id_that_is_no_text_harms_nobody_else(self, kit: Kit) -> None:
        """Ids are bytes to the server; one that is no UTF-8 is run and settled under the same bytes."""
        kit.seed(b"caf\xe9")
        good = await kit.queue().add("good")

        told = await kit.drain(nothing, 2)

        assert good.id in told.ids("completed")
        assert kit.redis.zcard(kit.base + "completed") == 2
        assert kit.ids("active") == []

    async def test_the_old_name_of_attempts_made_is_read(self, kit: Kit) -> None:
        """`attemptsMade` of old clients wins over `atm`, as in Node."""
        kit.seed("old", opts='{"attempts": 3}', attemptsMade=2)

        told = await kit.drain(Failing(RuntimeError("boom")), 1)

        assert told.ids("failed") == ["old"]


class TestLimits:
    @pytest.mark.requirement("Q-38")
    async def test_a_rate_limit_starts_so_many_per_window(self, kit: Kit) -> None:
        """Counted on the server, so it holds over all workers."""
        gate = Gate().open()
        await kit.queue().add_many(("n", n) for n in range(6))
        limit = RateLimit(2, 60_000)

        first = await kit.work(gate, concurrency=10, limit=limit)
        await gate.reached(2)
        second = await kit.work(gate, concurrency=10, limit=limit)
        await kit.until(lambda: engine_of(second).driver.state.limited_until, "the second worker was told of the limit")

        assert len(gate.entered) == 2
        assert kit.redis.get(kit.base + "limiter") == b"2"
        assert len(kit.ids("wait")) == 4
        await first.worker.close()

    async def test_after_the_window_the_next_ones_start(self, kit: Kit) -> None:
        """By the worker's own timer, with no marker and no drain delay."""
        await kit.queue().add_many(("n", n) for n in range(4))

        told = await kit.drain(nothing, 4, concurrency=4, limit=RateLimit(2, 50), drain_delay=60_000)

        starts = sorted(int(kit.fields(str(n))["processedOn"]) for n in range(1, 5))
        assert len(told.of("completed")) == 4
        assert starts[2] - starts[0] >= 45

    async def test_the_queues_own_limit_comes_before_the_workers(self, kit: Kit) -> None:
        """`max` in meta is what Node's global rate limit writes."""
        gate = Gate().open()
        await kit.queue().add_many(("n", n) for n in range(5))
        kit.redis.hset(kit.base + "meta", mapping={"max": 3, "duration": 60_000})

        told = await kit.work(gate, concurrency=5)
        await gate.reached(3)
        await kit.until(lambda: engine_of(told).driver.state.limited_until, "the worker was told of the limit")

        assert len(gate.entered) == 3
        assert 0 < kit.redis.pttl(kit.base + "limiter") <= 60_000

    async def test_condemned_jobs_do_not_count_against_the_limit(self, kit: Kit) -> None:
        """They do no work; a hundred of them must not starve the others."""
        for n in range(3):
            kit.seed(f"condemned-{n}", defa="no")
        job = await kit.queue().add("real")

        told = await kit.drain(nothing, 4, concurrency=4, limit=RateLimit(1, 60_000))

        assert told.ids("completed") == [job.id]
        assert len(told.of("failed")) == 3

    async def test_global_concurrency_bounds_all_workers_together(self, kit: Kit) -> None:
        """`concurrency` in meta is the length that `active` may reach."""
        gate = Gate()
        await kit.queue().add_many(("n", n) for n in range(5))
        kit.redis.hset(kit.base + "meta", "concurrency", 2)

        first, second = await kit.work(gate, concurrency=4), await kit.work(gate, concurrency=4)
        await gate.reached(2)

        assert len(kit.ids("active")) == 2
        gate.open()
        await kit.until(lambda: len(first.of("completed") + second.of("completed")) == 5, "all five are done")

    @pytest.mark.parametrize("odd", [{"concurrency": "many"}, {"max": "few"}, {"concurrency": "0"}])
    async def test_odd_limits_of_others_tear_nothing(self, kit: Kit, odd: Any) -> None:
        """A setting nobody can read is no setting; a concurrency of zero stops the queue and loses nothing."""
        kit.redis.hset(kit.base + "meta", mapping=odd)
        queue = kit.queue()
        await queue.add("a")

        if odd.get("concurrency") == "0":
            told = await kit.work(nothing)
            await kit.until(lambda: engine_of(told).driver.last_exchange, "the worker has looked")
            assert kit.ids("wait") == ["1"]
            kit.redis.hdel(kit.base + "meta", "concurrency")
            await queue.add("b")
            await told.finished(2)
        else:
            await kit.drain(nothing, 1)


class TestBatches:
    async def test_one_bad_settlement_harms_no_other(self, kit: Kit, exchange: Any) -> None:
        """Each job of a call gets its own code."""
        await kit.queue().add_many(("n", n) for n in range(5))
        calls = exchange()
        jobs = (await calls.run([], 5)).taken
        kit.redis.delete(f"{kit.base}2:lock")
        kit.redis.set(f"{kit.base}3:lock", "somebody else", px=5_000)
        kit.redis.delete(f"{kit.base}4")
        kit.redis.lrem(kit.base + "active", 0, "5")

        reply = await calls.run([JobSettlement(job, Completed(b"1")) for job in jobs], 0)

        assert reply.codes == [0, -2, -6, -1, -3]
        assert list(kit.zset("completed")) == ["1"]
        for job_id in ("2", "3", "4", "5"):
            kit.redis.delete(f"{kit.base}{job_id}", f"{kit.base}{job_id}:lock")
            kit.redis.lrem(kit.base + "active", 0, job_id)

    @pytest.mark.parametrize("priority", [0, 3])
    async def test_what_a_job_frees_is_taken_by_the_call_that_settles_it(
        self, kit: Kit, exchange: Any, priority: int
    ) -> None:
        """An idle queue is not asked twice what it holds, unless a settled job may have put something there."""
        kit.seed("parent", to="waiting-children", score=1, priority=priority)
        kit.seed("child", parentKey=f"{kit.base}parent", parent="{}")
        kit.redis.sadd(f"{kit.base}parent:dependencies", f"{kit.base}child")
        calls = exchange()
        [child] = (await calls.run([], 5)).taken

        reply = await calls.run([JobSettlement(child, Completed(b"1"))], 5)

        assert [job.id for job in reply.taken] == ["parent"]
        assert not kit.has("pc")
        await calls.run([JobSettlement(job, Completed(b"1")) for job in reply.taken], 0)

    async def test_settle_and_take_is_one_call(self, kit: Kit) -> None:
        """At concurrency 1 that is one round trip per job."""
        await kit.queue().add_many(("n", n) for n in range(50))
        told = await kit.work(nothing)
        await told.wait("completed", 5)
        kit.reset_statistics()
        before = len(told.of("completed"))

        await told.wait("completed", 50)

        assert kit.script_calls() <= 50 - before + 2

    async def test_many_that_end_together_are_settled_together(self, kit: Kit) -> None:
        """Group commit: what finished while a call was in flight leaves with the next one."""
        gate = Gate()
        await kit.queue().add_many(("n", n) for n in range(90))
        told = await kit.work(gate, concurrency=90)
        await gate.reached(90)
        kit.reset_statistics()

        gate.open()
        await told.finished(90)

        assert kit.script_calls() <= 8

    async def test_a_retry_and_a_return_leave_the_marker_for_others(self, kit: Kit, exchange: Any) -> None:
        """Whoever leaves work behind leaves the marker set, also when it takes nothing itself."""
        job = await kit.queue().add("a", priority=3)
        calls = exchange()
        taken = (await calls.run([], 1)).taken
        kit.redis.delete(kit.base + "marker")

        await calls.run([JobSettlement(taken[0], Waiting())], 0)

        assert kit.marker() == {"0": 0}
        assert list(kit.zset("prioritized")) == [job.id]
