"""Where is written down who did what: the audit table of the ledger, without a ledger streams of the server.

In: an action, what it was done to, and by whom. Out: one entry, stored before the deed; and entries, newest first.
Elsewhere: actions on rows of the ledger, which write theirs in the same transaction (`bullpen.ledger`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from bullpen.errors import NotConfigured
from bullpen.ops.actions import EVERY_ENTRY, AuditRecord, AuditSearch
from bullpen.queue.audit import AuditStreams

if TYPE_CHECKING:  # needs an extra
    from bullpen.ledger import Ledger

__all__ = ["AuditTrail"]

_LOOKED_THROUGH: Final = 2_000


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
        self,
        stores: list[str],
        *,
        subject: str | None = None,
        tenant_id: str | None = None,
        limit: int = 100,
        search: AuditSearch = EVERY_ENTRY,
    ) -> list[AuditRecord]:
        """The newest entries about these stores first; of a ledger, about all. Streams have no pages: of each the
        newest two thousand of the time are looked through."""
        if self._ledger is not None:
            rows: list[Any] = list(
                await self._ledger.audit.read(
                    subject=subject,
                    tenant_id=tenant_id,
                    limit=limit,
                    actor=search.actor,
                    action=search.action,
                    about=search.subject,
                    since=search.since,
                    until=search.until,
                    before=int(search.before) if search.before.isascii() and search.before.isdigit() else None,
                )
            )
        elif self._streams is None:
            rows = []
        else:
            most = limit if search == EVERY_ENTRY else _LOOKED_THROUGH
            rows = [
                entry
                for store in stores
                for entry in await self._streams.read(store, limit=most, since=search.since, until=search.until)
            ]
        found = [
            AuditRecord(
                at=row.at,
                actor=row.actor,
                action=row.action,
                subject=row.subject,
                tenant_id=row.tenant_id,
                detail=row.detail,
                login=getattr(row, "login", None),
                cursor=str(getattr(row, "id", "")),
            )
            for row in rows
            if (subject is None or row.subject == subject) and (tenant_id is None or row.tenant_id == tenant_id)
        ]
        wanted = found if self._ledger is not None else [entry for entry in found if search.fits(entry)]
        return sorted(wanted, key=lambda entry: (entry.at, int(entry.cursor or 0)), reverse=True)[:limit]
