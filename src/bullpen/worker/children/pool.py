"""Run handlers in child processes, which can be killed: for code that blocks, holds the GIL or may crash.

In: a handler that can be imported, and jobs. Out: what happened in the child, or that it died. A child runs one job
at a time and is used again; one that timed out, was cancelled or crashed is gone, and only its job fails. Elsewhere:
the child's side (`child`), what a result means (`bullpen._kernel.outcome`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import msgspec

from bullpen import errors
from bullpen._kernel import json, log_formats
from bullpen._kernel.logs import get_logger
from bullpen._kernel.outcome import RETURNED_NOTHING, Raised, Result, Returned
from bullpen._kernel.remote import RemoteError
from bullpen.errors import BullpenError, HandlerTimeout, InvalidOption, NotJson
from bullpen.queue.batch import JobBatch
from bullpen.queue.job import Job
from bullpen.worker.children.frames import EndOfMessages, LoopLink, Message, NoMessage
from bullpen.worker.children.limits import ChildLimits, says_cpu_used_up

logger = get_logger("bullpen.worker")

_START_TIMEOUT_S: Final = 30.0
_END_WITHIN_S: Final = 5.0
"""From the signal that a cancelled job's child gets until it is killed."""
_MOST_CHILDREN: Final = 3
"""For one job, when they end before they have read it."""
# Close-on-exec before anything else runs, the module of the handler above all.
_CHILD: Final = (
    "import os, sys\n"
    "for number in sys.argv[1:3]: os.set_inheritable(int(number), False)\n"
    "from bullpen.worker.children.child import main; main()"
)


class Ask(msgspec.Struct, frozen=True, tag_field="kind", tag="ask"):
    """A handler wants something done to its job."""

    number: int
    action: str
    args: list[Any]
    job: int = 0
    """Which of the batch that runs there."""


class ReturnedThere(msgspec.Struct, frozen=True, tag_field="kind", tag="returned"):
    value: bytes


class RaisedThere(msgspec.Struct, frozen=True, tag_field="kind", tag="raised"):
    reason: str
    stack: str
    classes: list[str]
    signal: str | None
    wait_ms: Any
    """Whatever the handler gave; who judges the signal checks it."""


class SharedThere(msgspec.Struct, frozen=True, tag_field="kind", tag="shared"):
    """A handler of batches has ended: what became of each job; those that were decided before included."""

    results: list[ReturnedThere | RaisedThere]


class DecidedThere(msgspec.Struct, frozen=True, tag_field="kind", tag="decided"):
    """A handler of batches has ended one of the jobs, and goes on with the others."""

    job: int
    result: ReturnedThere | RaisedThere


_Said = Ask | ReturnedThere | RaisedThere | SharedThere | DecidedThere
_ACTIONS: Final[Mapping[str, tuple[type, ...]]] = MappingProxyType(
    {
        "update_progress": (bytes,),
        "add_log": (str, int),
        "update_data": (bytes,),
        "state_of": (),
        "read_logs": (),
        "clear_logs": (int,),
        "remove_unprocessed_children": (),
        "remove_deduplication": (str,),
        "count_children": (),
        "read_children": (str,),
        "leave_parent": (),
    }
)
"""All that a child may ask for, and with what; always of the job that runs there."""


class ChildDied(Exception):
    """The child process ended in the middle of a job."""


class _NotBegun(Exception):
    """The child process ended before it had read the job: nothing of the handler has run."""


class ChildMisbehaved(Exception):
    """The child process sent what no child of ours sends: its handler, or something that it started, wrote to its
    socket. It was killed."""


class _Child:
    def __init__(self, process: subprocess.Popen[bytes], link: LoopLink, life_fd: int) -> None:
        self.process, self.link, self._life_fd = process, link, life_fd
        self._loop = asyncio.get_running_loop()
        self._pid_fd: int | None = None
        self.unanswered: Ask | None = None
        """What its handler asked for and waits for now."""

    def watch(self, on_end: Callable[[_Child], None]) -> None:
        """Notice the end of the process itself. Its socket may be open for longer: somebody that the handler started
        may hold it."""

        def ended() -> None:
            self._unwatch()
            self.link.end()
            on_end(self)

        try:
            self._pid_fd = os.pidfd_open(self.process.pid)
            self._loop.add_reader(self._pid_fd, ended)
        except (AttributeError, OSError, NotImplementedError):  # not Linux, or forbidden there
            self._unwatch()

            def wait() -> None:
                self.process.wait()
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody wants to know any more
                    self._loop.call_soon_threadsafe(ended)

            threading.Thread(target=wait, name="bullpen child", daemon=True).start()

    def _unwatch(self) -> None:
        if self._pid_fd is not None:
            self._loop.remove_reader(self._pid_fd)
            os.close(self._pid_fd)
            self._pid_fd = None

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """May be called twice."""
        self._unwatch()
        if self._life_fd >= 0:
            os.close(self._life_fd)
            self._life_fd = -1
        self.process.kill()
        self.link.close()

    async def reap(self) -> int:
        """Wait for the end; a killed process is gone within moments, so a short blocking wait in a thread will do."""
        return await asyncio.get_running_loop().run_in_executor(None, self.process.wait)


