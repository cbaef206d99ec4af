"""huey on Redis with blocking pops and thread workers; results are switched off unless asked for."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import harness  # type: ignore[import-not-found]  # beside this file, which is run as a script
from huey import RedisHuey  # type: ignore[import-not-found]  # only in the environment of this file


class Huey:
    def __init__(self, task: Any) -> None:
        self.task = task
        wants = task.wants_result
        url = f"{task.url}?max_connections=1000"  # one per thread; redis-py allows 100 by default
        self.huey = RedisHuey(task.queue, url=url, results=wants, store_none=wants, notify_result=wants)
        self.handle_data: Any = None
        self.bench = self.huey.task(name="bench", retries=task.attempts - 1, retry_delay=0, context=True)(self.handle)

    def handle(self, data: Any, task: Any = None) -> None:
        self.handle_data(data, self.task.attempts - 1 - task.retries)

    async def open(self) -> None:
        self.huey.storage.conn.ping()

    async def add(self, data: Any) -> Any:
        if self.task.due_at is None:
            return self.bench(data)
        return self.bench.schedule(args=(data,), eta=datetime.fromtimestamp(self.task.due_at, UTC))

    async def add_many(self, many: Sequence[Any]) -> None:
        for data in many:
            await self.add(data)

    async def ask(self, data: Any) -> None:
        added = await self.add(data)
        added.get(blocking=True, timeout=10)

    async def work(self, tally: Any) -> None:
        self.handle_data = harness.blocking_handler(self.task, tally)
        consumer = self.huey.create_consumer(workers=self.task.concurrency, periodic=False)
        consumer.start()


if __name__ == "__main__":
    harness.main(Huey)
