"""The SQL ledger: messages stored in the caller's transaction, and what became of them.

Needs the extra `postgres` or `sqlite`.
"""

from importlib.util import find_spec as _find_spec

from bullpen.errors import MissingExtra as _MissingExtra

if not (_find_spec("alembic") and _find_spec("sqlalchemy")):
    raise _MissingExtra("sqlite", "the ledger (in PostgreSQL: the extra postgres)")

from bullpen.ledger.enqueue import Enqueuer
from bullpen.ledger.events import Appended, EventLog
from bullpen.ledger.ledger import Ledger
from bullpen.ledger.parked import ParkedEvent, ParkedEvents
from bullpen.ledger.records import (
    Attempt,
    Claimed,
    Died,
    Enqueued,
    Lane,
    OutboxItem,
    OutboxRow,
    OutboxStatus,
    Released,
    Retried,
    RowOutcome,
    Sent,
    Settled,
    Settlement,
)
from bullpen.ledger.repository import OutboxRepository
from bullpen.ledger.security import Roles

__all__ = [
    "Appended",
    "Attempt",
    "Claimed",
    "Died",
    "Enqueued",
    "Enqueuer",
    "EventLog",
    "Lane",
    "Ledger",
    "OutboxItem",
    "OutboxRepository",
    "OutboxRow",
    "OutboxStatus",
    "ParkedEvent",
    "ParkedEvents",
    "Released",
    "Retried",
    "Roles",
    "RowOutcome",
    "Sent",
    "Settled",
    "Settlement",
]
