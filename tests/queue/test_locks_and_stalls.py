"""Locks say who has a job; stalled checks give back what nobody has any more."""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
import uuid
from datetime import timedelta
from typing import Any

import pytest

from bullpen._kernel.backoff import Backoff
from bullpen.errors import JobLockLost
from bullpen.queue import Job, JobState
from bullpen.redis import Connection
from bullpen.wire.scripts import SCRIPTS
from tests.queue._kit import Failing, Gate, Kit, Told, engine_of, nothing

TOKEN = re.compile(r"([0-9a-f-]{36}):(\d+)")


def check_stalled(kit: Kit, *, continuing: str = "") -> tuple[int, list[str]]:
    """One call of the script, with the gate open."""
    kit.redis.delete(kit.base + "stalled-check")
    keys = [kit.base + name for name in ("meta", "wait", "active", "stalled", "stalled-check", "events")]
    more, ids, *_ = kit.command(
        "EVAL", SCRIPTS["check_stalled"].body, 6, *keys, kit.base, 0, 10_000, continuing, 30_000
    )
    return int(more), [raw.decode() for raw in ids]


def orphan(kit: Kit, job_id: str, **fields: Any) -> None:
    """A job whose worker died: active, without a lock."""
    kit.seed(job_id, to="active", ats=1, processedOn=1, pb="dead", **fields)
    kit.redis.delete(kit.base + "marker")


class TestLock:
    @pytest.mark.requirement("Q-13", "Q-23", "Q-36")
    async def test_a_running_job_has_one_lock_and_a_finished_one_none(self, kit: Kit) -> None:
        """The token is `<uuid>:<n>`, known to the worker only, and never part of the job's JSON."""
        gate = Gate()
        await kit.queue().add("a")
        told = await kit.work(gate, lock=timedelta(seconds=20))

        job = await gate.reached()

        matched = TOKEN.fullmatch(kit.lock(job.id) or "")
        assert matched is not None
        assert uuid.UUID(matched[1]).version == 4
        assert kit.lock(job.id) == job.token
        assert 15_000 < int(kit.command("PTTL", f"{kit.base}{job.id}:lock")) <= 20_000
        assert job.token not in repr(job) + str(job.to_json()) + str(kit.fields(job.id))
        gate.open()
        await told.finished()
        assert kit.lock(job.id) is None

    async def test_each_take_has_a_token_of_its_own(self, kit: Kit) -> None:
        """A run that lost its lock must not pass for the next run of the same job in the same worker."""
        tokens = []

        async def record(job: Job) -> None:
            tokens.append(job.token)
            raise RuntimeError("again")

        await kit.queue().add("a", attempts=3, backoff=Backoff.fixed(1))
        await kit.drain(record, 1)

        assert len(set(tokens)) == 3

    @pytest.mark.requirement("Q-23")
    @pytest.mark.parametrize("lock_ms", [100, 400])
    async def test_a_lock_is_renewed_for_as_long_as_the_handler_runs(self, kit: Kit, lock_ms: int) -> None:
        """The shortest allowed lock too: what the options accept must work."""
        gate = Gate()
        await kit.queue().add("a")
        told = await kit.work(gate, lock=lock_ms)
        job = await gate.reached()
        left = [lock_ms]

        def renewals() -> int:
            left.append(int(kit.command("PTTL", f"{kit.base}{job.id}:lock")))
            return sum(later > earlier for earlier, later in itertools.pairwise(left))

        await kit.until(lambda: renewals() >= 4, "four renewals")

        assert kit.lock(job.id) == job.token
        assert told.of("lock_lost") == []
        gate.open()
        await told.finished()

    async def test_a_renewal_takes_the_job_off_the_list_of_suspects(self, kit: Kit) -> None:
        """The mark of a stalled check is wiped by proof of life, or a live job would be a candidate for ever."""
        gate = Gate()
        await kit.queue().add("a")
        told = await kit.work(gate, lock=400)
        job = await gate.reached()

        check_stalled(kit)
        assert kit.redis.smembers(kit.base + "stalled") == {job.id.encode()}
        await kit.until(lambda: not kit.has("stalled"), "the mark is gone")

        gate.open()
        await told.finished()

    async def test_the_lock_option_is_how_long_the_server_keeps_it(self, kit: Kit) -> None:
        """Shorter means quicker recovery after a crash."""
        gate = Gate()
        await kit.queue().add("a")
        await kit.work(gate, lock=2_000)

        job = await gate.reached()

        assert 1_000 < int(kit.command("PTTL", f"{kit.base}{job.id}:lock")) <= 2_000


