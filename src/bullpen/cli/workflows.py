"""`bullpen workflows`: what an application's workflows are, where their entities are, and how they move."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from bullpen._kernel.command_line import command_line
from bullpen._kernel.printable import printable
from bullpen.cli import show
from bullpen.cli.arguments import AppArgument, LimitOption, duration, parse_json
from bullpen.cli.context import Done, Output, WrongCommand
from bullpen.cli.follow import Polling
from bullpen.cli.show import Column, Record
from bullpen.cli.tree import Argument, Group, Option

if TYPE_CHECKING:
    from bullpen.app import Bullpen
    from bullpen.ports.entity import HistoryEntry
    from bullpen.workflow.service import Workflow

    AnyWorkflow = Workflow[Any, Any, Any, Any]

app = Group()

NameArgument = Annotated[str, Argument("WORKFLOW", "Name of the workflow.")]
UrnArgument = Annotated[str, Argument("URN", "Name of the entity.")]
TenantOption = Annotated[str | None, Option("--tenant", metavar="ID", help="Tenant of the entity.")]
PayloadOption = Annotated[
    str | None,
    Option("--payload", metavar="JSON", help="Payload of the event; @FILE reads a file, - reads stdin."),
]


@app.command("list")
def list_(at: Output, target: AppArgument) -> None:
    """List all workflows with their transports and sources."""
    found = _load(target).workflows.all
    at.list(WORKFLOWS, found, empty="the app has no workflows; app.workflow(definition) registers one")


@app.command("show")
def show_(at: Output, target: AppArgument, name: NameArgument) -> None:
    """Show the transitions of one workflow."""
    from bullpen.errors import word

    _, workflow = _find(target, name)
    moves = [
        {
            "from": [word(state) for state in each.sources],
            "event": [word(event) for event in each.events],
            "to": word(each.to),
            "conditions": [getattr(one, "__name__", repr(one)) for one in each.conditions],
            "actions": [getattr(one, "__name__", repr(one)) for one in each.actions],
        }
        for each in workflow.definition.transitions
    ]
    if not at.as_json:
        at.table([Column(title) for title in _MOVE], [{name: _joined(each[name]) for name in _MOVE} for each in moves])
        return
    states = workflow.definition.states
    rests = {"idles": [*map(word, states.idles)], "finals": [*map(word, states.finals)]}
    at.say({**_describe(workflow), **rests, "failed": word(states.failed), "moves": moves})


_MOVE = ("from", "event", "to", "conditions", "actions")


@app.command()
def lint(at: Output, target: AppArgument) -> None:
    """Check the definitions. The exit code is 1 when there is a finding."""
    found = [(each.name, finding) for each in _load(target).workflows.all for finding in each.findings]
    document = [{"workflow": name, "level": one.level, "code": one.code, "text": one.text} for name, one in found]
    at.say(document, *(f"{name}: {one}" for name, one in found) if found else ("nothing is doubtful",))
    if found:
        raise at.failed(f"{len(found)} findings")


@app.command()
def diagram(
    target: AppArgument,
    name: NameArgument,
    form: Annotated[Literal["mermaid", "svg"], Option("--format", help="What to write.")] = "mermaid",
    output: Annotated[Path | None, Option("--output", "-o", metavar="FILE", help="Else to stdout.")] = None,
) -> None:
    """Draw the states of one workflow."""
    _, workflow = _find(target, name)
    text = workflow.svg() if form == "svg" else workflow.mermaid()
    if output is None:
        print(printable(text), end="")
    else:
        output.write_text(text, encoding="utf-8")
        show.warn(f"written to {output}")


@app.command()
def simulate(
    at: Output,
    target: AppArgument,
    name: NameArgument,
    events: Annotated[list[str], Argument("EVENT...", "Events, in order.")],
    start: Annotated[str | None, Option("--from", metavar="STATE", help="Where to begin.")] = None,
) -> None:
    """Follow events through the states without effects: conditions get an empty entity, and no action runs."""
    _, workflow = _find(target, name)
    state = None if start is None else _state(workflow, start)
    found = workflow.simulate([workflow.event(each) for each in events], start=state)
    moves = [{"event": each.event, "from": each.source, "to": each.target, "kind": each.kind} for each in found.moves]
    at.say({"start": found.start, "moves": moves, "refused": found.refused, "end": found.end}, found)


@app.command()
async def history(
    at: Output,
    target: AppArgument,
    name: NameArgument,
    urn: UrnArgument,
    tenant: TenantOption = None,
    limit: LimitOption = 50,
) -> None:
    """Show the newest transitions of an entity."""
    app, workflow = _find(target, name)
    async with app:
        past = await workflow.history(urn, limit=limit, tenant_id=tenant)
    at.list(MOVES, past, empty="no history of this entity; the store may keep none")


@app.command()
async def explain(
    at: Output,
    target: AppArgument,
    name: NameArgument,
    urn: UrnArgument,
    payload: PayloadOption = None,
    tenant: TenantOption = None,
) -> None:
    """Show the state of an entity, its last transitions, and what each event would do now."""
    app, workflow = _find(target, name)
    shown = None if payload is None else parse_json("--payload", payload)
    async with app:
        found = await workflow.explain(urn, shown, tenant_id=tenant)
    at.say(found.to_json(), found)


@app.command()
async def send(
    at: Output,
    target: AppArgument,
    name: NameArgument,
    event: Annotated[str, Argument("EVENT", "Name of the event.")],
    urn: UrnArgument,
    payload: PayloadOption = None,
    delay: Annotated[str, Option(metavar="TIME", help="Delay it: 1500 (ms), 90s, 15m, 2h.")] = "0",
    key: Annotated[
        str | None, Option("--key", metavar="TEXT", help="Events with the same key are handled once.")
    ] = None,
    tenant: TenantOption = None,
) -> None:
    """Send an event over the workflow's transport. A process that runs the workflow applies it."""
    content = None if payload is None else parse_json("--payload", payload)
    later = duration("--delay", delay)
    app, workflow = _find(target, name)
    wanted = workflow.event(event)
    async with app:
        receipt = await workflow.send(wanted, urn, content, delay=later, idempotency_key=key, tenant_id=tenant)
    at.say({"id": str(receipt.id)}, f"sent: {receipt.id}")


