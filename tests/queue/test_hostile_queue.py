"""One queue that anybody has written into: every reader shows it, or says what is wrong with it, and shows the others.

Numbers are finite or not, instants of no calendar, texts no UTF-8. What a worker makes of such jobs is tested in
`test_foreign_jobs.py`.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import quote

import pytest
import redis

from bullpen import Connection, Queue
from bullpen.errors import BullpenError, InvalidOption
from bullpen.ops import explain
from bullpen.ops.exporter import Exporter, ServerSource
from bullpen.ops.exposition import render
from bullpen.ops.overview import Overview
from bullpen.queue import JobState
from tests.dashboard._kit import opened
from tests.queue._kit import Kit

pytestmark = [pytest.mark.requirement("X-101"), pytest.mark.leaves_queue_broken]

TIMES = ("9007199254740991", "253402300799999", "253402300800000", "-62135596800001", "1795033000000", "9" * 40)
NUMBERS = ("nan", "inf", "-inf", "1e400", "-1", "0x10", "1.5", "9" * 400, *TIMES)
TEXTS = (b"", b"\xff\xfe", b"{", b"[]", b"null", b"true", b"\x1b[2J", b"[" * 2_000, b'{"id":{"x":1}}', b'["\xff"]')
VALUES = (*(number.encode() for number in NUMBERS), *TEXTS)
SCORES = (0.0, -5.0, 1.5, 1e300, 9e15, -9e15, 4096 * 9e15, float("inf"), float("-inf"), 4096 * 1_795_033_000_000.0)
LISTS, SETS = ("wait", "active", "paused"), ("completed", "failed", "delayed", "prioritized", "waiting-children")
FIELDS = (
    *("timestamp", "delay", "priority", "atm", "ats", "stc", "attemptsMade", "processedOn", "finishedOn", "data"),
    *("name", "progress", "stacktrace", "returnvalue", "parent", "parentKey", "failedReason", "defa", "deid", "rjk"),
    *("opts", "pb", "bplane", "bpdl", "bpcancel", "bpredriven", "bpsolo", "bpstc", "bpdeaths", "bpreleased"),
)
OF_META = (
    *("paused", "concurrency", "max", "duration", "bplanes", "bplane:", "bplane:x", "bpswept", "bpletters", "bpcheck"),
    "bppause",
)
OF_SCHEDULER = (
    *("name", "ic", "every", "pattern", "tz", "offset", "endDate", "startDate", "limit", "data", "opts", "bppaused"),
    *("bpcatchup", "bpjitter", "bpgrace"),
)
SCHEDULERS = ("one", "two", "three", "no-record", "a:b:c:d:e", "::::", "a:b:\xff:Zz:999", "x:::Nowhere:* * * * *")
JOBS = 30


def some(source: random.Random, names: tuple[str, ...]) -> dict[Any, Any]:
    return {name: source.choice(VALUES) for name in names if source.random() < 0.5}


def spoil(client: redis.Redis, base: str, source: random.Random) -> list[str]:
    """Fill a queue with what nobody should have written. Returns the ids of the jobs."""
    ids = [f"job-{number}" for number in range(JOBS)]
    for at, job_id in enumerate(ids):
        client.hset(base + job_id, mapping={"name": b"\xffn", **some(source, FIELDS)})
        state = (*LISTS, *SETS)[at % 8]
        if state in LISTS:
            client.lpush(base + state, job_id)
        else:
            client.zadd(base + state, {job_id: source.choice(SCORES)})
        others: list[Any] = [base + "job-1", "nowhere", "", ":::", b"\xff", base + job_id]
        client.sadd(f"{base}{job_id}:dependencies", source.choice(others))
        client.hset(f"{base}{job_id}:processed", source.choice(others), source.choice(VALUES))
        client.zadd(f"{base}{job_id}:unsuccessful", {source.choice(others): source.choice(SCORES)})
        client.rpush(f"{base}{job_id}:logs", source.choice(VALUES))
    client.zadd(base + "delayed", {"job-5": source.choice((float("-inf"), -1.0))})  # the first of all
    client.hset(base + "meta", mapping={"opts.maxLenEvents": "10000", **some(source, OF_META)})
    for scheduler_id in SCHEDULERS:
        client.zadd(base + "repeat", {scheduler_id: source.choice([*SCORES, *(float(each) for each in TIMES)])})
        if ":" not in scheduler_id and scheduler_id != "no-record":
            client.hset(f"{base}repeat:{scheduler_id}", mapping={"ic": "1", **some(source, OF_SCHEDULER)})
    for key in ("bp:held:x", "bp:running:x", "bp:size:x", "bp:lanes:held", "bp:lanes:1"):
        client.zadd(base + key, {source.choice(("job-1", "", "x")): source.choice(SCORES)})
    for end in ("completed", "failed"):
        client.hset(f"{base}metrics:{end}", mapping={"count": source.choice(VALUES), "prevTS": source.choice(VALUES)})
        client.rpush(f"{base}metrics:{end}:data", *source.choices(VALUES, k=3))
    client.xadd(base + "events", {"event": "completed", "jobId": b"\xff"}, id="18446744073709551000-1")
    client.xadd(base + "bp:audit", {"actor": b"\xff", "detail": "{"}, id="18446744073709551000-1")
    return ids


@pytest.fixture(params=[1, 2, 3])
def spoilt(kit: Kit, request: pytest.FixtureRequest) -> Iterator[list[str]]:
    yield spoil(kit.redis, kit.base, random.Random(request.param))
    kit.redis.delete(*kit.redis.keys(f"{kit.base}*"))


async def read_all(found: AsyncIterator[Any]) -> None:
    async for _ in found:
        pass


async def test_every_reader_shows_what_it_can(kit: Kit, spoilt: list[str]) -> None:
    """It answers, or says that this one thing cannot be read."""
    queue = kit.queue()
    for state in JobState:
        if state is JobState.UNKNOWN:
            with pytest.raises(InvalidOption):
                await queue.heads(state)
            continue
        await queue.jobs(state)
        await queue.heads(state)
        await read_all(queue.iter_jobs(state))
        await queue.position_at(state, 1_795_033_000_000)
    for job_id in spoilt:
        job = await queue.get_job(job_id)
        assert job is not None
        assert job.to_json()["id"] == job_id
        for read in (queue.locate, queue.children, queue.children_counts, queue.get_flow, queue.logs):
            await read(job_id)
        await explain.why(queue, job_id)
    for record in await queue.schedulers():
        assert await queue.get_scheduler(record.id) is not None
        assert len(record.next_runs(3)) <= 3
        await queue.why_ended(record)
    await queue.lanes.list()
    await queue.metrics("completed")
    await queue.prometheus_metrics()
    await queue.counts_per_priority()
    await queue.oldest_age_ms()
    await queue.failed_set.list()
    await read_all(queue.blocked_parents())
    await queue.find_orphans()


async def test_alarms_and_numbers_of_all_queues_go_on(kit: Kit, spoilt: list[str]) -> None:
    """One score without end used to take every number away from the exporter, and so every alarm."""
    connection = Connection(kit.url)
    exporter = Exporter([ServerSource(connection, "bull")])
    try:
        page = render(await exporter.collect())
        overview = Overview(connection, "bull", [kit.name])
        found = await overview.read()
    finally:
        await exporter.aclose()
        await connection.aclose()

    assert re.search(r"^bullpen_source_up\{.*\} 1$", page, re.MULTILINE)
    assert f'queue="{kit.name}"' in page
    assert kit.name in {look.queue for look in found.looks}


async def test_every_page_of_the_dashboard_is_shown(kit: Kit, spoilt: list[str]) -> None:
    async with opened(kit.url) as (http, _):
        paths = ["/", "/queues", f"/queues/{kit.name}", "/schedules", "/dead-letters", "/workers", "/health", "/audit"]
        paths += [f"/queues/{kit.name}?state={state.value}" for state in JobState]
        paths += [f"/queues/{kit.name}/jobs/{quote(job_id)}" for job_id in spoilt[:16]]
        for path in paths:
            answer = await http.get(path)
            assert answer.status_code < 500, (path, answer.text)


@pytest.mark.parametrize("field", ["finishedOn", "processedOn", "timestamp"])
@pytest.mark.parametrize("when", TIMES)
async def test_a_failure_of_no_year_keeps_no_other_from_its_letter(kit: Kit, field: str, when: str) -> None:
    """One of them used to end the sweep, each time again."""
    for job_id in ("a", "odd", "z"):
        time = when if job_id == "odd" else str(kit.server_ms())
        fields: dict[str, Any] = {field: time, "ats": "1", "failedReason": "no"}
        kit.seed(job_id, to="failed", score=kit.server_ms(), **fields)
    kit.redis.hset(kit.base + "meta", "bpswept", "1")
    queue = kit.queue()

    assert await queue.dead_letters.sweep() == 3

    assert {letter.job_id for letter in await queue.dead_letters.list()} == {"a", "odd", "z"}


async def test_a_scheduler_beyond_the_calendar_goes_back_for_another_client(kit: Kit) -> None:
    slot = 9_007_199_254_740_000
    kit.redis.zadd(kit.base + "repeat", {"s": slot})
    kit.redis.hset(kit.base + "repeat:s", mapping={"name": "n", "ic": "1", "pattern": "0 0 * * *", "tz": "UTC"})
    kit.seed(f"repeat:s:{slot}", rjk="s", opts='{"repeat":{"pattern":"0 0 * * *","count":1}}')

    told = await kit.work(lambda job: None)
    await kit.until(lambda: kit.has("delayed"), "the iteration has gone back")

    assert kit.zset("repeat") == {"s": slot}
    assert not kit.has("failed") and told.of("error") == []


async def test_commands_show_jobs_of_no_year(kit: Kit) -> None:
    from bullpen.cli.show import instant

    async with Queue(kit.name, connection=kit.url) as queue:
        kit.seed("odd", to="failed", score=1, timestamp=TIMES[0], finishedOn=TIMES[0])
        job = await queue.get_job("odd")
    assert job is not None
    document = job.to_json()
    assert document["timestamp"] == 0
    assert "finishedOn" not in document
    assert instant(float(TIMES[0])) is None
    with pytest.raises(BullpenError):
        await queue.jobs(JobState.UNKNOWN)


async def test_jobs_that_list_each_other_as_children_are_a_tree_all_the_same(kit: Kit) -> None:
    """Twelve of them at ten levels would be read for years."""
    names = [f"job-{number}" for number in range(12)]
    for name in names:
        kit.seed(name)
        kit.redis.sadd(f"{kit.base}{name}:dependencies", *(kit.base + other for other in names), "::")
    queue = kit.queue()

    async with asyncio.timeout(30):
        tree = await queue.get_flow("job-0")

    assert tree is not None
    assert sorted(job.id for job in tree.jobs()) == sorted(names)
    assert await queue.jobs_at(["::", kit.base + "job-1"]) != []
