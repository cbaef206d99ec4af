"""`bullpen outbox`: list, show, redrive and count rows; tenants and destinations."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

from bullpen.cli import show
from bullpen.cli.arguments import (
    AllOption,
    DryRunOption,
    LimitOption,
    TenantOption,
    YesOption,
    instant,
    one_way,
    parse_json,
    status,
)
from bullpen.cli.context import Done, OnLedger, Output, WrongCommand, ask, whoami
from bullpen.cli.follow import FollowLedger, follow_row
from bullpen.cli.show import Column, Record, present
from bullpen.cli.tree import Argument, Group, Option

if TYPE_CHECKING:
    from bullpen.ledger import Attempt, Destination, OutboxRow, TenantLimit

app = Group()
tenants = app.group("tenants", "Set each tenant's share and limits in the outbox.")
destinations = app.group("destinations", "List destinations with problems; disable, enable, test and replay one.")

RowsArgument = Annotated[list[str] | None, Argument("[ROW]...", "Ids of rows.")]
RowArgument = Annotated[str, Argument("ROW", "Id of the row.")]
TypeOption = Annotated[str | None, Option("--type", metavar="TYPE", help="Only this integration type.")]
CodeOption = Annotated[str | None, Option("--code", metavar="CODE", help="Only this error code.")]
TypeArgument = Annotated[str, Argument("TYPE", "Integration type, such as webhook:partnerX.")]


@app.command("list")
async def list_(
    at: OnLedger,
    state: Annotated[str | None, Option("--status", help="PENDING, CLAIMED, SENT, RETRYING or DEAD.")] = None,
    integration_type: TypeOption = None,
    code: CodeOption = None,
    tenant: TenantOption = None,
    limit: LimitOption = 50,
) -> None:
    """List rows, oldest first."""
    from bullpen.ledger import OutboxStatus

    wanted = status(OutboxStatus, state, _SHOWN)
    async with at.ledger() as ledger:
        found = await ledger.outbox.find(
            status=wanted, integration_type=integration_type, error_code=code, tenant_id=tenant, limit=limit
        )
    at.list(ROWS, found, empty="no such rows; `bullpen outbox stats` counts what is not sent")


@app.command("show")
async def show_(at: OnLedger, row: RowArgument) -> None:
    """Show one row with its payload and every attempt."""
    document = await _read(at, row, with_payload=True)
    at.fields(document if at.as_json else {**document, "status": _shown(document)}, without=("attemptLog",))
    if document["attemptLog"] and not at.as_json:
        show.say("\nattempts:")
        at.table(ATTEMPTS.columns, document["attemptLog"])


@app.command()
async def redrive(
    at: OnLedger,
    rows: RowsArgument = None,
    everything: AllOption = False,
    integration_type: TypeOption = None,
    code: CodeOption = None,
    tenant: TenantOption = None,
    limit: Annotated[int | None, Option(min=1, help="With --all: at most this many, the oldest.")] = None,
    rate: Annotated[float | None, Option(min=0.01, help="With --all: at most this many a second.")] = None,
    dry_run: DryRunOption = False,
) -> None:
    """Send dead rows again with their id and idempotency key; attempts start again."""
    from bullpen.outbox import OutboxDeadLetters

    one_way(rows, everything, "rows")
    filters = {"integration_type": integration_type, "error_code": code, "limit": limit, "rate": rate}
    if rows and (tenant is not None or dry_run or any(value is not None for value in filters.values())):
        raise WrongCommand("filters, --limit, --rate and --dry-run go with --all")
    async with at.ledger() as ledger:
        if rows:
            _done(at, "redriven", await ledger.outbox.redrive(rows, by=whoami()), rows)
            return
        letters: Any = OutboxDeadLetters(ledger.outbox, tenant_id=tenant)
        count = await letters.redrive_where(by=whoami(), dry_run=dry_run, **filters)
    at.say({"matched" if dry_run else "redriven": count}, f"{'would be ' if dry_run else ''}redriven: {count}")


@app.command(destroys=True)
async def discard(at: OnLedger, rows: RowsArgument = None, yes: YesOption = False) -> None:
    """Delete dead rows for good. Their events stay recorded, so that a replay does not send them again."""
    if not rows:
        raise WrongCommand("name the rows")
    if not yes:
        ask(f"Delete {len(rows)} row{'' if len(rows) == 1 else 's'} for good?")
    async with at.ledger() as ledger:
        _done(at, "discarded", await ledger.outbox.discard(rows, by=whoami()), rows)


@app.command()
async def confirm(at: OnLedger, rows: RowsArgument = None) -> None:
    """Mark dead rows as sent when the target is known to have them (UNKNOWN_OUTCOME)."""
    if not rows:
        raise WrongCommand("name the rows")
    async with at.ledger() as ledger:
        _done(at, "confirmed", await ledger.outbox.confirm(rows, by=whoami()), rows)


def _done(at: Output, verb: str, done: Sequence[Any], wanted: Sequence[str]) -> None:
    at.say({verb: len(done)}, f"{verb}: {len(done)}")
    if len(done) < len(wanted):
        raise at.failed(f"not {verb}: {len(wanted) - len(done)} (unknown, or not DEAD)")


@app.command()
async def stats(at: OnLedger) -> None:
    """Count rows that are not sent, by integration type and status."""
    async with at.ledger() as ledger:
        found = await ledger.outbox.stats()
    at.list(STATS, found, empty="nothing waits; `bullpen outbox list --status SENT` shows what was sent")


@app.command()
async def follow(at: FollowLedger, row: RowArgument) -> None:
    """Print what happens to a row until it is sent; the exit code is 1 if it dies."""
    await follow_row(at, f"row {row}", lambda: _read(at, row), "SENT", "DEAD")


# Tenants ------------------------------------------------------------------------------------------------------------

TenantArgument = Annotated[str, Argument("TENANT", "Name of the tenant, as its rows have it.")]
LimitTypeOption = Annotated[str, Option("--type", metavar="TYPE", help="Only this integration type; `*`: all others.")]


@tenants.command("list")
async def list_tenants(at: OnLedger) -> None:
    """List tenants that have settings; all others have weight 1 and no limit."""
    async with at.ledger() as ledger:
        found = await ledger.tenant_limits.list()
    at.list(LIMITS, found, empty="no tenant has settings: all have weight 1 and no limit")


@tenants.command("set")
async def set_tenant(
    at: OnLedger,
    tenant: TenantArgument,
    integration_type: LimitTypeOption = "*",
    weight: Annotated[int, Option(min=1, max=1_000, help="Its share of each claim, beside the shares of others.")] = 1,
    concurrency: Annotated[
        int | None, Option(min=0, help="Rows delivered at the same time, over all processes.")
    ] = None,
    rate: Annotated[int | None, Option(min=0, help="Rows started within --rate-ms, over all processes.")] = None,
    rate_ms: Annotated[int, Option(min=1, max=86_400_000, help="Window of --rate in milliseconds.")] = 1_000,
) -> None:
    """Set a tenant's share and limits in the outbox. Options that are not given return to the default."""
    from bullpen.ledger import TenantLimit

    limit = TenantLimit(
        tenant_id=tenant,
        integration_type=integration_type,
        weight=weight,
        concurrency=concurrency,
        rate_max=rate,
        rate_ms=rate_ms,
    )
    async with at.ledger() as ledger:
        await ledger.tenant_limits.set(limit, by=whoami())
    at.say(_limit_json(limit), f"set for {tenant}; dispatchers follow within a second")


