"""Rows leave when they can, not when somebody happens to look.

Every dispatcher here looks once a minute unless it is woken, and every test waits for less.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from bullpen._kernel import telemetry
from bullpen._kernel.backoff import Backoff
from bullpen.ledger import Ledger, OutboxStatus
from bullpen.ledger._sql import Sql
from bullpen.outbox import DispatcherOptions, Outbox, Route
from bullpen.outbox import dispatcher as dispatcher_module
from bullpen.ports.channel import Refused, Unavailable
from bullpen.redis import Connection
from tests.databases import MakeLedger, item
from tests.outbox.conftest import MakeOutbox
from tests.outbox.kit import SpyChannel, Told, rows, until_settled

SELDOM_MS = 60_000
SOON_S = 10.0


def direct(channel: SpyChannel, **options: Any) -> Route:
    return Route(channel=channel, strategy="direct", **options)


@asynccontextmanager
async def running(outbox: Outbox, told: Told, *, workers: bool = False) -> AsyncIterator[None]:
    """A dispatcher that has looked in vain, and waits to be woken."""
    parts: list[Any] = [outbox.dispatcher(), *([outbox.workers()] if workers else [])]
    for part in parts:
        await part.start()
    try:
        yield
    finally:
        for part in parts:
            await part.close()


async def test_the_next_row_of_a_key_follows_the_settlement_of_the_last(
    ledger: Ledger, make_outbox: MakeOutbox, told: Told
) -> None:
    spy = SpyChannel()
    await ledger.outbox.enqueue_many([item(number, ordering_key="order-1") for number in range(20)])

    async with running(make_outbox({"webhook:*": direct(spy)}, tick_interval_ms=SELDOM_MS), told):
        async with asyncio.timeout(SOON_S):
            await spy.until(20)

    assert spy.numbers == list(range(20))


async def test_the_next_row_of_a_key_follows_one_that_another_process_settled(
    ledger: Ledger, make_outbox: MakeOutbox, connection: Connection, told: Told
) -> None:
    """Queued: whoever settles is a worker, and the claim is the dispatcher's."""
    spy = SpyChannel()
    await ledger.outbox.enqueue_many([item(number, ordering_key="order-1") for number in range(10)])
    outbox = make_outbox({"webhook:partnerX": Route(channel=spy)}, connection=connection, tick_interval_ms=SELDOM_MS)

    async with running(outbox, told, workers=True), asyncio.timeout(SOON_S):
        await spy.until(10)
        await until_settled(ledger, 10)

    assert spy.numbers == list(range(10))


@pytest.mark.many
@pytest.mark.every_loop
async def test_a_batch_that_ends_while_the_next_tick_begins_is_followed_by_the_next(
    ledger: Ledger, make_outbox: MakeOutbox, connection: Connection, told: Told
) -> None:
    """Its places become free after they were counted: nobody is woken by that, so the tick itself must look again."""
    spy = SpyChannel()
    await ledger.outbox.enqueue_many([item(number) for number in range(150)])
    route = Route(channel=spy, concurrency=20)
    outbox = make_outbox(
        {"webhook:partnerX": route}, connection=connection, tick_interval_ms=SELDOM_MS, claim_batch_size=5
    )

    async with running(outbox, told, workers=True), asyncio.timeout(SOON_S * 2):
        await spy.until(150)
        await until_settled(ledger, 150)

    assert sorted(spy.numbers) == list(range(150))


@pytest.mark.every_loop
async def test_a_row_with_a_delay_leaves_at_its_time(ledger: Ledger, make_outbox: MakeOutbox, told: Told) -> None:
    spy = SpyChannel()
    outbox = make_outbox({"webhook:*": direct(spy)}, tick_interval_ms=SELDOM_MS)
    async with running(outbox, told):
        await ledger.outbox.enqueue_many([item(1, delay=300), item(2, delay=150)])
        began = time.monotonic()
        async with asyncio.timeout(SOON_S):
            await spy.until(2)
            assert time.monotonic() - began > 0.1
            await until_settled(ledger, 2)

    assert spy.numbers == [2, 1]


@pytest.mark.every_loop
async def test_a_failed_row_is_tried_again_at_its_time(ledger: Ledger, make_outbox: MakeOutbox, told: Told) -> None:
    spy = SpyChannel(*[Unavailable("503", "HTTP_503")] * 5)
    outbox = make_outbox({"webhook:*": direct(spy)}, tick_interval_ms=SELDOM_MS)
    async with running(outbox, told), asyncio.timeout(SOON_S):
        await ledger.outbox.enqueue(item(backoff=Backoff.fixed(20)))
        await spy.until(6)
        await until_settled(ledger, 1)


