"""`/outbox` and `/runs`: rows of the ledger by status, and one with its attempts. They only show: dead rows of the
outbox are sent back on the page of dead letters.

A visitor of one tenant sees that tenant's rows, and no number that would tell of others.
"""

from __future__ import annotations

from collections.abc import Awaitable
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from bullpen._kernel.command_line import command_line
from bullpen._kernel.scrub import hide_secrets, scrub_lines, summary
from bullpen.dashboard._web import PageProblem
from bullpen.dashboard.routes import Context, Page, PageRoute
from bullpen.ops.views.jobs import Payload
from bullpen.ops.words import outbox_word, run_word

if TYPE_CHECKING:
    from bullpen.ledger import Ledger
    from bullpen.ledger.runs import RunRow

T = TypeVar("T")
PER_PAGE: Final = 50
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


async def outbox(context: Context) -> Page:
    """Deliveries by status, the oldest first."""
    from bullpen.ledger import OutboxStatus

    ledger, tenant = await _ledger(context), context.tenant
    status = _chosen(context, [each.value for each in OutboxStatus])
    found = await _read(
        context,
        ledger.outbox.find(
            status=OutboxStatus(status) if status else None,
            integration_type=context.query.get("type") or None,
            tenant_id=tenant,
            after_id=context.query.get("after") or None,
            limit=PER_PAGE + 1,
        ),
    )
    counts = {} if context.principal.tenants else await _read(context, ledger.outbox.counts())
    rows = tuple(
        LedgerRow(
            id=str(row.id),
            status=row.status.value,
            word=outbox_word(row.status.value).value,
            kind=row.integration_type,
            name=row.event_type,
            tenant=row.tenant_id or "",
            attempts=f"{row.attempts} of {row.max_attempts}",
            at_ms=_ms(row.due_at),
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
    values = _words("outbox", statuses, "due", command_line("outbox list", status=status))
    return Page("ledger.html", view, "Outbox", "outbox", values={**values, "pages": _pages(context, "outbox", view)})


async def outbox_row(context: Context) -> Page:
    """One delivery with its attempts."""
    ledger, tenant = await _ledger(context), context.tenant
    row_id = _uuid(context)
    row = await _read(context, ledger.outbox.get(row_id, tenant_id=tenant))
    if row is None or (context.principal.tenants and row.tenant_id != tenant):
        raise PageProblem(404, "There is no such row in the outbox.", hint="bullpen outbox list")
    attempts = await _read(context, ledger.outbox.attempts_of(row_id, tenant_id=tenant))
    view = LedgerItem(
        id=row_id,
        status=row.status.value,
        word=outbox_word(row.status.value).value,
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
                ended_ms=_ms(each.finished_at),
                duration_ms=None if each.started_at is None else _ms(each.finished_at) - _ms(each.started_at),
                code=each.error_code or "",
                text=scrub_lines(each.error or each.receipt or "") if context.payloads else "",
            )
            for each in attempts
        ),
        dead_letter=row.status.value == "DEAD",
    )
    values = {"of": "outbox", "title_of": "Outbox", "store": _DEAD_LETTERS, "line": command_line("outbox show", row_id)}
    return Page("ledger_row.html", view, f"{row_id} · outbox", "outbox", values=values)


async def runs(context: Context) -> Page:
    """Runs by status, the newest first."""
    from bullpen.ledger.runs import RunStatus

    ledger, tenant = await _ledger(context), context.tenant
    status = _chosen(context, [each.value for each in RunStatus])
    found = await _read(
        context,
        ledger.runs.find(status=RunStatus(status) if status else None, tenant_id=tenant, limit=PER_PAGE),
    )
    rows = tuple(
        LedgerRow(
            id=str(row.id),
            status=row.status.value,
            word=run_word(row.status.value).value,
            kind=row.handler or "default",
            name=row.version_id,
            tenant=row.tenant_id,
            attempts=str(row.attempts),
            at_ms=_ms(row.created_at),
            error=summary(row.error_message) if row.error_message and context.payloads else "",
        )
        for row in found
    )
    view = LedgerList(status, {}, rows, "", "")
    statuses = [each.value for each in RunStatus]
    values = _words("runs", statuses, "submitted", command_line("runs list", status=status))
    return Page("ledger.html", view, "Runs", "runs", values={**values, "pages": _pages(context, "runs", view)})


