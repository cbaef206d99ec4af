"""Functions as jobs: typed arguments in, one JSON object on the wire, a typed result back.

In: a function with named parameters. Out: a `Task` that adds jobs for it, and a `TaskSet` that a worker uses as its
handler and that finds the function by the job's name. The data of a task's job is a plain object of parameter names, so
a Node producer can call it and a Node worker can be called through it. Values are converted by the annotations: dates,
decimals, enums, dataclasses and msgspec structs travel as JSON and arrive as what they were.
Elsewhere: storing jobs (`queue`), running handlers (`worker`), registering tasks of a program (`bullpen.app`).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import groupby
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Final,
    Generic,
    ParamSpec,
    Protocol,
    TypeVar,
    Union,
    cast,
    get_type_hints,
    overload,
)

import msgspec

from bullpen._kernel.outcome import Raised
from bullpen.errors import InvalidOption, PermanentError, require
from bullpen.queue._execute import run_thread
from bullpen.queue._packing import read_add_deadline
from bullpen.queue.durability import Durability
from bullpen.queue.job import Job, NewJob
from bullpen.queue.queue import Queue
from bullpen.wire.options import DEFAULT_OPTIONS, make_options
from bullpen.wire.records import check_job_name

if TYPE_CHECKING:
    from bullpen.queue import sync

P = ParamSpec("P")
R = TypeVar("R")

_UNNAMED: Final = {
    inspect.Parameter.POSITIONAL_ONLY: "positional-only",
    inspect.Parameter.VAR_POSITIONAL: "*args",
    inspect.Parameter.VAR_KEYWORD: "**kwargs",
}
_MOST_THREADS: Final = 1_000
"""A ceiling only: the worker never starts more runs than its concurrency."""


class TaskMaker(Protocol):
    """Turns a function into a task of the same parameters, without the job if it asks for one, and result."""

    @overload
    def __call__(self, function: Callable[Concatenate[Job, P], Coroutine[Any, Any, R]], /) -> Task[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> Task[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[Job, P], R], /) -> Task[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, R]: ...


class TaskJob(Job, Generic[R]):
    """A job of a task: as any other, with a result of the function's type."""

    __slots__ = ("_task",)

    def __init__(self, task: Task[..., R], job: Job) -> None:
        super().__init__(job.actions, job.record)
        self.added, self.blocked_by, self.durability = job.added, job.blocked_by, job.durability
        self._task = task

    async def result(self, timeout: int | timedelta | None = None) -> R:
        """Wait until the job is done and return what the function returned; errors as in `Job.result`."""
        return self._task.read_result(await super().result(timeout))


class StoredInTransaction(Protocol):
    """What became of a run that is added once a transaction commits."""

    @property
    def id(self) -> str | None:
        """That of the row, and of the job unless it has a `job_id`."""
        ...

    @property
    def created(self) -> bool: ...


