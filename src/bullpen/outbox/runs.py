"""Rows of one ordering key that leave one after the other under one claim.

A settlement takes the next row of its key along, so a key costs one commit of the database per row, and as long as one
such commit takes no other row of it leaves. Where a key proves to be long, the rows behind the claimed one are read,
sent in their order, and settled with it in one statement: nobody else claims them while that claim holds.

In: a claimed row. Out: the rows that may leave behind it. A process that dies in the middle leaves rows of which nobody
knows: only channels that may send again have runs, and only keys of which no process died lately, so that a row which
kills its process is soon alone with it. Elsewhere: reading and settling them (`bullpen.ledger`).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Final

from bullpen.delivery.judge import LEASE_EXPIRED
from bullpen.errors import DatabaseUnavailable
from bullpen.ledger import OutboxRepository, OutboxRow, SettledRow
from bullpen.outbox.routing import Route
from bullpen.outbox.shares import Shares
from bullpen.ports.channel import WhenUnknown, when_unknown

__all__ = ["KeyRuns"]

_LONGEST: Final = 20
"""Rows behind the claimed one: so many are sent again if the process dies."""
_LONGEST_S: Final = 0.1
"""So that outcomes are written soon, and others have their turn: with a slow target a run is one row."""
_PROVEN: Final = 2
"""Rows that were followed by another, until those behind are read: for short keys it would be a question too many."""
_CAREFUL: Final = 2 * _LONGEST
"""Rows of a key that leave alone after one whose process died."""
_MOST_KEYS: Final = 10_000


class KeyRuns:
    """What one dispatcher knows about ordering keys."""

    def __init__(self, store: OutboxRepository, shares: Shares) -> None:
        self._store, self._shares = store, shares
        self._followed: OrderedDict[tuple[str, str | None], int] = OrderedDict()
        """How many rows of a key were followed by another; below 0: how many more leave alone."""

    async def behind(self, row: OutboxRow, route: Route) -> list[OutboxRow]:
        """Rows that may leave behind one that was sent, in their order."""
        if not self._may_run(row, route):
            return []
        try:
            return await self._store.followers(row, _LONGEST)
        except DatabaseUnavailable:
            return []

    def is_over(self, began: float) -> bool:
        """Whether a run that began then is long enough."""
        return time.monotonic() - began > _LONGEST_S

    def settled(self, row: OutboxRow, settled: SettledRow | None) -> None:
        """Note how a row, or a run, ended."""
        key = (row.integration_type, row.ordering_key)
        known = self._followed.pop(key, 0)
        if row.attempts and row.error_code == LEASE_EXPIRED:
            known = -_CAREFUL
        if settled is None or (settled.next is None and known >= 0):
            return
        self._followed[key] = known + 1
        if len(self._followed) > _MOST_KEYS:
            self._followed.popitem(last=False)

    def _may_run(self, row: OutboxRow, route: Route) -> bool:
        # Rows of tenants with limits are counted one by one.
        return (
            row.ordering_key is not None
            and not row.attempts
            and self._followed.get((row.integration_type, row.ordering_key), 0) >= _PROVEN
            and self._shares.is_empty
            and route.channel is not None
            and when_unknown(route.channel) is WhenUnknown.RESEND
        )
