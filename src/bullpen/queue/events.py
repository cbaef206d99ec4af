"""Read a queue's events, in order, and notice when some were trimmed before we came.

In: the stream that every BullMQ client writes. Out: an async iterator of events. The position is read from the server
before `ready`, so what is added right after is not missed. Elsewhere: what an event holds (`bullpen.wire.events`),
waiting for results (`results`).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Self, TypeVar

from bullpen._kernel.ids import check_queue_name
from bullpen._kernel.logs import get_logger
from bullpen.errors import (
    EventsLost,
    require,
)
from bullpen.redis.client import Connection, Door
from bullpen.redis.default import connection_for, prefix_for
from bullpen.redis.socket import HOLE, Form, Receiver
from bullpen.wire.events import QueueEvent
from bullpen.wire.keys import QueueKeys, client_name
from bullpen.wire.scripts import SCRIPTS

logger = get_logger("bullpen.events")

EventCallback = TypeVar("EventCallback", bound=Callable[[Any], Any])

_BLOCK_MS = 5_000
_WITHIN_S = _BLOCK_MS / 1000 + 2.0
"""A blocked read may be answered late by a server tick; after this it is taken for dead."""
PAGE = 1_000
"""Events read in one round trip."""


class StreamClosed(Exception):
    """This side closed the client: reading ends."""


class EventStream:
    """The raw reader of a stream: pages of (id, fields) after a position, for ever, over reconnects."""

    def __init__(self, door: Door, key: str, position: str | None = None) -> None:
        """Without a position it begins behind what is there at `start`."""
        self._door = door
        self._key = key
        self._position = position
        self._last: list[bytes] | None = None  # what the event at our position holds, if we read it
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
        self._position, self._last = event_id.decode(), None
        self._read_so_far, self._in_doubt, self._is_new = -1, False, True
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
            self._stand_at(entries[-1])
        return entries

    def _stand_at(self, entry: list[Any]) -> None:
        self._position, self._last = entry[0].decode(), entry[1]

    def doubt(self) -> None:
        """A glance was lost: something may be missing."""
        self._in_doubt = True

    def has_passed(self, event_id: bytes) -> bool:
        """Whether we have read further than this event."""
        return event_id.decode() != self.position and not _after(event_id, self.position)

    async def start(self) -> None:
        """Fix the position; waits while the server is unreachable."""
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
                self._stand_at(entries[-1])
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
        return await self._door.evaluate(SCRIPTS["read_events"], [self._key], [after, PAGE])

    async def _read_blocked(self) -> tuple[bool, list[Any]]:
        """Wait for what comes next. While our last event is still in the stream, nothing behind it can be gone.

        Both commands go in one write, and a server runs what one client sent together without another in between. An
        event with the id of ours that holds something else: the stream was deleted and created again, in the same
        millisecond. What it holds is read from its beginning.
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
        if known and self._last is not None and known[0][1] != self._last:
            self._position, self._last = "0-0", None
            self._read_so_far, self._in_doubt = 0, True
            return True, []
        # Is it gone, the page is read again, with the counts that tell whether something is missing.
        self._in_doubt = not known
        return False, list(reply[0][1]) if reply and known else []

    async def _pause(self) -> None:
        if self._door.closed:
            raise StreamClosed
        await asyncio.sleep(self._door.reconnect_wait_s())


def _blocked_read(key: str, position: str) -> tuple[str | int, ...]:
    return ("XREAD", "COUNT", PAGE, "BLOCK", _BLOCK_MS, "STREAMS", key, position)


def _after(entry_id: bytes, position: str) -> bool:
    left, right = (tuple(map(int, text.split("-"))) for text in (entry_id.decode(), position))
    return left > right


class QueueEvents:
    """The events of one queue as an async iterator.

        async with QueueEvents("emails", connection=url) as events:
            async for event in events:
                print(event.event, event.job_id)

    Entering waits until the position is fixed: events of jobs added afterwards are seen. Raises EventsLost when the
    stream was trimmed before it was read (raise `events_max_len`, or read faster); iterate again to continue with what
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
            "the stream is too short for this reader. Iterate again to continue",
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
        except StreamClosed:
            return False, []
        return lost, [QueueEvent.parse(entry_id, fields) for entry_id, fields in entries]

    def __aiter__(self) -> AsyncIterator[QueueEvent]:
        return self

    async def __anext__(self) -> QueueEvent:
        if not self._waiting:
            try:
                lost, entries = await self._stream.next_page()
            except StreamClosed:
                raise StopAsyncIteration from None
            self._waiting = [QueueEvent.parse(entry_id, fields) for entry_id, fields in reversed(entries)]
            if lost:
                raise self._loss()
        return self._waiting.pop()
