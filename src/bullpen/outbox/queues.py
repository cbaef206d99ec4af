"""The queues of the queued strategy: one minimal job per row, and no second one while the first is alive.

In: claimed rows. Out: jobs whose id is the row's id, or the reason why not. A finished job that was kept does not block
its row's next one. A Redis that is away is noticed once and then probed, so that rows are not claimed in vain. Before a
process puts its first job into a queue, it announces the queue in Redis: workers of all processes begin to serve it.
Elsewhere: working on the jobs (`workers`), naming the queues (`routing`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from enum import StrEnum
from typing import Any, Final

from bullpen._kernel.logs import get_logger
from bullpen.errors import BullpenError, InvalidOption, PayloadTooLarge, ServerRefused, require
from bullpen.ledger import OutboxRow
from bullpen.outbox.routing import QUEUE_PREFIX
from bullpen.queue import Added, Job, JobState, NewJob, Queue
from bullpen.queue.events import EventStream
from bullpen.redis import Connection
from bullpen.redis.client import Door
from bullpen.wire.keys import DEFAULT_PREFIX, QueueKeys, hash_tag

__all__ = ["OutboxQueues", "Placed", "job_data"]

_log = get_logger("bullpen.outbox")

_ADD_DEADLINE_MS: Final = 5_000
_PROBE_TIMEOUT_MS: Final = 500
_COUNT_TIMEOUT_S: Final = 2.0
_PROBE_PAUSE_S: Final = 0.05
"""Between two questions whether Redis is back: all queues that ask in one tick get one answer."""
_MOST_ANNOUNCED: Final = 10_000
_ANNOUNCED_S: Final = 86_400


class Placed(StrEnum):
    """What became of a row's job."""

    QUEUED = "queued"
    RUNNING = "running"
    """A job of this row is being handled right now: it will begin the delivery, or has just ended one."""
    UNAVAILABLE = "unavailable"
    """Redis is away or full, or nobody knows. Adding it again does no harm."""
    IMPOSSIBLE = "impossible"
    """No queue can take it."""


def job_data(row: OutboxRow) -> dict[str, Any]:
    """What the job carries. The row stays the truth about whether it is to be delivered, and how often it was tried."""
    return {
        "outboxId": row.id,
        "eventType": row.event_type,
        "payload": row.payload,
        "headers": row.headers,
        "tenantId": row.tenant_id,
        "correlationId": row.correlation_id,
        "sourceEventId": row.source_event_id,
    }


