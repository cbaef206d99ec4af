"""Entities of workflows as rows of the user's own tables, changed in one transaction with all that belongs to it.

In: a mapped class of SQLAlchemy whose table is in the ledger's database, with columns for urn, status and version. Out:
the port `bullpen.ports.entity.EntityStore`: the row, its past, the identities of its events and its outgoing messages
are committed together or not at all. No transaction is open while actions run.
Elsewhere: deciding what an event does (`bullpen.workflow`), delivering the messages (`bullpen.outbox`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import cached_property, partial
from typing import Any, Final, Generic, TypeVar

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session, attributes
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
_PAST: Final = [column for column in _history.columns if column.name not in ("id", "at")]
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
        self._statements: dict[tuple[frozenset[str], bool], Any] = {}
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
        by_stored = {_bounded(key): key for key in keys}
        given = {
            "entity_urn": urn,
            "urn": urn,
            "tenant": tenant_id or "",
            "workflow": workflow,
            "keys": list(by_stored),
        }
        row = await self._read_row(given, tenant_id)
        if row is None:
            return None
        entity, past = row
        return Loaded(entity, getattr(entity, self._version), _applied(past, by_stored))

    async def _read_row(self, given: dict[str, Any], tenant_id: str | None) -> Any:
        if not self._database.is_postgres and not self._options:
            return await self._database.in_one_go(partial(self._read_now, given), reads=True)
        async with self._reading(tenant_id) as connection, self._session(connection) as session:
            return (await session.execute(self._read_query, given)).unique().one_or_none()

    def _read_now(self, given: dict[str, Any], connection: sa.Connection) -> Any:
        with Session(bind=connection, expire_on_commit=False, autoflush=False) as session:
            return session.execute(self._read_query, given).unique().one_or_none()

    def _reading(self, tenant_id: str | None) -> AbstractAsyncContextManager[AsyncConnection]:
        # One statement, unless the entity brings others with it: then they must see one world.
        if tenant_id is None and not self._options and not self._database.tenant_required:
            return self._database.statement(reads=True)
        return self._database.transaction(tenant=tenant_id)

    @cached_property
    def _read_query(self) -> sa.Select[Any]:
        """The entity and what became of the events that were asked for, as of one instant. Made once: SQLAlchemy would
        need longer to build it than the database to answer."""
        entries: sa.ColumnElement[Any]
        if self._database.is_postgres:
            entry = sa.func.json_build_array(_history.c.id, _history.c.event_key, _history.c.kind, _history.c.reason)
            entries = sa.cast(sa.func.json_agg(entry), sa.Text)
        else:
            entry = sa.func.json_array(_history.c.id, _history.c.event_key, _history.c.kind, _history.c.reason)
            entries = sa.func.json_group_array(entry)
        past = (
            sa.select(entries)
            .where(
                _history.c.tenant_id == sa.bindparam("tenant"),
                _history.c.workflow == sa.bindparam("workflow"),
                _history.c.urn == sa.bindparam("urn"),
                _history.c.step == 0,
                _history.c.event_key.in_(sa.bindparam("keys", expanding=True)),
            )
            .scalar_subquery()
        )
        query = sa.select(self._model, past).where(self._column(self._urn) == sa.bindparam("entity_urn"))
        return query.options(*self._options).execution_options(**self._places())

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
        changed = None if is_new else self._plain_changes(state)
        if changed is not None:
            await self._commit_plain(change, changed)
            return entity
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

    # ---- the short way -------------------------------------------------------------------------------------------

    def _plain_changes(self, state: Any) -> dict[str, Any] | None:
        """What has changed in an entity that is one row of one table and no more; None where only a session knows what
        else there is to write: related objects, listeners, values that the database makes."""
        if not self._is_plain or any(name in state.dict for name in self._relationships):
            return None
        changed = {name: state.dict.get(name) for name in state.committed_state if name != self._version}
        is_column = all(name in self._columns and name in state.dict for name in changed)
        return changed if is_column and self._urn not in changed and state.key is not None else None

    @cached_property
    def _is_plain(self) -> bool:
        mapper = sa.inspect(self._model, raiseerr=True)
        table = mapper.local_table
        listeners = (mapper.dispatch.before_update, mapper.dispatch.after_update)
        return (
            isinstance(table, sa.Table)
            and mapper.polymorphic_on is None
            and mapper.inherits is None
            and mapper.version_id_col is None
            and not mapper.composites
            and not any(list(listener) for listener in listeners)
            and not any(column.onupdate is not None or column.server_onupdate is not None for column in table.columns)
        )

    @cached_property
    def _columns(self) -> dict[str, sa.Column[Any]]:
        """Columns by the attributes that hold them."""
        mapper = sa.inspect(self._model, raiseerr=True)
        return {
            each.key: each.columns[0]
            for each in mapper.column_attrs
            if len(each.columns) == 1 and isinstance(each.columns[0], sa.Column)
        }

    @cached_property
    def _relationships(self) -> tuple[str, ...]:
        return tuple(sa.inspect(self._model, raiseerr=True).relationships.keys())

    async def _commit_plain(self, change: Change[T], changed: dict[str, Any]) -> None:
        """The row, if it is still the one that was read, and its past. On PostgreSQL one statement, in one round trip
        unless messages or a tenant have to share its transaction."""
        entity, version = change.entity, change.version + 1
        rows = self._past_of(change, version)
        given = {f"new_{name}": value for name, value in changed.items()}
        given |= {"old_urn": change.urn, "old_version": change.version, "new_version": version}
        if not self._database.is_postgres:
            await self._database.in_one_go(partial(self._commit_now, change, frozenset(changed), given, rows))
        else:
            await self._commit_there(change, frozenset(changed), given, rows)
        for name, value in {**changed, self._version: version}.items():
            attributes.set_committed_value(entity, name, value)

    def _commit_now(
        self,
        change: Change[T],
        changed: frozenset[str],
        given: dict[str, Any],
        rows: list[dict[str, Any]],
        connection: sa.Connection,
    ) -> None:
        """SQLite: all statements in one go."""
        with _explained(change.urn):
            if connection.execute(self._moving(changed, with_past=False), given).rowcount != 1:
                raise EntityChanged(change.urn)
            connection.execute(self._insert_past, rows)
        if change.messages:
            self._ledger.enqueuer.enqueue_many_sync(connection, change.messages)

    async def _commit_there(
        self, change: Change[T], changed: frozenset[str], given: dict[str, Any], rows: list[dict[str, Any]]
    ) -> None:
        is_alone = not change.messages and change.tenant_id is None and not self._database.tenant_required
        in_one = len(rows) == 1
        scope = (
            self._database.statement() if is_alone and in_one else self._database.transaction(tenant=change.tenant_id)
        )
        async with scope as connection:
            with _explained(change.urn):
                if in_one:
                    statement = self._moving(changed, with_past=True)
                    count = len((await connection.execute(statement, {**given, **_prefixed(rows[0])})).all())
                else:
                    count = (await connection.execute(self._moving(changed, with_past=False), given)).rowcount
                if count != 1:
                    raise EntityChanged(change.urn)
                if not in_one:
                    await connection.execute(self._insert_past, rows)
            if change.messages:
                await self._ledger.enqueuer.enqueue_many(connection, change.messages)

    def _moving(self, changed: frozenset[str], *, with_past: bool) -> Any:
        """The statement that stores these attributes. Each is made once."""
        known = self._statements.get((changed, with_past))
        if known is not None:
            return known
        urn, version = self._columns[self._urn], self._columns[self._version]
        update = (
            sa.update(urn.table)
            .where(urn == sa.bindparam("old_urn"), version == sa.bindparam("old_version"))
            .values(
                {version: sa.bindparam("new_version")}
                | {self._columns[name]: sa.bindparam(f"new_{name}", type_=self._columns[name].type) for name in changed}
            )
        )
        statement: Any = update
        if with_past:
            moved = update.returning(urn).cte("moved")
            names = [column.name for column in _PAST]
            values = [sa.bindparam(f"past_{column.name}", type_=column.type) for column in _PAST]
            statement = sa.insert(_history).from_select(names, sa.select(*values).select_from(moved))
            statement = statement.returning(_history.c.id)
        statement = statement.execution_options(**self._places())
        self._statements[changed, with_past] = statement
        return statement

    @cached_property
    def _insert_past(self) -> sa.Insert:
        return sa.insert(_history).execution_options(**self._places())

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

    async def _remember(self, connection: AsyncConnection, change: Change[T], version: int) -> None:
        try:
            await connection.execute(self._insert_past, self._past_of(change, version))
        except sa.exc.IntegrityError as error:
            raise EntityChanged(change.urn) from error  # the event is there already: read again, and find it applied

    def _past_of(self, change: Change[T], version: int) -> list[dict[str, Any]]:
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
        return rows


def _prefixed(row: dict[str, Any]) -> dict[str, Any]:
    return {f"past_{name}": value for name, value in row.items()}


@contextmanager
def _explained(urn: str) -> Iterator[None]:
    """The event is there already: read again, and find it applied."""
    try:
        yield
    except sa.exc.IntegrityError as error:
        if not _is_of_the_past(error):
            raise
        raise EntityChanged(urn) from error


def _is_of_the_past(error: sa.exc.IntegrityError) -> bool:
    """Whether it is the past that refuses, where an event stands already, and not a rule of the user's own table."""
    return "ux_workflow_applied" in str(error.orig) or _history.name in str(error.orig)


async def _reload(session: AsyncSession, entity: Any) -> None:
    """What the database has set, such as `onupdate` columns, would be missing once the object has no session."""
    state: Any = sa.inspect(entity)
    if state.expired_attributes:
        await session.refresh(entity)


def _applied(past: str | None, by_stored: dict[str, str]) -> dict[str, Applied]:
    # In the order in which they came: a later success counts, and not the failures before it.
    entries = sorted(msgspec.json.decode(past)) if past else []
    return {
        by_stored[key]: Applied("failed", reason or "") if kind == "failed" else Applied("applied")
        for _, key, kind, reason in entries
    }


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
