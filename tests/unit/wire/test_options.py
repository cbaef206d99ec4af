"""Job options: strict when we write, tolerant when we read."""

from __future__ import annotations

import json as standard
import random
import warnings
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bullpen._kernel.backoff import Backoff, CustomBackoff
from bullpen._kernel.keep import KeepJobs
from bullpen.errors import InvalidOption
from bullpen.wire.options import (
    DEFAULT_OPTIONS,
    KEEP_ALL,
    KEEP_NONE,
    MAX_PRIORITY,
    JobOptions,
    WireOptions,
    make_options,
    priority_to_urgency,
    resolve,
    urgency_to_priority,
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
option_names = st.sampled_from(["attempts", "backoff", "lifo", "priority", "kl", "stackTraceLimit", "tm", "repeat"]) | (
    st.sampled_from(["removeOnComplete", "removeOnFail"])
)


def wire(**options: Any) -> Any:
    return standard.loads(make_options(DEFAULT_OPTIONS, **options).wire_json)


# Writing


@pytest.mark.requirement("Q-43", "X-3", "X-32", "W-21")
def test_a_job_without_options_says_what_we_mean() -> None:
    """Attempts absent means one attempt to Node, so they are always written."""
    assert wire() == {"attempts": 3, "backoff": {"type": "exponential", "delay": 1000}}


def test_default_options_leave_a_small_job_compact() -> None:
    """Servers store a hash with a value above 64 bytes in twice the memory; the options of most jobs are these."""
    assert len(DEFAULT_OPTIONS.wire_json) <= 64


@pytest.mark.parametrize(
    ("given_options", "written"),
    [
        ({"attempts": 10}, {}),
        ({"attempts": 11}, {"stackTraceLimit": 10}),
        ({"attempts": 11, "stack_trace_limit": 20}, {"stackTraceLimit": 20}),
        ({"stack_trace_limit": 10}, {"stackTraceLimit": 10}),
        ({"keep_logs": 1000}, {"kl": 1000}),
    ],
)
def test_bounds_are_written_when_given_or_when_they_can_bite(
    given_options: dict[str, Any], written: dict[str, Any]
) -> None:
    """A job of ten attempts cannot have more than ten stacks; what the caller wrote is always passed on."""
    bounds = {name: value for name, value in wire(**given_options).items() if name in ("kl", "stackTraceLimit")}

    assert bounds == written


@pytest.mark.requirement("Q-30", "W-22", "W-23")
def test_options_are_written_with_the_names_of_node() -> None:
    """The public option is snake_case, the stored one is what Node reads."""
    assert wire(
        delay=timedelta(seconds=5),
        priority=5,
        attempts=5,
        backoff=Backoff.fixed(2_000, jitter=0.5),
        lifo=True,
        job_id="payment-789",
        remove_on_complete=1_000,
        remove_on_fail=KeepJobs(count=50, age_s=3600, limit=10),
        keep_logs=5,
        stack_trace_limit=0,
        timestamp=1_700_000_000_000,
        tm="00-abc",
    ) == {
        "delay": 5000,
        "priority": 5,
        "attempts": 5,
        "backoff": {"type": "fixed", "delay": 2000, "jitter": 0.5},
        "lifo": True,
        "jobId": "payment-789",
        "removeOnComplete": 1000,
        "removeOnFail": {"count": 50, "age": 3600, "limit": 10},
        "kl": 5,
        "stackTraceLimit": 0,
        "timestamp": 1_700_000_000_000,
        "tm": "00-abc",
    }


def test_without_options_the_defaults_themselves_come_back() -> None:
    """The hot path: nothing is checked or encoded again."""
    assert make_options(DEFAULT_OPTIONS) is DEFAULT_OPTIONS
    assert make_options(DEFAULT_OPTIONS, delay=None, job_id=None) is DEFAULT_OPTIONS


def test_given_options_replace_those_of_the_queue_and_keep_the_others() -> None:
    """A queue's defaults hold for what a job does not say."""
    defaults = JobOptions(attempts=7, remove_on_complete=True, priority=4)

    options = make_options(defaults, attempts=2)

    assert (options.attempts, options.remove_on_complete, options.priority) == (2, True, 4)
    assert defaults.attempts == 7


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "delay": st.integers(0, 10**9),
            "priority": st.integers(0, MAX_PRIORITY),
            "attempts": st.integers(1, 100),
            "backoff": st.integers(1, 10**6).map(Backoff.fixed),
            "lifo": st.booleans(),
            "job_id": st.sampled_from(["a", "b-c", "ü"]),
            "remove_on_complete": st.booleans() | st.integers(0, 10_000),
            "remove_on_fail": st.booleans() | st.builds(KeepJobs, st.integers(0, 10_000), st.integers(0, 10**6)),
            "keep_logs": st.integers(0, 10**6),
            "stack_trace_limit": st.integers(0, 100),
            "timestamp": st.integers(1, 2 * 10**12),
            "tm": st.text(st.characters(exclude_categories=["Cs"])),
        },
    )
)
def test_options_derived_from_defaults_equal_those_made_directly(given_options: dict[str, Any]) -> None:
    """The short way checks and encodes only what changed; the result must not tell."""
    names = {"delay": "delay_ms", "timestamp": "timestamp_ms"}
    direct = JobOptions(**{names.get(name, name): value for name, value in given_options.items()})

    derived = make_options(DEFAULT_OPTIONS, **given_options)

    assert derived == direct
    assert derived.wire_json == direct.wire_json
    assert standard.loads(derived.wire_json) == derived.to_wire()


