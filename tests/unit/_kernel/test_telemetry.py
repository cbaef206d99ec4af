"""Telling what happens, at one place."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from bullpen._kernel import telemetry

Heard = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def heard() -> Iterator[Heard]:
    events: Heard = []
    unsubscribe = telemetry.subscribe(lambda event, fields: events.append((event, fields)))
    yield events
    unsubscribe()


def test_a_listener_hears_name_and_fields(heard: Heard) -> None:
    """Also fields that are called like arguments of ours."""
    telemetry.emit("job.completed", queue="emails", job_id="7", event="x")

    assert heard == [("job.completed", {"queue": "emails", "job_id": "7", "event": "x"})]


def test_after_unsubscribing_nothing_is_heard_and_twice_is_harmless() -> None:
    """A closed worker leaves nothing behind."""
    events: Heard = []
    was_enabled = telemetry.is_enabled()
    unsubscribe = telemetry.subscribe(lambda event, fields: events.append((event, fields)))
    assert telemetry.is_enabled()

    unsubscribe()
    unsubscribe()
    telemetry.emit("job.completed")

    assert events == []
    assert telemetry.is_enabled() == was_enabled


def test_one_function_subscribed_twice_is_ended_one_by_one() -> None:
    """Two workers may share a listener."""
    calls: list[str] = []

    def listener(event: str, fields: dict[str, Any]) -> None:
        calls.append(event)

    first, second = telemetry.subscribe(listener), telemetry.subscribe(listener)
    telemetry.emit("one")
    first()
    telemetry.emit("two")
    second()

    assert calls == ["one", "one", "two"]


def test_a_failing_listener_harms_nobody_and_is_logged_when_it_begins_and_ends(
    heard: Heard, caplog: pytest.LogCaptureFixture
) -> None:
    """A lasting fault must not fill the disk, one line per job."""
    is_broken = True

    def counters(event: str, fields: dict[str, Any]) -> None:
        if is_broken:
            raise RuntimeError("no route to collector")

    unsubscribe = telemetry.subscribe(counters)
    with caplog.at_level(logging.WARNING, logger="bullpen.telemetry"):
        for number in range(3):
            telemetry.emit("job.completed", number=number)
        is_broken = False
        telemetry.emit("job.completed", number=3)
    unsubscribe()

    assert [fields["number"] for _, fields in heard] == [0, 1, 2, 3]
    began, ended = (record.getMessage() for record in caplog.records)
    assert "counters" in began and "failed on 'job.completed'" in began
    assert "works again" in ended


def test_a_listener_that_ends_itself_while_listening_does_not_disturb_the_others(heard: Heard) -> None:
    """The list of listeners is replaced, never changed."""

    def once(event: str, fields: dict[str, Any]) -> None:
        unsubscribe()

    unsubscribe = telemetry.subscribe(once)
    telemetry.emit("one")
    telemetry.emit("two")

    assert [event for event, _ in heard] == ["one", "two"]
