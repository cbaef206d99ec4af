"""Move functions from RQ to bullpen one by one, while both run.

    # forward.py, run instead of `rq worker`
    from rq import Queue, SimpleWorker
    from bullpen.compat.rq import forwarding_job

    job_class = forwarding_job({"shop.jobs.send_receipt": send_receipt})
    queue = Queue("default", connection=redis, job_class=job_class)
    SimpleWorker([queue], connection=redis, job_class=job_class).work(with_scheduler=True)

Needs the package `rq`, which is imported when `forwarding_job` is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any

from bullpen._kernel.duration import to_ms
from bullpen.compat._forward import KEEP, forwarded
from bullpen.queue.tasks import Task

__all__ = ["forwarding_job"]


def forwarding_job(
    tasks: Mapping[str, Task[..., Any]], *, wait: int | timedelta | None = None, keep: timedelta = KEEP
) -> type[Any]:
    """A class of RQ's jobs for `job_class=`: those of these functions, by RQ's names for them, add a job of bullpen.

    All other jobs run as before. A job that RQ runs again, because its worker died in between, adds no second one while
    the first is stored: `keep` after it has completed. When the server of bullpen is away for longer than an add waits,
    the job fails in RQ and is kept there: `rq requeue` brings it back.

    `wait` lets the RQ job wait so long for the result; without it RQ's result is the id of the job.
    """
    from rq.job import Job

    wait_ms = None if wait is None else to_ms("wait", wait)

    class ForwardingJob(Job):
        """Adds instead of running."""

        @property
        def func(self) -> Any:
            task = tasks.get(self.func_name or "")
            return super().func if task is None else partial(_add, self, task, wait_ms, keep)

    return ForwardingJob


def _add(rq_job: Any, task: Task[..., Any], wait_ms: int | None, keep: timedelta, *args: Any, **kwargs: Any) -> Any:
    # An id may be used again for another job; when it was made stays the same however often it is tried.
    identity = f"{rq_job.id}-{int(rq_job.created_at.timestamp() * 1000)}"
    job = forwarded(task, "rq", identity, keep).add_sync(*args, **kwargs)
    return job.id if wait_ms is None else job.result(timeout=wait_ms)
