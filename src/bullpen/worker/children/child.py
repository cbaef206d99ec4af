"""The child process that runs handlers for a worker with `processes=True`.

Started by `pool`; its arguments are the numbers of two inherited files, a socket and a pipe. In: messages on
the socket, first where the handler is, then jobs. Out: progress, logs and one result per job. An `async def` handler
runs on an event loop, a plain one in the main thread and without a loop: half the processor time per job. The life pipe
is held open by the parent alone: when it ends, however the parent died, so does this process at once. Elsewhere: how
messages get through (`frames`).
"""

from __future__ import annotations

import asyncio
import contextvars
import importlib
import os
import runpy
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from datetime import timedelta
from functools import cache, partial
from typing import Any, Final, Protocol

from bullpen._kernel import json, log_formats
from bullpen._kernel.execute import is_async, run_async, run_plain
from bullpen._kernel.outcome import Raised, Result, describe
from bullpen._kernel.remote import qualified
from bullpen.errors import (
    BullpenError,
    DelayJob,
    JobSignal,
    NotJson,
    PayloadTooLarge,
    RateLimited,
)
from bullpen.queue.batch import JobBatch, shares
from bullpen.queue.cancel import Cancelled
from bullpen.queue.changes import JobChanges
from bullpen.queue.children import ChildrenCounts
from bullpen.queue.job import Job, Mark
from bullpen.queue.states import JobState
from bullpen.wire.records import JobRecord
from bullpen.worker.around import Around, Surroundings
from bullpen.worker.children.frames import BlockingLink, EndOfMessages, LoopLink, Message, frame
from bullpen.worker.children.limits import ChildLimits

READY: Final[Message] = {"kind": "ready"}


class Parent(Protocol):
    """The other end: does what a job here asks for."""

    async def ask(self, job: int, action: str, args: tuple[Any, ...]) -> Any: ...


class ParentActions:
    """What a job in a child can do: it asks the parent. `number`: which of the batch that runs here."""

    def __init__(self, queue: str, queue_key: str, parent: Parent, number: int) -> None:
        self._queue, self.queue_key = queue, queue_key
        self._parent, self._number = parent, number

    @property
    def name(self) -> str:
        return self._queue

    async def _ask(self, action: str, *args: Any) -> Any:
        """Have the parent do this, and return its answer."""
        return await self._parent.ask(self._number, action, args)

    # Without the job's id: the parent knows which job runs here, and takes nobody's word for it.

    async def update_progress(self, job_id: str, progress: bytes) -> None:
        await self._ask("update_progress", progress)

    async def add_log(self, job_id: str, line: str, keep: int) -> int:
        return int(await self._ask("add_log", line, keep))

    async def update_data(self, job_id: str, data: bytes) -> None:
        await self._ask("update_data", data)

    async def state_of(self, job_id: str) -> JobState:
        return JobState(await self._ask("state_of"))

    async def read_logs(
        self, job_id: str, start: int = 0, count: int | None = None, *, newest_first: bool = False
    ) -> list[str]:
        lines = list(await self._ask("read_logs"))
        return (lines[::-1] if newest_first else lines)[start:][:count]

    async def clear_logs(self, job_id: str, keep: int) -> None:
        await self._ask("clear_logs", keep)

    async def remove_unprocessed_children(self, job_id: str) -> int:
        return int(await self._ask("remove_unprocessed_children"))

    async def remove_deduplication(self, job_id: str, deduplication_id: str) -> bool:
        return bool(await self._ask("remove_deduplication", deduplication_id))

    async def count_children(self, job_id: str) -> ChildrenCounts:
        return ChildrenCounts(**await self._ask("count_children"))

    async def read_children(self, job_id: str, kind: str) -> list[bytes]:
        return list(await self._ask("read_children", kind))

    async def leave_parent(self, job_id: str) -> bool:
        return bool(await self._ask("leave_parent"))

    async def cancel(self, job_id: str, reason: str | None) -> Cancelled:
        raise BullpenError("a handler cannot cancel its own job; raise PermanentError")

    @property
    def changes(self) -> JobChanges:
        raise BullpenError("a handler in a child process cannot do this to its own job; raise DelayJob or the like")

    async def wait_result(self, job_id: str, timeout: int | timedelta | None, mark: Mark | None = None) -> Any:
        raise BullpenError("a handler cannot wait for its own result")


