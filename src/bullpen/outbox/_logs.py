"""One log line per thing that happened, with the same fields everywhere. Ids, never payloads, texts of errors or
people.

Fields travel as attributes of the record (`extra`), under their wire names; absent ones are left out.
"""

from __future__ import annotations

import logging
from typing import Any, Literal

from bullpen._kernel.report import Reporter, present
from bullpen.ledger import OutboxRow

_reporter = Reporter("bullpen.outbox")
logger = _reporter.logger

Operation = Literal[
    "OUTBOX_ENQUEUE",
    "OUTBOX_CLAIM",
    "OUTBOX_ENQUEUE_JOB",
    "OUTBOX_DIRECT_SEND",
    "OUTBOX_DELIVER",
    "OUTBOX_REAP",
    "OUTBOX_REDRIVE",
    "OUTBOX_DISCARD",
    "OUTBOX_RETENTION",
    "OUTBOX_REPLAY",
]
Phase = Literal["START", "SUCCESS", "DUPLICATE", "ERROR"]


def log(
    operation: Operation,
    phase: Phase,
    row: OutboxRow | None = None,
    *,
    source: str,
    level: int = logging.INFO,
    **fields: Any,
) -> None:
    """Write one line, if anybody wants it."""
    if not logger.isEnabledFor(level):
        return
    extra: dict[str, Any] = {"operation": operation, "phase": phase, "source": source, **fields}
    if row is not None:
        extra |= {
            "outboxId": row.id,
            "integrationType": row.integration_type,
            "eventType": row.event_type,
            "correlationId": row.correlation_id,
            "tenantId": row.tenant_id,
            "userId": row.user_id,
            "attemptsMade": row.attempts,
        }
    hidden = ("operation", "phase", "source")
    shown = " ".join(f"{name}={value}" for name, value in present(extra).items() if name not in hidden)
    _reporter.log(level, f"{operation} {phase} {shown}", **extra)
