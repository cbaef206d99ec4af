"""A server that says what it is told to: for answers that no real server can be brought to give on demand."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import hiredis

Answer = Callable[[list[bytes]], bytes | None]
"""From a command to a raw reply; None for the usual one."""


@dataclass
class ScriptedServer:
    """Where it listens, and what it was asked."""

    port: int = 0
    heard: list[list[bytes]] = field(default_factory=list)
    subscribers: list[asyncio.StreamWriter] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def names(self) -> list[str]:
        """First words of all commands so far."""
        return [command[0].decode() for command in self.heard]

    def push(self, raw: bytes) -> None:
        """Tell all who subscribed to anything."""
        for writer in self.subscribers:
            writer.write(raw)


def bulk(text: str) -> bytes:
    raw = text.encode()
    return b"$%d\r\n%b\r\n" % (len(raw), raw)


def array(*items: bytes) -> bytes:
    return b"*%d\r\n%b" % (len(items), b"".join(items))


_USUAL = {
    b"PING": b"+PONG\r\n",
    b"INFO": bulk("redis_version:7.2.11\r\naof_enabled:1\r\nmaxmemory_policy:noeviction\r\n"),
    b"DEL": b":0\r\n",
}


@contextlib.asynccontextmanager
async def scripted(answer: Answer) -> AsyncIterator[ScriptedServer]:
    """A server on loopback for the length of a block."""
    told = ScriptedServer()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        parser = hiredis.Reader()
        try:
            while chunk := await reader.read(65536):
                parser.feed(chunk)
                while command := parser.gets():
                    told.heard.append(command)
                    if command[0] == b"SUBSCRIBE" and writer not in told.subscribers:
                        told.subscribers.append(writer)
                    writer.write(answer(command) or _USUAL.get(command[0], b"+OK\r\n"))
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    told.port = server.sockets[0].getsockname()[1]
    try:
        yield told
    finally:
        server.close()
        for writer in told.subscribers:
            writer.close()
