"""Tell the server every few seconds what the workers of this process do, and add what their jobs did to the history.

In: the workers of an app. Out: a beat per process and queue, and counts in `bullpen.queue.history`. It never disturbs a
worker: a server that is away is asked again at the next beat, and the numbers of meanwhile are kept. A reply that is
lost may count the jobs of one beat twice; a process that is killed takes the last seconds with it.
Elsewhere: counting (`bullpen.worker.tally`), reading (`bullpen.ops.history`).
"""

from __future__ import annotations

import asyncio
import os
import platform
import secrets
import socket
from collections.abc import Callable, Iterable
from typing import Final

from bullpen import _version
from bullpen._kernel.logs import get_logger
from bullpen._kernel.service import BaseService
from bullpen.errors import BullpenError
from bullpen.queue.beats import BEAT_EVERY_S, Beat, BeatJob, BeatWorker, end_beat, write_beat
from bullpen.queue.history import add_history
from bullpen.worker import Worker
from bullpen.worker.tally import Counts, Tally

__all__ = ["Recorder"]

logger = get_logger("bullpen.recorder")

_MOST_JOBS: Final = 10
_END_WITHIN_S: Final = 2.0


class Recorder(BaseService):
    """Of one process. Made before its workers start."""

    uses_redis: Final = True
    ends_last: Final = True
    """The last jobs count too."""

    def __init__(self, workers: Callable[[], Iterable[Worker]], *, every_s: float = BEAT_EVERY_S) -> None:
        super().__init__("recorder")
        self._workers, self._every_s = workers, every_s
        self._machine = socket.gethostname()[:100]
        self._process = f"{self._machine}-{os.getpid()}-{secrets.token_hex(3)}"
        self._started_ms: int | None = None
        self._kept: dict[str, dict[str, Counts]] = {}
        """Of queues whose server was away."""
        self._is_away = False
        for worker in self._mine():
            worker.tally = Tally()

    def _mine(self) -> list[Worker]:
        return list(self._workers())

    async def _work(self) -> None:
        while not self._closing.is_set():
            await self.beat()
            try:
                await asyncio.wait_for(self._closing.wait(), self._every_s)
            except TimeoutError:
                continue

    async def _end(self) -> None:
        if self._started_ms is None:  # it never worked
            return
        try:
            async with asyncio.timeout(_END_WITHIN_S):
                await self.beat()
                for worker in self._mine():
                    await end_beat(worker.connection, worker.keys, self._process)
        except (BullpenError, OSError, TimeoutError) as error:
            logger.info("the end of this process could not be told: %s", error)

    async def beat(self) -> None:
        """Tell everything now."""
        problem: Exception | None = None
        by_queue: dict[str, list[Worker]] = {}
        for worker in self._mine():
            if worker.tally is not None:  # one that was added while the app ran is not recorded
                by_queue.setdefault(worker.queue_name, []).append(worker)
        for queue, workers in by_queue.items():
            try:
                await self._tell(queue, workers)
            except Exception as error:  # noqa: BLE001 - logged below: a mistake in here must stop no worker
                problem = error
        if problem is not None and not self._is_away:
            logger.warning("history and state of the workers cannot be stored now: %s", problem)
        self._is_away = problem is not None

    async def _tell(self, queue: str, workers: list[Worker]) -> None:
        connection, keys = workers[0].connection, workers[0].keys
        counts = self._kept.setdefault(queue, {})
        for worker in workers:
            if worker.tally is not None:
                _add(counts, worker.tally.take())
        now_ms = connection.clock.now_ms()
        if self._started_ms is None:
            self._started_ms = now_ms
        await write_beat(connection, keys, self._beat_of(workers, now_ms))
        if counts:
            await add_history(connection, keys, counts, now_ms)
            self._kept[queue] = {}

    def _beat_of(self, workers: list[Worker], now_ms: int) -> Beat:
        told, lag_s = [], 0.0
        for worker in workers:
            activity = worker.activity()
            lag_s = max(lag_s, activity.lag_s)
            told.append(
                BeatWorker(
                    name=worker.name,
                    slots=worker.concurrency,
                    running=worker.running,
                    asked_ms=None if activity.asked_s is None else round(activity.asked_s * 1000),
                    is_paused=worker.is_paused,
                    locks_lost=0 if worker.tally is None else worker.tally.locks_lost,
                    jobs=tuple(BeatJob(job.id, job.name[:200], job.processed_on) for job in activity.jobs[:_MOST_JOBS]),
                )
            )
        return Beat(
            process=self._process,
            host=self._machine,
            pid=os.getpid(),
            language=f"Python {platform.python_version()}",
            library=f"bullpen {_version.__version__}",
            started_ms=self._started_ms or now_ms,
            at_ms=now_ms,
            lag_ms=round(lag_s * 1000),
            workers=tuple(told),
        )


def _add(to: dict[str, Counts], more: dict[str, Counts]) -> None:
    for name, counts in more.items():
        kept = to.setdefault(name, {})
        for place, count in counts.items():
            kept[place] = kept.get(place, 0) + count
