"""The next time a cron pattern matches.

In: a pattern, a zone, an instant. Out: the next instant, in Unix ms. Elsewhere: who keeps schedules
(`queue._scheduler`, `ticker`).

What can be read is at least what npm's cron-parser reads, since patterns in a shared queue were written for it: five or
six fields (seconds first; with fewer, the missing ones are the first and every value of them counts), lists, ranges,
steps, names of months and days, `?` for `*`, `L` (last day; `5L` the last Friday), `5#2` (the second Friday), `H` (a
value that is picked by a seed), `@daily` and its kin. Two day fields that are both restricted match when either does;
only `*` and `?` alone are no restriction.

Rules at clock changes: a pattern whose hour has `*`, `?` or a step means real instants (a repeated hour matches twice,
a skipped hour never); fixed hours mean once per local day: in a gap shifted forward by the gap, in an overlap the
first of the two.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from functools import lru_cache
from pathlib import Path
from typing import Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from bullpen._kernel.instants import as_utc
from bullpen.errors import InvalidOption

LOCAL: Final = "local"
"""The zone of this machine."""

_NICKNAMES: Final = {
    "@yearly": "0 0 0 1 1 *",
    "@annually": "0 0 0 1 1 *",
    "@monthly": "0 0 0 1 * *",
    "@weekly": "0 0 0 * * 0",
    "@daily": "0 0 0 * * *",
    "@midnight": "0 0 0 * * *",
    "@hourly": "0 0 * * * *",
    "@minutely": "0 * * * * *",
    "@secondly": "* * * * * *",
    "@weekdays": "0 0 0 * * 1-5",
    "@weekends": "0 0 0 * * 0,6",
}
_DAYS: Final = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_MONTHS: Final = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_NAMES: Final = {name: n for n, name in enumerate(_DAYS)} | {name: n for n, name in enumerate(_MONTHS, 1)}
_LEFT_OUT: Final = ("0", "*", "*", "*", "*", "*")
_HASHED: Final = re.compile(r"H(?:\((\d+)-(\d+)\))?(?:/(\d+))?")
_FIXED_OFFSET: Final = re.compile(r"(?:utc)?([+-])(\d{1,2})(?::?(\d{2}))?", re.IGNORECASE)
_MOST_YEARS: Final = 60
"""A 29th of February on one weekday comes every 28 years, or every 40 where a century has none."""
_LONGEST: Final = 1024


class NeverMatches(InvalidOption):
    """The pattern can be read, but no day is like it: the 30th of February."""

    def __init__(self, pattern: str) -> None:
        super().__init__("pattern", "a cron pattern that matches at least one date", pattern)


def next_after(pattern: str, zone: str | None, after_ms: int, *, seed: str | None = None) -> int:
    """The first match strictly after `after_ms`. No zone is UTC. `H` is picked by a seed, else by the pattern.

    Raises InvalidOption for a pattern or zone that cannot be read.
    """
    tz = find_zone(zone or "UTC")
    fields = _read(pattern, pattern if seed is None else seed)
    after = as_utc(after_ms)
    if after is None:
        raise InvalidOption("after", "an instant of the years 1 to 9999, in ms", after_ms)
    try:
        return _ms(_next_real(fields, tz, after) if fields.runs_by_instant else _next_daily(fields, tz, after))
    except StopIteration:
        raise NeverMatches(pattern) from None
    except (ValueError, OverflowError):  # the calendar ends before its next match
        raise InvalidOption("after", "an instant with a match before the year 10000", after_ms) from None


# ---- zones -------------------------------------------------------------------------------------------------------


def find_zone(name: str) -> tzinfo:
    """An IANA zone whatever its letters' case, a fixed offset (`UTC+3`, `utc-5:30`, `+02:00`), or the machine's."""
    lowered = name.strip().lower()
    if lowered in ("utc", "gmt"):
        return UTC
    if lowered in (LOCAL, "system", "default"):
        return machine_zone()
    if (offset := _FIXED_OFFSET.fullmatch(lowered)) is not None:
        sign, hours, minutes = offset.groups()
        difference = timedelta(hours=int(hours), minutes=int(minutes or 0))
        if difference < timedelta(days=1):
            return timezone(-difference if sign == "-" else difference)
    try:
        return _iana_zone(name.strip())
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise InvalidOption("tz", "an IANA time zone, or an offset such as UTC+3", name) from error


def machine_zone() -> tzinfo:
    """What Node takes for a schedule without a zone: `TZ`, else what /etc/localtime is. UTC when neither says."""
    named = os.environ.get("TZ", "").removeprefix(":")
    if named:
        try:
            return _iana_zone(named)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            return UTC
    localtime = Path("/etc/localtime")
    try:
        _, _, name = str(localtime.resolve(strict=True)).rpartition("zoneinfo/")
        if name and not name.startswith("/"):
            return _iana_zone(name)
        with localtime.open("rb") as file:
            return ZoneInfo.from_file(file, key=LOCAL)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return UTC


def zone_name(zone: tzinfo) -> str:
    return getattr(zone, "key", None) or str(zone)


def _iana_zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        exact = _zones_by_lower_name().get(name.lower())
        if exact is None:
            raise
        return ZoneInfo(exact)


@lru_cache(maxsize=1)
def _zones_by_lower_name() -> dict[str, str]:
    return {name.lower(): name for name in available_timezones()}


# ---- reading a pattern -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Weekdays:
    """One entry of the day-of-week field: days 0 (Sunday) to 6, in any week, in the nth or the last of the month."""

    days: frozenset[int]
    nth: int | None = None
    only_last: bool = False

    def match(self, day: date) -> bool:
        if day.isoweekday() % 7 not in self.days:
            return False
        if self.only_last:
            return (day + timedelta(days=7)).month != day.month
        return self.nth is None or (day.day + 6) // 7 == self.nth


@dataclass(frozen=True, slots=True)
class _Fields:
    times: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    """Hours, minutes, seconds."""
    months: frozenset[int]
    month_days: frozenset[int] | None
    """None: any."""
    last_day: bool
    last_workday: bool
    weekdays: tuple[_Weekdays, ...] | None
    runs_by_instant: bool

    def match_day(self, day: date) -> bool:
        if self.month_days is None and self.weekdays is None:
            return True
        in_week = self.weekdays is not None and any(entry.match(day) for entry in self.weekdays)
        return in_week or (self.month_days is not None and self._match_month_day(day, self.month_days))

    def _match_month_day(self, day: date, days: frozenset[int]) -> bool:
        is_last = (day + timedelta(days=1)).month != day.month
        if day.day in days or (self.last_day and is_last):
            return True
        if not self.last_workday or day.isoweekday() > 5:
            return False
        return is_last or (day.isoweekday() == 5 and (day + timedelta(days=3)).month != day.month)

    def after(self, local: datetime) -> Iterator[datetime]:
        """Local times later than `local`, in order. Ends when no year of very many has one."""
        hours, minutes, seconds = self.times
        day, last = local.date(), local.year + _MOST_YEARS
        while day.year <= min(last, 9998):
            if day.month not in self.months:
                day = (day.replace(day=1) + timedelta(days=32)).replace(day=1)
                continue
            if self.match_day(day):
                floor = local if day == local.date() else None
                for hour in hours:
                    if floor is not None and hour < floor.hour:
                        continue
                    for minute in minutes:
                        if floor is not None and (hour, minute) < (floor.hour, floor.minute):
                            continue
                        for second in seconds:
                            found = datetime.combine(day, time(hour, minute, second))
                            if found > local:
                                yield found
            day += timedelta(days=1)


@lru_cache(maxsize=256)
def _read(pattern: str, seed: str) -> _Fields:
    atoms = _NICKNAMES.get(pattern.strip(), pattern).split()
    if not 1 <= len(atoms) <= 6 or len(pattern) > _LONGEST:
        raise InvalidOption("pattern", "a cron pattern of five fields, or six with seconds first", pattern)
    atoms = [*_LEFT_OUT[: 6 - len(atoms)], *atoms]
    draw = _draws(seed)
    # One draw per field in this order, whether it has an H or not: as npm's package does with the same seed.
    share = {name: draw() for name in ("second", "minute", "hour", "month", "day", "weekday")}
    try:
        second = _numbers(atoms[0], 0, 59, share["second"])
        minute = _numbers(atoms[1], 0, 59, share["minute"])
        hour = _numbers(atoms[2], 0, 23, share["hour"])
        month = _numbers(_without_names(atoms[4]), 1, 12, share["month"])
        is_any_day, is_any_weekday = atoms[3] in ("*", "?"), atoms[5] in ("*", "?")
        entries = atoms[3].split(",")
        plain = [entry for entry in entries if "L" not in entry or "-" in entry or "/" in entry]
        for entry in entries:
            if entry not in plain and re.fullmatch(r"\d{0,2}L|LW", entry) is None:
                raise ValueError(entry)
        days = _numbers(",".join(plain), 1, 31, share["day"]) if plain else ()
        return _Fields(
            times=(hour, minute, second),
            months=frozenset(month),
            month_days=None if is_any_day else frozenset(days),
            last_day="L" in atoms[3].replace("LW", ""),
            last_workday="LW" in entries,
            weekdays=None if is_any_weekday else tuple(_weekdays(atoms[5], share["weekday"])),
            runs_by_instant=any(sign in atoms[2] for sign in "*?/"),
        )
    except ValueError as error:
        raise InvalidOption("pattern", f"a cron pattern (cannot read {str(error)!r})", pattern) from None


def _weekdays(field: str, share: float) -> Iterator[_Weekdays]:
    for entry in _without_names(field).split(","):
        days, sharp, nth = entry.partition("#")
        if sharp and re.fullmatch(r"[1-5]", nth) is None:
            raise ValueError(entry)
        if (last := re.fullmatch(r"(\d)\d?L", days)) is not None:
            yield _Weekdays(frozenset({int(last[1]) % 7}), only_last=True)
        else:
            numbers = _numbers(days, 0, 7, share)
            yield _Weekdays(frozenset(number % 7 for number in numbers), nth=int(nth) if sharp else None)


def _without_names(field: str) -> str:
    def number_of(name: re.Match[str]) -> str:
        number = _NAMES.get(name[0].lower())
        if number is None:
            raise ValueError(name[0])
        return str(number)

    return re.sub(r"[A-Za-z]{3}", number_of, field)


def _numbers(field: str, lowest: int, highest: int, share: float) -> tuple[int, ...]:
    """The values of a field, in order. Raises ValueError with what cannot be read."""
    written_out = re.sub(r"[*?]", f"{lowest}-{highest}", field)
    written_out = _HASHED.sub(lambda hashed: _hashed(hashed, lowest, highest, share), written_out)
    found: set[int] = set()
    for entry in written_out.split(","):
        values, slash, step = entry.partition("/")
        # Of `1-5-9` the first two count, and of `3L` the digits: so npm's package reads them.
        first, *others = values.split("-")
        start = _leading_number(first, entry)
        if others:
            end = _leading_number(others[0], entry)
        else:
            if not first.isdigit():
                raise ValueError(entry)
            end = highest if slash else start
        every = _leading_number(step, entry) if slash else 1
        if not (lowest <= start <= end <= highest) or every < 1:
            raise ValueError(entry)
        found.update(range(start, end + 1, every))
    return tuple(sorted(found))


def _leading_number(text: str, entry: str) -> int:
    digits = re.match(r"\d{1,9}(?=[L\D]|$)", text)
    if digits is None or text[digits.end() :].strip("L"):
        raise ValueError(entry)
    return int(digits[0])


# ---- H: a value that spreads schedules over time ----------------------------------------------------------------


def _hashed(hashed: re.Match[str], lowest: int, highest: int, share: float) -> str:
    if hashed[1] is not None:
        first, last = int(hashed[1]), int(hashed[2])
        if first > last:
            raise ValueError(hashed[0])
        lowest, highest = max(lowest, first), min(highest, last)
        if lowest > highest:
            raise ValueError(hashed[0])
    one = str(int(share * (highest - lowest + 1)) + lowest)
    if hashed[3] is None:
        return one
    step = int(hashed[3])
    if step < 1:
        raise ValueError(hashed[0])
    first = lowest // step * step + int(share * step)
    return ",".join(str(value) for value in range(first, highest + 1, step) if value >= lowest) or one


def _draws(seed: str) -> Callable[[], float]:
    """Numbers from 0 to 1 that depend on the text only: FNV-1a for the start, mulberry32 for the sequence. Both are
    what npm's package uses, so that one seed means one value in either client."""
    whole = 0xFFFFFFFF
    state = 2166136261
    units = seed.encode("utf-16-le")
    for low, high in zip(units[::2], units[1::2], strict=True):
        state = (state ^ (low | high << 8)) * 16777619 & whole

    def draw() -> float:
        nonlocal state
        state = state + 0x6D2B79F5 & whole
        mixed = (state ^ state >> 15) * (state | 1) & whole
        mixed ^= mixed + ((mixed ^ mixed >> 7) * (mixed | 61) & whole) & whole
        return (mixed ^ mixed >> 14) / 4294967296

    return draw


