"""Which finished jobs stay: by job, by worker, by count and by age; never a part of a job, never without bound."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bullpen._kernel.keep import KeepJobs, Retention
from bullpen.errors import PermanentError
from bullpen.queue import Added, Job
from tests.queue._kit import Failing, Gate, Kit, ids_of, nothing


async def fail(job: Job) -> None:
    raise PermanentError("no")


def finished_hashes(kit: Kit, count: int) -> set[str]:
    """Ids of the jobs whose hash exists, among the first `count` of the counter."""
    return {str(n) for n in range(1, count + 1) if kit.has(str(n))}


HANDLERS: dict[str, Any] = {"completed": nothing, "failed": fail}
OPTIONS = {"completed": "remove_on_complete", "failed": "remove_on_fail"}

RULES: list[tuple[Retention, int]] = [
    # rule, how many of five finished jobs stay
    (None, 5),
    (False, 5),
    (True, 0),
    (0, 0),
    (1, 1),
    (3, 3),
    (KeepJobs(count=2), 2),
    (KeepJobs(count=0), 0),
    (KeepJobs(age_s=3_600), 5),
    (KeepJobs(age_s=0), 0),
    (KeepJobs(), 5),
]


@pytest.mark.parametrize("rule", [5, KeepJobs(age_s=0)], ids=["count", "age"])
@pytest.mark.parametrize("state", ["completed", "failed"])
async def test_a_member_that_is_no_job_keeps_no_other(kit: Kit, state: str, rule: Any) -> None:
    """One stored item, by whoever may write the queue, ended every purge before it began."""
    kit.redis.rpush(kit.base + "odd", "x")
    kit.redis.zadd(kit.base + state, {"odd": 1, "nothing": 2})
    await kit.queue(None, **{OPTIONS[state]: rule}).add_many(("n", n) for n in range(20))

    await kit.drain(HANDLERS[state], 20)

    assert len(kit.zset(state)) == (5 if rule == 5 else 0)
    assert not kit.has("odd")


class TestRules:
    @pytest.mark.requirement("Q-46", "Q-47", "Q-48")
    @pytest.mark.parametrize("state", ["completed", "failed"])
    @pytest.mark.parametrize(("rule", "kept"), RULES, ids=str)
    async def test_the_newest_so_many_stay(self, kit: Kit, state: str, rule: Retention, kept: int) -> None:
        """True or 0 deletes at once, false keeps, n keeps the n newest; what goes leaves no key behind."""
        await kit.queue(None, **{OPTIONS[state]: rule}).add_many(("n", n) for n in range(5))

        await kit.drain(HANDLERS[state], 5)

        assert len(kit.zset(state)) == kept
        assert set(kit.zset(state)) == finished_hashes(kit, 5)
        assert list(kit.zset(state)) == [str(n) for n in range(6 - kept, 6)]

    @pytest.mark.requirement("Q-46", "X-48")
    @pytest.mark.parametrize("state", ["completed", "failed"])
    @pytest.mark.parametrize(("rule", "kept"), RULES, ids=str)
    async def test_a_worker_sets_the_rule_for_jobs_that_say_nothing(
        self, kit: Kit, state: str, rule: Retention, kept: int
    ) -> None:
        """One place for the policy of a whole worker, in the same words as on a job."""
        await kit.queue().add_many(("n", n) for n in range(5))

        await kit.drain(HANDLERS[state], 5, **{OPTIONS[state]: rule})

        assert len(kit.zset(state)) == kept
        assert set(kit.zset(state)) == finished_hashes(kit, 5)

    async def test_a_jobs_own_rule_comes_before_the_workers(self, kit: Kit) -> None:
        """`False` is a rule too: keep this one, whatever the worker does with others."""
        queue = kit.queue()
        kept = await queue.add("kept", remove_on_complete=False)
        await queue.add("gone")

        await kit.drain(nothing, 2, remove_on_complete=True)

        assert list(kit.zset("completed")) == [kept.id]

    async def test_each_outcome_has_its_own_rule(self, kit: Kit) -> None:
        """Completed jobs may go at once while failed ones stay for somebody to look at."""
        await kit.queue(remove_on_complete=True, remove_on_fail=False).add_many([("a", None), ("b", None)])

        await kit.drain(Failing(PermanentError("no")), 2)

        assert kit.zset("completed") == {}
        assert list(kit.zset("failed")) == ["1"]

    @pytest.mark.parametrize(
        "raw", ["-5", '"3"', "1.9", "[]", "{}", '{"count":-1}', '{"age":"x"}', '{"count":2,"limit":0}']
    )
    async def test_rules_of_others_are_read_with_care(self, kit: Kit, raw: str) -> None:
        """Node accepts all of these; what cannot be read keeps the jobs, which is the safe side."""
        kept = {'"3"': 3, "1.9": 1, '{"count":2,"limit":0}': 2}.get(raw, 4)
        for n in range(4):
            kit.seed(f"job-{n}", opts=f'{{"removeOnComplete":{raw}}}')

        await kit.drain(nothing, 4)

        assert list(kit.zset("completed")) == [f"job-{n}" for n in range(4 - kept, 4)]


class TestAge:
    @pytest.mark.requirement("Q-46")
    async def test_older_jobs_go_when_the_next_one_finishes(self, kit: Kit) -> None:
        """Age counts in seconds from the end of a job; it is looked at only when another one ends."""
        queue = kit.queue(remove_on_complete=KeepJobs(age_s=60))
        old = await queue.add_many([("old", None), ("old", None)])
        await kit.drain(nothing, 2)
        new = await queue.add("new")

        await kit.drain(nothing, 1, clock_offset_ms=120_000)

        assert list(kit.zset("completed")) == [new.id]
        assert not any(kit.has(job_id) for job_id in ids_of(old))

    async def test_age_and_count_hold_together(self, kit: Kit) -> None:
        """Whoever gives two bounds means both, also when one of them has removed something already."""
        queue = kit.queue(remove_on_complete=KeepJobs(age_s=60, count=2))
        await queue.add("old")
        await kit.drain(nothing, 1)
        for n in range(5):
            kit.seed(f"kept-{n}", to="completed", score=kit.server_ms() + 100_000 + n, finishedOn=1, returnvalue="1")
        last = await queue.add("last")

        await kit.drain(nothing, 1, clock_offset_ms=120_000)

        assert list(kit.zset("completed")) == ["kept-4", last.id]

    async def test_members_and_hashes_go_together(self, kit: Kit) -> None:
        """At most `limit` aged jobs per finish; exactly the members whose hashes were deleted leave the set."""
        for n in range(30):
            kit.seed(f"aged-{n}", to="completed", score=1_000 + n, finishedOn=1_000 + n, returnvalue="1")
        await kit.queue().add("now", remove_on_complete=KeepJobs(age_s=60, limit=10))

        await kit.drain(nothing, 1)

        members = set(kit.zset("completed")) - {"1"}
        assert len(members) == 20
        assert members == {f"aged-{n}" for n in range(30) if kit.has(f"aged-{n}")}


class TestBounds:
    async def test_many_rules_in_one_call_remove_no_more_than_one(self, kit: Kit) -> None:
        """Jobs that finish together may have a rule each; a thousand removals each would hold up everybody."""
        pipeline = kit.redis.pipeline(transaction=False)
        for n in range(3_000):
            pipeline.hset(f"{kit.base}old-{n:04}", mapping={"name": "old", "data": "{}", "finishedOn": n + 1})
            pipeline.zadd(kit.base + "completed", {f"old-{n:04}": n + 1})
        pipeline.execute()
        gate = Gate()
        for count in range(1, 6):
            await kit.queue().add("new", remove_on_complete=KeepJobs(count=count, age_s=60))
        told = await kit.work(gate, concurrency=5)
        await gate.reached(5)

        gate.open()  # all five end in one turn of the loop, and leave with one exchange
        await told.finished(5)

        assert kit.redis.zcard(kit.base + "completed") == 3_000 + 5 - 1_000

    async def test_a_call_removes_at_most_a_thousand(self, kit: Kit) -> None:
        """An unbounded purge blocked whole servers; the next finish goes on where this one stopped."""
        pipeline = kit.redis.pipeline(transaction=False)
        for n in range(2_300):
            pipeline.hset(f"{kit.base}old-{n:04}", mapping={"name": "old", "data": "{}", "finishedOn": n + 1})
            pipeline.zadd(kit.base + "completed", {f"old-{n:04}": n + 1})
        pipeline.execute()
        queue = kit.queue(remove_on_complete=10)
        left = []

        for _ in range(3):
            await queue.add("new")
            await kit.drain(nothing, 1)
            left.append(len(kit.zset("completed")))

        assert left == [1_301, 302, 10]
        assert len(list(kit.redis.scan_iter(f"{kit.base}old-*"))) == 7

    async def test_everything_of_a_job_goes_with_it(self, kit: Kit) -> None:
        """Logs and children's results are keys of their own; left behind they would stay for ever."""
        job = await kit.queue().add("parent", remove_on_complete=True)
        for suffix in ("processed", "failed"):
            kit.redis.hset(f"{kit.base}{job.id}:{suffix}", "bull:kids:1", "1")

        async def log(job: Job) -> None:
            await job.log("line")

        await kit.drain(log, 1)

        assert list(kit.redis.scan_iter(f"{kit.base}{job.id}*")) == []

    async def test_rules_of_one_call_apply_to_their_own_sets(self, kit: Kit) -> None:
        """Jobs that end together may have many rules; failed ones must not go by a rule for completed ones."""
        queue = kit.queue()
        for n in range(10):
            await queue.add("ok", n, remove_on_complete=3, remove_on_fail=7)
        for n in range(10):
            await queue.add("bad", n, remove_on_complete=3, remove_on_fail=7)

        async def half(job: Job) -> None:
            if job.name == "bad":
                raise PermanentError("no")

        await kit.drain(half, 20, concurrency=20)

        assert len(kit.zset("completed")) == 3
        assert len(kit.zset("failed")) == 7
        assert set(kit.zset("completed")) | set(kit.zset("failed")) == finished_hashes(kit, 20)

    @pytest.mark.requirement("X-5")
    async def test_a_failed_job_that_is_removed_leaves_its_dead_letter(self, kit: Kit) -> None:
        """The failed set may be kept empty when dead letters go to a queue of their own."""
        job = await kit.queue().add("a", {"n": 1}, remove_on_fail=True)

        await kit.drain(fail, 1, dead_letters=True)

        assert kit.zset("failed") == {}
        assert not kit.has(job.id)
        [letter] = await kit.queue().dead_letters.list()
        assert (letter.job_id, letter.data) == (job.id, {"n": 1})


