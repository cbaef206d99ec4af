"""Schedules that others wrote, told by their records alone. The other clients themselves are in `interop`."""

import json
import logging
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from bullpen.errors import InvalidOption
from tests.queue._kit import Kit


async def nothing(_: object) -> None:
    """The handler of these tests."""


def put_scheduler(kit: Kit, pattern: str, **more: str) -> str:
    """A scheduler as Node's library stores it, with an iteration that is due now."""
    job_id = "repeat:s:1700000000000"
    kit.redis.zadd(kit.base + "repeat", {"s": 1_700_000_000_000})
    record: dict[Any, Any] = {"name": "tick", "pattern": pattern, "ic": "1", **more}
    kit.redis.hset(kit.base + "repeat:s", mapping=record)
    opts = {"repeat": {"pattern": pattern, "count": 1, **more}, "repeatJobKey": "s", "jobId": job_id, "attempts": 1}
    fields: dict[Any, Any] = {"name": "tick", "data": "{}", "opts": json.dumps(opts), "timestamp": "1", "delay": "0"}
    kit.redis.hset(kit.base + job_id, mapping={**fields, "priority": "0", "rjk": "s"})
    kit.redis.lpush(kit.base + "wait", job_id)
    return job_id


def next_local(kit: Kit, zone: str) -> datetime:
    score = kit.redis.zscore(kit.base + "repeat", "s")
    assert isinstance(score, float)
    return datetime.fromtimestamp(score / 1000, ZoneInfo(zone))


async def test_a_schedule_without_a_zone_follows_the_machine_and_says_so(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    put_scheduler(kit, "0 12 * * *")

    with caplog.at_level(logging.WARNING, "bullpen.worker"):
        await kit.drain(nothing, 1)

    assert next_local(kit, "Asia/Tokyo").hour == 12
    assert "names no time zone" in caplog.text and "Asia/Tokyo" in caplog.text


async def test_the_option_decides_instead_of_the_machine(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    put_scheduler(kit, "0 12 * * *")

    with caplog.at_level(logging.WARNING, "bullpen.worker"):
        await kit.drain(nothing, 1, scheduler_zone="America/New_York")

    assert next_local(kit, "America/New_York").hour == 12
    assert "names no time zone" not in caplog.text


async def test_a_pattern_that_no_day_is_like_ends_with_one_error_line(
    kit: Kit, caplog: pytest.LogCaptureFixture
) -> None:
    """The 30th of February: as Node, we have no next time to store; whoever waits for it must be able to find out."""
    job_id = put_scheduler(kit, "0 0 30 2 *", tz="UTC")

    await kit.drain(nothing, 1)

    (line,) = [line for line in caplog.records if line.levelno == logging.ERROR]
    assert "'0 0 30 2 *'" in line.getMessage()
    assert f"scheduler 's' ends with job '{job_id}'" in line.getMessage()
    assert kit.zset("delayed") == {}


async def test_an_unknown_zone_is_refused_at_once(kit: Kit) -> None:
    with pytest.raises(InvalidOption, match="tz"):
        kit.worker(nothing, scheduler_zone="Mars/Olympus")


async def test_the_zone_of_a_schedule_counts_whatever_the_machine_has(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    put_scheduler(kit, "0 12 * * *", tz="UTC+3")

    await kit.drain(nothing, 1)

    assert next_local(kit, "UTC").hour == 9


@pytest.mark.parametrize("counts", [True, False], ids=["complete record", "record without a count"])
async def test_the_record_of_a_scheduler_is_no_orphan(kit: Kit, counts: bool) -> None:
    put_scheduler(kit, "0 12 * * *")
    if not counts:
        kit.redis.hdel(kit.base + "repeat:s", "ic")
    queue = kit.queue()

    assert await queue.find_orphans() == []
    assert await queue.remove_orphans(restorable=True) == 0
    assert await queue.restore_orphans() == 0
    assert kit.redis.hget(kit.base + "repeat:s", "name") is not None
    await kit.drain(nothing, 1)


async def test_the_end_of_a_pattern_ends_it(kit: Kit) -> None:
    now_ms = round(datetime.now(UTC).timestamp() * 1000)
    put_scheduler(kit, "0 0 1 1 *", endDate=str(now_ms + 60_000))

    await kit.drain(nothing, 1)

    assert kit.redis.zscore(kit.base + "repeat", "s") == 1_700_000_000_000
    assert not kit.redis.exists(kit.base + "delayed")


async def test_a_schedule_that_nobody_can_compute_is_offered_less_and_less_often(
    kit: Kit, caplog: pytest.LogCaptureFixture
) -> None:
    job_id = put_scheduler(kit, "every second tuesday")

    told = await kit.work(nothing)
    await told.wait("returned", 2)

    assert told.of("completed") == []
    lines = [
        record.getMessage() for record in caplog.records if "to the queue for another client" in record.getMessage()
    ]
    assert [line.rpartition(" in ")[2] for line in lines] == ["1 s", "2 s"]
    assert kit.redis.zscore(kit.base + "delayed", job_id) is not None


async def test_what_a_template_says_of_a_parent_is_stored_as_other_clients_store_it(kit: Kit) -> None:
    """Node takes it in a template; a scheduler that is read and stored again must not lose it."""
    queue = kit.queue()

    made = await queue.upsert_scheduler("tick", every=60_000, on_failure="fail_parent")

    assert made.opts.to_json()["failParentOnFailure"] is True
    assert b'"fpof":true' in kit.redis.hget(kit.base + "repeat:tick", "opts")  # type: ignore[operator]  # no await
    assert json.loads(kit.fields(made.job_id)["opts"])["fpof"] is True
    with pytest.raises(InvalidOption, match="on_failure"):
        await queue.upsert_scheduler("tick", every=60_000, on_failure="explode")  # type: ignore[arg-type]
    await queue.remove_scheduler("tick")
