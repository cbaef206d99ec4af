"""Durations and whole numbers, checked at the door."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bullpen._kernel.duration import MAX_MS, check_int, to_ms
from bullpen.errors import InvalidOption


@pytest.mark.requirement("Q-7", "Q-42")
def test_milliseconds_and_timedeltas_say_the_same() -> None:
    """A caller may write what reads better; the wire has milliseconds only."""
    assert to_ms("delay", 1_500) == 1_500
    assert to_ms("delay", timedelta(seconds=1.5)) == 1_500


def test_a_positive_timedelta_never_becomes_zero() -> None:
    """Zero means "now" or "never" in many options, which is not what a tiny duration asks for."""
    assert to_ms("delay", timedelta(microseconds=1)) == 1
    assert to_ms("delay", timedelta(0)) == 0


@pytest.mark.requirement("Q-7", "Q-42")
@pytest.mark.parametrize("value", [-1, True, 1.5, math.nan, "5", None, timedelta(microseconds=-1001)])
def test_other_values_are_refused_with_name_expectation_and_value(value: Any) -> None:
    """`delay=True` would otherwise wait one millisecond, and NaN would reach Lua."""
    with pytest.raises(InvalidOption, match="delay: expected whole milliseconds") as caught:
        to_ms("delay", value)

    assert (caught.value.option, caught.value.value) == ("delay", value)


def test_a_duration_beyond_what_readers_can_carry_is_refused() -> None:
    """Lua and Node would silently use a neighbouring number."""
    assert to_ms("delay", MAX_MS) == MAX_MS

    with pytest.raises(InvalidOption, match="at most 9007199254740991 ms"):
        to_ms("delay", timedelta.max)


def test_the_minimum_is_told_in_words() -> None:
    """The message says what would have been right."""
    with pytest.raises(InvalidOption, match="more than 0, got 0"):
        to_ms("backoff.delay", 0, minimum=1)


@given(st.timedeltas(min_value=timedelta(0), max_value=timedelta(days=100_000)))
def test_a_timedelta_is_rounded_up_by_less_than_a_millisecond(duration: timedelta) -> None:
    """Exact for whole milliseconds, and never shorter than asked for."""
    rounded = timedelta(milliseconds=to_ms("delay", duration))

    assert duration <= rounded < duration + timedelta(milliseconds=1)


@pytest.mark.parametrize("value", [0, 11, True, 3.0, "3", None])
def test_a_count_out_of_bounds_or_of_another_type_is_refused(value: Any) -> None:
    """Booleans and floats are numbers to Python and mistakes to us."""
    with pytest.raises(InvalidOption, match="n: expected a whole number, at least 1 and at most 10, got"):
        check_int("n", value, minimum=1, maximum=10)

    assert check_int("n", 10, minimum=1, maximum=10) == 10
