"""Job schedulers with PyPI's names."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

from bullpen.compat.bullmq._names import check_names
from bullpen.compat.bullmq._options import check_job_options, instant, job_arguments, template_policy
from bullpen.compat.bullmq.job import Job, JobHome
from bullpen.errors import InvalidOption
from bullpen.queue.queue import Queue as NativeQueue
from bullpen.wire.schedules import SchedulerRecord

__all__ = ["JobScheduler"]

_RULE: Final = frozenset(
    ("pattern", "every", "limit", "startDate", "endDate", "tz", "offset", "immediately", "count", "utc", "key")
)
_MOST: Final = 1_000


class JobScheduler:
    """The schedulers of one queue."""

    def __init__(self, queue: JobHome, repeat_strategy: Any = None) -> None:
        if repeat_strategy is not None:
            raise InvalidOption(
                "repeat_strategy", "none: the workers that advance a scheduler know no own rules", "one"
            )
        self.queue = queue

    @property
    def _calls(self) -> NativeQueue:
        return self.queue.native_queue

    async def upsertJobScheduler(
        self,
        job_scheduler_id: str,
        repeat_opts: Mapping[str, Any],
        job_name: str,
        job_data: Any = None,
        opts: Mapping[str, Any] | None = None,
        override: bool = True,
        producer_id: str | None = None,
    ) -> Job | None:
        """Make a scheduler, or change it. Returns its next job; None when its limit or its end has passed."""
        rule = dict(repeat_opts or {})
        _check(rule)
        if not override or producer_id is not None:
            raise InvalidOption("override", "True: workers of bullpen advance schedulers by themselves", override)
        end = instant("endDate", rule.get("endDate"))
        limit = rule.get("limit")
        if (limit is not None and (rule.get("count") or 0) + 1 > limit) or (end and end.timestamp() < time.time()):
            return None
        check_job_options(opts)
        template = {name: value for name, value in (opts or {}).items() if name not in ("prevMillis", "repeat")}
        record = await self._calls.upsert_scheduler(
            job_scheduler_id,
            job_name,
            job_data,
            every=rule.get("every"),
            cron=rule.get("pattern"),
            tz=rule.get("tz"),
            start=instant("startDate", rule.get("startDate")),
            end=end,
            limit=limit,
            immediately=bool(rule.get("immediately")) and bool(rule.get("pattern")),
            offset=rule.get("offset") or None if rule.get("every") else None,
            **job_arguments(template),
            on_failure=template_policy(template),
        )
        native = await self._calls.get_job(record.job_id)
        if native is not None:
            job = Job.of(self.queue, native)
            job.data = job_data  # as it was given, also None
            return job
        # A worker was faster.
        return Job(self.queue, job_name, job_data, {**template, "repeatJobKey": job_scheduler_id}, record.job_id)

    async def removeJobScheduler(self, job_scheduler_id: str) -> int:
        """0 when it was removed, 1 when there was none."""
        return 0 if await self._calls.remove_scheduler(job_scheduler_id) else 1

    async def isJobScheduler(self, job_scheduler_id: str) -> bool:
        """Whether there is a scheduler with this id."""
        return await self._calls.get_scheduler(job_scheduler_id) is not None

    async def getScheduler(self, job_scheduler_id: str) -> dict[str, Any] | None:
        """One scheduler, or None."""
        record = await self._calls.get_scheduler(job_scheduler_id)
        return None if record is None else _shown(record)

    async def getJobSchedulers(self, start: int = 0, end: int = -1, asc: bool = False) -> list[dict[str, Any]]:
        """Schedulers from position `start` to `end`, by their next time."""
        found: list[dict[str, Any]] = []
        position = start
        while end < 0 or position <= end:
            count = _MOST if end < 0 else min(_MOST, end - position + 1)
            page = await self._calls.schedulers(start=position, count=count, descending=not asc)
            found += map(_shown, page)
            position += count
            if len(page) < count:
                break
        return found

    async def getSchedulersCount(self) -> int:
        """How many schedulers there are."""
        return await self._calls.count_schedulers()


def _check(rule: Mapping[str, Any]) -> None:
    check_names(rule, _RULE, "an option of a scheduler")
    if rule.get("pattern") and rule.get("every"):
        raise ValueError("Both .pattern and .every options are defined for this repeatable job")
    if not rule.get("pattern") and not rule.get("every"):
        raise ValueError("Either .pattern or .every options must be defined for this repeatable job")
    if rule.get("immediately") and rule.get("startDate"):
        raise ValueError("Both .immediately and .startDate options are defined for this repeatable job")


def _shown(record: SchedulerRecord) -> dict[str, Any]:
    shown: dict[str, Any] = {"key": record.id, "name": record.name, "next": record.next_ms}
    optional = {
        "iterationCount": record.iterations,
        "limit": record.limit,
        "startDate": record.starts_ms,
        "endDate": record.ends_ms,
        "tz": record.zone,
        "pattern": record.pattern,
        "every": record.every_ms,
        "offset": record.offset_ms or None,
    }
    shown |= {name: value for name, value in optional.items() if value is not None}
    # A template without options has one attempt, which is what no word about it means to every reader.
    opts = {name: value for name, value in record.opts.to_json().items() if (name, value) != ("attempts", 1)}
    template = {"data": record.data, "opts": opts}
    if template := {name: value for name, value in template.items() if value not in (None, {})}:
        shown["template"] = template
    return shown
