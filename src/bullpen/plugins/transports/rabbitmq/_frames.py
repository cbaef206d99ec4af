"""What a broker sends, made safe for the driver: one message that the driver cannot decode never ends a connection.

In: the stream of a broker. Out: the same stream, frame by frame. The driver raises for a property, a header name or a
routing key that is no UTF-8, a time beyond the year 9999, tables in tables without end, or a delivery mode of its own
kind; the broker stores and delivers all of them. Raised in the driver, such a message ends the connection with every
delivery on it, and again after each reconnect. Here the frame is replaced by one that can be decoded: what can be read
is kept, and the header `UNREADABLE_HEADER` says what cannot. Elsewhere: such a message becomes a dead letter
(`_messages`), the connection (`_link`).
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from aiormq.connection import TCPTransportFactory, TLSTransportFactory, TransportFactory
from yarl import URL

__all__ = ["UNREADABLE_HEADER", "GuardedStream", "readable_frame"]

UNREADABLE_HEADER: Final = "x-bullpen-unreadable"
_HEAD: Final = struct.Struct(">BHI")
_METHOD, _CONTENT_HEADER = 1, 2
_END: Final = b"\xce"
_DELIVER: Final = struct.pack(">HH", 60, 60)
_PROPERTIES_AT: Final = _HEAD.size + 12
"""Behind class, weight and the size of the body."""
_DEEPEST: Final = 32
"""Tables in tables: the driver decodes and encodes them by recursion."""
_LONGEST_REASON: Final = 200
_LATEST_MS: Final = 253_402_300_799_000
"""The end of the year 9999; the driver takes what is large for milliseconds."""
_FIXED: Final = dict(zip(b"tbBsuIilLfdDV\x00", (1, 1, 1, 2, 2, 4, 4, 8, 8, 4, 8, 5, 0, 0), strict=True))
"""How long values of these types are."""
_HEADERS_BIT: Final = 1 << 13
_TEXT, _TABLE, _OCTET, _TIME = "text", "table", "octet", "time"
_PROPERTIES: Final = tuple(
    (1 << (15 - place), name, kind)
    for place, (name, kind) in enumerate(
        (
            ("content_type", _TEXT),
            ("content_encoding", _TEXT),
            ("headers", _TABLE),
            ("delivery_mode", _OCTET),
            ("priority", _OCTET),
            ("correlation_id", _TEXT),
            ("reply_to", _TEXT),
            ("expiration", _TEXT),
            ("message_id", _TEXT),
            ("timestamp", _TIME),
            ("type", _TEXT),
            ("user_id", _TEXT),
            ("app_id", _TEXT),
            ("cluster_id", _TEXT),
        )
    )
)


class GuardedStream(TransportFactory):
    """Opens connections as the driver does, and reads from them frame by frame."""

    async def create(self, url: URL, **options: Any) -> tuple[Any, asyncio.StreamWriter]:
        driver = TLSTransportFactory() if url.scheme == "amqps" else TCPTransportFactory()
        reader, writer = await driver.create(url, **options)
        return _FrameReader(reader), writer


class _FrameReader:
    """As much of a stream reader as the driver uses."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._frame, self._at = b"", 0

    def at_eof(self) -> bool:
        return self._at == len(self._frame) and self._reader.at_eof()

    async def readexactly(self, count: int) -> bytes:
        if self._at == len(self._frame):
            self._frame, self._at = await self._next_frame(), 0
        self._at += count
        return self._frame[self._at - count : self._at]

    async def read(self) -> bytes:
        rest, self._frame, self._at = self._frame[self._at :], b"", 0
        return rest + await self._reader.read()

    async def _next_frame(self) -> bytes:
        head = await self._reader.readexactly(_HEAD.size)
        if head.startswith(b"AMQP"):
            return head  # a broker of another version: the driver says so
        kind, _, size = _HEAD.unpack(head)
        frame = head + await self._reader.readexactly(size + 1)
        return readable_frame(frame) if kind in (_METHOD, _CONTENT_HEADER) else frame


def readable_frame(frame: bytes) -> bytes:
    """The frame, or one in its place that the driver can decode."""
    if frame[0] == _CONTENT_HEADER:
        return _readable_header(frame)
    if frame.startswith(_DELIVER, _HEAD.size) and not frame.isascii():
        return _readable_deliver(frame)
    return frame


# ---- content headers ---------------------------------------------------------------------------------------------


class _Property(NamedTuple):
    bit: int
    name: str
    kind: str
    raw: bytes


class _UnreadableFrame(ValueError):
    """Why the driver could not decode this."""


def _readable_header(frame: bytes) -> bytes:
    try:
        properties = _split(frame)
    except (_UnreadableFrame, struct.error, IndexError) as error:
        return _rebuilt(frame, [], f"properties: {error}")
    problems: dict[str, str] = {}
    for one in properties:
        try:
            _check(one)
        except (ValueError, struct.error, IndexError) as error:
            problems[one.name] = str(error)
    if not problems:
        return frame
    kept = [_spelled(one) if one.name in problems else one for one in properties]
    reason = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
    return _rebuilt(frame, [one for one in kept if one is not None], reason)


