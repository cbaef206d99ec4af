"""Endpoints: where the tenants want their events to be sent, as data."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import postgresql

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

# Written out, not imported: this step must stay what it was when it was released.
_SQLITE_NOW = "CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)"


def upgrade() -> None:
    postgres = op.get_context().dialect.name == "postgresql"
    schema = context.config.attributes["schema"] if postgres else None
    at = f"{schema}." if postgres else ""
    instant = postgresql.TIMESTAMP(timezone=True) if postgres else sa.BigInteger()
    now = sa.text("now()" if postgres else f"({_SQLITE_NOW})")
    op.create_table(
        "bullpen_endpoints",
        sa.Column("id", sa.String(36), primary_key=True),
        sa.Column("tenant_id", sa.String(60), nullable=False),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("description", sa.String(200), nullable=False, server_default=sa.text("''")),
        sa.Column("events", sa.Text, nullable=False),
        sa.Column("secrets", sa.Text, nullable=False),
        sa.Column("headers", sa.Text),
        sa.Column("rate_max", sa.Integer),
        sa.Column("rate_ms", sa.Integer),
        sa.Column("spent", sa.Integer, nullable=False, server_default=sa.text("0")),
        sa.Column("spent_since", instant),
        sa.Column("state", sa.String(10), nullable=False, server_default=sa.text("'enabled'")),
        sa.Column("reason", sa.Text),
        sa.Column("state_by", sa.String(120)),
        sa.Column("state_at", instant, nullable=False, server_default=now),
        sa.Column("failing_since", instant),
        sa.Column("failures", sa.Integer, nullable=False, server_default=sa.text("0")),
        sa.Column("error_code", sa.String(60)),
        sa.Column("version", sa.Integer, nullable=False, server_default=sa.text("1")),
        sa.Column("created_at", instant, nullable=False, server_default=now),
        sa.Column("updated_at", instant, nullable=False, server_default=now),
        sa.CheckConstraint("state IN ('enabled', 'paused', 'disabled')", name="ck_endpoints_state"),
        schema=schema,
        if_not_exists=True,
    )
    for statement in (
        f"CREATE INDEX IF NOT EXISTS ix_endpoints_tenant ON {at}bullpen_endpoints (tenant_id, created_at, id)",
        f"CREATE INDEX IF NOT EXISTS ix_endpoints_off ON {at}bullpen_endpoints (state_at) WHERE state <> 'enabled'",
        # What an endpoint was sent, newest first. Rows of other destinations are not in it.
        (
            f"CREATE INDEX IF NOT EXISTS ix_outbox_endpoint ON {at}integration_outbox (integration_type, seq) "
            "WHERE substr(integration_type, 1, 9) = 'endpoint:'"
        ),
    ):
        op.execute(statement)
