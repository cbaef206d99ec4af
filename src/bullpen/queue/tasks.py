"""Functions as jobs: typed arguments in, one JSON object on the wire, a typed result back.

In: a function with named parameters. Out: a `Task` that adds jobs for it, and a `TaskSet` that a worker uses as its
handler and that finds the function by the job's name. The data of a task's job is a plain object of parameter names, so
a Node producer can call it and a Node worker can be called through it. Values are converted by the annotations: dates,
decimals, enums, dataclasses and msgspec structs travel as JSON and arrive as what they were.
Elsewhere: storing jobs (`queue`), running handlers (`worker`), registering tasks of a program (`bullpen.app`).
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Final,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    TypeVar,
    Union,
    Unpack,
    cast,
    get_origin,
    get_type_hints,
    overload,
)

import msgspec

from bullpen._kernel.duration import check_int, is_text, to_ms
from bullpen._kernel.execute import run_thread
from bullpen._kernel.ids import check_scheduler_id
from bullpen._kernel.injection import Needs, current_scope, needs_of
from bullpen._kernel.outcome import Raised
from bullpen._kernel.rates import RateLimit
from bullpen._kernel.signatures import parameters_of
from bullpen.errors import DelayJob, InvalidOption, NotConfigured, PermanentError, require
from bullpen.queue.argument_types import check_argument, check_result, from_builtins, to_builtins
from bullpen.queue.arguments import AddArguments, AddInTransactionArguments, StoredJobArguments, TaskArguments
from bullpen.queue.durability import Durability
from bullpen.queue.job import Job, NewJob
from bullpen.queue.limits import turn_of_task
from bullpen.queue.packing import read_add_deadline
from bullpen.queue.queue import Queue
from bullpen.queue.schedulers import DeclaredScheduler, split_options
from bullpen.wire.deduplication import Deduplication
from bullpen.wire.options import DEFAULT_OPTIONS, JobMeta, make_options
from bullpen.wire.records import check_job_name
from bullpen.wire.schedules import SCHEDULE_NAMES

if TYPE_CHECKING:
    from bullpen.queue import sync

A = TypeVar("A")
A_contra = TypeVar("A_contra", contravariant=True)
P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")

_UNNAMED: Final = {
    inspect.Parameter.POSITIONAL_ONLY: "positional-only",
    inspect.Parameter.VAR_POSITIONAL: "*args",
    inspect.Parameter.VAR_KEYWORD: "**kwargs",
}
_MOST_THREADS: Final = 1_000
"""A ceiling only: the worker never starts more runs than its concurrency."""


Unique = Literal["pending"] | int | timedelta
"""Which runs of a task are one. "pending": those with the same key, until the first of them has ended. A duration (ms
or timedelta): those with the same key that are added within it, whatever the result of the first."""


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


class TaskJob(Job[dict[str, Any]], Generic[R]):
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
    """The handle of a run that is added when a transaction commits."""

    @property
    def id(self) -> str | None:
        """That of the row, and of the job unless it has a `job_id`."""
        ...

    @property
    def created(self) -> bool: ...


class AddsInTransactions(Protocol):
    """The part of an outbox that tasks need."""

    async def add_in_transaction(
        self, connection: Any, queue: str, name: str, data: Any = None, **options: Unpack[AddInTransactionArguments]
    ) -> StoredInTransaction: ...

    def add_in_transaction_sync(
        self, connection: Any, queue: str, name: str, data: Any = None, **options: Unpack[AddInTransactionArguments]
    ) -> StoredInTransaction: ...


_INTO, _MANY = "bullpen-results-into", "bullpen-results-many"
"""Headers of a job that gets the results of its children: the name of the parameter, and whether it gets a list."""


@dataclass(frozen=True, slots=True)
class Call(Generic[R]):
    """Arguments of one run, checked and ready to store; made by `Task.call`."""

    task: str
    data: Mapping[str, Any]
    queue: str
    options: StoredJobArguments
    """All job options that `Task.add` would use."""
    named: StoredJobArguments = field(repr=False)
    """Those of them that `Task.options` said."""
    source: Task[..., R] = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class CallAfter(Generic[A_contra, R]):
    """A run that comes after others and gets what they return as its first argument; made by `Task.after`."""

    call: Call[R]
    """Its other arguments."""
    into: str
    """The parameter that gets the results."""

    def prepared(self, *, many: bool) -> Call[R]:
        """The run, with the place of its results for its worker. `many`: it gets a list of them."""
        meta = self.call.options.get("meta") or JobMeta()
        headers = {**meta.headers, _INTO: self.into, **({_MANY: True} if many else {})}
        return replace(self.call, options={**self.call.options, "meta": replace(meta, headers=headers)})


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
        unique: Unique | None = None,
        unique_key: Callable[..., str] | None = None,
        rate_limit: RateLimit | None = None,
        **options: Unpack[TaskArguments],
    ) -> None:
        self.function = function
        self._read(function, strict=strict)
        self.name = check_job_name(getattr(function, "__name__", "") if name is None else name)
        """The name of the task's jobs."""
        self.handlers = handlers
        """All tasks of the queue; a child process of a worker finds them here."""
        given: Mapping[str, Any] = options
        if "job_id" in given:
            raise InvalidOption("job_id", "an option of a single job; use task.options(job_id=...)", given["job_id"])
        rule = {option: options.pop(option) for option in SCHEDULE_NAMES if option in options}  # type: ignore[misc]
        self._add_deadline: int | timedelta | None = options.pop("add_deadline", None)
        read_add_deadline(self._add_deadline)
        self._lane_of: Callable[..., str | None] | None = None
        if callable(lane := given.get("lane")):
            given, self._lane_of = {**given, "lane": None}, lane
        _check_options(given)  # a mistake is told where the task stands, not where it is first added
        _check_unique(unique, unique_key, given)
        require("rate_limit", rate_limit is None or isinstance(rate_limit, RateLimit), "a RateLimit", rate_limit)
        self._unique, self._unique_key, self.rate_limit = unique, unique_key, rate_limit
        self._options = cast("StoredJobArguments", given)
        self._named: StoredJobArguments = {}  # what `options` said
        self._open_queue, self._open_sync, self._open_outbox = open_queue, open_sync, open_outbox
        if any(value is not None for value in rule.values()):
            # Nobody asks for the arguments of a scheduled run, so nothing could name its deduplication.
            require("unique", unique is None, "none with a schedule: `overlap` says it for scheduled runs", unique)
        self.schedule: DeclaredScheduler | None = self._declare(rule) if rule else None
        """With `every` or `cron`: the scheduler that an app keeps for the task. Its id is the task's name."""
        self.__doc__ = function.__doc__
        self.__module__, self.__qualname__ = function.__module__, function.__qualname__

    def _read(self, function: Callable[..., Any], *, strict: bool) -> None:
        """What the function takes and returns."""
        self.needs: Needs = needs_of(function) if inspect.isroutine(function) else {}
        """Parameters that the worker fills in, and no job carries."""
        self._signature, self._wants_job = _parameters(function, self.needs)
        hints = get_type_hints(function, include_extras=True)
        self._returns: Any = hints.get("return", Any)
        name = function.__qualname__
        for parameter in self._signature.parameters.values():
            check_argument(f"parameter {parameter.name!r} of task {name!r}", hints.get(parameter.name, Any))
        check_result(f"result of task {name!r}", self._returns)
        fields = [_field(parameter, hints) for parameter in self._signature.parameters.values()]
        make = partial(msgspec.defstruct, kw_only=True, forbid_unknown_fields=strict)
        self._arguments, self._rest = make("Arguments", fields), make("Rest", fields[1:])  # rest: of a run after others

    def _declare(self, rule: Mapping[str, Any]) -> DeclaredScheduler:
        """Checked at the declaration: a mistake must not wait for the first start of a worker."""
        missing = [name for name, one in self._signature.parameters.items() if one.default is inspect.Parameter.empty]
        if missing:
            expected = "parameters with defaults, because a scheduled run has no other arguments"
            raise InvalidOption(f"task {self.name!r}", expected, ", ".join(missing))
        held = {name: value for name, value in self._options.items() if name not in ("durability", "replace_finished")}
        if self._lane_of is not None:
            bound = self._signature.bind()
            bound.apply_defaults()
            held["lane"] = self._lane_of(**bound.arguments)
        split_options({**rule, **held}, DEFAULT_OPTIONS)
        return DeclaredScheduler(check_scheduler_id(self.name), self.name, {}, {**rule, **held})

    def __repr__(self) -> str:
        return f"Task({self.name!r}, queue={self.handlers.queue!r})"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        if self.needs:
            given = inspect.signature(self.function).bind_partial(*args, **kwargs).arguments
            for name in self.needs:
                require(name, name in given, f"given to {self.name} here: only a worker finds it", "nothing")
        return self.function(*args, **kwargs)

    def options(
        self,
        *,
        unique: Unique | Literal[False] | None = None,
        unique_key: Callable[..., str] | None = None,
        **options: Unpack[AddArguments],
    ) -> Task[P, R]:
        """The same task with other job options, or another `add_deadline`, `durability`, `replace_finished`, `unique`
        (False: none) or `unique_key`: `await task.options(delay=5_000, job_id="a").add(...)`."""
        deadline = options.pop("add_deadline", self._add_deadline)
        read_add_deadline(deadline)
        own_unique = self._unique if unique is None else unique or None
        own_key = (unique_key or self._unique_key) if own_unique is not None else unique_key
        _check_options({**self._options, **options})
        _check_unique(own_unique, own_key, {**self._options, **options})
        other = object.__new__(type(self))
        other.__dict__.update(
            self.__dict__,
            _options={**self._options, **options},
            _named={**self._named, **options},
            _lane_of=None if options.get("lane") is not None else self._lane_of,
            _add_deadline=deadline,
            _unique=own_unique,
            _unique_key=own_key,
        )
        return other

    # ---- adding -------------------------------------------------------------------------------------------------

    async def add(self, *args: P.args, **kwargs: P.kwargs) -> TaskJob[R]:
        """Store one run. Wrong arguments raise before anything is sent, as a call of the function would."""
        data, options = self._pack_run(args, kwargs)
        job = await self._open_queue().add(self.name, data, add_deadline=self._add_deadline, **options)
        if self.handlers.after_add is not None:
            await self.handlers.after_add()
        return TaskJob(self, job)

    def add_sync(self, *args: P.args, **kwargs: P.kwargs) -> sync.Job:
        """As `add`, for code without an event loop: blocks until the run is stored."""
        data, options = self._pack_run(args, kwargs)
        job = self._open_sync().add(self.name, data, add_deadline=self._add_deadline, **options)
        if self.handlers.after_add_sync is not None:
            self.handlers.after_add_sync()
        return job

    async def add_in_transaction(self, connection: Any, /, *args: P.args, **kwargs: P.kwargs) -> StoredInTransaction:
        """Store one run if and only if the caller's open transaction commits; the app's outbox adds it to the queue.

        `connection` is what `Outbox.enqueue` takes.
        """
        data, options = self._pack_run(args, kwargs)
        return await self._open_outbox().add_in_transaction(connection, self.handlers.queue, self.name, data, **options)

    def add_in_transaction_sync(self, connection: Any, /, *args: P.args, **kwargs: P.kwargs) -> StoredInTransaction:
        """As `add_in_transaction`, for blocking connections."""
        data, options = self._pack_run(args, kwargs)
        return self._open_outbox().add_in_transaction_sync(connection, self.handlers.queue, self.name, data, **options)

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        """Arguments for `add_many` and `map`, checked by type checkers and now; with queue and options of the task."""
        data, options = self._pack_run(args, kwargs)
        named: StoredJobArguments = {**self._named}
        if self._unique is not None:
            named["deduplication"] = options["deduplication"]
        if self._lane_of is not None:
            named["lane"] = options["lane"]
        return Call(self.name, data, self.handlers.queue, options, named, self)

    def after(self: Callable[Concatenate[A, Q], Any], *args: Q.args, **kwargs: Q.kwargs) -> CallAfter[A, R]:
        """A step of a `chain` or the callback of a `chord`: its first parameter gets the result of what runs before,
        the others are given here."""
        return cast("Task[..., R]", self)._step(args, kwargs)  # mypy cannot take a Task apart

    def _step(self, args: Iterable[Any], kwargs: Mapping[str, Any]) -> CallAfter[Any, R]:
        parameters = list(self._signature.parameters.values())
        if not parameters:
            raise InvalidOption(f"task {self.name!r}", "a first parameter for the result of the step before", None)
        data = self._checked(self._signature.replace(parameters=parameters[1:]), self._rest, args, kwargs)
        return CallAfter(
            Call(self.name, data, self.handlers.queue, self._options, self._named, self), parameters[0].name
        )

    def open_queue(self) -> Queue:
        """The queue of its runs."""
        return self._open_queue()

    async def add_many(self, calls: Iterable[Call[R] | Mapping[str, Any]]) -> list[TaskJob[R]]:
        """Store many runs, hundreds per round trip; each is a `call(...)` or the parameters by name.

        What `options` said of a call holds for it, else what this task says. All are checked before the first is sent.
        As with `Queue.add_many`, one failure may leave earlier ones stored.
        """
        checked = [self._new_job(one) for one in calls]
        queue, added = self._open_queue(), list[Job]()
        for level, jobs in groupby(checked, key=itemgetter(0)):
            # One call of the queue has one level; usually all jobs have the same.
            plain = [job for _, job in jobs]
            added += await queue.add_many(plain, durability=level, add_deadline=self._add_deadline)
        if self.handlers.after_add is not None:
            await self.handlers.after_add()
        return [TaskJob(self, job) for job in added]

    async def map(
        self,
        calls: Iterable[Call[R] | Mapping[str, Any]],
        *,
        timeout: int | timedelta | None = None,
        at_once: int | None = None,
    ) -> list[R]:
        """Store many runs and wait for all results, in order. The first failure is raised when its turn comes; the
        other jobs run on. `timeout` is per result.

        `at_once` bounds how many of them are stored and not finished: the next one is stored when one has ended, and
        after a failure no more.
        """
        if at_once is not None:
            return await self._map_bounded(calls, timeout, check_int("at_once", at_once, minimum=1))
        jobs = await self.add_many(calls)
        # All at once: when the turn of a job comes that ended long before, retention may have removed it.
        waits = [asyncio.ensure_future(job.result()) for job in jobs]
        try:
            return [await (wait if wait.done() else job.result(timeout)) for job, wait in zip(jobs, waits, strict=True)]
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _map_bounded(
        self, calls: Iterable[Call[R] | Mapping[str, Any]], timeout: int | timedelta | None, at_once: int
    ) -> list[R]:
        checked = enumerate([self._new_job(one) for one in calls])
        queue, results = self._open_queue(), dict[int, R]()

        async def run_next() -> None:
            for number, (level, job) in checked:
                [added] = await queue.add_many([job], durability=level, add_deadline=self._add_deadline)
                results[number] = await TaskJob(self, added).result(timeout)

        try:
            async with asyncio.TaskGroup() as runners:
                for _ in range(at_once):
                    runners.create_task(run_next())
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [results[number] for number in sorted(results)]

    def _new_job(self, one: Call[R] | Mapping[str, Any]) -> tuple[Durability | str | None, NewJob]:
        if isinstance(one, Call):
            if (one.task, one.queue) != (self.name, self.handlers.queue):
                raise InvalidOption("calls", f"calls of task {self.name!r} of queue {self.handlers.queue!r}", one.task)
            return self._apart(one.data, {**self._options, **one.named})
        if not isinstance(one, Mapping):
            raise InvalidOption("calls", f"{self.name}.call(...) or the parameters by name", one)
        return self._apart(*self._named_of(one))

    def _named_of(self, one: Mapping[str, Any]) -> tuple[dict[str, Any], StoredJobArguments]:
        """A run of parameters by their names."""
        return self._pack_run((), one)

    def _apart(self, data: Any, options: StoredJobArguments) -> tuple[Durability | str | None, NewJob]:
        given = options.copy()
        level = given.pop("durability", None)
        return level, NewJob(self.name, data, given)

    def _pack_run(self, args: Iterable[Any], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], StoredJobArguments]:
        """The job's data and options."""
        data = self._pack(args, kwargs)
        if self._unique is None and self._lane_of is None:
            return data, self._options
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()  # saying what holds anyway makes no other run
        options = self._options.copy()
        if self._lane_of is not None:
            options["lane"] = self._lane_of(**bound.arguments)
        if self._unique is not None:
            options["deduplication"] = self._name_deduplication(self._unique, bound.arguments)
        return data, options

    def _name_deduplication(self, unique: Unique, arguments: Mapping[str, Any]) -> Deduplication:
        """Which other runs mean the same as one with these arguments."""
        key = hash_of(arguments) if self._unique_key is None else self._unique_key(**arguments)
        return deduplication_of(self.name, key, unique)

    def _pack(self, args: Iterable[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The job's data: what the function would be called with, as JSON by its annotations."""
        return self._checked(self._signature, self._arguments, args, kwargs)

    def _checked(
        self, signature: inspect.Signature, types: type[Any], args: Iterable[Any], kwargs: Mapping[str, Any]
    ) -> dict[str, Any]:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"task {self.name!r} takes {parameters_of(signature)}: {error}") from None
        try:
            data: dict[str, Any] = to_builtins(bound.arguments)
            from_builtins(data, types)
        except (TypeError, msgspec.ValidationError) as error:
            expected = str(error).removeprefix("Expected ")
            raise InvalidOption(f"arguments of task {self.name!r}", expected, bound.arguments) from None
        return data

    # ---- running ------------------------------------------------------------------------------------------------

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    def run(self, job: Job, results: Mapping[str, Any] | None = None, **found: Any) -> Any:
        """Call the function with the arguments in a job, those that are results of other jobs, and those that the
        worker found; a coroutine if it is `async def`."""
        try:
            data = {} if job.data is None else job.data
            arguments = from_builtins({**data, **results} if results else data, self._arguments)
        except msgspec.ValidationError as error:
            raise PermanentError(f"task {self.name!r} cannot be called with this job's data: {error}") from None
        values = {name: getattr(arguments, name) for name in arguments.__struct_fields__}
        given = {name: value for name, value in values.items() if value is not msgspec.UNSET} | found
        return self.function(job, **given) if self._wants_job else self.function(**given)

    async def take_turn(self) -> None:
        """Raises DelayJob when this task has started as often as it may for now."""
        limit = self.rate_limit
        assert limit is not None
        wait_ms = await self._open_queue().take_turn(
            turn_of_task(self.name), most=limit.max, duration=limit.duration_ms
        )
        if wait_ms:
            raise DelayJob(wait_ms, f"task {self.name!r} has started {limit.max} times in {limit.duration_ms} ms")

    def write_result(self, value: Any) -> Any:
        """What the function returned, as JSON; what has no form in JSON is refused by the worker, with its path."""
        try:
            return to_builtins(value)
        except TypeError as error:
            raise PermanentError(f"task {self.name!r} returned what JSON cannot carry: {error}") from None

    def read_result(self, value: Any) -> R:
        try:
            return cast("R", from_builtins(value, self._returns))
        except msgspec.ValidationError as error:
            raise InvalidOption(f"result of task {self.name!r}", str(error), value) from None


def hash_of(arguments: Mapping[str, Any]) -> str:
    """The same text for the same values."""
    packed = msgspec.json.encode(to_builtins(arguments), order="deterministic")
    return hashlib.sha256(packed).hexdigest()[:32]


def deduplication_of(task: str, key: str, unique: Unique) -> Deduplication:
    """Runs of a task with this key are one."""
    require("unique_key", is_text(key), f"a function that returns text for {task}", key)
    return Deduplication(f"{task}:{key}", ttl=None if unique == "pending" else unique)


class TaskSet:
    """All tasks of one queue, as the handler of its worker. An unregistered name is a permanent failure."""

    def __init__(self, queue: str) -> None:
        self.queue = queue
        self._tasks: dict[str, Task[..., Any]] = {}
        self._threads: ThreadPoolExecutor | None = None
        self.after_add: Callable[[], Awaitable[None]] | None = None
        self.after_add_sync: Callable[[], None] | None = None
        """Called when runs were stored; tests then run them."""

    def add(self, task: Task[..., Any]) -> None:
        """Let the worker run this task too."""
        known = self._tasks.setdefault(task.name, task)
        if known is not task:
            place = f"{known.__module__}.{known.__qualname__}"
            raise InvalidOption("name", f"one that no other task of queue {self.queue!r} has ({place})", task.name)
        if len(self._tasks) == 1:
            # Where a child process finds this object: it imports the first task's module and asks the task.
            self.__module__, self.__qualname__ = task.__module__, f"{task.__qualname__}.handlers"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tasks)

    @property
    def schedules(self) -> tuple[DeclaredScheduler, ...]:
        """Of the tasks with `every` or `cron`."""
        return tuple(task.schedule for task in self._tasks.values() if task.schedule is not None)

    @property
    def needs_of_tasks(self) -> list[tuple[str, Needs]]:
        """What the worker has to find for each task."""
        return [(task.name, task.needs) for task in self._tasks.values() if task.needs]

    def is_plain(self, job: Job) -> bool:
        """Whether a plain function runs this job, in a thread."""
        task = self._tasks.get(job.name)
        return task is not None and not task.is_async

    def _find(self, name: str) -> Task[..., Any]:
        task = self._tasks.get(name)
        if task is None:
            known = ", ".join(sorted(self._tasks))
            raise PermanentError(f"queue {self.queue!r} has no task {name!r} here; there is {known}")
        if task.needs and current_scope.get() is None:
            raise NotConfigured(f"task {name!r} was registered after its worker started, which finds nothing for it")
        return task

    async def __call__(self, job: Job) -> Any:
        task, scope = self._find(job.name), current_scope.get()
        if task.rate_limit is not None:
            await task.take_turn()
        results = await _results_for(job) if b"bpmeta" in job.record.raw_opts else None
        if task.is_async:
            found = {} if scope is None else await scope.values(task.needs)
            return task.write_result(await task.run(job, results, **found))
        # The worker's own way of running plain functions: the slot stays taken until the thread returns.
        job.bind_to_running_loop()
        run = partial(task.run, results=results)
        if scope is not None:
            await scope.prepare(task.needs)
            run = partial(scope.call_plain, run, task.needs)
        result = await run_thread(self._own_threads(), run, job, None)
        if isinstance(result, Raised):
            raise result.error
        return task.write_result(result.value)

    def _own_threads(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix=f"bullpen-{self.queue}")
        return self._threads


