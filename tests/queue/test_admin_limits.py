"""Limits of a whole queue: exact under batches and several workers, and nobody sleeps when a limit has ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from bullpen.errors import InvalidOption, RateLimited
from bullpen.queue import Job, NewJob, RateLimit
from bullpen.worker import driver as _driver
from tests.queue._kit import Gate, Kit, nothing

FAR_MS = 3_600_000


class Crowd:
    """A handler that counts how many of its runs overlap."""

    def __init__(self, seconds: float = 0.003) -> None:
        self._seconds = seconds
        self.now = self.most = self.runs = 0

    async def __call__(self, job: Job) -> None:
        self.now += 1
        self.runs += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(self._seconds)
        self.now -= 1

    def has_run(self, times: int) -> bool:
        return self.runs == times


def starts_ms(kit: Kit) -> list[int]:
    """When each job started, by the server's clock, in order."""
    entries: Any = kit.redis.xrange(f"{kit.base}events")
    return [int(entry.split(b"-")[0]) for entry, fields in entries if fields[b"event"] == b"active"]


async def clock(seconds: Callable[[], bool], *, within_s: float) -> float:
    """Seconds until something holds."""
    started = time.monotonic()
    while not seconds():
        assert time.monotonic() - started < within_s, "it did not happen in time"
        await asyncio.sleep(0.001)
    return time.monotonic() - started


class TestGlobalConcurrency:
    @pytest.mark.requirement("W-67", "Q-65")
    @pytest.mark.parametrize("most", [1, 3])
    async def test_it_is_never_exceeded_by_several_workers_that_take_in_batches(self, kit: Kit, most: int) -> None:
        queue, crowd = kit.queue(), Crowd()
        await queue.set_global_concurrency(most)
        await queue.add_many([NewJob("job")] * 120)

        told = [await kit.work(crowd, concurrency=50, drain_delay=30_000) for _ in range(3)]
        await clock(lambda: crowd.runs == 120 and crowd.now == 0, within_s=10)

        assert crowd.most == most
        for one in told:
            await one.worker.close()

    @pytest.mark.requirement("W-67")
    async def test_raising_or_removing_it_wakes_idle_workers_at_once(self, kit: Kit) -> None:
        queue, gate = kit.queue(), Gate()
        await queue.set_global_concurrency(1)
        await queue.add_many([NewJob("job")] * 3)
        for _ in range(3):
            await kit.work(gate, drain_delay=30_000)
        await gate.reached(1)

        await queue.set_global_concurrency(2)
        await gate.reached(2, within_s=2)
        assert await queue.global_concurrency() == 2
        await queue.remove_global_concurrency()
        await gate.reached(3, within_s=2)

        assert await queue.global_concurrency() is None
        gate.open()

    @pytest.mark.requirement("W-67")
    async def test_raising_or_removing_it_sets_the_marker(self, kit: Kit) -> None:
        """What wakes them, of any client; our own would find out by themselves a little later."""
        queue = kit.queue()
        await queue.add_many([NewJob("job")] * 3)
        await queue.set_global_concurrency(1)
        for change in (queue.set_global_concurrency(2), queue.remove_global_concurrency()):
            kit.command("DEL", kit.base + "marker")
            await change
            assert kit.marker() == {"0": 0}

    @pytest.mark.requirement("W-67")
    async def test_a_slot_that_another_client_frees_in_silence_is_found_soon(self, kit: Kit) -> None:
        """PyPI bullmq finishes a job of a full queue without a marker; our worker would sleep beside the next one."""
        queue, gate = kit.queue(), Gate()
        await queue.set_global_concurrency(1)
        kit.seed("theirs", to="active")
        kit.command("SET", f"{kit.base}theirs:lock", "another client", "PX", 60_000)
        await queue.add("ours")
        await kit.work(gate, drain_delay=30_000)
        await kit.until(lambda: b"cmd=bzpopmin" in kit.command("CLIENT", "LIST"), "the worker is idle")
        assert kit.marker() == {}

        kit.command("LREM", kit.base + "active", 1, "theirs")
        kit.command("DEL", f"{kit.base}theirs", f"{kit.base}theirs:lock")

        await gate.reached(1)  # it sleeps for longer than that waits
        gate.open()

    @pytest.mark.requirement("W-67")
    async def test_the_slot_of_a_worker_that_closes_wakes_another(self, kit: Kit) -> None:
        """A finish that takes nothing must tell somebody, or the slot stays empty for seconds."""
        queue, first, second = kit.queue(), Gate(), Gate()
        await queue.set_global_concurrency(1)
        await queue.add_many([NewJob("job")] * 2)
        closing = await kit.work(first)
        await first.reached()
        await kit.work(second, drain_delay=30_000)
        await kit.until(lambda: b"cmd=bzpopmin" in kit.command("CLIENT", "LIST"), "the second is idle")

        leaving = asyncio.ensure_future(closing.worker.close())
        await asyncio.sleep(0)
        first.open()

        await second.reached()  # it sleeps for longer than that waits
        await leaving
        second.open()

    @pytest.mark.requirement("W-67", "Q-67")
    async def test_a_job_of_a_dead_worker_frees_its_slot(self, kit: Kit) -> None:
        queue = kit.queue()
        await queue.set_global_concurrency(1)
        kit.seed("dead", to="active")
        kit.redis.sadd(f"{kit.base}stalled", "dead")
        await queue.add("job")

        told = await kit.work(nothing, stalled_interval=50, drain_delay=30_000)

        await told.finished(2)


