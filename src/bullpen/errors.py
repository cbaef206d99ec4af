"""The errors of queues, connections and the ledger, and the signals a handler may raise at us.

Workflows, messages, sources, transports and stores of dead letters define theirs beside what raises them; each is a
`BullpenError` too. `docs/reference/errors.md` lists all.

BullpenError
├── InvalidOption            a value or name that cannot be used; nothing was written       (also a ValueError)
│   └── NotJson              a value that cannot travel as JSON; names the path
├── PayloadTooLarge          data plus options above 10 MiB; nothing was written            (also a ValueError)
├── MissingExtra             an optional dependency is not installed; prints the pip line   (also an ImportError)
├── NotConfigured            no connection given and none may be made up
├── EmbeddedError            the bundled server cannot be started or used
├── ConnectionLost           the server did not answer; nothing is known to be written      (also a ConnectionError)
├── ServerRefused            the server answered with an error: its text is in the message
│   └── OutOfMemory          the server is full and took nothing
├── QueueError               about one queue or one job; fields `queue`, `job_id`
│   ├── OutcomeUnknown       a write was sent and no answer came before the deadline
│   ├── DurabilityUnknown    a job is stored, but disk or replicas did not confirm it in time; field `job`
│   ├── QueueFull            the buffer of adds that wait for the server is full; nothing was written
│   ├── QueueClosed          used after close
│   ├── JobNotFound          no such job
│   ├── JobStateConflict     the job is not in the state that the operation needs
│   ├── JobLockLost          the lock ran out before the outcome was written
│   ├── JobFailed            `job.result()` of a job that failed finally
│   ├── ResultTimeout        `job.result(timeout=…)` ran out                                (also a TimeoutError)
│   ├── EventsLost           the event stream was trimmed before we could read it
│   └── CorruptJob           a stored job that no reader can take
└── LedgerError              about the SQL ledger
    ├── DatabaseUnavailable  the database did not answer; what was open is rolled back      (also a ConnectionError)
    ├── LedgerNotReady       tables are missing or older than this program: run `bullpen migrate`
    ├── UnsafeDatabaseRole   a role for which row-level security means nothing
    ├── NotInTransaction     enqueue on a connection that commits every statement by itself
    ├── RowNotFound          no row has this id, or this tenant may not see it
    ├── RowStateConflict     the row is not in the state that the operation needs
    └── InsufficientCredits  the tenant has fewer credits than the run costs; nothing was stored

JobSignal                    raised by a handler to say what shall happen to its job
├── PermanentError           fail now, whatever attempts are left
├── DelayJob                 run again later; no attempt is counted
├── ReturnToWait             run again soon; no attempt is counted
├── RateLimited              as ReturnToWait, and take nothing for a while
└── WaitForChildren          run again when the children are done
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from bullpen._version import install_line


class BullpenError(Exception):
    """Base of everything that bullpen raises on its own behalf."""


def _show(value: object, limit: int = 120) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"


class InvalidOption(BullpenError, ValueError):
    """An option has a value, or a name, that cannot be used. Nothing was written."""

    def __init__(self, option: str, expected: str, value: object, *, suggestion: str | None = None) -> None:
        hint = f"; did you mean {suggestion!r}?" if suggestion else ""
        super().__init__(f"{option}: expected {expected}, got {_show(value)}{hint}")
        self.option, self.expected, self.value, self.suggestion = option, expected, value, suggestion


class NotJson(InvalidOption):
    """A value cannot be written as JSON without changing its meaning. `option` is the path to it."""


class PayloadTooLarge(BullpenError, ValueError):
    """Data plus options exceed the limit. Store the payload elsewhere and send a reference."""

    def __init__(self, message: str, *, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(message)
        self.size_bytes, self.limit_bytes = size_bytes, limit_bytes


class MissingExtra(BullpenError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, extra: str, purpose: str) -> None:
        super().__init__(f'{purpose} needs the extra "{extra}": {install_line(extra)}')
        self.extra, self.purpose = extra, purpose


class NotConfigured(BullpenError):
    """No connection was given and none may be made up."""


class EmbeddedError(BullpenError):
    """The bundled server cannot be started, or its directory cannot be used."""


class ConnectionLost(BullpenError, ConnectionError):
    """The server cannot be reached or did not answer in time."""


class ServerRefused(BullpenError):
    """The server answered a command with an error."""


class OutOfMemory(ServerRefused):
    """The server has reached its memory limit and took nothing. Raise maxmemory or drain the queue."""


class QueueError(BullpenError):
    """Something about one queue, and perhaps one job of it."""

    def __init__(self, message: str, *, queue: str, job_id: str | None = None) -> None:
        super().__init__(message)
        self.queue, self.job_id = queue, job_id


class OutcomeUnknown(QueueError):
    """A write was sent, repeated, and never answered before the deadline: it may or may not have happened."""


class DurabilityUnknown(QueueError):
    """The job is stored in the server's memory, but the level asked for was not confirmed before the deadline."""

    def __init__(self, queue: str, job: Any, level: str) -> None:
        super().__init__(
            f"job {job.id!r} of queue {queue!r} is stored, but level {level} was not confirmed in time; "
            "it is lost only if the server dies before it catches up",
            queue=queue,
            job_id=job.id,
        )
        self.job, self.level = job, level


class QueueFull(QueueError):
    """Too many adds wait for the server. Nothing of this call was written; slow down or add more connections."""


