"""`/queues/{queue}/limits` and `/queues/{queue}/add`: what a queue may do and what it holds; a job added by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from bullpen._kernel import json
from bullpen._kernel.command_line import command_line
from bullpen._kernel.scrub import hide_secrets
from bullpen.dashboard._web import JSON, PageAnswer, PageProblem
from bullpen.dashboard.access import Permission
from bullpen.dashboard.fields import REASON, FormField
from bullpen.dashboard.pages.jobs import LABELS, STATES, read_limits
from bullpen.dashboard.problems import or_form
from bullpen.dashboard.reads.jobs import read_counts
from bullpen.dashboard.render import json_text
from bullpen.dashboard.routes import Context, Page, PageRoute
from bullpen.errors import InvalidOption, NotJson

_SAMPLE: Final = 20
_LIMITS: Final = ("queue.concurrency", "queue.rate")


class StoredRow(msgspec.Struct, rename="camel", frozen=True):
    """What the jobs of one state hold."""

    state: str
    label: str
    count: int
    bytes_each: int | None
    """Of payload, result and errors, on average over a sample; None: there is no job."""


class LimitsView(msgspec.Struct, rename="camel", frozen=True):
    """What a queue may do at once, and what it holds."""

    queue: str
    concurrency: int | None
    active: int
    rate: dict[str, int] | None
    held_ms: int
    events: int
    """Entries of its stream."""
    stored: tuple[StoredRow, ...]
    sample: int


async def limits(context: Context) -> Page:
    """Limits with their present use, and what the jobs of the queue hold, by a sample."""
    name, desk = context.path["queue"], context.desk
    counts = await read_counts(desk, name)
    known, _ = await read_limits(context, name)
    queue = desk.queue(name)
    door = desk.app.connection.shared_door(queue.keys.base)

    async def ask() -> tuple[int, list[list[Any]]]:
        events = await door.call("XLEN", queue.keys.events)
        heads = await asyncio.gather(*(queue.heads(each, count=_SAMPLE) for each in STATES))
        return int(events), [list(each) for each in heads]

    events, heads = await desk.within(desk.once(("limits view", name), ask, for_s=2.0))
    stored = tuple(
        StoredRow(
            *(state.value, LABELS[state.value], counts[state.value]),
            sum(sum(head.sizes.values()) for head in found) // len(found) if found else None,
        )
        for state, found in zip(STATES, heads, strict=True)
    )
    view = LimitsView(
        *(name, known["concurrency"], counts["active"], known["rate"], max(0, known["heldMs"]), events, stored, _SAMPLE)
    )
    return Page("limits.html", view, f"Limits · {name}", "queues", stream=name)


async def add_form(context: Context) -> Page:
    """Ask for a job; filled with another one's name and data when the address names it."""
    fields: dict[str, str] = {}
    problem = ""
    if like := context.query.get("like", ""):
        found = await context.desk.within(context.desk.queue(context.path["queue"]).get_job(like))
        if found is None:
            raise PageProblem(404, "There is no such job.")
        fields = {"name": found.name}
        try:
            data = json.decode(found.record.raw_data or b"null")
            if hide_secrets(data) == data and context.payloads:
                fields["data"] = json_text(data)
            else:
                problem = "Its data has values that are hidden here, so the form is left empty."
        except NotJson:
            problem = "Its data is not JSON, so the form is left empty."
    return await _add_form(context, fields, problem)


async def _add_form(context: Context, fields: Mapping[str, str], problem: str) -> Page:
    name = context.path["queue"]
    await context.desk.must_exist(name)
    line = command_line("jobs add", name, fields.get("name") or "NAME", data="JSON")
    values = {"fields": fields, "problem": problem, "line": line}
    return Page("add.html", {"queue": name}, f"Add a job · {name}", "queues", values=values)


async def add(context: Context) -> Page | PageAnswer:
    """Add one job, however often the form is sent."""
    name, fields = context.path["queue"], await context.request.form()

    async def act() -> PageAnswer:
        data = json_of(fields.get("data", ""))
        given = [each for each in ("delay", "priority", "attempts") if fields.get(each, "").strip()]
        options: dict[str, Any] = {each: _number(each, fields[each]) for each in given}
        if wanted := fields.get("job_id", "").strip():
            options["job_id"] = wanted
        job_name = fields.get("name", "").strip()
        if not job_name:
            raise InvalidOption("name", "the name of the job", "")
        queue = await context.desk.must_exist(name)

        async def do() -> list[str]:
            actions = await context.desk.actions(context.actor)
            reason = fields.get("reason", "")[:500]
            detail = {**context.actor.note(), "name": job_name, **options, **({"reason": reason} if reason else {})}
            await actions.note("job.add", name, "", detail)
            job = await context.desk.within(queue.add(job_name, data, **options))
            return [job.id, job.added.value]

        job_id, added = await context.once(f"add {name}", do)
        context.desk.forget()
        if context.request.is_api:
            return PageAnswer(201, msgspec.json.encode({"id": job_id, "added": added}), JSON)
        told = f"The job {job_id} was added." if added == "created" else f"The job {job_id} existed already."
        return context.redirect(context.url("queues", name, "jobs", job_id), told)

    return await or_form(context, _add_form, act)


def json_of(text: str) -> Any:
    """The data of the form. Raises InvalidOption with line and column of the first mistake."""
    import json as standard

    if not text.strip():
        return {}
    try:
        standard.loads(text)
        return json.decode(text)
    except (NotJson, ValueError) as error:
        place = f"line {error.lineno}, column {error.colno}" if isinstance(error, standard.JSONDecodeError) else "it"
        raise InvalidOption("data", f"JSON; {place}: {getattr(error, 'msg', error)}", text[:60]) from None


def _number(name: str, text: str) -> int:
    if not (text.strip().isascii() and text.strip().isdigit() and len(text.strip()) < 16):
        raise InvalidOption(name, "a whole number", text[:60])
    return int(text)


_ADD_FIELDS: Final = (
    FormField("name", "The name of the job.", required=True),
    FormField("data", "Its data.", "json"),
    FormField("delay", "Milliseconds until it may run.", "number"),
    FormField("priority", "0 before all others, then 1 to 2097151.", "number"),
    FormField("attempts", "How often it is tried.", "number"),
    FormField("job_id", "An id of its own."),
    REASON,
)

ROUTES = (
    PageRoute("/queues/{queue}/limits", limits, view=LimitsView),
    PageRoute("/queues/{queue}/add", add_form, Permission.ADMIN),
    PageRoute("/queues/{queue}/add", add, Permission.ADMIN, "POST", fields=_ADD_FIELDS),
)
