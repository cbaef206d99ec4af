"""Who did what to whose work, written down for good.

In: an action of a person, and what it was done to. Out: a row of the audit table, which nobody may change; and rows of
it, newest first. Actions on rows of the ledger write theirs in the same transaction (`outbox`, `runs`, `messages`);
this is for actions on what is kept elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec
import sqlalchemy as sa

from bullpen._kernel import json
from bullpen._kernel.duration import check_int
from bullpen.ledger import tables
from bullpen.ledger._sql import Sql
from bullpen.ledger.database import Database
from bullpen.ledger.records import encode_rows, one_line

_LONGEST_SUBJECT = 200


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One action."""

    at: datetime
    actor: str
    action: str
    subject: str
    tenant_id: str | None
    detail: Any
    login: str | None = None
    """Who was logged in, by PostgreSQL's own word; `actor` is whom that login named."""
    id: int = 0
    """Grows with every entry."""


class AuditLog:
    """The audit table of one ledger."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def write(
        self, actor: str, action: str, subject: str, *, tenant_id: str | None, detail: Mapping[str, Any]
    ) -> None:
        """Add one entry; returns when it is stored."""
        entry = {
            "actor": one_line(actor, 120),
            "action": action,
            "subject": one_line(subject, _LONGEST_SUBJECT),
            "tenant_id": tenant_id,
            "detail": msgspec.json.encode(detail).decode(),
        }
        sql = Sql(self._database.dialect, self._database.schema, self._database.clock_offset_ms)
        async with self._database.transaction(tenant=tenant_id) as connection:
            await connection.execute(sa.text(sql.audit_entries), {"rows": encode_rows([entry])})

    async def read(
        self,
        *,
        subject: str | None = None,
        tenant_id: str | None = None,
        limit: int = 100,
        actor: str = "",
        action: str = "",
        about: str = "",
        since: datetime | None = None,
        until: datetime | None = None,
        before: int | None = None,
    ) -> list[AuditEntry]:
        """The newest entries first. `actor`, `action` and `about` are parts of what stands there, in any case of
        letters; `before` is the id of the last entry of the page before."""
        check_int("limit", limit, minimum=1)
        columns = tables.audit.c
        query = sa.select(
            *(columns.id, columns.at, columns.actor, columns.action),
            *(columns.subject, columns.tenant_id, columns.detail, columns.login),
        )
        for column, part in ((columns.actor, actor), (columns.action, action), (columns.subject, about)):
            if part:
                query = query.where(column.icontains(part, autoescape=True))
        for wanted in (
            None if subject is None else columns.subject == subject,
            None if tenant_id is None else columns.tenant_id == tenant_id,
            None if since is None else columns.at >= since,
            None if until is None else columns.at < until,
            None if before is None else columns.id < before,
        ):
            if wanted is not None:
                query = query.where(wanted)
        query = query.order_by(columns.id.desc()).limit(limit)
        options = {"schema_translate_map": self._database.translate_map}
        async with self._database.transaction(tenant=tenant_id) as connection:
            rows = (await connection.execute(query, execution_options=options)).all()
        return [
            AuditEntry(
                *(row.at, row.actor, row.action, row.subject, row.tenant_id, _decoded(row.detail), row.login, row.id)
            )
            for row in rows
        ]


def _decoded(detail: Any) -> Any:
    return json.decode(detail) if isinstance(detail, str) else detail
