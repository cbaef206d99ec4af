"""How a worker runs: one frozen record, checked once. Options of jobs are another type on purpose
(`bullpen.wire.options`).

In: `WorkerArguments`, what callers write. Out: `WorkerOptions`, what the worker reads. A test compares the two.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any, Final, TypedDict

from bullpen._kernel.backoff import Backoff, BackoffStrategy
from bullpen._kernel.cron import LOCAL, find_zone
from bullpen._kernel.duration import MAX_MS, check_int, to_ms
from bullpen._kernel.keep import Retention
from bullpen._kernel.policy import DeadLetterPolicy, RetryPolicy
from bullpen._kernel.rates import RateLimit
from bullpen.errors import InvalidOption, require
from bullpen.queue.batch import BatchOptions
from bullpen.queue.codec import Codec
from bullpen.wire.options import check_retention, to_snake
from bullpen.worker.auto import AutoConcurrency, Concurrency, most_of, read_concurrency
from bullpen.worker.children.limits import ChildLimits

__all__ = ["AutoConcurrency", "BatchOptions", "ChildLimits", "RateLimit", "WorkerArguments", "WorkerOptions"]


class WorkerArguments(TypedDict, total=False):
    """What `Worker`, `app.worker` and `app.handler` take besides queue and handler.

    `WorkerOptions` says what each does, and checks it; the first five are the worker's own.
    """

    name: str | None
    """Who took a job, stored with it; None is `{hostname}-{pid}-{random}`."""
    policy: RetryPolicy | None
    """Which errors are final, and where dead letters go."""
    codec: Codec | None
    """Opens sealed job data before the handler and seals what it returns; None takes plain jobs only."""
    permanent_errors: tuple[type[BaseException], ...]
    """Short for a policy with these error types."""
    dead_letters: bool | DeadLetterPolicy
    """Short for a policy with a dead-letter queue."""
    backoff: Mapping[str, BackoffStrategy | Backoff]
    """Short for a policy with these strategies: how long to wait, by the type of a job's backoff."""
    concurrency: Concurrency
    batch: BatchOptions | None
    processes: bool | ChildLimits
    lock: int | timedelta
    timeout: int | timedelta | None
    timeouts: Mapping[str, int | timedelta]
    close_timeout: int | timedelta | None
    stalled_interval: int | timedelta
    max_block: int | timedelta | None
    drain_delay: int | timedelta
    remove_on_complete: Retention
    remove_on_fail: Retention
    limit: RateLimit | None
    count_stalls_as_attempts: bool
    max_lonely_deaths: int | None
    max_started_attempts: int | None
    skip_stalled_check: bool
    skip_lock_renewal: bool
    events_max_len: int | None
    metrics_minutes: int | None
    scheduler_zone: str
    clock_offset_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """All durations in milliseconds."""

    concurrency: Concurrency = 1
    """Jobs handled at the same time by this worker; with `batch`, the number of batches. `"auto"`, or an
    `AutoConcurrency` with bounds of your own: as many as event loop and memory can take."""
    batch: BatchOptions | None = None
    """Give the handler several jobs at once: it takes a `JobBatch`."""
    lock_ms: int = 30_000
    """How long a job stays ours without renewal. Longer means slower recovery after a crash."""
    stalled_interval_ms: int = 10_000
    """How often to check for jobs of dead workers. One check per interval runs for all workers of the queue; while
    nothing runs the next is up to three times as long away, at most `lock`: no job is found later by that."""
    processes: bool | ChildLimits = False
    """Run the handler in child processes, one per running job, which are killed when time is up; with limits of what
    each may use."""
    timeout_ms: int | None = None
    """How long one run of a handler may take; None is for ever."""
    timeouts: Mapping[str, int | timedelta] = field(default_factory=dict, hash=False)
    """The same for jobs of these names, instead of `timeout`."""
    close_timeout_ms: int | None = None
    """How long `close` waits for running jobs before it gives them back; None is `lock_ms`."""
    max_block_ms: int | None = None
    """How long the event loop may stand still before its jobs are given up; None is 10 x lock, at least 5 minutes."""
    drain_delay_ms: int = 5_000
    """How long an idle worker sleeps before its fallback poll."""
    remove_on_complete: Retention = None
    """Which completed jobs stay, for jobs that do not say themselves."""
    remove_on_fail: Retention = None
    """Which failed jobs stay, for jobs that do not say themselves."""
    limit: RateLimit | None = None
    """How many jobs may start per time, over all workers of the queue."""
    count_stalls_as_attempts: bool = False
    """Fail a job when attempts made plus stalls reach its attempts."""
    max_lonely_deaths: int | None = 2
    """Fail a job whose worker died so often while it ran nothing else; None never does."""
    max_started_attempts: int | None = None
    """Fail a job that was started more often, whatever it says of its attempts; None never does. Starts also count what
    is no failed attempt: stalls, returns, delays by the handler. The same as Node's `maxStartedAttempts`."""
    skip_stalled_check: bool = False
    """Leave the jobs of dead workers to others: at least one worker of the queue must check for them."""
    skip_lock_renewal: bool = False
    """Let locks run out after `lock`, also while the handler runs: a job that takes longer is given to another
    worker."""
    events_max_len: int | None = None
    """About how many events the queue's stream keeps; None leaves what is set (10000)."""
    metrics_minutes: int | None = None
    """Keep counts of finished jobs for this many minutes; None counts nothing. The same as Node's `maxDataPoints`."""
    scheduler_zone: str = LOCAL
    """Time zone of schedules that name none; `local` is this machine's, which is what Node takes."""
    clock_offset_ms: int = 0
    """Moves the server's clock as this worker sees it. For tests."""

    @classmethod
    def read(cls, given: Mapping[str, Any], of: str = "Worker") -> WorkerOptions:
        """From what a caller wrote, without the own arguments of the class `of`. Raises InvalidOption for a wrong
        value, and for a wrong name with the nearest right one."""
        values: dict[str, Any] = {}
        for name, value in given.items():
            own = _FIELDS.get(name)
            if own is None:
                known, snake = [*WorkerArguments.__annotations__, *_OWN.get(of, _OWN["Worker"])], to_snake(name)
                near = [_OTHER_NAMES[snake]] if snake in _OTHER_NAMES else difflib.get_close_matches(snake, known, 1)
                raise InvalidOption(name, f"an argument of {of}", value, suggestion=near[0] if near else None)
            is_duration = own != name and value is not None
            values[own] = to_ms(name, value) if is_duration else value
        return cls(**values)

    def __post_init__(self) -> None:
        read_concurrency(self.concurrency)
        check_int("lock", self.lock_ms, minimum=100)
        check_int("stalled_interval", self.stalled_interval_ms, minimum=1)
        # Redis 6.2 blocks for ever when asked to block for less.
        check_int("drain_delay", self.drain_delay_ms, minimum=2)
        is_known = isinstance(self.processes, bool | ChildLimits)
        require("processes", is_known, "True, False or ChildLimits", self.processes)
        require("batch", self.batch is None or isinstance(self.batch, BatchOptions), "a BatchOptions", self.batch)
        require("timeouts", isinstance(self.timeouts, Mapping), "a mapping from job names to times", self.timeouts)
        for name, limit in self.timeouts.items():
            require("timeouts", isinstance(name, str), "names of jobs", name)
            to_ms(f"timeouts.{name}", limit, minimum=1)
        require(
            "timeouts", not self.timeouts or self.batch is None, "none with batch: its jobs run together", self.timeouts
        )
        for name in ("timeout", "max_block", "close_timeout"):
            value = getattr(self, f"{name}_ms")
            if value is not None:
                check_int(name, value, minimum=0 if name == "close_timeout" else 1)
        if self.max_lonely_deaths is not None:
            check_int("max_lonely_deaths", self.max_lonely_deaths, minimum=1)
        if self.max_started_attempts is not None:
            check_int("max_started_attempts", self.max_started_attempts, minimum=1)
        for name in ("skip_stalled_check", "skip_lock_renewal"):
            require(name, isinstance(getattr(self, name), bool), "True or False", getattr(self, name))
        if self.events_max_len is not None:
            check_int("events_max_len", self.events_max_len, minimum=1)
        if self.metrics_minutes is not None:
            check_int("metrics_minutes", self.metrics_minutes, minimum=1, maximum=100_000)
        check_int("clock_offset_ms", self.clock_offset_ms, minimum=-MAX_MS)
        require("scheduler_zone", isinstance(self.scheduler_zone, str), "a time zone's name", self.scheduler_zone)
        find_zone(self.scheduler_zone)
        check_retention("remove_on_complete", self.remove_on_complete)
        check_retention("remove_on_fail", self.remove_on_fail)
        counts = self.count_stalls_as_attempts
        require("count_stalls_as_attempts", isinstance(counts, bool), "True or False", counts)
        require("limit", self.limit is None or isinstance(self.limit, RateLimit), "a RateLimit", self.limit)

    @property
    def most_concurrency(self) -> int:
        """What `concurrency` may come to."""
        return most_of(self.concurrency, processes=bool(self.processes))

    @property
    def jobs_per_slot(self) -> int:
        """How many jobs one unit of concurrency holds."""
        return 1 if self.batch is None else self.batch.size

    @property
    def close_after_s(self) -> float:
        return (self.lock_ms if self.close_timeout_ms is None else self.close_timeout_ms) / 1000

    @property
    def block_limit_ms(self) -> int:
        return max(10 * self.lock_ms, 300_000) if self.max_block_ms is None else self.max_block_ms

    @property
    def timeouts_s(self) -> dict[str, float]:
        return {name: to_ms(f"timeouts.{name}", limit) / 1000 for name, limit in self.timeouts.items()}

    @property
    def timeout_s(self) -> float | None:
        return None if self.timeout_ms is None else self.timeout_ms / 1000


_OWN: Final = {"Worker": ("connection", "prefix"), "Taker": ("connection", "prefix", "ahead", "on_lost")}
"""What they take besides `WorkerArguments`, for the hint only."""
_OTHER_NAMES: Final = {"lock_duration": "lock", "limiter": "limit", "max_stalled_count": "max_lonely_deaths"}
"""Words of other clients, for the hint only."""
_FIELDS: Final = {
    each.name if each.name == "clock_offset_ms" else each.name.removesuffix("_ms"): each.name
    for each in fields(WorkerOptions)
}
"""Callers write durations without a unit, as milliseconds or as timedelta; here the name says it."""
