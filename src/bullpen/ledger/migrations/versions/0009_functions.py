"""Changes of runs and credits by functions of the owner, prices of steps, an audit that writes itself, who a ledger is.

On PostgreSQL no login needs a right on the tables of runs and credits other than to read them: what may be done to them
is a function each, which checks what is stored and does nothing twice. SQLite has no logins and no such functions.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

# Written out, not imported: this step must stay what it was when it was released.
_SQLITE_UUID = (
    "lower(hex(randomblob(4)) || '-' || hex(randomblob(2)) || '-4' || substr(hex(randomblob(2)), 2) || '-' || "
    "substr('89ab', 1 + (abs(random()) % 4), 1) || substr(hex(randomblob(2)), 2) || '-' || hex(randomblob(6)))"
)
_APPEND_ONLY = "rows of this table are only ever added"
_APPENDED = {"outbox": "bullpen_audit", "runs": "bullpen_credit_entries"}
_OPEN = "('QUEUED', 'RUNNING')"


def upgrade() -> None:
    postgres = op.get_context().dialect.name == "postgresql"
    schema = context.config.attributes["schema"] if postgres else None
    op.create_table(
        "bullpen_ledger", sa.Column("id", sa.String(36), primary_key=True), schema=schema, if_not_exists=True
    )
    # A ledger may have no runs: then they can be added later, and only their half is run.
    parts = context.config.attributes["steps"][revision]
    for statement in _postgres(schema, parts) if schema else _sqlite(parts):
        op.execute(statement)


def _sqlite(parts: frozenset[str]) -> list[str]:
    statements = []
    if "outbox" in parts:
        statements += [
            f"INSERT INTO bullpen_ledger (id) SELECT {_SQLITE_UUID} WHERE NOT EXISTS (SELECT 1 FROM bullpen_ledger)",
            "ALTER TABLE bullpen_audit ADD COLUMN login VARCHAR(120)",
        ]
    if "runs" in parts:
        statements.append("ALTER TABLE bullpen_run_steps ADD COLUMN price BIGINT NOT NULL DEFAULT 0")
    return statements + [
        f"CREATE TRIGGER IF NOT EXISTS {table}_stays BEFORE DELETE ON {table} "
        f"BEGIN SELECT RAISE(ABORT, '{_APPEND_ONLY}'); END"
        for part, table in _APPENDED.items()
        if part in parts
    ]


def _postgres(schema: str, parts: frozenset[str]) -> list[str]:
    statements = []
    if "outbox" in parts:
        statements += [
            (
                f"INSERT INTO {schema}.bullpen_ledger (id) SELECT gen_random_uuid() "
                f"WHERE NOT EXISTS (SELECT 1 FROM {schema}.bullpen_ledger)"
            ),
            f"ALTER TABLE {schema}.bullpen_audit ADD COLUMN IF NOT EXISTS login VARCHAR(120)",
            *_appended(schema, _APPENDED["outbox"]),
            *_audit_lines(schema),
        ]
    if "runs" in parts:
        statements += [
            f"ALTER TABLE {schema}.bullpen_run_steps ADD COLUMN IF NOT EXISTS price BIGINT NOT NULL DEFAULT 0",
            *_appended(schema, _APPENDED["runs"]),
            *_audit_of_runs(schema),
            *_functions(schema),
        ]
    return statements


def _appended(schema: str, name_of_table: str) -> list[str]:
    """Nobody changes, removes or empties it, whatever rights he has; 0001 and 0006 refuse the change of a row."""
    table = f"{schema}.{name_of_table}"
    return [
        statement
        for name, rule in (("stays", "BEFORE DELETE ON {} FOR EACH ROW"), ("stays_full", "BEFORE TRUNCATE ON {}"))
        for statement in _trigger(schema, name, table, rule.format(table), "append_only")
    ]


def _trigger(schema: str, name: str, table: str, rule: str, function: str) -> list[str]:
    return [
        f"DROP TRIGGER IF EXISTS {name} ON {table}",
        f"CREATE TRIGGER {name} {rule} EXECUTE FUNCTION {schema}.{function}()",
    ]


def _audit_lines(schema: str) -> list[str]:
    """When and by which login is the database's word."""
    audit = f"{schema}.bullpen_audit"
    return [
        (
            f"CREATE OR REPLACE FUNCTION {schema}.audit_line() RETURNS trigger LANGUAGE plpgsql AS $$ "
            "BEGIN NEW.at := pg_catalog.clock_timestamp(); NEW.login := session_user; RETURN NEW; END $$"
        ),
        *_trigger(schema, "audit_line", audit, f"BEFORE INSERT ON {audit} FOR EACH ROW", "audit_line"),
    ]