@pytest.mark.requirement("Q-40", "Q-42", "Q-43", "Q-44", "Q-45", "Q-46", "Q-49", "X-101")
@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("delay", -1, "at least 0"),
        ("delay", 1.5, "whole milliseconds"),
        ("delay", True, "whole milliseconds"),
        ("priority", -1, "at least 0 and at most 2097151"),
        ("priority", 2_097_152, "at most 2097151"),
        ("priority", "high", "a whole number"),
        ("urgency", 2_097_152, "at most 2097151"),
        ("attempts", 0, "at least 1"),
        ("attempts", -3, "at least 1"),
        ("attempts", True, "a whole number"),
        ("backoff", "fixed", "a Backoff"),
        ("lifo", 1, "True or False"),
        ("job_id", "7", "not a number"),
        ("remove_on_complete", -1, "a number of jobs from 0"),
        ("remove_on_fail", -1, "a number of jobs from 0"),
        ("remove_on_fail", 1.5, "a number of jobs from 0"),
        ("remove_on_fail", {"count": 5}, "or KeepJobs"),
        ("keep_logs", -1, "at least 0"),
        ("stack_trace_limit", -1, "at least 0"),
        ("timestamp", 0, "at least 1"),
        ("timestamp", 1.5, "a whole number"),
        ("tm", 5, "text"),
        ("tm", "\ud800", "text"),
        ("at", datetime(2027, 1, 1), "with a time zone"),  # noqa: DTZ001 - the mistake under test
        ("at", 5, "with a time zone"),
        ("at", datetime(1960, 1, 1, tzinfo=UTC), "after 1970"),
        ("large_retention", "ignore", "'warn' or 'refuse'"),
    ],
)
def test_wrong_values_are_refused_with_name_expectation_and_value(option: str, value: Any, expected: str) -> None:
    """Node takes most of these and does something else."""
    with pytest.raises(InvalidOption) as caught:
        make_options(DEFAULT_OPTIONS, **{option: value})

    assert caught.value.option == option
    assert expected in caught.value.expected
    assert caught.value.value is value


@pytest.mark.requirement("Q-44")
@pytest.mark.parametrize("backoff", [Backoff.linear(5), {"type": "linear", "delay": 5}, {"type": "random", "delay": 5}])
def test_a_job_takes_only_the_kinds_of_backoff_that_node_knows(backoff: Any) -> None:
    """A Node worker that must retry another kind leaves the job active until it stalls."""
    with pytest.raises(InvalidOption, match=r"backoff\.type: expected 'fixed'.*'exponential'"):
        make_options(DEFAULT_OPTIONS, backoff=backoff)


@pytest.mark.requirement("Q-45")
def test_a_backoff_of_zero_is_refused() -> None:
    """Retrying at once, without end, is a mistake and not a wish."""
    with pytest.raises(InvalidOption, match=r"backoff\.delay"):
        make_options(DEFAULT_OPTIONS, backoff=0)


