"""What becomes of one attempt."""

from __future__ import annotations

import asyncio
import math
import traceback
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bullpen._kernel.backoff import Backoff, CustomBackoff
from bullpen._kernel.outcome import (
    MAX_TEXT,
    Cause,
    Completed,
    Delayed,
    Ended,
    Failed,
    Outcome,
    Raised,
    Retry,
    Returned,
    Waiting,
    WaitingChildren,
    cut,
    describe,
    failure_in,
    judge,
)
from bullpen._kernel.policy import RetryPolicy
from bullpen.errors import (
    DelayJob,
    InvalidOption,
    PermanentError,
    RateLimited,
    ReturnToWait,
    WaitForChildren,
)

SECOND = Backoff.exponential(1_000)


def after(
    result: Ended,
    *,
    made: int = 0,
    attempts: int = 3,
    backoff: Backoff | CustomBackoff | None = SECOND,
    policy: RetryPolicy | None = None,
    subject: Any = None,
) -> Outcome:
    return judge(
        result,
        attempts_made_before=made,
        attempts=attempts,
        backoff=backoff,
        policy=policy or RetryPolicy(),
        subject=subject,
        random=lambda: 0.5,
    )


def raised(error: BaseException) -> BaseException:
    """The error as a handler would leave it, with a traceback."""
    try:
        raise error
    except BaseException as caught:
        return caught


@pytest.mark.requirement("Q-12", "Q-24")
@pytest.mark.parametrize(
    ("value", "stored"), [(None, b"null"), ({"id": "é"}, '{"id":"é"}'.encode()), ((1, 2), b"[1,2]")]
)
def test_a_returned_value_completes_the_job(value: Any, stored: bytes) -> None:
    """The value is JSON from here on, made once."""
    assert after(Returned(value)) == Completed(stored)


@pytest.mark.parametrize("value", [math.nan, object(), b"x", {1: 2}])
def test_a_value_that_is_no_json_fails_the_job_at_once_and_names_the_place(value: Any) -> None:
    """An invalid value in a completed event ends Node's listeners for good; and running again would repeat the work."""
    outcome = after(Returned(value))

    assert isinstance(outcome, Failed)
    assert outcome.cause is Cause.BAD_RESULT
    assert outcome.reason.startswith("return value: expected ")


@pytest.mark.requirement("X-127")
def test_an_oversized_value_fails_the_job_with_the_sizes() -> None:
    """Ten megabytes, on the bytes that would be stored."""
    outcome = after(Returned("x" * (10 * 1024 * 1024)))

    assert isinstance(outcome, Failed)
    assert outcome.cause is Cause.BAD_RESULT
    assert outcome.reason == "Job return value size 10.000002 MB exceeds limit of 10.0 MB"


@pytest.mark.requirement("Q-12", "Q-25")
def test_an_error_with_attempts_left_is_retried_after_the_pause() -> None:
    """The pause belongs to the attempt that just failed: 1 s after the first, 2 s after the second."""
    first = after(Raised(raised(OSError("refused"))), made=0)
    second = after(Raised(raised(OSError("refused"))), made=1)

    assert isinstance(first, Retry) and isinstance(second, Retry)
    assert (first.reason, first.delay_ms, second.delay_ms) == ("refused", 1_000, 2_000)
    assert "test_outcome.py" in first.stack and first.stack.endswith("OSError: refused")


@pytest.mark.requirement("Q-9", "Q-26")
def test_the_last_attempt_fails_the_job() -> None:
    """Attempts made before are two, so this was the third of three."""
    outcome = after(Raised(OSError("refused")), made=2)

    assert isinstance(outcome, Failed)
    assert (outcome.reason, outcome.cause) == ("refused", Cause.EXHAUSTED)


@pytest.mark.requirement("Q-9", "Q-43")
@given(st.integers(1, 50), st.integers(0, 60))
def test_a_job_is_retried_exactly_while_attempts_are_left(attempts: int, made: int) -> None:
    """Every job fails in the end, never earlier than it must."""
    outcome = after(Raised(OSError("x")), made=made, attempts=attempts)

    assert isinstance(outcome, Retry) == (made + 1 < attempts)


