"""`bullpen messages`: see what will be sent and what was, correct what failed; import recipients."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from bullpen.cli import show
from bullpen.cli.arguments import DryRunOption, LimitOption, TenantOption, status
from bullpen.cli.context import Done, OnLedger, WrongCommand, whoami
from bullpen.cli.follow import FollowLedger, follow_row
from bullpen.cli.show import Column, Record, present
from bullpen.cli.tree import Argument, Group, Option

if TYPE_CHECKING:
    from bullpen.messages import MessageRow, Messages, Recipient
    from bullpen.ops.dead_letters import Found

app = Group()
recipients = app.group("recipients", "Import, list and remove recipients; preview their messages.")

DaysOption = Annotated[int, Option(min=1, max=36_500, help="How many days ahead.")]
IdsArgument = Annotated[list[str], Argument("MESSAGE...", "Ids of messages.")]
MessageArgument = Annotated[str, Argument("MESSAGE", "Id of the message.")]
OwnerOption = Annotated[str, Option("--tenant", metavar="ID", help="Tenant that they belong to.")]


@dataclass(frozen=True, kw_only=True)
class Planning(OnLedger):
    """Where it matters when each kind of occasion is sent."""

    program: Annotated[
        str | None,
        Option(
            "--app",
            metavar="MODULE:APP",
            help="Program that defines the occasions; default: the app that ran last on this ledger.",
        ),
    ] = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Messages]:
        """As the named program says, else as the app that runs on this ledger has stored it there."""
        from bullpen.cli.programs import load_app
        from bullpen.errors import InvalidOption

        given = None if self.program is None else load_app(self.program).messages
        async with _opened(self) as opened:
            if given is not None:
                for kind in given.occasions:
                    opened.occasions.register(kind)
                opened.routes.update(given.routes)
            is_known = given is not None or await _read_kinds(opened)
            try:
                yield opened
            except InvalidOption as error:
                if error.option not in ("occasion", "column") or self.program is not None:
                    raise
                raise WrongCommand(f"{error}; name the program that registers it: --app MODULE:APP") from None
            finally:
                opened.routes.clear()  # they belong to the program
            if not is_known:
                self.warn(
                    "no app has run on this ledger yet: birthdays and anniversaries are planned for 09:00, and again "
                    "when an app starts; --app MODULE:APP plans as yours does"
                )


@asynccontextmanager
async def _opened(at: OnLedger) -> AsyncIterator[Messages]:
    """The messages of the configured ledger. Reaches no broker."""
    from bullpen.wiring.ledger import prepare
    from bullpen.wiring.messages import make_messages

    settings = at.settings()
    async with at.ledger() as ledger:
        if settings.ledger.url is None:  # the file beside the embedded server is ours: its tables are made on first use
            await prepare(ledger, settings)
        opened = make_messages(settings, ledger, _no_connection, settings.redis.prefix)
        try:
            yield opened
        finally:
            await opened.aclose()


def _no_connection() -> Any:
    raise Done("this command needs no broker")  # a bug of ours: nothing here publishes


async def _read_kinds(opened: Messages) -> bool:
    from bullpen.errors import UnsafeDatabaseRole

    try:
        return await opened.kinds.read()
    except UnsafeDatabaseRole:  # a tenant's role, which may not see what belongs to all
        raise WrongCommand("this role may not read when the app sends; name the program: --app MODULE:APP") from None


# Recipients ---------------------------------------------------------------------------------------------------------


@recipients.command("import")
async def import_(
    at: Planning,
    file: Annotated[Path, Argument("FILE", "CSV file with a header.")],
    channel: Annotated[str | None, Option(help="Channel for lines without one.")] = None,
    tenant: Annotated[str | None, Option("--tenant", metavar="ID", help="Tenant for lines without one.")] = None,
    dry_run: DryRunOption = False,
) -> None:
    """Add or replace recipients from a CSV file. A second import of the same file changes nothing.

    Columns: id, zone, channel, address, name, locale, tenant_id, one per kind of occasion (birthday, anniversary, each
    with .send_at for a time of its own), attributes.NAME. A bad line is reported with its number; good ones are saved.
    """
    try:
        with file.open("rb") as counted:
            total = max(0, sum(1 for _ in counted) - 1)
    except OSError as error:
        raise Done(f"{file} cannot be read: {error.strerror}") from None
    async with at.open() as opened:
        # Bytes that are no UTF-8 become characters that the check of a line refuses with its number.
        with (
            file.open(encoding="utf-8", errors="surrogateescape", newline="") as lines,
            at.bar("importing", total) as move,
        ):
            done = await opened.import_csv(
                lines, channel=channel, tenant_id=tenant, dry_run=dry_run, on_progress=lambda far: move(far.lines)
            )
    problems = [{"line": each.line, "reason": each.reason} for each in done.problems]
    at.say(
        {"saved": 0 if dry_run else done.saved, "good": done.saved, "problems": problems},
        f"{'good' if dry_run else 'saved'}: {done.saved}",
    )
    if problems:
        at.warn(*(f"line {each['line']}: {each['reason']}" for each in problems))
        raise at.failed(f"not saved: {len(problems)} lines")


@recipients.command("list")
async def list_recipients(at: OnLedger, tenant: TenantOption = None, limit: LimitOption = 50) -> None:
    """List recipients with their dates."""
    async with _opened(at) as opened:
        found = await opened.recipients.find(tenant_id=tenant, limit=limit)
    at.list(RECIPIENTS, found, empty="no recipients; `bullpen messages recipients import FILE` adds some")


@recipients.command(destroys=True)
async def remove(
    at: OnLedger,
    ids: Annotated[list[str], Argument("RECIPIENT...", "Ids of recipients.")],
    tenant: OwnerOption = "",
) -> None:
    """Remove recipients and cancel their planned messages."""
    async with _opened(at) as opened:
        _done(at, "removed", await opened.recipients.remove(ids, tenant_id=tenant), len(ids))


@recipients.command()
async def preview(
    at: Planning,
    recipient: Annotated[str, Argument("RECIPIENT", "Id of a recipient.")],
    days: DaysOption = 366,
    tenant: OwnerOption = "",
) -> None:
    """Show which messages a recipient will get, and when."""
    async with at.open() as opened:
        found = await opened.recipients.get(recipient, tenant_id=tenant)
        if found is None:
            raise Done(f"there is no recipient {recipient!r}")
        now = await opened.store.now()
        coming = opened.recipients.preview(found, after=now, until=now + timedelta(days=days))
    at.list(PREVIEW, coming, empty=f"nothing in the next {days} days; --days looks further")


# Messages -----------------------------------------------------------------------------------------------------------


@app.command("list")
async def list_(
    at: OnLedger,
    state: Annotated[
        str | None, Option("--status", help="Status: CREATED, QUEUED, SENDING, SENT, FAILED, PARKED, …")
    ] = None,
    occasion: Annotated[str | None, Option(metavar="KIND", help="Only this kind.")] = None,
    recipient: Annotated[str | None, Option(metavar="ID", help="Only this recipient.")] = None,
    tenant: TenantOption = None,
    limit: LimitOption = 50,
) -> None:
    """List messages, the next to be sent first."""
    from bullpen.messages import MessageStatus

    wanted = status(MessageStatus, state)
    async with _opened(at) as opened:
        found = await opened.store.find(
            status=wanted, occasion=occasion, recipient_id=recipient, tenant_id=tenant, limit=limit
        )
    at.list(MESSAGES, found, empty="no such messages; `bullpen messages plan` plans the next ones")


@app.command("show")
async def show_(at: OnLedger, message: MessageArgument) -> None:
    """Show one message with the provider's answer."""
    at.fields(await _read(at, message))


