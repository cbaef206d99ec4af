"""What people decide about deliveries: rows whose outcome is unknown, history that is sent again, a test message, and
events that a projector parked.

One row is decided at once; many become an operation, which touches only what fitted when it was confirmed.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

from bullpen._kernel.command_line import command_line
from bullpen._kernel.scrub import hide_secrets, scrub_lines, summary
from bullpen.dashboard._web import JSON, PageAnswer, PageProblem
from bullpen.dashboard.access import Permission
from bullpen.dashboard.fields import REASON, TENANT, FormField
from bullpen.dashboard.pages.deeds import LedgerDeed, deed_routes
from bullpen.dashboard.pages.jobs import instant_of
from bullpen.dashboard.pages.ledger import uuid_in
from bullpen.dashboard.problems import or_form
from bullpen.dashboard.reads.ledger import ledger_of, ms_of, read
from bullpen.dashboard.routes import Context, Page, PageRoute
from bullpen.errors import NotConfigured, UnreadableEvent
from bullpen.ops.operations import UNKNOWN_OUTCOME, Operation
from bullpen.ops.views.jobs import Payload

if TYPE_CHECKING:
    from bullpen.ledger import OutboxRow

_MOST: Final = 100_000
_PARKED: Final = 100
_REPEATS: Final = (
    "It has the same idempotency key as before: a target that keeps keys takes it once, any other one may do it twice."
)


# One row whose outcome is unknown -----------------------------------------------------------------------------------


async def _row(context: Context) -> OutboxRow:
    ledger = await ledger_of(context)
    row = await read(context, ledger.outbox.get(uuid_in(context), tenant_id=context.tenant))
    if row is None or (context.principal.tenants and row.tenant_id != context.tenant):
        raise PageProblem(404, "There is no such row in the outbox.", hint="bullpen outbox list")
    return row


async def _prepare_row(context: Context) -> LedgerDeed:
    row, verb = await _row(context), context.path["verb"]
    is_unknown = row.status.value == "DEAD" and row.error_code == UNKNOWN_OUTCOME
    refused = "" if is_unknown else f"Its outcome is known: it is {row.status.value.lower()}."
    back = context.url("outbox", row.id)
    if verb == "delivered":
        return LedgerDeed(
            *("outbox.confirm", "It was delivered", row.id),
            f"The row counts as sent, because you know that {row.integration_type} has it. Nothing is sent.",
            "It cannot be undone.",
            back,
            command_line("outbox confirm", row.id),
            refused=refused,
        )
    if verb == "again":
        return LedgerDeed(
            *("outbox.redrive", "Send again", row.id),
            f"The row goes to {row.integration_type} once more. {_REPEATS}",
            "It cannot be undone.",
            back,
            command_line("outbox redrive", row.id),
            refused=refused,
        )
    raise PageProblem(404, "There is no such action.")


async def _decide_row(context: Context, _reason: str) -> str:
    ledger, row = await ledger_of(context), await _row(context)
    act = ledger.outbox.confirm if context.path["verb"] == "delivered" else ledger.outbox.redrive
    if not await act([row.id], by=context.actor.name, tenant_id=context.tenant):
        raise PageProblem(409, "Somebody else decided meanwhile.")
    return "It counts as sent." if context.path["verb"] == "delivered" else "It is sent again."


# Many rows ----------------------------------------------------------------------------------------------------------


class RowsView(msgspec.Struct, rename="camel", frozen=True):
    """Rows of a destination that an operation would touch."""

    verb: str
    destination: str
    tenant: str
    count: int
    is_exact: bool
    says: str
    undo: str
    command: str


async def rows_form(context: Context) -> Page:
    return await _rows_form(context, {}, "")


async def _rows_form(context: Context, fields: dict[str, str], problem: str) -> Page:
    view = await _rows(context, fields)
    values = {
        "fields": fields,
        "problem": problem,
        "until": fields.get("fixed") or datetime.now(UTC).isoformat(),
        "back": context.url("destinations", view.destination),
        "title_of": {"confirm": "They were delivered", "resend": "Send again", "replay": "Replay history"}[view.verb],
    }
    return Page("rows.html", view, f"{values['title_of']} · {view.destination}", "outbox", values=values)


async def _rows(context: Context, fields: dict[str, str]) -> RowsView:
    ledger, verb, name = await ledger_of(context), context.path["verb"], context.path["type"]
    if verb not in ("confirm", "resend", "replay"):
        raise PageProblem(404, "There is no such action.")
    since, before = _period(context, fields)
    tenant = fields.get("tenant", context.query.get("tenant", "")).strip()[:120]
    count = await read(
        context,
        ledger.looks.count_rows(
            status="SENT" if verb == "replay" else "DEAD",
            error_code=None if verb == "replay" else UNKNOWN_OUTCOME,
            integration_type=name,
            tenant_id=tenant or None,
            since=since if verb == "replay" else None,
            before=before,
            most=_MOST,
        ),
    )
    says = {
        "confirm": f"The rows count as sent, because you know that {name} has them. Nothing is sent.",
        "resend": f"The rows go to {name} once more. {_REPEATS}",
        "replay": f"Copies of what was sent go to {name} once more; the sent rows stay as they are. With the same keys "
        "a target that keeps keys takes none of them.",
    }[verb]
    commands = {
        "confirm": command_line("outbox confirm"),
        "resend": command_line("outbox redrive", type=name),
        "replay": command_line("outbox destinations replay", name, label="NAME"),
    }
    return RowsView(
        *(verb, name, tenant, min(count, _MOST), count <= _MOST),
        *(says, "It cannot be undone; it can be stopped while it runs.", commands[verb]),
    )


def _period(context: Context, fields: dict[str, str]) -> tuple[datetime | None, datetime | None]:
    since, before = (
        datetime.fromtimestamp(instant_of(fields[name].strip(), context) / 1000, UTC)
        if fields.get(name, "").strip()
        else None
        for name in ("since", "before")
    )
    return since, before


async def rows(context: Context) -> Page | PageAnswer:
    """With `confirmed` an operation; else the count anew, for the period that was typed."""
    fields = await context.request.form()

    async def work() -> Page | PageAnswer:
        view = await _rows(context, fields)
        if not fields.get("confirmed"):
            return await _rows_form(context, fields, "")
        if not view.count:
            raise PageProblem(409, "No row fits.")
        label = fields.get("label", "").strip()
        if view.verb == "replay" and not (label.isprintable() and 0 < len(label) <= 40):
            raise PageProblem(422, "Name the replay, in 1 to 40 characters: the same name again copies nothing.")
        if view.verb == "replay" and not context.principal.may(Permission.ADMIN):
            raise PageProblem(403, "Replaying history needs the role admin.")
        since, before = _period(context, fields)
        fixed = fields.get("fixed") or datetime.now(UTC).isoformat()
        asked = Operation(
            kind=view.verb,
            by=context.principal.name,
            via=context.actor.via,
            role=context.principal.role.value,
            reason=fields.get("reason", "")[:500],
            store=view.destination,
            tenant=view.tenant,
            label=label if view.verb == "replay" else "",
            verb="new-key" if fields.get("new_key") else "",
            since=since.isoformat() if since and view.verb == "replay" else "",
            until=min(fixed, before.isoformat()) if before else fixed,
            total=view.count,
            rate=float(_number(fields.get("rate", ""))),
        )

        async def do() -> list[str]:
            return [await context.desk.operations.submit(asked)]

        (number,) = await context.once(f"rows {view.verb} {view.destination}", do)
        if context.request.is_api:
            return PageAnswer(202, msgspec.json.encode({"operation": number}), JSON)
        return context.redirect(context.url("operations", number))

    return await or_form(context, _rows_form, work)


def _number(text: str) -> int:
    text = text.strip()
    if text and not (text.isascii() and text.isdigit() and len(text) < 8):
        raise PageProblem(422, f"The rate must be a whole number, not {text[:40]!r}.")
    return int(text or 0)


# A test message -----------------------------------------------------------------------------------------------------


async def _prepare_test(context: Context) -> LedgerDeed:
    name, app = context.path["type"], context.desk.app
    refused = ""
    if not app.has_outbox:
        refused = "This dashboard knows no routes: serve it as bullpen dashboard MODULE:APP."
    return LedgerDeed(
        *("outbox.test", "Send a test", name),
        "One message of the type bullpen.test.v1 goes there now, past the database. Nothing is stored or tried again.",
        "It cannot be undone.",
        context.url("destinations", name),
        command_line("outbox destinations test", name, app="MODULE:APP"),
        refused=refused,
    )


async def _send_test(context: Context, reason: str) -> str:
    name = context.path["type"]
    actions = await context.desk.actions(context.actor)
    await actions.note("outbox.test", "outbox", "", {**context.actor.note(), "type": name, "reason": reason})
    try:
        result: Any = await context.desk.app.outbox.send_test(name)
    except NotConfigured as error:
        raise PageProblem(409, str(error)) from None
    told = " ".join(str(getattr(result, part)) for part in result.__slots__ if getattr(result, part) not in ("", None))
    verdict = "took it" if type(result).__name__ == "Accepted" else "did not take it"
    return f"{name} {verdict}{f': {scrub_lines(told)[:300]}' if told and context.payloads else ''}."


# Parked events ------------------------------------------------------------------------------------------------------


class ParkedRow(msgspec.Struct, rename="camel", frozen=True):
    """An event that no projector could take."""

    id: int
    projector: str
    route: str
    event: str
    stream: str
    error: str
    tries: int
    retry_wanted: bool
    parked_ms: int


class ParkedView(msgspec.Struct, rename="camel", frozen=True):
    """The oldest of them."""

    total: int
    events: tuple[ParkedRow, ...]


class ParkedItem(msgspec.Struct, rename="camel", frozen=True):
    """One of them with its data."""

    row: ParkedRow
    data: Payload


async def parked(context: Context) -> Page:
    """Events that wait for somebody, oldest first."""
    ledger = await ledger_of(context, "projector", "parked events")
    found = await read(context, ledger.parked.find(limit=_PARKED))
    view = ParkedView(
        await read(context, ledger.parked.count()),
        tuple(_parked_row(each, payloads=context.payloads) for each in found),
    )
    values = {"line": command_line("projectors parked list")}
    return Page("parked.html", view, "Parked events", "outbox", is_polled=True, values=values)


async def parked_event(context: Context) -> Page:
    """One of them."""
    found = await _parked(context)
    raw = found.event.data_bytes
    try:
        value = hide_secrets(found.event.data)
        shown = Payload(len(raw), value)
    except UnreadableEvent:
        shown = Payload(len(raw), text=scrub_lines(raw[:20_000].decode("utf-8", "replace")))
    data = shown if context.payloads else Payload(len(raw), hidden="You may not see payloads.")
    view = ParkedItem(_parked_row(found, payloads=context.payloads, whole=True), data)
    values = {"line": _parked_line("show", found.id)}
    return Page("parked_event.html", view, f"Parked event {found.id}", "outbox", values=values)


async def _parked(context: Context) -> Any:
    text = context.path["id"]
    ledger = await ledger_of(context, "projector", "parked events")
    wanted = int(text) if text.isascii() and text.isdigit() and len(text) < 18 else -1
    found = await read(context, ledger.parked.find(ids=[wanted], limit=1))
    if not found:
        raise PageProblem(404, "There is no such parked event: it may be done.", hint="bullpen projectors parked list")
    return found[0]


def _parked_row(each: Any, *, payloads: bool, whole: bool = False) -> ParkedRow:
    error = (scrub_lines(each.error) if whole else summary(each.error)) if payloads else ""
    return ParkedRow(
        *(each.id, each.projector, each.route or "", each.event.type, each.event.stream, error),
        *(each.tries, each.retry_wanted, ms_of(each.parked_at)),
    )


def _parked_line(verb: str, number: int) -> str:
    return command_line(f"projectors parked {verb}", str(number))


async def _prepare_parked(context: Context) -> LedgerDeed:
    found, verb = await _parked(context), context.path["verb"]
    about, back = f"{found.event.type} {found.id}", context.url("parked")
    if verb == "retry":
        return LedgerDeed(
            *("projector.retry", "Try again", about),
            f"The projector {found.projector} tries this event once more when it runs next.",
            "It cannot be undone; an event that fails again is parked again.",
            back,
            _parked_line("retry", found.id),
            refused="Somebody asked for it already." if found.retry_wanted else "",
        )
    if verb == "skip":
        return LedgerDeed(
            *("projector.skip", "Skip", about),
            "The event is passed over for good: nothing is made of it. Save its data first if you need it.",
            "It cannot be undone.",
            back,
            _parked_line("skip", found.id),
            danger=True,
        )
    raise PageProblem(404, "There is no such action.")


async def _decide_parked(context: Context, _reason: str) -> str:
    ledger, found = await ledger_of(context, "projector", "parked events"), await _parked(context)
    act = ledger.parked.retry if context.path["verb"] == "retry" else ledger.parked.skip
    if not await act([found.id], by=context.actor.name):
        raise PageProblem(409, "Somebody else decided meanwhile.")
    return "It is tried again." if context.path["verb"] == "retry" else "It was skipped."


_ROWS_FIELDS: Final = (
    FormField("confirmed", "Do it; without it the rows are counted.", "flag"),
    FormField("since", "Only rows from this time on."),
    FormField("before", "Only rows before this time."),
    FormField("fixed", "Only rows of before this instant, when the rows were counted."),
    TENANT,
    FormField("label", "The name of a replay, in 1 to 40 characters."),
    FormField("new_key", "Replay with new keys.", "flag"),
    FormField("rate", "At most so many a second.", "number"),
    REASON,
)

ROUTES = (
    *deed_routes("/outbox/{id}/act/{verb}", "outbox", _prepare_row, _decide_row, for_tenants=True),
    PageRoute("/destinations/{type}/rows/{verb}", rows_form, Permission.ACT, view=RowsView),
    PageRoute("/destinations/{type}/rows/{verb}", rows, Permission.ACT, "POST", fields=_ROWS_FIELDS),
    *deed_routes("/destinations/{type}/test", "outbox", _prepare_test, _send_test),
    PageRoute("/parked", parked, view=ParkedView),
    PageRoute("/parked/{id}", parked_event, view=ParkedItem),
    *deed_routes("/parked/{id}/act/{verb}", "outbox", _prepare_parked, _decide_parked),
)
