"""Talk to another BullMQ implementation that runs in its own process.

In: a command line that speaks JSON lines (see `node/driver.mjs`). Out: `call` for requests, `wait_event` for what the
peer reports on its own. Elsewhere: finding and installing the peers (`_node`, `_pypi`), what a worker does with a job
(`play` in the drivers, `_sides` for ours).
"""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

Message = dict[str, Any]

CALL_TIMEOUT_S = 30.0
EVENT_TIMEOUT_S = 10.0
_LONGEST_LINE_BYTES = 64 * 1024 * 1024


class PeerError(Exception):
    """The peer refused a request, with the name and message of its own exception."""

    def __init__(self, op: str, name: str, message: str) -> None:
        super().__init__(f"{op}: {name}: {message}")
        self.op, self.name, self.message = op, name, message


class PeerGone(Exception):
    """The peer's process ended while an answer or event was awaited."""


class Peer:
    """One driver process. Requests may overlap; events are kept until somebody waits for them."""

    def __init__(self, command: Sequence[str | Path], *, cwd: Path | None = None) -> None:
        self._command = [str(part) for part in command]
        self._cwd = cwd
        self._process: asyncio.subprocess.Process | None = None
        self._readers: list[asyncio.Task[None]] = []
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._last_id = 0
        self._arrived = asyncio.Condition()
        self._gone = False
        self._stderr = bytearray()
        self.events: list[Message] = []
        """All events since the start or the last `forget_events`, oldest first."""

    async def start(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            cwd=self._cwd,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=_LONGEST_LINE_BYTES,
        )
        self._readers = [
            asyncio.create_task(self._read_answers(), name="peer stdout"),
            asyncio.create_task(self._read_errors(), name="peer stderr"),
        ]
        await self.wait_event(lambda event: event["event"] == "ready", timeout=CALL_TIMEOUT_S)
        return self

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def stderr(self) -> str:
        """What the process wrote to stderr so far."""
        return self._stderr.decode(errors="replace")

    async def call(self, op: str, *, timeout: float = CALL_TIMEOUT_S, **fields: Any) -> Any:
        """Run one op in the peer and return its result; raises `PeerError` with the peer's own error."""
        assert self._process is not None and self._process.stdin is not None, "not started"
        if self._gone:
            raise PeerGone(f"{op}: the process has ended; stderr: {self.stderr}")
        self._last_id += 1
        request = {"id": self._last_id, "op": op, **fields}
        answer = asyncio.get_running_loop().create_future()
        self._answers[self._last_id] = answer
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        try:
            async with asyncio.timeout(timeout):
                await self._process.stdin.drain()
                message: Message = await answer
        finally:
            self._answers.pop(request["id"], None)
        if "error" in message:
            raise PeerError(op, message["error"]["name"], message["error"]["message"])
        return message["ok"]

    async def wait_event(
        self, predicate: Callable[[Message], bool], timeout: float = EVENT_TIMEOUT_S, *, count: int = 1
    ) -> Message:
        """Return the `count`-th event that matches, past ones included."""

        def found() -> Message | None:
            matching = [event for event in self.events if predicate(event)]
            return matching[count - 1] if len(matching) >= count else None

        try:
            async with asyncio.timeout(timeout), self._arrived:
                await self._arrived.wait_for(lambda: self._gone or found() is not None)
        except TimeoutError:
            seen = json.dumps(self.events[-20:], indent=1)
            raise AssertionError(f"no such event in {timeout} s; last: {seen}; stderr: {self.stderr}") from None
        event = found()
        if event is None:
            raise PeerGone(f"the process ended before the event; stderr: {self.stderr}")
        return event

    def forget_events(self) -> None:
        self.events.clear()

    def errors(self) -> list[Message]:
        """Errors that the peer reported on its own: of connections, workers, event listeners."""
        return [event for event in self.events if event["event"] == "error"]

    async def kill(self) -> None:
        """End the process at once, as a machine that loses power would."""
        assert self._process is not None, "not started"
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)
        await self._ended()

    async def close(self) -> None:
        """Let the driver close its workers and end. Safe to call twice and after `kill`."""
        if self._process is None:
            return
        if self._process.stdin is not None and not self._process.stdin.is_closing():
            self._process.stdin.close()
        try:
            async with asyncio.timeout(5):
                await self._ended()
        except TimeoutError:
            await self.kill()

    async def _ended(self) -> None:
        assert self._process is not None
        await self._process.wait()
        await asyncio.gather(*self._readers)

    async def _read_answers(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        async for line in self._process.stdout:
            message: Message = json.loads(line)
            if "event" in message:
                async with self._arrived:
                    self.events.append(message)
                    self._arrived.notify_all()
            elif (answer := self._answers.get(message["id"])) is not None and not answer.done():
                answer.set_result(message)
        async with self._arrived:
            self._gone = True
            self._arrived.notify_all()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(PeerGone(f"the process ended; stderr: {self.stderr}"))

    async def _read_errors(self) -> None:
        assert self._process is not None and self._process.stderr is not None
        async for line in self._process.stderr:
            self._stderr += line
