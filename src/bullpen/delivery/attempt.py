"""Call a channel once, whatever it does.

In: a message, its channel, a time limit, and whether to ask the target first. Out: an answer, always: what a channel
raises, or does not say in time, is an answer of which nobody knows more. Elsewhere: what an answer means (`judge`),
whether the target may be called at all (`gates`).
"""

from __future__ import annotations

import asyncio
from typing import Final

from bullpen._kernel.logs import get_logger
from bullpen._kernel.within import within
from bullpen.delivery.judge import TIMEOUT, UNKNOWN_OUTCOME
from bullpen.ports.answers import answer_of, raised
from bullpen.ports.channel import Accepted, Channel, LooksUp, Message, SendResult, Unavailable, Unknown

__all__ = ["attempt"]

_log: Final = get_logger("bullpen.delivery")


async def attempt(message: Message, channel: Channel, *, limit_ms: int, look_up: bool = False) -> SendResult:
    """Send a message, or with `look_up` only if its target does not have it. Each of the two may take `limit_ms`."""
    if look_up and (found := await _look_up(message, channel, limit_ms)) is not None:
        return found
    try:
        return answer_of(await within(channel.send(message), limit_ms / 1000))
    except TimeoutError:
        return Unknown(f"no answer within {limit_ms} ms", TIMEOUT)
    except Exception as error:  # noqa: BLE001 - a channel that raises has a bug; its message is still owed
        # Without its text and trace, which may show what is being sent. A type may hold an address.
        _log.error("channel of %r raised %s", message.integration_type.partition(":")[0], type(error).__name__)
        return raised(error)


async def _look_up(message: Message, channel: Channel, limit_ms: int) -> Accepted | Unavailable | None:
    """Whether the target has it. Not being able to tell keeps the doubt: it is asked again next time."""
    assert isinstance(channel, LooksUp)
    try:
        async with asyncio.timeout(limit_ms / 1000):
            found = await channel.look_up(message)
    except Exception as error:  # noqa: BLE001 - as above
        kind = message.integration_type.partition(":")[0]
        _log.error("looking up a message of %r raised %s", kind, type(error).__name__)
        return Unavailable(raised(error).reason, UNKNOWN_OUTCOME)
    if found is None:
        return None
    match answer_of(found):
        case Accepted() as there:
            return there
        case Unavailable(reason, _, after_ms):
            return Unavailable(reason, UNKNOWN_OUTCOME, after_ms)
        case other:
            return Unavailable(other.reason, UNKNOWN_OUTCOME)
