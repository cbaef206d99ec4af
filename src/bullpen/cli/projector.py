"""`bullpen projectors`: how far projectors are, what they parked, and events of the past for a new route."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import click

from bullpen.cli.arguments import AllOption, AppArgument, LimitOption, YesOption, instant, one_way
from bullpen.cli.context import Done, OnLedger, Output, WrongCommand, ask, whoami
from bullpen.cli.show import Column, Record
from bullpen.cli.tree import Argument, Group, Option

if TYPE_CHECKING:
    from bullpen.app import Bullpen
    from bullpen.ledger import ParkedEvent
    from bullpen.outbox import Backfilled, Projector, ProjectorStatus

app = Group()
parked = app.group("parked", "List, show, retry and skip events that a projector could not handle.")

EventsArgument = Annotated[list[int] | None, Argument("[EVENT]...", "Numbers of parked events.")]


@app.command("list")
async def list_(at: Output, target: AppArgument) -> None:
    """List the projectors of an application: position, lag, parked events and routes."""
    from bullpen.cli.programs import load_app

    async with load_app(target) as opened:
        if not opened.projectors:
            raise Done("the app has no projector; register one with app.projector(routes)")
        await opened.prepare()
        found = [await projector.status() for projector in opened.projectors]
    at.list(PROJECTORS, found, empty="")


@app.command()
async def backfill(
    at: Output,
    target: AppArgument,
    route: Annotated[str, Argument("ROUTE", "Name of the route.")],
    since: Annotated[
        str, Option(metavar="WHERE", help="'beginning', a position, or an instant such as 2026-05-01T00:00:00Z.")
    ],
    name: Annotated[str, Option("--projector", metavar="NAME", help="Which projector of the app.")] = "default",
    restart: Annotated[bool, Option("--restart", help="Start from the beginning instead of continuing.")] = False,
    yes: YesOption = False,
) -> None:
    """Send past events through one route, up to its live position. If interrupted, run it again to continue."""
    from bullpen.cli.programs import load_app

    begin = _since(since)
    if not yes:
        ask(f"Send events since {since} through {route!r}? Its target gets all of them")
    async with load_app(target) as opened:
        projector = _named(opened, name)
        await opened.prepare()
        with at.bar(f"backfilling {route}", None) as move:

            def advance(so_far: Backfilled) -> None:
                total = so_far.until - so_far.begin
                move(min(total, so_far.position - so_far.begin), total=total)

            done = await projector.backfill(route, since=begin, restart=restart, progress=advance)
    counts = {name: getattr(done.done, name) for name in ("events", "created", "duplicates", "parked")}
    result = {**counts, "position": done.position}
    at.say(result, ", ".join(f"{word}: {count}" for word, count in result.items()))


@parked.command("list")
async def list_parked(
    at: OnLedger,
    limit: LimitOption = 50,
    name: Annotated[str | None, Option("--projector", metavar="NAME", help="Only of this projector.")] = None,
) -> None:
    """List parked events, oldest first."""
    async with at.ledger() as ledger:
        found = await ledger.parked.find(projector=name, limit=limit)
    at.list(PARKED, found, empty="nothing is parked; `bullpen projectors list MODULE:APP` shows how far projectors are")


@parked.command()
async def show(
    at: OnLedger,
    event: Annotated[int, Argument("EVENT", "Number of the parked event.")],
) -> None:
    """Show one parked event with its content."""
    async with at.ledger() as ledger:
        found = await ledger.parked.find(ids=[event])
    if not found:
        raise Done(f"there is no parked event {event}")
    content = found[0].event
    at.fields({**parked_json(found[0]), "data": _text(content.data_bytes), "metadata": _text(content.metadata_bytes)})


@parked.command()
async def retry(at: OnLedger, events: EventsArgument = None, everything: AllOption = False) -> None:
    """Let the running projector try parked events again with its current mappers."""
    await _decide(at, "retry", events, everything)


@parked.command(destroys=True)
async def skip(
    at: OnLedger, events: EventsArgument = None, everything: AllOption = False, yes: YesOption = False
) -> None:
    """Skip parked events for good: no message is made from them."""
    if not yes:
        ask("Skip these events for good?")
    await _decide(at, "skip", events, everything)


async def _decide(at: OnLedger, verb: str, events: list[int] | None, everything: bool) -> None:
    one_way(events, everything, "events")
    async with at.ledger() as ledger:
        chosen = events or [each.id for each in await ledger.parked.find(limit=1_000_000)]
        act = ledger.parked.retry if verb == "retry" else ledger.parked.skip
        done = await act(chosen, by=whoami())
    at.say({verb: done}, f"{verb}: {len(done)}")
    if len(done) < len(events or ()):
        raise at.failed(f"not there: {', '.join(str(each) for each in {*(events or ())} - {*done})}")


def _named(opened: Bullpen, name: str) -> Projector:
    for projector in opened.projectors:
        if projector.name == name:
            return projector
    known = ", ".join(projector.name for projector in opened.projectors) or "none"
    raise WrongCommand(f"the app has no projector {name!r}; there is {known}")


def _since(text: str) -> Any:
    if text == "beginning":
        return text
    if text.lstrip("-").isdigit():
        return int(text)
    try:
        return instant("--since", text, zoned=True)
    except click.BadParameter:
        problem = f"{text!r}: write 'beginning', a position, or an instant with its zone"
        raise click.BadParameter(problem, param_hint="'--since'") from None


# How they are shown -------------------------------------------------------------------------------------------------


def _text(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return content.decode("utf-8", "backslashreplace")


def _status_json(status: ProjectorStatus) -> dict[str, Any]:
    names = ("name", "source", "position", "head", "lag", "parked", "routes", "backfills")
    return {name: getattr(status, name) for name in names}


def parked_json(parked: ParkedEvent) -> dict[str, Any]:
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
        "parkedAt": parked.parked_at,
    }


def _known(title: str) -> Column:
    return Column(title, lambda each: "unknown" if each[title] is None else each[title], is_number=True)


PROJECTORS = Record(
    _status_json,
    (
        *(Column("projector", "name"), Column("source", worth=2), Column("position", worth=1)),
        *(_known("head"), _known("lag"), Column("parked")),
        Column("routes", lambda each: ", ".join(f"{route} {at}" for route, at in each["routes"].items()), least=16),
    ),
)
PARKED = Record(
    parked_json,
    (
        *(Column("event"), Column("projector", worth=5), Column("route", worth=1), Column("type")),
        *(Column("stream", worth=3), Column("id", worth=4), Column("tries", worth=2)),
        Column("retry", lambda each: "wanted" if each["retryWanted"] else "", worth=1),
        Column("error", least=16),
    ),
)
