"""An hour of ordinary life with a fault every minute: what grows without end shows here, and what is lost.

    make soak            an hour
    make soak SOAK=180   three minutes, to see that it runs

Two worker processes under `bullpen run` work on a mixed queue (plain, delayed, prioritized, retried, flows, lanes),
on a schedule and on an outbox in PostgreSQL. Every minute something dies, stands still or forgets. Every few seconds
memory, descriptors, keys, stream lengths and table sizes are written down. At the end nothing accepted may be
missing, and the last third of each curve may not lie above the middle third by more than what is allowed. (The first
third is left out: what is kept on purpose fills up to its bound.)
Elsewhere: the app (`soak_app`), single faults in all their forms (`schedules`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psycopg
import redis
from sqlalchemy.exc import SQLAlchemyError

from bullpen.errors import BullpenError
from bullpen.ledger import Ledger
from bullpen.outbox import Outbox
from bullpen.queue import Flow, Queue
from bullpen.testing import Child, PostgresServer, RedisServer
from tests.chaos.arena import ROOT

SAMPLE_EVERY_S: Final = 5.0
FAULT_EVERY_S: Final = 60.0
PER_SECOND: Final = 60
KEEP_SENT_MS: Final = 15_000
MB: Final = 1_000_000
ALLOWED: Final[dict[str, float]] = {
    # Beyond a tenth of the middle third.
    "memory of the oldest process": 8 * MB,
    "descriptors of the oldest process": 4,
    "keys of the server": 300,
    "memory of the server": 8 * MB,
    "entries of event streams": 1_500,
    "bytes of the outbox's tables": 8 * MB,
}


@dataclass
class Books:
    accepted: set[str] = field(default_factory=set)
    rows: set[str] = field(default_factory=set)
    refused: int = 0


@dataclass
class Soak:
    seconds: float
    directory: Path
    server: RedisServer
    postgres: PostgresServer
    database: str
    app: Child
    books: Books = field(default_factory=Books)
    outbox: Outbox = field(default_factory=Outbox)
    curves: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    dice: random.Random = field(default_factory=lambda: random.Random(7))

    async def run(self) -> list[str]:
        end = time.monotonic() + self.seconds
        async with Queue("mixed", connection=self.server.url) as queue, Ledger(self.database) as ledger:
            tasks = [
                asyncio.create_task(work)
                for work in (
                    self._every(1.0, lambda: self._produce(queue)),
                    self._every(1.0, self._enqueue),
                    self._every(10.0, lambda: self._retire(ledger)),
                    self._every(min(FAULT_EVERY_S, self.seconds / 6), self._strike, first=False),
                    self._every(min(SAMPLE_EVERY_S, self.seconds / 60), self._sample),
                )
            ]
            while time.monotonic() < end:
                await asyncio.sleep(1)
                for task in tasks:
                    if task.done():
                        task.result()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._drained()
        return [*self._growth(), *self._missing()]

    async def _every(self, seconds: float, act: Callable[[], Awaitable[None]], *, first: bool = True) -> None:
        if not first:
            await asyncio.sleep(seconds)
        while True:
            begin = time.monotonic()
            await act()
            await asyncio.sleep(max(0.0, begin + seconds - time.monotonic()))

    # ---- load -------------------------------------------------------------------------------------------------

    async def _produce(self, queue: Queue) -> None:
        options: list[dict[str, Any]] = [
            *({}, {}, {"delay": 500}, {"priority": 3}, {"lane": f"tenant-{self.dice.randrange(20)}"}),
            {"attempts": 2, "backoff": 100},
        ]
        for _ in range(PER_SECOND // 3):
            chosen = self.dice.choice(options)
            with contextlib.suppress(BullpenError):  # refused or unknown during a fault: not accepted
                job = await queue.add("retried" if "attempts" in chosen else "plain", {}, **chosen)
                self.books.accepted.add(job.id)
        with contextlib.suppress(BullpenError):
            jobs = await queue.add_many([("plain", {}) for _ in range(PER_SECOND // 3)])
            self.books.accepted.update(job.id for job in jobs)
        with contextlib.suppress(BullpenError):
            children = [Flow("plain", on_failure="ignore") for _ in range(3)]
            await queue.add_flow(Flow("plain", children=children))

    async def _enqueue(self) -> None:
        rows = [f"row-{time.monotonic_ns()}-{number}" for number in range(10)]
        try:
            await asyncio.to_thread(self._store, rows)
        except psycopg.Error:  # ended by a fault: nothing was accepted
            self.books.refused += 1
        else:
            self.books.rows.update(rows)

    def _store(self, rows: list[str]) -> None:
        with psycopg.connect(self.database) as connection:
            for row in rows:
                self.outbox.add_in_transaction_sync(connection, "delivered", "row", {"row": row})

    async def _retire(self, ledger: Ledger) -> None:
        with contextlib.suppress(BullpenError, SQLAlchemyError, psycopg.Error):
            await ledger.outbox.retire(keep_ms=KEEP_SENT_MS, grace_ms=1_000)

    # ---- faults -----------------------------------------------------------------------------------------------

    async def _strike(self) -> None:
        kind = self.dice.choice(("kill", "cut", "pause", "forget", "database", "freeze"))
        print(f"{time.strftime('%H:%M:%S')} fault: {kind}", flush=True)
        workers = _children(self.app.pid)
        match kind:
            case "kill" if len(workers) > 1:
                os.kill(workers[-1], signal.SIGKILL)
            case "freeze" if workers:
                os.kill(workers[-1], signal.SIGSTOP)
                try:
                    await asyncio.sleep(2)
                finally:  # also when the time is up: what stands still for ever loses its jobs
                    os.kill(workers[-1], signal.SIGCONT)
            case "cut":
                self.server.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            case "pause":
                with self.server.paused():
                    await asyncio.sleep(2)
            case "forget":
                self.server.command("SCRIPT", "FLUSH")
            case "database":
                with psycopg.connect(self.database, autocommit=True) as connection:
                    connection.execute(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
                    )

    # ---- watching ---------------------------------------------------------------------------------------------

    async def _sample(self) -> None:
        values = await asyncio.to_thread(self._look)
        for name, value in values.items():
            self.curves[name].append(value)

    def _look(self) -> dict[str, float]:
        values: dict[str, float] = {}
        if workers := _children(self.app.pid):
            oldest = workers[0]  # the newest is the one that is killed
            with contextlib.suppress(OSError):
                values["memory of the oldest process"] = _resident(oldest)
                values["descriptors of the oldest process"] = len(os.listdir(f"/proc/{oldest}/fd"))
        with contextlib.suppress(redis.RedisError):
            client = self.server.client()
            values["keys of the server"] = client.dbsize()
            values["memory of the server"] = client.info("memory")["used_memory"]
            streams = [f"bull:{queue}:events" for queue in ("mixed", "delivered", "periodic")]
            values["entries of event streams"] = sum(client.xlen(stream) for stream in streams)
        with contextlib.suppress(psycopg.Error), psycopg.connect(self.database, autocommit=True) as connection:
            found = connection.execute(
                "SELECT sum(pg_total_relation_size(c.oid)) FROM pg_class c"
                " JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = 'core_outbox' AND c.relkind = 'r'"
            ).fetchone()
            values["bytes of the outbox's tables"] = float(found[0] if found else 0)
        return values

    # ---- judging ----------------------------------------------------------------------------------------------

    async def _drained(self) -> None:
        deadline = time.monotonic() + 120
        while self._missing() and time.monotonic() < deadline:  # noqa: ASYNC110 - a file that others write
            await asyncio.sleep(1)

    def ran(self) -> tuple[Counter[str], Counter[str]]:
        jobs: Counter[str] = Counter()
        rows: Counter[str] = Counter()
        for line in (self.directory / "ran").read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):
                kind, name = json.loads(line)
                (rows if kind == "delivered" else jobs).update([name])
        return jobs, rows

    def _missing(self) -> list[str]:
        jobs, rows = self.ran()
        lost, undelivered = self.books.accepted - jobs.keys(), self.books.rows - rows.keys()
        found = []
        if lost:
            found.append(f"{len(lost)} of {len(self.books.accepted)} jobs never ran: {sorted(lost)[:5]}")
        if undelivered:
            found.append(f"{len(undelivered)} of {len(self.books.rows)} rows never arrived: {sorted(undelivered)[:5]}")
        return found

    def _growth(self) -> list[str]:
        found = []
        for name, curve in self.curves.items():
            third = len(curve) // 3
            middle, last = statistics.median(curve[third : 2 * third]), statistics.median(curve[2 * third :])
            allowed = middle * 1.1 + ALLOWED[name]
            shown = {"first": curve[0], "middle": middle, "last": last, "allowed": allowed}
            print(f"{name:36}" + "".join(f"  {which} {value:>14,.0f}" for which, value in shown.items()))
            if last > allowed:
                found.append(f"{name} grows: {middle:,.0f} in the middle third, {last:,.0f} in the last")
        return found


def _children(pid: int) -> list[int]:
    """The worker processes, oldest first."""
    with contextlib.suppress(OSError):
        return sorted(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    return []


def _resident(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def main(seconds: float) -> int:
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bullpen-soak-")))
        server = stack.enter_context(RedisServer.start("valkey", persistent=True, args=("--appendfsync", "always")))
        postgres = stack.enter_context(PostgresServer.start(durable=True))
        database = postgres.url(postgres.create_database())
        environment = {
            "BULLPEN_REDIS_URL": server.url,
            "BULLPEN_DATABASE_URL": database,
            "SOAK_DIRECTORY": str(directory),
            "BULLPEN_EMBEDDED": "never",
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        }
        command = [sys.executable, "-m", "bullpen"]
        migrated = Child([*command, "migrate"], env=environment, cwd=ROOT)
        if await migrated.ended(60):
            raise SystemExit(migrated.errors)
        app = stack.enter_context(
            Child([*command, "run", "tests.chaos.soak_app:app", "--processes", "2"], env=environment, cwd=ROOT)
        )
        soak = Soak(seconds, directory, server, postgres, database, app)
        problems = await soak.run()
        jobs, rows = soak.ran()
        again, twice = sum(jobs.values()) - len(jobs), sum(rows.values()) - len(rows)
        print(f"{len(soak.books.accepted)} jobs accepted, {again} runs beyond the first, ordered retries among them")
        print(
            f"{len(soak.books.rows)} rows accepted, {twice} delivered again, {soak.books.refused} transactions refused"
        )
        for problem in problems:
            print(f"PROBLEM: {problem}")
        if problems:
            print(app.errors[-5_000:])
        return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(float(sys.argv[1] if len(sys.argv) > 1 else 3_600))))
