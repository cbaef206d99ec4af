"""Local targets for deliveries: an HTTP server that answers as it is told and remembers what came.

In: which answers to give, in order. Out: the requests, as they arrived. A real socket and a real server, in the event
loop of the test. Elsewhere: queues and databases (`servers`, `postgres`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

__all__ = ["Answer", "HttpReceiver", "Request"]

_REASONS = {200: "OK", 429: "Too Many Requests", 500: "Internal Server Error"}


@dataclass(frozen=True, slots=True)
class Request:
    """What arrived. Header names are lower-case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """What to answer. `delay_s` makes the caller wait, for ever when it is infinite; `drop` hangs up without a word."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    delay_s: float = 0.0
    drop: bool = False


class HttpReceiver:
    """Enter it, then read `url`. Answers are taken from `answers` while there are any, then from `default`."""

    def __init__(self, default: Answer | Callable[[Request], Answer] | None = None) -> None:
        self.default = default or Answer()
        self.answers: deque[Answer] = deque()
        self.requests: list[Request] = []
        self._changed = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._talks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    @property
    def port(self) -> int:
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def until(self, count: int, *, within_s: float = 15.0) -> list[Request]:
        """Wait until so many requests have arrived."""
        try:
            async with asyncio.timeout(within_s):
                while len(self.requests) < count:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"{len(self.requests)} of {count} requests within {within_s} s") from None
        return self.requests[:count]

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for talk in self._talks:
            talk.cancel()
        await asyncio.gather(*self._talks, return_exceptions=True)
        await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._talks.add(task)
        try:
            while await self._talk(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the caller hung up, or the test is over
        finally:
            self._talks.discard(task)
            writer.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.split("\r\n")
        method, path, _ = first.split(" ", 2)
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)
        }
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        request = Request(method, path, headers, body)
        self.requests.append(request)
        self._changed.set()
        answer = self.answers.popleft() if self.answers else self.default
        if callable(answer):
            answer = answer(request)
        if answer.delay_s:
            await asyncio.sleep(answer.delay_s)
        if answer.drop:
            return False
        lengths = {"content-length": str(len(answer.body)), **answer.headers}
        text = "".join(f"{name}: {value}\r\n" for name, value in lengths.items())
        writer.write(
            f"HTTP/1.1 {answer.status} {_REASONS.get(answer.status, 'Answer')}\r\n{text}\r\n".encode("latin-1")
        )
        writer.write(answer.body)
        await writer.drain()
        return True
