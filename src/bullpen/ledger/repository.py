"""What every outbox store promises. Knows records and nothing of databases.

One suite (`tests/contracts`) is run by each implementation. Elsewhere: the implementations (`outbox`), storing inside a
caller's own transaction (`enqueue`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from bullpen.ledger.records import (
    Attempt,
    Claimed,
    Died,
    Enqueued,
    Lane,
    OutboxItem,
    OutboxRow,
    OutboxStatus,
    Released,
    Retried,
    Sent,
    SettledRow,
    Settlement,
    one_line,
)


class OutboxRepository(ABC):
    """Rows that wait for delivery, and what became of them.

    Two claimers never get the same row. A claim is a lease: after it, `expired` offers the row to whoever settles it.
    Every status change is conditional on the claim (its fence); a late one changes nothing. SENT and DEAD are never
    overwritten by a settlement. All instants are the database's.
    """

    @abstractmethod
    async def enqueue_many(self, items: Iterable[OutboxItem]) -> list[Enqueued]:
        """Store items in one transaction of our own, in their order."""

    async def enqueue(self, item: OutboxItem) -> Enqueued:
        """Store one item in a transaction of our own; inside a caller's transaction use the outbox's `enqueue`."""
        (result,) = await self.enqueue_many([item])
        return result

    # ---- claiming -----------------------------------------------------------------------------------------------

    @abstractmethod
    async def claim_due_batch(
        self, worker_id: str, limit: int = 100, *, lease_ms: int = 60_000, starting: bool = False
    ) -> list[OutboxRow]:
        """Claim the oldest due rows, whatever their channel."""

    @abstractmethod
    async def due_types(self) -> list[str]:
        """Integration types that have rows to claim now. Costs two probes per type, none per row."""

    async def next_due_ms(self) -> int | None:
        """How long until a row that waits for its time can be claimed, 0 when one can be now; None: there is none.
        A repository that cannot say is polled."""
        return None

    @abstractmethod
    async def due_tenants(self, integration_type: str, *, after: str = "", most: int = 100) -> list[str]:
        """Tenants of a type that have such rows, in order of their names; "" stands for none."""

    @abstractmethod
    async def claim(self, lanes: Sequence[Lane], *, worker_id: str, lease_ms: int, starting: bool = False) -> Claimed:
        """Claim up to each lane's quota of due rows. `starting`: their delivery begins at once."""

    @abstractmethod
    async def begin(
        self,
        ids: Collection[str],
        *,
        worker_id: str,
        lease_ms: int,
        tenant_id: str | None = None,
        content: bool = True,
    ) -> dict[str, OutboxRow]:
        """Begin the delivery of rows that are claimed and not begun; a new fence makes all earlier holders late.
        Without `content` the rows come without payload and headers, which the caller has.

        Rows whose claim ran out before are begun too, if they are due and have no ordering key. Rows that are left out
        are not to be delivered now: ask `statuses`.
        """

    @abstractmethod
    async def statuses(self, ids: Collection[str], *, tenant_id: str | None = None) -> dict[str, OutboxStatus]:
        """Where rows are; unknown ones are left out."""

    @abstractmethod
    async def extend(self, rows: Collection[OutboxRow], lease_ms: int) -> None:
        """Let claims that still hold and have not begun end `lease_ms` from now."""

    # ---- settling -----------------------------------------------------------------------------------------------

    @abstractmethod
    async def settle(self, settlements: Sequence[Settlement], *, tenant_id: str | None = None) -> list[SettledRow]:
        """Write outcomes, one attempts entry each, and the announcements of new dead rows, in one transaction. With it
        the next row of an ordering key may be taken (`Settlement.next_lease_ms`)."""

    async def mark_sent(self, row: OutboxRow) -> SettledRow:
        return await self._settle_one(row, Sent())

    async def mark_failed(self, row: OutboxRow, error: str, *, delay_ms: int, code: str = "FAILED") -> SettledRow:
        """Count a failed attempt; the row is due again after `delay_ms`, or DEAD when that was the last."""
        return await self._settle_one(row, Retried(one_line(error), code, delay_ms))

    async def dead_letter(self, row: OutboxRow, error: str, *, code: str = "PERMANENT") -> SettledRow:
        return await self._settle_one(row, Died(one_line(error), code))

    async def release(self, row: OutboxRow, *, delay_ms: int = 0) -> SettledRow:
        """Give a row back without counting anything."""
        return await self._settle_one(row, Released(delay_ms))

    async def _settle_one(self, row: OutboxRow, outcome: Sent | Retried | Died | Released) -> SettledRow:
        (settled,) = await self.settle([Settlement(row, outcome, row.locked_by or "")])
        return settled

    async def followers(self, row: OutboxRow, most: int) -> list[OutboxRow]:
        """Rows that follow a claimed one under its ordering key, are due, and were never tried.

        Nobody claims them as long as that claim holds, so whoever holds it may send them in their order and settle them
        with it (`Settlement.run`). Empty where that cannot be written in one step."""
        return []

    def refused(self, settlement: Settlement) -> SettledRow:
        """What became of one that the database refuses to write: nothing, and its claim runs out."""
        run = tuple(SettledRow(row.id, None, row.attempts) for row, _ in settlement.run)
        return SettledRow(settlement.row.id, None, settlement.row.attempts, run=run)

    @abstractmethod
    async def expired(self, limit: int = 100) -> list[OutboxRow]:
        """Claims whose lease ran out. They stay CLAIMED; settle them."""

    @abstractmethod
    async def unpark(self) -> int:
        """Let rows go on that were parked behind a predecessor which is gone. Returns how many."""

    # ---- looking and looking after ------------------------------------------------------------------------------

    @abstractmethod
    async def get(self, row_id: str, *, tenant_id: str | None = None) -> OutboxRow | None: ...

    @abstractmethod
    async def attempts_of(self, row_id: str, *, tenant_id: str | None = None) -> list[Attempt]: ...

    @abstractmethod
    async def find(
        self,
        *,
        status: OutboxStatus | None = None,
        integration_type: str | None = None,
        tenant_id: str | None = None,
        error_code: str | None = None,
        event_type: str | None = None,
        ordering_key: str | None = None,
        correlation_id: str | None = None,
        source_event_id: str | None = None,
        since: datetime | None = None,
        before: datetime | None = None,
        after_id: str | None = None,
        newest_first: bool = False,
        start: int = 0,
        limit: int = 100,
        after_seq: int | None = None,
    ) -> list[OutboxRow]:
        """Rows by filter, oldest first unless told otherwise, from `start`; `after_id`, or `after_seq` also when that
        row is gone, continues behind a row.

        `since` and `before` are about when they were created: not earlier, and earlier.
        """

    @abstractmethod
    async def dead_causes(
        self, *, tenant_id: str | None = None, limit: int = 200_000
    ) -> list[tuple[str, str, str | None, str | None, str | None, int, datetime, datetime]]:
        """Dead rows that failed with the same words: integration type, event type, error code, beginning of the error,
        tenant, how many, and the first and the last of them; the most frequent first. Where each has an id of its own
        in its words there are as many as rows, so `limit` guards memory and nothing else."""

    @abstractmethod
    async def counts(self) -> Mapping[OutboxStatus, int]:
        """Rows per status, SENT left out: that would count the whole history."""

    @abstractmethod
    async def stats(self) -> list[tuple[str, OutboxStatus, int, datetime]]:
        """Per integration type and status but SENT: how many, and the oldest due instant."""

    @abstractmethod
    async def redrive(self, ids: Collection[str], *, by: str, tenant_id: str | None = None) -> list[str]:
        """Send DEAD rows back with their identity kept, attempts from 0; audited. Returns the ids that were DEAD."""

    @abstractmethod
    async def replace_dead(
        self, row_id: str, payload: Any, *, by: str, note: Mapping[str, Any], tenant_id: str | None = None
    ) -> str | None:
        """Put a row with another payload in the place of a DEAD one, whose own content never changes; audited.

        The new row has the idempotency key and everything else of the dead one, which is discarded in the same
        transaction and named in the header `editOf`. Returns the new id; None when the row was not DEAD. `note` goes
        to the audit log; payloads do not.
        """

    @abstractmethod
    async def confirm(self, ids: Collection[str], *, by: str, tenant_id: str | None = None) -> list[str]:
        """Mark DEAD rows as SENT because somebody knows that the target has them; audited. Returns those ids."""

    @abstractmethod
    async def replay(
        self, ids: Collection[str], *, by: str, label: str, new_key: bool = False, tenant_id: str | None = None
    ) -> list[str]:
        """Store copies of SENT rows to be delivered again; audited. Returns the ids of the copies.

        History stays as it is. A copy has the same idempotency key, so that a target which honours it takes no harm, or
        with `new_key` one of its own. The same label again copies nothing.
        """

    @abstractmethod
    async def bury(self, item: OutboxItem, error: str, *, code: str, attempts: int) -> Enqueued:
        """Store a message that failed elsewhere as DEAD, to be looked at and redriven like any other."""

    @abstractmethod
    async def discard(self, ids: Collection[str], *, by: str, tenant_id: str | None = None) -> list[str]:
        """Delete DEAD rows for good, keeping their fence; audited. Returns the ids that were DEAD."""

    @abstractmethod
    async def retire(self, *, keep_ms: int, grace_ms: int, limit: int = 1_000) -> tuple[int, int]:
        """One small step of retention: fence SENT rows older than `keep_ms`, delete those fenced `grace_ms` ago.

        Returns how many were fenced and deleted. Two steps, because a transaction that began before the fence was
        written could not see it, and would store the event again once the row is gone.
        """
