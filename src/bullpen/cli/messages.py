"""`bullpen messages`: import recipients, see what will be sent and what was, mend what failed."""

from __future__ import annotations

import getpass
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress

from bullpen.app import Bullpen
from bullpen.cli import common
from bullpen.cli.common import Done, JsonOption, WrongCommand
from bullpen.cli.letters import name_of_store
from bullpen.cli.outbox import DatabaseOption, open_ledger, settings_for
from bullpen.cli.run_app import load_app
from bullpen.errors import BullpenError, InvalidOption, UnsafeDatabaseRole
from bullpen.ops.dead_letters import ConsoleFilter, Found

if TYPE_CHECKING:
    from bullpen.messages import Doubt, Imported, MessageRow, Messages, MessageStatus, Recipient

app = typer.Typer(help="Import recipients, see what will be sent and what was, mend what failed.", no_args_is_help=True)

AppOption = Annotated[
    str | None,
    typer.Option(
        "--app",
        metavar="MODULE:APP",
        help="Program whose kinds of occasions hold; else those of the app that ran last on this ledger.",
    ),
]
TenantOption = Annotated[str | None, typer.Option("--tenant", metavar="ID", help="Only this tenant.")]
LimitOption = Annotated[int, typer.Option(min=1, help="At most so many.")]
DaysOption = Annotated[int, typer.Option(min=1, max=36_500, help="How far to look ahead.")]
IdsArgument = Annotated[list[str], typer.Argument(metavar="MESSAGE...", help="Ids of messages.", show_default=False)]


@app.callback()
def messages() -> None:
    """Import recipients, see what will be sent and what was, mend what failed."""


# People -------------------------------------------------------------------------------------------------------------


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="CSV file with a header.", show_default=False)],
    channel: Annotated[str | None, typer.Option(help="Channel of lines that name none.")] = None,
    tenant: Annotated[
        str | None, typer.Option("--tenant", metavar="ID", help="Tenant of lines that name none.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check every line and save nothing.")] = False,
    program: AppOption = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add recipients from a CSV file, or replace what is known about them. Running it again changes nothing.

    Columns: id, zone, channel, address, name, locale, tenant_id, one per kind of occasion (birthday, anniversary, each
    with .send_at for a time of its own), attributes.NAME. A bad line is told with its number; good ones are saved.
    """
    try:
        total = _count_lines(file)
    except OSError as error:
        raise Done(f"{file} cannot be read: {error.strerror}") from None
    with _bar(total, as_json) as on_progress:
        done = common.wait_for(_import(file, channel, tenant, dry_run, program, database, as_json, on_progress))
    if as_json:
        problems = [{"line": each.line, "reason": each.reason} for each in done.problems]
        common.print_json({"saved": 0 if dry_run else done.saved, "good": done.saved, "problems": problems})
    else:
        common.out.print(f"{'good' if dry_run else 'saved'}: {done.saved}")
        for each in done.problems:
            common.err.print(f"line {each.line}: {each.reason}", markup=False)
    if done.problems:
        raise Done("" if as_json else f"not saved: {len(done.problems)} lines")


@app.command()
def recipients(
    tenant: TenantOption = None,
    limit: LimitOption = 50,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """List recipients with their dates."""

    async def find() -> list[Recipient]:
        async with _opened(database) as opened:
            return await opened.recipients.find(tenant_id=tenant, limit=limit)

    found = common.wait_for(find())
    if as_json:
        common.print_json([_recipient_json(one) for one in found])
    elif not found:
        common.err.print("no recipients")
    else:
        rows = [(one.id, one.tenant_id, one.name, one.zone, one.channel, _dates(one)) for one in found]
        common.print_table(("recipient", "tenant", "name", "zone", "channel", "occasions"), rows)


@app.command()
def remove(
    ids: Annotated[list[str], typer.Argument(metavar="RECIPIENT...", help="Ids of recipients.", show_default=False)],
    tenant: Annotated[str, typer.Option("--tenant", metavar="ID", help="Tenant they belong to.")] = "",
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Forget recipients and cancel what is planned for them."""

    async def work() -> int:
        async with _opened(database) as opened:
            return await opened.recipients.remove(ids, tenant_id=tenant)

    _tell("removed", common.wait_for(work()), len(ids), as_json)


