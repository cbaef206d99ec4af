"""Maintain a queue and its jobs: drain, clean, obliterate, and what is done to one job (`changes`) by its id.

In: a queue and what shall happen. Out: how many jobs it happened to, or an error that says why not. Each change is
one atomic script with its events; what touches many jobs goes in steps of a bounded size, so that no call holds up
the server, and continues until it is done. A step whose reply was lost is repeated; repeating changes nothing more, but
what it did may be missing from the count.
Elsewhere: limits (`limits`), pausing (`queue`), dead letters (`bullpen.queue.dead_letters.operations`).
"""

from __future__ import annotations

import math
from datetime import datetime, timedelta
from typing import Any, Final

from bullpen._kernel.duration import check_int, to_ms
from bullpen.errors import InvalidOption, JobStateConflict
from bullpen.queue.base import QueuePart, id_of, traced
from bullpen.queue.cancel import Cancelled
from bullpen.queue.changes import check_finished
from bullpen.queue.children import remove_pending_children
from bullpen.queue.job import Job, Progress
from bullpen.queue.job_logs import JobLogs, read_dropped
from bullpen.queue.orphans import find_orphans, remove_orphans
from bullpen.queue.states import JobState
from bullpen.wire.options import DEFAULT_KEEP_LOGS, WireOptions
from bullpen.wire.records import check_log_line, check_progress

__all__ = ["Maintenance"]

_PER_STEP: Final = 500
"""Jobs that one call moves or removes: each takes 10 to 20 µs of the server's time. The scripts know it too."""
_NOT_PAUSED, _HAS_ACTIVE = -1, -2
_CLEANABLE: Final = {
    JobState.COMPLETED: ("completed",),
    JobState.FAILED: ("failed",),
    JobState.DELAYED: ("delayed",),
    JobState.PRIORITIZED: ("prioritized",),
    JobState.WAITING: ("wait", "paused"),
    JobState.ACTIVE: ("active",),
}


