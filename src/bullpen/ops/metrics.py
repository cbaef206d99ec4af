"""The numbers of queues and workers.

Counters and histograms show what this process did, from its telemetry; gauges are read from the server when somebody
asks. A dead-letter queue has no worker, so its depth is what waits in it. In: telemetry, and the queues of an app. Out:
plain records. Elsewhere: the numbers of the outbox and of messages, which their own parts count; the text format
(`exposition`).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from bullpen._kernel import telemetry
from bullpen._kernel.clock import ServerClock
from bullpen._kernel.histogram import Histogram
from bullpen.errors import BullpenError
from bullpen.ports.metrics import Kind, Metric, Sample
from bullpen.queue import Queue
from bullpen.queue.job import Job
from bullpen.wire.cancels import reason_in
from bullpen.worker import Worker

__all__ = ["BUCKETS_S", "LateWakeups", "QueueMetrics", "WorkerMetrics"]

BUCKETS_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1_800.0),
)
_RETRY_BUCKETS: Final = (0.0, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0)

_WORKER_METRICS: Final[dict[str, tuple[Kind, str]]] = {
    "bullpen_job_duration_seconds": ("histogram", "Time from taking a job until its outcome was stored."),
    "bullpen_job_wait_seconds": ("histogram", "Time from when a job could run until it was taken."),
    "bullpen_job_retries": ("histogram", "Failed attempts before a job ended."),
    "bullpen_jobs_completed_total": ("counter", "Jobs that succeeded."),
    "bullpen_jobs_failed_total": ("counter", "Jobs that failed finally, without cancelled jobs."),
    "bullpen_jobs_cancelled_total": ("counter", "Jobs that were cancelled while they ran."),
    "bullpen_jobs_retried_total": ("counter", "Failed attempts that will be tried again."),
    "bullpen_jobs_stalled_total": ("counter", "Jobs whose worker died or froze."),
    "bullpen_jobs_lock_lost_total": ("counter", "Runs that lost their lock."),
    "bullpen_jobs_returned_total": ("counter", "Jobs returned to the queue without an attempt counted."),
    "bullpen_worker_errors_total": ("counter", "Errors of workers themselves, not of jobs."),
    "bullpen_schedules_refused_total": (
        "counter",
        "Scheduled jobs returned to the queue because their next time cannot be computed.",
    ),
    "bullpen_schedules_skipped_total": ("counter", "Scheduled jobs left out by a policy of their schedule."),
}
_COUNTED: Final = {
    "job.completed": "bullpen_jobs_completed_total",
    "job.failed": "bullpen_jobs_failed_total",
    "job.cancelled": "bullpen_jobs_cancelled_total",
    "job.retrying": "bullpen_jobs_retried_total",
    "job.stalled": "bullpen_jobs_stalled_total",
    "job.lock_lost": "bullpen_jobs_lock_lost_total",
    "job.returned": "bullpen_jobs_returned_total",
    "worker.error": "bullpen_worker_errors_total",
    "worker.scheduler_refused": "bullpen_schedules_refused_total",
    "worker.scheduler_skipped": "bullpen_schedules_skipped_total",
}
_NAMED: Final = {
    "job.completed": "completed",
    "job.failed": "failed",
    "job.retrying": "retried",
    "job.cancelled": "cancelled",
}
_MOST_REMEMBERED: Final = 100_000
MOST_NAMES: Final = 50
"""Names of jobs with counters of their own, per queue: ids inside names must not fill a
Prometheus."""
OTHER_NAMES: Final = "other"


class WorkerMetrics:
    """What the workers of this process did and do. Listens until closed."""

    def __init__(
        self,
        workers: Callable[[], Iterable[Worker]],
        names: Callable[[], Mapping[str, Iterable[str]]] = dict,
    ) -> None:
        """`names`: those of the jobs of a queue that are known before one of them runs."""
        self._workers, self._names = workers, names
        self._lock = threading.Lock()
        self._counts: dict[str, Counter[str]] = defaultdict(Counter)
        self._histograms: dict[str, dict[str, Histogram]] = defaultdict(dict)
        self._by_name: dict[str, dict[str, defaultdict[str, float]]] = defaultdict(dict)
        self._begun: dict[tuple[str, str, int], float] = {}
        self._unsubscribe = telemetry.subscribe(self._on_event)

    def close(self) -> None:
        """Stop listening. Safe to call twice."""
        self._unsubscribe()

    async def collect(self) -> Sequence[Metric]:
        workers = list(self._workers())
        # From 0 on: a counter that begins with its first failure hides that one from `increase` and `rate`.
        known = dict.fromkeys((worker.queue_name for worker in workers), 0)
        with self._lock:
            for queue, names in self._names().items():
                for name in names if queue in known else ():
                    self._named(queue, name)
            counted = [
                Metric(name, kind, text, self._samples(name, kind, known))
                for name, (kind, text) in _WORKER_METRICS.items()
            ]
            counted += self._name_metrics()
        return [
            *counted,
            Metric(
                "bullpen_worker_running_jobs",
                "gauge",
                "Jobs being handled now.",
                [Sample({"queue": worker.queue_name}, worker.running) for worker in workers],
            ),
            Metric(
                "bullpen_worker_utilisation",
                "gauge",
                "Share of the worker's slots that are taken, 0 to 1.",
                [Sample({"queue": worker.queue_name}, worker.utilisation) for worker in workers],
            ),
            Metric(
                "bullpen_worker_concurrency",
                "gauge",
                'Jobs, or batches, that the worker runs at the same time at most; changes with concurrency="auto".',
                [Sample({"queue": worker.queue_name}, worker.concurrency) for worker in workers],
            ),
            Metric(
                "bullpen_worker_alive",
                "gauge",
                "1 if the worker runs and its loop and keepalive answer, else 0.",
                [Sample({"queue": worker.queue_name}, float(worker.is_alive)) for worker in workers],
            ),
            Metric(
                "bullpen_worker_ready",
                "gauge",
                "1 if the worker took or polled recently, or is full, limited or paused, else 0.",
                [Sample({"queue": worker.queue_name}, float(worker.is_ready)) for worker in workers],
            ),
        ]

    def _samples(self, name: str, kind: Kind, known: dict[str, int]) -> list[Sample]:
        if kind == "histogram":
            for queue in known:
                self._histogram(name, queue)
            return [
                Sample({"queue": queue}, values.sum, values.cumulative(), values.count)
                for queue, values in sorted(self._histograms[name].items())
            ]
        return [Sample({"queue": queue}, count) for queue, count in sorted({**known, **self._counts[name]}.items())]

    def _name_metrics(self) -> list[Metric]:
        outcomes, seconds = [], []
        for queue, names in sorted(self._by_name.items()):
            for name, values in sorted(names.items()):
                labels = {"queue": queue, "name": name}
                outcomes += [Sample({**labels, "outcome": each}, values[each]) for each in _NAMED.values()]
                seconds.append(Sample(labels, values["seconds"]))
        return [
            Metric("bullpen_named_jobs_total", "counter", "Attempts by name of the job and outcome.", outcomes),
            Metric("bullpen_named_jobs_seconds_total", "counter", "Time of attempts by name of the job.", seconds),
        ]

    def _named(self, queue: str, name: str) -> defaultdict[str, float]:
        """The counts of a name, or of all further ones once there are too many."""
        names = self._by_name[queue]
        if name not in names and len(names) >= MOST_NAMES:
            name = OTHER_NAMES
        return names.setdefault(name, defaultdict(float))

    def _on_event(self, event: str, fields: dict[str, Any]) -> None:
        if not event.startswith(("job.", "worker.")) or "queue" not in fields:
            return
        queue: str = fields["queue"]
        details = fields.get("details") or (None,)
        job = details[0] if isinstance(details[0], Job) else None
        with self._lock:
            if event == "job.active" and job is not None:
                self._take(queue, job)
                return
            if event == "job.failed" and _was_cancelled(details):
                event = "job.cancelled"  # somebody's wish is no failure that an alarm should tell of
            if (name := _COUNTED.get(event)) is not None:
                self._counts[name][queue] += 1
            if job is None:
                return
            named = self._named(queue, job.name) if event in _NAMED else None
            if named is not None:
                named[_NAMED[event]] += 1
            if (began := self._begun.pop((queue, job.id, job.attempts_started), None)) is not None:
                took_s = time.monotonic() - began
                self._observe("bullpen_job_duration_seconds", queue, took_s)
                if named is not None:
                    named["seconds"] += took_s
            if event in ("job.completed", "job.failed", "job.cancelled"):
                self._observe("bullpen_job_retries", queue, max(0, job.attempts_made - 1))

    def _take(self, queue: str, job: Job) -> None:
        if len(self._begun) < _MOST_REMEMBERED:
            # Each run by itself: the next one of a job may begin before the outcome of the last was confirmed.
            self._begun[queue, job.id, job.attempts_started] = time.monotonic()
        clock: ServerClock | None = getattr(job.actions, "clock", None)
        if clock is not None and job.attempts_made == 0:
            # By the server's clock. When a retry became due is not known: the hash keeps the creation time only.
            waited_ms = max(0, clock.now_ms() - job.record.due_ms)
            self._observe("bullpen_job_wait_seconds", queue, waited_ms / 1000)

    def _observe(self, name: str, queue: str, value: float) -> None:
        self._histogram(name, queue).observe(value)

    def _histogram(self, name: str, queue: str) -> Histogram:
        found = self._histograms[name].get(queue)
        if found is None:
            bounds = _RETRY_BUCKETS if name == "bullpen_job_retries" else BUCKETS_S
            found = self._histograms[name][queue] = Histogram(bounds)
        return found


def _was_cancelled(details: tuple[Any, ...]) -> bool:
    return len(details) > 1 and isinstance(details[1], str) and reason_in(details[1]) is not None


class LateWakeups:
    """Work of this process that only a fallback poll found; see `bullpen._kernel.telemetry`."""

    async def collect(self) -> Sequence[Metric]:
        # From 0 on, so that the first one is an increase.
        counts = {**dict.fromkeys(telemetry.WAITING_LOOPS, 0), **telemetry.late_wakeups()}
        text = "Work that was found by a fallback poll and not by its notification."
        samples = [Sample({"where": where}, count) for where, count in sorted(counts.items())]
        return [Metric("bullpen_late_wakeups_total", "counter", text, samples)]


class QueueMetrics:
    """How much lies in queues, how old the next job is, and whether the server answers; read when asked."""

    def __init__(self, queues: Callable[[], Iterable[Queue]], *, timeout_s: float = 5.0) -> None:
        self._queues = queues
        self._timeout_s = timeout_s

    async def collect(self) -> Sequence[Metric]:
        depth: list[Sample] = []
        oldest: list[Sample] = []
        dead: list[Sample] = []
        up: list[Sample] = []
        for queue in self._queues():
            labels = {"queue": queue.name}
            try:
                async with asyncio.timeout(self._timeout_s):
                    counts = await queue.counts()
                    age_ms = await queue.oldest_age_ms()
                    letters = await queue.dead_letters.depth()
            except (BullpenError, TimeoutError):
                # A server that is away must not hide the numbers of everything else.
                up.append(Sample(labels, 0))
                continue
            up.append(Sample(labels, 1))
            depth += [
                Sample({**labels, "state": state}, getattr(counts, state))
                for state in ("waiting", "active", "prioritized", "delayed", "waiting_children", "completed", "failed")
            ]
            oldest.append(Sample(labels, (age_ms or 0) / 1000))
            dead.append(Sample(labels, letters))
        return [
            Metric("bullpen_queue_jobs", "gauge", "Jobs of a queue by state.", depth),
            Metric("bullpen_queue_oldest_waiting_seconds", "gauge", "Age of the next job, 0 if none.", oldest),
            Metric(
                "bullpen_queue_dead_letters", "gauge", "Dead letters that were neither redriven nor discarded.", dead
            ),
            Metric("bullpen_redis_up", "gauge", "1 if the queue's server answered, else 0.", up),
        ]
