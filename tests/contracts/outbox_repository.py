"""What every outbox store promises. Subclass it and give it a `ledger` fixture."""

from __future__ import annotations

import asyncio
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from bullpen.errors import LedgerError
from bullpen.ledger import Lane, Ledger, OutboxRepository, OutboxRow, OutboxStatus, RowOutcome
from bullpen.ledger.records import Died, Released, Retried, Sent, Settlement
from tests.databases import item

PENDING, CLAIMED, SENT, FAILED, DEAD = OutboxStatus


async def execute(ledger: Ledger, statement: str, **parameters: Any) -> list[Any]:
    """Run SQL as anybody could; `{outbox}` and the like stand for the tables."""
    names = {
        "outbox": "integration_outbox",
        "attempts": "integration_outbox_attempts",
        "fences": "integration_outbox_fences",
        "audit": "bullpen_audit",
        "inbox": "bullpen_inbox",
    }
    text = statement.format(**{short: ledger.database.table(name) for short, name in names.items()})
    async with ledger.database.transaction() as connection:
        result = await connection.execute(sa.text(text), parameters)
        return list(result.all()) if result.returns_rows else []


async def claim_one(store: OutboxRepository, **options: Any) -> OutboxRow:
    (row,) = await store.claim_due_batch("worker-1", 1, **options)
    return row


async def must_get(store: OutboxRepository, row_id: str | None) -> OutboxRow:
    assert row_id is not None
    row = await store.get(row_id)
    assert row is not None
    return row


async def settle(store: OutboxRepository, row: OutboxRow, outcome: Any) -> OutboxRow:
    await store.settle([Settlement(row, outcome, "worker-1")])
    return await must_get(store, row.id)