class Maintenance(QueuePart):
    """What one may do to the jobs of a `Queue`. A job is named by its id or given as a Job."""

    # ---- one job ----------------------------------------------------------------------------------------------

    async def change_delay(self, job: str | Job, delay: int | timedelta) -> None:
        """Let a delayed job become due after `delay` (ms or timedelta) from now.

        Raises JobNotFound, or JobStateConflict when it is not delayed (any more).
        """
        await self._ready().changes.change_delay(id_of(job), delay)

    async def change_priority(
        self, job: str | Job, priority: int | None = None, *, urgency: int | None = None, lifo: bool = False
    ) -> None:
        """Give a job another priority (1 runs first, 0 before all others) or urgency (higher runs first).

        A job that waits moves to the end of its new class, or with `lifo` to the front; one that does not wait
        keeps its place and has the new priority when it comes to wait. Raises JobNotFound.
        """
        await self._ready().changes.change_priority(id_of(job), priority, urgency=urgency, lifo=lifo)

    async def promote(self, job: str | Job) -> None:
        """Let a delayed job run now. Raises JobNotFound, or JobStateConflict when it is not delayed (any more)."""
        await self._ready().changes.promote(id_of(job))

    async def retry(self, job: str | Job, *, state: JobState = JobState.FAILED, reset_attempts: bool = False) -> None:
        """Run a failed (or, with `state`, a completed) job again. Its dead letter is removed.

        Without `reset_attempts` it has only those attempts that were left, at least one. Raises JobNotFound, or
        JobStateConflict when it is not in that state (any more).
        """
        await self._ready().changes.retry(id_of(job), state=state, reset_attempts=reset_attempts)

    async def cancel(self, job: str | Job, reason: str | None = None) -> Cancelled:
        """Cancel a job in any state, with a reason for callers that wait for its result.

        One that waits, is delayed or waits for children is failed at once (DONE): it made no attempt, is not retried
        and gets no dead letter, and its parent sees a failed child. A bullpen worker that runs it is asked to stop it
        (REQUESTED): its worker hears of it within half a second. One that runs in a worker of another client ends
        there as it will; it is not tried again. Cancelling twice changes nothing.

        Raises JobNotFound, or JobStateConflict when it has finished, and for the job that a scheduler made last.
        """
        return await self._ready().cancel(id_of(job), reason, clock_offset_ms=self._clock_offset_ms)

    @traced("remove")
    async def remove(self, job: str | Job, *, children: bool = True) -> bool:
        """Delete a job, and with `children` all jobs below it in its flow. False when there was none.

        Raises JobStateConflict, with nothing removed, while it or one of its pending descendants runs, and for the
        job that a scheduler made last (remove the scheduler instead). A flow too large for one step is removed job
        by job from the top: then it may end half way, with the error of a job that began to run.
        """
        return await self._ready().changes.remove(id_of(job), children=children)

    async def remove_unprocessed_children(self, job: str | Job) -> int:
        """Delete the children that a job still waits for, with all below them; those that run, and those that failed
        and hold it up, stay. Returns how many.

        A parent that waited for nothing else is released. Jobs have this too, for use in a handler.
        """
        return await remove_pending_children(
            self._ready(), self._keys.job(id_of(job)), clock_offset_ms=self._clock_offset_ms
        )

    @traced("updateJobProgress")
    async def update_progress(self, job: str | Job, value: Progress) -> None:
        """Report progress of a job by its id, as `Job.progress` does. Raises JobNotFound."""
        await self._ready().update_progress(id_of(job), check_progress(value))

    async def add_log(self, job: str | Job, line: str, *, keep: int | None = None) -> int:
        """Append a line to the log of a job by its id; the oldest beyond `keep` (its own `keep_logs`, else 1000) go.
        Returns how many are kept. Raises JobNotFound."""
        actions, job_id = self._ready(), id_of(job)
        check_log_line(line)
        if keep is None:
            own = WireOptions.parse(await actions.command("HGET", self._keys.job(job_id), "opts")).keep_logs
            keep = DEFAULT_KEEP_LOGS if own is None else own
        return await actions.add_log(job_id, line, check_int("keep", keep, minimum=0))

    async def clear_logs(self, job: str | Job, *, keep: int = 0) -> None:
        """Delete the log lines of a job, all but the newest `keep`. A job that is gone has none."""
        await self._ready().clear_logs(id_of(job), check_int("keep", keep, minimum=0))

    # ---- many jobs --------------------------------------------------------------------------------------------

    @traced("promoteJobs")
    async def promote_all(self, *, count: int | None = None) -> int:
        """Let all delayed jobs run now, each with its priority; the next jobs of schedulers too. Returns how many.

        With `count`, at most this many: those that are due first.
        """
        keys, promoted = self._keys, 0
        left = math.inf if count is None else check_int("count", count, minimum=1)
        logs = JobLogs(keys.name)
        while promoted < left:
            most = int(min(_PER_STEP, left - promoted))
            step, jobs, dropped = await self._ready().evaluate("promote_all", [keys.delayed], [keys.base, most])
            promoted += int(jobs)
            if dropped:
                logs.dropped(read_dropped(dropped))
            if step < most:  # else jobs that are delayed anew would be promoted for ever
                break
        return promoted

    @traced("retryJobs", "producer")
    async def retry_all(
        self,
        state: JobState = JobState.FAILED,
        *,
        count: int | None = None,
        until: datetime | None = None,
        reset_attempts: bool = False,
    ) -> int:
        """Run failed (or completed) jobs again, oldest first. Their dead letters are removed. Returns how many.

        Only those that finished until now, or `until`, so that a job which fails again is not retried for ever; and
        at most `count`.
        """
        keys, finished = self._keys, check_finished(state)
        left = _PER_STEP if count is None else check_int("count", count, minimum=1)
        until_ms: int | str = "" if until is None else _epoch_ms("until", until)
        retried, more = 0, 1
        while more and left > 0:
            until_ms, step, more = await self._ready().evaluate(
                "retry_all",
                [getattr(keys, finished)],
                [
                    *(keys.base, self._clock_offset_ms, finished, until_ms, left),
                    *("1" if reset_attempts else "", self._dead_letter_keys.base),
                ],
            )
            retried += step
            left -= step if count is not None else 0
        return retried

    @traced("drain")
    async def drain(self, *, delayed: bool = False) -> int:
        """Delete all jobs that wait (with `delayed`, those too); running and finished ones stay. Returns how many.

        The newest job of a scheduler stays, so that the scheduler continues. Parents of this queue that lose
        their last pending child go with it; parents in other queues are released.
        """
        structures = [("wait", True), ("paused", True), ("prioritized", False), *([("delayed", False)] * delayed)]
        drained = 0
        for structure, is_list in structures:
            kept, more = 0, 1
            while more:
                step, kept, more = await self._ready().evaluate(
                    "drain",
                    [getattr(self._keys, structure)],
                    [self._keys.base, self._clock_offset_ms, "1" if is_list else "", kept, _PER_STEP],
                )
                drained += step
        return drained

    @traced("clean")
    async def clean(
        self, grace: int | timedelta = 0, *, state: JobState = JobState.COMPLETED, limit: int | None = None
    ) -> list[str]:
        """Delete jobs of a state that are older than `grace` (ms or timedelta), at most `limit`; returns their ids.

        Age is counted from finishing, else from the last start, else from creation. Running jobs and the job that a
        scheduler made last stay. Parents are treated as by `drain`.
        """
        grace_ms = to_ms("grace", grace)
        if state not in _CLEANABLE:
            raise InvalidOption("state", f"one of {', '.join(_CLEANABLE)}", state)
        removed: list[str] = []
        is_first = "1"
        for structure in _CLEANABLE[JobState(state)]:
            start = 0
            while start >= 0:
                most = _PER_STEP if limit is None else check_int("limit", limit, minimum=1) - len(removed)
                if most == 0:
                    return removed
                start, ids = await self._ready().evaluate(
                    "clean",
                    [getattr(self._keys, structure)],
                    [self._keys.base, self._clock_offset_ms, structure, grace_ms, start, most, is_first],
                )
                removed += [raw.decode("utf-8", "replace") for raw in ids]
                is_first = ""
        return removed

    @traced("obliterate")
    async def obliterate(self, *, force: bool = False, count: int = _PER_STEP) -> int:
        """Delete the queue with everything in it. Returns how many jobs that were.

        The queue is paused first, and stays so when this fails. With running jobs it raises JobStateConflict unless
        `force`: their workers then find their jobs gone. Parents in other queues are released. Dead letters are
        another queue and stay. `count` jobs are deleted per step (1 to 10000): smaller steps hold up the server less.
        """
        check_int("count", count, minimum=1, maximum=10_000)
        keys, removed, more = self._keys, 0, 1
        await self._ready().evaluate("pause", [keys.meta, keys.marker, keys.events], [keys.base])
        while more:
            reply = await self._ready().evaluate(
                "obliterate",
                [keys.meta, keys.active, keys.repeat],
                [keys.base, self._clock_offset_ms, "1" if force else "", count],
            )
            if reply in (_NOT_PAUSED, _HAS_ACTIVE):
                why = "was resumed in the meantime" if reply == _NOT_PAUSED else "has running jobs"
                raise JobStateConflict(
                    f"queue {keys.name!r} {why}, so it was not obliterated; wait for them, or use force=True",
                    queue=keys.name,
                )
            more, step = reply
            removed += step
        await remove_orphans(self._ready(), keys, clock_offset_ms=self._clock_offset_ms, and_ours=True, mode="all")
        return removed

    @traced("trimEvents")
    async def trim_events(self, most: int) -> int:
        """Cut the event stream to about `most` entries now. Returns how many went."""
        check_int("most", most, minimum=0)
        return int(await self._ready().command("XTRIM", self._keys.events, "MAXLEN", "~", most))

    async def remove_orphans(self, *, restorable: bool = False, limit: int | None = None) -> int:
        """Delete what is left of jobs that no state lists: hashes, logs, locks and deduplication ids. Returns how many.

        A job that has not finished is left, because `restore_orphans` can put it back into the queue; with `restorable`
        it is deleted too. With `limit`, at most this many.

        They come from evicted keys, from deleting by hand, or from bugs of other clients. Walks over all keys of the
        server, in short steps, and keeps the ids of all jobs in memory. Jobs that move during the search
        are safe; raises JobStateConflict when they move so much that some leftovers cannot be identified.
        """
        return await remove_orphans(
            self._ready(),
            self._keys,
            clock_offset_ms=self._clock_offset_ms,
            and_ours=False,
            mode="all" if restorable else "delete",
            limit=None if limit is None else check_int("limit", limit, minimum=1),
        )

    async def restore_orphans(self) -> int:
        """Put unfinished jobs that are in no state back into the queue. Returns how many. Deletes nothing.

        They were lost by a client before BullMQ 6 that resumed the queue, or by a failover. Searches as
        `remove_orphans` does.
        """
        return await remove_orphans(
            self._ready(), self._keys, clock_offset_ms=self._clock_offset_ms, and_ours=False, mode="restore"
        )

    async def find_orphans(self, *, count: int = 100) -> list[str]:
        """Ids of jobs that no state lists, among the first `count` jobs that a scan meets. Changes nothing."""
        check_int("count", count, minimum=1)
        return await find_orphans(self._ready(), self._keys, count=count)


def _epoch_ms(option: str, instant: Any) -> int:
    if not isinstance(instant, datetime) or instant.tzinfo is None:
        raise InvalidOption(option, "an aware datetime", instant)
    return int(instant.timestamp() * 1000)
