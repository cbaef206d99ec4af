"""What an application shows of itself: health and metrics.

In: metric sources and checks of the parts that the app uses. Out: one page of numbers and one answer to probes; what
listens to events is closed with the app. Elsewhere: the checks (`ops`), the numbers (`bullpen.ops`), serving both
(`bullpen.http.ops`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from bullpen.ports.metrics import Metric, MetricSource
from bullpen.queue import Queue
from bullpen.wiring.resources import Resources

if TYPE_CHECKING:  # loaded when it is first used
    from bullpen.ops.health import Health
    from bullpen.wiring.ops import QueueViews
    from bullpen.worker import Worker

__all__ = ["ListeningSource", "Observing"]


class ListeningSource(MetricSource, Protocol):
    """Counts events, until it is closed."""

    def close(self) -> None: ...


class Observing:
    """Health and metrics of one app."""

    def __init__(
        self, resources: Resources, workers_here: Callable[[], Iterable[Worker]], needs_redis: Callable[[], bool]
    ) -> None:
        """`workers_here` are those that run in this process; `needs_redis`: whether a part here uses the server."""
        self._resources, self._workers_here, self._needs_redis = resources, workers_here, needs_redis
        self._sources: list[MetricSource] = []
        self._listening: list[ListeningSource] = []
        self._health: Health | None = None
        self._views: QueueViews | None = None

    def add(self, source: MetricSource) -> None:
        """Show these too."""
        self._sources.append(source)

    def add_listening(self, source: ListeningSource) -> None:
        """The same for one that is closed in the end."""
        self._sources.append(source)
        self._listening.append(source)

    @property
    def health(self) -> Health:
        if self._health is None:
            from bullpen.ops.health import Health
            from bullpen.wiring.ops import check_connection, check_ledger, check_workers

            self._health = Health()
            check_connection(self._health, lambda: self._resources.connection, self._needs_redis)
            check_ledger(self._health, lambda: self._resources.made_ledger)
            check_workers(self._health, self._workers_here)
        return self._health

    def observe(self, queues: Callable[[], Iterable[str]], tasks: Callable[[], Mapping[str, tuple[str, ...]]]) -> None:
        """Let metrics also show these queues, and the workers. From then on each job costs a little more."""
        if self._views is not None:
            return
        from bullpen.ops.metrics import LateWakeups, QueueMetrics, WorkerMetrics
        from bullpen.wiring.ops import QueueViews

        opened = self._resources
        self._views = QueueViews(queues, lambda name: Queue(name, connection=opened.connection, prefix=opened.prefix))
        self.add_listening(WorkerMetrics(self._workers_here, tasks))
        self.add(LateWakeups())
        self.add(QueueMetrics(self._views))

    async def collect(self) -> list[Metric]:
        """What all parts count, under the names that dashboards know."""
        from bullpen.wiring.ops import collect_all

        return await collect_all(self._sources)

    async def aclose(self) -> None:
        if self._views is not None:
            await self._views.aclose()
        for listening in self._listening:
            listening.close()
