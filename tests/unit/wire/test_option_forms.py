"""Options that many jobs share are written once; the short way must write what the long one does."""

from __future__ import annotations

import copy
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bullpen._kernel.backoff import Backoff
from bullpen._kernel.keep import KeepJobs
from bullpen.errors import InvalidOption
from bullpen.queue.packing import PackedJob, pack_job
from bullpen.wire.options import MAX_PRIORITY, JobDefaults, JobOptions, make_defaults, make_options

shared = {
    "priority": st.integers(0, 3) | st.just(MAX_PRIORITY),
    "attempts": st.integers(1, 12),
    "backoff": st.integers(1, 3) | st.builds(Backoff.exponential, st.integers(1, 3)),
    "lifo": st.booleans(),
    "remove_on_complete": st.booleans() | st.integers(0, 2) | st.builds(KeepJobs, st.integers(0, 3)),
    "remove_on_fail": st.none() | st.booleans(),
    "keep_logs": st.none() | st.integers(0, 2),
    "stack_trace_limit": st.none() | st.integers(0, 2),
    "ttl": st.none() | st.integers(1, 3) | st.just(timedelta(seconds=1)),
    "lane": st.sampled_from(["a", "b"]),
}
own = {
    "delay": st.none() | st.integers(0, 3) | st.just(2**53 - 1) | st.just(timedelta(milliseconds=1.5)),
    "job_id": st.none() | st.sampled_from(["a", "order-1", "ü", 'with "quotes"', "back\\slash", "\N{PILE OF POO}"]),
    "deduplication": st.sampled_from(["once"]),
    "timestamp": st.integers(1, 3),
    "tm": st.sampled_from(["00-abc"]),
}
of_the_queue = st.fixed_dictionaries({}, optional=shared | {"delay": st.integers(0, 3)})


def pack(defaults: JobOptions, options: Any) -> PackedJob:
    return pack_job("a", {}, defaults, copy.copy(options))


@pytest.mark.requirement("Q-40", "Q-43")
@given(of_the_queue, st.lists(st.fixed_dictionaries({}, optional=shared | own), min_size=1, max_size=4))
def test_jobs_are_written_as_if_each_had_been_alone(queue: JobDefaults, jobs: list[dict[str, Any]]) -> None:
    """Also the second one with the same options, whose form is there already."""
    defaults = make_defaults(**queue)

    for options in [*jobs, *jobs]:
        alone = make_options(make_defaults(**queue), **options)
        packed = pack(defaults, options)

        assert (packed.job_id, packed.options_json) == (alone.job_id or "", alone.wire_json)
        assert (packed.place, packed.delay_ms) == (alone.place, alone.delay_ms)
        assert (packed.options.lane, packed.options.wire_priority) == (alone.lane, alone.wire_priority)


@pytest.mark.parametrize(("right", "wrong"), [({"attempts": 1}, {"attempts": True}), ({"lifo": True}, {"lifo": 1})])
def test_a_wrong_value_is_refused_also_when_it_equals_a_right_one(right: Any, wrong: Any) -> None:
    """True and 1 are equal to Python, and a dictionary cannot tell them apart."""
    defaults = make_defaults()
    pack(defaults, right)

    with pytest.raises(InvalidOption):
        pack(defaults, wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"delay": -1},
        {"delay": True},
        {"delay": 1.5},
        {"delay": 2**53},
        {"job_id": "17"},
        {"job_id": "wait"},
        {"job_id": ""},
        {"job_id": "a\nb"},
        {"job_id": "x" * 501},
        {"delay": 5, "at": datetime(2030, 1, 1, tzinfo=UTC)},
        {"attempts": []},
        {"attemps": 3},
    ],
)
def test_options_of_one_job_are_checked_on_the_short_way_too(wrong: Any) -> None:
    defaults = make_defaults()
    pack(defaults, {"delay": 5, "job_id": "b"})

    with pytest.raises(InvalidOption):
        pack(defaults, wrong)


def test_a_delay_takes_the_place_of_the_instant_that_the_queue_names() -> None:
    """Two ways to say one thing: what the job says counts."""
    defaults = make_defaults(at=datetime(2030, 1, 1, tzinfo=UTC))

    for _ in range(2):
        packed = pack(defaults, {"delay": 5})
        assert b'"delay":5' in packed.options_json
        assert b"bpat" not in packed.options_json
        assert packed.place == "- 5 - 0 0"


def test_each_job_that_keeps_too_many_others_is_warned_of() -> None:
    """Also the second of the same kind: it may come from another line of the program."""
    defaults = make_defaults()

    for _ in range(2):
        with pytest.warns(UserWarning, match="remove_on_complete"):
            pack(defaults, {"remove_on_complete": 20_000})


def test_values_that_never_return_do_not_fill_the_memory() -> None:
    """A service may use a lane per customer."""
    defaults = make_defaults()

    for number in range(2_000):
        pack(defaults, {"lane": f"tenant-{number}"})

    assert len(defaults.forms) <= 512


def test_a_queue_that_gives_the_same_options_to_all_writes_them_once() -> None:
    """Jobs that differ in data alone are sent as one argument each."""
    defaults = make_defaults()

    packed = [pack(defaults, {"attempts": 5}) for n in range(3)]

    assert len({id(one.options_json) for one in packed}) == 1
