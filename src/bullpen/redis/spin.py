"""Whether to watch for the answer to an add, or to sleep until it comes.

A server that is near stores a job in 30 µs, but to sleep until then and be woken takes longer than that, on both sides.
So whoever adds one job after the other may look for the answers without sleeping: on two cores that made 1.6 times as
many adds a second, with the same processor time of client and server together. Where the answer comes from far away,
or others need the core, it gains nothing or makes all slower. That cannot be known, so both ways are tried from time
to time, for a few adds, and the better one is used. A single add always sleeps: on few cores the worker that it is
meant for could not start meanwhile.

In: when adds were sent and answered. Out: until when to watch. No I/O.
Elsewhere: watching with a loop (`socket`) and without (`blocking`).
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

NEVER: Final = 0.0
LONGEST_S: Final = 200e-6
IN_A_ROW_S: Final = 1e-3
"""An add within this time after the answer to the last one belongs to a row of adds."""
TRIED: Final = 24
"""Adds that each way is tried with."""
COUNTED: Final = 16
"""Those of them that count, the last ones: processors need a while to get used to it."""
USED: Final = 1_000
"""Adds until both ways are tried again."""
WORTH_IT: Final = 0.8
"""Watching must take less than this part of the time: it uses a core that could rest."""
_MOST_COUNTED_S: Final = 1e-3
"""One answer that took longer says more about the machine than about the way."""


class _Phase(Enum):
    TRY_SLEEPING = auto()
    TRY_WATCHING = auto()
    USE = auto()


class Watch:
    """What one caller, which sends one add at a time, has learned about its server."""

    __slots__ = ("_left", "_phase", "_row_ends", "_sent_at", "_sleeping_took", "_took", "_watches")

    def __init__(self) -> None:
        self._row_ends, self._sent_at = float("-inf"), NEVER
        self._sleeping_took = 0.0
        self._enter(_Phase.TRY_SLEEPING, TRIED, watches=False)

    def begin(self, now: float) -> float:
        """An add is sent now: watch until then, or NEVER. Times are those of `time.monotonic`."""
        if now > self._row_ends:
            self._sent_at = NEVER
            return NEVER
        self._sent_at = now
        return now + LONGEST_S if self._watches else NEVER

    def end(self, now: float) -> None:
        """The answer to it is there."""
        self._row_ends = now + IN_A_ROW_S
        if self._sent_at:
            self._left -= 1
            if self._left < COUNTED:
                self._took += min(now - self._sent_at, _MOST_COUNTED_S)
                if self._left == 0:
                    self._learn()

    def _learn(self) -> None:
        match self._phase:
            case _Phase.TRY_SLEEPING:
                self._sleeping_took = self._took
                self._enter(_Phase.TRY_WATCHING, TRIED, watches=True)
            case _Phase.TRY_WATCHING:
                self._enter(_Phase.USE, USED, watches=self._took < WORTH_IT * self._sleeping_took)
            case _Phase.USE:
                self._enter(_Phase.TRY_SLEEPING, TRIED, watches=False)

    def _enter(self, phase: _Phase, adds: int, *, watches: bool) -> None:
        self._phase, self._left, self._watches, self._took = phase, adds, watches, 0.0
