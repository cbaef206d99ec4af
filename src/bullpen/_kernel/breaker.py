"""A circuit breaker: after so many failures in a row nothing is tried for a while, then one probe decides.

In: what happened to each call. Out: how long to wait before the next. No I/O and no timer: whoever asks, asks with the
clock it was given. Elsewhere: making workers wait (`bullpen.runs`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final

from bullpen._kernel.duration import check_int, to_ms

__all__ = ["CircuitBreaker"]

_PROBE_MS: Final = 1_000
"""How long others wait while a probe is under way, before they ask again."""


class CircuitBreaker:
    """Counts failures in a row over all calls of one process.

    `failures` of them open it for `pause`; then one call may go, the probe: its success closes the breaker, its failure
    opens it for another pause. Calls that ran and failed count as what they are; the breaker only keeps others from
    being tried in vain.
    """

    def __init__(
        self,
        failures: int = 5,
        pause: int | timedelta = 30_000,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._failures = check_int("failures", failures, minimum=1)
        self.pause_ms = to_ms("pause", pause, minimum=1)
        self._clock = clock
        self._failed_in_a_row = 0
        self._open_until: float | None = None
        self._is_probing = False

    @property
    def is_open(self) -> bool:
        """True from the failure that opened it until a call has succeeded."""
        return self._open_until is not None

    def ask(self) -> int:
        """How many ms to wait; 0: go, and say afterwards how it ended."""
        if self._open_until is None:
            return 0
        left_ms = int((self._open_until - self._clock()) * 1000)
        if left_ms > 0:
            return left_ms
        if self._is_probing:
            return _PROBE_MS
        self._is_probing = True
        return 0

    def succeeded(self) -> bool:
        """A call worked. True when that closed the breaker."""
        was_open = self.is_open
        self._failed_in_a_row, self._open_until, self._is_probing = 0, None, False
        return was_open

    def failed(self) -> bool:
        """A call failed. True when that opened the breaker, or kept it open."""
        self._failed_in_a_row += 1
        was_probe, self._is_probing = self._is_probing, False
        if not was_probe and (self.is_open or self._failed_in_a_row < self._failures):
            return False
        self._open_until = self._clock() + self.pause_ms / 1000
        return True

    def abandoned(self) -> None:
        """A call ended without telling anything: cancelled, or sent back."""
        self._is_probing = False
