"""One common status for the states of every store, and numbers for people.

In: a state of a job, a status of the outbox, a run or a message; milliseconds, bytes. Out: one of ten common words that
pages, colours and metrics share, or a short text. No input or output here.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

__all__ = [
    "WorkStatus",
    "attempt_status",
    "counted",
    "duration_text",
    "job_status",
    "message_status",
    "outbox_status",
    "run_status",
    "size_text",
]


class WorkStatus(StrEnum):
    """What a piece of work does, whatever its store calls it."""

    WAITING = "waiting"
    DELAYED = "delayed"
    ACTIVE = "active"
    BLOCKED = "blocked"
    RETRYING = "retrying"
    DONE = "done"
    DEAD = "dead"
    UNKNOWN = "unknown"
    CANCELLED = "cancelled"
    PAUSED = "paused"


_JOBS: Final = {
    "waiting": WorkStatus.WAITING,
    "prioritized": WorkStatus.WAITING,
    "active": WorkStatus.ACTIVE,
    "delayed": WorkStatus.DELAYED,
    "waiting-children": WorkStatus.BLOCKED,
    "completed": WorkStatus.DONE,
    "failed": WorkStatus.DEAD,
    "unknown": WorkStatus.UNKNOWN,
}
_OUTBOX: Final = {
    "PENDING": WorkStatus.WAITING,
    "CLAIMED": WorkStatus.ACTIVE,
    "SENT": WorkStatus.DONE,
    "FAILED": WorkStatus.RETRYING,
    "DEAD": WorkStatus.DEAD,
}
_ATTEMPTS: Final = {"SENT": WorkStatus.DONE, "FAILED": WorkStatus.RETRYING, "DEAD": WorkStatus.DEAD}
_RUNS: Final = {
    "QUEUED": WorkStatus.WAITING,
    "RUNNING": WorkStatus.ACTIVE,
    "COMPLETED": WorkStatus.DONE,
    "FAILED": WorkStatus.DEAD,
    "CANCELLED": WorkStatus.CANCELLED,
}
_MESSAGES: Final = {
    "CREATED": WorkStatus.WAITING,
    "QUEUED": WorkStatus.WAITING,
    "SENDING": WorkStatus.ACTIVE,
    "SENT": WorkStatus.DONE,
    "FAILED": WorkStatus.DEAD,
    "PARKED": WorkStatus.UNKNOWN,
    "CANCELLED": WorkStatus.CANCELLED,
    "SKIPPED": WorkStatus.CANCELLED,
    "EXPIRED": WorkStatus.CANCELLED,
}


def job_status(state: str, *, attempts_made: int = 0, has_failed: bool = False) -> WorkStatus:
    """The status of a job. A delayed job that has failed before is being retried."""
    if state == "delayed" and attempts_made and has_failed:
        return WorkStatus.RETRYING
    return _JOBS.get(state, WorkStatus.UNKNOWN)


def outbox_status(status: str) -> WorkStatus:
    return _OUTBOX.get(status, WorkStatus.UNKNOWN)


def attempt_status(outcome: str) -> WorkStatus:
    """The word for one delivery of a row."""
    return _ATTEMPTS.get(outcome, WorkStatus.WAITING)


def run_status(status: str) -> WorkStatus:
    return _RUNS.get(status, WorkStatus.UNKNOWN)


def message_status(status: str) -> WorkStatus:
    return _MESSAGES.get(status, WorkStatus.UNKNOWN)


def duration_text(ms: float) -> str:
    """At most three significant digits: `0 ms`, `1.2 s`, `3m 02s`, `2h 05m`, `4 d`."""
    ms = max(0.0, ms)
    if ms < 1_000:
        return f"{ms:.0f} ms"
    seconds = ms / 1_000
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    whole = int(seconds)
    if whole < 3_600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 2 * 86_400:
        return f"{whole // 3_600}h {whole % 3_600 // 60:02d}m"
    return f"{whole // 86_400} d"


def counted(count: int, one: str, many: str = "") -> str:
    """`1 job`, `1,404 jobs`."""
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"


def size_text(count: int) -> str:
    """`12 B`, `1.2 kB`, `10 MB`."""
    if count < 1_000:
        return f"{count} B"
    size = count / 1_000
    for unit in ("kB", "MB"):
        if size < 1_000:
            return f"{size:.1f} {unit}" if size < 10 else f"{size:.0f} {unit}"
        size /= 1_000
    return f"{size:.1f} GB"
