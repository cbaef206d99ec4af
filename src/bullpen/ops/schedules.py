"""Schedules as people read them: the rule in words, and its next firings with what the clocks do to them.

In: a stored scheduler. Out: text, and instants with notes. No input or output here.
Elsewhere: when a rule fires (`bullpen._kernel.cron`, `bullpen.wire.schedules`).
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec

from bullpen._kernel.cron import LOCAL, find_zone, machine_zone
from bullpen.errors import InvalidOption
from bullpen.ops.status import duration_text
from bullpen.queue import SchedulerRecord, next_runs

__all__ = ["Firing", "firings", "last_firing_ms", "rule_words"]

_DAYS: Final = ("Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
_MONTHS: Final = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
_SHORT_DAYS: Final = {name[:3].lower(): str(place) for place, name in enumerate(_DAYS)}
_SHORT_MONTHS: Final = {name[:3].lower(): str(place) for place, name in enumerate(_MONTHS, 1)}
_NICKNAMES: Final = {
    "@yearly": "on 1 January at 00:00",
    "@annually": "on 1 January at 00:00",
    "@monthly": "on day 1 of each month at 00:00",
    "@weekly": "on Sunday at 00:00",
    "@daily": "each day at 00:00",
    "@midnight": "each day at 00:00",
    "@hourly": "each hour at minute 0",
    "@minutely": "each minute",
    "@secondly": "each second",
    "@weekdays": "from Monday to Friday at 00:00",
    "@weekends": "on Saturday and Sunday at 00:00",
}
_ALL: Final = ("*", "?")
_MOST_LISTED: Final = 6
_BACK: Final = ((0.03, 150), (1, 70), (24, 1_500), (200, 4_000), (800, 4_000), (8_800, 4_000))
"""How many hours back a rule is looked for its last firing, and among how many; short ways first."""


def rule_words(record: SchedulerRecord) -> str:
    """The rule in words; empty for a pattern that is easier to read as it stands."""
    if record.every_ms:
        return f"every {duration_text(record.every_ms)}"
    pattern = (record.pattern or "").strip().lower()
    if pattern in _NICKNAMES:
        return _NICKNAMES[pattern]
    fields = pattern.split()
    if len(fields) == 6 and fields[0] == "0":
        fields = fields[1:]
    if len(fields) != 5:
        return ""
    minute, hour, day, month, weekday = fields
    when, on, of = _time_words(minute, hour), _day_words(day, weekday), _month_words(month)
    if when is None or on is None or of is None:
        return ""
    return " ".join(part for part in (on, of, when) if part)


def _time_words(minute: str, hour: str) -> str | None:
    if minute in _ALL and hour in _ALL:
        return "each minute"
    if (step := re.fullmatch(r"(?:\*|0)/(\d+)", minute)) and 60 % int(step[1] or 1) == 0:
        every = f"every {int(step[1])} minutes"
        if hour in _ALL:
            return every
        hours = _range(hour)
        return None if hours is None else f"{every} from {hours[0]:02d}:00 to {hours[1]:02d}:59"
    minutes = _list(minute)
    if minutes is None:
        return None
    if hour in _ALL:
        return f"each hour at minute {_and([str(each) for each in minutes])}"
    if step := re.fullmatch(r"(?:\*|0)/(\d+)", hour):
        return f"every {int(step[1])} hours at minute {_and([str(each) for each in minutes])}"
    hours_listed = _list(hour)
    if hours_listed is None:
        hours = _range(hour)
        if hours is None or len(minutes) != 1:
            return None
        return f"each hour from {hours[0]:02d}:{minutes[0]:02d} to {hours[1]:02d}:{minutes[0]:02d}"
    times = [f"{each:02d}:{other:02d}" for each in hours_listed for other in minutes]
    return f"at {_and(times)}" if len(times) <= _MOST_LISTED else None


def _day_words(day: str, weekday: str) -> str | None:
    """Both restricted: either day counts."""
    by_week, by_month = _weekday_words(weekday), _month_day_words(day)
    if by_week is None or by_month is None:
        return None
    if by_week and by_month:
        return f"{by_month} and {by_week}"
    return by_week or by_month or "each day"


def _month_day_words(day: str) -> str | None:
    if day in _ALL:
        return ""
    if day == "l":
        return "on the last day of the month"
    days = _list(day)
    return None if days is None else f"on day {_and([str(each) for each in days])}"


def _weekday_words(weekday: str) -> str | None:
    if weekday in _ALL:
        return ""
    numbers = re.sub("[a-z]{3}", lambda found: _SHORT_DAYS.get(found[0], found[0]), weekday)
    if (last := re.fullmatch(r"([0-7])l", numbers)) is not None:
        return f"on the last {_DAYS[int(last[1]) % 7]} of the month"
    if (nth := re.fullmatch(r"([0-7])#([1-5])", numbers)) is not None:
        return f"on the {('first', 'second', 'third', 'fourth', 'fifth')[int(nth[2]) - 1]} {_DAYS[int(nth[1]) % 7]}"
    days = _list(numbers)
    if days is not None and max(days) <= 7:
        return f"on {_and([_DAYS[each % 7] for each in days])}"
    span = _range(numbers)
    if span is None or max(span) > 7:
        return None
    return f"from {_DAYS[span[0] % 7]} to {_DAYS[span[1] % 7]}"


def _month_words(month: str) -> str | None:
    if month in _ALL:
        return ""
    numbers = _list(re.sub("[a-z]{3}", lambda found: _SHORT_MONTHS.get(found[0], found[0]), month))
    if numbers is None or not all(1 <= each <= 12 for each in numbers):
        return None
    return f"in {_and([_MONTHS[each - 1] for each in numbers])}"


def _list(field: str) -> list[int] | None:
    parts = field.split(",")
    if not all(part.isascii() and part.isdigit() for part in parts) or len(parts) > _MOST_LISTED:
        return None
    return sorted({int(part) for part in parts})


def _range(field: str) -> tuple[int, int] | None:
    found = re.fullmatch(r"(\d{1,2})-(\d{1,2})", field)
    return (int(found[1]), int(found[2])) if found else None


def _and(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


class Firing(msgspec.Struct, rename="camel", frozen=True):
    """One run to come."""

    at_ms: int
    local: str
    """By the clocks of the schedule's zone."""
    note: str = ""
    """What a change of the clocks does to it."""


