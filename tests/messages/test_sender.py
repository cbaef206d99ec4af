"""One message and its sender: taken once, sent once, whatever dies or comes twice."""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import timedelta
from typing import Any

import pytest

from bullpen.errors import DatabaseUnavailable, DelayJob, InvalidOption, MessageNotSent, PermanentError
from bullpen.ledger import Ledger
from bullpen.messages import Messages, MessageStatus, Sender, SenderOptions, Text
from bullpen.messages import sender as sender_module
from bullpen.messages.metrics import MessageMetrics
from bullpen.ports.channel import Accepted, Message, NotTried, Refused, Unavailable, Unknown
from bullpen.ports.transport import Delivery, Event
from bullpen.queue import RateLimit
from tests.messages.conftest import MakeMessages
from tests.messages.kit import Provider, Told, at, due_now, person, rows, set_clock, until_status

MINUTE = timedelta(minutes=1)


def order_for(row: Any, *, attempt: int = 1, **changes: Any) -> Delivery:
    """A delivery as any transport hands it out."""
    payload = {"messageId": row.id, "occasion": row.occasion, "dueMs": round(row.due_at.timestamp() * 1000), **changes}
    event = Event(source="messages", urn=f"urn:message:{row.id}", name=row.occasion, payload=payload, id="order")
    return Delivery(event, attempt=attempt, idempotency_key="order", handle=None)


def sender_of(messages: Messages, name: str = "sender-1", **options: Any) -> Sender:
    return Sender(
        messages.store,
        messages.occasions,
        messages.routes,
        worker=name,
        options=SenderOptions(**{"lease_ms": 60_000, **options}),
    )


async def queued(messages: Messages, ledger: Ledger, count: int = 1, **changes: Any) -> Any:
    """Messages that are due and QUEUED; the order is ours to play."""
    await due_now(messages, ledger, count, **changes)
    claimed = await messages.store.claim(ahead_ms=0, lease_ms=60_000, limit=1_000)
    await messages.store.confirm(claimed, lost_after_ms=90_000_000, late_after_ms=30_000)
    found = await rows(messages)
    return found[0] if count == 1 else found


# ---- the order of things ---------------------------------------------------------------------------------------------


@pytest.mark.requirement("S-28", "S-31", "X-16")
async def test_a_row_is_read_taken_sent_and_settled_in_this_order(
    make_messages: MakeMessages, both_ledgers: Ledger, told: Told
) -> None:
    """And while the provider is called the row says SENDING, with the fence of whoever sends."""
    provider = Provider()
    provider.gate.clear()
    messages = make_messages(provider, ledger=both_ledgers)
    row = await queued(messages, both_ledgers)

    handling = asyncio.create_task(sender_of(messages).handle(order_for(row)))
    await provider.until(1)
    sending = await messages.store.get(row.id)
    provider.gate.set()
    await handling
    sent = await messages.store.get(row.id)

    assert sending and sent
    assert (sending.status, sending.fence, sending.attempts) == (MessageStatus.SENDING, row.fence + 1, 1)
    assert (sending.locked_by, sending.locked_until) == ("sender-1", sending.locked_until)
    assert (sent.status, sent.locked_by, sent.publish_again_at) == (MessageStatus.SENT, None, None)
    assert sent.response == {"detail": "provider-1", "channel": "email", "attempt": 1}
    steps = [name for name, _ in told.all if name in ("messages.taken", "messages.answered", "messages.settled")]
    assert steps == ["messages.taken", "messages.answered", "messages.settled"]


