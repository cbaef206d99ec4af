"""One socket to a server: commands out, replies in order, and what an error reply means.

In: packed commands. Out: replies, or one of our errors. Nothing is retried and nothing is known of queues.
Elsewhere: opening a wire again after it broke (`client`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from time import monotonic
from typing import Any, Final, Protocol, cast

import hiredis

from bullpen._kernel.heap import give_back
from bullpen.errors import ConnectionLost, OutOfMemory, ServerRefused
from bullpen.redis.address import Command, NodeAddress
from bullpen.redis.discovery import ServerUnavailable

NOT_YET: Final = object()
"""What a reader answers while a reply is incomplete."""
UNREADABLE: Final = hiredis.HiredisError
"""What a reader raises for bytes that are no reply."""
_WATCH_EVERY_S: Final = 0.5
_LONGEST_WATCH_S: Final = 2.0
_READ_BYTES: Final = 65_536
"""asyncio makes room for 256 KiB for each read. That is so much that the C library gets it from the system and gives it
back each time, which cost a short command more than the rest of the reading (a job and its result on an idle queue:
1.44 ms, with this 1.10 ms). uvloop has one buffer for all."""

_pack = cast("Callable[[tuple[Any, ...]], bytes]", hiredis.pack_command)  # its own type claims a tuple of one


_PING: Final = _pack(("PING",))
_KEEP_ALIVE_S: Final = 30


def pack(command: tuple[Any, ...]) -> bytes:
    """One command in the protocol's form."""
    try:
        return _pack(command)
    except UnicodeEncodeError:
        # An id that is no UTF-8 was read with surrogates in place of its bytes; the same bytes go back.
        return _pack(tuple(map(as_sent, command)))


def as_sent(part: Any) -> Any:
    """Text as the bytes it was read from; anything else as it is."""
    return part.encode("utf-8", "surrogateescape") if isinstance(part, str) else part


HOLE: Final = object()
"""In the commands of a `Form`: what differs each time."""


class Form:
    """Commands that are packed once but for holes. To fill those in takes a tenth of packing all anew, where somebody
    waits."""

    __slots__ = ("_form",)

    def __init__(self, *commands: tuple[Any, ...]) -> None:
        parts: list[bytes] = []
        for command in commands:
            parts.append(b"*%d\r\n" % len(command))
            parts += (
                b"$%d\r\n%b\r\n" if part is HOLE else pack((part,)).removeprefix(b"*1\r\n").replace(b"%", b"%%")
                for part in command
            )
        self._form = b"".join(parts)

    def fill(self, *values: bytes) -> bytes:
        """The commands with these in their holes, in order."""
        filling: list[Any] = []
        for value in values:
            filling += (len(value), value)
        return self._form % tuple(filling)


class ReplyError(hiredis.ReplyError):
    """An error reply as the parser delivers it, before it is translated."""


def new_reader() -> hiredis.Reader:
    return hiredis.Reader(replyError=ReplyError, notEnoughData=NOT_YET)


class Moved(ServerUnavailable):
    """The slot has a new home. Nothing was executed; whoever follows may send the same again at once."""

    def __init__(self, text: str) -> None:
        super().__init__(f"the cluster moved the slot: {text}")
        _, _, self.target = text.split(" ")[:3]


# The server says that it did nothing and may be asked again, perhaps elsewhere. ASK: a slot is on its way, and its
# keys are in two places; following would write into both.
_TRANSIENT: Final = (
    *("LOADING", "BUSY", "TRYAGAIN", "ASK ", "MASTERDOWN", "CLUSTERDOWN", "READONLY", "UNBLOCKED", "NOREPLICAS"),
    "MISCONF",
    "ERR max number of clients",  # told to a new connection, which is then closed; others go, and there is room again
)
# How Redis before 7.0 shows the refusal of a command inside a script. These codes stop a script at its first write.
_WRAPPED_BY_SCRIPT: Final = re.compile(r"^ERR Error running script .*@user_script: \d+: -", re.DOTALL)
FOREIGN_KEY: Final = "non local key in a cluster"
ONE_SLOT: Final = (
    'a hash tag, so that all keys share a slot of the cluster: prefix="{bull}", or braces in the name of the queue'
)


def translate(error: BaseException) -> Exception:
    """Map an error reply to our own error. The server's text is kept."""
    text = _WRAPPED_BY_SCRIPT.sub("", str(error))
    if text.startswith(_TRANSIENT):
        return ServerUnavailable(f"the server cannot serve commands now: {text}")
    if text.startswith("OOM") or "OOM command not allowed" in text:
        return OutOfMemory(f"the server is out of memory and stored nothing: {text}")
    if text.startswith("MOVED "):
        return ServerRefused(
            f"the server is part of a cluster, give its address as redis+cluster://… and its queues {ONE_SLOT}: {text}"
        )
    if text.startswith("CROSSSLOT") or FOREIGN_KEY in text:
        return ServerRefused(f"the server refused the command, keys need {ONE_SLOT}: {text}")
    return ServerRefused(f"the server refused the command: {text}")