def _split(frame: bytes) -> list[_Property]:
    (flags,) = struct.unpack_from(">H", frame, _PROPERTIES_AT)
    if flags & 0b11:
        raise _UnreadableFrame("more than the protocol allows")
    found, at, end = [], _PROPERTIES_AT + 2, len(frame) - 1
    for bit, name, kind in _PROPERTIES:
        if flags & bit:
            if kind is _TEXT:
                size = 1 + frame[at]
            elif kind is _TABLE:
                size = 4 + int.from_bytes(frame[at : at + 4], "big")
            else:
                size = 1 if kind is _OCTET else 8
            found.append(_Property(bit, name, kind, frame[at : at + size]))
            at += size
    if at != end:
        raise _UnreadableFrame(f"{end - _PROPERTIES_AT} bytes, but the header says {at - _PROPERTIES_AT}")
    return found


def _check(one: _Property) -> None:
    if one.kind is _TEXT:
        text = one.raw[1:].decode()
        if one.name == "expiration" and not text.isdecimal():
            raise _UnreadableFrame("not a number of milliseconds")
    elif one.kind is _TABLE:
        _check_table(one.raw, 0, 1)
    elif one.kind is _TIME:
        _check_time(one.raw, 0)
    elif one.name == "delivery_mode" and one.raw[0] > 2:
        raise _UnreadableFrame(f"{one.raw[0]} is neither 1 nor 2")


def _check_table(raw: bytes, at: int, depth: int) -> int:
    end = at + 4 + int.from_bytes(raw[at : at + 4], "big")
    at += 4
    while at < end:
        size = raw[at]
        raw[at + 1 : at + 1 + size].decode()
        at = _check_value(raw, at + 1 + size, depth)
    return _ended(at, end, len(raw))


def _check_array(raw: bytes, at: int, depth: int) -> int:
    end = at + 4 + int.from_bytes(raw[at : at + 4], "big")
    at += 4
    while at < end:
        at = _check_value(raw, at, depth)
    return _ended(at, end, len(raw))


def _check_value(raw: bytes, at: int, depth: int) -> int:
    """Where the value ends that begins here with its type."""
    kind = raw[at]
    at += 1
    if kind in b"Sx":
        return at + 4 + int.from_bytes(raw[at : at + 4], "big")
    if kind in _FIXED:
        return at + _FIXED[kind]
    if kind == ord("T"):
        return _check_time(raw, at)
    if depth == _DEEPEST:
        raise _UnreadableFrame(f"more than {_DEEPEST} tables in each other")
    if kind == ord("F"):
        return _check_table(raw, at, depth + 1)
    if kind == ord("A"):
        return _check_array(raw, at, depth + 1)
    raise _UnreadableFrame(f"a value of the unknown type {kind}")


def _ended(at: int, end: int, size: int) -> int:
    if at != end or end > size:
        raise _UnreadableFrame("a table whose length differs from its header")
    return at


def _check_time(raw: bytes, at: int) -> int:
    (value,) = struct.unpack_from(">Q", raw, at)
    if value > _LATEST_MS:
        raise _UnreadableFrame("a time beyond the year 9999")
    return at + 8


def _spelled(one: _Property) -> _Property | None:
    """A text with question marks for what is none, so that a message keeps its id; nothing of the other kinds."""
    if one.kind is not _TEXT or one.name == "expiration":
        return None
    return one._replace(raw=_spelled_text(one.raw))


def _spelled_text(raw: bytes) -> bytes:
    text = raw[1:].decode("utf-8", "replace").replace("\ufffd", "?").encode()
    return bytes([len(text)]) + text


def _rebuilt(frame: bytes, properties: Sequence[_Property], reason: str) -> bytes:
    told = reason[:_LONGEST_REASON].encode("utf-8", "replace")
    entry = b"".join(
        (bytes([len(UNREADABLE_HEADER)]), UNREADABLE_HEADER.encode(), b"S", len(told).to_bytes(4, "big"), told)
    )
    kept = {one.bit: one.raw for one in properties}
    own = kept.get(_HEADERS_BIT, b"")[4:]
    kept[_HEADERS_BIT] = (len(own) + len(entry)).to_bytes(4, "big") + own + entry
    flags = sum(kept)
    payload = b"".join(
        (frame[_HEAD.size : _PROPERTIES_AT], struct.pack(">H", flags), *(kept[bit] for bit in sorted(kept)[::-1]))
    )
    return _framed(frame, payload)


# ---- deliveries --------------------------------------------------------------------------------------------------


def _readable_deliver(frame: bytes) -> bytes:
    """Exchange and routing key are the last two fields; everybody who may publish chooses the second."""
    exchange_at = _HEAD.size + 4 + 1 + frame[_HEAD.size + 4] + 9
    key_at = exchange_at + 1 + frame[exchange_at]
    names = frame[exchange_at:key_at], frame[key_at:-1]
    try:
        for name in names:
            name[1:].decode()
    except UnicodeDecodeError:
        return _framed(frame, frame[_HEAD.size : exchange_at] + b"".join(map(_spelled_text, names)))
    return frame


def _framed(frame: bytes, payload: bytes) -> bytes:
    kind, channel, _ = _HEAD.unpack_from(frame)
    return _HEAD.pack(kind, channel, len(payload)) + payload + _END