@app.command()
async def follow(at: FollowLedger, message: MessageArgument) -> None:
    """Print what happens to a message until it ends; the exit code is 1 unless it was sent."""
    bad = ("FAILED", "PARKED", "SKIPPED", "EXPIRED", "CANCELLED")
    await follow_row(at, f"message {message}", lambda: _read(at, message), "SENT", *bad)


@app.command()
async def stats(at: OnLedger) -> None:
    """Count messages by kind and status."""
    async with _opened(at) as opened:
        found = await opened.store.counts()
    at.list(STATS, found, empty="no messages; `bullpen messages recipients import FILE` adds recipients")


@app.command()
async def check(at: OnLedger) -> None:
    """Check that the scheduler is on time. The exit code is 1 when a run was missed."""
    async with _opened(at) as opened:
        found = await opened.health()
    at.fields(
        {
            "healthy": found.is_healthy,
            "reason": found.reason,
            "lastRun": found.last_run,
            "lastSuccess": found.last_success,
            "found": found.found,
            "published": found.published,
            "queueLagMs": found.queue_lag_ms,
            "sendLagMs": found.send_lag_ms,
        }
    )
    if not found.is_healthy:
        raise at.failed(found.reason)


@app.command()
async def lint(at: Planning, days: DaysOption = 366, tenant: TenantOption = None) -> None:
    """List recipients whose local time does not exist or occurs twice because clocks change that day.

    With --app also messages that the program cannot send: unknown channels, templates with missing values.
    These set the exit code to 1. A skipped local time does not, because its message is sent anyway.
    """
    from bullpen.messages import Doubts

    found: list[Any] = []
    async with at.open() as opened:
        now, after = await opened.store.now(), ("", "")
        doubts = Doubts(opened.occasions, opened.routes)
        while batch := await opened.recipients.find(tenant_id=tenant, after=after, limit=500):
            for one in batch:
                found += opened.recipients.lint(one, after=now, until=now + timedelta(days=days))
            if at.program is not None:
                doubts.look_at(batch)
            after = batch[-1].key
        doubtful = list(doubts.found)  # while the channels of the program are known
    listed = [{"recipient": one.who, "occasion": one.occasion, "text": one.text} for one in found]
    if at.as_json:
        at.say([*listed, *({"code": each.code, "text": each.text} for each in doubtful)])
    else:
        for each in doubtful:
            show.say(each)
        if found:
            at.table((Column("recipient"), Column("occasion"), Column("finding", "text", least=20)), listed)
        else:
            show.say(f"no local time of the next {days} days is missing or occurs twice")
    if doubtful:
        raise at.failed(f"{len(doubtful)} findings that keep messages from being sent")


