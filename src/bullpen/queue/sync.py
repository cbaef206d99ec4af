"""A blocking queue for scripts, Flask, Django and everything else without an event loop.

    from bullpen.sync import Queue

    queue = Queue("emails")
    job = queue.add("welcome", {"to": "ada@example.com"})
    print(job.result(timeout=10_000))

In: names, data, options, as the asynchronous `Queue` takes them. Out: jobs. No loop and no thread: each call uses one
connection and returns when the server has answered. Adds are numbered calls, so one whose reply was lost is repeated
and still stored once. May be used by several threads, one call at a time, and after a fork: the child opens its own
connection. Elsewhere: workers and everything else about queues (`bullpen.queue`), packing (`bullpen.queue.packing`).
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from importlib import import_module
from types import TracebackType
from typing import Any, Final, Self, Unpack

from bullpen._kernel import json, tracing
from bullpen._kernel.duration import to_ms
from bullpen._kernel.ids import check_queue_name, new_token
from bullpen.errors import (
    ConnectionLost,
    DurabilityUnknown,
    InvalidOption,
    JobNotFound,
    QueueClosed,
    QueueError,
    ServerRefused,
)
from bullpen.queue.actions import RESULT_PATIENCE_S
from bullpen.queue.arguments import JobDefaults, NewJobArguments, SchedulerArguments
from bullpen.queue.blocking_durability import BlockingDurability
from bullpen.queue.cancel import Cancelled, cancel_call, check_reason, failure_of, read_reply
from bullpen.queue.codec import Codec, Sealer, check_codec, owner_commands, run_blocking
from bullpen.queue.durability import MEMORY, Durability
from bullpen.queue.job import Added, BlockedBy, JobState, NewJob
from bullpen.queue.lanes import Ask, BlockingLanes
from bullpen.queue.late_results import Circumstances, late_result, lists_worker
from bullpen.queue.lists import seeking
from bullpen.queue.packing import (
    ADD_DEADLINE_S,
    MOST_BYTES_PER_CALL,
    MOST_JOBS_PER_CALL,
    PackedJob,
    Stored,
    add_arguments,
    add_keys,
    call_ttl_ms,
    command_for_one,
    count_fitting,
    pack_job,
    pack_jobs,
    read_add_deadline,
    read_stored,
)
from bullpen.queue.queue import JobCounts
from bullpen.queue.schedulers import (
    MOST_TRIES,
    Upsert,
    found_scheduler,
    page_read,
    read_page,
    record_reads,
    removal,
    scheduler_reads,
)
from bullpen.queue.sealed_add import NOTHING_WRITTEN, seal_all
from bullpen.redis.blocking import BlockingWire, open_wire
from bullpen.redis.calls import outcome_unknown
from bullpen.redis.client import Connection
from bullpen.redis.default import connection_for, prefix_for
from bullpen.redis.discovery import ServerUnavailable
from bullpen.redis.spin import Watch
from bullpen.wire.keys import QueueKeys
from bullpen.wire.links import JobKey
from bullpen.wire.options import WireOptions, make_defaults
from bullpen.wire.records import JobRecord
from bullpen.wire.schedules import SchedulerRecord
from bullpen.wire.scripts import SCRIPTS

__all__ = ["Job", "Queue"]

_FIRST_WAIT_S: Final = 0.02
_LONGEST_WAIT_S: Final = 0.5
_LISTEN_MS: Final = 2_000
"""How long one look at the events blocks; below the connection's own time limit."""
_LISTS: Final = ("wait", "paused", "active")
_COUNTED: Final = (*_LISTS, "prioritized", "delayed", "waiting_children", "completed", "failed")


class Job:
    """A job at the moment it was added or read."""

    def __init__(self, queue: Queue, record: JobRecord) -> None:
        self._queue = queue
        self.record = record
        """The stored fields."""
        self.added = Added.CREATED
        self.blocked_by: BlockedBy | None = None
        self.durability = "memory"
        """The level that was reached when it was added."""

    def __repr__(self) -> str:
        return f"Job(queue={self._queue.name!r}, id={self.id!r}, name={self.name!r})"

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def data(self) -> Any:
        return self.record.data

    @property
    def opts(self) -> WireOptions:
        return self.record.opts

    @property
    def key(self) -> JobKey:
        """Its key, for `parent=`."""
        return self._queue.key_of(self.id)

    @property
    def idempotency_key(self) -> str:
        return self.record.idempotency_key(self._queue.name)

    def state(self) -> JobState:
        """Where the job is now."""
        return self._queue.state_of(self.id)

    def cancel(self, reason: str | None = None) -> Cancelled:
        """End the job wherever it is; as `bullpen.Queue.cancel`."""
        return self._queue.cancel(self.id, reason)

    def result(self, timeout: int | timedelta | None = None) -> Any:
        """Block until the job is done and return its value; woken by the queue's events.

        Raises JobFailed when it failed finally, ResultTimeout after `timeout` (ms or timedelta), JobNotFound when it
        is gone.
        """
        return self._queue.wait_result(self.id, timeout)


