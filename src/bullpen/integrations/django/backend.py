"""A backend for `django.tasks` of Django 6, and of the package `django-tasks` before it.

    TASKS = {"default": {"BACKEND": "bullpen.integrations.django.backend.BullpenBackend", "QUEUES": ["default"]}}

In: tasks of Django. Out: one bullpen job each, on the queue of the same name; its result is read from the job as long
as the job is stored. A job names the task that it runs. The name is looked up among tasks that this process has
imported: nothing is imported because a job says so. In `OPTIONS`: `attempts` (1), and `outbox` (False: add at once;
True: within a transaction the job is stored by it).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import cache
from typing import Any, Final
from uuid import uuid4

from django.conf import settings
from django.core import checks
from django.db import connections
from django.utils import timezone

try:
    from django.tasks import base, signals, task_backends
    from django.tasks.backends.base import BaseTaskBackend
    from django.tasks.exceptions import TaskResultDoesNotExist
except ImportError:  # Django 5.2
    from django_tasks import base, signals, task_backends
    from django_tasks.backends.base import BaseTaskBackend
    from django_tasks.exceptions import TaskResultDoesNotExist

from bullpen.errors import PermanentError
from bullpen.integrations.django._app import app
from bullpen.integrations.django._options import options
from bullpen.queue import Job, JobState
from bullpen.queue.tasks import Task as BullpenTask
from bullpen.sync import Queue

__all__ = ["BullpenBackend"]

_NAME: Final = "django.task"
_MOST_URGENT: Final = base.TASK_MAX_PRIORITY + 1
_STATUS: Final = {
    JobState.ACTIVE: base.TaskResultStatus.RUNNING,
    JobState.COMPLETED: base.TaskResultStatus.SUCCESSFUL,
    JobState.FAILED: base.TaskResultStatus.FAILED,
}
_runners: dict[str, BullpenTask[..., Any]] = {}
"""The bullpen task that runs Django's tasks, for each queue."""


class BullpenBackend(BaseTaskBackend):
    """Tasks of Django as jobs."""

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def __init__(self, alias: str, params: Mapping[str, Any]) -> None:
        super().__init__(alias, params)
        self.attempts = int(self.options.get("attempts", 1))
        self.uses_outbox = bool(self.options.get("outbox", False))
        for name in self.queues:
            _runner(name)

    def check(self, **_: Any) -> Iterable[checks.CheckMessage]:
        """What is wrong with the settings of this backend."""
        if not self.queues:
            yield checks.Error(
                f"TASKS[{self.alias!r}]: QUEUES must name the queues, because workers run those that are named",
                id="bullpen.E001",
            )
        if self.uses_outbox and options().outbox is None:
            yield checks.Error(
                f"TASKS[{self.alias!r}]: OPTIONS['outbox'] needs BULLPEN['OUTBOX'], the alias of a database",
                id="bullpen.E002",
            )

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        """Add a job now, or with the transaction that is open."""
        self.validate_task(task)
        job_id = uuid4().hex
        result = base.TaskResult(
            task=task,
            id=f"{task.queue_name}/{job_id}",
            status=base.TaskResultStatus.READY,
            enqueued_at=timezone.now(),
            started_at=None,
            last_attempted_at=None,
            finished_at=None,
            args=args,
            kwargs=kwargs,
            backend=self.alias,
            errors=[],
            worker_ids=[],
        )
        wanted: dict[str, Any] = {"job_id": job_id, "attempts": self.attempts, "priority": _priority(task.priority)}
        if task.run_after is not None:
            wanted["at"] = timezone.make_aware(task.run_after) if timezone.is_naive(task.run_after) else task.run_after
        run = _runner(task.queue_name).options(**wanted)
        given = {"task": task.module_path, "backend": self.alias, "args": result.args, "kwargs": result.kwargs}
        connection = connections[options().database]
        if self.uses_outbox and connection.in_atomic_block:
            run.add_in_transaction_sync(connection, **given)
        else:
            run.add_sync(**given)
        signals.task_enqueued.send(type(self), task_result=result)
        return result

    def get_result(self, result_id: str) -> Any:
        """What became of a job, as long as it is stored."""
        queue, _, job_id = result_id.rpartition("/")
        job = _queue(queue).get_job(job_id) if queue in self.queues else None
        if job is None or job.name != _NAME:
            raise TaskResultDoesNotExist(result_id)
        return _result(job, result_id)


