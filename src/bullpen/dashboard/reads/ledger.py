"""The ledger behind the pages: the part that is there, within the time that a page may take."""

from __future__ import annotations

from collections.abc import Awaitable
from datetime import datetime
from typing import TYPE_CHECKING, TypeVar

from bullpen._kernel.command_line import command_line
from bullpen.dashboard._web import PageProblem
from bullpen.dashboard.routes import Context
from bullpen.ops.status import duration_text

if TYPE_CHECKING:
    from bullpen.ledger import Ledger
    from bullpen.ledger.destinations import Destination

__all__ = ["holds_up", "ledger_of", "ms_of", "read"]

T = TypeVar("T")


async def ledger_of(context: Context, part: str = "outbox", page: str = "") -> Ledger:
    """The ledger with the tables of a part. Raises PageProblem that says how they are made."""
    ledger = await context.desk.ledger()
    if ledger is None:
        raise PageProblem(404, "No ledger is configured, or its tables are missing.", hint=command_line("migrate"))
    if part not in await read(context, ledger.parts()):
        advice = command_line("migrate", **{"for": part})
        raise PageProblem(404, f"This ledger has no tables for {page or part}.", hint=advice)
    return ledger


async def read(context: Context, work: Awaitable[T]) -> T:
    return await context.desk.within(work, "ledger")


def holds_up(known: Destination | None) -> str:
    """Why nothing leaves for a destination, as a sentence; empty when it is in order or tries again."""
    if known is not None and known.state == "disabled":
        reason = f": {known.reason}" if known.reason else ""
        return f"{known.integration_type} was disabled by {known.disabled_by}{reason}."
    if known is not None and known.state == "broken":
        return f"The breaker of {known.integration_type} is open for another {duration_text(known.broken_ms)}."
    return ""


def ms_of(instant: datetime) -> int:
    return int(instant.timestamp() * 1000)
