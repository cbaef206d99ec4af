"""Actions on one subject: a preview that says what will happen, and the deed, which is done once however often it is
sent. The command line takes the same path (`bullpen.ops.actions`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import msgspec

from bullpen.dashboard._web import JSON, PageAnswer, PageProblem
from bullpen.dashboard.access import Permission
from bullpen.dashboard.fields import REASON, FormField
from bullpen.dashboard.pages.jobs import read_limits
from bullpen.dashboard.problems import or_form
from bullpen.dashboard.reads.jobs import read_counts, read_job
from bullpen.dashboard.routes import Context, Page, PageRoute
from bullpen.ops.actions import ACTIONS, Action, ActionField, Deed
from bullpen.ops.status import counted, duration_text
from bullpen.queue import JobState


class Preview(msgspec.Struct, rename="camel", frozen=True):
    """What an action would do."""

    action: str
    title: str
    queue: str
    subject: str
    says: str
    undo: str
    command: str
    count: int | None = None
    refused: str = ""
    """Why it cannot be done now."""
    before: str = ""
    """How it is now, for what changes a value."""
    values: dict[str, str] = {}
    """The present values of the parameters."""


async def preview(context: Context) -> Page:
    """Say what will happen, and ask."""
    return await _form(context, {}, "")


async def _form(context: Context, fields: dict[str, str], problem: str) -> Page:
    action, queue, subject = _asked(context)
    _check_role(context, action)
    count, refused = await _effect(context, action, queue, subject)
    before, values = await _present(context, action, queue)
    deed = Deed(action=action, queue=queue, subject=subject)
    view = Preview(
        *(action.name, action.title, queue, subject, action.says, action.undo, deed.command),
        *(count, refused, before, values),
    )
    return Page(
        "confirm.html",
        view,
        f"{action.title} · {subject or queue}",
        "schedules" if action.kind == "schedule" else "queues",
        values={
            "action": action,
            "back": _back(context, action, queue, subject),
            "fields": fields,
            "problem": problem,
        },
    )


async def perform(context: Context) -> Page | PageAnswer:
    """Do it, and show the subject again with a note. What was typed wrong is said in the form."""
    action, queue, subject = _asked(context)
    _check_role(context, action)
    fields = await context.request.form()

    async def work() -> PageAnswer:
        _check_typed(action, queue, fields)
        await context.desk.must_exist(queue)
        given = {
            each.name: fields[each.name].strip() for each in action.parameters if fields.get(each.name, "").strip()
        }
        deed = Deed(
            action=action, queue=queue, subject=subject, parameters=given, reason=fields.get("reason", "")[:500]
        )

        async def act() -> list[str]:
            before, _ = await _present(context, action, queue)
            return [await (await context.desk.actions(context.actor)).perform(deed), before]

        text, before = await context.once(f"{action.name} {queue} {subject}", act)
        context.desk.forget()
        if before:
            text = f"{text} Before: {before}."
        undo = _address(context, ACTIONS[action.inverse], queue, subject) if action.inverse else ""
        if context.request.is_api:
            return PageAnswer(200, msgspec.json.encode({"done": text}), JSON)
        return context.redirect(_back(context, action, queue, subject, after=True), text, undo)

    return await or_form(context, _form, work)


async def _present(context: Context, action: Action, queue: str) -> tuple[str, dict[str, str]]:
    """How a limit is now, in words and as the form has it."""
    if action.name not in ("queue.concurrency", "queue.rate"):
        return "", {}
    limits, _ = await read_limits(context, queue)
    if action.name == "queue.concurrency":
        most = limits["concurrency"]
        return (f"at most {counted(most, 'job')} at once", {"most": str(most)}) if most else ("no limit", {})
    if (rate := limits["rate"]) is None:
        return "no limit", {}
    text = f"at most {counted(rate['most'], 'job')} per {duration_text(rate['durationMs'])}"
    return text, {"most": str(rate["most"]), "duration": str(rate["durationMs"])}


def _asked(context: Context) -> tuple[Action, str, str]:
    return _action(context.path), context.path["queue"], context.path.get("subject", "")


def _action(path: Mapping[str, str]) -> Action:
    action = ACTIONS.get(f"{path.get('kind', 'queue').removesuffix('s')}.{path['verb']}")
    if action is None:
        raise PageProblem(404, "There is no such action.")
    return action


def _check_role(context: Context, action: Action) -> None:
    if action.role == "admin" and not context.principal.may(Permission.ADMIN):
        raise PageProblem(403, f"{action.title} needs the role admin.")


def _check_typed(action: Action, queue: str, fields: dict[str, str]) -> None:
    if action.typed and fields.get("typed", "") != queue:
        raise PageProblem(422, f"Type the name of the queue to confirm: {queue}")


async def _effect(context: Context, action: Action, queue: str, subject: str) -> tuple[int | None, str]:
    """How many jobs are meant, and why it cannot be done."""
    desk = context.desk
    counts = await read_counts(desk, queue)
    match action.name:
        case "queue.drain":
            return counts["waiting"] + counts["prioritized"], ""
        case "queue.obliterate":
            return sum(count for state, count in counts.items() if state != "dead"), ""
        case "queue.promote-all":
            return counts["delayed"], ""
    if action.kind == "job":
        view = await read_job(desk, queue, subject, payloads=False)
        why_not = action.why_not(JobState(view.state))
        return 1, "" if why_not is None else f"The job is {view.state}: {action.title.lower()} is {why_not}."
    return None, ""


def _address(context: Context, action: Action, queue: str, subject: str) -> str:
    if action.kind == "queue":
        return context.url("queues", queue, "act", action.verb)
    return context.url("queues", queue, f"{action.kind}s", subject, "act", action.verb)


def _back(context: Context, action: Action, queue: str, subject: str, *, after: bool = False) -> str:
    if action.kind == "schedule":
        return (
            context.url("schedules")
            if after and action.verb == "remove"
            else context.url("queues", queue, "schedules", subject)
        )
    if action.kind == "job" and not (after and action.verb == "remove"):
        return context.url("queues", queue, "jobs", subject)
    if after and action.verb == "obliterate":
        return context.url("queues")
    return context.url("queues", queue)


def _fields_of(path: Mapping[str, str]) -> tuple[FormField, ...]:
    action = _action(path)
    return (*map(_field, action.parameters), REASON, *((_TYPED,) if action.typed else ()))


def _field(each: ActionField) -> FormField:
    kind = each.kind if each.kind in ("number", "flag") else "text"
    return FormField(each.name, f"{each.label}{f' ({each.hint})' if each.hint else ''}.", kind, each.required)


_TYPED: Final = FormField("typed", "The name of the queue, to confirm.")
_ALL_FIELDS: Final = (
    *{each.name: replace(_field(each), required=False) for action in ACTIONS.values() for each in action.parameters}
    .values(),
    REASON,
    _TYPED,
)  # fmt: skip


def _routes(pattern: str) -> tuple[Any, ...]:
    return (
        PageRoute(pattern, preview, Permission.ACT, view=Preview),
        PageRoute(pattern, perform, Permission.ACT, "POST", fields=_ALL_FIELDS, fields_of=_fields_of),
    )


ROUTES = (*_routes("/queues/{queue}/act/{verb}"), *_routes("/queues/{queue}/{kind}/{subject}/act/{verb}"))