@tenants.command("remove")
async def remove_tenant(at: OnLedger, tenant: TenantArgument, integration_type: LimitTypeOption = "*") -> None:
    """Remove a tenant's settings: weight 1 and no limit apply again."""
    async with at.ledger() as ledger:
        if not await ledger.tenant_limits.remove(tenant, integration_type, by=whoami()):
            raise Done(f"{tenant!r} has no settings for {integration_type!r}; nothing was removed")
    at.say({"removed": tenant}, f"removed: {tenant}")


# Destinations -------------------------------------------------------------------------------------------------------


@destinations.command("list")
async def list_destinations(at: OnLedger) -> None:
    """List destinations that are disabled or whose breaker is open; all others have no problem."""
    async with at.ledger() as ledger:
        found = (await ledger.destinations.troubled()).values()
    at.list(DESTINATIONS, found, empty="no destination has a problem")


@destinations.command()
async def disable(
    at: OnLedger,
    integration_type: TypeArgument,
    reason: Annotated[str, Option(metavar="TEXT", help="Reason, shown to others later.")] = "",
) -> None:
    """Stop sending to a destination. Its rows wait; no attempt is counted."""
    async with at.ledger() as ledger:
        await ledger.destinations.disable(integration_type, by=whoami(), reason=reason)
        is_known = await ledger.outbox.find(integration_type=integration_type, limit=1)
        known = set() if is_known else {row.integration_type for row in await ledger.outbox.find(limit=1_000)}
    at.say({"disabled": integration_type}, f"disabled: {integration_type}")
    if not is_known:  # one may also be switched off beforehand
        near = difflib.get_close_matches(integration_type, known, 3)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        show.warn(f"no row has this type yet{hint}")


