"""The outbox as an application has it: made from settings, run by `run`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from bullpen import Job
from bullpen.app import Bullpen
from bullpen.errors import InvalidOption, LedgerNotReady
from bullpen.ledger import Ledger, OutboxFields, OutboxStatus
from bullpen.outbox import Route
from bullpen.plugins.channels.webhook import Webhook
from bullpen.settings import Settings
from bullpen.testing.postgres import PostgresServer
from bullpen.testing.receivers import HttpReceiver
from tests.databases import ROLES, MakeLedger, item
from tests.forks import WarmChild
from tests.outbox.kit import SpyChannel, Told, rows, until_settled

ROOT = Path(__file__).parents[2]


class BusinessSaysNo(Exception):
    """Rolls a transaction back."""


@pytest.fixture(params=["embedded", "postgresql"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    """Nothing configured at all, and everything configured."""
    environ = {"BULLPEN_DATA_DIR": str(tmp_path / "data")}
    if request.param == "postgresql":
        environ |= {
            "BULLPEN_EMBEDDED": "never",
            "BULLPEN_DATABASE_URL": request.getfixturevalue("postgres_url"),
            "BULLPEN_REDIS_URL": request.getfixturevalue("redis_url"),
        }
    return Settings.load(environ=environ, start=tmp_path)


@contextlib.asynccontextmanager
async def running(app: Bullpen) -> AsyncIterator[None]:
    task = asyncio.create_task(app.run(signals=False))
    try:
        yield
    finally:
        await app.stop()
        await task


def partner(receiver: HttpReceiver) -> Webhook:
    return Webhook(receiver.url, allow_http=True, allowed_networks=["127.0.0.0/8"])


@pytest.mark.requirement("O-1", "O-3", "O-83")
async def test_what_a_transaction_committed_is_delivered_and_nothing_else(settings: Settings) -> None:
    app = Bullpen(settings=settings)
    handled: asyncio.Queue[Job] = asyncio.Queue()

    @app.handler("emails")
    async def send(job: Job) -> None:
        handled.put_nowait(job)

    async with HttpReceiver() as receiver:
        app.use_outbox().route("webhook:partnerX", partner(receiver))
        await app.prepare()
        engine = create_async_engine(app.ledger.database.url)

        async def business(number: int, *, fail: bool) -> None:
            ids: dict[str, Any] = {"tenant_id": "acme", "correlation_id": f"c-{number}"}
            async with AsyncSession(engine) as session, session.begin():
                await app.use_outbox().enqueue(
                    session, integration_type="webhook:partnerX", event_type="order.paid.v1",
                    payload={"orderId": number}, user_id="u-7", **ids,
                )  # fmt: skip
                await app.use_outbox().add_in_transaction(session, "emails", "receipt", {"orderId": number}, **ids)
                if fail:
                    raise BusinessSaysNo

        async with running(app):
            with pytest.raises(BusinessSaysNo):
                await business(1, fail=True)
            await business(2, fail=False)
            (request,) = await receiver.until(1)
            job = await asyncio.wait_for(handled.get(), 20)
            await until_settled(app.ledger, 2)
            counted = {metric.name: metric for metric in await app.metrics()}
            stored = await rows(app.ledger)
        await engine.dispose()

    assert job.data == {"orderId": 2}
    assert (request.headers["x-tenant-id"], request.headers["x-correlation-id"], request.headers["x-user-id"]) == (
        "acme",
        "c-2",
        "u-7",
    )
    assert {row.status for row in stored} == {OutboxStatus.SENT}
    assert handled.empty()
    sent = {sample.labels["integration_type"]: sample.value for sample in counted["outbox_sent_total"].samples}
    assert sent == {"webhook:partnerX": 1, "bullmq:emails": 1}
    assert set(counted) >= {"outbox_pending_total", "outbox_claimed_total", "outbox_dead_total"}


def test_naming_the_outbox_opens_and_makes_nothing(tmp_path: Path) -> None:
    """Modules name it when they are imported; a tool that imports them must leave no trace."""
    app = Bullpen(settings=Settings.load(environ={"BULLPEN_DATA_DIR": str(tmp_path / "data")}, start=tmp_path))

    app.use_outbox().route("webhook:*", SpyChannel())

    assert app.has_outbox
    assert list(tmp_path.iterdir()) == []


async def test_settings_reach_dispatcher_and_ledger(tmp_path: Path) -> None:
    environ = {
        "BULLPEN_DATA_DIR": str(tmp_path),
        "OUTBOX_CLAIM_BATCH_SIZE": "7",
        "OUTBOX_TICK_INTERVAL_MS": "321",
        "OUTBOX_MAX_ATTEMPTS": "4",
        "OUTBOX_DEADLETTER_TOPIC": "graves",
        "BULLPEN_OUTBOX_UNKNOWN_TYPES": "leave",
    }
    async with Bullpen(settings=Settings.load(environ=environ, start=tmp_path)) as app:
        await app.prepare()
        await app.ledger.outbox.enqueue(item())
        (row,) = await app.ledger.outbox.claim_due_batch("me")
        await app.ledger.outbox.dead_letter(row, "no")
        stored = {row.integration_type: row for row in await rows(app.ledger)}

        options = app.use_outbox().dispatcher().options
        assert (options.claim_batch_size, options.tick_interval_ms, options.unknown_types) == (7, 321, "leave")
        assert stored["webhook:partnerX"].max_attempts == 4
        assert set(stored) == {"webhook:partnerX", "bullmq:graves"}


async def test_lease_and_fairness_of_the_settings_reach_the_dispatcher(tmp_path: Path) -> None:
    """And a lease below the usual limit of a delivery starts: routes that name no limit stay below it."""
    environ = {
        "BULLPEN_DATA_DIR": str(tmp_path),
        "BULLPEN_OUTBOX_LEASE_MS": "5000",
        "BULLPEN_OUTBOX_FAIR_TENANTS": "true",
        "BULLPEN_ALERTS_SLACK_URL": "https://slack.invalid/hook",
        "OUTBOX_CLAIM_BATCH_SIZE": "2",
    }
    spy = SpyChannel()
    spy.gate.clear()
    async with Bullpen(settings=Settings.load(environ=environ, start=tmp_path)) as app:
        app.use_outbox().route("webhook:*", Route(channel=spy, strategy="direct"))
        await app.prepare()
        await app.ledger.outbox.enqueue_many([item(number, tenant_id="big") for number in range(5)])
        await app.ledger.outbox.enqueue(item(9, tenant_id="small"))
        async with app.use_outbox().dispatcher() as dispatcher:
            await dispatcher.tick()
            await spy.until(2)
            claimed = await rows(app.ledger, status=OutboxStatus.CLAIMED)
            spy.gate.set()

    assert {message.tenant_id for message in spy.messages} == {"big", "small"}
    for row in claimed:
        assert row.locked_at is not None and row.locked_until is not None
        assert (row.locked_until - row.locked_at).total_seconds() == pytest.approx(5, abs=0.01)


@pytest.mark.requirement("X-73")
async def test_strict_sources_of_the_settings_store_an_event_once(tmp_path: Path) -> None:
    environ = {"BULLPEN_DATA_DIR": str(tmp_path), "BULLPEN_OUTBOX_STRICT_SOURCES": "true"}
    async with Bullpen(settings=Settings.load(environ=environ, start=tmp_path)) as app:
        await app.prepare()
        source: OutboxFields = {"source_stream_id": "order-1", "source_event_id": "1"}
        async with app.ledger.database.transaction() as connection:
            stored = [
                await app.use_outbox().enqueue(connection, integration_type=name, event_type="order.paid.v1", **source)
                for name in ("kafka:payments", "webhook:partnerX")
            ]

    assert [each.created for each in stored] == [True, False]


async def test_an_outbox_that_is_first_used_while_the_app_runs_runs_too(settings: Settings, told: Told) -> None:
    app = Bullpen(settings=settings)
    handled = asyncio.Event()

    @app.handler("second")
    async def second(job: Job) -> None:
        handled.set()

    @app.handler("first")
    async def first(job: Job) -> None:
        await app.prepare()
        async with app.ledger.database.transaction() as connection:
            await app.use_outbox().add_in_transaction(connection, "second", "go")

    async with running(app):
        await app.queue("first").add("go")
        await asyncio.wait_for(handled.wait(), 20)
        await told.wait("outbox.delivered")


async def test_a_configured_database_without_tables_stops_the_start(empty_postgres_url: str, tmp_path: Path) -> None:
    """The file of the embedded default is ours to make; somebody's database is not."""
    environ = {"BULLPEN_DATA_DIR": str(tmp_path), "BULLPEN_DATABASE_URL": empty_postgres_url}
    app = Bullpen(settings=Settings.load(environ=environ, start=tmp_path))
    app.use_outbox().route("webhook:*", SpyChannel())

    with pytest.raises(LedgerNotReady, match="bullpen migrate"):
        await app.run(signals=False)