class AddsInTransactions(Protocol):
    """The part of an outbox that tasks need."""

    async def add_in_transaction(
        self, connection: Any, queue: str, name: str, data: Any = None, **options: Any
    ) -> StoredInTransaction: ...

    def add_in_transaction_sync(
        self, connection: Any, queue: str, name: str, data: Any = None, **options: Any
    ) -> StoredInTransaction: ...


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of one run, checked and ready to store; made by `Task.call`."""

    task: str
    data: Mapping[str, Any]
    queue: str
    options: Mapping[str, Any]
    """All job options that `Task.add` would use."""
    named: Mapping[str, Any] = field(repr=False)
    """Those of them that `Task.options` said."""


class Task(Generic[P, R]):
    """A function whose runs are jobs of a queue. Calling it runs the function itself, here and now.

    job = await send_welcome.add(to="ada@example.com")
    sent = await job.result(timeout=10_000)
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        open_queue: Callable[[], Queue],
        open_sync: Callable[[], sync.Queue],
        open_outbox: Callable[[], AddsInTransactions],
        handlers: TaskSet,
        name: str | None = None,
        strict: bool = False,
        **options: Any,
    ) -> None:
        self._signature, self._wants_job = _parameters(function)
        self.function = function
        self.name = check_job_name(getattr(function, "__name__", "") if name is None else name)
        """The name of the task's jobs."""
        self.handlers = handlers
        """All tasks of the queue; a child process of a worker finds them here."""
        if "job_id" in options:
            raise InvalidOption("job_id", "an option of one job; use task.options(job_id=...)", options["job_id"])
        self._add_deadline: int | timedelta | None = options.pop("add_deadline", None)
        read_add_deadline(self._add_deadline)
        _check_options(options)  # a mistake is told where the task stands, not where it is first added
        self._options = options
        self._named: dict[str, Any] = {}  # what `options` said
        self._open_queue, self._open_sync, self._open_outbox = open_queue, open_sync, open_outbox
        hints = get_type_hints(function, include_extras=True)
        self._returns: Any = hints.get("return", Any)
        self._arguments = msgspec.defstruct(
            "Arguments",
            [_field(parameter, hints) for parameter in self._signature.parameters.values()],
            kw_only=True,
            forbid_unknown_fields=strict,
        )
        self.__doc__ = function.__doc__
        self.__module__, self.__qualname__ = function.__module__, function.__qualname__

    def __repr__(self) -> str:
        return f"Task({self.name!r}, queue={self.handlers.queue!r})"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        return self.function(*args, **kwargs)

    def options(self, **options: Any) -> Task[P, R]:
        """The same task with other job options, or another `add_deadline`, `durability` or `replace_finished`:
        `await task.options(delay=5_000, job_id="a").add(...)`."""
        deadline = options.pop("add_deadline", self._add_deadline)
        read_add_deadline(deadline)
        _check_options({**self._options, **options})
        other = object.__new__(Task)
        other.__dict__.update(
            self.__dict__,
            _options={**self._options, **options},
            _named={**self._named, **options},
            _add_deadline=deadline,
        )
        return cast("Task[P, R]", other)

    # ---- adding -------------------------------------------------------------------------------------------------

    async def add(self, *args: P.args, **kwargs: P.kwargs) -> TaskJob[R]:
        """Store one run. Wrong arguments raise before anything is sent, as a call of the function would."""
        data = self._pack(args, kwargs)
        job = await self._open_queue().add(self.name, data, add_deadline=self._add_deadline, **self._options)
        return TaskJob(self, job)

    def add_sync(self, *args: P.args, **kwargs: P.kwargs) -> sync.Job:
        """As `add`, for code without an event loop: blocks until the run is stored."""
        data = self._pack(args, kwargs)
        return self._open_sync().add(self.name, data, add_deadline=self._add_deadline, **self._options)

    async def add_in_transaction(self, connection: Any, /, *args: P.args, **kwargs: P.kwargs) -> StoredInTransaction:
        """Store one run if and only if the caller's open transaction commits; the app's outbox adds it to the queue.

        `connection` is what `Outbox.enqueue` takes.
        """
        data = self._pack(args, kwargs)
        return await self._open_outbox().add_in_transaction(
            connection, self.handlers.queue, self.name, data, **self._options
        )

    def add_in_transaction_sync(self, connection: Any, /, *args: P.args, **kwargs: P.kwargs) -> StoredInTransaction:
        """As `add_in_transaction`, for blocking connections."""
        data = self._pack(args, kwargs)
        return self._open_outbox().add_in_transaction_sync(
            connection, self.handlers.queue, self.name, data, **self._options
        )

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call:
        """Arguments for `add_many` and `map`, checked by type checkers and now; with queue and options of the task."""
        return Call(self.name, self._pack(args, kwargs), self.handlers.queue, self._options, self._named)

    async def add_many(self, calls: Iterable[Call | Mapping[str, Any]]) -> list[TaskJob[R]]:
        """Store many runs, hundreds per round trip; each is a `call(...)` or the parameters by name.

        What `options` said of a call holds for it, else what this task says. All are checked before the first is sent.
        As with `Queue.add_many`, one failure may leave earlier ones stored.
        """
        checked = [self._new_job(one) for one in calls]
        queue, added = self._open_queue(), list[Job]()
        for level, jobs in groupby(checked, key=lambda job: job.options.get("durability")):
            # One call of the queue has one level; usually all jobs have the same.
            plain = [NewJob(job.name, job.data, _without_durability(job.options)) for job in jobs]
            added += await queue.add_many(plain, durability=level, add_deadline=self._add_deadline)
        return [TaskJob(self, job) for job in added]

    async def map(
        self, calls: Iterable[Call | Mapping[str, Any]], *, timeout: int | timedelta | None = None
    ) -> list[R]:
        """Store many runs and wait for all results, in order. The first failure is raised when its turn comes; the
        other jobs run on. `timeout` is per result."""
        jobs = await self.add_many(calls)
        # All at once: when the turn of a job comes that ended long before, retention may have removed it.
        waits = [asyncio.ensure_future(job.result()) for job in jobs]
        try:
            return [await (wait if wait.done() else job.result(timeout)) for job, wait in zip(jobs, waits, strict=True)]
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    def _new_job(self, one: Call | Mapping[str, Any]) -> NewJob:
        if isinstance(one, Call):
            if (one.task, one.queue) != (self.name, self.handlers.queue):
                raise InvalidOption("calls", f"calls of task {self.name!r} of queue {self.handlers.queue!r}", one.task)
            return NewJob(self.name, one.data, {**self._options, **one.named})
        if not isinstance(one, Mapping):
            raise InvalidOption("calls", f"{self.name}.call(...) or the parameters by name", one)
        return NewJob(self.name, self._pack((), one), self._options)

    def _pack(self, args: Iterable[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The job's data: what the function would be called with, as JSON by its annotations."""
        bound = self._signature.bind(*args, **kwargs)
        try:
            data: dict[str, Any] = msgspec.to_builtins(bound.arguments, str_keys=True)
            msgspec.convert(data, self._arguments, str_keys=True)
        except (TypeError, msgspec.ValidationError) as error:
            raise InvalidOption(f"arguments of task {self.name!r}", str(error), bound.arguments) from None
        return data

    # ---- running ------------------------------------------------------------------------------------------------

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    def run(self, job: Job) -> Any:
        """Call the function with the arguments in a job; a coroutine if it is `async def`."""
        try:
            arguments = msgspec.convert({} if job.data is None else job.data, self._arguments, str_keys=True)
        except msgspec.ValidationError as error:
            raise PermanentError(f"task {self.name!r} cannot be called with this job's data: {error}") from None
        values = {name: getattr(arguments, name) for name in arguments.__struct_fields__}
        given = {name: value for name, value in values.items() if value is not msgspec.UNSET}
        return self.function(job, **given) if self._wants_job else self.function(**given)

    def write_result(self, value: Any) -> Any:
        """What the function returned, as JSON; what has no form in JSON is refused by the worker, with its path."""
        try:
            return msgspec.to_builtins(value, str_keys=True)
        except TypeError as error:
            raise PermanentError(f"task {self.name!r} returned what JSON cannot carry: {error}") from None

    def read_result(self, value: Any) -> R:
        try:
            return cast("R", msgspec.convert(value, self._returns, str_keys=True))
        except msgspec.ValidationError as error:
            raise InvalidOption(f"result of task {self.name!r}", str(error), value) from None


class TaskSet:
    """All tasks of one queue, as the handler of its worker. A name that nobody registered is a permanent failure."""

    def __init__(self, queue: str) -> None:
        self.queue = queue
        self._tasks: dict[str, Task[..., Any]] = {}
        self._threads: ThreadPoolExecutor | None = None

    def task(self, function: Callable[..., Any], **options: Any) -> Task[..., Any]:
        """Make a task of a function and remember it; `options` are those of `Task`."""
        task: Task[..., Any] = Task(function, handlers=self, **options)
        known = self._tasks.setdefault(task.name, task)
        if known is not task:
            place = f"{known.__module__}.{known.__qualname__}"
            raise InvalidOption("name", f"one that no other task of queue {self.queue!r} has ({place})", task.name)
        if len(self._tasks) == 1:
            # Where a child process finds this object: it imports the first task's module and asks the task.
            self.__module__, self.__qualname__ = task.__module__, f"{task.__qualname__}.handlers"
        return task

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tasks)

    async def __call__(self, job: Job) -> Any:
        task = self._tasks.get(job.name)
        if task is None:
            known = ", ".join(sorted(self._tasks))
            raise PermanentError(f"queue {self.queue!r} has no task {job.name!r} here; there is {known}")
        if task.is_async:
            return task.write_result(await task.run(job))
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix=f"bullpen-{self.queue}")
        # The worker's own way of running plain functions: the slot stays taken until the thread returns.
        result = await run_thread(self._threads, task.run, job, None)
        if isinstance(result, Raised):
            raise result.error
        return task.write_result(result.value)