@app.command()
async def follow(
    at: Polling,
    target: AppArgument,
    name: NameArgument,
    urn: UrnArgument,
    until: Annotated[str | None, Option(metavar="STATE", help="End there.", default="a final state, or failed")] = None,
    tenant: TenantOption = None,
) -> None:
    """Print the transitions of an entity until it ends; the exit code is 1 if it ended as failed."""
    from bullpen.errors import EntityNotFound, word

    at.check()
    app, workflow = _find(target, name)
    states = workflow.definition.states
    failed = word(states.failed)
    ends = {*map(word, states.finals), failed} if until is None else {word(_state(workflow, until)), failed}

    async def read() -> tuple[str, list[HistoryEntry]]:
        entity = await workflow.load(urn, tenant_id=tenant)
        if entity is None:
            raise EntityNotFound(workflow.name, urn)
        status = word(workflow.store.status(entity))  # before its moves: none of them is left out
        return status, list(await workflow.history(urn, limit=1_000, tenant_id=tenant))

    seen: set[tuple[object, ...]] = set()  # one event may make several moves under one version
    status = ""
    steps = at.polled(read, lambda found: found[0] in ends, lambda found: f"{urn} is still {found[0]}")
    async with app:
        async for found in steps:
            status = found[0]
            for each in found[1]:
                if (move := (each.version, each.at, each.source, each.target)) not in seen:
                    seen.add(move)
                    _print_move(at, move_json(each))
    if not at.as_json:
        show.say(f"{urn} is {status}")
    if status == failed and until != status:
        line = command_line("workflows explain", target, name, urn)
        raise at.failed(f"{urn} has failed; `{line}` shows more")


@app.command()
async def check(at: Output, target: AppArgument) -> None:
    """Check the transport of every workflow. The exit code is 1 if one does not answer."""
    found = []
    async with (app := _load(target)):
        for each in app.workflows.all:
            transport = "" if each.binding is None else each.binding.label
            healthy = each.client is None or await each.client.is_healthy()
            problem = "" if healthy else "does not answer"
            found.append({"workflow": each.name, "transport": transport, "healthy": healthy, "problem": problem})
    at.list(HEALTH, found, empty="the app has no workflows; app.workflow(definition) registers one")
    if not all(each["healthy"] for each in found):
        raise Done("")


# Finding ------------------------------------------------------------------------------------------------------------


def _load(target: str) -> Bullpen:
    from bullpen.cli.programs import load_app

    return load_app(target)


def _find(target: str, name: str) -> tuple[Bullpen, AnyWorkflow]:
    from bullpen.errors import NotConfigured

    app = _load(target)
    for each in app.workflows.all:
        if each.name == name:
            return app, each
    known = ", ".join(each.name for each in app.workflows.all)
    raise NotConfigured(f"the app has no workflow {name!r}; there is {known or 'none'}")


def _state(workflow: AnyWorkflow, named: str) -> Any:
    from bullpen.errors import word

    known = {word(each): each for each in workflow.definition.all_states()}
    if named not in known:
        raise WrongCommand(f"workflow {workflow.name!r} has no state {named!r}; there is {', '.join(known)}")
    return known[named]


# How they are shown -------------------------------------------------------------------------------------------------


def move_json(each: HistoryEntry) -> dict[str, Any]:
    """One move of an entity."""
    return {
        "at": each.at,
        "from": each.source,
        "event": each.event,
        "to": each.target,
        "kind": each.kind,
        "version": each.version,
        "jobId": each.job_id,
        "correlationId": each.correlation_id,
        "reason": each.reason,
    }


def _print_move(at: Output, move: dict[str, Any]) -> None:
    reason = f"  {show.short(move['reason'])}" if move["reason"] else ""
    steps = f"  {move['from']} --{move['event'] or ''}--> {move['to']} ({move['kind']}){reason}"
    at.line(move, (at.when(move["at"]), "dim"), (steps, ""))


def _describe(workflow: AnyWorkflow) -> dict[str, Any]:
    binding = workflow.binding
    return {
        "workflow": workflow.name,
        "transport": "" if binding is None else binding.label,
        "sources": [] if binding is None else [*binding.routes()],
        "states": len(workflow.definition.all_states()),
        "transitions": len(workflow.definition.transitions),
        "findings": len(workflow.findings),
    }


def _joined(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list) else str(value)


WORKFLOWS = Record(
    _describe,
    (
        *(Column("workflow"), Column("transport", worth=1)),
        Column("sources", lambda each: _joined(each["sources"]), least=16),
        *(Column(title, worth=2) for title in ("states", "transitions")),
        Column("findings"),
    ),
)
MOVES = Record(
    move_json,
    (
        *(Column("at"), Column("from"), Column("event"), Column("to")),
        *(Column("kind", worth=2), Column("jobId", worth=3), Column("reason", worth=1, least=16)),
    ),
)
HEALTH = Record(
    lambda each: each,
    (Column("workflow"), Column("transport"), Column("answers", lambda each: each["problem"] or "ok")),
)
