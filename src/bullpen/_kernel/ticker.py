"""Periodic work: an interval or a cron pattern, never overlapping itself.

In: an action, and when to run it. Out: the action runs at those times, at once when woken, and again at once while it
says that more is to do. An action that raises is reported when that begins and when it ends, and tried again at the
next time. Many instances may run the same work: what keeps them apart are the claims of the action, not a leader.
Elsewhere: the time rules of patterns (`cron`), starting and stopping (`lifecycle`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Final, Self

from bullpen._kernel import cron, telemetry
from bullpen._kernel.duration import to_ms
from bullpen._kernel.lifecycle import Lifecycle, is_cancelling
from bullpen._kernel.logs import get_logger
from bullpen._kernel.patience import Patience
from bullpen.errors import InvalidOption, require

_log = get_logger("bullpen.ticker")

Action = Callable[[], Awaitable[bool | None]]
"""Returns True when more is waiting: it is then called again at once."""

_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 30.0


class Ticker:
    """Runs `action` every so often. Enter it, or call `start` and `stop`.

    `every` counts from the end of one run to the begin of the next, so a slow run is never followed by a burst. `cron`
    runs at the next matching instant after the last run ended: instants that passed meanwhile are not made up for.
    """

    def __init__(
        self,
        name: str,
        action: Action,
        *,
        every: int | timedelta | None = None,
        cron: str | None = None,
        tz: str | None = None,
        at_once: bool = True,
        now_ms: Callable[[], int] | None = None,
    ) -> None:
        """`at_once`: the first run does not wait. `now_ms` is the clock of a pattern; None is this machine's."""
        if (every is None) == (cron is None):
            raise InvalidOption("every", "either every or cron", every)
        self._name, self._action = name, action
        self._every_s = None if every is None else to_ms("every", every, minimum=1) / 1000
        self._cron, self._tz = cron, tz
        self._now_ms = now_ms or (lambda: int(time.time() * 1000))
        if cron is not None:
            self._next_match()  # a pattern that cannot be read is refused now, not at nine in the morning
        require("tz", tz is None or cron is not None, "none without a cron pattern", tz)
        self._at_once = at_once
        self._wake = asyncio.Event()
        self._stop_wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._life = Lifecycle(f"ticker {name!r}", self._begin, self._end)
        self._failures = 0
        self._patience = Patience(first_s=_FIRST_PAUSE_S, longest_s=_LONGEST_PAUSE_S)
        self._timer: asyncio.TimerHandle | None = None
        self.is_fallback = False
        """Nobody has woken it for the run that is under way: its time had come."""
        self.runs = 0
        """How often the action has ended, for whatever reason."""

    async def start(self) -> None:
        await self._life.start()

    async def stop(self) -> None:
        """Let a running action end, then stop. Safe to call twice."""
        await self._life.stop()

    def wake(self) -> None:
        """Run soon: at once, or right after the run that is under way."""
        self._wake.set()

    def wake_in(self, seconds: float | None) -> None:
        """Wake it after so long, instead of what was planned so before; None: not at all."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else asyncio.get_running_loop().call_later(seconds, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._wake.set()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _begin(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"bullpen ticker {self._name}")

    async def _end(self) -> None:
        self._stop_wanted.set()
        self._wake.set()
        self.wake_in(None)
        if self._task is not None:
            await self._task

    async def _run(self) -> None:
        if self._at_once:
            self._wake.set()
        while True:
            await self._pause()
            if self._stop_wanted.is_set():
                return
            self.is_fallback = not self._wake.is_set()
            # Cleared before the run: whoever wakes us while it runs may have something that it did not see.
            self._wake.clear()
            while await self._once() and not self._stop_wanted.is_set():
                pass

    async def _once(self) -> bool:
        try:
            more = bool(await self._action())
        except (Exception, asyncio.CancelledError) as error:  # whatever it was, the next time may be better
            if isinstance(error, asyncio.CancelledError) and is_cancelling():
                raise  # somebody wants this to end; a driver may let one through that nobody asked for
            self._failures += 1
            if self._failures == 1:
                _log.warning("%s failed: %s; it keeps trying", self._name, error, exc_info=error)
            telemetry.emit("ticker.failed", ticker=self._name, error=error, failures=self._failures)
            more = False
        else:
            if self._failures:
                _log.warning("%s works again after %d failures", self._name, self._failures)
                self._failures = 0
                self._patience.reset()
        self.runs += 1
        return more

    async def _pause(self) -> None:
        if self._failures:
            # What fails is not tried again at every wake-up: soon at first, then ever more rarely. Stopping ends it.
            await self._patience.pause(unless=self._stop_wanted)
        else:
            await self._patience.pause(self._seconds_until_next(), unless=self._wake)

    def _seconds_until_next(self) -> float:
        if self._every_s is not None:
            return self._every_s
        return max(0.0, (self._next_match() - self._now_ms()) / 1000)

    def _next_match(self) -> int:
        assert self._cron is not None
        return cron.next_after(self._cron, self._tz, self._now_ms())
