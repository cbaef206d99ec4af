"""What an application counts and checks of itself.

In: an app's workers, queues and connection. Out: metric sources and health checks. Elsewhere: the numbers and checks
themselves (`bullpen.ops`), serving them (`bullpen.http.ops`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from bullpen._kernel.logs import get_logger
from bullpen._kernel.scrub import scrub
from bullpen.errors import BullpenError
from bullpen.ops.health import Health
from bullpen.ports.metrics import Metric, MetricSource
from bullpen.queue import Connection, Queue, Worker

if TYPE_CHECKING:  # each needs an extra, and who has one of them has it
    from bullpen.ledger import Ledger
    from bullpen.messages import Messages

__all__ = ["QueueViews", "check_connection", "check_ledger", "check_scheduler", "check_workers", "collect_all"]

logger = get_logger("bullpen.metrics")


class QueueViews:
    """One queue object per name, for looking only: the program's own may have defaults and be closed at any time."""

    def __init__(self, names: Callable[[], Iterable[str]], open_queue: Callable[[str], Queue]) -> None:
        self._names, self._open_queue = names, open_queue
        self._queues: dict[str, Queue] = {}

    def __call__(self) -> Iterator[Queue]:
        for name in sorted(set(self._names())):
            if name not in self._queues:
                self._queues[name] = self._open_queue(name)
            yield self._queues[name]

    async def aclose(self) -> None:
        for queue in self._queues.values():
            await queue.close()


async def collect_all(sources: Iterable[MetricSource], *, timeout_s: float = 5.0) -> list[Metric]:
    """What all of them count. One that cannot say it in time is left out and told of: the page is needed most when
    something is away."""

    async def ask(source: MetricSource) -> Sequence[Metric]:
        try:
            async with asyncio.timeout(timeout_s):
                return await source.collect()
        except (BullpenError, OSError) as error:  # TimeoutError is one
            reason = scrub(str(error)) or f"no answer within {timeout_s:g} s"
            logger.warning("numbers of %s are missing: %s", type(source).__name__, reason)
            return ()

    return [metric for found in await asyncio.gather(*(ask(source) for source in sources)) for metric in found]


def check_connection(health: Health, connection: Callable[[], Connection]) -> None:
    """Not ready while the server of the queues is away; a restart of this process would not help."""

    async def check() -> str | None:
        return None if await connection().is_healthy() else f"{connection().address} does not answer"

    health.add("redis", check)


def check_ledger(health: Health, ledger: Ledger) -> None:
    """Not ready while the database is away, or has other tables than this program needs."""

    async def check() -> str | None:
        try:
            await ledger.check()
        except BullpenError as error:
            return str(error)
        return None

    health.add("ledger", check)


def check_scheduler(health: Health, messages: Messages, runs_here: Callable[[], bool]) -> None:
    """Not ready when a run of the scheduler was missed; asked only where this process should have made it."""

    async def check() -> str | None:
        return (await messages.health()).reason or None if runs_here() else None

    health.add("scheduler", check)


def check_workers(health: Health, workers: Callable[[], Iterable[Worker]]) -> None:
    """Vital: a worker that neither takes nor polls is hung, and its process should be started again."""

    async def check() -> str | None:
        hung = [worker.queue_name for worker in workers() if not worker.is_alive]
        return f"no sign of life from the workers of {', '.join(hung)}" if hung else None

    health.add("workers", check, vital=True)
