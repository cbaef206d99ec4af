"""The queued strategy: one minimal job per row, and the row stays the truth."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from bullpen._kernel import telemetry
from bullpen._kernel.backoff import Backoff
from bullpen.errors import DatabaseUnavailable
from bullpen.ledger import Ledger, OutboxStatus
from bullpen.outbox import Outbox, Route, queue_name
from bullpen.outbox.queues import OutboxQueues, job_data
from bullpen.ports.channel import Accepted, Refused, Unavailable
from bullpen.queue import JobState, Queue, RateLimit
from bullpen.redis import Connection
from bullpen.redis.acl import acl_rule
from bullpen.testing import RedisServer
from bullpen.worker import Worker
from tests.conftest import StartServer
from tests.contracts.outbox_repository import execute
from tests.databases import ROLES, MakeLedger, item
from tests.outbox.conftest import MakeOutbox
from tests.outbox.forked import Forked
from tests.outbox.kit import SpyChannel, Told, rows, statuses, until_settled

PENDING, CLAIMED, SENT, FAILED, DEAD = OutboxStatus
QUEUE = "outbox-webhook-partnerX"


async def dispatch(outbox: Outbox) -> None:
    async with outbox.dispatcher() as dispatcher:
        while await dispatcher.tick():
            pass
        await dispatcher.idle()


def fields(server: RedisServer, key: str) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in server.client().hgetall(key).items()}  # type: ignore[union-attr]


@pytest.mark.requirement("O-40", "O-44", "O-45", "O-46", "O-47", "X-4")
async def test_a_row_becomes_one_minimal_job(
    ledger: Ledger, make_outbox: MakeOutbox, connection: Connection, redis_server: RedisServer
) -> None:
    stored = await ledger.outbox.enqueue(item(tenant_id="acme", correlation_id="c-1", headers={"a": "b"}))

    await dispatch(make_outbox({"webhook:*": Route()}, connection=connection))

    job = fields(redis_server, f"bull:{QUEUE}:{stored.id}")
    options = json.loads(job["opts"])
    assert job["name"] == "order.paid.v1"
    assert json.loads(job["data"]) == {
        "outboxId": stored.id,
        "eventType": "order.paid.v1",
        "payload": {"orderId": 1},
        "headers": {"a": "b", "idempotencyKey": "event-1/webhook:partnerX"},
        "tenantId": "acme",
        "correlationId": "c-1",
        "sourceEventId": "event-1",
    }
    assert (options["jobId"], options["attempts"]) == (stored.id, 1)
    assert (options["removeOnComplete"], options["removeOnFail"]) == (True, False)
    assert await statuses(ledger) == [CLAIMED]


@pytest.mark.requirement("O-47", "O-54", "O-83")
async def test_a_worker_delivers_and_marks_the_row(
    ledger: Ledger, make_outbox: MakeOutbox, connection: Connection
) -> None:
    spy = SpyChannel()
    await ledger.outbox.enqueue_many([item(number) for number in range(25)])
    outbox = make_outbox({"webhook:partnerX": spy}, connection=connection)
    workers, dispatcher = outbox.workers(), outbox.dispatcher()

    await workers.start()
    await dispatcher.start()
    await until_settled(ledger, 25)
    await dispatcher.close()
    await workers.close()

    assert sorted(spy.numbers) == list(range(25))
    assert workers.queues == [QUEUE]
    async with Queue(QUEUE, connection=connection) as queue:
        counts = await queue.counts()
    assert (counts.pending, counts.failed, counts.completed) == (0, 0, 0)


@pytest.mark.requirement("O-55", "X-4")
async def test_a_failure_stays_in_the_row_and_does_not_reach_the_queue(
    ledger: Ledger, make_outbox: MakeOutbox, connection: Connection
) -> None:
    spy = SpyChannel(Unavailable("503", "HTTP_503"), Refused("400", "HTTP_400"))
    await ledger.outbox.enqueue(item(backoff=Backoff.fixed(1)))
    outbox = make_outbox({"webhook:*": spy}, connection=connection, tick_interval_ms=20)
    workers, dispatcher = outbox.workers(discover_ms=50), outbox.dispatcher()

    await workers.start()
    await dispatcher.start()
    await until_settled(ledger, 1, DEAD)
    await dispatcher.close()
    await workers.close()

    assert [message.attempt for message in spy.messages] == [1, 2]
    async with Queue(QUEUE, connection=connection) as queue:
        assert (await queue.counts()).failed == 0


@pytest.mark.requirement("X-78")
async def test_a_kept_failure_does_not_block_its_row(
    ledger: Ledger, make_outbox: MakeOutbox, connection: Connection
) -> None:
    """A foreign worker that fails the job leaves it in the failed set, under the id of the row."""
    stored = await ledger.outbox.enqueue(item())
    outbox = make_outbox({"webhook:*": Route()}, connection=connection, lease_ms=1_000)
    await dispatch(outbox)

    async def fail(job: Any) -> None:
        raise RuntimeError("a worker of somebody else")

    failed = asyncio.Event()
    worker = Worker(QUEUE, fail, connection=connection)
    worker.on("failed", lambda job, reason: failed.set())
    await worker.start()
    await asyncio.wait_for(failed.wait(), 10)
    await worker.close()
    ledger.database.clock_offset_ms = 2_000
    async with outbox.dispatcher() as dispatcher:
        await dispatcher.reap()
    await dispatch(outbox)

    async with Queue(QUEUE, connection=connection) as queue:
        assert await queue.state_of(str(stored.id)) is JobState.WAITING
    assert await statuses(ledger) == [CLAIMED]


async def test_a_job_that_still_waits_is_not_doubled(
    ledger: Ledger, make_outbox: MakeOutbox, connection: Connection
) -> None:
    await ledger.outbox.enqueue(item())
    outbox = make_outbox({"webhook:*": Route()}, connection=connection, lease_ms=1_000)
    await dispatch(outbox)
    ledger.database.clock_offset_ms = 2_000

    async with outbox.dispatcher() as dispatcher:
        await dispatcher.reap()
    await dispatch(outbox)

    async with Queue(QUEUE, connection=connection) as queue:
        assert (await queue.counts()).waiting == 1
    (row,) = await rows(ledger)
    assert (row.status, row.attempts) == (CLAIMED, 0)


async def test_a_row_whose_job_is_running_is_looked_at_again_soon(
    ledger: Ledger, make_outbox: MakeOutbox, connection: Connection
) -> None:
    """The running job may have just ended the last delivery; then nobody else would ever come back to the row."""
    await ledger.outbox.enqueue(item())
    outbox = make_outbox({"webhook:*": Route()}, connection=connection, lease_ms=60_000)
    await dispatch(outbox)
    (row,) = await rows(ledger)
    started, release = asyncio.Event(), asyncio.Event()

    async def slow(job: Any) -> None:
        started.set()
        await release.wait()

    worker = Worker(QUEUE, slow, connection=connection)
    await worker.start()
    await asyncio.wait_for(started.wait(), 10)
    await ledger.outbox.release(row)
    await dispatch(outbox)
    ledger.database.clock_offset_ms = 6_000
    expired = await ledger.outbox.expired()
    release.set()
    await worker.close()

    assert [each.id for each in expired] == [row.id]


@pytest.mark.requirement("X-37")
async def test_a_job_of_an_unknown_row_fails_at_once(
    ledger: Ledger, make_outbox: MakeOutbox, connection: Connection
) -> None:
    spy = SpyChannel()
    outbox = make_outbox({"webhook:partnerX": spy}, connection=connection)
    workers = outbox.workers()
    await workers.start()
    async with Queue(QUEUE, connection=connection) as queue:
        unknown = await queue.add("x", {"outboxId": "00000000-0000-4000-8000-000000000000"}, attempts=5)
        nameless = await queue.add("x", {"something": "else"}, attempts=5)
        for job in (unknown, nameless):
            with pytest.raises(Exception, match=r"does not exist|names no outbox row"):
                await job.result(timeout=10_000)

    await workers.close()

    assert spy.messages == []


@pytest.mark.requirement("X-16", "X-76")
async def test_a_job_that_comes_too_late_delivers_nothing(
    ledger: Ledger, make_outbox: MakeOutbox, connection: Connection
) -> None:
    spy = SpyChannel()
    await ledger.outbox.enqueue_many([item(1), item(2)])
    sent, released = await ledger.outbox.claim_due_batch("somebody")
    await ledger.outbox.mark_sent(sent)
    await ledger.outbox.release(released, delay_ms=600_000)
    workers = make_outbox({"webhook:partnerX": spy}, connection=connection).workers()
    await workers.start()

    async with Queue(QUEUE, connection=connection) as queue:
        answers = [
            await (await queue.add("late", job_data(row), job_id=row.id)).result(timeout=10_000)
            for row in (sent, released)
        ]
    await workers.close()

    assert answers == [{"outcome": "SKIPPED_SENT"}, {"outcome": "SKIPPED_PENDING"}]
    assert spy.messages == []


@pytest.mark.requirement("X-80", "O-48")
async def test_redis_being_away_costs_no_attempt(
    ledger: Ledger, make_outbox: MakeOutbox, start_server: StartServer, told: Told
) -> None:
    server = start_server()
    away = Connection(server.url, connect_timeout_ms=2_000, command_timeout_ms=2_000)
    spy = SpyChannel()
    outbox = make_outbox({"webhook:partnerX": spy}, connection=away, tick_interval_ms=50)
    dispatcher, workers = outbox.dispatcher(), outbox.workers()
    await dispatcher.start()
    server.stop()

    await ledger.outbox.enqueue_many([item(number) for number in range(5)])
    await asyncio.sleep(1.0)  # several ticks pass while nobody takes jobs
    during = await rows(ledger)
    server.restart()
    await workers.start()
    await until_settled(ledger, 5)
    await dispatcher.close()
    await workers.close()
    await outbox.aclose()
    await away.aclose()

    assert {row.attempts for row in during} == {0}
    assert {row.attempts for row in await rows(ledger)} == {0}
    assert sorted(spy.numbers) == list(range(5))


async def test_a_full_queue_is_not_filled_further(
    ledger: Ledger, make_outbox: MakeOutbox, connection: Connection
) -> None:
    await ledger.outbox.enqueue_many([item(number) for number in range(60)])
    outbox = make_outbox({"webhook:*": Route(max_queued=20)}, connection=connection, claim_batch_size=20)

    await dispatch(outbox)
    await dispatch(outbox)

    async with Queue(QUEUE, connection=connection) as queue:
        assert (await queue.counts()).waiting == 20
    assert (await statuses(ledger)).count(PENDING) == 40


@pytest.mark.requirement("O-72", "O-73")
async def test_tenants_may_have_queues_and_limits_of_their_own(
    ledger: Ledger, make_outbox: MakeOutbox, connection: Connection
) -> None:
    spy = SpyChannel()
    limited = Route(channel=spy, split_tenants=True, rate_limit=RateLimit(max=100, duration_ms=1_000))
    await ledger.outbox.enqueue_many([item(1, tenant_id="acme"), item(2, tenant_id="a-b"), item(3)])
    outbox = make_outbox({"webhook:partnerX": limited}, connection=connection)
    await dispatch(outbox)

    workers = outbox.workers(discover_ms=50)
    await workers.start()
    await until_settled(ledger, 3)
    await workers.close()

    assert sorted(spy.numbers) == [1, 2, 3]
    assert workers.queues == [QUEUE, f"{QUEUE}-a%2Db", f"{QUEUE}-acme"]
    assert queue_name("webhook:partnerX", "acme") == f"{QUEUE}-acme"


class AwayStore:
    """The store behind a database that is away for a while."""

    def __init__(self, store: Any) -> None:
        self._store, self.away = store, True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def begin(self, *arguments: Any, **options: Any) -> Any:
        if self.away:
            raise DatabaseUnavailable("the database does not answer")
        return await self._store.begin(*arguments, **options)


async def test_a_job_waits_for_the_database(ledger: Ledger, make_outbox: MakeOutbox, connection: Connection) -> None:
    """The job is not failed: it names a row that is still to be delivered."""
    spy = SpyChannel()
    stored = await ledger.outbox.enqueue(item())
    store = AwayStore(ledger.outbox)
    ledger.outbox = store  # type: ignore[assignment]  # stands for the same store
    outbox = make_outbox({"webhook:partnerX": spy}, connection=connection)
    await dispatch(outbox)
    workers = outbox.workers()
    await workers.start()

    async with Queue(QUEUE, connection=connection) as queue:
        async with asyncio.timeout(10):
            while await queue.state_of(str(stored.id)) is not JobState.DELAYED:  # noqa: ASYNC110 - Redis tells nobody
                await asyncio.sleep(0.01)
        store.away = False
        await queue.promote(str(stored.id))
        await until_settled(ledger, 1)
    await workers.close()

    assert len(spy.messages) == 1


@pytest.mark.requirement("X-23")
async def test_workers_with_the_worker_role_deliver_only_what_the_job_names(
    postgres_server: Any,
    guarded_database: str,
    make_ledger: MakeLedger,
    make_outbox: MakeOutbox,
    connection: Connection,
) -> None:
    """A job that claims another tenant's row finds nothing: row-level security is asked, not the job."""
    service = make_ledger(postgres_server.url(guarded_database, role=ROLES.service), roles=ROLES)
    worker = make_ledger(postgres_server.url(guarded_database, role=ROLES.worker), roles=ROLES, duty="worker")
    await service.outbox.enqueue_many([item(1, tenant_id="alice"), item(2, tenant_id="bob")])
    spy = SpyChannel()
    dispatching = make_outbox({"webhook:*": Route()}, ledger=service, connection=connection)
    delivering = make_outbox({"webhook:partnerX": spy}, ledger=worker, connection=connection)
    await dispatch(dispatching)
    alice = next(row for row in await rows(service) if row.tenant_id == "alice")
    async with Queue(QUEUE, connection=connection) as queue:
        await queue.remove(alice.id)
        forged = await queue.add("forged", {**job_data(alice), "tenantId": "bob"}, attempts=1)
        workers = delivering.workers()
        await workers.start()
        with pytest.raises(Exception, match="its tenant differs"):
            await forged.result(timeout=10_000)
    await until_settled(service, 1)
    await workers.close()

    assert [message.tenant_id for message in spy.messages] == ["bob"]


