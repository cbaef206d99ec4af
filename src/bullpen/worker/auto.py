"""How many jobs a worker runs at the same time when nobody has said a number: `concurrency="auto"`.

In: how late the event loop is, how much memory is in use, whether all slots were taken. Out: the number for the next
while, between two bounds. It doubles while all slots are taken and neither loop nor memory complains; when one of them
does, it falls by a quarter, rests, and from then on grows by a tenth. No clock, no I/O.
Elsewhere: measuring, and making it true (`adapt`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Final, Literal, NamedTuple

from bullpen._kernel.duration import check_int, to_ms
from bullpen.errors import require

__all__ = ["AutoConcurrency", "Concurrency", "Governor", "Observed", "Reason", "most_of", "read_concurrency"]

_MOST: Final = 500
_FIRST: Final = 10
_RESTS: Final = 6
"""Decisions without growth after one of the limits was met."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoConcurrency:
    """Bounds of `concurrency="auto"`, which is short for this with nothing said."""

    least: int = 1
    """Never fewer jobs at the same time."""
    most: int | None = None
    """Never more. None: 500, and with child processes as many as there are processors."""
    lag: int | timedelta = 50
    """Ms, or a timedelta: when the event loop is later than this on average, fewer jobs run."""
    memory: float = 0.85
    """The same when more of the memory is in use than this share: of the container's limit, or of the machine."""

    def __post_init__(self) -> None:
        check_int("concurrency.least", self.least, minimum=1)
        if self.most is not None:
            check_int("concurrency.most", self.most, minimum=self.least)
        to_ms("concurrency.lag", self.lag, minimum=1)
        is_number = isinstance(self.memory, int | float) and not isinstance(self.memory, bool)
        require("concurrency.memory", is_number and 0 < self.memory <= 1, "a share above 0, at most 1", self.memory)

    def highest(self, *, processes: bool) -> int:
        """The upper bound that holds."""
        if self.most is not None:
            return self.most
        return max(self.least, (os.cpu_count() or 1) if processes else _MOST)


Concurrency = int | Literal["auto"] | AutoConcurrency
"""Jobs at the same time: a number, or found while the worker runs."""


def read_concurrency(value: Concurrency) -> int | AutoConcurrency:
    """Raises InvalidOption for what is none of the three."""
    if isinstance(value, AutoConcurrency):
        return value
    if isinstance(value, str):
        require("concurrency", value == "auto", "a number of jobs, 'auto' or AutoConcurrency", value)
        return AutoConcurrency()
    return check_int("concurrency", value, minimum=1)


def most_of(value: Concurrency, *, processes: bool = False) -> int:
    """What a concurrency may come to."""
    given = read_concurrency(value)
    return given if isinstance(given, int) else given.highest(processes=processes)


class Observed(NamedTuple):
    """What happened since the last decision."""

    lag_ms: float
    """How late timers fired, on average."""
    memory: float | None
    running: int
    """The most slots that were in use."""


class Reason(StrEnum):
    """Why the number changed."""

    DEMAND = "demand"
    LAG = "lag"
    MEMORY = "memory"


class Governor:
    """The number of one worker."""

    def __init__(self, bounds: AutoConcurrency, *, processes: bool = False) -> None:
        self._least, self._most = bounds.least, bounds.highest(processes=processes)
        self._lag_ms, self._memory = to_ms("concurrency.lag", bounds.lag), bounds.memory
        self.size = min(max(_FIRST, self._least), self._most)
        self._rests = 0
        self._has_met_limit = False

    def next(self, seen: Observed) -> Reason | None:
        """Decide; `size` is the number from now on. None: it stays."""
        if not seen.running:  # whatever is wrong, it is not our jobs
            return None
        if seen.memory is not None and seen.memory >= self._memory:
            return self._fewer(seen, Reason.MEMORY)
        if seen.lag_ms > self._lag_ms:
            return self._fewer(seen, Reason.LAG)
        if self._rests:
            self._rests -= 1
            return None
        return self._more() if seen.running >= self.size else None

    def _fewer(self, seen: Observed, reason: Reason) -> Reason | None:
        self._rests, self._has_met_limit = _RESTS, True
        # From what really runs: slots that nobody uses hurt nobody.
        wanted = max(self._least, min(self.size, seen.running) * 3 // 4)
        return self._change(min(wanted, self.size), reason)

    def _more(self) -> Reason | None:
        step = max(1, self.size // 10) if self._has_met_limit else self.size
        return self._change(min(self.size + step, self._most), Reason.DEMAND)

    def _change(self, size: int, reason: Reason) -> Reason | None:
        if size == self.size:
            return None
        self.size = size
        return reason
