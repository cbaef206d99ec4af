"""`/workers`: who works on what: processes that tell what they do, and workers of other clients as the server knows
them."""

from __future__ import annotations

from typing import Final

import msgspec

from bullpen.dashboard.routes import Context, Page, PageRoute
from bullpen.ops.overview import ConnectedWorker, grouped_by_place, workers_by_queue
from bullpen.queue import JobState
from bullpen.queue.beats import GONE_AFTER_MS, Beat, read_beats
from bullpen.wire.keys import QueueKeys

_MOST_ACTIVE: Final = 20
_MOST_QUEUES: Final = 50
_MOST_ASKED: Final = 500


class RunningJob(msgspec.Struct, rename="camel", frozen=True):
    """A job that runs now."""

    queue: str
    id: str
    name: str
    worker: str
    since_ms: int


class WorkerRow(msgspec.Struct, rename="camel", frozen=True):
    """One connection of a worker of another client."""

    queue: str
    name: str
    address: str
    age_seconds: int
    idle_seconds: int
    library: str


class ProcessRow(msgspec.Struct, rename="camel", frozen=True):
    """One process that tells what it does."""

    process: str
    host: str
    pid: int
    language: str
    library: str
    queues: tuple[str, ...]
    slots: int
    used: int
    lag_ms: int
    locks_lost: int
    asked_ms: int | None
    """When it asked for jobs last; None: not yet."""
    started_ms: int
    told_ms: int
    is_paused: bool
    gone: bool
    """It stopped without a word. Its jobs go to others when their locks have ended."""
    jobs: tuple[RunningJob, ...]
    """Those that it had when it last told of itself; the oldest ten of each worker."""


class WorkersView(msgspec.Struct, rename="camel", frozen=True):
    """Who works, on what."""

    is_known: bool
    """False: the server does not let us know who is connected."""
    processes: tuple[ProcessRow, ...]
    workers: tuple[WorkerRow, ...]
    """Of clients that tell nothing of themselves."""
    running: tuple[RunningJob, ...]
    now_ms: int


async def workers(context: Context) -> Page:
    """All processes and workers, or those of one queue."""
    desk, only = context.desk, context.query.get("queue", "")

    async def ask() -> WorkersView:
        connected = await workers_by_queue(desk.app.connection, desk.app.prefix)
        picture = await desk.snapshot()
        names = [only] if only else [look.queue for look in picture.looks][:_MOST_ASKED]
        beats: dict[str, list[Beat]] = {}
        for group in grouped_by_place(desk.app.connection, [QueueKeys(desk.app.prefix, name) for name in names]):
            beats |= await read_beats(desk.app.connection.shared_door(group[0].base), group)
        processes = _processes(beats, picture.at_ms)
        told = {(queue, worker.name) for queue, each in beats.items() for beat in each for worker in beat.workers}
        rows = [
            _row(each) for each in connected or () if (each.queue, each.name) not in told and only in ("", each.queue)
        ]
        busy = [look.queue for look in picture.looks if look.active and only in ("", look.queue)][:_MOST_QUEUES]
        running: list[RunningJob] = []
        for name in busy:
            heads = await desk.queue(name).heads(JobState.ACTIVE, count=_MOST_ACTIVE)
            running += [
                RunningJob(
                    name, each.record.id, each.record.name, each.record.worker_id or "", each.record.processed_on
                )
                for each in heads
            ]
        return WorkersView(connected is not None, processes, tuple(rows), tuple(running), picture.at_ms)

    view = await desk.within(desk.once(("workers", only), ask, for_s=1.0))
    return Page("workers.html", view, "Workers", "workers", stream="", values={"only": only})


def _processes(beats: dict[str, list[Beat]], now_ms: int) -> tuple[ProcessRow, ...]:
    """One row per process, the troubled first."""
    by_process: dict[str, list[tuple[str, Beat]]] = {}
    for queue, told in beats.items():
        for beat in told:
            by_process.setdefault(beat.process, []).append((queue, beat))
    rows = [_process(process, told, now_ms) for process, told in by_process.items()]
    return tuple(sorted(rows, key=lambda row: (not row.gone, -row.lag_ms, row.host, row.pid)))


def _process(process: str, told: list[tuple[str, Beat]], now_ms: int) -> ProcessRow:
    newest = max((beat for _, beat in told), key=lambda beat: beat.at_ms)
    workers = [(queue, beat, worker) for queue, beat in told for worker in beat.workers]
    asked = [beat.at_ms - worker.asked_ms for _, beat, worker in workers if worker.asked_ms is not None]
    return ProcessRow(
        process=process,
        host=newest.host,
        pid=newest.pid,
        language=newest.language,
        library=newest.library,
        queues=tuple(sorted({queue for queue, _ in told})),
        slots=sum(worker.slots for _, _, worker in workers),
        used=sum(worker.running for _, _, worker in workers),
        lag_ms=max(beat.lag_ms for _, beat in told),
        locks_lost=sum(worker.locks_lost for _, _, worker in workers),
        asked_ms=max(asked, default=None),
        started_ms=newest.started_ms,
        told_ms=newest.at_ms,
        is_paused=all(worker.is_paused for _, _, worker in workers),
        gone=now_ms - newest.at_ms > GONE_AFTER_MS,
        jobs=tuple(
            RunningJob(queue, job.id, job.name, worker.name, job.since_ms)
            for queue, _, worker in workers
            for job in worker.jobs
        ),
    )


def _row(each: ConnectedWorker) -> WorkerRow:
    return WorkerRow(each.queue, each.name, each.address, each.age_s, each.idle_s, each.library)


ROUTES = (PageRoute("/workers", workers, menu="Workers", key="k", view=WorkersView),)
