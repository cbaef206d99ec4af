"""Put faults on the way between a client and a Redis-protocol server.

In: the server and the faults to make. Out: a TCP address that behaves like the server until told otherwise: slow,
silent, reset, cut, refusing, or losing exactly the reply that hurts. Elsewhere: faults of the server itself
(`servers`).

The proxy has a thread and an event loop of its own, so it goes on when the test blocks its loop, and its methods may be
called from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import struct
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar
from urllib.parse import urlsplit

from bullpen.testing._resp import RespFramer
from bullpen.testing.servers import RedisServer

__all__ = ["Fault", "FaultProxy", "ProxyCounters"]

_CHUNK_BYTES = 65_536
_CALL_DEADLINE_S = 20.0
_MOST_QUEUED = 10_000

_T = TypeVar("_T")


@dataclass
class ProxyCounters:
    """What went through a proxy since it was started."""

    connections: int = 0
    """Connections accepted."""
    requests: int = 0
    """Whole commands read from clients."""
    replies: int = 0
    """Whole replies read from the server; pushes do not count."""
    bytes_to_server: int = 0
    bytes_to_client: int = 0
    lost_requests: int = 0
    """Commands that were dropped before the server saw them."""
    lost_replies: int = 0
    """Replies that were dropped after the server had acted."""
    resets: int = 0
    """Connections ended with RST."""
    cuts: int = 0
    """Connections ended with FIN."""


class Fault:
    """A loss that was ordered, and whether it has happened."""

    def __init__(self, match: bytes, *, times: int, skip: int, torn: bool) -> None:
        self._match, self._left, self._skip, self.torn = match, times, skip, torn
        self._count = 0
        self._done = threading.Event()

    @property
    def count(self) -> int:
        """How often it has happened."""
        return self._count

    def wait(self, timeout: float = 10.0) -> None:
        """Block until it has happened as often as ordered; raise TimeoutError if it does not."""
        if not self._done.wait(timeout):
            raise TimeoutError(f"lost {self._count} of {self._count + self._left} messages with {self._match!r}")

    async def happened(self, timeout: float = 10.0) -> None:
        """As `wait`, without blocking the event loop."""
        await asyncio.to_thread(self.wait, timeout)

    def cancel(self) -> None:
        """Lose nothing more."""
        self._left = 0

    def _strikes(self, message: bytes) -> bool:
        if not self._left or self._match not in message:
            return False
        if self._skip:
            self._skip -= 1
            return False
        self._left -= 1
        return True

    def _struck(self) -> None:
        self._count += 1
        if not self._left:
            self._done.set()


class FaultProxy:
    """A TCP proxy in front of one server.

    Use it as a context manager, or call `close`. While no fault is ordered, it forwards whole commands and replies in
    order and as they come. Subscriptions in RESP2 and MONITOR answer one command many times; after them on the same
    connection `lose_reply` cannot tell which reply belongs to which command.
    """

    def __init__(self, upstream: RedisServer | str) -> None:
        self._upstream = _address(upstream)
        self._counters = ProxyCounters()
        self._faults_on_request: list[Fault] = []
        self._faults_on_reply: list[Fault] = []
        self._links: set[_Link] = set()
        self._latency_s = {"requests": 0.0, "replies": 0.0}
        self._loop = asyncio.new_event_loop()
        # Events of asyncio belong to no loop until somebody waits, and only the proxy's loop ever does.
        self._flowing = {"requests": asyncio.Event(), "replies": asyncio.Event()}
        for gate in self._flowing.values():
            gate.set()
        self._listener: asyncio.Server | None = None
        self._port = 0
        self._closed = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._thread.start()
        self._call(self._listen)

    @property
    def port(self) -> int:
        """The TCP port on 127.0.0.1; the same for the proxy's whole life."""
        return self._port

    @property
    def url(self) -> str:
        """`redis://127.0.0.1:<port>`."""
        return f"redis://127.0.0.1:{self._port}"

    @property
    def counters(self) -> ProxyCounters:
        """A copy of the counters as they are now."""
        return dataclasses.replace(self._counters)

    @property
    def open_connections(self) -> int:
        """Connections that are open now."""
        return len(self._links)

    def latency(self, ms: float = 0.0, *, requests_ms: float | None = None, replies_ms: float | None = None) -> None:
        """Delay everything from now on by `ms` in each direction, or by different times. Order is kept."""
        self._latency_s["requests"] = (ms if requests_ms is None else requests_ms) / 1000
        self._latency_s["replies"] = (ms if replies_ms is None else replies_ms) / 1000

    def stall(self, *, requests: bool = True, replies: bool = True) -> None:
        """Stop forwarding; connections stay open and new ones are accepted. With `requests=False` the server still
        gets commands and acts on them, and only the replies are held back."""
        self._call(self._set_flowing, not requests, not replies)

    def unstall(self) -> None:
        """Forward again, beginning with what was held back."""
        self._call(self._set_flowing, True, True)

    @contextlib.contextmanager
    def stalled(self, *, requests: bool = True, replies: bool = True) -> Iterator[None]:
        """Stall for the length of a block."""
        self.stall(requests=requests, replies=replies)
        try:
            yield
        finally:
            self.unstall()

    def reset(self) -> int:
        """End all open connections with RST; what is in flight is lost. Returns how many."""
        return self._call(self._end_all, _Link.reset)

    def cut(self) -> int:
        """End all open connections with FIN, as a server that closes politely. Returns how many."""
        return self._call(self._end_all, _Link.cut)

    def refuse(self, seconds: float | None = None) -> None:
        """Refuse new connections, until `accept` or for some time. Open ones stay."""
        self._call(self._stop_listening, seconds)

    def accept(self) -> None:
        """Take new connections again, on the same port."""
        self._call(self._listen)

    @contextlib.contextmanager
    def outage(self) -> Iterator[None]:
        """Reset everything and refuse new connections for the length of a block: the server is gone."""
        self.refuse()
        self.reset()
        try:
            yield
        finally:
            self.accept()

    def lose_reply(self, match: bytes = b"EVALSHA", times: int = 1, *, skip: int = 0, torn: bool = False) -> Fault:
        """Lose the reply to the next commands that contain `match`, and reset their connection.

        The command is forwarded and the server acts; the client cannot know. `skip` lets that many matching commands
        pass first; `torn=True` delivers the first half of the reply before the reset.
        """
        fault = Fault(match, times=times, skip=skip, torn=torn)
        self._faults_on_reply.append(fault)
        return fault

    def lose_request(self, match: bytes = b"EVALSHA", times: int = 1, *, skip: int = 0) -> Fault:
        """Drop the next commands that contain `match` before the server sees them, and reset their connection."""
        fault = Fault(match, times=times, skip=skip, torn=False)
        self._faults_on_request.append(fault)
        return fault

    def close(self) -> None:
        """End all connections and stop. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._call(self._stop_listening, None)
        self._call(self._end_all, _Link.reset)
        self._call(self._wait_for_links)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, function: Callable[..., Awaitable[_T]], *args: object) -> _T:
        async def run() -> _T:
            return await function(*args)

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(_CALL_DEADLINE_S)

    async def _listen(self) -> None:
        if self._listener is None:
            self._listener = await asyncio.start_server(
                self._serve, "127.0.0.1", self._port, reuse_address=True, limit=_CHUNK_BYTES
            )
            self._port = self._listener.sockets[0].getsockname()[1]

    async def _stop_listening(self, seconds: float | None) -> None:
        if self._listener is not None:
            # First no more accepting, then closing: what asyncio accepted in this moment cannot attach to a closed
            # listener, and its socket would stay open for ever.
            for listening in self._listener.sockets:
                self._loop.remove_reader(listening.fileno())
            for _ in range(3):
                await asyncio.sleep(0)
            # Not waited for: that would wait for the open connections too.
            self._listener.close()
            self._listener = None
        if seconds is not None:
            self._loop.call_later(seconds, self._listen_again)

    def _listen_again(self) -> None:
        if not self._closed:
            asyncio.run_coroutine_threadsafe(self._listen(), self._loop)

    async def _set_flowing(self, requests: bool, replies: bool) -> None:
        for gate, flows in ((self._flowing["requests"], requests), (self._flowing["replies"], replies)):
            if flows:
                gate.set()
            else:
                gate.clear()

    async def _end_all(self, how: Callable[[_Link], None]) -> int:
        links = list(self._links)
        for link in links:
            how(link)
        return len(links)

    async def _wait_for_links(self) -> None:
        # A connection that was accepted in this very moment has a task, but no link yet.
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            await self._end_all(_Link.reset)
            await asyncio.wait(tasks, timeout=0.02)
        for _ in range(3):  # the transports were aborted; their last callbacks close the sockets
            await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._counters.connections += 1
        link = _Link(self, reader, writer)
        self._links.add(link)
        try:
            await link.run(self._upstream)
        finally:
            self._links.discard(link)
            link.ended.set()


class _LinkEnded(Exception):
    """Leaves the task group of one connection, and thereby ends its other tasks."""


@dataclass(frozen=True, slots=True)
class _End:
    """Stands in the line of outgoing data: what came before is delivered, then the connection ends."""

    torn: bytes = b""
    rst: bool = False


class _Link:
    """One client's connection and its twin to the server."""

    def __init__(self, proxy: FaultProxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._proxy, self._client_reader, self._client_writer = proxy, reader, writer
        self._awaiting: deque[Fault | None] = deque()
        self._broken = asyncio.Event()
        self._with_rst = False
        self.ended = asyncio.Event()

    def reset(self) -> None:
        self._with_rst = True
        self._broken.set()

    def cut(self) -> None:
        self._broken.set()

    async def run(self, upstream: tuple[str, int] | str) -> None:
        server_writer: asyncio.StreamWriter | None = None
        try:
            try:
                if isinstance(upstream, str):
                    server_reader, server_writer = await asyncio.open_unix_connection(upstream, limit=_CHUNK_BYTES)
                else:
                    server_reader, server_writer = await asyncio.open_connection(*upstream, limit=_CHUNK_BYTES)
            except OSError:
                self._with_rst = True  # the server is down: as close to "refused" as an accepted connection gets
                return
            # Whatever goes wrong in here, foreign protocols included, ends this one connection and nothing else.
            with contextlib.suppress(ExceptionGroup):
                async with asyncio.TaskGroup() as tasks:
                    to_server = _Direction(self._proxy, "requests", server_writer)
                    to_client = _Direction(self._proxy, "replies", self._client_writer)
                    tasks.create_task(self._read_requests(to_server))
                    tasks.create_task(self._read_replies(server_reader, to_client))
                    tasks.create_task(self._send(to_server))
                    tasks.create_task(self._send(to_client))
                    tasks.create_task(self._watch())
        finally:
            if server_writer is not None:
                server_writer.transport.abort()
            self._end_client()

    async def _watch(self) -> None:
        await self._broken.wait()
        raise _LinkEnded

    async def _read_requests(self, line: _Direction) -> None:
        framer, counters = RespFramer(), self._proxy._counters
        while data := await self._client_reader.read(_CHUNK_BYTES):
            for request in framer.feed(data):
                counters.requests += 1
                if lost := _first(self._proxy._faults_on_request, request):
                    counters.lost_requests += 1
                    self._with_rst = True
                    lost._struck()
                    raise _LinkEnded
                self._awaiting.append(_first(self._proxy._faults_on_reply, request))
                counters.bytes_to_server += len(request)
                await line.put(request)
        # The client has gone; nobody waits for what the server may still say.
        raise _LinkEnded

    async def _read_replies(self, reader: asyncio.StreamReader, line: _Direction) -> None:
        framer, counters = RespFramer(), self._proxy._counters
        while data := await reader.read(_CHUNK_BYTES):
            for reply in framer.feed(data):
                fault = None
                if not reply.startswith(b">"):  # a push answers nobody
                    counters.replies += 1
                    fault = self._awaiting.popleft() if self._awaiting else None
                if fault is not None:
                    counters.lost_replies += 1
                    await line.put(_End(reply[: len(reply) // 2] if fault.torn else b"", rst=True))
                    fault._struck()
                    return
                counters.bytes_to_client += len(reply)
                await line.put(reply)
        await line.put(_End())

    async def _send(self, line: _Direction) -> None:
        async for item in line:
            if isinstance(item, _End):
                self._with_rst = self._with_rst or item.rst
                line.writer.write(item.torn)
                await line.writer.drain()
                raise _LinkEnded
            line.writer.write(item)
            await line.writer.drain()

    def _end_client(self) -> None:
        transport, counters = self._client_writer.transport, self._proxy._counters
        if self._with_rst:
            counters.resets += 1
            connection = transport.get_extra_info("socket")
            # Lingering for no time at all makes the system send RST instead of FIN.
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            transport.abort()
        else:
            counters.cuts += 1
            transport.close()


class _Direction:
    """Data on its way in one direction: delayed, held back, never reordered."""

    def __init__(self, proxy: FaultProxy, direction: str, writer: asyncio.StreamWriter) -> None:
        self._proxy, self._direction, self.writer = proxy, direction, writer
        self._items: asyncio.Queue[tuple[float, bytes | _End]] = asyncio.Queue(_MOST_QUEUED)

    async def put(self, item: bytes | _End) -> None:
        due = asyncio.get_running_loop().time() + self._proxy._latency_s[self._direction]
        await self._items.put((due, item))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes | _End:
        due, item = await self._items.get()
        left = due - asyncio.get_running_loop().time()
        if left > 0:
            await asyncio.sleep(left)
        await self._proxy._flowing[self._direction].wait()
        return item


def _first(faults: list[Fault], message: bytes) -> Fault | None:
    return next((fault for fault in faults if fault._strikes(message)), None)


def _address(upstream: RedisServer | str) -> tuple[str, int] | str:
    if isinstance(upstream, RedisServer):
        return ("127.0.0.1", upstream.port)
    parts = urlsplit(upstream)
    if parts.scheme == "unix":
        return parts.path
    if parts.scheme == "redis" and parts.hostname and parts.port:
        return (parts.hostname, parts.port)
    raise ValueError(f"expected redis://host:port or unix://path, got {upstream!r}")
