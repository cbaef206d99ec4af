"""PostgreSQL and SQLite keep the promises of the outbox store."""

from __future__ import annotations

import inspect

import pytest

from bullpen.ledger import Ledger, OutboxRepository
from bullpen.ledger.outbox import SqlOutbox
from tests.contracts.outbox_repository import OutboxRepositoryContract
from tests.databases import MakeLedger


class TestPostgres(OutboxRepositoryContract):
    @pytest.fixture
    def ledger(self, postgres_url: str, make_ledger: MakeLedger) -> Ledger:
        return make_ledger(postgres_url)


class TestSqlite(OutboxRepositoryContract):
    @pytest.fixture
    def ledger(self, sqlite_url: str, make_ledger: MakeLedger) -> Ledger:
        return make_ledger(sqlite_url)


@pytest.mark.requirement("O-26")
def test_the_store_is_an_abstract_base_and_one_suite_is_run_by_both() -> None:
    promised = {name for name, _ in inspect.getmembers(OutboxRepositoryContract) if name.startswith("test_")}

    assert inspect.isabstract(OutboxRepository)
    assert issubclass(SqlOutbox, OutboxRepository) and not inspect.isabstract(SqlOutbox)
    assert len(promised) > 40
    for suite in (TestPostgres, TestSqlite):
        assert promised <= set(dir(suite))
        assert not [name for name in vars(suite) if name.startswith("test_")], "no promise is changed for one of them"
