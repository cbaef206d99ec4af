"""Move tasks from Celery to bullpen one by one, while both run.

    # celery_app.py, which the Celery workers import
    from bullpen.compat.celery import forward
    from shop import send_receipt  # a task of bullpen

    forward(celery, {"shop.tasks.send_receipt": send_receipt})

From then on a Celery worker adds a job for each such message, instead of running it; all other tasks it runs as before.
Celery still looks after ETAs, expiry and the messages of producers that are not yet changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Final

from bullpen._kernel.duration import to_ms
from bullpen.compat._forward import KEEP, LATER, forwarded
from bullpen.queue.tasks import Task

__all__ = ["forward"]

_LONGEST_PAUSE_S: Final = 60


def forward(
    celery: Any,
    tasks: Mapping[str, Task[..., Any]],
    *,
    wait: int | timedelta | None = None,
    keep: timedelta = KEEP,
) -> None:
    """Let the workers of a Celery app add jobs for these tasks, by Celery's names for them.

    A message is acknowledged when its job is stored. One that comes again, because a worker died in between, adds no
    second job while the first is stored: `keep` after it has completed. When the server of bullpen is away, Celery
    tries again until it is back.

    `wait` lets the Celery task wait so long for the result of the job: for callers that ask Celery for it, and for
    chains and chords. Without it Celery's result is the id of the job.
    """
    celery.finalize()
    wait_ms = None if wait is None else to_ms("wait", wait)
    for name, task in tasks.items():
        celery.tasks.pop(name, None)  # a function of that name that is still imported would win
        options = {"acks_late": True, "reject_on_worker_lost": True, "max_retries": None}
        celery.task(_forwarder(task, wait_ms, keep), name=name, bind=True, shared=False, **options)


def _forwarder(task: Task[..., Any], wait_ms: int | None, keep: timedelta) -> Callable[..., Any]:
    def add(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            job = forwarded(task, "celery", self.request.id, keep).add_sync(*args, **kwargs)
        except LATER as error:
            # The same id: what was stored although its answer was lost is found again.
            raise self.retry(exc=error, countdown=min(2 ** min(self.request.retries, 6), _LONGEST_PAUSE_S)) from error
        return job.id if wait_ms is None else job.result(timeout=wait_ms)

    add.__name__ = task.name
    return add
