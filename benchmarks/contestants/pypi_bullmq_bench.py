"""PyPI `bullmq`. Variant `pool`: its queues and workers get a redis-py client with a connection pool instead of the
single connection that bullmq makes by itself."""

import asyncio
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import harness  # type: ignore[import-not-found]  # beside this file, which is run as a script
import redis.asyncio
from bullmq import Queue, QueueEvents, Worker  # type: ignore[import-not-found]  # its pins clash with ours


class PypiBullmq:
    def __init__(self, task: Any) -> None:
        self.task = task
        self.queue = Queue(task.queue, {"connection": self._connection()})
        self.finished: dict[str, asyncio.Event] = {}

    def _connection(self) -> Any:
        parts = urlsplit(self.task.url)
        # Blocking reads last longer than redis-py's default socket timeout of 5 s.
        options: Any = {"host": parts.hostname, "port": parts.port, "socket_timeout": None}
        return redis.asyncio.Redis(decode_responses=True, **options) if "pool" in self.task.variant else options

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"attempts": self.task.attempts}
        if "backoff" in self.task.variant:
            options["backoff"] = {"type": "exponential", "delay": 1000}
        if self.task.delay_s is not None:
            options["delay"] = int(self.task.delay_s * 1000)
        return options

    async def open(self) -> None:
        await self.queue.getJobCounts("waiting")
        if self.task.role == "ask":
            self.events = QueueEvents(self.task.queue, {"connection": self._connection(), "lastEventId": "0-0"})
            self.events.on("completed", self._completed)

    def _completed(self, event: dict[str, Any], *_: Any) -> None:
        self.finished.setdefault(event["jobId"], asyncio.Event()).set()

    async def add(self, data: Any) -> Any:
        return await self.queue.add("bench", data, self._options())

    async def add_many(self, many: Sequence[Any]) -> Any:
        return await self.queue.addBulk([{"name": "bench", "data": data, "opts": self._options()} for data in many])

    async def ask(self, data: Any) -> None:
        added = await self.add(data)
        await self.finished.setdefault(added.id, asyncio.Event()).wait()

    async def work(self, tally: Any) -> None:
        handle_data = harness.async_handler(self.task, tally, counts=False)

        async def handle(job: Any, token: str) -> None:
            await handle_data(job.data, job.attemptsMade)

        options = {"connection": self._connection(), "concurrency": self.task.concurrency, "autorun": False}
        worker = Worker(self.task.queue, handle, options)
        worker.on("completed", lambda *_: tally.ended())
        await worker.run()


if __name__ == "__main__":
    harness.main(PypiBullmq)
