"""Tasks of an application: functions whose runs are jobs, and the workers and schedules that they need.

In: functions, each with its queue. Out: one worker per queue of tasks, and schedulers kept as the code declares them.
Elsewhere: what a task is (`bullpen.queue.tasks`), storing schedules (`schedules`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Unpack

from bullpen._kernel.duration import to_ms
from bullpen._kernel.ids import check_queue_name
from bullpen.errors import InvalidOption, require
from bullpen.wiring.resources import Resources

if TYPE_CHECKING:  # loaded when it is first used: most commands need none of it
    from bullpen._kernel.rates import RateLimit
    from bullpen.outbox import Outbox
    from bullpen.queue import Job
    from bullpen.queue.arguments import TaskArguments
    from bullpen.queue.batch import BatchOptions
    from bullpen.queue.tasks import Task, TaskSet, Unique
    from bullpen.wiring.schedules import ScheduleService
    from bullpen.worker import Worker
    from bullpen.worker.options import WorkerArguments

__all__ = ["TaskQueues"]

_WORKER: Final[WorkerArguments] = {"concurrency": 20, "dead_letters": True}

OnEnd = Callable[["Job", Any], Any]
"""Plain or `async def`; called with the job, and its result or the reason of its failure."""


class _Callbacks:
    """What the tasks of one queue want to be told. Nobody listens until the first of them wants something."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._on_success: dict[str, tuple[Task[..., Any], OnEnd]] = {}
        self._on_failure: dict[str, OnEnd] = {}

    def add(self, task: Task[..., Any], on_success: OnEnd | None, on_failure: OnEnd | None) -> None:
        if on_success is not None:
            if not self._on_success:
                self._worker.on("completed", self._tell_success)
            self._on_success[task.name] = task, on_success
        if on_failure is not None:
            if not self._on_failure:
                self._worker.on("failed", self._tell_failure)
            self._on_failure[task.name] = on_failure

    def listen_to(self, worker: Worker) -> None:
        """To another worker of the queue too."""
        if self._on_success:
            worker.on("completed", self._tell_success)
        if self._on_failure:
            worker.on("failed", self._tell_failure)

    def _tell_success(self, job: Job, value: Any) -> Any:
        if job.name not in self._on_success:
            return None
        task, callback = self._on_success[job.name]
        return callback(job, task.read_result(value))

    def _tell_failure(self, job: Job, reason: str) -> Any:
        callback = self._on_failure.get(job.name)
        return None if callback is None else callback(job, reason)


