"""All errors that bullpen raises on its own behalf, and the signals that a handler may raise at us.

Import them from `bullpen`. `docs/reference/errors.md` says more, and what to do.

BullpenError
├── InvalidOption              a value or name that cannot be used; nothing was written      (also a ValueError)
│   ├── NotJson                a value that cannot travel as JSON; names the path
│   ├── TooFewReplicas         fewer replicas are connected than the durability asks for
│   ├── TwoTransports          one workflow was given two transports
│   ├── DoubtfulDefinition     a workflow cannot work as it is defined
│   └── UnknownEvent           no transition of the workflow has this event                  (also a PermanentError)
├── PayloadTooLarge            data plus options above 10 MiB; nothing was written           (also a ValueError)
├── PayloadUnavailable         a sealed payload cannot be opened here now; the job is kept; field `key_id`
├── PayloadMissing             the object store has no object for a payload
├── PayloadTampered            a sealed payload is not what its producer sealed              (also a PermanentError)
├── ObjectStoreFailed          the object store did not do what was asked                    (also a ConnectionError)
├── MissingExtra               an optional dependency is not installed; prints the pip line  (also an ImportError)
├── NotConfigured              no connection given and none may be made up
├── EmbeddedError              the bundled server cannot be started or used
├── ConnectionLost             the server did not answer; nothing is known to be written     (also a ConnectionError)
├── ServerRefused              the server answered with an error: its text is in the message
│   ├── OutOfMemory            the server is full and took nothing
│   └── NotTakenNow            the broker did not take the event, and may take it soon
├── HandlerTimeout             a handler took longer than it may; the attempt counts         (also a TimeoutError)
├── QueueError                 about one queue or one job; fields `queue`, `job_id`
│   ├── OutcomeUnknown         a write was sent and no answer came before the deadline
│   ├── DurabilityUnknown      a job is stored, but disk or replicas did not confirm it in time; field `job`
│   ├── QueueFull              the buffer of adds that wait for the server is full; nothing was written
│   ├── LaneFull               the lane has as many jobs as it may; this one was not stored; field `lane`
│   ├── QueueClosed            used after close
│   ├── JobNotFound            no such job
│   ├── SchedulerNotFound      no such job scheduler; field `scheduler_id`
│   ├── JobStateConflict       the job is not in the state that the operation needs
│   ├── JobLockLost            the lock ran out before the outcome was written
│   ├── JobFailed              `job.result()` of a job that failed finally
│   │   └── JobCancelled       the same for a cancelled job
│   ├── ResultTimeout          `job.result(timeout=…)` ran out                               (also a TimeoutError)
│   ├── EventsLost             the event stream was trimmed before we could read it
│   └── CorruptJob             a stored job that no reader can take
├── LedgerError                about the SQL ledger
│   ├── DatabaseUnavailable    the database did not answer; what was open is rolled back     (also a ConnectionError)
│   ├── LedgerNotReady         tables are missing or older than this program: run `bullpen migrate`
│   ├── UnsafeDatabaseRole     a role for which row-level security means nothing
│   ├── NotInTransaction       enqueue on a connection in autocommit mode
│   ├── RowNotFound            no row has this id, or this tenant may not see it
│   ├── RowStateConflict       the row is not in the state that the operation needs
│   └── InsufficientCredits    the tenant has fewer credits than the run costs; nothing was stored
├── RunFailed                  the run whose result was awaited failed finally or was cancelled
├── DeadLetterNotFound         the entry was redriven or discarded already, or never existed
├── DeadLetterChanged          the entry is another than the one that was edited; nothing was sent
├── DeadLetterNotEditable      the entry may go back or be discarded, but not be changed
├── DeliveryLost               a delivery is no longer ours; the event is delivered again
├── PublishFailed              the broker did not take a message
├── SourceUnavailable          the event store is unreachable, or the subscription ended (also a ConnectionError)
├── UnreadableEvent            a stored event that no reader takes
├── WrongVersion               another process appended to the stream; nothing was written
├── EventIdTaken               another event has this id; nothing was written
├── Overtaken                  another projector of the same name moved the checkpoint
├── MessageNotSent             the provider did not take a message this time
├── MissingValue               a template names a value that the recipient lacks
├── EntityNotFound             no entity has this urn; it may exist later
├── EntityChanged              another process changed the entity; nothing was stored
├── EntityBusy                 another event of the entity did not end in time
├── NoTransition               an event leads nowhere from the entity's status
├── EndlessSteps               automatic steps run in a circle; nothing was stored           (also a PermanentError)
├── EntityFailed               the event parked the entity in its failed state before        (also a PermanentError)
└── EmitsToItself              an action emits to the entity that it is called for           (also a PermanentError)

JobSignal                      raised by a handler to say what shall happen to its job
├── PermanentError             fail now, whatever attempts are left
├── DelayJob                   run again later; no attempt is counted
├── ReturnToWait               run again soon; no attempt is counted
├── RateLimited                as ReturnToWait, and take nothing for a while
└── WaitForChildren            run again when the children are done
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from datetime import timedelta
from enum import Enum
from typing import Any

from bullpen._version import install_line


class BullpenError(Exception):
    """Base of everything that bullpen raises on its own behalf."""


def word(value: object) -> str:
    """An event or a status as it is written in errors, logs, tables and diagrams."""
    return str(value.value if isinstance(value, Enum) else value)


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


class PayloadUnavailable(BullpenError):
    """A sealed payload cannot be opened here now: its key or object store is not configured or not reachable.

    Nothing is wrong with the job. A worker gives it back, with no attempt counted.
    """

    def __init__(self, what: str, reason: str, *, key_id: str | None = None) -> None:
        super().__init__(f"{what}: {reason}")
        self.key_id = key_id


class PayloadMissing(BullpenError):
    """The object store has no object for a payload. It was removed there, or another store is configured here."""

    def __init__(self, what: str, key: str) -> None:
        super().__init__(
            f"{what}: the object store has no object {key!r}; it was removed, or this process uses another store"
        )
        self.key = key


class ObjectStoreFailed(BullpenError, ConnectionError):
    """The object store did not answer, or refused."""


class MissingExtra(BullpenError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, extra: str, purpose: str) -> None:
        super().__init__(f'{purpose} needs the extra "{extra}": {install_line(extra)}')
        self.extra, self.purpose = extra, purpose


class HandlerTimeout(BullpenError, TimeoutError):
    """A handler took longer than its worker or consumer allows. Counts as a failed attempt."""

    def __init__(self, timeout_s: float, consequence: str = "") -> None:
        super().__init__(f"timed out after {timeout_s * 1000:.0f} ms{consequence}")
        self.timeout_s = timeout_s


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


class LaneFull(QueueError):
    """As many jobs of the lane wait as may. This one was not stored; of `add_many` those are that found room."""

    def __init__(self, queue: str, lane: str, job_id: str | None = None) -> None:
        super().__init__(
            f"lane {lane!r} of queue {queue!r} is full: one of its jobs must start before another can be added",
            queue=queue,
            job_id=job_id,
        )
        self.lane = lane


class QueueClosed(QueueError):
    """The queue or taker was closed before this call, or while it waited."""


class JobNotFound(QueueError):
    """No job has this id."""

    def __init__(self, queue: str, job_id: str) -> None:
        super().__init__(
            f"job {job_id!r} of queue {queue!r} does not exist; it may have been removed by its retention",
            queue=queue,
            job_id=job_id,
        )


class SchedulerNotFound(QueueError):
    """No job scheduler has this id."""

    def __init__(self, queue: str, scheduler_id: str) -> None:
        super().__init__(
            f"there is no scheduler {scheduler_id!r} in {queue!r}; "
            f"`bullpen schedules list {shlex.quote(queue)}` lists them",
            queue=queue,
        )
        self.scheduler_id = scheduler_id


class JobStateConflict(QueueError):
    """The job is not in the state that the operation needs. Nothing was changed."""


class JobLockLost(QueueError):
    """The lock ran out before the outcome was written. The outcome was dropped; another worker has the job, or it is
    gone (`is_gone`), or somebody cancelled it (`cancelled` is the reason that was given)."""

    def __init__(
        self,
        queue: str,
        job_id: str,
        held_ms: int,
        why: str | None = None,
        *,
        is_gone: bool = False,
        cancelled: str | None = None,
        is_over: bool = False,
    ) -> None:
        what = f"lock lost after {held_ms} ms, outcome not written" if why is None else f"outcome not written, {why}"
        what += "; another worker may run it again. Raise `lock`, or run blocking code with a plain `def` handler"
        if is_over:  # no lock would have helped: `why` says all
            what = f"outcome not written, {why}"
        if is_gone:
            what = "outcome not written, the job is gone: it was removed, or the queue was emptied, while it ran"
        if cancelled is not None:
            what = "outcome not written, the job was cancelled" + (f": {cancelled}" if cancelled else "")
        super().__init__(f"job {job_id!r} of queue {queue!r}: {what}", queue=queue, job_id=job_id)
        self.held_ms, self.is_gone, self.cancelled = held_ms, is_gone, cancelled


class JobFailed(QueueError):
    """The job whose result was awaited failed finally. `reason` is its failed reason."""

    def __init__(self, queue: str, job_id: str, reason: str) -> None:
        super().__init__(f"job {job_id!r} of queue {queue!r} failed: {reason}", queue=queue, job_id=job_id)
        self.reason = reason


class JobCancelled(JobFailed):
    """The job whose result was awaited was cancelled. `reason` is the reason that was given, or empty."""

    def __init__(self, queue: str, job_id: str, reason: str) -> None:
        super().__init__(queue, job_id, reason)
        self.args = (f"job {job_id!r} of queue {queue!r} was cancelled" + (f": {reason}" if reason else ""),)


class ResultTimeout(QueueError, TimeoutError):
    """The job did not finish within the time given. The job itself is untouched.

    The message says in which state it is and whether a worker is connected; `state`, `has_worker` and `is_paused` say
    the same, None where the server could not report it.
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
    """A stored job cannot be read: its data is not JSON, or a field has a shape that nobody writes."""


