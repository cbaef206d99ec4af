"""Wait for the results of jobs: heard from the queue's events, asked for where nothing is heard.

In: ids of awaited jobs. Out: their values, or why there are none. Elsewhere: reading events (`events`),
what a late result may mean (`late_results`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import weakref
from collections import deque
from collections.abc import Coroutine
from typing import Any, Protocol

from bullpen._kernel import json
from bullpen._kernel.logs import get_logger
from bullpen.errors import (
    BullpenError,
    JobCancelled,
    JobFailed,
    JobNotFound,
    NotJson,
    QueueClosed,
    ServerRefused,
)
from bullpen.queue.changes import SendsScripts
from bullpen.queue.codec import Sealer
from bullpen.queue.events import PAGE, EventStream, StreamClosed
from bullpen.queue.job import Mark
from bullpen.queue.late_results import PATIENCE_S, Circumstances, late_result, lists_worker
from bullpen.queue.late_wakeups import note_late_result
from bullpen.queue.states import JobState
from bullpen.redis.client import Connection, Door
from bullpen.wire.cancels import reason_in
from bullpen.wire.keys import QueueKeys, client_name

logger = get_logger("bullpen.events")

_ASK_AFTER_S = 1.0
_ASKED_TOGETHER = 100
"""Results per round trip after events were lost: more would delay other calls."""
_ASK_AT_ONCE = 20
"""Waits that poll together, before the reader has another chance to answer the rest."""
_EVENT_WITHIN_S = 3.0


class ResultQuestions(SendsScripts, Protocol):
    """What is asked about jobs and their queue."""

    sealer: Sealer | None

    async def state_of(self, job_id: str) -> JobState: ...
    async def read_result(self, job_id: str) -> tuple[bool, Any]: ...


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

    def __init__(self, connection: Connection, keys: QueueKeys, actions: ResultQuestions) -> None:
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
        """Nothing is read, because no caller waits."""
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
        """None: the server refuses CLIENT LIST. Asked at most once a second: the answer of a server with many clients
        is long, and a caller may wait for many jobs, or for one again and again."""
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
        commands of a short job. But a removed job may cause no event, hence a poll when nothing comes for a
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
        """(has it finished?, its value); not finished also when the wait was resolved in the meantime."""
        try:
            return await self._actions.read_result(job_id)
        except JobNotFound:
            # It may have ended, and gone by its own retention, since we began to listen.
            await self._read_behind_position()
            if not future.done():
                raise
            return False, None

    async def _ask_for_impatient(self) -> None:
        """Poll the jobs without an event for a while. Few at a time: when they are many, then because the
        loop or the server is slow, and the next page of events resolves most of them."""
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
        """The job has finished without an event so far. Unless it still comes, it is missing."""
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
        """Let a wait poll when nothing comes for a while. One timer for all: one of their own would cost
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
                with contextlib.suppress(asyncio.CancelledError, StreamClosed):
                    await task
        for job_id, futures in self._waits.items():
            for future in futures:
                if not future.done():
                    why = f"queue {self._keys.name!r} was closed before the result of job {job_id!r} came"
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
            asking = futures[0].get_loop().create_task(self._resolve_stored(job_id, futures, failure))
            self._noting.add(asking)
            asking.add_done_callback(self._noting.discard)
            return
        for future in futures:
            future.set_exception(failure)

    async def _resolve_stored(self, job_id: str, futures: list[asyncio.Future[Any]], failure: JobFailed) -> None:
        try:
            await self._actions.read_result(job_id)
        except JobFailed as stored:
            failure = stored
        except BullpenError:
            pass  # removed by its own rule, or put back meanwhile
        for future in futures:
            if not future.done():
                future.set_exception(failure)

    async def _read_behind_position(self) -> None:
        """Resolve from events that were not read yet. Not through our own client, which may be blocked."""
        after = f"({self._stream.position}"
        entries = await self._actions.command("XRANGE", self._keys.events, after, "+", "COUNT", PAGE)
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
