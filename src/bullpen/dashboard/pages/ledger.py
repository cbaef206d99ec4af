"""`/outbox` and `/runs`: rows of the ledger by status, and one with its attempts. Dead rows of the outbox are sent back
on the page of dead letters; runs are cancelled and retried here.

A visitor of one tenant sees that tenant's rows, and no number that would tell of others.
"""

from __future__ import annotations

import time
import uuid
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

from bullpen._kernel.command_line import command_line
from bullpen._kernel.scrub import hide_secrets, scrub_lines, summary
from bullpen.dashboard._web import PageProblem
from bullpen.dashboard.pages.deeds import LedgerDeed, deed_routes
from bullpen.dashboard.reads.ledger import holds_up, ledger_of, ms_of, read
from bullpen.dashboard.routes import Context, Page, PageRoute
from bullpen.ops.operations import UNKNOWN_OUTCOME
from bullpen.ops.status import counted, duration_text, outbox_status, run_status
from bullpen.ops.views.jobs import Payload

if TYPE_CHECKING:
    from bullpen.ledger import Ledger, OutboxRow
    from bullpen.ledger.runs import RunRow

PER_PAGE: Final = 50
OUTBOX_FILTERS: Final = ("type", "event", "code", "correlation", "ordering", "source", "order")
RUN_FILTERS: Final = ("handler",)
_DEAD_LETTERS: Final = "integration_outbox"


class LedgerRow(msgspec.Struct, rename="camel", frozen=True):
    """One row of a list."""

    id: str
    status: str
    word: str
    kind: str
    """The integration type of a delivery, the handler of a run."""
    name: str
    tenant: str
    attempts: str
    at_ms: int
    error: str


class LedgerList(msgspec.Struct, rename="camel", frozen=True):
    """A page of rows."""

    status: str
    counts: dict[str, int]
    """How many rows have each status; empty for a visitor of one tenant."""
    rows: tuple[LedgerRow, ...]
    after: str
    """The row that this page begins behind."""
    next_after: str
    """The row that the next page begins behind; empty: this was the last."""


class LedgerAttempt(msgspec.Struct, rename="camel", frozen=True):
    number: int
    outcome: str
    worker: str
    ended_ms: int
    duration_ms: int | None
    code: str
    text: str


class OutboxStanding(msgspec.Struct, rename="camel", frozen=True):
    """How the outbox as a whole does."""

    oldest_due_ms: int
    """When the oldest row that waits was due; 0: none is late."""
    troubled: tuple[tuple[str, str, int], ...]
    """Destinations that are not in order: type, state, and rows that wait for it."""


class LedgerStep(msgspec.Struct, rename="camel", frozen=True):
    """A step of a run whose result is stored."""

    name: str
    ended_ms: int
    price: int


class LedgerItem(msgspec.Struct, rename="camel", frozen=True):
    """One row with all that is known."""

    id: str
    status: str
    word: str
    facts: dict[str, str]
    times: dict[str, int]
    """What happened when, Unix ms."""
    error: str
    payload: Payload | None
    attempts: tuple[LedgerAttempt, ...]
    dead_letter: bool = False
    unknown: bool = False
    """Nobody knows whether it was delivered: a person decides."""
    correlation: str = ""
    note: str = ""
    """What holds it up, as far as its row tells."""
    steps: tuple[LedgerStep, ...] = ()


