"""What an answer over HTTP means, the same for every channel that speaks it.

2xx is accepted; 408, 425, 429 and 5xx mean "not now", not before `Retry-After`; everything else, redirects included,
means "never". Without an answer it depends on whether the request had begun to leave.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Final

from bullpen.plugins._http import AddressRefused, HttpAnswer, HttpFailed
from bullpen.ports.channel import Accepted, Refused, SendResult, Unavailable, Unknown

__all__ = ["read_answer", "read_failure"]

TRY_AGAIN: Final = frozenset({408, 425, 429})
"""The 4xx that mean "not now"; all others mean "never"."""
_MOST_WAIT_MS: Final = 86_400_000
"""A target that asks for more time than a day gets a day: nobody means years."""


def read_answer(answer: HttpAnswer, *, now: float, receipt: str = "", error: str = "") -> SendResult:
    """The meaning of a status. `receipt` and `error` are what the channel read in the body; `now` is Unix time."""
    status, code = answer.status, f"HTTP_{answer.status}"
    told = f"the target answered {status}{f': {error}' if error else ''}"
    if 200 <= status < 300:
        return Accepted(receipt or f"{status}")
    if status in TRY_AGAIN or status >= 500:
        return Unavailable(told, code, _retry_after_ms(answer.headers, now))
    if 300 <= status < 400:
        return Refused(f"{told}; redirects are not followed, configure the final address", code)
    return Refused(told, code)


def read_failure(error: AddressRefused | HttpFailed) -> SendResult:
    """The meaning of no answer."""
    if isinstance(error, AddressRefused):
        return Refused(str(error), "ADDRESS_REFUSED")
    return Unknown(str(error), "NO_ANSWER") if error.was_sent else Unavailable(str(error), "NO_CONNECTION")


def _retry_after_ms(headers: Mapping[str, str], now: float) -> int | None:
    value = headers.get("retry-after", "").strip()
    if value.isascii() and value.isdigit():
        return min(int(value[:12]) * 1000, _MOST_WAIT_MS) if len(value) <= 12 else _MOST_WAIT_MS
    try:
        moment = parsedate_to_datetime(value)
        instant = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
        return min(max(0, int((instant.timestamp() - now) * 1000)), _MOST_WAIT_MS)
    except (ValueError, TypeError, OverflowError):
        return None