class ProcessPool:
    """The children of one worker."""

    def __init__(self, handler: Callable[[Any], Any], limits: ChildLimits) -> None:
        self._setup = {**_locate(handler), "limits": limits.to_message()}
        self._limits = limits
        self._ends_in_order = False
        self._idle: list[_Child] = []
        self._busy: set[_Child] = set()
        self._replacing: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self.slots = 1
        """How many jobs may run side by side: no more children than that are kept for later jobs."""

    def bring_app(self, app: object, queue: str, *, batches: bool) -> None:
        """Let children run the hooks of this app, and its middleware for this queue; before `start`."""
        self._setup.update(app=_locate_app(app), queue=queue, batches=batches)
        self._ends_in_order = True

    async def start(self, slots: int) -> None:
        """Start one child, so that a handler that cannot be imported is told at once and not at the first job; then as
        many as can run side by side, so that the first jobs do not wait for theirs. More come when they are needed."""
        self.slots = slots
        self._idle.append(await self._spawn())
        others = min(slots, os.cpu_count() or 1) - 1
        for child in await asyncio.gather(*(self._spawn() for _ in range(others)), return_exceptions=True):
            if isinstance(child, _Child):
                self._idle.append(child)
            else:
                logger.warning(
                    "another child process did not start; the start is tried again for the next job: %s", child
                )

    async def run(self, job: Job, timeout_s: float | None) -> Result:
        """One job in one child. Cancelling kills the child."""
        return await self._run((job,), None, timeout_s)

    async def run_batch(self, batch: JobBatch, timeout_s: float | None) -> Result:
        """All of them in one child. Cancelling kills it."""
        return await self._run(batch, batch, timeout_s)

    async def _run(self, jobs: Sequence[Job], batch: JobBatch | None, timeout_s: float | None) -> Result:
        for _ in range(_MOST_CHILDREN):
            try:
                return await self._run_once(jobs, batch, timeout_s)
            except _NotBegun as error:
                ids = ", ".join(job.id for job in jobs)
                logger.warning("%s; job %s is given to another child process", error, ids)
        return Raised(ChildDied(f"{_MOST_CHILDREN} child processes died before they had read the job"))

    async def _run_once(self, jobs: Sequence[Job], batch: JobBatch | None, timeout_s: float | None) -> Result:
        try:
            child = await self._next()
        except BullpenError as error:
            return Raised(error)
        self._busy.add(child)
        finished, begun = False, True
        try:
            async with asyncio.timeout(timeout_s) as limit:
                result = await self._talk(child, jobs, batch)
            finished = True
            return result
        except TimeoutError:
            if not limit.expired():
                raise
            return Raised(HandlerTimeout(timeout_s or 0, ", its process was killed"))
        except asyncio.CancelledError:
            are_cancelled = all(job.cancel_reason is not None for job in jobs)  # and not lost
            finished = are_cancelled and await self._let_end(child, jobs, batch)
            raise
        except _NotBegun:
            begun = False
            raise
        except EndOfMessages:
            child.kill()
            return Raised(ChildDied(self._how_it_died(await child.reap())))
        except (NoMessage, ChildMisbehaved) as error:
            logger.error("a child process was killed: %s", error)
            return Raised(ChildMisbehaved(f"the child process was killed, because it sent invalid data: {error}"))
        finally:
            self._busy.discard(child)
            if batch is not None:
                batch.on_left = None
            if finished and child.is_alive and len(self._idle) + len(self._busy) < self.slots:
                self._idle.append(child)
            else:
                for job in jobs:
                    job.cancelled = job.cancelled or (begun and not finished)
                child.kill()
                await asyncio.shield(child.reap())

    async def _let_end(self, child: _Child, jobs: Sequence[Job], batch: JobBatch | None) -> bool:
        """Somebody cancelled the job, or every one of a batch. Its handler is told and gets a signal, and a moment to
        clean up; a child that has not come back by then is killed. True: it has, and can be used again."""
        child.link.send({"kind": "cancel", "reason": jobs[0].cancel_reason, "job": None})
        child.process.send_signal(signal.SIGTERM)
        if child.unanswered is not None:  # whoever did it for the handler was cancelled here
            child.link.send(_reply_to(child.unanswered, error="the job was cancelled"))
            child.unanswered = None
        try:
            async with asyncio.timeout(_END_WITHIN_S):
                await self._follow(child, jobs, batch)
            return True
        except (TimeoutError, EndOfMessages, NoMessage, ChildMisbehaved):
            return False

    def _how_it_died(self, code: int) -> str:
        if says_cpu_used_up(code) and self._limits.cpu_s is not None:
            return f"the child process was killed: it used more than {self._limits.cpu_s} s of processor time"
        return f"the child process died in the middle of the job (exit code {code})"

    async def _next(self) -> _Child:
        """A child that is ready. One that died meanwhile is no reason to fail the next job."""
        while self._idle:
            child = self._idle.pop()
            if child.is_alive:
                return child
            child.kill()
            await child.reap()
        return await self._spawn()

    def _on_end(self, child: _Child) -> None:
        """A process ended by itself. One that was idle is replaced at once, so that the next job need not wait."""
        if child not in self._idle or self._is_closed:
            return
        self._idle.remove(child)
        child.kill()
        logger.warning("an idle child process exited (exit code %s); another one is started", child.process.poll())
        task = asyncio.get_running_loop().create_task(self._replace(child), name="bullpen child")
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    async def _replace(self, child: _Child) -> None:
        await child.reap()
        try:
            self._idle.append(await self._spawn())
        except BullpenError as error:
            logger.warning("it did not start; the start is tried again for the next job: %s", error)

    async def aclose(self) -> None:
        self._is_closed = True
        for task in self._replacing:
            task.cancel()
        await asyncio.gather(*self._replacing, return_exceptions=True)
        if self._ends_in_order:
            await asyncio.gather(*(self._let_leave(child) for child in self._idle))
        for child in (*self._idle, *self._busy):
            child.kill()
            await child.reap()
        self._idle.clear()

    async def _let_leave(self, child: _Child) -> None:
        """Give an idle child time to run the hooks of its end."""
        child.link.send({"kind": "end"})
        with contextlib.suppress(TimeoutError, EndOfMessages, NoMessage):
            async with asyncio.timeout(_END_WITHIN_S):
                await child.link.receive()  # it has nothing to say any more: this is the end of its socket

    async def _spawn(self) -> _Child:
        ours, theirs = socket.socketpair()
        link = await LoopLink.open(ours)
        life_read, life_write = os.pipe()
        with theirs:
            try:
                process = subprocess.Popen(  # noqa: ASYNC220 - spawning takes a millisecond; the child is watched by its socket
                    [sys.executable, "-c", _CHILD, str(theirs.fileno()), str(life_read)],
                    pass_fds=(theirs.fileno(), life_read),
                    stdin=subprocess.DEVNULL,
                )
            finally:
                os.close(life_read)
        child = _Child(process, link, life_write)
        child.watch(self._on_end)
        child.link.send({**self._setup, "logs": log_formats.chosen()})
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                message = await child.link.receive()
        except (TimeoutError, EndOfMessages, NoMessage) as error:
            child.kill()
            code = await child.reap()
            raise BullpenError(f"a child process for the handler did not start (exit code {code})") from error
        except asyncio.CancelledError:
            child.kill()
            await asyncio.shield(child.reap())
            raise
        if message["kind"] == "broken":
            child.kill()
            await child.reap()
            raise InvalidOption(
                "handler",
                f"a function that a child process can import, and hooks that succeed there ({message['reason']})",
                self._name,
            )
        return child

    @property
    def _name(self) -> str:
        return f"{self._setup['module']}.{self._setup['name']}"

    async def _talk(self, child: _Child, jobs: Sequence[Job], batch: JobBatch | None) -> Result:
        link, sent = child.link, [(job.id, list(job.record.fields().items())) for job in jobs]
        place = {"queue": jobs[0].queue_name, "queue_key": jobs[0].actions.queue_key}
        link.send({"kind": "run", **place, "jobs": sent, "is_batch": batch is not None})
        if batch is not None:
            batch.on_left = partial(_tell_cancelled, link, jobs)
        try:
            message = await link.receive()
        except EndOfMessages:
            if link.left_unread:
                raise _NotBegun("a child process died before it had read its job") from None
            raise
        return await self._follow(child, jobs, batch, message)

    async def _follow(
        self, child: _Child, jobs: Sequence[Job], batch: JobBatch | None, message: Message | None = None
    ) -> Result:
        """Do what the handler asks for, beginning with this message, until it ends."""
        while True:
            match _read(message or await child.link.receive()):
                case Ask() as ask:
                    child.unanswered = ask
                    child.link.send(await _answer(_job_of(jobs, ask.job), ask))
                    child.unanswered = None
                case DecidedThere(number, result):
                    if batch is None:
                        raise ChildMisbehaved("it decided a job of a batch, and runs none")
                    batch.decide(_job_of(jobs, number), _result(result))
                case SharedThere(results):
                    if batch is None or len(results) != len(jobs):
                        raise ChildMisbehaved(f"it sent {len(results)} results for {len(jobs)} jobs")
                    ended = [_result(each) for each in results]
                    return Returned([each.error if isinstance(each, Raised) else each.value for each in ended])
                case ReturnedThere() | RaisedThere() as ended_there:
                    return _result(ended_there)
            message = None


