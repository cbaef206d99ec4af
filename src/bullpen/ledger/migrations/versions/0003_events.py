"""The table of events, and the events that no projector could take."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import postgresql

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

# Written out, not imported: this step must stay what it was when it was released.
_SQLITE_NOW = "CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)"
_CONTENT = (*("id", "stream_id", "version", "event_id", "event_type", "data", "metadata", "tenant_id", "recorded_at"),)
_APPEND_ONLY = "bullpen_events: events are history, which is never changed or deleted"


def upgrade() -> None:
    postgres = op.get_context().dialect.name == "postgresql"
    schema = context.config.attributes["schema"] if postgres else None
    instant = postgresql.TIMESTAMP(timezone=True) if postgres else sa.BigInteger()
    number = sa.BigInteger() if postgres else sa.Integer()
    json = postgresql.JSONB() if postgres else sa.Text()
    now = sa.text("now()" if postgres else f"({_SQLITE_NOW})")

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

    op.create_table(
        "bullpen_events",
        sa.Column("id", number, sa.Identity(always=True), primary_key=True),
        sa.Column("position", sa.BigInteger()),
        sa.Column("stream_id", sa.String(200), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("event_id", sa.String(100), nullable=False),
        sa.Column("event_type", sa.String(120), nullable=False),
        sa.Column("data", json, nullable=False),
        sa.Column("metadata", json, nullable=False),
        sa.Column("tenant_id", sa.String(60)),
        sa.Column("recorded_at", instant, nullable=False, server_default=now),
        schema=schema,
        if_not_exists=True,
    )
    index("ux_events_version", "bullpen_events", ["stream_id", "version"], unique=True)
    index("ux_events_event", "bullpen_events", ["event_id"], unique=True)
    index("ux_events_position", "bullpen_events", ["position"], unique=True)
    index("ix_events_unnumbered", "bullpen_events", ["id"], where="position IS NULL")
    op.create_table(
        "bullpen_parked_events",
        sa.Column("id", number, sa.Identity(always=True), primary_key=True),
        sa.Column("projector", sa.String(120), nullable=False),
        sa.Column("route", sa.String(120), nullable=False, server_default=sa.text("''")),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("stream_id", sa.Text(), nullable=False),
        sa.Column("event_id", sa.Text(), nullable=False),
        sa.Column("event_type", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
        sa.Column("metadata", sa.Text(), nullable=False),
        sa.Column("recorded_at", instant, nullable=False),
        sa.Column("error", sa.Text(), nullable=False),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("retry_wanted", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("parked_at", instant, nullable=False, server_default=now),
        schema=schema,
        if_not_exists=True,
    )
    index("ux_parked_event", "bullpen_parked_events", ["projector", "route", "position"], unique=True)
    index("ix_parked_retry", "bullpen_parked_events", ["projector"], where="retry_wanted")
    for statement in _postgres_rules(schema) if schema else _sqlite_rules():
        op.execute(statement)


def _postgres_rules(schema: str) -> list[str]:
    events = f"{schema}.bullpen_events"
    changed = " OR ".join(f"OLD.{column} IS DISTINCT FROM NEW.{column}" for column in _CONTENT)
    return [
        (
            f"CREATE OR REPLACE FUNCTION {schema}.events_are_history() RETURNS trigger LANGUAGE plpgsql AS $$ "
            f"BEGIN RAISE EXCEPTION '{_APPEND_ONLY}' USING ERRCODE = 'integrity_constraint_violation'; END $$"
        ),
        f"DROP TRIGGER IF EXISTS events_are_history ON {events}",
        (
            f"CREATE TRIGGER events_are_history BEFORE UPDATE ON {events} FOR EACH ROW "
            f"WHEN (OLD.position IS NOT NULL OR {changed}) EXECUTE FUNCTION {schema}.events_are_history()"
        ),
        f"DROP TRIGGER IF EXISTS events_are_kept ON {events}",
        (
            f"CREATE TRIGGER events_are_kept BEFORE DELETE ON {events} FOR EACH ROW "
            f"EXECUTE FUNCTION {schema}.events_are_history()"
        ),
    ]


def _sqlite_rules() -> list[str]:
    return [
        f"CREATE TRIGGER IF NOT EXISTS events_are_{word} BEFORE {verb} ON bullpen_events "
        f"BEGIN SELECT RAISE(ABORT, '{_APPEND_ONLY}'); END"
        for word, verb in (("history", "UPDATE"), ("kept", "DELETE"))
    ]
