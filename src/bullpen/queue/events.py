"""Read a queue's events, in order, and notice when some were trimmed before we came.

In: the stream that every BullMQ client writes. Out: an async iterator of events; a listener that resolves waits for
results. The position is read from the server before `ready`, so what is added right after is not missed. Elsewhere:
what an event holds (`bullpen.wire.events`).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

from bullpen._kernel import json
from bullpen._kernel.ids import check_queue_name
from bullpen._kernel.logs import get_logger
from bullpen.errors import (
    BullpenError,
    EventsLost,
    JobCancelled,
    JobFailed,
    JobNotFound,
    NotJson,
    QueueClosed,
    ServerRefused,
    require,
)
from bullpen.queue.actions import QueueActions
from bullpen.queue.codec import Sealer
from bullpen.queue.job import JobState, Mark
from bullpen.queue.late_results import PATIENCE_S, Circumstances, late_result, lists_worker
from bullpen.queue.late_wakeups import note_late_result
from bullpen.redis.client import Connection, Door
from bullpen.redis.default import connection_for, prefix_for
from bullpen.redis.socket import HOLE, Form, Receiver
from bullpen.wire.cancels import reason_in
from bullpen.wire.events import QueueEvent
from bullpen.wire.keys import QueueKeys, client_name
from bullpen.wire.scripts import SCRIPTS

logger = get_logger("bullpen.events")

EventCallback = TypeVar("EventCallback", bound=Callable[[Any], Any])

_BLOCK_MS = 5_000
_WITHIN_S = _BLOCK_MS / 1000 + 2.0
"""A blocked read may be answered late by a server tick; after this it is taken for dead."""
_PAGE = 1_000
_ASK_AFTER_S = 1.0
_ASKED_TOGETHER = 100
"""So many results are read in one round trip when events were lost: more would hold up other calls."""
_ASK_AT_ONCE = 20
"""So many waits ask together, before the reader has another chance to answer the rest."""
_EVENT_WITHIN_S = 3.0


class _Closed(Exception):
    """We closed the door ourselves: reading ends."""


class EventStream:
    """The raw reader of a stream: pages of (id, fields) after a position, for ever, over reconnects."""

    def __init__(self, door: Door, key: str, position: str | None = None) -> None:
        """Without a position it begins behind what is there at `start`."""
        self._door = door
        self._key = key
        self._position = position
        self._read_so_far = -1  # events ever written up to our position; -1 when the server cannot tell
        self._in_doubt = True  # whether something may be missing between our position and what the stream holds
        self._is_new = False  # the position is an event that was written just now
        self._read_form = Form((*_blocked_read(key, "")[:-1], HOLE))

    @property
    def position(self) -> str:
        """Id of the last event that was read."""
        return self._position or "0-0"

    def glance(self, event_id: bytes, receiver: Receiver) -> bool:
        """Go on behind this event, which was written just now, wherever we were; not while a page is waited for. The
        blocked read is sent without waiting: the receiver gets the reply, for `take_in`, from within the loop. False:
        there is no open connection, read a page instead."""
        self._position, self._read_so_far, self._in_doubt, self._is_new = event_id.decode(), -1, False, True
        wire = self._door.open_wire
        if wire is None:
            return False
        wire.send_to(receiver, self._read_form.fill(event_id), within_s=_WITHIN_S)
        return True

    def take_in(self, reply: Any) -> list[Any]:
        """The entries of a glance."""
        self._is_new = False
        entries: list[Any] = reply[0][1] if reply else []
        if entries:
            self._position = entries[-1][0].decode()
        return entries

    def doubt(self) -> None:
        """A glance was lost: something may be missing."""
        self._in_doubt = True

    def has_passed(self, event_id: bytes) -> bool:
        """Whether we have read further than this event."""
        return event_id.decode() != self.position and not _after(event_id, self.position)

    async def start(self) -> None:
        """Fix the position; waits for a server that is away."""
        while self._position is None:
            try:
                _, written, _, _, newest = await self._evaluate("$")
            except ConnectionError:
                await self._pause()
            else:
                self._position = newest.decode() or "0-0"
                self._read_so_far = written

    async def next_page(self) -> tuple[bool, list[Any]]:
        """(were events lost before this page?, entries). Waits until there is at least one, or a loss to report."""
        if self._position is None:
            await self.start()
        while True:
            try:
                lost, entries = await (self._read_checked() if self._in_doubt else self._read_blocked())
            except ConnectionError:
                self._in_doubt = True
                await self._pause()
                continue
            if entries:
                self._position = entries[-1][0].decode()
                if self._read_so_far >= 0:
                    self._read_so_far += len(entries)
            if entries or lost:
                return lost, entries

    async def _read_checked(self) -> tuple[bool, list[Any]]:
        """What is there now, and whether events behind our position were trimmed unread, or deleted with the stream."""
        assert self._position is not None
        self._in_doubt = False
        entries, written, length, oldest, newest = await self._evaluate(self._position)
        if written >= 0 and self._read_so_far >= 0:
            trimmed = written - length  # events that are no longer in the stream
            is_another = written < self._read_so_far + len(entries)  # the stream was deleted; perhaps it has begun anew
            lost = is_another or trimmed > self._read_so_far
            self._read_so_far = trimmed if is_another else max(self._read_so_far, trimmed)
            return lost, entries
        if not oldest or not _after(newest, self._position):
            return False, entries
        # Redis 6.2 counts nothing: our last event being gone is a suspicion, and suspicion is worth telling.
        self._read_so_far = -1
        return self._position != "0-0" and _after(oldest, self._position), entries

    async def _evaluate(self, after: str) -> Any:
        return await self._door.evaluate(SCRIPTS["read_events"], [self._key], [after, _PAGE])

    async def _read_blocked(self) -> tuple[bool, list[Any]]:
        """Wait for what comes next. While our last event is still in the stream, nothing behind it can be gone.

        Both commands go in one write, and a server runs what one client sent together without another in between.
        """
        read = _blocked_read(self._key, self.position)
        if self._is_new:
            self._is_new = False
            reply = await self._door.call(*read, within_s=_WITHIN_S)
            return False, list(reply[0][1]) if reply else []
        known, reply = await self._door.call_two(
            ("XRANGE", self._key, self.position, self.position), read, within_s=_WITHIN_S
        )
        for answer in (known, reply):
            if isinstance(answer, Exception):
                raise answer
        self._in_doubt = (
            not known
        )  # then the page is read again, with the counts that tell whether something is missing
        return False, list(reply[0][1]) if reply and known else []

    async def _pause(self) -> None:
        if self._door.closed:
            raise _Closed
        await asyncio.sleep(self._door.reconnect_wait_s())


def _blocked_read(key: str, position: str) -> tuple[str | int, ...]:
    return ("XREAD", "COUNT", _PAGE, "BLOCK", _BLOCK_MS, "STREAMS", key, position)


def _after(entry_id: bytes, position: str) -> bool:
    left, right = (tuple(map(int, text.split("-"))) for text in (entry_id.decode(), position))
    return left > right


class QueueEvents:
    """The events of one queue as an async iterator.

        async with QueueEvents("emails", connection=url) as events:
            async for event in events:
                print(event.event, event.job_id)

    Entering waits until the position is fixed: events of jobs added afterwards are seen. Raises EventsLost when the
    stream was trimmed before it was read (raise `events_max_len`, or read faster); iterate again to go on with what
    is there. Instead of iterating, give functions to `on` and `await events.run()`.
    """

    def __init__(
        self,
        queue: str,
        *,
        connection: str | Connection | None = None,
        prefix: str | None = None,
        after: str | None = None,
    ) -> None:
        self._keys = QueueKeys(prefix_for(prefix), check_queue_name(queue))
        base = self._keys.base
        self._door = Door(connection_for(connection, base), client_name(self._keys.prefix, queue) + ":qe", key=base)
        self._stream = EventStream(self._door, self._keys.events, after)
        self._waiting: list[QueueEvent] = []
        self._callbacks: dict[str, list[tuple[Callable[[Any], Any], bool]]] = {}
        """By name; True: for the next time only."""

    async def __aenter__(self) -> Self:
        await self._stream.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._door.close()

    def on(self, event: str, callback: EventCallback) -> EventCallback:
        """Let `run` call `callback` for each event of this name: one of BullMQ's, or one's own.

        `completed:42` means the events of that name of job 42; `error` gets an EventsLost where events were trimmed
        unread. Callbacks may be async: `run` waits for one before it calls the next. What they raise is logged.
        """
        return self._listen(event, callback, once=False)

    def once(self, event: str, callback: EventCallback) -> EventCallback:
        """As `on`, for the next such event only."""
        return self._listen(event, callback, once=True)

    def off(self, event: str, callback: Callable[..., Any]) -> bool:
        """Call it no more, however often it was given to `on` or `once`. False when it was not."""
        listed = self._callbacks.pop(event, [])
        left = [one for one in listed if one[0] != callback]
        if left:
            self._callbacks[event] = left
        return len(left) < len(listed)

    def _listen(self, event: str, callback: EventCallback, *, once: bool) -> EventCallback:
        require("event", isinstance(event, str) and event != "", "the name of an event", event)
        require("callback", callable(callback), "a function", callback)
        self._callbacks.setdefault(event, []).append((callback, once))
        return callback

    async def run(self) -> None:
        """Read until closed, and call what was given to `on` and `once`, in the order of the events."""
        while True:
            lost, events = await self.page()
            if lost:
                await self._call("error", self._loss())
            elif not events:
                return
            for event in events:
                await self._call(event.event, event)
                if event.job_id is not None:
                    await self._call(f"{event.event}:{event.job_id}", event)

    async def _call(self, name: str, told: QueueEvent | EventsLost) -> None:
        for callback, is_once in tuple(self._callbacks.get(name, ())):
            if is_once:
                self.off(name, callback)
            try:
                result = callback(told)
                if inspect.isawaitable(result):
                    await result
            except Exception:
                logger.exception("callback for %r of the events of queue %r failed", name, self._keys.name)

    def _loss(self) -> EventsLost:
        return EventsLost(
            f"events of queue {self._keys.name!r} were trimmed before they were read; "
            "the stream is too short for this reader. Iterate again to go on",
            queue=self._keys.name,
        )

    async def page(self) -> tuple[bool, list[QueueEvent]]:
        """For readers of many events: (were some trimmed unread before these?, all that are there now).

        Waits until there is one, or a loss to report. No events and no loss: this object was closed.
        """
        if self._waiting:
            events, self._waiting = self._waiting[::-1], []
            return False, events
        try:
            lost, entries = await self._stream.next_page()
        except _Closed:
            return False, []
        return lost, [QueueEvent.parse(entry_id, fields) for entry_id, fields in entries]

    def __aiter__(self) -> AsyncIterator[QueueEvent]:
        return self

    async def __anext__(self) -> QueueEvent:
        if not self._waiting:
            try:
                lost, entries = await self._stream.next_page()
            except _Closed:
                raise StopAsyncIteration from None
            self._waiting = [QueueEvent.parse(entry_id, fields) for entry_id, fields in reversed(entries)]
            if lost:
                raise self._loss()
        return self._waiting.pop()


class _Glance:
    """Where the reply of a glance goes: what it tells is known where it is read, without a turn of the loop between."""

    __slots__ = ("_listener",)

    def __init__(self, listener: ResultListener) -> None:
        self._listener = listener

    def done(self) -> bool:
        return False

    def set_result(self, reply: Any, /) -> None:
        self._listener.on_glance(reply)

    def set_exception(self, error: BaseException, /) -> None:
        self._listener.on_lost_glance()  # the reading tries again, and meets what lasts


class ResultListener:
    """Resolves waits for results from one event stream per queue object; started by the first wait.

    It reads only while somebody waits. A job that was added here knows an event before its end, so the next wait goes
    on from there: what came between two waits is neither read nor missed. Whoever asks for the result of each job that
    it adds will do so again: then the reading begins with the reply to the add, before the job's end and not after it.
    """

    def __init__(self, connection: Connection, keys: QueueKeys, actions: QueueActions) -> None:
        self._keys = keys
        self._actions = actions
        self._door = Door(connection, client_name(keys.prefix, keys.name) + ":qe", key=keys.base)
        self._stream = EventStream(self._door, keys.events)
        self._waits: dict[str, list[asyncio.Future[Any]]] = {}
        self._patience: deque[tuple[float, str, weakref.ref[asyncio.Future[Any]]]] = deque()
        self._patience_ends: asyncio.TimerHandle | None = None
        self._impatient: deque[tuple[str, asyncio.Future[Any]]] = deque()
        self._asking: asyncio.Task[None] | None = None
        self._expecting: set[asyncio.TimerHandle] = set()
        self._noting: set[asyncio.Task[None]] = set()
        self.heard: int | None = None
        """How many finished jobs were heard of so far; None while the position is not fixed."""
        self._ready: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._is_resting = False
        """Nothing is read, because nobody waits."""
        self._is_asked = False
        """The result of the last job was waited for."""
        self._wanted = asyncio.Event()
        self._glance = _Glance(self)
        self._worker_seen: tuple[float, bool | None] = (-math.inf, None)

    def wait(self, job_id: str, timeout_ms: int | None, mark: Mark | None) -> Coroutine[Any, Any, Any]:
        """The value of the job, once it is done."""
        return self._wait(job_id, mark) if timeout_ms is None else self._wait_within(timeout_ms, job_id, mark)

    async def _wait_within(self, timeout_ms: int, job_id: str, mark: Mark | None) -> Any:
        try:
            async with asyncio.timeout(timeout_ms / 1000) as limit:
                return await self._wait(job_id, mark)
        except TimeoutError:
            if not limit.expired():
                raise
            raise late_result(self._keys, job_id, timeout_ms, await self._circumstances(job_id)) from None

    async def _circumstances(self, job_id: str) -> Circumstances:
        """Why a job has not ended yet. Must not take long, and must not fail."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                state = await self._actions.state_of(job_id)
                is_paused = bool(await self._actions.command("HEXISTS", self._keys.meta, "paused"))
                # A worker with no free slot need not be in the list; the lock says that it lives.
                is_held = state is JobState.ACTIVE and await self._actions.command("EXISTS", self._keys.lock(job_id))
                has_worker = True if is_held else await self._has_worker()
                return Circumstances(state, has_worker=has_worker, is_paused=is_paused)
        except (TimeoutError, BullpenError):
            return Circumstances()

    async def _has_worker(self) -> bool | None:
        """None: the server does not let us know. Asked at most once a second: the answer of a server with many clients
        is long, and somebody may wait for many jobs, or for one again and again."""
        asked_at, answer = self._worker_seen
        if time.monotonic() - asked_at > 1:
            try:
                answer = lists_worker(self._keys, await self._actions.command("CLIENT", "LIST"))
            except ServerRefused:
                answer = None
            self._worker_seen = time.monotonic(), answer
        return answer

    async def _wait(self, job_id: str, mark: Mark | None) -> Any:
        """When the job's end is certainly still to come, asking for it would be in vain: that spares a third of the
        commands of a short job. But whoever removes a job need not say so, hence a look when nothing comes for a
        while."""
        future = self._register(job_id)
        try:
            if self._go_on(mark) if self.heard is not None else await self._begin():
                self._be_patient(job_id, future)
                return await future  # whoever tells it has forgotten the wait
        except BaseException:
            self._forget(job_id, future)
            raise
        return await self._ask(job_id, future)

    async def _ask(self, job_id: str, future: asyncio.Future[Any]) -> Any:
        """After the position is fixed: either the job has finished already, or its event is still to come."""
        try:
            finished, value = await self._read_stored(job_id, future)
            return value if finished else await future
        finally:
            self._forget(job_id, future)

    async def _read_stored(self, job_id: str, future: asyncio.Future[Any]) -> tuple[bool, Any]:
        """(has it finished?, its value); not finished also when the wait was told meanwhile."""
        try:
            return await self._actions.read_result(job_id)
        except JobNotFound:
            # It may have ended, and gone by its own retention, since we began to listen.
            await self._look_behind_position()
            if not future.done():
                raise
            return False, None

    async def _ask_for_impatient(self) -> None:
        """Look for the jobs that nothing was heard of for a while. Few at a time: when they are many, then because the
        loop or the server is slow, and most of them are told by the next page of events."""
        while self._impatient:
            some: list[tuple[str, asyncio.Future[Any]]] = []
            while self._impatient and len(some) < _ASK_AT_ONCE:
                job_id, future = self._impatient.popleft()
                if not future.done():
                    some.append((job_id, future))
            await asyncio.gather(*(self._ask_for(job_id, future) for job_id, future in some))
        self._asking = None

    async def _ask_for(self, job_id: str, future: asyncio.Future[Any]) -> None:
        try:
            finished, value = await self._read_stored(job_id, future)
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to the caller that waits
            if future.done():
                return
            future.set_exception(error)
            finished = isinstance(error, JobFailed)
        else:
            if not finished or future.done():
                return
            future.set_result(value)
        self._forget(job_id, future)
        if finished:
            self._expect_event(job_id)

    def _expect_event(self, job_id: str) -> None:
        """The job has finished, and no event has told so. Unless that is on its way, it is missing."""
        expected = self._register(job_id)
        expected.add_done_callback(lambda _: expected.cancelled() or expected.exception())
        self._expect(job_id, expected)

    def _expect(self, job_id: str, expected: asyncio.Future[Any]) -> None:
        position = self._stream.position

        def judge() -> None:
            self._expecting.discard(handle)
            if not expected.done() and self._stream.position != position:
                self._expect(job_id, expected)  # the reader has fallen behind, and comes nearer
                return
            if not expected.done():
                noting = expected.get_loop().create_task(note_late_result(self._actions, self._keys, job_id))
                self._noting.add(noting)
                noting.add_done_callback(self._noting.discard)
            self._forget(job_id, expected)

        handle = expected.get_loop().call_later(_EVENT_WITHIN_S, judge)
        self._expecting.add(handle)

    def _register(self, job_id: str) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        waits = self._waits.get(job_id)
        if waits is None:
            self._waits[job_id] = [future]
        else:
            waits.append(future)
        return future

    def _forget(self, job_id: str, future: asyncio.Future[Any]) -> None:
        waits = self._waits.get(job_id)
        if waits is not None and future in waits:
            waits.remove(future)
            if not waits:
                del self._waits[job_id]
        if future.done() and not future.cancelled():
            future.exception()  # told although nobody asks any more: the stored result came first

    def _be_patient(self, job_id: str, future: asyncio.Future[Any]) -> None:
        """Have a wait look for itself when nothing comes for a while. One timer for all: one of their own would cost
        short waits more than the rest of them."""
        # Weak, so that a value is not held until then.
        self._patience.append((time.monotonic() + _ASK_AFTER_S, job_id, weakref.ref(future)))
        if self._patience_ends is None:
            self._patience_ends = future.get_loop().call_later(_ASK_AFTER_S, self._lose_patience)

    def _lose_patience(self) -> None:
        patience, now, self._patience_ends = self._patience, time.monotonic(), None
        while patience and patience[0][0] <= now:
            _, job_id, wait = patience.popleft()
            future = wait()
            if future is not None and not future.done():
                self._impatient.append((job_id, future))
        if self._impatient and self._asking is None:
            # In a task, which comes behind the page of events that this turn of the loop may have brought.
            self._asking = asyncio.get_running_loop().create_task(self._ask_for_impatient())
        if patience:
            wait_s = patience[0][0] - now
            self._patience_ends = asyncio.get_running_loop().call_later(wait_s, self._lose_patience)

    async def aclose(self) -> None:
        self._door.close()
        if self._patience_ends is not None:
            self._patience_ends.cancel()
        for handle in self._expecting:
            handle.cancel()
        if self._noting:
            await asyncio.wait(self._noting)
        for task in (self._ready, self._reading, self._asking):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, _Closed):
                    await task
        for job_id, futures in self._waits.items():
            for future in futures:
                if not future.done():
                    why = f"queue {self._keys.name!r} was closed while the result of job {job_id!r} was waited for"
                    future.set_exception(QueueClosed(why, queue=self._keys.name, job_id=job_id))

    async def _begin(self) -> bool:
        """Have the events read from now on. Always False: what has ended before this is not heard of."""
        if self._ready is None:
            self._ready = asyncio.create_task(self._fix_position())
            self._reading = asyncio.create_task(self._read())
        await asyncio.shield(self._ready)
        return False

    async def _fix_position(self) -> None:
        await self._stream.start()
        self.heard = 0

    def _hear_of_one(self) -> None:
        self.heard = (self.heard or 0) + 1

    def _go_on(self, mark: Mark | None) -> bool:
        """Have the events read from where we are, or from the mark. True: the end of the job with this mark cannot have
        been missed."""
        if not self._is_resting:
            return mark is not None and (
                mark.heard == self.heard or (mark.event != b"" and not self._stream.has_passed(mark.event))
            )
        if mark is None or not mark.event:
            self._is_resting = False
            self._wanted.set()
            return False
        self._is_asked = True
        self._begin_at(mark)
        return True

    def foresee(self, mark: Mark) -> None:
        """A job was added. If results were asked for so far, begin to read for this one."""
        if self._is_asked and self._is_resting and mark.event:
            self._begin_at(mark)

    def _begin_at(self, mark: Mark) -> None:
        self._is_resting = False
        self._hear_of_one()  # what is skipped may be the end of another job that has a mark: that one must ask
        if not self._stream.glance(mark.event, self._glance):
            self._wanted.set()

    async def _read(self) -> None:
        assert self._ready is not None
        await self._ready
        while True:
            lost, entries = await self._stream.next_page()
            for _, fields in entries:
                self._resolve(fields)
            if lost:
                await self._ask_again()
            if not self._waits:
                self._is_resting = True
                self._wanted.clear()
                await self._wanted.wait()

    def on_glance(self, reply: Any) -> None:
        """What a glance brought. If somebody still waits, the reading goes on."""
        waited = bool(self._waits)
        for _, fields in self._stream.take_in(reply):
            self._resolve(fields)
        if self._waits:
            self._wanted.set()
        else:
            self._is_resting = True
            self._is_asked = waited

    def on_lost_glance(self) -> None:
        self._stream.doubt()
        self._wanted.set()

    def _resolve(self, flat: list[bytes]) -> None:
        kind = flat[1]
        if kind not in (b"completed", b"failed"):
            return
        self._hear_of_one()
        if not self._waits:
            return
        fields = dict(zip(flat[::2], flat[1::2], strict=False))
        job_id = fields.get(b"jobId", b"").decode("utf-8", "surrogateescape")
        if kind == b"failed":
            self._fail(job_id, [future for future in self._waits.pop(job_id, ()) if not future.done()], fields)
            return
        for future in self._waits.pop(job_id, ()):
            if not future.done():
                raw = fields.get(b"returnvalue", b"null")
                if raw == b"null" or self._actions.sealer is None:
                    future.set_result(None if raw == b"null" else _value(raw))
                else:
                    self._open(future, raw, self._actions.sealer)

    def _open(self, future: asyncio.Future[Any], raw: bytes, sealer: Sealer) -> None:
        try:
            future.set_result(sealer.open_result(_value(raw)))
        except BullpenError as error:  # it cannot be opened here
            future.set_exception(error)

    def _fail(self, job_id: str, futures: list[asyncio.Future[Any]], fields: dict[bytes, bytes]) -> None:
        text = fields.get(b"failedReason", b"").decode("utf-8", "replace")
        said, failure = reason_in(text), JobFailed(self._keys.name, job_id, text)
        if said is not None and b"cancelled" in fields:
            failure = JobCancelled(self._keys.name, job_id, said)
        elif said is not None and futures:  # another client wrote it, or a handler chose these words: the job knows
            asking = futures[0].get_loop().create_task(self._tell_stored(job_id, futures, failure))
            self._noting.add(asking)
            asking.add_done_callback(self._noting.discard)
            return
        for future in futures:
            future.set_exception(failure)

    async def _tell_stored(self, job_id: str, futures: list[asyncio.Future[Any]], failure: JobFailed) -> None:
        try:
            await self._actions.read_result(job_id)
        except JobFailed as stored:
            failure = stored
        except BullpenError:
            pass  # removed by its own rule, or put back meanwhile
        for future in futures:
            if not future.done():
                future.set_exception(failure)

    async def _look_behind_position(self) -> None:
        """Resolve from events that were not read yet. Not through our own door, which may be blocked."""
        after = f"({self._stream.position}"
        entries = await self._actions.command("XRANGE", self._keys.events, after, "+", "COUNT", _PAGE)
        for _, fields in entries:
            self._resolve(fields)

    async def _ask_again(self) -> None:
        """Events were trimmed unread: ask for each job that is still waited for, many at a time."""
        waited = list(self._waits)
        for first in range(0, len(waited), _ASKED_TOGETHER):
            await asyncio.gather(*map(self._read_again, waited[first : first + _ASKED_TOGETHER]))

    async def _read_again(self, job_id: str) -> None:
        try:
            finished, value = await self._actions.read_result(job_id)
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to the callers that wait
            for future in self._waits.pop(job_id, ()):
                if not future.done():
                    future.set_exception(error)
            return
        for future in self._waits.pop(job_id, ()) if finished else ():
            if not future.done():
                future.set_result(value)


def _value(raw: bytes) -> Any:
    try:
        return json.decode(raw, what="return value")
    except NotJson:
        return None
