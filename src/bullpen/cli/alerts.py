"""`bullpen alerts`: which incidents are open, and whether alerts arrive."""

from __future__ import annotations

from typing import Any

from bullpen._kernel.command_line import command_line
from bullpen.cli.arguments import ByOption
from bullpen.cli.context import OnServer, WrongCommand, whoami
from bullpen.cli.show import Column, Record
from bullpen.cli.tree import Group

app = Group()


@app.command("list")
async def list_(at: OnServer) -> None:
    """List open incidents for which an alert was sent, oldest first."""
    from bullpen.app import Bullpen

    async with Bullpen(at.redis, prefix=at.prefix) as opened:
        found = await opened.ledger.incidents.open() if opened.settings.has_ledger() else []
    at.list(INCIDENTS, found, empty="no incident is open; `bullpen doctor` shows what may become one")


@app.command("test")
async def send_test(at: OnServer, by: ByOption = None) -> None:
    """Send a test alert to every configured target; a process that runs `alerts` or `outbox` delivers it."""
    from bullpen.app import Bullpen

    async with Bullpen(at.redis, prefix=at.prefix) as opened:
        if not opened.settings.alerts.has_target:
            raise WrongCommand(
                "no alert target is configured; set BULLPEN_ALERTS_WEBHOOK_URL, _SLACK_URL, _EMAIL or _SMS"
            )
        await opened.prepare()
        ids = await opened.use_alerts().send_test(by or whoami())
    at.say(ids, *(f"stored: {each}; `{command_line('outbox show', each)}` shows its state" for each in ids))


def to_json(incident: Any) -> dict[str, Any]:
    shown = {name: getattr(incident, name) for name in ("rule", "subject", "number", "value", "message", "fix")}
    return {**shown, "openedAt": incident.opened_at, "toldAt": incident.told_at}


INCIDENTS = Record(
    to_json,
    (
        Column("alert", "rule"),
        Column("subject"),
        Column("what", "message", least=20),
        Column("since", "openedAt", worth=1),
        Column("fix", worth=2, least=20),
    ),
)
