"""Cancelling a job, wherever it is and whoever asks: it ends in one state, with the reason."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from typing import Any

import pytest

from bullpen import sync
from bullpen._kernel import telemetry
from bullpen._kernel.policy import DeadLetterPolicy
from bullpen.errors import InvalidOption, JobCancelled, JobFailed, JobNotFound, JobStateConflict
from bullpen.queue import Cancelled, Job, JobState, NewJob
from bullpen.testing import FaultProxy, RedisServer
from tests.queue import _process_handlers as handlers
from tests.queue._kit import Failing, Gate, Kit, nothing, soon

FOREVER = 3_600_000


class TestBeforeItRuns:
    @pytest.mark.parametrize(
        ("options", "state"),
        [
            ({}, "waiting"),
            ({"delay": FOREVER}, "delayed"),
            ({"priority": 3}, "prioritized"),
            ({"lifo": True}, "waiting"),
        ],
    )
    async def test_it_is_failed_at_once_and_never_runs(self, kit: Kit, options: dict[str, Any], state: str) -> None:
        queue = kit.queue()
        job = await queue.add("a", attempts=5, **options)
        result = asyncio.ensure_future(job.result())

        assert await queue.cancel(job, "not needed") is Cancelled.DONE

        with pytest.raises(JobCancelled, match="was cancelled: not needed") as caught:
            await soon(result)
        assert caught.value.reason == "not needed"
        stored = kit.fields(job.id)
        assert (stored["failedReason"], stored["bpcancel"]) == ("cancelled: not needed", "not needed")
        assert "atm" not in stored
        assert await job.state() is JobState.FAILED
        assert [event["event"] for event in kit.events(job_id=job.id)][-2:] == ["cancelled", "failed"]
        assert kit.events(job_id=job.id)[-1]["prev"] == state
        after = await queue.get_job(job.id)
        assert after is not None and after.cancel_reason == "not needed"
        handler = Failing()
        other = await queue.add("b")
        told = await kit.drain(handler, 1)
        assert told.ids("completed") == [other.id]

    async def test_a_result_asked_for_later_tells_too(self, kit: Kit) -> None:
        job = await kit.queue().add("a")
        await job.cancel()

        with pytest.raises(JobCancelled, match=r"was cancelled$") as caught:
            await soon(job.result())
        assert caught.value.reason == ""
        assert isinstance(caught.value, JobFailed)

    async def test_a_result_is_told_by_the_very_next_event(self, kit: Kit) -> None:
        """Whoever waits for a job that was just added reads from the second event behind the add on."""
        queue = kit.queue()
        for _ in range(50):
            job = await queue.add("a")
            wait = asyncio.ensure_future(job.result())
            await job.cancel("x")
            with pytest.raises(JobCancelled):
                await soon(wait)

    async def test_while_the_queue_is_paused(self, kit: Kit) -> None:
        queue = kit.queue()
        await queue.set_pause_layout("list")
        await queue.pause()
        job = await queue.add("a")

        assert await queue.cancel(job.id) is Cancelled.DONE
        assert (await queue.counts()).waiting == 0

    async def test_twice_changes_nothing(self, kit: Kit) -> None:
        """Also what a repeated call after a lost reply does."""
        queue = kit.queue()
        job = await queue.add("a")
        await queue.cancel(job, "first")
        events = len(kit.events())

        assert await queue.cancel(job, "second") is Cancelled.DONE
        assert (kit.fields(job.id)["bpcancel"], len(kit.events())) == ("first", events)

    async def test_a_finished_job_and_none_at_all_are_refused(self, kit: Kit) -> None:
        queue = kit.queue()
        jobs = await queue.add_many([NewJob("a", None, {"attempts": 1})] * 2)
        await kit.drain(Failing(OSError("away")), 2)

        for job in jobs:
            with pytest.raises(JobStateConflict, match="has finished already"):
                await queue.cancel(job)
        with pytest.raises(JobNotFound):
            await queue.cancel("nobody")
        with pytest.raises(InvalidOption, match="reason"):
            await queue.cancel(jobs[0], 5)  # type: ignore[arg-type]  # the point of the test

    async def test_its_own_retention_holds(self, kit: Kit) -> None:
        queue = kit.queue()
        gone = await queue.add("a", remove_on_fail=True)
        kept = [await queue.add("a", remove_on_fail=2) for _ in range(4)]
        for job in (gone, *kept):
            await queue.cancel(job)

        assert await queue.get_job(gone.id) is None
        assert list(kit.zset("failed")) == [job.id for job in kept[2:]]

    async def test_its_deduplication_id_is_free_again(self, kit: Kit) -> None:
        kit.seed("7", deid="once")
        kit.command("SET", kit.base + "de:once", "7")

        await kit.queue().cancel("7")

        assert not kit.has("de:once")

    @pytest.mark.parametrize(("policy", "ends"), [("fpof", "failed"), ("idof", "waiting"), ("", "waiting-children")])
    async def test_a_parent_sees_a_failed_child(self, kit: Kit, policy: str, ends: str) -> None:
        """What becomes of it is the policy of the flow, as for every failure."""
        flag = f', "{policy}": true' if policy else ""
        kit.seed("parent", to="waiting-children", score=1)
        kit.command("SADD", kit.base + "parent:dependencies", kit.base + "child")
        own = f'{{"id": "parent", "queueKey": "bull:{kit.name}"{flag}}}'
        kit.seed("child", parentKey=kit.base + "parent", parent=own)
        queue = kit.queue()

        await queue.cancel("child", "why")

        if policy == "fpof":
            await kit.drain(nothing, 1)
        assert await queue.state_of("parent") == ends
        if policy == "idof":
            assert kit.command("HGETALL", kit.base + "parent:failed") == {
                f"{kit.base}child".encode(): b"cancelled: why"
            }

    async def test_a_parent_may_be_cancelled_while_it_waits(self, kit: Kit) -> None:
        """Its children go on, and their ends wake nobody."""
        kit.seed("parent", to="waiting-children", score=1)
        kit.command("SADD", kit.base + "parent:dependencies", kit.base + "child")
        kit.seed("child", parentKey=kit.base + "parent", parent=f'{{"id": "parent", "queueKey": "bull:{kit.name}"}}')
        queue = kit.queue()

        assert await queue.cancel("parent") is Cancelled.DONE
        told = await kit.drain(nothing, 1)

        assert told.ids("completed") == ["child"]
        assert await queue.state_of("parent") is JobState.FAILED

    async def test_the_next_job_of_a_scheduler_is_refused(self, kit: Kit) -> None:
        """Nobody would make another one."""
        kit.seed("repeat:daily:5000", to="delayed", score=5_000 * 4096, rjk="daily", opts='{"repeat":{"every":5000}}')
        kit.command("ZADD", kit.base + "repeat", 5_000, "daily")
        kit.command("HSET", kit.base + "repeat:daily", "name", "x", "every", "5000")

        with pytest.raises(JobStateConflict, match="scheduler"):
            await kit.queue().cancel("repeat:daily:5000")

        kit.command("DEL", kit.base + "repeat", kit.base + "repeat:daily", kit.base + "delayed")
        kit.command("DEL", kit.base + "repeat:daily:5000")

    async def test_one_that_is_put_back_runs_as_if_nothing_had_been(self, kit: Kit) -> None:
        queue = kit.queue()
        job = await queue.add("a")
        await queue.cancel(job, "by mistake")

        await queue.retry(job.id)
        told = await kit.drain(nothing, 1)

        assert told.ids("completed") == [job.id]
        assert "bpcancel" not in kit.fields(job.id)


class TestWhileItRuns:
    async def test_an_async_handler_gets_cancelled_error_and_its_result_the_reason(self, kit: Kit) -> None:
        """From any queue object, in any process: the worker reads the request."""
        gate = Gate()
        queue = kit.queue()
        job = await queue.add("a", attempts=5)
        told = await kit.work(gate)
        running = await gate.reached()

        assert await queue.cancel(job, "stop it") is Cancelled.REQUESTED

        with pytest.raises(JobCancelled, match="stop it"):
            await soon(job.result())
        assert [one.id for one in gate.cancelled] == [job.id]
        assert (running.cancelled, running.cancel_reason) == (True, "stop it")
        await told.finished(1)
        assert told.of("failed")[0][1] == "cancelled: stop it"
        stored = kit.fields(job.id)
        assert (stored["failedReason"], stored["atm"], "defa" in stored) == ("cancelled: stop it", "1", False)
        assert kit.ids("active") == []

    async def test_it_is_heard_within_half_a_second_and_not_by_the_renewal(self, kit: Kit) -> None:
        """The renewal of a lock of ten minutes comes every two and a half: only the request can have told."""
        gate = Gate()
        job = await kit.queue().add("a")
        told = await kit.work(gate, lock=600_000)
        await gate.reached()

        await job.cancel()
        await told.finished(1, within_s=30)

        assert told.of("failed")[0][1] == "cancelled"

    async def test_a_plain_function_sees_it_and_its_value_is_dropped(self, kit: Kit) -> None:
        started = threading.Event()

        def handle(job: Job) -> str:
            started.set()
            while not job.cancelled:
                time.sleep(0.005)
            return f"stopped: {job.cancel_reason}"

        job = await kit.queue().add("a")
        told = await kit.work(handle)
        await asyncio.to_thread(started.wait)
        await job.cancel("why not")

        with pytest.raises(JobCancelled, match="why not"):
            await soon(job.result())
        await told.finished(1)
        assert "returnvalue" not in kit.fields(job.id)

    async def test_the_worker_itself_cancels_at_once(self, kit: Kit) -> None:
        gate = Gate()
        jobs = await kit.queue().add_many([("a", None)] * 3)
        told = await kit.work(gate, concurrency=2)
        await gate.reached(2)

        assert await told.worker.cancel_job(jobs[2], "waits") is Cancelled.DONE
        assert await told.worker.cancel_job(jobs[0].id, "runs") is Cancelled.REQUESTED
        assert gate.entered[0].cancelled
        await told.finished(1)
        assert await told.worker.cancel_all_jobs("all") == 1
        await told.finished(2)

        stored = [kit.fields(job.id)["failedReason"] for job in jobs]
        assert stored == ["cancelled: runs", "cancelled: all", "cancelled: waits"]
        assert await told.worker.cancel_all_jobs() == 0

    async def test_only_the_run_that_was_meant_is_cancelled(self, kit: Kit) -> None:
        """A request names the lock: what another client put back and took again is a new run."""
        gate = Gate()
        job = await kit.queue().add("a")
        told = await kit.work(gate)
        await gate.reached()
        kit.command("XADD", kit.base + "bp:cancel:asked", "*", "job", job.id, "token", "other", "reason", "old")
        kit.command("PEXPIRE", kit.base + "bp:cancel:asked", 60_000)
        probe = await kit.queue().add("b")
        told.worker.concurrency = 2
        await gate.reached(2)
        await probe.cancel()

        await told.finished(1)

        assert told.ids("failed") == [probe.id]
        gate.open()
        await told.finished(2)

    async def test_a_handler_that_ends_first_has_ended(self, kit: Kit) -> None:
        """Exactly one state, whichever comes first; many times, because it is a race."""
        queue = kit.queue()

        async def handle(job: Job) -> str:
            await asyncio.sleep(0)
            return "done"

        told = await kit.work(handle, concurrency=10)
        ends: list[str] = []

        async def one() -> None:
            job = await queue.add("a")
            try:
                await job.cancel("race")
            except (JobStateConflict, JobNotFound):
                pass
            try:
                ends.append(await soon(job.result()))
            except JobCancelled:
                ends.append("cancelled")

        await asyncio.gather(*(one() for _ in range(100)))

        assert set(ends) <= {"done", "cancelled"}
        counts = await queue.counts()
        assert (counts.completed, counts.failed) == (ends.count("done"), ends.count("cancelled"))
        assert counts.completed + counts.failed == 100
        assert (counts.active, counts.pending) == (0, 0)
        assert told.of("error") == []

    async def test_an_attempt_that_fails_first_is_the_last(self, kit: Kit) -> None:
        """It goes back in line and not into its backoff, and whoever takes it fails it."""
        handler = Failing(OSError("own"), value="ran again")
        job = await kit.queue().add("a", attempts=5, backoff=FOREVER)

        async def handle(job: Job) -> Any:
            # Asked in the moment before it fails: its worker has not read that yet.
            kit.command("HSET", kit.base + job.id, "defa", "cancelled: late", "bpcancel", "late")
            return await handler(job)

        told = await kit.drain(handle, 1)

        assert (handler.runs, told.of("failed")[0][1]) == (1, "cancelled: late")
        with pytest.raises(JobCancelled, match="late"):
            await soon(job.result())

    async def test_the_wish_outlives_the_worker(self, kit: Kit) -> None:
        """Its worker dies before it reads the request: whoever takes the job then does not run it."""
        handler = Failing()
        kit.seed("7", to="active", ats=1)
        queue = kit.queue()

        assert await queue.cancel("7", "gone") is Cancelled.REQUESTED
        kit.command("SADD", kit.base + "stalled", "7")
        told = await kit.work(handler, stalled_interval=50, lock=300)
        await told.finished(1)

        assert (handler.runs, told.of("failed")[0][1]) == (0, "cancelled: gone")

    @pytest.mark.cuts_wakeups
    async def test_the_renewal_finds_it_when_the_request_is_lost_and_counts_that(self, kit: Kit) -> None:
        gate = Gate()
        job = await kit.queue().add("a")
        told = await kit.work(gate, lock=2_000)
        await gate.reached()
        before = telemetry.late_wakeups().get("cancels", 0)

        kit.command("HSET", kit.base + job.id, "defa", "cancelled: lost", "bpcancel", "lost")
        await told.finished(1)

        assert told.of("failed")[0][1] == "cancelled: lost"
        assert telemetry.late_wakeups()["cancels"] == before + 1
        await kit.until(lambda: kit.redis.hget(kit.base + "meta", "bplatecan"), "it is noted")

    async def test_short_jobs_read_no_requests(self, kit: Kit) -> None:
        """The hot path pays nothing: only a job that runs longer than a turn of the keepalive makes it read."""
        await kit.queue().add_many([("a", None)] * 200)
        kit.reset_statistics()

        await kit.drain(nothing, 200, concurrency=5)

        stats: Any = kit.redis.info("commandstats")
        assert int(stats.get("cmdstat_xread", {"calls": 0})["calls"]) <= 1

    async def test_a_closing_worker_ends_it_as_cancelled_and_does_not_give_it_back(self, kit: Kit) -> None:
        ending = asyncio.Event()

        async def handle(job: Job) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ending.set()
                await asyncio.sleep(0.05)

        job = await kit.queue().add("a")
        told = await kit.work(handle)
        await told.wait("active")
        await told.worker.cancel_job(job)
        await soon(ending.wait())
        await soon(told.worker.close(0))

        assert await job.state() is JobState.FAILED
        assert kit.fields(job.id)["failedReason"] == "cancelled"


@pytest.mark.measures_children
class TestInChildProcesses:
    async def test_a_plain_function_gets_cancelled_error_and_may_clean_up(self, kit: Kit, tmp_path: Any) -> None:
        marker = tmp_path / "cleaned"
        job = await kit.queue().add("a", {"file": str(marker)})
        told = await kit.work(handlers.cleaning_up, processes=True)
        await kit.until(lambda: (tmp_path / "cleaned.started").exists(), "the handler runs")

        await job.cancel("enough")
        await told.finished(1)

        assert told.of("failed")[0][1] == "cancelled: enough"
        assert marker.read_text() == "CancelledError True enough"
        assert await job.logs() == ["cleaning up"]
        # The child came back in time and serves the next job.
        after = await kit.queue().add("b", {"file": None})
        assert await soon(after.result()) == int((tmp_path / "cleaned.started").read_text())

    async def test_an_async_function_too(self, kit: Kit, tmp_path: Any) -> None:
        marker = tmp_path / "cleaned"
        job = await kit.queue().add("a", {"file": str(marker)})
        told = await kit.work(handlers.cleaning_up_async, processes=True)
        await kit.until(lambda: (tmp_path / "cleaned.started").exists(), "the handler runs")

        await job.cancel("enough")
        await told.finished(1)

        assert marker.read_text() == "CancelledError True enough"
        assert told.of("failed")[0][1] == "cancelled: enough"

    @pytest.mark.parametrize("handler", [handlers.chatty, handlers.chatty_async])
    async def test_in_the_middle_of_a_question_to_its_worker(self, kit: Kit, tmp_path: Any, handler: Any) -> None:
        """It may be anywhere: before the question, waiting for the answer, behind it. Nobody has to be killed."""
        told = await kit.work(handler, processes=True)
        pids = set()
        for number in range(8):
            job = await kit.queue().add("a", {"file": str(tmp_path / str(number))})
            await kit.until((tmp_path / f"{number}.started").exists, "the handler runs")
            await told.worker.cancel_job(job, "enough")
            await told.finished(number + 1)
            assert (tmp_path / str(number)).read_text() == "cleaned"
            pids.add((tmp_path / f"{number}.started").read_text())

        assert {reason for _, reason in told.of("failed")} == {"cancelled: enough"}
        assert len(pids) == 1

    async def test_one_that_does_not_listen_is_killed(
        self, kit: Kit, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """SIGTERM, a moment, SIGKILL: code that holds the interpreter ends too."""
        monkeypatch.setattr("bullpen.worker.children.pool._END_WITHIN_S", 0.2)
        started = tmp_path / "started"
        job = await kit.queue().add("a", {"file": str(started)})
        told = await kit.work(handlers.deaf, processes=True)
        await kit.until(lambda: started.exists(), "the handler runs")
        pid = int(started.read_text())

        await job.cancel()
        await told.finished(1)

        await kit.until(lambda: not _lives(pid), "the child is gone")
        assert told.of("failed")[0][1] == "cancelled"

    async def test_a_signal_to_the_whole_group_is_no_cancellation(self, kit: Kit, tmp_path: Any) -> None:
        """Whether a job may end is the worker's decision."""
        marker = tmp_path / "cleaned"
        job = await kit.queue().add("a", {"file": str(marker)})
        told = await kit.work(handlers.cleaning_up, processes=True)
        await kit.until(lambda: (tmp_path / "cleaned.started").exists(), "the handler runs")

        os.kill(int((tmp_path / "cleaned.started").read_text()), signal.SIGTERM)
        await job.cancel("now")
        await told.finished(1)

        assert told.of("failed")[0][1] == "cancelled: now"


