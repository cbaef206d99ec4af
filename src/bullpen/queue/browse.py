"""Read what is stored: queues, jobs page by page, children, metrics, workers.

In: a connection or a queue. Out: names, jobs, records. Nothing is changed, and what is read is a moment's view: jobs
move meanwhile. No call makes the server work longer when more jobs are stored: millions are read in pages.
Elsewhere: one job by its id and counts (`queue`), schedulers (`schedulers`), dead letters
(`bullpen.queue.dead_letters.operations`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Literal

from bullpen._kernel.duration import check_int
from bullpen._kernel.ids import check_queue_name
from bullpen.errors import InvalidOption, JobNotFound, ServerRefused
from bullpen.queue.actions import QueueActions, is_wrong_type
from bullpen.queue.base import QueuePart, id_of, literally
from bullpen.queue.children import PARTS, Children, ChildrenCounts, read_part
from bullpen.queue.job import Job
from bullpen.queue.places import lines_of
from bullpen.queue.states import JobState
from bullpen.redis.client import Connection, Door
from bullpen.wire.keys import QueueKeys, client_name
from bullpen.wire.options import MAX_PRIORITY, to_epoch_ms
from bullpen.wire.records import JobRecord, read_int

__all__ = [
    "Browsing",
    "Children",
    "ChildrenCounts",
    "LogPage",
    "Metrics",
    "WorkerInfo",
    "find_queues",
    "list_jobs",
    "workers_in",
]

_SCAN_COUNT: Final = 1_000
_HASHES_PER_PAGE: Final = 100
"""Hashes carry payloads: a page of them must fit in memory and in the deadline of one call."""
_STORED_STATES: Final = tuple(state for state in JobState if state is not JobState.UNKNOWN)


_SCORE_PER_MS: Final = 4_096
_IN_LINE = (JobState.WAITING, JobState.PRIORITIZED)


@dataclass(frozen=True, slots=True)
class Metrics:
    """How many jobs finished per minute, as workers with `metrics_minutes` count them."""

    count: int
    """All since counting began."""
    points: tuple[int, ...]
    """Per closed minute, newest first. A minute is closed when a job finishes in a later one."""
    points_stored: int
    """How many points there are in all."""
    previous_ms: int
    """When the newest point was written."""
    previous_count: int
    """What `count` was then."""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker of any client, or another one who uses the queue, seen through its connection to the server."""

    name: str
    """Empty for workers without a name."""
    address: str
    age_s: int
    idle_s: int
    fields: dict[str, str] = field(repr=False)
    """All that the server reports about the connection."""


@dataclass(frozen=True, slots=True)
class LogPage:
    """Some lines of a job's log."""

    lines: tuple[str, ...]
    total: int
    """How many lines there are in all."""


async def _server_now_ms(actions: QueueActions) -> int:
    """The server's clock now."""
    seconds, micros = await actions.command("TIME")
    return int(seconds) * 1000 + int(micros) // 1000


