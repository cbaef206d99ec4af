"""What the jobs of a queue did in the past: counts and times in steps, added up by all processes.

In: counts since the last call. Out: counts per step of a range, by name of the job. Three tiers hold the same numbers
in steps of two minutes, a quarter of an hour and an hour, for a few hours, three days and a month; each forgets by
itself. Times are kept as a histogram whose bounds are 1, 1.5, 2, 3, 4, 6, 8, … ms, so a percentile is right to about a
sixth. It may vanish without losing a job.
Elsewhere: counting (`bullpen.worker.tally`), how it is shown (`bullpen.ops.history`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from bullpen._kernel.ids import is_encodable
from bullpen.redis.client import Connection
from bullpen.wire.keys import QueueKeys
from bullpen.wire.scripts import SCRIPTS

__all__ = [
    "DONE", "ESTIMATED", "FAILED", "MOST_NAMES", "RETRIED", "RUN", "SAMPLED", "TIERS", "WAIT", "Tier", "add_history",
    "bucket_of", "percentile", "read_history",
]  # fmt: skip

DONE: Final = 0
FAILED: Final = 1
RETRIED: Final = 2
"""Failed attempts that are tried again."""
SAMPLED: Final = 3
"""Jobs whose name and times were looked at."""
ESTIMATED: Final = 4
"""Jobs that were not counted by who ran them, but estimated from a sample."""
WAIT: Final = 8
"""The first bucket of waits, by jobs at their first attempt."""
RUN: Final = 68
"""The first bucket of run times."""
_BUCKETS: Final = 60
MOST_NAMES: Final = 51
"""Names of a queue in an hour, with the one that stands for all: further ones are `other`."""

Counts = Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Tier:
    """Steps of one length, kept for a while."""

    name: str
    step_ms: int
    period_ms: int
    """Of one key."""
    ttl_s: int

    def place(self, at_ms: int) -> tuple[int, int]:
        """The period and the slot in it."""
        return at_ms // self.period_ms, at_ms % self.period_ms // self.step_ms


_HOUR_MS: Final = 3_600_000
TIERS: Final = (
    Tier("m", 120_000, _HOUR_MS, 3 * 3_600),
    Tier("q", 900_000, 24 * _HOUR_MS, 3 * 24 * 3_600),
    Tier("h", _HOUR_MS, 24 * _HOUR_MS, 32 * 24 * 3_600),
)


def bucket_of(ms: int) -> int:
    """Of a time."""
    if ms < 1:
        return 0
    bits = ms.bit_length()
    found = 2 * bits - 1 + (bits > 1 and ms >> (bits - 2) & 1)
    return min(found, _BUCKETS - 1)


def _bounds(bucket: int) -> tuple[float, float]:
    if bucket == 0:
        return 0.0, 1.0
    low = 2.0 ** ((bucket - 1) // 2)
    return (1.5 * low, 2 * low) if bucket % 2 == 0 else (low, 1.5 * low)


def percentile(counts: Counts, first: int, share: float) -> float | None:
    """The time in ms that this share of jobs did not exceed, from buckets that begin at `first`; None of none."""
    buckets = [counts.get(first + bucket, 0) for bucket in range(_BUCKETS)]
    wanted, passed = sum(buckets) * share, 0
    if not wanted:
        return None
    for bucket, count in enumerate(buckets):
        if count and passed + count >= wanted:
            low, high = _bounds(bucket)
            return low + (high - low) * (wanted - passed) / count
        passed += count
    return None


async def add_history(connection: Connection, keys: QueueKeys, by_name: Mapping[str, Counts], at_ms: int) -> None:
    """Add counts at this instant of the server's clock. Not to be repeated when the reply is lost."""
    slots: list[str | bytes | int] = []
    names: list[str] = []
    for tier in TIERS:
        period, slot = tier.place(at_ms)
        names.append(keys.history(tier.name, period))
        slots += [slot, tier.ttl_s]
    added: list[str | bytes | int] = []
    for name, counts in by_name.items():
        flat = [part for pair in counts.items() for part in pair]
        added += [name if is_encodable(name) else "other", msgspec.msgpack.encode(flat)]
    door = connection.shared_door(keys.base)
    await door.evaluate(SCRIPTS["add_history"], names, [*slots, MOST_NAMES, *added])


async def read_history(
    connection: Connection, keys: QueueKeys, tier: Tier, since_ms: int, until_ms: int, name: str = ""
) -> tuple[dict[int, dict[int, int]], list[str]]:
    """Counts by the begin of each step, of one name or of all jobs; and the names that there are."""
    periods = range(since_ms // tier.period_ms, until_ms // tier.period_ms + 1)
    door = connection.shared_door(keys.base)
    asked = [command for period in periods for command in _questions(keys.history(tier.name, period), name)]
    replies = await door.call_many(asked)
    found: dict[int, dict[int, int]] = {}
    names: set[str] = set()
    for place, period in enumerate(periods):
        raw, known = replies[2 * place : 2 * place + 2]
        if isinstance(known, list):
            names.update(_text(each) for each in known if each)
        for slot, counts in _decoded(raw).items():
            at_ms = period * tier.period_ms + slot * tier.step_ms
            if since_ms - tier.step_ms < at_ms <= until_ms:
                found[at_ms] = counts
    return found, sorted(names)


def _questions(key: str, name: str) -> Sequence[tuple[str, ...]]:
    return ("HGET", key, name), ("HKEYS", key)


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _decoded(raw: Any) -> dict[int, dict[int, int]]:
    """What cannot be read is nothing: it is not worth an error on a page."""
    try:
        by_slot = msgspec.msgpack.decode(raw, type=dict[str, list[int]]) if isinstance(raw, bytes) else {}
        return {int(slot): dict(zip(flat[::2], flat[1::2], strict=True)) for slot, flat in by_slot.items()}
    except (msgspec.DecodeError, msgspec.ValidationError, ValueError):
        return {}
