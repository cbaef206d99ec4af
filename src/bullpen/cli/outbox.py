"""`bullpen outbox`: look at rows, send dead ones back, count what waits."""

from __future__ import annotations

import getpass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bullpen.cli import common
from bullpen.cli.common import Done, JsonOption, WrongCommand
from bullpen.settings import Settings

if TYPE_CHECKING:
    from bullpen.ledger import Attempt, Ledger, OutboxRow, OutboxStatus

app = typer.Typer(
    help="Look at rows of the outbox, send dead or lost ones again, switch destinations off and on.",
    no_args_is_help=True,
)

DatabaseOption = Annotated[
    str | None, typer.Option("--database", metavar="URL", help="Database to use; else what is configured.")
]
RowsArgument = Annotated[list[str] | None, typer.Argument(metavar="[ROW]...", help="Ids of rows.", show_default=False)]
RowArgument = Annotated[str, typer.Argument(metavar="ROW", help="Id of the row.", show_default=False)]
TypeOption = Annotated[str | None, typer.Option("--type", metavar="TYPE", help="Only this integration type.")]
CodeOption = Annotated[str | None, typer.Option("--code", metavar="CODE", help="Only this error code.")]
TenantOption = Annotated[str | None, typer.Option("--tenant", metavar="ID", help="Only this tenant.")]
AllOption = Annotated[bool, typer.Option("--all", help="All dead rows that match the filters.")]
LimitOption = Annotated[int, typer.Option(min=1, help="At most so many.")]


@app.callback()
def outbox() -> None:
    """Look at rows of the outbox, send dead or lost ones again, switch destinations off and on."""