class Browsing(QueuePart):
    """The reads of a `Queue`."""

    async def jobs(
        self,
        states: JobState | Iterable[JobState] | None = None,
        *,
        start: int = 0,
        count: int = 20,
        newest_first: bool = False,
    ) -> list[Job]:
        """A page of the jobs in these states (all by default), which follow each other in the order given.

        Within a state the next to run, or the oldest finished, come first; `newest_first` turns that round. A job
        that moves between two pages may be met twice or not at all; `iter_jobs` is the way through all of them.
        """
        check_int("start", start, minimum=0)
        check_int("count", count, minimum=1)
        actions, keys = self._ready(), self._keys
        lines = [line for state in _check_states(states) for line in lines_of(keys, state)]
        lengths = await actions.commands([(line.length, line.key) for line in lines])
        found: list[Job] = []
        for line, length in zip(lines, lengths, strict=True):
            while start < length and len(found) < count:
                wanted = min(length - start, count - len(found))
                ids = await line.page(actions, start, wanted, newest_first=newest_first)
                # An id whose job is gone leaves room for one more.
                found += [job for job in await _read(actions, keys, ids) if job is not None]
                start += wanted
            start = max(0, start - length)
        return found

    async def job_ids(
        self,
        states: JobState | Iterable[JobState] | None = None,
        *,
        start: int = 0,
        count: int = 100,
        newest_first: bool = False,
    ) -> list[str]:
        """As `jobs`, but only their ids: the server reads no hashes. An id may be of a job that is gone."""
        check_int("start", start, minimum=0)
        check_int("count", count, minimum=1)
        actions, found = self._ready(), list[bytes]()
        lines = [line for state in _check_states(states) for line in lines_of(self._keys, state)]
        lengths = await actions.commands([(line.length, line.key) for line in lines])
        for line, length in zip(lines, lengths, strict=True):
            if start < length and len(found) < count:
                wanted = min(length - start, count - len(found))
                found += await line.page(actions, start, wanted, newest_first=newest_first)
            start = max(0, start - length)
        return [raw.decode("utf-8", "surrogateescape") for raw in found]

    async def iter_jobs(
        self, states: JobState | Iterable[JobState] | None = None, *, newest_first: bool = False
    ) -> AsyncIterator[Job]:
        """All jobs in these states, read in pages, however many there are.

        Removing jobs on the way, or workers that take them, make it pass over nothing that stays where it is. A job
        that changes its state meanwhile may be met in both or in neither.
        """
        actions, keys = self._ready(), self._keys
        for state in _check_states(states):
            for line in lines_of(keys, state):
                async for ids in line.walk(actions, keys.base, newest_first=newest_first):
                    for first in range(0, len(ids), _HASHES_PER_PAGE):
                        for job in await _read(actions, keys, ids[first : first + _HASHES_PER_PAGE]):
                            if job is not None:
                                yield job

    async def logs(self, job: str | Job, *, start: int = 0, count: int = 100, newest_first: bool = False) -> LogPage:
        """A page of a job's log: lines from `start` on, oldest first, or with `newest_first` counted from the end."""
        actions, job_id = self._ready(), id_of(job)
        lines = await actions.read_logs(job_id, start, count, newest_first=newest_first)
        return LogPage(tuple(lines), int(await actions.command("LLEN", self._keys.logs(job_id))))

    async def count_delayed(self, *, before: datetime | None = None) -> int:
        """How many jobs are delayed; with `before`, how many of them are due before that instant."""
        if before is None:
            return int(await self._ready().command("ZCARD", self._keys.delayed))
        bound = f"({to_epoch_ms('before', before) * _SCORE_PER_MS}"
        return int(await self._ready().command("ZCOUNT", self._keys.delayed, "-inf", bound))

    async def is_maxed(self) -> bool:
        """Whether as many jobs run now as the queue's global concurrency allows. False where there is no such limit."""
        limit, active = await self._ready().commands(
            [("HGET", self._keys.meta, "concurrency"), ("LLEN", self._keys.active)]
        )
        return limit is not None and active >= read_int(limit) > 0

    async def meta(self) -> dict[str, str]:
        """What clients wrote about the queue itself: `version` (the library that wrote last), limits, `paused`."""
        flat = await self._ready().command("HGETALL", self._keys.meta)
        texts = [part.decode("utf-8", "replace") for part in flat]
        return dict(zip(texts[::2], texts[1::2], strict=True))

    async def unlocked(self, *, count: int = 100) -> list[str]:
        """Ids of active jobs whose lock has expired, among the first `count`; a stalled check returns them to the
        queue."""
        check_int("count", count, minimum=1)
        actions, keys = self._ready(), self._keys
        ids: list[bytes] = await actions.command("LRANGE", keys.active, -count, -1)
        base = keys.base.encode()
        held = await actions.command("MGET", *(base + raw + b":lock" for raw in ids)) if ids else []
        free = [raw for raw, token in zip(ids[::-1], held[::-1], strict=True) if token is None]
        there = await actions.commands([("EXISTS", base + raw) for raw in free]) if free else []
        return [raw.decode("utf-8", "surrogateescape") for raw, is_job in zip(free, there, strict=True) if is_job]

    async def ids_without_job(self, *, count: int = 100) -> dict[str, str]:
        """Waiting ids without a stored job, among the first `count` of each state that can run; and what
        is wrong with each. Workers drop them. They come from deleting by hand, eviction, and foreign programs."""
        check_int("count", count, minimum=1)
        actions, base, found = self._ready(), self._keys.base.encode(), dict[str, str]()
        for state in (JobState.WAITING, JobState.PRIORITIZED, JobState.DELAYED):
            for line in lines_of(self._keys, state):
                ids = await line.page(actions, 0, count, newest_first=False)
                if not ids:
                    continue
                names = await actions.commands([("HMGET", base + raw, "name") for raw in ids], or_none=is_wrong_type)
                there = await actions.commands([("EXISTS", base + raw) for raw in ids])
                for raw, name, is_there in zip(ids, names, there, strict=True):
                    if name is None or name[0] is None:
                        why = (
                            "its key is not a hash"
                            if name is None
                            else "its hash has no name"
                            if is_there
                            else "no hash"
                        )
                        found[raw.decode("utf-8", "replace")] = why
        return {job_id: why for job_id, why in found.items() if not job_id.startswith("0:")}  # a marker of old clients

    async def oldest_age_ms(self) -> int | None:
        """How long ago the older of the next waiting jobs could first have run, by the server's clock; None when no
        job waits. A retried job counts from its creation."""
        next_in_line = [job for state in _IN_LINE for job in await self.jobs(state, count=1)]
        if not next_in_line:
            return None
        now_ms = await _server_now_ms(self._ready())
        return max(0, now_ms - min(job.record.due_ms for job in next_in_line))

    async def counts_per_priority(self, priorities: Iterable[int] | None = None) -> dict[int, int]:
        """How many jobs wait with each priority; without arguments, with each that has any. 0 is none."""
        actions, keys = self._ready(), self._keys
        wanted = None if priorities is None else list(priorities)
        for priority in wanted or ():
            check_int("priorities", priority, minimum=0, maximum=MAX_PRIORITY)
        counts: dict[int, int] = {}
        if wanted is None or 0 in wanted:
            counts[0] = sum(await actions.commands([("LLEN", keys.wait), ("LLEN", keys.paused)]))
        if wanted is not None:
            classes = sorted(set(wanted) - {0})
            replies = await actions.commands(
                [("ZCOUNT", keys.prioritized, p << 32, ((p + 1) << 32) - 1) for p in classes]
            )
            return counts | dict(zip(classes, replies, strict=True))
        if not counts[0]:
            counts.clear()
        after: int | str = ""
        while flat := await actions.evaluate("count_priorities", [keys.prioritized], [after]):
            counts.update(zip(flat[::2], flat[1::2], strict=True))
            after = flat[-2]
        return counts

    async def children_counts(self, job: str | Job) -> ChildrenCounts:
        """How many children a job has, by condition; all 0 for a job without any. Raises JobNotFound."""
        return await self._ready().count_children(id_of(job))

    async def children(self, job: str | Job) -> Children:
        """The children of a job and their results, read in pages. Raises JobNotFound."""
        job_id, actions, keys = id_of(job), self._ready(), self._keys
        if not await actions.command("EXISTS", keys.job(job_id)):
            raise JobNotFound(keys.name, job_id)
        read = {
            kind: part.read(actions.open_children(kind, await read_part(actions, keys.job(job_id), kind)))
            for kind, part in PARTS.items()
        }
        return Children(
            processed=read["processed"],
            pending=tuple(sorted(read["pending"])),
            ignored=read["ignored"],
            failed=tuple(sorted(read["failed"])),
        )

    async def metrics(
        self, kind: Literal["completed", "failed"] = "completed", *, start: int = 0, count: int = 60
    ) -> Metrics:
        """How many jobs completed or failed per minute, from the newest closed minute on."""
        if kind not in ("completed", "failed"):
            raise InvalidOption("kind", "'completed' or 'failed'", kind)
        check_int("start", start, minimum=0)
        check_int("count", count, minimum=1)
        key: str = getattr(self._keys, f"metrics_{kind}")
        data_key: str = getattr(self._keys, f"metrics_{kind}_data")
        totals, points, stored = await self._ready().commands(
            [
                ("HMGET", key, "count", "prevTS", "prevCount"),
                ("LRANGE", data_key, start, start + count - 1),
                ("LLEN", data_key),
            ]
        )
        total, previous_ms, previous_count = (read_int(raw or b"0") for raw in totals)
        return Metrics(total, tuple(read_int(raw) for raw in points), stored, previous_ms, previous_count)

    async def workers(self) -> list[WorkerInfo] | None:
        """Workers of any client that are connected to this queue now; None when the server refuses CLIENT LIST.

        Managed servers may forbid it: "unknown" is an answer then, not a failure.
        """
        listed = await self._client_list()
        return None if listed is None else workers_in(listed, self._keys)

    async def listeners(self) -> list[WorkerInfo] | None:
        """Readers of this queue's events (`QueueEvents` of any client) that are connected now; None when the server
        refuses CLIENT LIST. They have no names."""
        listener, listed = client_name(self._keys.prefix, self._keys.name) + ":qe", await self._client_list()
        return None if listed is None else _clients_in(listed, lambda name: name == listener, len(listener))

    async def _client_list(self) -> bytes | None:
        try:
            listed: bytes = await self._ready().command("CLIENT", "LIST")
        except ServerRefused:
            return None
        return listed


