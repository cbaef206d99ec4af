"""Whose turn it is to change an entity."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import postgresql

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    postgres = op.get_context().dialect.name == "postgresql"
    schema = context.config.attributes["schema"] if postgres else None
    instant = postgresql.TIMESTAMP(timezone=True) if postgres else sa.BigInteger()
    op.create_table(
        "bullpen_turns",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("token", sa.String(64), nullable=False),
        sa.Column("until", instant, nullable=False),
        schema=schema,
        if_not_exists=True,
    )
