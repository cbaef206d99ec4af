"""Queues as people see them: all of them with a verdict, and one with its lists.

In: a snapshot of all queues, limits, a queue. Out: views. Nothing is asked that costs more when more jobs are stored.
Elsewhere: jobs (`jobs`), the snapshot (`bullpen.ops.hub`), what makes a verdict bad (`bullpen.ops.symptoms`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from bullpen.ops.alert_options import SymptomLimits
from bullpen.ops.overview import QueueSnapshot, Snapshot
from bullpen.ops.pauses import PauseNote
from bullpen.ops.recent import WaitSample
from bullpen.ops.status import WorkStatus, counted, duration_text
from bullpen.ops.symptoms import DEAD_SUFFIX, Symptom, symptoms_of_snapshot

__all__ = [
    "OverallVerdict",
    "OverviewView",
    "QueueGroup",
    "QueueRow",
    "Recently",
    "StoreRow",
    "VerdictFinding",
    "group_rows",
    "overview_view",
    "queue_row",
    "snapshot_symptoms",
    "sort_rows",
    "verdict_of",
]

OPERATIONS: Final = "bullpen-operations"
"""The queue of bulk actions, which has a page of its own."""
_MOST_FINDINGS: Final = 20
_SILENT_S: Final = 30
"""A worker that waits for jobs asks at least so often."""
_TROUBLE: Final = 3
_OF_QUEUES: Final = ("dead_letters", "queue_late", "no_worker", "silent_workers")
_FAILED: Final = ("dead_letters", "outbox_dead", "parked_events")
"""Stuck work comes before failed work."""


class VerdictFinding(msgspec.Struct, rename="camel", frozen=True):
    """One reason why not all is well."""

    rule: str
    subject: str
    text: str
    fix: str
    """What to do, in words."""
    command: str = ""
    queue: str = ""
    """The queue that it is about, if it is about one."""


class OverallVerdict(msgspec.Struct, rename="camel", frozen=True):
    """One sentence about everything."""

    level: str
    """`well`, `attention`, `broken` or `unknown`."""
    text: str
    findings: tuple[VerdictFinding, ...] = ()
    more: int = 0
    """Findings that are not listed."""


class QueueRow(msgspec.Struct, rename="camel", frozen=True):
    """One queue of a list."""

    queue: str
    ready: int
    waiting: int
    prioritized: int
    active: int
    delayed: int
    blocked: int
    completed: int
    failed: int
    dead_letters: int
    paused: bool
    oldest_ms: int | None
    oldest_since_ms: int | None
    """Since when the next job could run."""
    workers: int | None
    added_per_second: float | None
    done_per_second: float | None
    wait_p95_ms: int | None
    waits_sampled: int
    """How many jobs that was estimated from."""
    done_per_minute: tuple[float, ...]
    """Of the last 60 minutes, the oldest first."""
    word: str
    """Its common status."""
    mark: str
    """The problem in two words: `no worker`."""
    trouble: str
    """What is wrong, in words; empty: nothing."""
    severity: int
    """How bad that is: 0 nothing, 1 worth a check, 2 dead letters, 3 jobs do not move, 4 unreadable."""
    pause: PauseNote | None = None
    problem: str | None = None


class StoreRow(msgspec.Struct, rename="camel", frozen=True):
    """What else an app has: the outbox, runs, messages."""

    store: str
    waiting: int
    active: int
    retrying: int
    dead: int
    unknown: int
    oldest_since_ms: int | None
    word: str


class QueueGroup(msgspec.Struct, rename="camel", frozen=True):
    """Queues whose names begin alike, added up."""

    prefix: str
    queues: int
    ready: int
    active: int
    delayed: int
    blocked: int
    failed: int
    dead_letters: int
    paused: int
    severity: int


class OverviewView(msgspec.Struct, rename="camel", frozen=True):
    """All queues at one moment."""

    at_ms: int
    verdict: OverallVerdict
    queues: tuple[QueueRow, ...]
    total: int
    """How many queues there are; the list may be shorter."""
    stores: tuple[StoreRow, ...] = ()
    groups: tuple[QueueGroup, ...] = ()
    """Only when they were asked for."""
    is_complete: bool = True
    """False: the search for queues has not ended yet."""


@dataclass(frozen=True, slots=True)
class Recently:
    """What is known of a queue beside its newest snapshot."""

    wait: WaitSample | None = None
    done_per_minute: tuple[float, ...] = ()
    pause: PauseNote | None = None


def queue_row(look: QueueSnapshot, limits: SymptomLimits, at_ms: int, recently: Recently | None = None) -> QueueRow:
    """One queue of a snapshot."""
    recently = recently or Recently()
    signs = [sign for sign in snapshot_symptoms(look, limits) if sign.rule != "dead_letters"]
    mark, severity = _mark(look, signs)
    return QueueRow(
        queue=look.queue,
        ready=look.ready,
        waiting=look.waiting,
        prioritized=look.prioritized,
        active=look.active,
        delayed=look.delayed,
        blocked=look.waiting_children,
        completed=look.completed,
        failed=look.failed,
        dead_letters=look.dead_letters,
        paused=look.paused,
        oldest_ms=look.oldest_ms,
        oldest_since_ms=None if look.oldest_ms is None else at_ms - look.oldest_ms,
        workers=look.workers,
        added_per_second=look.added_per_s,
        done_per_second=look.done_per_s,
        wait_p95_ms=None if recently.wait is None else recently.wait.p95_ms,
        waits_sampled=0 if recently.wait is None else recently.wait.jobs,
        done_per_minute=recently.done_per_minute,
        word=_word(look, severity).value,
        mark=mark,
        trouble=look.problem or "; ".join(sign.message for sign in signs),
        severity=severity,
        pause=recently.pause,
        problem=look.problem,
    )


def snapshot_symptoms(look: QueueSnapshot, limits: SymptomLimits) -> list[Symptom]:
    """The symptoms of alerts, and those that only a snapshot shows."""
    found = list(symptoms_of_snapshot(look, limits))
    silent_s = look.worker_idle_s or 0
    if look.ready and look.workers and silent_s > _SILENT_S and not look.active and not look.paused:
        workers = counted(look.workers, "worker is", "workers are")
        text = f"{workers} connected, and none has polled for a job for {duration_text(silent_s * 1000)}"
        found.append(Symptom("silent_workers", look.queue, silent_s, text, "check the log of the worker"))
    return found


def _mark(look: QueueSnapshot, signs: Sequence[Symptom]) -> tuple[str, int]:
    rules = {sign.rule for sign in signs}
    for rule, mark in (("no_worker", "no worker"), ("silent_workers", "workers silent"), ("queue_late", "late")):
        if rule in rules:
            return "paused" if look.paused else mark, 3
    if look.problem:
        return "unreadable", 4
    has_no_worker = bool(look.ready) and look.workers == 0 and not look.paused
    mark = "no worker" if has_no_worker else ""
    return mark, 2 if look.dead_letters else 1 if has_no_worker or (look.paused and look.ready) else 0


def _word(look: QueueSnapshot, severity: int) -> WorkStatus:
    if look.paused:
        return WorkStatus.PAUSED
    if severity >= _TROUBLE:
        return WorkStatus.RETRYING
    if look.active:
        return WorkStatus.ACTIVE
    return WorkStatus.WAITING if look.ready else WorkStatus.DONE


def overview_view(
    picture: Snapshot,
    limits: SymptomLimits,
    *,
    recently: Callable[[QueueSnapshot], Recently] = lambda _look: Recently(),
    signs: Iterable[Symptom] = (),
    unread: Iterable[str] = (),
    stores: Iterable[StoreRow] = (),
    name: str = "",
    order: str = "trouble",
    group: str = "",
    most: int = 100,
    is_complete: bool = True,
) -> OverviewView:
    """All queues with a verdict. `signs` are those of other sources, `unread` sources that could not be read; `group`
    is what ends the common part of names."""
    shown = [look for look in picture.looks if look.queue != OPERATIONS]
    fitting = [look for look in shown if name.lower() in look.queue.lower()]
    rows = [queue_row(look, limits, picture.at_ms, recently(look)) for look in fitting]
    found = [sign for look in shown for sign in snapshot_symptoms(look, limits)]
    problems = [f"queue {look.queue} could not be read: {look.problem}" for look in shown if look.problem]
    groups, alone = group_rows(rows, group) if group else ([], rows)
    return OverviewView(
        at_ms=picture.at_ms,
        verdict=verdict_of([*found, *signs], [*problems, *unread]),
        queues=tuple(sort_rows(alone, order)[:most]),
        total=len(rows),
        stores=tuple(stores),
        groups=tuple(groups[:most]),
        is_complete=is_complete,
    )


def group_rows(rows: Sequence[QueueRow], delimiter: str) -> tuple[list[QueueGroup], list[QueueRow]]:
    """Queues with the same text before the delimiter, added up; and all other queues."""
    groups: dict[str, list[QueueRow]] = {}
    for row in rows:
        head, found, _ = row.queue.partition(delimiter)
        groups.setdefault(f"{head}{found}" if found and head else row.queue, []).append(row)
    together = [
        QueueGroup(
            prefix=prefix,
            queues=len(members),
            ready=sum(each.ready for each in members),
            active=sum(each.active for each in members),
            delayed=sum(each.delayed for each in members),
            blocked=sum(each.blocked for each in members),
            failed=sum(each.failed for each in members),
            dead_letters=sum(each.dead_letters for each in members),
            paused=sum(each.paused for each in members),
            severity=max(each.severity for each in members),
        )
        for prefix, members in groups.items()
        if len(members) > 1
    ]
    alone = [members[0] for members in groups.values() if len(members) == 1]
    return sorted(together, key=lambda each: (-each.severity, -each.ready, each.prefix)), alone


def verdict_of(signs: Iterable[Symptom], unread: Iterable[str] = ()) -> OverallVerdict:
    """One sentence: broken when the server is unreachable, unknown when something could not be read."""
    signs, unread = list(signs), list(unread)
    findings = [
        VerdictFinding(
            sign.rule, sign.subject, f"{_named(sign)}: {sign.message}", sign.fix, sign.command, _queue_of(sign)
        )
        for sign in signs
    ]
    findings += [VerdictFinding("unread", text, text, "ask the doctor", "bullpen doctor") for text in unread]
    if any(sign.rule == "redis_down" for sign in signs):
        level, text = "broken", "Broken"
    elif findings and signs:
        findings.sort(key=lambda each: each.rule in _FAILED)
        level, text = "attention", "Needs attention"
    elif unread:
        level, text = "unknown", "Cannot tell"
    else:
        level, text = "well", "All well"
    if findings:
        text += f": {counted(len(findings), 'finding')}"
    return OverallVerdict(level, text, tuple(findings[:_MOST_FINDINGS]), max(0, len(findings) - _MOST_FINDINGS))


def sort_rows(rows: list[QueueRow], order: str) -> list[QueueRow]:
    """The largest first; by name from A to Z; by trouble, which is the default, the worst first."""
    columns = {
        "ready": lambda row: -row.ready,
        "active": lambda row: -row.active,
        "delayed": lambda row: -row.delayed,
        "failed": lambda row: -row.failed,
        "dead": lambda row: -row.dead_letters,
        "oldest": lambda row: -(row.oldest_ms or 0),
        "workers": lambda row: -(row.workers or 0),
        "in": lambda row: -(row.added_per_second or 0),
        "out": lambda row: -(row.done_per_second or 0),
        "wait": lambda row: -(row.wait_p95_ms or 0),
        "name": lambda _row: 0,
    }
    # Of two that are as bad as each other the one with more work comes first: one late job is less than a thousand.
    key = columns.get(order, lambda row: (-row.severity, -(row.ready + row.dead_letters), -(row.oldest_ms or 0)))
    return sorted(sorted(rows, key=lambda row: row.queue), key=key)


def _named(sign: Symptom) -> str:
    return f"queue {_queue_of(sign)}" if _queue_of(sign) else sign.subject


def _queue_of(sign: Symptom) -> str:
    return sign.subject.removesuffix(DEAD_SUFFIX) if sign.rule in _OF_QUEUES else ""
