"""Kill workers, PostgreSQL and Redis under charged runs: every run ends, every key is charged once, credits add up.

BULLPEN_CHAOS=long runs it with 2 000 runs of three paid steps each.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bullpen.errors import BullpenError, InsufficientCredits
from bullpen.ledger import Ledger, Roles, RunRow, RunStatus
from bullpen.redis import Connection
from bullpen.runs import Runs
from bullpen.testing import Child, RedisServer
from bullpen.testing.postgres import PostgresServer, need_postgres
from tests.conftest import StartServer
from tests.forks import WarmChild
from tests.runs.kit import payload
from tests.runs.test_isolation import LONG

ROOT = Path(__file__).parents[2]
ROLES = Roles(tenant="chaos_tenant", worker="chaos_worker", service="chaos_service")
RUNS = 2_000 if LONG else 80
TENANTS = [f"tenant-{number}" for number in range(20 if LONG else 5)]
PRICE, GRANT = 3, 1_000_000
CONCURRENCY, LOCK_MS = 10, 1_000
PATIENCE_S = 1_500 if LONG else 120
STEPS = ("reserve", "model", "capture")

pytestmark = [pytest.mark.timeout(2_400 if LONG else 240), pytest.mark.leaves_jobs_active]


class Arena:
    """Databases, a bank, and processes that come and go."""

    def __init__(self, postgres: PostgresServer, database: str, redis: RedisServer, bank: Path) -> None:
        self.postgres, self.database, self.redis, self.bank = postgres, database, redis, bank
        self.children: list[Child] = []
        self.owners: dict[str, str] = {}
        self.ledger = Ledger(self.url(ROLES.service), roles=ROLES, timeout_ms=60_000)
        self.connection = Connection(redis.url, command_timeout_ms=1_000)
        self.runs = Runs(self.ledger, self.connection)
        self.service = self.runs.service
        with sqlite3.connect(bank) as file:
            file.execute("PRAGMA journal_mode=WAL")
            file.execute("CREATE TABLE calls (key TEXT, tenant TEXT)")
            file.execute("CREATE TABLE charges (key TEXT PRIMARY KEY, tenant TEXT)")
        file.close()

    def url(self, role: str) -> str:
        return self.postgres.url(self.database, role=role)

    def start(
        self,
        role: str,
        *,
        die_at: str | None = None,
        die_after: int = 1,
        delay_s: float = 0.01,
        lock_ms: int = LOCK_MS,
    ) -> Child:
        order = {
            "role": role,
            "worker_url": self.url(ROLES.worker),
            "service_url": self.url(ROLES.service),
            "roles": asdict(ROLES),
            "redis": self.redis.url,
            "bank": str(self.bank),
            "concurrency": CONCURRENCY,
            "lock_ms": lock_ms,
            "delay_s": delay_s,
            "die_at": die_at,
            "die_after": die_after,
        }
        child = WarmChild.module("tests.runs.chaos_process", json.dumps(order), cwd=ROOT)
        self.children.append(child)
        return child

    async def submit(self, count: int, *, fails_every: int = 0) -> list[str]:
        """Runs of all tenants; every so many of them fails for good."""
        for tenant in TENANTS:
            await self.service.grant(tenant, GRANT, reference="g", actor="bank")
        wanted = [
            payload(
                TENANTS[number % len(TENANTS)], definition={"fails": bool(fails_every) and number % fails_every == 0}
            )
            for number in range(count)
        ]
        self.owners |= {each.run_id: each.tenant_id for each in wanted}
        for first in range(0, count, 20):
            await asyncio.gather(*(self.service.submit(each, cost=PRICE) for each in wanted[first : first + 20]))
        return [each.run_id for each in wanted]

    async def all_ended(self) -> dict[str, RunRow]:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                rows = await self.ledger.runs.find(limit=len(self.owners) + 1)
                if all(row.status.is_terminal for row in rows):
                    return {row.id: row for row in rows}
                left = Counter(row.status.value for row in rows)
            except BullpenError as error:
                left = Counter([str(error)])
            if time.monotonic() > deadline:
                raise AssertionError(f"not ended within {PATIENCE_S} s: {left}")
            await asyncio.sleep(0.1)

    def bank_rows(self, table: str) -> list[tuple[str, str]]:
        with sqlite3.connect(self.bank) as file:
            found = file.execute(f"SELECT key, tenant FROM {table}").fetchall()
        file.close()
        return found

    async def audit(self, rows: dict[str, RunRow], *, most_repeated: int) -> str:
        """Everything that must hold when all is over."""
        statuses = Counter(row.status for row in rows.values())
        assert set(rows) == set(self.owners)
        charges, calls = self.bank_rows("charges"), Counter(key for key, _ in self.bank_rows("calls"))
        # Each paid step of each completed run has one key, and no other keys exist: they are stable over attempts.
        for run_id, row in rows.items():
            mine = {key for key, _ in charges if key.startswith(run_id)}
            wanted = {f"{run_id}/{step}" for step in STEPS}
            assert mine <= wanted
            if row.status is RunStatus.COMPLETED:
                assert mine == wanted
        assert all(self.owners[key.partition("/")[0]] == tenant for key, tenant in charges)
        repeated = sum(calls.values()) - len(calls)
        assert repeated <= most_repeated
        # Credits: what was granted less what completed, and the entries add up to it.
        for tenant in TENANTS:
            completed = sum(row.tenant_id == tenant and row.status is RunStatus.COMPLETED for row in rows.values())
            assert await self.service.balance(tenant) == GRANT - PRICE * completed
            assert self.entries_of(tenant) == GRANT - PRICE * completed
            # No tenant sees another's run in any query.
            seen = await seen_by(self, tenant)
            assert all(self.owners[run_id] == tenant for run_id in seen)
        # Each failed run has one dead letter; nothing else has one.
        letters = Counter([letter.job_id async for letter in self.runs.queue.dead_letters])
        failed = {run_id for run_id, row in rows.items() if row.status is RunStatus.FAILED}
        assert set(letters) == failed
        assert all(count == 1 for count in letters.values())
        self.check_logs()
        return f"{dict(statuses)}, {len(charges)} charges, {repeated} calls repeated"

    def entries_of(self, tenant: str) -> int:
        found = self.postgres.execute(
            "SELECT sum(amount) FROM core_outbox.bullpen_credit_entries WHERE tenant_id = %s",
            [tenant],
            database=self.database,
        )
        return int(found[0][0])

    def check_logs(self) -> None:
        """No line of any process about one run names another tenant."""
        for child in self.children:
            for line in child.output.splitlines():
                if not line.startswith("{"):
                    continue
                record = json.loads(line)
                owner = self.owners.get(record.get("runId", ""))
                assert owner is None or record.get("tenantId", owner) == owner
                for run_id in re.findall(r"[0-9a-f]{8}-[0-9a-f-]{27}", line):
                    assert self.owners.get(run_id, owner) == owner or record["logger"] != "bullpen.runs"

    async def aclose(self) -> None:
        for child in self.children:
            child.close()
        await self.runs.aclose()
        await self.connection.aclose()
        await self.ledger.aclose()


async def seen_by(arena: Arena, tenant: str) -> list[str]:
    async with Ledger(arena.url(ROLES.tenant), roles=ROLES, duty="tenant") as ledger:
        import sqlalchemy as sa

        async def everything(runs: Any) -> list[str]:
            found = await runs.connection.execute(sa.text("SELECT CAST(id AS text) FROM core_outbox.bullpen_runs"))
            return list(found.scalars())

        return await ledger.transactions.run(tenant, everything)


@pytest.fixture(scope="module")
def durable_postgres() -> Any:
    need_postgres()
    with PostgresServer.start(durable=True, args=("max_connections=200",)) as server:
        for role in ("chaos_owner", ROLES.tenant, ROLES.worker, ROLES.service):
            server.execute(f"CREATE ROLE {role} LOGIN")
        yield server


@pytest.fixture
async def arena(durable_postgres: PostgresServer, start_server: StartServer, tmp_path: Path) -> AsyncIterator[Arena]:
    database = durable_postgres.create_database(owner="chaos_owner")
    async with Ledger(durable_postgres.url(database, role="chaos_owner"), roles=ROLES) as owner:
        await owner.migrate()
    redis = start_server(persistent=True, args=("--appendfsync", "always"))
    opened = Arena(durable_postgres, database, redis, tmp_path / "bank.sqlite3")
    yield opened
    await opened.aclose()


POINTS = {
    # Where a worker dies, and how many paid calls may come twice because of it: those it had in flight.
    "runs.begun": 0,
    "runs.step_begins": CONCURRENCY,
    "runs.step_done": CONCURRENCY,
    "runs.step_kept": CONCURRENCY,
    "runs.completing": CONCURRENCY,
    "runs.completed": CONCURRENCY,
    "job.failed": CONCURRENCY,
}


@pytest.mark.requirement("X-106", "X-110", "X-119", "X-120", "R-23", "R-25", "R-52", "R-1")
async def test_a_worker_that_dies_at_any_point_pays_nothing_twice_and_forgets_no_run(arena: Arena) -> None:
    # Starting processes is most of the time here: the short form dies where most is at stake.
    points = POINTS if LONG else ("runs.step_done", "runs.completing", "job.failed")
    await arena.submit(RUNS if LONG else 40, fails_every=5)
    await arena.start("caretaker").seen("ready")
    dying = {point: arena.start("worker", die_at=point, die_after=2) for point in points}
    for point, child in dying.items():
        assert await child.ended(60) == -9, point

    arena.start("worker")
    rows = await arena.all_ended()

    told = await arena.audit(rows, most_repeated=sum(POINTS.values()))
    print(f"[chaos] points: {len(rows)} runs, {len(points)} kills, {told}")


@pytest.mark.long
@pytest.mark.requirement("R-51", "X-106", "X-109", "X-120", "R-52", "R-17", "X-114", "R-21")
async def test_workers_and_servers_that_die_under_load_leave_every_run_ended_and_paid_once(arena: Arena) -> None:
    chosen = random.Random(11)
    await arena.submit(RUNS, fails_every=10)
    caretaker = arena.start("caretaker")
    workers = [arena.start("worker", delay_s=0.03) for _ in range(2)]
    for child in (caretaker, *workers):
        await child.seen("ready")
    kills = 0

    async def progress(more: int) -> bool:
        """Wait until so many more steps were paid: the next fault then hits work in flight."""
        before, deadline = len(arena.bank_rows("calls")), time.monotonic() + PATIENCE_S
        while len(arena.bank_rows("calls")) < before + more:
            if time.monotonic() > deadline or len(arena.bank_rows("calls")) >= 3 * RUNS - RUNS // 4:
                return False
            await asyncio.sleep(0.02)
        return True

    async def kill_a_worker() -> None:
        nonlocal kills
        place = chosen.randrange(len(workers))
        workers[place].kill()
        kills += 1
        workers[place] = arena.start("worker", delay_s=0.03)

    cancelled = 0
    for server in (arena.redis, arena.postgres) * (2 if LONG else 1):
        for _ in range(5 if LONG else 1):
            await progress(RUNS // (40 if LONG else 8))
            await kill_a_worker()
        await progress(5)
        await asyncio.to_thread(server.kill)
        await asyncio.sleep(0.3)  # an outage
        await asyncio.to_thread(server.restart)
        run_id = chosen.choice(list(arena.owners))
        try:
            async with asyncio.timeout(10):
                await arena.service.cancel(arena.owners[run_id], run_id, actor="ada")
                cancelled += 1
        except (BullpenError, TimeoutError):
            pass  # it had ended, or the server is not back yet
    rows = await arena.all_ended()

    told = await arena.audit(rows, most_repeated=(kills + 4) * 2 * CONCURRENCY)
    print(
        f"[chaos] servers: {RUNS} runs, {kills} workers killed, Redis and PostgreSQL too, {cancelled} cancelled, {told}"
    )


@pytest.mark.long
@pytest.mark.requirement("X-118", "R-23", "R-3")
async def test_how_long_it_takes_until_another_worker_has_the_run(arena: Arena) -> None:
    """After a crash at most the lock and one interval of the stalled check pass, whatever the handler's length."""
    (run_id,) = await arena.submit(1)
    await arena.service.give_job(await arena.service.get(TENANTS[0], run_id))
    first = arena.start("worker", delay_s=120)
    await first.seen("ready")
    while (await arena.service.get(TENANTS[0], run_id)).fence < 1:  # noqa: ASYNC110 - the database tells nobody
        await asyncio.sleep(0.02)
    await arena.start("worker").seen("ready")
    await asyncio.sleep(3 * LOCK_MS / 1000)  # the lock is renewed: a long call does not lose its run
    assert (await arena.service.get(TENANTS[0], run_id)).fence == 1

    first.kill()
    killed_at = time.monotonic()
    async with asyncio.timeout(60):
        while (await arena.service.get(TENANTS[0], run_id)).fence < 2:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)
    took_ms = (time.monotonic() - killed_at) * 1000
    rows = await arena.all_ended()

    print(f"[chaos] takeover: {took_ms:.0f} ms with a lock of {LOCK_MS} ms and a check every 300 ms")
    assert rows[run_id].status is RunStatus.COMPLETED
    assert took_ms < LOCK_MS + 300 + 15_000  # generous: the machine may be busy with other things


