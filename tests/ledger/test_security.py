"""Row-level security: a tenant sees its own rows, and a process that it would not hold for does not start."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psycopg
import pytest

from bullpen.errors import InvalidOption, LedgerNotReady, UnsafeDatabaseRole
from bullpen.ledger import Died, Ledger, OutboxStatus, Roles, Settlement
from bullpen.testing.postgres import PostgresServer
from tests.contracts.outbox_repository import execute
from tests.databases import OWNER, ROLES, MakeLedger, item

ALICE, BOB = "alice", "bob"


@pytest.fixture
def tenant_ledger(postgres_server: PostgresServer, guarded_database: str, make_ledger: MakeLedger) -> Ledger:
    return make_ledger(postgres_server.url(guarded_database, role=ROLES.tenant), roles=ROLES, duty="tenant")


@pytest.fixture
def worker_ledger(postgres_server: PostgresServer, guarded_database: str, make_ledger: MakeLedger) -> Ledger:
    return make_ledger(postgres_server.url(guarded_database, role=ROLES.worker), roles=ROLES, duty="worker")


@pytest.fixture
def service_ledger(postgres_server: PostgresServer, guarded_database: str, make_ledger: MakeLedger) -> Ledger:
    return make_ledger(postgres_server.url(guarded_database, role=ROLES.service), roles=ROLES, duty="service")


@pytest.mark.requirement("X-23")
async def test_a_tenant_sees_and_writes_only_its_own_rows(tenant_ledger: Ledger, service_ledger: Ledger) -> None:
    mine = await tenant_ledger.outbox.enqueue(item(1, tenant_id=ALICE))
    other = await tenant_ledger.outbox.enqueue(item(2, tenant_id=BOB))

    async with tenant_ledger.database.transaction(tenant=ALICE) as connection:
        seen = (await connection.exec_driver_sql("SELECT id FROM core_outbox.integration_outbox")).scalars().all()

    assert [str(row_id) for row_id in seen] == [mine.id]
    assert await tenant_ledger.outbox.get(str(other.id), tenant_id=ALICE) is None
    assert len(await service_ledger.outbox.find()) == 2


@pytest.mark.requirement("X-23")
async def test_a_row_of_another_tenant_cannot_be_written(tenant_ledger: Ledger) -> None:
    with pytest.raises(UnsafeDatabaseRole, match="another tenant"):
        async with tenant_ledger.database.transaction(tenant=ALICE) as connection:
            await tenant_ledger.enqueuer.enqueue(connection, item(tenant_id=BOB))
    with pytest.raises(UnsafeDatabaseRole, match="another tenant"):
        async with tenant_ledger.database.transaction(tenant=ALICE) as connection:
            await tenant_ledger.enqueuer.enqueue(connection, item())


@pytest.mark.requirement("X-23", "X-73")
async def test_an_event_that_another_tenant_has_stored_is_no_repetition(tenant_ledger: Ledger) -> None:
    """Both count their orders from 1. The second was taken for a repetition, and never sent."""
    await tenant_ledger.outbox.enqueue(item(1, tenant_id=ALICE))

    with pytest.raises(InvalidOption, match="put the tenant into source_stream_id"):
        await tenant_ledger.outbox.enqueue(item(1, tenant_id=BOB))

    assert (await tenant_ledger.outbox.enqueue(item(1, tenant_id=ALICE))).created is False


@pytest.mark.requirement("X-23")
async def test_without_a_tenant_nothing_is_done(tenant_ledger: Ledger) -> None:
    await tenant_ledger.outbox.enqueue(item(tenant_id=ALICE))

    with pytest.raises(UnsafeDatabaseRole, match="needs a tenant"):
        await tenant_ledger.outbox.find()
    async with tenant_ledger.database.transaction_without_tenant() as connection:
        rows = (await connection.exec_driver_sql("SELECT id FROM core_outbox.integration_outbox")).all()

    assert rows == []


async def test_a_pooled_connection_carries_no_tenant_over(
    postgres_server: PostgresServer, guarded_database: str, make_ledger: MakeLedger
) -> None:
    url = postgres_server.url(guarded_database, role=ROLES.tenant)
    ledger = make_ledger(url, roles=ROLES, duty="tenant", pool_size=1)
    await ledger.outbox.enqueue(item(tenant_id=ALICE))

    async with ledger.database.transaction_without_tenant() as connection:
        rows = (await connection.exec_driver_sql("SELECT id FROM core_outbox.integration_outbox")).all()

    assert rows == []


@pytest.mark.requirement("X-23", "O-54")
async def test_a_worker_delivers_the_rows_of_its_tenant(
    tenant_ledger: Ledger, worker_ledger: Ledger, service_ledger: Ledger
) -> None:
    """The dispatcher claims for all tenants; a delivery worker begins, settles and announces as one of them."""
    await tenant_ledger.outbox.enqueue(item(1, tenant_id=ALICE))
    await tenant_ledger.outbox.enqueue(item(2, tenant_id=BOB))
    rows = {row.tenant_id: row for row in await service_ledger.outbox.claim_due_batch("dispatcher")}
    ids = [row.id for row in rows.values()]

    begun = await worker_ledger.outbox.begin(ids, worker_id="w", lease_ms=1_000, tenant_id=ALICE)
    foreign = await worker_ledger.outbox.begin(ids, worker_id="w", lease_ms=1_000, tenant_id=ALICE)
    settled = await worker_ledger.outbox.settle(
        [Settlement(begun[rows[ALICE].id], Died("bad", "X"), "w")], tenant_id=ALICE
    )

    assert set(begun) == {rows[ALICE].id}
    assert foreign == {}
    assert settled[0].status is OutboxStatus.DEAD
    (announcement,) = await service_ledger.outbox.find(integration_type="bullmq:outbox.dead")
    assert announcement.tenant_id == ALICE


async def test_the_tenant_role_may_not_touch_what_is_not_delivery(
    postgres_server: PostgresServer, guarded_database: str
) -> None:
    with postgres_server.connect(guarded_database, role=ROLES.tenant) as connection:
        for statement in (
            "UPDATE core_outbox.integration_outbox SET payload = '{}'",
            "DELETE FROM core_outbox.integration_outbox",
            "DELETE FROM core_outbox.bullpen_audit",
            "INSERT INTO core_outbox.integration_outbox_fences VALUES ('a', 'b', 'c', gen_random_uuid())",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(statement.encode())


async def test_keys_of_one_tenant_do_not_hide_messages_of_another(tenant_ledger: Ledger) -> None:
    seen: dict[str, list[bool]] = {ALICE: [], BOB: []}
    for tenant in (ALICE, BOB, ALICE):
        async with (
            tenant_ledger.database.transaction(tenant=tenant) as connection,
            tenant_ledger.once(connection, "message-1") as is_new,
        ):
            seen[tenant].append(is_new)

    assert seen == {ALICE: [True, False], BOB: [True]}


@pytest.mark.requirement("X-52")
async def test_tenants_and_workers_take_turns_at_the_same_entity(
    tenant_ledger: Ledger, worker_ledger: Ledger, service_ledger: Ledger
) -> None:
    """An entity may be everybody's, so its turn is, too."""
    ledgers = [tenant_ledger, worker_ledger, service_ledger]
    for holder in ledgers:
        assert await holder.turns.take("orders/urn:1", "holder", 10_000)
        assert await holder.turns.take("orders/urn:1", "holder", 10_000)  # renewed
        assert [await each.turns.take("orders/urn:1", "other", 10_000) for each in ledgers] == [False] * 3
        await holder.turns.release("orders/urn:1", "holder")


