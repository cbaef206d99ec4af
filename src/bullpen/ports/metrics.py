"""Numbers as plain records, whoever counts them.

In: what a feature counted. Out: metrics with samples, for whoever shows them. Elsewhere: formats and pages
(`bullpen.ops`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

__all__ = ["Kind", "Metric", "MetricSource", "Sample"]

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


class MetricSource(Protocol):
    """Something that counts."""

    async def collect(self) -> Sequence[Metric]:
        """All its metrics now."""
        ...
