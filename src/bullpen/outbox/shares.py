"""Whose rows a claim takes: shares of tenants by weight. No input or output but the limits, read once a second.

In: the tenants that have something due, and how many rows may be taken. Out: one lane per tenant. Elsewhere: what was
decided about tenants and the counting of what they have (`bullpen.ledger.tenant_limits`), who has something due
(`bullpen.ledger`), which tenants come first (`dispatcher`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from bullpen.errors import DatabaseUnavailable
from bullpen.ledger import Lane, TenantLimit, TenantLimits

__all__ = ["Shares", "share"]

_FRESH_S: Final = 1.0
_MOST_TENANTS: Final = 50
_ROOM_FOR_WEIGHTS: Final = 4
"""Rows per tenant and claim, where weights are to count: with one row each all would have the same."""


class Shares:
    """What one process knows about tenants."""

    def __init__(self, limits: TenantLimits | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._clock = limits, clock
        self._known: dict[tuple[str, str], TenantLimit] = {}
        self._until = float("-inf")

    async def refresh(self) -> None:
        """Look what was decided, if the last look is a second ago."""
        if self._store is None or self._clock() < self._until:
            return
        try:
            self._known = {(each.tenant_id, each.integration_type): each for each in await self._store.list()}
        except DatabaseUnavailable:
            pass  # what was known a moment ago is the best there is
        self._until = self._clock() + _FRESH_S

    @property
    def is_empty(self) -> bool:
        """Nothing was decided about any tenant."""
        return not self._known

    def most_tenants(self, quota: int) -> int:
        """How many tenants share a claim."""
        return min(_MOST_TENANTS, quota if self.is_empty else max(1, quota // _ROOM_FOR_WEIGHTS))

    def lanes(self, integration_type: str, tenants: Sequence[str], quota: int) -> list[Lane]:
        limits = [self._limit(tenant, integration_type) for tenant in tenants]
        parts = share(quota, [1 if limit is None else limit.weight for limit in limits])
        return [
            Lane(integration_type, part, tenant, limit)
            for tenant, limit, part in zip(tenants, limits, parts, strict=True)
            if part
        ]

    def _limit(self, tenant: str, integration_type: str) -> TenantLimit | None:
        if not self._known:
            return None
        return self._known.get((tenant, integration_type)) or self._known.get((tenant, "*"))


def share(quota: int, weights: Sequence[int]) -> list[int]:
    """Parts of a quota: one for each while there are any, the rest by weight. They add up to the quota. Pure."""
    parts = [1 if place < quota else 0 for place in range(len(weights))]
    rest, total = quota - sum(parts), sum(weights)
    if not rest or not total:
        return parts
    given = [rest * weight // total for weight in weights]
    for place in sorted(range(len(weights)), key=lambda place: -weights[place])[: rest - sum(given)]:
        given[place] += 1
    return [part + more for part, more in zip(parts, given, strict=True)]
