"""A snapshot of all queues, and how fast they moved since the snapshot before.

In: a connection and a prefix, or names of queues. Out: one record per queue. Made to be asked every second by many
viewers at once: each snapshot costs two round trips for a hundred queues, every command in them is of constant cost,
and no script runs. What costs more is asked rarely: the walk over all keys that finds queues, and the list of clients
that counts workers, take at most a twentieth of the time. Elsewhere: the exact reads of one queue (`bullpen.queue`),
how it is shown (`bullpen.cli.top`).
"""

from __future__ import annotations

import base64
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from bullpen._kernel.duration import check_texts
from bullpen.errors import ServerRefused
from bullpen.queue.browse import find_queues
from bullpen.redis import Connection
from bullpen.wire.keys import QueueKeys
from bullpen.wire.records import read_int, read_score

__all__ = ["ConnectedWorker", "Overview", "QueueSnapshot", "Snapshot", "grouped_by_place", "workers_by_queue"]

_QUEUES_PER_CALL: Final = 100
_SCORE_PER_MS: Final = 4_096
"""Scores of delayed jobs are their due time times this, plus a sequence."""
_REST_AFTER_COSTLY: Final = 20
"""A costly question is repeated only after this multiple of the time that it took."""
_CANCELLED, _LANE_COUNT, _LANES = 11, 12, 13
"""Where these stand among the first answers of a queue, see `_counts`."""
_MOST_LANES: Final = 100
_SEARCH_EVERY_S: Final = 15.0
_COUNT_WORKERS_EVERY_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class QueueSnapshot:
    """One queue at one moment."""

    queue: str
    waiting: int = 0
    """Waiting without a priority, paused ones included."""
    prioritized: int = 0
    delayed: int = 0
    waiting_children: int = 0
    active: int = 0
    completed: int = 0
    failed: int = 0
    dead_letters: int = 0
    cancelled: int = 0
    """Jobs that were cancelled before they began, since there is the queue."""
    lanes_held: int = 0
    """Lanes that hold jobs back, because of their limits."""
    jobs_held: int = 0
    """Delayed jobs that they hold; those of the first hundred lanes."""
    paused: bool = False
    added: int = 0
    """How many jobs were ever added; the counter of the queue."""
    oldest_ms: int | None = None
    """How long the next job could have run already, a delayed one that is due included; None when nobody waits."""
    workers: int | None = None
    """Connected workers of any client; None when the server refuses CLIENT LIST."""
    worker_idle_s: int | None = None
    """How long ago the worker asked for a job that did so last; None without one."""
    added_per_s: float | None = None
    """Since the snapshot before; None in the first one."""
    done_per_s: float | None = None
    """Jobs that ended or were removed, per second: what was added less what there is more of now."""
    problem: str | None = None
    """Why the queue could not be read."""

    @property
    def ready(self) -> int:
        """Jobs that a free worker could take."""
        return self.waiting + self.prioritized

    @property
    def unfinished(self) -> int:
        return self.ready + self.delayed + self.waiting_children + self.active

    def to_json(self) -> dict[str, Any]:
        return {
            "queue": self.queue,
            "waiting": self.waiting,
            "prioritized": self.prioritized,
            "delayed": self.delayed,
            "waitingChildren": self.waiting_children,
            "active": self.active,
            "completed": self.completed,
            "failed": self.failed,
            "deadLetters": self.dead_letters,
            "cancelled": self.cancelled,
            "lanesHeld": self.lanes_held,
            "jobsHeld": self.jobs_held,
            "paused": self.paused,
            "oldestMs": self.oldest_ms,
            "workers": self.workers,
            "addedPerSecond": self.added_per_s,
            "donePerSecond": self.done_per_s,
            **({} if self.problem is None else {"problem": self.problem}),
        }


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All queues at one moment."""

    at_ms: int
    """By the server's clock."""
    taken_at: float
    """By the monotonic clock of this process."""
    looks: tuple[QueueSnapshot, ...]


