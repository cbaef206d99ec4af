"""One job, as producers, handlers and readers see it.

In: a stored record and a `JobActions` that can reach its queue. Out: values to read, and the few things one may do
to one job: report progress, log, change its data, wait for its result. Elsewhere: adding jobs (`queue`), running
them (`worker`), what the fields mean (`bullpen.wire.records`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Protocol, TypeVar

from bullpen._kernel import json, tracing
from bullpen._kernel.duration import check_int
from bullpen._kernel.tuples import maker
from bullpen.errors import BullpenError
from bullpen.queue.arguments import NewJobArguments
from bullpen.queue.cancel import Cancelled
from bullpen.queue.children import PARTS, ChildrenCounts
from bullpen.queue.states import JobState
from bullpen.wire.links import JobKey
from bullpen.wire.options import DEFAULT_KEEP_LOGS, JobMeta, WireOptions
from bullpen.wire.records import JobRecord, check_log_line, check_progress

if TYPE_CHECKING:
    # A default lets `Job` stand for `Job[Any]` under strict checkers. Python has it from 3.13 on; every checker brings
    # the stub of typing_extensions, and at run time nobody asks for it.
    import typing_extensions

    from bullpen.queue.blocking_faces import Job as BlockingJob
    from bullpen.queue.changes import JobChanges

    DataT_co = typing_extensions.TypeVar("DataT_co", covariant=True, default=Any)
else:
    DataT_co = TypeVar("DataT_co", covariant=True)


__all__ = [
    "Added",
    "BlockedBy",
    "DataT_co",
    "Handler",
    "Job",
    "JobActions",
    "Mark",
    "NewJob",
    "Progress",
    "RunCoroutine",
    "new_mark",
]


class Added(StrEnum):
    """What `add` did."""

    CREATED = "created"
    DUPLICATE = "duplicate"
    """A job with this id exists: it was left as it is, and the returned job shows the stored one."""
    DEDUPLICATED = "deduplicated"
    """Another job owns the deduplication id."""


class BlockedBy:
    """The job that was there first, and where it is.

    With more than ten thousand waiting jobs, or many such ids in one call, "waiting" is concluded: it is in no other
    state.
    """

    __slots__ = ("job_id", "state")

    def __init__(self, job_id: str, state: JobState) -> None:
        self.job_id, self.state = job_id, state

    def __repr__(self) -> str:
        return f"BlockedBy(job_id={self.job_id!r}, state={self.state.value!r})"


def _no_options() -> NewJobArguments:
    return {}


@dataclass(frozen=True, slots=True)
class NewJob:
    """One job for `add_many`. `options` are those of `add`, except its durability."""

    name: str
    data: Any = None
    options: NewJobArguments = field(default_factory=_no_options)


class Mark(NamedTuple):
    """Where a queue's events stood when a job was added: its end can only come later."""

    heard: int
    """How many finished jobs the listener had heard of just before."""
    event: bytes
    """Id of an event that cannot be the job's end, which comes behind it; empty when none is known."""


new_mark = maker(Mark)


class JobActions(Protocol):
    """What a job needs of its queue."""

    @property
    def name(self) -> str: ...
    @property
    def queue_key(self) -> str: ...
    async def update_progress(self, job_id: str, progress: bytes) -> None: ...
    async def add_log(self, job_id: str, line: str, keep: int) -> int: ...
    async def update_data(self, job_id: str, data: bytes) -> None: ...
    async def state_of(self, job_id: str) -> JobState: ...
    async def wait_result(self, job_id: str, timeout: int | timedelta | None, mark: Mark | None = None) -> Any: ...
    async def read_logs(
        self, job_id: str, start: int = 0, count: int | None = None, *, newest_first: bool = False
    ) -> list[str]: ...
    async def clear_logs(self, job_id: str, keep: int) -> None: ...
    async def remove_unprocessed_children(self, job_id: str) -> int: ...
    async def remove_deduplication(self, job_id: str, deduplication_id: str) -> bool: ...
    async def count_children(self, job_id: str) -> ChildrenCounts: ...
    async def read_children(self, job_id: str, kind: str) -> list[bytes]: ...
    async def leave_parent(self, job_id: str) -> bool: ...
    async def cancel(self, job_id: str, reason: str | None) -> Cancelled: ...
    @property
    def changes(self) -> JobChanges:
        """What changes jobs of the queue."""


