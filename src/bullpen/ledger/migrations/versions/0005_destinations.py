"""Destinations that are switched off or known to be broken; what a target answered."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import postgresql

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

# Written out, not imported: this step must stay what it was when it was released.
_SQLITE_NOW = "CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)"


def upgrade() -> None:
    postgres = op.get_context().dialect.name == "postgresql"
    schema = context.config.attributes["schema"] if postgres else None
    instant = postgresql.TIMESTAMP(timezone=True) if postgres else sa.BigInteger()
    op.create_table(
        "bullpen_destinations",
        sa.Column("integration_type", sa.String(120), primary_key=True),
        sa.Column("disabled_at", instant),
        sa.Column("disabled_by", sa.String(120)),
        sa.Column("reason", sa.Text),
        sa.Column("broken_until", instant),
        sa.Column("trips", sa.Integer, nullable=False, server_default=sa.text("0")),
        sa.Column(
            "updated_at",
            instant,
            nullable=False,
            server_default=sa.text("now()" if postgres else f"({_SQLITE_NOW})"),
        ),
        schema=schema,
        if_not_exists=True,
    )
    if postgres:
        op.execute(f"ALTER TABLE {schema}.integration_outbox_attempts ADD COLUMN IF NOT EXISTS receipt TEXT")
        for statement in _breaker(f"{schema}.bullpen_destinations", f"{schema}.destination_breaker"):
            op.execute(statement)
    else:
        op.execute("ALTER TABLE integration_outbox_attempts ADD COLUMN receipt TEXT")


def _breaker(table: str, function: str) -> list[str]:
    """A worker says that a destination is broken, for a day at most: it cannot switch it off for all and for ever, nor
    store an instant or a number that makes reading or counting fail for others."""
    return [
        (
            f"CREATE OR REPLACE FUNCTION {function}() RETURNS trigger LANGUAGE plpgsql "
            # The path is fixed: nobody puts a function or an operator of his own in front.
            "SET search_path = pg_catalog, pg_temp AS $$ BEGIN IF NEW.broken_until IS NOT NULL THEN "
            "NEW.broken_until := greatest('epoch', least(NEW.broken_until, clock_timestamp() + interval '1 day')); "
            "END IF; NEW.trips := greatest(0, least(NEW.trips, 1000)); NEW.updated_at := clock_timestamp(); "
            "RETURN NEW; END $$"
        ),
        f"DROP TRIGGER IF EXISTS breaker ON {table}",
        f"CREATE TRIGGER breaker BEFORE INSERT OR UPDATE ON {table} FOR EACH ROW EXECUTE FUNCTION {function}()",
    ]
