"""How much of the outbox a tenant may have: its weight, rows under way, rows per time."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import postgresql

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

# Written out, not imported: this step must stay what it was when it was released.
_SQLITE_NOW = "CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)"


def upgrade() -> None:
    postgres = op.get_context().dialect.name == "postgresql"
    instant = postgresql.TIMESTAMP(timezone=True) if postgres else sa.BigInteger()
    op.create_table(
        "bullpen_tenant_limits",
        sa.Column("tenant_id", sa.String(60), primary_key=True),
        sa.Column("integration_type", sa.String(120), primary_key=True),
        sa.Column("weight", sa.Integer, nullable=False, server_default=sa.text("1")),
        sa.Column("concurrency", sa.Integer),
        sa.Column("rate_max", sa.Integer),
        sa.Column("rate_ms", sa.Integer),
        sa.Column("spent", sa.Integer, nullable=False, server_default=sa.text("0")),
        sa.Column("spent_since", instant),
        sa.Column(
            "updated_at",
            instant,
            nullable=False,
            server_default=sa.text("now()" if postgres else f"({_SQLITE_NOW})"),
        ),
        sa.CheckConstraint("weight BETWEEN 1 AND 1000", name="ck_tenant_limits_weight"),
        schema=context.config.attributes["schema"] if postgres else None,
        if_not_exists=True,
    )
