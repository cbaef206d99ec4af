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
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from datetime import timedelta
from functools import cache, partial
from typing import Any, Final

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
from bullpen.queue.cancel import Cancelled
from bullpen.queue.changes import JobChanges
from bullpen.queue.children import ChildrenCounts
from bullpen.queue.job import Handler, Job, Mark
from bullpen.queue.states import JobState
from bullpen.wire.records import JobRecord
from bullpen.worker.around import Around, Surroundings
from bullpen.worker.children.frames import BlockingLink, EndOfMessages, LoopLink, Message, frame
from bullpen.worker.children.limits import ChildLimits

READY: Final[Message] = {"kind": "ready"}


class ParentActions(ABC):
    """What a job in a child can do: it asks the parent."""

    def __init__(self, queue: str, queue_key: str) -> None:
        self._queue, self.queue_key = queue, queue_key

    @property
    def name(self) -> str:
        return self._queue

    @abstractmethod
    async def _ask(self, action: str, *args: Any) -> Any:
        """Have the parent do this, and return its answer."""

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


class LoopActions(ParentActions):
    """Asked on the loop, which reads the answers."""

    def __init__(self, queue: str, queue_key: str, link: LoopLink) -> None:
        super().__init__(queue, queue_key)
        self._link = link
        self._number = 0
        self._answers: dict[int, asyncio.Future[Any]] = {}

    def answer(self, message: Message) -> None:
        future = self._answers.pop(message["number"], None)
        if future is not None and not future.done():
            if message["error"] is None:
                future.set_result(message["value"])
            else:
                future.set_exception(BullpenError(message["error"]))

    async def _ask(self, action: str, *args: Any) -> Any:
        self._number += 1
        future = self._answers[self._number] = asyncio.get_running_loop().create_future()
        self._link.send(_question(self._number, action, args))
        return await future


class PlainActions(ParentActions):
    """Asked by a plain function or by threads that it started, one at a time, while its job runs."""

    def __init__(self, queue: str, queue_key: str, link: BlockingLink) -> None:
        super().__init__(queue, queue_key)
        self._link = link
        self._lock = threading.Lock()
        self._has_ended = False
        self._reason: str | None = None
        self._has_signal = False

    async def _ask(self, action: str, *args: Any) -> Any:
        """Blocks, and never awaits anything: see `run_plainly`."""
        with self._lock:
            if self._has_ended:
                raise BullpenError("the job has ended; its handler left a thread that still uses the job")
            self._link.send(_question(0, action, args))
            message = self._link.receive()
            if message["kind"] == "cancel":  # the answer comes behind it
                self._reason = message["reason"]
                message = self._link.receive()
        if self._has_signal:  # it came in between, when nobody could look what it means
            signal.raise_signal(signal.SIGTERM)  # to the main thread, whichever this is
        if message["error"] is not None:
            raise BullpenError(message["error"])
        return message["value"]

    def cancel_reason(self) -> str | None:
        """Why the parent wants the job to end, None if it does not. Called in the main thread, by the handler of its
        signal: one that was sent to the whole group means nothing."""
        self._has_signal = True  # before the look at the lock: whoever holds it looks here when it is free
        if self._lock.locked():
            return None
        self._has_signal = False
        if self._reason is None and self._link.has_message():
            self._reason = self._link.receive().get("reason")
        return self._reason

    def end(self, message: Message) -> None:
        """Tell the job's result. From now on nothing may be asked: what the parent sends next is another job."""
        with self._lock:
            self._has_ended = True
            self._link.send(message)


def _question(number: int, action: str, args: tuple[Any, ...]) -> Message:
    return {"kind": "ask", "number": number, "action": action, "args": args}


