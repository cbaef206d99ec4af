"""The limits of one connection and of one request.

In: the time for a request, and the sizes. Out: a protocol for uvicorn that closes what takes too long and reads in
small portions, and an ASGI application around another one that refuses what is too large. Elsewhere: how many
connections there are (`serve`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final

import h11
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["limited", "protocol_for"]

_RECEIVING: Final = (h11.IDLE, h11.SEND_BODY)
_PORTION_BYTES: Final = 2_048
"""Read in one go. In chunks of one byte this is 340 parts, some milliseconds of work."""
_TURN_S: Final = 0.003
"""For all connections together, before others on the loop have their turn."""
_COMPLAINTS_EVERY_S: Final = 60.0
_Message = dict[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_Application = Callable[[dict[str, Any], _Receive, _Send], Awaitable[None]]


class _Complaints(logging.Filter):
    """Warnings are about what clients sent, who may send as much as they like: one a minute. Errors are of ours."""

    _next_at = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno > logging.WARNING:
            return True
        now = time.monotonic()
        if now < self._next_at:
            return False
        self._next_at = now + _COMPLAINTS_EVERY_S
        return True


_logger = logging.getLogger("bullpen.http.clients")
_logger.addFilter(_Complaints())


class _Turns:
    """Lets connections take what they received, one portion each in turn, and only for a moment per turn of the loop.

    A parser in Python takes a second for one read of 256 KiB that is all tiny chunks, and there are many connections:
    workers on the same loop would stand still meanwhile.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], bool]] = deque()
        self._is_due = False

    def add(self, take_portion: Callable[[], bool]) -> None:
        """It is called until it returns False: nothing is left."""
        self._waiting.append(take_portion)
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._is_due = False
        ends_at = time.perf_counter() + _TURN_S
        while self._waiting and time.perf_counter() < ends_at:
            take_portion = self._waiting.popleft()
            if take_portion():
                self._waiting.append(take_portion)
        if self._waiting:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._turn)


class _Flow(FlowControl):
    """Reads on only when what was read has been taken."""

    def __init__(self, transport: asyncio.Transport, has_more: Callable[[], bool]) -> None:
        super().__init__(transport)
        self._has_more = has_more

    def resume_reading(self) -> None:
        self.read_paused = False
        if not self._has_more() and not self._transport.is_closing():
            self._transport.resume_reading()


def protocol_for(request_s: float, on_end: Callable[[], None]) -> type[asyncio.Protocol]:
    """A class, because that is what uvicorn wants. `on_end` is called once for each connection."""
    turns = _Turns()

    class Protocol(H11Protocol):
        _request_timer: asyncio.TimerHandle | None = None
        _answer_timer: asyncio.TimerHandle | None = None
        _received = b""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.logger = _logger

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.flow = _Flow(transport, lambda: bool(self._received))
            # Every byte that the client has not taken counts, so that what it never takes has a deadline as well.
            transport.set_write_buffer_limits(high=0)
            self._time_request()

        def data_received(self, data: bytes) -> None:
            self._unset_keepalive_if_required()
            if not self._received:
                turns.add(self._take_portion)
            self._received += data
            self.transport.pause_reading()

        def _take_portion(self) -> bool:
            portion, self._received = self._received[:_PORTION_BYTES], self._received[_PORTION_BYTES:]
            if self.transport.is_closing():  # answered, or gone: the rest is for nobody
                self._received = b""
                return False
            super().data_received(portion)
            self._time_request()
            if self._received:
                self.transport.pause_reading()  # uvicorn may have resumed it for the next request
            elif not self.flow.read_paused and not self.transport.is_closing():
                self.transport.resume_reading()
            return bool(self._received)

        def _time_request(self) -> None:
            """From the first byte to the last, or from the beginning of the connection. More bytes buy no more time."""
            if self.conn.their_state not in _RECEIVING:
                if self._request_timer is not None:
                    self._request_timer.cancel()
                    self._request_timer = None
            elif self._request_timer is None:
                self._request_timer = self.loop.call_later(request_s, self.transport.abort)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.conn.trailing_data[0]:  # the next request has begun; between two, uvicorn's own limit counts
                self._time_request()

        def pause_writing(self) -> None:
            super().pause_writing()
            if self._answer_timer is None:
                self._answer_timer = self.loop.call_later(request_s, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._answer_timer is not None:
                self._answer_timer.cancel()
                self._answer_timer = None

        def connection_lost(self, exc: Exception | None) -> None:
            for timer in (self._request_timer, self._answer_timer):
                if timer is not None:
                    timer.cancel()
            self._unset_keepalive_if_required()
            try:
                super().connection_lost(exc)
            finally:
                on_end()

    return Protocol


def limited(application: _Application, *, header_bytes: int, body_bytes: int) -> _Application:
    """The application, for requests that are small enough."""

    async def serve(scope: dict[str, Any], receive: _Receive, send: _Send) -> None:
        if scope["type"] != "http":
            await application(scope, receive, send)
            return
        target = len(scope.get("raw_path") or b"") + len(scope["query_string"])
        if target + sum(len(name) + len(value) + 4 for name, value in scope["headers"]) > header_bytes:
            await _refuse(send, 431, b"the headers are too large")
            return
        lengths = [value for name, value in scope["headers"] if name == b"content-length"]
        if lengths and any(name == b"transfer-encoding" for name, _ in scope["headers"]):
            # A proxy before us may take the one where we take the other: what follows would be a request of its own.
            await _refuse(send, 400, b"content-length and transfer-encoding exclude each other")
            return
        if lengths and int(lengths[0]) > body_bytes:
            await _refuse(send, 413, b"the body is too large")
            return
        await _Request(receive, send, body_bytes).answer(application, scope)

    return serve


class _Request:
    """One whose body is counted while it is read."""

    def __init__(self, receive: _Receive, send: _Send, most: int) -> None:
        self._receive_next, self._send_next, self._most = receive, send, most
        self._size = 0
        self._is_answered = self._is_refused = False

    async def answer(self, application: _Application, scope: dict[str, Any]) -> None:
        try:
            await application(scope, self._receive, self._send)
        except Exception:
            if not self._is_refused:  # else it is about the body that we took away
                raise

    async def _receive(self) -> _Message:
        if self._is_refused:
            return {"type": "http.disconnect"}
        message = await self._receive_next()
        self._size += len(message.get("body", b""))
        if self._size <= self._most:
            return message
        self._is_refused = True
        if not self._is_answered:
            await _refuse(self._send_next, 413, b"the body is too large")
        return {"type": "http.disconnect"}

    async def _send(self, message: _Message) -> None:
        if not self._is_refused or self._is_answered:
            self._is_answered = True
            await self._send_next(message)


async def _refuse(send: _Send, status: int, why: bytes) -> None:
    """And close: the rest of the request is not read."""
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    body = b'{"error":"' + why + b'"}'
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
