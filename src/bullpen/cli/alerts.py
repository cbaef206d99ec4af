"""`bullpen alerts`: which incidents are open, and whether alerts arrive."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from bullpen._kernel.command_line import command_line
from bullpen.app import Bullpen
from bullpen.cli import common
from bullpen.cli.common import JsonOption, PrefixOption, RedisOption, WrongCommand
from bullpen.cli.outbox import whoami

app = typer.Typer(help="Show open incidents, and send a test alert.", no_args_is_help=True)


@app.callback()
def alerts() -> None:
    """Show open incidents, and send a test alert."""


@app.command("list")
def list_(redis: RedisOption = None, prefix: PrefixOption = None, as_json: JsonOption = False) -> None:
    """List incidents that somebody was told of and that are not over, oldest first."""

    async def ask() -> list[Any]:
        async with Bullpen(redis, prefix=prefix) as opened:
            return await opened.ledger.incidents.open() if opened.settings.has_ledger() else []

    found = common.wait_for(ask())
    if as_json:
        common.print_json([_to_json(each) for each in found])
    elif not found:
        common.err.print("no incident is open")
    else:
        rows = [
            (each.rule, each.subject, each.message, f"{each.opened_at:%Y-%m-%d %H:%M:%SZ}", each.fix) for each in found
        ]
        common.print_table(("alert", "subject", "what", "since", "fix"), rows)


def _to_json(incident: Any) -> dict[str, Any]:
    shown = {name: getattr(incident, name) for name in ("rule", "subject", "number", "value", "message", "fix")}
    return {**shown, "openedAt": incident.opened_at.isoformat(), "toldAt": incident.told_at.isoformat()}


@app.command("test")
def send_test(
    by: Annotated[str | None, typer.Option(metavar="WHO", help="Named in the alert.", show_default="you")] = None,
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send a test alert to every configured target; a process with the part `alerts` or `outbox` delivers it."""

    async def send() -> list[str]:
        async with Bullpen(redis, prefix=prefix) as opened:
            if not opened.settings.alerts.has_target:
                raise WrongCommand("nobody is to be told: set BULLPEN_ALERTS_WEBHOOK_URL, _SLACK_URL, _EMAIL or _SMS")
            await opened.prepare()
            return await opened.use_alerts().send_test(by or whoami())

    ids = common.wait_for(send())
    if as_json:
        common.print_json(ids)
    else:
        for row_id in ids:
            line = command_line("outbox show", str(row_id))
            common.out.print(f"stored: {row_id}; {line} tells what became of it", markup=False)
