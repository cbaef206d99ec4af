"""What a log tells of servers that are away: one line when it begins and one when it ends, per address and process.
A connection that is cut again and again is summed up.

In: what the connections of this process see, each for itself. Out: log lines and telemetry. A worker has several
connections, and a server that restarts cuts them all; some notice it only when they are used next.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from bullpen._kernel import telemetry
from bullpen._kernel.logs import get_logger
from bullpen.errors import ServerRefused

logger = get_logger("bullpen.redis")

SEEN_WITHIN_S: Final = 1.0
"""Who has not tried for longer than this does not know when the server came back."""
_MOST_TOLD: Final = 3
"""Outages that are told one by one within `_CALM_S`. Those after them are counted, unless one lasts."""
_CALM_S: Final = 60.0
_LASTING_S: Final = 1.0
_FIRST_SUMMARY_S: Final = 1.0
_QUIET_S: Final = 10.0
"""After so long without another one the counted ones are summed up: nothing else would say that there were any."""


@dataclass(slots=True)
class _Outage:
    since: float = 0.0
    failed_at: float = 0.0
    back_at: float = 0.0
    lost: weakref.WeakSet[object] = field(default_factory=weakref.WeakSet)
    """The connections that have not found their server again."""
    refused_with: str = ""
    """What was told last of a server that is there and does not let us in."""
    told_at: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_TOLD))
    """When those began that were told one by one."""
    is_told: bool = False
    """The log has the beginning of this one."""
    counted: int = 0
    """Those since `counted_from` that were not told."""
    counted_from: float = 0.0
    summary_after_s: float = _FIRST_SUMMARY_S
    is_watched: bool = False
    """A timer waits for calm."""

    def begin(self, now: float) -> None:
        """Decide whether the outage that begins is told or counted."""
        if now - self.back_at > _CALM_S:
            self.summary_after_s = _FIRST_SUMMARY_S
        self.is_told = len(self.told_at) < _MOST_TOLD or now - self.told_at[0] > _CALM_S
        if self.is_told:
            self.told_at.append(now)
        else:
            self.counted_from = self.counted_from if self.counted else now
            self.counted += 1

    def is_to_be_told(self, now: float) -> bool:
        """It was only counted, and turns out to last."""
        if self.is_told or now - self.since < _LASTING_S:
            return False
        self.is_told = True
        self.counted -= 1
        return True

    def sum_up(self, now: float) -> tuple[int, float] | None:
        """How many were counted, and in how many seconds, when it is time to say so. The time grows."""
        lasted_s = now - self.counted_from
        if not self.counted or lasted_s < self.summary_after_s:
            return None
        summary = self.counted, lasted_s
        self.counted = 0
        self.summary_after_s = min(2 * self.summary_after_s, _CALM_S)
        return summary


_lock = threading.Lock()
_outages: dict[str, _Outage] = {}


def note_lost(who: object, where: str, reason: object, at: float, since: float | None = None) -> None:
    """A connection was lost at that time (`time.monotonic`), or could not be opened. `since`: what was asked then had
    no answer; a server that is frozen is noticed only when time is up."""
    with _lock:
        outage = _outages.setdefault(where, _Outage())
        if at <= outage.back_at:
            return  # cut before the server came back, and noticed only now: that outage is over
        is_known = bool(outage.lost)
        began = max(outage.back_at, at if since is None else since)
        outage.since = min(outage.since, began) if is_known else began
        outage.failed_at = max(outage.failed_at, at)
        now = time.monotonic()
        if not is_known:
            outage.refused_with = str(reason) if isinstance(reason, ServerRefused) else ""
            outage.begin(now)
        outage.lost.add(who)
        is_to_be_told = outage.is_told if not is_known else outage.is_to_be_told(now)
        summary = outage.sum_up(now)
    if summary is not None:
        logger.warning("connection to %s is unstable: lost %d more times in %.0f s", where, *summary)
    if is_to_be_told:
        logger.warning("connection to %s lost (%s); reconnecting until it works", where, reason)
    if not is_known:
        telemetry.emit("connection.lost", endpoint=where)


def note_refused(where: str, error: ServerRefused) -> None:
    """The server is there, and does not let us in: somebody has to do something. Told once, whoever meets it."""
    with _lock:
        outage = _outages.setdefault(where, _Outage())
        is_new = outage.refused_with != str(error)
        outage.refused_with = str(error)
    if is_new:
        logger.error("%s refused the login (%s); trying again", where, error)


def note_back(where: str, endpoint: str, asked_at: float | None = None) -> None:
    """A connection that had been lost is open again. `asked_at`: when the attempt began that succeeded."""
    now = time.monotonic()
    with _lock:
        outage = _outages.get(where)
        if outage is None:
            return
        outage.refused_with = ""
        if not outage.lost:
            return
        outage.lost.clear()
        outage.back_at = now
        # When nobody tried for a while it may have been back long ago: the outage is as long as it was seen.
        was_asked = (now if asked_at is None else asked_at) - outage.failed_at <= SEEN_WITHIN_S
        away_s = (now if was_asked else outage.failed_at) - outage.since
        is_told = outage.is_told
        is_to_be_watched = outage.counted > 0 and not outage.is_watched
        outage.is_watched = outage.is_watched or is_to_be_watched
    if is_to_be_watched:
        _wait_for_calm(where, _QUIET_S)
    if is_told:
        logger.warning(
            "connection to %s works again after %s%.1f s", endpoint, "" if was_asked else "at least ", away_s
        )
    telemetry.emit("connection.back", endpoint=endpoint, away_ms=int(away_s * 1000))


def _wait_for_calm(where: str, wait_s: float) -> None:
    # A thread, since connections of loops and of threads share this; there is one only while something is unsaid.
    timer = threading.Timer(wait_s, _sum_up_when_calm, (where,))
    timer.daemon = True
    timer.start()


def _sum_up_when_calm(where: str) -> None:
    with _lock:
        outage = _outages[where]
        left_s = _QUIET_S if outage.lost else outage.back_at + _QUIET_S - time.monotonic()
        outage.is_watched = outage.counted > 0 and left_s > 0
        is_watched, counted, lasted_s = outage.is_watched, outage.counted, outage.back_at - outage.counted_from
        if not is_watched:
            outage.counted = 0
    if is_watched:
        _wait_for_calm(where, left_s)
    elif counted:
        logger.warning(
            "connection to %s was unstable: lost %d more times in %.0f s, stable since", where, counted, lasted_s
        )


def forget(who: object, where: str) -> None:
    """A connection was closed by us; if nobody else waits for the server, nobody will see it come back."""
    with _lock:
        if where in _outages:
            _outages[where].lost.discard(who)
