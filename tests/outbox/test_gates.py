"""A destination that is switched off or broken is left alone, and its rows lose nothing by it."""

from __future__ import annotations

import asyncio
import logging

import pytest

from bullpen.delivery.gates import Gates, Pass
from bullpen.errors import InvalidOption
from bullpen.ledger import Ledger, OutboxStatus
from bullpen.outbox import Breaker, Route
from bullpen.ports.channel import Accepted, NotTried, Refused, Unavailable, Unknown
from bullpen.redis import Connection
from tests.databases import MakeLedger, item
from tests.outbox.conftest import MakeOutbox
from tests.outbox.kit import SpyChannel, Told, rows, until_settled

PENDING, CLAIMED, SENT, FAILED, DEAD = OutboxStatus
WHERE = "webhook:partnerX"
BREAKER = Breaker(failures=3, pause_ms=60_000, longest_ms=3_600_000)


def direct(spy: SpyChannel, breaker: Breaker | None = BREAKER) -> dict[str, Route]:
    return {"webhook:*": Route(channel=spy, strategy="direct", breaker=breaker, concurrency=1)}


async def test_nothing_goes_to_a_destination_that_is_switched_off(ledger: Ledger, make_outbox: MakeOutbox) -> None:
    spy = SpyChannel()
    await ledger.destinations.disable(WHERE, by="ada")
    await ledger.outbox.enqueue_many([item(1), item(2, integration_type="webhook:other")])
    outbox = make_outbox(direct(spy))

    async with outbox.dispatcher() as dispatcher:
        await dispatcher.tick()
        await dispatcher.idle()

        assert spy.numbers == [2]
        assert [(row.status, row.attempts) for row in await rows(ledger, integration_type=WHERE)] == [(PENDING, 0)]

    await ledger.destinations.enable(WHERE, by="ada")
    async with make_outbox(direct(spy)).dispatcher() as dispatcher:
        await dispatcher.tick()
        await dispatcher.idle()
        assert spy.numbers == [2, 1]


async def test_jobs_that_wait_for_a_destination_that_was_switched_off_are_given_back(
    ledger: Ledger, make_outbox: MakeOutbox, connection: Connection, told: Told
) -> None:
    """The dispatcher queued them before; a worker must not send them all the same."""
    spy = SpyChannel()
    await ledger.outbox.enqueue_many([item(number) for number in range(5)])
    outbox = make_outbox({"webhook:*": Route(channel=spy)}, connection=connection)
    async with outbox.dispatcher() as dispatcher:
        await dispatcher.tick()
        await dispatcher.idle()
    await ledger.destinations.disable(WHERE, by="ada")

    workers = make_outbox({"webhook:*": Route(channel=spy)}, connection=connection).workers(discover_ms=50)
    await workers.start()
    await told.wait("outbox.delivered", 5)
    await workers.close()

    assert spy.messages == []
    found = await rows(ledger)
    assert {(row.status, row.attempts) for row in found} == {(PENDING, 0)}
    assert all("switched off" in str(row.last_error) for row in found)