def firings(record: SchedulerRecord, now_ms: int, count: int = 5) -> tuple[Firing, ...]:
    """The next ones. Empty where the rule cannot be computed."""
    try:
        zone = find_zone(record.zone) if record.zone and record.zone != LOCAL else machine_zone()
        if not record.zone and record.every_ms:
            zone = UTC
        instants = record.next_runs(count)
    except (InvalidOption, OverflowError):
        return ()
    found: list[Firing] = []
    before = datetime.fromtimestamp(now_ms / 1000, UTC).astimezone(zone)
    for instant in instants:
        local = instant.astimezone(zone)
        found.append(
            Firing(
                round(instant.timestamp() * 1000),
                f"{local:%Y-%m-%d %H:%M:%S}",
                "" if record.every_ms else _note(record, before, local),
            )
        )
        before = local
    return tuple(found)


def _note(record: SchedulerRecord, before: datetime, local: datetime) -> str:
    """Fixed hours fire once a day: what the clocks leave out comes later, what they repeat is the first of two."""
    change = (local.utcoffset() or timedelta()) - (before.utcoffset() or timedelta())
    fixed = _fixed_time(record.pattern or "")
    if fixed is not None and change > timedelta() and local.strftime("%H:%M") != fixed:
        return f"the clocks go forward: {fixed} does not exist that day"
    if fixed is not None and local.replace(fold=1).utcoffset() != local.utcoffset():
        return f"the clocks go back: {fixed} comes twice that day, and it fires at the first"
    if change:
        way = "forward" if change > timedelta() else "back"
        return f"the clocks have gone {way} by {duration_text(round(abs(change).total_seconds() * 1000))} before it"
    return ""


def _fixed_time(pattern: str) -> str | None:
    """The one time of day of a pattern, if it has one."""
    fields = pattern.split()
    if len(fields) == 6:
        fields = fields[1:]
    if len(fields) == 5 and fields[0].isdigit() and fields[1].isdigit():
        return f"{int(fields[1]):02d}:{int(fields[0]):02d}"
    return None


def last_firing_ms(record: SchedulerRecord) -> int | None:
    """When it fired last, as its rule says; None before the first time, and where that cannot be computed."""
    if record.iterations < 2 or not record.next_ms:
        return None
    if record.every_ms:
        return record.next_ms - record.every_ms
    try:
        for hours, most in _BACK:
            begin = datetime.fromtimestamp(record.next_ms / 1000, UTC) - timedelta(hours=hours, milliseconds=1)
            runs = next_runs(cron=record.pattern, tz=record.zone, after=begin, count=most, scheduler_id=record.id)
            earlier = [each for each in runs if round(each.timestamp() * 1000) < record.next_ms]
            if earlier and len(earlier) < len(runs):
                return round(earlier[-1].timestamp() * 1000)
    except (InvalidOption, OverflowError):
        return None
    return None