@app.command("list")
def list_(
    status: Annotated[str | None, typer.Option(help="PENDING, CLAIMED, SENT, FAILED or DEAD.")] = None,
    integration_type: TypeOption = None,
    code: CodeOption = None,
    tenant: TenantOption = None,
    limit: LimitOption = 50,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """List rows, oldest first."""
    found = common.wait_for(
        _find(database, status=_status(status), integration_type=integration_type, error_code=code, tenant_id=tenant,
              limit=limit)
    )  # fmt: skip
    if as_json:
        common.print_json([to_json(row) for row in found])
    elif not found:
        common.err.print("no such rows")
    else:
        rows = [
            (
                row.id,
                row.integration_type,
                row.event_type,
                row.status.value,
                f"{row.attempts}/{row.max_attempts}",
                _when(row.due_at),
                common.short(row.last_error or "", limit=60),
            )
            for row in found
        ]
        common.print_table(("row", "type", "event", "status", "attempts", "due", "error"), rows)


@app.command()
def show(row: RowArgument, database: DatabaseOption = None, as_json: JsonOption = False) -> None:
    """Show one row with its payload and every attempt."""
    found, attempts = common.wait_for(get(database, row))
    if as_json:
        common.print_json({**to_json(found), "payload": found.payload, "headers": found.headers,
                           "attemptLog": [attempt_json(each) for each in attempts]})  # fmt: skip
        return
    fields = {**to_json(found), "payload": found.payload, "headers": found.headers}
    common.print_table(
        ("field", "value"), [(name, common.short(value, limit=10_000)) for name, value in fields.items()]
    )
    if attempts:
        common.out.print("\nattempts:")
        rows = [
            (
                each.number,
                each.outcome,
                each.worker or "",
                _when(each.finished_at),
                each.error_code or "",
                each.error or each.receipt or "",
            )
            for each in attempts
        ]
        common.print_table(
            ("number", "outcome", "worker", "ended", "code", "error or receipt"), rows, numbers=["number"]
        )


@app.command()
def redrive(
    rows: RowsArgument = None,
    everything: AllOption = False,
    integration_type: TypeOption = None,
    code: CodeOption = None,
    tenant: TenantOption = None,
    limit: Annotated[int | None, typer.Option(min=1, help="With --all: at most so many, the oldest.")] = None,
    rate: Annotated[float | None, typer.Option(min=0.01, help="With --all: at most so many a second.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --all: count only, change nothing.")] = False,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send dead rows back with their id and idempotency key; attempts start again."""
    _one_way(rows, everything)
    filters = {"integration_type": integration_type, "error_code": code, "limit": limit, "rate": rate}
    if rows and (tenant is not None or dry_run or any(value is not None for value in filters.values())):
        raise WrongCommand("filters, --limit, --rate and --dry-run go with --all")
    done = common.wait_for(_redrive(database, rows, tenant, dry_run=dry_run, **filters))
    _tell("would be redriven" if dry_run and not as_json else "matched" if dry_run else "redriven", done,
          len(rows or ()), as_json)  # fmt: skip


@app.command()
def discard(
    rows: RowsArgument = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete dead rows for good. Their events stay known, so that a replay does not bring them back."""
    if not rows:
        raise WrongCommand("name the rows")
    if not yes:
        common.ask(f"Delete {len(rows)} rows for good?")
    done = common.wait_for(_discard(database, rows))
    _tell("discarded", done, len(rows), as_json)


@app.command()
def confirm(rows: RowsArgument = None, database: DatabaseOption = None, as_json: JsonOption = False) -> None:
    """Mark dead rows as sent, because somebody knows that the target has them (UNKNOWN_OUTCOME)."""
    if not rows:
        raise WrongCommand("name the rows")
    done = common.wait_for(_confirm(database, rows))
    _tell("confirmed", done, len(rows), as_json)


@app.command()
def stats(database: DatabaseOption = None, as_json: JsonOption = False) -> None:
    """Count what is not done, by integration type and status."""
    found = common.wait_for(_stats(database))
    if as_json:
        common.print_json(
            [
                {"integrationType": name, "status": status.value, "count": count, "oldestDue": due}
                for name, status, count, due in found
            ]
        )
    elif not found:
        common.err.print("nothing waits")
    else:
        rows = [(name, status.value, count, _when(due)) for name, status, count, due in found]
        common.print_table(("type", "status", "rows", "oldest due"), rows, numbers=["rows"])


# Reaching the ledger ------------------------------------------------------------------------------------------------


def settings_for(
    database: str | None,
    schema: str | None = None,
    tenant_role: str | None = None,
    worker_role: str | None = None,
    service_role: str | None = None,
) -> Settings:
    return Settings.load(
        ledger_url=database,
        ledger_schema=schema,
        ledger_tenant_role=tenant_role,
        ledger_worker_role=worker_role,
        ledger_service_role=service_role,
    )


def open_ledger(settings: Settings) -> Ledger:
    """The configured ledger, to be entered."""
    from bullpen.wiring.ledger import make_ledger

    return make_ledger(settings)


async def _find(database: str | None, **filters: Any) -> list[OutboxRow]:
    async with open_ledger(settings_for(database)) as ledger:
        return await ledger.outbox.find(**filters)


async def get(database: str | None, row_id: str) -> tuple[OutboxRow, list[Attempt]]:
    async with open_ledger(settings_for(database)) as ledger:
        row = await ledger.outbox.get(row_id)
        if row is None:
            raise Done(f"there is no row {row_id}")
        return row, await ledger.outbox.attempts_of(row_id)


async def _redrive(database: str | None, rows: list[str] | None, tenant: str | None, **options: Any) -> int:
    from bullpen.outbox import OutboxDeadLetters

    async with open_ledger(settings_for(database)) as ledger:
        if rows:
            return len(await ledger.outbox.redrive(rows, by=whoami()))
        letters = OutboxDeadLetters(ledger.outbox, tenant_id=tenant)
        return await letters.redrive_where(by=whoami(), **options)


async def _discard(database: str | None, rows: list[str]) -> int:
    async with open_ledger(settings_for(database)) as ledger:
        return len(await ledger.outbox.discard(rows, by=whoami()))


async def _confirm(database: str | None, rows: list[str]) -> int:
    async with open_ledger(settings_for(database)) as ledger:
        return len(await ledger.outbox.confirm(rows, by=whoami()))


async def _stats(database: str | None) -> list[tuple[str, OutboxStatus, int, datetime]]:
    async with open_ledger(settings_for(database)) as ledger:
        return await ledger.outbox.stats()


# Small things -------------------------------------------------------------------------------------------------------


def _status(text: str | None) -> OutboxStatus | None:
    from bullpen.ledger import OutboxStatus

    if text is None:
        return None
    try:
        return OutboxStatus(text.upper())
    except ValueError:
        raise WrongCommand(f"no such status {text!r}; there is {', '.join(OutboxStatus)}") from None


def _one_way(rows: list[str] | None, everything: bool) -> None:
    if bool(rows) == everything:
        raise WrongCommand("name the rows, or say --all")


def _tell(verb: str, done: int, wanted: int, as_json: bool) -> None:
    if as_json:
        common.print_json({verb: done})
    else:
        common.out.print(f"{verb}: {done}")
    if wanted and done < wanted:
        raise Done("" if as_json else f"not {verb}: {wanted - done} (unknown, or not DEAD)")


def whoami() -> str:
    """Who asked, for the audit table."""
    try:
        return f"cli:{getpass.getuser()}"
    except (KeyError, OSError):  # an account without a name, as in some containers
        return "cli"


def _when(instant: datetime) -> str:
    return common.when(int(instant.timestamp() * 1000))


def to_json(row: OutboxRow) -> dict[str, Any]:
    fields = {
        "id": row.id,
        "integrationType": row.integration_type,
        "eventType": row.event_type,
        "status": row.status.value,
        "attempts": row.attempts,
        "maxAttempts": row.max_attempts,
        "dueAt": _when(row.due_at),
        "createdAt": _when(row.created_at),
        "sentAt": None if row.sent_at is None else _when(row.sent_at),
        "sourceStreamId": row.source_stream_id,
        "sourceEventId": row.source_event_id,
        "tenantId": row.tenant_id,
        "correlationId": row.correlation_id,
        "orderingKey": row.ordering_key,
        "lockedBy": row.locked_by,
        "errorCode": row.error_code,
        "lastError": row.last_error,
    }
    return {name: value for name, value in fields.items() if value is not None}


def attempt_json(attempt: Attempt) -> dict[str, Any]:
    fields = {
        "number": attempt.number,
        "outcome": attempt.outcome,
        "worker": attempt.worker,
        "finishedAt": _when(attempt.finished_at),
        "errorCode": attempt.error_code,
        "error": attempt.error,
        "receipt": attempt.receipt,
    }
    return {name: value for name, value in fields.items() if value is not None}