@destinations.command()
async def enable(at: OnLedger, integration_type: TypeArgument) -> None:
    """Send to a destination again and reset its breaker."""
    from bullpen.ledger.endpoint_records import endpoint_id_of

    async with at.ledger() as ledger:
        enabled = await ledger.destinations.enable(integration_type, by=whoami())
        if not enabled and (endpoint_id := endpoint_id_of(integration_type)) is not None:
            raise Done(f"{integration_type} is an endpoint; use `bullpen endpoints enable {endpoint_id}`")
        if not enabled:
            raise Done(f"{integration_type} is not disabled; nothing was changed")
    at.say({"enabled": integration_type}, f"enabled: {integration_type}")


@destinations.command("test")
async def send_test(
    at: Output,
    integration_type: TypeArgument,
    program: Annotated[str, Option("--app", metavar="MODULE:APP", help="Your program, which defines the routes.")],
    payload: Annotated[str | None, Option(metavar="JSON", help="What to send; @FILE reads a file, - stdin.")] = None,
    tenant: TenantOption = None,
) -> None:
    """Send one test message to a destination now, without the database, and show the answer."""
    from bullpen.cli.programs import load_app

    content = None if payload is None else parse_json("--payload", payload)
    async with load_app(program) as opened:
        result: Any = await opened.outbox.send_test(integration_type, content, tenant_id=tenant)
    answer = {"result": type(result).__name__, **{name: getattr(result, name) for name in result.__slots__}}
    at.say(answer, " ".join(str(value) for value in answer.values() if value not in ("", None)))
    if answer["result"] != "Accepted":
        raise at.failed("the test message was not delivered")


@destinations.command()
async def replay(
    at: OnLedger,
    integration_type: TypeArgument,
    label: Annotated[
        str, Option(metavar="TEXT", help="Name of this replay; a second replay with the same name copies nothing.")
    ],
    since: Annotated[str | None, Option(metavar="TIME", help="Stored at or after this time (ISO 8601, UTC).")] = None,
    before: Annotated[str | None, Option(metavar="TIME", help="Stored before this time (ISO 8601, UTC).")] = None,
    tenant: TenantOption = None,
    new_key: Annotated[
        bool, Option("--new-key", help="Give copies new keys, so that the target does not ignore them as duplicates.")
    ] = False,
    limit: Annotated[int | None, Option(min=1, help="Read at most this many rows.")] = None,
    yes: YesOption = False,
) -> None:
    """Send again what was sent to a destination. The sent rows stay unchanged; copies of them are delivered."""
    from bullpen.outbox.replay import replay

    options: Any = {"since": instant("--since", since), "before": instant("--before", before), "tenant_id": tenant}
    if not yes:
        ask(f"Send again everything that {integration_type} got in that time?")
    async with at.ledger() as ledger:
        with at.bar("sent again", None) as move:
            count = await replay(
                *(ledger.outbox,),
                by=whoami(),
                integration_type=integration_type,
                label=label,
                new_key=new_key,
                limit=limit,
                on_progress=move,
                **options,
            )
    at.say({"replayed": count}, f"replayed: {count}")


# How they are shown -------------------------------------------------------------------------------------------------


