"""Limits of a whole queue, obeyed by the workers of every client: how many jobs run at once, how many start per time.

In: numbers. Out: fields of the queue's `meta`, or the counter of its window. A worker's own limit is an option of
`Worker`. Elsewhere: obeying them (the exchange script).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from bullpen._kernel.duration import check_int, to_ms
from bullpen._kernel.rates import RateLimit
from bullpen.errors import require
from bullpen.queue.base import QueuePart, traced
from bullpen.wire.records import read_int

MANUAL_LIMIT: Final = 9007199254740991
"""What the window's counter is set to when a queue is limited by hand: more than any limit."""


def turn_of_task(name: str) -> str:
    """What counts the starts of a task with a rate limit, as a provider."""
    return f"task {name}"[:120]


class Limits(QueuePart):
    """The limits of a `Queue`."""

    async def set_global_concurrency(self, most: int) -> None:
        """Limit how many jobs run at the same time, over all workers of all clients."""
        check_int("most", most, minimum=1)
        await self._configure("concurrency", most)

    async def remove_global_concurrency(self) -> None:
        """Let workers run as many jobs as they have slots for."""
        await self._configure("concurrency", "")

    async def global_concurrency(self) -> int | None:
        """How many jobs may run at once; None: as many as workers have slots for."""
        raw = await self._ready().command("HGET", self._keys.meta, "concurrency")
        return None if raw is None else read_int(raw)

    async def set_global_rate_limit(self, most: int, duration: int | timedelta) -> None:
        """Let at most `most` jobs start per `duration` (ms or timedelta), over all workers of all clients.

        It takes precedence over the number of a worker's own limit; a worker that has a limit of its own keeps its
        own duration. A window begins with the first job that starts in it.
        """
        check_int("most", most, minimum=1)
        await self._configure("max", most, "duration", to_ms("duration", duration, minimum=1))

    async def remove_global_rate_limit(self) -> None:
        """Remove the limit. Bullpen workers that wait for the end of a window continue at once."""
        await self._configure("max", "", "duration", "")

    async def global_rate_limit(self) -> RateLimit | None:
        """The limit of the whole queue, or None."""
        most, duration = await self._ready().command("HMGET", self._keys.meta, "max", "duration")
        if most is None or read_int(most) < 1:
            return None
        return RateLimit(read_int(most), max(1, read_int(duration or b"0")))

    @traced("rateLimit")
    async def rate_limit(self, duration: int | timedelta) -> None:
        """Let no job start for `duration` (ms or timedelta).

        Our workers obey it always. Node's obey it only when they or the queue have a rate limit at all: a worker
        without one never reads the window.
        """
        await self._configure(pause_ms=to_ms("duration", duration, minimum=1))

    async def lift_rate_limit(self) -> None:
        """End the current window or pause now. Bullpen workers that wait for its end continue at once."""
        await self._configure(pause_ms=0)

    async def rate_limit_ttl(self, most: int | None = None) -> int:
        """For how many ms no job may start now; 0 when one may.

        `most` is the limit to compare with, for queues where only workers have one.
        """
        actions, keys = self._ready(), self._keys
        if most is not None:
            check_int("most", most, minimum=1)
        started, left_ms, stored = await actions.commands(
            [("GET", keys.limiter), ("PTTL", keys.limiter), ("HGET", keys.meta, "max")]
        )
        limit = most if most is not None else read_int(stored) if stored else MANUAL_LIMIT
        return max(0, left_ms) if started is not None and read_int(started) >= limit else 0

    async def take_turn(self, provider: str, *, most: int, duration: int | timedelta = 60_000) -> int:
        """Count one call of a provider over all workers of this queue. 0: it may go; else for how many ms it may not.

        At most `most` calls per `duration` (ms or timedelta). A window begins with the first call in it. For services
        that jobs call several times, or that only some jobs call; a limit of the queue counts jobs.
        """
        check_int("most", most, minimum=1)
        is_name = isinstance(provider, str) and 0 < len(provider) <= 120
        require("provider", is_name, "1 to 120 characters", provider)
        reply = await self._ready().evaluate(
            "take_turn", [self._keys.turns(provider)], [most, to_ms("duration", duration, minimum=1)]
        )
        return int(reply)

    async def _configure(self, *fields: str | int, pause_ms: int | None = None) -> None:
        keys = self._keys
        await self._ready().evaluate(
            "configure",
            [keys.meta, keys.limiter, keys.wait, keys.prioritized, keys.limits_changed],
            [keys.base, "" if pause_ms is None else pause_ms, *fields],
        )
