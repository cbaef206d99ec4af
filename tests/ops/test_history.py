"""The past of a queue: what workers record, what it costs, and what is left of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from bullpen import Bullpen, Queue
from bullpen.errors import InvalidOption
from bullpen.ops.estimates import Estimator
from bullpen.ops.history import RANGES, history_view
from bullpen.ops.marks import add_mark, read_marks
from bullpen.ops.overview import Overview
from bullpen.ops.recorder import Recorder
from bullpen.queue.beats import read_beats
from bullpen.queue.history import RUN, SAMPLED, TIERS, add_history, bucket_of, percentile, read_history
from bullpen.settings import Settings
from bullpen.testing import RedisServer
from bullpen.wire.keys import QueueKeys
from bullpen.worker import Worker
from bullpen.worker.tally import BUDGET


@asynccontextmanager
async def opened(redis_url: str, name: str) -> AsyncIterator[Queue]:
    """A queue of an app, which closes all that was opened with its connection."""
    async with Bullpen(settings=Settings.load(environ={}, redis_url=redis_url)) as app:
        yield app.queue(name)


async def until(asked: Any, seconds: float = 60.0) -> None:
    """Ask until it is so."""
    ends = time.monotonic() + seconds
    while not await asked():
        assert time.monotonic() < ends, "it did not come"
        await asyncio.sleep(0.01)


def test_a_percentile_is_right_to_about_a_sixth() -> None:
    for value in (1, 2, 3, 5, 7, 10, 33, 120, 999, 5_000, 86_400_000):
        found = percentile({RUN + bucket_of(value): 10}, RUN, 0.5)
        assert found is not None
        assert value / 1.34 <= found <= value * 1.34, value
    assert percentile({}, RUN, 0.5) is None
    assert bucket_of(-5) == bucket_of(0) == 0
    assert bucket_of(10**15) == 59


@pytest.mark.requirement("D-77")
async def test_what_jobs_did_is_there_after_all_processes_ended(redis_url: str, queue_name: str) -> None:
    """By queue and by name, with failures and retries apart."""
    settings = Settings.load(environ={}, redis_url=redis_url)
    async with Bullpen(settings=settings) as app:

        @app.handler(queue_name, concurrency=4)
        async def work(job: Any) -> None:
            if job.name == "bad":
                raise ValueError("no")

        queue = app.queue(queue_name)
        await queue.add_many([("good", {})] * 6)
        await queue.add("bad", {}, attempts=2)
        running = asyncio.create_task(app.run(signals=False))

        async def all_ended() -> bool:
            counts = await queue.counts()
            return (counts.completed, counts.failed) == (6, 1)

        await until(all_ended)
        await app.stop()
        await running

    async with Bullpen(settings=settings) as later:
        keys = QueueKeys(later.prefix, queue_name)
        marks = QueueKeys(later.prefix, "bullpen-operations")
        for each in RANGES:
            view = await history_view(later.connection, keys, marks, over=each)
            assert (view.done, view.failed, view.retried) == (6, 1, 1), each
            assert view.estimated_from is None
            assert len(view.points) == (view.until_ms - view.since_ms) // view.step_ms + 1
            assert sum(point.done for point in view.points) == 6
            assert view.run.p99 is not None and view.wait.p50 is not None
        one = await history_view(later.connection, keys, marks, name="bad")
        assert (one.done, one.failed, one.retried) == (0, 1, 1)
        assert one.names == ("bad", "good")
        with pytest.raises(InvalidOption, match="one of 1h, 24h"):
            await history_view(later.connection, keys, marks, over="2h")


@pytest.mark.requirement("D-77")
async def test_a_worker_that_is_not_to_record_records_nothing(redis_url: str, queue_name: str) -> None:
    settings = Settings.load(environ={"BULLPEN_DASHBOARD_HISTORY": "false"}, redis_url=redis_url)
    async with Bullpen(settings=settings) as app:
        app.worker(queue_name, lambda job: None)
        assert not any(isinstance(each, Recorder) for each in app.choose())
        assert all(worker.tally is None for worker in app.workers)


@pytest.mark.requirement("D-78")
async def test_a_busy_queue_keeps_at_most_4_kb_an_hour_for_a_name(
    redis_url: str, redis_server: RedisServer, queue_name: str
) -> None:
    """Every step full, times over four powers of ten; and all of it ends by itself."""
    async with opened(redis_url, queue_name) as queue:
        await queue.counts()
        keys, hour = queue.keys, 1_000_000 * 3_600_000
        counts = {0: 90_000, 1: 700, 2: 900, SAMPLED: 1_000}
        counts |= dict.fromkeys(range(8 + 2, 8 + 14), 37) | {RUN + bucket: 41 for bucket in range(6, 18)}
        hours = 3
        for minute in range(0, 60 * hours, 2):
            await add_history(queue.connection, keys, {"": counts, "send": counts}, hour + minute * 60_000)

        client = redis_server.client()
        stored = list(client.scan_iter(f"{keys.base}bp:history:*"))
        used = sum(client.memory_usage(key, samples=0) or 0 for key in stored)
        assert used / (2 * hours) <= 4_096, used
        assert all(0 < (client.ttl(key) or 0) <= 32 * 24 * 3_600 for key in stored)
        found, names = await read_history(queue.connection, keys, TIERS[2], hour, hour + 2 * 3_600_000, "send")
        assert names == ["send"]
        assert [each[0] for each in found.values()] == [90_000 * 30] * 3


async def test_names_that_never_end_do_not_fill_the_server(redis_url: str, queue_name: str) -> None:
    async with opened(redis_url, queue_name) as queue:
        for first in range(0, 100, 20):
            names = {f"job-{number}": {0: 1, SAMPLED: 1} for number in range(first, first + 20)}
            await add_history(queue.connection, queue.keys, {"": {0: 20}, **names}, 5_000_000)
        _, known = await read_history(queue.connection, queue.keys, TIERS[2], 0, 5_000_000)
        assert len(known) <= 52
        found, _ = await read_history(queue.connection, queue.keys, TIERS[2], 0, 5_000_000, "other")
        assert sum(counts[0] for counts in found.values()) >= 48


async def test_foreign_values_are_no_history(redis_url: str, redis_server: RedisServer, queue_name: str) -> None:
    """Whoever writes something else there is begun anew, and breaks no page."""
    async with opened(redis_url, queue_name) as queue:
        client = redis_server.client()
        for tier in TIERS:
            client.hset(queue.keys.history(tier.name, tier.place(5_000_000)[0]), mapping={"": "x", "a": b"\xc1"})
        found, _ = await read_history(queue.connection, queue.keys, TIERS[0], 0, 5_000_000)
        assert found == {}
        await add_history(queue.connection, queue.keys, {"": {0: 2}}, 5_000_000)
        found, _ = await read_history(queue.connection, queue.keys, TIERS[0], 0, 5_000_000)
        assert list(found.values()) == [{0: 2}]


async def test_more_jobs_than_can_be_looked_at_are_counted_all_the_same(redis_url: str, queue_name: str) -> None:
    """Totals are exact; a name's numbers come from those that were looked at, and the view says so."""
    jobs = 3 * BUDGET
    async with opened(redis_url, queue_name) as queue:
        await queue.add_many([("a", {}), ("b", {}), ("b", {})] * BUDGET)
        worker = Worker(queue_name, _nothing, connection=queue.connection, concurrency=50)
        recorder = Recorder(lambda: [worker])
        async with worker:

            async def all_done() -> bool:
                return (await queue.counts()).completed == jobs

            await until(all_done)
        await recorder.beat()
        keys = queue.keys
        total = await history_view(queue.connection, keys, keys)
        assert total.done == jobs and total.estimated_from is None
        named = await history_view(queue.connection, keys, keys, name="b")
        assert named.estimated_from is not None and named.estimated_from < jobs
        assert 0.4 * jobs < named.done < 0.9 * jobs


