"""When a sign becomes an incident, when it is told, and when it is over: moments, without clock or server."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bullpen.errors import InvalidOption
from bullpen.ledger.incidents import Incident
from bullpen.ops.alert_options import AlertTiming, SymptomLimits
from bullpen.ops.incidents import IncidentChange, Judged, judge
from bullpen.ops.symptoms import RULES, QueueNames, Symptom

START = datetime(2030, 1, 1, tzinfo=UTC)
TELLING = AlertTiming(repeat_ms=60_000, resolve_after_ms=10_000, growth=5, hold_ms=20_000)


def sign(value: int = 3, rule: str = "dead_letters") -> Symptom:
    return Symptom(rule, "mails-dlq", value, f"{value} dead letters wait", "bullpen dead-letters list mails")


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def play(*looks: tuple[float, Symptom | None], telling: AlertTiming = TELLING) -> list[tuple[float, IncidentChange]]:
    """What is told when, over a series of looks."""
    known: Incident | None = None
    told: list[tuple[float, IncidentChange]] = []
    for second, seen in looks:
        judged = judge(known, seen, at(second), telling)
        known = judged.incident
        if judged.news is not None:
            told.append((second, judged.news))
    return told


def test_an_incident_is_told_once_and_once_more_when_it_is_over() -> None:
    assert play((0, None), (1, sign()), (2, sign()), (5, None), (12.5, None), (20, None)) == [
        (1, IncidentChange.OPEN),
        (12.5, IncidentChange.RESOLVED),
    ]


def test_what_comes_and_goes_is_one_incident() -> None:
    looks = [(second, sign() if second % 9 < 3 else None) for second in range(60)]
    assert play(*looks) == [(0, IncidentChange.OPEN)]


def test_what_lasts_is_told_again_after_the_interval() -> None:
    assert play(*[(second, sign()) for second in range(0, 150, 10)]) == [
        (0, IncidentChange.OPEN),
        (60, IncidentChange.REPEATED),
        (120, IncidentChange.REPEATED),
    ]


def test_what_grows_is_told_again_and_what_shrinks_is_not() -> None:
    values = [3, 7, 8, 12, 13, 1, 12]
    assert play(*[(float(second), sign(value)) for second, value in enumerate(values)]) == [
        (0, IncidentChange.OPEN),
        (2, IncidentChange.REPEATED),
        (4, IncidentChange.REPEATED),
    ]
    ages = [(float(second), sign(1_000 * second, rule="queue_late")) for second in range(5)]
    assert play(*ages) == [(0, IncidentChange.OPEN)], "the age of what waits grows by itself"


def test_a_server_that_is_back_soon_was_no_incident() -> None:
    away = sign(1, rule="redis_down")
    assert play((0, away), (10, away), (15, None), (16, away), (30, None)) == []
    assert play((0, away), (10, away), (20, away), (25, None), (40, None)) == [
        (20, IncidentChange.OPEN),
        (40, IncidentChange.RESOLVED),
    ]
    assert play((0, away), telling=replace(TELLING, hold_ms=0)) == [(0, IncidentChange.OPEN)]


def test_the_next_incident_has_the_next_number() -> None:
    first = judge(None, sign(), at(0), TELLING).incident
    assert first is not None
    over = judge(first, None, at(11), TELLING)
    assert over.news is IncidentChange.RESOLVED
    assert judge(over.incident, None, at(12), TELLING) == Judged(over.incident)
    again = judge(over.incident, sign(), at(13), TELLING)
    assert again.incident is not None
    assert (again.news, again.incident.number, again.incident.opened_at) == (IncidentChange.OPEN, 2, at(13))


@given(st.lists(st.tuples(st.integers(0, 200), st.one_of(st.none(), st.integers(1, 30))), max_size=40))
def test_open_and_resolved_alternate_whatever_is_seen(looks: list[tuple[int, int | None]]) -> None:
    """Also with a clock that jumps back: nobody hears that something is over that they never heard of."""
    told = play(*[(float(second), None if value is None else sign(value)) for second, value in looks])
    words = [news for _, news in told if news is not IncidentChange.REPEATED]
    assert words == [IncidentChange.OPEN if index % 2 == 0 else IncidentChange.RESOLVED for index in range(len(words))]


def test_rules_have_one_word_in_each_place() -> None:
    for names in ([rule.check for rule in RULES.values()], [rule.prometheus for rule in RULES.values()]):
        assert len(set(names)) == len(names)


def test_limits_that_make_no_sense_are_refused() -> None:
    with pytest.raises(InvalidOption, match="queue_late_ms"):
        SymptomLimits(queue_late_ms=-1)
    for name in ("repeat_ms", "growth"):
        with pytest.raises(InvalidOption, match=name):
            AlertTiming(**{name: 0})
    with pytest.raises(InvalidOption, match="hold_ms"):
        AlertTiming(hold_ms=-1)


async def test_queues_are_listed_as_often_as_it_costs_little() -> None:
    """A walk over a million keys every half minute would be felt by everybody."""
    now, listed = 0.0, 0

    async def find() -> list[str]:
        nonlocal now, listed
        now, listed = now + 1.0, listed + 1
        return ["mails", "old-dlq"]

    names = QueueNames(find, lambda: now)
    for _ in range(3):
        assert await names() == ["mails", "mails-dlq", "old-dlq"]
    assert listed == 1
    now += 99.0
    await names()
    assert listed == 1
    now += 1.0
    await names()
    assert listed == 2

    quick = QueueNames(lambda: asyncio.sleep(0, ["mails"]), lambda: now)
    await quick()
    now += 0.001
    assert await quick() == ["mails", "mails-dlq"]
