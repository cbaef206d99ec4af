"""Symptoms of stuck work: the rules that alerts, the doctor and `deploy/alerts.yml` share.

In: the server of the queues and the ledger, and limits. Out: signs, each with what is so and what to do. Reads only, in
small steps. A source that cannot be read gives no signs and says so: not knowing is not the same as all being well.
Elsewhere: who is alerted and when (`incidents`, `alerts`), advice about a server itself (`doctor`).
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final, Literal

from bullpen._kernel.command_line import command_line
from bullpen.errors import BullpenError
from bullpen.ops.alert_options import SymptomLimits
from bullpen.ops.facts import QueueFacts
from bullpen.ops.overview import QueueSnapshot
from bullpen.ops.status import counted, duration_text
from bullpen.ports.dead_letters import DeadLetterStore
from bullpen.queue import Queue
from bullpen.queue.browse import find_queues
from bullpen.redis import Connection

if TYPE_CHECKING:  # needs an extra, and who asks about a ledger has it
    from bullpen.ledger import Ledger

__all__ = [
    "ANNOUNCEMENTS",
    "DEAD_SUFFIX",
    "RULES",
    "SWITCHED_OFF_MS",
    "QueueNames",
    "Symptom",
    "SymptomRule",
    "dead_letter_symptoms",
    "is_away",
    "ledger_symptoms",
    "queue_symptoms",
    "signs_of_queue",
    "symptoms_of_snapshot",
]

DEAD_SUFFIX: Final = "-dlq"
ANNOUNCEMENTS: Final = frozenset({"outbox.dead", "{outbox}.dead"})
"""The default queue for announcements of dead rows. No reader is needed: the rows have a symptom of their
own. A queue with another name was chosen for a reader."""
SWITCHED_OFF_MS: Final = 86_400_000
"""How long an endpoint that was switched off is a symptom."""
_MS: Final = timedelta(milliseconds=1)
_MOST: Final = 100
_LONGEST_SUBJECT: Final = 200
_MOST_NAMED: Final = 3
_LONGEST_UNLISTED_S: Final = 300.0

_RUN: Final = "bullpen run MODULE:APP"
_RUN_OUTBOX: Final = f"{_RUN}, where the module calls `app.use_outbox()`: otherwise no dispatcher runs"

_DESTINATIONS: Final = command_line("outbox destinations list")
_LATE_BECAUSE: Final = {
    "broken": (
        "the breaker is open, because deliveries failed one after the other",
        f"repair the target or the connection to it; {_DESTINATIONS} shows when it is tried again",
        _DESTINATIONS,
    ),
    "probing": ("no delivery was tried since the breaker's pause ended", _RUN_OUTBOX, _RUN),
}
"""Why the rows of a destination that is not in order are late: what is so, what to do, and the command in it."""

Source = Literal["redis", "queues", "ledger"]


@dataclass(frozen=True, slots=True)
class SymptomRule:
    """One thing that can go wrong, and what the three places call it."""

    name: str
    """In alerts and incidents."""
    check: str
    """In `bullpen doctor`."""
    prometheus: str
    """In `deploy/alerts.yml`."""
    source: Source
    """What must be readable to say that it is not so any more."""


RULES: Final = {
    rule.name: rule
    for rule in (
        SymptomRule("redis_down", "server", "BullpenRedisDown", "redis"),
        SymptomRule("dead_letters", "dead letters", "BullpenDeadLetters", "queues"),
        SymptomRule("queue_late", "late", "BullpenQueueIsLate", "queues"),
        SymptomRule("no_worker", "workers", "BullpenNoWorker", "queues"),
        SymptomRule("outbox_dead", "dead rows", "BullpenOutboxDead", "ledger"),
        SymptomRule("parked_events", "parked events", "BullpenParkedEvents", "ledger"),
        SymptomRule("outbox_late", "dispatcher", "BullpenOutboxIsLate", "ledger"),
        SymptomRule("outbox_claimed", "claimed rows", "BullpenOutboxClaimedTooLong", "ledger"),
        SymptomRule("endpoints_off", "endpoints", "BullpenEndpointsOff", "ledger"),
        SymptomRule("scheduler_late", "scheduler", "BullpenSchedulerIsLate", "ledger"),
        SymptomRule("run_stuck", "stuck runs", "BullpenRunIsStuck", "ledger"),
    )
}


@dataclass(frozen=True, slots=True)
class Symptom:
    """Something that is so now."""

    rule: str
    subject: str
    """Which queue, integration type, …"""
    value: int
    message: str
    fix: str
    """What to do, in words."""
    command: str = ""
    """The command in it, if it names one."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "subject", self.subject[:_LONGEST_SUBJECT])