class LoopParent:
    """Asked on the loop, which reads the answers. One per run."""

    def __init__(self, link: LoopLink) -> None:
        self._link = link
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._number = 0
        self._answers: dict[int, asyncio.Future[Any]] = {}

    def answer(self, message: Message) -> None:
        future = self._answers.pop(message["number"], None)
        if future is not None and not future.done():
            if message["error"] is None:
                future.set_result(message["value"])
            else:
                future.set_exception(BullpenError(message["error"]))

    async def ask(self, job: int, action: str, args: tuple[Any, ...]) -> Any:
        self._number += 1
        future = self._answers[self._number] = asyncio.get_running_loop().create_future()
        self._link.send(_question(self._number, job, action, args))
        return await future

    def tell(self, message: Message) -> None:
        """Say what needs no answer; in any thread that the handler started, too."""
        if threading.get_ident() == self._thread:
            self._link.send(message)
        else:
            self._loop.call_soon_threadsafe(self._link.send, message)


class PlainParent:
    """Asked by a plain function or by threads that it started, one at a time, while its job runs."""

    def __init__(self, link: BlockingLink) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._has_ended = False
        self._reason: str | None = None
        self._has_signal = False
        self.jobs: Sequence[Job] = ()

    async def ask(self, job: int, action: str, args: tuple[Any, ...]) -> Any:
        """Blocks, and never awaits anything: see `run_plainly`."""
        with self._lock:
            self._require_running()
            self._link.send(_question(0, job, action, args))
            message = self._link.receive()
            while message["kind"] == "cancel":  # the answer comes behind it
                self._note(message)
                message = self._link.receive()
        if self._has_signal:  # it came in between, when nobody could look what it means
            signal.raise_signal(signal.SIGTERM)  # to the main thread, whichever this is
        if message["error"] is not None:
            raise BullpenError(message["error"])
        return message["value"]

    def tell(self, message: Message) -> None:
        """Say what needs no answer."""
        with self._lock:
            self._require_running()
            self._link.send(message)

    def _require_running(self) -> None:
        if self._has_ended:
            raise BullpenError("the job has ended; its handler left a thread that still uses the job")

    def _note(self, message: Message) -> None:
        if message["job"] is None:
            self._reason = message["reason"]
        else:
            _note_left(self.jobs[message["job"]], message["reason"])

    def cancel_reason(self) -> str | None:
        """Why the parent wants the job to end, None if it does not. Called in the main thread, by the handler of its
        signal: one that was sent to the whole group means nothing."""
        self._has_signal = True  # before the look at the lock: whoever holds it looks here when it is free
        if self._lock.locked():
            return None
        self._has_signal = False
        while self._reason is None and self._link.has_message():
            self._note(self._link.receive())
        return self._reason

    def end(self, message: Message) -> None:
        """Tell the job's result. From now on nothing may be asked: what the parent sends next is another job."""
        with self._lock:
            self._has_ended = True
            self._link.send(message)


def _note_left(job: Job, reason: str | None) -> None:
    """One of a batch is not wanted any more. Without a reason its lock is lost."""
    job.cancelled = True
    if reason is not None:
        job.note_cancelled(reason)


def _question(number: int, job: int, action: str, args: tuple[Any, ...]) -> Message:
    return {"kind": "ask", "number": number, "job": job, "action": action, "args": args}


class ChildRun:
    """What was sent to be run here: a job, or several for one call of the handler."""

    def __init__(self, message: Message, parent: LoopParent | PlainParent) -> None:
        place = message["queue"], message["queue_key"], parent
        self.jobs = tuple(
            Job(ParentActions(*place, number), JobRecord(job_id, dict(fields)))
            for number, (job_id, fields) in enumerate(message["jobs"])
        )
        self._parent = parent
        self._decided: set[int] = set()
        self.subject: Any = JobBatch(self.jobs, self._decide) if message["is_batch"] else self.jobs[0]
        """What the handler gets."""

    def _decide(self, job: Job, result: Result) -> bool:
        """The handler ends one job and goes on with the others."""
        number = self.jobs.index(job)
        if number in self._decided:
            return False
        self._decided.add(number)
        self._parent.tell({"kind": "decided", "job": number, "result": _result_message(result)})
        return True

    def note_cancelled(self, reason: str) -> None:
        """None of it is wanted any more."""
        self.subject.cancelled = True
        for job in self.jobs:
            job.note_cancelled(reason)

    def end_message(self, result: Result) -> Message:
        """What the call came to. A value that no job can have fails that job alone."""
        if self.subject is self.jobs[0] or isinstance(result, Raised) or result.value is None:
            return _result_message(result)
        return {"kind": "shared", "results": [_result_message(each) for each in shares(result, len(self.jobs))]}


