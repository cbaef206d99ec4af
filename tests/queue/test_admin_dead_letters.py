"""Dead letters in bulk: redrive and discard by filter, who did it, the sweep, and what retention spares."""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bullpen._kernel.keep import KeepJobs
from bullpen.errors import DeadLetterNotFound, InvalidOption
from bullpen.ports.dead_letters import DeadLetterFilter, RedriveReport
from bullpen.queue import Job, JobState, NewJob, Queue
from bullpen.queue.dead_letters.sweep import Sweeper
from tests.queue._kit import Failing, Kit, load, nothing

HOUR_MS = 3_600_000


async def fail_as_told(job: Job) -> None:
    raise RuntimeError(job.data["error"] if isinstance(job.data, dict) and "error" in job.data else "boom")


async def bury(kit: Kit, *jobs: NewJob, **worker: Any) -> Queue:
    """A queue whose jobs have all failed, each with its dead letter."""
    queue = kit.queue(attempts=1)
    await queue.add_many(jobs)
    await kit.drain(fail_as_told, len(jobs), dead_letters=True, **worker)
    return queue


def seed_failed(kit: Kit, job_id: str, finished_ms: int, **fields: Any) -> None:
    """A job that a worker of another client failed."""
    stored = {"finishedOn": finished_ms, "failedReason": "no such user", "ats": 2, "atm": 2, **fields}
    kit.seed(job_id, to="failed", score=finished_ms, stacktrace='["first","second"]', **stored)


def letters(kit: Kit) -> list[str]:
    return [raw.decode() for raw in reversed(kit.command("LRANGE", f"bull:{kit.name}-dlq:wait", 0, -1))]


