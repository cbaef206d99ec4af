"""`/workers`: who is connected to work, of every client, as the server tells it; and what each runs now."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from bullpen.dashboard.routes import Context, Page, PageRoute
from bullpen.ops.overview import workers_by_queue
from bullpen.queue import JobState

_MOST_ACTIVE: Final = 20
_MOST_QUEUES: Final = 50


class RunningJob(msgspec.Struct, rename="camel", frozen=True):
    """A job that runs now."""

    queue: str
    id: str
    name: str
    worker: str
    since_ms: int


class WorkerRow(msgspec.Struct, rename="camel", frozen=True):
    """One connection of a worker."""

    queue: str
    name: str
    address: str
    age_seconds: int
    idle_seconds: int
    library: str


class WorkersView(msgspec.Struct, rename="camel", frozen=True):
    """Who works, on what."""

    is_known: bool
    """False: the server does not let us know."""
    workers: tuple[WorkerRow, ...]
    running: tuple[RunningJob, ...]


async def workers(context: Context) -> Page:
    """All workers in one list of the server's clients."""
    desk = context.desk

    async def ask() -> WorkersView:
        found = await workers_by_queue(desk.app.connection, desk.app.prefix)
        rows = tuple(
            WorkerRow(each.queue, each.name, each.address, each.age_s, each.idle_s, each.library)
            for each in found or ()
        )
        busy = [look.queue for look in (await desk.snapshot()).looks if look.active][:_MOST_QUEUES]
        running: list[Any] = []
        for name in busy:
            heads = await desk.queue(name).heads(JobState.ACTIVE, count=_MOST_ACTIVE)
            running += [
                RunningJob(
                    name, each.record.id, each.record.name, each.record.worker_id or "", each.record.processed_on
                )
                for each in heads
            ]
        return WorkersView(found is not None, rows, tuple(running))

    view = await desk.within(desk.once("workers", ask, for_s=1.0))
    return Page("workers.html", view, "Workers", "workers", stream="")


ROUTES = (PageRoute("/workers", workers, menu="Workers", key="k"),)
