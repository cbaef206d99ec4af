"""Entities of workflows as rows of the user's own tables, changed in one transaction with all that belongs to it.

In: a mapped class of SQLAlchemy whose table is in the ledger's database, with columns for urn, status and version. Out:
the port `bullpen.ports.entity.EntityStore`: the row, its past, the identities of its events and its outgoing messages
are committed together or not at all. No transaction is open while actions run.
Elsewhere: deciding what an event does (`bullpen.workflow`), delivering the messages (`bullpen.outbox`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeVar

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import attributes
from sqlalchemy.orm.exc import StaleDataError

from bullpen.errors import EntityChanged, InvalidOption, require, word
from bullpen.ledger import tables
from bullpen.ledger.ledger import Ledger
from bullpen.ledger.records import check_text
from bullpen.ledger.turns import Turns
from bullpen.ports.entity import AllowedStates, Applied, Change, EntityHead, HistoryEntry, Loaded

__all__ = ["SqlEntities"]

T = TypeVar("T")
S = TypeVar("S")

_history: Final = tables.workflow_history
_LONGEST_KEY: Final = 300
_LONGEST_URN: Final = 300
_LONGEST_TENANT: Final = 60


class _NotStored(Exception):
    """The database refused a new row. Why, is asked when the transaction has ended."""

    def __init__(self, cause: sa.exc.IntegrityError) -> None:
        super().__init__(str(cause))
        self.cause = cause


class SqlEntities(Generic[T, S]):
    """Rows of one mapped class.

        class Order(Base):
            __tablename__ = "orders"
            urn: Mapped[str] = mapped_column(primary_key=True)
            status: Mapped[OrderStatus]
            version: Mapped[int] = mapped_column(default=1)

        orders = SqlEntities[Order, OrderStatus](Order, ledger)

    Actions get the object outside of any session: what they need must be loaded with it (`options`, such as
    `selectinload(Order.lines)`), and they return the object that they were given.
    """

    can_send = True

    def __init__(
        self,
        model: type[T],
        ledger: Ledger,
        *,
        urn: str = "urn",
        status: str = "status",
        version: str = "version",
        status_type: Callable[[str], S] | None = None,
        new: Callable[[], T] | None = None,
        options: Sequence[Any] = (),
    ) -> None:
        """`urn`, `status` and `version` name attributes of the class. `status_type` makes a status of a column's text;
        without it the column holds the status itself. `new` makes a blank object; by default the class does."""
        ledger.use("workflows")
        self._model, self._ledger, self._database = model, ledger, ledger.database
        self._urn, self._status, self._version = urn, status, version
        self._status_type, self._options = status_type, tuple(options)
        self._new = new or model
        self._states = AllowedStates()
        mapper = sa.inspect(model, raiseerr=False)
        require("model", mapper is not None, "a mapped class of SQLAlchemy", model)
        for option, name in (("urn", urn), ("status", status), ("version", version)):
            hint = "; add `version: Mapped[int] = mapped_column(default=1)`" if option == "version" else ""
            known = mapper is not None and name in mapper.column_attrs
            require(option, known, f"a column of {model.__name__}{hint}", name)

    @property
    def turns(self) -> Turns:
        """Where events of one entity take turns."""
        return self._ledger.turns

    @property
    def kind(self) -> str:
        """Tells these entities from others of the same ledger."""
        return str(sa.inspect(self._model, raiseerr=True).base_mapper.local_table)

    # ---- for programs -------------------------------------------------------------------------------------------

    def allow(self, states: Sequence[Any]) -> None:
        """Let `create` take entities in these states; a workflow that is registered does it."""
        self._states.allow(states)

    async def create(self, entity: T, *, tenant_id: str | None = None) -> T:
        """Store a new entity. A program may as well insert it itself. Raises EntityChanged when its urn exists."""
        urn = self.urn(entity)
        check_text("entity.urn", urn, _LONGEST_URN)
        check_text("tenant_id", tenant_id, _LONGEST_TENANT, required=False)
        if getattr(entity, self._version) is None:
            setattr(entity, self._version, 1)
        if getattr(entity, self._status) is not None:  # else the column has a default
            self._states.check(self.status(entity))
        try:
            async with self._database.transaction(tenant=tenant_id) as connection, self._session(connection) as session:
                session.add(entity)
                await self._insert(session)
                await _reload(session, entity)
        except _NotStored as error:
            raise await self._why(error, urn, tenant_id, exists=True) from error
        return entity

    async def load(self, urn: str, *, tenant_id: str | None = None) -> T | None:
        loaded = await self.read("", urn, tenant_id=tenant_id)
        return None if loaded is None else loaded.entity

    # ---- the port -----------------------------------------------------------------------------------------------

    def new(self) -> T:
        return self._new()

    def status(self, entity: T) -> S:
        value = getattr(entity, self._status)
        status: S = value if self._status_type is None else self._status_type(value)
        return status

    def urn(self, entity: T) -> str:
        return str(getattr(entity, self._urn))

    async def read(
        self, workflow: str, urn: str, keys: Sequence[str] = (), *, tenant_id: str | None = None
    ) -> Loaded[T] | None:
        check_text("urn", urn, _LONGEST_URN)
        check_text("tenant_id", tenant_id, _LONGEST_TENANT, required=False)
        async with self._database.transaction(tenant=tenant_id) as connection:
            # The entity first: an event that is committed in between is then found among the applied ones. The other
            # way round it would look new, and the entity would be read with it.
            async with self._session(connection) as session:
                query = sa.select(self._model).where(self._column(self._urn) == urn).options(*self._options)
                entity = (await session.execute(query)).unique().scalar_one_or_none()
            if entity is None:
                return None
            applied = await self._applied(connection, workflow, urn, keys, tenant_id) if keys else {}
        return Loaded(entity, getattr(entity, self._version), applied)

    async def advance(self, entity: T, status: S) -> T:
        setattr(entity, self._status, status if self._status_type is None else word(status))
        return entity

    async def commit(self, change: Change[T]) -> T:
        try:
            return await self._commit(change)
        except _NotStored as error:
            raise await self._why(error, change.urn, change.tenant_id) from error

    async def _commit(self, change: Change[T]) -> T:
        entity, is_new = change.entity, change.version == 0
        state = sa.inspect(entity)
        if not (state.transient if is_new else state.detached):
            raise InvalidOption("entity", "the object that the action was given, outside of a session", entity)
        async with self._database.transaction(tenant=change.tenant_id) as connection:
            async with self._session(connection) as session:
                if is_new:
                    setattr(entity, self._version, 1)
                else:
                    await self._take_version(session, change)
                    # The row is ours until the commit: nobody else can have changed it.
                    attributes.set_committed_value(entity, self._version, change.version + 1)
                session.add(entity)
                try:
                    await (self._insert(session) if is_new else session.flush())
                except StaleDataError as error:
                    raise EntityChanged(change.urn) from error
                await _reload(session, entity)
            await self._remember(connection, change, getattr(entity, self._version))
            await self._ledger.enqueuer.enqueue_many(connection, change.messages)
        return entity

    async def history(
        self, workflow: str, urn: str, *, limit: int = 100, tenant_id: str | None = None
    ) -> list[HistoryEntry]:
        query = (
            sa.select(_history)
            .where(_history.c.tenant_id == (tenant_id or ""), _history.c.workflow == workflow, _history.c.urn == urn)
            .order_by(_history.c.id.desc())
            .limit(limit)
        )
        async with self._database.transaction(tenant=tenant_id) as connection:
            rows = (await connection.execute(query, execution_options=self._places())).all()
        return [_entry(row) for row in reversed(rows)]

    # ---- looking ------------------------------------------------------------------------------------------------

    async def count_by_status(self, *, most: int = 100_000, tenant_id: str | None = None) -> dict[str, int]:
        status = self._column(self._status)
        some = sa.select(status.label("status")).select_from(self._model).limit(most).subquery()
        query = sa.select(some.c.status, sa.func.count()).group_by(some.c.status)
        async with self._database.transaction(tenant=tenant_id) as connection, self._session(connection) as session:
            return {word(found): count for found, count in (await session.execute(query)).all()}

    async def browse(
        self,
        *,
        status: str | None = None,
        prefix: str = "",
        after: str | None = None,
        limit: int = 50,
        tenant_id: str | None = None,
    ) -> list[EntityHead]:
        urn, state, version = (self._column(name) for name in (self._urn, self._status, self._version))
        query = sa.select(urn, state, version).order_by(urn).limit(limit)
        if status is not None:
            kind = getattr(state.type, "enum_class", None)
            query = query.where(state == (status if kind is None else kind(status)))
        if prefix:
            query = query.where(urn.startswith(prefix, autoescape=True))
        if after is not None:
            query = query.where(urn > after)
        async with self._database.transaction(tenant=tenant_id) as connection, self._session(connection) as session:
            return [EntityHead(str(each[0]), word(each[1]), each[2]) for each in (await session.execute(query)).all()]

    # ---- inside -------------------------------------------------------------------------------------------------

    def _column(self, name: str) -> Any:
        return getattr(self._model, name)

    def _session(self, connection: AsyncConnection) -> AsyncSession:
        return AsyncSession(bind=connection, expire_on_commit=False, autoflush=False)

    async def _insert(self, session: AsyncSession) -> None:
        try:
            await session.flush()
        except sa.exc.IntegrityError as error:
            raise _NotStored(error) from error

    async def _why(self, error: _NotStored, urn: str, tenant_id: str | None, *, exists: bool = False) -> Exception:
        if await self.load(urn, tenant_id=tenant_id) is not None:
            return EntityChanged(urn, exists=exists)  # somebody else has made it
        return self._database.translate(error.cause)

    def _places(self) -> dict[str, Any]:
        return {"schema_translate_map": self._database.translate_map}

    async def _take_version(self, session: AsyncSession, change: Change[T]) -> None:
        result = await session.execute(
            sa.update(self._model)
            .where(self._column(self._urn) == change.urn, self._column(self._version) == change.version)
            .values({self._version: change.version + 1})
            .execution_options(synchronize_session=False)
        )
        if result.rowcount != 1:  # type: ignore[attr-defined]  # an UPDATE has a count
            raise EntityChanged(change.urn)

    async def _applied(
        self, connection: AsyncConnection, workflow: str, urn: str, keys: Sequence[str], tenant_id: str | None
    ) -> dict[str, Applied]:
        by_stored = {_bounded(key): key for key in keys}
        query = (
            sa.select(_history.c.event_key, _history.c.kind, _history.c.reason)
            .where(
                _history.c.tenant_id == (tenant_id or ""),
                _history.c.workflow == workflow,
                _history.c.urn == urn,
                _history.c.step == 0,
                _history.c.event_key.in_(list(by_stored)),
            )
            .order_by(_history.c.id)  # a later success comes after the failures before it
        )
        rows = (await connection.execute(query, execution_options=self._places())).all()
        return {
            by_stored[row.event_key]: Applied("failed", row.reason or "")
            if row.kind == "failed"
            else Applied("applied")
            for row in rows
        }

    async def _remember(self, connection: AsyncConnection, change: Change[T], version: int) -> None:
        shared = {
            "tenant_id": change.tenant_id or "",
            "workflow": change.workflow,
            "urn": change.urn,
            "version": version,
            "job_id": change.job_id and _bounded(change.job_id),
            "attempt": change.attempt,
            "user_id": change.user_id,
            "correlation_id": change.correlation_id,
        }
        rows = []
        for step, move in enumerate(change.moves):
            # Every event of a batch made the first move; the steps behind it are told once.
            for key in change.keys if step == 0 else change.keys[:1]:
                reason = change.reason if move.kind == "failed" else None
                rows.append(
                    {**shared, "event": move.event, "source": move.source, "target": move.target, "kind": move.kind,
                     "event_key": _bounded(key), "step": step, "reason": reason}
                )  # fmt: skip
        try:
            await connection.execute(sa.insert(_history), rows, execution_options=self._places())
        except sa.exc.IntegrityError as error:
            raise EntityChanged(change.urn) from error  # the event is there already: read again, and find it applied


async def _reload(session: AsyncSession, entity: Any) -> None:
    """What the database has set, such as `onupdate` columns, would be missing once the object has no session."""
    state: Any = sa.inspect(entity)
    if state.expired_attributes:
        await session.refresh(entity)


def _bounded(key: str) -> str:
    return key if len(key) <= _LONGEST_KEY else f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def _entry(row: Any) -> HistoryEntry:
    return HistoryEntry(
        urn=row.urn,
        version=row.version,
        event=row.event,
        source=row.source,
        target=row.target,
        kind=row.kind,
        at=row.at,
        key=row.event_key,
        job_id=row.job_id,
        attempt=row.attempt,
        tenant_id=row.tenant_id or None,
        user_id=row.user_id,
        correlation_id=row.correlation_id,
        reason=row.reason or "",
    )