class TestBulk:
    @pytest.mark.requirement("X-40", "X-5")
    async def test_only_what_matches_goes_back(self, kit: Kit) -> None:
        queue = await bury(
            kit,
            NewJob("charge", {"error": "Timeout after 5 s"}, {"job_id": "a"}),
            NewJob("charge", {"error": "card declined"}, {"job_id": "b"}),
            NewJob("mail", {"error": "timeout"}, {"job_id": "c"}),
        )
        dead = queue.dead_letters

        found = [letter.job_id async for letter in dead.find(DeadLetterFilter(error="TIMEOUT"))]
        report = await dead.redrive_all(DeadLetterFilter(name="charge", error="timeout"))

        assert found == ["a", "c"]
        assert report == RedriveReport(examined=3, matched=1, done=1)
        assert kit.ids("wait") == ["a"]
        assert [letter.job_id for letter in await dead.list()] == ["b", "c"]

    @pytest.mark.requirement("X-40")
    async def test_causes_and_instants_are_filters_too(self, kit: Kit) -> None:
        queue = await bury(kit, NewJob("job", {}, {"job_id": "a"}))
        now = datetime.now(UTC)
        kit.redis.hset(f"bull:{kit.name}-dlq:foreign", mapping={"name": "x", "data": '{"failedAt":"never"}'})
        kit.redis.lpush(f"bull:{kit.name}-dlq:wait", "foreign")

        async def found(**where: Any) -> int:
            return len([letter async for letter in queue.dead_letters.find(DeadLetterFilter(**where))])

        hour = timedelta(hours=1)
        assert await found() == 2
        assert await found(cause="exhausted") == 1 and await found(cause="poison") == 0
        assert await found(failed_after=now - hour, failed_before=now + hour) == 1
        assert await found(failed_after=now + hour) == 0 and await found(failed_before=now - hour) == 0

    @pytest.mark.requirement("X-40")
    async def test_a_dry_run_counts_and_changes_nothing(self, kit: Kit) -> None:
        queue = await bury(kit, *[NewJob("job")] * 5)

        report = await queue.dead_letters.redrive_all(dry_run=True)

        assert report == RedriveReport(examined=5, matched=5, is_dry_run=True)
        assert await queue.dead_letters.depth() == 5 and kit.ids("wait") == []

    @pytest.mark.many
    @pytest.mark.requirement("X-40", "Q-65")
    async def test_hundreds_go_back_and_progress_is_told(self, kit: Kit) -> None:
        queue = await bury(kit, *[NewJob("job", n) for n in range(450)], concurrency=50)
        told: list[RedriveReport] = []

        async def remember(report: RedriveReport) -> None:
            told.append(report)

        report = await queue.dead_letters.redrive_all(limit=420, on_progress=remember)

        assert (report.done, await queue.dead_letters.depth()) == (420, 30)
        assert [one.done for one in told] == [*range(50, 401, 50), 420]
        assert len(kit.ids("wait")) == 420

    @pytest.mark.requirement("X-40")
    async def test_the_rate_is_kept(self, kit: Kit) -> None:
        queue = await bury(kit, *[NewJob("job")] * 9)
        seen: list[float] = []

        def note(_: RedriveReport) -> None:
            seen.append(time.monotonic())

        began = time.monotonic()
        await queue.dead_letters.redrive_all(rate=25, on_progress=note)

        assert len(kit.ids("wait")) == 9
        assert len(seen) >= 5  # two at a time, every 80 ms
        assert all(at - began >= step * 0.08 - 0.005 for step, at in enumerate(seen[:5])), seen

    @pytest.mark.requirement("X-40")
    async def test_what_cannot_go_back_is_named_and_stops_nobody(self, kit: Kit) -> None:
        queue = await bury(kit, *[NewJob("job", {}, {"job_id": name}) for name in "abc"])
        kit.redis.hset(f"bull:{kit.name}-dlq:foreign", mapping={"name": "x", "data": "[]"})
        kit.redis.lpush(f"bull:{kit.name}-dlq:wait", "foreign")
        kit.redis.zrem(f"{kit.base}failed", "b")
        kit.redis.lpush(f"{kit.base}wait", "b")

        report = await queue.dead_letters.redrive_all()

        assert (report.matched, report.done) == (4, 2)
        skipped = dict(report.skipped)
        assert skipped.keys() == {"dl-b-1", "foreign"}
        assert "is waiting, so it was not redriven" in skipped["dl-b-1"] and "names no job" in skipped["foreign"]

    @pytest.mark.requirement("X-5")
    async def test_discarding_in_bulk_needs_a_filter_and_leaves_the_failed_jobs(self, kit: Kit) -> None:
        queue = await bury(kit, NewJob("keep"), NewJob("drop"), NewJob("drop"))

        rehearsal = await queue.dead_letters.discard_all(DeadLetterFilter(name="drop"), dry_run=True)
        report = await queue.dead_letters.discard_all(DeadLetterFilter(name="drop"))

        assert (rehearsal.matched, rehearsal.done, report.done) == (2, 0, 2)
        assert letters(kit) == ["dl-1-1"]
        assert (await queue.counts()).failed == 3

    async def test_filters_and_options_are_checked(self, kit: Kit) -> None:
        for wrong in ({"name": ""}, {"error": 5}, {"cause": ""}, {"failed_after": "yesterday"}):
            with pytest.raises(InvalidOption, match=next(iter(wrong))):
                DeadLetterFilter(**wrong)
        with pytest.raises(InvalidOption, match="failed_before: expected an aware datetime"):
            DeadLetterFilter(failed_before=datetime(2026, 1, 1))  # noqa: DTZ001 - the mistake under test
        for options in ({"rate": 0}, {"rate": True}, {"limit": 0}):
            with pytest.raises(InvalidOption, match=next(iter(options))):
                await kit.queue().dead_letters.redrive_all(**options)
        with pytest.raises(InvalidOption, match="start"):
            await kit.queue().dead_letters.list(start=-1)


