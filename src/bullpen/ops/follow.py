"""Follow what happens in queues: events with the names of their jobs, filtered, from now or from an earlier instant.

In: queues and what is wanted of them. Out: an async iterator that continues over restarts of the server and reports
where events are missing; the outcome of awaited jobs; the lines of a job's log as they are written. Names are not part
of events, so they are looked up page by page and remembered. Elsewhere: the stream itself (`bullpen.queue.events`), how
it is shown (`bullpen.cli.follow`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from bullpen._kernel.duration import check_texts
from bullpen.errors import JobNotFound
from bullpen.queue import JobState, Queue
from bullpen.queue.events import QueueEvents
from bullpen.wire.events import QueueEvent

__all__ = ["Followed", "Happening", "Outcome", "Waited", "Wanted", "follow", "follow_logs", "position_at"]

_NAMES_REMEMBERED: Final = 10_000
_BUFFERED: Final = 1_000
_LOG_LOOK_S: Final = 0.5
_BEFORE_NEXT_MS: Final = (1 << 64) - 1
"""The greatest sequence number of an entry id: what comes after is the next millisecond."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which events; empty means all."""

    events: Collection[str] = ()
    jobs: Collection[str] = ()
    names: Collection[str] = ()

    def __post_init__(self) -> None:
        for name in ("events", "jobs", "names"):
            check_texts(name, getattr(self, name))


@dataclass(frozen=True, slots=True)
class Happening:
    """One event; or, when `event` is None, a hint that events before this point were trimmed unread."""

    queue: str
    event: QueueEvent | None
    name: str | None = None
    """Name of the job, if it could still be found out."""

    def to_json(self) -> dict[str, Any]:
        if self.event is None:
            return {"queue": self.queue, "event": "bullpen:gap"}
        named = {} if self.name is None else {"name": self.name}
        fields = self.event.to_json()
        fields.get("data", {}).pop("name", None)
        if fields.get("data") == {}:
            del fields["data"]
        return {"queue": self.queue, "entry": self.event.id, **fields, **named}


def position_at(epoch_ms: int) -> str:
    """The position from which reading begins with the first event at that instant or later."""
    return "0-0" if epoch_ms <= 0 else f"{epoch_ms - 1}-{_BEFORE_NEXT_MS}"


@asynccontextmanager
async def follow(queues: Iterable[Queue], wanted: Wanted, *, after: str | None = None) -> AsyncIterator[Followed]:
    """Follow queues. When the block is entered, the position is fixed: what happens from then on is seen."""
    streams = [_Stream(queue, wanted, after) for queue in queues]
    followed = Followed()
    tasks: list[asyncio.Task[None]] = []
    try:
        for stream in streams:
            await stream.start()
        tasks = [asyncio.create_task(followed.read(stream), name=f"follow {stream.name}") for stream in streams]
        yield followed
    finally:
        for stream in streams:
            stream.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Followed:
    """An async iterator of happenings from all queues, in the order in which they were read."""

    def __init__(self) -> None:
        self._arrived: asyncio.Queue[Happening | Exception] = asyncio.Queue(_BUFFERED)

    def __aiter__(self) -> AsyncIterator[Happening]:
        return self

    async def __anext__(self) -> Happening:
        arrived = await self._arrived.get()
        if isinstance(arrived, Exception):
            raise arrived
        return arrived

    async def read(self, stream: _Stream) -> None:
        try:
            while True:
                for happening in await stream.next():
                    await self._arrived.put(happening)  # waits for a slow reader, who then learns what was trimmed
        except Exception as error:  # noqa: BLE001 - it belongs to whoever iterates
            await self._arrived.put(error)


class _Stream:
    """The events of one queue, with names."""

    def __init__(self, queue: Queue, wanted: Wanted, after: str | None) -> None:
        self.name = queue.name
        self._queue = queue
        self._wanted = wanted
        self._events = QueueEvents(queue.name, connection=queue.connection, prefix=queue.keys.prefix, after=after)
        self._is_first_of_the_past = after is not None
        self._names: dict[str, str | None] = {}

    async def start(self) -> None:
        await self._events.__aenter__()  # fixes the position

    def close(self) -> None:
        self._events.close()

    async def next(self) -> list[Happening]:
        lost, events = await self._events.page()
        if self._is_first_of_the_past:
            # Whoever asks for the past gets what is kept of it; that it begins somewhere is no gap.
            lost, self._is_first_of_the_past = False, False
        wanted = self._wanted
        for event in events:
            if event.job_id is not None and "name" in event.data:
                self._remember(event.job_id, str(event.data["name"]))
        events = [
            event
            for event in events
            if (not wanted.events or event.event in wanted.events) and (not wanted.jobs or event.job_id in wanted.jobs)
        ]
        await self._fetch(event.job_id for event in events)
        found = [Happening(self.name, event, self._names.get(event.job_id or "")) for event in events]
        if wanted.names:
            found = [happening for happening in found if happening.name in wanted.names]
        return [Happening(self.name, None), *found] if lost else found

    async def _fetch(self, ids: Iterable[str | None]) -> None:
        unknown = [job_id for job_id in dict.fromkeys(ids) if job_id is not None and job_id not in self._names]
        if not unknown:
            return
        keys = self._queue.keys
        door = self._queue.connection.shared_door(keys.base)
        try:
            names = await door.call_many([("HGET", keys.job(job_id), "name") for job_id in unknown])
        except ConnectionError:
            return  # the events are here all the same; the stream waits for the server
        for job_id, name in zip(unknown, names, strict=True):
            self._remember(job_id, name.decode("utf-8", "replace") if isinstance(name, bytes) else None)

    def _remember(self, job_id: str, name: str | None) -> None:
        self._names.pop(job_id, None)
        self._names[job_id] = name
        if len(self._names) > _NAMES_REMEMBERED:
            del self._names[next(iter(self._names))]


