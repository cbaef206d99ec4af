"""The picture of all queues: right in every number, and cheap for the server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bullpen import Connection, Job, Queue, Worker
from bullpen.errors import JobFailed
from bullpen.ops.overview import Overview, QueueSnapshot
from bullpen.queue.events import QueueEvents
from bullpen.queue.job import NewJob
from bullpen.testing import RedisServer
from tests.conftest import StartServer


def by_name(looks: tuple[QueueSnapshot, ...]) -> dict[str, QueueSnapshot]:
    return {look.queue: look for look in looks}


async def take(url: str, *names: str) -> dict[str, QueueSnapshot]:
    connection = Connection(url)
    try:
        overview = Overview(connection, "bull", names)
        if not names:
            await overview.search()
        return by_name((await overview.read()).looks)
    finally:
        await connection.aclose()


async def fail(job: Job) -> None:
    raise ValueError("no")


@pytest.mark.requirement("X-40")
async def test_every_number_of_a_queue_is_right(redis_url: str) -> None:
    async with Queue("mails", connection=redis_url) as queue, Queue("other", connection=redis_url) as other:
        dead = await other.add("dead", attempts=1)
        async with Worker("other", fail, connection=redis_url, dead_letters=True):
            with pytest.raises(JobFailed):
                await dead.result(10_000)
        await queue.add_many([("a", {})] * 3)
        await queue.add("b", priority=2)
        await queue.add("c", delay=60_000)
        await queue.pause()

        found = await take(redis_url)

        mails, others = found["mails"], found["other"]
        counts = await queue.counts()
        assert (mails.waiting, mails.prioritized, mails.delayed) == (counts.waiting, 1, 1) == (3, 1, 1)
        assert (mails.ready, mails.unfinished, mails.added, mails.paused) == (4, 5, 5, True)
        assert (others.failed, others.dead_letters, others.completed, others.paused) == (1, 1, 0, False)
        assert set(found) == {"mails", "other"}, "a dead-letter queue is a number beside its queue"
        assert others.oldest_ms is None
        assert mails.oldest_ms is not None
        assert 0 <= mails.oldest_ms < 60_000


async def test_the_age_is_that_of_the_oldest_in_line_and_counts_from_when_it_could_run(
    redis_url: str, redis_server: RedisServer
) -> None:
    async with Queue("mails", connection=redis_url) as queue:
        plain, first = await queue.add("a"), await queue.add("b", priority=1)
        client: Any = redis_server.client()
        client.hset(f"bull:mails:{first.id}", "timestamp", first.timestamp - 100_000)
        client.hset(f"bull:mails:{plain.id}", mapping={"timestamp": plain.timestamp - 50_000, "delay": 20_000})

        (look,) = (await take(redis_url, "mails")).values()
        await queue.remove(first.id)
        (later,) = (await take(redis_url, "mails")).values()

        assert 100_000 <= (look.oldest_ms or 0) < 110_000
        assert 30_000 <= (later.oldest_ms or 0) < 40_000


async def test_a_delayed_job_that_is_due_and_that_no_worker_puts_in_line_has_an_age(
    redis_url: str, redis_server: RedisServer
) -> None:
    """A queue that only a scheduler fills would look idle for ever while its worker is dead."""
    async with Queue("mails", connection=redis_url) as queue:
        job = await queue.add("later", delay=60_000)
        (early,) = (await take(redis_url, "mails")).values()
        client: Any = redis_server.client()
        client.zadd("bull:mails:delayed", {job.id: (job.timestamp - 30_000) * 4_096 + 7})
        (due,) = (await take(redis_url, "mails")).values()

        assert early.oldest_ms is None
        assert 30_000 <= (due.oldest_ms or 0) < 40_000
        assert (due.delayed, due.ready) == (1, 0)


async def test_rates_come_from_two_pictures_also_when_finished_jobs_are_not_kept(redis_url: str) -> None:
    """A worker that removes completed jobs leaves no trace of them but the counter of the queue."""
    connection = Connection(redis_url)
    overview = Overview(connection, "bull", ["mails"])

    async def work(job: Job) -> None:
        return None

    async with Queue("mails", connection=redis_url) as queue:
        jobs = await queue.add_many([NewJob("a", {}, {"remove_on_complete": True})] * 50)
        (before,) = (await overview.read()).looks
        async with (
            QueueEvents("mails", connection=redis_url) as events,
            Worker("mails", work, connection=redis_url, concurrency=10),
        ):
            jobs += await queue.add_many([NewJob("a", {}, {"remove_on_complete": True})] * 10)
            left = {job.id for job in jobs}
            while left:
                event = await anext(events)
                left -= {event.job_id or ""} if event.is_final else set()
            (after,) = (await overview.read()).looks

    await connection.aclose()
    assert (before.added_per_s, before.done_per_s) == (None, None)
    assert after.added_per_s is not None and after.done_per_s is not None
    assert after.done_per_s == pytest.approx(after.added_per_s * 6, rel=0.02)
    assert after.completed == 0


async def test_workers_with_and_without_a_name_are_counted_and_readers_of_events_are_not(redis_url: str) -> None:
    async def work(job: Job) -> None:
        return None

    connection = Connection(redis_url)
    for name in ("mails", "mails-2"):
        async with Queue(name, connection=redis_url) as queue:
            await queue.add("a")
    async with (
        QueueEvents("mails", connection=redis_url),
        Worker("mails", work, connection=redis_url),
        Worker("mails", work, connection=redis_url, name="second"),
        Worker("mails-2", work, connection=redis_url),
    ):
        overview = Overview(connection, "bull", ["mails"])
        while (found := (await overview.read()).looks[0].workers) != 2:
            overview._count_at = 0.0  # ask again at once, not in five seconds
            await asyncio.sleep(0.01)
        assert found == 2
    await connection.aclose()


async def test_a_queue_that_was_deleted_and_begun_anew_has_no_rate(redis_url: str) -> None:
    connection = Connection(redis_url)
    overview = Overview(connection, "bull", ["mails"])
    async with Queue("mails", connection=redis_url) as queue:
        await queue.add_many([("a", {})] * 5)
        await overview.read()
        await queue.obliterate()
        await queue.add("a")

        (look,) = (await overview.read()).looks

    await connection.aclose()
    assert (look.ready, look.added_per_s, look.done_per_s) == (1, None, None)


async def test_one_broken_queue_does_not_hide_the_others(redis_url: str, redis_server: RedisServer) -> None:
    client: Any = redis_server.client()
    async with Queue("good", connection=redis_url) as queue:
        await queue.add("a")
        client.hset("bull:bad:meta", "version", "x")
        client.set("bull:bad:wait", "not a list")
        client.hset("bull: odd :meta", "version", "x")
        try:
            found = await take(redis_url)
        finally:
            client.delete("bull:bad:wait", "bull:bad:meta", "bull: odd :meta")

    assert found["good"].ready == 1
    assert "WRONGTYPE" in (found["bad"].problem or "")
    assert set(found) == {"good", "bad"}, "a key that no queue can have is nobody's queue"


async def test_a_server_that_hides_its_clients_is_no_failure(start_server: StartServer) -> None:
    server = start_server()
    client: Any = server.client()
    client.execute_command("ACL", "SETUSER", "default", "-client|list")
    async with Queue("mails", connection=server.url) as queue:
        await queue.add("a")

        (look,) = (await take(server.url)).values()

    assert (look.ready, look.workers) == (1, None)


@pytest.mark.many
@pytest.mark.requirement("X-40")
async def test_a_picture_of_many_queues_costs_two_round_trips_and_no_script_or_walk(
    redis_url: str, redis_server: RedisServer
) -> None:
    client: Any = redis_server.client()
    for number in range(100):
        async with Queue(f"q-{number}", connection=redis_url) as queue:
            await queue.add("a")
    connection = Connection(redis_url)
    overview = Overview(connection, "bull")
    await overview.search()
    await overview.read()
    client.config_resetstat()

    picture = await overview.read()

    stats: dict[str, dict[str, Any]] = client.info("commandstats")
    await connection.aclose()
    asked = {name.removeprefix("cmdstat_"): entry["calls"] for name, entry in stats.items()}
    assert len(picture.looks) == 100
    assert not {"keys", "scan", "eval", "evalsha", "client|list", "hgetall", "lrange"} & set(asked), asked
    assert asked["hmget"] == 100
    spent_us = sum(entry["usec"] for name, entry in stats.items() if "config" not in name and "info" not in name)
    assert spent_us < 50_000, spent_us
