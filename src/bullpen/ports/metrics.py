"""Numbers as plain records, whoever counts them.

In: what a feature counted. Out: metrics with samples, for whoever shows them. Elsewhere: formats and pages
(`bullpen.ops`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

__all__ = ["Histogram", "Kind", "Metric", "MetricSource", "Sample"]

Kind = Literal["gauge", "counter", "histogram"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One value, with its labels; for a histogram the counts per upper bound, their sum and number."""

    labels: Mapping[str, str]
    value: float
    buckets: Sequence[tuple[float, int]] = ()
    count: int = 0


@dataclass(frozen=True, slots=True)
class Metric:
    """A name, what it is, and its samples."""

    name: str
    kind: Kind
    help: str
    samples: Sequence[Sample]


class Histogram:
    """Counts values by upper bounds."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def sample(self, labels: Mapping[str, str]) -> Sample:
        cumulative, buckets = 0, []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            cumulative += count
            buckets.append((bound, cumulative))
        return Sample(labels, self._sum, tuple(buckets), cumulative)


class MetricSource(Protocol):
    """Something that counts."""

    async def collect(self) -> Sequence[Metric]:
        """All its metrics now."""
        ...
