"""The command: find a server, run the play, print the account."""

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
from typing import Annotated, Final

import typer

from bullpen import embedded
from bullpen._version import install_line
from bullpen.app import connect
from bullpen.cli import common
from bullpen.cli.common import JsonOption, PrefixOption, RedisOption
from bullpen.cli.demo import display
from bullpen.cli.demo.play import Play, Report
from bullpen.cli.demo.scenario import handle
from bullpen.cli.demo.tour import Line, tour
from bullpen.queue import Queue
from bullpen.redis import Connection
from bullpen.settings import Settings
from bullpen.worker import Worker


def demo(
    jobs: Annotated[int, typer.Option(min=1, max=200_000, help="How many jobs.")] = 3_000,
    duration: Annotated[float, typer.Option(min=1, max=600, help="About how many seconds.")] = 12.0,
    stay: Annotated[bool, typer.Option("--stay", help="Afterwards go on with a job a second until Ctrl-C.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Print lines instead of a live picture.")] = False,
    jobs_only: Annotated[bool, typer.Option("--jobs-only", help="Leave out the other systems.")] = False,
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a few thousand jobs in three worker processes, kill one of them, and add up what became of every job.

    Then tasks, a workflow, the outbox, a run and a scheduled message, each with a fault on purpose.

    Without --redis a server is started in a temporary directory and removed afterwards.
    """
    if stay and as_json:
        raise common.WrongCommand("--stay talks to a person, --json to a program; choose one")
    logging.getLogger("bullpen.embedded").setLevel(logging.ERROR)  # that there is one is the first thing we print
    with_tour = redis is None and not jobs_only
    report, lines = common.wait_for(_demo(jobs, duration, stay, plain, redis, prefix, as_json, with_tour))
    if as_json:
        common.print_json({**report.to_json(), "systems": [line.to_json() for line in lines]})
    if not report.adds_up or not all(line.is_right for line in lines):
        raise common.Done("" if as_json else "the demo does not add up; please report this")


_NEEDED: Final = {"sqlalchemy": "sqlite", "aiosqlite": "sqlite", "httpcore2": "http"}
"""Module that the other systems import -> extra that brings it."""


@dataclass(frozen=True, slots=True)
class _Stage:
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


async def _demo(
    jobs: int,
    duration: float,
    stay: bool,
    plain: bool,
    redis: str | None,
    prefix: str | None,
    as_json: bool,
    with_tour: bool,
) -> tuple[Report, list[Line]]:
    with _temporary_directory() as directory:
        async with _stage(directory, redis, prefix) as stage:
            play = Play(
                stage.connection,
                url=stage.url,
                queue=stage.queue,
                prefix=stage.prefix,
                jobs=jobs,
                seconds=duration,
                directory=stage.directory,
            )
            view = _view(stage, plain, as_json)
            async with _shown(view, play.report):
                await play.run()
            if not as_json:
                common.out.print(*display.summary(play.report), sep="\n", markup=False)
            lines = [line async for line in _told(stage, as_json)] if with_tour else []
            if stage.node is not None and not stay and not as_json:
                common.out.print("\nTo join with Node: bullpen demo --stay, then paste the line it prints.")
            if stay and not as_json:
                with contextlib.suppress(asyncio.CancelledError):  # Ctrl-C is how it is meant to end
                    await _stay(stage)
            return play.report, lines


async def _told(stage: _Stage, as_json: bool) -> AsyncIterator[Line]:
    """The other systems, where what they need is installed."""
    missing = [extra for module, extra in _NEEDED.items() if find_spec(module) is None]
    if missing:
        if not as_json:
            common.out.print(f"\nThe other systems need more: {install_line(*dict.fromkeys(missing))}", markup=False)
        return
    if not as_json:
        common.out.print("\nThe other systems, each with a fault on purpose:")
    # Faults are told by what comes of them; the log lines of each would hide that.
    logging.getLogger("bullpen").setLevel(logging.CRITICAL)
    try:
        async for line in tour(stage.url, stage.prefix, stage.directory):
            if not as_json:
                mark = "[green]✓[/]" if line.is_right else "[bold red]✗[/]"
                common.out.print(f"  {mark} {line.system:<9}{line.text}", highlight=False)
            yield line
    finally:
        logging.getLogger("bullpen").setLevel(logging.NOTSET)


def _view(stage: _Stage, plain: bool, as_json: bool) -> display.Display:
    if as_json:
        return display.Nothing()
    common.out.print(f"queue {stage.queue} on {stage.connection.address}", markup=False)
    if stage.node is not None:
        # Outside of any frame and in one piece, so that it can be copied.
        common.out.print(
            f"a Node worker may join (npm install bullmq ioredis):\n\n{stage.node}\n",
            markup=False,
        )
    return display.Lines(common.out) if plain or not common.out.is_terminal else display.Picture(common.out)


@asynccontextmanager
async def _shown(view: display.Display, report: Report) -> AsyncIterator[None]:
    showing = asyncio.ensure_future(view.show(report))
    try:
        yield
    finally:
        showing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await showing


# The server ---------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _stage(directory: Path, redis: str | None, prefix: str | None) -> AsyncIterator[_Stage]:
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
def _named_server(url: str, prefix: str, directory: Path) -> Iterator[_Stage]:
    # A name of its own, so that two demos, or the rests of one that was killed, are not counted together.
    queue = f"demo-{secrets.token_hex(3)}"
    node = node_command(queue, url, prefix) if url.startswith(("redis://", "rediss://")) else None
    yield _Stage(url, connect(url), queue, prefix, directory, node, leaves=True)


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
def _temporary_server(prefix: str, directory: Path) -> Iterator[_Stage]:
    with embedded.acquire(directory / "server", tcp_port=_free_port(), password=secrets.token_urlsafe(9)) as server:
        assert server.tcp_url is not None
        node = node_command("demo", server.tcp_url, prefix)
        yield _Stage(server.url, Connection(server.url), "demo", prefix, directory, node, leaves=False)


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


async def _remove(stage: _Stage) -> None:
    """Delete the demo's queue and its dead letters from a server that is not ours."""
    for name in (stage.queue, f"{stage.queue}-dlq"):
        async with Queue(name, connection=stage.connection, prefix=stage.prefix) as queue:
            await queue.obliterate(force=True)


# Afterwards ---------------------------------------------------------------------------------------------------------


async def _stay(stage: _Stage) -> None:
    """A job a second, and who ran it: time to start a Node worker beside ours."""
    common.out.print("\nOne job a second from now on; Ctrl-C ends it. Start a Node worker in another terminal:\n")
    common.out.print(stage.node or "", markup=False)
    common.out.print()
    async with (
        Queue(stage.queue, connection=stage.connection, prefix=stage.prefix) as queue,
        Worker(stage.queue, handle, connection=stage.connection, prefix=stage.prefix),
    ):
        while True:
            job = await queue.add("thumbnail", {"ms": 5})
            result = await job.result(timeout=60_000)
            common.out.print(f"job {job.id} was run by {result.get('by', '?')}", markup=False)
            await asyncio.sleep(1)
