"""The position of one job and the limits of its queue: everything that explains why it does not run.

In: the id of a job. Out: its state, its record and the numbers around it, in two calls whose cost does not grow with
the number of jobs. Elsewhere: what follows from them (`bullpen.ops.explain`), a job alone (`Queue.get_job`).
"""

from __future__ import annotations

from typing import Any, Final, TypedDict

from bullpen.queue.base import QueuePart
from bullpen.queue.limits import turn_of_task
from bullpen.queue.states import JobState
from bullpen.wire.records import JobRecord, read_int, read_score

__all__ = ["JobPosition", "Locating"]

_SCORE_PER_MS: Final = 4_096
COUNTED: Final = 100_000
"""Entries of a list that are searched for a job."""


class JobPosition(TypedDict):
    """The numbers around a job."""

    is_paused: bool
    lock_ms: int | None
    """Time until its lock expires; None: not locked."""
    due_ms: int | None
    started_in_window: int
    window_ms: int
    task_starts: int
    """How often the task of this name has started in the window of its own rate limit."""
    task_window_ms: int
    """Until that window ends; 0: the task has no rate limit, or no window."""
    rate_limit: int | None
    concurrency: int | None
    active: int
    pending_children: int
    failed_children: int
    position: int | None
    """Jobs in front of it in its own list; None: it was not met among the first."""
    before_priority: int
    """Jobs without a priority, which run before one that has one."""


class Locating(QueuePart):
    """Where jobs of a `Queue` stand."""

    async def locate(self, job_id: str) -> tuple[JobState, JobRecord | None, int, JobPosition]:
        """State, record, the server's clock in ms, and the numbers around the job. No record: there is no such job.

        A job that is in no other state and not among the first hundred thousand waiting ones counts as waiting.
        """
        actions, keys = self._ready(), self._keys
        found = await actions.read(job_id)
        raw_id = job_id.encode("utf-8", "surrogateescape")
        turns = None if found is None else keys.turns(turn_of_task(found[1].name))
        lists = [("LPOS", key, raw_id, "RANK", -1, "MAXLEN", COUNTED) for key in (keys.wait, keys.paused)]
        (
            clock,
            meta,
            lock_ms,
            score,
            started,
            window_ms,
            waiting,
            paused,
            active,
            rank,
            *lengths,
        ) = await actions.commands(
            [
                ("TIME",),
                ("HMGET", keys.meta, "paused", "concurrency", "max"),
                ("PTTL", keys.lock(job_id)),
                ("ZSCORE", keys.delayed, raw_id),
                ("GET", keys.limiter),
                ("PTTL", keys.limiter),
                *lists,
                ("LLEN", keys.active),
                ("ZRANK", keys.prioritized, raw_id),
                ("LLEN", keys.wait),
                ("LLEN", keys.paused),
                ("SCARD", keys.dependencies(job_id)),
                ("ZCARD", keys.unsuccessful(job_id)),
                ("HLEN", keys.failed_children(job_id)),
                *([("GET", turns), ("PTTL", turns)] if turns else ()),
            ]
        )
        now_ms = int(clock[0]) * 1000 + int(clock[1]) // 1000
        in_wait, in_paused, pending, failed, ignored = lengths[:5]
        task_starts, task_window_ms = lengths[5:] or (None, -2)
        state = JobState.UNKNOWN if found is None else found[0] or JobState.WAITING
        place, length = (waiting, in_wait) if waiting is not None else (paused, in_paused)
        is_prioritized = state is JobState.PRIORITIZED
        return (
            state,
            None if found is None else found[1],
            now_ms,
            JobPosition(
                is_paused=meta[0] is not None,
                lock_ms=lock_ms if lock_ms >= 0 else None,
                due_ms=None if score is None else read_score(score) // _SCORE_PER_MS,
                started_in_window=read_int(started or b"0"),
                window_ms=max(0, window_ms),
                task_starts=read_int(task_starts or b"0"),
                task_window_ms=max(0, task_window_ms),
                rate_limit=_positive(meta[2]),
                concurrency=_positive(meta[1]),
                active=active,
                pending_children=pending,
                failed_children=failed + ignored,
                position=rank if is_prioritized else _from_the_end(place, length),
                before_priority=in_wait + in_paused if is_prioritized else 0,
            ),
        )


def _positive(raw: Any) -> int | None:
    number = read_int(raw) if raw else 0
    return number if number > 0 else None


def _from_the_end(place: int | None, length: int) -> int | None:
    """Lists run from their right end."""
    return None if place is None else max(0, length - 1 - place)
