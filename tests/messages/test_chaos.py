"""Kill schedulers, senders and the broker at exact moments: no message is early, lost, or doubled at a receiver that
honours the key.

A provider may be called twice for one message only if that was being sent when something died, and then with the same
key. BULLPEN_CHAOS=long has more messages, a broker that is killed, and a cluster of three that loses its leaders.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from datetime import timedelta
from pathlib import Path

import pytest

from bullpen.ledger import Ledger
from bullpen.messages import Messages, MessageStatus
from bullpen.testing import Child
from bullpen.testing.rabbitmq import RabbitServer
from tests.databases import MakeLedger
from tests.forks import WarmChild
from tests.messages.kit import at, make, person, set_clock
from tests.messages.rabbit import rabbit_client, rabbit_names

ROOT = Path(__file__).parents[2]
LONG = os.environ.get("BULLPEN_CHAOS") == "long"
COUNT = 2_000 if LONG else 60
LEASE_MS = 1_500
PATIENCE_S = 900 if LONG else 90

pytestmark = pytest.mark.timeout(1_800 if LONG else 240)

DUE = "2026-03-14 09:00"


class Arena:
    """One database, one broker, one provider, and processes that come and go."""

    def __init__(self, ledger: Ledger, url: str, rabbit: Sequence[str], target: Path) -> None:
        self.ledger, self.url, self.rabbit, self.target = ledger, url, list(rabbit), target
        self.names = rabbit_names()
        self.children: list[Child] = []
        self.messages: Messages = make(ledger, rabbit_client(self.rabbit, self.names), queue=self.names["queue_name"])
        target.touch()

    async def fill(self, count: int = COUNT, *, before: timedelta = timedelta(seconds=3)) -> None:
        """People whose messages fall due in a moment."""
        set_clock(self.ledger, at(DUE) - timedelta(minutes=30))
        await self.messages.recipients.save_many(person(number, zone="UTC") for number in range(count))
        set_clock(self.ledger, at(DUE) - before)

    def start(self, role: str, *, die_at: str | None = None, die_after: int = 1, delay_s: float = 0.0) -> Child:
        order = {
            "database": self.url,
            "rabbit": self.rabbit,
            "names": self.names,
            "target": str(self.target),
            "role": role,
            "offset_ms": self.ledger.database.clock_offset_ms,
            "lease_ms": LEASE_MS,
            "batch": max(20, COUNT // 10),
            "look_ahead_ms": 3_600_000,
            "die_at": die_at,
            "die_after": die_after,
            "delay_s": delay_s,
        }
        child = WarmChild.module("tests.messages.chaos_process", json.dumps(order), cwd=ROOT)
        self.children.append(child)
        return child

    def calls(self) -> list[tuple[str, str, int, int]]:
        """Key, recipient, when, by which process."""
        return [tuple(json.loads(line)) for line in self.target.read_text().splitlines()]

    async def all_sent(self, count: int = COUNT) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            counts = {one.status: one.count for one in await self.messages.store.counts()}
            if counts.get(MessageStatus.SENT) == count:
                return
            assert time.monotonic() < deadline, f"{counts} of {count}; {self.children[-1].errors[-2_000:]}"
            await asyncio.sleep(0.2)

    async def progress(self, more: int = 3) -> None:
        """Wait until a few more calls have come: the next fault then hits work in flight."""
        before = len(self.calls())
        deadline = time.monotonic() + PATIENCE_S
        while len(self.calls()) < min(before + more, COUNT):
            assert time.monotonic() < deadline, f"no progress after {before} calls"
            await asyncio.sleep(0.02)

    def check(self, count: int = COUNT) -> int:
        """Everybody once at a receiver that honours the key, nobody early. Returns the calls it had to drop."""
        calls = self.calls()
        keys = Counter(key for key, *_ in calls)
        assert len(keys) == count
        assert len({(key, who) for key, who, *_ in calls}) == count, "one key, one recipient"
        due_ms = round(at(DUE).timestamp() * 1000)
        assert min(when for _, _, when, _ in calls) >= due_ms, "a message was early"
        return len(calls) - count

    async def close(self) -> None:
        for child in self.children:
            child.close()
        await self.messages.aclose()


async def all_ended(children: Iterable[Child]) -> None:
    await asyncio.gather(*[child.ended(timeout=PATIENCE_S) for child in children])


@pytest.fixture
async def arena(
    postgres_url: str, make_ledger: MakeLedger, rabbit: RabbitServer, tmp_path: Path
) -> AsyncIterator[Arena]:
    opened = Arena(make_ledger(postgres_url), postgres_url, [rabbit.url], tmp_path / "provider")
    yield opened
    await opened.close()


@pytest.mark.requirement("S-49", "S-51", "S-52", "X-17", "X-28", "X-58", "X-60", "X-65", "X-66")
async def test_schedulers_and_senders_that_die_at_the_worst_moments(arena: Arena) -> None:
    """After each step of which the next one does not know: claimed, confirmed, taken, sent, settled."""
    await arena.fill()
    scheduling = ("messages.claimed", "messages.publishing_done")
    await all_ended(arena.start("scheduler", die_at=moment) for moment in scheduling)
    for _ in range(2):  # and then two at the same time
        arena.start("scheduler")
    sending = ("messages.taken", "messages.answered", "messages.settled")
    await all_ended(arena.start("sender", die_at=moment, die_after=3) for moment in sending)
    senders = [arena.start("sender", delay_s=0.01) for _ in range(2)]
    await arena.progress()
    senders[0].kill()

    await arena.all_sent()

    dropped = arena.check()
    # Four senders died, each with at most its prefetch of five in hand.
    assert dropped <= 20


@pytest.mark.requirement("X-59", "S-51")
async def test_an_hour_without_a_scheduler(arena: Arena) -> None:
    """Every message of that hour is an hour late at most, and none is missing."""
    set_clock(arena.ledger, at(DUE) - timedelta(minutes=5))
    await arena.messages.recipients.save_many(person(number, zone="UTC") for number in range(COUNT))
    await arena.messages.planner().run_until_done()
    set_clock(arena.ledger, at(DUE) + timedelta(hours=1))
    for _ in range(2):
        arena.start("scheduler")
    arena.start("sender")

    await arena.all_sent()

    assert arena.check() == 0


if LONG:

    @pytest.mark.requirement("S-3", "S-50", "S-52", "S-7")
    async def test_a_broker_that_is_killed_and_comes_back(
        postgres_url: str, make_ledger: MakeLedger, tmp_path: Path
    ) -> None:
        """Schedulers and senders wait for it and go on by themselves; what it had confirmed is still there."""
        with RabbitServer.start() as rabbit:
            arena = Arena(make_ledger(postgres_url), postgres_url, [rabbit.url], tmp_path / "provider")
            try:
                await arena.fill(before=timedelta(seconds=1))
                arena.start("scheduler")
                arena.start("sender", delay_s=0.05)
                await arena.progress()
                await asyncio.to_thread(rabbit.kill)
                await asyncio.to_thread(rabbit.restart)

                await arena.all_sent()

                # One sender lost its channel with five deliveries in hand: each is sent at most once more, same key.
                assert arena.check() <= 5
            finally:
                await arena.close()

    @pytest.mark.requirement("S-11", "S-50", "S-52")
    async def test_one_of_three_nodes_dies_again_and_again(
        postgres_url: str, make_ledger: MakeLedger, rabbit_cluster: RabbitServer, tmp_path: Path
    ) -> None:
        """A new leader is elected each time; what was confirmed before is delivered after."""
        arena = Arena(make_ledger(postgres_url), postgres_url, rabbit_cluster.urls, tmp_path / "provider")
        try:
            await arena.fill(before=timedelta(seconds=1))
            arena.start("scheduler")
            for _ in range(2):
                arena.start("sender", delay_s=0.02)
            chance = random.Random(7)
            for _ in range(4):
                await arena.progress(200)
                node = chance.randrange(3)
                await asyncio.to_thread(rabbit_cluster.kill, node)
                await arena.progress(100)
                await asyncio.to_thread(rabbit_cluster.restart, node)

            await arena.all_sent()

            assert arena.check() <= 4 * 2 * 5
        finally:
            await arena.close()