class TestDeadLetters:
    @pytest.mark.parametrize("runs", [True, False])
    async def test_a_cancelled_job_leaves_none(self, kit: Kit, runs: bool) -> None:
        """Somebody wanted it: nobody needs to look at it. The sweep agrees."""
        queue, gate = kit.queue(), Gate()
        job = await queue.add("a")
        told = await kit.work(gate, dead_letters=True) if runs else None
        if told is not None:
            await gate.reached()
        await queue.cancel(job)
        if told is None:
            told = await kit.work(gate, dead_letters=True)
            other = await queue.add("b", attempts=1)
            await gate.reached()
            await told.worker.cancel_job(other)
        await told.finished(1)
        await told.worker.close()

        assert await queue.dead_letters.list() == []

    async def test_unless_it_is_asked_for(self, kit: Kit) -> None:
        queue, gate = kit.queue(), Gate()
        running, waiting = await queue.add("a"), await queue.add("b")
        await queue.cancel(waiting, "early")
        policy = DeadLetterPolicy(store="queue", cancelled=True)
        kit.command("HSET", kit.base + "meta", "bpswept", kit.server_ms() - 1_000)
        told = await kit.work(gate, dead_letters=policy)
        await gate.reached()
        await told.worker.cancel_job(running, "late")
        await told.finished(1)

        await kit.until(lambda: kit.redis.llen(f"bull:{kit.name}-dlq:wait") == 2, "both have a letter")
        found = await queue.dead_letters.list()
        assert {letter.job_id: letter.cause for letter in found} == {running.id: "cancelled", waiting.id: None}

    async def test_a_mark_that_another_client_left_takes_no_letter_away(self, kit: Kit) -> None:
        """Node puts a cancelled job back and leaves our field; then the job fails by itself, in a worker of Node's."""
        now = kit.server_ms()
        for job_id, reason in (("own", "boom"), ("was", "cancelled: enough")):
            kit.seed(job_id, to="failed", score=now, ats=1, bpcancel="enough", failedReason=reason, finishedOn=now)
        kit.command("HSET", kit.base + "meta", "bpswept", now - 1_000)

        await kit.work(nothing, dead_letters=True)
        await kit.until(lambda: kit.redis.llen(f"bull:{kit.name}-dlq:wait") == 1, "one has a letter")

        assert [letter.job_id for letter in await kit.queue().dead_letters.list()] == ["own"]


class TestElsewhere:
    def test_the_blocking_queue_cancels_too(self, redis_url: str, queue_name: str) -> None:
        with sync.Queue(queue_name, connection=redis_url) as queue:
            job = queue.add("a")

            assert job.cancel("blocking") is Cancelled.DONE
            with pytest.raises(JobCancelled, match="blocking"):
                job.result(timeout=10_000)
            with pytest.raises(JobNotFound):
                queue.cancel("nobody")

    async def test_a_lost_reply_is_asked_for_again(self, kit: Kit, redis_server: RedisServer) -> None:
        """The first copy did it; the second finds it done, or the job gone by its own rule."""
        job = await kit.queue().add("a", remove_on_fail=True)
        kept = await kit.queue().add("b")
        with FaultProxy(redis_server) as proxy:
            queue = kit.queue(connection=proxy.url)
            await queue.counts()
            for one in (job, kept):
                fault = proxy.lose_reply()
                assert await queue.cancel(one, "lost") is Cancelled.DONE
                assert fault.count == 1
            await queue.close()

        assert await kit.queue().get_job(job.id) is None
        assert kit.fields(kept.id)["failedReason"] == "cancelled: lost"


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
