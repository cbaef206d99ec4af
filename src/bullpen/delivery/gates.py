"""Whether a destination may be called: somebody may have switched it off, or it may be known to be broken.

After so many failures in a row the breaker opens: rows wait in the database and lose no attempt while nobody is there
to take them. When the pause is over one delivery per process tries whether it works again; the others wait a little
longer. What is known lies in the ledger, so one process learns for all, and is remembered here for a second.

In: results of deliveries. Out: go, or how long to wait and why. Elsewhere: where it is stored
(`bullpen.ledger.destinations`), who asks (`bullpen.outbox`).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from bullpen._kernel import telemetry
from bullpen._kernel.duration import check_int
from bullpen._kernel.logs import get_logger
from bullpen.errors import DatabaseUnavailable
from bullpen.ledger import Destination, Destinations
from bullpen.ports.channel import Accepted, NotTried, Refused, SendResult

_log = get_logger("bullpen.outbox")

_FRESH_S: Final = 1.0
_DISABLED_RETRY_MS: Final = 5_000
_PROBE_RETRY_MS: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Breaker:
    """When to stop calling a destination that does not answer."""

    failures: int = 10
    """Failures in a row, of one process, that open it."""
    pause_ms: int = 30_000
    """How long it stays open the first time; twice as long each time it does not work afterwards."""
    longest_ms: int = 600_000
    """How long at most. The ledger on PostgreSQL takes no more than a day."""

    def __post_init__(self) -> None:
        for name in ("failures", "pause_ms"):
            check_int(name, getattr(self, name), minimum=1)
        check_int("longest_ms", self.longest_ms, minimum=1, maximum=86_400_000)


@dataclass(frozen=True, slots=True)
class Pass:
    """A delivery that was let in. `is_probe`: it tries whether a broken destination works again."""

    integration_type: str
    is_probe: bool


class Gates:
    """What one process knows about destinations."""

    def __init__(self, destinations: Destinations, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._destinations, self._clock = destinations, clock
        self._known: dict[str, Destination] = {}
        self._until = float("-inf")
        self._looking = asyncio.Lock()
        self._failures: Counter[str] = Counter()
        self._probing: set[str] = set()
        self._next_probe: dict[str, float] = {}
        self._held_until: dict[str, float] = {}
        """Destinations that said for all their messages when to come again."""

    async def room(self, integration_type: str, free: int) -> int:
        """How many deliveries may be begun where there would be `free` places."""
        if self._is_held(integration_type):
            return 0
        destination = await self._look(integration_type)
        if destination is None:
            return free
        if destination.state != "probing" or integration_type in self._probing:
            return 0
        # One row now and then: the delivery may begin in another process, which this one does not see.
        now = self._clock()
        if now < self._next_probe.get(integration_type, now):
            return 0
        self._next_probe[integration_type] = now + _PROBE_RETRY_MS / 1000
        return min(free, 1)

    def opens_in_s(self) -> float | None:
        """When the first of the destinations that asked to be left alone may be called; None: there is none."""
        now = self._clock()
        for name in [name for name, until in self._held_until.items() if until <= now]:
            del self._held_until[name]
        return min(self._held_until.values(), default=now) - now if self._held_until else None

    def _is_held(self, integration_type: str) -> bool:
        return self._clock() < self._held_until.get(integration_type, float("-inf"))

    def open_at_once(self, integration_type: str) -> bool:
        """Whether it is known that all is in order there: then nothing has to be asked. A delivery that was taken is
        noted with `taken`."""
        return self._clock() < self._until and integration_type not in self._known

    def taken(self, integration_type: str) -> None:
        """A target that was not in trouble took a delivery."""
        self._failures.pop(integration_type, None)

    async def enter(self, integration_type: str) -> Pass | NotTried:
        """Ask to deliver. A pass must be given back with `leave`."""
        destination = await self._look(integration_type)
        match None if destination is None else destination.state:
            case None:
                return Pass(integration_type, is_probe=False)
            case "disabled":
                return NotTried(f"{integration_type} is switched off", _DISABLED_RETRY_MS)
            case "broken":
                assert destination is not None
                left_ms = min(destination.broken_ms, 60_000) + 1  # by the time of the look; it is looked again anyway
                return NotTried(f"{integration_type} does not answer; the breaker is open", left_ms)
            case _ if integration_type in self._probing:
                return NotTried(f"{integration_type} is being tried by another delivery", _PROBE_RETRY_MS)
        self._probing.add(integration_type)
        return Pass(integration_type, is_probe=True)

    async def leave(self, entry: Pass, result: SendResult | None, breaker: Breaker | None) -> None:
        """Learn from a result; None: there was none. Never raises: a breaker that cannot be written is only slower."""
        integration_type = entry.integration_type
        if entry.is_probe:
            self._probing.discard(integration_type)
        if isinstance(result, NotTried) and result.for_all:
            self._held_until[integration_type] = self._clock() + result.after_ms / 1000
        if result is None or isinstance(result, NotTried) or breaker is None:
            return
        if isinstance(result, Accepted | Refused):  # it answers, whatever it says
            del self._failures[integration_type]
            if entry.is_probe:
                await self._tell(integration_type, None)
            return
        self._failures[integration_type] += 1
        if entry.is_probe or self._failures[integration_type] >= breaker.failures:
            del self._failures[integration_type]
            await self._tell(integration_type, breaker)

    async def _tell(self, integration_type: str, breaker: Breaker | None) -> None:
        try:
            if breaker is None:
                await self._destinations.mend(integration_type)
                changed = True
            else:
                changed = await self._destinations.trip(
                    integration_type, pause_ms=breaker.pause_ms, longest_ms=breaker.longest_ms
                )
        except DatabaseUnavailable:
            return
        self._until = float("-inf")  # the next one looks again
        if changed:
            state = "closed" if breaker is None else "open"
            _log.warning("breaker of %s is %s", integration_type, state, extra={"integrationType": integration_type})
            telemetry.emit("outbox.breaker", integration_type=integration_type, state=state)

    async def _look(self, integration_type: str) -> Destination | None:
        if self._clock() >= self._until:
            async with self._looking:  # all that come at once wait for one look
                if self._clock() >= self._until:
                    await self._refresh()
        return self._known.get(integration_type)

    async def _refresh(self) -> None:
        try:
            self._known = await self._destinations.troubled()
        except DatabaseUnavailable:
            pass  # what was known a moment ago is the best there is
        self._until = self._clock() + _FRESH_S
