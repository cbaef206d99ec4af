"""`bullpen workflows`: what an application's workflows are, and where their entities are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from bullpen._kernel.printable import printable
from bullpen.app import Bullpen
from bullpen.cli import common
from bullpen.cli.common import Done, JsonOption, WrongCommand
from bullpen.cli.run_app import load_app
from bullpen.errors import NotConfigured, word
from bullpen.ports.entity import HistoryEntry
from bullpen.workflow.service import Workflow

app = typer.Typer(help="List the workflows of an application; show, lint, draw, simulate; look at their entities.")

TargetArgument = Annotated[
    str, typer.Argument(metavar="MODULE:APP", help="Where the Bullpen object is; ':app' may be left out.")
]
NameArgument = Annotated[str, typer.Argument(metavar="WORKFLOW", help="Name of the workflow.", show_default=False)]
UrnArgument = Annotated[str, typer.Argument(metavar="URN", help="Name of the entity.", show_default=False)]
TenantOption = Annotated[str | None, typer.Option("--tenant", metavar="ID", help="Tenant of the entity.")]
AnyWorkflow = Workflow[Any, Any, Any, Any]


@app.command("list")
def list_(target: TargetArgument, as_json: JsonOption = False) -> None:
    """List all workflows with their transports and sources."""
    rows = [_describe(each) for each in load_app(target).workflows.all]
    if as_json:
        common.print_json(rows)
    elif not rows:
        common.err.print("the app has no workflows")
    else:
        columns = ("workflow", "transport", "sources", "states", "transitions", "findings")
        shown = [[each[name] if name != "sources" else ", ".join(each[name]) for name in columns] for each in rows]
        common.print_table(columns, shown, numbers=columns[3:])


@app.command()
def show(target: TargetArgument, name: NameArgument, as_json: JsonOption = False) -> None:
    """Show the transitions of one workflow."""
    workflow = find(load_app(target), name)
    rows = [
        {
            "from": [word(state) for state in each.sources],
            "event": [word(event) for event in each.events],
            "to": word(each.to),
            "conditions": [getattr(one, "__name__", repr(one)) for one in each.conditions],
            "actions": [getattr(one, "__name__", repr(one)) for one in each.actions],
        }
        for each in workflow.definition.transitions
    ]
    if as_json:
        states = workflow.definition.states
        rests = {"idles": [*map(word, states.idles)], "finals": [*map(word, states.finals)]}
        common.print_json({**_describe(workflow), **rests, "failed": word(states.failed), "moves": rows})
        return
    columns = ("from", "event", "to", "conditions", "actions")
    common.print_table(columns, [[_joined(each[column]) for column in columns] for each in rows])


@app.command()
def lint(target: TargetArgument, as_json: JsonOption = False) -> None:
    """Tell what is doubtful about the definitions. Ends with 1 when anything is."""
    found = [(each.name, finding) for each in load_app(target).workflows.all for finding in each.findings]
    if as_json:
        common.print_json(
            [{"workflow": name, "level": one.level, "code": one.code, "text": one.text} for name, one in found]
        )
    else:
        for name, finding in found:
            common.out.print(f"{name}: {finding}", markup=False)
    if found:
        raise Done("" if as_json else f"{len(found)} findings")
    if not as_json:
        common.out.print("nothing is doubtful")


@app.command()
def diagram(
    target: TargetArgument,
    name: NameArgument,
    picture: Annotated[str, typer.Option("--format", metavar="FORMAT", help="mermaid or svg.")] = "mermaid",
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Else to stdout.")] = None,
) -> None:
    """Draw the states of one workflow."""
    if picture not in ("mermaid", "svg"):
        raise WrongCommand(f"{picture!r} is no format; write mermaid or svg")
    workflow = find(load_app(target), name)
    text = workflow.svg() if picture == "svg" else workflow.mermaid()
    if output is None:
        print(printable(text), end="")
    else:
        output.write_text(text, encoding="utf-8")
        common.err.print(f"written to {output}", markup=False)


@app.command()
def simulate(
    target: TargetArgument,
    name: NameArgument,
    events: Annotated[list[str], typer.Argument(metavar="EVENT...", help="Events in their order.")],
    start: Annotated[str | None, typer.Option("--from", metavar="STATE", help="Where to begin.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Follow events through the states. Nothing is done: conditions see a blank entity, no action runs."""
    workflow = find(load_app(target), name)
    state = next((each for each in workflow.definition.all_states() if word(each) == start), None)
    if start is not None and state is None:
        known = ", ".join(map(word, workflow.definition.all_states()))
        raise WrongCommand(f"workflow {name!r} has no state {start!r}; there is {known}")
    told = workflow.simulate([workflow.event(each) for each in events], start=state)
    if as_json:
        moves = [
            {"event": each.event, "from": each.source, "to": each.target, "kind": each.kind} for each in told.moves
        ]
        common.print_json({"start": told.start, "moves": moves, "refused": told.refused, "end": told.end})
    else:
        common.out.print(str(told), markup=False)


@app.command()
def history(
    target: TargetArgument,
    name: NameArgument,
    urn: UrnArgument,
    tenant: TenantOption = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many, the newest.")] = 50,
    as_json: JsonOption = False,
) -> None:
    """Show how an entity came to its state."""
    app = load_app(target)
    workflow = find(app, name)

    async def work() -> list[dict[str, Any]]:
        async with app:
            past = await workflow.history(urn, limit=limit, tenant_id=tenant)
        return [move_json(each) for each in past]

    found = common.wait_for(work())
    if as_json:
        common.print_json(found)
    elif not found:
        common.err.print("no history of this entity; the store may keep none")
    else:
        columns = ("at", "from", "event", "to", "kind", "jobId", "reason")
        common.print_table(columns, [[each[column] or "" for column in columns] for each in found])


@app.command()
def explain(
    target: TargetArgument,
    name: NameArgument,
    urn: UrnArgument,
    payload: Annotated[
        str | None, typer.Option("--payload", metavar="JSON", help="Shown to the conditions; '-' reads stdin.")
    ] = None,
    tenant: TenantOption = None,
    as_json: JsonOption = False,
) -> None:
    """Tell where an entity is, how it came there, and what each event would do now."""
    app = load_app(target)
    workflow = find(app, name)
    shown = None if payload is None else common.parse_json("--payload", payload)

    async def work() -> Any:
        async with app:
            return await workflow.explain(urn, shown, tenant_id=tenant)

    told = common.wait_for(work())
    if as_json:
        common.print_json(told.to_json())
    else:
        common.out.print(str(told), markup=False)


def find(app: Bullpen, name: str) -> AnyWorkflow:
    for each in app.workflows.all:
        if each.name == name:
            return each
    known = ", ".join(each.name for each in app.workflows.all)
    raise NotConfigured(f"the app has no workflow {name!r}; there is {known or 'none'}")


def move_json(each: HistoryEntry) -> dict[str, Any]:
    """One move of an entity."""
    return {
        "at": each.at.isoformat(timespec="milliseconds"),
        "from": each.source,
        "event": each.event,
        "to": each.target,
        "kind": each.kind,
        "version": each.version,
        "jobId": each.job_id,
        "correlationId": each.correlation_id,
        "reason": each.reason,
    }


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