def run_plainly(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that never awaits anything that takes time."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    raise BullpenError("this needs an event loop: make the handler an `async def`")


def find_handler(setup: Message) -> Callable[[Any], Any]:
    """Import the handler by where the parent found it; never by anything that stands in a job."""
    sys.path[:] = setup["path"]
    handler: Callable[[Any], Any] = _find(setup)
    return handler


def find_around(setup: Message) -> Around | None:
    """What the app runs around jobs and processes, if it has anything of the kind."""
    around: Around | None = None if setup["app"] is None else _find(setup["app"]).around
    return around


def _find(place: Message) -> Any:
    first, *rest = place["name"].split(".")
    found = _program(place["main"])[first] if place["main"] else getattr(_module(place["module"]), first)
    for part in rest:
        found = getattr(found, part)
    return found


_module = importlib.import_module


@cache
def _program(path: str) -> dict[str, Any]:
    """Run once, though handler and app may both be in it."""
    return runpy.run_path(path, run_name="__bullpen_main__")


def _result_message(result: Result) -> Message:
    if isinstance(result, Raised):
        return _error_message(result.error)
    try:
        value = json.encode(result.value, what="return value")
        json.check_result_size(len(value))
    except (NotJson, PayloadTooLarge) as error:
        return {**_error_message(error), "signal": "PermanentError"}
    return {"kind": "returned", "value": value}


def _broken(error: BaseException) -> Message:
    return {"kind": "broken", "reason": f"{type(error).__name__}: {describe(error)[0]}"}


def _error_message(error: BaseException) -> Message:
    reason, stack = describe(error)
    message: Message = {
        "kind": "raised",
        "reason": reason,
        "stack": stack,
        "classes": [qualified(kind) for kind in type(error).__mro__],
        "signal": None,
        "wait_ms": 0,
    }
    if isinstance(error, JobSignal):
        known = next(kind for kind in type(error).__mro__ if kind.__module__ == "bullpen.errors")
        message["signal"] = known.__name__
        wait = error.delay if isinstance(error, DelayJob) else error.pause if isinstance(error, RateLimited) else 0
        message["wait_ms"] = wait // timedelta(milliseconds=1) if isinstance(wait, timedelta) else wait
    return message


_on_sigterm: Callable[[], None] | None = None
"""What to do at a SIGTERM while a plain function runs."""


def _die_with_parent(life_fd: int) -> None:
    os.read(life_fd, 1)  # nothing is ever written: this returns when the parent is gone
    os._exit(70)


def _leave_signals_to_parent() -> None:
    """Ctrl-C and a stopped service reach all processes of a group. Whether a job may end is the parent's decision, and
    no child outlives it. What a handler starts obeys signals as ever: a program, since they are not ignored here, and
    a fork, which gets back what was there before; until it has, they wait."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    masks = threading.local()

    def do_nothing(number: int, frame: object) -> None:
        if number == signal.SIGTERM and _on_sigterm is not None:
            _on_sigterm()

    def hold_back() -> None:
        masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, before)

    def let_go() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.before)

    def give_back() -> None:
        for number, handler in before.items():
            if signal.getsignal(number) is do_nothing:
                signal.signal(number, handler)
        let_go()

    for number in before:
        signal.signal(number, do_nothing)
    os.register_at_fork(before=hold_back, after_in_parent=let_go, after_in_child=give_back)


def _keep_to_ourselves(*numbers: int) -> None:
    """What a handler starts or forks must not speak for it, nor keep the parent from seeing that this process ended.
    Programs do not get these files, because they are closed with `exec`; a fork gets nothing in their place, under the
    same numbers, so that nobody closes somebody else's file later."""

    def replace() -> None:
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in numbers:
            os.dup2(nothing, number, inheritable=False)
        os.close(nothing)

    os.register_at_fork(after_in_child=replace)


async def _serve_on_loop(
    setup: Message, link: socket.socket, handler: Callable[[Any], Any], limits: ChildLimits
) -> None:
    async with AsyncExitStack() as stack:
        around = find_around(setup)
        if around is not None:
            try:
                await stack.enter_async_context(around.started())
            except Exception as error:  # noqa: BLE001 - user code
                link.sendall(frame(_broken(error)))
                return
            handler = _surroundings(around, handler, setup).on_loop()
        link.sendall(frame(READY))
        await _run_on_loop(link, handler, limits)


async def _run_on_loop(link: socket.socket, handler: Callable[[Any], Any], limits: ChildLimits) -> None:
    messages = await LoopLink.open(link)
    running: dict[asyncio.Task[None], ChildRun] = {}  # held here, or the loop might forget it; never more than one
    parent = LoopParent(messages)

    async def serve(run: ChildRun) -> None:
        try:
            result = await run_async(handler, run.subject, None)
        except asyncio.CancelledError as error:
            result = Raised(error)
        messages.send(run.end_message(result))

    while True:
        message = await messages.receive()
        if message["kind"] == "cancel":
            for task, run in running.items():
                if message["job"] is not None:
                    _note_left(run.jobs[message["job"]], message["reason"])
                else:
                    run.note_cancelled(message["reason"])
                    task.cancel()
        elif message["kind"] == "run":
            limits.begin_job()
            parent = LoopParent(messages)
            run = ChildRun(message, parent)
            task = asyncio.create_task(serve(run))
            running[task] = run
            task.add_done_callback(running.pop)
        elif message["kind"] == "answer":
            parent.answer(message)
        elif message["kind"] == "end":
            return


def _surroundings(around: Around, handler: Callable[[Any], Any], setup: Message) -> Surroundings:
    return around.surroundings(handler, setup["queue"], batches=setup["batches"])


RunHere = Callable[[ChildRun, PlainParent], Result]


def _serve_plainly(setup: Message, link: BlockingLink, handler: Callable[[Any], Any], limits: ChildLimits) -> None:
    around = find_around(setup)
    if around is None:
        link.send(READY)
        _run_plainly(link, partial(_run_here, handler), limits)
        return
    # The loop stands still while a handler runs: a plain one has the main thread to itself, for signals.
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        started = around.started()
        try:
            loop.run_until_complete(started.__aenter__())
        except Exception as error:  # noqa: BLE001 - user code
            link.send(_broken(error))
            return
        link.send(READY)
        surroundings = _surroundings(around, handler, setup)
        _run_plainly(link, partial(_run_surrounded, loop, surroundings), limits)
        loop.run_until_complete(started.__aexit__(None, None, None))


def _run_plainly(link: BlockingLink, call: RunHere, limits: ChildLimits) -> None:
    while True:
        message = link.receive()
        if message["kind"] == "cancel":
            continue  # the job had ended just before
        if message["kind"] == "end":
            return
        limits.begin_job()
        parent = PlainParent(link)
        run = ChildRun(message, parent)
        parent.jobs = run.jobs
        for job in run.jobs:
            job.bind(run_plainly)
        parent.end(run.end_message(call(run, parent)))


def _run_surrounded(
    loop: asyncio.AbstractEventLoop, surroundings: Surroundings, run: ChildRun, parent: PlainParent
) -> Result:
    """What is around the handler on the loop, in one task; the handler in between, while the loop stands still."""
    context = contextvars.copy_context()
    entered: asyncio.Future[Callable[[Any], Any]] = loop.create_future()
    ended: asyncio.Future[Result] = loop.create_future()

    async def call(within: Callable[[Any], Any]) -> Result:
        entered.set_result(within)
        return await ended

    task = loop.create_task(surroundings.run_plain(run.subject, call), context=context)
    task.add_done_callback(lambda _: entered.done() or entered.cancel())
    loop.run_until_complete(asyncio.wait([entered]))
    if not entered.cancelled():
        ended.set_result(context.run(_run_here, entered.result(), run, parent))
    return loop.run_until_complete(task)


def _run_here(handler: Callable[[Any], Any], run: ChildRun, parent: PlainParent) -> Result:
    """In the main thread. Meanwhile SIGTERM raises CancelledError in the handler, if the parent says that it is meant.
    Once: what the handler does then to clean up is not disturbed."""
    global _on_sigterm
    is_told = False

    def end() -> None:
        nonlocal is_told
        reason = None if is_told else parent.cancel_reason()
        if reason is not None:
            is_told = True
            run.note_cancelled(reason)
            raise asyncio.CancelledError

    try:
        _on_sigterm = end
        end()  # the signal may have come before
        # A context of its own for each job, as every task of a loop has one.
        result = contextvars.copy_context().run(run_plain, handler, run.subject)
        _on_sigterm = None
        return result
    except asyncio.CancelledError as error:
        return Raised(error)
    finally:
        _on_sigterm = None


def main() -> None:
    socket_fd, life_fd = (int(text) for text in sys.argv[1:3])
    _keep_to_ourselves(socket_fd, life_fd)
    _leave_signals_to_parent()
    threading.Thread(target=_die_with_parent, args=(life_fd,), daemon=True).start()
    link = BlockingLink(socket.socket(fileno=socket_fd))
    try:
        setup = link.receive()
        log_formats.configure_child(setup["logs"])
        limits = ChildLimits.from_message(setup["limits"])
        limits.set()
        handler = find_handler(setup)
    except Exception as error:  # noqa: BLE001 - user code of the module's top level
        link.send(_broken(error))
        return
    try:
        if is_async(handler):
            asyncio.run(_serve_on_loop(setup, link.socket, handler, limits))
        else:
            _serve_plainly(setup, link, handler, limits)
    except (EndOfMessages, OSError):
        pass  # the parent closed the socket
    sys.stdout.flush()
    os._exit(0)  # a thread that a handler left must not hold us