# Queues -------------------------------------------------------------------------------------------------------------


class QueueNames:
    """The queues of a server, listed anew as often as that may cost a hundredth of the time, and every five minutes.

    Listing walks over all keys: nothing on a small server, a second and more beside a million jobs. The dead letters of
    a queue that is known are known too, so only a new queue is seen later.
    """

    def __init__(self, find: Callable[[], Awaitable[list[str]]], now_s: Callable[[], float] = time.monotonic) -> None:
        self._find, self._now_s = find, now_s
        self._names: list[str] = []
        self._again_at = float("-inf")

    async def __call__(self) -> list[str]:
        began = self._now_s()
        if began >= self._again_at:
            self._names = await self._find()
            ended = self._now_s()
            self._again_at = ended + min(_LONGEST_UNLISTED_S, (ended - began) * 100)
        letters = [f"{name}{DEAD_SUFFIX}" for name in self._names if not name.endswith(DEAD_SUFFIX)]
        return sorted({*self._names, *letters})


async def queue_symptoms(
    connection: Connection,
    prefix: str,
    limits: SymptomLimits,
    stores: Iterable[DeadLetterStore] = (),
    names: Callable[[], Awaitable[list[str]]] | None = None,
) -> list[Symptom]:
    """Signs of all queues, and of further stores of dead letters that can be counted without reading them whole."""
    found: list[Symptom] = []
    for name in await (find_queues(connection, prefix) if names is None else names()):
        async with Queue(name, connection=connection, prefix=prefix) as queue:
            found += [sign async for sign in signs_of_queue(queue, limits)]
    return found + await dead_letter_symptoms(stores, limits)


async def dead_letter_symptoms(stores: Iterable[DeadLetterStore], limits: SymptomLimits) -> list[Symptom]:
    """Signs of stores of dead letters that are no queues of the server."""
    return [
        _dead_letters(store.name, store.name, depth)
        for store in stores
        if limits.dead_letters and (depth := await store.depth()) >= limits.dead_letters
    ]


async def signs_of_queue(queue: Queue | QueueFacts, limits: SymptomLimits) -> AsyncIterator[Symptom]:
    """Signs of one queue, or of one dead-letter queue."""
    counts = await queue.counts()
    if queue.name.endswith(DEAD_SUFFIX):
        if limits.dead_letters and counts.waiting >= limits.dead_letters:
            yield _dead_letters(queue.name, queue.name.removesuffix(DEAD_SUFFIX), counts.waiting)
        return
    to_do = counts.waiting + counts.prioritized
    if queue.name in ANNOUNCEMENTS and await queue.workers() == []:
        return
    age_ms = (await queue.oldest_age_ms() or 0) if to_do else 0
    if limits.no_worker_ms and to_do and age_ms >= limits.no_worker_ms and await queue.workers() == []:
        yield _no_worker(queue.name, to_do, age_ms)
    elif limits.queue_late_ms and age_ms >= limits.queue_late_ms:
        yield _late(queue.name, to_do, age_ms, is_paused=await queue.is_paused())


