"""The ledger's tables, defined once for PostgreSQL and SQLite.

Constraints and indexes carry the rules that must hold; triggers (immutable columns, `updated_at`, order numbers) are
made by the migrations, whose sum a test compares with this file. On SQLite there is no schema and an instant is a whole
number of milliseconds since 1970. Elsewhere: statements (`_sql`), who may see a row (`security`).
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

SCHEMA: Final = "core_outbox"
"""Where the tables are on PostgreSQL, unless told otherwise (`schema_translate_map`)."""

PREFIX: Final = "integration_outbox"
OPEN: Final = ("PENDING", "FAILED")
"""Statuses from which a row may be claimed."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MS: Final = timedelta(milliseconds=1)

SQLITE_NOW: Final = "CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)"
"""Milliseconds since 1970 by SQLite's own clock."""

# A version 4 UUID, made by SQLite itself as PostgreSQL does with gen_random_uuid().
SQLITE_UUID: Final = (
    "lower(hex(randomblob(4)) || '-' || hex(randomblob(2)) || '-4' || substr(hex(randomblob(2)), 2) || '-' || "
    "substr('89ab', 1 + (abs(random()) % 4), 1) || substr(hex(randomblob(2)), 2) || '-' || hex(randomblob(6)))"
)


# A day from the ends of what a datetime can be, so that every zone can show them.
EARLIEST: Final = datetime(1, 1, 2, tzinfo=UTC)
LATEST: Final = datetime(9999, 12, 30, tzinfo=UTC)
_EARLIEST_MS: Final = (EARLIEST - _EPOCH) // _MS
_LATEST_MS: Final = (LATEST - _EPOCH) // _MS


class Instant(sa.types.TypeDecorator[datetime]):
    """An aware datetime: timestamptz on PostgreSQL, milliseconds since 1970 on SQLite."""

    impl = sa.DateTime
    cache_ok = True

    def load_dialect_impl(self, dialect: sa.Dialect) -> sa.types.TypeEngine[Any]:
        if dialect.name == "sqlite":
            return dialect.type_descriptor(sa.BigInteger())
        return dialect.type_descriptor(postgresql.TIMESTAMP(timezone=True))

    def process_bind_param(self, value: datetime | None, dialect: sa.Dialect) -> Any:
        return to_epoch_ms(value) if value is not None and dialect.name == "sqlite" else value

    def process_result_value(self, value: Any, dialect: sa.Dialect) -> datetime | None:
        return to_datetime(value)


