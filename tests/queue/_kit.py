"""One queue of one test: makes queues and workers that are closed in the end, and reads what is stored.

Stored state is read with a client of its own and with key names written out, so that a mistake in the code under test
cannot hide itself.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from typing import Any, Self

import redis

from bullpen.queue import Job, Queue, QueueEvents
from bullpen.queue.add import _ALONE_AFTER
from bullpen.queue.batch import BatchHandler
from bullpen.queue.job import Handler
from bullpen.worker import Worker
from bullpen.worker.engine import WorkerEngine

PATIENCE_S = 60.0
"""Long enough for a busy machine; reached only when something is broken."""

TOLD = ("active", "completed", "failed", "retrying", "stalled", "suspect", "lock_lost", "returned", "error")


class Told:
    """What a worker told, in order, and a way to wait for it."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.all: list[tuple[str, tuple[Any, ...]]] = []
        self._changed = asyncio.Event()
        for event in TOLD:
            worker.on(event, self._recorder(event))  # type: ignore[arg-type]  # the names above are WorkerEvents

    def _recorder(self, event: str) -> Callable[..., None]:
        def record(*details: Any) -> None:
            self.all.append((event, details))
            self._changed.set()

        return record

    def of(self, event: str) -> list[tuple[Any, ...]]:
        """Details of each such event so far."""
        return [details for name, details in self.all if name == event]

    def ids(self, event: str) -> list[str]:
        """Job ids of each such event so far, in order."""
        return [details[0].id if isinstance(details[0], Job) else details[0] for details in self.of(event)]

    async def wait(self, event: str, count: int = 1, *, within_s: float = PATIENCE_S) -> tuple[Any, ...]:
        """Wait for the `count`-th such event and return its details."""
        try:
            async with asyncio.timeout(within_s):
                while len(self.of(event)) < count:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"no {count} × {event!r} within {within_s} s; told was {self.all}") from None
        return self.of(event)[count - 1]

    async def finished(self, count: int = 1, *, within_s: float = PATIENCE_S) -> None:
        """Wait until so many jobs completed or failed finally."""
        async with asyncio.timeout(within_s):
            while len(self.of("completed")) + len(self.of("failed")) < count:
                self._changed.clear()
                await self._changed.wait()


def engine_of(who: Told | Worker) -> WorkerEngine:
    """What no public name shows: whether a worker was told of a limit, whether it has polled."""
    engine = (who.worker if isinstance(who, Told) else who)._engine
    assert engine is not None
    return engine