class LedgerError(BullpenError):
    """Something about the SQL ledger."""


class DatabaseUnavailable(LedgerError, ConnectionError):
    """The database cannot be reached or did not answer in time. What was open is rolled back."""


class LedgerNotReady(LedgerError):
    """The ledger's tables are missing, or older than this program. Run `bullpen migrate`, or what `command` says."""

    def __init__(self, message: str, *, command: str = "bullpen migrate") -> None:
        super().__init__(message)
        self.command = command


class UnsafeDatabaseRole(LedgerError):
    """Row-level security means nothing for this connection: superuser, BYPASSRLS, owner, or a table without FORCE."""


class NotInTransaction(LedgerError):
    """The connection is in autocommit mode, so the row could not be part of a transaction."""


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


class TooFewReplicas(InvalidOption):
    """Fewer replicas are connected than a level asks for, and it was never otherwise. Nothing was written."""


class TwoTransports(InvalidOption):
    """One workflow was given two transports. Each workflow has one; two workflows may differ."""

    def __init__(self, names: str) -> None:
        super().__init__("transport", "one per workflow", names)
        self.args = (f"Cannot enable both {names} simultaneously",)


class DoubtfulDefinition(InvalidOption):
    """A workflow that cannot work as it is defined, or, with `strict=True`, that may not."""

    def __init__(self, workflow: str, findings: Iterable[object]) -> None:
        self.findings = tuple(findings)
        listed = "; ".join(map(str, self.findings))
        super().__init__(f"workflow {workflow!r}", "a definition without these findings", listed)
        self.args = (f"workflow {workflow!r} is refused: {listed}",)


