"""Kill dispatchers, workers and servers at exact moments: nothing is forgotten, nothing gets stuck.

A row may be delivered twice only if it was in flight when something died, and then with the same idempotency key.
BULLPEN_CHAOS=long repeats it with 10 000 rows.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from bullpen.errors import DatabaseUnavailable
from bullpen.ledger import Ledger, OutboxStatus
from bullpen.testing import RedisServer
from bullpen.testing.postgres import PostgresServer, need_postgres
from tests.conftest import StartServer
from tests.databases import MakeLedger, item
from tests.outbox.forked import Forked

LONG = os.environ.get("BULLPEN_CHAOS") == "long"
ROWS = 10_000 if LONG else 300
LEASE_MS = 2_000
PATIENCE_S = 600 if LONG else 120

pytestmark = [pytest.mark.timeout(900 if LONG else 240)]


class Arena:
    """One database, one target, and processes that come and go."""

    def __init__(self, url: str, target: Path, redis: RedisServer | None) -> None:
        self.url, self.target, self.redis = url, target, redis
        self.children: list[Forked] = []
        target.touch()

    def start(
        self,
        role: str,
        *,
        strategy: str = "direct",
        die_at: str | None = None,
        die_after: int = 1,
        delay_s: float = 0.0,
        when_unknown: str = "resend",
    ) -> Forked:
        order = {
            "database": self.url,
            "redis": None if self.redis is None else self.redis.url,
            "target": str(self.target),
            "strategy": strategy,
            "role": role,
            "lease_ms": LEASE_MS,
            "die_at": die_at,
            "die_after": die_after,
            "delay_s": delay_s,
            "when_unknown": when_unknown,
        }
        child = Forked(order)
        self.children.append(child)
        return child

    def deliveries(self) -> list[tuple[str, str, int]]:
        lines = self.target.read_text().splitlines()
        return [(row_id, key, pid) for row_id, key, pid in map(json.loads, lines)]

    def close(self) -> None:
        for child in self.children:
            child.close()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "target"


@pytest.fixture
def direct_arena(ledger_url: str, target: Path) -> Iterator[Arena]:
    arena = Arena(ledger_url, target, None)
    yield arena
    arena.close()


@pytest.fixture
def queued_arena(postgres_url: str, target: Path, start_server: StartServer) -> Iterator[Arena]:
    arena = Arena(postgres_url, target, start_server(persistent=True, args=("--appendfsync", "always")))
    yield arena
    arena.close()


async def fill(ledger: Ledger, count: int = ROWS) -> set[str]:
    """Rows with short pauses, so that what was counted as a lost attempt comes round soon."""
    ids: set[str] = set()
    for first in range(0, count, 1_000):
        batch = [item(n, integration_type="file:x", backoff=200) for n in range(first, min(first + 1_000, count))]
        ids |= {str(entry.id) for entry in await ledger.outbox.enqueue_many(batch)}
    return ids


async def all_sent(ledger: Ledger, count: int, *, patience_s: float = PATIENCE_S) -> None:
    """Wait until nothing is left; reading all rows each time would be most of the load."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            left = await ledger.outbox.counts()
            if not any(left.values()):
                break
        except DatabaseUnavailable:
            left = {}
        assert time.monotonic() < deadline, f"{left} of {count} are left after {patience_s} s"
        await asyncio.sleep(0.1)
    assert len(await ledger.outbox.find(status=OutboxStatus.SENT, limit=count + 1)) == count


async def all_ended(ledger: Ledger) -> None:
    """Wait until every row is SENT or DEAD."""
    while True:
        counts = await ledger.outbox.counts()
        if not any(count for status, count in counts.items() if status is not OutboxStatus.DEAD):
            return
        await asyncio.sleep(0.1)


async def progress(arena: Arena) -> None:
    """Wait until a few more rows have arrived: the next fault then hits work in flight."""
    before, deadline = len(arena.deliveries()), time.monotonic() + PATIENCE_S
    while len(arena.deliveries()) < before + 10:
        assert time.monotonic() < deadline, f"no progress after {before} deliveries"
        await asyncio.sleep(0.02)


