"""`/destinations`: where deliveries go, how they went lately, and what is switched off or broken.

How they went is told from the newest two thousand attempts of all destinations, and the page says so: no read grows
with the number of rows.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import datetime
from itertools import takewhile
from typing import TYPE_CHECKING, Final

import msgspec

from bullpen._kernel.command_line import command_line
from bullpen.dashboard._web import PageProblem
from bullpen.dashboard.pages.deeds import LedgerDeed, deed_routes
from bullpen.dashboard.reads.ledger import ledger_of, ms_of, read
from bullpen.dashboard.routes import Context, Page, PageRoute
from bullpen.ops.operations import UNKNOWN_OUTCOME
from bullpen.ops.status import WorkStatus

if TYPE_CHECKING:
    from bullpen.ledger.destinations import Destination
    from bullpen.ledger.looks import RecentAttempt

_SAMPLE: Final = 2_000
_MOST_UNKNOWN: Final = 1_000
_WINDOWS: Final = (("5 min", 300_000), ("1 h", 3_600_000), ("24 h", 86_400_000))
_STATES: Final = {"disabled": WorkStatus.PAUSED, "broken": WorkStatus.DEAD, "probing": WorkStatus.RETRYING}


class Window(msgspec.Struct, rename="camel", frozen=True):
    """How deliveries of a stretch of time went."""

    name: str
    attempts: int
    ok: float | None
    """The part that was taken; None: nothing was tried."""
    p50_ms: int | None
    p95_ms: int | None


class DestinationRow(msgspec.Struct, rename="camel", frozen=True):
    """One integration type."""

    type: str
    state: str
    """`in order`, `disabled`, `broken` or `probing`."""
    word: str
    broken_ms: int
    trips: int
    disabled_by: str
    disabled_ms: int
    reason: str
    waiting: int
    retrying: int
    dead: int
    unknown: int
    """Of the dead those whose outcome is unknown; at most a thousand are counted."""
    oldest_due_ms: int
    failing_since_ms: int
    """When the first attempt ended of those that failed one after the other until now; 0: the newest did not fail."""
    failing: int
    """How many they are, of the newest attempts of all destinations."""
    error_code: str
    """That of the newest of them."""
    windows: tuple[Window, ...]


class DestinationsView(msgspec.Struct, rename="camel", frozen=True):
    destinations: tuple[DestinationRow, ...]
    sample: int
    """How many attempts the windows are made of."""
    since_ms: int
    """When the oldest of them ended; 0: there is none."""


async def _rows(context: Context) -> DestinationsView:
    ledger = await ledger_of(context)

    async def ask() -> DestinationsView:
        stats = await ledger.outbox.stats()
        troubled = await ledger.destinations.troubled()
        recent = await ledger.looks.recent_attempts(limit=_SAMPLE)
        names = sorted({*troubled, *(name for name, *_ in stats), *(each.integration_type for each in recent)})
        now_ms = int(time.time() * 1000)
        rows = [_row(name, stats, troubled.get(name), recent, now_ms) for name in names]
        rows.sort(key=lambda row: (row.state == "in order", not row.dead, row.type))
        return DestinationsView(tuple(rows), len(recent), ms_of(recent[-1].finished_at) if recent else 0)

    return await read(context, context.desk.once("destinations", ask, for_s=1.0))


def _row(
    name: str,
    stats: Iterable[tuple[str, str, int, datetime]],
    known: Destination | None,
    recent: list[RecentAttempt],
    now_ms: int,
) -> DestinationRow:
    mine = {str(status): (count, due) for each, status, count, due in stats if each == name}
    waits = [ms_of(due) for status, (_, due) in mine.items() if status in ("PENDING", "FAILED")]
    state = "in order" if known is None else known.state
    tried = [each for each in recent if each.integration_type == name and each.outcome != "RELEASED"]
    failing = list(takewhile(lambda each: each.outcome != "SENT", tried))
    return DestinationRow(
        type=name,
        state=state,
        word=_STATES.get(state, WorkStatus.DONE).value,
        broken_ms=0 if known is None else known.broken_ms,
        trips=0 if known is None else known.trips,
        disabled_by="" if known is None else known.disabled_by or "",
        disabled_ms=0 if known is None or known.disabled_at is None else ms_of(known.disabled_at),
        reason="" if known is None else known.reason or "",
        waiting=mine.get("PENDING", (0, None))[0] + mine.get("CLAIMED", (0, None))[0],
        retrying=mine.get("FAILED", (0, None))[0],
        dead=mine.get("DEAD", (0, None))[0],
        unknown=0,
        oldest_due_ms=min((due for due in waits if due <= now_ms), default=0),
        failing_since_ms=ms_of(failing[-1].finished_at) if failing else 0,
        failing=len(failing),
        error_code=(failing[0].error_code or "") if failing else "",
        windows=tuple(_window(title, tried, now_ms - length) for title, length in _WINDOWS),
    )


def _window(title: str, tried: list[RecentAttempt], since_ms: int) -> Window:
    inside = [each for each in tried if ms_of(each.finished_at) >= since_ms]
    took = sorted(ms_of(each.finished_at) - ms_of(each.started_at) for each in inside if each.started_at is not None)
    return Window(
        title,
        len(inside),
        sum(each.outcome == "SENT" for each in inside) / len(inside) if inside else None,
        took[len(took) // 2] if took else None,
        took[min(len(took) - 1, len(took) * 95 // 100)] if took else None,
    )


async def destinations(context: Context) -> Page:
    """All that deliveries go to, those in trouble first."""
    view = await _rows(context)
    values = {"line": command_line("outbox destinations list")}
    return Page("destinations.html", view, "Destinations", "outbox", is_polled=True, values=values)


async def destination(context: Context) -> Page:
    """One destination."""
    row = await _find(context)
    if row.dead:
        ledger = await ledger_of(context)
        unknown = await read(
            context,
            ledger.looks.count_rows(
                status="DEAD", integration_type=row.type, error_code=UNKNOWN_OUTCOME, most=_MOST_UNKNOWN
            ),
        )
        row = msgspec.structs.replace(row, unknown=min(unknown, _MOST_UNKNOWN))
    values = {"line": command_line("outbox list", type=row.type)}
    return Page("destination.html", row, f"{row.type} · destinations", "outbox", is_polled=True, values=values)


async def _find(context: Context) -> DestinationRow:
    wanted = context.path["type"]
    row = next((each for each in (await _rows(context)).destinations if each.type == wanted), None)
    if row is None:
        raise PageProblem(404, "Nothing was ever sent there, and no row waits.", hint="bullpen outbox stats")
    return row


async def _prepare(context: Context) -> LedgerDeed:
    row, verb = await _find(context), context.path["verb"]
    back = context.url("destinations", row.type)
    if verb == "disable":
        return LedgerDeed(
            *("destination.disable", "Switch off", row.type),
            "Nothing is sent there any more. Its rows wait in the database; no attempt is counted.",
            "It can be undone: switching it on again sends what waits.",
            back,
            command_line("outbox destinations disable", row.type),
            refused="It is disabled already." if row.state == "disabled" else "",
            undo_at=context.url("destinations", row.type, "act", "enable"),
        )
    if verb == "enable":
        return LedgerDeed(
            *("destination.enable", "Switch on" if row.state == "disabled" else "Try again now", row.type),
            "Deliveries resume at once, and the breaker is reset.",
            "It can be undone by switching it off.",
            back,
            command_line("outbox destinations enable", row.type),
            refused="It is enabled and has no problem." if row.state == "in order" else "",
        )
    raise PageProblem(404, "There is no such action.")


async def _perform(context: Context, reason: str) -> str:
    ledger, name = await ledger_of(context), context.path["type"]
    if context.path["verb"] == "disable":
        await ledger.destinations.disable(name, by=context.actor.name, reason=reason)
        return f"{name} is switched off."
    await ledger.destinations.enable(name, by=context.actor.name)
    return f"Deliveries go to {name} again."


ROUTES = (
    PageRoute("/destinations", destinations, view=DestinationsView),
    PageRoute("/destinations/{type}", destination, view=DestinationRow),
    *deed_routes("/destinations/{type}/act/{verb}", "outbox", _prepare, _perform),
)
