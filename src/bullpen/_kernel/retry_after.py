"""`Retry-After` as HTTP has it: seconds, or a date."""

from __future__ import annotations

import re
from datetime import UTC
from email.utils import parsedate_to_datetime


def retry_after_ms(value: str, now: float) -> int | None:
    """Milliseconds from `now` (Unix time) that a target asks for; None when it says nothing that can be read."""
    text = value.strip()
    if re.fullmatch(r"[0-9]{1,9}", text):
        return int(text) * 1000
    try:
        moment = parsedate_to_datetime(text)
    except (ValueError, TypeError):
        return None
    instant = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return max(0, int((instant.timestamp() - now) * 1000))
