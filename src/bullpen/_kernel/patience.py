"""Try again until a deadline, with pauses that grow.

In: how long the first and the longest pause are, and when the time is up. Out: `pause` waits before the next try, or
returns False when there is no time for one; the caller then raises what it has.

    patience = Patience(within_s=30.0)
    while True:
        try:
            return await store.settle(row)
        except DatabaseUnavailable:
            if not await patience.pause():
                raise

Elsewhere: the pauses of jobs, which are kept on the server (`backoff`), work at fixed times (`ticker`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from random import random as _random


class Patience:
    """The pauses of one series of tries. Not shared: two series would lengthen each other's pauses.

    Each pause is between half of its length and all of it, so that many who wait for the same thing do not come back
    at the same moment. `within_s` counts from now; `until` is an instant of `time.monotonic`. With neither, there is
    always a next try. `last_try=True`: when less than a pause is left, wait only for that and try once more.
    """

    __slots__ = ("_first_s", "_last_try", "_longest_s", "_next_s", "_random", "give_up_at")

    def __init__(
        self,
        *,
        first_s: float = 0.05,
        longest_s: float = 2.0,
        within_s: float | None = None,
        until: float | None = None,
        last_try: bool = False,
        random: Callable[[], float] = _random,
    ) -> None:
        assert within_s is None or until is None
        self._first_s = self._next_s = first_s
        self._longest_s, self._last_try, self._random = longest_s, last_try, random
        self.give_up_at = until if within_s is None else time.monotonic() + within_s

    def reset(self) -> None:
        """It has worked: the next pause is the first again."""
        self._next_s = self._first_s

    async def pause(self, pause_s: float | None = None, *, unless: asyncio.Event | None = None) -> bool:
        """Wait before the next try. False: there is none, and nothing was waited for.

        `pause_s` is the length where somebody else knows it. `unless` ends the pause early.
        """
        wait_s = self.next_s(pause_s)
        if wait_s is None:
            return False
        if unless is None:
            await asyncio.sleep(wait_s)
        else:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await unless.wait()
        return True

    def block(self, pause_s: float | None = None) -> bool:
        """The same for threads."""
        wait_s = self.next_s(pause_s)
        if wait_s is None:
            return False
        time.sleep(wait_s)
        return True

    def next_s(self, pause_s: float | None = None) -> float | None:
        """How long to wait before the next try; None: the time is up."""
        wait_s = pause_s
        if wait_s is None:
            wait_s = self._next_s * (0.5 + self._random() / 2)
            self._next_s = min(2 * self._next_s, self._longest_s)
        if self.give_up_at is None:
            return wait_s
        left_s = self.give_up_at - time.monotonic()
        if left_s <= 0 or (wait_s > left_s and not self._last_try):
            return None
        return min(wait_s, left_s)
