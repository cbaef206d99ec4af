"""Advance a job scheduler when one of its jobs is taken.

In: a taken job that carries a scheduler id. Out: the next job is stored, once, before this one runs; or this one does
not run here and now: by the scheduler's own rules, or because nobody but another client can tell the next time. A chain
is never cut.
Elsewhere: making and removing schedulers (`bullpen.queue.schedulers`), when they run (`bullpen.wire.schedules`).

Records differ by who wrote them. Complete ones have `ic` and everything else. Older clients write only some fields, or
no record at all; then the job's own `opts.repeat` says the rest, which every client copies from job to job.
"""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass
from typing import Any, Final

from bullpen._kernel import json, telemetry
from bullpen._kernel.cron import LOCAL, NeverMatches, machine_zone, zone_name
from bullpen.errors import InvalidOption, NotJson, ServerRefused, require
from bullpen.queue.actions import QueueActions
from bullpen.queue.job import Job
from bullpen.wire.keys import QueueKeys
from bullpen.wire.records import read_int, read_score
from bullpen.wire.schedules import SchedulerRule, options_head, read_rule, repeat_options

logger = logging.getLogger("bullpen.worker")

_FIRST_RETURN_MS: Final = 1_000
_LONGEST_RETURN_MS: Final = 60_000
_HOLD_MS: Final = 1_000
"""How late a run may begin after the one that it waits for. At most one run of a scheduler waits."""
_MOST_REMEMBERED: Final = 1_000
_MOST_SLOTS: Final = 32
_READ: Final = (
    *("pattern", "every", "tz", "startDate", "endDate", "limit", "offset", "ic"),
    *("bpoverlap", "bpcatchup", "bpgrace", "bpjitter", "bprun"),
)


@dataclass(frozen=True, slots=True)
class Back:
    """The job goes back for so many ms: another client shall take it, or it waits for the one before it."""

    delay_ms: int


@dataclass(frozen=True, slots=True)
class Skipped:
    """The job ends without a run, by a rule of its scheduler: `overlap` or `missed`."""

    why: str


