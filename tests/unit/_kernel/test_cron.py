"""When a pattern matches: zones, clock changes, what can be read. Compared with npm's package in `interop`."""

import time
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from bullpen._kernel.cron import NeverMatches, find_zone, machine_zone, next_after
from bullpen.errors import InvalidOption


def _ms(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1000)


def _next(pattern: str, zone: str | None, after: str, count: int = 1) -> list[str]:
    found, at_ms = [], _ms(after)
    for _ in range(count):
        at_ms = next_after(pattern, zone, at_ms)
        found.append(datetime.fromtimestamp(at_ms / 1000, find_zone(zone or "UTC")).isoformat())
    return found


def test_a_repeated_hour_matches_twice_where_hours_run() -> None:
    assert _next("*/30 * * * *", "Europe/Berlin", "2026-10-25T02:15+02:00", 4) == [
        "2026-10-25T02:30:00+02:00",
        "2026-10-25T02:00:00+01:00",
        "2026-10-25T02:30:00+01:00",
        "2026-10-25T03:00:00+01:00",
    ]


def test_a_skipped_hour_never_matches_where_hours_run() -> None:
    assert _next("*/30 * * * *", "Europe/Berlin", "2026-03-29T01:15+01:00", 2) == [
        "2026-03-29T01:30:00+01:00",
        "2026-03-29T03:00:00+02:00",
    ]


def test_the_last_match_before_a_change_does_not_hide_the_one_in_the_repeated_hour() -> None:
    assert _next("50 2-2/1 25 10 *", "Europe/Berlin", "2026-10-25T02:55+02:00") == ["2026-10-25T02:50:00+01:00"]


def test_fixed_hours_are_once_per_local_day() -> None:
    assert _next("30 2 * * *", "Europe/Berlin", "2026-10-24T12:00+02:00", 2) == [
        "2026-10-25T02:30:00+02:00",
        "2026-10-26T02:30:00+01:00",
    ]
    assert _next("30 2 * * *", "Europe/Berlin", "2026-03-28T12:00+01:00", 2) == [
        "2026-03-29T03:30:00+02:00",
        "2026-03-30T02:30:00+02:00",
    ]


def test_a_change_of_half_an_hour_is_met() -> None:
    assert _next("*/20 * * * *", "Australia/Lord_Howe", "2026-10-04T01:50+10:30", 2) == [
        "2026-10-04T02:40:00+11:00",
        "2026-10-04T03:00:00+11:00",
    ]


@pytest.mark.parametrize("name", ["UTC+3", "utc+3", "utc+03:00", "+03:00"])
def test_fixed_offsets(name: str) -> None:
    assert find_zone(name) == timezone(timedelta(hours=3))


def test_half_hours_and_minus() -> None:
    assert find_zone("UTC-5:30") == timezone(-timedelta(hours=5, minutes=30))


def test_names_of_zones_in_any_case() -> None:
    assert find_zone("europe/berlin") == ZoneInfo("Europe/Berlin")


def test_the_machine_zone_is_named_by_tz(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    assert machine_zone() == ZoneInfo("Asia/Tokyo") == find_zone("local")
    monkeypatch.setenv("TZ", ":nonsense")
    assert machine_zone() is UTC


def test_without_tz_the_machine_zone_is_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as environment:
        environment.delenv("TZ", raising=False)
        time.tzset()  # the C library has the zone of the start
        here = datetime.now().astimezone().utcoffset() if Path("/etc/localtime").exists() else timedelta(0)
        assert datetime.now(machine_zone()).utcoffset() == here
    time.tzset()


def test_h_depends_on_the_seed_only() -> None:
    first = {next_after("H H * * *", "UTC", 0, seed=f"scheduler {number}") for number in range(50)}
    assert len(first) > 40
    assert next_after("H H * * *", "UTC", 0, seed="a") == next_after("H H * * *", "UTC", 0, seed="a")


def test_the_last_working_day() -> None:
    assert _next("0 0 LW * *", None, "2026-01-15T00:00+00:00", 2) == [
        "2026-01-30T00:00:00+00:00",
        "2026-02-27T00:00:00+00:00",
    ]


def test_a_day_that_never_comes_is_told_apart_from_nonsense() -> None:
    with pytest.raises(NeverMatches):
        next_after("0 0 30 2 *", None, 0)
    assert _next("0 0 29 2 *", None, "2026-01-15T00:00+00:00") == ["2028-02-29T00:00:00+00:00"]
    with pytest.raises(InvalidOption, match="cannot read '61'"):
        next_after("61 * * * *", None, 0)
