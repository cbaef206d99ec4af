"""Who did what to dead letters, for programs that have no ledger.

In: an action of a person, and what it was done to. Out: an entry of a stream beside the dead-letter queue, which keeps
the newest ten thousand, and ends 400 days after the last. Elsewhere: the audit table, which keeps all
(`bullpen.ledger.audit`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from bullpen._kernel.ids import encode_segment
from bullpen.errors import InvalidOption
from bullpen.queue._redis import Connection
from bullpen.wire.keys import QueueKeys

_MOST: Final = 10_000
_KEPT_S: Final = 400 * 24 * 3600
"""After the last entry: what a queue leaves behind must end one day, also when the queue itself is long gone."""


class AuditStreams:
    """One stream for each store of dead letters under a prefix.

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

    def _key(self, store: str) -> str:
        try:
            return QueueKeys(self._prefix, store).audit
        except InvalidOption:  # the store of a transport, or somebody's own
            return QueueKeys(self._prefix, encode_segment(store)).audit