@pytest.mark.requirement("X-32")
def test_a_job_with_retries_always_has_a_backoff() -> None:
    """Left out, the queue supplies one second, doubled."""
    assert JobOptions(attempts=2, backoff=None).backoff == Backoff.exponential(1_000)
    assert JobOptions(attempts=1, backoff=None).backoff is None
    assert b"backoff" not in JobOptions(attempts=1, backoff=None).wire_json
    assert make_options(JobOptions(attempts=1, backoff=None), attempts=2).backoff == Backoff.exponential(1_000)


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("removeOnComplete", "remove_on_complete"),
        ("jobId", "job_id"),
        ("stackTraceLimit", "stack_trace_limit"),
        ("attempt", "attempts"),
        ("proirity", "priority"),
        ("kl", "keep_logs"),
        ("max_attempts", "attempts"),
        ("delay_ms", "delay"),
        ("zzz", None),
    ],
)
def test_a_wrong_name_is_refused_with_the_nearest_right_one(name: str, suggestion: str | None) -> None:
    """A typing mistake that is ignored is a job without its option."""
    with pytest.raises(InvalidOption) as caught:
        make_options(DEFAULT_OPTIONS, **{name: 1})

    assert (caught.value.option, caught.value.suggestion) == (name, suggestion)


@pytest.mark.requirement("X-117", "X-48")
@pytest.mark.parametrize("name", ["lock", "lock_ms", "lock_duration", "lockDuration"])
def test_the_lock_is_an_option_of_the_worker(name: str) -> None:
    """Set on a job or a queue it would have no effect, and nobody would notice."""
    with pytest.raises(InvalidOption, match="not a job option: set lock on Worker"):
        make_options(DEFAULT_OPTIONS, **{name: 30_000})
    with pytest.raises(TypeError):
        JobOptions(**{name: 30_000})  # type: ignore[arg-type]  # the mistake under test


@pytest.mark.requirement("X-9", "Q-40")
def test_urgency_is_priority_the_other_way_round() -> None:
    """Higher runs earlier for the caller, lower runs earlier on the wire."""
    assert wire(urgency=1)["priority"] == MAX_PRIORITY
    assert wire(urgency=MAX_PRIORITY)["priority"] == 1
    assert "priority" not in wire(urgency=0)


@pytest.mark.requirement("X-9")
@given(st.integers(1, MAX_PRIORITY), st.integers(1, MAX_PRIORITY))
def test_urgency_maps_to_the_wire_and_back_with_the_order_turned(one: int, other: int) -> None:
    """No two urgencies meet."""
    assert priority_to_urgency(urgency_to_priority(one)) == one
    assert (one < other) == (urgency_to_priority(one) > urgency_to_priority(other))


@pytest.mark.requirement("X-9")
def test_zero_stays_zero_both_ways() -> None:
    """The plain waiting list has no urgency."""
    assert urgency_to_priority(0) == priority_to_urgency(0) == 0


@pytest.mark.requirement("X-9")
def test_priority_and_urgency_together_are_refused() -> None:
    """Two answers to one question."""
    with pytest.raises(InvalidOption, match="urgency: expected not together with priority"):
        make_options(DEFAULT_OPTIONS, priority=1, urgency=1)
    with pytest.raises(InvalidOption, match="urgency: expected not together with priority"):
        JobOptions(priority=1, urgency=1)


@pytest.mark.requirement("X-9")
def test_a_job_may_say_it_the_other_way_than_its_queue() -> None:
    """What is given replaces the default, whichever way that was said."""
    assert make_options(JobOptions(urgency=9), priority=2).wire_priority == 2
    assert make_options(JobOptions(priority=9), urgency=MAX_PRIORITY).wire_priority == 1


def test_delay_and_at_exclude_each_other_and_replace_each_other() -> None:
    """A span or an instant, not both."""
    soon = datetime(2030, 1, 1, tzinfo=timezone(timedelta(hours=2)))

    with pytest.raises(InvalidOption, match="at: expected not together with delay"):
        make_options(DEFAULT_OPTIONS, delay=5, at=soon)
    with pytest.raises(InvalidOption, match="at: expected not together with delay"):
        JobOptions(delay_ms=5, at=soon)

    assert make_options(JobOptions(delay_ms=5), at=soon).at_ms == 1_893_448_800_000
    assert make_options(JobOptions(at=soon), delay=5).at_ms is None


def test_a_creation_time_may_be_a_datetime() -> None:
    """Milliseconds on the wire, whatever the caller wrote."""
    instant = datetime(2030, 1, 1, 0, 0, 0, 123_456, tzinfo=UTC)

    assert wire(timestamp=instant)["timestamp"] == 1_893_456_000_123


@pytest.mark.requirement("Q-46", "Q-47", "Q-48")
@pytest.mark.parametrize("value", [True, False, 0, 1, 10_000])
def test_retention_is_written_as_it_was_given(value: bool | int) -> None:
    """False too: it overrules what the worker keeps. Absent means "as the worker says"."""
    written = wire(remove_on_complete=value)

    assert repr(written["removeOnComplete"]) == repr(value)
    assert "removeOnFail" not in written


