"""How the demo looks: a live picture on a terminal, lines anywhere else, nothing with --json."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .play import Report

_BARS: Final = " ▁▂▃▄▅▆▇█"
_MARKS: Final = {"works": ("●", "green"), "killed": ("✗", "red"), "ended": ("○", "dim")}
_STORY_LINES: Final = 7
_STATES: Final = ("waiting", "prioritised", "delayed", "active", "completed", "dead letters")


class Display(Protocol):
    """Shows a report again and again until it is cancelled."""

    async def show(self, report: Report) -> None: ...


class Picture:
    """Redrawn in place, about eight times a second."""

    def __init__(self, console: Console) -> None:
        self._console = console

    async def show(self, report: Report) -> None:
        with Live(self._draw(report), console=self._console, auto_refresh=False) as live:
            try:
                while True:
                    await asyncio.sleep(0.12)
                    live.update(self._draw(report), refresh=True)
            finally:
                live.update(self._draw(report), refresh=True)

    def _draw(self, report: Report) -> Panel:
        counts = report.counts
        states = Table.grid(padding=(0, 3))
        for _ in range(6):
            states.add_column(justify="right")
        states.add_row(*(Text(name, style="dim") for name in _STATES))
        states.add_row(
            *(f"{number:,}" for number in (counts.waiting, counts.prioritized, counts.delayed)),
            Text(f"{counts.active:,}", style="yellow"),
            Text(f"{counts.completed:,}", style="bold green"),
            Text(f"{report.dead_letters:,}", style="bold red" if report.dead_letters else ""),
        )
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            ProgressBar(total=report.jobs, completed=report.finished, width=44),
            f"{report.finished:,} of {report.jobs:,} done",
        )
        parts: tuple[RenderableType, ...] = (
            _workers(report.workers),
            Text(),
            states,
            Text(),
            bar,
            _numbers(report),
            Text(),
            *_story(report.story),
        )
        title = f"bullpen demo · queue {report.queue} · {report.seconds:4.1f} s"
        return Panel(Group(*parts), title=title, padding=(1, 2), width=min(100, self._console.width))


class Lines:
    """One line a second, and the story as it happens; for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console

    async def show(self, report: Report) -> None:
        told, beat = 0, 0.0
        try:
            while True:
                told = self._tell(report, told)
                if report.story and report.seconds >= beat:
                    beat = report.seconds + 1.0
                    self._console.print(f"{report.seconds:5.1f} s  {_in_a_line(report)}")
                await asyncio.sleep(0.1)
        finally:
            self._tell(report, told)

    def _tell(self, report: Report, told: int) -> int:
        for seconds, text in report.story[told:]:
            self._console.print(f"{seconds:5.1f} s  * {text}")
        return len(report.story)


def _in_a_line(report: Report) -> str:
    parts = (
        f"{report.finished:,}/{report.jobs:,} done",
        f"{report.counts.active} active",
        f"{report.counts.delayed} delayed",
        f"{report.events['retry']:,} retries",
        f"{report.dead_letters} dead letters",
    )
    return ", ".join(parts)


class Nothing:
    """For --json: the report itself is the output."""

    async def show(self, report: Report) -> None:
        await asyncio.Event().wait()


def summary(report: Report) -> Iterable[str]:
    """The final account, as lines."""
    done, dead, runs = report.counts.completed, report.dead_letters, report.events["active"]
    mark = "✓" if report.adds_up else "✗"
    yield f"{mark} {report.added:,} added = {done:,} completed + {dead:,} dead-lettered"
    if not report.adds_up:
        left = report.counts.pending + report.counts.active
        yield f"  this does not add up: {left:,} unfinished, {report.added - done - dead - left:,} unaccounted for"
    yield (
        f"  {runs:,} handler runs = {done + dead:,} that ended a job + {report.events['retry']:,} retried later "
        f"+ {report.recovered:,} cut short by the kill and run again"
    )
    yield f"  {report.seconds:.1f} s, {report.events['progress']:,} progress reports"


def _workers(workers: Iterable[tuple[str, str]]) -> Text:
    text = Text()
    for name, condition in workers:
        mark, style = _MARKS[condition]
        text.append(f"{mark} {name} ", style=style)
        text.append(f"{condition}   " if condition != "works" else "  ", style=style)
    return text


def _numbers(report: Report) -> Text:
    text = Text(f"{report.per_second[-1]:>5,} jobs/s ", style="cyan")
    top = max(*report.per_second, 1)
    text.append("".join(_BARS[round(number * 8 / top)] for number in report.per_second), style="cyan")
    text.append(f"\n{report.events['retry']:,} retries", style="yellow")
    text.append(f" · {report.events['progress']:,} progress reports · ")
    text.append(f"{report.recovered} recovered after the kill", style="magenta" if report.recovered else "")
    return text


def _story(story: list[tuple[float, str]]) -> list[Text]:
    return [Text(f"{seconds:5.1f} s  {text}") for seconds, text in story[-_STORY_LINES:]]
