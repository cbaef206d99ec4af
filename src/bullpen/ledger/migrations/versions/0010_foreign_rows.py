"""Rows that another program writes with a plain INSERT: a route key, the fence, and a wake-up."""

from __future__ import annotations

from alembic import context, op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_COLUMNS = (
    *("id", "seq", "source_stream_id", "source_event_id", "integration_type", "event_type", "payload", "headers"),
    *("tenant_id", "user_id", "correlation_id", "ordering_key", "backoff", "created_at", "due_at", "attempts"),
    *("max_attempts", "status", "parked", "fence", "locked_at", "locked_by", "locked_until", "started_at", "sent_at"),
    *("dead_at", "last_error", "error_code", "updated_at"),
)
_KNOWN = (
    "f.source_stream_id = NEW.source_stream_id AND f.source_event_id = NEW.source_event_id "
    "AND f.route_key = coalesce(NEW.route_key, NEW.integration_type)"
)


def upgrade() -> None:
    postgres = op.get_context().dialect.name == "postgresql"
    for statement in _postgres(context.config.attributes["schema"]) if postgres else _sqlite():
        op.execute(statement)


def _postgres(schema: str) -> list[str]:
    # Our own rows have a route key and this header, so they pay nothing, and are told of only if their writer says so.
    foreign = "NEW.route_key IS NULL OR NEW.headers -> 'idempotencyKey' IS NULL"
    return [
        (
            f"CREATE OR REPLACE FUNCTION {schema}.outbox_foreign_row() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            f"IF EXISTS (SELECT 1 FROM {schema}.integration_outbox_fences f WHERE {_KNOWN}) THEN RETURN NULL; END IF; "
            "NEW.route_key := coalesce(NEW.route_key, NEW.integration_type); "
            f"PERFORM pg_catalog.pg_notify('{schema}_outbox', ''); "
            "RETURN NEW; END $$"
        ),
        f"DROP TRIGGER IF EXISTS outbox_foreign_row ON {schema}.integration_outbox",
        (
            f"CREATE TRIGGER outbox_foreign_row BEFORE INSERT ON {schema}.integration_outbox FOR EACH ROW "
            f"WHEN ({foreign}) EXECUTE FUNCTION {schema}.outbox_foreign_row()"
        ),
    ]


def _sqlite() -> list[str]:
    # A trigger of SQLite cannot change the row that it was called for, so it writes another one in its place. A wake-up
    # is not needed: every commit changes `data_version`, which dispatchers read. What the statement says of conflicts
    # does not reach here, so a repetition is always ignored.
    columns, values = ", ".join(_COLUMNS), ", ".join(f"NEW.{column}" for column in _COLUMNS)
    return [
        (
            "CREATE TRIGGER IF NOT EXISTS outbox_foreign_row BEFORE INSERT ON integration_outbox "
            "WHEN NEW.route_key IS NULL BEGIN "
            f"SELECT RAISE(IGNORE) WHERE EXISTS (SELECT 1 FROM integration_outbox_fences f WHERE {_KNOWN}); "
            f"INSERT INTO integration_outbox (route_key, {columns}) VALUES (NEW.integration_type, {values}) "
            "ON CONFLICT (source_stream_id, source_event_id, route_key) DO NOTHING; "
            "SELECT RAISE(IGNORE); END"
        ),
    ]