@pytest.mark.requirement("Q-49")
def test_keeping_very_many_jobs_warns_at_the_callers_line() -> None:
    """A warning that points into our own files helps nobody."""
    with pytest.warns(UserWarning, match="remove_on_fail: keeping 10001 finished jobs") as caught:
        make_options(DEFAULT_OPTIONS, remove_on_fail=10_001)
    with pytest.warns(UserWarning, match="remove_on_complete: keeping 20000") as direct:
        JobOptions(remove_on_complete=KeepJobs(count=20_000))

    assert {warning.filename for warning in (*caught, *direct)} == {__file__}


@pytest.mark.requirement("Q-49")
def test_a_queue_may_refuse_to_keep_very_many_jobs() -> None:
    """The policy decides, and jobs of the queue inherit it."""
    strict = JobOptions(large_retention="refuse")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert make_options(strict, remove_on_fail=10_000).remove_on_fail == 10_000
        with pytest.raises(InvalidOption, match="remove_on_fail: expected at most 10000 jobs, got 10001"):
            make_options(strict, remove_on_fail=10_001)


@pytest.mark.parametrize("bounds", [{"count": -1}, {"age_s": -1}, {"limit": 0}, {"count": True}, {"age_s": 1.5}])
def test_wrong_bounds_of_kept_jobs_are_refused(bounds: Any) -> None:
    """The message names the bound."""
    with pytest.raises(InvalidOption, match=rf"KeepJobs\.{next(iter(bounds))}"):
        KeepJobs(**bounds)


def test_options_are_values() -> None:
    """Equal options compare and hash equal, so they can be shared."""
    assert JobOptions(attempts=5) == JobOptions(attempts=5) != JobOptions()
    assert hash(JobOptions(attempts=5)) == hash(JobOptions(attempts=5))
    with pytest.raises(AttributeError):
        JobOptions().attempts = 5  # type: ignore[misc]  # the mistake under test


# Reading


@pytest.mark.requirement("X-3", "X-101")
@pytest.mark.parametrize(
    ("stored", "attempts"),
    [
        ("{}", 1),
        ('{"attempts":0}', 1),
        ('{"attempts":1}', 1),
        ('{"attempts":-5}', 1),
        ('{"attempts":3}', 3),
        ('{"attempts":2.5}', 3),
        ('{"attempts":"4"}', 4),
        ('{"attempts":true}', 1),
        ('{"attempts":null}', 1),
        ('{"attempts":NaN}', 1),
        ('{"attempts":1e400}', 2**53 - 1),
        ('{"attempts":[]}', 1),
    ],
)
def test_attempts_of_foreign_jobs(stored: str, attempts: int) -> None:
    """Absent, zero and one all mean one attempt."""
    assert WireOptions.parse(stored.encode()).attempts == attempts


@pytest.mark.parametrize("stored", [None, b"", b"{", b"null", b"[]", b"5", b"\xff", b'"x"', "{}", "\ud800"])
def test_broken_options_read_as_none_given(stored: bytes | str | None) -> None:
    """The job itself may be fine."""
    assert WireOptions.parse(stored) == WireOptions()


@pytest.mark.requirement("X-101")
@given(st.binary(max_size=60) | st.dictionaries(option_names, json_values).map(lambda o: standard.dumps(o).encode()))
def test_reading_any_options_never_raises(stored: bytes) -> None:
    """Nothing in a queue is trusted because it is there."""
    options = WireOptions.parse(stored)

    assert options.attempts >= 1 and options.priority >= 0
    assert isinstance(options.backoff, Backoff | CustomBackoff | None)
    assert options.stack_trace_limit is None or options.stack_trace_limit >= 0
    assert isinstance(resolve(options.remove_on_complete, KEEP_NONE), KeepJobs)
    assert isinstance(options.to_json(), dict)


def test_all_options_of_a_foreign_job_are_read() -> None:
    """As Node stores them, short names included."""
    stored = (
        b'{"attempts":5,"backoff":{"type":"custom"},"lifo":true,"priority":3,"removeOnComplete":{"age":5},"removeOnFail":7,'
        b'"kl":20,"stackTraceLimit":2,"tm":"ctx","repeat":{"every":5},"somethingNew":1}'
    )

    options = WireOptions.parse(stored)

    assert options == WireOptions(
        attempts=5,
        backoff=CustomBackoff("custom"),
        lifo=True,
        priority=3,
        remove_on_complete={"age": 5},
        remove_on_fail=7,
        keep_logs=20,
        stack_trace_limit=2,
        tm="ctx",
        has_repeat=True,
    )
    assert options.raw == stored


