"""`bullpen runs`: look at runs, start, cancel and retry them, look after them, and manage credits."""

from __future__ import annotations

import getpass
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress

from bullpen.app import Bullpen
from bullpen.cli import common
from bullpen.cli.common import Done, JsonOption, PrefixOption, RedisOption, WrongCommand
from bullpen.cli.outbox import DatabaseOption
from bullpen.cli.run_app import load_app
from bullpen.settings import Settings

if TYPE_CHECKING:
    from bullpen.ledger import RunRow, RunStatus

app = typer.Typer(help="Look at runs, start, cancel and retry them; credits.", no_args_is_help=True)

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Id of the run.", show_default=False)]
RunsArgument = Annotated[list[str] | None, typer.Argument(metavar="[RUN]...", help="Ids of runs.", show_default=False)]
TenantOption = Annotated[str, typer.Option("--tenant", metavar="ID", help="Whose runs.", show_default=False)]
HandlerOption = Annotated[str | None, typer.Option("--handler", metavar="NAME", help="Only runs of this handler.")]
AppOption = Annotated[
    str | None, typer.Option("--app", metavar="MODULE:APP", help="Program that registers handlers with names.")
]
AnyTenantOption = Annotated[
    str | None, typer.Option("--tenant", metavar="ID", help="Only this tenant's; else those of all.")
]


@app.callback()
def runs() -> None:
    """Look at runs, start, cancel and retry them; credits."""


