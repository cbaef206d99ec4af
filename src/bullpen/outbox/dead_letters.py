"""Dead rows, seen as every other store of dead letters: list, get, redrive, discard, depth.

The row itself is the entry, with all its context; who redrove or discarded it is written to the audit table. Elsewhere:
when a row is DEAD (`delivery`), the port (`bullpen.ports.dead_letters`).
"""

from __future__ import annotations

import asyncio
import builtins
from datetime import UTC, datetime
from typing import Any, ClassVar, Final, NamedTuple

from bullpen._kernel import telemetry
from bullpen._kernel.causes import LONGEST_SAMPLE, fingerprint_of
from bullpen._kernel.duration import check_int
from bullpen._kernel.scrub import summary
from bullpen.errors import DeadLetterNotFound, InvalidOption
from bullpen.ledger import OutboxItem, OutboxRepository, OutboxRow, OutboxStatus
from bullpen.outbox._logs import log
from bullpen.ports.dead_letters import (
    ANY,
    DeadLetter,
    DeadLetterFilter,
    DeadLetterGroup,
    LetterPage,
    check_unchanged,
    code_of,
)
from bullpen.ports.edits import Edit

_SOURCE: Final = "outbox-dead-letters"
_PAGE: Final = 200
_MOST_LOOKED_AT: Final = 5_000
_GROUPED_AT_ONCE: Final = 200
_FOREIGN_STREAM: Final = "dead-letters"
ANONYMOUS: Final = "unknown"


