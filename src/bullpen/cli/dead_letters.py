"""`bullpen dead-letters`: look at what failed for good, send it back, as it is or edited (`edit`), or throw it away."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Annotated, Any, Final

import typer
from rich.progress import Progress

from bullpen.app import Bullpen
from bullpen.cli import common
from bullpen.cli.common import Done, JsonOption, PrefixOption, QueueArgument, QueueFirst, RedisOption, WrongCommand
from bullpen.cli.edit import edit
from bullpen.cli.letters import ProgramOption, StoredLetters, letters_of, opened, warn_of_brokers
from bullpen.cli.outbox import whoami
from bullpen.errors import ConnectionLost, DeadLetterNotFound, JobNotFound, JobStateConflict
from bullpen.ops.dead_letters import ConsoleFilter, Group
from bullpen.queue import DeadLetter
from bullpen.queue.audit import AuditStreams
from bullpen.queue.dead_letters.operations import DeadLetterFilter, DeadLetters, OnProgress, RedriveReport
from bullpen.wiring.audit import AuditTrail
from bullpen.wiring.dead_letters import LetterAudit, installed_ledger, ready_ledger

app = typer.Typer(
    cls=QueueFirst,
    help="List, show, redrive, edit and discard dead letters. The queue may stand first: bullpen dead-letters emails.",
    no_args_is_help=True,
)

_SUFFIX: Final = "-dlq"

EntryArgument = Annotated[str, typer.Argument(metavar="ENTRY", help="Id of the entry, as listed.", show_default=False)]
EntriesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[ENTRY]...", help="Ids of entries, as listed.", show_default=False)
]
AllOption = Annotated[bool, typer.Option("--all", help="All entries of the queue.")]
NameOption = Annotated[str | None, typer.Option("--name", metavar="TEXT", help="Only jobs of this name.")]
ErrorOption = Annotated[str | None, typer.Option("--error", metavar="TEXT", help="Only errors that contain this.")]
TenantOption = Annotated[
    str | None, typer.Option("--tenant", metavar="ID", help="Only entries of this tenant; others are not there.")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Count only, change nothing.")]
LimitOption = Annotated[int | None, typer.Option(min=1, help="At most so many, the oldest.")]


@app.callback()
def dead_letters() -> None:
    """List, show, redrive, edit and discard dead letters. The queue may stand first: bullpen dead-letters emails."""


@app.command()
def overview(
    tenant: TenantOption = None,
    program: ProgramOption = None,
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """Count the dead letters of all queues, of the outbox, of messages, and with --app those of the program's
    workflows on RabbitMQ and Kafka."""

    away: dict[str, ConnectionLost] = {}

    async def ask() -> tuple[dict[str, int], bool]:
        async with opened(program, redis, prefix) as app:
            depths = await (await app.dead_letters(tenant_id=tenant)).depths(away=away)
            if tenant is None:
                await _tell_of_parked(app)
            return depths, warn_of_brokers(app, program)

    depths, is_partial = common.wait_for(ask())
    if as_json:
        common.print_json(depths)
    elif not any(depths.values()):
        if not away:
            common.err.print("no dead letters " + ("in Redis and the ledger" if is_partial else "anywhere"))
    else:
        rows = [(store, depth) for store, depth in sorted(depths.items(), key=lambda pair: -pair[1]) if depth]
        common.print_table(("store", "dead letters"), rows, numbers=["dead letters"])
    if away:
        # After the others: while one broker is away, people look for what fails elsewhere.
        raise ConnectionLost("; ".join(f"{store} is not counted: {error}" for store, error in away.items()))


async def _tell_of_parked(app: Bullpen) -> None:
    """Events of projectors are no letters, and somebody must look at them all the same."""
    ledger = await ready_ledger(installed_ledger(lambda: app.ledger)) if app.settings.has_ledger() else None
    if ledger is None or "projector" not in await ledger.parts():
        return
    if parked := await ledger.parked.count():
        common.err.print(f"parked events of projectors: {parked}; bullpen projector parked list shows them")


@app.command()
def groups(
    store: Annotated[str | None, typer.Option(metavar="STORE", help="Only this store, as overview names it.")] = None,
    tenant: TenantOption = None,
    program: ProgramOption = None,
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what goes wrong everywhere: failures of the same kind together, the most frequent first."""

    async def ask() -> list[Group]:
        async with opened(program, redis, prefix) as app:
            warn_of_brokers(app, program)
            return await (await app.dead_letters(tenant_id=tenant)).groups(ConsoleFilter(store=store))

    found = common.wait_for(ask())
    if as_json:
        common.print_json([asdict(group) for group in found])
    elif not found:
        common.err.print("no dead letters" + (f" in {store}" if store else " anywhere"), markup=False)
    else:
        rows = [
            (group.count, group.store, group.name, common.short(group.error), group.last_at, group.example)
            for group in found
        ]
        common.print_table(("count", "store", "name", "error", "last", "example"), rows, numbers=["count"])


