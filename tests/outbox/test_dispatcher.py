"""Rows that are due leave, each once, whoever else works and whatever breaks."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from typing import Any

import pytest

from bullpen._kernel import telemetry
from bullpen._kernel.backoff import Backoff
from bullpen._kernel.lifecycle import AlreadyStopped
from bullpen.errors import DatabaseUnavailable, InvalidOption
from bullpen.ledger import Ledger, OutboxStatus, Sent
from bullpen.outbox import Outbox, Route
from bullpen.outbox.delivery import OutboxDeliveries
from bullpen.plugins.channels.webhook import Webhook
from bullpen.ports.channel import Accepted, NotTried, Refused, Unavailable
from bullpen.redis import Connection
from bullpen.testing.receivers import Answer, HttpReceiver
from tests.conftest import StartServer
from tests.databases import MakeLedger, item
from tests.outbox.conftest import MakeOutbox
from tests.outbox.kit import SpyChannel, Told, rows, statuses

PENDING, CLAIMED, SENT, FAILED, DEAD = OutboxStatus


def direct(channel: SpyChannel, **options: Any) -> Route:
    return Route(channel=channel, strategy="direct", **options)


async def drain(dispatcher: Any) -> None:
    while await dispatcher.tick():
        await dispatcher.idle()
    await dispatcher.idle()


@pytest.mark.requirement("O-39", "O-43", "O-54")
async def test_a_tick_delivers_what_is_due(ledger: Ledger, make_outbox: MakeOutbox) -> None:
    spy = SpyChannel()
    await ledger.outbox.enqueue_many([item(1, tenant_id="acme", correlation_id="c-1"), item(2, delay=60_000)])

    async with make_outbox({"webhook:partnerX": direct(spy)}).dispatcher() as dispatcher:
        await drain(dispatcher)

    assert spy.numbers == [1]
    assert (spy.messages[0].tenant_id, spy.messages[0].correlation_id) == ("acme", "c-1")
    assert await statuses(ledger) == [SENT, PENDING]


@pytest.mark.requirement("O-84", "O-50", "X-77")
async def test_failures_are_tried_again_until_the_row_is_dead(ledger: Ledger, make_outbox: MakeOutbox) -> None:
    spy = SpyChannel(default=Unavailable("503", "HTTP_503"))
    await ledger.outbox.enqueue(item(max_attempts=3, backoff=Backoff.fixed(1_000)))

    async with make_outbox({"webhook:*": direct(spy)}).dispatcher() as dispatcher:
        for attempt in range(5):
            ledger.database.clock_offset_ms = attempt * 2_000
            await drain(dispatcher)

    dead, announcement = await rows(ledger)
    assert [message.attempt for message in spy.messages] == [1, 2, 3]
    assert (dead.status, dead.attempts, dead.error_code) == (DEAD, 3, "HTTP_503")
    assert announcement.integration_type == "bullmq:outbox.dead"


@pytest.mark.requirement("O-52")
async def test_a_refusal_ends_it_at_once(ledger: Ledger, make_outbox: MakeOutbox) -> None:
    spy = SpyChannel(Refused("400", "HTTP_400"))
    await ledger.outbox.enqueue(item())

    async with make_outbox({"webhook:*": direct(spy)}).dispatcher() as dispatcher:
        await drain(dispatcher)

    assert (await rows(ledger))[0].status is DEAD
    assert len(spy.messages) == 1


async def test_a_channel_that_was_not_able_to_try_costs_no_attempt(ledger: Ledger, make_outbox: MakeOutbox) -> None:
    spy = SpyChannel(NotTried("redis away", 1_000))
    await ledger.outbox.enqueue(item())

    async with make_outbox({"webhook:*": direct(spy)}).dispatcher() as dispatcher:
        await drain(dispatcher)

    (row,) = await rows(ledger)
    assert (row.status, row.attempts, row.last_error) == (PENDING, 0, "redis away")


async def test_a_channel_that_raises_or_hangs_counts_as_unavailable(ledger: Ledger, make_outbox: MakeOutbox) -> None:
    raising, hanging = SpyChannel(RuntimeError("bug")), SpyChannel()
    hanging.gate.clear()
    await ledger.outbox.enqueue_many([item(1, integration_type="sms:a"), item(2, integration_type="sms:b")])
    outbox = make_outbox({"sms:a": direct(raising), "sms:b": direct(hanging, timeout_ms=50)})

    async with outbox.dispatcher() as dispatcher:
        await drain(dispatcher)

    assert [(row.status, row.error_code) for row in await rows(ledger)] == [
        (FAILED, "CHANNEL_ERROR"),
        (FAILED, "TIMEOUT"),
    ]


class UntellableError(Exception):
    def __str__(self) -> str:
        return str(1 / 0)


@pytest.mark.requirement("O-52")
@pytest.mark.parametrize(
    ("answer", "status", "code"),
    [
        (Refused("no\0 \ud800", "C" * 500), DEAD, "C" * 60),
        (Refused(7, None), DEAD, "CHANNEL_ERROR"),  # type: ignore[arg-type]  # a channel of the user's own
        (Accepted("id \0 \ud800"), SENT, None),
        (Accepted({"id": 7}), SENT, None),  # type: ignore[arg-type]  # as above
        (Unavailable("\ud800", "429\0", after_ms=float("inf")), FAILED, "429"),  # type: ignore[arg-type]  # as above
        (RuntimeError("\0 \ud800"), FAILED, "CHANNEL_ERROR"),
        (UntellableError(), FAILED, "CHANNEL_ERROR"),
        ({"id": 7}, FAILED, "CHANNEL_ERROR"),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_an_odd_answer_is_written_down_and_harms_no_other_row(
    ledger: Ledger, make_outbox: MakeOutbox, answer: Any, status: OutboxStatus, code: str | None
) -> None:
    """What could not be written left the row to the next delivery: the target got it again and again."""
    odd, plain = SpyChannel(default=answer), SpyChannel()
    await ledger.outbox.enqueue_many([item(number, integration_type=f"sms:{number % 2}") for number in range(4)])

    async with make_outbox({"sms:0": direct(odd), "sms:1": direct(plain)}).dispatcher() as dispatcher:
        await drain(dispatcher)

    found = {row.integration_type: row for row in await rows(ledger) if row.integration_type.startswith("sms")}
    assert (found["sms:0"].status, found["sms:0"].error_code) == (status, code)
    assert found["sms:1"].status is SENT
    assert len(odd.messages) == len(plain.messages) == 2


@pytest.mark.requirement("X-85")
async def test_a_type_that_nobody_serves_is_dead_with_a_clear_code(ledger: Ledger, make_outbox: MakeOutbox) -> None:
    await ledger.outbox.enqueue(item(integration_type="pigeon:post"))

    async with make_outbox({}).dispatcher() as dispatcher:
        await dispatcher.tick()
        await dispatcher.idle()

    row = (await rows(ledger))[0]
    assert (row.status, row.attempts, row.error_code) == (DEAD, 0, "UNKNOWN_INTEGRATION_TYPE")
    spy = SpyChannel()
    await ledger.outbox.redrive([row.id], by="ada")
    async with make_outbox({"pigeon:*": direct(spy)}, unknown_types="leave").dispatcher() as dispatcher:
        await drain(dispatcher)
    assert len(spy.messages) == 1


async def test_a_type_may_be_left_to_other_processes(ledger: Ledger, make_outbox: MakeOutbox) -> None:
    await ledger.outbox.enqueue(item())

    async with make_outbox({}, unknown_types="leave").dispatcher() as dispatcher:
        await drain(dispatcher)

    assert await statuses(ledger) == [PENDING]


@pytest.mark.requirement("X-88", "O-77")
async def test_a_channel_that_hangs_holds_up_nobody_else(ledger: Ledger, make_outbox: MakeOutbox) -> None:
    slow, quick = SpyChannel(), SpyChannel()
    slow.gate.clear()
    await ledger.outbox.enqueue_many([item(number, integration_type="slow:x") for number in range(30)])
    await ledger.outbox.enqueue_many([item(100 + number, integration_type="quick:x") for number in range(30)])
    outbox = make_outbox({"slow:*": direct(slow, concurrency=2), "quick:*": direct(quick, concurrency=5)})
    dispatcher = outbox.dispatcher()

    await dispatcher.start()
    await quick.until(30)
    slow_before = len(slow.messages)
    slow.gate.set()
    await slow.until(30)
    await dispatcher.close()

    assert slow_before == 2
    assert (slow.most_running, quick.most_running <= 5) == (2, True)
    assert set(await statuses(ledger)) == {SENT}


@pytest.mark.requirement("X-88")
async def test_tenants_take_turns_when_asked(ledger: Ledger, make_outbox: MakeOutbox) -> None:
    spy = SpyChannel()
    await ledger.outbox.enqueue_many([item(number, tenant_id="big") for number in range(40)])
    await ledger.outbox.enqueue_many([item(100 + number, tenant_id=f"small-{number}") for number in range(4)])
    outbox = make_outbox({"webhook:*": direct(spy, concurrency=6)}, fair_tenants=True)

    async with outbox.dispatcher() as dispatcher:
        for _ in range(3):
            await dispatcher.tick()
            await dispatcher.idle()
        early = {message.tenant_id for message in spy.messages}
    running = outbox.dispatcher()
    await running.start()
    await spy.until(44)
    await running.close()

    assert early == {"big", "small-0", "small-1", "small-2", "small-3"}
    assert len(spy.messages) == 44


async def test_rows_of_one_key_leave_in_order(ledger: Ledger, make_outbox: MakeOutbox) -> None:
    spy = SpyChannel(Unavailable("first try fails", "X"))
    own = Backoff.fixed(1)
    await ledger.outbox.enqueue_many([item(number, ordering_key="order-1", backoff=own) for number in range(5)])
    dispatcher = make_outbox({"webhook:*": direct(spy)}, tick_interval_ms=20).dispatcher()

    await dispatcher.start()
    await spy.until(6)
    await dispatcher.close()

    assert spy.numbers == [0, 0, 1, 2, 3, 4]
    assert spy.most_running == 1


@pytest.mark.requirement("O-2", "O-81")
async def test_many_dispatchers_share_the_work(
    ledger_url: str, make_ledger: MakeLedger, make_outbox: MakeOutbox
) -> None:
    spy, ledgers = SpyChannel(), [make_ledger(ledger_url) for _ in range(3)]
    await ledgers[0].outbox.enqueue_many([item(number) for number in range(150)])
    dispatchers = [make_outbox({"webhook:*": direct(spy)}, ledger=each).dispatcher() for each in ledgers]

    await asyncio.gather(*(dispatcher.start() for dispatcher in dispatchers))
    await spy.until(150)
    await asyncio.gather(*(dispatcher.close() for dispatcher in dispatchers))

    assert sorted(spy.numbers) == list(range(150))
    assert set(await statuses(ledgers[0])) == {SENT}


@pytest.mark.requirement("X-76")
async def test_rows_of_a_dead_dispatcher_come_back(ledger: Ledger, make_outbox: MakeOutbox, told: Told) -> None:
    await ledger.outbox.enqueue_many([item(1), item(2)])
    await ledger.outbox.claim_due_batch("dead-1", 1, lease_ms=1_000)
    await ledger.outbox.claim_due_batch("dead-2", 1, lease_ms=1_000, starting=True)
    ledger.database.clock_offset_ms = 2_000

    async with make_outbox({"webhook:*": direct(SpyChannel())}).dispatcher() as dispatcher:
        await dispatcher.reap()

    untouched, begun = await rows(ledger)
    assert (untouched.status, untouched.attempts) == (PENDING, 0)
    assert (begun.status, begun.attempts, begun.error_code) == (FAILED, 1, "LEASE_EXPIRED")
    assert begun.due_at - begun.updated_at < timedelta(seconds=10), "the lease was pause enough"
    assert [fields["counted"] for fields in told.of("outbox.reaped")] == [False, True]


async def test_reapers_at_the_same_time_count_once(ledger: Ledger, make_outbox: MakeOutbox) -> None:
    await ledger.outbox.enqueue(item())
    await ledger.outbox.claim_due_batch("dead", 1, lease_ms=1_000, starting=True)
    ledger.database.clock_offset_ms = 2_000
    outbox = make_outbox({"webhook:*": direct(SpyChannel())})

    async with outbox.dispatcher() as one, outbox.dispatcher() as other:
        await asyncio.gather(one.reap(), other.reap())

    assert (await rows(ledger))[0].attempts == 1


@pytest.mark.requirement("X-16", "X-76")
async def test_a_process_that_stood_still_for_longer_than_its_lease_sends_nothing(
    ledger: Ledger, make_outbox: MakeOutbox, told: Told
) -> None:
    """Frozen between claim and send, as a paused machine is: somebody else has the row when it goes on."""
    spy, stops = SpyChannel(), [0.4]
    route = direct(spy, timeout_ms=200)

    def stand_still(event: str, fields: dict[str, Any]) -> None:
        if event == "outbox.claimed" and fields["count"] and stops:
            time.sleep(stops.pop())

    await ledger.outbox.enqueue(item(backoff=Backoff.fixed(1)))
    forget = telemetry.subscribe(stand_still)
    try:
        async with make_outbox({"webhook:*": route}, lease_ms=300).dispatcher() as dispatcher:
            await drain(dispatcher)
            assert spy.messages == []
            assert len(told.of("outbox.overslept")) == 1
    finally:
        forget()
    ledger.database.clock_offset_ms = 1_000
    async with make_outbox({"webhook:*": route}).dispatcher() as other:
        await other.reap()
        ledger.database.clock_offset_ms = 2_000
        await drain(other)

    assert len(spy.messages) == 1
    assert await statuses(ledger) == [SENT]


@pytest.mark.requirement("X-88", "O-77")
async def test_a_redis_that_is_silent_costs_one_wait_and_not_one_per_queue(
    sqlite_url: str, make_ledger: MakeLedger, start_server: StartServer
) -> None:
    redis, ledger, spy, queues = start_server(), make_ledger(sqlite_url), SpyChannel(), 200
    connection = Connection(redis.url, command_timeout_ms=300)
    routes = {"webhook:*": Route(channel=SpyChannel(), strategy="queued"), "slack:ops": direct(spy)}
    outbox = Outbox(ledger, routes, connection=connection)
    await ledger.outbox.enqueue_many([item(n, integration_type=f"webhook:{n}") for n in range(queues)])
    async with outbox.dispatcher() as dispatcher:
        with redis.paused():
            for number in (100, 101):  # the first tick finds out, the second knows and asks whether it is back
                await ledger.outbox.enqueue(item(number, integration_type="slack:ops"))
                began = time.monotonic()
                await dispatcher.tick()
                await spy.until(number - 99)
                assert time.monotonic() - began < queues * 0.3 / 2
        await outbox.aclose()
    await connection.aclose()

    assert await statuses(ledger) == [PENDING] * queues + [SENT] * 2


@pytest.mark.requirement("X-76")
async def test_a_row_that_somebody_holds_locked_does_not_keep_others_from_coming_back(
    postgres_url: str, make_ledger: MakeLedger
) -> None:
    """Its holder's machine may be gone for good; waiting for that row, the reaper would never get to the next."""
    ledger, holder = make_ledger(postgres_url, timeout_ms=1_000), make_ledger(postgres_url)
    await ledger.outbox.enqueue_many([item(1), item(2)])
    await ledger.outbox.claim_due_batch("dead", 2, lease_ms=1_000)
    ledger.database.clock_offset_ms = 2_000
    dispatcher = Outbox(ledger, {"webhook:*": direct(SpyChannel())}).dispatcher()

    async with holder.database.transaction() as connection:
        await connection.exec_driver_sql(
            "SELECT 1 FROM core_outbox.integration_outbox WHERE source_event_id = 'event-1' FOR UPDATE"
        )
        async with dispatcher:
            await dispatcher.reap()
        assert await statuses(ledger) == [CLAIMED, PENDING]

    async with dispatcher:
        await dispatcher.reap()
    assert await statuses(ledger) == [PENDING, PENDING]


