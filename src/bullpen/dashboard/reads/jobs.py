"""Lists of jobs by state and filter, and one job with all that is known.

A filter is exact where an order allows it: finished jobs stand by their time. Else the jobs of the state are looked
through on the server, up to twenty thousand for one request, and the page says how far that was.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from bullpen._kernel.command_line import command_line
from bullpen._kernel.duration import written_ms
from bullpen.dashboard._web import PageProblem
from bullpen.dashboard.desk import PER_PAGE, Desk
from bullpen.ops.explain import read_facts
from bullpen.ops.views.jobs import JobsView, JobView, job_row, job_view, shown_preview
from bullpen.queue import JobState
from bullpen.queue.children import PARTS
from bullpen.queue.heads import HeadFilter, JobHead
from bullpen.wire.events import QueueEvent
from bullpen.wire.records import JobRecord

__all__ = ["AGES", "JobsAsked", "read_counts", "read_job", "read_jobs"]

AGES: Final = ("<5m", "<1h", "<24h", ">1h", ">24h", ">7d")
"""Younger or older than so long: since they ended, or since they were added."""
FINISHED: Final = (JobState.COMPLETED, JobState.FAILED)
_WALKED: Final = 20_000
_EVENTS_READ: Final = 400
_LOG_LINES: Final = 1_000


@dataclass(frozen=True, slots=True)
class JobsAsked:
    """Which jobs of a queue are wanted."""

    queue: str
    state: JobState
    start: int = 0
    name: str = ""
    text: str = ""
    age: str = ""
    attempts: int | None = None

    @property
    def is_filtered(self) -> bool:
        return bool(self.name or self.text or self.age or self.attempts)

    @property
    def newest_first(self) -> bool:
        return self.state in FINISHED

    def head_filter(self, now_ms: int) -> HeadFilter:
        """What has to be looked for; the age of finished jobs is a matter of their places."""
        since, until = (None, None) if self.state in FINISHED else self.bounds(now_ms)
        return HeadFilter(name=self.name, text=self.text, attempts=self.attempts, since_ms=since, until_ms=until)

    def bounds(self, now_ms: int) -> tuple[int | None, int | None]:
        """The instants between which a job was added, or ended."""
        if self.age not in AGES:
            return None, None
        edge = now_ms - (written_ms(self.age[1:]) or 0)
        return (edge, None) if self.age.startswith("<") else (None, edge)


async def read_counts(desk: Desk, name: str) -> dict[str, int]:
    """How many jobs of a queue are in each state, and its dead letters: one round trip."""

    async def ask() -> dict[str, int]:
        keys = desk.queue(name).keys
        lists = ("wait", "paused", "active")
        sets = ("prioritized", "delayed", "waiting_children", "completed", "failed")
        door = desk.app.connection.shared_door(keys.base)
        replies = await door.call_many(
            [
                ("EXISTS", keys.meta),
                ("LLEN", f"{keys.prefix}:{keys.dead_letter_name()}:wait"),
                *(("LLEN", getattr(keys, each)) for each in lists),
                *(("ZCARD", getattr(keys, each)) for each in sets),
            ]
        )
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        exists, dead, waiting, paused, active, *rest = replies
        if not exists:
            text = f"There is no queue {name!r} under the prefix {desk.app.prefix!r}."
            raise PageProblem(404, text, hint="bullpen queues")
        states = [each.replace("_", "-") for each in sets]
        return {"waiting": waiting + paused, "active": active, **dict(zip(states, rest, strict=True)), "dead": dead}

    return await desk.within(desk.once(("counts", name), ask))


async def read_jobs(desk: Desk, asked: JobsAsked, *, payloads: bool, count: int = PER_PAGE) -> JobsView:
    """A page of the jobs that are wanted."""

    async def ask() -> tuple[int, tuple[list[JobHead], int, int, int | None]]:
        total = (await read_counts(desk, asked.queue))[asked.state.value]
        return total, await _find(desk, asked, count, total)

    # Not by the total: on a busy queue it differs for each viewer, and all of them may see the same half second.
    total, (heads, looked_at, end, fitting) = await desk.within(desk.once(("jobs", asked, count), ask))
    return JobsView(
        queue=asked.queue,
        state=asked.state.value,
        start=asked.start,
        count=count,
        total=total,
        fitting=fitting,
        jobs=tuple(job_row(head, asked.state, payloads=payloads) for head in heads),
        looked_at=looked_at,
        next_start=end if end < total else None,
    )


async def _find(desk: Desk, asked: JobsAsked, count: int, total: int) -> tuple[list[JobHead], int, int, int | None]:
    """The jobs, how many were looked at, where the next page begins, and how many fit if that is known."""
    queue, now_ms = desk.queue(asked.queue), int(time.time() * 1000)
    first, last = await _places(desk, asked, total, now_ms)
    start, wanted = max(asked.start, first), asked.head_filter(now_ms)
    if wanted.is_any:
        if start >= last:
            return [], 0, total, last - first
        most, end = min(count, last - start), start + count
        heads = await queue.heads(asked.state, start=start, count=most, newest_first=asked.newest_first)
        return heads, len(heads), end if end < last else total, last - first
    most = min(_WALKED, max(0, last - start))
    found = await queue.find(asked.state, wanted, start=start, count=count, most=most, newest_first=asked.newest_first)
    heads = [head for head in await queue.heads_of(found.ids) if _is_shown(head, asked.text)]
    end = start + found.looked_at
    return heads, found.looked_at, total if found.is_end or end >= last else end, None


async def _places(desk: Desk, asked: JobsAsked, total: int, now_ms: int) -> tuple[int, int]:
    """Between which places of the list the jobs of an age stand."""
    since, until = asked.bounds(now_ms)
    if asked.state not in FINISHED or (since is None and until is None):
        return 0, total
    queue, edge = desk.queue(asked.queue), since if since is not None else until
    place = min(total, await queue.position_at(asked.state, edge or 0, newest_first=True))
    return (0, place) if since is not None else (place, total)


def _is_shown(head: JobHead, text: str) -> bool:
    """Whether the text is in what people see of a job: what is hidden cannot be found."""
    texts = (head.record.id, shown_preview(head, "data"), shown_preview(head, "failedReason"))
    return not text or any(text.lower() in each.lower() for each in texts)


async def read_job(desk: Desk, name: str, job_id: str, *, payloads: bool, lines: int = _LOG_LINES) -> JobView:
    """One job with all that is known. Raises PageProblem 404 with what is known of one that is gone."""
    queue = desk.queue(name)

    async def ask() -> tuple[Any, list[QueueEvent], list[str], int, bool]:
        facts = await read_facts(queue, job_id)
        if facts.record is None:
            return facts, [], [], 0, False
        keys, door = queue.keys, desk.app.connection.shared_door(queue.keys.base)
        since = max(0, facts.record.timestamp - 1)
        replies = await door.call_many(
            [
                ("LRANGE", keys.logs(job_id), -lines, -1),
                ("LLEN", keys.logs(job_id)),
                ("XRANGE", keys.events, since, "+", "COUNT", _EVENTS_READ),
                ("XREVRANGE", keys.events, "+", since, "COUNT", _EVENTS_READ),
                ("EXISTS", *(f"{keys.job(job_id)}:{part.suffix}" for part in PARTS.values())),
            ]
        )
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        found, total, first, last, parts = replies
        entries = dict([*first, *last])
        events = [QueueEvent.parse(entry_id, entries[entry_id]) for entry_id in sorted(entries, key=_entry_order)]
        mine = [event for event in events if event.job_id == job_id]
        return facts, mine, [line.decode("utf-8", "replace") for line in found], total, bool(parts)

    facts, events, logs, total, is_parent = await desk.within(desk.once(("job", name, job_id, lines), ask))
    record: JobRecord | None = facts.record
    if record is None:
        await desk.must_exist(name)
        raise PageProblem(
            404,
            f"There is no job {job_id!r} in {name!r}: it was removed by hand or by retention, or never added here.",
            hint=command_line("queues show", name),
        )
    view = job_view(facts, record, events, logs, total, payloads=payloads)
    return msgspec.structs.replace(view, has_children=is_parent)


def _entry_order(entry_id: bytes) -> tuple[int, int]:
    ms, _, number = entry_id.partition(b"-")
    return int(ms), int(number or b"0")
