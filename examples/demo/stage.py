"""Where the demo runs, and the course of the evening: both acts, and time for visitors.

In: what `bullpen demo` was asked for. Out: the account of the first act and one line per system of the second; printed
as it goes, unless a program asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import shlex
import shutil
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from rich.console import Console

from bullpen import Bullpen, Connection, Queue, Settings, Worker, embedded
from bullpen._version import install_line
from bullpen.errors import MissingExtra

from . import display
from .jobs import handle
from .play import Play, Report
from .systems import Line, tour

_NEEDED: Final = {"sqlalchemy": "sqlite", "aiosqlite": "sqlite", "httpcore2": "http"}
"""Module that the other systems import -> extra that brings it."""

out = Console(soft_wrap=True, highlight=False)


@dataclass(frozen=True, slots=True)
class Stage:
    """Where the demo runs."""

    url: str
    connection: Connection
    queue: str
    prefix: str
    directory: Path
    node: str | None
    """The command that starts a Node worker on the same queue, where one can get in."""
    leaves: bool
    """Whether the server stays when we are gone; then the queue is removed from it."""


async def run(
    jobs: int,
    seconds: float,
    redis: str | None,
    prefix: str | None,
    *,
    stay: bool,
    plain: bool,
    quiet: bool,
    with_systems: bool,
    dashboard: bool = False,
) -> tuple[Report, list[Line]]:
    """The whole demo. `quiet`: print nothing. `dashboard`: show it in a browser too, until Ctrl-C."""
    out.quiet = quiet
    logging.getLogger("bullpen.embedded").setLevel(logging.ERROR)  # that there is one is the first thing we print
    with _temporary_directory() as directory:
        async with _stage(directory, redis, prefix) as stage, _pages(stage, wanted=dashboard) as url:
            play = Play(
                stage.connection,
                url=stage.url,
                queue=stage.queue,
                prefix=stage.prefix,
                jobs=jobs,
                seconds=seconds,
                directory=stage.directory,
            )
            out.print(f"queue {stage.queue} on {stage.connection.address}", markup=False)
            if stage.node is not None:
                # Outside of any frame and in one piece, so that it can be copied.
                out.print(f"a Node worker may join (npm install bullmq ioredis):\n\n{stage.node}\n", markup=False)
            async with _shown(_view(plain=plain, quiet=quiet), play.report):
                await play.run()
            out.print(*display.summary(play.report), sep="\n", markup=False)
            lines = [line async for line in _systems(stage)] if with_systems else []
            if url is None:
                out.print("\nTo see it in a browser, with the jobs moving: bullpen demo --dashboard")
            if stage.node is not None and not stay and url is None:
                out.print("\nTo join with Node: bullpen demo --stay, then paste the line it prints.")
            if stay:
                with contextlib.suppress(asyncio.CancelledError):  # Ctrl-C is how it is meant to end
                    await _stay(stage)
            elif url is not None:
                out.print(f"\nThe pages stay until Ctrl-C: {url}", markup=False)
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
            return play.report, lines


@asynccontextmanager
async def _pages(stage: Stage, *, wanted: bool) -> AsyncIterator[str | None]:
    """The dashboard of the demo's queues on a free port of this machine; None when nobody asked for it."""
    if not wanted:
        yield None
        return
    if missing := [module for module in ("jinja2", "uvicorn") if find_spec(module) is None]:
        raise MissingExtra("dashboard", f"the dashboard ({', '.join(missing)})")
    from bullpen.dashboard import make_dashboard
    from bullpen.http.serve import HttpService

    settings = Settings.load(environ={}, redis_url=stage.url, redis_prefix=stage.prefix)
    async with Bullpen(settings=settings) as app, make_dashboard(app) as pages:
        service = HttpService(pages, "127.0.0.1", 0, extra="dashboard")
        running = asyncio.create_task(service.run())
        url = f"http://127.0.0.1:{service.port}"
        out.print(f"in the browser: {url}\n", markup=False)
        try:
            yield url
        finally:
            await pages.aclose()
            await service.close()
            await running


def _view(*, plain: bool, quiet: bool) -> display.Display:
    if quiet:
        return display.Nothing()
    return display.Lines(out) if plain or not out.is_terminal else display.Picture(out)


@asynccontextmanager
async def _shown(view: display.Display, report: Report) -> AsyncIterator[None]:
    showing = asyncio.ensure_future(view.show(report))
    try:
        yield
    finally:
        showing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await showing


