"""`bullpen dead-letters`: look at what failed for good, send it back, as it is or edited (`edit`), or throw it away."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Final

from bullpen.cli import context, show
from bullpen.cli.arguments import AllOption, ByOption, DryRunOption, LimitOption, QueueArgument, YesOption
from bullpen.cli.context import Output, WrongCommand, whoami
from bullpen.cli.edit import edit
from bullpen.cli.programs import OnProgram
from bullpen.cli.show import Column, Record
from bullpen.cli.tree import Argument, Group, Option

if TYPE_CHECKING:
    from bullpen.app import Bullpen
    from bullpen.cli.letters import StoredLetters
    from bullpen.queue import DeadLetter
    from bullpen.queue.dead_letters.operations import DeadLetterFilter, DeadLetters, OnProgress, RedriveReport

    Letters = DeadLetters | StoredLetters

app = Group()

_SUFFIX: Final = "-dlq"
_MANY: Final = 20

EntryArgument = Annotated[str, Argument("ENTRY", "Id of the entry, as listed.")]
EntriesArgument = Annotated[list[str] | None, Argument("[ENTRY]...", "Ids of entries, as listed.")]
NameOption = Annotated[str | None, Option("--name", metavar="TEXT", help="Only jobs of this name.")]
ErrorOption = Annotated[str | None, Option("--error", metavar="TEXT", help="Only errors that contain this.")]
TenantOption = Annotated[
    str | None, Option("--tenant", metavar="ID", help="Only entries of this tenant; others are not there.")
]
MostOption = Annotated[int | None, Option("--limit", min=1, help="At most this many, the oldest.")]


@app.command()
async def stats(at: OnProgram, tenant: TenantOption = None) -> None:
    """Count the dead letters of all queues, of the outbox, of messages, and with --app those of the program's
    workflows on RabbitMQ and Kafka."""
    from bullpen.cli.letters import opened, warn_of_brokers
    from bullpen.errors import ConnectionLost

    away: dict[str, ConnectionLost] = {}
    async with opened(at) as app:
        depths = await (await app.dead_letters(tenant_id=tenant)).depths(away=away)
        if tenant is None:
            await _warn_of_parked(app)
        is_partial = warn_of_brokers(at, app)
    rows = sorted(((store, depth) for store, depth in depths.items() if depth), key=lambda row: -row[1])
    if at.as_json:
        at.say(depths)
    elif rows:
        at.table((Column("store", lambda row: row[0]), Column("dead letters", lambda row: row[1])), rows)
    elif not away:
        at.warn("no dead letters " + ("in Redis and the ledger" if is_partial else "anywhere"))
    if away:
        # After the others: while one broker is away, people look for what fails elsewhere.
        raise ConnectionLost("; ".join(f"{store} is not counted: {error}" for store, error in away.items()))


async def _warn_of_parked(app: Bullpen) -> None:
    """Events of projectors are no letters, and somebody must look at them all the same."""
    from bullpen.wiring.dead_letters import installed_ledger, ready_ledger

    ledger = await ready_ledger(installed_ledger(lambda: app.ledger)) if app.settings.has_ledger() else None
    if ledger is None or "projector" not in await ledger.parts():
        return
    if parked := await ledger.parked.count():
        show.warn(f"parked events of projectors: {parked}; bullpen projector parked list shows them")


@app.command()
async def groups(
    at: OnProgram,
    store: Annotated[str | None, Option(metavar="STORE", help="Only this store, as stats names it.")] = None,
    tenant: TenantOption = None,
) -> None:
    """Show what goes wrong everywhere: failures of the same kind together, the most frequent first."""
    from bullpen.cli.letters import opened, warn_of_brokers
    from bullpen.ops.dead_letters import ConsoleFilter

    async with opened(at) as app:
        warn_of_brokers(at, app)
        found = await (await app.dead_letters(tenant_id=tenant)).groups(ConsoleFilter(store=store))
    at.list(GROUPS, found, empty="no dead letters" + (f" in {store}" if store else " anywhere"))


@app.command("list")
async def list_(
    at: OnProgram,
    queue: QueueArgument,
    name: NameOption = None,
    error: ErrorOption = None,
    tenant: TenantOption = None,
    limit: LimitOption = 50,
) -> None:
    """List entries, oldest first."""
    from bullpen.cli.letters import letters_of, opened, warn_of_brokers
    from bullpen.queue.dead_letters.operations import DeadLetterFilter, DeadLetters

    where = DeadLetterFilter(job_name=name, error=error, tenant_id=tenant)
    found: list[DeadLetter] = []
    async with opened(at) as app:
        letters = await letters_of(app, queue, tenant, whoami())
        async for letter in letters.find(where):
            found.append(letter)
            if len(found) == limit:
                break
        if not found and isinstance(letters, DeadLetters):
            warn_of_brokers(at, app)
            await context.must_exist(app, queue.removesuffix(_SUFFIX))
        depth = await letters.depth()
    like = " like that" if name or error or tenant else ""
    at.list(LETTERS, found, empty=f"no dead letters of {queue!r}{like}; `bullpen dead-letters stats` counts all")
    if len(found) == limit < depth and tenant is None:  # how many others have is not said
        at.warn(f"{len(found)} of {depth}; --limit shows more")


@app.command("show")
async def show_(at: OnProgram, queue: QueueArgument, entry: EntryArgument, tenant: TenantOption = None) -> None:
    """Show one entry with its payload, error and stack."""
    from bullpen.cli.letters import StoredLetters, letters_of, opened
    from bullpen.errors import DeadLetterNotFound, JobNotFound
    from bullpen.queue.dead_letters.operations import DeadLetterFilter

    async with opened(at) as app:
        letters = await letters_of(app, queue, tenant, whoami())
        letter = await letters.get(entry)
        if letter is None and isinstance(letters, StoredLetters):
            raise DeadLetterNotFound(letters.queue_name, entry)
        if letter is None or not DeadLetterFilter(tenant_id=tenant).matches(letter):
            await context.must_exist(app, queue.removesuffix(_SUFFIX))
            raise JobNotFound(letters.queue_name, entry, is_letter=True)
    at.fields(to_json(letter), without=("id", "error"))
    if not at.as_json:
        show.say("\nerror:", letter.error_stack or letter.error_message)


@app.command()
async def redrive(
    at: OnProgram,
    queue: QueueArgument,
    entries: EntriesArgument = None,
    everything: AllOption = False,
    name: NameOption = None,
    error: ErrorOption = None,
    tenant: TenantOption = None,
    limit: MostOption = None,
    rate: Annotated[float | None, Option(help="At most this many a second.")] = None,
    dry_run: DryRunOption = False,
    by: ByOption = None,
) -> None:
    """Send jobs back to their queue with their id and idempotency key; attempts start again."""
    where = _which(entries, everything, name, error, tenant)
    asked = {"entries": entries, "all": everything, "name": name, "error": error, "tenant": tenant, "limit": limit}
    async with _acting(at, "redrive", queue, tenant, by or whoami(), asked, dry_run=dry_run) as (letters, on_progress):
        if where is not None:
            report = await letters.redrive_all(
                where, limit=limit, rate=rate, by=by, dry_run=dry_run, on_progress=on_progress
            )
        else:
            report = await _each(letters, entries, tenant, dry_run, lambda entry: letters.redrive(entry, by=by))
    _say(at, "redriven", report)


@app.command(destroys=True)
async def discard(
    at: OnProgram,
    queue: QueueArgument,
    entries: EntriesArgument = None,
    everything: AllOption = False,
    name: NameOption = None,
    error: ErrorOption = None,
    tenant: TenantOption = None,
    limit: MostOption = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
) -> None:
    """Delete entries for good. The failed jobs themselves stay as long as their retention says."""
    from bullpen.errors import JobNotFound

    where = _which(entries, everything, name, error, tenant)
    if everything and not dry_run:
        whose = "" if tenant is None else f" and tenant {tenant!r}"
        question = f"Delete all dead letters of {queue!r}{whose} for good?"
        at.confirm(question, yes=yes, refusal="discarding --all entries needs --yes")
    asked = {"entries": entries, "all": everything, "name": name, "error": error, "tenant": tenant, "limit": limit}
    async with _acting(at, "discard", queue, tenant, whoami(), asked, dry_run=dry_run) as (letters, on_progress):

        async def throw_away(entry: str) -> None:
            if not await letters.discard(entry):
                raise JobNotFound(letters.queue_name, entry, is_letter=True)

        if where is not None:
            report = await letters.discard_all(where, limit=limit, dry_run=dry_run, on_progress=on_progress)
        else:
            report = await _each(letters, entries, tenant, dry_run, throw_away)
    _say(at, "discarded", report)


app.command("edit")(edit)


def _which(
    entries: list[str] | None, everything: bool, name: str | None, error: str | None, tenant: str | None
) -> DeadLetterFilter | None:
    """The filter of a bulk operation, or None when entries are named. Deleting by accident must not be easy."""
    from bullpen.queue.dead_letters.operations import DeadLetterFilter

    is_filtered = name is not None or error is not None
    if bool(entries) == (everything or is_filtered) or (everything and is_filtered):
        raise WrongCommand("name the entries, or choose them by --name or --error, or say --all")
    return None if entries else DeadLetterFilter(job_name=name, error=error, tenant_id=tenant)


async def _each(
    letters: Letters,
    entries: list[str] | None,
    tenant: str | None,
    dry_run: bool,
    act: Callable[[str], Awaitable[Any]],
) -> RedriveReport:
    """Do it to entries that are named; those of other tenants are not there."""
    from bullpen.cli.letters import StoredLetters
    from bullpen.errors import JobNotFound
    from bullpen.queue.dead_letters.operations import DeadLetterFilter, RedriveReport

    async def checked(entry: str) -> None:
        if tenant is not None and not isinstance(letters, StoredLetters):
            letter = await letters.get(entry)
            if letter is None or not DeadLetterFilter(tenant_id=tenant).matches(letter):
                raise JobNotFound(letters.queue_name, entry, is_letter=True)
        if not dry_run:
            await act(entry)

    done, problems = await context.each(entries or (), checked)
    count = len(entries or ())
    done_count = 0 if dry_run else len(done)
    skipped = tuple(problems.items())
    return RedriveReport(examined=count, matched=count, done=done_count, skipped=skipped, is_dry_run=dry_run)


@asynccontextmanager
async def _acting(
    at: OnProgram, action: str, queue: str, tenant: str | None, by: str, asked: dict[str, Any], *, dry_run: bool
) -> AsyncIterator[tuple[Letters, OnProgress]]:
    """The letters, after who asked for what was written to the ledger's audit table, else to the stream beside them.
    Stores elsewhere write it down themselves."""
    from bullpen.cli.letters import letters_of, opened
    from bullpen.queue.audit import AuditStreams
    from bullpen.queue.dead_letters.operations import DeadLetters
    from bullpen.wiring.audit import AuditTrail
    from bullpen.wiring.dead_letters import LetterAudit, installed_ledger, ready_ledger

    async with opened(at) as app:
        letters = await letters_of(app, queue, tenant, by)
        if not dry_run and isinstance(letters, DeadLetters):
            ledger = installed_ledger(lambda: app.ledger) if app.settings.has_ledger() else None
            audit = LetterAudit(AuditTrail(await ready_ledger(ledger), AuditStreams(app.connection, app.prefix)))
            chosen = {name: value for name, value in asked.items() if value not in (None, False)}
            await audit.write(letters.queue_name, by, action, letters.queue_name, None, chosen)
        depth = await letters.depth()
        with show.bar("looking through the entries", depth, hidden=at.as_json or depth < _MANY) as move:
            yield letters, lambda report: move(report.examined)


def _say(at: Output, verb: str, report: RedriveReport) -> None:
    document = {"matched": report.matched, verb: report.done, "dryRun": report.is_dry_run}
    would = "would be " if report.is_dry_run else ""
    at.say(
        {**document, "skipped": dict(report.skipped)},
        f"{would}{verb}: {report.matched if report.is_dry_run else report.done}",
    )
    if report.skipped:
        at.warn(*(problem for _, problem in report.skipped))
        raise at.failed(f"not {verb}: {report.matched - report.done}")


# How they are shown -------------------------------------------------------------------------------------------------


def to_json(letter: DeadLetter) -> dict[str, Any]:
    return {"id": letter.id, **letter.entry}


def _error(entry: dict[str, Any]) -> Any:
    error = entry.get("error")
    return (error.get("message") if isinstance(error, dict) else None) or entry.get("errorMessage")


LETTERS = Record(
    to_json,
    (
        *(Column("entry", "id"), Column("job", "originalJobName", worth=2)),
        Column("attempts", "attemptsMade", worth=3),
        Column("failed at", lambda entry: show.read_instant(entry.get("failedAt")), worth=1),
        Column("error", _error, least=16),
    ),
)
GROUPS = Record(
    asdict,
    (
        *(Column("count"), Column("store"), Column("name", worth=1), Column("error", least=16)),
        *(Column("last", lambda group: show.read_instant(group["last_at"]), worth=2), Column("example", worth=3)),
    ),
)