def audit(arena: Arena, ids: set[str], *, most_twice: int) -> int:
    """Never delivered 0; twice only what was in flight, and with the same key. Returns how many came twice."""
    deliveries = arena.deliveries()
    times = Counter(row_id for row_id, _, _ in deliveries)
    keys: dict[str, set[str]] = {}
    for row_id, key, _ in deliveries:
        keys.setdefault(row_id, set()).add(key)
    twice = sum(count - 1 for count in times.values())
    assert ids - set(times) == set(), "rows that never arrived"
    assert set(times) - ids == set(), "rows from nowhere"
    assert {len(each) for each in keys.values()} == {1}
    assert twice <= most_twice
    return twice


# In flight at a kill are at most the places of one process: 20, or a batch of 50 that was being queued.
DIRECT_POINTS = {
    "outbox.claimed": 0,  # begun by the claim, and not sent yet
    "outbox.sending": 20,
    "outbox.send_returned": 20,
    # A row that was sent gives its place to another: while a slow database writes outcomes, up to two batches of 50 and
    # one more place each may have been sent.
    "outbox.settling": 120,
    "outbox.settled": 120,
}


@pytest.mark.requirement("X-76", "X-79", "O-4", "X-17", "O-2")
async def test_a_dispatcher_that_dies_at_any_point_forgets_nothing(
    direct_arena: Arena, ledger_url: str, make_ledger: MakeLedger
) -> None:
    ledger = make_ledger(ledger_url)
    ids = await fill(ledger)
    # Starting processes is most of the time here, so SQLite gets the two that differ from the queued strategy's.
    every = LONG or ledger.database.is_postgres
    points = DIRECT_POINTS if every else {name: DIRECT_POINTS[name] for name in ("outbox.claimed", "outbox.settling")}
    dying = {
        point: direct_arena.start("dispatcher", die_at=point, die_after=1 if point == "outbox.claimed" else 2)
        for point in points
    }
    for point, child in dying.items():
        assert await asyncio.to_thread(child.wait, 30) == -9, point

    direct_arena.start("dispatcher")
    await all_sent(ledger, ROWS)

    twice = audit(direct_arena, ids, most_twice=sum(points.values()))
    print(f"[chaos] direct: {ROWS} rows, {len(points)} kills, {twice} delivered twice")


QUEUED_POINTS = [
    ("dispatcher", "outbox.claimed"),
    ("dispatcher", "outbox.enqueueing"),
    ("dispatcher", "outbox.enqueued"),
    ("worker", "outbox.begun"),
    ("worker", "outbox.send_returned"),
    ("worker", "outbox.settling"),
    *([("worker", "outbox.sending"), ("worker", "outbox.settled")] if LONG else []),
]


@pytest.mark.requirement("X-76", "X-78", "X-79", "O-4", "O-48")
async def test_dispatchers_and_workers_that_die_at_any_point_forget_nothing(
    queued_arena: Arena, postgres_url: str, make_ledger: MakeLedger
) -> None:
    ledger = make_ledger(postgres_url)
    ids = await fill(ledger)
    dying = {(role, point): queued_arena.start(role, strategy="queued", die_at=point) for role, point in QUEUED_POINTS}
    for (role, point), child in dying.items():
        if role == "dispatcher":
            assert await asyncio.to_thread(child.wait, 30) == -9, point
    queued_arena.start("dispatcher", strategy="queued")  # gives the workers something to die of
    for (_, point), child in dying.items():
        assert await asyncio.to_thread(child.wait, 30) == -9, point

    queued_arena.start("worker", strategy="queued")
    await all_sent(ledger, ROWS)

    # Each worker had at most 20 places.
    workers = sum(role == "worker" for role, _ in QUEUED_POINTS)
    twice = audit(queued_arena, ids, most_twice=workers * 20)
    print(f"[chaos] queued: {ROWS} rows, {len(QUEUED_POINTS)} kills, {twice} delivered twice")


