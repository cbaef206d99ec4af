"""The command: ask, draw, wait, until somebody has seen enough.

On a terminal the screen is redrawn in place; on a pipe or a terminal that cannot move its cursor tables follow each
other; with --json one document a line. A server that goes away is told and waited for. Elsewhere: the numbers
(`bullpen.ops.overview`), the lines (`draw`), the keys (`keyboard`).
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import typer
from rich.console import Console, Group
from rich.live import Live

from bullpen.cli import common
from bullpen.cli.common import PrefixOption, RedisOption
from bullpen.cli.top.draw import Sort, View, heading, ordered, screen, table
from bullpen.cli.top.keyboard import keys
from bullpen.errors import BullpenError
from bullpen.ops.overview import Overview

_SHORTEST_INTERVAL_S: Final = 0.2
_ALL_LINES: Final = 1_000_000


def top(
    queues: Annotated[
        list[str] | None,
        typer.Argument(metavar="[QUEUE]...", help="Only these queues; else all under the prefix.", show_default=False),
    ] = None,
    interval: Annotated[str, typer.Option(metavar="TIME", help="Between two looks: 500 (ms), 2s, 1m.")] = "2s",
    sort: Annotated[Sort, typer.Option(help="Which queues come first.")] = Sort.WAITING,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many queues.", show_default="what fits")] = None,
    once: Annotated[bool, typer.Option("--once", help="Look once, print, and end. Rates need two looks.")] = False,
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document a line for each look.")] = False,
) -> None:
    """Watch all queues: what waits, runs, failed, how fast, how old, how many workers. The key q quits.

    Cheap for the server. A server that goes away is waited for.
    """
    seconds = common.duration("--interval", interval).total_seconds()
    if seconds < _SHORTEST_INTERVAL_S:
        raise typer.BadParameter(f"at least {_SHORTEST_INTERVAL_S * 1000:.0f} ms", param_hint="'--interval'")

    async def work() -> int:
        async with common.opened(redis, prefix) as app:
            view = View(f"bullpen top  {app.connection.address}  {app.prefix}", seconds, sort=sort, limit=limit)
            for name in queues or ():
                await common.must_exist(app, name)
            overview = Overview(app.connection, app.prefix, queues or ())
            if once:
                return await _look_once(overview, view, as_json)
            return await _Watch(overview, view, _output(as_json)).run()

    raise typer.Exit(common.wait_for(work()))


async def _look_once(overview: Overview, view: View, as_json: bool) -> int:
    if overview.search_due_s is not None:
        await overview.search()
    picture = await overview.read()
    view.looks, view.at_ms, view.is_searching = picture.looks, picture.at_ms, False
    (Documents() if as_json else Tables()).show(view)
    return 0


# How it is shown ----------------------------------------------------------------------------------------------------


class Documents:
    """One JSON document a line."""

    redraws = False

    def show(self, view: View) -> None:
        instant = datetime.fromtimestamp(view.at_ms / 1000, UTC).isoformat() if view.at_ms else None
        shown = ordered(view.looks, view.sort, view.limit)
        document: dict[str, Any] = {"at": instant, "total": len(view.looks), "problem": view.problem}
        document["queues"] = [] if view.problem else [look.to_json() for look in shown]
        common.print_line(document)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        yield


class Tables:
    """One table after the other; for pipes, files and terminals that cannot move their cursor."""

    redraws = False

    def show(self, view: View) -> None:
        console = common.SafeConsole(highlight=False, soft_wrap=True)
        width = console.width if console.is_terminal else common.WIDE
        lines = [*heading(view), *(() if view.problem else table(view, width, _ALL_LINES))]
        console.print(*lines, "", sep="\n")
        sys.stdout.flush()

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        yield


class Screen:
    """The whole window of a terminal, redrawn in place; what was there before comes back at the end."""

    redraws = True

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None

    def show(self, view: View) -> None:
        assert self._live is not None
        width, height = self._console.size
        self._live.update(Group(*screen(view, width, height)), refresh=True)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        with Live(console=self._console, screen=True, auto_refresh=False) as self._live:
            yield


def _output(as_json: bool) -> Documents | Tables | Screen:
    if as_json:
        return Documents()
    console = common.SafeConsole(highlight=False)
    return Screen(console) if console.is_terminal and not console.is_dumb_terminal else Tables()


# Watching -----------------------------------------------------------------------------------------------------------


class _Watch:
    """Looks again and again until q, a signal, or the reader of our output leaves."""

    def __init__(self, overview: Overview, view: View, output: Documents | Tables | Screen) -> None:
        self._overview = overview
        self._view = view
        self._output = output
        self._done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._again = asyncio.Event()
        self._seen_at = time.monotonic()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # or the terminal would stay as we have made it
            loop.add_signal_handler(number, self._end, 128 + number)
        with self._output.opened(), keys(self._on_key):
            tasks = [asyncio.ensure_future(work()) for work in (self._search, self._look, self._tick)]
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
                every = list(Sort)
                self._view.sort = every[(every.index(self._view.sort) + 1) % len(every)]
                self._output.show(self._view)

    async def _search(self) -> None:
        while (due_s := self._overview.search_due_s) is not None:
            await asyncio.sleep(due_s)
            with contextlib.suppress(BullpenError):  # `_look` meets the same, and tells
                await self._overview.search()
                if self._view.is_searching:
                    self._again.set()
        await asyncio.Event().wait()

    async def _look(self) -> None:
        while True:
            self._again.clear()
            is_complete = self._overview.is_complete
            try:
                picture = await self._overview.read()
            except BullpenError as error:
                self._view.problem = " ".join(str(error).split())
                self._view.away_s = time.monotonic() - self._seen_at
            else:
                self._view.looks, self._view.at_ms = picture.looks, picture.at_ms
                self._view.problem, self._view.is_searching = None, not is_complete
                self._seen_at = time.monotonic()
            if self._output.redraws or self._view.problem or is_complete:
                self._output.show(self._view)
            # Not wait_for: before Python 3.12 it may swallow a cancellation that comes together with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._view.interval_s):
                    await self._again.wait()

    async def _tick(self) -> None:
        """Redraw what a person looks at while a look takes long, so that a stuck server and a resized window show."""
        while True:
            await asyncio.sleep(1)
            if self._output.redraws:
                self._view.away_s = time.monotonic() - self._seen_at
                if self._view.problem is None and self._view.away_s > self._view.interval_s + 2:
                    self._view.problem = "no answer"
                self._output.show(self._view)