async def test_a_row_that_a_worker_failed_is_tried_again_at_its_time(
    ledger: Ledger, make_outbox: MakeOutbox, connection: Connection, told: Told
) -> None:
    spy = SpyChannel(*[Unavailable("503", "HTTP_503")] * 3)
    outbox = make_outbox({"webhook:partnerX": Route(channel=spy)}, connection=connection, tick_interval_ms=SELDOM_MS)
    async with running(outbox, told, workers=True), asyncio.timeout(SOON_S):
        await ledger.outbox.enqueue(item(backoff=Backoff.fixed(20)))
        await spy.until(4)
        await until_settled(ledger, 1)


async def test_a_redriven_row_leaves_at_once(
    ledger: Ledger, ledger_url: str, make_ledger: MakeLedger, make_outbox: MakeOutbox, told: Told
) -> None:
    spy = SpyChannel(Refused("no", "NO"))
    outbox = make_outbox({"webhook:*": direct(spy)}, tick_interval_ms=SELDOM_MS)
    async with running(outbox, told), asyncio.timeout(SOON_S):
        await ledger.outbox.enqueue(item())
        dead = next(row for row in await until_settled(ledger, 1, OutboxStatus.DEAD) if not row.is_announcement)

        await make_ledger(ledger_url).outbox.redrive([dead.id], by="somebody")

        await spy.until(2)
        await until_settled(ledger, 1)


@pytest.mark.cuts_wakeups
async def test_a_row_that_nobody_told_of_is_counted(
    postgres_url: str, make_ledger: MakeLedger, make_outbox: MakeOutbox, told: Told
) -> None:
    """Stored by a program that does not notify, beside a dispatcher that relies on it."""
    spy, ledger, silent = SpyChannel(), make_ledger(postgres_url), make_ledger(postgres_url, notify=False)
    before = telemetry.late_wakeups().get("dispatcher", 0)
    outbox = make_outbox({"webhook:*": direct(spy)}, ledger=ledger, tick_interval_ms=300)
    number = 0
    async with running(outbox, told), asyncio.timeout(6 * SOON_S):
        # Nothing counts before the dispatcher listens, and only a notification shows that it does: so until one counts.
        while telemetry.late_wakeups().get("dispatcher", 0) == before:
            for writer in (ledger, silent):
                number += 1
                await writer.outbox.enqueue(item(number))
                await spy.until(number)
            await asyncio.sleep(0.5)


async def test_rows_are_not_counted_where_nobody_notifies(
    postgres_url: str, make_ledger: MakeLedger, make_outbox: MakeOutbox, told: Told
) -> None:
    """`notify=False` is a choice: then the interval is the way to find rows."""
    spy, silent = SpyChannel(), make_ledger(postgres_url, notify=False)
    before = telemetry.late_wakeups()
    outbox = make_outbox({"webhook:*": direct(spy)}, ledger=silent, tick_interval_ms=300)
    async with running(outbox, told), asyncio.timeout(SOON_S):
        await silent.outbox.enqueue(item(1))
        await spy.until(1)

    assert telemetry.late_wakeups() == before
    assert len(await rows(silent)) == 1


async def test_a_row_left_asleep_by_a_process_that_died_is_woken_by_the_commit_before_it(
    postgres_url: str,
    make_ledger: MakeLedger,
    told: Told,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever settles a row wakes the next one of its key after the commit, if it could not take it along. Here nobody
    does: that process is dead. The sweep that finds everything comes too late for this test."""
    monkeypatch.setattr(dispatcher_module, "_UNPARK_EVERY_S", 3_600.0)
    ledger, spy = make_ledger(postgres_url), SpyChannel()
    await ledger.outbox.enqueue_many([item(number, ordering_key="order-1") for number in range(2)])
    (first,) = await ledger.outbox.claim_due_batch("dead", 1, starting=True)
    assert await ledger.outbox.claim_due_batch("w") == []  # which parks the second
    options = DispatcherOptions(tick_interval_ms=SELDOM_MS)
    outbox = Outbox(ledger, {"webhook:*": direct(spy)}, options=options)
    dispatcher = outbox.dispatcher()
    await dispatcher.reap()  # the next sweep is an hour away

    await dispatcher.start()
    async with contextlib.aclosing(outbox), asyncio.timeout(SOON_S * 2):
        outcome = {"s_id": first.id, "s_fence": first.fence, "s_kind": "SENT", "s_worker": "dead"}
        await ledger.database.fetch(
            Sql("postgresql", ledger.database.schema).settle(notify=True), {"rows": json.dumps([outcome])}
        )
        await spy.until(1)
        await until_settled(ledger, 2)
        await dispatcher.close()

    assert spy.numbers == [1]
    assert [fields["count"] for fields in told.of("outbox.unparked")] == [1]
