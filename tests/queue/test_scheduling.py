"""Schedulers of our own: made, changed, paused, run and removed, with exactly one job to come at every moment."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bullpen import KeepJobs, sync
from bullpen.errors import InvalidOption, JobStateConflict, SchedulerNotFound
from bullpen.ops.metrics import WorkerMetrics
from bullpen.queue import Job, JobState, Queue
from bullpen.testing import FaultProxy, RedisServer
from bullpen.wire.scripts import SCRIPTS
from tests.queue._kit import Failing, Gate, Kit, nothing, soon
from tests.queue.test_codec import codec

HOUR = 3_600_000


def to_come(kit: Kit, scheduler_id: str = "s") -> list[str]:
    """Ids of the jobs of a scheduler that have not begun."""
    waiting = [*kit.zset("delayed"), *kit.zset("prioritized"), *kit.ids("wait"), *kit.ids("paused")]
    return [job_id for job_id in waiting if job_id.startswith(f"repeat:{scheduler_id}:")]


def record_of(kit: Kit, scheduler_id: str = "s") -> dict[str, str]:
    return kit.fields(f"repeat:{scheduler_id}")


@pytest.fixture
def proxy(redis_server: RedisServer, kit: Kit) -> Iterator[FaultProxy]:
    for script in SCRIPTS.values():
        kit.command("SCRIPT", "LOAD", script.body)
    with FaultProxy(redis_server) as opened:
        yield opened


class TestUpsert:
    async def test_it_stores_a_scheduler_and_its_first_job(self, kit: Kit) -> None:
        queue = kit.queue()

        made = await queue.upsert_scheduler("s", "tick", {"n": 1}, every="1h", attempts=2, priority=3)

        assert (made.id, made.name, made.every_ms, made.iterations, made.data) == ("s", "tick", HOUR, 1, {"n": 1})
        assert to_come(kit) == [made.job_id]
        job = await queue.get_job(made.job_id)
        assert job is not None and (job.name, job.data, job.opts.attempts) == ("tick", {"n": 1}, 2)
        assert await job.state() is JobState.PRIORITIZED
        assert await queue.get_scheduler("s") == made

    async def test_its_jobs_are_named_after_it_unless_it_says_otherwise(self, kit: Kit) -> None:
        assert (await kit.queue().upsert_scheduler("s", cron="@yearly")).name == "s"

    async def test_a_rule_holds_from_its_start_to_its_limit(self, kit: Kit) -> None:
        queue, start = kit.queue(), datetime.now(UTC) + timedelta(days=1)

        made = await queue.upsert_scheduler("s", every=HOUR, start=start, end=start + timedelta(days=1), limit=7)

        assert made.next_ms == made.starts_ms == round(start.timestamp() * 1000)
        assert (made.limit, made.ends_ms) == (7, round((start + timedelta(days=1)).timestamp() * 1000))

    async def test_an_end_that_has_passed_is_refused_by_the_servers_clock(self, kit: Kit) -> None:
        with pytest.raises(InvalidOption, match="end"):
            await kit.queue().upsert_scheduler("s", every=HOUR, end=datetime(2020, 1, 1, tzinfo=UTC))
        assert not kit.has("repeat")

    async def test_the_same_interval_keeps_its_time_and_another_begins_anew(self, kit: Kit) -> None:
        queue = kit.queue()
        first = await queue.upsert_scheduler("s", every=HOUR, offset=5)

        same = await queue.upsert_scheduler("s", "renamed", {"n": 2}, every=HOUR)
        other = await queue.upsert_scheduler("s", every=2 * HOUR)

        assert (same.next_ms, same.name, same.data) == (first.next_ms, "renamed", {"n": 2})
        assert other.next_ms != first.next_ms and abs(other.next_ms - kit.server_ms()) < 10_000
        assert to_come(kit) == [other.job_id]

    async def test_what_no_longer_is_said_is_no_longer_stored(self, kit: Kit) -> None:
        queue = kit.queue()
        await queue.upsert_scheduler("s", None, {"n": 1}, every=HOUR, limit=3, overlap="skip", jitter=5, catch_up=2)

        await queue.upsert_scheduler("s", cron="@yearly")

        assert set(record_of(kit)) == {"name", "ic", "offset", "pattern", "tz", "opts", "bp"}

    async def test_a_job_that_runs_keeps_its_time_and_the_new_one_follows_it(self, kit: Kit) -> None:
        queue, gate = kit.queue(), Gate()
        made = await queue.upsert_scheduler("s", every=HOUR)
        told = await kit.work(gate)
        await gate.reached()

        again = await queue.upsert_scheduler("s", every=HOUR)

        assert again.next_ms == made.next_ms + HOUR
        assert to_come(kit) == [again.job_id]
        gate.open()
        await told.finished()

    async def test_a_time_that_a_stored_job_has_is_passed_over(self, kit: Kit) -> None:
        """Run early by hand, today's job is done; the next upsert must neither fail nor overwrite it."""
        queue = kit.queue()
        today = await queue.upsert_scheduler("s", cron="0 0 1 1 *")
        await queue.run_scheduler("s", early=True)
        await kit.drain(nothing, 1)

        again = await queue.upsert_scheduler("s", cron="0 0 1 1 *")

        assert again.next_ms > today.next_ms
        assert to_come(kit) == [again.job_id]
        assert kit.fields(today.job_id)["returnvalue"] == "null"

    async def test_a_scheduler_whose_times_are_all_taken_is_refused_with_its_reason(self, kit: Kit) -> None:
        queue = kit.queue()
        start = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)
        start_ms = round(start.timestamp() * 1000)
        for number in range(40):
            kit.seed(f"repeat:s:{start_ms + number * 1_000}", to="completed", score=1, finishedOn=1)

        with pytest.raises(JobStateConflict, match="its next 32 times"):
            await queue.upsert_scheduler("s", every=1_000, start=start)

        assert not kit.has("repeat:s")

    @pytest.mark.parametrize("place", ["wait", "paused", "prioritized", "delayed"])
    async def test_the_job_to_come_is_replaced_wherever_it_waits(self, kit: Kit, place: str) -> None:
        """Node leaves it in line while the queue is paused, and makes a second one."""
        queue = kit.queue()
        if place in ("wait", "paused"):
            await queue.pause()
            await queue.set_pause_layout("list" if place == "paused" else "field")
        options: Any = {"prioritized": {"priority": 1}, "delayed": {"offset": 1}}.get(place, {})
        await queue.upsert_scheduler("s", "one", every=HOUR, **options)
        assert to_come(kit) == (kit.ids(place) if place in ("wait", "paused") else [*kit.zset(place)])

        made = await queue.upsert_scheduler("s", "two", every=HOUR, **options)

        assert to_come(kit) == [made.job_id]
        assert kit.fields(made.job_id)["name"] == "two"
        await queue.resume()

    @pytest.mark.parametrize("option", ["delay", "at", "job_id", "timestamp"])
    async def test_an_option_of_one_job_is_refused(self, kit: Kit, option: str) -> None:
        given: Any = {option: 5}
        with pytest.raises(InvalidOption, match=f"{option}: expected an option of a single job"):
            await kit.queue().upsert_scheduler("s", every=1, **given)

    @pytest.mark.parametrize("scheduler_id", ["", "a:17", "a:lock", "a\nb", "x" * 501, 5])
    async def test_an_id_that_would_share_a_key_is_refused(self, kit: Kit, scheduler_id: Any) -> None:
        with pytest.raises(InvalidOption, match="scheduler_id"):
            await kit.queue().upsert_scheduler(scheduler_id, every=1)

    async def test_options_of_jobs_are_as_those_of_add(self, kit: Kit) -> None:
        queue = kit.queue(attempts=7)

        made = await queue.upsert_scheduler("s", every=HOUR, remove_on_complete=KeepJobs(count=5), lifo=True, tm="t")

        opts = json.loads(kit.fields(made.job_id)["opts"])
        assert (opts["attempts"], opts["removeOnComplete"], opts["lifo"], opts["tm"]) == (7, {"count": 5}, True, "t")
        assert json.loads(record_of(kit)["opts"]).items() <= opts.items()

    @pytest.mark.parametrize("torn", [False, True], ids=["dropped", "torn in half"])
    async def test_a_lost_reply_makes_no_second_job(self, kit: Kit, proxy: FaultProxy, torn: bool) -> None:
        """With `immediately` each further call would be another run."""
        queue = kit.queue(connection=proxy.url)
        lost = proxy.lose_reply(SCRIPTS["upsert_scheduler"].sha1, times=2, torn=torn)

        made = await soon(queue.upsert_scheduler("s", cron="@yearly", immediately=True))

        assert lost.count == 2
        assert to_come(kit) == [made.job_id]
        assert [event["event"] for event in kit.events()].count("added") == 1

    @pytest.mark.requirement("X-28")
    async def test_a_hundred_at_once_with_workers_leave_one_job_to_come(self, kit: Kit) -> None:
        ran: list[str] = []

        async def note(job: Job) -> None:
            ran.append(job.id)

        queues = [kit.queue() for _ in range(4)]
        workers = [await kit.work(note, concurrency=5) for _ in range(3)]

        async def change(number: int) -> None:
            options: Any = {"every": 20} if number % 3 else {"cron": "* * * * * *"}
            await queues[number % 4].upsert_scheduler("s", f"n{number}", **options)

        await soon(asyncio.gather(*(change(number) for number in range(100))))
        await queues[0].upsert_scheduler("s", "last", every=HOUR, offset=1)
        for told in workers:
            await told.worker.close()

        assert len(to_come(kit)) == 1
        assert len(ran) == len(set(ran)), "no slot ran twice"


