"""One job, with PyPI's names.

In: a job of bullpen, or what a program gives to `Job(…)`. Out: attributes as they were read, and calls that go to the
queue. Inside of a processor `moveToDelayed` and `moveToWaitingChildren` are remembered, and come true when the error
that must follow them is raised: then the move is one step with the end of the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from bullpen._kernel.json import NULL
from bullpen.compat.bullmq._errors import as_json, as_pypi
from bullpen.compat.bullmq._names import check_job_key, check_names, state_of
from bullpen.compat.bullmq._options import check_policies
from bullpen.errors import JobNotFound, JobStateConflict, QueueClosed
from bullpen.queue.job import Job as NativeJob
from bullpen.queue.queue import Queue as NativeQueue
from bullpen.queue.states import JobState
from bullpen.wire.records import JobRecord
from bullpen.worker.taker import Taker

__all__ = ["Job", "JobHome", "remove_job"]

_ALL_LINES: Final = 2**31 - 1
_FETCH_MS: Final = 1_000
"""For a job that is known to wait."""
"""Without `keepLogs` PyPI's clients keep every line."""


class JobHome(Protocol):
    """Whose job it is: a queue, a worker, or a place in a flow."""

    @property
    def name(self) -> str: ...
    @property
    def opts(self) -> Mapping[str, Any]: ...
    @property
    def prefix(self) -> str: ...
    @property
    def qualifiedName(self) -> str: ...
    @property
    def native_queue(self) -> NativeQueue:
        """The queue of bullpen behind it."""


