"""`bullpen mark`: a deploy or another event that the charts show."""

from __future__ import annotations

from typing import Annotated

from bullpen.cli.arguments import ByOption
from bullpen.cli.context import OnServer, whoami
from bullpen.cli.tree import Argument


async def mark(
    at: OnServer,
    text: Annotated[str, Argument("TEXT", "What happened: a version, a migration; at most 200 characters.")],
    by: ByOption = None,
) -> None:
    """Set a mark at this moment in the charts of the dashboard; it is kept for 40 days."""
    from bullpen.ops.actions import Actor
    from bullpen.ops.marks import add_mark
    from bullpen.ops.views.queues import OPERATIONS
    from bullpen.wire.keys import QueueKeys

    who = by or whoami()
    async with at.app() as app:
        await (await app.actions(Actor(who))).note("mark", "dashboard", "", {"via": "command", "text": text[:200]})
        made = await add_mark(app.connection, QueueKeys(app.prefix, OPERATIONS), text, who)
    at.say({"atMs": made.at_ms, "text": made.text, "by": made.by}, f"marked: {made.text}")