def _check_options(options: Mapping[str, Any]) -> None:
    """Refuse what `Queue.add` would refuse; that a replaced job needs a `job_id` is known when it is added."""
    replaces, level = options.get("replace_finished"), options.get("durability")
    require("replace_finished", replaces is None or isinstance(replaces, bool), "True or False", replaces)
    if level is not None:
        Durability.read(level)
    rest = {name: value for name, value in options.items() if name not in ("replace_finished", "durability")}
    make_options(DEFAULT_OPTIONS, **rest)


def _without_durability(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "durability"}


def _parameters(function: Callable[..., Any]) -> tuple[inspect.Signature, bool]:
    """The parameters that come from a job's data, and whether the function wants the job itself before them."""
    if not inspect.isroutine(function):
        raise InvalidOption("task", "a function", function)
    name = getattr(function, "__qualname__", repr(function))
    signature = inspect.signature(function, eval_str=True)
    parameters = list(signature.parameters.values())
    wants_job = bool(parameters) and parameters[0].annotation is Job
    named = parameters[1:] if wants_job else parameters
    for parameter in named:
        if parameter.kind in _UNNAMED:
            raise InvalidOption(
                f"parameter {parameter.name!r} of {name}",
                "a parameter with a name, which becomes the name of a JSON field",
                _UNNAMED[parameter.kind],
            )
    return signature.replace(parameters=named), wants_job


def _field(parameter: inspect.Parameter, hints: Mapping[str, Any]) -> Any:
    """A field of the arguments. One with a default may be absent in the data; then the function's own default holds."""
    annotation = hints.get(parameter.name, Any)
    if parameter.default is inspect.Parameter.empty:
        return parameter.name, annotation
    return parameter.name, Union[annotation, msgspec.UnsetType], msgspec.UNSET  # noqa: UP007 - also for what has no |