@pytest.mark.requirement("O-48")
async def test_a_row_that_no_queue_can_take_is_dead(
    ledger: Ledger, make_outbox: MakeOutbox, connection: Connection
) -> None:
    """A row of a foreign writer, whose name no job may have: trying again for ever would only hide it."""
    await execute(
        ledger,
        "INSERT INTO {outbox} (source_stream_id, source_event_id, route_key, integration_type, event_type, payload) "
        "VALUES ('s', 'e', 'r', 'webhook:partnerX', '', '{{}}')",
    )

    await dispatch(make_outbox({"webhook:*": Route()}, connection=connection))

    (row, *_) = await rows(ledger)
    assert (row.status, row.attempts, row.error_code) == (DEAD, 0, "UNQUEUABLE")


@pytest.mark.requirement("O-48", "X-88")
async def test_a_row_whose_target_has_no_name_harms_only_itself(
    ledger: Ledger, make_outbox: MakeOutbox, connection: Connection
) -> None:
    """Of a foreign writer. No queue can be named after it, and the other rows of the batch must not pay for that."""
    await execute(
        ledger,
        "INSERT INTO {outbox} (source_stream_id, source_event_id, route_key, integration_type, event_type, payload) "
        "VALUES ('s', 'e', 'r', 'webhook:', 'x', '{{}}')",
    )
    await ledger.outbox.enqueue(item(1))

    await dispatch(make_outbox({"webhook:*": Route()}, connection=connection))

    bad, good, *_ = await rows(ledger)
    assert (bad.status, bad.error_code) == (DEAD, "UNKNOWN_INTEGRATION_TYPE")
    assert good.status is CLAIMED


