"""The SQL ledger: messages stored in the caller's transaction, and what became of them.

Needs the extra `postgres` or `sqlite`.
"""

from importlib.util import find_spec as _find_spec

from bullpen.errors import MissingExtra as _MissingExtra

if not (_find_spec("alembic") and _find_spec("sqlalchemy")):
    raise _MissingExtra("sqlite", "the ledger (in PostgreSQL: the extra postgres)")

from bullpen.ledger.destinations import Destination, Destinations
from bullpen.ledger.endpoint_records import EndpointAttempt, EndpointRate, EndpointRow, EndpointState
from bullpen.ledger.endpoints import EndpointStore
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
    OutboxFields,
    OutboxItem,
    OutboxRow,
    OutboxStatus,
    Released,
    Retried,
    RowOutcome,
    Sent,
    SettledRow,
    Settlement,
    TenantLimit,
)
from bullpen.ledger.repository import OutboxRepository
from bullpen.ledger.runs import AllRuns, NewRun, RunRow, RunStatus, StepRow, TenantRuns, check_run_id
from bullpen.ledger.security import Roles
from bullpen.ledger.tenant_limits import TenantLimits
from bullpen.ledger.transactions import TransactionManager, check_tenant

__all__ = [
    "AllRuns",
    "Appended",
    "Attempt",
    "Claimed",
    "Destination",
    "Destinations",
    "Died",
    "EndpointAttempt",
    "EndpointRate",
    "EndpointRow",
    "EndpointState",
    "EndpointStore",
    "Enqueued",
    "Enqueuer",
    "EventLog",
    "Lane",
    "Ledger",
    "NewRun",
    "OutboxFields",
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
    "RunRow",
    "RunStatus",
    "Sent",
    "SettledRow",
    "Settlement",
    "StepRow",
    "TenantLimit",
    "TenantLimits",
    "TenantRuns",
    "TransactionManager",
    "check_run_id",
    "check_tenant",
]
