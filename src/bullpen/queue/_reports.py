"""What a worker tells: callbacks of the program, and telemetry.

In: an event's name and details. Out: every callback called; what one raises is logged and harms no job.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from typing import Any, Final, Literal, TypeVar

from bullpen._kernel import telemetry
from bullpen.errors import InvalidOption
from bullpen.queue.job import Job

logger = logging.getLogger("bullpen.worker")

WorkerEvent = Literal["active", "completed", "failed", "retrying", "stalled", "lock_lost", "returned", "error"]
_EVENTS: Final[frozenset[str]] = frozenset(
    {"active", "completed", "failed", "retrying", "stalled", "lock_lost", "returned", "error"}
)
Callback = TypeVar("Callback", bound=Callable[..., Any])


class Reports:
    """The listeners of one worker."""

    def __init__(self, queue: str, worker: str) -> None:
        self._queue, self._worker = queue, worker
        self._callbacks: dict[str, list[Callable[..., Any]]] = {}
        self._pending: set[asyncio.Future[Any]] = set()

    def on(self, event: str, callback: Callback) -> Callback:
        if event not in _EVENTS:
            raise InvalidOption("event", f"one of {', '.join(sorted(_EVENTS))}", event)
        self._callbacks.setdefault(event, []).append(callback)
        return callback

    def are_wanted(self, event: WorkerEvent) -> bool:
        """False when nobody listens to this: the hot path then tells nothing."""
        return event in self._callbacks or telemetry.is_enabled()

    def is_called(self, event: WorkerEvent) -> bool:
        """True when the program itself listens, not only telemetry: worth making values ready."""
        return event in self._callbacks

    def tell(self, event: WorkerEvent, *details: Any) -> None:
        if telemetry.is_enabled():
            subject = details[0] if details else None
            telemetry.emit(
                "worker.error" if event == "error" else f"job.{event}",
                queue=self._queue,
                worker=self._worker,
                job_id=subject.id if isinstance(subject, Job) else subject if isinstance(subject, str) else None,
                details=details,
            )
        for callback in self._callbacks.get(event, ()):
            try:
                result = callback(*details)
                if result is not None and inspect.isawaitable(result):
                    task = asyncio.ensure_future(result)
                    self._pending.add(task)
                    task.add_done_callback(self._done)
            except Exception:
                logger.exception("callback for %r of queue %r failed", event, self._queue)

    def tell_error(self, error: BaseException) -> None:
        logger.error("queue %r: %s", self._queue, error)
        self.tell("error", error)

    async def drain(self, timeout_s: float) -> None:
        """Let async callbacks end."""
        if self._pending:
            await asyncio.wait(self._pending, timeout=timeout_s)

    def _done(self, task: asyncio.Future[Any]) -> None:
        self._pending.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("callback of queue %r failed", self._queue, exc_info=task.exception())
