"""Kill workers at random, and right after a commit: every entity ends where its events lead, each event counts once.

BULLPEN_CHAOS=long: 10 000 events for 500 entities, killed again and again.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bullpen.app import Bullpen
from bullpen.plugins.transports.bullmq import BullMQClient
from bullpen.settings import Settings
from bullpen.testing import Child, RedisServer
from tests.conftest import StartServer
from tests.databases import MakeLedger
from tests.forks import WarmChild
from tests.workflow.chaos_process import workflow_of
from tests.workflow.stored import Stored, make_tables, redis_orders, sql_orders

ROOT = Path(__file__).parents[2]
LONG = os.environ.get("BULLPEN_CHAOS") == "long"
ENTITIES, STEPS = (500, 20) if LONG else (12, 5)
POISONED = 50 if LONG else 4
DEATHS = 20 if LONG else 3
PATIENCE_S = 1_500 if LONG else 60

pytestmark = pytest.mark.timeout(1_800 if LONG else 240)


class Arena:
    """Worker processes that come and go."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        self.children: list[Child] = []
        self.deaths = 0

    def start(self, *, die_after: int = 0) -> Child:
        child = WarmChild.module(
            "tests.workflow.chaos_process", json.dumps({**self.order, "die_after": die_after}), cwd=ROOT
        )
        self.children.append(child)
        return child

    def replace_the_dead(self) -> None:
        for child in [one for one in self.children if not one.is_running]:
            assert child.exit_code == -9, child.errors
            self.deaths += 1
            child.close()
            self.children.remove(child)
            self.start(die_after=random.randint(3, 30) if self.deaths < DEATHS else 0)

    def close(self) -> None:
        for child in self.children:
            child.close()


@pytest.fixture
def server(start_server: StartServer) -> RedisServer:
    return start_server()


@pytest.fixture
def arenas() -> Iterator[list[Arena]]:
    made: list[Arena] = []
    yield made
    for arena in made:
        arena.close()


@pytest.mark.requirement("X-52", "X-53", "W-54", "W-65")
@pytest.mark.parametrize("kind", [pytest.param("postgresql", marks=pytest.mark.long), "redis"])
async def test_nothing_is_lost_and_nothing_counts_twice_whoever_dies(
    kind: str, server: RedisServer, arenas: list[Arena], request: pytest.FixtureRequest, make_ledger: MakeLedger
) -> None:
    app = Bullpen(settings=Settings.load(environ={}, redis_url=server.url))
    database = request.getfixturevalue("postgres_url") if kind == "postgresql" else ""
    if kind == "postgresql":
        ledger = make_ledger(database)
        await make_tables(ledger)
        stored: Stored = sql_orders(ledger, status_type=str)
    else:
        stored = redis_orders(app.connection, status_type=str)
    workflow = workflow_of(app, stored, "chaos", STEPS)
    arena = Arena({"redis": server.url, "database": database, "store": kind, "queue": "chaos", "steps": STEPS})
    arenas.append(arena)
    poison = await send_all(workflow, stored)

    for commits in (5, 9):
        arena.start(die_after=commits)
    deadline, kill_at = time.monotonic() + PATIENCE_S, time.monotonic() + 2
    client = workflow.client
    assert isinstance(client, BullMQClient)
    while (await client.transport.depth("chaos")).messages:
        assert time.monotonic() < deadline, f"{await client.queue('chaos').counts()} after {arena.deaths} deaths"
        if arena.deaths < DEATHS and time.monotonic() > kill_at:
            kill_at = time.monotonic() + 2
            random.choice(arena.children).kill()
        arena.replace_the_dead()
        await asyncio.sleep(0.1)

    assert arena.deaths >= 2
    await audit(stored)
    letters = await client.transport.dead_letters("chaos").list(count=POISONED + 10)
    assert {letter.message_id for letter in letters} == poison
    assert all("payload of" in letter.error_message for letter in letters)
    arena.close()
    await app.aclose()


async def send_all(workflow: Any, stored: Stored) -> set[str]:
    """Events of all entities, side by side; some of them poisoned. Returns the ids of those."""
    urns = [f"urn:{n}" for n in range(ENTITIES)]
    for urn in urns:
        await stored.create(urn, status="s0")
    poison: set[str] = set()
    for number in range(1, STEPS + 1):
        await asyncio.gather(*(workflow.send(f"e{number}", urn, number) for urn in urns))
        for _ in range(-(-POISONED // STEPS)):
            if len(poison) < POISONED:
                sent = await workflow.send(f"e{number}", random.choice(urns), "poison")
                poison.add(sent.id)
    return poison


async def audit(stored: Stored) -> None:
    total = sum(range(1, STEPS + 1))
    for n in range(ENTITIES):
        urn = f"urn:{n}"
        loaded = await stored.store.read("chaos", urn)
        assert loaded is not None
        found = (stored.store.status(loaded.entity), await amount(stored, urn), loaded.version)
        assert found == (f"s{STEPS}", total, STEPS + 1), f"{urn}: {found}"
        past = await stored.store.history("chaos", urn, limit=10 * STEPS)
        assert [entry.event for entry in past] == [f"e{number}" for number in range(1, STEPS + 1)]
        assert max(Counter(entry.key for entry in past).values()) == 1


async def amount(stored: Stored, urn: str) -> int:
    from tests.workflow.stored import get

    return int(get(await stored.load(urn), "amount"))
