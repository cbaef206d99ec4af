"""`/operations`: what is done to many objects at once, and how far it is; and the forms that ask for it.

Jobs that were ticked, all jobs of a state that fit a filter, several queues: each is shown first, with a count and
samples, and becomes an operation that touches only what fitted then.
"""

from __future__ import annotations

from typing import Final

import msgspec

from bullpen._kernel.command_line import command_line
from bullpen.dashboard._web import JSON, PageAnswer, PageProblem
from bullpen.dashboard.access import Permission
from bullpen.dashboard.fields import REASON, FormField
from bullpen.dashboard.pages.jobs import BULK, LABELS, asked_of, filters_of
from bullpen.dashboard.problems import or_form
from bullpen.dashboard.reads.jobs import AGES, JobsAsked, read_counts, read_jobs
from bullpen.dashboard.render import iso
from bullpen.dashboard.routes import Context, Page, PageRoute
from bullpen.ops.actions import ACTIONS, Action
from bullpen.ops.operations import Operation, OperationView
from bullpen.ops.views.jobs import JobRow, job_row
from bullpen.ops.views.queues import OPERATIONS
from bullpen.queue import JobState

_MOST_SELECTED: Final = 1_000
_FREE_REMOVALS: Final = 100
"""More at once is for admins who type the name of the queue."""
_SAMPLES: Final = 10


async def operations(context: Context) -> Page:
    desk = context.desk
    view = await desk.within(desk.operations.list())
    return Page("operations.html", view, "Operations", "operations", stream=OPERATIONS)


async def operation(context: Context) -> Page:
    desk = context.desk
    found = await desk.within(desk.operations.get(context.path["id"]))
    if found is None:
        raise PageProblem(404, "There is no such operation; finished ones are kept until a thousand newer ones ended.")
    return Page("operation.html", found, found.title, "operations", stream=OPERATIONS)


async def stop(context: Context) -> PageAnswer:
    await context.desk.operations.stop(context.path["id"], by=context.actor)
    return context.redirect(context.url("operations", context.path["id"]), "It ends before its next object.")


# Jobs that were ticked ----------------------------------------------------------------------------------------------


class SelectedView(msgspec.Struct, rename="camel", frozen=True):
    """Jobs that were chosen one by one."""

    queue: str
    verb: str
    count: int
    samples: tuple[JobRow, ...]


async def selected(context: Context) -> Page | PageAnswer:
    """What was ticked in a list: first a preview, then an operation."""
    fields, ids = await context.request.form(), await context.request.choices("id")
    queue, action = context.path["queue"], _bulk(fields.get("verb", ""))
    if not ids:
        raise PageProblem(422, "No job is selected. Go back and tick some.")
    if len(ids) > _MOST_SELECTED:
        raise PageProblem(422, f"At most {_MOST_SELECTED} jobs can be selected at once.")
    _check_number(context, action, len(ids))
    if not fields.get("confirmed"):
        return await _selected_form(context, fields, "")

    async def work() -> PageAnswer:
        _check_typed(action, len(ids), queue, fields)
        asked = Operation(
            kind="jobs",
            by=context.principal.name,
            via=context.actor.via,
            role=context.principal.role.value,
            reason=fields.get("reason", "")[:500],
            queue=queue,
            verb=action.verb,
            ids=ids,
            total=len(ids),
        )
        return await _submitted(context, asked)

    return await or_form(context, _selected_form, work)


async def _selected_form(context: Context, fields: dict[str, str], problem: str) -> Page:
    ids, queue, action = await context.request.choices("id"), context.path["queue"], _bulk(fields.get("verb", ""))
    heads = await context.desk.within(context.desk.queue(queue).heads_of(ids[:_SAMPLES]))
    state = JobState(fields["state"]) if fields.get("state") in set(JobState) else JobState.UNKNOWN
    samples = tuple(job_row(head, state, payloads=False) for head in heads)
    values = {
        "ids": ids,
        "action": action,
        "typed": _needs_name(action, len(ids)),
        "fields": fields,
        "problem": problem,
    }
    view = SelectedView(queue, action.verb, len(ids), samples)
    return Page("selected.html", view, f"{action.title} {len(ids)}", "queues", values=values)


# All jobs that fit --------------------------------------------------------------------------------------------------


class MatchingView(msgspec.Struct, rename="camel", frozen=True):
    """Jobs of a state that fit a filter."""

    queue: str
    verb: str
    state: str
    state_label: str
    filter: str
    """The filter in words; empty: there is none."""
    count: int
    is_exact: bool
    looked_at: int
    total: int
    samples: tuple[JobRow, ...]
    command: str


async def matching_form(context: Context) -> Page:
    return await _matching_form(context, {}, "")