class Kit:
    """Makes what a test needs of one queue and closes it afterwards."""

    def __init__(self, url: str, name: str, client: redis.Redis) -> None:
        self.url, self.name, self.redis = url, name, client
        self.base = f"bull:{name}:"
        self._queues: list[Queue] = []
        self._workers: list[Worker] = []
        self._readers: list[QueueEvents] = []

    async def close(self) -> None:
        await asyncio.gather(*(worker.close(0) for worker in self._workers))
        for reader in self._readers:
            reader.close()
        await asyncio.gather(*(queue.close() for queue in self._queues))
        if any(self.redis.scan_iter(f"{self.base}*", count=1_000)):
            # The checker knows queues by their meta, which a queue that only a worker has met does not have yet.
            self.redis.hsetnx(self.base + "meta", "opts.maxLenEvents", "10000")

    def queue(self, name: str | None = None, **options: Any) -> Queue:
        options.setdefault("connection", self.url)
        queue = Queue(name or self.name, **options)
        self._queues.append(queue)
        return queue

    async def add_alone(self, queue: Queue) -> int:
        """Add jobs one after the other, until the queue sends a single one at once. Returns how many."""
        for _ in range(_ALONE_AFTER):
            await queue.add("alone")
        assert queue._adder._alone >= _ALONE_AFTER
        return _ALONE_AFTER

    def worker(self, handler: Handler | BatchHandler, *, queue: str | None = None, **options: Any) -> Worker:
        """A worker that was not started yet. Checks for stalled jobs are rare unless a test asks for them."""
        options.setdefault("connection", self.url)
        options.setdefault("stalled_interval", 60_000)
        worker = Worker(queue or self.name, handler, **options)
        self._workers.append(worker)
        return worker

    async def work(self, handler: Handler | BatchHandler, **options: Any) -> Told:
        """Start a worker and listen to it."""
        told = Told(self.worker(handler, **options))
        await told.worker.start()
        return told

    async def drain(self, handler: Handler, count: int, **options: Any) -> Told:
        """Run a worker until so many jobs have finished, then close it."""
        told = await self.work(handler, **options)
        await told.finished(count)
        await told.worker.close()
        return told

    async def reader(self, **options: Any) -> QueueEvents:
        options.setdefault("connection", self.url)
        reader = QueueEvents(self.name, **options)
        self._readers.append(reader)
        await reader.__aenter__()
        return reader

    # ---- what is stored -------------------------------------------------------------------------------------

    def command(self, *parts: str | bytes | float) -> Any:
        return self.redis.execute_command(*parts)  # type: ignore[no-untyped-call]  # redis-py leaves it untyped

    def fields(self, job_id: str, queue: str | None = None) -> dict[str, str]:
        flat = self.command("HGETALL", f"bull:{queue or self.name}:{job_id}")
        return {name.decode(): value.decode("utf-8", "replace") for name, value in flat.items()}

    def ids(self, key: str) -> list[str]:
        """Ids of a list, next to run first."""
        return [raw.decode() for raw in reversed(self.command("LRANGE", self.base + key, 0, -1))]

    def zset(self, key: str) -> dict[str, float]:
        """Score by id, in order of scores."""
        pairs: Any = self.redis.zrange(self.base + key, 0, -1, withscores=True)
        return {raw.decode(): score for raw, score in pairs}

    def has(self, rest: str) -> bool:
        return bool(self.redis.exists(self.base + rest))

    def marker(self) -> dict[str, float]:
        return self.zset("marker")

    def lock(self, job_id: str) -> str | None:
        raw: Any = self.redis.get(f"{self.base}{job_id}:lock")
        return None if raw is None else raw.decode()

    def server_ms(self) -> int:
        seconds, micros = self.command("TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    def events(self, *, queue: str | None = None, job_id: str | None = None) -> list[dict[str, str]]:
        """The event stream as it is, oldest first."""
        entries: Any = self.redis.xrange(f"bull:{queue or self.name}:events")
        decoded = [{name.decode(): value.decode() for name, value in fields.items()} for _, fields in entries]
        return [event for event in decoded if job_id is None or event.get("jobId") == job_id]

    def event_names(self, job_id: str) -> list[str]:
        return [event["event"] for event in self.events(job_id=job_id)]

    def clients(self) -> list[str]:
        """`CLIENT LIST`, one line per connection."""
        listed: Any = self.redis.client_list()
        return [" ".join(f"{name}={value}" for name, value in one.items()) + " " for one in listed]

    def script_calls(self) -> int:
        """Script calls of all clients since the statistics were reset."""
        stats: Any = self.redis.info("commandstats")
        names = ("cmdstat_evalsha", "cmdstat_eval", "cmdstat_fcall")
        return sum(int(stats[name]["calls"]) for name in names if name in stats)

    def reset_statistics(self) -> None:
        self.redis.config_resetstat()

    def seed(
        self,
        job_id: str | bytes,
        *,
        only: dict[str, Any] | None = None,
        to: str | None = "wait",
        score: float | None = None,
        **given: Any,
    ) -> None:
        """Store a job as a foreign producer would, with exactly these fields."""
        raw_id = job_id if isinstance(job_id, bytes) else job_id.encode()
        usual = {"name": "foreign", "data": "{}", "opts": "{}", "delay": 0, "priority": 0}
        stored = {**usual, "timestamp": self.server_ms(), **given} if only is None else only
        if stored:
            self.redis.hset(self.base.encode() + raw_id, mapping=stored)  # type: ignore[arg-type]  # bytes are a key too
        if to is not None and score is None:
            self.redis.lpush(self.base + to, raw_id)
        elif to is not None and score is not None:
            self.redis.zadd(self.base + to, {raw_id: score})
        self.redis.zadd(self.base + "marker", {"0": 0})
        self.redis.hsetnx(self.base + "meta", "opts.maxLenEvents", "10000")

    async def until(self, look: Callable[[], Any], what: str, *, within_s: float = PATIENCE_S) -> Any:
        """The first true answer of `look`; only for what no event tells, such as the server's own lists."""
        try:
            async with asyncio.timeout(within_s):
                while not (answer := look()):  # noqa: ASYNC110 - the server tells nobody
                    await asyncio.sleep(0.005)
        except TimeoutError:
            raise AssertionError(f"{what}: not within {within_s} s") from None
        return answer


class Gate:
    """A handler that says when it runs and waits until it is let go."""

    def __init__(self, value: Any = None) -> None:
        self.value = value
        self.entered: list[Job] = []
        self.cancelled: list[Job] = []
        self._entered = asyncio.Event()
        self._open = asyncio.Event()

    async def __call__(self, job: Job) -> Any:
        self.entered.append(job)
        self._entered.set()
        try:
            await self._open.wait()
        except asyncio.CancelledError:
            self.cancelled.append(job)
            raise
        return self.value

    def open(self) -> Self:
        self._open.set()
        return self

    async def reached(self, count: int = 1, *, within_s: float = PATIENCE_S) -> Job:
        """Wait until so many jobs run; returns the latest."""
        try:
            async with asyncio.timeout(within_s):
                while len(self.entered) < count:
                    self._entered.clear()
                    await self._entered.wait()
        except TimeoutError:
            raise AssertionError(f"{len(self.entered)} of {count} jobs started within {within_s} s") from None
        return self.entered[count - 1]


async def nothing(job: Job) -> None:
    """A handler that succeeds at once."""


async def echo(job: Job) -> Any:
    """A handler that returns what it was given."""
    return job.data


class Failing:
    """A handler that raises the given errors one after the other, then returns `value`."""

    def __init__(self, *errors: BaseException, value: Any = None) -> None:
        self._errors = list(errors)
        self.value = value
        self.runs = 0

    async def __call__(self, job: Job) -> Any:
        self.runs += 1
        if self._errors:
            raise self._errors.pop(0)
        return self.value


async def soon(awaitable: Any, *, within_s: float = PATIENCE_S) -> Any:
    """Await with a bound, so that a broken promise fails the test instead of hanging it."""
    async with asyncio.timeout(within_s):
        return await awaitable


def load(text: str) -> Any:
    return json.loads(text)


def ids_of(jobs: Iterable[Job]) -> list[str]:
    return [job.id for job in jobs]
