"""The child process that runs handlers for a worker with `processes=True`.

Started by `_processes`; its arguments are the numbers of two inherited files, a socket and a pipe. In: messages on
the socket, first where the handler is, then jobs. Out: progress, logs and one result per job. Messages are
MessagePack behind a length; nothing is ever pickled. The life pipe is held open by the parent alone: when it ends,
however the parent died, so does this process at once.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import runpy
import socket
import struct
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Final

import msgspec

from bullpen._kernel import json
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
from bullpen.queue._execute import is_async, run_async, run_thread
from bullpen.queue.job import Job, JobState, Mark
from bullpen.wire.records import JobRecord

_LENGTH: Final = struct.Struct(">I")


async def read_message(reader: asyncio.StreamReader) -> dict[str, Any]:
    """One message; raises asyncio.IncompleteReadError when the other side is gone."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    message: dict[str, Any] = msgspec.msgpack.decode(await reader.readexactly(length))
    return message


def frame(message: dict[str, Any]) -> bytes:
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


class ParentActions:
    """What a job in a child can do: it asks the parent."""

    def __init__(self, queue: str, writer: asyncio.StreamWriter) -> None:
        self._queue = queue
        self._writer = writer
        self._number = 0
        self._answers: dict[int, asyncio.Future[Any]] = {}

    @property
    def name(self) -> str:
        return self._queue

    def answer(self, message: dict[str, Any]) -> None:
        future = self._answers.pop(message["number"], None)
        if future is not None and not future.done():
            if message["error"] is None:
                future.set_result(message["value"])
            else:
                future.set_exception(BullpenError(message["error"]))

    async def _ask(self, action: str, *args: Any) -> Any:
        self._number += 1
        future = self._answers[self._number] = asyncio.get_running_loop().create_future()
        self._writer.write(frame({"kind": "ask", "number": self._number, "action": action, "args": args}))
        await self._writer.drain()
        return await future

    async def update_progress(self, job_id: str, progress: bytes) -> None:
        await self._ask("update_progress", job_id, progress)

    async def add_log(self, job_id: str, line: str, keep: int) -> int:
        return int(await self._ask("add_log", job_id, line, keep))

    async def update_data(self, job_id: str, data: bytes) -> None:
        await self._ask("update_data", job_id, data)

    async def state_of(self, job_id: str) -> JobState:
        return JobState(await self._ask("state_of", job_id))

    async def read_logs(self, job_id: str) -> list[str]:
        return list(await self._ask("read_logs", job_id))

    async def remove_unprocessed_children(self, job_id: str) -> int:
        return int(await self._ask("remove_unprocessed_children", job_id))

    async def wait_result(self, job_id: str, timeout: int | timedelta | None, mark: Mark | None = None) -> Any:
        raise BullpenError("a handler cannot wait for its own result")


def find_handler(setup: dict[str, Any]) -> Callable[[Job], Any]:
    """Import the handler by where the parent found it; never by anything that stands in a job."""
    sys.path[:] = setup["path"]
    if setup["main"]:
        scope: Any = runpy.run_path(setup["main"], run_name="__bullpen_main__")
        first, *rest = setup["name"].split(".")
        found: Any = scope[first]
    else:
        found, rest = importlib.import_module(setup["module"]), setup["name"].split(".")
    for part in rest:
        found = getattr(found, part)
    handler: Callable[[Job], Any] = found
    return handler


def _result_message(result: Result) -> dict[str, Any]:
    if isinstance(result, Raised):
        return _error_message(result.error)
    try:
        value = json.encode(result.value, what="return value")
        json.check_result_size(len(value))
    except (NotJson, PayloadTooLarge) as error:
        return {**_error_message(error), "signal": "PermanentError"}
    return {"kind": "returned", "value": value}


def _error_message(error: BaseException) -> dict[str, Any]:
    reason, stack = describe(error)
    message: dict[str, Any] = {
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


def _die_with_parent(life_fd: int) -> None:
    os.read(life_fd, 1)  # nothing is ever written: this returns when the parent is gone
    os._exit(70)


async def _serve(socket_fd: int) -> None:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=socket_fd))
    try:
        handler = find_handler(await read_message(reader))
    except Exception as error:  # noqa: BLE001 - user code of the module's top level
        writer.write(frame({"kind": "broken", "reason": f"{type(error).__name__}: {describe(error)[0]}"}))
        await writer.drain()
        return
    threads = ThreadPoolExecutor(1)
    writer.write(frame({"kind": "ready"}))
    running: set[asyncio.Task[None]] = set()  # held here, or the loop might forget it; never more than one
    actions: ParentActions | None = None

    async def run(job: Job) -> None:
        result = await (run_async(handler, job, None) if is_async(handler) else run_thread(threads, handler, job, None))
        writer.write(frame(_result_message(result)))
        await writer.drain()

    while True:
        message = await read_message(reader)
        if message["kind"] == "run":
            actions = ParentActions(message["queue"], writer)
            record = JobRecord(message["id"], {name.encode(): value for name, value in message["fields"].items()})
            task = asyncio.create_task(run(Job(actions, record)))
            running.add(task)
            task.add_done_callback(running.discard)
        elif message["kind"] == "answer" and actions is not None:
            actions.answer(message)


def main() -> None:
    socket_fd, life_fd = (int(text) for text in sys.argv[1:3])
    threading.Thread(target=_die_with_parent, args=(life_fd,), daemon=True).start()
    try:
        asyncio.run(_serve(socket_fd))
    except asyncio.IncompleteReadError:
        os._exit(0)  # the parent closed the socket; a thread that still runs a handler must not hold us
