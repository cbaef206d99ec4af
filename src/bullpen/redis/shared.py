"""One wire to each node of a cluster, for all doors of a loop that send short calls there.

In: where a wire is wanted to, and how one is opened. Out: a `Share` of it, which is used as a wire of one's own: who
closes it ends its own calls, and the others notice nothing. The last who leaves closes the wire. A queue is in one slot
and has a door of its own, since slots move one by one; without this it would have a socket of its own, too.
Elsewhere: which node it is, and opening again after a loss (`client`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Hashable
from time import monotonic
from typing import Any

from bullpen.errors import ConnectionLost
from bullpen.redis.address import NodeAddress
from bullpen.redis.socket import Receiver, Sending, Wire

Open = Callable[[], Coroutine[Any, Any, "SharedWire"]]


class SharedWire(Wire):
    """The socket. Only its shares are used to send."""

    line: _Line | None = None

    def __init__(
        self, endpoint: NodeAddress, *, ping_every_s: float | None = None, ping_within_s: float = math.inf
    ) -> None:
        super().__init__(endpoint, ping_every_s=ping_every_s, ping_within_s=ping_within_s)
        self.shares: set[Share] = set()

    def close(self, why: str = "closed by us") -> None:
        # First: whoever gets an error from here asks its share whether it is still good.
        was_open, shares = not self.broken, self.shares
        self.shares = set()
        for share in shares:
            share.note_broken(why, self.silent_since)
        super().close(why)
        if was_open and self.line is not None:
            self.line.tidy()

    def leave(self, share: Share) -> None:
        self.shares.discard(share)
        if self.line is not None:
            self.line.tidy()

    def answers_awaited_by(self, share: Share) -> list[_Own]:
        return [one for one, _ in self._waiting if type(one) is _Own and one.share is share and not one.done()]


class _Own:
    """A receiver, and whose it is."""

    __slots__ = ("_has_ended", "_receiver", "share")

    def __init__(self, receiver: Receiver, share: Share) -> None:
        self._receiver, self.share = receiver, share
        self._has_ended = False

    def done(self) -> bool:
        return self._has_ended or self._receiver.done()

    def set_result(self, reply: Any, /) -> None:
        self._has_ended = True
        self._receiver.set_result(reply)

    def set_exception(self, error: BaseException, /) -> None:
        self._has_ended = True
        self._receiver.set_exception(error)


class Share(Wire):
    """A wire for one door, through a socket that it has in common with others."""

    def __init__(self, wire: SharedWire) -> None:
        super().__init__(wire.endpoint)
        self._shared = wire
        wire.shares.add(self)

    def send_to(self, receiver: Receiver, packed: bytes, *, within_s: float) -> None:
        if self.broken:
            super().send_to(receiver, packed, within_s=within_s)
        else:
            self._shared.send_to(_Own(receiver, self), packed, within_s=within_s)

    def send_all(self, *sendings: Sending) -> None:
        if self.broken:
            super().send_all(*sendings)
        else:
            own = [(_Own(receiver, self), packed, within_s) for receiver, packed, within_s in sendings]
            self._shared.send_all(*own)

    def stay_awake(self, until: float) -> None:
        self._shared.stay_awake(until)

    @property
    def is_over(self) -> bool:
        return self.broken or (self._is_retired and not self._shared.answers_awaited_by(self))

    def retire(self) -> None:
        """Leave the socket to the others. What was sent still gets its answers there."""
        self._is_retired = True
        self._shared.leave(self)

    def close(self, why: str = "closed by us") -> None:
        if self.broken:
            return
        awaited = self._shared.answers_awaited_by(self)
        super().close(why)
        self._shared.leave(self)
        for one in awaited:
            if not one.done():  # one that was told may have ended another
                one.set_exception(ConnectionLost(why))

    def note_broken(self, why: str, silent_since: float | None) -> None:
        self.broken, self.why_broken, self.broken_at, self.silent_since = True, why, monotonic(), silent_since


class _Line:
    """The wire to one node, and who waits for it to be opened."""

    def __init__(self, where: tuple[asyncio.AbstractEventLoop, Hashable]) -> None:
        self._where = where
        self._wire: SharedWire | None = None
        self._opening: asyncio.Task[None] | None = None
        self._waiting = 0

    async def share(self, open_wire: Open) -> Share:
        self._waiting += 1
        try:
            while self._wire is None or not self._wire.is_in_use:
                if self._opening is None:
                    self._opening = asyncio.create_task(self._open(open_wire), name="bullpen shared connection")
                    self._opening.add_done_callback(_hear)
                # All who wait hear of the same failure: one after another each would wait for its own.
                await asyncio.shield(self._opening)
            return Share(self._wire)
        finally:
            self._waiting -= 1
            self.tidy()

    def tidy(self) -> None:
        """Close what nobody uses any more."""
        if self._waiting or (self._wire is not None and self._wire.shares):
            return
        if self._opening is not None:
            self._opening.cancel()
        wire, self._opening, self._wire = self._wire, None, None
        if _lines.get(self._where) is self:
            del _lines[self._where]
        if wire is not None:
            wire.retire()

    async def _open(self, open_wire: Open) -> None:
        this = asyncio.current_task()
        try:
            wire = await open_wire()
        finally:
            # Here and not by a callback: that comes a moment after the end, and in between the task is no more use.
            is_wanted = self._opening is this
            if is_wanted:
                self._opening = None
        if is_wanted:
            self._wire, wire.line = wire, self
        else:
            wire.close()


def _hear(opening: asyncio.Task[None]) -> None:
    """Of a failure that all who waited did not wait for."""
    if not opening.cancelled():
        opening.exception()


_lines: dict[tuple[asyncio.AbstractEventLoop, Hashable], _Line] = {}


async def take_share(where: Hashable, open_wire: Open) -> Share:
    """Of the wire to `where` that the running loop has open, or opens now. Raises what opening it raises."""
    loop = asyncio.get_running_loop()
    for known in list(_lines):  # of all loops, in whatever threads
        if known[0].is_closed():
            _lines.pop(known, None)
    line = _lines.get((loop, where))
    if line is None:
        line = _lines[loop, where] = _Line((loop, where))
    return await line.share(open_wire)
