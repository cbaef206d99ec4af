"""Instants that anybody may have stored: years after 9999 and before 1 are none.

In: Unix ms. Out: the same, or a datetime; 0 and None for what is no instant. Elsewhere: the server's time (`clock`).
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

_DAY_MS: Final = 86_400_000  # kept from both ends: no time zone leads beyond them
EARLIEST_MS: Final = -62_135_596_800_000 + _DAY_MS
LATEST_MS: Final = 253_402_300_799_999 - _DAY_MS


def possible(epoch_ms: int) -> int:
    """The instant, or 0 when it is none."""
    return epoch_ms if EARLIEST_MS <= epoch_ms <= LATEST_MS else 0


def as_utc(epoch_ms: float) -> datetime | None:
    """None for what is no instant."""
    if not EARLIEST_MS <= epoch_ms <= LATEST_MS:
        return None
    return datetime.fromtimestamp(epoch_ms / 1000, UTC)