def register_backends() -> None:
    """Let workers of this app serve the queues of all our backends in `TASKS`."""
    for alias in getattr(settings, "TASKS", {}):
        task_backends[alias]


# ---- inside -----------------------------------------------------------------------------------------------------


def _runner(queue: str) -> BullpenTask[..., Any]:
    known = _runners.get(queue)
    if known is None:
        known = _runners[queue] = app.task(queue, name=_NAME)(_run)
    return known


def _run(job: Job, task: str, backend: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """In a thread, as Django's own code expects."""
    found = _find(task)
    result = _result(job, f"{job.queue_name}/{job.id}", running=True)
    sender = type(task_backends[backend])
    signals.task_started.send(sender, task_result=result)
    try:
        given = [base.TaskContext(task_result=result), *args] if found.takes_context else args
        value = found.call(*given, **kwargs)
    except BaseException as error:
        result.errors.append(base.TaskError(exception_class_path=_path(type(error)), traceback=repr(error)))
        _end(sender, result, base.TaskResultStatus.FAILED)
        raise
    object.__setattr__(result, "_return_value", value)
    _end(sender, result, base.TaskResultStatus.SUCCESSFUL)
    return value


def _end(sender: type, result: Any, status: Any) -> None:
    object.__setattr__(result, "status", status)
    object.__setattr__(result, "finished_at", timezone.now())
    signals.task_finished.send(sender, task_result=result)


@cache
def _queue(name: str) -> Queue:
    return Queue(name, connection=app.connection, prefix=app.prefix, codec=app.codec)


def _find(path: str) -> Any:
    """A task that this process has imported."""
    module, _, name = path.rpartition(".")
    found = getattr(sys.modules.get(module), name, None)
    if not isinstance(found, base.Task):
        raise PermanentError(f"{path} is no task that this process knows: is its module named tasks?")
    return found


def _result(job: Any, result_id: str, *, running: bool = False) -> Any:
    state = JobState.ACTIVE if running else job.state()
    if state in (JobState.COMPLETED, JobState.FAILED) and not job.finished_on:
        # It ended between the two reads: what was read first says nothing of its end.
        job = _queue(job.queue_name).get_job(job.id) or job
    data = job.data
    result = base.TaskResult(
        task=_find(data["task"]),
        id=result_id,
        status=_STATUS.get(state, base.TaskResultStatus.READY),
        enqueued_at=_instant(job.timestamp),
        started_at=_instant(job.processed_on),
        last_attempted_at=_instant(job.processed_on),
        finished_at=_instant(job.finished_on) if state in (JobState.COMPLETED, JobState.FAILED) else None,
        args=data["args"],
        kwargs=data["kwargs"],
        backend=data["backend"],
        errors=[_error(text) for text in job.stacktrace],
        worker_ids=[job.worker_id or "unknown"] * job.attempts_started,
    )
    if state is JobState.COMPLETED:
        object.__setattr__(result, "_return_value", job.return_value)
    return result


def _error(stack: str) -> Any:
    """The class stands at the begin of the last line that is not indented."""
    lines = [line for line in stack.splitlines() if line and not line.startswith((" ", "\t"))]
    name = lines[-1].partition(":")[0].strip() if lines else "Exception"
    return base.TaskError(exception_class_path=name if "." in name else f"builtins.{name}", traceback=stack)


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _priority(wanted: int) -> int:
    """Django: -100 to 100, the higher first. BullMQ: the lower first; all have one, or those without would be first."""
    return int(_MOST_URGENT - wanted)


def _instant(milliseconds: int | None) -> datetime | None:
    return datetime.fromtimestamp(milliseconds / 1000, UTC) if milliseconds else None
