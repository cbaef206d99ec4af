"""Scheduled messages: recipients, their occasions, messages, rate limits."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import postgresql

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

# Written out, not imported: this step must stay what it was when it was released.
_SQLITE_NOW = "CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)"


def upgrade() -> None:
    postgres = op.get_context().dialect.name == "postgresql"
    schema = context.config.attributes["schema"] if postgres else None
    instant = postgresql.TIMESTAMP(timezone=True) if postgres else sa.BigInteger()
    row_id = postgresql.UUID(as_uuid=False) if postgres else sa.String(36)
    json = postgresql.JSONB() if postgres else sa.Text()
    now = sa.text("now()" if postgres else f"({_SQLITE_NOW})")
    empty = sa.text("''")
    recipients = f"{schema}.bullpen_recipients" if schema else "bullpen_recipients"

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

    def zero(name: str) -> sa.Column[int]:
        return sa.Column(name, sa.Integer(), nullable=False, server_default=sa.text("0"))

    table(
        "bullpen_recipients",
        sa.Column("tenant_id", sa.String(60), primary_key=True, server_default=empty),
        sa.Column("id", sa.String(120), primary_key=True),
        sa.Column("name", sa.String(200), nullable=False, server_default=empty),
        sa.Column("zone", sa.String(64), nullable=False),
        sa.Column("channel", sa.String(60), nullable=False),
        sa.Column("address", sa.String(320), nullable=False),
        sa.Column("locale", sa.String(20), nullable=False, server_default=empty),
        sa.Column("attributes", json),
        moment("created_at"),
        moment("updated_at"),
    )
    table(
        "bullpen_occasions",
        sa.Column("tenant_id", sa.String(60), primary_key=True, server_default=empty),
        sa.Column("recipient_id", sa.String(120), primary_key=True),
        sa.Column("occasion", sa.String(60), primary_key=True),
        sa.Column("label", sa.String(60), primary_key=True, server_default=empty),
        sa.Column("on_date", sa.String(10), nullable=False),
        sa.Column("send_at", sa.String(5)),
        sa.Column("next_due", instant),
        sa.Column("next_period", sa.String(10)),
        sa.ForeignKeyConstraint(
            ["tenant_id", "recipient_id"],
            [f"{recipients}.tenant_id", f"{recipients}.id"],
            name="fk_occasions_recipient",
            ondelete="CASCADE",
        ),
    )
    index("ix_occasions_next", "bullpen_occasions", ["next_due"], where="next_due IS NOT NULL")
    table(
        "bullpen_messages",
        sa.Column("id", row_id, primary_key=True),
        sa.Column("tenant_id", sa.String(60), nullable=False, server_default=empty),
        sa.Column("recipient_id", sa.String(120), nullable=False),
        sa.Column("occasion", sa.String(60), nullable=False),
        sa.Column("label", sa.String(60), nullable=False, server_default=empty),
        sa.Column("period", sa.String(10), nullable=False),
        sa.Column("number", sa.Integer()),
        sa.Column("channel", sa.String(60), nullable=False),
        sa.Column("zone", sa.String(64), nullable=False),
        sa.Column("local_at", sa.String(16), nullable=False),
        sa.Column("due_at", instant, nullable=False),
        sa.Column("late_policy", sa.String(10), nullable=False, server_default=sa.text("'send'")),
        sa.Column("late_at", instant),
        sa.Column("status", sa.String(20), nullable=False, server_default=sa.text("'CREATED'")),
        zero("attempts"),
        zero("fence"),
        zero("publication"),
        sa.Column("published_at", instant),
        sa.Column("publish_again_at", instant),
        sa.Column("locked_by", sa.String(120)),
        sa.Column("locked_until", instant),
        sa.Column("sent_at", instant),
        sa.Column("response", json),
        sa.Column("last_error", sa.Text()),
        sa.Column("error_code", sa.String(60)),
        moment("created_at"),
        moment("updated_at"),
        sa.CheckConstraint(
            "status IN ('CREATED', 'QUEUED', 'SENDING', 'SENT', 'FAILED', 'PARKED', 'SKIPPED', 'EXPIRED', 'CANCELLED')",
            name="ck_messages_status",
        ),
        sa.CheckConstraint("late_policy IN ('send', 'skip', 'expire')", name="ck_messages_late_policy"),
    )
    messages = "bullpen_messages"
    index("ux_messages_period", messages, ["tenant_id", "recipient_id", "occasion", "label", "period"], unique=True)
    index("ix_messages_due", messages, ["due_at"], where="status = 'CREATED'")
    index("ix_messages_again", messages, ["publish_again_at"], where="status IN ('QUEUED', 'SENDING')")
    index("ix_messages_status", messages, ["status", "due_at"], where="status <> 'SENT'")
    table(
        "bullpen_message_limits",
        sa.Column("channel", sa.String(60), primary_key=True),
        sa.Column("free_at", instant, nullable=False),
    )
    for statement in _postgres_rules(schema) if schema else _sqlite_rules():
        op.execute(statement)


_SENT_IS_FINAL = "bullpen_messages: a message that was SENT stays SENT"


def _postgres_rules(schema: str) -> list[str]:
    messages = f"{schema}.bullpen_messages"
    return [
        # Almost every row is touched a few times and then never again: vacuum by count, not by a share of the history.
        (
            f"ALTER TABLE {messages} SET (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000, "
            "autovacuum_analyze_scale_factor = 0.02)"
        ),
        (
            f"CREATE OR REPLACE FUNCTION {schema}.message_sent_is_final() RETURNS trigger LANGUAGE plpgsql AS $$ "
            f"BEGIN RAISE EXCEPTION '{_SENT_IS_FINAL}' USING ERRCODE = 'integrity_constraint_violation'; END $$"
        ),
        f"DROP TRIGGER IF EXISTS message_sent_is_final ON {messages}",
        (
            f"CREATE TRIGGER message_sent_is_final BEFORE UPDATE OF status ON {messages} FOR EACH ROW "
            f"WHEN (OLD.status = 'SENT' AND NEW.status <> 'SENT') EXECUTE FUNCTION {schema}.message_sent_is_final()"
        ),
    ]


def _sqlite_rules() -> list[str]:
    return [
        (
            "CREATE TRIGGER IF NOT EXISTS message_sent_is_final BEFORE UPDATE OF status ON bullpen_messages "
            f"WHEN OLD.status = 'SENT' AND NEW.status <> 'SENT' BEGIN SELECT RAISE(ABORT, '{_SENT_IS_FINAL}'); END"
        )
    ]
