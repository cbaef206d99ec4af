"""Add jobs to a queue, on an event loop.

In: names, data, options, checked here before anything is sent. Out: jobs.
Elsewhere: sending adds (`add`), all else that a queue can do (`administration`), the same without a loop (`sync`),
running jobs (`bullpen.worker`), their events (`events`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import AbstractContextManager
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, Unpack

from bullpen._kernel import tracing
from bullpen._kernel.duration import check_int
from bullpen.queue.actions import AsyncActions
from bullpen.queue.add import Adder
from bullpen.queue.administration import Administration
from bullpen.queue.arguments import JobDefaults, NewJobArguments
from bullpen.queue.codec import Codec
from bullpen.queue.durability import MEMORY, Durability
from bullpen.queue.flows import FlowSender
from bullpen.queue.job import Job, NewJob
from bullpen.queue.packing import PackedJob, pack_job, pack_jobs, read_add_deadline
from bullpen.queue.sealed_add import SealedAdder
from bullpen.redis.client import Connection, Door
from bullpen.wire.keys import QueueKeys
from bullpen.wire.options import make_defaults


class Queue(Administration):
    """A named queue in Redis, shared with every BullMQ client that uses the same name and prefix.

    `defaults` are job options for every add: `Queue("emails", attempts=5, remove_on_complete=1000)`. `add_deadline`
    (ms or timedelta, 5 s by default) is how long an add, and every other call of this object, waits for a server that
    is away. `codec` seals job data before they are stored and opens what workers sealed; see `Codec`.
    """

    def __init__(
        self,
        name: str,
        *,
        connection: str | Connection | None = None,
        prefix: str | None = None,
        events_max_len: int | None = None,
        dead_letter_suffix: str = "-dlq",
        add_deadline: int | timedelta | None = None,
        max_buffered: int = 10_000,
        durability: Durability | str = MEMORY,
        clock_offset_ms: int = 0,
        codec: Codec | None = None,
        **defaults: Unpack[JobDefaults],
    ) -> None:
        super().__init__(
            name,
            connection=connection,
            prefix=prefix,
            defaults=make_defaults(**defaults),
            dead_letter_suffix=dead_letter_suffix,
            add_deadline=add_deadline,
            durability=durability,
            clock_offset_ms=clock_offset_ms,
            codec=codec,
        )
        check_int("max_buffered", max_buffered, minimum=1)
        if events_max_len is not None:
            check_int("events_max_len", events_max_len, minimum=1)
        self._events_max_len = events_max_len
        self._max_buffered = max_buffered
        self._loop: asyncio.AbstractEventLoop | None = None

    # ---- adding -----------------------------------------------------------------------------------------------

    async def add(
        self,
        name: str,
        data: Any = None,
        *,
        durability: Durability | str | None = None,
        add_deadline: int | timedelta | None = None,
        **options: Unpack[NewJobArguments],
    ) -> Job:
        """Store one job and return it; see `JobOptions` for the options and `Durability` for how safe it is then.

        `job.added` is CREATED, DUPLICATE (its `job_id` is taken) or DEDUPLICATED (another job owns its
        `deduplication` id); then nothing is added, the returned job is the one that was there first, and
        `job.blocked_by` says where it is. Raises InvalidOption or PayloadTooLarge before anything is written. When the
        server is unreachable for longer than `add_deadline` (ms or timedelta; the queue's unless given, 5 s by
        default), it raises ConnectionLost if certainly nothing was written, else OutcomeUnknown. Cancelling the caller
        does not take back what was sent.

        `replace_finished` lets a job with its own `job_id` take the place of a completed or failed one that still
        holds the id, in the same script. One that has not finished stays, and so does a failed child that its parent
        waits for: then it is a duplicate.
        """
        if tracing.tracer is not None and "tm" not in options:
            with self._sending("add", name) as span:
                packed = pack_job(name, data, self._defaults, options, self._limit_bytes)
                level = self._durability if durability is None else Durability.read(durability)
                job = await self._add(packed, level, add_deadline)
                span.note("messaging.message.id", job.id)
                return job
        sender = self._sender()
        packed = pack_job(name, data, self._defaults, options, self._limit_bytes)
        if add_deadline is None:  # nearly all
            return await sender.add(packed, self._durability if durability is None else Durability.read(durability))
        level = self._durability if durability is None else Durability.read(durability)
        return await self._add(packed, level, add_deadline)

    async def _add(self, packed: PackedJob, level: Durability, add_deadline: int | timedelta | None) -> Job:
        if add_deadline is None:
            return await self._sender().add(packed, level)
        return (await self._sender().add_many([packed], level, read_add_deadline(add_deadline)))[0]

    async def add_many(
        self,
        jobs: Iterable[NewJob | tuple[str, Any]],
        *,
        durability: Durability | str | None = None,
        add_deadline: int | timedelta | None = None,
    ) -> list[Job]:
        """Store many jobs in order, hundreds per call. All are checked before the first is sent.

        Each call is atomic, the whole is not: when the server goes away in between, an error is raised although
        earlier ones are stored.
        """
        if tracing.tracer is not None:
            with self._sending("addBulk") as span:
                sender, packed = self._sender(), pack_jobs(jobs, self._defaults, self._limit_bytes)
                span.note("messaging.batch.message_count", len(packed))
                level = self._durability if durability is None else Durability.read(durability)
                deadline_s = read_add_deadline(add_deadline)
                return await sender.add_many(packed, level, deadline_s) if packed else []
        sender = self._sender()
        packed = pack_jobs(jobs, self._defaults, self._limit_bytes)
        level = self._durability if durability is None else Durability.read(durability)
        return await sender.add_many(packed, level, read_add_deadline(add_deadline)) if packed else []

    def _sending(self, operation: str, job_name: str | None = None) -> AbstractContextManager[tracing.Span]:
        """The span of the producer, named as in Node's library; the jobs carry it to their workers."""
        return tracing.sending(
            *("bullmq", self.name, operation), bullmq__queue__name=self.name, bullmq__job__name=job_name
        )

    def _sender(self) -> Adder | SealedAdder:
        if self._closed or self._loop is not asyncio.get_running_loop():
            self._ready()
        return self._adds

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            # First use, or first use in another loop (a test, a new asyncio.run): connections belong to one loop.
            self._loop = loop
            self._door: Door = self._connection.shared_door(self._keys.base)
            self._actions = AsyncActions(
                *(self._door, self._keys),
                deadline_s=self._deadline_s,
                codec=self._codec,
                dead_letter_keys=self._dead_letter_keys,
                clock_offset_ms=self._clock_offset_ms,
            )
            self._adder = Adder(
                self._door,
                self._keys,
                self._actions,
                deadline_s=self._deadline_s,
                max_buffered=self._max_buffered,
                clock_offset_ms=self._clock_offset_ms,
                before_first=None if self._events_max_len is None else self._write_options,
            )
            sealer = self._actions.sealer
            self._adds: Adder | SealedAdder = self._adder if sealer is None else SealedAdder(self._adder, sealer)
            self._flows: FlowSender | None = None
            self._others: dict[QueueKeys, AsyncActions] = {}
        return loop

    def _flow_sender(self) -> FlowSender:
        self._ready()
        if self._flows is None:
            self._flows = FlowSender(self._connection, self._door, self._keys, self._clock_offset_ms)
        return self._flows

    def _actions_of(self, keys: QueueKeys) -> AsyncActions:
        actions = self._ready()
        if keys == self._keys:
            return actions
        if keys not in self._others:
            door = self._connection.shared_door(keys.base)
            self._others[keys] = AsyncActions(door, keys, deadline_s=self._deadline_s, codec=self._codec)
        return self._others[keys]

    async def _write_options(self) -> None:
        """Write what was asked of the whole queue, once, with the first adds."""
        if self._events_max_len is not None:
            await self._actions.command("HSET", self._keys.meta, "opts.maxLenEvents", self._events_max_len)
            self._events_max_len = None

    async def is_healthy(self, *, timeout_ms: int = 2_000) -> bool:
        """Whether the server of this queue answers in time. Never raises, writes nothing; why not is logged."""
        if self._closed:
            return False
        self._running_loop()  # what is opened now is closed with the queue
        return await self._connection.is_healthy(timeout_ms=timeout_ms, key=self._keys.base)

    def _ready(self) -> AsyncActions:
        self._must_be_open()
        self._running_loop()
        return self._actions

    # ---- closing ----------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Send what still waits, then let go of the connection. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        await self.leave_loop()

    async def leave_loop(self) -> None:
        """Send what still waits, then let go of what belongs to the running loop; in another one it works again."""
        if self._loop is not asyncio.get_running_loop():
            return
        self._loop = None
        await self._adder.aclose()
        for actions in (self._actions, *self._others.values()):
            await actions.aclose()
        if self._owns_connection:
            await self._connection.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
