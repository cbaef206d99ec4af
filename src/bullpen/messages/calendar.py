"""When an occasion falls due: a date, a local time and a zone become an instant. No I/O and no clock.

In: the date of an occasion (a birthday, the day of a contract), a rule (every year, every month, once), the wall-clock
time to send at, an IANA zone. Out: occurrences, each with its period (`2028`, `2028-02`), its instant in UTC and the
local time it really has. What is not obvious is a policy with a default:

- 29 February in other years: `feb28` (default), `mar1`, or `skip`. Days 29 to 31 in short months: `last` or `skip`.
- A local time that does not exist because clocks go forward: `forward` by as much as the clocks (default: 02:30 becomes
  03:30), `after` (the first instant after the gap), `before` (the last minute before it). A zone that skips a whole day
  to change sides of the date line is the same thing with a gap of 24 hours.
- A local time that comes twice because clocks go back: `first` (default) or `second`.

Zones come from the time zone database of the machine or of the package `tzdata`; governments change it, so instants
are computed shortly before they are needed and again when a recipient moves. Elsewhere: storing them (`planner`).
"""

from __future__ import annotations

import calendar as _calendar
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from functools import lru_cache
from typing import Final, Literal
from zoneinfo import ZoneInfo

from bullpen.errors import InvalidOption, require

__all__ = [
    "Finding",
    "Moment",
    "Occurrence",
    "QuietHours",
    "Rule",
    "TimePolicy",
    "find_zone",
    "lint",
    "next_occurrence",
    "occurrence_in",
    "occurrences",
    "period_at",
    "read_date",
    "read_time",
    "resolve",
    "show_date",
]

Repeats = Literal["yearly", "monthly", "once"]
LeapDay = Literal["feb28", "mar1", "skip"]
ShortMonth = Literal["last", "skip"]
Gap = Literal["forward", "after", "before"]
Overlap = Literal["first", "second"]

UNKNOWN_YEAR: Final = 4
"""Stands for "the year is not known" in a stored date; a leap year, so that 29 February can be stored too."""

_FIRST_KNOWN_YEAR: Final = 1_000
_LAST_YEAR: Final = 9_000
_SECOND: Final = timedelta(seconds=1)
_MINUTE: Final = timedelta(minutes=1)


