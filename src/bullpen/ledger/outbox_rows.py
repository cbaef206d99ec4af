"""Rows of the outbox as the database gives and takes them. No input or output here.

Elsewhere: the records (`records`), the statements (`_sql`), running them (`outbox`, `outbox_settling`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from bullpen._kernel.duration import check_texts
from bullpen.ledger import tables
from bullpen.ledger.records import MAX_LENGTHS, OutboxRow, OutboxStatus, encode_rows, one_line
from bullpen.ledger.tables import to_datetime

__all__ = ["STATUSES", "audit_entry", "copy_of", "edited", "ids_of", "to_row"]

_INSTANTS: Final = tuple(
    index for index, column in enumerate(tables.outbox.columns) if isinstance(column.type, tables.Instant)
)
STATUSES: Final = {status.value: status for status in OutboxStatus}
_STATUS: Final = list(tables.outbox.columns.keys()).index("status")

_is_id = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}").fullmatch


def to_row(values: Sequence[Any]) -> OutboxRow:
    converted = list(values)
    for index in _INSTANTS:
        if (value := converted[index]) is not None:
            converted[index] = to_datetime(value)
    converted[_STATUS] = STATUSES[converted[_STATUS]]
    return OutboxRow._make(converted)


def ids_of(ids: Iterable[str]) -> str:
    # What is no id matches no row; PostgreSQL would refuse the whole statement.
    return encode_rows({"id": row_id} for row_id in check_texts("ids", ids) if _is_id(row_id))


def audit_entry(by: str, action: str, subject: str, tenant_id: str | None, detail: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "actor": one_line(by, 120),
        "action": action,
        "subject": subject,
        "tenant_id": tenant_id,
        "detail": msgspec.json.encode(detail).decode(),
    }


def edited(row: OutboxRow, payload_json: str) -> dict[str, Any]:
    """What takes the place of a dead row: the same but for its payload, under a route of its own."""
    headers = {**row.headers, "idempotencyKey": row.idempotency_key, "editOf": row.id}
    return {
        **copy_of(row, f"edit-{row.id[:8]}", new_key=False),
        "payload": payload_json,
        "headers": msgspec.json.encode(headers).decode(),
    }


def copy_of(row: OutboxRow, label: str, *, new_key: bool) -> dict[str, Any]:
    """A row that was sent, to be sent again: the same event and content under a route of its own."""
    route = f"{row.route_key}~{label}"
    if len(route) > MAX_LENGTHS["route_key"]:
        # Two long routes must not become one: what is cut away stays in the digest.
        route = f"{row.route_key[:60]}~{hashlib.sha256(route.encode()).hexdigest()[:40]}"
    key = f"{row.idempotency_key}/{label}" if new_key else row.idempotency_key
    return {
        "source_stream_id": row.source_stream_id,
        "source_event_id": row.source_event_id,
        "route_key": route,
        "integration_type": row.integration_type,
        "event_type": row.event_type,
        "payload": row.payload_json,
        "headers": msgspec.json.encode({**row.headers, "idempotencyKey": key, "replayOf": row.id}).decode(),
        "tenant_id": row.tenant_id,
        "user_id": row.user_id,
        "correlation_id": row.correlation_id,
        "ordering_key": row.ordering_key,
        "backoff": row.backoff_json,
        "due_ms": None,
        "delay_ms": 0,
        "max_attempts": row.max_attempts,
    }