# Waiting for jobs ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended."""

    is_good: bool
    value: Any
    """What it returned, or why it failed."""


class Waited:
    """Awaited jobs, followed by events and, where events may be missing, by their stored state."""

    def __init__(self, queue: Queue, ids: Iterable[str]) -> None:
        self._queue = queue
        self.open = set(check_texts("ids", ids))
        self.outcomes: dict[str, Outcome] = {}

    def note(self, event: QueueEvent) -> None:
        """An event has come."""
        if event.job_id in self.open and event.is_final:
            good = event.event == "completed"
            self._end(event.job_id, good, event.data.get("returnvalue" if good else "failedReason"))
        elif event.job_id in self.open and event.event == "removed":
            self._end(event.job_id, False, "it was removed")

    async def ask(self) -> dict[str, Outcome]:
        """Read the stored state: once after the start, and whenever events were lost. Returns what is new.

        Raises JobNotFound for a job that is gone without a trace.
        """
        asked = sorted(self.open)
        for job_id in asked:
            job = await self._queue.get_job(job_id)
            if job is None:
                await self._find_trace(job_id)
            elif (state := await job.state()) is JobState.COMPLETED:
                self._end(job_id, True, job.return_value)
            elif state is JobState.FAILED:
                self._end(job_id, False, job.failed_reason)
        return {job_id: self.outcomes[job_id] for job_id in asked if job_id in self.outcomes}

    async def _find_trace(self, job_id: str) -> None:
        """A job that removes itself when it ends leaves its last event."""
        keys = self._queue.keys
        door = self._queue.connection.shared_door(keys.base)
        end = "+"
        while entries := await door.call("XREVRANGE", keys.events, end, "-", "COUNT", 1_000):
            for entry_id, fields in entries:
                event = QueueEvent.parse(entry_id, fields)
                if event.job_id == job_id:
                    self.note(event)
                if job_id not in self.open:
                    return
            end = f"({entries[-1][0].decode()}"
        raise JobNotFound(keys.name, job_id)

    def _end(self, job_id: str, is_good: bool, value: Any) -> None:
        self.open.discard(job_id)
        self.outcomes[job_id] = Outcome(is_good, value)


# Logs ---------------------------------------------------------------------------------------------------------------


async def follow_logs(
    queue: Queue, job_id: str, *, on_end: Callable[[JobState], None] | None = None
) -> AsyncIterator[str]:
    """The lines of a job's log, those that are there and those that come, until the job has ended.

    No event reports a new line, so it polls twice a second; a poll costs one constant read while nothing
    new is there. Raises JobNotFound when there is no such job, or it is removed meanwhile.
    """
    keys = queue.keys
    door = queue.connection.shared_door(keys.base)
    known: list[bytes] = []
    while True:
        state = await queue.state_of(job_id)  # before the lines: a job that has ended writes no more
        try:
            length, last = await door.call_many([("LLEN", keys.logs(job_id)), ("LINDEX", keys.logs(job_id), -1)])
            if length != len(known) or (known and last != known[-1]):
                lines: list[bytes] = await door.call("LRANGE", keys.logs(job_id), 0, -1)
                for line in lines[_overlap(known, lines) :]:
                    yield line.decode("utf-8", "replace")
                known = lines
        except ConnectionError:
            await asyncio.sleep(door.reconnect_wait_s())
            continue
        if state is JobState.UNKNOWN:
            raise JobNotFound(queue.name, job_id)
        if state in (JobState.COMPLETED, JobState.FAILED):
            if on_end is not None:
                on_end(state)
            return
        await asyncio.sleep(_LOG_LOOK_S)


def _overlap(known: list[bytes], lines: list[bytes]) -> int:
    """How many of `lines` are known: the longest end of `known` that they begin with. Old lines may have been cut."""
    if lines[: len(known)] == known:
        return len(known)
    for start in range(1, len(known)):
        if lines[: len(known) - start] == known[start:]:
            return len(known) - start
    return 0
