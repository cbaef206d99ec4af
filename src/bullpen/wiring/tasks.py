"""Tasks of an application: functions whose runs are jobs, and the workers and schedules that they need.

In: functions, each with its queue. Out: one worker per queue of tasks, and schedulers kept as the code declares them.
Elsewhere: what a task is (`bullpen.queue.tasks`), storing schedules (`schedules`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Unpack

from bullpen._kernel.ids import check_queue_name
from bullpen.errors import InvalidOption, require
from bullpen.wiring.resources import Resources

if TYPE_CHECKING:  # loaded when it is first used: most commands need none of it
    from bullpen.outbox import Outbox
    from bullpen.queue.arguments import TaskArguments
    from bullpen.queue.batch import BatchOptions
    from bullpen.queue.tasks import Task, TaskSet, Unique
    from bullpen.wiring.schedules import ScheduleService
    from bullpen.worker import Worker
    from bullpen.worker.options import WorkerArguments

__all__ = ["TaskQueues"]

_WORKER: Final[WorkerArguments] = {"concurrency": 20, "dead_letters": True}


class TaskQueues:
    """Those of one app."""

    def __init__(
        self, resources: Resources, add_worker: Callable[..., Worker], open_outbox: Callable[[], Outbox]
    ) -> None:
        self._resources, self._add_worker, self._open_outbox = resources, add_worker, open_outbox
        self._sets: dict[str, TaskSet] = {}
        self._batches: dict[str, BatchOptions | None] = {}
        self._worker_options: dict[str, WorkerArguments] = {}
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
        batch: BatchOptions | None,
        **options: Unpack[TaskArguments],
    ) -> Callable[[Callable[..., Any]], Task[..., Any]]:
        """What makes a task of a function."""
        from bullpen.queue.batch import BatchOptions
        from bullpen.queue.batch_tasks import BatchTask, BatchTaskSet
        from bullpen.queue.tasks import Task, TaskSet

        check_queue_name(queue)
        require("batch", batch is None or isinstance(batch, BatchOptions), "a BatchOptions", batch)

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
                **options,
            )
            tasks.add(made)
            if queue not in self._sets:
                own: WorkerArguments = {**_WORKER, **self._worker_options.get(queue, {})}
                if batch is not None:
                    own["batch"] = batch
                self._add_worker(queue, tasks, **own)
                self._sets[queue], self._batches[queue] = tasks, batch
            return made

        return make

    def configure(self, queue: str, options: WorkerArguments) -> None:
        """How the worker of a queue of tasks runs; before its first task."""
        if queue in self._sets or queue in self._worker_options:
            raise InvalidOption(f"task_queue {queue!r}", "set once, before the first task of the queue", options)
        require(
            "batch", options.get("batch") is None, "an option of the task: app.task(batch=...)", options.get("batch")
        )
        self._worker_options[queue] = options

    @property
    def schedules(self) -> ScheduleService:
        """What keeps schedulers as the code declares them."""
        if self.made_schedules is None:
            from bullpen.wiring.schedules import ScheduleService

            self.made_schedules = ScheduleService(self._sets.values, self._resources.borrowed_queue)
        return self.made_schedules
