"""Tasks that follow each other: chains, groups, and chords, which are flows whose jobs hand on their results.

In: calls of tasks. Out: one flow, stored in one atomic step; the job of the last task has the result of the whole. A
step that comes after others gets their results as its first parameter, typed as its annotation says: the worker reads
them from the finished children when the step begins, so a crash in between loses nothing.
Elsewhere: trees of jobs (`flows`), tasks (`tasks`), where the results are put in (`tasks.TaskSet`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar, Unpack, overload

from bullpen._kernel.ids import random_id
from bullpen.errors import InvalidOption, require
from bullpen.queue.flows import Flow
from bullpen.queue.tasks import Call, CallAfter, Task, TaskJob
from bullpen.wire.links import OnFailure, check_on_failure
from bullpen.wire.options import JobArguments

__all__ = ["CallGroup", "TakesOne", "Work", "chain", "chord", "group", "to_flow"]

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
E = TypeVar("E")
R = TypeVar("R")
A_contra = TypeVar("A_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)


class TakesOne(Protocol[A_contra, R_co]):
    """A task that needs one argument: what type checkers see of it, whatever else its parameters are."""

    def __call__(self, result: A_contra, /) -> Any: ...
    def read_result(self, value: Any) -> R_co: ...


class Work(Generic[R]):
    """Runs of tasks that end in one: what `chain` and `chord` make. `add` stores it, `result` of the job waits."""

    def __init__(self, last: Call[R], before: Sequence[Call[Any] | Work[Any]], on_failure: OnFailure) -> None:
        self._last, self._before, self._on_failure = last, tuple(before), on_failure

    def __repr__(self) -> str:
        return f"Work({self._last.task!r}, after {len(self._before)})"

    async def add(self) -> TaskJob[R]:
        """Store all runs in one atomic step, and return the job of the last one."""
        task = self._last.source
        tree = await task.open_queue().add_flow(self.to_flow(), durability=self._last.options.get("durability"))
        return TaskJob(task, tree.job)

    def to_flow(self, **link: Unpack[JobArguments]) -> Flow:
        """The flow that is stored; `link` are options of its root."""
        job_id = link.get("job_id") or self._last.options.get("job_id") or random_id()
        # Numbered, so that results come in the order of the calls.
        children = [
            to_flow(one, job_id=f"{job_id}~{number}", on_failure=self._on_failure)
            for number, one in enumerate(self._before)
        ]
        link["job_id"] = job_id
        return _flow_of(self._last, children, link)


class CallGroup(Generic[R]):
    """Runs that do not wait for each other."""

    def __init__(self, members: Iterable[Call[R] | Work[R]]) -> None:
        self.members = tuple(members)
        for one in self.members:
            require("group", isinstance(one, Call | Work), "calls of tasks: task.call(...)", one)

    def __repr__(self) -> str:
        return f"CallGroup({len(self.members)})"

    async def add(self) -> list[TaskJob[R]]:
        """Store all members, those of each queue in one atomic step. Returns their jobs in order."""
        added: dict[int, TaskJob[R]] = {}
        by_queue: dict[str, list[int]] = {}
        for number, one in enumerate(self.members):
            by_queue.setdefault(_last_of(one).queue, []).append(number)
        for numbers in by_queue.values():
            task = _last_of(self.members[numbers[0]]).source
            flows = [to_flow(self.members[number]) for number in numbers]
            for number, tree in zip(numbers, await task.open_queue().add_flows(flows), strict=True):
                added[number] = TaskJob(_last_of(self.members[number]).source, tree.job)
        return [added[number] for number in sorted(added)]


def to_flow(one: Call[Any] | Work[Any], **link: Unpack[JobArguments]) -> Flow:
    """A call, or work, as a flow."""
    return one.to_flow(**link) if isinstance(one, Work) else _flow_of(one, (), link)


def _flow_of(call: Call[Any], children: Sequence[Flow], link: JobArguments) -> Flow:
    options: Any = {name: value for name, value in call.options.items() if name != "durability"}
    return Flow(call.task, dict(call.data), queue=call.source.open_queue(), children=children, **{**options, **link})


def _last_of(one: Call[R] | Work[R]) -> Call[R]:
    return one._last if isinstance(one, Work) else one


def _step(one: Any, *, takes: str) -> CallAfter[Any, Any]:
    """A task that is given alone gets nothing but results; one with further arguments is `task.after(...)`."""
    step = one.after() if isinstance(one, Task) else one
    if not isinstance(step, CallAfter):
        raise InvalidOption(takes, "a task, or task.after(...) with its other arguments", one)
    return step


@overload
def chain(first: Call[A] | Work[A], second: TakesOne[A, B] | CallAfter[A, B], /) -> Work[B]: ...
@overload
def chain(
    first: Call[A] | Work[A], second: TakesOne[A, B] | CallAfter[A, B], third: TakesOne[B, C] | CallAfter[B, C], /
) -> Work[C]: ...
@overload
def chain(
    first: Call[A] | Work[A],
    second: TakesOne[A, B] | CallAfter[A, B],
    third: TakesOne[B, C] | CallAfter[B, C],
    fourth: TakesOne[C, D] | CallAfter[C, D],
    /,
) -> Work[D]: ...
@overload
def chain(
    first: Call[A] | Work[A],
    second: TakesOne[A, B] | CallAfter[A, B],
    third: TakesOne[B, C] | CallAfter[B, C],
    fourth: TakesOne[C, D] | CallAfter[C, D],
    fifth: TakesOne[D, E] | CallAfter[D, E],
    /,
    *rest: TakesOne[Any, Any] | CallAfter[Any, Any],
) -> Work[Any]: ...
def chain(first: Call[Any] | Work[Any], /, *rest: TakesOne[Any, Any] | CallAfter[Any, Any]) -> Work[Any]:
    """Runs one after the other: each gets the result of the one before as its first parameter.

        chain(load.call("orders.csv"), parse, store.after(table="orders"))

    When one fails finally, those after it fail, too.
    """
    require("chain", isinstance(first, Call | Work), "a call of a task first: task.call(...)", first)
    require("chain", bool(rest), "at least two steps", rest)
    work: Call[Any] | Work[Any] = first
    for one in rest:
        work = Work(_step(one, takes="chain").prepared(many=False), [work], "fail_parent")
    assert isinstance(work, Work)
    return work


def group(members: Iterable[Call[R] | Work[R]] | Call[R] | Work[R], /, *more: Call[R] | Work[R]) -> CallGroup[R]:
    """Runs that do not wait for each other: `group(fetch.call(url) for url in urls)`."""
    if isinstance(members, Call | Work):
        return CallGroup((members, *more))
    if inspect.iscoroutine(members):
        members.close()  # it will never run, and a warning about that would come from nowhere
    require("group", isinstance(members, Iterable), "calls of tasks: task.call(...)", members)
    return CallGroup((*members, *more))


def chord(
    members: CallGroup[A],
    callback: TakesOne[list[A], B] | CallAfter[list[A], B],
    /,
    *,
    on_failure: OnFailure = "fail_parent",
) -> Work[B]:
    """A group and what runs when all of it is done: its first parameter gets the list of results, in order.

    `on_failure` says what a member that fails finally does: `fail_parent` fails the callback; with `ignore` and
    `remove` the list has only what the others returned; with `wait` the callback waits until the member is redriven.
    """
    require("chord", isinstance(members, CallGroup), "group(...) first", members)
    check_on_failure(on_failure)
    return Work(_step(callback, takes="chord").prepared(many=True), members.members, on_failure)
