"""The past of workflow entities, which also tells which events were applied."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import postgresql

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

# Written out, not imported: this step must stay what it was when it was released.
_SQLITE_NOW = "CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)"


def upgrade() -> None:
    postgres = op.get_context().dialect.name == "postgresql"
    schema = context.config.attributes["schema"] if postgres else None
    tenant = "COALESCE(current_setting('app.current_tenant', true), '')" if postgres else "''"
    op.create_table(
        "bullpen_workflow_history",
        sa.Column("id", sa.BigInteger() if postgres else sa.Integer(), sa.Identity(always=True), primary_key=True),
        sa.Column("tenant_id", sa.String(60), nullable=False, server_default=sa.text(tenant)),
        sa.Column("workflow", sa.String(120), nullable=False),
        sa.Column("urn", sa.String(300), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("event", sa.String(120), nullable=False),
        sa.Column("source", sa.String(120), nullable=False),
        sa.Column("target", sa.String(120), nullable=False),
        sa.Column("kind", sa.String(20), nullable=False),
        sa.Column("event_key", sa.String(300), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("job_id", sa.String(300)),
        sa.Column("attempt", sa.Integer()),
        sa.Column("user_id", sa.String(60)),
        sa.Column("correlation_id", sa.String(120)),
        sa.Column("reason", sa.Text()),
        sa.Column(
            "at",
            postgresql.TIMESTAMP(timezone=True) if postgres else sa.BigInteger(),
            nullable=False,
            server_default=sa.text("now()" if postgres else f"({_SQLITE_NOW})"),
        ),
        schema=schema,
        if_not_exists=True,
    )
    counts_once = sa.text("kind <> 'failed'")
    op.create_index(
        "ux_workflow_applied",
        "bullpen_workflow_history",
        ["tenant_id", "workflow", "urn", "event_key", "step"],
        unique=True,
        schema=schema,
        if_not_exists=True,
        postgresql_where=counts_once,
        sqlite_where=counts_once,
    )
    op.create_index(
        "ix_workflow_history",
        "bullpen_workflow_history",
        ["tenant_id", "workflow", "urn", "id"],
        schema=schema,
        if_not_exists=True,
    )


def downgrade() -> None:
    postgres = op.get_context().dialect.name == "postgresql"
    op.drop_table("bullpen_workflow_history", schema=context.config.attributes["schema"] if postgres else None)
