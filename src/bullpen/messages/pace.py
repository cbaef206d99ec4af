"""How many messages a sender sends at the same time: more while messages are late and the provider keeps up.

In: how each send went. Out: the size for the next while, between the one to begin with and a bound. It is doubled
while messages are late, all places are in use and the last doubling paid off; halved when the provider pushes back
(errors, time-outs, requests for patience) or when twice as many at a time did not get more done; and back at the
beginning when nothing has been late for a minute. No I/O, and no clock but the caller's.
Elsewhere: making it true (`MessageSender`).
"""

from __future__ import annotations

import math
from typing import Final

__all__ = ["Pace"]

_WINDOW_S: Final = 1.0
"""A decision needs so long, and one send per place; the answers of a slow provider are waited for."""
_LONGEST_WINDOW_S: Final = 15.0
_LATE_S: Final = 1.0
_PUSHED_BACK: Final = 0.1
_WORTH: Final = 1.2
"""Twice as many at a time must get so much more done."""
_HOLD_S: Final = 30.0
_CALM_S: Final = 60.0


class Pace:
    """The size of one sender."""

    def __init__(self, start: int, most: int, now: float) -> None:
        self._start, self._most = start, most
        self._began = now
        self._hold_until = -math.inf
        self._late_at = -math.inf
        self._rate_before: float | None = None
        self._clear()

    def note(self, *, late_s: float, is_pushed_back: bool) -> None:
        """One send has been answered, so long after its instant."""
        self._count += 1
        self._pushed_back += is_pushed_back
        self._late += late_s >= _LATE_S

    def next(self, size: int, now: float, *, is_full: bool) -> int:
        """The size from now on, if it is `size` now; `is_full`: most of its places are in use. Ask every second."""
        passed_s = min(now - self._began, _LONGEST_WINDOW_S)
        if passed_s < _WINDOW_S or (self._count < size and passed_s < _LONGEST_WINDOW_S):
            return size
        wanted = self._decide(size, now, self._count / passed_s, is_full=is_full)
        self._began = now
        self._clear()
        return wanted

    def _decide(self, size: int, now: float, rate: float, *, is_full: bool) -> int:
        if self._late:
            self._late_at = now
        before, self._rate_before = self._rate_before, None
        if self._pushed_back and self._pushed_back >= _PUSHED_BACK * self._count:
            return self._back(size, now)
        if now - self._late_at > _CALM_S:
            return self._start
        if not self._late or not is_full:
            return size
        if before is not None and rate < _WORTH * before:
            return self._back(size, now)
        if now < self._hold_until or size >= self._most:
            return size
        self._rate_before = rate
        return min(2 * size, self._most)

    def _back(self, size: int, now: float) -> int:
        self._hold_until = now + _HOLD_S
        return max(size // 2, self._start)

    def _clear(self) -> None:
        self._count = self._pushed_back = self._late = 0