class Json(sa.types.TypeDecorator[str]):
    """JSON as text, written and read by us: jsonb on PostgreSQL."""

    impl = sa.Text
    cache_ok = True

    def load_dialect_impl(self, dialect: sa.Dialect) -> sa.types.TypeEngine[Any]:
        return dialect.type_descriptor(postgresql.JSONB() if dialect.name == "postgresql" else sa.Text())

    def column_expression(self, column: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
        return sa.cast(column, sa.Text)  # read by our own reader, not by the driver's


def to_epoch_ms(instant: datetime) -> int:
    return (instant - _EPOCH) // _MS


def to_datetime(value: datetime | int | None) -> datetime | None:
    """An instant as either database gives it. What no datetime can be, in a row that another program wrote, is the
    nearest one that can: it must not keep the other rows from being read."""
    if value is None:
        return None
    if isinstance(value, datetime):
        bounded = min(max(value, EARLIEST), LATEST)
        return bounded if bounded.tzinfo is UTC else bounded.astimezone(UTC)
    if not isinstance(value, int | float) or value != value:  # text in a column of SQLite, which sorts behind numbers
        return LATEST
    return _EPOCH + int(min(max(value, _EARLIEST_MS), _LATEST_MS)) * _MS


class _UuidDefault(sa.sql.expression.ColumnElement[str]):
    inherit_cache = True


class _Now(sa.sql.expression.ColumnElement[datetime]):
    inherit_cache = True


class _CurrentTenant(sa.sql.expression.ColumnElement[str]):
    inherit_cache = True


def _compile(element: type[Any], postgres: str, sqlite: str) -> None:
    from sqlalchemy.ext.compiler import compiles

    def render(element: Any, compiler: Any, **options: Any) -> str:
        return sqlite if compiler.dialect.name == "sqlite" else postgres

    compiles(element)(render)


_compile(_UuidDefault, "gen_random_uuid()", f"({SQLITE_UUID})")
_compile(_Now, "now()", f"({SQLITE_NOW})")
# The tenant of the transaction; after it the setting is an empty string. SQLite has no settings.
_compile(_CurrentTenant, "COALESCE(current_setting('app.current_tenant', true), '')", "''")

metadata = sa.MetaData(schema=SCHEMA)
_row_id = sa.String(36).with_variant(postgresql.UUID(as_uuid=False), "postgresql")
_number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")  # SQLite counts only an INTEGER PRIMARY KEY by itself


def _now_column(name: str) -> sa.Column[datetime]:
    return sa.Column(name, Instant, nullable=False, server_default=_Now())


outbox = sa.Table(
    PREFIX,
    metadata,
    sa.Column("id", _row_id, primary_key=True, server_default=_UuidDefault()),
    # Order of insertion, for rows with an ordering key. A trigger fills it on SQLite, which ignores the identity.
    sa.Column("seq", sa.BigInteger, sa.Identity(always=True), nullable=False),
    # Identity and content: never changed after the insert (enforced by a trigger).
    sa.Column("source_stream_id", sa.String(200), nullable=False),
    sa.Column("source_event_id", sa.String(100), nullable=False),
    sa.Column("route_key", sa.String(120), nullable=False),
    sa.Column("integration_type", sa.String(120), nullable=False),
    sa.Column("event_type", sa.String(120), nullable=False),
    sa.Column("payload", Json, nullable=False),
    sa.Column("headers", Json),
    sa.Column("tenant_id", sa.String(60)),
    sa.Column("user_id", sa.String(60)),
    sa.Column("correlation_id", sa.String(120)),
    sa.Column("ordering_key", sa.String(200)),
    sa.Column("backoff", Json),
    _now_column("created_at"),
    # Delivery: changes with every claim and every attempt.
    _now_column("due_at"),
    sa.Column("attempts", sa.Integer, nullable=False, server_default=sa.text("0")),
    sa.Column("max_attempts", sa.Integer, nullable=False, server_default=sa.text("10")),
    sa.Column("status", sa.String(20), nullable=False, server_default=sa.text("'PENDING'")),
    sa.Column("parked", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("fence", sa.Integer, nullable=False, server_default=sa.text("0")),
    sa.Column("locked_at", Instant),
    sa.Column("locked_by", sa.String(120)),
    sa.Column("locked_until", Instant),
    sa.Column("started_at", Instant),
    sa.Column("sent_at", Instant),
    sa.Column("dead_at", Instant),
    sa.Column("last_error", sa.Text),
    sa.Column("error_code", sa.String(60)),
    _now_column("updated_at"),
    sa.CheckConstraint("status IN ('PENDING', 'CLAIMED', 'SENT', 'FAILED', 'DEAD')", name="ck_outbox_status"),
    sa.CheckConstraint("attempts >= 0 AND max_attempts >= 1", name="ck_outbox_attempts"),
)

_is_open = "status IN ('PENDING', 'FAILED')"
_is_claimable = f"{_is_open} AND NOT parked"
_is_unfinished = "status IN ('PENDING', 'FAILED', 'CLAIMED')"


def _index(name: str, *columns: Any, where: str | None = None, unique: bool = False) -> sa.Index:
    condition = None if where is None else sa.text(where)
    return sa.Index(name, *columns, unique=unique, postgresql_where=condition, sqlite_where=condition)


# The fence: one source event is stored once per route.
_index("ux_outbox_source", outbox.c.source_stream_id, outbox.c.source_event_id, outbox.c.route_key, unique=True)
# Claiming. All partial: rows that are SENT or DEAD cost a claim nothing, however many there are.
_index("ix_outbox_status_due", outbox.c.status, outbox.c.due_at, where=_is_open)
_index("ix_outbox_lane_due", outbox.c.integration_type, outbox.c.due_at, outbox.c.seq, where=_is_claimable)
_index(
    "ix_outbox_tenant_due",
    outbox.c.integration_type,
    sa.func.coalesce(outbox.c.tenant_id, sa.text("''")),
    outbox.c.due_at,
    where=_is_claimable,
)
# What people look up, page by page, and counting what is not done. No claim reads these; each costs every claim and
# every settlement, because an update of the status makes a new entry in all indexes. So there is none of tenants.
_index("ix_outbox_seq", outbox.c.seq)
_index("ix_outbox_status_seq", outbox.c.status, outbox.c.seq, where="status <> 'SENT'")
_index("ix_outbox_correlation", outbox.c.correlation_id, outbox.c.seq, where="correlation_id IS NOT NULL")
# What an endpoint was sent. `IS_ENDPOINT` must be in a query as it stands here, or no database takes the index.
ENDPOINT: Final = "endpoint"
"""First part of the integration type of endpoints: `endpoint:<id>`."""
IS_ENDPOINT: Final = "substr(integration_type, 1, 9) = 'endpoint:'"
_index("ix_outbox_endpoint", outbox.c.integration_type, outbox.c.seq, where=IS_ENDPOINT)
# Finding claims whose lease ran out.
_index("ix_outbox_lease", outbox.c.locked_until, where="status = 'CLAIMED'")
# Retention.
_index("ix_outbox_sent", outbox.c.sent_at, where="status = 'SENT'")
# Order: who is first of its key, and never two of one key in flight.
_index(
    "ix_outbox_order",
    outbox.c.integration_type,
    outbox.c.ordering_key,
    outbox.c.seq,
    where=f"ordering_key IS NOT NULL AND {_is_unfinished}",
)
_index("ix_outbox_parked", outbox.c.integration_type, outbox.c.ordering_key, where="parked")
_index(
    "ux_outbox_in_flight",
    outbox.c.integration_type,
    outbox.c.ordering_key,
    where="ordering_key IS NOT NULL AND status = 'CLAIMED'",
    unique=True,
)

attempts = sa.Table(
    f"{PREFIX}_attempts",
    metadata,
    sa.Column("id", _number, sa.Identity(always=True), primary_key=True),
    sa.Column("outbox_id", _row_id, sa.ForeignKey(f"{SCHEMA}.{PREFIX}.id", ondelete="CASCADE"), nullable=False),
    sa.Column("number", sa.Integer, nullable=False),
    sa.Column("fence", sa.Integer, nullable=False),
    sa.Column("worker", sa.String(120)),
    sa.Column("outcome", sa.String(20), nullable=False),
    sa.Column("error_code", sa.String(60)),
    sa.Column("error", sa.Text),
    sa.Column("tenant_id", sa.String(60)),
    sa.Column("started_at", Instant),
    _now_column("finished_at"),
    # What the target answered to a delivery it took: an id of the provider, a partition and offset.
    sa.Column("receipt", sa.Text),
)
_index("ix_outbox_attempts_row", attempts.c.outbox_id)

fences = sa.Table(
    f"{PREFIX}_fences",
    metadata,
    # What retention leaves of a row: enough to know that its event was delivered once.
    sa.Column("source_stream_id", sa.String(200), primary_key=True),
    sa.Column("source_event_id", sa.String(100), primary_key=True),
    sa.Column("route_key", sa.String(120), primary_key=True),
    sa.Column("outbox_id", _row_id, nullable=False),
    sa.Column("tenant_id", sa.String(60)),
    _now_column("fenced_at"),
)

destinations = sa.Table(
    "bullpen_destinations",
    metadata,
    # Only those about which there is something to say; a destination without a row is in order.
    sa.Column("integration_type", sa.String(120), primary_key=True),
    sa.Column("disabled_at", Instant),
    sa.Column("disabled_by", sa.String(120)),
    sa.Column("reason", sa.Text),
    sa.Column("broken_until", Instant),
    sa.Column("trips", sa.Integer, nullable=False, server_default=sa.text("0")),
    _now_column("updated_at"),
)

tenant_limits = sa.Table(
    "bullpen_tenant_limits",
    metadata,
    # Only tenants about which something was decided. `*` as type: all their rows that have no limit of their own.
    sa.Column("tenant_id", sa.String(60), primary_key=True),
    sa.Column("integration_type", sa.String(120), primary_key=True),
    sa.Column("weight", sa.Integer, nullable=False, server_default=sa.text("1")),
    sa.Column("concurrency", sa.Integer),
    sa.Column("rate_max", sa.Integer),
    sa.Column("rate_ms", sa.Integer),
    # Rows started since then, within one `rate_ms`.
    sa.Column("spent", sa.Integer, nullable=False, server_default=sa.text("0")),
    sa.Column("spent_since", Instant),
    _now_column("updated_at"),
    sa.CheckConstraint("weight BETWEEN 1 AND 1000", name="ck_tenant_limits_weight"),
)

endpoints = sa.Table(
    "bullpen_endpoints",
    metadata,
    # Where tenants want their events to be sent.
    sa.Column("id", sa.String(36), primary_key=True),
    sa.Column("tenant_id", sa.String(60), nullable=False),
    sa.Column("url", sa.Text, nullable=False),
    sa.Column("description", sa.String(200), nullable=False, server_default=sa.text("''")),
    # JSON: patterns of event types: `order.paid.v1`, `order.*`, `*`.
    sa.Column("events", sa.Text, nullable=False),
    # JSON, or an envelope of the codec around it: whoever reads the table need not be able to sign, or to log in.
    sa.Column("secrets", sa.Text, nullable=False),
    sa.Column("headers", sa.Text),
    sa.Column("rate_max", sa.Integer),
    sa.Column("rate_ms", sa.Integer),
    # Deliveries started since then, within one `rate_ms`.
    sa.Column("spent", sa.Integer, nullable=False, server_default=sa.text("0")),
    sa.Column("spent_since", Instant),
    # enabled; paused: its messages wait; disabled: none are stored for it.
    sa.Column("state", sa.String(10), nullable=False, server_default=sa.text("'enabled'")),
    sa.Column("reason", sa.Text),
    sa.Column("state_by", sa.String(120)),
    _now_column("state_at"),
    # Since the last delivery that it took; NULL: none has failed since.
    sa.Column("failing_since", Instant),
    sa.Column("failures", sa.Integer, nullable=False, server_default=sa.text("0")),
    sa.Column("error_code", sa.String(60)),
    # Grows with every change of what was configured, and of the state.
    sa.Column("version", sa.Integer, nullable=False, server_default=sa.text("1")),
    _now_column("created_at"),
    _now_column("updated_at"),
    sa.CheckConstraint("state IN ('enabled', 'paused', 'disabled')", name="ck_endpoints_state"),
)
_index("ix_endpoints_tenant", endpoints.c.tenant_id, endpoints.c.created_at, endpoints.c.id)
_index("ix_endpoints_off", endpoints.c.state_at, where="state <> 'enabled'")

incidents = sa.Table(
    "bullpen_incidents",
    metadata,
    # One row per thing that can go wrong: it is open, or was resolved; the number tells one incident from the next.
    sa.Column("rule", sa.String(60), primary_key=True),
    sa.Column("subject", sa.String(200), primary_key=True),
    sa.Column("number", sa.Integer, nullable=False),
    sa.Column("opened_at", Instant, nullable=False),
    sa.Column("seen_at", Instant, nullable=False),
    # NULL: seen, but not yet for long enough to tell of it.
    sa.Column("told_at", Instant),
    sa.Column("told_value", sa.BigInteger),
    sa.Column("resolved_at", Instant),
    sa.Column("value", sa.BigInteger, nullable=False),
    sa.Column("message", sa.Text, nullable=False),
    sa.Column("fix", sa.Text, nullable=False),
    # Until then nobody is told of this incident; the next one of the rule and subject is told again.
    sa.Column("silenced_until", Instant),
    sa.Column("silenced_by", sa.String(120)),
    sa.Column("silence_reason", sa.Text),
)

identity = sa.Table(
    "bullpen_ledger",
    metadata,
    # One row, made by the migration: which ledger this is, wherever its database moves.
    sa.Column("id", sa.String(36), primary_key=True),
)

turns = sa.Table(
    "bullpen_turns",
    metadata,
    # A digest of entity and kind: no tenant learns of the entities of others.
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("token", sa.String(64), nullable=False),
    sa.Column("until", Instant, nullable=False),
)

checkpoints = sa.Table(
    "bullpen_checkpoints",
    metadata,
    sa.Column("name", sa.String(200), primary_key=True),
    sa.Column("position", sa.String(200), nullable=False),
    _now_column("updated_at"),
)

inbox = sa.Table(
    "bullpen_inbox",
    metadata,
    # The tenant of the transaction, so that one tenant's keys never hide another's messages.
    sa.Column("tenant_id", sa.String(60), primary_key=True, server_default=_CurrentTenant()),
    sa.Column("scope", sa.String(120), primary_key=True),
    sa.Column("key", sa.String(300), primary_key=True),
    _now_column("received_at"),
)
_index("ix_inbox_received", inbox.c.received_at)

audit = sa.Table(
    "bullpen_audit",
    metadata,
    sa.Column("id", _number, sa.Identity(always=True), primary_key=True),
    _now_column("at"),
    sa.Column("actor", sa.String(120), nullable=False),
    sa.Column("action", sa.String(60), nullable=False),
    sa.Column("subject", sa.String(200), nullable=False),
    sa.Column("tenant_id", sa.String(60)),
    sa.Column("detail", Json),
    # Who was logged in to PostgreSQL, by its own word; `actor` is what that login said.
    sa.Column("login", sa.String(120)),
)
_index("ix_audit_subject", audit.c.subject)

# Scheduled messages ---------------------------------------------------------------------------------------------------

recipients = sa.Table(
    "bullpen_recipients",
    metadata,
    sa.Column("tenant_id", sa.String(60), primary_key=True, server_default=sa.text("''")),
    sa.Column("id", sa.String(120), primary_key=True),
    sa.Column("name", sa.String(200), nullable=False, server_default=sa.text("''")),
    sa.Column("zone", sa.String(64), nullable=False),
    sa.Column("channel", sa.String(60), nullable=False),
    sa.Column("address", sa.String(320), nullable=False),
    sa.Column("locale", sa.String(20), nullable=False, server_default=sa.text("''")),
    sa.Column("attributes", Json),
    _now_column("created_at"),
    _now_column("updated_at"),
)

occasions = sa.Table(
    "bullpen_occasions",
    metadata,
    sa.Column("tenant_id", sa.String(60), primary_key=True, server_default=sa.text("''")),
    sa.Column("recipient_id", sa.String(120), primary_key=True),
    sa.Column("occasion", sa.String(60), primary_key=True),
    sa.Column("label", sa.String(60), primary_key=True, server_default=sa.text("''")),
    sa.Column("on_date", sa.String(10), nullable=False),
    sa.Column("send_at", sa.String(5)),
    # The next occurrence that has no message yet; NULL: none will come.
    sa.Column("next_due", Instant),
    sa.Column("next_period", sa.String(10)),
    sa.ForeignKeyConstraint(
        ["tenant_id", "recipient_id"],
        [f"{SCHEMA}.bullpen_recipients.tenant_id", f"{SCHEMA}.bullpen_recipients.id"],
        name="fk_occasions_recipient",
        ondelete="CASCADE",
    ),
)
# Planning: what comes within the horizon, without a look at all the others.
_index("ix_occasions_next", occasions.c.next_due, where="next_due IS NOT NULL")

messages = sa.Table(
    "bullpen_messages",
    metadata,
    # Made from the columns of ux_messages_period: a message has the same id, whoever plans it, and however often.
    sa.Column("id", _row_id, primary_key=True),
    sa.Column("tenant_id", sa.String(60), nullable=False, server_default=sa.text("''")),
    sa.Column("recipient_id", sa.String(120), nullable=False),
    sa.Column("occasion", sa.String(60), nullable=False),
    sa.Column("label", sa.String(60), nullable=False, server_default=sa.text("''")),
    sa.Column("period", sa.String(10), nullable=False),
    sa.Column("number", sa.Integer),
    sa.Column("channel", sa.String(60), nullable=False),
    sa.Column("zone", sa.String(64), nullable=False),
    sa.Column("local_at", sa.String(16), nullable=False),
    sa.Column("due_at", Instant, nullable=False),
    # What becomes of it when it is late: send; skip when it was not queued by `late_at`; expire when not sent by then.
    sa.Column("late_policy", sa.String(10), nullable=False, server_default=sa.text("'send'")),
    sa.Column("late_at", Instant),
    sa.Column("status", sa.String(20), nullable=False, server_default=sa.text("'CREATED'")),
    sa.Column("attempts", sa.Integer, nullable=False, server_default=sa.text("0")),
    sa.Column("fence", sa.Integer, nullable=False, server_default=sa.text("0")),
    sa.Column("publication", sa.Integer, nullable=False, server_default=sa.text("0")),
    sa.Column("published_at", Instant),
    # When to publish it again, unless it has come further by then: the lease of QUEUED and of SENDING.
    sa.Column("publish_again_at", Instant),
    sa.Column("locked_by", sa.String(120)),
    sa.Column("locked_until", Instant),
    sa.Column("sent_at", Instant),
    sa.Column("response", Json),
    sa.Column("last_error", sa.Text),
    sa.Column("error_code", sa.String(60)),
    _now_column("created_at"),
    _now_column("updated_at"),
    sa.CheckConstraint(
        "status IN ('CREATED', 'QUEUED', 'SENDING', 'SENT', 'FAILED', 'PARKED', 'SKIPPED', 'EXPIRED', 'CANCELLED')",
        name="ck_messages_status",
    ),
    sa.CheckConstraint("late_policy IN ('send', 'skip', 'expire')", name="ck_messages_late_policy"),
)
# The fence: one message per recipient, occasion and period. Also finds the messages of a recipient.
_index(
    "ux_messages_period",
    messages.c.tenant_id,
    messages.c.recipient_id,
    messages.c.occasion,
    messages.c.label,
    messages.c.period,
    unique=True,
)
# The scheduler's two looks. Partial: years of SENT rows cost it nothing.
_index("ix_messages_due", messages.c.due_at, where="status = 'CREATED'")
_index("ix_messages_again", messages.c.publish_again_at, where="status IN ('QUEUED', 'SENDING')")
# Counting what is not done, and finding what failed.
_index("ix_messages_status", messages.c.status, messages.c.due_at, where="status <> 'SENT'")

message_limits = sa.Table(
    "bullpen_message_limits",
    metadata,
    # When the next send through a channel may begin: one row per channel with a rate limit, shared by all senders.
    sa.Column("channel", sa.String(60), primary_key=True),
    sa.Column("free_at", Instant, nullable=False),
)

# Events ---------------------------------------------------------------------------------------------------------------

events = sa.Table(
    "bullpen_events",
    metadata,
    # Order of insertion, which is no order for readers: a transaction with a lower number may commit later.
    sa.Column("id", _number, sa.Identity(always=True), primary_key=True),
    # Order for readers. On PostgreSQL it is NULL until a reader numbers what it sees committed; SQLite has one writer
    # at a time, so there the insert gives it.
    sa.Column("position", sa.BigInteger),
    sa.Column("stream_id", sa.String(200), nullable=False),
    sa.Column("version", sa.BigInteger, nullable=False),
    sa.Column("event_id", sa.String(100), nullable=False),
    sa.Column("event_type", sa.String(120), nullable=False),
    sa.Column("data", Json, nullable=False),
    sa.Column("metadata", Json, nullable=False),
    sa.Column("tenant_id", sa.String(60)),
    _now_column("recorded_at"),
)
# Two writers never get the same place in a stream.
_index("ux_events_version", events.c.stream_id, events.c.version, unique=True)
# Appending an event again is recognised; its id is what targets know it by.
_index("ux_events_event", events.c.event_id, unique=True)
_index("ux_events_position", events.c.position, unique=True)
_index("ix_events_unnumbered", events.c.id, where="position IS NULL")

parked_events = sa.Table(
    "bullpen_parked_events",
    metadata,
    sa.Column("id", _number, sa.Identity(always=True), primary_key=True),
    sa.Column("projector", sa.String(120), nullable=False),
    # The one route on which it failed; empty: the event as a whole, with whatever routes it has.
    sa.Column("route", sa.String(120), nullable=False, server_default=sa.text("''")),
    sa.Column("position", sa.BigInteger, nullable=False),
    # Text without limits: a name that is too long may be the very reason why the event is here.
    sa.Column("stream_id", sa.Text, nullable=False),
    sa.Column("event_id", sa.Text, nullable=False),
    sa.Column("event_type", sa.Text, nullable=False),
    sa.Column("version", sa.BigInteger, nullable=False),
    # Base64: content that is no text and no JSON must be kept too.
    sa.Column("data", sa.Text, nullable=False),
    sa.Column("metadata", sa.Text, nullable=False),
    sa.Column("recorded_at", Instant, nullable=False),
    sa.Column("error", sa.Text, nullable=False),
    sa.Column("tries", sa.Integer, nullable=False),
    sa.Column("retry_wanted", sa.Boolean, nullable=False, server_default=sa.false()),
    _now_column("parked_at"),
)
_index("ux_parked_event", parked_events.c.projector, parked_events.c.route, parked_events.c.position, unique=True)
_index("ix_parked_retry", parked_events.c.projector, where="retry_wanted")

# Workflows ------------------------------------------------------------------------------------------------------------

workflow_history = sa.Table(
    "bullpen_workflow_history",
    metadata,
    sa.Column("id", _number, sa.Identity(always=True), primary_key=True),
    # Empty where there are no tenants: part of a key, which must not be null.
    sa.Column("tenant_id", sa.String(60), nullable=False, server_default=_CurrentTenant()),
    sa.Column("workflow", sa.String(120), nullable=False),
    sa.Column("urn", sa.String(300), nullable=False),
    sa.Column("version", sa.BigInteger, nullable=False),
    sa.Column("event", sa.String(120), nullable=False),
    sa.Column("source", sa.String(120), nullable=False),
    sa.Column("target", sa.String(120), nullable=False),
    sa.Column("kind", sa.String(20), nullable=False),
    sa.Column("event_key", sa.String(300), nullable=False),
    sa.Column("step", sa.Integer, nullable=False),
    sa.Column("job_id", sa.String(300)),
    sa.Column("attempt", sa.Integer),
    sa.Column("user_id", sa.String(60)),
    sa.Column("correlation_id", sa.String(120)),
    sa.Column("reason", sa.Text),
    _now_column("at"),
)
# An event counts once for an entity. One that parked it may try again after somebody has moved the entity.
_index(
    "ux_workflow_applied",
    workflow_history.c.tenant_id,
    workflow_history.c.workflow,
    workflow_history.c.urn,
    workflow_history.c.event_key,
    workflow_history.c.step,
    where="kind <> 'failed'",
    unique=True,
)
_index("ix_workflow_correlation", workflow_history.c.correlation_id, where="correlation_id IS NOT NULL")
_index(
    "ix_workflow_history",
    workflow_history.c.tenant_id,
    workflow_history.c.workflow,
    workflow_history.c.urn,
    workflow_history.c.id,
)

# Runs -----------------------------------------------------------------------------------------------------------------

# Charged, long operations. The row is the truth about a run; the job that runs it has the same id.
runs = sa.Table(
    "bullpen_runs",
    metadata,
    sa.Column("id", _row_id, primary_key=True),
    # Identity and content: never changed after the insert (enforced by a trigger).
    sa.Column("tenant_id", sa.String(60), nullable=False),
    sa.Column("version_id", sa.String(120), nullable=False),
    sa.Column("payload", Json, nullable=False),
    sa.Column("payload_in_job", sa.Boolean, nullable=False, server_default=sa.true()),
    sa.Column("is_test_run", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("cost", sa.BigInteger, nullable=False, server_default=sa.text("0")),
    _now_column("created_at"),
    # Where it is.
    sa.Column("status", sa.String(20), nullable=False, server_default=sa.text("'QUEUED'")),
    sa.Column("attempts", sa.Integer, nullable=False, server_default=sa.text("0")),
    sa.Column("redrives", sa.Integer, nullable=False, server_default=sa.text("0")),
    # Who may write: grows with every attempt that begins. The other two say which take of which job began it.
    sa.Column("fence", sa.Integer, nullable=False, server_default=sa.text("0")),
    sa.Column("job_timestamp", sa.BigInteger, nullable=False, server_default=sa.text("0")),
    sa.Column("job_fence", sa.Integer, nullable=False, server_default=sa.text("0")),
    sa.Column("needs_job", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("started_at", Instant),
    sa.Column("heartbeat_at", Instant),
    sa.Column("completed_at", Instant),
    sa.Column("duration_ms", sa.BigInteger),
    sa.Column("progress", Json),
    sa.Column("result", Json),
    sa.Column("error_message", sa.Text),
    sa.Column("retry_history", Json),
    _now_column("updated_at"),
    # Also identity: which handler runs it, in which queue its job is, with which options. NULL: those without a name.
    sa.Column("handler", sa.String(60)),
    sa.Column("queue", sa.String(200)),
    sa.Column("job_options", Json),
    sa.CheckConstraint("status IN ('QUEUED', 'RUNNING', 'COMPLETED', 'FAILED', 'CANCELLED')", name="ck_runs_status"),
    sa.CheckConstraint("cost >= 0 AND attempts >= 0", name="ck_runs_numbers"),
)
# A tenant's history, newest first.
_index("ix_runs_tenant", runs.c.tenant_id, runs.c.created_at, runs.c.id)
_index("ix_runs_created", runs.c.created_at, runs.c.id)
# Runs that have not ended: among them those whose job is lost or has failed unnoticed.
_index("ix_runs_open", runs.c.updated_at, where="status IN ('QUEUED', 'RUNNING')")

run_steps = sa.Table(
    "bullpen_run_steps",
    metadata,
    # One result per step: whoever comes second reads the first one's.
    sa.Column("run_id", _row_id, sa.ForeignKey(f"{SCHEMA}.bullpen_runs.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("name", sa.String(120), primary_key=True),
    sa.Column("tenant_id", sa.String(60), nullable=False),
    sa.Column("fence", sa.Integer, nullable=False),
    sa.Column("result", Json, nullable=False),
    _now_column("finished_at"),
    # What of the run's cost is spent with this step, even if the run comes to nothing afterwards.
    sa.Column("price", sa.BigInteger, nullable=False, server_default=sa.text("0")),
)

credit_accounts = sa.Table(
    "bullpen_credit_accounts",
    metadata,
    sa.Column("tenant_id", sa.String(60), primary_key=True),
    sa.Column("balance", sa.BigInteger, nullable=False, server_default=sa.text("0")),
    _now_column("updated_at"),
    # Nobody spends what is not there, however many transactions try at once.
    sa.CheckConstraint("balance >= 0", name="ck_credit_balance"),
)

credit_entries = sa.Table(
    "bullpen_credit_entries",
    metadata,
    # Append-only; the sum of a tenant's amounts is its balance.
    sa.Column("id", _number, sa.Identity(always=True), primary_key=True),
    sa.Column("tenant_id", sa.String(60), nullable=False),
    sa.Column("kind", sa.String(20), nullable=False),
    sa.Column("amount", sa.BigInteger, nullable=False),
    sa.Column("run_id", _row_id),
    # A redriven run reserves again: its redrives so far.
    sa.Column("round", sa.Integer, nullable=False, server_default=sa.text("0")),
    sa.Column("reference", sa.String(200)),
    _now_column("at"),
    sa.CheckConstraint("kind IN ('grant', 'reserve', 'settle', 'refund')", name="ck_credit_kind"),
)
# A round is reserved once, and ends once: settled or refunded, never both.
_index("ux_credit_reserve", credit_entries.c.run_id, credit_entries.c.round, where="kind = 'reserve'", unique=True)
_index(
    "ux_credit_end",
    credit_entries.c.run_id,
    credit_entries.c.round,
    where="kind IN ('settle', 'refund')",
    unique=True,
)
# A grant that is repeated with its reference is one grant.
_index("ux_credit_grant", credit_entries.c.tenant_id, credit_entries.c.reference, where="kind = 'grant'", unique=True)
