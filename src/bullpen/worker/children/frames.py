"""Messages between a worker and its child processes: MessagePack behind a length, over a socket.

In: dictionaries of plain values. Out: the same, in order, or EndOfMessages. Nothing is ever pickled. One end may block
(`BlockingLink`), the other lives on an event loop (`LoopLink`): a protocol of our own instead of asyncio's streams,
which cost the parent a fifth of its time per job. Elsewhere: what the messages say (`pool`, `child`).
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
from collections import deque
from typing import Any, Final, Self, cast

import msgspec

Message = dict[str, Any]

_LENGTH: Final = struct.Struct(">I")
_READ_BYTES: Final = 65_536
_MOST_BYTES: Final = 1 << 28
"""Of one message. A length beyond it was never written by us, and would be waited for until memory ends."""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode


class EndOfMessages(Exception):
    """The other side is gone."""


class NoMessage(Exception):
    """What came is no message: somebody else wrote to the socket, or the other side is broken."""


def frame(message: Message) -> bytes:
    body = _encode(message)
    return _LENGTH.pack(len(body)) + body


class Splitter:
    """Turns what comes from a socket, in pieces of any size, into messages."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0
        self._needed = _LENGTH.size

    def feed(self, piece: bytes) -> list[Message]:
        """The messages that are complete with this piece. Raises NoMessage for what is none."""
        self._pieces.append(piece)
        self._size += len(piece)
        if self._size < self._needed:
            return []  # a large message comes in many pieces; they are joined once
        received = piece if len(self._pieces) == 1 else b"".join(self._pieces)
        messages, begin = [], 0
        while True:
            self._needed = _LENGTH.size
            if len(received) - begin < self._needed:
                break
            length = _LENGTH.unpack_from(received, begin)[0]
            if length > _MOST_BYTES:
                raise NoMessage(f"a message of {length} bytes was announced")
            self._needed += length
            if len(received) - begin < self._needed:
                break
            try:
                messages.append(_decode(memoryview(received)[begin + _LENGTH.size : begin + self._needed]))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise NoMessage(str(error)) from None
            begin += self._needed
        rest = received[begin:]
        self._pieces, self._size = ([rest] if rest else []), len(rest)
        return messages


class BlockingLink:
    """One end, in a thread that waits for each message."""

    def __init__(self, link: socket.socket) -> None:
        self.socket = link
        self._splitter = Splitter()
        self._received: deque[Message] = deque()

    def send(self, message: Message) -> None:
        self.socket.sendall(frame(message))

    def receive(self) -> Message:
        """The next message; raises EndOfMessages."""
        while not self._received:
            piece = self.socket.recv(_READ_BYTES)
            if not piece:
                raise EndOfMessages
            self._received.extend(self._splitter.feed(piece))
        return self._received.popleft()

    def has_message(self) -> bool:
        """Whether something has come that was not received yet."""
        return bool(self._received) or bool(select.select([self.socket], [], [], 0)[0])


class LoopLink(asyncio.Protocol):
    """One end, on an event loop. One task receives at a time."""

    def __init__(self) -> None:
        self._splitter = Splitter()
        self._received: deque[Message] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self._has_ended = False
        self._broken: NoMessage | None = None
        self.left_unread = False
        """The other end was closed before it had read all that was sent, as far as the system tells."""
        self._transport: asyncio.Transport | None = None
        self._socket: socket.socket | None = None

    @classmethod
    async def open(cls, link: socket.socket) -> Self:
        _, opened = await asyncio.get_running_loop().create_connection(cls, sock=link)
        opened._socket = link
        return opened

    def send(self, message: Message) -> None:
        """Never waits. To one that is gone it does nothing: whoever receives next is told."""
        if self._transport is not None and not self._has_ended:
            self._transport.write(frame(message))

    async def receive(self) -> Message:
        """The next message; raises EndOfMessages, and NoMessage for what is none."""
        while not self._received:
            if self._broken is not None:
                raise self._broken
            if self._has_ended:
                raise EndOfMessages
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        return self._received.popleft()

    def end(self) -> None:
        """The process at the other end is gone. What it sent is still there to be received; then this is the end,
        whoever else holds the socket open."""
        if self._has_ended or self._socket is None or self._transport is None:
            return
        try:
            while piece := self._socket.recv(_READ_BYTES):
                self.data_received(piece)
        except ConnectionError as error:
            self.connection_lost(error)
        except OSError:  # nothing more, or the loop has closed it already
            pass
        self.connection_lost(None)
        self._transport.close()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # ---- called by the loop -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transports are no subclass of asyncio's

    def data_received(self, data: bytes) -> None:
        if self._broken is None:
            try:
                self._received.extend(self._splitter.feed(data))
            except NoMessage as error:
                self._broken = error
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._has_ended = True
        self.left_unread |= isinstance(exc, ConnectionError)
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
