"""Tenants share the outbox: a noisy one takes nothing from a quiet one, and what was decided about one holds."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from bullpen.errors import InvalidOption
from bullpen.ledger import Lane, Ledger, Sent, Settlement, TenantLimit
from bullpen.outbox import Route
from bullpen.outbox.shares import share
from bullpen.ports.channel import Message, SendResult
from bullpen.redis import Connection
from tests.databases import item
from tests.outbox.conftest import MakeOutbox
from tests.outbox.kit import SpyChannel, until_settled

TYPE = "webhook:partnerX"


async def deliver_both(
    ledger: Ledger, outbox: object, spy: SpyChannel, *, noisy: int, stored_at: int, workers: bool, keys: int = 0
) -> int:
    """How many rows of the noisy tenant were sent while ten rows of a quiet one, stored later, waited."""
    for first in range(0, noisy, 1_000):
        numbers = range(first, min(first + 1_000, noisy))
        await ledger.outbox.enqueue_many(
            [item(number, tenant_id="noisy", ordering_key=f"k{number % keys}" if keys else None) for number in numbers]
        )
    services = [outbox.dispatcher()] + ([outbox.workers()] if workers else [])  # type: ignore[attr-defined]
    for service in services:
        await service.start()
    await spy.until(stored_at)
    await ledger.outbox.enqueue_many([item(noisy + number, tenant_id="quiet") for number in range(10)])
    before = len(spy.messages)
    while (tenants := Counter(message.tenant_id for message in spy.messages))["quiet"] < 10:
        await spy.until(sum(tenants.values()) + 1)
    waited = [message.tenant_id for message in spy.messages[before:]]
    for service in services:
        await service.close()
    return len(waited) - 1 - waited[::-1].index("quiet")


@pytest.mark.requirement("X-88")
@pytest.mark.parametrize("strategy", ["direct", "queued"])
async def test_a_quiet_tenant_does_not_wait_for_a_noisy_one(
    ledger: Ledger, make_outbox: MakeOutbox, connection: Connection, strategy: str
) -> None:
    """The defaults in small: a twentieth of the rows, of the jobs that may wait, and of the batch."""
    spy = SpyChannel()
    small = Route(channel=spy, strategy=strategy, concurrency=4, max_queued=10)  # type: ignore[arg-type]
    outbox = make_outbox({TYPE: small}, connection=connection, claim_batch_size=10)

    between = await deliver_both(ledger, outbox, spy, noisy=500, stored_at=20, workers=strategy == "queued")

    assert between <= 10 + 10 + 4 + 10 + 10  # waiting, claimed, running, and two claims that both share


class SlowChannel(SpyChannel):
    """A target that takes a moment: places are given up by time, and rows must not go by unmeasured meanwhile."""

    async def send(self, message: Message) -> SendResult:
        await asyncio.sleep(0.01)
        return await super().send(message)


@pytest.mark.requirement("X-88")
@pytest.mark.parametrize("strategy", ["direct", "queued"])
async def test_a_quiet_tenant_does_not_wait_for_the_lines_of_a_noisy_one(
    ledger: Ledger, make_outbox: MakeOutbox, connection: Connection, strategy: str
) -> None:
    """What follows under an ordering key is taken along only while nobody waits: as many keys as places, and more,
    would hold all places for as long as the noisy tenant has rows."""
    spy = SlowChannel()
    small = Route(channel=spy, strategy=strategy, concurrency=4, max_queued=10)  # type: ignore[arg-type]
    outbox = make_outbox({TYPE: small}, connection=connection, claim_batch_size=10)

    between = await deliver_both(ledger, outbox, spy, noisy=500, stored_at=20, workers=strategy == "queued", keys=8)

    assert between <= 150


@pytest.mark.long
@pytest.mark.requirement("X-88")
@pytest.mark.parametrize("strategy", ["direct", "queued"])
async def test_a_quiet_tenant_is_served_within_a_twentieth_of_the_time(
    ledger: Ledger, make_outbox: MakeOutbox, connection: Connection, strategy: str
) -> None:
    spy = SpyChannel()
    outbox = make_outbox({TYPE: Route(channel=spy, strategy=strategy)}, connection=connection)  # type: ignore[arg-type]

    between = await deliver_both(ledger, outbox, spy, noisy=10_000, stored_at=200, workers=strategy == "queued")

    assert between <= 10_010 * 0.05


async def test_claims_follow_weights(ledger: Ledger, make_outbox: MakeOutbox) -> None:
    spy = SpyChannel()
    spy.gate.clear()
    await ledger.tenant_limits.set(TenantLimit(tenant_id="gold", weight=3), by="ada")
    rows = [item(number, tenant_id=("gold", "plain")[number % 2]) for number in range(60)]
    await ledger.outbox.enqueue_many(rows)

    async with make_outbox({TYPE: Route(channel=spy, strategy="direct", concurrency=20)}).dispatcher() as dispatcher:
        await dispatcher.tick()
        await spy.until(20)
        first = Counter(message.tenant_id for message in spy.messages)
        spy.gate.set()
        await dispatcher.idle()

    assert first == {"gold": 15, "plain": 5}


async def test_a_tenant_has_no_more_under_way_than_it_may(ledger: Ledger) -> None:
    limit = TenantLimit(tenant_id="a", concurrency=2)
    await ledger.tenant_limits.set(limit, by="ada")
    await ledger.outbox.enqueue_many([item(number, tenant_id="a") for number in range(5)])
    lanes = [Lane(TYPE, 10, "a", limit)]

    async def claim() -> list[object]:
        claimed = await ledger.outbox.claim(lanes, worker_id="w", lease_ms=60_000, starting=True)
        assert (TYPE in claimed.held_types) is (len(claimed.rows) < 10)
        return list(claimed.rows)

    at_once = await asyncio.gather(*(claim() for _ in range(4)))
    taken = [row for rows in at_once for row in rows]
    await ledger.outbox.settle([Settlement(taken[0], Sent(), "w")])  # type: ignore[arg-type]
    after = await claim()

    assert len(taken) == 2
    assert len(after) == 1


async def test_a_tenant_starts_no_more_per_time_than_it_may(ledger: Ledger) -> None:
    limit = TenantLimit(tenant_id="a", integration_type=TYPE, rate_max=3, rate_ms=60_000)
    await ledger.tenant_limits.set(limit, by="ada")
    await ledger.outbox.enqueue_many([item(number, tenant_id="a") for number in range(8)])
    lanes = [Lane(TYPE, 2, "a", limit)]

    counts = []
    for offset_ms in (0, 0, 0, 61_000):
        ledger.database.clock_offset_ms = offset_ms
        counts.append(len((await ledger.outbox.claim(lanes, worker_id="w", lease_ms=60_000)).rows))

    assert counts == [2, 1, 0, 2]


async def test_a_limited_tenant_is_served_to_the_end(
    ledger: Ledger, make_outbox: MakeOutbox, connection: Connection
) -> None:
    """Its rows are claimed as places become free, in both strategies, also those of one ordering key."""
    spy = SpyChannel()
    await ledger.tenant_limits.set(TenantLimit(tenant_id="a", concurrency=1), by="ada")
    await ledger.outbox.enqueue_many([item(number, tenant_id="a") for number in range(4)])
    await ledger.outbox.enqueue_many([item(number, tenant_id="a", ordering_key="k") for number in range(4, 8)])
    outbox = make_outbox({TYPE: Route(channel=spy)}, connection=connection)
    dispatcher, workers = outbox.dispatcher(), outbox.workers()
    await dispatcher.start()
    await workers.start()
    await until_settled(ledger, 8)
    await dispatcher.close()
    await workers.close()

    assert spy.most_running == 1
    assert [number for number in spy.numbers if number >= 4] == [4, 5, 6, 7]


async def test_what_was_decided_is_listed_and_audited(ledger: Ledger) -> None:
    every, one = TenantLimit(tenant_id="a", weight=2), TenantLimit(tenant_id="a", integration_type=TYPE, rate_max=5)
    await ledger.tenant_limits.set(every, by="ada")
    await ledger.tenant_limits.set(one, by="ada")
    both = await ledger.tenant_limits.list()
    removed = [await ledger.tenant_limits.remove("a", by="bob") for _ in range(2)]

    assert both == [every, one]
    assert await ledger.tenant_limits.list() == [one]
    assert removed == [True, False]
    entries = [(entry.actor, entry.action) for entry in await ledger.audit.read()]
    assert sorted(entries) == [
        ("ada", "outbox.tenant.set"),
        ("ada", "outbox.tenant.set"),
        ("bob", "outbox.tenant.remove"),
    ]


@pytest.mark.parametrize("wrong", [{"weight": 0}, {"weight": 1_001}, {"concurrency": -1}, {"rate_ms": 0}])
def test_a_limit_that_makes_no_sense_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidOption, match=next(iter(wrong))):
        TenantLimit(tenant_id="a", **wrong)  # type: ignore[arg-type]


def test_parts_add_up_to_the_quota() -> None:
    assert share(20, [3, 1]) == [15, 5] or share(20, [3, 1]) == [14, 6]
    assert share(10, [1] * 10) == [1] * 10
    assert share(2, [1, 1, 5]) == [1, 1, 0]
    assert sum(share(100, [1, 1000, 7])) == 100
