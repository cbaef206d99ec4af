"""Tasks whose function gets many runs at once: a list of their data in, a list of their results out.

In: a function of one list. Out: a `BatchTask`: each run is a job of its own, added, retried and cancelled alone, and
its data is one item of the list. Elsewhere: forming batches (`bullpen.worker.batches`), other tasks (`tasks`).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, Protocol, TypeVar, Union, cast, get_args, get_origin, get_type_hints, overload

import msgspec

from bullpen._kernel.execute import run_async, run_thread
from bullpen._kernel.injection import current_scope, needs_of
from bullpen._kernel.outcome import Raised, Result, Returned
from bullpen.errors import InvalidOption, NotConfigured, PermanentError, require
from bullpen.queue.argument_types import check_argument, check_result, from_builtins, to_builtins
from bullpen.queue.arguments import StoredJobArguments
from bullpen.queue.batch import JobBatch, shares
from bullpen.queue.job import Job
from bullpen.queue.tasks import CallAfter, R, Task, TaskSet, Unique, deduplication_of, hash_of
from bullpen.wire.deduplication import Deduplication

__all__ = ["BatchTask", "BatchTaskMaker", "BatchTaskSet"]

X = TypeVar("X")


class BatchTaskMaker(Protocol):
    """Turns a function of a list into a task of one item: `add` stores one, the function gets many."""

    @overload
    def __call__(self, function: Callable[[JobBatch, list[X]], Coroutine[Any, Any, list[R]]], /) -> Task[[X], R]: ...
    @overload
    def __call__(self, function: Callable[[JobBatch, list[X]], Coroutine[Any, Any, None]], /) -> Task[[X], None]: ...
    @overload
    def __call__(self, function: Callable[[list[X]], Coroutine[Any, Any, list[R]]], /) -> Task[[X], R]: ...
    @overload
    def __call__(self, function: Callable[[list[X]], Coroutine[Any, Any, None]], /) -> Task[[X], None]: ...
    @overload
    def __call__(self, function: Callable[[JobBatch, list[X]], list[R]], /) -> Task[[X], R]: ...
    @overload
    def __call__(self, function: Callable[[JobBatch, list[X]], None], /) -> Task[[X], None]: ...
    @overload
    def __call__(self, function: Callable[[list[X]], list[R]], /) -> Task[[X], R]: ...
    @overload
    def __call__(self, function: Callable[[list[X]], None], /) -> Task[[X], None]: ...


class BatchTask(Task[..., Any]):
    """A task of lists. Its jobs carry what one item is as JSON, an object, so that a Node producer can add one."""

    def _read(self, function: Callable[..., Any], *, strict: bool) -> None:
        require("strict", not strict, "none with batch: the type of an item says which fields it takes", strict)
        name = getattr(function, "__qualname__", repr(function))
        hints = get_type_hints(function, include_extras=True)
        self.needs = needs_of(function) if inspect.isroutine(function) else {}
        named = inspect.signature(function, eval_str=True).parameters
        parameters = [parameter for each, parameter in named.items() if each not in self.needs]
        self._wants_batch = bool(parameters) and hints.get(parameters[0].name) is JobBatch
        items = parameters[1:] if self._wants_batch else parameters
        kind = hints.get(items[0].name) if len(items) == 1 else None
        if get_origin(kind) not in (list, Sequence) or not get_args(kind):
            raise InvalidOption(f"batch task {name}", "a function of one list, such as `rows: list[Row]`", str(kind))
        self._item: Any = get_args(kind)[0]
        shape = msgspec.inspect.type_info(self._item)
        if not isinstance(shape, _OBJECTS):
            expected = "a list of dataclasses, structs, typed dictionaries or dictionaries, which are objects in JSON"
            raise InvalidOption(f"batch task {name}", expected, str(kind))
        self._signature = inspect.Signature([items[0].replace(annotation=self._item)])
        check_argument(f"parameter {items[0].name!r} of task {name!r}", self._item)
        self._returns = _without_errors(hints.get("return", Any))
        check_result(f"result of task {name!r}", self._returns)

    def _declare(self, rule: Mapping[str, Any]) -> NoReturn:
        raise InvalidOption(f"task {self.name!r}", "no schedule: a run by itself has no item", ", ".join(rule))

    def _step(self, args: Iterable[Any], kwargs: Mapping[str, Any]) -> CallAfter[Any, Any]:
        raise InvalidOption(f"task {self.name!r}", "the first of a chain, or in a group: it takes no results", "after")

    # ---- adding -------------------------------------------------------------------------------------------------

    def _pack(self, args: Iterable[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        [item] = self._signature.bind(*args, **kwargs).arguments.values()
        try:
            data: dict[str, Any] = to_builtins(item)
            from_builtins(data, self._item)
        except (TypeError, msgspec.ValidationError) as error:
            raise InvalidOption(
                f"arguments of task {self.name!r}", str(error).removeprefix("Expected "), item
            ) from None
        return data

    def _pack_run(self, args: Iterable[Any], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], StoredJobArguments]:
        data = self._pack(args, kwargs)
        options = self._options.copy()
        item = from_builtins(data, self._item)
        if self._lane_of is not None:
            options["lane"] = self._lane_of(item)
        if self._unique is not None:
            options["deduplication"] = self._deduplicated(self._unique, item, data)
        return data, options

    def _deduplicated(self, unique: Unique, item: Any, data: dict[str, Any]) -> Deduplication:
        key = hash_of(data) if self._unique_key is None else self._unique_key(item)
        return deduplication_of(self.name, key, unique)

    def _named_of(self, one: Mapping[str, Any]) -> tuple[dict[str, Any], StoredJobArguments]:
        return self._pack_run((one,), {})

    # ---- running ------------------------------------------------------------------------------------------------

    def read(self, batch: JobBatch) -> tuple[JobBatch, list[Any]]:
        """The jobs whose data fits, and their items; the others fail here, each alone."""
        fitting, items = list[Job](), list[Any]()
        for job in batch:
            try:
                items.append(from_builtins(job.data, self._item))
                fitting.append(job)
            except msgspec.ValidationError as error:
                said = f"task {self.name!r} cannot be called with this job's data: {error}"
                batch.decide(job, Raised(PermanentError(said)))
        return batch.only(fitting), items

    def call_with(self, batch: JobBatch, items: list[Any], **found: Any) -> Any:
        """What the function returns; a coroutine if it is `async def`."""
        return self.function(batch, items, **found) if self._wants_batch else self.function(items, **found)

    def written(self, result: Result) -> Result:
        """What became of one run, with its value as JSON."""
        if isinstance(result, Raised):
            return result
        try:
            return Returned(self.write_result(result.value))
        except PermanentError as error:
            return Raised(error)


_OBJECTS = (
    msgspec.inspect.StructType,
    msgspec.inspect.DataclassType,
    msgspec.inspect.TypedDictType,
    msgspec.inspect.DictType,
)


def _without_errors(returned: Any) -> Any:
    """Of `list[int | PermanentError]` what a run can have as its value."""
    if get_origin(returned) is not list:
        return Any if returned is Any else type(None)
    kinds = get_args(get_args(returned)[0]) or (get_args(returned)[0],)
    values = [kind for kind in kinds if not (isinstance(kind, type) and issubclass(kind, BaseException))]
    return cast("Any", Union[tuple(values)]) if values else type(None)  # noqa: UP007 - made of a list


class BatchTaskSet(TaskSet):
    """All batch tasks of one queue, as the handler of its worker: a batch is taken apart by the names of its jobs, and
    each task gets its own ones in one call."""

    def is_plain(self, job: Job) -> bool:
        """A batch may be for several tasks of either kind: what is around it runs on the loop."""
        return False

    async def __call__(self, batch: JobBatch) -> None:  # type: ignore[override]  # the worker that has it forms batches
        jobs_of: dict[str, list[Job]] = {}
        for job in batch:
            jobs_of.setdefault(job.name, []).append(job)
        await asyncio.gather(*(self._run(name, batch.only(jobs)) for name, jobs in jobs_of.items()))

    async def _run(self, name: str, batch: JobBatch) -> None:
        try:
            task = cast("BatchTask", self._find(name))
        except (NotConfigured, PermanentError) as error:
            self._share_out(batch, [Raised(error)] * len(batch))
            return
        fitting, items = task.read(batch)
        if not items:
            return
        scope, call = current_scope.get(), partial(task.call_with, items=items)
        if task.is_async:
            found = {} if scope is None else await scope.values(task.needs)
            result = await run_async(partial(call, **found), fitting, None)
        else:
            for job in fitting:
                job.bind_to_running_loop()
            if scope is not None:
                await scope.prepare(task.needs)
                call = partial(scope.call_plain, call, task.needs)
            result = await run_thread(self._own_threads(), call, fitting, None)
        self._share_out(fitting, [task.written(share) for share in shares(result, len(fitting))])

    def _share_out(self, batch: JobBatch, results: list[Result]) -> None:
        for job, result in zip(batch, results, strict=True):
            batch.decide(job, result)
