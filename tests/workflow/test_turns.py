"""Events of one entity take turns over all processes, by default: each action runs once per event."""

from __future__ import annotations

import asyncio
import contextvars
import json
import uuid
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import registry

from bullpen.app import Bullpen
from bullpen.errors import EntityBusy
from bullpen.ledger import Ledger
from bullpen.ledger.entities import SqlEntities
from bullpen.redis import Connection
from bullpen.settings import Settings
from bullpen.testing import Child
from bullpen.workflow import Definition, States, Transition
from bullpen.workflow.locks import LedgerLocks
from tests.conftest import StartServer
from tests.databases import MakeLedger
from tests.loops import FACTORIES
from tests.workflow.direct_process import workflow_of
from tests.workflow.stored import get, make_tables, put, sql_orders
from tests.workflow.turns_process import stored_of

ROOT = Path(__file__).parents[2]
PRODUCERS, EACH = 20, 10
PATIENCE_S = 200


@pytest.fixture
def children() -> Iterator[list[Child]]:
    made: list[Child] = []
    yield made
    for child in made:
        child.close()


@pytest.mark.requirement("X-52")
@pytest.mark.timeout(600)  # Kafka's events of one entity are one partition, and each is committed before the next
@pytest.mark.parametrize(
    ("store", "way", "each"),
    [
        ("redis", "bullmq", EACH),
        ("redis", "rabbitmq", 1),
        ("redis", "kafka", 1),
        pytest.param("redis", "rabbitmq", EACH, marks=pytest.mark.long),
        pytest.param("postgresql", "rabbitmq", EACH, marks=pytest.mark.long),
        pytest.param("redis", "kafka", EACH, marks=pytest.mark.long),
        pytest.param("postgresql", "kafka", EACH, marks=pytest.mark.long),
        pytest.param("redis", "emit", EACH, marks=pytest.mark.long),
        pytest.param("postgresql", "bullmq", EACH, marks=pytest.mark.long),
        pytest.param("postgresql", "emit", EACH, marks=pytest.mark.long),
        pytest.param("sqlite", "emit", EACH, marks=pytest.mark.long),
    ],
)
async def test_a_busy_entity_runs_each_action_once(
    store: str,
    way: str,
    each: int,
    start_server: StartServer,
    make_ledger: MakeLedger,
    request: pytest.FixtureRequest,
    children: list[Child],
) -> None:
    """200 events of 20 producers in three processes, each on a loop of another kind. With versions alone nearly every
    second run was in vain.

    Takes some seconds: three processes must start, and 200 runs one after the other.
    """
    server = start_server()
    urls = {"postgresql": "postgres_url", "sqlite": "sqlite_url"}
    order: dict[str, Any] = {"redis": server.url, "store": store, "way": way, "each": each, "database": ""}
    order |= {"source": f"orders-{uuid.uuid4().hex[:6]}", "broker": ""}
    if way == "rabbitmq":
        order["broker"] = request.getfixturevalue("rabbit").url
    if way == "kafka":
        order["broker"] = request.getfixturevalue("kafka").address
    if store in urls:
        order["database"] = request.getfixturevalue(urls[store])
        ledger = make_ledger(order["database"])
        await ledger.migrate()
        await make_tables(ledger)
    connection = Connection(server.url)
    stored = stored_of(order, connection)
    await stored.create("urn:1")

    for producers, loop in zip((7, 7, 6), cycle(FACTORIES), strict=False):
        given = json.dumps({**order, "producers": producers, "loop": loop})
        children.append(Child.module("tests.workflow.turns_process", given, cwd=ROOT))
    for child in children:
        await asyncio.to_thread(child.wait_for, "ready", PATIENCE_S)
    for child in children:
        child.send_line("go")
    for child in children:
        await asyncio.to_thread(child.wait_for, "produced", PATIENCE_S)
    async with asyncio.timeout(PATIENCE_S):
        # It changes in other processes, which tell nobody.
        while (amount := get(await stored.load("urn:1"), "amount")) < PRODUCERS * each:  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    runs = int(server.client().get("runs") or 0)
    assert (amount, runs) == (PRODUCERS * each, PRODUCERS * each)
    await connection.aclose()
    if stored.ledger is not None:
        await stored.ledger.aclose()


# ---- where turns are kept ------------------------------------------------------------------------------------------


@pytest.fixture(params=["sqlite", "postgresql"])
async def ledger(request: pytest.FixtureRequest, make_ledger: MakeLedger) -> Ledger:
    made = make_ledger(request.getfixturevalue({"sqlite": "sqlite_url", "postgresql": "postgres_url"}[request.param]))
    await made.migrate()
    return made


@pytest.mark.every_loop
@pytest.mark.requirement("X-52")
async def test_holders_of_a_row_take_turns(ledger: Ledger) -> None:
    places = [LedgerLocks(ledger.turns, "orders") for _ in range(3)]
    inside = most = 0

    async def hold(locks: LedgerLocks) -> None:
        nonlocal inside, most
        async with locks.hold("urn:1"):
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0.001)
            inside -= 1

    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(hold(locks) for locks in places * 3))

    assert most == 1
    assert await rows_of(ledger) == 0


async def test_entities_of_another_kind_do_not_wait(ledger: Ledger) -> None:
    orders, invoices = (LedgerLocks(ledger.turns, kind, wait=100) for kind in ("orders", "invoices"))

    async with orders.hold("urn:1"), orders.hold("urn:2"), invoices.hold("urn:1"):
        assert await rows_of(ledger) == 3


