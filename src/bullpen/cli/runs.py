"""`bullpen runs`: list, show, start, cancel, retry and repair runs, and manage credits."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from bullpen.cli import context, show
from bullpen.cli.arguments import LimitOption, TenantOption, duration, one_way, parse_json, status
from bullpen.cli.context import Done, OnBoth, OnLedger, WrongCommand, whoami
from bullpen.cli.follow import FollowLedger, follow_row
from bullpen.cli.show import Column, Record, present
from bullpen.cli.tree import Argument, Group, Option

if TYPE_CHECKING:
    from bullpen.app import Bullpen
    from bullpen.ledger import RunRow

app = Group()
dead_letters = app.group("dead-letters", "List runs that failed finally.")
credits = app.group("credits", "Show and grant credits of tenants.")  # noqa: A001 - what it is called

RunArgument = Annotated[str, Argument("RUN", "Id of the run.")]
RunsArgument = Annotated[list[str] | None, Argument("[RUN]...", "Ids of runs.")]
OneTenantOption = Annotated[str, Option("--tenant", metavar="ID", help="Whose runs.")]
HandlerOption = Annotated[str | None, Option("--handler", metavar="NAME", help="Only runs of this handler.")]


@dataclass(frozen=True, kw_only=True)
class OnHandlers(OnBoth):
    """Where handlers with names are concerned, which only a program knows."""

    program: Annotated[
        str | None, Option("--app", metavar="MODULE:APP", help="Program that registers handlers with names.")
    ] = None


@asynccontextmanager
async def _opened(at: OnLedger) -> AsyncIterator[Bullpen]:
    from bullpen.app import Bullpen

    async with Bullpen(settings=at.settings()) as opened:
        yield opened


@asynccontextmanager
async def _on_server(at: OnBoth) -> AsyncIterator[Bullpen]:
    async with _opened(at) as opened:
        await context.answers(opened)
        yield opened


async def _declare(at: OnHandlers, opened: Bullpen) -> None:
    """What the program says about its handlers."""
    from bullpen.cli.programs import load_app

    if at.program is not None:
        async with load_app(at.program) as known:
            for route in known.runs.routes.all:
                opened.use_runs().routes.set(route.name, route.name and route.queue.name, route.options)


@app.command("list")
async def list_(
    at: OnLedger,
    tenant: TenantOption = None,
    state: Annotated[str | None, Option("--status", help="QUEUED, RUNNING, COMPLETED, FAILED or CANCELLED.")] = None,
    handler: HandlerOption = None,
    limit: LimitOption = 50,
) -> None:
    """List runs, newest first."""
    from bullpen.ledger import RunStatus

    filters: Any = {"status": status(RunStatus, state), "handler": handler, "limit": limit}
    async with _opened(at) as opened:
        if tenant is None:
            found = await opened.ledger.runs.find(**filters)
        else:
            found = await opened.ledger.transactions.run(tenant, lambda runs: runs.find(**filters))
    at.list(RUNS, found, empty="no such runs; `bullpen runs start` makes one")


@app.command("show")
async def show_(at: OnLedger, run: RunArgument, tenant: TenantOption = None) -> None:
    """Show one run with its attempts and finished steps."""
    at.fields(await _read(at, run, tenant))


@app.command()
async def follow(at: FollowLedger, run: RunArgument, tenant: TenantOption = None) -> None:
    """Print status, progress and steps of a run until it ends; the exit code is 1 unless it is COMPLETED."""
    await follow_row(at, f"run {run}", lambda: _read(at, run, tenant), "COMPLETED", "FAILED", "CANCELLED")


@app.command()
async def start(
    at: OnHandlers,
    tenant: OneTenantOption,
    version: Annotated[str, Option(metavar="ID", help="Version of the definition.")],
    definition: Annotated[str, Option(metavar="JSON", help="What to run; @FILE reads a file, - stdin.")],
    inputs: Annotated[str, Option(metavar="JSON", help="Context inputs.")] = "{}",
    key: Annotated[str | None, Option(metavar="TEXT", help="The same key means the same run.")] = None,
    handler: Annotated[
        str | None,
        Option(
            "--handler", metavar="NAME", help="Handler of the run; needs --app. Default: the handler without a name."
        ),
    ] = None,
    cost: Annotated[int | None, Option(min=0, help="Cost in credits; default: the handler's price.")] = None,
    test: Annotated[bool, Option("--test", help="A test run: nothing is charged.")] = False,
) -> None:
    """Store a run. It starts when a process dispatches the outbox and another one handles runs."""
    from bullpen.runs import RunPayload, run_id_for

    given = parse_json("--inputs", inputs)
    if not isinstance(given, dict):
        raise WrongCommand("--inputs must be a JSON object")
    if handler is not None and at.program is None:
        raise WrongCommand("--handler needs --app: the program knows queue, price and limits of the handler")
    payload = RunPayload(
        run_id=str(uuid.uuid4()) if key is None else run_id_for(tenant, key),
        tenant_id=tenant,
        version_id=version,
        definition=parse_json("--definition", definition),
        context_inputs=given,
    )
    async with _opened(at) as opened:
        await _declare(at, opened)
        submitted = await opened.use_runs().service.submit(
            payload, actor=whoami(), handler=handler, cost=cost, is_test_run=test
        )
    document = {**to_json(submitted.run), "created": submitted.created}
    at.say(document, f"{'started' if submitted.created else 'known already'}: {submitted.run.id}")


@app.command()
async def cancel(at: OnBoth, run: RunArgument, tenant: OneTenantOption) -> None:
    """Cancel an unfinished run and refund it."""
    async with _on_server(at) as opened:
        row = await opened.use_runs().service.cancel(tenant, run, actor=whoami())
    at.say(to_json(row), f"cancelled: {row.id}")


@app.command()
async def retry(
    at: OnBoth,
    tenant: OneTenantOption,
    runs: RunsArgument = None,
    everything: Annotated[bool, Option("--all", help="All FAILED runs of the tenant.")] = False,
    error: Annotated[str | None, Option(metavar="TEXT", help="With --all: only those with this error.")] = None,
    limit: Annotated[int, Option(min=1, max=200, help="With --all: at most this many.")] = 200,
) -> None:
    """Retry FAILED runs: same id and keys; attempts start again; finished steps are not repeated."""
    from bullpen.ledger import RunStatus

    one_way(runs, everything, "runs")
    async with _on_server(at) as opened:
        service = opened.use_runs().service
        if runs is None:
            failed = await service.find(tenant, status=RunStatus.FAILED, limit=limit)
            runs = [row.id for row in failed if error is None or error in (row.error_message or "")]
        with at.bar("retrying", len(runs)) as move:
            done: list[str] = []

            async def act(run: str) -> None:
                done.append((await service.retry(tenant, run, actor=whoami())).id)
                move(len(done))

            _, refused = await context.each(runs, act)
    at.say({"retried": done, "refused": refused}, f"retried: {len(done)}")
    if refused:
        raise at.failed("\n".join(f"{run}: {why}" for run, why in refused.items()))


@app.command()
async def sweep(
    at: OnBoth,
    idle: Annotated[str, Option(metavar="TIME", help="Only runs without progress for this long.")] = "60s",
) -> None:
    """Repair runs once: give a new job to runs without one, and fail runs whose job has failed."""
    idle_ms = int(duration("--idle", idle).total_seconds() * 1000)
    async with _on_server(at) as opened:
        swept = await opened.use_runs().maintenance().sweep(idle_ms=idle_ms)
    document = {"examined": swept.examined, "failed": swept.failed, "givenJobs": swept.given_jobs}
    at.say(document, f"examined {swept.examined}, failed {swept.failed}, given a job {swept.given_jobs}")


@dead_letters.command("list")
async def list_dead_letters(at: OnHandlers, tenant: TenantOption = None, handler: HandlerOption = None) -> None:
    """Count runs that failed finally; with --tenant, list them with secrets hidden.

    Each handler has a dead-letter queue. One whose handler names a queue of its own is found with --app.
    """
    async with _on_server(at) as opened:
        await _declare(at, opened)
        service, routes = opened.use_runs().service, opened.use_runs().routes
        if handler is not None and at.program is None:
            opened.use_runs().declare(handler)
        queue = routes.get(handler).queue.dead_letters.name
        letters = [] if tenant is None else await service.dead_letters(tenant, actor=whoami(), handler=handler)
        depth = await service.dead_letter_depth(handler)
    found = [_letter_json(each, handler) for each in letters]
    about = {} if handler is None else {"handler": handler}
    at.say(
        {**about, "depth": depth, **({} if tenant is None else {"deadLetters": found})}, f"depth of {queue}: {depth}"
    )
    if found and not at.as_json:
        at.table(LETTERS, found)


@credits.command("show")
async def show_credits(at: OnLedger, tenant: OneTenantOption) -> None:
    """Show a tenant's credits."""
    async with _opened(at) as opened:
        balance = await opened.use_runs().service.balance(tenant)
    at.say({"tenant": tenant, "balance": balance}, f"{tenant}: {balance} credits")


