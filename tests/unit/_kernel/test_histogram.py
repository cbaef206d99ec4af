"""Values are counted under the first bound they do not exceed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bullpen._kernel.histogram import Histogram

BOUNDS = (1.0, 2.0, 5.0)


def test_a_bound_belongs_to_its_own_bucket() -> None:
    histogram = Histogram(BOUNDS)

    for value in (0.5, 1.0, 1.1, 5.0, 99.0):
        histogram.observe(value)

    assert histogram.cumulative() == [(1.0, 2), (2.0, 3), (5.0, 4), (float("inf"), 5)]
    assert (histogram.count, histogram.sum) == (5, 106.6)


@given(st.lists(st.floats(0, 10)))
def test_each_count_is_that_of_all_values_up_to_the_bound(values: list[float]) -> None:
    histogram = Histogram(BOUNDS)

    for value in values:
        histogram.observe(value)

    assert histogram.cumulative() == [
        (bound, sum(value <= bound for value in values)) for bound in (*BOUNDS, float("inf"))
    ]
