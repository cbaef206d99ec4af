"""What the pages read: heads of jobs, places, snapshots. No read grows with the size or the number of jobs."""

from __future__ import annotations

import asyncio
import re

import pytest

from bullpen import Queue
from bullpen.ops.hub import ALL_QUEUES, Hub, Sampler, TopicSubscription, _Topic
from bullpen.queue import JobState
from bullpen.queue.heads import PREVIEW_BYTES
from bullpen.testing import RedisServer
from tests.dashboard._kit import opened


@pytest.mark.requirement("D-31")
async def test_a_page_of_large_jobs_is_small(redis_url: str, redis_server: RedisServer, queue_name: str) -> None:
    """A list shows a line of each job: their payloads stay on the server."""
    async with Queue(queue_name, connection=redis_url) as queue:
        for number in range(20):
            await queue.add("large", {"number": number, "text": "x" * 1_000_000})
        server = redis_server.client()
        before = int(server.info("stats")["total_net_output_bytes"])

        heads = await queue.heads(JobState.WAITING, count=50)

        sent = int(server.info("stats")["total_net_output_bytes"]) - before
        assert len(heads) == 20
        assert sent < 100_000
        assert heads[0].sizes["data"] > 1_000_000
        assert heads[0].is_cut("data")
        assert len(heads[0].preview("data")) <= PREVIEW_BYTES


async def test_heads_follow_the_order_of_their_state(redis_url: str, queue_name: str) -> None:
    async with Queue(queue_name, connection=redis_url) as queue:
        ids = [(await queue.add("job", {"n": number})).id for number in range(5)]

        heads = await queue.heads(JobState.WAITING, start=1, count=3)

        assert [head.record.id for head in heads] == ids[1:4]
        assert heads[0].preview("data") == '{"n":1}'
        assert not heads[0].is_cut("data")
        assert await queue.heads_of(["nobody"]) == []


@pytest.mark.requirement("D-12")
async def test_a_time_leads_to_its_place_in_a_list(redis_url: str, queue_name: str) -> None:
    async with Queue(queue_name, connection=redis_url) as queue:
        for minutes in range(1, 6):
            await queue.add("job", {}, delay=minutes * 60_000)
        first = (await queue.heads(JobState.DELAYED, count=1))[0]

        place = await queue.position_at(JobState.DELAYED, first.record.due_ms + 150_000)

        assert place == 3
        assert await queue.position_at(JobState.WAITING, 0) == 0


async def test_the_place_of_a_job_is_told(redis_url: str, queue_name: str) -> None:
    async with Queue(queue_name, connection=redis_url) as queue:
        ids = [(await queue.add("job", {})).id for _ in range(4)]
        urgent = await queue.add("job", {}, priority=2)

        state, record, now_ms, place = await queue.locate(ids[2])

        assert (state, place["position"], place["is_paused"]) == (JobState.WAITING, 2, False)
        assert record is not None and now_ms >= record.timestamp
        state, _, _, place = await queue.locate(urgent.id)
        assert (state, place["position"], place["before_priority"]) == (JobState.PRIORITIZED, 0, 4)


@pytest.mark.requirement("D-96")
async def test_many_who_ask_share_one_snapshot(redis_url: str, queue_name: str) -> None:
    async with Queue(queue_name, connection=redis_url) as queue:
        await queue.add("job", {})
        sampler = Sampler(queue.connection, "bull")

        pictures = await asyncio.gather(*(sampler.snapshot() for _ in range(20)))

        assert len({id(picture) for picture in pictures}) == 1
        assert [look.queue for look in pictures[0].looks] == [queue_name]
        await sampler.aclose()


@pytest.mark.requirement("D-96")
async def test_one_reader_serves_all_viewers_and_ends_with_the_last(redis_url: str, queue_name: str) -> None:
    async with Queue(queue_name, connection=redis_url) as queue:
        await queue.add("job", {})
        hub = Hub(queue.connection, "bull", Sampler(queue.connection, "bull"))

        async with hub.watch(queue_name) as first, hub.watch(queue_name) as second:
            assert hub.watched == (queue_name,)
            assert await first.changed(10)
            assert await second.changed(10)
            readers = [task for task in asyncio.all_tasks() if task.get_name() == f"bullpen hub {queue_name}"]
            assert len(readers) == 1
            for _ in range(50):
                await queue.add("job", {})
            assert await first.changed(10)
        assert len(hub.watched) == 0
        assert readers[0].done()


async def test_a_viewer_of_all_queues_hears_of_a_new_job(redis_url: str, queue_name: str) -> None:
    async with Queue(queue_name, connection=redis_url) as queue:
        await queue.add("job", {})
        sampler = Sampler(queue.connection, "bull")
        hub = Hub(queue.connection, "bull", sampler)

        async with hub.watch(ALL_QUEUES) as subscription:
            await subscription.changed(10)
            await queue.add("job", {})
            assert await subscription.changed(10)
        await sampler.aclose()


@pytest.mark.parametrize("wanted", ["name=second", "text=needle"])
@pytest.mark.requirement("D-32")
async def test_a_filter_looks_at_the_whole_state(redis_url: str, queue_name: str, wanted: str) -> None:
    """Not only at the page that is shown."""
    async with Queue(queue_name, connection=redis_url) as queue:
        await queue.add_many([("first", {"n": number}) for number in range(700)])
        await queue.add("second", {"text": "a needle"})
        async with opened(redis_url) as (http, _):
            found = (await http.get(f"/api/v1/queues/{queue_name}?state=waiting&{wanted}")).json()["list"]

    assert [job["name"] for job in found["jobs"]] == ["second"]
    assert found["lookedAt"] == 701
    assert found["nextStart"] is None


@pytest.mark.requirement("W-78")
async def test_watching_costs_the_same_however_much_happens(redis_url: str, queue_name: str) -> None:
    """Of thousands of events a viewer hears once, and the server hands out next to none of them."""
    async with Queue(queue_name, connection=redis_url) as queue:
        hub = Hub(queue.connection, "bull", Sampler(queue.connection, "bull"))
        door = queue.connection.shared_door(queue.keys.base)

        async def read() -> int:
            told = (await door.call("INFO", "commandstats")).decode()
            counts = [int(found) for found in re.findall(r"cmdstat_x(?:read|revrange|range):calls=(\d+)", told)]
            return sum(counts)

        async with hub.watch(queue_name) as subscription:
            while not await subscription.changed(0.05):
                pass
            before = await read()
            await queue.add_many([("job", {})] * 3_000)
            assert await subscription.changed(10.0)
            seen = await read() - before
        await hub.aclose()

    assert seen <= 20


async def test_a_change_is_not_lost_while_a_wait_for_it_is_given_up() -> None:
    """Both come in the same turn of the loop, now in this order and now in that."""
    loop, topic = asyncio.get_running_loop(), _Topic()
    subscription = TopicSubscription(topic)
    for turn in range(300):
        loop.call_later(0.001, topic.bump)
        heard = await subscription.changed(0.0005 + turn * 0.000003)
        assert heard or await subscription.changed(10.0), turn
