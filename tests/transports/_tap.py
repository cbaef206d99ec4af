"""A TCP connection that can be listened to: at an exact message the wire is held or cut, and the test is told.

In: the port of a broker, a piece of bytes to wait for. Out: an address for a client; an event when the client has sent
those bytes, none of which have reached the broker. What has passed before stays passed, so a process that is killed now
died at exactly this point. Elsewhere: faults between us and Redis (`bullpen.testing.proxy`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

BASIC_ACK = b"\x00\x3c\x00\x50"
"""Class and method at the head of a frame of AMQP 0-9-1."""


class Tap:
    """Made by `tap`."""

    def __init__(self, upstream: int) -> None:
        self._upstream = upstream
        self._match: bytes | None = None
        self._is_cutting = False
        self._writers: list[asyncio.StreamWriter] = []
        self.struck = asyncio.Event()
        """The bytes were sent, and held back."""
        self.port = 0
        self.accepted = 0
        """How often somebody has connected, or tried to."""

    def hold_at(self, match: bytes) -> None:
        """Let nothing pass any more from the moment a client sends this; its connection stays open."""
        self._match, self._is_cutting = match, False
        self.struck.clear()

    def cut_at(self, match: bytes) -> None:
        """Cut every connection when a client sends this, and take no new one until `heal`."""
        self._match, self._is_cutting = match, True
        self.struck.clear()

    def cut(self) -> None:
        """Cut every connection now, and take no new one until `heal`."""
        self._match, self._is_cutting = None, True
        self.struck.set()
        self.close()

    def heal(self) -> None:
        self._match = None
        self.struck.clear()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        if self._is_cutting and self.struck.is_set():
            writer.transport.abort()
            return
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._upstream)
        self._writers += [writer, up_writer]
        async with asyncio.TaskGroup() as group:
            group.create_task(self._requests(reader, up_writer))
            group.create_task(self._replies(up_reader, writer))

    def close(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tail = b""
        with suppress(OSError):
            while data := await reader.read(65536):
                if self._match is not None and self._match in tail + data:
                    self.struck.set()
                    if self._is_cutting:
                        self.close()
                if not self.struck.is_set():
                    writer.write(data)
                tail = data[-64:]
        writer.close()

    async def _replies(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
        writer.close()


@asynccontextmanager
async def tap(upstream: int) -> AsyncIterator[Tap]:
    """A tap in front of a port of this machine, for the length of a block."""
    made = Tap(upstream)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        made.close()
        await server.wait_closed()