@app.command("list")
def list_(
    queue: QueueArgument,
    name: NameOption = None,
    error: ErrorOption = None,
    tenant: TenantOption = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 50,
    program: ProgramOption = None,
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """List entries, oldest first."""
    where = DeadLetterFilter(job_name=name, error=error, tenant_id=tenant)
    depth, found = common.wait_for(_list(queue, where, limit, program, redis, prefix))
    if as_json:
        common.print_json([_to_json(letter) for letter in found])
    elif not found:
        common.err.print(
            f"no dead letters of {queue!r}" + (" like that" if name or error or tenant else ""), markup=False
        )
    else:
        rows = [
            (each.id, each.job_name, each.attempts_made, each.failed_at, common.short(each.error_message))
            for each in found
        ]
        common.print_table(("entry", "job", "attempts", "failed at", "error"), rows, numbers=["attempts"])
        if len(found) == limit < depth and tenant is None:  # how many others have is not told
            common.err.print(f"{len(found)} of {depth}; --limit shows more")


@app.command()
def show(
    queue: QueueArgument,
    entry: EntryArgument,
    tenant: TenantOption = None,
    program: ProgramOption = None,
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one entry with its payload, error and stack."""
    letter = common.wait_for(_get(queue, entry, tenant, program, redis, prefix))
    if as_json:
        common.print_json(_to_json(letter))
        return
    fields = [(name, common.short(value, limit=10_000)) for name, value in letter.entry.items() if name != "error"]
    common.print_table(("field", "value"), fields)
    common.out.print("\nerror:", letter.error_stack or letter.error_message, sep="\n", markup=False)


@app.command()
def redrive(
    queue: QueueArgument,
    entries: EntriesArgument = None,
    everything: AllOption = False,
    name: NameOption = None,
    error: ErrorOption = None,
    tenant: TenantOption = None,
    limit: LimitOption = None,
    rate: Annotated[float | None, typer.Option(help="At most so many a second.")] = None,
    dry_run: DryRunOption = False,
    by: Annotated[str | None, typer.Option(metavar="WHO", help="Noted with the job.", show_default="you")] = None,
    program: ProgramOption = None,
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send jobs back to their queue with their id and idempotency key; attempts start again."""
    where = _which(entries, everything, name, error, tenant)

    async def work(letters: DeadLetters | StoredLetters, on_progress: OnProgress) -> RedriveReport:
        if where is not None:
            options: dict[str, Any] = {"limit": limit, "rate": rate, "by": by}
            return await letters.redrive_all(where, dry_run=dry_run, on_progress=on_progress, **options)
        report = RedriveReport(is_dry_run=dry_run)
        for entry in entries or ():
            problem = None
            try:
                await _must_be_of(letters, entry, tenant)
                if not dry_run:
                    await letters.redrive(entry, by=by)
            except (JobNotFound, JobStateConflict) as conflict:
                problem = str(conflict)
            report = _counted(report, entry, problem)
        return report

    asked = {"entries": entries, "all": everything, "name": name, "error": error, "tenant": tenant, "limit": limit}
    written = None if dry_run else ("redrive", by or whoami(), asked)
    _tell(
        "redriven",
        common.wait_for(_with_letters(queue, (program, redis, prefix), tenant, work, as_json, written)),
        as_json,
    )


@app.command()
def discard(
    queue: QueueArgument,
    entries: EntriesArgument = None,
    everything: AllOption = False,
    name: NameOption = None,
    error: ErrorOption = None,
    tenant: TenantOption = None,
    limit: LimitOption = None,
    dry_run: DryRunOption = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    program: ProgramOption = None,
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete entries for good. The failed jobs themselves stay as long as their retention says."""
    where = _which(entries, everything, name, error, tenant)
    if everything and not yes and not dry_run:
        if as_json or not sys.stdin.isatty():
            raise WrongCommand("discarding --all entries needs --yes where nobody can be asked")
        whose = "" if tenant is None else f" and tenant {tenant!r}"
        common.ask(f"Delete all dead letters of {queue!r}{whose} for good?")

    async def work(letters: DeadLetters | StoredLetters, on_progress: OnProgress) -> RedriveReport:
        if where is not None:
            return await letters.discard_all(where, limit=limit, dry_run=dry_run, on_progress=on_progress)
        report = RedriveReport(is_dry_run=dry_run)
        for entry in entries or ():
            is_gone = not await _is_of(letters, entry, tenant) or (not dry_run and not await letters.discard(entry))
            problem = str(JobNotFound(letters.queue_name, entry, is_letter=True)) if is_gone else None
            report = _counted(report, entry, problem)
        return report

    asked = {"entries": entries, "all": everything, "name": name, "error": error, "tenant": tenant, "limit": limit}
    written = None if dry_run else ("discard", whoami(), asked)
    _tell(
        "discarded",
        common.wait_for(_with_letters(queue, (program, redis, prefix), tenant, work, as_json, written)),
        as_json,
    )


app.command("edit")(edit)


def _which(
    entries: list[str] | None, everything: bool, name: str | None, error: str | None, tenant: str | None
) -> DeadLetterFilter | None:
    """The filter of a bulk operation, or None when entries are named. Deleting by accident must not be easy."""
    is_filtered = name is not None or error is not None
    if bool(entries) == (everything or is_filtered) or (everything and is_filtered):
        raise WrongCommand("name the entries, or choose them by --name or --error, or say --all")
    return None if entries else DeadLetterFilter(job_name=name, error=error, tenant_id=tenant)


async def _is_of(letters: DeadLetters | StoredLetters, entry: str, tenant: str | None) -> bool:
    if tenant is None or isinstance(letters, StoredLetters):
        return True
    letter = await letters.get(entry)
    return letter is not None and DeadLetterFilter(tenant_id=tenant).matches(letter)


async def _must_be_of(letters: DeadLetters | StoredLetters, entry: str, tenant: str | None) -> None:
    if not await _is_of(letters, entry, tenant):
        raise JobNotFound(letters.queue_name, entry, is_letter=True)


def _counted(report: RedriveReport, entry: str, problem: str | None) -> RedriveReport:
    skipped = report.skipped if problem is None else (*report.skipped, (entry, problem))
    done = report.done + (problem is None and not report.is_dry_run)
    return replace(report, examined=report.examined + 1, matched=report.matched + 1, done=done, skipped=skipped)


def _tell(verb: str, report: RedriveReport, as_json: bool) -> None:
    if as_json:
        counts = {"matched": report.matched, verb: report.done, "dryRun": report.is_dry_run}
        common.print_json({**counts, "skipped": dict(report.skipped)})
    else:
        would = "would be " if report.is_dry_run else ""
        common.out.print(f"{would}{verb}: {report.matched if report.is_dry_run else report.done}")
        for _, problem in report.skipped:
            common.err.print(problem, markup=False)
    if report.skipped:
        raise Done("" if as_json else f"not {verb}: {report.matched - report.done}")


async def _list(
    queue: str, where: DeadLetterFilter, limit: int, program: str | None, redis: str | None, prefix: str | None
) -> tuple[int, list[DeadLetter]]:
    async with opened(program, redis, prefix) as app:
        letters = await letters_of(app, queue, where.tenant_id, whoami())
        found: list[DeadLetter] = []
        async for letter in letters.find(where):
            found.append(letter)
            if len(found) == limit:
                break
        if not found and isinstance(letters, DeadLetters):
            warn_of_brokers(app, program)
            await common.must_exist(app, queue.removesuffix(_SUFFIX))
        return await letters.depth(), found


async def _get(
    queue: str, entry: str, tenant: str | None, program: str | None, redis: str | None, prefix: str | None
) -> DeadLetter:
    async with opened(program, redis, prefix) as app:
        letters = await letters_of(app, queue, tenant, whoami())
        letter = await letters.get(entry)
        if isinstance(letters, StoredLetters):
            if letter is None:
                raise DeadLetterNotFound(letters.queue_name, entry)
        elif letter is None or not DeadLetterFilter(tenant_id=tenant).matches(letter):
            await common.must_exist(app, queue.removesuffix(_SUFFIX))
            raise JobNotFound(letters.queue_name, entry, is_letter=True)
        return letter


async def _write_down(app: Bullpen, action: str, letters: DeadLetters, by: str, asked: dict[str, Any]) -> None:
    """Who asked for what, in the ledger's audit table, else in the stream beside the letters; before it is done."""
    ledger = installed_ledger(lambda: app.ledger) if app.settings.has_ledger() else None
    audit = LetterAudit(AuditTrail(await ready_ledger(ledger), AuditStreams(app.connection, app.prefix)))
    chosen = {name: value for name, value in asked.items() if value not in (None, False)}
    await audit.write(letters.queue_name, by, action, letters.queue_name, None, chosen)


async def _with_letters(
    queue: str,
    where: tuple[str | None, str | None, str | None],
    tenant: str | None,
    work: Any,
    as_json: bool,
    written: tuple[str, str, dict[str, Any]] | None,
) -> RedriveReport:
    """`where`: program, server and prefix. `written`: the action, who asks for it, and for what; None when nothing is
    changed."""
    async with opened(*where) as app:
        letters = await letters_of(app, queue, tenant, whoami() if written is None else written[1])
        if written is not None and isinstance(letters, DeadLetters):
            action, by, asked = written
            await _write_down(app, action, letters, by, asked)
        with _bar(await letters.depth(), as_json) as on_progress:
            report: RedriveReport = await work(letters, on_progress)
            return report


@contextmanager
def _bar(total: int, as_json: bool) -> Iterator[OnProgress]:
    """A bar on stderr while there is much to do and somebody to see it."""
    hidden = as_json or total < 20 or not common.err.is_terminal
    with Progress(console=common.err, transient=True, disable=hidden) as progress:
        task = progress.add_task("looking through the entries", total=total)

        def advance(report: RedriveReport) -> None:
            progress.update(task, completed=report.examined)

        yield advance


def _to_json(letter: DeadLetter) -> dict[str, Any]:
    return {"id": letter.id, **letter.entry}
