"""Lanes: fair shares of a queue by key (a tenant, a customer), with weights and limits.

In: names of lanes and what each may do. Out: fields of the queue's `meta`; who waits and runs, lane by lane.
A job is put into a lane by the option `lane` of `add`. Elsewhere: giving jobs their turns and obeying limits (the
scripts `add` and `exchange`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal

from bullpen._kernel.duration import check_int, to_ms
from bullpen._kernel.ids import check_lane
from bullpen._kernel.rates import RateLimit
from bullpen.errors import require
from bullpen.queue.actions import QueueActions
from bullpen.wire.keys import QueueKeys

MOST_WEIGHT: Final = 1_000
_PAGE: Final = 2_000

Rate = RateLimit | tuple[int, int | timedelta]
Nothing = Literal[False]
"""Take the setting back: as all lanes have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSettings:
    """What one lane may do. None: as all lanes that say nothing of their own; without a limit if those have none."""

    weight: float | None = None
    """Turns per round, 1 unless given: a lane of weight 3 gets three times the share of one with 1. It holds for jobs
    that are added from then on."""
    concurrency: int | None = None
    """How many of its jobs may run at once, over all bullpen workers."""
    rate: RateLimit | None = None
    """How many of its jobs may start per time, over all bullpen workers."""
    paused: bool = False
    """Its jobs wait."""
    paused_until: datetime | None = None
    """When the pause ends by itself."""
    size: int | None = None
    """How many of its jobs may be there that did not start: a further add raises LaneFull. Counts what was added since
    the limit is set."""

    @staticmethod
    def read(raw: bytes | None, now_ms: float = 0) -> LaneSettings:
        """The parts of a stored field. Never raises: an unreadable part is left out, and so is a pause that is over."""
        words = [*(raw or b"").decode("utf-8", "replace").split(" "), *(["-"] * 6)][:6]
        weight, concurrency, most, duration_ms, paused, size = map(_number, words)
        is_for_ever = paused == 1
        return LaneSettings(
            weight=weight if weight and weight <= MOST_WEIGHT else None,
            concurrency=int(concurrency) or None,
            rate=RateLimit(int(most), int(duration_ms)) if min(most, duration_ms) >= 1 else None,
            paused=is_for_ever or paused > now_ms,
            paused_until=None if is_for_ever else _instant(paused, now_ms),
            size=int(size) or None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneInfo:
    """One lane at the time of reading."""

    name: str
    settings: LaneSettings
    waiting: int = 0
    """Jobs that wait for their turn."""
    held: int = 0
    """Jobs that wait because of the lane's limit or pause."""
    delayed: int = 0
    """Jobs that wait for their time."""
    active: int = 0

    def to_json(self) -> dict[str, Any]:
        """For the command line and API answers."""
        own = self.settings
        return {
            "name": self.name,
            "waiting": self.waiting,
            "held": self.held,
            "delayed": self.delayed,
            "active": self.active,
            "weight": own.weight,
            "concurrency": own.concurrency,
            "size": own.size,
            "paused": own.paused,
            "pausedUntil": None if own.paused_until is None else own.paused_until.isoformat(),
            "rate": None if own.rate is None else {"max": own.rate.max, "durationMs": own.rate.duration_ms},
        }


class Lanes:
    """The lanes of one queue, as `queue.lanes`."""

    def __init__(self, actions: QueueActions, keys: QueueKeys, *, clock_offset_ms: int) -> None:
        self._actions, self._keys, self._clock_offset_ms = actions, keys, clock_offset_ms

    async def set(
        self,
        lane: str | None,
        *,
        weight: float | Nothing | None = None,
        concurrency: int | Nothing | None = None,
        rate: Rate | Nothing | None = None,
        size: int | Nothing | None = None,
    ) -> LaneSettings:
        """Change what a lane may do, and return all its settings. What is not given stays; False takes it back.

        None instead of a name is about all lanes that say nothing of their own. `rate` is a `RateLimit`, or jobs and a
        duration (ms or timedelta).
        """
        given = (weight, concurrency, rate, size)
        require("lanes.set", any(one is not None for one in given), "weight, concurrency, rate or size", None)
        return await self._configure(lane, lane_words(weight, concurrency, rate, size=size))

    async def pause(self, lane: str, duration: int | timedelta | None = None) -> None:
        """Let no job of the lane start, for `duration` (ms or timedelta) or until `resume`. Those that run finish; adds
        are accepted."""
        duration_ms = None if duration is None else to_ms("duration", duration, minimum=1)
        await self._configure(check_lane(lane), lane_words(paused=True if duration_ms is None else duration_ms))

    async def resume(self, lane: str) -> None:
        """Let jobs of the lane start again."""
        await self._configure(check_lane(lane), lane_words(paused=False))

    async def remove(self, lane: str | None) -> None:
        """Remove the settings of a lane. Its jobs stay and are treated like those of any other."""
        await self._configure(lane, REMOVED)

    async def get(self, lane: str | None) -> LaneSettings:
        """What was set for a lane; None: for all others."""
        field = f"bplane:{_name(lane)}"
        time, raw = await self._actions.commands([("TIME",), ("HGET", self._keys.meta, field)])
        return LaneSettings.read(raw, self._now_ms(time))

    async def list(self) -> list[LaneInfo]:
        """Lanes that have settings, or jobs that wait or run, by name. Reads each of those jobs."""
        keys = self._keys
        time, flat = await self._actions.commands([("TIME",), ("HGETALL", keys.meta)])
        lanes: dict[str, LaneInfo] = {}
        for field, raw in zip(flat[::2], flat[1::2], strict=True):
            if field.startswith(b"bplane:") and field != b"bplane:":
                name = field[7:].decode("utf-8", "replace")
                lanes[name] = LaneInfo(name=name, settings=LaneSettings.read(raw, self._now_ms(time)))
        found: dict[str, Counter[str]] = {}
        for state, is_list in (("prioritized", ""), ("wait", "1"), ("paused", "1"), ("delayed", ""), ("active", "1")):
            found[state] = await self._count(getattr(keys, state), is_list)
        names = sorted(lanes.keys() | {name for counts in found.values() for name in counts if name})
        result = []
        for name in names:
            held = int(await self._actions.command("ZCARD", keys.held(name)))
            lane = lanes.get(name) or LaneInfo(name=name, settings=LaneSettings())
            waiting = sum(found[state][name] for state in ("prioritized", "wait", "paused"))
            delayed = max(0, found["delayed"][name] - held)
            result.append(replace(lane, waiting=waiting, held=held, delayed=delayed, active=found["active"][name]))
        return result

    def _now_ms(self, time: Sequence[bytes]) -> int:
        seconds, micros = map(int, time)
        return seconds * 1000 + micros // 1000 + self._clock_offset_ms

    async def _configure(self, lane: str | None, words: Iterable[str]) -> LaneSettings:
        keys, name = self._keys, _name(lane)
        names = [keys.meta, keys.running(name), keys.lane_rate(name), keys.lane_size(name)]
        args = [keys.base, self._clock_offset_ms, name, *words]
        return LaneSettings.read(await self._actions.evaluate("configure_lane", names, args))

    async def _count(self, key: str, is_list: str) -> Counter[str]:
        counts: Counter[str] = Counter()
        start = 0
        while True:
            looked_at, flat = await self._actions.evaluate(
                "count_lanes", [key], [self._keys.base, is_list, start, _PAGE]
            )
            for name, number in zip(flat[::2], flat[1::2], strict=True):
                counts[name.decode("utf-8", "replace")] += number
            if looked_at < _PAGE:
                return counts
            start += _PAGE


REMOVED: Final = ("-",) * 6


def lane_words(
    weight: float | Nothing | None = None,
    concurrency: int | Nothing | None = None,
    rate: Rate | Nothing | None = None,
    paused: bool | int | None = None,
    size: int | Nothing | None = None,
) -> tuple[str, ...]:
    """The arguments of the script `configure_lane`; raises InvalidOption. `paused`: True, or for so many ms."""
    words = (_weight(weight), _count("concurrency", concurrency), *_rate(rate))
    return (*words, _pause(paused), _count("size", size))


def _weight(value: float | Nothing | None) -> str:
    if value is None or value is False:
        return "" if value is None else "-"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    require("weight", is_number and 0.001 <= value <= MOST_WEIGHT, f"a number from 0.001 to {MOST_WEIGHT}", value)
    return repr(value)


def _count(name: str, value: int | Nothing | None) -> str:
    if value is None or value is False:
        return "" if value is None else "-"
    check_int(name, value, minimum=1)
    return str(value)


def _pause(value: bool | int | None) -> str:
    if value is None or isinstance(value, bool):
        return {None: "", True: "1", False: "-"}[value]
    return f"+{value}"


def _rate(value: Rate | Nothing | None) -> tuple[str, str]:
    if value is None or value is False:
        return ("", "") if value is None else ("-", "-")
    if isinstance(value, RateLimit):
        return str(value.max), str(value.duration_ms)
    require("rate", isinstance(value, tuple) and len(value) == 2, "a RateLimit, or (jobs, duration)", value)
    most, duration = value
    check_int("rate", most, minimum=1)
    return str(most), str(to_ms("rate", duration, minimum=1))


def _instant(epoch_ms: float, now_ms: float) -> datetime | None:
    if epoch_ms <= now_ms:
        return None
    try:
        return datetime.fromtimestamp(epoch_ms / 1000, UTC)
    except (OverflowError, ValueError):  # whoever wrote it meant no instant
        return None


def _number(word: str) -> float:
    try:
        number = float(word)
    except ValueError:
        return 0
    return number if 0 <= number < 2.0**53 else 0


def _name(lane: str | None) -> str:
    return "" if lane is None else check_lane(lane)
