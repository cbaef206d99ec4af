"""Recipients, occasions and messages in PostgreSQL and in SQLite.

In: a `Database`. Out: short transactions whose promises stand with each method; what must be unique, or must happen to
one of many, is decided by the statement and not before it. Elsewhere: the statements (`_message_sql`), what is planned
and sent (`bullpen.messages`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import datetime, timedelta
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from bullpen._kernel import json
from bullpen._kernel.duration import check_int, check_texts
from bullpen._kernel.outcome import cut
from bullpen.ledger import tables
from bullpen.ledger._message_sql import MessageSql
from bullpen.ledger._sql import Sql
from bullpen.ledger.checkpoints import Checkpoints
from bullpen.ledger.database import Database
from bullpen.ledger.message_records import (
    MessageCount,
    MessageHour,
    MessageRow,
    MessageSettlement,
    MessageStatus,
    OccasionRow,
    Planned,
    RecipientRow,
    ToPublish,
)
from bullpen.ledger.records import encode_rows
from bullpen.ledger.tables import to_datetime, to_epoch_ms

Key = tuple[str, str]
"""Tenant (empty: none) and id of a recipient."""

MAX_ERROR: Final = 2_000
_is_id = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}").fullmatch
_FIELDS: Final = tuple(
    "response_json" if column.name == "response" else column.name for column in tables.messages.columns
)
_INSTANTS: Final = tuple(c.name for c in tables.messages.columns if isinstance(c.type, tables.Instant))
_STATUSES: Final = {status.value: status for status in MessageStatus}
_MS: Final = timedelta(milliseconds=1)


class SqlMessages:
    """The messages of one ledger."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._statements: tuple[int, MessageSql] | None = None

    @property
    def sql(self) -> MessageSql:
        offset = self.database.clock_offset_ms
        if self._statements is None or self._statements[0] != offset:
            self._statements = (offset, MessageSql(self.database.dialect, self.database.schema, offset))
        return self._statements[1]

    @property
    def _notes(self) -> str:
        return Sql(self.database.dialect, self.database.schema, self.database.clock_offset_ms).audit_entries

    async def now(self) -> datetime:
        """The database's clock, by which everything is due."""
        async with self.database.transaction_without_tenant() as connection:
            return _instant((await connection.execute(sa.text(self.sql.read_now))).scalar_one())

    async def note(self, checkpoints: Checkpoints, name: str, text: str) -> datetime:
        """Write a checkpoint and return the database's now, which `{now}` in the text stands for, in ms since 1970."""
        async with self.database.transaction_without_tenant() as connection:
            now = _instant((await connection.execute(sa.text(self.sql.read_now))).scalar_one())
            await checkpoints.write(connection, name, text.replace("{now}", str(to_epoch_ms(now))))
        return now

    # ---- recipients ---------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def changing(self, keys: Sequence[Key], *, tenant_id: str = "") -> AsyncIterator[MessageChange]:
        """One transaction in which some recipients are saved or removed, and what was planned for them moved."""
        async with self.database.transaction(tenant=tenant_id or None) as connection:
            yield await MessageChange.begin(connection, self.sql, keys)

    async def find_recipients(
        self, *, ids: Sequence[str] | None = None, tenant_id: str | None = None, after: Key = ("", ""), limit: int = 100
    ) -> list[RecipientRow]:
        """In the order of their keys, from behind `after`."""
        ids = ids if ids is None else check_texts("ids", ids)
        values: dict[str, Any] = {"after_tenant": after[0], "after_id": after[1], "limit": limit}
        if tenant_id is not None:
            values["tenant_id"] = tenant_id
        if ids is not None:
            values["rows"] = encode_rows({"id": one} for one in ids)
        statement = self.sql.find_recipients(by_tenant=tenant_id is not None, by_ids=ids is not None)
        async with self.database.transaction(tenant=tenant_id or None) as connection:
            rows = (await connection.execute(sa.text(statement), values)).all()
        return [_recipient(tuple(row)) for row in rows]

    async def occasions_of(self, keys: Sequence[Key], *, tenant_id: str = "") -> list[OccasionRow]:
        async with self.database.transaction(tenant=tenant_id or None) as connection:
            return await _occasions(connection, self.sql.occasions_of, rows=_keys(keys))

    # ---- planning -----------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def planning(
        self, kinds: Iterable[str], *, horizon_ms: int, limit: int
    ) -> AsyncIterator[tuple[list[OccasionRow], Plan]]:
        """One transaction over occasions whose next occurrence lies within the horizon; others pass them over."""
        async with self.database.transaction() as connection:
            due = await _occasions(
                connection,
                self.sql.due_occasions,
                rows=encode_rows({"name": name} for name in kinds),
                horizon_ms=horizon_ms,
                limit=limit,
            )
            yield due, Plan(connection, self.sql)

    # ---- publishing ---------------------------------------------------------------------------------------------

    async def give_up_late(self) -> dict[tuple[MessageStatus, str, str], int]:
        """End what was not queued in time and must not be sent late. How many, by status, occasion and channel."""
        async with self.database.transaction() as connection:
            found = (await connection.execute(sa.text(self.sql.give_up_late))).all()
        return dict(Counter((MessageStatus(row.status), row.occasion, row.channel) for row in found))

    async def claim(self, *, ahead_ms: int, lease_ms: int, limit: int) -> list[ToPublish]:
        """Take messages that are due within `ahead_ms`; each goes to one caller, and comes again after its lease."""
        return await self._claim(self.sql.claim_due, ahead_ms=ahead_ms, lease_ms=lease_ms, limit=limit)

    async def claim_again(self, *, lease_ms: int, limit: int) -> list[ToPublish]:
        """Take messages whose lease ended: nobody knows whether the broker has them."""
        return await self._claim(self.sql.claim_again, lease_ms=lease_ms, limit=limit)

    async def _claim(self, statement: str, **parameters: int) -> list[ToPublish]:
        found = map(_to_publish, await self.database.fetch_of(None, statement, parameters))
        return sorted(found, key=lambda one: one.due_at)

    async def confirm(self, published: Iterable[ToPublish], *, lost_after_ms: int, late_after_ms: int) -> None:
        """Note that the broker has them. Those that it holds back come again `late_after_ms` after their instant, the
        others `lost_after_ms` from now."""
        rows = encode_rows({"id": one.id, "publication": one.publication} for one in published)
        await self._run(self.sql.confirm, rows=rows, lost_after_ms=lost_after_ms, late_after_ms=late_after_ms)

    async def unclaim(self, refused: Iterable[tuple[ToPublish, str]]) -> None:
        """Note that the broker did not take them: they are CREATED again, with the reason."""
        rows = encode_rows(
            {"id": one.id, "publication": one.publication, "error": cut(reason, MAX_ERROR)} for one, reason in refused
        )
        await self._run(self.sql.unclaim, rows=rows)

    # ---- sending ------------------------------------------------------------------------------------------------

    async def look(self, ids: Iterable[str]) -> dict[str, MessageRow]:
        """Messages with their recipients; what is missing does not exist."""
        wanted = [one for one in check_texts("ids", ids) if _is_id(one)]
        if not wanted:
            return {}
        found = await self._read(self.sql.look, rows=encode_rows({"id": one} for one in wanted))
        return {row.id: row for row in found}

    async def take(self, rows: Iterable[MessageRow], *, worker: str, lease_ms: int, again_ms: int) -> set[str]:
        """Set SENDING where nothing has changed since the row was read. Returns the ids that are ours now.

        The fence of a taken row is one higher than the one that was read.
        """
        given = encode_rows({"id": row.id, "fence": row.fence, "worker": worker} for row in rows)
        return await self._ids(self.sql.take, rows=given, lease_ms=lease_ms, again_ms=again_ms)

    async def settle(self, settlements: Sequence[MessageSettlement], *, tenant_id: str | None = None) -> list[bool]:
        """Write outcomes. For each whether the message was still ours."""
        rows = encode_rows(
            {
                "id": row_id,
                "fence": fence,
                "status": outcome.status.value,
                "response": outcome.response_json,
                "error": None if outcome.error is None else cut(outcome.error, MAX_ERROR),
                "code": None if outcome.code is None else outcome.code[:60],
                "again_ms": outcome.again_in_ms,
            }
            for row_id, fence, outcome in settlements
        )
        ours = await self._ids(self.sql.settle, rows=rows)
        return [settlement.id in ours for settlement in settlements]

    def refused(self, settlement: MessageSettlement) -> bool:
        """Of one that the database refuses to write: its lease runs out, as if another sender had taken it over."""
        return False

    async def settle_untaken(self, row: MessageRow, status: MessageStatus, *, code: str, reason: str) -> bool:
        """Give a message its status without sending it; False when somebody else was faster."""
        given = {
            "id": row.id,
            "fence": row.fence,
            "status": status.value,
            "error": cut(reason, MAX_ERROR),
            "code": code[:60],
        }
        return bool(await self._ids(self.sql.settle_untaken, rows=encode_rows([given])))

    async def reserve(self, channel: str, count: int, *, interval_ms: float, most_ms: int) -> tuple[int, int]:
        """Reserve sends of a channel with a rate limit, over all processes.

        Returns how many of `count` were granted and the milliseconds until the first of them; none granted: until it
        is worth asking again. `interval_ms` lies between two sends, `most_ms` is how far ahead may be reserved.
        """
        take_ms = max(1, round(count * interval_ms))
        parameters = {"channel": channel, "take_ms": take_ms, "most_ms": most_ms}
        async with self.database.transaction_without_tenant() as connection:
            row = (await connection.execute(sa.text(self.sql.reserve), parameters)).one_or_none()
            if row is not None:
                begins = _instant(row.free_at) - take_ms * _MS
                return count, max(0, (begins - _instant(row.now_at)) // _MS)
            row = (await connection.execute(sa.text(self.sql.read_limit), {"channel": channel})).one_or_none()
            if row is None:
                await connection.execute(sa.text(self.sql.open_limit), {"rows": encode_rows([{"channel": channel}])})
                return 0, 0
            # 0 also when another process has opened the limit since our first look: it is worth asking again at once.
            return 0, max(0, (_instant(row.free_at) - _instant(row.now_at)) // _MS - most_ms)

    # ---- looking after ------------------------------------------------------------------------------------------

    async def get(self, message_id: str) -> MessageRow | None:
        return (await self.look([message_id])).get(message_id.lower())

    async def find(
        self,
        *,
        status: MessageStatus | None = None,
        occasion: str | None = None,
        recipient_id: str | None = None,
        tenant_id: str | None = None,
        after_id: str | None = None,
        limit: int = 100,
    ) -> list[MessageRow]:
        """Messages in the order of their instants; `after_id` continues behind one."""
        filters: dict[str, Any] = {
            "status": None if status is None else status.value,
            "occasion": occasion,
            "recipient_id": recipient_id,
            "tenant_id": tenant_id,
        }
        given = {name: value for name, value in filters.items() if value is not None}
        where = " AND ".join(f"m.{name} = :{name}" for name in given) or "true"
        if after_id is not None:
            if (last := await self.get(after_id)) is None:
                return []
            where += f" AND {self.sql.behind}"
            given |= {"after_ms": to_epoch_ms(last.due_at), "after_id": last.id}
        return await self._read(self.sql.find(where), tenant_id, **given, limit=limit)

    async def hours(self, within_ms: int, *, tenant_id: str | None = None) -> list[MessageHour]:
        """How many messages leave in each hour of the recipients' own clocks, by zone, from now on; as far as they are
        planned."""
        check_int("within_ms", within_ms, minimum=1)
        statement = self.sql.hours if tenant_id is None else self.sql.hours_of_tenant
        parameters: dict[str, Any] = {"within_ms": within_ms}
        if tenant_id is not None:
            parameters["tenant_id"] = tenant_id
        where = self.database.transaction(tenant=tenant_id) if tenant_id else self._alone(reads=True)
        async with where as connection:
            rows = (await connection.execute(sa.text(statement), parameters)).all()
        return [MessageHour(row.local_hour, row.zone, row.number, _instant(row.first_due)) for row in rows]

    async def retry(self, ids: Iterable[str], *, by: str) -> set[str]:
        """Send again what failed, expired, was skipped or parked. Returns the ids that were in such a status."""
        ids = check_texts("ids", ids)
        return await self._audited(self.sql.retry, ids, action="message.retry", by=by)

    async def resolve(self, ids: Iterable[str], *, by: str) -> set[str]:
        """Declare parked messages sent, because a person has found out."""
        ids = check_texts("ids", ids)
        return await self._audited(self.sql.resolve, ids, action="message.resolve", by=by)

    async def cancel(self, ids: Iterable[str], *, by: str) -> set[str]:
        """Cancel messages that are not being sent yet."""
        wanted = [one for one in check_texts("ids", ids) if _is_id(one)]
        rows = encode_rows({"id": one, "code": "BY_HAND"} for one in wanted)
        async with self.database.transaction() as connection:
            found = set((await connection.execute(sa.text(self.sql.cancel), {"rows": rows})).scalars())
            await _note(connection, self._notes, found, action="message.cancel", by=by)
        return found

    async def counts(self) -> list[MessageCount]:
        """How many messages have which status."""
        async with self._alone(reads=True) as connection:
            rows = (await connection.execute(sa.text(self.sql.counts))).all()
        return [
            MessageCount(
                occasion=row.occasion,
                status=MessageStatus(row.status),
                count=row.number,
                oldest_due=_instant(row.oldest),
            )
            for row in rows
        ]

    async def lags_ms(self) -> tuple[int, int]:
        """How long the oldest due message waits to be queued, and to be sent; 0 when none does."""
        async with self._alone(reads=True) as connection:
            row = (await connection.execute(sa.text(self.sql.oldest_waiting))).one()
        now_at = _instant(row.now_at)
        unqueued, unsent = (to_datetime(value) or now_at for value in (row.unqueued, row.unsent))
        return (now_at - unqueued) // _MS, (now_at - unsent) // _MS

    async def _audited(self, statement: str, ids: Iterable[str], *, action: str, by: str) -> set[str]:
        rows = encode_rows({"id": one} for one in ids if _is_id(one))
        async with self.database.transaction() as connection:
            found = {row.id for row in await connection.execute(sa.text(statement), {"rows": rows})}
            await _note(connection, self._notes, found, action=action, by=by)
        return found

    def _alone(self, *, reads: bool = False) -> AbstractAsyncContextManager[AsyncConnection]:
        """For one statement over all tenants, which is a transaction by itself: a third of the round trips."""
        if self.database.tenant_required:
            return self.database.transaction()  # refuses, and says why
        return self.database.statement(reads=reads)

    async def _run(self, statement: str, **parameters: Any) -> None:
        await self.database.fetch_of(None, statement, parameters)

    async def _ids(self, statement: str, **parameters: Any) -> set[str]:
        return {row[0] for row in await self.database.fetch_of(None, statement, parameters)}

    async def _read(self, statement: str, tenant: str | None = None, **parameters: Any) -> list[MessageRow]:
        return list(map(_message, await self.database.fetch_of(tenant, statement, parameters, reads=True)))


class Plan:
    """What a planner writes inside its transaction."""

    def __init__(self, connection: AsyncConnection, sql: MessageSql) -> None:
        self._connection, self._sql = connection, sql

    async def create(self, messages: Iterable[Planned]) -> set[str]:
        """Create messages; those that exist stay as they are, unless they were cancelled. Returns the new ids."""
        rows = encode_rows(map(_planned, messages))
        return set((await self._connection.execute(sa.text(self._sql.create), {"rows": rows})).scalars())

    async def next(self, occasions: Iterable[OccasionRow]) -> None:
        """Note when each occasion comes again."""
        rows = encode_rows(
            {**_key_of(one), "next_period": one.next_period, "next_due": _ms(one.next_due)} for one in occasions
        )
        await self._connection.execute(sa.text(self._sql.plan_next), {"rows": rows})


class MessageChange:
    """Recipients that are being changed: what is known of them, and what shall be."""

    def __init__(
        self,
        connection: AsyncConnection,
        sql: MessageSql,
        keys: Sequence[Key],
        now: datetime,
        known: dict[tuple[str, str, str, str], OccasionRow],
        planned: list[tuple[OccasionRow, str, str]],
    ) -> None:
        self._connection, self._sql, self._keys = connection, sql, keys
        self.now = now
        self.known = known
        """Their occasions as they were."""
        self.planned = planned
        """Messages that can still be moved: their occasion with `next_due` as the message's instant; period; id."""

    @classmethod
    async def begin(cls, connection: AsyncConnection, sql: MessageSql, keys: Sequence[Key]) -> MessageChange:
        now = _instant((await connection.execute(sa.text(sql.read_now))).scalar_one())
        known = {row.key: row for row in await _occasions(connection, sql.occasions_of, rows=_keys(keys))}
        rows = (await connection.execute(sa.text(sql.open_messages), {"rows": _keys(keys)})).all()
        planned = [
            (
                OccasionRow(
                    tenant_id=row.tenant_id,
                    recipient_id=row.recipient_id,
                    occasion=row.occasion,
                    label=row.label,
                    on_date="",
                    next_due=_instant(row.due_at),
                    zone=row.zone,
                    channel=row.channel,
                ),
                row.period,
                row.id,
            )
            for row in rows
        ]
        return cls(connection, sql, keys, now, known, planned)

    async def save(self, recipients: Iterable[RecipientRow], occasions: Iterable[OccasionRow]) -> None:
        """Recipients as they shall be, with all occasions that they shall have; others of theirs are removed."""
        wanted = list(occasions)
        people = [
            {
                "tenant_id": one.tenant_id,
                "id": one.id,
                "name": one.name,
                "zone": one.zone,
                "channel": one.channel,
                "address": one.address,
                "locale": one.locale,
                "attributes": json.encode(dict(one.attributes)).decode(),
            }
            for one in recipients
        ]
        await self._run(self._sql.save_recipients, people)
        gone = self.known.keys() - {one.key for one in wanted}
        if gone:
            await self._run(self._sql.remove_occasions, [_key_of(self.known[key]) for key in sorted(gone)])
        await self._run(
            self._sql.save_occasions,
            [
                {
                    **_key_of(one),
                    "on_date": one.on_date,
                    "send_at": one.send_at,
                    "next_period": one.next_period,
                    "next_due": _ms(one.next_due),
                }
                for one in wanted
            ],
        )

    async def remove(self) -> int:
        """Forget the recipients; their occasions go with them. Returns how many there were."""
        statement, rows = sa.text(self._sql.remove_recipients), {"rows": _keys(self._keys)}
        return len((await self._connection.execute(statement, rows)).all())

    async def move(self, messages: Iterable[Planned]) -> None:
        await self._run(self._sql.move, [_planned(one) for one in messages])

    async def cancel(self, ids: Iterable[str], *, code: str) -> None:
        await self._run(self._sql.cancel, [{"id": one, "code": code} for one in ids])

    async def _run(self, statement: str, rows: list[dict[str, Any]]) -> None:
        if rows:
            await self._connection.execute(sa.text(statement), {"rows": encode_rows(rows)})


# Translating --------------------------------------------------------------------------------------------------------


async def _occasions(connection: AsyncConnection, statement: str, **parameters: Any) -> list[OccasionRow]:
    rows = (await connection.execute(sa.text(statement), parameters)).all()
    return [
        OccasionRow(
            tenant_id=row[0],
            recipient_id=row[1],
            occasion=row[2],
            label=row[3],
            on_date=row[4],
            send_at=row[5],
            next_due=to_datetime(row[6]),
            next_period=row[7] or "",
            zone=row[8],
            channel=row[9],
        )
        for row in rows
    ]


async def _note(connection: AsyncConnection, statement: str, ids: Iterable[str], *, action: str, by: str) -> None:
    rows = [
        {"actor": by[:120], "action": action, "subject": f"message/{one}", "tenant_id": None, "detail": None}
        for one in sorted(ids)
    ]
    if rows:
        await connection.execute(sa.text(statement), {"rows": encode_rows(rows)})


def _keys(keys: Sequence[Key]) -> str:
    return encode_rows({"tenant_id": tenant, "id": one} for tenant, one in sorted(set(keys)))


def _key_of(one: OccasionRow) -> dict[str, Any]:
    return dict(zip(("tenant_id", "recipient_id", "occasion", "label"), one.key, strict=True))


def _planned(one: Planned) -> dict[str, Any]:
    return {
        "id": one.id,
        "tenant_id": one.tenant_id,
        "recipient_id": one.recipient_id,
        "occasion": one.occasion,
        "label": one.label,
        "period": one.period,
        "number": one.number,
        "channel": one.channel,
        "zone": one.zone,
        "local_at": one.local_at,
        "late_policy": one.late_policy,
        "due_at": _ms(one.due_at),
        "late_at": _ms(one.late_at),
    }


def _to_publish(row: Sequence[Any]) -> ToPublish:
    row_id, tenant_id, occasion, due, publication, now = row
    due_at = _instant(due)
    # Rounded up: a millisecond late is on time, a millisecond early is not.
    delay_ms = max(0, -((_instant(now) - due_at) // _MS))
    return ToPublish(
        id=row_id,
        tenant_id=tenant_id,
        occasion=occasion,
        due_at=due_at,
        delay_ms=delay_ms,
        publication=publication,
    )


def _message(row: Sequence[Any]) -> MessageRow:
    """Of the columns of a message, the database's now, and the recipient's where there is one."""
    values = dict(zip(_FIELDS, row, strict=False))
    for name in _INSTANTS:
        values[name] = to_datetime(values[name])
    values["status"] = _STATUSES[values["status"]]
    here = len(_FIELDS)
    recipient = None if row[here + 2] is None else _recipient(row[here + 1 :])
    return MessageRow(**values, recipient=recipient, read_at=_instant(row[here]))


def _recipient(row: Sequence[Any]) -> RecipientRow:
    tenant_id, one, name, zone, channel, address, locale, attributes = row
    return RecipientRow(
        tenant_id=tenant_id,
        id=one,
        name=name,
        zone=zone,
        channel=channel,
        address=address,
        locale=locale,
        attributes=json.decode(attributes.encode()) if attributes else {},
    )


def _instant(value: Any) -> datetime:
    found = to_datetime(value)
    assert found is not None
    return found


def _ms(instant: datetime | None) -> int | None:
    return None if instant is None else to_epoch_ms(instant)