@pytest.mark.requirement("R-37")
async def test_a_worker_that_is_told_to_stop_finishes_what_it_has_and_takes_nothing_more(arena: Arena) -> None:
    for run_id in await arena.submit(3 * CONCURRENCY):
        await arena.service.give_job(await arena.service.get(arena.owners[run_id], run_id))
    worker = arena.start("worker", delay_s=0.2, lock_ms=60_000)  # as long as a closing worker waits
    await worker.seen("ready")
    async with asyncio.timeout(60):
        while not arena.bank_rows("calls"):  # noqa: ASYNC110 - the bank tells nobody
            await asyncio.sleep(0.02)

    worker.terminate()
    code = await worker.ended(60)

    rows = await arena.ledger.runs.find(limit=100)
    statuses = Counter(row.status for row in rows)
    paid = Counter(key.partition("/")[0] for key, _ in arena.bank_rows("calls"))
    assert code == 0, worker.errors
    assert set(statuses) <= {RunStatus.COMPLETED, RunStatus.QUEUED}
    assert statuses[RunStatus.COMPLETED] >= 1
    # What was begun was finished, what was not begun was not touched; nobody was stopped half way.
    assert set(paid) == {row.id for row in rows if row.status is RunStatus.COMPLETED}
    assert set(paid.values()) == {len(STEPS)}
    assert (await arena.runs.queue.counts()).active == 0


@pytest.mark.requirement("R-52")
async def test_credits_cannot_be_overdrawn_by_many_processes(arena: Arena) -> None:
    await arena.service.grant(TENANTS[0], 10, reference="g", actor="bank")

    async def submit(ledger: Ledger) -> bool:
        try:
            await Runs(ledger, arena.connection).service.submit(payload(TENANTS[0]), cost=1)
        except InsufficientCredits:
            return False
        return True

    ledgers = [Ledger(arena.url(ROLES.tenant), roles=ROLES, duty="tenant") for _ in range(3)]
    try:
        stored = await asyncio.gather(*(submit(ledger) for ledger in ledgers for _ in range(8)))
    finally:
        for ledger in ledgers:
            await ledger.aclose()

    assert sum(stored) == 10
    assert await arena.service.balance(TENANTS[0]) == 0
