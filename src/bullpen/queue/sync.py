"""A blocking queue for scripts, Flask, Django and everything else without an event loop.

    from bullpen.sync import Queue

    queue = Queue("emails")
    job = queue.add("welcome", {"to": "ada@example.com"})
    print(job.result(timeout=10_000))

In: names, data, options, as the asynchronous `Queue` takes them. Out: jobs. No loop and no thread: each call uses one
connection and returns when the server has answered. Adds are numbered calls, so one whose reply was lost is repeated
and still stored once. May be used by several threads, one call at a time, and after a fork: the child opens its own
connection. Elsewhere: all but adding (`blocking_faces`, generated from the asynchronous classes), how calls are made
(`blocking`), workers (`bullpen.worker`), packing (`bullpen.queue.packing`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from importlib import import_module
from types import TracebackType
from typing import Any, Self, Unpack

from bullpen._kernel import tracing
from bullpen._kernel.duration import check_int
from bullpen.errors import BullpenError, ConnectionLost, DurabilityUnknown, ServerRefused
from bullpen.queue.arguments import JobDefaults, NewJobArguments
from bullpen.queue.blocking import BlockingAdministration, BlockingCalls, drive, seal_blocking
from bullpen.queue.blocking_faces import DeadLetters, FailedSetStore, Job, Lanes, QueueFace
from bullpen.queue.codec import Codec, Sealer
from bullpen.queue.durability import MEMORY, Durability
from bullpen.queue.job import Added, NewJob
from bullpen.queue.job import Job as AsyncJob
from bullpen.queue.packing import (
    MOST_BYTES_PER_CALL,
    MOST_JOBS_PER_CALL,
    PackedJob,
    Stored,
    add_arguments,
    call_ttl_ms,
    clock_and_version,
    command_for_one,
    count_fitting,
    pack_job,
    pack_jobs,
    read_add_deadline,
    read_stored,
)
from bullpen.queue.sealed_add import NOTHING_WRITTEN
from bullpen.redis.blocking import open_wire
from bullpen.redis.client import Connection
from bullpen.redis.spin import Watch
from bullpen.wire.options import make_defaults
from bullpen.wire.scripts import SCRIPTS

__all__ = ["DeadLetters", "FailedSetStore", "Job", "Lanes", "Queue"]


class Queue(QueueFace):
    """The blocking twin of `bullpen.Queue`: the same names, options and errors. `defaults` are job options."""

    _inner: BlockingAdministration

    def __init__(
        self,
        name: str,
        *,
        connection: str | Connection | None = None,
        prefix: str | None = None,
        events_max_len: int | None = None,
        dead_letter_suffix: str = "-dlq",
        add_deadline: int | timedelta | None = None,
        durability: Durability | str = MEMORY,
        clock_offset_ms: int = 0,
        codec: Codec | None = None,
        **defaults: Unpack[JobDefaults],
    ) -> None:
        if events_max_len is not None:
            check_int("events_max_len", events_max_len, minimum=1)
        _fill_default()
        inner = BlockingAdministration(
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
        super().__init__(inner, drive)
        self._calls = BlockingCalls(inner.line, inner.keys, SCRIPTS["add"])
        self._clock = clock_and_version(clock_offset_ms)
        self._events_max_len = events_max_len
        self._watch = Watch()

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
        inner = self._inner
        deadline_s, level = self._terms(durability, add_deadline)
        if tracing.tracer is None or "tm" in options:
            return self._add(pack_job(name, data, inner.defaults, options, inner.limit_bytes), deadline_s, level)
        with tracing.sending(*("bullmq", self.name, "add"), bullmq__queue__name=self.name) as span:
            packed = pack_job(name, data, inner.defaults, options, inner.limit_bytes)
            added = self._add(packed, deadline_s, level)
            span.note("messaging.message.id", added.id)
            return added

    def add_many(
        self,
        jobs: Iterable[NewJob | tuple[str, Any]],
        *,
        durability: Durability | str | None = None,
        add_deadline: int | timedelta | None = None,
    ) -> list[Job]:
        """Store many jobs in order, hundreds per call. All are checked before the first is sent; each call is atomic,
        the whole is not."""
        deadline_s, level = self._terms(durability, add_deadline)
        with tracing.sending(*("bullmq", self.name, "addBulk"), bullmq__queue__name=self.name) as span:
            packed = pack_jobs(jobs, self._inner.defaults, self._inner.limit_bytes)
            span.note("messaging.batch.message_count", len(packed))
            sealer = self._inner.ready().sealer
            if sealer is not None:
                return self._add_sealed(sealer, packed, deadline_s, level)
            return self._store_all(packed, deadline_s, level)

    def _terms(
        self, durability: Durability | str | None, add_deadline: int | timedelta | None
    ) -> tuple[float, Durability]:
        inner = self._inner
        deadline_s = read_add_deadline(add_deadline) or inner.deadline_s
        return deadline_s, inner.durability if durability is None else Durability.read(durability)

    def _add(self, job: PackedJob, deadline_s: float, level: Durability) -> Job:
        actions = self._inner.ready()
        if actions.sealer is not None:
            return self._add_sealed(actions.sealer, [job], deadline_s, level)[0]
        if level is not MEMORY:
            return self._store((job,), deadline_s, level)[0]
        self._write_options()
        line, calls, ttl_ms = self._inner.line, self._calls, call_ttl_ms(deadline_s)
        with line.lock:
            number = calls.next_number()
            command = command_for_one(job, calls.key, self.keys.base, number, ttl_ms, self._clock)
            until = self._watch.begin(time.monotonic())
            reply = line.call(
                lambda wire: wire.run_script(SCRIPTS["add"], command, watch_until=until), deadline_s, [job]
            )
            self._watch.end(time.monotonic())
        stored = read_stored(reply)
        if stored.taken:
            return self._stored_jobs(stored, (job,))[0]
        return Job(AsyncJob(actions, stored.record(job)), self._run)

    def _add_sealed(self, sealer: Sealer, packed: list[PackedJob], deadline_s: float, level: Durability) -> list[Job]:
        sealed = seal_blocking([sealer] * len(packed), packed)
        try:
            jobs = self._store_all(sealed, deadline_s, level)
        except NOTHING_WRITTEN:
            if len(sealed) == 1:
                self._run(sealer.forget(sealed[0].data))
            raise
        for plain, stored, job in zip(packed, sealed, jobs, strict=True):
            if job.added is Added.CREATED:
                job._inner.record = job.record.opened(plain.data, None)
            elif job.added is Added.DUPLICATE:
                self._run(sealer.forget(stored.data))
        return jobs

    def _store_all(self, packed: list[PackedJob], deadline_s: float, level: Durability) -> list[Job]:
        stored: list[Job] = []
        while len(stored) < len(packed):
            begin = len(stored)
            count = count_fitting(packed, begin, MOST_JOBS_PER_CALL, MOST_BYTES_PER_CALL, at_least=1)
            stored += self._store(packed[begin : begin + count], deadline_s, level)
        return stored

    def _store(self, batch: Sequence[PackedJob], deadline_s: float, level: Durability) -> list[Job]:
        self._write_options()
        keys, ttl_ms, clock = self.keys, call_ttl_ms(deadline_s), self._clock

        def make(number: int) -> list[Any]:
            return add_arguments(keys, batch, number, ttl_ms, clock)

        reply, is_late = self._calls.send(make, level, deadline_s, batch)
        jobs = self._stored_jobs(read_stored(reply), batch)
        if is_late:
            raise DurabilityUnknown(self.name, jobs[0], str(level))
        for job in jobs:
            job._inner.durability = str(level)
        return jobs

    def _stored_jobs(self, stored: Stored, batch: Sequence[PackedJob]) -> list[Job]:
        actions = self._inner.ready()
        jobs = [AsyncJob(actions, record) for record in stored.records(batch)]
        if stored.taken:
            for index, other in stored.others(batch, self.name):
                if isinstance(other, BullpenError):
                    raise other
                job = jobs[index] = AsyncJob(actions, other.record)
                job.added, job.blocked_by = other.added, other.blocked_by
        return [Job(job, self._run) for job in jobs]

    def _write_options(self) -> None:
        """Write what was asked of the whole queue, once, with the first adds."""
        if self._events_max_len is not None:
            self.set_events_max_len(self._events_max_len)
            self._events_max_len = None

    # ---- its connection ---------------------------------------------------------------------------------------

    def is_healthy(self, *, timeout_ms: int = 2_000) -> bool:
        """Whether the server of this queue answers in time. Never raises, writes nothing."""
        try:
            # Its greeting ends with a PING.
            open_wire(self.connection, self.keys.base, within_s=timeout_ms / 1000).close()
        except (ConnectionLost, ServerRefused):
            return False
        return not self._inner.is_closed

    def close(self) -> None:
        """Let go of the connection. Safe to call twice."""
        self._inner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _fill_default() -> None:
    """Let a queue without a connection find the settings or the embedded server, as one of the façade does.

    By name: the façade fills that slot of the queue from above, and this module must not depend on what lies there.
    """
    _ = import_module("bullpen").Queue  # the first use of the name does it
