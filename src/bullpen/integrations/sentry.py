"""Report failed jobs to Sentry: one issue per final failure, with the job's tags, breadcrumbs and trace.

In: an app, and a Sentry that the program has set up. Out: a transaction per job, and the log line of each final failure
as an event that says whose it is. The line is what makes the event, so failures without an exception (a time limit, a
worker that died, a job that expired) are there too, once, and their texts are scrubbed.
Elsewhere: the line (`bullpen.queue.job_logs`), middleware (`bullpen.worker.around`).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Final

from bullpen.errors import JobSignal, MissingExtra, require

if TYPE_CHECKING:
    from bullpen.app import Bullpen
    from bullpen.queue.job import Job

try:
    import sentry_sdk
    from sentry_sdk.crons import capture_checkin
    from sentry_sdk.scope import add_global_event_processor
except ImportError as error:
    raise MissingExtra("sentry", "reporting to Sentry") from error

__all__ = ["install_sentry", "trace_headers"]

_MOST_REMEMBERED: Final = 1_000
"""Failed runs whose scope waits for their log line."""
_TAGS: Final = {"queue": "queue", "jobName": "job.name", "cause": "job.cause", "tenantId": "tenant"}
_LOGGER: Final = "bullpen.worker"


def install_sentry(app: Bullpen, *, monitors: bool = False) -> None:
    """Report what becomes of this app's jobs; call it once, after `sentry_sdk.init(...)`.

    With `traces_sample_rate`, each job is a transaction of the kind `queue.process`. With `monitors`, each schedule is
    a cron monitor of Sentry with the id of the schedule.
    """
    require("monitors", isinstance(monitors, bool), "True or False", monitors)
    failed = _FailedRuns()
    app.middleware(_watch(failed, monitors=monitors))
    add_global_event_processor(failed.complete)


def trace_headers() -> dict[str, str]:
    """The current trace, to be carried by a job: `meta=JobMeta(headers=trace_headers())`. Its run continues it."""
    traced = {"sentry-trace": sentry_sdk.get_traceparent(), "baggage": sentry_sdk.get_baggage()}
    return {name: value for name, value in traced.items() if value}


class _FailedRuns:
    """Scopes of runs that have just failed: the line about the final failure is written after the run has ended."""

    def __init__(self) -> None:
        self._runs: OrderedDict[tuple[str, str], tuple[sentry_sdk.Scope, Any]] = OrderedDict()

    def remember(self, job: Job, scope: sentry_sdk.Scope, trace: Any) -> None:
        self._runs[job.queue_name, job.id] = scope, trace
        while len(self._runs) > _MOST_REMEMBERED:
            self._runs.popitem(last=False)

    def complete(self, event: Any, hint: Any) -> Any:
        """Add what is known about the job to the event of its log line."""
        extra = event.get("extra") or {}
        if event.get("logger") != _LOGGER or "jobId" not in extra or event.get("level") != "error":
            return event
        found = self._runs.pop((extra.get("queue", ""), extra["jobId"]), None)
        if found is not None:
            scope, trace = found
            event.pop("breadcrumbs", None)  # those of the worker, whatever job they were about
            scope.apply_to_event(event, hint)
            event["contexts"]["trace"] = trace
        tags = {tag: str(extra[name]) for name, tag in _TAGS.items() if extra.get(name)}
        event["tags"] = {**dict(event.get("tags") or {}), **tags}
        event["transaction"] = f"{extra.get('queue')}/{extra.get('jobName')}"
        # By the place of the error if there is one, else by the cause: never by the job's id, which is in the text.
        place = "{{ default }}" if event.get("exception") else str(extra.get("cause"))
        event["fingerprint"] = [event["transaction"], place]
        return event


def _watch(failed: _FailedRuns, *, monitors: bool) -> Callable[[Any], AbstractContextManager[None]]:
    @contextmanager
    def within(job: Job) -> Iterator[None]:
        with sentry_sdk.isolation_scope() as scope:
            scope.clear_breadcrumbs()
            scope.set_tags({"queue": job.queue_name, "job.name": job.name, "job.id": job.id})
            scope.set_context("job", {name: value for name, value in job.log_fields().items() if value is not None})
            with _transaction(job) as transaction, _check_in(job, wanted=monitors):
                try:
                    yield
                except JobSignal:  # it asks for something, and has not failed
                    raise
                except Exception:
                    transaction.set_status("internal_error")
                    failed.remember(job, scope, transaction.get_trace_context())
                    raise

    return within


def _transaction(job: Job) -> Any:
    headers: Mapping[str, Any] = job.meta.headers
    carried = {name: value for name in ("sentry-trace", "baggage") if isinstance(value := headers.get(name), str)}
    name = f"{job.queue_name}/{job.name}"
    transaction = sentry_sdk.continue_trace(
        carried, op="queue.process", name=name, source="task", origin="auto.queue.bullpen"
    )
    started = sentry_sdk.start_transaction(transaction)
    started.set_data("messaging.system", "bullmq")
    started.set_data("messaging.destination.name", job.queue_name)
    started.set_data("messaging.message.id", job.id)
    started.set_data("messaging.message.retry.count", job.attempts_made)
    started.set_data("messaging.message.receive.latency", max(0, job.processed_on - job.record.due_ms))
    return started


@contextmanager
def _check_in(job: Job, *, wanted: bool) -> Iterator[None]:
    slug = job.record.scheduler_id if wanted else None
    if slug is None:
        yield
        return
    began = time.monotonic()
    check_in = capture_checkin(monitor_slug=slug, status="in_progress")
    status = "error"
    try:
        yield
        status = "ok"
    finally:
        capture_checkin(monitor_slug=slug, check_in_id=check_in, status=status, duration=time.monotonic() - began)
