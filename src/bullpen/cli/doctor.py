"""`bullpen doctor`: what is wrong, or will be, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from bullpen.app import Bullpen
from bullpen.cli import common
from bullpen.cli.common import Done, JsonOption, PrefixOption, RedisOption
from bullpen.cli.config import taken_from
from bullpen.ops.doctor import Advice, Level, examine
from bullpen.settings import Settings

_STYLES = {Level.GOOD: "green", Level.UNKNOWN: "cyan", Level.WARNING: "yellow", Level.BROKEN: "bold red"}


def doctor(
    everything: Annotated[bool, typer.Option("--all", help="Show also what is good.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 for warnings too.")] = False,
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """Look at the server, all queues and the ledger. Changes nothing.

    The exit code is 1 if something is broken, such as jobs that wait without a worker; with --strict also for warnings.
    """
    found = common.wait_for(_ask(redis, prefix))
    if as_json:
        common.print_json([advice.to_json() for advice in found])
    else:
        _show(found, everything)
    worst = max((advice.level for advice in found), default=Level.GOOD)
    if worst >= (Level.WARNING if strict else Level.BROKEN):
        raise Done("")


async def _ask(redis: str | None, prefix: str | None) -> list[Advice]:
    async with Bullpen(redis, prefix=prefix) as app:
        ledger = app.ledger if app.settings.has_ledger() else None
        connection = app.connection if app.settings.has_redis() or ledger is None else None
        found = [*_settings(app.settings), *await examine(connection, app.prefix, ledger)]
        return sorted(found, key=lambda advice: -advice.level)


def _settings(settings: Settings) -> Iterator[Advice]:
    for setting in settings.describe():
        if setting.is_general:
            fix = f"set {setting.variable}, which wins, or nothing if it is meant"
            yield Advice(Level.UNKNOWN, "settings", setting.key, taken_from(setting), fix)


def _show(found: list[Advice], everything: bool) -> None:
    for advice in found:
        if advice.level is Level.GOOD and not everything:
            continue
        common.out.print(f"[{_STYLES[advice.level]}]{advice.level.name.lower():<8}[/]", end="")
        common.out.print(f"{advice.subject}: {advice.check}: {advice.message}", markup=False, highlight=False)
        if advice.fix:
            common.out.print(f"        {advice.fix}", markup=False, highlight=False, style="dim")
    good = sum(advice.level is Level.GOOD for advice in found)
    hint = "" if everything or not good else "; --all shows them"
    common.out.print(f"{good} of {len(found)} answers are good{hint}", highlight=False)
