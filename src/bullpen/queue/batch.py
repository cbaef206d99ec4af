"""Several jobs that one call of a handler gets together: what they are, and what became of each.

In: jobs, and what the handler returned or raised. Out: a Result for each job. No I/O.
Elsewhere: forming batches (`bullpen.worker.batches`), tasks that take lists (`batch_tasks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, overload

from bullpen._kernel.duration import check_int, to_ms
from bullpen._kernel.outcome import RETURNED_NOTHING, Raised, Result, Returned
from bullpen.errors import InvalidOption, require
from bullpen.queue.job import Job

__all__ = ["BatchHandler", "BatchOptions", "JobBatch", "shares"]

MOST_JOBS: Final = 1_000
_WAIT_MS: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """How many jobs a handler gets at once. The worker's `concurrency` is then how many batches run at once."""

    size: int
    """At most so many."""
    minimum: int = 1
    """Wait for so many, but not longer than `wait_at_most`. With 1 nothing waits."""
    wait_at_most: int | timedelta = _WAIT_MS
    """Ms, or a timedelta: how long the first job waits for others, with its lock held. A second unless given."""

    def __post_init__(self) -> None:
        check_int("batch.size", self.size, minimum=1, maximum=MOST_JOBS)
        check_int("batch.minimum", self.minimum, minimum=1)
        require("batch.minimum", self.minimum <= self.size, f"at most size ({self.size})", self.minimum)
        to_ms("batch.wait_at_most", self.wait_at_most, minimum=1)
        waits = self.minimum > 1 or self.wait_at_most == _WAIT_MS
        require("batch.wait_at_most", waits, "with a minimum above 1; else nothing waits", self.wait_at_most)

    @property
    def wait_s(self) -> float:
        return to_ms("batch.wait_at_most", self.wait_at_most) / 1000


class JobBatch(Sequence[Job]):
    """The jobs that a handler gets, in the order in which they were taken.

    When the handler returns nothing, each job completes without a value; when it returns a list, each with its own, and
    an exception in its place fails that job alone. What the handler raises fails every job that was not decided before
    with `complete` or `fail`. A job may be cancelled, or lose its lock, while the others go on: `job.cancelled` tells.
    """

    def __init__(self, jobs: Sequence[Job], decide: Callable[[Job, Result], bool]) -> None:
        self._jobs, self._decide = tuple(jobs), decide
        self._whole: JobBatch | None = None
        self._cancelled = False
        self.on_left: Callable[[Job], None] | None = None
        """Told of a job that is not wanted any more while the others go on."""

    @property
    def cancelled(self) -> bool:
        """True once the whole batch is pointless: its time is up, or none of its jobs is wanted any more."""
        return self._cancelled or (self._whole is not None and self._whole.cancelled)

    @cancelled.setter
    def cancelled(self, value: bool) -> None:
        self._cancelled = value

    @overload
    def __getitem__(self, index: int) -> Job: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Job, ...]: ...
    def __getitem__(self, index: int | slice) -> Job | tuple[Job, ...]:
        return self._jobs[index]

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs)

    def __repr__(self) -> str:
        return f"JobBatch({', '.join(repr(job.id) for job in self._jobs)})"

    def complete(self, job: Job, value: Any = None) -> None:
        """Complete one job now, while the others go on."""
        self._settle(job, RETURNED_NOTHING if value is None else Returned(value))

    def fail(self, job: Job, error: BaseException) -> None:
        """Fail one job now, as if its own handler had raised `error`; a `DelayJob` delays it, and so on."""
        require("error", isinstance(error, BaseException), "an exception", error)
        self._settle(job, Raised(error))

    def only(self, jobs: Sequence[Job]) -> JobBatch:
        """Some of its jobs as a batch of their own; what is decided there is decided here."""
        some = JobBatch(jobs, self.decide)
        some._whole = self
        return some

    def tell_left(self, job: Job) -> None:
        """It was cancelled, or its lock is lost."""
        if self.on_left is not None:
            self.on_left(job)

    def decide(self, job: Job, result: Result) -> bool:
        """What became of one of them; False when it was decided before."""
        return self._decide(job, result)

    def _settle(self, job: Job, result: Result) -> None:
        require("job", job in self._jobs, "a job of this batch", job)
        require("job", self.decide(job, result), "a job that was not settled before", job)

    def log_fields(self) -> dict[str, Any]:
        """What log records show of it: the queue, and the ids of its jobs."""
        return {"queue": self._jobs[0].queue_name, "jobId": ",".join(job.id for job in self._jobs)}


BatchHandler = Callable[[JobBatch], Any]
"""What a worker with `batch=` calls: `async def`, or a plain function, which runs in a thread."""


def shares(result: Result, count: int) -> list[Result]:
    """What a call for so many jobs came to, for each of them."""
    if isinstance(result, Raised) or result.value is None:
        return [result] * count
    values = result.value
    if not isinstance(values, list | tuple) or len(values) != count:
        got = f"{len(values)} values" if isinstance(values, list | tuple) else f"{type(values).__name__}"
        error = InvalidOption("batch handler", f"a list of {count} values, one per job, or None", got)
        return [Raised(error)] * count
    return [Raised(value) if isinstance(value, BaseException) else Returned(value) for value in values]