class Overview:
    """Takes snapshots of queues: of the named ones, else of all under the prefix."""

    def __init__(self, connection: Connection, prefix: str, names: Sequence[str] = ()) -> None:
        names = check_texts("names", names)
        self._connection = connection
        self._prefix = prefix
        self._is_named = bool(names)
        self._keys = [QueueKeys(prefix, name) for name in dict.fromkeys(names)]
        self._search_at = self._count_at = 0.0
        self.is_complete = self._is_named
        """Whether it is known which queues there are."""
        self._workers: dict[str, list[int]] | None = {}
        """Of each queue, for how many seconds each worker has not asked for anything."""
        self._before: Snapshot | None = None

    @property
    def search_due_s(self) -> float | None:
        """Seconds until the next search for new queues; None when they were named."""
        return None if self._is_named else max(0.0, self._search_at - time.monotonic())

    async def search(self) -> None:
        """Find all queues. Walks over all keys in short steps; with millions of keys that
        takes seconds, so snapshots are taken in the meantime and this is done rarely."""
        began = time.monotonic()
        try:
            names = await find_queues(self._connection, self._prefix)
        finally:
            self._search_at = _next_time(began, _SEARCH_EVERY_S)
        known = set(names)
        # A dead-letter queue is a number beside the queue it belongs to, unless that one is gone.
        shown = [name for name in names if not (name.endswith("-dlq") and name.removesuffix("-dlq") in known)]
        self._keys = [QueueKeys(self._prefix, name) for name in shown]
        self.is_complete = True

    async def read(self) -> Snapshot:
        """Take a snapshot now. Raises ConnectionLost while the server is unreachable."""
        await self._connection.locate()
        await self._count_workers()
        looks: dict[str, QueueSnapshot] = {}
        wanted, at_ms = self._keys, 0  # a search may end meanwhile
        for group in grouped_by_place(self._connection, wanted):
            at_ms, found = await self._read_group(group)
            looks |= found
        if not wanted:
            at_ms = _ms(await self._connection.shared_door(f"{self._prefix}:").call("TIME"))
        ordered = tuple(looks[keys.name] for keys in wanted)
        picture = _with_rates(Snapshot(at_ms, time.monotonic(), ordered), self._before)
        self._before = picture
        return picture

    async def _read_group(self, group: Sequence[QueueKeys]) -> tuple[int, dict[str, QueueSnapshot]]:
        """Queues that one server holds, in two writes."""
        door = self._connection.shared_door(group[0].base)
        replies = await door.call_many([command for keys in group for command in _counts(keys)])
        size = len(replies) // len(group)
        parts = [replies[first : first + size] for first in range(0, len(replies), size)]
        heads = [[head for head in part[-4:-1] if isinstance(head, bytes | list) and head] for part in parts]
        asked = [
            ("HMGET", keys.base.encode() + (head[0] if isinstance(head, list) else head), "timestamp", "delay")
            for keys, queue_heads in zip(group, heads, strict=True)
            for head in queue_heads
        ]
        lanes = [part[_LANES] if isinstance(part[_LANES], list) else [] for part in parts]
        in_lanes = [
            ("ZCARD", keys.held("").encode() + lane) for keys, names in zip(group, lanes, strict=True) for lane in names
        ]
        now, *further = await door.call_many([("TIME",), *asked, *in_lanes])
        if isinstance(now, Exception):
            raise now
        at_ms, answers, held = _ms(now), iter(further[: len(asked)]), iter(further[len(asked) :])
        return at_ms, {
            keys.name: self._snapshot(
                keys,
                part,
                _oldest(at_ms, [next(answers) for _ in queue_heads], part[-1]),
                sum(count for count in [next(held) for _ in names] if isinstance(count, int)),
            )
            for keys, part, queue_heads, names in zip(group, parts, heads, lanes, strict=True)
        }

    def _snapshot(self, keys: QueueKeys, replies: list[Any], oldest_ms: int | None, jobs_held: int) -> QueueSnapshot:
        # A key of ours that holds something else hides no queue.
        needed = [reply for number, reply in enumerate(replies) if number not in (_LANE_COUNT, _LANES)]
        if (problem := next((reply for reply in needed if isinstance(reply, Exception)), None)) is not None:
            return QueueSnapshot(keys.name, problem=str(problem))
        added, paused, wait, held, active, prioritized, delayed, children, completed, failed, dead = replies[:11]
        lanes_held = replies[_LANE_COUNT]
        return QueueSnapshot(
            keys.name,
            waiting=wait + held,
            prioritized=prioritized,
            delayed=delayed,
            waiting_children=children,
            active=active,
            completed=completed,
            failed=failed,
            dead_letters=dead,
            cancelled=read_int(replies[_CANCELLED] or b"0"),
            lanes_held=lanes_held if isinstance(lanes_held, int) else 0,
            jobs_held=jobs_held,
            paused=bool(paused),
            added=read_int(added or b"0"),
            oldest_ms=oldest_ms,
            workers=None if self._workers is None else len(self._workers.get(keys.name, ())),
            worker_idle_s=min(self._workers.get(keys.name, ()), default=None) if self._workers else None,
        )

    async def _count_workers(self) -> None:
        if self._workers is None or time.monotonic() < self._count_at:
            return
        began = time.monotonic()
        try:
            async with self._connection.every_primary() as doors:
                lists = [await door.call("CLIENT", "LIST", "TYPE", "NORMAL") for door in doors]
        except ServerRefused:  # managed servers forbid it: then we cannot tell, and do not ask again
            self._workers = None
            return
        self._workers = _workers_by_queue(self._prefix, lists)
        self._count_at = _next_time(began, _COUNT_WORKERS_EVERY_S)


def _next_time(began: float, at_least_s: float) -> float:
    now = time.monotonic()
    return now + max(at_least_s, _REST_AFTER_COSTLY * (now - began))


def grouped_by_place(connection: Connection, keys: Iterable[QueueKeys]) -> Iterable[list[QueueKeys]]:
    """Queues that one connection reaches, in portions that one write can carry."""
    places: dict[object, list[QueueKeys]] = {}
    for each in keys:
        places.setdefault(connection.place(each.base), []).append(each)
    for together in places.values():
        for first in range(0, len(together), _QUEUES_PER_CALL):
            yield together[first : first + _QUEUES_PER_CALL]