def symptoms_of_snapshot(look: QueueSnapshot, limits: SymptomLimits) -> Iterator[Symptom]:
    """The same for a queue of a snapshot, and of its dead letters, without asking anybody. Somebody wants
    a paused queue so; but one whose jobs wait for as long as a missing worker is let pass may be forgotten."""
    if limits.dead_letters and look.dead_letters >= limits.dead_letters:
        yield _dead_letters(f"{look.queue}{DEAD_SUFFIX}", look.queue, look.dead_letters)
    if look.queue in ANNOUNCEMENTS and look.workers == 0:
        return
    age_ms = (look.oldest_ms or 0) if look.ready else 0
    if look.paused:
        patience_ms = limits.no_worker_ms or limits.queue_late_ms
        if patience_ms and age_ms >= patience_ms:
            yield _late(look.queue, look.ready, age_ms, is_paused=True)
        return
    if limits.no_worker_ms and look.ready and age_ms >= limits.no_worker_ms and look.workers == 0:
        yield _no_worker(look.queue, look.ready, age_ms)
    elif limits.queue_late_ms and age_ms >= limits.queue_late_ms:
        yield _late(look.queue, look.ready, age_ms, is_paused=False)


def _no_worker(queue: str, to_do: int, age_ms: int) -> Symptom:
    # Late too, of course, but for this reason: one cause, one sign.
    text = f"{counted(to_do, 'job')} and no worker; the next has waited {duration_text(age_ms)}"
    return Symptom("no_worker", queue, age_ms, text, f"start a worker: {_RUN}", _RUN)


def _late(queue: str, to_do: int, age_ms: int, *, is_paused: bool) -> Symptom:
    text = f"the next of {counted(to_do, 'job')} has waited {duration_text(age_ms)}" + (
        "; the queue is paused" if is_paused else ""
    )
    line = command_line("queues resume", queue) if is_paused else ""
    return Symptom("queue_late", queue, age_ms, text, line or "more workers, or more concurrency", line)


def _dead_letters(store: str, named: str, depth: int) -> Symptom:
    line = command_line("dead-letters list", named)
    text = f"{counted(depth, 'dead letter needs', 'dead letters need')} attention"
    return Symptom("dead_letters", store, depth, text, line, line)


# Ledger -------------------------------------------------------------------------------------------------------------


async def ledger_symptoms(ledger: Ledger, limits: SymptomLimits) -> list[Symptom]:
    """Signs of the parts that the ledger has, by the database's clock."""
    there = await ledger.parts()
    looks: dict[str, Callable[[Ledger, SymptomLimits], AsyncIterator[Symptom]]] = {
        "outbox": _outbox_signs,
        "projector": _projector_signs,
        "messages": _message_signs,
        "runs": _run_signs,
    }
    return [
        sign for part, look in looks.items() if part in there for sign in [each async for each in look(ledger, limits)]
    ]


