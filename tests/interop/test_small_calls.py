"""Ranges, counts, logs, custom events and numbers: the same answers from Node and from us about one queue."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import redis

from bullpen.queue import Flow, JobState, NewJob, QueueEvents

from ._sides import OurSide, PeerSide

HOUR_MS = 3_600_000


async def test_ids_and_counts_are_those_of_node(node: PeerSide, ours: OurSide, client: redis.Redis) -> None:
    queue = ours.queue("q")
    await queue.add_many([NewJob("mail", None, {"job_id": f"w{n}"}) for n in range(3)])
    await node.add("q", "mail", {}, jobId="d1", delay=HOUR_MS)
    await queue.add("mail", job_id="d2", delay=timedelta(hours=3))

    both = (JobState.DELAYED, JobState.WAITING)
    assert await queue.job_ids(both) == await node.peer.call(
        "getRanges", queue="q", args=[["delayed", "waiting"], 0, -1, True]
    )
    soon = datetime.now(UTC) + timedelta(hours=2)
    counted = await node.peer.call("getDelayedCount", queue="q", args=[int(soon.timestamp() * 1000)])
    assert (await queue.count_delayed(before=soon), counted) == (1, 1)


async def test_a_queue_is_maxed_for_both(node: PeerSide, ours: OurSide, client: redis.Redis) -> None:
    queue = ours.queue("q")
    await queue.set_global_concurrency(1)
    assert (await queue.is_maxed(), await node.peer.call("isMaxed", queue="q")) == (False, False)

    await node.start_worker("w", "q", {"hold": True})
    await queue.add("mail", job_id="held")
    await node.peer.wait_event(lambda event: event.get("type") == "held")

    assert (await queue.is_maxed(), await node.peer.call("isMaxed", queue="q")) == (True, True)


async def test_each_sees_who_listens_to_the_events(
    node: PeerSide, ours: OurSide, client: redis.Redis, interop_url: str
) -> None:
    queue = ours.queue("q")
    await node.peer.call("startQueueEvents", queue="q")
    async with QueueEvents("q", connection=interop_url):
        listeners = await queue.listeners()
        seen_by_node = await node.peer.call("getQueueEvents", queue="q")

    assert listeners is not None
    assert (len(listeners), len(seen_by_node)) == (2, 2)


async def test_logs_are_cleared_and_read_in_ranges(node: PeerSide, ours: OurSide, client: redis.Redis) -> None:
    queue = ours.queue("q")
    job = await queue.add("mail")
    for number in range(6):
        await queue.add_log(job, f"line {number}")

    theirs = await node.peer.call("getJobLogs", queue="q", args=["1", 1, 2, False])
    page = await queue.logs("1", start=1, count=2, newest_first=True)
    assert (list(page.lines), page.total) == (theirs["logs"], theirs["count"])
    await node.peer.call("clearLogs", queue="q", jobId="1", keep=3)
    assert await job.logs() == ["line 3", "line 4", "line 5"]
    await job.clear_logs(keep=1)
    assert (await node.peer.call("getJobLogs", queue="q", args=["1"]))["logs"] == ["line 5"]
    await node.peer.call("clearLogs", queue="q", jobId="1")
    assert await job.logs() == []


async def test_events_of_ones_own_travel_both_ways(
    node: PeerSide, ours: OurSide, client: redis.Redis, interop_url: str
) -> None:
    queue = ours.queue("q")
    await node.peer.call("startQueueEvents", queue="q")
    async with QueueEvents("q", connection=interop_url) as events:
        entry_id = await queue.publish_event("invoice.sent", {"number": 7, "to": "ada"})
        heard = await node.peer.wait_event(lambda event: event.get("type") == "invoice.sent")
        assert (heard["args"], heard["streamId"]) == ({"number": "7", "to": "ada"}, entry_id)
        assert (await anext(events)).id == entry_id

        await node.peer.call("publishEvent", queue="q", args={"eventName": "invoice.paid", "number": 8})
        async with asyncio.timeout(10):
            told = await anext(events)
        assert (told.event, dict(told.data)) == ("invoice.paid", {"number": "8"})


async def test_the_numbers_for_prometheus_are_those_of_node(node: PeerSide, ours: OurSide, client: redis.Redis) -> None:
    """Line by line, labels and all."""
    queue = ours.queue('q"1')
    await queue.add_many([("mail", 1), ("mail", 2)])
    await queue.add("mail", delay=HOUR_MS)
    await queue.add("mail", priority=3)
    await queue.add_flow(Flow("sum", children=[Flow("part", on_failure="wait")]))

    for labels in (None, {"region": "eu\n1", "team": 'a\\"b'}):
        theirs = await node.peer.call("exportPrometheusMetrics", queue='q"1', args=[labels] if labels else [])
        assert (await queue.prometheus_metrics(labels)).splitlines() == theirs.splitlines()


async def test_what_a_job_does_to_itself_node_sees(node: PeerSide, ours: OurSide, client: redis.Redis) -> None:
    queue = ours.queue("q")
    job = await queue.add("mail", job_id="a", delay=HOUR_MS)

    await job.change_delay(1)
    await job.promote()
    assert await node.peer.call("getState", queue="q", jobId="a") == "waiting"
    await job.change_priority(4)
    assert (await node.peer.call("getJob", queue="q", jobId="a"))["priority"] == 4
    await queue.update_progress(job, 30)
    assert (await node.peer.call("getJob", queue="q", jobId="a"))["progress"] == 30
    await job.remove()
    assert await node.peer.call("getJob", queue="q", jobId="a") is None
