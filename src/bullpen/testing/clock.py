"""Move the time that scripts see, instead of sleeping.

In: how far to move. Out: an offset in milliseconds that every script call adds to the server's time. TTLs (locks,
limiter, stall gate) are the server's own and do not move.
"""

from __future__ import annotations

from datetime import timedelta

from bullpen.errors import InvalidOption

__all__ = ["ClockOffset"]


class ClockOffset:
    """How far the virtual clock is ahead of the server's, in milliseconds.

    Give one object to everything that shall live in the same time; each call reads `ms` when it is sent.
    """

    def __init__(self, ms: int = 0) -> None:
        self._ms = _whole_ms(ms)

    @property
    def ms(self) -> int:
        """The offset now; 0 is the server's own time."""
        return self._ms

    def advance(self, by: int | timedelta) -> int:
        """Move the clock by milliseconds or a timedelta and return the new offset. Negative: a clock set back."""
        self._ms += _whole_ms(by)
        return self._ms

    def reset(self) -> None:
        """Return to the server's own time."""
        self._ms = 0

    def __repr__(self) -> str:
        return f"ClockOffset({self._ms})"


def _whole_ms(value: int | timedelta) -> int:
    if isinstance(value, timedelta):
        return value // timedelta(milliseconds=1)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidOption("clock offset", "milliseconds as int, or a timedelta", value)
    return value
