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
from bullpen.queue import Queue
from bullpen.redis import Connection
from bullpen.worker import Worker

if TYPE_CHECKING:  # each needs an extra, and who has one of them has it
    from bullpen.ledger import Ledger
    from bullpen.messages import Messages

__all__ = ["QueueViews", "check_connection", "check_ledger", "check_messages", "check_workers", "collect_all"]

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
            logger.warning("metrics of %s are missing: %s", type(source).__name__, reason)
            return ()

    return [metric for found in await asyncio.gather(*(ask(source) for source in sources)) for metric in found]


def check_connection(health: Health, connection: Callable[[], Connection], needed: Callable[[], bool]) -> None:
    """Not ready while the server of the queues is away; a restart of this process would not help."""

    async def check() -> str | None:
        return None if await connection().is_healthy() else f"{connection().address} does not answer"

    health.add("redis", check, needed=needed)


def check_ledger(health: Health, ledger: Callable[[], Ledger | None]) -> None:
    """Not ready while the database does not answer or has other tables than this program needs."""

    async def check() -> str | None:
        used = ledger()
        try:
            if used is not None:
                await used.check()
        except BullpenError as error:
            return str(error)
        return None

    health.add("ledger", check, needed=lambda: ledger() is not None)


def check_messages(health: Health, messages: Messages, runs_here: Callable[[], bool]) -> None:
    """Not ready when the broker is away, when nothing is consumed, or when a run of the scheduler was missed; asked
    only where this process should do it."""

    async def check_broker() -> str | None:
        if await messages.messaging.is_healthy():
            return None
        return f"{messages.messaging.label} does not answer, or its consumer receives nothing; see the log"

    async def check_scheduler() -> str | None:
        return (await messages.health()).reason or None

    health.add("messages", check_broker, needed=runs_here)
    health.add("scheduler", check_scheduler, needed=runs_here)


def check_workers(health: Health, workers: Callable[[], Iterable[Worker]]) -> None:
    """Vital: a worker that has crashed, or whose loop or keepalive hangs, needs a new process. One that is alive is
    ready when it took or polled recently, or has a reason not to."""

    async def check_life() -> str | None:
        hung = [worker.queue_name for worker in workers() if worker.has_started and not worker.is_alive]
        return f"no answer from the workers of {', '.join(hung)}" if hung else None

    async def check_consumption() -> str | None:
        closing = [worker for worker in workers() if worker.is_closing]
        if closing:
            queues, running = ", ".join(each.queue_name for each in closing), sum(each.running for each in closing)
            jobs = "job still runs" if running == 1 else "jobs still run"
            return f"this process is shutting down: the workers of {queues} take no more jobs, {running} {jobs}"
        idle = [worker.queue_name for worker in workers() if not worker.is_ready]
        return f"the workers of {', '.join(idle)} have not taken or polled recently" if idle else None

    health.add("workers", check_life, vital=True, needed=lambda: any(True for _ in workers()))
    health.add("consumption", check_consumption, needed=lambda: any(True for _ in workers()))