async def test_each_duty_passes_its_own_check(
    tenant_ledger: Ledger, worker_ledger: Ledger, service_ledger: Ledger
) -> None:
    await tenant_ledger.check()
    await worker_ledger.check()
    await service_ledger.check()


@asynccontextmanager
async def ledger_as(server: PostgresServer, database: str, role: str, duty: str) -> AsyncIterator[Ledger]:
    async with Ledger(server.url(database, role=role), roles=ROLES, duty=duty) as ledger:  # type: ignore[arg-type]
        yield ledger


@pytest.mark.requirement("X-23")
@pytest.mark.parametrize(
    ("role", "duty", "problem"),
    [
        ("postgres", "service", "superuser"),
        (OWNER, "service", "owns the tables"),
        (ROLES.service, "tenant", "sees all tenants"),
        (ROLES.service, "worker", "sees all tenants"),
        (ROLES.tenant, "worker", "is not shop_worker"),
        (ROLES.worker, "tenant", "changes the state of runs"),
        (ROLES.tenant, "service", "is not shop_service"),
    ],
)
async def test_a_role_for_which_it_means_nothing_is_refused(
    postgres_server: PostgresServer, guarded_database: str, role: str, duty: str, problem: str
) -> None:
    async with ledger_as(postgres_server, guarded_database, role, duty) as ledger:
        with pytest.raises(UnsafeDatabaseRole, match=problem):
            await ledger.check()


