"""`/queues/{queue}/jobs/{job}/flow`: a job with those below it, and which of them hold it up."""

from __future__ import annotations

from typing import Final

from bullpen._kernel.command_line import command_line
from bullpen.dashboard.reads.flow import read_flow
from bullpen.dashboard.routes import Context, Page, PageRoute

_KINDS: Final = ("pending", "processed", "ignored", "failed")


async def flow(context: Context) -> Page:
    """The tree below one job."""
    name, job_id = context.path["queue"], context.path["job"]
    kind = context.query.get("kind", "")
    view = await read_flow(
        context.desk, name, job_id, kind=kind if kind in _KINDS else "", after=context.query.get("after", "")[:40]
    )
    values = {"kinds": _KINDS, "line": command_line("jobs show", name, job_id)}
    return Page("flow.html", view, f"Flow of {job_id} · {name}", "queues", stream=name, values=values)


ROUTES = (PageRoute("/queues/{queue}/jobs/{job}/flow", flow),)