@pytest.mark.requirement("X-76")
async def test_a_row_that_cannot_be_written_does_not_keep_others_from_coming_back(
    postgres_url: str, make_ledger: MakeLedger, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = make_ledger(postgres_url)
    await ledger.outbox.enqueue_many([item(1), item(2)])
    await ledger.outbox.claim_due_batch("dead", 2, lease_ms=1_000)
    ledger.database.clock_offset_ms = 2_000
    async with ledger.database.transaction() as connection:
        await connection.exec_driver_sql(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE EXCEPTION 'not this one'; END $$"
        )
        await connection.exec_driver_sql(
            "CREATE TRIGGER refuse BEFORE UPDATE ON core_outbox.integration_outbox FOR EACH ROW "
            "WHEN (OLD.source_event_id = 'event-1') EXECUTE FUNCTION refuse()"
        )

    async with Outbox(ledger, {"webhook:*": direct(SpyChannel())}).dispatcher() as dispatcher:
        await dispatcher.reap()

    assert await statuses(ledger) == [CLAIMED, PENDING]
    assert "not this one" in caplog.text


class FlakyStore:
    """The store behind a database that fails a few settlements. A fault at the edge; everything else is real."""

    def __init__(self, store: Any, failures: int) -> None:
        self._store, self.failures = store, failures

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def settle(self, *arguments: Any, **options: Any) -> Any:
        if self.failures:
            self.failures -= 1
            raise DatabaseUnavailable("the database does not answer")
        return await self._store.settle(*arguments, **options)


@pytest.mark.requirement("X-79")
async def test_a_database_error_after_a_good_send_does_not_send_again(ledger: Ledger, make_outbox: MakeOutbox) -> None:
    spy = SpyChannel()
    await ledger.outbox.enqueue(item())
    ledger.outbox = FlakyStore(ledger.outbox, failures=3)  # type: ignore[assignment]  # stands for the same store

    async with make_outbox({"webhook:*": direct(spy)}).dispatcher() as dispatcher:
        await drain(dispatcher)

    (row,) = await rows(ledger)
    assert (row.status, row.attempts) == (SENT, 0)
    assert len(spy.messages) == 1


async def test_a_settlement_is_given_up_before_its_lease_ends(
    ledger: Ledger, make_outbox: MakeOutbox, told: Told
) -> None:
    """Then the reaper has the row, and a late writer could only be in its way."""
    spy = SpyChannel()
    await ledger.outbox.enqueue(item())
    ledger.outbox = FlakyStore(ledger.outbox, failures=10_000)  # type: ignore[assignment]  # as above
    outbox = make_outbox({"webhook:*": direct(spy, timeout_ms=200)}, lease_ms=1_200)

    async with outbox.dispatcher() as dispatcher:
        await dispatcher.tick()
        await dispatcher.idle()

    assert len(told.of("outbox.unsettled")) == 1
    assert (await rows(ledger))[0].status is CLAIMED


@pytest.mark.requirement("X-79")
async def test_a_row_with_little_lease_left_does_not_end_the_settling_of_others(ledger: Ledger, told: Told) -> None:
    """An outage of the database as long as one row has, and much shorter than the others have."""
    await ledger.outbox.enqueue_many([item(1), item(2)])
    slow, quick = await ledger.outbox.claim_due_batch("w", 2, starting=True)
    store: Any = FlakyStore(ledger.outbox, failures=3)
    deliveries, now = OutboxDeliveries(store, worker_id="w", source="test", lease_ms=60_000), time.monotonic()

    settled = await asyncio.gather(
        deliveries.settle(slow, Sent(""), until=now + 0.01), deliveries.settle(quick, Sent(""), until=now + 60)
    )

    assert settled[0] is None
    assert settled[1] is not None
    assert [fields["outbox_id"] for fields in told.of("outbox.unsettled")] == [slow.id]
    assert await statuses(ledger) == [CLAIMED, SENT]


@pytest.mark.requirement("X-93", "O-60")
async def test_new_rows_are_delivered_without_waiting_for_the_interval(
    ledger: Ledger, ledger_url: str, make_ledger: MakeLedger, make_outbox: MakeOutbox, told: Told
) -> None:
    spy = SpyChannel()
    dispatcher = make_outbox({"webhook:*": direct(spy)}, tick_interval_ms=60_000).dispatcher()
    await dispatcher.start()
    writer = make_ledger(ledger_url)
    try:
        await writer.outbox.enqueue(item(0))
        await spy.until(1)
        await told.wait("outbox.delivered", 1)

        await writer.outbox.enqueue(item(1))
        await spy.until(2)
    finally:
        await dispatcher.close()


@pytest.mark.requirement("X-93")
async def test_a_full_batch_is_followed_by_the_next_at_once(ledger: Ledger, make_outbox: MakeOutbox) -> None:
    spy = SpyChannel()
    await ledger.outbox.enqueue_many([item(number) for number in range(95)])
    outbox = make_outbox({"webhook:*": direct(spy, concurrency=10)}, claim_batch_size=10, tick_interval_ms=60_000)
    dispatcher = outbox.dispatcher()

    await dispatcher.start()
    await spy.until(95)
    await dispatcher.close()

    assert sorted(spy.numbers) == list(range(95))


@pytest.mark.requirement("X-87")
async def test_sent_rows_are_removed_in_time(ledger: Ledger, make_outbox: MakeOutbox) -> None:
    spy = SpyChannel()
    await ledger.outbox.enqueue_many([item(1), item(2)])
    outbox = make_outbox({"webhook:*": direct(spy)}, keep_sent_ms=1_000, retire_grace_ms=1_000)

    async with outbox.dispatcher() as dispatcher:
        await drain(dispatcher)
        ledger.database.clock_offset_ms = 2_000
        await dispatcher.retire()
        ledger.database.clock_offset_ms = 4_000
        await dispatcher.retire()

    assert await rows(ledger) == []
    assert (await ledger.outbox.enqueue(item(1))).created is False


async def test_closing_waits_for_what_is_under_way(ledger: Ledger, make_outbox: MakeOutbox) -> None:
    spy = SpyChannel()
    spy.gate.clear()
    await ledger.outbox.enqueue(item())
    dispatcher = make_outbox({"webhook:*": direct(spy)}).dispatcher()
    await dispatcher.start()
    await spy.until(1)

    closing = asyncio.create_task(dispatcher.close())
    await asyncio.sleep(0)
    spy.gate.set()
    await closing
    await dispatcher.close()

    assert await statuses(ledger) == [SENT]


async def test_what_is_unfinished_when_time_is_up_is_left_to_the_reaper(
    ledger: Ledger, make_outbox: MakeOutbox
) -> None:
    spy = SpyChannel()
    spy.gate.clear()
    await ledger.outbox.enqueue(item())
    dispatcher = make_outbox({"webhook:*": direct(spy)}).dispatcher()
    running = asyncio.create_task(dispatcher.run())
    await spy.until(1)

    await dispatcher.close(timeout=50)
    await running

    assert await statuses(ledger) == [CLAIMED]


async def test_a_start_that_is_cut_short_is_cleaned_up(ledger: Ledger, make_outbox: MakeOutbox) -> None:
    """What it had not begun yet needs no end, and must not hide why it ended."""
    dispatcher = make_outbox({"webhook:partnerX": direct(SpyChannel())}).dispatcher()
    starting = asyncio.create_task(dispatcher.start())
    await asyncio.sleep(0)

    await dispatcher.close()

    with pytest.raises(AlreadyStopped):
        await starting


@pytest.mark.requirement("X-82")
async def test_every_dispatcher_has_a_name_of_its_own(ledger: Ledger, make_outbox: MakeOutbox) -> None:
    outbox = make_outbox({})

    assert outbox.dispatcher().name != outbox.dispatcher().name


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"claim_batch_size": 0}, "claim_batch_size"),
        ({"tick_interval_ms": 0}, "tick_interval_ms"),
        ({"unknown_types": "x"}, "unknown_types"),
        ({"keep_sent_ms": -1}, "keep_sent_ms"),
        ({"retire_grace_ms": -1}, "retire_grace_ms"),
    ],
)
def test_options_are_checked_at_the_door(options: dict[str, Any], option: str) -> None:
    from bullpen.outbox import DispatcherOptions

    with pytest.raises(InvalidOption, match=option):
        DispatcherOptions(**options)


