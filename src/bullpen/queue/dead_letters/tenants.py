"""Dead letters of one tenant, newest first, in pages and truly counted.

In: a dead-letter queue that many tenants share. Out: pages, from an index in Redis that whoever reads keeps up to date:
entries that came since are added, those that are gone are dropped, by whomever they were sent back or removed. So
nobody who writes entries, of whatever client, needs to know of it, and it may vanish: it is made again.
Elsewhere: the entries themselves (`operations`).
"""

from __future__ import annotations

from typing import Any, Final

from bullpen._kernel import json
from bullpen.queue.actions import QueueActions, is_wrong_type
from bullpen.wire.keys import QueueKeys
from bullpen.wire.records import read_int, read_score

__all__ = ["TenantIndex"]

_PER_PAGE: Final = 200
_PER_CHECK: Final = 1_000
_MARGIN_MS: Final = 60_000
"""Entries come in the order of the server's clock, which may step back a little."""
_SEEN_S: Final = 3_600
"""Then all entries are looked through again: a clock that stepped back by more hides nothing for longer."""
_KEPT_S: Final = 7 * 24 * 3_600
"""A cursor is a place in the index, so the index must outlive whoever turns pages."""


class TenantIndex:
    """Which entries of a dead-letter queue are one tenant's."""

    def __init__(self, actions: QueueActions, keys: QueueKeys, tenant_id: str) -> None:
        self._actions, self._keys, self._tenant_id = actions, keys, tenant_id
        self._index, self._seen = keys.letters(tenant_id), keys.letters_seen(tenant_id)

    async def read(self) -> list[tuple[int, bytes]]:
        """Place and id of every entry that is there now, newest first. An older one has a smaller place."""
        await self._catch_up()
        flat = await self._actions.command("ZRANGE", self._index, 0, -1, "WITHSCORES")
        known = [(read_score(score), raw) for raw, score in zip(flat[::2], flat[1::2], strict=True)]
        there, gone = list[tuple[int, bytes]](), list[bytes]()
        for first in range(0, len(known), _PER_CHECK):
            chunk = known[first : first + _PER_CHECK]
            base = self._keys.base.encode()
            found = await self._actions.commands([("EXISTS", base + raw) for _, raw in chunk])
            for entry, exists in zip(chunk, found, strict=True):
                there.append(entry) if exists else gone.append(entry[1])
        if gone:
            await self._actions.command("ZREM", self._index, *gone)
        return there[::-1]

    async def _catch_up(self) -> None:
        """Add what came since the last look. Repeating it, also at the same time, changes nothing."""
        raw_seen = await self._actions.command("GET", self._seen)
        seen = -1 if raw_seen is None else read_int(raw_seen)
        mine, newest, start, is_new = list[bytes](), seen, 0, True
        while is_new:
            ids = await self._actions.command("LRANGE", self._keys.wait, start, start + _PER_PAGE - 1)
            base = self._keys.base.encode()
            rows = await self._actions.commands(
                [("HMGET", base + raw, "timestamp", "data") for raw in ids], or_none=is_wrong_type
            )
            is_new = False
            for raw, row in zip(ids, rows, strict=True):
                written, data = row or (None, None)
                at = read_int(written) if written else 0
                newest = max(newest, at)
                # The whole page decides: other clients put entries here too, with whatever time they believe in.
                is_new = is_new or at >= seen - _MARGIN_MS
                if data is not None and _tenant_of(data) == self._tenant_id:
                    mine.append(raw)
            is_new = is_new and len(ids) == _PER_PAGE
            start += len(ids)
        if mine:
            last = await self._actions.command("ZRANGE", self._index, -1, -1, "WITHSCORES")
            place = read_score(last[1]) if last else 0
            # Oldest first: the places tell the order. One that is known keeps its own.
            flat = [part for at, raw in enumerate(reversed(mine), place + 1) for part in (at, raw)]
            for first in range(0, len(flat), _PER_CHECK):
                await self._actions.command("ZADD", self._index, "NX", *flat[first : first + _PER_CHECK])
        await self._actions.command("EXPIRE", self._index, _KEPT_S)
        if newest >= 0:
            # Last: whoever dies before looks through the same entries again.
            now_ms = int((await self._actions.command("TIME"))[0]) * 1000
            newest = min(newest, now_ms)  # one from the future would hide all that come until then
            remaining = await self._actions.command("TTL", self._seen)
            await self._actions.command("SET", self._seen, newest, "EX", remaining if remaining > 0 else _SEEN_S)


def _tenant_of(data: bytes) -> Any:
    try:
        entry = json.decode(data)
    except ValueError:
        return None
    return entry.get("tenantId") if isinstance(entry, dict) else None
