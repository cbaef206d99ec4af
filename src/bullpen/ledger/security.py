"""Who may see which row: three database roles and row-level security on PostgreSQL.

The owner makes and changes tables and is used for nothing else. The tenant role (API, delivery workers) sees the rows
of the tenant that its transaction names. The service role (dispatcher, reaper, retention) sees all, by a policy that
names it. Without roles there is no row-level security at all, and the docs say so. SQLite has none either.

In: role names. Out: statements that may be run again and again, and a check that refuses a connection for which they
mean nothing. Elsewhere: setting the tenant of a transaction (`database`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

import sqlalchemy as sa

from bullpen.errors import LedgerNotReady, UnsafeDatabaseRole, require
from bullpen.ledger import tables
from bullpen.ledger.database import Database, check_identifier

Duty = Literal["tenant", "service"]

TENANT_TABLES: Final = (
    tables.outbox.name,
    tables.attempts.name,
    tables.fences.name,
    tables.inbox.name,
    tables.audit.name,
    tables.recipients.name,
    tables.occasions.name,
    tables.messages.name,
    tables.events.name,
    tables.workflow_history.name,
    tables.runs.name,
    tables.run_steps.name,
    tables.credit_accounts.name,
    tables.credit_entries.name,
)
"""Tables whose rows carry a tenant."""

# Columns that delivery changes. The tenant role may change nothing else, and the trigger keeps even the owner from it.
DELIVERY_COLUMNS: Final = (
    *("due_at", "attempts", "max_attempts", "status", "parked", "fence", "locked_at", "locked_by", "locked_until"),
    *("started_at", "sent_at", "dead_at", "last_error", "error_code", "updated_at"),
)
RUN_COLUMNS: Final = tuple(
    column.name
    for column in tables.runs.columns
    if column.name
    not in ("id", "tenant_id", "version_id", "payload", "payload_in_job", "is_test_run", "cost", "created_at")
)
"""Columns that the life of a run changes; the others never do."""
_CURRENT_TENANT: Final = "nullif(current_setting('app.current_tenant', true), '')"


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Names of the database roles. They are created only when asked for."""

    tenant: str
    """API processes and delivery workers: one tenant per transaction. NOBYPASSRLS, not the owner."""
    service: str
    """Dispatcher, reaper and retention: all tenants. NOBYPASSRLS, not the owner."""

    def __post_init__(self) -> None:
        check_identifier("roles.tenant", self.tenant)
        check_identifier("roles.service", self.service)
        require("roles.service", self.service != self.tenant, "another role than the tenant role", self.service)


