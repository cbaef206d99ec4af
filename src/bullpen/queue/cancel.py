"""Cancel one job, wherever it is.

In: a job's id and a reason. Out: it is failed as cancelled, or its worker is asked; or an error that says why not.
Pure: the call and what its reply means, for the async queue, the blocking one and a worker. Elsewhere: what the script
does (`bullpen.wire.lua`, cancel), how a worker obeys (`bullpen.worker`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final

from bullpen._kernel.outcome import cut
from bullpen.errors import JobCancelled, JobFailed, JobNotFound, JobStateConflict, require
from bullpen.wire.cancels import cancel_text
from bullpen.wire.keys import QueueKeys
from bullpen.wire.options import WireOptions, resolve, rule_text

MOST_REASON: Final = 1_000
"""Characters kept of a reason."""
_DONE, _REQUESTED, _NO_JOB, _CURRENT_ITERATION = 1, 2, -1, -8


class Cancelled(StrEnum):
    """What `cancel` did."""

    DONE = "done"
    """It did not run: it is failed now."""
    REQUESTED = "requested"
    """It runs, and its worker is asked to stop it. It ends as cancelled, unless it ends before that."""


def check_reason(reason: str | None) -> str:
    """The reason as it is stored; none is empty."""
    require("reason", reason is None or isinstance(reason, str), "text", reason)
    return cut((reason or "").encode("utf-8", "backslashreplace").decode().strip(), MOST_REASON)


def cancel_call(
    keys: QueueKeys, job_id: str, reason: str, opts: WireOptions, clock_offset_ms: int
) -> tuple[list[str], list[Any]]:
    """Keys and arguments of the script. How failed jobs are kept is said by the job's own options."""
    rule = rule_text(resolve(opts.remove_on_fail))
    return [keys.job(job_id), keys.cancels], [keys.base, clock_offset_ms, job_id, cancel_text(reason), reason, rule]


def failure_of(queue: str, job_id: str, failed_reason: bytes, said: bytes | None = None) -> JobFailed:
    """The error for a caller that waited for a failed job. `said`: it was cancelled for this reason."""
    if said is not None:
        return JobCancelled(queue, job_id, said.decode("utf-8", "replace"))
    return JobFailed(queue, job_id, failed_reason.decode("utf-8", "replace"))


def read_reply(queue: str, job_id: str, reply: int, *, was_repeated: bool) -> Cancelled:
    """`was_repeated`: an earlier copy of the call may have done it, and the job may be gone by its own rule."""
    if reply == _DONE or (reply == _NO_JOB and was_repeated):
        return Cancelled.DONE
    if reply == _REQUESTED:
        return Cancelled.REQUESTED
    if reply == _NO_JOB:
        raise JobNotFound(queue, job_id)
    why = "has finished already"
    if reply == _CURRENT_ITERATION:
        why = "is the next job of a job scheduler, which would stop without it; remove the scheduler"
    raise JobStateConflict(f"job {job_id!r} of queue {queue!r} {why}", queue=queue, job_id=job_id)
