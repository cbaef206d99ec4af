"""Store messages inside the caller's own transaction, whatever kind of connection holds it.

In: messages and a connection with an open transaction. Out: rows that exist if and only if that transaction commits.
Nothing here commits, and no connection is opened. Elsewhere: what a message is (`records`), which connections are
understood (`_callers`), delivering (`bullpen.outbox`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from bullpen._kernel.duration import check_int
from bullpen.errors import InvalidOption
from bullpen.ledger._callers import CallerConnection, Rows, async_caller, sync_caller
from bullpen.ledger._sql import Sql
from bullpen.ledger.database import DialectName, check_identifier
from bullpen.ledger.endpoint_records import wants
from bullpen.ledger.records import Enqueued, OutboxItem, encode_rows
from bullpen.ledger.tables import SCHEMA

Source = tuple[str, str, str]


class Enqueuer:
    """Writes outbox rows. Needs no ledger and no engine: only the caller's connection.

    `notify=False` leaves out PostgreSQL's NOTIFY: where very many transactions commit at once they would queue for its
    lock. Dispatchers then find new rows when they look, every `OUTBOX_TICK_INTERVAL_MS`.
    `strict=True` stores each source event once whatever its route, as an index without route would.
    """

    def __init__(
        self, *, schema: str = SCHEMA, notify: bool = True, strict: bool = False, max_attempts: int = 10
    ) -> None:
        self._schema = check_identifier("schema", schema)
        self.notify = notify
        self.is_strict = strict
        """Each source event is stored once, whatever its route."""
        self._max_attempts = check_int("max_attempts", max_attempts, minimum=1, maximum=1_000_000)
        self._sql: dict[DialectName, tuple[Sql, str]] = {}

    # ---- storing ------------------------------------------------------------------------------------------------

    async def enqueue(self, connection: Any, item: OutboxItem) -> Enqueued:
        """Store one message in the caller's transaction."""
        (result,) = await self.enqueue_many(connection, [item])
        return result

    async def enqueue_many(self, connection: Any, items: Iterable[OutboxItem]) -> list[Enqueued]:
        """Store messages with one statement, in their order."""
        caller = async_caller(connection)
        records = self._records(items)
        if not records:
            return []
        added = await self._insert_async(caller, records)
        missing = [record for record in records if _source(record) not in added]
        known = await self._existing_async(caller, missing) if missing else ()
        return _results(records, added, known)

    def enqueue_sync(self, connection: Any, item: OutboxItem) -> Enqueued:
        """As `enqueue`, for blocking connections."""
        (result,) = self.enqueue_many_sync(connection, [item])
        return result

    def enqueue_many_sync(self, connection: Any, items: Iterable[OutboxItem]) -> list[Enqueued]:
        """As `enqueue_many`, for blocking connections."""
        caller = sync_caller(connection)
        records = self._records(items)
        if not records:
            return []
        sql, insert = self._statements(caller.dialect)
        added = _by_source(caller.run(insert, _encode(records)))
        missing = [record for record in records if _source(record) not in added]
        known = caller.run(sql.existing, _encode(missing)) if missing else ()
        return _results(records, added, known)

    async def endpoints_of(self, connection: Any, tenant_id: str, event_type: str) -> list[str]:
        """The endpoints of a tenant that want an event, as the caller's transaction sees them."""
        caller = async_caller(connection)
        statement = self._statements(caller.dialect)[0].endpoints_of
        return _wanting(await caller.run(statement, _tenants(tenant_id)), event_type)

    def endpoints_of_sync(self, connection: Any, tenant_id: str, event_type: str) -> list[str]:
        """As `endpoints_of`, for blocking connections."""
        caller = sync_caller(connection)
        statement = self._statements(caller.dialect)[0].endpoints_of
        return _wanting(caller.run(statement, _tenants(tenant_id)), event_type)

    async def insert_records(self, connection: AsyncConnection, records: Sequence[Mapping[str, Any]]) -> list[str]:
        """Store rows that were made by the ledger itself. Returns the ids of those that were not there yet."""
        return list((await self._insert_async(async_caller(connection), records)).values())

    def insert_records_sync(self, connection: sa.Connection, records: Sequence[Mapping[str, Any]]) -> list[str]:
        """As `insert_records`, for blocking connections."""
        caller = sync_caller(connection)
        return list(_by_source(caller.run(self._statements(caller.dialect)[1], _encode(records))).values())

    # ---- inside -------------------------------------------------------------------------------------------------

    def _records(self, items: Iterable[OutboxItem]) -> list[dict[str, Any]]:
        given = list(items)
        for item in given:
            if not isinstance(item, OutboxItem):
                raise InvalidOption("items", "OutboxItem objects", item)
        return [item.to_record(default_attempts=self._max_attempts, strict=self.is_strict) for item in given]

    def _statements(self, dialect: DialectName) -> tuple[Sql, str]:
        known = self._sql.get(dialect)
        if known is None:
            sql = Sql(dialect, self._schema)
            known = self._sql[dialect] = (sql, sql.enqueue(notify=self.notify))
        return known

    async def _insert_async(self, caller: CallerConnection, records: Sequence[Mapping[str, Any]]) -> dict[Source, str]:
        return _by_source(await caller.run(self._statements(caller.dialect)[1], _encode(records)))

    async def _existing_async(self, caller: CallerConnection, records: Sequence[Mapping[str, Any]]) -> Rows:
        found: Rows = await caller.run(self._statements(caller.dialect)[0].existing, _encode(records))
        return found


def _tenants(tenant_id: str) -> str:
    return encode_rows([{"tenant": tenant_id}])


def _wanting(rows: Rows, event_type: str) -> list[str]:
    return [row[0] for row in rows if wants(msgspec.json.decode(row[1]), event_type)]


def _encode(records: Sequence[Mapping[str, Any]]) -> str:
    return msgspec.json.encode(
        [{"s_n": n, **{f"s_{name}": value for name, value in record.items()}} for n, record in enumerate(records)]
    ).decode()


def _source(record: Mapping[str, Any]) -> Source:
    return record["source_stream_id"], record["source_event_id"], record["route_key"]


def _by_source(rows: Rows) -> dict[Source, str]:
    return {(row[1], row[2], row[3]): row[0] for row in rows}


def _results(records: Sequence[Mapping[str, Any]], added: Mapping[Source, str], known: Rows) -> list[Enqueued]:
    """`known`: rows and fences of what was not added."""
    ids = {(row[1], row[2], row[3]): row[0] for row in known if row[0] is not None}
    tenants = {(row[1], row[2], row[3]): row[4] for row in known}
    results, seen = [], set()
    for record in records:
        source = _source(record)
        created = source in added and source not in seen  # the same event twice in one call: the second is a duplicate
        seen.add(source)
        if source not in added:
            _refuse_anothers(record, tenants)
        results.append(Enqueued(added.get(source) or ids.get(source), created))
    return results


def _refuse_anothers(record: Mapping[str, Any], tenants: Mapping[Source, str | None]) -> None:
    """Two tenants with one name for two events: the second is no repetition, and would silently never be sent.

    A row that is there and cannot be seen is one that row-level security hides: also another tenant's.
    """
    tenant, source = record["tenant_id"], _source(record)
    if tenant is not None and tenants.get(source, "") not in (None, tenant):
        raise InvalidOption(
            "source_event_id",
            "an event that no other tenant has stored for this route; put the tenant into source_stream_id",
            f"{source[0]}/{source[1]}",
        )
