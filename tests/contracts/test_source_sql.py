"""The ledger's own table of events keeps the promises of a source, on both databases."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import AsyncIterator, Iterable

import pytest

from bullpen.ledger import Ledger
from bullpen.plugins.sources.sql import SqlEvents
from bullpen.ports.source import EventSource, NewEvent
from bullpen.testing.contracts.source import SourceContract
from bullpen.testing.postgres import PostgresServer
from tests.databases import MakeLedger


class SqlHarness:
    def __init__(self, ledger: Ledger, server: PostgresServer | None) -> None:
        self.ledger, self.server = ledger, server

    def make(self, *, prefixes: Iterable[str] = (), regex: str | None = None) -> EventSource:
        return SqlEvents(self.ledger, prefixes=prefixes, regex=regex, batch_size=7, poll_ms=50)

    async def append(self, stream: str, events: list[NewEvent], *, expected_version: int | None = None) -> None:
        await self.ledger.events.append(None, stream, events, expected_version=expected_version)

    @contextlib.asynccontextmanager
    async def outage(self) -> AsyncIterator[None]:
        """PostgreSQL throws everybody out and lets nobody in; SQLite is held by somebody who does not let go."""
        if self.server is None:
            with contextlib.closing(sqlite3.connect(str(self.ledger.database.url.database))) as greedy:
                greedy.execute("BEGIN EXCLUSIVE")
                yield
                greedy.rollback()
            return
        name = str(self.ledger.database.url.database)
        self.server.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        self.server.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])
        yield
        self.server.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")


class TestSqlEvents(SourceContract):
    @pytest.fixture(params=["postgresql", "sqlite"])
    def harness(self, request: pytest.FixtureRequest, make_ledger: MakeLedger) -> SqlHarness:
        postgres = request.param == "postgresql"
        url = request.getfixturevalue("postgres_url" if postgres else "sqlite_url")
        server = request.getfixturevalue("postgres_server") if postgres else None
        return SqlHarness(make_ledger(url, timeout_ms=5_000 if postgres else 300), server)
