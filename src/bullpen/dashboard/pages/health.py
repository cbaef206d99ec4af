"""`/health`: the verdict, and what the doctor found when it was last asked."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from bullpen._kernel.command_line import command_line
from bullpen._kernel.duration import written_ms
from bullpen.dashboard._web import JSON, PageAnswer, PageProblem
from bullpen.dashboard.access import Permission
from bullpen.dashboard.fields import FormField
from bullpen.dashboard.pages.deeds import LedgerDeed, deed_routes
from bullpen.dashboard.reads.ledger import ledger_of, ms_of
from bullpen.dashboard.reads.overview import read_overview
from bullpen.dashboard.routes import Context, Page, PageRoute
from bullpen.ops.doctor import examine
from bullpen.settings import AlertSettings

SILENCES: Final = ("2h", "30m", "8h", "1d", "7d")


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
        "told": told_targets(context.desk.app.settings.alerts),
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
    now = datetime.now(UTC)
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
            "silencedUntilMs": 0 if not each.is_silent(now) else ms_of(each.silenced_until or now),
            "silencedBy": each.silenced_by or "",
            "silenceReason": each.silence_reason or "",
        }
        for each in found
    ]


def told_targets(alerts: AlertSettings) -> list[str]:
    """Who is told, and how."""
    found = ["a webhook"] if alerts.webhook_url else []
    found += ["a Slack channel"] if alerts.slack_url else []
    return [*found, *(f"{way} to {to}" for way, to in (("mail", alerts.email), ("SMS", alerts.sms)) if to)]


async def _silence(context: Context) -> LedgerDeed:
    rule, subject, verb = context.path["rule"], context.path["subject"], context.path["verb"]
    found = [each for each in await _incidents(context) or [] if (each["rule"], each["subject"]) == (rule, subject)]
    if not found:
        raise PageProblem(404, "There is no such open incident: it may be over.")
    about, back = f"{subject} ({rule.replace('_', ' ')})", context.url("health")
    if verb == "silence":
        return LedgerDeed(
            *("incident.silence", "Silence", about),
            "Nobody is told again of this incident before the time is up, also when it grows or ends. It stays on this "
            "page, and the next incident of this kind is told.",
            "It can be undone: tell again.",
            back,
            command_line("alerts silence", rule, subject, reason="WHY"),
            undo_at=context.url("health", "incidents", rule, subject, "unsilence"),
            choices=SILENCES,
            choice="For",
        )
    if verb == "unsilence":
        return LedgerDeed(
            *("incident.unsilence", "Tell again", about),
            "People are told again when this incident lasts, grows or ends.",
            "It can be undone by silencing it.",
            back,
            command_line("alerts unsilence", rule, subject),
            refused="" if found[0]["silencedUntilMs"] else "It is not silenced.",
        )
    raise PageProblem(404, "There is no such action.")


async def _do_silence(context: Context, reason: str) -> str:
    ledger, fields = await ledger_of(context, "alerts"), await context.request.form()
    until, text = None, "People are told again."
    if context.path["verb"] == "silence":
        chosen = fields.get("choice", SILENCES[0])
        if chosen not in SILENCES:
            raise PageProblem(422, f"{chosen[:40]!r} is no choice; take {', '.join(SILENCES)}.")
        if not reason:
            raise PageProblem(422, "Say why: whoever looks next sees it.")
        until = datetime.now(UTC) + timedelta(milliseconds=written_ms(chosen) or 0)
        text = f"Nobody is told of it for {chosen}."
    rule, subject = context.path["rule"], context.path["subject"]
    done = await ledger.incidents.silence(
        rule, subject, until=until, by=context.actor.name, reason=reason, note=context.actor.note()
    )
    if not done:
        raise PageProblem(409, "It is over: there is nothing to silence.")
    return text


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


_SILENCE_FIELDS: Final = (FormField("choice", "To silence it: for how long."),)

ROUTES = (
    PageRoute("/health", health, menu="Health", key="h"),
    PageRoute("/health/run", run_doctor, Permission.ACT, "POST", fields=()),
    *deed_routes("/health/incidents/{rule}/{subject}/{verb}", "health", _silence, _do_silence, fields=_SILENCE_FIELDS),
)