class Queue:
    """The blocking twin of `bullpen.Queue`: the same names, options and errors. `defaults` are job options."""

    def __init__(
        self,
        name: str,
        *,
        connection: str | Connection | None = None,
        prefix: str | None = None,
        add_deadline: int | timedelta | None = None,
        durability: Durability | str = MEMORY,
        codec: Codec | None = None,
        **defaults: Unpack[JobDefaults],
    ) -> None:
        given_s = read_add_deadline(add_deadline)
        _fill_default()
        self._keys = QueueKeys(prefix_for(prefix), check_queue_name(name))
        self._defaults = make_defaults(**defaults)
        self._durability = Durability.read(durability)
        self._deadline_s = ADD_DEADLINE_S if given_s is None else given_s
        self._connection = connection_for(connection, self._keys.base)
        checked = check_codec(codec)
        self._sealer = None if checked is None else Sealer(checked, self._keys, self._object_owner)
        self._limit_bytes = json.MAX_PAYLOAD_BYTES if checked is None else checked.limit_bytes
        self._lock = threading.Lock()
        self._closed = False
        self._begin()

    def _begin(self) -> None:
        """As this process: connections and call numbers of a parent are not ours to use."""
        self._pid = os.getpid()
        self._caller_id, self._number = new_token(), 0
        self._wire: BlockingWire | None = None
        idle_s = self._connection.idle_ping_s
        self._idle_s = self._stale_at = math.inf if idle_s is None else idle_s
        self._watch = Watch()
        self._add_keys = add_keys(self._keys, self._caller_id)
        self._levels = BlockingDurability(self._connection, self._keys)

    @property
    def name(self) -> str:
        return self._keys.name

    def key_of(self, job_id: str) -> JobKey:
        """The key of a job, for `parent=`."""
        return JobKey(job_id, self._keys.base[:-1])

    # ---- adding -----------------------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        data: Any = None,
        *,
        durability: Durability | str | None = None,
        add_deadline: int | timedelta | None = None,
        **options: Unpack[NewJobArguments],
    ) -> Job:
        """Store one job; options, `job.added` and errors as in `bullpen.Queue.add`."""
        deadline_s = read_add_deadline(add_deadline) or self._deadline_s
        level = self._durability if durability is None else Durability.read(durability)
        if tracing.tracer is None or "tm" in options:
            return self._add(pack_job(name, data, self._defaults, options, self._limit_bytes), deadline_s, level)
        with tracing.sending(*("bullmq", self.name, "add"), bullmq__queue__name=self.name) as span:
            packed = pack_job(name, data, self._defaults, options, self._limit_bytes)
            added = self._add(packed, deadline_s, level)
            span.note("messaging.message.id", added.id)
            return added

    def _add(self, job: PackedJob, deadline_s: float, level: Durability) -> Job:
        if self._sealer is not None:
            return self._add_sealed(self._sealer, [job], deadline_s, level)[0]
        if level is not MEMORY:
            return self._store((job,), deadline_s, level)[0]
        with self._lock:
            self._ready()
            self._number += 1
            command = command_for_one(job, self._add_keys[0], self._keys.base, self._number, call_ttl_ms(deadline_s))
            until = self._watch.begin(time.monotonic())
            reply = self._call(
                lambda wire: wire.run_script(SCRIPTS["add"], command, watch_until=until), deadline_s, [job]
            )
            self._watch.end(time.monotonic())
        stored = read_stored(reply)
        return self._stored_jobs(stored, (job,))[0] if stored.taken else Job(self, stored.record(job))

    def add_many(
        self,
        jobs: Iterable[NewJob | tuple[str, Any]],
        *,
        durability: Durability | str | None = None,
        add_deadline: int | timedelta | None = None,
    ) -> list[Job]:
        """Store many jobs in order, hundreds per call. All are checked before the first is sent; each call is atomic,
        the whole is not."""
        deadline_s = read_add_deadline(add_deadline) or self._deadline_s
        level = self._durability if durability is None else Durability.read(durability)
        with tracing.sending(*("bullmq", self.name, "addBulk"), bullmq__queue__name=self.name) as span:
            packed = pack_jobs(jobs, self._defaults, self._limit_bytes)
            span.note("messaging.batch.message_count", len(packed))
            if self._sealer is not None:
                return self._add_sealed(self._sealer, packed, deadline_s, level)
            return self._store_all(packed, deadline_s, level)

    def _add_sealed(self, sealer: Sealer, packed: list[PackedJob], deadline_s: float, level: Durability) -> list[Job]:
        sealed = run_blocking(sealer, seal_all(sealer, packed))
        try:
            jobs = self._store_all(sealed, deadline_s, level)
        except NOTHING_WRITTEN:
            if len(sealed) == 1:
                run_blocking(sealer, sealer.forget(sealed[0].data))
            raise
        for plain, stored, job in zip(packed, sealed, jobs, strict=True):
            if job.added is Added.CREATED:
                job.record = job.record.opened(plain.data, None)
            elif job.added is Added.DUPLICATE:
                run_blocking(sealer, sealer.forget(stored.data))
        return jobs

    async def _object_owner(self) -> str:
        commands = owner_commands(self._keys)
        return str(self._locked(lambda wire: wire.call_many(commands))[1].decode())

    def _store_all(self, packed: list[PackedJob], deadline_s: float, level: Durability) -> list[Job]:
        stored: list[Job] = []
        while len(stored) < len(packed):
            begin = len(stored)
            count = count_fitting(packed, begin, MOST_JOBS_PER_CALL, MOST_BYTES_PER_CALL, at_least=1)
            stored += self._store(packed[begin : begin + count], deadline_s, level)
        return stored

    def _store(self, batch: Sequence[PackedJob], deadline_s: float, level: Durability) -> list[Job]:
        give_up_at, is_reached = time.monotonic() + deadline_s, True
        with self._lock:
            self._ready()
            self._number += 1
            names, args = self._add_keys, add_arguments(self._keys, batch, self._number, call_ttl_ms(deadline_s))

            def store(wire: BlockingWire) -> Any:
                return wire.evaluate(SCRIPTS["add"], names, args)

            if level is not MEMORY:
                self._call(lambda wire: self._levels.check(wire, level, give_up_at - time.monotonic()), deadline_s)
            reply = self._call(store, max(_FIRST_WAIT_S, give_up_at - time.monotonic()), adds=batch)
            if level is not MEMORY:
                is_reached = self._confirm(level, call_ttl_ms(deadline_s), store, give_up_at)
        jobs = self._stored_jobs(read_stored(reply), batch)
        if not is_reached:
            raise DurabilityUnknown(self.name, jobs[0], str(level))
        for job in jobs:
            job.durability = str(level)
        return jobs

    def _confirm(self, level: Durability, ttl_ms: int, store: Callable[[BlockingWire], Any], give_up_at: float) -> bool:
        """Wait for the level of the latest call. A server that lost the call meanwhile gets it again, same number."""
        while (left_s := give_up_at - time.monotonic()) > 0:

            def confirm(wire: BlockingWire, left_s: float = left_s) -> bool:
                return self._levels.confirm(wire, level, self._add_keys[0], self._number, ttl_ms, left_s)

            try:
                if self._call(confirm, left_s):
                    return True
                self._call(store, left_s)
            except (ConnectionLost, InvalidOption):  # not in time, or another server took over, which cannot keep it
                return False
        return False

    def _stored_jobs(self, stored: Stored, batch: Sequence[PackedJob]) -> list[Job]:
        jobs = [Job(self, record) for record in stored.records(batch)]
        if stored.taken:
            for index, other in stored.others(batch, self.name):
                if isinstance(other, QueueError):
                    raise other
                job = jobs[index] = Job(self, other.record)
                job.added, job.blocked_by = other.added, other.blocked_by
        return jobs

    # ---- reading ----------------------------------------------------------------------------------------------

    def get_job(self, job_id: str) -> Job | None:
        """The job as it is stored now, or None."""
        found = self._read(job_id)
        if found is None or self._sealer is None:
            return None if found is None else Job(self, found[1])
        return Job(self, run_blocking(self._sealer, self._sealer.open_record(found[1])))

    def state_of(self, job_id: str) -> JobState:
        """Where a job is now; UNKNOWN when there is none."""
        found = self._read(job_id)
        if found is None:
            return JobState.UNKNOWN
        return found[0] or self._seek(job_id)

    def counts(self) -> JobCounts:
        """How many jobs are in each state."""
        asked = [("LLEN" if state in _LISTS else "ZCARD", getattr(self._keys, state)) for state in _COUNTED]
        wait, paused, *rest = self._locked(lambda wire: wire.call_many(asked))
        return JobCounts(wait + paused, *rest)

    def wait_result(self, job_id: str, timeout: int | timedelta | None = None) -> Any:
        """As `Job.result`, by the job's id."""
        give_up_at = None if timeout is None else time.monotonic() + to_ms("timeout", timeout) / 1000
        # A client of its own: whoever waits must not keep other threads from adding.
        with contextlib.closing(_Listener(self._connection, self._keys)) as events:
            while True:
                left_s = RESULT_PATIENCE_S if give_up_at is None else give_up_at - time.monotonic()
                finished, value = self._read_result(job_id, within_s=min(RESULT_PATIENCE_S, max(left_s, 0)))
                if finished:
                    return value
                left_ms = _LISTEN_MS if give_up_at is None else int((give_up_at - time.monotonic()) * 1000)
                if left_ms <= 0:
                    assert timeout is not None
                    raise late_result(self._keys, job_id, to_ms("timeout", timeout), self._circumstances(job_id))
                events.wait_for_end(job_id, min(left_ms, _LISTEN_MS))

    def _circumstances(self, job_id: str) -> Circumstances:
        state: JobState | None = None
        is_paused: bool | None = None
        try:
            state = self.state_of(job_id)
            is_paused = bool(self._locked(lambda wire: wire.call("HEXISTS", self._keys.meta, "paused")))
            lock = self._keys.lock(job_id)
            if state is JobState.ACTIVE and self._locked(lambda wire: wire.call("EXISTS", lock)):
                return Circumstances(state, has_worker=True, is_paused=is_paused)
            clients = self._locked(lambda wire: wire.call("CLIENT", "LIST"))
        except ConnectionLost:
            return Circumstances()
        except ServerRefused:
            return Circumstances(state, is_paused=is_paused)
        return Circumstances(state, has_worker=lists_worker(self._keys, clients), is_paused=is_paused)

    def is_healthy(self) -> bool:
        """Whether the server answers now. Never raises, writes nothing."""
        try:
            open_wire(self._connection, self._keys.base).close()  # its greeting ends with a PING
            return True
        except (ConnectionLost, ServerRefused):
            return False

    def _read(self, job_id: str) -> tuple[JobState | None, JobRecord] | None:
        """State and record, or None. The state is None in a line so long that it must be sought."""
        keys, args = [self._keys.job(job_id)], [self._keys.base, job_id]
        state, flat = self._locked(lambda wire: wire.evaluate(SCRIPTS["read_job"], keys, args))
        return (JobState(state.decode()) if state else None, JobRecord.parse(job_id, flat)) if flat else None

    def _seek(self, job_id: str) -> JobState:
        search = seeking(self._keys, job_id)
        call = next(search)

        def ask(wire: BlockingWire) -> Any:
            return wire.evaluate(SCRIPTS["seek"], *call)

        while True:
            try:
                call = search.send(self._locked(ask))
            except StopIteration as end:
                return JobState(end.value)

    def _read_result(self, job_id: str, *, within_s: float) -> tuple[bool, Any]:
        keys = [self._keys.job(job_id), self._keys.completed, self._keys.failed]
        reply = self._locked(lambda wire: wire.evaluate(SCRIPTS["read_result"], keys, [job_id]), within_s)
        kind, value = (*reply, None)[:2]
        match kind:
            case b"completed":
                returned = json.decode(value, what="return value")
                return True, returned if self._sealer is None else self._sealer.open_result(returned)
            case b"failed":
                raise failure_of(self.name, job_id, *reply[1:])
            case b"pending":
                return False, None
        raise JobNotFound(self.name, job_id)

    # ---- schedulers -------------------------------------------------------------------------------------------

    def upsert_scheduler(
        self, scheduler_id: str, name: str | None = None, data: Any = None, **options: Unpack[SchedulerArguments]
    ) -> SchedulerRecord:
        """Make a job scheduler, or change the one with this id; all as in `bullpen.Queue.upsert_scheduler`."""
        upsert, after_ms = Upsert(self._keys, scheduler_id, name, data, options, self._defaults), None
        if self._sealer is not None:
            upsert.data = run_blocking(self._sealer, self._sealer.seal(upsert.data))
        now_ms = self._server_ms() if upsert.needs_time else 0
        for _ in range(MOST_TRIES):
            keys, args = upsert.keys, upsert.arguments(now_ms, after_ms, ttl_ms=call_ttl_ms(self._deadline_s))
            answer = upsert.read(self._evaluate("upsert_scheduler", keys, args))
            if not isinstance(answer, int):
                return answer[0]
            after_ms = answer
        raise upsert.refuse(after_ms or 0)

    def remove_scheduler(self, scheduler_id: str) -> bool:
        """End a scheduler and its job to come; False when there was none, or when an answer was lost on the way."""
        return bool(self._evaluate("remove_scheduler", *removal(self._keys, scheduler_id)))

    def get_scheduler(self, scheduler_id: str) -> SchedulerRecord | None:
        """One job scheduler, or None."""
        due, fields = self._locked(lambda wire: wire.call_many(scheduler_reads(self._keys, scheduler_id)))
        return found_scheduler(scheduler_id, due, fields)

    def schedulers(self, *, start: int = 0, count: int = 100, descending: bool = False) -> list[SchedulerRecord]:
        """A page of the job schedulers, those that are due next first; `descending` turns that round."""
        asked = page_read(self._keys, start, count, descending=descending)
        flat = self._locked(lambda wire: wire.call(*asked))
        reads = record_reads(self._keys, flat)
        return read_page(flat, self._locked(lambda wire: wire.call_many(reads)) if reads else [])

    def count_schedulers(self) -> int:
        """How many job schedulers there are."""
        return int(self._locked(lambda wire: wire.call("ZCARD", self._keys.repeat)))

    def _server_ms(self) -> int:
        seconds, micros = self._locked(lambda wire: wire.call("TIME"))
        return int(seconds) * 1000 + int(micros) // 1000

    def _evaluate(self, script: str, keys: list[str], args: list[Any]) -> Any:
        return self._locked(lambda wire: wire.evaluate(SCRIPTS[script], keys, args))

    # ---- looking after it -------------------------------------------------------------------------------------

    def cancel(self, job: str | Job, reason: str | None = None) -> Cancelled:
        """End a job wherever it is; as `bullpen.Queue.cancel`."""
        said, job_id = check_reason(reason), job.id if isinstance(job, Job) else job
        opts = self._locked(lambda wire: wire.call("HGET", self._keys.job(job_id), "opts"))
        keys, args = cancel_call(self._keys, job_id, said, WireOptions.parse(opts or b"{}"), 0)
        times_sent = 0

        def ask(wire: BlockingWire) -> Any:
            nonlocal times_sent
            times_sent += 1
            return wire.evaluate(SCRIPTS["cancel"], keys, args)

        reply = self._locked(ask)
        return read_reply(self.name, job_id, reply, was_repeated=times_sent > 1)

    def pause(self) -> None:
        """Let all workers, of any client, take nothing more. Running jobs finish."""
        keys = [self._keys.meta, self._keys.marker, self._keys.events]
        self._locked(lambda wire: wire.evaluate(SCRIPTS["pause"], keys, [self._keys.base]))

    def resume(self) -> None:
        """Let workers take again."""
        names = [self._keys.meta, self._keys.wait, self._keys.paused, self._keys.prioritized, self._keys.events]
        while self._locked(lambda wire: wire.evaluate(SCRIPTS["resume"], names, [self._keys.base])):
            pass  # jobs of older clients are merged back in pages

    @property
    def lanes(self) -> BlockingLanes:
        """Fair shares of this queue by key: weights, limits, and who waits."""

        def answer(ask: Ask) -> Any:
            if ask.script is None:
                return self._locked(lambda wire: wire.call(*ask.args))
            script = SCRIPTS[ask.script]
            return self._locked(lambda wire: wire.evaluate(script, [*ask.keys], [*ask.args]))

        return BlockingLanes(self._keys, answer)

    def close(self) -> None:
        """Let go of the connection. Safe to call twice."""
        with self._lock:
            self._closed = True
            self._drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- talking to the server --------------------------------------------------------------------------------

    def _locked(self, ask: Callable[[BlockingWire], Any], within_s: float | None = None) -> Any:
        with self._lock:
            self._ready()
            return self._call(ask, self._deadline_s if within_s is None else within_s)

    def _ready(self) -> None:
        if self._closed:
            raise QueueClosed(f"queue {self.name!r} was closed; make a new Queue", queue=self.name)
        if self._pid != os.getpid():
            # The parent's socket stays open in the parent; here it is only forgotten.
            self._begin()

    def _call(
        self, ask: Callable[[BlockingWire], Any], deadline_s: float, adds: Sequence[PackedJob] | None = None
    ) -> Any:
        """Ask until the server answers or time is up. What is asked changes nothing when repeated, or is numbered.

        `adds`: the jobs that this call stores. Then the error says whether it may have done so.
        """
        now = time.monotonic()
        give_up_at = now + deadline_s
        if now > self._stale_at:
            self._drop()  # a firewall may have forgotten it, and would not say so
        self._stale_at = now + self._idle_s
        command_s = self._connection.command_timeout_s
        is_short = deadline_s < command_s
        may_have_run, wait_s = False, _FIRST_WAIT_S
        while True:
            opened = False
            try:
                if self._wire is None:
                    left_s = max(_FIRST_WAIT_S, give_up_at - time.monotonic())
                    self._wire = open_wire(self._connection, self._keys.base, within_s=left_s)
                opened = True
                if is_short or may_have_run:
                    self._wire.wait_at_most(min(command_s, max(_FIRST_WAIT_S, give_up_at - time.monotonic())))
                reply = ask(self._wire)
                if is_short or may_have_run:
                    self._wire.wait_at_most(command_s)
                return reply
            except ServerUnavailable as error:
                cause: Exception = error  # the server said that it did nothing; another one or another moment will do
            except ConnectionLost as error:
                may_have_run = may_have_run or opened
                cause = error
            self._drop()
            left_s = give_up_at - time.monotonic()
            if left_s <= 0:
                if adds is None:
                    raise ConnectionLost(f"queue {self.name!r}: no answer within {deadline_s:g} s; {cause}") from cause
                if may_have_run:
                    job_id = adds[0].job_id if len(adds) == 1 else None
                    raise outcome_unknown(self.name, deadline_s, job_id) from cause
                raise ConnectionLost(f"queue {self.name!r}: nothing was written; {cause}") from cause
            time.sleep(min(wait_s, left_s))
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            if self._connection.revive is not None:
                self._connection.revive()

    def _drop(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None


class _Listener:
    """Reads a queue's events from the moment it was made, to learn when to look at a result again."""

    def __init__(self, connection: Connection, keys: QueueKeys) -> None:
        self._connection, self._keys = connection, keys
        self._wire: BlockingWire | None = None
        self._after = "$"

    def wait_for_end(self, job_id: str, within_ms: int) -> None:
        """Return when the job has ended, when time is up, or when nothing can be heard: looking again is right in all
        three."""
        try:
            if self._wire is None:
                self._wire = open_wire(self._connection, self._keys.base)
                self._wire.wait_at_most(_LISTEN_MS / 1000 + self._connection.command_timeout_s)
            call = self._wire.call
            if self._after == "$":
                newest = call("XREVRANGE", self._keys.events, "+", "-", "COUNT", 1)
                self._after = newest[0][0].decode() if newest else "0"
                return  # only from here on nothing is missed: the caller looks once more
            give_up_at = time.monotonic() + within_ms / 1000
            while (left_ms := int((give_up_at - time.monotonic()) * 1000)) > 0:
                reply = call("XREAD", "COUNT", 1_000, "BLOCK", left_ms, "STREAMS", self._keys.events, self._after)
                for entry_id, flat in reply[0][1] if reply else ():
                    self._after = entry_id.decode()
                    fields = dict(zip(flat[::2], flat[1::2], strict=False))
                    if fields.get(b"jobId") == job_id.encode() and fields.get(b"event") in (b"completed", b"failed"):
                        return
        except (ConnectionLost, ServerRefused):
            self.close()
            time.sleep(_FIRST_WAIT_S)  # the caller asks for the result next, and that call waits for the server

    def close(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None


def _fill_default() -> None:
    """Let a queue without a connection find the settings or the embedded server, as one of the façade does.

    By name: the façade fills that slot of the queue from above, and this module must not depend on what lies there.
    """
    _ = import_module("bullpen").Queue  # the first use of the name does it
