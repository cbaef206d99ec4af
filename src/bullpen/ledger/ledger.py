"""The ledger as a program holds it: one database, its tables, and the parts that read and write them.

In: a URL and, on PostgreSQL, perhaps role names. Out: `outbox`, `once`, `events`, `checkpoints`, and the checks that a
process makes before it starts. Elsewhere: enqueueing, dispatching and delivering (`bullpen.outbox`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from types import TracebackType
from typing import Any, Self

from bullpen.errors import InvalidOption, NotConfigured, require
from bullpen.ledger import security, version, wakeups
from bullpen.ledger.audit import AuditLog
from bullpen.ledger.checkpoints import Checkpoints
from bullpen.ledger.database import Database
from bullpen.ledger.destinations import Destinations
from bullpen.ledger.endpoints import EndpointStore
from bullpen.ledger.enqueue import Enqueuer
from bullpen.ledger.events import EventLog
from bullpen.ledger.inbox import Inbox
from bullpen.ledger.incidents import Incidents
from bullpen.ledger.looks import Looks
from bullpen.ledger.outbox import SqlOutbox
from bullpen.ledger.parked import ParkedEvents
from bullpen.ledger.parts import Part, check_parts
from bullpen.ledger.repository import OutboxRepository
from bullpen.ledger.runs import AllRuns
from bullpen.ledger.security import Duty, Roles
from bullpen.ledger.tables import SCHEMA
from bullpen.ledger.tenant_limits import TenantLimits
from bullpen.ledger.transactions import TransactionManager
from bullpen.ledger.turns import Turns


class Ledger:
    """Tables that are the truth about messages: stored with the business data, delivered afterwards.

        ledger = Ledger("postgresql://app@db/shop")      # or "sqlite:///shop.db"

    With `roles` row-level security keeps tenants apart, and `duty` says which of the three roles this process has;
    `check` then refuses a connection for which it would mean nothing. Belongs to one event loop.
    """

    def __init__(
        self,
        url: str,
        *,
        schema: str = SCHEMA,
        roles: Roles | None = None,
        duty: Duty = "service",
        pool_size: int = 20,
        timeout_ms: int = 30_000,
        prepared_statements: bool = True,
        notify: bool = True,
        strict_sources: bool = False,
        max_attempts: int = 10,
        dead_letter_type: str | None = "bullmq:outbox.dead",
        make_directory: bool = False,
        clock_offset_ms: int = 0,
    ) -> None:
        self.database = Database(
            url,
            schema=schema,
            pool_size=pool_size,
            timeout_ms=timeout_ms,
            prepared_statements=prepared_statements,
            make_directory=make_directory,
            clock_offset_ms=clock_offset_ms,
        )
        if roles is not None and not self.database.is_postgres:
            raise InvalidOption("roles", "none: only PostgreSQL has row-level security", url)
        require("duty", duty in ("tenant", "worker", "service"), "'tenant', 'worker' or 'service'", duty)
        self.roles, self.duty = roles, duty
        self.database.tenant_required = roles is not None and duty != "service"
        self.enqueuer = Enqueuer(schema=schema, notify=notify, strict=strict_sources, max_attempts=max_attempts)
        """Stores messages in a caller's transaction."""
        self.outbox: OutboxRepository = SqlOutbox(
            self.database, enqueuer=self.enqueuer, dead_letter_type=dead_letter_type
        )
        self.dead_letter_type = dead_letter_type
        """Where the death of a row is announced; None: nowhere."""
        self.destinations = Destinations(self.database)
        """Which targets are switched off or broken."""
        self.tenant_limits = TenantLimits(self.database)
        """How much of the outbox a tenant may have."""
        self.endpoints = EndpointStore(self.database, self.enqueuer, notice_type=dead_letter_type)
        """Where tenants want their events to be sent."""
        self.checkpoints = Checkpoints(self.database)
        self.events = EventLog(self.database, notify=notify)
        """The ledger's own event store."""
        self.parked = ParkedEvents(self.database)
        """Events that no projector could take."""
        self.transactions = TransactionManager(self.database, self.enqueuer)
        """Runs and credits, one tenant per transaction."""
        self.runs = AllRuns(self.database)
        """Runs of all tenants; only for a connection with the service role, where there are roles."""
        self.audit = AuditLog(self.database)
        """Who did what by hand."""
        self.incidents = Incidents(self.database, self.enqueuer)
        """What is wrong now, and whether somebody has been told."""
        self.looks = Looks(self.database)
        """What people look up: all of one correlation id, how deliveries went."""
        self.turns = Turns(self.database)
        """Whose turn it is to change an entity of a workflow."""
        self._inbox = Inbox(schema)
        self._used: set[Part] = set()

    def use(self, part: Part) -> None:
        """Say that this process uses a part: `check` then refuses a ledger without its tables."""
        self._used.add(part)

    async def parts(self) -> frozenset[Part]:
        """The parts whose tables are there."""
        return await version.installed(self.database)

    async def migrate(self, *, create_roles: bool = False, parts: Iterable[str] | None = None) -> None:
        """Make the tables, or bring them up to date; with `roles` also policies and grants.

        `parts` are those to make (None: all); the outbox always is, and parts that are there stay.
        """
        wanted = None if parts is None else check_parts(parts)
        # Loaded by who migrates: a process that only works would carry 15 MB for nothing.
        from bullpen.ledger import migrate

        await migrate.migrate(self.database, roles=self.roles, create_roles=create_roles, parts=wanted)

    async def check(self, *, connections: int = 1) -> None:
        """Refuse to start on tables that are missing or old, with an unsafe role, or with too small a pool.

        `connections` is how many this process uses at the same time.
        """
        await version.check_version(self.database, self._used)
        if self.roles is not None:
            await security.check(self.database, self.roles, self.duty)
        if connections > self.database.pool_size:
            raise NotConfigured(
                f"pool_size {self.database.pool_size} is too small: this process uses {connections} connections at the "
                "same time, and a process that waits for one delays its row"
            )

    def once(self, connection: Any, key: str, *, scope: str = "default") -> AbstractAsyncContextManager[bool]:
        """Apply a message once; see `Inbox.once`."""
        return self._inbox.once(connection, key, scope=scope)

    def once_sync(self, connection: Any, key: str, *, scope: str = "default") -> AbstractContextManager[bool]:
        """As `once`, for blocking connections."""
        return self._inbox.once_sync(connection, key, scope=scope)

    def commits(self) -> AsyncGenerator[str, None]:
        """Yields when new rows may have come; see `wakeups.commits`."""
        return wakeups.commits(self.database)

    async def aclose(self) -> None:
        """Close all connections. Safe to call twice."""
        await self.database.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
