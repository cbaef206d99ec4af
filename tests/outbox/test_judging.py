"""What an answer means for a row: a pure decision."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bullpen._kernel.scrub import scrub
from bullpen.ledger import Died, OutboxRow, OutboxStatus, Released, Retried, Sent
from bullpen.outbox.delivery import MAX_AFTER_MS, judge_lost, message_of
from bullpen.outbox.delivery import judge_row as judge
from bullpen.ports.channel import Accepted, NotTried, Refused, Unavailable

NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)


def row(**changes: Any) -> OutboxRow:
    fields: dict[str, Any] = {
        "id": "0f9d4f3e-0000-4000-8000-000000000001",
        "seq": 1,
        "source_stream_id": "order-1",
        "source_event_id": "event-1",
        "route_key": "webhook:partnerX",
        "integration_type": "webhook:partnerX",
        "event_type": "order.paid.v1",
        "payload_json": '{"orderId":1}',
        "headers_json": '{"idempotencyKey":"event-1"}',
        "tenant_id": "acme",
        "user_id": None,
        "correlation_id": "c-1",
        "ordering_key": None,
        "backoff_json": None,
        "created_at": NOW,
        "due_at": NOW,
        "attempts": 0,
        "max_attempts": 10,
        "status": OutboxStatus.CLAIMED,
        "parked": False,
        "fence": 1,
        "locked_at": NOW,
        "locked_by": "w",
        "locked_until": NOW,
        "started_at": NOW,
        "sent_at": None,
        "dead_at": None,
        "last_error": None,
        "error_code": None,
        "updated_at": NOW,
    }
    return OutboxRow(**{**fields, **changes})


@pytest.mark.requirement("O-51", "O-80", "X-4")
@pytest.mark.parametrize(
    ("attempts", "seconds"), [(0, 60), (1, 120), (2, 240), (3, 480), (4, 900), (5, 900), (8, 900), (500, 900)]
)
def test_the_pause_doubles_from_a_minute_to_a_quarter_of_an_hour(attempts: int, seconds: int) -> None:
    shortest = judge(row(attempts=attempts), Unavailable("no", "X"), random=lambda: 0.0)
    longest = judge(row(attempts=attempts), Unavailable("no", "X"), random=lambda: 0.999999)

    assert shortest == Retried("no", "X", seconds * 1000)
    assert isinstance(longest, Retried)
    assert seconds * 1000 + 9_900 < longest.delay_ms < seconds * 1000 + 10_000


@pytest.mark.requirement("O-51", "O-75")
@given(st.floats(0, 1, exclude_max=True))
def test_ten_attempts_span_ninety_minutes_and_a_little(random: float) -> None:
    outcomes = [judge(row(attempts=n), Unavailable("no", "X"), random=lambda: random) for n in range(9)]

    total = sum(outcome.delay_ms for outcome in outcomes if isinstance(outcome, Retried))

    assert 90 * 60_000 <= total <= 90 * 60_000 + 90_000


@pytest.mark.requirement("X-21", "O-52", "O-80")
def test_answers_become_outcomes() -> None:
    assert judge(row(), Accepted("201")) == Sent("201")
    assert judge(row(), Refused("bad request", "HTTP_400")) == Died("bad request", "HTTP_400")
    assert judge(row(), NotTried("redis away", 500)) == Released(500, "redis away")


@pytest.mark.requirement("X-21")
@pytest.mark.parametrize(
    ("asked_ms", "given_ms"), [(None, 60_000), (1_000, 60_000), (3_600_000, 3_600_000), (10**12, MAX_AFTER_MS)]
)
def test_a_target_may_ask_for_more_time_but_not_for_less(asked_ms: int | None, given_ms: int) -> None:
    outcome = judge(row(), Unavailable("slow down", "HTTP_429", asked_ms), random=lambda: 0.0)

    assert outcome == Retried("slow down", "HTTP_429", given_ms)


def test_a_row_may_bring_its_own_pauses() -> None:
    own = row(attempts=2, backoff_json='{"type":"exponential","delay":100,"bpmax":300}')

    assert judge(own, Unavailable("no", "X")) == Retried("no", "X", 300)


@pytest.mark.requirement("X-76")
def test_a_lost_claim_counts_only_if_the_delivery_had_begun() -> None:
    untouched = judge_lost(row(started_at=None))
    begun = judge_lost(row())

    assert untouched == Released()
    assert isinstance(begun, Retried)
    assert (begun.code, begun.delay_ms) == ("LEASE_EXPIRED", 0), "the lease was pause enough"


@pytest.mark.requirement("O-3", "O-71", "O-35")
def test_a_message_carries_what_a_target_needs() -> None:
    message = message_of(row(attempts=2, user_id="u1"))

    assert (message.target, message.attempt, message.idempotency_key) == ("partnerX", 3, "event-1")
    assert (message.correlation_id, message.tenant_id, message.user_id) == ("c-1", "acme", "u1")
    assert message.created_ms == int(NOW.timestamp() * 1000)


@pytest.mark.requirement("X-8", "O-70")
@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("cannot reach https://ada:pw@host/x", "cannot reach https://***@host/x"),
        ("token=abc123&x=1", "token=***&x=1"),
        ("Authorization: Bearer abcdefghijk", "Authorization: Bearer ***"),
        ("key whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "key whsec_***"),
        ("unknown recipient ada@example.com", "unknown recipient ***@***"),
        ("two\nlines", "two lines"),
        ("plain", "plain"),
    ],
)
def test_reasons_are_kept_without_secrets_and_people(text: str, kept: str) -> None:
    assert scrub(text) == kept