class DeadLetterNotFound(BullpenError):
    """No entry has this id: it was redriven or discarded already, or never existed. Nothing was changed."""

    def __init__(self, store: str, entry_id: str) -> None:
        super().__init__(
            f"dead letter {entry_id!r} is not in {store!r}; it may have been redriven or discarded already"
        )
        self.store, self.entry_id = store, entry_id


class DeadLetterChanged(BullpenError):
    """The stored payload was changed after it was read for editing. Nothing was sent; read it again."""

    def __init__(self, store: str, entry_id: str) -> None:
        super().__init__(
            f"dead letter {entry_id!r} of {store!r} was changed after it was read for editing, so nothing was "
            "sent; read it again and edit the new payload"
        )
        self.store, self.entry_id = store, entry_id


class DeadLetterNotEditable(BullpenError):
    """What this store holds may go back as it is or be discarded, but not changed. Nothing was sent."""

    def __init__(self, store: str, entry_id: str, reason: str) -> None:
        super().__init__(f"dead letter {entry_id!r} of {store!r} cannot be edited: {reason}")
        self.store, self.entry_id, self.reason = store, entry_id, reason


class DeliveryLost(BullpenError):
    """The delivery is no longer ours: its lock expired, its channel broke, its partition moved. The outcome was not
    written; the event is or will be delivered again, with the same attempt number."""

    def __init__(self, source: str, event_id: str, why: str) -> None:
        super().__init__(f"delivery of {event_id!r} from {source!r} was lost; its outcome was not written: {why}")
        self.source, self.event_id, self.why = source, event_id, why


