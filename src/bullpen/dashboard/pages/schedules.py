"""`/schedules`: the job schedulers of all queues, when each fires, and which did not fire when they should have."""

from __future__ import annotations

from typing import Final

import msgspec

from bullpen.dashboard.reads.schedules import ScheduleRow, schedule_row
from bullpen.dashboard.routes import Context, Page, PageRoute

_MOST_QUEUES: Final = 100
_PER_QUEUE: Final = 100


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
                found.append(schedule_row(name, record, ended or "", picture.at_ms))
        return found

    rows = await desk.within(desk.once(("schedules", only), ask, for_s=1.0))
    ordered = sorted(rows, key=lambda row: (not row.late_ms, bool(row.ended), row.paused, row.next_ms))
    view = SchedulesView(tuple(ordered), len(names), picture.at_ms)
    return Page("schedules.html", view, "Schedules", "schedules", stream="", values={"only": only})


ROUTES = (PageRoute("/schedules", schedules, menu="Schedules", key="s"),)
