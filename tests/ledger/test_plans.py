"""Claims look at what is due and at nothing else, however long the history is."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import sqlalchemy as sa

from bullpen.ledger import Ledger, OutboxStatus
from bullpen.ledger._sql import Sql
from tests.databases import MakeLedger, item

LONG = os.environ.get("BULLPEN_TEST_LONG") == "1"
HISTORY = 1_000_000 if LONG else 30_000

pytestmark = pytest.mark.timeout(600 if LONG else 240)


@pytest.fixture
async def ledger(postgres_url: str, make_ledger: MakeLedger) -> Ledger:
    """A long history, a few rows that wait, and statistics that know both."""
    opened = make_ledger(postgres_url)
    async with opened.database.engine.begin() as connection:  # not the ledger's own, whose time is limited
        await connection.exec_driver_sql(
            "INSERT INTO core_outbox.integration_outbox (source_stream_id, source_event_id, route_key, "
            "integration_type, event_type, payload, status, sent_at) "
            "SELECT 's', 'h' || n, 'r', 'webhook:' || mod(n, 5), 'e', '{}', 'SENT', now() "
            f"FROM generate_series(1, {HISTORY}) n"
        )
    await opened.outbox.enqueue_many(
        [item(n, integration_type=f"webhook:{n % 5}", tenant_id=f"t{n % 3}") for n in range(60)]
    )
    async with opened.database.engine.connect() as connection:
        free = await connection.execution_options(isolation_level="AUTOCOMMIT")
        await free.exec_driver_sql("VACUUM ANALYZE core_outbox.integration_outbox")
    return opened


async def explain(ledger: Ledger, statement: str, **parameters: Any) -> dict[str, Any]:
    """The plan as it was run, and rolled back."""
    async with ledger.database.engine.connect() as connection:
        text = sa.text(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}")
        (plan,) = (await connection.execute(text, parameters)).scalar_one()
        await connection.rollback()
    found: dict[str, Any] = plan["Plan"]
    return found


def walk(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [plan, *(node for child in plan.get("Plans", []) for node in walk(child))]


def indexes(plan: dict[str, Any]) -> set[str]:
    return {node["Index Name"] for node in walk(plan) if "Index Name" in node}


def rows_looked_at(plan: dict[str, Any]) -> int:
    """Rows that scans of the outbox produced or threw away."""
    scans = [
        node for node in walk(plan) if node.get("Relation Name") == "integration_outbox" and "Scan" in node["Node Type"]
    ]
    return int(
        sum((node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"] for node in scans)
    )


CLAIM = {"worker_id": "w", "lease_ms": 1_000, "starting": 0}


@pytest.mark.requirement("X-95", "O-21", "X-88")
async def test_a_claim_of_lanes_reads_only_what_is_due(ledger: Ledger) -> None:
    lanes = [{"s_type": f"webhook:{n}", "s_tenant": None, "s_quota": 5} for n in range(5)]

    plan = await explain(
        ledger, Sql("postgresql", "core_outbox").claim_lanes(by_tenant=False), rows=json.dumps(lanes), **CLAIM
    )

    assert "ix_outbox_lane_due" in indexes(plan)
    assert rows_looked_at(plan) < 500


@pytest.mark.requirement("X-95", "O-21", "X-88")
async def test_a_claim_of_tenants_reads_only_what_is_due(ledger: Ledger) -> None:
    lanes = [{"s_type": "webhook:1", "s_tenant": f"t{n}", "s_quota": 2} for n in range(3)]

    plan = await explain(
        ledger, Sql("postgresql", "core_outbox").claim_lanes(by_tenant=True), rows=json.dumps(lanes), **CLAIM
    )

    assert rows_looked_at(plan) < 500


@pytest.mark.requirement("X-95", "O-21")
async def test_a_claim_of_the_oldest_reads_only_what_is_due(ledger: Ledger) -> None:
    plan = await explain(ledger, Sql("postgresql", "core_outbox").claim_oldest, quota=50, **CLAIM)

    assert rows_looked_at(plan) < 500


@pytest.mark.requirement("X-95", "X-88")
async def test_the_next_of_an_ordering_key_is_found_however_many_were_sent(
    postgres_url: str, make_ledger: MakeLedger
) -> None:
    """Where most rows have one key, the planner would rather read all rows in their order until one is not sent yet."""
    ledger = make_ledger(postgres_url)
    sent = 3_000
    async with ledger.database.engine.begin() as connection:
        await connection.exec_driver_sql(
            "INSERT INTO core_outbox.integration_outbox (source_stream_id, source_event_id, route_key, "
            "integration_type, event_type, payload, ordering_key) SELECT 's', 'h' || n, 'r', 'webhook:partnerX', 'e', "
            f"'{{}}', 'k' FROM generate_series(1, {sent + 10}) n"
        )
    async with ledger.database.engine.connect() as connection:
        free = await connection.execution_options(isolation_level="AUTOCOMMIT")
        await free.exec_driver_sql("VACUUM ANALYZE core_outbox.integration_outbox")
        await free.exec_driver_sql(
            f"UPDATE core_outbox.integration_outbox SET status = 'SENT', sent_at = now() WHERE seq <= {sent}"
        )
    (row,) = await ledger.outbox.claim_due_batch("w", 1, starting=True)
    outcome = {"s_id": row.id, "s_fence": row.fence, "s_kind": "SENT", "s_worker": "w", "s_next_ms": 60_000}
    lines = [{"s_type": row.integration_type, "s_key": "k"}]
    sql = Sql("postgresql", "core_outbox")

    unpark = await explain(ledger, sql.unpark_next(most=1), rows=json.dumps(lines))
    settle = await explain(ledger, sql.settle(take_next=True), rows=json.dumps([outcome]))

    assert "ix_outbox_order" in indexes(settle) and "ix_outbox_order" in indexes(unpark)
    assert rows_looked_at(settle) < 100
    assert rows_looked_at(unpark) < 100


@pytest.mark.requirement("X-95")
@pytest.mark.parametrize("name", ["due_types", "due_tenants", "expired"])
async def test_looking_for_work_reads_only_what_is_open(ledger: Ledger, name: str) -> None:
    parameters: dict[str, dict[str, Any]] = {
        "due_types": {},
        "due_tenants": {"integration_type": "webhook:1", "after": "", "most": 10},
        "expired": {"limit": 100},
    }

    plan = await explain(ledger, getattr(Sql("postgresql", "core_outbox"), name), **parameters[name])

    assert rows_looked_at(plan) < 200


@pytest.mark.requirement("X-95", "O-21")
async def test_a_long_backlog_does_not_make_a_claim_read_history(ledger: Ledger) -> None:
    """From a backlog the planner guesses many rows, and would rather read the whole table to join them."""
    await ledger.outbox.enqueue_many([item(n, integration_type="webhook:1") for n in range(1_000, 4_000)])
    async with ledger.database.engine.connect() as connection:
        free = await connection.execution_options(isolation_level="AUTOCOMMIT")
        await free.exec_driver_sql("ANALYZE core_outbox.integration_outbox")
    lanes = [{"s_type": "webhook:1", "s_tenant": None, "s_quota": 100}]
    sql = Sql("postgresql", "core_outbox")

    types = await explain(ledger, sql.due_types)
    tenants = await explain(ledger, sql.due_tenants, integration_type="webhook:1", after="", most=10)
    assert rows_looked_at(types) < 100
    assert rows_looked_at(tenants) < 100
    plan = await explain(ledger, sql.claim_lanes(by_tenant=False, most=100), rows=json.dumps(lanes), **CLAIM)

    assert rows_looked_at(plan) < 500


@pytest.mark.requirement("X-95", "X-88")
async def test_looking_for_work_does_not_walk_a_backlog_on_sqlite(sqlite_url: str, make_ledger: MakeLedger) -> None:
    """By status it would read every row that waits, at every look: the longer the backlog, the slower it shrinks."""
    sql, opened = Sql("sqlite", "core_outbox"), make_ledger(sqlite_url)
    looks: list[tuple[str, dict[str, Any], str]] = [
        (sql.due_types, {}, "ix_outbox_lane_due"),
        (sql.due_tenants, {"integration_type": "w", "after": "", "most": 1}, "ix_outbox_tenant_due"),
        (sql.claim_lane(by_tenant=False), {**CLAIM, "type": "w", "quota": 1}, "ix_outbox_lane_due"),
        (sql.claim_lane(by_tenant=True), {**CLAIM, "type": "w", "tenant": "", "quota": 1}, "ix_outbox_tenant_due"),
        (sql.expired, {"limit": 1}, "ix_outbox_lease"),
    ]

    for statement, parameters, index in looks:
        async with opened.database.transaction() as connection:
            plan = await connection.execute(sa.text(f"EXPLAIN QUERY PLAN {statement}"), parameters)
            steps = [str(row[3]) for row in plan]
        assert any(index in step for step in steps), steps
        assert not any("ix_outbox_status_due" in step or "TEMP B-TREE" in step for step in steps), steps


# Looking ------------------------------------------------------------------------------------------------------------


def scanned_whole(plan: dict[str, Any]) -> list[str]:
    return [node["Relation Name"] for node in walk(plan) if node["Node Type"] == "Seq Scan"]


@pytest.mark.parametrize(
    "where",
    [
        {},
        {"status": OutboxStatus.SENT},
        {"status": OutboxStatus.PENDING},
        {"status": OutboxStatus.DEAD},
        {"correlation_id": "c-7"},
        {"correlation_id": "none"},
    ],
    ids=str,
)
@pytest.mark.parametrize("newest_first", [True, False])
async def test_a_page_of_rows_reads_no_more_than_it_shows(
    ledger: Ledger, where: dict[str, Any], newest_first: bool
) -> None:
    """However long the history is, and however far behind the page."""
    taken: list[tuple[str, Any]] = []

    def note(_: Any, __: Any, statement: str, parameters: Any, *___: Any) -> None:
        taken.append((statement, parameters))

    engine = ledger.database.engine.sync_engine
    sa.event.listen(engine, "before_cursor_execute", note)
    await ledger.outbox.find(**where, newest_first=newest_first, after_seq=HISTORY // 2, limit=50)
    sa.event.remove(engine, "before_cursor_execute", note)

    (found,) = [each for each in taken if "FROM core_outbox.integration_outbox" in each[0]]
    async with ledger.database.engine.connect() as connection:
        answer = await connection.exec_driver_sql(f"EXPLAIN (ANALYZE, FORMAT JSON) {found[0]}", found[1])
        plan = answer.scalar_one()[0]["Plan"]
    assert scanned_whole(plan) == []
    assert rows_looked_at(plan) <= 200


async def test_runs_of_all_tenants_and_moves_of_a_correlation_id_are_found_by_an_index(ledger: Ledger) -> None:
    """Small tables are scanned whole whatever there is, so this asks what would be done if they were long."""
    asked = {
        "ix_runs_created": "SELECT id FROM core_outbox.bullpen_runs ORDER BY created_at DESC, id DESC LIMIT 50",
        "ix_workflow_correlation": "SELECT id FROM core_outbox.bullpen_workflow_history WHERE correlation_id = 'c'",
    }
    for index, statement in asked.items():
        async with ledger.database.engine.connect() as connection:
            await connection.exec_driver_sql("SET enable_seqscan = off")
            await connection.exec_driver_sql("SET enable_sort = off")
            plan = (await connection.exec_driver_sql(f"EXPLAIN (FORMAT JSON) {statement}")).scalar_one()[0]["Plan"]
            await connection.rollback()
        assert indexes(plan) == {index}, plan