class Schedulers:
    """The schedulers that one worker meets. `zone` is for those that name none."""

    def __init__(self, actions: QueueActions, keys: QueueKeys, *, zone: str, clock_offset_ms: int) -> None:
        self._actions, self._keys, self._zone, self._clock_offset_ms = actions, keys, zone, clock_offset_ms
        self._refused: dict[str, int] = {}
        self._without_zone: set[str] = set()

    async def advance(self, job: Job) -> Back | Skipped | None:
        """Store the next job unless the scheduler is gone, ended, or was advanced by another run of the same job.

        Returns None when the job is to run.
        """
        scheduler_id = job.record.scheduler_id
        assert scheduler_id is not None
        try:
            answer = await self._advance(job, scheduler_id)
        except (ServerRefused, InvalidOption) as error:
            return self._refuse(job, scheduler_id, error)
        self._refused.pop(scheduler_id, None)
        return answer

    def _refuse(self, job: Job, scheduler_id: str, error: Exception) -> Back:
        back = Back(_longer_each_time(self._refused, scheduler_id, _LONGEST_RETURN_MS))
        logger.error(
            "queue %r: the next time of scheduler %r cannot be computed (%s); its job %r is not run here; it is "
            "returned to the queue for another client and offered again in %g s",
            *(self._keys.name, scheduler_id, error, job.id, back.delay_ms / 1000),
        )
        telemetry.emit(
            "worker.scheduler_refused", queue=self._keys.name, scheduler=scheduler_id, job_id=job.id, error=error
        )
        return back

    async def _advance(self, job: Job, scheduler_id: str) -> Back | Skipped | None:
        keys, actions = self._keys, self._actions
        raw, score, (seconds, micros) = await actions.commands(
            [("HMGET", keys.scheduler(scheduler_id), *_READ), ("ZSCORE", keys.repeat, scheduler_id), ("TIME",)]
        )
        slot_ms = None if score is None else read_score(score)
        # By the end only: clients before 5.x put another text between `repeat` and the time than the scheduler's id.
        if slot_ms is None or not job.id.endswith(f":{slot_ms}"):
            return None  # gone, or this is a retry of an earlier job
        stored = {
            name: value.decode("utf-8", "replace") for name, value in zip(_READ, raw, strict=True) if value is not None
        }
        opts = _read_options(job.record.raw_opts)
        repeat = repeat_options(opts)
        rule = read_rule(scheduler_id, stored, repeat, self._zone_of(scheduler_id, stored, repeat))
        iteration = read_int(str(repeat.get("count") or stored.get("ic") or 0)) + 1
        now_ms = int(seconds) * 1000 + int(micros) // 1000 + self._clock_offset_ms
        runs_beside = rule.overlap != "queue" and await self._still_runs(stored.get("bprun"), job.id)
        if runs_beside and rule.overlap == "one":
            return Back(_HOLD_MS)
        try:
            is_missed = await self._store_next(job, scheduler_id, rule, slot_ms, now_ms, iteration, opts, runs_beside)
        except NeverMatches:
            # As Node ends it, but not without a word.
            logger.error(
                "queue %r: scheduler %r ends with job %r: no date matches its pattern %r. Store it again with "
                "another pattern, where it is defined",
                *(self._keys.name, scheduler_id, job.id, rule.pattern),
                extra={"jobId": job.id, "queue": self._keys.name},
            )
            return None
        if not runs_beside and not is_missed:
            return None
        skipped = Skipped("overlap" if runs_beside else "missed")
        logger.info(
            "queue %r: job %r of scheduler %r is skipped: %s",
            *(self._keys.name, job.id, scheduler_id),
            f"{stored.get('bprun')!r} has not ended" if runs_beside else "it is too late",
            extra={"jobId": job.id, "queue": self._keys.name},
        )
        telemetry.emit(
            "worker.scheduler_skipped", queue=self._keys.name, scheduler=scheduler_id, job_id=job.id, why=skipped.why
        )
        return skipped

    async def _store_next(
        self,
        job: Job,
        scheduler_id: str,
        rule: SchedulerRule,
        slot_ms: int,
        now_ms: int,
        iteration: int,
        opts: dict[str, Any],
        runs_beside: bool,
    ) -> bool:
        """Returns whether the present job is too late to run."""
        keys, id_head = self._keys, job.id.removesuffix(str(slot_ms))
        plan = rule.plan(slot_ms, now_ms, iteration=iteration)
        head = options_head(opts, scheduler_id, id_head, {**repeat_options(opts), "count": iteration})
        for _ in range(_MOST_SLOTS):
            if plan.next_ms is None:
                return plan.is_missed
            reply = await self._actions.evaluate(
                "advance_scheduler",
                [keys.repeat, keys.scheduler(scheduler_id), keys.id, keys.job(job.id)],
                [
                    *(keys.base, self._clock_offset_ms, scheduler_id, slot_ms, plan.next_ms, id_head, head),
                    # Clients before 5.20 take a job without it for the first of a new schedule.
                    "1" if rule.pattern or "prevMillis" in opts else "",
                    round(random.random() * rule.jitter_ms),
                    *(read_int(str(opts.get("priority") or 0)), "1" if opts.get("lifo") is True else ""),
                    "" if rule.overlap == "queue" or runs_beside or plan.is_missed else job.id,
                ],
            )
            if reply != -1:
                return plan.is_missed
            plan = rule.plan(slot_ms, now_ms, iteration=iteration, after_ms=plan.next_ms)
        raise InvalidOption(
            "repeat", f"a free time among the next {_MOST_SLOTS}: jobs exist for all of them", plan.next_ms
        )

    async def _still_runs(self, running: str | None, job_id: str) -> bool:
        """Whether the run that was let go last has not ended: it runs, or waits for its next attempt."""
        if running is None or running == job_id:
            return False
        name, finished = await self._actions.command("HMGET", self._keys.job(running), "name", "finishedOn")
        return name is not None and finished is None

    def _zone_of(self, scheduler_id: str, stored: dict[str, str], repeat: dict[str, Any]) -> str | None:
        if stored.get("every") or not (stored.get("pattern") or repeat.get("pattern") or repeat.get("cron")):
            return None
        if named := stored.get("tz") or repeat.get("tz"):
            require("tz", isinstance(named, str), "text", named)
            return str(named)
        if self._zone != LOCAL:
            return self._zone
        machine = zone_name(machine_zone())
        if machine not in ("UTC", "Etc/UTC") and scheduler_id not in self._without_zone:
            if len(self._without_zone) < _MOST_REMEMBERED:
                self._without_zone.add(scheduler_id)
            logger.warning(
                "queue %r: scheduler %r names no time zone; this machine's is used (%s), as Node would. Give it a tz, "
                "or the worker scheduler_zone, so that its times do not depend on the machine",
                *(self._keys.name, scheduler_id, machine),
            )
        return LOCAL


def _longer_each_time(times: dict[str, int], scheduler_id: str, longest_ms: int) -> int:
    """If nobody else serves the queue, a job that goes back must not keep this worker busy."""
    if len(times) >= _MOST_REMEMBERED:
        times.clear()
    count = times[scheduler_id] = times.get(scheduler_id, 0) + 1
    return min(longest_ms, _FIRST_RETURN_MS << min(count - 1, 10))


def _read_options(raw_opts: bytes) -> dict[str, Any]:
    try:
        opts = json.decode(raw_opts)
    except NotJson:
        return {}
    return opts if isinstance(opts, dict) else {}
