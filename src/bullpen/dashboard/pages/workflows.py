"""`/workflows`: what an app's workflows are, where their entities stand, how one came there and what may happen next.

Nothing of the app runs here but its conditions, which only answer: an event that is emitted travels by the workflow's
own transport, and whoever runs the workflow applies it. Entities are listed where the store can list.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from bullpen._kernel import json
from bullpen._kernel.command_line import command_line
from bullpen._kernel.scrub import summary
from bullpen.dashboard._web import JSON, PageAnswer, PageProblem
from bullpen.dashboard.access import Permission
from bullpen.dashboard.fields import REASON, FormField
from bullpen.dashboard.problems import or_form
from bullpen.dashboard.reads.ledger import ms_of
from bullpen.dashboard.render import state_diagram
from bullpen.dashboard.routes import Context, Page, PageRoute
from bullpen.errors import BullpenError, InvalidOption, NotJson, word
from bullpen.ops.status import WorkStatus
from bullpen.ports.entity import EntityBrowser, HistoryEntry
from bullpen.workflow.service import Workflow

AnyWorkflow = Workflow[Any, Any, Any, Any]

_PER_PAGE: Final = 50
_HISTORY: Final = 100
_COUNTED: Final = 100_000
_KIND_WORDS: Final = {
    "idle": WorkStatus.WAITING,
    "final": WorkStatus.DONE,
    "failed": WorkStatus.DEAD,
    "passing": WorkStatus.ACTIVE,
}


class WorkflowRow(msgspec.Struct, rename="camel", frozen=True):
    """One workflow of the app."""

    name: str
    transport: str
    sources: tuple[str, ...]
    states: int
    transitions: int
    findings: int


class StateRow(msgspec.Struct, rename="camel", frozen=True):
    """One state of a definition."""

    name: str
    kind: str
    word: str
    count: int | None
    """Entities in it; None: the store cannot tell."""


class EntityRow(msgspec.Struct, rename="camel", frozen=True):
    urn: str
    status: str
    word: str
    version: int


class WorkflowView(msgspec.Struct, rename="camel", frozen=True):
    """A definition and where its entities stand."""

    row: WorkflowRow
    states: tuple[StateRow, ...]
    findings: tuple[dict[str, str], ...]
    can_list: bool
    is_cut: bool
    """The numbers are of the first hundred thousand entities."""
    entities: tuple[EntityRow, ...]
    after: str
    next_after: str


class MoveRow(msgspec.Struct, rename="camel", frozen=True):
    """One transition of an entity."""

    at_ms: int
    source: str
    target: str
    event: str
    kind: str
    version: int
    job: str
    attempt: int | None
    user: str
    correlation: str
    reason: str


class NextRow(msgspec.Struct, rename="camel", frozen=True):
    """What an event would do now."""

    event: str
    target: str
    holds: bool
    conditions: tuple[tuple[str, str], ...]


class EntityView(msgspec.Struct, rename="camel", frozen=True):
    """One entity."""

    workflow: str
    urn: str
    status: str
    kind: str
    word: str
    history: tuple[MoveRow, ...]
    options: tuple[NextRow, ...]
    can_emit: bool


async def workflows(context: Context) -> Page:
    """All workflows of the app."""
    rows = tuple(_row(each) for each in context.desk.app.workflows.all)
    values = {"line": command_line("workflows list", "MODULE:APP")}
    return Page("workflows.html", {"workflows": rows}, "Workflows", "workflows", values=values)


async def workflow(context: Context) -> Page | PageAnswer:
    """One definition with its states, and the entities of one of them."""
    found, query = _find(context), context.query
    wanted, prefix = query.get("state", "")[:120], query.get("urn", "").strip()[:300]
    browser = _browser(found)
    counts: dict[str, int] = {}
    heads: list[Any] = []
    if prefix and query.get("open"):
        return context.redirect(context.url("workflows", found.name, prefix))
    if browser is not None:
        counts = await _read(context, browser.count_by_status(most=_COUNTED))
        heads = await _read(
            context,
            browser.browse(status=wanted or None, prefix=prefix, after=query.get("after") or None, limit=_PER_PAGE + 1),
        )
    kinds = _kinds(found)
    states = tuple(
        StateRow(name, kind, _KIND_WORDS[kind].value, counts.get(name, 0) if browser is not None else None)
        for name, kind in kinds.items()
    )
    rows = tuple(
        EntityRow(each.urn, each.status, _KIND_WORDS[kinds.get(each.status, "passing")].value, each.version)
        for each in heads[:_PER_PAGE]
    )
    view = WorkflowView(
        row=_row(found),
        states=states,
        findings=tuple({"level": each.level, "code": each.code, "text": each.text} for each in found.findings),
        can_list=browser is not None,
        is_cut=sum(counts.values()) >= _COUNTED,
        entities=rows,
        after=query.get("after", "")[:300],
        next_after=rows[-1].urn if len(heads) > _PER_PAGE else "",
    )
    filters = {"state": wanted or None, "urn": prefix or None}
    pages = {"first": context.url("workflows", found.name, **filters)} if view.after else {}
    if view.next_after:
        pages["next"] = context.url("workflows", found.name, after=view.next_after, **filters)
    links = {name: context.url("workflows", found.name, state=name) for name in kinds} if view.can_list else {}
    values = {
        "wanted": wanted,
        "prefix": prefix,
        "pages": pages,
        "picture": state_diagram(found.definition, found.name, counts if view.can_list else None, links=links),
        "line": command_line("workflows show", "MODULE:APP", found.name),
    }
    return Page("workflow.html", view, f"{found.name} · workflows", "workflows", is_polled=True, values=values)


async def entity(context: Context) -> Page:
    """One entity: where it is, how it came there, what may happen next."""
    found, urn = _find(context), context.path["urn"]
    view = await _entity(context, found, urn)
    values = {
        "picture": state_diagram(found.definition, found.name, None, now=view.status),
        "line": command_line("workflows explain", "MODULE:APP", found.name, urn),
    }
    return Page("entity.html", view, f"{urn} · {found.name}", "workflows", is_polled=True, values=values)


async def _entity(context: Context, found: AnyWorkflow, urn: str) -> EntityView:
    loaded = await _read(context, found.load(urn))
    if loaded is None:
        raise PageProblem(404, f"There is no entity {urn[:200]!r} in the workflow {found.name}.")
    told = await _read(context, found.explain(urn))
    past = await _read(context, found.history(urn, limit=_HISTORY))
    return EntityView(
        workflow=found.name,
        urn=urn,
        status=told.status,
        kind=told.kind,
        word=_KIND_WORDS[told.kind].value,
        history=tuple(_move(context, each) for each in reversed(past)),
        options=tuple(NextRow(each.event, each.target, each.holds, each.conditions) for each in told.options),
        can_emit=found.client is not None and found.binding is not None,
    )


def _move(context: Context, each: HistoryEntry) -> MoveRow:
    return MoveRow(
        at_ms=ms_of(each.at),
        source=each.source,
        target=each.target,
        event=each.event,
        kind=each.kind,
        version=each.version,
        job=each.job_id or "",
        attempt=each.attempt,
        user=each.user_id or "",
        correlation=each.correlation_id or "",
        reason=summary(each.reason) if each.reason and context.payloads else "",
    )


# Emitting -----------------------------------------------------------------------------------------------------------


async def emit_form(context: Context) -> Page:
    """Ask for an event of the definition."""
    return await _emit_form(context, {**context.query}, "")


async def _emit_form(context: Context, fields: Mapping[str, str], problem: str) -> Page:
    found, urn = _find(context), context.path["urn"]
    view = await _entity(context, found, urn)
    if not view.can_emit:
        raise PageProblem(
            409,
            "This workflow has no transport here, so only the program that runs it can emit an event.",
            hint="bullpen dashboard MODULE:APP",
        )
    told = None
    event = fields.get("event", "")
    if event and not problem and "payload" in fields:
        told = await _simulated(context, found, urn, event, fields["payload"])
    values = {
        "events": [word(each) for each in found.definition.all_events()],
        "fields": fields,
        "problem": problem,
        "told": told,
        "line": command_line("workflows send", "MODULE:APP", found.name, event or "EVENT", urn),
    }
    return Page("emit.html", view, f"Emit · {urn}", "workflows", values=values)


async def _simulated(context: Context, found: AnyWorkflow, urn: str, event: str, payload: str) -> dict[str, Any]:
    """What the event would do now: conditions are asked, no action runs."""
    loaded = await _read(context, found.load(urn))
    done = found.simulate([(_event(found, event), _payload(payload))], entity=loaded)
    moves = [{"from": each.source, "to": each.target, "kind": each.kind} for each in done.moves]
    return {"start": done.start, "moves": moves, "refused": list(done.refused), "end": done.end}


async def emit(context: Context) -> Page | PageAnswer:
    """Show what it would do; asked again, send it by the transport."""
    found, urn, fields = _find(context), context.path["urn"], await context.request.form()
    if fields.get("step") != "send" and not context.request.is_api:
        return await or_form(context, _emit_form, lambda: _as_answer(_emit_form(context, fields, "")))

    async def act() -> PageAnswer:
        event, payload = _event(found, fields.get("event", "")), _payload(fields.get("payload", ""))
        await _entity(context, found, urn)

        async def do() -> list[str]:
            actions = await context.desk.actions(context.actor)
            detail = {**context.actor.note(), "event": word(event), "reason": fields.get("reason", "")[:500]}
            await actions.note("workflow.send", "dashboard", f"{found.name} {urn}", detail)
            key, by = fields.get("nonce") or context.id, context.actor.name[:60]
            sending = found.send(event, urn, payload, idempotency_key=f"dashboard-{key}", user_id=by)
            receipt = await context.desk.within(sending)
            return [f"The event {word(event)} was published: {receipt.id}."]

        (told,) = await context.once(f"emit {found.name} {urn}", do)
        if context.request.is_api:
            return PageAnswer(200, msgspec.json.encode({"done": told}), JSON)
        return context.redirect(context.url("workflows", found.name, urn), told)

    return await or_form(context, _emit_form, act)


async def _as_answer(page: Any) -> Any:
    return await page


def _event(found: AnyWorkflow, text: str) -> Any:
    for each in found.definition.all_events():
        if word(each) == text:
            return each
    raise InvalidOption("event", "an event of the definition", text)


def _payload(text: str) -> Any:
    if not text.strip():
        return None
    try:
        return json.decode(text)
    except NotJson as error:
        raise InvalidOption("payload", f"JSON, or nothing ({error})", text[:60]) from None


# Finding ------------------------------------------------------------------------------------------------------------


def _find(context: Context) -> AnyWorkflow:
    for each in context.desk.app.workflows.all:
        if each.name == context.path["name"]:
            return each
    raise PageProblem(
        404, "The app that this dashboard shows has no such workflow.", hint="bullpen dashboard MODULE:APP"
    )


def _browser(found: AnyWorkflow) -> EntityBrowser | None:
    return found.store if isinstance(found.store, EntityBrowser) else None


async def _read(context: Context, work: Any) -> Any:
    try:
        return await context.desk.within(work, "The store of the workflow")
    except BullpenError:
        raise
    except PageProblem:
        raise
    except Exception as error:  # a store or a condition of the app
        raise PageProblem(
            502, f"The app's own code failed: {type(error).__name__}. The log of the dashboard has more."
        ) from error


def _kinds(found: AnyWorkflow) -> dict[str, str]:
    states = found.definition.states
    kinds = dict.fromkeys(map(word, found.definition.all_states()), "passing")
    kinds |= dict.fromkeys(map(word, states.idles), "idle")
    kinds |= dict.fromkeys(map(word, states.finals), "final")
    return {**kinds, word(states.failed): "failed"}


def _row(found: AnyWorkflow) -> WorkflowRow:
    binding = found.binding
    return WorkflowRow(
        name=found.name,
        transport="" if binding is None else binding.label,
        sources=() if binding is None else tuple(binding.routes()),
        states=len(found.definition.all_states()),
        transitions=len(found.definition.transitions),
        findings=len(found.findings),
    )


_EMIT_FIELDS: Final = (
    FormField("event", "An event of the definition.", required=True),
    FormField("payload", "Its payload.", "json"),
    REASON,
    FormField("step", "`send`, which the API always does."),
)

ROUTES = (
    PageRoute("/workflows", workflows, menu="Workflows", key="w", needs_workflows=True),
    PageRoute("/workflows/{name}", workflow, view=WorkflowView),
    PageRoute("/workflows/{name}/{urn}", entity, view=EntityView),
    PageRoute("/workflows/{name}/{urn}/emit", emit_form, Permission.ACT),
    PageRoute("/workflows/{name}/{urn}/emit", emit, Permission.ACT, "POST", fields=_EMIT_FIELDS),
)
