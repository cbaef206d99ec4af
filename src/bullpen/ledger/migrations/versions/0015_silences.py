"""Incidents may be silenced for a time: until when, by whom and why."""

from __future__ import annotations

from alembic import context, op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    postgres = op.get_context().dialect.name == "postgresql"
    table = f"{context.config.attributes['schema']}.bullpen_incidents" if postgres else "bullpen_incidents"
    once = "IF NOT EXISTS " if postgres else ""  # SQLite does not know it, and runs a step once
    instant = "timestamptz" if postgres else "bigint"
    for column in (f"silenced_until {instant}", "silenced_by varchar(120)", "silence_reason text"):
        op.execute(f"ALTER TABLE {table} ADD COLUMN {once}{column}")
