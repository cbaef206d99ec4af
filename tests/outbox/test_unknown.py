"""Nobody knows whether the target has it: after a crash, or when no answer came. Each channel has a rule for that."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bullpen.ledger import Died, Ledger, OutboxStatus, Retried
from bullpen.outbox import Outbox, Route
from bullpen.outbox.delivery import is_in_doubt
from bullpen.outbox.delivery import judge_row as judge
from bullpen.ports.channel import (
    Accepted,
    Message,
    NotTried,
    SendResult,
    Unavailable,
    Unknown,
    WhenUnknown,
    when_unknown,
)
from tests.databases import item
from tests.outbox.conftest import MakeOutbox
from tests.outbox.kit import SpyChannel, Told, rows
from tests.outbox.test_judging import row

PENDING, CLAIMED, SENT, FAILED, DEAD = OutboxStatus
RESEND, LOOK_UP, PARK = WhenUnknown


class RuledChannel(SpyChannel):
    """A target with a rule, and a memory that can be asked."""

    def __init__(self, rule: WhenUnknown, *answers: Any) -> None:
        super().__init__(*answers)
        self.when_unknown = rule
        self.asked: list[Message] = []
        self.found: Accepted | Unavailable | Exception | None = None

    async def look_up(self, message: Message) -> Accepted | Unavailable | None:
        self.asked.append(message)
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


async def deliver(outbox: Outbox) -> None:
    async with outbox.dispatcher() as dispatcher:
        await dispatcher.reap()
        await dispatcher.tick()
        await dispatcher.idle()


async def crashed(ledger: Ledger) -> None:
    """A row whose holder died while it was delivering."""
    await ledger.outbox.enqueue(item(backoff=1))
    await ledger.outbox.claim_due_batch("dead-worker", lease_ms=1_000, starting=True)
    ledger.database.clock_offset_ms += 2_000


def outbox_of(make_outbox: MakeOutbox, channel: SpyChannel, **options: Any) -> Outbox:
    return make_outbox({"webhook:*": Route(channel=channel, strategy="direct", **options)}, unknown_types="leave")


async def the_row(ledger: Ledger) -> Any:
    (found,) = await rows(ledger, integration_type="webhook:partnerX")
    return found


@pytest.mark.requirement("X-16", "X-17", "O-4")
@pytest.mark.parametrize("rule", list(WhenUnknown))
async def test_after_a_crash_the_rule_of_the_channel_decides(
    ledger: Ledger, make_outbox: MakeOutbox, rule: WhenUnknown
) -> None:
    channel = RuledChannel(rule)
    channel.found = Accepted("found")
    await crashed(ledger)

    await deliver(outbox_of(make_outbox, channel))
    ledger.database.clock_offset_ms += 1_000
    await deliver(outbox_of(make_outbox, channel))

    after = await the_row(ledger)
    match rule:
        case WhenUnknown.RESEND:
            assert ([m.idempotency_key for m in channel.messages], channel.asked) == (["event-1/webhook:partnerX"], [])
            assert after.status is SENT
        case WhenUnknown.LOOK_UP:
            assert (channel.messages, len(channel.asked)) == ([], 1)
            assert after.status is SENT
        case WhenUnknown.PARK:
            assert (channel.messages, channel.asked) == ([], [])
            assert (after.status, after.error_code) == (DEAD, "UNKNOWN_OUTCOME")


async def test_what_the_target_does_not_have_is_sent(ledger: Ledger, make_outbox: MakeOutbox) -> None:
    channel = RuledChannel(LOOK_UP)
    await crashed(ledger)

    for _ in range(2):
        await deliver(outbox_of(make_outbox, channel))
        ledger.database.clock_offset_ms += 1_000

    assert len(channel.asked) == len(channel.messages) == 1
    assert (await the_row(ledger)).status is SENT


@pytest.mark.parametrize("trouble", [Unavailable("502", "HTTP_502"), RuntimeError("bug")])
async def test_while_nobody_can_tell_nothing_is_sent(
    ledger: Ledger, make_outbox: MakeOutbox, trouble: Unavailable | Exception
) -> None:
    channel = RuledChannel(LOOK_UP)
    channel.found = trouble
    await crashed(ledger)

    for _ in range(3):
        await deliver(outbox_of(make_outbox, channel))
        ledger.database.clock_offset_ms += 60_000

    assert len(channel.asked) >= 2
    assert channel.messages == []
    assert (await the_row(ledger)).error_code == "UNKNOWN_OUTCOME"
    channel.found = Accepted()
    await deliver(outbox_of(make_outbox, channel))
    assert (await the_row(ledger)).status is SENT


@pytest.mark.parametrize("answer", [Unknown("connection lost", "NO_ANSWER"), RuntimeError("bug"), "hang"])
@pytest.mark.parametrize("rule", list(WhenUnknown))
async def test_without_an_answer_the_rule_decides_too(
    ledger: Ledger, make_outbox: MakeOutbox, rule: WhenUnknown, answer: Any
) -> None:
    channel = RuledChannel(rule, *([] if answer == "hang" else [answer]))
    if answer == "hang":
        channel.gate.clear()
    await ledger.outbox.enqueue(item(backoff=1))

    await deliver(outbox_of(make_outbox, channel, timeout_ms=100 if answer == "hang" else 20_000))

    after = await the_row(ledger)
    assert after.attempts == 1
    if rule is PARK:
        assert (after.status, after.error_code) == (DEAD, "UNKNOWN_OUTCOME")
        assert "may have been delivered" in after.last_error
    else:
        assert after.status is FAILED
        assert (after.error_code == "UNKNOWN_OUTCOME") == (rule is LOOK_UP)


async def test_a_redrive_ends_the_doubt(ledger: Ledger, make_outbox: MakeOutbox) -> None:
    """Somebody looked, and says: send it."""
    channel = RuledChannel(PARK, Unknown("connection lost", "NO_ANSWER"))
    stored = await ledger.outbox.enqueue(item())
    await deliver(outbox_of(make_outbox, channel))

    await ledger.outbox.redrive([str(stored.id)], by="ada")
    await deliver(outbox_of(make_outbox, channel))

    assert (await the_row(ledger)).status is SENT
    assert len({message.idempotency_key for message in channel.messages}) == 1


async def test_being_given_back_does_not_end_the_doubt(ledger: Ledger, make_outbox: MakeOutbox) -> None:
    """A destination that was switched off in between must not make a parked message look fresh."""
    channel = RuledChannel(LOOK_UP, Unknown("connection lost", "NO_ANSWER"))
    await ledger.outbox.enqueue(item(backoff=1))
    outbox = outbox_of(make_outbox, channel)
    await deliver(outbox)
    ledger.database.clock_offset_ms += 1_000
    (claimed,) = await ledger.outbox.claim_due_batch("w")
    await ledger.outbox.release(claimed)

    await deliver(outbox)

    assert len(channel.asked) == 1


def test_the_rules_are_pure_decisions() -> None:
    unknown = Unknown("lost", "NO_ANSWER")

    assert judge(row(), unknown, rule=RESEND, random=lambda: 0.0) == Retried("lost", "NO_ANSWER", 60_000)
    assert judge(row(), unknown, rule=LOOK_UP, random=lambda: 0.0) == Retried("lost", "UNKNOWN_OUTCOME", 60_000)
    assert judge(row(), unknown, rule=PARK) == Died("lost; it may have been delivered", "UNKNOWN_OUTCOME")
    assert not is_in_doubt(row(attempts=1, error_code="HTTP_500"))
    assert is_in_doubt(row(attempts=1, error_code="LEASE_EXPIRED"))


def test_a_channel_without_a_rule_is_sent_again_and_one_that_cannot_look_up_parks() -> None:
    cannot = SpyChannel()
    cannot.when_unknown = "look_up"  # type: ignore[attr-defined]  # as a third party's channel might

    assert when_unknown(SpyChannel()) is RESEND
    assert when_unknown(RuledChannel(LOOK_UP)) is LOOK_UP
    assert when_unknown(cannot) is PARK


async def test_two_dispatchers_do_not_send_what_is_in_doubt_twice(
    ledger: Ledger, make_outbox: MakeOutbox, told: Told
) -> None:
    channel = RuledChannel(LOOK_UP)
    await crashed(ledger)
    await deliver(outbox_of(make_outbox, channel))
    ledger.database.clock_offset_ms += 1_000

    await asyncio.gather(*(deliver(outbox_of(make_outbox, channel)) for _ in range(3)))

    assert len(channel.messages) == 1


def _result_types() -> set[type]:
    return set(SendResult.__args__)


def test_there_are_five_answers() -> None:
    assert {kind.__name__ for kind in _result_types()} == {"Accepted", "Refused", "Unavailable", "Unknown", "NotTried"}
    assert NotTried("x").after_ms == 1_000