def test_without_backoff_the_retry_is_immediate() -> None:
    """What Node does for jobs that say nothing."""
    outcome = after(Raised(OSError("x")), backoff=None)

    assert isinstance(outcome, Retry)
    assert outcome.delay_ms == 0


@pytest.mark.parametrize(
    ("policy", "made", "delay_ms"),
    [
        (RetryPolicy(), 0, 1_000),
        (RetryPolicy(), 1, 2_000),
        (RetryPolicy(backoff=Backoff.fixed(70)), 1, 70),
        (RetryPolicy(attempts=1, backoff=None), 0, 1_000),
        (RetryPolicy(strategies={"other": lambda failures, error, job: 5}), 0, 1_000),
    ],
)
def test_a_backoff_that_the_worker_does_not_know_gets_its_default(
    policy: RetryPolicy, made: int, delay_ms: int
) -> None:
    """A guess of a second costs little; a job that fails for good at its first error costs somebody an evening."""
    outcome = after(Raised(OSError("refused")), made=made, backoff=CustomBackoff("fibonacci"), policy=policy)

    assert isinstance(outcome, Retry)
    assert (outcome.reason, outcome.delay_ms) == ("refused", delay_ms)


def test_a_strategy_is_told_failures_error_and_job_and_says_how_long() -> None:
    """As Node's `backoffStrategy`."""
    told: list[Any] = []
    error = OSError("refused")

    def strategy(failures: int, raised: BaseException, job: Any) -> int:
        told.append((failures, raised, job))
        return 321

    policy = RetryPolicy(strategies={"own": strategy})
    outcome = after(Raised(error), made=1, backoff=CustomBackoff("own"), policy=policy, subject="the job")

    assert isinstance(outcome, Retry)
    assert (outcome.delay_ms, told) == (321, [(2, error, "the job")])


@pytest.mark.parametrize(
    ("answer", "delay_ms"),
    [
        (0, 0),
        (12.9, 12),
        (timedelta(seconds=2), 2_000),
        (Backoff.exponential(100), 200),
        (float("inf"), 2**53 - 1),
        (None, None),
        (-1, None),
        (timedelta(seconds=-1), None),
        (float("nan"), None),
    ],
)
def test_what_a_strategy_may_return(answer: Any, delay_ms: int | None) -> None:
    """None and -1 end it, as in Node; everything else is a time."""
    policy = RetryPolicy(strategies={"own": lambda failures, error, job: answer})

    outcome = after(Raised(OSError("refused")), made=1, backoff=CustomBackoff("own"), policy=policy)

    if delay_ms is None:
        assert isinstance(outcome, Failed)
        assert (outcome.cause, outcome.reason) == (Cause.PERMANENT, "refused")
    else:
        assert isinstance(outcome, Retry)
        assert outcome.delay_ms == delay_ms


