"""Tenants do not see each other: tried in every way, a hundred of them on a pool of four connections."""

from __future__ import annotations

import asyncio
import os
import random
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from bullpen.errors import InvalidOption, NotConfigured, PermanentError, RowNotFound, UnsafeDatabaseRole
from bullpen.ledger import Ledger, NewRun, RunStatus, TenantRuns
from bullpen.ledger.security import TENANT_TABLES
from bullpen.queue import JobState
from bullpen.runs import Run
from bullpen.testing.postgres import PostgresServer
from tests.databases import OWNER, ROLES, MakeLedger
from tests.runs.conftest import MakeStage
from tests.runs.kit import ALICE, BOB, Bank, Records, Stage, payload

RUN_TABLES = ("bullpen_runs", "bullpen_run_steps", "bullpen_credit_accounts", "bullpen_credit_entries")
LONG = os.environ.get("BULLPEN_CHAOS") == "long"
TENANTS = [f"tenant-{number:03d}" for number in range(100)]


@pytest.fixture
def guarded(worker_ledger: Ledger, make_stage: MakeStage) -> Stage:
    """As a worker has it, who may do all that an API may."""
    return make_stage(worker_ledger)


@pytest.fixture
def caretaker(service_ledger: Ledger, make_stage: MakeStage) -> Stage:
    """As a dispatcher has it: the service role."""
    return make_stage(service_ledger)


@pytest.mark.requirement("X-113", "X-23")
async def test_the_tables_of_runs_are_under_forced_row_level_security(
    postgres_server: PostgresServer, guarded_database: str
) -> None:
    assert set(RUN_TABLES) <= set(TENANT_TABLES)
    found = postgres_server.execute(
        "SELECT relname, relrowsecurity, relforcerowsecurity FROM pg_class WHERE relname = ANY(%s)",
        [list(RUN_TABLES)],
        database=guarded_database,
    )
    assert sorted(tuple(row) for row in found) == [(name, True, True) for name in sorted(RUN_TABLES)]


@pytest.mark.requirement("X-113", "R-33", "R-34")
async def test_a_statement_without_any_predicate_sees_one_tenant_only(guarded: Stage, caretaker: Stage) -> None:
    """The query of somebody who forgot the tenant, on every table of runs."""
    bank = Bank()

    async def execute(run: Run) -> None:
        await run.step("charge", bank.charge)

    for tenant in (ALICE, BOB):
        await caretaker.service.grant(tenant, 10, reference="g", actor="bank")
        wanted = payload(tenant)
        await guarded.service.submit(wanted, cost=3)
        await caretaker.dispatch()
        async with guarded.working(execute, dispatch=False):
            await guarded.until(wanted.run_id, RunStatus.COMPLETED, tenant_id=tenant)

    async def all_tenants(runs: TenantRuns) -> dict[str, set[str]]:
        return {
            table: set((await runs.connection.execute(sa.text(f"SELECT tenant_id FROM core_outbox.{table}"))).scalars())
            for table in RUN_TABLES
        }

    for tenant in (ALICE, BOB):
        assert await guarded.ledger.transactions.run(tenant, all_tenants) == {table: {tenant} for table in RUN_TABLES}


@pytest.mark.requirement("X-113", "X-114")
@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO core_outbox.bullpen_runs (id, tenant_id, version_id, payload) VALUES ('{uuid}', 'bob', '1', '5')",
        "INSERT INTO core_outbox.bullpen_credit_entries (tenant_id, kind, amount) VALUES ('bob', 'grant', 100)",
        "INSERT INTO core_outbox.bullpen_credit_accounts (tenant_id, balance) VALUES ('alice', 1000000)",
        "UPDATE core_outbox.bullpen_runs SET tenant_id = 'bob'",
        "UPDATE core_outbox.bullpen_runs SET payload = '{}'",
        "DELETE FROM core_outbox.bullpen_runs",
        "DELETE FROM core_outbox.bullpen_credit_entries",
        "ALTER TABLE core_outbox.bullpen_runs DISABLE ROW LEVEL SECURITY",
        "DROP POLICY bullpen_tenant ON core_outbox.bullpen_runs",
        "SET ROLE shop_service",
    ],
)
async def test_what_the_tenant_role_may_not_do(guarded: Stage, statement: str) -> None:
    await guarded.service.submit(payload(ALICE))

    async def attack(runs: TenantRuns) -> None:
        text = statement.format(uuid=payload().run_id) if "{uuid}" in statement else statement
        await runs.connection.execute(sa.text(text))

    with pytest.raises(Exception, match=r"permission|policy|owner|tenant|right"):
        await guarded.ledger.transactions.run(ALICE, attack)


