"""`/` and `/queues`: all queues with one verdict."""

from __future__ import annotations

from bullpen.dashboard.app import Context, Page, PageRoute

_MOST = 100


async def overview(context: Context) -> Page:
    """Is everything all right?"""
    name, order = context.query.get("name", "")[:200], context.query.get("order", "trouble")
    view = await context.desk.overview(name=name, order=order, most=_MOST)
    return Page("overview.html", view, "Overview", "overview", stream="", values={"name": name, "order": order})


async def queues(context: Context) -> Page:
    """The same list by name."""
    name, order = context.query.get("name", "")[:200], context.query.get("order", "name")
    view = await context.desk.overview(name=name, order=order, most=_MOST)
    return Page("queues.html", view, "Queues", "queues", stream="", values={"name": name, "order": order})


ROUTES = (PageRoute("/", overview), PageRoute("/queues", queues))