def _counts(keys: QueueKeys) -> list[tuple[str | bytes | int, ...]]:
    """Numbers first, then the heads of the lines, whose age is asked afterwards. All of constant cost."""
    return [
        ("GET", keys.id),
        ("HEXISTS", keys.meta, "paused"),
        *(("LLEN", key) for key in (keys.wait, keys.paused, keys.active)),
        *(("ZCARD", key) for key in (keys.prioritized, keys.delayed, keys.waiting_children)),
        *(("ZCARD", key) for key in (keys.completed, keys.failed)),
        ("LLEN", f"{keys.prefix}:{keys.name}-dlq:wait"),
        ("HGET", keys.meta, "bpcancelled"),
        ("ZCARD", keys.lanes("held")),
        ("ZRANGE", keys.lanes("held"), 0, _MOST_LANES - 1),
        ("LINDEX", keys.wait, -1),
        ("LINDEX", keys.paused, -1),
        ("ZRANGE", keys.prioritized, 0, 0),
        ("ZRANGE", keys.delayed, 0, 0, "WITHSCORES"),
    ]


def _oldest(at_ms: int, answers: list[Any], delayed: Any) -> int | None:
    """Workers queue delayed jobs when they are due: without a worker one that is due waits where it is."""
    first_due = [read_score(delayed[1]) // _SCORE_PER_MS] if isinstance(delayed, list) and delayed else []
    since = [due_ms for due_ms in first_due if due_ms <= at_ms] + [
        read_int(answer[0]) + read_int(answer[1] or b"0")
        for answer in answers
        if isinstance(answer, list) and answer[0] is not None  # else the job was taken and removed meanwhile
    ]
    return max(0, at_ms - min(since)) if since else None


def _with_rates(picture: Snapshot, before: Snapshot | None) -> Snapshot:
    """Rates need no counter that anybody must keep: jobs that were added and are not unfinished have left."""
    if before is None or (seconds := picture.taken_at - before.taken_at) <= 0:
        return picture
    earlier = {look.queue: look for look in before.looks if look.problem is None}
    return Snapshot(
        picture.at_ms,
        picture.taken_at,
        tuple(_with_rate(look, earlier.get(look.queue), seconds) for look in picture.looks),
    )


def _with_rate(look: QueueSnapshot, before: QueueSnapshot | None, seconds: float) -> QueueSnapshot:
    if before is None or look.problem is not None or look.added < before.added:  # the last: it was deleted meanwhile
        return look
    added = look.added - before.added
    done = max(0, added - (look.unfinished - before.unfinished))  # below 0: failed jobs were put back in line
    return replace(look, added_per_s=round(added / seconds, 2), done_per_s=round(done / seconds, 2))


@dataclass(frozen=True, slots=True)
class ConnectedWorker:
    """A worker of any client, seen through its connection to the server."""

    queue: str
    name: str
    """Empty for workers without a name."""
    address: str
    age_s: int
    idle_s: int
    library: str
    """What the client says of itself, if it does."""


async def workers_by_queue(connection: Connection, prefix: str) -> list[ConnectedWorker] | None:
    """All workers of all queues, from one list of clients per server; None when the server refuses it."""
    try:
        async with connection.every_primary() as doors:
            lists = [await door.call("CLIENT", "LIST", "TYPE", "NORMAL") for door in doors]
    except ServerRefused:
        return None
    return sorted(_workers(prefix, lists), key=lambda each: (each.queue, each.name, each.address))


def _workers(prefix: str, lists: Iterable[bytes]) -> Iterable[ConnectedWorker]:
    """Workers put their queue into the name of their connection: `prefix:base64(queue)`, perhaps with `:w:name`."""
    for raw in lists:
        for line in raw.decode("utf-8", "replace").splitlines():
            fields = dict(part.partition("=")[::2] for part in line.split(" "))
            name = fields.get("name", "")
            if not name.startswith(f"{prefix}:"):
                continue
            encoded, _, rest = name[len(prefix) + 1 :].partition(":")
            if rest and not rest.startswith("w:"):
                continue  # a reader of events, or another helper of a queue
            try:
                queue = base64.b64decode(encoded, validate=True).decode()
            except ValueError:  # somebody else's name under our prefix
                continue
            yield ConnectedWorker(
                queue,
                rest.removeprefix("w:"),
                fields.get("addr", ""),
                read_int(fields.get("age", "0")),
                read_int(fields.get("idle", "0")),
                " ".join(part for part in (fields.get("lib-name", ""), fields.get("lib-ver", "")) if part),
            )


def _workers_by_queue(prefix: str, lists: Iterable[bytes]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for each in _workers(prefix, lists):
        found.setdefault(each.queue, []).append(each.idle_s)
    return found


def _ms(reply: list[bytes]) -> int:
    return int(reply[0]) * 1000 + int(reply[1]) // 1000
