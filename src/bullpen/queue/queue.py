"""Add jobs to a queue and look after it.

In: names, data, options, checked here before anything is sent. Out: jobs.
Elsewhere: sending adds (`add`), reading (`browse`), administration (`maintain`), limits (`limits`), schedulers
(`schedulers`), running jobs (`worker`), their events (`events`), dead letters
(`bullpen.queue.dead_letters.operations`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, Literal, Self, Unpack

from bullpen._kernel import json, tracing
from bullpen._kernel.duration import check_int
from bullpen._kernel.ids import check_queue_name
from bullpen.errors import QueueClosed, require
from bullpen.queue.actions import QueueActions
from bullpen.queue.add import Adder
from bullpen.queue.arguments import JobDefaults, NewJobArguments
from bullpen.queue.browse import Browsing
from bullpen.queue.codec import Codec, check_codec
from bullpen.queue.dead_letters.failed_set import FailedSetStore
from bullpen.queue.dead_letters.operations import DeadLetters
from bullpen.queue.durability import MEMORY, Durability
from bullpen.queue.flows import Flows, FlowSender
from bullpen.queue.heads import Heads
from bullpen.queue.job import Job, JobState, NewJob
from bullpen.queue.lanes import Lanes
from bullpen.queue.late_wakeups import note_late_run
from bullpen.queue.limits import Limits
from bullpen.queue.locate import Locating
from bullpen.queue.maintain import Maintenance
from bullpen.queue.packing import ADD_DEADLINE_S, PackedJob, pack_job, pack_jobs, read_add_deadline
from bullpen.queue.payloads import PayloadReport, SweepReport, report_payloads, sweep_payloads
from bullpen.queue.schedulers import Scheduling
from bullpen.queue.sealed_add import SealedAdder
from bullpen.redis.client import Connection, Door
from bullpen.redis.default import connection_for, prefix_for
from bullpen.wire.deduplication import check_deduplication_id
from bullpen.wire.keys import QueueKeys
from bullpen.wire.links import JobKey
from bullpen.wire.options import JobOptions, make_defaults

_COUNTED: Final = ("wait", "paused", "active", "prioritized", "delayed", "waiting_children", "completed", "failed")


@dataclass(frozen=True, slots=True)
class JobCounts:
    """How many jobs are in each state."""

    waiting: int
    active: int
    prioritized: int
    delayed: int
    waiting_children: int
    completed: int
    failed: int

    @property
    def pending(self) -> int:
        """Jobs that still have to run."""
        return self.waiting + self.prioritized + self.delayed + self.waiting_children


class Queue(Browsing, Heads, Locating, Maintenance, Limits, Scheduling, Flows):
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
        self._codec = check_codec(codec)
        self._limit_bytes = json.MAX_PAYLOAD_BYTES if codec is None else codec.limit_bytes
        self._keys = QueueKeys(prefix_for(prefix), check_queue_name(name))
        self._defaults = make_defaults(**defaults)
        given_s = read_add_deadline(add_deadline)
        check_int("max_buffered", max_buffered, minimum=1)
        if events_max_len is not None:
            check_int("events_max_len", events_max_len, minimum=1)
        self._events_max_len = events_max_len
        self._deadline_s = ADD_DEADLINE_S if given_s is None else given_s
        self._max_buffered = max_buffered
        self._dead_letter_keys = QueueKeys(self._keys.prefix, self._keys.dead_letter_name(dead_letter_suffix))
        self._connection = connection_for(connection, self._keys.base, self._dead_letter_keys.base)
        self._owns_connection = not isinstance(connection, Connection)
        self._clock_offset_ms = clock_offset_ms
        self._durability = Durability.read(durability)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    @property
    def name(self) -> str:
        return self._keys.name

    @property
    def connection(self) -> Connection:
        """The connection this queue uses, to be shared with others on the same server."""
        return self._connection

    @property
    def codec(self) -> Codec | None:
        """How payloads of this queue are sealed."""
        return self._codec

    async def payload_report(self) -> PayloadReport:
        """Count the sealed payloads of this queue and its dead letters by key: what still needs an old one?"""
        return await report_payloads(self._ready(), self._keys, self._dead_letter_keys)

    async def sweep_payloads(self, *, older_than: int | timedelta = 86_400_000, dry_run: bool = False) -> SweepReport:
        """Remove the objects of this queue that no job, scheduler or dead letter names any more.

        `older_than` (ms or timedelta, a day by default, a minute at least) spares what is being added now. Safe at any
        time, beside producers and workers. `dry_run` removes nothing.
        """
        return await sweep_payloads(
            self._ready(), self._keys, self._dead_letter_keys, older_than=older_than, dry_run=dry_run
        )

    @property
    def keys(self) -> QueueKeys:
        """The Redis keys of this queue."""
        return self._keys

    @property
    def defaults(self) -> JobOptions:
        """The options of jobs that say nothing of their own."""
        return self._defaults

    def key_of(self, job_id: str) -> JobKey:
        """The key of a job, for `parent=`."""
        return JobKey(job_id, self._keys.base[:-1])

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

        `job.added` tells CREATED, DUPLICATE (its `job_id` is taken) or DEDUPLICATED (another job owns its
        `deduplication` id); then nothing is added, the returned job is the one that was there first, and
        `job.blocked_by` says where it is. Raises InvalidOption or PayloadTooLarge before anything is written. When the
        server is away for longer than `add_deadline` (ms or timedelta; the queue's unless given, 5 s by default), it
        raises ConnectionLost if certainly nothing was written, else OutcomeUnknown. Cancelling the caller does not take
        back what was sent.

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
        """The span of whoever adds, named as Node's library names it; the jobs carry it to their workers."""
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
            self._actions = QueueActions(self._door, self._keys, deadline_s=self._deadline_s, codec=self._codec)
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
            self._others: dict[QueueKeys, QueueActions] = {}
        return loop

    def _flow_sender(self) -> FlowSender:
        self._ready()
        if self._flows is None:
            self._flows = FlowSender(self._connection, self._door, self._keys, self._clock_offset_ms)
        return self._flows

    def _actions_of(self, keys: QueueKeys) -> QueueActions:
        actions = self._ready()
        if keys == self._keys:
            return actions
        if keys not in self._others:
            door = self._connection.shared_door(keys.base)
            self._others[keys] = QueueActions(door, keys, deadline_s=self._deadline_s, codec=self._codec)
        return self._others[keys]

    async def _write_options(self) -> None:
        """Write what was asked of the whole queue, once, with the first adds."""
        if self._events_max_len is not None:
            await self._actions.command("HSET", self._keys.meta, "opts.maxLenEvents", self._events_max_len)
            self._events_max_len = None

    # ---- reading ----------------------------------------------------------------------------------------------

    async def get_job(self, job_id: str, *, open: bool = True) -> Job | None:
        """The job as it is stored now, or None. With a codec its payload is opened, which may raise PayloadUnavailable,
        PayloadMissing or PayloadTampered; `open=False` leaves it sealed."""
        actions = self._ready()
        found = await actions.read(job_id)
        return None if found is None else Job(actions, await actions.open(found[1]) if open else found[1])

    async def open(self, job: Job) -> Job:
        """Open the payload of a job that a list brought, so that `job.data` shows it. Raises PayloadUnavailable,
        PayloadMissing or PayloadTampered; does nothing without a codec, and for a job that is open."""
        actions = self._ready()
        if job.is_sealed and job.record.seal_words is not None:
            job.record = await actions.open(job.record)
        return job

    async def state_of(self, job_id: str) -> JobState:
        """Where a job is now; UNKNOWN when there is none."""
        return await self._ready().state_of(job_id)

    async def deduplication_owner(self, deduplication_id: str) -> str | None:
        """Id of the job that owns a deduplication id now; None when the next add with it makes a job."""
        owner = await self._ready().command("GET", self._keys.deduplication(check_deduplication_id(deduplication_id)))
        return None if owner is None else owner.decode("utf-8", "surrogateescape")

    async def remove_deduplication(self, deduplication_id: str) -> bool:
        """Free a deduplication id, whoever owns it, so that the next add with it makes a job. False: it was free."""
        return bool(
            await self._ready().command("DEL", self._keys.deduplication(check_deduplication_id(deduplication_id)))
        )

    async def lock_holder(self, job_id: str) -> str | None:
        """The token of the take that holds a job's lock now (`job.token` in its handler); None when nobody does."""
        token = await self._ready().command("GET", self._keys.lock(job_id))
        return None if token is None else token.decode("utf-8", "surrogateescape")

    async def note_cancelled(self, job_id: str) -> None:
        """Write the event `cancelled` of a job whose owner has ended the work itself: whoever waits looks again."""
        await self._ready().command("XADD", self._keys.events, "*", "event", "cancelled", "jobId", job_id)

    async def note_late_run(self, run_id: str) -> None:
        """No event told whoever waits for this run that it has ended."""
        await note_late_run(self._ready(), self._keys, run_id)

    async def note_user(
        self, kind: str, user: str, *, keep_ms: int = 86_400_000, unless_new: bool = False
    ) -> list[str]:
        """Write down that `user` uses this queue now, and return the others of its kind that did within `keep_ms`.

        `unless_new`: a queue that nobody has added a job to stays as if it were not there.
        """
        (seconds, micros), is_used = await self._ready().commands([("TIME",), ("EXISTS", self._keys.meta)])
        if unless_new and not is_used:
            return []
        now, key = int(seconds) * 1000 + int(micros) // 1000, self._keys.users(kind)
        *_, users = await self._ready().commands(
            [
                ("ZADD", key, now, user),
                ("ZREMRANGEBYSCORE", key, "-inf", now - keep_ms),
                ("PEXPIRE", key, keep_ms),
                ("ZRANGE", key, 0, 99),
            ]
        )
        names = [one.decode("utf-8", "replace") for one in users]
        return [name for name in names if name != user]

    async def counts(self) -> JobCounts:
        """How many jobs are in each state."""
        keys = self._keys
        replies = await self._ready().commands(
            [("LLEN" if state in ("wait", "paused", "active") else "ZCARD", getattr(keys, state)) for state in _COUNTED]
        )
        wait, paused, active, prioritized, delayed, waiting_children, completed, failed = map(int, replies)
        return JobCounts(wait + paused, active, prioritized, delayed, waiting_children, completed, failed)

    async def is_healthy(self, *, timeout_ms: int = 2_000) -> bool:
        """Whether the server of this queue answers in time. Never raises, writes nothing; why not is logged."""
        if self._closed:
            return False
        self._running_loop()  # what is opened now is closed with the queue
        return await self._connection.is_healthy(timeout_ms=timeout_ms, key=self._keys.base)

    async def is_paused(self) -> bool:
        return bool(await self._ready().command("HEXISTS", self._keys.meta, "paused"))

    @property
    def dead_letters(self) -> DeadLetters:
        """The finally failed jobs of this queue that wait for somebody."""
        return DeadLetters(self._ready(), self._keys, self._dead_letter_keys, clock_offset_ms=self._clock_offset_ms)

    @property
    def failed_set(self) -> FailedSetStore:
        """The failed jobs of this queue as dead letters, for queues that have no dead-letter queue."""
        return FailedSetStore(self._ready(), self._keys, self._dead_letter_keys, clock_offset_ms=self._clock_offset_ms)

    @property
    def lanes(self) -> Lanes:
        """Fair shares of this queue by key: weights, limits, and who waits."""
        return Lanes(self._ready(), self._keys, clock_offset_ms=self._clock_offset_ms)

    # ---- looking after it -------------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Let all workers, of any client, take nothing more. Running jobs finish."""
        keys = self._keys
        await self._ready().evaluate("pause", [keys.meta, keys.marker, keys.events], [keys.base])

    async def resume(self) -> None:
        """Let workers take again."""
        keys = self._keys
        names = [keys.meta, keys.wait, keys.paused, keys.prioritized, keys.events]
        while await self._ready().evaluate("resume", names, [keys.base]):
            pass  # jobs of older clients are merged back in pages

    async def set_pause_layout(self, layout: Literal["list", "field"] | None) -> None:
        """Where the jobs of this queue wait while it is paused, for all our clients: in the list `paused` as clients
        before BullMQ 6 expect (`list`), or in `wait` as since then (`field`).

        None, which is the default, decides by the clients that were noticed on the queue.
        """
        require("layout", layout in ("list", "field", None), "'list', 'field' or None", layout)
        if layout is None:
            await self._ready().command("HDEL", self._keys.meta, "bppause")
        else:
            await self._ready().command("HSET", self._keys.meta, "bppause", layout)

    async def set_events_max_len(self, length: int) -> None:
        """About how many events the stream keeps; all clients obey it."""
        check_int("events_max_len", length, minimum=1)
        await self._ready().command("HSET", self._keys.meta, "opts.maxLenEvents", length)

    def _ready(self) -> QueueActions:
        self._must_be_open()
        self._running_loop()
        return self._actions

    def _must_be_open(self) -> None:
        if self._closed:
            raise QueueClosed(f"queue {self.name!r} was closed; make a new Queue", queue=self.name)

    # ---- closing ----------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Send what still waits, then let go of the connection. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self._loop is not asyncio.get_running_loop():
            return
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
