"""Open incidents, and whether they were reported. One truth for all processes that watch.

In: what a watcher decided about the incidents it has read. Out: the incidents and the messages that report them, stored
in one transaction: a crash before it changes nothing, a crash after it loses nothing. Watchers take turns, so many of
them poll as often as one, and a watcher that was overtaken writes nothing.
Elsewhere: deciding (`bullpen.ops.incidents`), what is checked (`bullpen.ops.symptoms`), delivering (`bullpen.outbox`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from bullpen.ledger import tables
from bullpen.ledger._sql import Sql
from bullpen.ledger.database import Database
from bullpen.ledger.enqueue import Enqueuer
from bullpen.ledger.records import OutboxItem, check_text, encode_rows, one_line
from bullpen.ledger.tables import to_datetime

_table: Final = tables.incidents
_TURN: Final = "alerts"
_KEY: Final = ("rule", "subject")
_SILENCE: Final = ("silenced_until", "silenced_by", "silence_reason")
NO_NOTE: Final[Mapping[str, Any]] = MappingProxyType({})

IncidentKey = tuple[str, str]
"""Rule and subject."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One thing that is or was wrong."""

    rule: str
    subject: str
    number: int
    """Grows with every incident of this rule and subject."""
    opened_at: datetime
    seen_at: datetime
    """When it was last seen to be so."""
    told_at: datetime | None
    """When somebody was last told; None: not yet."""
    told_value: int | None
    resolved_at: datetime | None
    value: int
    message: str
    fix: str
    silenced_until: datetime | None = None
    """Nobody is told of it before."""
    silenced_by: str | None = None
    silence_reason: str | None = None

    def is_silent(self, now: datetime) -> bool:
        """Whether nobody is to be told of it."""
        return self.silenced_until is not None and now < self.silenced_until

    @property
    def key(self) -> IncidentKey:
        return self.rule, self.subject


@dataclass(frozen=True, slots=True)
class Turn:
    """The right to look and write once."""

    number: int
    now: datetime
    """By the database's clock."""


@dataclass(frozen=True, slots=True)
class IncidentVerdict:
    """What is to be written."""

    changed: Collection[Incident]
    """Stored as they are."""
    forgotten: Collection[IncidentKey]
    """Never told, and not so after all."""
    messages: Sequence[OutboxItem]


class Incidents:
    """The incidents of one ledger."""

    def __init__(self, database: Database, enqueuer: Enqueuer) -> None:
        self._database, self._enqueuer = database, enqueuer

    async def take_turn(self, every_ms: int) -> Turn | None:
        """The next turn, or None while another watcher's is younger than `every_ms`."""
        async with self._database.transaction_without_tenant() as connection:
            values = {"name": _TURN, "every_ms": every_ms}
            row = (await connection.execute(sa.text(self._sql.take_turn()), values)).first()
        return None if row is None else Turn(int(row.position), _instant(row.now_at))

    async def apply(
        self, turn: Turn, decide: Callable[[Mapping[IncidentKey, Incident], datetime], IncidentVerdict]
    ) -> IncidentVerdict | None:
        """Show the incidents to `decide` and write what it says; None when another turn has begun meanwhile.

        `decide` gets all that are open or were resolved, and the database's now; it does no input or output.
        """
        async with self._database.transaction_without_tenant() as connection:
            held = {"name": _TURN, "position": str(turn.number)}
            row = (await connection.execute(sa.text(self._sql.hold_turn), held)).first()
            if row is None:
                return None
            verdict = decide(await self._all(connection), _instant(row.now_at))
            for incident in verdict.changed:
                await self._run(connection, self._save(incident))
            for rule, subject in verdict.forgotten:
                gone = _table.delete().where(_table.c.rule == rule, _table.c.subject == subject)
                await self._run(connection, gone)
            if verdict.messages:
                await self._enqueuer.enqueue_many(connection, verdict.messages)
        return verdict

    async def open(self) -> list[Incident]:
        """Those that are so now and somebody was told of, oldest first."""
        async with self._database.transaction_without_tenant() as connection:
            found = (await self._all(connection)).values()
        told = [incident for incident in found if incident.resolved_at is None and incident.told_at is not None]
        return sorted(told, key=lambda incident: (incident.opened_at, incident.key))

    async def silence(
        self,
        rule: str,
        subject: str,
        *,
        until: datetime | None,
        by: str,
        reason: str = "",
        note: Mapping[str, Any] = NO_NOTE,
    ) -> bool:
        """Tell nobody of an open incident before `until`; None: tell again. False when there is none. Audited."""
        check_text("rule", rule, 60)
        by, why = one_line(by, 120), one_line(reason) or None
        async with self._database.transaction_without_tenant() as connection:
            change = (
                _table.update()
                .where(_table.c.rule == rule, _table.c.subject == subject, _table.c.resolved_at.is_(None))
                .values(
                    silenced_until=until,
                    silenced_by=None if until is None else by,
                    silence_reason=None if until is None else why,
                )
            )
            if not (await self._run(connection, change)).rowcount:
                return False
            detail = {**note, "until": None if until is None else until.isoformat(), "reason": why}
            entry = {
                "actor": by,
                "action": "incident.unsilence" if until is None else "incident.silence",
                "subject": one_line(f"{rule}/{subject}", 200),
                "tenant_id": None,
                "detail": msgspec.json.encode({name: value for name, value in detail.items() if value}).decode(),
            }
            await connection.execute(sa.text(self._sql.audit_entries), {"rows": encode_rows([entry])})
        return True

    # ---- inside -------------------------------------------------------------------------------------------------

    @property
    def _sql(self) -> Sql:
        return Sql(self._database.dialect, self._database.schema, self._database.clock_offset_ms)

    async def _all(self, connection: AsyncConnection) -> dict[IncidentKey, Incident]:
        rows = (await self._run(connection, sa.select(_table))).all()
        found = [Incident(**row._mapping) for row in rows]
        return {incident.key: incident for incident in found}

    def _save(self, incident: Incident) -> Any:
        insert = (postgresql.insert if self._database.is_postgres else sqlite.insert)(_table)
        values = asdict(incident)
        # A silence that was begun since this incident was read stays; a new incident has none.
        is_same = _table.c.number == incident.number
        rest = {
            name: sa.case((is_same, _table.c[name]), else_=None) if name in _SILENCE else value
            for name, value in values.items()
            if name not in _KEY
        }
        return insert.values(**values).on_conflict_do_update(index_elements=_KEY, set_=rest)

    async def _run(self, connection: AsyncConnection, statement: Any) -> Any:
        return await connection.execute(
            statement, execution_options={"schema_translate_map": self._database.translate_map}
        )


def _instant(value: Any) -> datetime:
    instant = to_datetime(value)
    assert instant is not None
    return instant
