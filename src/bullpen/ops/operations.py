"""Bulk actions as durable work: stored as jobs of a queue of their own, rate-limited, resumable, cancellable.

In: the action, its objects as selected at the confirmation, and the actor. Out: jobs whose progress shows how
far it is. When a process dies, its operation stays queued: the next process continues with the rest. Only what fitted
at the moment of confirmation is touched, so a job that fails again is not sent twice. Elsewhere: single actions
(`actions`), the dead letters of everything (`dead_letters`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

from bullpen._kernel.logs import get_logger
from bullpen._kernel.scrub import scrub
from bullpen.errors import BullpenError, DeadLetterNotFound, InvalidOption, PermanentError
from bullpen.ops.actions import Actions, Actor
from bullpen.ops.dead_letters import DeadLetterConsole
from bullpen.ops.status import counted
from bullpen.ops.views.queues import OPERATIONS
from bullpen.ports.dead_letters import DeadLetterFilter
from bullpen.queue import Job, JobState, Queue
from bullpen.queue.heads import HeadFilter
from bullpen.redis import Connection
from bullpen.worker import Worker

if TYPE_CHECKING:  # needs an extra
    from bullpen.ledger import Ledger

__all__ = ["UNKNOWN_OUTCOME", "Operation", "OperationView", "Operations"]

logger = get_logger("bullpen.operations")

_MOST_FAILURES: Final = 20
_REPORT_EVERY_S: Final = 0.5
_MOST_IDS: Final = 1_000
_MOST_CHOSEN: Final = 100_000
"""Jobs that one operation with a filter acts on."""
_MOST_WALKED: Final = 100_000_000
_WALKED_PER_STEP: Final = 5_000
_VERBS: Final = {"retry": "Retry", "promote": "Run now", "remove": "Remove", "pause": "Pause", "resume": "Resume"}
_LABELS: Final = {"waiting": "ready", "waiting-children": "blocked", "completed": "done"}
_OF_ROWS: Final = {
    "confirm": "Mark as delivered: unknown outcomes of",
    "resend": "Send again: unknown outcomes of",
    "replay": "Replay",
}
UNKNOWN_OUTCOME: Final = "UNKNOWN_OUTCOME"
"""The error code of dead rows of which nobody knows whether they were delivered."""
_ROWS_PER_STEP: Final = 100
_KEEP: Final = 1_000
_LOOK_EVERY_S: Final = 30.0
"""How soon another process continues an operation whose process died."""


class Operation(msgspec.Struct, rename="camel", frozen=True, kw_only=True, omit_defaults=True):
    """What was asked for, as it is stored."""

    kind: str
    """`jobs`, `matching`, `queues`, `redrive`, `discard`; of rows of the outbox `confirm`, `resend` or `replay`."""
    by: str
    via: str = "dashboard"
    role: str = ""
    reason: str = ""
    queue: str = ""
    verb: str = ""
    """With `jobs`, `matching` and `queues`: the action on each."""
    ids: list[str] = []
    """Jobs, queues or entries that were chosen one by one."""
    state: str = ""
    """With `matching`: of the jobs."""
    text: str = ""
    """With `matching`: in their id, data or error."""
    attempts: int = 0
    """With `matching`: at least this many attempts."""
    since: str = ""
    """Only what was added, or ended, then or later; ISO 8601."""
    store: str = ""
    """Of dead letters; of rows of the outbox their destination."""
    name: str = ""
    error: str = ""
    fingerprint: str = ""
    tenant: str = ""
    """Only dead letters of this one."""
    label: str = ""
    """What people call the cause or the filter."""
    until: str = ""
    """Only what was there before; ISO 8601."""
    total: int = 0
    """How many fitted when it was confirmed."""
    most: int = 0
    rate: float = 0.0
    """Limit per second; 0: no limit."""
    stop: bool = False
    """Its end was requested."""

    @property
    def is_filtered(self) -> bool:
        return bool(self.name or self.text or self.attempts or self.since)

    @property
    def title(self) -> str:
        verb = _VERBS.get(self.verb, self.verb)
        match self.kind:
            case "jobs":
                return f"{verb} {counted(len(self.ids), 'job')} of {self.queue}"
            case "matching":
                state = _LABELS.get(self.state, self.state)
                return f"{verb} {'matching' if self.label else 'all'} {state} jobs of {self.queue}"
            case "queues":
                return f"{verb} {counted(len(self.ids), 'queue')}"
            case "confirm" | "resend" | "replay":
                return f"{_OF_ROWS[self.kind]} {self.store or 'all destinations'}"
        what = f": {self.label}" if self.label else " of one cause" if self.fingerprint else ""
        return f"{self.kind.capitalize()} dead letters of {self.store or 'all stores'}{what}"

    @property
    def about(self) -> str:
        """What is done to what, in a sentence."""
        match self.kind:
            case "jobs":
                return f"{counted(len(self.ids), 'job')} that were chosen one by one"
            case "matching":
                return self.label or f"all that were {_LABELS.get(self.state, self.state)} when it was confirmed"
            case "queues":
                return ", ".join(self.ids[:10]) + (f" and {len(self.ids) - 10} more" if len(self.ids) > 10 else "")
            case "replay":
                period = " ".join(part for part in (self.since and f"from {self.since}", f"to {self.until}") if part)
                return f"what was sent {period}, under the name {self.label}"
            case "confirm" | "resend":
                return "dead rows whose outcome is unknown, as they were when it was confirmed"
        what = self.label or (f"of the cause {self.fingerprint}" if self.fingerprint else "all")
        return f"dead letters {what}, as they were when it was confirmed"

    @property
    def link(self) -> tuple[str, ...]:
        """The page of what it is done to, as parts of an address."""
        if self.kind in _OF_ROWS and self.store:
            return "destinations", self.store
        return ("queues", self.queue) if self.queue else ()


class OperationView(msgspec.Struct, rename="camel", frozen=True):
    """An operation and how far it is."""

    id: str
    title: str
    state: str
    """`waiting`, `active`, `completed`, `failed` or `stopped`."""
    by: str
    reason: str
    created_ms: int
    finished_ms: int
    total: int
    done: int
    skipped: int
    failed: dict[str, str]
    error: str = ""
    about: str = ""
    """What is done to what."""
    link: tuple[str, ...] = ()
    """The page of that, as parts of an address."""
    rate: float = 0.0
    """Limit per second; 0: no limit."""

    @property
    def is_open(self) -> bool:
        return self.state in ("waiting", "active", "delayed")


class Operations:
    """Stores operations, and runs them while there are any.

    A process that has called `start` also goes on with what another one left: it looks when it starts, and every half
    minute. Nothing else wakes it but a new operation.
    """

    def __init__(
        self,
        connection: Connection,
        prefix: str,
        make_actions: Callable[[Actor], Awaitable[Actions]],
        make_console: Callable[[], Awaitable[DeadLetterConsole]],
        changed: Callable[[], None] = lambda: None,
        *,
        ledger: Callable[[], Awaitable[Ledger | None]] | None = None,
    ) -> None:
        """`ledger` is asked for by operations on rows of the outbox."""
        self._ledger = ledger
        self._connection, self._prefix = connection, prefix
        self._make_actions, self._make_console, self._changed = make_actions, make_console, changed
        self._queue = Queue(OPERATIONS, connection=connection, prefix=prefix)
        self._watching: asyncio.Task[None] | None = None
        self._running: asyncio.Task[None] | None = None
        self._worker: Worker | None = None
        self._is_closed = False

    async def submit(self, operation: Operation, *, key: str = "") -> str:
        """Store it and begin. With a `key`, submitting it again changes nothing and returns the same id."""
        if len(operation.ids) > _MOST_IDS:
            raise InvalidOption("ids", f"at most {_MOST_IDS}", len(operation.ids))
        actions = await self._make_actions(Actor(operation.by, operation.via, operation.role))
        detail = {name: value for name, value in msgspec.to_builtins(operation).items() if name not in ("ids", "by")}
        await actions.note("operation.start", operation.queue or operation.store or OPERATIONS, "", detail)
        job = await self._queue.add(
            operation.kind,
            msgspec.to_builtins(operation),
            attempts=3,
            remove_on_complete=_KEEP,
            remove_on_fail=_KEEP,
            job_id=key or None,
        )
        self.wake()
        return job.id

    def start(self) -> None:
        """From now on this process runs the stored operations of all processes. Safe to call twice."""
        if self._watching is None and not self._is_closed:
            self._watching = asyncio.create_task(self._watch(), name="bullpen operations watch")

    async def _watch(self) -> None:
        is_away = False
        while True:
            try:
                if await self._is_any_open():
                    self.wake()
                is_away = False
            except (BullpenError, OSError) as error:
                if not is_away:
                    logger.warning("operations cannot be read now: %s", error)
                is_away = True
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _is_any_open(self) -> bool:
        counts = await self._queue.counts()
        return bool(counts.waiting or counts.active or counts.delayed)

    def wake(self) -> None:
        if not self._is_closed and (self._running is None or self._running.done()):
            self._running = asyncio.create_task(self._run(), name="bullpen operations")

    async def stop(self, operation_id: str, *, by: Actor) -> None:
        """Let it end before its next object. What was done stays done."""
        found = await self._queue.get_job(operation_id)
        if found is None:
            raise InvalidOption("operation", "the id of one that is kept", operation_id)
        await (await self._make_actions(by)).note("operation.stop", OPERATIONS, operation_id, by.note())
        await found.update_data({**found.data, "stop": True})

    async def list(self, *, count: int = 50) -> list[OperationView]:
        """The newest first."""
        states = (JobState.ACTIVE, JobState.WAITING, JobState.DELAYED, JobState.COMPLETED, JobState.FAILED)
        found = [
            _view(job, state)
            for state in states
            for job in await self._queue.jobs(state, count=count, newest_first=True)
        ]
        return sorted(found, key=lambda each: -each.created_ms)[:count]

    async def get(self, operation_id: str) -> OperationView | None:
        found = await self._queue.get_job(operation_id)
        if found is None:
            return None
        state = await found.state()
        if state in (JobState.COMPLETED, JobState.FAILED):
            # It may have ended between the two reads: what it says of itself must not be older than its end.
            found = await self._queue.get_job(operation_id) or found
        return _view(found, state)

    async def aclose(self) -> None:
        self._is_closed = True
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        if self._worker is not None:
            await self._worker.close(0)
        if self._running is not None:
            await asyncio.wait([self._running])
        await self._queue.close()

    async def _run(self) -> None:
        """One worker, until nothing is left."""
        self._worker = Worker(
            OPERATIONS, self._perform, connection=self._connection, prefix=self._prefix, concurrency=1, name="dashboard"
        )
        running = asyncio.create_task(self._worker.run(signals=False))
        try:
            while not running.done() and not self._is_closed:
                await asyncio.wait([running], timeout=1.0)
                if not await self._is_any_open():
                    break
        except BullpenError as error:
            logger.warning("operations: %s", error)
        await self._worker.close()
        await asyncio.wait([running])
        if not running.cancelled() and (failure := running.exception()) is not None:
            logger.warning("operations: %s", failure)

    async def _perform(self, job: Job) -> dict[str, Any]:
        try:
            operation = msgspec.convert(job.data, Operation)
        except msgspec.ValidationError as error:
            raise PermanentError(f"not an operation of bullpen: {error}") from None
        pace = _OperationProgress(self._queue, job, operation, self._changed)
        match operation.kind:
            case "jobs":
                await self._jobs(operation, operation.ids[pace.passed :], pace)
            case "matching" if operation.verb == "retry" and not operation.is_filtered:
                await self._retry_all(operation, pace)
            case "matching":
                await self._matching(operation, pace)
            case "queues":
                await self._queues(operation, pace)
            case "redrive" | "discard":
                await self._letters(operation, pace)
            case "confirm" | "resend" | "replay":
                await self._rows(operation, pace)
            case _:
                raise PermanentError(f"no such operation: {operation.kind}")
        await pace.report(last=True)
        return pace.state()

    async def _jobs(self, operation: Operation, ids: Iterable[str], pace: _OperationProgress) -> None:
        actions = await self._make_actions(_actor(operation))
        extra: dict[str, Any] = {"reset": True} if operation.verb == "retry" else {}
        for job_id in ids:
            if not await pace.next():
                return
            try:
                await actions.do(f"job.{operation.verb}", operation.queue, job_id, reason=operation.reason, **extra)
                pace.done += 1
            except BullpenError as error:
                pace.note_failure(job_id, error)

    async def _matching(self, operation: Operation, pace: _OperationProgress) -> None:
        """All that fit, up to a bound, before the first is touched: what comes back later must not be met again. A
        process that goes on with it looks anew; what was done no longer fits."""
        state, most = JobState(operation.state), (operation.most or operation.total) - pace.done
        by_place = state in (JobState.COMPLETED, JobState.FAILED)
        since, until = _ms(operation.since), _ms(operation.until)
        wanted = HeadFilter(
            name=operation.name,
            text=operation.text,
            attempts=operation.attempts or None,
            since_ms=None if by_place else since,
            until_ms=None if by_place else until,
        )
        async with Queue(operation.queue, connection=self._connection, prefix=self._prefix) as queue:
            first = await queue.position_at(state, until, newest_first=True) if by_place and until else 0
            last = await queue.position_at(state, since, newest_first=True) if by_place and since else _MOST_WALKED
            chosen, position = list[str](), first
            while len(chosen) < most and position < last:
                found = await queue.find(
                    state,
                    wanted,
                    start=position,
                    count=min(_MOST_CHOSEN, most) - len(chosen),
                    most=min(_WALKED_PER_STEP, last - position),
                    newest_first=by_place,
                )
                chosen += found.ids
                position += found.looked_at
                if found.is_end or len(chosen) >= _MOST_CHOSEN or not await pace.next(0):
                    break
        await self._jobs(operation, dict.fromkeys(chosen), pace)  # one may be met twice while others fail

    async def _queues(self, operation: Operation, pace: _OperationProgress) -> None:
        actions = await self._make_actions(_actor(operation))
        for name in operation.ids[pace.passed :]:
            if not await pace.next():
                return
            try:
                await actions.do(f"queue.{operation.verb}", name, reason=operation.reason, group=True)
                pace.done += 1
            except BullpenError as error:
                pace.note_failure(name, error)

    async def _retry_all(self, operation: Operation, pace: _OperationProgress) -> None:
        async with Queue(operation.queue, connection=self._connection, prefix=self._prefix) as queue:
            until, left = datetime.fromisoformat(operation.until), (operation.most or operation.total) - pace.done
            step = max(1, min(100, int(operation.rate))) if operation.rate else 500
            while left > 0 and await pace.next(0):
                retried = await queue.retry_all(count=min(step, left), until=until, reset_attempts=True)
                pace.done += retried
                left -= retried
                if not retried:
                    return
                await pace.report()
                if operation.rate and left > 0:
                    await asyncio.sleep(retried / operation.rate)

    async def _letters(self, operation: Operation, pace: _OperationProgress) -> None:
        console = await self._make_console()
        where = DeadLetterFilter(
            name=operation.name or None,
            error=operation.error or None,
            fingerprint=operation.fingerprint or None,
            tenant_id=operation.tenant or None,
            failed_before=datetime.fromisoformat(operation.until) if operation.until else None,
        )
        most = (operation.most or operation.total or len(operation.ids)) - pace.done
        # Chosen before the first is touched: what fails again must not be met again. A process that goes on with it
        # looks anew; what was done no longer fits.
        chosen = [(operation.store, each) for each in operation.ids[pace.passed :]]
        if not operation.ids:
            found = [(each.store, each.letter.id) async for each in console.find(where, store=operation.store or None)]
            chosen = found[::-1][:most]
        for store, entry_id in chosen:
            if not await pace.next():
                return
            try:
                if operation.tenant and (await console.get(store, entry_id)).letter.tenant_id != operation.tenant:
                    raise DeadLetterNotFound(store, entry_id)
                if operation.kind == "redrive":
                    await console.redrive(store, entry_id, by=operation.by, is_noted=True)
                else:
                    await console.discard(store, entry_id, by=operation.by, is_noted=True)
                pace.done += 1
            except DeadLetterNotFound:
                pace.skipped += 1
            except BullpenError as error:
                pace.note_failure(entry_id, error)

    async def _rows(self, operation: Operation, pace: _OperationProgress) -> None:
        """Rows of the outbox, by pages. A process that goes on with it begins anew: what was decided no longer fits,
        and what was replayed under this name is not replayed again."""
        from bullpen.ledger import OutboxStatus

        ledger = None if self._ledger is None else await self._ledger()
        if ledger is None:
            raise PermanentError("this process has no ledger; the operation needs one that has")
        is_replay, outbox, tenant = operation.kind == "replay", ledger.outbox, operation.tenant or None
        left, after = (operation.most or operation.total) - pace.done, None
        per_page = max(1, min(_ROWS_PER_STEP, int(operation.rate))) if operation.rate else _ROWS_PER_STEP
        while left > 0:
            found = await outbox.find(
                status=OutboxStatus.SENT if is_replay else OutboxStatus.DEAD,
                error_code=None if is_replay else UNKNOWN_OUTCOME,
                integration_type=operation.store or None,
                tenant_id=tenant,
                since=_instant(operation.since),
                before=_instant(operation.until),
                after_seq=after,
                limit=min(per_page, left),
            )
            if not found or not await pace.next(len(found)):
                return
            after = found[-1].seq
            ids = [row.id for row in found if not is_replay or "replayOf" not in row.headers]
            if is_replay:
                new_key = operation.verb == "new-key"
                done = await outbox.replay(
                    ids, by=operation.by, label=operation.label, new_key=new_key, tenant_id=tenant
                )
            elif operation.kind == "confirm":
                done = await outbox.confirm(ids, by=operation.by, tenant_id=tenant)
            else:
                done = await outbox.redrive(ids, by=operation.by, tenant_id=tenant)
            pace.done += len(done)
            pace.skipped += len(found) - len(done)
            left -= len(done)


class _OperationProgress:
    """How far an operation is, how fast it may go, and whether it shall end."""

    def __init__(self, queue: Queue, job: Job, operation: Operation, changed: Callable[[], None]) -> None:
        self._queue, self._job, self._operation, self._changed = queue, job, operation, changed
        before = job.record.progress if isinstance(job.record.progress, dict) else {}
        self.done = int(before.get("done", 0))
        self.skipped = int(before.get("skipped", 0))
        self.failed: dict[str, str] = dict(before.get("failed", {}))
        self.stopped = False
        self._reported_at = 0.0
        self._next_at = time.monotonic()

    @property
    def passed(self) -> int:
        return self.done + self.skipped + len(self.failed)

    def note_failure(self, subject: str, error: BullpenError) -> None:
        if len(self.failed) < _MOST_FAILURES:
            self.failed[subject] = scrub(str(error))[:300]
        else:
            self.skipped += 1

    async def next(self, weight: int = 1) -> bool:
        """Wait for the next turn. False: its end was requested."""
        await self.report()
        if self.stopped:
            return False
        if self._operation.rate and weight:
            await asyncio.sleep(max(0.0, self._next_at - time.monotonic()))
            self._next_at = max(self._next_at, time.monotonic()) + weight / self._operation.rate
        return True

    async def report(self, *, last: bool = False) -> None:
        if not last and time.monotonic() - self._reported_at < _REPORT_EVERY_S:
            return
        self._reported_at = time.monotonic()
        stored = await self._queue.get_job(self._job.id)
        self.stopped = self.stopped or (stored is not None and bool(stored.data.get("stop")))
        await self._job.progress(self.state())
        self._changed()

    def state(self) -> dict[str, Any]:
        return {"done": self.done, "skipped": self.skipped, "failed": self.failed, "stopped": self.stopped}


def _ms(text: str) -> int | None:
    return int(datetime.fromisoformat(text).timestamp() * 1000) if text else None


def _instant(text: str) -> datetime | None:
    return datetime.fromisoformat(text) if text else None


def _actor(operation: Operation) -> Actor:
    return Actor(operation.by, operation.via, operation.role)


def _view(job: Job, state: JobState) -> OperationView:
    try:
        operation = msgspec.convert(job.data, Operation)
    except msgspec.ValidationError:
        operation = Operation(kind=job.name, by="unknown")
    progress = job.record.progress if isinstance(job.record.progress, dict) else {}
    shown = "stopped" if state is JobState.COMPLETED and progress.get("stopped") else state.value
    return OperationView(
        id=job.id,
        title=operation.title,
        state=shown,
        by=operation.by,
        reason=operation.reason,
        created_ms=job.timestamp,
        finished_ms=job.finished_on,
        total=operation.total,
        done=int(progress.get("done", 0)),
        skipped=int(progress.get("skipped", 0)),
        failed=dict(progress.get("failed", {})),
        error=scrub(job.failed_reason or ""),
        about=operation.about,
        link=operation.link,
        rate=operation.rate,
    )
