"""What a log tells of servers that are away: one line when it begins and one when it ends, per address and process.

In: what the connections of this process see, each for itself. Out: log lines and telemetry. A worker has several
connections, and a server that restarts cuts them all; some notice it only when they are used next.
"""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import Final

from bullpen._kernel import telemetry
from bullpen._kernel.logs import get_logger
from bullpen.errors import ServerRefused

logger = get_logger("bullpen.redis")

SEEN_WITHIN_S: Final = 1.0
"""Who has not tried for longer than this does not know when the server came back."""


@dataclass(slots=True)
class _Outage:
    since: float = 0.0
    failed_at: float = 0.0
    back_at: float = 0.0
    lost: weakref.WeakSet[object] = field(default_factory=weakref.WeakSet)
    """The connections that have not found their server again."""
    refused_with: str = ""
    """What was told last of a server that is there and does not let us in."""


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
        if not is_known:
            outage.refused_with = str(reason) if isinstance(reason, ServerRefused) else ""
        outage.lost.add(who)
    if not is_known:
        logger.warning("connection to %s lost (%s); trying again until it is back", where, reason)
        telemetry.emit("connection.lost", endpoint=where)


def note_refused(where: str, error: ServerRefused) -> None:
    """The server is there, and does not let us in: somebody has to do something. Told once, whoever meets it."""
    with _lock:
        outage = _outages.setdefault(where, _Outage())
        is_new = outage.refused_with != str(error)
        outage.refused_with = str(error)
    if is_new:
        logger.error("%s does not let us in (%s); trying again", where, error)


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
    logger.warning("connection to %s is back after %s%.1f s", endpoint, "" if was_asked else "at least ", away_s)
    telemetry.emit("connection.back", endpoint=endpoint, away_ms=int(away_s * 1000))


def forget(who: object, where: str) -> None:
    """A connection was closed by us; if nobody else waits for the server, nobody will see it come back."""
    with _lock:
        if where in _outages:
            _outages[where].lost.discard(who)
