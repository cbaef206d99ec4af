"""Schedules that other clients made go on when our worker serves the queue, whatever client and release made them."""

import asyncio
import json
import logging
from typing import Any

import pytest
import redis

from bullpen.ops.metrics import WorkerMetrics

from ._sides import OurSide, PeerSide
from ._wait import until, until_event

NODES = pytest.mark.parametrize("older", ["4.18.3", "5.34.10", "5.81.5"], indirect=True)
SCHEDULERS = pytest.mark.parametrize("older", ["5.34.10", "5.81.5"], indirect=True)


def _iterations(client: redis.Redis) -> list[str]:
    """Ids of iterations, by the stream's `added` events, in order."""
    entries: Any = client.xrange("bull:q:events")
    ids = [fields[b"jobId"].decode() for _, fields in entries if fields[b"event"] == b"added"]
    return [job_id for job_id in ids if job_id.startswith("repeat:")]


@NODES
async def test_a_repeat_option_of_an_older_client_goes_on(older: PeerSide, ours: OurSide, client: redis.Redis) -> None:
    """It leaves half a record or none: the job's own options say the rest."""
    await older.add("q", "tick", {"n": 1}, repeat={"every": 150})
    await ours.start_worker("w", "q", {})

    await until_event(client, "q", "completed", count=4)

    last = client.hgetall(f"bull:q:{_iterations(client)[-1]}")
    assert last[b"name"] == b"tick" and json.loads(last[b"data"]) == {"n": 1}
    assert json.loads(last[b"opts"])["repeat"]["count"] >= 5
    # And the client that made it carries on from what we stored.
    await ours.close_worker("w")
    await older.start_worker("theirs", "q", {})
    await until_event(client, "q", "completed", count=7)


@NODES
async def test_a_repeat_pattern_of_an_older_client_goes_on_up_to_its_limit(
    older: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    await older.add("q", "tick", {"n": 1}, repeat={"pattern": "* * * * * *", "limit": 2})
    await ours.start_worker("w", "q", {})

    await until_event(client, "q", "completed", count=2)
    await asyncio.sleep(0.1)

    assert len(_iterations(client)) == 2, "the limit stands in the job's options only"


@SCHEDULERS
async def test_a_scheduler_of_an_older_client_goes_on(older: PeerSide, ours: OurSide, client: redis.Redis) -> None:
    """5.34 writes records without the count of iterations."""
    await older.peer.call(
        "upsertJobScheduler",
        queue="q",
        schedulerId="s",
        repeat={"every": 150},
        template={"name": "t", "data": {"n": 2}},
    )
    await ours.start_worker("w", "q", {})

    await until_event(client, "q", "completed", count=4)

    last = client.hgetall(f"bull:q:{_iterations(client)[-1]}")
    assert last[b"name"] == b"t" and json.loads(last[b"data"]) == {"n": 2}
    await ours.close_worker("w")
    await older.start_worker("theirs", "q", {})
    await until_event(client, "q", "completed", count=7)


@pytest.mark.parametrize(
    "repeat",
    [{"pattern": "@secondly"}, {"pattern": "* * * ? * ?"}, {"pattern": "* * * * * *", "tz": "UTC+3"}],
    ids=["nickname", "question mark", "offset"],
)
async def test_every_form_of_pattern_goes_on(
    repeat: dict[str, Any], node: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    await node.peer.call("upsertJobScheduler", queue="q", schedulerId="s", repeat=repeat, template={"name": "t"})
    await ours.start_worker("w", "q", {})

    await until_event(client, "q", "completed", count=2)


async def test_a_pattern_ends_before_the_first_slot_after_its_end(
    node: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    seconds: Any = client.time()[0]
    end_ms = (seconds + 3) * 1000 - 500
    await node.peer.call(
        "upsertJobScheduler",
        queue="q",
        schedulerId="s",
        repeat={"pattern": "* * * * * *", "endDate": end_ms},
        template={"name": "t"},
    )
    await ours.start_worker("w", "q", {})
    await until_event(client, "q", "completed", count=2)
    await until(lambda: not client.zcard("bull:q:delayed"), "the end of the chain")

    assert all(int(job_id.rpartition(":")[2]) <= end_ms for job_id in _iterations(client))


async def test_what_we_cannot_compute_goes_back_for_another_client(
    node: PeerSide, ours: OurSide, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """A program may give its own strategy: then a pattern is whatever it likes, and only its own workers read it."""
    await node.peer.call(
        "upsertJobScheduler",
        queue="q",
        schedulerId="s",
        repeat={"pattern": "* * * * * *"},
        template={"name": "t", "data": {"n": 1}},
    )
    (job_id,) = _iterations(client)
    client.hset("bull:q:repeat:s", "pattern", "FREQ=WEEKLY;BYDAY=MO")
    before: Any = client.hmget(f"bull:q:{job_id}", "name", "data", "opts", "rjk", "timestamp")
    metrics = WorkerMetrics(list)

    with caplog.at_level(logging.ERROR, "bullpen.worker"):
        await ours.start_worker("w", "q", {})
        await until(lambda: "to the queue for another client" in caplog.text, "the error line")
        await ours.close_worker("w")

    refused = next(one for one in await metrics.collect() if one.name == "bullpen_schedules_refused_total")
    metrics.close()
    assert refused.samples[0].value >= 1
    assert client.hmget(f"bull:q:{job_id}", "name", "data", "opts", "rjk", "timestamp") == before
    assert client.zscore("bull:q:delayed", job_id) is not None
    assert not client.hexists(f"bull:q:{job_id}", "atm"), "it was no attempt"
    # Node goes on from the options of the job itself.
    await node.start_worker("theirs", "q", {})
    await until_event(client, "q", "completed", count=2)