class TaskQueues:
    """Those of one app."""

    def __init__(
        self, resources: Resources, add_worker: Callable[..., Worker], open_outbox: Callable[[], Outbox]
    ) -> None:
        self._resources, self._add_worker, self._open_outbox = resources, add_worker, open_outbox
        self._sets: dict[str, TaskSet] = {}
        self._batches: dict[str, BatchOptions | None] = {}
        self._worker_options: dict[str, WorkerArguments] = {}
        self._timeouts: dict[str, dict[str, int | timedelta]] = {}
        self._callbacks: dict[str, _Callbacks] = {}
        self.made_schedules: ScheduleService | None = None

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        """The names of the tasks of each queue."""
        return {queue: tasks.names for queue, tasks in self._sets.items()}

    def maker(
        self,
        queue: str,
        *,
        name: str | None,
        strict: bool,
        unique: Unique | None,
        unique_key: Callable[..., str] | None,
        timeout: int | timedelta | None,
        rate_limit: RateLimit | None,
        on_success: OnEnd | None,
        on_failure: OnEnd | None,
        batch: BatchOptions | None,
        **options: Unpack[TaskArguments],
    ) -> Callable[[Callable[..., Any]], Task[..., Any]]:
        """What makes a task of a function."""
        from bullpen.queue.batch import BatchOptions
        from bullpen.queue.batch_tasks import BatchTask, BatchTaskSet
        from bullpen.queue.tasks import Task, TaskSet

        check_queue_name(queue)
        if timeout is not None:
            to_ms("timeout", timeout, minimum=1)
        for option, callback in (("on_success", on_success), ("on_failure", on_failure)):
            expected = "a function of the job and its result, or of the job and why it failed"
            require(option, callback is None or callable(callback), expected, callback)
        require("batch", batch is None or isinstance(batch, BatchOptions), "a BatchOptions", batch)
        for option, limit in (("timeout", timeout), ("rate_limit", rate_limit)):
            require(option, batch is None or limit is None, "none with batch: its runs start together", limit)

        def make(function: Callable[..., Any]) -> Task[..., Any]:
            tasks = self._sets.get(queue) or (TaskSet(queue) if batch is None else BatchTaskSet(queue))
            known = self._batches.get(queue) if queue in self._sets else batch
            require("batch", batch == known, f"{known!r}, as the other tasks of queue {queue!r} have", batch)
            kind: type[Task[..., Any]] = Task if batch is None else BatchTask
            made = kind(
                function,
                handlers=tasks,
                open_queue=partial(self._resources.queue, queue),
                open_sync=partial(self._resources.sync_queue, queue),
                open_outbox=self._open_outbox,
                name=name,
                strict=strict,
                unique=unique,
                unique_key=unique_key,
                rate_limit=rate_limit,
                **options,
            )
            tasks.add(made)
            if queue not in self._sets:
                self._begin_queue(queue, tasks, batch)
            if timeout is not None:
                self._timeouts[queue][made.name] = timeout
            self._callbacks[queue].add(made, on_success, on_failure)
            return made

        return make

    def _begin_queue(self, queue: str, tasks: TaskSet, batch: BatchOptions | None) -> None:
        options: WorkerArguments = {**_WORKER, **self._worker_options.get(queue, {})}
        if batch is not None:
            options["batch"] = batch
        # The worker reads this dictionary when it starts: tasks that come later write into it.
        self._timeouts[queue] = options["timeouts"] = {**options.get("timeouts", {})}
        worker = self._add_worker(queue, tasks, **options)
        self._callbacks[queue] = _Callbacks(worker)
        self._sets[queue], self._batches[queue] = tasks, batch

    def attend(self, worker: Worker) -> None:
        """Let the tasks of its queue be told what becomes of the jobs of this worker."""
        if worker.queue_name in self._callbacks:
            self._callbacks[worker.queue_name].listen_to(worker)

    @contextmanager
    def watched(self, after_add: Callable[[], Awaitable[None]], after_add_sync: Callable[[], None]) -> Iterator[None]:
        """Within this context, call these when runs of tasks were stored."""
        for tasks in self._sets.values():
            tasks.after_add, tasks.after_add_sync = after_add, after_add_sync
        try:
            yield
        finally:
            for tasks in self._sets.values():
                tasks.after_add = tasks.after_add_sync = None

    def configure(self, queue: str, options: WorkerArguments) -> None:
        """How the worker of a queue of tasks runs; before its first task."""
        if queue in self._sets or queue in self._worker_options:
            raise InvalidOption(f"task_queue {queue!r}", "set once, before the first task of the queue", options)
        require(
            "batch", options.get("batch") is None, "an option of the task: app.task(batch=...)", options.get("batch")
        )
        from bullpen.worker.options import WorkerOptions

        own = ("name", "policy", "codec", "backoff", "permanent_errors", "dead_letters")  # read by the worker itself
        WorkerOptions.read({name: value for name, value in options.items() if name not in own})
        self._worker_options[queue] = options

    @property
    def schedules(self) -> ScheduleService:
        """What keeps schedulers as the code declares them."""
        if self.made_schedules is None:
            from bullpen.wiring.schedules import ScheduleService

            self.made_schedules = ScheduleService(self._sets.values, self._resources.borrowed_queue)
        return self.made_schedules
