"""`follow` for what the ledger keeps: an outbox row, a run, a message; until it has settled.

A row tells nobody that it changes, so it is read again and again; a line is printed when it is not as before, and the
exit code tells how it ended. A database that goes away is told on stderr and waited for. Elsewhere: events of queues
(`follow`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, Final

import typer

from bullpen.cli import common, messages, outbox, runs
from bullpen.cli.common import Done, TimeUp
from bullpen.cli.outbox import DatabaseOption
from bullpen.errors import DatabaseUnavailable

Fields = dict[str, Any]
IntervalOption = Annotated[str, typer.Option(metavar="TIME", help="Between two looks: 500 (ms), 2s, 1m.")]
TimeoutOption = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Give up after that, with exit code 4: 90s, 15m, 2h.", show_default="never"),
]
LinesOption = Annotated[bool, typer.Option("--json", help="Print one JSON document a line.")]

# What changes without anything having happened, and what the first columns show.
_NOT_NEWS: Final = frozenset({"heartbeatAt", "status", "lockedBy"})


def add_to_outbox(group: typer.Typer) -> None:
    group.command("follow")(follow_row)


def add_to_runs(group: typer.Typer) -> None:
    group.command("follow")(follow_run)


def add_to_messages(group: typer.Typer) -> None:
    group.command("follow")(follow_message)


def follow_row(
    row: outbox.RowArgument,
    interval: IntervalOption = "1s",
    timeout: TimeoutOption = None,
    database: DatabaseOption = None,
    as_json: LinesOption = False,
) -> None:
    """Print what happens to a row until it is sent; the exit code is 1 if it dies."""

    async def read() -> Fields:
        found, attempts = await outbox.get(database, row)
        return {**outbox.to_json(found), "attemptLog": [outbox.attempt_json(each) for each in attempts]}

    _watch(f"row {row}", read, {"SENT": True, "DEAD": False}, interval, timeout, as_json)


def follow_run(
    run: runs.RunArgument,
    tenant: runs.AnyTenantOption = None,
    interval: IntervalOption = "1s",
    timeout: TimeoutOption = None,
    database: DatabaseOption = None,
    as_json: LinesOption = False,
) -> None:
    """Print status, progress and steps of a run until it ends; the exit code is 1 unless it is COMPLETED."""

    async def read() -> Fields:
        found, steps = await runs.get(database, tenant, run)
        return {**runs.to_json(found), "steps": steps}

    _watch(f"run {run}", read, {"COMPLETED": True, "FAILED": False, "CANCELLED": False}, interval, timeout, as_json)


def follow_message(
    message: Annotated[str, typer.Argument(metavar="MESSAGE", help="Id of the message.", show_default=False)],
    interval: IntervalOption = "1s",
    timeout: TimeoutOption = None,
    database: DatabaseOption = None,
    as_json: LinesOption = False,
) -> None:
    """Print what happens to a message until it is sent; the exit code is 1 if it will not be by itself."""

    async def read() -> Fields:
        return messages.to_json(await messages.get(database, message))

    bad = dict.fromkeys(("FAILED", "PARKED", "SKIPPED", "EXPIRED", "CANCELLED"), False)
    _watch(f"message {message}", read, {"SENT": True, **bad}, interval, timeout, as_json)


def _watch(
    what: str,
    read: Callable[[], Awaitable[Fields]],
    ends: Mapping[str, bool],
    interval: str,
    timeout: str | None,
    as_json: bool,
) -> None:
    pause_s = max(0.05, common.duration("--interval", interval).total_seconds())
    limit_s = None if timeout is None else common.duration("--timeout", timeout).total_seconds()
    last = common.wait_for(_until_settled(what, read, ends, pause_s, limit_s, as_json))
    if not ends[last["status"]]:
        reason = last.get("lastError") or last.get("errorMessage") or ""
        raise Done("" if as_json else f"{what} is {last['status']}{': ' if reason else ''}{common.short(reason)}")


async def _until_settled(
    what: str,
    read: Callable[[], Awaitable[Fields]],
    ends: Mapping[str, bool],
    pause_s: float,
    limit_s: float | None,
    as_json: bool,
) -> Fields:
    give_up = None if limit_s is None else time.monotonic() + limit_s
    before: Fields = {}
    is_away = False
    while True:
        try:
            found = await read()
        except DatabaseUnavailable as error:
            if not before:  # at the first look it is an error like any other
                raise
            if not is_away:
                common.err.print(f"bullpen: {error}; waiting for it", markup=False)
            is_away = True
        else:
            is_away = False
            if found != before:
                _print(before, found, as_json)
                before = found
            if found["status"] in ends:
                return found
        if give_up is not None and time.monotonic() + pause_s > give_up:
            raise TimeUp(f"{what} is still {before['status']} after {limit_s:g} s")
        await asyncio.sleep(pause_s)


def _print(before: Fields, found: Fields, as_json: bool) -> None:
    if as_json:
        common.print_line(found)
        return
    news = {name: value for name, value in found.items() if name not in _NOT_NEWS and before.get(name) != value}
    if before and not news and before["status"] == found["status"]:
        return
    shown = ", ".join(f"{name} {common.short(value, limit=60)}" for name, value in news.items()) if before else ""
    now = common.when(int(time.time() * 1000))
    common.out.print(f"{now}  {found['status']:<10}  {shown}".rstrip(), markup=False)