class Job:
    """A job as PyPI's `bullmq` shows it."""

    def __init__(
        self, queue: JobHome, name: str, data: Any, opts: Mapping[str, Any] | None = None, job_id: str | None = None
    ) -> None:
        given = dict(opts or {})
        check_policies(given)
        backoff, parent = given.get("backoff"), given.get("parent")
        rule = given.get("deduplication")
        self.queue = queue
        self.queueQualifiedName = queue.qualifiedName
        self.name, self.data = name, data
        self.id: str | None = given.get("jobId") or job_id
        self.opts: dict[str, Any] = {
            "attempts": 0,
            "delay": 0,
            **given,
            "backoff": {"type": "fixed", "delay": backoff} if type(backoff) is int else backoff or None,
        }
        self.timestamp: int = given.get("timestamp") or round(time.time() * 1000)
        self.delay: int = given.get("delay", 0)
        self.priority: int = given.get("priority", 0)
        self.attempts: int = given.get("attempts", 1)
        self.removeOnComplete: Any = given.get("removeOnComplete", True)
        self.removeOnFail: Any = given.get("removeOnFail", False)
        self.deduplication_id: str | None = rule.get("id") if isinstance(rule, dict) else None
        self.parentKey: str | None = f"{parent.get('queue')}:{parent.get('id')}" if parent else None
        self.parent: dict[str, Any] | None = (
            {"id": parent.get("id"), "queueKey": parent.get("queue")} if parent else None
        )
        self.progress: Any = 0
        self.returnvalue: Any = None
        self.failedReason: str | None = None
        self.deferredFailure: str | None = None
        self.repeatJobKey: str | None = None
        self.stacktrace: list[str] = []
        self.attemptsMade = self.attemptsStarted = self.stalledCounter = 0
        self.processedOn: int | None = 0
        self.finishedOn: int | None = 0
        self.discarded = False
        self.token: str | None = None
        self._job: NativeJob | None = None
        self.delayed_for: int | None = None
        """What `moveToDelayed` asked for, in ms; it comes true with DelayedError."""

    @classmethod
    def of(cls, queue: JobHome, native: NativeJob) -> Job:
        """From a job of bullpen."""
        job = cls(queue, native.name, native.data, native.opts.to_json(), native.id)
        job.id = native.id
        job.show(native.record)
        job.token = native.token or None
        job._job = native
        return job

    def show(self, record: JobRecord) -> None:
        """Take over what is stored now."""
        self.progress = 0 if record.progress is None else record.progress
        self.timestamp, self.delay, self.priority = record.timestamp, record.delay, record.priority
        self.attemptsMade, self.attemptsStarted = record.attempts_made, record.attempts_started
        self.stalledCounter = record.stalled_count
        self.processedOn, self.finishedOn = record.processed_on, record.finished_on
        self.returnvalue, self.failedReason = record.return_value, record.failed_reason
        self.stacktrace = list(record.stacktrace)
        self.deferredFailure, self.repeatJobKey = record.deferred_failure, record.scheduler_id
        if record.parent is not None:
            self.parent = record.parent
            self.parentKey = f"{record.parent.get('queueKey')}:{record.parent.get('id')}"

    @staticmethod
    def fromJSON(queue: JobHome, rawData: Mapping[str, Any], jobId: str | None = None) -> Job:
        """From the fields of a job's hash, as texts."""
        record = JobRecord.parse(jobId if jobId is not None else str(rawData.get("id", "")), rawData)
        job = Job(queue, record.name, record.data, record.opts.to_json(), record.id)
        job.id = record.id
        job.show(record)
        return job

    @staticmethod
    async def fromId(queue: JobHome, jobId: str) -> Job | None:
        """Read one job; None when there is none."""
        native = await queue.native_queue.get_job(jobId)
        return None if native is None else Job.of(queue, native)

    @staticmethod
    async def addJobLog(queue: JobHome, jobId: str, logRow: str, keepLogs: int = 0) -> int:
        """Append to the log of a job; returns how many lines it has."""
        return await queue.native_queue.add_log(jobId, logRow, keep=keepLogs or _ALL_LINES)

    # ---- what a processor does --------------------------------------------------------------------------------

    async def updateData(self, data: Any) -> None:
        """Replace the payload."""
        with as_pypi("updateData", self.id), as_json(data):
            await (await self._native()).update_data(NULL if data is None else data)
        self.data = data

    async def updateProgress(self, progress: Any) -> None:
        """Report how far it is."""
        with as_pypi("updateProgress", self.id), as_json(progress):
            await self._calls.update_progress(self._own_id, progress)
        self.progress = progress

    async def log(self, logRow: str) -> int:
        """Append to its log; returns how many lines it has."""
        return await Job.addJobLog(self.queue, self._own_id, logRow, self.opts.get("keepLogs") or 0)

    async def moveToDelayed(self, timestamp: int, token: str) -> None:
        """Run again at `timestamp` (Unix ms); raise DelayedError behind it."""
        del token  # the worker holds the lock
        self.delayed_for = self.delay = max(0, timestamp - round(time.time() * 1000))
        if (taker := self._taker()) is not None and self._job is not None:
            await taker.move_to_delayed(self._job, self.delay)

    async def moveToWaitingChildren(self, token: str, opts: Mapping[str, Any] | None = None) -> bool:
        """Whether it has to wait for children, or for `opts["child"]`; then raise WaitingChildrenError behind it."""
        del token
        with as_pypi("moveToWaitingChildren", self.id):
            check_names(opts, ("child",), "an option of moveToWaitingChildren")
            child = (opts or {}).get("child")
            check_job_key(child, "child")
            if child is None:
                return (await self._calls.children_counts(self._own_id)).pending > 0
            pending = (await self._calls.children(self._own_id)).pending
            return f"{child.get('queue')}:{child.get('id')}" in pending

    async def moveToCompleted(self, return_value: Any, token: str, fetchNext: bool = False) -> list[Any] | None:
        """Complete a job that was taken by hand; with `fetchNext` take the next one, see `moveToFailed`."""
        del token
        taker = self._must_be_taken("moveToFinished")
        with as_json(return_value):
            await taker.complete(self._taken(), return_value)
        self.returnvalue = return_value
        return await self._fetch_next(taker) if fetchNext else None

    async def moveToFailed(self, err: BaseException, token: str, fetchNext: bool = False) -> list[Any] | None:
        """Fail a job that was taken by hand, or let it run again, as its attempts say.

        With `fetchNext` the next job is taken, if one waits: its stored fields, its id, and two numbers that are always
        0; else None. `worker.nextJobFromJobData(*answer)` makes a job of it.
        """
        del token
        taker = self._must_be_taken("moveToFinished")
        await taker.fail(self._taken(), err)
        self.failedReason = str(err)
        return await self._fetch_next(taker) if fetchNext else None

    async def _fetch_next(self, taker: Taker) -> list[Any] | None:
        counts = await self._calls.counts()
        if not counts.waiting and not counts.prioritized:
            return None
        try:
            native = await taker.take(_FETCH_MS)
        except QueueClosed:
            return None
        if native is None:  # another worker was faster
            return None
        remember: Callable[[NativeJob], Job] = self.queue._job  # type: ignore[attr-defined]  # a taker is a worker's
        remember(native)
        fields = {name.decode(): value.decode("utf-8", "replace") for name, value in native.record.fields().items()}
        return [fields, native.id, 0, 0]

    def _taker(self) -> Taker | None:
        found: Taker | None = getattr(self.queue, "taker", None)
        return found

    def _must_be_taken(self, command: str) -> Taker:
        if (taker := self._taker()) is None:
            raise TypeError(f"Missing lock for job {self.id}. {command}")
        return taker

    def _taken(self) -> NativeJob:
        assert self._job is not None  # a taker hands out nothing else
        return self._job

    async def getChildrenValues(self) -> dict[str, Any]:
        """What the children returned, by their keys."""
        with as_pypi("getChildrenValues", self.id):
            return await (await self._native()).children_values()

    # ---- where it is ------------------------------------------------------------------------------------------

    async def getState(self) -> str:
        """`waiting`, `active` and so on; `unknown` when it is gone."""
        return (await self._calls.state_of(self._own_id)).value

    async def isCompleted(self) -> bool:
        return await self._is(JobState.COMPLETED)

    async def isFailed(self) -> bool:
        return await self._is(JobState.FAILED)

    async def isDelayed(self) -> bool:
        return await self._is(JobState.DELAYED)

    async def isWaitingChildren(self) -> bool:
        return await self._is(JobState.WAITING_CHILDREN)

    async def isActive(self) -> bool:
        return await self._is(JobState.ACTIVE)

    async def isWaiting(self) -> bool:
        return await self._is(JobState.WAITING)

    async def isInZSet(self, set: str) -> bool:
        """Whether it is in this state, by the name of its key."""
        return await self.isInList(set)

    async def isInList(self, list_name: str) -> bool:
        """Whether it is in this state, by the name of its key."""
        return await self._is(state_of("list_name", list_name))

    # ---- changes ----------------------------------------------------------------------------------------------

    async def promote(self) -> None:
        """Let a delayed job run now."""
        with as_pypi("promote", self.id, state="delayed"):
            await self._calls.promote(self._own_id)
        self.delay = 0

    async def retry(self, state: str = "failed", opts: Mapping[str, Any] | None = None) -> None:
        """Put a failed or completed job back in line. Its starts go on being counted."""
        check_names(opts, ("resetAttemptsMade", "resetAttemptsStarted"), "an option of retry")
        wanted = state_of("state", state)
        with as_pypi("reprocessJob", self.id, state=state):
            resets = bool((opts or {}).get("resetAttemptsMade"))
            await self._calls.retry(self._own_id, state=wanted, reset_attempts=resets)
        self.failedReason = self.finishedOn = self.processedOn = self.returnvalue = None
        if resets:
            self.attemptsMade = 0

    async def changePriority(self, opts: Mapping[str, Any]) -> None:
        """Give it another priority."""
        check_names(opts, ("priority", "lifo"), "an option of changePriority")
        priority = opts.get("priority", 0)
        with as_pypi("changePriority", self.id):
            await self._calls.change_priority(self._own_id, priority, lifo=bool(opts.get("lifo")))
        self.priority = priority

    async def remove(self, opts: Mapping[str, Any] | None = None) -> None:
        """Delete it, and its children unless `removeChildren` is False."""
        if not await remove_job(self._calls, self._own_id, opts):
            raise RuntimeError(f"Job {self.id} could not be removed because it is locked by another worker")

    def updateStacktrace(self) -> None:
        """Nothing: the worker stores the stack with the failure."""

    @property
    def _calls(self) -> NativeQueue:
        return self.queue.native_queue

    @property
    def _own_id(self) -> str:
        if self.id is None:
            raise ValueError(f"job {self.name!r} was not added yet, so it has no id; `await queue.add(…)` returns one")
        return self.id

    async def _native(self) -> NativeJob:
        if self._job is None:
            self._job = await self._calls.get_job(self._own_id)
        if self._job is None:
            raise JobNotFound(self.queue.name, self._own_id)
        return self._job

    async def _is(self, state: JobState) -> bool:
        return await self._calls.state_of(self._own_id) is state


async def remove_job(calls: NativeQueue, job_id: str, opts: Mapping[str, Any] | None) -> int:
    """1 when it is gone, 0 when it runs."""
    check_names(opts, ("removeChildren",), "an option of remove")
    try:
        await calls.remove(job_id, children=bool((opts or {}).get("removeChildren", True)))
    except JobStateConflict:
        return 0
    return 1
