"""What the channel of all endpoints keeps open, and for how long. Spies stand where calls leave the process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from bullpen.ledger import EndpointRow, Ledger
from bullpen.outbox import endpoint_channel
from bullpen.outbox.endpoint_channel import EndpointChannel
from bullpen.outbox.enqueue import make_test_message
from bullpen.outbox.vault import Secret, Vault
from bullpen.ports.channel import Accepted, NotTried, Refused
from tests.outbox.kit import SpyChannel

DAY_MS = 86_400_000


class World:
    """A channel over a ledger, and the spies that it has made, by address."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.now = ledger, 0.0
        self.made: dict[str, list[SpyChannel]] = {}
        self.channel = EndpointChannel(
            ledger.endpoints, Vault(None), self.make, off_after_ms=DAY_MS, off_failures=3, clock=lambda: self.now
        )

    def make(self, url: str, *, secrets: Sequence[str], headers: Mapping[str, str]) -> SpyChannel:
        self.made.setdefault(url, []).append(SpyChannel())
        return self.made[url][-1]

    async def add(self, name: str) -> EndpointRow:
        sealed = Vault(None).seal_secrets([Secret("whsec_x")], name, "acme")
        values = {"id": name, "tenant_id": "acme", "url": f"https://{name}/", "events": "[]", "secrets": sealed}
        row, _ = await self.ledger.endpoints.add(values, by="ada", most=100)
        return row

    async def send(self, name: str) -> Any:
        return await self.channel.send(make_test_message(f"endpoint:{name}", None, "acme"))

    async def change(self, name: str, **values: Any) -> None:
        await self.ledger.endpoints.change("acme", name, values, action="endpoint.update", by="ada", detail={})


@pytest.fixture
def world(ledger: Ledger) -> World:
    return World(ledger)


async def test_one_webhook_serves_all_messages_until_the_row_changes(world: World) -> None:
    await world.add("a")
    for _ in range(3):
        assert await world.send("a") == Accepted()
    assert len(world.made["https://a/"]) == 1

    await world.change("a", url="https://b/")
    assert await world.send("a") == Accepted()
    assert list(world.made) == ["https://a/"], "what was read is good for a second"
    world.now += 1
    assert await world.send("a") == Accepted()

    assert world.made["https://a/"][0].closed
    assert not world.made["https://b/"][0].closed
    await world.channel.aclose()
    assert world.made["https://b/"][0].closed


async def test_a_webhook_that_is_replaced_is_closed_when_its_last_call_has_ended(world: World) -> None:
    """A connection that is closed in the middle of a call would make its message one that nobody knows about."""
    await world.add("a")
    await world.send("a")
    (old,) = world.made["https://a/"]
    old.gate.clear()
    slow = asyncio.create_task(world.send("a"))
    await old.until(2)

    await world.change("a", url="https://b/")
    world.now += 1
    await world.send("a")
    assert not old.closed
    old.gate.set()

    assert await slow == Accepted()
    assert old.closed


async def test_endpoints_that_are_used_least_are_closed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_channel, "_MOST_KNOWN", 2)
    for name in "abc":
        await world.add(name)
        await world.send(name)

    assert [world.made[f"https://{name}/"][0].closed for name in "abc"] == [True, False, False]
    assert await world.send("a") == Accepted()
    assert len(world.made["https://a/"]) == 2


async def test_a_test_leaves_nothing_open(world: World) -> None:
    row = await world.add("a")

    await world.channel.send_test(row, make_test_message("endpoint:a", None, "acme"))

    assert [spy.closed for spy in world.made["https://a/"]] == [True]


async def test_many_that_ask_at_once_cost_one_query(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.add("a")
    asked = 0
    get = world.ledger.endpoints.get

    async def counting(endpoint_id: str) -> EndpointRow | None:
        nonlocal asked
        asked += 1
        return await get(endpoint_id)

    monkeypatch.setattr(world.ledger.endpoints, "get", counting)

    assert await asyncio.gather(*(world.send("a") for _ in range(20))) == [Accepted()] * 20
    assert asked == 1


async def test_what_cannot_be_called_says_why(world: World) -> None:
    await world.add("a")
    for secrets, code in (("nonsense", "ENDPOINT_UNUSABLE"), ('[{"no": 1}]', "ENDPOINT_UNUSABLE")):
        await world.change("a", secrets=secrets)
        world.now += 1
        result = await world.send("a")
        assert isinstance(result, Refused), result
        assert result.code == code


async def test_what_a_rate_holds_back_is_told_when_the_rate_is_over(world: World) -> None:
    """And not in a millisecond, at which it would ask again, a thousand times per second."""
    row = await world.add("a")
    await world.change("a", rate_max=1, rate_ms=600_000)

    assert await world.send("a") == Accepted()

    left_ms = await world.ledger.endpoints.take_slot("a", tenant_id=row.tenant_id)
    assert left_ms is not None
    assert 300_000 < left_ms <= 600_001
    held = await world.send("a")
    assert isinstance(held, NotTried)
    assert held.after_ms == 5_000, "a rate may be changed before it is over"
