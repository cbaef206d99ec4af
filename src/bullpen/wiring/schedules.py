"""Keep the schedulers of an app's tasks as its code declares them.

In: the queues of tasks, and which schedulers each declares. Out: stored once at the start of a process that works on
them: changed ones are updated, unchanged ones untouched, and those that the code no longer declares are reported, or
removed on request. Elsewhere: storing them (`bullpen.queue.schedulers`), declaring them (`bullpen.queue.tasks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager
from typing import Final

from bullpen._kernel.logs import get_logger
from bullpen._kernel.patience import Patience
from bullpen._kernel.service import BaseService
from bullpen.errors import ConnectionLost
from bullpen.queue import Queue
from bullpen.queue.schedulers import Reconciled
from bullpen.queue.tasks import TaskSet

logger = get_logger("bullpen.app")

_AGAIN_S: Final = 1.0


class ScheduleService(BaseService):
    """Reconciles once, as soon as the server answers, and then has nothing to do until it is closed."""

    uses_redis: Final = True

    def __init__(
        self,
        task_sets: Callable[[], Iterable[TaskSet]],
        open_queue: Callable[[str], AbstractAsyncContextManager[Queue]],
    ) -> None:
        super().__init__("schedules of tasks")
        self._task_sets, self._open_queue = task_sets, open_queue
        self.prune = False
        """Remove what the code no longer declares."""

    async def _work(self) -> None:
        patience = Patience(first_s=_AGAIN_S, longest_s=_AGAIN_S)
        while not self._closing.is_set():
            try:
                await self.reconcile(prune=self.prune)
                return
            except ConnectionLost as error:
                # The workers of the same app wait for the server too, and say so.
                logger.debug("schedules will be reconciled later: %s", error)
                await patience.pause(unless=self._closing)

    async def reconcile(self, *, prune: bool) -> dict[str, Reconciled]:
        """All queues of tasks, by name."""
        done = {}
        for tasks in self._task_sets():
            async with self._open_queue(tasks.queue) as queue:
                found = done[tasks.queue] = await queue.reconcile_schedulers(tasks.schedules, prune=prune)
            for scheduler_id in found.changed:
                logger.info("queue %r: schedule %r was stored as declared in the code", tasks.queue, scheduler_id)
            for scheduler_id in found.stale:
                if prune:
                    logger.info("queue %r: schedule %r was removed: no task declares it", tasks.queue, scheduler_id)
                else:
                    logger.warning(
                        "queue %r: no task declares schedule %r any more, but it still runs. Remove it with `bullpen "
                        "schedules remove %s %s`, or start with --prune-schedules",
                        *(tasks.queue, scheduler_id, tasks.queue, scheduler_id),
                    )
        return done
