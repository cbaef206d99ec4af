"""When an occasion falls due: every zone, every year, every clock change."""

from __future__ import annotations

import zoneinfo
from datetime import UTC, date, datetime, time, timedelta
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bullpen.errors import InvalidOption
from bullpen.messages.calendar import (
    Occurrence,
    QuietHours,
    Rule,
    TimePolicy,
    find_zone,
    lint,
    next_occurrence,
    occurrence_in,
    occurrences,
    period_at,
    read_date,
    read_time,
    resolve,
    show_date,
)

NINE = time(9)
YEARLY = Rule()

ZONES = sorted(zoneinfo.available_timezones() - {"Factory", "localtime", "posixrules"})
zones = st.sampled_from(ZONES).map(find_zone)
local_times = st.times().map(lambda at: at.replace(second=0, microsecond=0))
locals_ = st.datetimes(datetime.fromisoformat("1971-01-02"), datetime.fromisoformat("2100-01-01")).map(
    lambda at: at.replace(second=0, microsecond=0)
)
instants = locals_.map(lambda at: at.replace(tzinfo=UTC))
days = st.dates(date(1900, 1, 1), date(2090, 12, 31))
policies = st.builds(
    TimePolicy, gap=st.sampled_from(["forward", "after", "before"]), overlap=st.sampled_from(["first", "second"])
)
rules = st.builds(
    Rule,
    repeats=st.sampled_from(["yearly", "monthly"]),
    leap_day=st.sampled_from(["feb28", "mar1", "skip"]),
    short_month=st.sampled_from(["last", "skip"]),
)


def utc(*parts: int) -> datetime:
    return datetime(*parts, tzinfo=UTC)  # type: ignore[arg-type,misc]  # year, month, day and perhaps a time


def wall(*parts: int) -> datetime:
    """What the clocks of a zone show."""
    return utc(*parts).replace(tzinfo=None)


def due(day: date, zone: str, year: int, at: time = NINE, **policies: Any) -> datetime | None:
    found = occurrence_in(f"{year:04}", day, at, find_zone(zone), rule=Rule(**policies))
    return None if found is None else found.due_at


# ---- from local time to instant --------------------------------------------------------------------------------------


@pytest.mark.requirement("S-19", "X-72")
@settings(max_examples=300, deadline=None)
@given(locals_, zones, policies)
def test_the_clocks_of_the_zone_show_the_time_that_was_asked_for(
    local: datetime, zone: zoneinfo.ZoneInfo, policy: TimePolicy
) -> None:
    """Unless they never show it: then they show what `local` says, on the right side of the gap."""
    moment = resolve(local, zone, policy)

    shown = moment.instant.astimezone(zone).replace(tzinfo=None, fold=0)
    assert shown == moment.local
    if moment.kind == "gap":
        assert (shown > local) == (policy.gap != "before")
    else:
        assert shown == local


@pytest.mark.requirement("S-19")
@pytest.mark.parametrize(
    ("zone", "local", "gap", "expected"),
    [
        # Paris: 02:00 to 03:00 does not exist on 29 March 2026.
        ("Europe/Paris", wall(2026, 3, 29, 2, 30), "forward", utc(2026, 3, 29, 1, 30)),
        ("Europe/Paris", wall(2026, 3, 29, 2, 30), "after", utc(2026, 3, 29, 1, 0)),
        ("Europe/Paris", wall(2026, 3, 29, 2, 30), "before", utc(2026, 3, 29, 0, 59)),
        # Lord Howe goes forward by half an hour only.
        ("Australia/Lord_Howe", wall(2026, 10, 4, 2, 15), "forward", utc(2026, 10, 3, 15, 45)),
        # Beirut and Cairo change at midnight: the first minute of the day is the one that is missing.
        ("Africa/Cairo", wall(2026, 4, 24, 0, 0), "forward", utc(2026, 4, 23, 22, 0)),
        # Samoa went over the date line: 30 December 2011 never happened there.
        ("Pacific/Apia", wall(2011, 12, 30, 9, 0), "forward", utc(2011, 12, 30, 19, 0)),
        ("Pacific/Apia", wall(2011, 12, 30, 9, 0), "before", utc(2011, 12, 30, 9, 59)),
    ],
)
def test_a_time_that_does_not_exist(zone: str, local: datetime, gap: Any, expected: datetime) -> None:
    moment = resolve(local, find_zone(zone), TimePolicy(gap=gap))

    assert (moment.instant, moment.kind) == (expected, "gap")