def statements(schema: str, roles: Roles, *, create_roles: bool = False) -> Iterator[str]:
    """Roles if asked for, grants, policies. Idempotent: running them again changes nothing."""
    if create_roles:
        for role in (roles.tenant, roles.service):
            # CREATE ROLE knows no IF NOT EXISTS.
            yield (
                f"DO $$ BEGIN CREATE ROLE {role} LOGIN NOSUPERUSER NOBYPASSRLS NOCREATEDB NOCREATEROLE; "
                "EXCEPTION WHEN duplicate_object THEN NULL; END $$"
            )
    yield f"GRANT USAGE ON SCHEMA {schema} TO {roles.tenant}, {roles.service}"
    yield f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO {roles.service}"
    yield f"GRANT SELECT ON {schema}.{VERSION_TABLE} TO {roles.tenant}"
    outbox, inbox = (f"{schema}.{table.name}" for table in (tables.outbox, tables.inbox))
    yield f"GRANT SELECT, INSERT, UPDATE ({', '.join(DELIVERY_COLUMNS)}) ON {outbox} TO {roles.tenant}"
    append_only = (tables.attempts, tables.audit, tables.events, tables.workflow_history)
    yield f"GRANT SELECT, INSERT ON {', '.join(f'{schema}.{each.name}' for each in append_only)} TO {roles.tenant}"
    yield f"GRANT SELECT ON {schema}.{tables.fences.name} TO {roles.tenant}"
    # No tenant's data: a worker must see that a destination is switched off, and tell that it is broken.
    yield f"GRANT SELECT, INSERT, UPDATE ON {schema}.{tables.destinations.name} TO {roles.tenant}"
    # No tenant's data either: digests. Whoever removed one would only let two events of an entity run side by side.
    yield f"GRANT SELECT, INSERT, UPDATE, DELETE ON {schema}.{tables.turns.name} TO {roles.tenant}"
    yield f"GRANT SELECT, INSERT, DELETE ON {inbox} TO {roles.tenant}"
    people = f"{schema}.{tables.recipients.name}, {schema}.{tables.occasions.name}"
    yield f"GRANT SELECT, INSERT, UPDATE, DELETE ON {people} TO {roles.tenant}"
    # Saving a recipient moves or cancels what was planned for it; planning and sending are the service role's.
    yield f"GRANT SELECT, UPDATE ON {schema}.{tables.messages.name} TO {roles.tenant}"
    runs, accounts = f"{schema}.{tables.runs.name}", f"{schema}.{tables.credit_accounts.name}"
    yield f"GRANT SELECT, INSERT, UPDATE ({', '.join(RUN_COLUMNS)}) ON {runs} TO {roles.tenant}"
    # An account is opened and filled by the service role; a tenant only spends and gets back.
    yield f"GRANT SELECT, UPDATE (balance, updated_at) ON {accounts} TO {roles.tenant}"
    appended = ", ".join(f"{schema}.{table.name}" for table in (tables.run_steps, tables.credit_entries))
    yield f"GRANT SELECT, INSERT ON {appended} TO {roles.tenant}"
    for name in TENANT_TABLES:
        table = f"{schema}.{name}"
        yield f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY"
        # Without FORCE the owner would be exempt.
        yield f"ALTER TABLE {table} FORCE ROW LEVEL SECURITY"
        yield f"DROP POLICY IF EXISTS bullpen_tenant ON {table}"
        yield (
            f"CREATE POLICY bullpen_tenant ON {table} TO {roles.tenant} "
            f"USING (tenant_id = {_CURRENT_TENANT}) WITH CHECK (tenant_id = {_CURRENT_TENANT})"
        )
        yield f"DROP POLICY IF EXISTS bullpen_service ON {table}"
        yield f"CREATE POLICY bullpen_service ON {table} TO {roles.service} USING (true) WITH CHECK (true)"


VERSION_TABLE: Final = "bullpen_ledger_version"

_ROLE: Final = sa.text(
    "SELECT current_user, rolsuper, rolbypassrls, "
    "pg_has_role(current_user, :tenant, 'USAGE') AS is_tenant, "
    "pg_has_role(current_user, :service, 'USAGE') AS is_service "
    "FROM pg_roles WHERE rolname = current_user"
)
_TABLES: Final = sa.text(
    "SELECT c.relname, c.relrowsecurity, c.relforcerowsecurity, pg_get_userbyid(c.relowner) = current_user AS is_owner "
    "FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
    "WHERE n.nspname = :schema AND c.relname = ANY(:names)"
)


async def check(database: Database, roles: Roles, duty: Duty) -> None:
    """Raise UnsafeDatabaseRole unless this connection is one that row-level security holds for."""
    async with database.engine.connect() as connection:
        try:
            role = (await connection.execute(_ROLE, {"tenant": roles.tenant, "service": roles.service})).one()
            found = (await connection.execute(_TABLES, {"schema": database.schema, "names": list(TENANT_TABLES)})).all()
        except sa.exc.DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) == "42704":  # no such role
                raise LedgerNotReady(
                    f"{database.address}: {str(error.orig).splitlines()[0]}; run `bullpen migrate --create-roles`"
                ) from error
            raise database.translate(error) from error
    problems = []
    if role.rolsuper:
        problems.append("it is a superuser")
    if role.rolbypassrls:
        problems.append("it has BYPASSRLS")
    if any(table.is_owner for table in found):
        problems.append("it owns the tables; connect as another role than the one that migrates")
    problems += [
        f"{table.relname} lacks {'FORCE' if table.relrowsecurity else 'ENABLE'} ROW LEVEL SECURITY (`bullpen migrate`)"
        for table in found
        if not (table.relrowsecurity and table.relforcerowsecurity)
    ]
    if duty == "tenant" and role.is_service:
        problems.append(f"it may act as {roles.service}, which sees all tenants")
    if not (role.is_tenant if duty == "tenant" else role.is_service):
        problems.append(f"it is not {roles.tenant if duty == 'tenant' else roles.service}")
    if problems:
        raise UnsafeDatabaseRole(f"role {role.current_user!r} of {database.address} is not safe: {'; '.join(problems)}")
