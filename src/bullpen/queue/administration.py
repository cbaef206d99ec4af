"""All that can be done with a queue but adding to it, on an event loop and in a plain thread.

In: names, ids, options. Out: jobs and records. Only the queue's actions reach the server (`actions`), so the same code
serves `Queue` and its blocking twin. Elsewhere: adding (`queue`, `sync`), the parts (`browse`, `heads`, `locate`,
`maintain`, `limits`, `schedulers`, `flows`), dead letters (`bullpen.queue.dead_letters.operations`).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Literal, TypedDict, Unpack

from bullpen._kernel import json
from bullpen._kernel.duration import check_int
from bullpen._kernel.ids import check_queue_name, check_stored_id
from bullpen.errors import QueueClosed, require
from bullpen.queue.base import traced
from bullpen.queue.browse import Browsing
from bullpen.queue.codec import Codec, check_codec
from bullpen.queue.durability import Durability
from bullpen.queue.export import Exporting
from bullpen.queue.flows import Flows
from bullpen.queue.heads import Heads
from bullpen.queue.job import Job
from bullpen.queue.lanes import Lanes
from bullpen.queue.late_wakeups import note_late_run
from bullpen.queue.limits import Limits
from bullpen.queue.locate import Locating
from bullpen.queue.maintain import Maintenance
from bullpen.queue.packing import ADD_DEADLINE_S, read_add_deadline
from bullpen.queue.schedulers import Scheduling
from bullpen.queue.states import JobState
from bullpen.redis.client import Connection
from bullpen.redis.default import connection_for, prefix_for
from bullpen.wire.deduplication import check_deduplication_id
from bullpen.wire.keys import QueueKeys
from bullpen.wire.links import JobKey
from bullpen.wire.options import JobOptions

if TYPE_CHECKING:  # loaded where they are used: who adds jobs needs none of them, and a program starts sooner
    from bullpen.queue.dead_letters.failed_set import FailedSetStore
    from bullpen.queue.dead_letters.operations import DeadLetters
    from bullpen.queue.payloads import PayloadReport, SweepReport

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


class AdministrationSettings(TypedDict):
    """What queues with and without an event loop are made of; see `bullpen.Queue`."""

    connection: str | Connection | None
    prefix: str | None
    defaults: JobOptions
    dead_letter_suffix: str
    add_deadline: int | timedelta | None
    durability: Durability | str
    clock_offset_ms: int
    codec: Codec | None


class Administration(Browsing, Exporting, Heads, Locating, Maintenance, Limits, Scheduling, Flows):
    """A named queue in Redis, with everything that administrates it."""

    def __init__(self, name: str, **settings: Unpack[AdministrationSettings]) -> None:
        connection = settings["connection"]
        self._codec = codec = check_codec(settings["codec"])
        self._limit_bytes = json.MAX_PAYLOAD_BYTES if codec is None else codec.limit_bytes
        self._keys = QueueKeys(prefix_for(settings["prefix"]), check_queue_name(name))
        self._defaults = settings["defaults"]
        given_s = read_add_deadline(settings["add_deadline"])
        self._deadline_s = ADD_DEADLINE_S if given_s is None else given_s
        letters = self._keys.dead_letter_name(settings["dead_letter_suffix"])
        self._dead_letter_keys = QueueKeys(self._keys.prefix, letters)
        self._connection = connection_for(connection, self._keys.base, self._dead_letter_keys.base)
        self._owns_connection = not isinstance(connection, Connection)
        self._clock_offset_ms = settings["clock_offset_ms"]
        self._durability = Durability.read(settings["durability"])
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
        from bullpen.queue.payloads import report_payloads

        return await report_payloads(self._ready(), self._keys, self._dead_letter_keys)

    async def sweep_payloads(self, *, older_than: int | timedelta = 86_400_000, dry_run: bool = False) -> SweepReport:
        """Remove the objects of this queue that no job, scheduler or dead letter names any more.

        `older_than` (ms or timedelta, a day by default, a minute at least) spares what is being added now. Safe at any
        time, beside producers and workers. `dry_run` removes nothing.
        """
        from bullpen.queue.payloads import sweep_payloads

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

    # ---- reading ----------------------------------------------------------------------------------------------

    async def get_job(self, job_id: str, *, open: bool = True) -> Job | None:
        """The job as it is stored now, or None. With a codec its payload is opened, which may raise PayloadUnavailable,
        PayloadMissing or PayloadTampered; `open=False` leaves it sealed."""
        actions = self._ready()
        found = await actions.read(check_stored_id("job_id", job_id))
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
        return await self._ready().state_of(check_stored_id("job_id", job_id))

    async def deduplication_owner(self, deduplication_id: str) -> str | None:
        """Id of the job that owns a deduplication id now; None when the next add with it makes a job."""
        owner = await self._ready().command("GET", self._keys.deduplication(check_deduplication_id(deduplication_id)))
        return None if owner is None else owner.decode("utf-8", "surrogateescape")

    @traced("removeDeduplicationKey")
    async def remove_deduplication(self, deduplication_id: str) -> bool:
        """Free a deduplication id, whatever job owns it, so that the next add with it makes a job. False: it was
        free."""
        return bool(
            await self._ready().command("DEL", self._keys.deduplication(check_deduplication_id(deduplication_id)))
        )

    async def lock_holder(self, job_id: str) -> str | None:
        """The token of the take that holds a job's lock now (`job.token` in its handler); None when it is not
        locked."""
        token = await self._ready().command("GET", self._keys.lock(job_id))
        return None if token is None else token.decode("utf-8", "surrogateescape")

    async def note_cancelled(self, job_id: str) -> None:
        """Write the event `cancelled` of a job whose owner has ended the work itself: waiting callers read its state
        again."""
        await self._ready().command("XADD", self._keys.events, "*", "event", "cancelled", "jobId", job_id)

    async def note_late_run(self, run_id: str) -> None:
        """No event reported the end of this run to a waiting caller."""
        await note_late_run(self._ready(), self._keys, run_id)

    async def note_user(
        self, kind: str, user: str, *, keep_ms: int = 86_400_000, unless_new: bool = False
    ) -> list[str]:
        """Write down that `user` uses this queue now, and return the others of its kind that did within `keep_ms`.

        `unless_new`: a queue without any added job is not created.
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

    async def is_paused(self) -> bool:
        return bool(await self._ready().command("HEXISTS", self._keys.meta, "paused"))

    @property
    def dead_letters(self) -> DeadLetters:
        """The dead letters of this queue: finally failed jobs that need a person."""
        from bullpen.queue.dead_letters.operations import DeadLetters

        return DeadLetters(self._ready(), self._keys, self._dead_letter_keys, clock_offset_ms=self._clock_offset_ms)

    @property
    def failed_set(self) -> FailedSetStore:
        """The failed jobs of this queue as dead letters, for queues that have no dead-letter queue."""
        from bullpen.queue.dead_letters.failed_set import FailedSetStore

        return FailedSetStore(self._ready(), self._keys, self._dead_letter_keys, clock_offset_ms=self._clock_offset_ms)

    @property
    def lanes(self) -> Lanes:
        """Fair shares of this queue by key: weights, limits, and who waits."""
        return Lanes(self._ready(), self._keys, clock_offset_ms=self._clock_offset_ms)

    # ---- looking after it -------------------------------------------------------------------------------------

    @traced("pause")
    async def pause(self) -> None:
        """Let all workers, of any client, take nothing more. Running jobs finish."""
        keys = self._keys
        await self._ready().evaluate("pause", [keys.meta, keys.marker, keys.events], [keys.base])

    @traced("resume")
    async def resume(self) -> None:
        """Resume the queue: workers take jobs again."""
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

    def _must_be_open(self) -> None:
        if self._closed:
            raise QueueClosed(f"queue {self.name!r} was closed; make a new Queue", queue=self.name)
