"""What an examination asks of the queues of a server: each answer is asked for once, and for all queues where that is
possible.

In: queues. Out: counts, workers, the first jobs of each state. Elsewhere: what is concluded from it (`doctor`,
`symptoms`).
"""

from __future__ import annotations

import time
from typing import Final, NamedTuple

from bullpen.errors import NotJson, ServerRefused
from bullpen.queue import JobCounts, JobState, Queue, WorkerInfo
from bullpen.queue.browse import workers_in
from bullpen.queue.orphans import find_orphans, sample_jobs
from bullpen.queue.places import lines_of
from bullpen.redis import Connection
from bullpen.wire.records import JobRecord

__all__ = ["QueueFacts", "Sampled", "ServerFacts", "is_readable"]

SAMPLE: Final = 100
_LONG_BYTES: Final = 256 * 1024
"""Longer data is read by itself: a hundred of such jobs are too much for one answer."""
_WHY: Final = {b"gone": "no hash", b"name": "its hash has no name", b"type": "its key is not a hash"}
_FIELDS: Final = (b"name", b"data", b"timestamp", b"delay", b"opts")
_OF_STATE: Final = {
    JobState.WAITING: "waiting",
    JobState.PRIORITIZED: "prioritized",
    JobState.DELAYED: "delayed",
}


class Sampled(NamedTuple):
    """One of the first ids of a state."""

    job_id: str
    record: JobRecord | None
    why: str
    """Why there is no job, else empty."""


class ServerFacts:
    """What all queues of a connection have in common."""

    def __init__(self, connection: Connection, prefix: str, names: list[str]) -> None:
        self._connection, self._prefix, self._names = connection, prefix, names
        self._clients: dict[object, bytes | None] = {}
        self._times: dict[object, tuple[int, float]] = {}
        self._met: dict[str, list[str]] | None = None

    async def clients(self, base: str) -> bytes | None:
        """CLIENT LIST of the server that has this queue; None where it is not allowed."""
        place = self._connection.place(base)
        if place not in self._clients:
            try:
                self._clients[place] = await self._connection.shared_door(base).call("CLIENT", "LIST")
            except ServerRefused:
                self._clients[place] = None
        return self._clients[place]

    async def now_ms(self, base: str) -> int:
        place = self._connection.place(base)
        if place not in self._times:
            seconds, micros = await self._connection.shared_door(base).call("TIME")
            self._times[place] = int(seconds) * 1000 + int(micros) // 1000, time.monotonic()
        at_ms, asked_at = self._times[place]
        return at_ms + int((time.monotonic() - asked_at) * 1000)

    async def met(self, name: str) -> list[str]:
        """Jobs of a queue that a scan has met."""
        if self._met is None:
            self._met = await sample_jobs(self._connection, self._prefix, self._names, count=SAMPLE)
        return self._met[name]


class QueueFacts:
    """Of one queue. Asked by name as a `Queue` is, where both are of use."""

    def __init__(self, queue: Queue, server: ServerFacts) -> None:
        self.queue, self._server = queue, server
        self._counts: JobCounts | None = None
        self._meta: dict[str, str] | None = None
        self._samples: dict[JobState, list[Sampled]] = {}

    @property
    def name(self) -> str:
        return self.queue.name

    async def counts(self) -> JobCounts:
        if self._counts is None:
            self._counts = await self.queue.counts()
        return self._counts

    async def meta(self) -> dict[str, str]:
        if self._meta is None:
            self._meta = await self.queue.meta()
        return self._meta

    async def is_paused(self) -> bool:
        return "paused" in await self.meta()

    async def workers(self) -> list[WorkerInfo] | None:
        listed = await self._server.clients(self.queue.keys.base)
        return None if listed is None else workers_in(listed, self.queue.keys)

    async def first(self, state: JobState) -> list[Sampled]:
        """The first jobs of a state that can run, next to run first, and ids with no job behind them."""
        if state not in self._samples:
            is_empty = not getattr(await self.counts(), _OF_STATE[state])
            self._samples[state] = [] if is_empty else await self._sample(state)
        return self._samples[state]

    async def _sample(self, state: JobState) -> list[Sampled]:
        actions, keys, found = self.queue._ready(), self.queue.keys, list[Sampled]()
        for line in lines_of(keys, state):
            ids = await line.page(actions, 0, SAMPLE, newest_first=False)
            if not ids:
                continue
            replies = await actions.evaluate("read_sample", [keys.meta], [keys.base, _LONG_BYTES, *ids])
            for raw_id, reply in zip(ids, replies, strict=True):
                job_id = raw_id.decode("utf-8", "surrogateescape")
                if isinstance(reply, bytes):
                    found.append(Sampled(job_id, None, _WHY[reply]))
                    continue
                fields = dict(zip(_FIELDS, reply, strict=True))
                if fields[b"data"] is None:  # too long, or none
                    fields[b"data"] = await actions.command("HGET", keys.job(job_id), "data")
                found.append(Sampled(job_id, JobRecord(job_id, fields), ""))
        return found

    async def oldest_age_ms(self) -> int | None:
        """How long ago the older of the next jobs in line could first have run; None when no job waits."""
        due = [
            record.due_ms
            for state in (JobState.WAITING, JobState.PRIORITIZED)
            for record in [each.record for each in await self.first(state) if each.record is not None][:1]
        ]
        return max(0, await self._server.now_ms(self.queue.keys.base) - min(due)) if due else None

    async def orphans(self) -> list[str]:
        met = await self._server.met(self.name)
        listed = {each.job_id for sample in self._samples.values() for each in sample}
        rest = [job_id for job_id in met if job_id not in listed]
        return await find_orphans(self.queue._ready(), self.queue.keys, count=SAMPLE, met=rest) if rest else []


def is_readable(record: JobRecord) -> bool:
    """Whether a worker can read its data."""
    try:
        _ = record.data
    except NotJson:
        return False
    return True
