"""The numbers of one projector. Counters are what this process did; gauges are asked of database and event store."""

from __future__ import annotations

from typing import Final

from bullpen.outbox.projector import Projector
from bullpen.ports.metrics import Kind, Metric, Sample

_HELP: Final[dict[str, tuple[Kind, str]]] = {
    "outbox_projected_total": ("counter", "Events that were turned into rows or passed over."),
    "outbox_enqueued_total": ("counter", "Rows that the projector stored."),
    "outbox_duplicate_total": ("counter", "Rows that existed already."),
    "outbox_parked_events": ("gauge", "Parked events, which need a person."),
    "outbox_projector_lag": ("gauge", "Distance to the newest event, in positions of the event store."),
    "outbox_projector_behind_seconds": ("gauge", "Age of the newest event that was handled, while there are more."),
}


class ProjectorMetrics:
    """Asks one projector."""

    def __init__(self, projector: Projector) -> None:
        self._projector = projector

    async def collect(self) -> list[Metric]:
        """All metrics now. A lag that nobody knows is left out."""
        done, status = self._projector.projected, await self._projector.status()
        values: dict[str, float | None] = {
            "outbox_projected_total": done.events,
            "outbox_enqueued_total": done.created,
            "outbox_duplicate_total": done.duplicates,
            "outbox_parked_events": status.parked,
            "outbox_projector_lag": status.lag,
            "outbox_projector_behind_seconds": self._projector.behind_s,
        }
        labels = {"projector": self._projector.name}
        return [
            Metric(name, kind, text, [] if (value := values[name]) is None else [Sample(labels, value)])
            for name, (kind, text) in _HELP.items()
        ]
