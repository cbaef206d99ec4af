"""What a channel answered, as a row may keep it: the message has left, so nothing in an answer may keep it from being
written.

In: whatever a channel returned or raised. Out: a `SendResult` whose texts are scrubbed, storable and bounded. An answer
that could not be written would leave the row to the next sender, who sends again.
Elsewhere: what an answer means for a row (`bullpen.outbox.delivery`, `bullpen.messages.sender`).
"""

from __future__ import annotations

import math
from typing import Final

from bullpen._kernel.outcome import describe, storable
from bullpen._kernel.scrub import scrub
from bullpen.ports.channel import Accepted, NotTried, Refused, SendResult, Unavailable, Unknown

__all__ = ["CHANNEL_ERROR", "answer_of", "raised"]

CHANNEL_ERROR: Final = "CHANNEL_ERROR"
_MOST_CHARACTERS: Final = 100_000
_LONGEST_CODE: Final = 60
_LONGEST_PAUSE_MS: Final = 7 * 86_400_000
_TAKEN: Final = Accepted()


def answer_of(returned: object) -> SendResult:
    """The answer of a channel. Any other value is not understood: the target may have the message."""
    match returned:
        case Accepted(detail):
            return Accepted(_text(detail)) if detail else _TAKEN
        case Refused(reason, code):
            return Refused(_text(reason), _code(code))
        case Unavailable(reason, code, after_ms):
            return Unavailable(_text(reason), _code(code), None if after_ms is None else _pause(after_ms))
        case Unknown(reason, code):
            return Unknown(_text(reason), _code(code))
        case NotTried(reason, after_ms):
            return NotTried(_text(reason), _pause(after_ms))
    return Unknown(f"the channel returned {type(returned).__name__} instead of an answer", CHANNEL_ERROR)


def raised(error: BaseException, code: str = CHANNEL_ERROR) -> Unknown:
    """A channel should answer; whatever it raises, the target may have the message."""
    name, text = type(error).__name__, describe(error)[0]
    return Unknown(_text(name if text == name else f"{name}: {text}"), code)


def _text(value: object) -> str:
    try:
        text = value if isinstance(value, str) else "" if value is None else str(value)
    except Exception:  # noqa: BLE001 - an object of the user's own
        text = f"({type(value).__name__} that cannot be shown)"
    return scrub(storable(text[:_MOST_CHARACTERS]))


def _code(value: object) -> str:
    return _text(value)[:_LONGEST_CODE] or CHANNEL_ERROR


def _pause(value: object) -> int:
    """Whole milliseconds, whatever was given: a provider's clock or a header can say anything."""
    if not isinstance(value, int | float) or math.isnan(value):
        return 0
    return int(min(max(value, 0), _LONGEST_PAUSE_MS))
