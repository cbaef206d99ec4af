"""Why a job is not running: the first cause that holds, with the numbers behind it and what to do.

In: a queue and the id of a job. Out: an explanation that names the cause, and the facts that it was made from. Reading
is two round trips of bounded cost, however many jobs wait; deciding is a pure function.
Elsewhere: how it is shown (`bullpen.dashboard`, `bullpen jobs explain`), doing what it advises (`actions`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from bullpen._kernel.command_line import command_line
from bullpen.ops.status import duration_text
from bullpen.queue import JobState, Queue
from bullpen.queue.limits import MANUAL_LIMIT
from bullpen.queue.locate import COUNTED
from bullpen.wire.records import JobRecord

__all__ = ["IdleCause", "JobExplanation", "JobFacts", "explain", "read_facts", "why"]

_SAME_END_MS = 1_000
"""A job that its task sent back is due when the window ends, but for the time of the way."""
_SILENT_S = 30
"""A worker that waits for jobs asks at least so often."""


class IdleCause(StrEnum):
    """Why a job does not run now, in the order in which they are considered."""

    NOT_HERE = "not-here"
    FINISHED = "finished"
    FAILED = "failed"
    RUNNING = "running"
    HOLDER_LOST = "holder-lost"
    CHILDREN = "waits-for-children"
    DELAYED = "delayed"
    PAUSED = "queue-paused"
    RATE = "rate-limit"
    CONCURRENCY = "global-concurrency"
    NO_WORKER = "no-worker"
    SILENT_WORKERS = "workers-do-not-fetch"
    IN_LINE = "in-line"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """What is known of a job and its queue at one moment."""

    queue: str
    job_id: str
    now_ms: int
    state: JobState
    record: JobRecord | None = None
    is_paused: bool = False
    lock_ms: int | None = None
    """Time until the lock expires; None: the job is not locked."""
    due_ms: int | None = None
    started_in_window: int = 0
    window_ms: int = 0
    """Until the window of the rate limit ends."""
    task_starts: int = 0
    task_window_ms: int = 0
    """Until the window of the rate limit of its task ends."""
    rate_limit: int | None = None
    concurrency: int | None = None
    active: int = 0
    pending_children: int = 0
    failed_children: int = 0
    position: int | None = None
    """Jobs in front of it; None: more than could be counted."""
    before_priority: int = 0
    """Jobs without a priority, which run before it."""
    workers: int | None = None
    idlest_worker_s: int | None = None
    """The smallest time since a worker last asked for something."""
    done_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class JobExplanation:
    """The answer."""

    cause: IdleCause
    text: str
    command: str = ""
    """What to type, when there is something to do."""
    action: str = ""
    """The action that does the same: `job.promote`."""

    def to_json(self) -> dict[str, str]:
        return {"cause": self.cause.value, "text": self.text, "command": self.command, "action": self.action}


async def why(queue: Queue, job_id: str, *, done_per_s: float | None = None) -> JobExplanation:
    """Ask and decide."""
    return explain(await read_facts(queue, job_id, done_per_s=done_per_s))


async def read_facts(queue: Queue, job_id: str, *, done_per_s: float | None = None) -> JobFacts:
    """All that is needed, in two calls of bounded cost and one list of clients."""
    state, record, now_ms, place = await queue.locate(job_id)
    if record is None:
        return JobFacts(queue=queue.name, job_id=job_id, now_ms=now_ms, state=JobState.UNKNOWN)
    workers = None if state in (JobState.COMPLETED, JobState.FAILED) else await queue.workers()
    return JobFacts(
        queue=queue.name,
        job_id=job_id,
        now_ms=now_ms,
        state=state,
        record=record,
        workers=None if workers is None else len(workers),
        idlest_worker_s=min((each.idle_s for each in workers), default=None) if workers else None,
        done_per_s=done_per_s,
        **place,
    )


def explain(facts: JobFacts) -> JobExplanation:
    """The first cause that holds."""
    record, queue = facts.record, facts.queue
    if record is None:
        text = f"There is no job {facts.job_id} in {queue}: it was removed, or it was never added to this queue."
        return JobExplanation(IdleCause.NOT_HERE, text, command_line("queues show", queue))
    match facts.state:
        case JobState.COMPLETED:
            ago = duration_text(facts.now_ms - record.finished_on)
            return JobExplanation(IdleCause.FINISHED, f"It is done: it completed {ago} ago.")
        case JobState.FAILED:
            return _failed(facts, record)
        case JobState.ACTIVE:
            return _active(facts, record)
        case JobState.WAITING_CHILDREN:
            return _blocked(facts)
        case JobState.DELAYED:
            return _delayed(facts, record)
    return _queue_level(facts) or _in_line(facts, record)


def _failed(facts: JobFacts, record: JobRecord) -> JobExplanation:
    ago = duration_text(facts.now_ms - record.finished_on)
    made = record.attempts_made
    text = f"It failed finally {ago} ago, after {made} {'attempt' if made == 1 else 'attempts'}."
    return JobExplanation(IdleCause.FAILED, text, command_line("jobs retry", facts.queue, facts.job_id), "job.retry")


def _active(facts: JobFacts, record: JobRecord) -> JobExplanation:
    since = duration_text(facts.now_ms - record.processed_on) if record.processed_on else "an unknown time"
    by = f" on {record.worker_id}" if record.worker_id else ""
    if facts.lock_ms is not None:
        return JobExplanation(IdleCause.RUNNING, f"It is running{by}, for {since}.")
    text = f"It was taken{by} {since} ago, and its lock has expired: the worker died or lost its connection. "
    if facts.workers == 0:
        fix = "No worker is connected; the next worker that starts returns the job to the queue."
        return JobExplanation(IdleCause.HOLDER_LOST, text + fix, "bullpen run MODULE:APP")
    return JobExplanation(IdleCause.HOLDER_LOST, text + "The next stalled check of a worker returns it to the queue.")


def _blocked(facts: JobFacts) -> JobExplanation:
    text = f"It waits for {facts.pending_children} of its child jobs."
    if facts.failed_children:
        text += f" {facts.failed_children} of them failed."
    return JobExplanation(IdleCause.CHILDREN, text)


def _delayed(facts: JobFacts, record: JobRecord) -> JobExplanation:
    command, action = command_line("jobs promote", facts.queue, facts.job_id), "job.promote"
    left_ms = (facts.due_ms or 0) - facts.now_ms
    reason = ""
    if record.attempts_made and record.raw_failed_reason:
        reason = f" It is retried after attempt {record.attempts_made} of {record.opts.attempts} failed."
    elif record.scheduler_id:
        reason = f" The schedule {record.scheduler_id} made it for then."
    if left_ms > 0 and abs(left_ms - facts.task_window_ms) <= _SAME_END_MS:
        text = (
            f"The rate limit of the task {record.name} is reached: {facts.task_starts} "
            f"{'job has' if facts.task_starts == 1 else 'jobs have'} started in this window. The next window begins in "
            f"{duration_text(left_ms)}, and the job is tried again then. To promote it does not help."
        )
        return JobExplanation(IdleCause.RATE, text)
    if left_ms > 0:
        text = f"It is delayed, and due in {duration_text(left_ms)}."
        return JobExplanation(IdleCause.DELAYED, text + reason, command, action)
    text = f"It was due {duration_text(-left_ms)} ago. Workers move delayed jobs to the queue"
    if facts.is_paused:
        return _queue_level(facts) or JobExplanation(IdleCause.DELAYED, f"{text}.", command, action)
    if facts.workers == 0:
        return JobExplanation(IdleCause.NO_WORKER, f"{text}, and no worker is connected.", "bullpen run MODULE:APP")
    return JobExplanation(IdleCause.DELAYED, f"{text}; it runs as soon as a worker is free.{reason}", command, action)


def _queue_level(facts: JobFacts) -> JobExplanation | None:
    """What keeps all jobs of the queue from running."""
    queue = facts.queue
    if facts.is_paused:
        text = f"The queue {queue} is paused: no worker takes jobs from it."
        return JobExplanation(IdleCause.PAUSED, text, command_line("queues resume", queue), "queue.resume")
    if facts.window_ms > 0 and facts.started_in_window >= MANUAL_LIMIT:
        text = f"The queue {queue} is rate limited: no job may start for {duration_text(facts.window_ms)}."
        return JobExplanation(IdleCause.RATE, text, action="queue.lift")
    if facts.rate_limit is not None and facts.window_ms > 0 and facts.started_in_window >= facts.rate_limit:
        text = (
            f"The rate limit of {queue} is reached: {facts.rate_limit} jobs have started in this window. "
            f"The next window begins in {duration_text(facts.window_ms)}."
        )
        return JobExplanation(IdleCause.RATE, text)
    if facts.concurrency is not None and facts.active >= facts.concurrency:
        text = f"The limit of {queue} is reached: {facts.active} jobs run, and at most {facts.concurrency} may run."
        return JobExplanation(IdleCause.CONCURRENCY, text)
    if facts.workers == 0:
        text = f"No worker is connected to {queue}."
        return JobExplanation(IdleCause.NO_WORKER, text, "bullpen run MODULE:APP")
    if facts.idlest_worker_s is not None and facts.idlest_worker_s > _SILENT_S:
        text = (
            f"{facts.workers} {'worker is' if facts.workers == 1 else 'workers are'} connected to {queue}, and none "
            f"has asked for a job for {facts.idlest_worker_s} s: its event loop is blocked, or its connection is lost."
        )
        return JobExplanation(IdleCause.SILENT_WORKERS, text, "bullpen doctor")
    return None


def _in_line(facts: JobFacts, record: JobRecord) -> JobExplanation:
    command = command_line("jobs list", facts.queue, state="active") if facts.active else ""
    if facts.position is None:
        text = f"It waits behind more than {COUNTED:,} jobs.{_busy(facts)}"
        return JobExplanation(IdleCause.IN_LINE, text, command)
    before = facts.position + facts.before_priority
    if not before:
        text = "It is the next to run."
    else:
        text = f"It waits behind {before:,} {'job' if before == 1 else 'jobs'}."
    if record.priority:
        text += f" Its priority is {record.priority}."
    if before and facts.done_per_s:
        starts_in = duration_text(before / facts.done_per_s * 1000)
        text += f" At {facts.done_per_s:g} jobs a second it starts in about {starts_in}."
    return JobExplanation(IdleCause.IN_LINE, text + _busy(facts), command)


def _busy(facts: JobFacts) -> str:
    """What has the slots of the workers."""
    if not facts.active:
        return ""
    running = "1 job runs" if facts.active == 1 else f"{facts.active:,} jobs run"
    on = "" if not facts.workers else f", on {facts.workers} {'worker' if facts.workers == 1 else 'workers'}"
    return f" {running} now{on}. When no slot is free, it waits for one: more workers, or a higher concurrency, help."
