"""The whole way: a transaction, its message or job, and the target."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from bullpen._kernel.backoff import Backoff
from bullpen._kernel.keep import KeepJobs
from bullpen.errors import InvalidOption, NotConfigured
from bullpen.ledger import Ledger, OutboxItem, OutboxStatus
from bullpen.outbox import Outbox, Route
from bullpen.outbox.outbox import JOBS
from bullpen.plugins.channels.queue import QueueChannel
from bullpen.plugins.channels.webhook import Webhook
from bullpen.ports.channel import Accepted, Message, NotTried, Refused
from bullpen.queue import Job, JobState, Queue
from bullpen.redis import Connection
from bullpen.testing.receivers import HttpReceiver
from bullpen.wire.deferred import options_from_json, options_to_json
from bullpen.wire.options import JobMeta
from bullpen.worker import Worker
from tests.conftest import StartServer
from tests.databases import MakeLedger
from tests.outbox.conftest import MakeOutbox
from tests.outbox.kit import SpyChannel, rows, until_settled

PENDING, CLAIMED, SENT, FAILED, DEAD = OutboxStatus


class BusinessSaysNo(Exception):
    """Rolls a transaction back."""


async def in_transaction(ledger: Ledger, work: Any, *, fail: bool = False) -> Any:
    engine = create_async_engine(ledger.database.url)
    try:
        async with AsyncSession(engine) as session, session.begin():
            result = await work(session)
            if fail:
                raise BusinessSaysNo
            return result
    except BusinessSaysNo:
        return None
    finally:
        await engine.dispose()


@pytest.mark.requirement("O-4", "O-83", "O-3", "O-71", "O-6")
async def test_a_webhook_arrives_if_and_only_if_the_transaction_committed(
    ledger: Ledger, make_outbox: MakeOutbox, connection: Connection
) -> None:
    async with HttpReceiver() as receiver:
        channel = Webhook(receiver.url, allow_http=True, allowed_networks=["127.0.0.0/8"])
        outbox = make_outbox({"webhook:partnerX": channel}, connection=connection)
        workers, dispatcher = outbox.workers(), outbox.dispatcher()
        await workers.start()
        await dispatcher.start()

        for number, fail in ((1, True), (2, False)):
            await in_transaction(
                ledger,
                lambda session, number=number: outbox.enqueue(
                    session,
                    integration_type="webhook:partnerX",
                    event_type="order.paid.v1",
                    payload={"orderId": number},
                    tenant_id="acme",
                    correlation_id=f"c-{number}",
                ),
                fail=fail,
            )
        await until_settled(ledger, 1)
        await dispatcher.close()
        await workers.close()

    assert [request.headers["x-correlation-id"] for request in receiver.requests] == ["c-2"]
    assert receiver.requests[0].headers["x-tenant-id"] == "acme"


async def test_a_job_exists_if_and_only_if_the_transaction_committed(
    ledger: Ledger, make_outbox: MakeOutbox, connection: Connection, queue_name: str
) -> None:
    outbox = make_outbox({JOBS: QueueChannel(connection)})
    dispatcher = outbox.dispatcher()
    await dispatcher.start()
    done: asyncio.Queue[Job] = asyncio.Queue()

    async with Worker(queue_name, done.put, connection=connection):
        for order, fail in ((1, True), (2, False)):
            stored = await in_transaction(
                ledger,
                lambda session, order=order: outbox.add_in_transaction(
                    session, queue_name, "receipt", {"order": order}, attempts=5, backoff=Backoff.fixed(10)
                ),
                fail=fail,
            )
        job = await asyncio.wait_for(done.get(), 10)
    await until_settled(ledger, 1)
    await dispatcher.close()

    assert (job.id, job.name, job.data) == (stored.id, "receipt", {"order": 2})
    assert job.opts.attempts == 5
    assert len(await rows(ledger)) == 1


@pytest.mark.requirement("O-4", "X-16", "X-17")
async def test_a_job_that_is_added_again_is_the_same_job(
    ledger: Ledger, make_outbox: MakeOutbox, connection: Connection, queue_name: str
) -> None:
    """A dispatcher that dies between adding and marking adds again: same id, same idempotency key."""
    outbox = make_outbox({JOBS: QueueChannel(connection)})
    stored = await in_transaction(ledger, lambda session: outbox.add_in_transaction(session, queue_name, "x", {"a": 1}))
    keys = []

    async with Queue(queue_name, connection=connection) as queue:
        for _ in range(2):
            async with outbox.dispatcher() as dispatcher:
                await dispatcher.tick()
                await dispatcher.idle()
            job = await queue.get_job(str(stored.id))
            assert job is not None
            keys.append(job.idempotency_key)
            await queue.remove(job)
            if len(keys) == 1:
                await _unsend(ledger, str(stored.id))

    assert keys[0] == keys[1]


async def _unsend(ledger: Ledger, row_id: str) -> None:
    """As if the row had never been marked: written past the trigger that keeps SENT final."""
    table = ledger.database.table("integration_outbox")
    off, on = (
        "ALTER TABLE {} DISABLE TRIGGER outbox_sent_is_final",
        "ALTER TABLE {} ENABLE TRIGGER outbox_sent_is_final",
    )
    async with ledger.database.transaction() as open_connection:
        if ledger.database.is_postgres:
            await open_connection.exec_driver_sql(off.format(table))
        else:
            await open_connection.exec_driver_sql("DROP TRIGGER outbox_sent_is_final")
        await open_connection.exec_driver_sql(f"UPDATE {table} SET status = 'PENDING' WHERE id = '{row_id}'")
        if ledger.database.is_postgres:
            await open_connection.exec_driver_sql(on.format(table))


async def test_jobs_keep_their_options_on_the_way(
    ledger: Ledger, make_outbox: MakeOutbox, connection: Connection, queue_name: str
) -> None:
    outbox = make_outbox({JOBS: QueueChannel(connection)})
    async with Queue(queue_name, connection=connection) as queue:
        await in_transaction(
            ledger,
            lambda session: outbox.add_in_transaction(
                session,
                queue,
                "later",
                {"a": 1},
                job_id="my-job",
                delay=timedelta(hours=1),
                priority=3,
                remove_on_complete=KeepJobs(count=5, age_s=60),
                remove_on_fail=10,
                tenant_id="acme",
                ordering_key="k",
            ),
        )
        async with outbox.dispatcher() as dispatcher:
            await dispatcher.tick()
            await dispatcher.idle()

        job = await queue.get_job("my-job")
        assert job is not None
        assert await queue.state_of("my-job") is JobState.DELAYED
    assert (job.priority, job.opts.attempts, job.opts.remove_on_fail) == (3, 3, 10)
    assert job.opts.remove_on_complete == {"count": 5, "age": 60}
    assert 3_590_000 < job.delay <= 3_600_000
    (row,) = await rows(ledger)
    assert (row.integration_type, row.tenant_id, row.status) == (f"bullmq:{queue_name}", "acme", SENT)


@pytest.mark.parametrize(
    ("options", "option"),
    [({"attempts": 0}, "attempts"), ({"atempts": 3}, "atempts"), ({"job_id": "5"}, "job_id"), ({"delay": -1}, "delay")],
)
async def test_options_of_jobs_are_checked_before_anything_is_stored(
    ledger: Ledger, options: dict[str, Any], option: str
) -> None:
    """Afterwards nobody would be there to read the error."""
    with pytest.raises(InvalidOption, match=option):
        await in_transaction(ledger, lambda session: Outbox().add_in_transaction(session, "q", "n", **options))
    with pytest.raises(InvalidOption, match="queue"):
        await in_transaction(ledger, lambda session: Outbox().add_in_transaction(session, "a:b", "n"))

    assert await rows(ledger) == []


async def test_blocking_callers_have_the_same(sqlite_url: str, make_ledger: MakeLedger) -> None:
    import contextlib
    import sqlite3

    ledger, outbox = make_ledger(sqlite_url), Outbox()

    def business() -> None:
        with contextlib.closing(sqlite3.connect(sqlite_url.removeprefix("sqlite:///"))) as database, database:
            outbox.add_in_transaction_sync(database, "emails", "receipt", {"order": 1})
            outbox.enqueue_sync(database, integration_type="sms:x", event_type="e", payload=1)
            outbox.enqueue_many_sync(
                database,
                [OutboxItem(integration_type="sms:y", event_type="e", source_stream_id="s", source_event_id="1")],
            )

    await asyncio.to_thread(business)

    assert [row.integration_type for row in await rows(ledger)] == ["bullmq:emails", "sms:x", "sms:y"]


async def test_a_message_without_a_source_is_an_event_of_its_own(ledger: Ledger) -> None:
    outbox = Outbox()

    async def business(session: Any) -> list[Any]:
        return [await outbox.enqueue(session, integration_type="sms:x", event_type="e") for _ in range(2)]

    first, second = await in_transaction(ledger, business)

    assert first.created
    assert second.created
    with pytest.raises(InvalidOption, match="stream and event together"):
        await in_transaction(
            ledger, lambda session: outbox.enqueue(session, integration_type="s", event_type="e", source_event_id="1")
        )


@pytest.mark.requirement("O-61", "X-91")
async def test_a_dead_row_is_announced_in_a_queue(
    ledger: Ledger, make_outbox: MakeOutbox, connection: Connection
) -> None:
    spy = SpyChannel(Refused("400", "HTTP_400"))
    outbox = make_outbox({"sms:*": Route(channel=spy, strategy="direct"), JOBS: QueueChannel(connection)})
    stored = await in_transaction(
        ledger, lambda session: outbox.enqueue(session, integration_type="sms:x", event_type="e")
    )
    dispatcher = outbox.dispatcher()

    await dispatcher.start()
    await until_settled(ledger, 1)
    await dispatcher.close()

    async with Queue("outbox.dead", connection=connection) as queue:
        (announcement,) = await ledger.outbox.find(integration_type="bullmq:outbox.dead")
        job = await queue.get_job(announcement.id)
    assert job is not None
    assert (job.name, job.data["outboxId"], job.data["errorCode"]) == ("outbox.dead.v1", stored.id, "HTTP_400")


async def test_a_commit_on_postgres_wakes_the_dispatcher(
    postgres_url: str, make_ledger: MakeLedger, make_outbox: MakeOutbox
) -> None:
    """Nobody waits for the interval: it is longer than the time in which all must arrive."""
    ledger, spy = make_ledger(postgres_url), SpyChannel()
    outbox = make_outbox({"sms:*": Route(channel=spy, strategy="direct")}, ledger=ledger, tick_interval_ms=60_000)
    dispatcher = outbox.dispatcher()
    await dispatcher.start()
    engine = create_async_engine(ledger.database.url)
    for count in range(1, 6):
        async with AsyncSession(engine) as session, session.begin():
            await outbox.enqueue(session, integration_type="sms:x", event_type="e")
        await spy.until(count)
    await engine.dispose()
    await dispatcher.close()


async def test_what_only_stores_says_so(ledger: Ledger, make_outbox: MakeOutbox) -> None:
    with pytest.raises(NotConfigured, match="has no ledger"):
        Outbox().dispatcher()
    with pytest.raises(NotConfigured, match="Redis connection"):
        make_outbox({}).workers()


async def test_channels_without_a_route_are_queued_where_there_is_redis(
    ledger: Ledger, make_outbox: MakeOutbox, connection: Connection
) -> None:
    spy = SpyChannel()

    with_redis = make_outbox(
        {"sms:x": spy, "sms:y": Route(channel=spy, concurrency=3), JOBS: spy}, connection=connection
    )
    without = make_outbox({"sms:x": spy})
    await without.check()
    await without.aclose()

    resolved = [with_redis.router.resolve(name) for name in ("sms:x", "sms:y", "bullmq:q")]
    assert [route.strategy for route in resolved if route] == ["queued", "queued", "direct"]
    assert resolved[1] is not None
    assert resolved[1].concurrency == 3
    alone = without.router.resolve("sms:x")
    assert alone is not None
    assert alone.is_direct
    assert spy.closed


def queue_message(**changes: Any) -> Message:
    fields: dict[str, Any] = {
        "id": "0f9d4f3e-0000-4000-8000-000000000001",
        "integration_type": "bullmq:emails",
        "event_type": "receipt",
        "payload": {"order": 1},
        "idempotency_key": "k",
        "source_stream_id": "s",
        "source_event_id": "e",
        "created_ms": 1_893_456_000_000,
    }
    return Message(**{**fields, **changes})


async def test_the_queue_channel_answers_for_redis(start_server: StartServer) -> None:
    server = start_server()
    connection = Connection(server.url, connect_timeout_ms=5_000, command_timeout_ms=5_000)
    channel = QueueChannel(connection)

    first, again = await channel.send(queue_message()), await channel.send(queue_message())
    impossible = await channel.send(queue_message(headers={"jobOptions": {"job_id": "7"}}))
    level = {"jobOptions": {"job_id": "far", "durability": "replicated(1)"}}
    unsafe = await channel.send(queue_message(headers=level))  # the replica may come back, and the job is still owed
    healthy = await channel.check()
    server.stop()
    away, sick = await channel.send(queue_message()), await channel.check()
    await channel.aclose()
    await connection.aclose()

    assert isinstance(first, Accepted)
    assert isinstance(again, Accepted)
    assert "was there already" in again.detail
    assert isinstance(impossible, Refused)
    assert isinstance(unsafe, NotTried)
    assert "it has 0" in unsafe.reason
    assert isinstance(away, NotTried)
    assert (healthy.ok, sick.ok) == (True, False)


@pytest.mark.requirement("O-54")
async def test_a_job_knows_the_message_that_it_was(start_server: StartServer) -> None:
    """Its data stay the payload, so that Node and typed tasks see no change."""
    connection = Connection(start_server().url)
    channel, queue = QueueChannel(connection), Queue("emails", connection=connection)
    sent = queue_message(
        tenant_id="acme",
        user_id="u-1",
        correlation_id="c-1",
        headers={"region": "eu", "deep": {"a": [1]}, "jobOptions": {"attempts": 2}},
    )

    await channel.send(sent)
    bare = await queue.add("bare")
    job = await queue.get_job(sent.id)
    await channel.aclose()
    await queue.close()
    await connection.aclose()

    assert job is not None
    assert job.data == {"order": 1}
    assert job.opts.attempts == 2
    assert job.meta == JobMeta(
        tenant_id="acme",
        user_id="u-1",
        correlation_id="c-1",
        source_stream_id="s",
        source_event_id="e",
        headers={"region": "eu", "deep": {"a": [1]}},
    )
    assert json.loads(job.record.raw_opts)["bpmeta"] == {
        "tenantId": "acme",
        "userId": "u-1",
        "correlationId": "c-1",
        "sourceStreamId": "s",
        "sourceEventId": "e",
        "headers": {"region": "eu", "deep": {"a": [1]}},
    }
    assert job.log_fields()["correlationId"] == "c-1"
    assert bare.meta == JobMeta()
    assert "bpmeta" not in json.loads(bare.record.raw_opts)


async def test_the_tenant_of_a_job_is_that_of_its_row(start_server: StartServer) -> None:
    """Row-level security has checked the row; what stands in the options nobody has checked."""
    connection = Connection(start_server().url)
    channel, queue = QueueChannel(connection), Queue("emails", connection=connection)
    forged = {"jobOptions": {"meta": {"tenantId": "globex", "userId": "u-7"}}}
    sent, of_nobody = (queue_message(id=f"job-{tenant}", tenant_id=tenant, headers=forged) for tenant in ("acme", None))

    await channel.send(sent)
    await channel.send(of_nobody)
    jobs = [await queue.get_job(message.id) for message in (sent, of_nobody)]
    await channel.aclose()
    await queue.close()
    await connection.aclose()

    assert [job.meta.tenant_id for job in jobs if job is not None] == ["acme", "globex"]
    assert [job.meta.user_id for job in jobs if job is not None] == ["u-7", "u-7"]


def test_job_options_survive_the_detour_through_json() -> None:
    moment = datetime(2030, 1, 1, tzinfo=UTC)
    given = {
        "at": moment,
        "attempts": 5,
        "backoff": timedelta(seconds=2),
        "remove_on_complete": True,
        "remove_on_fail": KeepJobs(count=3),
        "lifo": None,
        "meta": JobMeta(tenant_id="acme", headers={"a": 1}),
    }

    back = options_from_json(options_to_json(given))

    assert back == {
        "at": moment,
        "attempts": 5,
        "backoff": Backoff.fixed(2_000),
        "remove_on_complete": True,
        "remove_on_fail": KeepJobs(count=3),
        "meta": JobMeta(tenant_id="acme", headers={"a": 1}),
    }
    assert options_from_json({"delay": 1_000}, waited_ms=400) == {"delay": 600}
    assert options_from_json({"delay": 1_000}, waited_ms=4_000) == {"delay": 0}


CLUSTER = "redis+cluster://127.0.0.1:7000"


@pytest.mark.requirement("X-97")
@pytest.mark.parametrize("part", ["dispatcher", "workers"])
async def test_queues_that_a_cluster_cannot_hold_are_refused_before_rows_are_claimed(
    sqlite_url: str, make_ledger: MakeLedger, part: str
) -> None:
    """Tags in the names of other queues do not help: the outbox names its own."""
    outbox = Outbox(make_ledger(sqlite_url), {"webhook:*": SpyChannel()}, connection=Connection(CLUSTER))

    with pytest.raises(InvalidOption, match=r'prefix="\{bull\}".*strategy="direct".*bull:outbox-webhook-any:'):
        getattr(outbox, part)()


@pytest.mark.requirement("X-97")
async def test_an_announcement_that_a_cluster_cannot_hold_is_refused_too(sqlite_url: str) -> None:
    """Else a dead row would be told nobody, and the announcement die as well."""
    connection = Connection(CLUSTER)
    jobs = {"bullmq:*": QueueChannel(connection)}
    async with Ledger(sqlite_url) as ledger:
        with pytest.raises(InvalidOption, match=r"\{outbox\}\.dead.*bull:outbox\.dead:"):
            Outbox(ledger, jobs, connection=connection).dispatcher()
        Outbox(ledger, jobs, connection=connection, prefix="{bull}").dispatcher()
    async with Ledger(sqlite_url, dead_letter_type="bullmq:{outbox}.dead") as ledger:
        Outbox(ledger, jobs, connection=connection).dispatcher()
    await connection.aclose()
