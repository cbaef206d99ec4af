"""The virtual clock's offset."""

from __future__ import annotations

from datetime import timedelta

import pytest

from bullpen.errors import InvalidOption
from bullpen.testing import ClockOffset


def test_the_clock_moves_by_milliseconds_and_timedeltas_in_both_directions() -> None:
    """A test says 'one hour later', or sets the clock back."""
    clock = ClockOffset()

    assert clock.ms == 0
    assert clock.advance(timedelta(hours=1)) == 3_600_000
    assert clock.advance(-600_000) == 3_000_000
    assert repr(clock) == "ClockOffset(3000000)"
    clock.reset()
    assert clock.ms == 0


@pytest.mark.parametrize("value", [True, 1.5, "1"])
def test_anything_else_is_refused(value: object) -> None:
    """Seconds as a float would be a thousand times too short."""
    with pytest.raises(InvalidOption, match="milliseconds as int, or a timedelta"):
        ClockOffset().advance(value)  # type: ignore[arg-type]  # what an untyped test might pass