@app.command("list")
def list_(
    tenant: AnyTenantOption = None,
    status: Annotated[str | None, typer.Option(help="QUEUED, RUNNING, COMPLETED, FAILED or CANCELLED.")] = None,
    handler: HandlerOption = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 50,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """List runs, newest first."""
    found = common.wait_for(_find(database, tenant, _status(status), handler, limit))
    if as_json:
        common.print_json([to_json(row) for row in found])
    elif not found:
        common.err.print("no such runs")
    else:
        rows = [
            (
                *(row.id, row.tenant_id, row.handler or "", row.status.value, row.attempts),
                *(_when(row.created_at), row.error_message or ""),
            )
            for row in found
        ]
        columns = ("run", "tenant", "handler", "status", "attempts", "created", "error")
        common.print_table(columns, rows, numbers=["attempts"])


@app.command()
def show(
    run: RunArgument, tenant: AnyTenantOption = None, database: DatabaseOption = None, as_json: JsonOption = False
) -> None:
    """Show one run with its attempts and the steps that are done."""
    row, steps = common.wait_for(get(database, tenant, run))
    fields = {**to_json(row), "steps": steps}
    if as_json:
        common.print_json(fields)
    else:
        lines = [(name, common.short(value, limit=10_000)) for name, value in fields.items()]
        common.print_table(("field", "value"), lines)


@app.command()
def start(
    tenant: TenantOption,
    version: Annotated[str, typer.Option(metavar="ID", help="Version of the definition.", show_default=False)],
    definition: Annotated[str, typer.Option(metavar="JSON", help="What to run; - reads stdin.", show_default=False)],
    inputs: Annotated[str, typer.Option(metavar="JSON", help="Context inputs.")] = "{}",
    key: Annotated[str | None, typer.Option(metavar="TEXT", help="The same key is the same run.")] = None,
    handler: Annotated[
        str | None, typer.Option("--handler", metavar="NAME", help="Who runs it; needs --app. Else who has no name.")
    ] = None,
    cost: Annotated[int | None, typer.Option(min=0, help="Credits that it costs; else the handler's price.")] = None,
    program: AppOption = None,
    test: Annotated[bool, typer.Option("--test", help="A test run: nothing is charged.")] = False,
    database: DatabaseOption = None,
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """Store a run. Some process must dispatch the outbox, and some must run runs."""
    context = common.parse_json("--inputs", inputs)
    if not isinstance(context, dict):
        raise WrongCommand("--inputs must be a JSON object")
    if handler is not None and program is None:
        raise WrongCommand("--handler needs --app: the program knows queue, price and limits of the handler")
    row, created = common.wait_for(
        _start(
            (database, redis, prefix), tenant, version, common.parse_json("--definition", definition), context, key,
            program=program, handler=handler, cost=cost, is_test_run=test,
        )
    )  # fmt: skip
    if as_json:
        common.print_json({**to_json(row), "created": created})
    else:
        common.out.print(f"{'started' if created else 'known already'}: {row.id}")


@app.command()
def cancel(
    run: RunArgument,
    tenant: TenantOption,
    database: DatabaseOption = None,
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """End a run that has not ended, and refund it."""
    row = common.wait_for(_cancel((database, redis, prefix), tenant, run))
    if as_json:
        common.print_json(to_json(row))
    else:
        common.out.print(f"cancelled: {row.id}")


@app.command()
def retry(
    tenant: TenantOption,
    runs: RunsArgument = None,
    everything: Annotated[bool, typer.Option("--all", help="All FAILED runs of the tenant.")] = False,
    error: Annotated[str | None, typer.Option(metavar="TEXT", help="With --all: only those with this error.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=200, help="With --all: at most so many.")] = 200,
    database: DatabaseOption = None,
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send FAILED runs back: same id, same keys, attempts from the beginning, steps that are done stay done."""
    if bool(runs) == everything:
        raise WrongCommand("name the runs, or say --all")
    done, refused = common.wait_for(_retry((database, redis, prefix), tenant, runs, error, limit, as_json=as_json))
    if as_json:
        common.print_json({"retried": done, "refused": refused})
    else:
        common.out.print(f"retried: {len(done)}")
    if refused:
        raise Done("" if as_json else "\n".join(f"{run}: {why}" for run, why in refused.items()))


@app.command()
def sweep(
    idle: Annotated[str, typer.Option(metavar="TIME", help="Only runs untouched for so long.")] = "60s",
    database: DatabaseOption = None,
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """Give runs that lost their job a new one, and fail those whose job has failed unnoticed. Now, once."""
    idle_ms = int(common.duration("--idle", idle).total_seconds() * 1000)
    examined, failed, given = common.wait_for(_sweep((database, redis, prefix), idle_ms))
    if as_json:
        common.print_json({"examined": examined, "failed": failed, "givenJobs": given})
    else:
        common.out.print(f"examined {examined}, failed {failed}, given a job {given}")


@app.command("dead-letters")
def dead_letters(
    tenant: AnyTenantOption = None,
    handler: HandlerOption = None,
    program: AppOption = None,
    database: DatabaseOption = None,
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """How many runs failed finally and wait for somebody; with --tenant also which, secrets hidden.

    Each handler has a dead-letter queue. One whose handler names a queue of its own is found with --app.
    """
    queue, depth, letters = common.wait_for(_dead_letters((database, redis, prefix), tenant, handler, program))
    if as_json:
        about = {} if handler is None else {"handler": handler}
        common.print_json({**about, "depth": depth, **({} if tenant is None else {"deadLetters": letters})})
        return
    common.out.print(f"depth of {queue}: {depth}", markup=False)
    if letters:
        rows = [(each["runId"], each["failedAt"], each["attemptsMade"], each["error"]) for each in letters]
        common.print_table(("run", "failed", "attempts", "error"), rows, numbers=["attempts"])


@app.command()
def credits(  # noqa: A001 - what it is called
    tenant: TenantOption,
    grant: Annotated[int | None, typer.Option(min=1, help="Give so many.")] = None,
    reference: Annotated[
        str | None, typer.Option(metavar="TEXT", help="What for; the same reference is one grant.")
    ] = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a tenant may still spend, or give it more."""
    if (grant is None) != (reference is None):
        raise WrongCommand("--grant and --reference go together")
    balance, granted = common.wait_for(_credits(database, tenant, grant, reference))
    if as_json:
        common.print_json({"tenant": tenant, "balance": balance, **({} if granted is None else {"granted": granted})})
    else:
        if granted is False:
            common.err.print(f"{reference!r} was granted before; nothing changed", markup=False)
        common.out.print(f"{tenant}: {balance} credits", markup=False)


# Doing --------------------------------------------------------------------------------------------------------------

_Where = tuple[str | None, str | None, str | None]


@asynccontextmanager
async def _opened(where: _Where, *, needs_redis: bool = True, program: str | None = None) -> AsyncIterator[Bullpen]:
    database, redis, prefix = where
    settings = Settings.load(ledger_url=database, redis_url=redis, redis_prefix=prefix)
    async with Bullpen(settings=settings) as opened:
        if needs_redis:
            (await opened.connection.open()).close()  # a person at a prompt learns at once that nobody answers
        if program is not None:
            async with load_app(program) as known:
                for route in known.runs.routes.all:
                    opened.use_runs().routes.set(route.name, route.name and route.queue.name, route.options)
        yield opened


async def _find(
    database: str | None, tenant: str | None, status: RunStatus | None, handler: str | None, limit: int
) -> list[RunRow]:
    async with _opened((database, None, None), needs_redis=False) as opened:
        if tenant is None:
            return await opened.ledger.runs.find(status=status, handler=handler, limit=limit)
        return await opened.ledger.transactions.run(
            tenant, lambda runs: runs.find(status=status, handler=handler, limit=limit)
        )


async def get(database: str | None, tenant: str | None, run_id: str) -> tuple[RunRow, list[str]]:
    from bullpen.ledger import check_run_id

    known = check_run_id(run_id)
    async with _opened((database, None, None), needs_redis=False) as opened:
        if tenant is None:
            row = await opened.ledger.runs.get(known)
        else:
            row = await opened.ledger.transactions.run(tenant, lambda runs: runs.get(known))
        if row is None:
            raise Done(f"there is no run {known}")
        steps = await opened.ledger.transactions.run(row.tenant_id, lambda runs: runs.steps(known))
        return row, [step.name for step in steps]


async def _start(
    where: _Where,
    tenant: str,
    version: str,
    definition: Any,
    inputs: dict[str, Any],
    key: str | None,
    *,
    program: str | None = None,
    **options: Any,
) -> tuple[RunRow, bool]:
    from bullpen.runs import RunPayload, run_id_for

    run_id = str(uuid.uuid4()) if key is None else run_id_for(tenant, key)
    payload = RunPayload(
        run_id=run_id, tenant_id=tenant, version_id=version, definition=definition, context_inputs=inputs
    )
    async with _opened(where, needs_redis=False, program=program) as opened:
        submitted = await opened.use_runs().service.submit(payload, actor=_whoami(), **options)
        return submitted.run, submitted.created


async def _cancel(where: _Where, tenant: str, run_id: str) -> RunRow:
    async with _opened(where) as opened:
        return await opened.use_runs().service.cancel(tenant, run_id, actor=_whoami())


async def _retry(
    where: _Where, tenant: str, given: list[str] | None, error: str | None, limit: int, *, as_json: bool
) -> tuple[list[str], dict[str, str]]:
    from bullpen.errors import BullpenError
    from bullpen.ledger import RunStatus

    done: list[str] = []
    refused: dict[str, str] = {}
    async with _opened(where) as opened:
        service = opened.use_runs().service
        if given is None:
            failed = await service.find(tenant, status=RunStatus.FAILED, limit=limit)
            given = [row.id for row in failed if error is None or error in (row.error_message or "")]
        hidden = as_json or not common.err.is_terminal
        with Progress(console=common.err, transient=True, disable=hidden) as progress:
            for run_id in progress.track(given, description="retrying"):
                try:
                    done.append((await service.retry(tenant, run_id, actor=_whoami())).id)
                except BullpenError as problem:
                    refused[run_id] = str(problem)
    return done, refused


async def _sweep(where: _Where, idle_ms: int) -> tuple[int, int, int]:
    async with _opened(where) as opened:
        swept = await opened.use_runs().maintenance().sweep(idle_ms=idle_ms)
        return swept.examined, swept.failed, swept.given_jobs


async def _dead_letters(
    where: _Where, tenant: str | None, handler: str | None, program: str | None
) -> tuple[str, int, list[dict[str, Any]]]:
    async with _opened(where, program=program) as opened:
        service, routes = opened.use_runs().service, opened.use_runs().routes
        if handler is not None and program is None:
            opened.use_runs().declare(handler)
        queue = routes.get(handler).queue.dead_letters.queue_name
        letters = [] if tenant is None else await service.dead_letters(tenant, actor=_whoami(), handler=handler)
        found = [
            {
                "id": letter.id,
                "runId": letter.job_id,
                "handler": handler,
                "failedAt": letter.failed_at,
                "attemptsMade": letter.attempts_made,
                "cause": letter.cause,
                "error": letter.error_message,
                "payload": letter.data,
            }
            for letter in letters
        ]
        return queue, await service.dead_letter_depth(handler), found


async def _credits(
    database: str | None, tenant: str, grant: int | None, reference: str | None
) -> tuple[int, bool | None]:
    async with _opened((database, None, None), needs_redis=False) as opened:
        service, granted = opened.use_runs().service, None
        if grant is not None and reference is not None:
            granted = await service.grant(tenant, grant, reference=reference, actor=_whoami())
        return await service.balance(tenant), granted


# Small things -------------------------------------------------------------------------------------------------------


def _status(text: str | None) -> RunStatus | None:
    from bullpen.ledger import RunStatus

    if text is None:
        return None
    try:
        return RunStatus(text.upper())
    except ValueError:
        raise WrongCommand(f"no such status {text!r}; there is {', '.join(RunStatus)}") from None


def _whoami() -> str:
    """Who asked, for the audit table."""
    try:
        return f"cli:{getpass.getuser()}"
    except (KeyError, OSError):  # an account without a name, as in some containers
        return "cli"


def _when(instant: datetime | None) -> str:
    return "" if instant is None else common.when(int(instant.timestamp() * 1000))


def to_json(row: RunRow) -> dict[str, Any]:
    fields = {
        "id": row.id,
        "tenantId": row.tenant_id,
        "versionId": row.version_id,
        "handler": row.handler,
        "status": row.status.value,
        "isTestRun": row.is_test_run,
        "cost": row.cost,
        "attempts": row.attempts,
        "redrives": row.redrives,
        "createdAt": _when(row.created_at),
        "startedAt": _when(row.started_at) or None,
        "heartbeatAt": _when(row.heartbeat_at) or None,
        "completedAt": _when(row.completed_at) or None,
        "durationMs": row.duration_ms,
        "progress": row.progress,
        "result": row.result,
        "errorMessage": row.error_message,
        "retryHistory": row.retry_history or None,
    }
    return {name: value for name, value in fields.items() if value is not None}
