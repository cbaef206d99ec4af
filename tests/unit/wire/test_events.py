"""Entries of the event stream, decoded."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bullpen.wire.events import EventName, QueueEvent, timestamp_of


@pytest.mark.requirement("Q-52", "Q-54", "X-12")
def test_an_entry_of_ours_has_job_time_attempts_and_data() -> None:
    """The time is the server's, from the entry's id."""
    event = QueueEvent.parse(
        b"1700000000123-4",
        [b"event", b"retry", b"jobId", b"7", b"attemptsMade", b"2", b"delay", b"4000", b"failedReason", b"refused"],
    )

    assert event == QueueEvent(
        "1700000000123-4", "retry", "7", 1_700_000_000_123, 2, {"delay": 4000, "failedReason": "refused"}
    )
    assert event.event == EventName.RETRY


@pytest.mark.requirement("Q-53", "X-12")
@pytest.mark.parametrize(
    ("fields", "data"),
    [
        ({"event": "completed", "jobId": "7", "returnvalue": '{"a":1}'}, {"returnvalue": {"a": 1}}),
        ({"event": "completed", "jobId": "7", "returnvalue": "{"}, {"returnvalue": "{"}),
        ({"event": "progress", "jobId": "7", "data": '{"message":"x"}'}, {"data": {"message": "x"}}),
        ({"event": "failed", "jobId": "7", "failedReason": "5"}, {"failedReason": "5"}),
        ({"event": "delayed", "jobId": "7", "delay": "1700000000000"}, {"delay": 1_700_000_000_000}),
        ({"event": "cleaned", "count": "12"}, {"count": 12}),
        ({"event": "removed", "jobId": "7", "prev": "wait"}, {"prev": "wait"}),
        ({"event": "mine", "returnvalue": "5"}, {"returnvalue": "5"}),
    ],
)
def test_fields_are_read_by_the_kind_of_event(fields: dict[str, str], data: dict[str, Any]) -> None:
    """JSON where the protocol has JSON, numbers where it has numbers, raw text for reasons."""
    assert QueueEvent.parse("1-0", fields).data == data


@pytest.mark.requirement("Q-52")
def test_an_entry_of_node_has_no_attempts_and_a_queue_event_has_no_job() -> None:
    """None, not zero: nobody told."""
    event = QueueEvent.parse("5-0", {b"event": b"drained"})

    assert (event.job_id, event.attempts_made, event.data) == (None, None, {})
    assert event.to_json() == {"event": "drained", "timestamp": 5}


@pytest.mark.requirement("Q-68")
def test_as_json_an_event_has_the_names_of_the_wire() -> None:
    """What the live pages receive."""
    event = QueueEvent.parse("5-0", {"event": "active", "jobId": "7", "attemptsMade": "0", "prev": "waiting"})

    assert event.to_json() == {
        "event": "active",
        "jobId": "7",
        "timestamp": 5,
        "attemptsMade": 0,
        "data": {"prev": "waiting"},
    }


def test_only_completed_and_failed_end_a_job() -> None:
    """A failed attempt that will be retried emits neither."""
    final = {name for name in EventName if QueueEvent("1-0", name, "7", 1).is_final}

    assert final == {EventName.COMPLETED, EventName.FAILED}


@given(st.binary(), st.lists(st.binary(max_size=20)))
def test_any_entry_can_be_read(entry_id: bytes, flat: list[bytes]) -> None:
    """One broken entry ended Node's listeners for good."""
    event = QueueEvent.parse(entry_id, flat)

    assert event.timestamp >= 0
    assert isinstance(event.event, str)


@pytest.mark.parametrize(("entry_id", "ms"), [(b"17-3", 17), ("17-3", 17), ("17", 17), ("x", 0), ("", 0), ("-5", 0)])
def test_the_time_of_an_entry_is_the_first_half_of_its_id(entry_id: bytes | str, ms: int) -> None:
    """So it needs no field of its own."""
    assert timestamp_of(entry_id) == ms
