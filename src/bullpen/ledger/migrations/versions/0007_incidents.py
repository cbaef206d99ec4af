"""What is wrong now, and who has been told."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import postgresql

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    postgres = op.get_context().dialect.name == "postgresql"
    schema = context.config.attributes["schema"] if postgres else None
    instant = postgresql.TIMESTAMP(timezone=True) if postgres else sa.BigInteger()
    op.create_table(
        "bullpen_incidents",
        sa.Column("rule", sa.String(60), primary_key=True),
        sa.Column("subject", sa.String(200), primary_key=True),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("opened_at", instant, nullable=False),
        sa.Column("seen_at", instant, nullable=False),
        sa.Column("told_at", instant),
        sa.Column("told_value", sa.BigInteger),
        sa.Column("resolved_at", instant),
        sa.Column("value", sa.BigInteger, nullable=False),
        sa.Column("message", sa.Text, nullable=False),
        sa.Column("fix", sa.Text, nullable=False),
        schema=schema,
        if_not_exists=True,
    )