Progress = int | float | bool | str | dict[str, Any] | list[Any]
"""A number from 0 to 100, text, a boolean, a list, or any JSON object."""
RunCoroutine = Callable[[Coroutine[Any, Any, Any]], Any]
"""Waits for a coroutine, from where nothing can be awaited, and returns what it returned."""

_UNSET: Final = {
    "added": Added.CREATED,
    "blocked_by": None,
    "cancelled": False,
    "durability": "memory",
    "mark": None,
    "traced_in": None,
    "_cancel_reason": None,
    "_run": None,
}


class Job(Generic[DataT_co]):
    """A job at the moment it was read, added or taken.

    `Job[Order]` gives type checkers the type of `job.data`: a `TypedDict`, `list[int]`, whatever JSON makes of what was
    added. Nothing is converted or checked by it; a task does both. `Job` alone is `Job[Any]`.

    Inside a handler `attempts_made` counts earlier attempts: it is 0 in the first one.
    """

    __slots__ = (
        "_actions",
        "_cancel_reason",
        "_run",
        "added",
        "blocked_by",
        "cancelled",
        "durability",
        "id",
        "is_ordinary",
        "mark",
        "record",
        "token",
        "traced_in",
    )

    id: str
    """Not a property: a worker reads it five times per job."""
    record: JobRecord
    """The stored fields, most of them also properties of this object."""
    token: str
    """Lock token while a worker holds the job; internal and never part of `to_json`."""
    cancelled: bool
    """True once the run is pointless: the job was cancelled, its time is over or its lock is lost. Handlers in
    threads should check it."""
    added: Added
    blocked_by: BlockedBy | None
    durability: str
    """The level that was confirmed when `add` returned the job."""
    is_ordinary: bool
    """Of a job that a worker took: it never stalled, no failure waits for it, no scheduler made it, and it has no ttl.
    Seen once, where its fields are at hand, because nearly all jobs are."""
    mark: Mark | None
    """Of a job that was added here while results were listened to."""
    traced_in: str | None
    """Id of the trace of its last run here: the producer's, or a new one."""
    _cancel_reason: str | None
    _run: RunCoroutine | None

    def __init__(self, actions: JobActions, record: JobRecord, *, token: str = "") -> None:
        self._actions = actions
        self.id = record.id
        self.record = record
        self.token = token

    if not TYPE_CHECKING:  # else every misspelt attribute would pass for one of these

        def __getattr__(self, attribute: str) -> Any:
            """What was not set: nearly no job differs from this, and setting it took half of making a job."""
            try:
                return _UNSET[attribute]
            except KeyError:
                raise AttributeError(f"'Job' object has no attribute {attribute!r}") from None

    def __repr__(self) -> str:
        return f"Job(queue={self._actions.name!r}, id={self.id!r}, name={self.name!r})"

    @property
    def queue_name(self) -> str:
        return self._actions.name

    @property
    def key(self) -> JobKey:
        """Its key, for `parent=`. `str(job.key)` is the job's key in `children_values()` of its parent."""
        return JobKey(self.id, self._actions.queue_key)

    @property
    def actions(self) -> JobActions:
        """What reaches this job's queue; for code that hands the job to another process."""
        return self._actions

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def is_sealed(self) -> bool:
        """Whether a codec sealed the stored payload. Handlers, `queue.add` and `queue.get_job` show it opened; jobs of
        lists show the envelope until `queue.open(job)`."""
        return self.record.is_sealed

    @property
    def data(self) -> DataT_co:
        """The payload. Raises NotJson if a foreign producer stored something else."""
        return self.record.data  # type: ignore[no-any-return]  # what the caller says it is; a name more costs time

    @property
    def opts(self) -> WireOptions:
        return self.record.opts

    @property
    def meta(self) -> JobMeta:
        """Ids and headers that travel beside the data: for a job of the outbox, those of its message."""
        return self.record.opts.meta

    @property
    def timestamp(self) -> int:
        """Creation time, Unix ms."""
        return self.record.timestamp

    @property
    def delay(self) -> int:
        return self.record.delay

    @property
    def priority(self) -> int:
        return self.record.priority

    @property
    def attempts_made(self) -> int:
        return self.record.attempts_made

    @property
    def attempts_started(self) -> int:
        return self.record.attempts_started

    @property
    def stalled_count(self) -> int:
        return self.record.stalled_count

    @property
    def processed_on(self) -> int:
        return self.record.processed_on

    @property
    def finished_on(self) -> int:
        return self.record.finished_on

    @property
    def worker_id(self) -> str | None:
        return self.record.worker_id

    @property
    def return_value(self) -> Any:
        return self.record.return_value

    @property
    def failed_reason(self) -> str | None:
        return self.record.failed_reason

    @property
    def cancel_reason(self) -> str | None:
        """The reason given when the job was cancelled, empty without one; None when it was not cancelled."""
        return self.record.cancel_reason if self._cancel_reason is None else self._cancel_reason

    def note_cancelled(self, reason: str) -> None:
        """Called by the worker that runs it, when it hears of that."""
        self.cancelled, self._cancel_reason = True, reason

    @property
    def stacktrace(self) -> tuple[str, ...]:
        return self.record.stacktrace

    @property
    def parent(self) -> dict[str, Any] | None:
        """`{"id", "queueKey"}` of the parent in its flow, and the policy flag for a failure."""
        return self.record.parent

    @property
    def lane(self) -> str | None:
        """Whose fair share of the queue the job belongs to."""
        return self.record.lane

    @property
    def deduplication_id(self) -> str | None:
        return self.record.deduplication_id

    @property
    def reported_progress(self) -> Any:
        """The progress stored when this object was read."""
        return self.record.progress

    @property
    def idempotency_key(self) -> str:
        """The same for every run of this job, also after a redrive, and for no other job. Send it to whatever you
        call."""
        return self.record.idempotency_key(self._actions.name)

    @property
    def fence(self) -> int:
        """Grows with every take: store it with your writes and refuse smaller ones, and a run that lost its lock
        can do no harm."""
        return self.record.attempts_started

    @property
    def is_last_attempt(self) -> bool:
        """True when a failure of this run is final."""
        return self.attempts_made + 1 >= self.opts.attempts

    def log_fields(self) -> dict[str, Any]:
        """What log records show of it: its ids, and those that stand in its data or beside them."""
        ids = tracing.carried_ids(self.record.data_for_logs)
        if b"bpmeta" in self.record.raw_opts:  # nearly no job has it
            ids = {**tracing.carried_ids(self.meta.to_wire()), **ids}
        return {
            "jobId": self.id,
            "jobName": self.name,
            "queue": self._actions.name,
            "attempt": self.attempts_made + 1,
            **ids,
            "traceId": self.traced_in or tracing.trace_id(tracing.from_text(self.opts.tm)),
        }

    def to_json(self) -> dict[str, Any]:
        """Names as on the wire, unset fields left out, never the lock token."""
        return self.record.to_json()

    async def progress(self, value: Progress) -> None:
        """Report progress: a number from 0 to 100, text, a boolean, a list, or any JSON object."""
        await self._actions.update_progress(self.id, check_progress(value))

    async def log(self, line: str) -> int:
        """Append a line to the job's log; the oldest beyond `keep_logs` (1000) go. Returns how many are kept."""
        check_log_line(line)  # here too: in a child process before it is sent to the parent
        keep = self.opts.keep_logs
        return await self._actions.add_log(self.id, line, DEFAULT_KEEP_LOGS if keep is None else keep)

    async def logs(self, *, start: int = 0, count: int | None = None, newest_first: bool = False) -> list[str]:
        """Its log lines, oldest first, from line `start` on and at most `count`; `newest_first` counts from the end."""
        return await self._actions.read_logs(self.id, start, count, newest_first=newest_first)

    async def clear_logs(self, *, keep: int = 0) -> None:
        """Delete its log lines, all but the newest `keep`."""
        await self._actions.clear_logs(self.id, check_int("keep", keep, minimum=0))

    async def update_data(self, data: Any) -> None:
        """Replace the stored payload; the next run sees it. This object keeps what it was read with."""
        raw = json.encode({} if data is None else data)
        json.check_payload_size(len(raw), len(self.record.raw_opts))
        await self._actions.update_data(self.id, raw)

    async def children_values(self) -> dict[str, Any]:
        """What the completed children returned, by their full keys `<prefix>:<queue>:<id>`."""
        return PARTS["processed"].read(await self._actions.read_children(self.id, "processed"))

    async def ignored_children(self) -> dict[str, str]:
        """Reasons of failed children that do not stop this job (`ignore`, `continue_parent`), by their keys."""
        return PARTS["ignored"].read(await self._actions.read_children(self.id, "ignored"))

    async def failed_children(self) -> dict[str, str]:
        """Why children failed that this job fails with (`fail_parent`), by their keys; empty text where the child is
        gone."""
        return PARTS["ignored"].read(await self._actions.read_children(self.id, "failed"))

    async def children_counts(self) -> ChildrenCounts:
        """How many children it has, by condition; all 0 for a job without any. Raises JobNotFound."""
        return await self._actions.count_children(self.id)

    async def leave_parent(self) -> bool:
        """Stop being a child while the parent still waits for this job; the parent is released when it waits
        for nothing else. False: no parent waits for it. Raises JobNotFound."""
        return await self._actions.leave_parent(self.id)

    async def remove_deduplication(self) -> bool:
        """Free this job's deduplication id, so that the next add with it makes a job. False: the job has none, or does
        not own it any more."""
        mine = self.deduplication_id
        return mine is not None and await self._actions.remove_deduplication(self.id, mine)

    async def remove_unprocessed_children(self) -> int:
        """Delete the children that this job still waits for, with all below them; those that run, and those that failed
        and hold it up, stay. Returns how many.

        For a parent that continues after a child failed (`continueParentOnFailure`): it cannot complete while children
        are pending.
        """
        return await self._actions.remove_unprocessed_children(self.id)

    async def cancel(self, reason: str | None = None) -> Cancelled:
        """End the job wherever it is; see `Queue.cancel`."""
        return await self._actions.cancel(self.id, reason)

    async def remove(self, *, children: bool = True) -> bool:
        """Delete the job, and all below it in its flow; see `Queue.remove`."""
        return await self._actions.changes.remove(self.id, children=children)

    async def promote(self) -> None:
        """Let a delayed job run now; see `Queue.promote`."""
        await self._actions.changes.promote(self.id)

    async def retry(self, *, state: JobState = JobState.FAILED, reset_attempts: bool = False) -> None:
        """Run a failed (or completed) job again; see `Queue.retry`."""
        await self._actions.changes.retry(self.id, state=state, reset_attempts=reset_attempts)

    async def change_delay(self, delay: int | timedelta) -> None:
        """Let a delayed job become due after `delay` from now; see `Queue.change_delay`."""
        await self._actions.changes.change_delay(self.id, delay)

    async def change_priority(
        self, priority: int | None = None, *, urgency: int | None = None, lifo: bool = False
    ) -> None:
        """Give the job another priority or urgency; see `Queue.change_priority`."""
        await self._actions.changes.change_priority(self.id, priority, urgency=urgency, lifo=lifo)

    async def state(self) -> JobState:
        """Where the job is now."""
        return await self._actions.state_of(self.id)

    async def result(self, timeout: int | timedelta | None = None) -> Any:
        """Wait until the job is done and return its value; no polling.

        Raises JobFailed when it failed finally (JobCancelled when somebody cancelled it), ResultTimeout after
        `timeout` (ms or timedelta), JobNotFound when it is gone.
        """
        return await self._actions.wait_result(self.id, timeout, self.mark)

    @property
    def sync(self) -> BlockingJob[DataT_co]:
        """The same job for handlers that are plain functions: nothing is awaited. On the event loop it would wait for
        itself."""
        if self._run is None:
            raise BullpenError("job.sync is for `def` handlers of a Worker; elsewhere await the job's own methods")
        from bullpen.queue.blocking_faces import Job as BlockingJob

        return BlockingJob(self, self._run)

    def bind(self, run: RunCoroutine) -> None:
        """Called before a plain function gets the job: how it has a coroutine run."""
        self._run = run

    def bind_to_running_loop(self) -> None:
        """The same for a function in a thread beside the loop."""
        loop = asyncio.get_running_loop()
        self.bind(lambda coroutine: asyncio.run_coroutine_threadsafe(coroutine, loop).result())


Handler = Callable[[Job], Any]
"""What a worker calls for each job: `async def`, or a plain function, which runs in a thread."""