@pytest.mark.requirement("D-75")
async def test_a_process_tells_what_it_does(redis_url: str, queue_name: str) -> None:
    begun, release = asyncio.Event(), asyncio.Event()

    async def hold(job: Any) -> None:
        begun.set()
        await release.wait()

    async with opened(redis_url, queue_name) as queue:
        await queue.add("slow", {}, job_id="one")
        worker = Worker(queue_name, hold, connection=queue.connection, concurrency=3, name="w-1")
        recorder = Recorder(lambda: [worker])
        async with worker:
            await begun.wait()
            running = asyncio.create_task(recorder.run())
            await until(lambda: _beats(queue))
            (beat,) = (await read_beats(queue.connection.shared_door(queue.keys.base), [queue.keys]))[queue_name]
            (told,) = beat.workers
            assert (told.name, told.slots, told.running, told.locks_lost) == ("w-1", 3, 1, 0)
            assert [(job.id, job.name) for job in told.jobs] == [("one", "slow")]
            assert beat.language.startswith("Python 3") and beat.library.startswith("bullpen ")
            assert beat.pid and beat.host and abs(beat.at_ms - time.time() * 1000) < 60_000
            release.set()
            await recorder.close()
            await running
        assert not await _beats(queue)


async def _beats(queue: Queue) -> bool:
    return bool(await read_beats(queue.connection.shared_door(queue.keys.base), [queue.keys]))


