"""The only way to a tenant's rows: one short transaction that knows whose it is.

In: a tenant and a function. Out: what the function returned, committed; or its error, rolled back. The function gets
the runs and credits of that tenant and nothing else: no repository exists outside of such a transaction, so code that
was given a `TransactionManager` cannot ask without naming a tenant.
Elsewhere: setting the tenant for row-level security (`database`), who sees all tenants (`runs.AllRuns`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from bullpen.errors import InvalidOption
from bullpen.ledger._run_functions import FunctionRuns
from bullpen.ledger.database import Database
from bullpen.ledger.enqueue import Enqueuer
from bullpen.ledger.records import MAX_LENGTHS
from bullpen.ledger.runs import TenantRuns, read_ledger_id

__all__ = ["TransactionManager", "check_tenant"]

T = TypeVar("T")


def check_tenant(tenant_id: object) -> str:
    """The tenant if it can be one. An empty or missing tenant is never "all of them"."""
    most = MAX_LENGTHS["tenant_id"]
    fits = isinstance(tenant_id, str) and 0 < len(tenant_id) <= most and tenant_id.isprintable()
    if not fits or not isinstance(tenant_id, str) or tenant_id.strip() != tenant_id:
        raise InvalidOption("tenant_id", f"1 to {most} printable characters without spaces at the ends", tenant_id)
    return tenant_id


class TransactionManager:
    """Runs functions inside transactions of one tenant.

        run = await transactions.run(tenant_id, lambda runs: runs.get(run_id))

    On PostgreSQL the tenant is bound as a parameter to `app.current_tenant` for this transaction only, so a pooled
    connection carries nothing over; each statement also names the tenant itself. Keep functions short: they hold a
    connection of the pool.
    """

    def __init__(self, database: Database, enqueuer: Enqueuer) -> None:
        self._database, self._enqueuer = database, enqueuer

    async def ledger_id(self) -> str:
        """Which ledger this is; see `TenantRuns.ledger_id`."""
        if self._database.ledger_id is not None:
            return self._database.ledger_id
        async with self._database.statement(reads=True) as connection:
            return await read_ledger_id(connection, self._database)

    async def run(self, tenant_id: str, fn: Callable[[TenantRuns], Awaitable[T]]) -> T:
        """Call `fn` with the rows of this tenant; commit when it returns. Raises InvalidOption without a tenant."""
        tenant = check_tenant(tenant_id)
        kind = FunctionRuns if self._database.is_postgres else TenantRuns
        async with self._database.transaction(tenant=tenant) as connection:
            return await fn(kind(connection, self._database, self._enqueuer, tenant))

    async def run_locking(self, tenant_id: str, fn: Callable[[TenantRuns], Awaitable[T]]) -> T:
        """As `run`, for a function that locks or changes a run before it does anything else with the tenant's rows. On
        PostgreSQL that is a call which binds the tenant itself, for the whole transaction."""
        if not self._database.is_postgres:
            return await self.run(tenant_id, fn)
        tenant = check_tenant(tenant_id)
        async with self._database.transaction_without_tenant() as connection:
            return await fn(FunctionRuns(connection, self._database, self._enqueuer, tenant))

    async def run_alone(self, tenant_id: str, fn: Callable[[TenantRuns], Awaitable[T]]) -> T:
        """As `run`, for a function that makes one change: on PostgreSQL that is one call of a function of the owner,
        which needs no transaction around it, and one round trip instead of four."""
        if not self._database.is_postgres:
            return await self.run(tenant_id, fn)
        tenant = check_tenant(tenant_id)
        async with self._database.statement() as connection:
            return await fn(FunctionRuns(connection, self._database, self._enqueuer, tenant))
