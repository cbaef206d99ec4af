"""Make messages of occasions: rows CREATED ahead of their instant.

In: occasions whose next occurrence lies within the horizon. Out: one message each, unique by recipient, occasion and
period, and the instant of the occurrence after it. Any number of planners may run; one that dies in between has written
nothing of its batch. Occurrences that passed while none ran are planned all the same: what is late is decided later.
Elsewhere: recipients and their changes (`recipients`), what happens to the rows (`enqueuer`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from bullpen._kernel import telemetry
from bullpen.ledger.message_records import OccasionRow, Planned
from bullpen.ledger.messages import SqlMessages
from bullpen.messages.calendar import Occurrence
from bullpen.messages.occasions import Occasions

__all__ = ["Planner", "coming"]

BATCH: Final = 1_000


class Planner:
    """Plans ahead by `horizon_ms`; long enough that a day without a planner is no harm."""

    def __init__(self, store: SqlMessages, occasions: Occasions, *, horizon_ms: int, batch: int = BATCH) -> None:
        self._store, self._occasions = store, occasions
        self._horizon_ms, self._batch = horizon_ms, batch

    async def run_once(self) -> bool:
        """Plan one batch; True when there may be more."""
        async with self._store.planning(self._occasions.names, horizon_ms=self._horizon_ms, limit=self._batch) as (
            due,
            plan,
        ):
            if not due:
                return False
            messages, following = self._decide(due)
            created = len(await plan.create(messages))
            await plan.next(following)
        telemetry.emit("messages.planned", occasions=len(due), created=created)
        return True

    async def run_until_done(self) -> None:
        while await self.run_once():
            pass

    def _decide(self, due: list[OccasionRow]) -> tuple[list[Planned], list[OccasionRow]]:
        """One occurrence each; after a long pause the others come with the next batches."""
        messages: list[Planned] = []
        following: list[OccasionRow] = []
        for row in due:
            kind = self._occasions.get(row.occasion)
            assert row.next_due is not None
            # Computed again from the period: the rules of a zone may have changed since the instant was stored.
            found = kind.in_period(row, row.next_period)
            if found is not None:
                messages.append(kind.plan(row, found))
            later = kind.next(row, after=row.next_due if found is None else found.due_at)
            following.append(coming(row, later))
        return messages, following


def coming(row: OccasionRow, occurrence: Occurrence | None) -> OccasionRow:
    """The occasion with its next occurrence; None: it never comes again."""
    if occurrence is None:
        return replace(row, next_due=None, next_period="")
    return replace(row, next_due=occurrence.due_at, next_period=occurrence.period)
