"""`/schedules`: the job schedulers of all queues, when each fires, and which did not fire when they should have."""

from __future__ import annotations

from typing import Final

import msgspec

from bullpen._kernel.command_line import command_line
from bullpen._kernel.scrub import hide_secrets
from bullpen.dashboard._web import JSON, PageAnswer, PageProblem, json_bytes
from bullpen.dashboard.access import Permission
from bullpen.dashboard.fields import REASON, FormField
from bullpen.dashboard.pages.adding import json_of
from bullpen.dashboard.problems import or_form
from bullpen.dashboard.reads.schedules import ScheduleRow, schedule_row
from bullpen.dashboard.render import iso, json_text
from bullpen.dashboard.routes import Context, Page, PageRoute
from bullpen.ops.schedules import Firing, firings, last_firing_ms
from bullpen.ops.status import duration_text
from bullpen.ops.views.jobs import Payload
from bullpen.queue import SchedulerRecord

_MOST_QUEUES: Final = 100
_PER_QUEUE: Final = 100
_UNITS: Final = (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1))


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


class ScheduleView(msgspec.Struct, rename="camel", frozen=True):
    """One schedule."""

    queue: str
    row: ScheduleRow
    firings: tuple[Firing, ...]
    last_ms: int | None
    """When it fired last, as its rule says."""
    last_job: str
    """The job of then; empty when it is gone."""
    limit: int | None
    rules: tuple[str, ...]
    """What else it was told, in words."""
    declared: bool
    data: Payload
    editable: bool
    """Whether the data may be shown in a form: nothing in it is hidden."""


async def schedule(context: Context) -> Page:
    """One schedule with its next firings, for whoever looks and for the schedule itself."""
    view, _ = await _read(context)
    line = command_line("schedules show", view.queue, view.row.id)
    return Page("schedule.html", view, view.row.id, "schedules", stream=view.queue, values={"line": line})


async def _read(context: Context) -> tuple[ScheduleView, SchedulerRecord]:
    name, schedule_id, desk = context.path["queue"], context.path["id"], context.desk
    queue = await desk.must_exist(name)
    found = await desk.within(queue.get_scheduler(schedule_id))
    if found is None:
        raise PageProblem(404, f"There is no schedule {schedule_id!r} in {name!r}.")
    ended = await desk.within(queue.why_ended(found)) or ""
    now_ms = (await desk.snapshot()).at_ms
    last_ms = last_firing_ms(found)
    last_job = ""
    if last_ms is not None:
        job_id = f"repeat:{found.id}:{last_ms}"
        if await desk.within(queue.get_job(job_id)) is not None:
            last_job = job_id
    size, hidden = len(json_bytes(found.data)), hide_secrets(found.data)
    view = ScheduleView(
        queue=name,
        row=schedule_row(name, found, ended, now_ms),
        firings=() if ended else firings(found, now_ms),
        last_ms=last_ms,
        last_job=last_job,
        limit=found.limit,
        rules=_rules(found),
        declared=found.is_declared,
        data=Payload(size, hidden) if context.payloads else Payload(size, hidden="You may not see payloads."),
        editable=context.payloads and hidden == found.data,
    )
    return view, found


def _rules(found: SchedulerRecord) -> tuple[str, ...]:
    overlap = {"one": "a run waits for the end of the one before", "skip": "a run is left out while another runs"}
    catch_up = {
        "once": "",
        "skip": f"runs that would begin more than {duration_text(found.grace_ms)} late are left out",
    }
    parts = (
        overlap.get(found.overlap, ""),
        catch_up.get(str(found.catch_up), f"at most {found.catch_up} missed runs are made up for"),
        f"up to {duration_text(found.jitter_ms)} later, by chance" if found.jitter_ms else "",
        f"not after {iso(found.ends_ms)}" if found.ends_ms else "",
    )
    return tuple(part for part in parts if part)


async def edit_form(context: Context) -> Page:
    """Ask for another rule, or other data of its jobs."""
    return await _edit_form(context, {}, "")


async def _edit_form(context: Context, fields: dict[str, str], problem: str) -> Page:
    view, found = await _read(context)
    given = fields or {
        "cron": found.pattern or "",
        "tz": found.zone or "" if found.pattern else "",
        "every": _written(found.every_ms) if found.every_ms else "",
        "data": json_text(found.data) if view.editable else "",
    }
    values = {"fields": given, "problem": problem, "back": context.url("queues", view.queue, "schedules", view.row.id)}
    return Page("schedule_edit.html", view, f"Edit {view.row.id}", "schedules", values=values)


def _written(ms: int) -> str:
    """As the form takes it."""
    return next(f"{ms // size}{unit}" for unit, size in _UNITS if ms % size == 0)


async def edit(context: Context) -> Page | PageAnswer:
    """Store it, however often the form is sent."""
    queue, schedule_id, fields = context.path["queue"], context.path["id"], await context.request.form()

    async def work() -> PageAnswer:
        view, found = await _read(context)
        every, cron = fields.get("every", "").strip(), fields.get("cron", "").strip()
        if bool(every) == bool(cron):
            raise PageProblem(422, "Give a cron pattern, or a time for Every, and not both.")
        data = json_of(fields["data"]) if view.editable and fields.get("data", "").strip() else None

        async def act() -> list[str]:
            actions = await context.desk.actions(context.actor)
            before = {"every": found.every_ms, "cron": found.pattern, "tz": found.zone}
            after = {"every": every, "cron": cron, "tz": fields.get("tz", "").strip()}
            reason = fields.get("reason", "")[:500]
            detail = {
                **context.actor.note(),
                "before": {name: value for name, value in before.items() if value},
                "after": {name: value for name, value in after.items() if value},
                **({"data": "changed"} if data is not None and data != found.data else {}),
                **({"reason": reason} if reason else {}),
            }
            await actions.note("schedule.edit", queue, schedule_id, detail)
            changed = await context.desk.within(
                context.desk.queue(queue).change_scheduler(
                    schedule_id, every=every or None, cron=cron or None, tz=after["tz"] or None, data=data
                )
            )
            return [f"{schedule_id} {'is stored, and paused as before' if changed.is_paused else 'is stored'}."]

        (told,) = await context.once(f"schedule.edit {queue} {schedule_id}", act)
        context.desk.forget()
        if context.request.is_api:
            return PageAnswer(200, msgspec.json.encode({"done": told}), JSON)
        return context.redirect(context.url("queues", queue, "schedules", schedule_id), told)

    return await or_form(context, _edit_form, work)


_EDIT_FIELDS: Final = (
    FormField("cron", "The rule as cron."),
    FormField("tz", "Its time zone."),
    FormField("every", "The interval, instead of cron."),
    FormField("data", "The data of its jobs.", "json"),
    REASON,
)

ROUTES = (
    PageRoute("/schedules", schedules, menu="Schedules", key="s", view=SchedulesView),
    PageRoute("/queues/{queue}/schedules/{id}", schedule, view=ScheduleView),
    PageRoute("/queues/{queue}/schedules/{id}/edit", edit_form, Permission.ADMIN, view=ScheduleView),
    PageRoute("/queues/{queue}/schedules/{id}/edit", edit, Permission.ADMIN, "POST", fields=_EDIT_FIELDS),
)
