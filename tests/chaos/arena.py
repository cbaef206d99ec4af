"""What all fault tests share: a queue whose books are kept, workers in processes of their own, the audit at the end.

In: a server. Out: an `Arena`: producers and workers that write down what they were promised and what they ran, and
`audit`, which says whether anything was lost, got stuck, was stored twice, ran without need or moved illegally.
Elsewhere: the faults themselves (`bullpen.testing`), what a worker process does (`worker_process`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from bullpen.queue import Job, Queue
from bullpen.redis import Connection
from bullpen.testing import Child, JobBook, RedisServer, assert_sound
from bullpen.worker import Worker
from tests.forks import WarmChild

LONG = os.environ.get("BULLPEN_CHAOS") == "long"
"""The long form is for `make chaos`; the short one shows the same faults, only less often."""
PREFIX = "bull"
ROOT = Path(__file__).parents[2]
# More than any test writes, so that the books see every event.
EVENTS_KEPT = 10_000_000
PATIENCE_S = 300.0 if LONG else 90.0

T = TypeVar("T")


def scaled(short: int, long: int) -> int:
    """A number of jobs, kills or rounds: the first in `make test`, the second in `make chaos`."""
    return long if LONG else short


def note(figure: str) -> None:
    """Show a measured figure: pytest prints it with -s, and with the failure of its test."""
    print(f"[chaos] {figure}")


@dataclass(frozen=True, slots=True)
class Span:
    """One run of a handler, in seconds of the machine's monotonic clock; `end` is None when the process died in it."""

    job_id: str
    fence: int
    pid: int
    begin: float
    end: float | None
    key: str