@app.command()
async def plan(at: Planning) -> None:
    """Plan all messages again, then queue those that are due soon.

    For new rules: after an update of the time zone database. An app that starts does it for a kind that it sends at
    another time than before.
    """
    async with at.open() as opened:
        if at.program is not None:
            await opened.kinds.write()
        done = await opened.recipients.replan()
        await opened.planner().run_until_done()
    _done(at, "planned", done, 0)


@app.command()
async def retry(at: OnLedger, ids: IdsArgument) -> None:
    """Send failed, expired, skipped or parked messages again, however late. Their dead letters are discarded."""
    async with _opened(at) as opened:
        retried = await opened.store.retry(ids, by=whoami())
    if retried:
        await _discard_letters(at, retried)
    _done(at, "retried", len(retried), len(ids))


@app.command()
async def confirm(at: OnLedger, ids: IdsArgument) -> None:
    """Mark parked messages as sent, after you have asked the provider."""
    async with _opened(at) as opened:
        _done(at, "confirmed", len(await opened.store.resolve(ids, by=whoami())), len(ids))


@app.command()
async def cancel(at: OnLedger, ids: IdsArgument) -> None:
    """Cancel messages that are not being sent yet."""
    async with _opened(at) as opened:
        _done(at, "cancelled", len(await opened.store.cancel(ids, by=whoami())), len(ids))


def _done(at: OnLedger, verb: str, done: int, wanted: int) -> None:
    at.say({verb: done}, f"{verb}: {done}")
    if done < wanted:
        raise at.failed(f"not {verb}: {wanted - done} (unknown, or not in a state for it)")


