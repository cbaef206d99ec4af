"""`bullpen projector`: how far projectors are, what they parked, and events of the past for a new route."""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bullpen.cli import common
from bullpen.cli.common import Done, JsonOption, WrongCommand
from bullpen.cli.outbox import DatabaseOption, open_ledger, settings_for, whoami
from bullpen.cli.run_app import load_app

if TYPE_CHECKING:
    from bullpen.app import Bullpen
    from bullpen.ledger import ParkedEvent
    from bullpen.outbox import Backfilled, Projector, ProjectorStatus

app = typer.Typer(
    help="See how far projectors are, retry or skip parked events, backfill a route.", no_args_is_help=True
)
parked = typer.Typer(help="Events that no projector could take: list, show, retry, skip.", no_args_is_help=True)
app.add_typer(parked, name="parked")

AppArgument = Annotated[
    str, typer.Argument(metavar="MODULE:APP", help="Where the Bullpen object is; ':app' may be left out.")
]
NameOption = Annotated[str, typer.Option("--projector", metavar="NAME", help="Which projector of the app.")]
EventsArgument = Annotated[
    list[int] | None, typer.Argument(metavar="[EVENT]...", help="Numbers of parked events.", show_default=False)
]
AllOption = Annotated[bool, typer.Option("--all", help="All parked events.")]


@app.command()
def status(target: AppArgument, as_json: JsonOption = False) -> None:
    """Show position, lag, parked events and routes of every projector of an application."""
    found = common.wait_for(_status(load_app(target)))
    if as_json:
        common.print_json([_status_json(each) for each in found])
        return
    rows = [
        (
            each.name,
            each.source,
            "" if each.position is None else each.position,
            "unknown" if each.head is None else each.head,
            "unknown" if each.lag is None else each.lag,
            each.parked,
            ", ".join(f"{route} {since}" for route, since in each.routes.items()),
        )
        for each in found
    ]
    columns = ("projector", "source", "position", "head", "lag", "parked", "routes")
    common.print_table(columns, rows, numbers=["position", "head", "lag", "parked"])


