"""`bullpen top`: poll, draw, wait, until somebody has seen enough.

On a terminal the screen is redrawn in place; on a pipe or a terminal that cannot move its cursor tables follow each
other; with --json one document a line. A server that goes away is reported and waited for. Elsewhere: the numbers
(`bullpen.ops.overview`), how rows fit a window (`show.Table`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_args

import click

from bullpen._kernel.printable import printable
from bullpen.cli import context, show
from bullpen.cli.arguments import QueuesArgument, duration
from bullpen.cli.context import OnServer
from bullpen.cli.show import Column, Table, cut
from bullpen.cli.tree import Option

if TYPE_CHECKING:
    from rich.live import Live

    from bullpen.ops.overview import Overview, QueueSnapshot

_SHORTEST_INTERVAL_S: Final = 0.2

Sort = Literal["waiting", "active", "delayed", "failed", "oldest", "rate", "dead", "name"]
_WORTH: Final[dict[str, Callable[[QueueSnapshot], float]]] = {
    "waiting": lambda look: look.ready,
    "active": lambda look: look.active,
    "delayed": lambda look: look.delayed,
    "failed": lambda look: look.failed,
    "oldest": lambda look: look.oldest_ms or 0,
    "rate": lambda look: (look.added_per_s or 0) + (look.done_per_s or 0),
    "dead": lambda look: look.dead_letters,
}


async def top(
    at: OnServer,
    queues: QueuesArgument = None,
    interval: Annotated[str, Option(metavar="TIME", help="Time between two polls: 500 (ms), 2s, 1m.")] = "2s",
    sort: Annotated[Sort, Option(help="Sort queues by this, largest first.")] = "waiting",
    limit: Annotated[int | None, Option(min=1, help="At most this many queues.", default="what fits")] = None,
    once: Annotated[bool, Option("--once", help="Poll once, print and end. Rates need two polls.")] = False,
) -> None:
    """Watch all queues: counts, rates, ages and workers. Press q to quit.

    It costs the server little. It reconnects when the server is unreachable.
    """
    from bullpen.ops.overview import Overview

    seconds = duration("--interval", interval).total_seconds()
    if seconds < _SHORTEST_INTERVAL_S:
        raise click.BadParameter(f"at least {_SHORTEST_INTERVAL_S * 1000:.0f} ms", param_hint="'--interval'")
    async with at.app() as app:
        where = "  ".join(("bullpen top", str(app.connection.address), app.prefix))
        view = View(where, seconds, sort, limit, at.local)
        for name in queues or ():
            await context.must_exist(app, name)
        overview = Overview(app.connection, app.prefix, queues or ())
        output = Documents() if at.as_json else Screen() if _can_redraw() and not once else Tables()
        if not once:
            raise click.exceptions.Exit(await _Watch(overview, view, output).run())
        if overview.search_due_s is not None:
            await overview.search()
        snapshot = await overview.read()
        view.looks, view.at_ms, view.is_searching = snapshot.looks, snapshot.at_ms, False
        output.show(view)


# What is drawn ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class View:
    """All that is known when a screen is drawn."""

    where: str
    interval_s: float
    sort: Sort = "waiting"
    limit: int | None = None
    local: bool = False
    looks: Sequence[QueueSnapshot] = ()
    at_ms: int = 0
    is_searching: bool = True
    problem: str | None = None
    away_s: float = 0.0

    def ordered(self) -> list[QueueSnapshot]:
        """The queues that are shown, the most worth seeing first."""
        by_name = sorted(self.looks, key=lambda look: look.queue)
        if self.sort != "name":
            by_name.sort(key=_WORTH[self.sort], reverse=True)  # stable: equals stay in the order of their names
        return by_name[: self.limit]

    def screen(self, width: int, height: int) -> list[str]:
        """A whole screen, never larger than the window."""
        head = [cut(line, width) for line in self.heading()]
        foot = cut(f"q quits, s sorts by another column (now {self.sort})", width)
        room = max(1, height - len(head) - 2)
        lines = [show.style(head[0], "bold"), show.style(head[1], "bold red" if self.problem else "")]
        return [*lines, *self.table(width, room), show.style(foot, "dim")][: max(1, height)]

    def heading(self) -> tuple[str, str]:
        """Where we look, and the sum of all; or what keeps us from looking."""
        clock = show.when(show.instant(self.at_ms), local=self.local)[11:19]
        zone = "" if self.local or not clock else " UTC"
        first = printable(f"{self.where}  {clock}{zone}  every {self.interval_s:g} s")
        if self.problem is not None:
            since = f"the numbers are {self.away_s:.0f} s old" if self.at_ms else "no numbers yet"
            return first, printable(f"server unreachable, trying again; {since}: {self.problem}")
        if self.is_searching and not self.looks:
            return first, "looking for queues"
        parts = [f"{len(self.looks)} queue{'' if len(self.looks) == 1 else 's'}"]
        sums = {title: int(sum(map(_WORTH[title], self.looks))) for title in ("waiting", "active", "delayed", "failed")}
        parts += [f"{_count(count)} {title}" for title, count in sums.items()]
        if any(look.done_per_s is not None for look in self.looks):
            parts.append(f"{_rate(sum(look.added_per_s or 0 for look in self.looks))} added/s")
            parts.append(f"{_rate(sum(look.done_per_s or 0 for look in self.looks))} done/s")
        return first, ", ".join(parts)

    def table(self, width: int, height: int) -> list[str]:
        """The queues, one in a line, with a heading; at most `height` lines of queues."""
        if not self.looks:
            return []
        shown = self.ordered()
        has_more = len(shown) < len(self.looks) or len(shown) > height
        fitting = shown[: max(0, height - 1)] if has_more else shown
        lines = [*Table(_COLUMNS, fitting, width=width).lines(lambda at: self._style(fitting[at]))]
        if has_more:
            lines.append(show.style(cut(f"and {len(self.looks) - len(fitting)} more", width), "dim"))
        return lines

    def _style(self, look: QueueSnapshot) -> str:
        if self.problem is not None:
            return "dim"
        if look.problem or look.dead_letters or look.failed:
            return "red"
        return "yellow" if look.paused else "green" if look.active else ""


def _column(title: str, worth: int, cell: Callable[[QueueSnapshot], str]) -> Column:
    return Column(title, cell, worth, is_number=True)


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


_COLUMNS: Final = (
    Column("queue", lambda look: look.queue, least=12),
    _column("waiting", 1, lambda look: _count(look.ready)),
    _column("active", 1, lambda look: _count(look.active)),
    _column("delayed", 3, lambda look: _count(look.delayed)),
    _column("failed", 2, lambda look: _count(look.failed)),
    _column("dead", 5, lambda look: _count(look.dead_letters)),
    _column("added/s", 4, lambda look: _rate(look.added_per_s)),
    _column("done/s", 4, lambda look: _rate(look.done_per_s)),
    _column("oldest", 6, lambda look: _age(look.oldest_ms)),
    _column("workers", 7, lambda look: "?" if look.workers is None else _count(look.workers)),
    _column("completed", 8, lambda look: _count(look.completed)),
    _column("", 3, lambda look: "unread" if look.problem else "paused" if look.paused else ""),
)


# Where it is drawn --------------------------------------------------------------------------------------------------


class Documents:
    """One JSON document a line."""

    redraws = False

    def show(self, view: View) -> None:
        queues = [] if view.problem else [look.to_json() for look in view.ordered()]
        at = show.instant(view.at_ms)
        show.print_line({"at": at, "total": len(view.looks), "problem": view.problem, "queues": queues})

    def opened(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class Tables(Documents):
    """One table after the other; for pipes, files and terminals that cannot move their cursor."""

    def show(self, view: View) -> None:
        lines = () if view.problem else view.table(show.window_width(), sys.maxsize)
        print(*view.heading(), *lines, "", sep="\n", flush=True)


class Screen(Documents):
    """The whole window of a terminal, redrawn in place; what was there before comes back at the end."""

    redraws = True
    _live: Live

    def show(self, view: View) -> None:
        from rich.text import Text

        width, height = self._live.console.size
        self._live.update(Text("\n").join(map(Text.from_ansi, view.screen(width, height))), refresh=True)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        from rich.console import Console
        from rich.live import Live

        with Live(console=Console(highlight=False), screen=True, auto_refresh=False) as self._live:
            yield


def _can_redraw() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


# Watching -----------------------------------------------------------------------------------------------------------


class _Watch:
    """Polls until q, a signal, or the reader of our output leaves."""

    def __init__(self, overview: Overview, view: View, output: Documents) -> None:
        self._overview, self._view, self._output = overview, view, output
        self._done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._again = asyncio.Event()
        self._seen_at = time.monotonic()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # or the terminal would stay as we have made it
            loop.add_signal_handler(number, self._end, 128 + number)
        with self._output.opened(), keys(self._on_key):
            tasks = [asyncio.ensure_future(work()) for work in (self._search, self._poll, self._tick)]
            waited: list[asyncio.Future[Any]] = [self._done, *tasks]
            try:
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    if task.done():
                        task.result()  # raises what went wrong; they never return
                return self._done.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _end(self, code: int) -> None:
        if not self._done.done():
            self._done.set_result(code)

    def _on_key(self, key: str) -> None:
        match key:
            case "q" | "Q":
                self._end(0)
            case "s":
                every = get_args(Sort)
                self._view.sort = every[(every.index(self._view.sort) + 1) % len(every)]
                self._output.show(self._view)

    async def _search(self) -> None:
        from bullpen.errors import BullpenError

        while (due_s := self._overview.search_due_s) is not None:
            await asyncio.sleep(due_s)
            with contextlib.suppress(BullpenError):  # `_poll` meets the same, and reports it
                await self._overview.search()
                if self._view.is_searching:
                    self._again.set()
        await asyncio.Event().wait()

    async def _poll(self) -> None:
        from bullpen.errors import BullpenError

        while True:
            self._again.clear()
            is_complete = self._overview.is_complete
            try:
                snapshot = await self._overview.read()
            except BullpenError as error:
                self._view.problem = " ".join(str(error).split())
                self._view.away_s = time.monotonic() - self._seen_at
            else:
                self._view.looks, self._view.at_ms = snapshot.looks, snapshot.at_ms
                self._view.problem, self._view.is_searching = None, not is_complete
                self._seen_at = time.monotonic()
            if self._output.redraws or self._view.problem or is_complete:
                self._output.show(self._view)
            # Not wait_for: before Python 3.12 it may swallow a cancellation that comes together with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._view.interval_s):
                    await self._again.wait()

    async def _tick(self) -> None:
        """Redraw what a person looks at while a poll takes long, so that a stuck server and a resized window show."""
        while True:
            await asyncio.sleep(1)
            if self._output.redraws:
                self._view.away_s = time.monotonic() - self._seen_at
                if self._view.problem is None and self._view.away_s > self._view.interval_s + 2:
                    self._view.problem = "no answer"
                self._output.show(self._view)


@contextlib.contextmanager
def keys(on_key: Callable[[str], None]) -> Iterator[None]:
    """Call `on_key` for each key while the block runs, without waiting for Enter; the terminal is put back as it was,
    however we end. Does nothing where nobody can type."""
    try:
        import termios
        import tty
    except ImportError:  # a system without terminals of this kind: Ctrl-C ends the program there
        yield
        return
    if not sys.stdin.isatty():
        yield
        return
    descriptor, loop = sys.stdin.fileno(), asyncio.get_running_loop()

    def read() -> None:
        typed = os.read(descriptor, 64)
        if not typed:  # the terminal is gone
            loop.remove_reader(descriptor)
        for key in typed.decode(errors="replace"):
            on_key(key)

    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor, termios.TCSADRAIN)  # keeps what was typed already; Ctrl-C still interrupts
    try:
        loop.add_reader(descriptor, read)
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
