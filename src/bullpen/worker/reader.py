"""The blocked read of an idle worker, on a connection of its own: it waits for the marker that producers set, or while
a limit holds for the news that limits were changed.

A worker with a free slot lends it to the read: the poll for one job is sent behind it, and the server runs that by
itself the moment the marker comes. That saves a round trip between a job that is added to an idle queue and its start
(measured side by side: 1.3 ms without, 0.8 ms with it). Whoever needs the slot ends the read (`release`).

In: what to wait for. Out: what came, told where it is read. A hint, never a promise: a lost marker costs at most
`drain_delay`. Elsewhere: when to read and to release (`pump`), what the poll brought (`driver`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol

from bullpen._kernel.clock import ServerClock
from bullpen.errors import BullpenError, ServerRefused
from bullpen.redis.client import Door
from bullpen.redis.socket import Kept, ReplyError, Sending, Wire
from bullpen.worker.exchange import Exchange, ExchangeReply

SECONDS_AFTER_BLOCK: Final = 2.0
"""A blocked read may be answered late by a server tick; after this it is taken for dead."""

_UNBLOCK_WITHIN_S: Final = 1.0
_REFUSED_PAUSE_S: Final = 1.0
_SERVER_TICK_S: Final = 0.15
"""A blocked read ends up to so much late on an idle server. One that waits for a change of limits ends so much earlier
than the limit, since the reader is needed for the marker then."""
_LATEST_MS: Final = 2.0**53
"""Anybody may write a due time, also one that is infinite."""


class Listener(Protocol):
    """Who is told what the reader reads."""

    def on_read_begins(self, *, can_end: bool) -> bool:
        """A blocked read is about to be sent. Returns whether it is lent a slot; only if it can be ended."""

    def on_polled(self, reply: ExchangeReply, *, timed_out: bool = False, rests: bool = False) -> None:
        """The poll behind the read was answered. `timed_out`: it was begun without a marker, by the end of the read.
        `rests`: the reader is not free yet."""

    def on_read_ended(self, *, marker: bool = False, due_ms: int = 0, may_be_lost: bool = False) -> None:
        """A read ended that had no poll behind it, or lost it."""

    def on_idle(self) -> None:
        """The reader has rested."""

    def on_limits_read(self, *, are_changed: bool) -> None: ...

    def on_not_released(self, *, may_ask: bool) -> None:
        """The read goes on. `may_ask`: to end it may be tried again."""

    def on_error(self, error: BaseException) -> None: ...

    def on_bug(self, error: BaseException) -> None: ...

    def on_task_done(self, task: asyncio.Task[None]) -> None:
        """Called for every task of the reader: a bug of ours must be seen."""


class _Polled:
    """Gets the reply to the poll behind the read."""

    __slots__ = ("_reader", "_wire", "first")

    def __init__(self, reader: Reader, wire: Wire) -> None:
        self._reader, self._wire = reader, wire
        self.first = Kept()

    def done(self) -> bool:
        return False

    def set_result(self, reply: Any, /) -> None:
        self._reader.take_in(reply, self.first.reply)

    def set_exception(self, error: BaseException, /) -> None:
        self._reader.recover(error, self._wire)


class Reader:
    """One read at a time, of one worker."""

    def __init__(
        self,
        door: Door,
        marker_key: str,
        limits_key: str,
        clock: ServerClock,
        exchange: Exchange,
        listener: Listener,
        *,
        commands: Door,
        drain_delay_ms: int,
        clock_offset_ms: int,
    ) -> None:
        """`door` is for blocked reads only, `commands` is one that no blocked read holds up; `exchange` has the calls
        behind the reads."""
        self._door, self._commands = door, commands
        self._limits_key, self._marker_key = limits_key, marker_key
        self._clock, self._clock_offset_ms = clock, clock_offset_ms
        self._exchange, self._listener = exchange, listener
        block_s = drain_delay_ms / 1000
        self._command: tuple[str | float, ...] = ("BZPOPMIN", marker_key, block_s)
        self._within_s = block_s + SECONDS_AFTER_BLOCK
        self._loop = asyncio.get_running_loop()
        self._client_id: int | None = None
        """None: unknown, or the server will not let us end a blocked read. Then no slot is lent to one."""
        self._client_wire: Wire | None = None
        self._stopping = False
        self._was_unblocked = False
        """The last read was ended by us, before its time."""
        self._is_free = asyncio.Event()
        self._is_free.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._handing_on: set[asyncio.Task[None]] = set()

    # ---- what the driver asks for -----------------------------------------------------------------------------

    def start(self) -> None:
        """Connect before the first idle moment: this connection's name is what lists us among the workers of the queue,
        and a worker that is busy from its start must be seen too."""
        self._run(self._connect())

    def listen(self) -> None:
        """Begin the blocked read for the marker."""
        wire = self._door.open_wire
        if wire is not None and wire is self._client_wire and not self._stopping:
            self._read(wire)
        else:
            self._run(self._open_and_read())

    @property
    def can_carry(self) -> bool:
        """A read can be sent at this moment, lent a slot, and something before it in the same write."""
        wire = self._client_wire
        return self._client_id is not None and wire is not None and wire.is_in_use and not self._stopping

    def carry(self, ahead: Sending) -> Wire:
        """Begin a blocked read that is lent a slot, with something before it in the same write: only if `can_carry`."""
        wire = self._client_wire
        assert wire is not None
        self._read(wire, ahead)
        return wire

    def watch_limits(self, since_ms: int, until: float) -> None:
        """Wait for limits to be changed after `since_ms` of the server's clock, but not longer than `until` of ours."""
        self._run(self._watch_limits(since_ms, until))

    def release(self) -> None:
        """End the blocked read, so that the slot it was lent is free again."""
        self._run(self._release())

    async def stop(self, get_due_ms: Callable[[], int]) -> None:
        """End the blocked read so that no marker is lost with it.

        Just dropping the connection would let the server hand the next marker to a reader that is gone, and idle
        workers would sleep beside the job it announced. So the server is asked to unblock us, and a marker that came
        all the same is passed on by the poll behind it or the next exchange. `get_due_ms`: see `hand_on`; asked at the
        end, since the read that is ended here may be the one that brings the due time.
        """
        self._stopping = True
        try:
            if self._client_id is not None:
                await self._release()
            if due_ms := get_due_ms():
                await self._hand_on(due_ms)
        finally:
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)
            self._door.close()

    def hand_on(self, due_ms: int) -> None:
        """Whoever reads a due time removes it from the marker. Leaving before then, or full when it comes, we hand it
        on."""
        handing_on = self._loop.create_task(self._hand_on(due_ms), name="bullpen due time")
        self._handing_on.add(handing_on)  # also a reader that stops goes on with it
        handing_on.add_done_callback(self._handing_on.discard)

    # ---- reading ----------------------------------------------------------------------------------------------

    def _read(self, wire: Wire, ahead: Sending | None = None) -> None:
        self._was_unblocked = False
        self._is_free.clear()
        if ahead is not None or self._listener.on_read_begins(can_end=self._client_id is not None):
            polled = _Polled(self, wire)
            # The bytes of both are with the second: two replies are expected, in this order.
            both = self._exchange.poll_behind(self._command)
            sendings = (polled.first, b"", self._within_s), (polled, both, self._within_s)
            wire.send_all(*sendings) if ahead is None else wire.send_all(ahead, *sendings)
        else:
            self._run(self._read_plain())

    def take_in(self, reply: Any, read: Any) -> None:
        """The replies to the poll and to the read before it."""
        self._is_free.set()
        try:
            timed_out = read is None and not self._was_unblocked
            is_refused = isinstance(read, ReplyError)
            self._listener.on_polled(self._exchange.read_poll(reply), timed_out=timed_out, rests=is_refused)
        except Exception as error:  # noqa: BLE001 - a bug of ours belongs to the worker, not to the wire
            self._listener.on_bug(error)
            return
        if is_refused:
            self._run(self._rest_after(read))

    def recover(self, error: BaseException, wire: Wire) -> None:
        """The poll was refused, or its reply was lost."""
        self._run(self._recover(error, wire))

    async def _rest_after(self, refusal: ReplyError) -> None:
        """The read was refused, and would be again."""
        self._listener.on_error(self._door.refusal(refusal, await self._door.wire()))
        await asyncio.sleep(_REFUSED_PAUSE_S)
        self._listener.on_idle()

    async def _recover(self, error: BaseException, wire: Wire) -> None:
        """Somebody may have got a job by the poll: it is repeated until that is known."""
        if isinstance(error, ReplyError):
            self._door.refusal(error, wire)  # another server may be the one to ask
        elif self._door.closed:
            return
        else:
            await asyncio.sleep(self._door.reconnect_wait_s())
        try:
            reply = await self._exchange.repeat_poll()
            self._is_free.set()
            self._listener.on_polled(self._exchange.read_poll(reply))
        except ServerRefused as refusal:
            self._is_free.set()
            self._listener.on_error(refusal)
            await asyncio.sleep(_REFUSED_PAUSE_S)
            self._listener.on_read_ended(may_be_lost=True)
        except ConnectionError:
            if not self._commands.closed:
                raise

    async def _connect(self) -> None:
        with contextlib.suppress(BullpenError):  # the first read tries again
            await self._door.wire()

    async def _open_and_read(self) -> None:
        try:
            wire = await self._door.wire()
            await self._learn_client_id(wire)
        except ServerRefused as error:
            self._listener.on_error(error)
            await asyncio.sleep(_REFUSED_PAUSE_S)
        except ConnectionError:
            if self._door.closed:
                return
            await asyncio.sleep(self._door.reconnect_wait_s())
        else:
            if not self._stopping:
                self._read(wire)
            return
        self._listener.on_read_ended(may_be_lost=True)

    async def _read_plain(self) -> None:
        try:
            reply = await self._door.call(*self._command, within_s=self._within_s)
        except ServerRefused as error:
            self._is_free.set()
            self._listener.on_error(error)
            await asyncio.sleep(_REFUSED_PAUSE_S)
            self._listener.on_read_ended(may_be_lost=True)
        except ConnectionError:
            self._is_free.set()
            if self._door.closed:
                return
            await asyncio.sleep(self._door.reconnect_wait_s())
            self._listener.on_read_ended(may_be_lost=True)
        else:
            self._is_free.set()
            due_ms = 0.0 if reply is None else float(reply[2])
            if due_ms > self._clock.now_ms() + self._clock_offset_ms:
                self._listener.on_read_ended(due_ms=int(min(due_ms, _LATEST_MS)))
            else:
                self._listener.on_read_ended(marker=reply is not None, may_be_lost=self._was_unblocked)

    async def _watch_limits(self, since_ms: int, until: float) -> None:
        block_ms = int((until - self._loop.time() - _SERVER_TICK_S) * 1000)
        command = ("XREAD", "COUNT", 1, "BLOCK", block_ms, "STREAMS", self._limits_key, since_ms - 1)
        are_changed = False
        if block_ms > 0 and not self._stopping:
            self._is_free.clear()
            # An old rule may forbid it, or the server is away: the poll at the end of the limit tells.
            with contextlib.suppress(ServerRefused, ConnectionError):
                within_s = block_ms / 1000 + SECONDS_AFTER_BLOCK
                are_changed = bool(await self._door.call(*command, within_s=within_s))
            self._is_free.set()
        self._listener.on_limits_read(are_changed=are_changed)

    async def _release(self) -> None:
        """Gives up when the server is away: the read then ends with its connection."""
        give_up_at = self._loop.time() + _UNBLOCK_WITHIN_S
        self._was_unblocked = True
        while self._client_id is not None and not self._is_free.is_set() and self._loop.time() < give_up_at:
            # Again and again: the read may be on its way still, and then there is nothing to unblock yet.
            try:
                await self._commands.call("CLIENT", "UNBLOCK", self._client_id, within_s=_UNBLOCK_WITHIN_S)
                async with asyncio.timeout(0.02):
                    await self._is_free.wait()
            except TimeoutError:
                continue
            except ConnectionError:
                await asyncio.sleep(self._commands.reconnect_wait_s())
                break
            except ServerRefused:
                self._client_id = None  # no longer allowed: the read ends by its own time limit, or with its connection
        self._listener.on_not_released(may_ask=self._client_id is not None)

    async def _hand_on(self, due_ms: int) -> None:
        # NX: a time that stands there was written later than we read ours, and is the earliest.
        # If it cannot be written, the others find it at their next poll.
        with contextlib.suppress(ServerRefused, ConnectionError):
            await self._commands.call("ZADD", self._marker_key, "NX", due_ms, "1", within_s=_UNBLOCK_WITHIN_S)

    async def _learn_client_id(self, wire: Wire) -> None:
        if wire is self._client_wire:
            return
        try:
            client_id = int(await self._door.call("CLIENT", "ID"))
            await self._door.call("CLIENT", "UNBLOCK", client_id)  # does nothing now, and tells whether we may
            self._client_id = client_id
        except ServerRefused:
            self._client_id = None  # an ACL may forbid it
        self._client_wire = wire

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work, name=f"bullpen read {self._marker_key}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self._listener.on_task_done)
