"""`/charts`: what the queues did in the last hour, day, week or month, with percentiles and marks."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec

from bullpen._kernel.command_line import command_line
from bullpen.dashboard._web import JSON, PageAnswer, PageProblem
from bullpen.dashboard.access import Permission
from bullpen.dashboard.charts import Chart, Series, make_chart
from bullpen.dashboard.fields import FormField
from bullpen.dashboard.frame import zone_of
from bullpen.dashboard.problems import or_form
from bullpen.dashboard.render import clock, number
from bullpen.dashboard.routes import Context, Page, PageRoute
from bullpen.ops.history import RANGES, HistoryView, history_view
from bullpen.ops.marks import ChartMark, add_mark
from bullpen.ops.status import duration_text
from bullpen.ops.views.queues import OPERATIONS
from bullpen.wire.keys import QueueKeys

_MOST_QUEUES: Final = 20
_FRESH_S: Final = 5.0
_MINUTE_MS: Final = 60_000
_LABELS: Final = 5


class ChartsRow(msgspec.Struct, rename="camel", frozen=True):
    """One queue in the list."""

    queue: str
    done: int
    failed: int
    retried: int
    wait_p95_ms: float | None
    run_p95_ms: float | None
    trend: tuple[int, ...]
    """Jobs that ended, of each step."""


class ChartsView(msgspec.Struct, rename="camel", frozen=True):
    """The busiest queues of a range."""

    range: str
    queues: tuple[ChartsRow, ...]
    total: int
    """How many queues there are."""
    marks: tuple[ChartMark, ...]


async def charts(context: Context) -> Page:
    """All queues, or one of them drawn."""
    over = context.query.get("range", "1h")
    if over not in RANGES:
        raise PageProblem(422, f"{over[:40]!r} is no range; choose {', '.join(RANGES)}.")
    if name := context.query.get("queue", ""):
        return await _one(context, name, over)
    looks = [look for look in (await context.desk.snapshot()).looks if look.queue != OPERATIONS]
    busiest = sorted(looks, key=lambda look: (-look.added, look.queue))[:_MOST_QUEUES]
    views = await asyncio.gather(*(_history(context, look.queue, over, "") for look in busiest))
    rows = sorted((_row(view) for view in views), key=lambda row: (-row.done - row.failed, row.queue))
    marks = views[0].marks if views else ()
    view = ChartsView(over, tuple(rows), len(looks), marks)
    return Page("charts.html", view, "Charts", "charts", is_polled=True, values={"ranges": RANGES})


async def _one(context: Context, queue: str, over: str) -> Page:
    await context.desk.must_exist(queue)
    view = await _history(context, queue, over, context.query.get("name", "")[:200])
    zone, end = zone_of(context.request), view.points[-1].at_ms + view.step_ms
    titles = [clock(point.at_ms, zone)[5:16] for point in view.points]
    marks = [
        ((mark.at_ms - view.since_ms) / (end - view.since_ms), f"{clock(mark.at_ms, zone)[:16]} {mark.text}")
        for mark in view.marks
    ]
    drawn = [
        _throughput(view, titles, marks),
        _times("Time until a worker took them", view, "wait", titles, marks),
        _times("Time that they ran", view, "run", titles, marks),
    ]
    every = max(1, len(titles) // _LABELS)
    values = {
        "ranges": RANGES,
        "drawn": drawn,
        "titles": titles,
        "labels": [each if over != "1h" else each[6:] for each in titles[::every]],
        "line": command_line("queues history", queue, range=over, name=view.name or None),
    }
    return Page("chart.html", view, f"Charts · {queue}", "charts", is_polled=True, values=values)


async def _history(context: Context, queue: str, over: str, name: str) -> HistoryView:
    desk = context.desk
    keys, marks = QueueKeys(desk.app.prefix, queue), QueueKeys(desk.app.prefix, OPERATIONS)

    async def ask() -> HistoryView:
        return await history_view(desk.app.connection, keys, marks, over=over, name=name)

    return await desk.within(desk.once(("history", queue, over, name), ask, for_s=_FRESH_S))


def _row(view: HistoryView) -> ChartsRow:
    trend = tuple(point.done + point.failed for point in view.points)
    return ChartsRow(
        *(view.queue, view.done, view.failed, view.retried),
        *(view.wait.p95, view.run.p95, trend),
    )


def _throughput(view: HistoryView, titles: list[str], marks: list[tuple[float, str]]) -> Chart:
    minutes = view.step_ms / _MINUTE_MS
    lines = [
        Series(label, f"chart-{kind}", [getattr(point, kind) / minutes for point in view.points])
        for kind, label in (("done", "done"), ("failed", "failed"), ("retried", "tried again"))
    ]
    return make_chart("Jobs per minute", lines, titles, text_of=_rate, marks=marks)


def _times(title: str, view: HistoryView, what: str, titles: list[str], marks: list[tuple[float, str]]) -> Chart:
    def line(share: str) -> Series:
        values = [getattr(getattr(point, what), share) for point in view.points]
        return Series(share, f"chart-{share}", values)

    return make_chart(title, [line(each) for each in ("p50", "p95", "p99")], titles, text_of=_time, marks=marks)


def _rate(value: float) -> str:
    return number(round(value)) if value >= 10 or value == int(value) else f"{value:.1f}"


def _time(value: float) -> str:
    return duration_text(round(value)) if value >= 1 else f"{value:.1f} ms"


async def mark_form(context: Context) -> Page:
    return await _mark_form(context, {}, "")


async def _mark_form(context: Context, fields: dict[str, str], problem: str) -> Page:
    values: dict[str, Any] = {"fields": fields, "problem": problem}
    return Page("mark.html", {}, "Set a mark", "charts", values=values)


async def mark(context: Context) -> Page | PageAnswer:
    """Set a mark, however often the form is sent."""
    text = (await context.request.form()).get("text", "")

    async def work() -> PageAnswer:
        keys = QueueKeys(context.desk.app.prefix, OPERATIONS)

        async def do() -> list[str]:
            actions = await context.desk.actions(context.actor)
            await actions.note("mark", "dashboard", "", {**context.actor.note(), "text": text[:200]})
            made = await context.desk.within(add_mark(context.desk.app.connection, keys, text, context.actor.name))
            return [made.text]

        (told,) = await context.once("mark", do)
        context.desk.forget()
        if context.request.is_api:
            return PageAnswer(201, msgspec.json.encode({"text": told}), JSON)
        return context.redirect(context.url("charts"), f"The mark is set: {told}")

    return await or_form(context, _mark_form, work)


ROUTES = (
    PageRoute("/charts", charts, menu="Charts", key="c"),
    PageRoute("/charts/mark", mark_form, Permission.ACT),
    PageRoute(
        "/charts/mark", mark, Permission.ACT, "POST", fields=(FormField("text", "What it says.", required=True),)
    ),
)
