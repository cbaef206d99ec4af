"""Reading what is stored: pages, walks through many jobs, priorities, schedulers, children, metrics, workers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bullpen.errors import InvalidOption, JobNotFound
from bullpen.queue import Job, JobState, NewJob, Queue
from bullpen.queue.browse import Children, ChildrenCounts, Metrics, WorkerInfo, list_jobs
from bullpen.redis.acl import acl_rule
from bullpen.wire.options import WireOptions
from tests.queue._kit import Failing, Gate, Kit, ids_of, nothing
from tests.queue.test_admin_many import seed_many

FAR_MS = 3_600_000


async def collect(queue: Queue, *states: JobState, newest_first: bool = False) -> list[str]:
    return [job.id async for job in queue.iter_jobs(states or None, newest_first=newest_first)]


class TestPages:
    @pytest.mark.requirement("Q-31", "Q-32", "Q-33", "Q-35")
    async def test_states_follow_each_other_and_a_page_may_span_them(self, kit: Kit) -> None:
        queue = kit.queue()
        await queue.add_many([NewJob("job") for _ in range(3)])
        await queue.add_many([NewJob("job", None, {"priority": priority}) for priority in (9, 1)])
        states = (JobState.WAITING, JobState.PRIORITIZED)

        pages = [ids_of(await queue.jobs(states, start=start, count=2)) for start in (0, 2, 4)]

        assert pages == [["1", "2"], ["3", "5"], ["4"]]
        assert ids_of(await queue.jobs(states, newest_first=True)) == ["3", "2", "1", "4", "5"]
        assert ids_of(await queue.jobs("waiting", start=1)) == ["2", "3"]  # type: ignore[arg-type]  # by value, too
        assert ids_of(await queue.jobs()) == ["1", "2", "3", "5", "4"]
        assert await queue.jobs(JobState.FAILED) == []

    @pytest.mark.requirement("Q-35")
    async def test_finished_jobs_and_those_of_an_old_paused_queue_are_found(self, kit: Kit) -> None:
        queue = kit.queue(attempts=1)
        await queue.add_many([NewJob("job")] * 3)
        await kit.drain(Failing(RuntimeError("boom")), 3)
        kit.seed("old", to="paused")

        assert ids_of(await queue.jobs((JobState.FAILED, JobState.COMPLETED))) == ["1", "2", "3"]
        assert ids_of(await list_jobs(queue, JobState.COMPLETED)) == ["3", "2"]
        assert ids_of(await queue.jobs(JobState.WAITING)) == ["old"]

    async def test_a_page_is_checked(self, kit: Kit) -> None:
        queue = kit.queue()
        for states in ((), "nonsense", JobState.UNKNOWN, [JobState.WAITING, "paused"]):
            with pytest.raises(InvalidOption, match="states: expected states in which jobs are kept"):
                await queue.jobs(states)  # type: ignore[arg-type]  # the mistake under test
        with pytest.raises(InvalidOption, match="start"):
            await queue.jobs(start=-1)
        with pytest.raises(InvalidOption, match="count"):
            await queue.jobs(count=0)

    async def test_ids_without_a_job_are_left_out_and_strange_ids_are_shown(self, kit: Kit) -> None:
        kit.seed(b"\xff\xfe")
        kit.redis.lpush(f"{kit.base}wait", "ghost")

        [job] = await kit.queue().jobs(JobState.WAITING)

        assert job.id.encode("utf-8", "surrogateescape") == b"\xff\xfe"
        kit.redis.lrem(f"{kit.base}wait", 0, "ghost")


class TestWalks:
    @pytest.mark.requirement("Q-31", "Q-35")
    @pytest.mark.parametrize("newest_first", [False, True])
    @pytest.mark.parametrize("state", ["wait", "completed"])
    async def test_all_jobs_are_met_once_and_in_order(self, kit: Kit, state: str, newest_first: bool) -> None:
        seed_many(kit, 1_300, state, score=None if state == "wait" else lambda number: number // 3)
        states = {"wait": JobState.WAITING, "completed": JobState.COMPLETED}

        met = await collect(kit.queue(), states[state], newest_first=newest_first)

        order = [str(number) for number in range(1, 1_301)]
        if state == "completed":  # those of one instant stand in the order of their ids
            order.sort(key=lambda job_id: (int(job_id) // 3, job_id))
        assert met == (order[::-1] if newest_first else order)

    @pytest.mark.requirement("Q-35")
    async def test_thousands_that_finished_in_one_instant_are_met_once(self, kit: Kit) -> None:
        seed_many(kit, 1_300, "failed", score=lambda _: 7)

        met = await collect(kit.queue(), JobState.FAILED)

        assert len(met) == len(set(met)) == 1_300

    @pytest.mark.requirement("Q-31")
    @pytest.mark.parametrize("newest_first", [False, True])
    @pytest.mark.parametrize("state", ["wait", "failed"])
    async def test_removing_jobs_on_the_way_passes_over_none(self, kit: Kit, state: str, newest_first: bool) -> None:
        seed_many(kit, 1_600, state, score=None if state == "wait" else lambda number: number)
        queue = kit.queue()
        met = []

        wire = JobState.WAITING if state == "wait" else JobState.FAILED
        async for job in queue.iter_jobs(wire, newest_first=newest_first):
            met.append(job.id)
            # Whole pages vanish, and single jobs of others.
            if int(job.id) % 7 == 0 or 400 <= int(job.id) <= 1_100:
                await queue.remove(job)

        assert sorted(met, key=int) == [str(number) for number in range(1, 1_601)]

    @pytest.mark.requirement("Q-31")
    async def test_workers_that_take_jobs_meanwhile_hide_none_of_the_others(self, kit: Kit) -> None:
        seed_many(kit, 1_500, "wait")
        queue, met = kit.queue(), list[str]()

        async for job in queue.iter_jobs(JobState.WAITING):
            met.append(job.id)
            if len(met) % 500 == 0:  # while a page is read, more than another one is taken
                kit.command("RPOP", f"{kit.base}wait", 300)

        assert set(map(str, range(1, 1_501))) - set(met) <= set(map(str, range(1, 901)))
        assert set(map(str, range(901, 1_501))) <= set(met)
        kit.redis.flushall()

    @pytest.mark.requirement("Q-31")
    async def test_new_jobs_at_the_end_are_not_met_twice(self, kit: Kit) -> None:
        seed_many(kit, 1_200, "wait")
        queue, met = kit.queue(), list[str]()

        async for job in queue.iter_jobs(JobState.WAITING, newest_first=True):
            met.append(job.id)
            if len(met) == 500:
                await queue.add_many([NewJob("new", None, {"job_id": f"new-{n}"}) for n in range(250)])

        assert met == [str(number) for number in range(1_200, 0, -1)]


class TestPriorities:
    @pytest.mark.requirement("Q-32", "Q-40")
    async def test_each_class_is_counted(self, kit: Kit) -> None:
        queue = kit.queue()
        for priority in (0, 0, 1, 5, 5, 2_097_151):
            await queue.add("job", priority=priority)
        kit.seed("old", to="paused")
        kit.seed("negative", to="prioritized", score=-(2**32), priority=-1)

        assert await queue.counts_per_priority() == {-1: 1, 0: 3, 1: 1, 5: 2, 2_097_151: 1}
        assert await queue.counts_per_priority([0, 1, 4, 5]) == {0: 3, 1: 1, 4: 0, 5: 2}
        assert await kit.queue("another").counts_per_priority() == {}
        with pytest.raises(InvalidOption, match="priorities"):
            await queue.counts_per_priority([-1])

    @pytest.mark.requirement("Q-32")
    async def test_thousands_of_classes_are_counted(self, kit: Kit) -> None:
        seed_many(kit, 2_500, "prioritized", score=lambda number: number << 32)

        assert await kit.queue().counts_per_priority() == dict.fromkeys(range(1, 2_501), 1)


class TestSchedulers:
    async def test_records_are_read_in_the_order_of_their_next_run(self, kit: Kit) -> None:
        kit.redis.zadd(f"{kit.base}repeat", {"later": 2_000, "soon": 1_000, "ghost": 1})
        fields: dict[Any, Any] = {"name": "report", "ic": 4, "pattern": "0 3 * * *", "tz": "Europe/Paris", "limit": 9}
        fields |= {"offset": 0, "startDate": 5, "endDate": 6, "data": '{"x":1}', "opts": '{"attempts":2}'}
        kit.redis.hset(f"{kit.base}repeat:later", mapping=fields)
        kit.redis.hset(f"{kit.base}repeat:soon", mapping={"name": "beat", "ic": 1, "every": 500, "offset": 3})
        queue = kit.queue()

        soon, later = await queue.schedulers()

        assert (soon.id, soon.every_ms, soon.offset_ms, soon.next_ms, soon.iterations) == ("soon", 500, 3, 1_000, 1)
        assert (soon.pattern, soon.data, soon.limit) == (None, {}, None)
        assert (later.pattern, later.zone, later.limit) == ("0 3 * * *", "Europe/Paris", 9)
        assert (later.starts_ms, later.ends_ms, later.data) == (5, 6, {"x": 1})
        assert isinstance(later.opts, WireOptions) and later.opts.attempts == 2
        assert await queue.get_scheduler("later") == later
        assert await queue.get_scheduler("nobody") is None and await queue.get_scheduler("ghost") is None
        assert [one.id for one in await queue.schedulers(start=2)] == ["later"]
        kit.redis.delete(f"{kit.base}repeat", f"{kit.base}repeat:later", f"{kit.base}repeat:soon")


class TestChildren:
    @pytest.mark.requirement("W-84")
    async def test_children_are_listed_by_what_became_of_them(self, kit: Kit) -> None:
        kit.seed("P", to="waiting-children", score=1)
        kit.redis.sadd(f"{kit.base}P:dependencies", "bull:kids:b", "bull:kids:a")
        kit.redis.hset(f"{kit.base}P:processed", mapping={"bull:kids:c": '{"v":1}', "bull:kids:d": "no json"})
        kit.redis.hset(f"{kit.base}P:failed", "bull:kids:e", "boom é")
        kit.redis.zadd(f"{kit.base}P:unsuccessful", {"bull:kids:f": 1})
        queue = kit.queue()

        assert await queue.children("P") == Children(
            processed={"bull:kids:c": {"v": 1}, "bull:kids:d": "no json"},
            pending=("bull:kids:a", "bull:kids:b"),
            ignored={"bull:kids:e": "boom é"},
            failed=("bull:kids:f",),
        )
        assert await queue.children_counts("P") == ChildrenCounts(processed=2, pending=2, ignored=1, failed=1)

    @pytest.mark.requirement("W-84")
    async def test_thousands_of_children_are_read_in_pages(self, kit: Kit) -> None:
        kit.seed("P", to="waiting-children", score=1)
        kit.redis.sadd(f"{kit.base}P:dependencies", *(f"bull:kids:{number}" for number in range(5_000)))

        assert len((await kit.queue().children("P")).pending) == 5_000

    async def test_a_job_without_children_has_none_and_a_missing_one_is_named(self, kit: Kit) -> None:
        queue = kit.queue()
        job = await queue.add("job")

        assert await queue.children(job) == Children({}, (), {}, ())
        assert await queue.children_counts(job) == ChildrenCounts(0, 0, 0, 0)
        for read in (queue.children, queue.children_counts):
            with pytest.raises(JobNotFound):
                await read("nobody")


class TestMetrics:
    @pytest.mark.requirement("W-64")
    async def test_finished_jobs_are_counted_per_minute(self, kit: Kit) -> None:
        """The clock is moved: 5 jobs at once in the first minute, 3 in the second, then nothing for two, then 1."""
        queue = kit.queue(attempts=1)
        for count, minutes in ((5, 0), (3, 1), (1, 4)):
            await queue.add_many([NewJob("job")] * count)
            await kit.drain(nothing, count, concurrency=10, metrics_minutes=60, clock_offset_ms=minutes * 60_000)
        await queue.add("bad")
        await kit.drain(Failing(RuntimeError("boom")), 1, metrics_minutes=60)

        completed, failed = await queue.metrics(), await queue.metrics("failed")

        assert (completed.count, completed.points, completed.points_stored) == (9, (0, 0, 3, 5), 4)
        assert completed.previous_count == 8
        assert (failed.count, failed.points) == (1, ())
        assert (await queue.metrics(start=2, count=1)).points == (3,)

    @pytest.mark.requirement("W-64")
    async def test_only_so_many_minutes_are_kept(self, kit: Kit) -> None:
        queue = kit.queue()
        for minutes in (0, 1, 2, 20_000):
            await queue.add("job")
            await kit.drain(nothing, 1, metrics_minutes=10_000, clock_offset_ms=minutes * 60_000)

        metrics = await queue.metrics(count=20_000)

        assert (metrics.count, metrics.points_stored, sum(metrics.points)) == (4, 10_000, 1)

    @pytest.mark.requirement("W-64")
    async def test_jobs_that_are_not_kept_are_counted_too(self, kit: Kit) -> None:
        queue = kit.queue(remove_on_complete=True, remove_on_fail=True, attempts=1)
        await queue.add_many([NewJob("job")] * 2)

        await kit.drain(Failing(RuntimeError("boom")), 2, metrics_minutes=5)

        assert [(await queue.metrics(kind)).count for kind in ("completed", "failed")] == [1, 1]

    @pytest.mark.leaves_queue_broken
    async def test_a_foreign_key_in_the_way_harms_no_job(self, kit: Kit) -> None:
        kit.redis.set(f"{kit.base}metrics:completed", "not a hash")
        await kit.queue().add("job")

        told = await kit.drain(nothing, 1, metrics_minutes=5)

        assert told.ids("completed") == ["1"] and not told.of("error")

    async def test_without_counting_there_is_nothing(self, kit: Kit) -> None:
        assert await kit.queue().metrics() == Metrics(0, (), 0, 0, 0)
        with pytest.raises(InvalidOption, match="kind: expected 'completed' or 'failed'"):
            await kit.queue().metrics("stalled")  # type: ignore[arg-type]  # the mistake under test
        with pytest.raises(InvalidOption, match="metrics_minutes"):
            kit.worker(nothing, metrics_minutes=0)


class TestWorkers:
    @pytest.mark.requirement("Q-11")
    async def test_workers_are_known_by_their_connections(self, kit: Kit) -> None:
        """Also after their connection broke: the name must be given again."""
        gate = Gate()
        await kit.work(gate, name="one")
        await kit.work(gate, name="two words")
        await kit.queue("another").add("job", delay=FAR_MS)
        await kit.work(gate, queue="another", name="three")
        queue = kit.queue()

        async def until_both_are_listed() -> WorkerInfo:
            async with asyncio.timeout(5):
                while True:
                    found = await queue.workers() or []
                    if [worker.name for worker in found] == ["one", "twowords"]:
                        return found[0]
                    await asyncio.sleep(0.01)  # connections come back when they can; nobody tells

        one = await until_both_are_listed()
        kit.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await until_both_are_listed()

        assert ":" in one.address and one.age_s >= 0 and one.idle_s >= 0
        assert one.fields["name"].endswith(":w:one")

    @pytest.mark.requirement("X-49")
    async def test_a_server_that_forbids_it_cannot_tell(self, kit: Kit, redis_url: str) -> None:
        kit.command("ACL", "SETUSER", "blind", "on", ">secret", *acl_rule().split())
        queue = kit.queue(connection=redis_url.replace("redis://", "redis://blind:secret@"))

        assert await queue.workers() is None


async def test_what_is_read_can_be_acted_on(kit: Kit) -> None:
    queue = kit.queue()
    await queue.add("job", {"n": 1}, delay=FAR_MS)

    [job] = await queue.jobs(JobState.DELAYED)

    assert isinstance(job, Job) and job.data == {"n": 1}
    assert await job.state() is JobState.DELAYED


def test_the_records_are_plain_values() -> None:
    record: Any = ChildrenCounts(1, 2, 3, 4)
    with pytest.raises(AttributeError):
        record.pending = 5
