"""A number of things per time, as queues and channels are limited by. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

from bullpen._kernel.duration import check_int

__all__ = ["RateLimit"]


@dataclass(frozen=True, slots=True)
class RateLimit:
    """At most `max` jobs started per `duration_ms`, over all workers of the queue that say so."""

    max: int
    duration_ms: int

    def __post_init__(self) -> None:
        check_int("limit.max", self.max, minimum=1)
        check_int("limit.duration_ms", self.duration_ms, minimum=1)