async def outbox(context: Context) -> Page:
    """Deliveries by status, the oldest first."""
    from bullpen.ledger import OutboxStatus

    ledger, tenant = await ledger_of(context), context.tenant
    status, wanted = _chosen(context, [each.value for each in OutboxStatus]), _wanted(context, OUTBOX_FILTERS)
    found = await read(
        context,
        ledger.outbox.find(
            status=OutboxStatus(status) if status else None,
            integration_type=wanted["type"] or None,
            event_type=wanted["event"] or None,
            error_code=wanted["code"] or None,
            correlation_id=wanted["correlation"] or None,
            ordering_key=wanted["ordering"] or None,
            source_event_id=wanted["source"] or None,
            tenant_id=tenant,
            after_id=context.query.get("after") or None,
            newest_first=wanted["order"] == "newest",
            limit=PER_PAGE + 1,
        ),
    )
    counts = {} if context.principal.tenants else await read(context, ledger.outbox.counts())
    rows = tuple(
        LedgerRow(
            id=str(row.id),
            status=row.status.value,
            word=outbox_status(row.status.value).value,
            kind=row.integration_type,
            name=row.event_type,
            tenant=row.tenant_id or "",
            attempts=f"{row.attempts} of {row.max_attempts}",
            at_ms=ms_of(row.due_at),
            error=summary(row.last_error) if row.last_error and context.payloads else "",
        )
        for row in found[:PER_PAGE]
    )
    view = LedgerList(
        status,
        {key.value: value for key, value in counts.items()},
        rows,
        context.query.get("after", ""),
        rows[-1].id if len(found) > PER_PAGE else "",
    )
    statuses = [each.value for each in OutboxStatus]
    values = _words("outbox", statuses, "due", command_line("outbox list", status=status, type=wanted["type"] or None))
    standing = None if context.principal.tenants else await _standing(context, ledger)
    more = {
        "pages": _pages(context, "outbox", view, wanted),
        "wanted": wanted,
        "standing": standing,
        "unknown": UNKNOWN_OUTCOME,
    }
    return Page("ledger.html", view, "Outbox", "outbox", is_polled=True, values={**values, **more})


async def _standing(context: Context, ledger: Ledger) -> OutboxStanding:
    """What stands above the rows: how long the oldest waits, and which destinations hold rows up."""
    due = [
        (ms_of(oldest), name, status.value, count)
        for name, status, count, oldest in await read(context, ledger.outbox.stats())
    ]
    now_ms = int(time.time() * 1000)
    open_rows = [each for each in due if each[2] in ("PENDING", "FAILED")]
    late = [each[0] for each in open_rows if each[0] < now_ms]
    troubled = await read(context, ledger.destinations.troubled())
    waiting: dict[str, int] = {}
    for _, name, _, count in open_rows:
        waiting[name] = waiting.get(name, 0) + count
    return OutboxStanding(
        min(late, default=0),
        tuple((each.integration_type, each.state, waiting.get(each.integration_type, 0)) for each in troubled.values()),
    )


async def outbox_row(context: Context) -> Page:
    """One delivery with its attempts."""
    ledger, tenant = await ledger_of(context), context.tenant
    row_id = uuid_in(context)
    row = await read(context, ledger.outbox.get(row_id, tenant_id=tenant))
    if row is None or (context.principal.tenants and row.tenant_id != tenant):
        raise PageProblem(404, "There is no such row in the outbox.", hint="bullpen outbox list")
    attempts = await read(context, ledger.outbox.attempts_of(row_id, tenant_id=tenant))
    view = LedgerItem(
        id=row_id,
        status=row.status.value,
        word=outbox_status(row.status.value).value,
        facts=_facts(
            type=row.integration_type,
            event=row.event_type,
            source=f"{row.source_stream_id} {row.source_event_id}",
            tenant=row.tenant_id,
            correlation=row.correlation_id,
            ordering_key=row.ordering_key,
            idempotency_key=row.idempotency_key,
            attempts=f"{row.attempts} of {row.max_attempts}",
            claimed_by=row.locked_by,
        ),
        times=_times(stored=row.created_at, due=row.due_at, sent=row.sent_at),
        error=scrub_lines(row.last_error) if row.last_error and context.payloads else "",
        payload=_payload(context, row.payload_json),
        attempts=tuple(
            LedgerAttempt(
                number=each.number,
                outcome=each.outcome,
                worker=each.worker or "",
                ended_ms=ms_of(each.finished_at),
                duration_ms=None if each.started_at is None else ms_of(each.finished_at) - ms_of(each.started_at),
                code=each.error_code or "",
                text=scrub_lines(each.error or each.receipt or "") if context.payloads else "",
            )
            for each in attempts
        ),
        dead_letter=row.status.value == "DEAD",
        unknown=row.status.value == "DEAD" and row.error_code == UNKNOWN_OUTCOME,
        correlation=row.correlation_id or "",
        note=await _held_up(context, ledger, row),
    )
    values = {"of": "outbox", "title_of": "Outbox", "store": _DEAD_LETTERS, "line": command_line("outbox show", row_id)}
    return Page("ledger_row.html", view, f"{row_id} · outbox", "outbox", is_polled=True, values=values)


