"""Send events of the past through one route: explicitly, visibly, and as often as one likes.

In: a source, a position or instant to begin at, and the position up to which the route is not live. Out: rows, fenced
like all others, and a checkpoint of its own, so that an interrupted backfill goes on. Elsewhere: the live part
(`projector`), one batch (`projection`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from bullpen.errors import require
from bullpen.ledger import Ledger
from bullpen.outbox.mapping import Since
from bullpen.outbox.projection import Projected, Projection
from bullpen.ports.source import BEGINNING, EventSource


@dataclass(frozen=True, slots=True)
class Backfilled:
    """How far a backfill has come."""

    begin: int
    position: int
    until: int
    done: Projected

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return 1.0 if self.until <= self.begin else min(1.0, (self.position - self.begin) / (self.until - self.begin))


Progress = Callable[[Backfilled], None]


async def backfill(
    ledger: Ledger,
    source: EventSource,
    projection: Projection,
    *,
    checkpoint: str,
    after: int,
    until: int,
    since: datetime | None = None,
    progress: Progress | None = None,
) -> Backfilled:
    """Read from `after` up to `until` and store what comes; events recorded before `since` are passed over."""
    stored = await ledger.checkpoints.read(checkpoint)
    so_far = Backfilled(after, after, until, Projected())
    async with contextlib.aclosing(source.read(after, until=until)) as batches:
        async for batch in batches:
            events = [event for event in batch.events if since is None or event.recorded_at >= since]
            done = await projection.project(events, expected=stored, position=batch.position)
            assert batch.position is not None, "a source with positions, to read a part"
            stored = str(batch.position)
            so_far = Backfilled(after, batch.position, until, so_far.done + done)
            if progress is not None:
                progress(so_far)
    return Backfilled(after, max(until, after), until, so_far.done)


async def resume_at(ledger: Ledger, checkpoint: str, since: Since, *, restart: bool) -> int:
    """Where a backfill begins: where it was, else where it was asked to."""
    require("since", since != "now", "'beginning', a position or a datetime in the past", since)
    stored = await ledger.checkpoints.read(checkpoint)
    if restart and stored is not None:
        async with ledger.database.transaction() as connection:
            await ledger.checkpoints.write(connection, checkpoint, str(since if isinstance(since, int) else BEGINNING))
        stored = None
    if stored is not None:
        return int(stored)
    return since if isinstance(since, int) else BEGINNING