async def _discard_letters(at: OnLedger, ids: set[str]) -> None:
    """The messages are sent again, so the failed orders need no person."""
    from bullpen.app import Bullpen
    from bullpen.cli.dead_letter_stores import name_of_store
    from bullpen.errors import BullpenError

    settings = at.settings()
    by_rabbit = settings.messages.transport == "rabbitmq"
    by_redis = settings.messages.transport == "bullmq" and (
        settings.redis.url is not None or (settings.has_redis() and settings.embedded.data_dir.exists())
    )
    if not (by_rabbit or by_redis):
        return
    try:
        async with Bullpen(settings=settings) as opened:
            if by_rabbit:
                opened.use_messages()
            console = await opened.dead_letters()
            queue = settings.rabbitmq.queue_name
            store = settings.rabbitmq.dlq_name if by_rabbit else name_of_store(console, queue)
            if store in console.stores:
                found = [each async for each in console.find(store=store) if _message_of(each) in ids]
                for each in found:
                    await console.discard(store, each.letter.id, by=whoami())
    except BullpenError as error:
        show.warn(f"their dead letters stay where they are: {error}")


def _message_of(found: Found) -> str | None:
    """The message that an order names."""
    data = found.letter.data
    payload = data.get("payload") if isinstance(data, dict) else None
    return payload.get("messageId") if isinstance(payload, dict) else None


# How they are shown -------------------------------------------------------------------------------------------------


async def _read(at: OnLedger, message_id: str) -> dict[str, Any]:
    async with _opened(at) as opened:
        row = await opened.store.get(message_id)
    if row is None:
        raise Done(f"there is no message {message_id}")
    return to_json(row)


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
        "dueAt": row.due_at,
        "localAt": row.local_at,
        "zone": row.zone,
        "attempts": row.attempts,
        "publication": row.publication,
        "publishedAt": row.published_at,
        "sentAt": row.sent_at,
        "lockedBy": row.locked_by,
        "errorCode": row.error_code,
        "lastError": row.last_error,
        "response": row.response,
    }
    return present(fields)


def _recipient_json(one: Recipient) -> dict[str, Any]:
    from bullpen.messages.calendar import show_date

    dates = (
        f"{kind}{f'/{label}' if label else ''} {show_date(when.on)}" for (kind, label), when in one.dates().items()
    )
    fields = {
        "id": one.id,
        "tenantId": one.tenant_id,
        "name": one.name,
        "zone": one.zone,
        "channel": one.channel,
        "address": one.address,
        "locale": one.locale,
        "attributes": dict(one.attributes),
        "occasions": ", ".join(dates),
    }
    return {name: value for name, value in fields.items() if value not in ("", {})}


def _preview_json(found: tuple[str, str, Any]) -> dict[str, Any]:
    kind, label, one = found
    return {
        "occasion": kind,
        "label": label,
        "period": one.period,
        "local": one.local.isoformat(timespec="minutes"),
        "dueAt": one.due_at,
        "number": one.number,
        "clock": one.kind,
    }


RECIPIENTS = Record(
    _recipient_json,
    (
        *(Column("recipient", "id"), Column("tenant", "tenantId", worth=2), Column("name", worth=3)),
        *(Column("zone", worth=1), Column("channel", worth=4), Column("occasions", least=16)),
    ),
)
PREVIEW = Record(
    _preview_json,
    (
        Column("occasion", lambda each: f"{each['occasion']} {each['label']}".strip()),
        *(Column("period"), Column("local time", lambda each: each["local"].replace("T", " "))),
        *(Column("due", "dueAt", worth=1), Column("clock", worth=2)),
    ),
)
MESSAGES = Record(
    to_json,
    (
        *(Column("message", "id"), Column("recipient", "recipientId", worth=2)),
        Column("occasion", lambda each: f"{each['occasion']} {each['period']}", worth=1),
        *(Column("status"), Column("due", "dueAt", worth=5)),
        Column("local time", lambda each: f"{each['localAt']} {each['zone']}", worth=4),
        Column("error", "lastError", worth=3, least=16),
    ),
)
STATS = Record(
    lambda one: {"occasion": one.occasion, "status": one.status.value, "count": one.count, "oldest": one.oldest_due},
    (Column("occasion"), Column("status"), Column("messages", "count"), Column("oldest due", "oldest")),
)
