"""The log lines of a worker's jobs.

In: what a worker reports of a job. Out: one line each. A failed attempt is a warning that says when the next one is; a
final failure is an error with the traceback; a lost lock, a stall and a suspect are warnings; start and end are for
debugging. Fields of the job stand in `extra`, under the names of all log records. Elsewhere: hiding secrets
(`bullpen._kernel.logs`), callbacks and telemetry (`bullpen.worker.reports`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from typing import Final

from bullpen._kernel.logs import get_logger
from bullpen._kernel.outcome import Cause, Failed, Retry
from bullpen.errors import JobLockLost
from bullpen.queue.job import Job

logger = get_logger("bullpen.worker")


_MOST_DROPPED: Final = 10
"""Lines about ids without a job that one worker writes per minute: a foreign program may leave thousands."""
_DROPPED: Final = {
    "gone": "no job has this id; it was deleted by hand or evicted",
    "name": "its hash has no name, so no client can run it; the hash is left as it is",
    "type": "its key is not a hash, so it is no job; the key is left as it is",
}


def read_dropped(flat: Sequence[bytes]) -> list[tuple[str, str]]:
    """Ids without a job, each with the type of its key, as scripts report them."""
    texts = [raw.decode("utf-8", "replace") for raw in flat]
    return list(zip(texts[::2], texts[1::2], strict=True))


class JobLogs:
    """What one worker logs of its jobs."""

    def __init__(self, queue: str) -> None:
        self._queue = queue
        self._dropped_since, self._dropped = -math.inf, 0
        self._started: dict[Job, float] = {}  # only while starts and ends are logged

    def started(self, job: Job) -> None:
        if logger.isEnabledFor(logging.DEBUG):
            self._started[job] = time.monotonic()
            logger.debug(
                "job %r (%s) of queue %r starts, %s",
                *(job.id, job.name, self._queue, _attempt(job)),
                extra=job.log_fields(),
            )

    def ended(self, job: Job, how: str) -> None:
        """The run is over. Its duration is unknown when it started before starts were logged."""
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
                "job %r (%s) of queue %r failed in %s, the next one is %s: %s",
                *(job.id, job.name, self._queue, _attempt(job)),
                f"in {outcome.delay_ms / 1000:g} s" if outcome.delay_ms else "due at once",
                _with_type(outcome),
                extra={**job.log_fields(), "error": outcome.reason, "retryInMs": outcome.delay_ms},
            )

    def failed(self, job: Job, outcome: Failed) -> None:
        self.ended(job, "failed finally")
        if not outcome.is_logged:
            logger.log(
                logging.INFO if outcome.cause is Cause.CANCELLED else logging.ERROR,  # somebody wanted it
                "job %r (%s) of queue %r failed finally in %s (%s): %s",
                *(job.id, job.name, self._queue, _attempt(job)),
                *(outcome.cause.value, _with_type(outcome)),
                exc_info=outcome.error,
                extra={**job.log_fields(), "error": outcome.reason, "cause": outcome.cause.value},
            )

    def lock_lost(self, job: Job, error: JobLockLost) -> None:
        self.ended(job, "lost its lock")
        logger.warning("%s", error, extra=job.log_fields())

    def stalled(self, job_id: str, name: str) -> None:
        logger.warning(
            "job %r (%s) of queue %r stalled and was returned to the queue; its worker died or lost its lock",
            *(job_id, name, self._queue),
            extra={"jobId": job_id, "jobName": name, "queue": self._queue},
        )

    def dropped(self, dropped: Sequence[tuple[str, str]]) -> None:
        now = time.monotonic()
        if now - self._dropped_since > 60:
            self._dropped_since, self._dropped = now, 0
        for job_id, why in dropped:
            self._dropped += 1
            if self._dropped > _MOST_DROPPED:
                continue
            rest = "; further ones within this minute are not logged" if self._dropped == _MOST_DROPPED else ""
            logger.error(
                "id %r was dropped from queue %r: %s%s",
                *(job_id, self._queue, _DROPPED.get(why, why), rest),
                extra={"jobId": job_id, "queue": self._queue},
            )

    def suspect(self, job: Job) -> None:
        logger.warning(
            "job %r (%s) of queue %r stalled %d times and may have killed its workers; from now on it runs alone",
            *(job.id, job.name, self._queue, job.stalled_count),
            extra={**job.log_fields(), "stalledCount": job.stalled_count},
        )


def _attempt(job: Job) -> str:
    """Which attempt this is. A job that was retried may have used all of its own, and another client may
    have stored any number."""
    number, most = job.attempts_made + 1, job.opts.attempts
    return f"attempt {number} of {most}" if number <= most else f"an attempt beyond its {most}"


def _with_type(outcome: Retry | Failed) -> str:
    """The reason with the error's type in front: "'id'" alone says nothing, "KeyError: 'id'" does."""
    name = outcome.error_type
    return outcome.reason if not name or outcome.reason == name else f"{name}: {outcome.reason}"