@pytest.mark.requirement("O-48", "X-88")
@pytest.mark.parametrize("strategy", ["direct", "queued"])
async def test_a_row_that_is_no_message_harms_only_itself(
    ledger: Ledger, make_outbox: MakeOutbox, connection: Connection, strategy: Any
) -> None:
    """Of a foreign writer: its headers are no object, and on SQLite even its pauses are not JSON."""
    await ledger.outbox.enqueue(item(1))
    await execute(
        ledger,
        "INSERT INTO {outbox} (source_stream_id, source_event_id, route_key, integration_type, event_type, payload, "
        "headers, backoff) VALUES ('s', 'e', 'r', 'webhook:partnerX', 'x', '{{}}', '[1]', '{broken}')".replace(
            "{broken}", "1" if ledger.database.is_postgres else "oops"
        ),
    )
    spy = SpyChannel()
    outbox = make_outbox({"webhook:*": Route(channel=spy, strategy=strategy)}, connection=connection)
    workers = outbox.workers()
    await workers.start()

    await dispatch(outbox)
    await until_settled(ledger, 1)
    await workers.close()

    good, bad, *_ = await rows(ledger)
    assert good.status is SENT
    code = "UNREADABLE" if strategy == "direct" else "UNQUEUABLE"
    assert (bad.status, bad.attempts, bad.error_code) == (DEAD, 0, code)


