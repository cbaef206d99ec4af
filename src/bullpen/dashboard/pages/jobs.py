"""`/queues/{queue}` and `/queues/{queue}/jobs/{job}`: one queue with its lists, and one job with all that is known."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from bullpen._kernel import json
from bullpen._kernel.command_line import command_line
from bullpen._kernel.scrub import hide_secrets, scrub_lines
from bullpen.dashboard._web import JSON, PageAnswer, PageProblem, json_bytes
from bullpen.dashboard.access import Permission
from bullpen.dashboard.desk import PER_PAGE
from bullpen.dashboard.frame import zone_of
from bullpen.dashboard.reads.jobs import AGES, FINISHED, JobsAsked, read_counts, read_job, read_jobs
from bullpen.dashboard.reads.overview import recently
from bullpen.dashboard.routes import Context, Page, PageRoute
from bullpen.errors import NotJson
from bullpen.ops.actions import ACTIONS, Action, Deed
from bullpen.ops.pauses import PauseNote
from bullpen.ops.status import counted
from bullpen.ops.views.jobs import JobsView, JobView
from bullpen.ops.views.queues import QueueRow, queue_row
from bullpen.queue import JobState

BULK: Final = ("job.retry", "job.promote", "job.remove")
STATES: Final = tuple(state for state in JobState if state is not JobState.UNKNOWN)
LABELS: Final = {
    "waiting": "ready",
    "prioritized": "prioritized",
    "active": "active",
    "delayed": "delayed",
    "waiting-children": "blocked",
    "completed": "done",
    "failed": "failed",
}
_COLUMNS: Final = {
    JobState.WAITING: ("name", "data", "attempts", "added", "size"),
    JobState.PRIORITIZED: ("name", "data", "priority", "attempts", "added", "size"),
    JobState.ACTIVE: ("name", "data", "progress", "worker", "attempts", "started"),
    JobState.DELAYED: ("name", "data", "attempts", "due", "size"),
    JobState.WAITING_CHILDREN: ("name", "data", "attempts", "added", "size"),
    JobState.COMPLETED: ("name", "data", "took", "worker", "attempts", "finished"),
    JobState.FAILED: ("name", "error", "took", "worker", "attempts", "finished"),
}
_MOST_TRAIL: Final = 20
_MOST_SEARCHED: Final = 256 * 1024
"""Bytes of text without a form that are searched for secrets: some hundred milliseconds."""


class QueueView(msgspec.Struct, rename="camel", frozen=True):
    """One queue with a page of the jobs of a state."""

    queue: str
    row: QueueRow
    counts: dict[str, int]
    list: JobsView
    limits: dict[str, Any]
    schedules: int
    paused: PauseNote | None
    """Who paused it, when and why; None when it is not paused."""
    explanation: str
    """Why nothing moves; empty when something does."""


async def queue(context: Context) -> Page:
    """One queue: its states with counts, and a page of jobs of one of them."""
    name, desk = context.path["queue"], context.desk
    counts = await read_counts(desk, name)
    asked = await asked_of(context, counts)
    listed = await read_jobs(desk, asked, payloads=context.payloads)
    picture, pause = await desk.snapshot(), await desk.pause(name)
    look = await desk.look(name)
    row = queue_row(look, desk.limits, picture.at_ms, recently(desk, look, picture, pause))
    limits, schedules = await read_limits(context, name)
    view = QueueView(
        name, row, counts, listed, limits, schedules, pause, _why_nothing_moves(row, paused=pause is not None)
    )
    values = {
        "states": [(each.value, LABELS[each.value], counts[each.value]) for each in STATES],
        "asked": asked,
        "ages": AGES,
        "columns": [each for each in _COLUMNS[asked.state] if each not in hidden_columns(context)],
        "all_columns": _COLUMNS[asked.state],
        "actions": [
            each for each in ACTIONS.values() if each.kind == "queue" and _fits(each, paused=pause is not None)
        ],
        "bulk": [each for each in ACTIONS.values() if each.name in BULK and asked.state in each.states],
        "pages": _pages(context, asked, listed),
        "ordered_by_time": asked.state in (*FINISHED, JobState.DELAYED),
        "line": command_line("jobs list", name, state=asked.state.value),
    }
    return Page("queue.html", view, name, "queues", stream=name, values=values)


async def asked_of(context: Context, counts: dict[str, int]) -> JobsAsked:
    """Which jobs the address names."""
    name, desk, query = context.path["queue"], context.desk, context.query
    state = _state(query.get("state", "")) or _first_state(counts)
    start = context.number("start")
    if at := query.get("at", ""):
        found = desk.queue(name).position_at(state, instant_of(at, context), newest_first=state in FINISHED)
        start = await desk.within(found)
    return JobsAsked(
        queue=name,
        state=state,
        start=start,
        name=query.get("name", "")[:200],
        text=query.get("text", "")[:200],
        age=query.get("age", "") if query.get("age", "") in AGES else "",
        attempts=context.number("attempts", most=1_000) or None,
    )


def filters_of(asked: JobsAsked) -> dict[str, str | int | None]:
    """What an address carries of a filter."""
    return {
        "state": asked.state.value,
        "name": asked.name or None,
        "text": asked.text or None,
        "age": asked.age or None,
        "attempts": asked.attempts,
    }


def _pages(context: Context, asked: JobsAsked, listed: JobsView) -> dict[str, str]:
    """Where the other pages of the list are. Pages of a filter begin anywhere: the way back is in the address."""
    trail = [each for each in context.query.get("trail", "").split(",") if each.isascii() and each.isdigit()]

    def page(start: int | None, trail: list[str]) -> str:
        return context.url(
            "queues",
            asked.queue,
            **filters_of(asked),
            start=start or None,
            trail=",".join(trail[-_MOST_TRAIL:]) or None,
        )

    found = {"next_label": "go on looking" if asked.is_filtered and listed.fitting is None else ""}
    if asked.start:
        found["first"] = page(None, [])
        if trail:
            found["previous"] = page(int(trail[-1]), trail[:-1])
        elif not asked.is_filtered:
            found["previous"] = page(max(0, asked.start - PER_PAGE), [])
    if listed.next_start is not None:
        found["next"] = page(listed.next_start, [*trail, str(asked.start)])
        if not asked.is_filtered:
            found["last"] = page((listed.total - 1) // PER_PAGE * PER_PAGE, [])
    return found


def hidden_columns(context: Context) -> set[str]:
    return {each for each in context.request.cookies.get("bullpen_hidden", "").split(".") if each}


def _fits(action: Action, *, paused: bool) -> bool:
    if action.name in ("queue.pause", "queue.resume"):
        return (action.name == "queue.resume") == paused
    return action.name != "queue.lift"


def _state(text: str) -> JobState | None:
    return JobState(text) if text in {state.value for state in STATES} else None


def _first_state(counts: dict[str, int]) -> JobState:
    order = ("waiting", "prioritized", "active", "delayed", "waiting-children", "failed", "completed")
    return JobState(next((state for state in order if counts[state]), "waiting"))


def instant_of(text: str, context: Context) -> int:
    """A local time of the viewer's zone, as a field of a form gives it."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise PageProblem(422, f"{text[:60]!r} is no time; write 2026-11-18 17:30.") from None
    zone = zone_of(context.request) if found.tzinfo is None else UTC
    return int((found if found.tzinfo else found.replace(tzinfo=zone)).timestamp() * 1000)


