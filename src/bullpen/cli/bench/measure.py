"""Measure bullpen against one server, on a queue of its own that is gone afterwards.

In: a connection and sizes. Out: one figure after the other, and the proof that no job was lost on the way. Whatever
happens, the queue is removed. Elsewhere: asking and printing (`command`), comparing with other libraries (`benchmarks/`
beside the package).
"""

from __future__ import annotations

import asyncio
import math
import secrets
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bullpen.queue import Job, Queue
from bullpen.redis import Connection
from bullpen.worker import Worker

QUEUE_PREFIX: Final = "bullpen-bench-"
IN_FLIGHT: Final = 100
BULK: Final = 500
_SETTLED_WITHIN_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    jobs: int
    concurrency: int
    payload_bytes: int

    @property
    def asks(self) -> int:
        """Measurements of a latency, and jobs added one by one: enough for a p99, few enough for a distant server."""
        return max(20, min(500, self.jobs // 10))

    @property
    def steps(self) -> tuple[str, ...]:
        return ("round trip", "one by one", "in flight", "bulk", "drain", "latency", "removing")


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the answer."""

    name: str
    title: str
    value: float
    unit: str

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "title": self.title, "value": round(self.value, 3), "unit": self.unit}


class JobsMissing(Exception):
    """What came out is not what went in: no figure would mean anything."""


class Bench:
    """All measurements on one server."""

    def __init__(self, connection: Connection, prefix: str, sizes: Sizes) -> None:
        name = f"{QUEUE_PREFIX}{secrets.token_hex(6)}"
        self.queue_name = f"{{{name}}}" if connection.is_cluster else name
        self._connection, self._prefix, self._sizes = connection, prefix, sizes
        self._queue = Queue(self.queue_name, connection=connection, prefix=prefix)
        self._data = {"p": "x" * max(0, sizes.payload_bytes - len('{"p":""}'))}
        self._added: list[str] = []
        self._completed: list[str] = []

    async def run(self) -> AsyncIterator[tuple[str, list[Figure]]]:
        """The figures of each step of `Sizes.steps`, when it is done."""
        try:
            yield "round trip", await self._round_trip()
            yield "one by one", await self._one_by_one()
            yield "in flight", await self._in_flight()
            yield "bulk", await self._bulk()
            yield "drain", await self._drain()
            yield "latency", await self._latency()
            self._compare()
        finally:
            await self._remove()
        yield "removing", []

    async def _round_trip(self) -> list[Figure]:
        door = self._connection.shared_door(self._queue.keys.base)
        await door.call("PING")
        taken_ms = []
        for _ in range(self._sizes.asks):
            began = time.perf_counter()
            await door.call("PING")
            taken_ms.append((time.perf_counter() - began) * 1000)
        return _times("round_trip", "round trip to the server", taken_ms)

    async def _one_by_one(self) -> list[Figure]:
        began = time.perf_counter()
        for _ in range(self._sizes.asks):
            self._note([await self._queue.add("bench", self._data)])
        return [_rate("add_one_by_one", "add one by one", self._sizes.asks, began)]

    async def _in_flight(self) -> list[Figure]:
        left = iter(range(self._sizes.jobs))

        async def lane() -> None:
            for _ in left:
                self._note([await self._queue.add("bench", self._data)])

        began = time.perf_counter()
        await asyncio.gather(*(lane() for _ in range(IN_FLIGHT)))
        return [_rate("add_in_flight", f"add, {IN_FLIGHT} in flight", self._sizes.jobs, began)]

    async def _bulk(self) -> list[Figure]:
        began = time.perf_counter()
        for done in range(0, self._sizes.jobs, BULK):
            self._note(await self._queue.add_many([("bench", self._data)] * min(BULK, self._sizes.jobs - done)))
        return [_rate("add_bulk", "add in bulk", self._sizes.jobs, began)]

    async def _drain(self) -> list[Figure]:
        wanted, done = len(self._added), asyncio.Event()
        began = 0.0

        async def handle(job: Job) -> None:
            nonlocal began
            began = began or time.perf_counter()

        def completed(job: Job, _: bytes) -> None:
            self._completed.append(job.id)
            if len(self._completed) >= wanted:
                done.set()

        worker = self._worker(handle, self._sizes.concurrency)
        worker.on("completed", completed)
        async with worker, asyncio.timeout(_SETTLED_WITHIN_S + wanted / 100):
            await done.wait()
            figure = _rate("drain", f"run no-op jobs, concurrency {self._sizes.concurrency}", wanted, began)
        return [figure]

    async def _latency(self) -> list[Figure]:
        """On an idle queue; the pause between two jobs lets the worker fall asleep again."""
        begun: dict[str, float] = {}

        async def handle(job: Job) -> None:
            begun[job.id] = time.perf_counter()

        to_start, to_result = [], []
        worker = self._worker(handle, 10)
        worker.on("completed", lambda job, _: self._completed.append(job.id))
        async with worker:
            for _ in range(self._sizes.asks):
                began = time.perf_counter()
                job = await self._queue.add("bench", self._data)
                self._note([job])
                await job.result(timeout=int(_SETTLED_WITHIN_S * 1000))
                to_result.append((time.perf_counter() - began) * 1000)
                to_start.append((begun[job.id] - began) * 1000)
                await asyncio.sleep(0.003)
        return [
            *_times("latency_start", "idle queue: add until the handler starts", to_start),
            *_times("latency_result", "idle queue: add until the result is seen", to_result),
        ]

    def _worker(self, handle: Any, concurrency: int) -> Worker:
        return Worker(
            self.queue_name, handle, connection=self._connection, prefix=self._prefix, concurrency=concurrency
        )

    def _note(self, jobs: Sequence[Job]) -> None:
        self._added += [job.id for job in jobs]

    def _compare(self) -> None:
        if len(self._completed) != len(self._added) or set(self._completed) != set(self._added):
            raise JobsMissing(
                f"{len(self._added)} jobs were added and {len(set(self._completed))} completed; please report this"
            )

    async def _remove(self) -> None:
        """Nothing of ours stays on the server. Also after Ctrl-C, while a worker may not have let go yet."""
        await self._queue.obliterate(force=True)
        await self._queue.close()


def _rate(name: str, title: str, jobs: int, began: float) -> Figure:
    return Figure(name, title, jobs / max(time.perf_counter() - began, 1e-9), "jobs/s")


def _times(name: str, title: str, taken_ms: list[float]) -> list[Figure]:
    ordered = sorted(taken_ms)
    p99 = ordered[min(len(ordered) - 1, math.floor(len(ordered) * 0.99))]
    return [
        Figure(f"{name}_p50", f"{title}, p50", statistics.median(ordered), "ms"),
        Figure(f"{name}_p99", f"{title}, p99", p99, "ms"),
    ]
