"""Who did what to a queue, its jobs or its dead letters, for programs that have no ledger.

In: an action of a person, and what it was done to. Out: an entry of a stream beside the queue, which keeps the newest
ten thousand, and ends 400 days after the last; and entries, newest first. Elsewhere: the audit table, which keeps all
(`bullpen.ledger.audit`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from bullpen._kernel.ids import encode_segment
from bullpen._kernel.instants import as_utc
from bullpen.errors import InvalidOption
from bullpen.redis.client import Connection
from bullpen.wire.keys import QueueKeys

_MOST: Final = 10_000
_KEPT_S: Final = 400 * 24 * 3600
"""After the last entry: what a queue leaves behind must end one day, also when the queue itself is long gone."""


@dataclass(frozen=True, slots=True)
class StreamEntry:
    """One action."""

    at: datetime
    actor: str
    action: str
    subject: str
    tenant_id: str | None
    detail: Any


class AuditStreams:
    """One stream for each queue, and for each other store of dead letters, under a prefix.

    A stream of its own, and not one for all: a user who may redrive the letters of one queue has no rights elsewhere.
    """

    def __init__(self, connection: Connection, prefix: str) -> None:
        self._connection, self._prefix = connection, prefix

    async def write(
        self, store: str, actor: str, action: str, subject: str, *, tenant_id: str | None, detail: Mapping[str, Any]
    ) -> None:
        """Add one entry; returns when the server has it."""
        key = self._key(store)
        fields = {"actor": actor, "action": action, "subject": subject, "tenantId": tenant_id or ""}
        fields["detail"] = msgspec.json.encode(detail).decode()
        flat = [part for pair in fields.items() for part in pair]
        door = self._connection.shared_door(key)
        await door.call("XADD", key, "MAXLEN", "~", _MOST, "*", *flat)
        await door.call("EXPIRE", key, _KEPT_S)

    async def read(
        self, store: str, *, limit: int = 100, since: datetime | None = None, until: datetime | None = None
    ) -> list[StreamEntry]:
        """The newest entries about a store first."""
        key, newest, oldest = self._key(store), "+", "-"
        if until is not None:
            newest = f"({max(1, round(until.timestamp() * 1000))}-0"
        if since is not None:
            oldest = str(max(0, round(since.timestamp() * 1000)))
        entries = await self._connection.shared_door(key).call("XREVRANGE", key, newest, oldest, "COUNT", limit)
        return [_entry(entry_id, flat) for entry_id, flat in entries]

    def _key(self, store: str) -> str:
        try:
            return QueueKeys(self._prefix, store).audit
        except InvalidOption:  # the store of a transport, or somebody's own
            return QueueKeys(self._prefix, encode_segment(store)).audit


_NO_INSTANT: Final = datetime.fromtimestamp(0, UTC)
"""For an entry of another client whose id is not a time."""


def _entry(entry_id: bytes, flat: list[bytes]) -> StreamEntry:
    texts = [part.decode("utf-8", "replace") for part in flat]
    fields = dict(zip(texts[::2], texts[1::2], strict=False))
    try:
        detail = msgspec.json.decode(fields.get("detail", "{}"))
    except msgspec.DecodeError:
        detail = {}
    at = as_utc(int(entry_id.partition(b"-")[0])) or _NO_INSTANT
    actor, action, subject = (fields.get(name, "") for name in ("actor", "action", "subject"))
    return StreamEntry(at, actor, action, subject, fields.get("tenantId") or None, detail)