@credits.command()
async def grant(
    at: OnLedger,
    amount: Annotated[int, Argument("NUMBER", "How many.", min=1)],
    tenant: OneTenantOption,
    reference: Annotated[str, Option(metavar="TEXT", help="What for; the same reference is one grant.")],
) -> None:
    """Grant credits to a tenant. A second grant with the same reference changes nothing."""
    async with _opened(at) as opened:
        service = opened.use_runs().service
        granted = await service.grant(tenant, amount, reference=reference, actor=whoami())
        balance = await service.balance(tenant)
    if not granted:
        at.warn(f"{reference!r} was granted before; nothing changed")
    at.say({"tenant": tenant, "balance": balance, "granted": granted}, f"{tenant}: {balance} credits")


# How they are shown -------------------------------------------------------------------------------------------------


async def _read(at: OnLedger, run_id: str, tenant: str | None) -> dict[str, Any]:
    from bullpen.ledger import check_run_id

    known = check_run_id(run_id)
    async with _opened(at) as opened:
        if tenant is None:
            row = await opened.ledger.runs.get(known)
        else:
            row = await opened.ledger.transactions.run(tenant, lambda runs: runs.get(known))
        if row is None:
            raise Done(f"there is no run {known}")
        steps = await opened.ledger.transactions.run(row.tenant_id, lambda runs: runs.steps(known))
    return {**to_json(row), "steps": [step.name for step in steps]}


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
        "createdAt": row.created_at,
        "startedAt": row.started_at,
        "heartbeatAt": row.heartbeat_at,
        "completedAt": row.completed_at,
        "durationMs": row.duration_ms,
        "progress": row.progress,
        "result": row.result,
        "errorMessage": row.error_message,
        "retryHistory": row.retry_history or None,
    }
    return present(fields)


def _letter_json(letter: Any, handler: str | None) -> dict[str, Any]:
    return {
        "id": letter.id,
        "runId": letter.job_id,
        "handler": handler,
        "failedAt": letter.failed_at,
        "attemptsMade": letter.attempts_made,
        "cause": letter.cause,
        "error": letter.error_message,
        "payload": letter.data,
    }


RUNS = Record(
    to_json,
    (
        *(Column("run", "id"), Column("tenant", "tenantId", worth=1), Column("handler", worth=3), Column("status")),
        *(Column("attempts", worth=4), Column("created", "createdAt", worth=5)),
        Column("error", "errorMessage", worth=2, least=16),
    ),
)
LETTERS = (
    *(Column("run", "runId"), Column("failed", lambda each: show.read_instant(each["failedAt"]), worth=2)),
    *(Column("attempts", "attemptsMade", worth=1), Column("error", least=16)),
)
