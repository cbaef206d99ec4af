"""The command: make sure that the server may be used for this, measure, print."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Final

from bullpen.cli.arguments import YesOption
from bullpen.cli.context import Done, OnServer
from bullpen.cli.show import Column
from bullpen.cli.tree import Option

if TYPE_CHECKING:
    from bullpen.app import Bullpen
    from bullpen.cli.bench.measure import Figure, Sizes

_BYTES_PER_JOB: Final = 1_500
"""What a completed job and its events take at most, besides its data: a careful guess."""


async def bench(
    at: OnServer,
    jobs: Annotated[int, Option(min=100, max=1_000_000, help="Jobs per measurement.")] = 10_000,
    concurrency: Annotated[int, Option(min=1, max=10_000, help="Jobs that run at a time.")] = 200,
    payload: Annotated[int, Option(min=8, max=1_000_000, help="Bytes of data per job.")] = 100,
    yes: YesOption = False,
) -> None:
    """Measure how fast your server adds and runs jobs, and the latency.

    It uses a queue of its own with a random name, checks that every job ran, and removes the queue. It asks before it
    uses a server with data, because other users notice the load.
    """
    from bullpen.cli.bench.measure import Bench, JobsMissing, Sizes

    sizes = Sizes(jobs, concurrency, payload)
    figures: list[Figure] = []
    async with at.app() as app:
        await _may_be_used(at, app, sizes, yes=yes)
        measuring = Bench(app.connection, app.prefix, sizes)
        with at.bar(sizes.steps[0], len(sizes.steps)) as move:
            try:
                async for step, found in measuring.run():
                    figures += found
                    done = sizes.steps.index(step) + 1
                    move(done, description=sizes.steps[done] if done < len(sizes.steps) else "done")
            except JobsMissing as error:
                raise Done(str(error)) from None
    if not at.as_json:
        at.table(_COLUMNS, figures)
        return
    at.say(
        {
            "server": str(app.connection.address),
            "queue": measuring.queue_name,
            "jobs": sizes.jobs,
            "concurrency": sizes.concurrency,
            "payloadBytes": sizes.payload_bytes,
            "figures": [figure.to_json() for figure in figures],
        }
    )


def _shown(figure: Figure) -> str:
    return f"{figure.value:,.0f}" if figure.unit == "jobs/s" else f"{figure.value:.2f}"


_COLUMNS: Final = (
    Column("measured", lambda figure: figure.title),
    Column("found", _shown, is_number=True),
    Column("unit", lambda figure: figure.unit),
)


# Is this server the right one for it? -------------------------------------------------------------------------------


async def _may_be_used(at: OnServer, app: Bullpen, sizes: Sizes, *, yes: bool) -> None:
    """Raises unless the server has room, and is empty or was agreed to."""
    from bullpen.errors import ServerRefused

    try:
        info = (await app.connection.shared_door().call("INFO")).decode(errors="replace")
    except ServerRefused:
        info = ""  # a managed server may forbid it: then the question is asked, since nobody knows
    needed = 2 * sizes.jobs * (_BYTES_PER_JOB + 2 * sizes.payload_bytes)
    limit, used = _number(info, "maxmemory"), _number(info, "used_memory")
    if limit and limit - used < needed:
        raise Done(
            f"the server has {max(0, limit - used) / 1e6:,.0f} MB left below its maxmemory and the benchmark may need "
            f"{needed / 1e6:,.0f} MB; take fewer --jobs or another server"
        )
    keys = sum(int(count) for count in re.findall(r"^db\d+:keys=(\d+)", info, re.MULTILINE))
    if yes or (info and not keys):
        return
    holds = f"holds {keys:,} keys" if info else "does not show whether it is empty"
    server = app.connection.address
    question = (
        f"{server} {holds}. The benchmark adds {2 * sizes.jobs:,} jobs to a queue of its own and removes them; all "
        "users of the server notice the load. Continue?"
    )
    at.confirm(question, yes=False, refusal=f"{server} {holds}; the benchmark puts load on it and needs --yes")


def _number(info: str, name: str) -> int:
    match = re.search(rf"^{name}:(\d+)", info, re.MULTILINE)
    return int(match[1]) if match else 0
