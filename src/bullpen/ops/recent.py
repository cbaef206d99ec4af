"""The last hour of each watched queue, and how long jobs waited recently.

In: snapshots of all queues; for waits, jobs that ended in the last five minutes. Out: jobs done in each of the last 60
minutes, and a p95 of waits from a bounded sample. It is kept in this process and may be lost: minutes in which nobody
watched share what happened in them evenly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from bullpen.ops.overview import Snapshot, grouped_by_place
from bullpen.redis import Connection
from bullpen.wire.keys import QueueKeys
from bullpen.wire.records import read_int

__all__ = ["RecentHour", "WaitSample", "sample_waits"]

MINUTES: Final = 60
_WINDOW_MS: Final = 300_000
_ENDED_PER_QUEUE: Final = 50
_MOST_QUEUES: Final = 20


class RecentHour:
    """What was done in each of the last 60 minutes."""

    def __init__(self) -> None:
        self._marks: dict[str, deque[tuple[int, int]]] = {}
        """Of each queue: a minute, and how many jobs had ended when it was first seen."""

    def note(self, picture: Snapshot) -> None:
        minute = picture.at_ms // 60_000
        for look in picture.looks:
            marks = self._marks.setdefault(look.queue, deque(maxlen=MINUTES + 2))
            ended = look.added - look.unfinished
            if marks and ended < marks[-1][1]:  # jobs were put back in line, or the queue was deleted
                marks[-1] = (marks[-1][0], ended)
            if not marks or marks[-1][0] != minute:
                marks.append((minute, ended))
        for gone in self._marks.keys() - {look.queue for look in picture.looks}:
            del self._marks[gone]

    def done_per_minute(self, queue: str, picture: Snapshot) -> tuple[float, ...]:
        """The oldest minute first, the present one last; 0 for minutes of which nothing is known."""
        look = next((each for each in picture.looks if each.queue == queue), None)
        marks = list(self._marks.get(queue, ()))
        if look is None or not marks:
            return (0.0,) * MINUTES
        now = picture.at_ms // 60_000
        marks.append((now + 1, look.added - look.unfinished))
        found = [0.0] * MINUTES
        for (begin, before), (end, after) in pairwise(marks):
            for minute in range(max(begin, now - MINUTES + 1), min(end, now + 1)):
                found[minute - now - 1] = max(0, after - before) / (end - begin)
        return tuple(found)


@dataclass(frozen=True, slots=True)
class WaitSample:
    """How long jobs of a queue waited before they began."""

    p95_ms: int
    jobs: int
    """Of how many it was made."""


async def sample_waits(connection: Connection, names: Iterable[QueueKeys], now_ms: int) -> dict[str, WaitSample]:
    """Of the jobs that ended in the last five minutes at their first attempt. Two writes for twenty queues."""
    found: dict[str, WaitSample] = {}
    for group in grouped_by_place(connection, list(names)[:_MOST_QUEUES]):
        door = connection.shared_door(group[0].base)
        since = now_ms - _WINDOW_MS
        lists = await door.call_many(
            ("ZREVRANGEBYSCORE", key, "+inf", since, "LIMIT", 0, _ENDED_PER_QUEUE)
            for keys in group
            for key in (keys.completed, keys.failed)
        )
        wanted = [
            (keys, job_id)
            for place, keys in enumerate(group)
            for ids in lists[2 * place : 2 * place + 2]
            if isinstance(ids, list)
            for job_id in ids
        ]
        fields = ("timestamp", "processedOn", "ats", "opts")
        replies = await door.call_many(("HMGET", keys.base.encode() + job_id, *fields) for keys, job_id in wanted)
        waits: dict[str, list[int]] = {}
        for (keys, _), reply in zip(wanted, replies, strict=True):
            if (wait := _wait_ms(reply)) is not None:
                waits.setdefault(keys.name, []).append(wait)
        found |= {name: WaitSample(_p95(each), len(each)) for name, each in waits.items()}
    return found


def _wait_ms(reply: Any) -> int | None:
    """None for a job that is gone, was delayed or was tried more than once: it did not only wait."""
    if not isinstance(reply, list):
        return None
    added, began, starts, opts = reply
    was_delayed = b'"delay":' in (opts or b"") and b'"delay":0' not in opts
    if not added or not began or was_delayed or read_int(starts or b"1") > 1:
        return None
    return max(0, read_int(began) - read_int(added))


def _p95(waits: Sequence[int]) -> int:
    return sorted(waits)[min(len(waits) - 1, int(len(waits) * 0.95))]