@pytest.mark.requirement("X-76")
async def test_pauses_that_cannot_be_read_do_not_keep_a_lost_row_from_coming_back(
    sqlite_url: str, make_ledger: MakeLedger
) -> None:
    ledger = make_ledger(sqlite_url)
    await execute(
        ledger,
        "INSERT INTO {outbox} (source_stream_id, source_event_id, route_key, integration_type, event_type, payload, "
        "backoff) VALUES ('s', 'e', 'r', 'webhook:partnerX', 'x', '{{}}', 'oops')",
    )
    await ledger.outbox.claim_due_batch("dead", 1, lease_ms=1_000, starting=True)
    ledger.database.clock_offset_ms = 2_000

    async with Outbox(ledger, {"webhook:*": Route(channel=SpyChannel())}).dispatcher() as dispatcher:
        await dispatcher.reap()

    assert await statuses(ledger) == [FAILED]


async def test_workers_beside_the_dispatcher_find_a_new_queue_at_once(
    ledger: Ledger, make_outbox: MakeOutbox, connection: Connection
) -> None:
    """Otherwise the first message of a type that only a pattern names would wait for the next look."""
    spy = SpyChannel()
    outbox = make_outbox({"webhook:*": Route(channel=spy)}, connection=connection)
    workers = outbox.workers(discover_ms=600_000)
    await workers.start()
    await ledger.outbox.enqueue(item())

    await dispatch(outbox)
    await until_settled(ledger, 1)
    await workers.close()

    assert workers.queues == [QUEUE]


