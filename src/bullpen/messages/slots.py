"""Sends of channels with a rate limit, over all processes: whoever sends has reserved its slot in the ledger.

In: rows that are about to be sent. Out: their moment, or that it is too far away. All that ask at the same time share a
reservation. Elsewhere: where the slots are kept (`bullpen.ledger.messages`), who asks (`sender`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping, Sequence
from typing import Final

from bullpen._kernel.batches import Batches
from bullpen.errors import DelayJob
from bullpen.ledger.messages import SqlMessages
from bullpen.messages.routes import ChannelRoute

__all__ = ["Slots"]

_HOLD_MS: Final = 2_000
"""A delivery waits so long for its slot of a rate limit; for a longer wait it goes back to the broker."""


class Slots:
    """Slots of all channels, for one sender."""

    def __init__(self, store: SqlMessages, routes: Mapping[str, ChannelRoute]) -> None:
        self._store, self._routes = store, routes
        self._slots: Batches[None, tuple[bool, int]] = Batches(self._reserve)

    async def wait(self, channel: str) -> None:
        """Wait for a send that the provider's limit allows. Raises DelayJob when that is not soon."""
        if self._routes[channel].rate_limit is None:
            return
        is_granted, ms = await self._slots.submit(None, channel)
        if not is_granted and ms == 0:  # the first ever on this channel, or one of them
            is_granted, ms = await self._slots.submit(None, channel)
        if not is_granted:
            raise DelayJob(max(1, ms), f"the rate limit of {channel} is used up")
        await asyncio.sleep(ms / 1000)

    async def _reserve(self, channel: Hashable, batch: Sequence[None]) -> Sequence[tuple[bool, int]]:
        limit = self._routes[str(channel)].rate_limit
        assert limit is not None
        interval_ms = limit.duration_ms / limit.max
        wanted = min(len(batch), max(1, int(_HOLD_MS / interval_ms)))
        granted, first_ms = await self._store.reserve(str(channel), wanted, interval_ms=interval_ms, most_ms=_HOLD_MS)
        slots = [(True, round(first_ms + number * interval_ms)) for number in range(granted)]
        later_ms = first_ms if not granted else round(first_ms + granted * interval_ms)
        return slots + [(False, later_ms)] * (len(batch) - granted)
