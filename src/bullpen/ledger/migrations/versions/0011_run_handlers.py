"""Which handler a run is for, where its job goes, and with which options.

A run of the handler without a name has none of the three: old runs are such runs.
"""

from __future__ import annotations

from alembic import context, op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

# Written out, not imported: this step must stay what it was when it was released.
_IMMUTABLE = (
    *("id", "tenant_id", "version_id", "payload", "payload_in_job", "is_test_run", "cost", "created_at"),
    *("handler", "queue", "job_options"),
)
_NEVER_CHANGES = "bullpen_runs: identity and content of a run never change"


def upgrade() -> None:
    postgres = op.get_context().dialect.name == "postgresql"
    for statement in _postgres(context.config.attributes["schema"]) if postgres else _sqlite():
        op.execute(statement)


def _sqlite() -> list[str]:
    changed = " OR ".join(f"OLD.{column} IS NOT NEW.{column}" for column in _IMMUTABLE)
    return [
        "ALTER TABLE bullpen_runs ADD COLUMN handler VARCHAR(60)",
        "ALTER TABLE bullpen_runs ADD COLUMN queue VARCHAR(200)",
        "ALTER TABLE bullpen_runs ADD COLUMN job_options TEXT",
        "DROP TRIGGER IF EXISTS run_never_changes",
        (
            f"CREATE TRIGGER run_never_changes BEFORE UPDATE OF {', '.join(_IMMUTABLE)} ON bullpen_runs "
            f"WHEN {changed} BEGIN SELECT RAISE(ABORT, '{_NEVER_CHANGES}'); END"
        ),
    ]


def _postgres(schema: str) -> list[str]:
    runs = f"{schema}.bullpen_runs"
    changed = (
        f"({', '.join(f'OLD.{c}' for c in _IMMUTABLE)}) IS DISTINCT FROM ({', '.join(f'NEW.{c}' for c in _IMMUTABLE)})"
    )
    submit = (
        "p_tenant text, p_run uuid, p_version text, p_payload jsonb, p_in_job boolean, p_test boolean, p_cost bigint, "
        "p_actor text"
    )
    return [
        f"ALTER TABLE {runs} ADD COLUMN IF NOT EXISTS handler VARCHAR(60)",
        f"ALTER TABLE {runs} ADD COLUMN IF NOT EXISTS queue VARCHAR(200)",
        f"ALTER TABLE {runs} ADD COLUMN IF NOT EXISTS job_options JSONB",
        f"DROP TRIGGER IF EXISTS run_never_changes ON {runs}",
        (
            f"CREATE TRIGGER run_never_changes BEFORE UPDATE OF {', '.join(_IMMUTABLE)} ON {runs} FOR EACH ROW "
            f"WHEN ({changed}) EXECUTE FUNCTION {schema}.run_never_changes()"
        ),
        # One function with defaults, not two of the same name: processes of the version before call it with less.
        f"DROP FUNCTION IF EXISTS {schema}.run_submit(text, uuid, text, jsonb, boolean, boolean, bigint, text)",
        f"""\
CREATE OR REPLACE FUNCTION {schema}.run_submit({submit}, p_handler text DEFAULT NULL, p_queue text DEFAULT NULL,
    p_options jsonb DEFAULT NULL)
RETURNS SETOF {runs} LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE run {runs};
BEGIN
    PERFORM set_config('app.current_actor', coalesce(p_actor, ''), true);
    INSERT INTO {runs} AS r
        (id, tenant_id, version_id, payload, payload_in_job, is_test_run, cost, handler, queue, job_options)
    VALUES (p_run, p_tenant, p_version, p_payload, p_in_job, p_test, p_cost, p_handler, p_queue, p_options)
    ON CONFLICT DO NOTHING RETURNING r.* INTO run;
    IF NOT FOUND THEN RETURN; END IF;
    PERFORM {schema}.run_reserve(run);
    RETURN NEXT run;
END
$$""",
        # A function may be called by everybody until that is taken away, and has the rights of the tables' owner.
        f"""\
DO $$
DECLARE f regprocedure; owner name;
BEGIN
    SELECT pg_get_userbyid(relowner) INTO owner FROM pg_class WHERE oid = CAST('{runs}' AS regclass);
    SELECT oid INTO f FROM pg_proc
    WHERE pronamespace = CAST('{schema}' AS regnamespace) AND proname = 'run_submit';
    EXECUTE 'REVOKE ALL ON FUNCTION ' || f || ' FROM PUBLIC';
    EXECUTE 'ALTER FUNCTION ' || f || ' OWNER TO ' || quote_ident(owner);
END $$""",
    ]
