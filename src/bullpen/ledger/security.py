"""Who may see and do what: four database roles and row-level security on PostgreSQL.

The owner makes and changes tables and is used for nothing else. The tenant role (APIs) sees the rows of the tenant that
its transaction names, stores messages and submits, cancels and reads runs. The worker role (delivery, runs) may also
settle deliveries and move runs along. The service role (dispatcher, reaper, retention, grants) sees all, by a policy
that names it. Nobody but the owner writes runs, credits and what the database has seen itself: the others call
functions of the owner, which check what is stored. Without roles there is no row-level security at all, and the docs
say so. SQLite has none either.

In: role names. Out: statements that may be run again and again, and a check that refuses a connection for which they
mean nothing. Elsewhere: setting the tenant of a transaction (`database`), the functions (`migrations`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Final, Literal

import sqlalchemy as sa

from bullpen.errors import LedgerNotReady, UnsafeDatabaseRole, require
from bullpen.ledger import tables
from bullpen.ledger.database import Database, check_identifier
from bullpen.ledger.parts import PARTS, Part, table_part

Duty = Literal["tenant", "worker", "service"]

TENANT_TABLES: Final = (
    tables.outbox.name,
    tables.attempts.name,
    tables.fences.name,
    tables.inbox.name,
    tables.tenant_limits.name,
    tables.endpoints.name,
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

# Columns that delivery changes. The worker role may change nothing else, and the trigger keeps even the owner from it.
DELIVERY_COLUMNS: Final = (
    *("due_at", "attempts", "max_attempts", "status", "parked", "fence", "locked_at", "locked_by", "locked_until"),
    *("started_at", "sent_at", "dead_at", "last_error", "error_code", "updated_at"),
)
# Columns by which a planned message is moved or cancelled: not whose it is, what it is about, what became of it.
_MOVED: Final = (
    *("status", "number", "channel", "zone", "local_at", "due_at", "late_at", "fence", "publish_again_at"),
    *("error_code", "updated_at"),
)
_CURRENT_TENANT: Final = "nullif(current_setting('app.current_tenant', true), '')"
_OWN: Final = f"tenant_id = {_CURRENT_TENANT}"

TENANT_FUNCTIONS: Final = ("run_submit", "run_cancel", "run_redrive", "run_needs_job")
"""What may be done to a run by whoever may submit one."""
WORKER_FUNCTIONS: Final = (
    *("run_lock", "run_start", "run_beat", "run_release", "run_attempt_failed", "run_save_step", "run_complete"),
    "run_fail",
)
SERVICE_FUNCTIONS: Final = ("run_lost_job", "credits_grant")

# Written by nobody but the owner's functions: rights on these tables are to read, and for the service role to delete
# runs that are not wanted any more.
_BY_FUNCTIONS: Final = (tables.runs, tables.run_steps, tables.credit_accounts, tables.credit_entries)
_OWNED: Final = frozenset(table.name for table in (*_BY_FUNCTIONS, tables.audit))
_ADDED: Final = {
    # Of what the database cannot see: letters of queues. What it sees, it writes down itself; but for endpoints, which
    # tenants change as they like.
    tables.audit.name: "starts_with(action, 'dead_letter.') OR starts_with(action, 'endpoint.') "
    "OR action IN ('run.dead_letters.read', 'run.security', 'outbox.replay')",
    # A message is stored as new: one that says that it was delivered would never be.
    tables.outbox.name: (
        "status = 'PENDING' AND attempts = 0 AND fence = 0 AND NOT parked AND sent_at IS NULL AND dead_at IS NULL"
    ),
    # Whoever reads for all tenants numbers events, behind the last number.
    tables.events.name: "position IS NULL",
}
"""What tenants and workers may add, beside the tenant that must be theirs."""
_LONGEST_TURN: Final = "until <= clock_timestamp() + interval '1 hour'"
"""How long whoever takes a turn may keep it without renewing it. Without this a login could keep the entities of all
tenants for ever, also after it was taken away."""
_CHANGED: Final = {
    tables.messages.name: "USING (status IN ('CREATED', 'QUEUED')) WITH CHECK (status IN ('CREATED', 'CANCELLED'))",
}
"""What they may change: a message that is not on its way is moved or taken back. The sender says that it was sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Names of the database roles. They are created only when asked for."""

    tenant: str
    """APIs: one tenant per transaction; store messages, submit, cancel and read runs. NOBYPASSRLS, not the owner."""
    worker: str
    """Workers of deliveries and runs: one tenant per transaction. NOBYPASSRLS, not the owner."""
    service: str
    """Dispatcher, reaper, retention, grants: all tenants. NOBYPASSRLS, not the owner."""

    def __post_init__(self) -> None:
        names = {"tenant": self.tenant, "worker": self.worker, "service": self.service}
        for duty, name in names.items():
            check_identifier(f"roles.{duty}", name)
        require("roles", len({*names.values()}) == len(names), "three different roles", ", ".join(names.values()))

    def of(self, duty: Duty) -> str:
        """The role of a process with this duty."""
        name: str = getattr(self, duty)
        return name


def statements(
    schema: str, roles: Roles, *, create_roles: bool = False, parts: Collection[Part] = PARTS
) -> Iterator[str]:
    """Roles if asked for, grants, policies; of the tables of these parts. Idempotent: running them again changes
    nothing."""
    everybody = f"{roles.tenant}, {roles.worker}, {roles.service}"
    if create_roles:
        for role in (roles.tenant, roles.worker, roles.service):
            # CREATE ROLE knows no IF NOT EXISTS.
            yield (
                f"DO $$ BEGIN CREATE ROLE {role} LOGIN NOSUPERUSER NOBYPASSRLS NOCREATEDB NOCREATEROLE; "
                "EXCEPTION WHEN duplicate_object THEN NULL; END $$"
            )
    yield f"GRANT USAGE ON SCHEMA {schema} TO {everybody}"
    # What an earlier version granted too much.
    there = [table.name for table in tables.metadata.sorted_tables if table_part(table.name) in parts]
    yield f"REVOKE ALL ON {', '.join(f'{schema}.{name}' for name in there)} FROM {everybody}"
    for rights, granted, to in _grants(roles):
        names = [f"{schema}.{name}" for name in granted if name in there or name == VERSION_TABLE]
        if names:
            yield f"GRANT {rights} ON {', '.join(names)} TO {to}"
    if "runs" in parts:
        yield from _functions(schema, roles)
    for name in TENANT_TABLES:
        if name in there:
            yield from _policies(f"{schema}.{name}", name, roles)
    if tables.turns.name in there:
        yield from _turn_policies(f"{schema}.{tables.turns.name}", roles)


def _grants(roles: Roles) -> Iterator[tuple[str, list[str], str]]:
    """Rights, on which tables, to whom."""

    def grant(rights: str, granted: Iterable[sa.Table | str], to: str) -> tuple[str, list[str], str]:
        return rights, [each if isinstance(each, str) else each.name for each in granted], to

    # All that an API may do, a worker may do too: handlers submit runs and store messages.
    both, everybody = f"{roles.tenant}, {roles.worker}", f"{roles.tenant}, {roles.worker}, {roles.service}"
    written = [table for table in tables.metadata.sorted_tables if table not in (*_BY_FUNCTIONS, tables.audit)]
    yield grant("SELECT, INSERT, UPDATE, DELETE", written, roles.service)
    yield grant("SELECT", [VERSION_TABLE, tables.identity, *_BY_FUNCTIONS], everybody)
    yield grant("DELETE", [tables.runs, tables.run_steps], roles.service)
    # Not `at` and not `login`: the database writes those itself.
    yield grant("SELECT, INSERT (actor, action, subject, tenant_id, detail)", [tables.audit], everybody)
    # Not the numbers by which all tenants' rows are put in order: they can be overridden by whoever may insert them.
    for table, numbered in ((tables.outbox, {"seq"}), (tables.events, {"id"}), (tables.workflow_history, {"id", "at"})):
        columns = ", ".join(column.name for column in table.columns if column.name not in numbered)
        yield grant(f"SELECT, INSERT ({columns})", [table], both)
    yield grant("SELECT", [tables.fences, tables.attempts, tables.tenant_limits], both)
    yield grant("SELECT, INSERT, DELETE", [tables.inbox], both)
    yield grant("SELECT, INSERT, UPDATE, DELETE", [tables.recipients, tables.occasions, tables.endpoints], both)
    # Saving a recipient moves or cancels what was planned for it; planning and sending are the service role's.
    yield grant(f"SELECT, UPDATE ({', '.join(_MOVED)})", [tables.messages], both)
    # No tenant's data: digests. Whoever removed one would only let two events of an entity run side by side.
    yield grant("SELECT, INSERT, UPDATE, DELETE", [tables.turns], both)
    yield grant(f"UPDATE ({', '.join(DELIVERY_COLUMNS)})", [tables.outbox], roles.worker)
    yield grant("INSERT", [tables.attempts], roles.worker)
    # No tenant's data either: a worker sees that a destination is switched off, and tells that it is broken.
    broken = "broken_until, trips, updated_at"
    yield grant(f"SELECT, INSERT (integration_type, {broken}), UPDATE ({broken})", [tables.destinations], roles.worker)


def _functions(schema: str, roles: Roles) -> Iterator[str]:
    for functions, to in (
        (TENANT_FUNCTIONS, f"{roles.tenant}, {roles.worker}, {roles.service}"),
        (WORKER_FUNCTIONS, f"{roles.worker}, {roles.service}"),
        (SERVICE_FUNCTIONS, roles.service),
    ):
        for function in functions:
            yield f"GRANT EXECUTE ON FUNCTION {schema}.{function} TO {to}"


def _policies(table: str, name: str, roles: Roles) -> Iterator[str]:
    yield f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY"
    # Without FORCE the owner would be exempt.
    yield f"ALTER TABLE {table} FORCE ROW LEVEL SECURITY"
    for policy in (
        "bullpen_tenant",
        "bullpen_tenant_adds",
        "bullpen_tenant_changes",
        "bullpen_owner",
        "bullpen_service",
    ):
        yield f"DROP POLICY IF EXISTS {policy} ON {table}"
    both = f"{roles.tenant}, {roles.worker}"
    yield f"CREATE POLICY bullpen_tenant ON {table} TO {both} USING ({_OWN}) WITH CHECK ({_OWN})"
    yield f"CREATE POLICY bullpen_service ON {table} TO {roles.service} USING (true) WITH CHECK (true)"
    if name in _ADDED:
        yield (
            f"CREATE POLICY bullpen_tenant_adds ON {table} AS RESTRICTIVE FOR INSERT TO {both} "
            f"WITH CHECK ({_ADDED[name]})"
        )
    if name in _CHANGED:
        yield f"CREATE POLICY bullpen_tenant_changes ON {table} AS RESTRICTIVE FOR UPDATE TO {both} {_CHANGED[name]}"
    if name in _OWNED:
        # For the functions: even they touch one tenant at a time. Whoever migrates need not be the owner.
        yield (
            f"DO $$ DECLARE owner name; BEGIN "
            f"SELECT pg_get_userbyid(relowner) INTO owner FROM pg_class WHERE oid = CAST('{table}' AS regclass); "
            f"EXECUTE 'CREATE POLICY bullpen_owner ON {table} TO ' || quote_ident(owner) || "
            f"$p$ USING ({_OWN}) WITH CHECK ({_OWN})$p$; END $$"
        )


def _turn_policies(table: str, roles: Roles) -> Iterator[str]:
    """Turns belong to entities, and an entity may be everybody's: all tenants see the same ones."""
    yield f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY"
    for policy in ("bullpen_turns", "bullpen_service"):
        yield f"DROP POLICY IF EXISTS {policy} ON {table}"
    both = f"{roles.tenant}, {roles.worker}"
    yield f"CREATE POLICY bullpen_turns ON {table} TO {both} USING (true) WITH CHECK ({_LONGEST_TURN})"
    yield f"CREATE POLICY bullpen_service ON {table} TO {roles.service} USING (true) WITH CHECK (true)"


VERSION_TABLE: Final = "bullpen_ledger_version"

_ROLE: Final = sa.text(
    "SELECT current_user, rolsuper, rolbypassrls, "
    "pg_has_role(current_user, :tenant, 'USAGE') AS is_tenant, "
    "pg_has_role(current_user, :worker, 'USAGE') AS is_worker, "
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
            role = (await connection.execute(_ROLE, asdict(roles))).one()
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
    if duty != "service" and role.is_service:
        problems.append(f"it may act as {roles.service}, which sees all tenants")
    if duty == "tenant" and role.is_worker:
        problems.append(f"it may act as {roles.worker}, which changes the state of runs")
    if not {"tenant": role.is_tenant, "worker": role.is_worker, "service": role.is_service}[duty]:
        problems.append(f"it is not {roles.of(duty)}")
    if problems:
        raise UnsafeDatabaseRole(f"role {role.current_user!r} of {database.address} is not safe: {'; '.join(problems)}")