class OutboxQueues:
    """Queues by name, all on one connection."""

    def __init__(self, connection: Connection, *, prefix: str | None = None) -> None:
        self.connection, self.prefix = connection, prefix
        self._queues: dict[str, Queue] = {}
        self._announced: set[str] = set()
        keys = QueueKeys(prefix or DEFAULT_PREFIX, QUEUE_PREFIX)
        self._announcements = keys.queues
        self._is_away = False
        self._probing = asyncio.Lock()
        self._next_probe = 0.0

    def __getitem__(self, name: str) -> Queue:
        queue = self._queues.get(name)
        if queue is None:
            # Retries live in the row alone, so a job runs once; a success leaves nothing, a failure stays to be seen.
            queue = self._queues[name] = Queue(
                name,
                connection=self.connection,
                prefix=self.prefix,
                add_deadline=_ADD_DEADLINE_MS,
                attempts=1,
                remove_on_complete=True,
                remove_on_fail=False,
            )
        return queue

    def require_tag(self, name: str, advice: str) -> None:
        """Refuse a queue that a cluster could not hold, before rows are claimed for it."""
        key = QueueKeys(self.prefix or DEFAULT_PREFIX, name).base
        has_one = not self.connection.is_cluster or hash_tag(key) is not None
        require("prefix", has_one, f'a hash tag on a cluster: prefix="{{bull}}", {advice}', key)

    async def is_open(self, name: str) -> bool:
        """Whether Redis can be counted on. While it is away this asks, and costs a moment; otherwise nothing."""
        if self._is_away:
            async with self._probing:  # who comes meanwhile waits for one answer
                if self._is_away and time.monotonic() >= self._next_probe:
                    self._is_away = not await self[name].is_healthy(timeout_ms=_PROBE_TIMEOUT_MS)
                    self._next_probe = time.monotonic() + _PROBE_PAUSE_S
                    if not self._is_away:
                        _log.warning("Redis takes jobs of the outbox again")
        return not self._is_away

    async def room(self, name: str, most: int) -> int:
        """How many jobs are missing until `most` wait in a queue. 0 as well when nobody can tell."""
        try:
            async with asyncio.timeout(
                _COUNT_TIMEOUT_S
            ):  # a queue asks again for longer; rows of others wait meanwhile
                return max(0, most - (await self[name].counts()).pending)
        except TimeoutError:
            self._lost(f"no answer within {_COUNT_TIMEOUT_S:.0f} s")
        except BullpenError as error:
            self._lost(str(error))
        return 0

    async def place(self, name: str, rows: Sequence[OutboxRow]) -> list[tuple[OutboxRow, Placed, str]]:
        """Add a job per row, in as few calls as possible; for each row what became of it, and why."""
        if name not in self._announced:
            await self._announce(name)  # before the jobs: should we die in between, the next process announces it
        queue = self[name]
        results: Sequence[Job | BaseException]
        try:
            results = await queue.add_many([_job(row) for row in rows])
        except BullpenError as error:
            if not isinstance(error, InvalidOption | PayloadTooLarge):  # Redis is away: one wait is enough for all
                results = [error] * len(rows)
            else:
                results = await self._add_each(queue, rows)
        except (TypeError, ValueError):  # one of them cannot be read
            results = await self._add_each(queue, rows)
        return [(row, *self._judge(result)) for row, result in zip(rows, results, strict=True)]

    async def _add_each(self, queue: Queue, rows: Sequence[OutboxRow]) -> Sequence[Job | BaseException]:
        """One by one: a row that no queue can take must not keep the others from theirs."""
        results = await asyncio.gather(*(self._add(queue, row) for row in rows), return_exceptions=True)
        return list(results)

    async def announcements(self) -> AsyncGenerator[frozenset[str], None]:
        """Names of queues that dispatchers of any process begin to fill. The first ones are empty: whoever has them
        looks for the queues that are there already. Empty ones later: some may have been missed.

        From the oldest announcement on: one that was made just before we came may be of a queue without a job so far,
        which no look finds.
        """
        key = self._announcements
        door = Door(self.connection, "bullpen-outbox-queues", key=key)
        try:
            await EventStream(door, key).start()  # a server that is away is waited for
            yield frozenset()
            stream = EventStream(door, key, "0-0")
            while True:
                lost, entries = await stream.next_page()
                if lost:
                    yield frozenset()
                yield frozenset(fields[-1].decode("utf-8", "replace") for _, fields in entries if fields)
        finally:
            door.close()

    async def aclose(self) -> None:
        for queue in self._queues.values():
            await queue.close()

    async def _announce(self, name: str) -> None:
        """If it fails, the jobs may be added all the same: workers look for queues now and then."""
        key = self._announcements
        try:
            replies = await self.connection.shared_door(key).call_many(
                [("XADD", key, "MAXLEN", "~", _MOST_ANNOUNCED, "*", "queue", name), ("EXPIRE", key, _ANNOUNCED_S)]
            )
        except BullpenError as error:
            self._lost(str(error))
            return
        self._announced.add(name)
        for refused in replies:
            if isinstance(refused, ServerRefused):
                _log.warning("queue %r of the outbox was not announced: %s; workers find it by polling", name, refused)
                return

    async def _add(self, queue: Queue, row: OutboxRow) -> Job:
        job = _job(row)
        return await queue.add(job.name, job.data, **job.options)

    def _judge(self, result: Job | BaseException) -> tuple[Placed, str]:
        match result:
            case InvalidOption() | PayloadTooLarge():
                return Placed.IMPOSSIBLE, str(result)
            case BullpenError():
                self._lost(str(result))
                return Placed.UNAVAILABLE, str(result)
            case Exception():
                # Its content cannot be read or sent. Raised here, it would keep the whole batch from its queue.
                return Placed.IMPOSSIBLE, f"{type(result).__name__}: {result}"
            case BaseException():
                raise result
        running = result.added is Added.DUPLICATE and result.blocked_by is not None
        if running and result.blocked_by is not None and result.blocked_by.state is JobState.ACTIVE:
            return Placed.RUNNING, ""
        return Placed.QUEUED, ""

    def _lost(self, reason: str) -> None:
        if not self._is_away:
            self._is_away = True
            _log.warning("Redis takes no jobs of the outbox: %s; rows wait in the database", reason)


def _job(row: OutboxRow) -> NewJob:
    return NewJob(row.event_type, job_data(row), {"job_id": row.id, "replace_finished": True})
