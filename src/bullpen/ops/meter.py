"""Metrics of jobs for OpenTelemetry, under the names that Node's library gives them.

In: the meter provider of the program (the global one unless given). Out: counters of what became of jobs and how long
they ran, as npm `bullmq` records them with a telemetry meter, so that one chart shows workers of both languages. Needs
the extra `tracing`. Elsewhere: our own metrics for Prometheus (`metrics`), spans (`tracing`).
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from bullpen import _version
from bullpen._kernel import telemetry
from bullpen.errors import MissingExtra
from bullpen.ops.metrics import MOST_NAMES, OTHER_NAMES
from bullpen.queue.job import Job

if TYPE_CHECKING:
    from opentelemetry import metrics

    from bullpen.queue import Queue

__all__ = ["JobMeter", "install_meter"]

QUEUE: Final = "bullmq.queue.name"
JOB: Final = "bullmq.job.name"
STATE: Final = "bullmq.job.state"
QUEUE_STATE: Final = "bullmq.queue.jobs.state"
COUNTERS: Final = {
    "completed": "bullmq.jobs.completed",
    "failed": "bullmq.jobs.failed",
    "delayed": "bullmq.jobs.delayed",
    "retried": "bullmq.jobs.retried",
    "waiting": "bullmq.jobs.waiting",
    "waiting-children": "bullmq.jobs.waiting_children",
}
"""By what became of a job: a retry after a pause is `delayed`, one without is `retried`."""
DURATION: Final = "bullmq.job.duration"
DEPTH: Final = "bullmq.queue.jobs"
_MOST_RUNNING: Final = 100_000


def install_meter(provider: metrics.MeterProvider | None = None) -> JobMeter:
    """Record from now on with the program's OpenTelemetry set-up, until the meter that is returned is closed."""
    try:
        from opentelemetry import metrics
    except ImportError:
        raise MissingExtra("tracing", "metrics with OpenTelemetry") from None
    return JobMeter(metrics.get_meter("bullpen", _version.__version__, provider))


class JobMeter:
    """What the workers of this process do, told to OpenTelemetry."""

    def __init__(self, meter: metrics.Meter) -> None:
        self._counters = {
            state: meter.create_counter(name, unit="1", description=f"Number of jobs {state}")
            for state, name in COUNTERS.items()
        }
        self._duration = meter.create_histogram(DURATION, unit="ms", description="Job processing duration")
        self._depth = meter.create_gauge(DEPTH, unit="{jobs}", description="Number of jobs in the queue by state")
        self._lock = threading.Lock()
        self._begun: dict[tuple[str, str, int], float] = {}
        self._names: dict[str, set[str]] = defaultdict(set)
        self._unsubscribe = telemetry.subscribe(self._on_event)

    def close(self) -> None:
        """Record no more. Safe to call twice."""
        self._unsubscribe()

    async def record_counts(self, queue: Queue) -> dict[str, int]:
        """Record how many jobs of a queue are in each state, and return the numbers; Node's `recordJobCountsMetric`."""
        counted = asdict(await queue.counts())
        counts = {state.replace("_", "-"): count for state, count in counted.items()}
        for state, count in counts.items():
            self._depth.set(count, {QUEUE: queue.name, QUEUE_STATE: state})
        return counts

    def _on_event(self, event: str, fields: dict[str, Any]) -> None:
        if not event.startswith("job.") or not fields.get("details") or not isinstance(fields["details"][0], Job):
            return
        queue, details = fields["queue"], fields["details"]
        job: Job = details[0]
        key = (queue, job.id, job.attempts_started)
        with self._lock:
            if event == "job.active":
                if len(self._begun) < _MOST_RUNNING:
                    self._begun[key] = time.monotonic()
                return
            if event == "job.lock_lost":
                self._begun.pop(key, None)
            if (state := _state_after(event, fields)) is None:
                return
            began = self._begun.pop(key, None)
            attributes = {QUEUE: queue, JOB: self._bounded(queue, job.name), STATE: state}
        self._counters[state].add(1, attributes)
        if began is not None:
            self._duration.record((time.monotonic() - began) * 1000, attributes)

    def _bounded(self, queue: str, name: str) -> str:
        """Whoever puts an id into the names of jobs must not fill the memory of this process."""
        names = self._names[queue]
        if name not in names:
            if len(names) >= MOST_NAMES:
                return OTHER_NAMES
            names.add(name)
        return name


def _state_after(event: str, fields: dict[str, Any]) -> str | None:
    match event:
        case "job.completed":
            return "completed"
        case "job.failed":
            return "failed"
        case "job.retrying":
            return "delayed" if fields["details"][2] else "retried"
        case "job.returned":
            returned_to: str | None = fields.get("returned_to")
            return returned_to
        case _:
            return None