def workers_in(listed: bytes, keys: QueueKeys) -> list[WorkerInfo]:
    """Of the answer to CLIENT LIST those that work on this queue."""
    unnamed = client_name(keys.prefix, keys.name)
    return _clients_in(listed, lambda name: name == unnamed or name.startswith(f"{unnamed}:w:"), len(unnamed) + 3)


def _clients_in(listed: bytes, is_meant: Callable[[str], bool], name_from: int) -> list[WorkerInfo]:
    found = []
    for line in listed.decode("utf-8", "replace").splitlines():
        fields = dict(part.partition("=")[::2] for part in line.split(" "))
        connection_name = fields.get("name", "")
        if is_meant(connection_name):
            found.append(
                WorkerInfo(
                    name=connection_name[name_from:],
                    address=fields.get("addr", ""),
                    age_s=read_int(fields.get("age", "0")),
                    idle_s=read_int(fields.get("idle", "0")),
                    fields=fields,
                )
            )
    return sorted(found, key=lambda client: (client.name, client.address))


async def find_queues(connection: Connection, prefix: str) -> list[str]:
    """Names of all queues under a prefix that this user may read, sorted. Walks over all keys of the server, or of
    every primary of a cluster, in short steps."""
    pattern = f"{literally(prefix)}:*:meta"
    found: set[str] = set()
    async with connection.every_primary() as doors:
        for door in doors:
            cursor = None
            while cursor != b"0":
                cursor, keys = await door.call(
                    "SCAN", cursor or b"0", "MATCH", pattern, "COUNT", _SCAN_COUNT, "TYPE", "hash"
                )
                names = {key.decode("utf-8", "replace")[len(prefix) + 1 : -len(":meta")]: key for key in keys}
                mine = {name: key for name, key in names.items() if name not in found and _may_be_queue(name)}
                found.update(await _readable(door, mine))
    return sorted(found)