@pytest.fixture
async def durable_postgres() -> AsyncIterator[PostgresServer]:
    need_postgres()
    with PostgresServer.start(durable=True) as server:
        yield server


@pytest.mark.requirement("X-80", "X-76", "O-4")
async def test_servers_that_die_under_load_lose_nothing_and_burn_no_attempts(
    durable_postgres: PostgresServer, target: Path, start_server: StartServer, make_ledger: MakeLedger
) -> None:
    redis = start_server(persistent=True, args=("--appendfsync", "always"))
    ledger = make_ledger(durable_postgres.url(), timeout_ms=30_000)
    await ledger.migrate()
    arena = Arena(durable_postgres.url(), target, redis)
    try:
        ids = await fill(ledger)
        for role in ("dispatcher", "worker"):
            # A target that is slow enough that the load outlasts the kills.
            child = arena.start(role, strategy="queued", delay_s=0.05 if LONG else 0.15)
            await asyncio.to_thread(child.until_ready)
        left = ROWS
        for _ in range(3 if LONG else 2):
            await progress(arena)
            await asyncio.to_thread(redis.kill)
            await asyncio.sleep(0.4)  # an outage, during which dispatchers tick several times
            await asyncio.to_thread(redis.restart)
            await progress(arena)
            left = ROWS - len(arena.deliveries())
            await asyncio.to_thread(durable_postgres.kill)
            await asyncio.sleep(0.3)
            await asyncio.to_thread(durable_postgres.restart)
        assert left > 0, "the load was over before the last kill"
        await all_sent(ledger, ROWS)
        attempts = [row.attempts for row in await ledger.outbox.find(limit=ROWS + 1)]
    finally:
        arena.close()

    twice = audit(arena, ids, most_twice=100)
    # An attempt is counted only for a delivery that had begun when its database died: at most 20 places, each time.
    print(f"[chaos] servers: {ROWS} rows, {twice} delivered twice, {sum(attempts)} attempts counted")
    assert sum(attempts) <= 100
    await ledger.aclose()


@pytest.mark.requirement("X-80")
async def test_minutes_without_redis_burn_no_attempts(
    queued_arena: Arena, postgres_url: str, make_ledger: MakeLedger
) -> None:
    """The short form waits for seconds; nothing in the code depends on how long it is."""
    assert queued_arena.redis is not None
    ledger, count = make_ledger(postgres_url), 100
    dispatcher = queued_arena.start("dispatcher", strategy="queued")
    await asyncio.to_thread(dispatcher.until_ready)
    queued_arena.redis.kill()

    ids = await fill(ledger, count)
    await asyncio.sleep(180 if LONG else 1.5)  # the outage itself
    during: list[Any] = await ledger.outbox.find(limit=count)
    queued_arena.redis.restart()
    queued_arena.start("worker", strategy="queued")
    await all_sent(ledger, count)

    assert {row.attempts for row in during} == {0}
    assert {row.attempts for row in await ledger.outbox.find(limit=count)} == {0}
    assert audit(queued_arena, ids, most_twice=0) == 0


@pytest.mark.requirement("X-16", "X-17", "O-4")
@pytest.mark.parametrize("rule", ["look_up", "park"])
async def test_a_target_that_must_not_get_it_twice_never_does(
    sqlite_url: str, target: Path, make_ledger: MakeLedger, rule: str
) -> None:
    """Killed between the send and the note of it: the rule of the channel decides, not luck."""
    arena, ledger, count = Arena(sqlite_url, target, None), make_ledger(sqlite_url), 60
    ids = await fill(ledger, count)
    try:
        child = arena.start("dispatcher", die_at="outbox.send_returned", die_after=30, when_unknown=rule)
        assert await asyncio.to_thread(child.wait, 60) == -9

        arena.start("dispatcher", when_unknown=rule)
        deadline = time.monotonic() + PATIENCE_S
        while sum(
            number for status, number in (await ledger.outbox.counts()).items() if status is not OutboxStatus.DEAD
        ):
            assert time.monotonic() < deadline, await ledger.outbox.counts()
            await asyncio.sleep(0.1)
    finally:
        arena.close()

    dead = await ledger.outbox.find(status=OutboxStatus.DEAD, integration_type="file:x", limit=count)
    arrived = Counter(row_id for row_id, _, _ in arena.deliveries())
    assert max(arrived.values()) == 1, "delivered twice"
    assert {row.error_code for row in dead} <= {"UNKNOWN_OUTCOME"}
    # Looked up: all are there. Parked: what was in flight is left to a person, whether it arrived or not.
    assert set(arrived) | {row.id for row in dead} == ids
    assert bool(dead) == (rule == "park")
    print(f"[chaos] {rule}: {count} rows, 1 kill, {len(dead)} parked, {len(arrived)} delivered once")


