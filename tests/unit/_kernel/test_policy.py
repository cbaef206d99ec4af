"""One policy object, and the presets made of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bullpen._kernel.backoff import ONE_HOUR_MS, Backoff
from bullpen._kernel.policy import (
    INGESTION,
    OUTBOX_DELIVERY,
    PLAIN_JOB,
    SCHEDULED_MESSAGE,
    WORKFLOW_EVENT,
    WORKFLOW_RUN,
    DeadLetterPolicy,
    RetryPolicy,
    from_retries,
)
from bullpen.errors import InvalidOption, PermanentError


@pytest.mark.requirement("Q-43", "X-32")
def test_a_plain_job_is_tried_three_times_with_growing_pauses() -> None:
    """A queue without options must not lose a job to the first hiccup."""
    assert PLAIN_JOB.policy.attempts == 3
    assert PLAIN_JOB.policy.backoff == Backoff.exponential(1_000)
    assert PLAIN_JOB.policy.dead_letters.store == "failed_set"
    assert (PLAIN_JOB.keep_completed, PLAIN_JOB.keep_failed, PLAIN_JOB.lock_ms) == (None, None, 30_000)


@pytest.mark.requirement("W-21", "W-22", "W-23", "W-24")
def test_the_preset_of_workflow_events() -> None:
    """Three attempts, thirty seconds doubled, 1000 and 5000 kept, dead letters beside the queue."""
    policy = WORKFLOW_EVENT.policy

    assert (policy.attempts, policy.backoff) == (3, Backoff.exponential(30_000))
    assert (WORKFLOW_EVENT.keep_completed, WORKFLOW_EVENT.keep_failed) == (1_000, 5_000)
    assert policy.dead_letters.queue_for("orders") == "orders-dlq"


@pytest.mark.requirement("X-1", "X-2")
def test_the_preset_of_scheduled_messages_counts_the_first_delivery() -> None:
    """Five retries are six deliveries."""
    policy = SCHEDULED_MESSAGE.policy

    assert policy.attempts == from_retries(5) == 6
    assert policy.backoff == Backoff.exponential(2_000, maximum=32_000)
    assert policy.retry_owner == "broker"
    assert policy.dead_letters.queue_for("anything") == "birthday.messages.dlq"


@pytest.mark.requirement("X-1")
def test_the_preset_of_outbox_deliveries_leaves_the_retry_to_the_row() -> None:
    """Two owners of one retry would multiply the attempts."""
    policy = OUTBOX_DELIVERY.policy

    assert (policy.attempts, policy.job_attempts, policy.retry_owner) == (10, 1, "ledger")
    assert policy.backoff == Backoff.exponential(60_000, maximum=900_000, spread=10_000)
    assert policy.dead_letters.queue_for("x") is None
    assert (OUTBOX_DELIVERY.keep_completed, OUTBOX_DELIVERY.keep_failed) == (0, None)


@pytest.mark.requirement("X-18")
def test_the_presets_of_runs_and_ingestion() -> None:
    """Long locks and many at once for runs; one attempt and random ids for ingestion."""
    assert WORKFLOW_RUN.policy.backoff == Backoff.exponential(5_000, maximum=ONE_HOUR_MS)
    assert (WORKFLOW_RUN.lock_ms, WORKFLOW_RUN.concurrency, WORKFLOW_RUN.keep_completed) == (300_000, 100, 100)
    assert WORKFLOW_RUN.policy.dead_letters.queue_for("workflow-execution") == "workflow-execution-dlq"
    assert (INGESTION.policy.attempts, INGESTION.keep_failed) == (1, 500)
    assert (INGESTION.job_id, INGESTION.id_prefix) == ("random", "idx")


@pytest.mark.requirement("X-32")
def test_a_policy_with_retries_always_has_a_pause() -> None:
    """None is only possible where no retry is."""
    assert RetryPolicy(attempts=2, backoff=None).backoff == Backoff.exponential(1_000)
    assert RetryPolicy(attempts=1, backoff=None).backoff is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attempts": 0}, "attempts: expected a whole number, at least 1, got 0"),
        ({"backoff": 5}, "backoff: expected a Backoff, got 5"),
        ({"permanent_errors": ValueError}, "permanent_errors: expected a tuple of exception classes"),
        ({"permanent_errors": (int,)}, "permanent_errors"),
        ({"retry_owner": "me"}, "retry_owner: expected 'queue', 'broker' or 'ledger', got 'me'"),
    ],
)
def test_a_wrong_policy_is_refused_when_it_is_made(options: Any, message: str) -> None:
    """Inner code trusts a policy and never looks again."""
    with pytest.raises(InvalidOption, match=message):
        RetryPolicy(**options)


@pytest.mark.parametrize("options", [{"store": "disk"}, {"suffix": ""}, {"suffix": ":dlq"}, {"name": ""}, {"name": 5}])
def test_wrong_dead_letters_are_refused(options: Any) -> None:
    """A colon would make an illegal queue name, found out only at the first dead letter."""
    with pytest.raises(InvalidOption, match=r"dead_letters\."):
        DeadLetterPolicy(**options)


def test_permanent_errors_are_known_by_class_by_subclass_and_by_a_test() -> None:
    """Trying again cannot help, so no attempt is wasted."""

    class UnrecoverableError(Exception):
        """What handlers of the official Python client raise."""

    policy = RetryPolicy(permanent_errors=(LookupError,), is_permanent=lambda error: "410" in str(error))

    assert policy.is_final(PermanentError("no such user"))
    assert policy.is_final(KeyError("x"))
    assert policy.is_final(OSError("HTTP 410"))
    assert policy.is_final(UnrecoverableError("x"))
    assert not policy.is_final(OSError("HTTP 503"))


def test_a_broken_test_for_permanence_leaves_the_error_retryable() -> None:
    """A bug there must not throw work away."""
    policy = RetryPolicy(is_permanent=lambda error: error.status == 410)  # type: ignore[attr-defined]  # the bug

    assert not policy.is_final(OSError("x"))


def test_a_policy_over_another_changes_only_what_it_names() -> None:
    base = WORKFLOW_EVENT.policy

    assert RetryPolicy().over(base) == base
    assert RetryPolicy(attempts=2).over(base) == replace(base, attempts=2)
    assert RetryPolicy(dead_letters=DeadLetterPolicy()).over(base) == replace(base, dead_letters=DeadLetterPolicy())
    assert RetryPolicy(permanent_errors=(KeyError,)).over(RetryPolicy(attempts=1, backoff=None)) == RetryPolicy(
        attempts=1, backoff=None, permanent_errors=(KeyError,)
    )
    assert RetryPolicy(attempts=3) == RetryPolicy(), "what is not named is what it always was"
