"""`/` and `/queues`: all queues with one verdict."""

from __future__ import annotations

from bullpen.dashboard.reads.overview import read_overview
from bullpen.dashboard.routes import Context, Page, PageRoute
from bullpen.ops.views.queues import OverviewView

_MOST = 100
_DELIMITERS = ("-", "_", ".", "/", ":")


async def overview(context: Context) -> Page:
    """Is everything all right?"""
    return await _listed(context, "overview.html", "Overview", "overview", "trouble")


async def queues(context: Context) -> Page:
    """The same list by name."""
    return await _listed(context, "queues.html", "Queues", "queues", "name")


async def _listed(context: Context, template: str, title: str, nav: str, usual: str) -> Page:
    name, order = context.query.get("name", "")[:200], context.query.get("order", usual)
    group = context.query.get("group", "")
    group = group if group in _DELIMITERS else ""
    view = await read_overview(context.desk, name=name, order=order, group=group, most=_MOST)
    values = {"name": name, "order": order, "group": group, "delimiters": _DELIMITERS, "most": _MOST}
    return Page(template, view, title, nav, stream="", values=values)


ROUTES = (
    PageRoute("/", overview, menu="Overview", key="o", view=OverviewView),
    PageRoute("/queues", queues, menu="Queues", key="q", view=OverviewView),
)