class NotTakenNow(ServerRefused):
    """The broker did not take the event, and may take it soon: its queue is full, or elects a leader. It was not
    stored; sending it again is safe."""


class PublishFailed(BullpenError):
    """A message was not taken by the broker. The cause is chained; when the broker was away, it may have arrived."""

    def __init__(self, queue: str, reason: str) -> None:
        super().__init__(f"Failed to add job to queue {queue}: {reason}")
        self.queue, self.reason = queue, reason


class SourceUnavailable(BullpenError, ConnectionError):
    """The event store cannot be reached, or the subscription ended. Subscribe again from the last position."""


class UnreadableEvent(BullpenError):
    """A stored event that no reader takes: its data is not JSON, or its metadata lacks what every event must carry."""


class WrongVersion(BullpenError):
    """The stream is not at the expected version: another process appended. Nothing was written."""

    def __init__(self, stream: str, expected: int | None, actual: int) -> None:
        def show(version: int | None) -> str:
            return "absent" if version == -1 else f"at version {version}"

        super().__init__(
            f"stream {stream!r} is {show(actual)}, not {show(expected)}; nothing was appended. Read it again, decide "
            "again, append again"
        )
        self.stream, self.expected, self.actual = stream, expected, actual


class EventIdTaken(BullpenError):
    """An event with this id is stored already, and it is not this one. Nothing was written."""

    def __init__(self, event_id: str, stream: str) -> None:
        super().__init__(f"event id {event_id!r} is taken by stream {stream!r}; nothing was appended. Give new ids")
        self.event_id, self.stream = event_id, stream


class Overtaken(BullpenError):
    """Another projector of the same name has moved the checkpoint. Nothing was written; read it again."""


class MessageNotSent(BullpenError):
    """The provider did not take the message this time. The delivery is tried again by its policy."""

    def __init__(self, message_id: str, code: str, reason: str) -> None:
        super().__init__(f"message {message_id} was not sent ({code}): {reason}")
        self.message_id, self.code, self.reason = message_id, code, reason


