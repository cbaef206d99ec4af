"""`/messages`: what people get at nine in the morning of their own clocks: by status, one with its way, a calendar.

The calendar counts what is planned for the next two days, by the hour of the recipients' clocks and by instant, and
says where clocks change. A visitor of some tenants sees theirs.
"""

from __future__ import annotations

import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final
from zoneinfo import ZoneInfo

import msgspec

from bullpen._kernel.command_line import command_line
from bullpen._kernel.scrub import hide_secrets, scrub_lines, summary
from bullpen.dashboard._web import PageProblem
from bullpen.dashboard.pages.deeds import LedgerDeed, deed_routes
from bullpen.dashboard.reads.ledger import ledger_of, ms_of, read
from bullpen.dashboard.render import find_zone
from bullpen.dashboard.routes import Context, Page, PageRoute
from bullpen.ops.status import duration_text, message_status
from bullpen.ops.views.jobs import Payload

if TYPE_CHECKING:
    from bullpen.ledger.message_records import MessageHour, MessageRow
    from bullpen.ledger.messages import SqlMessages

_PER_PAGE: Final = 50
_AHEAD_MS: Final = 48 * 3_600_000
_HOUR_MS: Final = 3_600_000
_MOST_ZONES: Final = 40
_LATE: Final = ("CREATED", "QUEUED")


class MessageLine(msgspec.Struct, rename="camel", frozen=True):
    """One message of a list."""

    id: str
    status: str
    word: str
    occasion: str
    recipient: str
    tenant: str
    local_at: str
    zone: str
    due_ms: int
    channel: str
    is_late: bool
    error: str


class MessagesView(msgspec.Struct, rename="camel", frozen=True):
    """A page of messages in the order of their instants."""

    status: str
    counts: dict[str, int]
    """How many have each status, as far as that is known; empty for a visitor of some tenants."""
    queue_lag_ms: int
    """How long the oldest due message waits to be queued; 0: none does."""
    send_lag_ms: int
    messages: tuple[MessageLine, ...]
    after: str
    next_after: str


class MessageView(msgspec.Struct, rename="camel", frozen=True):
    """One message with its way."""

    line: MessageLine
    period: str
    attempts: int
    publications: int
    way: tuple[tuple[str, int], ...]
    """What happened when, Unix ms."""
    says: str
    error: str
    answer: Payload | None
    late_policy: str
    recipient_name: str
    address: str


class CalendarHour(msgspec.Struct, rename="camel", frozen=True):
    """An hour and how many messages leave in it."""

    at: str
    """`2026-03-14T09` of the recipients' clocks, or of UTC."""
    count: int


class CalendarView(msgspec.Struct, rename="camel", frozen=True):
    """The next two days."""

    total: int
    by_clock: tuple[CalendarHour, ...]
    by_instant: tuple[CalendarHour, ...]
    zones: tuple[tuple[str, int], ...]
    findings: tuple[str, ...]
    late: int
    """Messages whose time has passed."""


async def _store(context: Context) -> SqlMessages:
    from bullpen.ledger.messages import SqlMessages

    return SqlMessages((await ledger_of(context, "messages")).database)


async def messages(context: Context) -> Page:
    """Messages by status, the earliest first."""
    from bullpen.ledger.message_records import MessageStatus

    store, query = await _store(context), context.query
    status = query.get("status", "")
    status = status if status in set(MessageStatus) else ""
    wanted = {name: query.get(name, "").strip()[:120] for name in ("occasion", "recipient")}
    found = await read(
        context,
        store.find(
            status=MessageStatus(status) if status else None,
            occasion=wanted["occasion"] or None,
            recipient_id=wanted["recipient"] or None,
            tenant_id=context.tenant,
            after_id=query.get("after") or None,
            limit=_PER_PAGE + 1,
        ),
    )
    counts: Counter[str] = Counter()
    lags = (0, 0)
    if not context.principal.tenants:
        for each in await read(context, store.counts()):
            counts[each.status.value] += each.count
        lags = await read(context, store.lags_ms())
    lines = tuple(_line(context, row) for row in found[:_PER_PAGE])
    view = MessagesView(
        *(status, dict(counts), *lags, lines, query.get("after", "")[:40]),
        lines[-1].id if len(found) > _PER_PAGE else "",
    )
    kept = {"status": status or None, **{name: value or None for name, value in wanted.items()}}
    pages = {"first": context.url("messages", **kept)} if view.after else {}
    if view.next_after:
        pages["next"] = context.url("messages", after=view.next_after, **kept)
    values = {
        "statuses": [each.value for each in MessageStatus],
        "wanted": wanted,
        "pages": pages,
        "line": command_line("messages list", status=status or None),
    }
    return Page("messages.html", view, "Messages", "messages", is_polled=True, values=values)


