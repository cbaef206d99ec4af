"""Schedules of queues, and those that did not fire when they should have.

What is late is asked of each queue in one constant question, all queues of a place in one write.
"""

from __future__ import annotations

from typing import Final

import msgspec

from bullpen.dashboard.desk import Desk
from bullpen.errors import InvalidOption
from bullpen.ops.overview import Snapshot, grouped_by_place
from bullpen.ops.schedules import rule_words
from bullpen.ops.status import duration_text
from bullpen.ops.symptoms import Symptom
from bullpen.queue import SchedulerRecord
from bullpen.wire.keys import QueueKeys

__all__ = ["ScheduleRow", "late_schedules", "schedule_row"]

_LATE_MS: Final = 60_000
_MOST_QUEUES: Final = 200
_MOST_LATE: Final = 3
_ASKED_EVERY_S: Final = 5.0
_RUN: Final = "bullpen run MODULE:APP"


class ScheduleRow(msgspec.Struct, rename="camel", frozen=True):
    """One schedule."""

    queue: str
    id: str
    name: str
    rule: str
    words: str
    """The rule in words; empty where it is easier to read as it stands."""
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


def schedule_row(queue: str, record: SchedulerRecord, ended: str, now_ms: int) -> ScheduleRow:
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
        words="" if record.every_ms else rule_words(record),
        zone=record.zone or ("" if record.every_ms else "UTC"),
        paused=record.is_paused,
        ended=ended,
        next_ms=record.next_ms,
        following_ms=tuple(following),
        iterations=record.iterations,
        next_job=record.job_id,
        late_ms=late_ms if late_ms >= _LATE_MS else 0,
    )


async def late_schedules(desk: Desk, picture: Snapshot) -> list[Symptom]:
    """A sign for each queue with schedules whose time has passed and whose job did not begin: nobody works there."""

    async def ask() -> list[Symptom]:
        connection, prefix = desk.app.connection, desk.app.prefix
        names = [look.queue for look in picture.looks if not look.paused][:_MOST_QUEUES]
        before = str(picture.at_ms - _LATE_MS)
        late: list[str] = []
        for group in grouped_by_place(connection, [QueueKeys(prefix, name) for name in names]):
            asked = [("ZRANGEBYSCORE", keys.repeat, "1", before, "LIMIT", "0", "1") for keys in group]
            replies = await connection.shared_door(group[0].base).call_many(asked)
            late += [keys.name for keys, reply in zip(group, replies, strict=True) if isinstance(reply, list) and reply]
        return [sign for name in late for sign in await _signs(desk, name, picture.at_ms)]

    return await desk.within(desk.once("late schedules", ask, for_s=_ASKED_EVERY_S))


async def _signs(desk: Desk, name: str, now_ms: int) -> list[Symptom]:
    """Those of one queue: paused and ended ones stand in the same list."""
    queue = desk.queue(name)
    rows = [
        schedule_row(name, record, await queue.why_ended(record) or "", now_ms)
        for record in await queue.schedulers(count=100)
    ]
    return [
        Symptom(
            "schedule_late",
            name,
            row.late_ms,
            f"the schedule {row.id} should have fired {duration_text(row.late_ms)} ago, and no worker took its job",
            _RUN,
            _RUN,
        )
        for row in sorted(rows, key=lambda row: -row.late_ms)[:_MOST_LATE]
        if row.late_ms
    ]