class TestRateLimits:
    @pytest.mark.requirement("Q-38", "W-67", "W-85")
    @pytest.mark.parametrize("is_global", [True, False], ids=["of the queue", "of the workers"])
    async def test_no_window_starts_more_jobs_than_allowed(self, kit: Kit, is_global: bool) -> None:
        """Several workers, each of which would take fifty at once."""
        queue, crowd = kit.queue(), Crowd(0)
        limit = None if is_global else RateLimit(10, 250)
        if is_global:
            await queue.set_global_rate_limit(10, timedelta(milliseconds=250))
        await queue.add_many([NewJob("job")] * 45)

        told = [await kit.work(crowd, concurrency=50, limit=limit, drain_delay=30_000) for _ in range(3)]
        await clock(lambda: crowd.runs == 45, within_s=10)
        for one in told:
            await one.worker.close()

        started = starts_ms(kit)
        windows = [started[0]]
        for instant in started:
            if instant - windows[-1] >= 249:  # the server counts a window's end in whole milliseconds
                windows.append(instant)
        per_window = [sum(begin <= at < begin + 249 for at in started) for begin in windows]
        assert per_window == [10, 10, 10, 10, 5]
        # Right after each limit ended: four windows of 250 ms, and little on top.
        assert 996 <= started[-1] - started[0] < 1_600

    @pytest.mark.requirement("Q-38", "W-67")
    async def test_the_queue_decides_how_many_and_a_worker_with_a_limit_how_long(self, kit: Kit) -> None:
        queue, crowd = kit.queue(), Crowd(0)
        await queue.set_global_rate_limit(2, FAR_MS)
        await queue.add_many([NewJob("job")] * 5)

        await kit.work(crowd, concurrency=5, limit=RateLimit(100, 60_000))
        await clock(lambda: crowd.runs == 2, within_s=5)
        await kit.until(lambda: kit.has("limiter"), "the window is open")

        assert 0 < kit.command("PTTL", f"{kit.base}limiter") <= 60_000
        assert await queue.global_rate_limit() == RateLimit(2, FAR_MS)
        assert 0 < await queue.rate_limit_ttl() <= 60_000
        assert crowd.runs == 2

    @pytest.mark.requirement("Q-38", "W-85")
    async def test_a_pause_by_hand_stops_all_and_ends_by_itself(self, kit: Kit) -> None:
        queue, gate = kit.queue(), Gate().open()
        told = [await kit.work(gate, drain_delay=30_000) for _ in range(2)]
        before_ms = kit.server_ms()
        await queue.rate_limit(1_000)
        left_ms = await queue.rate_limit_ttl()
        jobs = await queue.add_many([NewJob("job")] * 2)

        await gate.reached(2)  # they sleep for longer than that waits

        assert 0 < left_ms <= 1_000
        assert all(int(kit.fields(job.id)["processedOn"]) >= before_ms + 1_000 for job in jobs)
        assert await queue.rate_limit_ttl() == 0
        for one in told:
            await one.worker.close()

    @pytest.mark.parametrize("how", ["lifted", "shortened", "removed with its window", "ended by the clock"])
    async def test_a_limit_that_ends_early_is_noticed(
        self, kit: Kit, how: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """However long it should have lasted: an hour here. Whoever lifts or shortens it wakes the workers; what nobody
        tells of is found when they look by themselves."""
        if how in ("lifted", "shortened"):
            monkeypatch.setattr(_driver, "_LONGEST_LIMIT_S", 3_600.0)
        queue = kit.queue()
        await queue.rate_limit(3_600_000)
        told = await kit.work(nothing, drain_delay=60_000)
        job = await queue.add("a")
        await asyncio.sleep(0.3)  # the worker has looked and knows of the limit

        if how == "lifted":
            await queue.lift_rate_limit()
        elif how == "shortened":
            await queue.rate_limit(1)
        elif how == "removed with its window":
            await queue.remove_global_rate_limit()
            kit.redis.delete(kit.base + "limiter")
        else:
            kit.redis.pexpire(kit.base + "limiter", 1)

        await told.wait("completed", within_s=30)
        assert told.ids("completed") == [job.id]

    @pytest.mark.requirement("Q-38")
    @pytest.mark.parametrize("comes", ["before", "after"])
    @pytest.mark.parametrize("how", ["removed", "raised"])
    async def test_whoever_changes_a_limit_wakes_those_who_wait_for_its_end(
        self, kit: Kit, how: str, comes: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(_driver, "_LONGEST_LIMIT_S", 3_600.0)  # they do not look by themselves
        queue, crowd = kit.queue(), Crowd(0)
        for _ in range(2):
            await kit.work(crowd, drain_delay=60_000)
        for runs in range(0, 9, 3):
            await queue.set_global_rate_limit(1, FAR_MS)
            await queue.add("opens the window")
            await clock(partial(crowd.has_run, runs + 1), within_s=30)
            await queue.add("makes the workers look")
            if comes == "before":
                await queue.add("job")
            await asyncio.sleep(0.2)  # they have looked and know of the limit
            if how == "removed":
                await queue.remove_global_rate_limit()
            else:
                await queue.set_global_rate_limit(1_000, FAR_MS)
            if comes == "after":
                await queue.add("job")
            await clock(partial(crowd.has_run, runs + 3), within_s=30)
            await queue.lift_rate_limit()

    @pytest.mark.requirement("Q-38")
    async def test_a_limit_can_be_lifted_and_removed(self, kit: Kit) -> None:
        queue = kit.queue()
        await queue.set_global_rate_limit(1, FAR_MS)
        await queue.rate_limit(FAR_MS)
        limited = await queue.rate_limit_ttl()

        await queue.lift_rate_limit()
        lifted = await queue.rate_limit_ttl()
        await queue.remove_global_rate_limit()
        await queue.add("job")
        told = await kit.work(nothing)

        await told.wait("completed", within_s=2)
        assert limited > FAR_MS - 10_000 and lifted == 0
        assert await queue.global_rate_limit() is None

    @pytest.mark.requirement("Q-38", "W-85")
    async def test_a_handler_that_asks_for_a_pause_stops_the_other_workers_too(self, kit: Kit) -> None:
        queue, runs = kit.queue(), list[tuple[str, float]]()

        async def handle(job: Job) -> None:
            runs.append((job.id, time.monotonic()))
            if len(runs) == 1:
                raise RateLimited(250)

        await queue.add_many([NewJob("job")] * 3)
        told = [await kit.work(handle, drain_delay=30_000)]
        await clock(lambda: len(runs) == 1, within_s=2)
        told.append(await kit.work(handle, drain_delay=30_000))
        await clock(lambda: len(runs) == 4, within_s=5)

        first, *later = runs
        assert first[0] == "1" and sorted(job_id for job_id, _ in later) == ["1", "2", "3"]
        assert all(at - first[1] > 0.2 for _, at in later)
        for one in told:
            await one.worker.close()

    async def test_what_counts_as_limited_depends_on_the_number_compared_with(self, kit: Kit) -> None:
        queue = kit.queue()
        kit.redis.set(f"{kit.base}limiter", 5, px=FAR_MS)
        kit.redis.hset(f"{kit.base}meta", "opts.maxLenEvents", 10_000)

        assert await queue.rate_limit_ttl() == 0  # nobody has a limit
        assert await queue.rate_limit_ttl(6) == 0
        assert await queue.rate_limit_ttl(5) > 0
        await queue.set_global_rate_limit(4, 1_000)
        assert await queue.rate_limit_ttl() > 0
        kit.redis.persist(f"{kit.base}limiter")
        assert await queue.rate_limit_ttl() == 0  # a counter without end is nobody's window

    async def test_numbers_are_checked(self, kit: Kit) -> None:
        queue = kit.queue()
        for call in (
            queue.set_global_concurrency(0),
            queue.set_global_rate_limit(0, 1),
            queue.set_global_rate_limit(1, 0),
            queue.rate_limit(0),
            queue.rate_limit_ttl(0),
        ):
            with pytest.raises(InvalidOption):
                await call

    @pytest.mark.requirement("Q-38")
    async def test_a_window_that_lost_its_end_starts_anew(self, kit: Kit) -> None:
        """A counter without a TTL would otherwise never limit again: it grows, and no window is ever opened."""
        queue = kit.queue()
        kit.redis.set(f"{kit.base}limiter", 7)
        await queue.add_many([NewJob("job")] * 3)

        told = await kit.work(nothing, limit=RateLimit(2, FAR_MS), concurrency=5)
        await told.finished(2)
        await kit.until(lambda: kit.command("PTTL", f"{kit.base}limiter") > 0, "a window is open")

        assert kit.command("GET", f"{kit.base}limiter") == b"2"
