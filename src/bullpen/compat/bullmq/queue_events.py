"""The events of a queue with PyPI's names."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from bullpen.compat.bullmq._connection import connection_of, prefix_of
from bullpen.compat.bullmq._names import QUEUE_EVENTS, check_backend, check_names
from bullpen.compat.bullmq._options import native_name
from bullpen.compat.bullmq.event_emitter import EventEmitter
from bullpen.errors import BullpenError, EventsLost
from bullpen.queue.events import QueueEvents as NativeEvents
from bullpen.wire.events import QueueEvent

__all__ = ["QueueEvents"]


class QueueEvents(EventEmitter):
    """Calls listeners with `(fields, entry_id)` for each event, and for `<event>:<jobId>`."""

    def __init__(self, name: str, opts: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.name = name
        check_names(opts, QUEUE_EVENTS, "an option of QueueEvents")
        self.opts: dict[str, Any] = {"blockingTimeout": 10_000, "lastEventId": "$", "autorun": True, **(opts or {})}
        check_backend(self.opts)
        self.prefix = prefix_of(self.opts)
        self.qualifiedName = f"{self.prefix}:{name}"
        self.running = self.closing = self.closed = False
        self._connection, self._owns_connection = connection_of(self.opts)
        after = self.opts["lastEventId"]
        self.native_events = NativeEvents(
            native_name(name),
            connection=self._connection,
            prefix=self.prefix,
            after=None if after in (None, "$") else after,
        )
        self._reading: asyncio.Future[None] | None = None
        if self.opts["autorun"]:
            self._reading = asyncio.ensure_future(self._read())

    async def run(self) -> None:
        """Read until closed; for `autorun=False`."""
        if self.running or self._reading is not None:
            raise RuntimeError("QueueEvents is already running.")
        self._reading = asyncio.ensure_future(self._read())
        await asyncio.shield(self._reading)

    async def close(self) -> None:
        """Read no more. Again is without effect."""
        if self.closing:
            return
        self.closing = True
        self.native_events.close()
        if self._reading is not None:
            await asyncio.wait([self._reading])
        if self._owns_connection:
            await self._connection.aclose()
        self.closed = True

    async def _read(self) -> None:
        self.running = True
        try:
            while not self.closing:
                lost, events = await self.native_events.page()
                if lost:
                    self.emit("error", EventsLost("events were trimmed before they were read", queue=self.name))
                for event in events:
                    self._dispatch(event)
                if not events and not lost:
                    return
        except BullpenError as error:
            self.emit("error", error)
        finally:
            self.running = False

    def _dispatch(self, event: QueueEvent) -> None:
        if event.event == "drained":
            self.emit("drained", event.id)
            return
        fields = dict(event.data)
        if event.job_id is not None:
            fields["jobId"] = event.job_id
        if event.attempts_made is not None:
            fields["attemptsMade"] = str(event.attempts_made)
        for name in (event.event, f"{event.event}:{event.job_id}") if event.job_id else (event.event,):
            self.emit(name, fields, event.id)
