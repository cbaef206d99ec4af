"""When a symptom becomes an incident, when it is reported, and when it is over. No input or output here.

In: the stored incident, the current symptom, and the rules of reporting. Out: the incident as it is to be stored, and
what is to be reported. An incident is reported once when it starts, again when it lasts or grows, and once when it is
over; one that comes and goes within `resolve_after_ms` is one incident, not many. Elsewhere: checking (`symptoms`),
storing and sending (`alerts`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum

from bullpen.ledger.incidents import Incident
from bullpen.ops.alert_options import AlertTiming
from bullpen.ops.symptoms import Symptom

__all__ = ["IncidentChange", "Judged", "judge"]


class IncidentChange(StrEnum):
    """The change of an incident that is reported."""

    OPEN = "open"
    REPEATED = "repeated"
    RESOLVED = "resolved"


@dataclass(frozen=True, slots=True)
class Judged:
    """The next state of one incident. Both None: there was none, and it is deleted."""

    incident: Incident | None
    news: IncidentChange | None = None


_GROWING = frozenset({"dead_letters", "outbox_dead", "parked_events", "endpoints_off"})
_HELD = frozenset({"redis_down"})


def judge(known: Incident | None, sign: Symptom | None, now: datetime, telling: AlertTiming) -> Judged:
    """What one check means for one incident."""
    is_open = known is not None and known.resolved_at is None
    if known is None or not is_open:
        return Judged(known) if sign is None else _begin(sign, 1 if known is None else known.number + 1, now, telling)
    if sign is None:
        return _missing(known, now, telling)
    seen = replace(known, seen_at=now, value=sign.value, message=sign.message, fix=sign.fix)
    if known.is_silent(now):
        return Judged(seen)
    if known.told_at is None:
        is_due = now - known.opened_at >= _ms(telling.hold_ms)
        return _report(seen, IncidentChange.OPEN, now) if is_due else Judged(seen)
    has_grown = sign.rule in _GROWING and sign.value >= (known.told_value or 0) + telling.growth
    if has_grown or now - known.told_at >= _ms(telling.repeat_ms):
        return _report(seen, IncidentChange.REPEATED, now)
    return Judged(seen)


def _begin(sign: Symptom, number: int, now: datetime, telling: AlertTiming) -> Judged:
    made = Incident(
        rule=sign.rule,
        subject=sign.subject,
        number=number,
        opened_at=now,
        seen_at=now,
        told_at=None,
        told_value=None,
        resolved_at=None,
        value=sign.value,
        message=sign.message,
        fix=sign.fix,
    )
    is_held = sign.rule in _HELD and telling.hold_ms > 0
    return Judged(made) if is_held else _report(made, IncidentChange.OPEN, now)


def _missing(known: Incident, now: datetime, telling: AlertTiming) -> Judged:
    if known.told_at is None:
        return Judged(None)
    if now - known.seen_at < _ms(telling.resolve_after_ms):
        return Judged(known)
    if known.is_silent(now):
        return Judged(replace(known, resolved_at=now))
    return _report(replace(known, resolved_at=now), IncidentChange.RESOLVED, now)


def _report(incident: Incident, news: IncidentChange, now: datetime) -> Judged:
    return Judged(replace(incident, told_at=now, told_value=incident.value), news)


def _ms(number: int) -> timedelta:
    return timedelta(milliseconds=number)