@pytest.mark.requirement("X-23")
async def test_an_api_has_all_that_it_needs_and_grants_nothing(
    tenant_ledger: Ledger, guarded: Stage, caretaker: Stage, make_stage: MakeStage
) -> None:
    """With the tenant role: submit, look, cancel, send back, read dead letters. Others run and pay."""
    api, is_mended = make_stage(tenant_ledger), False

    async def execute(run: Run) -> str:
        await run.step("model", lambda key: {"key": key}, price=2)
        if not is_mended:
            raise PermanentError("no")
        return "done"

    with pytest.raises(UnsafeDatabaseRole, match="credits_grant"):
        await api.service.grant(ALICE, 1_000, reference="mine", actor="eve")
    await caretaker.service.grant(ALICE, 10, reference="g", actor="bank")
    wanted, unwanted = payload(), payload()
    for each in (wanted, unwanted):
        await api.service.submit(each, cost=5, actor="ada")
    await api.service.cancel(ALICE, unwanted.run_id, actor="ada")
    await caretaker.dispatch()
    async with guarded.working(execute, dispatch=False):
        await api.until(wanted.run_id, RunStatus.FAILED)
        letters = await api.service.dead_letters(ALICE, actor="ada")
        await api.runs.queue.remove(wanted.run_id)  # the job must be made anew
        is_mended = True
        await api.service.retry(ALICE, wanted.run_id, actor="ada")
        row = await api.until(wanted.run_id, RunStatus.COMPLETED)

    assert (row.result, len(letters), await api.service.balance(ALICE)) == ("done", 1, 5)
    assert [(step.name, step.price) for step in await api.service.steps(ALICE, wanted.run_id)] == [("model", 2)]
    lines = await caretaker.ledger.audit.read(tenant_id=ALICE)
    assert [(line.action, line.actor, line.login) for line in reversed(lines)] == [
        ("credits.grant", "bank", ROLES.service),
        ("run.submit", "ada", ROLES.tenant),
        ("run.submit", "ada", ROLES.tenant),
        ("run.cancel", "ada", ROLES.tenant),
        ("run.dead_letters.read", "ada", ROLES.tenant),
        ("run.redrive", "ada", ROLES.tenant),
    ]


@pytest.mark.requirement("X-113")
@pytest.mark.parametrize(
    ("role", "problem"), [("postgres", "superuser"), (OWNER, "owns the tables"), (ROLES.service, "sees all tenants")]
)
async def test_a_worker_with_a_role_that_sees_everything_does_not_start(
    postgres_server: PostgresServer,
    guarded_database: str,
    make_ledger: MakeLedger,
    make_stage: MakeStage,
    role: str,
    problem: str,
) -> None:
    ledger = make_ledger(postgres_server.url(guarded_database, role=role), roles=ROLES, duty="worker")

    with pytest.raises(UnsafeDatabaseRole, match=problem):
        await make_stage(ledger, concurrency=5).runs.worker().start()


@pytest.mark.requirement("X-113")
@pytest.mark.parametrize("table", RUN_TABLES)
async def test_a_table_whose_security_is_not_forced_stops_the_start(
    postgres_server: PostgresServer, guarded_database: str, guarded: Stage, table: str
) -> None:
    postgres_server.execute(f"ALTER TABLE core_outbox.{table} NO FORCE ROW LEVEL SECURITY", database=guarded_database)

    with pytest.raises(UnsafeDatabaseRole, match=f"{table} lacks FORCE ROW LEVEL SECURITY"):
        await guarded.runs.worker().start()


@pytest.mark.requirement("X-114")
@pytest.mark.parametrize("tenant", ["", " ", None, 5, " alice", "alice ", "a\0b", "x" * 61, "a\nb"])
async def test_an_empty_or_strange_tenant_is_refused(guarded: Stage, tenant: Any) -> None:
    async def look(runs: TenantRuns) -> None:
        raise AssertionError("no transaction may begin")

    with pytest.raises(InvalidOption, match="tenant_id"):
        await guarded.ledger.transactions.run(tenant, look)


