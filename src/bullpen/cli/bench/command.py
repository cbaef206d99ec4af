"""The command: make sure that the server may be used for this, measure, print."""

from __future__ import annotations

import re
import sys
from typing import Annotated, Any, Final

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from bullpen.app import Bullpen
from bullpen.cli import common
from bullpen.cli.bench.measure import Bench, Figure, JobsMissing, Sizes
from bullpen.cli.common import JsonOption, PrefixOption, RedisOption
from bullpen.errors import ServerRefused

_BYTES_PER_JOB: Final = 1_500
"""What a completed job and its events take at most, besides its data: a careful guess."""


def bench(
    jobs: Annotated[int, typer.Option(min=100, max=1_000_000, help="Jobs per measurement.")] = 10_000,
    concurrency: Annotated[int, typer.Option(min=1, max=10_000, help="Jobs that run at a time.")] = 200,
    payload: Annotated[int, typer.Option(min=8, max=1_000_000, help="Bytes of data per job.")] = 100,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask, even if the server holds data.")] = False,
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure how fast jobs go in and out of your server: adding, running, latency.

    Works on a queue of its own with a random name, which is removed afterwards, and checks that every job that went in
    came out. A server that holds data is used only after a question: its other users feel the load.
    """
    sizes = Sizes(jobs, concurrency, payload)
    try:
        found = common.wait_for(_bench(sizes, yes, redis, prefix, as_json))
    except JobsMissing as error:
        raise common.Done(str(error)) from None
    if as_json:
        common.print_json(found)


async def _bench(sizes: Sizes, yes: bool, redis: str | None, prefix: str | None, as_json: bool) -> dict[str, Any]:
    async with common.opened(redis, prefix) as app:
        await _may_be_used(app, sizes, yes)
        measuring = Bench(app.connection, app.prefix, sizes)
        figures: list[Figure] = []
        with _progress(quiet=as_json) as progress:
            task = progress.add_task(sizes.steps[0], total=len(sizes.steps))
            async for step, found in measuring.run():
                figures += found
                following = sizes.steps[sizes.steps.index(step) + 1 :]
                progress.update(task, advance=1, description=following[0] if following else "done")
        if not as_json:
            rows = [(figure.title, _shown(figure), figure.unit) for figure in figures]
            common.print_table(("", "found", "unit"), rows, numbers=("found",))
        return {
            "server": str(app.connection.address),
            "queue": measuring.queue_name,
            "jobs": sizes.jobs,
            "concurrency": sizes.concurrency,
            "payloadBytes": sizes.payload_bytes,
            "figures": [figure.to_json() for figure in figures],
        }


def _progress(*, quiet: bool) -> Progress:
    columns = (TextColumn("{task.description:<12}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=common.err, transient=True, disable=quiet or not common.err.is_terminal)


def _shown(figure: Figure) -> str:
    return f"{figure.value:,.0f}" if figure.unit == "jobs/s" else f"{figure.value:.2f}"


# Is this server the right one for it? -------------------------------------------------------------------------------


async def _may_be_used(app: Bullpen, sizes: Sizes, yes: bool) -> None:
    """Raises unless the server has room, and is empty or was agreed to."""
    try:
        info = (await app.connection.shared_door().call("INFO")).decode(errors="replace")
    except ServerRefused:
        info = ""  # a managed server may forbid it: then the question is asked, since nobody knows
    needed = 2 * sizes.jobs * (_BYTES_PER_JOB + 2 * sizes.payload_bytes)
    limit, used = _number(info, "maxmemory"), _number(info, "used_memory")
    if limit and limit - used < needed:
        raise common.Done(
            f"the server has {max(0, limit - used) / 1e6:,.0f} MB left below its maxmemory and the benchmark may need "
            f"{needed / 1e6:,.0f} MB; take fewer --jobs or another server"
        )
    keys = sum(int(count) for count in re.findall(r"^db\d+:keys=(\d+)", info, re.MULTILINE))
    if yes or (info and not keys):
        return
    holds = f"holds {keys:,} keys" if info else "does not tell whether it is empty"
    server = app.connection.address
    if not sys.stdin.isatty():
        raise common.WrongCommand(f"{server} {holds}; say --yes if the benchmark may put load on it")
    common.ask(
        f"{server} {holds}. The benchmark adds {2 * sizes.jobs:,} jobs to a queue of its own and removes them; whoever "
        "uses the server feels the load. Go on?"
    )


def _number(info: str, name: str) -> int:
    match = re.search(rf"^{name}:(\d+)", info, re.MULTILINE)
    return int(match[1]) if match else 0
