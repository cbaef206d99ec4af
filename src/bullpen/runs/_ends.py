"""Callers that wait for the end of a run are notified by the events of its queue.

In: ids of runs. Out: a level that is set when something ended their job. One reader for all waits of a service, while
there are any. Elsewhere: the state of the run (`service`, which reads the ledger).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

from bullpen._kernel.logs import get_logger
from bullpen.errors import BullpenError
from bullpen.queue import Queue, QueueEvents

logger = get_logger("bullpen.runs")

_ENDS: Final = frozenset({"cancelled", "completed", "failed", "removed"})


class RunEnds:
    """The ends of the jobs of one queue."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._waiting: dict[str, list[asyncio.Event]] = {}
        self._reading: asyncio.Task[None] | None = None
        self._is_listening = asyncio.Event()

    @contextlib.asynccontextmanager
    async def of(self, run_id: str) -> AsyncIterator[asyncio.Event]:
        """Set whenever the job of this run has come to an end; nothing is missed from here on."""
        ended = asyncio.Event()
        self._waiting.setdefault(run_id, []).append(ended)
        try:
            if self._reading is None:
                self._is_listening.clear()
                self._reading = asyncio.create_task(self._read(), name=f"bullpen ends {self._queue.name}")
            await self._is_listening.wait()
            yield ended
        finally:
            waits = self._waiting[run_id]
            waits.remove(ended)
            if not waits:
                del self._waiting[run_id]
            if not self._waiting:
                await self.aclose()

    async def aclose(self) -> None:
        """Stop reading. Callers that still wait poll the ledger."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.cancel()
            await asyncio.wait([reading])

    async def _read(self) -> None:
        queue = self._queue
        events = QueueEvents(queue.name, connection=queue.connection, prefix=queue.keys.prefix)
        try:
            async with events:
                self._is_listening.set()
                while True:
                    lost, page = await events.page()
                    if not page and not lost:
                        return
                    told = self._waiting if lost else {one.job_id for one in page if one.event in _ENDS}
                    for run_id in [run_id for run_id in told if run_id in self._waiting]:
                        for ended in self._waiting[run_id]:
                            ended.set()
        except BullpenError as error:
            logger.warning("ends of runs are found only by polling the ledger: %s", error)
        finally:
            self._is_listening.set()
