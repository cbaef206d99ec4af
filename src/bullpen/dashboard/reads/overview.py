"""All queues with one verdict, and the other stores that an app has.

Never raises for a part that is away: that is the verdict. The rows of the ledger are asked for every five seconds at
most, and who paused a queue every two.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from bullpen._kernel.command_line import command_line
from bullpen.dashboard._web import PageProblem
from bullpen.dashboard.desk import Desk
from bullpen.dashboard.reads.schedules import late_schedules
from bullpen.ops.overview import QueueSnapshot, Snapshot
from bullpen.ops.pauses import PauseNote
from bullpen.ops.status import WorkStatus, counted
from bullpen.ops.symptoms import Symptom, ledger_symptoms
from bullpen.ops.views.queues import OverviewView, Recently, StoreRow, overview_view, verdict_of

if TYPE_CHECKING:
    from bullpen.ledger import Ledger

__all__ = ["read_overview", "recently"]

_LEDGER_FOR_S: Final = 5.0
_MOST_PAUSES: Final = 50


async def read_overview(
    desk: Desk, *, name: str = "", order: str = "trouble", group: str = "", most: int = 100
) -> OverviewView:
    signs, stores, unread = await _of_ledger(desk)
    try:
        picture = await desk.snapshot()
        pauses = await _pauses(desk, picture)
        signs = [*signs, *await late_schedules(desk, picture)]
    except PageProblem as problem:
        down = Symptom(
            "redis_down", str(desk.app.connection.address), 1, problem.text, "ask the doctor", "bullpen doctor"
        )
        verdict = verdict_of([down, *signs], unread)
        return OverviewView(int(time.time() * 1000), verdict, (), 0, stores, is_complete=False)
    return overview_view(
        picture,
        desk.limits,
        recently=lambda look: recently(desk, look, picture, pauses.get(look.queue)),
        signs=signs,
        unread=unread,
        stores=stores,
        name=name,
        order=order,
        group=group,
        most=most,
        is_complete=desk.sampler.is_complete,
    )


def recently(desk: Desk, look: QueueSnapshot, picture: Snapshot, pause: PauseNote | None) -> Recently:
    """What is known of a queue beside its newest snapshot."""
    sampler = desk.sampler
    return Recently(sampler.waits.get(look.queue), sampler.done_per_minute(look.queue, picture), pause)


async def _pauses(desk: Desk, picture: Snapshot) -> dict[str, PauseNote]:
    paused = [look.queue for look in picture.looks if look.paused][:_MOST_PAUSES]
    notes = await asyncio.gather(*(desk.pause(name) for name in paused))
    return {name: note for name, note in zip(paused, notes, strict=True) if note is not None}


async def _of_ledger(desk: Desk) -> tuple[list[Symptom], tuple[StoreRow, ...], list[str]]:
    """Signs, rows, and which part could not be read."""

    async def ask() -> tuple[list[Symptom], tuple[StoreRow, ...], list[str]]:
        try:
            ledger = await desk.ledger()
            if ledger is None:
                return [], (), []
            signs = await desk.within(ledger_symptoms(ledger, desk.limits), "ledger")
            broken = await desk.within(_broken(ledger), "ledger")
            shown = {each.subject for each in broken}
            # Late too, of course, but for this reason: one cause, one finding.
            signs = [each for each in signs if each.rule != "outbox_late" or each.subject not in shown] + broken
            return signs, await desk.within(_stores(ledger), "ledger"), []
        except PageProblem as problem:
            return [], (), [problem.text]

    return await desk.once("ledger overview", ask, for_s=_LEDGER_FOR_S)


async def _broken(ledger: Ledger) -> list[Symptom]:
    """Destinations to which nothing goes, with what waits for them."""
    waiting: dict[str, int] = {}
    for name, status, count, _ in await ledger.outbox.stats():
        if status.value in ("PENDING", "FAILED"):
            waiting[name] = waiting.get(name, 0) + count
    return [
        Symptom(
            "destination_broken",
            each.integration_type,
            waiting.get(each.integration_type, 0),
            f"deliveries failed one after the other, and the breaker is open; "
            f"{counted(waiting.get(each.integration_type, 0), 'row waits', 'rows wait')}",
            "check its newest errors; deliveries are tried again automatically",
            command_line("outbox destinations list"),
        )
        for each in (await ledger.destinations.troubled()).values()
        if each.state == "broken"
    ]


async def _stores(ledger: Ledger) -> tuple[StoreRow, ...]:
    there = await ledger.parts()
    found = [await _outbox(ledger)]
    if "runs" in there:
        found.append(await _runs(ledger))
    if "messages" in there:
        found.append(await _messages(ledger))
    return tuple(found)


async def _outbox(ledger: Ledger) -> StoreRow:
    from bullpen.ops.status import outbox_status

    counts: dict[WorkStatus, int] = {}
    oldest: list[int] = []
    for _, status, count, due in await ledger.outbox.stats():
        word = outbox_status(status.value)
        counts[word] = counts.get(word, 0) + count
        if word in (WorkStatus.WAITING, WorkStatus.RETRYING):
            oldest.append(int(due.timestamp() * 1000))
    held = any(each.state == "broken" for each in (await ledger.destinations.troubled()).values())
    return _row("outbox", counts, min(oldest, default=None), WorkStatus.BLOCKED if held else WorkStatus.DONE)


async def _runs(ledger: Ledger) -> StoreRow:
    from bullpen.ops.status import run_status

    counts: dict[WorkStatus, int] = {}
    for status, count in (await ledger.runs.counts()).items():
        counts[run_status(status.value)] = counts.get(run_status(status.value), 0) + count
    return _row("runs", counts, None)


async def _messages(ledger: Ledger) -> StoreRow:
    from bullpen.ledger.messages import SqlMessages
    from bullpen.ops.status import message_status

    counts: dict[WorkStatus, int] = {}
    for each in await SqlMessages(ledger.database).counts():
        word = message_status(each.status.value)
        counts[word] = counts.get(word, 0) + each.count
    return _row("messages", counts, None)


def _row(
    store: str, counts: dict[WorkStatus, int], oldest_ms: int | None, else_: WorkStatus = WorkStatus.DONE
) -> StoreRow:
    dead, unknown = counts.get(WorkStatus.DEAD, 0), counts.get(WorkStatus.UNKNOWN, 0)
    return StoreRow(
        store=store,
        waiting=counts.get(WorkStatus.WAITING, 0),
        active=counts.get(WorkStatus.ACTIVE, 0),
        retrying=counts.get(WorkStatus.RETRYING, 0),
        dead=dead,
        unknown=unknown,
        oldest_since_ms=oldest_ms,
        word=(WorkStatus.UNKNOWN if unknown else WorkStatus.DEAD if dead else else_).value,
    )
