"""A fault that lasts, asked about every few seconds: worth a line when it begins, now and then, and when it is over.

In: whether it is so now. Out: whether to tell it. Elsewhere: the line.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

__all__ = ["REMIND_AFTER_S", "Reminder"]

REMIND_AFTER_S: Final = 60.0


class Reminder:
    """Remembers one fault."""

    def __init__(self, every_s: float = REMIND_AFTER_S, now_s: Callable[[], float] = time.monotonic) -> None:
        self._every_s, self._now_s = every_s, now_s
        self._told_at: float | None = None

    def begins_or_lasts(self) -> bool:
        """It is so now. True: tell it."""
        now = self._now_s()
        if self._told_at is not None and now - self._told_at < self._every_s:
            return False
        self._told_at = now
        return True

    def is_over(self) -> bool:
        """It is not so now. True: it was, and that was told."""
        was, self._told_at = self._told_at is not None, None
        return was