async def test_a_queue_that_was_announced_before_and_filled_after_the_workers_began_is_served_at_once(
    sqlite_url: str, make_ledger: MakeLedger, make_outbox: MakeOutbox, connection: Connection
) -> None:
    """Between the two it has no key that a look could find, and the announcement is over."""
    ledger, spy = make_ledger(sqlite_url), SpyChannel()
    outbox = make_outbox({"webhook:*": Route(channel=spy)}, connection=connection, ledger=ledger)
    queues = OutboxQueues(connection)
    await queues.place(QUEUE, [])

    workers = outbox.workers(discover_ms=600_000)
    await workers.start()
    async with asyncio.timeout(20):
        while workers.queues != [QUEUE]:  # noqa: ASYNC110 - they tell nobody
            await asyncio.sleep(0.01)
    await ledger.outbox.enqueue(item())
    await dispatch(outbox)
    await until_settled(ledger, 1)
    await workers.close()
    await queues.aclose()

    assert len(spy.messages) == 1


async def test_workers_serve_a_new_queue_of_a_dispatcher_in_another_process_at_once(
    ledger: Ledger, ledger_url: str, make_outbox: MakeOutbox, connection: Connection, redis_url: str, tmp_path: Path
) -> None:
    """Only Redis is between them: the dispatcher announces the queue there before it fills it."""
    spy = SpyChannel()
    outbox = make_outbox({"file:*": Route(channel=spy)}, connection=connection)
    workers = outbox.workers(discover_ms=600_000)
    await workers.start()
    order = {"role": "dispatcher", "database": ledger_url, "redis": redis_url, "strategy": "queued"}
    process = Forked({**order, "target": str(tmp_path / "unused"), "delay_s": 0, "lease_ms": 60_000})
    try:
        await asyncio.to_thread(process.until_ready)

        await ledger.outbox.enqueue_many([item(1, integration_type="file:a"), item(2, integration_type="file:b")])
        await until_settled(ledger, 2)
    finally:
        process.close()
        await workers.close()

    assert workers.queues == ["outbox-file-a", "outbox-file-b"]


