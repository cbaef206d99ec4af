"""What one may do to many jobs at once: promote, retry, drain, clean, obliterate, look for orphans."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bullpen.errors import InvalidOption, JobStateConflict
from bullpen.queue import JobState, NewJob
from tests.queue._kit import Failing, Gate, Kit, ids_of, nothing

FAR_MS = 3_600_000
LONG_AGO = 1_700_000_000_000


def seed_many(kit: Kit, count: int, to: str, *, score: Callable[[int], float] | None = None, **fields: Any) -> None:
    """Jobs 1 to count, as quickly as possible."""
    pipeline = kit.redis.pipeline(transaction=False)
    usual: dict[Any, Any] = {
        "name": "job",
        "data": "{}",
        "opts": "{}",
        "timestamp": LONG_AGO,
        "delay": 0,
        "priority": 0,
    }
    for number in range(1, count + 1):
        pipeline.hset(f"{kit.base}{number}", mapping=usual | fields)
        if score is None:
            pipeline.lpush(kit.base + to, number)
        else:
            pipeline.zadd(kit.base + to, {str(number): score(number)})
    pipeline.zadd(f"{kit.base}marker", {"0": 0})
    pipeline.hset(f"{kit.base}meta", "opts.maxLenEvents", 10_000)
    pipeline.execute()


def schedule(kit: Kit, scheduler_id: str, slot: int, to: str, *, score: float | None = None) -> str:
    """A scheduler and the job it made last."""
    kit.redis.zadd(f"{kit.base}repeat", {scheduler_id: slot})
    kit.redis.hset(f"{kit.base}repeat:{scheduler_id}", mapping={"name": "beat", "ic": 1, "every": 500})
    job_id = f"repeat:{scheduler_id}:{slot}"
    kit.seed(job_id, rjk=scheduler_id, to=to, score=score)
    return job_id


def flow(kit: Kit, parent_queue: str, child: str, *, state: str = "wait", priority: int = 0) -> None:
    """A parent P in a queue that waits for `child` of this one."""
    parent_base = f"bull:{parent_queue}:"
    kit.redis.hset(
        f"{parent_base}P",
        mapping={"name": "p", "data": "{}", "opts": "{}", "timestamp": 1, "delay": 0, "priority": priority},
    )
    kit.redis.zadd(f"{parent_base}waiting-children", {"P": 1})
    kit.redis.hset(f"{parent_base}meta", "opts.maxLenEvents", 10_000)
    kit.redis.sadd(f"{parent_base}P:dependencies", kit.base + child)
    score = None if state in ("wait", "active") else LONG_AGO
    kit.seed(child, to=state, score=score, parentKey=f"{parent_base}P", timestamp=LONG_AGO)


class TestPromoteAll:
    @pytest.mark.requirement("Q-33", "Q-41")
    async def test_all_run_now_in_the_order_of_their_times(self, kit: Kit) -> None:
        queue = kit.queue()
        for number in range(3):
            await queue.add("plain", delay=FAR_MS - 10_000 * number)
        await queue.add("urgent", delay=2 * FAR_MS, priority=1)

        assert await queue.promote_all() == 4
        assert await queue.promote_all() == 0
        told = await kit.drain(nothing, 4)

        assert told.ids("completed") == ["3", "2", "1", "4"]

    @pytest.mark.requirement("Q-65")
    async def test_many_go_in_steps(self, kit: Kit) -> None:
        seed_many(kit, 1_250, "delayed", score=lambda number: (LONG_AGO + FAR_MS + number) * 4096)

        assert await kit.queue().promote_all() == 1_250

        assert kit.ids("wait") == [str(number) for number in range(1, 1_251)]

    async def test_ids_without_a_job_are_not_counted(self, kit: Kit) -> None:
        """They are dropped; more of them than one step takes must not end it, either."""
        queue = kit.queue()
        kit.redis.zadd(kit.base + "delayed", {f"gone-{number}": number for number in range(600)})
        for _ in range(3):
            await queue.add("job", delay=FAR_MS)

        assert await queue.promote_all() == 3
        assert kit.ids("wait") == ["1", "2", "3"]
        assert kit.zset("delayed") == {}


class TestRetryAll:
    @pytest.mark.requirement("Q-26", "X-40")
    async def test_failed_jobs_go_back_oldest_first_each_in_its_class(self, kit: Kit) -> None:
        queue = kit.queue(attempts=1)
        ranks: list[dict[str, Any]] = [{"priority": 3}, {}, {}]
        for options in ranks:
            await queue.add("job", **options)
        await kit.drain(Failing(*(RuntimeError(str(n)) for n in range(3))), 3)

        assert await queue.retry_all(reset_attempts=True) == 3

        assert kit.ids("wait") == ["2", "3"] and list(kit.zset("prioritized")) == ["1"]
        assert "atm" not in kit.fields("1")

    @pytest.mark.requirement("X-40")
    async def test_count_and_instant_bound_it(self, kit: Kit) -> None:
        seed_many(kit, 10, "failed", score=lambda number: LONG_AGO + number * 1000)
        queue = kit.queue()

        first = await queue.retry_all(count=2)
        second = await queue.retry_all(until=datetime.fromtimestamp((LONG_AGO + 5_000) / 1000, UTC))

        assert (first, second) == (2, 3)
        assert list(kit.zset("failed")) == ["6", "7", "8", "9", "10"]
        with pytest.raises(InvalidOption, match="until: expected an aware datetime"):
            await queue.retry_all(until=datetime(2026, 1, 1))  # noqa: DTZ001 - the mistake under test
        with pytest.raises(InvalidOption, match="count"):
            await queue.retry_all(count=0)

    @pytest.mark.requirement("X-40")
    async def test_a_job_that_fails_again_meanwhile_is_not_retried_for_ever(self, kit: Kit) -> None:
        seed_many(kit, 1_100, "failed", score=lambda number: LONG_AGO + number, opts='{"attempts":1}')
        await kit.work(Failing(*(RuntimeError("again") for _ in range(5_000))), concurrency=50)

        assert await kit.queue().retry_all() == 1_100

    @pytest.mark.requirement("X-5", "Q-65")
    async def test_dead_letters_go_with_their_jobs(self, kit: Kit) -> None:
        queue = kit.queue(attempts=1)
        await queue.add_many([NewJob("job")] * 30)
        await kit.drain(Failing(*(RuntimeError("boom") for _ in range(30))), 30, dead_letters=True, concurrency=10)

        assert await queue.retry_all() == 30

        assert await queue.dead_letters.depth() == 0

    async def test_ids_without_a_job_are_dropped(self, kit: Kit) -> None:
        kit.redis.zadd(f"{kit.base}completed", {"ghost": 1})

        assert await kit.queue().retry_all(JobState.COMPLETED) == 0

        assert not kit.has("completed")


class TestDrain:
    @pytest.mark.requirement("Q-64")
    async def test_what_runs_or_has_finished_stays(self, kit: Kit) -> None:
        queue, gate = kit.queue(), Gate()
        await queue.add("done")
        await kit.drain(nothing, 1)
        await queue.add("running")
        await kit.work(gate)
        await gate.reached()
        ranks: list[dict[str, Any]] = [{}, {"priority": 2}, {"delay": FAR_MS}]
        for options in ranks:
            await queue.add("job", **options)

        assert await queue.drain() == 2
        delayed_stayed = (await queue.counts()).delayed
        assert await queue.drain(delayed=True) == 1

        counts = await queue.counts()
        assert (counts.pending, counts.active, counts.completed, delayed_stayed) == (0, 1, 1, 1)
        gate.open()

    @pytest.mark.requirement("Q-65")
    async def test_a_scheduler_between_other_jobs_survives_and_stays_in_its_place(self, kit: Kit) -> None:
        """Other clients trim the list by position: they leave an id without a job and stop the scheduler for ever."""
        seed_many(kit, 1_200, "wait")
        kept = [schedule(kit, "a", 1000, "wait"), schedule(kit, "b", 2000, "wait")]
        for number in range(5):
            kit.seed(f"late-{number}", to="wait")
        kit.seed("repeat:a:500", rjk="a", to="prioritized", score=1)  # an older one of a scheduler is a job like others
        later = schedule(kit, "c", 3000, "delayed", score=3000 * 4096)

        assert await kit.queue().drain(delayed=True) == 1_206

        assert kit.ids("wait") == kept
        assert list(kit.zset("delayed")) == [later]

    @pytest.mark.requirement("W-84")
    async def test_a_parent_of_the_same_queue_goes_with_its_last_child_and_one_elsewhere_is_released(
        self, kit: Kit
    ) -> None:
        flow(kit, kit.name, "own-child")
        flow(kit, f"{kit.name}-other", "other-child", priority=3)

        await kit.queue().drain()

        assert not kit.has("P") and not kit.has("waiting-children")
        other: Any = kit.redis.zrange(f"bull:{kit.name}-other:prioritized", 0, -1)
        assert other == [b"P"]
        assert kit.events(queue=f"{kit.name}-other")[-1]["prev"] == "waiting-children"
        assert kit.redis.zscore(f"bull:{kit.name}-other:marker", "0") == 0

    @pytest.mark.requirement("Q-39")
    async def test_jobs_in_the_list_of_an_old_paused_queue_go_too(self, kit: Kit) -> None:
        kit.seed("old", to="paused")

        assert await kit.queue().drain() == 1


class TestClean:
    @pytest.mark.requirement("Q-64", "W-64")
    async def test_grace_decides_by_the_instant_of_finishing(self, kit: Kit) -> None:
        now = kit.server_ms()
        seed_many(kit, 6, "completed", score=lambda number: now - number * 60_000)
        queue = kit.queue()

        assert await queue.clean(timedelta(minutes=4, seconds=30)) == ["6", "5"]
        assert await queue.clean(0, limit=1) == ["4"]
        assert await queue.clean() == ["3", "2", "1"]

        assert [event["count"] for event in kit.events() if event["event"] == "cleaned"] == ["2", "1", "3"]

    @pytest.mark.requirement("Q-64", "Q-65")
    async def test_many_go_in_steps_and_those_that_stay_are_passed_over(self, kit: Kit) -> None:
        seed_many(kit, 1_300, "wait")
        pipeline = kit.redis.pipeline(transaction=False)
        for number in range(1, 1_301, 2):
            pipeline.hset(f"{kit.base}{number}", "timestamp", kit.server_ms())
        pipeline.execute()

        removed = await kit.queue().clean(60_000, state=JobState.WAITING)

        assert removed == [str(number) for number in range(2, 1_301, 2)]
        assert kit.ids("wait") == [str(number) for number in range(1, 1_301, 2)]

    @pytest.mark.requirement("Q-64")
    @pytest.mark.parametrize("state", ["delayed", "prioritized"])
    async def test_sets_of_jobs_that_have_not_run_are_cleaned_by_age(self, kit: Kit, state: str) -> None:
        seed_many(kit, 900, state, score=lambda number: number)
        kit.redis.hset(f"{kit.base}5", "timestamp", kit.server_ms())
        kit.redis.hset(f"{kit.base}6", "timestamp", "no time at all")

        removed = await kit.queue().clean(60_000, state=JobState(state), limit=897)

        assert len(removed) == 897 and not {"5", "6"} & set(removed)
        assert list(kit.zset(state)) == ["5", "6", "900"]

    @pytest.mark.requirement("Q-36")
    async def test_a_running_job_and_the_next_job_of_a_scheduler_stay(self, kit: Kit) -> None:
        queue, gate = kit.queue(), Gate()
        await queue.add("running")
        await kit.work(gate)
        await gate.reached()
        kit.redis.lpush(f"{kit.base}active", "lost")
        kit.seed("lost", to=None, timestamp=LONG_AGO)
        kit.redis.sadd(f"{kit.base}stalled", "lost")
        kept = schedule(kit, "s", 1000, "completed", score=1)

        assert await queue.clean(state=JobState.ACTIVE) == ["lost"]
        assert await queue.clean() == []

        assert list(kit.zset("completed")) == [kept]
        assert kit.redis.sismember(f"{kit.base}stalled", "lost") == 0
        gate.open()

    @pytest.mark.requirement("W-84", "W-83")
    async def test_parents_and_deduplication_ids_are_told(self, kit: Kit) -> None:
        flow(kit, f"{kit.name}-other", "child", state="failed")
        kit.redis.hset(f"{kit.base}child", "deid", "d")
        kit.redis.set(f"{kit.base}de:d", "child")
        kit.redis.hset(f"{kit.base}dn:d", "name", "next")

        await kit.queue().clean(state=JobState.FAILED)

        assert not kit.has("de:d") and not kit.has("dn:d")
        assert kit.redis.lrange(f"bull:{kit.name}-other:wait", 0, -1) == [b"P"]

    async def test_states_without_an_age_are_refused(self, kit: Kit) -> None:
        for state in (JobState.WAITING_CHILDREN, JobState.UNKNOWN):
            with pytest.raises(InvalidOption, match="state: expected one of completed, failed"):
                await kit.queue().clean(state=state)
        with pytest.raises(InvalidOption, match="limit"):
            await kit.queue().clean(limit=0)


class TestObliterate:
    @pytest.mark.requirement("Q-64", "W-83", "W-84", "X-128")
    async def test_nothing_is_left_and_nobody_waits_for_what_is_gone(self, kit: Kit) -> None:
        """Other clients leave the limiter behind, and parents in other queues waiting for ever."""
        queue = kit.queue()
        seed_many(kit, 1_200, "completed", score=lambda number: number)
        ranks: list[dict[str, Any]] = [{}, {"priority": 2}, {"delay": FAR_MS}]
        for options in ranks:
            await queue.add("job", **options)
        schedule(kit, "s", 1000, "delayed", score=1)
        flow(kit, f"{kit.name}-other", "child", state="failed")
        flow(kit, kit.name, "own-child", state="failed")
        kit.seed("with-id", to="wait", deid="d")
        kit.redis.set(f"{kit.base}de:d", "with-id")
        kit.redis.set(f"{kit.base}de:gone", "a job that finished", px=FAR_MS)
        kit.redis.rpush(f"{kit.base}forgotten:logs", "of a job that is gone")
        await queue.rate_limit(FAR_MS)
        await queue.set_global_concurrency(3)
        kit.redis.hset(f"{kit.base}metrics:completed", mapping={"count": 1, "prevTS": 1, "prevCount": 0})

        kit.redis.xadd(kit.base + "bp:audit:log", {"actor": "ada"})
        kit.redis.zadd(kit.base + "bp:held:acme", {"1": 1})

        removed = await queue.obliterate()

        assert kit.redis.delete(kit.base + "bp:audit:log") == 1  # who did what stays, this among it
        left = [key.decode() for key in kit.redis.scan_iter(f"{kit.base}*")]
        assert left in ([], [f"{kit.base}de:gone"])  # with a TTL: it belongs to no job, and ends by itself
        assert removed == 1_200 + 3 + 1 + 3 + 1
        assert kit.redis.lrange(f"bull:{kit.name}-other:wait", 0, -1) == [b"P"]
        assert (await queue.add("a new beginning")).id == "1"

    @pytest.mark.requirement("Q-36")
    async def test_running_jobs_stop_it_unless_forced(self, kit: Kit) -> None:
        queue, gate = kit.queue(), Gate()
        await queue.add("running")
        told = await kit.work(gate)
        await gate.reached()

        with pytest.raises(JobStateConflict, match=r"has running jobs, so it was not obliterated; .*force=True"):
            await queue.obliterate()
        paused = await queue.is_paused()
        assert await queue.obliterate(force=True) == 1
        gate.open()

        await told.wait("lock_lost")
        assert paused
        await told.worker.close()

    async def test_repeating_it_changes_nothing(self, kit: Kit) -> None:
        assert await kit.queue().obliterate() == 0
        assert await kit.queue().obliterate() == 0

        assert not list(kit.redis.scan_iter(f"{kit.base}*"))


class TestOrphans:
    @pytest.mark.requirement("X-128")
    async def test_what_no_state_lists_is_deleted_and_nothing_else(self, kit: Kit) -> None:
        queue, gate = kit.queue(), Gate()
        ranks: list[dict[str, Any]] = [{}, {}, {"priority": 2}, {"delay": FAR_MS}, {"job_id": "a:b:c"}]
        for options in ranks:
            await queue.add("job", **options)
        await kit.work(gate)
        await gate.reached()
        schedule(kit, "s", 1000, "delayed", score=1)
        kit.redis.set(f"{kit.base}de:kept", "2")
        kit.redis.set(f"{kit.base}de:throttled", "nobody", px=FAR_MS)
        sound = sorted(kit.redis.scan_iter(f"{kit.base}*"))
        for orphan in ("orphan", "77", "x:y:z"):
            kit.seed(orphan, to=None)
        kit.redis.rpush(f"{kit.base}77:logs", "line")
        kit.redis.rpush(f"{kit.base}gone:logs", "line")
        kit.redis.sadd(f"{kit.base}gone:dependencies", "some key")
        kit.redis.set(f"{kit.base}de:stale", "gone")
        kit.redis.hset(f"{kit.base}dn:nobody", "name", "next")
        kit.redis.set(f"{kit.base}unknown", "no hash, so no job")

        removed = await queue.remove_orphans(restorable=True)

        kit.redis.delete(f"{kit.base}unknown", f"{kit.base}marker")
        left = sorted(kit.redis.scan_iter(f"{kit.base}*"))
        assert left == [key for key in sound if key != f"{kit.base}marker".encode()]
        assert removed >= 7
        gate.open()

    @pytest.mark.requirement("X-128", "W-84")
    async def test_a_parent_that_waits_for_an_orphan_is_released(self, kit: Kit) -> None:
        flow(kit, f"{kit.name}-other", "child")
        kit.redis.delete(f"{kit.base}wait")

        assert await kit.queue().remove_orphans(restorable=True) == 1

        assert kit.redis.lrange(f"bull:{kit.name}-other:wait", 0, -1) == [b"P"]

    @pytest.mark.requirement("X-128")
    async def test_a_name_with_signs_of_a_pattern_is_taken_literally(self, kit: Kit) -> None:
        odd = kit.queue("q[x]*")
        await odd.add("job")
        kit.redis.hset("bull:q[x]*:orphan", "name", "x")
        kit.redis.hset("bull:qx-another:5", "name", "a job that is no concern of ours")

        assert await odd.remove_orphans(restorable=True) == 1

        assert kit.redis.delete("bull:qx-another:5") == 1


@pytest.mark.requirement("Q-55", "Q-56")
async def test_the_event_stream_is_trimmed_on_demand(kit: Kit) -> None:
    queue = kit.queue()
    await queue.add_many([NewJob("job")] * 500)

    removed = await queue.trim_events(100)

    assert removed >= 800
    assert len(kit.events()) == 1_000 - removed
    assert ids_of(await queue.jobs(count=3)) == ["1", "2", "3"]
