"""The ledger's own event store: append-only streams, and all events in one order that no reader can misread.

In: new events, inside the caller's own transaction or one of ours. Out: events by stream, or by position. A position is
given when an event is *seen to be committed*, not when it is inserted: numbers that are given at insertion become
visible in another order, and a reader that has passed 7 would never look at a 6 that commits later. On PostgreSQL
readers number what they find, one reader at a time; SQLite has one writer at a time, so the insert does it. Appending
therefore never waits for readers nor for other streams, and positions have no gaps.

Elsewhere: which connections are understood (`_callers`), what reads this (`bullpen.plugins.sources.sql`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa

from bullpen._kernel import json
from bullpen._kernel.duration import check_int
from bullpen.errors import EventIdTaken, InvalidOption, WrongVersion, require
from bullpen.ledger import tables, wakeups
from bullpen.ledger._callers import Rows, async_caller, sync_caller
from bullpen.ledger.database import Database, DialectName, qualified
from bullpen.ledger.records import _json_text, check_text, encode_rows
from bullpen.ledger.tables import to_datetime
from bullpen.ports.source import BEGINNING, NO_STREAM, NewEvent, SourceEvent

MAX_LENGTHS: Final = {"stream": 200, "id": 100, "type": 120}
_COLUMNS: Final = {
    "n": "int",
    "stream_id": "text",
    "expected": "bigint",
    "event_id": "text",
    "event_type": "text",
    "data": "text",
    "metadata": "text",
    "tenant_id": "text",
}
_NUMBER_AT_ONCE: Final = 1_000

Plan = Generator[tuple[str, str], Rows, "Appended"]


@dataclass(frozen=True, slots=True)
class Appended:
    """What an append did. `created` is False when these very events were there already."""

    version: int
    """Of the stream now, that is of the last event."""
    created: bool


class EventLog:
    """The events of one ledger."""

    def __init__(self, database: Database, *, notify: bool = True) -> None:
        self._database, self.notify = database, notify

    # ---- appending ----------------------------------------------------------------------------------------------

    async def append(
        self, connection: Any, stream: str, events: Iterable[NewEvent], *, expected_version: int | None = None
    ) -> Appended:
        """Append events to a stream in the caller's open transaction; None as connection: in one of our own.

        `expected_version` is the version that the decision was made on, NO_STREAM for a stream that must be new, None
        for any. Raises WrongVersion when the stream is at another one. Appending events again, by their ids, changes
        nothing. Two transactions that append to one stream go one after the other.
        """
        if connection is None:
            given = list(events)
            tenant = next((event.metadata.tenant_id for event in given if event.metadata.tenant_id), None)
            async with self._database.transaction(tenant=tenant) as own:
                return await self.append(own, stream, given, expected_version=expected_version)
        caller = async_caller(connection)
        plan = self._plan(caller.dialect, stream, list(events), expected_version)
        rows: Rows | None = None
        while True:
            try:
                statement, parameter = next(plan) if rows is None else plan.send(rows)
            except StopIteration as done:
                result: Appended = done.value
                return result
            rows = await caller.run(statement, parameter)

    def append_sync(
        self, connection: Any, stream: str, events: Iterable[NewEvent], *, expected_version: int | None = None
    ) -> Appended:
        """As `append`, for a blocking connection with an open transaction."""
        caller = sync_caller(connection)
        plan = self._plan(caller.dialect, stream, list(events), expected_version)
        rows: Rows | None = None
        while True:
            try:
                statement, parameter = next(plan) if rows is None else plan.send(rows)
            except StopIteration as done:
                result: Appended = done.value
                return result
            rows = caller.run(statement, parameter)

    def _plan(self, dialect: DialectName, stream: str, events: Sequence[NewEvent], expected: int | None) -> Plan:
        """Statements to run one after the other, for whatever kind of connection."""
        records = _records(stream, events, expected)
        rows = encode_rows(records)
        if dialect == "postgresql":
            # Before the statement that looks at the version: it must see what the one before us has committed.
            yield self._lock_stream(), rows
        added = yield self._insert(dialect), rows
        if added:
            return Appended(max(row[0] for row in added), created=True)
        known = {row[0]: (row[1], row[2]) for row in (yield self._known(dialect), rows)}
        ours = [known.get(event.id, ("", NO_STREAM)) for event in events]
        first = ours[0][1]
        if all(place == (stream, first + n) for n, place in enumerate(ours)):
            return Appended(first + len(events) - 1, created=False)
        taken = next(((event.id, known[event.id][0]) for event in events if event.id in known), None)
        if taken is not None:
            raise EventIdTaken(*taken)
        ((actual,),) = yield self._current(dialect), rows
        raise WrongVersion(stream, expected, NO_STREAM if actual is None else actual)

    def _table(self, dialect: DialectName) -> str:
        return qualified(dialect, self._database.schema, tables.events.name)

    def _batch(self, dialect: DialectName) -> str:
        if dialect == "postgresql":
            typed = ", ".join(f"s_{name} {kind}" for name, kind in _COLUMNS.items())
            return f"SELECT * FROM jsonb_to_recordset(CAST(:rows AS jsonb)) AS s({typed})"
        parts = ", ".join(f"json_extract(value, '$.s_{name}') AS s_{name}" for name in _COLUMNS)
        return f"SELECT {parts} FROM json_each(:rows)"

    @property
    def channel(self) -> str:
        """Where a commit with new events is told on PostgreSQL."""
        return f"{self._database.schema}_events"

    def _lock_stream(self) -> str:
        # Two streams with the same hash wait for each other without need, which is all that can happen.
        name = f"'{self._table('postgresql')}/' || s_stream_id"
        return f"""\