DAY_MS = 86_400_000


async def until_gone(kit: Kit, *job_ids: str) -> None:
    async with asyncio.timeout(20):
        while any(kit.has(job_id) for job_id in job_ids):  # noqa: ASYNC110 - a removal by retention has no event
            await asyncio.sleep(0.02)


class TestDefault:
    """What stays where neither job nor worker says anything."""

    @pytest.mark.requirement("Q-46")
    async def test_a_thousand_completed_jobs_stay_and_an_id_is_free_again(self, kit: Kit) -> None:
        """Jobs of other clients are counted, but stay: they named no rule, which means all."""
        old = kit.server_ms() - 1_000
        for name in ("theirs", "kept"):
            kit.seed(name, to="completed", score=old, finishedOn=old, returnvalue="1")
        queue = kit.queue(None)
        first = await queue.add("first", job_id="order-7")
        await queue.add("named", remove_on_complete=False, job_id="mine")
        await kit.drain(nothing, 2)
        await queue.add_many(("n", n) for n in range(1_000))
        await kit.drain(nothing, 1_000, concurrency=100)

        await kit.work(nothing, clock_offset_ms=120_000)
        await until_gone(kit, first.id)

        assert len(kit.zset("completed")) == 1_003
        assert kit.has("theirs") and kit.has("kept") and kit.has("mine")
        assert (await queue.add("first", job_id="order-7")).added is Added.CREATED

    async def test_a_result_can_be_read_for_a_minute_whatever_the_number(self, kit: Kit) -> None:
        queue = kit.queue(None)
        jobs = await queue.add_many([("n", n) for n in range(1_100)])
        told = await kit.work(nothing, concurrency=100)
        await told.finished(1_100)
        await asyncio.sleep(1.3)  # the first look is a second after the start

        assert await jobs[0].result(timeout=5_000) is None

    async def test_completed_jobs_go_after_a_day_though_none_follows(self, kit: Kit) -> None:
        """An id is not taken for ever in a queue where nothing else happens."""
        queue = kit.queue(None)
        await queue.add("daily", job_id="daily")
        await kit.drain(nothing, 1)

        await kit.work(nothing, clock_offset_ms=DAY_MS - 60_000, remove_on_complete=False)
        await kit.work(nothing, clock_offset_ms=DAY_MS + 60_000)
        await until_gone(kit, "daily")

        assert kit.zset("completed") == {}

    async def test_failed_jobs_go_after_a_week_if_a_dead_letter_holds_them(self, kit: Kit) -> None:
        queue = kit.queue(None, attempts=1)
        await queue.add("a", job_id="without")
        await kit.drain(fail, 1)
        two_hours_ago = kit.server_ms() - 7_200_000  # before the first sweep: nobody writes a letter for it
        kit.redis.zadd(f"{kit.base}failed", {"without": two_hours_ago})
        await queue.add("b", job_id="lettered")
        await queue.add("c", job_id="named", remove_on_fail=False)
        await kit.drain(fail, 2, dead_letters=True)

        await kit.work(nothing, clock_offset_ms=7 * DAY_MS + 60_000, dead_letters=True)
        await until_gone(kit, "lettered")

        assert set(kit.zset("failed")) == {"without", "named"}
        assert {letter.job_id for letter in await queue.dead_letters.list()} == {"lettered", "named"}

    async def test_a_worker_that_keeps_all_removes_nothing(self, kit: Kit) -> None:
        queue = kit.queue(None)
        await queue.add("daily", job_id="daily")
        told = await kit.work(nothing, remove_on_complete=False, remove_on_fail=False, clock_offset_ms=2 * DAY_MS)
        await told.finished(1)
        kit.redis.zadd(f"{kit.base}completed", {"daily": kit.server_ms()})
        await asyncio.sleep(1.3)

        assert kit.has("daily")