async def _readable(door: Door, names: dict[str, bytes]) -> list[str]:
    """SCAN shows all keys, also to a user with few rights, and one foreign queue must not break a list."""
    answers = await door.call_many([("EXISTS", key) for key in names.values()]) if names else []
    return [name for name, answer in zip(names, answers, strict=True) if not _is_forbidden(answer)]


def _is_forbidden(answer: Any) -> bool:
    return isinstance(answer, ServerRefused) and "NOPERM" in str(answer)


def _may_be_queue(name: str) -> bool:
    """False for foreign keys that only resemble those of a queue: with a colon they belong to a job, and a name that
    cannot be opened must not prevent the list of all others."""
    try:
        return bool(check_queue_name(name))
    except InvalidOption:
        return False


async def list_jobs(queue: Browsing, state: JobState, *, start: int = 0, count: int = 20) -> list[Job]:
    """Jobs in a state, from position `start`: those that run next first; of finished ones the newest first."""
    is_finished = state in (JobState.COMPLETED, JobState.FAILED)
    return await queue.jobs(state, start=start, count=count, newest_first=is_finished)


# ---- reading pages -----------------------------------------------------------------------------------------------


def _check_states(states: JobState | Iterable[JobState] | None) -> tuple[JobState, ...]:
    if states is None:
        return _STORED_STATES
    given: tuple[Any, ...] = (states,) if isinstance(states, str) else tuple(states)
    try:
        checked = tuple(dict.fromkeys(JobState(state) for state in given))
    except ValueError:
        checked = ()
    if not checked or JobState.UNKNOWN in checked:
        raise InvalidOption("states", "states in which jobs are kept", states)
    return checked


async def _read(actions: QueueActions, keys: QueueKeys, ids: list[bytes]) -> list[Job | None]:
    """The jobs of these ids; None for those that were removed in between, or whose key is not a hash."""
    base = keys.base.encode()
    jobs: list[Job | None] = []
    for first in range(0, len(ids), _HASHES_PER_PAGE):
        page = ids[first : first + _HASHES_PER_PAGE]
        hashes = await actions.commands([("HGETALL", base + raw) for raw in page], or_none=is_wrong_type)
        for raw_id, flat in zip(page, hashes, strict=True):
            job_id = raw_id.decode("utf-8", "surrogateescape")
            jobs.append(Job(actions, JobRecord.parse(job_id, flat)) if flat else None)
    return jobs


# ---- decoding -------------------------------------------------------------------------------------------------


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")