@pytest.mark.requirement("X-23")
async def test_with_roles_a_process_does_what_its_role_may(
    postgres_server: PostgresServer, guarded_database: str, redis_url: str, tmp_path: Path, make_ledger: MakeLedger
) -> None:
    """The dispatcher sees all tenants and delivers nothing; workers deliver and see one tenant at a time; an API does
    neither."""

    def make(duty: str, role: str, spy: SpyChannel) -> Bullpen:
        environ = {
            "BULLPEN_DATABASE_URL": postgres_server.url(guarded_database, role=role),
            "BULLPEN_REDIS_URL": redis_url,
            "BULLPEN_TENANT_ROLE": ROLES.tenant,
            "BULLPEN_WORKER_ROLE": ROLES.worker,
            "BULLPEN_SERVICE_ROLE": ROLES.service,
            "BULLPEN_DATABASE_DUTY": duty,
        }
        app = Bullpen(settings=Settings.load(environ=environ, start=tmp_path))
        app.use_outbox().route("webhook:partnerX", spy)
        return app

    service_spy, worker_spy, tenant_spy = SpyChannel(), SpyChannel(), SpyChannel()
    service, worker = make("service", ROLES.service, service_spy), make("worker", ROLES.worker, worker_spy)
    tenant = make("tenant", ROLES.tenant, tenant_spy)
    all_rows = make_ledger(postgres_server.url(guarded_database, role=ROLES.service), roles=ROLES)

    async with running(service), running(worker), running(tenant):
        await all_rows.outbox.enqueue_many([item(n, tenant_id=f"t-{n}") for n in range(3)])
        await until_settled(all_rows, 3)

    assert sorted(worker_spy.numbers) == [0, 1, 2]
    assert service_spy.messages == tenant_spy.messages == []


