"""`/health`: the verdict, and what the doctor found when it was last asked."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from bullpen.dashboard._web import JSON, PageAnswer, PageProblem
from bullpen.dashboard.access import Permission
from bullpen.dashboard.reads.ledger import ms_of
from bullpen.dashboard.reads.overview import read_overview
from bullpen.dashboard.routes import Context, Page, PageRoute
from bullpen.ops.doctor import examine


async def health(context: Context) -> Page:
    """The verdict now, and what the doctor found when it was last asked."""
    overview = await read_overview(context.desk, most=0)
    found, at_ms = context.dashboard.examined
    view = {
        "atMs": overview.at_ms,
        "verdict": overview.verdict,
        "advice": [advice.to_json() for advice in found],
        "examinedMs": at_ms,
        "isExamining": context.dashboard.examining is not None and not context.dashboard.examining.done(),
        "incidents": await _incidents(context),
        "away": {part: int(since * 1000) for part, since in context.desk.away_since.items()},
    }
    return Page("health.html", view, "Health", "health", stream="")


async def _incidents(context: Context) -> list[dict[str, Any]] | None:
    """What is wrong and was told, the oldest first; None where no alerts are kept."""
    try:
        ledger = await context.desk.ledger()
        if ledger is None or "alerts" not in await context.desk.within(ledger.parts(), "ledger"):
            return None
        found = await context.desk.within(ledger.incidents.open(), "ledger")
    except PageProblem:  # the verdict says that the ledger is away
        return None
    return [
        {
            "rule": each.rule,
            "subject": each.subject,
            "number": each.number,
            "openedMs": ms_of(each.opened_at),
            "seenMs": ms_of(each.seen_at),
            "toldMs": 0 if each.told_at is None else ms_of(each.told_at),
            "message": each.message,
            "fix": each.fix,
        }
        for each in found
    ]


async def run_doctor(context: Context) -> PageAnswer:
    """Ask the doctor. It walks over all keys, so it does so only when it is asked to."""
    dashboard, app = context.dashboard, context.desk.app

    async def work() -> None:
        ledger = await context.desk.ledger()
        dashboard.examined = await examine(app.connection, app.prefix, ledger), int(time.time() * 1000)

    if dashboard.examining is None or dashboard.examining.done():
        dashboard.examining = asyncio.create_task(work(), name="bullpen doctor")
    await asyncio.wait([dashboard.examining], timeout=2.0)
    if context.request.is_api:
        return PageAnswer(202, b"{}", JSON)
    return context.redirect(context.url("health"))


ROUTES = (
    PageRoute("/health", health, menu="Health", key="h"),
    PageRoute("/health/run", run_doctor, Permission.ACT, "POST"),
)