@pytest.mark.requirement("S-19")
@pytest.mark.parametrize(
    ("zone", "local", "first", "second"),
    [
        ("Europe/Paris", wall(2026, 10, 25, 2, 30), utc(2026, 10, 25, 0, 30), utc(2026, 10, 25, 1, 30)),
        ("America/New_York", wall(2026, 11, 1, 1, 30), utc(2026, 11, 1, 5, 30), utc(2026, 11, 1, 6, 30)),
        ("Australia/Lord_Howe", wall(2026, 4, 5, 1, 45), utc(2026, 4, 4, 14, 45), utc(2026, 4, 4, 15, 15)),
    ],
)
def test_a_time_that_comes_twice(zone: str, local: datetime, first: datetime, second: datetime) -> None:
    moments = [resolve(local, find_zone(zone), TimePolicy(overlap=which)) for which in ("first", "second")]

    assert [moment.instant for moment in moments] == [first, second]
    assert {moment.kind for moment in moments} == {"overlap"}


# ---- 29 February and short months ------------------------------------------------------------------------------------


@pytest.mark.requirement("S-19")
@pytest.mark.parametrize(("policy", "day"), [("feb28", date(2027, 2, 28)), ("mar1", date(2027, 3, 1)), ("skip", None)])
def test_29_february_in_other_years(policy: Any, day: date | None) -> None:
    found = due(date(1992, 2, 29), "UTC", 2027, leap_day=policy)

    assert (found and found.date()) == day
    assert due(date(1992, 2, 29), "UTC", 2028, leap_day=policy) == utc(2028, 2, 29, 9)


def test_a_century_without_a_leap_day_is_jumped() -> None:
    """2100 is none, so eight years lie between two birthdays."""
    after = utc(2097, 1, 1)

    found = next_occurrence(date(1992, 2, 29), NINE, find_zone("UTC"), after=after, rule=Rule(leap_day="skip"))

    assert found is not None
    assert (found.period, found.number) == ("2104", 112)


def test_the_31st_of_short_months() -> None:
    def months(rule: Rule) -> list[str]:
        found = occurrences(
            date(2026, 1, 31), NINE, find_zone("UTC"), after=utc(2026, 1, 31), until=utc(2026, 7, 1), rule=rule
        )
        return [f"{one.local:%m-%d}" for one in found]

    assert months(Rule(repeats="monthly")) == ["02-28", "03-31", "04-30", "05-31", "06-30"]
    assert months(Rule(repeats="monthly", short_month="skip")) == ["03-31", "05-31"]


def test_a_date_without_a_year_has_no_number() -> None:
    day = read_date("birthday", "--02-29")

    found = next_occurrence(day, NINE, find_zone("UTC"), after=utc(2026, 1, 1), rule=YEARLY)

    assert found == Occurrence("2026", utc(2026, 2, 28, 9), wall(2026, 2, 28, 9), None)
    assert show_date(day) == "--02-29"


def test_nobody_is_congratulated_on_being_born() -> None:
    def first(rule: Rule) -> Occurrence | None:
        return next_occurrence(date(2026, 5, 1), NINE, find_zone("UTC"), after=utc(2026, 1, 1), rule=rule)

    yearly, monthly, once = first(YEARLY), first(Rule(repeats="monthly")), first(Rule(repeats="once"))

    assert yearly and monthly and once
    assert (yearly.period, yearly.number) == ("2027", 1)
    assert (monthly.period, monthly.number) == ("2026-06", 1)
    assert (once.period, once.number) == ("2026-05-01", 0)


def test_a_one_off_comes_once() -> None:
    day, rule = date(2026, 5, 1), Rule(repeats="once")

    assert next_occurrence(day, NINE, find_zone("UTC"), after=utc(2026, 5, 1, 9), rule=rule) is None


# ---- occurrences -----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("S-19", "X-72")
@settings(max_examples=200, deadline=None)
@given(days, local_times, zones, instants, rules, policies)
def test_the_next_occurrence_is_the_first_one_after_and_none_lies_between(
    day: date, at: time, zone: zoneinfo.ZoneInfo, after: datetime, rule: Rule, policy: TimePolicy
) -> None:
    found = next_occurrence(day, at, zone, after=after, rule=rule, policy=policy)
    assert found is not None
    assert found.due_at > after

    again = next_occurrence(day, at, zone, after=found.due_at - timedelta(seconds=1), rule=rule, policy=policy)
    later = next_occurrence(day, at, zone, after=found.due_at, rule=rule, policy=policy)

    assert again == found
    assert later is not None and later.period > found.period
    assert occurrence_in(found.period, day, at, zone, rule=rule, policy=policy) == found


@pytest.mark.requirement("S-19", "X-72")
@settings(max_examples=150, deadline=None)
@given(days, local_times, zones, zones, st.integers(2020, 2080))
def test_who_moves_gets_the_message_at_the_same_local_time(
    day: date, at: time, here: zoneinfo.ZoneInfo, there: zoneinfo.ZoneInfo, year: int
) -> None:
    """The period stays, so the message stays the same one; only its instant moves, by 26 hours at the most."""
    assume(day.year < year)
    old = occurrence_in(f"{year:04}", day, at, here, rule=YEARLY)
    new = occurrence_in(f"{year:04}", day, at, there, rule=YEARLY)

    assert old and new
    assert old.period == new.period
    if old.kind != "gap" and new.kind != "gap":
        assert old.local == new.local
    assert abs(old.due_at - new.due_at) <= timedelta(hours=27)


