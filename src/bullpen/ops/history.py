"""The past of a queue as charts show it: throughput, failures, retries, and percentiles of waits and run times.

In: a queue, perhaps the name of its jobs, and a range. Out: one point per step. Numbers of a name come from the jobs
that were looked at when a worker had too many to look at all, and those of other clients from a sample: both say so.
Elsewhere: how it is stored (`bullpen.queue.history`), who records (`recorder`, `estimates`), marks (`marks`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from bullpen.errors import InvalidOption
from bullpen.ops.marks import ChartMark, read_marks
from bullpen.queue.history import (
    DONE,
    ESTIMATED,
    FAILED,
    RETRIED,
    RUN,
    SAMPLED,
    TIERS,
    WAIT,
    Tier,
    percentile,
    read_history,
)
from bullpen.redis import Connection
from bullpen.wire.keys import QueueKeys

__all__ = ["RANGES", "HistoryPoint", "HistoryView", "Times", "history_view", "range_of"]

_HOUR_MS: Final = 3_600_000
RANGES: Final[dict[str, tuple[int, Tier, int]]] = {
    "1h": (_HOUR_MS, TIERS[0], 120_000),
    "24h": (24 * _HOUR_MS, TIERS[1], 900_000),
    "7d": (7 * 24 * _HOUR_MS, TIERS[2], 2 * _HOUR_MS),
    "30d": (30 * 24 * _HOUR_MS, TIERS[2], 6 * _HOUR_MS),
}
"""How far back, from which tier, in steps of what length."""


class Times(msgspec.Struct, rename="camel", frozen=True):
    """Percentiles in ms; None where no job was looked at."""

    p50: float | None
    p95: float | None
    p99: float | None


class HistoryPoint(msgspec.Struct, rename="camel", frozen=True):
    """One step."""

    at_ms: int
    """Its begin."""
    done: int
    failed: int
    retried: int
    wait: Times
    run: Times
    sampled: int
    """Jobs whose times were looked at."""


class HistoryView(msgspec.Struct, rename="camel", frozen=True):
    """A queue, or the jobs of one name in it, over a range."""

    queue: str
    name: str
    range: str
    step_ms: int
    since_ms: int
    until_ms: int
    names: tuple[str, ...]
    points: tuple[HistoryPoint, ...]
    """Every step, those in which nothing happened too."""
    done: int
    failed: int
    retried: int
    wait: Times
    run: Times
    estimated_from: int | None
    """Of how many jobs the numbers were made; None: all were counted."""
    marks: tuple[ChartMark, ...]


def range_of(text: str) -> str:
    """A range that there is. Raises InvalidOption."""
    if text not in RANGES:
        raise InvalidOption("range", f"one of {', '.join(RANGES)}", text)
    return text


async def history_view(
    connection: Connection, keys: QueueKeys, marks_of: QueueKeys, *, over: str = "1h", name: str = ""
) -> HistoryView:
    """Read it: a bounded number of constant reads, however many jobs there were."""
    length, tier, step = RANGES[range_of(over)]
    seconds, micros = await connection.shared_door(keys.base).call("TIME")
    now_ms = int(seconds) * 1000 + int(micros) // 1000
    until = now_ms // step * step
    since = until - length + step
    found, names = await read_history(connection, keys, tier, since, now_ms, name)
    if name:
        overall, _ = await read_history(connection, keys, tier, since, now_ms)
        found = {at: _scaled(counts, overall.get(at, {})) for at, counts in found.items()}
    by_step: dict[int, dict[int, int]] = {}
    for at_ms, counts in found.items():
        _add(by_step.setdefault(at_ms // step * step, {}), counts)
    total: dict[int, int] = {}
    for counts in by_step.values():
        _add(total, counts)
    ended = sum(total.get(each, 0) for each in (DONE, FAILED, RETRIED))
    is_exact = not total.get(ESTIMATED) and (not name or total.get(SAMPLED, 0) >= ended)
    return HistoryView(
        queue=keys.name,
        name=name,
        range=over,
        step_ms=step,
        since_ms=since,
        until_ms=now_ms,
        names=tuple(each for each in names if each),
        points=tuple(_point(at_ms, by_step.get(at_ms, {})) for at_ms in _steps(since, until, step)),
        done=total.get(DONE, 0),
        failed=total.get(FAILED, 0),
        retried=total.get(RETRIED, 0),
        wait=_times(total, WAIT),
        run=_times(total, RUN),
        estimated_from=None if is_exact else total.get(SAMPLED, 0),
        marks=await read_marks(connection, marks_of, since),
    )


def _steps(since: int, until: int, step: int) -> list[int]:
    return [since + step * place for place in range((until - since) // step + 1)]


def _scaled(counts: Mapping[int, int], overall: Mapping[int, int]) -> dict[int, int]:
    """The jobs of a name stand for those that nobody looked at."""
    found = dict(counts)
    for each in (DONE, FAILED, RETRIED):
        there, looked_at = overall.get(each, 0), overall.get(SAMPLED, 0)
        ended = sum(overall.get(one, 0) for one in (DONE, FAILED, RETRIED))
        if counts.get(each) and there and looked_at and looked_at < ended and not overall.get(ESTIMATED):
            found[each] = min(there, round(counts[each] * ended / looked_at))
    return found


def _add(to: dict[int, int], more: Mapping[int, int]) -> None:
    for place, count in more.items():
        to[place] = to.get(place, 0) + count


def _point(at_ms: int, counts: Mapping[int, int]) -> HistoryPoint:
    return HistoryPoint(
        at_ms=at_ms,
        done=counts.get(DONE, 0),
        failed=counts.get(FAILED, 0),
        retried=counts.get(RETRIED, 0),
        wait=_times(counts, WAIT),
        run=_times(counts, RUN),
        sampled=counts.get(SAMPLED, 0),
    )


def _times(counts: Mapping[int, int], first: int) -> Times:
    found = [percentile(counts, first, share) for share in (0.5, 0.95, 0.99)]
    return Times(*(None if each is None else round(each, 1) for each in found))
