"""Kill the projector at exact moments, and everything else at any: rows = events × routes, and nobody is forgotten.

BULLPEN_CHAOS=long repeats it with 20 000 events, BULLPEN_CHAOS_EVENTS with any number.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bullpen.errors import DatabaseUnavailable, SourceUnavailable
from bullpen.ledger import Ledger, OutboxStatus
from bullpen.plugins.sources.kurrent import KurrentSource
from bullpen.ports.source import BEGINNING, EventMetadata, NewEvent
from bullpen.testing import RedisServer
from bullpen.testing.kurrent import KurrentServer
from bullpen.testing.postgres import PostgresServer, need_postgres
from tests.conftest import StartServer
from tests.databases import MakeLedger
from tests.outbox.forked import Forked

LONG = os.environ.get("BULLPEN_CHAOS") == "long"
EVENTS = int(os.environ.get("BULLPEN_CHAOS_EVENTS", 20_000 if LONG else 240))
POISONED = 5
BATCH = 200 if LONG else 20
PATIENCE_S = 1_500 if LONG else 80
ROUTES = 2

pytestmark = [pytest.mark.timeout(3_000 if LONG else 170)]


class Arena:
    """One database, one event store, one target, and processes that come and go."""

    def __init__(self, url: str, target: Path, redis: RedisServer | None, events: KurrentServer | None) -> None:
        self.url, self.target, self.redis, self.events = url, target, redis, events
        self.children: dict[str, Forked] = {}
        self._retired: list[Forked] = []
        target.touch()

    def start(self, name: str, role: str = "", *, die_at: str | None = None, die_after: int = 1) -> Forked:
        order = {
            "database": self.url,
            "redis": None if self.redis is None else self.redis.url,
            "events": None if self.events is None else self.events.url,
            "target": str(self.target),
            "strategy": "direct" if self.redis is None else "queued",
            "role": role or name,
            "lease_ms": 2_000,
            "die_at": die_at,
            "die_after": die_after,
            "delay_s": 0.0,
        }
        if name in self.children:
            self._retired.append(self.children[name])
        self.children[name] = Forked(order)
        return self.children[name]

    async def kill_and_restart(self, name: str, role: str = "") -> None:
        self.children[name].kill()
        await asyncio.to_thread(self.start(name, role).until_ready)

    def deliveries(self) -> list[tuple[str, str]]:
        return [(row_id, key) for row_id, key, _ in map(json.loads, self.target.read_text().splitlines())]

    def close(self) -> None:
        for child in (*self.children.values(), *self._retired):
            child.close()


@pytest.fixture
def events() -> Iterator[KurrentServer]:
    with KurrentServer() as server:
        yield server


def an_event(number: int) -> NewEvent:
    poison = number % (EVENTS // POISONED) == EVENTS // POISONED - 1
    metadata = EventMetadata(correlation_id=f"c-{number}", source="chaos", tenant_id=f"t-{number % 7}")
    return NewEvent(type="payment.completed.v1", data={"number": number, "poison": poison}, metadata=metadata)


async def rows_of(ledger: Ledger) -> Counter[str]:
    """How many rows have which status; none while the database does not answer."""
    try:
        async with ledger.database.transaction() as connection:
            table = ledger.database.table("integration_outbox")
            found: Any = await connection.exec_driver_sql(f"SELECT status, count(*) FROM {table} GROUP BY status")
            return Counter({str(row[0]): int(row[1]) for row in found.all()})
    except DatabaseUnavailable:
        return Counter()


async def until(ledger: Ledger, status: str | None, count: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        found = await rows_of(ledger)
        if (found.total() if status is None else found[status]) >= count:
            return
        assert time.monotonic() < deadline, f"{found} and not {count} × {status} within {PATIENCE_S} s"
        await asyncio.sleep(0.05)


# A poisoned event fails on one of its routes; the other goes on.
ROWS = EVENTS * ROUTES - POISONED
KILL_POINTS = ("projector.mapped", "projector.storing", "projector.stored")


@pytest.mark.requirement("X-75", "O-36", "O-4", "X-74", "O-32", "O-82")
@pytest.mark.parametrize("store", ["sqlite", "kurrent"])
async def test_a_projector_that_dies_at_any_point_loses_nothing_and_stores_nothing_twice(
    store: str, request: pytest.FixtureRequest, tmp_path: Path, make_ledger: MakeLedger
) -> None:
    url = request.getfixturevalue("sqlite_url" if store == "sqlite" else "postgres_url")
    server: KurrentServer | None = request.getfixturevalue("events") if store == "kurrent" else None
    ledger, arena = make_ledger(url), Arena(url, tmp_path / "target", None, server)
    try:
        await _append(ledger, server, range(EVENTS))
        dying = [arena.start(point, "projector", die_at=point, die_after=2 + n) for n, point in enumerate(KILL_POINTS)]
        for child in dying:
            assert await asyncio.to_thread(child.wait, PATIENCE_S) == -9
        halfway = (await rows_of(ledger)).total()

        await asyncio.to_thread(arena.start("projector").until_ready)
        await until(ledger, None, ROWS)
        await _until_caught_up(ledger, server)
    finally:
        arena.close()

    assert 0 < halfway < ROWS, "the kills hit nothing"
    assert (await rows_of(ledger)).total() == ROWS
    parked = await ledger.parked.find(limit=100)
    assert [event.event.data["poison"] for event in parked] == [True] * POISONED


async def _append(ledger: Ledger, server: KurrentServer | None, numbers: range) -> None:
    writer = None if server is None else KurrentSource(server.url)
    for first in range(numbers.start, numbers.stop, BATCH):
        batch = [an_event(number) for number in range(first, min(first + BATCH, numbers.stop))]
        if writer is None:
            await ledger.events.append(None, f"payment-{first}", batch)
        else:
            await writer.append(f"payment-{first}", batch)
    if writer is not None:
        await writer.aclose()


async def _until_caught_up(ledger: Ledger, server: KurrentServer | None) -> None:
    """The last event may be poisoned, and then no row tells that it was seen."""
    deadline = time.monotonic() + PATIENCE_S
    while await ledger.parked.count() < POISONED:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


@pytest.fixture
async def durable_postgres() -> AsyncIterator[PostgresServer]:
    need_postgres()
    with PostgresServer.start(durable=True) as server:
        yield server


@pytest.mark.long
@pytest.mark.requirement("O-2", "O-4", "X-17", "X-16", "X-74", "X-75", "O-36", "O-81", "O-85", "O-32")
async def test_everything_dies_under_load_and_every_message_arrives(
    durable_postgres: PostgresServer, events: KurrentServer, tmp_path: Path, start_server: StartServer,
    make_ledger: MakeLedger,
) -> None:  # fmt: skip
    """Projectors, dispatcher, worker, event store, PostgreSQL and Redis die in turn while events are appended."""
    redis = start_server(persistent=True, args=("--appendfsync", "always"))
    ledger = make_ledger(durable_postgres.url(), timeout_ms=5_000, dead_letter_type=None)
    await ledger.migrate()
    arena = Arena(durable_postgres.url(), tmp_path / "target", redis, events)
    try:
        starting = [arena.start(f"projector {n}", "projector") for n in (1, 2)]
        starting += [arena.start("dispatcher"), arena.start("worker")]
        for child in starting:
            await asyncio.to_thread(child.until_ready)
        faults = [
            partial(arena.kill_and_restart, "projector 1", "projector"),
            partial(_outage, events.kill, events.restart),
            partial(arena.kill_and_restart, "dispatcher"),
            partial(_outage, durable_postgres.kill, durable_postgres.restart),
            partial(arena.kill_and_restart, "projector 2", "projector"),
            partial(_outage, redis.kill, redis.restart),
            partial(arena.kill_and_restart, "worker"),
        ] * (3 if LONG else 1)
        # Each fault hits events that were appended a moment ago, and others that are being appended.
        share = -(-EVENTS // len(faults))
        writing = []
        for n, fault in enumerate(faults):
            numbers = range(n * share, min((n + 1) * share, EVENTS))
            writing.append(asyncio.create_task(_append_through_outages(events, numbers)))
            await _more(ledger)
            await fault()
        await asyncio.gather(*writing)
        await until(ledger, "SENT", ROWS)
        await _until_caught_up(ledger, events)

        # Replays from the beginning, by a projector that was told so, change nothing and send nothing.
        before, delivered = await rows_of(ledger), len(arena.deliveries())
        for name in ("projector 1", "projector 2"):
            arena.children[name].kill()
        async with ledger.database.transaction() as connection:
            await ledger.checkpoints.write(connection, "projector/default", str(BEGINNING))
        arena.start("projector")
        head = await KurrentSource(events.url).head()
        deadline = time.monotonic() + PATIENCE_S
        while int(await ledger.checkpoints.read("projector/default") or 0) < head:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        after = await rows_of(ledger)
    finally:
        arena.close()

    times = Counter(row_id for row_id, _ in arena.deliveries())
    keys = {key for _, key in arena.deliveries()}
    twice = sum(times.values()) - len(times)
    print(f"[chaos] projector: {EVENTS} events, {len(times)} rows, {twice} deliveries more than one, 0 lost")
    assert before == after == Counter({"SENT": ROWS})  # nothing DEAD that was not poisoned, nothing twice
    assert len(arena.deliveries()) == delivered
    assert len(times) == ROWS  # never delivered 0
    assert len(keys) == ROWS  # a receiver that honours the key sees each exactly once
    assert await ledger.parked.count() == POISONED
    assert await ledger.outbox.find(status=OutboxStatus.DEAD) == []
    await ledger.aclose()


async def _append_through_outages(server: KurrentServer, numbers: range) -> None:
    """As a program does: an append whose answer did not come is repeated with the same ids."""
    writer = KurrentSource(server.url, timeout_ms=5_000)
    for first in range(numbers.start, numbers.stop, BATCH // 4):
        batch = [an_event(number) for number in range(first, min(first + BATCH // 4, numbers.stop))]
        while True:
            try:
                await writer.append(f"payment-{first}", batch)
                break
            except SourceUnavailable:
                await asyncio.sleep(0.1)
        await asyncio.sleep(0.05)
    await writer.aclose()


async def _more(ledger: Ledger) -> None:
    """Wait until a few more rows were sent: the next fault then hits work in flight."""
    already = (await rows_of(ledger))["SENT"]
    await until(ledger, "SENT", min(already + 5, ROWS))


async def _outage(kill: object, restart: object) -> None:
    assert callable(kill)
    assert callable(restart)
    await asyncio.to_thread(kill)
    await asyncio.sleep(0.5)  # the outage itself
    await asyncio.to_thread(restart)
