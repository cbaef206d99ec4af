"""Measure the event loop and the memory for a worker that finds its concurrency itself.

In: a `Governor`, how many slots are in use, and what sets the number. Out: the number, once it changes. A timer that
fires late is the measure: everything else on the loop waits for as long. Elsewhere: deciding (`auto`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from bullpen._kernel import telemetry
from bullpen._kernel.logs import get_logger
from bullpen._kernel.memory import memory_share
from bullpen.worker.auto import Governor, Observed

logger = get_logger("bullpen.worker")

_EVERY_S: Final = 0.1
_SAMPLES: Final = 5
"""Per decision: one job that blocks the loop for a moment is no trend."""


class Adapter:
    """Of one worker, on its loop."""

    def __init__(
        self, queue: str, governor: Governor, in_use: Callable[[], int], resize: Callable[[int], None]
    ) -> None:
        self._queue, self._governor, self._in_use, self._resize = queue, governor, in_use, resize
        self._loop = asyncio.get_running_loop()
        self._lags_ms: list[float] = []
        self._most_in_use = 0
        self._timer = self._plan()

    def close(self) -> None:
        """Measure no more. Safe to call twice."""
        self._timer.cancel()

    def _plan(self) -> asyncio.TimerHandle:
        self._due = self._loop.time() + _EVERY_S
        return self._loop.call_at(self._due, self._sample)

    def _sample(self) -> None:
        self._lags_ms.append(max(0.0, self._loop.time() - self._due) * 1000)
        self._most_in_use = max(self._most_in_use, self._in_use())
        if len(self._lags_ms) == _SAMPLES:
            self._decide()
        self._timer = self._plan()

    def _decide(self) -> None:
        lag_ms, most_in_use = sum(self._lags_ms) / _SAMPLES, self._most_in_use
        self._lags_ms.clear()
        self._most_in_use = 0
        if not most_in_use:  # an idle worker reads no files
            return
        seen, before = Observed(lag_ms, memory_share(), most_in_use), self._governor.size
        reason = self._governor.next(seen)
        if reason is None:
            return
        size = self._governor.size
        self._resize(size)
        telemetry.emit("worker.concurrency", queue=self._queue, concurrency=size, before=before, reason=str(reason))
        logger.debug(
            "queue %r: concurrency %d -> %d (%s; the loop is %.0f ms late, %s of the memory is in use)",
            *(self._queue, before, size, reason, lag_ms),
            "an unknown share" if seen.memory is None else f"{seen.memory:.0%}",
        )
