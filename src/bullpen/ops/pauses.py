"""Who paused a queue, when and why.

In: a queue, who pauses it and the reason. Out: a note beside the pause. Other clients pause and resume without a note,
and know nothing of ours: the note names the event of its pause, and a later one in the stream of events makes it void.
So no person is named for the act of another, as far back as the queue keeps its events.
"""

from __future__ import annotations

from typing import Final

import msgspec

from bullpen.queue import Queue

__all__ = ["PAUSED_BY_FIELD", "PauseNote", "pause_queue", "read_pause", "resume_queue"]

PAUSED_BY_FIELD: Final = "bppausedby"
_EVENTS_READ: Final = 3_000
"""The newest ones: a queue that is paused writes few."""


class PauseNote(msgspec.Struct, rename="camel", frozen=True):
    """Why a queue is paused."""

    at_ms: int
    """0: not known."""
    by: str = ""
    """Empty: another client, or a program without a note."""
    reason: str = ""
    group: bool = False
    """It was paused together with others."""


async def pause_queue(queue: Queue, *, by: str, reason: str = "", group: bool = False) -> None:
    """Pause it, and note who did. Dying in between leaves a pause of unknown origin. As one of a `group`, a queue that
    is paused already is left as it is: resuming the group must not resume it."""
    if group and await queue.is_paused():
        return
    door, keys = queue.connection.shared_door(queue.keys.base), queue.keys
    last = await door.call("XREVRANGE", keys.events, "+", "-", "COUNT", 1)
    before = last[0][0].decode() if last else "0"
    await queue.pause()
    events = await door.call("XRANGE", keys.events, f"({before}", "+", "COUNT", _EVENTS_READ)
    event_id = next((entry_id for entry_id, flat in events if _kind(flat) == b"paused"), None)
    if event_id is not None:
        note = {"event": event_id.decode(), "by": by, "reason": reason, "group": "1" if group else ""}
        await door.call("HSET", keys.meta, PAUSED_BY_FIELD, msgspec.json.encode(note))


async def resume_queue(queue: Queue, *, group: bool = False) -> None:
    """Resume it; as one of a `group` only if it was paused as one."""
    if group and ((note := await read_pause(queue)) is None or not note.group):
        return
    await queue.resume()
    await queue.connection.shared_door(queue.keys.base).call("HDEL", queue.keys.meta, PAUSED_BY_FIELD)


async def read_pause(queue: Queue) -> PauseNote | None:
    """Who paused the queue; None: it is not paused. Two reads of bounded cost."""
    door, keys = queue.connection.shared_door(queue.keys.base), queue.keys
    paused, raw = await door.call("HMGET", keys.meta, "paused", PAUSED_BY_FIELD)
    if paused is None:
        return None
    note = _read(raw)
    since = "-" if note is None else f"({note['event']}"
    events = await door.call("XREVRANGE", keys.events, "+", since, "COUNT", _EVENTS_READ)
    for entry_id, flat in events:
        if (kind := _kind(flat)) in (b"paused", b"resumed"):
            return PauseNote(_ms(entry_id) if kind == b"paused" else 0)
    if note is None:
        return PauseNote(0)
    return PauseNote(_ms(note["event"].encode()), note["by"], note["reason"], bool(note.get("group")))


def _read(raw: bytes | None) -> dict[str, str] | None:
    try:
        return None if raw is None else msgspec.json.decode(raw, type=dict[str, str])
    except msgspec.DecodeError:  # somebody else's field of this name
        return None


def _kind(flat: list[bytes]) -> bytes:
    return dict(zip(flat[::2], flat[1::2], strict=False)).get(b"event", b"")


def _ms(entry_id: bytes) -> int:
    return int(entry_id.partition(b"-")[0])