SELECT pg_advisory_xact_lock(hashtextextended({name}, 0)) FROM ({self._batch("postgresql")}) b WHERE s_n = 0"""

    def _insert(self, dialect: DialectName) -> str:
        table, postgres = self._table(dialect), dialect == "postgresql"
        json_of = "CAST({} AS jsonb)" if postgres else "{}"
        position = "NULL" if postgres else f"(SELECT coalesce(max(position), 0) FROM {table}) + 1 + s_n"
        into = f"INSERT INTO {table} (position, stream_id, version, event_id, event_type, data, metadata, tenant_id)"
        select = f"""\
SELECT {position}, s_stream_id, now_at + 1 + s_n, s_event_id, s_event_type, {json_of.format("s_data")},
    {json_of.format("s_metadata")}, s_tenant_id
FROM b, (SELECT coalesce(max(version), {NO_STREAM}) AS now_at FROM {table}
    WHERE stream_id = (SELECT min(s_stream_id) FROM b)) AS v
WHERE (s_expected IS NULL OR s_expected = now_at)
    AND NOT EXISTS (SELECT 1 FROM {table} WHERE event_id IN (SELECT s_event_id FROM b))
ORDER BY s_n
RETURNING version"""
        batch = f"WITH b AS ({self._batch(dialect)})"
        if not postgres:
            # INSERT as the first word: only then does Python's sqlite3 begin a transaction by itself.
            return f"{into}\n{batch}\n{select}"
        tell = f", (SELECT pg_notify('{self.channel}', ''))" if self.notify else ""
        return f"{batch}, added AS ({into}\n{select})\nSELECT added.*{tell} FROM added"

    def _known(self, dialect: DialectName) -> str:
        return f"""\
SELECT event_id, stream_id, version FROM {self._table(dialect)}
WHERE event_id IN (SELECT s_event_id FROM ({self._batch(dialect)}) b)"""

    def _current(self, dialect: DialectName) -> str:
        return f"""\
SELECT max(version) FROM {self._table(dialect)}
WHERE stream_id = (SELECT min(s_stream_id) FROM ({self._batch(dialect)}) b)"""

    # ---- reading ------------------------------------------------------------------------------------------------

    async def stream(
        self, stream: str, *, after: int = NO_STREAM, limit: int = 1_000, tenant_id: str | None = None
    ) -> list[SourceEvent]:
        """Events of one stream behind a version, oldest first. Behind row-level security name the tenant."""
        check_int("limit", limit, minimum=1)
        where = "stream_id = :stream AND version > :after ORDER BY version LIMIT :limit"
        async with self._database.transaction(tenant=tenant_id) as connection:
            found = await connection.execute(
                sa.text(self._select(where)), {"stream": stream, "after": after, "limit": limit}
            )
            return [_event(row) for row in found.all()]

    async def page(self, after: int, limit: int, *, until: int | None = None) -> list[SourceEvent]:
        """Events behind a position, in the order of positions. None is ever passed over."""
        await self.number()
        where = "position > :after AND position <= :until ORDER BY position LIMIT :limit"
        values = {"after": after, "until": 2**62 if until is None else until, "limit": limit}
        async with self._database.transaction_without_tenant() as connection:
            return [_event(row) for row in (await connection.execute(sa.text(self._select(where)), values)).all()]

    async def number(self) -> int:
        """Give positions to events that are committed and have none. Returns how many it were."""
        if not self._database.is_postgres:
            return 0  # done by the insert
        table = self._table("postgresql")
        waiting = sa.text(f"SELECT 1 FROM {table} WHERE position IS NULL LIMIT 1")
        lock = sa.text(f"SELECT pg_advisory_xact_lock(hashtextextended('{table}', 0))")
        number = sa.text(f"""\
