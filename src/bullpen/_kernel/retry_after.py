"""`Retry-After` as HTTP has it: seconds, or a date."""

from __future__ import annotations

from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Final

_MOST_MS: Final = 86_400_000
"""However long a target asks us to wait: a day later it is asked again."""
_MOST_DIGITS: Final = 12


def retry_after_ms(value: str, now: float) -> int | None:
    """Milliseconds from `now` (Unix time) that a target asks for, at most a day; None when it says nothing that can be
    read."""
    text = value.strip()
    if text.isascii() and text.isdigit():
        return min(int(text) * 1000, _MOST_MS) if len(text) <= _MOST_DIGITS else _MOST_MS
    try:
        moment = parsedate_to_datetime(text)
        instant = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
        return min(max(0, int((instant.timestamp() - now) * 1000)), _MOST_MS)
    except (ValueError, TypeError, OverflowError):
        return None