@pytest.mark.requirement("X-114")
@pytest.mark.parametrize("tenant", ["' OR '1'='1", "alice'; SELECT 1; --", "%", "*", "alice,bob", "ALICE"])
async def test_a_tenant_is_a_value_and_never_a_statement(guarded: Stage, tenant: str) -> None:
    await guarded.service.submit(payload(ALICE))

    assert await guarded.service.find(tenant) == []


@pytest.mark.requirement("X-114")
async def test_nothing_of_a_tenant_stays_in_the_pool(
    postgres_server: PostgresServer, guarded_database: str, make_ledger: MakeLedger
) -> None:
    """One connection, used by one tenant after the other, also after a transaction that failed or was cut off."""
    url = postgres_server.url(guarded_database, role=ROLES.tenant)
    ledger = make_ledger(url, roles=ROLES, duty="tenant", pool_size=1)
    new = NewRun(id=payload().run_id, version_id="v", payload_json="{}")

    async def fail(runs: TenantRuns) -> None:
        await runs.add(new)
        raise ValueError("on purpose")

    async def hang(runs: TenantRuns) -> None:
        await asyncio.Event().wait()

    await ledger.transactions.run(ALICE, lambda runs: runs.find())
    with pytest.raises(ValueError, match="on purpose"):
        await ledger.transactions.run(ALICE, fail)
    task = asyncio.create_task(ledger.transactions.run(ALICE, hang))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    async with ledger.database.transaction_without_tenant() as connection:
        setting = (await connection.execute(sa.text("SELECT current_setting('app.current_tenant', true)"))).scalar()
        rows = (await connection.execute(sa.text("SELECT id FROM core_outbox.bullpen_runs"))).all()
    assert (setting or "") == ""
    assert rows == []


@pytest.mark.requirement("X-113", "X-114", "R-34")
async def test_a_hundred_tenants_on_a_pool_of_four_never_meet(
    postgres_server: PostgresServer, guarded_database: str, make_ledger: MakeLedger, make_stage: MakeStage
) -> None:
    url = postgres_server.url(guarded_database, role=ROLES.tenant)
    ledger = make_ledger(url, roles=ROLES, duty="tenant", pool_size=4)
    stage = make_stage(ledger)
    owners = {}
    for tenant in TENANTS:
        for _ in range(2):
            wanted = payload(tenant)
            owners[wanted.run_id] = tenant
            await stage.service.submit(wanted)
    chosen = random.Random(7)
    met: list[str] = []

    async def trespass(tenant: str) -> None:
        """As this tenant: list, look at others' runs by their ids, cancel, retry, read steps; and by raw SQL."""
        for _ in range(20 if LONG else 1):
            other = chosen.choice([run_id for run_id, owner in owners.items() if owner != tenant])
            met.extend(row.id for row in await stage.service.find(tenant) if owners[row.id] != tenant)
            for attempt in (
                stage.service.get(tenant, other),
                stage.service.cancel(tenant, other, actor="eve"),
                stage.service.retry(tenant, other, actor="eve"),
            ):
                with pytest.raises(RowNotFound):
                    await attempt
            assert await stage.service.steps(tenant, other) == []

            async def raw(runs: TenantRuns, other: str = other) -> list[Any]:
                await asyncio.sleep(0)  # let another tenant in between
                query = sa.text("SELECT tenant_id FROM core_outbox.bullpen_runs WHERE id = :id OR true")
                return list((await runs.connection.execute(query, {"id": other})).scalars())

            met.extend(owner for owner in await ledger.transactions.run(tenant, raw) if owner != tenant)

    await asyncio.gather(*(trespass(tenant) for tenant in TENANTS))

    assert met == []
    with psycopg.connect(postgres_server.url(guarded_database)) as everything:
        untouched = everything.execute("SELECT count(*) FROM core_outbox.bullpen_runs WHERE status = 'QUEUED'")
        assert untouched.fetchone() == (200,)


