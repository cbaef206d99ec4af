"""`bullpen dead-letters`: list, redrive, edit (`edit`) and discard dead letters."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any, Final

from bullpen._kernel.scrub import with_type
from bullpen.cli import context, show
from bullpen.cli.arguments import (
    AllOption,
    ByOption,
    DryRunOption,
    LimitOption,
    QueueArgument,
    YesOption,
    duration,
)
from bullpen.cli.context import Output, WrongCommand, whoami
from bullpen.cli.edit import edit
from bullpen.cli.programs import OnProgram
from bullpen.cli.show import Column, Record
from bullpen.cli.tree import Argument, Group, Option
from bullpen.ports.dead_letters import ANY, DeadLetter, DeadLetterFilter, RedriveReport

if TYPE_CHECKING:
    from bullpen.app import Bullpen
    from bullpen.ops.dead_letters import DeadLetterConsole

app = Group()

_SUFFIX: Final = "-dlq"
_MANY: Final = 20

EntryArgument = Annotated[str, Argument("ENTRY", "Id of the entry, as listed.")]
EntriesArgument = Annotated[list[str] | None, Argument("[ENTRY]...", "Ids of entries, as listed.")]
NameOption = Annotated[str | None, Option("--name", metavar="TEXT", help="Only jobs of this name.")]
ErrorOption = Annotated[str | None, Option("--error", metavar="TEXT", help="Only errors that contain this.")]
GroupOption = Annotated[
    str | None, Option("--group", metavar="FINGERPRINT", help="Only failures of this group, as `groups` lists it.")
]
OlderOption = Annotated[
    str | None,
    Option("--older-than", metavar="DURATION", help="Only what failed longer ago than this: 90s, 15m, 2h or 7d."),
]
RateOption = Annotated[float | None, Option("--rate", help="At most this many per second.")]
StoredOption = Annotated[
    bool, Option("--stored", help="Store it as an operation that another process can resume or stop.")
]
TenantOption = Annotated[str | None, Option("--tenant", metavar="ID", help="Only entries of this tenant.")]
MostOption = Annotated[int | None, Option("--limit", min=1, help="At most this many, oldest first.")]


@app.command()
async def stats(at: OnProgram, tenant: TenantOption = None) -> None:
    """Count the dead letters of all queues, of the outbox, of messages, and with --app those of the program's
    workflows on RabbitMQ and Kafka."""
    from bullpen.cli.dead_letter_stores import opened, warn_about_brokers
    from bullpen.errors import ConnectionLost

    away: dict[str, ConnectionLost] = {}
    async with opened(at) as app:
        depths = await (await app.dead_letters(tenant_id=tenant)).depths(away=away)
        if tenant is None:
            await _warn_of_parked(app)
        is_partial = warn_about_brokers(at, app)
    rows = sorted(((store, depth) for store, depth in depths.items() if depth), key=lambda row: -row[1])
    if at.as_json:
        at.say(depths)
    elif rows:
        at.table((Column("store", lambda row: row[0]), Column("dead letters", lambda row: row[1])), rows)
    elif not away:
        at.warn("no dead letters " + ("in Redis and the ledger" if is_partial else "anywhere"))
    if away:
        # After the others: while one broker is away, people look for what fails elsewhere.
        raise ConnectionLost("; ".join(f"{store} cannot be counted: {error}" for store, error in away.items()))


async def _warn_of_parked(app: Bullpen) -> None:
    """Parked events are not dead letters, but they need a person too."""
    from bullpen.wiring.dead_letters import installed_ledger, ready_ledger

    ledger = await ready_ledger(installed_ledger(lambda: app.ledger)) if app.settings.has_ledger() else None
    if ledger is None or "projector" not in await ledger.parts():
        return
    if parked := await ledger.parked.count():
        show.warn(f"parked events of projectors: {parked}; bullpen projectors parked list shows them")


@app.command()
async def groups(
    at: OnProgram,
    store: Annotated[str | None, Option(metavar="STORE", help="Only this store, as stats names it.")] = None,
    tenant: TenantOption = None,
) -> None:
    """Group dead letters of all stores by cause, the most frequent first."""
    from bullpen.cli.dead_letter_stores import opened, warn_about_brokers

    async with opened(at) as app:
        warn_about_brokers(at, app)
        found = await (await app.dead_letters(tenant_id=tenant)).groups(store=store)
    at.list(GROUPS, found, empty="no dead letters" + (f" in {store}" if store else " anywhere"))


@app.command("list")
async def list_(
    at: OnProgram,
    queue: QueueArgument,
    name: NameOption = None,
    error: ErrorOption = None,
    group: GroupOption = None,
    older_than: OlderOption = None,
    tenant: TenantOption = None,
    limit: LimitOption = 50,
    after: Annotated[
        str | None, Option(metavar="CURSOR", help="Continue after the last entry of an earlier list.")
    ] = None,
) -> None:
    """List entries, newest first."""
    from bullpen.cli.dead_letter_stores import console_of, is_queue, opened, warn_about_brokers

    where = _filter(name, error, group, older_than)
    found: list[DeadLetter] = []
    async with opened(at) as app:
        console, store = await console_of(app, queue, tenant)
        while len(found) < limit:
            page = await console.page(store, where, after=after, limit=limit - len(found))
            found += page.letters
            after = page.next
            if after is None:
                break
        if not found and is_queue(app, store):
            warn_about_brokers(at, app)
            await context.must_exist(app, store.removesuffix(_SUFFIX))
    like = " like that" if where != ANY or tenant else ""
    at.list(LETTERS, found, empty=f"no dead letters of {queue!r}{like}; `bullpen dead-letters stats` counts all")
    if after is not None:
        at.warn(f"there are more; --limit shows more at once, --after {after} continues")


@app.command("show")
async def show_(at: OnProgram, queue: QueueArgument, entry: EntryArgument, tenant: TenantOption = None) -> None:
    """Show one entry with its payload, error and stack."""
    from bullpen.cli.dead_letter_stores import console_of, is_queue, opened
    from bullpen.errors import DeadLetterNotFound

    async with opened(at) as app:
        console, store = await console_of(app, queue, tenant)
        try:
            letter = (await console.get(store, entry)).letter
        except DeadLetterNotFound:
            if is_queue(app, store):
                await context.must_exist(app, store.removesuffix(_SUFFIX))
            raise
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
    group: GroupOption = None,
    older_than: OlderOption = None,
    tenant: TenantOption = None,
    limit: MostOption = None,
    rate: RateOption = None,
    stored: StoredOption = False,
    dry_run: DryRunOption = False,
    by: ByOption = None,
) -> None:
    """Send jobs back to their queue with their id and idempotency key; attempts start again."""
    where = _which(entries, everything, name, error, group, older_than)
    if stored and not dry_run:
        await _store(at, "redrive", queue, where, entries, tenant, by or whoami(), rate, limit)
        return
    async with _acting(at, queue, tenant) as (console, store, on_progress):
        report = await console.redrive_many(
            where,
            store=store,
            ids=entries or None,
            by=by or whoami(),
            rate=rate,
            limit=limit,
            dry_run=dry_run,
            on_progress=on_progress,
        )
    _say(at, "redriven", report)


@app.command(destroys=True)
async def discard(
    at: OnProgram,
    queue: QueueArgument,
    entries: EntriesArgument = None,
    everything: AllOption = False,
    name: NameOption = None,
    error: ErrorOption = None,
    group: GroupOption = None,
    older_than: OlderOption = None,
    tenant: TenantOption = None,
    limit: MostOption = None,
    rate: RateOption = None,
    stored: StoredOption = False,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
) -> None:
    """Delete entries for good. The failed jobs stay until their retention ends."""
    where = _which(entries, everything, name, error, group, older_than)
    if everything and not dry_run:
        whose = "" if tenant is None else f" and tenant {tenant!r}"
        question = f"Delete all dead letters of {queue!r}{whose} for good?"
        at.confirm(question, yes=yes, refusal="discarding --all entries needs --yes")
    if stored and not dry_run:
        await _store(at, "discard", queue, where, entries, tenant, whoami(), rate, limit)
        return
    async with _acting(at, queue, tenant) as (console, store, on_progress):
        report = await console.discard_many(
            where,
            store=store,
            ids=entries or None,
            by=whoami(),
            rate=rate,
            limit=limit,
            dry_run=dry_run,
            on_progress=on_progress,
        )
    _say(at, "discarded", report)


app.command("edit")(edit)


def _which(
    entries: list[str] | None,
    everything: bool,
    name: str | None,
    error: str | None,
    group: str | None,
    older_than: str | None,
) -> DeadLetterFilter:
    """The filter of a bulk operation, or any where entries are named. Deleting by accident must not be easy."""
    where = _filter(name, error, group, older_than)
    is_filtered = where != ANY
    if bool(entries) == (everything or is_filtered) or (everything and is_filtered):
        raise WrongCommand("name the entries, select them with --name, --error, --group or --older-than, or pass --all")
    return where


def _filter(name: str | None, error: str | None, group: str | None, older_than: str | None) -> DeadLetterFilter:
    from datetime import UTC, datetime

    before = None if older_than is None else datetime.now(UTC) - duration("--older-than", older_than)
    return DeadLetterFilter(name=name, error=error, fingerprint=group, failed_before=before)


@asynccontextmanager
async def _acting(
    at: OnProgram, queue: str, tenant: str | None
) -> AsyncIterator[tuple[DeadLetterConsole, str, Callable[[RedriveReport], None]]]:
    """The console with the store, and what shows how far it is. Who did what, the console writes down."""
    from bullpen.cli.dead_letter_stores import console_of, is_queue, opened

    async with opened(at) as app:
        console, store = await console_of(app, queue, tenant)
        depth = (await console.depths())[store] if tenant is None and store in console.stores else 0
        if tenant is None and not depth and is_queue(app, store):
            await context.must_exist(app, store.removesuffix(_SUFFIX))
        with show.bar("processing the entries", depth, hidden=at.as_json or depth < _MANY) as move:
            yield console, store, lambda report: move(report.examined)


async def _store(
    at: OnProgram,
    kind: str,
    queue: str,
    where: DeadLetterFilter,
    entries: list[str] | None,
    tenant: str | None,
    by: str,
    rate: float | None,
    limit: int | None,
) -> None:
    """As an operation: it touches what fits now, and is in the server before the first is touched."""
    from datetime import UTC, datetime

    from bullpen.cli.dead_letter_stores import console_of, opened
    from bullpen.cli.operations import run_stored
    from bullpen.ops.operations import Operation

    async with opened(at) as app:
        console, store = await console_of(app, queue, tenant)
        preview = await console.redrive_many(where, store=store, ids=entries or None, by=by, limit=limit, dry_run=True)
        if not preview.matched:
            _say(at, "redriven" if kind == "redrive" else "discarded", replace(preview, is_dry_run=False))
            return
        operation = Operation(
            kind=kind,
            by=by,
            via="cli",
            store=store,
            ids=entries or [],
            name=where.name or "",
            error=where.error or "",
            fingerprint=where.fingerprint or "",
            tenant=tenant or "",
            until=(where.failed_before or datetime.now(UTC)).isoformat(),
            total=preview.matched,
            rate=rate or 0.0,
        )
        await run_stored(at, app, operation)


def _say(at: Output, verb: str, report: RedriveReport) -> None:
    document = {"matched": report.matched, verb: report.done, "dryRun": report.is_dry_run}
    would = "would be " if report.is_dry_run else ""
    at.say(
        {**document, "skipped": dict(report.skipped)},
        f"{would}{verb}: {report.matched if report.is_dry_run else report.done}",
    )
    if report.skipped:
        at.warn(*(problem for _, problem in report.skipped))
        raise at.failed(f"not {verb}: {max(report.examined, report.matched) - report.done}")


# How they are shown -------------------------------------------------------------------------------------------------


def to_json(letter: DeadLetter) -> dict[str, Any]:
    return {"id": letter.id, **letter.entry}


def _error(entry: dict[str, Any]) -> Any:
    error = entry.get("error")
    text = (error.get("message") if isinstance(error, dict) else None) or entry.get("errorMessage")
    stack = error.get("stack") if isinstance(error, dict) else None
    return with_type(text, stack) if isinstance(text, str) and isinstance(stack, str) else text


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
        *(Column("count"), Column("store"), Column("group", "fingerprint", worth=2), Column("name", worth=1)),
        Column("error", least=16),
        *(Column("last", lambda group: show.read_instant(group["last_at"]), worth=2), Column("example", worth=3)),
    ),
)
