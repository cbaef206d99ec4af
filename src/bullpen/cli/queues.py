"""`bullpen queues`: which queues there are, how full they are, pause and resume."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
import typer

from bullpen.app import Bullpen
from bullpen.cli import common
from bullpen.cli.common import JsonOption, PrefixOption, QueueArgument, RedisOption
from bullpen.ops.pauses import read_pause
from bullpen.queue.browse import find_queues

app = typer.Typer(help="List queues with their counts; show, pause and resume one.")

ReasonOption = Annotated[str, typer.Option(metavar="TEXT", help="Why; it is kept in the audit and shown to others.")]
_COLUMNS = ("queue", "waiting", "prioritized", "delayed", "active", "completed", "failed", "dead letters", "")


@app.callback(invoke_without_command=True)
def queues(
    context: typer.Context, redis: RedisOption = None, prefix: PrefixOption = None, as_json: JsonOption = False
) -> None:
    """List the queues of the server with their counts; show, pause and resume one."""
    if context.invoked_subcommand is None:
        list_queues(redis, prefix, as_json)


@app.command("list")
def list_queues(redis: RedisOption = None, prefix: PrefixOption = None, as_json: JsonOption = False) -> None:
    """List all queues under the prefix."""
    found = common.wait_for(_all(redis, prefix))
    if as_json:
        common.print_json(found)
    elif found:
        _print(found)
    else:
        common.err.print("no queues here yet")


@app.command()
def show(
    queue: QueueArgument, redis: RedisOption = None, prefix: PrefixOption = None, as_json: JsonOption = False
) -> None:
    """Show one queue."""
    found = common.wait_for(_one(queue, redis, prefix))
    if as_json:
        common.print_json(found)
        return
    _print([found])
    if (note := found["pause"]) is not None:
        since = f" at {datetime.fromtimestamp(note['atMs'] / 1000, UTC):%Y-%m-%d %H:%M:%SZ}" if note["atMs"] else ""
        why = f": {note['reason']}" if note["reason"] else ""
        common.out.print(f"paused by {note['by'] or 'another client'}{since}{why}", markup=False)


@app.command()
def pause(
    queue: QueueArgument,
    reason: ReasonOption = "",
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let workers of all clients take nothing more; running jobs finish."""
    common.wait_for(_switch(queue, reason, redis, prefix, paused=True))
    _tell_paused(queue, True, as_json)


@app.command()
def resume(
    queue: QueueArgument,
    reason: ReasonOption = "",
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let workers take again."""
    common.wait_for(_switch(queue, reason, redis, prefix, paused=False))
    _tell_paused(queue, False, as_json)


@app.command()
def restore(
    queue: QueueArgument, redis: RedisOption = None, prefix: PrefixOption = None, as_json: JsonOption = False
) -> None:
    """Put jobs back in line that have not finished and that no state lists: they lost their place."""

    async def work() -> int:
        async with common.opened(redis, prefix) as opened:
            with common.err.status("looking for jobs without a place"):
                count = await opened.queue(queue).restore_orphans()
            if not count:
                await common.must_exist(opened, queue)
            return count

    restored = common.wait_for(work())
    if as_json:
        common.print_json({"queue": queue, "restored": restored})
    else:
        common.out.print(f"restored: {restored}")


def _tell_paused(queue: str, paused: bool, as_json: bool) -> None:
    if as_json:
        common.print_json({"queue": queue, "paused": paused})
    else:
        common.out.print(f"{queue} is {'paused' if paused else 'running'}")


async def _all(redis: str | None, prefix: str | None) -> list[dict[str, Any]]:
    async with common.opened(redis, prefix) as app:
        with common.err.status("looking for queues"):
            names = await find_queues(app.connection, app.prefix)
        # A dead-letter queue is shown as a number beside the queue it belongs to, unless that one is gone.
        shown = [name for name in names if not (name.endswith("-dlq") and name.removesuffix("-dlq") in names)]
        return [await _describe(app, name) for name in shown]


async def _one(queue: str, redis: str | None, prefix: str | None) -> dict[str, Any]:
    async with common.opened(redis, prefix) as app:
        await common.must_exist(app, queue)
        note = await read_pause(app.queue(queue))
        return {**await _describe(app, queue), "pause": msgspec.to_builtins(note)}


async def _switch(queue: str, reason: str, redis: str | None, prefix: str | None, *, paused: bool) -> None:
    async with common.opened(redis, prefix) as app:
        await common.must_exist(app, queue)
        actions = await common.acting(app)
        await actions.do("queue.pause" if paused else "queue.resume", queue, reason=reason)


async def _describe(app: Bullpen, name: str) -> dict[str, Any]:
    queue = app.queue(name)
    counts = await queue.counts()
    return {
        "queue": name,
        "waiting": counts.waiting,
        "prioritized": counts.prioritized,
        "delayed": counts.delayed,
        "waitingChildren": counts.waiting_children,
        "active": counts.active,
        "completed": counts.completed,
        "failed": counts.failed,
        "deadLetters": await queue.dead_letters.depth(),
        "paused": await queue.is_paused(),
    }


def _print(found: list[dict[str, Any]]) -> None:
    has_parents = any(each["waitingChildren"] for each in found)
    columns = (*_COLUMNS[:4], "waiting for children", *_COLUMNS[4:]) if has_parents else _COLUMNS
    rows = []
    for each in found:
        row = [each["queue"], each["waiting"], each["prioritized"], each["delayed"]]
        row += [each["waitingChildren"]] if has_parents else []
        row += [each["active"], each["completed"], each["failed"], each["deadLetters"]]
        rows.append([*row, "paused" if each["paused"] else ""])
    common.print_table(columns, rows, numbers=columns[1:-1])