async def _read(at: OnLedger, row_id: str, *, with_payload: bool = False) -> dict[str, Any]:
    async with at.ledger() as ledger:
        row = await ledger.outbox.get(row_id)
        if row is None:
            raise Done(f"there is no row {row_id}")
        attempts = await ledger.outbox.attempts_of(row_id)
    content = {"payload": row.payload, "headers": row.headers} if with_payload else {}
    return {**to_json(row), **content, "attemptLog": [attempt_json(each) for each in attempts]}


_SHOWN: Final = {"FAILED": "RETRYING"}
"""Statuses that people read by another word: of a run, FAILED is the end."""


def _shown(record: Mapping[str, Any]) -> str:
    stored: str = record["status"]
    return _SHOWN.get(stored, stored)


def to_json(row: OutboxRow) -> dict[str, Any]:
    fields = {
        "id": row.id,
        "integrationType": row.integration_type,
        "eventType": row.event_type,
        "status": row.status.value,
        "attempts": row.attempts,
        "maxAttempts": row.max_attempts,
        "dueAt": row.due_at,
        "createdAt": row.created_at,
        "sentAt": row.sent_at,
        "sourceStreamId": row.source_stream_id,
        "sourceEventId": row.source_event_id,
        "tenantId": row.tenant_id,
        "correlationId": row.correlation_id,
        "orderingKey": row.ordering_key,
        "lockedBy": row.locked_by,
        "errorCode": row.error_code,
        "lastError": row.last_error,
    }
    return present(fields)


def attempt_json(attempt: Attempt) -> dict[str, Any]:
    fields = {
        "number": attempt.number,
        "outcome": attempt.outcome,
        "worker": attempt.worker,
        "finishedAt": attempt.finished_at,
        "errorCode": attempt.error_code,
        "error": attempt.error,
        "receipt": attempt.receipt,
    }
    return present(fields)


def _limit_json(limit: TenantLimit) -> dict[str, Any]:
    fields = {
        "tenantId": limit.tenant_id,
        "integrationType": limit.integration_type,
        "weight": limit.weight,
        "concurrency": limit.concurrency,
        "rateMax": limit.rate_max,
        "rateMs": None if limit.rate_max is None else limit.rate_ms,
    }
    return present(fields)


def _destination_json(destination: Destination) -> dict[str, Any]:
    fields = {
        "integrationType": destination.integration_type,
        "state": destination.state,
        "brokenMs": destination.broken_ms if destination.state == "broken" else None,
        "trips": destination.trips,
        "disabledBy": destination.disabled_by,
        "disabledAt": destination.disabled_at,
        "reason": destination.reason,
    }
    return present(fields)


ROWS = Record(
    to_json,
    (
        Column("row", "id"),
        Column("type", "integrationType"),
        Column("event", "eventType", worth=3),
        Column("status", _shown),
        Column("attempts", lambda row: f"{row['attempts']}/{row['maxAttempts']}", worth=2),
        Column("due", "dueAt", worth=4),
        Column("error", "lastError", worth=1, least=16),
    ),
)
ATTEMPTS = Record(
    attempt_json,
    (
        *(Column("number"), Column("outcome"), Column("worker", worth=3), Column("ended", "finishedAt", worth=1)),
        Column("code", "errorCode", worth=2),
        Column("error or receipt", lambda each: each.get("error") or each.get("receipt"), least=16),
    ),
)
STATS = Record(
    lambda row: {"integrationType": row[0], "status": row[1].value, "count": row[2], "oldestDue": row[3]},
    (
        *(Column("type", "integrationType"), Column("status", _shown)),
        *(Column("rows", "count"), Column("oldest due", "oldestDue")),
    ),
)
LIMITS = Record(
    _limit_json,
    (
        *(Column("tenant", "tenantId"), Column("type", "integrationType"), Column("weight")),
        Column("at once", lambda each: each.get("concurrency", "any")),
        Column("rate", lambda each: f"{each['rateMax']} in {each['rateMs']} ms" if "rateMax" in each else "any"),
    ),
)
DESTINATIONS = Record(
    _destination_json,
    (
        *(Column("type", "integrationType"), Column("state")),
        Column("for", lambda each: f"{each['brokenMs'] / 1000:.0f} s" if "brokenMs" in each else "", worth=1),
        *(Column("trips", worth=2), Column("by", "disabledBy", worth=3), Column("reason", least=16)),
    ),
)