class TestRecord:
    @pytest.mark.requirement("X-40")
    async def test_who_redrove_a_job_and_when_stays_with_it(self, kit: Kit) -> None:
        """On the job, and in the dead letter of its next failure."""
        queue = await bury(kit, NewJob("job", {}, {"job_id": "a"}))
        before = kit.server_ms()
        await queue.dead_letters.redrive("dl-a-1", by="ada")
        await kit.drain(fail_as_told, 1, dead_letters=True)
        [letter] = await queue.dead_letters.list()
        await queue.dead_letters.redrive(letter.id)

        first, second = load(kit.fields("a")["bpredriven"])

        assert (first["by"], first["entry"]) == ("ada", "dl-a-1")
        assert before <= first["at"] <= second["at"] <= kit.server_ms()
        assert "@" in second["by"] and second["entry"] == "dl-a-2"
        assert letter.redriven == [first]

    @pytest.mark.requirement("X-40", "X-30")
    async def test_a_job_that_retention_took_is_rebuilt_with_its_history_and_its_fence(self, kit: Kit) -> None:
        """A fence that began again at 1 would let the writes of an old run pass."""
        queue = await bury(kit, NewJob("job", {"n": 1}, {"job_id": "a", "priority": 4}))
        await queue.dead_letters.redrive("dl-a-1", by="ada")
        await kit.drain(fail_as_told, 1, dead_letters=True)
        await queue.remove("a")

        await queue.dead_letters.redrive("dl-a-2", by="bob")
        rebuilt = kit.fields("a")
        runs: list[Job] = []

        async def remember(job: Job) -> None:
            runs.append(job)

        await kit.drain(remember, 1)

        assert [note["by"] for note in load(rebuilt["bpredriven"])] == ["ada", "bob"]
        assert (runs[0].fence, runs[0].data, runs[0].priority) == (3, {"n": 1}, 4)
        assert await queue.dead_letters.depth() == 0

    @pytest.mark.requirement("X-40")
    async def test_the_record_is_bounded(self, kit: Kit) -> None:
        queue = await bury(kit, NewJob("job", {}, {"job_id": "a"}))
        notes = ",".join(f'{{"at":{n},"by":"n{n}","entry":"e"}}' for n in range(20))
        kit.redis.hset(f"{kit.base}a", "bpredriven", f"[{notes}]")

        await queue.dead_letters.redrive("dl-a-1", by="ada")

        stored = load(kit.fields("a")["bpredriven"])
        assert len(stored) == 20 and (stored[0]["by"], stored[-1]["by"]) == ("n1", "ada")

    async def test_a_broken_record_is_started_anew_and_a_name_must_be_text(self, kit: Kit) -> None:
        queue = await bury(kit, NewJob("job", {}, {"job_id": "a"}))
        kit.redis.hset(f"{kit.base}a", "bpredriven", "[{broken}]")

        with pytest.raises(InvalidOption, match="by: expected non-empty text"):
            await queue.dead_letters.redrive("dl-a-1", by="")
        await queue.dead_letters.redrive("dl-a-1", by="ada")

        assert [note["by"] for note in load(kit.fields("a")["bpredriven"])] == ["ada"]

    @pytest.mark.requirement("X-40", "X-42")
    async def test_an_entry_that_somebody_works_on_can_be_redriven_without_a_trace(self, kit: Kit) -> None:
        """A worker on the dead-letter queue, such as an alerting service, moves entries out of `wait`."""
        queue = await bury(kit, NewJob("job", {}, {"job_id": "a"}))
        await kit.drain(nothing, 1, queue=f"{kit.name}-dlq")

        await queue.dead_letters.redrive("dl-a-1")

        assert kit.ids("wait") == ["a"]
        with pytest.raises(DeadLetterNotFound):
            await queue.dead_letters.redrive("dl-a-1")