UPDATE {table} e SET position = (SELECT coalesce(max(position), 0) FROM {table}) + f.n
FROM (SELECT id, row_number() OVER (ORDER BY id) AS n FROM
    (SELECT id FROM {table} WHERE position IS NULL ORDER BY id LIMIT {_NUMBER_AT_ONCE}) u) f
WHERE e.id = f.id""")
        total = 0
        while True:
            async with self._database.transaction_without_tenant() as connection:
                if (await connection.execute(waiting)).first() is None:
                    return total
                # Until the commit: nobody gives the same numbers, and nobody sees higher ones before ours are there.
                await connection.execute(lock)
                total += (await connection.execute(number)).rowcount

    async def head(self) -> int:
        """The position of the newest event, BEGINNING when there is none. Events without a position count too."""
        table = self._database.table(tables.events.name)
        query = sa.text(
            f"SELECT (SELECT max(position) FROM {table}), (SELECT count(*) FROM {table} WHERE position IS NULL)"
        )
        async with self._database.transaction_without_tenant() as connection:
            highest, waiting = (await connection.execute(query)).one()
        return BEGINNING if highest is None and not waiting else (highest or 0) + waiting

    def commits(self) -> AsyncGenerator[str, None]:
        """Yields when new events may have come; see `wakeups.commits`."""
        return wakeups.commits(self._database, self.channel)

    def _select(self, where: str) -> str:
        return (
            "SELECT position, stream_id, version, event_id, event_type, CAST(data AS text), CAST(metadata AS text), "
            f"recorded_at FROM {self._database.table(tables.events.name)} WHERE {where}"
        )


def _records(stream: str, events: Sequence[NewEvent], expected: int | None) -> list[dict[str, Any]]:
    """What is appended, checked at the door."""
    check_text("stream", stream, MAX_LENGTHS["stream"], required=True)
    require("events", bool(events), "at least one event", events)
    if expected is not None:
        check_int("expected_version", expected, minimum=NO_STREAM)
    records = []
    for n, event in enumerate(events):
        if not isinstance(event, NewEvent):
            raise InvalidOption("events", "NewEvent objects", event)
        check_text("event id", event.id, MAX_LENGTHS["id"], required=True)
        check_text("event type", event.type, MAX_LENGTHS["type"], required=True)
        require(
            "event type",
            not event.type.startswith("$"),
            "your own event type; names with $ belong to event stores",
            event.type,
        )
        data, metadata = _json_text(event.data, "data"), _json_text(event.metadata.to_wire(), "metadata")
        json.check_payload_size(len(data.encode()), len(metadata.encode()))
        records.append(
            {
                "n": n,
                "stream_id": stream,
                "expected": expected,
                "event_id": event.id,
                "event_type": event.type,
                "data": data,
                "metadata": metadata,
                "tenant_id": event.metadata.tenant_id,
            }
        )
    require("events", len({event.id for event in events}) == len(events), "events with different ids", events)
    return records


def _event(row: Any) -> SourceEvent:
    position, stream, version, event_id, event_type, data, metadata, recorded_at = row
    instant = to_datetime(recorded_at)
    assert instant is not None
    return SourceEvent(
        id=event_id,
        stream=stream,
        type=event_type,
        version=version,
        position=BEGINNING if position is None else position,
        recorded_at=instant,
        data_bytes=data.encode(),
        metadata_bytes=metadata.encode(),
    )
