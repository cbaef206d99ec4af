"""The next time a cron pattern matches.

In: a pattern (five fields, or six with seconds first), an IANA zone, an instant. Out: the next instant, in Unix ms.
Rules at clock changes: a pattern whose hour has `*` or a step means real instants (a repeated hour matches twice, a
skipped hour never); fixed hours mean once per local day: in a gap shifted forward by the gap, in an overlap the
first of the two.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from bullpen.errors import InvalidOption


def next_after(pattern: str, zone: str | None, after_ms: int) -> int:
    """The first match strictly after `after_ms`. Raises InvalidOption for a pattern or zone that cannot be read."""
    tz = _zone(zone)
    after = datetime.fromtimestamp(after_ms / 1000, UTC)
    hour_field = _fields(pattern)[-4]
    if "*" in hour_field or "/" in hour_field:
        return _next_real(pattern, tz, after)
    return _next_daily(pattern, tz, after)


def _zone(zone: str | None) -> ZoneInfo:
    try:
        return ZoneInfo(zone or "UTC")
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise InvalidOption("tz", "an IANA time zone", zone) from error


def _fields(pattern: str) -> list[str]:
    fields = pattern.split()
    if len(fields) not in (5, 6):
        raise InvalidOption("pattern", "a cron pattern of five fields, or six with seconds first", pattern)
    return fields


def _simulate(pattern: str, naive: datetime) -> CronSim:
    try:
        return CronSim(pattern, naive)
    except CronSimError as error:
        raise InvalidOption("pattern", f"a cron pattern ({error})", pattern) from error


def _next(simulation: CronSim, pattern: str) -> datetime:
    try:
        return next(simulation)
    except StopIteration:
        raise InvalidOption("pattern", "a cron pattern that matches some day", pattern) from None


def _next_daily(pattern: str, tz: ZoneInfo, after: datetime) -> int:
    """Fixed hours: walk local time; each local match is one instant."""
    # One day back, so that a match in a gap just before `after` is not passed over.
    local = after.astimezone(tz).replace(tzinfo=None) - timedelta(days=1)
    simulation = _simulate(pattern, local)
    while True:
        instant = _instant(_next(simulation, pattern), tz)
        if instant > after:
            return _ms(instant)


def _next_real(pattern: str, tz: ZoneInfo, after: datetime) -> int:
    """Running hours: every real instant whose local time matches."""
    offsets = {
        moment.astimezone(tz).utcoffset() for moment in (after, after + timedelta(days=1), after - timedelta(days=1))
    }
    # A change of the offset within the reach of one look is covered by trying both offsets; matches far away are
    # found again later.
    best: datetime | None = None
    for offset in offsets:
        assert offset is not None
        simulation = _simulate(pattern, (after + offset).replace(tzinfo=None))
        for _ in range(200):
            instant = (_next(simulation, pattern) - offset).replace(tzinfo=UTC)
            if instant > after and instant.astimezone(tz).utcoffset() == offset:
                best = instant if best is None else min(best, instant)
                break
    if best is None:
        return _next_daily(pattern, tz, after)
    return _ms(best)


def _instant(naive: datetime, tz: ZoneInfo) -> datetime:
    """Local time to instant: in a gap shifted forward by the gap, in an overlap the first."""
    return naive.replace(tzinfo=tz, fold=0).astimezone(UTC)


def _ms(instant: datetime) -> int:
    return round(instant.timestamp() * 1000)
