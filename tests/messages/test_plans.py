"""What runs every minute, or for every message, looks at what is due and at nothing else, however many there are."""

from __future__ import annotations

import os
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from bullpen.ledger import Ledger
from bullpen.ledger._message_sql import MessageSql
from bullpen.ledger.records import encode_rows
from tests.databases import MakeLedger
from tests.ledger.test_plans import explain, indexes, walk

LONG = os.environ.get("BULLPEN_TEST_LONG") == "1"
HISTORY = 1_000_000 if LONG else 10_000
DUE = 200
BATCH = 1_000 if LONG else 20
"""Of a small table the server rightly reads all when a batch wants a part of it that is not small."""

pytestmark = pytest.mark.timeout(600 if LONG else 240)


async def insert(connection: AsyncConnection, name: str, count: int, status: str, due_at: str, again_at: str) -> None:
    await connection.exec_driver_sql(
        "INSERT INTO core_outbox.bullpen_messages (id, recipient_id, occasion, period, number, channel, zone, "
        "local_at, late_policy, status, due_at, late_at, publish_again_at) "
        f"SELECT md5('{name}' || n)::uuid, 'r' || n, 'birthday', '{name}', 1, 'email', 'UTC', "
        f"'2030-03-14T09:00', 'expire', '{status}', {due_at}, {due_at} + interval '1 day', {again_at} "
        f"FROM generate_series(1, {count}) n"
    )


@pytest.fixture
async def ledger(postgres_url: str, make_ledger: MakeLedger) -> Ledger:
    """Years of messages that were sent, as many that come later, a few that are due; and, since the server counted,
    many that are in the broker's hands."""
    opened = make_ledger(postgres_url)
    kinds = (
        ("sent", HISTORY, "SENT", "now() - n * interval '1 minute'", "NULL"),
        ("later", HISTORY, "CREATED", "now() + interval '2 hours' + n * interval '1 second'", "NULL"),
        ("due", DUE, "CREATED", "now() + (n - 100) * interval '1 second'", "NULL"),
        ("queued", HISTORY, "QUEUED", "now() + interval '30 minutes'", "now() + interval '1 day'"),
        ("lost", DUE, "QUEUED", "now() - interval '2 days'", "now() - n * interval '1 second'"),
    )
    async with opened.database.migration() as connection:
        await connection.exec_driver_sql(
            "INSERT INTO core_outbox.bullpen_recipients (id, zone, channel, address) "
            f"SELECT 'r' || n, 'UTC', 'email', 'r' || n FROM generate_series(1, {HISTORY}) n"
        )
        await connection.exec_driver_sql(
            "INSERT INTO core_outbox.bullpen_occasions (recipient_id, occasion, on_date, next_due, next_period) "
            "SELECT 'r' || n, 'birthday', '1990-03-14', now() + n * interval '1 hour', '2030' "
            f"FROM generate_series(1, {HISTORY}) n"
        )
        for name, count, status, due_at, again_at in kinds[:3]:
            await insert(connection, name, count, status, due_at, again_at)
    async with opened.database.engine.connect() as connection:
        free = await connection.execution_options(isolation_level="AUTOCOMMIT")
        await free.exec_driver_sql("VACUUM ANALYZE")
    async with opened.database.migration() as connection:
        for name, count, status, due_at, again_at in kinds[3:]:
            await insert(connection, name, count, status, due_at, again_at)
    return opened


def rows_looked_at(plan: dict[str, Any]) -> int:
    """Rows that scans of our tables produced or threw away."""
    scans = [node for node in walk(plan) if str(node.get("Relation Name")).startswith("bullpen_")]
    return int(
        sum((node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"] for node in scans)
    )


async def some_ids(ledger: Ledger, period: str) -> list[str]:
    statement = "SELECT CAST(id AS text) FROM core_outbox.bullpen_messages WHERE period = :period LIMIT :limit"
    async with ledger.database.transaction() as connection:
        return list((await connection.execute(sa.text(statement), {"period": period, "limit": BATCH})).scalars())


def statements(sql: MessageSql, ids: list[str]) -> dict[str, tuple[str, dict[str, Any], int]]:
    """Each with its parameters and the rows that it may look at."""
    batch = {"rows": encode_rows({"id": one, "fence": 0, "publication": 0, "worker": "w"} for one in ids)}
    settled = [{"id": one, "fence": 0, "status": "SENT", "response": None, "again_ms": None} for one in ids]
    names = {"rows": encode_rows([{"name": "birthday"}])}
    return {
        "due_occasions": (sql.due_occasions, {**names, "horizon_ms": 172_800_000, "limit": BATCH}, 500),
        "give_up_late": (sql.give_up_late, {}, 10 * DUE),
        "claim_due": (sql.claim_due, {"ahead_ms": 3_600_000, "lease_ms": 60_000, "limit": BATCH}, 10 * DUE),
        "claim_again": (sql.claim_again, {"lease_ms": 60_000, "limit": BATCH}, 10 * DUE),
        "confirm": (sql.confirm, {**batch, "lost_after_ms": 1_000, "late_after_ms": 1_000}, 10 * DUE),
        "look": (sql.look, batch, 10 * DUE),
        "take": (sql.take, {**batch, "lease_ms": 1_000, "again_ms": 2_000}, 10 * DUE),
        "settle": (sql.settle, {"rows": encode_rows(settled)}, 10 * DUE),
        "oldest_waiting": (sql.oldest_waiting, {}, 10 * DUE),
    }


@pytest.mark.requirement("S-16", "S-18", "X-59")
async def test_no_statement_of_the_pipeline_walks_over_history(ledger: Ledger) -> None:
    """With a million of each in the long form. A plan that scans a table grows with it, until a minute is too short."""
    sql = MessageSql(ledger.database.dialect, ledger.database.schema, 0)
    for name, (statement, parameters, most) in statements(sql, await some_ids(ledger, "due")).items():
        plan = await explain(ledger, statement, **parameters)

        scanned = [node["Relation Name"] for node in walk(plan) if node["Node Type"] == "Seq Scan"]
        assert not scanned, f"{name} reads all of {scanned}"
        assert indexes(plan), name
        assert rows_looked_at(plan) <= most, f"{name} looks at {rows_looked_at(plan)} rows"