async def test_a_delivery_ends_before_a_short_lease_does(ledger: Ledger, make_outbox: MakeOutbox) -> None:
    """Otherwise the row comes back while its target still hangs, and is sent a second time."""
    spy = SpyChannel()
    spy.gate.clear()
    await ledger.outbox.enqueue(item())

    async with make_outbox({"webhook:*": direct(spy)}, lease_ms=2_000).dispatcher() as dispatcher:
        await dispatcher.tick()
        await dispatcher.idle()

    (row,) = await rows(ledger)
    assert (row.status, row.error_code, row.last_error) == (FAILED, "TIMEOUT", "no answer within 1000 ms")


async def test_routes_that_cannot_work_are_refused(ledger: Ledger, make_outbox: MakeOutbox) -> None:
    with pytest.raises(InvalidOption, match=r"routes\['webhook:\*'\]\.strategy"):
        make_outbox({"webhook:*": Route(strategy="queued")}).dispatcher()
    with pytest.raises(InvalidOption, match="less than the lease"):
        make_outbox({"webhook:*": direct(SpyChannel(), timeout_ms=5_000)}, lease_ms=1_000).dispatcher()


async def test_the_limit_of_a_route_holds_instead_of_that_of_its_channel(
    ledger: Ledger, make_outbox: MakeOutbox
) -> None:
    """A target that is slow, and known to be: its route gives it more time than webhooks usually have."""
    async with HttpReceiver(lambda request: Answer(200, delay_s=0.3)) as receiver:
        options: dict[str, Any] = {"allow_http": True, "allowed_networks": ["127.0.0.0/8"], "timeout_ms": 100}
        slow, hasty = (Webhook(receiver.url, **options) for _ in range(2))
        await ledger.outbox.enqueue(item(integration_type="webhook:slow", backoff=Backoff.fixed(60_000)))
        await ledger.outbox.enqueue(item(integration_type="webhook:hasty", backoff=Backoff.fixed(60_000)))
        routes = {
            "webhook:slow": Route(channel=slow, strategy="direct", timeout_ms=20_000),
            "webhook:hasty": Route(channel=hasty, strategy="direct"),
        }
        async with make_outbox(routes).dispatcher() as dispatcher:
            await drain(dispatcher)

        found = {row.integration_type: row.status for row in await rows(ledger)}

    assert found == {"webhook:slow": SENT, "webhook:hasty": OutboxStatus.FAILED}
