"""Flows, deduplicated, retried and cancelled jobs that one makes are removed by another, and nothing is left."""

from collections.abc import Awaitable, Callable

import pytest
import redis

from ._sides import OurSide, PeerSide, Side
from ._wait import until_event

FOREVER = 3_600_000
Made = Callable[[Side, OurSide, redis.Redis], Awaitable[list[str]]]
"""Makes jobs with a side, and returns the ids of those that are to be removed."""


async def a_flow(side: Side, ours: OurSide, client: redis.Redis) -> list[str]:
    kids = [{"name": "kid", "queueName": "q", "data": {}, "opts": {"jobId": f"kid-{n}"} | FAILS} for n in range(3)]
    await side.add_flow({"name": "top", "queueName": "q", "data": {}, "opts": {"jobId": "top"}, "children": kids})
    return ["top"]


async def children_one_by_one(side: Side, ours: OurSide, client: redis.Redis) -> list[str]:
    await a_flow(side, ours, client)
    return ["kid-1", "kid-0", "kid-2", "top"]


async def a_deduplicated_job(side: Side, ours: OurSide, client: redis.Redis) -> list[str]:
    first = await side.add("q", "job", {"n": 1}, deduplication={"id": "one"})
    assert await side.add("q", "job", {"n": 2}, deduplication={"id": "one"}) == first
    return [first]


async def a_debounced_job(side: Side, ours: OurSide, client: redis.Redis) -> list[str]:
    rule = {"id": "one", "ttl": FOREVER, "extend": True, "replace": True}
    await side.add("q", "job", {"n": 1}, delay=FOREVER, deduplication=rule)
    return [await side.add("q", "job", {"n": 2}, delay=FOREVER, deduplication=rule)]


async def a_job_that_waits_for_its_retry(side: Side, ours: OurSide, client: redis.Redis) -> list[str]:
    job_id = await side.add("q", "job", {}, attempts=2, backoff={"type": "fixed", "delay": FOREVER})
    await ours.start_worker("w", "q", {"kind": "always_fail"})
    await until_event(client, "q", "delayed")
    await ours.close_worker("w")
    return [job_id]


async def a_cancelled_job(side: Side, ours: OurSide, client: redis.Redis) -> list[str]:
    job_id = await side.add("q", "job", {}, attempts=2)
    await ours.queue("q").cancel(job_id, "not needed")
    return [job_id]


FAILS = {"failParentOnFailure": True}


@pytest.mark.requirement("W-83", "W-84")
@pytest.mark.parametrize("maker", ["ours", "other"])
@pytest.mark.parametrize(
    "make",
    [
        *(a_flow, children_one_by_one, a_deduplicated_job, a_debounced_job),
        *(a_job_that_waits_for_its_retry, a_cancelled_job),
    ],
)
async def test_what_one_makes_another_removes(
    make: Made, maker: str, other: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    side: Side = ours if maker == "ours" else other

    for job_id in await make(side, ours, client):
        if maker == "ours":
            await other.peer.call("remove", queue="q", jobId=job_id)
        else:
            await ours.queue("q").remove(job_id)

    left = {key.decode().removeprefix("bull:q:") for key in client.scan_iter("bull:q:*", count=1_000)}
    ours_own = {key for key in left if key.startswith("bp:call:")}
    assert left - ours_own <= {"meta", "id", "events", "marker", "pc", "bp:clients", "bp:users", "stalled-check"}
    again = await side.add("q", "job", {}, deduplication={"id": "one"})
    assert client.llen("bull:q:wait") == 1, "the id is free"
    await ours.queue("q").remove(again)