async def _systems(stage: Stage) -> AsyncIterator[Line]:
    """The other systems, where what they need is installed."""
    missing = [extra for module, extra in _NEEDED.items() if find_spec(module) is None]
    if missing:
        out.print(f"\nThe other systems need more: {install_line(*dict.fromkeys(missing))}", markup=False)
        return
    out.print("\nThe other systems, each with a fault on purpose:")
    # Faults are told by what comes of them; the log lines of each would hide that.
    logging.getLogger("bullpen").setLevel(logging.CRITICAL)
    try:
        async for line in tour(stage.url, stage.prefix, stage.directory):
            mark = "[green]✓[/]" if line.is_right else "[bold red]✗[/]"
            out.print(f"  {mark} {line.system:<9}{line.text}")
            yield line
    finally:
        logging.getLogger("bullpen").setLevel(logging.NOTSET)


# The server ---------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _stage(directory: Path, redis: str | None, prefix: str | None) -> AsyncIterator[Stage]:
    settings = Settings.load(redis_url=redis, redis_prefix=prefix)
    if redis is not None:
        yielded = _named_server(redis, settings.redis.prefix, directory)
    else:
        yielded = _temporary_server(settings.redis.prefix, directory)
    with yielded as stage:
        wire = await stage.connection.open()  # nobody there: say so now
        wire.close()
        try:
            yield stage
        finally:
            if stage.leaves:
                await _remove(stage)
            await stage.connection.aclose()


@contextmanager
def _named_server(url: str, prefix: str, directory: Path) -> Iterator[Stage]:
    # A name of its own, so that two demos, or the rests of one that was killed, are not counted together.
    queue = f"demo-{secrets.token_hex(3)}"
    node = node_command(queue, url, prefix) if url.startswith(("redis://", "rediss://")) else None
    yield Stage(url, Connection(url), queue, prefix, directory, node, leaves=True)


@contextmanager
def _temporary_directory() -> Iterator[Path]:
    """Removed again and again until it stays away: a server writes the last line of its log after everything else."""
    directory = Path(tempfile.mkdtemp(prefix="bullpen-demo-"))
    try:
        yield directory
    finally:
        give_up = time.monotonic() + 10
        while directory.exists() and time.monotonic() < give_up:
            shutil.rmtree(directory, ignore_errors=True)
            time.sleep(0.02)


@contextmanager
def _temporary_server(prefix: str, directory: Path) -> Iterator[Stage]:
    with embedded.acquire(directory / "server", tcp_port=_free_port(), password=secrets.token_urlsafe(9)) as server:
        assert server.tcp_url is not None
        node = node_command("demo", server.tcp_url, prefix)
        yield Stage(server.url, Connection(server.url), "demo", prefix, directory, node, leaves=False)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def node_command(queue: str, url: str, prefix: str) -> str:
    """A line for a shell that starts a Node worker on the queue. Its errors reach the screen, its jobs too."""
    script = (
        'const {Worker} = require("bullmq"); '
        f'new Worker("{queue}", async job => {{ console.log("node runs", job.name, job.id); return {{by: "node"}} }}, '
        f'{{connection: {{url: "{url}"}}, prefix: "{prefix}"}}).on("error", console.error)'
    )
    return f"node -e {shlex.quote(script)}"


async def _remove(stage: Stage) -> None:
    """Delete the demo's queue and its dead letters from a server that is not ours."""
    for name in (stage.queue, f"{stage.queue}-dlq"):
        async with Queue(name, connection=stage.connection, prefix=stage.prefix) as queue:
            await queue.obliterate(force=True)


# Afterwards ---------------------------------------------------------------------------------------------------------


async def _stay(stage: Stage) -> None:
    """A job a second, and who ran it: time to start a Node worker beside ours."""
    out.print("\nOne job a second from now on; Ctrl-C ends it. Start a Node worker in another terminal:\n")
    out.print(stage.node or "", markup=False)
    out.print()
    async with (
        Queue(stage.queue, connection=stage.connection, prefix=stage.prefix) as queue,
        Worker(stage.queue, handle, connection=stage.connection, prefix=stage.prefix),
    ):
        while True:
            job = await queue.add("thumbnail", {"ms": 5})
            result = await job.result(timeout=60_000)
            out.print(f"job {job.id} was run by {result.get('by', '?')}", markup=False)
            await asyncio.sleep(1)
