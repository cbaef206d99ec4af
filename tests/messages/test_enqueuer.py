"""The scheduler: finds what falls due, publishes it once, forgets nothing that a crash or a broker left behind."""

from __future__ import annotations

import asyncio
from datetime import date, time, timedelta
from typing import Any

import pytest

from bullpen.errors import BullpenError, DatabaseUnavailable, InvalidOption
from bullpen.ledger import Ledger
from bullpen.ledger.message_records import ToPublish
from bullpen.messages import Late, MessageStatus, Occasion, SchedulerOptions
from bullpen.messages.orders import make_order
from bullpen.plugins.transports.memory import MemoryBroker, MemoryClient
from bullpen.ports.transport import Features
from tests.messages.conftest import MakeMessages
from tests.messages.kit import QUICK, Provider, Told, at, due_now, person, rows, set_clock, statuses, until_status

HOUR = timedelta(hours=1)
BORN = date(1990, 3, 14)


async def published(broker: MemoryBroker, queue: str = "messages") -> list[Any]:
    return [message.event for message in broker.line(queue).waiting]


# ---- what is found ---------------------------------------------------------------------------------------------------


@pytest.mark.requirement("S-16", "X-58", "S-18")
async def test_a_run_publishes_what_falls_due_within_the_hour_with_a_delay(
    make_messages: MakeMessages, both_ledgers: Ledger, broker: MemoryBroker
) -> None:
    messages = make_messages(ledger=both_ledgers)
    set_clock(both_ledgers, at("2026-03-14 08:00"))
    await messages.recipients.save_many(
        person(number, zone="UTC", occasions={"birthday": Occasion(BORN, send_at=time.fromisoformat(text))})
        for number, text in enumerate(("08:30", "09:00", "09:01"))
    )
    loop = asyncio.get_running_loop()

    await messages.scheduler().run_once()

    found = {row.recipient_id: row.status for row in await rows(messages)}
    assert found == {
        "person-0": MessageStatus.QUEUED,
        "person-1": MessageStatus.QUEUED,
        "person-2": MessageStatus.CREATED,
    }
    waits = [round((message.due_at - loop.time()) / 60) for message in broker.line("messages").waiting]
    assert waits == [30, 60]


@pytest.mark.requirement("X-59", "S-16")
async def test_what_was_missed_while_no_scheduler_ran_is_found(
    make_messages: MakeMessages, ledger: Ledger, provider: Provider
) -> None:
    """There is no lower bound: three hours later it is sent, because it has not expired yet."""
    messages = make_messages(provider)
    await due_now(messages, ledger, 3)
    set_clock(ledger, at("2026-03-14 12:00"))
    await messages.sender().start()

    await messages.scheduler().run_once()

    assert len(await until_status(messages, 3)) == 3


@pytest.mark.requirement("X-59")
@pytest.mark.parametrize(
    ("late", "hours", "expected"),
    [
        (Late.send(), 1_000, MessageStatus.QUEUED),
        (Late.skip(timedelta(hours=2)), 1, MessageStatus.QUEUED),
        (Late.skip(timedelta(hours=2)), 3, MessageStatus.SKIPPED),
        (Late.expire(timedelta(hours=12)), 11, MessageStatus.QUEUED),
        (Late.expire(timedelta(hours=12)), 13, MessageStatus.EXPIRED),
    ],
)
async def test_what_is_too_late_goes_by_its_policy(
    make_messages: MakeMessages, ledger: Ledger, told: Told, late: Late, hours: int, expected: MessageStatus
) -> None:
    messages = make_messages()
    messages.occasion("birthday", text="Hello", late=late)
    await due_now(messages, ledger)
    set_clock(ledger, at("2026-03-14 09:00") + hours * HOUR)

    await messages.scheduler().run_once()

    assert await statuses(messages) == [expected]
    if expected is not MessageStatus.QUEUED:
        given_up = {"status": str(expected), "occasion": "birthday", "channel": "email", "count": 1}
        assert told.of("messages.late") == [given_up]
        assert (await rows(messages))[0].error_code == "LATE"


async def test_what_was_skipped_can_be_sent_by_hand(
    make_messages: MakeMessages, ledger: Ledger, provider: Provider
) -> None:
    messages = make_messages(provider)
    await due_now(messages, ledger)
    set_clock(ledger, at("2026-03-20 09:00"))
    await messages.scheduler().run_once()
    (row,) = await rows(messages)
    assert row.status is MessageStatus.EXPIRED

    retried = await messages.store.retry([row.id, "no id"], by="a test")
    await messages.sender().start()
    await messages.scheduler().run_once()

    assert retried == {row.id}
    assert len(await until_status(messages, 1)) == 1


