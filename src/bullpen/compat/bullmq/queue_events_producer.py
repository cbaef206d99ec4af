"""Events of one's own, with PyPI's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bullpen.compat.bullmq._connection import connection_of, prefix_of
from bullpen.compat.bullmq._names import COMMON, check_backend, check_names
from bullpen.compat.bullmq._options import native_name
from bullpen.queue.queue import Queue as NativeQueue

__all__ = ["QueueEventsProducer"]


class QueueEventsProducer:
    """Writes events that every reader of the queue sees."""

    def __init__(self, name: str, opts: Mapping[str, Any] | None = None) -> None:
        self.name = name
        self.opts: Mapping[str, Any] = opts or {}
        check_names(self.opts, COMMON, "an option of QueueEventsProducer")
        check_backend(self.opts)
        self.prefix = prefix_of(self.opts)
        self.qualifiedName = f"{self.prefix}:{name}"
        self.closing = False
        self._connection, self._owns_connection = connection_of(self.opts)
        self.native_queue = NativeQueue(native_name(name), connection=self._connection, prefix=self.prefix)

    async def publishEvent(self, args: Mapping[str, Any], maxEvents: int = 1000) -> None:
        """Write one; `eventName` is its name, the rest its fields. About `maxEvents` stay."""
        if "eventName" not in args:
            raise ValueError("publishEvent requires an 'eventName' key")
        fields = {name: value for name, value in args.items() if name != "eventName"}
        await self.native_queue.publish_event(args["eventName"], fields, max_len=maxEvents)

    async def close(self) -> None:
        """Let go of the connection."""
        if self.closing:
            return
        self.closing = True
        await self.native_queue.close()
        if self._owns_connection:
            await self._connection.aclose()
