"""Adding what a worker of another library took, so that nothing is added twice.

In: a task, the other library's id of the message, its arguments. Out: a job whose id is made of that id. A message that
comes again, because its worker died between the add and the acknowledgment, finds its job and adds none. Elsewhere: the
libraries (`celery`, `rq`, `arq`).
"""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any, Final

from bullpen._kernel.keep import KeepJobs
from bullpen.errors import ConnectionLost, OutcomeUnknown, QueueFull, ServerRefused
from bullpen.queue.tasks import Task

__all__ = ["KEEP", "LATER", "forwarded"]

KEEP: Final = timedelta(days=1)
"""How long a completed job stays known. A message comes again within the other library's time: an hour in Celery."""
LATER: Final = (ConnectionLost, OutcomeUnknown, QueueFull, ServerRefused)
"""Errors after which the same add may succeed."""


def forwarded(task: Task[..., Any], source: str, identity: str, keep: timedelta) -> Task[..., Any]:
    """The task with the options of one message."""
    job_id = re.sub(r"[^\w.~-]", "_", f"{source}-{identity}")
    return task.options(job_id=job_id, remove_on_complete=KeepJobs(age_s=int(keep.total_seconds())))