def _line(context: Context, row: MessageRow) -> MessageLine:
    return MessageLine(
        id=row.id,
        status=row.status.value,
        word=message_status(row.status.value).value,
        occasion=f"{row.occasion} {row.label}".strip(),
        recipient=row.recipient_id,
        tenant=row.tenant_id,
        local_at=row.local_at.replace("T", " "),
        zone=row.zone,
        due_ms=ms_of(row.due_at),
        channel=row.channel,
        is_late=row.status.value in _LATE and row.due_at < row.read_at,
        error=summary(row.last_error) if row.last_error and context.payloads else "",
    )


async def message(context: Context) -> Page:
    """One message: when it is due on whose clocks, and what became of it."""
    row = await _find(context)
    way = (
        *(("planned", row.created_at), ("due", row.due_at), ("published", row.published_at)),
        *(("lease ends", row.locked_until), ("published again", row.publish_again_at), ("sent", row.sent_at)),
    )
    answer = None
    if row.response_json is not None:
        size = len(row.response_json)
        answer = (
            Payload(size, value=hide_secrets(msgspec.json.decode(row.response_json)))
            if context.payloads
            else Payload(size, hidden="You may not see payloads.")
        )
    view = MessageView(
        line=_line(context, row),
        period=row.period,
        attempts=row.attempts,
        publications=row.publication,
        way=tuple(sorted(((name, ms_of(at)) for name, at in way if at is not None), key=lambda each: each[1])),
        says=_says(row),
        error=scrub_lines(row.last_error) if row.last_error and context.payloads else "",
        answer=answer,
        late_policy=row.late_policy,
        recipient_name="" if row.recipient is None or not context.payloads else row.recipient.name,
        address="" if row.recipient is None or not context.payloads else row.recipient.address,
    )
    line = command_line("messages show", row.id)
    values = {"line": line, "offered": [verb for verb in _VERBS if not _VERBS[verb].why_not(row)]}
    return Page("message.html", view, f"{row.id} · messages", "messages", is_polled=True, values=values)


def _says(row: MessageRow) -> str:
    """How it stands, in one sentence."""
    wait_ms = ms_of(row.due_at) - ms_of(row.read_at)
    match row.status.value:
        case "CREATED" | "QUEUED" if wait_ms > 0:
            return f"It leaves in {duration_text(wait_ms)}, at {row.local_at[11:]} of {row.zone}."
        case "CREATED":
            return f"It was due {duration_text(-wait_ms)} ago and is not queued: no scheduler runs, or it is behind."
        case "QUEUED":
            return f"It was due {duration_text(-wait_ms)} ago and waits for a sender of the channel {row.channel}."
        case "SENDING":
            return f"{row.locked_by or 'A sender'} is sending it."
        case "SENT":
            return "It was sent."
        case "PARKED":
            return "It is unknown whether it was sent: a person must decide."
        case "FAILED":
            return f"Sending failed after {row.attempts} {'attempt' if row.attempts == 1 else 'attempts'}."
        case "SKIPPED" | "EXPIRED":
            return "It was too late under its policy."
    return "Its recipient or its occasion was removed, or somebody cancelled it."


async def calendar(context: Context) -> Page:
    """The next 48 hours by the recipients' clocks and by instant."""
    store = await _store(context)
    hours = await read(context, store.hours(_AHEAD_MS, tenant_id=context.tenant))
    now_ms = int(time.time() * 1000)
    clock, instant, zones = Counter[str](), Counter[str](), Counter[str]()
    late = 0
    for each in hours:
        zones[each.zone] += each.count
        due_ms = ms_of(each.first_due)
        if due_ms < now_ms - _HOUR_MS:
            late += each.count
            continue
        clock[each.local_hour] += each.count
        instant[_hour(datetime.fromtimestamp(due_ms / 1000, UTC))] += each.count
    view = CalendarView(
        total=sum(each.count for each in hours),
        by_clock=_in_order(clock),
        by_instant=_in_order(instant),
        zones=tuple(zones.most_common(_MOST_ZONES)),
        findings=tuple(_findings(hours, zones)),
        late=late,
    )
    values = {"line": command_line("messages list", status="CREATED"), "days": _days}
    return Page("calendar.html", view, "Calendar · messages", "messages", is_polled=True, values=values)