@pytest.mark.requirement("Q-30")
@given(st.integers(1, 50), st.integers(1, 10**6), st.integers(0, MAX_PRIORITY), st.booleans(), st.integers(0, 10_000))
def test_what_we_write_reads_back_the_same(attempts: int, delay: int, priority: int, lifo: bool, keep: int) -> None:
    """A worker acts on exactly what the producer asked for."""
    written = make_options(
        DEFAULT_OPTIONS,
        attempts=attempts,
        backoff=Backoff.exponential(delay),
        priority=priority,
        lifo=lifo,
        remove_on_fail=keep,
    )

    read = WireOptions.parse(written.wire_json)

    # What is never retried has no use for a backoff, and is stored without.
    backoff = written.backoff if attempts > 1 else None
    assert (read.attempts, read.backoff, read.priority, read.lifo) == (attempts, backoff, priority, lifo)
    assert (read.remove_on_complete, read.remove_on_fail) == (None, keep)
    assert (read.keep_logs, read.stack_trace_limit) == (None, 10 if attempts > 10 else None)


def test_equal_options_are_parsed_once() -> None:
    """Thousands of jobs share the same text."""
    first, second = WireOptions.parse(b'{"attempts":42}'), WireOptions.parse(bytes(bytearray(b'{"attempts":42}')))

    assert first is second


def test_very_long_options_are_not_kept_in_the_cache() -> None:
    """They are unique, and would only hold memory."""
    stored = standard.dumps({"tm": "x" * 2_000}).encode()

    assert WireOptions.parse(stored) is not WireOptions.parse(stored)
    assert WireOptions.parse(stored) == WireOptions.parse(stored)


@pytest.mark.requirement("Q-68")
def test_stored_options_are_shown_with_their_public_names() -> None:
    """Short names are a matter of the wire; unknown options are shown too."""
    shown = WireOptions.parse(b'{"attempts":3,"kl":5,"de":{"id":"a"},"fpof":true,"new":1}').to_json()

    assert shown == {"attempts": 3, "keepLogs": 5, "deduplication": {"id": "a"}, "failParentOnFailure": True, "new": 1}


@pytest.mark.requirement("Q-47", "Q-48", "X-101")
@pytest.mark.parametrize(
    ("job", "worker", "kept"),
    [
        (None, None, KEEP_ALL),
        (None, KeepJobs(count=5), KeepJobs(count=5)),
        (True, KeepJobs(count=5), KEEP_NONE),
        (False, KeepJobs(count=5), KEEP_ALL),
        (0, None, KEEP_NONE),
        (7, None, KeepJobs(count=7)),
        (7.9, None, KeepJobs(count=7)),
        (-1, None, KEEP_ALL),
        ({"count": 3, "age": 60, "limit": 10}, None, KeepJobs(3, 60, 10)),
        ({"age": 60}, None, KeepJobs(age_s=60)),
        ({"count": -1}, None, KEEP_ALL),
        ({"limit": 0}, None, KEEP_ALL),
        ({}, KeepJobs(count=5), KEEP_ALL),
        ("many", None, KEEP_ALL),
        ([], None, KEEP_ALL),
        (KeepJobs(count=2), None, KeepJobs(count=2)),
    ],
)
def test_which_finished_jobs_stay(job: Any, worker: KeepJobs | None, kept: KeepJobs) -> None:
    """The job's word before the worker's; what nobody can read keeps the jobs."""
    assert resolve(job, worker) == kept


def test_kept_jobs_tell_whether_all_or_none_stay() -> None:
    """The two cases in which a script has nothing to look for."""
    assert KEEP_ALL.keeps_all and not KEEP_ALL.keeps_none
    assert KEEP_NONE.keeps_none and not KEEP_NONE.keeps_all
    assert not KeepJobs(age_s=5).keeps_all
    assert KeepJobs(limit=5).keeps_all


def test_the_shuffled_order_of_options_means_the_same() -> None:
    """Lua's JSON writer has no order of keys."""
    options = DEFAULT_OPTIONS.to_wire()
    names = list(options)
    random.Random(7).shuffle(names)

    assert WireOptions.parse(standard.dumps({name: options[name] for name in names}).encode()) == WireOptions.parse(
        DEFAULT_OPTIONS.wire_json
    )