async def test_what_was_cancelled_by_hand_stays_so(make_messages: MakeMessages, ledger: Ledger) -> None:
    messages = make_messages()
    await due_now(messages, ledger)
    (row,) = await rows(messages)

    cancelled = await messages.store.cancel([row.id], by="a test")
    await messages.scheduler().run_once()

    assert cancelled == {row.id}
    assert await statuses(messages) == [MessageStatus.CANCELLED]


# ---- several, and dying ones -----------------------------------------------------------------------------------------


@pytest.mark.requirement("S-51", "X-28")
async def test_two_schedulers_publish_each_message_once(
    make_messages: MakeMessages, both_ledgers: Ledger, broker: MemoryBroker
) -> None:
    first, second = make_messages(ledger=both_ledgers), make_messages(ledger=both_ledgers)
    await due_now(first, both_ledgers, 200)

    await asyncio.gather(*(messages.scheduler().run_once() for messages in (first, second) for _ in range(2)))

    ids = [event.payload["messageId"] for event in await published(broker)]
    assert len(ids) == len(set(ids)) == 200


@pytest.mark.requirement("X-60")
async def test_a_row_that_was_claimed_and_never_published_is_published_after_its_lease(
    make_messages: MakeMessages, both_ledgers: Ledger, broker: MemoryBroker
) -> None:
    """A scheduler died between QUEUED and the broker: without the lease the row would wait for ever."""
    messages = make_messages(ledger=both_ledgers)
    await due_now(messages, both_ledgers)
    await messages.store.claim(ahead_ms=0, lease_ms=60_000, limit=10)

    await messages.scheduler().run_once()
    at_once = await published(broker)
    set_clock(both_ledgers, at("2026-03-14 09:01:01"))
    await messages.scheduler().run_once()
    later = await published(broker)

    (row,) = await rows(messages)
    assert at_once == []
    assert [event.payload["messageId"] for event in later] == [row.id]
    assert (row.status, row.publication) == (MessageStatus.QUEUED, 2)
    assert row.published_at is not None


