"""The history of jobs that other clients ran, estimated once a minute from a bounded sample.

In: snapshots of all queues, and which workers record by themselves. Out: counts in `bullpen.queue.history`, marked as
estimated. How many jobs ended follows from the counters of a queue, so jobs that are removed when they end count too;
what people removed by hand looks the same. Names and times come from at most fifty jobs that ended and are still there.
One process of all estimates; what it last saw is kept by the server, so that another one goes on.
Elsewhere: jobs of our own workers (`recorder`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from bullpen._kernel.logs import get_logger
from bullpen.errors import BullpenError
from bullpen.ops.overview import QueueSnapshot, Snapshot
from bullpen.queue.beats import read_beats
from bullpen.queue.history import DONE, ESTIMATED, FAILED, RUN, SAMPLED, WAIT, add_history, bucket_of
from bullpen.redis import Connection
from bullpen.wire.keys import QueueKeys
from bullpen.wire.records import JobRecord

__all__ = ["Estimator"]

logger = get_logger("bullpen.estimates")

EVERY_S: Final = 60.0
_LOCK_MS: Final = 50_000
_KEPT_MS: Final = 600_000
_MOST_QUEUES: Final = 100
_SAMPLE: Final = 50
_FIELDS: Final = (b"name", b"timestamp", b"processedOn", b"finishedOn", b"ats", b"opts", b"pb", b"delay")

Counts = dict[int, int]


class _Seen(msgspec.Struct):
    """What was there at the last time."""

    at_ms: int
    ended: dict[str, int]
    """Jobs that ever ended, or were removed, by queue."""


class Estimator:
    """Runs between `start` and `aclose`. `own` are the keys of the queue of operations."""

    def __init__(
        self, connection: Connection, prefix: str, own: QueueKeys, snapshot: Callable[[], Awaitable[Snapshot]]
    ) -> None:
        self._connection, self._prefix, self._own, self._snapshot = connection, prefix, own, snapshot
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Safe to call twice."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="bullpen estimates")

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        is_away = False
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                await self.estimate()
            except (BullpenError, OSError) as error:
                if not is_away:
                    logger.warning("the history of other clients cannot be estimated now: %s", error)
                is_away = True
            else:
                is_away = False

    async def estimate(self) -> None:
        """Add what ended since the last time; nothing when another process does so now."""
        door = self._connection.shared_door(self._own.base)
        if await door.call("SET", self._own.once("estimates"), "", "NX", "PX", _LOCK_MS) is None:
            return
        picture, last = await self._snapshot(), self._own.once("estimates:seen")
        raw = await door.call("GET", last)
        seen = _decoded(raw)
        now = _Seen(picture.at_ms, {look.queue: look.added - look.unfinished for look in picture.looks})
        # Written first: whoever dies in the middle leaves a minute out, and counts none twice.
        await door.call("SET", last, msgspec.json.encode(now), "PX", _KEPT_MS)
        if seen is None or seen.at_ms >= now.at_ms:
            return
        grown = [
            (now.ended[look.queue] - seen.ended[look.queue], look)
            for look in picture.looks
            if now.ended[look.queue] > seen.ended.get(look.queue, now.ended[look.queue])
        ]
        for ended, look in sorted(grown, key=lambda each: -each[0])[:_MOST_QUEUES]:
            await self._add(look, ended, seen.at_ms, now.at_ms)

    async def _add(self, look: QueueSnapshot, ended: int, since_ms: int, now_ms: int) -> None:
        keys = QueueKeys(self._prefix, look.queue)
        door = self._connection.shared_door(keys.base)
        beats = (await read_beats(door, [keys])).get(look.queue, [])
        ours = {worker.name for beat in beats for worker in beat.workers}
        if ours and look.workers is not None and look.workers <= len(ours):
            return  # each of them records by itself
        records, failed_ids, failed = await self._sample(keys, since_ms)
        others = [record for record in records if record.worker_id not in ours]
        if ours:
            ended = round(ended * len(others) / len(records)) if records else 0
        if not ended:
            return
        of_others = [record for record in others if record.id in failed_ids]
        failed = min(ended, round(failed * len(of_others) / len(failed_ids)) if failed_ids else 0)
        by_name: dict[str, list[JobRecord]] = {}
        for record in others:
            by_name.setdefault(record.name, []).append(record)
        counts = {"": _counts(others, ended - failed, failed)}
        for name, theirs in by_name.items():
            share = len(theirs) / len(others)
            bad = sum(record.id in failed_ids for record in theirs) / max(1, len(of_others))
            part = round(failed * bad)
            counts[name] = _counts(theirs, max(0, round(ended * share) - part), part)
        await add_history(self._connection, keys, counts, now_ms)

    async def _sample(self, keys: QueueKeys, since_ms: int) -> tuple[list[JobRecord], set[str], int]:
        """Jobs that ended since then, which of them failed, and how many failed in all."""
        door = self._connection.shared_door(keys.base)
        after = f"({since_ms}"
        done, failed, count = await door.call_many(
            [
                ("ZREVRANGEBYSCORE", keys.completed, "+inf", after, "LIMIT", 0, _SAMPLE),
                ("ZREVRANGEBYSCORE", keys.failed, "+inf", after, "LIMIT", 0, _SAMPLE),
                ("ZCOUNT", keys.failed, after, "+inf"),
            ]
        )
        for reply in (done, failed, count):
            if isinstance(reply, Exception):
                raise reply
        ids: list[bytes] = [*done, *failed]
        replies: list[Any] = (
            await door.call_many([("HMGET", keys.base.encode() + each, *_FIELDS) for each in ids]) if ids else []
        )
        records = [
            JobRecord(_text(job_id), dict(zip(_FIELDS, reply, strict=True)))
            for job_id, reply in zip(ids, replies, strict=True)
            if isinstance(reply, list) and reply[0] is not None
        ]
        return records, {_text(each) for each in failed}, int(count)


def _counts(records: list[JobRecord], done: int, failed: int) -> Counts:
    found: Counts = {DONE: done, FAILED: failed, SAMPLED: len(records), ESTIMATED: done + failed}
    for record in records:
        if not record.processed_on or not record.finished_on:
            continue
        places = [RUN + bucket_of(record.finished_on - record.processed_on)]
        if record.attempts_started <= 1:
            places.append(WAIT + bucket_of(record.processed_on - record.due_ms))
        for place in places:
            found[place] = found.get(place, 0) + 1
    return {place: count for place, count in found.items() if count}


def _decoded(raw: Any) -> _Seen | None:
    try:
        return None if raw is None else msgspec.json.decode(raw, type=_Seen)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")
