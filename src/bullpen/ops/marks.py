"""Marks: a deploy or another event that explains a bend in a chart.

In: a text, and who set it. Out: the marks of a range, oldest first. The server of the queues keeps the newest five
hundred for forty days.
"""

from __future__ import annotations

from typing import Final

import msgspec

from bullpen.errors import require
from bullpen.queue.actor import check_actor
from bullpen.redis import Connection
from bullpen.wire.keys import QueueKeys

__all__ = ["LONGEST_MARK", "ChartMark", "add_mark", "read_marks"]

LONGEST_MARK: Final = 200
_MOST: Final = 500
_TTL_S: Final = 40 * 24 * 3_600
_MOST_READ: Final = 100


class ChartMark(msgspec.Struct, rename="camel", frozen=True):
    """One event."""

    at_ms: int
    text: str
    by: str


async def add_mark(connection: Connection, keys: QueueKeys, text: str, by: str) -> ChartMark:
    """Set one now. `keys` are those of the queue of operations."""
    text = text.strip()
    require("text", 0 < len(text) <= LONGEST_MARK and text.isprintable(), f"1 to {LONGEST_MARK} characters", text)
    by = check_actor(by)
    door = connection.shared_door(keys.base)
    entry_id = await door.call("XADD", keys.marks, "MAXLEN", "~", _MOST, "*", "text", text, "by", by)
    await door.call("EXPIRE", keys.marks, _TTL_S)
    return ChartMark(_ms(entry_id), text, by)


async def read_marks(connection: Connection, keys: QueueKeys, since_ms: int) -> tuple[ChartMark, ...]:
    """Those since an instant; of very many the newest hundred."""
    found = await connection.shared_door(keys.base).call("XREVRANGE", keys.marks, "+", since_ms, "COUNT", _MOST_READ)
    marks = []
    for entry_id, flat in reversed(found):
        fields = dict(zip(flat[::2], flat[1::2], strict=False))
        texts = (fields.get(name, b"").decode("utf-8", "replace")[:LONGEST_MARK] for name in (b"text", b"by"))
        marks.append(ChartMark(_ms(entry_id), *texts))
    return tuple(marks)


def _ms(entry_id: bytes) -> int:
    return int(entry_id.partition(b"-")[0])