class TestLostLock:
    @pytest.mark.parametrize("lock", [400, 30_000], ids=["found by the renewal", "found at the end"])
    async def test_a_job_that_is_gone_is_said_to_be_gone(self, kit: Kit, lock: int) -> None:
        """Removed by hand, or the whole server was emptied: a longer lock is no help, and nobody runs it again."""
        gate = Gate()
        await kit.queue().add("a")
        told = await kit.work(gate, lock=lock)
        job = await gate.reached()

        kit.redis.delete(*kit.redis.scan_iter(f"{kit.base}*"))
        if lock == 30_000:
            gate.open()
        lost, error = await told.wait("lock_lost")

        assert lost is job
        assert f"job '{job.id}' of queue '{kit.name}': outcome not written, the job is gone" in str(error)
        assert "another worker" not in str(error)
        assert "Raise" not in str(error)

    @pytest.mark.requirement("Q-66")
    async def test_the_handler_is_cancelled_and_its_outcome_dropped(self, kit: Kit) -> None:
        """Somebody else may have the job by now: a late result must not be written over theirs."""
        gate = Gate()
        await kit.queue().add("a")
        told = await kit.work(gate, lock=400)
        job = await gate.reached()

        kit.redis.set(f"{kit.base}{job.id}:lock", "another worker")
        lost, error = await told.wait("lock_lost")
        kit.redis.delete(f"{kit.base}{job.id}:lock")

        assert lost is job
        assert isinstance(error, JobLockLost)
        assert f"job '{job.id}' of queue '{kit.name}': lock lost after" in str(error)
        assert gate.cancelled == [job]
        assert job.cancelled
        assert told.worker.running == 0
        assert "returnvalue" not in kit.fields(job.id)
        kit.redis.delete(kit.base + "stalled-check")
        check_stalled(kit)

    @pytest.mark.requirement("Q-66")
    async def test_the_token_stops_a_late_settle(self, kit: Kit) -> None:
        """The job was given to another worker; what the first one says about it is refused by the script."""
        first, second = Gate("late"), Gate("right")
        await kit.queue().add("a", attempts=1)
        slow = await kit.work(first)
        job = await first.reached()
        kit.redis.delete(f"{kit.base}{job.id}:lock")
        # Twice: one marks it, unless the worker's own first check has done so, the other finds it marked.
        assert check_stalled(kit)[1] + check_stalled(kit)[1] == [job.id]
        quick = await kit.work(second)
        again = await second.reached()

        first.open()
        await slow.wait("lock_lost")

        assert (again.id, again.fence, again.stalled_count) == (job.id, 2, 1)
        assert kit.lock(job.id) == again.token
        assert kit.ids("active") == [job.id]
        second.open()
        await quick.wait("completed")
        assert kit.fields(job.id)["returnvalue"] == '"right"'
        assert slow.of("completed") == []

    async def test_a_thread_is_asked_to_stop_and_its_outcome_dropped(self, kit: Kit) -> None:
        """Threads cannot be cancelled; `job.cancelled` is how they learn of it."""
        started, stopped = threading.Event(), threading.Event()

        def loop(job: Job) -> str:
            started.set()
            while not job.cancelled:
                stopped.wait(0.002)
            return "too late"

        job = await kit.queue().add("a")
        told = await kit.work(loop, lock=400)
        await asyncio.to_thread(started.wait, 10)
        kit.redis.set(f"{kit.base}{job.id}:lock", "another worker")

        await told.wait("lock_lost")

        kit.redis.delete(f"{kit.base}{job.id}:lock")
        assert "returnvalue" not in kit.fields(job.id)
        check_stalled(kit)

    async def test_a_handler_that_swallows_its_cancellation_is_dropped_all_the_same(self, kit: Kit) -> None:
        """`except BaseException` in user code must not turn a lost job into a completed one."""

        async def stubborn(job: Job) -> str:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                pass
            return "done anyway"

        job = await kit.queue().add("a")
        told = await kit.work(stubborn, lock=400)
        await told.wait("active")
        kit.redis.set(f"{kit.base}{job.id}:lock", "another worker")

        await told.wait("lock_lost")

        kit.redis.delete(f"{kit.base}{job.id}:lock")
        assert told.of("completed") == []
        assert "returnvalue" not in kit.fields(job.id)
        check_stalled(kit)


