"""rq with its worker that does not fork, one job at a time."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import harness  # type: ignore[import-not-found]  # beside this file, which is run as a script
import redis
from rq import Queue, Retry, SimpleWorker, get_current_job  # only in its environment

_handle: Any = None


def bench(data: Any) -> None:
    """rq finds handlers by their names."""
    job = get_current_job()
    first_time = job is not None and job.retries_left is not None and job.retries_left > 0
    _handle(data, 0 if first_time else 1)


class Rq:
    def __init__(self, task: Any) -> None:
        self.task = task
        self.connection = redis.Redis.from_url(task.url)
        self.queue = Queue(task.queue, connection=self.connection)
        self.options: dict[str, Any] = {"result_ttl": 60 if task.wants_result else 0}
        if task.attempts > 1:
            self.options["retry"] = Retry(max=task.attempts - 1)

    async def open(self) -> None:
        self.connection.ping()

    async def add(self, data: Any) -> Any:
        if self.task.due_at is None:
            return self.queue.enqueue("rq_bench.bench", data, **self.options)
        return self.queue.enqueue_at(
            datetime.fromtimestamp(self.task.due_at, UTC), "rq_bench.bench", data, **self.options
        )

    async def add_many(self, many: Sequence[Any]) -> None:
        if self.task.due_at is not None:
            for data in many:
                await self.add(data)
            return
        self.queue.enqueue_many([Queue.prepare_data("rq_bench.bench", (data,), **self.options) for data in many])

    async def ask(self, data: Any) -> None:
        added = await self.add(data)
        while added.get_status() != "finished":  # noqa: ASYNC110 - rq tells nobody
            await asyncio.sleep(0.0002)

    async def work(self, tally: Any) -> None:
        import rq_bench  # type: ignore[import-not-found]  # this file, under the name rq knows it by

        rq_bench._handle = harness.blocking_handler(self.task, tally)
        worker = SimpleWorker([self.queue], connection=self.connection)
        worker.work(with_scheduler=self.task.handler == "noop" and "delayed" in self.task.variant)


if __name__ == "__main__":
    harness.main(Rq)