def _tell_cancelled(link: LoopLink, jobs: Sequence[Job], job: Job) -> None:
    link.send({"kind": "cancel", "reason": job.cancel_reason, "job": jobs.index(job)})


def _job_of(jobs: Sequence[Job], number: int) -> Job:
    if not 0 <= number < len(jobs):
        raise ChildMisbehaved(f"it spoke of job {number} of {len(jobs)}")
    return jobs[number]


def _result(there: ReturnedThere | RaisedThere) -> Returned | Raised:
    if isinstance(there, RaisedThere):
        return Raised(_error(there))
    return RETURNED_NOTHING if there.value == b"null" else Returned(_value(there.value))


def _read(message: Message) -> _Said:
    try:
        said: _Said = msgspec.convert(message, type=_Said)
    except msgspec.ValidationError as error:
        raise ChildMisbehaved(str(error)) from None
    return said


def _value(raw: bytes) -> Any:
    try:
        return json.decode(raw, what="return value")
    except NotJson as error:
        raise ChildMisbehaved(str(error)) from None


async def _answer(job: Job, ask: Ask) -> Message:
    kinds = _ACTIONS.get(ask.action)
    if kinds is None or tuple(map(type, ask.args)) != kinds:
        raise ChildMisbehaved(f"it asked for {ask.action[:40]!r}, which is not available to handlers")
    try:
        return _reply_to(ask, await getattr(job.actions, ask.action)(job.id, *ask.args))
    except BullpenError as error:
        return _reply_to(ask, error=str(error))