async def test_a_role_that_bypasses_it_is_refused(postgres_server: PostgresServer, guarded_database: str) -> None:
    postgres_server.execute("CREATE ROLE sneaky LOGIN BYPASSRLS IN ROLE shop_tenant")
    try:
        async with ledger_as(postgres_server, guarded_database, "sneaky", "tenant") as ledger:
            with pytest.raises(UnsafeDatabaseRole, match="BYPASSRLS"):
                await ledger.check()
    finally:
        postgres_server.execute("DROP ROLE sneaky")


@pytest.mark.parametrize("words", ["NO FORCE", "DISABLE"])
async def test_a_table_without_it_is_refused(
    postgres_server: PostgresServer, guarded_database: str, service_ledger: Ledger, words: str
) -> None:
    postgres_server.execute(
        f"ALTER TABLE core_outbox.integration_outbox {words} ROW LEVEL SECURITY", database=guarded_database
    )

    with pytest.raises(UnsafeDatabaseRole, match=r"lacks \w+ ROW LEVEL SECURITY"):
        await service_ledger.check()


async def test_roles_that_do_not_exist_are_told(
    postgres_server: PostgresServer, guarded_database: str, make_ledger: MakeLedger
) -> None:
    missing = Roles(tenant="nobody_here", worker="not_here", service="nor_here")
    ledger = make_ledger(postgres_server.url(guarded_database, role=ROLES.service), roles=missing)

    with pytest.raises(LedgerNotReady, match="--create-roles"):
        await ledger.check()


async def test_roles_are_created_only_when_asked(postgres_server: PostgresServer, make_ledger: MakeLedger) -> None:
    name = postgres_server.create_database()
    roles = Roles(tenant="made_tenant", worker="made_worker", service="made_service")
    ledger = make_ledger(postgres_server.url(name), roles=roles)
    try:
        with pytest.raises(Exception, match="does not exist"):
            await ledger.migrate()

        await ledger.migrate(create_roles=True)
        await ledger.migrate(create_roles=True)

        service = make_ledger(postgres_server.url(name, role="made_service"), roles=roles)
        await service.check()
        await service.aclose()
    finally:
        await ledger.aclose()
        postgres_server.drop_database(name)
        postgres_server.execute("DROP ROLE IF EXISTS made_tenant, made_worker, made_service")


async def test_without_roles_one_owner_does_everything(postgres_url: str, make_ledger: MakeLedger) -> None:
    ledger = make_ledger(postgres_url)

    await ledger.check()
    await ledger.outbox.enqueue_many([item(1, tenant_id=ALICE), item(2, tenant_id=BOB), item(3)])

    assert len(await execute(ledger, "SELECT id FROM {outbox}")) == 3
