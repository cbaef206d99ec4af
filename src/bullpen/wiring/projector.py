"""The projector of an application: which event store it reads, what it counts, when it is well.

In: settings, ledger, routes. Out: a service for `run` around a `Projector`, its metrics and its health check.
Elsewhere: projecting (`bullpen.outbox.projector`), the event stores (`bullpen.plugins.sources`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Final

from bullpen._kernel.service import BaseService
from bullpen.ledger import Ledger
from bullpen.ledger.late_wakeups import noting_late_wakeups
from bullpen.outbox import EventRoutes, Projector, ProjectorMetrics, ProjectorOptions
from bullpen.plugins.sources.sql import SqlEvents
from bullpen.ports.source import EventSource
from bullpen.settings import Settings

__all__ = ["ProjectorService", "make_projector", "make_source"]


def make_source(settings: Settings, ledger: Ledger) -> EventSource:
    """The configured event store, else the ledger's own."""
    chosen = settings.events
    if chosen.connection_string is None:
        return SqlEvents(ledger, prefixes=chosen.prefixes)
    from bullpen.plugins.sources.kurrent import KurrentSource

    return KurrentSource(chosen.connection_string, prefixes=chosen.prefixes, group=chosen.subscription_group)


def make_projector(
    settings: Settings,
    ledger: Ledger,
    prepare: Callable[[], Awaitable[None]],
    routes: EventRoutes,
    source: EventSource | None,
    name: str,
    options: ProjectorOptions | None,
) -> ProjectorService:
    """A projector that has not begun yet. A source that was given belongs to whoever gave it."""
    made = source or make_source(settings, ledger)
    projector = Projector(ledger, made, routes, name=name, options=options, prepare=prepare)
    return ProjectorService(projector, None if source is not None else made)


class ProjectorService(BaseService):
    """Runs a projector, and lets go of its event store afterwards."""

    role: Final = "projector"

    def __init__(self, projector: Projector, own_source: EventSource | None) -> None:
        super().__init__(f"projector {projector.name!r} of the app")
        self.projector, self._own_source = projector, own_source
        self._noting = AsyncExitStack()

    @property
    def metrics(self) -> ProjectorMetrics:
        return ProjectorMetrics(self.projector)

    async def check(self) -> str | None:
        """Not ready while the event store or the database does not answer; a restart of this process would not help."""
        if self.projector.state == "waiting":
            return f"{self.projector.source.name} or the ledger does not answer"
        return None

    async def _begin(self) -> None:
        await self._noting.enter_async_context(noting_late_wakeups(self.projector.ledger, "projector"))
        await self._host(self.projector)

    async def _end(self) -> None:
        await self._noting.aclose()
        if self._own_source is not None:
            await self._own_source.aclose()
