"""Channels of scheduled messages: which target, how fast, and what an unclear end means.

In: a channel (or a function) and its rules. Out: a `ChannelRoute`, checked. Elsewhere: channels
(`bullpen.ports.channel`, `bullpen.plugins.channels`), using them (`sender`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

from bullpen._kernel import json
from bullpen._kernel.duration import check_int
from bullpen._kernel.execute import call_in_thread, is_async
from bullpen._kernel.rates import RateLimit
from bullpen.errors import PermanentError, require
from bullpen.messages._errors import read_error
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
SendFunction = Callable[[Message], Any]
"""`async def` or plain. Returns what the provider answered, any JSON, or a `SendResult`."""
_LONGEST_RECEIPT: Final = 2_000
USUAL_LIMIT_MS: Final = 10_000


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
    timeout_ms: int | None = None
    """How long one send may take, instead of the channel's own limit; much shorter than the sender's lease. None: as
    the channel's own limit says, at most 10 s."""

    def __post_init__(self) -> None:
        known = self.after_crash in ("same_key", "resend", "look_up", "park")
        require("after_crash", known, "'same_key', 'resend', 'look_up' or 'park'", self.after_crash)
        able = self.after_crash != "look_up" or isinstance(self.channel, LooksUp)
        require("after_crash", able, "another value than 'look_up', because the channel has no look_up", self.channel)
        if self.timeout_ms is not None:
            check_int("timeout_ms", self.timeout_ms, minimum=1)

    @property
    def rule(self) -> WhenUnknown:
        """`after_crash` as channels say it: a key that the provider knows makes sending again harmless."""
        match self.after_crash:
            case "same_key" | "resend":
                return WhenUnknown.RESEND
            case "look_up":
                return WhenUnknown.LOOK_UP
            case "park":
                return WhenUnknown.PARK

    @property
    def limit_ms(self) -> int:
        return self.timeout_ms or USUAL_LIMIT_MS


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
    """A channel made of one function; a plain `def` runs in a thread.

    What it returns is the receipt that is kept. What it raises is an answer where the usual clients (httpx, requests,
    aiohttp, SMTP) tell one; PermanentError is never repeated; of anything else nobody knows whether it was sent.
    """

    def __init__(self, send: SendFunction) -> None:
        require("channel", callable(send), "a function of one message", send)
        self._send = send
        self._is_async = is_async(send)

    def __repr__(self) -> str:
        return f"FunctionChannel({getattr(self._send, '__qualname__', self._send)})"

    async def send(self, message: Message) -> SendResult:
        try:
            answer = (
                self._send(message)
                if self._is_async
                else await call_in_thread(self._send, message, name="bullpen-channel", may_be_left=True)
            )
            if inspect.isawaitable(answer):
                answer = await answer
        except PermanentError as error:
            return Refused(str(error) or "refused", "REFUSED")
        except Exception as error:
            result = read_error(error)
            if result is None:
                raise
            return result
        if isinstance(answer, SendResult):
            return answer
        # It was sent: whatever the receipt is, it must not be a reason to send again.
        receipt = "" if answer is None else answer if isinstance(answer, str) else json.lenient_text(answer)
        return Accepted(receipt[:_LONGEST_RECEIPT])

    async def check(self) -> ChannelHealth:
        return ChannelHealth(True)

    async def aclose(self) -> None:
        """There is nothing to close."""
