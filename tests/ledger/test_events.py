"""Appending events with the business data, and one order in which no reader misses one."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from bullpen.errors import (
    DatabaseUnavailable,
    EventIdTaken,
    InvalidOption,
    LedgerError,
    NotInTransaction,
    UnsafeDatabaseRole,
    WrongVersion,
)
from bullpen.ledger import Ledger
from bullpen.plugins.sources.sql import SqlEvents
from bullpen.ports.source import BEGINNING, NO_STREAM, EventMetadata, NewEvent, SourceEvent
from bullpen.testing.contracts.source import an_event, take
from bullpen.testing.postgres import PostgresServer
from tests.databases import ROLES, MakeLedger, item
from tests.ledger.test_enqueue import async_driver, async_session, driver, session


async def numbers(ledger: Ledger, after: int = BEGINNING) -> list[int]:
    return [event.data["number"] for event in await ledger.events.page(after, 1_000)]


# Positions ----------------------------------------------------------------------------------------------------------


@pytest.mark.many
@pytest.mark.requirement("X-75", "O-4")
async def test_an_event_that_commits_later_is_never_passed_over(postgres_url: str, make_ledger: MakeLedger) -> None:
    """The transaction that inserted first commits last: a number given at the insert would be behind the reader."""
    ledger = make_ledger(postgres_url)
    async with ledger.database.transaction() as early:
        await ledger.events.append(early, "slow", [an_event(1)])
        await ledger.events.append(None, "fast", [an_event(2)])
        (seen,) = await ledger.events.page(BEGINNING, 100)

    behind = await ledger.events.page(seen.position, 100)

    assert seen.data["number"] == 2
    assert [event.data["number"] for event in behind] == [1]


@pytest.mark.requirement("X-75")
async def test_a_slow_writer_holds_up_neither_writers_nor_readers_of_other_streams(
    postgres_url: str, make_ledger: MakeLedger
) -> None:
    ledger = make_ledger(postgres_url)
    async with ledger.database.transaction() as slow:
        await ledger.events.append(slow, "slow", [an_event(1)])

        for number in range(2, 6):
            await ledger.events.append(None, f"fast-{number}", [an_event(number)])

        assert await numbers(ledger) == [2, 3, 4, 5]


async def test_what_was_rolled_back_leaves_no_event_and_no_gap(ledger: Ledger) -> None:
    await ledger.events.append(None, "a", [an_event(1)])
    with contextlib.suppress(ZeroDivisionError):
        async with ledger.database.transaction() as connection:
            await ledger.events.append(connection, "b", [an_event(2)])
            raise ZeroDivisionError
    await ledger.events.append(None, "a", [an_event(3)])

    events = await ledger.events.page(BEGINNING, 100)

    assert [(event.position, event.data["number"]) for event in events] == [(1, 1), (2, 3)]
    assert await ledger.events.head() == 2


@pytest.mark.many
@pytest.mark.requirement("X-75", "O-4")
@pytest.mark.parametrize("seed", [1, 2])
async def test_a_reader_beside_many_writers_gets_all_that_was_committed_once_and_in_the_order_of_streams(
    ledger: Ledger, make_ledger: MakeLedger, seed: int
) -> None:
    """Transactions of random length, some of which are rolled back, and two readers that number what they see."""
    dice, committed = random.Random(seed), []
    database = ledger.database
    url = database.url.render_as_string(hide_password=False)
    writers = 6 if database.is_postgres else 3
    per_writer = 15 if database.is_postgres else 8

    async def write(writer: int) -> None:
        for n in range(per_writer):
            number, stream = writer * 100 + n, f"s-{dice.randrange(4)}"
            try:
                async with database.transaction() as connection:
                    await ledger.events.append(connection, stream, [an_event(number)])
                    if database.is_postgres:
                        await asyncio.sleep(dice.random() / 50)
                    if dice.random() < 0.2:
                        raise ZeroDivisionError
            except ZeroDivisionError:
                continue
            committed.append(number)

    other = SqlEvents(make_ledger(url), poll_ms=5)
    async with contextlib.aclosing(other.subscribe(BEGINNING)) as batches:
        got: list[SourceEvent] = []

        async def read() -> None:
            async for batch in batches:
                got.extend(batch.events)

        reading = asyncio.create_task(read())
        busy = asyncio.create_task(_number_all_the_time(ledger))
        async with asyncio.timeout(50):
            await asyncio.gather(*(write(writer) for writer in range(writers)))
            while len(got) < len(committed):  # noqa: ASYNC110 - the reader tells nobody
                await asyncio.sleep(0.01)
        for task in (reading, busy):
            task.cancel()
        await asyncio.gather(reading, busy, return_exceptions=True)

    assert sorted(event.data["number"] for event in got) == sorted(committed)
    assert [event.position for event in got] == list(range(1, len(got) + 1))
    for stream in {event.stream for event in got}:
        versions = [event.version for event in got if event.stream == stream]
        assert versions == list(range(len(versions)))


async def _number_all_the_time(ledger: Ledger) -> None:
    while True:
        await ledger.events.number()
        await asyncio.sleep(0.003)


async def test_many_events_are_numbered_in_steps(postgres_url: str, make_ledger: MakeLedger) -> None:
    ledger = make_ledger(postgres_url)
    await ledger.events.append(None, "bulk", [an_event(n) for n in range(2_100)])

    assert await ledger.events.head() == 2_100
    assert await ledger.events.number() == 2_100
    assert await ledger.events.number() == 0
    assert await ledger.events.head() == 2_100


# Appending ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opened", [async_session, async_driver])
async def test_events_share_the_fate_of_the_callers_transaction(
    ledger: Ledger, ledger_url: str, opened: Callable[[str], Any]
) -> None:
    async with opened(ledger_url) as connection:
        appended = await ledger.events.append(connection, "order-1", [an_event(1), an_event(2)])
    with contextlib.suppress(ZeroDivisionError):
        async with opened(ledger_url) as connection:
            await ledger.events.append(connection, "order-1", [an_event(3)])
            raise ZeroDivisionError

    assert (appended.version, appended.created) == (1, True)
    assert await numbers(ledger) == [1, 2]


@pytest.mark.parametrize("opened", [session, driver])
async def test_blocking_connections_append_too(ledger: Ledger, ledger_url: str, opened: Callable[[str], Any]) -> None:
    with opened(ledger_url) as connection:
        appended = ledger.events.append_sync(connection, "order-1", [an_event(1)], expected_version=NO_STREAM)
        with pytest.raises(WrongVersion, match="at version 0, not absent"):
            ledger.events.append_sync(connection, "order-1", [an_event(2)], expected_version=NO_STREAM)

    assert appended.version == 0
    assert await numbers(ledger) == [1]


async def test_of_two_decisions_on_one_version_one_wins(ledger: Ledger) -> None:
    await ledger.events.append(None, "order-1", [an_event(0)])

    answers = await asyncio.gather(
        *(ledger.events.append(None, "order-1", [an_event(n)], expected_version=0) for n in range(1, 6)),
        return_exceptions=True,
    )

    won = [answer for answer in answers if not isinstance(answer, BaseException)]
    assert len(won) == 1
    assert {type(answer) for answer in answers if isinstance(answer, BaseException)} == {WrongVersion}
    assert len(await ledger.events.stream("order-1")) == 2


async def test_any_version_lets_all_append_one_after_the_other(ledger: Ledger) -> None:
    await asyncio.gather(*(ledger.events.append(None, "order-1", [an_event(n)]) for n in range(10)))

    assert [event.version for event in await ledger.events.stream("order-1")] == list(range(10))


async def test_a_stream_is_read_in_parts(ledger: Ledger) -> None:
    await ledger.events.append(None, "order-1", [an_event(n) for n in range(5)])
    await ledger.events.append(None, "order-2", [an_event(9)])

    part = await ledger.events.stream("order-1", after=1, limit=2)

    assert [event.data["number"] for event in part] == [2, 3]
    assert await ledger.events.stream("nothing") == []


async def test_an_event_that_is_there_is_recognised_and_an_id_is_never_given_twice(ledger: Ledger) -> None:
    first, second = an_event(1), an_event(2)
    await ledger.events.append(None, "order-1", [first, second])

    again = await ledger.events.append(None, "order-1", [first, second])
    last = await ledger.events.append(None, "order-1", [second])

    assert (again.created, again.version) == (False, 1)
    assert (last.created, last.version) == (False, 1)
    with pytest.raises(EventIdTaken, match="'order-1'"):
        await ledger.events.append(None, "order-2", [second])
    with pytest.raises(EventIdTaken, match="nothing was appended"):
        await ledger.events.append(None, "order-1", [second, an_event(3)])
    assert await numbers(ledger) == [1, 2]


@pytest.mark.requirement("O-6")
@pytest.mark.parametrize(
    "statement", ["UPDATE {} SET event_type = 'x'", "UPDATE {} SET position = 99", "DELETE FROM {}"]
)
async def test_events_are_history(ledger: Ledger, statement: str) -> None:
    await ledger.events.append(None, "order-1", [an_event(1)])
    await ledger.events.number()

    with pytest.raises(LedgerError, match="history"):
        async with ledger.database.transaction() as connection:
            await connection.execute(sa.text(statement.format(ledger.database.table("bullpen_events"))))


@pytest.mark.parametrize(
    ("stream", "events", "options", "told"),
    [
        ("", [an_event()], {}, "stream"),
        ("s" * 201, [an_event()], {}, "at most 200"),
        ("s", [], {}, "at least one event"),
        ("s", ["x"], {}, "NewEvent"),
        ("s", [an_event(type="t" * 121)], {}, "at most 120"),
        ("s", [an_event(type="$system")], {}, "your own event type"),
        ("s", [an_event(), an_event()], {"expected_version": -2}, "expected_version"),
        ("s", [NewEvent(type="t", data={1, 2}, metadata=an_event().metadata)], {}, "data"),
        ("s", [NewEvent(type="t", data="\0", metadata=an_event().metadata)], {}, r"U\+0000"),
        ("s", [NewEvent(type="t", data=1, metadata=an_event().metadata, id="i")] * 2, {}, "different ids"),
    ],
)
async def test_what_cannot_be_stored_is_refused_at_the_door(
    sqlite_url: str, make_ledger: MakeLedger, stream: str, events: list[Any], options: dict[str, Any], told: str
) -> None:
    ledger = make_ledger(sqlite_url)

    with pytest.raises(InvalidOption, match=told):
        async with ledger.database.transaction() as connection:
            await ledger.events.append(connection, stream, events, **options)

    assert await ledger.events.head() == BEGINNING


async def test_a_connection_that_commits_by_itself_is_refused(postgres_url: str, make_ledger: MakeLedger) -> None:
    ledger = make_ledger(postgres_url)
    async with ledger.database.engine.connect() as plain:
        connection = await plain.execution_options(isolation_level="AUTOCOMMIT")

        with pytest.raises(NotInTransaction, match="begin a transaction"):
            await ledger.events.append(connection, "s", [an_event()])


@pytest.mark.requirement("O-71")
async def test_a_tenant_appends_and_sees_its_own_events_and_the_service_sees_all(
    postgres_server: PostgresServer, guarded_database: str, make_ledger: MakeLedger
) -> None:
    def open_as(role: str, duty: str) -> Ledger:
        return make_ledger(postgres_server.url(guarded_database, role=role), roles=ROLES, duty=duty)

    tenants, service = open_as(ROLES.tenant, "tenant"), open_as(ROLES.service, "service")
    await tenants.events.append(None, "order-1", [an_event(1, tenant_id="alice")])
    await tenants.events.append(None, "order-2", [an_event(2, tenant_id="bob")])

    assert [event.data["number"] for event in await tenants.events.stream("order-1", tenant_id="alice")] == [1]
    assert await tenants.events.stream("order-2", tenant_id="alice") == []
    assert await numbers(service) == [1, 2]
    with pytest.raises(UnsafeDatabaseRole, match="another tenant"):
        async with tenants.database.transaction(tenant="alice") as connection:
            await tenants.events.append(connection, "order-3", [an_event(3, tenant_id="bob")])
    await service.check()


async def test_without_notifications_the_reader_looks_by_itself(postgres_url: str, make_ledger: MakeLedger) -> None:
    ledger = make_ledger(postgres_url, notify=False)
    source = SqlEvents(ledger, poll_ms=20)
    async with contextlib.aclosing(source.subscribe(BEGINNING)) as batches:
        waiting = asyncio.create_task(take(batches, 1))
        await asyncio.sleep(0.1)
        await ledger.events.append(None, "s", [an_event(4)])

        (got,), _ = await waiting

    assert got.data["number"] == 4


async def test_a_commit_wakes_the_reader_long_before_it_would_look(ledger: Ledger) -> None:
    source = SqlEvents(ledger, poll_ms=3_600_000)
    async with contextlib.aclosing(source.subscribe(BEGINNING)) as batches:
        waiting = asyncio.create_task(take(batches, 2))
        await ledger.events.append(None, "s", [an_event(1)])
        await asyncio.sleep(0.2)
        await ledger.events.append(None, "s", [an_event(2)])

        got, _ = await waiting

    assert [event.data["number"] for event in got] == [1, 2]


# Checkpoints that several readers share -----------------------------------------------------------------------------


async def test_of_two_readers_with_one_checkpoint_one_moves_it(ledger: Ledger) -> None:
    async with ledger.database.transaction() as connection:
        assert await ledger.checkpoints.advance(connection, "p", None, "1")
    async with ledger.database.transaction() as connection:
        assert not await ledger.checkpoints.advance(connection, "p", None, "1")
    async with ledger.database.transaction() as connection:
        assert await ledger.checkpoints.advance(connection, "p", "1", "5")
    async with ledger.database.transaction() as connection:
        assert not await ledger.checkpoints.advance(connection, "p", "1", "7")

    assert await ledger.checkpoints.list("p") == {"p": "5"}


async def test_the_second_reader_waits_for_the_first_ones_transaction(
    postgres_url: str, make_ledger: MakeLedger
) -> None:
    ledger = make_ledger(postgres_url)

    async def second() -> bool:
        async with ledger.database.transaction() as connection:
            return await ledger.checkpoints.advance(connection, "p", None, "9")

    async with ledger.database.transaction() as connection:
        assert await ledger.checkpoints.advance(connection, "p", None, "3")
        await ledger.enqueuer.enqueue(connection, item())
        waiting = asyncio.create_task(second())
        done, _ = await asyncio.wait([waiting], timeout=0.2)
        assert not done

    assert await waiting is False
    assert await ledger.checkpoints.read("p") == "3"


# What every event carries -------------------------------------------------------------------------------------------


@pytest.mark.requirement("O-27")
def test_metadata_is_stored_under_its_wire_names() -> None:
    stored = EventMetadata(correlation_id="c", source="shop", tenant_id="acme", user_id="u", headers={"a": 1}).to_wire()

    occurred_at = stored.pop("occurredAt")
    assert stored == {
        "correlationId": "c",
        "source": "shop",
        "tenantId": "acme",
        "userId": "u",
        "headers": {"a": 1},
    }
    assert occurred_at.endswith("Z")
    assert EventMetadata.from_wire({**stored, "occurredAt": occurred_at}).to_wire()["occurredAt"] == occurred_at


@pytest.mark.requirement("O-27")
@pytest.mark.parametrize("wrong", [{"correlation_id": ""}, {"source": ""}, {"tenant_id": "t" * 61}, {"headers": [1]}])
def test_metadata_that_lacks_what_is_required_is_refused(wrong: dict[str, Any]) -> None:
    given = {"correlation_id": "c", "source": "shop", **wrong}

    with pytest.raises(InvalidOption):
        EventMetadata(**given)


async def test_a_database_that_is_away_is_said_to_be_away(sqlite_url: str, make_ledger: MakeLedger) -> None:
    ledger = make_ledger(sqlite_url, timeout_ms=200)
    async with ledger.database.engine.connect() as holder:
        await holder.exec_driver_sql("SELECT 1")  # begins, and holds the one place for writers

        with pytest.raises(DatabaseUnavailable):
            await ledger.events.append(None, "s", [an_event()])