def _reply_to(ask: Ask, value: Any = None, error: str | None = None) -> Message:
    return {"kind": "answer", "number": ask.number, "value": value, "error": error}


def _error(message: RaisedThere) -> BaseException:
    """The handler's error as it can be judged here: signals as themselves, all others with their text, stack and
    classes."""
    match message.signal:
        case None:
            return RemoteError(message.reason, message.stack, message.classes)
        case "DelayJob":
            return errors.DelayJob(message.wait_ms)
        case "RateLimited":
            return errors.RateLimited(message.wait_ms)
        case "ReturnToWait":
            return errors.ReturnToWait(message.reason)
        case "WaitForChildren":
            return errors.WaitForChildren(message.reason)
        case _:
            return errors.PermanentError(message.reason)


def _locate(handler: Callable[[Any], Any]) -> Message:
    """Where a child finds the handler. Refused: lambdas, nested functions, bound methods."""
    module, name = getattr(handler, "__module__", None), getattr(handler, "__qualname__", "")
    if not module or not name or "<" in name or getattr(handler, "__self__", None) is not None:
        raise InvalidOption("handler", "a function on the top level of a module when processes=True", handler)
    main = _main_for("handler", module, handler)
    return {"kind": "setup", "module": module, "name": name, "main": main, "path": sys.path, "app": None}


def _locate_app(app: object) -> Message:
    """Where a child finds the app: the name that a module gives it."""
    # The program itself last: a child imports a module, but has to run a program.
    for key, module in sorted(sys.modules.items(), key=lambda item: item[0] == "__main__"):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is app:
                return {"module": key, "name": name, "main": _main_for("app", key, app)}
    raise InvalidOption(
        "processes", "an app on the top level of a module: child processes run its hooks and its middleware", app
    )


def _main_for(option: str, module: str, found: object) -> str | None:
    """The file of the program, where it is what has to be run."""
    if module != "__main__":
        return None
    main: str | None = getattr(sys.modules.get("__main__"), "__file__", None)
    if main is None:
        raise InvalidOption(option, "in a file when processes=True (not in an interactive session)", found)
    return os.path.abspath(main)
