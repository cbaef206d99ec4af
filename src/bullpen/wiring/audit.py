"""Where is written down who did what: the audit table of the ledger, without a ledger streams of the server.

In: an action, what it was done to, and by whom. Out: one entry, stored before the deed; and entries, newest first.
Elsewhere: actions on rows of the ledger, which write theirs in the same transaction (`bullpen.ledger`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bullpen.errors import NotConfigured
from bullpen.ops.actions import AuditRecord
from bullpen.queue.audit import AuditStreams

if TYPE_CHECKING:  # needs an extra
    from bullpen.ledger import Ledger

__all__ = ["AuditTrail"]


class AuditTrail:
    """The audit of one program."""

    def __init__(self, ledger: Ledger | None, streams: AuditStreams | None) -> None:
        self._ledger, self._streams = ledger, streams
        self.kept = (
            "for good, in the audit table of the ledger"
            if ledger is not None
            else "for 400 days in streams of the server, at most 10,000 for each queue"
        )

    async def write(
        self, store: str, by: str, action: str, subject: str, tenant_id: str | None, detail: Mapping[str, Any]
    ) -> None:
        """Add one entry; returns when it is stored."""
        if self._ledger is not None:
            await self._ledger.audit.write(by, action, subject, tenant_id=tenant_id, detail=detail)
        elif self._streams is None:
            raise NotConfigured(
                "manual actions must be audited, but neither a database nor a Redis server is configured; "
                "set BULLPEN_DATABASE_URL or BULLPEN_REDIS_URL"
            )
        else:
            await self._streams.write(store, by, action, subject, tenant_id=tenant_id, detail=detail)

    async def read(
        self, stores: list[str], *, subject: str | None = None, tenant_id: str | None = None, limit: int = 100
    ) -> list[AuditRecord]:
        """The newest entries about these stores first; of a ledger, about all."""
        if self._ledger is not None:
            rows: list[Any] = list(await self._ledger.audit.read(subject=subject, tenant_id=tenant_id, limit=limit))
        elif self._streams is None:
            rows = []
        else:
            rows = [entry for store in stores for entry in await self._streams.read(store, limit=limit)]
        found = [
            AuditRecord(
                at=row.at,
                actor=row.actor,
                action=row.action,
                subject=row.subject,
                tenant_id=row.tenant_id,
                detail=row.detail,
                login=getattr(row, "login", None),
            )
            for row in rows
            if (subject is None or row.subject == subject) and (tenant_id is None or row.tenant_id == tenant_id)
        ]
        return sorted(found, key=lambda entry: entry.at, reverse=True)[:limit]