def run_plainly(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that never awaits anything that takes time."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    raise BullpenError("this needs an event loop: make the handler an `async def`")


def find_handler(setup: Message) -> Handler:
    """Import the handler by where the parent found it; never by anything that stands in a job."""
    sys.path[:] = setup["path"]
    handler: Handler = _find(setup)
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


async def _serve_on_loop(setup: Message, link: socket.socket, handler: Handler, limits: ChildLimits) -> None:
    async with AsyncExitStack() as stack:
        around = find_around(setup)
        if around is not None:
            try:
                await stack.enter_async_context(around.started())
            except Exception as error:  # noqa: BLE001 - user code
                link.sendall(frame(_broken(error)))
                return
            handler = around.surroundings(handler, setup["queue"]).on_loop()
        link.sendall(frame(READY))
        await _run_on_loop(link, handler, limits)


async def _run_on_loop(link: socket.socket, handler: Handler, limits: ChildLimits) -> None:
    messages = await LoopLink.open(link)
    running: dict[asyncio.Task[None], Job] = {}  # held here, or the loop might forget it; never more than one
    actions: LoopActions | None = None

    async def run(job: Job) -> None:
        try:
            result = await run_async(handler, job, None)
        except asyncio.CancelledError as error:
            result = Raised(error)
        messages.send(_result_message(result))

    while True:
        message = await messages.receive()
        if message["kind"] == "cancel":
            for task, job in running.items():
                job.note_cancelled(message["reason"])
                task.cancel()
        elif message["kind"] == "run":
            limits.begin_job()
            actions = LoopActions(message["queue"], message["queue_key"], messages)
            job = _job(actions, message)
            task = asyncio.create_task(run(job))
            running[task] = job
            task.add_done_callback(running.pop)
        elif message["kind"] == "answer" and actions is not None:
            actions.answer(message)
        elif message["kind"] == "end":
            return


RunHere = Callable[[Job, PlainActions], Result]


def _serve_plainly(setup: Message, link: BlockingLink, handler: Handler, limits: ChildLimits) -> None:
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
        surroundings = around.surroundings(handler, setup["queue"])
        _run_plainly(link, partial(_run_surrounded, loop, surroundings), limits)
        loop.run_until_complete(started.__aexit__(None, None, None))


def _run_plainly(link: BlockingLink, run: RunHere, limits: ChildLimits) -> None:
    while True:
        message = link.receive()
        if message["kind"] == "cancel":
            continue  # the job had ended just before
        if message["kind"] == "end":
            return
        limits.begin_job()
        actions = PlainActions(message["queue"], message["queue_key"], link)
        job = _job(actions, message)
        job.bind(run_plainly)
        actions.end(_result_message(run(job, actions)))


def _run_surrounded(
    loop: asyncio.AbstractEventLoop, surroundings: Surroundings, job: Job, actions: PlainActions
) -> Result:
    """What is around the handler on the loop, in one task; the handler in between, while the loop stands still."""
    context = contextvars.copy_context()
    entered: asyncio.Future[Handler] = loop.create_future()
    ended: asyncio.Future[Result] = loop.create_future()

    async def call(within: Handler) -> Result:
        entered.set_result(within)
        return await ended

    task = loop.create_task(surroundings.run_plain(job, call), context=context)
    task.add_done_callback(lambda _: entered.done() or entered.cancel())
    loop.run_until_complete(asyncio.wait([entered]))
    if not entered.cancelled():
        ended.set_result(context.run(_run_here, entered.result(), job, actions))
    return loop.run_until_complete(task)


def _run_here(handler: Handler, job: Job, actions: PlainActions) -> Result:
    """In the main thread. Meanwhile SIGTERM raises CancelledError in the handler, if the parent says that it is meant.
    Once: what the handler does then to clean up is not disturbed."""
    global _on_sigterm

    def end() -> None:
        reason = None if job.cancelled else actions.cancel_reason()
        if reason is not None:
            job.note_cancelled(reason)
            raise asyncio.CancelledError

    try:
        _on_sigterm = end
        end()  # the signal may have come before
        # A context of its own for each job, as every task of a loop has one.
        result = contextvars.copy_context().run(run_plain, handler, job)
        _on_sigterm = None
        return result
    except asyncio.CancelledError as error:
        return Raised(error)
    finally:
        _on_sigterm = None


def _job(actions: ParentActions, message: Message) -> Job:
    return Job(actions, JobRecord(message["id"], dict(message["fields"])))


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