@app.command()
def backfill(
    target: AppArgument,
    route: Annotated[str, typer.Argument(metavar="ROUTE", help="Name of the route.", show_default=False)],
    since: Annotated[
        str, typer.Option(metavar="WHERE", help="'beginning', a position, or an instant such as 2026-05-01T00:00:00Z.")
    ],
    name: NameOption = "default",
    restart: Annotated[bool, typer.Option("--restart", help="Begin again instead of going on.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Send events of the past through one route, up to where it is live. May be interrupted, and goes on then."""
    begin = _since(since)
    if not yes:
        common.ask(f"Send events since {since} through {route!r}? Its target gets all of them")
    done = common.wait_for(_backfill(load_app(target), name, route, begin, restart, quiet=as_json))
    result = {
        "events": done.done.events,
        "created": done.done.created,
        "duplicates": done.done.duplicates,
        "parked": done.done.parked,
        "position": done.position,
    }
    if as_json:
        common.print_json(result)
    else:
        common.out.print(", ".join(f"{word}: {count}" for word, count in result.items()))


@parked.command("list")
def list_(
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 50,
    name: Annotated[str | None, typer.Option("--projector", metavar="NAME", help="Only of this projector.")] = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """List parked events, oldest first."""
    found = common.wait_for(_find(database, projector=name, limit=limit))
    if as_json:
        common.print_json([_parked_json(each) for each in found])
    elif not found:
        common.err.print("nothing is parked")
    else:
        rows = [
            (
                each.id,
                each.projector,
                each.route or "",
                each.event.type,
                each.event.stream,
                each.event.id,
                each.tries,
                "wanted" if each.retry_wanted else "",
                common.short(each.error, limit=80),
            )
            for each in found
        ]
        columns = ("event", "projector", "route", "type", "stream", "id", "tries", "retry", "error")
        common.print_table(columns, rows, numbers=["event", "tries"])


@parked.command()
def show(
    event: Annotated[int, typer.Argument(metavar="EVENT", help="Number of the parked event.", show_default=False)],
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one parked event with its content."""
    found = common.wait_for(_find(database, ids=[event]))
    if not found:
        raise Done(f"there is no parked event {event}")
    fields = {
        **_parked_json(found[0]),
        "data": _text(found[0].event.data_bytes),
        "metadata": _text(found[0].event.metadata_bytes),
    }
    if as_json:
        common.print_json(fields)
    else:
        common.print_table(
            ("field", "value"), [(key, common.short(value, limit=10_000)) for key, value in fields.items()]
        )


@parked.command()
def retry(
    events: EventsArgument = None,
    everything: AllOption = False,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let the running projector try parked events again, with the mappers it has now."""
    _decide("retry", events, everything, database, as_json)


@parked.command()
def skip(
    events: EventsArgument = None,
    everything: AllOption = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Pass over parked events for good: no message will ever come of them."""
    if not yes:
        common.ask("Pass over these events for good?")
    _decide("skip", events, everything, database, as_json)


# Doing --------------------------------------------------------------------------------------------------------------


async def _status(bullpen: Bullpen) -> list[ProjectorStatus]:
    async with bullpen:
        if not bullpen.projectors:
            raise Done("the app has no projector; register one with app.projector(routes)")
        await bullpen.prepare()
        return [await projector.status() for projector in bullpen.projectors]


async def _backfill(bullpen: Bullpen, name: str, route: str, since: Any, restart: bool, *, quiet: bool) -> Backfilled:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    async with bullpen:
        projector = _named(bullpen, name)
        await bullpen.prepare()
        with Progress(*columns, console=common.err, disable=quiet, transient=True) as bar:
            task = bar.add_task(f"backfilling {route}", total=None)

            def advance(so_far: Backfilled) -> None:
                total = so_far.until - so_far.begin
                bar.update(task, total=total, completed=min(total, so_far.position - so_far.begin))

            return await projector.backfill(route, since=since, restart=restart, progress=advance)


def _named(bullpen: Bullpen, name: str) -> Projector:
    for projector in bullpen.projectors:
        if projector.name == name:
            return projector
    known = ", ".join(projector.name for projector in bullpen.projectors) or "none"
    raise WrongCommand(f"the app has no projector {name!r}; there is {known}")


async def _find(database: str | None, **filters: Any) -> list[ParkedEvent]:
    async with open_ledger(settings_for(database)) as ledger:
        return await ledger.parked.find(**filters)


def _decide(verb: str, events: list[int] | None, everything: bool, database: str | None, as_json: bool) -> None:
    if bool(events) == everything:
        raise WrongCommand("name the events, or say --all")
    done = common.wait_for(_do(database, verb, events))
    if as_json:
        common.print_json({verb: done})
    else:
        common.out.print(f"{verb}: {len(done)}")
    if events and len(done) < len(events):
        raise Done("" if as_json else f"not there: {', '.join(str(each) for each in set(events) - set(done))}")


async def _do(database: str | None, verb: str, events: list[int] | None) -> list[int]:
    async with open_ledger(settings_for(database)) as ledger:
        chosen = events or [each.id for each in await ledger.parked.find(limit=1_000_000)]
        act = ledger.parked.retry if verb == "retry" else ledger.parked.skip
        return await act(chosen, by=whoami())


# Small things -------------------------------------------------------------------------------------------------------


def _since(text: str) -> int | datetime | str:
    if text == "beginning":
        return text
    if text.lstrip("-").isdigit():
        return int(text)
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        instant = None
    if instant is None or instant.tzinfo is None:
        raise WrongCommand(f"--since {text!r}: write 'beginning', a position, or an instant with its zone")
    return instant


def _text(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return content.decode("utf-8", "backslashreplace")


def _status_json(status: ProjectorStatus) -> dict[str, Any]:
    return {
        "name": status.name,
        "source": status.source,
        "position": status.position,
        "head": status.head,
        "lag": status.lag,
        "parked": status.parked,
        "routes": status.routes,
        "backfills": status.backfills,
    }


def _parked_json(parked: ParkedEvent) -> dict[str, Any]:
    return {
        "event": parked.id,
        "projector": parked.projector,
        "route": parked.route,
        "type": parked.event.type,
        "stream": parked.event.stream,
        "id": parked.event.id,
        "position": parked.event.position,
        "tries": parked.tries,
        "retryWanted": parked.retry_wanted,
        "error": parked.error,
        "parkedAt": common.when(int(parked.parked_at.timestamp() * 1000)),
    }