async def read_limits(context: Context, name: str) -> tuple[dict[str, Any], int]:
    """What the queue lets run, and how many schedules it has."""
    opened, desk = context.desk.queue(name), context.desk

    async def ask() -> tuple[dict[str, Any], int]:
        most, rate = await opened.global_concurrency(), await opened.global_rate_limit()
        limits = {
            "concurrency": most,
            "rate": None if rate is None else {"most": rate.max, "durationMs": rate.duration_ms},
            "heldMs": await opened.rate_limit_ttl(),
        }
        return limits, await opened.count_schedulers()

    return await desk.within(desk.once(("limits", name), ask))


def _why_nothing_moves(row: QueueRow, *, paused: bool) -> str:
    if not row.ready or paused:
        return ""
    if row.workers == 0:
        return f"{counted(row.ready, 'job is', 'jobs are')} ready, and no worker is connected."
    return row.trouble


async def job(context: Context) -> Page:
    """One job: timeline, why it does not run, attempts, data, logs."""
    name, job_id = context.path["queue"], context.path["job"]
    view = await read_job(context.desk, name, job_id, payloads=context.payloads)
    state = JobState(view.state)
    offered = [action for action in ACTIONS.values() if action.kind == "job"]
    fix = ACTIONS.get(view.explanation["action"])
    values = {
        "offered": [action for action in offered if action.why_not(state) is None],
        "refused": [(action, action.why_not(state)) for action in offered if action.why_not(state) is not None],
        "fix": fix,
        "line_of": lambda action: Deed(action=action, queue=name, subject=job_id).command,
        "line": command_line("jobs show", name, job_id),
    }
    return Page("job.html", view, f"{job_id} · {name}", "queues", stream=name, values=values)


async def part(context: Context) -> PageAnswer:
    """The data, the result or the options of a job as JSON, without secrets; to look at, or as a file."""
    found = await context.desk.within(context.desk.queue(context.path["queue"]).get_job(context.path["job"]))
    if found is None:
        raise PageProblem(404, "There is no such job.")
    raw = {"data": found.record.raw_data, "result": found.record.field(b"returnvalue")}.get(context.path["part"])
    if raw is None:
        raise PageProblem(404, "The job has no such field.")
    try:
        body = json_bytes(hide_secrets(json.decode(raw)))
    except NotJson:
        if len(raw) > _MOST_SEARCHED:
            text = "It is not JSON, and too large to be searched for secrets."
            raise PageProblem(422, text, hint=command_line("jobs show", context.path["queue"], found.id)) from None
        body = scrub_lines(raw.decode("utf-8", "replace")).encode()
    kind = "attachment" if context.query.get("download") else "inline"
    headers = {"content-disposition": f'{kind}; filename="job-{context.path["part"]}.json"'}
    return PageAnswer(200, body, JSON, headers)


ROUTES = (
    PageRoute("/queues/{queue}", queue, view=QueueView),
    PageRoute("/queues/{queue}/jobs/{job}", job, view=JobView),
    PageRoute("/queues/{queue}/jobs/{job}/raw/{part}", part, Permission.PAYLOADS),
)
