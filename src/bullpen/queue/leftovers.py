"""Delete what the lanes of a queue kept, when another client has deleted the queue.

Other clients do not know these keys, so their obliterate leaves them, for up to a week. In: a queue. Out: nothing. The
mark of lanes in `meta` goes with the queue: a worker that has seen it, and then sees none, searches the keys. Any
number of workers may do it. Elsewhere: our own obliterate, which deletes all of ours (`maintain`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from bullpen._kernel.logs import get_logger
from bullpen.errors import BullpenError
from bullpen.queue.actions import QueueActions
from bullpen.queue.base import literally
from bullpen.queue.idling import until_worth_looking
from bullpen.wire.keys import LANE_KEYS, QueueKeys

logger = get_logger("bullpen.worker")

_FIRST_AFTER_S: Final = 1.0
_EVERY_S: Final = 15.0
_SCAN_COUNT: Final = 1_000


class Leftovers:
    """What the lanes of one queue leave behind."""

    def __init__(self, actions: QueueActions, keys: QueueKeys, settled: Callable[[], int]) -> None:
        """`settled`: how often this worker has settled jobs. While it does not, no lanes can have come."""
        self._actions, self._keys, self._settled = actions, keys, settled
        self._had_lanes = False

    async def run(self) -> None:
        """Poll until cancelled. A failure is tried again; in the end the keys expire."""
        await asyncio.sleep(_FIRST_AFTER_S)
        while True:
            settled = self._settled()
            try:
                await self._poll()
            except BullpenError as error:
                logger.debug("queue %r: keys of removed lanes could not be searched for: %s", self._keys.name, error)
            await until_worth_looking(self._settled, -1 if self._had_lanes else settled, _EVERY_S)

    async def _poll(self) -> None:
        if await self._actions.command("HEXISTS", self._keys.meta, "bplanes"):
            self._had_lanes = True
        elif self._had_lanes:
            await self._remove()
            self._had_lanes = False

    async def _remove(self) -> None:
        base, cursor = self._keys.base.encode(), None
        while cursor != b"0":
            cursor, found = await self._actions.command(
                *("SCAN", cursor or b"0", "MATCH", f"{literally(self._keys.base)}bp:*", "COUNT", _SCAN_COUNT)
            )
            left = [key for key in found if key[len(base) :].startswith(LANE_KEYS)]
            if left:
                await self._actions.evaluate("forget_lanes", [self._keys.meta], left)