# Rows of one ordering key that leave under one claim ------------------------------------------------------------------


@pytest.mark.parametrize(
    "point", ["outbox.sending", "outbox.settling", *(["outbox.send_returned", "outbox.settled"] if LONG else [])]
)
async def test_a_run_of_one_key_survives_the_death_of_its_process(
    postgres_url: str, make_ledger: MakeLedger, target: Path, point: str
) -> None:
    """Killed three times in the middle: all arrive, those that come twice were in flight and have the same key, and
    what came first came in the order of the key."""
    ledger, arena = make_ledger(postgres_url), Arena(postgres_url, target, None)
    count = ROWS
    stored = await ledger.outbox.enqueue_many(
        [item(n, integration_type="file:x", backoff=200, ordering_key="order-1") for n in range(count)]
    )
    ids = [str(entry.id) for entry in stored]
    try:
        # By counts of settlements or of rows: far enough in for runs, which begin after the third row.
        for after in (30, 45, 60) if point in ("outbox.sending", "outbox.send_returned") else (6, 8, 10):
            child = arena.start("dispatcher", die_at=point, die_after=after)
            await asyncio.to_thread(child.wait, PATIENCE_S)
        arena.start("dispatcher")
        await all_sent(ledger, count)
    finally:
        arena.close()

    audit(arena, set(ids), most_twice=3 * 21)
    first = list(dict.fromkeys(row_id for row_id, _, _ in arena.deliveries()))
    assert first == ids
    attempts = [len(await ledger.outbox.attempts_of(row_id)) for row_id in ids]
    assert min(attempts) >= 1 and sum(attempts) <= count + 3


async def test_a_row_that_kills_its_process_does_so_a_few_times_only(
    postgres_url: str, make_ledger: MakeLedger, target: Path
) -> None:
    """In a run the claimed row is blamed for the death. After it the rows of the key leave alone, and the guilty one is
    tried as often as it may be."""
    ledger, arena = make_ledger(postgres_url), Arena(postgres_url, target, None)
    items = [item(n, integration_type="file:x", backoff=1, ordering_key="order-1", max_attempts=3) for n in range(60)]
    items[40] = item(
        40, integration_type="file:x", backoff=1, ordering_key="order-1", max_attempts=3, event_type="poison.v1"
    )
    stored = await ledger.outbox.enqueue_many(items)
    deaths = 0
    try:
        while True:
            child = arena.start("dispatcher")
            over = asyncio.create_task(all_ended(ledger))
            died = asyncio.create_task(asyncio.to_thread(child.wait, PATIENCE_S))
            await asyncio.wait({over, died}, return_when=asyncio.FIRST_COMPLETED)
            if over.done():
                break
            over.cancel()
            deaths += 1
    finally:
        arena.close()

    rows = {row.id: row for row in await ledger.outbox.find(limit=100)}
    found = [rows[str(entry.id)] for entry in stored]
    assert [row.status for n, row in enumerate(found) if n != 40] == [OutboxStatus.SENT] * 59
    assert (found[40].status, found[40].error_code) == (OutboxStatus.DEAD, "LEASE_EXPIRED")
    assert 3 <= deaths <= 4
