"""PostgreSQL and SQLite keep the promises of the outbox store."""

from __future__ import annotations

import pytest

from bullpen.ledger import Ledger
from tests.contracts.outbox_repository import OutboxRepositoryContract
from tests.databases import MakeLedger


@pytest.mark.requirement("O-26")
class TestPostgres(OutboxRepositoryContract):
    @pytest.fixture
    def ledger(self, postgres_url: str, make_ledger: MakeLedger) -> Ledger:
        return make_ledger(postgres_url)


@pytest.mark.requirement("O-26")
class TestSqlite(OutboxRepositoryContract):
    @pytest.fixture
    def ledger(self, sqlite_url: str, make_ledger: MakeLedger) -> Ledger:
        return make_ledger(sqlite_url)
