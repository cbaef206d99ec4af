"""`/schedules`: the job schedulers of all queues, when each fires, and which did not fire when they should have."""

from __future__ import annotations

from typing import Final

import msgspec

from bullpen.dashboard.routes import Context, Page, PageRoute
from bullpen.errors import InvalidOption
from bullpen.ops.words import duration_text
from bullpen.queue import SchedulerRecord

_MOST_QUEUES: Final = 100
_PER_QUEUE: Final = 100
_LATE_MS: Final = 60_000


class ScheduleRow(msgspec.Struct, rename="camel", frozen=True):
    """One schedule."""

    queue: str
    id: str
    name: str
    rule: str
    zone: str
    paused: bool
    ended: str
    """Why it fires no more; empty while it does."""
    next_ms: int
    following_ms: tuple[int, ...]
    """The firings after the next one."""
    iterations: int
    next_job: str
    late_ms: int
    """How long ago it should have fired; 0: it is on time."""


class SchedulesView(msgspec.Struct, rename="camel", frozen=True):
    schedules: tuple[ScheduleRow, ...]
    looked_at: int
    """Queues that were asked."""
    now_ms: int


async def schedules(context: Context) -> Page:
    """All schedules, the late ones first, then the next to fire."""
    desk, only = context.desk, context.query.get("queue", "")
    picture = await desk.snapshot()
    names = [only] if only else [look.queue for look in picture.looks][:_MOST_QUEUES]

    async def ask() -> list[ScheduleRow]:
        found = []
        for name in names:
            queue = desk.queue(name)
            for record in await queue.schedulers(count=_PER_QUEUE):
                ended = await queue.why_ended(record)
                found.append(_row(name, record, ended or "", picture.at_ms))
        return found

    rows = await desk.within(desk.once(("schedules", only), ask, for_s=1.0))
    ordered = sorted(rows, key=lambda row: (not row.late_ms, bool(row.ended), row.paused, row.next_ms))
    view = SchedulesView(tuple(ordered), len(names), picture.at_ms)
    return Page("schedules.html", view, "Schedules", "schedules", stream="", values={"only": only})


def _row(queue: str, record: SchedulerRecord, ended: str, now_ms: int) -> ScheduleRow:
    is_due = not record.is_paused and not ended and record.next_ms
    late_ms = max(0, now_ms - record.next_ms) if is_due else 0
    try:
        following = [int(each.timestamp() * 1000) for each in record.next_runs(5)] if is_due else []
    except (InvalidOption, OverflowError):
        following = []
    rule = f"every {duration_text(record.every_ms)}" if record.every_ms else record.pattern or ""
    return ScheduleRow(
        queue=queue,
        id=record.id,
        name=record.name,
        rule=rule,
        zone=record.zone or ("" if record.every_ms else "UTC"),
        paused=record.is_paused,
        ended=ended,
        next_ms=record.next_ms,
        following_ms=tuple(following),
        iterations=record.iterations,
        next_job=record.job_id,
        late_ms=late_ms if late_ms >= _LATE_MS else 0,
    )


ROUTES = (PageRoute("/schedules", schedules, menu="Schedules", key="s"),)
