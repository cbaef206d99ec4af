"""Send adds to the server: many callers share a call, and no call stores anything twice.

Adds of one loop tick share one script call; what comes while it is in flight shares the next (group commit). Only a
caller that has long been alone is not made to wait for others. A call whose reply was lost is repeated with its number.
Where more waits than fits into one call, two callers take turns, so that Python packs the next batch while the server
stores the last; both use one connection, which keeps their order.

The usual call is sent and answered straight from the loop, without a task of its own. Everything unusual (no
connection yet, a lost reply, a refusal, a disk to wait for) goes on in a task. In: packed jobs. Out: every caller's
future gets its jobs, or the error. Elsewhere: checking and packing (`packing`), the script (`bullpen.wire.lua.add`).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from itertools import islice, repeat
from operator import itemgetter
from typing import Any, Final, NamedTuple

from bullpen._kernel.tuples import maker
from bullpen.errors import BullpenError, ConnectionLost, DurabilityUnknown, OutcomeUnknown, QueueFull
from bullpen.queue.actions import AsyncActions
from bullpen.queue.durability import MEMORY, Durability, DurableCalls, NotDurableInTime
from bullpen.queue.job import Job, new_mark
from bullpen.queue.packing import (
    MOST_BYTES_PER_CALL,
    MOST_JOBS_PER_CALL,
    PackedJob,
    Stored,
    add_arguments,
    add_keys,
    call_ttl_ms,
    clock_and_version,
    command_for_one,
    count_fitting,
    read_stored,
    size_of,
)
from bullpen.redis.calls import OBSERVE_EVERY_S, Caller, outcome_unknown
from bullpen.redis.client import Door
from bullpen.redis.socket import Wire, pack
from bullpen.redis.spin import Watch
from bullpen.wire.keys import QueueKeys
from bullpen.wire.scripts import SCRIPTS

_ALONE_AFTER: Final = 8
"""After this many calls with one job each, the next is sent at once without waiting for others, which saves a turn
of the loop. If others come all the same they share the next call, and from then on all wait for each other again."""
_SAY_WITHIN_S: Final = 0.3
_Answer = tuple[Any, bool]
"""The reply of a call, and whether its durability was not confirmed in time."""


class OneJob(NamedTuple):
    """The job of one `add`. Nearly all submissions: kept small."""

    packed: PackedJob
    durability: Durability
    future: asyncio.Future[Job]


_PACKED, _LEVEL = itemgetter(0), itemgetter(1)
_new_one = maker(OneJob)


class ManyJobs:
    """The jobs of one `add_many`, and the future that gets them when the fate of all is known."""

    __slots__ = ("_failure", "_left", "_stored", "deadline_s", "durability", "future", "packed", "sent")

    def __init__(
        self,
        packed: list[PackedJob],
        durability: Durability,
        future: asyncio.Future[list[Job]],
        deadline_s: float | None = None,
    ) -> None:
        self.packed, self.durability, self.future = packed, durability, future
        self.deadline_s = deadline_s
        """A deadline of its own. Such jobs share no call with others."""
        self.sent = 0
        """How many of the jobs are in calls already."""
        self._left = len(packed)
        self._stored: dict[int, list[Job]] = {}
        self._failure: Exception | None = None

    def take(self, begin: int, jobs: list[Job]) -> None:
        """These are stored. Pieces may come in any order: a lost reply holds up only its own."""
        self._stored[begin] = jobs
        self._settle(len(jobs))

    def fail(self, count: int, error: Exception) -> None:
        """How many met an error; the first one is reported."""
        self._failure = self._failure or error
        self._settle(count)

    def _settle(self, count: int) -> None:
        self._left -= count
        if self._left:
            return
        if self._failure is not None:
            _fail(self.future, self._failure)
        elif not self.future.done():
            self.future.set_result([job for begin in sorted(self._stored) for job in self._stored[begin]])


class _Batch:
    """The jobs of one call, whose they are, and where its reply goes: a wire treats it like a future."""

    __slots__ = ("adder", "caller", "deadline_s", "heard", "jobs", "level", "parts", "sent_at", "since", "wire")

    wire: Wire | None
    """Where it was sent to at once."""
    sent_at: float
    since: float | None
    """When the first of its jobs was given to us, if that was before the call was sent."""
    heard: int | None

    def __init__(
        self,
        adder: Adder,
        level: Durability,
        jobs: list[PackedJob],
        parts: list[tuple[OneJob | ManyJobs, int, int]],
    ) -> None:
        self.adder, self.level, self.jobs = adder, level, jobs
        self.parts = parts
        """Whose jobs, the first of them in this call, and how many."""
        self.caller: Caller | None = None
        self.since = None
        self.deadline_s = adder.deadline_s

    def done(self) -> bool:
        return False  # a call that was sent is answered, whoever stopped waiting for it

    def set_result(self, reply: Any) -> None:
        self.adder.on_reply(self, reply)

    def set_exception(self, error: BaseException) -> None:
        self.adder.on_trouble(self, error)

    def fail(self, error: Exception) -> None:
        is_unknown = isinstance(error, OutcomeUnknown)
        for owner, _, count in self.parts:
            own = error
            if is_unknown and (job_id := _only_id(owner)):  # each caller is told of its own job
                own = outcome_unknown(self.adder.queue_name, self.deadline_s, job_id)
                own.__cause__ = error.__cause__
            _fail_part(owner, count, own)


class _Alone:
    """The call of one job alone: as little as possible between its caller and the socket."""

    __slots__ = ("adder", "caller", "future", "heard", "packed", "sent_at", "wire")

    def __init__(
        self,
        adder: Adder,
        caller: Caller,
        packed: PackedJob,
        future: asyncio.Future[Job],
        wire: Wire,
        heard: int | None,
    ) -> None:
        self.adder, self.caller, self.packed, self.future = adder, caller, packed, future
        self.wire, self.heard, self.sent_at = wire, heard, time.monotonic()

    def done(self) -> bool:
        return False

    def set_result(self, reply: Any) -> None:
        self.adder.on_reply_alone(self, reply)

    def set_exception(self, error: BaseException) -> None:
        self.adder.on_trouble(self.as_batch(), error)

    def as_batch(self) -> _Batch:
        """The same call, for everything that is not the usual end."""
        owner = OneJob(self.packed, MEMORY, self.future)
        batch = _Batch(self.adder, MEMORY, [self.packed], [(owner, 0, 1)])
        batch.caller, batch.wire, batch.sent_at, batch.heard = self.caller, self.wire, self.sent_at, self.heard
        return batch


def _own_deadline(owner: OneJob | ManyJobs) -> float | None:
    return owner.deadline_s if isinstance(owner, ManyJobs) else None


def _only_id(owner: OneJob | ManyJobs) -> str | None:
    """The id that the caller gave its only job."""
    if isinstance(owner, OneJob):
        return owner.packed.job_id or None
    return (owner.packed[0].job_id or None) if len(owner.packed) == 1 else None


def _fail_part(owner: OneJob | ManyJobs, count: int, error: Exception) -> None:
    if isinstance(owner, OneJob):
        _fail(owner.future, error)
    else:
        owner.fail(count, error)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # a caller that was cancelled does not ask; that is no bug


class Adder:
    """The adds of one queue object in one event loop."""

    def __init__(
        self,
        door: Door,
        keys: QueueKeys,
        actions: AsyncActions,
        *,
        deadline_s: float,
        max_buffered: int,
        clock_offset_ms: int,
        before_first: Callable[[], Awaitable[None]] | None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._door = door
        self._keys, self._base = keys, keys.base
        self._actions = actions
        self.deadline_s, self._call_ttl_ms = deadline_s, call_ttl_ms(deadline_s)
        self._max_buffered = max_buffered
        self._clock_offset_ms, self._clock = clock_offset_ms, clock_and_version(clock_offset_ms)
        self._before_first = before_first
        self._free = [Caller(door, SCRIPTS["add"]), Caller(door, SCRIPTS["add"])]
        self._names = {caller.id: add_keys(keys, caller.id) for caller in self._free}
        self._within_s = door.connection.command_timeout_s
        self._durable: DurableCalls | None = None
        self._waiting: deque[OneJob | ManyJobs] = deque()
        self._buffered = 0  # jobs of `_waiting` that are in no call yet
        self._in_flight = 0
        self._is_exclusive = False  # the call in flight is one that no other may overtake
        self._is_planned = False
        self._alone = 0  # how many usual calls in a row held one job
        self._watch = Watch()
        self._observe_at = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._began: dict[asyncio.Future[Any], float] = {}
        """When adds began to wait behind a call that went on in a task: the server may be away, and their deadlines
        count from here."""
        self._when_idle: asyncio.Future[None] | None = None

    @property
    def queue_name(self) -> str:
        return self._keys.name

    def add(self, packed: PackedJob, durability: Durability) -> asyncio.Future[Job]:
        """Send this job with the next call. The future has the result."""
        if self._buffered >= self._max_buffered:
            raise QueueFull(
                f"queue {self._keys.name!r}: {self._max_buffered} adds already wait for the server; "
                "await some of them first",
                queue=self._keys.name,
            )
        future: asyncio.Future[Job] = self._loop.create_future()
        if self._alone >= _ALONE_AFTER and durability is MEMORY and not self._is_planned and not self._in_flight:
            wire = self._door.open_wire
            if wire is not None:
                self._send_alone(packed, future, wire)
                return future
        self._waiting.append(_new_one((packed, durability, future)))
        self._buffered += 1
        self._plan()
        return future

    def add_many(
        self, packed: list[PackedJob], durability: Durability, deadline_s: float | None = None
    ) -> asyncio.Future[list[Job]]:
        """Send these with the next calls. As large as its caller made it: the bound above is for many callers that do
        not see each other."""
        future: asyncio.Future[list[Job]] = self._loop.create_future()
        owner = ManyJobs(packed, durability, future, deadline_s)
        self._waiting.append(owner)
        self._buffered += len(packed)
        if deadline_s is not None:
            timer = self._loop.call_later(deadline_s, self._expire, owner)
            future.add_done_callback(lambda _: timer.cancel())
        self._plan()
        return future

    def _expire(self, owner: ManyJobs) -> None:
        """Its own deadline has come. What was not sent yet, behind calls that wait for longer, is not sent any more."""
        queue, seconds = self._keys.name, owner.deadline_s
        if owner in self._waiting and not owner.sent:
            self._waiting.remove(owner)
            self._buffered -= len(owner.packed)
            self._began.pop(owner.future, None)
            _fail(owner.future, ConnectionLost(f"queue {queue!r}: nothing was written; no answer within {seconds:g} s"))
            return
        # It is under way: whoever repeats it knows best what to say, but may be waiting for its first answer.
        error = outcome_unknown(queue, seconds or 0, _only_id(owner))
        timer = self._loop.call_later(_SAY_WITHIN_S, _fail, owner.future, error)
        owner.future.add_done_callback(lambda _: timer.cancel())

    def _plan(self) -> None:
        if not self._is_planned:
            # Not sent at once: adds of the same loop tick come along.
            self._is_planned = True
            self._loop.call_soon(self._flush)

    async def aclose(self) -> None:
        """Send what still waits, then let go."""
        if self._waiting or self._in_flight:
            self._when_idle = self._loop.create_future()
            await self._when_idle
        if self._durable is not None:
            self._durable.close()

    # ---- sending ----------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        """Send what waits, as far as it may go out now; the end of a call comes back here."""
        self._is_planned = False
        waiting = self._waiting
        if self._tasks and waiting:
            self._note_waiting(time.monotonic())
        while waiting and (not self._in_flight or self._may_send_more(waiting[0])):
            batch = self._next_batch()
            self._in_flight += 1
            try:
                self._send(batch)
            except Exception as error:  # noqa: BLE001 - whatever it is belongs to the callers that wait
                self._let_go(batch)
                batch.fail(error)
        if self._when_idle is not None and not waiting and not self._in_flight and not self._when_idle.done():
            self._when_idle.set_result(None)

    def _note_waiting(self, since: float) -> None:
        for owner in reversed(self._waiting):
            if owner.future in self._began:
                return  # and so are all before it
            self._began[owner.future] = since

    def _may_send_more(self, first: OneJob | ManyJobs) -> bool:
        if self._is_exclusive or not self._free or first.durability is not MEMORY:
            return False
        # A few that come while a call is in flight wait for its end and gather company; a full load need not.
        return isinstance(first, ManyJobs) or self._buffered >= MOST_JOBS_PER_CALL

    def _next_batch(self) -> _Batch:
        """At most 200 jobs and 1 MiB of one durability, at least one."""
        waiting = self._waiting
        owner = waiting[0]
        if len(waiting) == 1 and isinstance(owner, OneJob):  # a caller that is alone shall not pay for a crowd
            is_usual = owner.durability is MEMORY and self._before_first is None
            self._alone = self._alone + 1 if is_usual else 0
            waiting.popleft()
            self._buffered = 0
            return _Batch(self, owner.durability, [owner.packed], [(owner, 0, 1)])
        self._alone = 0
        return self._crowd() or self._mixture()

    def _crowd(self) -> _Batch | None:
        """The usual batch of many callers: single jobs of one level. None: any other batch."""
        waiting = self._waiting
        owners: list[Any] = list(islice(waiting, MOST_JOBS_PER_CALL))
        if set(map(type, owners)) != {OneJob} or len(set(map(id, map(_LEVEL, owners)))) != 1:
            return None
        jobs = list(map(_PACKED, owners))
        if size_of(jobs) > MOST_BYTES_PER_CALL:
            return None
        if len(owners) == len(waiting):
            waiting.clear()
        else:
            for _ in owners:
                waiting.popleft()
        self._buffered -= len(jobs)
        return _Batch(self, owners[0].durability, jobs, list(zip(owners, repeat(0), repeat(1), strict=False)))

    def _mixture(self) -> _Batch:
        waiting = self._waiting
        level, deadline_s = waiting[0].durability, None
        jobs: list[PackedJob] = []
        parts: list[tuple[OneJob | ManyJobs, int, int]] = []
        bytes_left = MOST_BYTES_PER_CALL
        while waiting and len(jobs) < MOST_JOBS_PER_CALL:
            owner = waiting[0]
            if owner.durability != level or (jobs and _own_deadline(owner) != deadline_s):
                break
            deadline_s = _own_deadline(owner)
            begin, rest = (0, [owner.packed]) if isinstance(owner, OneJob) else (owner.sent, owner.packed)
            count = count_fitting(rest, begin, MOST_JOBS_PER_CALL - len(jobs), bytes_left, at_least=0 if jobs else 1)
            if not count:
                break
            piece = rest[begin : begin + count]
            jobs += piece
            parts.append((owner, begin, count))
            bytes_left -= size_of(piece)
            if isinstance(owner, ManyJobs):
                owner.sent += count
            if begin + count == len(rest):
                waiting.popleft()
        self._buffered -= len(jobs)
        batch = _Batch(self, level, jobs, parts)
        if deadline_s is not None:
            batch.deadline_s = deadline_s
        return batch

    def _send(self, batch: _Batch) -> None:
        batch.sent_at, batch.heard = time.monotonic(), self._actions.heard
        if self._began:
            began = [self._began[owner.future] for owner, _, _ in batch.parts if owner.future in self._began]
            batch.since = min(began, default=None)
        if batch.level is not MEMORY or self._before_first is not None:
            self._is_exclusive = True
            self._start(batch, self._send_with_care(batch))
            return
        caller = batch.caller = self._free.pop()
        args = self._arguments(batch, caller.next_number())
        wire = batch.wire = self._door.open_wire
        if wire is None:
            self._start(batch, self._repeat(batch, caller, may_have_run=False))
        else:
            self._door.evaluate_soon(wire, SCRIPTS["add"], self._names[caller.id], args, batch)

    def _send_alone(self, packed: PackedJob, future: asyncio.Future[Job], wire: Wire) -> None:
        caller = self._free.pop()
        call = _Alone(self, caller, packed, future, wire, self._actions.heard)
        self._in_flight += 1
        try:
            number, ttl_ms = caller.next_number(), self._call_ttl_ms
            command = command_for_one(packed, self._names[caller.id][0], self._base, number, ttl_ms, self._clock)
            wire.send_to(call, pack(command), within_s=self._within_s)
            if until := self._watch.begin(call.sent_at):
                wire.stay_awake(until)
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to the caller that waits
            self._let_go(call)
            _fail(future, error)

    def _arguments(self, batch: _Batch, number: int) -> list[Any]:
        ttl_ms = self._call_ttl_ms if batch.deadline_s == self.deadline_s else call_ttl_ms(batch.deadline_s)
        return add_arguments(self._keys, batch.jobs, number, ttl_ms, self._clock)

    # ---- what became of a call --------------------------------------------------------------------------------

    def on_reply(self, batch: _Batch, reply: Any) -> None:
        """The usual end. The next call goes out first: the server stores it while we hand out this one's jobs."""
        self._end(batch)
        self._hand_out(batch, reply, is_late=False)

    def on_reply_alone(self, call: _Alone, reply: Any) -> None:
        """As `on_reply`, for a call with one job."""
        self._in_flight -= 1
        self._free.append(call.caller)
        if self._waiting or self._when_idle is not None:
            self._flush()
        try:
            stored = read_stored(reply)
            now = time.monotonic()
            self._watch.end(now)
            if stored.taken:
                self._hand_out(call.as_batch(), reply, is_late=False)
                return
            mark, listener = None, self._actions.results
            if call.heard is not None and listener is not None:
                mark = new_mark((call.heard, stored.event_before_end()))
                listener.foresee(mark)  # first of all: the job may have begun already
            job = Job(self._actions, stored.record(call.packed))
            if mark is not None:
                job.mark = mark
            if now >= self._observe_at:
                self._observe(stored.now, call.sent_at, now)
            if not call.future.done():
                call.future.set_result(job)
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to the caller that waits
            _fail(call.future, error)

    def on_trouble(self, batch: _Batch, error: BaseException) -> None:
        """The call was refused, or its reply is lost."""
        self._start(batch, self._recover(batch, error))

    def _start(self, batch: _Batch, work: Coroutine[Any, Any, _Answer]) -> None:
        self._note_waiting(batch.sent_at)  # they came then, at the earliest
        task = self._loop.create_task(self._finish(batch, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _finish(self, batch: _Batch, work: Coroutine[Any, Any, _Answer]) -> None:
        """The end of a call that continued in a task; as `on_reply`, or every caller gets the error."""
        try:
            reply, is_late = await work
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to the callers that wait
            self._end(batch)
            batch.fail(error)
        else:
            self._end(batch)
            self._hand_out(batch, reply, is_late=is_late)

    async def _recover(self, batch: _Batch, error: BaseException) -> _Answer:
        caller, wire = batch.caller, batch.wire
        assert caller is not None
        assert wire is not None
        return await self._repeat(batch, caller, may_have_run=await caller.may_have_run(error, wire))

    async def _repeat(self, batch: _Batch, caller: Caller, *, may_have_run: bool) -> _Answer:
        reply = await caller.repeat(
            self._names[caller.id],
            partial(self._arguments, batch),
            queue=self._keys.name,
            deadline_s=batch.deadline_s,
            since=batch.sent_at if batch.since is None else batch.since,
            may_have_run=may_have_run,
        )
        return reply, False

    async def _send_with_care(self, batch: _Batch) -> _Answer:
        """Alone: the first call of all, and those that have to be durable."""
        if self._before_first is not None:
            await self._before_first()
            self._before_first = None
        if batch.level is not MEMORY:
            return await self._call_durably(batch)
        caller = batch.caller = self._free.pop()
        caller.next_number()
        return await self._repeat(batch, caller, may_have_run=False)

    async def _call_durably(self, batch: _Batch) -> _Answer:
        if self._durable is None:
            door = Door(self._door.connection, key=self._keys.base)
            self._durable = DurableCalls(door, Caller(door, SCRIPTS["add"]))
        names = add_keys(self._keys, self._durable.caller_id)
        try:
            reply = await self._durable.call(
                batch.level,
                names,
                call_ttl_ms(batch.deadline_s),
                partial(self._arguments, batch),
                queue=self._keys,
                deadline_s=batch.deadline_s,
            )
        except NotDurableInTime as error:
            return error.args[0], True
        return reply, False

    def _end(self, batch: _Batch) -> None:
        self._let_go(batch)
        self._flush()

    def _let_go(self, call: _Batch | _Alone) -> None:
        self._in_flight -= 1
        self._is_exclusive = False
        if call.caller is not None:
            self._free.append(call.caller)
        if self._began and isinstance(call, _Batch):
            for owner, _, _ in call.parts:
                self._began.pop(owner.future, None)

    def _hand_out(self, batch: _Batch, reply: Any, *, is_late: bool) -> None:
        """Give everybody its jobs; never raises."""
        try:
            stored = read_stored(reply)
            now = time.monotonic()
            if now >= self._observe_at:
                self._observe(stored.now, batch.sent_at, now)
            actions = self._actions
            jobs = [Job(actions, record) for record in stored.records(batch.jobs)]
            if batch.heard is not None:
                mark = new_mark((batch.heard, stored.event_before_end()))
                for job in jobs:
                    job.mark = mark
            if stored.taken:
                self._put_others(stored, batch, jobs)
            if batch.level is not MEMORY and not is_late:
                for job in jobs:
                    job.durability = str(batch.level)
            at = 0
            for owner, begin, count in batch.parts:
                if is_late:
                    _fail_part(owner, count, DurabilityUnknown(self._keys.name, jobs[at], str(batch.level)))
                elif type(owner) is OneJob:
                    if not owner.future.done():
                        owner.future.set_result(jobs[at])
                else:
                    assert isinstance(owner, ManyJobs)
                    owner.take(begin, jobs[at : at + count])
                at += count
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to the callers that wait
            batch.fail(error)

    def _put_others(self, stored: Stored, batch: _Batch, jobs: list[Job]) -> None:
        """Put the jobs that were there first in the places of those that were not stored. Owners of jobs that were
        refused hear of it now, and nothing afterwards."""
        refused: dict[int, BullpenError] = {}
        for index, other in stored.others(batch.jobs, self._keys.name):
            if isinstance(other, BullpenError):
                refused[index] = other
            else:  # without a mark: such a job may have ended long ago
                job = jobs[index] = Job(self._actions, other.record)
                job.added, job.blocked_by = other.added, other.blocked_by
        at = 0
        for owner, _, count in batch.parts if refused else ():
            for index in range(at, at + count):
                if index in refused:
                    _fail(owner.future, refused[index])
            at += count

    def _observe(self, server_now: bytes, sent_at: float, now: float) -> None:
        self._observe_at = now + OBSERVE_EVERY_S
        self._door.connection.clock.observe(int(server_now) - self._clock_offset_ms, sent_at, now)