async def _matching_form(context: Context, fields: dict[str, str], problem: str) -> Page:
    view, asked, action = await _matching(context)
    values = {
        "action": action,
        "typed": _needs_name(action, view.count),
        "until": fields.get("until") or iso(await _now_ms(context)),
        "back": context.url("queues", view.queue, **filters_of(asked)),
        "fields": fields,
        "problem": problem,
    }
    return Page("matching.html", view, f"{action.title} {view.count}", "queues", values=values)


async def matching(context: Context) -> Page | PageAnswer:
    """Do it to all that fitted when the form was made."""
    fields = await context.request.form()
    if context.request.is_api:
        _check_filter(fields)
    view, asked, action = await _matching(context)
    _check_number(context, action, view.count)

    async def work() -> PageAnswer:
        most, rate = _number(fields, "most"), _number(fields, "rate")
        total = _number(fields, "count") or view.count
        _check_typed(action, view.count, view.queue, fields)
        since, before = asked.bounds(await _now_ms(context))
        until = fields.get("until", "") or iso(await _now_ms(context))
        operation = Operation(
            kind="matching",
            by=context.principal.name,
            via=context.actor.via,
            role=context.principal.role.value,
            reason=fields.get("reason", "")[:500],
            queue=view.queue,
            verb=action.verb,
            state=view.state,
            name=asked.name,
            text=asked.text,
            attempts=asked.attempts or 0,
            label=view.filter,
            since="" if since is None else iso(since),
            until=until if before is None else min(until, iso(before)),
            total=total,
            most=most or total,
            rate=float(rate),
        )
        return await _submitted(context, operation)

    return await or_form(context, _matching_form, work)


def _check_filter(fields: dict[str, str]) -> None:
    """A list shows more when it does not understand a filter; a deed must not."""
    if fields["state"] not in set(JobState):
        raise PageProblem(422, f"state must be one of {', '.join(JobState)}.")
    if fields.get("age", "") not in ("", *AGES):
        raise PageProblem(422, f"age must be one of {', '.join(AGES)}.")
    _number(fields, "attempts")


async def _matching(context: Context) -> tuple[MatchingView, JobsAsked, Action]:
    queue, desk, action = context.path["queue"], context.desk, _bulk(context.path["verb"])
    asked = await asked_of(context, await read_counts(desk, queue))
    if asked.state not in action.states:
        raise PageProblem(409, f"{action.title} is {action.why_not(asked.state)}.")
    found = await read_jobs(desk, asked, payloads=context.payloads, count=_MOST_SELECTED)
    is_exact = found.fitting is not None or found.next_start is None
    count = found.fitting if found.fitting is not None else len(found.jobs)
    view = MatchingView(
        queue=queue,
        verb=action.verb,
        state=asked.state.value,
        state_label=LABELS[asked.state.value],
        filter=_in_words(asked),
        count=count if is_exact else max(count, round(count / max(1, found.looked_at) * found.total)),
        is_exact=is_exact,
        looked_at=found.looked_at,
        total=found.total,
        samples=found.jobs[:_SAMPLES],
        command=_command(asked, action),
    )
    return view, asked, action


def _in_words(asked: JobsAsked) -> str:
    parts = [
        f"the name {asked.name}" if asked.name else "",
        f"the text {asked.text}" if asked.text else "",
        f"an age of {'less' if asked.age.startswith('<') else 'more'} than {asked.age[1:]}" if asked.age else "",
        f"{asked.attempts} or more attempts" if asked.attempts else "",
    ]
    return " and ".join(part for part in parts if part)


def _command(asked: JobsAsked, action: Action) -> str:
    """The same for a terminal, where there is such a command."""
    if asked.is_filtered or action.verb == "remove":
        return ""
    return command_line(f"jobs {action.verb}", asked.queue, all=True)


# What they share ----------------------------------------------------------------------------------------------------


def _bulk(verb: str) -> Action:
    action = ACTIONS.get(f"job.{verb}")
    if action is None or action.name not in BULK:
        raise PageProblem(404, "There is no such action.")
    return action


def _needs_name(action: Action, count: int) -> bool:
    return action.danger and count > _FREE_REMOVALS


def _check_number(context: Context, action: Action, count: int) -> None:
    if _needs_name(action, count) and not context.principal.may(Permission.ADMIN):
        raise PageProblem(403, f"Removing more than {_FREE_REMOVALS} jobs needs the role admin.")


def _check_typed(action: Action, count: int, queue: str, fields: dict[str, str]) -> None:
    if _needs_name(action, count) and fields.get("typed", "") != queue:
        raise PageProblem(422, f"Type the name of the queue to confirm: {queue}")


def _number(fields: dict[str, str], name: str) -> int:
    text = fields.get(name, "").strip()
    if text and not (text.isascii() and text.isdigit() and len(text) < 10):
        raise PageProblem(422, f"{name} must be a whole number, not {text[:40]!r}.")
    return int(text or 0)


