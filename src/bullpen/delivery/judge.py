"""What an answer means, and what follows when there was none. Pure.

One rule for all that is delivered: a channel says what to do with a message of which nobody knows whether the target
has it (`WhenUnknown`), and both halves of that stand here, before an attempt (`first_step`) and after it (`judge`).
Elsewhere: asking the target (`attempt`), writing the outcome (`settle`).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Final, assert_never

from bullpen._kernel.scrub import scrub
from bullpen.ledger import Died, Released, Retried, RowOutcome, Sent
from bullpen.ports.channel import Accepted, NotTried, Refused, SendResult, Unavailable, Unknown, WhenUnknown

__all__ = ["LEASE_EXPIRED", "TIMEOUT", "UNKNOWN_OUTCOME", "FirstStep", "first_step", "judge"]

LEASE_EXPIRED: Final = "LEASE_EXPIRED"
UNKNOWN_OUTCOME: Final = "UNKNOWN_OUTCOME"
"""Nobody knows whether the target has it. With `Died` a person must decide: it may not get it twice."""
TIMEOUT: Final = "TIMEOUT"

_SENT: Final = Sent()


class FirstStep(Enum):
    """How an attempt begins."""

    SEND = "send"
    LOOK_UP = "look_up"
    """Ask the target first."""
    PARK = "park"
    """Not at all: a person must decide."""


def first_step(rule: WhenUnknown, *, in_doubt: bool) -> FirstStep:
    """`in_doubt`: nobody knows what became of the last attempt."""
    if not in_doubt or rule is WhenUnknown.RESEND:
        return FirstStep.SEND
    return FirstStep.LOOK_UP if rule is WhenUnknown.LOOK_UP else FirstStep.PARK


def judge(result: SendResult, rule: WhenUnknown, *, delay_ms: Callable[[int | None], int]) -> RowOutcome:
    """What an answer means. `delay_ms` gives the pause before the next attempt, from what the target asked for."""
    match result:
        case Accepted(detail):
            return Sent(scrub(detail)) if detail else _SENT
        case Refused(reason, code):
            return Died(scrub(reason), code)
        case NotTried(reason, after_ms):
            return Released(after_ms, scrub(reason))
        case Unavailable(reason, code, after_ms):
            return Retried(scrub(reason), code, delay_ms(after_ms))
        case Unknown(reason, code):
            if rule is WhenUnknown.PARK:
                return Died(f"{scrub(reason)}; it may have been delivered", UNKNOWN_OUTCOME)
            known_by = code if rule is WhenUnknown.RESEND else UNKNOWN_OUTCOME
            return Retried(scrub(reason), known_by, delay_ms(None))
    assert_never(result)