# Words --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How an occasion comes back."""

    repeats: Repeats = "yearly"
    leap_day: LeapDay = "feb28"
    """Where a yearly occasion of 29 February goes in other years."""
    short_month: ShortMonth = "last"
    """Where a monthly occasion of the 29th to 31st goes in shorter months."""

    def __post_init__(self) -> None:
        _one_of("repeats", self.repeats, ("yearly", "monthly", "once"))
        _one_of("leap_day", self.leap_day, ("feb28", "mar1", "skip"))
        _one_of("short_month", self.short_month, ("last", "skip"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePolicy:
    """What to do with a local time that does not exist, or comes twice."""

    gap: Gap = "forward"
    overlap: Overlap = "first"

    def __post_init__(self) -> None:
        _one_of("gap", self.gap, ("forward", "after", "before"))
        _one_of("overlap", self.overlap, ("first", "second"))


@dataclass(frozen=True, slots=True)
class QuietHours:
    """Local times at which nobody is disturbed, from `start` until just before `end`; may go over midnight."""

    start: time
    end: time

    def __post_init__(self) -> None:
        require("quiet_hours", self.start != self.end, "two different times", (self.start, self.end))

    def covers(self, moment: time) -> bool:
        if self.start < self.end:
            return self.start <= moment < self.end
        return moment >= self.start or moment < self.end

    def shift(self, local: datetime) -> datetime:
        """The same local time, or the end of the quiet hours it falls into."""
        if not self.covers(local.time()):
            return local
        day = local.date() + timedelta(days=1) if local.time() >= self.end else local.date()
        return datetime.combine(day, self.end)


@dataclass(frozen=True, slots=True)
class Moment:
    """A local time that was asked for, and the instant it became."""

    instant: datetime
    """Aware, in UTC."""
    local: datetime
    """What the clocks of the zone show at that instant; naive."""
    kind: Literal["plain", "gap", "overlap"] = "plain"
    """gap: the time asked for does not exist; overlap: it comes twice."""


@dataclass(frozen=True, slots=True)
class Occurrence:
    """One time that an occasion comes."""

    period: str
    """What it happens once in: `2028`, `2028-02`, or the day of a one-off."""
    due_at: datetime
    """Aware, in UTC."""
    local: datetime
    """Clocks of the zone at that instant; naive."""
    number: int | None
    """Years or months since the date; None when its year is not known."""
    kind: Literal["plain", "gap", "overlap"] = "plain"


@dataclass(frozen=True, slots=True)
class Finding:
    """A recipient whose message does not leave at the wall-clock time that was asked for, or at the earlier of two."""

    who: str
    occasion: str
    asked: datetime
    occurrence: Occurrence
    text: str = field(compare=False, default="")


# From local time to instant -----------------------------------------------------------------------------------------


@lru_cache(maxsize=1_024)
def find_zone(name: str) -> ZoneInfo:
    """The zone of an IANA name. Raises InvalidOption for anything else."""
    # `localtime` and `posixrules` are files of some machines, which mean another zone on the next one.
    plain = isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_+\-]+(?:/[A-Za-z0-9_+\-]+)*", name) is not None
    if not plain or name in ("localtime", "posixrules", "Factory"):
        raise InvalidOption("zone", "an IANA time zone such as 'Europe/Paris'", name)
    try:
        return ZoneInfo(name)
    except (LookupError, ValueError, OSError) as error:  # unknown; no zone file; a directory
        raise InvalidOption("zone", "an IANA time zone such as 'Europe/Paris'", name) from error


def resolve(local: datetime, zone: ZoneInfo, policy: TimePolicy | None = None) -> Moment:
    """The instant of a naive local time."""
    policy = policy or TimePolicy()
    early = local.replace(tzinfo=zone, fold=0)
    late = local.replace(tzinfo=zone, fold=1)
    if early.utcoffset() == late.utcoffset():
        instant = early.astimezone(UTC)
        return Moment(instant, local)
    first, second = early.astimezone(UTC), late.astimezone(UTC)
    if first < second:
        instant = first if policy.overlap == "first" else second
        return Moment(instant, local, "overlap")
    # In a gap the two readings stand the other way round: `second` lies before the change, `first` after it.
    if policy.gap == "forward":
        instant = first
    else:
        change = _change_between(second, first, zone)
        instant = change if policy.gap == "after" else change - _MINUTE
    return Moment(instant, _local(instant, zone), "gap")


def _change_between(before: datetime, after: datetime, zone: ZoneInfo) -> datetime:
    """The first second in (before, after] at which the zone has the offset of `after`."""
    wanted = after.astimezone(zone).utcoffset()
    low, high = before, after
    while high - low > _SECOND:
        middle = low + ((high - low) // 2 // _SECOND) * _SECOND
        if middle.astimezone(zone).utcoffset() == wanted:
            high = middle
        else:
            low = middle
    return high


def _local(instant: datetime, zone: ZoneInfo) -> datetime:
    return instant.astimezone(zone).replace(tzinfo=None, fold=0)


# Occurrences --------------------------------------------------------------------------------------------------------


def occurrence_in(
    period: str,
    day: date,
    at: time,
    zone: ZoneInfo,
    *,
    rule: Rule,
    policy: TimePolicy | None = None,
    quiet: QuietHours | None = None,
) -> Occurrence | None:
    """The occurrence of one period; None where the rule skips it."""
    found = _day_in(period, day, rule)
    if found is None:
        return None
    local = datetime.combine(found, at)
    moment = resolve(quiet.shift(local) if quiet else local, zone, policy)
    return Occurrence(period, moment.instant, moment.local, _number(period, day, rule), moment.kind)


def next_occurrence(
    day: date,
    at: time,
    zone: ZoneInfo,
    *,
    after: datetime,
    rule: Rule,
    policy: TimePolicy | None = None,
    quiet: QuietHours | None = None,
) -> Occurrence | None:
    """The first occurrence whose instant lies after `after`; None when there is none left."""
    for period in _periods(day, _local(after, zone).date() - timedelta(days=3), rule):
        found = occurrence_in(period, day, at, zone, rule=rule, policy=policy, quiet=quiet)
        if found is not None and found.due_at > after:
            return found
    return None


def occurrences(
    day: date,
    at: time,
    zone: ZoneInfo,
    *,
    after: datetime,
    until: datetime,
    rule: Rule,
    policy: TimePolicy | None = None,
    quiet: QuietHours | None = None,
) -> Iterator[Occurrence]:
    """What would fire between two instants: the preview of a plan."""
    while True:
        found = next_occurrence(day, at, zone, after=after, rule=rule, policy=policy, quiet=quiet)
        if found is None or found.due_at > until:
            return
        yield found
        after = found.due_at


def period_at(local: date, rule: Rule) -> str:
    """The period that a local day belongs to."""
    match rule.repeats:
        case "yearly":
            return f"{local.year:04}"
        case "monthly":
            return f"{local.year:04}-{local.month:02}"
        case "once":
            return local.isoformat()


def _periods(day: date, start: date, rule: Rule) -> Iterator[str]:
    """Periods from the one of `start` on, and not before the occasion exists: nobody is congratulated on being born."""
    match rule.repeats:
        case "yearly":
            first = start.year if _year_is_unknown(day) else max(start.year, day.year + 1)
            # At most eight years lie between two 29ths of February that are not skipped (1896, 1904).
            yield from (f"{year:04}" for year in range(first, min(first + 10, _LAST_YEAR)))
        case "monthly":
            at = start.year * 12 + start.month - 1
            if not _year_is_unknown(day):
                at = max(at, day.year * 12 + day.month)
            yield from (f"{month // 12:04}-{month % 12 + 1:02}" for month in range(at, at + 13))
        case "once":
            yield day.isoformat()


def _day_in(period: str, day: date, rule: Rule) -> date | None:
    match rule.repeats:
        case "yearly":
            year = int(period)
            if (day.month, day.day) != (2, 29) or _calendar.isleap(year):
                return day.replace(year=year)
            return {"feb28": date(year, 2, 28), "mar1": date(year, 3, 1), "skip": None}[rule.leap_day]
        case "monthly":
            year, month = map(int, period.split("-"))
            length = _calendar.monthrange(year, month)[1]
            if day.day > length and rule.short_month == "skip":
                return None
            return date(year, month, min(day.day, length))
        case "once":
            return day


def _number(period: str, day: date, rule: Rule) -> int | None:
    if _year_is_unknown(day):
        return None
    match rule.repeats:
        case "yearly":
            return int(period) - day.year
        case "monthly":
            year, month = map(int, period.split("-"))
            return (year - day.year) * 12 + month - day.month
        case "once":
            return 0


def _year_is_unknown(day: date) -> bool:
    return day.year < _FIRST_KNOWN_YEAR


# Looking for trouble ------------------------------------------------------------------------------------------------


def lint(
    who: str,
    occasion: str,
    day: date,
    at: time,
    zone: ZoneInfo,
    *,
    after: datetime,
    until: datetime,
    rule: Rule,
    policy: TimePolicy | None = None,
    quiet: QuietHours | None = None,
) -> Iterable[Finding]:
    """Occurrences in a stretch of time whose local time does not exist, or exists twice."""
    for found in occurrences(day, at, zone, after=after, until=until, rule=rule, policy=policy, quiet=quiet):
        if found.kind == "plain":
            continue
        asked_day = _day_in(found.period, day, rule)
        assert asked_day is not None
        asked = datetime.combine(asked_day, at)
        asked = quiet.shift(asked) if quiet else asked
        reason = (
            f"{asked:%H:%M} does not exist in {zone.key} on {asked:%Y-%m-%d}; it leaves at {found.local:%Y-%m-%d %H:%M}"
            if found.kind == "gap"
            else f"{asked:%H:%M} occurs twice in {zone.key} on {asked:%Y-%m-%d}; it leaves at {found.due_at:%H:%M} UTC"
        )
        yield Finding(who, occasion, asked, found, reason)


# Reading and showing ------------------------------------------------------------------------------------------------

_is_full = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}").fullmatch
_is_yearless = re.compile(r"--[0-9]{2}-[0-9]{2}").fullmatch
_is_time = re.compile(r"[0-9]{2}:[0-9]{2}").fullmatch


def read_date(option: str, value: object) -> date:
    """A date, as `date`, `1990-03-14`, or `--03-14` when the year is not known."""
    expected = "a date such as 1990-03-14, or --03-14 when the year is not known"
    if isinstance(value, date) and not isinstance(value, datetime):
        found = value
    elif isinstance(value, str) and (_is_full(value) or _is_yearless(value)):
        text = f"{UNKNOWN_YEAR:04}{value[1:]}" if value.startswith("--") else value
        try:
            found = date.fromisoformat(text)
        except ValueError as error:
            raise InvalidOption(option, f"{expected} ({error})", value) from None
    else:
        raise InvalidOption(option, expected, value)
    fits = found.year == UNKNOWN_YEAR or _FIRST_KNOWN_YEAR <= found.year < _LAST_YEAR
    require(option, fits, f"a year from {_FIRST_KNOWN_YEAR} to {_LAST_YEAR - 1}", value)
    return found


def show_date(value: date) -> str:
    """The text that `read_date` reads."""
    return f"--{value.month:02}-{value.day:02}" if _year_is_unknown(value) else value.isoformat()


def read_time(option: str, value: object) -> time:
    """A wall-clock time, as `time` or `09:00`; whole minutes, because that is how precisely messages are sent."""
    expected = "a time such as 09:00"
    if isinstance(value, time):
        whole = value.tzinfo is None and value.second == value.microsecond == 0
        require(option, whole, "a time in whole minutes, without a zone: the recipient's zone is meant", value)
        return value
    if not (isinstance(value, str) and _is_time(value)):
        raise InvalidOption(option, expected, value)
    try:
        return time.fromisoformat(value)
    except ValueError as error:
        raise InvalidOption(option, f"{expected} ({error})", value) from None


def _one_of(option: str, value: object, choices: tuple[str, ...]) -> None:
    require(option, value in choices, " or ".join(map(repr, choices)), value)
