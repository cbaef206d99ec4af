"""Know that something has happened in a queue, without reading what.

In: a queue's stream. Out: returns when there are newer events than before. However many are written, a poll moves two
of them: a viewer of a queue reads the queue itself and needs no event for each change.
Elsewhere: the events themselves, in order and without a gap (`events`).
"""

from __future__ import annotations

from types import TracebackType
from typing import Final, Self

from bullpen.redis.client import Connection, Door
from bullpen.wire.keys import QueueKeys, client_name

__all__ = ["QueueActivity"]

_BLOCK_MS: Final = 5_000
_WITHIN_S: Final = _BLOCK_MS / 1000 + 2.0


class QueueActivity:
    """The news of one queue. Raises ConnectionLost when the server goes away."""

    def __init__(self, queue: str, connection: Connection, prefix: str) -> None:
        self._keys = QueueKeys(prefix, queue)
        self._door = Door(connection, client_name(prefix, queue) + ":qe", key=self._keys.base)
        self._position = "0-0"

    async def __aenter__(self) -> Self:
        self._position = await self._newest()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._door.close()

    async def next(self) -> None:
        """Wait until the newest event is another one than it was at the call before."""
        while True:
            # Answered at once when there is something newer; a stream that was created again is detected by its newest
            # event.
            read = ("XREAD", "COUNT", 1, "BLOCK", _BLOCK_MS, "STREAMS", self._keys.events, self._position)
            await self._door.call(*read, within_s=_WITHIN_S)
            newest = await self._newest()
            if newest != self._position:
                self._position = newest
                return

    async def _newest(self) -> str:
        found = await self._door.call("XREVRANGE", self._keys.events, "+", "-", "COUNT", 1)
        return found[0][0].decode() if found else "0-0"
