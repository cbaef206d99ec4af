"""Whatever makes work ready wakes an idle worker at once.

Every worker here sleeps for a minute unless woken, and every test waits for less: what arrives was announced.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bullpen._kernel import telemetry
from bullpen._kernel.backoff import Backoff
from bullpen.errors import PermanentError
from bullpen.queue import Job, NewJob, Queue
from bullpen.testing import FaultProxy, RedisServer
from tests.queue._kit import Failing, Gate, Kit, Told, engine_of, nothing, soon
from tests.queue.test_locks_and_stalls import check_stalled

SLEEP_MS = 60_000


async def idle(kit: Kit, handler: Any = nothing, **options: Any) -> Told:
    """A worker that has looked in vain and now waits for the marker."""
    told = await kit.work(handler, drain_delay=SLEEP_MS, **options)
    await kit.until(
        lambda: any("bzpopmin" in line and told.worker.name in line for line in kit.clients()), "it is idle"
    )
    return told


@pytest.mark.every_loop
class TestReadyWork:
    @pytest.mark.parametrize("options", [{}, {"priority": 5}, {"lifo": True}, {"job_id": "own"}], ids=str)
    async def test_an_add_wakes(self, kit: Kit, options: dict[str, Any]) -> None:
        """The usual way."""
        told = await idle(kit)

        await kit.queue().add("a", **options)

        await told.finished()

    async def test_a_bulk_add_wakes_all_that_are_needed(self, kit: Kit) -> None:
        """One marker wakes one worker; its take leaves the marker for the next."""
        gate = Gate()
        workers = [await idle(kit, gate) for _ in range(4)]

        await kit.queue().add_many(("n", n) for n in range(4))
        await gate.reached(4)

        assert [told.worker.running for told in workers] == [1, 1, 1, 1]
        gate.open()

    async def test_resume_wakes(self, kit: Kit) -> None:
        """Adds while paused set no marker; resume does it for them."""
        queue = kit.queue()
        await queue.pause()
        told = await idle(kit)
        await queue.add("a", priority=3)

        await queue.resume()

        await told.finished()

    async def test_an_immediate_retry_wakes_somebody_else(self, kit: Kit) -> None:
        """The worker that failed may be closing or paused."""
        failing = Gate()

        async def fail(job: Job) -> None:
            await failing(job)
            raise RuntimeError("boom")

        kit.seed("job", opts='{"attempts": 2}')
        first = await kit.work(fail)
        await failing.reached()
        told = await idle(kit)
        first.worker.pause()

        failing.open()

        await told.finished()

    @pytest.mark.parametrize("priority", [0, 4])
    async def test_a_job_that_is_given_back_wakes_somebody_else(self, kit: Kit, priority: int) -> None:
        """A prioritised one too, where Node leaves its workers asleep."""
        gate = Gate()
        await kit.queue().add("a", priority=priority)
        first = await kit.work(gate)
        await gate.reached()
        told = await idle(kit)

        await first.worker.close(timeout=0)

        await told.finished()

    async def test_a_stalled_job_that_comes_back_wakes(self, kit: Kit) -> None:
        """The worker that had it is dead; nobody else would tell."""
        kit.seed("lost", to="active")
        kit.redis.delete(kit.base + "marker")
        told = await idle(kit)

        check_stalled(kit)
        check_stalled(kit)

        await told.finished()

    async def test_a_redriven_dead_letter_wakes(self, kit: Kit) -> None:
        """Also when it is rebuilt, because the failed job is gone."""
        queue = kit.queue()
        job = await queue.add("a", remove_on_fail=True)
        await kit.drain(Failing(PermanentError("no")), 1, dead_letters=True)
        told = await idle(kit)

        await queue.dead_letters.redrive(f"dl-{job.id}-1")

        await told.finished()

    async def test_a_slot_of_the_global_concurrency_wakes_when_it_is_free(self, kit: Kit) -> None:
        """The worker that had the slot takes nothing more, so its settle must wake another."""
        gate = Gate()
        queue = kit.queue()
        kit.redis.hset(kit.base + "meta", "concurrency", 1)
        await queue.add("a")
        first = await kit.work(gate)
        await gate.reached()
        told = await idle(kit)
        second = await queue.add("b")
        assert kit.marker() == {}

        closing = asyncio.ensure_future(first.worker.close())
        await asyncio.sleep(0)
        gate.open()
        await soon(closing)
        await told.finished()

        assert told.ids("completed") == [second.id]

    async def test_a_released_parent_wakes_its_own_queue(self, kit: Kit) -> None:
        """Parent and child may live in different queues; the marker is the parent's."""
        parents = f"{kit.name}-parents"
        base = f"bull:{parents}:"
        kit.redis.hset(base + "p", mapping={"name": "p", "data": "{}", "opts": "{}", "priority": 0, "delay": 0})
        kit.redis.zadd(base + "waiting-children", {"p": 1})
        kit.redis.sadd(base + "p:dependencies", f"{kit.base}child")
        kit.redis.hset(base + "meta", "opts.maxLenEvents", 10_000)
        told = await idle(kit, queue=parents)
        link = json.dumps({"id": "p", "queueKey": f"bull:{parents}"})

        kit.seed("child", parentKey=base + "p", parent=link)
        await kit.work(nothing)

        await told.finished()
        assert told.ids("completed") == ["p"]

    async def test_the_follow_up_of_a_deduplicated_job_wakes(self, kit: Kit) -> None:
        """It is created by the settle of its owner, perhaps by a worker that takes nothing more."""
        gate = Gate()
        kit.seed("owner", deid="d")
        kit.redis.set(kit.base + "de:d", "owner")
        kit.redis.hset(kit.base + "dn:d", mapping={"name": "next", "data": "{}", "opts": '{"de":{"id":"d"}}'})
        first = await kit.work(gate)
        await gate.reached()
        told = await idle(kit)
        closing = asyncio.ensure_future(first.worker.close())
        await asyncio.sleep(0)

        gate.open()
        await soon(closing)

        await told.finished()
        assert [job.name for job, _ in told.of("completed")] == ["next"]

    async def test_jobs_behind_a_full_worker_wake_another(self, kit: Kit) -> None:
        """Whoever leaves work behind leaves the marker set."""
        gate = Gate()
        await kit.queue().add_many([("a", None), ("b", None)])
        await kit.work(gate, drain_delay=SLEEP_MS)
        await gate.reached()

        told = await kit.work(nothing, drain_delay=SLEEP_MS)

        await told.finished()
        gate.open()

    @staticmethod
    def has_completed(kit: Kit, count: int) -> bool:
        return len(kit.zset("completed")) == count

    async def test_a_closed_worker_takes_no_marker_with_it(self, kit: Kit) -> None:
        """Its blocked read ends before its connection does; otherwise the next add would wake nobody."""
        queue = kit.queue()
        told = await idle(kit)

        done = 0
        while done < 15:
            leaving = await idle(kit)
            await asyncio.gather(leaving.worker.close(), queue.add("a"))
            done += 1
            await kit.until(partial(self.has_completed, kit, done), f"round {done}", within_s=5)

        assert len(told.of("completed")) <= 15

    async def test_an_add_while_a_look_is_in_flight_is_not_forgotten(self, kit: Kit) -> None:
        """The look's answer is older than the add; it must not put the worker to sleep."""
        queue = kit.queue()
        told = await idle(kit, concurrency=3)
        kit.seed("big", data=json.dumps("x" * 4_000_000))  # a reply of many reads
        kit.redis.delete(kit.base + "marker")
        told.worker.resume()
        await kit.until(lambda: kit.ids("active") == ["big"], "the look is under way")

        await queue.add("small")

        await told.finished(2)


