"""The log lines of a worker's jobs.

In: what a worker reports of a job. Out: one line each. A failed attempt is a warning that says when the next one is; a
final failure is an error with the traceback; a lost lock, a stall and a suspect are warnings; start and end are for
debugging. Fields of the job stand in `extra`, under the names of every log record of ours. Elsewhere: hiding secrets
(`bullpen._kernel.logs`), callbacks and telemetry (`_reports`).
"""

from __future__ import annotations

import logging
import time

from bullpen._kernel.logs import get_logger
from bullpen._kernel.outcome import Failed, Retry
from bullpen.errors import JobLockLost
from bullpen.queue.job import Job

logger = get_logger("bullpen.worker")


class JobLogs:
    """What one worker logs of its jobs."""

    def __init__(self, queue: str) -> None:
        self._queue = queue
        self._started: dict[Job, float] = {}  # only while starts and ends are logged

    def started(self, job: Job) -> None:
        if logger.isEnabledFor(logging.DEBUG):
            self._started[job] = time.monotonic()
            logger.debug(
                "job %r (%s) of queue %r starts, attempt %d of %d",
                *(job.id, job.name, self._queue, job.attempts_made + 1, job.opts.attempts),
                extra=job.log_fields(),
            )

    def ended(self, job: Job, how: str) -> None:
        """The run is over. Of one that began before starts were logged nobody knows how long it took."""
        started = self._started.pop(job, None)
        if started is not None:
            took_ms = round((time.monotonic() - started) * 1000)
            logger.debug(
                "job %r (%s) of queue %r %s after %d ms",
                *(job.id, job.name, self._queue, how, took_ms),
                extra={**job.log_fields(), "durationMs": took_ms},
            )

    def retrying(self, job: Job, outcome: Retry) -> None:
        self.ended(job, "failed")
        if not outcome.is_logged:
            logger.warning(
                "job %r (%s) of queue %r failed in attempt %d of %d, the next one is %s: %s",
                *(job.id, job.name, self._queue, job.attempts_made + 1, job.opts.attempts),
                f"in {outcome.delay_ms / 1000:g} s" if outcome.delay_ms else "due at once",
                outcome.reason,
                extra={**job.log_fields(), "error": outcome.reason, "retryInMs": outcome.delay_ms},
            )

    def failed(self, job: Job, outcome: Failed) -> None:
        self.ended(job, "failed finally")
        if not outcome.is_logged:
            logger.error(
                "job %r (%s) of queue %r failed finally in attempt %d of %d (%s): %s",
                *(job.id, job.name, self._queue, job.attempts_made + 1, job.opts.attempts),
                *(outcome.cause.value, outcome.reason),
                exc_info=outcome.error,
                extra={**job.log_fields(), "error": outcome.reason, "cause": outcome.cause.value},
            )

    def lock_lost(self, job: Job, error: JobLockLost) -> None:
        self.ended(job, "lost its lock")
        logger.warning("%s", error, extra=job.log_fields())

    def stalled(self, job_id: str) -> None:
        logger.warning(
            "job %r of queue %r stalled and is back in line; its worker died or lost its lock",
            *(job_id, self._queue),
            extra={"jobId": job_id, "queue": self._queue},
        )

    def suspect(self, job: Job) -> None:
        logger.warning(
            "job %r (%s) of queue %r stalled %d times and may have killed its workers; it runs alone now",
            *(job.id, job.name, self._queue, job.stalled_count),
            extra={**job.log_fields(), "stalledCount": job.stalled_count},
        )