class TestLockThatRanOut:
    """Nobody could renew it for too long: the server was away, or its clock jumped."""

    @pytest.mark.requirement("Q-66")
    async def test_the_renewal_takes_it_again(self, kit: Kit) -> None:
        gate = Gate("right")
        await kit.queue().add("a")
        told = await kit.work(gate, lock=400)
        job = await gate.reached()

        kit.redis.delete(f"{kit.base}{job.id}:lock")
        async with asyncio.timeout(10):
            while kit.lock(job.id) != job.token:  # noqa: ASYNC110 - a script writes it, and nobody tells
                await asyncio.sleep(0.01)
        gate.open()
        await told.wait("completed")

        assert told.of("lock_lost") == []
        assert kit.fields(job.id)["returnvalue"] == '"right"'

    @pytest.mark.requirement("Q-66")
    async def test_the_outcome_of_a_job_that_ended_meanwhile_counts(self, kit: Kit) -> None:
        gate = Gate("right")
        await kit.queue().add("a")
        told = await kit.work(gate)
        job = await gate.reached()

        kit.redis.delete(f"{kit.base}{job.id}:lock")
        gate.open()
        await told.wait("completed")

        assert told.of("lock_lost") == []
        assert kit.fields(job.id)["returnvalue"] == '"right"'
        assert kit.lock(job.id) is None

    @pytest.mark.requirement("Q-66")
    @pytest.mark.parametrize("lock_ms", [400, 30_000], ids=["renewal", "settle"])
    @pytest.mark.parametrize("event", ["taken by another", "returned to the line"])
    async def test_not_when_something_happened_to_the_job(self, kit: Kit, lock_ms: int, event: str) -> None:
        """A later run that lost its lock in the same outage, or a stalled check: the job is no longer ours."""
        gate = Gate("late")
        await kit.queue().add("a")
        told = await kit.work(gate, lock=lock_ms)
        job = await gate.reached()
        told.worker.pause()

        with kit.redis.pipeline() as at_once:
            at_once.delete(f"{kit.base}{job.id}:lock")
            if event == "taken by another":
                at_once.hincrby(f"{kit.base}{job.id}", "ats", 1)
            else:
                at_once.lrem(kit.base + "active", 0, job.id)
                at_once.rpush(kit.base + "wait", job.id)
            at_once.execute()
        if lock_ms > 1_000:
            gate.open()
        await told.wait("lock_lost")

        assert told.of("completed") == []
        assert kit.lock(job.id) is None
        assert "returnvalue" not in kit.fields(job.id)
        check_stalled(kit)