@pytest.mark.cuts_wakeups
async def test_a_queue_that_was_not_announced_is_found_and_counted(
    sqlite_url: str, make_ledger: MakeLedger, make_outbox: MakeOutbox, connection: Connection
) -> None:
    ledger, spy, before = make_ledger(sqlite_url), SpyChannel(), telemetry.late_wakeups().get("deliveries", 0)
    outbox = make_outbox({"webhook:*": Route(channel=spy)}, connection=connection, ledger=ledger)
    workers = outbox.workers(discover_ms=100)
    await workers.start()
    # Nothing counts before the workers listen, and only an announced queue shows that they do.
    await ledger.outbox.enqueue(item(0, integration_type="webhook:announced"))
    await dispatch(outbox)
    await spy.until(1)

    row = await ledger.outbox.enqueue(item(1))
    async with Queue(QUEUE, connection=connection) as queue:
        await queue.add("order.paid.v1", {"outboxId": row.id}, job_id=row.id)
    async with asyncio.timeout(20):
        while telemetry.late_wakeups().get("deliveries", 0) == before:  # noqa: ASYNC110 - a counter tells nobody
            await asyncio.sleep(0.02)
    await workers.close()

    assert workers.queues == ["outbox-webhook-announced", QUEUE]


@pytest.mark.cuts_wakeups
async def test_an_outbox_that_may_announce_nothing_delivers_all_the_same(
    sqlite_url: str, make_ledger: MakeLedger, make_outbox: MakeOutbox, redis_server: RedisServer
) -> None:
    """A Redis user with the rights of one queue: its jobs are added and found, only later."""
    ledger, spy = make_ledger(sqlite_url), SpyChannel()
    redis_server.command("ACL", "SETUSER", "narrow", "reset", "on", ">pw", *acl_rule(queues=[QUEUE]).split())
    narrow = Connection(redis_server.url.replace("redis://", "redis://narrow:pw@"))
    try:
        outbox = make_outbox({"webhook:*": Route(channel=spy)}, connection=narrow, ledger=ledger)
        workers = outbox.workers(discover_ms=100)
        await workers.start()
        await ledger.outbox.enqueue(item(1))
        await dispatch(outbox)
        await until_settled(ledger, 1)
        await workers.close()
    finally:
        await narrow.aclose()
        redis_server.command("ACL", "DELUSER", "narrow")

    assert workers.queues == [QUEUE]