@pytest.mark.every_loop
class TestLeftWork:
    async def test_a_worker_looks_for_what_its_settle_leaves_although_the_marker_is_gone(self, kit: Kit) -> None:
        """Another client's blocked read may have used it up, and need not take the job."""
        queue, gate = kit.queue(), Gate()
        await queue.add("a")
        await kit.work(gate, drain_delay=30_000)
        await gate.reached(1)
        await queue.add("b")
        await kit.until(lambda: kit.marker() != {}, "the add has set it")
        assert kit.redis.bzpopmin(kit.base + "marker", 5) is not None
        eater = asyncio.ensure_future(asyncio.to_thread(kit.redis.bzpopmin, kit.base + "marker", 10))
        await kit.until(lambda: any("flags=b" in line for line in kit.clients()), "it waits for the next")

        gate.open()

        await gate.reached(2, within_s=5)
        assert await eater is not None  # the one that the settle has set


@pytest.mark.every_loop
class TestDueWork:
    async def test_delayed_jobs_start_on_time(self, kit: Kit) -> None:
        """By the worker's own timer: the server's tick alone would be up to a tenth of a second late."""
        queue = kit.queue()
        told = await idle(kit, concurrency=10)
        delays = (60, 20, 90, 40, 120)

        jobs = [await queue.add("later", delay=delay) for delay in delays]
        due = {job.id: kit.zset("delayed").get(job.id, 0) // 4096 for job in jobs}
        await told.finished(5)

        late = [int(kit.fields(job.id)["processedOn"]) - due[job.id] for job in jobs if due[job.id]]
        assert 0 <= min(late) < 60, late
        # On a slow machine a job may be due before the next one is added.
        assert told.ids("active") == [job.id for job in sorted(jobs, key=lambda job: job.timestamp + job.delay)]

    async def test_a_timer_that_fires_early_is_followed_by_another(self, kit: Kit) -> None:
        """The look then comes a fraction of a millisecond too soon; the job must not wait for the drain delay."""
        queue = kit.queue()
        told = await idle(kit, concurrency=2)

        for number in range(40):
            job = await queue.add("later", delay=3 + number % 5)
            await told.finished(number + 1, within_s=5)
            assert told.ids("completed")[-1] == job.id

    async def test_a_retry_after_a_timer_that_fires_early(self, kit: Kit) -> None:
        """The same for the due time that a settle brings."""
        queue = kit.queue()
        told = await idle(kit, Failing(*[RuntimeError("boom")] * 30), concurrency=2)

        await queue.add("a", attempts=31, backoff=Backoff.fixed(4))

        await told.finished(within_s=5)

    async def test_an_earlier_delay_shortens_the_wait(self, kit: Kit) -> None:
        """The worker already sleeps until a later one."""
        queue = kit.queue()
        told = await idle(kit)
        await queue.add("much later", delay=50_000)
        soon_due = await queue.add("soon", delay=30)

        await told.finished()

        assert told.ids("completed") == [soon_due.id]

    async def test_a_delayed_retry_comes_back_on_time(self, kit: Kit) -> None:
        """Its due time is in the reply of the settle that delayed it."""
        told = await idle(kit, Failing(RuntimeError("boom")))

        await kit.queue().add("a", attempts=2, backoff=Backoff.fixed(30))

        await told.finished()

    async def test_runs_of_a_scheduler_come_on_time_and_none_is_left_out(self, kit: Kit) -> None:
        """Each run stores the next one, which waits alone for its time."""
        told = await idle(kit, concurrency=2)
        slot, every = kit.server_ms() + 30, 30
        kit.redis.zadd(kit.base + "repeat", {"hb": slot})
        kit.redis.hset(kit.base + "repeat:hb", mapping={"name": "beat", "ic": 1, "every": every, "data": "{}"})
        opts = {"repeat": {"count": 1, "every": every}, "jobId": f"repeat:hb:{slot}", "repeatJobKey": "hb"}
        kit.seed(f"repeat:hb:{slot}", to="delayed", score=slot * 4096, rjk="hb", opts=json.dumps(opts))

        await told.finished(20, within_s=5)

        slots = [int(job_id.rpartition(":")[2]) for job_id in told.ids("completed")]
        late = [int(kit.fields(f"repeat:hb:{slot}")["processedOn"]) - slot for slot in slots]
        assert max(late) < 500  # not by a drain delay; how many milliseconds is measured in benchmarks/
        await told.worker.close()
        kit.redis.delete(kit.base + "repeat", kit.base + "repeat:hb")

    async def test_jobs_delayed_before_the_worker_started_are_known(self, kit: Kit) -> None:
        """The first look tells the next due time, with no marker left to read."""
        await kit.queue().add("later", delay=80)
        kit.redis.delete(kit.base + "marker")

        told = await kit.work(nothing, drain_delay=SLEEP_MS)

        await told.finished()

    async def test_the_one_who_read_the_due_time_may_leave(self, kit: Kit) -> None:
        """Its reading removed the marker; the others must still learn of the job."""
        queue = kit.queue()
        workers = [await idle(kit) for _ in range(2)]
        job = await queue.add("later", delay=400)
        await kit.until(lambda: not kit.has("marker"), "one has read the marker")
        reader = next(told for told in workers if engine_of(told).driver.state.poll_at)
        other = next(told for told in workers if told is not reader)

        await reader.worker.close()

        await other.finished(within_s=10)
        assert other.ids("completed") == [job.id]

    async def test_the_one_that_reads_the_due_time_while_it_leaves_hands_it_on(
        self, kit: Kit, redis_server: RedisServer
    ) -> None:
        """Its blocked read took the marker before it was ended, and the reply comes after the call of close."""
        with FaultProxy(redis_server) as proxy:
            leaving = await idle(kit, connection=proxy.url)  # the first to wait for the marker gets it
            other = await idle(kit)
            with proxy.stalled(requests=False):
                job = await kit.queue().add("later", delay=300)
                await kit.until(lambda: not kit.has("marker"), "one has read the marker")
                closing = asyncio.create_task(leaving.worker.close())
                await kit.until(lambda: engine_of(leaving).driver.state.is_closing, "it leaves")
            await closing

            await other.finished(within_s=10)

        assert other.ids("completed") == [job.id]

    async def test_a_full_worker_leaves_due_jobs_to_the_others(self, kit: Kit) -> None:
        """One marker tells of both jobs, and one worker has read it: the other must hear of what that cannot take."""
        gate = Gate()
        for _ in range(2):
            await idle(kit, gate)

        await kit.queue().add_many([NewJob("first", None, {"delay": 50}), NewJob("second", None, {"delay": 120})])

        await gate.reached(2, within_s=5)
        gate.open()

    async def test_a_busy_worker_serves_due_jobs_when_a_slot_is_free(self, kit: Kit) -> None:
        """The timer fired while all slots were taken; that must not be forgotten."""
        gate = Gate()
        queue = kit.queue()
        await queue.add("busy")
        told = await kit.work(gate, drain_delay=SLEEP_MS)
        await gate.reached()
        due = await queue.add("due", delay=20)
        await kit.until(lambda: kit.server_ms() > kit.zset("delayed")[due.id] / 4096 + 20, "it is due")

        gate.open()

        await told.finished(2)


class TestWithoutAMarker:
    async def test_an_idle_worker_looks_after_its_drain_delay(self, kit: Kit) -> None:
        """A lost marker costs latency, never a job."""
        told = await kit.work(nothing, drain_delay=40)
        await kit.until(lambda: engine_of(told).driver.last_exchange, "it has looked in vain")

        kit.seed("quiet")
        kit.redis.delete(kit.base + "marker")

        await told.finished(within_s=5)

    async def test_a_longer_drain_delay_means_fewer_looks(self, kit: Kit) -> None:
        """The option is what an idle queue costs the server."""
        counts = []
        for delay in (20, SLEEP_MS):
            await kit.queue().add("warm")
            told = await kit.work(nothing, drain_delay=delay)
            await told.wait("completed")
            kit.reset_statistics()
            async with Queue("clock", connection=kit.url) as queue:  # about 200 ms, measured by something that happens
                clock = await queue.add("tick", delay=200)
                ticking = await kit.work(nothing, queue="clock")
                await soon(clock.result())
                await ticking.worker.close()
            stats: Any = kit.redis.info("commandstats")
            counts.append(stats.get("cmdstat_bzpopmin", {"calls": 0})["calls"])
            await told.worker.close()

        assert counts[0] > counts[1]


@pytest.mark.cuts_wakeups
class TestLateWakeups:
    """Work that only the drain delay found is counted, noted at the queue, and written down for whoever asks."""

    @staticmethod
    def slip_in(kit: Kit, job_id: str) -> None:
        """A job that comes without a marker."""
        usual = {"name": "n", "data": "{}", "opts": "{}", "delay": 0, "priority": 0, "timestamp": kit.server_ms()}
        pipeline: Any = kit.redis.pipeline()
        pipeline.hset(kit.base + job_id, mapping=usual).lpush(kit.base + "wait", job_id).execute()

    @pytest.mark.parametrize("concurrency", [1, 3])
    async def test_a_job_without_a_marker_is_counted(self, kit: Kit, concurrency: int) -> None:
        before = telemetry.late_wakeups().get("worker", 0)
        queue = kit.queue()
        await queue.add("usual")
        told = await kit.work(nothing, drain_delay=300, concurrency=concurrency)
        await told.finished()
        await kit.until(lambda: any("bzpopmin" in line for line in kit.clients()), "it is idle")

        self.slip_in(kit, "quiet")
        await told.finished(2, within_s=5)
        await kit.until(lambda: kit.redis.hget(kit.base + "meta", "bplate"), "it is noted")
        await kit.until(lambda: telemetry.late_wakeups().get("worker", 0) == before + 1, "it is counted")

        assert (await queue.meta())["bplate"].startswith("1 ")

    @pytest.mark.parametrize("version", [None, "bullmq:4.18.3"])
    async def test_a_job_of_a_client_that_sets_no_markers_is_not(self, kit: Kit, version: str | None) -> None:
        before = telemetry.late_wakeups()
        if version is not None:
            kit.redis.hset(kit.base + "meta", "version", version)
        told = await kit.work(nothing, drain_delay=300)
        await kit.until(lambda: any("bzpopmin" in line for line in kit.clients()), "it is idle")

        self.slip_in(kit, "quiet")
        await told.finished(within_s=5)
        await told.worker.close()

        assert telemetry.late_wakeups() == before
        assert not kit.redis.hexists(kit.base + "meta", "bplate")

    async def test_a_result_without_an_event_is_counted(self, kit: Kit) -> None:
        """Whoever waits asks for itself after a second; no event has told."""
        before = telemetry.late_wakeups().get("results", 0)
        queue = kit.queue()
        warm = await queue.add("warm")
        told = await kit.work(nothing)
        await soon(warm.result())
        await told.worker.close()
        job = await queue.add("silent")
        waiting = asyncio.ensure_future(job.result())
        await asyncio.sleep(0)

        finish: Any = kit.redis.pipeline()
        finish.hset(kit.base + job.id, mapping={"returnvalue": "7", "finishedOn": "1"})
        finish.lrem(kit.base + "wait", 1, job.id).zadd(kit.base + "completed", {job.id: 1}).execute()

        assert await soon(waiting, within_s=5) == 7
        await kit.until(lambda: telemetry.late_wakeups().get("results", 0) == before + 1, "it is counted")
        await kit.until(lambda: kit.redis.hget(kit.base + "meta", "bplateres"), "it is noted")
        assert (await queue.meta())["bplateres"].startswith("1 ")

    def test_those_of_a_child_process_are_written_down(self, tmp_path: Path) -> None:
        """A test that starts programs sees theirs in this file."""
        program = "from bullpen._kernel import telemetry; telemetry.late_wakeup('worker', 2, queue='q')"
        told = tmp_path / "late"

        subprocess.run(
            [sys.executable, "-c", program], check=True, env={**os.environ, telemetry.LATE_WAKEUPS_FILE: str(told)}
        )

        assert told.read_text().split(maxsplit=3)[1:] == ["worker", "2", "{'queue': 'q'}\n"]


class TestOddDueTimes:
    """Anybody may write into `delayed`: one score that is no time harms at most its own job."""

    @pytest.mark.requirement("X-101")
    @pytest.mark.parametrize("score", [-1, -5e12, float("-inf")])
    async def test_a_due_time_below_zero_is_due_at_once_and_hides_no_other(self, kit: Kit, score: float) -> None:
        kit.seed("odd", to="delayed", score=score)
        await kit.queue().add("a", delay=300)
        kit.redis.delete(kit.base + "marker")

        told = await kit.work(nothing, drain_delay=SLEEP_MS)

        await told.finished(2)
        assert told.ids("completed") == ["odd", "1"]

    @pytest.mark.parametrize("score", [-1, float("-inf"), 1e25, float("inf")])
    async def test_the_marker_is_a_time(self, kit: Kit, score: float) -> None:
        """Other clients read it and sleep until then."""
        kit.seed("odd", to="delayed", score=score)
        kit.redis.delete(kit.base + "marker")

        await kit.queue().add("a", delay=60_000)

        due_ms = kit.marker()["1"]
        assert 0 <= due_ms <= kit.server_ms() + 61_000
        assert (due_ms == 0) == (score < 0)

    @pytest.mark.requirement("X-101")
    @pytest.mark.parametrize("score", [1e25, 1e300, float("inf")])
    async def test_a_due_time_that_never_comes_harms_only_its_job(self, kit: Kit, score: float) -> None:
        kit.seed("odd", to="delayed", score=score)
        kit.redis.zadd(kit.base + "marker", {"1": score})
        told = await idle(kit)
        queue = kit.queue()

        await queue.add("a")
        await queue.add("b", delay=200)
        await told.finished(2)

        assert told.of("error") == []
        assert await queue.promote_all() == 1
        await told.finished(3)
        assert told.ids("completed") == ["1", "2", "odd"]
