"""Reach a queue from a plain thread: what `bullpen.sync` is built on.

In: the same operations as on an event loop (`administration`, `job`). Out: their answers. The coroutines of those
operations await nothing but the queue's actions, and here these block instead of being suspended: so each coroutine
runs to its end in one step (`drive`), without a loop. One connection per queue object, used by one thread at a time;
after a fork the child opens its own.
Elsewhere: adding (`sync`), sockets (`bullpen.redis.blocking`), what users see (`blocking_faces`, which is generated).
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final, Protocol, TypeVar, Unpack
from weakref import WeakSet

from bullpen._kernel.clock import ServerClock
from bullpen._kernel.duration import to_ms
from bullpen._kernel.ids import new_token
from bullpen.errors import BullpenError, ConnectionLost, InvalidOption, ServerRefused
from bullpen.queue.actions import RESULT_PATIENCE_S, QueueActions
from bullpen.queue.administration import Administration, AdministrationSettings
from bullpen.queue.blocking_durability import BlockingDurability
from bullpen.queue.codec import Codec, Sealer, run_blocking
from bullpen.queue.durability import MEMORY, Durability
from bullpen.queue.flow_entries import FlowEntry, flow_arguments
from bullpen.queue.job import Mark
from bullpen.queue.late_results import Circumstances, late_result, lists_worker
from bullpen.queue.packing import PackedJob, call_ttl_ms, clock_and_version
from bullpen.queue.payloads import SweepReport
from bullpen.queue.sealed_add import seal_each
from bullpen.queue.states import JobState
from bullpen.redis.blocking import BlockingWire, open_wire
from bullpen.redis.calls import outcome_unknown
from bullpen.redis.client import Connection
from bullpen.redis.discovery import ServerUnavailable
from bullpen.wire.keys import QueueKeys, slot
from bullpen.wire.records import JobRecord
from bullpen.wire.scripts import SCRIPTS, Script

T = TypeVar("T")

_FIRST_WAIT_S: Final = 0.02
_LONGEST_WAIT_S: Final = 0.5
_LISTEN_MS: Final = 2_000
"""How long one read of the events blocks; below the connection's own time limit."""

Ask = Callable[[BlockingWire], T]