@pytest.mark.parametrize("answer", ["soon", True, [], ZeroDivisionError()])
def test_a_broken_strategy_costs_no_job_its_retry(answer: Any, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged, and the worker's default takes its place."""

    def strategy(failures: int, error: BaseException, job: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    policy = RetryPolicy(strategies={"own": strategy}, backoff=Backoff.fixed(70))
    outcome = after(Raised(OSError("refused")), backoff=CustomBackoff("own"), policy=policy)

    assert isinstance(outcome, Retry)
    assert outcome.delay_ms == 70
    assert "backoff strategy 'own' failed" in caplog.text


def test_a_backoff_may_stand_for_a_strategy() -> None:
    """The usual case needs no function."""
    policy = RetryPolicy(strategies={"own": Backoff.exponential(10), "linear": Backoff.fixed(3)})

    outcomes = [
        after(Raised(OSError("refused")), made=2, attempts=9, backoff=backoff, policy=policy)
        for backoff in (CustomBackoff("own"), Backoff.linear(5))
    ]

    assert [outcome.delay_ms for outcome in outcomes if isinstance(outcome, Retry)] == [40, 3]


@pytest.mark.parametrize(
    "strategies", [{"fixed": Backoff.fixed(1)}, {"exponential": len}, {"": len}, {"own": 5}, {5: len}, [], "own"]
)
def test_wrong_strategies_are_refused(strategies: Any) -> None:
    """Built-in types mean the same to every client."""
    with pytest.raises(InvalidOption, match="strategies"):
        RetryPolicy(strategies=strategies)


def test_an_unknown_backoff_does_not_matter_when_no_attempt_is_left() -> None:
    """The reason is then the error itself."""
    outcome = after(Raised(OSError("refused")), made=2, backoff=CustomBackoff("fibonacci"))

    assert isinstance(outcome, Failed)
    assert (outcome.reason, outcome.cause) == ("refused", Cause.EXHAUSTED)


def test_a_permanent_error_fails_at_once() -> None:
    """By signal or by the policy's classes."""
    policy = RetryPolicy(permanent_errors=(KeyError,))

    for error in (PermanentError("gone"), KeyError("gone")):
        outcome = after(Raised(error), policy=policy)
        assert isinstance(outcome, Failed)
        assert outcome.cause is Cause.PERMANENT
        assert "gone" in outcome.reason


@pytest.mark.parametrize(
    ("signal", "outcome"),
    [
        (DelayJob(500), Delayed(500)),
        (DelayJob(timedelta(seconds=2)), Delayed(2_000)),
        (ReturnToWait(), Waiting()),
        (RateLimited(timedelta(seconds=1)), Waiting(1_000)),
        (WaitForChildren(), WaitingChildren()),
    ],
)
def test_signals_move_the_job_without_counting_an_attempt(signal: BaseException, outcome: Outcome) -> None:
    """Also on the last attempt: the handler asked for something else than failure."""
    assert after(Raised(signal), made=2) == outcome


@pytest.mark.parametrize("signal", [DelayJob(-5), RateLimited(1.5)])  # type: ignore[arg-type]  # the mistake under test
def test_a_signal_with_a_wrong_duration_is_an_error_like_others(signal: BaseException) -> None:
    """A mistake of one handler must not stop the worker."""
    outcome = after(Raised(signal))

    assert isinstance(outcome, Retry)
    assert "expected whole milliseconds" in outcome.reason


def test_what_was_decided_already_is_not_judged_again() -> None:
    """Code between worker and handler may have a policy of its own; two policies would contradict each other."""
    outcome = Retry("busy", "stack", 70, keeps_turn=True)

    assert after(outcome, made=2) == outcome


def test_cancellation_counts_as_an_error() -> None:
    """A handler cancelled by its timeout has failed."""
    outcome = after(Raised(raised(asyncio.CancelledError())))

    assert isinstance(outcome, Retry)
    assert outcome.reason == "CancelledError"


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("bad"), "bad"),
        (ValueError(), "ValueError"),
        (ValueError("  \n"), "ValueError"),
        (Mute(), "Mute"),
        (ValueError("a\ud800b"), "a\\ud800b"),
        (ValueError("x" * 6_000), "x" * 4_999 + "…"),
    ],
)
@pytest.mark.requirement("X-8")
def test_the_reason_is_bounded_never_empty_and_storable(error: Exception, reason: str) -> None:
    """It becomes a field of the job and of an event."""
    assert describe(error)[0] == reason


@pytest.mark.requirement("X-8")
def test_the_stack_keeps_its_end_within_the_bound() -> None:
    """The last lines have the error and where it was raised."""

    def sink(depth: int) -> None:
        if depth:
            sink(depth - 1)
        raise ValueError("y" * 4_900)

    with pytest.raises(ValueError, match="y") as caught:
        sink(300)
    stack = describe(caught.value)[1]

    assert len(stack) == MAX_TEXT
    assert stack.startswith("…") and stack.endswith("y" * 4_900)