class QueueClosed(QueueError):
    """The queue object was closed before this call."""


class JobNotFound(QueueError):
    """No job has this id."""

    def __init__(self, queue: str, job_id: str, *, is_letter: bool = False) -> None:
        message = f"job {job_id!r} of queue {queue!r} does not exist; it may have been removed by its retention"
        if is_letter:  # retention removes none
            message = f"dead letter {job_id!r} is not in {queue!r}; it may have been redriven or discarded already"
        super().__init__(message, queue=queue, job_id=job_id)


class JobStateConflict(QueueError):
    """The job is not in the state that the operation needs. Nothing was changed."""


class JobLockLost(QueueError):
    """The lock ran out before the outcome was written. The outcome was dropped; another worker has the job, or it is
    gone (`is_gone`)."""

    def __init__(self, queue: str, job_id: str, held_ms: int, why: str | None = None, *, is_gone: bool = False) -> None:
        what = f"lock lost after {held_ms} ms, outcome not written" if why is None else f"outcome not written, {why}"
        what += "; another worker may run it again. Raise `lock`, or run blocking code with a plain `def` handler"
        if is_gone:
            what = "outcome not written, the job is gone: somebody removed it, or emptied the queue, while it ran"
        super().__init__(f"job {job_id!r} of queue {queue!r}: {what}", queue=queue, job_id=job_id)
        self.held_ms, self.is_gone = held_ms, is_gone


class JobFailed(QueueError):
    """The job whose result was awaited failed finally. `reason` is its failed reason."""

    def __init__(self, queue: str, job_id: str, reason: str) -> None:
        super().__init__(f"job {job_id!r} of queue {queue!r} failed: {reason}", queue=queue, job_id=job_id)
        self.reason = reason


class ResultTimeout(QueueError, TimeoutError):
    """The job did not finish within the time given. The job itself is untouched.

    The message says in which state it is and whether a worker is connected; `state`, `has_worker` and `is_paused` say
    the same, None where the server could not tell.
    """

    def __init__(
        self,
        message: str,
        *,
        queue: str,
        job_id: str,
        state: str | None = None,
        has_worker: bool | None = None,
        is_paused: bool | None = None,
    ) -> None:
        super().__init__(message, queue=queue, job_id=job_id)
        self.state, self.has_worker, self.is_paused = state, has_worker, is_paused


class EventsLost(QueueError):
    """Events were trimmed from the stream before they could be read."""


class CorruptJob(QueueError):
    """A stored job cannot be read: its data is no JSON, or a field has a shape that nobody writes."""


class LedgerError(BullpenError):
    """Something about the SQL ledger."""


class DatabaseUnavailable(LedgerError, ConnectionError):
    """The database cannot be reached or did not answer in time. What was open is rolled back."""


class LedgerNotReady(LedgerError):
    """The ledger's tables are missing, or older than this program. Run `bullpen migrate`."""


class UnsafeDatabaseRole(LedgerError):
    """Row-level security means nothing for this connection: superuser, BYPASSRLS, owner, or a table without FORCE."""


class NotInTransaction(LedgerError):
    """The connection commits every statement by itself, so the row could not be part of a transaction."""


class RowNotFound(LedgerError):
    """No row has this id, or this tenant may not see it."""

    def __init__(self, table: str, row_id: str) -> None:
        super().__init__(
            f"{table} has no row {row_id!r}; it may have been removed by retention, or belong to another tenant"
        )
        self.table, self.row_id = table, row_id


class RowStateConflict(LedgerError):
    """The row is not in the state that the operation needs. Nothing was changed."""

    def __init__(self, table: str, row_id: str, state: str, needed: str) -> None:
        super().__init__(f"row {row_id!r} of {table} is {state}, not {needed}; nothing was changed")
        self.table, self.row_id, self.state, self.needed = table, row_id, state, needed


class InsufficientCredits(LedgerError):
    """The tenant has fewer credits than the run costs. Nothing was stored; grant credits and submit again."""

    def __init__(self, tenant_id: str, *, needed: int, balance: int) -> None:
        super().__init__(
            f"tenant {tenant_id!r} has {balance} credits and the run costs {needed}; nothing was stored, "
            "grant credits and submit it again"
        )
        self.tenant_id, self.needed, self.balance = tenant_id, needed, balance


class JobSignal(Exception):
    """Raised by a handler to say what shall happen to its job, other than success or failure."""


class PermanentError(JobSignal):
    """Fail the job now, whatever attempts are left. The text becomes its failed reason."""


class DelayJob(JobSignal):
    """Run the job again after `delay` (ms or timedelta). No attempt is counted."""

    def __init__(self, delay: int | timedelta, reason: str = "") -> None:
        super().__init__(reason or f"delayed by its handler for {delay}")
        self.delay = delay


class ReturnToWait(JobSignal):
    """Put the job back to the front of the line. No attempt is counted."""


class RateLimited(JobSignal):
    """Put the job back and let the queue's workers take nothing for `pause` (ms or timedelta)."""

    def __init__(self, pause: int | timedelta, reason: str = "") -> None:
        super().__init__(reason or f"rate limited for {pause}")
        self.pause = pause


class WaitForChildren(JobSignal):
    """Park the job until its pending children are done; it is then run again. No attempt is counted."""


def require(option: str, holds: bool, expected: str, value: Any) -> None:
    """Refuse a value at the door: raise InvalidOption unless `holds`."""
    if not holds:
        raise InvalidOption(option, expected, value)