class OutboxRepositoryContract:
    """The database decides about time, identity and who holds a row; callers only ask."""

    @pytest.fixture
    def store(self, ledger: Ledger) -> OutboxRepository:
        return ledger.outbox

    # ---- storing ------------------------------------------------------------------------------------------------

    @pytest.mark.requirement("O-10", "O-13", "O-14", "O-15", "O-16", "O-17", "O-18", "O-19", "O-23")
    async def test_a_new_row_has_the_defaults_of_the_database(self, store: OutboxRepository) -> None:
        before = datetime.now(UTC)

        stored = await store.enqueue(item(headers={"traceparent": "00-1-2-01"}, tenant_id="acme", user_id="u1"))

        row = await must_get(store, stored.id)
        assert re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", row.id)
        assert stored.created
        assert (row.status, row.attempts, row.max_attempts, row.fence) == (PENDING, 0, 10, 0)
        assert (row.payload, row.headers) == (
            {"orderId": 1},
            {"traceparent": "00-1-2-01", "idempotencyKey": "event-1/webhook:partnerX"},
        )
        assert (row.tenant_id, row.user_id, row.correlation_id) == ("acme", "u1", None)
        assert abs(row.created_at - before) < timedelta(seconds=5)
        assert row.due_at == row.created_at == row.updated_at
        assert (row.locked_at, row.locked_by, row.sent_at, row.last_error) == (None, None, None, None)

    @pytest.mark.requirement("O-12", "O-13")
    @pytest.mark.parametrize(
        "payload",
        [{}, [], 0, False, "text", "ü – 🎉", 1.5, [None, True, {"a": [1, 2]}], {"nested": {"deep": [{"x": None}]}}],
    )
    async def test_a_payload_is_any_json_value(self, store: OutboxRepository, payload: Any) -> None:
        stored = await store.enqueue(item(payload=payload))

        assert (await must_get(store, stored.id)).payload == payload

    @pytest.mark.requirement("O-20", "O-82")
    async def test_the_same_source_event_is_stored_once(self, store: OutboxRepository) -> None:
        first = await store.enqueue(item(payload={"version": 1}))

        second = await store.enqueue(item(payload={"version": 2}))

        assert (second.id, second.created) == (first.id, False)
        assert (await must_get(store, first.id)).payload == {"version": 1}

    @pytest.mark.requirement("X-73")
    async def test_one_event_may_go_to_two_integrations(self, store: OutboxRepository) -> None:
        first = await store.enqueue(item(integration_type="kafka:payments"))
        second = await store.enqueue(item(integration_type="webhook:partnerX"))

        assert first.created
        assert second.created
        assert first.id != second.id

    @pytest.mark.requirement("X-122", "O-35")
    async def test_messages_of_one_event_have_different_idempotency_keys(self, store: OutboxRepository) -> None:
        """With one key for both, a target would take the first and swallow the second."""
        together = await store.enqueue_many([item(integration_type="sms:x"), item(integration_type="sms:y")])
        routed = await store.enqueue(item(2, route_key="copy"))
        alone = await store.enqueue(item(3))
        chosen = await store.enqueue(item(4, idempotency_key="mine"))

        apart = [await store.enqueue(item(5, integration_type=f"sms:{target}")) for target in "xy"]

        rows = [await must_get(store, stored.id) for stored in (*together, routed, alone, chosen, *apart)]
        keys = [row.idempotency_key for row in rows]
        assert keys == [
            *("event-1/sms:x", "event-1/sms:y", "event-2/copy", "event-3/webhook:partnerX", "mine"),
            *("event-5/sms:x", "event-5/sms:y"),
        ]

    async def test_many_rows_keep_their_order_and_duplicates_are_told_apart(self, store: OutboxRepository) -> None:
        await store.enqueue(item(3))

        stored = await store.enqueue_many([item(number) for number in (1, 2, 3, 2, 4)])

        assert [entry.created for entry in stored] == [True, True, False, False, True]
        assert stored[3].id == stored[1].id
        rows = [await must_get(store, entry.id) for entry in stored]
        assert rows[0].seq < rows[1].seq < rows[4].seq

    async def test_a_message_may_wait_for_its_time(self, ledger: Ledger, store: OutboxRepository) -> None:
        later = datetime.now(UTC) + timedelta(hours=1)
        await store.enqueue_many([item(1, due_at=later), item(2, delay=timedelta(minutes=30)), item(3)])

        now = await store.claim_due_batch("w")
        ledger.database.clock_offset_ms = 31 * 60_000
        in_half_an_hour = await store.claim_due_batch("w")
        ledger.database.clock_offset_ms = 61 * 60_000
        in_an_hour = await store.claim_due_batch("w")

        due = [[row.payload["orderId"] for row in rows] for rows in (now, in_half_an_hour, in_an_hour)]
        assert due == [[3], [2], [1]]

    @pytest.mark.requirement("X-90", "O-76")
    @pytest.mark.parametrize(
        "change",
        [
            "id = '00000000-0000-4000-8000-000000000000'",
            "source_event_id = 'other'",
            "integration_type = 'sms:x'",
            "payload = '{{}}'",
            "headers = '{{}}'",
            "tenant_id = 'other'",
            "created_at = due_at",
        ],
    )
    async def test_identity_and_content_never_change(
        self, ledger: Ledger, store: OutboxRepository, change: str
    ) -> None:
        """Whoever looks at a row later must see what was promised when it was stored."""
        stored = await store.enqueue(item(delay=1_000))
        before = await must_get(store, stored.id)

        with pytest.raises(LedgerError, match="never change"):
            await execute(ledger, f"UPDATE {{outbox}} SET {change}")

        assert await must_get(store, stored.id) == before

    @pytest.mark.requirement("O-19")
    async def test_every_update_is_dated(self, ledger: Ledger, store: OutboxRepository) -> None:
        stored = await store.enqueue(item())
        before = await must_get(store, stored.id)
        await asyncio.sleep(0.005)  # the clock of the database is what is tested here

        await execute(ledger, "UPDATE {outbox} SET max_attempts = 3")

        assert (await must_get(store, stored.id)).updated_at > before.updated_at

    @pytest.mark.requirement("X-90")
    @pytest.mark.parametrize("table", ["attempts", "fences", "audit"])
    async def test_history_is_only_added_to(self, ledger: Ledger, store: OutboxRepository, table: str) -> None:
        stored = await store.enqueue_many([item(1), item(2)])
        for row in await store.claim_due_batch("w"):
            await store.dead_letter(row, "bad")
        await store.redrive([str(stored[0].id)], by="ada")
        await store.discard([str(stored[1].id)], by="ada")

        with pytest.raises(LedgerError, match="only ever added"):
            await execute(ledger, f"UPDATE {{{table}}} SET tenant_id = 'x'")

    # ---- claiming -----------------------------------------------------------------------------------------------

    @pytest.mark.requirement("O-24", "O-37", "O-38")
    async def test_a_claim_takes_the_oldest_due_rows_and_marks_them(self, store: OutboxRepository) -> None:
        await store.enqueue_many([item(number) for number in range(5)])

        first = await store.claim_due_batch("worker-1", 3, lease_ms=60_000)
        second = await store.claim_due_batch("worker-2", 3)

        assert [row.payload["orderId"] for row in first] == [0, 1, 2]
        assert [row.payload["orderId"] for row in second] == [3, 4]
        row = await must_get(store, first[0].id)
        assert (row.status, row.locked_by, row.fence, row.started_at) == (CLAIMED, "worker-1", 1, None)
        assert row.locked_at is not None
        assert row.locked_until == row.locked_at + timedelta(seconds=60)

    @pytest.mark.requirement("O-37", "O-38", "O-81")
    async def test_claimers_at_the_same_time_never_overlap(self, store: OutboxRepository) -> None:
        await store.enqueue_many([item(number) for number in range(100)])

        async def drain(name: str) -> list[str]:
            mine: list[str] = []
            while rows := await store.claim_due_batch(name, 7):
                mine += [row.id for row in rows]
            return mine

        claims = await asyncio.gather(*(drain(f"worker-{number}") for number in range(4)))

        everything = [row_id for claim in claims for row_id in claim]
        assert len(everything) == len(set(everything)) == 100

    @pytest.mark.requirement("X-77")
    async def test_failed_rows_are_claimed_again_when_due(self, ledger: Ledger, store: OutboxRepository) -> None:
        await store.enqueue(item())
        await store.mark_failed(await claim_one(store), "no answer", delay_ms=60_000)

        at_once = await store.claim_due_batch("w")
        ledger.database.clock_offset_ms = 61_000
        again = await store.claim_due_batch("w")

        assert at_once == []
        assert [(row.attempts, row.status) for row in again] == [(1, CLAIMED)]

    @pytest.mark.requirement("X-88")
    async def test_a_backlog_of_one_channel_leaves_room_for_the_others(self, store: OutboxRepository) -> None:
        await store.enqueue_many([item(number, integration_type="kafka:big") for number in range(50)])
        await store.enqueue_many([item(100, integration_type="webhook:a"), item(101, integration_type="sms:b")])

        types = await store.due_types()
        claimed = await store.claim([Lane(name, 4) for name in types], worker_id="w", lease_ms=1_000)

        assert types == ["kafka:big", "sms:b", "webhook:a"]
        assert [row.integration_type for row in claimed.rows].count("kafka:big") == 4
        assert {row.integration_type for row in claimed.rows} == set(types)
        assert claimed.full_lanes == {("kafka:big", None)}

    @pytest.mark.requirement("X-88")
    async def test_a_backlog_of_one_tenant_leaves_room_for_the_others(self, store: OutboxRepository) -> None:
        await store.enqueue_many([item(number, tenant_id="big") for number in range(50)])
        await store.enqueue_many([item(100, tenant_id="small"), item(101)])

        tenants = await store.due_tenants("webhook:partnerX")
        lanes = [Lane("webhook:partnerX", 2, tenant) for tenant in tenants]
        claimed = await store.claim(lanes, worker_id="w", lease_ms=1_000)

        assert tenants == ["", "big", "small"]
        assert sorted(row.tenant_id or "" for row in claimed.rows) == ["", "big", "big", "small"]
        assert claimed.full_lanes == {("webhook:partnerX", "big")}
        assert await store.due_tenants("webhook:partnerX", after="a", most=1) == ["big"]

    @pytest.mark.requirement("X-88")
    async def test_what_waits_for_later_takes_no_share(self, store: OutboxRepository) -> None:
        """Fifty targets whose rows wait for their retries must not slow down the one that works."""
        await store.enqueue_many([item(1, integration_type="a:later", delay=60_000), item(2, integration_type="b:now")])
        await store.enqueue_many(
            [item(3, tenant_id="later", delay=60_000), item(4, tenant_id="now"), item(5, tenant_id="soon")]
        )

        assert await store.due_types() == ["b:now", "webhook:partnerX"]
        assert await store.due_tenants("webhook:partnerX") == ["now", "soon"]
        assert await store.due_tenants("webhook:partnerX", most=1) == ["now"]

    # ---- settling -----------------------------------------------------------------------------------------------

    @pytest.mark.requirement("O-25", "O-8")
    async def test_a_sent_row_is_done(self, store: OutboxRepository) -> None:
        await store.enqueue(item())
        row = await claim_one(store)

        settled = await store.mark_sent(row)

        stored = await must_get(store, row.id)
        assert settled.status == stored.status == SENT
        assert stored.sent_at is not None
        assert (stored.locked_by, stored.locked_until, stored.attempts) == (None, None, 0)
        assert await store.claim_due_batch("w") == []

    @pytest.mark.requirement("O-25", "O-50", "X-90", "X-83")
    async def test_a_failure_is_counted_dated_and_written_down(self, store: OutboxRepository) -> None:
        await store.enqueue(item())
        row = await claim_one(store, starting=True)

        await store.mark_failed(row, "503 from target", delay_ms=60_000, code="HTTP_503")

        stored = await must_get(store, row.id)
        assert (stored.status, stored.attempts, stored.last_error) == (FAILED, 1, "503 from target")
        assert stored.error_code == "HTTP_503"
        wait = stored.due_at - stored.updated_at
        assert timedelta(seconds=59) < wait <= timedelta(seconds=60)
        (attempt,) = await store.attempts_of(row.id)
        assert (attempt.number, attempt.outcome, attempt.error_code) == (1, "FAILED", "HTTP_503")
        assert attempt.started_at is not None
        assert attempt.finished_at >= attempt.started_at

    @pytest.mark.requirement("O-50", "X-81")
    async def test_the_last_attempt_of_the_row_ends_it(self, ledger: Ledger, store: OutboxRepository) -> None:
        stored = await store.enqueue(item(max_attempts=3))

        for attempt in range(3):
            ledger.database.clock_offset_ms = attempt * 2_000
            settled = await store.mark_failed(await claim_one(store), "no", delay_ms=1_000)

        assert (settled.status, settled.attempts) == (DEAD, 3)
        assert [entry.outcome for entry in await store.attempts_of(str(stored.id))] == ["FAILED", "FAILED", "DEAD"]
        assert (await must_get(store, stored.id)).dead_at is not None

    @pytest.mark.requirement("O-25")
    async def test_a_permanent_error_ends_it_at_once(self, store: OutboxRepository) -> None:
        await store.enqueue(item())

        settled = await store.dead_letter(await claim_one(store), "400 bad request", code="HTTP_400")

        assert (settled.status, settled.attempts) == (DEAD, 1)

    @pytest.mark.requirement("X-80", "O-25")
    async def test_a_released_row_has_lost_nothing(self, ledger: Ledger, store: OutboxRepository) -> None:
        await store.enqueue(item())
        first = await settle(store, await claim_one(store), Released())
        failed = await settle(store, await claim_one(store), Retried("no", "X", 0))
        again = await settle(store, await claim_one(store), Released(5_000, "queue away"))

        assert (first.status, first.attempts, first.locked_by) == (PENDING, 0, None)
        assert (failed.status, failed.attempts) == (FAILED, 1)
        assert (again.status, again.attempts, again.last_error) == (FAILED, 1, "queue away")
        assert await store.claim_due_batch("w") == []
        assert len(await store.attempts_of(first.id)) == 1

    @pytest.mark.requirement("X-81", "X-16")
    async def test_a_late_settlement_changes_nothing(self, store: OutboxRepository) -> None:
        """A worker that was thought dead comes back after another has taken over."""
        await store.enqueue(item())
        stale = await claim_one(store)
        fresh = (await store.begin([stale.id], worker_id="worker-2", lease_ms=1_000))[stale.id]

        late = await store.mark_failed(stale, "too late", delay_ms=0)
        good = await store.mark_sent(fresh)
        again = await store.dead_letter(fresh, "after the fact")

        assert (late.status, good.status, again.status) == (None, SENT, None)
        assert (await must_get(store, stale.id)).status is SENT

    @pytest.mark.requirement("X-81")
    async def test_sent_is_final_whoever_tries(self, ledger: Ledger, store: OutboxRepository) -> None:
        await store.enqueue(item())
        await store.mark_sent(await claim_one(store))

        with pytest.raises(LedgerError, match="stays SENT"):
            await execute(ledger, "UPDATE {outbox} SET status = 'PENDING'")

    @pytest.mark.requirement("O-53", "X-8")
    async def test_an_error_is_kept_as_one_bounded_line(self, store: OutboxRepository) -> None:
        await store.enqueue(item())

        row = await settle(store, await claim_one(store), Died("line one\n  line two\0 " + "x" * 9_000, "X"))

        assert row.last_error is not None
        assert row.last_error.startswith("line one line two x")
        assert len(row.last_error) == 5_000

    async def test_outcomes_of_a_batch_do_not_mix(self, store: OutboxRepository) -> None:
        await store.enqueue_many([item(number) for number in range(4)])
        rows = await store.claim_due_batch("w")
        outcomes: list[RowOutcome] = [Sent(), Retried("no", "A", 1_000), Died("never", "B"), Released()]

        settled = await store.settle(
            [Settlement(row, outcome, "w") for row, outcome in zip(rows, outcomes, strict=True)]
        )

        assert [entry.status for entry in settled] == [SENT, FAILED, DEAD, PENDING]
        assert [entry.attempts for entry in settled] == [0, 1, 1, 0]

    # ---- leases -------------------------------------------------------------------------------------------------

    @pytest.mark.requirement("X-76")
    async def test_only_claims_whose_lease_ran_out_are_expired(self, ledger: Ledger, store: OutboxRepository) -> None:
        await store.enqueue_many([item(1), item(2)])
        short = await claim_one(store, lease_ms=1_000)
        await claim_one(store, lease_ms=60_000)

        nobody = await store.expired()
        ledger.database.clock_offset_ms = 2_000
        expired = await store.expired()

        assert nobody == []
        assert [row.id for row in expired] == [short.id]

    @pytest.mark.requirement("X-76", "O-4")
    async def test_a_row_whose_claim_ran_out_in_the_queue_is_begun_by_its_job(self, store: OutboxRepository) -> None:
        """Behind a long queue every claim runs out before its turn; if its job then did nothing, nobody ever would."""
        await store.enqueue_many([item(1), item(2), item(3, ordering_key="k")])
        free, later, ordered = await store.claim_due_batch("dispatcher")
        await store.release(free)
        await store.release(later, delay_ms=600_000)
        await store.release(ordered)
        ids = [free.id, later.id, ordered.id]

        begun = await store.begin(ids, worker_id="worker", lease_ms=30_000)
        twice = await store.begin(ids, worker_id="other", lease_ms=30_000)
        settled = await store.mark_sent(begun[free.id])

        assert set(begun) == {free.id}
        assert begun[free.id].status is CLAIMED
        assert begun[free.id].fence > free.fence
        assert twice == {}
        assert settled.status is OutboxStatus.SENT

    @pytest.mark.requirement("X-76", "X-16")
    async def test_a_delivery_begins_once_per_claim(self, store: OutboxRepository) -> None:
        await store.enqueue_many([item(1), item(2)])
        claimed, pending = await claim_one(store), (await store.find(status=PENDING))[0]
        ids = [claimed.id, pending.id, "00000000-0000-4000-8000-000000000000", "no id"]

        begun = await store.begin(ids, worker_id="worker-2", lease_ms=30_000)
        twice = await store.begin(ids, worker_id="worker-3", lease_ms=30_000)

        assert set(begun) == {claimed.id}
        assert begun[claimed.id].fence == claimed.fence + 1
        assert begun[claimed.id].locked_by == "worker-2"
        assert begun[claimed.id].started_at is not None
        assert twice == {}
        assert await store.statuses(ids) == {claimed.id: CLAIMED, pending.id: PENDING}

    async def test_a_lease_may_be_changed_until_the_delivery_begins(
        self, ledger: Ledger, store: OutboxRepository
    ) -> None:
        await store.enqueue_many([item(1), item(2)])
        waiting, begun = await store.claim_due_batch("w", 2, lease_ms=600_000)
        await store.begin([begun.id], worker_id="w", lease_ms=600_000)

        await store.extend([waiting, begun], 1_000)

        ledger.database.clock_offset_ms = 2_000
        assert [row.id for row in await store.expired()] == [waiting.id]

    # ---- order --------------------------------------------------------------------------------------------------

    async def test_rows_of_one_key_leave_one_after_the_other(self, ledger: Ledger, store: OutboxRepository) -> None:
        await store.enqueue_many([item(number, ordering_key="order-1") for number in range(3)])
        await store.enqueue(item(9, ordering_key="order-2"))
        await store.enqueue(item(10, ordering_key="order-1", integration_type="sms:x"))

        first = await store.claim_due_batch("w", 100)
        while_in_flight = await store.claim_due_batch("w", 100)
        head = next(row for row in first if row.payload["orderId"] == 0)
        await store.mark_failed(head, "again", delay_ms=10_000)
        while_it_waits = await store.claim_due_batch("w", 100)
        ledger.database.clock_offset_ms = 11_000
        retried = await claim_one(store)
        await store.mark_sent(retried)
        (second,) = await store.claim_due_batch("w", 100)
        await store.dead_letter(second, "broken")
        (third,) = [row for row in await store.claim_due_batch("w", 100) if not row.is_announcement]

        assert sorted(row.payload["orderId"] for row in first) == [0, 9, 10]
        assert (while_in_flight, while_it_waits) == ([], [])
        assert [row.payload["orderId"] for row in (retried, second, third)] == [0, 1, 2]

    async def test_two_rows_of_one_key_are_never_in_flight(self, ledger: Ledger, store: OutboxRepository) -> None:
        """The index holds even against somebody who does not ask who is first."""
        await store.enqueue_many([item(number, ordering_key="order-1") for number in range(2)])
        await claim_one(store)

        with pytest.raises(LedgerError, match=r"ux_outbox_in_flight|UNIQUE constraint failed"):
            await execute(ledger, "UPDATE {outbox} SET status = 'CLAIMED'")

    async def test_many_claimers_keep_the_order_of_every_key(self, store: OutboxRepository) -> None:
        await store.enqueue_many([item(number, ordering_key=f"key-{number % 5}") for number in range(50)])
        seen: list[tuple[str, int]] = []
        in_flight: set[str] = set()

        async def work(name: str) -> None:
            while len(seen) < 50:
                for row in await store.claim_due_batch(name, 3):
                    assert row.ordering_key is not None
                    assert row.ordering_key not in in_flight
                    in_flight.add(row.ordering_key)
                    seen.append((row.ordering_key, row.payload["orderId"]))
                    await asyncio.sleep(0)
                    in_flight.discard(row.ordering_key)
                    await store.mark_sent(row)
                await store.unpark()

        await asyncio.wait_for(asyncio.gather(*(work(f"worker-{number}") for number in range(3))), 30)

        for key in {key for key, _ in seen}:
            numbers = [number for other, number in seen if other == key]
            assert numbers == sorted(numbers)

    async def test_the_next_of_a_key_is_taken_with_the_outcome_of_the_one_before_it(
        self, ledger: Ledger, store: OutboxRepository
    ) -> None:
        """Claimed, begun and never in between: whoever settles goes on, also over rows that somebody has parked."""
        await store.enqueue_many([item(number, ordering_key="order-1") for number in range(4)])
        row = await claim_one(store, starting=True)
        assert await store.claim_due_batch("other") == []  # parks the others

        numbers = [row.payload["orderId"]]
        outcomes: list[RowOutcome] = [Sent(), Died("no", "NO"), Sent(), Sent()]
        for outcome in outcomes:
            (settled,) = await store.settle([Settlement(row, outcome, "worker-1", 60_000)])
            assert settled.status is (SENT if isinstance(outcome, Sent) else DEAD)
            assert [each for each in await store.claim_due_batch("other") if not each.is_announcement] == []
            if settled.next is None:
                break
            row = settled.next
            assert (row.status, row.locked_by, row.parked) == (CLAIMED, "worker-1", False)
            assert row.started_at is not None
            numbers.append(row.payload["orderId"])

        assert numbers == [0, 1, 2, 3]
        assert (await must_get(store, row.id)).status is SENT
        assert [attempt.outcome for attempt in await store.attempts_of(row.id)] == ["SENT"]

    async def test_only_an_end_takes_the_next_of_a_key_and_only_when_that_is_due(
        self, ledger: Ledger, store: OutboxRepository
    ) -> None:
        await store.enqueue(item(0, ordering_key="order-1"))
        await store.enqueue(item(1, ordering_key="order-1", delay=60_000))
        first = await claim_one(store)

        (failed,) = await store.settle([Settlement(first, Retried("503", "X", 0), "w", 60_000)])
        again = await claim_one(store)
        (sent,) = await store.settle([Settlement(again, Sent(), "w", 60_000)])
        (late,) = await store.settle([Settlement(first, Sent(), "w", 60_000)])

        assert (failed.status, failed.next) == (FAILED, None)
        assert (again.id, sent.status, sent.next) == (first.id, SENT, None)
        assert (late.status, late.next) == (None, None)
        ledger.database.clock_offset_ms = 61_000
        assert [row.payload["orderId"] for row in await store.claim_due_batch("w")] == [1]

    async def test_rows_of_a_key_are_written_with_the_claimed_one_before_them(
        self, ledger: Ledger, store: OutboxRepository
    ) -> None:
        """One commit for many: nobody else claims them while the first is claimed, parked or not."""
        await store.enqueue_many([item(number, ordering_key="order-1") for number in range(6)])
        await store.enqueue(item(6, ordering_key="order-1", delay=60_000))
        head = await claim_one(store, starting=True)
        assert await store.claim_due_batch("other") == []  # parks the others

        behind = await store.followers(head, 10)
        if not ledger.database.is_postgres:
            assert behind == []
            return
        run = tuple((row, Sent(f"r-{row.payload['orderId']}")) for row in behind[:3])
        (settled,) = await store.settle([Settlement(head, Sent(), "worker-1", 60_000, run)])

        assert [row.payload["orderId"] for row in behind] == [1, 2, 3, 4, 5]
        assert [settled.status, *(each.status for each in settled.run)] == [SENT] * 4
        assert settled.next is not None and settled.next.payload["orderId"] == 4
        assert (settled.next.status, settled.next.parked) == (CLAIMED, False)
        for row, _ in run:
            stored = await must_get(store, row.id)
            assert (stored.status, stored.parked, stored.fence, stored.attempts) == (SENT, False, row.fence + 1, 0)
            (attempt,) = await store.attempts_of(row.id)
            assert (attempt.outcome, attempt.worker, attempt.receipt) == (
                "SENT",
                "worker-1",
                f"r-{row.payload['orderId']}",
            )

    async def test_the_last_of_a_run_may_fail_and_holds_up_its_key(
        self, ledger: Ledger, store: OutboxRepository
    ) -> None:
        await store.enqueue_many([item(number, ordering_key="order-1") for number in range(4)])
        head = await claim_one(store, starting=True)
        behind = await store.followers(head, 2)
        if not behind:
            return

        run = ((behind[0], Sent()), (behind[1], Retried("503", "HTTP_503", 60_000)))
        (settled,) = await store.settle([Settlement(head, Sent(), "w", 60_000, run)])

        assert [each.status for each in settled.run] == [SENT, FAILED]
        assert settled.next is None
        failed = await must_get(store, behind[1].id)
        assert (failed.attempts, failed.error_code, failed.parked) == (1, "HTTP_503", False)
        assert await store.claim_due_batch("w") == []
        ledger.database.clock_offset_ms = 61_000
        assert (await claim_one(store)).id == failed.id

    async def test_nothing_of_a_run_is_written_by_one_who_lost_the_claim(
        self, ledger: Ledger, store: OutboxRepository
    ) -> None:
        """Another holder has the first row, and will send the others behind it."""
        await store.enqueue_many([item(number, ordering_key="order-1") for number in range(4)])
        head = await claim_one(store, starting=True)
        behind = await store.followers(head, 2)
        if not behind:
            return
        await store.settle([Settlement(head, Released(), "reaper")])
        (again,) = await store.claim_due_batch("other", 10)

        run = ((behind[0], Sent()), (behind[1], Sent()))
        (settled,) = await store.settle([Settlement(head, Sent(), "w", 60_000, run)])

        assert [settled.status, settled.next, *(each.status for each in settled.run)] == [None, None, None, None]
        assert [(await must_get(store, row.id)).status for row in behind] == [PENDING, PENDING]
        assert (await must_get(store, head.id)).fence == again.fence

    async def test_rows_that_were_tried_before_are_no_followers(self, ledger: Ledger, store: OutboxRepository) -> None:
        await store.enqueue_many([item(number, ordering_key="order-1") for number in range(3)])
        head = await claim_one(store, starting=True)
        await execute(
            ledger, "UPDATE {outbox} SET attempts = 1, status = 'FAILED' WHERE seq = (SELECT max(seq) FROM {outbox})"
        )

        behind = await store.followers(head, 10)

        assert [row.payload["orderId"] for row in behind] == ([1] if ledger.database.is_postgres else [])

    async def test_many_holders_take_the_next_of_every_key_in_order(self, store: OutboxRepository) -> None:
        """Beside others that claim, and rows that are stored meanwhile, no two of a key are in flight and none is
        left behind."""
        await store.enqueue_many([item(number, ordering_key=f"key-{number % 3}") for number in range(30)])
        seen: list[tuple[str, int]] = []
        in_flight: set[str] = set()

        async def deliver(row: OutboxRow, name: str) -> None:
            following: OutboxRow | None = row
            while following is not None:
                row, key = following, str(following.ordering_key)
                assert key not in in_flight
                in_flight.add(key)
                seen.append((key, row.payload["orderId"]))
                await asyncio.sleep(0)
                in_flight.discard(key)
                (settled,) = await store.settle([Settlement(row, Sent(), name, 60_000)])
                following = settled.next

        async def work(name: str) -> None:
            while len(seen) < 60:
                for row in await store.claim_due_batch(name, 3):
                    await deliver(row, name)
                await store.unpark()

        async def add() -> None:
            for number in range(30, 60):
                await store.enqueue(item(number, ordering_key=f"key-{number % 3}"))

        await asyncio.wait_for(asyncio.gather(add(), *(work(f"worker-{number}") for number in range(3))), 60)

        assert len(seen) == 60
        for key in {key for key, _ in seen}:
            numbers = [number for other, number in seen if other == key]
            assert numbers == sorted(numbers)

    async def test_begin_may_leave_the_content_where_it_is(self, store: OutboxRepository) -> None:
        await store.enqueue(item(1, headers={"a": "b"}))
        row = await claim_one(store)

        begun = (await store.begin([row.id], worker_id="w", lease_ms=60_000, content=False))[row.id]

        assert begun._replace(payload_json=row.payload_json, headers_json=row.headers_json).headers == row.headers
        assert (begun.payload_json, begun.headers_json, begun.fence) == ("", None, row.fence + 1)

    async def test_a_parked_row_whose_predecessor_is_gone_is_found(
        self, ledger: Ledger, store: OutboxRepository
    ) -> None:
        await store.enqueue_many([item(number, ordering_key="order-1") for number in range(2)])
        first = await claim_one(store)
        await store.claim_due_batch("w")
        await store.mark_sent(first)
        await execute(ledger, "UPDATE {outbox} SET parked = true WHERE status = 'PENDING'")

        parked = await store.claim_due_batch("w")
        woken = await store.unpark()

        assert (parked, woken) == ([], 1)
        assert (await claim_one(store)).payload == {"orderId": 1}

    # ---- the dead -----------------------------------------------------------------------------------------------

    @pytest.mark.requirement("X-91", "O-61")
    async def test_the_death_of_a_row_is_announced_through_the_outbox(self, store: OutboxRepository) -> None:
        stored = await store.enqueue(item(tenant_id="acme", correlation_id="c-1", payload={"secret": "x"}))

        await store.dead_letter(await claim_one(store), "400 bad request", code="HTTP_400")

        announcement = await claim_one(store)
        assert announcement.integration_type == "bullmq:outbox.dead"
        assert announcement.event_type == "outbox.dead.v1"
        assert (announcement.tenant_id, announcement.correlation_id) == ("acme", "c-1")
        assert announcement.payload == {
            "outboxId": stored.id,
            "integrationType": "webhook:partnerX",
            "eventType": "order.paid.v1",
            "sourceStreamId": "order-1",
            "sourceEventId": "event-1",
            "attempts": 1,
            "errorCode": "HTTP_400",
            "lastError": "400 bad request",
        }

    @pytest.mark.requirement("X-91")
    async def test_an_announcement_that_dies_is_not_announced(self, store: OutboxRepository) -> None:
        await store.enqueue(item())
        await store.dead_letter(await claim_one(store), "bad")

        await store.dead_letter(await claim_one(store), "nobody listens")

        assert await store.claim_due_batch("w") == []
        assert (await store.counts())[DEAD] == 2

    @pytest.mark.requirement("X-40", "X-91")
    async def test_a_redriven_row_starts_again_with_its_identity(self, ledger: Ledger, store: OutboxRepository) -> None:
        stored = await store.enqueue(item(max_attempts=2, tenant_id="acme"))
        await store.dead_letter(await claim_one(store), "bad", code="HTTP_400")
        before = await must_get(store, stored.id)

        done = await store.redrive([before.id], by="ada@example.com")
        repeated = await store.redrive([before.id], by="ada@example.com")

        after = await must_get(store, stored.id)
        assert (done, repeated) == ([before.id], [])
        assert (after.status, after.attempts, after.idempotency_key) == (PENDING, 0, before.idempotency_key)
        ((actor, action, subject, tenant),) = await execute(
            ledger, "SELECT actor, action, subject, tenant_id FROM {audit}"
        )
        assert (actor, action, subject, tenant) == ("ada@example.com", "outbox.redrive", before.id, "acme")
        claimed = {row.id: row for row in await store.claim_due_batch("w")}
        await store.dead_letter(claimed[before.id], "still bad")
        announcements = await store.find(integration_type="bullmq:outbox.dead")
        assert len(announcements) == 2

    @pytest.mark.requirement("X-40", "X-87")
    async def test_a_discarded_row_is_gone_but_its_event_does_not_come_back(
        self, ledger: Ledger, store: OutboxRepository
    ) -> None:
        stored = await store.enqueue_many([item(1), item(2)])
        await store.dead_letter(await claim_one(store), "bad")

        done = await store.discard([str(entry.id) for entry in stored], by="ada")

        assert done == [stored[0].id]
        assert await store.get(str(stored[0].id)) is None
        assert await store.attempts_of(str(stored[0].id)) == []
        assert (await store.enqueue(item(1))).created is False
        assert len(await execute(ledger, "SELECT id FROM {audit} WHERE action = 'outbox.discard'")) == 1

    async def test_a_person_may_know_that_a_dead_row_arrived(self, ledger: Ledger, store: OutboxRepository) -> None:
        stored = await store.enqueue(item(tenant_id="acme"))
        await store.dead_letter(await claim_one(store), "no answer", code="UNKNOWN_OUTCOME")

        done = await store.confirm([str(stored.id)], by="ada")
        repeated = await store.confirm([str(stored.id)], by="ada")

        row = await must_get(store, stored.id)
        assert (done, repeated) == ([stored.id], [])
        assert (row.status, row.dead_at, row.sent_at is not None) == (SENT, None, True)
        assert await execute(ledger, "SELECT actor, action FROM {audit}") == [("ada", "outbox.confirm")]

    # ---- sending again ------------------------------------------------------------------------------------------

    @pytest.mark.requirement("O-76")
    async def test_a_replay_sends_copies_and_leaves_history_alone(
        self, ledger: Ledger, store: OutboxRepository
    ) -> None:
        stored = await store.enqueue_many([item(1, tenant_id="acme", correlation_id="c"), item(2), item(3)])
        first, second, _ = await store.claim_due_batch("w")
        await store.mark_sent(first)
        await store.mark_sent(second)
        ids = [str(entry.id) for entry in stored]

        copies = await store.replay(ids, by="ada", label="march")
        again = await store.replay(ids, by="ada", label="march")
        renewed = await store.replay(ids[:1], by="ada", label="april", new_key=True)

        originals = [await must_get(store, row_id) for row_id in ids]
        assert [row.status for row in originals] == [SENT, SENT, CLAIMED]
        rows = [await must_get(store, row_id) for row_id in copies]
        assert again == []
        assert [(row.payload, row.status, row.idempotency_key) for row in rows] == [
            ({"orderId": 1}, PENDING, originals[0].idempotency_key),
            ({"orderId": 2}, PENDING, originals[1].idempotency_key),
        ]
        assert (rows[0].tenant_id, rows[0].correlation_id, rows[0].headers["replayOf"]) == ("acme", "c", ids[0])
        assert (await must_get(store, renewed[0])).idempotency_key == f"{originals[0].idempotency_key}/april"
        actions = await execute(ledger, "SELECT DISTINCT action, actor FROM {audit}")
        assert actions == [("outbox.replay", "ada")]

    async def test_copies_of_long_routes_stay_apart(self, store: OutboxRepository) -> None:
        routes = [f"{'r' * 119}{end}" for end in "ab"]
        stored = await store.enqueue_many([item(1, route_key=route) for route in routes])
        for row in await store.claim_due_batch("w"):
            await store.mark_sent(row)

        copies = await store.replay([str(entry.id) for entry in stored], by="ada", label="again")

        assert len(copies) == 2

    @pytest.mark.requirement("X-90")
    async def test_what_the_target_answered_is_kept_with_the_attempt(self, store: OutboxRepository) -> None:
        stored = await store.enqueue(item())
        row = await claim_one(store)

        await store.settle([Settlement(row, Sent("id SM\n123" + "x" * 600), "w")])

        (attempt,) = await store.attempts_of(str(stored.id))
        assert attempt.receipt is not None
        assert attempt.receipt.startswith("id SM 123") and len(attempt.receipt) <= 500
        assert (attempt.outcome, attempt.error) == ("SENT", None)

    # ---- retention ----------------------------------------------------------------------------------------------

    @pytest.mark.requirement("X-87")
    async def test_retention_removes_rows_and_keeps_their_fences(self, ledger: Ledger, store: OutboxRepository) -> None:
        await store.enqueue_many([item(number) for number in range(5)])
        for row in await store.claim_due_batch("w", 3):
            await store.mark_sent(row)
        day, hour = 86_400_000, 3_600_000

        too_young = await store.retire(keep_ms=day, grace_ms=hour)
        ledger.database.clock_offset_ms = day + 1_000
        fenced = await store.retire(keep_ms=day, grace_ms=hour, limit=2)
        rest = await store.retire(keep_ms=day, grace_ms=hour, limit=2)
        ledger.database.clock_offset_ms = day + hour + 2_000
        deleted = [await store.retire(keep_ms=day, grace_ms=hour, limit=2) for _ in range(3)]

        assert too_young == (0, 0)
        assert (fenced, rest) == ((2, 0), (1, 0))
        assert deleted == [(0, 2), (0, 1), (0, 0)]
        assert len(await store.find()) == 2
        replayed = await store.enqueue_many([item(number) for number in range(5)])
        assert [entry.created for entry in replayed] == [False] * 5
        assert [entry.id is None for entry in replayed] == [True, True, True, False, False]

    # ---- looking ------------------------------------------------------------------------------------------------

    async def test_rows_are_found_by_what_one_asks_for(self, store: OutboxRepository) -> None:
        await store.enqueue_many([item(number, tenant_id="acme" if number % 2 else None) for number in range(6)])
        await store.enqueue(item(10, integration_type="sms:x"))
        await store.dead_letter(await claim_one(store), "bad", code="HTTP_400")

        dead = await store.find(status=DEAD, error_code="HTTP_400")
        acme = await store.find(tenant_id="acme", integration_type="webhook:partnerX")
        page = await store.find(limit=2)
        next_page = await store.find(limit=2, after_id=page[-1].id)
        old = await store.find(before=datetime.now(UTC) - timedelta(hours=1))
        new = await store.find(since=datetime.now(UTC) - timedelta(hours=1), limit=100)
        newer = await store.find(since=datetime.now(UTC) + timedelta(hours=1))

        assert [row.payload["orderId"] for row in dead] == [0]
        assert [row.payload["orderId"] for row in acme] == [1, 3, 5]
        assert [row.payload["orderId"] for row in (*page, *next_page)] == [0, 1, 2, 3]
        assert (old, newer, len(new)) == ([], [], 8)
        assert await store.get("no id") is None

    @pytest.mark.requirement("O-69")
    async def test_counts_and_statistics_leave_history_out(self, store: OutboxRepository) -> None:
        await store.enqueue_many([item(number) for number in range(4)])
        rows = await store.claim_due_batch("w", 3)
        await store.mark_sent(rows[0])
        await store.mark_failed(rows[1], "no", delay_ms=1_000)

        counts, stats = await store.counts(), await store.stats()

        assert counts == {PENDING: 1, CLAIMED: 1, FAILED: 1, DEAD: 0}
        assert [(name, status, count) for name, status, count, _ in stats] == [
            ("webhook:partnerX", CLAIMED, 1),
            ("webhook:partnerX", FAILED, 1),
            ("webhook:partnerX", PENDING, 1),
        ]