class MissingValue(BullpenError):
    """A template names a value that is missing, and gives no default."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the template needs {{{name}}}, which is missing; write {{{name}|something}}")
        self.name = name


class RunFailed(BullpenError):
    """A run ended without a result: it failed finally, or was cancelled."""

    def __init__(self, run_id: str, status: str, reason: str | None) -> None:
        super().__init__(f"run {run_id} is {status}{f': {reason}' if reason else ''}")
        self.run_id, self.status, self.reason = run_id, status, reason


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


class EntityNotFound(BullpenError):
    """No entity has this urn. It may exist later: on a queue the event is tried again."""

    def __init__(self, workflow: str, urn: str) -> None:
        super().__init__(
            f"workflow {workflow!r} has no entity {urn!r}; create it before its first event, or let `create` "
            "of the definition make it with that event"
        )
        self.workflow, self.urn = workflow, urn


class EntityChanged(BullpenError):
    """Another process changed the entity after it was read, so this change was not stored. Read it and decide again."""

    def __init__(self, urn: str, *, exists: bool = False) -> None:
        """`exists`: it was to be created, and is there already."""
        told = "exists already" if exists else "was changed in the meantime by another process"
        super().__init__(f"entity {urn!r} {told}; nothing was stored")
        self.urn = urn


class EntityBusy(BullpenError):
    """Another event of this entity is being handled and did not end in time. Nothing was changed; try again."""

    def __init__(self, urn: str, waited_ms: int) -> None:
        super().__init__(f"entity {urn!r} is busy: its lock was not free within {waited_ms} ms; nothing was changed")
        self.urn, self.waited_ms = urn, waited_ms


class NoTransition(BullpenError):
    """An event that leads nowhere from the entity's status. It may do so later: on a queue it is tried again."""

    def __init__(self, event: object, status: object) -> None:
        super().__init__(f"Unable to find transition for event: {word(event)} and status: {word(status)}")
        self.event, self.status = event, status


class PayloadTampered(BullpenError, PermanentError):
    """A sealed payload is not what its producer sealed: changed, cut, sealed for another queue or purpose, or plain
    where only sealed ones are accepted. The handler does not run."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(f"{what}: {reason}")


class EndlessSteps(BullpenError, PermanentError):
    """One event caused more automatic steps than allowed: the states run in a circle. Nothing was stored."""

    def __init__(self, event: object, status: object, max_steps: int) -> None:
        super().__init__(
            f"event {word(event)} caused more than {max_steps} automatic steps and was still at {word(status)}; let a "
            "state in the circle be idle, or give its transitions conditions that end the circle"
        )
        self.event, self.status, self.max_steps = event, status, max_steps


class EntityFailed(BullpenError, PermanentError):
    """This event has parked the entity in its failed state before, and it is still there.

    Move the entity out of it first; then the event may be sent back.
    """

    def __init__(self, urn: str, reason: str) -> None:
        super().__init__(f"this event has parked entity {urn!r} in its failed state: {reason}")
        self.urn, self.reason = urn, reason


class UnknownEvent(InvalidOption, PermanentError):
    """No transition of the workflow has this event, in whatever state: a mistake of the program, not of the moment."""

    def __init__(self, workflow: str, event: object, known: Iterable[object]) -> None:
        super().__init__("event", f"an event of workflow {workflow!r}: {', '.join(map(word, known))}", word(event))
        self.event = event


class EmitsToItself(BullpenError, PermanentError):
    """An action emits to the entity that it is called for. It would wait for itself, so nothing was done.

    Use `step().follow_up(event, payload)`: it is applied after the action's own transition and stored with it.
    """

    def __init__(self, urn: str) -> None:
        super().__init__(
            f"an action of entity {urn!r} emits to the same entity, which would wait for that action to end; "
            "use step().follow_up(event, payload), which is applied after it"
        )
        self.urn = urn


def require(option: str, holds: bool, expected: str, value: Any) -> None:
    """Check a value where it enters: raise InvalidOption unless `holds`."""
    if not holds:
        raise InvalidOption(option, expected, value)