class TestStalledCheck:
    @pytest.mark.requirement("Q-27", "Q-37", "Q-67")
    async def test_a_job_is_marked_first_and_recovered_at_the_next_check(self, kit: Kit) -> None:
        """Two phases, as every client of the queue does: one look alone cannot tell a take from a death."""
        orphan(kit, "lost", atm=1)

        first = check_stalled(kit)
        marked = kit.redis.smembers(kit.base + "stalled"), kit.ids("active")
        second = check_stalled(kit)

        assert first == (0, [])
        assert marked == ({b"lost"}, ["lost"])
        assert second == (0, ["lost"])
        assert (kit.ids("wait"), kit.ids("active")) == (["lost"], [])
        stored = kit.fields("lost")
        assert (stored["stc"], stored["atm"], stored["ats"], "defa" in stored) == ("1", "1", "1", False)
        assert kit.marker() == {"0": 0}
        assert kit.events() == [
            {"event": "waiting", "jobId": "lost", "prev": "active"},
            {"event": "stalled", "jobId": "lost", "attemptsMade": "1"},
        ]

    async def test_a_locked_job_is_left_alone(self, kit: Kit) -> None:
        """The lock is the proof; the mark is only a suspicion."""
        orphan(kit, "alive")
        kit.redis.set(f"{kit.base}alive:lock", "token", px=60_000)

        results = [check_stalled(kit) for _ in range(3)]

        assert results == [(0, [])] * 3
        assert kit.ids("active") == ["alive"]

    async def test_a_recovered_job_goes_to_the_front(self, kit: Kit) -> None:
        """It had its turn; its priority is of no account here, as in Node."""
        kit.seed("waiting")
        orphan(kit, "lost", priority=9)

        check_stalled(kit)
        check_stalled(kit)

        assert kit.ids("wait") == ["lost", "waiting"]
        kit.redis.zadd(kit.base + "marker", {"0": 0})

    async def test_recovered_jobs_stand_in_the_order_in_which_they_were_taken(self, kit: Kit) -> None:
        """A worker with many jobs died: that is no reason to shuffle them."""
        ids = [f"lost-{n}" for n in range(50)]
        for job_id in ids:
            orphan(kit, job_id)

        check_stalled(kit)
        check_stalled(kit)

        assert kit.ids("wait") == ids
        kit.redis.zadd(kit.base + "marker", {"0": 0})

    async def test_one_check_per_interval_over_all_workers(self, kit: Kit) -> None:
        """Ten workers must not do ten times the work; the gate is a key with the interval as its life."""
        orphan(kit, "lost")
        check_stalled(kit)
        keys = [kit.base + name for name in ("meta", "wait", "active", "stalled", "stalled-check", "events")]

        closed = kit.command("EVAL", SCRIPTS["check_stalled"].body, 6, *keys, kit.base, 0, 10_000, "", 30_000)

        assert closed[:2] == [0, []]
        assert 0 < closed[2] <= 10_000
        assert kit.ids("active") == ["lost"]
        assert 0 < int(kit.command("PTTL", kit.base + "stalled-check")) <= 10_000

    @pytest.mark.parametrize(("runs", "most_ms"), [(True, 10_000), (False, 25_000)], ids=["one runs", "idle"])
    async def test_a_queue_in_which_nothing_runs_is_checked_less_often(
        self, kit: Kit, runs: bool, most_ms: int
    ) -> None:
        """Hundreds of idle queues are the rule. What is taken meanwhile is marked before its lock can end."""
        keys = [kit.base + name for name in ("meta", "wait", "active", "stalled", "stalled-check", "events")]
        kit.redis.hset(kit.base + "meta", "bpcheck", kit.server_ms())
        if runs:
            orphan(kit, "lost")

        reply = kit.command(
            "EVAL", SCRIPTS["check_stalled"].body, 6, *keys, kit.base, 0, 10_000, "", 30_000, "", 25_000
        )

        assert reply == [0, [], most_ms, []]
        assert most_ms - 5_000 < int(kit.command("PTTL", kit.base + "stalled-check")) <= most_ms
        # A check behind an idle time would else pass for one that an outage had held up.
        assert bool(kit.redis.hexists(kit.base + "meta", "bpcheck")) is runs
        kit.redis.delete(kit.base + "active", kit.base + "lost", kit.base + "stalled")

    @pytest.mark.parametrize(
        ("options", "seconds"),
        [({}, 30.0), ({"lock": 60_000}, 30.0), ({"lock": 12_000}, 12.0), ({"lock": 1_000}, 10.0)],
    )
    async def test_the_time_between_checks_of_an_idle_queue_is_at_most_a_lock(
        self, kit: Kit, options: dict[str, int], seconds: float
    ) -> None:
        """Else a job could be taken and its lock end between two checks, and the second would only mark it."""
        told = await kit.work(nothing, stalled_interval=10_000, **options)

        assert engine_of(told)._held.idle_interval_ms == seconds * 1_000

    async def test_idle_workers_of_a_server_ask_it_together_whether_it_takes_writes(self, kit: Kit) -> None:
        """Each asked for itself, before each check and four times a lock."""
        probes = 0
        names = [f"{kit.name}-{n}" for n in range(20)]
        for name in names:
            kit.redis.hset(f"bull:{name}:meta", "version", "bullpen")
        connection = Connection(kit.url)
        client: Any = kit.redis
        with client.monitor() as monitor:
            workers = [await kit.work(nothing, queue=name, connection=connection) for name in names]
            await kit.until(
                lambda: all(kit.redis.exists(f"bull:{name}:stalled-check") for name in names), "all checked"
            )
            client.echo("end")
            for entry in monitor.listen():
                if entry["command"] == "ECHO end":
                    break
                probes += entry["command"].endswith("bp:probe")

        assert probes < len(names) / 2  # none, where another test of this process has just asked this server
        await asyncio.gather(*(one.worker.close() for one in workers))
        await connection.aclose()

    async def test_workers_of_a_loop_ask_it_together_whether_it_answers(self, kit: Kit) -> None:
        """Each question wakes the loop; two hundred idle workers woke it 800 times a second."""
        told = [await kit.work(nothing) for _ in range(3)]

        pulses = {id(engine_of(one)._held.pulse) for one in told}

        assert len(pulses) == 1
        assert engine_of(told[0])._held.lag_s < 60

    async def test_an_id_without_a_job_is_dropped_and_frees_its_place(self, kit: Kit) -> None:
        """With a global concurrency a ghost in `active` would hold a slot for ever; idle workers must hear of it."""
        kit.redis.hset(kit.base + "meta", "concurrency", 1)
        kit.redis.lpush(kit.base + "active", "ghost")
        kit.redis.sadd(kit.base + "stalled", "ghost")
        kit.redis.set(kit.base + "stalled-check", 1, px=60_000)
        job = await kit.queue().add("a")
        told = await kit.work(nothing, drain_delay=60_000)
        await kit.until(lambda: engine_of(told).driver.last_exchange, "the worker has looked in vain")

        assert check_stalled(kit) == (0, [])
        await told.finished()

        assert told.ids("completed") == [job.id]
        assert kit.ids("active") == []

    @pytest.mark.requirement("Q-62", "Q-67")
    async def test_many_stalled_jobs_are_recovered_in_bounded_calls(self, kit: Kit) -> None:
        """A worker with a thousand jobs died: no call may block the server for all of them at once."""
        ids = [f"lost-{n}" for n in range(1_200)]
        pipeline = kit.redis.pipeline(transaction=False)
        for job_id in ids:
            pipeline.hset(kit.base + job_id, mapping={"name": "lost", "data": "{}", "opts": "{}", "timestamp": 1})
        pipeline.lpush(kit.base + "active", *ids)
        pipeline.sadd(kit.base + "stalled", *ids)
        pipeline.execute()
        kit.reset_statistics()

        told = await kit.work(nothing, stalled_interval=60_000)
        told.worker.pause()
        await kit.until(lambda: len(told.of("stalled")) == 1_200, "all are recovered")
        await told.worker.close()

        assert sorted(told.ids("stalled")) == sorted(ids)
        stats: Any = kit.redis.info("commandstats")
        assert stats["cmdstat_spop"]["calls"] == 3
        assert kit.redis.llen(kit.base + "active") == 0

    async def test_a_partly_done_check_is_finished_by_the_next(self, kit: Kit) -> None:
        """The checker may die between two calls; candidates that were not looked at stay candidates."""
        ids = [f"lost-{n}" for n in range(700)]
        for job_id in ids:
            kit.redis.hset(kit.base + job_id, mapping={"name": "lost", "data": "{}", "opts": "{}"})
        kit.redis.lpush(kit.base + "active", *ids)
        kit.redis.sadd(kit.base + "stalled", *ids)

        more, some = check_stalled(kit)
        _, rest = check_stalled(kit)

        assert (more, len(some), len(rest)) == (1, 500, 200)
        assert kit.redis.llen(kit.base + "wait") == 700


