"""The pause before the next try."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bullpen._kernel.backoff import ONE_HOUR_MS, Backoff, CustomBackoff, from_option, from_wire
from bullpen.errors import InvalidOption

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["type", "delay", "jitter", "bpmax"]), inner),
    max_leaves=6,
)


def no_chance() -> float:
    return 0.0


def nearly_one() -> float:
    return 0.999999


@pytest.mark.requirement("Q-50")
def test_fixed_is_always_the_same_even_above_the_cap() -> None:
    """The cap stops growth; a fixed pause does not grow."""
    backoff = Backoff.fixed(timedelta(hours=2))

    assert {backoff.delay_for(n, no_chance) for n in range(1, 50)} == {7_200_000}


@pytest.mark.requirement("Q-51", "X-98")
def test_exponential_doubles_until_the_cap_which_first_bites_at_the_thirteenth_failure() -> None:
    """With a base of one second: 2^11 s is below one hour, 2^12 s is above."""
    backoff = Backoff.exponential(1_000)

    delays = [backoff.delay_for(n, no_chance) for n in range(1, 15)]

    assert delays[:12] == [1_000 * 2**n for n in range(12)]
    assert delays[12:] == [ONE_HOUR_MS, ONE_HOUR_MS]


@pytest.mark.requirement("Q-51")
@given(st.integers(1, 10**9), st.integers(1, 10_000))
def test_exponential_follows_its_formula(base: int, failures: int) -> None:
    """Also for thousands of failures, where a naive power would be a number of thousands of digits."""
    assert Backoff.exponential(base).delay_for(failures, no_chance) == min(base * 2 ** (failures - 1), ONE_HOUR_MS)


@pytest.mark.requirement("X-1")
def test_linear_grows_by_its_base() -> None:
    """The third shape of the one formula."""
    backoff = Backoff.linear(1_000, maximum=2_500)

    assert [backoff.delay_for(n, no_chance) for n in (1, 2, 3)] == [1_000, 2_000, 2_500]


@pytest.mark.requirement("X-1")
def test_spread_comes_on_top_of_the_cap() -> None:
    """min(60 s x 2^(n-1), 15 min) + 0 to 10 s, the rule of the outbox."""
    backoff = Backoff.exponential(60_000, maximum=900_000, spread=10_000)

    assert backoff.delay_for(9, no_chance) == 900_000
    assert backoff.delay_for(9, nearly_one) == 909_999


@pytest.mark.requirement("X-1")
def test_two_seconds_times_two_to_the_retry_count_is_the_same_formula() -> None:
    """A counter from zero is a number of failures minus one."""
    backoff = Backoff.exponential(2_000, maximum=32_000)

    delays = [backoff.delay_for(retry + 1, no_chance) for retry in range(6)]

    assert delays == [2_000, 4_000, 8_000, 16_000, 32_000, 32_000]


@given(st.integers(1, 10**7), st.floats(0, 1), st.integers(1, 40), st.integers())
def test_jitter_takes_only_its_share_and_never_adds(base: int, jitter: float, failures: int, seed: int) -> None:
    """As Node computes it: between (1 - jitter) and the whole pause."""
    full = Backoff.exponential(base).delay_for(failures, no_chance)

    delay = Backoff.exponential(base, jitter=jitter).delay_for(failures, random.Random(seed).random)

    assert full * (1 - jitter) - 1 <= delay <= full


def test_before_the_first_failure_the_first_pause_is_given() -> None:
    """A counter that is off by one must not produce half a pause."""
    assert Backoff.exponential(1_000).delay_for(0, no_chance) == 1_000


@pytest.mark.requirement("Q-44", "Q-45", "X-101")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Backoff("fibonacci", 5), "backoff.type: expected 'fixed', 'exponential' or 'linear', got 'fibonacci'"),  # type: ignore[arg-type]  # the mistake under test
        (lambda: Backoff.fixed(0), "backoff.delay: expected whole milliseconds .* more than 0, got 0"),
        (lambda: Backoff.exponential(-1), "backoff.delay: .* got -1"),
        (lambda: Backoff("fixed", True), "backoff.delay: .* got True"),
        (lambda: Backoff.fixed(5, jitter=1.1), "backoff.jitter: expected a number from 0 to 1, got 1.1"),
        (lambda: Backoff.fixed(5, jitter=float("nan")), "backoff.jitter"),
        (lambda: Backoff.fixed(5, jitter=True), "backoff.jitter"),
        (lambda: Backoff.exponential(5, maximum=0), "backoff.max_ms"),
        (lambda: Backoff.linear(5, spread=-1), "backoff.spread_ms"),
    ],
)
def test_a_wrong_backoff_is_refused_when_it_is_made(make: Any, message: str) -> None:
    """Node accepts most of these and fails when the first retry is due."""
    with pytest.raises(InvalidOption, match=message):
        make()


@pytest.mark.requirement("X-101")
@given(json_values)
def test_reading_a_foreign_backoff_never_raises(value: Any) -> None:
    """Node stores whatever a producer wrote; our worker must survive it."""
    backoff = from_wire(value)

    if isinstance(backoff, Backoff):
        assert backoff.delay_for(5, nearly_one) >= 0


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (0, None),
        (-5, None),
        (False, None),
        (1_000, Backoff.fixed(1_000)),
        (1_000.9, Backoff.fixed(1_000)),
        ({"type": "fixed", "delay": 5}, Backoff.fixed(5)),
        ({"type": "exponential", "delay": 5, "jitter": 0.5}, Backoff.exponential(5, jitter=0.5)),
        ({"type": "exponential", "delay": 5, "jitter": 7}, Backoff.exponential(5, jitter=1)),
        ({"type": "exponential", "delay": float("inf")}, Backoff.exponential(2**53 - 1)),
        ({"type": "exponential"}, None),
        ({"type": "fixed", "delay": -1}, None),
        ({"type": "fixed", "delay": "soon"}, None),
        ({"type": "custom", "delay": 5}, CustomBackoff("custom", 5)),
        ({"delay": 5}, CustomBackoff("NoneType", 5)),
        (["fixed"], CustomBackoff("list")),
        (True, CustomBackoff("bool")),
        ("custom", CustomBackoff("custom")),
    ],
)
def test_foreign_backoffs_mean_what_they_mean_to_node(value: Any, expected: object) -> None:
    """A number is fixed, nothing or nonsense retries at once, an unknown type cannot be computed."""
    assert from_wire(value) == expected


@pytest.mark.requirement("Q-30")
@given(
    st.sampled_from(["fixed", "exponential", "linear"]),
    st.integers(1, 10**9),
    st.floats(0, 1),
    st.integers(1, 10**9),
    st.integers(0, 10**9),
)
def test_what_we_write_reads_back_the_same(kind: Any, delay: int, jitter: float, cap: int, spread: int) -> None:
    """A worker of ours computes what the producer meant, the cap and the spread included."""
    backoff = Backoff(kind, delay, jitter, cap, spread)

    assert from_wire(backoff.to_wire()) == backoff


@pytest.mark.requirement("Q-30")
def test_an_ordinary_backoff_has_nothing_on_the_wire_that_node_does_not_know() -> None:
    """Our extra fields appear only when they are needed."""
    assert Backoff.exponential(1_000).to_wire() == {"type": "exponential", "delay": 1_000}
    assert Backoff.fixed(5, jitter=0.5).to_wire() == {"type": "fixed", "delay": 5, "jitter": 0.5}


@pytest.mark.requirement("Q-44")
def test_the_option_takes_a_backoff_a_number_a_timedelta_or_an_object() -> None:
    """A bare duration means fixed, as in Node."""
    assert from_option(Backoff.linear(5)) == Backoff.linear(5)
    assert from_option(500) == from_option(timedelta(milliseconds=500)) == Backoff.fixed(500)
    assert from_option({"type": "exponential", "delay": timedelta(seconds=1)}) == Backoff.exponential(1_000)


@pytest.mark.requirement("Q-44", "Q-45")
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("fixed", "backoff: expected a Backoff"),
        (True, "backoff: expected a Backoff"),
        (1.5, "backoff: expected a Backoff"),
        (0, "backoff.delay"),
        ({"type": "fixed"}, "backoff: expected both type and delay"),
        ({"type": "fixed", "delay": 5, "dealy": 6}, "backoff.dealy: expected only type, delay and jitter"),
        ({"type": "random", "delay": 5}, "backoff.type"),
        ({"type": "fixed", "delay": 0}, "backoff.delay"),
    ],
)
def test_a_wrong_option_is_refused_by_name(value: Any, message: str) -> None:
    """The message names the part that is wrong."""
    with pytest.raises(InvalidOption, match=message):
        from_option(value)


def test_a_producer_names_a_strategy_of_the_workers_on_purpose() -> None:
    """A mapping with a misspelt type is still refused: nobody means a strategy that no worker has."""
    assert Backoff.custom("own").to_wire() == {"type": "own"}
    assert Backoff.custom("own", delay=timedelta(seconds=1)).to_wire() == {"type": "own", "delay": 1_000}
    assert from_wire(Backoff.custom("own", delay=5).to_wire()) == CustomBackoff("own", 5)
    for name in ("fixed", "exponential", "linear", ""):
        with pytest.raises(InvalidOption, match="name of your own"):
            Backoff.custom(name)
    with pytest.raises(InvalidOption, match="backoff"):
        from_option({"type": "own", "delay": 5})