def test_the_stack_reads_like_the_interpreters_own() -> None:
    """People and their tools know that form. Code that was made from text has no source to show."""
    with pytest.raises(KeyError) as caught:
        exec(compile("def made():\n    raise KeyError('x')\nmade()", "<made>", "exec"), {})

    lines = describe(caught.value)[1].splitlines()

    own = "".join(traceback.format_exception(caught.value)).splitlines()
    assert lines == [line for line in own if not set(line) <= set(" ^~")]


def test_the_stack_follows_causes_and_groups_to_a_bound() -> None:
    """The first cause is usually what one looks for."""
    try:
        try:
            raise KeyError("first")
        except KeyError as exc:
            raise ExceptionGroup("second", [ValueError("third"), OSError("fourth")]) from exc
    except ExceptionGroup as group:
        stack = describe(group)[1]

    for word in ("KeyError: 'first'", "which led to:", "second", "part 2 of 2:", "OSError: fourth"):
        assert word in stack


def test_a_suppressed_context_is_not_told() -> None:
    """`raise … from None` is a decision of the handler's author."""

    def handler() -> None:
        try:
            raise KeyError("secret")
        except KeyError:
            raise ValueError("public") from None

    with pytest.raises(ValueError, match="public") as caught:
        handler()

    assert "secret" not in describe(caught.value)[1]


def test_an_error_that_is_its_own_cause_is_described_all_the_same() -> None:
    """Chains can be circles."""
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one

    reason, stack = describe(one)

    assert reason == "one"
    assert len(stack) <= MAX_TEXT


class Hostile(Exception):
    @property
    def __cause__(self) -> BaseException:  # type: ignore[override]  # a lazy error gone wrong
        raise RuntimeError("no cause")


@pytest.mark.parametrize("error", [Mute(), Hostile()])
def test_an_error_whose_parts_cannot_be_formatted_leaves_its_name(error: Exception) -> None:
    """User code runs in `__str__`; its failure is not ours."""
    reason, stack = describe(error)

    assert reason == type(error).__name__
    assert type(error).__name__ in stack


@given(st.text(max_size=6_000), st.integers(1, 5_000))
def test_cutting_keeps_the_beginning_within_the_limit(text: str, limit: int) -> None:
    """A cut is visible."""
    short = cut(text, limit)

    assert len(short) <= limit
    assert short == text or (short.endswith("…") and text.startswith(short[:-1]))


@given(st.text(), st.integers(0, 10), st.integers(1, 10), st.sampled_from([None, SECOND, CustomBackoff("x")]))
def test_whatever_a_handler_raises_there_is_an_outcome_that_can_be_stored(
    text: str, made: int, attempts: int, backoff: Backoff | CustomBackoff | None
) -> None:
    """The worker's loop never sees an exception of a handler."""
    outcome = after(Raised(ValueError(text)), made=made, attempts=attempts, backoff=backoff)

    assert isinstance(outcome, Retry | Failed)
    assert outcome.reason and (outcome.reason + outcome.stack).encode()


def test_an_invalid_option_raised_by_a_handler_is_retried_like_any_error() -> None:
    """A handler may add jobs; a refused one is its failure, not its wish."""
    assert isinstance(after(Raised(InvalidOption("delay", "a number", "x"))), Retry)


@pytest.mark.parametrize(
    ("result", "told"),
    [
        (Returned(1), None),
        (Failed("broken", "", Cause.PERMANENT), "broken"),
        (Retry("once more", "", 5), "once more"),
        (Completed(b"1"), None),
        (Raised(DelayJob(5)), None),
    ],
    ids=str,
)
def test_whoever_watches_a_run_is_told_what_went_wrong(result: Ended, told: str | None) -> None:
    """A transport judges for itself."""
    assert failure_in(result) == told


def test_whoever_watches_a_run_gets_the_error_itself() -> None:
    error = RuntimeError("boom")

    assert failure_in(Raised(error)) is error
    assert failure_in(Failed("boom", "", Cause.PERMANENT, error)) is error
