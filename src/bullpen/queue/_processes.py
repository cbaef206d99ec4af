"""Run handlers in child processes, which can be killed: for code that blocks, holds the GIL or may crash.

In: a handler that can be imported, and jobs. Out: what happened in the child, or that it died. A child runs one job
at a time and is used again; one that timed out, was cancelled or crashed is gone, and only its job fails. Elsewhere:
the child's side (`_child`), what a result means (`bullpen._kernel.outcome`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from typing import Final

from bullpen import errors
from bullpen._kernel import json, log_formats
from bullpen._kernel.logs import get_logger
from bullpen._kernel.outcome import RETURNED_NOTHING, Raised, Result, Returned
from bullpen._kernel.remote import RemoteError
from bullpen.errors import BullpenError, InvalidOption
from bullpen.queue._execute import Handler, JobTimeout
from bullpen.queue._messages import EndOfMessages, LoopLink, Message
from bullpen.queue.job import Job, JobActions

logger = get_logger("bullpen.worker")

_START_TIMEOUT_S: Final = 30.0
_CHILD: Final = "from bullpen.queue._child import main; main()"


class ChildDied(Exception):
    """The child process ended in the middle of a job."""


class _Child:
    def __init__(self, process: subprocess.Popen[bytes], link: LoopLink, life_fd: int) -> None:
        self.process, self.link, self._life_fd = process, link, life_fd

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._life_fd)
        self.process.kill()
        self.link.close()

    async def reap(self) -> int:
        """Wait for the end; a killed process is gone within moments, so a short blocking wait in a thread will do."""
        return await asyncio.get_running_loop().run_in_executor(None, self.process.wait)


class ProcessPool:
    """The children of one worker."""

    def __init__(self, handler: Handler) -> None:
        self._setup = _locate(handler)
        self._idle: list[_Child] = []
        self._busy: set[_Child] = set()

    async def start(self, slots: int) -> None:
        """Start one child, so that a handler that cannot be imported is told at once and not at the first job; then as
        many as can run side by side, so that the first jobs do not wait for theirs. More come when they are needed."""
        self._idle.append(await self._spawn())
        others = min(slots, os.cpu_count() or 1) - 1
        for child in await asyncio.gather(*(self._spawn() for _ in range(others)), return_exceptions=True):
            if isinstance(child, _Child):
                self._idle.append(child)
            else:
                logger.warning("a further child process did not start now, it is tried again for a job: %s", child)

    async def run(self, job: Job, timeout_s: float | None) -> Result:
        """One job in one child. Cancelling kills the child."""
        try:
            child = self._idle.pop() if self._idle else await self._spawn()
        except BullpenError as error:
            return Raised(error)
        self._busy.add(child)
        finished = False
        try:
            async with asyncio.timeout(timeout_s) as limit:
                result = await self._talk(child, job)
            finished = True
            return result
        except TimeoutError:
            if not limit.expired():
                raise
            return Raised(JobTimeout(f"timed out after {(timeout_s or 0) * 1000:.0f} ms, its process was killed"))
        except EndOfMessages:
            child.kill()
            return Raised(
                ChildDied(f"the child process died in the middle of the job (exit code {await child.reap()})")
            )
        finally:
            self._busy.discard(child)
            if finished:
                self._idle.append(child)
            else:
                job.cancelled = True
                child.kill()
                await asyncio.shield(child.reap())

    async def aclose(self) -> None:
        for child in (*self._idle, *self._busy):
            child.kill()
            await child.reap()
        self._idle.clear()

    async def _spawn(self) -> _Child:
        ours, theirs = socket.socketpair()
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
        child = _Child(process, await LoopLink.open(ours), life_write)
        child.link.send({**self._setup, "logs": log_formats.chosen()})
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                message = await child.link.receive()
        except (TimeoutError, EndOfMessages) as error:
            child.kill()
            code = await child.reap()
            raise BullpenError(f"a child process for the handler did not start (exit code {code})") from error
        if message["kind"] == "broken":
            child.kill()
            await child.reap()
            raise InvalidOption(
                "handler", f"a function that a child process can import ({message['reason']})", self._name
            )
        return child

    @property
    def _name(self) -> str:
        return f"{self._setup['module']}.{self._setup['name']}"

    async def _talk(self, child: _Child, job: Job) -> Result:
        link, fields = child.link, list(job.record.fields().items())
        link.send({"kind": "run", "queue": job.queue_name, "id": job.id, "fields": fields})
        while True:
            message = await link.receive()
            match message["kind"]:
                case "ask":
                    link.send(await _answer(job.actions, message))
                case "returned":
                    value = message["value"]
                    return RETURNED_NOTHING if value == b"null" else Returned(json.decode(value, what="return value"))
                case _:
                    return Raised(_error(message))


async def _answer(actions: JobActions, message: Message) -> Message:
    answer: Message = {"kind": "answer", "number": message["number"], "value": None, "error": None}
    try:
        answer["value"] = await getattr(actions, message["action"])(*message["args"])
    except BullpenError as error:
        answer["error"] = str(error)
    return answer


def _error(message: Message) -> BaseException:
    """The handler's error as it can be judged here: signals as themselves, all others with their text, stack and
    classes."""
    match message["signal"]:
        case None:
            return RemoteError(message["reason"], message["stack"], message["classes"])
        case "DelayJob":
            return errors.DelayJob(message["wait_ms"])
        case "RateLimited":
            return errors.RateLimited(message["wait_ms"])
        case "ReturnToWait":
            return errors.ReturnToWait(message["reason"])
        case "WaitForChildren":
            return errors.WaitForChildren(message["reason"])
        case _:
            return errors.PermanentError(message["reason"])


def _locate(handler: Handler) -> Message:
    """Where a child finds the handler. Refused: lambdas, nested functions, bound methods."""
    module, name = getattr(handler, "__module__", None), getattr(handler, "__qualname__", "")
    if not module or not name or "<" in name or getattr(handler, "__self__", None) is not None:
        raise InvalidOption("handler", "a function on the top level of a module when processes=True", handler)
    main = getattr(sys.modules.get("__main__"), "__file__", None) if module == "__main__" else None
    if module == "__main__" and main is None:
        raise InvalidOption(
            "handler", "a function in a file when processes=True (not in an interactive session)", handler
        )
    return {"kind": "setup", "module": module, "name": name, "main": main and os.path.abspath(main), "path": sys.path}