class TestRecovery:
    @pytest.mark.requirement("Q-27", "Q-53", "Q-67", "X-13")
    async def test_the_job_of_a_dead_worker_is_run_and_keeps_its_attempts(self, kit: Kit) -> None:
        """A crash is not the job's fault: with one attempt allowed it still gets its one attempt."""
        orphan(kit, "lost", opts='{"attempts": 1}')

        told = await kit.work(nothing, stalled_interval=30)
        await told.finished()
        await told.wait("stalled")  # by another thread, whose report may come after the end

        assert told.of("stalled") == [("lost",)]
        assert told.ids("completed") == ["lost"]
        stored = kit.fields("lost")
        assert (stored["stc"], stored["atm"], stored["ats"]) == ("1", "1", "2")
        assert kit.event_names("lost") == ["waiting", "stalled", "active", "completed"]

    @pytest.mark.requirement("Q-67")
    async def test_a_late_check_is_patient_once(self, kit: Kit) -> None:
        """The first after an outage gives workers time to take their locks again. With short intervals that time is
        longer than the pause by which a check is called late: the next must not be taken for late too."""
        orphan(kit, "lost")
        kit.redis.hset(kit.base + "meta", "bpchecked", str(kit.server_ms() - 60_000))

        told = await kit.work(nothing, stalled_interval=30, lock=300)
        await told.wait("completed", within_s=10)

        assert told.ids("completed") == ["lost"]

    @pytest.mark.requirement("X-13")
    @pytest.mark.parametrize(("counts", "state"), [(True, JobState.FAILED), (False, JobState.COMPLETED)])
    async def test_stalls_count_as_attempts_only_if_asked(self, kit: Kit, counts: bool, state: JobState) -> None:
        """Both readings exist; the option chooses, and the wire's counters stay Node's either way."""
        kit.seed("halted", opts='{"attempts": 2}', stc=1, atm=1, ats=2)
        handler = Failing()

        told = await kit.drain(handler, 1, count_stalls_as_attempts=counts)

        assert await kit.queue().state_of("halted") is state
        assert handler.runs == (0 if counts else 1)
        if counts:
            assert told.of("failed")[0][1] == "stalled 1 times and failed 1 times of 2 attempts"
        assert kit.fields("halted")["stc"] == "1"

    async def test_attempts_left_beside_stalls_are_still_used(self, kit: Kit) -> None:
        """Counting a stall takes one attempt, not all of them."""
        kit.seed("halted", opts='{"attempts": 3}', stc=1, atm=1)

        told = await kit.drain(nothing, 1, count_stalls_as_attempts=True)

        assert told.ids("completed") == ["halted"]

    async def test_live_jobs_are_never_taken_for_stalled(self, kit: Kit) -> None:
        """Checks as fast as can be, against heavy taking: the lock is set by the script that makes a job active."""
        count = 400
        runs: list[str] = []

        async def record(job: Job) -> None:
            runs.append(job.id)

        await kit.queue(remove_on_complete=True).add_many(("n", n) for n in range(count))
        workers: list[Told] = [
            await kit.work(record, concurrency=10, stalled_interval=1, lock=10_000) for _ in range(3)
        ]
        await kit.until(lambda: len(runs) >= count, "all have run")
        for told in workers:
            await told.worker.close()

        assert sorted(runs, key=int) == [str(n) for n in range(1, count + 1)]
        assert [told.of("stalled") for told in workers] == [[], [], []]
        assert "stalled" not in {event["event"] for event in kit.events()}
