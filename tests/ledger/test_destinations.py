"""Destinations that are switched off or broken: one truth for all processes, by the database's clock."""

from __future__ import annotations

import asyncio

import pytest

from bullpen.errors import InvalidOption
from bullpen.ledger import Ledger
from bullpen.testing.postgres import PostgresServer
from tests.contracts.outbox_repository import execute
from tests.databases import ROLES, MakeLedger


async def state(ledger: Ledger, name: str = "webhook:x") -> str | None:
    found = (await ledger.destinations.troubled()).get(name)
    return None if found is None else found.state


async def trip(ledger: Ledger, *, pause_ms: int = 1_000, longest_ms: int = 5_000) -> bool:
    return await ledger.destinations.trip("webhook:x", pause_ms=pause_ms, longest_ms=longest_ms)


async def test_somebody_switches_one_off_and_on_again(ledger: Ledger) -> None:
    before = await state(ledger)
    await ledger.destinations.disable("webhook:x", by="ada", reason="they asked us to")
    off = (await ledger.destinations.troubled())["webhook:x"]
    on = await ledger.destinations.enable("webhook:x", by="bob")
    again = await ledger.destinations.enable("webhook:x", by="bob")

    assert (before, await state(ledger)) == (None, None)
    assert (off.state, off.disabled_by, off.reason) == ("disabled", "ada", "they asked us to")
    assert off.disabled_at is not None
    assert (on, again) == (True, False)
    entries = await execute(ledger, "SELECT actor, action, subject FROM {audit} ORDER BY id")
    assert entries == [("ada", "outbox.disable", "webhook:x"), ("bob", "outbox.enable", "webhook:x")]


async def test_a_broken_one_is_tried_again_after_its_pause(ledger: Ledger) -> None:
    await trip(ledger)
    broken = (await ledger.destinations.troubled())["webhook:x"]
    ledger.database.clock_offset_ms = 1_500
    later = await state(ledger)
    await ledger.destinations.mend("webhook:x")

    assert (broken.state, broken.trips) == ("broken", 1)
    assert 0 < broken.broken_ms <= 1_000
    assert later == "probing"
    assert await state(ledger) is None


async def test_the_pause_doubles_up_to_the_longest(ledger: Ledger) -> None:
    left = []
    for _ in range(5):
        await trip(ledger)
        left.append((await ledger.destinations.troubled())["webhook:x"].broken_ms)
        ledger.database.clock_offset_ms += 10_000

    assert [round(each, -3) for each in left] == [1_000, 2_000, 4_000, 5_000, 5_000]


async def test_of_many_that_see_it_fail_at_once_one_opens_it(ledger: Ledger) -> None:
    """Otherwise ten processes would double the pause ten times for one outage."""
    opened = await asyncio.gather(*(trip(ledger, pause_ms=60_000, longest_ms=60_000) for _ in range(6)))

    assert sorted(opened) == [False] * 5 + [True]
    assert (await ledger.destinations.troubled())["webhook:x"].trips == 1


async def test_switching_on_forgets_the_breaker(ledger: Ledger) -> None:
    await trip(ledger, pause_ms=60_000, longest_ms=60_000)

    assert await ledger.destinations.enable("webhook:x", by="ada")

    assert await state(ledger) is None


async def test_a_broken_one_that_is_switched_off_stays_off(ledger: Ledger) -> None:
    await ledger.destinations.disable("webhook:x", by="ada")
    await trip(ledger)
    await ledger.destinations.mend("webhook:x")

    assert await state(ledger) == "disabled"


async def test_a_name_that_no_row_could_have_is_refused(ledger: Ledger) -> None:
    with pytest.raises(InvalidOption, match="integration_type"):
        await ledger.destinations.disable("x" * 121, by="ada")


@pytest.mark.requirement("X-23")
async def test_workers_with_the_worker_role_see_and_tell(
    postgres_server: PostgresServer, guarded_database: str, make_ledger: MakeLedger
) -> None:
    worker = make_ledger(postgres_server.url(guarded_database, role=ROLES.worker), roles=ROLES, duty="worker")
    service = make_ledger(postgres_server.url(guarded_database, role=ROLES.service), roles=ROLES)

    await trip(worker)
    await service.destinations.disable("webhook:y", by="ada")

    assert (await state(service), await state(worker, "webhook:y")) == ("broken", "disabled")
    await worker.destinations.mend("webhook:x")
    assert await state(service) is None
