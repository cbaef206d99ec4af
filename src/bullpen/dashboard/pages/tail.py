"""`/live`: what happens in the queues right now, the newest first: of one queue or of the busiest.

The events are read from the streams that all clients write. However many happen, a look reads at most 300 of each queue
(2,000 of one that was chosen) and shows the newest 150; how many more there were in that time it says.
"""

from __future__ import annotations

from typing import Final

import msgspec

from bullpen._kernel.command_line import command_line
from bullpen._kernel.scrub import summary
from bullpen.dashboard.routes import Context, Page, PageRoute
from bullpen.ops.overview import grouped_by_place
from bullpen.ops.status import WorkStatus
from bullpen.ops.views.queues import OPERATIONS
from bullpen.wire.events import QueueEvent
from bullpen.wire.keys import QueueKeys

_MOST_QUEUES: Final = 20
_READ: Final = 300
_READ_OF_ONE: Final = 2_000
_SHOWN: Final = 150
_WORDS: Final = {
    "added": WorkStatus.WAITING,
    "waiting": WorkStatus.WAITING,
    "delayed": WorkStatus.DELAYED,
    "active": WorkStatus.ACTIVE,
    "progress": WorkStatus.ACTIVE,
    "completed": WorkStatus.DONE,
    "failed": WorkStatus.DEAD,
    "retries-exhausted": WorkStatus.DEAD,
    "stalled": WorkStatus.RETRYING,
    "waiting-children": WorkStatus.BLOCKED,
    "paused": WorkStatus.PAUSED,
    "removed": WorkStatus.CANCELLED,
}
KINDS: Final = tuple(_WORDS)


class TailRow(msgspec.Struct, rename="camel", frozen=True):
    """One event."""

    id: str
    at_ms: int
    queue: str
    event: str
    word: str
    job: str
    detail: str


class TailView(msgspec.Struct, rename="camel", frozen=True):
    """The newest events."""

    rows: tuple[TailRow, ...]
    queues: tuple[str, ...]
    """Those that were read."""
    left_out: int
    """Events of the same stretch of time that are not shown."""
    is_cut: bool
    """More queues have events than were read."""


async def tail(context: Context) -> Page:
    """The newest events, perhaps of one kind."""
    desk, only, kind = context.desk, context.query.get("queue", "")[:200], context.query.get("kind", "")
    kind = kind if kind in _WORDS else ""
    if only:
        await desk.must_exist(only)
    looks = [] if only else [each for each in (await desk.snapshot()).looks if each.queue != OPERATIONS]
    busy = sorted(looks, key=lambda look: (-look.active, -(look.ready + look.completed), look.queue))
    names = [only] if only else [look.queue for look in busy[:_MOST_QUEUES]]

    count = _READ_OF_ONE if only else _READ

    async def ask() -> list[tuple[str, QueueEvent]]:
        found: list[tuple[str, QueueEvent]] = []
        connection = desk.app.connection
        for group in grouped_by_place(connection, [QueueKeys(desk.app.prefix, name) for name in names]):
            asked = [("XREVRANGE", keys.events, "+", "-", "COUNT", str(count)) for keys in group]
            replies = await connection.shared_door(group[0].base).call_many(asked)
            for keys, reply in zip(group, replies, strict=True):
                if isinstance(reply, list):
                    found += [(keys.name, QueueEvent.parse(entry_id, fields)) for entry_id, fields in reply]
        return found

    found = await desk.within(desk.once(("tail", tuple(names)), ask))
    wanted = [each for each in found if not kind or each[1].event == kind]
    wanted.sort(key=lambda each: (each[1].timestamp, each[1].id), reverse=True)
    since = wanted[min(len(wanted), _SHOWN) - 1][1].timestamp if wanted else 0
    rows = tuple(_row(context, name, event) for name, event in wanted[:_SHOWN])
    left_out = sum(event.timestamp >= since for _, event in wanted[_SHOWN:])
    view = TailView(rows, tuple(names), left_out, len(busy) > _MOST_QUEUES)
    values = {
        "only": only,
        "kind": kind,
        "kinds": KINDS,
        "names": [look.queue for look in (await desk.snapshot()).looks][:200],
        "line": command_line("queues follow", only) if only else "bullpen top",
    }
    return Page("tail.html", view, "Live", "live", stream=only, values=values)


def _row(context: Context, queue: str, event: QueueEvent) -> TailRow:
    reason = str(event.data.get("failedReason", "")) if context.payloads else ""
    return TailRow(
        id=event.id,
        at_ms=event.timestamp,
        queue=queue,
        event=event.event,
        word=_WORDS.get(event.event, WorkStatus.WAITING).value,
        job=event.job_id or "",
        detail=summary(reason) if reason else "",
    )


ROUTES = (PageRoute("/live", tail, menu="Live", key="l", view=TailView),)
