"""What `bullpen top` draws: lines of text that fit a window.

In: what is known, and the size of the window. Out: lines. No input or output, so every size can be tried in a test.
Columns go in the order of their worth when the window is narrow; rows that do not fit are counted.
Elsewhere: where the numbers come from (`bullpen.ops.overview`), the screen and the keys (`command`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from rich.text import Text

from bullpen._kernel.printable import printable
from bullpen.cli import common
from bullpen.ops.overview import QueueLook

_GAP: Final = 2
_NARROWEST_NAME: Final = 12
"""Columns are left out before names of queues are cut below this."""


class Sort(StrEnum):
    """Which queues come first. All but names: the largest first."""

    WAITING = "waiting"
    ACTIVE = "active"
    DELAYED = "delayed"
    FAILED = "failed"
    OLDEST = "oldest"
    RATE = "rate"
    DEAD = "dead"
    NAME = "name"


_WORTH: Final[dict[Sort, Callable[[QueueLook], float]]] = {
    Sort.WAITING: lambda look: look.ready,
    Sort.ACTIVE: lambda look: look.active,
    Sort.DELAYED: lambda look: look.delayed,
    Sort.FAILED: lambda look: look.failed,
    Sort.OLDEST: lambda look: look.oldest_ms or 0,
    Sort.RATE: lambda look: (look.added_per_s or 0) + (look.done_per_s or 0),
    Sort.DEAD: lambda look: look.dead_letters,
}


@dataclass(slots=True)
class View:
    """All that is known when a screen is drawn."""

    where: str
    interval_s: float
    sort: Sort = Sort.WAITING
    limit: int | None = None
    looks: Sequence[QueueLook] = field(default=())
    at_ms: int = 0
    is_searching: bool = True
    problem: str | None = None
    away_s: float = 0.0


class _Column(NamedTuple):
    title: str
    worth: int
    """Columns with a higher number are left out first."""
    cell: Callable[[QueueLook], str]


_COLUMNS: Final = (
    _Column("waiting", 1, lambda look: _count(look.ready)),
    _Column("active", 1, lambda look: _count(look.active)),
    _Column("delayed", 3, lambda look: _count(look.delayed)),
    _Column("failed", 2, lambda look: _count(look.failed)),
    _Column("dead", 5, lambda look: _count(look.dead_letters)),
    _Column("added/s", 4, lambda look: _rate(look.added_per_s)),
    _Column("done/s", 4, lambda look: _rate(look.done_per_s)),
    _Column("oldest", 6, lambda look: _age(look.oldest_ms)),
    _Column("workers", 7, lambda look: "?" if look.workers is None else _count(look.workers)),
    _Column("completed", 8, lambda look: _count(look.completed)),
    _Column("", 3, lambda look: "unread" if look.problem else "paused" if look.paused else ""),
)


def ordered(looks: Sequence[QueueLook], sort: Sort, limit: int | None) -> list[QueueLook]:
    """The queues that are shown, the most worth seeing first."""
    by_name = sorted(looks, key=lambda look: look.queue)
    if sort is not Sort.NAME:
        by_name.sort(key=_WORTH[sort], reverse=True)  # stable: equals stay in the order of their names
    return by_name if limit is None else by_name[:limit]


def screen(view: View, width: int, height: int) -> list[Text]:
    """A whole screen, never larger than the window."""
    foot = [Text(f"q quits, s sorts by another column (now {view.sort})", style="dim")]
    head = heading(view)
    room = height - len(head) - len(foot) - 1
    body = table(view, width, max(1, room))
    lines = [*head, *body, *foot]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines[: max(1, height)]


def heading(view: View) -> list[Text]:
    """Where we look, and the sum of all; or what keeps us from looking."""
    clock = common.when(view.at_ms)[11:19]
    first = Text(f"{view.where}  {f'{clock} UTC' if clock else ''}  every {view.interval_s:g} s", style="bold")
    if view.problem is not None:
        since = f"the numbers are {view.away_s:.0f} s old" if view.at_ms else "no numbers yet"
        return [first, Text(f"server away, trying again; {since}: {view.problem}", style="bold red")]
    if view.is_searching and not view.looks:
        return [first, Text("looking for queues")]
    looks = view.looks
    parts = [
        f"{len(looks)} queue{'' if len(looks) == 1 else 's'}",
        *(
            f"{_count(sum(map(get, looks)))} {title}"
            for title, get in (
                ("waiting", lambda look: look.ready),
                ("active", lambda look: look.active),
                ("delayed", lambda look: look.delayed),
                ("failed", lambda look: look.failed),
            )
        ),
    ]
    if any(look.done_per_s is not None for look in looks):
        parts.append(f"{_rate(sum(look.added_per_s or 0 for look in looks))} added/s")
        parts.append(f"{_rate(sum(look.done_per_s or 0 for look in looks))} done/s")
    return [first, Text(", ".join(parts))]


def table(view: View, width: int, height: int) -> list[Text]:
    """The queues, one in a line, with a heading; at most `height` lines of queues."""
    shown = ordered(view.looks, view.sort, view.limit)
    if not view.looks:
        return []
    has_more = len(shown) < len(view.looks) or len(shown) > height
    fitting = shown[: max(0, height - 1)] if has_more else shown
    columns = [column for column in _COLUMNS if column.title or any(map(column.cell, fitting))]
    name_width = max(len(name) for name in ("queue", *(look.queue for look in fitting)))
    widths = {
        column: max(len(cell) for cell in (column.title, *(column.cell(look) for look in fitting)))
        for column in columns
    }
    while columns and _total(columns, widths) + min(name_width, _NARROWEST_NAME) > width:
        columns.remove(max(columns, key=lambda column: column.worth))
    name_width = max(1, min(name_width, width - _total(columns, widths)))

    def line(name: str, cells: Sequence[str], style: str) -> Text:
        numbers = "".join(f"{'':{_GAP}}{cell:>{widths[column]}}" for column, cell in zip(columns, cells, strict=True))
        return Text(f"{_cut(printable(name), name_width):<{name_width}}{numbers}", style=style)

    lines = [line("queue", [column.title for column in columns], "bold")]
    lines += [line(look.queue, [column.cell(look) for column in columns], _style(view, look)) for look in fitting]
    if has_more:
        lines.append(Text(f"and {len(view.looks) - len(fitting)} more", style="dim"))
    return lines


def _total(columns: Sequence[_Column], widths: dict[_Column, int]) -> int:
    return sum(widths[column] + _GAP for column in columns)


def _style(view: View, look: QueueLook) -> str:
    if view.problem is not None:
        return "dim"
    if look.problem or look.dead_letters or look.failed:
        return "red"
    return "yellow" if look.paused else "green" if look.active else ""


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: max(0, width - 1)]}…"


def _count(number: int) -> str:
    """Exact as long as it is short: a column must not jump."""
    if number < 100_000:
        return str(number)
    return f"{number // 1_000}k" if number < 10_000_000 else f"{number // 1_000_000}M"


def _rate(number: float | None) -> str:
    if number is None:
        return ""
    return f"{number:.1f}" if 0 < number < 10 else f"{number:.0f}"


def _age(milliseconds: int | None) -> str:
    if milliseconds is None:
        return ""
    seconds = milliseconds // 1000
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"