@pytest.mark.requirement("X-52")
async def test_the_row_of_a_dead_holder_ends_and_is_not_given_back_by_it(ledger: Ledger) -> None:
    assert await ledger.turns.take("orders/urn:1", "dead", 200)
    assert not await ledger.turns.take("orders/urn:1", "next", 200)
    locks = LedgerLocks(ledger.turns, "orders", wait=20_000)

    async with locks.hold("urn:1"):
        await ledger.turns.release("orders/urn:1", "dead")  # it comes back to life, and finds nothing of its own
        assert await rows_of(ledger) == 1


@pytest.mark.every_loop
async def test_a_holder_keeps_its_row_for_as_long_as_it_needs(ledger: Ledger) -> None:
    slow, hasty = LedgerLocks(ledger.turns, "orders", lease=300), LedgerLocks(ledger.turns, "orders", wait=900)

    async def somebody_else() -> None:
        with pytest.raises(EntityBusy, match="was not free within 900 ms"):
            async with hasty.hold("urn:1"):
                raise AssertionError("two are in")

    async with slow.hold("urn:1"):
        await asyncio.create_task(somebody_else(), context=contextvars.Context())


@pytest.mark.every_loop
@pytest.mark.requirement("X-52")
@pytest.mark.parametrize("way", ["by default", "switched off"])
async def test_workflows_take_turns_unless_told_otherwise(make_ledger: MakeLedger, sqlite_url: str, way: str) -> None:
    """Two apps with one store are two processes as far as turns are concerned."""
    ledger = make_ledger(sqlite_url)
    await ledger.migrate()
    await make_tables(ledger)
    stored = sql_orders(ledger, status_type=str)
    await stored.create("urn:1")
    inside = most = 0
    both_in = asyncio.Event()

    async def charge(entity: Any, payload: int) -> Any:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        if inside == 2:
            both_in.set()
        if way == "switched off":
            await asyncio.wait_for(both_in.wait(), PATIENCE_S)
        await asyncio.sleep(0.01)
        inside -= 1
        return put(entity, "amount", get(entity, "amount") + payload)

    definition = Definition[Any, int, str, str](
        name="order",
        states=States(idles=["new"], failed="failed"),
        transitions=[Transition(event="pay", from_="new", to="new", actions=[charge])],
        entity=stored.store,  # type: ignore[arg-type]  # states are plain text here
    )
    options: dict[str, Any] = {"locks": False} if way == "switched off" else {}
    apps = [Bullpen(settings=Settings.load(environ={"BULLPEN_TRANSPORT": "memory"})) for _ in range(2)]
    workflows = [app.workflow(definition, **options) for app in apps]

    await asyncio.gather(*(workflow.emit("pay", "urn:1", 1) for workflow in workflows))

    assert most == (2 if way == "switched off" else 1)
    assert get(await stored.load("urn:1"), "amount") == 2
    for app in apps:
        await app.aclose()


def test_a_class_that_was_mapped_by_hand_has_turns_too(make_ledger: MakeLedger, sqlite_url: str) -> None:
    """It has no `__tablename__`."""

    class Invoice:
        pass

    columns = [sa.Column("urn", sa.String, primary_key=True), sa.Column("status", sa.String)]
    registry().map_imperatively(
        Invoice, sa.Table("invoices", sa.MetaData(), *columns, sa.Column("version", sa.Integer))
    )

    assert SqlEntities[Invoice, str](Invoice, make_ledger(sqlite_url)).kind == "invoices"


async def rows_of(ledger: Ledger) -> int:
    async with ledger.database.statement(reads=True) as connection:
        found = await connection.execute(sa.text(f"SELECT count(*) FROM {ledger.database.table('bullpen_turns')}"))
        return int(found.scalar_one())


async def _turns_stored(ledger: Ledger) -> int:
    table = ledger.database.table("bullpen_turns")
    async with ledger.database.transaction_without_tenant() as connection:
        return int((await connection.execute(sa.text(f"SELECT count(*) FROM {table}"))).scalar_one())


async def test_turns_of_holders_that_died_are_removed(ledger: Ledger) -> None:
    """Whoever dies with a turn leaves its row behind, and an entity that nobody touches again keeps it for ever."""
    for number in range(20):
        assert await ledger.turns.take(f"gone-{number}", "dead", 1)
    assert await ledger.turns.take("held", "alive", 60_000)
    await asyncio.sleep(0.01)  # the leases end by the clock of the database

    async with Ledger(str(ledger.database.engine.url.render_as_string(hide_password=False))) as other:
        assert await other.turns.take("next", "other", 60_000), "the first turn of a process"
        assert await _turns_stored(other) == 2
        assert not await other.turns.take("held", "other", 60_000)
        assert await other.turns.take("gone-3", "other", 60_000)


@pytest.mark.requirement("W-54")
async def test_own_access_goes_on_when_the_lock_of_a_dead_ones_job_has_ended(
    start_server: StartServer, children: list[Child]
) -> None:
    """The turn of its entity is leased for as long as its job: not for half a minute more."""
    server = start_server()
    app = Bullpen(settings=Settings.load(environ={}, redis_url=server.url))
    server.client().set("entity:urn:1", "new")
    order = json.dumps({"redis": server.url, "dies": True})
    children.append(Child.module("tests.workflow.direct_process", order, cwd=ROOT))
    await children[0].seen("ready")
    workflow = workflow_of(app, dies=False)
    receipt = await workflow.send("pay", "urn:1")
    await asyncio.to_thread(children[0].wait, 20)

    await workflow.start()
    await receipt.result(timeout=10_000)

    assert server.client().get("entity:urn:1") == b"paid"
    await app.aclose()
