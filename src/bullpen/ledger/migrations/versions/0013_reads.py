"""Indexes for what people look up: rows of the outbox by status and correlation id, runs of all tenants, moves by
correlation id. No claim reads them."""

from __future__ import annotations

from alembic import context, op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    postgres = op.get_context().dialect.name == "postgresql"
    at = f"{context.config.attributes['schema']}." if postgres else ""
    parts = context.config.attributes["steps"][revision]
    outbox, runs, moves = (f"{at}{name}" for name in ("integration_outbox", "bullpen_runs", "bullpen_workflow_history"))
    statements = []
    if "outbox" in parts:
        statements += [
            f"CREATE INDEX IF NOT EXISTS ix_outbox_seq ON {outbox} (seq)",
            # In the place of one on the status alone: rows of a status were sorted before the first was shown.
            f"CREATE INDEX IF NOT EXISTS ix_outbox_status_seq ON {outbox} (status, seq) WHERE status <> 'SENT'",
            f"DROP INDEX IF EXISTS {at}ix_outbox_status",
            (
                f"CREATE INDEX IF NOT EXISTS ix_outbox_correlation ON {outbox} (correlation_id, seq) "
                "WHERE correlation_id IS NOT NULL"
            ),
        ]
    if "runs" in parts:
        statements.append(f"CREATE INDEX IF NOT EXISTS ix_runs_created ON {runs} (created_at, id)")
    if "workflows" in parts:
        statements.append(
            f"CREATE INDEX IF NOT EXISTS ix_workflow_correlation ON {moves} (correlation_id) "
            "WHERE correlation_id IS NOT NULL"
        )
    for statement in statements:
        op.execute(statement)