@pytest.mark.requirement("X-76", "O-4")
async def test_a_queue_longer_than_the_lease_is_worked_off(
    ledger: Ledger, make_outbox: MakeOutbox, connection: Connection
) -> None:
    """All claims have run out and all rows have come back when the first worker starts: their jobs deliver them."""
    spy, count = SpyChannel(), 60
    await ledger.outbox.enqueue_many([item(number) for number in range(count)])
    outbox = make_outbox({"webhook:partnerX": spy}, connection=connection, lease_ms=100, claim_batch_size=count)
    async with outbox.dispatcher() as dispatcher:
        await dispatcher.tick()
        await dispatcher.idle()
        await asyncio.sleep(0.15)  # the lease
        while await dispatcher.reap():
            pass

    workers = outbox.workers(lease_ms=30_000)
    await workers.start()
    sent = await until_settled(ledger, count)
    await workers.close()

    assert len(sent) == count
    assert sorted(spy.numbers) == list(range(count))


@pytest.mark.parametrize("data", [{}, {"payload": {"orderId": 666}, "headers": {}, "sourceEventId": "of another"}])
async def test_a_job_that_does_not_say_what_its_row_holds_is_not_believed(
    ledger: Ledger, make_outbox: MakeOutbox, connection: Connection, data: dict[str, Any]
) -> None:
    """What is in a queue may be of another program, or of an older one that only named the row."""
    spy = SpyChannel()
    stored = await ledger.outbox.enqueue(item(1, headers={"x": "y"}))
    outbox = make_outbox({"webhook:partnerX": spy}, connection=connection)
    (row,) = await ledger.outbox.claim_due_batch("dispatcher")
    async with Queue(QUEUE, connection=connection) as queue:
        await queue.add("x", {"outboxId": stored.id, **data}, job_id=row.id)
    workers = outbox.workers()
    await workers.start()
    await until_settled(ledger, 1)
    await workers.close()

    (message,) = spy.messages
    assert message.payload == {"orderId": 1}
    assert message.headers["x"] == "y"


async def test_one_job_delivers_what_follows_under_its_ordering_key(
    ledger: Ledger, make_outbox: MakeOutbox, connection: Connection
) -> None:
    """The next row is taken with the outcome of the one before it: no second job, no look in between."""
    spy = SpyChannel(Accepted(), Refused("no", "NO"))
    await ledger.outbox.enqueue_many([item(number, ordering_key="k", tenant_id="a") for number in range(5)])
    outbox = make_outbox({"webhook:partnerX": spy}, connection=connection)
    async with outbox.dispatcher() as dispatcher:
        await dispatcher.tick()
        await dispatcher.idle()
    workers = outbox.workers()
    await workers.start()
    await until_settled(ledger, 4)
    await workers.close()

    assert spy.numbers == [0, 1, 2, 3, 4]
    assert spy.most_running == 1
    assert [attempt.outcome for row in await rows(ledger) for attempt in await ledger.outbox.attempts_of(row.id)] == [
        *("SENT", "DEAD", "SENT", "SENT", "SENT")
    ]


async def test_a_full_queue_is_filled_again_while_it_is_worked_on(
    ledger: Ledger, make_outbox: MakeOutbox, connection: Connection
) -> None:
    """Workers tell nobody that they took jobs; the dispatcher does not wait for its interval either."""
    spy = SpyChannel()
    await ledger.outbox.enqueue_many([item(number) for number in range(60)])
    routes = {"webhook:partnerX": Route(channel=spy, max_queued=10)}
    outbox = make_outbox(routes, connection=connection, claim_batch_size=10, tick_interval_ms=3_600_000)
    dispatcher, workers = outbox.dispatcher(), outbox.workers()
    await dispatcher.start()
    await workers.start()
    await until_settled(ledger, 60)
    await dispatcher.close()
    await workers.close()

    assert sorted(spy.numbers) == list(range(60))