def _audit_of_runs(schema: str) -> list[str]:
    """What the database sees itself, it writes down itself."""
    audit, runs, entries = (f"{schema}.bullpen_{name}" for name in ("audit", "runs", "credit_entries"))
    line = f"INSERT INTO {audit} (actor, action, subject, tenant_id, detail) VALUES"
    return [
        _function(
            f"{schema}.audit_deed()",
            "trigger",
            f"""\
DECLARE who text := left(nullif(current_setting('app.current_actor', true), ''), 120);
BEGIN
    IF TG_TABLE_NAME = 'bullpen_credit_entries' THEN
        {line} (coalesce(who, session_user), 'credits.grant', coalesce(NEW.reference, ''), NEW.tenant_id,
            jsonb_build_object('amount', NEW.amount));
    ELSIF TG_OP = 'INSERT' THEN
        IF who IS NOT NULL THEN
            {line} (who, 'run.submit', NEW.id, NEW.tenant_id, NULL);
        END IF;
    ELSIF NEW.status = 'CANCELLED' THEN
        {line} (coalesce(who, session_user), 'run.cancel', NEW.id, NEW.tenant_id, NULL);
    ELSE
        {line} (coalesce(who, session_user), 'run.redrive', NEW.id, NEW.tenant_id,
            jsonb_build_object('round', NEW.redrives));
    END IF;
    RETURN NULL;
END""",
        ),
        *_trigger(schema, "audit_submit", runs, f"AFTER INSERT ON {runs} FOR EACH ROW", "audit_deed"),
        *_trigger(
            schema,
            "audit_change",
            runs,
            f"AFTER UPDATE OF status ON {runs} FOR EACH ROW WHEN (NEW.status <> OLD.status "
            "AND (NEW.status = 'CANCELLED' OR OLD.status = 'FAILED'))",
            "audit_deed",
        ),
        *_trigger(
            schema,
            "audit_grant",
            entries,
            f"AFTER INSERT ON {entries} FOR EACH ROW WHEN (NEW.kind = 'grant')",
            "audit_deed",
        ),
    ]


def _function(head: str, returns: str, body: str) -> str:
    """With the rights of the owner. The path is fixed: nobody puts a table or function of his own in front."""
    return (
        f"CREATE OR REPLACE FUNCTION {head} RETURNS {returns} LANGUAGE plpgsql SECURITY DEFINER "
        f"SET search_path = pg_catalog, pg_temp AS $$\n{body}\n$$"
    )