class TestReading:
    async def test_pages_go_both_ways(self, kit: Kit) -> None:
        queue, start = kit.queue(), datetime.now(UTC) + timedelta(days=1)
        for number in range(5):
            await queue.upsert_scheduler(f"s{number}", every=HOUR, start=start + timedelta(hours=number))

        assert [one.id for one in await queue.schedulers(count=2)] == ["s0", "s1"]
        assert [one.id for one in await queue.schedulers(start=1, count=2, descending=True)] == ["s3", "s2"]
        assert await queue.count_schedulers() == 5
        assert await queue.schedulers(start=9) == []

    async def test_the_record_tells_its_next_runs(self, kit: Kit) -> None:
        made = await kit.queue().upsert_scheduler("s", every=HOUR, limit=2, offset=1)

        runs = made.next_runs(5)
        assert [round(run.timestamp() * 1000) for run in runs] == [made.next_ms, made.next_ms + HOUR]


class TestRemove:
    async def test_it_takes_the_job_to_come_with_it(self, kit: Kit) -> None:
        queue = kit.queue()
        made = await queue.upsert_scheduler("s", cron="@yearly")

        assert await queue.remove_scheduler("s") is True
        assert await queue.remove_scheduler("s") is False

        assert to_come(kit) == [] and not kit.has("repeat:s") and not kit.has("repeat")
        assert kit.event_names(made.job_id) == ["added", "delayed", "removed"]

    async def test_a_job_in_line_is_the_last(self, kit: Kit) -> None:
        queue = kit.queue()
        await queue.upsert_scheduler("s", every=10)
        await queue.remove_scheduler("s")

        await kit.drain(nothing, 1)

        assert to_come(kit) == [] and await queue.count_schedulers() == 0

    async def test_a_lost_reply_is_no_failure(self, kit: Kit, proxy: FaultProxy) -> None:
        queue = kit.queue(connection=proxy.url)
        await queue.upsert_scheduler("s", cron="@yearly")
        proxy.lose_reply(SCRIPTS["remove_scheduler"].sha1, times=1)

        assert await soon(queue.remove_scheduler("s")) is True


