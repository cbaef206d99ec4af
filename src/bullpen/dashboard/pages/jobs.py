"""`/queues/{queue}` and `/queues/{queue}/jobs/{job}`: one queue with its lists, and one job with all that is known."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from bullpen._kernel import json
from bullpen._kernel.command_line import command_line
from bullpen._kernel.scrub import hide_secrets
from bullpen.dashboard._web import JSON, PageAnswer, PageProblem
from bullpen.dashboard.access import Permission
from bullpen.dashboard.app import Context, Page, PageRoute
from bullpen.dashboard.desk import PER_PAGE
from bullpen.errors import NotJson
from bullpen.ops.actions import ACTIONS, Deed
from bullpen.ops.pauses import PauseNote
from bullpen.ops.views.jobs import JobsView
from bullpen.ops.views.queues import QueueRow, queue_row
from bullpen.queue import JobState

_BULK = ("job.retry", "job.promote", "job.remove")
_STATES = tuple(state for state in JobState if state is not JobState.UNKNOWN)
LABELS = {
    "waiting": "ready",
    "prioritized": "prioritized",
    "active": "active",
    "delayed": "delayed",
    "waiting-children": "blocked",
    "completed": "done",
    "failed": "failed",
}


class QueueView(msgspec.Struct, rename="camel", frozen=True):
    """One queue with a page of the jobs of a state."""

    queue: str
    row: QueueRow
    counts: dict[str, int]
    list: JobsView
    limits: dict[str, Any]
    paused: PauseNote | None
    """Who paused it, when and why; None when it is not paused."""
    explanation: str
    """Why nothing moves; empty when something does."""


async def queue(context: Context) -> Page:
    """One queue: its states with counts, and a page of jobs of one of them."""
    name, desk = context.path["queue"], context.desk
    opened = await desk.must_exist(name)
    counts = await desk.counts(name)
    state = _state(context.query.get("state", "")) or _first_state(counts)
    start = context.number("start")
    if at := context.query.get("at", ""):
        newest_first = state in (JobState.COMPLETED, JobState.FAILED)
        start = await desk.within(opened.position_at(state, _instant(at, context), newest_first=newest_first))
    job_name, text = context.query.get("name", "")[:200], context.query.get("text", "")[:200]
    listed = await desk.jobs(name, state, start=start, job_name=job_name, text=text, payloads=context.payloads)
    row = queue_row(await desk.look(name), desk.limits)
    view = QueueView(
        queue=name,
        row=row,
        counts=counts,
        list=listed,
        limits=await _limits(context, name),
        paused=await desk.pause(name),
        explanation=_why_nothing_moves(row),
    )
    filters = {"state": state.value, "name": job_name, "text": text}
    return Page(
        "queue.html",
        view,
        name,
        "queues",
        stream=name,
        values={
            "states": [(each.value, LABELS[each.value], counts[each.value]) for each in _STATES],
            "filters": filters,
            "actions": [each for each in ACTIONS.values() if each.kind == "queue" and _fits(each.name, row)],
            "bulk": [each for each in ACTIONS.values() if each.name in _BULK and state in each.states],
            "per_page": PER_PAGE,
            "is_filtered": bool(job_name or text),
            "ordered_by_time": state in (JobState.COMPLETED, JobState.FAILED, JobState.DELAYED),
        },
    )


def _fits(action: str, row: QueueRow) -> bool:
    if action in ("queue.pause", "queue.resume"):
        return (action == "queue.resume") == row.paused
    return action != "queue.lift"


def _state(text: str) -> JobState | None:
    return JobState(text) if text in {state.value for state in _STATES} else None


def _first_state(counts: dict[str, int]) -> JobState:
    order = ("waiting", "prioritized", "active", "delayed", "waiting-children", "failed", "completed")
    return JobState(next((state for state in order if counts[state]), "waiting"))


def _instant(text: str, context: Context) -> int:
    """A local time of the viewer's zone, as a field of a form gives it."""
    from bullpen.dashboard.render import find_zone

    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise PageProblem(422, f"{text[:60]!r} is no time; write 2026-11-18 17:30.") from None
    zone = find_zone(context.request.cookies.get("bullpen_zone", "")) if found.tzinfo is None else UTC
    return int((found if found.tzinfo else found.replace(tzinfo=zone)).timestamp() * 1000)


async def _limits(context: Context, name: str) -> dict[str, Any]:
    opened, desk = context.desk.queue(name), context.desk

    async def ask() -> dict[str, Any]:
        most, rate, held_ms = (
            await opened.global_concurrency(),
            await opened.global_rate_limit(),
            await opened.rate_limit_ttl(),
        )
        return {
            "concurrency": most,
            "rate": None if rate is None else {"most": rate.max, "durationMs": rate.duration_ms},
            "heldMs": held_ms,
        }

    return await desk.within(desk.once(("limits", name), ask))


def _why_nothing_moves(row: QueueRow) -> str:
    if not row.ready or row.paused:
        return ""
    if row.workers == 0:
        return f"{row.ready:,} {'job is' if row.ready == 1 else 'jobs are'} ready, and no worker is connected."
    return ""


async def job(context: Context) -> Page:
    """One job: timeline, why it does not run, attempts, data, logs."""
    name, job_id = context.path["queue"], context.path["job"]
    view = await context.desk.job(name, job_id, payloads=context.payloads)
    state = JobState(view.state)
    offered = [
        (action, action.why_not(state), Deed(action=action, queue=name, subject=job_id).command)
        for action in ACTIONS.values()
        if action.kind == "job"
    ]
    fix = ACTIONS.get(view.explanation["action"])
    return Page(
        "job.html",
        view,
        f"{job_id} · {name}",
        "queues",
        stream=name,
        values={
            "offered": offered,
            "fix": fix,
            "line_show": command_line("jobs show", name, job_id),
        },
    )


async def data(context: Context) -> PageAnswer:
    """The data of a job as a file, without secrets."""
    found = await context.desk.within(context.desk.queue(context.path["queue"]).get_job(context.path["job"]))
    if found is None:
        raise PageProblem(404, "There is no such job.")
    try:
        body = json.encode(hide_secrets(json.decode(found.record.raw_data)))
    except NotJson:
        body = found.record.raw_data
    return PageAnswer(200, body, JSON, {"content-disposition": 'attachment; filename="job-data.json"'})


ROUTES = (
    PageRoute("/queues/{queue}", queue),
    PageRoute("/queues/{queue}/jobs/{job}", job),
    PageRoute("/queues/{queue}/jobs/{job}/data", data, Permission.PAYLOADS),
)
