"""What a worker tells: log lines, callbacks of the program, and telemetry.

In: an event's name and details. Out: its log line, and every callback called; what one raises is logged and harms no
job. Elsewhere: the lines about jobs (`bullpen.queue.job_logs`).
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Literal, TypeVar, get_args

from bullpen._kernel import json, telemetry
from bullpen._kernel.logs import get_logger
from bullpen._kernel.outcome import Completed, Delayed, Failed, Outcome, Retry, Waiting, WaitingChildren
from bullpen.errors import InvalidOption, JobLockLost
from bullpen.queue.job import Job
from bullpen.queue.job_logs import JobLogs
from bullpen.wire.records import JobRecord

logger = get_logger("bullpen.worker")

JobEvent = Literal[
    "active", "progress", "completed", "failed", "retrying", "stalled", "suspect", "lock_lost", "returned"
]
OwnEvent = Literal["ready", "paused", "resumed", "drained", "locks_renewed", "closing", "closed", "error"]
WorkerEvent = JobEvent | OwnEvent
_OWN: Final[frozenset[str]] = frozenset(get_args(OwnEvent))
_EVENTS: Final[frozenset[str]] = _OWN.union(get_args(JobEvent))
Callback = TypeVar("Callback", bound=Callable[..., Any])

_RAISED: Final = (Exception, asyncio.CancelledError, SystemExit)
"""What a callback may raise and the worker goes on: none of it is meant for the task that called."""
_PLACES: Final[dict[type[Outcome], str]] = {
    Delayed: "delayed",
    Waiting: "waiting",
    WaitingChildren: "waiting-children",
}


class Reports:
    """The listeners of one worker."""

    def __init__(self, queue: str, worker: str) -> None:
        self._queue, self._worker = queue, worker
        self._logs = JobLogs(queue)
        self._callbacks: dict[str, list[tuple[Callable[..., Any], bool]]] = {}
        """By event; True: for the next time only."""
        self.wants_drained = False
        self._pending: set[asyncio.Future[Any]] = set()
        self.open_result: Callable[[Any], Any] | None = None
        """Of a worker with a codec: callbacks get what the handler returned."""

    def on(self, event: str, callback: Callback, *, once: bool = False) -> Callback:
        self._check(event)
        self._callbacks.setdefault(event, []).append((callback, once))
        self.wants_drained = "drained" in self._callbacks
        return callback

    def off(self, event: str, callback: Callable[..., Any]) -> bool:
        self._check(event)
        listed = self._callbacks.get(event, [])
        left = [one for one in listed if one[0] != callback]
        if left:
            self._callbacks[event] = left
        else:
            self._callbacks.pop(event, None)  # nobody listens: the hot path tells nothing
        self.wants_drained = "drained" in self._callbacks
        return len(left) < len(listed)

    @staticmethod
    def _check(event: str) -> None:
        if event not in _EVENTS:
            raise InvalidOption("event", f"one of {', '.join(sorted(_EVENTS))}", event)

    def are_wanted(self, event: WorkerEvent) -> bool:
        """False when nobody listens to this: the hot path then tells nothing."""
        return event in self._callbacks or telemetry.is_enabled() or logger.isEnabledFor(logging.DEBUG)

    def tell_active(self, job: Job) -> None:
        self._logs.started(job)
        self.tell("active", job)

    def tell_completed(self, job: Job, outcome: Completed, now_ms: int) -> None:
        self._logs.ended(job, "completed")
        if self.open_result is not None:
            outcome = Completed(json.encode_checked(self.open_result(json.decode(outcome.value_json))))
        _show_end(job, outcome, now_ms)
        # Telemetry wants no values; they are made ready for callbacks only.
        value = json.decode(outcome.value_json) if "completed" in self._callbacks else None
        self.tell("completed", job, value)

    def tell_outcome(self, job: Job, outcome: Outcome, now_ms: int) -> None:
        """Any other than completed, once it is stored."""
        match outcome:
            case Failed(reason):
                self._logs.failed(job, outcome)
                if self.are_wanted("failed"):
                    _show_end(job, outcome, now_ms)
                    self.tell("failed", job, reason)
            case Retry(reason, _, delay_ms):
                self._logs.retrying(job, outcome)
                if self.are_wanted("retrying"):
                    _show_end(job, outcome, now_ms)
                    self.tell("retrying", job, reason, delay_ms)
            case _:
                self._logs.ended(job, "was returned to its queue")
                self.tell("returned", job, returned_to=_PLACES.get(type(outcome)))

    def tell_lock_lost(self, job: Job, error: JobLockLost) -> None:
        self._logs.lock_lost(job, error)
        self.tell("lock_lost", job, error)

    def tell_stalled(self, job_id: str, name: str) -> None:
        self._logs.stalled(job_id, name)
        self.tell("stalled", job_id)

    def tell_suspect(self, job: Job) -> None:
        self._logs.suspect(job)
        self.tell("suspect", job)

    def tell_dropped(self, dropped: Sequence[tuple[str, str]]) -> None:
        """Ids that stood in line and have no job, each with what its key is."""
        self._logs.dropped(dropped)

    def forget(self, job: Job) -> None:
        """Its outcome was refused, which was told as an error."""
        self._logs.ended(job, "ended without an outcome")

    def tell(self, event: WorkerEvent, *details: Any, returned_to: str | None = None) -> None:
        """`returned_to`: a state, for telemetry alone."""
        if telemetry.is_enabled():
            subject = details[0] if details else None
            telemetry.emit(
                f"worker.{event}" if event in _OWN else f"job.{event}",
                queue=self._queue,
                worker=self._worker,
                job_id=subject.id if isinstance(subject, Job) else subject if isinstance(subject, str) else None,
                details=details,
                **({} if returned_to is None else {"returned_to": returned_to}),
            )
        for callback, is_once in tuple(self._callbacks.get(event, ())):
            if is_once:
                self.off(event, callback)
            try:
                result = callback(*details)
                if result is not None and inspect.isawaitable(result):
                    task = asyncio.ensure_future(_awaited(result))
                    self._pending.add(task)
                    task.add_done_callback(self._done)
            except _RAISED:
                logger.exception("callback for %r of queue %r failed", event, self._queue)

    def tell_error(self, error: BaseException) -> None:
        logger.error("queue %r: %s", self._queue, error)
        self.tell("error", error)

    async def drain(self, timeout_s: float) -> None:
        """Let async callbacks end."""
        if self._pending:
            await asyncio.wait(self._pending, timeout=timeout_s)

    def _done(self, task: asyncio.Future[Any]) -> None:
        self._pending.discard(task)
        if not task.cancelled() and (error := task.exception() or task.result()) is not None:
            logger.error("callback of queue %r failed", self._queue, exc_info=error)


async def _awaited(result: Awaitable[Any]) -> BaseException | None:
    """What it raised: a task that raises SystemExit ends the whole loop."""
    try:
        await result
    except SystemExit as error:
        return error
    return None


def _show_end(job: Job, outcome: Completed | Failed | Retry, now_ms: int) -> None:
    """Let whoever is told of an attempt's end see what the server has stored about it."""
    record = job.record
    stored: dict[bytes, bytes | None] = dict(record.fields())
    stored[b"atm"] = stored[b"attemptsMade"] = b"%d" % (record.attempts_made + 1)
    if isinstance(outcome, Completed):
        stored[b"returnvalue"] = outcome.value_json
    else:
        stacks = [*record.stacktrace, outcome.stack]
        kept = len(stacks) if job.opts.stack_trace_limit is None else min(job.opts.stack_trace_limit, len(stacks))
        stored[b"failedReason"] = outcome.reason.encode("utf-8", "replace")
        stored[b"stacktrace"] = json.encode(stacks[len(stacks) - kept :])
    if not isinstance(outcome, Retry):
        stored[b"finishedOn"] = b"%d" % now_ms
    job.record = JobRecord(job.id, stored)
