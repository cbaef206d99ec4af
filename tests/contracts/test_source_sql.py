"""The ledger's own table of events keeps the promises of a source, on both databases."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncGenerator, AsyncIterator, Iterable

import pytest

from bullpen.ledger import Ledger
from bullpen.plugins.sources.sql import SqlEvents
from bullpen.ports.source import BEGINNING, EventSource, NewEvent
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
        return SqlHarness(make_ledger(url, timeout_ms=5_000 if postgres else 1_000), server)


@pytest.mark.parametrize("steps", range(8))
async def test_ending_in_the_moment_of_a_commit_ends_it(sqlite_url: str, make_ledger: MakeLedger, steps: int) -> None:
    """A cancellation that comes just when a commit is told must not get lost: whoever stops it would wait for ever."""
    ledger, commit, caught_up = make_ledger(sqlite_url), asyncio.Event(), asyncio.Event()

    async def commits() -> AsyncGenerator[str, None]:
        while True:
            await commit.wait()
            commit.clear()
            yield ""

    async def follow() -> None:
        async for _ in source.subscribe(BEGINNING):
            caught_up.set()

    ledger.events.commits = commits  # type: ignore[method-assign]  # the moment is the test's to choose
    source = SqlEvents(ledger, poll_ms=600_000)
    following = asyncio.create_task(follow())
    await caught_up.wait()
    await asyncio.sleep(0)  # it waits for the next commit now

    commit.set()
    for _ in range(steps):
        await asyncio.sleep(0)
    following.cancel()
    await asyncio.wait([following], timeout=4)

    assert following.cancelled()