async def test_a_hurried_close_does_not_wait_for_a_target_that_hangs(settings: Settings) -> None:
    spy = SpyChannel()
    spy.gate.clear()
    app = Bullpen(settings=settings)
    app.use_outbox().route("webhook:*", Route(channel=spy, strategy="direct"))
    await app.prepare()
    await app.ledger.outbox.enqueue(item())
    task = asyncio.create_task(app.run(signals=False))
    await spy.until(1)

    patient = asyncio.create_task(app.stop())
    await asyncio.sleep(0)
    await asyncio.wait_for(app.stop(0), 20)
    await patient
    await task


def test_a_route_is_given_once_and_whole() -> None:
    from bullpen.outbox import Outbox

    outbox = Outbox()

    with pytest.raises(InvalidOption, match="no other arguments with a Route"):
        outbox.route("webhook:*", Route(channel=SpyChannel()), concurrency=3)
    outbox.route("webhook:*", SpyChannel(), concurrency=3)

    route = outbox.router.resolve("webhook:a")
    assert route is not None and route.concurrency == 3 and route.is_direct


APP = """
from bullpen import Bullpen
from bullpen.ports.channel import Accepted, ChannelHealth

class Printer:
    async def send(self, message):
        print("delivered", message.payload["orderId"], flush=True)
        return Accepted()
    async def check(self):
        return ChannelHealth(True)
    async def aclose(self): ...

app = Bullpen()
app.use_outbox().route("print:*", Printer())
"""


@pytest.mark.requirement("O-49")
async def test_bullpen_run_runs_the_outbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BULLPEN_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT / 'src'}")
    (tmp_path / "outbox_shop.py").write_text(APP)

    with WarmChild.module("bullpen.cli", "run", "outbox_shop:app", cwd=tmp_path) as child:
        async with Ledger(f"sqlite:///{tmp_path / 'data' / 'ledger.sqlite3'}", make_directory=True) as ledger:
            await ledger.migrate()  # whoever is first makes the tables
            await ledger.outbox.enqueue(item(7, integration_type="print:x"))
            await asyncio.to_thread(child.wait_for, "delivered 7")
            await until_settled(ledger, 1)
        child.terminate()
        assert await asyncio.to_thread(child.wait, 20) == 0

    assert "taking jobs from the outbox on" in child.errors
    assert "alembic" not in child.errors
