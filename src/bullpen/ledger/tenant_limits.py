"""How much of the outbox a tenant may have, as data: one row per tenant, or per tenant and integration type.

In: what somebody decided about a tenant. Out: its weight when rows are claimed, and how many of its rows a claim may
take now: those under way and those started per time are counted in the database, by all dispatchers together. A tenant
without a row has weight 1 and no limit. Elsewhere: claiming (`outbox`), sharing a batch (`bullpen.outbox.shares`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection

from bullpen.errors import require
from bullpen.ledger._sql import Sql
from bullpen.ledger.database import Database
from bullpen.ledger.driver import prepared
from bullpen.ledger.records import ALL_TYPES, MAX_LENGTHS, TenantLimit, check_text, encode_rows, one_line

_MOST: Final = 1_000_000


class TenantLimits:
    """The limits of one ledger."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @property
    def _sql(self) -> Sql:
        return Sql(self._database.dialect, self._database.schema, self._database.clock_offset_ms)

    async def list(self) -> list[TenantLimit]:
        """All tenants about which something was decided."""
        rows = await self._database.fetch(self._sql.tenant_limits, {}, reads=True)
        return [
            TenantLimit(
                tenant_id=row[0],
                integration_type=row[1],
                weight=row[2],
                concurrency=row[3],
                rate_max=row[4],
                rate_ms=row[5] or 1_000,
            )
            for row in rows
        ]

    async def set(self, limit: TenantLimit, *, by: str) -> None:
        """Decide about a tenant; dispatchers follow within a second. Audited."""
        require("limit", isinstance(limit, TenantLimit), "a TenantLimit", limit)
        values: dict[str, str | int | None] = {
            "tenant_id": limit.tenant_id,
            "integration_type": limit.integration_type,
            "weight": limit.weight,
            "concurrency": limit.concurrency,
            "rate_max": limit.rate_max,
            "rate_ms": None if limit.rate_max is None else limit.rate_ms,
        }
        await self._change(self._sql.set_tenant_limit, values, "outbox.tenant.set", by)

    async def remove(self, tenant_id: str, integration_type: str = ALL_TYPES, *, by: str) -> bool:
        """Decide nothing about a tenant any more. False: nothing was decided. Audited."""
        check_text("tenant_id", tenant_id, MAX_LENGTHS["tenant_id"])
        check_text("integration_type", integration_type, MAX_LENGTHS["integration_type"])
        values: dict[str, str | int | None] = {"tenant_id": tenant_id, "integration_type": integration_type}
        return await self._change(self._sql.remove_tenant_limit, values, "outbox.tenant.remove", by)

    async def _change(self, statement: str, values: Mapping[str, str | int | None], action: str, by: str) -> bool:
        entry = {
            "actor": one_line(by, 120),
            "action": action,
            "subject": f"{values['tenant_id']} {values['integration_type']}"[:200],
            "tenant_id": values["tenant_id"],
            "detail": msgspec.json.encode(values).decode(),
        }
        async with self._database.transaction(tenant=str(values["tenant_id"])) as connection:
            # First the entry, then the deed; both or neither.
            await connection.execute(prepared(self._sql.audit_entries), {"rows": encode_rows([entry])})
            changed = (await connection.execute(prepared(statement), dict(values))).rowcount > 0
            if not changed:
                await connection.rollback()
        return bool(changed)


class Allowance:
    """What the tenants of one claim may still have: asked for, and written down, inside the claim's transaction."""

    def __init__(self, connection: AsyncConnection, sql: Sql, left: dict[tuple[str, str], int]) -> None:
        self._connection, self._sql, self._left = connection, sql, left
        self._taken: dict[tuple[str, str], int] = {}

    @classmethod
    async def lock(cls, connection: AsyncConnection, sql: Sql, limits: Sequence[TenantLimit]) -> Allowance:
        """Their rows stay locked until the transaction ends: of two dispatchers one counts what the other took."""
        keys = {(limit.tenant_id, limit.integration_type) for limit in limits}
        wanted = {"rows": encode_rows({"tenant": tenant, "type": name} for tenant, name in sorted(keys))}
        locked = (await connection.execute(prepared(sql.lock_tenant_limits), wanted)).all()
        running = (await connection.execute(prepared(sql.tenants_under_way), wanted)).all()
        under_way: dict[tuple[str, str], int] = {(row[0], row[1]): row[2] for row in running}
        left: dict[tuple[str, str], int] = {}
        for tenant, name, concurrency, rate_left in locked:
            of_row = [_MOST if rate_left is None else rate_left]
            if concurrency is not None:
                of_row.append(concurrency - under_way.get((tenant, name), 0))
            left[tenant, name] = max(0, min(of_row))
        return cls(connection, sql, left)

    def take(self, limit: TenantLimit, wanted: int) -> int:
        """How many rows a lane may claim; they are taken off what is left for others of the same limit."""
        key = limit.tenant_id, limit.integration_type
        given = min(wanted, self._left.get(key, wanted))
        if key in self._left:
            self._left[key] -= given
        return given

    def took(self, limit: TenantLimit, count: int) -> None:
        key = limit.tenant_id, limit.integration_type
        self._taken[key] = self._taken.get(key, 0) + count

    async def write(self) -> None:
        records = [{"tenant": tenant, "type": name, "n": n} for (tenant, name), n in self._taken.items() if n]
        if records:
            await self._connection.execute(prepared(self._sql.spend_tenant_limits), {"rows": encode_rows(records)})
