"""Fixtures of the suites of runs."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from bullpen.ledger import Ledger
from bullpen.redis import Connection
from bullpen.testing.postgres import PostgresServer
from tests.databases import ROLES, MakeLedger
from tests.runs.kit import Records, Stage

MakeStage = Callable[..., Stage]


@pytest.fixture
async def connection(redis_url: str) -> AsyncIterator[Connection]:
    opened = Connection(redis_url)
    yield opened
    await opened.aclose()


@pytest.fixture
async def make_stage(connection: Connection) -> AsyncIterator[MakeStage]:
    opened: list[Stage] = []

    def make(ledger: Ledger, **options: Any) -> Stage:
        opened.append(Stage(ledger, connection, **options))
        return opened[-1]

    yield make

    for stage in opened:
        await stage.aclose()


@pytest.fixture
def stage(ledger: Ledger, make_stage: MakeStage) -> Stage:
    """On either database."""
    return make_stage(ledger)


@pytest.fixture
def lite(sqlite_url: str, make_ledger: MakeLedger, make_stage: MakeStage) -> Stage:
    """On SQLite, where the database makes no difference."""
    return make_stage(make_ledger(sqlite_url))


@pytest.fixture
def tenant_ledger(postgres_server: PostgresServer, guarded_database: str, make_ledger: MakeLedger) -> Ledger:
    """Row-level security, as APIs have it."""
    return make_ledger(postgres_server.url(guarded_database, role=ROLES.tenant), roles=ROLES, duty="tenant")


@pytest.fixture
def worker_ledger(postgres_server: PostgresServer, guarded_database: str, make_ledger: MakeLedger) -> Ledger:
    """Row-level security, as workers have it."""
    return make_ledger(postgres_server.url(guarded_database, role=ROLES.worker), roles=ROLES, duty="worker")


@pytest.fixture
def service_ledger(postgres_server: PostgresServer, guarded_database: str, make_ledger: MakeLedger) -> Ledger:
    """Row-level security, as dispatchers and maintenance have it."""
    return make_ledger(postgres_server.url(guarded_database, role=ROLES.service), roles=ROLES, duty="service")


@pytest.fixture
def records() -> Iterator[Records]:
    """Everything that runs log during the test."""
    listening, logger = Records(), logging.getLogger("bullpen.runs")
    level = logger.level
    logger.addHandler(listening)
    logger.setLevel(logging.DEBUG)
    yield listening
    logger.removeHandler(listening)
    logger.setLevel(level)
