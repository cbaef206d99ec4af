"""Queues as people see them: all of them with a verdict, and one with its lists.

In: a snapshot of all queues, limits, a queue. Out: views. Nothing is asked that costs more when more jobs are stored.
Elsewhere: jobs (`jobs`), the snapshot (`bullpen.ops.hub`), what makes a verdict bad (`bullpen.ops.signs`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from bullpen.ops.alert_options import SymptomLimits
from bullpen.ops.overview import Picture, QueueLook
from bullpen.ops.signs import DEAD_SUFFIX, Sign, signs_of_look
from bullpen.ops.words import Word

__all__ = [
    "OverviewView",
    "QueueRow",
    "Verdict",
    "VerdictFinding",
    "overview_view",
    "queue_row",
    "sort_rows",
    "verdict_of",
]

OPERATIONS: Final = "bullpen-operations"
"""The queue of bulk actions, which has a page of its own."""
_MOST_FINDINGS: Final = 20


class VerdictFinding(msgspec.Struct, rename="camel", frozen=True):
    """One reason why not all is well."""

    rule: str
    subject: str
    text: str
    fix: str
    queue: str = ""
    """The queue that it is about, if it is about one."""


class Verdict(msgspec.Struct, rename="camel", frozen=True):
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
    workers: int | None
    added_per_second: float | None
    done_per_second: float | None
    word: str
    """How it is, in a common word."""
    trouble: str
    """What is wrong, in words; empty: nothing."""
    problem: str | None = None


class OverviewView(msgspec.Struct, rename="camel", frozen=True):
    """All queues at one moment."""

    at_ms: int
    verdict: Verdict
    queues: tuple[QueueRow, ...]
    total: int
    """How many queues there are; the list may be shorter."""
    is_complete: bool
    """False: the search for queues has not ended yet."""


def queue_row(look: QueueLook, limits: SymptomLimits) -> QueueRow:
    """One queue of a snapshot."""
    signs = [sign for sign in signs_of_look(look, limits) if sign.rule != "dead_letters"]
    trouble = look.problem or "; ".join(sign.message for sign in signs)
    if not trouble and look.ready and look.workers == 0 and not look.paused:
        trouble = "no worker is connected"
    if look.paused:
        word = Word.PAUSED
    elif trouble:
        word = Word.RETRYING
    elif look.active:
        word = Word.ACTIVE
    else:
        word = Word.WAITING if look.ready else Word.DONE
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
        workers=look.workers,
        added_per_second=look.added_per_s,
        done_per_second=look.done_per_s,
        word=word.value,
        trouble=trouble,
        problem=look.problem,
    )


def overview_view(
    picture: Picture,
    limits: SymptomLimits,
    *,
    signs: Iterable[Sign] = (),
    unread: Iterable[str] = (),
    name: str = "",
    order: str = "trouble",
    most: int = 100,
    is_complete: bool = True,
) -> OverviewView:
    """All queues with a verdict. `signs` are those of other sources, `unread` sources that could not be read."""
    shown = [look for look in picture.looks if look.queue != OPERATIONS]
    rows = [queue_row(look, limits) for look in shown if name.lower() in look.queue.lower()]
    found = [sign for look in shown for sign in signs_of_look(look, limits)]
    problems = [f"queue {look.queue} could not be read: {look.problem}" for look in shown if look.problem]
    return OverviewView(
        at_ms=picture.at_ms,
        verdict=verdict_of([*found, *signs], [*problems, *unread]),
        queues=tuple(sort_rows(rows, order)[:most]),
        total=len(rows),
        is_complete=is_complete,
    )


def verdict_of(signs: Iterable[Sign], unread: Iterable[str] = ()) -> Verdict:
    """One sentence: broken when the server is away, unknown when something could not be read."""
    signs, unread = list(signs), list(unread)
    findings = [
        VerdictFinding(sign.rule, sign.subject, f"{_named(sign)}: {sign.message}", sign.fix, _queue_of(sign))
        for sign in signs
    ]
    findings += [VerdictFinding("unread", text, text, "bullpen doctor") for text in unread]
    if any(sign.rule == "redis_down" for sign in signs):
        level, text = "broken", "Broken"
    elif signs:
        level, text = "attention", "Needs attention"
    elif unread:
        level, text = "unknown", "Cannot tell"
    else:
        level, text = "well", "All well"
    if findings:
        text += f": {len(findings)} {'finding' if len(findings) == 1 else 'findings'}"
    return Verdict(level, text, tuple(findings[:_MOST_FINDINGS]), max(0, len(findings) - _MOST_FINDINGS))


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
        "name": lambda _row: 0,
    }
    key = columns.get(order, lambda row: (not row.trouble, not row.dead_letters, -(row.oldest_ms or 0), -row.ready))
    return sorted(sorted(rows, key=lambda row: row.queue), key=key)


def _named(sign: Sign) -> str:
    return f"queue {_queue_of(sign)}" if _queue_of(sign) else sign.subject


def _queue_of(sign: Sign) -> str:
    return sign.subject.removesuffix(DEAD_SUFFIX) if sign.rule in ("dead_letters", "queue_late", "no_worker") else ""
