"""`bullpen outbox` for whole destinations: switch off and on, send a test, send history again."""

from __future__ import annotations

import difflib
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn

from bullpen.cli import common
from bullpen.cli.common import Done, JsonOption, WrongCommand
from bullpen.cli.outbox import DatabaseOption, TenantOption, open_ledger, settings_for, whoami
from bullpen.cli.run_app import load_app

if TYPE_CHECKING:
    from bullpen.ledger import Destination
    from bullpen.ports.channel import SendResult

TypeArgument = Annotated[
    str, typer.Argument(metavar="TYPE", help="Integration type, such as webhook:partnerX.", show_default=False)
]


def add_to(group: typer.Typer) -> None:
    """Register the commands of this module."""
    for name, command in (
        ("destinations", destinations),
        ("disable", disable),
        ("enable", enable),
        ("test", send_test),
        ("replay", replay),
    ):
        group.command(name)(command)


def destinations(database: DatabaseOption = None, as_json: JsonOption = False) -> None:
    """List destinations that are switched off, broken, or being tried again; all others are in order."""
    found = common.wait_for(_troubled(database))
    if as_json:
        common.print_json([_to_json(each) for each in found])
    elif not found:
        common.err.print("all destinations are in order")
    else:
        rows = [
            (each.integration_type, each.state, _left(each), each.trips, each.disabled_by or "", each.reason or "")
            for each in found
        ]
        common.print_table(("type", "state", "for", "trips", "by", "reason"), rows, numbers=["trips"])


def disable(
    integration_type: TypeArgument,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why; whoever wonders later will read it.")] = "",
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send nothing to a destination any more. Its rows wait and lose no attempt."""
    unknown = common.wait_for(_disable(database, integration_type, reason))
    _tell("disabled", integration_type, as_json)
    if unknown is not None:
        common.err.print(f"no row has this type yet{unknown}", markup=False)


def enable(integration_type: TypeArgument, database: DatabaseOption = None, as_json: JsonOption = False) -> None:
    """Send to a destination again, and forget that it was broken."""
    if not common.wait_for(_enable(database, integration_type)):
        raise Done(f"{integration_type} is in order, there was nothing to enable")
    _tell("enabled", integration_type, as_json)


def send_test(
    integration_type: TypeArgument,
    app: Annotated[str, typer.Option("--app", metavar="MODULE:APP", help="Where the Bullpen object with routes is.")],
    payload: Annotated[str, typer.Option(metavar="JSON", help="What to send; `-` reads it from stdin.")] = "",
    tenant: TenantOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send one test message to a destination now, past the database, and show what it answers."""
    content = common.parse_json("--payload", payload) if payload else None
    result = common.wait_for(_send_test(app, integration_type, content, tenant))
    answer = {"result": type(result).__name__, **{name: getattr(result, name) for name in result.__slots__}}
    if as_json:
        common.print_json(answer)
    else:
        common.out.print(" ".join(str(value) for value in answer.values() if value not in ("", None)), markup=False)
    if answer["result"] != "Accepted":
        raise Done("" if as_json else "the test message was not delivered")


def replay(
    integration_type: TypeArgument,
    label: Annotated[str, typer.Option(metavar="TEXT", help="Name of this replay; the same again copies nothing.")],
    since: Annotated[str | None, typer.Option(metavar="TIME", help="Stored then or later (ISO 8601, UTC).")] = None,
    before: Annotated[str | None, typer.Option(metavar="TIME", help="Stored before that (ISO 8601, UTC).")] = None,
    tenant: TenantOption = None,
    new_key: Annotated[
        bool, typer.Option("--new-key", help="Give copies keys of their own: a target that knows the old takes them.")
    ] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Look at so many rows at most.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send again what was sent to a destination. The sent rows stay as they are; copies of them are delivered."""
    options = {"since": _instant("--since", since), "before": _instant("--before", before), "tenant_id": tenant}
    if not yes:
        common.ask(f"Send again everything that {integration_type} got in that time?")
    count = common.wait_for(
        _replay(database, integration_type, label=label, new_key=new_key, limit=limit, quiet=as_json, **options)
    )
    if as_json:
        common.print_json({"replayed": count})
    else:
        common.out.print(f"replayed: {count}")


# Doing it -----------------------------------------------------------------------------------------------------------


async def _troubled(database: str | None) -> list[Destination]:
    async with open_ledger(settings_for(database)) as ledger:
        return list((await ledger.destinations.troubled()).values())


async def _disable(database: str | None, integration_type: str, reason: str) -> str | None:
    """None: rows have this type. Else what it may be a misspelling of: one may also be switched off beforehand."""
    async with open_ledger(settings_for(database)) as ledger:
        await ledger.destinations.disable(integration_type, by=whoami(), reason=reason)
        if await ledger.outbox.find(integration_type=integration_type, limit=1):
            return None
        known = {row.integration_type for row in await ledger.outbox.find(limit=1_000)}
        near = difflib.get_close_matches(integration_type, known, 3)
        return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


async def _enable(database: str | None, integration_type: str) -> bool:
    async with open_ledger(settings_for(database)) as ledger:
        return await ledger.destinations.enable(integration_type, by=whoami())


async def _send_test(target: str, integration_type: str, payload: Any, tenant: str | None) -> SendResult:
    async with load_app(target) as app:
        return await app.outbox.send_test(integration_type, payload, tenant_id=tenant)


async def _replay(database: str | None, integration_type: str, *, quiet: bool, **options: Any) -> int:
    from bullpen.outbox.replay import replay

    async with open_ledger(settings_for(database)) as ledger:
        with Progress(
            SpinnerColumn(),
            TextColumn("{task.completed} sent again"),
            console=common.err,
            transient=True,
            disable=quiet,
        ) as progress:
            bar = progress.add_task("replay", total=None)
            return await replay(
                ledger.outbox,
                by=whoami(),
                integration_type=integration_type,
                on_progress=lambda done: progress.update(bar, completed=done),
                **options,
            )


# Small things -------------------------------------------------------------------------------------------------------


def _instant(option: str, text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        raise WrongCommand(f"{option}: {text!r} is no time; write 2030-01-31T12:00") from None
    return instant if instant.tzinfo is not None else instant.replace(tzinfo=UTC)


def _tell(verb: str, integration_type: str, as_json: bool) -> None:
    if as_json:
        common.print_json({verb: integration_type})
    else:
        common.out.print(f"{verb}: {integration_type}", markup=False)


def _left(destination: Destination) -> str:
    return f"{destination.broken_ms / 1000:.0f} s" if destination.state == "broken" else ""


def _to_json(destination: Destination) -> dict[str, Any]:
    fields = {
        "integrationType": destination.integration_type,
        "state": destination.state,
        "brokenMs": destination.broken_ms if destination.state == "broken" else None,
        "trips": destination.trips,
        "disabledBy": destination.disabled_by,
        "disabledAt": None if destination.disabled_at is None else destination.disabled_at.isoformat(),
        "reason": destination.reason,
    }
    return {name: value for name, value in fields.items() if value is not None}