def drive(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine whose awaits never wait to its end."""
    try:
        work.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    work.close()
    raise BullpenError(f"{work!r} waited for an event loop, and a blocking queue has none: a bug, please report it")


def iterate(found: AsyncIterator[T]) -> Iterator[T]:
    """The same for an asynchronous iterator."""
    while True:
        try:
            yield drive(_next(found))
        except _Exhausted:
            return


async def _next(found: AsyncIterator[T]) -> T:
    try:
        return await anext(found)
    except StopAsyncIteration:
        raise _Exhausted from None


class _Exhausted(Exception):
    """StopAsyncIteration must not leave a coroutine."""


class _Inherited(Protocol):
    def begin(self) -> None:
        """As this process: connections, locks and call numbers of a parent are not ours to use."""


_inherited: WeakSet[_Inherited] = WeakSet()


def _begin_all() -> None:
    for one in list(_inherited):
        one.begin()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_all)


class BlockingLine:
    """A connection to the server of one queue that is opened again after it broke."""

    def __init__(self, connection: Connection, keys: QueueKeys, deadline_s: float) -> None:
        self.connection, self._keys, self._deadline_s = connection, keys, deadline_s
        self.begin()
        _inherited.add(self)

    def begin(self) -> None:
        # A parent's socket stays open in the parent; in a child it is only forgotten.
        self.lock = threading.Lock()
        self._wire: BlockingWire | None = None
        idle_s = self.connection.idle_ping_s
        self._idle_s = self._stale_at = math.inf if idle_s is None else idle_s

    def ask(self, ask: Ask[T], within_s: float | None = None) -> T:
        """Ask until the server answers or time is up. What is asked changes nothing when repeated."""
        with self.lock:
            return self.call(ask, self._deadline_s if within_s is None else within_s)

    def ask_once(self, ask: Ask[T]) -> T:
        """Ask a server that is there. Raises ConnectionLost when the reply is lost."""
        with self.lock:
            self.call(lambda wire: None, self._deadline_s)
            assert self._wire is not None
            try:
                return ask(self._wire)
            except ConnectionLost:
                self._drop()
                raise

    def call(self, ask: Ask[T], deadline_s: float, adds: Sequence[PackedJob] | None = None) -> T:
        """The same for who holds the lock. `adds`: the jobs that this numbered call stores. Then the error says whether
        it may have done so."""
        now = time.monotonic()
        give_up_at = now + deadline_s
        if now > self._stale_at:
            self._drop()  # a firewall may have forgotten it, and would not say so
        self._stale_at = now + self._idle_s
        command_s = self.connection.command_timeout_s
        is_short = deadline_s < command_s
        may_have_run, wait_s = False, _FIRST_WAIT_S
        while True:
            opened = False
            try:
                if self._wire is None:
                    left_s = max(_FIRST_WAIT_S, give_up_at - time.monotonic())
                    self._wire = open_wire(self.connection, self._keys.base, within_s=left_s)
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
                raise self._out_of_time(deadline_s, cause, adds, may_have_run=may_have_run) from cause
            time.sleep(min(wait_s, left_s))
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            if self.connection.revive is not None:
                self.connection.revive()

    def _out_of_time(
        self, deadline_s: float, cause: Exception, adds: Sequence[PackedJob] | None, *, may_have_run: bool
    ) -> Exception:
        name = self._keys.name
        if adds is None:
            return ConnectionLost(f"queue {name!r}: no answer within {deadline_s:g} s; {cause}")
        if may_have_run:
            return outcome_unknown(name, deadline_s, adds[0].job_id if len(adds) == 1 else None)
        return ConnectionLost(f"queue {name!r}: nothing was written; {cause}")

    def close(self) -> None:
        with self.lock:
            self._drop()

    def _drop(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None


class BlockingCalls:
    """Numbered calls of one script by one queue object, one at a time: repeating one is always safe."""

    def __init__(self, line: BlockingLine, keys: QueueKeys, script: Script) -> None:
        self._line, self._keys, self._script = line, keys, script
        self.begin()
        _inherited.add(self)

    def begin(self) -> None:
        self._caller_id, self._number = new_token(), 0
        self.key = self._keys.call(self._caller_id)
        self._levels = BlockingDurability(self._line.connection, self._keys)

    def next_number(self) -> int:
        """Of a call that is about to be sent, by who holds the line's lock."""
        self._number += 1
        return self._number

    def send(
        self, make: Callable[[int], list[Any]], level: Durability, deadline_s: float, adds: Sequence[PackedJob]
    ) -> tuple[Any, bool]:
        """The reply, and whether its durability was not confirmed in time. `make` gets the call's number."""
        line, give_up_at = self._line, time.monotonic() + deadline_s
        with line.lock:
            args = make(self.next_number())

            def store(wire: BlockingWire) -> Any:
                return wire.evaluate(self._script, [self.key], args)

            if level is MEMORY:
                return line.call(store, deadline_s, adds), False
            line.call(lambda wire: self._levels.check(wire, level, give_up_at - time.monotonic()), deadline_s)
            reply = line.call(store, max(_FIRST_WAIT_S, give_up_at - time.monotonic()), adds)
            return reply, not self._confirm(level, call_ttl_ms(deadline_s), store, give_up_at)

    def _confirm(self, level: Durability, ttl_ms: int, store: Ask[Any], give_up_at: float) -> bool:
        """Wait for the level of the latest call. A server that lost the call meanwhile gets it again, same number."""
        while (left_s := give_up_at - time.monotonic()) > 0:

            def confirm(wire: BlockingWire, left_s: float = left_s) -> bool:
                return self._levels.confirm(wire, level, self.key, self._number, ttl_ms, left_s)

            try:
                if self._line.call(confirm, left_s):
                    return True
                self._line.call(store, left_s)
            except (ConnectionLost, InvalidOption):  # not in time, or another server took over, which cannot keep it
                return False
        return False


class BlockingSealer(Sealer):
    """A codec for one queue in a plain thread. Object stores and ciphers may need a loop: they have one meanwhile."""

    def __init__(self, codec: Codec, keys: QueueKeys, read_owner: Callable[[], Awaitable[str]]) -> None:
        super().__init__(codec, keys, read_owner)
        self.on_loop = Sealer(codec, keys, read_owner)

    async def seal(self, plain: bytes) -> bytes:
        return run_blocking(self.codec, self.on_loop.seal(plain))

    async def open(self, stored: bytes, job_id: str) -> bytes:
        return run_blocking(self.codec, self.on_loop.open(stored, job_id))

    async def open_record(self, record: JobRecord) -> JobRecord:
        return run_blocking(self.codec, self.on_loop.open_record(record))

    async def forget(self, stored: bytes) -> None:
        return run_blocking(self.codec, self.on_loop.forget(stored))


def seal_blocking(sealers: Sequence[Sealer | None], packed: Sequence[PackedJob]) -> list[PackedJob]:
    """These jobs, each sealed for its own queue."""
    on_loop = [one.on_loop if isinstance(one, BlockingSealer) else None for one in sealers]
    codec = next((one.codec for one in on_loop if one is not None), None)
    return list(packed) if codec is None else run_blocking(codec, seal_each(on_loop, packed))


class BlockingActions(QueueActions):
    """The actions of a queue in a plain thread."""

    def __init__(
        self,
        line: BlockingLine,
        keys: QueueKeys,
        codec: Codec | None,
        *,
        dead_letter_keys: QueueKeys | None = None,
        clock_offset_ms: int = 0,
    ) -> None:
        super().__init__(keys, codec, dead_letter_keys=dead_letter_keys, clock_offset_ms=clock_offset_ms)
        self._line = line

    @property
    def clock(self) -> ServerClock:
        return self._line.connection.clock

    async def evaluate_noting_repeats(
        self, script: str, keys: Sequence[str | bytes], args: list[Any], *, within_s: float | None = None
    ) -> tuple[Any, bool]:
        times_sent = 0

        def ask(wire: BlockingWire) -> Any:
            nonlocal times_sent
            times_sent += 1
            return wire.evaluate(SCRIPTS[script], keys, args)

        reply = self._line.ask(ask, within_s)
        return reply, times_sent > 1

    def _make_sealer(self, codec: Codec, keys: QueueKeys) -> Sealer:
        return BlockingSealer(codec, keys, self._object_owner)

    async def evaluate_once(self, script: str, keys: Sequence[str | bytes], args: list[Any]) -> Any:
        return self._line.ask_once(lambda wire: wire.evaluate(SCRIPTS[script], keys, args))

    async def converse(self, commands: Sequence[tuple[str | bytes | int, ...]]) -> list[Any]:
        def ask(wire: BlockingWire) -> list[Any]:
            replies = wire.converse(commands)
            for reply in replies:
                if isinstance(reply, ServerUnavailable):
                    raise reply
            return replies

        return self._line.ask(ask)

    async def together(self, work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        return [await one for one in work]

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - to block is what is wanted here

    async def wait_result(self, job_id: str, timeout: int | timedelta | None, mark: Mark | None = None) -> Any:
        timeout_ms = None if timeout is None else to_ms("timeout", timeout)
        give_up_at = None if timeout_ms is None else time.monotonic() + timeout_ms / 1000
        # A client of its own: whoever waits must not keep other threads from adding.
        with contextlib.closing(_Listener(self._line.connection, self._keys)) as events:
            while True:
                left_s = RESULT_PATIENCE_S if give_up_at is None else give_up_at - time.monotonic()
                finished, value = await self.read_result(job_id, min(RESULT_PATIENCE_S, max(left_s, 0)))
                if finished:
                    return value
                left_ms = _LISTEN_MS if give_up_at is None else int((give_up_at - time.monotonic()) * 1000)
                if left_ms <= 0:
                    assert timeout_ms is not None
                    raise late_result(self._keys, job_id, timeout_ms, await self._circumstances(job_id))
                events.wait_for_end(job_id, min(left_ms, _LISTEN_MS))

    async def _circumstances(self, job_id: str) -> Circumstances:
        state: JobState | None = None
        is_paused: bool | None = None
        try:
            state = await self.state_of(job_id)
            is_paused = bool(await self.command("HEXISTS", self._keys.meta, "paused"))
            if state is JobState.ACTIVE and await self.command("EXISTS", self._keys.lock(job_id)):
                return Circumstances(state, has_worker=True, is_paused=is_paused)
            clients = await self.command("CLIENT", "LIST")
        except ConnectionLost:
            return Circumstances()
        except ServerRefused:
            return Circumstances(state, is_paused=is_paused)
        return Circumstances(state, has_worker=lists_worker(self._keys, clients), is_paused=is_paused)


class _Listener:
    """Reads a queue's events from the moment it was made, to know when to read a result again."""

    def __init__(self, connection: Connection, keys: QueueKeys) -> None:
        self._connection, self._keys = connection, keys
        self._wire: BlockingWire | None = None
        self._after = "$"

    def wait_for_end(self, job_id: str, within_ms: int) -> None:
        """Return when the job has ended, when time is over, or when no event can come: reading again is right in all
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


class _FlowSender:
    """Sends the flows of one queue object."""

    def __init__(self, calls: BlockingCalls, connection: Connection, keys: QueueKeys, clock_offset_ms: int) -> None:
        self._calls, self._connection, self._keys = calls, connection, keys
        self._clock = clock_and_version(clock_offset_ms)

    async def send(self, entries: Sequence[FlowEntry], level: Durability, deadline_s: float) -> tuple[Any, bool]:
        self._connection.require_one_slot(self._keys.base, *(entry.keys.base for entry in entries))
        make = partial(flow_arguments, entries, self._clock, call_ttl_ms(deadline_s))
        return self._calls.send(make, level, deadline_s, [entry.packed for entry in entries])


class BlockingAdministration(Administration):
    """All that can be done with a queue but adding to it. Its coroutines are made for `drive`."""

    def __init__(self, name: str, **settings: Unpack[AdministrationSettings]) -> None:
        super().__init__(name, **settings)
        self.limit_bytes, self.deadline_s, self.durability = self._limit_bytes, self._deadline_s, self._durability
        self.line = BlockingLine(self._connection, self._keys, self._deadline_s)
        self._lines: dict[int, BlockingLine] = {}
        """To other slots of a cluster, for flows that reach there."""
        self._actions = BlockingActions(
            *(self.line, self._keys, self._codec),
            dead_letter_keys=self._dead_letter_keys,
            clock_offset_ms=self._clock_offset_ms,
        )
        calls = BlockingCalls(self.line, self._keys, SCRIPTS["add_flow"])
        self._sender = _FlowSender(calls, self._connection, self._keys, self._clock_offset_ms)

    def ready(self) -> BlockingActions:
        """Raises QueueClosed after close."""
        self._must_be_open()
        return self._actions

    _ready = ready

    def _actions_of(self, keys: QueueKeys) -> BlockingActions:
        actions = self._ready()
        return actions if keys == self._keys else BlockingActions(self._line_of(keys), keys, self._codec)

    def _line_of(self, keys: QueueKeys) -> BlockingLine:
        place = slot(keys.base)
        if not self._connection.is_cluster or place == slot(self._keys.base):
            return self.line
        if place not in self._lines:
            self._lines[place] = BlockingLine(self._connection, keys, self._deadline_s)
        return self._lines[place]

    def _flow_sender(self) -> _FlowSender:
        return self._sender

    async def _seal_each(self, sealers: Sequence[Sealer | None], packed: Sequence[PackedJob]) -> list[PackedJob]:
        return seal_blocking(sealers, packed)

    async def sweep_payloads(self, *, older_than: int | timedelta = 86_400_000, dry_run: bool = False) -> SweepReport:
        work = super().sweep_payloads(older_than=older_than, dry_run=dry_run)
        return await work if self._codec is None else run_blocking(self._codec, work)

    @property
    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        self._closed = True
        for line in (self.line, *self._lines.values()):
            line.close()
