"""Channels of scheduled messages: which target, how fast, and what an unclear end means.

In: a channel (or a function) and its rules. Out: a `ChannelRoute`, checked. Elsewhere: channels
(`bullpen.ports.channel`, `bullpen.plugins.channels`), using them (`sender`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from bullpen._kernel.duration import check_int
from bullpen._kernel.rates import RateLimit
from bullpen.errors import PermanentError, require
from bullpen.ports.channel import (
    Accepted,
    Channel,
    ChannelHealth,
    LooksUp,
    Message,
    Refused,
    SendResult,
    WhenUnknown,
    when_unknown,
)

__all__ = ["AfterCrash", "ChannelRoute", "FunctionChannel", "rule_of"]

AfterCrash = Literal["same_key", "resend", "look_up", "park"]
SendFunction = Callable[[Message], Awaitable[SendResult | str | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelRoute:
    """One channel, as recipients name it."""

    channel: Channel
    after_crash: AfterCrash
    """A sender died after it had begun to send, or no answer came: nobody knows whether the message left.

    same_key: send again; the provider knows the idempotency key and drops the second one. resend: send again although
    the provider may deliver both. look_up: ask the provider, and send what it does not have. park: send nothing until a
    person has looked."""
    rate_limit: RateLimit | None = None
    """At most so many sends per time, over all processes."""
    timeout_ms: int = 10_000
    """How long one send may take. Much shorter than the sender's lease."""

    def __post_init__(self) -> None:
        known = self.after_crash in ("same_key", "resend", "look_up", "park")
        require("after_crash", known, "'same_key', 'resend', 'look_up' or 'park'", self.after_crash)
        able = self.after_crash != "look_up" or isinstance(self.channel, LooksUp)
        require("after_crash", able, "something else than 'look_up' for a channel that cannot be asked", self.channel)
        check_int("timeout_ms", self.timeout_ms, minimum=1)


def rule_of(channel: Channel) -> AfterCrash:
    """What a channel says of itself."""
    match when_unknown(channel):
        case WhenUnknown.RESEND:
            return "resend"
        case WhenUnknown.LOOK_UP:
            return "look_up"
        case WhenUnknown.PARK:
            return "park"


class FunctionChannel:
    """A channel made of one function. It returns what the provider answered; what it raises is a failed attempt, and
    PermanentError one that is not repeated."""

    def __init__(self, send: SendFunction) -> None:
        self._send = send

    def __repr__(self) -> str:
        return f"FunctionChannel({getattr(self._send, '__qualname__', self._send)})"

    async def send(self, message: Message) -> SendResult:
        try:
            answer = await self._send(message)
        except PermanentError as error:
            return Refused(str(error) or "refused", "REFUSED")
        return answer if answer is not None and not isinstance(answer, str) else Accepted(answer or "")

    async def check(self) -> ChannelHealth:
        return ChannelHealth(True)

    async def aclose(self) -> None:
        """There is nothing to close."""