@pytest.mark.requirement("S-49", "X-66")
@pytest.mark.parametrize("after_crash", ["same_key", "park"])
async def test_a_delivery_that_is_lost_while_sending_is_sent_all_the_same(
    make_messages: MakeMessages, ledger: Ledger, told: Told, after_crash: str
) -> None:
    """The broker broke off and delivers again; the provider knows nothing of it. Nobody is parked, or called twice."""
    provider = Provider()
    provider.gate.clear()
    messages = make_messages(provider, after_crash=after_crash)
    row = await queued(messages, ledger)
    sender = sender_of(messages)

    handling = asyncio.create_task(sender.handle(order_for(row)))
    await provider.until(1)
    handling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await handling
    with pytest.raises(DelayJob, match="another sender has it"):
        await sender.handle(order_for(row))
    provider.gate.set()
    await told.wait("messages.settled")
    await sender.handle(order_for(row))

    assert len(provider.calls) == 1
    assert [one.status for one in await rows(messages)] == [MessageStatus.SENT]


async def test_a_send_without_an_end_does_not_keep_a_sender_from_closing(
    make_messages: MakeMessages, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts as a crash: the row stays SENDING until its lease is over."""
    monkeypatch.setattr(sender_module, "_LAST_MOMENT_S", 0.05)
    provider = Provider()
    provider.gate.clear()
    messages = make_messages(provider)
    row = await queued(messages, ledger)
    sender = sender_of(messages)
    handling = asyncio.create_task(sender.handle(order_for(row)))
    await provider.until(1)
    handling.cancel()

    await asyncio.wait_for(sender.idle(), 20)

    assert [one.status for one in await rows(messages)] == [MessageStatus.SENDING]


@pytest.mark.requirement("S-29")
async def test_a_message_that_was_sent_is_skipped(
    make_messages: MakeMessages, ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "bullpen.messages")
    provider = Provider()
    messages = make_messages(provider)
    row = await queued(messages, ledger)
    sender = sender_of(messages)
    await sender.handle(order_for(row))

    await sender.handle(order_for(row))

    assert len(provider.calls) == 1
    (line,) = [record for record in caplog.records if "is skipped" in record.getMessage()]
    assert line.getMessage() == f"message {row.id} is skipped: it was sent"
    assert vars(line)["messageId"] == row.id


async def test_what_becomes_of_messages_is_counted_from_the_first_look_on(
    make_messages: MakeMessages, ledger: Ledger
) -> None:
    metrics = MessageMetrics()

    async def numbers() -> list[float]:
        totals = [metric for metric in await metrics.collect() if not any(sample.labels for sample in metric.samples)]
        return [sample.value for metric in totals for sample in metric.samples]

    before = await numbers()
    messages = make_messages(Provider())
    row = await queued(messages, ledger)
    sender = sender_of(messages)
    await sender.handle(order_for(row))
    await sender.handle(order_for(row))
    metrics.close()

    assert (before, await numbers()) == ([0, 0, 0], [1, 1, 0])


@pytest.mark.requirement("S-30")
async def test_a_message_that_does_not_exist_is_a_permanent_error(make_messages: MakeMessages, ledger: Ledger) -> None:
    messages = make_messages()
    row = await queued(messages, ledger)
    gone = "00000000-0000-5000-8000-000000000000"

    with pytest.raises(PermanentError, match=f"message {gone} does not exist"):
        await sender_of(messages).handle(order_for(row, messageId=gone))


@pytest.mark.requirement("S-5", "S-22")
@pytest.mark.parametrize(
    "changes", [{"messageId": "1; DROP TABLE"}, {"messageId": None}, {"dueMs": "soon"}, {"occasion": ""}, {"dueMs": -1}]
)
async def test_what_is_no_order_is_a_permanent_error(
    make_messages: MakeMessages, ledger: Ledger, changes: dict[str, Any]
) -> None:
    messages = make_messages()
    row = await queued(messages, ledger)

    with pytest.raises(PermanentError, match="this is not an order for a message"):
        await sender_of(messages).handle(order_for(row, **changes))


# ---- twice -----------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("X-65", "X-16", "S-51")
async def test_of_many_deliveries_at_once_one_sends(make_messages: MakeMessages, both_ledgers: Ledger) -> None:
    """From several senders, and several within one, whose reads and writes share transactions."""
    provider = Provider()
    provider.gate.clear()
    messages = make_messages(provider, ledger=both_ledgers)
    row = await queued(messages, both_ledgers)
    senders = [sender_of(messages, f"sender-{number}") for number in range(4)]

    tasks = [asyncio.create_task(sender.handle(order_for(row))) for sender in senders for _ in range(5)]
    await provider.until(1)
    _, waiting = await asyncio.wait(tasks, timeout=1, return_when=asyncio.ALL_COMPLETED)
    provider.gate.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)

    assert len(waiting) == 1
    assert len(provider.calls) == 1
    others = [result for result in results if result is not None]
    assert len(others) == 19
    assert all(isinstance(each, DelayJob) and str(each) == "another sender has it" for each in others)


@pytest.mark.requirement("X-66", "S-49")
async def test_after_a_crash_the_key_decides(make_messages: MakeMessages, both_ledgers: Ledger) -> None:
    """A sender died after the provider had the message. The next delivery waits for the lease, then sends the key."""
    provider = Provider()
    messages = make_messages(provider, ledger=both_ledgers, after_crash="same_key")
    row = await queued(messages, both_ledgers)
    await died_while_sending(messages, row)

    with pytest.raises(DelayJob, match="another sender has it") as early:
        await sender_of(messages).handle(order_for(row))
    set_clock(both_ledgers, at("2026-03-14 09:01:01"))
    await sender_of(messages).handle(order_for(row))

    assert isinstance(early.value.delay, int) and 55_000 < early.value.delay <= 60_000
    assert (await rows(messages))[0].status is MessageStatus.SENT
    assert [call.idempotency_key for call in provider.calls] == [row.id, row.id]
    assert len(provider.delivered) == 1


async def died_while_sending(messages: Messages, row: Any) -> None:
    """Play a process that ends between the provider's answer and the outcome."""
    dying = sender_of(messages, "dying")

    async def lost(*_: object) -> bool:
        raise asyncio.CancelledError  # the process is gone: nothing after this line happens

    dying._settle = lost  # type: ignore[assignment,method-assign]  # the end of the process, at an exact place
    with pytest.raises(asyncio.CancelledError):
        await dying.handle(order_for(row))


@pytest.mark.requirement("X-66")
async def test_after_a_crash_a_provider_without_keys_may_be_asked_again(
    make_messages: MakeMessages, ledger: Ledger
) -> None:
    provider = Provider()
    messages = make_messages(provider, after_crash="resend")
    row = await queued(messages, ledger)
    await died_while_sending(messages, row)
    set_clock(ledger, at("2026-03-14 09:01:01"))

    await sender_of(messages).handle(order_for(row))

    assert len(provider.calls) == 2
    assert (await rows(messages))[0].status is MessageStatus.SENT


@pytest.mark.requirement("X-66")
async def test_after_a_crash_a_message_may_be_parked_for_a_person(make_messages: MakeMessages, ledger: Ledger) -> None:
    """Nothing is sent until somebody says which of the two happened."""
    provider = Provider()
    messages = make_messages(provider, after_crash="park")
    row = await queued(messages, ledger, count=2)
    for each in row:
        await died_while_sending(messages, each)
    set_clock(ledger, at("2026-03-14 09:01:01"))

    for each in row:
        await sender_of(messages).handle(order_for(each))
    parked = await rows(messages)
    await messages.store.resolve([row[0].id], by="a test")
    await messages.store.retry([row[1].id], by="a test")

    assert len(provider.calls) == 2
    assert {(each.status, each.error_code) for each in parked} == {(MessageStatus.PARKED, "AMBIGUOUS")}
    assert "dying died while sending" in (parked[0].last_error or "")
    after = {each.id: each.status for each in await rows(messages)}
    assert after == {row[0].id: MessageStatus.SENT, row[1].id: MessageStatus.CREATED}


@pytest.mark.requirement("X-66")
async def test_a_timeout_is_as_unclear_as_a_crash(make_messages: MakeMessages, ledger: Ledger) -> None:
    async def status_after(policy: str, number: int) -> tuple[str, str | None]:
        provider = Provider()
        provider.gate.clear()
        messages = make_messages(provider, after_crash=policy, timeout=50)
        row = await queued(messages, ledger)
        try:
            await sender_of(messages).handle(order_for(row))
        except MessageNotSent:
            pass
        (found,) = await rows(messages)
        await messages.recipients.remove(["person-1"])
        async with ledger.database.transaction() as connection:
            await connection.exec_driver_sql("DELETE FROM bullpen_messages")
        return found.status, found.error_code

    assert await status_after("park", 1) == (MessageStatus.PARKED, "AMBIGUOUS")
    assert await status_after("same_key", 2) == (MessageStatus.QUEUED, "TIMEOUT")


class Searchable(Provider):
    """A provider that can be asked for what it has."""

    def __init__(self, *answers: Any) -> None:
        super().__init__(*answers)
        self.asked = 0
        self.can_tell = True

    async def look_up(self, message: Message) -> Accepted | Unavailable | None:
        self.asked += 1
        if not self.can_tell:
            return Unavailable("index is being rebuilt", "503")
        return Accepted("found") if message.idempotency_key in self.delivered else None


@pytest.mark.requirement("X-66")
@pytest.mark.parametrize("has_arrived", [True, False])
async def test_after_a_crash_a_provider_may_be_asked_first(
    make_messages: MakeMessages, ledger: Ledger, has_arrived: bool
) -> None:
    provider = Searchable()
    messages = make_messages(provider, after_crash="look_up")
    row = await queued(messages, ledger)
    await died_while_sending(messages, row)
    if not has_arrived:
        provider.delivered.clear()
    set_clock(ledger, at("2026-03-14 09:01:01"))

    await sender_of(messages).handle(order_for(row))

    assert (provider.asked, len(provider.calls)) == (1, 1 if has_arrived else 2)
    assert (await rows(messages))[0].status is MessageStatus.SENT


@pytest.mark.requirement("X-66")
async def test_an_answer_that_was_lost_is_looked_up_after_the_lease(
    make_messages: MakeMessages, ledger: Ledger
) -> None:
    """The row stays SENDING meanwhile, so that nobody sends what may have arrived."""
    provider = Searchable(Unknown("connection reset", "NO_ANSWER"))
    messages = make_messages(provider, after_crash="look_up")
    row = await queued(messages, ledger)

    with pytest.raises(DelayJob, match="the provider will be asked"):
        await sender_of(messages).handle(order_for(row))
    between = (await rows(messages))[0].status
    set_clock(ledger, at("2026-03-14 09:01:01"))
    provider.can_tell = False
    with pytest.raises(DelayJob, match="the provider will be asked"):
        await sender_of(messages).handle(order_for(row))
    set_clock(ledger, at("2026-03-14 09:02:02"))
    provider.can_tell = True
    await sender_of(messages).handle(order_for(row))

    assert between is MessageStatus.SENDING
    assert (provider.asked, len(provider.calls)) == (2, 2)
    assert (await rows(messages))[0].status is MessageStatus.SENT


def test_a_channel_says_itself_what_an_unclear_end_means(make_messages: MakeMessages) -> None:
    """Unless the program knows better; a function cannot say, so the program must."""
    messages = make_messages()
    searchable = Searchable()

    assert messages.channel("a", Provider()).after_crash == "resend"
    searchable.when_unknown = "look_up"  # type: ignore[attr-defined]
    assert messages.channel("b", searchable).after_crash == "look_up"
    searchable.when_unknown = "park"  # type: ignore[attr-defined]
    assert messages.channel("c", searchable).after_crash == "park"
    assert messages.channel("d", searchable, after_crash="same_key").after_crash == "same_key"
    with pytest.raises(InvalidOption, match="because the channel has no look_up"):
        messages.channel("e", Provider(), after_crash="look_up")
    with pytest.raises(InvalidOption, match="a function has no default"):
        messages.channel("f")  # type: ignore[call-overload]


async def test_an_outcome_that_comes_after_a_takeover_changes_nothing(
    make_messages: MakeMessages, ledger: Ledger, told: Told
) -> None:
    """A sender that hung longer than its lease must not overwrite what the next one did."""
    slow, quick = Provider(Refused("too late to matter", "X")), Provider()
    slow.gate.clear()
    messages = make_messages(slow)
    row = await queued(messages, ledger)
    first = asyncio.create_task(sender_of(messages, "slow").handle(order_for(row)))
    await slow.until(1)
    set_clock(ledger, at("2026-03-14 09:01:01"))
    messages.channel("email", quick, after_crash="same_key")
    await sender_of(messages, "quick").handle(order_for(row))

    slow.gate.set()
    await first

    (found,) = await rows(messages)
    assert (found.status, found.error_code) == (MessageStatus.SENT, None)
    assert [fields["status"] for fields in told.of("messages.settled")] == ["SENT", "LOST"]


# ---- never early, never for the wrong plan ---------------------------------------------------------------------------


@pytest.mark.requirement("X-58", "S-21")
async def test_an_order_that_comes_early_waits(make_messages: MakeMessages, ledger: Ledger) -> None:
    """Whatever a broker does with its delays, the row's instant decides."""
    provider = Provider()
    messages = make_messages(provider)
    row = await queued(messages, ledger)
    set_clock(ledger, at("2026-03-14 08:59:30"))

    with pytest.raises(DelayJob, match="it is not due yet") as early:
        await sender_of(messages).handle(order_for(row))

    assert isinstance(early.value.delay, int) and 25_000 < early.value.delay <= 30_000
    assert provider.calls == []


@pytest.mark.requirement("X-72")
async def test_an_order_for_a_plan_that_changed_is_dropped(make_messages: MakeMessages, ledger: Ledger) -> None:
    """The recipient moved after the order was published: the old instant means nothing any more."""
    provider = Provider()
    messages = make_messages(provider)
    row = await queued(messages, ledger)
    set_clock(ledger, at("2026-03-14 08:30"))
    await messages.recipients.save(person(zone="America/New_York"))
    set_clock(ledger, at("2026-03-14 09:00"))

    await sender_of(messages).handle(order_for(row))
    (moved,) = await rows(messages)
    set_clock(ledger, at("2026-03-14 13:00"))
    await messages.store.claim(ahead_ms=0, lease_ms=60_000, limit=10)
    await sender_of(messages).handle(order_for(row))
    assert provider.calls == []
    await sender_of(messages).handle(order_for(moved))

    assert (moved.id, moved.status, moved.due_at) == (row.id, MessageStatus.CREATED, at("2026-03-14 13:00"))
    assert len(provider.calls) == 1


async def test_an_order_of_a_cancelled_message_is_dropped(make_messages: MakeMessages, ledger: Ledger) -> None:
    provider = Provider()
    messages = make_messages(provider)
    row = await queued(messages, ledger)
    await messages.recipients.remove(["person-1"])

    await sender_of(messages).handle(order_for(row))

    assert provider.calls == []
    assert [(each.status, each.error_code) for each in await rows(messages)] == [
        (MessageStatus.CANCELLED, "RECIPIENT_GONE")
    ]


async def test_a_failed_message_whose_recipient_is_gone_is_cancelled(
    make_messages: MakeMessages, ledger: Ledger
) -> None:
    provider = Provider(Refused("no such mailbox", "550"))
    messages = make_messages(provider)
    row = await queued(messages, ledger)
    with pytest.raises(PermanentError):
        await sender_of(messages).handle(order_for(row))
    await messages.recipients.remove(["person-1"])

    await sender_of(messages).handle(order_for(row))

    assert len(provider.calls) == 1
    assert (await rows(messages))[0].status is MessageStatus.CANCELLED


@pytest.mark.requirement("X-59")
async def test_what_expires_is_not_sent_late(make_messages: MakeMessages, ledger: Ledger) -> None:
    """It was queued in time, but no sender came: after a day nobody wants a birthday greeting."""
    provider = Provider()
    messages = make_messages(provider)
    row = await queued(messages, ledger)
    set_clock(ledger, at("2026-03-15 09:00"))

    await sender_of(messages).handle(order_for(row))

    assert provider.calls == []
    (found,) = await rows(messages)
    assert (found.status, found.error_code) == (MessageStatus.EXPIRED, "LATE")


async def test_nobody_is_disturbed_in_quiet_hours(make_messages: MakeMessages, ledger: Ledger) -> None:
    """A retry or a late order that comes in the evening waits for the morning."""
    provider = Provider()
    messages = make_messages(provider)
    messages.occasion("birthday", text="Hello {name}", quiet_hours=("21:00", "08:00"))
    row = await queued(messages, ledger)
    set_clock(ledger, at("2026-03-14 22:00"))

    with pytest.raises(DelayJob, match="quiet hours") as quiet:
        await sender_of(messages).handle(order_for(row))
    set_clock(ledger, at("2026-03-15 08:00"))
    await sender_of(messages).handle(order_for(row))

    assert quiet.value.delay == 3_600_000  # and again after that: a broker need not hold anything for a night
    assert len(provider.calls) == 1


# ---- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("S-23")
@pytest.mark.parametrize(
    ("answer", "raised", "status", "code"),
    [
        (Accepted("id-1"), None, MessageStatus.SENT, None),
        (Refused("bad address", "550"), PermanentError, MessageStatus.FAILED, "550"),
        (Unavailable("away", "503"), MessageNotSent, MessageStatus.QUEUED, "503"),
        (Unavailable("slow down", "429", after_ms=5_000), DelayJob, MessageStatus.QUEUED, "429"),
        (NotTried("no connection", after_ms=2_000), DelayJob, MessageStatus.QUEUED, "NOT_TRIED"),
        (ConnectionError("reset"), MessageNotSent, MessageStatus.QUEUED, "CHANNEL_ERROR"),
        (Unknown("no answer", "NO_ANSWER"), MessageNotSent, MessageStatus.QUEUED, "NO_ANSWER"),
        # What no database holds. It left the message to the next sender, and the recipient had it again.
        (Accepted("id \0 \ud800"), None, MessageStatus.SENT, None),
        (Accepted({"id": 7}), None, MessageStatus.SENT, None),  # type: ignore[arg-type]  # a channel of the user's own
        (Refused("\0 \ud800", "C" * 99), PermanentError, MessageStatus.FAILED, "C" * 60),
        (ConnectionError("\0 \ud800"), MessageNotSent, MessageStatus.QUEUED, "CHANNEL_ERROR"),
        ({"id": 7}, MessageNotSent, MessageStatus.QUEUED, "CHANNEL_ERROR"),
    ],
)
async def test_what_an_answer_means(
    make_messages: MakeMessages, ledger: Ledger, answer: Any, raised: Any, status: MessageStatus, code: str | None
) -> None:
    """Network, timeouts and rate limits are tried again; what is invalid, unknown or forbidden is not."""
    messages = make_messages(Provider(answer))
    row = await queued(messages, ledger)

    error: BaseException | None = None
    try:
        await sender_of(messages).handle(order_for(row))
    except Exception as caught:
        error = caught

    assert type(error) is (raised or type(None))
    (found,) = await rows(messages)
    assert (found.status, found.error_code) == (status, code)
    if isinstance(error, DelayJob):
        assert error.delay == answer.after_ms


@pytest.mark.requirement("W-74")
@pytest.mark.parametrize(
    "answer",
    [
        Accepted("sent to +4930123456 with token=hunter2"),
        Refused("no such mailbox: ada.lovelace@example.com, password=hunter2", "550"),
        Unavailable("Authorization: Token hunter2 is over its limit", "503"),
        NotTried("https://ada:hunter2@provider is away", after_ms=2_000),
        Unknown("no answer to Bearer hunter2", "NO_ANSWER"),
        ConnectionError("https://ada:hunter2@provider is away"),
    ],
)
async def test_what_a_provider_says_is_scrubbed_before_it_is_kept_or_raised(
    make_messages: MakeMessages, ledger: Ledger, answer: Any
) -> None:
    """Providers repeat addresses, numbers and keys, and a row lives for years."""
    messages = make_messages(Provider(answer))
    row = await queued(messages, ledger)

    raised = ""
    try:
        await sender_of(messages).handle(order_for(row))
    except Exception as error:
        raised = f"{error} {getattr(error, 'reason', '')}"

    (found,) = await rows(messages)
    kept = repr(found.last_error) + repr(found.response)
    assert "***" in kept
    for secret in ("hunter2", "lovelace", "4930123456"):
        assert secret not in kept + raised


async def test_a_provider_that_always_asks_for_patience_is_not_believed_for_ever(
    make_messages: MakeMessages, ledger: Ledger
) -> None:
    messages = make_messages(Provider(*[Unavailable("slow down", "429", after_ms=1)] * 50))
    row = await queued(messages, ledger)
    sender = sender_of(messages, attempts=2)

    kinds = []
    for _ in range(21):
        try:
            await sender.handle(order_for(row, attempt=2))
        except (DelayJob, MessageNotSent) as error:
            kinds.append(type(error))

    assert kinds == [DelayJob] * 20 + [MessageNotSent]
    assert (await rows(messages))[0].status is MessageStatus.FAILED


async def test_a_text_that_cannot_be_made_is_permanent(make_messages: MakeMessages, ledger: Ledger) -> None:
    provider = Provider()
    messages = make_messages(provider)
    messages.occasion("birthday", text="Hello {nickname}")
    row = await queued(messages, ledger)

    with pytest.raises(PermanentError, match=r"TEMPLATE.*\{nickname\}"):
        await sender_of(messages).handle(order_for(row))

    assert provider.calls == []
    assert (await rows(messages))[0].error_code == "TEMPLATE"


@pytest.mark.parametrize(("forget", "code"), [("channel", "UNKNOWN_CHANNEL"), ("occasion", "UNKNOWN_OCCASION")])
async def test_what_this_program_does_not_know_fails_with_a_clear_code(
    make_messages: MakeMessages, ledger: Ledger, forget: str, code: str
) -> None:
    messages = make_messages()
    row = await queued(messages, ledger)
    if forget == "channel":
        messages.routes.clear()
    else:
        messages.occasions._kinds.clear()

    with pytest.raises(PermanentError, match=code):
        await sender_of(messages).handle(order_for(row))

    assert (await rows(messages))[0].error_code == code


async def test_texts_follow_the_locale_and_the_recipient(make_messages: MakeMessages, ledger: Ledger) -> None:
    provider = Provider()
    messages = make_messages(provider)
    messages.occasion(
        "birthday",
        text={
            "": Text("{name}, {number}!", subject="Hi"),
            "de": Text("Alles Gute zum {number}., {name}!", html="<b>{name}</b>"),
        },
    )
    row = await queued(messages, ledger, name="<Ada>", locale="de-AT")

    await sender_of(messages).handle(order_for(row))

    assert provider.calls[0].payload == {
        "to": "person-1@example.com",
        "name": "<Ada>",
        "text": "Alles Gute zum 36., <Ada>!",
        "html": "<b>&lt;Ada&gt;</b>",
    }


# ---- rate limit ------------------------------------------------------------------------------------------------------


async def test_a_rate_limit_holds_over_all_senders(make_messages: MakeMessages, both_ledgers: Ledger) -> None:
    """Ten per second, and two senders that know nothing of each other: eleven intervals take a second at least."""
    provider = Provider()
    messages = make_messages(provider, ledger=both_ledgers, rate_limit=RateLimit(10, 1_000))
    found = await queued(messages, both_ledgers, count=11)
    senders = [sender_of(messages, f"sender-{number}") for number in range(2)]

    began = time.monotonic()
    await asyncio.gather(*(senders[number % 2].handle(order_for(row)) for number, row in enumerate(found)))

    assert time.monotonic() - began >= 0.95
    assert len(provider.delivered) == 11


async def test_two_senders_may_be_the_first_on_a_channel(
    make_messages: MakeMessages, both_ledgers: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the two looks of one the other opens the limit: there is room, so nothing goes back to the broker."""
    provider = Provider()
    messages = make_messages(provider, ledger=both_ledgers, rate_limit=RateLimit(10, 1_000))
    first, second = await queued(messages, both_ledgers, count=2)
    sender = sender_of(messages)
    await sender.handle(order_for(first))
    statements = sender._store.sql
    whole = statements.reserve
    looks = iter([whole.replace("WHERE", "WHERE 1 = 0 AND")])  # as it is seen before the other has written it
    monkeypatch.setattr(type(statements), "reserve", property(lambda _: next(looks, whole)))

    await sender.handle(order_for(second))

    assert len(provider.delivered) == 2


async def test_what_would_wait_long_for_its_slot_goes_back_to_the_broker(
    make_messages: MakeMessages, ledger: Ledger, told: Told
) -> None:
    provider = Provider()
    messages = make_messages(provider, rate_limit=RateLimit(1, 60_000))
    found = await queued(messages, ledger, count=3)
    sender = sender_of(messages)

    results = [await asyncio.gather(sender.handle(order_for(row)), return_exceptions=True) for row in found]

    assert len(provider.calls) == 1
    delays = [error.delay for (error,) in results if isinstance(error, DelayJob)]
    assert len(delays) == 2
    assert all(isinstance(delay, int) and 50_000 < delay <= 60_000 for delay in delays)
    assert len(told.of("messages.limited")) == 2


# ---- faults ----------------------------------------------------------------------------------------------------------


async def test_an_outcome_is_written_when_the_database_is_back(
    make_messages: MakeMessages, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The provider has it: trying to write that down is cheaper than sending again."""
    provider = Provider()
    messages = make_messages(provider)
    row = await queued(messages, ledger)
    write, failures = messages.store.settle, 3

    async def settle(outcomes: Any, **_: Any) -> Any:
        nonlocal failures
        if failures:
            failures -= 1
            raise DatabaseUnavailable("restarting")
        return await write(outcomes)

    monkeypatch.setattr(messages.store, "settle", settle)

    await sender_of(messages).handle(order_for(row))

    assert len(provider.calls) == 1
    assert (await rows(messages))[0].status is MessageStatus.SENT


async def test_a_database_that_stays_away_leaves_the_row_to_its_lease(
    make_messages: MakeMessages, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = make_messages(timeout=50, sender_lease_ms=200)
    row = await queued(messages, ledger)

    async def settle(outcomes: Any, **_: Any) -> Any:
        raise DatabaseUnavailable("away")

    monkeypatch.setattr(messages.store, "settle", settle)

    with pytest.raises(DatabaseUnavailable):
        await sender_of(messages, lease_ms=200).handle(order_for(row))

    assert (await rows(messages))[0].status is MessageStatus.SENDING


def test_a_timeout_must_fit_into_the_lease(make_messages: MakeMessages) -> None:
    with pytest.raises(InvalidOption, match="at most half of the sender's lease of 60000 ms"):
        make_messages(timeout=40_000)


@pytest.mark.requirement("S-27")
async def test_closing_lets_what_is_being_sent_end(make_messages: MakeMessages, ledger: Ledger) -> None:
    provider = Provider()
    provider.gate.clear()
    messages = make_messages(provider)
    await due_now(messages, ledger, 2)
    sender = messages.sender()
    running = asyncio.create_task(sender.run())
    await messages.scheduler().run_once()
    await provider.until(2)

    closing = asyncio.create_task(sender.close())
    await asyncio.sleep(0.05)
    assert not closing.done()
    provider.gate.set()
    await closing
    await running

    assert len(await until_status(messages, 2)) == 2
