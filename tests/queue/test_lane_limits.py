"""Limits of lanes: exact among our workers, and nothing stays behind when somebody dies."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest

from bullpen._kernel.outcome import Completed, Retry
from bullpen._kernel.rates import RateLimit
from bullpen.errors import InvalidOption, LaneFull
from bullpen.queue import Added, Job, NewJob, Queue, sync
from bullpen.queue.lanes import LaneSettings
from bullpen.queue.packing import add_arguments, pack_jobs, read_stored
from bullpen.wire.options import DEFAULT_OPTIONS
from bullpen.wire.scripts import SCRIPTS
from bullpen.worker.exchange import Exchange, JobSettlement
from tests.bench._exchange import exchange_of
from tests.queue._kit import Kit

DONE = Completed(b"null")


async def fill(queue: Queue, lane: str, count: int) -> list[Job]:
    return await queue.add_many([NewJob("work", {}, {"lane": lane}) for _ in range(count)])


async def settle(exchange: Exchange, jobs: list[Job], take: int) -> list[Job]:
    reply = await exchange.run([JobSettlement(job, DONE) for job in jobs], take)
    assert set(reply.codes) <= {0}
    return reply.taken


async def take(exchange: Exchange, count: int) -> list[Job]:
    return (await exchange.run([], count)).taken


def lanes_of(jobs: list[Job]) -> Counter[str | None]:
    return Counter(job.lane for job in jobs)


class TestConcurrency:
    async def test_no_more_run_at_once_and_all_run(self, kit: Kit) -> None:
        queue = kit.queue()
        await queue.lanes.set("a", concurrency=3)
        await fill(queue, "a", 40)
        await fill(queue, "b", 40)
        running: Counter[str | None] = Counter()
        most: Counter[str | None] = Counter()

        async def handle(job: Job) -> None:
            running[job.lane] += 1
            most[job.lane] = max(most[job.lane], running[job.lane])
            await asyncio.sleep(0.002)
            running[job.lane] -= 1

        told = [await kit.work(handle, concurrency=10) for _ in range(2)]
        async with asyncio.timeout(60):
            while sum(len(one.of("completed")) for one in told) < 80:  # noqa: ASYNC110 - two workers tell
                await asyncio.sleep(0.01)

        assert most["a"] == 3
        assert most["b"] > 3

    async def test_what_is_held_lets_others_pass_and_keeps_its_order(self, kit: Kit) -> None:
        queue = kit.queue()
        await queue.lanes.set("a", concurrency=1)
        jobs = await fill(queue, "a", 20)
        await fill(queue, "b", 5)
        async with exchange_of(queue, kit.url) as exchange:
            taken = await take(exchange, 10)
            assert lanes_of(taken) == {"a": 1, "b": 5}

            order = [job.id for job in taken if job.lane == "a"]
            running = taken
            while running := await settle(exchange, running, 10):
                assert len(running) == 1
                order += [job.id for job in running]

            assert order == [job.id for job in jobs]

    async def test_the_limit_of_all_holds_for_each(self, kit: Kit) -> None:
        queue = kit.queue()
        await queue.lanes.set(None, concurrency=2)
        await queue.lanes.set("wide", concurrency=4)
        for lane in ("a", "b", "wide"):
            await fill(queue, lane, 10)
        async with exchange_of(queue, kit.url) as exchange:
            taken = await take(exchange, 30)

            assert lanes_of(taken) == {"a": 2, "b": 2, "wide": 4}
            while taken := await settle(exchange, taken, 30):
                pass
        assert (await queue.counts()).pending == 0

    async def test_a_slot_that_a_retry_leaves_goes_to_the_next(self, kit: Kit) -> None:
        queue = kit.queue()
        await queue.lanes.set("a", concurrency=1)
        await fill(queue, "a", 3)
        async with exchange_of(queue, kit.url) as exchange:
            (first,) = await take(exchange, 5)
            reply = await exchange.run([JobSettlement(first, Retry("boom", "boom", 60_000))], 5)

            assert [job.id for job in reply.taken] == ["2"]
            while reply.taken:
                reply = await exchange.run([JobSettlement(job, DONE) for job in reply.taken], 5)

    async def test_what_runs_already_counts_against_a_new_limit(self, kit: Kit) -> None:
        queue = kit.queue()
        await fill(queue, "a", 10)
        async with exchange_of(queue, kit.url) as exchange:
            running = await take(exchange, 3)
            await queue.lanes.set("a", concurrency=3)

            assert await take(exchange, 5) == []
            while running := await settle(exchange, running, 5):
                assert len(running) <= 3

    async def test_lifting_a_limit_lets_all_go_on(self, kit: Kit) -> None:
        queue = kit.queue()
        await queue.lanes.set("a", concurrency=1)
        await fill(queue, "a", 30)
        async with exchange_of(queue, kit.url) as exchange:
            running = await take(exchange, 30)
            assert len(running) == 1
            await queue.lanes.set("a", concurrency=False)

            more = await take(exchange, 50)

            assert len(more) == 29
            await settle(exchange, running + more, 0)

    async def test_the_place_of_a_worker_that_died_is_found_again(self, kit: Kit) -> None:
        """Nobody settles its job: the stalled check returns it, and the place is still its own."""
        queue = kit.queue()
        await queue.lanes.set("a", concurrency=1)
        await fill(queue, "a", 3)
        async with exchange_of(queue, kit.url) as dead, exchange_of(queue, kit.url) as other:
            (lost,) = await take(dead, 1)
            assert await take(other, 5) == []
            kit.redis.delete(f"{kit.base}{lost.id}:lock")
            kit.redis.lrem(kit.base + "active", 1, lost.id)
            kit.redis.rpush(kit.base + "wait", lost.id)

            (again,) = await take(other, 5)

            assert again.id == lost.id
            running = [again]
            while running := await settle(other, running, 5):
                assert len(running) == 1
        assert (await queue.counts()).completed == 3

    async def test_the_place_of_a_job_that_is_gone_is_given_on(self, kit: Kit) -> None:
        queue = kit.queue()
        await queue.lanes.set("a", concurrency=1)
        await fill(queue, "a", 2)
        async with exchange_of(queue, kit.url) as exchange:
            (lost,) = await take(exchange, 5)
            kit.redis.delete(f"{kit.base}{lost.id}:lock", f"{kit.base}{lost.id}")
            kit.redis.lrem(kit.base + "active", 1, lost.id)
            reply = await exchange.run([], 5)
            assert reply.taken == []
            assert reply.now_ms < reply.next_due_ms <= reply.now_ms + 10_000, "nobody would look again"
        async with exchange_of(queue, kit.url, clock_offset_ms=10_001) as later:
            (second,) = await take(later, 5)

            assert second.id == "2"
            await settle(later, [second], 0)

    async def test_without_us_held_jobs_become_due(self, kit: Kit) -> None:
        queue = kit.queue()
        await queue.lanes.set("a", concurrency=1)
        await fill(queue, "a", 3)
        async with exchange_of(queue, kit.url) as exchange:
            running = await take(exchange, 5)
            due = [float(str(kit.redis.zscore(kit.base + "delayed", job_id))) / 4096 for job_id in ("2", "3")]

            now = int(kit.redis.time()[0]) * 1_000
            assert all(now + 3_500_000 < at < now + 3_700_000 for at in due)
            assert 0 < kit.redis.ttl(kit.base + "bp:held:a") <= 7_200
            while running := await settle(exchange, running, 5):
                pass

    async def test_nothing_is_left_of_lanes_that_are_done(self, kit: Kit) -> None:
        queue = kit.queue()
        await queue.lanes.set("a", concurrency=2)
        await fill(queue, "a", 10)
        async with exchange_of(queue, kit.url) as exchange:
            running = await take(exchange, 5)
            while running := await settle(exchange, running, 5):
                pass

        left = {key.decode().removeprefix(kit.base) for key in kit.redis.scan_iter(kit.base + "bp:*")}
        assert {key for key in left if not key.startswith("bp:call:")} <= {"bp:lanes:1"}


class TestRate:
    async def test_no_more_start_in_a_window(self, kit: Kit) -> None:
        queue = kit.queue()
        await queue.lanes.set("a", rate=(4, 60_000))
        await fill(queue, "a", 20)
        await fill(queue, "b", 6)
        async with exchange_of(queue, kit.url) as exchange:
            taken = await take(exchange, 30)
            assert lanes_of(taken) == {"a": 4, "b": 6}
            reply = await exchange.run([JobSettlement(job, DONE) for job in taken], 30)
            assert reply.taken == []
            assert reply.now_ms + 50_000 < reply.next_due_ms <= reply.now_ms + 60_000

            kit.redis.delete(kit.base + "bp:rate:a")  # the window ends
            kit.redis.zadd(kit.base + "bp:lanes:held", {"a": 1})
            again = await take(exchange, 30)

            assert len(again) == 4
            await queue.lanes.remove("a")
            running = again
            while running := await settle(exchange, running, 30):
                pass

    async def test_a_worker_goes_on_when_the_window_ends(self, kit: Kit) -> None:
        queue = kit.queue()
        await queue.lanes.set("a", rate=RateLimit(5, 100))
        await fill(queue, "a", 15)
        starts: list[int] = []

        async def handle(job: Job) -> None:
            starts.append(job.processed_on)

        told = await kit.work(handle, concurrency=20)
        await told.finished(15)

        assert max(starts) - min(starts) >= 199, "two windows must have ended"


class TestPause:
    async def test_a_paused_lane_waits_and_others_run(self, kit: Kit) -> None:
        queue = kit.queue()
        await queue.lanes.pause("a")
        await fill(queue, "a", 5)
        await fill(queue, "b", 5)
        async with exchange_of(queue, kit.url) as exchange:
            taken = await take(exchange, 20)
            assert lanes_of(taken) == {"b": 5}
            assert (await queue.lanes.get("a")).paused

            await queue.lanes.resume("a")
            resumed = await take(exchange, 20)

            assert lanes_of(resumed) == {"a": 5}
            await settle(exchange, taken + resumed, 0)

    async def test_a_pause_for_a_time_ends_by_itself(self, kit: Kit) -> None:
        """At its end an idle worker goes on at once, although it would poll much later."""
        queue = kit.queue()
        await queue.lanes.pause("a", 300)
        jobs = await fill(queue, "a", 3)
        paused = await queue.lanes.get("a")
        assert paused.paused
        assert paused.paused_until is not None
        starts: list[int] = []

        async def handle(job: Job) -> None:
            starts.append(job.processed_on)

        told = await kit.work(handle, drain_delay=30_000)
        await told.finished(len(jobs))

        assert min(starts) >= paused.paused_until.timestamp() * 1000
        assert await queue.lanes.get("a") == LaneSettings()
        assert not (await queue.lanes.list())[0].settings.paused
        assert kit.redis.zcard(kit.base + "bp:lanes:held") == 0

    async def test_a_pause_is_made_longer_shorter_and_without_an_end(self, kit: Kit) -> None:
        queue = kit.queue()
        await fill(queue, "a", 2)
        async with exchange_of(queue, kit.url) as exchange:
            await queue.lanes.pause("a", timedelta(minutes=5))
            reply = await exchange.run([], 9)
            assert reply.taken == []
            assert reply.now_ms + 200_000 < reply.next_due_ms <= reply.now_ms + 300_000
            await queue.lanes.pause("a", 60_000)
            reply = await exchange.run([], 9)
            assert reply.now_ms + 30_000 < reply.next_due_ms <= reply.now_ms + 60_000
            await queue.lanes.pause("a")
            assert await queue.lanes.get("a") == LaneSettings(paused=True)
            assert await take(exchange, 9) == []

            await queue.lanes.pause("a", 1)
            running: list[Job] = []
            async with asyncio.timeout(20):
                while not running:
                    running = await take(exchange, 9)
            assert lanes_of(running) == {"a": 2}
            await settle(exchange, running, 0)
        await queue.lanes.set("a", weight=2)
        assert kit.redis.hget(kit.base + "meta", "bplane:a") == b"2 - - - - -", "a pause that is over is forgotten"

    @pytest.mark.parametrize("duration", [0, -5, 1.5, "soon"])
    async def test_a_pause_that_is_none_is_refused(self, kit: Kit, duration: Any) -> None:
        with pytest.raises(InvalidOption, match="duration"):
            await kit.queue().lanes.pause("a", duration)

    async def test_a_stored_pause_that_is_no_time_is_read(self, kit: Kit) -> None:
        kit.redis.hset(kit.base + "meta", mapping={"bplanes": "limited", "bplane:a": "- - - - 9007199254740000 -"})
        settings = await kit.queue().lanes.get("a")
        assert (settings.paused, settings.paused_until) == (True, None)
        await kit.queue().lanes.resume("a")

    async def test_resuming_wakes_an_idle_worker(self, kit: Kit) -> None:
        queue = kit.queue()
        await queue.lanes.pause("a")
        await fill(queue, "a", 3)

        async def handle(job: Job) -> None: ...

        told = await kit.work(handle, drain_delay=30_000)
        async with asyncio.timeout(20):
            while kit.redis.zcard(kit.base + "bp:held:a") < 3:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.01)
        await queue.lanes.resume("a")

        await told.finished(3, within_s=10)

    async def test_many_that_were_held_do_not_keep_others_waiting(self, kit: Kit) -> None:
        queue = kit.queue()
        await queue.lanes.pause("a")
        await fill(queue, "a", 600)
        async with exchange_of(queue, kit.url) as exchange:
            for _ in range(20):
                assert await take(exchange, 100) == []
            assert (await queue.counts()).delayed == 600
            await queue.lanes.resume("a")
            await settle(exchange, await take(exchange, 100), 0)
            await fill(queue, "b", 10)

            taken = await take(exchange, 30)

            assert lanes_of(taken)["b"] == 10
            while taken := await settle(exchange, taken, 100):
                pass
        assert (await queue.counts()).pending == 0

    async def test_a_held_job_that_gets_a_delay_keeps_it(self, kit: Kit) -> None:
        """Whoever releases must not take it for one of his."""
        queue = kit.queue()
        await queue.lanes.set("a", concurrency=1)
        _, second = await fill(queue, "a", 2)
        async with exchange_of(queue, kit.url) as exchange:
            running = await take(exchange, 5)
            await queue.change_delay(second.id, 500_000)

            assert await settle(exchange, running, 5) == []

        assert (await queue.counts()).delayed == 1


class TestAdministration:
    async def test_removing_held_jobs_leaves_nothing(self, kit: Kit) -> None:
        queue = kit.queue()
        await queue.lanes.pause("a")
        jobs = await fill(queue, "a", 6)
        async with exchange_of(queue, kit.url) as exchange:
            assert await take(exchange, 10) == []
        await queue.remove(jobs[0].id)
        assert kit.redis.zcard(kit.base + "bp:held:a") == 5

        await queue.drain(delayed=True)

        assert not kit.redis.exists(kit.base + "bp:held:a")

    async def test_obliterate_takes_all_keys_of_lanes(self, kit: Kit) -> None:
        queue = kit.queue()
        await queue.lanes.set("a", concurrency=2, rate=(5, 60_000))
        await fill(queue, "a", 6)
        async with exchange_of(queue, kit.url) as exchange:
            assert len(await take(exchange, 10)) == 2
        await queue.pause()

        await queue.obliterate(force=True)

        left = {key.decode().removeprefix(kit.base) for key in kit.redis.scan_iter(kit.base + "*")}
        assert {key for key in left if not key.startswith("bp:call:")} == set()

    async def test_settings_are_kept_changed_and_taken_back(self, kit: Kit) -> None:
        lanes = kit.queue().lanes
        await lanes.set("a", weight=2.5, concurrency=3)
        changed = await lanes.set("a", rate=(10, 1_000), concurrency=False)

        assert changed == LaneSettings(weight=2.5, rate=RateLimit(10, 1_000)) == await lanes.get("a")
        await lanes.remove("a")
        assert await lanes.get("a") == LaneSettings()
        assert not kit.redis.hexists(kit.base + "meta", "bplane:a")

    async def test_lanes_are_listed_with_their_jobs(self, kit: Kit) -> None:
        queue = kit.queue()
        await queue.lanes.set("a", concurrency=1)
        await queue.lanes.set("idle", weight=2)
        await fill(queue, "a", 4)
        await queue.add("work", lane="b", delay=100_000)
        await queue.add("work")
        async with exchange_of(queue, kit.url) as exchange:
            running = await take(exchange, 10)

            listed = {lane.name: lane for lane in await queue.lanes.list()}

            assert listed.keys() == {"a", "b", "idle"}
            assert (listed["a"].active, listed["a"].held, listed["a"].waiting, listed["a"].delayed) == (1, 3, 0, 0)
            assert listed["a"].settings.concurrency == 1
            assert (listed["b"].delayed, listed["idle"].settings.weight) == (1, 2)
            while running := await settle(exchange, running, 10):
                pass

    @pytest.mark.parametrize("wrong", [{"concurrency": 0}, {"rate": (0, 5)}, {"rate": (1, 0)}, {"rate": 5}])
    async def test_a_limit_that_is_none_is_refused(self, kit: Kit, wrong: dict[str, object]) -> None:
        with pytest.raises(InvalidOption):
            await kit.queue().lanes.set("a", **wrong)  # type: ignore[arg-type]


class TestSize:
    async def test_an_add_to_a_full_lane_is_refused_and_others_are_not(self, kit: Kit) -> None:
        queue = kit.queue()
        await queue.lanes.set("a", size=2)

        await fill(queue, "a", 2)
        with pytest.raises(LaneFull, match="'a'") as refused:
            await queue.add("work", lane="a", job_id="late")
        await fill(queue, "b", 3)

        assert (refused.value.queue, refused.value.lane) == (queue.name, "a")
        assert not kit.has("late")
        assert (await queue.counts()).prioritized == 5

    async def test_callers_that_share_a_call_are_told_each_its_own(self, kit: Kit) -> None:
        queue = kit.queue()
        await queue.lanes.set(None, size=1)
        wanted = [("a", "1"), ("b", "2"), ("a", "3"), ("c", "4")]

        told = await asyncio.gather(
            *(queue.add("work", lane=lane, job_id=f"j{name}") for lane, name in wanted), return_exceptions=True
        )

        assert [type(one).__name__ for one in told] == ["Job", "Job", "LaneFull", "Job"]
        assert sorted(kit.zset("prioritized")) == ["j1", "j2", "j4"]

    async def test_a_started_a_removed_and_a_stolen_job_make_room(self, kit: Kit) -> None:
        """Whoever took it."""
        queue = kit.queue()
        await queue.lanes.set("a", size=3)
        jobs = await fill(queue, "a", 3)
        async with exchange_of(queue, kit.url) as exchange:
            running = await take(exchange, 1)
            await fill(queue, "a", 1)
            await queue.remove(jobs[1].id)
            await fill(queue, "a", 1)
            kit.redis.zrem(kit.base + "prioritized", jobs[2].id)  # as another client takes and removes it
            kit.redis.delete(kit.base + jobs[2].id)
        async with kit.queue(clock_offset_ms=1_001) as later:
            await fill(later, "a", 1)
            with pytest.raises(LaneFull):
                await fill(later, "a", 1)
        assert running[0].id == jobs[0].id

    async def test_delayed_and_held_jobs_count_and_duplicates_do_not(self, kit: Kit) -> None:
        queue = kit.queue()
        await queue.lanes.set("a", size=2)
        await queue.add("work", lane="a", delay=1_000_000, job_id="later")
        assert (await queue.add("work", lane="a", job_id="later")).added is Added.DUPLICATE
        await queue.lanes.pause("a")
        await fill(queue, "a", 1)
        async with exchange_of(queue, kit.url) as exchange:
            assert await take(exchange, 5) == []

        with pytest.raises(LaneFull):
            await queue.add("work", lane="a")

    async def test_many_that_find_no_room_are_told_and_the_others_stay(self, kit: Kit) -> None:
        queue = kit.queue()
        await queue.lanes.set("a", size=250)

        with pytest.raises(LaneFull):
            await fill(queue, "a", 300)

        assert (await queue.counts()).prioritized == 250

    async def test_a_lost_reply_is_answered_as_the_first(self, kit: Kit) -> None:
        queue = kit.queue()
        await queue.lanes.set("a", size=1)
        jobs = pack_jobs([NewJob("w", {}, {"lane": "a"})] * 2, DEFAULT_OPTIONS)
        args = add_arguments(queue.keys, jobs, 7, 60_000)
        script = SCRIPTS["add"]

        first = read_stored(kit.redis.eval(script.body.decode(), 1, queue.keys.call("me"), *args))
        again = read_stored(kit.redis.eval(script.body.decode(), 1, queue.keys.call("me"), *args))

        for stored in (first, again):
            assert [(index, type(other)) for index, other in stored.others(jobs, "q")] == [(1, LaneFull)]
        assert len(kit.zset("prioritized")) == 1

    async def test_the_blocking_queue_refuses_too(self, kit: Kit) -> None:
        await kit.queue().lanes.set("a", size=1)

        def add() -> None:
            with sync.Queue(kit.name, connection=kit.url) as queue:
                queue.add("work", lane="a")
                with pytest.raises(LaneFull):
                    queue.add("work", lane="a")
                with pytest.raises(LaneFull):
                    queue.add_many([NewJob("work", {}, {"lane": "a"})])

        await asyncio.to_thread(add)

    async def test_nothing_is_left_of_a_size_that_was_taken_back(self, kit: Kit) -> None:
        queue = kit.queue()
        await queue.lanes.set("a", size=1)
        await fill(queue, "a", 1)
        assert 0 < kit.redis.ttl(kit.base + "bp:size:a") <= 604_800

        await queue.lanes.set("a", size=False)

        assert not kit.redis.exists(kit.base + "bp:size:a")
        await fill(queue, "a", 5)

    @pytest.mark.parametrize("size", [0, -1, 1.5, "many", True])
    async def test_what_is_no_size_is_refused(self, kit: Kit, size: Any) -> None:
        with pytest.raises(InvalidOption, match="size"):
            await kit.queue().lanes.set("a", size=size)
