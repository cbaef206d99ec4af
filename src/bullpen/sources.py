"""Where domain events come from: the ledger's own event log, KurrentDB, and what a source of one's own needs.

    from bullpen.sources import SqlEvents

Each source is loaded when it is first named, and with it its driver (the extras `postgres`, `sqlite` and `kurrent`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bullpen._kernel.lazy import lazy

if TYPE_CHECKING:
    from bullpen.plugins.sources.kurrent import KurrentSource
    from bullpen.plugins.sources.sql import SqlEvents
    from bullpen.ports.source import (
        BEGINNING,
        NO_STREAM,
        EventBatch,
        EventFilter,
        EventMetadata,
        EventSource,
        NewEvent,
        SourceEvent,
        SourceHealth,
    )

__all__ = [
    "BEGINNING",
    "NO_STREAM",
    "EventBatch",
    "EventFilter",
    "EventMetadata",
    "EventSource",
    "KurrentSource",
    "NewEvent",
    "SourceEvent",
    "SourceHealth",
    "SqlEvents",
]

_HOMES: Final = {
    "bullpen.plugins.sources.kurrent": ("KurrentSource",),
    "bullpen.plugins.sources.sql": ("SqlEvents",),
    "bullpen.ports.source": (
        *("BEGINNING", "EventBatch", "EventFilter", "EventMetadata", "EventSource", "NO_STREAM", "NewEvent"),
        *("SourceEvent", "SourceHealth"),
    ),
}

# Hidden from type checkers, which would otherwise believe that every name exists.
if not TYPE_CHECKING:
    __getattr__ = lazy(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
