"""What the server made of outcomes: its codes, and what follows from them.

In: outcomes that were sent, with one code each. Out: reports, jobs whose lock we no longer hold, and outcomes that must
be sent once more. Elsewhere: sending (`driver`), the codes (`exchange`, `bullpen.wire.lua.exchange`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from bullpen._kernel.logs import get_logger
from bullpen._kernel.outcome import Completed, Failed, Outcome, Raised
from bullpen.errors import ConnectionLost, JobLockLost, PermanentError, ServerRefused
from bullpen.queue.actions import AsyncActions
from bullpen.queue.dead_letters.entry import DeadLetterWriter
from bullpen.queue.job import Job
from bullpen.redis.client import Door
from bullpen.wire.keys import QueueKeys
from bullpen.worker import keepalive
from bullpen.worker.exchange import (
    DONE,
    DONE_WITHOUT_LETTER,
    FAILED_CHILDREN,
    NO_JOB,
    NO_LOCK,
    PENDING_CHILDREN,
    REFUSED,
    ExchangeReply,
    JobSettlement,
    new_settlement,
)
from bullpen.worker.handlers import OnEnd
from bullpen.worker.reports import Reports
from bullpen.worker.runs import JobRuns
from bullpen.worker.tally import Tally

logger = get_logger("bullpen.worker")

_CODE_TEXT: Final = {
    REFUSED: "the server refused it; the job returns to the queue when its lock expires",
    NO_LOCK: "its lock expired and another worker may have it",
    -3: "it is no longer active",
    -6: "another worker has it",
    -20: "the server could not write it; the job returns to the queue when its lock expires",
}


class JobSettling:
    """Of one worker."""

    wake: Callable[[], None]

    def __init__(
        self,
        keys: QueueKeys,
        lock_ms: int,
        actions: AsyncActions,
        door: Door,
        dead_letters: DeadLetterWriter | None,
        reports: Reports,
        runs: JobRuns,
        on_end: OnEnd | None,
        tally: Tally | None = None,
    ) -> None:
        """`on_end`: who wants to know of every job when its outcome is stored, or why it is not."""
        self._on_end, self._tally = on_end, tally
        self._keys, self._lock_ms, self._actions, self._door = keys, lock_ms, actions, door
        self._dead_letters, self._reports, self._runs = dead_letters, reports, runs
        self.rounds = 0
        """How often outcomes were answered."""
        self.unlocked: list[JobSettlement] = []
        """Their locks had run out when they were to be settled."""

    def on_codes(self, settlements: list[JobSettlement], reply: ExchangeReply) -> None:
        self.rounds += 1
        is_told, locked, on_end = self._reports.are_wanted("completed"), self._runs.locked, self._on_end
        if (tally := self._tally) is not None:
            tally.note(settlements, reply.codes, reply.now_ms)
        for settlement, code in zip(settlements, reply.codes, strict=True):
            job, outcome = settlement
            if code != DONE or type(outcome) is not Completed:
                self._on_code(job, outcome, code, reply.now_ms)
                continue
            # Nearly all of them: straight through, without a call per job.
            if locked.get(job.id) is job:
                del locked[job.id]
            if is_told:
                self._reports.tell_completed(job, outcome, reply.now_ms)
            if on_end is not None:
                on_end(job, None)

    def _on_code(self, job: Job, outcome: Outcome, code: int, now_ms: int) -> None:
        if self._tally is not None:
            self._tally.note_other(job, outcome, DONE if code == DONE_WITHOUT_LETTER else code, now_ms)
        if code in (PENDING_CHILDREN, FAILED_CHILDREN):
            self._refuse_completion(job, code)
            return
        if code == NO_LOCK and self._runs.locked.get(job.id) is job:
            self.unlocked.append(new_settlement((job, outcome)))
            self.wake()
            return
        self._runs.forget_lock(job)
        if code == DONE_WITHOUT_LETTER:
            code = DONE
            reason = "its queue cannot be written; a later sweep tries again"
            logger.error(
                "Failed to send job to DLQ: %s (queue %r, job %r)",
                *(reason, self._keys.name, job.id),
                extra=job.log_fields(),
            )
        elif (
            code == DONE
            and self._dead_letters is not None
            and isinstance(outcome, Failed)
            and self._dead_letters.wants(outcome)
        ):
            logger.warning(
                "Job sent to DLQ: job %r of queue %r is in %r",
                *(job.id, self._keys.name, self._dead_letters.name),
                extra=job.log_fields(),
            )
        if code not in (DONE, REFUSED):
            self._drop(job, code)
            return
        if code == REFUSED:
            self._reports.forget(job)
        else:
            self._reports.tell_outcome(job, outcome, now_ms)
        if self._on_end is not None:
            refused = JobLockLost(self._keys.name, job.id, 0, _CODE_TEXT[REFUSED]) if code == REFUSED else None
            self._on_end(job, refused)

    async def retake(self) -> None:
        """The locks of finished jobs had run out: nobody could renew them for too long. While nothing has happened to
        such a job meanwhile its lock is taken again, and the outcome counts; else it is dropped."""
        settlements = self.unlocked.copy()
        self.unlocked.clear()
        args = keepalive.renew_arguments(self._keys, self._lock_ms, (job for job, _ in settlements))
        try:
            lost, retaken, gone, _ = await self._actions.evaluate("renew", [self._keys.stalled], args)
        except ServerRefused as error:
            self._reports.tell_error(error)
            lost, retaken, gone = [job.id.encode("utf-8", "surrogateescape") for job, _ in settlements], [], []
        except ConnectionLost:
            if self._door.closed:
                raise
            self.unlocked += settlements  # the call has waited long enough between its own attempts
            return
        if retaken:
            keepalive.tell_retaken(self._keys.name, len(retaken))
        for settlement in settlements:
            if (raw_id := settlement.job.id.encode("utf-8", "surrogateescape")) in lost:
                self._runs.forget_lock(settlement.job)
                self._drop(settlement.job, NO_JOB if raw_id in gone else NO_LOCK)
            else:
                self._runs.settle(*settlement)

    def _drop(self, job: Job, code: int) -> None:
        why = _CODE_TEXT.get(code, f"code {code}")
        error = JobLockLost(self._keys.name, job.id, 0, why, is_gone=code == NO_JOB)
        self._reports.tell_lock_lost(job, error)
        if self._tally is not None:
            self._tally.locks_lost += 1
        if self._on_end is not None:
            self._on_end(job, error)

    def _refuse_completion(self, job: Job, code: int) -> None:
        """The script would not complete a parent. Pending children: the handler should have waited; failed ones: it
        must fail."""
        error: Exception = PermanentError("has failed children")
        if code == PENDING_CHILDREN:
            error = RuntimeError("has pending children; raise WaitForChildren to wait for them")
        self._runs.settle(job, self._runs.judge(job, Raised(error)))
