"""When an idle worker should look for jobs.

In: the marker that producers set, or while a limit holds the news that limits were changed (a blocked read on a
connection of its own); due times and limits from replies.
Out: a flag and an event. A hint, never a promise: every path ends in a look, so a lost marker costs at most
`drain_delay`. What only such a look finds is counted as a late wake-up (`bullpen._kernel.telemetry`).

A worker with a free slot lends it to the blocked read: the look for one job is sent behind the read, and the server
runs it by itself the moment the marker comes. That saves a round trip between a job that is added to an idle queue and
its start (measured side by side: 1.3 ms without, 0.8 ms with it). Whoever needs the slot ends the read (`release`).
Elsewhere: looking (`worker`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Final

from bullpen._kernel.clock import ServerClock
from bullpen.errors import BullpenError, ServerRefused
from bullpen.redis.client import Door
from bullpen.redis.socket import Wire

SECONDS_AFTER_BLOCK: Final = 2.0
"""A blocked read may be answered late by a server tick; after this it is taken for dead."""


_UNBLOCK_WITHIN_S: Final = 1.0
_LONGEST_LIMIT_S: Final = 1.0
_SERVER_TICK_S: Final = 0.15
"""A blocked read ends up to so much late on an idle server. One that waits for a change of limits ends so much earlier
than the limit, since the reader is needed for the marker then."""
_LATEST_MS: Final = 2.0**53
"""Anybody may write a due time, also one that is infinite."""


class Wakeups:
    """The reasons to look, for one worker."""

    def __init__(
        self,
        door: Door,
        marker_key: str,
        limits_key: str,
        clock: ServerClock,
        *,
        commands: Door,
        drain_delay_ms: int,
        clock_offset_ms: int,
        may_lend: Callable[[], bool],
        look_after: Callable[[Door, tuple[str | float, ...], float], Awaitable[Any]],
        on_error: Callable[[BaseException], None],
    ) -> None:
        """`commands`: a door that no blocked read holds up.

        `may_lend`: is there a free slot at this moment? `look_after`: send a blocked read with one look behind it,
        deal with what that brings, call `end_read` then and there, and return the read's reply."""
        self._door, self._commands = door, commands
        self._marker_key, self._limits_key = marker_key, limits_key
        self._clock = clock
        self._block_s = drain_delay_ms / 1000
        self._clock_offset_ms = clock_offset_ms
        self._may_lend, self._look_after = may_lend, look_after
        self._on_error = on_error
        self._loop = asyncio.get_running_loop()
        self._armed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._limited_until = 0.0
        self._limits_read_ms: int | None = None
        """By the server's clock, when it told us of a limit; None: it did not, or the reader was told of that."""
        self._due_ms = 0
        self._stopping = False
        self._is_lent = False
        self._read_ended = asyncio.Event()
        self._read_ended.set()
        self._client_id: int | None = None
        """None: unknown, or the server will not let us end a blocked read. Then no slot is lent to one."""
        self._client_wire: Wire | None = None
        self._passing_on: asyncio.Task[None] | None = None
        self._is_released = False
        self.changed = asyncio.Event()
        """Set whenever there may be something to do."""
        self.should_look = True
        """There may be jobs to take."""
        self.has_marker = False
        """We took the marker and have not looked since. If we cannot, somebody else must be woken."""
        self.is_fallback = False
        """The only reason to look is that the blocked read has ended without a marker."""
        self.calls = 0
        """How often a look was asked for. A call that comes while an exchange is in flight may be about a job that
        the exchange did not see yet, so its empty answer must not end the looking."""

    @property
    def is_lent(self) -> bool:
        """A blocked read holds a slot, will look by itself when it ends, and can be ended."""
        return self._is_lent and self._client_id is not None

    @property
    def is_limited(self) -> bool:
        return self._limited_until > 0.0 and self._loop.time() < self._limited_until

    @property
    def was_unblocked(self) -> bool:
        """The last blocked read was ended by us, before its time."""
        return self._is_released

    def look_now(self) -> None:
        self.is_fallback = False
        self.calls += 1
        self.should_look = True
        self.changed.set()

    def look_when_due(self, due_ms: int) -> None:
        """Our own timer, because a blocked read ends up to 100 ms late on an idle server's tick."""
        self._due_ms = due_ms
        wait_s = self._clock.seconds_until(due_ms - self._clock_offset_ms)
        self._look_at(self._loop.time() + max(wait_s, 0.001))

    def limit(self, pause_s: float, read_ms: int | None = None) -> None:
        """Take nothing for so long, then look; earlier if limits are changed after `read_ms` of the server's clock."""
        self.should_look = False
        # Not longer: other clients tell nobody when they lift it, nor does a clock that is set right.
        self._limited_until = self._loop.time() + min(pause_s, _LONGEST_LIMIT_S)
        # A look that is planned for earlier would be in vain, and must not stand in for the one after the limit.
        self._cancel_timer()
        self._look_at(self._limited_until)
        if read_ms is not None:
            self._limits_read_ms = read_ms
            self._armed.set()

    def arm(self) -> None:
        """We have a free slot to lend, so producers may wake us."""
        self._armed.set()

    async def wait(self, *, for_marker: bool) -> None:
        """Sleep until something changes, also by a producer if `for_marker`."""
        if for_marker:
            self.arm()
        await self.changed.wait()

    async def listen(self) -> None:
        """The blocked read. It only sets flags and never delays a settle. Runs until stopped or cancelled."""
        # Before the first idle moment: this connection's name is what lists us among the workers of the queue, and a
        # worker that is busy from its start must be seen too. If it cannot be opened yet, the read below tries again.
        with contextlib.suppress(BullpenError):
            await self._door.wire()
        while not self._stopping:
            if self._limits_read_ms is None:
                await self._armed.wait()
            if self._limits_read_ms is not None:
                await self._wait_for_change(self._limits_read_ms)
                continue
            reply, has_looked, is_lost = None, False, False
            try:
                await self._learn_client_id()
                if self._stopping:
                    return
                has_looked = self._is_lent = self._client_id is not None and self._may_lend()
                reply = await self._read()
                if isinstance(reply, ServerRefused):
                    raise reply
            except ServerRefused as error:
                is_lost = True
                self._on_error(error)
                await asyncio.sleep(1.0)
            except ConnectionError:
                # The marker may be lost with the connection, so a look follows.
                is_lost = True
                if self._door.closed:
                    return
                await asyncio.sleep(self._door.reconnect_wait_s())
            if has_looked:
                continue
            due_ms = float(reply[2]) if reply is not None else 0.0
            if due_ms > self._clock.now_ms() + self._clock_offset_ms:
                self.look_when_due(int(min(due_ms, _LATEST_MS)))
                self.changed.set()
            else:
                self.has_marker = reply is not None
                self.look_now()
                self.is_fallback = reply is None and not is_lost and not self._is_released

    async def _wait_for_change(self, since_ms: int) -> None:
        """The marker is no help while a limit holds: it stays set for whoever may go on first."""
        self._limits_read_ms = None
        block_ms = int((self._limited_until - self._loop.time() - _SERVER_TICK_S) * 1000)
        command = ("XREAD", "COUNT", 1, "BLOCK", block_ms, "STREAMS", self._limits_key, since_ms - 1)
        self._read_ended.clear()
        try:
            if block_ms > 0 and await self._door.call(*command, within_s=block_ms / 1000 + SECONDS_AFTER_BLOCK):
                self._limited_until = 0.0
                self._cancel_timer()
                self.look_now()
        except (ServerRefused, ConnectionError):
            pass  # an old rule may forbid it, or the server is away: the look at the end of the limit tells
        finally:
            self.end_read()

    async def _read(self) -> Any:
        command = ("BZPOPMIN", self._marker_key, self._block_s)
        within_s = self._block_s + SECONDS_AFTER_BLOCK
        self._read_ended.clear()
        self._is_released = False
        try:
            if self._is_lent:
                return await self._look_after(self._door, command, within_s)
            return await self._door.call(*command, within_s=within_s)
        finally:
            if not self._read_ended.is_set():
                self.end_read()

    def end_read(self) -> None:
        """The read was answered. It must be armed again before the next one."""
        self._is_lent = False
        self._read_ended.set()
        self._armed.clear()
        self.changed.set()

    async def release(self, door: Door) -> None:
        """End the blocked read, so that the slot it was lent is free again; the look behind it is run first.

        Gives up when the server is away: the read then ends with its connection.
        """
        give_up_at = self._loop.time() + _UNBLOCK_WITHIN_S
        self._is_released = True
        while self._client_id is not None and not self._read_ended.is_set() and self._loop.time() < give_up_at:
            # Again and again: the read may be on its way still, and then there is nothing to unblock yet.
            try:
                await door.call("CLIENT", "UNBLOCK", self._client_id, within_s=_UNBLOCK_WITHIN_S)
                async with asyncio.timeout(0.02):
                    await self._read_ended.wait()
            except TimeoutError:
                continue
            except ConnectionError:
                await asyncio.sleep(door.reconnect_wait_s())
                return
            except ServerRefused:
                self._client_id = None  # no longer allowed: the read ends by its own time limit, or with its connection

    async def stop(self, door: Door, listener: asyncio.Task[None]) -> None:
        """End the blocked read so that no marker is lost with it.

        Just dropping the connection would let the server hand the next marker to a reader that is gone, and idle
        workers would sleep beside the job it announced. So the server is asked to unblock us, and a marker that came
        all the same is passed on by the look behind it or the next exchange.
        """
        self._stopping = True
        try:
            if self._client_id is not None:
                await self.release(door)
            if self._due_ms > self._clock.now_ms() + self._clock_offset_ms:
                await self._pass_on_due_time()
        finally:
            listener.cancel()
            await asyncio.wait([listener])
            self._door.close()
            self._cancel_timer()

    async def _pass_on_due_time(self) -> None:
        """Whoever reads a due time removes it from the marker. Leaving before then, or full when it comes, we hand it
        on."""
        try:
            # NX: a time that stands there was written later than we read ours, and is the earliest.
            await self._commands.call("ZADD", self._marker_key, "NX", self._due_ms, "1", within_s=_UNBLOCK_WITHIN_S)
        except (ServerRefused, ConnectionError):
            pass  # then the others find it at their next look

    async def _learn_client_id(self) -> None:
        wire = await self._door.wire()
        if wire is not self._client_wire:
            try:
                client_id = int(await self._door.call("CLIENT", "ID"))
                await self._door.call("CLIENT", "UNBLOCK", client_id)  # does nothing now, and tells whether we may
                self._client_id = client_id
            except ServerRefused:
                self._client_id = None  # an ACL may forbid it
            self._client_wire = wire

    def _look_at(self, when: float) -> None:
        when = max(when, self._limited_until)
        if self._timer is not None:
            if self._timer_at <= when:
                return  # an earlier look is planned already
            self._timer.cancel()
        self._timer_at = when
        self._timer = self._loop.call_at(when, self._on_timer)

    def _on_timer(self) -> None:
        # A timer may come a fraction of a millisecond early (uvloop counts whole ones). So its time says nothing about
        # whether it is still to come: it is forgotten here, and the reply to the look plans the next one. The limit
        # ends here too: the look is told what is left of it, whereas a worker that still holds itself for limited
        # would sleep with nobody to wake it.
        self._timer = None
        self._limited_until = 0.0
        self.look_now()
        if self._due_ms and not self._may_lend() and not self.is_lent:
            # We cannot take it now. Another one, who sleeps, need not know of it: its marker was read by us.
            self._passing_on = self._loop.create_task(self._pass_on_due_time(), name="bullpen due time")

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
