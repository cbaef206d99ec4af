"""Dead rows behind the same interface as every other store of dead letters."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bullpen.errors import DeadLetterNotFound
from bullpen.ledger import Ledger, OutboxRow, OutboxStatus
from bullpen.outbox import OutboxDeadLetters
from bullpen.ports.dead_letters import DeadLetter, DeadLetterFilter, DeadLetterStore
from tests.contracts.outbox_repository import execute
from tests.databases import item
from tests.outbox.kit import rows

PENDING, CLAIMED, SENT, FAILED, DEAD = OutboxStatus


async def bury(ledger: Ledger, *numbers: int, code: str = "HTTP_400", **fields: object) -> list[str]:
    await ledger.outbox.enqueue_many([item(number, **fields) for number in numbers])
    claimed = [row for row in await ledger.outbox.claim_due_batch("w") if not row.is_announcement]
    for row in claimed:
        await ledger.outbox.dead_letter(row, "the target answered 400", code=code)
    return [row.id for row in claimed]


@pytest.fixture
def letters(ledger: Ledger) -> OutboxDeadLetters:
    return OutboxDeadLetters(ledger.outbox)


@pytest.mark.requirement("X-5", "X-6")
async def test_a_dead_row_is_a_dead_letter(ledger: Ledger, letters: OutboxDeadLetters) -> None:
    store: DeadLetterStore = letters
    (row_id,) = await bury(ledger, 1, tenant_id="acme")

    letter = await store.get(row_id)

    assert letter is not None
    assert (letter.id, letter.source, letter.name) == (row_id, "webhook:partnerX", "order.paid.v1")
    assert (letter.data, letter.error_message, letter.cause) == ({"orderId": 1}, "the target answered 400", "HTTP_400")
    assert (letter.attempts_made, letter.tenant_id) == (1, "acme")
    assert letter.failed_at.endswith("Z")
    assert letter.entry["originalData"] == {"orderId": 1}
    assert "userId" not in letter.entry
    assert (await store.depth(), store.name) == (1, "integration_outbox")


@pytest.mark.requirement("X-5", "X-40")
async def test_redriving_sends_it_back_and_may_be_repeated(ledger: Ledger, letters: OutboxDeadLetters) -> None:
    (row_id,) = await bury(ledger, 1)

    assert await letters.redrive(row_id, by="ada") == row_id

    with pytest.raises(DeadLetterNotFound):
        await letters.redrive(row_id, by="ada")
    with pytest.raises(DeadLetterNotFound):
        await letters.redrive("no id")
    row = await ledger.outbox.get(row_id)
    assert row is not None
    assert (row.status, row.attempts) == (PENDING, 0)
    ((actor,),) = await execute(ledger, "SELECT actor FROM {audit}")
    assert actor == "ada"


@pytest.mark.requirement("X-5", "X-40")
async def test_discarding_is_for_good(ledger: Ledger, letters: OutboxDeadLetters) -> None:
    (row_id,) = await bury(ledger, 1)

    assert await letters.discard(row_id)

    assert not await letters.discard(row_id)
    assert await letters.get(row_id) is None
    assert await letters.depth() == 0


async def test_a_list_has_pages(ledger: Ledger, letters: OutboxDeadLetters) -> None:
    ids = await bury(ledger, *range(5))

    first, second = await letters.list(count=3), await letters.list(start=3, count=3)

    assert [letter.id for letter in (*first, *second)] == ids


@pytest.mark.requirement("X-40")
async def test_many_are_redriven_by_filter(ledger: Ledger, letters: OutboxDeadLetters) -> None:
    await bury(ledger, 1, 2, 3)
    await bury(ledger, 4, code="HTTP_410")
    await bury(ledger, 5, integration_type="sms:x")

    gone = await letters.redrive_where(by="ada", error_code="HTTP_410")
    two = await letters.redrive_where(by="ada", integration_type="webhook:partnerX", limit=2)
    none = await letters.redrive_where(by="ada", before=datetime.now(UTC) - timedelta(days=1))
    rest = await letters.redrive_where(by="ada")

    assert (gone, two, none, rest) == (1, 2, 0, 2)
    assert await letters.depth() == 0


async def test_one_tenant_sees_its_own(ledger: Ledger) -> None:
    (mine,) = await bury(ledger, 1, tenant_id="alice")
    (other,) = await bury(ledger, 2, tenant_id="bob")
    letters = OutboxDeadLetters(ledger.outbox, tenant_id="alice")

    assert [letter.id for letter in await letters.list()] == [mine]
    assert await letters.depth() == 1
    assert await letters.get(other) is None
    with pytest.raises(DeadLetterNotFound):
        await letters.redrive(other, by="alice")
    assert not await letters.discard(other, by="alice")
    assert await letters.redrive_where(by="alice") == 1


@pytest.mark.requirement("X-5")
async def test_work_that_failed_elsewhere_can_be_put_in(ledger: Ledger, letters: OutboxDeadLetters) -> None:
    letter = DeadLetter(
        id="dl-7-1",
        source="webhook:partnerX",
        message_id="m-7",
        name="order.paid.v1",
        data={"orderId": 7},
        error_message="it broke",
        attempts_made=3,
    )

    await letters.put(letter)
    await letters.put(letter)

    (row,) = await rows(ledger)
    assert (row.status, row.attempts, row.idempotency_key, row.last_error) == (DEAD, 3, "m-7", "it broke")
    assert await letters.redrive(row.id, by="ada") == row.id


async def bury_many(ledger: Ledger, count: int, **fields: object) -> None:
    """Many dead rows, each with an id of its own in its error, as answers of HTTP targets have it."""
    for first in range(0, count, 1_000):
        numbers = range(first, min(first + 1_000, count))
        await ledger.outbox.enqueue_many([item(f"many-{number}", **fields) for number in numbers])
    await execute(
        ledger,
        "UPDATE {outbox} SET status = 'DEAD', error_code = 'HTTP_400', dead_at = created_at, "
        "last_error = 'HTTP 400: request ' || CAST(id AS text) WHERE source_event_id LIKE 'event-many-%'",
    )


async def test_groups_count_every_row_however_many_words_there_are(ledger: Ledger, letters: OutboxDeadLetters) -> None:
    """A rare cause beside thousands of rows whose errors all differ is the one that nobody would find otherwise."""
    await bury(ledger, 1, code="HTTP_410")
    await bury_many(ledger, 5_100)

    common, rare = await letters.groups()

    assert (common.count, rare.count) == (5_100, 1)


@pytest.mark.parametrize("code", ["HTTP_400", "expired", "permanent"])
async def test_a_group_is_found_by_its_fingerprint_whatever_its_code(
    ledger: Ledger, letters: OutboxDeadLetters, code: str
) -> None:
    """Channels name codes as they like, also those that say elsewhere why a failure was final."""
    (row_id,) = await bury(ledger, 1, code=code)

    (group,) = await letters.groups()
    page = await letters.page(DeadLetterFilter(fingerprint=group.fingerprint))

    assert [letter.id for letter in page.letters] == [row_id]


async def test_a_row_that_is_discarded_meanwhile_ends_no_walk(ledger: Ledger) -> None:
    class Discarding(OutboxDeadLetters):
        async def _page(self, **filters: Any) -> list[OutboxRow]:
            rows = await super()._page(**filters)
            if rows:
                await ledger.outbox.discard([rows[-1].id], by="bob")
            return rows

    await bury_many(ledger, 203, tenant_id="acme")

    depth = await Discarding(ledger.outbox, tenant_id="acme").depth()
    redriven = await Discarding(ledger.outbox).redrive_where(by="ada")

    assert depth == 203
    assert redriven == 199  # of 201 that were left, one on each of two pages was discarded
