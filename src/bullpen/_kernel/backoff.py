"""How long to wait before the next try.

One formula for everything that retries: delay(n) = min(shape(n), cap) + uniform(0, spread), with n failures so far.
In: the number of failures and a source of randomness. Out: whole milliseconds.
Elsewhere: whether to try again at all (`bullpen._kernel.outcome`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Literal, NotRequired, TypedDict

from bullpen._kernel.duration import MAX_MS, check_int, is_share, is_text, to_ms
from bullpen.errors import InvalidOption, require

Kind = Literal["fixed", "exponential", "linear"]
BUILT_IN: Final = ("fixed", "exponential")
"""What every client computes by itself: no worker can name a strategy of its own so."""

ONE_HOUR_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class Backoff:
    """The pause before each retry. Make one with `Backoff.fixed`, `.exponential` or `.linear`; `Backoff.custom` names
    one that the workers compute."""

    kind: Kind
    """fixed: always `delay_ms`; exponential: doubled by each failure; linear: `delay_ms` longer by each failure."""
    delay_ms: int
    """The pause after the first failure."""
    jitter: float = 0.0
    """0 to 1: this share of the pause is random, so that jobs which failed together do not return together."""
    max_ms: int = ONE_HOUR_MS
    """Growing pauses stop growing here. A fixed pause is not touched. Node workers know no such cap."""
    spread_ms: int = 0
    """A random 0 to `spread_ms` (exclusive) on top, after the cap."""

    def __post_init__(self) -> None:
        if self.kind not in ("fixed", "exponential", "linear"):
            raise InvalidOption("backoff.type", "'fixed', 'exponential' or 'linear'", self.kind)
        check_int("backoff.delay", self.delay_ms, minimum=1)
        check_int("backoff.max_ms", self.max_ms, minimum=1)
        check_int("backoff.spread_ms", self.spread_ms, minimum=0)
        require("backoff.jitter", is_share(self.jitter), "a number from 0 to 1", self.jitter)

    @classmethod
    def fixed(cls, delay: int | timedelta, *, jitter: float = 0.0, spread: int | timedelta = 0) -> Backoff:
        """Always the same pause."""
        return cls("fixed", _delay(delay), jitter, ONE_HOUR_MS, to_ms("backoff.spread_ms", spread))

    @classmethod
    def exponential(
        cls,
        delay: int | timedelta,
        *,
        jitter: float = 0.0,
        maximum: int | timedelta = ONE_HOUR_MS,
        spread: int | timedelta = 0,
    ) -> Backoff:
        """Twice the pause after each further failure, up to `maximum`."""
        cap = to_ms("backoff.max_ms", maximum, minimum=1)
        return cls("exponential", _delay(delay), jitter, cap, to_ms("backoff.spread_ms", spread))

    @classmethod
    def linear(
        cls,
        delay: int | timedelta,
        *,
        jitter: float = 0.0,
        maximum: int | timedelta = ONE_HOUR_MS,
        spread: int | timedelta = 0,
    ) -> Backoff:
        """`delay` longer after each further failure, up to `maximum`. Not for jobs: Node workers do not know it."""
        cap = to_ms("backoff.max_ms", maximum, minimum=1)
        return cls("linear", _delay(delay), jitter, cap, to_ms("backoff.spread_ms", spread))

    @staticmethod
    def custom(type: str, *, delay: int | timedelta | None = None) -> CustomBackoff:
        """A pause that the workers compute, by the strategy that each has under this name: `Worker(backoff={type:
        …})`, `settings.backoffStrategy` of Node. `delay` is stored for it."""
        is_free = is_text(type) and type not in ("fixed", "exponential", "linear")
        require("backoff.type", is_free, "a name of your own", type)
        return CustomBackoff(type, 0 if delay is None else _delay(delay))

    def delay_for(self, failures: int, random: Callable[[], float]) -> int:
        """Milliseconds to wait after the `failures`-th failure (from 1). `random` gives numbers in [0, 1)."""
        pause = self._pause(max(failures, 1))
        if self.jitter:
            pause = math.floor(random() * pause * self.jitter + pause * (1 - self.jitter))
        if self.spread_ms:
            pause += math.floor(random() * self.spread_ms)
        return pause

    def to_wire(self) -> dict[str, Any]:
        """The `backoff` object of a job's options. Readers other than ours ignore the fields that begin with `bp`."""
        wire: dict[str, Any] = {"type": self.kind, "delay": self.delay_ms}
        if self.jitter:
            wire["jitter"] = self.jitter
        if self.max_ms != ONE_HOUR_MS:
            wire["bpmax"] = self.max_ms
        if self.spread_ms:
            wire["bpspread"] = self.spread_ms
        return wire

    def _pause(self, failures: int) -> int:
        if self.kind == "fixed":
            return self.delay_ms
        if self.kind == "linear":
            return min(self.delay_ms * failures, self.max_ms)
        # max_ms < 2^53, so 53 doublings always reach it: no need to build a number of thousands of digits.
        return min(self.delay_ms << min(failures - 1, 53), self.max_ms)


