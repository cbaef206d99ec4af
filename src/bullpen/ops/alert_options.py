"""From when on something is a symptom, and when people hear of it.

In: numbers, from code or from settings (`alerts`). Out: checked options. Elsewhere: finding symptoms (`symptoms`), what
happens to an incident (`incidents`), who is alerted (`bullpen.settings`).
"""

from __future__ import annotations

from dataclasses import dataclass

from bullpen._kernel.options import at_least, check_options, option

__all__ = ["AlertTiming", "SymptomLimits"]


@dataclass(frozen=True, kw_only=True)  # without slots: settings inherit both
class SymptomLimits:
    """From when on something is a symptom; 0: never."""

    dead_letters: int = option(1, at_least(0))
    """Number of dead letters in one queue, dead rows in the outbox, or parked events."""
    queue_late_ms: int = option(300_000, at_least(0))
    """The next job of a queue has waited this long."""
    no_worker_ms: int = option(120_000, at_least(0))
    """The next job of a queue has waited this long, and no worker of any client is connected."""
    outbox_late_ms: int = option(300_000, at_least(0))
    """Rows of the outbox were due this long ago and are not claimed."""
    outbox_claimed_ms: int = option(300_000, at_least(0))
    """The lease of claimed rows ended this long ago, and no dispatcher has taken them back."""
    endpoints_off: int = option(1, at_least(0))
    """Number of endpoints of tenants that were switched off within a day: they are gone, or refuse everything."""
    scheduler_late_ms: int = option(300_000, at_least(0))
    """Messages were due this long ago and are not queued."""
    run_stuck_ms: int = option(900_000, at_least(0))
    """Unfinished runs have had no progress for this long."""

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, kw_only=True)
class AlertTiming:
    """When an incident is reported, reported again, and over."""

    repeat_ms: int = option(14_400_000, at_least(1))
    """An open incident is reported again after this time."""
    resolve_after_ms: int = option(120_000, at_least(0))
    """An incident is closed when its symptom was absent for this time."""
    hold_ms: int = option(60_000, at_least(0))
    """An unreachable server is reported after this time: restarts and failovers are no incidents."""
    growth: int = option(100, at_least(1))
    """Dead letters and dead rows are reported again when their number has grown by this many."""

    def __post_init__(self) -> None:
        check_options(self)
