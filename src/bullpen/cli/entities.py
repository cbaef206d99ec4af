"""`bullpen workflows` for entities at work: send an event, follow an entity, ask whether transports answer.

Elsewhere: what workflows are, and their past (`workflows`).
"""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

import typer

from bullpen._kernel.command_line import command_line
from bullpen.cli import common
from bullpen.cli.common import Done, JsonOption, TimeUp, WrongCommand
from bullpen.cli.run_app import load_app
from bullpen.cli.watch import IntervalOption, LinesOption, TimeoutOption
from bullpen.cli.workflows import NameArgument, TargetArgument, TenantOption, UrnArgument, find, move_json
from bullpen.errors import EntityNotFound, word

EventArgument = Annotated[str, typer.Argument(metavar="EVENT", help="Name of the event.", show_default=False)]
PayloadOption = Annotated[
    str | None, typer.Option("--payload", metavar="JSON", help="What comes with it; '-' reads stdin.")
]
KeyOption = Annotated[str | None, typer.Option("--key", metavar="TEXT", help="The same key counts once.")]


def add_to(group: typer.Typer) -> None:
    """Register the commands of this module."""
    for command in (send, follow, check):
        group.command()(command)


def send(
    target: TargetArgument,
    name: NameArgument,
    event: EventArgument,
    urn: UrnArgument,
    payload: PayloadOption = None,
    delay: Annotated[str, typer.Option(metavar="TIME", help="Let it come later: 1500 (ms), 90s, 15m, 2h.")] = "0",
    key: KeyOption = None,
    tenant: TenantOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let the workflow's transport carry an event; whoever runs the workflow applies it."""
    content = None if payload is None else common.parse_json("--payload", payload)
    later = common.duration("--delay", delay)
    app = load_app(target)
    workflow = find(app, name)
    wanted = workflow.event(event)

    async def work() -> str:
        async with app:
            receipt = await workflow.send(wanted, urn, content, delay=later, idempotency_key=key, tenant_id=tenant)
            return str(receipt.id)

    receipt = common.wait_for(work())
    if as_json:
        common.print_json({"id": receipt})
    else:
        common.out.print(f"sent: {receipt}", markup=False)


def follow(
    target: TargetArgument,
    name: NameArgument,
    urn: UrnArgument,
    until: Annotated[
        str | None, typer.Option(metavar="STATE", help="End there.", show_default="a final state, or failed")
    ] = None,
    interval: IntervalOption = "1s",
    timeout: TimeoutOption = None,
    tenant: TenantOption = None,
    as_json: LinesOption = False,
) -> None:
    """Print the moves of an entity until it has come to its end; the exit code is 1 if that is failed."""
    pause_s = max(0.05, common.duration("--interval", interval).total_seconds())
    give_up_s = None if timeout is None else common.duration("--timeout", timeout).total_seconds()
    app = load_app(target)
    workflow = find(app, name)
    states = workflow.definition.states
    known = [*map(word, workflow.definition.all_states())]
    if until is not None and until not in known:
        raise WrongCommand(f"workflow {name!r} has no state {until!r}; there is {', '.join(known)}")
    ends = {*map(word, states.finals), word(states.failed)} if until is None else {until, word(states.failed)}

    async def work() -> str:
        give_up = None if give_up_s is None else time.monotonic() + give_up_s
        seen: set[tuple[object, ...]] = set()  # one event may make several moves under one version
        async with app:
            while True:
                entity = await workflow.load(urn, tenant_id=tenant)
                if entity is None:
                    raise EntityNotFound(workflow.name, urn)
                status = word(workflow.store.status(entity))  # before its moves: none of them is left out
                for each in await workflow.history(urn, limit=1_000, tenant_id=tenant):
                    if (move := (each.version, each.at, each.source, each.target)) not in seen:
                        seen.add(move)
                        _print(move_json(each), as_json)
                if status in ends:
                    return status
                if give_up is not None and time.monotonic() + pause_s > give_up:
                    raise TimeUp(f"{urn} is still {status} after {give_up_s:g} s")
                await asyncio.sleep(pause_s)

    status = common.wait_for(work())
    if not as_json:
        common.out.print(f"{urn} is {status}", markup=False)
    if status == word(states.failed) and until != status:
        line = command_line("workflows explain", target, name, urn)
        raise Done("" if as_json else f"{urn} has failed; `{line}` tells more")


def check(target: TargetArgument, as_json: JsonOption = False) -> None:
    """Ask the transport of every workflow whether it answers. The exit code is 1 if one does not."""
    app = load_app(target)

    async def work() -> list[dict[str, Any]]:
        found = []
        async with app:
            for each in app.workflows.all:
                transport = "" if each.binding is None else each.binding.label
                healthy = each.client is None or await each.client.is_healthy()
                problem = "" if healthy else "does not answer"
                found.append({"workflow": each.name, "transport": transport, "healthy": healthy, "problem": problem})
        return found

    found = common.wait_for(work())
    if as_json:
        common.print_json(found)
    else:
        rows = [(each["workflow"], each["transport"], each["problem"] or "ok") for each in found]
        common.print_table(("workflow", "transport", "answers"), rows)
    if not all(each["healthy"] for each in found):
        raise Done("")


def _print(move: dict[str, Any], as_json: bool) -> None:
    if as_json:
        common.print_line(move)
    else:
        reason = f"  {common.short(move['reason'])}" if move["reason"] else ""
        line = f"{move['at']}  {move['from']} --{move['event'] or ''}--> {move['to']} ({move['kind']}){reason}"
        common.out.print(line, markup=False)
