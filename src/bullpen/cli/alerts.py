"""`bullpen alerts`: which incidents are open, and whether alerts arrive."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

from bullpen._kernel.command_line import command_line
from bullpen.cli.arguments import ByOption, duration
from bullpen.cli.context import Done, OnServer, WrongCommand, whoami
from bullpen.cli.show import Column, Record
from bullpen.cli.tree import Argument, Group, Option

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


RuleArgument = Annotated[str, Argument("RULE", "The alert, as listed.")]
SubjectArgument = Annotated[str, Argument("SUBJECT", "What it is about, as listed.")]


@app.command()
async def silence(
    at: OnServer,
    rule: RuleArgument,
    subject: SubjectArgument,
    reason: Annotated[str, Option(metavar="TEXT", help="Why; others see it on the page of the incident.")] = "",
    for_: Annotated[str, Option("--for", metavar="TIME", help="Duration: 30m, 2h, 1d.")] = "2h",
    by: ByOption = None,
) -> None:
    """Send no alerts about an open incident for a time. The next incident of the same rule and subject is sent."""
    until = datetime.now(UTC) + duration("--for", for_)
    if not reason.strip():
        raise WrongCommand("say why: --reason TEXT")
    await _silence(at, rule, subject, until, by, reason)
    at.say({"rule": rule, "subject": subject, "silencedUntil": until}, f"silenced until {at.when(until)}")


@app.command()
async def unsilence(at: OnServer, rule: RuleArgument, subject: SubjectArgument, by: ByOption = None) -> None:
    """Send alerts again about an incident that was silenced."""
    await _silence(at, rule, subject, None, by, "")
    at.say({"rule": rule, "subject": subject, "silencedUntil": None}, "alerts are sent again")


async def _silence(at: OnServer, rule: str, subject: str, until: datetime | None, by: str | None, reason: str) -> None:
    from bullpen.app import Bullpen

    async with Bullpen(at.redis, prefix=at.prefix) as opened:
        done = opened.settings.has_ledger() and await opened.ledger.incidents.silence(
            rule, subject, until=until, by=by or whoami(), reason=reason, note={"via": "command"}
        )
    if not done:
        raise Done(f"no incident {rule!r} of {subject!r} is open; `bullpen alerts list` shows which are")


def to_json(incident: Any) -> dict[str, Any]:
    shown = {name: getattr(incident, name) for name in ("rule", "subject", "number", "value", "message", "fix")}
    return {
        **shown,
        "openedAt": incident.opened_at,
        "toldAt": incident.told_at,
        "silencedUntil": incident.silenced_until,
        "silencedBy": incident.silenced_by,
    }


INCIDENTS = Record(
    to_json,
    (
        Column("alert", "rule"),
        Column("subject"),
        Column("what", "message", least=20),
        Column("since", "openedAt", worth=1),
        Column("silenced until", "silencedUntil", worth=1),
        Column("fix", worth=2, least=20),
    ),
)