@dataclass(frozen=True, slots=True)
class CustomBackoff:
    """A backoff that workers compute by a strategy of this name. Make one with `Backoff.custom`."""

    type: str
    delay_ms: int = 0
    """What the producer gave for the strategy; 0: nothing."""

    def to_wire(self) -> dict[str, Any]:
        """The `backoff` object of a job's options."""
        return {"type": self.type, "delay": self.delay_ms} if self.delay_ms else {"type": self.type}


BackoffStrategy = Callable[[int, BaseException, Any], "int | float | timedelta | Backoff | None"]
"""Called with the number of failures so far (from 1), the error and the job. Returns how long to wait (ms, timedelta,
or a Backoff that tells); None or a negative number: do not try again."""


def from_wire(value: Any) -> Backoff | CustomBackoff | None:
    """Read the `backoff` of anybody's job options; None means "retry at once". Never raises.

    Node accepts any number and any type name when a job is added, so all of them can turn up here.
    """
    if value is None or value is False or value == "":
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        delay_ms = _read_ms(value)
        return Backoff("fixed", delay_ms) if delay_ms else None
    if not isinstance(value, dict):
        return CustomBackoff(_type_name(value))
    kind = value.get("type")
    if kind not in ("fixed", "exponential", "linear"):
        return CustomBackoff(_type_name(kind), _read_ms(value.get("delay")))
    delay_ms = _read_ms(value.get("delay"))
    if not delay_ms:
        return None
    return Backoff(
        kind,
        delay_ms,
        _read_share(value.get("jitter")),
        _read_ms(value.get("bpmax")) or ONE_HOUR_MS,
        _read_ms(value.get("bpspread")),
    )


class BackoffMapping(TypedDict):
    """A backoff as BullMQ's clients write it."""

    type: Literal["fixed", "exponential"]
    delay: int | timedelta
    jitter: NotRequired[float]


def from_option(value: Any) -> Backoff:
    """Read what a caller gave as `backoff`: a Backoff, a number or timedelta (fixed), or `{"type", "delay"}`."""
    if isinstance(value, Backoff):
        return value
    if isinstance(value, dict):
        unknown = sorted(str(key) for key in value if key not in ("type", "delay", "jitter"))
        if unknown:
            raise InvalidOption(f"backoff.{unknown[0]}", "only type, delay and jitter", value[unknown[0]])
        kind = value.get("type")
        if "type" in value and kind not in BUILT_IN:
            expected = "'fixed' or 'exponential', or Backoff.custom(…) for a strategy of the workers"
            raise InvalidOption("backoff.type", expected, kind)
        if "type" not in value or "delay" not in value:
            raise InvalidOption("backoff", "both type and delay", value)
        return Backoff(value["type"], _delay(value["delay"]), value.get("jitter", 0.0))
    if isinstance(value, timedelta) or type(value) is int:
        return Backoff.fixed(value)
    raise InvalidOption("backoff", "a Backoff, whole milliseconds (int), a timedelta or {type, delay}", value)


def _delay(value: int | timedelta) -> int:
    return to_ms("backoff.delay", value, minimum=1)


def _read_ms(value: Any) -> int:
    """Whole milliseconds of a foreign number, 0 when it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        return 0
    return int(min(value, MAX_MS))


def _read_share(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        return 0.0
    return float(min(value, 1.0))


def _type_name(value: Any) -> str:
    return value[:100] if isinstance(value, str) else type(value).__name__
