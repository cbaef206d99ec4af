"""Move functions from arq to bullpen one by one, while both run.

    class WorkerSettings:
        functions = [*forwarding_functions({"send_receipt": send_receipt}), other_function]

Needs the package `arq`, which is imported when `forwarding_functions` is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final

from bullpen._kernel.duration import to_ms
from bullpen.compat._forward import KEEP, LATER, forwarded
from bullpen.queue.tasks import Task

__all__ = ["forwarding_functions"]

_TRIES: Final = 1_000_000
_LONGEST_PAUSE_S: Final = 60


def forwarding_functions(
    tasks: Mapping[str, Task[..., Any]], *, wait: int | timedelta | None = None, keep: timedelta = KEEP
) -> list[Any]:
    """Functions for the worker of arq, by arq's names for them: each adds a job of bullpen instead of running.

    A job that arq runs again, because its worker died in between, adds no second one while the first is stored: `keep`
    after it has completed. When the server of bullpen is away, arq tries again until it is back.

    `wait` lets the arq job wait so long for the result; without it arq's result is the id of the job.
    """
    from arq.worker import func

    wait_ms = None if wait is None else to_ms("wait", wait)
    return [func(_forwarder(task, wait_ms, keep), name=name, max_tries=_TRIES) for name, task in tasks.items()]


def _forwarder(task: Task[..., Any], wait_ms: int | None, keep: timedelta) -> Any:
    from arq import Retry

    async def add(ctx: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        # An id may be used again for another job; when it was enqueued stays the same however often it is tried.
        identity = f"{ctx['job_id']}-{int(ctx['enqueue_time'].timestamp() * 1000)}"
        try:
            job = await forwarded(task, "arq", identity, keep).add(*args, **kwargs)
        except LATER as error:
            raise Retry(defer=min(2 ** min(ctx["job_try"], 6), _LONGEST_PAUSE_S)) from error
        return job.id if wait_ms is None else await job.result(timeout=wait_ms)

    return add