async def run(context: Context) -> Page:
    """One run."""
    ledger, tenant = await _ledger(context), context.tenant
    run_id = _uuid(context)
    row: RunRow | None = await _read(context, ledger.runs.get(run_id))
    if row is None or (context.principal.tenants and row.tenant_id != tenant):
        raise PageProblem(404, "There is no such run.", hint="bullpen runs list")
    view = LedgerItem(
        id=run_id,
        status=row.status.value,
        word=run_word(row.status.value).value,
        facts=_facts(
            handler=row.handler,
            version=row.version_id,
            tenant=row.tenant_id,
            cost=str(row.cost),
            attempts=str(row.attempts),
            redrives=str(row.redrives) if row.redrives else "",
        ),
        times=_times(
            submitted=row.created_at, started=row.started_at, ended=row.completed_at, sign_of_life=row.heartbeat_at
        ),
        error=scrub_lines(row.error_message) if row.error_message and context.payloads else "",
        payload=_payload(context, msgspec.json.encode(row.result).decode()) if row.result is not None else None,
        attempts=(),
    )
    values = {"of": "runs", "title_of": "Runs", "store": "", "line": command_line("runs show", run_id)}
    return Page("ledger_row.html", view, f"{run_id} · runs", "runs", values=values)


async def _ledger(context: Context) -> Ledger:
    ledger = await context.desk.ledger()
    if ledger is None:
        raise PageProblem(404, "No ledger is configured, or its tables are not made.", hint="bullpen migrate")
    return ledger


async def _read(context: Context, work: Awaitable[T]) -> T:
    return await context.desk.within(work, "ledger")


def _chosen(context: Context, statuses: list[str]) -> str:
    status = context.query.get("status", "")
    return status if status in statuses else ""


def _pages(context: Context, of: str, view: LedgerList) -> dict[str, str]:
    status, query = view.status, {"type": context.query.get("type")}
    found = {"first": context.url(of, status=status, **query)} if view.after else {}
    if view.next_after:
        found["next"] = context.url(of, status=status, after=view.next_after, **query)
    return found


def _words(of: str, statuses: list[str], when: str, line: str) -> dict[str, Any]:
    return {"of": of, "statuses": statuses, "when_label": when, "line": line}


def _uuid(context: Context) -> str:
    import uuid

    try:
        return str(uuid.UUID(context.path["id"]))
    except ValueError:
        raise PageProblem(404, "There is no row of this id.") from None


def _payload(context: Context, raw: str) -> Payload:
    if not context.payloads:
        return Payload(len(raw), hidden="You may not see payloads.")
    return Payload(len(raw), value=hide_secrets(msgspec.json.decode(raw)))


def _facts(**given: str | None) -> dict[str, str]:
    return {name.replace("_", " "): value for name, value in given.items() if value}


def _ms(instant: datetime) -> int:
    return int(instant.timestamp() * 1000)


def _times(**given: datetime | None) -> dict[str, int]:
    return {name.replace("_", " "): _ms(at) for name, at in given.items() if at is not None}


ROUTES = (
    PageRoute("/outbox", outbox, for_tenants=True, menu="Outbox", key="x", needs_ledger=True),
    PageRoute("/outbox/{id}", outbox_row, for_tenants=True),
    PageRoute("/runs", runs, for_tenants=True, menu="Runs", key="r", needs_ledger=True),
    PageRoute("/runs/{id}", run, for_tenants=True),
)