@pytest.mark.requirement("X-115", "X-113", "R-33")
async def test_a_worker_runs_many_tenants_and_mixes_none(
    postgres_server: PostgresServer,
    guarded_database: str,
    make_ledger: MakeLedger,
    make_stage: MakeStage,
    caretaker: Stage,
    records: Records,
) -> None:
    url = postgres_server.url(guarded_database, role=ROLES.worker)
    stage = make_stage(make_ledger(url, roles=ROLES, duty="worker", pool_size=4), concurrency=40)
    seen: dict[str, str] = {}

    async def execute(run: Run) -> dict[str, str]:
        seen[run.id] = run.tenant_id
        mine = await stage.service.find(run.tenant_id)
        assert {row.tenant_id for row in mine} == {run.tenant_id}
        return {"tenant": run.tenant_id}

    wanted = [payload(tenant) for tenant in TENANTS]
    for each in wanted:
        await stage.service.submit(each)
    # A job that says it belongs to somebody else, in the middle of them.
    victim = payload(ALICE)
    await stage.service.submit(victim)
    forged = {**victim.to_data(), "tenantId": BOB}
    await stage.runs.queue.add("workflow-run", forged, job_id=victim.run_id)
    await caretaker.dispatch()
    async with stage.working(execute, dispatch=False):
        for each in wanted:
            row = await stage.until(each.run_id, RunStatus.COMPLETED, tenant_id=each.tenant_id)
            assert row.result == {"tenant": each.tenant_id}
        await stage.until_job(victim.run_id, JobState.FAILED)

    assert seen == {each.run_id: each.tenant_id for each in wanted}
    assert (await stage.service.get(ALICE, victim.run_id)).status is RunStatus.QUEUED
    # No line about one tenant's run names another tenant.
    for record in records.all:
        owner = seen.get(getattr(record, "runId", ""))
        assert owner is None or getattr(record, "tenantId", owner) == owner


@pytest.mark.requirement("R-34")
async def test_on_sqlite_the_predicate_alone_keeps_tenants_apart(lite: Stage) -> None:
    mine, other = payload(ALICE), payload(BOB)
    for each in (mine, other):
        await lite.service.submit(each)

    assert [row.id for row in await lite.service.find(ALICE)] == [mine.run_id]
    with pytest.raises(RowNotFound):
        await lite.service.get(ALICE, other.run_id)

    async def everything_one_may_do(runs: TenantRuns) -> list[Any]:
        return [
            await runs.get(other.run_id),
            await runs.start(other.run_id, job_timestamp=1, job_fence=1),
            await runs.cancel(other.run_id),
            await runs.requeue(other.run_id),
            await runs.fail(other.run_id, error_message="x", job_timestamp=1, job_fence=1),
            await runs.complete(other.run_id, 0, "null"),
            await runs.release(other.run_id, 0),
            await runs.note_failure(other.run_id, 0, history_json="[]", attempts=1, will_retry=True),
            await runs.expect_new_job(other.run_id, 0),
            await runs.beat(other.run_id, 0) or None,
            await runs.save_step(other.run_id, "a", 0, "null") or None,
            (await runs.step_result(other.run_id, "a"))[1],
        ]

    assert set(await lite.ledger.transactions.run(ALICE, everything_one_may_do)) == {None}
    with pytest.raises(RowNotFound):
        await lite.ledger.transactions.run(ALICE, lambda runs: runs.payload(other.run_id))
    assert (await lite.service.get(BOB, other.run_id)).status is RunStatus.QUEUED


@pytest.mark.requirement("R-34")
def test_every_statement_about_runs_names_its_tenant() -> None:
    """Read from the source: each query or change of `TenantRuns` goes through a predicate on the tenant."""
    import inspect

    source = inspect.getsource(TenantRuns)
    statements = source.count("sa.select(") + source.count("sa.update(")
    predicates = source.count("self._is(") + source.count(".tenant_id == self.tenant_id") - 1  # less its definition

    assert statements and predicates >= statements


async def test_a_small_pool_is_told_with_the_role_too(
    postgres_server: PostgresServer, guarded_database: str, make_ledger: MakeLedger, make_stage: MakeStage
) -> None:
    url = postgres_server.url(guarded_database, role=ROLES.worker)
    ledger = make_ledger(url, roles=ROLES, duty="worker", pool_size=2)

    with pytest.raises(NotConfigured, match="BULLPEN_DATABASE_POOL_SIZE"):
        await make_stage(ledger, concurrency=50).runs.worker().start()