async def _held_up(context: Context, ledger: Ledger, row: OutboxRow) -> str:
    """Why a row does not leave: its destination, or the row before it with the same ordering key."""
    if row.status.value not in ("PENDING", "FAILED"):
        return ""
    if note := holds_up((await read(context, ledger.destinations.troubled())).get(row.integration_type)):
        return note
    if row.ordering_key is not None:
        same = await read(
            context,
            ledger.outbox.find(
                integration_type=row.integration_type, ordering_key=row.ordering_key, tenant_id=row.tenant_id, limit=200
            ),
        )
        before = [each for each in same if each.seq < row.seq and each.status.value in ("PENDING", "FAILED", "CLAIMED")]
        if before:
            return f"It waits for {counted(len(before), 'row')} of the same ordering key; the first is {before[0].id}."
    return ""


async def runs(context: Context) -> Page:
    """Runs by status, the newest first."""
    from bullpen.ledger.runs import RunStatus

    ledger, tenant = await ledger_of(context, "runs"), context.tenant
    status = _chosen(context, [each.value for each in RunStatus])
    wanted = _wanted(context, RUN_FILTERS)
    found = await read(
        context,
        ledger.runs.find(
            status=RunStatus(status) if status else None,
            handler=wanted["handler"] or None,
            tenant_id=tenant,
            after_id=_uuid_or_none(context.query.get("after", "")),
            limit=PER_PAGE + 1,
        ),
    )
    rows = tuple(
        LedgerRow(
            id=str(row.id),
            status=row.status.value,
            word=run_status(row.status.value).value,
            kind=row.handler or "default",
            name=row.version_id,
            tenant=row.tenant_id,
            attempts=str(row.attempts),
            at_ms=ms_of(row.created_at),
            error=summary(row.error_message) if row.error_message and context.payloads else "",
        )
        for row in found[:PER_PAGE]
    )
    more = rows[-1].id if len(found) > PER_PAGE else ""
    view = LedgerList(status, {}, rows, context.query.get("after", ""), more)
    statuses = [each.value for each in RunStatus]
    values = _words("runs", statuses, "submitted", command_line("runs list", status=status))
    shown = {"pages": _pages(context, "runs", view, wanted), "wanted": wanted, "standing": None}
    return Page("ledger.html", view, "Runs", "runs", is_polled=True, values={**values, **shown})


async def run(context: Context) -> Page:
    """One run."""
    ledger = await ledger_of(context, "runs")
    row = await _run_of(context, ledger)
    run_id = row.id
    view = LedgerItem(
        id=run_id,
        status=row.status.value,
        word=run_status(row.status.value).value,
        facts=_facts(
            handler=row.handler,
            version=row.version_id,
            tenant=row.tenant_id,
            cost=str(row.cost),
            took="" if row.duration_ms is None else duration_text(row.duration_ms),
            progress="" if row.progress is None or not context.payloads else scrub_lines(str(row.progress))[:200],
            attempts=str(row.attempts),
            redrives=str(row.redrives) if row.redrives else "",
        ),
        times=_times(
            submitted=row.created_at, started=row.started_at, ended=row.completed_at, sign_of_life=row.heartbeat_at
        ),
        error=scrub_lines(row.error_message) if row.error_message and context.payloads else "",
        payload=_payload(context, msgspec.json.encode(row.result).decode()) if row.result is not None else None,
        attempts=(),
        steps=await _steps(context, ledger, row),
    )
    values = {"of": "runs", "title_of": "Runs", "store": "", "line": command_line("runs show", run_id)}
    return Page("ledger_row.html", view, f"{run_id} · runs", "runs", is_polled=True, values=values)


async def _steps(context: Context, ledger: Ledger, row: RunRow) -> tuple[LedgerStep, ...]:
    found = await read(context, ledger.transactions.run(row.tenant_id, lambda runs: runs.steps(row.id)))
    return tuple(LedgerStep(each.name, ms_of(each.finished_at), each.price) for each in found)


def _uuid_or_none(text: str) -> str | None:
    try:
        return str(uuid.UUID(text))
    except ValueError:
        return None


