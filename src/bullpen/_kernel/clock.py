"""The server's time, as this process knows it.

Time is the Redis server's: scripts read it, replies carry it. For timers and cron we need it between replies too, so
the offset between the server's clock and our monotonic one is kept. The wall clock of this machine is never trusted; it
is only compared, to tell an operator that it is wrong.

In: the server's time from a reply, and when that call was sent and answered. Out: the server's now, in Unix ms.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

LARGE_SKEW_MS = 1_000
"""A difference between the two wall clocks that an operator should hear of."""

# Crystal clocks drift by up to about 100 ppm: after 10 s an old measurement may be wrong by one more millisecond.
_DRIFT = 1e-4


class ServerClock:
    """Keeps offset = server - local. Not thread-safe; each event loop has its own.

    `monotonic` and `wall` give seconds; tests pass their own.
    """

    __slots__ = ("_error_ms", "_measured_at", "_monotonic", "_offset_ms", "_skew_ms", "_wall")

    def __init__(
        self, *, monotonic: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time
    ) -> None:
        self._monotonic, self._wall = monotonic, wall
        self._measured_at = 0.0
        self._error_ms = math.inf
        self._skew_ms = 0.0
        # Before the first reply the wall clock is the best guess there is.
        self._offset_ms = (wall() - monotonic()) * 1000

    @property
    def is_synchronised(self) -> bool:
        """False until the first observation."""
        return self._error_ms != math.inf

    @property
    def skew_ms(self) -> int:
        """The server's clock minus this machine's wall clock."""
        return round(self._skew_ms)

    @property
    def has_large_skew(self) -> bool:
        return abs(self._skew_ms) > LARGE_SKEW_MS

    @property
    def error_ms(self) -> float:
        """How wrong `now_ms` can be at most, infinite before the first observation."""
        return self._aged_error(self._monotonic())

    def monotonic(self) -> float:
        """Local seconds for `observe`, before and after a call."""
        return self._monotonic()

    def now_ms(self) -> int:
        """The server's now, in Unix ms."""
        return math.floor(self._monotonic() * 1000 + self._offset_ms)

    def seconds_until(self, instant_ms: int) -> float:
        """How long to sleep until the server's clock shows `instant_ms`; 0 when that has passed."""
        return max(0.0, (instant_ms - self._offset_ms) / 1000 - self._monotonic())

    def observe(self, server_ms: float, local_before: float, local_after: float) -> None:
        """Learn from a reply: the server read `server_ms` at some moment between the two local ones (monotonic s).

        A slow reply says little, so it replaces a better one only when that has grown old, or when both cannot be
        right: then the server's clock was set, or another server answers now.
        """
        round_trip_ms = max(0.0, (local_after - local_before) * 1000)
        # Half a round trip either way, and the server's milliseconds are cut.
        error_ms = round_trip_ms / 2 + 0.5
        offset_ms = server_ms + 0.5 - (local_before + local_after) * 500
        known_ms = self._aged_error(local_after)
        if error_ms <= known_ms or abs(offset_ms - self._offset_ms) > error_ms + known_ms:
            self._offset_ms, self._error_ms, self._measured_at = offset_ms, error_ms, local_after
            self._skew_ms = offset_ms - (self._wall() - self._monotonic()) * 1000

    def _aged_error(self, local: float) -> float:
        return self._error_ms + max(0.0, local - self._measured_at) * 1000 * _DRIFT
