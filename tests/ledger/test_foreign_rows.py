"""Rows of the outbox that a program in another language writes: one INSERT with the columns that it knows."""

from __future__ import annotations

import psycopg
import pytest

from bullpen.errors import LedgerError
from bullpen.ledger import Ledger, OutboxStatus
from bullpen.ledger.messages import SqlMessages
from bullpen.testing.postgres import PostgresServer
from tests.contracts.outbox_repository import execute
from tests.databases import ROLES, MakeLedger, item
from tests.ledger.test_wakeups import listening

INSERT = (
    "INSERT INTO {outbox} (source_stream_id, source_event_id, integration_type, event_type, payload) "
    "VALUES (:stream, :event, :target, 'order.paid.v1', '{{\"orderId\": 7}}')"
)


async def insert(ledger: Ledger, event: str = "event-1", target: str = "webhook:partnerX", text: str = INSERT) -> None:
    await execute(ledger, text, stream="order-1", event=event, target=target)


@pytest.mark.requirement("O-10", "O-15", "O-16", "O-17", "O-19")
async def test_a_plain_insert_is_a_whole_row(ledger: Ledger) -> None:
    await insert(ledger)
    await insert(ledger, event="event-2")

    first, second = await ledger.outbox.claim_due_batch("me", 10)
    assert (first.route_key, first.payload, first.max_attempts) == ("webhook:partnerX", {"orderId": 7}, 10)
    assert (first.idempotency_key, second.idempotency_key) == ("event-1/webhook:partnerX", "event-2/webhook:partnerX")
    assert 0 < first.seq < second.seq
    assert first.id != second.id


@pytest.mark.requirement("O-20", "X-73")
async def test_one_event_for_two_targets_is_two_rows_with_keys_of_their_own(ledger: Ledger) -> None:
    await insert(ledger)
    await insert(ledger, target="kafka:orders")

    rows = await ledger.outbox.find()
    assert [row.idempotency_key for row in rows] == ["event-1/webhook:partnerX", "event-1/kafka:orders"]


@pytest.mark.requirement("O-20")
async def test_a_repetition_is_known_whoever_wrote_the_first(ledger: Ledger) -> None:
    await insert(ledger)

    await insert(ledger, text=f"{INSERT} ON CONFLICT DO NOTHING")
    again = await ledger.outbox.enqueue(item(1))

    assert again.created is False
    assert len(await ledger.outbox.find()) == 1


@pytest.mark.requirement("X-73")
async def test_a_time_that_no_datetime_can_be_harms_no_other_row(ledger: Ledger) -> None:
    """`-infinity` is how PostgreSQL writes "at once". The driver could not read it, and no claim ever got a row."""
    past: tuple[str, ...]
    future: tuple[str, ...]
    if ledger.database.is_postgres:
        past, future = ("'-infinity'", "'0044-03-15 BC'"), ("'infinity'", "'33715-01-01'")
    else:
        past, future = (f"{-(10**17)}", "1.5"), (f"{10**17}", "'soon'", "9e999", "x'00'")
    for number, due in enumerate((*past, *future)):
        text = INSERT.replace("payload)", "payload, due_at)").replace("7}}')", f"7}}}}', {due})")
        await insert(ledger, event=f"odd-{number}", text=text)
    left_ms = await ledger.outbox.next_due_ms()
    await insert(ledger)

    claimed = await ledger.outbox.claim_due_batch("me", 10)

    assert left_ms == 0
    assert {row.source_event_id for row in claimed} == {"odd-0", "odd-1", "event-1"}
    waiting = [row for row in await ledger.outbox.find() if row.status is OutboxStatus.PENDING]
    assert [row.due_at.year for row in waiting] == [9999] * len(future)
    assert [count for _, _, count, _ in await ledger.outbox.stats()] == [3, len(future)]
    left_ms = await ledger.outbox.next_due_ms()
    assert left_ms is not None and left_ms > 80_000_000


async def test_a_planned_message_with_such_a_time_keeps_no_other_from_leaving(
    postgres_url: str, make_ledger: MakeLedger
) -> None:
    ledger = make_ledger(postgres_url)
    table = ledger.database.table("bullpen_messages")
    for number, due in enumerate(("-infinity", "infinity", "now")):
        await execute(
            ledger,
            f"INSERT INTO {table} (id, recipient_id, occasion, period, channel, zone, local_at, due_at) VALUES "
            f"(gen_random_uuid(), 'r{number}', 'birthday', '2026', 'email', 'UTC', '2026-01-01T00:00', '{due}')",
        )

    messages = SqlMessages(ledger.database)
    claimed = await messages.claim(ahead_ms=1_000, lease_ms=1_000, limit=10)

    assert len(claimed) == 2
    assert len(await messages.find()) == 3


@pytest.mark.parametrize(("payload", "status"), [("NULL", "'PENDING'"), ("'{{}}'", "'NONSENSE'")])
async def test_what_breaks_a_rule_is_refused(ledger: Ledger, payload: str, status: str) -> None:
    """Only the repetition of an event is nothing to complain about."""
    with pytest.raises(LedgerError, match=r"(?i)null|check"):
        await execute(
            ledger,
            "INSERT INTO {outbox} (source_stream_id, source_event_id, integration_type, event_type, payload, status) "
            f"VALUES ('s', 'e', 'webhook:x', 'x', {payload}, {status}) ON CONFLICT DO NOTHING",
        )


@pytest.mark.requirement("O-20")
async def test_an_event_whose_row_is_gone_is_not_sent_again(ledger: Ledger) -> None:
    """Retention removes rows and keeps their fences; a replay must not send history."""
    await insert(ledger)
    (row,) = await ledger.outbox.claim_due_batch("me")
    await ledger.outbox.mark_sent(row)
    while sum(await ledger.outbox.retire(keep_ms=0, grace_ms=0)):
        pass
    assert await ledger.outbox.find() == []

    await insert(ledger)

    assert await ledger.outbox.find() == []


@pytest.mark.parametrize("route", ["", ", route_key"], ids=["without a route key", "with one"])
async def test_it_wakes_dispatchers(ledger: Ledger, ledger_url: str, make_ledger: MakeLedger, route: str) -> None:
    """On SQLite by its `data_version`, on PostgreSQL by a trigger: nobody who writes a row has to know of NOTIFY."""
    writer = make_ledger(ledger_url)
    text = INSERT.replace(", payload", f", payload{route}").replace("}}')", "}}'" + (", 'r')" if route else ")"))
    async with listening(ledger) as ears:
        await insert(writer, text=text)

        await ears.until(2)


@pytest.mark.requirement("O-14")
async def test_the_tenant_role_may_write_one_for_its_tenant(
    postgres_server: PostgresServer, guarded_database: str, make_ledger: MakeLedger
) -> None:
    with psycopg.connect(postgres_server.url(guarded_database, role=ROLES.tenant)) as connection:
        connection.execute("SELECT set_config('app.current_tenant', 'acme', true)")
        connection.execute(
            "INSERT INTO core_outbox.integration_outbox "
            "(source_stream_id, source_event_id, integration_type, event_type, payload, tenant_id) "
            "VALUES ('order-1', 'event-1', 'webhook:partnerX', 'order.paid.v1', '{}', 'acme')"
        )

    service = make_ledger(postgres_server.url(guarded_database, role=ROLES.service), roles=ROLES)
    assert [(row.tenant_id, row.route_key) for row in await service.outbox.find()] == [("acme", "webhook:partnerX")]