async def test_a_destination_that_fails_in_a_row_is_left_alone_for_a_while(
    ledger: Ledger, make_outbox: MakeOutbox, told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    spy = SpyChannel(default=Unavailable("502", "HTTP_502"))
    await ledger.outbox.enqueue_many([item(number) for number in range(10)])
    outbox = make_outbox(direct(spy))

    async with outbox.dispatcher() as dispatcher:
        for _ in range(10):
            await dispatcher.tick()
            await dispatcher.idle()

    assert len(spy.messages) == 3
    counted = [row.attempts for row in await rows(ledger)]
    assert sorted(counted) == [0] * 7 + [1] * 3
    assert [event["state"] for event in told.of("outbox.breaker")] == ["open"]
    assert "breaker of webhook:partnerX is open" in caplog.text


async def test_one_delivery_tries_whether_it_works_again(ledger: Ledger, make_outbox: MakeOutbox, told: Told) -> None:
    spy = SpyChannel(*[Unavailable("502", "HTTP_502")] * 5)
    await ledger.outbox.enqueue_many([item(number, backoff=3_600_000) for number in range(10)])
    outbox = make_outbox({"webhook:*": Route(channel=spy, strategy="direct", breaker=BREAKER, concurrency=5)})
    spy.gate.clear()

    async def pass_by(milliseconds: int) -> int:
        before = len(spy.messages)
        ledger.database.clock_offset_ms += milliseconds
        async with make_outbox({"webhook:*": outbox.router.resolve(WHERE)}).dispatcher() as dispatcher:
            await dispatcher.tick()
            if not before:  # all five have begun before the first fails
                await spy.until(5)
                spy.gate.set()
            await dispatcher.idle()
        return len(spy.messages) - before

    first = await pass_by(0)  # all five places fail: the third opens the breaker, the others had begun
    during = await pass_by(30_000)
    probe = await pass_by(31_000)  # succeeds: the five answers are used up
    after = await pass_by(0)

    assert (first, during, probe) == (5, 0, 1)
    assert after == 4  # all that had not failed: those wait for their own pause
    assert [event["state"] for event in told.of("outbox.breaker")] == ["open", "closed"]


async def test_a_probe_that_fails_keeps_it_closed_for_twice_as_long(ledger: Ledger) -> None:
    gates = Gates(ledger.destinations, clock=lambda: 0.0)
    for _ in range(3):
        entry = await gates.enter(WHERE)
        assert isinstance(entry, Pass)
        await gates.leave(entry, Unknown("?", "TIMEOUT"), BREAKER)
    ledger.database.clock_offset_ms = 61_000
    gates = Gates(ledger.destinations)

    probe = await gates.enter(WHERE)
    second = await gates.enter(WHERE)
    assert probe == Pass(WHERE, is_probe=True)
    await gates.leave(probe, Unavailable("no", "X"), BREAKER)

    assert isinstance(second, NotTried)
    found = (await ledger.destinations.troubled())[WHERE]
    assert (found.state, found.trips) == ("broken", 2)
    assert found.broken_ms > 100_000
    assert isinstance(await gates.enter(WHERE), NotTried)


async def test_rows_for_a_probe_are_handed_on_one_at_a_time(
    ledger: Ledger, make_outbox: MakeOutbox, connection: Connection
) -> None:
    """The worker that tries is in another process: a dispatcher must not queue everything meanwhile."""
    await ledger.destinations.trip(WHERE, pause_ms=1, longest_ms=1)
    ledger.database.clock_offset_ms = 1_000
    await ledger.outbox.enqueue_many([item(number) for number in range(30)])

    outbox, now = make_outbox({"webhook:*": Route()}, connection=connection), [0.0]
    outbox._gates = Gates(ledger.destinations, clock=lambda: now[0])

    async with outbox.dispatcher() as dispatcher:
        for now[0] in (0.0, 0.1, 0.2, 1.1, 1.2):
            await dispatcher.tick()
            await dispatcher.idle()

    assert len([row for row in await rows(ledger) if row.status is CLAIMED]) == 2


async def test_a_probe_that_was_cancelled_lets_another_try(ledger: Ledger) -> None:
    await ledger.destinations.trip(WHERE, pause_ms=1, longest_ms=1)
    ledger.database.clock_offset_ms = 1_000
    gates = Gates(ledger.destinations)

    first = await gates.enter(WHERE)
    assert isinstance(first, Pass)
    await gates.leave(first, None, BREAKER)

    assert await gates.enter(WHERE) == Pass(WHERE, is_probe=True)


@pytest.mark.parametrize("between", [Accepted(), Refused("bad", "HTTP_400")])
async def test_an_answer_of_any_kind_begins_the_count_again(ledger: Ledger, between: Accepted | Refused) -> None:
    """A target that refuses a message is there; only silence and overload open the breaker."""
    gates = Gates(ledger.destinations)

    for result in (*[Unavailable("no", "X")] * 2, between, NotTried("ours"), *[Unavailable("no", "X")] * 2):
        entry = await gates.enter(WHERE)
        assert isinstance(entry, Pass)
        await gates.leave(entry, result, BREAKER)

    assert await ledger.destinations.troubled() == {}


async def test_without_a_breaker_it_is_tried_for_ever(ledger: Ledger, make_outbox: MakeOutbox) -> None:
    spy = SpyChannel(default=Unavailable("502", "HTTP_502"))
    await ledger.outbox.enqueue_many([item(number) for number in range(12)])

    async with make_outbox(direct(spy, breaker=None)).dispatcher() as dispatcher:
        for _ in range(12):
            await dispatcher.tick()
            await dispatcher.idle()

    assert len(spy.messages) == 12


async def test_a_database_that_is_away_closes_nothing(
    make_ledger: MakeLedger, caplog: pytest.LogCaptureFixture
) -> None:
    """The breaker is an advice: without the database nothing is settled anyway."""
    gates = Gates(make_ledger("postgresql://nobody@127.0.0.1:1/none").destinations)

    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            entry = await gates.enter(WHERE)
            assert isinstance(entry, Pass)
            await gates.leave(entry, Unavailable("no", "X"), BREAKER)

    assert "breaker" not in caplog.text


async def test_all_processes_learn_from_one(ledger: Ledger, make_outbox: MakeOutbox) -> None:
    broken, idle = SpyChannel(default=Unavailable("502", "HTTP_502")), SpyChannel()
    await ledger.outbox.enqueue_many([item(number) for number in range(6)])
    async with make_outbox(direct(broken)).dispatcher() as dispatcher:
        for _ in range(3):
            await dispatcher.tick()
            await dispatcher.idle()

    async with make_outbox(direct(idle)).dispatcher() as dispatcher:
        await dispatcher.tick()
        await dispatcher.idle()

    assert len(broken.messages) == 3
    assert idle.messages == []


@pytest.mark.parametrize("name", ["failures", "pause_ms", "longest_ms"])
def test_a_breaker_needs_sensible_numbers(name: str) -> None:
    with pytest.raises(InvalidOption, match=name):
        Breaker(**{name: 0})


async def test_a_test_message_goes_past_the_database(ledger: Ledger, make_outbox: MakeOutbox) -> None:
    spy = SpyChannel()
    outbox = make_outbox(direct(spy))
    await ledger.destinations.disable(WHERE, by="ada")

    answer = await outbox.send_test(WHERE, {"hello": 1}, tenant_id="acme")
    await outbox.send_test(WHERE)

    assert answer == Accepted()
    first, second = spy.messages
    assert (first.event_type, first.payload, first.tenant_id) == ("bullpen.test.v1", {"hello": 1}, "acme")
    assert second.payload == {"test": True}
    assert first.idempotency_key != second.idempotency_key
    assert await rows(ledger) == []


async def test_a_test_message_to_a_target_that_hangs_ends(ledger: Ledger, make_outbox: MakeOutbox) -> None:
    spy = SpyChannel()
    spy.gate.clear()
    outbox = make_outbox({"webhook:*": Route(channel=spy, strategy="direct", timeout_ms=50)})

    assert await asyncio.wait_for(outbox.send_test(WHERE), 10) == Unknown("no answer within 50 ms", "TIMEOUT")


async def test_receipts_tell_what_became_of_a_message(ledger: Ledger, make_outbox: MakeOutbox) -> None:
    spy = SpyChannel(Accepted("id SM1"), Refused("no such number", "21211"))
    stored = await ledger.outbox.enqueue_many([item(1), item(2), item(3, delay=3_600_000)])
    outbox = make_outbox(direct(spy), unknown_types="leave")
    async with outbox.dispatcher() as dispatcher:
        for _ in range(2):
            await dispatcher.tick()
            await dispatcher.idle()
    await until_settled(ledger, 1)

    sent, dead, waiting = [await outbox.receipt(str(entry.id)) for entry in stored]

    assert sent is not None and (sent.status, sent.receipt, sent.sent_at is not None) == (SENT, "id SM1", True)
    assert dead is not None and (dead.status, dead.receipt, dead.error_code) == (DEAD, None, "21211")
    assert waiting is not None and (waiting.status, waiting.attempts) == (PENDING, 0)
    assert await outbox.receipt("0f9d4f3e-0000-4000-8000-000000000001") is None