# ---- from local times to instants --------------------------------------------------------------------------------


def _next_daily(fields: _Fields, tz: tzinfo, after: datetime) -> datetime:
    """Fixed hours: walk local time; each local match is one instant."""
    # One day back, so that a match in a gap just before `after` is not passed over.
    local = after.astimezone(tz).replace(tzinfo=None) - timedelta(days=1)
    return next(instant for match in fields.after(local) if (instant := _instant(match, tz)) > after)


def _next_real(fields: _Fields, tz: tzinfo, after: datetime) -> datetime:
    """Running hours: every real instant whose local time matches. Local time is walked with one offset as far as that
    holds, then on from the change with the next one."""
    offset = _offset(tz, after)
    start = after
    while True:
        found = next(fields.after((start + offset).replace(tzinfo=None))).replace(tzinfo=UTC) - offset
        change = _change(tz, max(start, after), offset, (after + timedelta(days=1), found))
        if change is None or found < change:
            return found
        # A match at the change itself counts, hence a little before it, read with the offset that begins there.
        start, after, offset = change - timedelta(microseconds=1), change, _offset(tz, change)


def _change(tz: tzinfo, begin: datetime, offset: timedelta, looks: tuple[datetime, ...]) -> datetime | None:
    """The first whole second after `begin` that has another offset, if one of `looks` has."""
    for look in looks:
        if look > begin and _offset(tz, look) != offset:
            end = look
            while end - begin > timedelta(seconds=1):
                middle = begin + (end - begin) / 2
                begin, end = (middle, end) if _offset(tz, middle) == offset else (begin, middle)
            return end.replace(microsecond=0)
    return None


def _offset(tz: tzinfo, instant: datetime) -> timedelta:
    offset = instant.astimezone(tz).utcoffset()
    assert offset is not None
    return offset


def _instant(naive: datetime, tz: tzinfo) -> datetime:
    """Local time to instant: in a gap shifted forward by the gap, in an overlap the first."""
    return naive.replace(tzinfo=tz, fold=0).astimezone(UTC)


def _ms(instant: datetime) -> int:
    return round(instant.timestamp() * 1000)