async def _submitted(context: Context, asked: Operation) -> PageAnswer:
    async def work() -> list[str]:
        return [await context.desk.operations.submit(asked)]

    (number,) = await context.once(f"{asked.kind} {asked.verb} {asked.queue}", work)
    if context.request.is_api:
        return PageAnswer(202, msgspec.json.encode({"operation": number}), JSON)
    return context.redirect(context.url("operations", number))


async def _now_ms(context: Context) -> int:
    door = context.desk.app.connection.shared_door(f"{context.desk.app.prefix}:")
    seconds, micros = await context.desk.within(door.call("TIME"))
    return int(seconds) * 1000 + int(micros) // 1000


# Several queues -----------------------------------------------------------------------------------------------------


class QueuesView(msgspec.Struct, rename="camel", frozen=True):
    """Queues that would be paused or resumed together."""

    verb: str
    name: str
    meant: tuple[str, ...]
    left: dict[str, str]
    """Queues that stay as they are, and why."""


async def queues_form(context: Context) -> Page:
    return await _queues_form(context, {}, "")


async def _queues_form(context: Context, fields: dict[str, str], problem: str) -> Page:
    view, action = await _queues(context)
    values = {"action": action, "fields": fields, "problem": problem, "back": context.url()}
    return Page("queues_act.html", view, f"{action.title} {len(view.meant)} queues", "overview", values=values)


async def queues(context: Context) -> Page | PageAnswer:
    fields = await context.request.form()

    async def work() -> PageAnswer:
        view, action = await _queues(context)
        if not view.meant:
            raise PageProblem(409, "There is no such queue any more.")
        asked = Operation(
            kind="queues",
            by=context.principal.name,
            via=context.actor.via,
            role=context.principal.role.value,
            reason=fields.get("reason", "")[:500],
            verb=action.verb,
            ids=list(view.meant),
            total=len(view.meant),
        )
        return await _submitted(context, asked)

    return await or_form(context, _queues_form, work)


async def _queues(context: Context) -> tuple[QueuesView, Action]:
    """Pausing leaves what is paused; resuming only touches what was paused together with others."""
    action, name = ACTIONS.get(f"queue.{context.path['verb']}"), context.query.get("name", "")[:200]
    if action is None or action.verb not in ("pause", "resume"):
        raise PageProblem(404, "There is no such action.")
    looks = [
        look
        for look in (await context.desk.snapshot()).looks
        if name.lower() in look.queue.lower() and look.queue != OPERATIONS
    ][:_MOST_SELECTED]
    left: dict[str, str] = {}
    for look in looks:
        if action.verb == "pause" and look.paused:
            left[look.queue] = "is paused already, and stays so when the others are resumed"
        elif action.verb == "resume":
            note = await context.desk.pause(look.queue)
            if note is None:
                left[look.queue] = "is not paused"
            elif not note.group:
                left[look.queue] = f"was paused on its own{f' by {note.by}' if note.by else ''}"
    meant = tuple(look.queue for look in looks if look.queue not in left)
    return QueuesView(action.verb, name, meant, left), action


_TYPED: Final = FormField("typed", "The name of the queue, to remove many jobs.")
_SELECTED_FIELDS: Final = (
    FormField("verb", "What is done to them, such as retry.", required=True),
    FormField("id", "The ids of the jobs.", "list", required=True),
    FormField("state", "Their state, shown in the preview."),
    FormField("confirmed", "Do it; without it the jobs are shown.", "flag"),
    REASON,
    _TYPED,
)
_MATCHING_FIELDS: Final = (
    FormField("state", "The state of the jobs.", required=True),
    FormField("name", "A part of their names."),
    FormField("text", "A text that their data hold."),
    FormField("age", "How old they are, as the list of jobs has it."),
    FormField("attempts", "How many attempts they made at least.", "number"),
    FormField("most", "At most so many jobs.", "number"),
    FormField("rate", "At most so many a second.", "number"),
    FormField("count", "How many the preview counted.", "number"),
    FormField("until", "Only jobs that fitted at this instant."),
    REASON,
    _TYPED,
)
_QUEUES_FIELDS: Final = (FormField("name", "A part of the names of the queues."), REASON)

ROUTES = (
    PageRoute("/operations", operations, menu="Operations", key="b", view=list[OperationView]),
    PageRoute("/operations/{id}", operation, view=OperationView),
    PageRoute("/operations/{id}/stop", stop, Permission.ACT, "POST", fields=()),
    PageRoute("/queues/{queue}/selected", selected, Permission.ACT, "POST", fields=_SELECTED_FIELDS),
    PageRoute("/queues/{queue}/matching/{verb}", matching_form, Permission.ACT, view=MatchingView),
    PageRoute("/queues/{queue}/matching/{verb}", matching, Permission.ACT, "POST", fields=_MATCHING_FIELDS),
    PageRoute("/queues-act/{verb}", queues_form, Permission.ACT, view=QueuesView),
    PageRoute("/queues-act/{verb}", queues, Permission.ACT, "POST", fields=_QUEUES_FIELDS),
)