async def _outbox_signs(ledger: Ledger, limits: SymptomLimits) -> AsyncIterator[Symptom]:
    from bullpen.ledger import OutboxStatus
    from bullpen.ledger.endpoint_records import type_label

    now = await _now(ledger)
    # What a customer's endpoint did not take is no fault of the service's: that has a symptom of its own.
    stats = await ledger.outbox.stats()
    dead = sum(count for name, status, count, _ in stats if status is OutboxStatus.DEAD and type_label(name) == name)
    if limits.dead_letters and dead >= limits.dead_letters:
        line = command_line("outbox list", status="DEAD")
        text = f"{counted(dead, 'delivery', 'deliveries')} failed finally"
        yield Symptom("outbox_dead", "outbox", dead, text, line, line)
    if limits.outbox_late_ms:
        troubled = {name: each.state for name, each in (await ledger.destinations.troubled()).items()}
        waiting: dict[str, tuple[int, int, str]] = {}
        for name, status, count, due in stats:
            state, label = troubled.get(name, "in order"), type_label(name)
            is_ours = state != "disabled" and (label == name or state == "in order")
            if status in (OutboxStatus.PENDING, OutboxStatus.FAILED) and is_ours:
                others, longest, _ = waiting.get(label, (0, 0, state))
                if (late_ms := (now - due) // _MS) >= limits.outbox_late_ms:
                    waiting[label] = others + count, max(longest, late_ms), state
        for label, (count, late_ms, state) in waiting.items():
            rows = counted(count, "row waits", "rows wait")
            why, fix, command = _LATE_BECAUSE.get(state, ("no dispatcher has claimed it", _RUN_OUTBOX, _RUN))
            text = f"{rows}, the oldest was due {duration_text(late_ms)} ago, and {why}"
            yield Symptom("outbox_late", label, late_ms, text, fix, command)
    if limits.endpoints_off:
        off = await ledger.endpoints.switched_off(within_ms=SWITCHED_OFF_MS)
        if len(off) >= limits.endpoints_off:
            some = "; ".join(f"{each.id} of {each.tenant_id}: {each.reason}" for each in off[:_MOST_NAMED])
            more = f"; and {len(off) - _MOST_NAMED} more" if len(off) > _MOST_NAMED else ""
            text = f"{counted(len(off), 'endpoint was', 'endpoints were')} switched off within a day ({some}{more})"
            line = command_line("endpoints list", state="disabled")
            yield Symptom("endpoints_off", "endpoints", len(off), text, f"tell their owners; {line}", line)
    if limits.outbox_claimed_ms:
        limit_at = now - limits.outbox_claimed_ms * _MS
        lost = [row for row in await ledger.outbox.expired(_MOST) if row.locked_until and row.locked_until <= limit_at]
        if lost:
            some = f"{len(lost)}{' or more' if len(lost) == _MOST else ''}"
            rows = "row is" if len(lost) == 1 else "rows are"
            text = f"{some} {rows} claimed, the lease ran out, and no dispatcher takes them back ({lost[0].id})"
            yield Symptom("outbox_claimed", "outbox", len(lost), text, _RUN_OUTBOX, _RUN)


async def _projector_signs(ledger: Ledger, limits: SymptomLimits) -> AsyncIterator[Symptom]:
    parked = await ledger.parked.count()
    if limits.dead_letters and parked >= limits.dead_letters:
        events = counted(parked, "event is", "events are")
        text = f"{events} parked; no message was made from {'it' if parked == 1 else 'them'}"
        line = command_line("projectors parked list")
        yield Symptom("parked_events", "projector", parked, text, line, line)


async def _message_signs(ledger: Ledger, limits: SymptomLimits) -> AsyncIterator[Symptom]:
    from bullpen.ledger.messages import SqlMessages

    late_ms, _ = await SqlMessages(ledger.database).lags_ms()
    if limits.scheduler_late_ms and late_ms >= limits.scheduler_late_ms:
        text = f"the oldest message that is due has waited {duration_text(late_ms)} to be queued"
        fix = f"start an app with messages: {_RUN}; bullpen messages check shows more"
        yield Symptom("scheduler_late", "messages", late_ms, text, fix, _RUN)


async def _run_signs(ledger: Ledger, limits: SymptomLimits) -> AsyncIterator[Symptom]:
    if not limits.run_stuck_ms:
        return
    idle = await ledger.runs.idle(longer_than_ms=limits.run_stuck_ms, limit=_MOST)
    if idle:
        some = f"{len(idle)}{' or more' if len(idle) == _MOST else ''}"
        runs = "run has" if len(idle) == 1 else "runs have"
        text = f"{some} {runs} not ended, without progress for {duration_text(limits.run_stuck_ms)} ({idle[0].id})"
        yield Symptom("run_stuck", "runs", len(idle), text, f"bullpen runs show ID; runs need a worker: {_RUN}", _RUN)


async def _now(ledger: Ledger) -> datetime:
    from bullpen.ledger.messages import SqlMessages

    return await SqlMessages(ledger.database).now()


async def is_away(connection: Connection) -> Symptom | None:
    """The sign that the server of the queues does not answer."""
    try:
        if await connection.is_healthy():
            return None
    except BullpenError:
        pass
    address = str(connection.address)
    fix = "start the server, or check the connection to it; bullpen doctor shows more"
    return Symptom("redis_down", address, 1, f"{address} does not answer", fix, "bullpen doctor")
