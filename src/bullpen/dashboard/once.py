"""What a form or a request asks for is done once, however often it arrives and at whichever process.

In: a key of the sender, and the work. Out: what the first one answered. The server of the queues holds the key: of two
that come at the same moment one does the work and the other waits for its answer. Work that fails may be tried again.
A process that dies in the middle leaves a key without an answer: whether it was done is not known, and whoever sends it
again is told so.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from bullpen.dashboard._web import PageProblem
from bullpen.redis import Connection
from bullpen.wire.keys import QueueKeys

__all__ = ["Once"]

_KEPT_MS: Final = 600_000
_WAIT_S: Final = 5.0
_ASK_EVERY_S: Final = 0.1


class Once:
    """Remembers for ten minutes what was done."""

    def __init__(self, connection: Connection, keys: QueueKeys) -> None:
        self._connection, self._keys = connection, keys

    async def do(self, sender: str, work: Callable[[], Awaitable[list[str]]]) -> list[str]:
        """The answer of `work`, or of the same work that was done before. Raises PageProblem 409 when nobody knows."""
        key = self._keys.once(hashlib.sha256(sender.encode("utf-8", "surrogateescape")).hexdigest()[:32])
        door = self._connection.shared_door(key)
        if await door.call("SET", key, "", "NX", "PX", _KEPT_MS) is None:
            return await self._answer_of_another(key)
        try:
            answer = await work()
        except BaseException:
            await door.call("DEL", key)
            raise
        await door.call("SET", key, msgspec.json.encode(answer), "PX", _KEPT_MS)
        return answer

    async def _answer_of_another(self, key: str) -> list[str]:
        until = time.monotonic() + _WAIT_S
        while time.monotonic() < until:
            raw = await self._connection.shared_door(key).call("GET", key)
            if raw is None:
                raise PageProblem(
                    409, "The same request was sent a moment ago and failed. Check the result, then try again."
                )
            if raw:
                return msgspec.json.decode(raw, type=list[str])
            await asyncio.sleep(_ASK_EVERY_S)
        text = "The same request was sent before, and its outcome is unknown. Check before you repeat it."
        raise PageProblem(409, text)
