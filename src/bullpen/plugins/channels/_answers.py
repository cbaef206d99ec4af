"""What an answer over HTTP means, the same for every channel that speaks it.

2xx is accepted; 408, 425, 429 and 5xx mean "not now", not before `Retry-After`; everything else, redirects included,
means "never". Without an answer it depends on whether the request had begun to leave.
"""

from __future__ import annotations

from typing import Final

from bullpen._kernel.retry_after import retry_after_ms
from bullpen.plugins._http import AddressRefused, HttpAnswer, HttpFailed
from bullpen.ports.channel import Accepted, Refused, SendResult, Unavailable, Unknown

__all__ = ["read_answer", "read_failure"]

TRY_AGAIN: Final = frozenset({408, 425, 429})
"""The 4xx that mean "not now"; all others mean "never"."""


def read_answer(answer: HttpAnswer, *, now: float, receipt: str = "", error: str = "") -> SendResult:
    """The meaning of a status. `receipt` and `error` are what the channel read in the body; `now` is Unix time."""
    status, code = answer.status, f"HTTP_{answer.status}"
    told = f"the target answered {status}{f': {error}' if error else ''}"
    if 200 <= status < 300:
        return Accepted(receipt or f"{status}")
    if status in TRY_AGAIN or status >= 500:
        return Unavailable(told, code, retry_after_ms(answer.headers.get("retry-after", ""), now))
    if 300 <= status < 400:
        return Refused(f"{told}; redirects are not followed, configure the final address", code)
    return Refused(told, code)


def read_failure(error: AddressRefused | HttpFailed) -> SendResult:
    """The meaning of no answer."""
    if isinstance(error, AddressRefused):
        return Refused(str(error), "ADDRESS_REFUSED")
    return Unknown(str(error), "NO_ANSWER") if error.was_sent else Unavailable(str(error), "NO_CONNECTION")