def _hour(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H")


def _in_order(counts: Counter[str]) -> tuple[CalendarHour, ...]:
    return tuple(CalendarHour(at, counts[at]) for at in sorted(counts))


def _days(hours: tuple[CalendarHour, ...]) -> list[tuple[str, list[int]]]:
    """Days with their 24 hours."""
    days: dict[str, list[int]] = {}
    for each in hours:
        day, _, hour = each.at.partition("T")
        days.setdefault(day, [0] * 24)[int(hour)] += each.count
    return sorted(days.items())


def _findings(hours: list[MessageHour], zones: Counter[str]) -> list[str]:
    """Where clocks change while messages wait, and days that do not come every year."""
    now = datetime.now(UTC)
    found = []
    for name in zones:
        zone = find_zone(name)
        if not isinstance(zone, ZoneInfo):
            continue
        steps = [now + timedelta(hours=hour) for hour in range(49)]
        for before, after in pairwise(steps):
            one, other = before.astimezone(zone).utcoffset(), after.astimezone(zone).utcoffset()
            if one is not None and other is not None and one != other:
                minutes = int((other - one).total_seconds()) // 60
                what = f"forward by {minutes}" if minutes > 0 else f"back by {-minutes}"
                day = after.astimezone(zone).strftime("%Y-%m-%d")
                found.append(f"{name} sets its clocks {what} minutes on {day}; {zones[name]:,} messages wait there.")
    if leap := sum(each.count for each in hours if each.local_hour[5:10] == "02-29"):
        found.append(f"{leap:,} messages are due on a 29 February.")
    return found


# Acting -------------------------------------------------------------------------------------------------------------


class _Verb(msgspec.Struct, frozen=True):
    title: str
    says: str
    undo: str
    done: str
    statuses: frozenset[str]
    danger: bool = False

    def why_not(self, row: MessageRow) -> str:
        return "" if row.status.value in self.statuses else f"The message is {row.status.value}."


_VERBS: Final = {
    "retry": _Verb(
        "Send again",
        "The message is sent again, to the same recipient and with the same key: a provider that knows the key may "
        "ignore the repetition.",
        "It can be cancelled until a sender has it.",
        "is in line again",
        frozenset({"FAILED", "EXPIRED", "SKIPPED", "PARKED"}),
    ),
    "resolve": _Verb(
        "It was sent",
        "You confirm that the message arrived. It is not sent again.",
        "It cannot be undone.",
        "counts as sent",
        frozenset({"PARKED"}),
    ),
    "cancel": _Verb(
        "Cancel",
        "The message is cancelled and not sent.",
        "It cannot be undone.",
        "is cancelled",
        frozenset({"CREATED", "QUEUED"}),
        danger=True,
    ),
}


async def _find(context: Context) -> MessageRow:
    row = await read(context, (await _store(context)).get(context.path["id"]))
    if row is None or (context.principal.tenants and row.tenant_id != context.tenant):
        raise PageProblem(404, "There is no such message.", hint="bullpen messages list")
    return row


async def _prepare(context: Context) -> LedgerDeed:
    verb = _VERBS.get(context.path["verb"])
    if verb is None:
        raise PageProblem(404, "There is no such action.")
    row = await _find(context)
    line = command_line(f"messages {context.path['verb']}", row.id)
    return LedgerDeed(
        *(f"message.{context.path['verb']}", verb.title, row.id, verb.says, verb.undo),
        context.url("messages", row.id),
        line,
        danger=verb.danger,
        refused=verb.why_not(row),
    )


async def _perform(context: Context, _reason: str) -> str:
    store, row = await _store(context), await _find(context)
    work: dict[str, Any] = {"retry": store.retry, "resolve": store.resolve, "cancel": store.cancel}
    done = await work[context.path["verb"]]([row.id], by=context.actor.name)
    if not done:
        raise PageProblem(409, "The message was changed in the meantime and has another status now.")
    return f"The message {row.id} {_VERBS[context.path['verb']].done}."


ROUTES = (
    PageRoute("/messages", messages, for_tenants=True, menu="Messages", key="m", needs_ledger=True, view=MessagesView),
    PageRoute("/messages/calendar", calendar, for_tenants=True, view=CalendarView),
    PageRoute("/messages/{id}", message, for_tenants=True, view=MessageView),
    *deed_routes("/messages/{id}/act/{verb}", "messages", _prepare, _perform, for_tenants=True),
)