@pytest.mark.requirement("S-19")
def test_neighbours_across_the_date_line_have_their_birthday_a_day_apart() -> None:
    """Kiritimati and Pago Pago share the wall clock but for an hour, and never the date at nine."""
    east, west = due(date(1990, 6, 1), "Pacific/Kiritimati", 2026), due(date(1990, 6, 1), "Pacific/Pago_Pago", 2026)

    assert east == utc(2026, 5, 31, 19)
    assert west == utc(2026, 6, 1, 20)


def test_the_period_of_a_local_day() -> None:
    day = date(2026, 3, 9)

    assert [period_at(day, Rule(repeats=kind)) for kind in ("yearly", "monthly", "once")] == [
        "2026",
        "2026-03",
        "2026-03-09",
    ]


# ---- quiet hours -----------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(local_times, local_times, locals_)
def test_quiet_hours_end_at_their_end(start: time, end: time, local: datetime) -> None:
    assume(start != end)
    quiet = QuietHours(start, end)

    shifted = quiet.shift(local)

    assert not quiet.covers(shifted.time())
    assert timedelta(0) <= shifted - local < timedelta(days=1)
    assert (shifted == local) == (not quiet.covers(local.time()))


def test_a_send_time_inside_the_quiet_hours_moves_to_their_end() -> None:
    quiet = QuietHours(time(22), time(8))

    found = next_occurrence(
        date(1990, 6, 1), time(23), find_zone("UTC"), after=utc(2026, 1, 1), rule=YEARLY, quiet=quiet
    )

    assert found is not None
    assert (found.period, found.local) == ("2026", wall(2026, 6, 2, 8))
    with pytest.raises(InvalidOption, match="two different times"):
        QuietHours(time(8), time(8))


# ---- looking for trouble ---------------------------------------------------------------------------------------------


@pytest.mark.requirement("S-19")
def test_lint_lists_who_is_inside_a_gap_or_an_overlap() -> None:
    def findings(day: date, at: time, zone: str = "Europe/Paris", quiet: QuietHours | None = None) -> list[str]:
        found = lint(
            "ada", "birthday", day, at, find_zone(zone), after=utc(2026, 1, 1), until=utc(2027, 1, 1), rule=YEARLY,
            quiet=quiet,
        )  # fmt: skip
        return [one.text for one in found]

    assert findings(date(1990, 3, 29), time(2, 30)) == [
        "02:30 does not exist in Europe/Paris on 2026-03-29; it leaves at 2026-03-29 03:30"
    ]
    assert findings(date(1990, 10, 25), time(2, 30)) == [
        "02:30 occurs twice in Europe/Paris on 2026-10-25; it leaves at 00:30 UTC"
    ]
    assert findings(date(1990, 3, 28), time(23), quiet=QuietHours(time(22), time(2, 15)))
    assert findings(date(1990, 3, 29), NINE) == []


# ---- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["", "Paris", "Europe/Pariss", "../etc/passwd", "/etc/localtime", "localtime", 5, "Etc"]
)
def test_what_is_no_zone_is_refused(name: Any) -> None:
    with pytest.raises(InvalidOption, match="IANA time zone"):
        find_zone(name)


@pytest.mark.parametrize(
    "value", ["", "14.3.1990", "1990-02-30", "--13-01", "0999-01-01", "9999-01-01", 5, datetime.now(UTC)]
)
def test_what_is_no_date_is_refused(value: Any) -> None:
    with pytest.raises(InvalidOption, match=r"birthday: expected a"):
        read_date("birthday", value)


@pytest.mark.parametrize("value", ["", "9:00", "25:00", "09:00:30", 9, time(9, 0, 30), time(9, tzinfo=UTC)])
def test_what_is_no_time_is_refused(value: Any) -> None:
    with pytest.raises(InvalidOption, match=r"send_at: expected a time"):
        read_time("send_at", value)


def test_dates_and_times_are_read() -> None:
    assert read_date("d", "1990-03-14") == read_date("d", date(1990, 3, 14)) == date(1990, 3, 14)
    assert show_date(date(1990, 3, 14)) == "1990-03-14"
    assert read_time("t", "09:30") == read_time("t", time(9, 30)) == time(9, 30)


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (lambda: Rule(repeats="weekly"), "repeats"),  # type: ignore[arg-type]
        (lambda: Rule(leap_day="never"), "leap_day"),  # type: ignore[arg-type]
        (lambda: Rule(short_month="first"), "short_month"),  # type: ignore[arg-type]
        (lambda: TimePolicy(gap="back"), "gap"),  # type: ignore[arg-type]
        (lambda: TimePolicy(overlap="third"), "overlap"),  # type: ignore[arg-type]
    ],
)
def test_policies_are_checked_when_they_are_made(make: Any, option: str) -> None:
    with pytest.raises(InvalidOption, match=f"{option}: expected"):
        make()