async def _nothing(job: Any) -> None: ...


async def test_a_server_that_is_away_loses_no_counts(redis_url: str, queue_name: str) -> None:
    """What could not be stored is stored with the next beat."""
    async with opened(redis_url, queue_name) as queue:
        await queue.add("a", {})
        worker = Worker(queue_name, _nothing, connection=queue.connection)
        recorder = Recorder(lambda: [worker])
        async with worker:

            async def done() -> bool:
                return (await queue.counts()).completed == 1

            await until(done)
        key = queue.keys.beats("index")
        await queue.connection.shared_door(queue.keys.base).call("SET", key, "in the way")
        await recorder.beat()
        assert (await history_view(queue.connection, queue.keys, queue.keys)).done == 0
        await queue.connection.shared_door(queue.keys.base).call("UNLINK", key)
        await recorder.beat()
        assert (await history_view(queue.connection, queue.keys, queue.keys)).done == 1


async def test_marks_are_read_in_order_and_end(redis_url: str, redis_server: RedisServer, queue_name: str) -> None:
    async with opened(redis_url, queue_name) as queue:
        for text in ("v1", "v2 <b>"):
            await add_mark(queue.connection, queue.keys, text, "ada")
        found = await read_marks(queue.connection, queue.keys, 0)
        assert [(mark.text, mark.by) for mark in found] == [("v1", "ada"), ("v2 <b>", "ada")]
        assert redis_server.client().ttl(queue.keys.marks) > 30 * 24 * 3_600
        for wrong in ("", "  ", "x" * 201, "a\nb"):
            with pytest.raises(InvalidOption, match="text"):
                await add_mark(queue.connection, queue.keys, wrong, "ada")


@pytest.mark.requirement("D-79")
async def test_jobs_of_other_clients_are_estimated_from_a_sample(redis_url: str, queue_name: str) -> None:
    """Their workers tell nothing: how many ended follows from the counters, times come from jobs that are there."""
    async with opened(redis_url, queue_name) as queue:
        own = QueueKeys("bull", "bullpen-operations")
        overview = Overview(queue.connection, "bull", [queue_name])
        estimator = Estimator(queue.connection, "bull", own, overview.read)
        await queue.add("first", {})
        await estimator.estimate()

        async def work(job: Any) -> None:
            if job.name == "bad":
                raise ValueError("no")

        await queue.add_many([("good", {})] * 80)
        await queue.add("bad", {}, attempts=1)
        async with Worker(queue_name, work, connection=queue.connection, concurrency=10):

            async def ended() -> bool:
                counts = await queue.counts()
                return counts.completed + counts.failed == 82

            await until(ended)
        await estimator.estimate()
        assert (await history_view(queue.connection, queue.keys, own)).done == 0, "another process estimates now"
        await queue.connection.shared_door(own.base).call("UNLINK", own.once("estimates"))
        await estimator.estimate()
        view = await history_view(queue.connection, queue.keys, own)
        assert (view.done, view.failed) == (81, 1)
        assert view.estimated_from == 51
        assert view.run.p95 is not None
        named = await history_view(queue.connection, queue.keys, own, name="bad")
        assert named.failed == 1 and named.estimated_from == 1


@pytest.mark.requirement("D-79")
async def test_what_workers_record_is_not_estimated_again(redis_url: str, queue_name: str) -> None:
    async with opened(redis_url, queue_name) as queue:
        own = QueueKeys("bull", "bullpen-operations")
        overview = Overview(queue.connection, "bull", [queue_name])
        estimator = Estimator(queue.connection, "bull", own, overview.read)
        await queue.add("a", {})
        worker = Worker(queue_name, _nothing, connection=queue.connection)
        recorder = Recorder(lambda: [worker])
        async with worker:

            async def done() -> bool:
                return (await queue.counts()).completed == 1

            await until(done)
            await estimator.estimate()
            await recorder.beat()
            await queue.add("a", {})

            async def twice() -> bool:
                return (await queue.counts()).completed == 2

            await until(twice)
            await recorder.beat()
            await queue.connection.shared_door(own.base).call("UNLINK", own.once("estimates"))
            await estimator.estimate()
        view = await history_view(queue.connection, queue.keys, own)
        assert (view.done, view.estimated_from) == (2, None)