def _chosen(context: Context, statuses: list[str]) -> str:
    status = context.query.get("status", "")
    return status if status in statuses else ""


def _wanted(context: Context, names: tuple[str, ...]) -> dict[str, str]:
    """The filters of the address."""
    return {name: context.query.get(name, "").strip()[:200] for name in names}


def _pages(context: Context, of: str, view: LedgerList, wanted: dict[str, str]) -> dict[str, str]:
    status, query = view.status or None, {name: value or None for name, value in wanted.items()}
    found = {"first": context.url(of, status=status, **query)} if view.after else {}
    if view.next_after:
        found["next"] = context.url(of, status=status, after=view.next_after, **query)
    return found


def _words(of: str, statuses: list[str], when: str, line: str) -> dict[str, Any]:
    return {"of": of, "statuses": statuses, "when_label": when, "line": line}


def uuid_in(context: Context) -> str:
    if (found := _uuid_or_none(context.path["id"])) is None:
        raise PageProblem(404, "There is no row of this id.")
    return found


def _payload(context: Context, raw: str) -> Payload:
    if not context.payloads:
        return Payload(len(raw), hidden="You may not see payloads.")
    return Payload(len(raw), value=hide_secrets(msgspec.json.decode(raw)))


def _facts(**given: str | None) -> dict[str, str]:
    return {name.replace("_", " "): value for name, value in given.items() if value}


def _times(**given: datetime | None) -> dict[str, int]:
    return {name.replace("_", " "): ms_of(at) for name, at in given.items() if at is not None}


async def _prepare_run(context: Context) -> LedgerDeed:
    ledger, verb = await ledger_of(context, "runs"), context.path["verb"]
    row = await _run_of(context, ledger)
    back = context.url("runs", row.id)
    if verb == "cancel":
        return LedgerDeed(
            *("run.cancel", "Cancel", row.id),
            "The run ends, and the part of its cost that no step has spent is returned. A worker that has the run "
            "stops at its next step.",
            "It cannot be undone.",
            back,
            command_line("runs cancel", row.id, tenant=row.tenant_id),
            danger=True,
            refused="" if not row.status.is_terminal else f"It has ended: it is {row.status.value}.",
        )
    if verb == "retry":
        return LedgerDeed(
            *("run.retry", "Retry", row.id),
            f"The run is queued again with its id and key, and its cost of {row.cost:,} is reserved again. Steps "
            "that are done stay done.",
            "It cannot be undone, but it can be cancelled.",
            back,
            command_line("runs retry", row.id, tenant=row.tenant_id),
            refused="" if row.status.value == "FAILED" else f"Only a FAILED run is retried; it is {row.status.value}.",
        )
    raise PageProblem(404, "There is no such action.")


async def _perform_run(context: Context, _reason: str) -> str:
    from bullpen.runs import Runs

    ledger = await ledger_of(context, "runs")
    row, app = await _run_of(context, ledger), context.desk.app
    service = Runs(ledger, app.connection, prefix=app.prefix).service
    if context.path["verb"] == "cancel":
        await service.cancel(row.tenant_id, row.id, actor=context.actor.name)
        return f"The run {row.id} is cancelled."
    await service.retry(row.tenant_id, row.id, actor=context.actor.name)
    return f"The run {row.id} is queued again."


async def _run_of(context: Context, ledger: Ledger) -> RunRow:
    row = await read(context, ledger.runs.get(uuid_in(context)))
    if row is None or (context.principal.tenants and row.tenant_id != context.tenant):
        raise PageProblem(404, "There is no such run.", hint="bullpen runs list")
    return row


ROUTES = (
    PageRoute("/outbox", outbox, for_tenants=True, menu="Outbox", key="x", needs_ledger=True, view=LedgerList),
    PageRoute("/outbox/{id}", outbox_row, for_tenants=True, view=LedgerItem),
    PageRoute("/runs", runs, for_tenants=True, menu="Runs", key="r", needs_ledger=True, view=LedgerList),
    PageRoute("/runs/{id}", run, for_tenants=True, view=LedgerItem),
    *deed_routes("/runs/{id}/act/{verb}", "runs", _prepare_run, _perform_run, for_tenants=True),
)
