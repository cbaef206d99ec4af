"""What may be stored, checked before anything touches a database."""

from __future__ import annotations

import contextlib
import sqlite3
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bullpen._kernel.backoff import Backoff
from bullpen.errors import InvalidOption, NotJson, PayloadTooLarge
from bullpen.ledger import Enqueuer, OutboxItem, OutboxStatus
from bullpen.ledger.records import MAX_ERROR, MAX_LENGTHS, one_line
from tests.databases import item


def record(given: OutboxItem, *, strict: bool = False) -> dict[str, Any]:
    return given.to_record(default_attempts=10, strict=strict)


@pytest.mark.requirement("O-8")
def test_there_are_five_statuses() -> None:
    assert [status.value for status in OutboxStatus] == ["PENDING", "CLAIMED", "SENT", "FAILED", "DEAD"]


@pytest.mark.requirement("X-92", "O-11", "O-12", "O-14")
@pytest.mark.parametrize(("name", "limit"), MAX_LENGTHS.items())
def test_names_that_do_not_fit_are_refused_and_never_cut(name: str, limit: int) -> None:
    """Two names that differ only behind the cut would be one event."""
    assert item(**{name: "x" * limit})

    with pytest.raises(InvalidOption, match=f"{name}: expected at most {limit}"):
        item(**{name: "x" * (limit + 1)})


@pytest.mark.parametrize("name", ["source_stream_id", "source_event_id", "integration_type", "event_type"])
@pytest.mark.parametrize("value", ["", None, 5])
def test_what_makes_the_identity_must_be_there(name: str, value: object) -> None:
    with pytest.raises(InvalidOption, match=name):
        item(**{name: value})


@pytest.mark.parametrize("value", ["a\nb", "a\0b", "\ud800", 7])
def test_names_are_plain_text(value: object) -> None:
    with pytest.raises(InvalidOption, match="tenant_id"):
        item(tenant_id=value)


@pytest.mark.parametrize("tenant", ["", "  "])
def test_a_tenant_without_a_name_is_refused(tenant: str) -> None:
    """None is "no tenant"; a name that a form left empty would be a tenant that nobody can tell from none."""
    with pytest.raises(InvalidOption, match="tenant_id: expected text that is not blank, or None"):
        item(tenant_id=tenant)


@pytest.mark.parametrize("target", ["webhook:", "webhook: ", ":partnerX", " :x"])
def test_a_target_without_a_name_is_refused(target: str) -> None:
    """No route can be registered for it, so the row could only die."""
    with pytest.raises(InvalidOption, match="integration_type: expected a channel and a target such as"):
        item(integration_type=target)


@pytest.mark.parametrize("payload", [float("nan"), {1: 2}, {"x": object()}, b"bytes", {"big": 2**60}])
def test_a_payload_that_json_would_change_is_refused(payload: object) -> None:
    with pytest.raises(NotJson, match="payload"):
        item(payload=payload)


@pytest.mark.parametrize(
    ("payload", "fits"), [("a\0b", False), ("a\\u0000b", True), ("\\\0", False), ("\\\\u0000", True)]
)
def test_the_one_character_that_jsonb_cannot_hold_is_refused_everywhere(payload: str, fits: bool) -> None:
    """A row that SQLite takes and PostgreSQL refuses would fail on the day of the move."""
    if fits:
        assert item(payload=payload)
    else:
        with pytest.raises(InvalidOption, match=r"U\+0000"):
            item(payload=payload)


@pytest.mark.requirement("O-33", "O-74")
def test_what_no_job_could_carry_is_refused_when_it_is_stored() -> None:
    with pytest.raises(PayloadTooLarge):
        item(payload="x" * (10 * 1024 * 1024))


def test_none_is_an_empty_payload() -> None:
    assert record(item(payload=None))["payload"] == "{}"


@pytest.mark.parametrize(
    ("fields", "option"),
    [
        ({"due_at": datetime(2030, 1, 1)}, "due_at"),  # noqa: DTZ001 - wrong on purpose
        ({"due_at": datetime(2030, 1, 1, tzinfo=UTC), "delay": 5}, "delay"),
        ({"delay": -1}, "delay"),
        ({"delay": 10**13}, "delay"),
        ({"due_at": datetime(9999, 12, 31, 23, 59, tzinfo=timezone(timedelta(hours=-5)))}, "due_at"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"headers": ["no", "mapping"]}, "headers"),
        ({"backoff": "soon"}, "backoff"),
        ({"idempotency_key": ""}, "idempotency_key"),
        ({"source_stream_id": "outbox.dead"}, "source_stream_id"),
    ],
)
def test_options_that_make_no_sense_are_refused(fields: dict[str, Any], option: str) -> None:
    with pytest.raises(InvalidOption, match=option):
        item(**fields)


def test_times_and_attempts_travel_as_given() -> None:
    due = datetime(2030, 1, 1, tzinfo=UTC)

    stored = record(item(due_at=due, max_attempts=3, backoff=Backoff.fixed(timedelta(seconds=1))))

    assert (stored["due_ms"], stored["delay_ms"], stored["max_attempts"]) == (1893456000000, 0, 3)
    assert stored["backoff"] == '{"type":"fixed","delay":1000}'


@pytest.mark.requirement("X-73", "O-20")
def test_a_strict_outbox_has_no_route_key() -> None:
    assert record(item(), strict=True)["route_key"] == ""
    assert record(item(route_key="x"), strict=True)["route_key"] == ""
    assert record(item())["route_key"] == "webhook:partnerX"


@pytest.mark.requirement("O-31", "X-122")
def test_headers_get_an_idempotency_key_unless_they_have_one() -> None:
    assert record(item())["headers"] == '{"idempotencyKey":"event-1/webhook:partnerX"}'
    assert record(item(headers={"idempotencyKey": "mine", "a": 1}))["headers"] == '{"idempotencyKey":"mine","a":1}'
    assert record(item(route_key="copy"))["headers"] == '{"idempotencyKey":"event-1/copy"}'
    assert record(item(), strict=True)["headers"] == '{"idempotencyKey":"event-1"}', "one message per event"


@pytest.mark.requirement("O-53")
@given(st.text(max_size=100), st.integers(1, 200))
def test_an_error_is_one_bounded_line(text: str, times: int) -> None:
    kept = one_line(text * times)

    assert len(kept) <= MAX_ERROR
    assert "\n" not in kept
    assert "\0" not in kept


def test_only_items_are_taken() -> None:
    connection = sqlite3.connect(":memory:")
    with contextlib.closing(connection), pytest.raises(InvalidOption, match="OutboxItem"):
        Enqueuer().enqueue_many_sync(connection, [{"payload": 1}])  # type: ignore[list-item]  # wrong on purpose