def reason_of(error: BaseException) -> str:
    """What an error says, and never nothing: a timeout, for one, has no text."""
    return str(error).strip() or ("no answer in time" if isinstance(error, TimeoutError) else type(error).__name__)


class Receiver(Protocol):
    """What gets a reply, from within the loop: a future, or something that acts at once. It must not raise."""

    def done(self) -> bool:
        """Nobody waits any more: the reply is dropped."""

    def set_result(self, reply: Any, /) -> None: ...
    def set_exception(self, error: BaseException, /) -> None:
        """An error reply as it came, or ConnectionLost."""


class Kept:
    """A receiver that nobody waits for: the reply is looked at when a later one has come."""

    __slots__ = ("reply",)

    def __init__(self) -> None:
        self.reply: Any = None

    def done(self) -> bool:
        return False

    def set_result(self, reply: Any, /) -> None:
        self.reply = reply

    def set_exception(self, error: BaseException, /) -> None:
        self.reply = error


Sending = tuple[Receiver, bytes, float]
"""Who gets the reply, the packed command, and within how many seconds it must be answered."""


class Wire(asyncio.Protocol):
    """One socket to the server. Replies come in the order of the calls; a call without reply in time breaks the
    wire."""

    def __init__(
        self, endpoint: NodeAddress, *, ping_every_s: float | None = None, ping_within_s: float = math.inf
    ) -> None:
        """`ping_every_s`: a wire on which nothing is under way is used so often, and broken when the answer does not
        come `ping_within_s`. None: never."""
        self.endpoint = endpoint
        self._ping_every_s = math.inf if ping_every_s is None else ping_every_s
        self._ping_within_s = ping_within_s
        self._ping_at = monotonic() + self._ping_every_s
        self._loop = asyncio.get_running_loop()
        reader = new_reader()
        self._feed, self._gets = reader.feed, reader.gets
        self._waiting: deque[tuple[Receiver, float]] = deque()
        self._transport: asyncio.Transport | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._awake_until, self._is_awake = 0.0, False
        self._is_large = self._was_large = False
        """Large payloads have come or gone since the last look for silence, or until then."""
        self._is_retired = False
        self.broken = False
        self.why_broken = ""
        self.broken_at = 0.0
        self.silent_since: float | None = None
        """When the call was sent, or should have been answered, whose answer did not come."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transports are no subclass of asyncio's
        if hasattr(transport, "max_size"):
            transport.max_size = _READ_BYTES
        if (opened := transport.get_extra_info("socket")) is not None:
            keep_alive(opened, self._ping_every_s)
        self._watch = self._loop.call_later(_WATCH_EVERY_S, self._look_for_silence)

    def data_received(self, data: bytes) -> None:
        gets, waiting = self._gets, self._waiting
        self._feed(data)
        try:
            reply = gets()
            if reply is NOT_YET:
                self._is_large = True  # a piece of one
            while reply is not NOT_YET:
                if not waiting:
                    self.close(f"{self.endpoint} answers what nobody asked: is it a Redis server?")
                    return
                receiver = waiting.popleft()[0]
                if not receiver.done():
                    if type(reply) is ReplyError:
                        receiver.set_exception(reply)
                    else:
                        receiver.set_result(reply)
                    if self.broken:  # by whoever got that reply: all others have been told that theirs are lost
                        return
                reply = gets()
        except UNREADABLE as error:
            self.close(f"{self.endpoint} sends what is no reply: is it a Redis server? ({error})")

    def pause_writing(self) -> None:
        """More was written than the system takes at once."""
        self._is_large = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.close(f"{self.endpoint}: {exc or 'closed by the server'}")

    def send(self, packed: bytes, *, within_s: float) -> asyncio.Future[Any]:
        """Write one packed command; the future gets its reply, an error reply, or ConnectionLost."""
        future: asyncio.Future[Any] = self._loop.create_future()
        self.send_to(future, packed, within_s=within_s)
        return future

    def send_to(self, receiver: Receiver, packed: bytes, *, within_s: float) -> None:
        """Write one packed command; the receiver gets what the future of `send` would."""
        if self.broken or self._transport is None:
            receiver.set_exception(ConnectionLost(f"connection to {self.endpoint} is closed"))
            return
        self._waiting.append((receiver, monotonic() + within_s))
        self._transport.write(packed)

    def stay_awake(self, until: float) -> None:
        """Keep the loop from sleeping while an answer is missing, until then at the longest. Whatever else the loop has
        to do is done as ever."""
        self._awake_until = until
        if not self._is_awake:
            self._is_awake = True
            self._loop.call_soon(self._look_again)

    def _look_again(self) -> None:
        if self._waiting and monotonic() < self._awake_until:
            self._loop.call_soon(self._look_again)  # with something to do, a loop asks for news without waiting
        else:
            self._is_awake = False

    def send_two(self, packed: bytes, behind: bytes, *, within_s: float) -> tuple[Kept, asyncio.Future[Any]]:
        """Two packed commands in one write; both have to be answered in time. Only the second is waited for: the first
        is answered before it, or lost with it."""
        first = Kept()
        future: asyncio.Future[Any] = self._loop.create_future()
        self.send_all((first, packed, within_s), (future, behind, within_s))
        return first, future

    def send_all(self, *sendings: Sending) -> None:
        """Several packed commands in one write."""
        if self.broken or self._transport is None:
            for receiver, _, _ in sendings:
                receiver.set_exception(ConnectionLost(f"connection to {self.endpoint} is closed"))
            return
        now, wait, parts = monotonic(), self._waiting.append, []
        for receiver, packed, within_s in sendings:
            wait((receiver, now + within_s))
            parts.append(packed)
        self._transport.write(b"".join(parts))

    async def converse(self, commands: Iterable[Command], *, within_s: float) -> list[Any]:
        """Several commands in one write. Error replies are returned in place, as they came."""
        sendings = [(self._loop.create_future(), pack(command), within_s) for command in commands]
        self.send_all(*sendings)
        futures = [future for future, _, _ in sendings]
        replies = await asyncio.gather(*futures, return_exceptions=True)
        for reply in replies:
            if isinstance(reply, ConnectionLost):
                # A server that has no room for us answers once, whatever it was asked, and hangs up.
                refusal = translate(replies[0]) if isinstance(replies[0], ReplyError) else reply
                raise refusal if isinstance(refusal, ServerUnavailable) else reply
        return replies

    @contextlib.contextmanager
    def unread(self) -> Iterator[None]:
        """Read nothing meanwhile: as long as nothing was asked there is nobody to get an answer."""
        assert self._transport is not None
        self._transport.pause_reading()
        yield
        if not self.broken:
            self._transport.resume_reading()

    @property
    def is_in_use(self) -> bool:
        """Neither broken nor retired."""
        return not self.broken and not self._is_retired

    @property
    def is_over(self) -> bool:
        """Nothing will come on it any more."""
        return self.broken

    def retire(self) -> None:
        """Close when what was sent has been answered. Whoever opened another wire has its answers here still to
        come."""
        self._is_retired = True
        if not self._waiting:
            self.close()

    def close(self, why: str = "closed by us") -> None:
        """Break the wire; every call that still waits raises ConnectionLost. Safe to repeat."""
        if self.broken:
            return
        self.broken, self.why_broken, self.broken_at = True, why, monotonic()
        if self._watch is not None:
            self._watch.cancel()
        if self._transport is not None:
            self._transport.abort()
        while self._waiting:
            future, _ = self._waiting.popleft()
            if not future.done():
                future.set_exception(ConnectionLost(why))

    def _look_for_silence(self) -> None:
        if self._waiting and monotonic() > self._waiting[0][1]:
            if math.isfinite(self._ping_within_s):  # the limit of all calls; those that block have more
                self.silent_since = self._waiting[0][1] - self._ping_within_s
            self.close(f"{self.endpoint} did not answer in time")
        elif self._is_retired and not self._waiting:
            self.close()
        elif not self.broken:
            if self._was_large and not self._is_large:
                give_back()
            self._was_large, self._is_large = self._is_large, False
            self._ping_if_idle()
            self._watch = self._loop.call_later(self._until_next_look_s(), self._look_for_silence)

    def _until_next_look_s(self) -> float:
        """A blocked read may be answered late: no need to look twice a second at each of hundreds. Not as late as its
        end, because it may be answered early, and what is asked behind it has less time; nor later than a ping."""
        if not self._waiting:
            return _WATCH_EVERY_S
        left_s = min(self._waiting[0][1] - monotonic(), self._ping_every_s, _LONGEST_WATCH_S)
        return max(_WATCH_EVERY_S, left_s)

    def _ping_if_idle(self) -> None:
        """A firewall forgets a connection that is idle for long, and tells nobody: the next command would only fail
        when its time is up. Pinging also without need, from time to time, is cheaper than noting each use."""
        now = monotonic()
        if self._waiting:
            self._ping_at = now + self._ping_every_s
        elif now >= self._ping_at:
            self._ping_at = now + self._ping_every_s
            self.send_to(Kept(), _PING, within_s=self._ping_within_s)


def keep_alive(opened: Any, after_s: float) -> None:
    """Let the system notice a peer that is gone, and firewalls a connection that is used. Nothing for a unix socket."""
    if opened.family not in (socket.AF_INET, socket.AF_INET6):
        return
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    seconds = max(1, int(min(after_s, _KEEP_ALIVE_S)))
    for name, value in (("TCP_KEEPIDLE", seconds), ("TCP_KEEPINTVL", max(1, seconds // 3)), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # not every system has them all
            opened.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