@app.command()
def preview(
    recipient: Annotated[str, typer.Argument(metavar="RECIPIENT", help="Id of a recipient.", show_default=False)],
    days: DaysOption = 366,
    tenant: Annotated[str, typer.Option("--tenant", metavar="ID", help="Tenant it belongs to.")] = "",
    program: AppOption = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a recipient will get, and when."""

    async def work() -> list[tuple[str, str, Any]]:
        async with _planning(database, program, as_json) as opened:
            found = await opened.recipients.get(recipient, tenant_id=tenant)
            if found is None:
                raise Done(f"there is no recipient {recipient!r}")
            now = await opened.store.now()
            return opened.recipients.preview(found, after=now, until=now + timedelta(days=days))

    found = common.wait_for(work())
    if as_json:
        common.print_json(
            [
                {
                    "occasion": kind,
                    "label": label,
                    "period": one.period,
                    "local": one.local.isoformat(timespec="minutes"),
                    "dueAt": _when(one.due_at),
                    "number": one.number,
                    "clock": one.kind,
                }
                for kind, label, one in found
            ]
        )
        return
    rows = [
        (f"{kind} {label}".strip(), one.period, f"{one.local:%Y-%m-%d %H:%M}", _when(one.due_at), one.kind)
        for kind, label, one in found
    ]
    common.print_table(("occasion", "period", "local time", "due", "clock"), rows)


@app.command()
def lint(
    days: DaysOption = 366,
    tenant: TenantOption = None,
    program: AppOption = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """List recipients whose local time does not exist, or comes twice, because clocks change that day.

    With --app also what the program cannot send: a channel that is not registered, a text whose names have no value.
    That ends with 1; a local time that the clocks skip does not, because its message leaves all the same.
    """

    from bullpen.messages import Doubts

    async def work() -> tuple[list[Any], list[Doubt]]:
        async with _planning(database, program, as_json) as opened:
            now, after = await opened.store.now(), ("", "")
            found: list[Any] = []
            doubts = Doubts(opened.occasions, opened.routes)
            while batch := await opened.recipients.find(tenant_id=tenant, after=after, limit=500):
                for one in batch:
                    found += opened.recipients.lint(one, after=now, until=now + timedelta(days=days))
                if program is not None:
                    doubts.look_at(batch)
                after = batch[-1].key
            return found, doubts.found

    found, doubts = common.wait_for(work())
    if as_json:
        listed = [{"recipient": one.who, "occasion": one.occasion, "text": one.text} for one in found]
        common.print_json([*listed, *({"code": each.code, "text": each.text} for each in doubts)])
    else:
        for each in doubts:
            common.out.print(str(each), markup=False)
        if not found:
            common.out.print(f"no local time of the next {days} days is missing or comes twice")
        else:
            rows = [(one.who, one.occasion, one.text) for one in found]
            common.print_table(("recipient", "occasion", "finding"), rows)
    if doubts:
        raise Done("" if as_json else f"{len(doubts)} findings that keep messages from being sent")


# Messages -----------------------------------------------------------------------------------------------------------


@app.command("list")
def list_(
    status: Annotated[str | None, typer.Option(help="CREATED, QUEUED, SENDING, SENT, FAILED, PARKED, …")] = None,
    occasion: Annotated[str | None, typer.Option(metavar="KIND", help="Only this kind.")] = None,
    recipient: Annotated[str | None, typer.Option(metavar="ID", help="Only this recipient.")] = None,
    tenant: TenantOption = None,
    limit: LimitOption = 50,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """List messages in the order of their instants."""

    async def find() -> list[MessageRow]:
        async with _opened(database) as opened:
            return await opened.store.find(
                status=_status(status), occasion=occasion, recipient_id=recipient, tenant_id=tenant, limit=limit
            )

    found = common.wait_for(find())
    if as_json:
        common.print_json([to_json(row) for row in found])
    elif not found:
        common.err.print("no such messages")
    else:
        rows = [
            (
                row.id,
                row.recipient_id,
                f"{row.occasion} {row.period}",
                row.status.value,
                _when(row.due_at),
                f"{row.local_at} {row.zone}",
                common.short(row.last_error or "", limit=60),
            )
            for row in found
        ]
        common.print_table(("message", "recipient", "occasion", "status", "due", "local time", "error"), rows)


@app.command()
def show(
    message: Annotated[str, typer.Argument(metavar="MESSAGE", help="Id of the message.", show_default=False)],
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one message with the provider's answer."""
    fields = to_json(common.wait_for(get(database, message)))
    if as_json:
        common.print_json(fields)
    else:
        rows = [(name, common.short(value, limit=10_000)) for name, value in fields.items()]
        common.print_table(("field", "value"), rows)


@app.command()
def stats(database: DatabaseOption = None, as_json: JsonOption = False) -> None:
    """Count messages by kind and status."""

    async def count() -> list[Any]:
        async with _opened(database) as opened:
            return await opened.store.counts()

    found = common.wait_for(count())
    if as_json:
        common.print_json(
            [
                {
                    "occasion": one.occasion,
                    "status": one.status.value,
                    "count": one.count,
                    "oldest": _when(one.oldest_due),
                }
                for one in found
            ]
        )
    else:
        rows = [(one.occasion, one.status.value, one.count, _when(one.oldest_due)) for one in found]
        common.print_table(("occasion", "status", "messages", "oldest due"), rows, numbers=["messages"])


@app.command()
def health(database: DatabaseOption = None, as_json: JsonOption = False) -> None:
    """Tell whether the scheduler keeps up. Ends with 1 when a run was missed."""

    async def ask() -> Any:
        async with _opened(database) as opened:
            return await opened.health()

    found = common.wait_for(ask())
    fields = {
        "healthy": found.is_healthy,
        "reason": found.reason,
        "lastRun": found.last_run and _when(found.last_run),
        "lastSuccess": found.last_success and _when(found.last_success),
        "found": found.found,
        "published": found.published,
        "queueLagMs": found.queue_lag_ms,
        "sendLagMs": found.send_lag_ms,
    }
    if as_json:
        common.print_json(fields)
    else:
        common.print_table(("field", "value"), [(name, common.short(value)) for name, value in fields.items()])
    if not found.is_healthy:
        raise Done("" if as_json else found.reason)


@app.command()
def plan(program: AppOption = None, database: DatabaseOption = None, as_json: JsonOption = False) -> None:
    """Compute again what is planned for everybody, then plan what comes near.

    For new rules: after an update of the time zone database. An app that starts does it for a kind that it sends at
    another time than before.
    """

    async def work() -> int:
        async with _planning(database, program, as_json) as opened:
            if program is not None:
                await opened.kinds.write()
            done = await opened.recipients.replan()
            await opened.planner().run_until_done()
            return done

    _tell("planned", common.wait_for(work()), 0, as_json)


@app.command()
def retry(ids: IdsArgument, database: DatabaseOption = None, as_json: JsonOption = False) -> None:
    """Send again what failed, expired, was skipped or parked; however late it is. Its dead letter is discarded."""

    async def work() -> int:
        async with _opened(database) as opened:
            retried = await opened.store.retry(ids, by=_whoami())
        if retried:
            await _discard_letters(database, retried)
        return len(retried)

    _tell("retried", common.wait_for(work()), len(ids), as_json)


@app.command()
def resolve(ids: IdsArgument, database: DatabaseOption = None, as_json: JsonOption = False) -> None:
    """Declare parked messages sent, because you have asked the provider."""

    async def work() -> int:
        async with _opened(database) as opened:
            return len(await opened.store.resolve(ids, by=_whoami()))

    _tell("resolved", common.wait_for(work()), len(ids), as_json)


@app.command()
def cancel(ids: IdsArgument, database: DatabaseOption = None, as_json: JsonOption = False) -> None:
    """Take messages back that are not being sent yet."""

    async def work() -> int:
        async with _opened(database) as opened:
            return len(await opened.store.cancel(ids, by=_whoami()))

    _tell("cancelled", common.wait_for(work()), len(ids), as_json)


# Reaching the ledger ------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _opened(database: str | None) -> AsyncIterator[Messages]:
    """The messages of the configured ledger. Reaches no broker."""
    from bullpen.wiring.ledger import prepare
    from bullpen.wiring.messages import make_messages

    settings = settings_for(database)
    async with open_ledger(settings) as ledger:
        if settings.ledger.url is None:  # the file beside the embedded server is ours: its tables are made on first use
            await prepare(ledger, settings)
        opened = make_messages(settings, ledger, _no_connection, settings.redis.prefix)
        try:
            yield opened
        finally:
            await opened.aclose()


@asynccontextmanager
async def _planning(database: str | None, program: str | None, as_json: bool) -> AsyncIterator[Messages]:
    """The same for whoever must know when each kind is sent: as the named program says, else as the app that runs on
    this ledger has stored it there."""
    given = None if program is None else _program(program).messages
    async with _opened(database) as opened:
        if given is not None:
            for kind in given.occasions:
                opened.occasions.register(kind)
            opened.routes.update(given.routes)
        is_known = given is not None or await _read_kinds(opened)
        try:
            yield opened
        except InvalidOption as error:
            if error.option not in ("occasion", "column") or program is not None:
                raise
            raise WrongCommand(f"{error}; name the program that registers it: --app MODULE:APP") from None
        finally:
            opened.routes.clear()  # they belong to the program
        if not is_known and not as_json:
            common.err.print(
                "no app has run on this ledger yet: birthdays and anniversaries are planned for 09:00, and again when "
                "an app starts; --app MODULE:APP plans as yours does",
                markup=False,
                soft_wrap=True,
            )


async def _discard_letters(database: str | None, ids: set[str]) -> None:
    """The messages are on their way again: nobody needs to look at the orders that failed."""
    settings = settings_for(database)
    by_rabbit = settings.messages.transport == "rabbitmq"
    by_redis = settings.messages.transport == "bullmq" and (
        settings.redis.url is not None or (settings.has_redis() and settings.embedded.data_dir.exists())
    )
    if not (by_rabbit or by_redis):
        return
    try:
        async with Bullpen(settings=settings) as app:
            if by_rabbit:
                app.use_messages()
            console = await app.dead_letters()
            queue = settings.rabbitmq.queue_name
            store = settings.rabbitmq.dlq_name if by_rabbit else name_of_store(console, queue)
            if store in console.stores:
                found = [each async for each in console.find(ConsoleFilter(store=store)) if _message_of(each) in ids]
                for each in found:
                    await console.discard(store, each.letter.id, by=_whoami())
    except BullpenError as error:
        common.err.print(f"their dead letters stay where they are: {error}", markup=False)


def _message_of(found: Found) -> str | None:
    """The message that an order names."""
    data = found.letter.data
    payload = data.get("payload") if isinstance(data, dict) else None
    return payload.get("messageId") if isinstance(payload, dict) else None


async def _read_kinds(opened: Messages) -> bool:
    try:
        return await opened.kinds.read()
    except UnsafeDatabaseRole:  # a tenant's role, which may not see what belongs to all
        raise WrongCommand("this role may not read when the app sends; name the program: --app MODULE:APP") from None


async def get(database: str | None, message_id: str) -> MessageRow:
    async with _opened(database) as opened:
        row = await opened.store.get(message_id)
        if row is None:
            raise Done(f"there is no message {message_id}")
        return row


def _no_connection() -> Any:
    raise Done("this command needs no broker")  # a bug of ours: nothing here publishes


def _program(target: str) -> Bullpen:
    return load_app(target)


async def _import(
    file: Path,
    channel: str | None,
    tenant: str | None,
    dry_run: bool,
    program: str | None,
    database: str | None,
    as_json: bool,
    on_progress: Callable[[Imported], None],
) -> Imported:
    async with _planning(database, program, as_json) as opened:
        # Bytes that are no UTF-8 become characters that the check of a line refuses with its number.
        with file.open(encoding="utf-8", errors="surrogateescape", newline="") as lines:
            return await opened.import_csv(
                lines, channel=channel, tenant_id=tenant, dry_run=dry_run, on_progress=on_progress
            )


# Small things -------------------------------------------------------------------------------------------------------


@contextmanager
def _bar(total: int, as_json: bool) -> Iterator[Callable[[Imported], None]]:
    """A progress bar on a terminal; nothing on a pipe."""
    hidden = as_json or not common.err.is_terminal
    with Progress(console=common.err, transient=True, disable=hidden) as progress:
        task = progress.add_task("importing", total=total)
        yield lambda done: progress.update(task, completed=done.lines)


def _count_lines(file: Path) -> int:
    """Lines without the header, for the bar."""
    with file.open("rb") as opened:
        return max(0, sum(1 for _ in opened) - 1)


def _status(text: str | None) -> MessageStatus | None:
    from bullpen.messages import MessageStatus

    if text is None:
        return None
    try:
        return MessageStatus(text.upper())
    except ValueError:
        raise WrongCommand(f"no such status {text!r}; there is {', '.join(MessageStatus)}") from None


def _tell(verb: str, done: int, wanted: int, as_json: bool) -> None:
    if as_json:
        common.print_json({verb: done})
    else:
        common.out.print(f"{verb}: {done}")
    if wanted and done < wanted:
        raise Done("" if as_json else f"not {verb}: {wanted - done} (unknown, or not in a state for it)")


def _whoami() -> str:
    """Who asked, for the audit table."""
    try:
        return f"cli:{getpass.getuser()}"
    except (KeyError, OSError):  # an account without a name, as in some containers
        return "cli"


def _when(instant: datetime) -> str:
    return common.when(round(instant.timestamp() * 1000))


def _dates(recipient: Recipient) -> str:
    from bullpen.messages.calendar import show_date

    return ", ".join(
        f"{kind}{f'/{label}' if label else ''} {show_date(one.on)}" for (kind, label), one in recipient.dates().items()
    )


def _recipient_json(one: Recipient) -> dict[str, Any]:
    fields = {
        "id": one.id,
        "tenantId": one.tenant_id,
        "name": one.name,
        "zone": one.zone,
        "channel": one.channel,
        "address": one.address,
        "locale": one.locale,
        "attributes": dict(one.attributes),
        "occasions": _dates(one),
    }
    return {name: value for name, value in fields.items() if value not in ("", {})}


def to_json(row: MessageRow) -> dict[str, Any]:
    fields = {
        "id": row.id,
        "recipientId": row.recipient_id,
        "tenantId": row.tenant_id or None,
        "occasion": row.occasion,
        "label": row.label or None,
        "period": row.period,
        "channel": row.channel,
        "status": row.status.value,
        "dueAt": _when(row.due_at),
        "localAt": row.local_at,
        "zone": row.zone,
        "attempts": row.attempts,
        "publication": row.publication,
        "publishedAt": row.published_at and _when(row.published_at),
        "sentAt": row.sent_at and _when(row.sent_at),
        "lockedBy": row.locked_by,
        "errorCode": row.error_code,
        "lastError": row.last_error,
        "response": row.response,
    }
    return {name: value for name, value in fields.items() if value is not None}