class OutboxDeadLetters:
    """The dead rows of one ledger; `tenant_id` narrows everything to one tenant's."""

    def __init__(self, store: OutboxRepository, *, tenant_id: str | None = None) -> None:
        self._store, self._tenant_id = store, tenant_id

    name_of_store: ClassVar[str] = "integration_outbox"

    @property
    def name(self) -> str:
        return self.name_of_store

    async def depth(self) -> int:
        """How many there are."""
        if self._tenant_id is None:
            return (await self._store.counts())[OutboxStatus.DEAD]
        count, found = 0, await self._page()
        while found:
            count += len(found)
            found = await self._page(after_seq=found[-1].seq)
        return count

    async def put(self, letter: DeadLetter) -> None:
        """Store work that failed elsewhere as a dead row. Writing it again changes nothing."""
        if await self._store.get(letter.id, tenant_id=self._tenant_id) is not None:
            return  # it is one of ours
        item = OutboxItem(
            integration_type=letter.source,
            event_type=letter.name or "unknown",
            payload=letter.data,
            source_stream_id=_FOREIGN_STREAM,
            source_event_id=letter.id,
            tenant_id=letter.tenant_id,
            idempotency_key=letter.message_id or None,
        )
        code = letter.cause or "FAILED"
        await self._store.bury(item, letter.error_message, code=code, attempts=letter.attempts_made)

    async def list(self, *, start: int = 0, count: int = 100) -> builtins.list[DeadLetter]:
        """Oldest first, from `start`."""
        rows = await self._store.find(status=OutboxStatus.DEAD, tenant_id=self._tenant_id, start=start, limit=count)
        return [to_letter(row) for row in rows]

    async def page(self, where: DeadLetterFilter = ANY, *, after: str | None = None, limit: int = 100) -> LetterPage:
        """As the port says: the last that was stored first."""
        check_int("limit", limit, minimum=1)
        if after is not None and not (after.isascii() and after.isdecimal() and len(after) < 19):
            raise InvalidOption("after", "the `next` of the page before", after)
        seq, found, looked_at = None if after is None else int(after), list[DeadLetter](), 0
        if self._tenant_id is not None and where.tenant_id not in (None, self._tenant_id):
            return LetterPage([], None)
        while True:
            rows = await self._store.find(
                status=OutboxStatus.DEAD,
                tenant_id=where.tenant_id or self._tenant_id,
                newest_first=True,
                after_seq=seq,
                limit=_PAGE,
            )
            for row in rows:
                letter = to_letter(row)
                if where.matches(letter):
                    if len(found) == limit:
                        return LetterPage(found, str(seq))
                    found.append(letter)
                seq = row.seq
            looked_at += len(rows)
            if len(rows) < _PAGE:
                return LetterPage(found, None)
            if looked_at >= _MOST_LOOKED_AT:
                return LetterPage(found, str(seq))

    async def groups(self, *, tenant_id: str | None = None, limit: int = 200) -> builtins.list[DeadLetterGroup]:
        """The database counts rows that failed with the same words; which of them are one cause is found here."""
        tenant = tenant_id or self._tenant_id
        found: dict[str, builtins.list[_Counted]] = {}
        kinds = await self._store.dead_causes(tenant_id=tenant)
        for number, kind in enumerate(map(_Counted._make, kinds), 1):
            if number % _GROUPED_AT_ONCE == 0:
                await asyncio.sleep(0)  # there may be as many as rows, and others share this loop
            mark = fingerprint_of(
                kind.integration_type, kind.event_type, kind.error or "", code=code_of(kind.error_code)
            )
            found.setdefault(mark, []).append(kind)
        groups = [self._group(mark, members) for mark, members in found.items()]
        return sorted(groups, key=lambda group: (-group.count, group.fingerprint))[:limit]

    def _group(self, mark: str, kinds: builtins.list[_Counted]) -> DeadLetterGroup:
        newest, tenants = max(kinds, key=lambda kind: kind.last_at), dict[str, int]()
        for kind in kinds:
            if kind.tenant_id is not None:
                tenants[kind.tenant_id] = tenants.get(kind.tenant_id, 0) + kind.number
        return DeadLetterGroup(
            fingerprint=mark,
            store=self.name,
            name=newest.event_type,
            error=summary(newest.error or "")[:LONGEST_SAMPLE],
            count=sum(kind.number for kind in kinds),
            first_at=_iso(min(kind.first_at for kind in kinds)),
            last_at=_iso(newest.last_at),
            tenants=dict(sorted(tenants.items(), key=lambda pair: (-pair[1], pair[0]))[:5]),
        )

    async def get(self, entry_id: str) -> DeadLetter | None:
        """One entry, or None."""
        row = await self._dead(entry_id)
        return None if row is None else to_letter(row)

    async def redrive(self, entry_id: str, *, by: str | None = None) -> str:
        """Send one back with its id and idempotency key; attempts start again. Returns the row's id.

        Raises DeadLetterNotFound when it is not dead (any more): repeating it does no harm.
        """
        row = await self._dead(entry_id)
        done = (
            [] if row is None else await self._store.redrive([entry_id], by=by or ANONYMOUS, tenant_id=self._tenant_id)
        )
        if not done:
            raise DeadLetterNotFound(self.name, entry_id)
        self._tell("OUTBOX_REDRIVE", done)
        return entry_id

    async def redrive_edited(self, entry_id: str, edit: Edit, *, by: str | None = None) -> str:
        """Send one back with another payload: as a new row, because the content of a row never changes.

        The new row has the dead one's idempotency key, route, headers and tenant, and goes to the end of its ordering
        key; the dead one is discarded in the same transaction. Returns the new row's id.
        """
        row = await self._dead(entry_id)
        if row is None:
            raise DeadLetterNotFound(self.name, entry_id)
        check_unchanged(self.name, to_letter(row), edit)
        new_id = await self._store.replace_dead(
            entry_id, edit.data, by=by or ANONYMOUS, note=edit.note(), tenant_id=self._tenant_id
        )
        if new_id is None:
            raise DeadLetterNotFound(self.name, entry_id)
        self._tell("OUTBOX_REDRIVE", [new_id])
        return new_id

    async def discard(self, entry_id: str, *, by: str | None = None) -> bool:
        """Delete one for good; its fence stays, so that a replay does not bring it back. False when it is not dead."""
        row = await self._dead(entry_id)
        done = (
            [] if row is None else await self._store.discard([entry_id], by=by or ANONYMOUS, tenant_id=self._tenant_id)
        )
        self._tell("OUTBOX_DISCARD", done)
        return bool(done)

    async def redrive_where(
        self,
        *,
        by: str,
        integration_type: str | None = None,
        error_code: str | None = None,
        before: datetime | None = None,
        limit: int | None = None,
        rate: float | None = None,
        dry_run: bool = False,
    ) -> int:
        """Send back all that match, page by page; `limit` at most so many, `rate` at most so many a second.

        Returns how many; with `dry_run` how many it would be, and nothing changes.
        """
        total, after_seq = 0, None
        page = _PAGE if rate is None or dry_run else max(1, min(_PAGE, int(rate)))
        while limit is None or total < limit:
            rows = await self._page(
                integration_type=integration_type, error_code=error_code, before=before, after_seq=after_seq
            )
            rows = rows[: page if limit is None else min(page, limit - total)]
            if not rows:
                break
            after_seq = rows[-1].seq  # not its id: somebody may discard it meanwhile
            if dry_run:
                total += len(rows)
                continue
            if rate is not None and total:
                await asyncio.sleep(len(rows) / rate)
            done = await self._store.redrive([row.id for row in rows], by=by, tenant_id=self._tenant_id)
            self._tell("OUTBOX_REDRIVE", done)
            total += len(done)
        return total

    async def _page(self, **filters: Any) -> builtins.list[OutboxRow]:
        return await self._store.find(status=OutboxStatus.DEAD, tenant_id=self._tenant_id, limit=_PAGE, **filters)

    async def _dead(self, entry_id: str) -> OutboxRow | None:
        row = await self._store.get(entry_id, tenant_id=self._tenant_id)
        mine = row is not None and self._tenant_id in (None, row.tenant_id)
        return row if mine and row is not None and row.status is OutboxStatus.DEAD else None

    def _tell(self, operation: Any, ids: builtins.list[str]) -> None:
        for row_id in ids:
            log(operation, "SUCCESS", source=_SOURCE, outboxId=row_id, tenantId=self._tenant_id)
        if ids:
            telemetry.emit(operation.lower().replace("_", ".", 1), count=len(ids))


class _Counted(NamedTuple):
    """Dead rows that failed with the same words."""

    integration_type: str
    event_type: str
    error_code: str | None
    error: str | None
    tenant_id: str | None
    number: int
    first_at: datetime
    last_at: datetime


def _iso(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def to_letter(row: OutboxRow) -> DeadLetter:
    """A dead row as a dead letter."""
    failed_at = _iso(row.dead_at or row.updated_at)
    entry = {
        "outboxId": row.id,
        "integrationType": row.integration_type,
        "eventType": row.event_type,
        "sourceStreamId": row.source_stream_id,
        "sourceEventId": row.source_event_id,
        "originalData": row.payload,
        "headers": row.headers,
        "tenantId": row.tenant_id,
        "userId": row.user_id,
        "correlationId": row.correlation_id,
        "attemptsMade": row.attempts,
        "maxAttempts": row.max_attempts,
        "errorCode": row.error_code,
        "errorMessage": row.last_error,
        "failedAt": failed_at,
    }
    return DeadLetter(
        id=row.id,
        source=row.integration_type,
        message_id=row.id,
        name=row.event_type,
        data=row.payload,
        error_message=row.last_error or "",
        cause=row.error_code,
        failed_at=failed_at,
        attempts_made=row.attempts,
        tenant_id=row.tenant_id,
        entry={name: value for name, value in entry.items() if value is not None},
    )
