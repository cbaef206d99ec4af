"""Schedules in words, and what the clocks do to their firings."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from bullpen.ops.schedules import firings, last_firing_ms, rule_words
from bullpen.queue import SchedulerRecord, next_runs
from bullpen.wire.options import WireOptions


def record(
    pattern: str | None, zone: str | None = None, *, at: str = "2026-11-18T10:00", **changes: Any
) -> SchedulerRecord:
    """As it is stored at an instant of UTC."""
    now = datetime.fromisoformat(at).replace(tzinfo=UTC)
    next_ms = (
        round(next_runs(cron=pattern, tz=zone, after=now, count=1, scheduler_id="s")[0].timestamp() * 1000)
        if pattern
        else round(now.timestamp() * 1000)
    )
    given: dict[str, Any] = {
        "every_ms": None, "offset_ms": 0, "limit": None, "starts_ms": None, "ends_ms": None, "iterations": 3, **changes,
    }  # fmt: skip
    return SchedulerRecord(
        id="s", name="n", next_ms=next_ms, pattern=pattern, zone=zone, data={}, opts=WireOptions(), **given
    )


@pytest.mark.requirement("D-36")
@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("0 9 * * 1-5", "from Monday to Friday at 09:00"),
        ("0 9 * * MON-FRI", "from Monday to Friday at 09:00"),
        ("*/15 8-18 * * *", "each day every 15 minutes from 08:00 to 18:59"),
        ("0 3 * * *", "each day at 03:00"),
        ("30 6 1,15 * *", "on day 1 and 15 at 06:30"),
        ("0 6 L * *", "on the last day of the month at 06:00"),
        ("0 9,17 * * 0", "on Sunday at 09:00 and 17:00"),
        ("0 12 * jan,jul 5L", "on the last Friday of the month in January and July at 12:00"),
        ("0 12 * * 1#2", "on the second Monday at 12:00"),
        ("0 0 12 * * *", "each day at 12:00"),
        ("5 * * * *", "each day each hour at minute 5"),
        ("@daily", "each day at 00:00"),
        ("0 9 1-5 2/3 *", ""),
        ("H H * * *", ""),
        ("*/7 * * * *", ""),
        ("nonsense", ""),
    ],
)
def test_a_pattern_reads_as_a_sentence_or_as_it_stands(pattern: str, words: str) -> None:
    stored = SchedulerRecord(
        id="s", name="n", next_ms=0, iterations=0, every_ms=None, pattern=pattern, zone=None, offset_ms=0, limit=None,
        starts_ms=None, ends_ms=None, data={}, opts=WireOptions(),
    )  # fmt: skip
    assert rule_words(stored) == words


@pytest.mark.requirement("D-36")
def test_a_time_that_does_not_exist_is_told() -> None:
    """02:30 in Berlin on the last Sunday of March: the clocks go from 2 to 3."""
    found = firings(record("30 2 * * *", "Europe/Berlin", at="2027-03-26T10:00"), 0)
    assert [each.local for each in found[:3]] == ["2027-03-27 02:30:00", "2027-03-28 03:30:00", "2027-03-29 02:30:00"]
    assert found[1].note == "the clocks go forward: 02:30 does not exist that day"
    assert found[2].note == ""


@pytest.mark.requirement("D-36")
def test_a_time_that_comes_twice_is_told() -> None:
    found = firings(record("30 2 * * *", "Europe/Berlin", at="2026-10-24T10:00"), 0)
    assert [each.local for each in found[:2]] == ["2026-10-25 02:30:00", "2026-10-26 02:30:00"]
    assert "comes twice that day" in found[0].note
    assert found[1].note == "the clocks have gone back by 1h 00m before it"


def test_an_interval_knows_no_clocks() -> None:
    found = firings(record(None, every_ms=86_400_000, at="2026-10-24T10:00"), 0)
    assert len(found) == 5
    assert {each.note for each in found} == {""}


@pytest.mark.requirement("D-36")
@pytest.mark.parametrize(
    ("pattern", "now", "last"),
    [
        ("0 9 * * 1-5", "2026-11-16T08:00", "2026-11-13T09:00"),
        ("*/5 * * * *", "2026-11-16T08:01", "2026-11-16T08:00"),
        ("*/10 * * * * *", "2026-11-16T08:00:05", "2026-11-16T08:00:00"),
        ("0 0 1 1 *", "2026-11-16T08:00", "2026-01-01T00:00"),
    ],
)
def test_the_last_firing_follows_from_the_rule(pattern: str, now: str, last: str) -> None:
    found = last_firing_ms(record(pattern, at=now))
    assert found is not None
    assert datetime.fromtimestamp(found / 1000, UTC) == datetime.fromisoformat(last).replace(tzinfo=UTC)
    assert last_firing_ms(record(pattern, at=now, iterations=1)) is None