async def _results_for(job: Job) -> dict[str, Any] | None:
    """What the runs before this one returned, by the parameter that gets it; None for a run that starts on its own."""
    headers = job.meta.headers
    into = headers.get(_INTO)
    if not isinstance(into, str):
        return None
    values = await job.children_values()
    in_order = [values[key] for key in sorted(values, key=_number_of)]
    if headers.get(_MANY):
        return {into: in_order}
    if len(in_order) != 1:
        raise PermanentError(
            f"job {job.id!r} has {len(in_order)} results of the previous step, but exactly one is needed"
        )
    return {into: in_order[0]}


def _number_of(key: str) -> tuple[int, str]:
    """The position of a child among its siblings: the end of its id."""
    number = key.rpartition("~")[2]
    return (int(number) if number.isdecimal() else 0, key)


def _check_options(options: Mapping[str, Any]) -> None:
    """Refuse what `Queue.add` would refuse; that a replaced job needs a `job_id` is known when it is added."""
    replaces, level = options.get("replace_finished"), options.get("durability")
    require("replace_finished", replaces is None or isinstance(replaces, bool), "True or False", replaces)
    if level is not None:
        Durability.read(level)
    rest = {name: value for name, value in options.items() if name not in ("replace_finished", "durability")}
    make_options(DEFAULT_OPTIONS, **rest)


def _check_unique(unique: Any, key: Any, options: Mapping[str, Any]) -> None:
    if unique is None:
        require("unique_key", key is None, "none without unique", key)
        return
    if unique != "pending":
        is_time = not isinstance(unique, str | bool)
        require("unique", is_time, "'pending' (until it has ended), or how long (ms or timedelta)", unique)
        to_ms("unique", unique, minimum=1)
    require("unique_key", key is None or callable(key), "a function of the task's parameters that returns text", key)
    require("unique", options.get("deduplication") is None, "not together with deduplication", unique)


def _parameters(function: Callable[..., Any], found: Collection[str]) -> tuple[inspect.Signature, bool]:
    """The parameters that come from a job's data, and whether the function wants the job itself before them. Those that
    are `found` come from elsewhere."""
    if not inspect.isroutine(function):
        raise InvalidOption("task", "a function", function)
    name = getattr(function, "__qualname__", repr(function))
    signature = inspect.signature(function, eval_str=True)
    parameters = list(signature.parameters.values())
    first = parameters[0].annotation if parameters else None
    wants_job = (get_origin(first) or first) is Job
    named = [one for one in (parameters[1:] if wants_job else parameters) if one.name not in found]
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
