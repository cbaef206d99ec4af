"""From a recipient to a provider, the same on every transport."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bullpen.ledger import Ledger
from bullpen.messages import MessageStatus
from bullpen.plugins.transports.rabbitmq import DelayLadder
from bullpen.ports.channel import Refused, Unavailable
from bullpen.testing.rabbitmq import RabbitServer
from tests.messages.conftest import MakeMessages
from tests.messages.kit import Provider, Told, at, due_now, rows, set_clock, until_status
from tests.messages.rabbit import rabbit_client, rabbit_names

AnyClient = tuple[Any, str]


@pytest.mark.requirement("S-1", "S-16", "S-28", "S-31", "X-58")
async def test_a_message_arrives_when_it_is_due_and_not_before(
    make_messages: MakeMessages, any_client: AnyClient, ledger: Ledger
) -> None:
    """Found an hour ahead, published at once with a delay, sent at its instant; everything is on the row afterwards."""
    client, queue = any_client
    provider = Provider(ledger=ledger)
    messages = make_messages(provider, client=client, queue=queue)
    await due_now(messages, ledger)
    await messages.sender().start()
    set_clock(ledger, at("2026-03-14 08:59:59"))

    await messages.scheduler().run_once()
    (queued,) = await rows(messages)
    await provider.until_delivered(1)
    (sent,) = await until_status(messages, 1)

    assert queued.status is MessageStatus.QUEUED
    assert queued.published_at is not None
    assert provider.at[sent.id] >= at("2026-03-14 09:00")
    (call,) = provider.calls
    assert call.payload == {
        "to": "person-1@example.com",
        "name": "Person 1",
        "subject": "Happy birthday, Person 1!",
        "text": "Happy birthday, Person 1!",
    }
    assert (call.idempotency_key, call.attempt) == (sent.id, 1)
    assert sent.response == {"detail": "provider-1", "channel": "email", "attempt": 1}
    assert sent.sent_at is not None and sent.sent_at >= sent.due_at


@pytest.mark.requirement("S-24", "S-25", "X-2")
async def test_a_transient_error_is_tried_six_times_and_ends_in_the_dead_letters(
    make_messages: MakeMessages, any_client: AnyClient, ledger: Ledger, told: Told
) -> None:
    client, queue = any_client
    provider = Provider(*[Unavailable("provider away", "NO_ANSWER")] * 6)
    messages = make_messages(provider, client=client, queue=queue)
    await due_now(messages, ledger)
    await messages.sender().start()

    await messages.scheduler().run_once()
    await told.wait("dead_letter.written")

    (failed,) = await rows(messages)
    assert (failed.status, failed.error_code, failed.attempts) == (MessageStatus.FAILED, "NO_ANSWER", 6)
    assert [call.attempt for call in provider.calls] == [1, 2, 3, 4, 5, 6]
    assert len({call.idempotency_key for call in provider.calls}) == 1
    (letter,) = await client.transport.dead_letters(queue).list()
    assert letter.data["payload"]["messageId"] == failed.id


@pytest.mark.requirement("S-23", "S-26")
async def test_a_permanent_error_is_tried_once(
    make_messages: MakeMessages, any_client: AnyClient, ledger: Ledger, told: Told
) -> None:
    client, queue = any_client
    provider = Provider(Refused("no such mailbox", "550"))
    messages = make_messages(provider, client=client, queue=queue)
    await due_now(messages, ledger)
    await messages.sender().start()

    await messages.scheduler().run_once()
    await told.wait("dead_letter.written")

    (failed,) = await rows(messages)
    assert (failed.status, failed.error_code, failed.last_error) == (MessageStatus.FAILED, "550", "no such mailbox")
    assert len(provider.calls) == 1


@pytest.mark.requirement("S-1", "S-13")
async def test_a_dead_letter_that_is_redriven_is_sent(
    make_messages: MakeMessages, any_client: AnyClient, ledger: Ledger, told: Told
) -> None:
    """The row is FAILED and the order comes again: it is sent under the same key."""
    client, queue = any_client
    provider = Provider(Refused("no such mailbox", "550"))
    messages = make_messages(provider, client=client, queue=queue)
    await due_now(messages, ledger)
    await messages.sender().start()
    await messages.scheduler().run_once()
    await told.wait("dead_letter.written")

    letters = client.transport.dead_letters(queue)
    (letter,) = await letters.list()
    await letters.redrive(letter.id, by="a test")
    (sent,) = await until_status(messages, 1)

    assert [call.idempotency_key for call in provider.calls] == [sent.id, sent.id]


@pytest.mark.long  # a broker of its own is stopped and started again, and a delay of 20 s runs to its end
@pytest.mark.requirement("S-52", "X-60")
async def test_a_broker_that_was_away_before_the_due_time_delays_and_doubles_nothing(
    make_messages: MakeMessages, ledger: Ledger, told: Told
) -> None:
    """What was left of the delay runs in full when it is back. The row is late then, and is published again without a
    delay; the copy that the broker held back finds the message sent."""
    names, provider = rabbit_names(), Provider(ledger=ledger)
    with RabbitServer.start() as rabbit:
        client = rabbit_client(rabbit.url, names, topology={"delays": DelayLadder(unit_ms=100, levels=9)})
        messages = make_messages(provider, client=client, queue=names["queue_name"])
        await due_now(messages, ledger)
        set_clock(ledger, at("2026-03-14 08:59:40"))
        await messages.scheduler().run_once()

        await asyncio.to_thread(rabbit.stop)
        await asyncio.to_thread(rabbit.restart)
        set_clock(ledger, at("2026-03-14 09:00:31"))
        await messages.scheduler().run_once()
        await messages.sender().start()
        (sent,) = await until_status(messages, 1)
        assert told.of("messages.skipped") == [], "sent while the first copy was held back, not because that came"
        await told.wait("messages.skipped")  # now it has come
        await messages.aclose()

    assert [call.idempotency_key for call in provider.calls] == [sent.id]