@pytest.mark.requirement("X-60", "S-51")
async def test_a_confirm_that_was_never_noted_means_two_orders_and_one_message(
    make_messages: MakeMessages, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler died between the broker's confirm and its note: the row is published again, and sent once."""
    provider = Provider(ledger=ledger)
    messages = make_messages(provider)
    await due_now(messages, ledger)
    enqueuer = messages.enqueuer()

    async def dies(*_: object, **__: object) -> None:
        raise asyncio.CancelledError

    with monkeypatch.context() as patch:
        patch.setattr(messages.store, "confirm", dies)
        with pytest.raises(asyncio.CancelledError):
            await enqueuer.run_once()
    set_clock(ledger, at("2026-03-14 09:01:01"))
    await enqueuer.run_once()
    await messages.sender().start()
    await until_status(messages, 1)

    assert len(provider.calls) == 1


@pytest.mark.requirement("X-60")
async def test_an_order_that_the_broker_lost_is_published_again_much_later(
    make_messages: MakeMessages, ledger: Ledger, broker: MemoryBroker
) -> None:
    """Confirmed, and gone all the same, as after its TTL: the row is not forgotten."""
    messages = make_messages()
    messages.occasion("birthday", text="Hello", late=Late.send())
    await due_now(messages, ledger)
    await messages.scheduler().run_once()
    broker.line("messages").waiting.clear()

    set_clock(ledger, at("2026-03-15 09:30"))
    await messages.scheduler().run_once()
    too_early = await published(broker)
    set_clock(ledger, at("2026-03-15 10:01"))
    await messages.scheduler().run_once()

    assert too_early == []
    assert len(await published(broker)) == 1


async def test_an_order_that_the_broker_holds_back_for_too_long_is_published_once_more(
    make_messages: MakeMessages, both_ledgers: Ledger, broker: MemoryBroker
) -> None:
    """A broker that was away lets the rest of a delay run in full. The message leaves without it, and only once."""
    provider = Provider(ledger=both_ledgers)
    messages = make_messages(provider, ledger=both_ledgers)
    set_clock(both_ledgers, at("2026-03-14 08:59"))
    await messages.recipients.save(person(zone="UTC"))
    await messages.scheduler().run_once()
    (held,) = broker.line("messages").waiting
    held.due_at += 3_600

    set_clock(both_ledgers, at("2026-03-14 09:00:20"))
    await messages.scheduler().run_once()
    assert len(await published(broker)) == 1  # not late enough
    set_clock(both_ledgers, at("2026-03-14 09:00:31"))
    await messages.scheduler().run_once()
    await messages.sender().start()
    await until_status(messages, 1)
    set_clock(both_ledgers, at("2026-03-14 09:02"))
    await messages.scheduler().run_once()
    assert len(await published(broker)) == 1  # the one that is held back still

    held.due_at = 0.0
    broker.line("messages").wake()
    async with asyncio.timeout(10):
        while await published(broker) or broker.line("messages").in_flight:  # noqa: ASYNC110 - a broker tells nobody
            await asyncio.sleep(0.01)
    assert len(provider.calls) == 1


async def test_what_is_late_because_senders_are_slow_is_published_once_more_and_not_at_every_run(
    make_messages: MakeMessages, ledger: Ledger, broker: MemoryBroker
) -> None:
    messages = make_messages()
    set_clock(ledger, at("2026-03-14 08:59"))
    await messages.recipients.save(person(zone="UTC"))
    await messages.scheduler().run_once()

    for minute in range(1, 6):
        set_clock(ledger, at(f"2026-03-14 09:0{minute}"))
        await messages.scheduler().run_once()

    assert len(await published(broker)) == 2


async def test_an_order_that_the_broker_has_counts_although_it_took_no_second_one(
    make_messages: MakeMessages, both_ledgers: Ledger, broker: MemoryBroker
) -> None:
    """It is away when the late order is published again. The first one is still there, and is sent when it comes: it
    was queued in time, whatever becomes of the second."""
    provider = Provider(ledger=both_ledgers)
    client = MemoryClient(broker, policy=QUICK, publish_deadline=50)
    messages = make_messages(provider, ledger=both_ledgers, client=client)
    messages.occasion("birthday", text="!", late=Late.skip(timedelta(minutes=1)))
    set_clock(both_ledgers, at("2026-03-14 08:59"))
    await messages.recipients.save(person(zone="UTC"))
    await messages.scheduler().run_once()
    (held,) = broker.line("messages").waiting

    broker.stop()
    for minute in ("09:01", "09:02", "09:03"):
        set_clock(both_ledgers, at(f"2026-03-14 {minute}"))
        await messages.scheduler().run_once()
    broker.start()
    held.due_at = 0.0
    await messages.sender().start()

    (sent,) = await until_status(messages, 1)
    assert (sent.status, len(provider.calls)) == (MessageStatus.SENT, 1)


@pytest.mark.requirement("X-67", "S-8", "S-52")
async def test_what_the_broker_does_not_take_stays_in_the_database(
    make_messages: MakeMessages, ledger: Ledger, broker: MemoryBroker
) -> None:
    provider = Provider(ledger=ledger)
    client = MemoryClient(broker, policy=QUICK, publish_deadline=50)
    messages = make_messages(provider, client=client)
    await due_now(messages, ledger, 3)
    broker.stop()

    await messages.scheduler().run_once()
    away = await rows(messages)
    broker.start()
    await messages.scheduler().run_once()
    await messages.sender().start()

    assert {(row.status, row.publish_again_at) for row in away} == {(MessageStatus.CREATED, None)}
    assert all("away" in (row.last_error or "") or "stopped" in (row.last_error or "") for row in away), away[0]
    assert len(await until_status(messages, 3)) == 3


async def test_a_run_gives_up_on_a_broker_that_is_away(
    make_messages: MakeMessages, ledger: Ledger, broker: MemoryBroker, told: Told
) -> None:
    """Otherwise one run would try a million rows, each against the same wall."""
    client = MemoryClient(broker, policy=QUICK, publish_deadline=50)
    messages = make_messages(client=client, scheduler_batch=10)
    await due_now(messages, ledger, 50)
    broker.stop()

    await messages.scheduler().run_once()

    assert [fields["refused"] for fields in told.of("messages.published")] == [10]
    assert await statuses(messages) == [MessageStatus.CREATED] * 50


async def test_batches_follow_one_another_until_all_is_published(
    make_messages: MakeMessages, ledger: Ledger, broker: MemoryBroker, told: Told
) -> None:
    messages = make_messages(scheduler_batch=20)
    await due_now(messages, ledger, 50)

    await messages.scheduler().run_once()

    assert [fields["count"] for fields in told.of("messages.published")] == [20, 20, 10]
    assert len(await published(broker)) == 50


async def test_a_transport_without_delays_gets_messages_when_they_are_due(
    make_messages: MakeMessages, ledger: Ledger, broker: MemoryBroker
) -> None:
    client = MemoryClient(broker, policy=QUICK)
    client.transport.features = Features(ordered=True, delays=False)
    messages = make_messages(client=client)
    await due_now(messages, ledger)

    set_clock(ledger, at("2026-03-14 08:59"))
    await messages.scheduler().run_once()
    early = await statuses(messages)
    set_clock(ledger, at("2026-03-14 09:00"))
    await messages.scheduler().run_once()

    assert early == [MessageStatus.CREATED]
    assert await statuses(messages) == [MessageStatus.QUEUED]


@pytest.mark.requirement("S-5")
def test_an_order_that_its_receiver_would_refuse_is_not_published() -> None:
    message = ToPublish(
        id="no uuid", tenant_id="", occasion="birthday", due_at=at("2026-03-14 09:00"), delay_ms=0, publication=1
    )

    with pytest.raises(InvalidOption, match="what the schema of orders says"):
        make_order(message)


@pytest.mark.requirement("S-5")
async def test_a_row_that_cannot_become_an_order_never_reaches_the_broker(
    make_messages: MakeMessages, ledger: Ledger, broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And does not keep the others from being published."""
    messages = make_messages()
    await due_now(messages, ledger, 3)
    (bad, *_) = await rows(messages)

    def refuse(message: ToPublish) -> Any:
        if message.id == bad.id:
            raise InvalidOption("message", "an order", message.id)
        return make_order(message)

    monkeypatch.setattr("bullpen.messages.enqueuer.make_order", refuse)

    await messages.scheduler().run_once()

    assert len(await published(broker)) == 2
    assert {row.id for row in await rows(messages, status=MessageStatus.CREATED)} == {bad.id}


# ---- the tick --------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("S-15", "X-28")
async def test_the_scheduler_runs_on_its_pattern_until_closed(
    make_messages: MakeMessages, ledger: Ledger, told: Told
) -> None:
    """At once, then at each match; every second here, because six fields are allowed."""
    messages = make_messages(scheduler_schedule="* * * * * *")
    scheduler = messages.scheduler()
    running = asyncio.create_task(scheduler.run())

    await told.wait("messages.run_ended", 3)
    await scheduler.close()
    await running

    runs = [name for name, _ in told.all if name in ("messages.run_started", "messages.run_ended")]
    assert runs == ["messages.run_started", "messages.run_ended"] * (len(runs) // 2)


@pytest.mark.requirement("S-15")
def test_the_default_pattern_is_every_minute_and_a_wrong_one_is_refused() -> None:
    assert SchedulerOptions().schedule == "* * * * *"
    assert SchedulerOptions().look_ahead_ms == 3_600_000
    with pytest.raises(InvalidOption, match="cron pattern"):
        SchedulerOptions(schedule="every minute")
    with pytest.raises(InvalidOption, match="horizon_ms: expected at least the look-ahead"):
        SchedulerOptions(horizon_ms=1_000)


async def test_a_failing_run_is_tried_again_at_the_next_tick(
    make_messages: MakeMessages, ledger: Ledger, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = make_messages(scheduler_schedule="* * * * * *")
    scheduler, failures = messages.scheduler(), 2
    give_up = messages.store.give_up_late

    async def unsteady() -> Any:
        nonlocal failures
        if failures:
            failures -= 1
            raise DatabaseUnavailable("restarting")
        return await give_up()

    monkeypatch.setattr(messages.store, "give_up_late", unsteady)
    running = asyncio.create_task(scheduler.run())

    await told.wait("messages.run_ended")
    await scheduler.close()
    await running

    assert len(told.of("ticker.failed")) == 2


@pytest.mark.requirement("S-17")
async def test_health_tells_the_last_run_and_how_far_behind_it_is(
    make_messages: MakeMessages, both_ledgers: Ledger
) -> None:
    messages = make_messages(ledger=both_ledgers)
    before = await messages.health()
    await due_now(messages, both_ledgers, 3)
    set_clock(both_ledgers, at("2026-03-14 09:02"))
    waiting = await messages.health()

    await messages.scheduler().run_once()
    after = await messages.health()
    set_clock(both_ledgers, at("2026-03-14 09:10"))
    missed = await messages.health()

    assert (before.is_healthy, before.reason, before.last_run) == (False, "no run has succeeded yet", None)
    assert 119_000 <= waiting.queue_lag_ms <= 125_000
    assert after.is_healthy
    assert after.last_run == after.last_success
    assert (after.found, after.published, after.queue_lag_ms) == (3, 3, 0)
    assert 119_000 <= after.send_lag_ms <= 125_000
    assert (missed.is_healthy, missed.reason) == (
        False,
        "a run was missed: the last success was 2026-03-14 09:02:00 UTC",
    )


@pytest.mark.requirement("S-17")
async def test_a_run_that_fails_is_a_run_and_no_success(
    make_messages: MakeMessages, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = make_messages()
    await due_now(messages, ledger)
    scheduler = messages.scheduler()

    async def refuse(**_: object) -> Any:
        raise BullpenError("no")

    monkeypatch.setattr(messages.store, "claim", refuse)
    with pytest.raises(BullpenError, match="no"):
        await scheduler.run_once()

    health = await messages.health()
    assert health.last_run is not None
    assert (health.last_success, health.is_healthy) == (None, False)
