"""Advance a job scheduler when one of its iterations is taken.

In: a taken job that carries a scheduler id. Out: the next iteration is stored, once, before this one runs; or the
iteration may not run here, because nobody but another client can tell the next time. A chain is never cut.
Elsewhere: creating and removing schedulers, and the rules of cron (`bullpen._kernel.cron`).

Records differ by who wrote them. Complete ones have `ic` and everything else. Older clients write only some fields, or
no record at all; then the job's own `opts.repeat` says the rest, which every client copies from iteration to iteration.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any, Final

from bullpen._kernel import json, telemetry
from bullpen._kernel.cron import LOCAL, NeverMatches, machine_zone, next_after, zone_name
from bullpen.errors import InvalidOption, NotJson, ServerRefused
from bullpen.queue._actions import QueueActions
from bullpen.queue.job import Job
from bullpen.wire.keys import QueueKeys
from bullpen.wire.records import read_int

logger = logging.getLogger("bullpen.worker")

_FIRST_RETURN_MS: Final = 1_000
_LONGEST_RETURN_MS: Final = 60_000
_MOST_REMEMBERED: Final = 1_000


class Schedulers:
    """The schedulers that one worker meets. `zone` is for those that name none."""

    def __init__(self, actions: QueueActions, keys: QueueKeys, *, zone: str, clock_offset_ms: int) -> None:
        self._actions, self._keys, self._zone, self._clock_offset_ms = actions, keys, zone, clock_offset_ms
        self._refused: dict[str, int] = {}
        self._without_zone: set[str] = set()

    async def advance(self, job: Job) -> int | None:
        """Store the next iteration unless the scheduler is gone, ended, or was advanced by another run of the same
        iteration.

        Returns None, or for how many ms the job is to be given back: its next time cannot be told here.
        """
        scheduler_id = job.record.scheduler_id
        assert scheduler_id is not None
        try:
            await self._advance(job, scheduler_id)
        except (ServerRefused, InvalidOption) as error:
            return self._refuse(job, scheduler_id, error)
        self._refused.pop(scheduler_id, None)
        return None

    def _refuse(self, job: Job, scheduler_id: str, error: Exception) -> int:
        # Longer each time: if nobody else serves the queue, the job must not keep this worker busy.
        if len(self._refused) >= _MOST_REMEMBERED:
            self._refused.clear()
        times = self._refused[scheduler_id] = self._refused.get(scheduler_id, 0) + 1
        back_ms = min(_LONGEST_RETURN_MS, _FIRST_RETURN_MS << min(times - 1, 10))
        logger.error(
            "queue %r: the next time of scheduler %r cannot be computed (%s); its job %r is not run here and goes back "
            "for another client, to be offered again in %g s",
            *(self._keys.name, scheduler_id, error, job.id, back_ms / 1000),
        )
        telemetry.emit(
            "worker.scheduler_refused", queue=self._keys.name, scheduler=scheduler_id, job_id=job.id, error=error
        )
        return back_ms

    async def _advance(self, job: Job, scheduler_id: str) -> None:
        keys, actions = self._keys, self._actions
        record_key = keys.scheduler(scheduler_id)
        stored = await actions.command("HMGET", record_key, "pattern", "every", "tz", "startDate", "endDate")
        slot = await actions.command("ZSCORE", keys.repeat, scheduler_id)
        if slot is None or not job.id.endswith(f":{int(float(slot))}"):
            return  # gone, or this is a retry of an earlier iteration
        pattern, every, zone, start, end = (None if value is None else value.decode() for value in stored)
        repeat = _repeat_options(job.record.raw_opts)
        every, pattern = every or repeat.get("every"), pattern or repeat.get("pattern") or repeat.get("cron")
        end_ms = _instant(end or repeat.get("endDate"))
        next_ms: int | str = ""
        if pattern and not every:
            _require_text("pattern", pattern)
            seconds, micros = await actions.command("TIME")
            now_ms = int(seconds) * 1000 + int(micros) // 1000 + self._clock_offset_ms
            # Also after the slot that was taken: an iteration that was promoted by hand runs before its time, and the
            # same slot must not come out again.
            after_ms = max(now_ms, _instant(start or repeat.get("startDate")) or 0, int(float(slot)))
            seed = repeat.get("hashSeed")
            try:
                next_ms = next_after(
                    pattern,
                    self._zone_of(scheduler_id, zone or repeat.get("tz")),
                    after_ms,
                    seed=seed if isinstance(seed, str) and seed else f"{scheduler_id} {pattern}",
                )
            except NeverMatches:
                # As Node ends it, but not without a word.
                logger.error(
                    "queue %r: scheduler %r ends with job %r: no day is like its pattern %r. Store it again with "
                    "another pattern, where it is made",
                    *(self._keys.name, scheduler_id, job.id, pattern),
                    extra={"jobId": job.id, "queue": self._keys.name},
                )
                return
            if end_ms is not None and next_ms > end_ms:
                return
        elif not every or read_int(str(every)) < 1:
            raise InvalidOption("repeat", "a pattern, or every so many milliseconds", pattern or every)
        limit = repeat.get("limit")
        await actions.evaluate(
            "advance_scheduler",
            [keys.repeat, record_key, keys.id, keys.events],
            [
                *(keys.base, self._clock_offset_ms, scheduler_id, job.id, next_ms, job.record.raw_opts),
                *(job.record.field(b"name") or "", job.record.raw_data),
                *(read_int(str(every or 0)), read_int(str(repeat.get("offset") or 0))),
                "" if limit is None else read_int(str(limit)),
                "" if end_ms is None else end_ms,
            ],
        )

    def _zone_of(self, scheduler_id: str, named: Any) -> str:
        if named:
            return _require_text("tz", named)
        if self._zone != LOCAL:
            return self._zone
        machine = zone_name(machine_zone())
        if machine not in ("UTC", "Etc/UTC") and scheduler_id not in self._without_zone:
            if len(self._without_zone) < _MOST_REMEMBERED:
                self._without_zone.add(scheduler_id)
            logger.warning(
                "queue %r: scheduler %r names no time zone; this machine's is used (%s), as Node would. Give it a tz, "
                "or the worker scheduler_zone, so that it does not depend on the machine",
                *(self._keys.name, scheduler_id, machine),
            )
        return LOCAL


def _repeat_options(raw_opts: bytes) -> dict[str, Any]:
    try:
        opts = json.decode(raw_opts)
    except NotJson:
        return {}
    repeat = opts.get("repeat") if isinstance(opts, dict) else None
    return repeat if isinstance(repeat, dict) else {}


def _instant(value: Any) -> int | None:
    """A date as older clients store it: ms, their text, or ISO text. None: there is none, or it cannot be read."""
    if value is None or value == "":
        return None
    try:
        return int(float(value))
    except (TypeError, ValueError, OverflowError):
        pass
    try:
        parsed = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise InvalidOption("repeat", "dates in ms or ISO text", value) from None
    return round((parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp() * 1000)


def _require_text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidOption(name, "text", value)
    return value