class TestRunNow:
    @pytest.mark.parametrize("rule", [{"every": HOUR, "offset": 1}, {"cron": "@yearly"}], ids=["every", "cron"])
    async def test_one_more_runs_and_the_regular_times_stay(self, kit: Kit, rule: Any) -> None:
        """Run on Thursday, a report of Monday must still come on Monday."""
        queue = kit.queue()
        made = await queue.upsert_scheduler("s", "tick", {"n": 1}, **rule, attempts=2, priority=3)

        extra = [await queue.run_scheduler("s") for _ in range(3)]
        told = await kit.drain(nothing, 3)

        assert sorted(told.ids("completed")) == sorted(extra) and len(set(extra)) == 3
        assert await queue.get_scheduler("s") == made
        assert to_come(kit) == [made.job_id]
        job = await queue.get_job(extra[0])
        assert job is not None and (job.name, job.data, job.opts.attempts) == ("tick", {"n": 1}, 2)
        assert job.opts.priority == 3

    async def test_one_more_runs_of_one_that_is_paused(self, kit: Kit) -> None:
        queue = kit.queue()
        await queue.upsert_scheduler("s", cron="@yearly")
        await queue.pause_scheduler("s")

        job_id = await queue.run_scheduler("s")

        assert await queue.state_of(job_id) is JobState.WAITING and to_come(kit) == []

    async def test_its_sealed_data_are_sealed_once(self, kit: Kit) -> None:
        """The template holds what a codec sealed; the job and a changed rule must hold the same, not a seal of it."""
        queue, seen = kit.queue(codec=codec()), list[Any]()
        await queue.upsert_scheduler("s", None, {"secret": 1}, every=HOUR, offset=1)

        async def note(job: Job) -> None:
            seen.append(job.data)

        await queue.run_scheduler("s")
        await queue.change_scheduler("s", cron="@yearly")
        await queue.run_scheduler("s", early=True)
        await kit.drain(note, 2, codec=codec())

        assert seen == [{"secret": 1}, {"secret": 1}]

    @pytest.mark.parametrize("early", [None, 1])
    async def test_early_is_yes_or_no(self, kit: Kit, early: Any) -> None:
        with pytest.raises(InvalidOption, match="early: expected True or False"):
            await kit.queue().run_scheduler("s", early=early)

    async def test_a_worker_that_takes_the_job_between_two_reads_ended_nothing(self, kit: Kit) -> None:
        """The record is read, its job runs and ends, and only then its state is asked for."""
        queue = kit.queue()
        before = await queue.upsert_scheduler("s", every=HOUR, offset=1)
        await queue.run_scheduler("s", early=True)
        await kit.drain(nothing, 1)

        assert await queue.why_ended(before) is None

    async def test_a_job_that_was_taken_meanwhile_lets_the_one_after_it_run(
        self, kit: Kit, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        queue = kit.queue()
        before = await queue.upsert_scheduler("s", every=HOUR, offset=1)
        await queue.run_scheduler("s", early=True)
        await kit.drain(nothing, 1)
        reads, read = [before], queue.get_scheduler

        async def read_late(scheduler_id: str) -> Any:
            return reads.pop() if reads else await read(scheduler_id)

        monkeypatch.setattr(queue, "get_scheduler", read_late)

        assert await queue.run_scheduler("s", early=True) == f"repeat:s:{before.next_ms + HOUR}"

    async def test_the_next_one_runs_now_and_the_one_after_it_at_its_time(self, kit: Kit) -> None:
        queue = kit.queue()
        made = await queue.upsert_scheduler("s", every=HOUR, offset=1)

        assert await queue.run_scheduler("s", early=True) == made.job_id
        with pytest.raises(JobStateConflict, match="is due already"):
            await queue.run_scheduler("s", early=True)
        told = await kit.drain(nothing, 1)

        assert told.ids("completed") == [made.job_id]
        assert to_come(kit) == [f"repeat:s:{made.next_ms + HOUR}"]

    async def test_one_that_is_gone_ended_or_paused_says_so(self, kit: Kit) -> None:
        queue = kit.queue()
        with pytest.raises(SchedulerNotFound, match="there is no scheduler 's'") as caught:
            await queue.run_scheduler("s", early=True)
        assert (caught.value.queue, caught.value.scheduler_id) == (kit.name, "s")
        ended = await queue.upsert_scheduler("s", every=1, limit=1)
        await kit.drain(nothing, 1)
        with pytest.raises(JobStateConflict, match="limit of 1 reached"):
            await queue.run_scheduler("s", early=True)
        assert await queue.why_ended(ended) == "limit of 1 reached"
        await queue.upsert_scheduler("p", cron="@yearly")
        await queue.pause_scheduler("p")
        with pytest.raises(JobStateConflict, match="is paused"):
            await queue.run_scheduler("p", early=True)


class TestPause:
    @pytest.mark.parametrize("rule", [{"every": HOUR, "offset": 1}, {"cron": "@yearly"}], ids=["every", "cron"])
    async def test_it_stays_listed_without_a_job_and_goes_on_where_it_was(self, kit: Kit, rule: Any) -> None:
        queue = kit.queue()
        made = await queue.upsert_scheduler("s", "tick", {"n": 1}, **rule, attempts=2, limit=9, priority=4)

        assert await queue.pause_scheduler("s") is True
        assert await queue.pause_scheduler("s") is False

        paused = await queue.get_scheduler("s")
        assert paused is not None and paused.is_paused and paused.next_runs(3) == []
        assert to_come(kit) == [] and paused.next_ms == made.next_ms
        assert await queue.resume_scheduler("s") is True
        assert await queue.resume_scheduler("s") is False
        assert await queue.get_scheduler("s") == made
        assert to_come(kit) == [made.job_id]
        stored = kit.fields(made.job_id)
        assert (stored["name"], stored["data"], stored["priority"]) == ("tick", '{"n":1}', "4")
        opts = json.loads(stored["opts"])
        assert (opts["repeat"]["count"], opts["attempts"], opts["jobId"]) == (1, 2, made.job_id)

    async def test_what_was_missed_meanwhile_is_not_made_up_for(self, kit: Kit) -> None:
        made = await kit.queue().upsert_scheduler("s", every=HOUR, offset=1, catch_up=10)
        await kit.queue().pause_scheduler("s")

        later = kit.queue(clock_offset_ms=5 * HOUR)
        await later.resume_scheduler("s")

        found = await later.get_scheduler("s")
        assert found is not None and (found.next_ms - made.next_ms) % HOUR == 0
        assert 0 < found.next_ms - (kit.server_ms() + 5 * HOUR) <= HOUR

    async def test_paused_while_its_job_is_taken_it_is_advanced_by_nobody(self, kit: Kit) -> None:
        """The moment between take and advance: whatever client took the job, it names another one than the record."""
        queue, gate = kit.queue(), Gate()
        made = await queue.upsert_scheduler("s", every=HOUR, limit=5)
        kit.command("LPOP", kit.base + "wait")
        kit.command("LPUSH", kit.base + "active", made.job_id)
        await queue.pause_scheduler("s")
        kit.command("LREM", kit.base + "active", 1, made.job_id)
        kit.command("LPUSH", kit.base + "wait", made.job_id)
        kit.command("ZADD", kit.base + "marker", 0, "0")

        told = await kit.work(gate.open())
        await told.finished()

        assert to_come(kit) == []
        assert await queue.resume_scheduler("s")
        (job_id,) = to_come(kit)
        assert json.loads(kit.fields(job_id)["opts"])["repeat"]["count"] == 2
        assert record_of(kit)["ic"] == "2"

    async def test_an_upsert_leaves_it_paused_with_the_new_rule(self, kit: Kit) -> None:
        queue = kit.queue()
        await queue.upsert_scheduler("s", every=HOUR)
        await queue.pause_scheduler("s")

        changed = await queue.upsert_scheduler("s", "new", {"n": 2}, every="2h", offset=1)

        assert changed.is_paused and to_come(kit) == []
        await queue.resume_scheduler("s")
        (job_id,) = to_come(kit)
        stored = kit.fields(job_id)
        assert (stored["name"], stored["data"]) == ("new", '{"n":2}')
        assert json.loads(stored["opts"])["repeat"] == {"every": 2 * HOUR, "offset": 1, "count": 1}

    async def test_one_that_had_ended_stays_ended(self, kit: Kit) -> None:
        queue = kit.queue()
        await queue.upsert_scheduler("s", every=1, limit=1)
        await kit.drain(nothing, 1)
        await queue.pause_scheduler("s")

        await queue.resume_scheduler("s")

        assert to_come(kit) == []

    async def test_what_is_not_there_or_has_no_record_says_so(self, kit: Kit) -> None:
        queue = kit.queue()
        kit.redis.zadd(kit.base + "repeat", {"tick:::UTC:5000": 1})
        for act in (queue.pause_scheduler, queue.resume_scheduler):
            with pytest.raises(SchedulerNotFound):
                await act("s")
        with pytest.raises(JobStateConflict, match="an older client made it"):
            await queue.pause_scheduler("tick:::UTC:5000")

    async def test_a_paused_scheduler_can_be_removed(self, kit: Kit) -> None:
        queue = kit.queue()
        await queue.upsert_scheduler("s", every=HOUR)
        await queue.pause_scheduler("s")

        assert await queue.remove_scheduler("s")
        assert not kit.has("repeat:s")


class TestOverlap:
    """A run that is due while the one before has not ended."""

    async def start(self, kit: Kit, overlap: Any, gate: Gate, **more: Any) -> tuple[Queue, Any, Any]:
        queue = kit.queue()
        first = await queue.upsert_scheduler("s", every=HOUR, overlap=overlap, **more)
        told = await kit.work(gate, concurrency=5)
        await gate.reached()
        await queue.run_scheduler("s", early=True)
        return queue, first, told

    async def test_queue_runs_beside_it(self, kit: Kit) -> None:
        gate = Gate()
        _, _, told = await self.start(kit, "queue", gate)

        await gate.reached(2)

        gate.open()
        await told.finished(2)

    @pytest.mark.requirement("X-28")
    async def test_skip_leaves_it_out_and_the_chain_goes_on(self, kit: Kit, caplog: pytest.LogCaptureFixture) -> None:
        gate, metrics = Gate(), WorkerMetrics(list)
        with caplog.at_level(logging.INFO, "bullpen.worker"):
            queue, first, told = await self.start(kit, "skip", gate)
            await told.wait("completed")
        counted = next(one for one in await metrics.collect() if one.name == "bullpen_schedules_skipped_total")
        metrics.close()

        skipped = f"repeat:s:{first.next_ms + HOUR}"
        assert told.ids("completed") == [skipped] and len(gate.entered) == 1
        assert json.loads(kit.fields(skipped)["returnvalue"]) == {"skipped": "overlap"}
        assert [sample.value for sample in counted.samples] == [1]
        assert "is skipped" in caplog.text and "has not ended" in caplog.text
        assert to_come(kit) == [f"repeat:s:{first.next_ms + 2 * HOUR}"]
        gate.open()
        await told.finished(2)
        await queue.run_scheduler("s", early=True)
        await told.finished(3)
        assert len(gate.entered) == 2, "after the end of the first the next one runs"

    @pytest.mark.requirement("X-28")
    async def test_one_waits_for_its_end(self, kit: Kit) -> None:
        gate = Gate()
        _, first, told = await self.start(kit, "one", gate)
        second = f"repeat:s:{first.next_ms + HOUR}"
        await told.wait("returned")

        assert to_come(kit) == [second], "it waits, and none after it does"
        gate.open()
        await told.finished(2)

        assert told.ids("completed") == [first.job_id, second]
        assert to_come(kit) == [f"repeat:s:{first.next_ms + 2 * HOUR}"]

    async def test_it_is_looked_for_once_a_second_however_long_it_waits(self, kit: Kit) -> None:
        """A run must not begin up to 15 s after the end of the one that it waited for."""
        gate = Gate()
        _, first, told = await self.start(kit, "one", gate)

        await told.wait("returned", 2)

        assert kit.fields(f"repeat:s:{first.next_ms + HOUR}")["delay"] == "1000"
        gate.open()
        await told.finished(2)

    async def test_a_run_that_waits_for_its_next_attempt_has_not_ended(self, kit: Kit) -> None:
        queue = kit.queue()
        first = await queue.upsert_scheduler("s", every=HOUR, overlap="skip", attempts=2, backoff=HOUR)
        told = await kit.work(Failing(RuntimeError("later")))
        await told.wait("retrying")

        await queue.run_scheduler("s", early=True)
        await told.finished(1)

        assert told.ids("completed") == [f"repeat:s:{first.next_ms + HOUR}"]
        assert json.loads(kit.fields(told.ids("completed")[0])["returnvalue"]) == {"skipped": "overlap"}


class TestCatchUp:
    """No worker for five hours; then one comes."""

    async def recover(self, kit: Kit, catch_up: Any, **more: Any) -> tuple[int, list[str], int]:
        """The first slot, what ran after the outage, and how many ended."""
        made = await kit.queue().upsert_scheduler("s", every=HOUR, offset=1, catch_up=catch_up, **more)
        ran: list[str] = []

        async def note(job: Job) -> None:
            ran.append(job.id)

        late_ms = made.next_ms - kit.server_ms() + 5 * HOUR + 1_000
        told = await kit.work(note, clock_offset_ms=late_ms)
        due_ms = made.next_ms + 6 * HOUR
        await kit.until(lambda: to_come(kit) == [f"repeat:s:{due_ms}"], "the present")
        await told.worker.close()
        return made.next_ms, ran, len(told.of("completed"))

    async def test_once_makes_up_for_all_with_one_run(self, kit: Kit) -> None:
        first, ran, _ = await self.recover(kit, "once")

        assert ran == [f"repeat:s:{first}"]

    async def test_skip_leaves_them_out(self, kit: Kit) -> None:
        _, ran, ended = await self.recover(kit, "skip")

        assert (ran, ended) == ([], 1)

    async def test_skip_has_a_grace(self, kit: Kit) -> None:
        first, ran, _ = await self.recover(kit, "skip", grace="6h")

        assert ran == [f"repeat:s:{first}"]

    @pytest.mark.parametrize(("most", "hours"), [(3, (3, 4, 5)), (50, (0, 1, 2, 3, 4, 5))])
    async def test_a_number_lets_so_many_of_the_newest_run(self, kit: Kit, most: int, hours: tuple[int, ...]) -> None:
        first, ran, _ = await self.recover(kit, most)

        assert sorted(ran) == [f"repeat:s:{first + hour * HOUR}" for hour in hours]


async def test_jitter_moves_the_job_and_not_its_slot(kit: Kit) -> None:
    queue = kit.queue()
    lateness = []
    for number in range(20):
        made = await queue.upsert_scheduler(f"s{number}", every=HOUR, offset=1, jitter="10m")
        due_ms = kit.zset("delayed")[made.job_id] // 4096
        lateness.append(due_ms - made.next_ms)

    assert all(0 <= late <= 600_000 for late in lateness)
    assert len({round(late) for late in lateness}) > 10
    await queue.run_scheduler("s0", early=True)
    await kit.drain(nothing, 1)
    (following,) = to_come(kit, "s0")
    record = await queue.get_scheduler("s0")
    assert record is not None and following == record.job_id
    assert 0 <= kit.zset("delayed")[following] // 4096 - record.next_ms <= 600_000


async def test_our_retention_holds_for_the_jobs_of_our_schedulers(kit: Kit) -> None:
    """A heartbeat every second must not fill the server, and its producer named no retention."""
    queue = kit.queue()
    made = await queue.upsert_scheduler("s", every=HOUR)
    await kit.drain(nothing, 1)

    (following,) = to_come(kit)
    assert kit.fields(made.job_id)["bp"] == kit.fields(following)["bp"] == "1"


async def test_a_time_that_is_taken_does_not_cut_the_chain(kit: Kit) -> None:
    """A finished job of an earlier scheduler with the same id holds the next time."""
    queue = kit.queue()
    made = await queue.upsert_scheduler("s", every=HOUR)
    kit.seed(f"repeat:s:{made.next_ms + HOUR}", to="completed", score=1, finishedOn=1)

    await kit.drain(nothing, 1)

    assert to_come(kit) == [f"repeat:s:{made.next_ms + 2 * HOUR}"]


async def test_a_tick_costs_the_same_however_many_schedulers_there_are(kit: Kit) -> None:
    queue = kit.queue()

    async def commands_of_a_tick() -> dict[str, int]:
        kit.reset_statistics()
        await queue.run_scheduler("s", early=True)
        await kit.drain(nothing, 1)
        stats: Any = kit.redis.info("commandstats")
        counted = (
            "cmdstat_zadd",
            "cmdstat_zscore",
            "cmdstat_hmget",
            "cmdstat_hset",
            "cmdstat_evalsha",
            "cmdstat_zrange",
        )
        return {name: int(stats[name]["calls"]) for name in counted if name in stats}

    await queue.upsert_scheduler("s", every=HOUR, offset=1, overlap="skip", catch_up=5)
    await commands_of_a_tick()
    few = await commands_of_a_tick()
    pipeline = kit.redis.pipeline(transaction=False)
    for number in range(3_000):
        pipeline.zadd(kit.base + "repeat", {f"other{number}": 4_000_000_000_000 + number})
        pipeline.hset(kit.base + f"repeat:other{number}", mapping={"name": "x", "every": "1000", "ic": "1"})
    pipeline.execute()
    many = await commands_of_a_tick()

    # Idle looks of the worker come and go; the schedulers themselves are nowhere walked over.
    assert all(many[name] <= few[name] + 10 for name in few), (few, many)


class TestBlockingTwin:
    def test_it_makes_reads_lists_and_removes(self, redis_url: str, queue_name: str) -> None:
        with sync.Queue(queue_name, connection=redis_url) as queue:
            made = queue.upsert_scheduler("s", "tick", {"n": 1}, cron="@yearly", tz="Asia/Tokyo", attempts=2)
            queue.upsert_scheduler("t", every="1h", offset="5m", overlap="one")

            assert queue.get_scheduler("s") == made and made.zone == "Asia/Tokyo"
            assert [one.id for one in queue.schedulers()] == ["t", "s"]
            assert [one.id for one in queue.schedulers(descending=True, count=1)] == ["s"]
            assert queue.count_schedulers() == 2
            assert queue.remove_scheduler("s") and not queue.remove_scheduler("s")
            assert queue.get_scheduler("s") is None and len(queue.schedulers()) == 1
            queue.remove_scheduler("t")
            assert queue.schedulers() == []

    def test_it_refuses_what_the_other_refuses(self, redis_url: str, queue_name: str) -> None:
        with sync.Queue(queue_name, connection=redis_url) as queue, pytest.raises(InvalidOption, match="every"):
            queue.upsert_scheduler("s")

    def test_a_lost_reply_makes_no_second_job(self, kit: Kit, proxy: FaultProxy) -> None:
        proxy.lose_reply(SCRIPTS["upsert_scheduler"].sha1, times=1)
        with sync.Queue(kit.name, connection=proxy.url) as queue:
            made = queue.upsert_scheduler("s", cron="@yearly", immediately=True)

        assert to_come(kit) == [made.job_id]
