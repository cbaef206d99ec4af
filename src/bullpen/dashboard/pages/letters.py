"""`/dead-letters`: what failed finally, grouped by cause; one letter; sending back and throwing away as operations.

Groups come from counters that the stores keep, and a group reads its own letters only: no read grows with their number.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from bullpen._kernel.scrub import hide_secrets, scrub_lines, summary
from bullpen.dashboard._web import JSON, PageAnswer, PageProblem, json_bytes
from bullpen.dashboard.access import Permission
from bullpen.dashboard.edits import EDIT_FIELDS, edit_page, must_be_as_shown, patch_of
from bullpen.dashboard.fields import REASON, TENANT, FormField, check_fields
from bullpen.dashboard.routes import Context, Page, PageRoute
from bullpen.errors import InvalidOption
from bullpen.ops.dead_letters import Found
from bullpen.ops.operations import Operation
from bullpen.ops.views.jobs import Payload
from bullpen.ports.dead_letters import DeadLetterFilter, DeadLetterGroup

_GROUPS: Final = 200
_SAMPLES: Final = 10
_LISTED: Final = 50
_FILTERS: Final = ("store", "name", "error", "fingerprint")
_FREE_DISCARD: Final = 100


class GroupRow(msgspec.Struct, rename="camel", frozen=True):
    """Failures of one kind."""

    fingerprint: str
    store: str
    name: str
    error: str
    count: int
    first_at: str
    last_at: str
    example: str
    tenants: dict[str, int]
    trend: tuple[int, ...]
    """How many failed in each of the last 24 hours, the oldest first."""


class LettersView(msgspec.Struct, rename="camel", frozen=True):
    """All stores with their depths, and groups by cause."""

    depths: dict[str, int]
    total: int
    """How many there are in the chosen store, or in all."""
    grouped: int
    """How many of them the groups hold: there are at most 200."""
    fitting: int
    """How many of those fit the filter."""
    groups: tuple[GroupRow, ...]


class LetterRow(msgspec.Struct, rename="camel", frozen=True):
    """One letter of a list."""

    id: str
    store: str
    name: str
    error: str
    failed_at: str
    attempts_made: int
    tenant: str
    job: str


class GroupView(msgspec.Struct, rename="camel", frozen=True):
    """The letters of one group."""

    store: str
    fingerprint: str
    error: str
    count: int
    letters: tuple[LetterRow, ...]


class LetterView(msgspec.Struct, rename="camel", frozen=True):
    """One letter."""

    id: str
    store: str
    source: str
    job: str
    name: str
    error: str
    stack: str
    cause: str
    failed_at: str
    attempts_made: int
    tenant: str
    fingerprint: str
    data: Payload
    edited: str = ""
    """Why its payload cannot be edited; empty: it can."""


async def groups(context: Context) -> Page:
    """What failed, is it one cause or many?"""
    depths, found = await _groups(context)
    store, name, error = (context.query.get(each, "")[:200] for each in ("store", "name", "error"))
    fitting = [
        each
        for each in found
        if store in ("", each.store) and name in ("", each.name) and error.casefold() in each.error.casefold()
    ]
    rows = tuple(_group_row(each, payloads=context.payloads) for each in fitting)
    there = depths.get(store, 0) if store else sum(depths.values())
    grouped = sum(each.count for each in found if store in ("", each.store))
    view = LettersView(depths, there, grouped, sum(row.count for row in rows), rows)
    return Page(
        "letters.html",
        view,
        "Dead letters",
        "dead-letters",
        stream="",
        values={
            "filters": {each: context.query.get(each, "") for each in ("name", "error")},
            "store": context.query.get("store", ""),
            "most": _GROUPS,
        },
    )


async def group(context: Context) -> Page:
    """The letters of one cause."""
    store, mark = context.path["store"], context.path["mark"]
    console = await context.desk.console(_tenant(context))
    if store not in console.stores:
        raise PageProblem(404, f"There is no store {store!r} of dead letters.")
    page = await context.desk.within(console.page(store, DeadLetterFilter(fingerprint=mark), limit=_LISTED))
    if not page.letters:
        raise PageProblem(404, "No dead letter of this kind is left in this store.")
    count = await _count(context, store, mark) or len(page.letters)
    rows = tuple(_row(Found(store, each), payloads=context.payloads) for each in page.letters)
    view = GroupView(store, mark, rows[0].error, count, rows)
    return Page("group.html", view, f"{mark} · {store}", "dead-letters", stream="")


async def letter(context: Context) -> Page:
    """One letter with its payload."""
    found, why_not = await _get(context)
    return Page("letter.html", _view(found, why_not, payloads=context.payloads), context.path["entry"], "dead-letters")


async def edit_form(context: Context) -> Page:
    """Ask for a change of the payload."""
    found, why_not = await _get(context)
    if why_not:
        raise PageProblem(409, why_not)
    view = _view(found, "", payloads=True)
    back = context.url("dead-letters", view.store, view.id)
    return edit_page(view, view.id, "dead-letters", "redrive", back)


async def edit(context: Context) -> Page | PageAnswer:
    """Show what would differ; with `confirmed`, send it."""
    fields = await context.request.form()
    found, why_not = await _get(context)
    if why_not:
        raise PageProblem(409, why_not)
    if context.request.is_api:  # only now: of a letter that one may not see, nothing is said
        check_fields(_EDIT_FIELDS, fields)
    patch = patch_of(fields)
    console = await context.desk.console(_tenant(context))
    found, change = await console.edit(found.store, found.letter.id, merge=patch, why=fields.get("reason", "")[:200])
    must_be_as_shown(fields, change)
    if not fields.get("confirmed"):
        view = _view(found, "", payloads=True)
        back = context.url("dead-letters", view.store, view.id)
        return edit_page(view, view.id, "dead-letters", "redrive", back, fields, (found.letter.data, change))
    identity = await console.redrive_edited(found.store, found.letter.id, change, by=context.principal.name)
    context.desk.forget()
    return _done(context, f"{identity} was sent back with the new payload.")


async def confirm(context: Context) -> Page:
    """What will be sent back or thrown away."""
    verb = _verb(context)
    store, mark, entry = (context.query.get(name, "") for name in ("store", "fingerprint", "entry"))
    chosen, count = await _chosen(context, store, mark, entry)
    view = {
        "verb": verb,
        "store": store,
        "fingerprint": mark,
        "entry": entry,
        "count": count,
        "isExact": True,
        "samples": [msgspec.to_builtins(_row(each, payloads=context.payloads)) for each in chosen[:_SAMPLES]],
    }
    needs_name = verb == "discard" and count > _FREE_DISCARD
    return Page(
        "letters_confirm.html",
        view,
        f"{verb.capitalize()} {count}",
        "dead-letters",
        values={"typed": store or "all stores" if needs_name else "", "until": _now()},
    )


async def _chosen(context: Context, store: str, mark: str, entry: str) -> tuple[list[Found], int]:
    """Some of the letters that are meant, and how many there are. Raises PageProblem when there is none."""
    console = await context.desk.console(_tenant(context))
    if entry:
        return [await context.desk.within(console.get(store, entry))], 1
    depths, _ = await _groups(context)
    chosen = list[Found]()
    for name in [store] if store else depths:
        where = DeadLetterFilter(fingerprint=mark or None)
        page = await context.desk.within(console.page(name, where, limit=_SAMPLES))
        chosen += [Found(name, each) for each in page.letters]
    if not chosen:
        raise PageProblem(404, "No such dead letter is left.")
    count = await _count(context, store, mark) if mark else depths.get(store, 0) if store else sum(depths.values())
    return chosen, max(count, len(chosen))


async def perform(context: Context) -> PageAnswer:
    """One letter is sent at once, many as an operation."""
    verb, fields = _verb(context), await context.request.form()
    store, mark, entry = (fields.get(name, "") for name in ("store", "fingerprint", "entry"))
    reason = fields.get("reason", "")[:500]
    if entry:
        console = await context.desk.console(_tenant(context))
        if verb == "redrive":
            text = f"{await console.redrive(store, entry, by=context.principal.name)} was sent back."
        else:
            await console.discard(store, entry, by=context.principal.name)
            text = f"{entry} was discarded."
        context.desk.forget()
        return _done(context, text)
    if context.principal.tenants:
        raise PageProblem(403, "Operations touch all tenants, and you may see only some.")
    most = _number(fields, "most") or _number(fields, "count")
    if not most and context.request.is_api:
        raise PageProblem(400, "Missing: most, the largest number of letters; or entry, for one letter.")
    _, there = await _chosen(context, store, mark, "")
    most = most or there
    if verb == "discard" and most > _FREE_DISCARD:
        if not context.principal.may(Permission.ADMIN):
            raise PageProblem(403, f"Discarding more than {_FREE_DISCARD} dead letters needs the role admin.")
        if fields.get("typed", "") != (store or "all stores"):
            raise PageProblem(422, f"Type the name of the store to confirm: {store or 'all stores'}")
    operation = Operation(
        kind=verb,
        by=context.principal.name,
        via=context.actor.via,
        role=context.principal.role.value,
        reason=reason,
        store=store,
        fingerprint=mark,
        until=fields.get("until", "") or _now(),
        tenant=_tenant(context) or "",
        total=min(most, there),
        most=most,
        rate=float(_number(fields, "rate")),
    )
    number = await context.desk.operations.submit(operation, key=_key(fields))
    if context.request.is_api:
        return PageAnswer(202, msgspec.json.encode({"operation": number}), JSON)
    return context.redirect(context.url("operations", number))


async def export(context: Context) -> PageAnswer:
    """Letters as NDJSON, without secrets, streamed."""
    console = await context.desk.console(_tenant(context))
    store, name, error, mark = (context.query.get(each, "")[:200] or None for each in _FILTERS)
    where = DeadLetterFilter(name=name, error=error, fingerprint=mark)
    letters = aiter(console.find(where, store=store))
    first = await anext(letters, None)  # what cannot be read is said before the answer begins

    async def lines() -> AsyncGenerator[bytes, None]:
        found = first
        while found is not None:
            yield json_bytes(_exported(found, payloads=context.payloads)) + b"\n"
            found = await anext(letters, None)

    headers = {"content-disposition": 'attachment; filename="dead-letters.ndjson"'}
    return PageAnswer(200, content_type="application/x-ndjson", headers=headers, stream=lines())


def _exported(found: Found, *, payloads: bool) -> dict[str, Any]:
    row = msgspec.to_builtins(_row(found, payloads=payloads))
    return {**row, "fingerprint": found.fingerprint, **({"data": hide_secrets(found.letter.data)} if payloads else {})}


def _done(context: Context, text: str) -> PageAnswer:
    if context.request.is_api:
        return PageAnswer(200, msgspec.json.encode({"done": text}), JSON)
    return context.redirect(context.url("dead-letters"), text)


async def _groups(context: Context) -> tuple[dict[str, int], list[DeadLetterGroup]]:
    """Depths of all stores, and what goes wrong in them."""
    tenant, desk = _tenant(context), context.desk
    console = await desk.console(tenant)

    async def ask() -> tuple[dict[str, int], list[DeadLetterGroup]]:
        groups = await console.groups(limit=_GROUPS)
        if tenant is None:
            return await console.depths(), groups
        mine = dict.fromkeys(console.stores, 0)
        for each in groups:
            mine[each.store] += each.count
        return mine, groups

    return await desk.within(desk.once(("letters", tenant), ask, for_s=1.0))


async def _count(context: Context, store: str, mark: str) -> int:
    """How many letters a group has."""
    groups = (await _groups(context))[1]
    return sum(each.count for each in groups if each.fingerprint == mark and store in ("", each.store))


def _group_row(group: DeadLetterGroup, *, payloads: bool) -> GroupRow:
    return GroupRow(
        fingerprint=group.fingerprint,
        store=group.store,
        name=group.name,
        error=group.error if payloads else "",
        count=group.count,
        first_at=group.first_at,
        last_at=group.last_at,
        example=group.example,
        tenants=dict(group.tenants),
        trend=group.trend,
    )


def _row(found: Found, *, payloads: bool) -> LetterRow:
    letter = found.letter
    return LetterRow(
        id=letter.id,
        store=found.store,
        name=letter.name,
        error=summary(letter.error_text) if payloads else "",
        failed_at=letter.failed_at,
        attempts_made=letter.attempts_made,
        tenant=letter.tenant_id or "",
        job=letter.message_id,
    )


def _view(found: Found, why_not: str, *, payloads: bool) -> LetterView:
    letter = found.letter
    raw = json_bytes(letter.data)
    shown = Payload(len(raw), hide_secrets(letter.data))
    return LetterView(
        id=letter.id,
        store=found.store,
        source=letter.source,
        job=letter.message_id,
        name=letter.name,
        error=summary(letter.error_text) if payloads else "",
        stack=scrub_lines(letter.error_stack or "") if payloads else "",
        cause=letter.cause or "",
        failed_at=letter.failed_at,
        attempts_made=letter.attempts_made,
        tenant=letter.tenant_id or "",
        fingerprint=found.fingerprint,
        data=shown if payloads else Payload(len(raw), hidden="You may not see payloads."),
        edited=why_not,
    )


async def _get(context: Context) -> tuple[Found, str]:
    from bullpen.errors import DeadLetterNotEditable

    console = await context.desk.console(_tenant(context))
    store, entry = context.path["store"], context.path["entry"]
    if store not in console.stores:
        raise PageProblem(404, f"There is no store {store!r} of dead letters.")
    try:
        return await context.desk.within(console.get_editable(store, entry)), ""
    except DeadLetterNotEditable as error:
        return await context.desk.within(console.get(store, entry)), str(error)


def _tenant(context: Context) -> str | None:
    return context.tenant


def _verb(context: Context) -> str:
    verb = context.path["verb"]
    if verb not in ("redrive", "discard"):
        raise PageProblem(404, "There is no such action.")
    return verb


def _number(fields: dict[str, str], name: str) -> int:
    text = fields.get(name, "").strip()
    if text and not (text.isascii() and text.isdigit() and len(text) < 10):
        raise InvalidOption(name, "a whole number", text)
    return int(text or "0")


def _key(fields: dict[str, str]) -> str:
    nonce = fields.get("nonce", "")
    return f"op-{nonce}" if nonce and nonce.replace("-", "").replace("_", "").isalnum() and len(nonce) < 60 else ""


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


_EDIT_FIELDS: Final = (*EDIT_FIELDS, TENANT)
_ACT_FIELDS: Final = (
    FormField("store", "Only this store of dead letters; without it all."),
    FormField("fingerprint", "Only this group."),
    FormField("entry", "Only this letter; the store must be named."),
    FormField("most", "At most so many letters; required without `entry`.", "number"),
    FormField("rate", "At most so many a second.", "number"),
    FormField("count", "How many the preview counted.", "number"),
    FormField("until", "Only letters that failed until this instant; without it until now."),
    REASON,
    FormField("typed", "To discard many: the name of the store, or `all stores`."),
    TENANT,
)

ROUTES = (
    PageRoute("/dead-letters", groups, for_tenants=True, menu="Dead letters", key="d", view=LettersView),
    PageRoute("/dead-letters/export", export, for_tenants=True, produces=("application/x-ndjson",)),
    PageRoute("/dead-letters/act/{verb}", confirm, Permission.ACT, for_tenants=True),
    PageRoute(
        "/dead-letters/act/{verb}",
        perform,
        Permission.ACT,
        "POST",
        for_tenants=True,
        fields=_ACT_FIELDS,
        keeps_address=True,
    ),
    PageRoute("/dead-letters/{store}/groups/{mark}", group, for_tenants=True, view=GroupView),
    PageRoute("/dead-letters/{store}/{entry}/edit", edit_form, Permission.ACT, for_tenants=True, view=LetterView),
    PageRoute(
        "/dead-letters/{store}/{entry}/edit",
        edit,
        Permission.ACT,
        "POST",
        for_tenants=True,
        fields=_EDIT_FIELDS,
        fields_of=lambda _: tuple(replace(each, required=False) for each in _EDIT_FIELDS),
    ),
    PageRoute("/dead-letters/{store}/{entry}", letter, for_tenants=True, view=LetterView),
)