class TestSweep:
    @pytest.mark.requirement("X-51", "X-5", "X-105", "X-106")
    async def test_a_job_that_another_client_failed_gets_its_dead_letter(self, kit: Kit) -> None:
        now = kit.server_ms()
        seed_failed(kit, "theirs", now - 5_000, data='{"runId":"r-1"}', timestamp=7, priority=3)
        seed_failed(kit, "with:two:colons", now - 4_000)
        queue = kit.queue()

        written = await queue.dead_letters.sweep()

        assert written == 2
        letter, colons = await queue.dead_letters.list()
        assert (letter.id, letter.job_id, letter.data) == ("dl-theirs-2", "theirs", {"runId": "r-1"})
        assert (letter.error_message, letter.error_stack) == ("no such user", "second")
        assert (letter.attempts_made, letter.cause, letter.entry["runId"]) == (2, None, "r-1")
        assert letter.failed_at == datetime.fromtimestamp((now - 5_000) / 1000, UTC).isoformat(
            timespec="milliseconds"
        ).replace("+00:00", "Z")
        assert colons.id == "dl-with%3Atwo%3Acolons-2"
        assert kit.fields("theirs")["bpdl"] == "dl-theirs-2"
        assert await queue.dead_letters.sweep() == 0
        assert await queue.dead_letters.redrive(letter.id) == "theirs"

    @pytest.mark.requirement("X-51")
    async def test_a_failure_after_a_retry_by_another_client_is_a_new_one(self, kit: Kit) -> None:
        """Node's retry leaves our field standing; what it names is the letter of an earlier failure."""
        seed_failed(kit, "a", kit.server_ms(), bpdl="dl-a-1", ats=2)

        assert await kit.queue().dead_letters.sweep() == 1

        assert letters(kit) == ["dl-a-2"]

    @pytest.mark.requirement("X-51")
    async def test_a_discarded_letter_is_not_written_again(self, kit: Kit) -> None:
        queue = await bury(kit, NewJob("job", {}, {"job_id": "a"}))
        await queue.dead_letters.discard("dl-a-1")

        assert await queue.dead_letters.sweep() == 0

    @pytest.mark.requirement("X-51")
    async def test_the_failures_of_years_are_not_offered_when_dead_letters_are_switched_on(self, kit: Kit) -> None:
        now = kit.server_ms()
        seed_failed(kit, "old", now - 2 * HOUR_MS)
        seed_failed(kit, "recent", now - HOUR_MS // 2)

        await kit.queue().dead_letters.sweep()

        assert letters(kit) == ["dl-recent-2"]

    @pytest.mark.requirement("X-51")
    async def test_what_failed_while_nobody_swept_is_found_by_the_cursor(self, kit: Kit) -> None:
        now = kit.server_ms()
        kit.redis.hset(f"{kit.base}meta", "bpswept", now - 48 * HOUR_MS)
        seed_failed(kit, "yesterday", now - 24 * HOUR_MS)
        seed_failed(kit, "before", now - 50 * HOUR_MS)

        await kit.queue().dead_letters.sweep()

        assert letters(kit) == ["dl-yesterday-2"]
        assert int(kit.command("HGET", f"{kit.base}meta", "bpswept")) >= now

    @pytest.mark.many
    @pytest.mark.requirement("X-51", "Q-65")
    async def test_thousands_are_looked_at_in_steps(self, kit: Kit) -> None:
        now = kit.server_ms()
        for number in range(1_100):
            seed_failed(
                kit, f"job-{number}", now - number // 400, **({} if number % 5 else {"bpdl": f"dl-job-{number}-2"})
            )

        assert await kit.queue().dead_letters.sweep() == 880

    @pytest.mark.requirement("X-51")
    async def test_one_worker_per_interval_sweeps(self, kit: Kit) -> None:
        queue = kit.queue()
        seed_failed(kit, "a", kit.server_ms())
        sweeper = _sweeper(queue)

        first = await sweeper.sweep(60_000)
        seed_failed(kit, "b", kit.server_ms())
        second = await sweeper.sweep(60_000)

        assert (first, second) == (1, None)

    @pytest.mark.requirement("X-51", "X-106")
    async def test_a_worker_with_dead_letters_sweeps_by_itself(self, kit: Kit) -> None:
        seed_failed(kit, "theirs", kit.server_ms())

        told = await kit.work(nothing, dead_letters=True)
        await kit.until(lambda: letters(kit) == ["dl-theirs-2"], "the letter is there")
        await told.worker.close()

        assert kit.fields("theirs")["bpdl"] == "dl-theirs-2"

    @pytest.mark.requirement("X-51")
    async def test_jobs_that_vanish_or_are_retried_meanwhile_get_no_letter(self, kit: Kit) -> None:
        queue, now = kit.queue(), kit.server_ms()
        for name in ("gone", "retried", "failed-again"):
            seed_failed(kit, name, now)
        sweeper = _sweeper(queue)
        kit.redis.delete(f"{kit.base}gone")
        kit.redis.zrem(f"{kit.base}failed", "gone")
        jobs = {name: kit.command("HGETALL", kit.base + name) for name in ("retried", "failed-again")}
        await queue.retry("retried")
        kit.redis.hset(f"{kit.base}failed-again", "ats", 9)

        assert jobs["retried"] and await sweeper._offer(b"gone") == 0
        assert await sweeper._offer(b"retried") == 0
        assert await sweeper._offer(b"failed-again") == 1

        assert letters(kit) == ["dl-failed-again-9"]


class TestUnwritable:
    """The dead-letter queue has a key of the wrong type: an operator's mistake, or another program's."""

    @pytest.mark.leaves_queue_broken
    @pytest.mark.requirement("W-45", "X-30", "X-51")
    @pytest.mark.parametrize("keep", [False, True], ids=["kept", "removed when failed"])
    async def test_the_job_fails_all_the_same_and_is_kept_for_the_sweep(
        self, kit: Kit, keep: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        kit.redis.set(f"bull:{kit.name}-dlq:wait", "no list")
        queue = kit.queue(attempts=1, remove_on_fail=keep)
        await queue.add_many([NewJob("job")] * 2)

        await kit.drain(fail_as_told, 2, dead_letters=True, concurrency=2)
        failed = list(kit.zset("failed"))
        kit.redis.delete(f"bull:{kit.name}-dlq:wait")
        swept = await queue.dead_letters.sweep()

        assert failed == ["1", "2"] and swept == 2
        assert [record.getMessage() for record in caplog.records if "Failed to send job to DLQ:" in record.getMessage()]
        assert kit.redis.exists(f"bull:{kit.name}-dlq:dl-1-1") == 1

    @pytest.mark.leaves_queue_broken
    @pytest.mark.requirement("X-51")
    async def test_the_cursor_waits_for_what_could_not_be_written(self, kit: Kit) -> None:
        kit.redis.set(f"bull:{kit.name}-dlq:wait", "no list")
        queue = kit.queue()
        seed_failed(kit, "a", kit.server_ms())

        assert await queue.dead_letters.sweep() == 0
        stopped = int(kit.command("HGET", f"{kit.base}meta", "bpswept"))
        kit.redis.delete(f"bull:{kit.name}-dlq:wait")
        assert await queue.dead_letters.sweep() == 1

        assert int(kit.command("HGET", f"{kit.base}meta", "bpswept")) >= stopped
        assert not kit.redis.exists(f"bull:{kit.name}-dlq:dl-a-1")

    @pytest.mark.leaves_queue_broken
    async def test_a_sweep_that_fails_is_told_once_and_tried_again(
        self, kit: Kit, caplog: pytest.LogCaptureFixture
    ) -> None:
        kit.redis.lpush(f"{kit.base}failed", "no sorted set")
        sweeper = _sweeper(kit.queue())

        running = asyncio.ensure_future(sweeper.run(10))
        await kit.until(lambda: "cannot be swept" in caplog.text, "it was told")
        kit.redis.delete(f"{kit.base}failed")
        seed_failed(kit, "a", kit.server_ms())
        await kit.until(lambda: letters(kit) == ["dl-a-2"], "it goes on")
        running.cancel()

        assert caplog.text.count("cannot be swept") == 1

    @pytest.mark.requirement("W-45")
    async def test_a_letter_is_announced_with_job_and_queue(self, kit: Kit, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "bullpen.worker")

        await bury(kit, NewJob("job", {}, {"job_id": "a"}))

        [line] = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Job sent to DLQ")]
        assert "'a'" in line and f"'{kit.name}-dlq'" in line


class TestRetention:
    @pytest.mark.requirement("X-30", "X-51", "W-64")
    @pytest.mark.parametrize(
        "rule", [1, KeepJobs(age_s=1), KeepJobs(count=1, age_s=1)], ids=["by count", "by age", "by both"]
    )
    async def test_a_failed_job_without_its_dead_letter_is_not_evicted(self, kit: Kit, rule: Any) -> None:
        now = kit.server_ms()
        kit.redis.hset(f"{kit.base}meta", mapping={"bpswept": now - 10 * HOUR_MS, "bpsweep": now})
        seed_failed(kit, "unlettered", now - 60_000)
        seed_failed(kit, "lettered", now - 59_000, bpdl="dl-lettered-2")
        seed_failed(kit, "stale", now - 58_000, bpdl="dl-stale-1")
        seed_failed(kit, "ancient", now - 12 * HOUR_MS)
        await kit.queue(attempts=1, remove_on_fail=rule).add("job")

        await kit.drain(fail_as_told, 1, dead_letters=True)

        assert list(kit.zset("failed")) == ["unlettered", "stale", "1"]

    @pytest.mark.requirement("X-30", "W-64")
    async def test_after_the_sweep_they_go(self, kit: Kit) -> None:
        now = kit.server_ms()
        for number in range(5):
            seed_failed(kit, f"theirs-{number}", now - 60_000 + number)
        queue = kit.queue(attempts=1, remove_on_fail=2)
        await queue.dead_letters.sweep()
        await queue.add("job")

        await kit.drain(fail_as_told, 1, dead_letters=True)

        assert list(kit.zset("failed")) == ["theirs-4", "1"]
        assert await queue.dead_letters.depth() == 6

    @pytest.mark.requirement("W-64")
    async def test_without_dead_letters_retention_is_as_ever(self, kit: Kit) -> None:
        seed_failed(kit, "a", kit.server_ms() - 1_000)
        await kit.queue(attempts=1, remove_on_fail=1).add("job")

        await kit.drain(Failing(RuntimeError("boom")), 1)

        assert list(kit.zset("failed")) == ["1"]
        assert await kit.queue().state_of("a") is JobState.UNKNOWN


def _sweeper(queue: Queue) -> Sweeper:
    from bullpen.queue.dead_letters.entry import DeadLetterWriter
    from bullpen.wire.keys import QueueKeys

    keys = queue.keys
    actions = queue._ready()
    writer = DeadLetterWriter(keys, QueueKeys(keys.prefix, keys.dead_letter_name()), actions.clock)
    return Sweeper(actions, keys, writer, clock_offset_ms=0)