class RunLog:
    """When each handler began and ended, in one file that all processes append to and no kill can tear."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, kind: str, job: Job) -> None:
        entry = [kind, job.id, job.fence, os.getpid(), time.monotonic(), job.idempotency_key]
        os.write(self._descriptor, json.dumps(entry).encode() + b"\n")

    def spans(self) -> list[Span]:
        begun: dict[tuple[str, int, int], tuple[float, str]] = {}
        ended: dict[tuple[str, int, int], float] = {}
        for line in self._path.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n"):
                continue
            kind, job_id, fence, pid, at, key = json.loads(line)
            if kind == "begin":
                begun[job_id, fence, pid] = (at, key)
            else:
                ended[job_id, fence, pid] = at
        return [Span(*run, begin, ended.get(run), key) for run, (begin, key) in begun.items()]

    def first_begin_after(self, moment: float) -> float | None:
        """Seconds from `moment` to the first handler that began later."""
        return min((span.begin - moment for span in self.spans() if span.begin >= moment), default=None)

    def has_spans(self, count: int) -> bool:
        """Whether so many runs have begun since the start."""
        return len(self.spans()) >= count

    def has_work(self, pid: int) -> bool:
        """Whether a run has begun in a process and not ended."""
        return any(span.pid == pid and span.end is None for span in self.spans())

    def overlaps(self) -> list[str]:
        """Jobs that two handlers ran at the same time. Runs that a kill ended do not count: nobody saw their end."""
        by_job: dict[str, list[Span]] = defaultdict(list)
        for span in self.spans():
            if span.end is not None:
                by_job[span.job_id].append(span)
        found = []
        for job_id, spans in by_job.items():
            spans.sort(key=lambda span: span.begin)
            for earlier, later in itertools.pairwise(spans):
                if earlier.end is not None and later.begin < earlier.end:
                    shared_s = earlier.end - later.begin
                    found.append(f"{job_id!r}: fences {earlier.fence} and {later.fence} overlap by {shared_s:.3f} s")
        return found

    def close(self) -> None:
        os.close(self._descriptor)


class Books:
    """JobBook and run log of one queue. Every process opens its own on the same directory."""

    def __init__(self, directory: Path) -> None:
        self.ledger = JobBook(directory / "ledger")
        self.runs = RunLog(directory / "runs")
        self.on_begin: Callable[[Job], object] = lambda job: None
        """Called when a run is in the books and its work begins."""

    async def handle(self, job: Job) -> Any:
        """What every job of these tests does, by its data: sleep `ms`, block the loop `block_ms`, fail `fail` times."""
        data = job.data
        self.ledger.ran(job.id, fence=job.fence)
        self.runs.write("begin", job)
        self.on_begin(job)
        try:
            if data.get("poison"):
                os.kill(os.getpid(), signal.SIGKILL)  # takes its whole process down
            if data.get("progress"):
                await job.progress(50)
            if data.get("block_ms"):
                time.sleep(data["block_ms"] / 1000)  # noqa: ASYNC251 - a handler that misbehaves, on purpose
            if data.get("ms"):
                await asyncio.sleep(data["ms"] / 1000)
            if job.attempts_made < data.get("fail", 0):
                raise RuntimeError(f"attempt {job.attempts_made + 1} fails as ordered")
        finally:
            self.runs.write("end", job)
        return {"fence": job.fence}

    def close(self) -> None:
        self.ledger.close()
        self.runs.close()


class Arena:
    """One queue under attack."""

    def __init__(self, server: RedisServer, directory: Path) -> None:
        self.server = server
        self.directory = directory
        self.name = f"q-{uuid.uuid4().hex[:12]}"
        self.books = Books(directory)
        self.ledger, self.runs = self.books.ledger, self.books.runs
        self.children: list[Child] = []
        self.in_process: list[Worker] = []
        self.told: list[tuple[str, ...]] = []
        """What the workers of this process said: (event, …)."""

    @property
    def base(self) -> str:
        return f"{PREFIX}:{self.name}:"

    def client(self) -> redis.Redis:
        """A blocking client of its own; close it."""
        return redis.Redis(
            host="127.0.0.1", port=self.server.port, protocol=2, socket_timeout=5, retry=Retry(NoBackoff(), 0)
        )

    # ---- producing --------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def queue(self, *, url: str | Connection | None = None, **options: Any) -> AsyncIterator[Queue]:
        options = {"events_max_len": EVENTS_KEPT, "attempts": 1, **options}
        options.setdefault("add_deadline", 60_000)  # outages here are longer than a web request would wait
        async with Queue(self.name, connection=url or self.server.url, **options) as queue:
            yield queue

    async def add(self, queue: Queue, count: int, **data: Any) -> list[str]:
        """Add one by one at the same time (they coalesce) and write down what was acknowledged."""

        async def one() -> str:
            job = await queue.add("work", data)
            self.ledger.accepted(job.id)
            return job.id

        return list(await asyncio.gather(*(one() for _ in range(count))))

    @contextlib.asynccontextmanager
    async def feeding(self, queue: Queue, count: int, *, every_s: float, **data: Any) -> AsyncIterator[None]:
        """Add `count` jobs again and again for the length of a block."""

        async def feed() -> None:
            while not over.is_set():
                await self.add(queue, count, **data)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(over.wait(), every_s)

        over = asyncio.Event()
        task = asyncio.create_task(feed())
        try:
            yield
        finally:
            over.set()
            await task

    # ---- working ----------------------------------------------------------------------------------------------

    def start_worker(self, *, url: str | None = None, offset_s: float = 0.0, **options: Any) -> Child:
        """A worker in a process of its own; its wall clock is moved by `offset_s`. Wait for the line `ready`."""
        order = {
            "url": url or self.server.url,
            "queue": self.name,
            "directory": str(self.directory),
            "offset_s": offset_s,
            "options": options,
        }
        child = WarmChild.module("tests.chaos.worker_process", json.dumps(order), cwd=ROOT)
        self.children.append(child)
        return child

    async def start_workers(self, count: int, **options: Any) -> list[Child]:
        children = [self.start_worker(**options) for _ in range(count)]
        await asyncio.gather(*(child.seen("^ready") for child in children))
        return children

    def worker(
        self, handler: Callable[[Job], Any] | None = None, *, url: str | Connection | None = None, **options: Any
    ) -> Worker:
        """A worker in this process; enter it. What it tells is kept in `told`."""
        worker = Worker(self.name, handler or self.books.handle, connection=url or self.server.url, **options)
        worker.on("error", lambda error: self.told.append(("error", repr(error))))
        worker.on("lock_lost", lambda job, error: self.told.append(("lock_lost", job.id)))
        worker.on("stalled", lambda job_id: self.told.append(("stalled", job_id)))
        worker.on("failed", lambda job, reason: self.told.append(("failed", job.id, reason)))
        self.in_process.append(worker)
        return worker

    def heard(self, event: str) -> list[tuple[str, ...]]:
        return [entry for entry in self.told if entry[0] == event]

    # ---- judging ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        with contextlib.closing(self.client()) as client, self.ledger.following(client, PREFIX, self.name):
            yield

    async def all_ended(self, timeout: float = PATIENCE_S) -> None:
        """Wait until every accepted job has ended; needs `following`."""
        try:
            await asyncio.to_thread(self.ledger.wait_for_ends, timeout)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.describe()}") from None

    def audit(
        self,
        *,
        max_extra_runs: int = 0,
        max_runs: int | None = None,
        unexpected: bool = True,
        may_overlap: bool = False,
    ) -> None:
        """Nothing lost, stuck or done twice, only legal moves, sound structures. Call it when no worker runs."""
        client = self.server.client()
        self.ledger.read_events(client, PREFIX, self.name)
        self.ledger.read_states(client, PREFIX, self.name)
        try:
            self.ledger.check(max_runs=max_runs, max_extra_runs=max_extra_runs, unexpected=unexpected)
            assert_sound(client, PREFIX, self.name, at_rest=True)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.describe()}") from None
        if not may_overlap:
            assert self.runs.overlaps() == []

    @property
    def extra_runs(self) -> int:
        """Runs beyond the first of each job."""
        runs = self.ledger.runs
        return len(runs) - len({run.job_id for run in runs})

    def count(self, state: str) -> int:
        kind = "LLEN" if state in ("wait", "active") else "ZCARD"
        return int(self.server.command(kind, self.base + state))

    def field(self, job_id: str, name: str) -> bytes | None:
        value: bytes | None = self.server.command("HGET", self.base + job_id, name)
        return value

    def describe(self) -> str:
        """For the message of a failure: where everything is."""
        with contextlib.suppress(Exception):
            counts = {state: self.count(state) for state in ("wait", "active", "delayed", "completed", "failed")}
            lines = [f"states: {counts}", f"told: {self.told[-20:]}"]
            lines += [f"{child!r}\n{child.output[-500:]}{child.errors[-2000:]}" for child in self.children]
            return "\n".join(lines)
        return "the server cannot be asked"

    def close(self) -> None:
        for child in self.children:
            child.close()
        self.books.close()


@contextlib.contextmanager
def open_arena(server: RedisServer, directory: Path) -> Iterator[Arena]:
    arena = Arena(server, directory)
    try:
        yield arena
    finally:
        arena.close()


@contextlib.contextmanager
def repeating(fault: Callable[[], object], every_s: float) -> Iterator[list[int]]:
    """Make a fault again and again from a thread, for the length of a block. Gives a list of one number: how often."""
    over, times = threading.Event(), [0]

    def repeat() -> None:
        while not over.wait(every_s):
            with contextlib.suppress(redis.RedisError, OSError):
                fault()
                times[0] += 1

    thread = threading.Thread(target=repeat, name="fault", daemon=True)
    thread.start()
    try:
        yield times
    finally:
        over.set()
        thread.join()


async def within(seconds: float, what: str, awaitable: Awaitable[T]) -> T:
    """Await with a bound, and say what did not happen."""
    try:
        async with asyncio.timeout(seconds):
            return await awaitable
    except TimeoutError:
        raise AssertionError(f"not within {seconds} s: {what}") from None


async def until(holds: Callable[[], bool], what: str, *, seconds: float = PATIENCE_S) -> None:
    """For facts that only the server knows and tells nobody: ask every few milliseconds, with a bound."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.005)
