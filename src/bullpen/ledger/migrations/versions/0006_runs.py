"""Runs, their steps, and credits."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import postgresql

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

# Written out, not imported: this step must stay what it was when it was released.
_SQLITE_NOW = "CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)"
_IMMUTABLE = ("id", "tenant_id", "version_id", "payload", "payload_in_job", "is_test_run", "cost", "created_at")
_CHANGING = (
    *("status", "attempts", "redrives", "fence", "job_timestamp", "job_fence", "needs_job", "started_at"),
    *("heartbeat_at", "completed_at", "duration_ms", "progress", "result", "error_message", "retry_history"),
)


def upgrade() -> None:
    postgres = op.get_context().dialect.name == "postgresql"
    schema = context.config.attributes["schema"] if postgres else None
    instant = postgresql.TIMESTAMP(timezone=True) if postgres else sa.BigInteger()
    row_id = postgresql.UUID(as_uuid=False) if postgres else sa.String(36)
    number = sa.BigInteger() if postgres else sa.Integer()
    json = postgresql.JSONB() if postgres else sa.Text()
    now = sa.text("now()" if postgres else f"({_SQLITE_NOW})")

    def table(name: str, *parts: sa.schema.SchemaItem) -> None:
        op.create_table(name, *parts, schema=schema, if_not_exists=True)

    def index(name: str, table: str, columns: list[str], *, where: str | None = None, unique: bool = False) -> None:
        condition = None if where is None else sa.text(where)
        op.create_index(
            name,
            table,
            columns,
            schema=schema,
            unique=unique,
            if_not_exists=True,
            postgresql_where=condition,
            sqlite_where=condition,
        )

    def moment(name: str) -> sa.Column[object]:
        return sa.Column(name, instant, nullable=False, server_default=now)

    def count(name: str, kind: sa.types.TypeEngine[int] | None = None) -> sa.Column[int]:
        return sa.Column(name, kind or sa.Integer(), nullable=False, server_default=sa.text("0"))

    def flag(name: str, *, default: bool = False) -> sa.Column[bool]:
        return sa.Column(name, sa.Boolean(), nullable=False, server_default=sa.true() if default else sa.false())

    table(
        "bullpen_runs",
        sa.Column("id", row_id, primary_key=True),
        sa.Column("tenant_id", sa.String(60), nullable=False),
        sa.Column("version_id", sa.String(120), nullable=False),
        sa.Column("payload", json, nullable=False),
        flag("payload_in_job", default=True),
        flag("is_test_run"),
        count("cost", sa.BigInteger()),
        moment("created_at"),
        sa.Column("status", sa.String(20), nullable=False, server_default=sa.text("'QUEUED'")),
        count("attempts"),
        count("redrives"),
        count("fence"),
        count("job_timestamp", sa.BigInteger()),
        count("job_fence"),
        flag("needs_job"),
        sa.Column("started_at", instant),
        sa.Column("heartbeat_at", instant),
        sa.Column("completed_at", instant),
        sa.Column("duration_ms", sa.BigInteger()),
        sa.Column("progress", json),
        sa.Column("result", json),
        sa.Column("error_message", sa.Text()),
        sa.Column("retry_history", json),
        moment("updated_at"),
        sa.CheckConstraint(
            "status IN ('QUEUED', 'RUNNING', 'COMPLETED', 'FAILED', 'CANCELLED')", name="ck_runs_status"
        ),
        sa.CheckConstraint("cost >= 0 AND attempts >= 0", name="ck_runs_numbers"),
    )
    index("ix_runs_tenant", "bullpen_runs", ["tenant_id", "created_at", "id"])
    index("ix_runs_open", "bullpen_runs", ["updated_at"], where="status IN ('QUEUED', 'RUNNING')")
    run = f"{schema}.bullpen_runs.id" if schema else "bullpen_runs.id"
    table(
        "bullpen_run_steps",
        sa.Column("run_id", row_id, sa.ForeignKey(run, ondelete="CASCADE"), primary_key=True),
        sa.Column("name", sa.String(120), primary_key=True),
        sa.Column("tenant_id", sa.String(60), nullable=False),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.Column("result", json, nullable=False),
        moment("finished_at"),
    )
    table(
        "bullpen_credit_accounts",
        sa.Column("tenant_id", sa.String(60), primary_key=True),
        count("balance", sa.BigInteger()),
        moment("updated_at"),
        sa.CheckConstraint("balance >= 0", name="ck_credit_balance"),
    )
    table(
        "bullpen_credit_entries",
        sa.Column("id", number, sa.Identity(always=True), primary_key=True),
        sa.Column("tenant_id", sa.String(60), nullable=False),
        sa.Column("kind", sa.String(20), nullable=False),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.Column("run_id", row_id),
        count("round"),
        sa.Column("reference", sa.String(200)),
        moment("at"),
        sa.CheckConstraint("kind IN ('grant', 'reserve', 'settle', 'refund')", name="ck_credit_kind"),
    )
    entries = "bullpen_credit_entries"
    index("ux_credit_reserve", entries, ["run_id", "round"], where="kind = 'reserve'", unique=True)
    index("ux_credit_end", entries, ["run_id", "round"], where="kind IN ('settle', 'refund')", unique=True)
    index("ux_credit_grant", entries, ["tenant_id", "reference"], where="kind = 'grant'", unique=True)
    for statement in _postgres_rules(schema) if schema else _sqlite_rules():
        op.execute(statement)


_NEVER_CHANGES = "bullpen_runs: identity and content of a run never change"
_END_IS_FINAL = "bullpen_runs: a run that is COMPLETED or CANCELLED stays so"
_APPEND_ONLY = "rows of this table are only ever added"
_APPENDED = ("bullpen_run_steps", "bullpen_credit_entries")


def _postgres_rules(schema: str) -> list[str]:
    runs = f"{schema}.bullpen_runs"
    changed = (
        f"({', '.join(f'OLD.{c}' for c in _IMMUTABLE)}) IS DISTINCT FROM ({', '.join(f'NEW.{c}' for c in _IMMUTABLE)})"
    )

    def refusing(name: str, message: str) -> str:
        return (
            f"CREATE OR REPLACE FUNCTION {schema}.{name}() RETURNS trigger LANGUAGE plpgsql AS $$ "
            f"BEGIN RAISE EXCEPTION '{message}' USING ERRCODE = 'integrity_constraint_violation'; END $$"
        )

    def trigger(name: str, table: str, rule: str) -> list[str]:
        return [f"DROP TRIGGER IF EXISTS {name} ON {table}", f"CREATE TRIGGER {name} {rule}"]

    return [
        refusing("run_never_changes", _NEVER_CHANGES),
        refusing("run_end_is_final", _END_IS_FINAL),
        *trigger(
            "run_never_changes",
            runs,
            f"BEFORE UPDATE OF {', '.join(_IMMUTABLE)} ON {runs} FOR EACH ROW WHEN ({changed}) "
            f"EXECUTE FUNCTION {schema}.run_never_changes()",
        ),
        *trigger(
            "run_end_is_final",
            runs,
            f"BEFORE UPDATE OF status ON {runs} FOR EACH ROW "
            "WHEN (OLD.status IN ('COMPLETED', 'CANCELLED') AND NEW.status <> OLD.status) "
            f"EXECUTE FUNCTION {schema}.run_end_is_final()",
        ),
        *trigger("touch", runs, f"BEFORE UPDATE ON {runs} FOR EACH ROW EXECUTE FUNCTION {schema}.touch()"),
        *(
            statement
            for table in _APPENDED
            for statement in trigger(
                "append_only",
                f"{schema}.{table}",
                f"BEFORE UPDATE ON {schema}.{table} FOR EACH ROW EXECUTE FUNCTION {schema}.append_only()",
            )
        ),
    ]


def _sqlite_rules() -> list[str]:
    changed = " OR ".join(f"OLD.{column} IS NOT NEW.{column}" for column in _IMMUTABLE)
    return [
        (
            f"CREATE TRIGGER IF NOT EXISTS run_never_changes BEFORE UPDATE OF {', '.join(_IMMUTABLE)} ON bullpen_runs "
            f"WHEN {changed} BEGIN SELECT RAISE(ABORT, '{_NEVER_CHANGES}'); END"
        ),
        (
            "CREATE TRIGGER IF NOT EXISTS run_end_is_final BEFORE UPDATE OF status ON bullpen_runs "
            "WHEN OLD.status IN ('COMPLETED', 'CANCELLED') AND NEW.status <> OLD.status "
            f"BEGIN SELECT RAISE(ABORT, '{_END_IS_FINAL}'); END"
        ),
        (
            f"CREATE TRIGGER IF NOT EXISTS run_touch AFTER UPDATE OF {', '.join(_CHANGING)} ON bullpen_runs BEGIN "
            f"UPDATE bullpen_runs SET updated_at = {_SQLITE_NOW} WHERE id = NEW.id; END"
        ),
        *(
            f"CREATE TRIGGER IF NOT EXISTS {table}_append_only BEFORE UPDATE ON {table} "
            f"BEGIN SELECT RAISE(ABORT, '{_APPEND_ONLY}'); END"
            for table in _APPENDED
        ),
    ]
