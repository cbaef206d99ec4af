"""What the jobs of one worker did, counted where their outcomes are confirmed.

In: settled jobs. Out: exact numbers of jobs that ended, and of at most so many in a while their names, how long they
waited and how long they ran. Made for the hot path: at full load a job costs a few instructions, because the times of
most jobs are not looked at; a worker with little to do is recorded exactly.
Elsewhere: what becomes of the numbers (`bullpen.ops.recorder`), how they are stored (`bullpen.queue.history`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bullpen._kernel.outcome import Completed, Failed, Outcome, Retry
from bullpen.queue.history import DONE, FAILED, RETRIED, RUN, SAMPLED, WAIT, bucket_of
from bullpen.queue.job import Job
from bullpen.wire.cancels import reason_in
from bullpen.worker.exchange import DONE as IS_DONE
from bullpen.worker.exchange import JobSettlement

BUDGET: Final = 500
"""Jobs that are looked at between two calls of `take`."""
_MOST_NAMES: Final = 20
_OTHER: Final = "other"

Counts = dict[int, int]


class Tally:
    """Of one worker. Not for several threads."""

    __slots__ = ("_budget", "_by_name", "_failed", "_left", "_retried", "_settled", "locks_lost")

    def __init__(self, budget: int = BUDGET) -> None:
        """`budget`: how many jobs are looked at between two calls of `take`."""
        self._settled = self._failed = self._retried = self.locks_lost = 0
        self._left = self._budget = budget
        self._by_name: dict[str, Counts] = {}

    def note(self, settlements: Sequence[JobSettlement], codes: Sequence[int], now_ms: int) -> None:
        """One answer of the server. Those that did not simply succeed come to `note_other` too."""
        self._settled += len(settlements)
        if self._left > 0:
            for (job, outcome), code in zip(settlements, codes, strict=True):
                if code == IS_DONE and type(outcome) is Completed:
                    self._look(job, DONE, now_ms)

    def note_other(self, job: Job, outcome: Outcome, code: int, now_ms: int) -> None:
        """One that `note` counted as success, and that was none."""
        self._settled -= 1
        if code != IS_DONE:
            return
        if isinstance(outcome, Failed):
            if reason_in(outcome.reason) is None:  # somebody's wish is no failure
                self._failed += 1
                self._look(job, FAILED, now_ms)
        elif isinstance(outcome, Retry):
            self._retried += 1
            self._look(job, RETRIED, now_ms)

    def _look(self, job: Job, what: int, now_ms: int) -> None:
        if self._left <= 0:
            return
        self._left -= 1
        name, record = job.name, job.record
        counts = self._by_name.get(name)
        if counts is None:
            if len(self._by_name) >= _MOST_NAMES:
                name = _OTHER
            counts = self._by_name.setdefault(name, {})
        began_ms = record.processed_on
        counts[what] = counts.get(what, 0) + 1
        counts[SAMPLED] = counts.get(SAMPLED, 0) + 1
        place = RUN + bucket_of(now_ms - began_ms)
        counts[place] = counts.get(place, 0) + 1
        if record.attempts_started <= 1:  # when a retry became due is not known
            place = WAIT + bucket_of(began_ms - record.due_ms)
            counts[place] = counts.get(place, 0) + 1

    def take(self) -> dict[str, Counts]:
        """What there is since the last call, by name; under "" the sum of all, exact but for times."""
        by_name, self._by_name = self._by_name, {}
        done, failed, retried = self._settled, self._failed, self._retried
        self._settled = self._failed = self._retried = 0
        self._left = self._budget
        if not (done or failed or retried):
            return {}
        total: Counts = {}
        for counts in by_name.values():
            for place, count in counts.items():
                total[place] = total.get(place, 0) + count
        exact = {DONE: done, FAILED: failed, RETRIED: retried}
        total = {**total, **exact}
        return {"": {place: count for place, count in total.items() if count > 0}, **by_name}
