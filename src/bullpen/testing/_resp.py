"""Cut a byte stream into whole RESP values, without reading what is in them.

In: bytes as they come from a socket, in either direction. Out: complete commands or replies, byte for byte. Knows
RESP2, RESP3 and inline commands; streamed strings and aggregates, which no server sends, are not understood.
"""

from __future__ import annotations

_LINE_ONLY = b"+-:_#,("
_SIZED = b"$=!"
_AGGREGATES = b"*~>"
_PAIRS = b"%|"


class RespFramer:
    """Collects bytes and gives back whole values; what is incomplete stays inside for the next feed."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._at = 0  # where the next element begins
        self._open: list[int] = []  # elements still missing in each aggregate that has begun

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes, return every value that they complete."""
        self._buffer += data
        values: list[bytes] = []
        while self._step():
            if not self._open:
                values.append(bytes(self._buffer[: self._at]))
                del self._buffer[: self._at]
                self._at = 0
        return values

    def _step(self) -> bool:
        """Move over one element; False when more bytes are needed."""
        end = self._buffer.find(b"\r\n", self._at) if self._at < len(self._buffer) else -1
        if end < 0:
            return False
        kind, after = self._buffer[self._at], end + 2
        if kind in _SIZED:
            size = int(self._buffer[self._at + 1 : end])
            after += size + 2 if size >= 0 else 0
            if after > len(self._buffer):
                return False
        elif kind in _AGGREGATES or kind in _PAIRS:
            count = int(self._buffer[self._at + 1 : end]) * (2 if kind in _PAIRS else 1)
            count += kind == ord("|")  # an attribute stands in front of the value it belongs to
            if count > 0:
                self._open.append(count)
                self._at = after
                return self._step()
        self._at = after
        while self._open:
            self._open[-1] -= 1
            if self._open[-1]:
                break
            self._open.pop()
        return True
