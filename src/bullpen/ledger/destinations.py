"""Destinations that somebody switched off, or that are known to be broken. One truth for all processes.

In: an integration type. Out: whether and since when it may not be called. All comparisons use the database's clock.
Elsewhere: what follows from it (`bullpen.delivery.gates`).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import msgspec
import sqlalchemy as sa

from bullpen.ledger._sql import Sql
from bullpen.ledger.database import Database
from bullpen.ledger.records import MAX_LENGTHS, check_text, encode_rows, one_line
from bullpen.ledger.tables import to_datetime


@dataclass(frozen=True, slots=True)
class Destination:
    """What is known about one destination that is not simply in order."""

    integration_type: str
    disabled_at: datetime | None
    disabled_by: str | None
    reason: str | None
    trips: int
    """How often the breaker opened since it last worked."""
    broken_ms: int
    """How long the breaker stays open, from now."""

    @property
    def state(self) -> str:
        """`disabled`, `broken`, or `probing`: one delivery may try whether it works again."""
        if self.disabled_at is not None:
            return "disabled"
        return "broken" if self.broken_ms > 0 else "probing"


class Destinations:
    """The destinations of one ledger."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @property
    def _sql(self) -> Sql:
        return Sql(self._database.dialect, self._database.schema, self._database.clock_offset_ms)

    async def troubled(self) -> dict[str, Destination]:
        """All that are disabled, broken or probing; all others are in order."""
        rows = await self._database.fetch(self._sql.troubled, {}, reads=True)
        found = [Destination(row[0], to_datetime(row[1]), row[2], row[3], row[4], int(row[5])) for row in rows]
        return {destination.integration_type: destination for destination in found}

    async def disable(self, integration_type: str, *, by: str, reason: str = "") -> None:
        """Let no delivery go there; rows wait in the database and lose no attempt. Audited."""
        check_text("integration_type", integration_type, MAX_LENGTHS["integration_type"])
        values = {"integration_type": integration_type, "actor": one_line(by, 120), "reason": one_line(reason) or None}
        await self._change(self._sql.disable, values, "outbox.disable", by, integration_type)

    async def enable(self, integration_type: str, *, by: str) -> bool:
        """Let deliveries go there again, at once. False when it was in order. Audited."""
        return await self._change(
            self._sql.enable, {"integration_type": integration_type}, "outbox.enable", by, integration_type
        )

    async def trip(self, integration_type: str, *, pause_ms: int, longest_ms: int) -> bool:
        """Open the breaker, for twice as long each time. False: another process was faster."""
        values = {"integration_type": integration_type, "pause_ms": pause_ms, "longest_ms": longest_ms}
        async with self._database.transaction_without_tenant() as connection:
            return (await connection.execute(sa.text(self._sql.trip), values)).first() is not None

    async def mend(self, integration_type: str) -> None:
        """Close the breaker: it works again."""
        async with self._database.transaction_without_tenant() as connection:
            await connection.execute(sa.text(self._sql.mend), {"integration_type": integration_type})

    async def _change(self, statement: str, values: dict[str, str | None], action: str, by: str, subject: str) -> bool:
        async with self._database.transaction_without_tenant() as connection:
            changed = (await connection.execute(sa.text(statement), values)).rowcount > 0
            if changed:
                detail = msgspec.json.encode({"reason": values.get("reason")}).decode()
                entry = {"actor": one_line(by, 120), "action": action, "subject": subject, "tenant_id": None}
                rows = encode_rows([{**entry, "detail": detail}])
                await connection.execute(sa.text(self._sql.audit_entries), {"rows": rows})
        return bool(changed)
