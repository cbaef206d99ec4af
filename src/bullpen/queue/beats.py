"""What each process that works on a queue does now, as it tells itself every few seconds.

In: one process's workers of a queue. Out: what all processes told last. A process that ends says so; one that stopped
without a word is `gone` after thirty seconds, with the jobs that it had, and is forgotten after a minute. Workers of
other clients tell nothing: what the server knows of them stands in its list of clients (`bullpen.ops.overview`).
"""

from __future__ import annotations

from typing import Final

import msgspec

from bullpen.redis.client import Connection, Door
from bullpen.wire.keys import QueueKeys

__all__ = ["BEAT_EVERY_S", "GONE_AFTER_MS", "Beat", "BeatJob", "BeatWorker", "end_beat", "read_beats", "write_beat"]

BEAT_EVERY_S: Final = 10.0
GONE_AFTER_MS: Final = 30_000
_FORGOTTEN_AFTER_MS: Final = 60_000
_TTL_MS: Final = 75_000
_INDEX: Final = "index"


class BeatJob(msgspec.Struct, rename="camel", frozen=True):
    """A job that runs."""

    id: str
    name: str
    since_ms: int


class BeatWorker(msgspec.Struct, rename="camel", frozen=True):
    """One worker of the queue in this process."""

    name: str
    slots: int
    """Jobs that it runs at once at most."""
    running: int
    asked_ms: int | None = None
    """How long before the beat it asked for jobs; None: not yet."""
    is_paused: bool = False
    locks_lost: int = 0
    jobs: tuple[BeatJob, ...] = ()
    """The oldest of those that run."""


class Beat(msgspec.Struct, rename="camel", frozen=True):
    """What a process does for one queue."""

    process: str
    host: str
    pid: int
    language: str
    library: str
    started_ms: int
    at_ms: int
    """By the server's clock."""
    lag_ms: int
    """For how long its loop did not answer when this was told."""
    workers: tuple[BeatWorker, ...] = ()


async def write_beat(connection: Connection, keys: QueueKeys, beat: Beat) -> None:
    """Tell it. Telling it twice changes nothing."""
    door = connection.shared_door(keys.base)
    index = keys.beats(_INDEX)
    _raise_first(
        await door.call_many(
            [
                ("SET", keys.beats(beat.process), msgspec.json.encode(beat), "PX", _TTL_MS),
                ("ZADD", index, beat.at_ms, beat.process),
                ("ZREMRANGEBYSCORE", index, "-inf", beat.at_ms - _FORGOTTEN_AFTER_MS),
                ("EXPIRE", index, _TTL_MS // 1000),
            ]
        )
    )


async def end_beat(connection: Connection, keys: QueueKeys, process: str) -> None:
    """The process works on this queue no more."""
    door = connection.shared_door(keys.base)
    _raise_first(await door.call_many([("ZREM", keys.beats(_INDEX), process), ("UNLINK", keys.beats(process))]))


async def read_beats(door: Door, queues: list[QueueKeys]) -> dict[str, list[Beat]]:
    """What was told in the last minute, by queue; of queues that one connection reaches. Two writes."""
    (now, *indexes) = await door.call_many(
        [("TIME",), *(("ZRANGEBYSCORE", keys.beats(_INDEX), "-inf", "+inf", "LIMIT", 0, 100) for keys in queues)]
    )
    if isinstance(now, Exception):
        raise now
    since = int(now[0]) * 1000 - _FORGOTTEN_AFTER_MS
    asked = [
        (keys.name, keys.beats(process.decode("utf-8", "replace")))
        for keys, index in zip(queues, indexes, strict=True)
        if isinstance(index, list)
        for process in index
    ]
    found: dict[str, list[Beat]] = {}
    raws = await door.call_many([("GET", key) for _, key in asked]) if asked else []
    for (queue, _), raw in zip(asked, raws, strict=True):
        beat = _decoded(raw)
        if beat is not None and beat.at_ms >= since:
            found.setdefault(queue, []).append(beat)
    return found


def _decoded(raw: object) -> Beat | None:
    """None for one that ended by itself, and for what no process of ours wrote."""
    if not isinstance(raw, bytes):
        return None
    try:
        return msgspec.json.decode(raw, type=Beat)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None


def _raise_first(replies: list[object]) -> None:
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
