"""From when on something is a symptom, and when people hear of it.

In: numbers, from code or from settings (`alerts`). Out: checked options. Elsewhere: finding symptoms (`symptoms`), what
becomes of an incident (`incidents`), who is alerted (`bullpen.settings`).
"""

from __future__ import annotations

from dataclasses import dataclass

from bullpen._kernel.options import at_least, check_options, option

__all__ = ["AlertTiming", "SymptomLimits"]


@dataclass(frozen=True, kw_only=True)  # without slots: settings inherit both
class SymptomLimits:
    """From when on something is a symptom; 0: never."""

    dead_letters: int = option(1, at_least(0))
    """So many dead letters in one queue, dead rows in the outbox, or parked events."""
    queue_late_ms: int = option(300_000, at_least(0))
    """The next job of a queue waits so long."""
    no_worker_ms: int = option(120_000, at_least(0))
    """The next job of a queue waits so long, and no worker of any client is connected."""
    outbox_late_ms: int = option(300_000, at_least(0))
    """Rows of the outbox were due so long ago, and nobody has claimed them."""
    outbox_claimed_ms: int = option(300_000, at_least(0))
    """The lease of claimed rows ran out so long ago, and nobody has taken them back."""
    scheduler_late_ms: int = option(300_000, at_least(0))
    """Messages were due so long ago and are not queued."""
    run_stuck_ms: int = option(900_000, at_least(0))
    """Runs have not ended, and nobody has touched them for so long."""

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, kw_only=True)
class AlertTiming:
    """When an incident is reported, reported again, and over."""

    repeat_ms: int = option(14_400_000, at_least(1))
    """An incident that lasts is reported again after so long."""
    resolve_after_ms: int = option(120_000, at_least(0))
    """It is over when no symptom of it was seen for so long."""
    hold_ms: int = option(60_000, at_least(0))
    """A server that is away is reported after so long: restarts and failovers are no incidents."""
    growth: int = option(100, at_least(1))
    """Dead letters and dead rows are reported again when there are so many more than at the last time."""

    def __post_init__(self) -> None:
        check_options(self)
