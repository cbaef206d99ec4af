"""Advance a job scheduler when one of its iterations is taken.

In: a taken job that carries a scheduler id. Out: the next iteration is stored, once, before this one runs.
Elsewhere: creating and removing schedulers, and the rules of cron (`bullpen._kernel.cron`).
"""

from __future__ import annotations

from bullpen._kernel.cron import next_after
from bullpen.queue._actions import QueueActions
from bullpen.queue.job import Job
from bullpen.wire.keys import QueueKeys


async def advance(actions: QueueActions, keys: QueueKeys, job: Job, clock_offset_ms: int) -> None:
    """Store the next iteration unless the scheduler is gone, ended, or was advanced by another run of the same
    iteration."""
    scheduler_id = job.record.scheduler_id
    assert scheduler_id is not None
    record_key = keys.scheduler(scheduler_id)
    pattern, zone, start = await actions.command("HMGET", record_key, "pattern", "tz", "startDate")
    slot = await actions.command("ZSCORE", keys.repeat, scheduler_id)
    pattern_next_ms: int | str = ""
    if pattern is not None:
        seconds, micros = await actions.command("TIME")
        now_ms = int(seconds) * 1000 + int(micros) // 1000 + clock_offset_ms
        # Also after the slot that was taken: an iteration that was promoted by hand runs before its time, and the same
        # slot must not come out again.
        after_ms = max(now_ms, int(start or 0), int(float(slot or 0)))
        pattern_next_ms = next_after(pattern.decode(), zone.decode() if zone else None, after_ms)
    await actions.evaluate(
        "advance_scheduler",
        [keys.repeat, record_key, keys.id, keys.events],
        [keys.base, clock_offset_ms, scheduler_id, job.id, pattern_next_ms, job.record.raw_opts],
    )