def _functions(schema: str) -> list[str]:
    runs, steps, accounts, entries = (
        f"{schema}.bullpen_{name}" for name in ("runs", "run_steps", "credit_accounts", "credit_entries")
    )
    found = f"SETOF {runs}"
    this = "r.id = p_run AND r.tenant_id = p_tenant"
    owned = "r.status = 'RUNNING' AND r.fence = p_fence"
    duration = (
        "CASE WHEN r.started_at IS NULL THEN NULL "
        "ELSE CAST(greatest(extract(epoch FROM (now() - r.started_at)) * 1000, 0) AS bigint) END"
    )
    # What the run has taken from its tenant so far, all rounds together. Two sums: each has an index of its own.
    taken = (
        f"CAST(-(coalesce((SELECT sum(e.amount) FROM {entries} e WHERE e.run_id = run.id AND e.kind = 'reserve'), 0) "
        f"+ coalesce((SELECT sum(e.amount) FROM {entries} e WHERE e.run_id = run.id "
        "AND e.kind IN ('settle', 'refund')), 0)) AS bigint)"
    )

    def book(kind: str, amount: str) -> str:
        return (
            f"INSERT INTO {entries} (tenant_id, kind, amount, run_id, round, at) "
            f"VALUES (run.tenant_id, '{kind}', {amount}, run.id, run.redrives, now()) ON CONFLICT DO NOTHING"
        )

    def change(name: str, parameters: str, condition: str, values: str, then: str = "", before: str = "") -> str:
        return _function(
            f"{schema}.{name}(p_tenant text, p_run uuid{', ' if parameters else ''}{parameters})",
            found,
            f"""\
DECLARE run {runs};
BEGIN
    {before}
    UPDATE {runs} r SET {values}
    WHERE {this} AND {condition} RETURNING r.* INTO run;
    IF NOT FOUND THEN RETURN; END IF;
    {then}
    RETURN NEXT run;
END""",
        )

    acting = "PERFORM set_config('app.current_actor', coalesce(p_actor, ''), true);"
    functions = [
        # Called by the others only: nobody is given the right to.
        _function(
            f"{schema}.run_reserve(run {runs})",
            "void",
            f"""\
DECLARE rest bigint := 0; stored bigint;
BEGIN
    IF run.cost = 0 THEN RETURN; END IF;
    IF NOT run.is_test_run THEN rest := run.cost - {taken}; END IF;
    {book("reserve", "-rest")};
    -- A run of this id was paid and deleted: it would begin again for what that one paid.
    IF NOT FOUND THEN RAISE EXCEPTION 'the id of the run was used before' USING ERRCODE = 'BP002'; END IF;
    IF rest = 0 THEN RETURN; END IF;
    UPDATE {accounts} a SET balance = a.balance - rest, updated_at = now()
    WHERE a.tenant_id = run.tenant_id AND a.balance >= rest;
    IF NOT FOUND THEN
        SELECT a.balance INTO stored FROM {accounts} a WHERE a.tenant_id = run.tenant_id;
        RAISE EXCEPTION 'the tenant has too few credits' USING ERRCODE = 'BP001',
            DETAIL = rest || ' ' || coalesce(stored, 0);
    END IF;
END""",
        ),
        _function(
            f"{schema}.run_return(run {runs})",
            "void",
            f"""\
DECLARE held bigint; spent bigint; rest bigint := 0;
BEGIN
    SELECT -e.amount INTO held FROM {entries} e
    WHERE e.run_id = run.id AND e.kind = 'reserve' AND e.round = run.redrives;
    IF NOT FOUND THEN RETURN; END IF;
    IF held > 0 THEN
        SELECT CAST(least(coalesce(sum(s.price), 0), run.cost) AS bigint) INTO spent
        FROM {steps} s WHERE s.run_id = run.id;
        rest := least(held, greatest({taken} - spent, 0));
    END IF;
    {book("refund", "rest")};
    IF NOT FOUND OR rest = 0 THEN RETURN; END IF;
    UPDATE {accounts} a SET balance = a.balance + rest, updated_at = now() WHERE a.tenant_id = run.tenant_id;
END""",
        ),
        # What a tenant may do: submit, cancel, send back what failed, ask for a job.
        _function(
            f"{schema}.run_submit(p_tenant text, p_run uuid, p_version text, p_payload jsonb, p_in_job boolean, "
            "p_test boolean, p_cost bigint, p_actor text)",
            found,
            f"""\
DECLARE run {runs};
BEGIN
    {acting}
    INSERT INTO {runs} AS r (id, tenant_id, version_id, payload, payload_in_job, is_test_run, cost)
    VALUES (p_run, p_tenant, p_version, p_payload, p_in_job, p_test, p_cost)
    ON CONFLICT DO NOTHING RETURNING r.* INTO run;
    IF NOT FOUND THEN RETURN; END IF;
    PERFORM {schema}.run_reserve(run);
    RETURN NEXT run;
END""",
        ),
        change(
            "run_cancel",
            "p_actor text",
            f"r.status IN {_OPEN}",
            f"status = 'CANCELLED', needs_job = false, completed_at = now(), duration_ms = {duration}",
            then=f"PERFORM {schema}.run_return(run);",
            before=acting,
        ),
        change(
            "run_redrive",
            "p_actor text",
            "r.status = 'FAILED'",
            "status = 'QUEUED', redrives = r.redrives + 1, attempts = 0, needs_job = true, error_message = NULL, "
            "started_at = NULL, completed_at = NULL, duration_ms = NULL",
            then=f"PERFORM {schema}.run_reserve(run);",
            before=acting,
        ),
        change(
            "run_needs_job",
            "p_fence int",
            "r.status = 'QUEUED' AND r.fence = p_fence",
            "job_timestamp = 0, job_fence = 0, needs_job = true",
        ),
        # What a worker may do.
        _function(
            f"{schema}.run_lock(p_tenant text, p_run uuid)",
            found,
            f"BEGIN RETURN QUERY SELECT r.* FROM {runs} r WHERE {this} FOR UPDATE; END",
        ),
        change(
            "run_start",
            "p_job_timestamp bigint, p_job_fence int",
            f"r.status IN {_OPEN} AND (r.job_timestamp <> p_job_timestamp OR r.job_fence < p_job_fence) "
            f"AND (r.cost = 0 OR EXISTS (SELECT 1 FROM {entries} e WHERE e.run_id = r.id AND e.kind = 'reserve' "
            "AND e.round = r.redrives))",
            "status = 'RUNNING', fence = r.fence + 1, job_timestamp = p_job_timestamp, job_fence = p_job_fence, "
            "needs_job = false, started_at = now(), heartbeat_at = now(), completed_at = NULL, duration_ms = NULL",
        ),
        change(
            "run_beat",
            "p_fence int, p_progress jsonb",
            owned,
            "heartbeat_at = now(), progress = coalesce(p_progress, r.progress)",
        ),
        change("run_release", "p_fence int", owned, "status = 'QUEUED'"),
        change(
            "run_attempt_failed",
            "p_fence int, p_attempts int, p_history jsonb, p_will_retry boolean",
            owned,
            "status = CASE WHEN p_will_retry THEN 'QUEUED' ELSE 'RUNNING' END, attempts = p_attempts, "
            "retry_history = p_history",
        ),
        _function(
            f"{schema}.run_save_step(p_tenant text, p_run uuid, p_fence int, p_name text, p_price bigint, "
            "p_result jsonb)",
            "boolean",
            f"""\
BEGIN
    PERFORM 1 FROM {runs} r WHERE {this} AND {owned} FOR UPDATE;
    IF NOT FOUND OR p_price < 0 THEN RETURN false; END IF;
    INSERT INTO {steps} (run_id, name, tenant_id, fence, price, result, finished_at)
    VALUES (p_run, p_name, p_tenant, p_fence, p_price, p_result, now()) ON CONFLICT DO NOTHING;
    RETURN true;
END""",
        ),
        change(
            "run_complete",
            "p_fence int, p_result jsonb",
            owned,
            "status = 'COMPLETED', result = p_result, error_message = NULL, completed_at = now(), "
            f"duration_ms = {duration}",
            then=f"IF run.cost > 0 THEN {book('settle', '0')}; END IF;",
        ),
        change(
            "run_fail",
            "p_message text, p_job_timestamp bigint, p_job_fence int",
            f"r.status IN {_OPEN} AND NOT (r.job_timestamp = p_job_timestamp AND (p_job_fence < r.job_fence "
            "OR (p_job_fence = r.job_fence AND r.needs_job)))",
            "status = 'FAILED', error_message = p_message, job_timestamp = p_job_timestamp, "
            f"job_fence = p_job_fence, needs_job = false, completed_at = now(), duration_ms = {duration}",
            then=f"PERFORM {schema}.run_return(run);",
        ),
        # What only those may do who look after all tenants.
        change(
            "run_lost_job",
            "p_fence int",
            f"r.status IN {_OPEN} AND r.fence = p_fence",
            "status = 'QUEUED', job_timestamp = 0, job_fence = 0, needs_job = true",
        ),
        _function(
            f"{schema}.credits_grant(p_tenant text, p_amount bigint, p_reference text, p_actor text)",
            "boolean",
            f"""\
BEGIN
    IF p_amount <= 0 OR coalesce(p_reference, '') = '' THEN RETURN false; END IF;
    {acting}
    INSERT INTO {accounts} (tenant_id, balance) VALUES (p_tenant, 0) ON CONFLICT DO NOTHING;
    INSERT INTO {entries} (tenant_id, kind, amount, reference, at)
    VALUES (p_tenant, 'grant', p_amount, p_reference, now()) ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN RETURN false; END IF;
    UPDATE {accounts} a SET balance = a.balance + p_amount, updated_at = now() WHERE a.tenant_id = p_tenant;
    RETURN true;
END""",
        ),
    ]
    # A function may be called by everybody until that is taken away. It has the rights of the tables' owner, also where
    # a superuser migrates.
    return [
        *functions,
        f"""\
DO $$
DECLARE f regprocedure; owner name;
BEGIN
    SELECT pg_get_userbyid(relowner) INTO owner FROM pg_class WHERE oid = CAST('{runs}' AS regclass);
    FOR f IN SELECT oid FROM pg_proc WHERE pronamespace = CAST('{schema}' AS regnamespace) AND prosecdef LOOP
        EXECUTE 'REVOKE ALL ON FUNCTION ' || f || ' FROM PUBLIC';
        EXECUTE 'ALTER FUNCTION ' || f || ' OWNER TO ' || quote_ident(owner);
    END LOOP;
END $$""",
    ]
