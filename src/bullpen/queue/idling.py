"""When to tidy a queue again.

In: how often its worker has settled jobs. Out: the moment of the next poll. Elsewhere: what is tidied (`retention`,
`leftovers`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Final

__all__ = ["until_worth_looking"]

_LONGEST_S: Final = 300.0
"""Also where this worker settles nothing: jobs grow old, and other workers settle some."""


async def until_worth_looking(settled: Callable[[], int], seen: int, every_s: float) -> None:
    """Wait until more was settled than was seen, polled at an interval: two hundred idle queues must not cost the
    server two hundred polls each quarter of a minute."""
    for _ in range(math.ceil(_LONGEST_S / every_s)):
        await asyncio.sleep(every_s)
        if settled() != seen:
            return
