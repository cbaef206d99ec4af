"""Outbox, attempts, fences, checkpoints, inbox, audit."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# Written out, not imported: this step must stay what it was when it was released.
_SQLITE_NOW = "CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)"
_SQLITE_UUID = (
    "lower(hex(randomblob(4)) || '-' || hex(randomblob(2)) || '-4' || substr(hex(randomblob(2)), 2) || '-' || "
    "substr('89ab', 1 + (abs(random()) % 4), 1) || substr(hex(randomblob(2)), 2) || '-' || hex(randomblob(6)))"
)
_IMMUTABLE = (
    *("id", "source_stream_id", "source_event_id", "route_key", "integration_type", "event_type", "payload", "headers"),
    *("tenant_id", "user_id", "correlation_id", "ordering_key", "backoff", "created_at"),
)
_DELIVERY = (
    *("due_at", "attempts", "max_attempts", "status", "parked", "fence", "locked_at", "locked_by", "locked_until"),
    *("started_at", "sent_at", "dead_at", "last_error", "error_code"),
)
_OPEN = "status IN ('PENDING', 'FAILED')"


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

    def index(name: str, table: str, columns: list[object], *, where: str | None = None, unique: bool = False) -> None:
        condition = None if where is None else sa.text(where)
        op.create_index(
            name,
            table,
            columns,  # type: ignore[arg-type]  # text and expressions, which alembic takes
            schema=schema,
            unique=unique,
            if_not_exists=True,
            postgresql_where=condition,
            sqlite_where=condition,
        )

    def moment(name: str) -> sa.Column[object]:
        return sa.Column(name, instant, nullable=False, server_default=now)

    def counter(name: str = "id") -> sa.Column[object]:
        return sa.Column(name, number, sa.Identity(always=True), primary_key=True)

    order = (
        sa.Column("seq", sa.BigInteger(), sa.Identity(always=True), nullable=False)
        if postgres
        else sa.Column("seq", sa.BigInteger(), server_default=sa.text("0"), nullable=False)
    )
    table(
        "integration_outbox",
        sa.Column(
            "id",
            row_id,
            primary_key=True,
            server_default=sa.text("gen_random_uuid()" if postgres else f"({_SQLITE_UUID})"),
        ),
        order,
        sa.Column("source_stream_id", sa.String(200), nullable=False),
        sa.Column("source_event_id", sa.String(100), nullable=False),
        sa.Column("route_key", sa.String(120), nullable=False),
        sa.Column("integration_type", sa.String(120), nullable=False),
        sa.Column("event_type", sa.String(120), nullable=False),
        sa.Column("payload", json, nullable=False),
        sa.Column("headers", json),
        sa.Column("tenant_id", sa.String(60)),
        sa.Column("user_id", sa.String(60)),
        sa.Column("correlation_id", sa.String(120)),
        sa.Column("ordering_key", sa.String(200)),
        sa.Column("backoff", json),
        moment("created_at"),
        moment("due_at"),
        sa.Column("attempts", sa.Integer(), nullable=False, server_default=sa.text("0")),
        sa.Column("max_attempts", sa.Integer(), nullable=False, server_default=sa.text("10")),
        sa.Column("status", sa.String(20), nullable=False, server_default=sa.text("'PENDING'")),
        sa.Column("parked", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("fence", sa.Integer(), nullable=False, server_default=sa.text("0")),
        sa.Column("locked_at", instant),
        sa.Column("locked_by", sa.String(120)),
        sa.Column("locked_until", instant),
        sa.Column("started_at", instant),
        sa.Column("sent_at", instant),
        sa.Column("dead_at", instant),
        sa.Column("last_error", sa.Text()),
        sa.Column("error_code", sa.String(60)),
        moment("updated_at"),
        sa.CheckConstraint("status IN ('PENDING', 'CLAIMED', 'SENT', 'FAILED', 'DEAD')", name="ck_outbox_status"),
        sa.CheckConstraint("attempts >= 0 AND max_attempts >= 1", name="ck_outbox_attempts"),
    )
    outbox = "integration_outbox"
    index("ux_outbox_source", outbox, ["source_stream_id", "source_event_id", "route_key"], unique=True)
    index("ix_outbox_status_due", outbox, ["status", "due_at"], where=_OPEN)
    index("ix_outbox_lane_due", outbox, ["integration_type", "due_at", "seq"], where=f"{_OPEN} AND NOT parked")
    index(
        "ix_outbox_tenant_due",
        outbox,
        ["integration_type", sa.text("coalesce(tenant_id, '')"), "due_at"],
        where=f"{_OPEN} AND NOT parked",
    )
    index("ix_outbox_status", outbox, ["status"], where="status <> 'SENT'")
    index("ix_outbox_lease", outbox, ["locked_until"], where="status = 'CLAIMED'")
    index("ix_outbox_sent", outbox, ["sent_at"], where="status = 'SENT'")
    index(
        "ix_outbox_order",
        outbox,
        ["integration_type", "ordering_key", "seq"],
        where="ordering_key IS NOT NULL AND status IN ('PENDING', 'FAILED', 'CLAIMED')",
    )
    index("ix_outbox_parked", outbox, ["integration_type", "ordering_key"], where="parked")
    index(
        "ux_outbox_in_flight",
        outbox,
        ["integration_type", "ordering_key"],
        where="ordering_key IS NOT NULL AND status = 'CLAIMED'",
        unique=True,
    )
    table(
        "integration_outbox_attempts",
        counter(),
        sa.Column(
            "outbox_id",
            row_id,
            sa.ForeignKey(f"{schema}.{outbox}.id" if schema else f"{outbox}.id", ondelete="CASCADE"),
            nullable=False,
        ),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.Column("worker", sa.String(120)),
        sa.Column("outcome", sa.String(20), nullable=False),
        sa.Column("error_code", sa.String(60)),
        sa.Column("error", sa.Text()),
        sa.Column("tenant_id", sa.String(60)),
        sa.Column("started_at", instant),
        moment("finished_at"),
    )
    index("ix_outbox_attempts_row", "integration_outbox_attempts", ["outbox_id"])
    table(
        "integration_outbox_fences",
        sa.Column("source_stream_id", sa.String(200), primary_key=True),
        sa.Column("source_event_id", sa.String(100), primary_key=True),
        sa.Column("route_key", sa.String(120), primary_key=True),
        sa.Column("outbox_id", row_id, nullable=False),
        sa.Column("tenant_id", sa.String(60)),
        moment("fenced_at"),
    )
    table(
        "bullpen_checkpoints",
        sa.Column("name", sa.String(200), primary_key=True),
        sa.Column("position", sa.String(200), nullable=False),
        moment("updated_at"),
    )
    tenant = "COALESCE(current_setting('app.current_tenant', true), '')" if postgres else "''"
    table(
        "bullpen_inbox",
        sa.Column("tenant_id", sa.String(60), primary_key=True, server_default=sa.text(tenant)),
        sa.Column("scope", sa.String(120), primary_key=True),
        sa.Column("key", sa.String(300), primary_key=True),
        moment("received_at"),
    )
    index("ix_inbox_received", "bullpen_inbox", ["received_at"])
    table(
        "bullpen_audit",
        counter(),
        moment("at"),
        sa.Column("actor", sa.String(120), nullable=False),
        sa.Column("action", sa.String(60), nullable=False),
        sa.Column("subject", sa.String(200), nullable=False),
        sa.Column("tenant_id", sa.String(60)),
        sa.Column("detail", json),
    )
    index("ix_audit_subject", "bullpen_audit", ["subject"])
    for statement in _postgres_rules(schema) if schema else _sqlite_rules():
        op.execute(statement)


_NEVER_CHANGES = "integration_outbox: identity, content and created_at of a row never change"
_SENT_IS_FINAL = "integration_outbox: a row that was SENT stays SENT"
_APPEND_ONLY = "rows of this table are only ever added"


def _postgres_rules(schema: str) -> list[str]:
    outbox = f"{schema}.integration_outbox"
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
        # Rows come and go: vacuum by count, not by a share of a table that is mostly history.
        (
            f"ALTER TABLE {outbox} SET (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000, "
            "autovacuum_analyze_scale_factor = 0.02)"
        ),
        refusing("outbox_never_changes", _NEVER_CHANGES),
        refusing("outbox_sent_is_final", _SENT_IS_FINAL),
        refusing("append_only", _APPEND_ONLY),
        (
            f"CREATE OR REPLACE FUNCTION {schema}.touch() RETURNS trigger LANGUAGE plpgsql AS $$ "
            "BEGIN NEW.updated_at := pg_catalog.clock_timestamp(); RETURN NEW; END $$"
        ),
        # UPDATE OF: it fires only for statements that name one of these columns, so deliveries pay nothing for it.
        *trigger(
            "outbox_never_changes",
            outbox,
            f"BEFORE UPDATE OF {', '.join(_IMMUTABLE)} ON {outbox} FOR EACH ROW WHEN ({changed}) "
            f"EXECUTE FUNCTION {schema}.outbox_never_changes()",
        ),
        *trigger(
            "outbox_sent_is_final",
            outbox,
            f"BEFORE UPDATE OF status ON {outbox} FOR EACH ROW WHEN (OLD.status = 'SENT' AND NEW.status <> 'SENT') "
            f"EXECUTE FUNCTION {schema}.outbox_sent_is_final()",
        ),
        *trigger("touch", outbox, f"BEFORE UPDATE ON {outbox} FOR EACH ROW EXECUTE FUNCTION {schema}.touch()"),
        *(
            statement
            for table in ("integration_outbox_attempts", "integration_outbox_fences", "bullpen_audit")
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
        # SQLite has identities only for an INTEGER PRIMARY KEY, and the key is the uuid.
        "CREATE UNIQUE INDEX IF NOT EXISTS ux_outbox_seq ON integration_outbox (seq) WHERE seq > 0",
        (
            "CREATE TRIGGER IF NOT EXISTS outbox_seq AFTER INSERT ON integration_outbox WHEN NEW.seq = 0 BEGIN "
            "UPDATE integration_outbox SET seq = "
            "(SELECT coalesce(max(seq), 0) + 1 FROM integration_outbox WHERE seq > 0) "
            "WHERE rowid = NEW.rowid; END"
        ),
        (
            f"CREATE TRIGGER IF NOT EXISTS outbox_never_changes BEFORE UPDATE OF {', '.join(_IMMUTABLE)} "
            "ON integration_outbox "
            f"WHEN {changed} BEGIN SELECT RAISE(ABORT, '{_NEVER_CHANGES}'); END"
        ),
        (
            "CREATE TRIGGER IF NOT EXISTS outbox_sent_is_final BEFORE UPDATE OF status ON integration_outbox "
            f"WHEN OLD.status = 'SENT' AND NEW.status <> 'SENT' BEGIN SELECT RAISE(ABORT, '{_SENT_IS_FINAL}'); END"
        ),
        (
            f"CREATE TRIGGER IF NOT EXISTS outbox_touch AFTER UPDATE OF {', '.join(_DELIVERY)} "
            "ON integration_outbox BEGIN "
            f"UPDATE integration_outbox SET updated_at = {_SQLITE_NOW} WHERE rowid = NEW.rowid; END"
        ),
        *(
            f"CREATE TRIGGER IF NOT EXISTS {table}_append_only BEFORE UPDATE ON {table} "
            f"BEGIN SELECT RAISE(ABORT, '{_APPEND_ONLY}'); END"
            for table in ("integration_outbox_attempts", "integration_outbox_fences", "bullpen_audit")
        ),
    ]
