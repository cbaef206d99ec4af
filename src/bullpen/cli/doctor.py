"""`bullpen doctor`: what is wrong, or will be, and what to do about it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

from bullpen._kernel.command_line import command_line
from bullpen.cli import show
from bullpen.cli.config import taken_from
from bullpen.cli.context import Done, brokers_of
from bullpen.cli.programs import OnProgram
from bullpen.cli.tree import Option

if TYPE_CHECKING:
    from bullpen.app import Bullpen
    from bullpen.ops.doctor import Advice
    from bullpen.settings import Settings

_TIMEOUT_S: Final = 10.0
_REPAIR: Final = "start the broker, or correct its address: BULLPEN_RABBITMQ_URL, BULLPEN_KAFKA_BROKERS"
_STYLES: Final = {"good": "green", "unknown": "cyan", "warning": "yellow", "broken": "bold red"}


@dataclass(frozen=True, kw_only=True)
class Examined(OnProgram):
    """What is checked."""

    program: Annotated[
        str | None,
        Option("--app", metavar="MODULE:APP", help="Program whose brokers and dead letters are checked too."),
    ] = None


async def doctor(
    at: Examined,
    everything: Annotated[bool, Option("--all", help="Also show the checks that passed.")] = False,
    strict: Annotated[bool, Option("--strict", help="Exit with 1 for warnings as well.")] = False,
) -> None:
    """Check the server, all queues, the ledger, and the brokers of the settings or a program. Changes nothing.

    The exit code is 1 if something is broken, such as jobs that wait without a worker; with --strict also for warnings.
    """
    from bullpen.ops.doctor import Level, examine

    async with at.made() as app:
        ledger = app.ledger if app.settings.has_ledger() else None
        is_needed = app.settings.has_redis() or at.redis is not None or (ledger is None and not brokers_of(app))
        found = [*_settings(app.settings), *[each async for each in _brokers(app)]]
        found += await examine(app.connection if is_needed else None, app.prefix, ledger)
    found.sort(key=lambda advice: -advice.level)
    if at.as_json:
        show.print_json([advice.to_json() for advice in found])
    else:
        _show(found, everything)
    if max((advice.level for advice in found), default=Level.GOOD) >= (Level.WARNING if strict else Level.BROKEN):
        raise Done("")


async def _brokers(app: Bullpen) -> AsyncIterator[Advice]:
    """Whether each broker answers, and what waits in its dead letters."""
    from bullpen.errors import BullpenError
    from bullpen.ops.doctor import Advice, Level
    from bullpen.plugins import transports

    clients: dict[str, Any] = {f"workflow {each.name}": each.client for each in app.workflows.all}
    if app.settings.messages.transport == "rabbitmq" and app.settings.has_ledger():
        clients["messages"] = app.use_messages().messaging
    asked = {type(client) for client in clients.values()}
    ours = [_of_settings(name, app.settings) for name in brokers_of(app) if transports.load(name) not in asked]
    clients |= {f"transport {client.label}": client for client in ours}
    for subject, client in clients.items():
        transport = getattr(client, "transport", None)
        if transport is not None and transport.label not in ("BullMQ", "Memory"):
            reason = await _away_because(transport)
            yield (
                Advice(Level.GOOD, subject, transport.label, "the broker answers")
                if reason is None
                else Advice(Level.BROKEN, subject, transport.label, reason, _REPAIR)
            )
    for client in ours:
        await client.close()
    for store in app.other_dead_letters():
        try:
            depth = await store.depth()
        except BullpenError:
            continue  # its broker was reported above
        if depth:
            text = f"{depth} need attention"
            fix = command_line("dead-letters list", store.name, app="MODULE:APP")
            yield Advice(Level.WARNING, f"store {store.name}", "dead letters", text, fix)


def _of_settings(name: str, settings: Settings) -> Any:
    """A client for where the settings say the broker is, when no program says more."""
    from bullpen.plugins import transports

    kind = transports.load(name)
    return kind(settings.kafka.brokers, workflow="doctor") if name == "kafka" else kind(settings.rabbitmq.urls)


async def _away_because(transport: Any) -> str | None:
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            health = await transport.check()
    except TimeoutError:
        return f"no answer within {_TIMEOUT_S:g} s"
    return None if health.ok else str(health.reason)


def _settings(settings: Settings) -> Iterator[Advice]:
    from bullpen.ops.doctor import Advice, Level
    from bullpen.settings import misspelt_variables

    for name, meant in misspelt_variables().items():
        yield Advice(Level.WARNING, "settings", name, "no setting has this name; it has no effect", f"set {meant}")
    for setting in settings.describe():
        if setting.is_general:
            fix = f"set {setting.variable}, which takes precedence, or leave it if that is intended"
            yield Advice(Level.UNKNOWN, "settings", setting.key, taken_from(setting), fix)


def _show(found: list[Advice], everything: bool) -> None:
    good = sum(advice.level.name == "GOOD" for advice in found)
    for advice in found:
        level = advice.level.name.lower()
        if level == "good" and not everything:
            continue
        show.say_styled((f"{level:<8}", _STYLES[level]), (f"{advice.subject}: {advice.check}: {advice.message}", ""))
        if advice.fix:
            show.say_styled((f"        {advice.fix}", "dim"))
    hint = "" if everything or not good else "; --all shows them"
    show.say(f"{good} of {len(found)} checks passed{hint}")
